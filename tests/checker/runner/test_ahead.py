"""Helpers that run cases ahead: each does its share, silently, and none can hold up or harm who started them."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from course_lib.checker.runner.process import ahead


def test_every_case_has_one_helper_and_none_is_timed():
    cases = [{"name": number, "baseline": {"name": "sdpa"}} for number in range(7)]
    parts = ahead.shares(cases, 3)
    assert [[case["name"] for case in part] for part in parts] == [[0, 3, 6], [1, 4], [2, 5]]
    assert not any(case["baseline"] for part in parts for case in part)
    assert all(case["baseline"] for case in cases), "the cases themselves are still to be timed"


@pytest.mark.parametrize(
    "cores, cases, number", [(1, 9, 0), (2, 9, 2), (2, 1, 0), (6, 4, 4), (64, 40, ahead.MOST), (4, 0, 0)]
)
def test_there_are_as_many_helpers_as_cores_and_cases_allow(monkeypatch, cores, cases, number):
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: range(cores), raising=False)
    assert ahead.helpers(cases) == number
    assert ahead.shares([], 0) == []


def _in_a_process_of_its_own(folder: Path, program: str) -> subprocess.CompletedProcess:
    """Helpers are forked, which pytest's own threads would not survive."""
    head = f"import os, signal, sys, time\nsys.path.insert(0, {str(Path(ahead.__file__).parent)!r})\nimport ahead\n"
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program)], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_helpers_run_side_by_side_and_say_nothing(tmp_path):
    done = _in_a_process_of_its_own(
        tmp_path,
        """
        def task(number):
            def run():
                print("noise", flush=True); os.write(2, b"noise")
                open(f"here-{number}", "w").close()
                while not all(os.path.exists(f"here-{other}") for other in range(3)): time.sleep(0.01)
            return run
        ahead.in_helpers([task(number) for number in range(3)], 300)
        print("all met", os.listdir())
        """,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("all met") and done.stdout.count("here-") == 3


def test_helpers_that_crash_raise_or_hang_hold_nothing_up(tmp_path):
    started = time.monotonic()
    done = _in_a_process_of_its_own(
        tmp_path,
        """
        def hang():
            open("pid", "w").write(str(os.getpid()))
            while True: time.sleep(1)
        tasks = [hang, lambda: os.kill(os.getpid(), signal.SIGSEGV), lambda: 1 / 0, lambda: sys.exit(3)]
        ahead.in_helpers(tasks, 1.0)
        print("went on")
        """,
    )
    assert done.stdout == "went on\n" and done.stderr == ""
    assert time.monotonic() - started < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), signal.SIG_DFL)
