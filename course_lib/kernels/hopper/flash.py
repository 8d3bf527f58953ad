"""FlashAttention, forward, for Hopper: copies, matrix products and exponentials at the same time.

The algorithm is that of `flash_attention`; what changes is who does what, and when. A program is split into groups of
warps with one task each (warp specialisation), which meet at barriers in shared memory:

    producer      one warp     asks the copy engine (TMA) for tiles of Q, K and V, as buffers fall free
    consumers     2 or 3 × 4   64 queries each: scores, softmax, output; the copy engine takes the finished tile

Four things then happen at once that used to happen in turn:

    copies       K and V of later blocks arrive while earlier ones are used; Q of the next tile, too.
    overlap      the scores of block i are asked for before the product of block i - 1's weights with its values; while
                 that product runs, the softmax of block i is computed.
    ping-pong    consumers take turns at the matrix units: one multiplies while the other takes exponentials. Where it
                 pays: see ARRANGEMENTS.
    tiles        a program stays for many tiles, and one tile's end overlaps the next one's beginning.

Registers go where they are needed: the producer gives its own back, so that a consumer thread has 240 (with three
consumers, 160) for the scores and the accumulator.

FLOPs: 4 · batch · query_heads · query_length · key_length · head_dim, half of it when causal. Per 128 × 128 block at
head dimension 128 the matrix units need 2048 cycles of a multiprocessor, and its 16 exponentials per cycle 1024: hidden
behind the products, these cost nothing; one after the other, a third of the time. At head dimension 64 both need 1024.
Bytes: as for `flash_attention`. Tiles are handed out such that the keys and values in use stay in the L2 cache.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, Algorithm 2.
"""

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.gluon.names import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from course_lib.kernels.gluon.parts import new_barriers, sum_by_thread
from course_lib.kernels.hopper.launch import Arrangement, descriptor, descriptor_type, ticket_counter
from course_lib.kernels.hopper.limits import hopper_refusal
from course_lib.kernels.hopper.operands import (
    block_scale,
    kept_weights,
    left_operand,
    load_values,
    query_operand,
    right_operand,
    scale_channels,
    tile_scale,
    weight_exponent,
    write_rows,
)
from course_lib.kernels.hopper.parts import (
    draw_ticket,
    finish_rows,
    hide_scores,
    key_blocks,
    online_softmax,
    read_ticket,
    tile_of,
    write_ticket,
)

GROUP_ROWS = gl.constexpr(64)  # rows of a warp group's matrix product: the hardware's number
TICKET_SLOTS = gl.constexpr(2)


@gluon.jit
def produce(
    descriptors,
    buffers,
    barriers,
    tickets,
    counter,
    sizes,
    band,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    QUERY_BUFFERS: gl.constexpr,
):
    """The producer: draws tiles, and asks the copy engine for all that they need, in the order of its use.

    A buffer's n-th use waits until its n-1-th is over. Barriers tell odd phases from even ones; to wait for the phase
    before the first passes at once, which is what an empty buffer wants.
    """
    queries, keys, values, _outputs = descriptors
    query_tiles, key_tiles, value_tiles, _output_tiles = buffers
    query_ready, query_free, key_ready, key_free, value_ready, value_free, _turns = barriers
    slots, ticket_ready, ticket_free = tickets
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    TILE_ROWS: gl.constexpr = GROUP_ROWS * GROUPS
    BLOCK_N: gl.constexpr = keys.block_type.shape[2]
    tiles = gl.cdiv(query_length, TILE_ROWS) * batch * query_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    blocks_done = 0
    while ticket < tiles:
        batch_index, head, first_query = tile_of(ticket, batch, query_heads, query_length, heads_at_once, TILE_ROWS)
        key_head = head // heads_per_key_head
        first_position = first_query + key_length - query_length
        begin, _whole_begin, _whole_end, end = key_blocks(first_position, key_length, band, TILE_ROWS, BLOCK_N)

        phase = tiles_done // QUERY_BUFFERS & 1
        for group in gl.static_range(GROUPS):
            buffer = tiles_done % QUERY_BUFFERS * GROUPS + group
            mbarrier.wait(query_free.index(buffer), phase ^ 1)
            mbarrier.expect(query_ready.index(buffer), queries.block_type.nbytes)
            load_tile(
                queries,
                [batch_index, head, first_query + group * GROUP_ROWS, 0],
                query_ready.index(buffer),
                query_tiles.index(buffer),
            )
        for block in range(end - begin):
            first_key = (end - 1 - block) * BLOCK_N
            stage = blocks_done % STAGES
            phase = blocks_done // STAGES & 1
            mbarrier.wait(key_free.index(stage), phase ^ 1)
            mbarrier.expect(key_ready.index(stage), keys.block_type.nbytes)
            load_tile(keys, [batch_index, key_head, first_key, 0], key_ready.index(stage), key_tiles.index(stage))
            mbarrier.wait(value_free.index(stage), phase ^ 1)
            mbarrier.expect(value_ready.index(stage), values.block_type.nbytes)
            load_values(values, batch_index, key_head, first_key, value_ready.index(stage), value_tiles.index(stage))
            blocks_done += 1

        ticket = draw_ticket(counter, tiles)
        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(ticket_free.index(slot), tiles_done // TICKET_SLOTS & 1 ^ 1)
        write_ticket(slots.index(slot), ticket)
        mbarrier.arrive(ticket_ready.index(slot), count=1)
        tiles_done += 1


@gluon.jit
def ask_for_scores(query, key_tiles, barriers, my_turn, blocks_done, LAYOUT: gl.constexpr, TURNS: gl.constexpr):
    """Sets the matrix units to Q Kᵀ of the next block of keys, [64, BLOCK_N], and does not wait for it."""
    _query_ready, _query_free, key_ready, _key_free, _value_ready, _value_free, _turns = barriers
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[3]
    HEAD_DIM: gl.constexpr = key_tiles.shape[4]
    mbarrier.wait(key_ready.index(blocks_done % STAGES), blocks_done // STAGES & 1)
    if TURNS:
        mbarrier.wait(my_turn, blocks_done & 1)
    key_tile = key_tiles.index(blocks_done % STAGES).reshape([BLOCK_N, HEAD_DIM])
    empty = gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, LAYOUT)
    return warpgroup_mma(query, key_tile.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def ask_for_output(weights, accumulator, value_tiles, blocks_done):
    """Sets the matrix units to add P V of the block before this one to the output, [64, HEAD_DIM]; doesn't wait."""
    STAGES: gl.constexpr = value_tiles.shape[0]
    value_tile = right_operand(value_tiles.index((blocks_done - 1) % STAGES))
    DEPTH: gl.constexpr = 32 // value_tiles.dtype.primitive_bitwidth  # numbers that lie side by side in a register
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator.type.layout, DEPTH)
    operand = left_operand(weights, value_tiles.dtype, OPERAND)
    return warpgroup_mma(operand, value_tile, accumulator, is_async=True)


@gluon.jit
def step(
    query,
    buffers,
    barriers,
    turns,
    blocks_done,
    block,
    query_positions,
    key_length,
    band,
    scaling,
    weights,
    softmax_state,
    accumulator,
    MASKED: gl.constexpr,
    TURNS: gl.constexpr,
):
    """One block of keys: its scores and softmax, while the product of the block before it is under way.

    weights are those of the block before, as `kept_weights` keeps them: int32 [64, BLOCK_N / n]; softmax_state is
    running_max [64] and running_sum [64, 4]. Returns weights and state of this block, and the accumulator
    [64, HEAD_DIM], to which the block before has been added.
    """
    _query_tiles, key_tiles, value_tiles, _output_tiles = buffers
    _query_ready, _query_free, _key_ready, key_free, value_ready, value_free, _turns = barriers
    my_turn, next_turn = turns
    running_max, running_sum = softmax_state
    STAGES: gl.constexpr = key_tiles.shape[0]
    SCORES: gl.constexpr = running_max.type.layout.parent
    BLOCK_N: gl.constexpr = key_tiles.shape[3]
    stage = blocks_done % STAGES

    scores = ask_for_scores(query, key_tiles, barriers, my_turn, blocks_done, SCORES, TURNS)  # [64, BLOCK_N]
    accumulator = ask_for_output(weights, accumulator, value_tiles, blocks_done)  # [64, HEAD_DIM]
    if TURNS:
        mbarrier.arrive(next_turn, count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])  # of the two products asked for, one may still run
    mbarrier.arrive(key_free.index(stage), count=1)

    if MASKED:
        scores = hide_scores(scores, query_positions, block * BLOCK_N, key_length, band)
    next_weights, rescale, running_max, running_sum = online_softmax(
        scores, running_max, running_sum, block_scale(scaling, block, BLOCK_N), MASKED, weight_exponent(key_tiles.dtype)
    )
    # The values are wanted only in the next step. But a wait on a barrier is a loop, and keeps the compiler from moving
    # the wait for the product, which comes next, to before the softmax: ptxas does, and then nothing overlaps.
    mbarrier.wait(value_ready.index(stage), blocks_done // STAGES & 1)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    mbarrier.arrive(value_free.index((blocks_done - 1) % STAGES), count=1)
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator.type.layout)
    accumulator = accumulator * gl.expand_dims(gl.convert_layout(rescale, ROWS, assert_trivial=True), 1)
    weights = kept_weights(next_weights, key_tiles.dtype)
    return weights, (running_max, running_sum), accumulator


@gluon.jit
def pass_on(barriers, turns, blocks_done, blocks, STAGES: gl.constexpr, TURNS: gl.constexpr):
    """Passes over blocks that only others of its tile need: frees their buffers; returns blocks_done after them.

    It waits for each to arrive: before that, its arrival would count for the block before in the same buffer.
    """
    _query_ready, _query_free, key_ready, key_free, value_ready, value_free, _turns = barriers
    my_turn, next_turn = turns
    for _ in range(blocks):
        stage = blocks_done % STAGES
        phase = blocks_done // STAGES & 1
        if TURNS:
            mbarrier.wait(my_turn, blocks_done & 1)
            mbarrier.arrive(next_turn, count=1)
        mbarrier.wait(key_ready.index(stage), phase)
        mbarrier.arrive(key_free.index(stage), count=1)
        mbarrier.wait(value_ready.index(stage), phase)
        mbarrier.arrive(value_free.index(stage), count=1)
        blocks_done += 1
    return blocks_done


@gluon.jit
def consume(
    outputs,
    lse_pointer,
    buffers,
    barriers,
    tickets,
    sizes,
    band,
    scales,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    QUERY_BUFFERS: gl.constexpr,
    TURNS: gl.constexpr,
):
    """A consumer: attention for 64 of the queries of each tile."""
    query_tiles, key_tiles, value_tiles, output_tiles = buffers
    query_ready, query_free, _key_ready, key_free, value_ready, value_free, all_turns = barriers
    slots, ticket_ready, ticket_free = tickets
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    keys_before, keys_after = band
    TILE_ROWS: gl.constexpr = GROUP_ROWS * GROUPS
    STAGES: gl.constexpr = key_tiles.shape[0]
    BLOCK_N: gl.constexpr = key_tiles.shape[3]
    HEAD_DIM: gl.constexpr = key_tiles.shape[4]
    # Where wgmma leaves its results: the four warps one below the other. It sums over 32 bytes at a time.
    DEPTH: gl.constexpr = 256 // key_tiles.dtype.primitive_bitwidth
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, DEPTH])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, DEPTH])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    turns = all_turns.index(GROUP), all_turns.index((GROUP + 1) % GROUPS)
    my_turn, next_turn = turns
    tiles = gl.cdiv(query_length, TILE_ROWS) * batch * query_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    blocks_done = 0
    while ticket < tiles:
        batch_index, head, tile_query = tile_of(ticket, batch, query_heads, query_length, heads_at_once, TILE_ROWS)
        first_query = tile_query + GROUP * GROUP_ROWS
        query_positions = first_query + key_length - query_length + gl.arange(0, GROUP_ROWS, layout=ROWS)
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
        blocks_done = pass_on(barriers, turns, blocks_done, tile_end - end, STAGES, TURNS)
        buffer = tiles_done % QUERY_BUFFERS * GROUPS + GROUP
        mbarrier.wait(query_ready.index(buffer), tiles_done // QUERY_BUFFERS & 1)
        query = query_operand(query_tiles, buffer)
        scaling = tile_scale(scales, sizes, batch_index, head, first_query), scales, sizes, batch_index, head

        # The first block has no product to hide behind: the other consumers' work fills the matrix units.
        scores = ask_for_scores(query, key_tiles, barriers, my_turn, blocks_done, SCORES, TURNS)
        if TURNS:
            mbarrier.arrive(next_turn, count=1)
        if QUERY_BUFFERS > 1:  # by now the tile before has left for memory, and its buffer is free
            wait_for_stores(0)
            buffer_before = (tiles_done - 1) % QUERY_BUFFERS * GROUPS + GROUP
            mbarrier.arrive(query_free.index(buffer_before), count=1, pred=tiles_done > 0)
        stage = blocks_done % STAGES
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(key_free.index(stage), count=1)
        if keys_before is not None or keys_after is not None or key_length % BLOCK_N != 0:
            scores = hide_scores(scores, query_positions, (end - 1) * BLOCK_N, key_length, band)
        running_max = gl.full([GROUP_ROWS], float("-inf"), gl.float32, ROWS)
        running_sum = sum_by_thread(gl.zeros([GROUP_ROWS, BLOCK_N], gl.float32, SCORES))
        weights, _rescale, running_max, running_sum = online_softmax(
            scores,
            running_max,
            running_sum,
            block_scale(scaling, end - 1, BLOCK_N),
            True,
            weight_exponent(key_tiles.dtype),
        )
        weights = kept_weights(weights, key_tiles.dtype)
        state = running_max, running_sum
        accumulator = gl.zeros([GROUP_ROWS, HEAD_DIM], gl.float32, OUTPUT)
        mbarrier.wait(value_ready.index(stage), blocks_done // STAGES & 1)
        blocks_done += 1

        if keys_after is not None:
            for count in range(end - 1 - whole_end):
                block = end - 2 - count
                weights, state, accumulator = step(
                    query,
                    buffers,
                    barriers,
                    turns,
                    blocks_done,
                    block,
                    query_positions,
                    key_length,
                    band,
                    scaling,
                    weights,
                    state,
                    accumulator,
                    True,
                    TURNS,
                )
                blocks_done += 1
        query = query_operand(query_tiles, buffer)
        for count in range(whole_end - whole_begin):
            block = whole_end - 1 - count
            weights, state, accumulator = step(
                query,
                buffers,
                barriers,
                turns,
                blocks_done,
                block,
                query_positions,
                key_length,
                band,
                scaling,
                weights,
                state,
                accumulator,
                False,
                TURNS,
            )
            blocks_done += 1
        if keys_before is not None:
            query = query_operand(query_tiles, buffer)
            for count in range(whole_begin - begin):
                block = whole_begin - 1 - count
                weights, state, accumulator = step(
                    query,
                    buffers,
                    barriers,
                    turns,
                    blocks_done,
                    block,
                    query_positions,
                    key_length,
                    band,
                    scaling,
                    weights,
                    state,
                    accumulator,
                    True,
                    TURNS,
                )
                blocks_done += 1

        accumulator = ask_for_output(weights, accumulator, value_tiles, blocks_done)
        running_max, running_sum = state
        share, log_sum_exp = finish_rows(
            running_max, gl.convert_layout(gl.sum(running_sum, axis=1), ROWS), weight_exponent(key_tiles.dtype)
        )
        if lse_pointer is not None:
            rows = first_query + gl.arange(0, GROUP_ROWS, layout=ROWS)
            lse_row = lse_pointer + (batch_index * query_heads + head).to(gl.int64) * query_length
            gl.store(lse_row + rows, log_sum_exp, mask=rows < query_length)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(value_free.index((blocks_done - 1) % STAGES), count=1)
        blocks_done = pass_on(barriers, turns, blocks_done, begin - tile_begin, STAGES, TURNS)
        share = gl.convert_layout(share, gl.SliceLayout(1, OUTPUT), assert_trivial=True)
        finished = scale_channels(accumulator * gl.expand_dims(share, 1), scales, sizes, batch_index, head)
        output_buffer = GROUP
        if outputs.dtype == query_tiles.dtype:
            output_buffer = buffer  # the queries are done with: their tile takes the output
        write_rows(outputs, finished, output_tiles.index(output_buffer), batch_index, head, first_query)
        if QUERY_BUFFERS == 1:
            wait_for_stores(0)
            mbarrier.arrive(query_free.index(buffer), count=1)

        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(ticket_ready.index(slot), tiles_done // TICKET_SLOTS & 1)
        ticket = read_ticket(slots.index(slot))
        mbarrier.arrive(ticket_free.index(slot), count=1)
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it


# Triton compiles anew for sizes that are 1 or multiples of 16; these would make dozens of kernels that don't differ.
SIZES = ("batch", "query_heads", "heads_per_key_head", "query_length", "key_length", "heads_at_once")

SCALES = ("query_scales", "key_scales", "value_scales")  # of 8-bit inputs


@gluon.jit(do_not_specialize=(*SIZES, "keys_before", "keys_after"))
def flash_attention_hopper_kernel(
    queries, keys, values, outputs, lse_pointer, counter, query_scales, key_scales, value_scales,
    batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once,
    keys_before, keys_after, scale_log2,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, QUERY_BUFFERS: gl.constexpr, TURNS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    dtype: gl.constexpr = queries.dtype
    query_shape: gl.constexpr = [QUERY_BUFFERS * GROUPS] + queries.block_type.shape  # [.., 1, 1, 64, HEAD_DIM]
    key_shape: gl.constexpr = [STAGES] + keys.block_type.shape  # [.., 1, 1, BLOCK_N, HEAD_DIM]
    query_tiles = gl.allocate_shared_memory(dtype, query_shape, queries.layout)
    key_tiles = gl.allocate_shared_memory(dtype, key_shape, keys.layout)
    value_tiles = gl.allocate_shared_memory(dtype, [STAGES] + values.block_type.shape, values.layout)
    output_tiles = query_tiles
    if outputs.dtype != dtype:  # 8-bit queries leave too little room for a 16-bit output
        output_tiles = gl.allocate_shared_memory(outputs.dtype, [GROUPS] + outputs.block_type.shape, outputs.layout)
    slots = gl.allocate_shared_memory(gl.int32, [TICKET_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # *_ready: the copy engine counts its bytes. *_free: each consumer that read the buffer says so.
    query_ready = new_barriers(QUERY_BUFFERS * GROUPS, 1)
    query_free = new_barriers(QUERY_BUFFERS * GROUPS, 1)
    key_ready = new_barriers(STAGES, 1)
    key_free = new_barriers(STAGES, GROUPS)
    value_ready = new_barriers(STAGES, 1)
    value_free = new_barriers(STAGES, GROUPS)
    turns = new_barriers(GROUPS, 1)
    ticket_ready = new_barriers(TICKET_SLOTS, 1)
    ticket_free = new_barriers(TICKET_SLOTS, GROUPS)
    fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # the first consumer begins

    descriptors = queries, keys, values, outputs
    buffers = query_tiles, key_tiles, value_tiles, output_tiles
    barriers = query_ready, query_free, key_ready, key_free, value_ready, value_free, turns
    tickets = slots, ticket_ready, ticket_free
    sizes = batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once
    band = keys_before, keys_after
    scales = scale_log2, query_scales, key_scales, value_scales
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (outputs, lse_pointer, buffers, barriers, tickets, sizes, band, scales, 0, GROUPS,
                       QUERY_BUFFERS, TURNS)),
            (consume, (outputs, lse_pointer, buffers, barriers, tickets, sizes, band, scales, 1, GROUPS,
                       QUERY_BUFFERS, TURNS)),
            (produce, (descriptors, buffers, barriers, tickets, counter, sizes, band, STAGES, GROUPS, QUERY_BUFFERS)),
        ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (outputs, lse_pointer, buffers, barriers, tickets, sizes, band, scales, 0, GROUPS,
                       QUERY_BUFFERS, TURNS)),
            (consume, (outputs, lse_pointer, buffers, barriers, tickets, sizes, band, scales, 1, GROUPS,
                       QUERY_BUFFERS, TURNS)),
            (consume, (outputs, lse_pointer, buffers, barriers, tickets, sizes, band, scales, 2, GROUPS,
                       QUERY_BUFFERS, TURNS)),
            (produce, (descriptors, buffers, barriers, tickets, counter, sizes, band, STAGES, GROUPS, QUERY_BUFFERS)),
        ], [4, 4, 1], [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


# At head dimension 64 a block takes as long in exponentials as in products: three consumers keep both busier than two,
# and turns at the matrix units would only hold them up.
ARRANGEMENTS = {  # by head dimension, padded
    64: Arrangement(128, stages=4, query_buffers=2, consumers=3, turns=False),
    128: Arrangement(128, stages=2, query_buffers=2, consumers=2, turns=True),
    256: Arrangement(64, stages=2, query_buffers=1, consumers=2, turns=True),
}
L2_SHARE_BYTES = 16 * 2**20  # of keys and values in use at a time: a third of an H200's L2 cache


def flash_attention_hopper(
    query, key, value, *, causal=False, window=None, scale=None, return_lse=False, arrangement=None
):
    """Exact softmax attention on Hopper. Arguments and results are those of `flash_attention`, but for `tiles`.

    Args:
        query: [batch, query_heads, query_length, head_dim], float16 or bfloat16; head_dim from 16 to 256. A multiple of
            16 bytes in address and strides, the last dimension contiguous.
        key, value: [batch, key_heads, key_length, head_dim], likewise; query_heads is a multiple of key_heads.
        causal, window, scale, return_lse: see `flash_attention`.
        arrangement: an `Arrangement` to use; by head dimension when None.

    Returns the output, contiguous, or (output, log-sum-exp [batch, query_heads, query_length]), the same bits at every
    run. One difference: a NaN or an infinity in a value that a mask hides can reach the queries of the same tile, since
    its weight is 0, and 0 · NaN is NaN.

    Raises the ValueErrors of `flash_attention`, a ValueError for inputs that only `flash_attention` takes, and a
    RuntimeError where this machine cannot run the kernel.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale)
    refusal = hopper_refusal(query, key, value)
    if refusal is not None:
        raise refusal.error(f"flash_attention_hopper: {refusal.reason} flash_attention takes these inputs.")
    block_d = padded_head_dim(query.shape[3])
    arrangement = arrangement or ARRANGEMENTS[block_d]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device) if return_lse else None
    values = descriptor(value, arrangement.key_rows, block_d)
    launch(query, key, values, output, lse, (None, None, None), causal, window, scale, arrangement)
    return (output, lse) if return_lse else output


def launch(query, key, values, output, lse, scales, causal, window, scale, arrangement) -> None:
    """Starts the kernel on checked tensors; `values` comes as the copy engine's descriptor.

    scales: of 8-bit queries, keys and values, or three times None.
    """
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    heads_per_key_head = query_heads // key_heads
    block_d = padded_head_dim(head_dim)
    tiles = triton.cdiv(query_length, GROUP_ROWS.value * arrangement.consumers) * batch * query_heads
    key_bytes = 2 * key_length * head_dim * key.element_size() // heads_per_key_head  # K and V, per query head
    heads_at_once = min(batch * query_heads, max(1, L2_SHARE_BYTES // max(1, key_bytes)))
    if window is not None:
        window = min(window, query_length + key_length)  # sees as much, and sums with it stay within 32 bits
    programs = min(tiles, multiprocessor_count(query.device))
    flash_attention_hopper_kernel[(programs,)](
        descriptor(query, GROUP_ROWS.value, block_d), descriptor(key, arrangement.key_rows, block_d), values,
        descriptor(output, GROUP_ROWS.value, block_d), lse, ticket_counter(query.device), *scales,
        batch, query_heads, heads_per_key_head, query_length, key_length, heads_at_once,
        window, 0 if causal else window, scale_in_log2(scale, head_dim),
        **arrangement.settings(), num_warps=4, maxnreg=arrangement.registers[2],
    )  # fmt: skip


def padded_head_dim(head_dim: int) -> int:
    """The width of a tile in shared memory: the copy engine fills what is more than head_dim with zeros."""
    return max(64, triton.next_power_of_2(head_dim))


# Beside scores, weights and accumulator a few numbers of the tile may find no register, such as where its output goes:
# they are set aside before the loop over keys and fetched after it. Triton 3.6 to 3.8 need 24 bytes at most for 16-bit
# inputs (a window at head dimension 128) and 40 for 8-bit ones (at 256); where 3.9 needs more, a case says how much.
FEW_SPILLS = 40


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: each arrangement, with the masks that need the most registers."""
    return [
        compile_case(64, ARRANGEMENTS[64], "fp16", keys_after="i32", keys_before="i32", max_spill_bytes=88),
        compile_case(64, ARRANGEMENTS[64], "bf16", keys_after="i32", max_spill_bytes=64),
        compile_case(128, ARRANGEMENTS[128], "bf16", keys_after="i32", keys_before="i32", max_spill_bytes=56),
        compile_case(256, ARRANGEMENTS[256], "bf16", keys_after="i32"),
    ]


def compile_case(
    block_d, arrangement, kind, keys_before=None, keys_after=None, max_spill_bytes=FEW_SPILLS
) -> CompileCase:
    """kind: "fp16" or "bf16", or "fp8e4nv" with an output in bf16 and with scales."""
    key_rows, fp8 = arrangement.key_rows, kind == "fp8e4nv"
    types = {
        "queries": descriptor_type(kind, GROUP_ROWS.value, block_d), "keys": descriptor_type(kind, key_rows, block_d),
        "values": descriptor_type(kind, *((block_d, key_rows) if fp8 else (key_rows, block_d))),
        "outputs": descriptor_type("bf16" if fp8 else kind, GROUP_ROWS.value, block_d),
        "lse_pointer": "*fp32", "counter": "*i32", "scale_log2": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(SIZES, "i32") | (dict.fromkeys(SCALES, "*fp32") if fp8 else {})
    given = {"keys_before": keys_before, "keys_after": keys_after}
    types |= {name: kind for name, kind in given.items() if kind}
    constants = {name: None for name, kind in given.items() if kind is None} | arrangement.settings()
    constants |= {} if fp8 else dict.fromkeys(SCALES)
    return CompileCase(
        flash_attention_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        max_spill_bytes=max_spill_bytes, options={"maxnreg": arrangement.registers[2]},
        label=f"{kind} {block_d} {given} {arrangement.consumers} consumers",
    )  # fmt: skip
