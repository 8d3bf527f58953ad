"""Exercise 3.3: merging two partial results of a softmax."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake
from exercises.ch03_online_softmax.slips import (
    INF,
    in_float32,
    reference_of,
    statistics_of,
)


def merge_in_pairs(functions, *states):
    states = [tuple(state) for state in states]
    while len(states) > 1:
        merged = [functions["merge"](states[i], states[i + 1]) for i in range(0, len(states) - 1, 2)]
        states = merged + states[len(states) - len(states) % 2 :]
    return states[0]


def _in_pairs(merge):
    """The driver's tree, with a merge of the judge's own."""
    return lambda *states: merge_in_pairs({"merge": merge}, *states)


def _in_a_row(merge):
    def fold(*states):
        merged = states[0]
        for state in states[1:]:
            merged = merge(merged, state)
        return merged

    return fold


def _merge(first, second, *, rescale=(True, True), weigh="rescaled", guard=True, divide=True, kept=None, sign=1):
    """Two states into one, with the classic steps left out on demand."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    grown = torch.maximum(first_max, second_max) if kept is None else (first_max, second_max)[kept]
    reference = reference_of(grown) if guard else grown
    ones = torch.ones_like(first_sum)
    weights = [
        part_sum * (torch.exp(sign * (part_max - reference)) if wanted else ones)
        for part_max, part_sum, wanted in ((first_max, first_sum, rescale[0]), (second_max, second_sum, rescale[1]))
    ]
    merged_sum = weights[0] + weights[1]
    if weigh == "equal":
        return grown, merged_sum, (first_average + second_average) / 2
    if weigh in ("sums", "sums over the merged one"):
        weights = [first_sum, second_sum]
    if weigh == "maxima":  # the exponentials alone, without the sums
        weights = [torch.exp(first_max - reference), torch.exp(second_max - reference)]
    if weigh == "exchanged":
        weights = weights[::-1]
    divisor = ones if not divide else merged_sum if "merged" in weigh else weights[0] + weights[1]
    if guard:
        divisor = torch.where(divisor == 0, ones, divisor)
    average = (weights[0][:, None] * first_average + weights[1][:, None] * second_average) / divisor[:, None]
    return grown, merged_sum, average


def _merge_by_shares(first, second):
    """The same by way of log-sum-exps and shares of the whole: right as well, and rounded in other places."""
    (first_max, first_sum, first_average), (second_max, second_sum, second_average) = first, second
    maximum = torch.maximum(first_max, second_max)
    weights = [
        torch.exp(part_max + torch.log(part_sum) - reference_of(maximum))
        for part_max, part_sum in ((first_max, first_sum), (second_max, second_sum))
    ]
    total = weights[0] + weights[1]
    share = (weights[1] / torch.where(total == 0, 1.0, total))[:, None]
    return maximum, total, first_average * (1 - share) + second_average * share


def _state(scores, values):
    """(maximum, sum, average) of one part: scores [rows, keys], values [keys, dim]."""
    maximum, total = statistics_of(scores)
    weights = torch.exp(scores - reference_of(maximum)[:, None])
    return maximum, total, (weights @ values) / torch.where(total == 0, 1.0, total)[:, None]


def _states(draw, lengths, rows=3, dim=4, scale=1.0, shift=0.0, ascending=False):
    length = sum(lengths)
    scores = draw.normal(rows, length, scale=scale, shift=shift)
    if ascending:
        scores = scores.sort(dim=1)[0]
    values = draw.normal(length, dim)
    return tuple(_state(part, value) for part, value in zip(scores.split(lengths, dim=1), values.split(lengths, dim=0)))


def _empty(rows=3, dim=4):
    return torch.full((rows,), -INF), torch.zeros(rows), torch.zeros(rows, dim)


def merge_cases(draw):
    ordinary, far = _states(draw, [9]), _states(draw, [5, 6], scale=80.0)
    same = draw.normal(3)
    equal = tuple((same.clone(), draw.uniform(3, low=1.0, high=9.0), draw.normal(3, 4)) for _ in "ab")
    some_empty = [(m.clone(), s.clone(), a.clone()) for m, s, a in _states(draw, [7, 7])]
    for state, row in zip(some_empty, (0, 1)):
        state[0][row], state[1][row], state[2][row] = -INF, 0.0, 0.0
    return [
        Case("two parts of 8 keys", _states(draw, [8, 8]), driver=merge_in_pairs),
        Case("1 key and 200 keys", _states(draw, [1, 200]), driver=merge_in_pairs),
        Case("200 keys and 1 key", _states(draw, [200, 1]), driver=merge_in_pairs),
        Case(
            "scores rise: the second maximum is larger",
            _states(draw, [16, 16], scale=3.0, ascending=True),
            driver=merge_in_pairs,
        ),
        Case(
            "scores fall: the first maximum is larger",
            _states(draw, [16, 16], scale=3.0, ascending=True)[::-1],
            driver=merge_in_pairs,
        ),
        Case("equal maxima", equal, driver=merge_in_pairs),
        Case("logits to ±200", far, driver=merge_in_pairs),
        Case("logits near +1000", _states(draw, [20, 30], shift=1000.0), driver=merge_in_pairs),
        Case("the first part is empty", (_empty(), *ordinary), driver=merge_in_pairs),
        Case("the second part is empty", (*ordinary, _empty()), driver=merge_in_pairs),
        Case("both parts are empty", (_empty(), _empty()), driver=merge_in_pairs),
        Case("some rows empty in one part", tuple(some_empty), driver=merge_in_pairs),
        Case("seven parts, merged in pairs", _states(draw, [3, 1, 16, 5, 8, 2, 13], scale=2.0), driver=merge_in_pairs),
    ]


def _empty_nan(case, got) -> bool:
    """NaN exactly in rows that are empty in every part."""
    if not isinstance(got, (tuple, list)) or len(got) != 3 or not all(isinstance(item, torch.Tensor) for item in got):
        return False
    empty = torch.stack([state[0] == -INF for state in case.args]).all(dim=0)
    return (
        all(item.shape[:1] == empty.shape for item in got)
        and bool(empty.any())
        and any(bool(item[empty].isnan().any()) and not bool(item[~empty].isnan().any()) for item in got)
    )


EXERCISE = Exercise(
    id="3.3",
    title="Merge two partial results",
    entries=("merge",),
    cases=merge_cases,
    oracle=_in_pairs(_merge),
    plain=(
        _in_a_row(_merge),
        _in_pairs(_merge_by_shares),
        _in_pairs(lambda first, second: _merge_by_shares(second, first)),
    ),
    hints=(
        "Both sums are right, each relative to its own maximum. Relative to which number can they be added?",
        "The merged maximum is the larger of the two. To move a sum from its maximum to the merged one, multiply it by "
        "exp(its maximum - merged maximum). One of the two factors is 1.",
        "An average says nothing of how much weight stands behind it. Its part of the merged average is its rescaled "
        "sum divided by the merged sum; the two shares add up to 1.",
        "An empty part has maximum -inf and sum 0. Take 0 as the reference where the merged maximum is -inf, and 1 as "
        "the divisor where the merged sum is 0.",
        "`first_weight = first_sum * torch.exp(first_max - reference)`, `second_weight` likewise, `merged_sum = "
        "first_weight + second_weight`, `average = (first_weight[:, None] * first_average + second_weight[:, None] * "
        "second_average) / divisor[:, None]`.",
    ),
    mistakes=(
        Mistake(
            "sum_not_rescaled",
            "The two sums were added as they are, though they are relative to different maxima. Multiply each by "
            "exp(its maximum - merged maximum) first.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(False, False))),
        ),
        Mistake(
            "averages_without_weights",
            "The two averages were averaged as equals. A part with a larger share of the total weight counts for more: "
            "weigh each by its rescaled sum.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="equal")),
        ),
        Mistake(
            "average_weighed_by_stale_sums",
            "The merged sum is right, but the averages were weighed by the sums as they came in, each relative to its "
            "own maximum. Use the rescaled sums.",
            result=(
                _in_pairs(lambda a, b: _merge(a, b, weigh="sums")),
                _in_pairs(lambda a, b: _merge(a, b, weigh="sums over the merged one")),
            ),
        ),
        Mistake(
            "weights_exchanged",
            "Each average was weighed by the other part's sum. The first part's rescaled sum goes with the first "
            "part's average.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="exchanged")),
        ),
        Mistake(
            "rescaled_the_wrong_way",
            "The factor is upside down: exp(merged maximum - its maximum) makes a part grow that should shrink. "
            "Multiply each sum by exp(its maximum - merged maximum), which is never above 1.",
            result=_in_pairs(lambda a, b: _merge(in_float32(a), in_float32(b), sign=-1)),
        ),
        Mistake(
            "average_weighed_by_maxima",
            "The averages were weighed by exp(maximum - merged maximum) alone. A part of a thousand keys and one of a "
            "single key then count alike: multiply by the part's sum.",
            result=_in_pairs(lambda a, b: _merge(a, b, weigh="maxima")),
        ),
        Mistake(
            "first_not_rescaled",
            "Only the second part was rescaled. That is right when the first holds the larger maximum; when the second "
            "does, the first is the one that must shrink. Rescale both: one factor is 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(False, True))),
        ),
        Mistake(
            "second_not_rescaled",
            "Only the first part was rescaled. That is right when the second holds the larger maximum; when the first "
            "does, the second must shrink. Rescale both: one factor is 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, rescale=(True, False))),
        ),
        Mistake(
            "older_maximum",
            "Everything was measured from one part's maximum, whichever is larger. Where the other part's is far "
            "above, its factor overflows. Take `torch.maximum` of the two.",
            result=(
                _in_pairs(lambda a, b: _merge(in_float32(a), in_float32(b), kept=0)),
                _in_pairs(lambda a, b: _merge(in_float32(a), in_float32(b), kept=1)),
            ),
        ),
        Mistake(
            "not_normalised",
            "The averages were weighed and added but not divided by the merged sum, so the result is no average.",
            result=_in_pairs(lambda a, b: _merge(a, b, divide=False)),
        ),
        Mistake(
            "empty_state_nan",
            "Empty parts gave NaN. Two things do that: -inf - (-inf) in an exponent, and 0/0 in the average. Where the "
            "merged maximum is -inf, subtract 0; where the merged sum is 0, divide by 1.",
            result=_in_pairs(lambda a, b: _merge(a, b, guard=False)),
            when=lambda case, seen, got: _empty_nan(case, got),
            every=True,
        ),
    ),
)
