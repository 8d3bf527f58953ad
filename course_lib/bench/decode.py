"""`python -m course_lib bench decode`: one query token against a cache, our kernels beside PyTorch's, in one run.

Three tables, bf16, head dimension 128, caches full. First six shapes of batch, heads and context, with a contiguous
cache and with pages of 16 and 64 tokens in random order; then page sizes; then contexts from 8k to 512k at batch 1.

Figures are bytes of keys and values read per second (query and output are a thousandth of them) and µs: the median of
repeated steps between GPU events, the L2 cache flushed before each. Each step is a replayed CUDA graph, everyone's
alike: from Python the host takes longer than the GPU in half of the rows, and would be what is timed. What a call takes
the host is in a table of its own. Every result is compared with FA2's before it is timed. Figures, versions and clocks
go to decode.json and a plot to decode.png, in the course's bench folder.
"""

import dataclasses
import functools
import statistics
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.bench._record import bench_path, clocks, write_record
from course_lib.bench.attention import LARGEST_DIFFERENCE, SECONDS_PER_FIGURE
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure
from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.decode.tiles import decode_plan
from course_lib.kernels.decode.workspace import decode_workspace
from course_lib.kernels.paged.attention import paged_decode_attention

HEAD_DIM = 128
SDPA = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
HOST_CALLS = 50  # in a row: fewer than the driver's queue holds
HOST_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: a token of each of `batch` sequences against `context` tokens."""

    batch: int
    query_heads: int
    key_heads: int
    context: int
    page_sizes: tuple[int, ...] = (16, 64)

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch}, {self.query_heads}/{self.key_heads}, {context}"

    @property
    def bytes_read(self) -> int:
        return 2 * self.batch * self.key_heads * self.context * HEAD_DIM * 2

    def inputs(self) -> list[torch.Tensor]:
        dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
        options: dict[str, Any] = {"device": "cuda", "dtype": dtype}
        query = torch.randn(self.batch, self.query_heads, HEAD_DIM, **options)
        caches = [torch.randn(self.batch, self.key_heads, self.context, HEAD_DIM, **options) for _ in range(2)]
        return [query, *caches, torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")]


TABLE = [
    Row(1, 32, 8, 131072),
    Row(1, 32, 8, 8192),
    Row(16, 32, 8, 8192),
    Row(64, 32, 8, 4096),
    Row(1, 32, 32, 32768),
    Row(16, 64, 8, 16384),
]
PAGES = [Row(1, 32, 8, 131072, (1, 16, 64, 256)), Row(16, 32, 8, 8192, (1, 16, 64, 256))]
CONTEXTS = [Row(1, 32, 8, 1024 * thousands) for thousands in (8, 16, 32, 64, 128, 256, 512)]


def page_column(page_size: int) -> str:
    return f"ours, page {page_size}"


def in_pages(cache, order, page_size: int) -> torch.Tensor:
    """A cache [batch, key_heads, context, head_dim] as pages [pages, key_heads, page_size, head_dim], in an order."""
    blocks = cache.unflatten(2, (-1, page_size)).transpose(1, 2).flatten(0, 1)
    pages = torch.empty_like(blocks, memory_format=torch.contiguous_format)
    pages[order] = blocks
    return pages


def host_seconds(function) -> float:
    """What a call of `function` takes the host: the median of some rounds, in none of which it waits for the GPU."""
    rounds = []
    for _ in range(HOST_ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            function()
        rounds.append((time.perf_counter() - started) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def implementations(row: Row, query, key, value, lengths):
    """Yields (column, function) one after another, so that only one set of pages exists at a time."""
    for name, backend in SDPA.items():
        yield name, functools.partial(sdpa_decode, backend, query, key, value)
    plan = decode_plan(query, row.key_heads, row.context)
    buffers = {
        "output": torch.empty_like(query),
        "workspace": decode_workspace(row.batch, row.query_heads, HEAD_DIM, plan.splits),
    }
    yield "ours", functools.partial(decode_attention, query, key, value, lengths, **buffers, validate=False)
    for page_size in row.page_sizes:
        blocks = row.context // page_size
        order = torch.randperm(row.batch * blocks, device="cuda")
        key_pages, value_pages = (in_pages(cache, order, page_size) for cache in (key, value))
        tables = order.view(row.batch, blocks).int()
        yield (
            page_column(page_size),
            functools.partial(
                paged_decode_attention, query, key_pages, value_pages, tables, lengths, **buffers, validate=False
            ),
        )
        del key_pages, value_pages


def sdpa_decode(backend, query, key, value):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]


def measure_row(row: Row) -> dict:
    """{column: results} for one problem.

    Results are "bandwidth" [bytes/s]; "us", "low" and "high", the median and spread of a step on the GPU; "host_us" of
    a call; and "difference" from FA2; or "missing": why there are none.
    """
    inputs = row.inputs()
    results: dict[str, dict] = {}
    reference = None
    for name, decode in implementations(row, *inputs):
        try:
            replay = captured(decode)
            result = replay()
            torch.cuda.synchronize()
        except RuntimeError as error:  # a backend that this machine or this PyTorch lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        reference = result.clone() if reference is None else reference
        difference = ((result.float() - reference.float()).norm() / reference.float().norm()).item()
        if not difference < LARGEST_DIFFERENCE:
            results[name] = {"missing": f"wrong: differs from FA2 by {difference:.1e}"}
            continue
        timing = measure(replay, seconds=SECONDS_PER_FIGURE)
        results[name] = {
            "bandwidth": row.bytes_read / timing.median,
            "us": timing.median * 1e6,
            "low": timing.low * 1e6,
            "high": timing.high * 1e6,
            "host_us": host_seconds(decode) * 1e6,
            "difference": difference,
        }
    return results


def measure_rows(rows: list[Row]) -> list[dict]:
    measured = []
    for row in rows:
        results = measure_row(row)
        measured.append(dataclasses.asdict(row) | {"name": row.name, "bytes": row.bytes_read, "results": results})
        for name, result in results.items():
            if "missing" in result:
                print(f"{row.name}: no figure for {name}: {result['missing']}", flush=True)
        torch.cuda.empty_cache()
    return measured


def print_table(title: str, rows: list[dict], cell) -> None:
    """A line for each row and a column for each implementation; cell(result) is its text."""
    columns = list(rows[0]["results"])
    print(f"\n{title}\n{'batch, heads, context':<22}" + "".join(f"{name:>16}" for name in columns))
    for row in rows:
        results = [row["results"][name] for name in columns]
        print(f"{row['name']:<22}" + "".join(f"{cell(result) if 'us' in result else '–':>16}" for result in results))


def speed(result: dict) -> str:
    return f"{result['bandwidth'] / 1e12:.2f} ({result['us']:.1f})"


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the tables; returns the exit status."""
    if machine().tier == "none":
        print("bench decode needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    warnings.filterwarnings("ignore", module="torch")  # each backend explains at length why it is not another one
    torch.manual_seed(0)
    before = clocks()
    tables = {"decode": measure_rows(TABLE), "page sizes": measure_rows(PAGES), "context": measure_rows(CONTEXTS)}
    from course_lib.figures.decode.bandwidth import decode_bandwidth_figure

    for title, rows in tables.items():
        print_table(f"{title}: TB/s (µs)", rows, speed)
    print_table("the host's part of a call that is no graph: µs", tables["decode"], lambda it: f"{it['host_us']:.0f}")
    roof = ceilings()
    print(f"pure read: {roof.read_bandwidth / 1e12:.2f} TB/s")
    record = write_record("decode", before, read_bandwidth=roof.read_bandwidth, copy_bandwidth=roof.copy_bandwidth,
                          tables=tables)  # fmt: skip
    decode_bandwidth_figure(record).savefig(bench_path("decode.png"))
    return 0
