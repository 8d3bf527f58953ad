"""How far a product for few rows may lie from float64, as its roundings say.

A sum of n products, added in float32 in any order, errs by at most n · 2⁻²⁴ times the sum of the products' sizes; a
rounded factor adds its dtype's half step of the same. The gate multiplies: silu's slope is at most 1.1. Behind it all
the result is rounded once.
"""

import torch
import torch.nn.functional as F

from course_lib.kernels.products.few_rows import few_rows_product, few_rows_product_reference

SILU_SLOPE = 1.1


def assert_right(x, weight, *, tiles=None, **options) -> None:
    """Hold `few_rows_product` to its meaning in float64, number for number."""
    found = few_rows_product(x, weight, tiles=tiles, **options)
    wide = {name: it.double() if torch.is_tensor(it) else it for name, it in options.items()}
    exact = few_rows_product_reference(x.double(), weight.double(), **wide)
    assert found.shape == exact.shape and found.dtype == x.dtype
    excess = (found.double() - exact).abs() - allowed_error(x, weight, exact, **wide)
    assert not exact.isnan().any() and (excess <= 0).all(), f"off by {excess.max():.2e} more than may be, {tiles=}"


def allowed_error(x, weight, exact, *, epsilon=None, gain=None, gated=False, residual=None):
    half_step = torch.finfo(x.dtype).eps / 2
    float32 = torch.finfo(torch.float32).eps / 2
    rows = x.double()
    relative = (x.shape[1] + 4) * float32  # 4: the factors of the norm and their product with the sum
    if epsilon is not None:
        rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + epsilon)
    if gain is not None:
        rows = rows * gain
        relative += half_step
    sizes = rows.abs() @ weight.double().abs().t()
    error = relative * sizes
    if gated:
        gate, up = (rows @ weight.double().t()).chunk(2, dim=-1)
        gate_error, up_error = error.chunk(2, dim=-1)
        error = SILU_SLOPE * gate_error * (up.abs() + up_error) + (F.silu(gate).abs() + 8 * float32) * up_error
        error += 8 * float32 * (F.silu(gate) * up).abs()  # exp, the division and the product
    if residual is not None:
        error = error + float32 * exact.abs()
    smallest = torch.finfo(x.dtype).smallest_normal * half_step * 2  # a result near 0 is rounded to such a step
    return error * (1 + half_step) + half_step * exact.abs() + smallest
