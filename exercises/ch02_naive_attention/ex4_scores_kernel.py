"""Exercise 2.4: the kernel of the scores, S = scale · Q Kᵀ."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Slip
from exercises.ch02_naive_attention.ex1_bytes_of_three_passes import pass_bytes_oracle
from exercises.ch02_naive_attention.requirements import MATRIX_PRODUCTS, PATIENT, SMALLEST_TILE, OnePass
from exercises.ch02_naive_attention.slips import (
    HEADS_MISSING,
    UNMASKED_WRITE,
    only_some_heads_written,
    same,
    writes_one_tile,
)
from exercises.ch02_naive_attention.strides import heads_first, memory_read_as, strides_ignored, with_gaps
from exercises.topics.evidence import first_access


def scores_oracle(query, key, scale):
    return scale * (query @ key.transpose(-1, -2))


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
    half, prime = torch.float16, draw.choice((67, 71, 101))
    cases = [
        Case(
            "2 heads, 128 × 128, head dimension 64",
            (draw.normal(2, 128, 64), draw.normal(2, 128, 64), 0.125),
            metered=True,
        ),
        # Many heads: the error of a single product says nothing about the error that is due.
        Case("24 heads of one query and one key", (draw.normal(24, 1, 16), draw.normal(24, 1, 16), 0.25)),
        Case("one query against 257 keys", (draw.normal(2, 1, 32), draw.normal(2, 257, 32), 32**-0.5)),
        Case(
            "129 queries, 65 keys, a scale of 0.7", (draw.normal(2, 129, 16), draw.normal(2, 65, 16), 0.7), metered=True
        ),
        Case(
            f"{prime} queries, 130 keys, laid out [length, heads, head_dim] as a projection leaves them",
            (heads_first(draw, 3, prime, 32), heads_first(draw, 3, 130, 32), 32**-0.5),
        ),
        Case(
            "a gap behind each row of Q and of K",
            (with_gaps(draw.normal(2, 40, 64), 16), with_gaps(draw.normal(2, 50, 64), 24), 0.125),
        ),
        Case(
            "float16, 100 × 200, head dimension 128",
            (draw.normal(2, 100, 128, dtype=half), draw.normal(2, 200, 128, dtype=half), 128**-0.5),
            metered=True,
        ),
        Case("scores of ±200", (draw.normal(1, 33, 16, scale=40.0), draw.normal(1, 34, 16), 0.5)),
    ]
    if draw.on_gpu:
        shape = (2, 1025, 128)
        cases.append(
            Case(
                "float16, 2 heads, 1025 × 1025",
                (draw.normal(*shape, dtype=half), draw.normal(*shape, dtype=half), 128**-0.5),
            )
        )
        if draw.bfloat16:
            bf16 = torch.bfloat16
            cases.append(
                Case(
                    "bfloat16, 4 heads, 500 × 777",
                    (draw.normal(4, 500, 64, dtype=bf16), draw.normal(4, 777, 64, dtype=bf16), 0.125),
                )
            )
    return cases


def _transposed_key(case, seen, got):
    """K was read column by column: element [n, d] at n + d · row stride."""
    query, key, scale = case.args
    heads, n, head_dim = key.shape
    if n < head_dim:
        return False
    wrong = memory_read_as(key, (heads, n, head_dim), (key.stride(0), 1, key.stride(1)))
    return same(got, scores_oracle(query.double(), wrong, scale))


def _keys_not_turned(query, key, scale):
    """Tiles of head_dim keys as right operands, untransposed; other tiles do not fit the product at all."""
    head_dim, length = query.shape[-1], key.shape[1]
    tiles = torch.nn.functional.pad(key, (0, 0, 0, -length % head_dim)).split(head_dim, dim=1)
    return torch.cat([query @ tile for tile in tiles], dim=-1)[..., :length] * scale


def _same_head(which: int):
    """A fingerprint: head 0 of the tensor at this position was used for every head; None: of both."""

    def result(query, key, scale):
        if query.shape[0] < 2:
            return None
        first = [
            tensor[:1].expand_as(tensor) if which in (place, 2) else tensor for place, tensor in enumerate((query, key))
        ]
        return scores_oracle(*first, scale)

    return result


UNMASKED_READ = (
    "A load reaches past the last row of a tensor. Tiles at the edge are only partly filled: give the load a mask "
    "(`rows[:, None] < length`) and `other=0.0`. If it has one, are two lengths or strides exchanged?"
)
ONE_TILE = (
    "Only the first tile of each matrix was written. Either the grid has too few programs, or every program works "
    "on tile 0 because `tl.program_id` times the block is missing from the positions."
)

EXERCISE = Exercise(
    id="2.4",
    title="The scores kernel",
    entries=("scores",),
    cases=scores_cases,
    oracle=scores_oracle,
    plain=(scores_in_turn,),
    needs=TRITON,
    limits=PATIENT,
    uses_dot=True,
    requirements=(LaunchesTriton(), Forbids(MATRIX_PRODUCTS), OnePass(scores_bytes, _tiled_loads)),
    hints=(
        "A program owns one tile of S. Ask three questions of it: which rows of Q does it need, which rows of K, "
        "where does its tile go? The kernel of the distance penalty above answers the third.",
        "Positions first: `queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)`, likewise `keys` from "
        "program_id(1); `dims = tl.arange(0, HEAD_DIM)`. A tile of pointers is a column of row offsets plus a row "
        "of column offsets.",
        "Move each pointer to its head first: `query_pointer + head * query_head_stride`. With `head = "
        "tl.program_id(2).to(tl.int64)`: 32 heads of 8192² scores are 2³¹ elements, as many as an int32 can number.",
        "Load Q as [BLOCK_M, HEAD_DIM]. Load K straight away as [HEAD_DIM, BLOCK_N]: `keys[None, :] * key_row_stride + "
        "dims[:, None]`. Rows beyond the length are masked, `other=0.0`.",
        '`tile = tl.dot(query, key_transposed, input_precision="ieee") * scale`, stored with the mask '
        "`(queries[:, None] < query_length) & (keys[None, :] < key_length)`.",
    ),
    slips=(
        Slip(
            "scale_missing",
            "The scores are not scaled. Multiply the product by `scale`.",
            formula=lambda query, key, scale: scores_oracle(query, key, 1.0),
        ),
        Slip(
            "key_not_transposed",
            "Q was multiplied with K as it was loaded, [BLOCK_N, HEAD_DIM]. Such a product exists only where HEAD_DIM "
            "is BLOCK_N, and is wrong there too: load K as [HEAD_DIM, BLOCK_N], or turn the tile over with `tl.trans`.",
            formula=_keys_not_turned,
        ),
        Slip(
            "scale_twice",
            "The scale was applied twice: once to Q or K and once to the product, say. Apply it once.",
            formula=lambda query, key, scale: scores_oracle(query, key, scale * scale),
        ),
        Slip(
            "divided_by_root_as_well",
            "The scores are multiplied by `scale` and divided by the root of head_dim as well. The scale is an "
            "argument here, and it is all that is asked for.",
            formula=lambda query, key, scale: scores_oracle(query, key, scale / math.sqrt(query.shape[-1])),
        ),
        Slip(
            "divided_by_scale",
            "The product was divided by `scale`. It is a factor: 1/√head_dim, as a rule.",
            formula=lambda query, key, scale: scores_oracle(query, key, 1.0 / scale),
        ),
        Slip(
            "head_ignored_in_query",
            "Every head was computed from the Q of head 0. Add `head * query_head_stride` to its pointer.",
            formula=_same_head(0),
        ),
        Slip(
            "head_ignored_in_key",
            "Every head was computed from the K of head 0. Add `head * key_head_stride` to its pointer.",
            formula=_same_head(1),
        ),
        Slip(
            "head_ignored",
            "Every head was computed from the Q and K of head 0. Move both pointers to the program's head.",
            formula=_same_head(2),
        ),
    ),
    mistakes=(
        Mistake(
            "strides_ignored",
            "A tensor with gaps was read as if its rows touched. Rows lie `stride(1)` elements apart and heads "
            "`stride(0)`; neither follows from the shape.",
            when=strides_ignored(scores_oracle, (0, 1)),
        ),
        Mistake(
            "transposed_key",
            "K was read with its dimensions exchanged: `keys` was multiplied by 1 and `dims` by the row stride. "
            "Transposing is a matter of which index runs along which side of the tile; each keeps its own stride.",
            when=_transposed_key,
        ),
        Mistake("out_of_bounds_write", UNMASKED_WRITE, when=first_access("writes")),
        Mistake("rows_not_masked", UNMASKED_READ, when=first_access("reads")),
        Mistake("only_first_tile", ONE_TILE, when=writes_one_tile(scores_oracle), every=True),
        Mistake("only_first_head", HEADS_MISSING, when=only_some_heads_written, every=True),
    ),
)
