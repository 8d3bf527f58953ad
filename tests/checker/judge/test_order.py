"""The interpreter runs a launch's programs in several orders: what changes with it is a race, and told as one."""

from dataclasses import replace

import pytest

from course_lib.checker import TRITON, Case, Exercise, Slip
from course_lib.checker.judge import decide
from course_lib.checker.judge.decide import judge
from course_lib.checker.runner import running
from course_lib.checker.runner.worker import Worker
from tests.checker.samples import ADD, ADD_CELL, QUICK

NAMES = {"add": "add"}
# Each program writes its block, and as far as the next one goes beyond it: in ascending order that is written over.
PADDED = ADD_CELL.replace(
    "    tl.store(out + i, total, mask=mask)",
    "    tl.store(out + i, total, mask=mask)\n    tl.store(out + i + 512, total * 0, mask=i + 512 < length)",
)
# The sum of all numbers, added up by each program to what the one before it has left.
SUM = Exercise(
    id="90.8",
    title="Sum",
    entries=("total",),
    cases=lambda draw: [Case(f"{length} numbers", (draw.normal(length),)) for length in (8, 30, 31, 32)],
    oracle=lambda x: x.sum()[None],
    needs=TRITON,
    limits=QUICK,
)
SUM_CELL = """@triton.jit
def kernel(x, out, length, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    part = tl.sum(tl.load(x + i, mask=i < length, other=0.0))
    {body}


def total(x):
    out = torch.zeros(1, device=x.device)
    kernel[(triton.cdiv(x.numel(), 8),)](x, out, x.numel(), BLOCK=8)
    return out
"""


def test_each_case_has_an_order_of_its_own_and_a_check_with_the_same_seed_the_same(monkeypatch):
    jobs, run = [], Worker.run
    monkeypatch.setattr(Worker, "run", lambda self, job, *limits: jobs.append(job) or run(self, job, *limits))
    for seed in (1, 1, 2):
        running.run_cases(ADD, ADD_CELL, NAMES, seed)
    first, again, other = ([case["order"] for case in job["cases"]] for job in jobs)
    assert first[:2] == ["ascending", "descending"] and isinstance(first[2], int) and first[3] == "ascending"
    assert first == again and first[2] != other[2]


def test_a_store_of_padding_is_a_race_although_ascending_programs_write_it_over():
    verdict = judge(ADD, PADDED, seed=1)
    assert verdict.mistake == "race" and verdict.outcome == "failed", verdict


@pytest.mark.parametrize(
    "body, mistake",
    [
        ("tl.atomic_add(out, part)", None),
        ("tl.store(out, tl.load(out) + part)", None),
        ("tl.store(out, part)", "last_alone"),
        ("if tl.program_id(0) == 0:\n        tl.store(out, part)", "first_alone"),
    ],
)
def test_a_mistake_is_named_as_in_ascending_order(body, mistake):
    """The last program to run decides what two of them write to one place; a fingerprint knows the ascending last."""
    task = replace(
        SUM,
        slips=(
            Slip("last_alone", "The last.", formula=lambda x: x[(len(x) - 1) // 8 * 8 :].sum()[None]),
            Slip("first_alone", "The first.", formula=lambda x: x[:8].sum()[None]),
        ),
    )
    verdict = judge(task, SUM_CELL.format(body=body), seed=1)
    assert verdict.mistake == mistake and verdict.passed == (mistake is None), verdict


def test_a_result_that_is_right_in_ascending_order_alone_is_a_race():
    body = "before = tl.load(out)\n    tl.store(out, tl.where(tl.program_id(0) == 0, part, before + part))"
    verdict = judge(SUM, SUM_CELL.format(body=body), seed=1)
    assert verdict.mistake == "race" and "1 of 1 more runs" in verdict.message, verdict


def test_a_right_answer_and_one_without_kernels_are_not_run_again(monkeypatch):
    monkeypatch.setattr(decide, "beside_ascending_order", None)
    assert judge(ADD, ADD_CELL).passed
    assert not judge(ADD, "def add(x, y):\n    return x\n").passed


def test_programs_that_share_no_byte_are_not_run_again(monkeypatch):
    """A wrong answer would take twice as long, and nothing else could come of it."""
    monkeypatch.setattr(decide, "beside_ascending_order", None)
    verdict = judge(ADD, ADD_CELL.replace("total, mask=mask", "total + 1, mask=mask"), seed=1)
    assert verdict.mistake == "adds_one"


def test_a_worker_that_dies_the_second_time_costs_no_verdict(monkeypatch):
    def dies(*arguments):
        raise decide.WorkerDied("it was stopped")

    monkeypatch.setattr(decide, "beside_ascending_order", dies)
    assert judge(ADD, PADDED, seed=1).outcome == "failed"
