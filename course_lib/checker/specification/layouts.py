"""How a tensor may lie in memory: the same values, stored in ways that a docstring's "any strides" allows.

Gaps hold NaN or numbers of their own, so that reading by the wrong stride shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from course_lib.checker.common import sparse
from course_lib.checker.specification.case import Case, InOut
from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.draw import Draw


def contiguous(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """Row after row."""
    return tensor.contiguous()


def gaps(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """A gap after every row and after every matrix, each drawn: no stride is a product of others; the last is 1."""
    room = [size + draw.integer(1, 4) * (dimension > 0) for dimension, size in enumerate(tensor.shape)]
    return _within(draw, tensor, room)


def dimensions_exchanged(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """The first two dimensions stored the other way round, with a gap between rows; a last stride of 1 stays."""
    if tensor.dim() < 3:
        return gaps(draw, tensor)
    return gaps(draw, tensor.transpose(0, 1)).transpose(0, 1)


def expanded(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """One and the same slice for all indices of the first dimension: its stride is 0. The values change with that."""
    return tensor[:1].contiguous().expand(tensor.shape)


def last_exchanged(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """The last two dimensions stored the other way round, column by column, with a gap after each."""
    if tensor.dim() < 2:
        return every_other(draw, tensor)
    return gaps(draw, tensor.transpose(-1, -2)).transpose(-1, -2)


def every_other(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """Elements a drawn step of two or three apart along the last dimension, and gaps between rows."""
    step = draw.integer(2, 4)
    wide = _within(draw, tensor.unsqueeze(-1), [*(size + 1 for size in tensor.shape), step])
    return wide[..., 0]


def far(draw: Draw, tensor: torch.Tensor, dimension: int = 0) -> torch.Tensor:
    """Slices along one dimension 2³⁰ elements apart and a little more; the gaps take no memory.

    The stride itself fits into 32 bits, so that a kernel gets it as an int32. From the third slice on the offset does
    not; there must be three.
    """
    stride = sparse.FAR // 2 + 16 * draw.integer(0, 64)
    near = tensor.select(dimension, 0).contiguous().stride()
    return sparse.apart(tensor, (*near[:dimension], stride, *near[dimension:]))


def _within(draw: Draw, tensor: torch.Tensor, room: list[int]) -> torch.Tensor:
    """The tensor as a corner of a larger one, filled with NaN or with numbers that no tensor here holds.

    NaN shows wherever it is read. Numbers tell by whose strides.
    """
    wide = draw.normal(*room, shift=6.0) if draw.integer(0, 2) else torch.full(room, math.nan)
    wide = wide.nan_to_num().to(tensor.dtype) if not tensor.is_floating_point() else wide.to(tensor.dtype)
    corner = wide[tuple(slice(size) for size in tensor.shape)]
    corner.copy_(tensor)
    return corner


CONTIGUOUS = Level(contiguous, "")


def beyond_32_bits(
    draw: Draw,
    slices: str,
    tensors: Sequence[torch.Tensor | InOut],
    *rest,
    before: tuple = (),
    dimension: int = 0,
) -> list[Case]:
    """A case in which the last of these tensors' slices along a dimension ("heads") begin beyond 2³¹ elements.

    It is for the interpreter: on a GPU the gaps would take their room. `before` and `rest` are the arguments that stand
    before and behind the tensors.
    """
    if draw.on_gpu:
        return []
    apart = (
        InOut(far(draw, t.tensor, dimension)) if isinstance(t, InOut) else far(draw, t, dimension) for t in tensors
    )
    return [Case(f"the last {slices} begin beyond 2³¹ elements", (*before, *apart, *rest))]


def unit_last(name: str, *, expandable: bool = True) -> tuple[Level, ...]:
    """The layouts that "any strides but the last, which is 1" allows a tensor of this name."""
    levels = (
        CONTIGUOUS,
        Level(gaps, f"{name} with gaps"),
        Level(dimensions_exchanged, f"{name} with its first two dimensions exchanged in memory"),
        Level(expanded, f"{name} expanded over dimension 0"),
    )
    return levels if expandable else levels[:-1]


def any_strides(name: str, *, expandable: bool = True) -> tuple[Level, ...]:
    """The layouts that "any strides" allows a tensor of this name."""
    return (
        *unit_last(name, expandable=expandable),
        Level(last_exchanged, f"{name} transposed in memory"),
        Level(every_other, f"{name} with elements apart"),
    )
