"""dQ on Hopper and later: the tensor memory accelerator (TMA) moves the tiles. See `backward_queries`."""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_parts import WIDE
from course_lib.kernels.attention.backward_tiles import boxes, compile_configurations
from course_lib.kernels.attention.parts import SIZES, key_ranges, visible_pairs
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
    batch,
    key_head,
    begin,
    end,
    band,
    query_gradient,
    scale_log2,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the keys in [begin, end); returns dQ, before the scale, after them."""
    BLOCK_D: tl.constexpr = query.shape[1]
    BOTH_FIRST: tl.constexpr = BLOCK_D >= WIDE
    for start in tl.range(begin, end, BLOCK_N):
        key = keys.load([batch, key_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        scores = tl.dot(query, key.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        if BOTH_FIRST:
            value = values.load([batch, key_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
            probability_gradients = tl.dot(gradient, value.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp)  # [BLOCK_M, BLOCK_N]
        if not BOTH_FIRST:
            value = values.load([batch, key_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
            probability_gradients = tl.dot(gradient, value.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        score_gradients = probabilities * (probability_gradients - delta)
        query_gradient = tl.dot(score_gradients.to(key.dtype), key, query_gradient, input_precision=FLOAT32_PRECISION)
    return query_gradient  # [BLOCK_M, BLOCK_D]


@triton.jit(do_not_specialize=SIZES)
def query_gradients_tma_kernel(
    queries, keys, values, gradients, lse_pointer, delta_pointer, query_gradients,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, padded_length,
    scale, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all the keys that they see."""
    query_blocks = tl.cdiv(query_length, BLOCK_M)
    batch_and_head = tl.program_id(0) // query_blocks
    # The last queries see the most keys when causal: begin with them, so that the short programs fill the gaps.
    first_query = (query_blocks - 1 - tl.program_id(0) % query_blocks) * BLOCK_M
    batch = batch_and_head // query_heads
    head = batch_and_head % query_heads
    key_head = head // heads_per_key_head

    # Positions count from the first key, and the last query stands at the last key.
    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, keys_before, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, key_length, keys_before, keys_after, BLOCK_N
    )

    query = queries.load([batch, head, first_query, 0]).reshape(BLOCK_M, BLOCK_D)
    gradient = gradients.load([batch, head, first_query, 0]).reshape(BLOCK_M, BLOCK_D)
    padded_rows = batch_and_head.to(tl.int64) * padded_length + first_query + tl.arange(0, BLOCK_M)
    log_sum_exp = tl.load(lse_pointer + padded_rows)[:, None]  # [BLOCK_M, 1], infinite beyond the last row
    delta = tl.load(delta_pointer + padded_rows)[:, None]
    query_gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if keys_before is not None:
        query_gradient = gather_from_keys(
            query,
            gradient,
            log_sum_exp,
            delta,
            keys,
            values,
            batch,
            key_head,
            begin,
            whole_begin,
            band,
            query_gradient,
            scale_log2,
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
        batch,
        key_head,
        whole_begin,
        whole_end,
        band,
        query_gradient,
        scale_log2,
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
        batch,
        key_head,
        whole_end,
        end,
        band,
        query_gradient,
        scale_log2,
        BLOCK_N,
        MASKED=True,
    )
    query_gradient = (scale * query_gradient).to(query_gradients.dtype).reshape(1, 1, BLOCK_M, BLOCK_D)
    query_gradients.store([batch, head, first_query, 0], query_gradient)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a window, which has all the code."""
    cases = []
    for kind, _, tiles, constexprs, label, expectations in compile_configurations("queries", copied_by_engine=True):
        signature = signature_of(query_gradients_tma_kernel, kind, **boxes(kind, constexprs, "query_gradients"))
        cases.append(CompileCase(query_gradients_tma_kernel, signature, constexprs, num_warps=tiles.warps,
                                 num_stages=tiles.stages, label=label, **expectations))  # fmt: skip
    return cases
