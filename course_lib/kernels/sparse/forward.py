"""Attention over block lists, forward: one program per tile of queries, which visits the tiles of its two lists.

    for each full tile of keys       S = Q Kᵀ, online softmax                        no mask, no bound is tested
    for each partial tile            S = Q Kᵀ, hidden pairs to -inf, online softmax
    O / ℓ                            written once

FLOPs: 4 · head_dim · query_rows · key_rows for each tile on a list: the time is that of flash attention times the share
of tiles that are listed. At N = 16,384, D = 128, 87.5 % of the tiles hidden, one head: 17 GFLOP of 137.
Bytes: Q and O once; for each tile on a list its K and V, and 4 bytes of index; for each partial one its mask besides,
query_rows · key_rows bytes. A causal mask of 128 × 128 adds 16 KB to 64 KB, on one tile of a row.
Source: Dong et al., Flex Attention, arXiv 2412.05496; the inner step is that of FlashAttention-2, arXiv 2307.08691.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import load_rows
from course_lib.kernels.attention.tiles import candidate_tiles, tiles_for
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.softmax import finish_rows, scale_in_log2, weigh
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.hopper.limits import hopper_refusal
from course_lib.kernels.sparse.block_lists import BLOCK, BlockLists
from course_lib.kernels.sparse.parts import LIST_SIZES, LIST_TYPES, list_of_row, load_entry, load_mask


@triton.jit
def attend_to_list(query, keys, values, tile_list, masks, place, key_length, softmax_state, scale_log2,
                   HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
                   QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Visit the tiles of a list; returns the softmax state after them. place: of the queries within their block."""
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    PIECES: tl.constexpr = KEY_ROWS // BLOCK_N
    count, indices, numbers = tile_list
    running_max, running_sum, accumulator = softmax_state
    steps = count * PIECES
    tile, number = load_entry(indices, numbers, 0, steps, PIECES, MASKED)
    for step in tl.range(0, steps):
        next_tile, next_number = load_entry(indices, numbers, step + 1, steps, PIECES, MASKED)
        piece = step % PIECES * BLOCK_N
        start = tile * KEY_ROWS + piece
        key_tile = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = load_mask(masks, number, place + tl.arange(0, BLOCK_M)[:, None],
                                piece + tl.arange(0, BLOCK_N)[None, :], QUERY_ROWS, KEY_ROWS)  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        accumulator = accumulator * rescale[:, None]
        value_tile = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=FLOAT32_PRECISION)
        tile, number = next_tile, next_number
    return running_max, running_sum, accumulator


@triton.jit(do_not_specialize=LIST_SIZES)
def listed_tiles_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lse_pointer,
    full_counts_pointer, full_indices_pointer,
    partial_counts_pointer, partial_indices_pointer, partial_masks_pointer, masks_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    query_heads, heads_per_key_head, query_length, key_length, list_batch_stride, list_head_stride, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    QUERY_ROWS: tl.constexpr, KEY_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against the tiles on the two lists of their block."""
    query_tiles = tl.cdiv(query_length, BLOCK_M)
    batch_and_head = tl.program_id(0) // query_tiles
    # When causal the last queries have the longest lists: begin with them, so that the short programs fill the gaps.
    first_query = (query_tiles - 1 - tl.program_id(0) % query_tiles) * BLOCK_M
    batch = (batch_and_head // query_heads).to(tl.int64)
    head = (batch_and_head % query_heads).to(tl.int64)
    key_head = head // heads_per_key_head
    queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride

    row = batch * list_batch_stride + head * list_head_stride + first_query // QUERY_ROWS
    places = tl.cdiv(key_length, KEY_ROWS)
    full = list_of_row((full_counts_pointer, full_indices_pointer, full_indices_pointer), row, places)
    partial = list_of_row((partial_counts_pointer, partial_indices_pointer, partial_masks_pointer), row, places)
    place = first_query % QUERY_ROWS
    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    state = running_max, running_sum, accumulator
    state = attend_to_list(query, keys, values, full, None, place, key_length, state, scale_log2,
                           HEAD_DIM, BLOCK_N, QUERY_ROWS, KEY_ROWS, MASKED=False)  # fmt: skip
    state = attend_to_list(query, keys, values, partial, masks_pointer, place, key_length, state, scale_log2,
                           HEAD_DIM, BLOCK_N, QUERY_ROWS, KEY_ROWS, MASKED=True)  # fmt: skip

    running_max, running_sum, accumulator = state
    output, log_sum_exp = finish_rows(accumulator, running_max, running_sum)
    rows = first_query + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    output_row = batch_and_head.to(tl.int64) * query_length + rows  # the output is contiguous
    tl.store(
        output_pointer + (output_row[:, None] * HEAD_DIM + columns[None, :]),
        output.to(output_pointer.dtype.element_ty),
        mask=(rows < query_length)[:, None] & (columns < HEAD_DIM)[None, :],
    )
    tl.store(lse_pointer + output_row, log_sum_exp, mask=rows < query_length)


def forward(query, key, value, lists: BlockLists, *, scale=None):
    """(output, log-sum-exp) of `block_sparse_attention`, which has checked the arguments."""
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    if hopper_refusal(query, key, value) is None:
        # Imported here: Gluon is missing from some Tritons, and nothing else needs it.
        from course_lib.kernels.sparse import hopper

        if (lists.query_rows, lists.key_rows) == hopper.BLOCK:
            hopper.launch(query, key, value, output, lse, lists, list_strides(lists.full.counts), scale)
            return output, lse
    portable(query, key, value, output, lse, lists, scale)
    return output, lse


def portable(query, key, value, output, lse, lists: BlockLists, scale) -> None:
    """Fills output and lse by the kernel above."""
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]

    def launch(tiles):
        cut = within_block(tiles, lists)
        listed_tiles_kernel[(triton.cdiv(query_length, cut.query_rows) * batch * query_heads,)](
            query, key, value, output, lse, *lists.full[:2], *lists.partial, lists.masks,
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            query_heads, query_heads // key_heads, query_length, key_length,
            *list_strides(lists.full.counts), scale_in_log2(scale, head_dim),
            head_dim, triton.next_power_of_2(head_dim),
            QUERY_ROWS=lists.query_rows, KEY_ROWS=lists.key_rows, **cut.settings(),
        )  # fmt: skip

    launch(tiles_for(query, key, launch, ("block lists", lists.query_rows, lists.key_rows)))


def within_block(tiles: Tiles, lists: BlockLists) -> Tiles:
    """The tiles, not larger than the lists' block: a tile lies within one."""
    return tiles._replace(query_rows=min(tiles.query_rows, lists.query_rows),
                          key_rows=min(tiles.key_rows, lists.key_rows))  # fmt: skip


def list_strides(counts: torch.Tensor) -> tuple[int, int]:
    """Rows of tiles from one batch and one head to the next; 0 where all share their lists."""
    batch, heads, rows = counts.shape
    return (heads * rows if batch > 1 else 0), (rows if heads > 1 else 0)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the best tiles of every architecture, with lists of the usual block."""
    fast = [(80, head_dim, torch.bfloat16) for head_dim in (64, 128, 256)]
    fast += [(arch, 128, torch.bfloat16) for arch in (86, 89, 90, 100, 120)]
    # Neither of the slow ones uses the matrix units: right rather than fast, so a spill is no defect.
    slow = [(75, 64, torch.float16), (80, 64, torch.float32)]
    cases = []
    for arch, head_dim, dtype in fast + slow:
        tiles = candidate_tiles(arch, dtype, head_dim)[0]
        is_fast = (arch, head_dim, dtype) in fast
        cases.append(CompileCase(
            listed_tiles_kernel, signature_of(listed_tiles_kernel, KINDS[dtype], **LIST_TYPES),
            {"HEAD_DIM": head_dim, "BLOCK_D": head_dim, "QUERY_ROWS": BLOCK, "KEY_ROWS": BLOCK, **tiles.blocks()},
            num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,), max_spill_bytes=0 if is_fast else None,
            instruction={80: "mma.sync", 89: "mma.sync", 90: "wgmma"} if is_fast else None,
            label=f"{KINDS[dtype]} {head_dim} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
