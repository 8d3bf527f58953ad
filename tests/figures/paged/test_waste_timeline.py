"""The stacked shares are those of the timeline, and add up to the whole cache."""

import numpy
import pytest

from course_lib.figures.paged.waste_timeline import LAYERS, draw_waste, draw_waste_by_page_size, mean_use
from course_lib.serving.memory import ContiguousCache, PagedCache, Timeline, replay, sample_trace
from course_lib.serving.memory.simulator import STATES


@pytest.fixture(scope="module")
def timelines():
    trace = sample_trace(40, seed=2, arrivals_per_step=0.5, prompt_mean=40, output_mean=60, context=256)
    return {
        "256 each": replay(trace, ContiguousCache(1000, lambda request: 256)),
        "pages": replay(trace, PagedCache(1000, 16)),
    }


def test_every_state_of_memory_has_a_layer():
    assert tuple(state for state, _, _ in LAYERS) == STATES


def test_each_panel_fills_up_to_the_whole_cache(timelines):
    figure = draw_waste(timelines, steps=100)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["256 each", "pages"]
    for axes in figure.axes:
        top = axes.collections[len(LAYERS) - 1].get_paths()[0].vertices[:, 1]
        assert top.max() == pytest.approx(100)


def test_the_layers_hold_the_timelines_numbers(timelines):
    timeline = timelines["256 each"]
    axes = draw_waste({"one": timeline}, steps=50).axes[0]
    edge = axes.collections[0].get_paths()[0].vertices
    highest = {x: y for x, y in edge if y > 0}
    wanted = [100 * used / timeline.slots for used in timeline.used[:50]]
    assert numpy.allclose([highest.get(float(step), 0.0) for step in range(50)], wanted)


def test_the_mean_is_taken_while_somebody_waits():
    timeline = Timeline(10, used=[0, 8, 6], waiting=[0, 2, 1])
    assert mean_use(timeline) == "70.0 % hold tokens"
    assert mean_use(Timeline(10, used=[2, 4], waiting=[0, 0])) == "30.0 % hold tokens"


def test_a_panel_that_shows_the_beginning_says_what_the_whole_timeline_says(timelines):
    timeline = timelines["256 each"]
    figure = draw_waste({"one": timeline}, steps=20)
    assert figure.axes[0].texts[0].get_text() == f"{100 * timeline.shares()['used']:.1f} % hold tokens"


def test_bars_are_the_sum_of_what_is_wasted(timelines):
    shares = [timelines["pages"].shares(), timelines["256 each"].shares()]
    figure = draw_waste_by_page_size(shares, (16, 256))
    labels = [text.get_text() for text in figure.axes[0].texts]
    wanted = [100 * (share["later"] + share["never"] + share["stranded"]) for share in shares]
    assert labels == [f"{value:.1f} %" for value in wanted]


@pytest.mark.parametrize("nothing", [{}, {"empty": Timeline(10)}])
def test_nothing_to_draw_is_said(nothing):
    with pytest.raises(ValueError, match="nothing to draw"):
        draw_waste(nothing)
