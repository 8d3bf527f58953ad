"""From inside a check an answer reaches its own folder and Python: not the course, the learner or the network."""

import os
import socket
import threading
from pathlib import Path

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.runner.process.isolation import landlock_version
from course_lib.home import ROOT, course_home
from tests.checker.samples import DOUBLE

RIGHT = "    return 2 * x\n"
confined = pytest.mark.skipif(landlock_version() < 1, reason="this kernel has no Landlock")


def outcome_of(*lines):
    """The verdict on an answer that is right but does something else first."""
    return judge(
        DOUBLE, "import os, sys, subprocess, socket\ndef double(x):\n    " + "\n    ".join(lines) + "\n" + RIGHT
    )


def test_no_module_of_the_course_is_importable_or_loaded():
    for name in (
        "course_lib",
        "course_lib.kernels.memory.vector_add",
        "exercises.ch01_memory_hierarchy_and_roofline",
        "solutions",
    ):
        verdict = outcome_of(f"__import__({name!r})")
        assert verdict.outcome == "error" and ("import" in verdict.message or "No module" in verdict.message)
    assert outcome_of(
        "assert not [m for m in sys.modules if m.split('.')[0] in ('course_lib', 'exercises', 'solutions')]"
    ).passed
    inside = f"path == {str(ROOT)!r} or path.startswith({str(ROOT / 'course_lib')!r})"
    assert outcome_of(f"assert not [path for path in sys.path if {inside}]").passed


@confined
@pytest.mark.parametrize(
    "path",
    [
        ROOT / "solutions" / "00_start_here.py",
        ROOT / "exercises" / "ch00_start_here" / "ex1_scale.py",
        ROOT / "course_lib" / "home.py",
        ROOT / "README.md",
    ],
)
def test_no_answer_can_be_read(path):
    assert path.is_file()
    for reading in (
        f"open({str(path)!r}).read()",
        f"subprocess.run(['cat', {str(path)!r}], check=True)",
        f"os.listdir({str(path.parent)!r})",
        f"os.symlink({str(path)!r}, 'link'); open('link').read()",
        f"os.link({str(path)!r}, 'link'); open('link').read()",
    ):
        verdict = outcome_of(reading)
        assert verdict.outcome == "error", f"{reading}: {verdict}"


@confined
def test_the_learners_home_and_progress_stay_out_of_reach(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("mine")
    for deed in (
        f"open({str(secret)!r}).read()",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"os.remove({str(secret)!r})",
        f"open({str(course_home() / 'progress.sqlite3')!r}, 'ab')",
    ):
        assert outcome_of(deed).outcome == "error"
    assert secret.read_text() == "mine" and list(tmp_path.iterdir()) == [secret]


@confined
def test_temporary_files_work_and_are_gone_afterwards():
    verdict = outcome_of(
        "import tempfile",
        "f = tempfile.NamedTemporaryFile('w', delete=False)",
        "f.write('x'); f.close()",
        "print(f.name, open(f.name).read())",
    )
    assert verdict.passed, verdict
    name, content = verdict.printed.split()[:2]
    assert content == "x" and not Path(name).exists()


@pytest.mark.skipif(landlock_version() < 4, reason="this kernel's Landlock does not close TCP")
def test_no_connection_can_be_opened():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.settimeout(5), daemon=True).start()
        port = server.getsockname()[1]
        assert outcome_of(f"socket.create_connection(('127.0.0.1', {port}))").outcome == "error"


@pytest.mark.skipif(landlock_version() < 6, reason="this kernel's Landlock does not hold signals back")
def test_no_process_outside_can_be_signalled():
    assert outcome_of(f"os.kill({os.getpid()}, 0)").outcome == "error"
    assert outcome_of("os.kill(os.getppid(), 9)").outcome == "error"


@confined
def test_the_judges_memory_cannot_be_read():
    assert outcome_of(f"open('/proc/{os.getpid()}/mem', 'rb')").outcome == "error"
    assert outcome_of("open(f'/proc/{os.getppid()}/mem', 'rb')").outcome == "error"


def test_processes_left_behind_are_ended():
    marker = "777123"
    verdict = outcome_of(
        f"subprocess.Popen(['sleep', '{marker}'])",
        f"subprocess.Popen(['sleep', '{marker}'], start_new_session=True)",
        f"if os.fork() == 0: os.setsid(); os.fork(); os.execvp('sleep', ['sleep', '{marker}'])",
    )
    assert verdict.passed, verdict
    running = [p for p in Path("/proc").glob("[0-9]*") if marker.encode() in _command(p)]
    assert not running


def _command(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_isolation_can_be_turned_off_by_name(monkeypatch):
    monkeypatch.setenv("COURSE_ISOLATION", "off")
    assert landlock_version() == 0
