"""Wrong answers are explained by the smallest set of slips of a model, and by none that does not explain all."""

import pytest
import torch

from course_lib.checker import Case, Exercise
from course_lib.checker.judge import compare
from course_lib.checker.judge.explain import Made, differ, explain
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification.model import Model, Slip, reaches_outside
from course_lib.checker.specification.seen import Seen


def compute(slips, x):
    y = x if ("scale_missing" in slips) else 2 * x
    y = y if ("offset_missing" in slips) else y + 1
    if "first_row_only" in slips:
        y[1:] = float("nan")
    if "reads_on" in slips:
        reaches_outside()
    if "negative_forgotten" in slips:
        y = torch.where(x < 0, 0.0, y)
    return y


SLIPS = ("first_row_only", "scale_missing", "offset_missing", "negative_forgotten", "reads_on")
MODEL = Model(compute, tuple(Slip(name, f"It is {name}.") for name in SLIPS))


def oracle(x):
    return 2 * x + 1


TASK = Exercise("0.9", "A test", ("f",), lambda draw: [], oracle)


def outcome(got_of, x):
    case = Case("x", (x,))
    truth = compare.truth(TASK, case, tf32=False)
    got = got_of(x.clone())
    return Outcome(case, Seen(), got, truth, compare.compare(got, truth, TASK))


def inputs(positive=False):
    torch.manual_seed(0)
    made = [torch.randn(4, 5), torch.randn(2, 3)]
    return [x.abs() for x in made] if positive else made


def explained(answer, positive=False, **more):
    found = explain(MODEL, [outcome(answer, x) for x in inputs(positive)], **more)
    return found and [slip.id for slip in found.slips]


def test_one_slip():
    assert explained(lambda x: 2 * x) == ["offset_missing"]


def test_two_slips_the_basic_one_first():
    assert explained(lambda x: x) == ["scale_missing", "offset_missing"]


def test_both_are_told():
    found = explain(MODEL, [outcome(lambda x: x, x) for x in inputs()])
    assert found.sentence == "Two things are wrong. First: It is scale_missing. Second: It is offset_missing."


def test_what_no_slip_makes_has_no_explanation():
    assert explained(lambda x: 3 * x) is None


def test_what_explains_only_one_case_is_no_explanation():
    assert explained(lambda x: 2 * x if len(x) == 4 else x) is None


def test_an_error_below_the_models_rounding_is_blamed_on_no_slip():
    """Without that a slip that changes nothing in these cases would explain it."""
    assert explained(lambda x: (2 * x + 1) * (1 + 5e-5), positive=True) is None


@pytest.mark.parametrize("outside, cause", [(True, "too_far"), (False, "too_short")])
def test_an_access_outside_tells_explanations_apart(outside, cause):
    def either(slips, x):
        if "too_far" in slips:
            reaches_outside()
        return 2 * x if slips else 2 * x + 1

    model = Model(either, (Slip("too_short", "It ends early."), Slip("too_far", "It ends late.")))
    found = explain(model, [outcome(lambda x: 2 * x, x) for x in inputs()], outside)
    assert [slip.id for slip in found.slips] == [cause]


def alternatives(slips, x):
    """Two slips that differ on negative numbers alone."""
    if "absolute" in slips:
        return x.abs()
    if "copied" in slips:
        return x.clone()
    return 2 * x + 1


EITHER = Model(alternatives, (Slip("absolute", "It is the size."), Slip("copied", "It is a copy.")))


@pytest.mark.parametrize("answer, cause", [(torch.abs, "absolute"), (torch.clone, "copied")])
def test_a_further_case_tells_two_explanations_apart(answer, cause):
    seen = [outcome(answer, x) for x in inputs(positive=True)]
    asked = []

    def again(one, other):
        asked.append((one, other))
        return outcome(answer, torch.tensor([[-1.0, 2.0]]))

    assert [slip.id for slip in explain(EITHER, seen, again=again).slips] == [cause]
    assert len(asked) == 1


def test_two_explanations_that_nothing_tells_apart_are_not_named():
    assert (
        explain(EITHER, [outcome(torch.abs, x) for x in inputs(positive=True)], again=lambda one, other: None) is None
    )


def test_what_all_explanations_say_is_told():
    """Of 0.2: two ways to make one slip, each with a partner of its own; none of the pairs is the others' subset."""

    def in_two_ways(slips, x):
        y = x + 1 if {"scale_missing__here", "scale_missing__there"} & {*slips} else 2 * x + 1
        if ("offset_missing" in slips) and ("scale_missing__here" in slips):
            y[1:] = 0
        if ("offset_lost" in slips) and ("scale_missing__there" in slips):
            y[1:] = 0
        return y

    ways = (Slip("scale_missing__here", "No scale."), Slip("scale_missing__there", "No scale."))
    model = Model(in_two_ways, (*ways, Slip("offset_missing", "No offset."), Slip("offset_lost", "It is lost.")))
    found = explain(model, [outcome(lambda x: torch.cat([x[:1] + 1, 0 * x[1:]]), x) for x in inputs()])
    assert found.sentence == "No scale."


def test_infinities_in_a_result_do_not_hide_a_pair():
    """Of 4.6: the log-sum-exp of a row without keys is -inf, and beside it no change was large enough to be seen."""
    decoys = tuple(Slip(f"decoy_{number}", f"It is decoy {number}.") for number in range(40))

    def with_infinities(slips, x):
        y = 2 * x + 1
        y[:1] -= x[:1] * ("scale_missing" in slips)
        y[1:] -= 1.0 * ("offset_missing" in slips)
        for number, decoy in enumerate(decoys):
            y[0, number % x.shape[1]] += 0.1 * (number + 1) * (decoy.id in slips)
        return torch.cat([y, torch.full_like(y[:1], -float("inf"))])

    model = Model(with_infinities, (*decoys, *(Slip(name, f"It is {name}.") for name in SLIPS[1:3])))
    task = Exercise("0.9", "A test", ("f",), lambda draw: [], lambda x: with_infinities((), x))

    def outcome_of(x):
        got, truth = with_infinities(SLIPS[1:3], x), compare.truth(task, Case("x", (x,)), tf32=False)
        return Outcome(Case("x", (x,)), Seen(), got, truth, compare.compare(got, truth, task))

    found = explain(model, [outcome_of(x) for x in inputs()])
    assert found and [slip.id for slip in found.slips] == ["scale_missing", "offset_missing"]


def test_two_explanations_differ_on_a_case_or_not():
    one, other = (Made((slip,)) for slip in EITHER.slips)
    assert differ(EITHER, one, other, Case("negative", (torch.tensor([-1.0]),)))
    assert not differ(EITHER, one, other, Case("positive", (torch.tensor([1.0]),)))


def test_a_style_is_tried_and_never_told():
    def styled(slips, x):
        y = x + 1 if ("scale_missing" in slips) else 2 * x + 1
        return torch.where(x < 0, -y, y) if ("signed" in slips) and ("scale_missing" in slips) else y

    model = Model(styled, (Slip("scale_missing", "No scale."),), styles=((), ("signed",)))
    seen = [outcome(lambda x: torch.where(x < 0, -(x + 1), x + 1), x) for x in inputs()]
    assert [slip.id for slip in explain(model, seen).slips] == ["scale_missing"]


def test_a_whole_number_beyond_64_bits_is_a_wrong_one_like_others():
    """`1 << heads` for `1 << (heads.bit_length() - 1)` in exercise 19.6 ended the search with an overflow."""
    task = Exercise("0.9", "A test", ("f",), lambda draw: [], lambda n: n)
    model = Model(
        lambda slips, n: n * (2 if "doubled" in slips else 1) + ("one_more" in slips),
        (Slip("doubled", "It is doubled."), Slip("one_more", "It is one more.")),
    )
    outcomes = []
    for n in (5, 9):
        case = Case("x", (n,))
        truth = compare.truth(task, case, tf32=False)
        outcomes.append(Outcome(case, Seen(), -(1 << 80), truth, compare.compare(-(1 << 80), truth, task)))
    assert not explain(model, outcomes)
