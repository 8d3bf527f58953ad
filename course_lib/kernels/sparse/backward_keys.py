"""dK and dV over block lists: one program per tile of keys, which visits the tiles of queries on its transposed lists.

    Sᵀ = K Qᵀ,  Pᵀ = exp2(Sᵀ · scale · log2 e - LSE)     [BLOCK_N, BLOCK_M]     on chip
    dPᵀ = V dOᵀ,  dSᵀ = Pᵀ ∘ (dPᵀ - Δ)                   [BLOCK_N, BLOCK_M]     on chip
    dV += Pᵀ dO,  dK += dSᵀ Q                            [BLOCK_N, HEAD_DIM]    in registers, written once

The step is that of `attention.backward_keys`; which queries are visited is what differs. Each tile of keys has one
owner, so nothing is added by atomics and every run gives the same bits. Query heads that share a KV head are visited
one after the other, each with its own lists.

FLOPs: 8 · head_dim · query_rows · key_rows for each tile on a list.
Bytes: K, V, dK and dV once; for each tile on a list its Q and dO and 8 bytes a row; for each partial one its mask.
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
def gather_from_query_list(key, value, queries, gradients, numbers_of_rows, tile_list, masks, place, query_length,
                           sums, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
                           QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Visit the tiles of queries on a list; returns dK, before the scale, and dV. place: of the keys in their block."""
    BLOCK_N: tl.constexpr = key.shape[0]
    BLOCK_D: tl.constexpr = key.shape[1]
    PIECES: tl.constexpr = QUERY_ROWS // BLOCK_M
    key_gradient, value_gradient = sums
    log_sum_exps, deltas = numbers_of_rows
    count, indices, numbers = tile_list
    steps = count * PIECES
    tile, number = load_entry(indices, numbers, 0, steps, PIECES, MASKED)
    for step in tl.range(0, steps):
        next_tile, next_number = load_entry(indices, numbers, step + 1, steps, PIECES, MASKED)
        piece = step % PIECES * BLOCK_M
        start = tile * QUERY_ROWS + piece
        rows = start + tl.arange(0, BLOCK_M)
        query = load_rows(queries, start, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED)
        scores = tl.dot(key, tl.trans(query), input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            visible = load_mask(masks, number, piece + tl.arange(0, BLOCK_M)[None, :],
                                place + tl.arange(0, BLOCK_N)[:, None], QUERY_ROWS, KEY_ROWS)  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
            # A block may reach beyond the rows that the numbers are padded to.
            log_sum_exp = tl.load(log_sum_exps + rows, mask=rows < query_length, other=float("inf"))
            delta = tl.load(deltas + rows, mask=rows < query_length, other=0.0)
        else:
            log_sum_exp = tl.load(log_sum_exps + rows)  # [BLOCK_M]
            delta = tl.load(deltas + rows)
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp[None, :])  # [BLOCK_N, BLOCK_M]
        gradient = load_rows(gradients, start, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED)
        value_gradient = tl.dot(
            probabilities.to(gradient.dtype), gradient, value_gradient, input_precision=FLOAT32_PRECISION
        )
        probability_gradients = tl.dot(value, tl.trans(gradient), input_precision=FLOAT32_PRECISION)
        score_gradients = (probabilities * (probability_gradients - delta[None, :])).to(query.dtype)
        key_gradient = tl.dot(score_gradients, query, key_gradient, input_precision=FLOAT32_PRECISION)
        tile, number = next_tile, next_number
    return key_gradient, value_gradient  # [BLOCK_N, BLOCK_D] both


@triton.jit(do_not_specialize=LIST_SIZES)
def listed_key_gradients_kernel(
    query_pointer, key_pointer, value_pointer, gradient_pointer, lse_pointer, delta_pointer,
    key_gradient_pointer, value_gradient_pointer,
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
    """One program: BLOCK_N keys of one KV head, against the tiles of queries on the lists of their block."""
    key_tiles = tl.cdiv(key_length, BLOCK_N)
    batch_and_key_head = tl.program_id(0) // key_tiles
    first_key = tl.program_id(0) % key_tiles * BLOCK_N  # when causal the first keys are seen by most: longest first
    key_heads = query_heads // heads_per_key_head
    batch = (batch_and_key_head // key_heads).to(tl.int64)
    key_head = (batch_and_key_head % key_heads).to(tl.int64)
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride
    key = load_rows(keys, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    value = load_rows(values, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sums = key_gradient, value_gradient
    places = tl.cdiv(query_length, QUERY_ROWS)
    place = first_key % KEY_ROWS
    for member in tl.range(0, heads_per_key_head):
        head = key_head * heads_per_key_head + member
        row = batch * list_batch_stride + head * list_head_stride + first_key // KEY_ROWS
        full = list_of_row((full_counts_pointer, full_indices_pointer, full_indices_pointer), row, places)
        partial = list_of_row((partial_counts_pointer, partial_indices_pointer, partial_masks_pointer), row, places)
        queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
        gradients = gradient_pointer + batch * gradient_batch_stride + head * gradient_head_stride, gradient_stride
        padded_row = (batch * query_heads + head) * padded_length
        numbers = lse_pointer + padded_row, delta_pointer + padded_row
        sums = gather_from_query_list(key, value, queries, gradients, numbers, full, None, place, query_length, sums,
                                      scale_log2, HEAD_DIM, BLOCK_M, QUERY_ROWS, KEY_ROWS, MASKED=False)  # fmt: skip
        sums = gather_from_query_list(key, value, queries, gradients, numbers, partial, masks_pointer, place,
                                      query_length, sums, scale_log2, HEAD_DIM, BLOCK_M, QUERY_ROWS, KEY_ROWS,
                                      MASKED=True)  # fmt: skip

    key_gradient, value_gradient = sums
    rows = first_key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < key_length)[:, None] & (columns < HEAD_DIM)[None, :]
    stored = (batch_and_key_head.to(tl.int64) * key_length + rows)[:, None] * HEAD_DIM + columns[None, :]
    dtype = key_gradient_pointer.dtype.element_ty
    tl.store(key_gradient_pointer + stored, (scale * key_gradient).to(dtype), mask=inside)
    tl.store(value_gradient_pointer + stored, value_gradient.to(dtype), mask=inside)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: lists of the usual block."""
    return backward_cases(listed_key_gradients_kernel, "keys")
