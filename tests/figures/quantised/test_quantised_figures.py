"""The pictures of fewer bits: every level is a mark, every number a cell, and what can't be drawn is refused."""

import pytest
import torch

from course_lib.figures.quantised.levels import draw_levels, e4m3_levels, int4_levels
from course_lib.figures.quantised.losses import draw_cache_losses
from course_lib.figures.quantised.outliers import draw_outliers
from course_lib.figures.quantised.plans import draw_plan_gains


def test_levels_are_those_of_the_formats():
    assert int4_levels().diff().allclose(torch.tensor(2 / 15))
    levels = e4m3_levels()
    assert len(levels) == 253 and levels.max() == 1 and levels.min() == -1
    assert levels[levels > 0].min() == 2**-9 / 448  # the smallest subnormal number


def test_each_level_is_drawn(tmp_path):
    figure = draw_levels({"INT4": int4_levels(), "e4m3": e4m3_levels()})
    figure.savefig(tmp_path / "levels.png")
    assert [len(lines.get_segments()) for lines in figure.axes[0].collections] == [16, 253]
    assert [text.get_text().split(" ")[0] for text in figure.axes[0].texts] == ["16", "253"]


@pytest.mark.parametrize("numbers", [torch.tensor([]), torch.tensor([0.5, 1.5])])
def test_levels_that_are_none_or_beyond_1_are_refused(numbers):
    with pytest.raises(ValueError, match="formats\\['odd'\\]"):
        draw_levels({"odd": numbers})


def test_outliers_are_shown_where_they_are(tmp_path):
    keys, values = torch.zeros(2, 6, 4)
    keys[:, 2] = -9.0
    figure = draw_outliers(keys, values)
    figure.savefig(tmp_path / "outliers.png")
    assert [bar.get_height() for bar in figure.axes[0].patches] == [0, 0, 9, 0]
    assert figure.axes[2].images[0].get_array()[:, 2].tolist() == [9.0] * 6


def test_keys_and_values_of_two_shapes_are_refused():
    with pytest.raises(ValueError, match=r"keys are \(3, 4\), values \(4, 3\)"):
        draw_outliers(torch.zeros(3, 4), torch.zeros(4, 3))


def test_each_caches_bytes_and_loss_stand_in_its_row(tmp_path):
    figure = draw_cache_losses({"32 bits": (2048, 1.8131), "INT4": (288, 1.8146), "INT4, at once": (288, 1.82)})
    figure.savefig(tmp_path / "losses.png")
    left, right = figure.axes
    assert [bar.get_width() for bar in left.patches] == [2048, 288, 288]
    assert [label.get_text() for label in left.get_yticklabels()] == ["32 bits", "INT4", "INT4, at once"]
    reference, drawn = right.lines
    assert set(reference.get_xdata()) == {1.8131} and list(drawn.get_xdata()) == [1.8131, 1.8146, 1.82]
    assert left.get_ylim()[0] > left.get_ylim()[1]  # the first at the top


@pytest.mark.parametrize("points", [{}, {"none": (0, 1.8)}])
def test_losses_of_nothing_are_refused(points):
    with pytest.raises(ValueError, match="points is"):
        draw_cache_losses(points)


PLANS = {
    "keep": {1: 4.0, 8: 4.0, 64: 8.0},
    "fuse": {1: 1.0, 8: 2.0, 64: 10.0},
    "once": {1: 8.0, 8: 8.0, 64: 8.0},
}


def test_each_plans_gain_over_the_first_is_a_line(tmp_path):
    figure = draw_plan_gains(PLANS, "counted", {"keep": {1: 4.4}, "fuse": {1: 2.2}, "once": {}})
    figure.savefig(tmp_path / "plans.png")
    (axes,) = figure.axes
    even, *drawn = axes.lines
    assert set(even.get_ydata()) == {1}
    assert [list(line.get_ydata()) for line in drawn] == [[4.0, 2.0, 0.8], [2.0], [0.5, 0.5, 1.0]]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["fused", "fused, measured", "dequantised once"]


@pytest.mark.parametrize("times", [{}, {"keep": {1: 1.0}}, {"keep": {1: 0.0}, "fuse": {1: 1.0}},
                                   {"keep": {1: 1.0}, "fuse": {2: 1.0}}])  # fmt: skip
def test_times_of_nothing_are_refused(times):
    with pytest.raises(ValueError, match="times is"):
        draw_plan_gains(times, "nothing")
