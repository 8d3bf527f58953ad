"""Compile an answer's kernels side by side before its first case runs.

A check on a GPU compiles a kernel anew for every dtype, head dimension and constant that its cases bring, a second or
two each. So helper processes first run the cases, each its share, and throw away what comes out; what stays is the
compiler's cache, in which the check then finds its kernels. An answer that hangs or crashes does so again in the check
itself, which tells of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

MOST = 8  # helpers at once: each has a CUDA context of a few hundred MB
SHARE = 0.25  # of a check's time, for helpers that do not end


def helpers(cases: int) -> int:
    """How many processes are worth starting for so many cases on this machine; 0 where one after the other is best."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number = min(cores, cases, MOST)
    return number if number > 1 else 0


def shares(cases: list[dict], number: int) -> list[list[dict]]:
    """The cases in turn for each helper, untimed: neighbours are alike, and share their kernels."""
    untimed = [{**case, "baseline": None} for case in cases]
    return [untimed[first::number] for first in range(number)]


def in_helpers(tasks: list[Callable[[], None]], seconds: float) -> None:
    """Run each task in a forked process, silently, and return when all have ended or the time is over."""
    running = {_forked(task) for task in tasks}
    deadline = time.monotonic() + seconds
    try:
        while running and time.monotonic() < deadline:
            running = {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == 0}
            time.sleep(0.005)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _forked(task: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        task()
    finally:
        os._exit(0)
