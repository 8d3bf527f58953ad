"""`python -m course_lib bench large_products`: products for many rows, beside cuBLAS and torch.compile.

    ladder     8192³ by each step from the naive product to Gluon on Hopper
    plain      x · weightᵀ at three cubes, and Llama-3.1-8B's four weights for 16,384 tokens
    SwiGLU     the gate's product, up's, and silu(gate) · up, in one kernel; torch.compile makes two of it
    MLP        Linear, GELU, Linear, narrow and for many rows: as two kernels, and as one
    8 bits     e4m3 with a scale for each block, beside PyTorch's `_scaled_mm` with the same scales

QuACK is a column where its package is installed. 16-bit numbers, normal inputs; all columns of a row in turns
(`measure_together`), the L2 cache flushed before each run. A product that differs from the reference by more than its
rounding has no figure, and a column that cannot run here says what is missing. Figures, versions and clocks go to
large_products.json in the bench folder.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.bench._record import clocks, write_record
from course_lib.bench.fused import compiled, random
from course_lib.hardware.device import machine
from course_lib.hardware.timing import measure_together
from course_lib.kernels.products.fused_mlp import fused_mlp
from course_lib.kernels.products.naive import naive_product
from course_lib.kernels.products.persistent import persistent_product
from course_lib.kernels.products.split_k import split_k_product
from course_lib.kernels.products.stream_k import stream_k_product
from course_lib.kernels.products.tiled import ordered, pipelined, tiled, tiled_product
from course_lib.kernels.products.tma import tma_product

SECONDS_PER_FIGURE = 0.1
LARGEST_ERROR = 1e-2  # of the norm; right kernels err by about 2e-3 in bf16
TOKENS = 16_384
SHAPES = {  # rows, outer, inner
    "4096³": (4096, 4096, 4096),
    "8192³": (8192, 8192, 8192),
    "16384³": (16_384, 16_384, 16_384),
    "Q, K, V": (TOKENS, 6144, 4096),
    "output": (TOKENS, 4096, 4096),
    "gate and up": (TOKENS, 28_672, 4096),
    "down": (TOKENS, 4096, 14_336),
}
GATED = (8192, 14_336, 4096)  # rows, columns, inner
NARROW = {"128": (2**20, 128, 512), "256": (2**20, 256, 1024)}  # rows, width, hidden
SCALED = {"4096 × 7168 × 16384": (4096, 7168, 16_384), "8192³": (8192, 8192, 8192)}
BLOCK = 128


def in_turns(forms: dict[str, Callable], flops: int) -> dict[str, dict]:
    """{form: "us", "tflops" and "error"; or "missing", why there is none}; the first form is the reference."""
    results: dict[str, dict] = {}
    ready: dict[str, Callable] = {}
    exact = None
    for name, form in forms.items():
        try:
            found = form()
        except (RuntimeError, ValueError, TypeError, ImportError) as error:  # what this machine or a peer lacks
            results[name] = {"missing": str(error).strip().splitlines()[0][:120]}
            continue
        exact = found if exact is None else exact
        error_here = ((found.float() - exact.float()).norm() / exact.float().norm()).item()
        results[name] = {"error": error_here}
        if error_here < LARGEST_ERROR:
            ready[name] = form
        else:
            results[name]["missing"] = f"wrong: its error is {error_here:.1e}"
    for name, timing in measure_together(ready, seconds=SECONDS_PER_FIGURE).items():
        results[name] |= {"us": timing.median * 1e6, "tflops": timing.rate(flops) / 1e12}
    return results


def on_hopper(x, weight, **options) -> torch.Tensor:
    from course_lib.kernels.products.hopper import product_hopper  # Gluon is missing from some Tritons

    return product_hopper(x, weight, **options)


def quack(x, weight) -> torch.Tensor:
    from quack.gemm_interface import gemm  # type: ignore[import-not-found]

    return gemm(x, weight.t(), tuned=False)


def quack_gated(x, weight) -> torch.Tensor:
    """With a weight whose rows are of gate and up in turns, as QuACK wants them."""
    from quack.gemm_interface import gemm_gated

    return gemm_gated(x, weight.t(), activation="swiglu", store_preact=False, tuned=False)[1]


def ladder(size: int) -> dict[str, dict]:
    """Each step of `kernels/products`, one idea more than the one before."""
    x, weight = random(size, size), random(size, size) * size**-0.5
    steps: dict[str, Callable] = {"cuBLAS": F.linear, "naive": naive_product}
    for settings in (tiled, ordered, pipelined):
        steps[settings.__name__] = functools.partial(tiled_product, tiles=settings(x))
    steps |= {"persistent": persistent_product, "copy engine": tma_product, "split K": split_k_product,
              "stream K": stream_k_product, "hopper": on_hopper}  # fmt: skip
    return in_turns({name: functools.partial(step, x, weight) for name, step in steps.items()}, 2 * size**3)


def plain(rows: int, outer: int, inner: int) -> dict[str, dict]:
    x, weight = random(rows, inner), random(outer, inner) * inner**-0.5
    forms: dict[str, Callable] = {
        "cuBLAS": functools.partial(F.linear, x, weight),
        "QuACK": functools.partial(quack, x, weight),
        "portable": functools.partial(tma_product, x, weight),
        "hopper": functools.partial(on_hopper, x, weight),
    }
    return in_turns(forms, 2 * rows * outer * inner)


def swiglu_in_pytorch(x, weight):
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def gated(rows: int, columns: int, inner: int) -> dict[str, dict]:
    x, weight = random(rows, inner), random(2 * columns, inner) * inner**-0.5
    forms: dict[str, Callable] = {
        "PyTorch": functools.partial(swiglu_in_pytorch, x, weight),
        "torch.compile": functools.partial(compiled(swiglu_in_pytorch), x, weight),
        "QuACK": functools.partial(quack_gated, x, weight.view(2, columns, inner).transpose(0, 1).reshape_as(weight)),
        "portable": functools.partial(tma_product, x, weight, gated=True),
        "hopper": functools.partial(on_hopper, x, weight, gated=True),
    }
    return in_turns(forms, 4 * rows * columns * inner)


def mlp_in_pytorch(x, first, second):
    return F.linear(F.gelu(F.linear(x, first), approximate="tanh"), second)


def mlp_in_two(x, first, second):
    return on_hopper(on_hopper(x, first, activation="gelu_tanh"), second)


def narrow_mlp(rows: int, width: int, hidden: int) -> dict[str, dict]:
    x, first, second = random(rows, width), random(hidden, width) * width**-0.5, random(width, hidden) * hidden**-0.5
    forms: dict[str, Callable] = {
        "PyTorch": mlp_in_pytorch,
        "torch.compile": compiled(mlp_in_pytorch),
        "two kernels": mlp_in_two,
        "one kernel": functools.partial(fused_mlp, activation="gelu_tanh"),
    }
    ready: dict[str, Callable] = {name: functools.partial(form, x, first, second) for name, form in forms.items()}
    return in_turns(ready, 4 * rows * width * hidden)


def scaled(rows: int, outer: int, inner: int) -> dict[str, dict]:
    x, weight = (random(size, inner).to(torch.float8_e4m3fn) for size in (rows, outer))
    x_scales = torch.rand(rows, inner // BLOCK, device=x.device) + 0.5
    weight_scales = torch.rand(outer // BLOCK, inner // BLOCK, device=x.device) + 0.5
    by_column = x_scales.t().contiguous().t()  # as `_scaled_mm` wants them

    def ours() -> torch.Tensor:
        from course_lib.kernels.products.hopper_fp8 import product_fp8

        return product_fp8(x, weight, x_scales, weight_scales)

    def peer() -> torch.Tensor:
        return torch._scaled_mm(x, weight.t(), scale_a=by_column, scale_b=weight_scales.t(), out_dtype=torch.bfloat16)

    return in_turns({"_scaled_mm": peer, "hopper": ours}, 2 * rows * outer * inner)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    if machine().tier == "none":
        print("bench large_products needs an NVIDIA GPU: in the interpreter a kernel's time says nothing about it.")
        return 0
    torch.manual_seed(0)
    before, table = clocks(), {}
    rows = {"8192³, the ladder": functools.partial(ladder, 8192)}
    rows |= {name: functools.partial(plain, *shape) for name, shape in SHAPES.items()}
    rows["SwiGLU, 8192 × 4096 × 14336"] = functools.partial(gated, *GATED)
    rows |= {f"MLP of width {width}": functools.partial(narrow_mlp, *shape) for width, shape in NARROW.items()}
    rows |= {f"8 bits, {name}": functools.partial(scaled, *shape) for name, shape in SCALED.items()}
    for name, measure in rows.items():
        table[name] = results = measure()
        cells = [f"{form} {it['tflops']:,.0f} TFLOP/s, {it['us']:,.0f} µs" if "us" in it else f"{form}: {it['missing']}"
                 for form, it in results.items()]  # fmt: skip
        print(f"{name:<30}{'   '.join(cells)}", flush=True)
        torch.cuda.empty_cache()
    write_record("large_products", before, table=table)
    return 0
