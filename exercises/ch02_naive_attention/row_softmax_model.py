"""The softmax kernel of exercise 2.5, and what can go wrong in it. The slips of the causal mask are those of 2.3."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.edits import DoesNotRun, edits, model_of
from exercises.ch02_naive_attention import masks as told
from exercises.ch02_naive_attention.masks import OF_THE_MASK, causal_visible, over_the_sum_or_1
from exercises.ch02_naive_attention.product_slips import HEADS_MISSING
from exercises.topics.attention_steps import ALL, STAND_INS
from exercises.topics.pointers import load, put


def row_softmax(scores, causal, memory=False):
    """All programs at once, [query_length, heads, block]. memory: whether the result is read as contiguous memory."""
    heads, query_length, key_length = scores.shape
    block = 1 << (key_length - 1).bit_length()
    row, head, keys = torch.arange(query_length)[:, None], torch.arange(heads), torch.arange(block)
    inside = keys < key_length
    visible = causal_visible(query_length, key_length, block)[:, None] if causal else ALL
    places = head * scores.stride(0) + row * scores.stride(1)
    loaded = load(scores, places[..., None] + keys, inside, -math.inf).float()
    counted = torch.where(visible, loaded, -math.inf)
    top = counted.amax(-1, keepdim=True)
    reference = torch.where(top == -math.inf, 0.0, top)
    weights = torch.exp(counted - reference)
    total = weights.sum(-1, keepdim=True)
    divisor = torch.where(total == 0, 1.0, total)
    shares = weights / divisor
    result = torch.full(scores.shape, torch.nan, dtype=scores.dtype)
    rows = head * result.stride(0) + row * result.stride(1)
    stored = keys < key_length
    put(result, rows[..., None] + keys, shares, stored)
    return result


def smallest(counted, key_length):
    """The minimum of each tile. In one that is always wider than the row it is -inf: that is `no_maximum`."""
    if counted.shape[-1] >= 2 * key_length:
        raise DoesNotRun
    return counted.amin(-1, keepdim=True)


def in_memory_like(scores, result):
    """The memory of a result that has the strides of the scores, read row after row."""
    return torch.empty_like(scores).copy_(result).as_strided(result.shape, result.stride())


BLOCK, STORED = "1 << (key_length - 1).bit_length()", "shares, stored"
HEAD_STRIDE, ROW_STRIDE = "scores.stride(0)", "scores.stride(1)"
RESULT_HEAD_STRIDE, RESULT_ROW_STRIDE = "result.stride(0)", "result.stride(1)"
INSIDE, TAIL, COUNTED = "inside = keys < key_length", "inside, -math.inf", "torch.where(visible, loaded, -math.inf)"
TOP, SHARES = "counted.amax(-1, keepdim=True)", "weights / divisor"
UNGUARDED = ("torch.where(top == -math.inf, 0.0, top)", "top", "torch.where(total == 0, 1.0, total)", "total")
ZEROED = (SHARES, f"torch.where(visible, {SHARES}, 0.0)")
NARROW = (
    "Only the first tile of each row was computed, and the rest of the row was never written. Make the tile as wide "
    "as the row: `triton.next_power_of_2(key_length)`."
)


def hidden_alone(number) -> tuple[str, str]:
    """A number for the scores of hidden keys; places past the end stay -inf."""
    return COUNTED, f"torch.where(visible | ~inside, loaded, {number})"


def hidden_and_tail(number) -> tuple[str, str]:
    return COUNTED, f"torch.where(visible & inside, loaded, {number})"


def as_other(number) -> tuple[str, ...]:
    """A number by `other=`, which is cast to the dtype of the scores."""
    return TAIL, f"visible & inside, {number}", COUNTED, "loaded"


CHANGES = (
    *edits(HEADS_MISSING, only_first_head=(STORED, f"{STORED} & (head[:, None] == 0)")),
    *edits(
        "Only the first row of each head was written. The grid has a program for each row: (query_length, heads).",
        only_first_row=(STORED, f"{STORED} & (row[..., None] == 0)"),
    ),
    *edits(
        "Every head's rows were stored in head 0's place, where the last ones stay. Add `head * result_head_stride` to "
        "the result's pointer.",
        stored_in_one_head=(RESULT_HEAD_STRIDE, "0"),
    ),
    *edits(
        "Every head was computed from the scores of head 0. Add `head * scores_head_stride` to the row.",
        head_ignored=(HEAD_STRIDE, "0"),
    ),
    *edits(
        "Every row was computed from a head's row 0. Add `row * scores_row_stride` to the pointer.",
        row_ignored=(ROW_STRIDE, "0"),
    ),
    *edits(
        "The weights were not divided by their sum: the largest of each row is 1.", not_normalised=(SHARES, "weights")
    ),
    *edits(
        "The maximum was not subtracted. exp(89) is already more than float32 holds; the row then reads infinity / "
        "infinity. Subtract the row's maximum first: the result is the same and no exponent is above 0.",
        no_maximum=("counted - reference", "counted"),
    ),
    *edits(
        "The smallest score of the row was subtracted where the largest belongs: `tl.max(scores, axis=0)`.",
        minimum_for_maximum=(TOP, "smallest(counted, key_length)"),
    ),
    *edits(
        "The maximum was added to the scores. Subtract it: no exponent is then above 0.",
        maximum_added=("counted - reference", "counted + reference"),
    ),
    *edits(
        "The maximum is never below 0. Where all scores of a row lie far below 0, every exponential underflows and the "
        "sum is 0. Take the row's own maximum.",
        maximum_starts_at_zero=(TOP, f"{TOP}.clamp(min=0.0)"),
    ),
    *edits(
        "Zeros from `other=0.0` take part in the maximum. Where the row's scores lie far below 0, every exponential "
        'underflows and the sum is 0. Load with `other=float("-inf")`.',
        zeros_in_the_maximum=(TOP, "torch.where(visible & inside, loaded, 0.0).amax(-1, keepdim=True)"),
    ),
    *edits(
        "The exponential is tl.exp2 of natural scores, and 2^x is not e^x. Take tl.exp, or multiply the scores by "
        "log2(e) first.",
        base_2=("torch.exp(", "torch.exp2("),
    ),
    *edits(
        "The tile is wider than the row, and its places past the last key were loaded as 0 (`other=0.0`). Each of them "
        'adds exp(0 - maximum) to the sum. Load with `other=float("-inf")`.',
        tail_scored_zero=(TAIL, "inside, 0.0"),
        tail_scored_zero__always=(TAIL, "inside, 0.0", COUNTED, "torch.where(visible | ~inside, loaded, -math.inf)"),
    ),
    *edits(
        "Hidden keys, and places past the last key, were loaded as 0, by `other=0.0`. A score of 0 has the weight "
        'exp(0 - maximum), which is not 0. Load with `other=float("-inf")`.',
        hidden_and_tail_scored_zero=hidden_and_tail(0.0),
    ),
    *edits(
        "`causal` has no effect: with it, a query sees no key behind its own position.",
        causal_ignored=("if causal", "if False"),
    ),
    *edits(
        "The mask is there without `causal` too. Hide keys where CAUSAL says so, and only there.",
        causal_always=("if causal", "if True"),
    ),
    *OF_THE_MASK,
    *edits(told.MASK_AFTER_SOFTMAX, mask_after_softmax=(COUNTED, "loaded", *ZEROED)),
    *edits(
        told.RENORMALISED,
        renormalised_afterwards=(COUNTED, "loaded", SHARES, f"over_the_sum_or_1({ZEROED[1]}, -1)"),
    ),
    *edits(
        told.HIDDEN_ZERO,
        hidden_scored_zero=hidden_alone(0.0),
        hidden_scored_zero__and_zeroed=(*hidden_alone(0.0), *ZEROED),
    ),
    *edits(told.EMPTY_ROW_NAN, empty_row_nan=UNGUARDED),
    *edits(told.EMPTY_ROW_UNIFORM, empty_row_uniform=hidden_alone(-1e30)),
    *edits(told.WRONG_AXIS, wrong_axis=("(-1, keepdim=True)", "(0, keepdim=True)")),
    *edits(
        told.HIDDEN_FINITE,
        alone=True,
        **{
            f"hidden_scored_low__{name}{way}": pieces
            for name, number in STAND_INS.items()
            for way, pieces in (
                ("", hidden_and_tail(number)),
                ("_hidden_alone", hidden_alone(number)),
                ("_and_zeroed", (*hidden_and_tail(number), *ZEROED)),
                ("_as_other", as_other(number)),
            )
        },
    ),
    *edits(
        told.EMPTY_ROW_UNIFORM,
        empty_row_uniform__tail_too=hidden_and_tail(-1e30),
        empty_row_uniform__as_other=as_other(-1e30),
    ),
    *edits(
        "Hidden keys were never written: the store takes the load's mask. They are 0 in the result, so store with "
        "`keys < key_length`.",
        hidden_not_stored=(STORED, f"{STORED} & visible"),
    ),
    *edits(
        "A mask compares the keys with query_length, the number of rows. A row has key_length elements: `keys < "
        "key_length`.",
        query_length_for_key_length=(INSIDE, "inside = keys < query_length"),
        query_length_for_key_length__in_the_store=("keys < key_length", "keys < query_length"),
    ),
    *edits(
        NARROW,
        alone=True,
        **{f"only_first_tile__{2**power}": (BLOCK, f"min({2**power}, {BLOCK})") for power in range(4, 14)},
    ),
    *edits(NARROW, only_first_tile__half=(BLOCK, f"max(1, ({BLOCK}) // 2)")),
    *edits(
        "The scores were read as if they were contiguous. Row r of head h begins at `h * stride(0) + r * stride(1)`.",
        strides_ignored=(HEAD_STRIDE, "query_length * key_length", ROW_STRIDE, "key_length"),
    ),
    *edits(
        "The rows of scores were read as if there were no gap between them. They lie scores_row_stride elements apart.",
        strides_ignored__rows=(ROW_STRIDE, "key_length"),
    ),
    *edits(
        "The heads of the scores were read as if there were no gap between them. They lie scores_head_stride elements "
        "apart.",
        strides_ignored__heads=(HEAD_STRIDE, "query_length * key_length"),
    ),
    *edits(
        "The heads were read as if they lay query_length rows apart. They lie scores_head_stride elements apart.",
        strides_ignored__heads_by_rows=(HEAD_STRIDE, f"query_length * {ROW_STRIDE}"),
    ),
    *edits(
        "The strides of rows and of heads are exchanged: row r of head h begins at `h * stride(0) + r * stride(1)`.",
        strides_exchanged=(HEAD_STRIDE, ROW_STRIDE, ROW_STRIDE, HEAD_STRIDE),
    ),
    *edits(
        "The result lies in memory as the scores do: `empty_like` keeps their strides. It must be contiguous: use "
        "torch.empty with the shape of the scores.",
        result_not_contiguous=("return result", "return in_memory_like(scores, result) if memory else result"),
    ),
    *edits(
        "The result was stored by the strides of the scores. It has strides of its own: result_head_stride and "
        "result_row_stride.",
        result_strides=(RESULT_HEAD_STRIDE, HEAD_STRIDE, RESULT_ROW_STRIDE, ROW_STRIDE),
    ),
    *edits(
        "The result was stored by the head stride of the scores. It has one of its own: result_head_stride.",
        result_strides__heads=(RESULT_HEAD_STRIDE, HEAD_STRIDE),
    ),
    *edits(
        "The result was stored by the row stride of the scores. It has one of its own: result_row_stride.",
        result_strides__rows=(RESULT_ROW_STRIDE, ROW_STRIDE),
    ),
    *edits("", unguarded=UNGUARDED, twice_as_wide=(BLOCK, "2 << (key_length - 1).bit_length()")),
)
MODEL = model_of(row_softmax, CHANGES, parts=(causal_visible,), uses=(over_the_sum_or_1, smallest, in_memory_like))
