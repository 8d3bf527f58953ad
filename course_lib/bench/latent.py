"""`python -m course_lib bench latent`: latent attention's decode, every form beside FlashInfer's, in one run.

bf16, one query token, latents of 512 + 64 numbers, caches full, shapes of batch, heads and context. The portable kernel
with a contiguous cache and with pages of 64 tokens in random order, the Hopper kernel likewise, and FlashInfer's "fa3"
where it is installed, with the same pages.

Each form is a replayed CUDA graph, all of them timed in turns (`measure_together`), the L2 cache flushed before each
step. FLOPs are 2 · batch · heads · context · (576 + 512), bytes those of the cache, once. The error is that of two
sequences, relative to their float64 result. Figures, versions and clocks go to latent.json in the bench folder.
"""

import contextlib
import dataclasses
import functools
import math

import torch

from course_lib.bench._record import bench_path, clocks, write_record
from course_lib.figures.latent.beside_flashinfer import COLORS, draw_beside_flashinfer
from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.kernels.latent.attention import latent_decode_attention, paged_latent_decode_attention
from course_lib.kernels.latent.reference import latent_decode_reference

VALUE_DIM, ROPE_DIM, PAGE_SIZE = 512, 64, 64
SCALE = 1 / math.sqrt(128 + 64)  # of DeepSeek-V3's heads, expanded
SECONDS_PER_FIGURE = 0.2
LARGEST_ERROR = 1e-2  # bf16 results of right kernels err by about 2e-3
CHECKED_SEQUENCES = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem: a token of each of `batch` sequences against `context` latents."""

    batch: int
    heads: int
    context: int

    @property
    def name(self) -> str:
        context = f"{self.context // 1024}k" if self.context % 1024 == 0 else str(self.context)
        return f"{self.batch}, {self.heads}, {context}"

    @property
    def flops(self) -> float:
        return 2 * self.batch * self.heads * self.context * (2 * VALUE_DIM + ROPE_DIM)

    @property
    def bytes_read(self) -> int:
        return self.batch * self.context * (VALUE_DIM + ROPE_DIM) * 2

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.bfloat16 if supports_bfloat16() else torch.float16
        query = torch.randn(self.batch, 1, self.heads, VALUE_DIM + ROPE_DIM, device="cuda", dtype=dtype)
        cache = torch.randn(self.batch, self.context, VALUE_DIM + ROPE_DIM, device="cuda", dtype=dtype)
        return query, cache, torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")


TABLE = [
    Row(1, 128, 32768),
    Row(16, 128, 8192),
    Row(64, 128, 4096),
    Row(128, 128, 4096),
    Row(64, 16, 8192),
    Row(128, 128, 1151),
    Row(128, 128, 32768),
]


def in_pages(cache) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache [batch, context, width] as pages in random order, and the tables."""
    batch, context, width = cache.shape
    blocks = math.ceil(context / PAGE_SIZE)
    order = torch.randperm(batch * blocks, device="cuda")
    pages = torch.zeros(batch * blocks, PAGE_SIZE, width, device="cuda", dtype=cache.dtype)
    for sequence, places in enumerate(order.view(batch, blocks)):  # one after another: no second copy of the cache
        padded = torch.nn.functional.pad(cache[sequence], (0, 0, 0, blocks * PAGE_SIZE - context))
        pages[places] = padded.view(blocks, PAGE_SIZE, width)
    return pages, order.view(batch, blocks).int()


def implementations(query, cache, lengths) -> dict:
    """{column: function} of what can run here."""
    pages, tables = in_pages(cache)
    portable = functools.partial(latent_decode_attention, scale=SCALE, validate=False)
    paged = functools.partial(paged_latent_decode_attention, scale=SCALE, validate=False)
    found = {
        "portable": functools.partial(portable, query, cache, lengths),
        "portable, pages": functools.partial(paged, query, pages, tables, lengths),
    }
    with contextlib.suppress(ImportError):
        from course_lib.kernels.latent.hopper import latent_decode_hopper, paged_latent_decode_hopper

        options = {"scale": SCALE, "validate": False}  # to look at lengths waits for the GPU: no graph can capture it
        found["Hopper"] = functools.partial(latent_decode_hopper, query, cache, lengths, **options)
        found["Hopper, pages"] = functools.partial(paged_latent_decode_hopper, query, pages, tables, lengths, **options)
    with contextlib.suppress(ImportError):
        found["FlashInfer fa3"] = flashinfer_decode(query, pages, tables, lengths)
    return found


def flashinfer_decode(query, pages, tables, lengths):
    """FlashInfer's MLA decode, planned once, as its users do."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper  # type: ignore[import-not-found]

    batch, _, heads, _ = query.shape
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(128 * 2**20, dtype=torch.int8, device="cuda"), backend="fa3")
    counts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    wrapper.plan(counts, counts * tables.shape[1], tables.flatten(), lengths, heads, VALUE_DIM, ROPE_DIM, PAGE_SIZE,
                 True, SCALE, query.dtype, pages.dtype)  # fmt: skip
    latent_part, rotary_part = (part.contiguous() for part in query[:, 0].split((VALUE_DIM, ROPE_DIM), dim=-1))
    latents, rotary_keys = pages.split((VALUE_DIM, ROPE_DIM), dim=-1)
    return lambda: wrapper.run(latent_part, rotary_part, latents, rotary_keys)


def measure_row(row: Row) -> dict:
    """{column: "us", "tflops", "tbps", "low", "high" and "error"; or "missing", why there are none}."""
    query, cache, lengths = row.inputs()
    few = slice(0, CHECKED_SEQUENCES)
    exact = latent_decode_reference(query[few].double(), cache[few].double(), scale=SCALE, value_dim=VALUE_DIM)
    results: dict[str, dict] = {}
    replays = {}
    for name, decode in implementations(query, cache, lengths).items():
        try:
            replay = captured(decode)
            output = replay().view(row.batch, 1, row.heads, VALUE_DIM)[few].double()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as refusal:  # what this machine or this library cannot do
            results[name] = {"missing": str(refusal).strip().splitlines()[0][:160]}
            continue
        error = ((output - exact).norm() / exact.norm()).item()
        results[name] = {"error": error}
        if error < LARGEST_ERROR:
            replays[name] = replay
        else:
            results[name]["missing"] = f"wrong: its error is {error:.1e}"
    for name, timing in measure_together(replays, seconds=SECONDS_PER_FIGURE).items():
        results[name] |= {"us": timing.median * 1e6, "low": timing.low * 1e6, "high": timing.high * 1e6,
                          "tflops": timing.rate(row.flops) / 1e12,
                          "tbps": timing.bandwidth(row.bytes_read) / 1e12}  # fmt: skip
    return results


def beside_flashinfer(table: dict[str, dict]) -> list[dict]:
    """The rows of a run that FlashInfer has a figure in, as `draw_beside_flashinfer` takes them."""
    rows = []
    for name, results in table.items():
        other = results.get("FlashInfer fa3", {})
        if "us" in other:
            ratios = {ours: other["us"] / results[ours]["us"] for ours in COLORS if "us" in results.get(ours, {})}
            rows.append({"name": name, "flashinfer": f"{other['us']:.1f} µs", "ratios": ratios})
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table; returns the exit status."""
    if machine().tier == "none":
        print("bench latent needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before = clocks()
    table = {}
    print(f"{'batch, heads, context':<22}{'':<16}{'TFLOP/s':>9}{'TB/s':>7}{'µs':>9}{'error':>10}")
    for row in TABLE:
        table[row.name] = measure_row(row)
        for name, it in table[row.name].items():
            figures = (
                f"{it['tflops']:>9.0f}{it['tbps']:>7.2f}{it['us']:>9.1f}{it['error']:>10.1e}" if "us" in it else ""
            )
            print(f"{row.name:<22}{name:<16}{figures or ' – ' + it['missing']}", flush=True)
        torch.cuda.empty_cache()
    record = write_record("latent", before, table=table, rows=beside_flashinfer(table))
    if record["rows"]:
        draw_beside_flashinfer(record).savefig(bench_path("latent.png"))
    return 0
