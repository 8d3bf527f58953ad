"""The consumers of attention on Hopper: warp groups that multiply and take exponentials, 64 queries each."""

from course_lib.kernels.gluon.names import gl, gluon, mbarrier, wait_for_stores, warpgroup_mma, warpgroup_mma_wait
from course_lib.kernels.gluon.parts import arrive_named, sum_by_thread, wait_named
from course_lib.kernels.hopper.lists import hide_by_mask, list_of_tile, listed_blocks
from course_lib.kernels.hopper.operands import (
    block_scale,
    kept_weights,
    left_operand,
    query_operand,
    right_operand,
    scale_channels,
    tile_scale,
    weight_exponent,
    write_rows,
)
from course_lib.kernels.hopper.parts import (
    GROUP_ROWS,
    GROUP_THREADS,
    TICKET_SLOTS,
    WARP_THREADS,
    finish_rows,
    hide_scores,
    key_blocks,
    key_free,
    online_softmax,
    read_ticket,
    tile_of,
    turn_of,
    value_free,
)

PAIR_THREADS = gl.constexpr(256)  # a consumer, and the one that gives it its turn


@gluon.jit
def ask_for_scores(query, key_tiles, barriers, my_turn, blocks_done, LAYOUT: gl.constexpr, TURNS: gl.constexpr):
    """Sets the matrix units to Q Kᵀ of the next block of keys, [64, BLOCK_N], and does not wait for it."""
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[3]
    HEAD_DIM: gl.constexpr = key_tiles.shape[4]
    mbarrier.wait(barriers.key_ready.index(blocks_done % STAGES), blocks_done // STAGES & 1)
    if TURNS:
        wait_named(my_turn, PAIR_THREADS)
    key_tile = key_tiles.index(blocks_done % STAGES).reshape([BLOCK_N, HEAD_DIM])
    empty = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(query, key_tile.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def ask_for_output(weights, accumulator, value_tiles, barriers, blocks_done):
    """Sets the matrix units to add P V of the block before this one to the output, [64, HEAD_DIM]; doesn't wait."""
    STAGES: gl.constexpr = value_tiles.shape[0]
    mbarrier.wait(barriers.value_ready.index((blocks_done - 1) % STAGES), (blocks_done - 1) // STAGES & 1)
    value_tile = right_operand(value_tiles.index((blocks_done - 1) % STAGES))
    DEPTH: gl.constexpr = 32 // value_tiles.dtype.primitive_bitwidth  # numbers that lie side by side in a register
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, DEPTH)
    operand = left_operand(weights, value_tiles.dtype, OPERAND)
    return warpgroup_mma(operand, value_tile, accumulator, is_async=True)


@gluon.jit
def step(query, buffers, barriers, turns, blocks_done, block, query_positions, key_length, band, tile_list, scaling,
         weights, softmax_state, accumulator, MASKED: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
         THRESHOLD: gl.constexpr):  # fmt: skip
    """One block of keys: its scores and softmax, while the product of the block before it is under way.

    tile_list: None, or what `list_of_tile` gave; block then is a place on it, and query_positions are rows of the tile.
    weights are those of the block before, as `kept_weights` keeps them: int32 [64, BLOCK_N / n]; softmax_state is
    running_max [64] and running_sum [64, 4]. Returns weights and state of this block, and the accumulator
    [64, HEAD_DIM], to which the block before has been added.
    """
    my_turn, next_turn = turns
    running_max, running_sum = softmax_state
    STAGES: gl.constexpr = buffers.keys.shape[0]
    SCORES: gl.constexpr = running_max.type.layout.parent
    BLOCK_N: gl.constexpr = buffers.keys.shape[3]
    THREADS: gl.constexpr = GROUP_THREADS * GROUPS + WARP_THREADS  # of consumers and producer

    scores = ask_for_scores(query, buffers.keys, barriers, my_turn, blocks_done, SCORES, TURNS)  # [64, BLOCK_N]
    accumulator = ask_for_output(weights, accumulator, buffers.values, barriers, blocks_done)  # [64, HEAD_DIM]
    if TURNS:
        arrive_named(next_turn, PAIR_THREADS)
    scores = warpgroup_mma_wait(1, deps=[scores])  # of the two products asked for, one may still run
    arrive_named(key_free(blocks_done % STAGES), THREADS)

    if MASKED:
        if tile_list is None:
            scores = hide_scores(scores, query_positions, block * BLOCK_N, key_length, band)
        else:
            scores = hide_by_mask(scores, query_positions, block, tile_list)
    next_weights, rescale, due, running_max, running_sum = online_softmax(
        scores,
        running_max,
        running_sum,
        block_scale(scaling, block, BLOCK_N),
        MASKED,
        weight_exponent(buffers.keys.dtype),
        THRESHOLD,
    )
    # ptxas moves this wait to between the exponentials, and with it the factors: it may, since nobody meets here.
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    arrive_named(value_free((blocks_done - 1) % STAGES, STAGES), THREADS)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
    rescale = gl.expand_dims(gl.convert_layout(rescale, ROWS, assert_trivial=True), 1)  # [64, 1]
    if THRESHOLD == 0:
        accumulator = accumulator * rescale
    elif due > 0:
        accumulator = accumulator * rescale
    weights = kept_weights(next_weights, buffers.keys.dtype)
    return weights, (running_max, running_sum), accumulator


@gluon.jit
def pass_on(
    barriers, turns, blocks_done, blocks, STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr
):  # fmt: skip
    """Passes over blocks that only others of its tile need: frees their buffers; returns blocks_done after them.

    It waits for each to arrive: before that, its arrival would count for the block before in the same buffer.
    """
    THREADS: gl.constexpr = GROUP_THREADS * GROUPS + WARP_THREADS
    my_turn, next_turn = turns
    for _ in range(blocks):
        stage = blocks_done % STAGES
        phase = blocks_done // STAGES & 1
        if TURNS:
            wait_named(my_turn, PAIR_THREADS)
            arrive_named(next_turn, PAIR_THREADS)
        mbarrier.wait(barriers.key_ready.index(stage), phase)
        arrive_named(key_free(stage), THREADS)
        mbarrier.wait(barriers.value_ready.index(stage), phase)
        arrive_named(value_free(stage, STAGES), THREADS)
        blocks_done += 1
    return blocks_done


@gluon.jit
def consume(outputs, sink_pointer, lse_pointer, buffers, barriers, tickets, sizes, band, lists, scales,
            GROUP: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr, TURNS: gl.constexpr,
            THRESHOLD: gl.constexpr = 0.0):  # fmt: skip
    """A consumer: attention for 64 of the queries of each tile."""
    query_length, key_length = sizes.query_length, sizes.key_length
    keys_before, keys_after = band
    TILE_ROWS: gl.constexpr = GROUP_ROWS * GROUPS
    STAGES: gl.constexpr = buffers.keys.shape[0]
    BLOCK_N: gl.constexpr = buffers.keys.shape[3]
    HEAD_DIM: gl.constexpr = buffers.keys.shape[4]
    # Where wgmma leaves its results: the four warps one below the other. It sums over 32 bytes at a time.
    DEPTH: gl.constexpr = 256 // buffers.keys.dtype.primitive_bitwidth
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, DEPTH])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    THREADS: gl.constexpr = GROUP_THREADS * GROUPS + WARP_THREADS
    turns = turn_of(GROUP, STAGES), turn_of((GROUP + 1) % GROUPS, STAGES)
    my_turn, next_turn = turns
    if TURNS:
        if GROUP == GROUPS - 1:  # the first consumer begins
            arrive_named(next_turn, PAIR_THREADS)
    tiles = gl.cdiv(query_length, TILE_ROWS) * sizes.batch * sizes.query_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    blocks_done = 0
    while ticket < tiles:
        batch_index, head, tile_query = tile_of(ticket, sizes, TILE_ROWS)
        first_query = tile_query + GROUP * GROUP_ROWS
        query_positions = first_query + key_length - query_length + gl.arange(0, GROUP_ROWS, layout=ROWS)
        tile_list = None
        if lists is None:
            tile_begin, _whole_begin, _whole_end, tile_end = key_blocks(
                tile_query + key_length - query_length, key_length, band, TILE_ROWS, BLOCK_N
            )
            begin, whole_begin, whole_end, end = key_blocks(
                first_query + key_length - query_length, key_length, band, GROUP_ROWS, BLOCK_N
            )
            if first_query >= query_length:  # no queries: one block, for the sake of the pipeline
                begin = tile_begin
                whole_begin = tile_begin
                whole_end = tile_begin
                end = tile_begin + 1
        else:
            tile_list = list_of_tile(lists, sizes, batch_index, head, tile_query, BLOCK_N)
            begin, whole_begin, whole_end, end = listed_blocks(tile_list)
            tile_begin = begin
            tile_end = end
            query_positions = first_query - tile_query + gl.arange(0, GROUP_ROWS, layout=ROWS)
        blocks_done = pass_on(barriers, turns, blocks_done, tile_end - end, STAGES, GROUPS, TURNS)
        buffer = tiles_done % QUERY_BUFFERS * GROUPS + GROUP
        mbarrier.wait(barriers.query_ready.index(buffer), tiles_done // QUERY_BUFFERS & 1)
        query = query_operand(buffers.queries, buffer)
        scaling = tile_scale(scales, sizes, batch_index, head, first_query), scales, sizes, batch_index, head

        # The first block has no product to hide behind: the other consumers' work fills the matrix units.
        scores = ask_for_scores(query, buffers.keys, barriers, my_turn, blocks_done, SCORES, TURNS)
        if TURNS:
            arrive_named(next_turn, PAIR_THREADS)
        if QUERY_BUFFERS > 1:  # by now the tile before has left for memory, and its buffer is free
            wait_for_stores(0)
            buffer_before = (tiles_done - 1) % QUERY_BUFFERS * GROUPS + GROUP
            mbarrier.arrive(barriers.query_free.index(buffer_before), count=1, pred=tiles_done > 0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        arrive_named(key_free(blocks_done % STAGES), THREADS)
        if lists is not None:
            scores = hide_by_mask(scores, query_positions, end - 1, tile_list)
        elif keys_before is not None or keys_after is not None or key_length % BLOCK_N != 0:
            scores = hide_scores(scores, query_positions, (end - 1) * BLOCK_N, key_length, band)
        running_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
        running_sum = sum_by_thread(gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, SCORES))
        weights, _rescale, _due, running_max, running_sum = online_softmax(
            scores,
            running_max,
            running_sum,
            block_scale(scaling, end - 1, BLOCK_N),
            True,
            weight_exponent(buffers.keys.dtype),
            THRESHOLD,
        )
        weights = kept_weights(weights, buffers.keys.dtype)
        state = running_max, running_sum
        accumulator = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, OUTPUT)
        blocks_done += 1

        if keys_after is not None or lists is not None:
            for count in range(end - 1 - whole_end):
                block = end - 2 - count
                weights, state, accumulator = step(
                    query, buffers, barriers, turns, blocks_done, block, query_positions, key_length, band, tile_list,
                    scaling, weights, state, accumulator, True, GROUPS, TURNS, THRESHOLD,
                )  # fmt: skip
                blocks_done += 1
        query = query_operand(buffers.queries, buffer)
        for count in range(whole_end - whole_begin):
            block = whole_end - 1 - count
            weights, state, accumulator = step(
                query, buffers, barriers, turns, blocks_done, block, query_positions, key_length, band, tile_list,
                scaling, weights, state, accumulator, False, GROUPS, TURNS, THRESHOLD,
            )  # fmt: skip
            blocks_done += 1
        if keys_before is not None:
            query = query_operand(buffers.queries, buffer)
            for count in range(whole_begin - begin):
                block = whole_begin - 1 - count
                weights, state, accumulator = step(
                    query, buffers, barriers, turns, blocks_done, block, query_positions, key_length, band, tile_list,
                    scaling, weights, state, accumulator, True, GROUPS, TURNS, THRESHOLD,
                )  # fmt: skip
                blocks_done += 1

        accumulator = ask_for_output(weights, accumulator, buffers.values, barriers, blocks_done)
        running_max, running_sum = state
        sink = None
        if sink_pointer is not None:
            sink = gl.load(sink_pointer + head).to(gl.float32)
        running_sum = gl.convert_layout(gl.sum(running_sum, axis=1), ROWS)
        share, log_sum_exp = finish_rows(running_max, running_sum, weight_exponent(buffers.keys.dtype), sink)
        if lse_pointer is not None:
            rows = first_query + gl.arange(0, GROUP_ROWS, layout=ROWS)
            lse_row = lse_pointer + (batch_index * sizes.query_heads + head).to(gl.int64) * query_length
            gl.store(lse_row + rows, log_sum_exp, mask=rows < query_length)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        arrive_named(value_free((blocks_done - 1) % STAGES, STAGES), THREADS)
        blocks_done = pass_on(barriers, turns, blocks_done, begin - tile_begin, STAGES, GROUPS, TURNS)
        share = gl.convert_layout(share, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
        finished = scale_channels(accumulator * gl.expand_dims(share, 1), scales, sizes, batch_index, head)
        output_buffer = GROUP
        if outputs.dtype == buffers.queries.dtype:
            output_buffer = buffer  # the queries are done with: their tile takes the output
        write_rows(outputs, finished, buffers.outputs.index(output_buffer), batch_index, head, first_query)
        if QUERY_BUFFERS == 1:
            wait_for_stores(0)
            mbarrier.arrive(barriers.query_free.index(buffer), count=1)

        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(tickets.ready.index(slot), tiles_done // TICKET_SLOTS & 1)
        ticket = read_ticket(tickets.slots.index(slot))
        mbarrier.arrive(tickets.free.index(slot), count=1)
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it
