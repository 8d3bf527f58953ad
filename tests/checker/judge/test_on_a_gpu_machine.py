"""What the judge decides on a machine with a GPU, played: interpreted first, and no GPU where that tells enough."""

from dataclasses import replace

import pytest

from course_lib.checker.judge import decide
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import running
from course_lib.checker.runner.worker import WorkerDied
from course_lib.checker.specification import catalog
from course_lib.hardware.device import machine

pytestmark = pytest.mark.skipif(machine().tier != "none", reason="tests/gpu asks a GPU itself")

TASK = catalog.exercise("1.4")
RIGHT = catalog.solution_source("1.4")
REMARKED = RIGHT.replace("    row = tl.program_id(0)", "    # one program for each row\n    row  =  tl.program_id(0)")
WRONG = RIGHT.replace("row * row_stride", "row * columns")
RAISES = RIGHT.replace("row * row_stride", "row * stride")


@pytest.fixture
def asked_of_the_gpu(monkeypatch):
    """The sources that would have run on a GPU; what runs there gives nothing, and takes no time."""
    asked = []
    here = replace(machine(), tier="nvidia", gpu_count=1, compute_capability=(8, 6))
    monkeypatch.setattr(running, "machine", lambda: here)
    monkeypatch.setattr(running, "_on_gpu", lambda exercise, source, names, seed: asked.append(source) or [])
    decide._passed.clear()
    yield asked
    decide._passed.clear()


@pytest.mark.parametrize("source, outcome", [(WRONG, "failed"), (RAISES, "error")])
def test_a_wrong_answer_is_told_without_a_gpu(asked_of_the_gpu, source, outcome):
    verdict = judge(TASK, source, seed=3)
    assert (verdict.outcome, asked_of_the_gpu) == (outcome, [])
    assert verdict.mistake == judge(TASK, source, seed=3).mistake


def test_a_right_answer_goes_to_the_gpu(asked_of_the_gpu):
    verdict = judge(TASK, RIGHT, seed=3)
    assert verdict.passed and asked_of_the_gpu == [RIGHT]


def test_one_that_passed_has_fewer_cases_interpreted_others_each_time_and_says_so(asked_of_the_gpu):
    first = judge(TASK, RIGHT, seed=3)
    again = [judge(TASK, source, seed=seed) for source, seed in ((RIGHT, 3), (REMARKED, 4), (RIGHT, 5))]
    for verdict in again:
        left_out = len(first.cases) - len(verdict.cases)
        assert verdict.passed and 0 < left_out < len(first.cases)
        assert f"{left_out} further cases" in verdict.message
        assert {line.name for line in verdict.cases} <= {
            line.name for line in judge(TASK, WRONG, seed=verdict.seed).cases
        }
    assert len({tuple(line.name for line in verdict.cases) for verdict in again}) > 1
    assert len(asked_of_the_gpu) == 4


def test_an_answer_is_forgotten_when_it_fails(asked_of_the_gpu, monkeypatch):
    judge(TASK, RIGHT, seed=3)
    monkeypatch.setattr(running, "_on_gpu", _broken_on_the_gpu)
    assert not judge(TASK, RIGHT, seed=4).passed
    assert not decide._passed, "the next check has all cases"


def _broken_on_the_gpu(exercise, source, names, seed):
    raise WorkerDied("it was played")


def test_without_a_gpu_every_check_has_all_cases():
    verdicts = [judge(TASK, RIGHT, seed=3) for _ in range(2)]
    assert len(verdicts[0].cases) == len(verdicts[1].cases)
