"""Ratios of pairs: as many points as pairs, and the line at their median."""

import pytest

from course_lib.figures.profiling.ratios import draw_ratios


def test_a_point_for_each_pair_and_a_line_at_the_median():
    axes = draw_ratios([10.0, 20.0, 40.0], [11.0, 20.0, 80.0], 1.0, 1.2).axes[0]
    points = axes.collections[0].get_offsets()
    assert [tuple(point) for point in points] == [(1.0, 1.1), (2.0, 1.0), (3.0, 2.0)]
    assert [line.get_ydata()[0] for line in axes.lines] == [1.0, 1.1]


def test_pairs_of_other_numbers_are_refused():
    with pytest.raises(ValueError):
        draw_ratios([1.0], [1.0, 2.0], 0.9, 1.1)
