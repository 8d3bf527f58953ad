"""Two-dimensional pointer arithmetic: a column of offsets plus a row of offsets, and where the sums lie in memory."""

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, GREEN, GRID, INK, MUTED, PURPLE, RED, new_figure, styled

ROW_COLORS = (BLUE, RED, GREEN, PURPLE)
CELL = 1.15  # side of a tile's cell; a cell of the memory is 1 wide
MEMORY_TOP = 1.0


def tile_offsets(column, row) -> list[list[int]]:
    """What `column[:, None] + row[None, :]` is: one list for each entry of the column."""
    return [[down + across for across in row] for down in column]


@styled
def draw_tile_pointers(first_row: int = 2, rows: int = 2, columns: int = 4, row_stride: int = 8, stored_rows: int = 4):
    """The offsets of a tile of a matrix, and of the same tile transposed, above the memory that both point into.

    A matrix row has one colour everywhere. Grey cells of the memory belong to something else.

    Args:
        first_row: the matrix row in which the tile begins.
        rows: matrix rows of the tile, 1 to 4.
        columns: columns of the tile, 1 to 8; also those of the matrix.
        row_stride: elements from one matrix row to the next, at least `columns`.
        stored_rows: rows of the matrix. At most 40 cells of memory can be drawn.

    Raises:
        ValueError: a tile that cannot be drawn.
    """
    if not (1 <= rows <= 4 and 1 <= columns <= 8 and columns <= row_stride):
        raise ValueError(
            f"the tile is {rows} × {columns} with a row stride of {row_stride}; rows are 1 to 4, columns 1 to 8, and "
            "the stride is not smaller than the columns."
        )
    if not (0 <= first_row and first_row + rows <= stored_rows and row_stride * stored_rows <= 40):
        raise ValueError(
            f"rows {first_row} to {first_row + rows - 1} of {stored_rows} with a row stride of {row_stride}; the tile "
            "must lie in the matrix, and at most 40 cells of memory can be drawn."
        )
    numbers, dims = [first_row + index for index in range(rows)], list(range(columns))
    color_of = {number * row_stride + dim: ROW_COLORS[index] for index, number in enumerate(numbers) for dim in dims}
    width = max(row_stride * stored_rows, 32)
    panel_height = CELL * (max(rows, columns) + 1)
    bottom = MEMORY_TOP + 1.4
    top = bottom + panel_height + 2.3
    figure, axes = new_figure(10.5, 10.5 * (top + 1.3) / (width + 1.6))
    offsets_of_rows = [number * row_stride for number in numbers]
    _draw_sum(
        axes, 2.6, bottom + panel_height, offsets_of_rows, dims, color_of,
        f"as it is stored, [{rows}, {columns}]", f"rows[:, None] * {row_stride} + dims[None, :] * 1",
    )  # fmt: skip
    _draw_sum(
        axes, width / 2 + 4.6, bottom + panel_height, dims, offsets_of_rows, color_of,
        f"transposed, [{columns}, {rows}]", f"rows[None, :] * {row_stride} + dims[:, None] * 1",
    )  # fmt: skip
    _draw_memory(axes, stored_rows, row_stride, columns, color_of)
    axes.set(xlim=(-0.8, width + 0.8), ylim=(-1.3, top), aspect="equal")
    axes.axis("off")
    return figure


def _draw_sum(axes, left, top, column, row, color_of, title, formula):
    """A column and a row of offsets, without fill, and the tile of their sums, each in its matrix row's colour."""
    axes.text(left - CELL, top + 1.55, title, fontsize=12.5, fontweight="bold", color=INK, va="center")
    axes.text(left - CELL, top + 0.6, formula, fontsize=11.5, color=INK, va="center", family="monospace")
    for index, across in enumerate(row):
        _draw_cell(axes, left + CELL * index, top - CELL, CELL, across)
    for index, down in enumerate(column):
        _draw_cell(axes, left - CELL - 0.25, top - CELL * (index + 2) - 0.25, CELL, down)
    for depth, sums in enumerate(tile_offsets(column, row)):
        for index, offset in enumerate(sums):
            _draw_cell(axes, left + CELL * index, top - CELL * (depth + 2) - 0.25, CELL, offset, color_of[offset])
    axes.text(left - CELL / 2 - 0.25, top - CELL / 2, "+", ha="center", va="center", fontsize=13, color=MUTED)


def _draw_memory(axes, stored_rows, row_stride, columns, color_of):
    for offset in range(stored_rows * row_stride):
        inside = offset % row_stride < columns
        _draw_cell(axes, offset, MEMORY_TOP - 1, 1, offset, color_of.get(offset), faint=not inside)
    for number in range(stored_rows):
        start = number * row_stride
        axes.plot([start + 0.1, start + columns - 0.1], [MEMORY_TOP + 0.22] * 2, color=INK, linewidth=1.2)
        axes.text(start + columns / 2, MEMORY_TOP + 0.36, f"row {number}", ha="center", fontsize=10.5, color=INK)
    text = "memory, counted in elements from the pointer"
    if columns < row_stride:
        text += f"; rows begin {row_stride} apart, and grey cells belong to another head"
    axes.text(0, -0.45, text, fontsize=10.5, color=INK, va="center")


def _draw_cell(axes, left, bottom, side, number, color=None, faint=False):
    face = color or (GRID if faint else "white")
    axes.add_patch(Rectangle((left, bottom), side, side, facecolor=face, edgecolor=MUTED, linewidth=0.8))
    style = {"color": "white", "fontweight": "bold"} if color else {"color": MUTED if faint else INK}
    axes.text(left + side / 2, bottom + side / 2, str(number), ha="center", va="center", fontsize=10, **style)
