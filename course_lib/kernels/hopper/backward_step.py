"""A consumer's work on one block of queries: five products, and what lies between them.

    step i of a consumer        issued to the matrix units         meanwhile
    ----------------------      ------------------------------     -------------------------------------------
    dPᵀ = V dOᵀ                 on arrival of dO                   P = exp2(S - LSE) of this step's S
    dV += Pᵀ dO                 P from registers                   dS = P ∘ (dP - Δ), to shared memory
    dQ of step i - 1 = dS K     both consumers' dS
    dK += dSᵀ Q                 dS from registers
    Sᵀ = K Qᵀ of step i + 1     when dV and dQ are done            dQ to shared memory, for the messenger

dQ is a step late: it needs the dS of the other consumer, and this way neither waits for the other to keep pace. The
scores of the next step are asked for early, so that the matrix units have work while the step ends.

What threads write to shared memory is fenced before the matrix units or the copy engine read it, and a fence takes 150
to 270 cycles of this step. At head dimension 128 there is one: the next step announces a part of dQ, together with its
own dS. At 64, where a step has twice the exponentials, that gained nothing.

Registers of a thread at head dimension 128: dK and dV 64 each, S, dP and dQ 32 each, of which two at a time, 16 each
for P and dS in 16 bits. At 64, with twice the queries: dK and dV 32, S and dP 64, dQ 32.
"""

from course_lib.kernels.gluon.names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    store_tile,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from course_lib.kernels.gluon.parts import arrive_named, unknown, wait_named
from course_lib.kernels.hopper.backward_parts import (
    CONSUMER_THREADS,
    GROUPS,
    QUEUE_THREADS,
    as_tile,
    gradient_free,
    hide_pairs,
    query_free,
    score_gradient_free,
    write_by_thread,
)

GROUP_KEYS = gl.constexpr(64)  # keys of a consumer: rows of a warp group's matrix product, the hardware's number


@gluon.jit
def ask_for_scores(query_tiles, key_tiles, query_ready, steps_done, GROUP: gl.constexpr, wanted=True):
    """Sets the matrix units to Sᵀ = K Qᵀ of this consumer's keys and a step's queries, [64, BLOCK_M]; doesn't wait.

    After the last step there is no next one: with `wanted` False the product is of whatever lies in the buffer, and
    nobody looks at it. A branch around it would keep the compiler from overlapping any of the products.
    """
    STAGES: gl.constexpr = query_tiles.shape[0]
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    stage = steps_done % STAGES
    mbarrier.wait(query_ready.index(stage), steps_done // STAGES & 1, pred=wanted)
    query = as_tile(query_tiles.index(stage))  # [BLOCK_M, HEAD_DIM]
    empty = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, SCORES)
    # An index that the compiler knows would have it prepare the operand's addresses before the loop, and spill them.
    own_keys = as_tile(key_tiles.index(unknown(GROUP)))  # [64, HEAD_DIM]
    return warpgroup_mma(own_keys, query.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def ask_for_query_part(exchange, key_tiles, steps_done, GROUP: gl.constexpr):
    """Sets the matrix units to this consumer's part, [64, 64], of a step's dQ = dS K, with all 128 keys; doesn't wait.

    At head dimension 128 the consumers share its columns, at 64 its rows.
    """
    score_gradient_tiles, score_gradients_ready, _parts, _part_ready, _part_free = exchange
    BUFFERS: gl.constexpr = score_gradient_tiles.shape[0] // GROUPS
    BLOCK_M: gl.constexpr = score_gradient_tiles.shape[2]
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    buffer = steps_done % BUFFERS
    mbarrier.wait(score_gradients_ready.index(buffer), steps_done // BUFFERS & 1)
    part = gl.zeros([64, 64], gl.float32, PART)
    for group in gl.static_range(GROUPS):  # of the keys
        score_gradients = score_gradient_tiles.index(buffer * GROUPS + group)  # dSᵀ [64, BLOCK_M]
        key_tile = as_tile(key_tiles.index(unknown(group)))  # [64, HEAD_DIM]
        if BLOCK_M == 64:
            key_tile = key_tile.slice(GROUP * 64, 64, dim=1)  # [64, 64]
        else:
            score_gradients = score_gradients.slice(GROUP * 64, 64, dim=1)  # [64, 64]
        part = warpgroup_mma(score_gradients.permute((1, 0)), key_tile, part, use_acc=group > 0, is_async=True)
    return part


@gluon.jit
def write_query_part(part, exchange, steps_done, GROUP: gl.constexpr):
    """Writes a finished part of dQ, [64, 64], to shared memory, where the messenger looks for it once it is told."""
    _score_gradient_tiles, _score_gradients_ready, parts, _part_ready, part_free = exchange
    mbarrier.wait(part_free.index(GROUP), steps_done & 1 ^ 1)
    write_by_thread(parts.index(GROUP), part)


@gluon.jit
def announce_query_part(exchange, GROUP: gl.constexpr, written=True):
    """Tells the messenger of a part that has been written and fenced, if one has."""
    _score_gradient_tiles, _score_gradients_ready, _parts, part_ready, _part_free = exchange
    mbarrier.arrive(part_ready.index(GROUP), count=1, pred=written)


@gluon.jit
def step(
    scores,
    key_gradient,
    value_gradient,
    tiles,
    barriers,
    exchange,
    steps_done,
    last_step,
    first_key,
    first_query,
    query_length,
    key_length,
    scale_log2,
    part_written,
    GROUP: gl.constexpr,
    FIRST: gl.constexpr,
    MASKED: gl.constexpr,
    CAUSAL: gl.constexpr,
    LATE_PARTS: gl.constexpr,
):
    """One block of queries: adds to dK and dV, [64, HEAD_DIM], and writes the dQ of the block before.

    scores: Sᵀ of this block, [64, BLOCK_M]. part_written: with LATE_PARTS, whether the step before has written a part.
    Returns the scores of the next block, dK and dV.
    """
    query_tiles, gradient_tiles, key_tiles, value_tiles, log_sum_exp_rows, delta_rows = tiles
    _keys_ready, _keys_free, query_ready, gradient_ready = barriers
    score_gradient_tiles, score_gradients_ready, _parts, _part_ready, _part_free = exchange
    dtype: gl.constexpr = query_tiles.dtype
    STAGES: gl.constexpr = query_tiles.shape[0]
    BUFFERS: gl.constexpr = score_gradient_tiles.shape[0] // GROUPS
    BLOCK_M: gl.constexpr = query_tiles.shape[3]
    SCORES: gl.constexpr = scores.type.layout
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, key_gradient.type.layout, 2)
    stage = steps_done % STAGES

    mbarrier.wait(gradient_ready.index(stage), steps_done // STAGES & 1)
    gradient = as_tile(gradient_tiles.index(stage))  # dO [BLOCK_M, HEAD_DIM]
    own_values = as_tile(value_tiles.index(unknown(GROUP)))  # [64, HEAD_DIM]
    empty = gl.zeros([GROUP_KEYS, BLOCK_M], gl.float32, SCORES)
    weight_gradients = warpgroup_mma(own_values, gradient.permute((1, 0)), empty, use_acc=False, is_async=True)
    log_sum_exp = log_sum_exp_rows.index(stage).load(SCORES)  # [1, BLOCK_M], to base 2
    weights = gl.exp2(scores * scale_log2 - log_sum_exp)  # Pᵀ [64, BLOCK_M]
    if MASKED:
        weights = hide_pairs(weights, first_key, first_query, query_length, key_length, CAUSAL)
    operand = gl.convert_layout(weights.to(dtype), OPERAND, assert_trivial=True)  # [64, BLOCK_M]
    value_gradient = warpgroup_mma(operand, gradient, value_gradient, is_async=True)  # [64, HEAD_DIM]

    # ptxas doesn't move the wait for dP, which comes next, to before the exponentials: it comes after this one.
    buffer = steps_done % BUFFERS
    if steps_done >= BUFFERS:
        wait_named(score_gradient_free(buffer, GROUP, STAGES), CONSUMER_THREADS)
    weight_gradients = warpgroup_mma_wait(1, deps=[weight_gradients])  # dPᵀ [64, BLOCK_M]; dV may still run
    delta = delta_rows.index(stage).load(SCORES)  # [1, BLOCK_M]; loaded earlier, these would take registers
    score_gradients = (weights * (weight_gradients - delta)).to(dtype)  # dSᵀ [64, BLOCK_M]
    score_gradient_tiles.index(buffer * GROUPS + GROUP).store(score_gradients)
    fence_async_shared()  # the matrix units see what these threads wrote, and the copy engine
    mbarrier.arrive(score_gradients_ready.index(buffer), count=1)
    if LATE_PARTS and not FIRST:
        announce_query_part(exchange, GROUP, part_written)

    if not FIRST:
        part = ask_for_query_part(exchange, key_tiles, steps_done - 1, GROUP)  # of dQ, [64, 64]
    operand = gl.convert_layout(score_gradients, OPERAND, assert_trivial=True)  # [64, BLOCK_M]
    query = as_tile(query_tiles.index(stage))  # [BLOCK_M, HEAD_DIM]
    key_gradient = warpgroup_mma(operand, query, key_gradient, is_async=True)  # [64, HEAD_DIM]
    # All but dK is waited for first: with one product more under way the registers don't suffice, and ptxas would run
    # the products one after the other.
    if FIRST:
        value_gradient = warpgroup_mma_wait(1, deps=[value_gradient])
        scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done + 1, GROUP, steps_done < last_step)
        arrive_named(gradient_free(stage, STAGES), QUEUE_THREADS)
    else:
        value_gradient, part = warpgroup_mma_wait(1, deps=[value_gradient, part])
        scores = ask_for_scores(query_tiles, key_tiles, query_ready, steps_done + 1, GROUP, steps_done < last_step)
        arrive_named(gradient_free(stage, STAGES), QUEUE_THREADS)
        arrive_named(score_gradient_free((steps_done - 1) % BUFFERS, 1 - GROUP, STAGES), CONSUMER_THREADS)
        write_query_part(part, exchange, steps_done - 1, GROUP)
        if not LATE_PARTS:
            fence_async_shared()
            announce_query_part(exchange, GROUP)
    key_gradient = warpgroup_mma_wait(1, deps=[key_gradient])
    arrive_named(query_free(stage), QUEUE_THREADS)
    scores = warpgroup_mma_wait(0, deps=[scores])  # a product under way across the end of a loop would stop the others
    return scores, key_gradient, value_gradient


@gluon.jit
def last_query_part(
    exchange, key_tiles, steps_done, part_written, STAGES: gl.constexpr, GROUP: gl.constexpr, LATE_PARTS: gl.constexpr
):  # fmt: skip
    """After the last step: its dQ, for which there was no next step."""
    score_gradient_tiles = exchange[0]
    BUFFERS: gl.constexpr = score_gradient_tiles.shape[0] // GROUPS
    part = ask_for_query_part(exchange, key_tiles, steps_done - 1, GROUP)  # [64, 64]
    part = warpgroup_mma_wait(0, deps=[part])
    arrive_named(score_gradient_free((steps_done - 1) % BUFFERS, 1 - GROUP, STAGES), CONSUMER_THREADS)
    if LATE_PARTS:
        fence_async_shared()
        announce_query_part(exchange, GROUP, part_written)
    write_query_part(part, exchange, steps_done - 1, GROUP)
    fence_async_shared()
    announce_query_part(exchange, GROUP)


@gluon.jit
def write_gradient(outputs, gradient, score_gradient_tiles, batch_index, key_head, first_key, GROUP: gl.constexpr):
    """Hands a finished dK or dV, [64, HEAD_DIM], to the copy engine, 64 columns at a time, by tiles of dS."""
    HEAD_DIM: gl.constexpr = gradient.shape[1]
    PANEL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rounded = gradient.to(outputs.dtype)  # [64, HEAD_DIM]
    panels = (rounded,)
    if HEAD_DIM == 128:
        left, right = gl.split(rounded.reshape([GROUP_KEYS, 2, 64]).permute((0, 2, 1)))  # [64, 64] each
        left = gl.convert_layout(left, PANEL, assert_trivial=True)
        right = gl.convert_layout(right, PANEL, assert_trivial=True)
        panels = left, right  # type: ignore[assignment]  # one panel or two, known when it is compiled
    for panel in gl.static_range(HEAD_DIM // 64):
        tile = score_gradient_tiles.index(panel * GROUPS + GROUP)  # [64, BLOCK_M]
        if tile.shape[1] > 64:
            tile = tile.slice(0, 64, dim=1)
        tile.store(panels[panel])
    fence_async_shared()  # the copy engine sees what these threads wrote
    for panel in gl.static_range(HEAD_DIM // 64):
        tile = score_gradient_tiles.index(panel * GROUPS + GROUP)
        tile = tile.reshape([1, 1, tile.shape[0], tile.shape[1]])
        if tile.shape[3] > 64:
            tile = tile.slice(0, 64, dim=3)
        store_tile(outputs, [batch_index, key_head, first_key, panel * 64], tile)
