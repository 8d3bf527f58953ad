"""Compile an answer's kernels side by side before its first case runs on a GPU.

A check on a GPU compiles a kernel anew for every dtype, head dimension and constant that its cases bring, a second or
two each. So one process first calls the answer on the CPU with every case, where a launch launches nothing, and forks
a process for each kernel that is met and compiled nowhere yet. What comes out is thrown away; what stays is the
compiler's cache, in which the check then finds its kernels. None of these processes opens the GPU: a context costs up
to a second of the system's time, whoever waits for it. An answer that hangs, crashes or asks for the GPU itself does so
again in the check, which tells of it and compiles what is missing.
"""

from __future__ import annotations

import collections
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import nested
import torch
from child import Child
from stand_in import stand_in_for_a_gpu

MOST = 16  # compilers at once
MEETING = 3.0  # seconds in which the cases are called, small ones first; what they have met by then is compiled
SHARE = 0.5  # of a check's time, after which nobody waits for compilers any more; beside others they take long


def compilers() -> int:
    """How many processes are worth starting on this machine; 0 where one after the other is best."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST) if cores > 1 else 0


class SideBySide:
    """Runs tasks silently in processes of their own, at most `most` at once."""

    def __init__(self, most: int):
        self.most, self.running = most, 0
        self.waiting: collections.deque[Callable[[], None]] = collections.deque()

    def start(self, task: Callable[[], None]) -> None:
        """Begin with a task as soon as there is room, without waiting for that."""
        self.waiting.append(task)
        while self.running and self._ended(os.WNOHANG):
            pass
        self._fork()

    def wait(self) -> None:
        """Return when all have ended."""
        while self.running:
            self._ended(0)
            self._fork()

    def _fork(self) -> None:
        while self.waiting and self.running < self.most:
            task = self.waiting.popleft()
            if os.fork() == 0:
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    task()
                finally:
                    os._exit(0)
            self.running += 1

    def _ended(self, options: int) -> bool:
        """Count one that has ended, if one has."""
        try:
            ended = os.waitpid(-1, options)[0] != 0
        except ChildProcessError:  # an answer has waited for them itself
            self.running = 0
            return False
        self.running -= ended
        return ended


class Ahead(Child):
    """Calls an answer with every case on the CPU, until the time is over, and compares nothing."""

    def run(self, job: dict) -> None:
        self.until = time.monotonic() + MEETING
        signal.signal(signal.SIGALRM, _too_long)
        signal.setitimer(signal.ITIMER_REAL, MEETING)
        cases = [{**case, "baseline": None} for case in job["cases"] if not case["compiled"]]
        super().run({**job, "cases": sorted(cases, key=_elements), "device": "cpu", "runs": 1})

    def send(self, frame: dict) -> None:
        """Nobody listens."""

    def await_turn(self) -> None:
        if time.monotonic() > self.until:
            raise _TimeIsOver


class _TimeIsOver(BaseException):
    pass


def _too_long(number, frame):
    raise _TimeIsOver


def compile_for(traffic, job: dict, folder: Path) -> None:
    """Compile what a job's cases launch; returns when all has been compiled.

    Args:
        traffic: the meter, which knows Triton's inside.
        job: as the check's child gets it; its "gpu" says what a launcher asks of the device.
        folder: the job's own, for the cell's file.
    """
    most, gpu = compilers(), job["gpu"]
    if traffic is None or not most:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    stand_in_for_a_gpu(gpu)
    processes = SideBySide(most)
    try:
        with traffic.compiled_elsewhere(10 * gpu["major"] + gpu["minor"], processes.start):
            Ahead(traffic, -1, folder).run(job)
    except _TimeIsOver:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        processes.wait()


def _elements(case: dict) -> int:
    return sum(leaf.numel() for leaf in nested.leaves(case["args"]) if isinstance(leaf, torch.Tensor))
