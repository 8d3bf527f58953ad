"""Where each element of a tensor is drawn: one dimension in lines, two as they are, more as matrices side by side."""

import dataclasses
import math

import numpy as np

WIDEST = 256  # cells in a line; longer rows are broken
GAP = 0.05  # between matrices, as a share of theirs
LABEL = 0.07  # above each row of matrices, as a share of the whole


@dataclasses.dataclass(frozen=True)
class Grid:
    """Places in cells: columns to the right, rows down."""

    rows: int
    columns: int
    row_of: np.ndarray  # by the element's place in the flattened shape
    column_of: np.ndarray
    first_of_line: dict[int, int]  # row -> the index to write at its left
    blocks: tuple[tuple[int, int, int, int], ...]  # (row, column, rows, columns) of what is framed
    headings: tuple[tuple[int, int, str], ...] = ()  # (row, column, index of the matrix below)


def grid_of(shape: tuple[int, ...]) -> Grid:
    """The grid of a tensor of this shape."""
    kept = [size for size in shape if size != 1] or [1]
    if len(kept) == 1:
        return _line(kept[0])
    rows, columns = kept[-2:]
    # The shape's own leading dimensions, ones too: they are in the headings.
    leading, matrices = list(shape), math.prod(kept[:-2])
    for size in (columns, rows):
        while leading.pop() != size:
            pass
    return _matrices(leading if matrices > 1 else [], matrices, rows, columns)


def _line_width(length: int) -> int:
    return 16 if length <= 128 else 32 if length <= 1024 else 64 if length <= 4096 else 128


def _line(length: int) -> Grid:
    width = _line_width(length)
    place = np.arange(length)
    rows = max(1, -(-length // width))
    whole, rest = length // width, length % width
    blocks = [(0, 0, whole, width)] * (whole > 0) + [(whole, 0, 1, rest)] * (rest > 0)
    firsts = {row: row * width for row in range(rows)}
    return Grid(rows, min(width, max(length, 1)), place // width, place % width, firsts, tuple(blocks))


def _matrices(leading: list[int], count: int, rows: int, columns: int) -> Grid:
    lines = -(-columns // WIDEST)
    width, height = -(-columns // lines), rows * lines
    space, gap = math.ceil(GAP * width), math.ceil(GAP * height)  # beside a matrix and below it
    across = _across(count, height + gap, width + space)
    down = -(-count // across)
    label = math.ceil(LABEL * down * height) if count > 1 else 0
    number, row, column = np.unravel_index(np.arange(count * rows * columns), (count, rows, columns))
    top = number // across * (height + label + gap) + label
    left = number % across * (width + space)
    firsts: dict[int, int] = {}
    for band in range(down):
        for index in range(rows):
            firsts[band * (height + label + gap) + label + index * lines] = index
    corners = [
        (block // across * (height + label + gap) + label, block % across * (width + space)) for block in range(count)
    ]
    indices = [str([int(index) for index in np.unravel_index(block, leading)]) for block in range(count) if leading]
    return Grid(
        rows=down * (height + label + gap) - gap,
        columns=min(across, count) * (width + space) - space,
        row_of=top + row * lines + column // width,
        column_of=left + column % width,
        first_of_line=firsts,
        blocks=tuple((*corner, height, width) for corner in corners),
        headings=tuple((*corner, index) for corner, index in zip(corners, indices)),
    )


def _across(count: int, height: int, width: int) -> int:
    """How many matrices stand side by side, so that the whole is about one and a half times as wide as it is high."""
    return min(
        range(1, count + 1),
        key=lambda across: (abs(math.log(across * width / (-(-count // across) * height) / 1.5)), across),
    )
