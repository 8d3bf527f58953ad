"""The process that interprets and stays: what a job may do over there without costing the next one."""

import ctypes
import os
import time
from pathlib import Path

import pytest

from course_lib.hardware.meter import resident
from course_lib.hardware.meter.traffic import MeterUnavailable


def process_of(job: dict, folder: Path) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def crash(job: dict, folder: Path) -> None:
    ctypes.string_at(0)


def wait(job: dict, folder: Path) -> None:
    time.sleep(100)


def leave(job: dict, folder: Path) -> tuple[list[str], str | None]:
    found = sorted(path.name for path in folder.iterdir() if path.name != "stderr"), os.environ.get("LEFT_BEHIND")
    (folder / "cell.py").write_text("")
    os.environ["LEFT_BEHIND"] = "1"
    return found


def ask(work, seconds=20, **job):
    return resident.ask(work, {"name": "the function", **job}, seconds, "cannot be run")


def test_each_job_has_a_child_of_its_own_and_leaves_nothing_behind():
    first, second = ask(process_of), ask(process_of)
    assert first[0] != second[0] and first[1] == second[1] != os.getpid()
    assert ask(leave) == ask(leave) == ([], None)


def test_a_crash_and_a_job_without_an_end_cost_themselves_alone():
    before = ask(process_of)[1]
    with pytest.raises(MeterUnavailable, match="the function cannot be run in the interpreter: .*segmentation fault"):
        ask(crash)
    start = time.monotonic()
    with pytest.raises(MeterUnavailable, match="the function did not stop in the interpreter and was ended"):
        ask(wait, seconds=0.5)
    assert time.monotonic() - start < 10
    assert ask(process_of)[1] == before


def test_another_environment_gets_another_process(monkeypatch):
    before = ask(process_of)[1]
    monkeypatch.setenv("COURSE_SOMETHING", "else")
    assert ask(process_of)[1] != before
