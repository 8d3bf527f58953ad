"""The parts of the backward pass on Hopper: which keys a program works on, which queries see them, whose turn it is.

Scores are computed transposed, keys in rows and queries in columns. `wgmma` leaves P and dS in the registers in which
it expects the left operands of Pᵀ dO and dSᵀ Q, so for these products neither passes through shared memory. What
belongs to a query, its log-sum-exp and its Δ, belongs to a column.
"""

from course_lib.kernels.gluon.names import gl, gluon, mbarrier
from course_lib.kernels.gluon.parts import FIRST_NAMED_BARRIER
from course_lib.kernels.hopper.parts import GROUP_THREADS, WARP_THREADS, read_ticket

GROUPS = gl.constexpr(2)  # consumers
CONSUMER_THREADS = gl.constexpr(GROUPS * GROUP_THREADS)
QUEUE_THREADS = gl.constexpr(CONSUMER_THREADS + WARP_THREADS)  # consumers, and the producer


@gluon.jit
def query_free(stage):
    """The name of the barrier at which consumers free a buffer of queries, and the producer waits for both."""
    return FIRST_NAMED_BARRIER + stage


@gluon.jit
def gradient_free(stage, STAGES: gl.constexpr):
    """The same for a buffer of output gradients."""
    return FIRST_NAMED_BARRIER + STAGES + stage


@gluon.jit
def score_gradient_free(buffer, group, STAGES: gl.constexpr):
    """The name of the barrier at which a consumer waits until the other has read its dS in a buffer."""
    return FIRST_NAMED_BARRIER + 2 * STAGES + GROUPS * buffer + group


@gluon.jit
def keys_of(ticket, all_key_heads, key_length, heads_at_once, TILE_KEYS: gl.constexpr):
    """(batch and KV head as one number, number of the tile of keys) of the tile with this ticket.

    A few heads at once, and of these the first keys first: under a causal mask the most queries see them, so that long
    tiles come early, and short ones fill the gaps at the end. The order is also that in which the tiles of a head add
    to dQ: a tile waits for tiles of lower tickets alone, which somebody works on already.
    """
    key_tiles = gl.cdiv(key_length, TILE_KEYS)
    group = ticket // (heads_at_once * key_tiles)
    place = ticket % (heads_at_once * key_tiles)
    first_head = group * heads_at_once
    heads_here = gl.minimum(heads_at_once, all_key_heads - first_head)
    return first_head + place % heads_here, place // heads_here


@gluon.jit
def query_blocks(
    key_tile, query_length, key_length, CAUSAL: gl.constexpr, TILE_KEYS: gl.constexpr, BLOCK_M: gl.constexpr
):
    """The blocks of queries that a tile of keys works with: begin, whole_begin, end.

    They are taken from the last to the first: those in [whole_begin, end) see all of the keys, those in
    [begin, whole_begin) need a mask. The first tile of a head takes all blocks: it also writes the dQ of queries that
    see no key.
    """
    end = gl.cdiv(query_length, BLOCK_M)
    begin = 0
    whole_begin = 0
    if CAUSAL:
        first_query = key_tile * TILE_KEYS + query_length - key_length  # that sees the first of these keys
        if key_tile > 0:
            begin = gl.maximum(first_query, 0) // BLOCK_M
        whole_begin = gl.minimum(gl.cdiv(gl.maximum(first_query + TILE_KEYS - 1, 0), BLOCK_M), end)
    if (key_tile + 1) * TILE_KEYS > key_length:  # the last of these keys do not exist
        whole_begin = end
    return begin, whole_begin, end


@gluon.jit
def hide_pairs(weights, first_key, first_query, query_length, key_length, CAUSAL: gl.constexpr):
    """Pᵀ [64, BLOCK_M] with 0 where a query does not see a key, and in the rows of keys that do not exist.

    Of each 8 columns thread t, of the four of a row, has 2t and 2t + 1. One subtraction for a row counts the query from
    which on its key is seen from the thread's first; its columns are then numbers that the compiler knows.
    """
    KEYS: gl.constexpr = weights.shape[0]
    BLOCK_M: gl.constexpr = weights.shape[1]
    dealt = weights.reshape([KEYS, BLOCK_M // 8, 4, 2])
    BY_THREAD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, dealt.type.layout))  # of [64, 4]
    BY_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, dealt.type.layout))  # of [BLOCK_M / 8, 2]
    eights = gl.arange(0, BLOCK_M // 8, layout=gl.SliceLayout(1, BY_COLUMN))
    pairs = gl.arange(0, 2, layout=gl.SliceLayout(0, BY_COLUMN))
    columns = 8 * gl.expand_dims(eights, 1) + gl.expand_dims(pairs, 0)
    columns = gl.expand_dims(gl.expand_dims(columns, 0), 2)  # [1, BLOCK_M / 8, 1, 2]
    threads_first_query = first_query + 2 * gl.arange(0, 4, layout=gl.SliceLayout(0, BY_THREAD))  # [4]

    keys = first_key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, BY_THREAD))  # [64]
    seen_from = gl.full_like(keys, 0)
    if CAUSAL:
        seen_from = keys + query_length - key_length
    seen_from = gl.where(keys < key_length, seen_from, 2**30)
    distance = gl.expand_dims(seen_from, 1) - gl.expand_dims(threads_first_query, 0)  # [64, 4]
    visible = columns >= gl.expand_dims(gl.expand_dims(distance, 1), 3)  # [64, BLOCK_M / 8, 4, 2]
    hidden = gl.where(visible, dealt, 0.0).reshape([KEYS, BLOCK_M])
    return gl.convert_layout(hidden, weights.type.layout, assert_trivial=True)


@gluon.jit
def as_tile(buffer):
    """A buffer [1, 1, rows, columns], as the copy engine fills it, as the tile [rows, columns]."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def write_by_thread(tile, part):
    """A part of dQ, [64, 64], to shared memory [16, 256], in the order in which the threads hold it.

    Row 16 w + 8 h + r and column 16 b + 8 a + 2 t + c belong to thread t of row r of warp w. Piece (h, b) has 16 bytes
    of each of the 128 threads, one beside the other, so that no two threads of a warp meet in a bank of the memory.
    `backward_sums` puts rows and columns back.
    """
    dealt = part.reshape([4, 2, 8, 4, 2, 4, 2])  # w, h, r, b, a, t, c
    tile.store(dealt.permute((1, 3, 0, 2, 5, 4, 6)).reshape([16, 256]))


@gluon.jit
def wait_for_turn(turns, turn):
    """Waits until `turn` tiles of keys have added to a part of dQ. All threads of the warp look."""
    seen = acquire(turns)
    while seen < turn:
        seen = acquire(turns)


@gluon.jit
def acquire(pointer):
    """The number there; what its writer had written before is visible after."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def end_turn(turns, next_turn):
    """Hands a part of dQ to the next tile of keys once the sum is in memory; `wait_for_stores` only waits until the
    copy engine has read the tile.

    One thread of the warp asked the copy engine, and only that one can wait for it. The others wait for that thread.
    """
    gl.inline_asm_elementwise(
        """
        cp.async.bulk.wait_group 0;
        bar.warp.sync 0xffffffff;
        st.release.gpu.global.s32 [$1], $2;
        mov.b32 $0, $2;
        """, "=r,l,r", [turns.to(gl.int64), next_turn], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def next_ticket(tickets, tiles_done):
    """The ticket that the producer drew after this tile, for those who follow it."""
    slots, ticket_ready, ticket_free = tickets
    TICKET_SLOTS: gl.constexpr = slots.shape[0]
    slot = tiles_done % TICKET_SLOTS
    mbarrier.wait(ticket_ready.index(slot), tiles_done // TICKET_SLOTS & 1)
    ticket = read_ticket(slots.index(slot))
    mbarrier.arrive(ticket_free.index(slot), count=1)
    return ticket
