"""The error map shows the worst matrix, marks what is wrong and where tiles end."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from course_lib.figures.error_map import RIGHT, error_map


def _squares(markup):
    svg = ElementTree.fromstring(markup[: markup.index("</svg>") + 6])
    return [element.get("fill") for element in svg.iter("rect")], sum(1 for _ in svg.iter("line"))


def test_wrong_cells_are_painted_and_right_ones_are_not():
    excess = torch.zeros(8, 12)
    excess[4:, 8:] = 5.0
    fills, lines = _squares(error_map(excess, tile=(4, 4)))
    assert len(fills) == 96 and sum(fill != RIGHT for fill in fills) == 16
    assert lines == 4 + 3


def test_the_worst_matrix_of_a_batch_is_drawn_and_named():
    excess = torch.zeros(2, 3, 4, 4)
    excess[1, 2, 0, 0] = excess[0, 1, 1, 1] = excess[0, 1, 2, 2] = float("nan")
    assert "[0, 1, :, :] of the result, 4 × 4" in error_map(excess)


def test_further_off_is_darker():
    fills, _ = _squares(error_map(torch.tensor([0.5, 2.0, 1e3, float("inf")])))
    reds = [int(re.findall(r"\d+", fill)[0]) for fill in fills[1:]]
    assert fills[0] == RIGHT and reds == sorted(reds, reverse=True) and len(set(reds)) == 3


def test_one_wrong_element_of_a_large_matrix_still_shows():
    excess = torch.zeros(5000, 300)
    excess[4321, 299] = 2.0
    markup = error_map(excess)
    fills, _ = _squares(markup)
    assert len(fills) <= 48 * 48 and sum(fill != RIGHT for fill in fills) >= 1
    assert "each square the worst of up to 105 × 7" in markup


@pytest.mark.parametrize("rows, columns", [(36, 16), (5000, 300), (64, 1), (2, 2), (1, 257)])
def test_a_matrix_that_is_wrong_all_over_leaves_room_for_the_cases(rows, columns):
    markup = error_map(torch.full((rows, columns), 9.0))
    svg = ElementTree.fromstring(markup[: markup.index("</svg>") + 6])
    width, height = int(svg.get("width")), int(svg.get("height"))
    assert 8 <= width <= 384 and 8 <= height <= 240


@pytest.mark.parametrize("excess", [torch.tensor(3.0), torch.zeros(0, 4), torch.zeros(4, 4)])
def test_nothing_to_draw_gives_nothing(excess):
    assert error_map(excess) == ""
