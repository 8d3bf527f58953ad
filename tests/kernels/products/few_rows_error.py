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
    half_step, float32 = torch.finfo(x.dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    least = torch.finfo(x.dtype).smallest_normal * half_step  # half a step of the smallest numbers
    rows = x.double() if gain is None else x.double() * gain
    rounding = torch.zeros_like(rows) if gain is None else half_step * rows.abs() + least
    if epsilon is not None:
        factor = torch.rsqrt(x.double().square().mean(dim=-1, keepdim=True) + epsilon)
        rows, rounding = rows * factor, rounding * factor
    # Beside the sum: the squares' sum, of which half counts, the factor, and its product with the sum.
    error = ((2 * x.shape[1] + 4) * float32 * rows.abs() + rounding) @ weight.double().abs().t()
    if gated:
        gate, up = (rows @ weight.double().t()).chunk(2, dim=-1)
        gate_error, up_error = error.chunk(2, dim=-1)
        error = SILU_SLOPE * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
        error += 8 * float32 * (F.silu(gate) * up).abs()  # exp, the division and the product
    if residual is not None:
        error = error + float32 * exact.abs()
    return error * (1 + half_step) + half_step * exact.abs() + least
