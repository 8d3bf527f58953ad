"""How far a product may lie from float64, as its roundings say.

A sum of n products, added in float32 in any order, errs by at most n · 2⁻²⁴ times the sum of the products' sizes. An
activation multiplies that by its slope: silu's is at most 1.1, gelu's 1.13. Behind it all the result is rounded once,
and so are the rows for the norm that follows, whose squares are those of the result as it is stored.
"""

import torch
import torch.nn.functional as F

from course_lib.kernels.products.epilogue import product_reference
from course_lib.kernels.products.few_rows import Unscaled, few_rows_product, few_rows_product_reference

CUTS = ("tiles", "splits", "programs")  # options that change no meaning
SILU_SLOPE, GELU_SLOPE, FLOAT32 = 1.1, 1.13, torch.finfo(torch.float32).eps / 2


def assert_right(x, weight, *, tiles=None, **options) -> None:
    """Hold `few_rows_product` to its meaning in float64, number for number."""
    found = few_rows_product(x, weight, tiles=tiles, **options)
    gain = options.pop("gain", None)
    if gain is not None:
        found, behind = found
        assert_right_before_a_norm(found, behind, gain)
    wide = {name: wide_of(it) for name, it in options.items()}
    exact = few_rows_product_reference(wide_of(x), weight.double(), **wide)
    dtype = (x.rows if isinstance(x, Unscaled) else x).dtype
    assert found.shape == exact.shape and found.dtype == dtype
    excess = (found.double() - exact).abs() - allowed_error(x, weight, exact, **wide)
    assert not exact.isnan().any() and (excess <= 0).all(), f"off by {excess.max():.2e} more than may be, {tiles=}"


def assert_product_right(function, x, weight, **options) -> torch.Tensor:
    """Hold a product of any number of rows to `product_reference` in float64, number for number; returns it."""
    found = function(x, weight, **options)
    wide = {name: wide_of(it) for name, it in options.items() if name not in CUTS}
    exact = product_reference(x.double(), weight.double(), **wide)
    assert found.shape == exact.shape and found.dtype == x.dtype
    excess = (found.double() - exact).abs() - allowed_error(x, weight, exact, **wide)
    assert not exact.isnan().any() and (excess <= 0).all(), f"off by {excess.max():.2e} more than may be, {options}"
    return found


def wide_of(it):
    if isinstance(it, Unscaled):
        return Unscaled(*(part.double() for part in it))
    return it.double() if torch.is_tensor(it) else it


def assert_right_before_a_norm(stored, behind: Unscaled, gain) -> None:
    """Rows: one product in float32, rounded. Squares: so many in float32, whose sum may err by the number of them."""
    half_step, least = torch.finfo(stored.dtype).eps / 2, torch.finfo(stored.dtype).smallest_normal
    exact = stored.double() * gain.double()
    assert behind.rows.dtype == stored.dtype
    assert ((behind.rows.double() - exact).abs() <= (half_step + 2 * FLOAT32) * exact.abs() + half_step * least).all()
    squares = stored.double().square().sum(dim=1)
    assert ((behind.squares.double().sum(dim=1) - squares).abs() <= (stored.shape[1] + 1) * FLOAT32 * squares).all()


def allowed_error(x, weight, exact, *, epsilon=None, gated=False, residual=None, bias=None, activation=None):
    rows, squares = x if isinstance(x, Unscaled) else (x, None)
    half_step = torch.finfo(rows.dtype).eps / 2
    least = torch.finfo(rows.dtype).smallest_normal * half_step  # half a step of the smallest numbers
    rows, parts = rows.double(), 0
    if squares is not None:
        rows = rows * torch.rsqrt(squares.double().sum(dim=1, keepdim=True) / rows.shape[1] + epsilon)
        parts = squares.shape[1]
    # Beside the sum: the squares' sum, of which half counts, the factor, and its product with the sum.
    error = (rows.shape[1] + parts + 4) * FLOAT32 * rows.abs() @ weight.double().abs().t()
    sums = rows @ weight.double().t()
    if bias is not None:
        sums = sums + bias
        error = error + FLOAT32 * sums.abs()
    if activation is not None:
        error = GELU_SLOPE * error + 8 * FLOAT32 * sums.abs()  # exp or erf, the division and the products
    if gated:
        gate, up = sums.chunk(2, dim=-1)
        gate_error, up_error = error.chunk(2, dim=-1)
        error = SILU_SLOPE * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error
        error += 8 * FLOAT32 * (F.silu(gate) * up).abs()  # exp, the division and the product
    if residual is not None:
        error = error + FLOAT32 * exact.abs()
    return error * (1 + half_step) + half_step * exact.abs() + least


def unscaled(x: torch.Tensor, parts: int = 3) -> Unscaled:
    """Rows as a product before a norm leaves them: their squares in some parts."""
    pieces = x.float().square().tensor_split(parts, dim=1)
    return Unscaled(x, torch.stack([piece.sum(dim=1) for piece in pieces], dim=1))
