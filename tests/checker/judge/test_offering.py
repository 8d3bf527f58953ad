"""A failed check offers to draw the kernel on a case that went wrong, where there is one that can be drawn."""

from dataclasses import replace

import pytest

from course_lib.checker.judge.decide import judge
from course_lib.checker.specification import catalog
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.exercise import Limits
from course_lib.checker.specification.requirements import Moves
from tests.checker.samples import ADD, ADD_CELL, DOUBLE

NO_MASK = ADD_CELL.replace("mask = i < length", "mask = i < length + 9")
DOUBLED = ADD_CELL.replace("store(out + i, total", "store(out + i, 2 * total")
ENDLESS = ADD_CELL.replace("    tl.store(", "    while length > 0:\n        tl.load(x)\n    tl.store(")


def only(*cases):
    return replace(ADD, cases=lambda draw: [Case("a case", tuple(make(draw) for make in case)) for case in cases])


def vector(length):
    return lambda draw: draw.normal(length)


def test_samples_are_what_they_say():
    assert len({ADD_CELL, NO_MASK, DOUBLED, ENDLESS}) == 4


@pytest.mark.parametrize("cell", [NO_MASK, DOUBLED], ids=["outside", "wrong numbers"])
def test_the_first_case_that_went_wrong_is_offered_with_its_sizes(cell):
    verdict = judge(only([vector(70), vector(70)], [vector(3), vector(3)]), cell, seed=5)
    assert verdict.watch == "watch(add, torch.rand(70), torch.rand(70))"
    assert f"`{verdict.watch}` draws what its programs read and write" in str(verdict)
    assert "<code>watch(add, torch.rand(70)" in verdict._repr_html_()


def test_a_function_of_another_name_is_offered_by_its_own():
    cell = DOUBLED.replace("def add(", "def mine(")
    verdict = judge(only([vector(70), vector(70)]), cell, {"add": "mine"}, seed=5)
    assert verdict.watch.startswith("watch(mine, ")


def test_a_loop_without_an_end_is_offered_too():
    task = replace(only([vector(70), vector(70)]), limits=Limits(seconds=2.0, memory_bytes=256 << 20))
    verdict = judge(task, ENDLESS, seed=5)
    assert verdict.outcome == "timeout" and verdict.watch == "watch(add, torch.rand(70), torch.rand(70))"


@pytest.mark.parametrize("case", [
    [vector(20_000), vector(20_000)],
    [lambda draw: draw.strided(draw.normal(70)), vector(70)],
], ids=["too large", "a view"])  # fmt: skip
def test_what_cannot_be_drawn_is_not_offered(case):
    assert judge(only(case), DOUBLED, seed=5).watch == ""


def test_a_right_answer_and_one_without_a_kernel_are_offered_nothing():
    assert judge(only([vector(70), vector(70)]), ADD_CELL, seed=5).watch == ""
    wrong = judge(DOUBLE, "def double(x):\n    return x", seed=5)
    assert wrong.outcome == "failed" and wrong.watch == ""


def test_what_is_offered_in_chapter_01_can_be_drawn():
    import torch

    from course_lib.figures.watch import watch
    from course_lib.figures.watch.picture import MOST_ELEMENTS

    task, source = catalog.exercise("1.3"), catalog.solution_source("1.3")
    verdict = judge(task, source.replace("inside = offsets < length", "inside = offsets <= length"), seed=5)
    add = catalog.reference("1.3")[0]
    watched = eval(verdict.watch, {"watch": watch, "torch": torch, "vector_add": add})
    assert watched.still is not None

    from course_lib.checker.judge import offering

    assert offering.MOST_ELEMENTS == MOST_ELEMENTS


TWICE = ADD_CELL.replace("    tl.store(", "    total += 0 * tl.load(x + i, mask=mask)\n    tl.store(")


def once(x, y):
    return 3 * x.numel() * x.element_size()


def test_a_right_answer_that_moves_too_much_is_offered_its_profile():
    """One more load of x: the numbers are right, so there is nothing to watch, and the card says what is read twice."""
    task = only([vector(700), vector(700)])
    metered = replace(
        task,
        cases=lambda draw: [replace(case, metered=True) for case in task.cases(draw)],
        requirements=(*task.requirements, Moves(once)),
    )
    verdict = judge(metered, TWICE, seed=5)
    assert verdict.mistake == "too_many_bytes", verdict
    assert verdict.watch == "" and verdict.profile == "profile(add, torch.rand(700), torch.rand(700))"
    assert f"`{verdict.profile}` says what limits it" in str(verdict)
    assert judge(metered, ADD_CELL, seed=5).profile == ""
    assert judge(metered, DOUBLED, seed=5).profile == ""
