"""Every model computes what is right without slips, and each of its slips can be told from all others."""

import pytest

from course_lib.checker.judge import compare
from course_lib.checker.judge.evaluate import elements
from course_lib.checker.judge.explain import Made, explain, prediction
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification import catalog
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.seen import Seen
from tests import proven

MODELS = [
    pytest.param(task, model, id=f"{task.id}-{model.entry or task.entries[0]}")
    for task in catalog.exercises().values()
    for model in task.models
]
SILENT = 0.2  # of a model's slips may do what others do in all cases, such as nothing but NaN
LARGEST = 1 << 18  # elements of a case that is computed here
FEW = 4  # every so many-th case is tried first


def cases_of(task, model, seed):
    entry = model.entry or task.entries[0]
    drawn = [case for case in task.drawn(Draw(seed)) if task.entry_of(case) == entry]
    return [case for case in drawn if elements(case) <= LARGEST]


@pytest.mark.parametrize("task, model", MODELS)
def test_without_slips_a_model_is_right(task, model):
    for case in cases_of(task, model, seed=3):
        made = prediction(model, Made((), model.styles[0]), case)
        assert made is not None and not made.outside, case.name
        wrong = [leaf.problem for leaf in compare.compare(made.value, compare.truth(task, case, tf32=False), task)]
        assert not any(wrong), f"{case.name}: {wrong}"


def told_by(model, slip, cases, truths):
    """Whether the slip explains what it makes of the cases, or one that says the same; else what does, or None."""
    results = [prediction(model, Made((slip,), model.styles[0]), case) for case in cases]
    seen = [
        Outcome(case, Seen(), result.value, truths[case], compare.compare(result.value, truths[case], truths.task))
        for case, result in zip(cases, results)
        if result is not None
    ]
    found = explain(model, seen, any(result is not None and result.outside for result in results))
    told = found and [told.sentence for told in found.slips]
    return True if told == [slip.sentence] else found and [told.id for told in found.slips]


class Truths(dict):
    """Of cases, worked out when first asked for."""

    def __init__(self, task):
        super().__init__()
        self.task = task

    def __missing__(self, case):
        self[case] = compare.truth(self.task, case, tf32=False)
        return self[case]


@pytest.mark.divisible
@pytest.mark.parametrize("task, model", MODELS)
def test_each_slip_is_told_from_the_others(task, model, request):
    """What a slip makes of the drawn cases is explained by this slip, or by one that says the same, and no other.

    Slips that a few cases tell are not held against all: what more cases show can only rule others out.
    """
    cases, truths, blurred = cases_of(task, model, seed=3), Truths(task), {}
    tried = proven.todays(request.node, [slip.id for slip in model.slips])
    for slip in (slip for slip in model.slips if slip.id in tried):
        told = told_by(model, slip, cases[::FEW], truths)
        told = told if told is True else told_by(model, slip, cases, truths)
        if told is not True:
            blurred[slip.id] = told
    assert not any(blurred.values()), f"of {len(model.slips)} slips these are told as others: {blurred}"
    assert len(blurred) <= SILENT * len(model.slips), f"of {len(model.slips)} slips these are not told: {blurred}"
