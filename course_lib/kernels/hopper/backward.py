"""FlashAttention, backward, for Hopper."""

import math
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_rows import row_numbers
from course_lib.kernels.attention.checks import check_attention_inputs
from course_lib.kernels.attention.parts import LOG2_E
from course_lib.kernels.hopper.backward_parts import (
    end_turn,
    end_turn_early,
    hide_pairs,
    keys_of,
    query_blocks,
    wait_for_turn,
    write_by_thread,
)
from course_lib.kernels.hopper.backward_queries import query_gradients
from course_lib.kernels.hopper.gluon_compat import (
    TensorDescriptor,
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from course_lib.kernels.hopper.launch import DTYPES, descriptor, descriptor_type, multiprocessors, ticket_counter
from course_lib.kernels.hopper.limits import COPY_ENGINE_BYTES, hopper_refusal, stride_refusal
from course_lib.kernels.hopper.operands import unknown
from course_lib.kernels.hopper.parts import draw_ticket, new_barriers, read_ticket, write_ticket

GROUP_KEYS = gl.constexpr(64)  # keys of a consumer: rows of a warp group's matrix product, the hardware's number
GROUPS = gl.constexpr(2)
TILE_KEYS = gl.constexpr(128)
TICKET_SLOTS = gl.constexpr(2)
TICKET_READERS = gl.constexpr(4)
PART_ROWS, PART_COLUMNS = gl.constexpr(16), gl.constexpr(256)  # of a consumer's part of dQ, 64 × 64, by thread


@gluon.jit
def produce(descriptors, buffers, barriers, tickets, counter, sizes, CAUSAL: gl.constexpr):
    """The producer: draws tiles of keys, and asks the copy engine for all that they need, in the order of its use."""
    queries, gradients, keys, values, exponents, deltas = descriptors
    query_tiles, gradient_tiles, key_tiles, value_tiles, exponent_rows, delta_rows = buffers
    keys_ready, keys_free, query_ready, query_free, gradient_ready, gradient_free = barriers
    slots, ticket_ready, ticket_free = tickets
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    STAGES: gl.constexpr = query_tiles.shape[0]
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < tiles:
        batch_and_head, key_tile = keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS)
        batch_index = batch_and_head // key_heads
        key_head = batch_and_head % key_heads
        begin, _whole_begin, end = query_blocks(key_tile, query_length, key_length, CAUSAL, TILE_KEYS, BLOCK_M)

        mbarrier.wait(keys_free, tiles_done & 1 ^ 1)
        mbarrier.expect(keys_ready, GROUPS * (keys.block_type.nbytes + values.block_type.nbytes))
        for group in gl.static_range(GROUPS):
            place = [batch_index, key_head, key_tile * TILE_KEYS + group * GROUP_KEYS, 0]
            load_tile(keys, place, keys_ready, key_tiles.index(group))
            load_tile(values, place, keys_ready, value_tiles.index(group))
        for head_of_group in range(heads_per_key_head):
            head = key_head * heads_per_key_head + head_of_group
            row = batch_and_head * heads_per_key_head + head_of_group
            for count in range(end - begin):
                first_query = (end - 1 - count) * BLOCK_M
                stage = steps_done % STAGES
                phase = steps_done // STAGES & 1
                mbarrier.wait(query_free.index(stage), phase ^ 1)
                mbarrier.expect(query_ready.index(stage), queries.block_type.nbytes + exponents.block_type.nbytes)
                load_tile(queries, [batch_index, head, first_query, 0], query_ready.index(stage), query_tiles.index(stage))
                load_tile(exponents, [row, first_query], query_ready.index(stage), exponent_rows.index(stage))
                mbarrier.wait(gradient_free.index(stage), phase ^ 1)
                mbarrier.expect(gradient_ready.index(stage), gradients.block_type.nbytes + deltas.block_type.nbytes)
                load_tile(gradients, [batch_index, head, first_query, 0], gradient_ready.index(stage), gradient_tiles.index(stage))
                load_tile(deltas, [row, first_query], gradient_ready.index(stage), delta_rows.index(stage))
                steps_done += 1

        ticket = draw_ticket(counter, tiles)
        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(ticket_free.index(slot), tiles_done // TICKET_SLOTS & 1 ^ 1)
        write_ticket(slots.index(slot), ticket)
        mbarrier.arrive(ticket_ready.index(slot), count=1)
        tiles_done += 1


@gluon.jit
def next_ticket(tickets, tiles_done):
    slots, ticket_ready, ticket_free = tickets
    slot = tiles_done % TICKET_SLOTS
    mbarrier.wait(ticket_ready.index(slot), tiles_done // TICKET_SLOTS & 1)
    ticket = read_ticket(slots.index(slot))
    mbarrier.arrive(ticket_free.index(slot), count=1)
    return ticket


@gluon.jit
def hand_over(
    query_parts, part, part_ready, part_free, tickets, turns, sizes,
    BLOCK_M: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, DETERMINISTIC: gl.constexpr, SKIP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A messenger: has the copy engine add a consumer's parts of dQ to those in memory, each in its turn."""
    all_key_heads, _key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    all_blocks = gl.cdiv(query_length, BLOCK_M)
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < tiles:
        batch_and_head, key_tile = keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS)
        begin, _whole_begin, end = query_blocks(key_tile, query_length, key_length, CAUSAL, TILE_KEYS, BLOCK_M)
        for head_of_group in range(heads_per_key_head):
            row = batch_and_head * heads_per_key_head + head_of_group
            for count in range(end - begin):
                number = (row * all_blocks + end - 1 - count) * GROUPS + GROUP
                if DETERMINISTIC:
                    wait_for_turn(turns + number, key_tile)
                mbarrier.wait(part_ready, steps_done & 1)
                if SKIP:
                    steps_done += 0
                elif DETERMINISTIC:
                    if key_tile == 0:
                        store_tile(query_parts, [number * PART_ROWS, 0], part)
                    else:
                        add_tile(query_parts, [number * PART_ROWS, 0], part)
                else:
                    add_tile(query_parts, [number * PART_ROWS, 0], part)
                wait_for_stores(0)
                mbarrier.arrive(part_free, count=1)
                if DETERMINISTIC and EARLY:
                    end_turn_early(turns + number, key_tile + 1)
                elif DETERMINISTIC:
                    end_turn(turns + number, key_tile + 1)
                steps_done += 1
        ticket = next_ticket(tickets, tiles_done)
        tiles_done += 1


@gluon.jit
def as_tile(buffer):
    """A buffer [1, 1, rows, columns] as the tile [rows, columns]."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def ask_for_query_part(score_tiles, key_tiles, scores_ready, steps_done, GROUP: gl.constexpr):
    """Sets the matrix units to this consumer's part, [64, 64], of dQ = dS K of a step; doesn't wait for it.

    At head dimension 128 the consumers halve its columns, at 64 its rows.
    """
    BLOCK_M: gl.constexpr = score_tiles.shape[2]
    DS_BUFFERS: gl.constexpr = score_tiles.shape[0] // GROUPS
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    buffer = steps_done % DS_BUFFERS
    mbarrier.wait(scores_ready.index(buffer), steps_done // DS_BUFFERS & 1)
    part = gl.zeros([64, 64], gl.float32, PART)
    for group in gl.static_range(GROUPS):  # of the keys
        scores = score_tiles.index(buffer * GROUPS + group)  # [64 keys, BLOCK_M]
        key_tile = as_tile(key_tiles.index(unknown(group)))  # [64, HEAD_DIM]
        if BLOCK_M == 64:
            key_tile = key_tile.slice(GROUP * 64, 64, dim=1)
        else:
            scores = scores.slice(GROUP * 64, 64, dim=1)
        part = warpgroup_mma(scores.permute((1, 0)), key_tile, part, use_acc=group > 0, is_async=True)
    return part


@gluon.jit
def write_query_part(part, parts, part_ready, part_free, steps_done, GROUP: gl.constexpr):
    mbarrier.wait(part_free.index(GROUP), steps_done & 1 ^ 1)
    write_by_thread(parts.index(GROUP), part)
    mbarrier.arrive(part_ready.index(GROUP), count=1)


@gluon.jit
def ask_for_scores(query_tiles, key_tiles, query_ready, steps_done, GROUP: gl.constexpr, wanted=True):
    """Sets the matrix units to Sᵀ = K Qᵀ of this consumer's keys and a step's queries, [64, BLOCK_M]; doesn't wait.

    Where the step is not `wanted`, what lies in the buffer is multiplied, and nobody looks at the product.
    """
    STAGES: gl.constexpr = query_tiles.shape[0]
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    stage = steps_done % STAGES
    mbarrier.wait(query_ready.index(stage), steps_done // STAGES & 1, pred=wanted)
    query = as_tile(query_tiles.index(stage))  # [BLOCK_M, HEAD_DIM]
    empty = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, SCORES)
    own_keys = as_tile(key_tiles.index(unknown(GROUP)))  # [64, HEAD_DIM]
    return warpgroup_mma(own_keys, query.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def step(
    scores,
    buffers,
    shared,
    barriers,
    exchange,
    steps_done,
    last_step,
    first_key,
    first_query,
    query_length,
    key_length,
    scale_log2,
    key_gradient,
    value_gradient,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One block of queries."""
    query_tiles, gradient_tiles, key_tiles, value_tiles, exponent_rows, delta_rows = buffers
    score_tiles, parts = shared
    _keys_ready, _keys_free, query_ready, query_free, gradient_ready, gradient_free = barriers
    scores_ready, scores_free, part_ready, part_free = exchange
    dtype: gl.constexpr = query_tiles.dtype
    STAGES: gl.constexpr = query_tiles.shape[0]
    DS_BUFFERS: gl.constexpr = score_tiles.shape[0] // GROUPS
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    SCORES: gl.constexpr = scores.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, key_gradient.type.layout, 2)
    stage = steps_done % STAGES
    phase = steps_done // STAGES & 1

    mbarrier.wait(gradient_ready.index(stage), phase)
    gradient = as_tile(gradient_tiles.index(stage))  # [BLOCK_M, HEAD_DIM]
    own_values = as_tile(value_tiles.index(unknown(GROUP)))  # [64, HEAD_DIM]
    empty = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, SCORES)
    weight_gradients = warpgroup_mma(own_values, gradient.permute((1, 0)), empty, use_acc=False, is_async=True)
    exponents = exponent_rows.index(stage).load(SCORES)  # [1, BLOCK_M]
    weights = gl.exp2(scores * scale_log2 - exponents)  # [64, BLOCK_M]
    if MASKED:
        weights = hide_pairs(weights, first_key, first_query, query_length, key_length, CAUSAL)
    operand = gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)
    value_gradient = warpgroup_mma(operand, gradient, value_gradient, is_async=True)

    buffer = steps_done % DS_BUFFERS
    mbarrier.wait(scores_free.index(buffer), steps_done // DS_BUFFERS & 1 ^ 1)
    weight_gradients = warpgroup_mma_wait(1, deps=[weight_gradients])
    deltas = delta_rows.index(stage).load(SCORES)  # [1, BLOCK_M]
    score_gradients = (weights * (weight_gradients - deltas)).to(dtype)  # [64, BLOCK_M]
    score_tiles.index(buffer * GROUPS + GROUP).store(score_gradients)
    fence_async_shared()
    mbarrier.arrive(scores_ready.index(buffer), count=1)

    if not FIRST:
        part = ask_for_query_part(score_tiles, key_tiles, scores_ready, steps_done - 1, GROUP)
    operand = gl.convert_layout(score_gradients, OPERAND, assert_trivial=True)
    query = as_tile(query_tiles.index(stage))  # [BLOCK_M, HEAD_DIM]
    key_gradient = warpgroup_mma(operand, query, key_gradient, is_async=True)
    if FIRST:
        value_gradient = warpgroup_mma_wait(1, deps=[value_gradient])
        scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done + 1, GROUP, steps_done < last_step)
        mbarrier.arrive(gradient_free.index(stage), count=1)
    else:
        value_gradient, part = warpgroup_mma_wait(1, deps=[value_gradient, part])
        scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done + 1, GROUP, steps_done < last_step)
        mbarrier.arrive(gradient_free.index(stage), count=1)
        mbarrier.arrive(scores_free.index((steps_done - 1) % DS_BUFFERS), count=1)
        write_query_part(part, parts, part_ready, part_free, steps_done - 1, GROUP)
    key_gradient = warpgroup_mma_wait(1, deps=[key_gradient])
    mbarrier.arrive(query_free.index(stage), count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    return scores, key_gradient, value_gradient


@gluon.jit
def consume(
    outputs,
    buffers,
    shared,
    barriers,
    exchange,
    tickets,
    sizes,
    scales,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """A consumer: dK and dV of 64 of the keys of each tile, and half of what the tile adds to dQ."""
    key_gradients, value_gradients = outputs
    query_tiles, gradient_tiles, key_tiles, value_tiles, exponent_rows, delta_rows = buffers
    score_tiles, parts = shared
    keys_ready, keys_free, query_ready, query_free, gradient_ready, gradient_free = barriers
    scores_ready, scores_free, part_ready, part_free = exchange
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    scale, scale_log2 = scales
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    HEAD_DIM: gl.constexpr = query_tiles.shape[4]
    DS_BUFFERS: gl.constexpr = score_tiles.shape[0] // GROUPS
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dtype: gl.constexpr = query_tiles.dtype
    tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < tiles:
        batch_and_head, key_tile = keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS)
        begin, whole_begin, end = query_blocks(key_tile, query_length, key_length, CAUSAL, TILE_KEYS, BLOCK_M)
        first_key = key_tile * TILE_KEYS + GROUP * GROUP_KEYS
        key_gradient = gl.zeros([GROUP_KEYS, HEAD_DIM], gl.float32, OUTPUT)
        value_gradient = gl.zeros([GROUP_KEYS, HEAD_DIM], gl.float32, OUTPUT)
        mbarrier.wait(keys_ready, tiles_done & 1)
        for _head in range(heads_per_key_head):
            last_step = steps_done + end - begin - 1
            scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done, GROUP)
            wait_for_stores(0)
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores, key_gradient, value_gradient = step(
                scores, buffers, shared, barriers, exchange, steps_done, last_step, first_key, (end - 1) * BLOCK_M, query_length,
                key_length, scale_log2, key_gradient, value_gradient, GROUP, True, True, CAUSAL,
            )  # fmt: skip
            steps_done += 1
            whole = gl.maximum(end - 1 - whole_begin, 0)
            for count in range(whole):
                scores, key_gradient, value_gradient = step(
                    scores, buffers, shared, barriers, exchange, steps_done, last_step, first_key, (end - 2 - count) * BLOCK_M,
                    query_length, key_length, scale_log2, key_gradient, value_gradient, GROUP, False, False, CAUSAL,
                )  # fmt: skip
                steps_done += 1
            for count in range(end - 1 - begin - whole):
                scores, key_gradient, value_gradient = step(
                    scores, buffers, shared, barriers, exchange, steps_done, last_step, first_key, (end - 2 - whole - count) * BLOCK_M,
                    query_length, key_length, scale_log2, key_gradient, value_gradient, GROUP, False, True, CAUSAL,
                )  # fmt: skip
                steps_done += 1
            part = ask_for_query_part(score_tiles, key_tiles, scores_ready, steps_done - 1, GROUP)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(scores_free.index((steps_done - 1) % DS_BUFFERS), count=1)
            write_query_part(part, parts, part_ready, part_free, steps_done - 1, GROUP)

        batch_index = batch_and_head // key_heads
        key_head = batch_and_head % key_heads
        mbarrier.arrive(keys_free, count=1)  # the next tile's keys and values may come
        mbarrier.wait(keys_free, tiles_done & 1)  # and both consumers are done with dS: dV and dK leave by its buffers
        write_gradient(value_gradients, value_gradient, score_tiles, batch_index, key_head, first_key, GROUP)
        wait_for_stores(0)
        write_gradient(key_gradients, key_gradient * scale, score_tiles, batch_index, key_head, first_key, GROUP)
        ticket = next_ticket(tickets, tiles_done)
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it


@gluon.jit
def write_gradient(outputs, gradient, score_tiles, batch_index, key_head, first_key, GROUP: gl.constexpr):
    """Hands a finished dK or dV, [64, HEAD_DIM], to the copy engine, 64 columns at a time."""
    HEAD_DIM: gl.constexpr = gradient.shape[1]
    PANEL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rounded = gradient.to(outputs.dtype)
    if HEAD_DIM == 128:
        first, second = gl.split(rounded.reshape([GROUP_KEYS, 2, 64]).permute((0, 2, 1)))
        panels = gl.convert_layout(first, PANEL, assert_trivial=True), gl.convert_layout(second, PANEL, assert_trivial=True)
    else:
        panels = (rounded,)
    for number in gl.static_range(HEAD_DIM // 64):
        tile = score_tiles.index(number * GROUPS + GROUP)
        if tile.shape[1] > 64:
            tile = tile.slice(0, 64, dim=1)
        tile.store(panels[number])
    fence_async_shared()
    for number in gl.static_range(HEAD_DIM // 64):
        tile = score_tiles.index(number * GROUPS + GROUP)
        tile = tile.reshape([1, 1, tile.shape[0], tile.shape[1]])
        if tile.shape[3] > 64:
            tile = tile.slice(0, 64, dim=3)
        store_tile(outputs, [batch_index, key_head, first_key, number * 64], tile)


SIZES = ("all_key_heads", "key_heads", "heads_per_key_head", "query_length", "key_length", "heads_at_once")


@gluon.jit(do_not_specialize=SIZES)
def flash_backward_hopper_kernel(
    queries, output_gradients, keys, values, exponents, deltas, query_parts, key_gradients, value_gradients,
    counter, turns,
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once, scale, scale_log2,
    CAUSAL: gl.constexpr, DETERMINISTIC: gl.constexpr, STAGES: gl.constexpr, DS_BUFFERS: gl.constexpr, SKIP: gl.constexpr, EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    dtype: gl.constexpr = queries.dtype
    BLOCK_M: gl.constexpr = queries.block_type.shape[2]
    query_shape: gl.constexpr = [STAGES] + queries.block_type.shape  # [.., 1, 1, BLOCK_M, HEAD_DIM]
    key_shape: gl.constexpr = [GROUPS] + keys.block_type.shape  # [.., 1, 1, 64, HEAD_DIM]
    query_tiles = gl.allocate_shared_memory(dtype, query_shape, queries.layout)
    gradient_tiles = gl.allocate_shared_memory(dtype, query_shape, queries.layout)
    key_tiles = gl.allocate_shared_memory(dtype, key_shape, keys.layout)
    value_tiles = gl.allocate_shared_memory(dtype, key_shape, keys.layout)
    exponent_rows = gl.allocate_shared_memory(gl.float32, [STAGES] + exponents.block_type.shape, exponents.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES] + deltas.block_type.shape, deltas.layout)
    SCORE_TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    score_tiles = gl.allocate_shared_memory(dtype, [DS_BUFFERS * GROUPS, GROUP_KEYS, BLOCK_M], SCORE_TILE)
    parts = gl.allocate_shared_memory(gl.float32, [GROUPS] + query_parts.block_type.shape, query_parts.layout)
    slots = gl.allocate_shared_memory(gl.int32, [TICKET_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    keys_ready = new_barriers(1, 1).index(0)
    keys_free = new_barriers(1, GROUPS).index(0)
    query_ready = new_barriers(STAGES, 1)
    query_free = new_barriers(STAGES, GROUPS)
    gradient_ready = new_barriers(STAGES, 1)
    gradient_free = new_barriers(STAGES, GROUPS)
    scores_ready = new_barriers(DS_BUFFERS, GROUPS)
    scores_free = new_barriers(DS_BUFFERS, GROUPS)
    part_ready = new_barriers(GROUPS, 1)
    part_free = new_barriers(GROUPS, 1)
    ticket_ready = new_barriers(TICKET_SLOTS, 1)
    ticket_free = new_barriers(TICKET_SLOTS, TICKET_READERS)
    fence_async_shared()

    descriptors = queries, output_gradients, keys, values, exponents, deltas
    buffers = query_tiles, gradient_tiles, key_tiles, value_tiles, exponent_rows, delta_rows
    shared = score_tiles, parts
    barriers = keys_ready, keys_free, query_ready, query_free, gradient_ready, gradient_free
    exchange = scores_ready, scores_free, part_ready, part_free
    tickets = slots, ticket_ready, ticket_free
    sizes = all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once
    outputs = key_gradients, value_gradients
    scales = scale, scale_log2
    gl.warp_specialize([
        (consume, (outputs, buffers, shared, barriers, exchange, tickets, sizes, scales, 0, CAUSAL)),
        (consume, (outputs, buffers, shared, barriers, exchange, tickets, sizes, scales, 1, CAUSAL)),
        (produce, (descriptors, buffers, barriers, tickets, counter, sizes, CAUSAL)),
        (hand_over, (query_parts, parts.index(0), part_ready.index(0), part_free.index(0), tickets, turns, sizes,
                     BLOCK_M, 0, CAUSAL, DETERMINISTIC, SKIP, EARLY)),
        (hand_over, (query_parts, parts.index(1), part_ready.index(1), part_free.index(1), tickets, turns, sizes,
                     BLOCK_M, 1, CAUSAL, DETERMINISTIC, SKIP, EARLY)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS])  # fmt: skip


class BackwardArrangement(NamedTuple):
    """How a program is arranged: queries per block, buffers for Q and dO, buffers for dS."""

    query_rows: int
    stages: int
    score_buffers: int
    skip: bool = False
    early: bool = False

    def settings(self) -> dict:
        return {"STAGES": self.stages, "DS_BUFFERS": self.score_buffers, "SKIP": self.skip, "EARLY": self.early,
                "CONSUMER_REGISTERS": 240, "HELPER_REGISTERS": 24}  # fmt: skip


ARRANGEMENTS = {64: BackwardArrangement(128, 2, 2), 128: BackwardArrangement(64, 3, 2)}
MAX_REGISTERS = 168
L2_SHARE_BYTES = 68 * 2**20
ROW_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)


def rows_descriptor(tensor, rows, columns):
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns], ROW_LAYOUT)


def padded(head_dim):
    return 64 if head_dim <= 64 else 128


def flash_backward_hopper(
    query, key, value, output, log_sum_exp, output_gradient, *, causal=False, scale=None, deterministic=True,
    arrangement=None, heads_at_once=None
):
    check_attention_inputs(query, key, value, scale=scale)
    refusal = hopper_refusal(query, key, value)
    if refusal is not None:
        raise refusal.error(f"flash_backward_hopper: {refusal.reason}")
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    block_d = padded(head_dim)
    arrangement = arrangement or ARRANGEMENTS[block_d]
    block_m = arrangement.query_rows
    deltas, exponents = row_numbers(output, output_gradient, log_sum_exp)
    blocks = triton.cdiv(query_length, block_m)
    new = torch.empty if deterministic else torch.zeros
    sums = new(batch * query_heads * blocks * 2, 64 * 64, dtype=torch.float32, device=query.device)
    turns = torch.zeros(batch * query_heads * blocks * 2, dtype=torch.int32, device=query.device) if deterministic else None
    key_gradient = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    value_gradient = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    row_view = exponents.view(-1, exponents.shape[-1]), deltas.view(-1, deltas.shape[-1])
    group = query_heads // key_heads
    tiles = triton.cdiv(key_length, TILE_KEYS.value) * batch * key_heads
    if heads_at_once is None:
        heads_at_once = max(1, L2_SHARE_BYTES // (8 * query_length * head_dim * group))
    heads_at_once = min(batch * key_heads, heads_at_once)
    flash_backward_hopper_kernel[(min(tiles, multiprocessors(query.device)),)](
        descriptor(query, block_m, block_d), descriptor(output_gradient, block_m, block_d),
        descriptor(key, GROUP_KEYS.value, block_d), descriptor(value, GROUP_KEYS.value, block_d),
        rows_descriptor(row_view[0], 1, block_m), rows_descriptor(row_view[1], 1, block_m),
        rows_descriptor(sums.view(-1, 256), 16, 256),
        descriptor(key_gradient, GROUP_KEYS.value, 64), descriptor(value_gradient, GROUP_KEYS.value, 64),
        ticket_counter(query.device), turns,
        batch * key_heads, key_heads, group, query_length, key_length, heads_at_once, scale, scale * LOG2_E,
        CAUSAL=causal, DETERMINISTIC=deterministic, **arrangement.settings(), num_warps=4, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return query_gradients(sums, query, scale, block_m), key_gradient, value_gradient


def compile_cases() -> list[CompileCase]:
    return [compile_case(128, "bf16", causal=True), compile_case(64, "fp16", causal=True), compile_case(128, "bf16"), compile_case(64, "bf16")]


def compile_case(block_d, kind, causal=False, deterministic=True, arrangement=None):
    arrangement = arrangement or ARRANGEMENTS[block_d]
    block_m = arrangement.query_rows
    rows = {"queries": block_m, "output_gradients": block_m} | dict.fromkeys(
        ("keys", "values", "key_gradients", "value_gradients"), GROUP_KEYS.value)
    types = {name: descriptor_type(kind, count, block_d) for name, count in rows.items()}
    types |= {name: descriptor_type(kind, GROUP_KEYS.value, 64) for name in ("key_gradients", "value_gradients")}
    types |= {"exponents": f"tensordesc<fp32[1,{block_m}],{ROW_LAYOUT!r}>", "deltas": f"tensordesc<fp32[1,{block_m}],{ROW_LAYOUT!r}>",
              "query_parts": f"tensordesc<fp32[16,256],{ROW_LAYOUT!r}>", "counter": "*i32", "scale": "fp32", "scale_log2": "fp32"}
    types |= dict.fromkeys(SIZES, "i32")
    constants = {"CAUSAL": causal, "DETERMINISTIC": deterministic} | arrangement.settings()
    if deterministic:
        types["turns"] = "*i32"
    else:
        constants["turns"] = None
    return CompileCase(flash_backward_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        max_spill_bytes=0, options={"maxnreg": MAX_REGISTERS}, label=f"{kind} {block_d} causal={causal} deterministic={deterministic}")
