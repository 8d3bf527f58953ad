"""dQ: one program per block of queries, which streams over the keys that they see, as the forward does.

    S = Q Kᵀ,  P = exp2(S · scale · log2 e - LSE)        [BLOCK_M, BLOCK_N]     on chip
    dP = dO Vᵀ,  dS = P ∘ (dP - Δ)                       [BLOCK_M, BLOCK_N]     on chip
    dQ += dS K                                           [BLOCK_M, HEAD_DIM]    in registers, written once

S and dP are computed here a second time, after the kernel of dK and dV: seven products in all where five would do. What
it buys: each dQ is added up by one program in a fixed order, so that every run gives the same bits, and no sum in
float32 lies in memory.

FLOPs: three products, 6 · batch · query_heads · query_length · key_length · head_dim; half of it when causal.
Bytes: Q, dO and dQ once; K and V once for each of the query_length / BLOCK_M programs of a head, most of which the L2
cache serves. At N = 8192, D = 128, 16 bits and BLOCK_M = 128, one head: 6 MB, and 64 × 4 MB of K and V.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_tiles import compile_configurations
from course_lib.kernels.attention.parts import SIZES, key_ranges, load_rows, visible_pairs
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of


@triton.jit
def gather_from_keys(
    query,
    gradient,
    log_sum_exp,
    delta,
    keys,
    values,
    begin,
    end,
    band,
    query_gradient,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the keys in [begin, end); returns dQ, before the scale, after them."""
    BLOCK_D: tl.constexpr = query.shape[1]
    key_length = band[1]
    for start in tl.range(begin, end, BLOCK_N):
        key = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp)
        value = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        probability_gradients = tl.dot(gradient, tl.trans(value), input_precision=FLOAT32_PRECISION)
        score_gradients = probabilities * (probability_gradients - delta)
        query_gradient = tl.dot(score_gradients.to(key.dtype), key, query_gradient, input_precision=FLOAT32_PRECISION)
    return query_gradient  # [BLOCK_M, BLOCK_D]


@triton.jit(do_not_specialize=SIZES)
def query_gradients_kernel(
    query_pointer, key_pointer, value_pointer, gradient_pointer, lse_pointer, delta_pointer, query_gradient_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, padded_length,
    scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all the keys that they see."""
    query_blocks = tl.cdiv(query_length, BLOCK_M)
    batch_and_head = tl.program_id(0) // query_blocks
    # The last queries see the most keys when causal: begin with them, so that the short programs fill the gaps.
    first_query = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch = (batch_and_head // query_heads).to(tl.int64)
    head = (batch_and_head % query_heads).to(tl.int64)
    key_head = head // heads_per_key_head
    queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride
    gradients = gradient_pointer + batch * gradient_batch_stride + head * gradient_head_stride, gradient_stride

    # Positions count from the first key, and the last query stands at the last key.
    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, keys_before, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, key_length, keys_before, keys_after, BLOCK_N
    )

    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    gradient = load_rows(gradients, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    rows = first_query + tl.arange(0, BLOCK_M)
    padded_row = batch_and_head.to(tl.int64) * padded_length
    log_sum_exp = tl.load(lse_pointer + padded_row + rows)[:, None]  # [BLOCK_M, 1], infinite beyond the last row
    delta = tl.load(delta_pointer + padded_row + rows)[:, None]
    query_gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if keys_before is not None:
        query_gradient = gather_from_keys(
            query,
            gradient,
            log_sum_exp,
            delta,
            keys,
            values,
            begin,
            whole_begin,
            band,
            query_gradient,
            scale_log2,
            HEAD_DIM,
            BLOCK_N,
            MASKED=True,
        )
    query_gradient = gather_from_keys(
        query,
        gradient,
        log_sum_exp,
        delta,
        keys,
        values,
        whole_begin,
        whole_end,
        band,
        query_gradient,
        scale_log2,
        HEAD_DIM,
        BLOCK_N,
        MASKED=False,
    )
    query_gradient = gather_from_keys(
        query,
        gradient,
        log_sum_exp,
        delta,
        keys,
        values,
        whole_end,
        end,
        band,
        query_gradient,
        scale_log2,
        HEAD_DIM,
        BLOCK_N,
        MASKED=True,
    )

    columns = tl.arange(0, BLOCK_D)
    inside = (rows < query_length)[:, None] & (columns < HEAD_DIM)[None, :]
    places = (batch_and_head.to(tl.int64) * query_length + rows)[:, None] * HEAD_DIM + columns[None, :]
    dtype = query_gradient_pointer.dtype.element_ty
    tl.store(query_gradient_pointer + places, (scale * query_gradient).to(dtype), mask=inside)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a window, which has all the code."""
    return [
        CompileCase(
            query_gradients_kernel, signature_of(query_gradients_kernel, kind), constexprs,
            num_warps=tiles.warps, num_stages=tiles.stages, label=label, **expectations,
        )
        for kind, query_sums, tiles, constexprs, label, expectations in compile_configurations("queries")
        if query_sums is None
    ]  # fmt: skip
