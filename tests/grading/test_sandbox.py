"""In grading's sandbox an answer finds the system and its own folder: no course, no grader, no network, no one else."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.runner.worker import confine_workers
from course_lib.grading import sandbox
from course_lib.home import ROOT
from tests.checker.runner import test_graphs, test_ranks
from tests.checker.samples import ADD, ADD_CELL, DOUBLE

works = pytest.mark.skipif(sandbox.why_not() is not None, reason=f"no sandbox on this machine: {sandbox.why_not()}")


@pytest.fixture(scope="module", params=["with Landlock", "bubblewrap alone"])
def confined(request):
    """Workers in the sandbox; in the second round as on a kernel without Landlock, so that bubblewrap must suffice."""
    before = os.environ.get("COURSE_ISOLATION")
    if request.param == "bubblewrap alone":
        os.environ["COURSE_ISOLATION"] = "off"
    confine_workers(sandbox.confined)
    yield request.param
    confine_workers(None)
    if before is None:
        os.environ.pop("COURSE_ISOLATION", None)
    else:
        os.environ["COURSE_ISOLATION"] = before


def verdict_of(*lines, task=DOUBLE):
    """The verdict on an answer that is right but does something else first."""
    deed = "\n    ".join(lines)
    return judge(task, f"import os, sys, subprocess, socket\ndef double(x):\n    {deed}\n    return 2 * x\n")


@works
def test_right_answers_pass_and_wrong_ones_are_named(confined):
    assert judge(ADD, ADD_CELL).passed
    assert judge(ADD, ADD_CELL.replace("x_stride, mask=mask) +", "x_stride, mask=mask) -")).mistake == "subtracts"


@works
def test_ranks_find_each_other_and_graphs_are_compiled_in_the_sandbox(confined):
    assert judge(test_ranks.MEAN, test_ranks.RIGHT).passed
    assert judge(test_ranks.MEAN, test_ranks.with_lines("pass")).mistake == "not_reduced"
    verdict = judge(test_graphs.LAYER, test_graphs.ONE_GRAPH)
    assert verdict.passed and "made 1 graph" in verdict.message, verdict


@works
@pytest.mark.parametrize("folder", ["solutions", "exercises", "tests", "notebooks", "course_lib/grading", ".git"])
def test_nothing_of_the_course_is_there(confined, folder):
    assert (ROOT / folder).is_dir()
    assert verdict_of(f"assert not os.path.exists({str(ROOT / folder)!r})").passed


@works
def test_of_the_course_only_the_workers_own_files_are_there(confined):
    names = {"isolation.py", "child.py", "wire.py", "meter.py"}
    verdict = verdict_of(
        "found = []",
        f"for folder, inner, files in os.walk({str(ROOT)!r}):",
        "    inner[:] = [name for name in inner if not name.startswith('lib')]  # an environment's packages: thousands",
        "    found += files",
        "print(sorted(f for f in found if f.endswith('.py')))",
    )
    assert verdict.passed, verdict
    seen = set(eval(verdict.printed.splitlines()[0]))
    assert seen <= {path.name for folder in sandbox.WORKER_FILES for path in (ROOT / folder).rglob("*.py")}
    assert seen >= names or confined == "with Landlock"


@works
def test_neither_home_nor_the_submissions_nor_the_graders_variables_are_there(confined, tmp_path, monkeypatch):
    (tmp_path / "other_student.ipynb").write_text("secret")
    monkeypatch.setenv("A_TOKEN", "secret")
    confine_workers(None)
    confine_workers(sandbox.confined)  # a worker that starts now would inherit it
    assert verdict_of("assert 'A_TOKEN' not in os.environ").passed
    for path in (tmp_path, Path.home() / ".ssh", "/etc/shadow", "/var", "/opt", "/srv", "/mnt"):
        assert verdict_of(f"assert not os.path.exists({str(path)!r})").passed, path


@works
@pytest.mark.parametrize(
    "deed",
    [
        "open('/usr/new', 'w')",
        "open('/new', 'w')",
        "open('/dev/new', 'w')",
        "open('/proc/sys/kernel/core_pattern', 'w')",
        "open('/proc/self/oom_score_adj', 'w')",
        f"open({str(Path(sys.prefix) / 'pyvenv.cfg')!r}, 'a')",
        f"open({str(ROOT / sandbox.WORKER_FILES[1])!r}, 'a')",
        "open(f'/proc/{os.getppid()}/mem', 'rb')",
        "open(f'/proc/{os.getppid()}/environ', 'rb').read()",
        "os.listdir(f'/proc/{os.getppid()}/fd')",
        "os.listdir('/proc/1/root')[0] == 'work' and open('/proc/1/root/etc/shadow')",
        "subprocess.run(['mount', '-t', 'tmpfs', 'x', '/tmp'], check=True)",
        "subprocess.run(['mount', '-o', 'remount,rw', '/usr'], check=True)",
        "os.chroot('/tmp')",
        "os.mknod('disk', 0o60600, os.makedev(8, 0))",
        "socket.create_connection(('1.1.1.1', 53), timeout=2)",
        "socket.getaddrinfo('example.com', 80)",
        "import ctypes; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    ],
)
def test_what_leads_out_fails(confined, deed):
    verdict = verdict_of(deed)
    assert verdict.outcome == "error", verdict


@works
def test_the_graders_own_ports_are_out_of_reach(confined):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert verdict_of(f"socket.create_connection(('127.0.0.1', {port}), timeout=2)").outcome == "error"


@works
def test_processes_outside_are_not_seen(confined):
    verdict = verdict_of("print(len([p for p in os.listdir('/proc') if p.isdigit()]))")
    assert int(verdict.printed.split()[0]) <= 3 if verdict.printed else confined == "with Landlock"


@works
def test_nothing_is_left_for_the_next_answer(confined):
    verdict_of(
        "for folder in ('/tmp', '/dev/shm', '.'):",
        "    try: open(folder + '/left', 'w').write('x')",
        "    except OSError: pass",
        "subprocess.Popen(['sleep', '777124'], start_new_session=True)",
    )
    verdict = verdict_of(
        "assert not any(os.path.exists(f + '/left') for f in ('/tmp', '/dev/shm', '.'))",
        "commands = [open(f'/proc/{p}/cmdline', 'rb').read() for p in os.listdir('/proc') if p.isdigit()]",
        "assert not [command for command in commands if b'777124' in command]",
    )
    assert verdict.passed, verdict


@works
@pytest.mark.parametrize(
    "deed",
    [
        "while True: os.fork()",
        "while True: subprocess.Popen(['sleep', '60'])",
        "while True: os.fork() or os.setsid()",
    ],
)
def test_processes_without_end_are_ended_and_the_next_check_works(confined, deed):
    verdict = verdict_of(deed)
    assert verdict.outcome in ("error", "timeout", "crashed") and not verdict.passed
    assert verdict_of("pass").passed


@works
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "."])
def test_a_disk_cannot_be_filled(confined, folder):
    verdict = verdict_of(
        "import resource",
        "try:",
        f"    for i in range(40): open(f'{folder}/{{i}}', 'wb').write(bytes(64 << 20))",
        "except OSError as error: raise RuntimeError('stopped') from error",
        "raise ValueError('2.5 GB were written')",
        task=replace(DOUBLE, limits=replace(DOUBLE.limits, seconds=60.0)),  # a busy disk takes its time
    )
    assert verdict.outcome == "error" and "2.5 GB" not in verdict.message
    assert verdict_of("pass").passed


@works
def test_many_processes_do_not_get_the_memory_that_one_may_not_have(confined):
    verdict = verdict_of(
        "import time",
        "for _ in range(4): os.fork()",
        "block = bytearray(200 << 20)",
        "time.sleep(2)",
    )
    assert verdict.outcome == "error" and verdict.mistake in ("out_of_memory", None), verdict
    assert verdict_of("pass").passed


@works
def test_results_without_end_do_not_fill_the_judge(confined):
    verdict = verdict_of(
        "import gc",
        "import struct",
        "fd = next(o.pipe for o in gc.get_objects() if type(o).__name__ == 'Child')",
        "block = bytes(16 << 20)",
        "while True: os.write(fd, struct.pack('<Q', len(block)) + block)",
    )
    assert verdict.outcome in ("error", "crashed", "timeout"), verdict
    assert verdict_of("pass").passed


def test_a_machine_without_bubblewrap_is_told_what_to_install_and_what_else_there_is(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert "not installed" in sandbox.why_not() and "--unsandboxed" in sandbox.why_not()
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    assert "Linux only" in sandbox.why_not() and "--unsandboxed" in sandbox.why_not()


def test_a_bubblewrap_that_may_not_make_a_sandbox_is_said_with_its_reason(monkeypatch, tmp_path):
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox._privileges.cache_clear()
    try:
        assert "Permission denied" in sandbox.why_not() and "--unsandboxed" in sandbox.why_not()
    finally:
        sandbox._privileges.cache_clear()


def test_a_course_below_a_system_folder_is_hidden_again(monkeypatch):
    """Where the course lies in /usr/local, say, showing the system must not show the answers."""
    monkeypatch.setattr(sandbox, "_shown", lambda: ["/usr", str(ROOT.parent), str(ROOT / ".venv")])
    command = sandbox._bwrap(sandbox.MODERN)
    pairs = list(zip(command, command[1:]))
    seen, hidden = pairs.index(("--ro-bind-try", str(ROOT.parent))), pairs.index(("--tmpfs", str(ROOT)))
    assert seen < hidden < pairs.index(("--ro-bind", str(ROOT / ".venv")))
