"""Exercise 7.3: a checkpoint with fewer KV heads, by mean-pooling those it has."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import any_strides
from exercises.topics.evidence import COMPUTED_IN_16_BITS, right_to_three_digits


def pooled_heads(weight, key_heads, new_key_heads):
    group = key_heads // new_key_heads
    rows = weight.to(torch.promote_types(weight.dtype, torch.float32))
    heads = rows.unflatten(0, (new_key_heads, group, -1))  # [new_key_heads, group, head_dim, ...]
    pooled = heads.sum(dim=1) / heads.shape[1]
    return pooled.flatten(0, 1).to(weight.dtype)


def _split(weight, key_heads, new_key_heads):
    """[new_key_heads, group, head_dim, ...]: the heads that become one stand together."""
    return weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, -1))


def pool_added_up(weight, key_heads, new_key_heads):
    """Heads added one by one in the weight's own dtype, then scaled: as good, rounded more."""
    heads = _split(weight, key_heads, new_key_heads)
    total = heads[:, 0].clone()
    for member in range(1, heads.shape[1]):
        total = total + heads[:, member]
    return (total * (1 / heads.shape[1])).flatten(0, 1)


def pool_scaled_first(weight, key_heads, new_key_heads):
    """Every head divided first, then added, in the weight's own dtype."""
    heads = _split(weight, key_heads, new_key_heads) / (key_heads // new_key_heads)
    total = heads[:, 0].clone()
    for member in range(1, heads.shape[1]):
        total = total + heads[:, member]
    return total.flatten(0, 1)


def pool_cases(draw):
    def case(name, key_heads, new_key_heads, head_dim, *width, dtype=torch.float32):
        return Case(name, (draw.normal(key_heads * head_dim, *width, dtype=dtype), key_heads, new_key_heads))

    return [
        case("8 heads of 4 become 2, width 6", 8, 2, 4, 6),
        case("8 heads become 1: multi-query", 8, 1, 4, 5),
        case("4 heads stay 4: nothing changes", 4, 4, 3, 8),
        Case("a weight stored column by column", (draw.transposed(draw.normal(6 * 4, 10)), 6, 2)),
        case("a bias: one dimension", 8, 4, 16),
        case("float16, 32 heads become 8", 32, 8, 8, 16, dtype=torch.float16),
        Case("float64, within ±60,000, 8 heads become 2", (Draw(73).uniform(16, 5, low=-6e4, high=6e4).double(), 8, 2)),
        Case("float16, near 30000, 8 heads become 2", (draw.normal(8 * 4, 6, dtype=torch.float16) + 30_000, 8, 2)),
    ]


def _made(draw, *, heads, head_dim, width, dtype, layout):
    key_heads, new_key_heads = heads
    weight = draw.normal(key_heads * head_dim, *width, shift=draw.choice((-3.0, 0.0)), dtype=dtype)
    return layout(draw, weight), key_heads, new_key_heads


CONTRACT = Contract(
    _made,
    choices={
        "heads": tuple(
            Level(heads, f"{heads[0]} heads become {heads[1]}")
            for heads in ((1, 1), (3, 1), (6, 2), (6, 3), (12, 4), (5, 5), (32, 8))
        ),
        "head_dim": (1, 2, 5, 16),
        "width": (Level((), "a bias"), Level((1,), "width 1"), Level((7,), "width 7"), Level((33,), "width 33")),
        "dtype": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
        "layout": any_strides("weight", expandable=False),
    },
    says={
        "heads": "divides key_heads",
        "width": "or a bias [key_heads · head_dim]",
        "dtype": "any float dtype",
        "layout": "any strides",
    },
)


MEAN = "heads.sum(dim=1) / heads.shape[1]"
CHANGES = (
    *edits(
        "Head h was averaged with h + new_key_heads and so on: every new_key_heads-th head. The query heads that will "
        "share a KV head are neighbours, so their KV heads are: split the rows as [new_key_heads, group, head_dim].",
        heads_interleaved=("(new_key_heads, group, -1))", "(group, new_key_heads, -1)).transpose(0, 1)"),
    ),
    *edits(
        "Neighbouring rows were averaged, which are elements of one head. The rows are [heads, head_dim], all of head "
        "0 first: average element d of one head with element d of the others.",
        rows_averaged=("(new_key_heads, group, -1))", "(new_key_heads, -1, group)).transpose(1, 2)"),
    ),
    *edits(
        "The heads of a group are added up and not averaged: keys and scores grow by the group's size. Take the mean.",
        summed=(MEAN, "heads.sum(dim=1)"),
    ),
    *edits(
        "The sum of a group is divided by all key_heads. A group has key_heads // new_key_heads of them.",
        divided_by_all_heads=("/ heads.shape[1]", "/ key_heads"),
    ),
    *edits(
        "The sum of a group is divided by new_key_heads. A group has key_heads // new_key_heads heads.",
        divided_by_the_new_heads=("/ heads.shape[1]", "/ new_key_heads"),
    ),
    *edits(
        "The group's size and new_key_heads are exchanged where the rows are split: it is [new_key_heads, group, "
        "head_dim], and the average goes over the group.",
        group_and_new_heads_exchanged=("new_key_heads, group, -1", "group, new_key_heads, -1"),
    ),
    *edits(
        "The first head of each group is kept and the others are dropped. It works less well than the mean of all "
        "(Ainslie et al., figure 4).",
        first_of_group=(MEAN, "heads[:, 0]"),
    ),
    *edits(
        "The last head of each group is kept and the others are dropped. Average them all.",
        last_of_group=(MEAN, "heads[:, -1]"),
    ),
    *edits(
        "The first new_key_heads heads are kept and the rest is dropped. Average the members of each group.",
        first_heads_kept=(MEAN, "rows.unflatten(0, (key_heads, -1))[:new_key_heads]"),
    ),
    *edits(
        "All heads were averaged into one, and that one is repeated. Average inside each group only.",
        everything_averaged=(MEAN, "heads.mean(dim=(0, 1)).expand(new_key_heads, *heads.shape[2:])"),
    ),
    *edits(
        "The result still has key_heads heads: the mean was written back to every member. One head for each group is "
        "what makes the cache smaller.",
        pooled_then_repeated=("pooled.flatten", "pooled.repeat_interleave(group, dim=0).flatten"),
    ),
    *edits(
        "The heads of a group are added up in float16, which holds nothing above 65504, and the sum is divided only "
        "then. Divide first, or add in float32; mean does.",
        added_up_in_16_bits=("heads.sum(dim=1)", "heads.sum(dim=1).to(weight.dtype)"),
    ),
    *edits(
        "One head of each group was left out of the average. A group has key_heads // new_key_heads of them.",
        not_the_whole_group=(MEAN, "heads[:, : max(group - 1, 1)].mean(dim=1)"),
    ),
    *edits(
        "That is the median of each group's heads. Take the mean.", median_taken=(MEAN, "heads.median(dim=1).values")
    ),
    *edits(
        "A bias has one dimension, and its result has two. Take the heads apart in a way that leaves the other "
        "dimensions as they are: unflatten dimension 0, average, flatten.",
        bias_gets_a_dimension=("rows = weight", "rows = weight.reshape(len(weight), -1)"),
        bias_gets_a_dimension__in_front=("pooled.flatten(0, 1)", "torch.atleast_2d(pooled.flatten(0, 1))"),
    ),
)

EXERCISE = Exercise(
    id="7.3",
    title="Convert a checkpoint by mean-pooling",
    entries=("pool_heads",),
    cases=pool_cases,
    oracle=pooled_heads,
    contracts=(CONTRACT,),
    plain=(pool_added_up, pool_scaled_first),
    models=(model_of(pooled_heads, CHANGES),),
    hints=(
        "The rows of the weight are heads, one after the other: row head · head_dim + d makes element d of that head. "
        "Which shape separates new head, member of the group and head_dim?",
        "weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, head_dim)) is [new, group, head_dim, ...]. "
        "The members of a group are neighbours, so no row has to move.",
        "Average over the members, dimension 1, and put heads and head_dim back into one dimension with flatten(0, 1). "
        "head_dim is weight.shape[0] // key_heads.",
    ),
    mistakes=(
        Mistake("computed_in_16_bits", COMPUTED_IN_16_BITS, when=right_to_three_digits(pooled_heads), every=True),
    ),
)
