"""The parts that attention kernels are made of: which keys a query sees, and the tiles of rows that are loaded.

The step of the online softmax, which every attention kernel takes, is `weigh` in `common.softmax`.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.softmax import weigh

# Arguments that Triton is not to compile anew for when one is 1 or a multiple of 16: lengths change with every request.
SIZES = ("query_heads", "heads_per_key_head", "query_length", "key_length", "keys_before", "keys_after")
CAREFUL_KEYS = tl.constexpr(16)  # the smallest tile of tl.dot: the careful pass must not cost the fast one registers


@triton.jit
def load_rows(
    matrix,
    first_row,
    row_count,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """A tile of a [row_count, HEAD_DIM] matrix, given as (pointer, row stride); zeros where the matrix has nothing."""
    pointer, row_stride = matrix
    rows = tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    # 64 bits for the offset that grows with the length; inside a tile 32 do, and save registers.
    pointer += tl.cast(first_row, tl.int64) * row_stride
    pointers = pointer + (rows[:, None] * row_stride + columns[None, :])  # [BLOCK_ROWS, BLOCK_D]
    if MASKED:
        inside = (first_row + rows < row_count)[:, None] & (columns < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        tile = tl.load(pointers, mask=(columns < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile  # [BLOCK_ROWS, BLOCK_D]


@triton.jit
def visible_pairs(key_positions, band):
    """Which pairs of query and key count, [BLOCK_M, BLOCK_N]: one comparison for each side that has a bound.

    band: (query_positions, key_length, keys_before, keys_after). A query sees the keys from keys_before places before
    its own position to keys_after places after it, of those that exist; causal attention is keys_after = 0. A side
    whose bound is None has none.
    """
    query_positions, key_length, keys_before, keys_after = band
    if keys_after is not None:
        last_seen = tl.minimum(query_positions + keys_after, key_length - 1)  # [BLOCK_M]
        visible = key_positions[None, :] <= last_seen[:, None]
    else:
        visible = key_positions[None, :] + 0 * query_positions[:, None] < key_length
    if keys_before is not None:
        visible = visible & (key_positions[None, :] >= (query_positions - keys_before)[:, None])
    return visible


@triton.jit
def seers(key_position, band):
    """Which queries see one key, [BLOCK_M]: a column of `visible_pairs`."""
    query_positions, key_length, keys_before, keys_after = band
    distance = key_position - query_positions  # [BLOCK_M], above 0: the key comes later
    sees = distance == distance
    if keys_before is not None:
        sees = sees & (distance >= -keys_before)
    if keys_after is not None:
        sees = sees & (distance <= keys_after)
    return sees


@triton.jit
def key_ranges(first_position, last_position, key_length, keys_before, keys_after, BLOCK_N: tl.constexpr):
    """Which keys the queries at first_position..last_position see, and which of their tiles need no mask.

    Returns begin, whole_begin, whole_end, end: every query sees all of the tiles in [whole_begin, whole_end); those in
    [begin, whole_begin) and [whole_end, end) need the mask; all others are skipped, neither loaded nor computed.
    """
    begin = 0
    whole_begin = 0
    whole_end = key_length // BLOCK_N * BLOCK_N
    end = key_length
    if keys_before is not None:
        begin = tl.maximum(first_position - keys_before, 0) // BLOCK_N * BLOCK_N
        whole_begin = tl.cdiv(tl.maximum(last_position - keys_before, 0), BLOCK_N) * BLOCK_N
    if keys_after is not None:
        end = tl.minimum(key_length, tl.maximum(last_position + keys_after + 1, 0))
        whole_end = tl.minimum(key_length, tl.maximum(first_position + keys_after + 1, 0)) // BLOCK_N * BLOCK_N
    # A band narrower than a tile has no whole tile: its left and right parts meet at whole_begin.
    whole_begin = tl.minimum(whole_begin, end)
    whole_end = tl.maximum(whole_end, whole_begin)
    return begin, whole_begin, whole_end, end


@triton.jit
def all_finite(tile):
    """Whether a tile [rows, columns] holds neither an infinity nor a NaN."""
    return tl.sum(tile * 0.0) == 0.0  # 0 · infinity and 0 · NaN are NaN, which equals nothing


@triton.jit
def attend_carefully(
    query, keys, values, begin, end, key_length, band, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The softmax state over keys in [begin, end), when some value is infinite or NaN: slow, and only then needed.

    The weight of a hidden key is 0, but 0 · NaN is NaN: in a tile under the mask one such value reaches every row of
    the product, also rows that don't see its key. Here such values are left out of the products, and then added, key by
    key, to the rows that see them.
    """
    BLOCK_M: tl.constexpr = query.shape[0]
    BLOCK_D: tl.constexpr = query.shape[1]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=1):
        key_tile = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
        scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        running_max, weights, rescale = weigh(scores, running_max, scale_log2, MASKED=True)
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        accumulator = accumulator * rescale[:, None]
        value_tile = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
        value_tile = tl.where(tl.abs(value_tile) < float("inf"), value_tile, 0.0).to(value_tile.dtype)
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=FLOAT32_PRECISION)
    for position in tl.range(begin, end, num_stages=1):
        value = load_rows(values, position, key_length, HEAD_DIM, 1, BLOCK_D, MASKED=True)  # [1, BLOCK_D]
        unbounded = ~(tl.abs(value) < float("inf"))  # [1, BLOCK_D]
        accumulator += tl.where(seers(position, band)[:, None] & unbounded, value, 0.0)  # [BLOCK_M, BLOCK_D]
    return running_max, running_sum, accumulator
