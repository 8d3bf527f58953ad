"""Chapter 05's figures: what they count is what the formulas say, and they draw at the edges of what they take."""

import pytest

from course_lib.figures.cache.calculator import cache_calculator, draw_memory, sequences_beside_weights, summary
from course_lib.figures.cache.step_times import draw_step_times
from course_lib.figures.cache.stepper import AGAIN, FRESH, STORED, Generation, cache_stepper, draw_generation
from course_lib.models.config import PRESETS


def generation(prompt, new):
    return Generation(tuple(f"w{number}" for number in range(prompt + new)), prompt)


def words_of(figure):
    texts = [text for axes in figure.axes for text in [*axes.texts, axes.title, axes._left_title]]
    return " ".join([figure.get_suptitle(), *(text.get_text() for text in texts)])


def test_a_hundred_tokens_take_5050_computations_or_100():
    hundred = generation(1, 100)
    assert hundred.computed(99, cached=False) == 5050 and hundred.computed(99, cached=True) == 100


def test_every_word_is_computed_once_and_then_again_or_read():
    some = generation(3, 4)
    assert some.states(0, False) == some.states(0, True) == [FRESH] * 3
    assert some.states(2, False) == [AGAIN] * 4 + [FRESH]
    assert some.states(2, True) == [STORED] * 4 + [FRESH]


def test_the_titles_say_how_many_were_computed():
    words = words_of(draw_generation(generation(3, 4), 3))
    assert "without a cache: 18 keys and values in 4 steps" in words
    assert "with a cache: 6 keys and values in 4 steps" in words


def test_the_slider_changes_the_picture():
    box = cache_stepper("Down the rabbit hole went Alice", 2).widget()
    (play, slider), image = box.children[0].children, box.children[1]
    before = image.value
    slider.value = 2
    assert image.value != before and play.max == slider.max == 3


@pytest.mark.parametrize("text, prompt", [("ab", 1), ("abcdefghijklmnop", 15), ("abcdefg", 1)])
def test_every_generation_that_is_allowed_draws(text, prompt, tmp_path):
    cache_stepper(" ".join(text), prompt).still.savefig(tmp_path / "steps.png")


@pytest.mark.parametrize(
    "text, prompt, name",
    [
        ("one", 1, "text"),
        ("a " * 17, 1, "text"),
        ("a b", 2, "prompt_length"),
        ("a b", 0, "prompt_length"),
        ("a b", True, "prompt_length"),
    ],
)
def test_a_generation_that_cannot_be_drawn_is_refused_by_name(text, prompt, name):
    with pytest.raises(ValueError, match=name):
        cache_stepper(text, prompt)


def test_the_calculator_says_what_the_formula_says():
    words = summary("all heads", PRESETS["Llama-2-70B, 64 KV heads"], 512, 2048, 2)
    assert "2.62 MB a token" in words and "2.75 TB for 512" in words
    assert "10.7 GB a sequence of 4,096" in summary("x", PRESETS["Llama-2-70B, 64 KV heads"], 1, 4096, 2)


def test_as_many_sequences_fit_as_are_said_and_not_one_more():
    shape, capacity = PRESETS["Llama-3-8B"], 80e9
    count = sequences_beside_weights(shape, 8192, 2, capacity)
    used = 2 * shape.parameters + shape.cache_bytes(count, 8192)
    assert used <= capacity < used + shape.cache_bytes(1, 8192)
    assert sequences_beside_weights(PRESETS["Llama-3.1-405B"], 512, 2, capacity) == 0


def test_every_model_has_its_bar_and_its_bytes():
    words = words_of(draw_memory(PRESETS, 16, 4096))
    assert "16 sequences of 4,096 tokens" in words and "13.5 GB + 34.4 GB" in words


def test_the_smallest_model_has_a_bar_that_can_be_seen_beside_the_largest():
    figure = draw_memory(PRESETS, 16, 4096)
    for axes in figure.axes:
        names = [label.get_text() for label in axes.get_yticklabels()]
        totals = dict.fromkeys(names, 0.0)
        for bar in axes.patches:
            totals[names[round(bar.get_y() + bar.get_height() / 2)]] += bar.get_width()
        assert min(totals.values()) > 0.05 * axes.get_xlim()[1], totals
    assert len(figure.axes) == 2 and len(draw_memory({"one": PRESETS["Llama-3.2-1B"]}, 1, 4096).axes) == 1


def test_the_calculator_follows_its_controls():
    box = cache_calculator(PRESETS).widget()
    model, batch, length, item, words, image = box.children
    seen = {words.value}
    picture = image.value
    model.value = "Llama-3-70B"
    seen.add(words.value)
    batch.value, length.value = 1, 131_072
    seen.add(words.value)
    item.value = 1
    seen.add(words.value)
    assert len(seen) == 4 and image.value != picture


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"shapes": {}}, "shapes"),
        ({"shapes": PRESETS, "batch": 3}, "batch"),
        ({"shapes": PRESETS, "length": 1000}, "length"),
    ],
)
def test_a_calculation_that_is_not_offered_is_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        cache_calculator(**arguments)


@pytest.mark.parametrize("slowest, unit", [(3.0, "s"), (0.02, "ms"), (4e-5, "µs"), (1e-8, "µs")])
def test_step_times_have_a_unit_that_fits(slowest, unit, tmp_path):
    figure = draw_step_times({"grows": {1: slowest / 2, 100: slowest}, "flat": {1: slowest / 9, 100: slowest / 9}}, "t")
    assert figure.axes[0].get_ylabel() == f"one step [{unit}]"
    assert {"grows", "flat"} == {text.get_text() for text in figure.axes[0].texts}
    figure.savefig(tmp_path / "times.png")


@pytest.mark.parametrize("times", [{}, {"empty": {}}, {str(number): {1: 1.0} for number in range(8)}])
def test_step_times_that_cannot_be_drawn_are_refused(times):
    with pytest.raises(ValueError, match="times has"):
        draw_step_times(times, "t")
