"""`python -m course_lib bench quantised`: decode over caches of 16, 8 and 4 bits, beside FlashInfer's FP8, in one run.

One query token a sequence, 32 query heads on 8 KV heads of 128, pages of 64 tokens in random order, caches full. Ours
in 16 bits, e4m3 with a scale for each head, e4m3 with one for each page and head, INT4; FlashInfer's FP8 where it is
installed, with the same pages and one scale.

Each form is a replayed CUDA graph, all of them timed in turns (`measure_together`), the L2 cache flushed before each
step. Bytes are those of the codes, scales and middles, once. Keys have four channels that are 30 times as large as the
others. `error` is a kernel's own, against float64 of what its codes stand for; `rounded` what the codes have changed,
against float64 of the 16-bit cache; both of two sequences, relative. Figures, versions and clocks go to quantised.json
in the bench folder.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.decode import HEAD_DIM, in_pages
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.decode.reference import paged_decode_reference
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.quantised.append import append_to_int4_pages
from course_lib.kernels.quantised.formats import GROUP, empty_int4_cache, quantise_e4m3_reference
from course_lib.kernels.quantised.fp8 import scales_for
from course_lib.kernels.quantised.fp8_decode import paged_fp8_decode_attention
from course_lib.kernels.quantised.int4_decode import paged_int4_decode_attention
from course_lib.kernels.quantised.reference import int4_decode_reference, paged_fp8_decode_reference

QUERY_HEADS, KEY_HEADS = 32, 8
PAGE_SIZE = GROUP
OUTLIER_CHANNELS, OUTLIER_SIZE = slice(3, None, HEAD_DIM // 4), 30
SECONDS_PER_FIGURE = 0.2
LARGEST_ERROR = 1e-2  # bf16 results of right kernels err by about 2e-3
CHECKED_SEQUENCES = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: a token of each of `batch` sequences against `context` tokens."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.batch}, {self.context // 1024}k"

    def bytes_read(self, bits: float) -> float:
        return 2 * self.batch * KEY_HEADS * self.context * HEAD_DIM * bits / 8


TABLE = [Row(1, 131072), Row(16, 8192), Row(64, 4096)]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to hold the cache: what is timed, its meaning for the first sequences in float64, and a number's bits."""

    decode: Callable[[], torch.Tensor]
    meaning: Callable[[], torch.Tensor]
    bits: float


def forms(row: Row, dtype) -> dict[str, Form]:
    """{column: form} of what can run here. The first is the 16-bit cache."""
    query = torch.randn(row.batch, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=dtype)
    key, value = (torch.randn(row.batch, KEY_HEADS, row.context, HEAD_DIM, device="cuda", dtype=dtype)
                  for _ in range(2))  # fmt: skip
    key[..., OUTLIER_CHANNELS] *= OUTLIER_SIZE
    lengths = torch.full((row.batch,), row.context, dtype=torch.int32, device="cuda")
    order = torch.randperm(row.batch * row.context // PAGE_SIZE, device="cuda")
    tables = order.view(row.batch, -1).int()
    pools = [in_pages(cache, order, PAGE_SIZE) for cache in (key, value)]
    few = slice(0, CHECKED_SEQUENCES)
    exact = query[few].double(), tables[few], lengths[few]
    found = {
        "ours, 16 bits": Form(
            functools.partial(paged_decode_attention, query, pools[0], pools[1], tables, lengths, validate=False),
            lambda: small_pools(paged_decode_reference, exact, pools), 16),
    }  # fmt: skip
    for name, axes in (("FP8, by head", (0, 2, 3)), ("FP8, by page", (2, 3))):
        largest = [pool.abs().amax(dim=axes).float() for pool in pools]
        scales = dict(zip(("key_scales", "value_scales"), map(scales_for, largest)))
        codes = [quantise_e4m3_reference(pool, scale) for pool, scale in zip(pools, scales.values())]
        found[name] = Form(
            functools.partial(paged_fp8_decode_attention, query, codes[0], codes[1], tables, lengths, **scales,
                              validate=False),
            functools.partial(small_pools, paged_fp8_decode_reference, exact, codes, **scales), 8)  # fmt: skip
    cache = empty_int4_cache(row.batch, KEY_HEADS, HEAD_DIM, pages=len(order), dtype=dtype, device="cuda")
    append_to_int4_pages(key, value, cache, tables, torch.zeros_like(lengths), validate=False)
    found["INT4"] = Form(
        functools.partial(paged_int4_decode_attention, query, cache, tables, lengths, validate=False),
        lambda: int4_of_few(exact, cache), 4.5)  # fmt: skip
    with contextlib.suppress(ImportError):
        scales = {name: scales_for(pool.abs().amax().float()) for name, pool in zip(("key", "value"), pools)}
        codes = [quantise_e4m3_reference(pool, scale) for pool, scale in zip(pools, scales.values())]
        named = {f"{name}_scales": scale for name, scale in scales.items()}
        found["FlashInfer FP8"] = Form(
            flashinfer_decode(query, codes, tables, lengths, scales),
            functools.partial(small_pools, paged_fp8_decode_reference, exact, codes, **named), 8)  # fmt: skip
    return found


def small_pools(reference, exact, pools, **scales) -> torch.Tensor:
    """A reference over the pages of the first sequences alone: float64 of the whole pool would not fit."""
    query, tables, lengths = exact
    used = tables.flatten().long()
    own = torch.arange(len(used), dtype=torch.int32, device=tables.device).view_as(tables)
    few = [pool[used] if pool.dtype == torch.float8_e4m3fn else pool[used].double() for pool in pools]
    scales = {name: scale[used] if scale.dim() == 2 else scale for name, scale in scales.items()}
    return reference(query, *few, own, lengths, **scales)


def int4_of_few(exact, cache) -> torch.Tensor:
    query, tables, lengths = exact
    used = tables.flatten().long()
    own = torch.arange(len(used), device=tables.device).view_as(tables)
    return int4_decode_reference(query, cache.quantised(lambda part: part[used]), lengths, block_tables=own)


def flashinfer_decode(query, codes, tables, lengths, scales):
    """FlashInfer's paged decode over e4m3 pages, planned once, as its users do."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    batch, blocks = tables.shape
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda"), "HND", use_tensor_cores=True
    )
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * blocks
    last = torch.full((batch,), PAGE_SIZE, dtype=torch.int32, device="cuda")
    wrapper.plan(starts, tables.flatten(), last, QUERY_HEADS, KEY_HEADS, HEAD_DIM, PAGE_SIZE,
                 q_data_type=query.dtype, kv_data_type=torch.float8_e4m3fn)  # fmt: skip
    numbers = {f"{name[0]}_scale": scale.item() for name, scale in scales.items()}
    return lambda: wrapper.run(query, tuple(codes), **numbers)


def measure_row(row: Row) -> dict:
    """{column: "us", "low", "high", "tbps", "error" and "rounded"; or "missing", why there are none}."""
    dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
    results: dict[str, dict] = {}
    replays, whole = {}, None
    found = forms(row, dtype)
    for name, form in found.items():
        try:
            replay = captured(form.decode)
            output = replay()[:CHECKED_SEQUENCES].double()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as refusal:  # what this machine or this library cannot do
            results[name] = {"missing": str(refusal).strip().splitlines()[0][:160]}
            continue
        meant = form.meaning()
        whole = meant if whole is None else whole
        error = ((output - meant).norm() / meant.norm()).item()
        results[name] = {"error": error, "rounded": ((meant - whole).norm() / whole.norm()).item()}
        if error < LARGEST_ERROR:
            replays[name] = replay
        else:
            results[name]["missing"] = f"wrong: its error is {error:.1e}"
    for name, timing in measure_together(replays, seconds=SECONDS_PER_FIGURE).items():
        results[name] |= {"us": timing.median * 1e6, "low": timing.low * 1e6, "high": timing.high * 1e6,
                          "tbps": timing.bandwidth(row.bytes_read(found[name].bits)) / 1e12}  # fmt: skip
    return results


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench quantised needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before = clocks()
    table = {}
    print(f"{'batch, context':<16}{'':<16}{'µs':>9}{'TB/s':>7}{'16 bits':>9}{'error':>10}{'rounded':>10}")
    for row in TABLE:
        table[row.name] = measure_row(row)
        of_16_bits = table[row.name]["ours, 16 bits"].get("us", math.nan)
        for name, it in table[row.name].items():
            figures = (f"{it['us']:>9.1f}{it['tbps']:>7.2f}{of_16_bits / it['us']:>8.2f}×{it['error']:>10.1e}"
                       f"{it['rounded']:>10.1e}" if "us" in it else " – " + it["missing"])  # fmt: skip
            print(f"{row.name:<16}{name:<16}{figures}", flush=True)
        torch.cuda.empty_cache()
    write_record("quantised", before, table=table)
    return 0
