"""The plot over the context draws every measurement, and the floor where the bytes and the bandwidth put it."""

import pytest

from course_lib.figures.attention.context_scaling import context_scaling_figure, length_name

TIMES = {"split": {1024: 10e-6, 131072: 140e-6, 8192: 17e-6}, "one program": {1024: 14e-6, 131072: 1.7e-3}}


def test_every_line_has_its_points_in_order_and_the_floor_is_bytes_over_bandwidth():
    axes = context_scaling_figure(TIMES, bytes_per_token=4096, bandwidth=4e12, title="decode").axes[0]
    floor, split, one = axes.lines
    assert list(floor.get_xdata()) == [1024, 8192, 131072]
    assert list(floor.get_ydata()) == pytest.approx([1.048576, 8.388608, 134.217728])
    assert list(split.get_xdata()) == [1024, 8192, 131072] and list(split.get_ydata()) == pytest.approx([10, 17, 140])
    assert list(one.get_ydata()) == pytest.approx([14, 1700])


def test_each_line_is_named_at_its_end_and_names_do_not_touch():
    figure = context_scaling_figure({"a": {64: 1e-5}, "b": {64: 1e-5}, "c": {64: 1.01e-5}}, 4, 1e12, "decode")
    figure.draw_without_rendering()
    labels = figure.axes[0].texts
    assert {text.get_text() for text in labels} == {"floor: 1.00 TB/s", "a", "b", "c"}
    boxes = sorted((text.get_window_extent() for text in labels), key=lambda box: box.y0)
    assert all(below.y1 <= above.y0 for below, above in zip(boxes, boxes[1:]))


def test_lengths_read_as_they_are_spoken_of():
    assert [length_name(n) for n in (1000, 1024, 131072, 2**20)] == ["1000", "1k", "128k", "1M"]


@pytest.mark.parametrize("times", [{}, {"split": {}}])
def test_nothing_to_draw_is_refused(times):
    with pytest.raises(ValueError, match="times has"):
        context_scaling_figure(times, 4096, 4e12, "decode")
