"""`python -m course_lib bench attention`: the course's forward kernels beside those that people use, in one run.

One table, in TFLOP/s: 16384 tokens in 16-bit floats, head dimension 128 with 16 heads or 64 with 32. FLOPs are
4 · batch · heads · length² · head_dim, halved when causal, whatever an implementation really computes. Every figure is
the median of repeated runs with the L2 cache flushed before each, in short turns of all columns in changing order;
every result is compared with FA2's before it is timed. What runs is a CUDA graph of the call: at 1k a kernel takes
150 µs, and some hosts take longer to call it. Figures, versions and clocks go to attention.json, plots to attention.png
and attention_64.png, in the course's bench folder.

Triton's own tutorial kernel is not a column: it is not part of any package that could be called.
"""

import dataclasses
import functools
import importlib
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.bench._record import bench_path, clocks, write_record
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.attention.dispatch import portable
from course_lib.kernels.attention.naive import memory_available, memory_needed, naive_attention

TOKENS = 16384
SECONDS_PER_FIGURE = 0.3
LARGEST_DIFFERENCE = 1e-2  # ‖out - FA2's‖ / ‖FA2's‖: 16-bit results of two right kernels differ by about 1e-3


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: self-attention of TOKENS tokens in sequences of `length`."""

    head_dim: int
    causal: bool
    length: int

    @property
    def heads(self) -> int:
        return 2048 // self.head_dim

    @property
    def batch(self) -> int:
        return TOKENS // self.length

    @property
    def flops(self) -> float:
        whole = 4 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    @property
    def name(self) -> str:
        return f"D{self.head_dim} {'causal' if self.causal else 'full'} {self.length}"

    def inputs(self) -> list[torch.Tensor]:
        dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
        shape = (self.batch, self.heads, self.length, self.head_dim)
        return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]


ROWS = [Row(128, causal, length) for length in (16384, 8192, 4096, 2048, 1024, 512) for causal in (False, True)]
ROWS += [Row(64, causal, length) for length in (16384, 8192, 4096, 2048, 1024) for causal in (False, True)]


def sdpa(backend):
    def attention(query, key, value, causal):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attention


@functools.cache
def compiled_flex_attention():
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def causal_block_mask(length: int):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda batch, head, query, key: query >= key, None, None, length, length, device="cuda")


def flex(query, key, value, causal):
    mask = causal_block_mask(query.shape[2]) if causal else None
    return compiled_flex_attention()(query, key, value, block_mask=mask)


def naive(query, key, value, causal):
    return naive_attention(query, key, value, causal=causal)


def ours(query, key, value, causal):
    return portable(query, key, value, causal=causal)


def implementations() -> dict:
    """Column name -> function(query, key, value, causal). The Gluon kernel is there once the course has it."""
    found = {
        "FA2": sdpa(SDPBackend.FLASH_ATTENTION),
        "cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION),
        "flex": flex,
        "naive": naive,
        "ours": ours,
    }
    if machine().tier == "hopper":
        try:
            hopper = importlib.import_module("course_lib.kernels.hopper.flash").flash_attention_hopper
        except (ImportError, AttributeError):
            return found
        found["ours, Gluon"] = lambda query, key, value, causal: hopper(query, key, value, causal=causal)
    return found


def measure_row(row: Row, columns: dict) -> dict:
    """{column: {"tflops", "low", "high", "ms"} or {"missing": why}} for one problem."""
    query, key, value = row.inputs()
    results: dict[str, dict] = {}
    replays, reference = {}, None
    for name, attention in columns.items():
        if name == "naive" and memory_needed(query, row.length) > memory_available(query.device) / 2:
            results[name] = {"missing": "does not fit"}
            continue
        try:
            replay = captured(functools.partial(attention, query, key, value, row.causal))
            output = replay()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:  # a backend that this machine or this PyTorch lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = output.clone() if reference is None else reference
        difference = ((output.float() - reference.float()).norm() / reference.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs from FA2 by {difference:.1e}"}
            continue
        replays[name] = replay
        results[name] = {"difference": difference}
    timings = measure_together(replays, seconds=SECONDS_PER_FIGURE) if replays else {}
    for name, timing in timings.items():
        results[name] |= {
            "tflops": row.flops / timing.median / 1e12,
            "low": row.flops / timing.high / 1e12,
            "high": row.flops / timing.low / 1e12,
            "ms": timing.median * 1e3,
        }
    return results


def print_head(columns: list[str]) -> None:
    print(f"\n{'TFLOP/s':<20}" + "".join(f"{name:>13}" for name in columns) + f"{'ours / FA2':>13}{'spread':>9}")


def print_row(row: str, results: dict, columns: list[str]) -> None:
    """Its figures, as soon as they are there, and why one is missing."""
    cells = [f"{results[name]['tflops']:.0f}" if "tflops" in results[name] else "–" for name in columns]
    best, fa2 = results["ours"], results["FA2"]
    ratio = f"{best['tflops'] / fa2['tflops']:.2f}" if "tflops" in best and "tflops" in fa2 else "–"
    spread = f"{100 * (best['high'] - best['low']) / best['tflops']:.0f} %" if "tflops" in best else "–"
    print(f"{row:<20}" + "".join(f"{cell:>13}" for cell in cells) + f"{ratio:>13}{spread:>9}", flush=True)
    for name, result in results.items():
        if "missing" in result:
            print(f"    no figure for {name}: {result['missing']}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench attention needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    warnings.filterwarnings("ignore", module="torch")  # each backend explains at length why it is not another one
    torch.manual_seed(0)
    columns = implementations()
    before = clocks()
    table = {}
    print_head(list(columns))
    for row in ROWS:
        # torch.compile gives up on a function that it compiled for eight shapes: every row starts anew.
        torch.compiler.reset()
        compiled_flex_attention.cache_clear()
        table[row.name] = measure_row(row, columns)
        print_row(row.name, table[row.name], list(columns))
        torch.cuda.empty_cache()
    roof = ceilings().matmul_rate
    from course_lib.figures.memory.throughput import throughput_figure

    print("Spread: 10th to 90th percentile of ours.")
    rows = [dataclasses.asdict(row) | {"name": row.name, "results": table[row.name]} for row in ROWS]
    record = write_record("attention", before, rows=rows,
                          matmul_tflops={dtype: rate / 1e12 for dtype, rate in roof.items()})  # fmt: skip
    for head_dim, picture in ((128, "attention.png"), (64, "attention_64.png")):
        throughput_figure(record, head_dim).savefig(bench_path(picture))
    return 0
