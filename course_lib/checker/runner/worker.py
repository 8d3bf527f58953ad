"""The judge's end of a worker: start it, send it a job, survive whatever it does.

A worker is warm (PyTorch and Triton are imported once) and runs every check in a child of its own; see
`process`. There is at most one worker of each kind: "native" runs kernels as this machine does (without a GPU
the compiler only reads them, see `compiling`), "interpreted" always in Triton's interpreter (on a GPU machine, for the
bytes and the bounds).
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from course_lib.checker.runner.process import pace, wire
from course_lib.checker.specification import cells
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Limits
from course_lib.hardware import signals
from course_lib.hardware.device import machine
from course_lib.home import ROOT, course_home

START_SECONDS = 120.0
GRACE_SECONDS = 5.0
# Times its seconds, for a child: a worker compiles before, and may grant them three times, on a processor that is slow.
PATIENCE = 1 + 3 * pace.MOST
_HERE = Path(__file__).resolve().parent


class WorkerDied(RuntimeError):
    """The worker itself, not only a check's child, ended; the next check gets a new one."""


@dataclass
class Ending:
    """How a check's child ended, and the frames that it sent before.

    Attributes:
        frames: decoded messages, in order: cell_error, missing, start, case, compiled, done.
        timeout, too_much_output: the limit that ended it.
        excess: another limit that ended it: "results" (bytes sent back), in a sandbox "processes" or "memory".
        signal: the signal that killed it, if one did.
        exit_status: its exit status otherwise.
        printed: the beginning of what the answer printed.
        line: of a time-out, the line of the cell that was running, where that could be seen.
        compiling: of a time-out, whether Triton's compiler was at work there.
        ranks: of a time-out of several ranks, the line for each, None for one that is not in the cell.
        whole: whether it said that nothing more would come.
        phases: seconds for "compiling" ahead and for "running".
        forged: a message that could not be decoded, described.
    """

    frames: list[dict] = field(default_factory=list)
    timeout: bool = False
    too_much_output: bool = False
    excess: str | None = None
    signal: int | None = None
    exit_status: int | None = None
    printed: str = ""
    line: int | None = None
    compiling: bool = False
    ranks: dict[str, int | None] = field(default_factory=dict)
    whole: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    forged: str | None = None

    @property
    def finished(self) -> bool:
        """Whether the child ran every case and said so."""
        return bool(self.frames) and self.frames[-1].get("kind") in ("done", "cell_error", "missing", "not_callable")


# Given a worker's command and environment, those with which it is started instead: a sandbox around it.
Confinement = Callable[[list[str], dict[str, str]], tuple[list[str], dict[str, str]]]


class Worker:
    """One warm worker process. Not thread-safe by itself; `run` takes a lock.

    Raises:
        CourseError: on a system without `fork` (Windows), where checks cannot run.
    """

    def __init__(self, interpreted: bool):
        if not hasattr(os, "fork"):
            raise CourseError(
                "Checks run in a forked worker, which Windows does not have. Use the course in WSL2, Linux or Colab."
            )
        self.interpreted = interpreted
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None
        self._ready = False

    def start(self) -> None:
        """Start the process without waiting for it; does nothing while it is alive."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        ours, theirs = socket.socketpair()
        # The compiled kernels of strangers stay apart from the notebook's own.
        cache = course_home() / "worker-cache"
        cache.mkdir(exist_ok=True)
        environment = {
            **os.environ,
            "MPLBACKEND": "Agg",
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(cache),
            "CUDA_CACHE_PATH": str(cache),
        }
        environment.pop("TRITON_INTERPRET", None)
        if self.interpreted:
            environment["TRITON_INTERPRET"] = "1"
        traffic = ROOT / "course_lib/hardware/meter/traffic"
        program = str(_HERE / "process" / "main.py")
        command = [sys.executable, program, str(theirs.fileno()), str(traffic), str(ROOT)]
        if not self.interpreted and machine().tier != "none":
            major, minor = machine().compute_capability or (0, 0)
            command.append(str(10 * major + minor))
        if _confinement is not None:
            command, environment = _confinement(command, environment)
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            cwd="/",
        )
        theirs.close()
        self._connection, self._ready = Connection(ours.detach()), False
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        atexit.unregister(self.stop)
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()

    def wait_until_ready(self) -> None:
        """Block until the worker has imported what it needs.

        Raises:
            WorkerDied: it could not start; with the end of what it printed.
        """
        self.start()
        if self._ready:
            return
        message = self._receive(time.monotonic() + START_SECONDS)
        if message[:1] != b"R":
            raise WorkerDied("the worker answered out of turn")
        self._ready = True

    def _receive(self, deadline: float) -> bytes:
        connection = self._connection
        if connection is None:
            raise WorkerDied("it was stopped")
        try:
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise WorkerDied("the worker did not answer in time")
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._died() from error

    def _send(self, message: bytes) -> None:
        if self._connection is None:
            raise WorkerDied("it was stopped")
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._died() from error

    def _died(self) -> WorkerDied:
        """How a process that no longer answers ended, in words."""
        process, printed = self._process, ""
        if process is None:
            return WorkerDied("it was stopped")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)  # its end of the connection closes a moment before it has ended
        if process.poll() is None:
            return WorkerDied("it closed its connection")
        with contextlib.suppress(ValueError):  # another thread's `stop` has closed the pipe
            printed = process.stderr.read()[-2000:].decode(errors="replace").strip() if process.stderr else ""
        number = signals.signal_of(process.returncode)
        ended = signals.died_of(number, compiled=False) if number else f"ended with status {process.returncode}."
        return WorkerDied(f"it {ended}{f' It printed: {printed}' if printed else ''}")

    def run(self, job: dict, limits: Limits, seconds: float, heard: Callable[[dict], None] | None = None) -> Ending:
        """Run one job in a fresh child.

        Args:
            job: see `judge`; a value that `wire.encode` takes.
            limits: memory and output of the child.
            seconds: of the child, on a processor of the usual speed: more on a slower one (see `process.pace`).
            heard: is given every frame when it comes; it must not take long.

        Raises:
            WorkerDied: the worker itself broke; it is replaced at the next call.
        """
        with self._lock:
            try:
                self.wait_until_ready()
                memory = limits.memory_bytes if self.interpreted or job["device"] == "cpu" else 0
                header = {**asdict(limits), "seconds": seconds, "memory_bytes": memory, "compiles": None}
                header["front_end"] = "compile" in job
                header["gpu"] = job["device"] == "cuda"
                header["compiled"] = any(case["compiled"] for case in job.get("cases", ()))
                header["ranks"] = job.get("ranks", 0)
                if header["gpu"] and "jit" in job["source"]:
                    header["compiles"] = hashlib.sha256(cells.meaning(job["source"]).encode()).hexdigest()
                self._send(json.dumps(header).encode())
                self._send(wire.encode(job, apart=True))
                return self._collect(time.monotonic() + PATIENCE * seconds + GRACE_SECONDS, heard)
            except BaseException:  # also an interrupted cell: what runs now must not go on unseen
                self.stop()
                raise

    def _collect(self, deadline: float, heard: Callable[[dict], None] | None) -> Ending:
        ending = Ending()
        while True:
            message = self._receive(deadline)
            if message[:1] == b"F":
                try:
                    frame = wire.decode(message[1:])
                    if not isinstance(frame, dict) or not isinstance(frame.get("kind"), str):
                        raise wire.WireError("a malformed frame")
                    ending.frames.append(frame)
                    if heard is not None:
                        heard(frame)
                except wire.WireError as error:
                    ending.forged = str(error)
            elif message[:1] == b"E":
                for name, value in json.loads(message[1:]).items():
                    setattr(ending, name, value)
                return ending
            else:
                raise WorkerDied("the worker sent something that is no message")


_workers: dict[bool, Worker] = {}
_workers_lock = threading.Lock()
_confinement: Confinement | None = None


def worker(interpreted: bool) -> Worker:
    """This process's worker of the kind asked for, made when first needed."""
    with _workers_lock:
        if interpreted not in _workers:
            _workers[interpreted] = Worker(interpreted)
        return _workers[interpreted]


def confine_workers(confinement: Confinement | None) -> None:
    """From now on start this process's workers inside a sandbox, or with None as ever; those that run are ended."""
    global _confinement
    if confinement is not _confinement:
        _confinement = confinement
        end_workers()


def end_workers() -> None:
    """End this process's workers; the next check starts a new one, in which nobody's code has run yet."""
    with _workers_lock:
        for ended in _workers.values():
            ended.stop()


def start_in_background(interpreted: bool) -> None:
    """Begin to warm a worker up; errors come out at the first check."""
    with contextlib.suppress(CourseError, OSError):
        worker(interpreted).start()
