"""`python -m course_lib bench backward`: the course's backward kernels beside those that people use, in one run.

One table, in TFLOP/s, of the gradients alone: the forward runs once for each implementation, before the clock. 16384
tokens in 16-bit floats, in sequences of 16384 or 4096, head dimension 128 with 16 heads or 64 with 32. FLOPs are 2.5
times the forward's, 10 · batch · heads · length² · head_dim, halved when causal, whatever an implementation really
computes. Every figure is the median of repeated runs with the L2 cache flushed before each, in short turns of all
columns in changing order; every gradient is compared with FA2's before it is timed. Figures, versions and clocks go to
backward.json and a plot to backward.png, in the course's bench folder.

"ours" computes dQ by a kernel of its own; "ours, atomics" adds it up in the kernel of dK and dV.
"""

import dataclasses
import functools
import importlib
import warnings

import torch
from torch.nn.attention import SDPBackend

from course_lib.bench._record import bench_path, clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE, Row, sdpa
from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure_together
from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.flash import flash_attention

SECONDS_PER_FIGURE = 0.3
ROWS = [Row(head_dim, causal, length) for head_dim in (128, 64) for length in (16384, 4096) for causal in (False, True)]


def autograds(backend):
    """Prepares the gradients of one of PyTorch's backends: runs its forward, and gives what runs its backward."""

    def prepare(query, key, value, gradient, causal):
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        output = sdpa(backend)(*inputs, causal)
        return lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    return prepare


def courses(function, **options):
    """The same for a backward of the course's own."""

    def prepare(query, key, value, gradient, causal):
        output, log_sum_exp = flash_attention(query, key, value, causal=causal, return_lse=True)
        saved = query, key, value, output, log_sum_exp, gradient
        return functools.partial(function, *saved, causal=causal, **options)

    return prepare


def implementations() -> dict:
    """Column name -> function(query, key, value, output gradient, causal) that gives what is to be timed."""
    found = {
        "FA2": autograds(SDPBackend.FLASH_ATTENTION),
        "cuDNN": autograds(SDPBackend.CUDNN_ATTENTION),
        "ours": courses(flash_attention_backward),
        "ours, atomics": courses(flash_attention_backward, deterministic=False),
    }
    if machine().tier == "hopper":
        try:
            hopper = importlib.import_module("course_lib.kernels.hopper.backward").flash_attention_backward_hopper
        except (ImportError, AttributeError):
            return found
        found["ours, Gluon"] = courses(hopper)
        found["Gluon, any order"] = courses(hopper, deterministic=False)
    return found


def measure_row(row: Row, columns: dict) -> dict:
    """{column: {"tflops", "low", "high", "ms", "difference"} or {"missing": why}} for one problem."""
    query, key, value = row.inputs()
    gradient = torch.randn_like(query)
    results: dict[str, dict] = {}
    calls, reference = {}, None
    for name, prepare in columns.items():
        try:
            call = prepare(query, key, value, gradient, row.causal)
            found = torch.cat([tensor.flatten() for tensor in call()]).float()
        except (RuntimeError, ValueError) as error:  # a backend that this machine or this PyTorch lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = found if reference is None else reference
        difference = ((found - reference).norm() / reference.norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs from FA2 by {difference:.1e}"}
            continue
        calls[name] = call
        results[name] = {"difference": difference}
    del reference
    timings = measure_together(calls, seconds=SECONDS_PER_FIGURE) if calls else {}
    flops = 2.5 * row.flops
    for name, timing in timings.items():
        results[name] |= {
            "tflops": flops / timing.median / 1e12,
            "low": flops / timing.high / 1e12,
            "high": flops / timing.low / 1e12,
            "ms": timing.median * 1e3,
        }
    return results


def print_row(row: str, results: dict, columns: list[str]) -> None:
    """Its figures, as soon as they are there, and why one is missing."""
    cells = [f"{results[name]['tflops']:.0f}" if "tflops" in results[name] else "–" for name in columns]
    print(f"{row:<20}" + "".join(f"{cell:>18}" for cell in cells), flush=True)
    for name, result in results.items():
        if "missing" in result:
            print(f"    no figure for {name}: {result['missing']}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench backward needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    warnings.filterwarnings("ignore", module="torch")  # each backend explains at length why it is not another one
    torch.manual_seed(0)
    columns = implementations()
    before, table = clocks(), {}
    print(f"\n{'TFLOP/s':<20}" + "".join(f"{name:>18}" for name in columns), flush=True)
    for row in ROWS:
        table[row.name] = measure_row(row, columns)
        print_row(row.name, table[row.name], list(columns))
        torch.cuda.empty_cache()
    rows = [dataclasses.asdict(row) | {"name": row.name, "results": table[row.name]} for row in ROWS]
    from course_lib.figures.backward.rates import draw_rates

    draw_rates(write_record("backward", before, rows=rows)).savefig(bench_path("backward.png"))
    return 0
