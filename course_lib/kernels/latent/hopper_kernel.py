"""Latent decode on Hopper, the kernel: two warp groups share one output, and take turns at the scores.

The output of 64 rows is 64 × 512 numbers of float32, half of a multiprocessor's registers: no warp group can hold it,
and no second one fits. So the two groups hold one half of the columns each, left and right. Blocks of 64 keys come in
pairs, one for each group:

    scores      the even blocks' by the left group, the odd blocks' by the right one: each computes half of them
    weights     go through shared memory, with the maximum they are measured from, and the factor for earlier work
    output      each group multiplies the weights of both blocks with its half of their latents

The maximum of a row passes from block to block, and so from group to group: each begins its softmax where the other
ended. It goes ahead of the weights, so that the other group rescales its output while they are computed.

In shared memory, of 227 KB: queries 72 KB, two blocks of keys 144 KB. Weights take no more: a block's lie where its
rotary part was, as scores are all that needed that. A half of a block is free when its group has multiplied with it;
its successor arrives in chunks, and the scores begin with the first.

Of 64 keys, the matrix units need 1,152 cycles for scores and 1,024 for the output; the copy brings 73,728 bytes.
"""

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.numbers import LN_2
from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon, load_tile, mbarrier, warpgroup_mma_wait
from course_lib.kernels.gluon.parts import arrive_named, new_barriers, sum_by_thread, wait_named
from course_lib.kernels.latent.hopper_parts import (
    BOTH_GROUPS,
    BOX,
    GROUP_AND_PRODUCER,
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
    chunk_in_turn,
    clear_tail,
    half_free,
    hide_scores,
    keys_of_split,
    publish_state,
    publish_weights,
    raise_maximum,
    read_state,
    rescale_output,
    rescale_sum,
    weights_ready,
)


@gluon.jit
def page_of(table, key, end_key, page_size):
    """The page that holds a key; 0 past the end of the keys, where the table may say anything."""
    return gl.load(table + key // page_size, mask=key < end_key, other=0).to(gl.int32)


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
    query_ready, key_ready, _sums_ready = barriers
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
        next_page = page_of(table, first_key, end_key, page_size)
    for pair in range(pairs):
        for block in gl.static_range(2):
            key = first_key + (2 * pair + block) * ROWS
            row = key
            if table is not None:
                page = next_page
                next_page = page_of(table, key + ROWS, end_key, page_size)
                row = key % page_size
            row = gl.where(key < end_key, row, page_size)  # past the end: the copy engine fills in zeros
            for count in gl.static_range(CHUNKS):
                number = chunk_in_turn(count, CHUNKS, block)
                if count % (CHUNKS // 2) == 0:
                    if pair > 0:
                        wait_named(half_free(block, number // (CHUNKS // 2)), GROUP_AND_PRODUCER)
                ready = key_ready.index(block * (CHUNKS + 1) + number)
                mbarrier.expect(ready, key_latent.block_type.nbytes)
                load_tile(key_latent, [page, row, number * CHUNK], ready, key_boxes.index(block * CHUNKS + number))
            ready = key_ready.index(block * (CHUNKS + 1) + CHUNKS)
            mbarrier.expect(ready, key_rotary.block_type.nbytes)
            load_tile(key_rotary, [page, row, 2 * HALF], ready, key_rope.index(block))


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
def take_other_state(running_sum, accumulator, exchange, GROUP: gl.constexpr):
    """Waits for what the other group found out about its block, and rescales by it while the weights are computed."""
    running_max, rescale = read_state(exchange, 1 - GROUP)
    running_sum = rescale_sum(running_sum, rescale)
    accumulator = rescale_output(accumulator, rescale)
    wait_named(weights_ready(1 - GROUP), BOTH_GROUPS)
    return running_max, running_sum, accumulator


@gluon.jit
def own_block(scores, block_key, softmax_state, keys, tiles, exchange, sizes, seen_end, scale_log2,
              GROUP: gl.constexpr, OTHER_RUNS: gl.constexpr):  # fmt: skip
    """The softmax state after the group's own block: weighed, published, and multiplied with the own half of it.

    OTHER_RUNS: the product with the other group's block was asked for, and runs during the softmax.
    """
    running_max, running_sum, accumulator = softmax_state
    _batch_index, _row_tile, _first_key, end_key, _pairs, _rows, _heads, _tokens, _length = sizes
    scores = mask_block(scores, block_key, sizes, seen_end)
    running_max, reference, rescale = raise_maximum(scores, running_max, scale_log2)
    publish_state(running_max, rescale, exchange, GROUP)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(reference, 1))
    running_sum = rescale_sum(running_sum, rescale) + sum_by_thread(weights)
    publish_weights(weights, keys[1], GROUP)
    clear_block(tiles, block_key, end_key, GROUP, GROUP)
    if OTHER_RUNS:
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])
        arrive_named(half_free(1 - GROUP, GROUP), GROUP_AND_PRODUCER)
    accumulator = rescale_output(accumulator, rescale)
    accumulator = add_output(accumulator, keys[1], tiles, GROUP, GROUP)
    accumulator = warpgroup_mma_wait(0, deps=[accumulator])
    arrive_named(half_free(GROUP, GROUP), GROUP_AND_PRODUCER)
    return running_max, running_sum, accumulator


@gluon.jit
def consume(outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, GROUP: gl.constexpr,
            SCORES_FIRST: gl.constexpr):  # fmt: skip
    """A warp group: the scores of every second block, and half of the output's columns for all blocks.

    Each turn begins with the block before its own, the other group's: that product frees a half for the copy engine.
    The own block's scores stand behind it in the matrix units' queue; or, with SCORES_FIRST, before it in the right
    group's, which so has them when the left group has its maximum.
    """
    query_ready, key_ready, sums_ready = barriers
    _batch_index, row_tile, first_key, end_key, pairs, _rows, heads, tokens, length = sizes
    CHUNKS: gl.constexpr = queries[0].shape[0] + 1
    OTHER: gl.constexpr = 1 - GROUP
    FIRST: gl.constexpr = SCORES_FIRST and GROUP == 1
    row = row_tile * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
    seen_end = gl.minimum(length - tokens + row // heads + 1, end_key)  # [64]
    running_max = gl.full([ROWS], float("-inf"), gl.float32, SCORE_ROWS)
    running_sum = sum_by_thread(gl.zeros([ROWS, ROWS], gl.float32, SCORES))  # [64, 4]
    accumulator = gl.zeros([ROWS, HALF], gl.float32, OUTPUT)
    empty = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    mbarrier.wait(query_ready, 0)

    begin = 0
    if GROUP == 0:  # the first block of all has none before it
        scores = add_scores(empty, queries, keys, key_ready, 0, GROUP, 0, CHUNKS)
        scores = warpgroup_mma_wait(0, deps=[scores])
        running_max, running_sum, accumulator = own_block(
            scores, first_key, (running_max, running_sum, accumulator), keys, tiles, exchange, sizes,
            seen_end, scale_log2, GROUP, False,
        )  # fmt: skip
        begin = 1
    for pair in range(begin, pairs):
        block_key = first_key + (2 * pair + GROUP) * ROWS
        scores = empty
        if FIRST:
            scores = add_scores(scores, queries, keys, key_ready, pair, GROUP, 0, CHUNKS)
        running_max, running_sum, accumulator = take_other_state(running_sum, accumulator, exchange, GROUP)
        if GROUP == 1:
            clear_block(tiles, block_key - ROWS, end_key, OTHER, GROUP)
        accumulator = add_output(accumulator, keys[1], tiles, OTHER, GROUP)
        if FIRST:
            scores = warpgroup_mma_wait(1, deps=[scores])  # the other block's product may still run
        else:
            scores = add_scores(scores, queries, keys, key_ready, pair, GROUP, 0, 1)
            accumulator = warpgroup_mma_wait(1, deps=[accumulator])  # the scores' first chunk may still run
            arrive_named(half_free(OTHER, GROUP), GROUP_AND_PRODUCER)
            scores = add_scores(scores, queries, keys, key_ready, pair, GROUP, 1, CHUNKS)
            scores = warpgroup_mma_wait(0, deps=[scores])
        running_max, running_sum, accumulator = own_block(
            scores, block_key, (running_max, running_sum, accumulator), keys, tiles, exchange, sizes,
            seen_end, scale_log2, GROUP, FIRST,
        )  # fmt: skip
    if GROUP == 0:  # the last block of all is the other group's
        running_max, running_sum, accumulator = take_other_state(running_sum, accumulator, exchange, GROUP)
        clear_block(tiles, first_key + (2 * pairs - 1) * ROWS, end_key, OTHER, GROUP)
        accumulator = add_output(accumulator, keys[1], tiles, OTHER, GROUP)
        accumulator = warpgroup_mma_wait(0, deps=[accumulator])

    own_sum = gl.convert_layout(gl.sum(running_sum, axis=1), SCORE_ROWS)  # [64], of this group's blocks
    sums.index(GROUP).store(own_sum)
    mbarrier.arrive(sums_ready.index(GROUP), count=1)
    mbarrier.wait(sums_ready.index(OTHER), 0)
    write_half(outputs, accumulator, running_max, own_sum + sums.index(OTHER).load(SCORE_ROWS), sizes, GROUP)


@gluon.jit
def write_half(outputs, accumulator, running_max, total, sizes, GROUP: gl.constexpr):
    """Stores the group's half of the output, [64, 256], and, by the left group, the log-sum-exp [64]."""
    output_pointer, lse_pointer, output_row = outputs
    _batch_index, row_tile, _first_key, _end_key, _pairs, rows, _heads, _tokens, _length = sizes
    total = gl.where(total == 0.0, 1.0, total)  # a row that saw no key: zeros and minus infinity
    row = row_tile * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
    if GROUP == 0:
        if lse_pointer is not None:
            gl.store(lse_pointer + output_row + row, (running_max + gl.log2(total)) * LN_2, mask=row < rows)
    share = gl.convert_layout(1.0 / total, OUTPUT_ROWS, assert_trivial=True)
    result = accumulator * gl.expand_dims(share, 1)
    columns = GROUP * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(0, OUTPUT))
    places = gl.expand_dims(gl.convert_layout(row, OUTPUT_ROWS, assert_trivial=True), 1)
    pointers = output_pointer + (output_row + places) * (2 * HALF) + gl.expand_dims(columns, 0)
    gl.store(pointers, result.to(output_pointer.dtype.element_ty), mask=places < rows)


SIZES = ("rows", "heads", "tokens", "page_size")


@gluon.jit(do_not_specialize=SIZES)
def latent_decode_hopper_kernel(
    query_latent, query_rotary, key_latent, key_rotary, table_pointer, table_stride, lengths, output_pointer,
    lse_pointer, rows, heads, tokens, page_size, scale_log2, CHUNK: gl.constexpr, SCORES_FIRST: gl.constexpr,
):  # fmt: skip
    """One program: 64 rows of one sequence's queries against one split of its keys."""
    dtype: gl.constexpr = query_latent.dtype
    CHUNKS: gl.constexpr = 2 * HALF // CHUNK
    query_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HALF], TILE)
    query_rope = gl.allocate_shared_memory(dtype, [1, 1, ROWS, ROPE], BOX)
    tiles = gl.allocate_shared_memory(dtype, [4, ROWS, HALF], TILE)  # block 0's halves, block 1's halves
    key_rope = gl.allocate_shared_memory(dtype, [2, 1, ROWS, ROPE], BOX)
    maxima = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factors = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    query_ready = new_barriers(1, 1).index(0)
    key_ready = new_barriers(2 * (CHUNKS + 1), 1)
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
    barriers = query_ready, key_ready, sums_ready
    exchange = maxima, factors
    outputs = output_pointer, lse_pointer, output_row
    descriptors = query_latent, query_rotary, key_latent, key_rotary
    gl.warp_specialize([
        (consume, (outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, 0, SCORES_FIRST)),
        (consume, (outputs, queries, keys, tiles, exchange, barriers, sums, sizes, scale_log2, 1, SCORES_FIRST)),
        (produce, (descriptors, queries, keys, barriers, paging, sizes)),
    ], [4, 1], [240, 24])  # fmt: skip


CHUNK_COLUMNS = 128  # that the copy engine reports as one; 64 columns are as fast, 256 slower
REGISTERS_AT_START = 168  # a thread's, when all threads share 64k of them alike


def descriptor_type(kind: str, columns: int) -> str:
    return f"tensordesc<{kind}[1,64,{columns}],{BOX.value!r}>"


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: pages, with splits; a contiguous cache in float16, with none; either order."""
    return [
        compile_case("bf16", "*i32", "*fp32", "*fp32", scores_first=False),
        compile_case("bf16", "*i32", "*bf16", None, scores_first=True),
        compile_case("fp16", None, "*fp16", None, scores_first=False),
    ]


def compile_case(kind, table, output, lse, scores_first) -> CompileCase:
    box = descriptor_type(kind, CHUNK_COLUMNS)
    rotary = descriptor_type(kind, ROPE.value)
    types = {
        "query_latent": box, "query_rotary": rotary, "key_latent": box, "key_rotary": rotary, "table_stride": "i32",
        "lengths": "*i32", "output_pointer": output, "scale_log2": "fp32",
    } | dict.fromkeys(SIZES, "i32")  # fmt: skip
    pointers = {"table_pointer": table, "lse_pointer": lse}
    types |= {name: pointer for name, pointer in pointers.items() if pointer}
    constants: dict[str, object] = {name: None for name, pointer in pointers.items() if pointer is None}
    constants |= {"CHUNK": CHUNK_COLUMNS, "SCORES_FIRST": scores_first}
    return CompileCase(
        latent_decode_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        options={"maxnreg": REGISTERS_AT_START},
        max_spill_bytes=24 if scores_first else 0,  # with Triton 3.9; 3.6 spills nothing
        label=f"{kind} {'paged' if table else 'contiguous'}{', scores first' if scores_first else ''}",
    )  # fmt: skip
