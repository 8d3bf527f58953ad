"""Two warps of the Blackwell kernel that compute nothing: one starts the copies, the other the matrix products."""

from course_lib.kernels.blackwell.names import TensorMemoryLayout, reinterpret_columns, tcgen05_mma
from course_lib.kernels.blackwell.parts import TILE_ROWS
from course_lib.kernels.gluon.names import gl, gluon, load_tile, mbarrier


@gluon.jit
def load_tiles(descriptors, buffers, barriers, place, key_head, blocks):
    """The load warp: asks the copy engine for the queries of both tiles, then for keys and values as they are used."""
    queries, keys, values = descriptors
    batch_index, head, first_query = place
    STAGES: gl.constexpr = buffers.keys.shape[0]
    BLOCK_N: gl.constexpr = buffers.keys.shape[3]
    for tile in gl.static_range(2):
        ready = barriers.query_ready.index(tile)
        mbarrier.expect(ready, queries.block_type.nbytes)
        load_tile(queries, [batch_index, head, first_query + tile * TILE_ROWS, 0], ready, buffers.queries.index(tile))
    for step in range(blocks):
        first_key = (blocks - 1 - step) * BLOCK_N
        stage = step % STAGES
        # A buffer's n-th use waits until the one before is over; the wait of the first passes at once.
        phase = step // STAGES & 1 ^ 1
        ready = barriers.key_ready.index(stage)
        mbarrier.wait(barriers.key_free.index(stage), phase)
        mbarrier.expect(ready, keys.block_type.nbytes)
        load_tile(keys, [batch_index, key_head, first_key, 0], ready, buffers.keys.index(stage))
        ready = barriers.value_ready.index(stage)
        mbarrier.wait(barriers.value_free.index(stage), phase)
        mbarrier.expect(ready, values.block_type.nbytes)
        load_tile(values, [batch_index, key_head, first_key, 0], ready, buffers.values.index(stage))


@gluon.jit
def weights_over_scores(columns, tile, dtype: gl.constexpr):
    """The columns of a tile's scores as its weights, 16 bits each: [128, BLOCK_N] in the first half of them."""
    scores = columns.scores.index(tile)
    BLOCK_N: gl.constexpr = scores.shape[1]
    LAYOUT: gl.constexpr = TensorMemoryLayout((TILE_ROWS, 2 * BLOCK_N), col_stride=1)
    return reinterpret_columns(scores, dtype, [TILE_ROWS, 2 * BLOCK_N], LAYOUT).slice(0, BLOCK_N)


@gluon.jit
def start_scores(buffers, columns, barriers, step, tile: gl.constexpr):
    """Starts S = Q Kᵀ of a tile; the keys' buffer is free after the second tile's."""
    STAGES: gl.constexpr = buffers.keys.shape[0]
    BLOCK_N: gl.constexpr = buffers.keys.shape[3]
    HEAD_DIM: gl.constexpr = buffers.keys.shape[4]
    stage = step % STAGES
    if tile == 0:
        mbarrier.wait(barriers.key_ready.index(stage), step // STAGES & 1)
    tcgen05_mma(
        buffers.queries.index(tile).reshape([TILE_ROWS, HEAD_DIM]),
        buffers.keys.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0)),
        columns.scores.index(tile),
        use_acc=False,
        mbarriers=[barriers.scores_ready.index(tile), barriers.key_free.index(stage)],
        mbarrier_preds=[True, tile == 1],
    )


@gluon.jit
def start_output(buffers, columns, barriers, step, blocks, tile: gl.constexpr):
    """Starts O += P V of a tile; the values' buffer is free after the second tile's."""
    STAGES: gl.constexpr = buffers.values.shape[0]
    BLOCK_N: gl.constexpr = buffers.values.shape[3]
    HEAD_DIM: gl.constexpr = buffers.values.shape[4]
    stage = step % STAGES
    if tile == 0:
        mbarrier.wait(barriers.value_ready.index(stage), step // STAGES & 1)
    mbarrier.wait(barriers.weights_ready.index(tile), step & 1)
    mbarrier.wait(barriers.corrected.index(tile), step & 1)
    tcgen05_mma(
        weights_over_scores(columns, tile, buffers.values.dtype),
        buffers.values.index(stage).reshape([BLOCK_N, HEAD_DIM]),
        columns.outputs.index(tile),
        use_acc=step > 0,
        mbarriers=[barriers.output_ready.index(tile), barriers.value_free.index(stage)],
        mbarrier_preds=[step == blocks - 1, tile == 1],
    )


@gluon.jit
def start_products(buffers, columns, barriers, blocks):
    """The product warp: both tiles' first scores; then for each block a tile's output and its next scores in turn."""
    for tile in gl.static_range(2):
        mbarrier.wait(barriers.query_ready.index(tile), 0)
        start_scores(buffers, columns, barriers, 0, tile)
    for step in range(blocks):
        for tile in gl.static_range(2):
            start_output(buffers, columns, barriers, step, blocks, tile)
            if step + 1 < blocks:
                start_scores(buffers, columns, barriers, step + 1, tile)
