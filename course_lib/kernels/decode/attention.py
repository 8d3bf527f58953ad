"""Decode attention over a contiguous cache: one query token per sequence, split over the keys (Flash-Decoding).

    output[b, h] = softmax(scale · query[b, h] · K[b, h // group]ᵀ) V[b, h // group]      over the first lengths[b] keys

FLOPs: 4 · query_heads · head_dim per key. Bytes: 2 · key_heads · head_dim · itemsize per key, each read once, as one
program takes all the query heads of a KV head. The intensity in 16 bits is so the group's size: 4 FLOPs per byte for 32
query heads on 8 KV heads, where an H200 could do 200. The bytes are the time: 8192 tokens, 8 KV heads, D = 128 are
33.6 MB, 7.7 µs at 4.37 TB/s.

To draw that bandwidth takes all multiprocessors, and one sequence has 8 KV heads: the keys of a sequence are split
among `splits` programs, and the last to finish merges what all have found (see `combine.finish_split`).
Source: Dao et al., Flash-Decoding for long-context inference, 2023; Ainslie et al., GQA, arXiv 2305.13245.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.kept import kept
from course_lib.kernels.common.attention_checks import check_sink, check_window
from course_lib.kernels.common.cache_checks import (
    check_indices,
    check_lengths,
    check_output,
    check_query_and_cache,
    check_splits,
)
from course_lib.kernels.common.checks import check_dimensions
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.common.splits import split_keys
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, attend_to_tile, load_queries, packed_heads
from course_lib.kernels.decode.tiles import decode_compile_cases, decode_settings, windowed
from course_lib.kernels.decode.workspace import prepare_step

CACHE_DIMENSIONS = "[batch, key_heads, capacity, head_dim]"


@triton.jit(do_not_specialize=(*DECODE_SIZES, "window"))
def decode_attention_kernel(
    query_pointer, key_pointer, value_pointer, lengths_pointer, output_pointer, lse_pointer,
    sink_pointer, partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride,
    query_heads, heads_per_key_head, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's keys."""
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = split_keys(length, tl.program_id(1), tl.num_programs(1), window)
    keys = key_pointer + batch * key_batch_stride + key_head.to(tl.int64) * key_head_stride
    values = value_pointer + batch * value_batch_stride + key_head.to(tl.int64) * value_head_stride

    queries = query_pointer + batch * query_batch_stride, query_head_stride
    query = load_queries(queries, heads, is_head, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_rows = positions.to(tl.int64) * key_stride
        value_rows = key_rows if SAME_STRIDES else positions.to(tl.int64) * value_stride
        running_max, weight_sums, accumulator = attend_to_tile(
            query,
            keys + key_rows,
            values + value_rows,
            positions < end,
            running_max,
            weight_sums,
            accumulator,
            scale_log2,
            HEAD_DIM,
            BLOCK_D,
        )

    finish_split(running_max, tl.sum(weight_sums, axis=1), accumulator, heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS, sink_pointer)  # fmt: skip


@kept
def decode_attention(
    query,
    key_cache,
    value_cache,
    lengths,
    *,
    window=None,
    scale=None,
    sink=None,
    splits=None,
    return_lse=False,
    output=None,
    workspace=None,
    validate=True,
):
    """Attention of one query token per sequence to the sequence's keys in a contiguous cache.

    Args:
        query: [batch, query_heads, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256. Any strides, with
            a contiguous last dimension; the caches too.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], of query's dtype and device. query_heads is a
            multiple of key_heads; query head h reads key head h // (query_heads // key_heads).
        lengths: int32 or int64 [batch], tokens of each sequence in the cache, the current one included; 0 to capacity.
        window: if given, the query sees at most `window` keys before its own position, besides its own. The others are
            not read, whatever they are.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        sink: [query_heads], float32 or query's dtype, a score for each query head that joins the softmax of its row and
            has no value; scale does not multiply it. None: no sink.
        splits: parts that each sequence's keys are split into, one program each; None takes those of the workspace, or
            asks `decode_plan`, with the capacity as the longest length, or the window's keys where they are fewer.
        return_lse: also return the log-sum-exp of the scaled scores, natural logarithm, float32 [batch, query_heads].
        output: where the result goes, of query's shape and dtype; a new tensor when None.
        workspace: from `decode_workspace`; allocated when None.
        validate: read `lengths` from the device and check them, which waits for it. With False, an output and a
            workspace, the host neither waits nor allocates: the step can be captured in a CUDA graph. A length that is
            wrong then reads memory of others.

    Returns the output, or (output, log-sum-exp); zeros and minus infinity, or the sink, for a sequence of length 0.
    With a workspace the log-sum-exp is the workspace's own tensor, which the next step overwrites.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, lengths or options don't fit.
    Source: Dao et al., Flash-Decoding for long-context inference, 2023.
    """
    check_dimensions("query", query, "[batch, query_heads, head_dim]")
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    check_query_and_cache(query, caches, CACHE_DIMENSIONS, scale, "[batch, query_heads, head_dim]")
    batch, query_heads, head_dim = query.shape
    key_heads, capacity = key_cache.shape[1:3]
    if key_cache.shape[0] != batch:
        raise ValueError(f"key_cache has batch size {key_cache.shape[0]}; it must be that of query, {batch}.")
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_output(output, query)
    check_window(window)
    check_sink(sink, query)
    check_splits(splits)
    if validate:
        check_lengths(lengths, capacity, "the cache")

    longest, window = windowed(capacity, window)
    plan, output, parts, lse = prepare_step(query, key_heads, longest, splits, return_lse, output, workspace)
    decode_attention_kernel[(plan.programs, plan.splits, batch)](
        query, key_cache, value_cache, lengths, output, lse, sink, *parts, *query.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], *output.stride()[:2], query_heads, query_heads // key_heads,
        window, scale_in_log2(scale, head_dim),
        SAME_STRIDES=key_cache.stride() == value_cache.stride(), **decode_settings(query, key_heads, plan.tiles),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return decode_compile_cases(decode_attention_kernel)
