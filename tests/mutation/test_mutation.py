"""The mutation run, as far as the gate has time for it: its tools, its list of equivalents, and a few mutants.

The whole of it is a command: `python -m tests.mutation`.
"""

import random
import time

import pytest

from course_lib.checker.specification import catalog
from course_lib.checker.specification.needs import ANY, TRITON
from course_lib.hardware.device import machine
from tests.mutation.equivalent import EQUIVALENT, reason_for, stale
from tests.mutation.lines import keep, kept, spread
from tests.mutation.mutants import mutants_of
from tests.mutation.reasons import ANYTHING, entry
from tests.mutation.submissions import Check, right_ones
from tests.mutation.trial import all_mutants, tried
from tests.mutation.without_gpu import judge_here, judged_here
from tests.submissions.everything import unusual

SAMPLE = 6  # judged in the gate; the same ones until an answer changes

ANSWER = '''# Exercise 9.9 · An example
def attend(scores, limit):
    """Some text with a < b."""
    total = 0.0
    for start in range(0, limit, 16):
        total = total * 2 + scores[start] - 1
    return total if total < limit else math.exp(total)
'''


@pytest.fixture(scope="module")
def every_mutant():
    return all_mutants(catalog.exercises())


@pytest.mark.parametrize(
    "line",
    [
        "for start in range(0, limit - 16, 16):",  # the last tile
        "for start in range(0 + 16, limit, 16):",  # the first
        "for start in range(0, limit, 2 * 16):",
        "total = total + scores[start] - 1",  # a factor
        "total = (total * 2 + scores[start])",
        "total = total * 2 - scores[start] - 1",
        "return total if total <= limit else math.exp(total)",
        "return total if total < limit else math.exp2(total)",
        "return total if total < (limit) - 1 else math.exp(total)",
        "total = 1.0",
    ],
)
def test_the_classic_slips_are_made(line):
    assert line in {mutant.after for mutant in mutants_of("9.9", ANSWER)}


def test_every_mutant_is_another_program_and_says_what_it_changed():
    mutants = mutants_of("9.9", ANSWER)
    assert len({mutant.source for mutant in mutants}) == len(mutants)
    assert all(mutant.source != ANSWER and "Some text with a < b." in mutant.source for mutant in mutants)
    assert all(mutant.before in ANSWER for mutant in mutants if ";" not in mutant.before)
    assert mutants == mutants_of("9.9", ANSWER), "the order must not change from run to run"


@pytest.mark.slow
def test_every_exercise_has_mutants(every_mutant):
    """But those whose answer is a text in CUDA C++, which changes of Python do not reach."""
    counts = {name: 0 for name, task in catalog.exercises().items() if not task.needs.cuda_on_host}
    for mutant in every_mutant:
        counts[mutant.exercise] += 1
    assert min(counts.values()) >= 5, counts


@pytest.mark.slow
def test_no_entry_of_the_list_of_equivalents_is_stale(every_mutant):
    assert not [f"{exercise}: {entry.old} -> {entry.new}" for exercise, entry in stale(every_mutant)]
    assert all(len(entry.why) > 20 for entry in EQUIVALENT)


def test_what_only_tunes_a_launch_is_left_alone():
    source = (
        ANSWER + "    kernel(num_warps=4, BLOCK=64)\n    tiles = dict(), {'num_stages': 3, 'BLOCK': 64, 'parts': 5}\n"
    )
    changed = {mutant.after for mutant in mutants_of("9.9", source)}
    assert not any(f"'num_stages': {n}," in line for line in changed for n in (2, 4))
    assert {line.split("'BLOCK': ")[1][:2] for line in changed if "'parts': 5" in line} == {"64", "32"}
    assert any("'parts': 6" in line for line in changed)


def test_an_entry_may_speak_of_one_place_alone():
    twice = 'def f(a, b):\n    """."""\n    c = a + b\n    if a:\n        c = a + b\n    return c\n'
    mutants = [mutant for mutant in mutants_of("9.9", twice) if mutant.after == "c = a - b"]
    explained = [
        entry("9.9", "a + b", "a - b", "an example", place).explains(m) for place in (0, 1, 2) for m in mutants
    ]
    assert explained == [True, True, True, False, False, True]


def test_a_line_that_only_chooses_may_become_anything_that_passes():
    chooses = entry("9.9", "range(0, limit, 16)", ANYTHING, "an example")
    explained = {mutant.before for mutant in mutants_of("9.9", ANSWER) if chooses.explains(mutant)}
    assert explained == {"for start in range(0, limit, 16):"}


def test_a_run_goes_on_from_what_it_kept(tmp_path, capsys):
    path, until = tmp_path / "checks.jsonl", time.monotonic() + 60
    answers = 1 + len(unusual("5.4"))
    assert right_ones(["5.4"], 1, 1, path, until) == 0 and len(kept(path)) == answers
    with path.open("a") as file:
        file.write('{"key": ["5.4", "cut short by a ki')
    assert right_ones(["5.4"], 1, 1, path, until=0.0) == 0  # no time for any check, and none is left to make
    assert "were not made" not in capsys.readouterr().out


def test_a_failure_of_a_right_answer_is_counted(tmp_path, capsys):
    path = tmp_path / "checks.jsonl"
    check = Check("5.4", "the course's own", 1, catalog.solution_source("5.4"))
    keep(path, {"key": check.key, "outcome": "failed", "mistake": None, "message": "as if", "seconds": 0.1})
    assert right_ones(["5.4"], 1, 1, path, until=time.monotonic() + 60) == 1
    assert "FAILED 5.4 the course's own, seed 1: as if" in capsys.readouterr().out


def test_tasks_stop_with_the_clock():
    assert list(spread(str, [1, 2, 3], 1, until=0.0)) == []
    assert sorted(spread(abs, [-1, -2, -3], 2, until=time.monotonic() + 60)) == [1, 2, 3]


def test_a_race_is_judged_without_its_clock_where_there_is_no_gpu():
    if machine().tier != "none":
        pytest.skip("there is one")
    right = catalog.solution_source("4.7")
    verdict = judge_here("4.7", right, 1)
    assert verdict.passed and "was not measured" in verdict.message
    unscaled = right.replace("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)")
    assert judge_here("4.7", unscaled, 1).mistake == "scale_missing"
    assert "takes an NVIDIA GPU." in judge_here("1.5", catalog.solution_source("1.5"), 1).message
    assert not judged_here("9.8")


@pytest.mark.slow
def test_a_sample_of_the_mutants_is_rejected_or_explained(every_mutant):
    if machine().tier != "none":
        pytest.skip("the interpreter's cases are what the sample is for")
    usable = [mutant for mutant in every_mutant if catalog.exercise(mutant.exercise).needs in (ANY, TRITON)]
    for mutant in random.Random(5).sample(usable, SAMPLE):
        trial = tried(mutant, seeds=(1,))
        assert not trial.error and trial.survived == bool(reason_for(mutant)), f"{mutant}\n{trial.verdicts}"
