"""The worker's own program: it runs answers, and holds none.

Started as a script: `python main.py FD TRAFFIC_FOLDER COURSE_ROOT`. It imports PyTorch and Triton once, then forks one
child for every check (see `child`); when that crashes, hangs or prints without end, only the child dies. The course
itself is not importable here, and where the kernel helps not readable either (see `isolation`): no oracle, solution or
library kernel. The files of this folder therefore import nothing
of it but each other.

Messages to the worker: a JSON header (limits), then the job (see `wire`). Messages back: b"F" + a frame of the child,
and at the end b"E" + JSON on how the child ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import selectors
import shutil
import signal
import struct
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import graphs
import sandboxed
import torch
import whereabouts
from forked import run
from observing import Observer
from stand_in import stand_in_for_a_gpu

FRAME_LIMIT = 3 << 30
FRAMES_LIMIT = 512 << 20  # of a check on the CPU, all frames together: what the judge must hold
TICK = 0.05  # seconds between two counts of a sandboxed answer's processes
PATIENCE = 3  # times a limit is how long a child may take that other programs keep from computing


def _load(name: str, folder: str):
    """A folder as a package of its own: nothing of the course around it can be imported through it."""
    front = str(Path(folder) / "__init__.py")
    spec = importlib.util.spec_from_file_location(name, front, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{front} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _adopt_orphans() -> None:
    """Linux: what a dead child leaves running becomes a child of this process, also when it changed its session."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(36, 1)


def _still_owed(pid: int, seconds: float) -> float:
    """How much of so many seconds of a processor a child, or one of its ranks, that wants to compute has not had.

    0 for one that waits: the clock alone would stop an answer for what other programs do.
    """
    owed = [_still_owed(rank, seconds) for rank in whereabouts.ranks_of(pid)]
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        owed.append(seconds - used if fields[0] == "R" else 0.0)
    return max(owed, default=0.0)


def _end_orphans() -> None:
    """Kill every remaining child, and theirs as they arrive; gives up after five seconds of new ones."""
    deadline = time.monotonic() + 5.0
    children = Path("/proc/self/task") / str(os.getpid()) / "children"
    while children.exists() and time.monotonic() < deadline:
        left = [int(pid) for pid in children.read_text().split()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


class _Worker:
    """The process that stays warm: takes jobs, forks, relays frames, enforces the limits."""

    def __init__(self, connection: Connection, traffic):
        self.connection, self.traffic = connection, traffic
        self.compiled: set[str] = set()  # answers, by their hash, whose kernels lie in the compiler's cache

    def serve(self) -> None:
        while True:
            try:
                limits = json.loads(self.connection.recv_bytes())
                job = self.connection.recv_bytes()
            except (EOFError, OSError):
                return
            self.one(limits, job)

    def one(self, limits: dict, job: bytes) -> None:
        limits["ahead"] = limits["compiles"] is not None and limits["compiles"] not in self.compiled
        if limits["front_end"] and self.traffic is not None:
            self.traffic.front_end_is_known()  # tries it once, for all children
        if limits["compiled"]:
            graphs.prepare()
        frames_read, frames_write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # more than Linux's 64 KiB at a time
            fcntl.fcntl(frames_write, fcntl.F_SETPIPE_SZ, 1 << 20)
        output_read, output_write = os.pipe()
        folder = Path(tempfile.mkdtemp(prefix="course-check-"))
        # Where the child says, when it is asked, what it is doing: each of its ranks in a file of its own.
        stacks: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(max(1, limits["ranks"]))]
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                private = (self.connection.fileno(), frames_read, output_read)
                run(self.traffic, limits, job, frames_write, output_write, private, folder, stacks)
                status = 0
            finally:
                os._exit(status)
        os.close(frames_write)
        os.close(output_write)
        try:
            ending = self.relay(pid, frames_read, output_read, limits, stacks)
        finally:
            for stack in stacks:
                stack.close()
            os.close(frames_read)
            os.close(output_read)
            shutil.rmtree(folder, ignore_errors=True)
        if limits["ahead"] and ending["exit_status"] == 0:
            self.compiled.add(limits["compiles"])
        self.connection.send_bytes(b"E" + json.dumps(ending).encode())

    def relay(self, pid: int, frames: int, output: int, limits: dict, stacks: list[IO[bytes]]) -> dict:
        """Pass frames on until the child ends or a limit is reached; then make sure that nothing of it is left."""
        started = time.monotonic()
        deadline, latest = started + limits["seconds"], started + PATIENCE * limits["seconds"]
        self._status = None
        pending, printed, printed_bytes, finished = bytearray(), bytearray(), 0, False
        framed, most_framed = 0, FRAMES_LIMIT if limits["memory_bytes"] else FRAME_LIMIT
        ending: dict = {"timeout": False, "too_much_output": False, "excess": None}
        tick = TICK if sandboxed.inside() else limits["seconds"]
        with selectors.DefaultSelector() as selector:
            selector.register(frames, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while not finished and selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0 and time.monotonic() < latest:
                    owed = _still_owed(pid, limits["seconds"])
                    if owed > TICK:
                        deadline = min(time.monotonic() + owed, latest)
                        continue
                if left <= 0:
                    ending |= {"timeout": True, **whereabouts.ask_all(pid, stacks)}
                    break
                ending["excess"] = sandboxed.excess(limits)
                if ending["excess"]:
                    break
                for key, _ in selector.select(min(left, tick)):
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        selector.unregister(key.fd)
                        # Frames close when the child is gone; its own children may hold the output open for ever.
                        finished = finished or key.fd == frames
                    elif key.fd == output:
                        printed_bytes += len(data)
                        printed = (printed + data)[: 64 << 10]
                        if printed_bytes > limits["output_bytes"]:
                            ending["too_much_output"] = finished = True
                    else:
                        pending += data
                        framed += len(data)
                        if framed > most_framed:
                            ending["excess"], finished = "results", True
                        finished = not self.forward(pending) or finished
        if not (ending["timeout"] or ending["too_much_output"] or ending["excess"]):
            self.let_end(pid, deadline)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        status = self._status if self._status is not None else os.waitpid(pid, 0)[1]
        sandboxed.clean_up()
        _end_orphans()
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError, OSError):
            printed = (printed + os.read(output, 64 << 10))[: 64 << 10]
        ending["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        ending["exit_status"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        ending["printed"] = printed.decode("utf-8", "replace")[:8000]
        return ending

    _status: int | None = None

    def let_end(self, pid: int, deadline: float) -> None:
        """Wait a moment for a child that has closed its pipe to say how it ended."""
        limit = min(deadline, time.monotonic() + 2.0)
        while time.monotonic() < limit:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._status = status
                return
            time.sleep(0.002)

    def forward(self, pending: bytearray) -> bool:
        """Send every whole frame in `pending` to the judge; False at the stream's end, or when it makes no sense."""
        while len(pending) >= 8:
            (length,) = struct.unpack_from("<Q", pending)
            if length == 0 or length > FRAME_LIMIT:
                return False
            if len(pending) < 8 + length:
                return True
            pending[7] = ord("F")  # the length has been read: its last byte makes room for the message's kind
            self.connection.send_bytes(pending, 7, 1 + length)
            del pending[: 8 + length]
        return True


def _belongs_to_course(entry: str, root: Path) -> bool:
    """Whether a module search path lies in the course itself (an environment inside its folder does not count)."""
    path = Path(entry or ".").resolve()
    return path == root or (root in path.parents and "site-packages" not in path.parts and "lib" not in path.parts)


def _warm_up(traffic) -> None:
    """Pay for what happens once (imports, the meter's self-test, the interpreter's first kernel) before any check."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if interpreted:
        stand_in_for_a_gpu()
    with contextlib.suppress(traffic.MeterUnavailable):
        with traffic.TrafficMeter() if interpreted else traffic.record_launches(), Observer():
            torch.empty(1)


def main() -> None:
    sandboxed.begin()
    fd, traffic_folder, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [entry for entry in sys.path if not _belongs_to_course(entry, root)]
    os.environ.pop("PYTHONPATH", None)
    torch.set_num_threads(1)
    traffic = None
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        traffic = _load("_course_traffic", traffic_folder)
        traffic.repair_interpreter()
        _warm_up(traffic)
    _adopt_orphans()
    sandboxed.guard(True)
    connection = Connection(fd)
    ready = {"torch": torch.__version__, "triton": getattr(sys.modules.get("triton"), "__version__", None)}
    connection.send_bytes(b"R" + json.dumps(ready).encode())
    _Worker(connection, traffic).serve()


if __name__ == "__main__":
    main()
