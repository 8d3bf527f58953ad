"""Decode attention over a list of keys: each query reads the keys that were chosen for it, and no others.

    positions    which keys, for each sequence and KV head, or for all KV heads at once
    pages        position // page_size in the sequence's block table, as in paged decode

The positions of the next tile, and their pages, are loaded while this tile is worked on: were an address known in its
own iteration only, the tiles would not be pipelined. The rest is paged decode, splits included.

FLOPs: 4 · query_heads · k · head_dim a sequence.
Bytes: K and V of the listed keys once, 2 · key_heads · k · head_dim elements a sequence, and 4 a position. With k =
2,048, 8 KV heads of 128 in 16 bits: 8.4 MB, whatever the context's length; all keys of 131,072 are 537 MB. A row of a
key is 256 bytes and lies alone, where paged decode finds 4 KB in a piece.
Source: DeepSeek-AI, DeepSeek-V3.2, arXiv 2512.02556; Kwon et al., PagedAttention, arXiv 2309.06180.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.cache_checks import check_indices, check_query_and_cache, check_splits, check_tables
from course_lib.kernels.common.pages import page_rows
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.common.splits import split_keys
from course_lib.kernels.decode.combine import finish_split
from course_lib.kernels.decode.parts import DECODE_SIZES, attend_to_tile, load_queries, packed_heads
from course_lib.kernels.decode.tiles import decode_compile_cases, decode_settings
from course_lib.kernels.decode.workspace import prepare_step
from course_lib.kernels.paged.prefill import PAGE_DIMENSIONS


@triton.jit
def load_listed_positions(positions, table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(positions, their pages), [BLOCK_N], of the list's entries from `start` on; -1 and page 0 from `end` on."""
    entries = start + tl.arange(0, BLOCK_N)
    listed = tl.load(positions + entries, mask=entries < end, other=-1)
    return listed, tl.load(table + listed // PAGE_SIZE, mask=listed >= 0, other=0)


@triton.jit(do_not_specialize=(*DECODE_SIZES, "list_length"))
def listed_decode_kernel(
    query_pointer, key_pointer, value_pointer, tables_pointer, positions_pointer, output_pointer, lse_pointer,
    partial_outputs, partial_lses, arrivals,
    query_batch_stride, query_head_stride, key_page_stride, key_head_stride, key_stride,
    value_page_stride, value_head_stride, value_stride, table_stride, list_batch_stride, list_head_stride,
    output_batch_stride, output_head_stride, list_length, query_heads, heads_per_key_head, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """One program: the query heads of a KV head [BLOCK_M], against one split of one sequence's list."""
    batch = tl.program_id(2).to(tl.int64)
    key_head, heads, is_head = packed_heads(heads_per_key_head, BLOCK_M)
    begin, end = split_keys(list_length, tl.program_id(1), tl.num_programs(1))
    keys = key_pointer + key_head.to(tl.int64) * key_head_stride
    values = value_pointer + key_head.to(tl.int64) * value_head_stride
    table = tables_pointer + batch * table_stride
    listed = positions_pointer + batch * list_batch_stride + key_head.to(tl.int64) * list_head_stride

    queries = query_pointer + batch * query_batch_stride, query_head_stride
    query = load_queries(queries, heads, is_head, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    positions, pages = load_listed_positions(listed, table, begin, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
    for start in tl.range(begin, end, BLOCK_N):
        next_positions, next_pages = load_listed_positions(listed, table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)
        key_rows = page_rows(pages, positions, key_page_stride, key_stride, PAGE_SIZE)
        value_rows = key_rows if SAME_STRIDES else page_rows(
            pages, positions, value_page_stride, value_stride, PAGE_SIZE)  # fmt: skip
        running_max, weight_sums, accumulator = attend_to_tile(
            query,
            keys + key_rows,
            values + value_rows,
            positions >= 0,
            running_max,
            weight_sums,
            accumulator,
            scale_log2,
            HEAD_DIM,
            BLOCK_D,
        )
        positions, pages = next_positions, next_pages

    finish_split(running_max, tl.sum(weight_sums, axis=1), accumulator, heads, is_head,
                 (output_pointer + batch * output_batch_stride, output_head_stride),
                 lse_pointer if lse_pointer is None else lse_pointer + batch * query_heads,
                 (partial_outputs, partial_lses, arrivals), batch, query_heads, heads_per_key_head,
                 HEAD_DIM, GROUP_ROWS)  # fmt: skip


def listed_decode_attention(query, key_pages, value_pages, block_tables, lengths, positions, *, scale=None,
                            splits=None, return_lse=False, validate=True):  # fmt: skip
    """Attention of one query token per sequence to the listed keys of the sequence, in a paged cache.

    Args:
        query, key_pages, value_pages, block_tables, lengths, scale, splits, return_lse: as for
            `paged_decode_attention`. Pages that no listed key lies in are not read.
        positions: int32 [batch, 1 or key_heads, k]: which keys a sequence's query sees, one list for all KV heads or
            one each, in any order, each key once. Entries of -1 are passed over, as `choose_keys` leaves them.
        validate: read lengths, tables and positions from the device and check them, which waits for it. With False a
            position or a page that is wrong reads memory of others, and one that is there twice counts twice.

    Returns the output, or (output, log-sum-exp); zeros and minus infinity for a list without an entry.

    Raises a ValueError that names the argument when shapes, dtypes, devices, lengths, tables or positions don't fit.
    """
    pools = {"key_pages": key_pages, "value_pages": value_pages}
    check_query_and_cache(query, pools, PAGE_DIMENSIONS, scale, "[batch, query_heads, head_dim]")
    batch, query_heads, head_dim = query.shape
    pages, key_heads, page_size = key_pages.shape[:3]
    check_indices("lengths", lengths, "[batch]", (batch,), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (batch, None), query.device)
    check_indices("positions", positions, "[batch, 1 or key_heads, k]", (batch, None, None), query.device)
    if positions.dtype != torch.int32 or positions.shape[1] not in (1, key_heads) or positions.shape[2] == 0:
        raise ValueError(
            f"positions has dtype {positions.dtype} and shape {tuple(positions.shape)}; it must be torch.int32 "
            f"[batch, 1 or {key_heads}, k], with a k of at least 1."
        )
    check_splits(splits)
    if validate:
        check_tables(block_tables, lengths, pages, page_size)
        check_positions(positions, lengths)

    plan, output, parts, lse = prepare_step(query, key_heads, positions.shape[2], splits, return_lse, None, None)
    list_strides = positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0
    listed_decode_kernel[(plan.programs, plan.splits, batch)](
        query, key_pages, value_pages, block_tables, positions, output, lse, *parts,
        *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0), *list_strides,
        *output.stride()[:2], positions.shape[2], query_heads, query_heads // key_heads,
        scale_in_log2(scale, head_dim), PAGE_SIZE=page_size,
        SAME_STRIDES=key_pages.stride() == value_pages.stride(), **decode_settings(query, key_heads, plan.tiles),
    )  # fmt: skip
    return (output, lse) if return_lse else output


def check_positions(positions, lengths) -> None:
    """Reads the device: raise a ValueError unless each list names keys of its sequence, each of them once."""
    outside = (positions < -1) | (positions >= lengths[:, None, None])
    if outside.any():
        place = outside.nonzero()[0].tolist()
        raise ValueError(
            f"positions{place} is {positions[tuple(place)].item()}; sequence {place[0]} has {lengths[place[0]].item()} "
            "tokens, so it must be from 0 to one less, or -1 for no key."
        )
    ascending = positions.sort(dim=-1).values
    twice = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    if twice.any():
        place = twice.nonzero()[0].tolist()
        raise ValueError(
            f"positions lists the key {ascending[tuple(place)].item()} of sequence {place[0]} twice; it would count "
            "twice."
        )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate, at page size 16."""
    return decode_compile_cases(listed_decode_kernel, PAGE_SIZE=16)
