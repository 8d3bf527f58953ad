"""The correction group of the Blackwell kernel: four warps that rescale outputs in tensor memory, and finish them."""

from course_lib.kernels.blackwell.parts import TILE_ROWS, row_by_thread
from course_lib.kernels.common.numbers import LN_2
from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon, mbarrier, store_tile, wait_for_stores

CHUNK = gl.constexpr(32)  # columns of an output that a thread holds at a time


@gluon.jit
def rescale_output(output, factors):
    """Multiplies each row of an output in tensor memory, [128, HEAD_DIM], by its factor, [128]."""
    HEAD_DIM: gl.constexpr = output.shape[1]
    for start in gl.static_range(0, HEAD_DIM, CHUNK):
        piece = output.slice(start, CHUNK)
        piece.store(piece.load(row_by_thread(CHUNK)) * gl.expand_dims(factors, 1))  # [128, CHUNK]


@gluon.jit
def correct_outputs(outputs, lse_pointer, buffers, columns, barriers, place, sizes, blocks):
    """The correction group: before each output product the rescaling, if any row asks for it; after all, the division.

    A factor of 1 leaves its row as it is. A tile is touched only if one of its rows has another.
    """
    batch_index, head, first_query = place
    HEAD_DIM: gl.constexpr = columns.outputs.shape[2]
    ROWS: gl.constexpr = gl.SliceLayout(1, row_by_thread(CHUNK))
    # Every warp has all 128 factors, so that it can tell without the others whether one of them is not 1.
    ALL: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    for step in range(blocks):
        for tile in gl.static_range(2):
            mbarrier.wait(barriers.factors_ready.index(tile), step & 1)
            if gl.min(buffers.factors.index(tile).load(ALL), axis=0) < 1.0:
                rescale_output(columns.outputs.index(tile), buffers.factors.index(tile).load(ROWS))
            mbarrier.arrive(barriers.corrected.index(tile), count=1)

    for tile in gl.static_range(2):
        mbarrier.wait(barriers.totals_ready.index(tile), 0)
        total = buffers.totals.index(tile).load(ROWS)  # [128]
        total = gl.where(total == 0.0, 1.0, total)  # of a row that saw no key the output is 0
        share = 1.0 / total
        if lse_pointer is not None:
            rows = first_query + tile * TILE_ROWS + gl.arange(0, TILE_ROWS, layout=ROWS)  # [128]
            log_sum_exp = (buffers.references.index(tile).load(ROWS) + gl.log2(total)) * LN_2
            lse_row = lse_pointer + (batch_index * sizes.query_heads + head).to(gl.int64) * sizes.query_length
            gl.store(lse_row + rows, log_sum_exp, mask=rows < sizes.query_length)
        mbarrier.wait(barriers.output_ready.index(tile), 0)
        finished = buffers.queries.index(tile)  # no product reads the queries any more: their tile takes the output
        for start in gl.static_range(0, HEAD_DIM, CHUNK):
            piece = columns.outputs.index(tile).slice(start, CHUNK).load(row_by_thread(CHUNK))  # [128, CHUNK]
            piece = (piece * gl.expand_dims(share, 1)).to(outputs.dtype)
            finished.reshape([TILE_ROWS, HEAD_DIM]).slice(start, CHUNK, dim=1).store(piece)
        fence_async_shared()  # the copy engine sees what these threads wrote
        store_tile(outputs, [batch_index, head, first_query + tile * TILE_ROWS, 0], finished)
    wait_for_stores(0)  # the shared memory must outlive the copy from it
