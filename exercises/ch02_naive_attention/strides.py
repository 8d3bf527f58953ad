"""Tensors with gaps for the kernels of chapter 02, and what a kernel makes of them that takes strides for granted."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exercises.ch02_naive_attention.slips import same


def memory_read_as(tensor: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor's memory read with another shape and other strides; NaN where that leaves it."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    last = sum((size - 1) * stride for size, stride in zip(shape, strides))
    flat = torch.full((max(reach, last + 1),), math.nan, dtype=torch.float64)
    flat[:reach] = tensor.as_strided((reach,), (1,)).double()
    return flat.as_strided(shape, strides)


def _as_if_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return memory_read_as(tensor, tuple(tensor.shape), torch.empty(tensor.shape).stride())


def _as_if_rows_touched(tensor: torch.Tensor) -> torch.Tensor:
    """The row stride taken to be the row's length; the head stride as it is."""
    return memory_read_as(tensor, tuple(tensor.shape), (tensor.stride(0), tensor.shape[-1], 1))


def strides_ignored(right: Callable, positions: tuple[int, ...]):
    """A `when`: tensors at some of these positions were read as if they were contiguous."""

    def when(case, seen, got):
        strided = [place for place in positions if not case.args[place].is_contiguous()]
        choices = [strided, *([place] for place in strided)] if len(strided) > 1 else [strided]
        for chosen in choices:
            for reading in (_as_if_contiguous, _as_if_rows_touched):
                args = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in case.args]
                for place in chosen:
                    args[place] = reading(case.args[place])
                expected = right(*args)
                # It must be told from the truth by what is known of it: a first row is the same either way.
                if chosen and same(got, expected) and not same(right(*case.args), expected):
                    return True
        return False

    return when


def with_gaps(tensor: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values in longer rows, whose rest holds other finite numbers: a wrong stride gives wrong numbers."""
    return torch.cat([tensor, tensor[..., :gap] * 3 + 1], dim=-1)[..., : tensor.shape[-1]]


def heads_first(draw, heads: int, length: int, head_dim: int, dtype=torch.float32, scale: float = 1.0) -> torch.Tensor:
    """[heads, length, head_dim] as a projection leaves it: a view of [length, heads, head_dim]."""
    return draw.normal(length, heads, head_dim, dtype=dtype, scale=scale).transpose(0, 1)
