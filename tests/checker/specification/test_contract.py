"""A contract draws cases in which every level stands, and pairs of levels meet."""

import itertools

import pytest
import torch

from course_lib.checker.specification import catalog
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.layouts import any_strides

CONTRACTS = [
    pytest.param(task, contract, id=f"{task.id}-{number}")
    for task in catalog.exercises().values()
    for number, contract in enumerate(task.contracts)
]


def made(draw, **choices):
    return (choices,)


def met(rows):
    return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}


@pytest.mark.parametrize("seed", range(5))
def test_every_pair_of_levels_meets(seed):
    contract = Contract(made, {"rows": (1, 2, 3), "columns": (1, 7, 64), "dtype": ("a", "b")}, most=30)
    rows = contract.rows(Draw(seed))
    pairs = itertools.combinations(contract.choices, 2)
    wanted = {
        ((one, first), (other, second))
        for one, other in pairs
        for first in contract.choices[one]
        for second in contract.choices[other]
    }
    assert met(rows) == wanted and len(rows) <= 14, (
        "nine rows are the least, and three times as many would be no search"
    )


@pytest.mark.parametrize("seed", range(5))
def test_every_level_stands_where_not_all_pairs_can_meet(seed):
    contract = Contract(made, {name: tuple(range(6)) for name in "abcdef"}, most=8)
    rows = contract.rows(Draw(seed))
    assert len(rows) == 8
    for name in contract.choices:
        assert {row[name] for row in rows} == set(range(6)), name


def test_what_may_not_meet_never_does():
    contract = Contract(made, {"queries": (1, 2, 64), "keys": (1, 2, 64)}, valid=lambda queries, keys: queries <= keys)
    rows = contract.rows(Draw(0))
    assert {(row["queries"], row["keys"]) for row in rows} == {(1, 1), (1, 2), (1, 64), (2, 2), (2, 64), (64, 64)}


def test_a_case_says_what_it_was_drawn_as():
    plain, far = Level(0.0, ""), Level(-160.0, "scores near -160")
    choices = {"key_length": (1025,), "causal": (True,), "dtype": (torch.float16,), "near": (plain, far)}
    contract = Contract(made, choices | {"scale": (0.25,)})
    names = {case.name for case in contract.cases(Draw(0))}
    assert names == {
        "key length 1,025, causal=True, float16, scale 0.25",
        "key length 1,025, causal=True, float16, scores near -160, scale 0.25",
    }


def test_words_of_a_choice_that_is_none_are_refused():
    with pytest.raises(CourseError, match="colums"):
        Contract(made, {"columns": (1,)}, says={"colums": "any number"})


@pytest.mark.parametrize("level", any_strides("x"), ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 5)], ids=str)
def test_a_layout_keeps_the_values(level, shape):
    tensor = Draw(0).normal(*shape)
    laid = level.value(Draw(1), tensor)
    expected = tensor[:1].expand(shape) if "expanded" in str(level) else tensor
    assert torch.equal(laid, expected)


def _plain(text):
    return " ".join(text.split())


@pytest.mark.parametrize("task, contract", CONTRACTS)
def test_the_docstring_promises_what_the_contract_draws(task, contract):
    statement = _plain(catalog.solution_source(task.id))
    for name, words in contract.says.items():
        assert _plain(words) in statement, f"{task.id}: the statement does not say {words!r}, so {name} is not promised"


@pytest.mark.parametrize("task, contract", CONTRACTS)
def test_every_level_of_a_contract_is_drawn_at_a_check(task, contract):
    rows = contract.rows(Draw(3))
    for name, levels in contract.choices.items():
        drawn = {str(row[name]) for row in rows}
        assert drawn == {str(level) for level in levels}, f"{task.id}: {name}"
