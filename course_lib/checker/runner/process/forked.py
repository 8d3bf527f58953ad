"""A check's own process, from its fork to its end: limits, confinement, and then the job, alone or as several ranks."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

import again
import ahead
import ranks
import sandboxed
import sparse
import torch
import whereabouts
import wire
from child import Child
from guards import POISON, GuardedTensor, count_pattern
from isolation import close_tcp, restrict

END_OF_FRAMES = struct.pack("<Q", 0)  # processes that an answer left behind may hold the pipe open for ever


@dataclass
class Place:
    """What a forked process has of its own.

    Attributes:
        frames, output: where to write what was seen, and what the answer prints.
        folder: its folder.
        stacks: where to write, when asked, what it is doing; one file, or one for each rank.
    """

    frames: int
    output: int
    folder: Path
    stacks: list[IO[bytes]]


def _limit_child(limits: dict) -> None:
    """Bounds on memory and file size that hold in this process and whatever it starts."""
    if limits["memory_bytes"] and hasattr(resource, "RLIMIT_DATA"):
        in_use = 0
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmData:"):
                    in_use = int(line.split()[1]) << 10
        limit = in_use + limits["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 20, 256 << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sandboxed.limit_processes(limits["processes"])


def _die_with_parent() -> None:
    """Linux: the kernel kills this process when the worker dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run(traffic, limits, job, place: Place, private_fds) -> None:
    """Run a job in this process, for which the worker has forked it.

    Args:
        traffic: the meter; None without Triton.
        limits: the header that came with the job.
        job: as it came (see `wire`).
        place: the process's own pipes and folder.
        private_fds: descriptors of the worker's, to be closed.
    """
    _settle(place, private_fds)
    _limit_child(limits)
    child = Child(traffic, place.frames, place.folder)
    try:
        job = wire.decode(job, sparse.apart)
        if job.get("ranks"):
            _run_ranks(traffic, job, child, place.folder, place.stacks)
            return
        _confine(job["device"], place.folder)
        child.run(job)
    except BaseException as error:  # the harness itself failed: say so rather than vanish
        child.send({"kind": "harness_error", "text": "".join(traceback.format_exception(error))[-4000:]})
    _end(place)


def stand_by(traffic, jobs: Connection, place: Place, private_fds) -> None:
    """Open the GPU, confine this process, and run the one job that comes, if one does: then nobody waits for the GPU.

    Args:
        jobs: where the worker sends a header and a job.
        traffic, place, private_fds: as in `run`.
    """
    _settle(place, private_fds)
    child = Child(traffic, place.frames, place.folder)
    try:
        _confine("cuda", place.folder)
        use_once(torch.device("cuda"))
        limits, job = json.loads(jobs.recv_bytes()), jobs.recv_bytes()
        jobs.close()
        _limit_child(limits)
        child.run(wire.decode(job, sparse.apart))
    except EOFError:  # the worker wants none any more
        return
    except BaseException as error:
        child.send({"kind": "harness_error", "text": "".join(traceback.format_exception(error))[-4000:]})
    _end(place)


def compile_ahead(traffic, limits, job, place: Place, private_fds) -> None:
    """Compile what a job launches, in this process and others (see `ahead`); none opens the GPU or says anything."""
    _settle(place, private_fds)
    _limit_child(limits)
    _confine("cpu", place.folder)
    ahead.compile_for(traffic, wire.decode(job, sparse.apart), place.folder)


def _settle(place: Place, private_fds) -> None:
    """Make a forked process one of its own: session, descriptors, folder, and no one to answer `input`."""
    whereabouts.tell_when_asked(place.stacks[0])
    os.setsid()
    sandboxed.guard(False)
    _die_with_parent()
    for fd in private_fds:
        os.close(fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(place.output, 1)
    os.dup2(place.output, 2)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", buffering=1, closefd=False),
        open(2, "w", buffering=1, closefd=False),
    )
    builtins.input = _no_input
    folder = place.folder
    os.chdir(folder)
    os.environ.update(HOME=str(folder), TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
    tempfile.tempdir = str(folder)
    for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        os.environ.setdefault(name, str(folder / "kernels"))


def _end(place: Place) -> None:
    sys.stdout.flush()
    os.write(place.frames, END_OF_FRAMES)


def _run_ranks(traffic, job: dict, child: Child, folder: Path, stacks: list[IO[bytes]]) -> None:
    """Run a job as several ranks. The process that starts them runs no answer, and is confined all the same."""

    def begin(job: dict, number: int, frames: int, turns: int) -> None:
        whereabouts.tell_when_asked(stacks[number])
        rank = ranks.RankChild(traffic, frames, folder, turns)
        try:
            if job["device"] != "cpu":
                open_the_gpu(job["device"])
            ranks.join(job, number, folder)
            if job["device"] == "cpu":
                close_tcp()  # the rest is closed already
            else:
                restrict(writable)
            place = folder / f"rank-{number}"
            place.mkdir()
            rank.folder = place
            rank.run(job)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))[-4000:]
            rank.send({"kind": "harness_error", "text": f"On rank {number}: {text}"})

    writable = [folder, Path(os.environ["TRITON_CACHE_DIR"])]
    if job["device"] == "cpu":
        restrict(writable, tcp_later=True)
    ranks.Launcher(job, child.send, begin).run(close=(child.pipe,))
    os.write(child.pipe, END_OF_FRAMES)


def _confine(device: str, folder: Path) -> None:
    """Open what the job's device needs, and then nothing more but the folder and the compiler's cache."""
    if device == "cuda":
        open_the_gpu()
    restrict(writable=[folder, Path(os.environ["TRITON_CACHE_DIR"])])


def open_the_gpu(device: str = "cuda") -> None:
    """Start CUDA and Triton's driver: they open more than a confined process may, and keep it open."""
    torch.zeros(1, device=device)
    with contextlib.suppress(ImportError):
        from triton.runtime import driver

        driver.active.get_current_device()


def use_once(device: torch.device) -> None:
    """Do what every check does to its arguments: CUDA loads each of PyTorch's kernels when it is first asked for."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
        if dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 0):
            continue
        guard = GuardedTensor("warm", torch.zeros(4, 4, dtype=dtype), device)
        again.copied([guard.tensor])
        guard.restore()
        guard.margin_written(), guard.modified(), count_pattern(guard.tensor, POISON)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _no_input(prompt=""):
    raise EOFError("input() has no one to answer it during a check")
