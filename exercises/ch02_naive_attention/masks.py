"""The causal mask and its slips, for exercises 2.3 and 2.5, and the causal softmax in PyTorch."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import edits


def causal_softmax(scores):
    """Softmax over the visible keys of each row of [heads, query_length, key_length]; zeros where there is none."""
    query_length, key_length = scores.shape[-2:]
    visible = causal_visible(query_length, key_length, key_length)
    hidden = torch.where(visible, scores, -math.inf)
    shares = torch.softmax(hidden, dim=-1).to(scores.dtype)
    return torch.where(visible, shares, 0.0)


def causal_visible(query_length, key_length, columns):
    """bool [query_length, columns]: the last query stands at the last key. A tile may have more columns than keys."""
    queries = torch.arange(query_length)[:, None] + (key_length - query_length)
    return torch.arange(columns) <= queries


def over_the_sum(weights, dim):
    return weights / weights.sum(dim, keepdim=True)


def over_the_sum_or_1(weights, dim):
    total = weights.sum(dim, keepdim=True)
    return weights / torch.where(total == 0, 1.0, total)


OFFSET = "(key_length - query_length)"
OF_THE_MASK = (
    *edits(
        "The mask is aligned to the first query and key. With fewer queries than keys the last query stands at the "
        "last key: query i has the position i + key_length - query_length.",
        causal_misaligned=(OFFSET, "0"),
    ),
    *edits(
        "With more queries than keys the mask begins at the first query, as if key_length - query_length were 0. It is "
        "negative there, and the first queries see nothing: the last query stands at the last key.",
        offset_clamped=(OFFSET, "max(key_length - query_length, 0)"),
    ),
    *edits(
        "The diagonal is shifted the wrong way: with more keys than queries it moves to the right. Query i is at "
        "i + key_length - query_length.",
        offset_reversed=(OFFSET, "(query_length - key_length)"),
    ),
    *edits(
        "The mask is upside down: the past is hidden and the future kept.",
        mask_inverted=("<= queries", "> queries"),
        mask_inverted__own_key_kept=("<= queries", ">= queries"),
    ),
    *edits(
        "The mask is off by one: a token must see itself. Keep keys at or before the query's position (`<=`, not `<`).",
        diagonal_hidden=("<= queries", "< queries"),
    ),
    *edits(
        "The mask is off by one: each query sees one key of its future. Keep keys at or before its position, none "
        "after it.",
        one_key_too_many=("<= queries", "<= queries + 1"),
    ),
)
MASK_AFTER_SOFTMAX = (
    "The mask was applied after the softmax, so hidden keys still have their share of the sum and the rows do not add "
    "up to 1. Set hidden scores to minus infinity before the softmax."
)
RENORMALISED = (
    "The softmax runs over all keys, and the hidden ones are removed afterwards. Where a hidden score is far above the "
    "visible ones, the visible ones underflow to 0. Set hidden scores to minus infinity before the softmax."
)
HIDDEN_ZERO = (
    "Hidden scores were set to 0. A score of 0 has the weight exp(0) = 1. Set hidden scores to minus infinity, which "
    "has the weight 0."
)
HIDDEN_FINITE = (
    "Hidden scores were set to a finite number, such as -1e4. Where the visible scores are as low as that, the hidden "
    "keys get as much weight as they do. Set hidden scores to minus infinity."
)
EMPTY_ROW_NAN = (
    "A row that sees no key became NaN: its maximum is minus infinity and its sum of weights 0, and both -inf - -inf "
    "and 0 / 0 are NaN. Such a row is all zeros."
)
EMPTY_ROW_UNIFORM = (
    "A row that sees no key shares its weight evenly among hidden keys, and it should be all zeros. As a rule a large "
    "negative number stands where minus infinity belongs: the softmax cannot tell it from a score."
)
WRONG_AXIS = (
    "The softmax runs over the queries. Each query shares its weight among the keys: the last dimension adds up to 1."
)
