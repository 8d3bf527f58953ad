"""The child that has opened the GPU before there is a job: one for each job, confined, and replaced when it dies.

There is no GPU here: what opens one is replaced, and the job runs on the CPU.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from course_lib.checker.runner.process import wire
from course_lib.checker.specification.exercise import Limits
from course_lib.home import ROOT

PROGRAM = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT / "course_lib/checker/runner/process")!r})
import main, forked  # `main` first: it finds what the others import

def open_the_gpu(device="cuda"):
    with open(os.environ["OPENED"], "a") as file:
        file.write(f"{{os.getpid()}}\\n")

forked.open_the_gpu, forked.use_once = open_the_gpu, lambda device: None
main.torch.set_num_threads(1)
main._Worker(main.Connection(int(sys.argv[1])), None, opens_gpu=True).serve()
"""
CELL = "import os\ndef who(x):\n    return [os.getpid(), os.getppid()]\n"
BROKEN = "import os\ndef who(x):\n    os.kill(os.getpid(), 9)\n"
CURIOUS = f"""
def who(x):
    try:
        return open({str(ROOT / "README.md")!r}).read(1)
    except OSError:
        return "closed"
"""


class _Worker:
    def __init__(self, folder: Path):
        ours, theirs = socket.socketpair()
        self.opened = folder / "opened"
        self.opened.touch()
        environment = {**os.environ, "OPENED": str(self.opened), "TRITON_CACHE_DIR": str(folder)}
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd="/")
        theirs.close()
        self.connection = Connection(ours.detach())

    def pids(self, number: int) -> list[int]:
        """Who has opened the GPU so far, once so many have."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(self.opened.read_text().split()) < number:
            time.sleep(0.01)
        return [int(pid) for pid in self.opened.read_text().split()]

    def run(self, cell: str, gpu: bool = True) -> tuple[object, dict]:
        """What an answer returned, and how its child ended."""
        limits = asdict(Limits()) | {"seconds": 60.0, "memory_bytes": 0, "compiles": None, "front_end": False}
        limits |= {"gpu": gpu, "compiled": False, "ranks": 0}
        case = {"entry": "who", "args": [1], "driver": None, "compiled": False, "order": "ascending", "later_of": None}
        job = {"exercise": "90.1", "source": cell, "entries": {"who": "who"}, "device": "cpu", "undefined_lanes": True}
        case |= {"memory_of": None, "baseline": None}
        self.connection.send_bytes(json.dumps(limits).encode())
        self.connection.send_bytes(wire.encode(job | {"runs": 1, "cases": [case]}, apart=True))
        result = None
        while True:
            message = self.connection.recv_bytes()
            if message[:1] == b"E":
                return result, json.loads(message[1:])
            frame = wire.decode(message[1:])
            assert frame["kind"] in ("start", "case", "done"), frame
            result = frame.get("result", result)


@pytest.fixture
def worker(tmp_path):
    started = _Worker(tmp_path)
    yield started
    started.connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(started.process.pid, signal.SIGKILL)
    started.process.wait()


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_child_has_opened_the_gpu_before_its_job_comes_and_runs_one(worker):
    (first,) = worker.pids(1)
    (ran, parent), ending = worker.run(CELL)
    assert (ran, parent) == (first, worker.process.pid)
    assert ending["whole"] and ending["exit_status"] == 0 and not ending["timeout"]
    second = worker.pids(2)[1]
    assert worker.run(CELL)[0][0] == second != first
    worker.pids(3)
    assert not _is_there(first) and not _is_there(second)


def test_one_that_died_while_it_waited_is_replaced(worker):
    (waiting,) = worker.pids(1)
    os.kill(waiting, signal.SIGKILL)
    while Path(f"/proc/{waiting}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    (ran, _), ending = worker.run(CELL)
    assert ending["whole"] and ran != waiting


def test_an_answer_that_crashes_there_takes_no_other_with_it(worker):
    worker.pids(1)
    result, ending = worker.run(BROKEN)
    assert result is None and ending["signal"] == 9 and not ending["whole"]
    assert worker.run(CELL)[0][0] == worker.pids(2)[1]


def test_a_job_that_needs_no_gpu_runs_in_a_child_that_never_opened_it(worker):
    first = worker.pids(1)[0]
    (ran, _), _ = worker.run(CELL, gpu=False)
    assert ran not in worker.pids(2)
    assert not _is_there(first), "nothing stands beside a stranger's answer that it could reach"


def test_it_is_confined_like_every_child(worker):
    from course_lib.checker.runner.process.isolation import landlock_version

    result, _ = worker.run(CURIOUS)
    assert result == ("closed" if landlock_version() else "#")


def test_it_ends_with_the_worker(worker):
    (waiting,) = worker.pids(1)
    worker.connection.close()
    worker.process.wait(60)
    deadline = time.monotonic() + 60
    while _is_there(waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_there(waiting)
