"""A check's own process, from its fork to its end: limits, confinement, and then the job, alone or as several ranks."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import functools
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO

import ahead
import ranks
import sandboxed
import sparse
import torch
import whereabouts
import wire
from child import Child
from isolation import close_tcp, restrict

END_OF_FRAMES = struct.pack("<Q", 0)  # processes that an answer left behind may hold the pipe open for ever


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


def run(traffic, limits, job, frames: int, output: int, private_fds, folder: Path, stacks: list[IO[bytes]]) -> None:
    """Run a job in this process, for which the worker has forked it.

    Args:
        traffic: the meter; None without Triton.
        limits: the header that came with the job.
        job: as it came (see `wire`).
        frames, output: where to write what was seen, and what the answer prints.
        private_fds: descriptors of the worker's, to be closed.
        folder: the job's own.
        stacks: where to write, when asked, what this process is doing; one file, or one for each rank.
    """
    whereabouts.tell_when_asked(stacks[0])
    os.setsid()
    sandboxed.guard(False)
    _die_with_parent()
    for fd in private_fds:
        os.close(fd)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdin, sys.stdout, sys.stderr = (
        open(0, closefd=False),
        open(1, "w", buffering=1, closefd=False),
        open(2, "w", buffering=1, closefd=False),
    )
    builtins.input = _no_input
    os.chdir(folder)
    os.environ.update(HOME=str(folder), TMPDIR=str(folder), TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"))
    tempfile.tempdir = str(folder)
    for name in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        os.environ.setdefault(name, str(folder / "kernels"))
    _limit_child(limits)
    child = Child(traffic, frames, folder)
    try:
        job = wire.decode(job, sparse.apart)
        if job.get("ranks"):
            _run_ranks(traffic, job, child, folder, stacks)
            return
        if limits["ahead"] and not sandboxed.inside():  # there the number of processes and threads is limited
            _compile_ahead(traffic, job, frames, folder, ahead.SHARE * limits["seconds"])
        _confine(job, folder)
        child.run(job)
    except BaseException as error:  # the harness itself failed: say so rather than vanish
        child.send({"kind": "harness_error", "text": "".join(traceback.format_exception(error))[-4000:]})
    sys.stdout.flush()
    os.write(frames, END_OF_FRAMES)


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


def _confine(job: dict, folder: Path) -> None:
    """Open what the job's device needs, and then nothing more but the folder and the compiler's cache."""
    if job["device"] == "cuda":
        open_the_gpu()
    restrict(writable=[folder, Path(os.environ["TRITON_CACHE_DIR"])])


def _compile_ahead(traffic, job: dict, frames: int, folder: Path, seconds: float) -> None:
    """Run the job's cases in helpers; before this process starts CUDA, which does not survive a fork."""

    def helper(number, cases):
        _die_with_parent()
        os.dup2(os.open(os.devnull, os.O_WRONLY), frames)
        place = folder / f"ahead-{number}"
        place.mkdir()
        _confine(job, folder)
        Child(traffic, frames, place).run({**job, "cases": cases, "runs": 1})

    parts = ahead.shares(job["cases"], ahead.helpers(len(job["cases"])))
    ahead.in_helpers([functools.partial(helper, *part) for part in enumerate(parts)], seconds)


def open_the_gpu(device: str = "cuda") -> None:
    """Start CUDA and Triton's driver: they open more than a confined process may, and keep it open."""
    torch.zeros(1, device=device)
    with contextlib.suppress(ImportError):
        from triton.runtime import driver

        driver.active.get_current_device()


def _no_input(prompt=""):
    raise EOFError("input() has no one to answer it during a check")
