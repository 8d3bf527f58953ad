"""Exercise 2.5: the kernel of the softmax of whole rows, safe and causal."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Slip
from exercises.ch02_naive_attention.masks import MASK_SLIPS, causal_oracle, causal_visible
from exercises.ch02_naive_attention.requirements import PATIENT, OnePass
from exercises.ch02_naive_attention.slips import HEADS_MISSING, only_some_heads_written, same
from exercises.ch02_naive_attention.strides import strides_ignored, with_gaps
from exercises.topics.evidence import first_access

POWERS_OF_TWO = tuple(2**power for power in range(4, 14))


def row_softmax_oracle(scores, causal):
    return causal_oracle(scores) if causal else torch.softmax(scores, dim=-1)


def row_softmax_bytes(scores, causal):
    return 2 * scores.numel() * scores.element_size()


def row_softmax_cases(draw):
    half, prime = torch.float16, draw.choice((67, 131, 257))
    ascending = torch.linspace(-90.0, 90.0, 200).expand(1, 2, 200) + draw.normal(1, 2, 200, scale=0.01)
    cases = [
        Case("2 heads, 6 rows of 128", (draw.normal(2, 6, 128), False), metered=True),
        Case("one row of one key", (draw.normal(1, 1, 1), False)),
        Case(
            f"5 rows of {prime}, a prime, scores below zero",
            (draw.normal(1, 5, prime, shift=-8.0), False),
            metered=True,
        ),
        Case("scores of ±200", (draw.normal(2, 3, 100, scale=70.0), False)),
        Case("scores near +1000", (draw.normal(1, 4, 129, shift=1000.0), False)),
        Case("rows that climb", (ascending, False)),
        Case("rows that descend", (ascending.flip(-1).contiguous(), False)),
        Case("equal scores", (draw.normal(2, 3, 1).expand(2, 3, 77).contiguous(), False)),
        Case("a gap behind each row", (with_gaps(draw.normal(2, 5, 129), 31), False)),
        Case("1100 keys, float16", (draw.normal(1, 3, 1100, dtype=half, scale=3.0), False), metered=True),
        Case("causal, 9 × 9", (draw.normal(2, 9, 9, scale=2.0), True)),
        Case(
            "causal, 5 queries at the end of 37 keys, a gap behind each row",
            (with_gaps(draw.normal(2, 5, 37), 5), True),
        ),
        Case("causal, 7 queries, 4 keys: three see nothing", (draw.normal(2, 7, 4), True)),
    ]
    if draw.on_gpu:
        cases.append(Case("float16, 2 heads, 64 rows of 8191", (draw.normal(2, 64, 8191, dtype=half), False)))
        cases.append(Case("causal, 1025 × 1025", (draw.normal(1, 1025, 1025), True)))
    return cases


def _no_maximum(scores, causal):
    """exp without the maximum, in the kernel's float32: infinities over infinities."""
    weights = torch.exp(scores.float())
    if causal:
        weights = weights * causal_visible(*scores.shape[-2:])
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / torch.where(total == 0, 1.0, total)).double()


def _padded_with_zeros(scores, causal, every_hidden_key):
    """The row sits in a tile of the next power of two, where keys that do not exist score 0, not minus infinity."""
    width = scores.shape[-1]
    block = 1 << max(0, width - 1).bit_length()
    visible = causal_visible(*scores.shape[-2:]) if causal else torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal and not every_hidden_key:
        return causal_oracle(scores)  # the causal mask hides what lies past the end as well
    padded = torch.zeros(*scores.shape[:-1], block, dtype=scores.dtype)
    padded[..., :width] = torch.where(visible, scores, 0.0)
    return torch.softmax(padded, dim=-1)[..., :width]


def _first_tile_of_row(case, seen, got):
    scores, causal = case.args
    width = scores.shape[-1]
    if not isinstance(got, torch.Tensor) or got.shape != scores.shape or causal:
        return False
    for block in POWERS_OF_TWO:
        if block < width:
            expected = torch.full(scores.shape, math.nan, dtype=torch.float64)
            expected[..., :block] = torch.softmax(scores[..., :block].double(), dim=-1)
            if got[..., block:].isnan().all() and same(got, expected):
                return True
    return False


def _not_normalised(scores, causal):
    visible = causal_visible(*scores.shape[-2:]) if causal else torch.ones(scores.shape[-2:], dtype=torch.bool)
    hidden = scores.masked_fill(~visible, -math.inf)
    largest = hidden.amax(dim=-1, keepdim=True)
    return torch.exp(hidden - torch.where(largest == -math.inf, 0.0, largest))


def _no_causal(scores, causal):
    return torch.softmax(scores, dim=-1)


EXERCISE = Exercise(
    id="2.5",
    title="The softmax kernel, safe and causal",
    entries=("row_softmax",),
    cases=row_softmax_cases,
    oracle=row_softmax_oracle,
    needs=TRITON,
    limits=PATIENT,
    requirements=(
        LaunchesTriton(),
        Forbids(("_softmax", "softmax", "exp", "logsumexp", "log_softmax", "_log_softmax")),
        OnePass(row_softmax_bytes),
    ),
    hints=(
        "One program owns one row and holds it whole, in a tile of `triton.next_power_of_2(key_length)`. So it "
        "needs one load, one store, and no loop.",
        "Three numbers are taken from the row: its maximum (`tl.max(row, axis=0)`), the weights exp(row - "
        "maximum), their sum. Compute them in float32, whatever the scores are stored in.",
        "A place of the tile where no key is must not count, neither in the maximum nor in the sum. Which `other=` "
        "makes exp give 0 there?",
        "The causal mask is one comparison: `keys <= row + key_length - query_length`. Put it into the load's "
        "mask, and hidden keys are not even read. The store still covers all keys, since hidden ones must become "
        "0.",
        'Rows that see no key: `largest = tl.where(largest == float("-inf"), 0.0, largest)`, so that exp(-inf - '
        "0) = 0, and `total = tl.where(total == 0.0, 1.0, total)` before the division.",
    ),
    slips=(
        *MASK_SLIPS,
        Slip(
            "no_maximum",
            "The maximum was not subtracted. exp(89) is already more than float32 holds; the row then reads "
            "infinity / infinity. Subtract the row's maximum first: the result is the same and no exponent is "
            "above 0.",
            formula=_no_maximum,
        ),
        Slip(
            "tail_scored_zero",
            "Keys that do not exist were scored 0: the tile is wider than the row, and the rest of it came from "
            '`other=0.0`. Each adds exp(0 - maximum) to the sum. Load with `other=float("-inf")`.',
            formula=lambda scores, causal: _padded_with_zeros(scores, causal, every_hidden_key=False),
        ),
        Slip(
            "hidden_and_tail_scored_zero",
            "Hidden keys and keys that do not exist were scored 0: the load's mask is right and its `other=0.0` is "
            'not. A score of 0 weighs exp(0 - maximum). Load with `other=float("-inf")`.',
            formula=lambda scores, causal: _padded_with_zeros(scores, causal, every_hidden_key=True),
        ),
        Slip(
            "not_normalised",
            "The weights were not divided by their sum: the largest of each row is 1.",
            formula=_not_normalised,
        ),
        Slip(
            "causal_ignored",
            "`causal` has no effect: with it, a query sees no key behind its own position.",
            formula=_no_causal,
        ),
    ),
    mistakes=(
        Mistake(
            "only_first_tile",
            "Only the first tile of each row was used, and the rest of the row was never written. Choose the tile "
            "by the row: `triton.next_power_of_2(key_length)`.",
            when=_first_tile_of_row,
            every=True,
        ),
        Mistake(
            "strides_ignored",
            "Rows with gaps between them were read as if they touched. Row r of head h begins at `h * stride(0) + "
            "r * stride(1)`.",
            when=strides_ignored(row_softmax_oracle, (0,)),
        ),
        Mistake(
            "tail_not_masked",
            "The load reaches past the end of the scores: mask it with `keys < key_length`. If "
            "it is masked, are two strides or the grid's axes exchanged?",
            when=first_access("reads"),
        ),
        Mistake(
            "out_of_bounds_write",
            "The store reaches past the end of the result: mask it with `keys < "
            "key_length`. If it is masked, are two strides or the grid's axes exchanged?",
            when=first_access("writes"),
        ),
        Mistake("only_first_head", HEADS_MISSING, when=only_some_heads_written, every=True),
    ),
)
