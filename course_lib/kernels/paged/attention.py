"""Paged attention for decode: one query token per sequence, whose keys lie in pages anywhere in a pool.

    page of token t of sequence b:   block_tables[b, t // page_size]
    its place in the page:           t % page_size

FLOPs and bytes are those of `decode_attention`, and 4 bytes per page read from the table. What paging costs is time to
know addresses: a load of keys can start only when the load of their page's number is done. Were that one made in the
same step of the loop, the compiler could keep a single tile of keys in flight. Here each step loads the page numbers of
the next, so they are there in time and the tiles are pipelined as in a contiguous cache.

Each row of a key tile finds its own page, whatever the page size: the pages of a tile are loaded as one, and a page of
one KV head is contiguous in memory in the layout [pages, key_heads, page_size, head_dim]: 4 KB for 16 tokens of 128
numbers of 16 bits.
Source: Kwon et al., PagedAttention, arXiv 2309.06180; Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.kept import kept
from course_lib.kernels.common.attention_checks import check_sink, check_window
from course_lib.kernels.common.cache_checks import (
    check_indices,
    check_output,
    check_query_and_cache,
    check_splits,
    check_tables,
)
from course_lib.kernels.common.dependent import launch_options, wait_for_kernel_before
from course_lib.kernels.common.pages import load_page_numbers, page_rows
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.common.splits import split_keys
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, attend_to_tile, load_queries, packed_heads
from course_lib.kernels.decode.tiles import decode_compile_cases, decode_settings, windowed
from course_lib.kernels.decode.workspace import prepare_step
from course_lib.kernels.paged.prefill import PAGE_DIMENSIONS, paged_prefill_attention

__all__ = ["paged_decode_attention", "paged_prefill_attention"]


@triton.jit(do_not_specialize=(*DECODE_SIZES, "window"))
def paged_decode_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, lengths_pointer, output_pointer, lse_pointer,
    sink_pointer, partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, key_page_stride, key_head_stride, key_stride,
    value_page_stride, value_head_stride, value_stride, table_stride, output_batch_stride, output_head_stride,
    query_heads, heads_per_key_head, window, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAME_STRIDES: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's keys."""
    wait_for_kernel_before(DEPENDENT)
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = split_keys(length, tl.program_id(1), tl.num_programs(1), window)
    keys = key_pointer + key_head.to(tl.int64) * key_head_stride
    values = value_pointer + key_head.to(tl.int64) * value_head_stride
    table = tables_pointer + batch * table_stride

    queries = query_pointer + batch * query_batch_stride, query_head_stride
    query = load_queries(queries, heads, is_head, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages = load_page_numbers(table, begin, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
    for start in tl.range(begin, end, BLOCK_N):
        next_pages = load_page_numbers(table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
        positions = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_rows = page_rows(pages, positions, key_page_stride, key_stride, PAGE_SIZE)
        value_rows = key_rows if SAME_STRIDES else page_rows(
            pages, positions, value_page_stride, value_stride, PAGE_SIZE)  # fmt: skip
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
        pages = next_pages

    finish_split(running_max, tl.sum(weight_sums, axis=1), accumulator, heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS, sink_pointer)  # fmt: skip


@kept
def paged_decode_attention(
    query,
    key_pages,
    value_pages,
    block_tables,
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
    dependent=False,
):
    """Attention of one query token per sequence to the sequence's keys in a paged cache.

    Args:
        query: [batch, query_heads, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256. Any strides, with
            a contiguous last dimension; the pages too.
        key_pages, value_pages: [pages, key_heads, page_size, head_dim], of query's dtype and device. query_heads is a
            multiple of key_heads; query head h reads key head h // (query_heads // key_heads).
        block_tables: int32 or int64 [batch, max_blocks]: the page of tokens i·page_size to (i + 1)·page_size - 1 of a
            sequence at [sequence, i]. Entries that the length doesn't reach, and those of pages that lie before the
            window, are not read, and may be anything: a page that no query will see again can be given back.
        lengths: int32 or int64 [batch], tokens of each sequence in the cache, the current one included; 0 or more.
        window, scale, sink, splits, return_lse, output, workspace: as for `decode_attention`; the longest length is
            taken to be max_blocks · page_size.
        validate: read `lengths` and `block_tables` from the device and check them, which waits for it. With False, an
            output and a workspace, the host neither waits nor allocates: the step can be captured in a CUDA graph. A
            length or a page number that is wrong then reads memory of others.
        dependent: start while the kernel before still runs; from sm_90 on.

    Returns the output, or (output, log-sum-exp); zeros and minus infinity, or the sink, for a sequence of length 0.
    With a workspace the log-sum-exp is the workspace's own tensor, which the next step overwrites.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, lengths, tables or options don't
    fit: a table too short for its length, say, or a page outside the pool.
    Source: Kwon et al., PagedAttention, arXiv 2309.06180.
    """
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    check_query_and_cache(query, pools, PAGE_DIMENSIONS, scale, "[batch, query_heads, head_dim]")
    batch, query_heads, head_dim = query.shape
    pages, key_heads, page_size = key_pages.shape[:3]
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (batch, None), query.device)
    check_output(output, query)
    check_window(window)
    check_sink(sink, query)
    check_splits(splits)
    if validate:
        check_tables(block_tables, lengths, pages, page_size, window)

    capacity = block_tables.shape[1] * page_size
    longest, window = windowed(capacity, window)
    plan, output, parts, lse = prepare_step(query, key_heads, longest, splits, return_lse, output, workspace)
    paged_decode_kernel[(plan.programs, plan.splits, batch)](
        query, key_pages, value_pages, block_tables, lengths, output, lse, sink, *parts,
        *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0),
        *output.stride()[:2], query_heads, query_heads // key_heads,
        window, scale_in_log2(scale, head_dim), PAGE_SIZE=page_size,
        SAME_STRIDES=key_pages.stride() == value_pages.stride(), **decode_settings(query, key_heads, plan.tiles),
        **launch_options(dependent, query.device),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, at page size 16."""
    return decode_compile_cases(paged_decode_kernel, PAGE_SIZE=16)
