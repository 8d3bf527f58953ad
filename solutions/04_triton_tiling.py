# %%
# Exercise 4.1 · Tiled attention in PyTorch
def tiled_attention(query, key, value, query_rows, key_rows):
    """Exact attention of one head, one tile of queries against one tile of keys at a time.

    Args:
        query: [query_length, head_dim], float32.
        key, value: [key_length, head_dim], float32.
        query_rows, key_rows: rows of a tile of queries, and of a tile of keys and values. The last tile of either may
            be smaller.

    Returns:
        softmax(query @ key.T / √head_dim) @ value, [query_length, head_dim], float32. No tensor that you make may be
        larger than the inputs and one query_rows × key_rows tile of scores.
    """
    # BEGIN SOLUTION
    scale = 1 / math.sqrt(query.shape[1])
    output = torch.empty_like(query)
    for first_query in range(0, query.shape[0], query_rows):
        query_tile = query[first_query : first_query + query_rows]  # [rows, head_dim]
        running_max = torch.full((query_tile.shape[0], 1), -math.inf)
        running_sum = torch.zeros(query_tile.shape[0], 1)
        accumulator = torch.zeros_like(query_tile)  # [rows, head_dim], not yet divided by the sum
        for first_key in range(0, key.shape[0], key_rows):
            key_tile = key[first_key : first_key + key_rows]  # [keys, head_dim]
            value_tile = value[first_key : first_key + key_rows]  # [keys, head_dim]
            scores = scale * (query_tile @ key_tile.T)  # [rows, keys]
            new_max = torch.maximum(running_max, scores.amax(dim=1, keepdim=True))  # [rows, 1]
            weights = torch.exp(scores - new_max)  # [rows, keys]
            rescale = torch.exp(running_max - new_max)  # [rows, 1], 0 at the first tile
            running_sum = running_sum * rescale + weights.sum(dim=1, keepdim=True)
            accumulator = accumulator * rescale + weights @ value_tile
            running_max = new_max
        output[first_query : first_query + query_rows] = accumulator / running_sum
    return output
    # END SOLUTION


# %%
# Exercise 4.2 · Tiles within a budget
def shared_memory(query_rows, key_rows, head_dim, item_bytes, stages):
    """Bytes of shared memory that a program fills: its tile of queries, and `stages` tiles each of keys and values."""
    # BEGIN SOLUTION
    return (query_rows + 2 * stages * key_rows) * head_dim * item_bytes
    # END SOLUTION


def traffic(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    """Bytes that all programs load and store together, one program for each tile of `query_rows` queries of a head.

    A program reads its queries and writes its output once, and reads all keys and values of its head. The last tile of
    queries may be partly empty; rows that don't exist are not moved.
    """
    # BEGIN SOLUTION
    query_tiles = -(-query_length // query_rows)
    rows = 2 * query_length + query_tiles * 2 * key_length
    return heads * rows * head_dim * item_bytes
    # END SOLUTION


def choose_tiles(head_dim, item_bytes, shared_memory_bytes, threads):
    """The tiles (query_rows, key_rows) that move the fewest bytes and fit.

    Both are taken from 16, 32, 64, 128 and 256. They fit when, with 2 stages, their shared memory is at most
    `shared_memory_bytes`, and when the accumulator and the scores, query_rows · (head_dim + key_rows) float32 values,
    take at most 128 registers of each of the program's `threads`. The largest query_rows that fits wins, and with it
    the largest key_rows. Returns None when nothing fits.
    """
    # BEGIN SOLUTION
    sizes = (16, 32, 64, 128, 256)
    fitting = [
        (query_rows, key_rows)
        for query_rows in sizes
        for key_rows in sizes
        if shared_memory(query_rows, key_rows, head_dim, item_bytes, stages=2) <= shared_memory_bytes
        and query_rows * (head_dim + key_rows) <= 128 * threads
    ]
    return max(fitting, default=None)
    # END SOLUTION


# %%
# Exercise 4.3 · The forward kernel, without a mask
@triton.jit
def attention_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    key_length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all keys, BLOCK_N at a time."""
    head = tl.program_id(1).to(tl.int64)  # 64 bits: a head's offset can pass 2^31 elements
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = rows[:, None] * query_stride + columns[None, :]  # [BLOCK_M, HEAD_DIM]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # The loop over the tiles of keys, and the store of the output.
    # BEGIN SOLUTION
    for first_key in range(0, key_length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_offsets = keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        weights = tl.exp(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp(running_max - new_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")  # [BLOCK_M, HEAD_DIM]
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    output = accumulator / running_sum[:, None]  # [BLOCK_M, HEAD_DIM]
    output_offsets = rows[:, None] * output_stride + columns[None, :]  # [BLOCK_M, HEAD_DIM]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output.to(output_pointer.dtype.element_ty))
    # END SOLUTION


def flash_attention_full(query, key, value):
    """Attention without a mask, by one kernel.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; query_length a multiple of 64, head_dim 16, 32, 64
            or 128. Any strides but the last, which is 1.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64.

    Returns:
        [heads, query_length, head_dim], in query's dtype. The kernel may move no more bytes than `traffic` says for
        tiles of 64 queries.
    """
    # How many programs along each axis of the grid? Axis 0: tiles of 64 queries. Axis 1: heads.
    # BEGIN SOLUTION
    grid = (query.shape[1] // 64, query.shape[0])
    # END SOLUTION
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attention_kernel[grid](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        key.shape[1], 1 / math.sqrt(query.shape[2]), HEAD_DIM=query.shape[2], BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return output


# %%
# Exercise 4.4 · A causal kernel that skips tiles
@triton.jit
def causal_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against the keys up to the one that its last query stands at."""
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    # BEGIN SOLUTION
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    positions = rows + key_length - query_length  # [BLOCK_M], counted along the keys
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)  # none of these queries sees more
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        weights = tl.exp2(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, HEAD_DIM]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # queries that see nothing: 0 / 1 = 0
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)  # [BLOCK_M, HEAD_DIM]
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output)
    # END SOLUTION


def flash_attention_causal(query, key, value):
    """Causal attention by one kernel that neither loads nor computes the tiles above the diagonal.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; query_length a multiple of 64, head_dim 16, 32, 64
            or 128. Any strides but the last, which is 1.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64, smaller or larger than query_length.

    Returns:
        [heads, query_length, head_dim], in query's dtype. The last query stands at the last key: query i sees the keys
        0 to i + key_length - query_length. A query that sees none has an output of zeros.
    """
    # BEGIN SOLUTION
    grid = (query.shape[1] // 64, query.shape[0])
    # END SOLUTION
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale_log2 = math.log2(math.e) / math.sqrt(query.shape[2])  # for tl.exp2
    causal_kernel[grid](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query.shape[1], key.shape[1], scale_log2, HEAD_DIM=query.shape[2], BLOCK_M=64, BLOCK_N=64,
    )  # fmt: skip
    return output


# %%
# Exercise 4.5 · Any length, any head dimension
@triton.jit
def ragged_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, head_dim, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head. Rows past a length and columns past head_dim are never touched."""
    # BEGIN SOLUTION
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets, mask=inside, other=0.0)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        # A row that has seen no key yet is measured from 0: -inf - -inf would be NaN.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets, mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, BLOCK_D]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output, mask=inside)
    # END SOLUTION


def flash_attention_ragged(query, key, value, causal):
    """Attention for any lengths and any head dimension from 16 to 128, by one kernel with programs of 64 queries.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; any strides but the last, which is 1.
        key, value: [heads, key_length, head_dim].
        causal: True or False; aligned to the end, as in 4.4.

    Returns:
        [heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key.
    """
    # BEGIN SOLUTION
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    ragged_kernel[(triton.cdiv(query_length, 64), heads)](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )  # fmt: skip
    return output
    # END SOLUTION


# %%
# Exercise 4.6 · The log-sum-exp as a second output
@triton.jit
def lse_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lse_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, head_dim, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """As in 4.5; besides, each row's log Σ exp(scaled scores), natural logarithm, to lse_pointer [heads, query_length]."""
    # BEGIN SOLUTION
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets, mask=inside, other=0.0)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets, mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, BLOCK_D]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output, mask=inside)
    # running_max is in units of log 2; for a row that saw nothing it is -inf, and so is the result.
    log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453  # [BLOCK_M]
    tl.store(lse_pointer + head * query_length + rows, log_sum_exp, mask=rows < query_length)
    # END SOLUTION


def flash_attention_lse(query, key, value, causal):
    """(output, log-sum-exp) of attention, by one kernel with programs of 64 queries.

    Args:
        query, key, value, causal: as in 4.5.

    Returns:
        output: [heads, query_length, head_dim], in query's dtype.
        lse: [heads, query_length], float32: log Σ exp(scaled scores) over the keys that the query sees, natural
            logarithm; minus infinity for a query that sees none.
    """
    # BEGIN SOLUTION
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, query_length), dtype=torch.float32, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    lse_kernel[(triton.cdiv(query_length, 64), heads)](
        query, key, value, output, lse,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )  # fmt: skip
    return output, lse
    # END SOLUTION


# %%
# Exercise 4.7 · Beat FlashAttention-2
@triton.jit
def fast_step(
    query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
    running_max, running_sum, accumulator, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values. Only the tiles at the edges are MASKED."""
    # BEGIN SOLUTION
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    key_pointers = key_pointer + keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
    value_pointers = value_pointer + keys[:, None] * value_stride + columns[None, :]
    if MASKED:
        present = (keys < key_length)[:, None]
        key_tile = tl.load(key_pointers, mask=present, other=0.0)
        value_tile = tl.load(value_pointers, mask=present, other=0.0)
    else:
        key_tile = tl.load(key_pointers)
        value_tile = tl.load(value_pointers)
    scores = tl.dot(query, tl.trans(key_tile))  # [BLOCK_M, BLOCK_N], not yet scaled
    if MASKED:
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)  # [BLOCK_M]
    reference_max = new_max
    if MASKED:
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - reference_max[:, None])  # one multiply-add and one exp2 for each score
    rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
    running_sum = running_sum * rescale + tl.sum(weights, axis=1)
    accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator * rescale[:, None])
    return new_max, running_sum, accumulator
    # END SOLUTION


@triton.jit
def fast_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride, output_stride,
    heads, query_length, key_length, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head of one sequence; whole tiles first, the masked ones after them."""
    # BEGIN SOLUTION
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query_pointer += batch * query_batch_stride + head * query_head_stride
    key_pointer += batch * key_batch_stride + head * key_head_stride
    value_pointer += batch * value_batch_stride + head * value_head_stride
    output_pointer += batch * output_batch_stride + head * output_head_stride
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest programs first, so that short ones fill the end
    first_query = tile * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    offset = key_length - query_length
    positions = rows + offset  # [BLOCK_M]
    inside = (rows < query_length)[:, None]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = key_length
    whole_end = key_length // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(key_length, tl.maximum(first_query + BLOCK_M + offset, 0))
        whole_end = tl.minimum(key_length, tl.maximum(first_query + offset + 1, 0)) // BLOCK_N * BLOCK_N
    for first_key in range(0, whole_end, BLOCK_N):
        running_max, running_sum, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
            running_max, running_sum, accumulator, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, MASKED=False)
    for first_key in range(whole_end, end, BLOCK_N):
        running_max, running_sum, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
            running_max, running_sum, accumulator, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, MASKED=True)
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    tl.store(output_pointer + rows[:, None] * output_stride + columns[None, :], output, mask=inside)
    # END SOLUTION


def fast_attention(query, key, value, causal):
    """Attention, faster than PyTorch's FlashAttention-2.

    Args:
        query: [batch, heads, query_length, head_dim], float16 or bfloat16, head_dim 64 or 128; the last stride is 1.
        key, value: [batch, heads, key_length, head_dim].
        causal: True or False; aligned to the end.

    Returns:
        [batch, heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key.
    """
    # BEGIN SOLUTION
    batch, heads, query_length, head_dim = query.shape
    key_length = key.shape[2]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device) >= (9, 0)
    if head_dim == 64:
        tiles = dict(BLOCK_M=128, BLOCK_N=64, num_warps=4, num_stages=3)
    elif hopper:
        tiles = dict(BLOCK_M=128, BLOCK_N=128, num_warps=8, num_stages=2)
    else:
        tiles = dict(BLOCK_M=128, BLOCK_N=32, num_warps=8, num_stages=2)
    fast_kernel[(triton.cdiv(query_length, tiles["BLOCK_M"]), batch * heads)](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        heads, query_length, key_length, math.log2(math.e) / math.sqrt(head_dim),
        HEAD_DIM=head_dim, CAUSAL=causal, **tiles,
    )  # fmt: skip
    return output
    # END SOLUTION
