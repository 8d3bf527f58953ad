"""`python -m course_lib bench ideas`: what each of FlashAttention-4's ideas is worth on this GPU.

One table, in TFLOP/s, of 16384 tokens in 16-bit floats, as `bench attention` has them: head dimension 64 and 128, full
and causal, sequences of 1k, 4k and 16k. Columns:

    plain    `attention_with_ideas`, the kernel with pointers: as it is, with each idea alone, and with all of them. Of
             the tiles that its GPU is given each column has those that are fastest with its ideas.
    TMA      `flash_attention_tma`, whose tiles the copy engine moves: as it is, lazy, in order, and both.
    Gluon    `flash_attention_hopper`, which starts the longest tiles of as many heads as fit in the L2 first: as it is,
             lazy, and head by head, without that order.

Each figure is the median of repeated runs of a CUDA graph with the L2 cache flushed before each, in short turns of all
columns in changing order; each result is compared with the first column's before it is timed. Scores are normal with a
standard deviation of 1, so the threshold of 8 is never exceeded: it is what skipping can be worth at most. What a tile
rescales with and without it, on average, is counted beside. Figures, versions and clocks go to ideas.json, in the
course's bench folder.

On one H200 (PyTorch 2.11, Triton 3.6, November 2026) the twelve rows changed by so many percent, each kernel against
itself as it is. Gluon's order is against head by head:

             lazy             polynomial       longest first
    plain    -19.6 to -3.3    -9.1 to -2.5     -1.7 to +3.9
    TMA       -6.1 to +2.0    not measured     -4.3 to +3.0
    Gluon     -8.3 to -3.4    not measured     -1.4 to +11.3
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import triton

from course_lib.bench._record import clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE, SECONDS_PER_FIGURE, Row
from course_lib.hardware.device import machine
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.attention.flash_tma import flash_attention_tma, tma_takes
from course_lib.kernels.attention.ideas import attention_with_ideas
from course_lib.kernels.attention.order import longest_first
from course_lib.kernels.attention.tiles import LARGE_ARCHITECTURES, candidate_tiles, milliseconds
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.softmax import PAPERS_THRESHOLD
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.hopper.limits import hopper_refusal

SHARE = 8  # of every 32 exponentials, which is free of doubles on sm_90, see `exponentials`
LAZY, POLYNOMIAL, ORDERED = {"threshold": PAPERS_THRESHOLD}, {"share": SHARE}, {"ordered": True}
PLAIN: dict[str, dict] = {
    "plain": {},
    "lazy": LAZY,
    "polynomial": POLYNOMIAL,
    "longest first": ORDERED,
    "all": {**LAZY, **POLYNOMIAL, **ORDERED},
}
TMA: dict[str, dict] = {"TMA": {}, "TMA, lazy": LAZY, "TMA, longest": ORDERED, "TMA, both": {**LAZY, **ORDERED}}
GLUON: dict[str, dict] = {"Gluon": {}, "Gluon, lazy": LAZY, "Gluon, by head": {"heads_at_once": 1}}
ROWS = [Row(head_dim, causal, length) for head_dim in (128, 64) for length in (16384, 4096, 1024)
        for causal in (False, True)]  # fmt: skip

Launch = Callable[[], torch.Tensor]


def tiles_to_try(query: torch.Tensor) -> tuple[Tiles, ...]:
    arch = architecture_of(query.device)
    assert arch is not None, "tiles are measured on a GPU"
    return candidate_tiles(arch, query.dtype, triton.next_power_of_2(query.shape[3]))


def with_best_tiles(run, inputs, causal: bool, ideas: dict) -> Launch:
    """A launch of `run` on these inputs with the tiles that are fastest for it."""
    options = dict(ideas)
    candidates = tiles_to_try(inputs[0])
    orders = {}
    if options.pop("ordered", False):
        orders = {tiles: longest_first(inputs[0], inputs[1], tiles.query_rows) for tiles in candidates}

    def launch(tiles):
        return run(*inputs, causal=causal, tiles=tiles, order=orders.get(tiles), validate=False, **options)

    best = candidates[0]
    if len(candidates) > 1:
        best = min(candidates, key=functools.partial(milliseconds, launch))
    return functools.partial(launch, best)


def plain(*inputs, **options) -> torch.Tensor:
    return attention_with_ideas(*inputs, counted=False, **options).output


def launches(inputs, causal: bool) -> dict[str, Callable[[], Launch]]:
    """Column -> what makes its launch, of those that this machine can run."""
    made: dict[str, Callable[[], Launch]] = {
        name: functools.partial(with_best_tiles, plain, inputs, causal, ideas) for name, ideas in PLAIN.items()
    }
    if architecture_of(inputs[0].device) in LARGE_ARCHITECTURES and tma_takes(*inputs):
        made |= {
            name: functools.partial(with_best_tiles, flash_attention_tma, inputs, causal, ideas)
            for name, ideas in TMA.items()
        }
    if hopper_refusal(*inputs) is None:
        from course_lib.kernels.hopper.flash import flash_attention_hopper

        made |= {
            name: functools.partial(functools.partial, flash_attention_hopper, *inputs, causal=causal, **options)
            for name, options in GLUON.items()
        }
    return made


def rescales(inputs, causal: bool) -> dict[str, float]:
    """New references of a tile after its first block, on average, without and with the threshold."""
    counted = {
        name: attention_with_ideas(*inputs, causal=causal, threshold=threshold).rescales
        for name, threshold in (("usual", 0.0), ("lazy", PAPERS_THRESHOLD))
    }
    return {name: count.float().mean().item() for name, count in counted.items() if count is not None}


def measure_row(row: Row) -> dict:
    """{column: {"tflops", "low", "high", "ms"} or {"missing": why}} for one problem."""
    inputs = row.inputs()
    results: dict[str, dict] = {}
    replays, reference = {}, None
    for name, make in launches(inputs, row.causal).items():
        try:
            replay = captured(make())
            output = replay()
            torch.cuda.synchronize()
        except Exception as error:  # a compiler that refuses, a Triton without Gluon: the others have their figures
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = output.clone() if reference is None else reference
        difference = ((output.float() - reference.float()).norm() / reference.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs from the first by {difference:.1e}"}
            continue
        replays[name], results[name] = replay, {"difference": difference}
    for name, timing in measure_together(replays, seconds=SECONDS_PER_FIGURE).items() if replays else ():
        results[name] |= {
            "tflops": row.flops / timing.median / 1e12,
            "low": row.flops / timing.high / 1e12,
            "high": row.flops / timing.low / 1e12,
            "ms": timing.median * 1e3,
        }
    return results


def print_part(table: dict, columns: list[str]) -> None:
    """Columns of one kernel: TFLOP/s as it is, and what each idea makes of it in percent."""
    first, *others = columns
    print(f"\n{'':<20}{first + ', TFLOP/s':>18}" + "".join(f"{name:>17}" for name in others))
    for row, results in table.items():
        base = results.get(first, {}).get("tflops")
        cells = [f"{base:.0f}" if base else "–"]
        for name in others:
            rate = results.get(name, {}).get("tflops")
            cells.append(f"{rate:.0f} ({100 * (rate / base - 1):+.1f} %)" if rate and base else "–")
        print(f"{row:<20}{cells[0]:>18}" + "".join(f"{cell:>17}" for cell in cells[1:]))


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench ideas needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before = clocks()
    table, counts = {}, {}
    for row in ROWS:
        table[row.name], counts[row.name] = measure_row(row), rescales(row.inputs(), row.causal)
        for name, result in table[row.name].items():
            if "missing" in result:
                print(f"{row.name}: no figure for {name}: {result['missing']}", flush=True)
        torch.cuda.empty_cache()
    for part in (PLAIN, TMA, GLUON):
        print_part(table, list(part))
    print("\nNew references of a tile after its first block, on average: usual, and with a threshold of 8")
    for name, count in counts.items():
        print(f"{name:<20}{count['usual']:>10.1f}{count['lazy']:>10.1f}")
    rows = [dataclasses.asdict(row) | {"name": row.name, "results": table[row.name], "rescales": counts[row.name]}
            for row in ROWS]  # fmt: skip
    write_record("ideas", before, rows=rows)
    return 0
