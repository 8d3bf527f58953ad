"""The causal softmax of exercise 2.3 step by step, and the slips of its mask, which exercise 2.5 shares."""

from __future__ import annotations

import itertools
import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.attention_steps import STAND_INS


def causal_mask(slips: Slips, query_length: int, key_length: int, columns: int | None = None) -> torch.Tensor:
    """bool [query_length, columns]: the pairs that are kept; as many columns as keys, or those of a wider tile."""
    offset = key_length - query_length
    if slips("causal_misaligned"):
        offset = 0
    if slips("offset_reversed"):
        offset = -offset
    if slips("offset_clamped"):
        offset = max(offset, 0)
    distance = -1 if slips("diagonal_hidden") else 1 if slips("one_key_too_many") else 0
    queries, keys = torch.arange(query_length)[:, None] + offset, torch.arange(columns or key_length)[None, :]
    if slips("mask_inverted", "mask_inverted__own_key_kept"):
        return keys > queries if slips("mask_inverted") else keys >= queries
    return keys <= queries + distance


def mask_by_slices(slips: Slips, query_length: int, key_length: int) -> torch.Tensor:
    """The same mask, [query_length, key_length], from slices that may begin or end at a number below 0."""
    offset = key_length - query_length
    visible = torch.zeros(query_length, key_length, dtype=torch.bool)
    if slips("negative_slice__of_columns"):
        visible[:, :offset] = True
        visible[:, offset:] = torch.ones(visible[:, offset:].shape).tril()
    else:
        for query in range(query_length):
            visible[query, : query + offset + 1] = True
    return visible


WAYS = ("in_float32", "by_a_product", "guarded")  # a product with the mask hides; a sum of 0 is taken for 1
NO_MAXIMUM = {  # the slip -> which of these ways it is made
    "__".join(("no_maximum", *itertools.compress(WAYS, chosen))): chosen
    for chosen in itertools.product((False, True), repeat=len(WAYS))
}


def mask_model() -> Model:
    """The model of exercise 2.3, called with scores [heads, query_length, key_length].

    Styles: "unguarded" leaves a row that sees no key to the softmax; the other zeroes what is hidden once more.
    """

    def compute(slips: Slips, scores):
        axis = -2 if slips("wrong_axis") else 0 if slips("softmax_over_heads") else -1
        if slips("no_mask"):
            return torch.softmax(scores, dim=axis)
        by_slices = slips("negative_slice", "negative_slice__of_columns")
        visible = (mask_by_slices if by_slices else causal_mask)(slips, *scores.shape[-2:]).expand(scores.shape)
        if slips("mask_after_softmax", "renormalised_afterwards"):
            kept = torch.softmax(scores, dim=axis) * visible
            if slips("renormalised_afterwards"):
                total = kept.sum(-1, keepdim=True)
                kept = kept / torch.where(total == 0, 1.0, total)
            return kept
        lowest = torch.finfo(scores.dtype).min
        fill = 0.0 if slips("hidden_scored_zero", "hidden_scored_zero__and_zeroed") else -math.inf
        fill = lowest if slips("empty_row_uniform") else fill
        if slips("hidden_scored_low__least") and slips("unguarded"):
            return None  # that is `empty_row_uniform`
        kept = slips("hidden_scored_zero", "empty_row_uniform")
        wide = scores
        for name, number in {**STAND_INS, "least": lowest}.items():
            if slips(f"hidden_scored_low__{name}", f"hidden_scored_low__{name}_and_kept"):
                fill, kept = number, slips(f"hidden_scored_low__{name}_and_kept")
                wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        hidden = torch.where(visible, wide, fill)
        shares = torch.softmax(hidden, dim=axis).to(scores.dtype)
        if slips(*NO_MAXIMUM):
            shares = without_a_maximum(slips, hidden, scores, visible, axis)
        if kept:
            return shares
        if not slips("unguarded", "empty_row_nan"):
            shares = torch.where(visible, shares, 0.0)
        return shares

    return Model(compute, (*MASK_SLIPS, *_OF_TENSORS), styles=((), ("unguarded",)))


def unguarded_mask_model() -> Model:
    """The same where whoever makes a slip leaves empty rows to the softmax as well: what hides in such an answer.

    Two slips are looked for in a model's first style, and that of `mask_model` guards.
    """
    guarded = mask_model()

    def compute(slips: Slips, scores):
        chosen = slips.switched_on
        return guarded.compute(Slips({*chosen, "unguarded"} if chosen else chosen), scores)

    return Model(compute, tuple(slip for slip in guarded.slips if not slip.mistake.startswith("empty_row")))


def without_a_maximum(slips: Slips, hidden, scores, visible, axis) -> torch.Tensor:
    """The exponentials as they are, over their sum: in the scores' own precision or in float32."""
    in_float32, by_a_product, guarded = next(chosen for name, chosen in NO_MAXIMUM.items() if slips(name))
    dtype = torch.float32 if in_float32 else scores.dtype
    weights = torch.exp(scores.to(dtype)) * visible if by_a_product else torch.exp(hidden.to(dtype))
    total = weights.sum(axis, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total) if guarded else weights / total).to(scores.dtype)


FINITE = (
    "Hidden scores were set to a finite number, such as -1e4. Where the visible scores are as low as that, "
    "the hidden keys get as much weight as they do. Set hidden scores to minus infinity."
)
_SCORED_ZERO = (
    "Hidden scores were set to 0. A score of 0 has the weight exp(0) = 1. Set hidden scores to minus "
    "infinity, which has the weight 0."
)
MASK_SLIPS = (
    Slip(
        "causal_misaligned",
        "The mask is aligned to the first query and key. With fewer queries than keys the last query stands at the "
        "last key: query i has the position i + key_length - query_length.",
    ),
    Slip(
        "offset_clamped",
        "With more queries than keys the mask begins at the first query, as if key_length - query_length were 0. It is "
        "negative there, and the first queries see nothing: the last query stands at the last key.",
    ),
    Slip(
        "offset_reversed",
        "The diagonal is shifted the wrong way: with more keys than queries it moves to the right. Query i is at "
        "i + key_length - query_length.",
    ),
    Slip("mask_inverted", "The mask is upside down: the past is hidden and the future kept."),
    Slip("mask_inverted__own_key_kept", "The mask is upside down: the past is hidden and the future kept."),
    Slip(
        "diagonal_hidden",
        "The mask is off by one: a token must see itself. Keep keys at or before the query's position (`<=`, not `<`).",
    ),
    Slip(
        "one_key_too_many",
        "The mask is off by one: each query sees one key of its future. Keep keys at or before its position, none "
        "after it.",
    ),
    Slip(
        "mask_after_softmax",
        "The mask was applied after the softmax, so hidden keys still have their share of the sum and the rows do "
        "not add up to 1. Set hidden scores to minus infinity before the softmax.",
    ),
    Slip(
        "renormalised_afterwards",
        "The softmax runs over all keys, and the hidden ones are removed afterwards. Where a hidden score is far "
        "above the visible ones, the visible ones underflow to 0. Set hidden scores to minus infinity before the "
        "softmax.",
    ),
    Slip("hidden_scored_zero", _SCORED_ZERO),
    Slip("hidden_scored_zero__and_zeroed", _SCORED_ZERO),
    *(
        Slip(f"hidden_scored_low__{name}{way}", FINITE, alone=name not in ("1e4", "1e9"))
        for name in STAND_INS
        for way in ("", "_and_kept")
    ),
    Slip("hidden_scored_low__least", FINITE, alone=True),
    Slip(
        "empty_row_nan",
        "A row that sees no key became NaN: its maximum is minus infinity and its sum of weights 0, and both -inf - "
        "-inf and 0 / 0 are NaN. Such a row is all zeros.",
    ),
    Slip(
        "empty_row_uniform",
        "A row that sees no key shares its weight evenly among hidden keys, and it should be all zeros. As a rule a "
        "large negative number stands where minus infinity belongs: the softmax cannot tell it from a score.",
    ),
    Slip(
        "wrong_axis",
        "The softmax runs over the queries. Each query shares its weight among the keys: the last dimension adds "
        "up to 1.",
    ),
)
NEGATIVE = (
    "A slice begins or ends at a number below 0, which Python counts from the end. key_length - query_length is "
    "negative where there are more queries than keys: keep such a bound from falling below 0, and the first "
    "queries see nothing."
)
_OF_TENSORS = (
    Slip("negative_slice", NEGATIVE, alone=True),
    Slip("negative_slice__of_columns", NEGATIVE, alone=True),
    Slip("softmax_over_heads", "The softmax runs over the heads. Each query shares its weight among the keys: dim=-1."),
    *(
        Slip(
            name,
            "The exponentials are taken of the scores as they are. exp overflows, in float32 above 88 and in float16 "
            "above 11, and far below 0 all of them are 0. Subtract the row's largest visible score first, or use "
            "torch.softmax.",
        )
        for name in NO_MAXIMUM
    ),
    Slip("no_mask", "No key is hidden. A query may see the keys at or before its own position only."),
)
