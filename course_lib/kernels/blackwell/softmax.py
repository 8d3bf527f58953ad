"""A softmax group of the Blackwell kernel: four warps that turn a tile's scores into weights, a row each thread."""

from course_lib.kernels.blackwell.parts import (
    TILE_ROWS,
    exp2_of_rows,
    hide_keys,
    next_references,
    row_by_thread,
    row_maximum,
    row_sums,
    scaled_less,
)
from course_lib.kernels.blackwell.products import weights_over_scores
from course_lib.kernels.gluon.names import gl, gluon, mbarrier
from course_lib.kernels.gluon.parts import unknown


@gluon.jit
def weigh_block(buffers, columns, barriers, step, last_keys, scale_log2, reference, running_sums,
                TILE: gl.constexpr, MASKED: gl.constexpr, THRESHOLD: gl.constexpr,
                DEGREE: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """One block of a tile: reads its scores, writes its weights over them. Returns reference and running_sums.

    last_keys: the last key that a row sees, counted from the block's first, [128].
    """
    mbarrier.wait(barriers.scores_ready.index(TILE), step & 1)
    BLOCK_N: gl.constexpr = columns.scores.shape[2]
    scores = columns.scores.index(TILE).load(row_by_thread(BLOCK_N))  # [128, BLOCK_N]
    if MASKED:
        scores = hide_keys(scores, last_keys)
    reference, factor = next_references(row_maximum(scores) * scale_log2, reference, THRESHOLD)  # [128]
    buffers.factors.index(TILE).store(factor)
    mbarrier.arrive(barriers.factors_ready.index(TILE), count=1)

    subtracted = reference
    if MASKED:
        # A row that has seen no key has the reference -inf, and -inf - -inf is NaN: measure such a row from 0.
        subtracted = gl.where(reference == float("-inf"), 0.0, reference)
    weights = exp2_of_rows(scaled_less(scores, scale_log2, subtracted), DEGREE, SHARE)  # [128, BLOCK_N]
    sums = row_sums(weights)
    weights_over_scores(columns, TILE, buffers.values.dtype).store(weights.to(buffers.values.dtype))
    mbarrier.arrive(barriers.weights_ready.index(TILE), count=1)
    ROWS: gl.constexpr = gl.SliceLayout(1, running_sums.type.layout)
    running_sums *= gl.expand_dims(gl.convert_layout(factor, ROWS, assert_trivial=True), 1)
    return reference, running_sums + sums


@gluon.jit
def weigh_scores(buffers, columns, barriers, first_query, query_length, key_length, keys_after, blocks, scale_log2,
                 TILE: gl.constexpr, THRESHOLD: gl.constexpr, DEGREE: gl.constexpr, SHARE: gl.constexpr):  # fmt: skip
    """A softmax group: all blocks of a tile, first those in which some row doesn't see some key."""
    BLOCK_N: gl.constexpr = columns.scores.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, row_by_thread(BLOCK_N))
    last_key = unknown(key_length - 1)
    last_keys = gl.full([TILE_ROWS], last_key, gl.int32, ROWS)  # [128]
    whole = key_length // BLOCK_N
    if keys_after is not None:
        first_position = unknown(first_query + TILE * TILE_ROWS + key_length - query_length + keys_after)
        last_keys = gl.minimum(last_key, first_position + gl.arange(0, TILE_ROWS, layout=ROWS))
        whole = gl.minimum(whole, gl.maximum(first_position + 1, 0) // BLOCK_N)
    masked = gl.maximum(blocks - whole, 0)

    reference = gl.full([TILE_ROWS], float("-inf"), gl.float32, ROWS)
    running_sums = row_sums(gl.zeros([TILE_ROWS, BLOCK_N], gl.float32, row_by_thread(BLOCK_N)))  # [128, 8]
    for step in range(masked):
        reference, running_sums = weigh_block(
            buffers, columns, barriers, step, last_keys - (blocks - 1 - step) * BLOCK_N, scale_log2, reference,
            running_sums, TILE, True, THRESHOLD, DEGREE, SHARE,
        )  # fmt: skip
    for step in range(masked, blocks):
        reference, running_sums = weigh_block(
            buffers, columns, barriers, step, last_keys, scale_log2, reference,
            running_sums, TILE, False, THRESHOLD, DEGREE, SHARE,
        )  # fmt: skip

    total = gl.convert_layout(gl.sum(running_sums, axis=1), ROWS, assert_trivial=True)  # [128]
    buffers.totals.index(TILE).store(total)
    buffers.references.index(TILE).store(reference)
    mbarrier.arrive(barriers.totals_ready.index(TILE), count=1)
