"""Memory as a kernel sees it: a pointer and offsets, for models whose slips take a wrong one."""

from __future__ import annotations

import functools
import math

import torch

from course_lib.checker.specification.edits import at_work
from course_lib.checker.specification.model import Slips
from exercises.topics import pointers


def load(
    slips: Slips, tensor: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor | None = None, other: float = 0.0
) -> torch.Tensor:
    """`pointers.load`, which notes in `slips` what lies outside: for models whose slips are switches."""
    with at_work(slips):
        return pointers.load(tensor, offsets, mask, other)


def store(
    slips: Slips, values: torch.Tensor, offsets: torch.Tensor, program: torch.Tensor | None = None
) -> torch.Tensor:
    """`pointers.store`, in the same way."""
    with at_work(slips):
        return pointers.store(values, offsets, program)


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
