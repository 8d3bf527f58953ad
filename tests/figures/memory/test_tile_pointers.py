"""The figure of two-dimensional pointers: its offsets are those that PyTorch's strides give."""

import pytest
import torch

from course_lib.figures.memory.tile_pointers import draw_tile_pointers, tile_offsets


def _numbers(figure):
    return [int(text.get_text()) for axes in figure.axes for text in axes.texts if text.get_text().isdigit()]


def test_a_column_plus_a_row_reaches_the_elements_that_a_view_of_those_strides_holds():
    memory = torch.arange(32)
    rows = memory.as_strided((2, 4), (8, 1), 16)
    assert tile_offsets([16, 24], [0, 1, 2, 3]) == rows.tolist()
    assert tile_offsets([0, 1, 2, 3], [16, 24]) == rows.T.tolist()


@pytest.mark.parametrize(
    "shape", [{}, {"first_row": 0, "rows": 4, "columns": 8}, {"first_row": 3, "rows": 1, "columns": 1, "row_stride": 5}]
)
def test_each_element_of_the_tile_stands_in_both_tiles_and_in_memory(shape, tmp_path):
    figure = draw_tile_pointers(**shape)
    figure.savefig(tmp_path / "pointers.png")
    first, rows = shape.get("first_row", 2), shape.get("rows", 2)
    columns, stride = shape.get("columns", 4), shape.get("row_stride", 8)
    drawn = _numbers(figure)
    for row in range(first, first + rows):
        for column in range(columns):
            assert drawn.count(row * stride + column) >= 3


def test_a_tile_outside_the_matrix_is_refused():
    with pytest.raises(ValueError, match="must lie in the matrix"):
        draw_tile_pointers(first_row=3, rows=2)
    with pytest.raises(ValueError, match="stride is not smaller"):
        draw_tile_pointers(columns=8, row_stride=4)
