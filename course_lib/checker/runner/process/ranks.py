"""An answer run as several processes, the ranks of one `torch.distributed` group: gloo on the CPU, NCCL on GPUs.

Each rank runs the whole job with its own arguments, confined like any child. The launcher runs nothing of the answer:
it lets all ranks begin a case together, puts what they report into one report, and ends like a rank that dies.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import datetime
import os
import selectors
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import merging
import wire
from child import Child

OTHERS_SECONDS = 0.3  # after the first error, for ranks that have met one too
GROUP_TIMEOUT = datetime.timedelta(hours=1)  # the check's own limit comes long before
_NAME_THREAD = 15


class RankChild(Child):
    """One rank's part of a job: waits before each case until all ranks have come so far."""

    def __init__(self, traffic, pipe: int, folder: Path, turns: int):
        super().__init__(traffic, pipe, folder)
        self.turns = turns

    def await_turn(self) -> None:
        self.send({"kind": "ready"})
        if not os.read(self.turns, 1):
            os._exit(0)


class _Rank:
    """The launcher's end of one rank."""

    def __init__(self, number: int):
        self.number, self.pid, self.pending = number, 0, bytearray()
        self.inbox: collections.deque[dict] = collections.deque()
        self.frames, self.frames_write = os.pipe()
        self.turns_read, self.turns = os.pipe()

    def receive(self) -> bool:
        """Put the whole messages that have come into the inbox; False at the stream's end.

        Raises:
            WireError: something that is no message.
        """
        data = os.read(self.frames, 1 << 20)
        self.pending += data
        while len(self.pending) >= 8:
            (length,) = struct.unpack_from("<Q", self.pending)
            if length > wire.LARGEST:
                raise wire.WireError("a message of impossible length")
            if len(self.pending) < 8 + length:
                break
            message = wire.decode(bytes(self.pending[8 : 8 + length]))
            if message["kind"] not in ("start", "done"):
                self.inbox.append(message)
            del self.pending[: 8 + length]
        return bool(data)


class Launcher:
    """Starts the ranks of a job and reports for them all.

    Args:
        job: with "ranks", their number.
        send: sends a frame to the worker.
        begin: called in each rank's process, as `begin(its job, its number, frames to write to, turns to read)`.
    """

    def __init__(self, job: dict, send: Callable[[dict], None], begin: Callable[[dict, int, int, int], None]):
        self.job, self.send, self.begin = job, send, begin
        self.ranks = [_Rank(number) for number in range(job["ranks"])]

    def run(self, close: tuple[int, ...]) -> None:
        """Run the job to its end, or to the first case that a rank does not come through.

        What a rank sends that is no report is not reported: the judge is told by a message that is none either.

        Args:
            close: descriptors that no rank may have.
        """
        for rank in self.ranks:
            rank.pid = self._fork(rank, close)
        for rank in self.ranks:
            os.close(rank.frames_write)
            os.close(rank.turns_read)
        try:
            self._relay()
        except Exception:
            self.send({"kind": "case", "index": -1})

    def _relay(self) -> None:
        for index in range(len(self.job["cases"])):
            if self._all("ready") is None:
                return
            self.send({"kind": "start", "index": index})
            for rank in self.ranks:
                with contextlib.suppress(BrokenPipeError):
                    os.write(rank.turns, b"1")
            reports = self._all("case")
            if reports is None:
                return
            frame = merging.merged(index, reports)
            self.send(frame)
            if frame["error"]:
                break  # the other ranks may wait for this one for ever
        self.send({"kind": "done"})

    def _fork(self, rank: _Rank, close: tuple[int, ...]) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            _die_with_parent_as(f"rank {rank.number}")
            ours = (rank.frames_write, rank.turns_read)
            for other in self.ranks:
                for descriptor in (other.frames, other.frames_write, other.turns_read, other.turns):
                    if descriptor not in ours:
                        with contextlib.suppress(OSError):
                            os.close(descriptor)
            for descriptor in close:
                os.close(descriptor)
            self.begin(of_rank(self.job, rank.number), rank.number, *ours)
            sys.stdout.flush()
            while os.read(rank.turns_read, 1):  # its connections stay open until all ranks have reported
                pass
            status = 0
        finally:
            os._exit(status)

    def _all(self, kind: str) -> dict[int, dict] | None:
        """A message of this kind from each rank, from some only where one reports an error.

        None where the job has ended, because the cell itself did not come to its end.
        """
        reports: dict[int, dict] = {}
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            for rank in self.ranks:
                selector.register(rank.frames, selectors.EVENT_READ, rank)
            while True:
                for rank in self.ranks:
                    if rank.number not in reports and rank.inbox:
                        message = reports[rank.number] = rank.inbox.popleft()
                        if message["kind"] in ("ready", "case") and message["kind"] != kind:
                            raise wire.WireError("a message out of turn")
                        if message["kind"] != kind:  # of the cell itself: there is no case to judge
                            self.send(message)
                            return None
                        if message.get("error") and deadline is None:
                            deadline = time.monotonic() + OTHERS_SECONDS
                left = None if deadline is None else deadline - time.monotonic()
                if len(reports) == len(self.ranks) or left is not None and left <= 0:
                    return reports
                for key, _ in selector.select(left):
                    if not key.data.receive():
                        selector.unregister(key.data.frames)
                        if key.data.number not in reports and not key.data.inbox and deadline is None:
                            self._end_like(key.data)

    def _end_like(self, rank: _Rank) -> None:
        """End this process as a rank has ended, once it is said which."""
        status = os.waitpid(rank.pid, 0)[1]
        self.send({"kind": "rank", "rank": rank.number})
        if os.WIFSIGNALED(status):
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
            os.kill(os.getpid(), os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))


def of_rank(job: dict, number: int) -> dict:
    """A rank's own job: of each argument that differs from rank to rank its value, and its GPU."""

    def own(value):
        return value["per_rank"][number] if isinstance(value, dict) and set(value) == {"per_rank"} else value

    cases = [{**case, "args": [own(value) for value in case["args"]]} for case in job["cases"]]
    device = f"cuda:{number}" if job["device"] == "cuda" else job["device"]
    return {**job, "cases": cases, "device": device}


def join(job: dict, number: int, folder: Path) -> None:
    """Make this process a rank of the job's group, with a connection to each of the others.

    The ranks find each other through a file in the job's folder. All connections are made here, before this process
    loses the right to make any.
    """
    import torch
    import torch.distributed as distributed

    world = job["ranks"]
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), LOCAL_RANK=str(number), LOCAL_WORLD_SIZE=str(world))
    store = distributed.FileStore(str(folder / "rendezvous"), world)
    device = torch.device(job["device"])
    if device.type == "cpu":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        distributed.init_process_group("gloo", store=store, rank=number, world_size=world, timeout=GROUP_TIMEOUT)
        return
    os.environ["NCCL_RUNTIME_CONNECT"] = "0"  # all that a collective needs is connected at once
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", store=store, rank=number, world_size=world, timeout=GROUP_TIMEOUT, device_id=device
    )
    here = torch.ones(world, device=device)
    distributed.all_reduce(here)
    distributed.all_to_all_single(torch.empty_like(here), here)  # sends and receives between every two
    torch.cuda.synchronize()


def _die_with_parent_as(name: str) -> None:
    """Linux: the kernel kills this process when the launcher dies; and `ps` shows which rank it is."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)
        libc.prctl(_NAME_THREAD, name.encode(), 0, 0, 0)
