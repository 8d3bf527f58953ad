"""Exercise 7.4: attention with shared KV heads in PyTorch, without a copy of the keys."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake
from exercises.ch07_grouped_query_attention.slips import (
    BIG,
    BY_COUNT,
    BY_MODULO,
    FIRST_HEAD,
    KEYS_REPEATED,
    SCALE_MISSING,
    SCALE_TWICE,
    grouped,
    repeats_keys,
    rounding_decides,
)
from exercises.topics.attention import attention, without_running_max
from exercises.topics.decode import (
    by_count,
    by_modulo,
    cached,
    decode,
    decode_prescaled,
    decode_rounded,
    each_sequence,
    first_head,
    tokens_first,
)


def _all_keys(key):
    """Every sequence has as many tokens as the keys given."""
    return torch.full((key.shape[0],), key.shape[2])


def shared_oracle(query, key, value):
    return decode(query, key, value, _all_keys(key))


def shared_prescaled(query, key, value):
    return decode_prescaled(query, key, value, _all_keys(key))


def shared_rounded(query, key, value):
    return decode_rounded(query, key, value, _all_keys(key))


def shared_cases(draw):
    def case(name, query_heads, key_heads, head_dim, length, batch=1, change=None, **options):
        query, key, value, _ = cached(draw, query_heads, key_heads, head_dim, [length] * batch, length, **options)
        if change:
            key, value = change(key), change(value)
        return Case(name, (query, key, value))

    prime = draw.choice((37, 41, 53, 61))
    larger = cached(draw, 8, 4, 16, [30, 30], 50)
    return [
        case("8 query heads on 2 KV heads, 50 keys", 8, 2, 16, 50),
        case("two sequences, 12 query heads on 4", 12, 4, 16, 33, batch=2),
        case("one key", 6, 3, 8, 1),
        case("a KV head for each query head", 5, 5, 16, 40),
        case(f"one KV head for all, {prime} keys", 6, 1, 16, prime),
        case("scores of ±150: exp overflows", 8, 2, 32, 70, score=BIG),
        case("keys and values stored token by token", 8, 2, 16, 64, batch=2, change=tokens_first),
        Case("the first 30 slots of a cache with 50", (larger[0], larger[1][:, :, :30], larger[2][:, :, :30])),
        case("float16, 16 query heads on 2", 16, 2, 32, 100, dtype=torch.float16),
        case("64 query heads on 8 KV heads, 200 keys", 64, 8, 32, 200),
    ]


def _on_all_keys(function=attention, **slips):
    """A fingerprint of 7.4: `function` of every query head with slips in the head map."""

    def result(query, key, value):
        lengths = _all_keys(key)
        if rounding_decides(query, key, value, lengths):
            return None
        return each_sequence(function, query, key, value, lengths, **slips)

    return result


def _queries_interleaved(query, key, value):
    """The queries are split as [group, key_heads] and the output is put together as [key_heads, group]."""
    output = _on_all_keys(heads=by_modulo)(query, key, value)
    return None if output is None else output.unflatten(1, (-1, key.shape[1])).transpose(1, 2).flatten(1, 2)


def _outputs_interleaved(query, key, value):
    """The queries are split rightly and the output is put together as [group, key_heads]."""
    return grouped(shared_oracle(query, key, value), key.shape[1]).transpose(1, 2).flatten(1, 2)


def _softmax_over_the_group(query, key, value):
    """The softmax runs over the query heads of a group instead of over the keys."""
    scores = grouped(query, key.shape[1]) @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    return (torch.softmax(scores, dim=2) @ value).flatten(1, 2)


EXERCISE = Exercise(
    id="7.4",
    title="Grouped attention without a copy",
    entries=("grouped_attention",),
    cases=shared_cases,
    oracle=shared_oracle,
    plain=(shared_prescaled, shared_rounded),
    requirements=(
        Allocates(lambda q, k, v: max(q.numel(), k.numel(), q.shape[0] * q.shape[1] * k.shape[2])),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "With one query head for each KV head this is a product of a vector [1, head_dim] and a matrix [head_dim, "
        "length]. Nothing says that there must be one row: a group of query heads is a matrix [group, head_dim].",
        "Neighbouring query heads share a KV head, so query.unflatten(1, (key_heads, -1)) is [batch, key_heads, group, "
        "head_dim], and no element moves.",
        "scores = grouped @ key.transpose(-1, -2) / math.sqrt(head_dim) is [batch, key_heads, group, length]. The "
        "batch dimensions of both operands agree, so matmul has nothing to copy.",
        "(torch.softmax(scores, dim=-1) @ value).flatten(1, 2) is [batch, query_heads, head_dim].",
    ),
    mistakes=(
        Mistake("by_modulo", BY_MODULO, result=_on_all_keys(heads=by_modulo)),
        Mistake("by_count", BY_COUNT, result=_on_all_keys(heads=by_count)),
        Mistake("first_head_for_all", FIRST_HEAD, result=_on_all_keys(heads=first_head)),
        Mistake(
            "queries_interleaved",
            "The query heads were split as [group, key_heads]. Neighbours share a KV head, so the split is "
            "[key_heads, group].",
            result=_queries_interleaved,
        ),
        Mistake(
            "outputs_interleaved",
            "The output's heads are in another order than the queries': they were put together as [group, key_heads]. "
            "Bring the result to [batch, key_heads, group, head_dim] before you flatten it.",
            result=_outputs_interleaved,
        ),
        Mistake(
            "softmax_over_the_group",
            "The softmax runs over the query heads of a group. Each query head weighs the keys: softmax over the last "
            "dimension of [batch, key_heads, group, length].",
            result=_softmax_over_the_group,
        ),
        Mistake("scale_missing", SCALE_MISSING, result=_on_all_keys(lambda q, k, v: attention(q, k, v, scale=1.0))),
        Mistake(
            "scale_twice",
            SCALE_TWICE,
            result=_on_all_keys(lambda q, k, v: attention(q, k, v, scale=1 / q.shape[-1])),
        ),
        Mistake(
            "no_maximum",
            "exp overflows float32 above 88, and infinity divided by infinity is NaN. Subtract each row's maximum "
            "first, or take torch.softmax.",
            result=lambda q, k, v: each_sequence(without_running_max, q, k, v, _all_keys(k)),
        ),
        Mistake(
            "keys_used_as_values",
            "The weights are multiplied with the keys. The second product takes the values.",
            result=lambda q, k, v: _on_all_keys()(q, k, k),
        ),
        Mistake("keys_repeated", KEYS_REPEATED, when=repeats_keys),
    ),
)
