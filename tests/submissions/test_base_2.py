"""Exponentials in base 2 as a GPU computes them: `x * log2e - maximum * log2e` in one operation.

The compiler fuses the first product with the subtraction and does not round it. Of scores near -1e20 that once made
10¹² out of the difference 0, so 3.5 and 3.6 refused answers on a GPU that pass in the interpreter.
"""

import math

import pytest
import torch

from course_lib.checker.judge.compare import compare, truth
from course_lib.checker.runner.running import cases_of_a_check
from course_lib.checker.specification import catalog

LOG2_E = math.log2(math.e)
SEEDS = range(5)


def fused(x, subtracted):
    """2 to the power of x · log2e - `subtracted`, with one rounding, as a fused multiply-add makes it."""
    factor = torch.tensor(LOG2_E, dtype=torch.float32).double()
    return torch.exp2((x.double() * factor - subtracted.double()).float())


def statistics(x, block, by_lane=True, apart=False):
    """Maximum and sum, [rows, 1] each: one running pair for every lane of a tile, merged in the end, or one for all.

    apart: whether the rescaling is by 2^(old · log2e - new · log2e), which is fused too, and not by 2^((old - new) ·
        log2e). Then it is not 1 where the maximum stays.
    """
    x = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % block), value=-math.inf).unflatten(1, (-1, block))
    x = x if by_lane else x.flip(1)
    maximum = torch.full((len(x), block if by_lane else 1), -math.inf)
    total = torch.zeros_like(maximum)
    for tile in x.unbind(1):
        grown = torch.maximum(maximum, tile if by_lane else tile.amax(1, keepdim=True))
        weights = fused(tile, reference(grown))
        added = weights if by_lane else weights.sum(1, keepdim=True)
        factor = fused(maximum, reference(grown)) if apart else torch.exp2((maximum - grown) * LOG2_E)
        rescale = torch.where(maximum == -math.inf, 0.0, factor)
        total, maximum = total * rescale + added, grown
    largest = maximum.amax(1, keepdim=True)
    return largest, (total * fused(maximum, reference(largest))).sum(1, keepdim=True)


def reference(largest):
    """What is subtracted of scores that are scaled already; 0 where nothing but minus infinity was seen."""
    return torch.where(largest == -math.inf, 0.0, largest * LOG2_E)


def online_softmax(x, block, **how):
    largest, total = statistics(x, block, **how)
    return (fused(x.float(), reference(largest)) / total).to(x.dtype)


def log_sum_exp(x, parts, block, **how):
    def once(rows):
        largest, total = statistics(rows, block, **how)
        found = (largest * LOG2_E + torch.log2(total)) * math.log(2)
        return torch.where(largest == -math.inf, largest, found)

    return once(torch.cat([once(part) for part in x.split(-(-x.shape[1] // parts), dim=1)], dim=1))[:, 0]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("apart", [False, True], ids=["of the difference", "of two products"])
@pytest.mark.parametrize("by_lane", [True, False], ids=["a pair for each lane", "one pair, from the last tile on"])
@pytest.mark.parametrize("identity, answer", [("3.5", online_softmax), ("3.6", log_sum_exp)])
def test_a_fused_product_in_base_2_is_right_in_every_case(identity, answer, by_lane, apart, seed):
    """Two scores near -1,000, the first of them hidden: a weight of 1 was off by a rounding of 1,443, and refused.

    So were 13 tiles of scores near 1,000, whose sum is off by 13 such roundings where the rescaling is fused too.
    """
    exercise = catalog.exercise(identity)
    for cases, _ in cases_of_a_check(exercise, seed):
        for case in cases:
            args = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in case.args]
            leaves = compare(answer(*args, by_lane=by_lane, apart=apart), truth(exercise, case, tf32=False), exercise)
            assert [leaf.problem for leaf in leaves] == [None], case.name


def test_scores_that_a_product_with_log2e_rounds_would_refuse_it():
    """Three times a power of two: what is left of the difference 0 is a rounding of 10²⁰, and no weight is 1."""
    x = torch.full((1, 4), -math.inf)
    x[0, 1] = -3.0 * 2.0**65
    assert not torch.equal(online_softmax(x, 4), torch.softmax(x, 1))
