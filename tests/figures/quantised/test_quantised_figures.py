"""The pictures of fewer bits: every level is a mark, every number a cell, and what can't be drawn is refused."""

import pytest
import torch

from course_lib.figures.quantised.levels import draw_levels, e4m3_levels, int4_levels
from course_lib.figures.quantised.losses import draw_cache_losses
from course_lib.figures.quantised.outliers import draw_outliers
from course_lib.figures.quantised.plans import draw_plan_gains
from course_lib.figures.quantised.storage import draw_byte, draw_groups, draw_window


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
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["breaks even", "fused", "fused, measured", "dequantised once"]


@pytest.mark.parametrize("times", [{}, {"keep": {1: 1.0}}, {"keep": {1: 0.0}, "fuse": {1: 1.0}},
                                   {"keep": {1: 1.0}, "fuse": {2: 1.0}}])  # fmt: skip
def test_times_of_nothing_are_refused(times):
    with pytest.raises(ValueError, match="times is"):
        draw_plan_gains(times, "nothing")


@pytest.mark.parametrize("low, high", [(-3, 5), (-8, 7), (-1, -1), (0, 0)])
def test_a_bytes_bits_are_those_of_its_codes(low, high):
    texts = [text.get_text() for text in draw_byte(low, high).axes[0].texts]
    byte = int("".join(text for text in texts if text in ("0", "1")), 2)
    assert f"the byte is {byte}" in texts
    assert ((byte & 15) ^ 8) - 8 == low and ((byte >> 4) ^ 8) - 8 == high


def test_codes_beyond_four_bits_are_refused():
    with pytest.raises(ValueError, match="low is 8 and high 0"):
        draw_byte(8, 0)


def test_numbers_of_a_group_have_one_color_and_its_neighbours_others():
    left, right = draw_groups(8, 12, 4, large=(2, 5)).axes
    for axes, (tall, wide) in ((left, (4, 1)), (right, (1, 4))):
        color = {cell.get_xy()[::-1]: cell.get_facecolor() for cell in axes.patches if cell.get_fill()}
        assert len(axes.patches) - len(color) == 8 * 12 // 4  # the frames
        for (token, channel), mine in color.items():
            corner = token - token % tall, channel - channel % wide
            assert mine == color[corner]
            assert mine != color.get((corner[0] + tall, channel)) and mine != color.get((token, corner[1] + wide))
        assert len(axes.lines) == 2 * 8


@pytest.mark.parametrize("sizes", [(8, 8, 3), (0, 8, 4), (28, 8, 4), (8, 8, 0)])
def test_groups_that_cannot_be_drawn_are_refused(sizes):
    with pytest.raises(ValueError, match="must be multiples of group"):
        draw_groups(*sizes)


def test_a_large_channel_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"large \(8,\)"):
        draw_groups(8, 8, 4, large=(8,))


@pytest.mark.parametrize("keys, group, window", [(11, 4, 3), (3, 4, 0), (8, 2, 0), (9, 1, 20)])
def test_the_window_keeps_the_newest_keys_and_full_groups_the_others(keys, group, window):
    told = [text.get_text() for text in draw_window(keys, group, window, before=0).axes[0].texts]
    quantised = max(0, keys - window) // group * group
    assert told[0] == f"{keys} keys: {quantised} quantised, {keys - quantised} whole"


@pytest.mark.parametrize("options", [{"keys": 25}, {"group": 0}, {"window": -1}, {"before": 11}])
def test_a_window_that_cannot_be_drawn_is_refused(options):
    with pytest.raises(ValueError, match="keys must lie between 1 and 24"):
        draw_window(**({"keys": 11, "group": 4, "window": 3} | options))
