"""Count the bytes of a function's kernels on any machine, one with a GPU too.

    report = metered(flash_attention, query, key, value, causal=True)

The traffic meter works in Triton's interpreter alone. Where this process interprets, the function is called here; where
kernels are compiled for a GPU, it is called in a process of its own that interprets. There the function is imported,
or, when it was defined in a notebook, its cell is run alone, with torch, triton, tl, np, math and F at hand; a cell
that needs more must import it. Keep the tensors small: the interpreter takes about half a millisecond for a program.
"""

import linecache
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from course_lib.hardware.compiler.kernel_source import importable
from course_lib.hardware.device import interpreting
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
    job = {**_located(function), "arguments": _on_cpu(arguments), "named": _on_cpu(named)}
    environment = dict(os.environ, TRITON_INTERPRET="1", COURSE_NO_WARM_UP="1")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with tempfile.TemporaryDirectory() as folder:
        sent, received = Path(folder) / "job", Path(folder) / "report"
        sent.write_bytes(pickle.dumps(job))
        done = subprocess.run(
            [sys.executable, __file__, str(sent), str(received)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode != 0 or not received.exists():
            raise MeterUnavailable(
                f"{function.__name__} could not be counted in the interpreter: {done.stderr.strip()[-2000:]}"
            )
        return pickle.loads(received.read_bytes())


def _located(function: Callable) -> dict:
    """How the other process finds the function: by its module, or by the source of its cell."""
    if importable(function):
        return {"module": function.__module__, "name": function.__qualname__}
    filename = function.__code__.co_filename
    source = "".join(linecache.getlines(filename))
    if not source:
        raise ValueError(
            f"the source of {function.__name__} is not to be found; define it in a notebook cell or a file."
        )
    return {"source": source, "name": function.__name__}


def _on_cpu(value):
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    if isinstance(value, (tuple, list)):
        return type(value)(map(_on_cpu, value))
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return value


def _count(sent: Path, received: Path) -> None:
    """The other process: find the function, call it under the meter, write the report."""
    import importlib

    job = pickle.loads(sent.read_bytes())
    if "module" in job:
        function = getattr(importlib.import_module(job["module"]), job["name"])
    else:
        function = _run_cell(job["source"], sent.with_name("cell.py"))[job["name"]]
    report = metered(function, *job["arguments"], **job["named"])
    received.write_bytes(pickle.dumps(report))


def _run_cell(source: str, path: Path) -> dict:
    """The names that a cell defines. Triton reads a kernel's source from its file, so the cell gets one."""
    import math

    import numpy
    import torch.nn.functional
    import triton
    import triton.language

    path.write_text(source, encoding="utf-8")
    names = {
        "__name__": "cell",
        "__file__": str(path),
        "torch": torch,
        "triton": triton,
        "tl": triton.language,
        "np": numpy,
        "math": math,
        "F": torch.nn.functional,
    }
    exec(compile(source, str(path), "exec"), names)
    return names


if __name__ == "__main__":
    # Under its true name, so that what is pickled here is found there.
    from course_lib.hardware.meter import metered as module

    module._count(Path(sys.argv[1]), Path(sys.argv[2]))
