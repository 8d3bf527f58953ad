"""dQ over block lists: one program per tile of queries, which visits the tiles of keys on its lists, as the forward.

    S = Q Kᵀ,  P = exp2(S · scale · log2 e - LSE)        [BLOCK_M, BLOCK_N]     on chip
    dP = dO Vᵀ,  dS = P ∘ (dP - Δ)                       [BLOCK_M, BLOCK_N]     on chip
    dQ += dS K                                           [BLOCK_M, HEAD_DIM]    in registers, written once

S and dP are computed here a second time, after the kernel of dK and dV, for the reason that
`attention.backward_queries` gives: each dQ is added up by one program in a fixed order.

FLOPs: 6 · head_dim · query_rows · key_rows for each tile on a list.
Bytes: Q, dO and dQ once; for each tile on a list its K and V, for each partial one its mask.
Source: Dong et al., Flex Attention, arXiv 2412.05496.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import load_rows
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.sparse.backward_tiles import backward_cases
from course_lib.kernels.sparse.parts import LIST_SIZES, list_of_row, load_entry, load_mask


@triton.jit
def gather_from_key_list(query, gradient, numbers_of_rows, keys, values, tile_list, masks, place, key_length,
                         query_gradient, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
                         QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Visit the tiles of keys on a list; returns dQ, before the scale. place: of the queries within their block."""
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    PIECES: tl.constexpr = KEY_ROWS // BLOCK_N
    log_sum_exp, delta = numbers_of_rows  # [BLOCK_M, 1]
    count, indices, numbers = tile_list
    steps = count * PIECES
    tile, number = load_entry(indices, numbers, 0, steps, PIECES, MASKED)
    for step in tl.range(0, steps):
        next_tile, next_number = load_entry(indices, numbers, step + 1, steps, PIECES, MASKED)
        piece = step % PIECES * BLOCK_N
        start = tile * KEY_ROWS + piece
        key = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = load_mask(masks, number, place + tl.arange(0, BLOCK_M)[:, None],
                                piece + tl.arange(0, BLOCK_N)[None, :], QUERY_ROWS, KEY_ROWS)  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp)
        value = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        probability_gradients = tl.dot(gradient, tl.trans(value), input_precision=FLOAT32_PRECISION)
        score_gradients = probabilities * (probability_gradients - delta)
        query_gradient = tl.dot(score_gradients.to(key.dtype), key, query_gradient, input_precision=FLOAT32_PRECISION)
        tile, number = next_tile, next_number
    return query_gradient  # [BLOCK_M, BLOCK_D]


@triton.jit(do_not_specialize=LIST_SIZES)
def listed_query_gradients_kernel(
    query_pointer, key_pointer, value_pointer, gradient_pointer, lse_pointer, delta_pointer, query_gradient_pointer,
    full_counts_pointer, full_indices_pointer,
    partial_counts_pointer, partial_indices_pointer, partial_masks_pointer, masks_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    query_heads, heads_per_key_head, query_length, key_length, list_batch_stride, list_head_stride, padded_length,
    scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against the tiles on the two lists of their block."""
    query_tiles = tl.cdiv(query_length, BLOCK_M)
    batch_and_head = tl.program_id(0) // query_tiles
    # When causal the last queries have the longest lists: begin with them, so that the short programs fill the gaps.
    first_query = (query_tiles - 1 - tl.program_id(0) % query_tiles) * BLOCK_M
    batch = (batch_and_head // query_heads).to(tl.int64)
    head = (batch_and_head % query_heads).to(tl.int64)
    key_head = head // heads_per_key_head
    queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride
    gradients = gradient_pointer + batch * gradient_batch_stride + head * gradient_head_stride, gradient_stride

    list_row = batch * list_batch_stride + head * list_head_stride + first_query // QUERY_ROWS
    places = tl.cdiv(key_length, KEY_ROWS)
    full = list_of_row((full_counts_pointer, full_indices_pointer, full_indices_pointer), list_row, places)
    partial = list_of_row((partial_counts_pointer, partial_indices_pointer, partial_masks_pointer), list_row, places)
    place = first_query % QUERY_ROWS
    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    gradient = load_rows(gradients, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    rows = first_query + tl.arange(0, BLOCK_M)
    padded_row = batch_and_head.to(tl.int64) * padded_length
    log_sum_exp = tl.load(lse_pointer + padded_row + rows)[:, None]  # [BLOCK_M, 1], infinite beyond the last row
    delta = tl.load(delta_pointer + padded_row + rows)[:, None]
    numbers = log_sum_exp, delta
    query_gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    query_gradient = gather_from_key_list(query, gradient, numbers, keys, values, full, None, place, key_length,
                                          query_gradient, scale_log2, HEAD_DIM, BLOCK_N, QUERY_ROWS, KEY_ROWS,
                                          MASKED=False)  # fmt: skip
    query_gradient = gather_from_key_list(query, gradient, numbers, keys, values, partial, masks_pointer, place,
                                          key_length, query_gradient, scale_log2, HEAD_DIM, BLOCK_N, QUERY_ROWS,
                                          KEY_ROWS, MASKED=True)  # fmt: skip

    columns = tl.arange(0, BLOCK_D)
    inside = (rows < query_length)[:, None] & (columns < HEAD_DIM)[None, :]
    stored = (batch_and_head.to(tl.int64) * query_length + rows)[:, None] * HEAD_DIM + columns[None, :]
    dtype = query_gradient_pointer.dtype.element_ty
    tl.store(query_gradient_pointer + stored, (scale * query_gradient).to(dtype), mask=inside)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: lists of the usual block."""
    return backward_cases(listed_query_gradients_kernel, "queries")
