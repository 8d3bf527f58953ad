"""dK and dV on Hopper and later: the tensor memory accelerator (TMA) moves the tiles.

The algorithm, FLOPs and bytes are those of `backward_keys`. The copy engine computes the addresses, fills in zeros where
a tensor ends, and leaves the registers to dK and dV, which take 128 of a thread's 255 at head dimension 128. With
`query_sums` it adds the parts of dQ as well: one instruction for a tile instead of an atomic for each of its numbers.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_parts import queries_as_seen_from
from course_lib.kernels.attention.backward_tiles import compile_configurations_tma, signature_tma
from course_lib.kernels.attention.parts import FLOAT32_PRECISION, SIZES, key_ranges, visible_pairs


@triton.jit
def gather_from_queries(
    key,
    value,
    queries,
    gradients,
    rows,
    query_sums,
    batch,
    head,
    begin,
    end,
    band,
    sums,
    scale,
    scale_log2,
    key_rows_left,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the queries in [begin, end) of one head; returns dK (before the scale) and dV after them."""
    BLOCK_N: tl.constexpr = key.shape[0]
    BLOCK_D: tl.constexpr = key.shape[1]
    key_gradient, value_gradient = sums
    log_sum_exps, deltas = rows
    for start in tl.range(begin, end, BLOCK_M):
        places = start + tl.arange(0, BLOCK_M)
        query = queries.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        scores = tl.dot(key, query.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            scores = tl.where(visible_pairs(places, band), scores, float("-inf"))
        log_sum_exp = tl.load(log_sum_exps + places)[None, :]  # [1, BLOCK_M], infinite beyond the last row
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp)  # [BLOCK_N, BLOCK_M]
        gradient = gradients.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        value_gradient = tl.dot(
            probabilities.to(gradient.dtype), gradient, value_gradient, input_precision=FLOAT32_PRECISION
        )
        probability_gradients = tl.dot(value, gradient.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(deltas + places)[None, :]  # [1, BLOCK_M]
        score_gradients = probabilities * (probability_gradients - delta)
        score_gradients = score_gradients.to(query.dtype)
        key_gradient = tl.dot(score_gradients, query, key_gradient, input_precision=FLOAT32_PRECISION)
        if query_sums is not None:
            if MASKED:  # rows beyond the last key have a P of their own, which may be infinite
                exists = (tl.arange(0, BLOCK_N) < key_rows_left)[:, None]
                score_gradients = tl.where(exists, score_gradients, 0.0).to(query.dtype)
            query_gradient = scale * tl.dot(score_gradients.T, key, input_precision=FLOAT32_PRECISION)
            query_sums.atomic_add([batch, head, start, 0], query_gradient.reshape(1, 1, BLOCK_M, BLOCK_D))
    return key_gradient, value_gradient  # [BLOCK_N, BLOCK_D] both


@triton.jit(do_not_specialize=SIZES)
def key_gradients_tma_kernel(
    queries, keys, values, gradients, lse_pointer, delta_pointer, key_gradients, value_gradients, query_sums,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, padded_length,
    scale, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one KV head, against all the queries that see them, of all heads that read it."""
    key_blocks = tl.cdiv(key_length, BLOCK_N)
    batch_and_key_head = tl.program_id(0) // key_blocks
    first_key = tl.program_id(0) % key_blocks * BLOCK_N  # when causal the first keys are seen by most: longest first
    key_heads = query_heads // heads_per_key_head
    batch = batch_and_key_head // key_heads
    key_head = batch_and_key_head % key_heads

    band = queries_as_seen_from(
        first_key + tl.arange(0, BLOCK_N), query_length, key_length, keys_before, keys_after
    )  # positions count from the first query
    first_position = first_key + query_length - key_length
    last_position = tl.minimum(first_key + BLOCK_N, key_length) - 1 + query_length - key_length
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, query_length, keys_after, keys_before, BLOCK_M
    )
    if keys_before is None:
        whole_end = end  # queries beyond the last are zeros with an infinite log-sum-exp: they need no mask
    if query_sums is not None:
        if first_key + BLOCK_N > key_length:  # no tile is whole, as the last keys are missing
            whole_begin = begin
            whole_end = begin

    key = keys.load([batch, key_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    value = values.load([batch, key_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(heads_per_key_head):
        head = key_head * heads_per_key_head + member
        first_row = (batch * query_heads + head).to(tl.int64) * padded_length
        rows = lse_pointer + first_row, delta_pointer + first_row
        sums = key_gradient, value_gradient
        if keys_after is not None:
            sums = gather_from_queries(
                key,
                value,
                queries,
                gradients,
                rows,
                query_sums,
                batch,
                head,
                begin,
                whole_begin,
                band,
                sums,
                scale,
                scale_log2,
                key_length - first_key,
                BLOCK_M,
                MASKED=True,
            )
        sums = gather_from_queries(
            key,
            value,
            queries,
            gradients,
            rows,
            query_sums,
            batch,
            head,
            whole_begin,
            whole_end,
            band,
            sums,
            scale,
            scale_log2,
            key_length - first_key,
            BLOCK_M,
            MASKED=False,
        )
        if keys_before is not None or query_sums is not None:
            sums = gather_from_queries(
                key,
                value,
                queries,
                gradients,
                rows,
                query_sums,
                batch,
                head,
                whole_end,
                end,
                band,
                sums,
                scale,
                scale_log2,
                key_length - first_key,
                BLOCK_M,
                MASKED=True,
            )
        key_gradient, value_gradient = sums

    dtype = key_gradients.dtype
    key_gradient = (scale * key_gradient).to(dtype).reshape(1, 1, BLOCK_N, BLOCK_D)
    key_gradients.store([batch, key_head, first_key, 0], key_gradient)
    value_gradients.store([batch, key_head, first_key, 0], value_gradient.to(dtype).reshape(1, 1, BLOCK_N, BLOCK_D))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a window, which has all the code; with the sums of dQ and without."""
    return [
        CompileCase(
            key_gradients_tma_kernel,
            signature_tma(kind, constexprs, ("key_gradients", "value_gradients"), query_sums),
            constexprs if query_sums else constexprs | {"query_sums": None},
            num_warps=tiles.warps, num_stages=tiles.stages, label=label, **expectations,
        )
        for kind, query_sums, tiles, constexprs, label, expectations in compile_configurations_tma("keys")
    ]  # fmt: skip
