"""The parts of latent decode on Hopper: which keys a program reads, scores, softmax, and what the two groups exchange.

A block is 64 keys. Its rows lie in shared memory as two halves of the latent, [64, 256] each, and the rotary part,
[64, 64]. The copy engine fills a half in chunks of CHUNK columns, each with a barrier of its own, so that the product
of the first chunk can begin while the others are on their way.
"""

from course_lib.kernels.gluon.names import fence_async_shared, gl, gluon, mbarrier, meet, reinterpret, warpgroup_mma
from course_lib.kernels.gluon.parts import FIRST_NAMED_BARRIER, arrive_named, row_max, unknown, wait_named

ROWS = gl.constexpr(64)  # of a tile of queries, and of a block of keys: what one warp group multiplies at a time
HALF = gl.constexpr(256)  # columns of the output that a warp group holds
ROPE = gl.constexpr(64)
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
OUTPUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
OUTPUT_ROWS = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=3))  # the copy engine's, [1, 64, columns]
GROUP_AND_PRODUCER, BOTH_GROUPS = gl.constexpr(160), gl.constexpr(256)  # threads that meet at a named barrier


@gluon.jit
def half_free(block, half):
    """The number of the named barrier at which a group frees its half of block 0 or 1; the producer waits there."""
    return FIRST_NAMED_BARRIER + 2 * block + half


@gluon.jit
def state_ready(group):
    """The number of the named barrier at which a group publishes its maximum and factor, and the other waits for them.

    It needs no phases: a group publishes again only after it has read what the other group published in between, and
    the other published that only after its own wait here.
    """
    return FIRST_NAMED_BARRIER + 4 + group


@gluon.jit
def weights_ready(group):
    """The same for a group's weights. Its own warps meet in `publish_weights`."""
    return FIRST_NAMED_BARRIER + 6 + group


@gluon.jit
def keys_of_split(length, split, splits):
    """A split's first key, the end of its keys, and its pairs of blocks, at least one: a pipeline wants work.

    A sequence is dealt out in pairs of blocks, 128 keys. A split without keys gets one pair, all of it hidden.
    """
    all_pairs = gl.cdiv(length, 2 * ROWS)
    first = (split * all_pairs) // splits
    last = ((split + 1) * all_pairs) // splits
    return first * 2 * ROWS, gl.minimum(length, last * 2 * ROWS), gl.maximum(last - first, 1)


@gluon.jit
def boxes_of(tiles, CHUNK: gl.constexpr):
    """Halves [n, 64, 256] in shared memory as what the copy engine fills, [n * 256 / CHUNK, 1, 64, CHUNK]."""
    return reinterpret(tiles, [tiles.shape[0] * HALF // CHUNK, 1, ROWS, CHUNK], BOX)


@gluon.jit
def chunk_of(boxes, index):
    """One chunk as an operand, [64, CHUNK]."""
    return boxes.index(index).reshape([ROWS, boxes.shape[3]])


@gluon.constexpr_function
def chunk_in_turn(count, chunks, block):
    """The chunk of block 0 or 1 that comes after `count` others: the half that the other group holds, the own, rotary.

    The other group multiplies by a block first: its half is the first to be free.
    """
    return count if count == chunks else (count + (1 - block) * (chunks // 2)) % chunks


@gluon.jit
def add_scores(scores, queries, keys, ready, pair, GROUP: gl.constexpr, FIRST: gl.constexpr, LAST: gl.constexpr):
    """Sets the matrix units to add the chunks FIRST to LAST - 1 of Q Kᵀ of the group's next block; doesn't wait.

    Chunks are counted in the order in which they come, see `chunk_in_turn`; the first begins the sum.
    """
    query_boxes, query_rope = queries
    key_boxes, key_rope = keys
    CHUNKS: gl.constexpr = query_boxes.shape[0]
    # Where a tile lies is computed anew in each block: the compiler would keep dozens of addresses in registers.
    nothing, group = unknown(0), unknown(GROUP)
    for count in gl.static_range(FIRST, LAST):
        chunk = chunk_in_turn(count, CHUNKS, GROUP)
        mbarrier.wait(ready.index(GROUP * (CHUNKS + 1) + chunk), pair & 1)
        if count == CHUNKS:
            query = query_rope.index(nothing).reshape([ROWS, ROPE])
            key = key_rope.index(group).reshape([ROWS, ROPE])
        else:
            query = chunk_of(query_boxes, nothing + chunk)
            key = chunk_of(key_boxes, group * CHUNKS + chunk)
        scores = warpgroup_mma(query, key.permute((1, 0)), scores, use_acc=count > 0, is_async=True)
    return scores


@gluon.jit
def hide_scores(scores, first_key, seen_end):
    """Scores [64, 64] with minus infinity from a row's seen_end [64] on."""
    columns = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SCORES))
    return gl.where(gl.expand_dims(columns, 0) < gl.expand_dims(seen_end - first_key, 1), scores, float("-inf"))


@gluon.jit
def raise_maximum(scores, running_max, scale_log2):
    """The running maximum [64] after a block, what its weights are measured from, and the factor for earlier work.

    running_max counts both groups' blocks so far.
    """
    new_max = gl.maximum(running_max, row_max(scores) * scale_log2)
    reference = gl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf would be NaN
    return new_max, reference, gl.exp2(running_max - reference)


@gluon.jit
def rescale_sum(running_sum, rescale):
    ROWS_OF_SUM: gl.constexpr = gl.SliceLayout(1, running_sum.type.layout)
    return running_sum * gl.expand_dims(gl.convert_layout(rescale, ROWS_OF_SUM, assert_trivial=True), 1)


@gluon.jit
def publish_state(running_max, rescale, exchange, GROUP: gl.constexpr):
    """Tells the other group the maximum and the factor, ahead of the weights: it rescales its output meanwhile."""
    maxima, factors = exchange
    maxima.index(GROUP).store(running_max)
    factors.index(GROUP).store(rescale)
    arrive_named(state_ready(GROUP), BOTH_GROUPS)


@gluon.jit
def publish_weights(weights, key_rope, GROUP: gl.constexpr):
    """Puts a block's weights where its rotary part was, whose only reader is done, and says so to both groups."""
    key_rope.index(unknown(GROUP)).reshape([ROWS, ROPE]).store(weights.to(key_rope.dtype))
    fence_async_shared()  # the matrix units see what these threads wrote
    arrive_named(weights_ready(GROUP), BOTH_GROUPS)
    meet()  # this group's warps, which multiply by all of them, too


@gluon.jit
def read_state(exchange, GROUP: gl.constexpr):
    """The running maximum [64] and the factor for earlier work [64] that the group published for its block."""
    maxima, factors = exchange
    wait_named(state_ready(GROUP), BOTH_GROUPS)
    return maxima.index(GROUP).load(SCORE_ROWS), factors.index(GROUP).load(SCORE_ROWS)


@gluon.jit
def rescale_output(accumulator, rescale):
    return accumulator * gl.expand_dims(gl.convert_layout(rescale, OUTPUT_ROWS, assert_trivial=True), 1)


@gluon.jit
def add_output(accumulator, key_rope, tiles, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """Sets the matrix units to add P V of BLOCK (0 even, 1 odd) to the group's half of the output."""
    block = unknown(BLOCK)
    weights = key_rope.index(block).reshape([ROWS, ROPE])
    return warpgroup_mma(weights, tiles.index(2 * block + GROUP), accumulator, is_async=True)


@gluon.jit
def clear_tail(tiles, keys_here, BLOCK: gl.constexpr, GROUP: gl.constexpr):
    """Zeros in the rows of a half of a block that hold no key: a weight of 0 would not keep a NaN out."""
    QUARTER: gl.constexpr = gl.BlockedLayout([8, 8], [4, 8], [4, 1], [1, 0])
    boxes = boxes_of(tiles, 64)
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER))
    for quarter in gl.static_range(HALF // 64):
        tile = chunk_of(boxes, (2 * BLOCK + GROUP) * (HALF // 64) + quarter)
        content = tile.load(QUARTER)
        tile.store(gl.where(gl.expand_dims(rows, 1) < keys_here, content, gl.zeros_like(content)))
    fence_async_shared()
