"""The parts of attention on Hopper: which tile a program works on, which keys it needs, and softmax on registers.

A warp group (four warps, 128 threads) multiplies 64 rows at a time. The result of `wgmma` lies in registers as the
hardware prescribes (`NVMMADistributedLayout`): warp w holds rows 16w to 16w + 15, and of each row four neighbouring
threads hold all the columns. So a row's maximum costs two exchanges between threads, and in 16 bits the weights lie
where the next product expects its left operand: they never leave the registers.
"""

from course_lib.kernels.common.numbers import LN_2, LOG2_E
from course_lib.kernels.gluon.names import gl, gluon
from course_lib.kernels.gluon.parts import FIRST_NAMED_BARRIER, row_max, sum_by_thread

GROUP_ROWS = gl.constexpr(64)  # rows of a warp group's matrix product: the hardware's number
GROUP_THREADS = gl.constexpr(128)
WARP_THREADS = gl.constexpr(32)
TICKET_SLOTS = gl.constexpr(2)


@gluon.jit
def key_free(stage):
    """The name of the barrier at which consumers free a buffer of keys, and the producer waits for all of them."""
    return FIRST_NAMED_BARRIER + stage


@gluon.jit
def value_free(stage, STAGES: gl.constexpr):
    """The same for a buffer of values."""
    return FIRST_NAMED_BARRIER + STAGES + stage


@gluon.jit
def turn_of(group, STAGES: gl.constexpr):
    """The name of the barrier at which a consumer waits for its turn at the matrix units."""
    return FIRST_NAMED_BARRIER + 2 * STAGES + group


@gluon.jit
def tile_of(ticket, sizes, TILE_ROWS: gl.constexpr):
    """(batch index, head, first query) of the tile with this number: the order in which tiles are handed out.

    A few heads at once, as many as leave their keys and values in the L2 cache; of these the last queries first, which
    see the most keys under a causal mask: long tiles early, short ones to fill the gaps at the end.
    """
    query_heads, heads_at_once = sizes.query_heads, sizes.heads_at_once
    heads = sizes.batch * query_heads
    query_tiles = gl.cdiv(sizes.query_length, TILE_ROWS)
    group = ticket // (heads_at_once * query_tiles)
    place = ticket % (heads_at_once * query_tiles)
    first_head = group * heads_at_once
    heads_here = gl.minimum(heads_at_once, heads - first_head)
    batch_and_head = first_head + place % heads_here
    query_tile = query_tiles - 1 - place // heads_here
    return batch_and_head // query_heads, batch_and_head % query_heads, query_tile * TILE_ROWS


@gluon.jit
def draw_ticket(counter, tiles):
    """The number of the next tile for this program; tiles or more when there is none left.

    Every program begins with the tile of its own number, so the counter stands for the tiles after those. Each program
    draws once in vain, which makes `tiles` draws in all: the last one leaves the counter at 0 for the next launch.
    """
    drawn = gl.atomic_add(counter, 1)
    gl.store(counter, 0, mask=drawn == tiles - 1)
    return gl.num_programs(0) + drawn


@gluon.jit
def write_ticket(slot, ticket):
    """Puts a ticket where the other groups of warps read it, a slot [1] in shared memory; returns it."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot.store(gl.full([1], ticket, gl.int32, LAYOUT))
    return ticket


@gluon.jit
def read_ticket(slot):
    """The ticket in a slot [1], as a number."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(slot.load(LAYOUT), axis=0)


@gluon.jit
def key_blocks(first_position, key_length, band, TILE_ROWS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The blocks of keys that a tile of queries, the first at first_position, has to read, counted from the first key.

    Returns begin, whole_begin, whole_end, end. Blocks are taken from the last to the first: those in [whole_end, end)
    under a mask, at least one (possibly of hidden keys only: a pipeline wants work), then [whole_begin, whole_end),
    which every query sees whole, then [begin, whole_begin) under a mask again.
    """
    keys_before, keys_after = band
    last_position = gl.minimum(first_position + TILE_ROWS, key_length) - 1
    begin = 0
    whole_begin = 0
    whole_end = key_length // BLOCK_N
    end = gl.cdiv(key_length, BLOCK_N)
    if keys_after is not None:
        end = gl.minimum(end, gl.cdiv(gl.maximum(last_position + keys_after + 1, 0), BLOCK_N))
        whole_end = gl.minimum(whole_end, gl.maximum(first_position + keys_after + 1, 0) // BLOCK_N)
    end = gl.maximum(end, 1)
    if keys_before is not None:
        begin = gl.minimum(gl.maximum(first_position - keys_before, 0) // BLOCK_N, end - 1)
        whole_begin = gl.cdiv(gl.maximum(last_position - keys_before, 0), BLOCK_N)
    whole_end = gl.minimum(whole_end, end - 1)
    whole_begin = gl.minimum(whole_begin, end - 1)
    whole_end = gl.maximum(whole_end, whole_begin)
    return begin, whole_begin, whole_end, end


@gluon.jit
def hide_scores(scores, query_positions, first_key, key_length, band):
    """Scores [64, BLOCK_N] with minus infinity at the keys that a query does not see.

    Of each 8 columns thread t, of the four of a row, has 2t and 2t + 1. One subtraction for a row counts the key at
    which what is seen begins, or ends, from the thread's first; its columns are then numbers that the compiler knows.
    """
    keys_before, keys_after = band
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK_N: gl.constexpr = scores.shape[1]
    dealt = scores.reshape([ROWS, BLOCK_N // 8, 4, 2])
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, dealt.type.layout))  # of [64, 4]
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, dealt.type.layout))  # of [BLOCK_N / 8, 2]
    eights = gl.arange(0, BLOCK_N // 8, layout=gl.SliceLayout(1, BY_COLUMN))
    pairs = gl.arange(0, 2, layout=gl.SliceLayout(0, BY_COLUMN))
    columns = 8 * gl.expand_dims(eights, 1) + gl.expand_dims(pairs, 0)
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 2)  # [1, BLOCK_N / 8, 1, 2]
    threads_first_key = first_key + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, BY_THREAD))  # [4]

    positions = gl.convert_layout(query_positions, gl.SliceLayout(1, BY_THREAD), assert_trivial=True)  # [64]
    seen_end = gl.full_like(positions, 0) + key_length
    if keys_after is not None:
        seen_end = gl.minimum(seen_end, positions + keys_after + 1)
    visible = columns < from_threads_first(seen_end, threads_first_key)  # [64, BLOCK_N / 8, 4, 2]
    if keys_before is not None:
        visible = visible & (columns >= from_threads_first(positions - keys_before, threads_first_key))
    hidden = gl.where(visible, dealt, float("-inf")).reshape([ROWS, BLOCK_N])
    return gl.convert_layout(hidden, scores.type.layout, assert_trivial=True)


@gluon.jit
def from_threads_first(keys, threads_first_key):
    """A key for each row [64], where what it sees begins or ends, counted from a thread's first [4]: [64, 1, 4, 1]."""
    distance = gl.expand_dims(keys, 1) - gl.expand_dims(threads_first_key, 0)
    return gl.expand_dims(gl.expand_dims(distance, 1), 3)


@gluon.jit
def online_softmax(scores, running_max, running_sum, scale_log2, MASKED: gl.constexpr, EXPONENT: gl.constexpr,
                   THRESHOLD: gl.constexpr):  # fmt: skip
    """Weighs a block of scores [64, BLOCK_N]: the weights, the factor for earlier work, whether it is due, the state.

    Weights are measured such that a row's largest so far is 2 ** EXPONENT; `finish_rows` is given the same EXPONENT.
    It is the step that `common.softmax` explains. running_sum is [64, 4]: each of the four threads of a row sums its
    own weights, and they meet after the last. The accumulator is the caller's: a matrix product still holds it now.
    THRESHOLD: of lazy rescaling. Above 0 all rows keep their maximum until one has a score that exceeds it by more; the
    factor is due only then. Asked before the exponentials, or these would be moved behind the branch.
    """
    new_max = gl.maximum(running_max, row_max(scores) * scale_log2)  # [64]
    due = 1
    if THRESHOLD > 0:
        due = gl.max((new_max > running_max + THRESHOLD).to(gl.int32), axis=0)
        new_max = gl.where(due > 0, new_max, running_max)
    reference_max = new_max
    if MASKED:
        # A row that has seen no key has the maximum -inf, and -inf - -inf is NaN: measure such a row from 0.
        reference_max = gl.where(new_max == float("-inf"), 0.0, new_max)
    shift = reference_max - EXPONENT  # so that the largest weight is 2 ** EXPONENT
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))  # [64, BLOCK_N]
    rescale = gl.exp2(running_max - reference_max)  # [64], 1 where the maximum did not grow
    ROWS: gl.constexpr = gl.SliceLayout(1, running_sum.type.layout)
    running_sum = running_sum * gl.expand_dims(gl.convert_layout(rescale, ROWS, assert_trivial=True), 1)
    running_sum += sum_by_thread(weights)  # [64, 4]
    return weights, rescale, due, new_max, running_sum


@gluon.jit
def finish_rows(running_max, running_sum, EXPONENT: gl.constexpr, sink=None):
    """The factor of a finished row's output and its log-sum-exp (natural), both [64].

    A row that saw no key has the sum 0 and the maximum -inf: factor 1, for its output is 0 already, and -inf. sink: the
    score that joins the sum, as in `common.softmax`; it has no value, so it has its say in the factor alone.
    """
    rescale = 1.0
    if sink is not None:
        sink_log2 = sink * LOG2_E
        new_max = gl.maximum(running_max, sink_log2)  # [64]
        reference_max = gl.where(new_max == float("-inf"), 0.0, new_max)  # a sink of -inf is none
        rescale = gl.exp2(running_max - reference_max)  # [64]
        running_sum = running_sum * rescale + gl.exp2(sink_log2 - reference_max + EXPONENT)
        running_max = new_max
    total = gl.where(running_sum == 0.0, 1.0, running_sum)  # [64]
    return rescale / total, (running_max + gl.log2(total) - EXPONENT) * LN_2
