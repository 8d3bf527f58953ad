"""Exercise 2.3: the causal mask, in PyTorch."""

from __future__ import annotations

import math

import torch

from course_lib.checker import Case, Exercise, Forbids, Mistake
from exercises.ch02_naive_attention.masks import MASK_MISTAKES, causal_oracle, masked_softmax, over, positions


def causal_cases(draw):
    prime = draw.choice((31, 37, 61))
    return [
        Case("2 heads, 6 queries, 6 keys", (draw.normal(2, 6, 6),)),
        Case("5 queries at the end of 12 keys", (draw.normal(3, 5, 12),)),
        Case("a single query against 9 keys", (draw.normal(2, 1, 9),)),
        Case("one query, one key", (draw.normal(1, 1, 1),)),
        Case(f"{prime} × {prime}, scores near 1000", (draw.normal(2, prime, prime, shift=1000.0, scale=5.0),)),
        Case("scores near -200, 8 × 21", (draw.normal(2, 8, 21, shift=-200.0, scale=3.0),)),
        Case("7 queries, 4 keys: the first three see nothing", (draw.normal(2, 7, 4),)),
        Case("float16, 17 × 33", (draw.normal(2, 17, 33, dtype=torch.float16),)),
    ]


def _shifted_back(scores):
    queries, keys = positions(*scores.shape[-2:])
    return keys <= queries - 2 * (scores.shape[-1] - scores.shape[-2])


EXERCISE = Exercise(
    id="2.3",
    title="The causal mask",
    entries=("causal_softmax",),
    cases=causal_cases,
    oracle=causal_oracle,
    requirements=(Forbids(("scaled_dot_product_attention", "_scaled_dot_product")),),
    hints=(
        "Draw 3 queries against 5 keys. Which keys may the last query see? Which the first? The last query is the "
        "newest token.",
        "Give every query its position among the keys: `torch.arange(query_length) + key_length - query_length`, "
        "as a column; the keys' positions are a row. Comparing them gives the mask, [query_length, key_length].",
        "Hide before the softmax: `scores.masked_fill(~visible, -math.inf)`. Then the hidden keys weigh exp(-inf) "
        "= 0 and the rest adds up to 1.",
        "A row of nothing but minus infinities comes out of the softmax as NaN. Find these rows from the mask "
        "(`~visible.any(dim=-1, keepdim=True)`) and fill them with zeros afterwards.",
        "`visible = keys <= queries`; `probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), "
        "dim=-1)`; `return probabilities.masked_fill(~visible, 0)`. A hidden pair has the probability 0 in any "
        "case, so one fill mends the empty rows too.",
    ),
    mistakes=(
        *MASK_MISTAKES,
        Mistake(
            "offset_reversed",
            "The diagonal is shifted the wrong way: with more keys than queries it moves to the right. Query i is at "
            "i + key_length - query_length, and `tril` takes key_length - query_length as its diagonal.",
            result=(
                lambda scores: masked_softmax(scores, _shifted_back(scores)),
                lambda scores: masked_softmax(scores, _shifted_back(scores), empty=math.nan),
            ),
        ),
        Mistake(
            "softmax_over_heads",
            "The softmax runs over the heads. Each query shares its weight among the keys: dim=-1.",
            result=lambda scores: over(0)(scores) if scores.shape[0] > 1 else None,
        ),
        Mistake(
            "no_mask",
            "No key is hidden. A query may see the keys at or before its own position only.",
            result=lambda scores: torch.softmax(scores, dim=-1),
        ),
    ),
)
