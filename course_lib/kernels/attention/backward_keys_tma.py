"""dK and dV on Hopper and later: the tensor memory accelerator (TMA) moves the tiles.

The algorithm, FLOPs and bytes are those of `backward_keys`. The copy engine computes the addresses, fills in zeros
where a tensor ends, and leaves the registers to dK and dV, which take 128 of a thread's 255 at head dimension 128. With
`query_sums` it adds the parts of dQ as well: one instruction for a tile instead of an atomic for each of its numbers.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_parts import WIDE
from course_lib.kernels.attention.backward_tiles import boxes, compile_configurations
from course_lib.kernels.attention.parts import SIZES, key_ranges, visible_pairs
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
    BLOCK_M: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the queries in [begin, end) of each of these heads; returns dK, before the scale, and dV."""
    BLOCK_N: tl.constexpr = key.shape[0]
    BLOCK_D: tl.constexpr = key.shape[1]
    BOTH_FIRST: tl.constexpr = BLOCK_D >= WIDE
    key_gradient, value_gradient = sums
    log_sum_exps, deltas, padded_length = rows
    batch, first_key, key_length = place
    query_heads, first_head, head_count = heads
    tiles = tl.cdiv(end - begin, BLOCK_M)
    for step in tl.range(head_count * tiles):  # one loop for all heads: a loop within a loop takes registers
        head = first_head + step // tiles
        tile = step % tiles
        if LAST_FIRST:
            tile = tiles - 1 - tile
        start = begin + tile * BLOCK_M
        places = start + tl.arange(0, BLOCK_M)
        row = (batch * query_heads + head).to(tl.int64) * padded_length + places  # [BLOCK_M]
        query = queries.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        scores = tl.dot(key, query.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        if MASKED:
            scores = tl.where(visible_pairs(places, band), scores, float("-inf"))
        if BOTH_FIRST:
            gradient = gradients.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
            probability_gradients = tl.dot(value, gradient.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        log_sum_exp = tl.load(log_sum_exps + row)  # [BLOCK_M], infinite beyond the last row
        probabilities = tl.exp2(scores * scale_log2 - log_sum_exp[None, :])  # [BLOCK_N, BLOCK_M]
        if not BOTH_FIRST:
            gradient = gradients.load([batch, head, start, 0]).reshape(BLOCK_M, BLOCK_D)
        value_gradient = tl.dot(
            probabilities.to(gradient.dtype), gradient, value_gradient, input_precision=FLOAT32_PRECISION
        )
        if not BOTH_FIRST:
            probability_gradients = tl.dot(value, gradient.T, input_precision=FLOAT32_PRECISION)  # [BLOCK_N, BLOCK_M]
        delta = tl.load(deltas + row)  # [BLOCK_M]
        score_gradients = (probabilities * (probability_gradients - delta[None, :])).to(query.dtype)
        key_gradient = tl.dot(score_gradients, query, key_gradient, input_precision=FLOAT32_PRECISION)
        if query_sums is not None:
            if MASKED:  # rows beyond the last key have a P of their own, which may be infinite
                exists = (first_key + tl.arange(0, BLOCK_N) < key_length)[:, None]
                score_gradients = tl.where(exists, score_gradients, 0.0).to(query.dtype)
            query_gradient = scale * tl.dot(score_gradients.T, key, input_precision=FLOAT32_PRECISION)
            query_sums.atomic_add([batch, head, start, 0], query_gradient.reshape(1, 1, BLOCK_M, BLOCK_D))
    return key_gradient, value_gradient  # [BLOCK_N, BLOCK_D] both


@triton.jit(do_not_specialize=SIZES)
def key_gradients_tma_kernel(
    queries, keys, values, gradients, lse_pointer, delta_pointer, key_gradients, value_gradients, query_sums,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, padded_length,
    scale, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, RAGGED_KEYS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one KV head, against all the queries that see them, of all heads that read it."""
    key_blocks = tl.cdiv(key_length, BLOCK_N)
    batch_and_key_head = tl.program_id(0) // key_blocks
    first_key = tl.program_id(0) % key_blocks * BLOCK_N  # when causal the first keys are seen by most: longest first
    key_heads = query_heads // heads_per_key_head
    batch = batch_and_key_head // key_heads
    key_head = batch_and_key_head % key_heads

    # The roles exchanged: positions count from the first query, and keys see queries. A query sees keys_before keys
    # before its place and keys_after after it; so a key is seen by keys_after queries before its place, keys_before
    # after it.
    first_position = first_key + query_length - key_length
    band = first_position + tl.arange(0, BLOCK_N), query_length, keys_after, keys_before
    last_position = tl.minimum(first_key + BLOCK_N, key_length) - 1 + query_length - key_length
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, query_length, keys_after, keys_before, BLOCK_M
    )
    if keys_before is None:
        whole_end = end  # queries beyond the last are zeros with an infinite log-sum-exp: they need no mask
    if RAGGED_KEYS:
        if first_key + BLOCK_N > key_length:  # no tile is whole, as the last keys are missing
            whole_begin = begin
            whole_end = begin

    key = keys.load([batch, key_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    value = values.load([batch, key_head, first_key, 0]).reshape(BLOCK_N, BLOCK_D)
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    rows = lse_pointer, delta_pointer, padded_length
    place = batch, first_key, key_length
    heads = query_heads, key_head * heads_per_key_head, heads_per_key_head
    sums = key_gradient, value_gradient
    # When causal from the last queries backwards: all blocks of keys see these, so programs that run at a time read the
    # same tiles.
    if keys_before is not None or RAGGED_KEYS:
        sums = gather_from_queries(
            key,
            value,
            queries,
            gradients,
            rows,
            query_sums,
            place,
            heads,
            whole_end,
            end,
            band,
            sums,
            scale,
            scale_log2,
            BLOCK_M,
            keys_after is not None,
            MASKED=True,
        )
    sums = gather_from_queries(
        key,
        value,
        queries,
        gradients,
        rows,
        query_sums,
        place,
        heads,
        whole_begin,
        whole_end,
        band,
        sums,
        scale,
        scale_log2,
        BLOCK_M,
        keys_after is not None,
        MASKED=False,
    )
    if keys_after is not None:
        sums = gather_from_queries(
            key,
            value,
            queries,
            gradients,
            rows,
            query_sums,
            place,
            heads,
            begin,
            whole_begin,
            band,
            sums,
            scale,
            scale_log2,
            BLOCK_M,
            keys_after is not None,
            MASKED=True,
        )
    key_gradient, value_gradient = sums

    dtype = key_gradients.dtype
    key_gradient = (scale * key_gradient).to(dtype).reshape(1, 1, BLOCK_N, BLOCK_D)
    key_gradients.store([batch, key_head, first_key, 0], key_gradient)
    value_gradients.store([batch, key_head, first_key, 0], value_gradient.to(dtype).reshape(1, 1, BLOCK_N, BLOCK_D))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a window, which has all the code; with the sums of dQ and without."""
    cases = []
    for kind, query_sums, tiles, constexprs, label, expectations in compile_configurations("keys", True):
        types = boxes(kind, constexprs, "key_gradients", "value_gradients")
        sums = boxes("fp32", constexprs, "query_gradients")["query_gradients"] if query_sums else None
        cases.append(CompileCase(
            key_gradients_tma_kernel, signature_of(key_gradients_tma_kernel, kind, query_sums=sums, **types),
            constexprs | ({"RAGGED_KEYS": True} if query_sums else {"RAGGED_KEYS": False, "query_sums": None}),
            num_warps=tiles.warps, num_stages=tiles.stages, label=label, **expectations,
        ))  # fmt: skip
    return cases
