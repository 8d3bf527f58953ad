"""Passes of one program over what its row is drawn from: the groups that top-k has listed, or all groups."""

import triton
import triton.language as tl

from course_lib.kernels.sampling.parts import chances, exponents_of, load_groups, reaches, whole


@triton.jit
def load_listed(
    row_pointer, list_pointer, is_listed, start, count, vocabulary, GROUP: tl.constexpr, TILE_GROUPS: tl.constexpr
):
    """A tile of the groups that a row is drawn from, in the order of its tokens: those listed, or all of them."""
    place = start + tl.arange(0, TILE_GROUPS)  # [TILE_GROUPS]
    group = place
    if is_listed:
        outside = tl.cdiv(vocabulary, GROUP)
        group = tl.load(list_pointer + place, mask=place < count, other=outside)
    return load_groups(row_pointer, group, vocabulary, GROUP)


@triton.jit
def draw_listed(
    row_pointer,
    list_pointer,
    count,
    vocabulary,
    edge_key,
    edge_token,
    largest,
    temperature,
    min_p,
    key,
    best_chances_pointer,
    best_tokens_pointer,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Write the best chance and its token of each listed group; returns the weight of all that reaches the edge."""
    total = tl.zeros([TILE_GROUPS, GROUP], tl.int64)
    for start in tl.range(0, count, TILE_GROUPS):
        logits, keys, token = load_listed(
            row_pointer, list_pointer, True, start, count, vocabulary, GROUP, TILE_GROUPS
        )  # [TILE_GROUPS, GROUP]
        kept = reaches(keys, token, edge_key, edge_token)
        exponents = exponents_of(logits, largest, temperature)
        weights = tl.exp2(exponents)
        total += tl.where(kept, whole(weights), 0)
        best, place = tl.max(
            chances(exponents, token, kept & (weights >= min_p), key, ASSEMBLY), axis=1, return_indices=True
        )  # [TILE_GROUPS]
        group_place = start + tl.arange(0, TILE_GROUPS)
        group = tl.load(list_pointer + group_place, mask=group_place < count, other=0)
        tl.store(best_chances_pointer + group_place, best, mask=group_place < count)
        tl.store(best_tokens_pointer + group_place, group * GROUP + place, mask=group_place < count)
    return tl.sum(total)


@triton.jit
def weight_before(
    row_pointer,
    list_pointer,
    is_listed,
    count,
    vocabulary,
    drawn_logit,
    drawn,
    largest,
    temperature,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    """The weight of all tokens that stand before this one, int64. Logits are compared: they need no turning around."""
    total = tl.zeros([TILE_GROUPS, GROUP], tl.int64)
    for start in tl.range(0, count, TILE_GROUPS):
        logits, _keys, token = load_listed(
            row_pointer, list_pointer, is_listed, start, count, vocabulary, GROUP, TILE_GROUPS
        )  # [TILE_GROUPS, GROUP]
        weights = tl.exp2(exponents_of(logits, largest, temperature))
        total += tl.where(reaches(logits, token, drawn_logit, drawn - 1), whole(weights), 0)
    return tl.sum(total)
