"""The five stages of a decoder layer for one new token, as functions that kernels call.

    stage        computes                                                 reads, elements           tiles are
    project      RMSNorm, Q K V, rotary positions, append to the cache     (Hq + 2 Hk) D · width     rows of Q, K, V
    attend       softmax(q Kᵀ) V, in parts; the last part merges           2 Hk · tokens · D         heads × parts
    output       x + W_o attended                                         Hq D · width              rows of x
    feed         RMSNorm, silu(gate) · up                                 2 hidden · width          rows of both
    down         x + W_d hidden                                           hidden · width            rows of x

At batch 1 each weight is used once, so a stage takes as long as its weights take to be read, and the work is to keep
memory busy from the first stage to the last. A stage depends on the one before by a few kilobytes; its weights do not
depend on anything. So each stage begins by loading its first tile of weights, then waits for the stage before, and
computes. How it waits is given by WAIT:

    NOTHING      not at all: the stages are kernels, launched one after another, or the interpreter's
    DEPENDENT    for the kernel before (programmatic dependent launch, from sm_90 on): this one was started early
    BARRIER      for all programs of this kernel: they count up a number in memory, and read it until it is complete

A tile is ROWS rows of a weight matrix, and a program multiplies it with the whole vector. With STAYS a program computes
one tile after another, and loads the weights of the next before it computes with those that it has. Arithmetic is in
float32; what is stored between stages has the model's dtype. FLOPs: 2 for each weight, 1 for each byte in 16 bits.

Source: Spector et al., Look Ma, No Bubbles! Designing a low-latency megakernel for Llama-1B, Hazy Research, 2025, for
the one kernel; NVIDIA, CUDA C++ Programming Guide, Programmatic Dependent Launch and Synchronization.
"""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.common.softmax import weigh

NOTHING, DEPENDENT, BARRIER = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def wait_for_before(arrived_pointer, target, WAIT: tl.constexpr):
    """Until what the stage before has stored can be read. target: how many programs have arrived by then in all."""
    if WAIT == DEPENDENT:
        tl.extra.cuda.gdc_wait()
    elif WAIT == BARRIER:
        tl.debug_barrier()  # all threads of this program have stored
        # The last read acquires: without it a multiprocessor's L1 would still hold what it has read before. Its result
        # is used, because an atomic operation whose result nobody uses loses this meaning.
        arrived = tl.atomic_add(arrived_pointer, 1, sem="acq_rel") + 1
        while arrived < target:
            arrived = tl.atomic_add(arrived_pointer, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def rows_of_tile(tile, ROWS: tl.constexpr):
    """[ROWS], one after another."""
    return tile * ROWS + tl.arange(0, ROWS)


@triton.jit
def pairs_of_tile(first, APART: tl.constexpr, ROWS: tl.constexpr):
    """[ROWS]: half of them from `first` on, and those that lie APART rows behind."""
    number = tl.arange(0, ROWS)
    return first + number % (ROWS // 2) + number // (ROWS // 2) * APART


@triton.jit
def first_weights(matrix_pointer, row, tile, TILES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK]: the first columns of these rows, those of a tile; nothing is read where there is no such tile."""
    column = tl.arange(0, BLOCK)
    there = tl.zeros_like(row) + tile < TILES
    tile_pointer = matrix_pointer + row[:, None] * COLUMNS + column[None, :]
    return tl.load(tile_pointer, mask=there[:, None], eviction_policy="evict_first")


@triton.jit
def multiply(
    weights, matrix_pointer, row, vector_pointer, gain_pointer, epsilon, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """[ROWS], float32: the rows' products with the vector, normalised by its RMS where there is a gain (its weight).

    weights: [ROWS, BLOCK], the rows' first columns. The others are loaded here.
    """
    column = tl.arange(0, BLOCK)
    vector = tl.load(vector_pointer + column).to(tl.float32)  # [BLOCK]
    squares = vector * vector
    if gain_pointer is not None:
        vector *= tl.load(gain_pointer + column).to(tl.float32)
    sums = weights.to(tl.float32) * vector[None, :]  # [ROWS, BLOCK]
    for start in tl.range(BLOCK, COLUMNS, BLOCK):
        weights = tl.load(matrix_pointer + row[:, None] * COLUMNS + (start + column)[None, :],
                          eviction_policy="evict_first")  # fmt: skip
        vector = tl.load(vector_pointer + start + column).to(tl.float32)
        squares += vector * vector
        if gain_pointer is not None:
            vector *= tl.load(gain_pointer + start + column).to(tl.float32)
        sums += weights.to(tl.float32) * vector[None, :]
    result = tl.sum(sums, axis=1)
    if gain_pointer is not None:
        result *= tl.rsqrt(tl.sum(squares, axis=0) / COLUMNS + epsilon)
    return result


@triton.jit
def in_pairs(values, ROWS: tl.constexpr):
    """The two halves of [ROWS], each [ROWS / 2]."""
    return tl.split(tl.permute(tl.reshape(values, [2, ROWS // 2]), [1, 0]))


@triton.jit
def project_stage(
    stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer, values_pointer, cosine_pointer,
    sine_pointer, position_pointer, arrived_pointer, target, epsilon, capacity, program, programs,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    """Q, K and V of the token; Q and K turned; K and V stored behind the cache's tokens.

    A tile holds elements i and i + HEAD_DIM / 2 of a head, which are turned together.
    """
    TILES: tl.constexpr = (QUERY_HEADS + 2 * KEY_HEADS) * HEAD_DIM // ROWS
    row = rows_to_project(program, HEAD_DIM, ROWS)
    weights = first_weights(matrix_pointer, row, program, TILES, WIDTH, BLOCK)
    wait_for_before(arrived_pointer, target, WAIT)
    position = tl.load(position_pointer)
    if STAYS:
        for tile in tl.range(program, TILES, programs):
            next_row = rows_to_project(tile + programs, HEAD_DIM, ROWS)
            next_weights = first_weights(matrix_pointer, next_row, tile + programs, TILES, WIDTH, BLOCK)
            project_tile(
                weights, tile, stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer,
                values_pointer, cosine_pointer, sine_pointer, position, epsilon, capacity, QUERY_HEADS, KEY_HEADS,
                HEAD_DIM, WIDTH, ROWS, BLOCK,
            )  # fmt: skip
            weights = next_weights
    else:
        project_tile(
            weights, program, stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer,
            values_pointer, cosine_pointer, sine_pointer, position, epsilon, capacity, QUERY_HEADS, KEY_HEADS,
            HEAD_DIM, WIDTH, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit
def rows_to_project(tile, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr):
    TILES_OF_HEAD: tl.constexpr = HEAD_DIM // ROWS
    first = tile // TILES_OF_HEAD * HEAD_DIM + tile % TILES_OF_HEAD * (ROWS // 2)
    return pairs_of_tile(first, HEAD_DIM // 2, ROWS)


@triton.jit
def project_tile(
    weights, tile, stream_pointer, gain_pointer, matrix_pointer, query_pointer, keys_pointer, values_pointer,
    cosine_pointer, sine_pointer, position, epsilon, capacity,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    TILES_OF_HEAD: tl.constexpr = HEAD_DIM // ROWS
    head = tile // TILES_OF_HEAD
    element = tile % TILES_OF_HEAD * (ROWS // 2) + tl.arange(0, ROWS // 2)  # [ROWS / 2], of the head's first half
    turned = head < QUERY_HEADS + KEY_HEADS
    there = tl.zeros_like(element) + head < QUERY_HEADS + KEY_HEADS
    cosine = tl.load(cosine_pointer + position * HALF + element, mask=there, other=1.0)
    sine = tl.load(sine_pointer + position * HALF + element, mask=there, other=0.0)
    row = rows_to_project(tile, HEAD_DIM, ROWS)
    found = multiply(weights, matrix_pointer, row, stream_pointer, gain_pointer, epsilon, WIDTH, BLOCK)
    first, second = in_pairs(found, ROWS)  # [ROWS / 2] each
    first, second = first * cosine - second * sine, second * cosine + first * sine
    target_pointer = query_pointer + head * HEAD_DIM
    if not turned:
        place = (head - QUERY_HEADS - KEY_HEADS) * capacity + position
        target_pointer = values_pointer + place.to(tl.int64) * HEAD_DIM
    elif head >= QUERY_HEADS:
        target_pointer = keys_pointer + ((head - QUERY_HEADS) * capacity + position).to(tl.int64) * HEAD_DIM
    tl.store(target_pointer + element, first.to(query_pointer.dtype.element_ty))
    tl.store(target_pointer + HALF + element, second.to(query_pointer.dtype.element_ty))


@triton.jit
def attend_stage(
    query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer, merged_pointer, attended_pointer,
    position_pointer, arrived_pointer, target, scale, capacity, program, programs,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    WAIT: tl.constexpr, STAYS: tl.constexpr,
):  # fmt: skip
    """Attention of the group of query heads of a KV head over a part of its tokens; the last part to end merges all.

    The tokens before the new one were stored by earlier steps: the first tile of them is loaded before the wait. The
    position changes between steps alone.
    """
    position = tl.load(position_pointer)
    tile = program
    keys, values = old_tokens(
        keys_pointer, values_pointer, tile, position, capacity, KEY_HEADS, HEAD_DIM, PARTS, TOKENS
    )
    wait_for_before(arrived_pointer, target, WAIT)
    if STAYS:
        for tile in tl.range(program, KEY_HEADS * PARTS, programs):
            if tile != program:
                keys, values = old_tokens(
                    keys_pointer, values_pointer, tile, position, capacity, KEY_HEADS, HEAD_DIM, PARTS, TOKENS
                )
            attend_tile(
                keys, values, tile, query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer,
                merged_pointer, attended_pointer, position, scale, capacity, GROUP, HEAD_DIM, PARTS, TOKENS,
            )  # fmt: skip
    else:
        attend_tile(
            keys, values, program, query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer,
            merged_pointer, attended_pointer, position, scale, capacity, GROUP, HEAD_DIM, PARTS, TOKENS,
        )  # fmt: skip


@triton.jit
def part_of_tokens(tile, tokens, PARTS: tl.constexpr, TOKENS: tl.constexpr):
    """(begin, end) of a tile's part of the tokens: whole tiles of TOKENS, but for the last."""
    length = tl.cdiv(tl.cdiv(tokens, PARTS), TOKENS) * TOKENS
    begin = tile % PARTS * length
    return begin, tl.minimum(begin + length, tokens)


@triton.jit
def tokens_of_head(head, token, capacity, HEAD_DIM: tl.constexpr):
    """[TOKENS, HEAD_DIM]: where these tokens of a KV head lie."""
    row = (head * capacity + token).to(tl.int64)
    return row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]


@triton.jit
def old_tokens(
    keys_pointer, values_pointer, tile, position, capacity,
    KEY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """The first TOKENS keys and values of a part, those before `position`; 0 for others."""
    begin, end = part_of_tokens(tile, position + 1, PARTS, TOKENS)
    token = begin + tl.arange(0, TOKENS)
    there = (token < tl.minimum(end, position)) & (tl.zeros_like(token) + tile < KEY_HEADS * PARTS)
    place = tokens_of_head(tile // PARTS, token, capacity, HEAD_DIM)
    return (tl.load(keys_pointer + place, mask=there[:, None], other=0.0),
            tl.load(values_pointer + place, mask=there[:, None], other=0.0))  # fmt: skip


@triton.jit
def attend_tile(
    keys, values, tile, query_pointer, keys_pointer, values_pointer, partial_pointer, log_sum_pointer, merged_pointer,
    attended_pointer, position, scale, capacity,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    GROUP_ROWS: tl.constexpr = 16  # the fewest that a matrix instruction takes
    member = tl.arange(0, GROUP_ROWS)  # [GROUP_ROWS], a query head of the group
    element = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    of_group = member[:, None] < GROUP
    head = tile // PARTS
    begin, end = part_of_tokens(tile, position + 1, PARTS, TOKENS)
    rows = (head * GROUP + member)[:, None] * HEAD_DIM + element[None, :]  # [GROUP_ROWS, HEAD_DIM]
    query = tl.load(query_pointer + rows, mask=of_group, other=0.0)
    maximum = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    sums = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < end
        place = tokens_of_head(head, token, capacity, HEAD_DIM)
        fresh = inside
        if start == begin:
            fresh = token == position  # what is missing of the first tile
        new_keys = tl.load(keys_pointer + place, mask=(inside & fresh)[:, None], other=0.0)
        new_values = tl.load(values_pointer + place, mask=(inside & fresh)[:, None], other=0.0)
        if start == begin:
            new_keys, new_values = new_keys + keys, new_values + values  # 0 in one of them
        scores = tl.dot(query, tl.trans(new_keys), input_precision="ieee") * (scale * LOG2_E)  # [GROUP_ROWS, TOKENS]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        maximum, weights, rescale = weigh(scores, maximum, 1.0, MASKED=False)
        total = total * rescale + tl.sum(weights, axis=1)
        sums = sums * rescale[:, None] + tl.dot(weights.to(values.dtype), new_values, input_precision="ieee")
    rows_of_parts = tile * GROUP + member  # [GROUP_ROWS]
    filled = total > 0.0  # a part without tokens has the sums 0 and the log-sum -inf
    partial_tile = partial_pointer + rows_of_parts[:, None] * HEAD_DIM + element[None, :]
    tl.store(partial_tile, sums / tl.where(filled, total, 1.0)[:, None], mask=of_group)
    log_sum = tl.where(filled, maximum + tl.log2(tl.where(filled, total, 1.0)), float("-inf"))
    tl.store(log_sum_pointer + rows_of_parts, log_sum, mask=member < GROUP)
    tl.debug_barrier()  # all threads have stored
    if tl.atomic_add(merged_pointer + head, 1, sem="acq_rel") == PARTS - 1:
        tl.debug_barrier()
        first_row = head * PARTS * GROUP + member  # [GROUP_ROWS], of the first part
        part = tl.arange(0, PARTS)[:, None] * GROUP  # [PARTS, 1]
        log_sums = tl.load(log_sum_pointer + part + first_row[None, :], mask=member[None, :] < GROUP, other=0.0)
        largest = tl.max(log_sums, axis=0)  # [GROUP_ROWS], finite: the new token is in some part
        total = tl.sum(tl.exp2(log_sums - largest[None, :]), axis=0)
        sums = tl.zeros([GROUP_ROWS, HEAD_DIM], tl.float32)
        for other in tl.static_range(PARTS):
            log_sum = tl.load(log_sum_pointer + first_row + other * GROUP, mask=member < GROUP, other=0.0)
            partial_tile = partial_pointer + (first_row + other * GROUP)[:, None] * HEAD_DIM + element[None, :]
            sums += tl.load(partial_tile, mask=of_group, other=0.0) * tl.exp2(log_sum - largest)[:, None]
        attended = sums / total[:, None]
        tl.store(attended_pointer + rows, attended.to(attended_pointer.dtype.element_ty), mask=of_group)
        tl.store(merged_pointer + head, 0)  # for the next layer


@triton.jit
def add_product_stage(
    stream_pointer, matrix_pointer, vector_pointer, arrived_pointer, target, program, programs,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
    STAYS: tl.constexpr,
):  # fmt: skip
    """stream += matrix · vector: the output projection, and the one behind SwiGLU."""
    TILES: tl.constexpr = WIDTH // ROWS
    weights = first_weights(matrix_pointer, rows_of_tile(program, ROWS), program, TILES, COLUMNS, BLOCK)
    wait_for_before(arrived_pointer, target, WAIT)
    if STAYS:
        for tile in tl.range(program, TILES, programs):
            next_row = rows_of_tile(tile + programs, ROWS)
            next_weights = first_weights(matrix_pointer, next_row, tile + programs, TILES, COLUMNS, BLOCK)
            add_product_tile(weights, tile, stream_pointer, matrix_pointer, vector_pointer, COLUMNS, ROWS, BLOCK)
            weights = next_weights
    else:
        add_product_tile(weights, program, stream_pointer, matrix_pointer, vector_pointer, COLUMNS, ROWS, BLOCK)


@triton.jit
def add_product_tile(
    weights, tile, stream_pointer, matrix_pointer, vector_pointer,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = rows_of_tile(tile, ROWS)
    before = tl.load(stream_pointer + row).to(tl.float32)
    found = multiply(weights, matrix_pointer, row, vector_pointer, None, 0.0, COLUMNS, BLOCK)
    tl.store(stream_pointer + row, (before + found).to(stream_pointer.dtype.element_ty))


@triton.jit
def feed_stage(
    stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, arrived_pointer, target, epsilon, program, programs,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
    STAYS: tl.constexpr,
):  # fmt: skip
    """hidden = silu(gate) · up of the normalised stream. A tile holds rows of the gate and the same rows of up."""
    TILES: tl.constexpr = HIDDEN * 2 // ROWS
    row = pairs_of_tile(program * (ROWS // 2), HIDDEN, ROWS)
    weights = first_weights(matrix_pointer, row, program, TILES, WIDTH, BLOCK)
    wait_for_before(arrived_pointer, target, WAIT)
    if STAYS:
        for tile in tl.range(program, TILES, programs):
            next_row = pairs_of_tile((tile + programs) * (ROWS // 2), HIDDEN, ROWS)
            next_weights = first_weights(matrix_pointer, next_row, tile + programs, TILES, WIDTH, BLOCK)
            feed_tile(weights, tile, stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, epsilon, HIDDEN,
                      WIDTH, ROWS, BLOCK)  # fmt: skip
            weights = next_weights
    else:
        feed_tile(weights, program, stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, epsilon, HIDDEN,
                  WIDTH, ROWS, BLOCK)  # fmt: skip


@triton.jit
def feed_tile(
    weights, tile, stream_pointer, gain_pointer, matrix_pointer, hidden_pointer, epsilon,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = pairs_of_tile(tile * (ROWS // 2), HIDDEN, ROWS)
    found = multiply(weights, matrix_pointer, row, stream_pointer, gain_pointer, epsilon, WIDTH, BLOCK)
    gate, up = in_pairs(found, ROWS)
    product = gate / (1.0 + tl.exp(-gate)) * up
    element = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    tl.store(hidden_pointer + element, product.to(hidden_pointer.dtype.element_ty))


@triton.jit
def logits_stage(
    stream_pointer, gain_pointer, matrix_pointer, logits_pointer, largest_pointer, epsilon, program,
    VOCABULARY: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Logits of the normalised stream, float32, and the largest of each tile."""
    row = rows_of_tile(program, ROWS)
    weights = first_weights(matrix_pointer, row, program, VOCABULARY // ROWS, WIDTH, BLOCK)
    wait_for_before(None, 0, WAIT)
    found = multiply(weights, matrix_pointer, row, stream_pointer, gain_pointer, epsilon, WIDTH, BLOCK)
    tl.store(logits_pointer + row, found)
    tl.store(largest_pointer + program, tl.max(found, axis=0))
