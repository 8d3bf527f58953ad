"""Timing: medians with a spread, and no silent nonsense."""

import math
import time

import pytest

from course_lib.hardware.timing import Timing, measure, measure_together, summarize


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
    assert time.perf_counter() - started < 10.0


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


def test_together_functions_take_turns_in_changing_order():
    """Each result is its own function's, and nobody always comes after the same other."""
    calls = []

    def called(name, seconds):
        def function():
            calls.append(name)
            time.sleep(seconds)

        return function

    times = {"slow": 0.008, "fast": 0.001, "middle": 0.003}
    timings = measure_together(
        {name: called(name, seconds) for name, seconds in times.items()}, rounds=8, seconds=0.2, device="cpu"
    )
    assert list(timings) == list(times)
    for name, seconds in times.items():
        assert seconds <= timings[name].best and timings[name].median < seconds + 0.003
        assert timings[name].repeats >= 8
    turns = [name for name, before in zip(calls[1:], calls) if name != before]
    followers = {(before, after) for before, after in zip(turns, turns[1:])}
    assert {before for before, after in followers if after == "fast"} == {"slow", "middle"}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (({},), ValueError, "functions is empty"),
        (([print],), TypeError, "functions is a list"),
        (({"mine": 3},), TypeError, "function is 3"),
    ],
)
def test_together_refuses_what_it_cannot_time(arguments, error, words):
    with pytest.raises(error, match=words):
        measure_together(*arguments, device="cpu")


@pytest.mark.parametrize("rounds", [1, 0, 2.5, True])
def test_together_wants_at_least_two_rounds(rounds):
    with pytest.raises(ValueError, match="rounds is"):
        measure_together({"mine": lambda: None}, rounds=rounds, device="cpu")
