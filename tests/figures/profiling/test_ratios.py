"""Ratios of pairs: as many points as pairs, and the line at their median."""

import pytest

from course_lib.figures.profiling.ratios import draw_ratios


def test_a_point_for_each_pair_a_line_at_the_median_and_late_pairs_at_the_edge():
    axes = draw_ratios([10.0, 20.0, 40.0, 10.0], [11.0, 20.0, 80.0, 10.8], 1.0, 1.1).axes[0]
    points, late = (collection.get_offsets() for collection in axes.collections)
    assert [tuple(point) for point in points] == [(1.0, 1.1), (2.0, 1.0), (4.0, 1.08)]
    assert late[0][0] == 3 and late[0][1] < axes.get_ylim()[1]
    assert [line.get_ydata()[0] for line in axes.lines] == pytest.approx([1.09, 1.0])


def test_pairs_of_other_numbers_are_refused():
    with pytest.raises(ValueError):
        draw_ratios([1.0], [1.0, 2.0], 0.9, 1.1)
