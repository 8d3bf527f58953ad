"""The softmax kernel of exercise 2.5 step by step, with what can go wrong at each step.

A program holds one row in a tile of the next power of two. All rows are computed at once, in float32, on the case's own
tensor: a wrong stride reads what the kernel reads. The slips of the causal mask are those of exercise 2.3.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.ch02_naive_attention.mask_model import FINITE, MASK_SLIPS, causal_mask
from exercises.ch02_naive_attention.product_slips import HEADS_MISSING
from exercises.topics.attention_steps import STAND_INS
from exercises.topics.memory import load, store, tile_offsets

WIDTHS = tuple(2**power for power in range(4, 14))  # tiles that are too narrow for some rows
LOW_WAYS = ("", "_hidden_alone", "_and_zeroed", "_as_other")  # `other=` is cast to the scores' dtype
LOW = tuple(f"hidden_scored_low__{name}{way}" for name in STAND_INS for way in LOW_WAYS)


def row_softmax_model() -> Model:
    """The model, called with scores, causal and whether the result's memory is read row after row.

    Styles: "unguarded" measures a row that sees no key from minus infinity, and divides by a sum of 0; the tile may be
    twice as wide as it need be.
    """
    return Model(_compute, SLIPS, styles=((), ("unguarded",), ("twice_as_wide",)))


def _compute(s: Slips, scores: torch.Tensor, causal: bool, memory: bool = False) -> torch.Tensor:
    heads, query_length, key_length = scores.shape
    causal = causal and not s("causal_ignored") or s("causal_always")
    block = (1 << (key_length - 1).bit_length()) * (2 if s("twice_as_wide") else 1)
    block = next((width for width in WIDTHS if width < key_length and s(f"only_first_tile__{width}")), block)
    if s("only_first_tile__half"):
        block = max(1, block // 2)
    by_queries = s("query_length_for_key_length", "query_length_for_key_length__in_the_store")
    inside = torch.arange(block) < (query_length if by_queries else key_length)  # [block]
    visible = inside.expand(query_length, block)  # [query_length, block]
    if causal:
        visible = visible & causal_mask(s, query_length, key_length, block)
    x = _loaded(s, scores, query_length, inside)  # [heads, query_length, block]
    if s("wrong_axis"):
        return _over_queries(s, x, visible)[..., :key_length].to(scores.dtype)

    afterwards = s("mask_after_softmax", "renormalised_afterwards")
    counted = inside.expand_as(visible) if afterwards else visible
    hidden, tail = _fills(s, causal, scores.dtype)
    x = torch.where(counted, x, torch.where(inside, hidden, tail))
    weights, total = _weights(s, x, counted)
    if s(*(name for name in LOW if name.endswith("_and_zeroed")), "hidden_scored_zero__and_zeroed"):
        weights = torch.where(visible, weights, 0.0)
    unguarded = s("unguarded", "empty_row_nan")
    result = weights if s("not_normalised") else weights / (total if unguarded else torch.where(total == 0, 1.0, total))
    if afterwards:
        result = torch.where(visible, result, 0.0)
    if s("renormalised_afterwards"):
        kept = result.sum(-1, keepdim=True)
        result = result / torch.where(kept == 0, 1.0, kept)
    if s("hidden_not_stored"):
        result = torch.where(visible, result, math.nan)
    if s("query_length_for_key_length__in_the_store"):
        result = torch.where(inside, result, math.nan)
    result = torch.nn.functional.pad(result[..., :key_length], (0, max(0, key_length - block)), value=math.nan)
    return _stored(s, scores, result.to(scores.dtype), memory)


def _loaded(s: Slips, scores: torch.Tensor, rows: int, inside: torch.Tensor) -> torch.Tensor:
    """float32 [heads, rows, block] as the kernel's pointers reach them."""
    heads, key_length = scores.shape[0], scores.shape[2]
    head, row, _ = scores.stride()
    if s("strides_ignored"):
        head, row = rows * key_length, key_length
    if s("strides_ignored__rows"):
        row = key_length
    if s("strides_ignored__heads"):
        head = rows * key_length
    if s("strides_ignored__heads_by_rows"):
        head = rows * row
    if s("strides_exchanged"):
        head, row = row, head
    if s("head_ignored"):
        head = 0
    if s("row_ignored"):
        row = 0
    return load(s, scores, tile_offsets(rows, len(inside), (head, row, 1), heads), inside).float()


def _fills(s: Slips, causal: bool, dtype: torch.dtype) -> tuple[float, float]:
    """What stands for the score of a hidden key, and of a key that does not exist."""
    hidden = tail = -math.inf
    for name, number in STAND_INS.items():
        if s(*(f"hidden_scored_low__{name}{way}" for way in LOW_WAYS)):
            hidden, tail = number, -math.inf if s(f"hidden_scored_low__{name}_hidden_alone") else number
        if s(f"hidden_scored_low__{name}_as_other"):
            hidden = tail = float(torch.tensor(number).to(dtype))
    if s("hidden_scored_zero", "hidden_scored_zero__and_zeroed", "hidden_and_tail_scored_zero"):
        hidden = 0.0
    if s("hidden_and_tail_scored_zero", "tail_scored_zero__always") or s("tail_scored_zero") and not causal:
        tail = 0.0  # a causal mask hides what lies past the end as well, where it is applied after the load
    if s("empty_row_uniform"):
        hidden = -1e30
    if s("empty_row_uniform__tail_too", "empty_row_uniform__as_other"):
        hidden = tail = float(torch.tensor(-1e30).to(dtype)) if s("empty_row_uniform__as_other") else -1e30
    return hidden, tail


def _weights(s: Slips, x: torch.Tensor, counted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """exp(score - maximum), and their sum [..., 1]."""
    lowest = s("minimum_for_maximum") and not s("twice_as_wide")  # there it is -inf, and as good as no maximum
    top = x.amin(-1, keepdim=True) if lowest else x.amax(-1, keepdim=True)
    if s("zeros_in_the_maximum") and not bool(counted.all()):
        top = torch.where(counted.all(-1, keepdim=True), top, top.clamp(min=0.0))
    if s("maximum_starts_at_zero"):
        top = top.clamp(min=0.0)
    if not s("unguarded", "empty_row_nan"):
        top = torch.where(top == -math.inf, 0.0, top)
    if s("no_maximum"):
        top = torch.zeros_like(top)
    weights = torch.exp2(x - top) if s("base_2") else torch.exp(x - top)
    if s("maximum_added"):
        weights = torch.exp(x + top)
    return weights, weights.sum(-1, keepdim=True)


def _over_queries(s: Slips, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    shares = torch.softmax(torch.where(visible, x, -math.inf), dim=-2)
    return shares if s("unguarded") else torch.where(visible, shares, 0.0)


def _stored(s: Slips, scores: torch.Tensor, result: torch.Tensor, memory: bool) -> torch.Tensor:
    """The result as it lies in memory; NaN where no one wrote."""
    heads, rows, columns = result.shape
    if s("only_first_head"):
        result[1:] = math.nan
    if s("only_first_row"):
        result[:, 1:] = math.nan
    if s("result_not_contiguous"):
        like = torch.empty_like(scores)
        return like.copy_(result).as_strided(result.shape, result.stride()) if memory else result
    own = head, row = result.stride()[:2]
    if s("result_strides", "result_strides__heads"):
        head = scores.stride(0)
    if s("result_strides", "result_strides__rows"):
        row = scores.stride(1)
    if s("stored_in_one_head"):
        head = 0
    if (head, row) == own:
        return result
    program = torch.arange(rows)[None, :, None] * heads + torch.arange(heads)[:, None, None]
    return store(s, result, tile_offsets(rows, columns, (head, row, 1), heads), program)


_TAIL_ZERO = (
    "The tile is wider than the row, and its places past the last key were loaded as 0 (`other=0.0`). Each of them "
    'adds exp(0 - maximum) to the sum. Load with `other=float("-inf")`.'
)
_NARROW = (
    "Only the first tile of each row was computed, and the rest of the row was never written. Make the tile as wide "
    "as the row: `triton.next_power_of_2(key_length)`."
)
_UNIFORM = next(slip.sentence for slip in MASK_SLIPS if slip.id == "empty_row_uniform")
SLIPS = (
    Slip("only_first_head", HEADS_MISSING),
    Slip(
        "only_first_row",
        "Only the first row of each head was written. The grid has a program for each row: (query_length, heads).",
    ),
    Slip(
        "stored_in_one_head",
        "Every head's rows were stored in head 0's place, where the last ones stay. Add `head * result_head_stride` to "
        "the result's pointer.",
    ),
    Slip(
        "head_ignored", "Every head was computed from the scores of head 0. Add `head * scores_head_stride` to the row."
    ),
    Slip("row_ignored", "Every row was computed from a head's row 0. Add `row * scores_row_stride` to the pointer."),
    Slip("not_normalised", "The weights were not divided by their sum: the largest of each row is 1."),
    Slip(
        "no_maximum",
        "The maximum was not subtracted. exp(89) is already more than float32 holds; the row then reads infinity / "
        "infinity. Subtract the row's maximum first: the result is the same and no exponent is above 0.",
    ),
    Slip(
        "minimum_for_maximum",
        "The smallest score of the row was subtracted where the largest belongs: `tl.max(scores, axis=0)`.",
    ),
    Slip("maximum_added", "The maximum was added to the scores. Subtract it: no exponent is then above 0."),
    Slip(
        "maximum_starts_at_zero",
        "The maximum is never below 0. Where all scores of a row lie far below 0, every exponential underflows and "
        "the sum is 0. Take the row's own maximum.",
    ),
    Slip(
        "zeros_in_the_maximum",
        "Zeros from `other=0.0` take part in the maximum. Where the row's scores lie far below 0, every exponential "
        'underflows and the sum is 0. Load with `other=float("-inf")`.',
    ),
    Slip(
        "base_2",
        "The exponential is tl.exp2 of natural scores, and 2^x is not e^x. Take tl.exp, or multiply the scores by "
        "log2(e) first.",
    ),
    Slip("tail_scored_zero", _TAIL_ZERO),
    Slip("tail_scored_zero__always", _TAIL_ZERO),
    Slip(
        "hidden_and_tail_scored_zero",
        "Hidden keys, and places past the last key, were loaded as 0, by `other=0.0`. A score of 0 has the weight "
        'exp(0 - maximum), which is not 0. Load with `other=float("-inf")`.',
    ),
    Slip("causal_ignored", "`causal` has no effect: with it, a query sees no key behind its own position."),
    Slip("causal_always", "The mask is there without `causal` too. Hide keys where CAUSAL says so, and only there."),
    *(slip for slip in MASK_SLIPS if slip.mistake != "hidden_scored_low"),
    *(Slip(name, FINITE, alone=True) for name in LOW),
    Slip("empty_row_uniform__tail_too", _UNIFORM),
    Slip("empty_row_uniform__as_other", _UNIFORM),
    Slip(
        "hidden_not_stored",
        "Hidden keys were never written: the store takes the load's mask. They are 0 in the result, so store with "
        "`keys < key_length`.",
    ),
    *(
        Slip(
            f"query_length_for_key_length{way}",
            "A mask compares the keys with query_length, the number of rows. A row has key_length elements: `keys < "
            "key_length`.",
        )
        for way in ("", "__in_the_store")
    ),
    *(Slip(f"only_first_tile__{width}", _NARROW, alone=True) for width in WIDTHS),
    Slip("only_first_tile__half", _NARROW),
    Slip(
        "strides_ignored",
        "The scores were read as if they were contiguous. Row r of head h begins at `h * stride(0) + r * stride(1)`.",
    ),
    Slip(
        "strides_ignored__rows",
        "The rows of scores were read as if there were no gap between them. They lie scores_row_stride elements apart.",
    ),
    Slip(
        "strides_ignored__heads",
        "The heads of the scores were read as if there were no gap between them. They lie scores_head_stride elements "
        "apart.",
    ),
    Slip(
        "strides_ignored__heads_by_rows",
        "The heads were read as if they lay query_length rows apart. They lie scores_head_stride elements apart.",
    ),
    Slip(
        "strides_exchanged",
        "The strides of rows and of heads are exchanged: row r of head h begins at `h * stride(0) + r * stride(1)`.",
    ),
    Slip(
        "result_not_contiguous",
        "The result lies in memory as the scores do: `empty_like` keeps their strides. It must be contiguous: use "
        "torch.empty with the shape of the scores.",
    ),
    Slip(
        "result_strides",
        "The result was stored by the strides of the scores. It has strides of its own: result_head_stride and "
        "result_row_stride.",
    ),
    Slip(
        "result_strides__heads",
        "The result was stored by the head stride of the scores. It has one of its own: result_head_stride.",
    ),
    Slip(
        "result_strides__rows",
        "The result was stored by the row stride of the scores. It has one of its own: result_row_stride.",
    ),
)
