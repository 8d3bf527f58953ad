"""What stands behind a product in the same kernel, while its sums are still in registers.

    out = activation(x · weightᵀ + bias) + residual         gated: out = silu(gate) · up + residual

A kernel of its own would read the product and write it again, 4 bytes for each number in 16 bits; here nothing but the
bias and the residual is read. A gate saves more: the product has twice the columns of the result, and is never stored.
Arithmetic is in float32, rounded once at the end.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda sums: F.gelu(sums, approximate="tanh"), "silu": F.silu}

GELU_TANH = tl.constexpr(1.5957691216057308)  # 2 · √(2 / π): (1 + tanh u) / 2 is σ(2u)
GELU_CUBE = tl.constexpr(0.044715)
INVERSE_ROOT_2 = tl.constexpr(0.7071067811865476)


def product_reference(x, weight, *, bias=None, activation=None, residual=None, gated=False):
    """The plain PyTorch meaning of every product here, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    result = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))
    if activation is not None:
        result = ACTIVATIONS[activation](result)
    if gated:
        gate, up = result.chunk(2, dim=-1)
        result = F.silu(gate) * up
    if residual is not None:
        result = result + residual.to(wide)
    return result.to(x.dtype)


@triton.jit
def activate(sums, ACTIVATION: tl.constexpr):
    """An activation by the name that `product` gives it; None for none."""
    if ACTIVATION == "silu":
        sums = sums * tl.sigmoid(sums)
    elif ACTIVATION == "gelu":
        sums = 0.5 * sums * (1.0 + tl.erf(sums * INVERSE_ROOT_2))
    elif ACTIVATION == "gelu_tanh":
        sums = sums * tl.sigmoid((sums + sums * sums * sums * GELU_CUBE) * GELU_TANH)
    return sums


@triton.jit
def finish(sums, up, row, column, rows, columns, beside, ACTIVATION: tl.constexpr):
    """The result [BLOCK_M, BLOCK_N] in float32 of a tile's sums, for its rows [BLOCK_M] and columns [BLOCK_N].

    up: as many sums, which the gate is for; None without a gate. beside: (bias_pointer [columns, twice with a gate],
    residual_pointer [rows, columns], its stride), None each where there is none.
    """
    bias_pointer, residual_pointer, residual_stride = beside
    if bias_pointer is not None:
        sums += tl.load(bias_pointer + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if up is None:
        sums = activate(sums, ACTIVATION)
    else:
        if bias_pointer is not None:
            up += tl.load(bias_pointer + columns + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        sums = activate(sums, "silu") * up
    if residual_pointer is not None:
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        residual_tile = residual_pointer + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        sums += tl.load(residual_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    return sums
