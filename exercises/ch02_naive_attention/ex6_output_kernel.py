"""Exercise 2.6: the kernel of the output, O = P V."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch02_naive_attention.ex1_bytes_of_three_passes import pass_bytes_oracle
from exercises.ch02_naive_attention.product_model import OUTPUT_MODEL
from exercises.ch02_naive_attention.requirements import MATRIX_PRODUCTS, PATIENT, SMALLEST_TILE, UNMASKED_WRITE, OnePass
from exercises.topics.evidence import first_access
from exercises.topics.pytorch_operations import ARITHMETIC


def output_oracle(probabilities, value):
    return probabilities @ value


def output_bytes(probabilities, value):
    heads, m, n = probabilities.shape
    return pass_bytes_oracle(heads, m, n, value.shape[-1], value.element_size())[2]


def _output_loads(probabilities, value):
    heads, m, n = probabilities.shape
    item_bytes, head_dim = value.element_size(), value.shape[-1]
    # The head dimension may be split among programs, each of which then reads P again.
    return heads * item_bytes * (m * n * -(-head_dim // SMALLEST_TILE) + n * head_dim * -(-m // SMALLEST_TILE))


def _weights(draw, heads, m, n):
    """Rows that add up to 1, some of them strongly peaked."""
    return torch.softmax(draw.normal(heads, m, n, scale=2.0), dim=-1)


def _causal(draw, heads, m, n):
    """The same with zeros at the keys behind each query, and rows of nothing but zeros where there are more queries."""
    return _weights(draw, heads, m, n).tril(n - m)


def _equal(draw, heads, m, n):
    return torch.full((heads, m, n), 1.0 / n)


def _certain(draw, heads, m, n):
    """One key has all of a row's weight: for the last query the last key, and so on upwards."""
    return torch.eye(n)[(torch.arange(m) - m) % n].expand(heads, m, n).clone()


def _up_and_down(draw, keys, head_dim):
    """[1, keys, head_dim] near 2,000 for the first half of the keys and near -2,000 for the rest: integers."""
    level = torch.where(torch.arange(keys) < keys // 2, 2000.0, -2000.0)[:, None]
    return (level + draw.normal(1, keys, head_dim, scale=15.0).round()).to(torch.float16)


def output_cases(draw):
    half = torch.float16
    cases = [
        Case(
            "2 heads, 64 × 256, head dimension 64", (_weights(draw, 2, 64, 256), draw.normal(2, 256, 64)), metered=True
        ),
        Case("one query, one key", (_weights(draw, 1, 1, 1), draw.normal(1, 1, 16))),
        Case("one query against 257 keys", (_weights(draw, 2, 1, 257), draw.normal(2, 257, 32)), metered=True),
        Case("5 queries, 5 keys, zeros behind each query", (_causal(draw, 1, 5, 5), draw.normal(1, 5, 16))),
        Case("130 queries, 300 keys", (_weights(draw, 1, 130, 300), draw.normal(1, 300, 16, shift=1.0))),
        Case(
            "float16, 40 × 520, head dimension 128, values near 3",
            (_weights(draw, 1, 40, 520).to(half), draw.normal(1, 520, 128, dtype=half, shift=3.0)),
            metered=True,
        ),
        # The sum rises to 1,000, where float16 keeps halves, and comes back to about 0.
        Case(
            "float16, 512 equal weights, values near 2,000 and then near -2,000",
            (torch.full((1, 3, 512), 2.0**-9, dtype=torch.float16), _up_and_down(draw, 512, 16)),
        ),
        Case(
            "3 queries, 2,100 keys: more than any one tile holds",
            (_weights(draw, 1, 3, 2100), draw.normal(1, 2100, 16)),
        ),
    ]
    cases += beyond_32_bits(draw, "heads", [_weights(draw, 3, 5, 20), draw.normal(3, 20, 16)])
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted, and larger."""
    half, prime = torch.float16, draw.choice((67, 71, 101))
    return [
        Case("3 keys, fewer than any tile", (_weights(draw, 2, 33, 3), draw.normal(2, 3, 32))),
        Case("zeros above the diagonal", (_causal(draw, 2, 40, 40), draw.normal(2, 40, 64))),
        Case(
            f"{prime} queries, 150 keys; V laid out [length, heads, head_dim], a gap behind each row of P",
            (draw.spread_out(_weights(draw, 3, prime, 150), 10), draw.normal(150, 3, 32).transpose(0, 1)),
        ),
        Case(
            "float16, 2 heads, 1025 × 1025",
            (_weights(draw, 2, 1025, 1025).to(half), draw.normal(2, 1025, 128, dtype=half)),
        ),
    ]


def drawn_operands(
    draw, heads, query_length, key_length, head_dim, dtype, weights, size, probabilities_layout, value_layout
):
    probabilities = weights(draw, heads, query_length, key_length).to(dtype)
    value = draw.normal(heads, key_length, head_dim, scale=size).to(dtype)
    return probabilities_layout(draw, probabilities), value_layout(draw, value)


CONTRACT = Contract(
    drawn_operands,
    most=8,
    choices={
        "heads": (1, 2, 3),
        "query_length": (1, 2, 31, 65),
        "key_length": (1, 3, 64, 67, 129),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "weights": (
            Level(_weights, ""),
            Level(_causal, "zeros behind each query"),
            Level(_equal, "equal weights"),
            Level(_certain, "all weight on one key"),
        ),
        "size": (Level(1.0, ""), Level(0.01, "small values"), Level(10_000.0, "values of ±30,000")),
        "probabilities_layout": unit_last("probabilities"),
        "value_layout": unit_last("value"),
    },
    says={
        "query_length": "Any lengths",
        "key_length": "Any lengths",
        "head_dim": "head_dim 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "size": "Values of any size",
        "probabilities_layout": "any strides, except that the last dimension is contiguous",
        "value_layout": "any strides, except that the last dimension is contiguous",
    },
)


def _divided_by_the_row_sum(case, seen, got):
    """The result is that of rows which add up to 1."""
    probabilities, value = (tensor.double() for tensor in case.args)
    if not isinstance(got, torch.Tensor) or got.shape != (*probabilities.shape[:2], value.shape[2]):
        return False
    divided = probabilities @ value / probabilities.sum(dim=-1, keepdim=True)
    size = float(divided.nan_to_num().abs().max())
    is_divided = torch.allclose(got.double(), divided, rtol=1e-2, atol=1e-2 * size, equal_nan=True)
    return is_divided and not torch.allclose(got.double(), probabilities @ value, rtol=1e-2, atol=1e-2 * size)


EXERCISE = Exercise(
    id="2.6",
    title="The output kernel",
    entries=("weighted_values",),
    cases=output_cases,
    oracle=output_oracle,
    contracts=(CONTRACT,),
    models=(OUTPUT_MODEL,),
    needs=TRITON,
    limits=PATIENT,
    uses_dot=True,
    requirements=(LaunchesTriton(), Forbids((*MATRIX_PRODUCTS, *ARITHMETIC)), OnePass(output_bytes, _output_loads)),
    hints=(
        "In the scores kernel the inner dimension was head_dim and fitted into one tile. Here the inner dimension "
        "is the keys, and there may be any number of them: the program needs a loop.",
        "A program owns BLOCK_M rows of O, all of head_dim wide. It walks along the keys: a tile of P, [BLOCK_M, "
        "BLOCK_N], times a tile of V, [BLOCK_N, HEAD_DIM], is added to an accumulator, [BLOCK_M, HEAD_DIM].",
        "The accumulator begins as `tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)` and stays float32; it is cast "
        "once, by the store.",
        "The last tile of keys may reach past the end. Mask both loads, with `other=0.0`: 0 · 0 adds nothing, "
        "while 0 times an undefined value may be NaN.",
        "`for start in range(0, key_length, BLOCK_N): keys = start + tl.arange(0, BLOCK_N)` ... `accumulator += "
        'tl.dot(probabilities, value, input_precision="ieee")`. The grid is `(triton.cdiv(query_length, '
        "BLOCK_M), heads)`.",
    ),
    mistakes=(
        Mistake(
            "divided_by_the_row_sum",
            "The output is divided by the sum of the row of P. P is normalised already where it should be; behind a "
            "mask a row may add up to less, and a row of zeros gives zeros.",
            when=_divided_by_the_row_sum,
            every=True,
        ),
        Mistake("out_of_bounds_write", UNMASKED_WRITE, when=first_access("writes")),
        Mistake(
            "keys_not_masked",
            "A load reaches past the last row or key. Mask P in both directions and V along "
            "the keys, with `other=0.0`. If you do, are two lengths or strides exchanged?",
            when=first_access("reads"),
        ),
    ),
)
