"""`python -m course_lib bench products`: products for few rows beside cuBLAS and torch.compile, Llama-3.2-1B's shapes.

    ours, cuBLAS, torch.compile     x · weightᵀ alone; what torch.compile makes of it is cuBLAS's call
    … in a step                     with what stands around that product in a decoder: the factor of its norm, the gate,
                                    the addition and the next norm's squares
    dependent                       ours, each started while the one before runs (from sm_90 on)

16-bit numbers, 1, 8 and 64 rows. A figure is one of a replayed CUDA graph that does the same product with other weights
again and again, more of them than the L2 cache holds, as a model's step does; all graphs of a row are timed in turns
(`measure_together`). Bandwidth counts the weights' bytes alone, and its share is that of PyTorch's copy. The error is
that of the first rows, relative to their norm. "a step" is one graph of all products of all layers, and the logits.
Figures, versions and clocks go to products.json in the bench folder.

`sweep(rows)` looks for the best tiles of each product on this GPU: what `few_rows_tiles` should choose.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
import triton

from course_lib.bench._record import bench_path, clocks, write_record
from course_lib.bench.fused import compiled, error_of, random
from course_lib.bench.softmax import copy_bandwidth
from course_lib.hardware.device import known, machine
from course_lib.hardware.graphs import captured
from course_lib.hardware.timing import measure_together
from course_lib.hardware.units import format_bandwidth
from course_lib.kernels.common.dependent import dependent_launches
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.products.few_rows import Unscaled, few_rows_product, few_rows_product_reference
from course_lib.kernels.products.tiles import FewRowsTiles, few_rows_tiles
from course_lib.kernels.products.workspace import few_rows_workspace

LAYERS, EPSILON, PARTS = 16, 1e-5, 32
ROWS = (1, 8, 64)
LARGEST_ERROR = 1e-2  # of the norm; right kernels err by about 2e-3 in bf16
SECONDS_PER_FIGURE = 0.1
SWEPT_SECONDS = 0.01  # for one choice of tiles
PROGRAMS_SWEPT = (0.5, 16)  # for each multiprocessor
Graph = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of a decoder's step, and what stands around it there."""

    name: str
    outer: int
    inner: int
    normed: bool = False
    gated: bool = False
    residual: bool = False

    @property
    def bytes(self) -> int:
        return 2 * self.outer * self.inner

    @property
    def columns(self) -> int:
        return self.outer // 2 if self.gated else self.outer

    def options(self, rows: int) -> dict:
        """Of `few_rows_product`, in a step."""
        options: dict = {"gated": self.gated, "epsilon": EPSILON if self.normed else None}
        if self.residual:
            options |= {"residual": random(rows, self.columns), "gain": random(self.columns)}
        return options

    def x(self, rows: int, alone: bool = False) -> torch.Tensor | Unscaled:
        """Its argument; `Unscaled` where a norm stands before it in a step, unless it is alone."""
        x = random(rows, self.inner)
        squares = x.float().square().unflatten(1, (PARTS, -1)).sum(dim=2)
        return Unscaled(x, squares) if self.normed and not alone else x

    def weights(self, count: int) -> list[torch.Tensor]:
        return [random(self.outer, self.inner) * self.inner**-0.5 for _ in range(count)]

    def copies(self) -> int:
        """As many weights as the L2 cache holds twice, two at least."""
        return max(2, -(-2 * known(machine().l2_bytes) // self.bytes))


PRODUCTS = (
    Product("Q, K, V", 3072, 2048, normed=True),
    Product("output", 2048, 2048, residual=True),
    Product("gate and up", 16_384, 2048, normed=True, gated=True),
    Product("down", 2048, 8192, residual=True),
    Product("logits", 128_256, 2048, normed=True),
)


def in_pytorch(x, weight, epsilon=None, gated=False, residual=None, gain=None):
    """A product in a step as PyTorch's operations, in 16 bits: for torch.compile."""
    rows, squares = x if isinstance(x, Unscaled) else (x, None)
    result = F.linear(rows, weight)
    if squares is not None:
        result = result * torch.rsqrt(squares.sum(dim=1, keepdim=True) / rows.shape[1] + epsilon).to(result.dtype)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual
    return result if gain is None else (result, (result * gain, result.float().square().sum(dim=1, keepdim=True)))


def measure_row(product: Product, rows: int, copy: float) -> dict:
    """{form: "us", "low", "high", "tbps", "share" and "error"; or "missing", why there are none}."""
    weights = product.weights(product.copies())
    ours = functools.partial(few_rows_product, workspace=few_rows_workspace(rows, weights[:1]))
    alone: dict[str, Callable] = {"ours": ours, "cuBLAS": F.linear, "torch.compile": compiled(F.linear)}
    in_step: dict[str, Callable] = {"torch.compile, in a step": compiled(in_pytorch), "ours, in a step": ours}
    if dependent_launches():
        in_step["dependent, in a step"] = functools.partial(ours, dependent=True)
    results: dict[str, dict] = {}
    graphs: dict[str, Graph] = {}
    for forms, extra, x in (
        (alone, {}, product.x(rows, alone=True)),
        (in_step, product.options(rows), product.x(rows)),
    ):
        wide = {name: it.double() if torch.is_tensor(it) else it for name, it in extra.items()}
        wide_x = Unscaled(*(part.double() for part in x)) if isinstance(x, Unscaled) else x.double()
        exact = first_of(few_rows_product_reference(wide_x, weights[0].double(), **wide))
        for name, form in forms.items():
            error = error_of(first_of(form(x, weights[0], **extra)), (exact[:4],))
            results[name] = {"error": error}
            if error > LARGEST_ERROR:
                results[name]["missing"] = f"wrong: its error is {error:.1e}"
                continue
            graphs[name] = graph_of(form, x, weights, extra)
    for name, timing in measure_together(graphs, seconds=SECONDS_PER_FIGURE).items():
        results[name] |= figures_of(timing, product.bytes * len(weights), len(weights), copy)
    return results


def first_of(results):
    """Of a product before a norm its own result."""
    return results[0] if isinstance(results, tuple) else results


def graph_of(form: Callable, x, weights: list[torch.Tensor], options: dict) -> Graph:
    return captured(lambda: [form(x, weight, **options) for weight in weights])


def figures_of(timing, weight_bytes: int, times: int, copy: float) -> dict:
    """Of one of `times` products that a graph does."""
    bandwidth = timing.bandwidth(weight_bytes)
    return {"us": timing.median * 1e6 / times, "low": timing.low * 1e6 / times, "high": timing.high * 1e6 / times,
            "tbps": bandwidth / 1e12, "share": bandwidth / copy}  # fmt: skip


def measure_step(rows: int, copy: float) -> dict:
    """All products of a step, one behind the other: those of LAYERS layers, and the logits."""
    weights = {product: product.weights(1 if product is PRODUCTS[-1] else LAYERS) for product in PRODUCTS}
    order = [(product, weights[product][layer]) for layer in range(LAYERS) for product in PRODUCTS[:-1]]
    order.append((PRODUCTS[-1], weights[PRODUCTS[-1]][0]))
    alone, in_step = ({it: it.x(rows, alone) for it in PRODUCTS} for alone in (True, False))
    options = {product: product.options(rows) for product in PRODUCTS}
    ours = functools.partial(few_rows_product, workspace=few_rows_workspace(rows, [it[0] for it in weights.values()]))

    def all_of(form: Callable, in_a_step: bool) -> Graph:
        return captured(
            lambda: [
                form(in_step[it], weight, **options[it]) if in_a_step else form(alone[it], weight)
                for it, weight in order
            ]
        )

    graphs = {"ours": all_of(ours, False), "cuBLAS": all_of(F.linear, False), "ours, in a step": all_of(ours, True)}
    if dependent_launches():
        graphs["dependent, in a step"] = all_of(functools.partial(ours, dependent=True), True)
    weight_bytes = sum(product.bytes for product, _ in order)
    timings = measure_together(graphs, seconds=SECONDS_PER_FIGURE)
    return {name: figures_of(timing, weight_bytes, 1, copy) for name, timing in timings.items()}


def candidates(product: Product, rows: int) -> Iterator[FewRowsTiles]:
    """Tiles that the sweep tries."""
    least, most = (share * known(machine().sm_count) for share in PROGRAMS_SWEPT)
    blocks = ((128, 5), (256, 3), (256, 4)) if rows <= 16 else ((64, 4), (64, 6), (128, 3), (128, 4))
    for outer, (inner, stages), splits, warps in itertools.product((32, 64, 128), blocks, (1, 2, 4, 8), (4, 8)):
        programs = triton.cdiv(product.outer, outer) * splits
        fits = splits == 1 or (least <= programs <= most and splits * inner * 2 <= product.inner)
        if fits and (warps == 4 or rows > 16 or outer >= 64):
            yield FewRowsTiles(outer, inner, splits, warps, stages)


def sweep(rows: int, names: Sequence[str] | None = None, dependent: bool | None = None) -> dict:
    """Print the five best tiles of each product (or of those named) in a step, and those that are chosen now, in µs.

    dependent: whether each is started early; None does so where the GPU can.

    Returns all that was found, {product: [(µs, tiles)]}, and writes it to product_tiles_<rows>.json.
    """
    found: dict[str, list] = {}
    dependent = dependent_launches() if dependent is None else dependent
    for product in [it for it in PRODUCTS if names is None or it.name in names]:
        x, weights, options = product.x(rows), product.weights(product.copies()), product.options(rows)
        chosen = few_rows_tiles(rows, product.outer, product.inner, torch.bfloat16, architecture_of(weights[0].device),
                                known(machine().sm_count))  # fmt: skip
        graphs: dict[str, Graph] = {}
        for tiles in dict.fromkeys([chosen, *candidates(product, rows)]):
            workspace = few_rows_workspace(rows, weights[:1], tiles)
            ours = functools.partial(few_rows_product, tiles=tiles, workspace=workspace, dependent=dependent)
            with contextlib.suppress(triton.runtime.errors.OutOfResources):  # shared memory that this GPU hasn't
                graphs[str(tuple(tiles))] = graph_of(ours, x, weights, options)
        timings = measure_together(graphs, seconds=SWEPT_SECONDS, rounds=3)
        ranked = sorted((timing.median * 1e6 / len(weights), cut) for cut, timing in timings.items())
        found[product.name] = ranked
        for us, cut in [*ranked[:5], *(one for one in ranked[5:] if one[1] == str(tuple(chosen)))]:
            note = "  chosen" if cut == str(tuple(chosen)) else ""
            print(f"{product.name:<12}{rows:>3} rows{us:>9.2f} µs{product.bytes / us / 1e6:>7.2f} TB/s  {cut}{note}",
                  flush=True)  # fmt: skip
        del graphs, weights
        torch.cuda.empty_cache()
    bench_path(f"product_tiles_{rows}.json").write_text(json.dumps(found))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    if machine().tier == "none":
        print("bench products needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, copy = clocks(), copy_bandwidth()
    print(
        f"copy: {format_bandwidth(copy)}\n{'':<12}{'rows':>4}  {'':<26}{'TB/s':>6}{'of copy':>9}{'µs':>9}{'error':>10}"
    )
    table: dict[str, dict] = {}
    measured = [(product.name, functools.partial(measure_row, product)) for product in PRODUCTS]
    for (name, measure), rows in itertools.product([*measured, ("a step", measure_step)], ROWS):
        results = table[f"{name}, {rows}"] = measure(rows, copy)
        for form, it in results.items():
            figures = f"{it['tbps']:>6.2f}{it['share']:>9.3f}{it['us']:>9.2f}" if "us" in it else f" – {it['missing']}"
            error = f"{it['error']:>10.1e}" if "error" in it else ""
            print(f"{name:<12}{rows:>4}  {form:<26}{figures}{error}", flush=True)
        torch.cuda.empty_cache()
    write_record("products", before, copy=copy, table=table)
    return 0
