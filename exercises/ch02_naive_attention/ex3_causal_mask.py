"""Exercise 2.3: the causal mask, in PyTorch."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Forbids
from course_lib.checker.specification.contract import Contract
from exercises.ch02_naive_attention.causal_slips import MODELS
from exercises.ch02_naive_attention.contracts import SCORES, by_log_sum_exp, lowest
from exercises.ch02_naive_attention.masks import causal_softmax, causal_visible


def causal_cases(draw):
    prime = draw.choice((31, 37, 61))
    return [
        Case("2 heads, 6 queries, 6 keys", (draw.normal(2, 6, 6),)),
        Case("5 queries at the end of 12 keys", (draw.normal(3, 5, 12),)),
        Case("a single query against 9 keys", (draw.normal(2, 1, 9),)),
        Case("one query, one key", (draw.normal(1, 1, 1),)),
        Case(f"{prime} × {prime}, scores near 1000", (draw.normal(2, prime, prime, shift=1000.0, scale=5.0),)),
        Case("scores near -200, 8 × 21", (draw.normal(2, 8, 21, shift=-200.0, scale=3.0),)),
        Case("scores between -1e20 and -2e20, 8 × 8", (draw.uniform(2, 8, 8, low=-2e20, high=-1e20),)),
        Case("7 queries, 4 keys: the first three see nothing", (draw.normal(2, 7, 4),)),
        Case("float16, 17 × 33", (draw.normal(2, 17, 33, dtype=torch.float16),)),
        Case("float16, 6 × 6, scores near its lowest number", (lowest(draw, 2, 6, 6).half(),)),
    ]


def causal_by_log_sum_exp(scores):
    return by_log_sum_exp(scores, causal_visible(*scores.shape[-2:], scores.shape[-1]))


def causal_in_float32(scores):
    """float64 scores taken to float32 and back, with all that this may be off by."""
    return causal_by_log_sum_exp(scores.float())


def drawn_scores(draw, heads, query_length, key_length, dtype, scores):
    return (scores(draw, heads, query_length, key_length).to(dtype),)


CONTRACT = Contract(
    drawn_scores,
    choices={
        "heads": (1, 2, 3),
        "query_length": (1, 2, 7, 33),
        "key_length": (1, 5, 33, 64),
        "dtype": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
        "scores": SCORES,
    },
    says={"query_length": "any lengths", "key_length": "any lengths", "dtype": "any float dtype", "scores": "any size"},
    most=24,
)


EXERCISE = Exercise(
    id="2.3",
    title="The causal mask",
    entries=("causal_softmax",),
    cases=causal_cases,
    oracle=causal_softmax,
    contracts=(CONTRACT,),
    plain=(causal_by_log_sum_exp, causal_in_float32),
    models=MODELS,
    requirements=(Forbids(("scaled_dot_product_attention", "_scaled_dot_product")),),
    hints=(
        "Draw 3 queries against 5 keys. The last query is the newest token. Which keys may it see? Which keys may the "
        "first query see?",
        "Give every query its position among the keys: `torch.arange(query_length) + key_length - query_length`, as a "
        "column. The keys' positions are a row. Compare the two, and you have the mask, [query_length, key_length].",
        "Hide the keys before the softmax: `scores.masked_fill(~visible, -math.inf)`. Then the hidden keys have the "
        "weight exp(-inf) = 0, and the rest adds up to 1.",
        "A row of nothing but minus infinities comes out of the softmax as NaN. Find these rows from the mask "
        "(`~visible.any(dim=-1, keepdim=True)`) and fill them with zeros afterwards.",
        "`visible = keys <= queries`; `probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), "
        "dim=-1)`; `return probabilities.masked_fill(~visible, 0)`. A hidden pair has the probability 0 anyway, so "
        "one fill repairs the empty rows too.",
    ),
)
