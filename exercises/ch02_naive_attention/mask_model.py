"""The causal softmax step by step, with the slips of its mask: for exercises 2.3 and 2.5."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.ch02_naive_attention.masks import MASK_SLIPS

_SAID = {mistake.id: mistake.sentence for mistake in MASK_SLIPS}


def _mask(slips: Slips, query_length: int, key_length: int) -> torch.Tensor:
    """bool [query_length, key_length]: the pairs that are kept."""
    offset = key_length - query_length
    if slips("causal_misaligned"):
        offset = 0
    if slips("offset_reversed"):
        offset = -offset
    if slips("offset_clamped"):
        offset = max(offset, 0)
    distance = -1 if slips("diagonal_hidden") else 1 if slips("one_key_too_many") else 0
    queries, keys = torch.arange(query_length)[:, None] + offset, torch.arange(key_length)[None, :]
    return keys > queries if slips("mask_inverted") else keys <= queries + distance


def mask_model(*more: str, in_float32: bool = False) -> Model:
    """The model, called with scores [heads, query_length, key_length] and perhaps `causal`; `more` slips by name.

    in_float32: whether the steps are computed in float32 at least, and not each in the scores' own dtype.

    Styles: "unguarded" leaves a row that sees no key to the softmax; the other zeroes what is hidden once more.
    """

    def compute(slips: Slips, scores, causal=True):
        axis = -2 if slips("wrong_axis") else 0 if slips("softmax_over_heads") else -1
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) if in_float32 else scores
        if not causal or slips("no_mask", "causal_ignored"):
            return torch.softmax(wide, dim=axis).to(scores.dtype)
        visible = _mask(slips, *scores.shape[-2:]).expand(scores.shape)
        if slips("mask_after_softmax", "renormalised_afterwards"):
            kept = torch.softmax(wide, dim=axis) * visible
            if slips("renormalised_afterwards"):
                total = kept.sum(-1, keepdim=True)
                kept = kept / torch.where(total == 0, 1.0, total)
            return kept.to(scores.dtype)
        lowest = torch.finfo(scores.dtype).min
        fill = 0.0 if slips("hidden_scored_zero", "hidden_scored_zero__and_zeroed") else -math.inf
        fill = lowest if slips("empty_row_uniform") else fill
        fill = -1e4 if slips("hidden_scored_low", "hidden_scored_low__and_kept") else fill
        shares = torch.softmax(torch.where(visible, wide, fill), dim=axis)
        if slips("hidden_scored_zero", "empty_row_uniform", "hidden_scored_low__and_kept"):
            return shares.to(scores.dtype)
        if not slips("unguarded", "empty_row_nan"):
            shares = torch.where(visible, shares, 0.0)
        return shares.to(scores.dtype)

    named = (*_OF_MASKS, *(slip for slip in _MORE if slip.id in more))
    return Model(compute, named, styles=((), ("unguarded",)))


_FINITE = (
    "Hidden scores become a number, such as -1e4, that other scores can reach: where the visible ones are as low, the "
    "hidden ones weigh as much. The score that weighs nothing is minus infinity."
)
_OF_MASKS = (
    Slip("causal_misaligned", _SAID["causal_misaligned"]),
    Slip(
        "offset_clamped",
        "key_length - query_length is kept from falling below 0. With more queries than keys it is negative, and the "
        "first queries see nothing.",
    ),
    Slip("mask_inverted", _SAID["mask_inverted"]),
    Slip("diagonal_hidden", _SAID["diagonal_hidden"]),
    Slip("one_key_too_many", _SAID["one_key_too_many"]),
    Slip("mask_after_softmax", _SAID["mask_after_softmax"]),
    Slip(
        "renormalised_afterwards",
        "The softmax runs over all keys, and the hidden ones are removed afterwards. Where a hidden score is far above "
        "the visible, these underflow to 0. Set hidden scores to minus infinity before the softmax.",
    ),
    Slip("hidden_scored_zero", _SAID["hidden_scored_zero"]),
    Slip("hidden_scored_zero__and_zeroed", _SAID["hidden_scored_zero"]),
    Slip("hidden_scored_low", _FINITE),
    Slip("hidden_scored_low__and_kept", _FINITE),
    Slip("empty_row_nan", _SAID["empty_row_nan"]),
    Slip("empty_row_uniform", _SAID["empty_row_uniform"]),
    Slip("wrong_axis", _SAID["wrong_axis"]),
)
_MORE = (
    Slip(
        "offset_reversed",
        "The diagonal is shifted the wrong way: with more keys than queries it moves to the right. Query i is at "
        "i + key_length - query_length, and `tril` takes key_length - query_length as its diagonal.",
    ),
    Slip("softmax_over_heads", "The softmax runs over the heads. Each query shares its weight among the keys: dim=-1."),
    Slip("no_mask", "No key is hidden. A query may see the keys at or before its own position only."),
    Slip("causal_ignored", "`causal` has no effect: with it, a query sees no key behind its own position."),
)
