"""The slips of exercise 2.3, and its models. Exercise 2.5 has slips of the mask in common with it: `masks.py`."""

from __future__ import annotations

from dataclasses import replace

import torch

from course_lib.checker.specification.edits import edits, model_of, without
from exercises.ch02_naive_attention import masks as told
from exercises.ch02_naive_attention.masks import (
    OF_THE_MASK,
    causal_softmax,
    causal_visible,
    over_the_sum,
    over_the_sum_or_1,
)
from exercises.topics.attention_steps import STAND_INS


def rows_by_slices(query_length, key_length, columns):
    """The mask from slices of rows, which end at a number below 0 where there are more queries than keys."""
    visible = torch.zeros(query_length, columns, dtype=torch.bool)
    for query in range(query_length):
        visible[query, : query + key_length - query_length + 1] = True
    return visible


def columns_by_slices(query_length, key_length, columns):
    """The mask from a slice of columns, which begins at a number below 0 there."""
    visible = torch.ones(query_length, columns, dtype=torch.bool)
    visible[:, key_length - query_length :] = visible[:, key_length - query_length :].tril()
    return visible


HIDDEN, ZEROED = "torch.where(visible, scores, -math.inf)", "torch.where(visible, shares, 0.0)"
LEAST = "torch.finfo(scores.dtype).min"
UNGUARDED = (ZEROED, "shares")  # a row that sees no key is left to the softmax


def stand_in(number) -> tuple[str, str]:
    """A number in hidden scores, which float16 may not hold."""
    return HIDDEN, f"torch.where(visible, scores.to(torch.promote_types(scores.dtype, torch.float32)), {number})"


def without_a_maximum() -> dict[str, tuple[str, str]]:
    """The exponentials of the scores as they are, over their sum, each way of writing that."""
    return {
        f"no_maximum{of_float32}{of_product}{of_sum}": ("torch.softmax(hidden, ", f"{divided}({weights}, ")
        for of_float32, cast in (("", ""), ("__in_float32", ".float()"))
        for of_product, weights in (
            ("", f"torch.exp(hidden{cast})"),
            ("__by_a_product", f"torch.exp(scores{cast}) * visible"),
        )
        for of_sum, divided in (("", "over_the_sum"), ("__guarded", "over_the_sum_or_1"))
    }


CHANGES = (
    *OF_THE_MASK,
    *edits(told.MASK_AFTER_SOFTMAX, mask_after_softmax=(HIDDEN, "scores", ZEROED, "shares * visible")),
    *edits(
        told.RENORMALISED,
        renormalised_afterwards=(HIDDEN, "scores", ZEROED, "over_the_sum_or_1(shares * visible, dim=-1)"),
    ),
    *edits(
        told.HIDDEN_ZERO,
        hidden_scored_zero=(HIDDEN, "torch.where(visible, scores, 0.0)", *UNGUARDED),
        hidden_scored_zero__and_zeroed=(HIDDEN, "torch.where(visible, scores, 0.0)"),
    ),
    *(
        edit
        for name, number in STAND_INS.items()
        for way, pieces in (("", ()), ("_and_kept", UNGUARDED))
        for edit in edits(
            told.HIDDEN_FINITE,
            alone=name not in ("1e4", "1e9"),
            **{f"hidden_scored_low__{name}{way}": (*stand_in(number), *pieces)},
        )
    ),
    # Unguarded it is `empty_row_uniform`.
    *edits(told.HIDDEN_FINITE, alone=True, hidden_scored_low__least=(*stand_in(LEAST), ZEROED, "shares * visible")),
    *edits(told.EMPTY_ROW_NAN, empty_row_nan=UNGUARDED),
    *edits(told.EMPTY_ROW_UNIFORM, empty_row_uniform=(HIDDEN, f"torch.where(visible, scores, {LEAST})", *UNGUARDED)),
    *edits(told.WRONG_AXIS, wrong_axis=("dim=-1", "dim=-2")),
    *edits(
        "A slice begins or ends at a number below 0, which Python counts from the end. key_length - query_length is "
        "negative where there are more queries than keys: keep such a bound from falling below 0, and the first "
        "queries see nothing.",
        alone=True,
        negative_slice=("visible = causal_visible(", "visible = rows_by_slices("),
        negative_slice__of_columns=("visible = causal_visible(", "visible = columns_by_slices("),
    ),
    *edits(
        "The softmax runs over the heads. Each query shares its weight among the keys: dim=-1.",
        softmax_over_heads=("dim=-1", "dim=0"),
    ),
    *edits(
        "The exponentials are taken of the scores as they are. exp overflows, in float32 above 88 and in float16 "
        "above 11, and far below 0 all of them are 0. Subtract the row's largest visible score first, or use "
        "torch.softmax.",
        **without_a_maximum(),
    ),
    *edits(
        "No key is hidden. A query may see the keys at or before its own position only.",
        no_mask=(HIDDEN, "scores", *UNGUARDED),
    ),
    *edits("", unguarded=UNGUARDED),
)
# Two slips are looked for in a model's first style: this is for answers that leave empty rows to the softmax.
IN_UNGUARDED = tuple(
    replace(edit, pieces=(*edit.pieces, UNGUARDED))
    for edit in without(
        CHANGES,
        *("mask_after_softmax", "renormalised_afterwards", "hidden_scored_low__least"),
        *("empty_row_nan", "empty_row_uniform", "unguarded"),
    )
)
MODELS = tuple(
    model_of(
        causal_softmax,
        changes,
        parts=(causal_visible,),
        uses=(over_the_sum, over_the_sum_or_1, rows_by_slices, columns_by_slices),
    )
    for changes in (CHANGES, IN_UNGUARDED)
)
