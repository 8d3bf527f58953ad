"""Exercise 7.3: a checkpoint with fewer KV heads, by mean-pooling those it has."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake


def _split(weight, key_heads, new_key_heads):
    """[new_key_heads, group, head_dim, ...]: the heads that become one stand together."""
    return weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, -1))


def pool_oracle(weight, key_heads, new_key_heads):
    return _split(weight, key_heads, new_key_heads).mean(dim=1).flatten(0, 1)


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

    turned = draw.transposed(draw.normal(6 * 4, 10))
    return [
        case("8 heads of 4 become 2, width 6", 8, 2, 4, 6),
        case("8 heads become 1: multi-query", 8, 1, 4, 5),
        case("6 heads of 5 become 3, width 7", 6, 3, 5, 7),
        case("12 heads of 2 become 4", 12, 4, 2, 3),
        case("4 heads stay 4: nothing changes", 4, 4, 3, 8),
        Case("a weight stored column by column", (turned, 6, 2)),
        case("a bias: one dimension", 8, 4, 16),
        case("float16, 32 heads become 8", 32, 8, 8, 16, dtype=torch.float16),
    ]


def _unless_unchanged(slip):
    """A fingerprint that says nothing where the number of heads stays."""
    return lambda weight, key_heads, new: None if key_heads == new else slip(weight, key_heads, new)


EXERCISE = Exercise(
    id="7.3",
    title="Convert a checkpoint by mean-pooling",
    entries=("pool_heads",),
    cases=pool_cases,
    oracle=pool_oracle,
    plain=(pool_added_up, pool_scaled_first),
    hints=(
        "The rows of the weight are heads, one after the other: row head · head_dim + d makes element d of that head. "
        "Take them apart before you average: which shape shows new head, member of the group and head_dim?",
        "weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, head_dim)) is [new, group, head_dim, ...]. "
        "The groups of exercise 7.1 stand together, so that no row need move.",
        "Average over the members, dimension 1, and put heads and head_dim back into one dimension with flatten(0, 1). "
        "head_dim is weight.shape[0] // key_heads.",
    ),
    mistakes=(
        Mistake(
            "heads_interleaved",
            "Head h was averaged with h + new_key_heads and so on: every new_key_heads-th head. The query heads that "
            "will share a KV head are neighbours, so their KV heads are: split the rows as [new_key_heads, group, "
            "head_dim].",
            result=lambda w, k, new: w.unflatten(0, (k // new, new, -1)).mean(dim=0).flatten(0, 1),
        ),
        Mistake(
            "rows_averaged",
            "Neighbouring rows were averaged, which are elements of one head. The rows are [heads, head_dim], all of "
            "head 0 first: average element d of one head with element d of the others.",
            result=lambda w, k, new: w.unflatten(0, (-1, k // new)).mean(dim=1),
        ),
        Mistake(
            "summed",
            "The heads of a group are added up and not averaged: keys and scores grow by the group's size. Take the "
            "mean.",
            result=_unless_unchanged(lambda w, k, new: _split(w, k, new).sum(dim=1).flatten(0, 1)),
        ),
        Mistake(
            "first_of_group",
            "The first head of each group is kept and the others are dropped. It works less well than the mean of all "
            "(Ainslie et al., figure 4).",
            result=_unless_unchanged(lambda w, k, new: _split(w, k, new)[:, 0].flatten(0, 1)),
        ),
        Mistake(
            "first_heads_kept",
            "The first new_key_heads heads are kept and the rest is dropped. Average the members of each group.",
            result=_unless_unchanged(lambda w, k, new: w.unflatten(0, (k, -1))[:new].flatten(0, 1)),
        ),
        Mistake(
            "everything_averaged",
            "All heads were averaged into one, and that one is repeated. Average inside each group only.",
            result=_unless_unchanged(
                lambda w, k, new: torch.cat([w.unflatten(0, (k, -1)).mean(dim=0)] * new) if new > 1 else None
            ),
        ),
        Mistake(
            "pooled_then_repeated",
            "The result still has key_heads heads: the mean was written back to every member. One head for each group "
            "is what makes the cache smaller.",
            result=_unless_unchanged(
                lambda w, k, new: _split(w, k, new).mean(dim=1).repeat_interleave(k // new, dim=0).flatten(0, 1)
            ),
        ),
    ),
)
