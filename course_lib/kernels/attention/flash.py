"""FlashAttention, forward: exact attention that never writes the score matrix.

    O = softmax(scale · Q Kᵀ) V, one tile of queries per program, which streams over tiles of keys and values:

        S = Q Kᵀ of the tile            [BLOCK_M, BLOCK_N]   stays on chip
        m, ℓ, O  <-  online softmax     a row's running maximum, running sum and unnormalised output
        O / ℓ                           written once

FLOPs: 4 · batch · query_heads · query_length · key_length · head_dim, half of it when causal: as naive attention.
Bytes to and from memory: Q and O once; K and V once for each of the query_length / BLOCK_M programs of a head, most of
which the L2 cache serves. Naive attention moves 4 · query_length · key_length elements per head besides. At N = 8192,
D = 128, 16 bits and BLOCK_M = 128, one head: 4 MB of Q and O and 64 × 4 MB of K and V, against 537 MB of scores.
Extra memory: the output, and 4 bytes per query when the log-sum-exp is asked for.
Sources: Dao et al., FlashAttention, arXiv 2205.14135; Dao, FlashAttention-2, arXiv 2307.08691.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import (
    CAREFUL_KEYS,
    SIZES,
    all_finite,
    attend_carefully,
    key_ranges,
    load_rows,
    visible_pairs,
)
from course_lib.kernels.attention.tiles import candidate_tiles, tiles_for
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.softmax import finish_rows, scale_in_log2, weigh


@triton.jit
def attend(query, keys, values, begin, end, band, softmax_state, scale_log2,
           HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Stream over the tiles of keys and values in [begin, end); returns the softmax state after them."""
    BLOCK_D: tl.constexpr = query.shape[1]
    key_length = band[1]
    running_max, running_sum, accumulator = softmax_state
    for start in tl.range(begin, end, BLOCK_N):
        key_tile = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        accumulator = accumulator * rescale[:, None]
        value_tile = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        weights = weights.to(value_tile.dtype)
        accumulator = tl.dot(weights, value_tile, accumulator, input_precision=FLOAT32_PRECISION)
    return running_max, running_sum, accumulator


@triton.jit(do_not_specialize=SIZES)
def flash_attention_kernel(
    query_pointer, key_pointer, value_pointer, sink_pointer, output_pointer, lse_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    output_batch_stride, output_head_stride, output_stride,
    query_heads, heads_per_key_head, query_length, key_length, keys_before, keys_after, scale_log2,
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

    # Positions count from the first key, and the last query stands at the last key.
    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, keys_before, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, whole_begin, whole_end, end = key_ranges(
        first_position, last_position, key_length, keys_before, keys_after, BLOCK_N
    )

    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    state = running_max, running_sum, accumulator
    if keys_before is not None:
        state = attend(query, keys, values, begin, whole_begin, band, state, scale_log2,
                       HEAD_DIM, BLOCK_N, MASKED=True)  # fmt: skip
    state = attend(query, keys, values, whole_begin, whole_end, band, state, scale_log2,
                   HEAD_DIM, BLOCK_N, MASKED=False)  # fmt: skip
    state = attend(query, keys, values, whole_end, end, band, state, scale_log2,
                   HEAD_DIM, BLOCK_N, MASKED=True)  # fmt: skip

    running_max, running_sum, accumulator = state
    if keys_before is not None or keys_after is not None:
        if not all_finite(accumulator):
            running_max, running_sum, accumulator = attend_carefully(
                query, keys, values, begin, end, key_length, band, scale_log2, HEAD_DIM, CAREFUL_KEYS
            )
    sink = None
    if sink_pointer is not None:
        sink = tl.load(sink_pointer + head).to(tl.float32)
    output, log_sum_exp = finish_rows(accumulator, running_max, running_sum, sink)
    rows = first_query + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    outputs = output_pointer + batch * output_batch_stride + head * output_head_stride
    tl.store(
        outputs + rows.to(tl.int64)[:, None] * output_stride + columns[None, :],
        output.to(output_pointer.dtype.element_ty),
        mask=(rows < query_length)[:, None] & (columns < HEAD_DIM)[None, :],
    )
    if lse_pointer is not None:
        lse_row = lse_pointer + batch_and_head.to(tl.int64) * query_length
        tl.store(lse_row + rows, log_sum_exp, mask=rows < query_length)


def flash_attention(
    query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False, tiles=None
):
    """Exact softmax attention in one kernel, in memory linear in the lengths, on any GPU.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256.
            Any strides, with a contiguous last dimension.
        key, value: [batch, key_heads, key_length, head_dim], of query's dtype and device. query_heads is a multiple of
            key_heads; query head h reads key head h // (query_heads // key_heads).
        causal: query i sees the keys up to position i + key_length - query_length: aligned to the end.
        window: if given, a query sees at most `window` keys before its own position, besides its own; without causal
            also at most `window` after it.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        sink: [query_heads], float32 or query's dtype, a score for each query head that joins the softmax of its rows
            and has no value; scale does not multiply it. None: no sink, as one of minus infinity.
        return_lse: also return the log-sum-exp of each row of scaled scores, and of its sink, natural logarithm,
            float32 [batch, query_heads, query_length].
        tiles: the `Tiles` to use; when None, the fastest of `candidate_tiles` as measured on this GPU at the first call
            for such lengths.

    Returns the output, contiguous, of query's shape and dtype, or (output, log-sum-exp). A query that sees no key
    (causal, with more queries than keys) gets zeros and minus infinity, or the sink. A NaN or an infinity in an input
    reaches the queries that see it, and no other; a sink of NaN reaches those of its head.

    Raises a ValueError that names the argument when shapes, dtypes, devices or options don't fit.
    Source: Dao, FlashAttention-2, arXiv 2307.08691, Algorithm 1.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale, sink=sink)
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None

    def launch(tiles):
        flash_attention_kernel[(triton.cdiv(query_length, tiles.query_rows) * batch * query_heads,)](
            query, key, value, sink, output, lse,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
            query_heads, query_heads // key_heads, query_length, key_length, window, 0 if causal else window,
            scale_in_log2(scale, head_dim), head_dim, triton.next_power_of_2(head_dim), **tiles.settings(),
        )  # fmt: skip

    launch(tiles or tiles_for(query, key, launch, ("pointers", causal, window is None)))
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the best tiles of every architecture with a window and a sink: all the code."""
    sixteen_bits = [(80, head_dim, torch.bfloat16) for head_dim in (64, 128, 256)]
    sixteen_bits += [(arch, 128, torch.bfloat16) for arch in (86, 89, 90, 100, 120)]
    cases = [compile_case(*case, max_spill_bytes=0, instruction={80: "mma.sync", 89: "mma.sync", 90: "wgmma"})
             for case in sixteen_bits]  # fmt: skip
    # Neither uses the matrix units: right rather than fast, so a spill is no defect.
    slow = [(75, 64, torch.float16), (80, 64, torch.float32)]
    return cases + [compile_case(*case, max_spill_bytes=None, instruction=None) for case in slow]


def compile_case(arch: int, head_dim: int, dtype: torch.dtype, **expectations) -> CompileCase:
    tiles = candidate_tiles(arch, dtype, head_dim)[0]
    kind = KINDS[dtype]
    return CompileCase(
        flash_attention_kernel, signature_of(flash_attention_kernel, kind),
        {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), **tiles.blocks()},
        num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,), label=f"{kind} {head_dim} {tuple(tiles)}",
        **expectations,
    )  # fmt: skip
