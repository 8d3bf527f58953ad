"""A limit of seconds means as much on a slow processor: the yardstick that it is stretched by."""

import itertools

import pytest

from course_lib.checker.runner.process import pace


def _clock(monkeypatch, *taken):
    """A processor on which the yardstick takes so many seconds, time after time."""
    ticks = itertools.chain([0.0], itertools.accumulate(itertools.chain.from_iterable((t, 0.0) for t in taken)))
    monkeypatch.setattr(pace.time, "thread_time", lambda: next(ticks))


@pytest.mark.parametrize(
    ("times_as_long", "expected"),
    [
        pytest.param(0.5, 1.0, id="a faster processor shortens nothing"),
        pytest.param(1.7, 1.7, id="a slower one stretches by as much"),
        pytest.param(100.0, pace.MOST, id="a loop that never ends is stopped all the same"),
    ],
)
def test_a_limit_is_stretched_by_how_slow_the_processor_is(times_as_long, expected, monkeypatch):
    _clock(monkeypatch, *[times_as_long * pace.USUAL] * 5)
    assert pace.slowness() == pytest.approx(expected)


def test_what_disturbs_one_run_of_the_yardstick_is_left_out(monkeypatch):
    _clock(monkeypatch, *(factor * pace.USUAL for factor in (9.0, 3.0, 1.5, 4.0, 2.0)))
    assert pace.slowness() == pytest.approx(1.5)


def test_it_is_asked_within_a_moment():
    """An answer that is stopped is told of it a moment later, also where eight checks share a core."""
    started = pace.time.process_time()
    assert 1.0 <= pace.slowness() <= pace.MOST
    assert pace.time.process_time() - started < 5 * pace.MOST * pace.USUAL * 2
