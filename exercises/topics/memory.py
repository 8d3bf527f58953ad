"""Memory as a kernel sees it: a pointer and offsets, for models whose slips take a wrong one."""

from __future__ import annotations

import functools
import math

import torch

from course_lib.checker.specification.model import Slips


def load(
    slips: Slips, tensor: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor | None = None, other: float = 0.0
) -> torch.Tensor:
    """What `tl.load(pointer + offsets, mask, other)` gives: NaN where the offset is outside the tensor's memory.

    tensor: any strides; its pointer is that of its first element. offsets: int64, in elements. The result has the
    offsets' shape. What lies between the tensor's own elements is its memory too, as in a slice of a larger one.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.as_strided((span,), (1,))
    reached = offsets if mask is None else torch.where(mask, offsets, 0)
    if reached.numel() and int(reached.min()) >= 0 and int(reached.max()) < span:
        values = memory.take(reached)
        return values if mask is None else torch.where(mask, values, other).to(tensor.dtype)
    inside = (offsets >= 0) & (offsets < span)
    wanted = torch.ones_like(inside) if mask is None else mask.expand(offsets.shape)
    if bool((wanted & ~inside).any()):
        slips.outside = True
    values = memory[torch.where(inside, offsets, 0)]
    empty = math.nan if tensor.is_floating_point() else 0
    return torch.where(wanted, torch.where(inside, values, empty), other).to(tensor.dtype)


def store(
    slips: Slips, values: torch.Tensor, offsets: torch.Tensor, program: torch.Tensor | None = None
) -> torch.Tensor:
    """What `tl.store(pointer + offsets, values)` makes of new, contiguous memory of the values' shape.

    Where two values go to one place the later stays: that of the program with the higher number, where `program` gives
    each value's. NaN stands where nothing was written.
    """
    memory = torch.full((values.numel(),), math.nan, dtype=values.dtype)
    offsets, flat = offsets.expand(values.shape).flatten(), values.flatten()
    if program is not None:
        turn = program.expand(values.shape).flatten().argsort(stable=True)
        offsets, flat = offsets[turn], flat[turn]
    inside = (offsets >= 0) & (offsets < values.numel())
    if not bool(inside.all()):
        slips.outside = True
    offsets, flat = offsets[inside], flat[inside]
    order = torch.arange(len(offsets))
    last = torch.full((values.numel(),), -1).scatter_reduce(0, offsets, order, "amax")
    memory[last >= 0] = flat[last[last >= 0]]
    return memory.view(values.shape)


def in_place_of_the_first(result: torch.Tensor, rows: int) -> torch.Tensor:
    """What is left of [..., length, width] where every tile of rows is stored in the first tile's place."""
    left = torch.full_like(result, math.nan)
    for tile in result.split(rows, dim=-2):  # each over the one before it
        left[..., : tile.shape[-2], :] = tile
    return left


@functools.lru_cache(maxsize=64)
def tile_offsets(rows: int, columns: int, strides: tuple[int, ...], heads: int) -> torch.Tensor:
    """Offsets of [heads, rows, columns] elements by strides (of a head, of a row, of a column)."""
    indices = torch.meshgrid(torch.arange(heads), torch.arange(rows), torch.arange(columns), indexing="ij")
    return sum(index * stride for index, stride in zip(indices, strides))
