"""Count the bytes of a function's kernels on any machine, one with a GPU too.

    report = metered(flash_attention, query, key, value, causal=True)

The traffic meter works in Triton's interpreter alone. Where this process interprets, the function is called here; where
kernels are compiled for a GPU, it is called in a process of its own that interprets. There the function is imported,
or, when it was defined in a notebook, its cell is run alone, with torch, triton, tl, np, math and F at hand; a cell
that needs more must import it. Keep the tensors small: the interpreter takes about half a millisecond for a program.
"""

from collections.abc import Callable
from pathlib import Path

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter import resident
from course_lib.hardware.meter.elsewhere import found, located, on_cpu
from course_lib.hardware.meter.traffic import TrafficMeter, TrafficReport

SECONDS = 300


def metered(function: Callable, *arguments, **named) -> TrafficReport:
    """The bytes that the kernels move which `function(*arguments, **named)` launches.

    Tensors may be on any device; they are counted as CPU tensors of the same values, contiguous where they were not.

    Raises:
        MeterUnavailable: this Triton cannot be metered, or the function failed in the other process; the text says why.
        ValueError: the function's source is not to be found.
    """
    if interpreting():
        with TrafficMeter() as meter:
            function(*arguments, **named)
        return meter.report()
    job = {**located(function), "arguments": on_cpu(arguments), "named": on_cpu(named)}
    return resident.ask(_count, job, SECONDS, "could not be counted")


def _count(job: dict, folder: Path) -> TrafficReport:
    """The other process: find the function and call it under the meter."""
    return metered(found(job, folder), *job["arguments"], **job["named"])
