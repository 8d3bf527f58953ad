"""`python -m course_lib bench ring`: one long sequence on all GPUs of this machine, beside one GPU alone.

Causal attention of 131,072 and of 32,768 tokens, 32 query heads and 8 KV heads of 128, bfloat16, one sequence; the
forward pass, and forward and backward together. Rows:

    one rank          `attention` over the whole sequence, on each GPU by itself
    ring              `ring_attention`, in the zig-zag order
    one queue         the same where CUDA_DEVICE_MAX_CONNECTIONS is 1, so that kernels start in the order of their calls
    in turn           the same without overlap: each exchange ends before the products of its step begin
    contiguous        the ring with one chunk for each rank, where the last of two has 1.5 times the average work
    by heads          `attention_over_heads`

The row "one queue" is there because a persistent kernel takes all multiprocessors at once. NCCL's kernel, which needs
some of them, then waits for its end, unless it came first. By default either may.

Times are of the slowest rank, each the median of a few runs between CUDA events, with the L2 cache flushed before. The
share is that of the rate of so many GPUs that each attend alone. FLOPs of the forward pass are
2 · heads · length² · head_dim, and those of the backward pass 2.5 times as many. All results and gradients are compared
with those of one rank before any is timed. Figures, versions and clocks go to ring.json, in the course's bench folder.
"""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE
from course_lib.hardware.device import machine
from course_lib.hardware.ranks import Ranks, run_on_ranks
from course_lib.hardware.timing import measure
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.parallel import heads_for_sequence, ring
from course_lib.kernels.parallel.heads_for_sequence import attention_over_heads
from course_lib.kernels.parallel.ring import ring_attention, zigzag_positions

LENGTHS = 131072, 32768
REPEATS = 5
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


class Problem(NamedTuple):
    """Causal attention of one sequence."""

    length: int
    query_heads: int = 32
    key_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def flops(self) -> dict[str, float]:
        """Of the forward pass, and of both."""
        forward = 2 * self.query_heads * self.length**2 * self.head_dim
        return {"forward": forward, "both": 3.5 * forward}


def ways(ranks: Ranks, length: int) -> dict[str, tuple[Callable, torch.Tensor]]:
    """Row -> (function(query, key, value) that gives the output of a rank's places, those places)."""
    chunk = torch.arange(length).chunk(ranks.size)[ranks.rank]
    zigzag = zigzag_positions(ranks.rank, ranks.size, length)

    def by_ring(*inputs, **options):
        return ring_attention(ranks, *inputs, validate=False, **options)[0]

    return {
        "one rank": (functools.partial(attention, causal=True), torch.arange(length)),
        "ring": (by_ring, zigzag),
        "in turn": (functools.partial(by_ring, overlap=False), zigzag),
        "contiguous": (functools.partial(by_ring, zigzag=False), chunk),
        "by heads": (functools.partial(attention_over_heads, ranks, validate=False), chunk),
    }


def measure_rank(ranks: Ranks, problems: list[Problem], rows: list[str] | None, repeats: int) -> list[dict]:
    """For each problem {row: {"forward", "both" in seconds, "difference"} or {"missing": why}}; all ranks run it.

    The number of calls is given beforehand: if each rank chose its own, some would wait for others for ever.
    """
    found = []
    for problem in problems:
        found.append(measure_problem(ranks, problem, rows, repeats))
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def measure_problem(ranks: Ranks, problem: Problem, rows: list[str] | None, repeats: int) -> dict[str, dict]:
    draw = torch.Generator(ranks.device).manual_seed(0)
    heads = problem.query_heads, problem.key_heads, problem.key_heads, problem.query_heads
    whole = [
        torch.randn((1, count, problem.length, problem.head_dim), generator=draw, device=ranks.device,
                    dtype=problem.dtype)
        for count in heads
    ]  # fmt: skip
    wanted = both(functools.partial(attention, causal=True), *leaves(whole))
    results: dict[str, dict] = {}
    for row, (run, places) in ways(ranks, problem.length).items():
        if rows is not None and row not in rows:
            continue
        places = places.to(ranks.device)
        inputs = leaves([one[:, :, places] for one in whole])
        difference = max(
            relative(mine, one[:, :, places]) for mine, one in zip(both(run, *inputs), wanted, strict=True)
        )
        # All ranks must decide alike: the others would wait for one that leaves out a row.
        wrong = ranks.sum(torch.tensor(float(not difference < LARGEST_DIFFERENCE), device=ranks.device)).item()
        if wrong:
            results[row] = {"missing": f"wrong on {wrong:.0f} ranks; this one differs by {difference:.1e}"}
            continue
        calls = {"forward": without_gradients(run, *inputs[:3]), "both": functools.partial(both, run, *inputs)}
        times = {what: measure(call, warmup=1, repeats=repeats, device=ranks.device).median
                 for what, call in calls.items()}  # fmt: skip
        results[row] = times | {"difference": difference}
    return results


def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Query, key and value as what gradients are asked for, and the output's gradient."""
    return [one.detach().contiguous().requires_grad_(number < 3) for number, one in enumerate(tensors)]


def both(run, query, key, value, gradient) -> list[torch.Tensor]:
    """Output, dQ, dK and dV."""
    output = run(query, key, value)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)]


def without_gradients(run, *inputs) -> Callable:
    def call():
        with torch.no_grad():
            return run(*inputs)

    return call


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖, head by head: in float32 the whole would be gigabytes."""
    squares = [torch.stack([(mine.float() - one.float()).square().sum(), one.float().square().sum()])
               for mine, one in zip(found[0], wanted[0])]  # fmt: skip
    off, all_of_it = torch.stack(squares).sum(0)
    return (off / all_of_it).sqrt().item()


def slowest(of_ranks: list[list[dict]]) -> list[dict]:
    """For each problem {row: figures}, each figure the largest of the ranks'."""
    merged = []
    for problem in zip(*of_ranks):
        rows: dict[str, dict] = {}
        for row, figures in problem[0].items():
            missing = "missing" in figures
            rows[row] = figures if missing else {what: max(one[row][what] for one in problem) for what in figures}
        merged.append(rows)
    return merged


def print_table(problem: Problem, size: int, results: dict) -> None:
    """Milliseconds, TFLOP/s of all ranks together, and the share of so many GPUs' rate."""
    print(f"\n{f'{problem.length:,} tokens, {size} ranks':<26}{'forward':>10}{'TFLOP/s':>9}{'share':>8}"
          f"{'both':>12}{'TFLOP/s':>9}{'share':>8}{'differs':>10}")  # fmt: skip
    for row, figures in results.items():
        if "missing" in figures:
            print(f"{row:<26}{figures['missing']}")
            continue
        line = f"{row:<26}"
        for what, width in (("forward", 7), ("both", 9)):
            rate = problem.flops[what] / figures[what] / 1e12
            alone = results.get("one rank", {}).get(what)
            share = f"{100 * alone / figures[what] / size:.1f} %" if alone and row != "one rank" else "–"
            line += f"{1e3 * figures[what]:>{width}.1f} ms{rate:>9.0f}{share:>8}"
        print(f"{line}{figures['difference']:>10.0e}")
    query, key = (torch.empty(1, count, problem.length // size, problem.head_dim, dtype=problem.dtype, device="meta")
                  for count in (problem.query_heads, problem.key_heads))  # fmt: skip
    passes = [ring.bytes_received(size, key, backward=backward) / 1e6 for backward in (False, True)]
    by_heads = heads_for_sequence.bytes_received(size, query, key) / 1e6
    print(f"A rank of the ring receives {passes[0]:,.0f} MB, and {passes[1]:,.0f} MB backwards; "
          f"by heads {by_heads:,.0f} MB each way.")  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    size = torch.cuda.device_count()
    if machine().tier == "none" or size < 2:
        print("bench ring needs two NVIDIA GPUs or more: ranks that share a processor say nothing about its times.")
        return 0
    problems, before = [Problem(length) for length in LENGTHS], clocks()
    tables = slowest(run_on_ranks(measure_rank, size, problems, None, REPEATS))
    kept = {name: os.environ.get(name) for name in ONE_QUEUE}
    os.environ.update(ONE_QUEUE)
    try:
        queued = slowest(run_on_ranks(measure_rank, size, problems, ["ring"], REPEATS))
    finally:
        for name, value in kept.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
    for problem, results, ordered in zip(problems, tables, queued):
        results["one queue"] = ordered["ring"]
        print_table(problem, size, results)
    rows = [{"length": problem.length, "results": results} for problem, results in zip(problems, tables)]
    write_record("ring", before, ranks=size, rows=rows)
    return 0
