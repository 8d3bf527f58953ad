"""The picture of a pool: a page is as strong as it is full, and every layout has its panel."""

import pytest
from matplotlib.colors import to_rgb

from course_lib.figures.paged.pool_over_time import COLORS, draw_pool_over_time, mixed
from course_lib.figures.style import PAPER

HISTORY = {
    "runs": [{0: ("a", 4), 1: ("a", 0)}, {0: ("a", 4), 1: ("a", 1)}, {0: ("b", 2), 1: ("b", 0)}],
    "pages": [{0: ("a", 4), 2: ("b", 2)}],
}


def test_a_page_is_as_strong_as_it_is_full():
    figure = draw_pool_over_time(HISTORY, pages=3, page_size=4)
    left, right = (panel.images[0].get_array() for panel in figure.axes)
    assert left.shape[:2] == (3, 3) and right.shape[:2] == (3, 1)
    assert tuple(left[0][0]) == pytest.approx(to_rgb(COLORS[0])) and tuple(left[2][0]) == pytest.approx(to_rgb(PAPER))
    assert tuple(left[1][0]) == pytest.approx(mixed(to_rgb(COLORS[0]), 0))
    assert tuple(right[2][0]) == pytest.approx(mixed(to_rgb(COLORS[1]), 0.5))


def test_titles_say_steps_and_use():
    figure = draw_pool_over_time(HISTORY, pages=3, page_size=4)
    assert [panel.get_title(loc="left") for panel in figure.axes] == [
        "runs: 3 steps, 31% full",
        "pages: 1 steps, 50% full",
    ]


@pytest.mark.parametrize("histories", [{}, {"pages": []}])
def test_nothing_to_draw_is_refused(histories):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_pool_over_time(histories, pages=3, page_size=4)
