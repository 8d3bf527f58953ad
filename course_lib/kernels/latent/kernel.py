"""Decode of multi-head latent attention, absorbed: query tokens of all heads against one latent row per token.

    score[t, h, n]  = scale · query[t, h] · cache[n]             over value_dim + rope_dim numbers, 512 + 64
    output[t, h]    = Σ_n softmax(score[t, h])[n] · cache[n, :value_dim]

FLOPs: 2 · heads · (576 + 512) per key and query token. Bytes: 1,152 per key in 16 bits, for all heads and query tokens
together, as the tile that gives the scores is also the tile of values. At 128 heads that makes 242 FLOPs per byte,
where an H200 could do 200: this decode step computes instead of waiting. At 16 heads it makes 30, and waits.

Rows are cut into tiles of at most 64: the accumulator of 64 rows is 64 · 512 · 4 bytes = 128 KB, half of a
multiprocessor's registers. The two programs that 128 heads need are neighbours in the grid. They run at the same time
on two multiprocessors, and the second finds in the L2 what the first has loaded. Two programs that share the output's
columns instead of its rows would both need all of the scores, and compute them twice: 1.5 times the work.

On Hopper 16 rows are one tile for mma.sync, and any more are tiles of 64 for wgmma, though some rows be empty: 32 heads
take as long as 16, the time of the bytes.
Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434; Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.pages import load_page_numbers, page_rows
from course_lib.kernels.common.softmax import finish_rows
from course_lib.kernels.common.splits import whole_tiles
from course_lib.kernels.latent.parts import attend_to_latents, load_latents, load_query_rows, scores_apart, scores_of
from course_lib.kernels.latent.tiles import latent_compile_cases


@triton.jit(do_not_specialize=("query_tokens", "heads"))
def latent_decode_kernel(
    query_pointer, cache_pointer, tables_pointer, lengths_pointer, output_pointer, lse_pointer,
    query_batch_stride, query_token_stride, query_head_stride, cache_stride, row_stride, table_stride,
    query_tokens, heads, scale_log2,
    VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, BLOCK_R: tl.constexpr, PAGE_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows, each a head of a query token, against one split of one sequence's keys.

    cache_stride: from sequence to sequence, or from page to page where there are tables (else PAGE_SIZE is 0).
    output_pointer [splits, batch, query_tokens · heads, VALUE_DIM], lse_pointer without the last, or None.
    """
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    is_row = rows < query_tokens * heads
    length = tl.load(lengths_pointer + batch).to(tl.int32)
    begin, end = whole_tiles(length, tl.program_id(1), tl.num_programs(1), BLOCK_N)
    # The last token stands at the last key. Keys from `end` on belong to another split, or to nobody.
    last_seen = tl.full([BLOCK_M], 0, tl.int32) + (end - 1)
    if CAUSAL:
        last_seen = tl.minimum(last_seen, length - query_tokens + rows // heads)  # [BLOCK_M]

    query = load_query_rows(query_pointer + batch * query_batch_stride, query_token_stride, query_head_stride, rows,
                            heads, is_row, VALUE_DIM, ROPE_DIM, BLOCK_R)  # fmt: skip
    state = (tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32),
             tl.zeros([BLOCK_M, VALUE_DIM], tl.float32))  # fmt: skip
    WHOLE_PAGES: tl.constexpr = PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_N == 0  # a tile lies in one page
    table = tables_pointer
    pages = begin  # of no use without tables
    if PAGE_SIZE > 0:
        table += batch * table_stride
        if WHOLE_PAGES:
            pages = tl.load(table + begin // PAGE_SIZE, mask=begin < end, other=0)
        else:
            pages = load_page_numbers(table, begin, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
    in_tile = tl.arange(0, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        next_pages = pages
        # Rows are counted from the tile's first. So they are the same in every tile, and only one address is computed
        # anew, not one for each of a thread's 18 copies (H200, 128 heads: a tenth of the time).
        tile_rows = in_tile.to(tl.int64) * row_stride  # [BLOCK_N]
        if PAGE_SIZE == 0:
            tile = cache_pointer + batch * cache_stride + tl.cast(start, tl.int64) * row_stride
        elif WHOLE_PAGES:
            next_pages = tl.load(table + (start + BLOCK_N) // PAGE_SIZE, mask=start + BLOCK_N < end, other=0)
            tile = cache_pointer + pages.to(tl.int64) * cache_stride + tl.cast(start % PAGE_SIZE, tl.int64) * row_stride
        else:
            next_pages = load_page_numbers(table, start + BLOCK_N, end, PAGE_SIZE, BLOCK_N)  # [BLOCK_N]
            tile = cache_pointer
            tile_rows = page_rows(pages, start + in_tile, cache_stride, row_stride, PAGE_SIZE)  # [BLOCK_N]
        latents, rotary_keys = load_latents(tile, tile_rows, in_tile < end - start, VALUE_DIM, ROPE_DIM, BLOCK_R)
        if BLOCK_M >= 64:  # wgmma
            if start < end:  # always. What is in a branch comes last in a step: the next loads are sent before it
                seen_here = last_seen - start  # [BLOCK_M], counted from the tile's first key
                scores = scores_apart(query, latents, rotary_keys, scale_log2, begin < end)  # [BLOCK_M, BLOCK_N]
                state = attend_to_latents(scores, latents, seen_here, state)
        else:
            seen_here = last_seen - start  # [BLOCK_M]
            scores = scores_of(query, latents, rotary_keys, scale_log2)  # [BLOCK_M, BLOCK_N]
            state = attend_to_latents(scores, latents, seen_here, state)
        pages = next_pages

    running_max, weight_sums, accumulator = state
    output, lse = finish_rows(accumulator, running_max, tl.sum(weight_sums, axis=1))  # [BLOCK_M, VALUE_DIM], [BLOCK_M]
    result_rows = (tl.program_id(1) * tl.num_programs(2) + batch) * (query_tokens * heads) + rows  # [BLOCK_M], int64
    tl.store(output_pointer + result_rows[:, None] * VALUE_DIM + tl.arange(0, VALUE_DIM)[None, :],
             output.to(output_pointer.dtype.element_ty), mask=is_row[:, None])  # fmt: skip
    if lse_pointer is not None:
        tl.store(lse_pointer + result_rows, lse, mask=is_row)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: contiguous, pages of 64 tokens, pages of 16."""
    return latent_compile_cases(latent_decode_kernel)
