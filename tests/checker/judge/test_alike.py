"""Results are the same as far as float32 decides of them: what a rounding moves says nothing, and the rest counts."""

import math
from functools import partial

import pytest
import torch

from course_lib.checker import Case, Exercise
from course_lib.checker.judge import compare
from course_lib.checker.judge.alike import alike, exactly_alike
from course_lib.checker.judge.explain import Made, differ, explain
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification.model import Model, Slip
from course_lib.checker.specification.seen import Seen

TOLD = torch.tensor([1.0, math.inf, 2.0])


def moved_to(*numbers):
    """The results that other processors might have made: one of them."""
    return lambda: [torch.tensor(numbers)]


def test_an_element_whose_finiteness_hangs_on_a_rounding_does_not_count():
    assert alike(torch.tensor([1.0, 3.0, 2.0]), TOLD, moved_to(1.0, 7.0, 2.0))
    assert alike(torch.tensor([1.0, -math.inf, 2.0]), TOLD, moved_to(1.0, 7.0, 2.0))


def test_the_elements_beside_it_do():
    assert not alike(torch.tensor([1.0, 3.0, 2.5]), TOLD, moved_to(1.0, 7.0, 2.0))


@pytest.mark.parametrize("other", [3.0, -math.inf])
def test_an_element_that_is_infinite_however_it_is_rounded_counts(other):
    assert not alike(torch.tensor([1.0, other, 2.0]), TOLD, moved_to(1.0, math.inf, 2.0))


def test_twice_what_a_rounding_moves_is_allowed_and_no_more():
    told, others = torch.tensor([1.0, 2.0]), moved_to(1.0, 2.01)
    assert alike(torch.tensor([1.0, 2.0199]), told, others)
    assert not alike(torch.tensor([1.0, 2.0201]), told, others)


def test_an_integer_counts_unless_a_rounding_changes_it():
    told = torch.tensor([4, 7])
    assert alike(torch.tensor([4, 9]), told, lambda: [torch.tensor([4, 8])])
    assert not alike(torch.tensor([5, 7]), told, lambda: [torch.tensor([4, 8])])


def test_where_a_model_says_something_only_if_rounded_so_nothing_is_decided():
    assert alike(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0]), lambda: [None])


def test_other_roundings_are_not_asked_for_what_is_equal_or_of_another_shape():
    def never():
        raise AssertionError("a model was run for nothing")

    assert alike(TOLD * (1 + 2**-23), TOLD, never)
    assert not alike(TOLD[:2], TOLD, never)


def test_exactly_alike_knows_the_last_digits_only():
    assert exactly_alike(TOLD * (1 + 2**-23), TOLD) and not exactly_alike(TOLD * (1 + 1e-4), TOLD)


# ------------------------------------------------------------------------------ what that makes of a slip in a model

FORGOTTEN = {"less_than_a_rounding": 0.01, "more_than_a_rounding": 1e4}


def total(x, without=()):
    """The sum of each row, and two numbers; without some of these."""
    return x.sum(-1) + sum(number for name, number in FORGOTTEN.items() if name not in without)


def compute(slips, x):
    return total(x, [name for name in FORGOTTEN if name in slips])


SLIPS = {name: Slip(name, f"It is {name}.") for name in FORGOTTEN}
MODEL = Model(compute, tuple(SLIPS.values()))
TASK = Exercise("0.9", "A test", ("f",), lambda draw: [], total)


def cancelling():
    """Rows of 64 numbers around 10⁷, which are a unit apart there, and the same numbers again with a minus."""
    generator = torch.Generator().manual_seed(0)
    half = 1e7 * torch.randn(8, 64, generator=generator)
    return Case("large terms cancel", (torch.cat([half, -half + torch.randn(8, 64, generator=generator)], -1),))


def named(answer, model=MODEL):
    """The ids of the slips that explain an answer."""
    case = cancelling()
    truth = compare.truth(TASK, case, tf32=False)
    got = answer(*case.args)
    found = explain(model, [Outcome(case, Seen(), got, truth, compare.compare(got, truth, TASK))])
    return found and [slip.id for slip in found.slips]


def test_a_slip_that_moves_less_than_a_rounding_makes_no_difference():
    none, small, large = Made(()), *(Made((slip,)) for slip in SLIPS.values())
    assert not differ(MODEL, none, small, cancelling())
    assert differ(MODEL, none, large, cancelling()) and differ(MODEL, small, large, cancelling())


def test_it_explains_no_wrong_answer():
    assert named(lambda x: total(x) - 5e4) is None


def test_a_slip_that_moves_more_is_told_whatever_the_order_of_additions():
    def answer(x, order):
        return total(x[:, order], without=["more_than_a_rounding"])

    for seed in range(10):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(seed))
        assert named(partial(answer, order=order)) == ["more_than_a_rounding"]


def test_of_two_slips_the_one_that_shows_is_told():
    assert named(lambda x: total(x, without=FORGOTTEN)) == ["more_than_a_rounding"]


def test_where_the_model_itself_loses_more_digits_than_a_slip_moves_the_slip_is_not_blamed():
    """Both make what the answer made, as far as float32 decides, and so would any other slip as small."""

    def with_few_digits(x):
        return (x + 1e9) - 1e9

    model = Model(lambda slips, x: compute(slips, with_few_digits(x)), MODEL.slips)
    assert named(lambda x: total(with_few_digits(x)), model) is None
    assert named(lambda x: total(with_few_digits(x), ["more_than_a_rounding"]), model) == ["more_than_a_rounding"]
