"""How fast a processor takes the small steps that an answer in the interpreter is made of.

A limit in seconds says nothing of an answer by itself: on a processor of half the speed, or on one that shares its core
with another program, a right answer takes twice as long. A limit is therefore meant for the processor named at `USUAL`,
and is longer on a slower one.
"""

from __future__ import annotations

import time

import numpy

USUAL = 0.0050  # seconds of `_steps` on one core of an AMD EPYC (2.6 GHz, Zen 4, AVX-512), Python 3.11, NumPy 2.4
MOST = 4.0  # times as long as there is as long as anything gets: a loop that never ends is to be stopped


def slowness() -> float:
    """How many times longer than usual a step takes on this processor at this moment: 1 to `MOST`.

    It takes some 25 ms. Time in which other programs had the processor does not count; a core that is shared does.
    """
    return min(max(1.0, min(one_sample() for _ in range(5)) / USUAL), MOST)


def one_sample() -> float:
    """Seconds of a processor that the steps take this thread once."""
    started = time.thread_time()
    _steps()
    return time.thread_time() - started


def _steps() -> int:
    """Calls, dictionaries, strings and short arrays: what Triton's interpreter does for each operation of a program."""
    seen, lanes, total = {}, numpy.arange(32), 0
    for step in range(3000):
        seen[step % 97] = step
        total += int((lanes * step + 1)[3] > 5)
        total += len([str(step), step])
    return total
