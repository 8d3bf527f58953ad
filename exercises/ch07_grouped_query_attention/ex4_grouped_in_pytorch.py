"""Exercise 7.4: attention with shared KV heads in PyTorch, without a copy of the keys."""

from __future__ import annotations

import torch

from course_lib.checker import Allocates, Case, Exercise, Forbids, Mistake
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.layouts import any_strides
from exercises.ch07_grouped_query_attention.slips import (
    BIG,
    KEYS_REPEATED,
    PRODUCTS_KEPT,
    keeps_products,
    repeats_keys,
)
from exercises.topics.attention_sentences import SCALE_TWICE
from exercises.topics.decode import PLAIN, cached, decode
from exercises.topics.decode_inputs import SCORES
from exercises.topics.decode_slips import BY_COUNT, BY_MODULO, FIRST_HEAD, SCALE_MISSING
from exercises.topics.evidence import COMPUTED_IN_16_BITS, right_to_three_digits


def _all_keys(key):
    """Every sequence has as many tokens as the keys given."""
    return torch.full((key.shape[0],), key.shape[2])


def shared_oracle(query, key, value):
    return decode(query, key, value, _all_keys(key))


def _by_log_sum_exp(query, key, value):
    """exp(score - log-sum-exp) in the inputs' own dtype, with all that a log-sum-exp of its size may be off by."""
    rows = query.double().unflatten(1, (key.shape[1], -1))
    scores = rows @ key.double().mT * query.shape[-1] ** -0.5
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    off = torch.finfo(query.dtype).eps * torch.maximum(total.abs(), scores.abs().amax(-1, keepdim=True)).clamp(min=1.0)
    return (torch.exp(scores - total - off) @ value.double()).flatten(1, 2)


def _plainly(plain):
    return lambda query, key, value: plain(query, key, value, _all_keys(key))


def shared_cases(draw):
    def case(name, query_heads, key_heads, head_dim, length, batch=1, **options):
        query, key, value, _ = cached(draw, query_heads, key_heads, head_dim, [length] * batch, length, **options)
        return Case(name, (query, key, value))

    larger = cached(draw, 8, 4, 16, [30, 30], 50)
    return [
        case("8 query heads on 2 KV heads, 50 keys", 8, 2, 16, 50),
        case("one key", 6, 3, 8, 1),
        case("a KV head for each query head", 5, 5, 16, 40),
        case("scores of ±150: exp overflows", 8, 2, 32, 70, score=BIG),
        Case("the first 30 slots of a cache with 50", (larger[0], larger[1][:, :, :30], larger[2][:, :, :30])),
        case("float16, 16 query heads on 2", 16, 2, 32, 100, dtype=torch.float16),
        case("64 query heads on 8 KV heads, 200 keys", 64, 8, 32, 200),
    ]


def _made(draw, *, batch, key_heads, group, head_dim, length, dtype, scores, key_layout, value_layout):
    query, key, value = scores(draw, batch * key_heads, group, length, head_dim)
    query = query.reshape(batch, key_heads * group, head_dim).to(dtype)
    key, value = (part.unflatten(0, (batch, key_heads)).to(dtype) for part in (key, value))
    return query, key_layout(draw, key), value_layout(draw, value)


CONTRACT = Contract(
    _made,
    choices={
        "batch": (1, 2, 3),
        "key_heads": (1, 2, 3),
        "group": (1, 2, 3, 8),
        "head_dim": (1, 5, 16, 32),
        "length": (1, 2, 37, 64),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "key_layout": any_strides("key"),
        "value_layout": any_strides("value"),
    },
    says={
        "group": "key_heads divides query_heads",
        "length": "length is at least 1",
        "dtype": "float32 or float16",
        "key_layout": "any strides",
    },
    # In float16 PyTorch rounds the scores themselves: where they are large that decides the result.
    valid=lambda dtype, scores, **others: dtype == torch.float32 or scores in (SCORES[0].value, SCORES[7].value),
)


def grouped_attention(query, key, value):
    key_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    rows = query.unflatten(1, (key_heads, group))  # [batch, key_heads, group, head_dim]
    scores = rows @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = torch.softmax(scores, dim=3)
    return (weights @ value).flatten(1, 2)


ROWS, OUTPUT = "query.unflatten(1, (key_heads, group))", "(weights @ value)"
KEYS, SCALE, SOFTMAX = "key.transpose(-1, -2)", "query.shape[-1] ** -0.5", "torch.softmax(scores, dim=3)"
SCALED = f"rows @ {KEYS} * {SCALE}"
TURNED = "query.unflatten(1, (group, key_heads)).transpose(1, 2)"
BY_COUNTED = "[:, (torch.arange(query.shape[1]) // key_heads).clamp(max=key_heads - 1)]"
FROM = "(scores - {0}).exp() / (scores - {0}).exp().sum(-1, keepdim=True)"
CHANGES = (
    *edits(BY_MODULO, by_modulo=(ROWS, TURNED, OUTPUT, f"{OUTPUT}.transpose(1, 2)")),
    *edits(
        BY_COUNT,
        by_count=(
            *(ROWS, "query[:, :, None]", KEYS, f"key{BY_COUNTED}.transpose(-1, -2)"),
            *(OUTPUT, f"(weights @ value{BY_COUNTED})"),
        ),
    ),
    *edits(FIRST_HEAD, first_head_for_all=(KEYS, "key[:, :1].transpose(-1, -2)", OUTPUT, "(weights @ value[:, :1])")),
    *edits(
        "The query heads were split as [group, key_heads]. Neighbours share a KV head, so the split is [key_heads, "
        "group].",
        queries_interleaved=(ROWS, TURNED),
    ),
    *edits(
        "The output's heads are in another order than the queries': they were put together as [group, key_heads]. "
        "Bring the result to [batch, key_heads, group, head_dim] before you flatten it.",
        outputs_interleaved=(OUTPUT, f"{OUTPUT}.transpose(1, 2)"),
    ),
    *edits(
        "The weights are multiplied with the keys. The second product takes the values.",
        keys_used_as_values=(OUTPUT, "(weights @ key)"),
    ),
    *edits(
        "The queries are multiplied with the values. The first product takes the keys.",
        values_used_as_keys=(KEYS, "value.transpose(-1, -2)"),
    ),
    *edits(SCALE_MISSING, scale_missing=(SCALED, f"rows @ {KEYS}")),
    *edits(SCALE_TWICE, scale_twice=(SCALE, "query.shape[-1] ** -1.0")),
    *edits(
        "The scores are multiplied by √head_dim. They are divided by it: the scale is 1/√head_dim.",
        scale_inverted=(SCALE, "query.shape[-1] ** 0.5"),
    ),
    *edits(
        "The scale is taken from the number of keys. It is 1/√head_dim, whatever the length.",
        scale_by_length=(SCALE, "key.shape[2] ** -0.5"),
    ),
    *edits(
        "The softmax runs over the query heads of a group. Each query head weighs the keys: softmax over the last "
        "dimension of [batch, key_heads, group, length].",
        softmax_over_the_group=("dim=3", "dim=2"),
    ),
    *edits(
        "The softmax runs over the KV heads. Each query head weighs the keys: softmax over the last dimension of "
        "[batch, key_heads, group, length].",
        softmax_over_heads=("dim=3", "dim=1"),
    ),
    *edits(
        "exp overflows float32 above 88, and infinity divided by infinity is NaN. Subtract each row's maximum first, "
        "or take torch.softmax.",
        no_maximum=(SOFTMAX, "scores.exp() / scores.exp().sum(-1, keepdim=True)"),
    ),
    *edits(
        "One maximum is subtracted from the scores of several query heads. One whose scores lie far below it loses all "
        "its weights, and 0 / 0 is NaN. Take each row's own: amax(dim=-1, keepdim=True).",
        maximum_of_all=(SOFTMAX, FROM.format("scores.max()")),
        maximum_of_all__of_the_group=(SOFTMAX, FROM.format("scores.amax((2, 3), keepdim=True)")),
    ),
    *edits(
        "The scale is applied to the weights, after the softmax. It belongs to the scores, before it.",
        scaled_after_the_softmax=(SCALED, f"rows @ {KEYS}", OUTPUT, f"(weights * {SCALE} @ value)"),
    ),
    *edits(
        "Every sequence reads the keys or the values of the first one. The batch is a dimension of both: leave it.",
        first_sequence_for_all=(KEYS, "key[:1].transpose(-1, -2)", OUTPUT, "(weights @ value[:1])"),
        first_sequence_for_all__key=(KEYS, "key[:1].transpose(-1, -2)"),
        first_sequence_for_all__value=(OUTPUT, "(weights @ value[:1])"),
    ),
    *edits(
        "The scores are rounded to float16, which keeps three digits and nothing above 65,504. Leave them in the "
        "tensors' dtype.",
        scores_in_16_bits=(SCALED, f"(rows @ {KEYS}).half().to(query.dtype) * {SCALE}"),
        scores_in_16_bits__scaled=(SCALED, f"({SCALED}).half().to(query.dtype)"),
    ),
    *edits(
        "The weights are not divided by their sum. The weights of a query head add up to 1.",
        not_divided=(SOFTMAX, "(scores - scores.amax(-1, keepdim=True)).exp()"),
    ),
)

EXERCISE = Exercise(
    id="7.4",
    title="Grouped attention without a copy",
    entries=("grouped_attention",),
    cases=shared_cases,
    oracle=shared_oracle,
    contracts=(CONTRACT,),
    plain=(*map(_plainly, PLAIN), _by_log_sum_exp),
    models=(model_of(grouped_attention, CHANGES),),
    requirements=(
        Allocates(lambda q, k, v: max(q.numel(), k.numel(), q.shape[0] * q.shape[1] * k.shape[2])),
        Forbids(("scaled_dot_product", "scaled_dot_product_attention")),
    ),
    hints=(
        "With one query head for each KV head this is a vector [1, head_dim] times a matrix [head_dim, length]. With "
        "a group of query heads it is a matrix [group, head_dim] times the same matrix.",
        "Neighbouring query heads share a KV head, so query.unflatten(1, (key_heads, -1)) is [batch, key_heads, group, "
        "head_dim], and no element moves.",
        "scores = grouped @ key.transpose(-1, -2) / math.sqrt(head_dim) is [batch, key_heads, group, length]. The "
        "batch dimensions of both operands agree, so matmul has nothing to copy.",
        "(torch.softmax(scores, dim=-1) @ value).flatten(1, 2) is [batch, query_heads, head_dim].",
    ),
    mistakes=(
        Mistake("keys_repeated", KEYS_REPEATED, when=repeats_keys, cost=True),
        Mistake("products_kept", PRODUCTS_KEPT, when=keeps_products, cost=True),
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(shared_oracle), every=True),
    ),
)
