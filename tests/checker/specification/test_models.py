"""Every model computes what is right without slips, and each of its slips can be told from all others."""

import pytest

from course_lib.checker.judge import compare
from course_lib.checker.judge.evaluate import elements
from course_lib.checker.judge.explain import Made, explain, prediction
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification import catalog
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.exercise import Seen

MODELS = [
    pytest.param(task, model, id=f"{task.id}-{model.entry or task.entries[0]}")
    for task in catalog.exercises().values()
    for model in task.models
]
SILENT = 0.2  # of a model's slips may do what others do in all cases, such as nothing but NaN
LARGEST = 1 << 18  # elements of a case that is computed here


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


@pytest.mark.parametrize("task, model", MODELS)
def test_each_slip_is_told_from_the_others(task, model):
    """What a slip makes of the drawn cases is explained by this slip, or by one that says the same, and no other."""
    cases = cases_of(task, model, seed=3)
    truths = {case: compare.truth(task, case, tf32=False) for case in cases}
    made = {slip: [prediction(model, Made((slip,), model.styles[0]), case) for case in cases] for slip in model.slips}
    blurred = {}
    for slip, results in made.items():
        seen = [
            Outcome(case, Seen(), result.value, truths[case], compare.compare(result.value, truths[case], task))
            for case, result in zip(cases, results)
            if result is not None
        ]
        found = explain(model, seen, any(result is not None and result.outside for result in results))
        told = found and [told.sentence for told in found.slips]
        if told != [slip.sentence]:
            blurred[slip.id] = found and [told.id for told in found.slips]
    assert not any(blurred.values()), f"of {len(model.slips)} slips these are told as others: {blurred}"
    assert len(blurred) <= SILENT * len(model.slips), f"of {len(model.slips)} slips these are not told: {blurred}"
