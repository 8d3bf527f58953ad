"""FlashAttention, backward, for Hopper: the five products of each block, and what lies between them at the same time.

The algorithm is that of `flash_attention_backward` with dQ added up in memory, five products and not seven. A program
stays for many tiles of 128 keys of one KV head, and for each goes through all blocks of queries that see them, of all
query heads that share the KV head: dK and dV stay in registers, and need no sum afterwards. Its warps have tasks:

    producer      one warp     asks the copy engine (TMA) for K and V of a tile, and Q, dO, LSE and Δ of each block
    consumers     2 × 4        64 keys each: P and dS, dK and dV, and half of the block's dQ; see `backward_step`
    messengers    2 × 1        one for each consumer: has the copy engine add its parts of dQ to those in memory

Every block of queries gets a part of its dQ from every tile of keys. The sum of floating-point numbers depends on their
order, so these wait for their turn: a counter for each part says how many tiles have added to it, and tiles add in the
order of their keys. All go through the blocks from the last to the first, so that a tile follows its predecessor at a
distance of a step or more. Only messengers wait, and a consumer only where its last part still lies in the buffer. With
`deterministic=False` nobody waits.

FLOPs: 10 · batch · query_heads · query_length · key_length · head_dim, half of it when causal. A step of 64 queries and
128 keys at head dimension 128 takes the matrix units of a multiprocessor 2560 cycles, its exponentials 512.
Shared memory moves 384 KB in that step, 3072 cycles at 128 bytes: operands 256, dS 16, dQ in and out 64, Q and dO 32,
LSE and Δ the rest. Between a multiprocessor and the L2 cache go 32 KB of Q and dO and 32 KB of dQ. Measured on an H200
at 4096 tokens: shared memory busy 79 % of the time, the L2 cache 75 %, the matrix units 70 %.
Extra memory: 4 · head_dim + 8 bytes a query.

Sources: Dao, FlashAttention-2, arXiv 2307.08691, Algorithm 2; Shah et al., FlashAttention-3, arXiv 2407.08608.
"""

import functools
import math
from copy import copy
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_rows import row_numbers
from course_lib.kernels.common.attention_checks import check_attention_inputs, check_backward_inputs
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, stride_refusal
from course_lib.kernels.gluon.names import (
    TensorDescriptor,
    add_tile,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_stores,
    warpgroup_mma_wait,
)
from course_lib.kernels.gluon.parts import NAMED_BARRIERS, new_barriers, wait_named
from course_lib.kernels.hopper.backward_limits import backward_refusal
from course_lib.kernels.hopper.backward_parts import (
    GROUPS,
    QUEUE_THREADS,
    end_turn,
    gradient_free,
    keys_of,
    next_ticket,
    query_blocks,
    query_free,
    wait_for_turn,
)
from course_lib.kernels.hopper.backward_step import (
    GROUP_KEYS,
    ask_for_scores,
    last_query_part,
    step,
    write_gradient,
)
from course_lib.kernels.hopper.backward_sums import round_query_gradients
from course_lib.kernels.hopper.launch import descriptor, descriptor_type, ticket_counter
from course_lib.kernels.hopper.parts import draw_ticket, write_ticket

TILE_KEYS = gl.constexpr(128)
TICKET_SLOTS = gl.constexpr(2)
TICKET_READERS = gl.constexpr(4)  # two consumers, two messengers
PART_ROWS, PART_COLUMNS = gl.constexpr(16), gl.constexpr(256)  # how a part of dQ, 64 × 64, lies by threads


@gluon.jit
def produce(descriptors, tiles, barriers, tickets, counter, sizes, CAUSAL: gl.constexpr):
    """The producer: draws tiles of keys, and asks the copy engine for all that they need, in the order of its use.

    A buffer's n-th use waits until its n-1-th is over, and its first use for nobody. Barriers in memory tell odd phases
    from even ones; to wait for the phase before the first passes at once, which is what an empty buffer wants.
    """
    queries, output_gradients, keys, values, log_sum_exps, deltas = descriptors
    query_tiles, gradient_tiles, key_tiles, value_tiles, log_sum_exp_rows, delta_rows = tiles
    keys_ready, keys_free, query_ready, gradient_ready = barriers
    slots, ticket_ready, ticket_free = tickets
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    STAGES: gl.constexpr = query_tiles.shape[0]
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    all_tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < all_tiles:
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
                place = [batch_index, head, first_query, 0]
                ready = query_ready.index(stage)
                if steps_done >= STAGES:
                    wait_named(query_free(stage), QUEUE_THREADS)
                mbarrier.expect(ready, queries.block_type.nbytes + log_sum_exps.block_type.nbytes)
                load_tile(queries, place, ready, query_tiles.index(stage))
                load_tile(log_sum_exps, [row, first_query], ready, log_sum_exp_rows.index(stage))
                ready = gradient_ready.index(stage)
                if steps_done >= STAGES:
                    wait_named(gradient_free(stage, STAGES), QUEUE_THREADS)
                mbarrier.expect(ready, output_gradients.block_type.nbytes + deltas.block_type.nbytes)
                load_tile(output_gradients, place, ready, gradient_tiles.index(stage))
                load_tile(deltas, [row, first_query], ready, delta_rows.index(stage))
                steps_done += 1

        ticket = draw_ticket(counter, all_tiles)
        slot = tiles_done % TICKET_SLOTS
        mbarrier.wait(ticket_free.index(slot), tiles_done // TICKET_SLOTS & 1 ^ 1)
        write_ticket(slots.index(slot), ticket)
        mbarrier.arrive(ticket_ready.index(slot), count=1)
        tiles_done += 1


@gluon.jit
def carry(
    query_parts,
    exchange,
    tickets,
    turns,
    sizes,
    BLOCK_M: gl.constexpr,
    GROUP: gl.constexpr,
    CAUSAL: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):
    """A messenger: has the copy engine add a consumer's parts of dQ to those in memory, each in its turn.

    The first tile of keys of a head writes, and does not add: nobody has to fill the sums with zeros before.
    """
    _score_gradient_tiles, _score_gradients_ready, parts, part_ready, part_free = exchange
    all_key_heads, _key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    all_tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    blocks = gl.cdiv(query_length, BLOCK_M)
    part = parts.index(GROUP)  # [16, 256]
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < all_tiles:
        batch_and_head, key_tile = keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS)
        begin, _whole_begin, end = query_blocks(key_tile, query_length, key_length, CAUSAL, TILE_KEYS, BLOCK_M)
        for head_of_group in range(heads_per_key_head):
            row = batch_and_head * heads_per_key_head + head_of_group
            for count in range(end - begin):
                number = (row * blocks + end - 1 - count) * GROUPS + GROUP
                if DETERMINISTIC:
                    wait_for_turn(turns + number, key_tile)
                mbarrier.wait(part_ready.index(GROUP), steps_done & 1)
                if DETERMINISTIC:
                    if key_tile == 0:
                        store_tile(query_parts, [number * PART_ROWS, 0], part)
                    else:
                        add_tile(query_parts, [number * PART_ROWS, 0], part)
                else:
                    add_tile(query_parts, [number * PART_ROWS, 0], part)
                wait_for_stores(0)
                mbarrier.arrive(part_free.index(GROUP), count=1)
                if DETERMINISTIC:
                    end_turn(turns + number, key_tile + 1)
                steps_done += 1
        ticket = next_ticket(tickets, tiles_done)
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it


@gluon.jit
def consume(
    outputs, tiles, barriers, exchange, tickets, sizes, scales, GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    LATE_PARTS: gl.constexpr,
):  # fmt: skip
    """A consumer: dK and dV of 64 of the keys of each tile, and half of what the tile adds to dQ."""
    key_gradients, value_gradients = outputs
    query_tiles, _gradient_tiles, key_tiles, _value_tiles, _log_sum_exp_rows, _delta_rows = tiles
    keys_ready, keys_free, query_ready, _gradient_ready = barriers
    STAGES: gl.constexpr = query_tiles.shape[0]
    score_gradient_tiles = exchange[0]
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once = sizes
    scale, scale_log2 = scales
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    HEAD_DIM: gl.constexpr = query_tiles.shape[4]
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    all_tiles = gl.cdiv(key_length, TILE_KEYS) * all_key_heads
    ticket = gl.program_id(0)
    tiles_done = 0
    steps_done = 0
    while ticket < all_tiles:
        batch_and_head, key_tile = keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS)
        begin, whole_begin, end = query_blocks(key_tile, query_length, key_length, CAUSAL, TILE_KEYS, BLOCK_M)
        first_key = key_tile * TILE_KEYS + GROUP * GROUP_KEYS
        key_gradient = gl.zeros([GROUP_KEYS, HEAD_DIM], gl.float32, OUTPUT)
        value_gradient = gl.zeros([GROUP_KEYS, HEAD_DIM], gl.float32, OUTPUT)
        mbarrier.wait(keys_ready, tiles_done & 1)
        for _head in range(heads_per_key_head):
            last_step = steps_done + end - begin - 1
            scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done, GROUP)  # [64, BLOCK_M]
            wait_for_stores(0)  # of the dK before, which left by a buffer that dS is about to take
            scores = warpgroup_mma_wait(0, deps=[scores])
            scores, key_gradient, value_gradient = step(
                scores, key_gradient, value_gradient, tiles, barriers, exchange, steps_done, last_step,
                first_key, (end - 1) * BLOCK_M, query_length, key_length, scale_log2, False,
                GROUP, True, True, CAUSAL, LATE_PARTS,
            )  # fmt: skip
            steps_done += 1
            whole = gl.maximum(end - 1 - whole_begin, 0)
            for count in range(whole):
                scores, key_gradient, value_gradient = step(
                    scores, key_gradient, value_gradient, tiles, barriers, exchange, steps_done, last_step, first_key,
                    (end - 2 - count) * BLOCK_M, query_length, key_length, scale_log2, count > 0,
                    GROUP, False, False, CAUSAL, LATE_PARTS,
                )  # fmt: skip
                steps_done += 1
            for count in range(end - 1 - begin - whole):
                scores, key_gradient, value_gradient = step(
                    scores, key_gradient, value_gradient, tiles, barriers, exchange, steps_done, last_step, first_key,
                    (end - 2 - whole - count) * BLOCK_M, query_length, key_length, scale_log2, whole + count > 0,
                    GROUP, False, True, CAUSAL, LATE_PARTS,
                )  # fmt: skip
                steps_done += 1
            last_query_part(exchange, key_tiles, steps_done, end - begin > 1, STAGES, GROUP, LATE_PARTS)

        batch_index = batch_and_head // key_heads
        key_head = batch_and_head % key_heads
        mbarrier.arrive(keys_free, count=1)  # the next tile's keys and values may come
        mbarrier.wait(keys_free, tiles_done & 1)  # the other consumer, too, has read all dS: their tiles are free
        write_gradient(value_gradients, value_gradient, score_gradient_tiles, batch_index, key_head, first_key, GROUP)
        wait_for_stores(0)
        key_gradient *= scale
        write_gradient(key_gradients, key_gradient, score_gradient_tiles, batch_index, key_head, first_key, GROUP)
        ticket = next_ticket(tickets, tiles_done)
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it


# Triton compiles anew for sizes that are 1 or multiples of 16; these would make dozens of kernels that don't differ.
SIZES = ("all_key_heads", "key_heads", "heads_per_key_head", "query_length", "key_length", "heads_at_once")


@gluon.jit(do_not_specialize=SIZES)
def flash_attention_backward_hopper_kernel(
    queries, output_gradients, keys, values, log_sum_exps, deltas, query_parts, key_gradients, value_gradients,
    counter, turns,
    all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once, scale, scale_log2,
    CAUSAL: gl.constexpr, DETERMINISTIC: gl.constexpr, STAGES: gl.constexpr, SCORE_BUFFERS: gl.constexpr,
    LATE_PARTS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, HELPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    dtype: gl.constexpr = queries.dtype
    BLOCK_M: gl.constexpr = queries.block_type.shape[2]
    query_shape: gl.constexpr = [STAGES] + queries.block_type.shape  # [.., 1, 1, BLOCK_M, HEAD_DIM]
    key_shape: gl.constexpr = [GROUPS] + keys.block_type.shape  # [.., 1, 1, 64, HEAD_DIM]
    row_shape: gl.constexpr = [STAGES] + deltas.block_type.shape  # [.., 1, BLOCK_M]
    SCORES: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    query_tiles = gl.allocate_shared_memory(dtype, query_shape, queries.layout)
    gradient_tiles = gl.allocate_shared_memory(dtype, query_shape, output_gradients.layout)
    key_tiles = gl.allocate_shared_memory(dtype, key_shape, keys.layout)
    value_tiles = gl.allocate_shared_memory(dtype, key_shape, values.layout)
    log_sum_exp_rows = gl.allocate_shared_memory(gl.float32, row_shape, log_sum_exps.layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, row_shape, deltas.layout)
    score_gradient_tiles = gl.allocate_shared_memory(dtype, [SCORE_BUFFERS * GROUPS, GROUP_KEYS, BLOCK_M], SCORES)
    parts = gl.allocate_shared_memory(gl.float32, [GROUPS] + query_parts.block_type.shape, query_parts.layout)
    slots = gl.allocate_shared_memory(gl.int32, [TICKET_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # *_ready: the copy engine counts its bytes, or those who write say so. *_free: each of those who read says so.
    keys_ready = new_barriers(1, 1).index(0)
    keys_free = new_barriers(1, GROUPS).index(0)
    query_ready = new_barriers(STAGES, 1)
    gradient_ready = new_barriers(STAGES, 1)
    score_gradients_ready = new_barriers(SCORE_BUFFERS, GROUPS)
    part_ready = new_barriers(GROUPS, 1)
    part_free = new_barriers(GROUPS, 1)
    ticket_ready = new_barriers(TICKET_SLOTS, 1)
    ticket_free = new_barriers(TICKET_SLOTS, TICKET_READERS)
    fence_async_shared()

    descriptors = queries, output_gradients, keys, values, log_sum_exps, deltas
    tiles = query_tiles, gradient_tiles, key_tiles, value_tiles, log_sum_exp_rows, delta_rows
    barriers = keys_ready, keys_free, query_ready, gradient_ready
    exchange = score_gradient_tiles, score_gradients_ready, parts, part_ready, part_free
    tickets = slots, ticket_ready, ticket_free
    sizes = all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once
    outputs = key_gradients, value_gradients
    scales = scale, scale_log2
    gl.warp_specialize([
        (consume, (outputs, tiles, barriers, exchange, tickets, sizes, scales, 0, CAUSAL, LATE_PARTS)),
        (consume, (outputs, tiles, barriers, exchange, tickets, sizes, scales, 1, CAUSAL, LATE_PARTS)),
        (produce, (descriptors, tiles, barriers, tickets, counter, sizes, CAUSAL)),
        (carry, (query_parts, exchange, tickets, turns, sizes, BLOCK_M, 0, CAUSAL, DETERMINISTIC)),
        (carry, (query_parts, exchange, tickets, turns, sizes, BLOCK_M, 1, CAUSAL, DETERMINISTIC)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS, HELPER_REGISTERS])  # fmt: skip


class BackwardArrangement(NamedTuple):
    """How a program is arranged: queries per block, buffers for Q and dO, buffers for dS, who announces a part of dQ.

    late_parts: True: the next step does, see `backward_step`; False: the same step.
    """

    query_rows: int
    stages: int
    score_buffers: int
    late_parts: bool

    def settings(self) -> dict:
        """What it is for a kernel's launch, but for num_warps and maxnreg.

        Raises a ValueError where it needs more named barriers than Triton leaves: two for each buffer of Q and dO, and
        two for each of dS.
        """
        named = 2 * (self.stages + self.score_buffers)
        if named > NAMED_BARRIERS:
            raise ValueError(
                f"arrangement has {self.stages} stages and {self.score_buffers} score_buffers, which take {named} "
                f"named barriers; Triton leaves {NAMED_BARRIERS}. Take fewer."
            )
        return {"STAGES": self.stages, "SCORE_BUFFERS": self.score_buffers, "LATE_PARTS": self.late_parts,
                "CONSUMER_REGISTERS": 240, "HELPER_REGISTERS": 24}  # fmt: skip


# By head dimension, padded. At 64 the ptxas of Triton 3.9 finds too few registers and has each product wait for the one
# before (its C7512); those of 3.6 and 3.8 do not.
ARRANGEMENTS = {
    64: BackwardArrangement(128, 2, 2, late_parts=False),
    128: BackwardArrangement(64, 3, 2, late_parts=True),
}
START_REGISTERS = 168  # per thread at the start, when all share 64k of them alike
# Of Q, dO and the sums of dQ in use at a time. It is more than the L2 cache holds, but tiles of one head pass through
# its queries a few blocks apart; and the fewer tiles of a head there are at a time, the less they wait for each other.
SHARE_BYTES = 68 * 2**20


def flash_attention_backward_hopper(
    query,
    key,
    value,
    output,
    log_sum_exp,
    output_gradient,
    *,
    causal=False,
    scale=None,
    log_sum_exp_gradient=None,
    deterministic=True,
    arrangement: BackwardArrangement | None = None,
    heads_at_once: int | None = None,
):
    """The gradients of attention on Hopper. Arguments and results are those of `flash_attention_backward`, except:

    Args:
        query, key, value: float16 or bfloat16, head_dim from 16 to 128. Multiples of 16 bytes in address and strides,
            the last dimension contiguous. No window.
        deterministic: False lets dQ be summed in whatever order programs come by, which is faster; its last digits then
            change from call to call.
        arrangement: a `BackwardArrangement` to use; by head dimension when None.
        heads_at_once: KV heads that programs work on at a time; by the size of a head's queries when None.

    Returns (dQ, dK, dV), contiguous; with `deterministic`, the same bits at every call. A NaN or an infinity in an
    input may reach every gradient of its head.

    Raises the ValueErrors of `flash_attention_backward`, a ValueError for inputs that only that one takes, and a
    RuntimeError where this machine cannot run the kernel.
    """
    check_attention_inputs(query, key, value, scale=scale)
    check_backward_inputs(query, output, log_sum_exp, output_gradient, log_sum_exp_gradient)
    refusal = backward_refusal(query, key, value)
    if refusal is not None:
        raise refusal.error(
            f"flash_attention_backward_hopper: {refusal.reason} flash_attention_backward takes these inputs."
        )
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    heads_per_key_head = query_heads // key_heads
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    block_d = 64 if head_dim <= 64 else 128  # the copy engine fills what is more than head_dim with zeros
    arrangement = arrangement or ARRANGEMENTS[block_d]
    block_m = arrangement.query_rows
    device = query.device

    output = output if output.stride(-1) == 1 else output.contiguous()
    output_gradient = as_the_copy_engine_takes_it(output_gradient)
    if log_sum_exp_gradient is not None:
        log_sum_exp_gradient = log_sum_exp_gradient.contiguous()
    delta, lse_log2 = row_numbers(output, output_gradient, log_sum_exp.contiguous(), log_sum_exp_gradient)
    all_parts = batch * query_heads * triton.cdiv(query_length, block_m) * GROUPS.value
    new = torch.empty if deterministic else torch.zeros
    sums = new(all_parts * PART_ROWS.value, PART_COLUMNS.value, dtype=torch.float32, device=device)
    turns = torch.zeros(all_parts, dtype=torch.int32, device=device) if deterministic else None
    key_gradient, value_gradient = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (key, value))

    all_key_heads = batch * key_heads
    if heads_at_once is None:  # of Q and dO 2 bytes a number, of the sums 4
        heads_at_once = SHARE_BYTES // (8 * heads_per_key_head * query_length * head_dim)
    heads_at_once = min(all_key_heads, max(1, heads_at_once))
    all_tiles = triton.cdiv(key_length, TILE_KEYS.value) * all_key_heads
    group_keys = GROUP_KEYS.value
    flash_attention_backward_hopper_kernel[(min(all_tiles, multiprocessor_count(device)),)](
        descriptor(query, block_m, block_d), descriptor(output_gradient, block_m, block_d),
        descriptor(key, group_keys, block_d), descriptor(value, group_keys, block_d),
        number_descriptor(lse_log2.flatten(0, 1), 1, block_m), number_descriptor(delta.flatten(0, 1), 1, block_m),
        number_descriptor(sums, PART_ROWS.value, PART_COLUMNS.value),
        descriptor(key_gradient, group_keys, 64), descriptor(value_gradient, group_keys, 64),
        ticket_counter(device), turns,
        all_key_heads, key_heads, heads_per_key_head, query_length, key_length, heads_at_once, scale,
        scale_in_log2(scale, head_dim),
        CAUSAL=causal, DETERMINISTIC=deterministic, **arrangement.settings(), num_warps=4, maxnreg=START_REGISTERS,
    )  # fmt: skip
    query_gradient = round_query_gradients(sums.view(all_parts, -1), query, scale, block_m)
    return query_gradient, key_gradient, value_gradient


def as_the_copy_engine_takes_it(gradient: torch.Tensor) -> torch.Tensor:
    """The same gradient; a copy where the engine cannot read it, such as a sum's, whose strides are 0."""
    refused = stride_refusal("output_gradient", gradient.shape, gradient.stride(), gradient.element_size())
    if refused or gradient.stride(-1) != 1 or gradient.data_ptr() % COPY_ENGINE_BYTES:
        return gradient.clone(memory_format=torch.contiguous_format)
    return gradient


def number_descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a contiguous float32 matrix that moves in tiles [rows, columns]."""
    known = copy(number_descriptor_like(tensor.shape, rows, columns))
    known.base = tensor
    return known


@functools.lru_cache(1024)
def number_descriptor_like(shape, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor for matrices like this, checked once and not at every launch; its own tensor is a stand-in."""
    stand_in = torch.empty(1, dtype=torch.float32)
    return TensorDescriptor(stand_in, list(shape), [shape[1], 1], [rows, columns], number_layout())


@functools.cache
def number_layout():
    """How rows of float32 lie in shared memory: one number after the other."""
    return gl.NVMMASharedLayout(0, 32, 2)


# A few numbers of the tile find no register: they are set aside before the loop over queries and fetched after it.
FEW_SPILLS = 64


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: each arrangement with and without a mask, and without turns."""
    return [
        compile_case(128, "bf16"),
        compile_case(128, "fp16", causal=True),
        compile_case(64, "bf16", causal=True),
        compile_case(64, "fp16", deterministic=False),
    ]


def compile_case(block_d: int, kind: str, *, causal=False, deterministic=True) -> CompileCase:
    """kind: "fp16" or "bf16"."""
    arrangement = ARRANGEMENTS[block_d]
    block_m, group_keys = arrangement.query_rows, GROUP_KEYS.value
    row = f"tensordesc<fp32[1,{block_m}],{number_layout()!r}>"
    types = {
        "queries": descriptor_type(kind, block_m, block_d), "output_gradients": descriptor_type(kind, block_m, block_d),
        "keys": descriptor_type(kind, group_keys, block_d), "values": descriptor_type(kind, group_keys, block_d),
        "log_sum_exps": row, "deltas": row,
        "query_parts": f"tensordesc<fp32[{PART_ROWS.value},{PART_COLUMNS.value}],{number_layout()!r}>",
        "key_gradients": descriptor_type(kind, group_keys, 64),
        "value_gradients": descriptor_type(kind, group_keys, 64),
        "counter": "*i32", "scale": "fp32", "scale_log2": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(SIZES, "i32") | ({"turns": "*i32"} if deterministic else {})
    constants = {"CAUSAL": causal, "DETERMINISTIC": deterministic} | arrangement.settings()
    constants |= {} if deterministic else {"turns": None}
    return CompileCase(
        flash_attention_backward_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        max_spill_bytes=FEW_SPILLS, options={"maxnreg": START_REGISTERS},
        label=f"{kind} {block_d} {causal=} {deterministic=}",
    )  # fmt: skip
