"""The worker's own program: it runs answers, and holds none.

Started as a script: `python main.py FD TRAFFIC_FOLDER COURSE_ROOT [ARCHITECTURE]`. It imports PyTorch and Triton once,
then forks one child for every check (see `child`); when that crashes, hangs or prints without end, only the child
dies. With a GPU's architecture, 90 for (9, 0), the next child opens the GPU before there is a job for it. The course
itself is not importable here, and where the kernel helps not readable either (see `isolation`): no oracle, solution or
library kernel. The files of this folder therefore import nothing of it but each other and those of `checker/common`.

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
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "common"))  # `main` takes it out again

import graphs
import pace
import sandboxed
import torch
import whereabouts
from ahead import SHARE
from forked import END_OF_FRAMES, Place, compile_ahead, run, stand_by
from observing import Observer
from stand_in import stand_in_for_a_gpu

FRAME_LIMIT = 3 << 30
FRAMES_LIMIT = 512 << 20  # of a check on the CPU, all frames together: what the judge must hold
TICK = 0.05  # seconds between two counts of a sandboxed answer's processes
LOOKS = 5  # TICK apart, after which a child that was never computing waits
PATIENCE = 3  # times a limit is how long a child may take that other programs keep from computing (see also `pace`)


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


def _still_owed(pid: int, seconds: float, gpu: bool = False, unread: bool = False) -> float:
    """How much of so many seconds of a processor a child, or one of its ranks, that wants to compute has not had.

    What a compiler that it has started computes is its own. 0 for one that waits: the clock alone would stop an answer
    for what other programs do. Whoever computes also waits for a moment, for a page, so it is looked at several times.
    One that uses a GPU also waits in its driver, for as long as others use it. If something of it is `unread`, it may
    wait for a full pipe, and so for us.
    """
    owed = [_still_owed(rank, seconds, gpu, unread) for rank in whereabouts.ranks_of(pid)]
    used, wants = 0.0, False
    for _ in range(LOOKS):
        used, states = whereabouts.computed(pid)
        wants = unread or "R" in states or gpu and ("D" in states or _is_busy())
        if wants or not states:
            break
        time.sleep(TICK)
    owed.append(seconds - used if wants else 0.0)
    return max(owed, default=0.0)


def _is_busy() -> bool:
    """Whether more programs than there are cores want to compute."""
    return int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) > (os.cpu_count() or 1)


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


class _Forked:
    """A process that the worker has forked, with the worker's ends of its pipes.

    Args:
        task: what it does there; gets its `Place` and the descriptors that it must close.
        private: descriptors of the worker's own.
        ranks: processes that it will start, whose whereabouts are asked for as well.
    """

    def __init__(self, task: Callable[[Place, tuple], None], private: tuple, ranks: int = 0):
        self.frames, frames_write = os.pipe()
        with contextlib.suppress(OSError, AttributeError):  # more than Linux's 64 KiB at a time
            fcntl.fcntl(frames_write, fcntl.F_SETPIPE_SZ, 1 << 20)
        self.output, output_write = os.pipe()
        self.folder = Path(tempfile.mkdtemp(prefix="course-check-"))
        # Where the child says, when it is asked, what it is doing: each of its ranks in a file of its own.
        self.stacks: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(max(1, ranks))]
        self.jobs: Connection | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                place = Place(frames_write, output_write, self.folder, self.stacks)
                task(place, (*private, self.frames, self.output))
                status = 0
            finally:
                os._exit(status)
        os.close(frames_write)
        os.close(output_write)

    def close(self) -> None:
        """Forget what was there for it; the process itself has ended."""
        for stack in self.stacks:
            stack.close()
        os.close(self.frames)
        os.close(self.output)
        if self.jobs is not None:
            self.jobs.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end(self) -> None:
        """Kill it, whatever it is doing."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.close()


class _Worker:
    """The process that stays warm: takes jobs, forks, relays frames, enforces the limits.

    Args:
        connection: to the judge.
        traffic: the meter; None without Triton.
        opens_gpu: whether to keep a child at hand that has opened the GPU already. Until it gets a job nobody's code
            has run in it; each runs one job, and ends.
    """

    def __init__(self, connection: Connection, traffic, opens_gpu: bool):
        self.connection, self.traffic, self.opens_gpu = connection, traffic, opens_gpu
        self.compiled: set[str] = set()  # answers, by their hash, whose kernels lie in the compiler's cache
        self.standing_by: _Forked | None = None

    def serve(self) -> None:
        while True:
            if self.opens_gpu and self.standing_by is None:
                self.standing_by = self.fork_with_gpu()
            try:
                limits = json.loads(self.connection.recv_bytes())
                job = self.connection.recv_bytes()
            except (EOFError, OSError):
                return
            self.one(limits, job)

    def fork_with_gpu(self) -> _Forked:
        """A child that opens the GPU and waits for its job."""
        ours, theirs = socket.socketpair()
        private = (self.connection.fileno(), ours.fileno())

        def task(place, private):
            stand_by(self.traffic, Connection(theirs.detach()), place, private)

        forked = _Forked(task, private)
        theirs.close()
        forked.jobs = Connection(ours.detach())
        return forked

    def child_for(self, limits: dict, job: bytes) -> _Forked:
        """A child that runs the job: the one that stands by, where the job is of its kind, else a new one."""
        standing_by, self.standing_by = self.standing_by, None
        alone = limits["gpu"] and not limits["ranks"] and not limits["compiled"]
        for forked in (standing_by, self.fork_with_gpu() if alone and not standing_by else None):
            if forked is None:
                continue
            jobs = forked.jobs
            try:
                if alone and jobs is not None and os.waitpid(forked.pid, os.WNOHANG)[0] == 0:
                    # Meanwhile it opens the GPU, if it has not yet.
                    self.compile_ahead(limits, job, (forked.frames, forked.output, jobs.fileno()))
                    jobs.send_bytes(json.dumps(limits).encode())
                    jobs.send_bytes(job)
                    return forked
            except (OSError, ChildProcessError):  # it died while it waited
                pass
            forked.end()

        def task(place, private):
            run(self.traffic, limits, job, place, private)

        return _Forked(task, (self.connection.fileno(),), limits["ranks"])

    def compile_ahead(self, limits: dict, job: bytes, to_another: tuple[int, ...]) -> None:
        """Have an answer's kernels compiled that have not been; in a sandbox the number of processes is limited.

        to_another: what leads to the child that waits; nothing of it is left open there.
        """
        answer = limits["compiles"]
        if answer is None or answer in self.compiled or sandboxed.inside():
            return

        def task(place, private):
            place.frames = place.output = os.open(os.devnull, os.O_WRONLY)
            compile_ahead(self.traffic, limits, job, place, private)

        started = time.monotonic()
        forked = _Forked(task, (self.connection.fileno(), *to_another))
        while time.monotonic() - started < SHARE * limits["seconds"]:
            if os.waitpid(forked.pid, os.WNOHANG)[0]:
                break
            time.sleep(0.005)
        forked.end()
        limits["compiled_ahead"] = time.monotonic() - started

    def one(self, limits: dict, job: bytes) -> None:
        if limits["front_end"] and self.traffic is not None:
            self.traffic.front_end_is_known()  # tries it once, for all children
        if limits["compiled"]:
            graphs.prepare()
        child = self.child_for(limits, job)
        started = time.monotonic()
        ending, clean = self.relay(child, limits), False
        ending["phases"] = {"compiling": limits.get("compiled_ahead", 0.0), "running": time.monotonic() - started}
        if ending["whole"] and limits["gpu"]:  # a GPU takes its time to take leave of a process that has said it all
            clean = True
            self.connection.send_bytes(b"E" + json.dumps(ending | {"exit_status": 0}).encode())
        self.see_off(child, ending, started + limits["seconds"])
        if limits["compiles"] is not None and (clean or ending["exit_status"] == 0):
            self.compiled.add(limits["compiles"])
        if not clean:
            self.connection.send_bytes(b"E" + json.dumps(ending).encode())

    def relay(self, child: _Forked, limits: dict) -> dict:
        """Pass frames on until the child ends or a limit is reached, and say which."""
        pid, frames, output, stacks = child.pid, child.frames, child.output, child.stacks
        started, seconds, paced = time.monotonic(), limits["seconds"], False
        deadline, latest = started + seconds, started + PATIENCE * seconds
        pending, printed, printed_bytes, finished, whole = bytearray(), bytearray(), 0, False, False
        framed, most_framed = 0, FRAMES_LIMIT if limits["memory_bytes"] else FRAME_LIMIT
        ending: dict = {"timeout": False, "too_much_output": False, "excess": None}
        tick = TICK if sandboxed.inside() else limits["seconds"]
        with selectors.DefaultSelector() as selector:
            selector.register(frames, selectors.EVENT_READ)
            selector.register(output, selectors.EVENT_READ)
            while not finished and selector.get_map():
                left = deadline - time.monotonic()
                if left <= 0 and not paced:  # asked as late as this: most answers are done long before
                    seconds, paced = seconds * pace.slowness(), True
                    latest = started + PATIENCE * seconds
                if left <= 0 and time.monotonic() < latest:
                    owed = _still_owed(pid, seconds, limits["gpu"], bool(selector.select(0)))
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
                        more = self.forward(pending)
                        whole = not more and pending[:8] == END_OF_FRAMES
                        finished = not more or finished
        os.set_blocking(output, False)
        with contextlib.suppress(BlockingIOError, OSError):
            printed = (printed + os.read(output, 64 << 10))[: 64 << 10]
        printed_text = printed.decode("utf-8", "replace")[:8000]
        return ending | {"whole": whole, "signal": None, "exit_status": None, "printed": printed_text}

    def see_off(self, child: _Forked, ending: dict, deadline: float) -> None:
        """Make sure that nothing of a child is left, and note how it ended."""
        self._status = None
        if not (ending["timeout"] or ending["too_much_output"] or ending["excess"]):
            self.let_end(child.pid, deadline)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        status = self._status if self._status is not None else os.waitpid(child.pid, 0)[1]
        sandboxed.clean_up()
        _end_orphans()
        child.close()
        ending["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        ending["exit_status"] = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None

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
    architecture = int(sys.argv[4]) if len(sys.argv) > 4 else None
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [entry for entry in sys.path if not _belongs_to_course(entry, root)]
    os.environ.pop("PYTHONPATH", None)
    torch.set_num_threads(1)
    traffic = None
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        traffic = _load("_course_traffic", traffic_folder)
        traffic.repair_interpreter()
        traffic.recognise_kernels_by_meaning()
        if architecture:
            traffic.prepare_compiler(architecture)
        _warm_up(traffic)
    _adopt_orphans()
    sandboxed.guard(True)
    connection = Connection(fd)
    ready = {"torch": torch.__version__, "triton": getattr(sys.modules.get("triton"), "__version__", None)}
    connection.send_bytes(b"R" + json.dumps(ready).encode())
    _Worker(connection, traffic, opens_gpu=bool(architecture)).serve()


if __name__ == "__main__":
    main()
