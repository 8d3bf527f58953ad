"""Timing: medians with a spread, and no silent nonsense."""
import math
import time

import pytest

from course_lib.hardware.timing import Timing, measure, summarize


def test_a_known_duration_is_measured():
    timing = measure(lambda: time.sleep(0.01), repeats=5, device="cpu")
    assert 0.01 <= timing.best <= timing.median
    assert timing.low <= timing.median <= timing.high
    assert timing.repeats == 5


def test_one_slow_run_does_not_move_the_median():
    timing = summarize([1.0] * 9 + [100.0])
    assert timing.median == 1.0
    assert timing.high == 100.0


def test_warm_up_calls_are_not_timed():
    calls = []

    def slow_at_first():
        calls.append(None)
        if len(calls) <= 2:
            time.sleep(0.05)

    assert measure(slow_at_first, warmup=2, repeats=5, device="cpu").high < 0.05
    assert len(calls) == 7


def test_repeats_fit_the_time_that_is_given():
    started = time.perf_counter()
    timing = measure(lambda: time.sleep(0.005), seconds=0.1, device="cpu")
    assert 5 <= timing.repeats <= 20
    assert time.perf_counter() - started < 1.0


def test_a_flush_costs_the_function_nothing_and_is_not_timed():
    assert measure(lambda: None, repeats=5, flush=True, device="cpu").best < 1e-3


def test_rates_are_taken_at_the_median():
    timing = Timing(median=0.5, low=0.4, high=0.6, repeats=3, best=0.3)
    assert timing.bandwidth(1e9) == 2e9
    assert timing.rate(1e12) == 2e12
    assert timing.spread == pytest.approx(0.4)
    assert str(timing) == "500 ms (400 ms to 600 ms, 3 runs)"


@pytest.mark.parametrize(
    "arguments, name",
    [
        ({"warmup": 0}, "warmup is 0"),
        ({"warmup": 2.5}, "warmup is 2.5"),
        ({"repeats": 0}, "repeats is 0"),
        ({"repeats": True}, "repeats is True"),
        ({"seconds": 0}, "seconds is 0"),
        ({"seconds": math.nan}, "seconds is nan"),
        ({"seconds": math.inf}, "seconds is inf"),
        ({"device": "meta"}, "device is 'meta'"),
    ],
)
def test_an_absurd_argument_is_refused_by_name(arguments, name):
    with pytest.raises(ValueError, match=name):
        measure(lambda: None, **{"device": "cpu"} | arguments)


def test_something_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match="measure\\(lambda"):
        measure(3)


def test_an_error_of_the_function_is_the_callers_to_see():
    with pytest.raises(ZeroDivisionError):
        measure(lambda: 1 / 0, device="cpu")
