"""The pictures of an engine: what they draw is what they were given."""

from matplotlib.colors import to_hex

from course_lib.figures.serving.draws import draw_histogram
from course_lib.figures.serving.path import Stage, draw_path
from course_lib.figures.serving.speculation import draw_speculation, expected_tokens
from course_lib.figures.serving.steps import KINDS, draw_steps
from course_lib.figures.serving.waits import draw_waits
from course_lib.figures.style import RED


def test_the_path_names_every_stage():
    stages = [Stage("bytes", "host", "a\nnote"), Stage("prefill", "GPU", ""), Stage("decode", "GPU", "")]
    (axes,) = draw_path(stages, again=(2, 1)).axes
    assert {"bytes", "prefill", "decode", "host", "GPU", "a\nnote"} <= {text.get_text() for text in axes.texts}


def test_a_request_that_waits_after_it_ran_was_sent_back_and_one_that_has_not_run_was_not():
    steps = [{0: ("prompt", 7), 1: ("waits", 0)}, {0: ("waits", 0), 1: ("token", 1)}, {0: ("prompt", 8)}]
    figure = draw_steps({"a run": steps})
    (axes,) = figure.axes
    marks = [(line.get_xdata()[0], line.get_color()) for line in axes.lines]
    assert marks == [(1, RED)] and [text.get_text() for text in axes.texts] == ["7", "8"]
    drawn = [to_hex(bar.get_facecolor()[0]).upper() for bar in axes.collections]
    assert drawn == [KINDS[kind] for kind in ("prompt", "waits", "waits", "token", "prompt")]
    assert "3 steps" in axes.get_title(loc="left")
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == ["a piece of the text so far, in tokens", "one new token", "waits", "preempted"]


def test_the_histogram_has_a_bar_for_each_token_and_a_mark_for_each_share():
    (axes,) = draw_histogram(["a", "b"], [0.75, 0.25], {"4 draws": [3, 1], "8 draws": [4, 4]}).axes
    assert [bar.get_height() for bar in axes.patches] == [0.75, 0.25]
    assert [list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"] == [[0.75, 0.25], [0.5, 0.5]]


def test_expected_tokens_are_those_of_the_formula():
    assert [round(expected_tokens(0.8, guesses), 2) for guesses in range(6)] == [1, 1.8, 2.44, 2.95, 3.36, 3.69]
    assert expected_tokens(1.0, 4) == 5 and expected_tokens(0.0, 4) == 1


def test_a_free_guess_gains_as_many_times_as_it_writes_tokens_and_a_dear_one_loses():
    left, right = draw_speculation((0.5,), (0.0, 1.0), 0.5, most=3).axes
    free, dear, _ = (list(line.get_ydata()) for line in right.lines)
    assert free == list(left.lines[0].get_ydata()) == [1, 1.5, 1.75, 1.875] and dear[-1] < 1


def test_waits_are_drawn_in_rising_order_with_their_mean_and_the_longest():
    (axes,) = draw_waits({"a run": [9.0, 1.0, 2.0]}, "steps").axes
    assert list(axes.lines[0].get_ydata()) == [1, 2, 9]
    assert [text.get_text() for text in axes.texts] == ["longest 9", "mean 4"]
