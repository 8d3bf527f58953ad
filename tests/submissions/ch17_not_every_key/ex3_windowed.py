"""Wrong answers to exercise 17.3, and unusual right ones."""

from tests.submissions.edits import changed, edited, in_tf32

BEGIN = "tl.maximum(first_query + key_length - query_length - window + 1, 0) // BLOCK_N * BLOCK_N"
END = "tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)"
LOWER = "(keys[None, :] > positions[:, None] - window)"
CAUSAL = "(keys[None, :] <= positions[:, None])"
LOOP = "    for first_key in range(begin, end, BLOCK_N):\n"
GUARD = 'tl.where(new_max == float("-inf"), 0.0, new_max)'
FROM_0 = ("    for first_key in range(begin, end, BLOCK_N):", "    for first_key in range(0, end, BLOCK_N):")
TILES = "BLOCK_M=64, BLOCK_N=64"
START = 'tl.full([BLOCK_M], float("-inf"), tl.float32)'
WEIGHTS = "tl.exp2(scores - reference[:, None])"
KEY_HEAD = "head // GROUP"
HIDDEN = 'tl.where(visible, scores, float("-inf"))'


def kernel(*pieces):
    return changed("17.3", *zip(pieces[::2], pieces[1::2]))


def tested(source):
    """Each step under a test: the loop goes over all tiles, and skips those in front of the window."""
    head, loop, rest = source.partition(LOOP)
    body, last, behind = rest.partition("        running_max = new_max\n")
    inner = "".join(f"    {line}\n" for line in (body + last).splitlines())
    return head + "    for first_key in range(0, end, BLOCK_N):\n        if first_key >= begin:\n" + inner + behind


# Another's cell: three loops, of which the one in the middle has no mask.
THREE_LOOPS = """# Exercise 17.3 · A kernel with a bounded loop
@triton.jit
def step(q, k_base, v_base, skl, svl, start, pos, keys, window, scale, m, l, acc, N: tl.constexpr, MASK: tl.constexpr):
    n, d = start + tl.arange(0, N), tl.arange(0, acc.shape[1])
    k = tl.load(k_base + n[:, None] * skl + d[None, :], mask=n[:, None] < keys, other=0.0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if MASK:
        seen = (n[None, :] <= pos[:, None]) & (n[None, :] > pos[:, None] - window) & (n[None, :] < keys)
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p, old = tl.exp2(s - safe[:, None]), tl.exp2(m - safe)
    v = tl.load(v_base + n[:, None] * svl + d[None, :], mask=n[:, None] < keys, other=0.0)
    return new, l * old + tl.sum(p, 1), acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")


@triton.jit
def window_kernel(
    Q, K, V, O, sqb, sqh, sql, skb, skh, skl, svb, svh, svl, sob, soh, sol, queries, keys, window, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):
    first, h, b = tl.program_id(0) * M, tl.program_id(1), tl.program_id(2)
    rows, d = first + tl.arange(0, M), tl.arange(0, D)
    pos = rows + keys - queries
    there = rows[:, None] < queries
    q = tl.load(Q + b * sqb + h * sqh + rows[:, None] * sql + d[None, :], mask=there, other=0.0)
    k_base = K + b * skb + h // GROUP * skh
    v_base = V + b * svb + h // GROUP * svh
    p0 = first + keys - queries
    p1 = p0 + M - 1
    begin = tl.maximum(0, p0 - window + 1) // N * N
    end = tl.minimum(keys, p1 + 1)
    whole_begin = tl.minimum(tl.cdiv(tl.maximum(0, p1 - window + 1), N), tl.cdiv(end, N)) * N
    whole_end = tl.maximum((p0 + 1) // N * N, whole_begin)
    m, l, acc = tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, D], tl.float32)
    for start in range(begin, whole_begin, N):
        m, l, acc = step(q, k_base, v_base, skl, svl, start, pos, keys, window, scale, m, l, acc, N, True)
    for start in range(whole_begin, whole_end, N):
        m, l, acc = step(q, k_base, v_base, skl, svl, start, pos, keys, window, scale, m, l, acc, N, False)
    for start in range(whole_end, end, N):
        m, l, acc = step(q, k_base, v_base, skl, svl, start, pos, keys, window, scale, m, l, acc, N, True)
    out = (acc / l[:, None]).to(O.dtype.element_ty)
    tl.store(O + b * sob + h * soh + rows[:, None] * sol + d[None, :], out, mask=there)


def window_attention(query, key, value, window):
    batch, heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[1:3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    window_kernel[(triton.cdiv(queries, 64), heads, batch)](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        queries, keys, window, math.log2(math.e) / math.sqrt(head_dim), GROUP=heads // key_heads, D=head_dim, M=64, N=64
    )
    return output
"""

WRONG = {
    "counted_twice": edited(THREE_LOOPS, ("tl.maximum((p0 + 1) // N * N, whole_begin)", "(p0 + 1) // N * N")),
    "whole_from_the_first": edited(THREE_LOOPS, ("p1 - window + 1", "p0 - window + 1")),
    "scale_twice__and_natural": edited(THREE_LOOPS, ("math.log2(math.e) / math.sqrt(head_dim)", "1 / head_dim")),
    # Three levels: the mask alone (vllm-project/vllm#49588), a test for each tile (sgl-project/sglang#39769,
    # vllm-project/vllm#50776), and the bounded loop, which is asked for.
    "tiles_loaded_in_vain": kernel(*FROM_0),
    "tiles_loaded_in_vain__to_the_last_key": kernel("range(begin, end, BLOCK_N)", "range(0, key_length, BLOCK_N)"),
    "loop_not_bounded": tested(changed("17.3")),
    "loop_not_bounded__loads_masked": kernel(*FROM_0, "present = (keys < key_length)[:, None]",
        "present = ((keys < key_length) & (first_key >= begin))[:, None]"),
    # One key too many (huggingface/transformers#39408, NVIDIA-NeMo/Megatron-Bridge#2656, ml-explore/mlx-lm#390).
    "window_too_wide": kernel(LOWER, LOWER.replace(">", ">=")),
    "window_too_wide__begin_too": kernel(LOWER, LOWER.replace(">", ">="), "- window + 1", "- window"),
    "window_too_narrow": kernel(LOWER, LOWER.replace("window", "window + 1")),
    "window_too_narrow__begin_too": kernel(
        "- window + 1", "- window + 2", LOWER, LOWER.replace("window", "window + 1")
    ),
    "no_window": kernel(LOWER, "(keys[None, :] >= 0)", *FROM_0),
    "window_edge_not_masked": kernel(LOWER, "(keys[None, :] >= 0)"),
    # A window that looks ahead (ModelTC/LightLLM#1311).
    "no_causal_mask": kernel(CAUSAL, "(keys[None, :] >= 0)"),
    "causal_off_by_one": kernel(CAUSAL, CAUSAL.replace("<=", "<")),
    "sees_the_next_key": kernel(CAUSAL, CAUSAL.replace("]) ", "] + 1) ").replace("None])", "None] + 1)")),
    "misaligned": kernel("+ key_length - query_length", ""),
    "misaligned__mask": kernel("positions = rows + key_length - query_length", "positions = rows"),
    "bounds_misaligned": kernel(
        BEGIN, BEGIN.replace(" + key_length - query_length", ""), END, "tl.minimum(key_length, first_query + BLOCK_M)"
    ),
    "bounds_misaligned__end": kernel(END, "tl.minimum(key_length, first_query + BLOCK_M)"),
    "begins_too_late": kernel("- window + 1, 0)", "- window + BLOCK_M, 0)"),
    "begins_too_late__rounded_up": kernel(
        BEGIN, BEGIN.replace(") //", ") + BLOCK_N - 1) //").replace("tl.max", "(tl.max")
    ),
    "ends_too_soon": kernel(END, END.replace(" + BLOCK_M", "")),
    "out_of_bounds__before_key_0": kernel("tl.maximum(first_query + key_length - query_length - window + 1, 0)",
        "(first_query + key_length - query_length - window + 1)"),
    # A row that sees nothing of its first tile.
    "empty_tile_nan": kernel(GUARD, "new_max"),
    # A maximum that starts at a finite number (flashinfer-ai/flashinfer#4267).
    "maximum_starts_finite": kernel(START, "tl.full([BLOCK_M], -5e4, tl.float32)"),
    "hidden_finite": kernel(HIDDEN, "tl.where(visible, scores, -1e9)"),
    "hidden_scored_zero": kernel(HIDDEN, "tl.where(visible, scores, 0.0)"),
    "maximum_starts_at_zero": kernel(START, "tl.zeros([BLOCK_M], tl.float32)"),
    "wrong_key_head": kernel(KEY_HEAD, "head % (tl.num_programs(1) // GROUP)"),
    "wrong_key_head__the_first": kernel(KEY_HEAD, "head * 0"),
    "not_all_programs": kernel("query_heads, batch)\n", "key_heads, batch)\n"),
    "not_all_programs__sequences": kernel("query_heads, batch)\n", "query_heads, 1)\n"),
    "query_tail_unwritten": kernel("triton.cdiv(query_length, 64)", "query_length // 64"),
    "query_tail_unwritten__but_one_tile": kernel("triton.cdiv(query_length, 64)", "max(1, query_length // 64)"),
    "keys_used_as_values": kernel("tl.load(value_pointer + value_offsets", "tl.load(key_pointer + key_offsets"),
    # log2(e) multiplied into the scores although the exponential is natural (flagos-ai/FlagGems#424 is of its kind).
    "natural_exp": kernel("tl.exp2(", "tl.exp("),
    "log2e_missing": kernel("math.log2(math.e) / math.sqrt", "1 / math.sqrt"),
    "scale_missing": kernel("math.log2(math.e) / math.sqrt(head_dim)", "math.log2(math.e)"),
    "accumulator_not_rescaled": kernel("accumulator * rescale[:, None] + product", "accumulator + product"),
    "sum_not_rescaled": kernel("running_sum * rescale +", "running_sum +"),
    "not_divided": kernel("accumulator / running_sum[:, None]", "accumulator"),
    "maximum_not_updated": kernel("        running_max = new_max\n", ""),
    "strides": kernel("*key.stride()[:3]", "key.stride(0), key_length * head_dim, key.stride(2)"),
    "strides__batch": kernel("sequence * value_batch_stride + ", ""),
    "strides__rows": kernel("*value.stride()[:3]", "*value.stride()[:2], head_dim"),
    "strides_of_another": kernel("*value.stride()[:3]", "*key.stride()[:3]"),
    "out_of_bounds": kernel("mask=present, other=0.0)", "mask=keys[:, None] >= 0, other=0.0)"),
    "out_of_bounds__writes": kernel(", output, mask=inside)", ", output)"),
    "copied_by_pytorch": kernel(
        "    output = torch.empty", "    key, value = key.clone(), value.clone()\n    output = torch.empty"
    ),
    "forbidden_operation": kernel("    output = torch.empty", "    query = query * 1.0\n    output = torch.empty"),
    "too_much_memory": kernel("    output = torch.empty", "    torch.empty(query_length * batch * query_heads, "
        "key_length + head_dim, device=query.device)\n    output = torch.empty"),
}

GROUPED = """# Exercise 17.3 · A kernel with a bounded loop
@triton.jit
def grouped_kernel(
    q, k, v, o, sqb, sqh, sql, skb, skh, skl, svb, svh, svl, sob, soh, sol, queries, keys, window, scale,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):
    batch, key_head = tl.program_id(2), tl.program_id(1)
    first = tl.program_id(0) * M
    row = tl.arange(0, ROWS)
    place, head = first + row // GROUP, key_head * GROUP + row % GROUP
    there = (place < queries) & (row < M * GROUP)
    d = tl.arange(0, D)
    at = batch * sqb + head * sqh + place * sql
    x = tl.load(q + at[:, None] + d[None, :], mask=there[:, None], other=0.0)
    position = place + keys - queries
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    start = tl.maximum(0, first + keys - queries - window + 1)
    stop = tl.minimum(keys, first + M + keys - queries)
    while start < stop:
        key = start + tl.arange(0, N)
        live = key < stop
        here = batch * skb + key_head * skh + key * skl
        tile = tl.load(k + here[:, None] + d[None, :], mask=live[:, None], other=0.0)
        s = tl.dot(x, tl.trans(tile), input_precision="ieee") * scale
        ahead = position[:, None] - key[None, :]
        s = tl.where((ahead >= 0) & (ahead < window) & live[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p, old = tl.exp(s - base[:, None]), tl.exp(m - base)
        here = batch * svb + key_head * svh + key * svl
        tile = tl.load(v + here[:, None] + d[None, :], mask=live[:, None], other=0.0)
        acc = acc * old[:, None] + tl.dot(p.to(tile.dtype), tile, input_precision="ieee")
        l = l * old + tl.sum(p, 1)
        m = new
        start += N
    at = batch * sob + head * soh + place * sol
    acc = acc / tl.where(l == 0, 1.0, l)[:, None]
    tl.store(o + at[:, None] + d[None, :], acc.to(o.dtype.element_ty), mask=there[:, None])


def window_attention(query, key, value, window):
    batch, heads, queries, head_dim = query.shape
    key_heads, keys = key.shape[1:3]
    group, output = heads // key_heads, torch.empty_like(query, memory_format=torch.contiguous_format)
    rows = max(16, triton.next_power_of_2(64 * group))
    grouped_kernel[(triton.cdiv(queries, 64), key_heads, batch)](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        queries, keys, window, head_dim**-0.5, GROUP=group, D=head_dim, M=64, N=32, ROWS=rows,
    )
    return output
"""

UNUSUAL = {
    "three loops, of which one has no mask": THREE_LOOPS,
    "tl.dot in tf32": in_tf32("17.3"),
    "a loop that begins at the window's edge": kernel(" // BLOCK_N * BLOCK_N", ""),
    "loads masked by the window too": kernel(
        "present = (keys < key_length)[:, None]",
        "present = ((keys < key_length) & (keys > first_query + key_length - query_length - window))[:, None]",
    ),
    "tiles counted": kernel(
        LOOP, "    for number in range(begin // BLOCK_N, tl.cdiv(end, BLOCK_N)):\n"
        "        first_key = number * BLOCK_N\n",
    ),
    "from the last tile to the first": kernel(
        LOOP, "    for step in range(0, tl.cdiv(end - begin, BLOCK_N)):\n"
        "        first_key = begin + (tl.cdiv(end - begin, BLOCK_N) - 1 - step) * BLOCK_N\n",
    ),
    "natural base": kernel("tl.exp2(", "tl.exp(", "math.log2(math.e) / math.sqrt", "1 / math.sqrt"),
    "tiles of 16 keys": kernel(TILES, "BLOCK_M=64, BLOCK_N=16"),
    "the heads of a group as rows of one tile": GROUPED,
    "a large negative number, masked once more": kernel(
        HIDDEN, "tl.where(visible, scores, -3e38)", GUARD, "new_max",
        WEIGHTS, f"tl.where(visible, {WEIGHTS}, 0.0)",
    ),
}
