"""The causal mask as it should be and with its classic slips, in PyTorch: for exercises 2.3 and 2.5."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from course_lib.checker import Slip
from exercises.ch02_naive_attention.slips import same


def positions(query_length, key_length):
    queries = torch.arange(query_length)[:, None] + (key_length - query_length)
    return queries, torch.arange(key_length)[None, :]


def masked_softmax(scores, visible, empty=0.0):
    hidden = scores.masked_fill(~visible, -math.inf)
    nothing = ~visible.any(dim=-1, keepdim=True)
    return torch.softmax(hidden.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, empty)


def causal_visible(query_length, key_length):
    queries, keys = positions(query_length, key_length)
    return keys <= queries


def causal_oracle(scores):
    return masked_softmax(scores, causal_visible(*scores.shape[-2:]))


def with_visible(rule: Callable):
    """A fingerprint: the mask keeps the pairs for which `rule(queries, keys)` holds, queries at their positions."""

    def result(scores, *rest):
        if rest and not rest[0]:
            return torch.softmax(scores, dim=-1)
        return masked_softmax(scores, rule(*positions(*scores.shape[-2:])).expand(scores.shape[-2:]))

    return result


def _top_left(scores, *rest):
    if rest and not rest[0]:
        return torch.softmax(scores, dim=-1)
    m, n = scores.shape[-2:]
    return masked_softmax(scores, torch.arange(n)[None, :] <= torch.arange(m)[:, None])


def _mask_after(scores, *rest):
    probabilities = torch.softmax(scores, dim=-1)
    return probabilities if rest and not rest[0] else probabilities * causal_visible(*scores.shape[-2:])


def _scored_zero(scores, *rest):
    if rest and not rest[0]:
        return torch.softmax(scores, dim=-1)
    return torch.softmax(scores * causal_visible(*scores.shape[-2:]), dim=-1)


def _nothing_seen_becomes(value: Callable):
    """A fingerprint: all is right save the rows that see no key."""

    def result(scores, *rest):
        if rest and not rest[0]:
            return torch.softmax(scores, dim=-1)
        return masked_softmax(scores, causal_visible(*scores.shape[-2:]), empty=value(scores.shape[-1]))

    return result


def over(dimension: int):
    """A fingerprint: the softmax runs along another dimension."""

    def result(scores, *rest):
        if rest and not rest[0]:
            return torch.softmax(scores, dim=dimension)
        visible = causal_visible(*scores.shape[-2:])
        shares = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=dimension)
        return shares.masked_fill(~visible, 0.0)

    return result


def _diagonal_hidden_and_nan(case, seen, got):
    """Off by one, and no care for empty rows: the first token of a square sees nothing and becomes NaN."""
    scores, *rest = case.args
    if (rest and not rest[0]) or not isinstance(got, torch.Tensor) or got.shape != scores.shape:
        return False
    queries, keys = positions(*scores.shape[-2:])
    expected = masked_softmax(scores.double(), keys < queries, empty=math.nan)
    return torch.equal(got.isnan(), expected.isnan()) and same(got, expected)


MASK_SLIPS = (
    Slip(
        "causal_misaligned",
        "The mask is aligned to the first query and key. With fewer queries than keys the last query stands at the "
        "last key: query i has the position i + key_length - query_length.",
        formula=_top_left,
    ),
    Slip(
        "diagonal_hidden",
        "The mask is off by one: a token must see itself. Keep keys at or before the query's position (`<=`, not `<`).",
        formula=(with_visible(lambda queries, keys: keys < queries), _diagonal_hidden_and_nan),
    ),
    Slip(
        "one_key_too_many",
        "The mask is off by one: each query sees one key of its future. Keep keys at or before its position, none "
        "after it.",
        formula=with_visible(lambda queries, keys: keys <= queries + 1),
    ),
    Slip(
        "mask_inverted",
        "The mask is upside down: the past is hidden and the future kept.",
        formula=with_visible(lambda queries, keys: keys > queries),
    ),
    Slip(
        "mask_after_softmax",
        "The mask was applied after the softmax, so hidden keys still have their share of the sum and the rows do "
        "not add up to 1. Set hidden scores to minus infinity before the softmax.",
        formula=_mask_after,
    ),
    Slip(
        "hidden_scored_zero",
        "Hidden scores were set to 0. A score of 0 has the weight exp(0) = 1; the score that weighs nothing is "
        "minus infinity.",
        formula=_scored_zero,
    ),
    Slip(
        "empty_row_nan",
        "A row that sees no key became NaN: its maximum is minus infinity, and -inf - -inf is NaN. Such a row is "
        "all zeros.",
        formula=_nothing_seen_becomes(lambda n: math.nan),
    ),
    Slip(
        "empty_row_uniform",
        "A row that sees no key shares its weight evenly among hidden keys: a large negative number stands where "
        "minus infinity belongs, and the softmax cannot tell it from a score. Such a row is all zeros.",
        formula=_nothing_seen_becomes(lambda n: 1.0 / n),
    ),
    Slip(
        "wrong_axis",
        "The softmax runs over the queries. Each query shares its weight among the keys: the last dimension adds "
        "up to 1.",
        formula=over(-2),
    ),
)
