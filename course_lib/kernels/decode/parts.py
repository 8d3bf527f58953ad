"""The parts that decode kernels are made of, contiguous or paged: which keys, which heads, one tile.

In decode each sequence has one query token. The query heads that share a KV head are packed into the rows of one tile,
so a key or value that was loaded serves the whole group: `heads_per_key_head` times the intensity of a kernel that
takes one head at a time, and one pass over the cache.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.softmax import weigh

# Arguments that Triton is not to compile anew for when one is 1 or a multiple of 16.
DECODE_SIZES = ("query_heads", "heads_per_key_head")


@triton.jit
def packed_heads(heads_per_key_head, BLOCK_M: tl.constexpr):
    """What the program of this index in the grid's first axis works on.

    The axis counts (KV head, block of BLOCK_M heads of its group), since a group may be larger than a tile.
    Returns the KV head, the query heads [BLOCK_M] of the tile's rows, and which rows hold one.
    """
    head_blocks = tl.cdiv(heads_per_key_head, BLOCK_M)
    key_head = tl.program_id(0) // head_blocks
    rows = tl.program_id(0) % head_blocks * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    return key_head, key_head * heads_per_key_head + rows, rows < heads_per_key_head


@triton.jit
def load_queries(queries, heads, is_head, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The packed query tile [BLOCK_M, BLOCK_D], given as (pointer of the sequence, head stride)."""
    pointer, head_stride = queries
    columns = tl.arange(0, BLOCK_D)
    return tl.load(pointer + heads[:, None] * head_stride + columns[None, :],
                   mask=is_head[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)  # fmt: skip


@triton.jit
def load_cache_rows(rows, inside, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [BLOCK_N, BLOCK_D] of keys or values from the pointers [BLOCK_N] of its rows; zeros where not `inside`.

    Nothing reads them again, so they are the first that the L2 may forget.
    """
    columns = tl.arange(0, BLOCK_D)
    if HEAD_DIM < BLOCK_D:
        mask = inside[:, None] & (columns < HEAD_DIM)[None, :]
    else:
        mask = inside[:, None]
    return tl.load(rows[:, None] + columns[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def attend_to_tile(
    query,
    key_rows,
    value_rows,
    inside,
    running_max,
    weight_sums,
    accumulator,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The softmax state after one more tile of keys and values, given as pointers [BLOCK_N] to their rows.

    Of the online softmax (`common.softmax`) each of a tile's columns has a sum of its own, weight_sums
    [BLOCK_M, BLOCK_N]. A row's columns lie in different warps, which would have to wait for
    each other; their sums can do so once, after the last tile.
    """
    key_tile = load_cache_rows(key_rows, inside, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
    scores = tl.where(inside[None, :], scores, float("-inf"))
    new_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED=True)
    weight_sums = weight_sums * rescale[:, None] + weights
    accumulator = accumulator * rescale[:, None]
    value_tile = load_cache_rows(value_rows, inside, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    weights = weights.to(value_tile.dtype)
    accumulator = tl.dot(weights, value_tile, accumulator, input_precision=FLOAT32_PRECISION)
    return new_max, weight_sums, accumulator
