# %% [markdown]
# # 10 · The backward pass, and what to compute again
#
# **The question.** …

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %%
# Exercise 10.1 · One number for each query
def softmax_gradient(probabilities, probability_gradients):
    """dS, the gradient of the scores, where P = softmax(S) by rows.

    Args:
        probabilities: P, [heads, query_length, key_length], float32. A row adds up to 1, or is all zeros.
        probability_gradients: dP, the same shape, float32, any strides.

    Returns:
        dS, [heads, query_length, key_length], float32.
    """
    # BEGIN SOLUTION
    delta = (probabilities * probability_gradients).sum(dim=-1, keepdim=True)  # [heads, query_length, 1]
    return probabilities * (probability_gradients - delta)
    # END SOLUTION


def row_delta(output, output_gradient):
    """Δ = rowsum(P ∘ dP), without P and dP.

    Args:
        output: O = P V, [heads, query_length, head_dim], float32, float16 or bfloat16; any strides.
        output_gradient: dO, same shape and dtype; any strides.

    Returns:
        Δ, [heads, query_length], float32; products and sums are float32, too.
    """
    # BEGIN SOLUTION
    return (output.float() * output_gradient.float()).sum(dim=-1)
    # END SOLUTION


# %%
best_softmax_gradient, best_row_delta = check("10.1", softmax_gradient, row_delta).best

# %%
# Exercise 10.2 · Probabilities from the log-sum-exp
def probabilities_from_lse(scores, log_sum_exp):
    """P for some columns of the score matrix, in base e.

    Args:
        scores: S for these columns, [heads, rows, columns], float32: scaled, of any size, -inf where a key is hidden.
        log_sum_exp: L of the whole rows, over all their columns, [heads, rows], float32. -inf for a query that sees no
            key; all its scores are -inf.

    Returns:
        P, [heads, rows, columns], float32; 0 where a key is hidden. Without sums and maxima of a row.
    """
    # BEGIN SOLUTION
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)  # -inf - -inf would be NaN
    return torch.exp(scores - reference[..., None])
    # END SOLUTION


def probabilities_in_base_2(products, log_sum_exp, scale):
    """The same from products that are not scaled yet, by torch.exp2 and no other exponential.

    Args:
        products: Q Kᵀ for these columns, [heads, rows, columns], float32: not scaled, -inf where a key is hidden.
        log_sum_exp: as above: natural logarithms of sums over scaled scores.
        scale: a number above 0; the scores are scale · products.

    Returns:
        P as above.
    """
    # BEGIN SOLUTION
    log2_e = math.log2(math.e)
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp * log2_e)  # in units of log 2
    return torch.exp2(products * (scale * log2_e) - reference[..., None])
    # END SOLUTION


# %%
best_from_lse, best_in_base_2 = check("10.2", probabilities_from_lse, probabilities_in_base_2).best

# %%
# Exercise 10.3 · dK and dV of one block of keys
def key_block_gradients(
    query, keys, values, output_gradient, log_sum_exp, delta, first_key, key_length, causal, query_rows
):
    """dK and dV of one block of keys of one head, with `query_rows` queries at a time.

    Args:
        query: Q, [query_length, head_dim], float32. Numbers of any size.
        keys, values: the block's rows of K and V, [block, head_dim], float32.
        output_gradient: dO, [query_length, head_dim], float32.
        log_sum_exp, delta: L and Δ of each query, [query_length], float32. L is the natural logarithm over all the
            keys that the query sees, and -inf where it sees none.
        first_key: the position of the block's first key among key_length keys.
        causal: True or False; aligned to the end: query i stands at position i + key_length - query_length and sees
            the keys up to that one.
        query_rows: rows of a tile of queries. The last tile may be smaller; lengths, head_dim, block and query_rows
            are 1 or more, in any combination.

    Returns:
        (dK, dV) of the block, [block, head_dim] each, float32. No tensor that you make may be larger than the largest
        input and one query_rows × block tile.
    """
    # BEGIN SOLUTION
    query_length, head_dim = query.shape
    scale = 1 / math.sqrt(head_dim)
    key_gradient, value_gradient = torch.zeros_like(keys), torch.zeros_like(values)  # [block, head_dim]
    key_positions = first_key + torch.arange(keys.shape[0])  # [block]
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)
    for first_query in range(0, query_length, query_rows):
        tile = slice(first_query, min(first_query + query_rows, query_length))
        positions = torch.arange(tile.start, tile.stop) + key_length - query_length  # [rows]
        scores = scale * (query[tile] @ keys.T)  # [rows, block]
        if causal:
            scores = scores.masked_fill(key_positions[None, :] > positions[:, None], -math.inf)
        probabilities = torch.exp(scores - reference[tile, None])  # [rows, block]
        value_gradient += probabilities.T @ output_gradient[tile]
        probability_gradients = output_gradient[tile] @ values.T  # [rows, block]
        score_gradients = probabilities * (probability_gradients - delta[tile, None])
        key_gradient += scale * (score_gradients.T @ query[tile])
    return key_gradient, value_gradient
    # END SOLUTION


# %%
best_key_block_gradients = check("10.3", key_block_gradients).best

# %%
# Exercise 10.4 · dQ twice: in a loop of its own, and in the order of arrival
def query_tile_gradient(
    query, key, value, output_gradient, log_sum_exp, delta, first_query, query_length, causal, key_rows
):
    """dQ of one tile of queries of one head, with `key_rows` keys at a time.

    Args:
        query, output_gradient: the tile's rows of Q and dO, [rows, head_dim], float32. Numbers of any size.
        key, value: K and V, [key_length, head_dim], float32.
        log_sum_exp, delta: L and Δ of the tile's queries, [rows], float32; as in 10.3.
        first_query: the number of the tile's first query among query_length queries.
        causal: as in 10.3.
        key_rows: rows of a tile of keys. The last tile may be smaller; lengths, head_dim, rows and key_rows are 1 or
            more, in any combination.

    Returns:
        dQ of the tile, [rows, head_dim], float32. No tensor that you make may be larger than the largest input and one
        rows × key_rows tile.
    """
    # BEGIN SOLUTION
    rows, head_dim = query.shape
    key_length = key.shape[0]
    scale = 1 / math.sqrt(head_dim)
    query_gradient = torch.zeros_like(query)
    positions = first_query + torch.arange(rows) + key_length - query_length  # [rows]
    reference = torch.where(log_sum_exp == -math.inf, 0.0, log_sum_exp)
    for first_key in range(0, key_length, key_rows):
        tile = slice(first_key, min(first_key + key_rows, key_length))
        scores = scale * (query @ key[tile].T)  # [rows, keys]
        if causal:
            hidden = torch.arange(tile.start, tile.stop)[None, :] > positions[:, None]
            scores = scores.masked_fill(hidden, -math.inf)
        probabilities = torch.exp(scores - reference[:, None])  # [rows, keys]
        score_gradients = probabilities * (output_gradient @ value[tile].T - delta[:, None])
        query_gradient += scale * (score_gradients @ key[tile])
    return query_gradient
    # END SOLUTION


def sum_of_arrivals(arrivals, blocks):
    """dQ of one tile of queries from the contributions of all key blocks, the same bits in whatever order they arrive.

    Args:
        arrivals: an iterator to be walked once. It gives a pair (block, contribution) for each of the blocks
            0 to blocks - 1, once each and in any order. contribution: [rows, head_dim], float32, of any size; the next
            arrival overwrites it.
        blocks: how many there are, 1 or more.

    Returns:
        The sum of all contributions, [rows, head_dim], float32. For every order of arrival it has the same bits.
    """
    # BEGIN SOLUTION
    waiting, total, turn = {}, None, 0
    for block, contribution in arrivals:
        waiting[block] = contribution.clone()
        while turn in waiting:  # add block 0, then block 1, ..., each when its turn has come
            next_one = waiting.pop(turn)
            total = next_one if total is None else total + next_one
            turn += 1
    return total
    # END SOLUTION


# %%
best_query_tile_gradient, best_sum_of_arrivals = check("10.4", query_tile_gradient, sum_of_arrivals).best

# %%
# Exercise 10.5 · What to keep and what to compute again
def plan(layers, limit):
    """Which layers keep their inner tensors, so that training fits into a limit and computes the least again.

    Args:
        layers: at most 40, in the order of the forward pass, each (input_bytes, inner_bytes, microseconds), whole
            numbers of 0 or more: the layer's input, which is always kept; what its backward pass needs besides; and the
            time to compute that again.
        limit: bytes. While layer i works, forward or backward, memory holds the inputs of layers 0 to i, the inner
            tensors of those layers before i that keep them, and the inner tensors of layer i itself. That may be
            `limit` bytes, but never more.

    Returns:
        A list with True for each layer that keeps its inner tensors, and False for each that computes them again, with
        the least microseconds in all; any such list if there are several. None if no list stays within the limit. For
        40 layers it takes less than a second.
    """
    # BEGIN SOLUTION
    states = {0: (0, ())}  # bytes kept so far -> (microseconds, choices); only those that no other one beats
    inputs = 0
    for input_bytes, inner_bytes, microseconds in layers:
        inputs += input_bytes
        reached = {}
        for kept_bytes, (time, choices) in states.items():
            if inputs + kept_bytes + inner_bytes > limit:
                continue  # this layer cannot work beside so much
            for more_bytes, more_time, keeps in ((inner_bytes, 0, True), (0, microseconds, False)):
                state = (time + more_time, (*choices, keeps))
                if kept_bytes + more_bytes not in reached or state[0] < reached[kept_bytes + more_bytes][0]:
                    reached[kept_bytes + more_bytes] = state
        states, fastest = {}, math.inf
        for kept_bytes in sorted(reached):  # more bytes are worth a state only if they save time
            if reached[kept_bytes][0] < fastest:
                states[kept_bytes], fastest = reached[kept_bytes], reached[kept_bytes][0]
    best = min(states.values(), default=None)
    return None if best is None else list(best[1])
    # END SOLUTION


# %%
best_plan = check("10.5", plan).best

# %%
# Exercise 10.6 · The backward pass in Triton
@triton.jit
def key_gradient_kernel(
    query_pointer, key_pointer, value_pointer, output_gradient_pointer, lse_pointer, delta_pointer,
    key_gradient_pointer, value_gradient_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride, value_head_stride, value_stride,
    output_gradient_head_stride, output_gradient_stride, output_gradient_column_stride,
    query_length, key_length, head_dim, scale,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Program (block, head): dK and dV of BLOCK_N keys of one head, from BLOCK_M queries at a time."""
    head = tl.program_id(1).to(tl.int64)  # 64 bits: a head's offset can pass 2^31 elements
    first_key = tl.program_id(0) * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
    key_offsets = head * key_head_stride + keys[:, None] * key_stride + columns[None, :]
    key_tile = tl.load(key_pointer + key_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
    value_offsets = head * value_head_stride + keys[:, None] * value_stride + columns[None, :]
    value_tile = tl.load(value_pointer + value_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
    key_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_gradient = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    first_query = 0
    # With CAUSAL, the first query that sees a key of this block: queries before it are not even loaded.
    # BEGIN SOLUTION
    if CAUSAL:
        first_query = tl.maximum(0, first_key + query_length - key_length)
    # END SOLUTION
    for first_row in range(first_query, query_length, BLOCK_M):
        rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        exists = rows < query_length  # [BLOCK_M]
        inside = exists[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
        query_offsets = head * query_head_stride + rows[:, None] * query_stride + columns[None, :]
        query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
        # 1. Load dO, [BLOCK_M, BLOCK_D], and L and Δ of these rows, [BLOCK_M]. dO has three strides.
        # BEGIN SOLUTION
        gradient_offsets = rows[:, None] * output_gradient_stride + columns[None, :] * output_gradient_column_stride
        output_gradient = tl.load(
            output_gradient_pointer + head * output_gradient_head_stride + gradient_offsets, mask=inside, other=0.0
        )  # [BLOCK_M, BLOCK_D]
        log_sum_exp = tl.load(lse_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
        delta = tl.load(delta_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
        # END SOLUTION
        visible = exists[:, None] & (keys < key_length)[None, :]  # [BLOCK_M, BLOCK_N]
        if CAUSAL:
            visible = visible & (keys[None, :] <= (rows + key_length - query_length)[:, None])
        # 2. P, [BLOCK_M, BLOCK_N]: 0 where a pair is not visible. L is a natural logarithm, and may be -inf.
        # BEGIN SOLUTION
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        differences = tl.where(visible, scores - log_sum_exp[:, None], float("-inf"))
        probabilities = tl.exp2(differences * 1.4426950408889634)  # [BLOCK_M, BLOCK_N]
        # END SOLUTION
        # 3. Add this tile's part of dV. Then dP and dS, and this tile's part of dK.
        # BEGIN SOLUTION
        weights = tl.trans(probabilities.to(output_gradient.dtype))  # [BLOCK_N, BLOCK_M]
        value_gradient += tl.dot(weights, output_gradient, input_precision="ieee")
        probability_gradients = tl.dot(output_gradient, tl.trans(value_tile), input_precision="ieee")
        score_gradients = probabilities * (probability_gradients - delta[:, None])  # [BLOCK_M, BLOCK_N]
        key_gradient += tl.dot(tl.trans(score_gradients.to(query.dtype)), query, input_precision="ieee")
        # END SOLUTION
    # dK and dV are contiguous. Store them; the scale of dK is still missing.
    # BEGIN SOLUTION
    offsets = head * key_length * head_dim + keys[:, None] * head_dim + columns[None, :]  # [BLOCK_N, BLOCK_D]
    key_gradient = (key_gradient * scale).to(key_gradient_pointer.dtype.element_ty)
    tl.store(key_gradient_pointer + offsets, key_gradient, mask=present)
    tl.store(value_gradient_pointer + offsets, value_gradient.to(value_gradient_pointer.dtype.element_ty), mask=present)
    # END SOLUTION


@triton.jit
def query_gradient_kernel(
    query_pointer, key_pointer, value_pointer, output_gradient_pointer, lse_pointer, delta_pointer,
    query_gradient_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride, value_head_stride, value_stride,
    output_gradient_head_stride, output_gradient_stride, output_gradient_column_stride,
    query_length, key_length, head_dim, scale,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Program (tile, head): dQ of BLOCK_M queries of one head, from BLOCK_N keys at a time."""
    head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    exists = rows < query_length  # [BLOCK_M]
    inside = exists[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = head * query_head_stride + rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    query_gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The same with the loops turned inside out: load dO, L and Δ once, walk over the keys that these queries see, and
    # store dQ, which is contiguous.
    # BEGIN SOLUTION
    gradient_offsets = rows[:, None] * output_gradient_stride + columns[None, :] * output_gradient_column_stride
    output_gradient = tl.load(
        output_gradient_pointer + head * output_gradient_head_stride + gradient_offsets, mask=inside, other=0.0
    )  # [BLOCK_M, BLOCK_D]
    log_sum_exp = tl.load(lse_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
    delta = tl.load(delta_pointer + head * query_length + rows, mask=exists, other=0.0)  # [BLOCK_M]
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_row + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = head * key_head_stride + keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + key_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
        value_offsets = head * value_head_stride + keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + value_offsets, mask=present, other=0.0)  # [BLOCK_N, BLOCK_D]
        visible = exists[:, None] & (keys < key_length)[None, :]  # [BLOCK_M, BLOCK_N]
        if CAUSAL:
            visible = visible & (keys[None, :] <= (rows + key_length - query_length)[:, None])
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        differences = tl.where(visible, scores - log_sum_exp[:, None], float("-inf"))
        probabilities = tl.exp2(differences * 1.4426950408889634)  # [BLOCK_M, BLOCK_N]
        probability_gradients = tl.dot(output_gradient, tl.trans(value_tile), input_precision="ieee")
        score_gradients = probabilities * (probability_gradients - delta[:, None])  # [BLOCK_M, BLOCK_N]
        query_gradient += tl.dot(score_gradients.to(key_tile.dtype), key_tile, input_precision="ieee")
    offsets = head * query_length * head_dim + rows[:, None] * head_dim + columns[None, :]  # [BLOCK_M, BLOCK_D]
    query_gradient = (query_gradient * scale).to(query_gradient_pointer.dtype.element_ty)
    tl.store(query_gradient_pointer + offsets, query_gradient, mask=inside)
    # END SOLUTION


def flash_attention_backward(query, key, value, output, log_sum_exp, output_gradient, causal):
    """(dQ, dK, dV) of attention, by kernels, from what the forward pass of 4.6 left.

    Args:
        query: Q, [heads, query_length, head_dim], float32 or float16; any lengths, any head dimension from 16 to 128,
            any strides but the last, which is 1. Numbers of any size.
        key, value: K and V, [heads, key_length, head_dim]; dtype as query's, strides each its own, the last 1.
        output, log_sum_exp: O in query's shape and dtype, and L, [heads, query_length], float32, both contiguous. L is
            the natural logarithm, and -inf for a query that sees no key.
        output_gradient: dO, in query's shape and dtype. Any strides, the last one too; 0 where dO is expanded.
        causal: True or False; aligned to the end, as in 10.3.

    Returns:
        (dQ, dK, dV), contiguous, in the shapes and dtype of query, key and value. Two or three launches compute them.
        You make no tensor larger than the largest input. The kernels move at most 1.3 times the bytes that tiles of 64
        queries and 64 keys need.
    """
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    query_gradient, key_gradient, value_gradient = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
    )
    # Δ, [heads, query_length], float32 and contiguous, in PyTorch as in 10.1.
    # BEGIN SOLUTION
    delta = (output.float() * output_gradient.float()).sum(dim=-1)
    # END SOLUTION
    inputs = (query, key, value, output_gradient, log_sum_exp, delta)
    strides = (*query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output_gradient.stride())
    sizes = (query_length, key_length, head_dim, 1 / math.sqrt(head_dim))
    tiles = {"BLOCK_D": max(16, triton.next_power_of_2(head_dim)), "BLOCK_M": 64, "BLOCK_N": 64, "CAUSAL": causal}
    # Launch both kernels.
    # BEGIN SOLUTION
    key_gradient_kernel[(triton.cdiv(key_length, 64), heads)](
        *inputs, key_gradient, value_gradient, *strides, *sizes, **tiles
    )
    query_gradient_kernel[(triton.cdiv(query_length, 64), heads)](*inputs, query_gradient, *strides, *sizes, **tiles)
    # END SOLUTION
    return query_gradient, key_gradient, value_gradient


# %%
best_backward = check("10.6", flash_attention_backward).best

# %%
# Exercise 10.7 · Tiles for five accumulators
def accumulator_registers(key_rows, query_rows, head_dim, groups):
    """Registers of each thread that the five accumulators take, if `groups` warp groups share each evenly; rounded up.

    They are float32: S and dP of one tile, dK and dV of the block of key_rows keys, and dQ of the query_rows queries.
    A warp group has 128 threads. All sizes are 1 or more.
    """
    # BEGIN SOLUTION
    elements = 2 * key_rows * query_rows + 2 * key_rows * head_dim + query_rows * head_dim
    return -(-elements // (128 * groups))
    # END SOLUTION


def shared_memory(key_rows, query_rows, head_dim, stages):
    """Bytes of shared memory that the kernel needs.

    There lie: the block of K and the block of V; for each stage a tile of Q, a tile of dO, and L and Δ of its queries;
    one tile of dS for the product with K; and one tile of dQ on its way out. Q, K, V, dO and dS have 2 bytes an
    element; L, Δ and dQ have 4.
    """
    # BEGIN SOLUTION
    blocks = 2 * key_rows * head_dim * 2
    ring = stages * (2 * query_rows * head_dim * 2 + 2 * query_rows * 4)
    return blocks + ring + key_rows * query_rows * 2 + query_rows * head_dim * 4
    # END SOLUTION


def choose_tiles(head_dim, groups, registers, shared_memory_bytes):
    """(key_rows, query_rows) for a Hopper kernel with two stages, or None if nothing fits.

    key_rows is 64, 128, 192 or 256, query_rows 64 or 128. Each warp group takes key_rows / groups keys, a multiple of
    64. A thread has `registers` and needs 16 of them for other things, so the accumulators may take registers - 16.
    The largest key_rows wins, because each block of keys reads all of Q and dO again; then the largest query_rows.
    """
    # BEGIN SOLUTION
    fitting = [
        (key_rows, query_rows)
        for key_rows in (64, 128, 192, 256)
        for query_rows in (64, 128)
        if key_rows % (64 * groups) == 0
        and accumulator_registers(key_rows, query_rows, head_dim, groups) <= registers - 16
        and shared_memory(key_rows, query_rows, head_dim, stages=2) <= shared_memory_bytes
    ]
    return max(fitting, default=None)
    # END SOLUTION


# %%
best_registers, best_shared_memory, best_choose_tiles = check(
    "10.7", accumulator_registers, shared_memory, choose_tiles
).best

# %%
progress()
