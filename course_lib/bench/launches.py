"""`python -m course_lib bench launches`: what a call takes the host, in five ways to make it.

    decided anew    a first call: checks, choices, a new tensor for the result, Triton's launcher
    called          a later one, as a reader of the course writes it: what is known of such tensors is kept
    with buffers    the same with output and workspace given
    prepared        `course_lib.hardware.prepared`: the checks that other memory needs, and the launch
    replayed        a CUDA graph of the call

First the Python of it: all that runs before Triton's launcher, which is replaced by nothing. That is measured without a
GPU, too; there a prepared call does not look at the stream. Then, on a GPU, whole calls, 50 in a row from a GPU that is
idle: so few that the host does not wait for it, as the problems are small. PyTorch's addition to 16 numbers stands
beside them. Figures are µs, the median of some rounds; those of a GPU go to launches.json in the course's bench folder.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.decode import host_seconds
from course_lib.hardware.device import machine
from course_lib.hardware.graphs import captured
from course_lib.hardware.kept import deciding_anew
from course_lib.hardware.meter.traffic import launches_through
from course_lib.hardware.prepared import Prepared, prepared
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace

QUERY_HEADS, KEY_HEADS = 32, 8
PYTHON_CALLS, ROUNDS = 200, 7


def problems(device: str, dtype: torch.dtype, context: int, head_dim: int) -> dict[str, dict]:
    """For each function: {"function", "inputs", "plain": options of a plain call, "buffers": those with buffers}."""
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    query = torch.randn(1, QUERY_HEADS, head_dim, **options)
    caches = [torch.randn(1, KEY_HEADS, context, head_dim, **options) for _ in "kv"]
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)
    workspace = decode_workspace(1, QUERY_HEADS, head_dim, decode_plan(query, KEY_HEADS, context).splits, device=device)
    whole = [torch.randn(1, heads, context, head_dim, **options) for heads in (QUERY_HEADS, KEY_HEADS, KEY_HEADS)]
    return {
        "decode_attention": {
            "function": decode_attention,
            "inputs": (query, *caches, lengths),
            "plain": {"validate": False},
            "buffers": {"output": torch.empty_like(query), "workspace": workspace, "validate": False},
        },
        "attention": {"function": attention, "inputs": tuple(whole), "plain": {}, "buffers": None},
    }


def python_seconds(function: Callable) -> float:
    """Of a call whose launches are replaced by nothing: the median of some rounds."""
    with launches_through(lambda *launch: None):
        return median_seconds(function)


def python_of_prepared(step: Prepared, inputs: tuple) -> float:
    """The same of a prepared call."""
    before = [launch.straight for launch in step._launches], step._handle
    try:
        step._handle = step._handle or 0
        for launch in step._launches:
            launch.straight = Nothing()  # type: ignore[assignment]
        return median_seconds(functools.partial(step, *inputs))
    finally:
        ways, step._handle = before
        for launch, way in zip(step._launches, ways):
            launch.straight = way


class Nothing:
    """Stands where a launch would go to the driver."""

    def start(self, addresses: list[int], stream: int) -> None:
        pass


def median_seconds(function: Callable) -> float:
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(PYTHON_CALLS):
            function()
        rounds.append((time.perf_counter() - started) / PYTHON_CALLS)
    return statistics.median(rounds)


def measure(problem: dict) -> dict[str, dict]:
    """{way: {"python_us", "host_us"}}; what cannot be measured here is missing, or {"missing": why}."""
    function, inputs, on_gpu = problem["function"], problem["inputs"], machine().tier != "none"
    ways = {"called": functools.partial(function, *inputs, **problem["plain"])}
    if problem["buffers"] is not None:
        ways["with buffers"] = functools.partial(function, *inputs, **problem["buffers"])
    results: dict[str, dict] = {}
    with deciding_anew():
        ways["called"]()
        results["decided anew"] = {"python_us": python_seconds(ways["called"]) * 1e6}
        if on_gpu:
            results["decided anew"]["host_us"] = host_seconds(ways["called"]) * 1e6
    for name, call in ways.items() if on_gpu else ():
        for _ in range(4):  # as many as it takes to be kept, and one more
            call()
        results[name] = {"host_us": host_seconds(call) * 1e6}
    step = prepared(function, *inputs, **(problem["buffers"] or problem["plain"]))
    results["prepared"] = {"python_us": python_of_prepared(step, inputs) * 1e6}
    if on_gpu and step.reason is not None:
        results["prepared"]["missing"] = step.reason
    elif on_gpu:
        results["prepared"]["host_us"] = host_seconds(functools.partial(step, *inputs)) * 1e6
        results["replayed"] = {"host_us": host_seconds(captured(list(ways.values())[-1])) * 1e6}
    return results


def print_results(name: str, results: dict[str, dict]) -> None:
    print(f"\n{name:<24}{'Python, µs':>12}{'whole call, µs':>17}")
    for way, result in results.items():
        cells = [f"{result[key]:.1f}" if key in result else "–" for key in ("python_us", "host_us")]
        print(f"  {way:<22}{cells[0]:>12}{cells[1]:>17}  {result.get('missing', '')}".rstrip())


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    on_gpu = machine().tier != "none"
    torch.manual_seed(0)
    before = clocks()
    sizes = ("cuda", torch.float16, 1024, 128) if on_gpu else ("cpu", torch.float32, 64, 16)
    results = {name: measure(problem) for name, problem in problems(*sizes).items()}
    for name, found in results.items():
        print_results(name, found)
    if not on_gpu:
        print("\nWithout a GPU nothing is launched: whole calls, and Triton's own part of them, cannot be measured.")
        return 0
    small = torch.zeros(16, device="cuda")
    addition = host_seconds(lambda: small.add_(1.0)) * 1e6
    print(f"\nPyTorch's addition: {addition:.1f} µs")
    write_record("launches", before, addition_us=addition, results=results)
    return 0
