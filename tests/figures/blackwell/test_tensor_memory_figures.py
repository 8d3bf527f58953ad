"""The figures of tensor memory say what the plan and the played events say."""

import pytest

from course_lib.figures.blackwell.columns import draw_columns
from course_lib.figures.blackwell.roles import draw_roles

PLAN = {"S0": (0, 128), "P0": (64, 64), "O0": (256, 128), "S1": (128, 128), "P1": (192, 64), "O1": (384, 128)}
EVENTS = [
    ("tensor cores", "scores", 0, 3, 0, 10),
    ("softmax 0", "read", 0, 3, 10, 14),
    ("softmax 0", "write", 0, 3, 14, 30),
    ("correction", "rescale", 0, 3, 14, 20),
    ("tensor cores", "output", 0, 3, 30, 40),
]


def test_each_region_stands_in_its_columns_and_p_in_the_columns_of_its_s():
    (axes,) = draw_columns(PLAN).axes
    named = {(text.get_text(), round(text.get_position()[1])): text.get_position()[0] for text in axes.texts}
    assert named["S0  scores, float32", 0] == 64 and named["P0", 1] == 96 and named["O1  output, float32", 1] == 448
    assert ("S0  scores, float32", 1) not in named and ("P0", 0) not in named
    assert list(axes.get_xticks()) == [0, 64, 128, 192, 256, 384, 512]


def test_a_bar_for_each_event_and_the_share_of_the_tensor_cores():
    (axes,) = draw_roles(EVENTS).axes
    assert axes.get_title(loc="left") == "The tensor cores work 50 % of the time"
    assert [text.get_text() for text in axes.texts] == ["S0\n3", "P0\n3", "O0\n3"]
    assert {(bar.get_x(), bar.get_width()) for bar in axes.patches} == {(e[4], e[5] - e[4]) for e in EVENTS}


def test_bars_end_where_the_picture_does():
    (axes,) = draw_roles(EVENTS, until=20).axes
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == 20


@pytest.mark.parametrize("draw, nothing", [(draw_columns, {}), (draw_roles, [])])
def test_nothing_to_draw_is_refused(draw, nothing):
    with pytest.raises(ValueError, match="events is empty|at least one region"):
        draw(nothing)
