"""Exercise 2.5: the kernel of the softmax of whole rows, safe and causal."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch02_naive_attention.contracts import SCORES, by_log_sum_exp
from exercises.ch02_naive_attention.masks import causal_softmax, causal_visible
from exercises.ch02_naive_attention.requirements import PATIENT, OnePass
from exercises.ch02_naive_attention.row_softmax_model import MODEL
from exercises.topics.evidence import first_access
from exercises.topics.pytorch_operations import ARITHMETIC


def row_softmax_oracle(scores, causal, memory=False):
    return causal_softmax(scores) if causal else torch.softmax(scores, dim=-1)


def row_by_log_sum_exp(scores, causal, memory=False):
    return by_log_sum_exp(scores, causal_visible(*scores.shape[-2:], scores.shape[-1]) if causal else None)


def row_softmax_bytes(scores, causal):
    return 2 * scores.numel() * scores.element_size()


def memory_of_the_result(functions, scores, causal, memory):
    """The result's memory row after row, whatever its strides: the same numbers, if it is contiguous."""
    result = functions["row_softmax"](scores, causal)
    heads, queries, keys = result.shape
    return result.as_strided((heads, queries, keys), (queries * keys, keys, 1))


def stored_by_queries(draw, scores):
    """A view of [query_length, heads, key_length], without gaps."""
    return scores.transpose(0, 1).contiguous().transpose(0, 1)


def far_below(draw):
    """Scores between -1e20 and -2e20; on a GPU -2^67 or half of it.

    There the compiler fuses x · log2(e) into its difference from a maximum that was rounded, and a rounding of 1e20 is
    1e13. A power of 2 times log2(e) is exact either way.
    """
    if draw.on_gpu:
        return -torch.exp2(draw.integers(1, 8, 8, low=66, high=68).float())
    return draw.uniform(1, 8, 8, low=-2e20, high=-1e20)


def row_softmax_cases(draw):
    prime = draw.choice((67, 131, 257))
    cases = [
        Case("2 heads, 3 rows of 128", (draw.normal(2, 3, 128), False), metered=True),
        Case(
            f"5 rows of {prime}, a prime, scores below zero",
            (draw.normal(1, 5, prime, shift=-8.0), False),
            metered=True,
        ),
        Case("1100 keys, float16", (draw.normal(1, 3, 1100, dtype=torch.float16, scale=3.0), False), metered=True),
        Case("causal, 9 × 9", (draw.normal(1, 9, 9, scale=2.0), True)),
        Case("causal, 8 × 8, scores between -1e20 and -2e20", (far_below(draw), True)),
        Case("causal, 7 queries, 4 keys: three see nothing", (draw.normal(1, 7, 4), True)),
        Case(
            "scores stored [query, head, key], and the result's memory read row after row",
            (stored_by_queries(draw, draw.normal(2, 2, 33)), False, True),
            driver=memory_of_the_result,
        ),
    ]
    cases += beyond_32_bits(draw, "heads", [draw.normal(3, 2, 20)], False)
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted, and larger."""
    ascending = torch.linspace(-90.0, 90.0, 200).expand(1, 2, 200) + draw.normal(1, 2, 200, scale=0.01)
    return [
        Case("one row of one key", (draw.normal(1, 1, 1), False)),
        Case("scores of ±200", (draw.normal(2, 3, 100, scale=70.0), False)),
        Case("scores near +1000", (draw.normal(1, 4, 129, shift=1000.0), False)),
        Case("rows that climb", (ascending, False)),
        Case("rows that descend", (ascending.flip(-1).contiguous(), False)),
        Case(
            "causal, 5 queries at the end of 37 keys, a gap behind each row",
            (draw.spread_out(draw.normal(2, 5, 37), 5), True),
        ),
        Case("float16, 2 heads, 64 rows of 8191", (draw.normal(2, 64, 8191, dtype=torch.float16), False)),
        Case("causal, 1025 × 1025", (draw.normal(1, 1025, 1025), True)),
    ]


def drawn_rows(draw, heads, query_length, key_length, dtype, scores, layout, causal):
    return layout(draw, scores(draw, heads, query_length, key_length).to(dtype)), causal


def _few_and_finite(heads, query_length, key_length, dtype, scores, **_):
    """Whether these are few enough elements, and float16 holds them: 150 times half the keys passes it."""
    steep = scores is SCORES[-1].value and key_length > 500
    return heads * query_length * key_length <= 2**14 and not (steep and dtype == torch.float16)


CONTRACT = Contract(
    drawn_rows,
    most=10,
    choices={
        "heads": (1, 2, 3),
        "query_length": (1, 2, 5),
        "key_length": (1, 2, 7, 63, 64, 65, 131, 16384),
        "dtype": (torch.float32, torch.float16),
        "scores": SCORES,
        "layout": (*unit_last("scores"), Level(stored_by_queries, "scores stored [query, head, key]")),
        "causal": (False, True),
    },
    says={
        "query_length": "any lengths",
        "key_length": "rows of up to 16384 keys",
        "dtype": "float32 or float16",
        "scores": "Numbers of any size",
        "layout": "any strides except that the last dimension is contiguous",
        "causal": "causal: hide the keys behind each query's position",
    },
    valid=_few_and_finite,
)

EXERCISE = Exercise(
    id="2.5",
    title="The softmax kernel, safe and causal",
    entries=("row_softmax",),
    cases=row_softmax_cases,
    oracle=row_softmax_oracle,
    contracts=(CONTRACT,),
    plain=(row_by_log_sum_exp,),
    models=(MODEL,),
    needs=TRITON,
    limits=PATIENT,
    requirements=(
        LaunchesTriton(),
        Forbids(("_softmax", "softmax", "logsumexp", "log_softmax", "_log_softmax", *ARITHMETIC)),
        OnePass(row_softmax_bytes),
    ),
    hints=(
        "One program holds one whole row, in a tile of `triton.next_power_of_2(key_length)`. So it needs one load, "
        "one store, and no loop.",
        "Compute three things from the row: its maximum (`tl.max(row, axis=0)`), the weights exp(row - maximum), and "
        "their sum. Compute them in float32, whatever dtype the scores have.",
        "The tile is wider than the row. Its places past the last key must not count in the maximum or in the sum. "
        "Which `other=` makes exp give 0 there?",
        "The causal mask is one comparison: `keys <= row + key_length - query_length`. Put it into the load's mask, "
        "and hidden keys are not even read. The store still covers all keys, because the hidden ones must become 0.",
        'Rows that see no key: `largest = tl.where(largest == float("-inf"), 0.0, largest)`, so that exp(-inf - '
        "0) = 0, and `total = tl.where(total == 0.0, 1.0, total)` before the division.",
    ),
    mistakes=(
        Mistake(
            "tail_not_masked",
            "The load reaches past the end of the scores: mask it with `keys < key_length`, and where a program has "
            "several rows, by their numbers too. If it is masked, are two strides or the grid's axes exchanged?",
            when=first_access("reads"),
        ),
        Mistake(
            "out_of_bounds_write",
            "The store reaches past the end of the result: mask it with `keys < key_length`, and where a program has "
            "several rows, by their numbers too. If it is masked, are two strides or the grid's axes exchanged?",
            when=first_access("writes"),
        ),
    ),
)
