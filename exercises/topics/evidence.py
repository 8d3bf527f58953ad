"""What a slip looks like from outside, whatever the numbers: accesses beyond a tensor, NaN from the first tile on."""

from __future__ import annotations

import re

import torch

NAN_FROM_THE_START = (
    "Every element is NaN, so the running values were NaN after the first tile already. Before it the maximum is -inf "
    "and the sum 0, and the factor exp(old maximum - new maximum) is exp(-inf) = 0. Is the difference the other way "
    "round (0 times exp(+inf) is NaN), are the weights measured from the old maximum, is the exp missing, or does the "
    "maximum start at +inf?"
)
GRID_AXES_EXCHANGED = (
    "The grid's axes are exchanged: program (0, {heads}, ...) works on a head that does not exist. The kernel takes "
    "`tl.program_id(1)` for the head, so the grid is (tiles of queries, heads)."
).replace("{heads}", "n")


def all_nan(case, seen, got) -> bool:
    """A `when` for every failing case: NaN from the first step on, save rows of zeros, which made no step at all."""
    first = got[0] if isinstance(got, (tuple, list)) and got else got
    if not isinstance(first, torch.Tensor) or seen.unwritten or seen.guard_values or seen.out_of_bounds:
        return False
    return bool(first.isnan().any()) and bool((first.isnan() | (first == 0)).all())


def first_access(verb: str):
    """A `when`: memory outside a tensor was reached, first by a load ("reads") or a store ("writes")."""

    def when(case, seen, got):
        # The first access is the one that the card shows: the diagnosis speaks of the same.
        return any(f": {verb} " in access for access in seen.out_of_bounds[:1])

    return when


def program_beyond_the_heads(case, seen, got) -> bool:
    """A `when` for kernels whose axis 1 counts heads: the first wild program is number 0 of one head too many."""
    heads = case.args[0].shape[0]
    found = re.search(r"program \((\d+), (\d+), 0\)", seen.out_of_bounds[0]) if seen.out_of_bounds else None
    return found is not None and found.groups() == ("0", str(heads))
