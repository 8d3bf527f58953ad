"""`python -m course_lib bench windows`: attention with a window beside full causal attention, in one run.

Milliseconds of forward and backward in 16-bit floats. A window of W keys counts the query's own, as published models
count it: position i sees the keys i - W + 1 to i. Each figure is the median of repeated runs with the L2 cache flushed
before each, in short turns of all columns in changing order; a forward is replayed as a CUDA graph. Every result is
compared with FlexAttention's before it is timed. FlashAttention 4 is a column where its package is installed.

The last column holds a window against what it visits: the share of the causal row's time, divided by the share of its
tiles (128 queries by 128 keys). 1.0 means that a skipped tile costs nothing. A causal row says –.

Figures, versions and clocks go to windows.json, in the course's bench folder.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import torch
import triton

from course_lib.bench._record import clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE, compiled_flex_attention
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.attention.dispatch import portable
from course_lib.kernels.attention.operator import attention

SECONDS_PER_FIGURE = 0.2
TILE = 128


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: causal self-attention, within `window` keys where that is given."""

    batch: int
    query_heads: int
    key_heads: int
    head_dim: int
    length: int
    window: int | None
    backward: bool = False

    @property
    def name(self) -> str:
        heads = f"{self.query_heads}/{self.key_heads}"
        keys = "causal" if self.window is None else f"window {self.window}"
        return f"B{self.batch} H{heads} D{self.head_dim} {self.length} {keys}{' backward' if self.backward else ''}"

    @property
    def tiles(self) -> int:
        """How many tiles of TILE queries by TILE keys hold a pair that counts, in one head."""
        rows = triton.cdiv(self.length, TILE)
        first_keys = [0 if self.window is None else max(0, row * TILE - self.window + 1) for row in range(rows)]
        return sum(row + 1 - first_key // TILE for row, first_key in enumerate(first_keys))

    def inputs(self) -> list[torch.Tensor]:
        dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
        queries = self.batch, self.query_heads, self.length, self.head_dim
        keys = self.batch, self.key_heads, self.length, self.head_dim
        made = [torch.randn(shape, device="cuda", dtype=dtype) for shape in (queries, keys, keys)]
        return [tensor.requires_grad_(self.backward) for tensor in made]


SHAPES = {  # batch, query heads, KV heads, head dimension: the lengths, the windows, after the causal row
    (1, 16, 8, 256): ((4096, 8192, 16384, 27648, 65536), (None, 1024)),
    (1, 8, 8, 64): ((512, 1024, 4096, 16384), (None, 64)),
    (1, 16, 16, 128): ((4096, 16384, 65536), (None, 128, 512, 1024, 4096)),
}
ROWS = [Row(*shape, length, window)
        for shape, (lengths, windows) in SHAPES.items() for length in lengths for window in windows]  # fmt: skip
ROWS += [Row(4, 16, 16, 64, 16384, window, backward) for backward in (False, True) for window in (None, 1024)]


@functools.cache
def block_mask(length: int, window: int | None):
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch, head, query, key):
        return query >= key if window is None else (query >= key) & (query - key < window)

    return create_block_mask(visible, None, None, length, length, device="cuda")


def flex(row: Row):
    mask = block_mask(row.length, row.window)
    grouped = row.query_heads != row.key_heads
    return lambda *inputs: compiled_flex_attention()(*inputs, block_mask=mask, enable_gqa=grouped)


def ours(row: Row, function=attention):
    before = None if row.window is None else row.window - 1
    return functools.partial(function, causal=True, window=before)


def flash_attention_4(row: Row):
    from flash_attn.cute import flash_attn_func

    bounds = (None, None) if row.window is None else (row.window - 1, 0)

    def attend(*inputs):
        found = flash_attn_func(*(tensor.transpose(1, 2) for tensor in inputs), causal=True, window_size=bounds)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return attend


COLUMNS: dict[str, Callable[[Row], Callable]] = {
    "flex": flex,
    "FA4": flash_attention_4,
    "portable": functools.partial(ours, function=portable),
    "ours": ours,
}


def prepared(row: Row, attend: Callable, inputs: list, gradient: torch.Tensor) -> tuple[Callable, torch.Tensor]:
    """What is timed, and what it gives as one tensor: the forward as a graph, or the backward of one forward."""
    if not row.backward:
        replay = captured(functools.partial(attend, *inputs))
        return replay, replay().clone()
    output = attend(*inputs)
    call = functools.partial(torch.autograd.grad, output, inputs, gradient, retain_graph=True)
    return call, torch.cat([tensor.flatten() for tensor in call()])


def measure_row(row: Row) -> dict:
    """{column: {"ms", "low", "high", "difference"} or {"missing": why}} for one problem."""
    inputs = row.inputs()
    gradient = torch.randn_like(inputs[0])
    results: dict[str, dict] = {}
    calls, reference = {}, None
    for name, column in COLUMNS.items():
        if row.backward and name == "portable":
            results[name] = {"missing": "the operator differentiates, and chooses by itself"}
            continue
        try:
            call, found = prepared(row, column(row), inputs, gradient)
        except (RuntimeError, ValueError, ImportError) as error:  # what this machine or this PyTorch lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = found if reference is None else reference
        difference = ((found.float() - reference.float()).norm() / reference.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs from flex by {difference:.1e}"}
            continue
        calls[name], results[name] = call, {"difference": difference}
    timings = measure_together(calls, seconds=SECONDS_PER_FIGURE) if calls else {}
    for name, timing in timings.items():
        results[name] |= {"ms": timing.median * 1e3, "low": timing.low * 1e3, "high": timing.high * 1e3}
    return results


def against_its_tiles(row: Row, table: dict) -> float | None:
    """A window's share of the causal row's time, over its share of the tiles; None where one was not measured."""
    causal = dataclasses.replace(row, window=None)
    times = [table.get(each.name, {}).get("ours", {}).get("ms") for each in (row, causal)]
    if row.window is None or None in times:
        return None
    return (times[0] / times[1]) / (row.tiles / causal.tiles)


def line_of(row: Row, table: dict) -> str:
    """A row of the printed table."""
    results, share = table[row.name], against_its_tiles(row, table)
    cells = [f"{results[name]['ms']:.3f}" if "ms" in results[name] else "–" for name in COLUMNS]
    cells.append("–" if share is None else f"{share:.2f}")
    return f"{row.name:<44}" + "".join(f"{cell:>12}" for cell in cells)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench windows needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    warnings.filterwarnings("ignore", module="torch")
    torch.manual_seed(0)
    before, table = clocks(), {}
    print(f"\n{'ms':<44}" + "".join(f"{name:>12}" for name in COLUMNS) + f"{'over tiles':>12}")
    for row in ROWS:
        # torch.compile gives up on a function that it compiled for eight shapes: every row starts anew.
        torch.compiler.reset()
        compiled_flex_attention.cache_clear()
        table[row.name] = measure_row(row)
        print(line_of(row, table), flush=True)
        for why in sorted({result["missing"] for result in table[row.name].values() if "missing" in result}):
            print(f"    no figure: {why}", flush=True)
        block_mask.cache_clear()
        torch.cuda.empty_cache()
    rows = [dataclasses.asdict(row) | {"name": row.name, "results": table[row.name]} for row in ROWS]
    write_record("windows", before, rows=rows)
    return 0
