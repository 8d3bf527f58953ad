"""The stepper and the tree of merges show the numbers that the algorithm has."""

import io
import math

import pytest
import torch

from course_lib.figures.softmax.merge_tree import draw_merge_tree, merge_levels
from course_lib.figures.softmax.one_pass_stepper import chosen_steps, draw_steps, online_softmax_stepper, online_steps

SCORES = [0.5, 1.2, -0.3, 0.8, 1.7, 0.1, 2.6, 1.1, 0.2]
VALUES = [[float(position), 1.0] for position in range(9)]


def _texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("tile", [1, 2, 4, 9, 100])
def test_the_last_step_holds_softmax_attention_whatever_the_tile(tile):
    last = online_steps(SCORES, VALUES, tile)[-1]
    wanted = torch.softmax(torch.tensor(SCORES), dim=0) @ torch.tensor(VALUES)
    output = torch.tensor(last.accumulator) / last.running_sum
    torch.testing.assert_close(output, wanted)
    assert last.running_max + math.log(last.running_sum) == pytest.approx(float(torch.tensor(SCORES).logsumexp(dim=0)))


def test_every_step_is_that_of_the_row_as_far_as_it_was_read():
    for step in online_steps(SCORES, VALUES, 2):
        seen = torch.tensor(SCORES[: step.end], dtype=torch.float64)
        assert step.running_max == float(seen.max())
        assert step.running_sum == pytest.approx(float(torch.exp(seen - seen.max()).sum()))


def test_a_step_says_by_how_much_the_earlier_weights_shrank():
    first, second, third = online_steps([0.0, 1.0, 0.0, 3.0, 2.0, 1.0], [[1.0]] * 6, 2)
    assert (first.rescale, third.rescale) == (1.0, 1.0)
    assert second.rescale == pytest.approx(math.exp(-2))
    texts = _texts(draw_steps([0.0, 1.0, 0.0, 3.0, 2.0, 1.0], [[1.0]] * 6, 2))
    assert "earlier weights × 0.14" in texts and "maximum unchanged" in texts


def test_a_long_row_is_shown_by_its_first_and_last_tile_and_those_that_rescale_most():
    rising_twice = [0.0] * 6 + [4.0] + [0.0] * 5 + [9.0] + [0.0] * 3
    assert chosen_steps(online_steps(rising_twice, [[1.0]] * 16, 2)) == [0, 3, 6, 7]


def test_the_drawn_numbers_are_those_of_the_steps():
    steps = online_steps(SCORES, VALUES, 4)
    texts = _texts(draw_steps(SCORES, VALUES, 4))
    for step in steps:
        assert f"m = {step.running_max:.1f}" in texts and f"{step.running_sum:.2f}" in texts


def test_the_slider_redraws_the_step():
    stepper = online_softmax_stepper(SCORES, VALUES, 4)
    controls, image = stepper.widget().children
    before = bytes(image.value)
    controls.children[1].value = 2
    assert bytes(image.value).startswith(b"\x89PNG") and bytes(image.value) != before


def test_without_a_kernel_the_strip_of_steps_is_there():
    buffer = io.BytesIO()
    online_softmax_stepper(SCORES, VALUES, 4).still.savefig(buffer, format="png")
    assert len(buffer.getvalue()) > 10_000


@pytest.mark.parametrize(
    "scores, values, tile, word",
    [
        ([1.0], [[1.0]], 1, "scores"),
        ([1.0, math.inf], [[1.0]] * 2, 1, "scores"),
        ([1.0, 2.0], [[1.0]], 1, "values"),
        ([1.0, 2.0], [[1.0], [1.0, 2.0]], 1, "values"),
        ([1.0, 2.0], [[1.0]] * 2, 0, "tile"),
    ],
)
def test_what_cannot_be_drawn_is_refused_by_name(scores, values, tile, word):
    with pytest.raises(ValueError, match=word):
        online_softmax_stepper(scores, values, tile)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_tree_ends_in_the_whole_rows_state(parts):
    scores = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(parts)) * 3
    levels = merge_levels(scores.tolist(), parts)
    ((maximum, total),) = levels[-1]
    assert len(levels[0]) == parts and maximum == float(scores.max())
    assert total == pytest.approx(float(torch.exp(scores - scores.max()).sum()))
    assert f"m = {maximum:.1f}   ℓ = {total:.2f}" in _texts(draw_merge_tree(scores.tolist(), parts))


def test_a_tree_of_three_parts_is_refused():
    with pytest.raises(ValueError, match="2, 4 or 8"):
        draw_merge_tree([1.0] * 9, 3)
