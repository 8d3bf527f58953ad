"""Exercise 2.4: the kernel of the scores, S = scale · Q Kᵀ."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.ch02_naive_attention.ex1_bytes_of_three_passes import pass_bytes_oracle
from exercises.ch02_naive_attention.product_model import SCORES_MODEL
from exercises.ch02_naive_attention.requirements import MATRIX_PRODUCTS, PATIENT, SMALLEST_TILE, UNMASKED_WRITE, OnePass
from exercises.topics.evidence import first_access
from exercises.topics.pytorch_operations import ARITHMETIC


def scores_oracle(query, key, scale):
    wide = torch.promote_types(query.dtype, torch.float32)
    return (scale * (query.to(wide) @ key.to(wide).transpose(-1, -2))).to(query.dtype)


def scores_scaled_first(query, key, scale):
    """The same with the scale in the queries, rounded to their dtype; where they overflow so, it is no right form."""
    scaled = (query * scale).to(query.dtype)
    return scores_oracle(scaled, key, 1.0) if bool(scaled.isfinite().all()) else scores_oracle(query, key, scale)


def scores_in_turn(query, key, scale):
    """The same, summed one dimension after the other, in float32 at least."""
    if query.shape[0] * query.shape[1] * key.shape[1] > 2**20:
        return scores_oracle(query, key, scale)  # many elements: the oracle's own error is telling enough, and quicker
    wide = torch.promote_types(query.dtype, torch.float32)
    total = torch.zeros(*query.shape[:2], key.shape[1], dtype=wide)
    for d in range(query.shape[-1]):
        total += query[:, :, None, d].to(wide) * key[:, None, :, d].to(wide)
    return (total * scale).to(query.dtype)


def scores_bytes(query, key, scale):
    (heads, m, head_dim), n = query.shape, key.shape[1]
    return pass_bytes_oracle(heads, m, n, head_dim, query.element_size())[0]


def _tiled_loads(query, key, scale):
    (heads, m, head_dim), n = query.shape, key.shape[1]
    readings = m * head_dim * -(-n // SMALLEST_TILE) + n * head_dim * -(-m // SMALLEST_TILE)
    return heads * readings * query.element_size()


def scores_cases(draw):
    half = torch.float16
    cases = [
        Case(
            "2 heads, 128 × 128, head dimension 64",
            (draw.normal(2, 128, 64), draw.normal(2, 128, 64), 0.125),
            metered=True,
        ),
        Case("one query against 257 keys", (draw.normal(2, 1, 32), draw.normal(2, 257, 32), 32**-0.5)),
        Case(
            "129 queries, 65 keys, a scale of 0.7", (draw.normal(1, 129, 16), draw.normal(1, 65, 16), 0.7), metered=True
        ),
        Case(
            "float16, 70 × 130, head dimension 128",
            (draw.normal(1, 70, 128, dtype=half), draw.normal(1, 130, 128, dtype=half), 128**-0.5),
            metered=True,
        ),
        Case(
            "float16, scores of ±5 from products beyond what float16 holds",
            (draw.normal(1, 20, 16, scale=500.0, dtype=half), draw.normal(1, 20, 16, scale=500.0, dtype=half), 5e-6),
        ),
    ]
    alike = Draw(24)  # the same at every check
    large, small = (alike.normal(1, 20, 16, scale=size, dtype=half) for size in (400.0, 4e-5))
    cases += [
        Case(
            "float16, queries near 400 and a scale of 300: their product is more than float16 holds",
            (large, small, 300.0),
        ),
        Case("float16, keys near 400 and a scale of 300", (small, large, 300.0)),
    ]
    cases += beyond_32_bits(draw, "heads", [draw.normal(3, 5, 16), draw.normal(3, 7, 16)], 0.25)
    return cases + on_a_gpu(draw) if draw.on_gpu else cases


def on_a_gpu(draw):
    """What the contract draws where kernels are interpreted, and larger."""
    half, prime = torch.float16, draw.choice((67, 71, 101))
    return [
        # Many heads: the error of a single product says nothing about the error that is due.
        Case("24 heads of one query and one key", (draw.normal(24, 1, 16), draw.normal(24, 1, 16), 0.25)),
        Case(
            f"{prime} queries, 130 keys, laid out [length, heads, head_dim] as a projection leaves them",
            (*(draw.normal(length, 3, 32).transpose(0, 1) for length in (prime, 130)), -0.2),
        ),
        Case(
            "a gap behind each row of Q and of K",
            (draw.spread_out(draw.normal(2, 40, 64), 16), draw.spread_out(draw.normal(2, 50, 64), 24), 0.125),
        ),
        Case("scores of ±200", (draw.normal(1, 33, 16, scale=40.0), draw.normal(1, 34, 16), 0.5)),
        Case(
            "float16, 2 heads, 1025 × 1025",
            (draw.normal(2, 1025, 128, dtype=half), draw.normal(2, 1025, 128, dtype=half), 128**-0.5),
        ),
    ]


def drawn_matrices(draw, heads, query_length, key_length, head_dim, dtype, size, scale, query_layout, key_layout):
    query = draw.normal(heads, query_length, head_dim, scale=size).to(dtype)
    key = draw.normal(heads, key_length, head_dim, scale=size).to(dtype)
    return query_layout(draw, query), key_layout(draw, key), scale


CONTRACT = Contract(
    drawn_matrices,
    most=8,
    choices={
        "heads": (1, 2, 3),
        "query_length": (1, 2, 31, 65),
        "key_length": (1, 3, 64, 67),
        "head_dim": (16, 32, 64, 128),
        "dtype": (torch.float32, torch.float16),
        "size": (Level(1.0, ""), Level(0.01, "small numbers"), Level(150.0, "products beyond 65,504")),
        "scale": (
            Level(0.37, "a scale of 0.37"),
            Level(0.001, "a scale of 0.001"),
            Level(0.0, "a scale of 0"),
            Level(-0.0007, "a scale below 0"),
            Level(1.0, "a scale of 1"),
        ),
        "query_layout": unit_last("query"),
        "key_layout": unit_last("key"),
    },
    says={
        "query_length": "Any lengths",
        "key_length": "Any lengths",
        "head_dim": "head_dim 16, 32, 64 or 128",
        "dtype": "float32 or float16",
        "size": "Numbers of any size, as long as the scores fit the dtype",
        "scale": "scale: any number",
        "query_layout": "any strides, except that the last dimension is contiguous",
        "key_layout": "any strides, except that the last dimension is contiguous",
    },
    valid=lambda dtype, size, scale, **_: dtype == torch.float32 or size < 2 or scale < 0.01,
)


UNMASKED_READ = (
    "A load reaches past the end of a tensor, along one of its tile's axes. Rows at the edge: give the load a mask "
    "(`rows[:, None] < length`) and `other=0.0`. Columns: a row has HEAD_DIM = head_dim of them, and no more. If "
    "neither is the cause, are two lengths or strides exchanged?"
)
EXERCISE = Exercise(
    id="2.4",
    title="The scores kernel",
    entries=("scores",),
    cases=scores_cases,
    oracle=scores_oracle,
    contracts=(CONTRACT,),
    plain=(scores_in_turn, scores_scaled_first),
    models=(SCORES_MODEL,),
    needs=TRITON,
    limits=PATIENT,
    uses_dot=True,
    requirements=(LaunchesTriton(), Forbids((*MATRIX_PRODUCTS, *ARITHMETIC)), OnePass(scores_bytes, _tiled_loads)),
    hints=(
        "A program computes one tile of S. Which rows of Q does it need for that? Which rows of K? Where does its "
        "tile go? The kernel of the distance penalty above shows the third.",
        "Positions first: `queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)`, likewise `keys` from "
        "program_id(1); `dims = tl.arange(0, HEAD_DIM)`. A tile of pointers is a column of row offsets plus a row "
        "of column offsets.",
        "Move each pointer to its head first: `query_pointer + head * query_head_stride`. Take `head = "
        "tl.program_id(2).to(tl.int64)`, because an int32 offset overflows beyond 32 heads of 8192² scores.",
        "Load Q as [BLOCK_M, HEAD_DIM]. Load K transposed, as [HEAD_DIM, BLOCK_N], like the right-hand tile of the "
        "picture: `keys[None, :] * key_row_stride + dims[:, None]`. Rows beyond the length are masked, `other=0.0`.",
        '`tile = tl.dot(query, key_transposed, input_precision="ieee") * scale`, stored with the mask '
        "`(queries[:, None] < query_length) & (keys[None, :] < key_length)`.",
    ),
    mistakes=(
        Mistake("out_of_bounds_write", UNMASKED_WRITE, when=first_access("writes")),
        Mistake("rows_not_masked", UNMASKED_READ, when=first_access("reads")),
    ),
)
