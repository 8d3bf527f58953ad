"""The compiler's processes, from outside: started when needed, kept for the next kernels, replaced when they die.

One holds Triton ready and compiles each kernel in a child of its own (see `worker.py`): a crash of the compiler costs
one kernel. Time is limited in seconds of the processor, which other programs on the machine do not use up.
"""

import atexit
import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.hardware import signals

WALL_PER_PROCESSOR_SECOND = 20  # a compiler that waits for ever, rather than computes, is ended after so much longer
WORKER = Path(__file__).with_name("worker.py")


class _Ended(Exception):
    """The process is gone, or did not answer; the text says which."""


class _Process:
    """One running `worker.py`, with the environment that it was started in."""

    def __init__(self, environment: dict[str, str]):
        self.environment, self.owner = environment, os.getpid()
        ours, theirs = socket.socketpair()
        self.popen = subprocess.Popen(
            [sys.executable, str(WORKER), str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt of the notebook is not meant for it
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    def compile(self, request: bytes, processor_seconds: float) -> dict:
        try:
            self.connection.send_bytes(pickle.dumps((request, processor_seconds)))
            if not self.connection.poll(WALL_PER_PROCESSOR_SECOND * processor_seconds):
                raise _Ended(f"was not done after {WALL_PER_PROCESSOR_SECOND * processor_seconds:g} s")
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            number = signals.signal_of(self.popen.wait())
            ended = signals.died_of(number, compiled=True) if number else f"ended with status {self.popen.returncode}."
            raise _Ended(ended) from error

    def is_usable(self, environment: dict[str, str]) -> bool:
        return self.owner == os.getpid() and self.environment == environment and self.popen.poll() is None

    def stop(self) -> None:
        self.connection.close()  # which a worker takes for its end
        if self.owner == os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


_idle: list[_Process] = []
_lock = threading.Lock()


@atexit.register
def stop_idle() -> None:
    """End the processes that wait for kernels; the next kernel starts one anew."""
    with _lock:
        while _idle:
            _idle.pop().stop()


def compile_share(requests: list[bytes], processor_seconds: float) -> list[dict]:
    """What the compiler says to each pickled request of `prepare`, one after the other in one process."""
    process: _Process | None = None
    results = []
    try:
        for request in requests:
            process = process or _take()
            try:
                answer = process.compile(request, processor_seconds)
            except _Ended as ended:
                process.stop()
                process, answer = None, _crash(f"the compiler's process {ended}")
            results.append(_told(answer, processor_seconds))
    except BaseException:  # an interrupt: what is under way would answer the next request
        if process is not None:
            process.stop()
        raise
    if process is not None:
        with _lock:
            _idle.append(process)
    return results


def _take() -> _Process:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what Triton does up to 3.9; said aloud, it doesn't warn
    environment.pop("PYTEST_CURRENT_TEST", None)  # another one in every test
    with _lock:
        while _idle:
            process = _idle.pop()
            if process.is_usable(environment):
                return process
            process.stop()
    return _Process(environment)


def _told(answer: dict, processor_seconds: float) -> dict:
    """An answer in which a child's end is put into words."""
    if "ended" not in answer:
        return answer
    status, printed = answer["ended"], answer["printed"].strip()
    number = signals.signal_of(status)
    if number == signal.SIGXCPU:
        return _crash(f"the compiler was not done after {processor_seconds:g} s of processor time")
    ended = signals.died_of(number, compiled=True) if number else f"ended with status {status}."
    return _crash(f"the compiler's process {ended}{f' It printed: {printed}' if printed else ''}")


def _crash(message: str) -> dict:
    return {"error": {"kind": "crash", "message": message, "line_in_kernel": None, "diagnostics": ""}}
