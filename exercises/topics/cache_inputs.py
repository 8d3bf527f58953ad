"""How new keys and values and the cache they go into may lie in memory, for contracts."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import gaps, unit_last


def middle_exchanged(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """Dimensions 1 and 2 stored the other way round, heads and tokens, with gaps; the last stride is 1."""
    return gaps(draw, tensor.transpose(1, 2)).transpose(1, 2)


def row_layouts(name: str) -> tuple[Level, ...]:
    """Layouts of new keys or values [batch, heads, tokens, head_dim] that are only read."""
    return *unit_last(name), Level(middle_exchanged, f"{name} as a projection leaves it")


def cache_layouts(name: str) -> tuple[Level, ...]:
    """Layouts of a cache [batch, heads, slots, head_dim], or pages, that is written: it cannot be expanded."""
    return *unit_last(name, expandable=False), Level(middle_exchanged, f"{name} stored token by token")
