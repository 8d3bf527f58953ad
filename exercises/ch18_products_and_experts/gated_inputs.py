"""What exercise 18.4 is given, and its meaning in plain PyTorch; views whose gaps hold NaN."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def whole(x, weight, bias, residual, *blocks):
    """The meaning in PyTorch, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide)).chunk(2, -1)
    result = F.silu(gate) * up
    return (result if residual is None else result + residual.to(wide)).to(x.dtype)


def block_by_block(x, weight, bias, residual, block_m, block_n, block_k):
    """The same, its sums block after block of inner and its activation by a division."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = zip(x.to(wide).split(block_k, 1), weight.to(wide).split(block_k, 1))
    sums = sum(left @ right.mT for left, right in pairs)
    gate, up = (sums if bias is None else sums + bias.to(wide)).chunk(2, -1)
    result = gate / (1 + torch.exp(-gate)) * up
    return (result if residual is None else result + residual.to(wide)).to(x.dtype)


def tensors(draw, rows, hidden, inner, dtype=torch.float32, size=1.0, bias=True, residual=True):
    """x, weight, bias and residual; `size` is that of the gate's sums."""
    weight = draw.normal(2 * hidden, inner, scale=inner**-0.5)
    weight[:hidden] *= size
    given = draw.normal(rows, inner), weight, draw.normal(2 * hidden), draw.normal(rows, hidden)
    x, weight, own_bias, own_residual = (one.to(dtype) for one in given)
    return x, weight, own_bias if bias else None, own_residual if residual else None


def cancelling(draw, what, rows=17, hidden=24, inner=40):
    """float16: the residual, or the biases, take away most of what stands before them."""
    x, weight, bias, residual = tensors(draw, rows, hidden, inner, torch.float16, 4.0)
    if what == "bias":
        x = x[:1].expand(rows, inner) + 0.01 * draw.normal(rows, inner).half()
        bias = bias * 0.05 - F.linear(x[:1].float(), 8 * weight.float())[0].half()
        return x, 8 * weight, bias, residual * 0.01
    before = whole(x.float(), 2 * weight.float(), bias.float(), None)
    return x, 2 * weight, bias, (-before).half()


def large_gates(draw):
    x, weight, bias, residual = tensors(draw, 18, 40, 70)
    weight[:40] *= 3000 / 1.5
    return x, weight, bias, residual


def negative_gates(draw, low=1.0, high=1e4, up=1.0):
    """Gates from -low to -high: silu is near 0 there, but it is not 0. up: the size of up's sums."""
    x = torch.stack([10 ** draw.uniform(20, low=math.log10(low), high=math.log10(high)), torch.ones(20)], 1)
    ups = torch.stack([torch.zeros(40), draw.normal(40, scale=up)], 1)
    return x, torch.cat([torch.tensor([[-1.0, 0.0]]).expand(40, 2), ups]), None, None


def large_numbers(draw, of_x, of_up):
    """x, and up's part of the weight, are larger than usual by these factors; the gate's sums are not."""
    x, weight, bias, residual = tensors(draw, 18, 40, 70)
    weight[:40] /= of_x
    weight[40:] *= of_up / of_x
    return of_x * x, weight, bias, residual


def all_in_nan(given):
    x, weight, bias, residual = given
    return in_nan(x), in_nan(weight, 24), bias, in_nan(residual)


def in_nan(tensor, gap=40):
    wide = torch.full((tensor.shape[0] + 2, tensor.shape[1] + gap), math.nan, dtype=tensor.dtype)
    wide[: tensor.shape[0], : tensor.shape[1]] = tensor
    return wide[: tensor.shape[0], : tensor.shape[1]]
