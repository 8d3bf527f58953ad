"""Count the bytes of a function's kernels on any machine, one with a GPU too.

    report = metered(flash_attention, query, key, value, causal=True)

The traffic meter works in Triton's interpreter alone. Where this process interprets, the function is called here; where
kernels are compiled for a GPU, it is called in a process of its own that interprets. There the function is imported,
or, when it was defined in a notebook, its cell is run alone, with torch, triton, tl, np, math and F at hand; a cell
that needs more must import it. Keep the tensors small: the interpreter takes about half a millisecond for a program.
"""

import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.elsewhere import environment, found, located, on_cpu
from course_lib.hardware.meter.traffic import MeterUnavailable, TrafficMeter, TrafficReport

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
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder) / "job", Path(folder) / "report"
        sent.write_bytes(pickle.dumps(job))
        done = subprocess.run(
            [sys.executable, __file__, str(sent), str(received)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode != 0 or not received.exists():
            raise MeterUnavailable(
                f"{function.__name__} could not be counted in the interpreter: {done.stderr.strip()[-2000:]}"
            )
        return pickle.loads(received.read_bytes())


def _count(sent: Path, received: Path) -> None:
    """The other process: find the function, call it under the meter, write the report."""
    job = pickle.loads(sent.read_bytes())
    function = found(job, sent.parent)
    report = metered(function, *job["arguments"], **job["named"])
    received.write_bytes(pickle.dumps(report))


if __name__ == "__main__":
    # Under its true name, so that what is pickled here is found there.
    from course_lib.hardware.meter import metered as module

    module._count(Path(sys.argv[1]), Path(sys.argv[2]))
