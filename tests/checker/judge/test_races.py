"""Answers that are right once and not always. Here a counter stands for a GPU's order of programs."""

import math
from dataclasses import replace

import pytest
import torch

from course_lib.checker import Case, Mistake, Slip
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import running
from tests.checker.samples import ADD, ADD_CELL, APPEND, DOUBLE

COUNTED = "runs = 0\ndef double(x):\n    global runs\n    runs += 1\n"


@pytest.fixture(autouse=True)
def twenty_runs(monkeypatch):
    """All of them: on a busy machine the time for them would be over before the twentieth."""
    monkeypatch.setattr(running, "_runs", lambda draw: 20)
    monkeypatch.setattr(running, "REPEAT_SECONDS", 60.0)
    monkeypatch.setattr(running, "REPEATS_SECONDS", 120.0)


def runs_of(cell, exercise=DOUBLE):
    return running.run_cases(exercise, cell, {name: name for name in exercise.entries}, seed=1)[0].frames


@pytest.mark.parametrize("unlucky", [2, 7, 20])
def test_a_result_that_changes_once_in_twenty_runs_is_a_race(unlucky):
    """A number is lost, whatever its sign: the negative ones will not do, for 1 of 128 draws of seven holds none."""
    lost = f"(torch.arange(x.shape[-1]) > 0) * 2 * x if runs == {unlucky} else 2 * x"
    verdict = judge(DOUBLE, COUNTED + f"    return {lost}\n")
    assert verdict.outcome == "failed" and verdict.mistake == "race"
    assert "1 of 19 more runs gave another result" in verdict.message
    assert "run side by side" in verdict.diagnosis


@pytest.mark.parametrize("first, later", [("x + 1", "2 * x"), ("2 * x", "x + 1"), ("3 * x", "4 * x")])
def test_a_first_result_unlike_all_later_ones_is_something_kept(first, later):
    verdict = judge(DOUBLE, COUNTED + f"    return {first} if runs == 1 else {later}\n")
    assert verdict.mistake == "kept_result" and "19 of 19 more runs" in verdict.message
    assert "kept from call to call" in verdict.diagnosis


def test_a_buffer_that_is_added_to_and_never_set_back_is_asked_about():
    grows = "sums = {}\ndef double(x):\n    total = sums.setdefault(x.shape, torch.zeros_like(x))\n"
    verdict = judge(replace(DOUBLE, requirements=()), grows + "    total += 2 * x\n    return total\n")
    assert verdict.outcome == "failed" and "not set back" in verdict.diagnosis


def test_scratch_memory_is_poisoned_in_every_run():
    """Else the second run would find there what the first one left, and differ from it."""
    verdict = judge(DOUBLE, "def double(x):\n    return (2 * x + 0 * torch.empty_like(x)).nan_to_num(nan=5.0)\n")
    assert verdict.outcome == "failed" and verdict.mistake is None


def test_a_race_beside_infinities_is_found():
    """Whose difference is NaN: it must not pass for the largest."""
    infinity = torch.full((1,), -math.inf)
    task = replace(DOUBLE, oracle=lambda x: torch.cat([infinity.to(x.dtype), x.flatten()]), requirements=())
    steady = "torch.cat([torch.tensor([-math.inf]), x.flatten()])"
    assert judge(task, f"def double(x):\n    return {steady}\n").passed
    cell = COUNTED + f"    right = {steady}\n    return right * (1 + 1e-7) if runs == 2 else right + (runs == 9)\n"
    assert judge(task, cell).mistake == "race"


def test_a_known_mistake_is_no_name_for_a_result_that_was_right_at_first():
    guess = Mistake("guess", "Four.", when=lambda case, seen, got: True)
    triples = Slip("triples", "Three.", formula=lambda x: 3 * x)
    verdict = judge(
        replace(DOUBLE, slips=(triples,), mistakes=(guess,)), COUNTED + "    return 3 * x if runs == 4 else 2 * x\n"
    )
    assert verdict.mistake == "race"


OTHERS = ["torch.full_like(x, math.nan)", "torch.cat([2 * x, x])", "None", "(2 * x).half()", "7"]


@pytest.mark.parametrize("result", OTHERS)
def test_another_kind_of_result_in_a_later_run_does_not_pass(result):
    verdict = judge(DOUBLE, COUNTED + f"    return {result} if runs == 12 else 2 * x\n")
    assert verdict.outcome == "failed", verdict


def test_rounding_may_differ_from_run_to_run():
    """As atomic additions make it, which take the order in which programs come."""
    assert judge(DOUBLE, COUNTED + "    return 2 * x * (1 + (runs % 3) * 1e-7)\n").passed
    frames = runs_of(COUNTED + "    return 2 * x * (1 + (runs % 3) * 3e-7)\n")
    assert frames[0].seen.repeats == 19 and 10 <= frames[0].seen.differing < 19


def test_a_wrong_result_that_rounds_in_several_ways_is_no_race():
    verdict = judge(DOUBLE, COUNTED + "    return 3 * x * (1 + (runs % 3) * 1e-7)\n")
    assert verdict.outcome == "failed" and verdict.mistake is None and "more runs" not in verdict.message


def test_arguments_are_put_back_before_every_run():
    steady = "def append(cache, row, position):\n    cache[position] = cache[position] * 0 + row\n"
    assert judge(APPEND, steady).passed
    adds = "def append(cache, row, position):\n    cache[position] += row - before(cache, position)\n"
    adds += "def before(cache, position):\n    return cache[position].clone()\n"
    assert judge(APPEND, adds).passed


def test_a_race_in_an_argument_that_is_written_is_found():
    verdict = judge(
        APPEND,
        "runs = 0\ndef append(cache, row, position):\n    global runs\n    runs += 1\n"
        "    cache[position] = row\n    if runs == 15: cache[position - 1] = row\n",
    )
    assert verdict.mistake == "race" and "in `cache`" in verdict.message


def test_an_answer_that_writes_into_the_same_memory_each_time_is_told_as_that_and_no_race():
    reused = "out = {}\ndef double(x):\n    return torch.mul(x, 2, out=out.setdefault(x.shape, torch.empty_like(x)))\n"
    verdict = judge(replace(DOUBLE, requirements=()), reused)
    assert verdict.mistake == "earlier_result_changed", verdict


def test_one_element_of_any_stride_is_compared_from_run_to_run():
    one = replace(DOUBLE, requirements=(), cases=lambda draw: [Case("one element", (draw.normal(1),))])
    assert judge(one, "def double(x):\n    return (2 * torch.cat([x, x]))[::2]\n").passed


def test_an_error_in_a_later_run_is_told():
    verdict = judge(DOUBLE, COUNTED + "    assert runs != 9, 'the ninth'\n    return 2 * x\n")
    assert verdict.outcome == "error" and "the ninth" in verdict.message


def test_a_result_with_memory_that_was_never_written_is_that_and_no_race():
    verdict = judge(ADD, ADD_CELL.replace("total, mask=mask", "total, mask=i < 1"))
    assert verdict.mistake == "unwritten_memory"


def test_slow_answers_are_not_run_twenty_times(monkeypatch):
    monkeypatch.setattr(running, "REPEAT_SECONDS", 0.2)
    frames = runs_of(COUNTED + "    import time\n    time.sleep(0.15)\n    return 2 * x\n")
    assert all(1 <= frame.seen.repeats <= 2 for frame in frames.values()), "a busy machine may get to one only"


def test_further_runs_print_nothing():
    says = "    import sys\n    print(runs)\n    print('e', file=sys.stderr)\n"
    verdict = judge(DOUBLE, COUNTED + says + "    return 2 * x\n")
    assert verdict.passed and verdict.printed.split() == ["1", "e", "21", "e"]


def test_what_the_interpreter_runs_it_runs_once(monkeypatch):
    monkeypatch.undo()
    verdict = judge(DOUBLE, COUNTED + "    print(runs)\n    return 2 * x\n")
    assert verdict.passed and verdict.printed.split() == ["1", "2"]
