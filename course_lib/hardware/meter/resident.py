"""A process that interprets kernels, and stays: `metered`, `log_accesses` and `profile` ask it where this one compiles.

    report = ask(count, job, seconds=300, doing="could not be counted")

It imports PyTorch, Triton and the meter once, which takes seconds, and then forks a child for each job. A child that
crashes, or does not end, costs its own job. It ends when the socket closes, or when nobody has asked for a while.
"""

import contextlib
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from course_lib.hardware import signals
from course_lib.hardware.meter.elsewhere import environment
from course_lib.hardware.meter.traffic import MeterUnavailable
from course_lib.hardware.standing import Ended, Pool

IDLE_SECONDS = 600
START_SECONDS = 100  # for the process to begin, on a busy machine
READY = (
    "course_lib.hardware.meter.metered",
    "course_lib.hardware.meter.access_log",
    "course_lib.hardware.profile.seen",
)

_pool = Pool(["-m", "course_lib.hardware.meter.resident"])


def begin() -> None:
    """Let the process start now, if none waits, so that a later job finds it ready."""
    _pool.begin(environment())


def ask(work: Callable[[dict, Path], Any], job: dict, seconds: float, doing: str) -> Any:
    """What `work(job, folder)` returns over there.

    Args:
        work: a function of a module of the course, which gets the job and an empty folder of its own.
        job: what it needs; its "name" stands in errors.
        seconds: after so long it is ended.
        doing: how an error goes on after the name, as "could not be counted".

    Raises MeterUnavailable where it raises, crashes or does not end; the text says which.
    """
    name, process = job["name"], _pool.take(environment())
    request = pickle.dumps((work.__module__, work.__name__, pickle.dumps(job), seconds))
    try:
        answer = pickle.loads(process.ask(request, START_SECONDS + seconds))
    except Ended as ended:
        process.stop()
        answer = {"late": True} if ended.status is None else {"status": ended.status, "printed": ""}
    except BaseException:  # an interrupt: what is under way would answer the next job
        process.stop()
        raise
    else:
        _pool.give_back(process)
    if "result" in answer:
        return pickle.loads(answer["result"])
    if "late" in answer:
        raise MeterUnavailable(f"{name} did not stop in the interpreter and was ended.")
    number = signals.signal_of(answer["status"])
    why = f"{signals.died_of(number, compiled=False)} " if number else ""
    raise MeterUnavailable(f"{name} {doing} in the interpreter: {why}{answer['printed']}".strip())


def _main(fd: str) -> None:
    connection = Connection(int(fd))
    for module in READY:
        importlib.import_module(module)
    with contextlib.suppress(EOFError, OSError):
        while connection.poll(IDLE_SECONDS):
            connection.send_bytes(pickle.dumps(_in_a_child(*pickle.loads(connection.recv_bytes()))))


def _in_a_child(module: str, work: str, job: bytes, seconds: float) -> dict:
    """The result of a child that may take so long; or how it ended, and what it printed."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        result, stderr = folder / "result", folder / "stderr"
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.setsid()
                os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT), 2)
                function = getattr(importlib.import_module(module), work)
                result.write_bytes(pickle.dumps(function(pickle.loads(job), folder)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        ended = _waited(pid, seconds)
        if ended is None:
            return {"late": True}
        if ended == 0 and result.exists():
            return {"result": result.read_bytes()}
        return {"status": ended, "printed": stderr.read_text(errors="replace").strip()[-2000:]}


def _waited(pid: int, seconds: float) -> int | None:
    """The child's status, or None if it had to be ended."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.02, 2 * pause)
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


if __name__ == "__main__":
    # Under its true name, so that what is pickled here is found there.
    from course_lib.hardware.meter import resident as module

    module._main(sys.argv[1])
