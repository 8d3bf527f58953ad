"""Latent decode on Hopper: 64 rows of queries at a time, the output of 64 × 512 shared between two warp groups.

DRAFT
"""

import functools
from copy import copy
from typing import NamedTuple

import torch

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import LOG2_E
from course_lib.kernels.hopper.gluon_compat import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma_wait,
)
from course_lib.kernels.decode.combine import combine_splits_kernel
from course_lib.kernels.hopper.launch import multiprocessors
from course_lib.kernels.hopper.parts import LN_2, new_barriers
from course_lib.kernels.latent.hopper_limits import ROPE_DIM, VALUE_DIM, latent_hopper_refusal
from course_lib.kernels.latent.hopper_parts import (
    BOX,
    HALF,
    OUTPUT,
    OUTPUT_ROWS,
    ROPE,
    ROWS,
    SCORE_ROWS,
    SCORES,
    TILE,
    add_output,
    add_scores,
    boxes_of,
    clear_tail,
    hide_scores,
    keys_of_split,
    publish,
    read_state,
    rescale_sum,
    sum_by_thread,
    weigh,
)


@gluon.jit
def produce(descriptors, queries, keys, barriers, paging, sizes):
    """The producer: asks the copy engine for the queries, then for one block of keys after another.

    A half of a block is free when its warp group has multiplied by it; what the half took part in before, the scores,
    was done when the block's weights were published.
    """
    query_latent, query_rotary, key_latent, key_rotary = descriptors
    table, page_size = paging
    query_boxes, query_rope = queries
    key_boxes, key_rope = keys
    query_ready, key_ready, half_free, _published, _sums_ready = barriers
    batch_index, row_tile, first_key, end_key, pairs, _rows, _heads, _tokens, _length = sizes
    CHUNKS: gl.constexpr = query_boxes.shape[0]
    CHUNK: gl.constexpr = query_boxes.shape[3]
    query_bytes: gl.constexpr = ROWS * (2 * HALF + ROPE) * 2
    mbarrier.expect(query_ready, query_bytes)
    for chunk in gl.static_range(CHUNKS):
        load_tile(query_latent, [batch_index, row_tile * ROWS, chunk * CHUNK], query_ready, query_boxes.index(chunk))
    load_tile(query_rotary, [batch_index, row_tile * ROWS, 2 * HALF], query_ready, query_rope.index(0))
    page, next_page = batch_index, batch_index
    if table is not None:
        next_page = gl.load(table + first_key // page_size, mask=first_key < end_key, other=0).to(gl.int32)
    for pair in range(pairs):
        for block in gl.static_range(2):
            key = first_key + (2 * pair + block) * ROWS
            row = key
            if table is not None:
                page = next_page
                following = key + ROWS
                next_page = gl.load(table + following // page_size, mask=following < end_key, other=0).to(gl.int32)
                row = key % page_size
            row = gl.where(key < end_key, row, page_size)  # past the end: the copy engine fills in zeros
            for half in gl.static_range(2):
                mbarrier.wait(half_free.index(block * 2 + half), pair & 1 ^ 1)
                for chunk in gl.static_range(half * (CHUNKS // 2), (half + 1) * (CHUNKS // 2)):
                    ready = key_ready.index(block * (CHUNKS + 1) + chunk)
                    mbarrier.expect(ready, key_latent.block_type.nbytes)
                    load_tile(key_latent, [page, row, chunk * CHUNK], ready, key_boxes.index(block * CHUNKS + chunk))
            ready = key_ready.index(block * (CHUNKS + 1) + CHUNKS)
            mbarrier.expect(ready, key_rotary.block_type.nbytes)
            load_tile(key_rotary, [page, row, 2 * HALF], ready, key_rope.index(block))


@gluon.jit
def own_softmax(scores, keys, exchange, tiles, state, sizes, pair, scale_log2, seen_end, GROUP: gl.constexpr):
    """Masks, weighs and publishes the group's own block; returns the factor for earlier work and the new state."""
    states, published = exchange
    _batch_index, _row_tile, first_key, end_key, _pairs, _rows, _heads, _tokens, _length = sizes
    running_max, running_sum = state
    weights, rescale, running_max, running_sum = weigh(scores, running_max, running_sum, scale_log2)
    publish(weights, rescale, running_max, keys[1], states, published, GROUP)
    return rescale, (running_max, running_sum)


@gluon.jit
def mask_block(scores, first_key, sizes, seen_end):
    """Scores [64, 64] of the block that begins at first_key, with minus infinity where a row does not see the key."""
    _batch_index, _row_tile, _first_key, end_key, _pairs, _rows, _heads, tokens, length = sizes
    if first_key + ROWS > gl.minimum(end_key, length - tokens + 1):
        scores = hide_scores(scores, first_key, seen_end)
    return scores


@gluon.jit
def clear_block(tiles, first_key, end_key, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    if first_key + ROWS > end_key:
        clear_tail(tiles, end_key - first_key, BLOCK, GROUP)


@gluon.jit
def consume(outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, GROUP: gl.constexpr):
    """A warp group: the scores of every second block, and half of the output's columns for all blocks."""
    output_pointer, lse_pointer, output_row = outputs
    query_ready, key_ready, half_free, published, sums_ready = barriers
    states, _published = exchange
    batch_index, row_tile, first_key, end_key, pairs, rows, heads, tokens, length = sizes
    CHUNKS: gl.constexpr = queries[0].shape[0] + 1
    OTHER: gl.constexpr = 1 - GROUP
    row = row_tile * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
    seen_end = gl.minimum(length - tokens + row // heads + 1, end_key)  # [64]
    running_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
    running_sum = sum_by_thread(gl.zeros([ROWS, ROWS], gl.float32, SCORES))
    accumulator = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    empty = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    mbarrier.wait(query_ready, 0)

    scores = add_scores(empty, queries, keys, key_ready, 0, GROUP, 0, CHUNKS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    scores = mask_block(scores, first_key + GROUP * ROWS, sizes, seen_end)
    if GROUP == 0:
        rescale, state = own_softmax(
            scores, keys, exchange, tiles, (running_max, running_sum), sizes, 0, scale_log2, seen_end, GROUP
        )
        clear_block(tiles, first_key, end_key, 0, GROUP)
        accumulator = add_output(accumulator, rescale, keys, tiles, 0, GROUP)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(half_free.index(GROUP), count=1)
        running_max, running_sum = state
    else:
        running_max, rescale = read_state(states, published, 0, OTHER)
        clear_block(tiles, first_key, end_key, 0, GROUP)
        accumulator = add_output(accumulator, rescale, keys, tiles, 0, GROUP)
        running_sum = rescale_sum(running_sum, rescale)
        rescale, state = own_softmax(
            scores, keys, exchange, tiles, (running_max, running_sum), sizes, 0, scale_log2, seen_end, GROUP
        )
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        mbarrier.arrive(half_free.index(GROUP), count=1)
        running_max, running_sum = state
    for pair in range(1, pairs):
        block_key = first_key + 2 * pair * ROWS
        if GROUP == 0:
            running_max, rescale = read_state(states, published, pair - 1, OTHER)
            running_sum = rescale_sum(running_sum, rescale)
        accumulator = add_output(accumulator, rescale, keys, tiles, 1, GROUP)
        scores = add_scores(empty, queries, keys, key_ready, pair, GROUP, 0, 1)
        accumulator = warpgroup_mma_wait(1, deps=[accumulator])
        mbarrier.arrive(half_free.index(2 + GROUP), count=1)
        scores = add_scores(scores, queries, keys, key_ready, pair, GROUP, 1, CHUNKS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        scores = mask_block(scores, block_key + GROUP * ROWS, sizes, seen_end)
        if GROUP == 0:
            rescale, state = own_softmax(
                scores, keys, exchange, tiles, (running_max, running_sum), sizes, pair, scale_log2, seen_end, GROUP
            )
            clear_block(tiles, block_key, end_key, 0, GROUP)
            accumulator = add_output(accumulator, rescale, keys, tiles, 0, GROUP)
            accumulator = warpgroup_mma_wait(0, deps=[accumulator])
            mbarrier.arrive(half_free.index(GROUP), count=1)
            running_max, running_sum = state
        else:
            running_max, rescale = read_state(states, published, pair, OTHER)
            clear_block(tiles, block_key, end_key, 0, GROUP)
            accumulator = add_output(accumulator, rescale, keys, tiles, 0, GROUP)
            running_sum = rescale_sum(running_sum, rescale)
            rescale, state = own_softmax(
                scores, keys, exchange, tiles, (running_max, running_sum), sizes, pair, scale_log2, seen_end, GROUP
            )
            accumulator = warpgroup_mma_wait(0, deps=[accumulator])
            mbarrier.arrive(half_free.index(GROUP), count=1)
            running_max, running_sum = state
    if GROUP == 0:
        running_max, rescale = read_state(states, published, pairs - 1, OTHER)
        running_sum = rescale_sum(running_sum, rescale)
    clear_block(tiles, first_key + (2 * pairs - 1) * ROWS, end_key, 1, GROUP)
    accumulator = add_output(accumulator, rescale, keys, tiles, 1, GROUP)
    own_sum = gl.convert_layout(gl.sum(running_sum, axis=1), SCORE_ROWS)  # [64]
    sums.index(GROUP).store(own_sum)
    mbarrier.arrive(sums_ready.index(GROUP), count=1)
    mbarrier.wait(sums_ready.index(OTHER), 0)
    total = own_sum + sums.index(OTHER).load(SCORE_ROWS)
    total = gl.where(total == 0.0, 1.0, total)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    share = gl.convert_layout(1.0 / total, OUTPUT_ROWS, assert_trivial=True)
    result = accumulator * gl.expand_dims(share, 1)
    is_row = row < rows
    if GROUP == 0:
        if lse_pointer is not None:
            gl.store(lse_pointer + output_row + row, (running_max + gl.log2(total)) * LN_2, mask=is_row)
    columns = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    places = gl.expand_dims(gl.convert_layout(row, OUTPUT_ROWS, assert_trivial=True), 1)
    pointers = output_pointer + output_row * (2 * HALF) + places * (2 * HALF) + gl.expand_dims(columns, 0)
    gl.store(pointers, result.to(output_pointer.dtype.element_ty), mask=places < rows)


SIZES = ("rows", "heads", "tokens", "page_size")


@gluon.jit(do_not_specialize=SIZES)
def latent_decode_hopper_kernel(
    query_latent, query_rotary, key_latent, key_rotary, table_pointer, table_stride, lengths, output_pointer,
    lse_pointer, rows, heads, tokens, page_size, scale_log2, CHUNK: gl.constexpr,
):  # fmt: skip
    """One program: 64 rows of one sequence's queries against one split of its keys."""
    dtype: gl.constexpr = query_latent.dtype
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], TILE)
    query_rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, ROPE], BOX)
    tiles = gl.allocate_shared_memory(dtype, [4, ROWS, HALF], TILE)  # block 0's halves, block 1's halves
    key_rope = gl.allocate_shared_memory(dtype, [2, 1, ROWS, ROPE], BOX)
    states = gl.allocate_shared_memory(gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_ready = new_barriers(1, 1).index(0)
    key_ready = new_barriers(2 * (CHUNKS + 1), 1)
    half_free = new_barriers(4, 1)
    published = new_barriers(2, 1)
    sums_ready = new_barriers(2, 1)
    fence_async_shared()

    row_tile = gl.program_id(0)
    split = gl.program_id(1)
    batch_index = gl.program_id(2)
    length = gl.load(lengths + batch_index).to(gl.int32)
    first_key, end_key, pairs = keys_of_split(length, split, gl.num_programs(1))
    paging = table_pointer, page_size
    if table_pointer is not None:
        paging = table_pointer + batch_index.to(gl.int64) * table_stride, page_size
    sizes = batch_index, row_tile, first_key, end_key, pairs, rows, heads, tokens, length
    output_row = (split.to(gl.int64) * gl.num_programs(2) + batch_index) * rows
    queries = boxes_of(query_tiles, CHUNK), query_rope
    keys = boxes_of(tiles, CHUNK), key_rope
    barriers = query_ready, key_ready, half_free, published, sums_ready
    exchange = states, published
    outputs = output_pointer, lse_pointer, output_row
    descriptors = query_latent, query_rotary, key_latent, key_rotary
    gl.warp_specialize([
        (consume, (outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, 0)),
        (consume, (outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, 1)),
        (produce, (descriptors, queries, keys, barriers, paging, sizes)),
    ], [4, 1], [240, 24])  # fmt: skip


class LatentArrangement(NamedTuple):
    """How a program is arranged: columns of a chunk that the copy engine reports as one, 64, 128 or 256."""

    chunk: int = 64

    def settings(self) -> dict:
        return {"CHUNK": self.chunk}


ARRANGEMENT = LatentArrangement()
REGISTERS_AT_START = 168  # a thread's, when all threads share 64k of them alike


def latent_decode_hopper(
    query, cache, lengths, *, scale, causal=True, splits=None, return_lse=False, output=None, arrangement=None
):
    """Decode of multi-head latent attention on Hopper, cache contiguous. See `latent_decode_reference` for the meaning.

    Args:
        query: [batch, query_tokens, heads, 576], float16 or bfloat16.
        cache: [batch, capacity, 576], of query's dtype; address and strides are multiples of 16 bytes.
        lengths: int32 or int64 [batch], from 0 to the capacity.
        scale, causal, return_lse: see `latent_decode_reference`.
        splits: parts of a sequence's keys; chosen by the sizes when None.
        output: takes the result, [batch, query_tokens, heads, 512], contiguous; a new tensor when None.
        arrangement: a `LatentArrangement` to use.

    Returns the output, or (output, log-sum-exp float32 [batch, query_tokens, heads]).
    Raises a ValueError for inputs that only the portable kernel takes, and a RuntimeError on another machine.
    """
    refuse(latent_hopper_refusal(query, cache))
    return launch(query, cache, None, lengths, scale, causal, splits, return_lse, output, arrangement)


def paged_latent_decode_hopper(
    query, pages, block_tables, lengths, *, scale, causal=True, splits=None, return_lse=False, output=None,
    arrangement=None,
):  # fmt: skip
    """`latent_decode_hopper` for a cache in pages [pages, page_size, 576], page_size a multiple of 64.

    block_tables: int32 or int64 [batch, max_blocks]; entries that a length doesn't reach are not read.
    """
    refuse(latent_hopper_refusal(query, pages, paged=True))
    return launch(query, pages, block_tables, lengths, scale, causal, splits, return_lse, output, arrangement)


def refuse(refusal) -> None:
    if refusal is not None:
        raise refusal.error(f"latent_decode_hopper: {refusal.reason} latent_decode takes these inputs.")


def launch(query, cache, tables, lengths, scale, causal, splits, return_lse, output, arrangement):
    """Starts the kernel on checked tensors, and the one that merges splits; cache is the pool where tables are given."""
    batch, tokens, heads, width = query.shape
    arrangement = arrangement or ARRANGEMENT
    rows = tokens * heads
    packed = query.reshape(batch, rows, width)
    if packed.data_ptr() % 16 or packed.stride(2) != 1 or packed.stride(1) % 8 or packed.stride(0) % 8:
        packed = packed.contiguous().clone()
    capacity = cache.shape[1] if tables is None else tables.shape[1] * cache.shape[1]
    row_tiles = -(-rows // ROWS.value)
    if splits is None:
        splits = latent_splits(batch, row_tiles, capacity, multiprocessors(query.device))
    if output is None:
        output = torch.empty(batch, tokens, heads, VALUE_DIM, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, tokens, heads, dtype=torch.float32, device=query.device) if return_lse else None
    partial_outputs, partial_lses = output, lse
    if splits > 1:
        partial_outputs = torch.empty(splits, batch, rows, VALUE_DIM, dtype=torch.float32, device=query.device)
        partial_lses = torch.empty(splits, batch, rows, dtype=torch.float32, device=query.device)
    chunk = arrangement.chunk
    # Without a causal mask all rows see what the last token sees: as if they were one token's.
    heads_of_token, masked_tokens = (heads, tokens) if causal else (rows, 1)
    latent_decode_hopper_kernel[(row_tiles, splits, batch)](
        descriptor(packed, chunk), descriptor(packed, ROPE_DIM), descriptor(cache, chunk), descriptor(cache, ROPE_DIM),
        tables, 0 if tables is None else tables.stride(0), lengths, partial_outputs, partial_lses,
        rows, heads_of_token, masked_tokens, cache.shape[1], scale * LOG2_E,
        **arrangement.settings(), num_warps=4, maxnreg=REGISTERS_AT_START,
    )  # fmt: skip
    if splits > 1:
        combine_splits_kernel[(batch * rows,)](
            partial_outputs, partial_lses, output, lse, batch * rows, splits,
            HEAD_DIM=VALUE_DIM, BLOCK_D=VALUE_DIM, BLOCK_ROWS=1, num_warps=4,
        )  # fmt: skip
    return (output, lse) if return_lse else output


@functools.cache
def latent_splits(batch: int, row_tiles: int, longest: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys: the number with the least estimated time, the smaller of equals."""
    pairs = max(1, -(-longest // (2 * ROWS.value)))
    return min(range(1, min(pairs, 128) + 1),
               key=lambda splits: estimated_microseconds(splits, batch, row_tiles, pairs, multiprocessors))  # fmt: skip


def estimated_microseconds(splits: int, batch: int, row_tiles: int, pairs: int, multiprocessors: int) -> float:
    programs = batch * row_tiles * splits
    waves = -(-programs // multiprocessors)
    pair = max(PAIR_MICROSECONDS, min(programs, multiprocessors) / row_tiles * PAIR_DRAM_MICROSECONDS)
    merged_bytes = 2 * 4 * splits * batch * row_tiles * ROWS.value * VALUE_DIM
    merge = MERGE_MICROSECONDS + merged_bytes / MERGE_BYTES_PER_MICROSECOND if splits > 1 else 0
    return waves * (-(-pairs // splits) * pair + START_MICROSECONDS) + merge


PAIR_MICROSECONDS = 3.2  # two blocks of keys, by the matrix units
PAIR_DRAM_MICROSECONDS = 128 * 576 * 2 / 4.2e6  # by memory, for each program of those that run at once
START_MICROSECONDS = 4.0
MERGE_MICROSECONDS = 2.0
MERGE_BYTES_PER_MICROSECOND = 3.5e6


def descriptor(tensor: torch.Tensor, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a tensor [batch or pages, length, 576] that moves in boxes [1, 64, columns]."""
    known = copy(descriptor_like(tensor.shape, tensor.stride(), tensor.dtype, columns))
    known.base = tensor
    return known


@functools.lru_cache(1024)
def descriptor_like(shape, strides, dtype, columns) -> TensorDescriptor:
    """A descriptor for tensors like this, checked once and not at every launch; its own tensor is a stand-in."""
    strides = [stride if size > 1 else shape[2] for size, stride in zip(shape[:2], strides)]
    return TensorDescriptor(
        torch.empty(1, dtype=dtype), list(shape), [*strides, 1], [1, ROWS.value, columns], BOX.value
    )


def descriptor_type(kind: str, columns: int) -> str:
    return f"tensordesc<{kind}[1,64,{columns}],{BOX.value!r}>"


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: pages, with splits; and a contiguous cache in float16, with none."""
    return [
        compile_case("bf16", "*i32", "*fp32", "*fp32"),
        compile_case("fp16", None, "*fp16", None),
    ]


def compile_case(kind, table, output, lse, arrangement=ARRANGEMENT) -> CompileCase:
    box = descriptor_type(kind, arrangement.chunk)
    rotary = descriptor_type(kind, ROPE_DIM)
    types = {
        "query_latent": box, "query_rotary": rotary, "key_latent": box, "key_rotary": rotary, "table_stride": "i32",
        "lengths": "*i32", "output_pointer": output, "scale_log2": "fp32",
    } | dict.fromkeys(SIZES, "i32")  # fmt: skip
    pointers = {"table_pointer": table, "lse_pointer": lse}
    types |= {name: pointer for name, pointer in pointers.items() if pointer}
    constants = {name: None for name, pointer in pointers.items() if pointer is None} | arrangement.settings()
    return CompileCase(
        latent_decode_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        options={"maxnreg": REGISTERS_AT_START}, label=f"{kind} {'paged' if table else 'contiguous'} {arrangement}",
    )  # fmt: skip
