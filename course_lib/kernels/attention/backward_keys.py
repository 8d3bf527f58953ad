"""dK and dV: one program per block of keys, which streams over the queries that see them.

    Sᵀ = K Qᵀ,  Pᵀ = exp2(Sᵀ · scale · log2 e - LSE)     [BLOCK_N, BLOCK_M]     on chip
    dPᵀ = V dOᵀ,  dSᵀ = Pᵀ ∘ (dPᵀ - Δ)                   [BLOCK_N, BLOCK_M]     on chip
    dV += Pᵀ dO,  dK += dSᵀ Q                            [BLOCK_N, HEAD_DIM]    in registers, written once

Against the forward the two loops are turned inside out: there a program holds queries and streams over keys, here it
holds keys and streams over queries, because dK and dV are sums over queries. The tiles have keys as rows, so that Pᵀ
and dSᵀ go into the next product from the registers. Query heads that share a KV head are streamed one after the other
into the same sums.

FLOPs: four products, 8 · batch · query_heads · query_length · key_length · head_dim; half of it when causal.
Bytes: K, V, dK and dV once; Q and dO once for each of the key_length / BLOCK_N programs of a head, most of which the L2
cache serves. At N = 8192, D = 128, 16 bits and BLOCK_N = 128, one head: 8 MB, and 64 × 4 MB of Q and dO.

With `query_sums` the fifth product is made here as well: dQ = scale · dS K, a sum over keys, to which each program has
only a part. The parts are added in float32 by atomics, in the order in which programs come to it: no sum in floating
point is the same in another order, so the last digits of dQ differ from run to run.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_tiles import compile_configurations
from course_lib.kernels.attention.parts import SIZES, key_ranges, load_rows, visible_pairs
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of


@triton.jit
def gather_from_queries(
    key,
    value,
    queries,
    gradients,
    rows,
    query_sums,
    place,
    heads,
    begin,
    end,
    band,
    sums,
    scale,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the queries in [begin, end) of each of these heads; returns dK, before the scale, and dV."""
    BLOCK_N: tl.constexpr = key.shape[0]
    BLOCK_D: tl.constexpr = key.shape[1]
    key_gradient, value_gradient = sums
    query_pointer, query_head_stride, query_stride = queries  # of the first of the heads
    gradient_pointer, gradient_head_stride, gradient_stride = gradients
    log_sum_exps, deltas, padded_length = rows
    first_head, head_count = heads
    query_length = band[1]
    tiles = tl.cdiv(end - begin, BLOCK_M)
    for step in tl.range(head_count * tiles):  # one loop for all heads: a loop within a loop takes registers
        member = tl.cast(step // tiles, tl.int64)
        start = begin + (tiles - 1 - step % tiles) * BLOCK_M
        places = start + tl.arange(0, BLOCK_M)
        row = (first_head + member) * padded_length + places  # [BLOCK_M]
        of_head = query_pointer + member * query_head_stride, query_stride
        query = load_rows(of_head, start, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED)
        scores = tl.dot(key, tl.trans(query), input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            scores = tl.where(visible_pairs(places, band), scores, float("-inf"))
        log_sum_exp = tl.load(log_sum_exps + row)  # [BLOCK_M], infinite beyond the last row
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp[None, :])  # [BLOCK_N, BLOCK_M]
        of_head = gradient_pointer + member * gradient_head_stride, gradient_stride
        gradient = load_rows(of_head, start, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED)
        value_gradient = tl.dot(
            probabilities.to(gradient.dtype), gradient, value_gradient, input_precision=FLOAT32_PRECISION
        )
        probability_gradients = tl.dot(value, tl.trans(gradient), input_precision=FLOAT32_PRECISION)
        delta = tl.load(deltas + row)  # [BLOCK_M]
        score_gradients = (probabilities * (probability_gradients - delta[None, :])).to(query.dtype)
        key_gradient = tl.dot(score_gradients, query, key_gradient, input_precision=FLOAT32_PRECISION)
        if query_sums is not None:
            first_key, key_length = place
            if MASKED:  # rows beyond the last key have a P of their own, which may be infinite
                exists = (first_key + tl.arange(0, BLOCK_N) < key_length)[:, None]
                score_gradients = tl.where(exists, score_gradients, 0.0).to(query.dtype)
            query_gradient = scale * tl.dot(tl.trans(score_gradients), key, input_precision=FLOAT32_PRECISION)
            columns = tl.arange(0, BLOCK_D)
            sums_row = (first_head + member) * query_length + places  # [BLOCK_M]
            tl.atomic_add(
                query_sums + (sums_row[:, None] * HEAD_DIM + columns[None, :]),  # [BLOCK_M, BLOCK_D]
                query_gradient,
                mask=(places < query_length)[:, None] & (columns < HEAD_DIM)[None, :],
                sem="relaxed",
            )
    return key_gradient, value_gradient  # [BLOCK_N, BLOCK_D] both


@triton.jit(do_not_specialize=SIZES)
def key_gradients_kernel(
    query_pointer, key_pointer, value_pointer, gradient_pointer, lse_pointer, delta_pointer,
    key_gradient_pointer, value_gradient_pointer, query_sums_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, padded_length,
    scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one KV head, against all the queries that see them, of all heads that read it."""
    key_blocks = tl.cdiv(key_length, BLOCK_N)
    batch_and_key_head = tl.program_id(0) // key_blocks
    first_key = tl.program_id(0) % key_blocks * BLOCK_N  # when causal the first keys are seen by most: longest first
    key_heads = query_heads // heads_per_key_head
    batch = (batch_and_key_head // key_heads).to(tl.int64)
    key_head = (batch_and_key_head % key_heads).to(tl.int64)
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride

    # The roles exchanged: positions count from the first query, and keys see queries. A query sees keys_before keys
    # before its place and keys_after after it; so a key is seen by keys_after queries before its place, keys_before
    # after it.
    first_position = first_key + query_length - key_length
    band = first_position + tl.arange(0, BLOCK_N), query_length, keys_after, keys_before
    last_position = tl.minimum(first_key + BLOCK_N, key_length) - 1 + query_length - key_length
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, query_length, keys_after, keys_before, BLOCK_M
    )
    if query_sums_pointer is not None:
        if first_key + BLOCK_N > key_length:  # no tile is whole, as the last keys are missing
            whole_begin = begin
            whole_end = begin

    key = load_rows(keys, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    value = load_rows(values, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first_head = key_head * heads_per_key_head
    queries = query_pointer + batch * query_batch_stride + first_head * query_head_stride
    gradients = gradient_pointer + batch * gradient_batch_stride + first_head * gradient_head_stride
    queries = queries, query_head_stride, query_stride
    gradients = gradients, gradient_head_stride, gradient_stride
    rows = lse_pointer, delta_pointer, padded_length
    place = first_key, key_length
    heads = batch * query_heads + first_head, heads_per_key_head
    sums = key_gradient, value_gradient
    # From the last queries backwards: when causal all blocks of keys see these, so programs that run at a time read the
    # same tiles.
    sums = gather_from_queries(
        key,
        value,
        queries,
        gradients,
        rows,
        query_sums_pointer,
        place,
        heads,
        whole_end,
        end,
        band,
        sums,
        scale,
        scale_log2,
        HEAD_DIM,
        BLOCK_M,
        MASKED=True,
    )
    sums = gather_from_queries(
        key,
        value,
        queries,
        gradients,
        rows,
        query_sums_pointer,
        place,
        heads,
        whole_begin,
        whole_end,
        band,
        sums,
        scale,
        scale_log2,
        HEAD_DIM,
        BLOCK_M,
        MASKED=False,
    )
    if keys_after is not None:
        sums = gather_from_queries(
            key,
            value,
            queries,
            gradients,
            rows,
            query_sums_pointer,
            place,
            heads,
            begin,
            whole_begin,
            band,
            sums,
            scale,
            scale_log2,
            HEAD_DIM,
            BLOCK_M,
            MASKED=True,
        )
    key_gradient, value_gradient = sums

    rows = first_key + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < key_length)[:, None] & (columns < HEAD_DIM)[None, :]
    places = (batch_and_key_head.to(tl.int64) * key_length + rows)[:, None] * HEAD_DIM + columns[None, :]
    dtype = key_gradient_pointer.dtype.element_ty
    tl.store(key_gradient_pointer + places, (scale * key_gradient).to(dtype), mask=inside)
    tl.store(value_gradient_pointer + places, value_gradient.to(dtype), mask=inside)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a window, which has all the code; with the atomics on some."""
    return [
        CompileCase(
            key_gradients_kernel, signature_of(key_gradients_kernel, kind, query_sums_pointer=query_sums),
            constexprs if query_sums else constexprs | {"query_sums_pointer": None},
            num_warps=tiles.warps, num_stages=tiles.stages, label=label, **expectations,
        )
        for kind, query_sums, tiles, constexprs, label, expectations in compile_configurations("keys")
    ]  # fmt: skip
