"""Paged attention for prefill: the new tokens of each sequence, after a prefix that is already in its pages.

The keys and values of the new tokens are in the pages too (`append_to_pages` goes first), so that a prompt whose
beginning another request has computed, or a chunk of a long prompt, differs from a whole prompt in one number only: how
many keys stand before its first query. Query tokens of all sequences lie one after another, without padding.

A tile packs the query heads of a KV head, as in decode: row r is token r // group of the tile's tokens, head r % group.
FLOPs: 4 · query_heads · head_dim per visible pair of query and key. Bytes: keys and values once per tile of queries.
Source: Kwon et al., PagedAttention, arXiv 2309.06180; Dao, FlashAttention-2, arXiv 2307.08691.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import (
    check_indices,
    check_output,
    check_query_and_cache,
    check_query_starts,
    check_tables,
)
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.pages import load_page_numbers, page_rows
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.softmax import finish_rows, scale_in_log2, weigh
from course_lib.kernels.decode.parts import load_cache_rows
from course_lib.kernels.decode.tiles import prefill_tiles

PAGE_DIMENSIONS = "[pages, key_heads, page_size, head_dim]"


@triton.jit
def attend_pages(
    query,
    keys,
    values,
    table,
    begin,
    end,
    query_positions,
    softmax_state,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Stream over the keys in [begin, end) of a sequence; returns the softmax state after them.

    keys, values: (pointer of the KV head in the first page, page stride, token stride).
    """
    running_max, running_sum, accumulator = softmax_state
    key_pointer, key_page_stride, key_stride = keys
    value_pointer, value_page_stride, value_stride = values
    BLOCK_D: tl.constexpr = query.shape[1]
    pages = load_page_numbers(table, begin, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
    for start in tl.range(begin, end, BLOCK_N):
        next_pages = load_page_numbers(table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
        positions = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = positions < end
        key_rows = key_pointer + page_rows(pages, positions, key_page_stride, key_stride, PAGE_SIZE)
        key_tile = load_cache_rows(key_rows, inside, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            sees = inside[None, :] & (positions[None, :] <= query_positions[:, None])
            scores = tl.where(sees, scores, float("-inf"))
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        accumulator = accumulator * rescale[:, None]
        value_rows = value_pointer + page_rows(pages, positions, value_page_stride, value_stride, PAGE_SIZE)
        value_tile = load_cache_rows(value_rows, inside, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        weights = weights.to(value_tile.dtype)
        accumulator = tl.dot(weights, value_tile, accumulator, input_precision=FLOAT32_PRECISION)
        pages = next_pages
    return running_max, running_sum, accumulator


@triton.jit(do_not_specialize=("query_heads", "heads_per_key_head", "tokens_per_tile"))
def paged_prefill_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, starts_pointer, lengths_pointer, output_pointer,
    lse_pointer, query_stride, query_head_stride, key_page_stride, key_head_stride, key_stride,
    value_page_stride, value_head_stride, value_stride, table_stride, output_stride, output_head_stride,
    query_heads, heads_per_key_head, tokens_per_tile, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: tokens_per_tile query tokens of one sequence with the heads of one KV head, against their keys."""
    batch = tl.program_id(2).to(tl.int64)
    query_begin = tl.load(starts_pointer + batch).to(tl.int32)
    query_count = tl.load(starts_pointer + batch + 1).to(tl.int32) - query_begin
    # The last queries see the most keys: begin with them, so that the short programs fill the gaps.
    first_query = (tl.num_programs(0) - 1 - tl.program_id(0)) * tokens_per_tile
    if first_query < query_count:
        length = tl.load(lengths_pointer + batch).to(tl.int32)
        key_head = tl.program_id(1)
        rows = tl.arange(0, BLOCK_M)
        tokens = first_query + rows // heads_per_key_head  # [BLOCK_M], within the sequence's queries
        heads = key_head * heads_per_key_head + rows % heads_per_key_head  # [BLOCK_M]
        is_query = (rows < tokens_per_tile * heads_per_key_head) & (tokens < query_count)
        # Aligned to the end: the last query stands at the last key.
        query_positions = tokens + length - query_count  # [BLOCK_M]
        columns = tl.arange(0, BLOCK_D)
        exists = is_query[:, None] & (columns < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
        token_rows = (query_begin + tokens).to(tl.int64)
        query = tl.load(query_pointer + (token_rows * query_stride + heads * query_head_stride)[:, None]
                        + columns[None, :], mask=exists, other=0.0)  # fmt: skip

        keys = key_pointer + key_head.to(tl.int64) * key_head_stride, key_page_stride, key_stride
        values = value_pointer + key_head.to(tl.int64) * value_head_stride, value_page_stride, value_stride
        table = tables_pointer + batch * table_stride
        # All queries of the tile see the keys up to the first one's position; the last one's is the end.
        first_position = first_query + length - query_count
        end = tl.minimum(length, first_position + tokens_per_tile)
        whole_end = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
        state = (tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32),
                 tl.zeros([BLOCK_M, BLOCK_D], tl.float32))  # fmt: skip
        state = attend_pages(
            query,
            keys,
            values,
            table,
            0,
            whole_end,
            query_positions,
            state,
            scale_log2,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_N,
            MASKED=False,
        )
        state = attend_pages(
            query,
            keys,
            values,
            table,
            whole_end,
            end,
            query_positions,
            state,
            scale_log2,
            HEAD_DIM,
            PAGE_SIZE,
            BLOCK_N,
            MASKED=True,
        )
        running_max, running_sum, accumulator = state
        output, lse = finish_rows(accumulator, running_max, running_sum)
        outputs = output_pointer + (token_rows * output_stride + heads * output_head_stride)[:, None]
        tl.store(outputs + columns[None, :], output.to(output_pointer.dtype.element_ty), mask=exists)
        if lse_pointer is not None:
            tl.store(lse_pointer + token_rows * query_heads + heads, lse, mask=is_query)


def paged_prefill_attention(
    query,
    key_pages,
    value_pages,
    block_tables,
    query_starts,
    lengths,
    *,
    scale=None,
    longest_query=None,
    return_lse=False,
    output=None,
    validate=True,
):
    """Causal attention of the last tokens of each sequence to all of its tokens, which lie in pages.

    Args:
        query: [tokens, query_heads, head_dim], float32, float16 or bfloat16: those of the first sequence, then of the
            second, and so on. Any strides, with a contiguous last dimension; the pages too.
        key_pages, value_pages, block_tables: as for `paged_decode_attention`; at most 64 query heads per KV head.
        query_starts: int32 or int64 [batch + 1]: the tokens of sequence i are query_starts[i] to query_starts[i + 1];
            from 0 to `tokens`, not falling. A sequence may have none.
        lengths: int32 or int64 [batch]: tokens of each sequence in its pages, at least as many as it has queries. The
            last query token is at position lengths[i] - 1 and sees all keys, the one before it one less.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        longest_query: the most query tokens that a sequence has, or a bound; read from the device when None.
        return_lse: also return the log-sum-exp of the scaled scores, natural logarithm, float32 [tokens, query_heads].
        output: where the result goes, of query's shape and dtype; a new tensor when None.
        validate: read starts, lengths and tables from the device and check them, which waits for it.

    Returns the output, or (output, log-sum-exp). What the last page holds beyond a length is not read; a NaN in a later
    token of the same sequence may reach queries that don't see it.
    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, tables or options don't fit.
    Source: Kwon et al., PagedAttention, arXiv 2309.06180.
    """
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    check_query_and_cache(query, pools, PAGE_DIMENSIONS, scale, "[tokens, query_heads, head_dim]")
    tokens, query_heads, head_dim = query.shape
    pages, key_heads, page_size = key_pages.shape[:3]
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (None, None), query.device)
    batch = block_tables.shape[0]
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_indices("query_starts", query_starts, "[batch + 1]", (batch + 1,), query.device)
    check_output(output, query)
    block_d = triton.next_power_of_2(head_dim)
    tiles = prefill_tiles(architecture_of(query.device), query.dtype, block_d)
    group = query_heads // key_heads
    if group > tiles.query_rows:
        raise ValueError(f"query has {group} heads for each of key_pages; prefill takes at most {tiles.query_rows}.")
    if validate:
        check_tables(block_tables, lengths, pages, page_size)
        check_query_starts(query_starts, lengths, tokens)
    if longest_query is None:
        longest_query = int(query_starts.diff().max())

    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = torch.empty(tokens, query_heads, dtype=torch.float32, device=query.device) if return_lse else None
    tokens_per_tile = tiles.query_rows // group
    paged_prefill_kernel[(triton.cdiv(longest_query, tokens_per_tile), key_heads, batch)](
        query, key_pages, value_pages, block_tables, query_starts, lengths, output, lse,
        *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0),
        *output.stride()[:2], query_heads, group, tokens_per_tile,
        scale_in_log2(scale, head_dim),
        HEAD_DIM=head_dim, BLOCK_D=block_d, PAGE_SIZE=page_size, **tiles.settings(),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, at page size 16."""
    cases = []
    for arch, head_dim in [(80, 64), (80, 128), (80, 256), (86, 128), (89, 128), (90, 64), (90, 128), (90, 256),
                           (100, 128), (120, 128)]:  # fmt: skip
        tiles = prefill_tiles(arch, torch.bfloat16, head_dim)
        cases.append(CompileCase(
            paged_prefill_kernel, signature_of(paged_prefill_kernel, "bf16"),
            {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "PAGE_SIZE": 16, **tiles.blocks()}, archs=(arch,),
            num_warps=tiles.warps, num_stages=tiles.stages, max_spill_bytes=0,
            instruction={80: "mma.sync", 89: "mma.sync", 90: "wgmma"}, label=f"bf16 {head_dim} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
