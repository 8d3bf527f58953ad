"""Mistakes whose result depends on which of a GPU's programs ends last; the interpreter runs them in order."""

import math

import pytest
import torch

from course_lib.checker import Draw, Seen, catalog


def _cases(identity):
    return [case for case in catalog.exercise(identity).cases(Draw(5)) if case.args[0].shape[0] > 1]


def _mistake(identity, name):
    return next(mistake for mistake in catalog.exercise(identity).mistakes if mistake.id == name)


def _raced(right, winners):
    """Rows of all heads stored in head 0's place; each row is that of the head that was last."""
    got = torch.full_like(right, math.nan)
    got[0] = right[winners, torch.arange(right.shape[1])]
    return got, Seen(unwritten=got[1:].numel())


@pytest.mark.parametrize("identity", ["4.3", "4.4", "4.5"])
def test_heads_that_raced_for_one_place_are_told_from_heads_never_written(identity):
    oracle, named = catalog.exercise(identity).oracle, []
    for case in _cases(identity):
        right = oracle(*case.args)
        rows, when = right.shape[1], _mistake(identity, "stored_in_one_head").when
        mixed, seen = _raced(right, torch.arange(rows) % len(right))
        first_only, _ = _raced(right, torch.zeros(rows, dtype=torch.long))
        named.append(when(case, seen, mixed))
        assert not when(case, seen, first_only), "so looks a grid of one head"
        assert not when(case, Seen(), right)
        mixed[0] += 1
        assert not when(case, seen, mixed)
    assert any(named)


def test_log_sum_exps_that_raced_for_one_place():
    named = []
    for case in _cases("4.6"):
        output, lse = catalog.exercise("4.6").oracle(*case.args)
        mixed, seen = _raced(lse, torch.arange(lse.shape[1]) % len(lse))
        when = _mistake("4.6", "lse_stored_in_one_head").when
        named.append(when(case, seen, (output, mixed)))
        assert not when(case, Seen(), (output, lse)) and not when(case, Seen(), None)
    assert any(named)
