"""The producer of attention on Hopper: one warp that draws tiles and keeps the copy engine busy."""

from course_lib.kernels.gluon.names import gl, gluon, load_tile, mbarrier
from course_lib.kernels.gluon.parts import wait_named
from course_lib.kernels.hopper.lists import first_key_of, list_of_tile, listed_blocks
from course_lib.kernels.hopper.operands import load_values
from course_lib.kernels.hopper.parts import (
    GROUP_ROWS,
    GROUP_THREADS,
    TICKET_SLOTS,
    WARP_THREADS,
    draw_ticket,
    key_blocks,
    key_free,
    tile_of,
    value_free,
    write_ticket,
)


@gluon.jit
def produce(descriptors, buffers, barriers, tickets, counter, sizes, band, lists,
            STAGES: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr):  # fmt: skip
    """The producer: draws tiles, and asks the copy engine for all that they need, in the order of its use.

    A buffer's n-th use waits until its n-1-th is over, and its first use for nobody. Barriers in memory tell odd phases
    from even ones; to wait for the phase before the first passes at once, which is what an empty buffer wants.
    """
    queries, keys, values, _outputs = descriptors
    query_length, key_length = sizes.query_length, sizes.key_length
    TILE_ROWS: gl.constexpr = GROUP_ROWS * GROUPS
    THREADS: gl.constexpr = GROUP_THREADS * GROUPS + WARP_THREADS
    BLOCK_N: gl.constexpr = keys.block_type.shape[2]
    tiles = gl.cdiv(query_length, TILE_ROWS) * sizes.batch * sizes.query_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    blocks_done = 0
    while ticket < tiles:
        batch_index, head, first_query = tile_of(ticket, sizes, TILE_ROWS)
        key_head = head // sizes.heads_per_key_head
        tile_list = None
        if lists is None:
            first_position = first_query + key_length - query_length
            begin, _whole_begin, _whole_end, end = key_blocks(first_position, key_length, band, TILE_ROWS, BLOCK_N)
        else:
            tile_list = list_of_tile(lists, sizes, batch_index, head, first_query, BLOCK_N)
            begin, _whole_begin, _whole_end, end = listed_blocks(tile_list)

        phase = tiles_done // QUERY_BUFFERS & 1
        for group in gl.static_range(GROUPS):
            buffer = tiles_done % QUERY_BUFFERS * GROUPS + group
            mbarrier.wait(barriers.query_free.index(buffer), phase ^ 1)
            mbarrier.expect(barriers.query_ready.index(buffer), queries.block_type.nbytes)
            load_tile(
                queries,
                [batch_index, head, first_query + group * GROUP_ROWS, 0],
                barriers.query_ready.index(buffer),
                buffers.queries.index(buffer),
            )
        for block in range(end - begin):
            first_key = (end - 1 - block) * BLOCK_N
            if tile_list is not None:
                first_key = first_key_of(end - 1 - block, tile_list, BLOCK_N)
            stage = blocks_done % STAGES
            if blocks_done >= STAGES:
                wait_named(key_free(stage), THREADS)
            mbarrier.expect(barriers.key_ready.index(stage), keys.block_type.nbytes)
            load_tile(
                keys, [batch_index, key_head, first_key, 0], barriers.key_ready.index(stage), buffers.keys.index(stage)
            )
            if blocks_done >= STAGES:
                wait_named(value_free(stage, STAGES), THREADS)
            mbarrier.expect(barriers.value_ready.index(stage), values.block_type.nbytes)
            load_values(
                values, batch_index, key_head, first_key, barriers.value_ready.index(stage), buffers.values.index(stage)
            )
            blocks_done += 1

        ticket = draw_ticket(counter, tiles)
        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(tickets.free.index(slot), tiles_done // TICKET_SLOTS & 1 ^ 1)
        write_ticket(tickets.slots.index(slot), ticket)
        mbarrier.arrive(tickets.ready.index(slot), count=1)
        tiles_done += 1
