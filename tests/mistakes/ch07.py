"""Wrong answers to the exercises of chapter 07, and unusual right ones; the form is that of ch00.py.

Most are the course's own answer with one step changed, as a learner would get it wrong.
"""

from tests.mistakes.edits import changed, in_tf32

# ------------------------------------------------------------------------------------------------------------------ 7.1

REFUSAL = """    if query_heads % key_heads:
        raise ValueError(f"key_heads = {key_heads} must divide query_heads = {query_heads}.")
"""
DIVISION = "return query_head // (query_heads // key_heads)"
MEMBERS = "torch.arange(query_heads).view(key_heads, -1)"

HEAD_MAP_WRONG = {
    "by_modulo": changed("7.1", (DIVISION, "return query_head % key_heads")),
    "groups_by_modulo": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(-1, key_heads).T")),
    "groups_by_modulo__listed": changed(
        "7.1", (MEMBERS, "torch.tensor([list(range(k, query_heads, key_heads)) for k in range(key_heads)])")
    ),
    "by_count": changed("7.1", (DIVISION, "return query_head // key_heads")),
    "groups_of_key_heads": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(-1, key_heads)")),
    "groups_turned": changed("7.1", (MEMBERS, "torch.arange(query_heads).view(key_heads, -1).T")),
    "not_refused": changed("7.1", (REFUSAL, "")),
    "not_refused__in_one_of_them": """# Exercise 7.1 · The head map
def key_head_of(query_head, query_heads, key_heads):
    if query_heads % key_heads:
        raise ValueError("no")
    return query_head * key_heads // query_heads

def groups(query_heads, key_heads):
    group = query_heads // key_heads
    return torch.tensor([list(range(k * group, (k + 1) * group)) for k in range(key_heads)])
""",
}

SCALED_MAP = """# Exercise 7.1 · The head map
def key_head_of(query_head, query_heads, key_heads):
    group, rest = divmod(query_heads, key_heads)
    if rest != 0:
        raise ValueError("the heads do not divide")
    return query_head * key_heads // query_heads

def groups(query_heads, key_heads):
    found = [[] for _ in range(key_heads)]
    for head in range(query_heads):
        found[key_head_of(head, query_heads, key_heads)].append(head)
    return torch.tensor(found)
"""
TENSOR_MAP = """# Exercise 7.1 · The head map
def groups(query_heads, key_heads):
    if query_heads % key_heads != 0:
        raise ValueError(f"{query_heads} / {key_heads}")
    return torch.stack(torch.arange(query_heads).chunk(key_heads))

def key_head_of(query_head, query_heads, key_heads):
    return next(k for k, group in enumerate(groups(query_heads, key_heads).tolist()) if query_head in group)
"""
REPEATED_MAP = changed(
    "7.1",
    (DIVISION, "return int(torch.arange(key_heads).repeat_interleave(query_heads // key_heads)[query_head])"),
    (
        MEMBERS,
        "torch.arange(query_heads // key_heads) + torch.arange(0, query_heads, query_heads // key_heads)[:, None]",
    ),
)

# ------------------------------------------------------------------------------------------------------------------ 7.2

FLOPS = "flops = 4 * query_heads * length * head_dim"
ELEMENTS = "elements = 2 * length * key_heads * head_dim + 2 * query_heads * head_dim"
BALANCE = "return math.ceil(rate / bandwidth * item_bytes / 2)"

COST_WRONG = {
    "values_forgotten": changed("7.2", ("return 2 * layers", "return layers")),
    "group_ignored": changed("7.2", ("key_heads = query_heads // group", "key_heads = query_heads")),
    "group_taken_for_key_heads": changed("7.2", ("key_heads = query_heads // group", "key_heads = group")),
    "one_product_only": changed("7.2", (FLOPS, "flops = 2 * query_heads * length * head_dim")),
    "flops_of_key_heads": changed("7.2", (FLOPS, "flops = 4 * key_heads * length * head_dim")),
    "bytes_of_query_heads": changed(
        "7.2", ("2 * length * key_heads * head_dim", "2 * length * query_heads * head_dim")
    ),
    "queries_forgotten": changed("7.2", (" + 2 * query_heads * head_dim", "")),
    "output_forgotten": changed("7.2", (" + 2 * query_heads * head_dim", " + query_heads * head_dim")),
    "values_not_read": changed("7.2", ("elements = 2 * length", "elements = length")),
    "upside_down": changed("7.2", ("return flops / (elements * item_bytes)", "return elements * item_bytes / flops")),
    "item_bytes_ignored": changed("7.2", (BALANCE, "return math.ceil(rate / bandwidth)")),
    "group_rounded_down": changed("7.2", (BALANCE, "return int(rate / bandwidth * item_bytes / 2)")),
    "group_rounded_down__at_least_one": changed(
        "7.2", (BALANCE, "return max(1, int(rate / bandwidth * item_bytes / 2))")
    ),
}

COST_BY_TOKEN = """# Exercise 7.2 · What decode costs
def cache_bytes(layers, query_heads, group, head_dim, tokens, item_bytes):
    per_token = layers * 2 * (query_heads / group) * head_dim * item_bytes
    return int(tokens * per_token)

def decode_intensity(query_heads, key_heads, length, head_dim, item_bytes):
    return 2 * query_heads * length / (item_bytes * (length * key_heads + query_heads))

def balanced_group(rate, bandwidth, item_bytes):
    group = 1
    while 2 * group / item_bytes < rate / bandwidth:
        group = group + 1
    return group
"""
COST_SPELLED_OUT = """# Exercise 7.2 · What decode costs
def cache_bytes(layers, query_heads, group, head_dim, tokens, item_bytes):
    total = 0
    for kind in ("key", "value"):
        total += layers * query_heads * head_dim * tokens * item_bytes // group
    return total

def decode_intensity(query_heads, key_heads, length, head_dim, item_bytes):
    flops = query_heads * length * (2 * head_dim + 2 * head_dim)
    keys = values = length * key_heads * head_dim * item_bytes
    queries = output = query_heads * head_dim * item_bytes
    return flops / (keys + values + queries + output)

def balanced_group(rate, bandwidth, item_bytes):
    return max(int(-(-(rate * item_bytes) // (2 * bandwidth))), 1)
"""
COST_AS_FLOATS = changed("7.2", ("return 2 * layers", "return 2.0 * layers"))

# ------------------------------------------------------------------------------------------------------------------ 7.3

SPLIT = "heads = weight.unflatten(0, (new_key_heads, group, head_dim))"
POOLED = "return heads.mean(dim=1).flatten(0, 1)"

POOL_WRONG = {
    "heads_interleaved": changed(
        "7.3", (SPLIT, "heads = weight.unflatten(0, (group, new_key_heads, head_dim))"), ("mean(dim=1)", "mean(dim=0)")
    ),
    "rows_averaged": changed(
        "7.3", (SPLIT, ""), (POOLED, "return weight.unflatten(0, (new_key_heads * head_dim, group)).mean(dim=1)")
    ),
    "rows_averaged__split_as_head_dim_by_heads": changed(
        "7.3",
        (SPLIT, "heads = weight.unflatten(0, (head_dim, new_key_heads, group))"),
        ("heads.mean(dim=1)", "heads.mean(dim=2)"),
    ),
    "summed": changed("7.3", ("heads.mean(dim=1)", "heads.sum(dim=1)")),
    "first_of_group": changed("7.3", ("heads.mean(dim=1)", "heads[:, 0]")),
    "first_heads_kept": changed("7.3", (POOLED, "return weight[: new_key_heads * head_dim].clone()")),
    "everything_averaged": changed(
        "7.3", (POOLED, "return torch.cat([weight.unflatten(0, (key_heads, head_dim)).mean(dim=0)] * new_key_heads)")
    ),
    "pooled_then_repeated": changed(
        "7.3", (POOLED, "return heads.mean(dim=1).repeat_interleave(group, dim=0).flatten(0, 1)")
    ),
}

POOL_BY_LOOP = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    heads = weight.chunk(key_heads, dim=0)
    group = key_heads // new_key_heads
    new = []
    for first in range(0, key_heads, group):
        new.append(torch.stack(heads[first:first + group]).mean(0))
    return torch.cat(new)
"""
POOL_BY_MATRIX = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    group = key_heads // new_key_heads
    mix = torch.zeros(new_key_heads, key_heads)
    for head in range(key_heads):
        mix[head // group, head] = 1 / group
    flat = weight.float().reshape(key_heads, -1)
    return (mix @ flat).reshape(new_key_heads * (weight.shape[0] // key_heads), *weight.shape[1:]).to(weight.dtype)
"""
POOL_IN_PLACE_OF_A_COPY = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    head_dim, group = weight.shape[0] // key_heads, key_heads // new_key_heads
    out = torch.zeros(new_key_heads * head_dim, *weight.shape[1:], dtype=torch.float64)
    for head in range(key_heads):
        new = head // group
        out[new * head_dim:(new + 1) * head_dim] += weight[head * head_dim:(head + 1) * head_dim]
    return (out / group).to(weight.dtype)
"""
POOL_IN_HALVES = """# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight, key_heads, new_key_heads):
    heads = weight.reshape(new_key_heads, key_heads // new_key_heads, weight.shape[0] // key_heads, -1)
    pooled = sum(heads[:, i] / heads.shape[1] for i in range(heads.shape[1]))
    return pooled.reshape(-1, *weight.shape[1:])
"""

# ------------------------------------------------------------------------------------------------------------------ 7.4

GROUPED = "grouped = query.unflatten(1, (key.shape[1], -1))"
FLAT = "return output.flatten(1, 2)"
SOFTMAX = "torch.softmax(scores, dim=-1)"


def repeated(how):
    """Multi-head attention over keys and values that `how` makes of a cache, with G = query heads / KV heads."""
    return f"""# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    G = query.shape[1] // key.shape[1]
    key, value = ({how} for x in (key, value))
    scores = (query[:, :, None] @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return (torch.softmax(scores, -1) @ value)[:, :, 0]
"""


SHARED_WRONG = {
    "by_modulo": changed(
        "7.4",
        (GROUPED, "grouped = query.unflatten(1, (-1, key.shape[1])).transpose(1, 2)"),
        (FLAT, "return output.transpose(1, 2).flatten(1, 2)"),
    ),
    "by_modulo__repeated": repeated("x.repeat(1, G, 1, 1)"),
    "by_count": repeated("x[:, (torch.arange(query.shape[1]) // x.shape[1]).clamp(max=x.shape[1] - 1)]"),
    "first_head_for_all": repeated("x[:, :1]"),
    "queries_interleaved": changed(
        "7.4", (GROUPED, "grouped = query.unflatten(1, (-1, key.shape[1])).transpose(1, 2)")
    ),
    "outputs_interleaved": changed("7.4", (FLAT, "return output.transpose(1, 2).flatten(1, 2)")),
    "softmax_over_the_group": changed("7.4", (SOFTMAX, "torch.softmax(scores, dim=2)")),
    "scale_missing": changed("7.4", (" / math.sqrt(query.shape[-1])", "")),
    "scale_twice": changed("7.4", ("/ math.sqrt(query.shape[-1])", "/ query.shape[-1]")),
    "no_maximum": changed("7.4", (SOFTMAX, "(scores.exp() / scores.exp().sum(-1, keepdim=True))")),
    "keys_used_as_values": changed("7.4", (SOFTMAX + " @ value", SOFTMAX + " @ key")),
    "keys_repeated": repeated("x.repeat_interleave(G, dim=1)"),
    "keys_repeated__by_expand_and_reshape": repeated("x[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2)"),
    "keys_repeated__by_matmul": """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    query = query.unflatten(1, (key.shape[1], -1))[:, :, :, None]
    scores = query @ key[:, :, None].transpose(-1, -2) / query.shape[-1] ** 0.5
    return (torch.softmax(scores, -1) @ value[:, :, None])[:, :, :, 0].flatten(1, 2)
""",
    "forbidden_operation": """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    query = query.unflatten(1, (key.shape[1], -1))
    return F.scaled_dot_product_attention(query, key, value).flatten(1, 2)
""",
}

SHARED_BY_EINSUM = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    query = query.view(query.shape[0], key.shape[1], -1, query.shape[2])
    weights = torch.softmax(torch.einsum("bkgd,bknd->bkgn", query, key) / query.shape[3] ** 0.5, dim=-1)
    return torch.einsum("bkgn,bknd->bkgd", weights, value).reshape(query.shape[0], -1, query.shape[3])
"""
SHARED_BY_LOOPS = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            k, v = key[b, h // group], value[b, h // group]
            scores = k @ query[b, h] * query.shape[2] ** -0.5
            output[b, h] = torch.softmax(scores, 0) @ v
    return output
"""
SHARED_TURNED = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    B, H, D = query.shape
    K = key.shape[1]
    columns = (query / math.sqrt(D)).view(B, K, H // K, D).transpose(2, 3)
    scores = key @ columns
    weights = torch.exp(scores - scores.amax(2, keepdim=True))
    weights = weights / weights.sum(2, keepdim=True)
    return (value.transpose(2, 3) @ weights).transpose(2, 3).reshape(B, H, D)
"""
SHARED_IN_FLOAT32 = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    grouped = query.float().unflatten(1, (key.shape[1], -1))
    weights = torch.softmax(grouped @ key.float().mT / query.shape[-1] ** 0.5, dim=-1)
    return (weights @ value.float()).flatten(1, 2).to(query.dtype)
"""
SHARED_ONLINE = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    q = query.unflatten(1, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    top = torch.full((*q.shape[:3], 1), -math.inf)
    total, output = torch.zeros_like(top), torch.zeros(q.shape)
    for k, v in zip(key.split(16, dim=2), value.split(16, dim=2)):
        scores = (q @ k.transpose(2, 3)).float()
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, old = torch.exp(scores - new), torch.exp(top - new)
        total, output, top = total * old + weights.sum(-1, keepdim=True), output * old + weights @ v.float(), new
    return (output / total).flatten(1, 2).to(query.dtype)
"""

# ------------------------------------------------------------------------------------------------------------------ 7.5

ROWS = "(key_head * GROUP + rows)[:, None]"
LOOP = "for first_key in range(0, length, BLOCK_N):"
LENGTH = "length = tl.load(lengths_pointer + sequence)"
KEYS_MASK = "in_use = (keys < length)[:, None]"
SCORES = 'scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2'
NOWHERE = 'scores = tl.where((keys < length)[None, :], scores, float("-inf"))'
OF_KEY_HEAD = "key_pointer += sequence * key_batch_stride + key_head * key_head_stride"
OF_VALUE_HEAD = "value_pointer += sequence * value_batch_stride + key_head * value_head_stride"
OUTPUT_AS_QUERY = (
    ("rows)[:, None] * output_head_stride", "rows)[:, None] * query_head_stride"),
    ("output_pointer + sequence * output_batch_stride", "output_pointer + sequence * query_batch_stride"),
)
NO_NAN = ("weights = tl.exp2(scores - new_max[:, None])",
          'new_max = tl.where(new_max == float("-inf"), -1e38, new_max)\n'
          "        weights = tl.exp2(scores - new_max[:, None])")  # fmt: skip


def with_capacity(*replacements):
    """The course's answer with the cache's capacity handed to the kernel, and changed on top of that."""
    return changed(
        "7.5",
        ("output_head_stride, scale_log2,\n", "output_head_stride, scale_log2, capacity,\n"),
        (
            "math.log2(math.e) / math.sqrt(head_dim),\n",
            "math.log2(math.e) / math.sqrt(head_dim), key_cache.shape[2],\n",
        ),
        *replacements,
    )


HEAD_BY_HEAD = """# Exercise 7.5 · A decode kernel that reads each key once
@triton.jit
def one_head(q, k, v, o, lengths, q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head,
             scale, GROUP: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    sequence, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, D)
    query = tl.load(q + sequence * q_batch + head * q_head + d).to(tl.float32)
    k += sequence * k_batch + head // GROUP * k_head
    v += sequence * v_batch + head // GROUP * v_head
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    out = tl.zeros([D], tl.float32)
    length = tl.load(lengths + sequence)
    for first in range(0, length, B):
        n = first + tl.arange(0, B)
        key = tl.load(k + n[:, None] * k_row + d[None, :], mask=(n < length)[:, None], other=0.0).to(tl.float32)
        s = tl.where(n < length, tl.sum(key * query[None, :], axis=1) * scale, float("-inf"))
        new = tl.maximum(top, tl.max(s, axis=0))
        w = tl.exp2(s - new)
        value = tl.load(v + n[:, None] * v_row + d[None, :], mask=(n < length)[:, None], other=0.0).to(tl.float32)
        out = out * tl.exp2(top - new) + tl.sum(w[:, None] * value, axis=0)
        total = total * tl.exp2(top - new) + tl.sum(w, axis=0)
        top = new
    out = out / tl.where(total == 0.0, 1.0, total)
    tl.store(o + sequence * o_batch + head * o_head + d, out.to(o.dtype.element_ty))

def grouped_decode(query, key_cache, value_cache, lengths):
    batch, heads, head_dim = query.shape
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    one_head[(batch, heads)](query, key_cache, value_cache, output, lengths, *query.stride()[:2],
                             *key_cache.stride()[:3], *value_cache.stride()[:3], *output.stride()[:2],
                             1.4426950408889634 * head_dim ** -0.5, GROUP=heads // key_cache.shape[1], D=head_dim, B=64)
    return output
"""
KEYS_NAMED = (
    HEAD_BY_HEAD.replace("(q, k, v, o, lengths,", "(q, key_cache, value_cache, o, lengths,")
    .replace("    k += sequence", "    k = key_cache + sequence")
    .replace("    v += sequence", "    v = value_cache + sequence")
)

KERNEL_WRONG = {
    "by_modulo": changed("7.5", (ROWS, "(key_head + rows * tl.num_programs(1))[:, None]")),
    "by_count": changed(
        "7.5",
        ("GROUP=group, ROWS=rows,", "GROUP=1, ROWS=16,"),
        ("grid = (batch, key_heads)", "grid = (batch, query_heads)"),
        ("    GROUP: tl.constexpr,", "    key_heads, GROUP: tl.constexpr,"),
        ("math.log2(math.e) / math.sqrt(head_dim),\n", "math.log2(math.e) / math.sqrt(head_dim), key_heads,\n"),
        (
            OF_KEY_HEAD,
            "own = tl.minimum(key_head // key_heads, key_heads - 1)\n"
            "    key_pointer += sequence * key_batch_stride + own * key_head_stride",
        ),
        (OF_VALUE_HEAD, "value_pointer += sequence * value_batch_stride + own * value_head_stride"),
    ),
    "first_head_for_all": changed(
        "7.5",
        (OF_KEY_HEAD, "key_pointer += sequence * key_batch_stride"),
        (OF_VALUE_HEAD, "value_pointer += sequence * value_batch_stride"),
    ),
    "group_offset_missing": changed("7.5", (ROWS, "rows[:, None]")),
    "group_larger_than_the_tile": changed("7.5", ("rows = max(16, triton.next_power_of_2(group))", "rows = 16")),
    "scale_missing": changed("7.5", (SCORES, SCORES.removesuffix(" * scale_log2"))),
    "scale_missing__in_base_e": changed("7.5", (SCORES, SCORES.removesuffix(" * scale_log2")), ("tl.exp2(", "tl.exp(")),
    "scale_twice": changed("7.5", (SCORES, SCORES + " * scale_log2")),
    "natural_exp": changed("7.5", ("tl.exp2(", "tl.exp(")),
    "log2e_missing": changed("7.5", ("math.log2(math.e) / math.sqrt(head_dim),", "1 / math.sqrt(head_dim),")),
    "length_ignored": with_capacity((LENGTH, "length = capacity")),
    "first_length_for_all": changed("7.5", (LENGTH, "length = tl.load(lengths_pointer)")),
    "longest_length_for_all": changed(
        "7.5",
        ("query, key_cache, value_cache, output, lengths,", "query, key_cache, value_cache, output, longest,"),
        ("    grid = (batch", "    longest = torch.full_like(lengths, int(lengths.max()))\n    grid = (batch"),
    ),
    "one_token_too_few": changed("7.5", (LENGTH, "length = tl.maximum(tl.load(lengths_pointer + sequence) - 1, 0)")),
    "one_token_too_few__in_the_mask": changed(
        "7.5", ("(keys < length)[None, :]", "(keys < length - 1)[None, :]"), NO_NAN
    ),
    "one_token_too_many": with_capacity(
        (LENGTH, "length = tl.minimum(tl.load(lengths_pointer + sequence) + 1, capacity)")
    ),
    "one_token_too_many__in_the_masks": changed("7.5", ("keys < length)", "keys <= length)")),
    "last_tile_dropped": changed("7.5", (LOOP, "for first_key in range(0, length // BLOCK_N * BLOCK_N, BLOCK_N):")),
    "tail_keys_scored": changed("7.5", (NOWHERE, "scores = scores")),
    "unused_slots_count": with_capacity((KEYS_MASK, "in_use = (keys < capacity)[:, None]")),
    "no_running_max": changed(
        "7.5",
        ("weights = tl.exp2(scores - new_max[:, None])", "weights = tl.exp2(scores)"),
        ("rescale = tl.exp2(running_max - new_max)", "rescale = tl.full([ROWS], 1.0, tl.float32)"),
    ),
    "no_running_max__unguarded": changed(
        "7.5",
        ("weights = tl.exp2(scores - new_max[:, None])", "weights = tl.exp2(scores)"),
        ("rescale = tl.exp2(running_max - new_max)", "rescale = tl.full([ROWS], 1.0, tl.float32)"),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "maximum_starts_at_zero": changed(
        "7.5", ('tl.full([ROWS], float("-inf"), tl.float32)', "tl.zeros([ROWS], tl.float32)")
    ),
    "maximum_starts_at_zero__unguarded": changed(
        "7.5",
        ('tl.full([ROWS], float("-inf"), tl.float32)', "tl.zeros([ROWS], tl.float32)"),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "scale_missing__and_empty_sequence_nan": changed(
        "7.5",
        (SCORES, SCORES.removesuffix(" * scale_log2")),
        ("accumulator / total[:, None]", "accumulator / running_sum[:, None]"),
    ),
    "accumulator_not_rescaled": changed("7.5", ("accumulator * rescale[:, None] + product", "accumulator + product")),
    "sum_not_rescaled": changed("7.5", ("running_sum * rescale + tl.sum", "running_sum + tl.sum")),
    "not_divided": changed("7.5", ("accumulator / total[:, None]", "accumulator")),
    "keys_used_as_values": changed(
        "7.5",
        ("tl.load(value_pointer + keys[:, None] * value_stride", "tl.load(key_pointer + keys[:, None] * key_stride"),
    ),
    "empty_sequence_nan": changed("7.5", ("accumulator / total[:, None]", "accumulator / running_sum[:, None]")),
    "strides_ignored": with_capacity(
        (
            OF_KEY_HEAD,
            "key_stride = HEAD_DIM\n"
            "    key_pointer += (sequence * tl.num_programs(1) + key_head) * capacity * HEAD_DIM",
        )
    ),
    "strides_ignored__values_by_the_keys": changed(
        "7.5",
        (OF_VALUE_HEAD, "value_pointer += sequence * key_batch_stride + key_head * key_head_stride"),
        ("keys[:, None] * value_stride", "keys[:, None] * key_stride"),
    ),
    "strides_ignored__rows_of_values": changed("7.5", ("keys[:, None] * value_stride", "keys[:, None] * HEAD_DIM")),
    "strides_ignored__queries": changed(
        "7.5",
        (
            "sequence * query_batch_stride + query_rows",
            "sequence * tl.num_programs(1) * GROUP * HEAD_DIM + query_rows",
        ),
        ("[:, None] * query_head_stride", "[:, None] * HEAD_DIM"),
    ),
    "accumulator_in_float16": changed(
        "7.5",
        (
            "accumulator = tl.zeros([ROWS, HEAD_DIM], tl.float32)",
            "accumulator = tl.zeros([ROWS, HEAD_DIM], tl.float16)",
        ),
        (
            "accumulator = accumulator * rescale[:, None] + product",
            "accumulator = (accumulator * rescale[:, None] + product).to(tl.float16)",
        ),
    ),
    "grid_axes_exchanged": changed("7.5", ("grid = (batch, key_heads)", "grid = (key_heads, batch)")),
    "program_for_each_query_head": changed("7.5", ("grid = (batch, key_heads)", "grid = (batch, query_heads)")),
    "output_by_other_strides": changed("7.5", *OUTPUT_AS_QUERY),
    "group_rows_not_masked": changed("7.5", ("in_group = (rows < GROUP)[:, None]", "in_group = (rows >= 0)[:, None]")),
    "group_rows_not_masked__in_the_store": changed(
        "7.5", ("+ output_rows, output, mask=in_group)", "+ output_rows, output)")
    ),
    "group_rows_not_masked__groups_of_rows": changed("7.5", (ROWS, "(key_head * ROWS + rows)[:, None]")),
    "tail_read_out_of_bounds": changed("7.5", (KEYS_MASK, "in_use = (keys >= 0)[:, None]")),
    "keys_repeated": changed(
        "7.5",
        (
            "    grid = (batch, key_heads)",
            "    key_cache, value_cache = (x.repeat_interleave(group, dim=1) for x in (key_cache, value_cache))\n"
            "    key_heads, group = query_heads, 1\n    grid = (batch, key_heads)",
        ),
    ),
    "keys_reread": KEYS_NAMED,
    "too_many_bytes__names_that_say_nothing": HEAD_BY_HEAD,
    "forbidden_operation": """# Exercise 7.5 · A decode kernel that reads each key once
@triton.jit
def copy(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n), mask=i < n)

def grouped_decode(query, key_cache, value_cache, lengths):
    rows = []
    for q, k, v, n in zip(query, key_cache, value_cache, lengths.tolist()):
        q = q.unflatten(0, (k.shape[0], -1)).float()
        w = torch.softmax(q @ k[:, :n].float().mT / q.shape[-1] ** 0.5, -1)
        rows.append((w @ v[:, :n].float()).flatten(0, 1))
    result = torch.stack(rows).to(query.dtype)
    output = torch.empty_like(result)
    copy[(triton.cdiv(result.numel(), 1024),)](result, output, result.numel(), B=1024)
    return output
""",
}

GRID_TURNED = changed(
    "7.5",
    ("grid = (batch, key_heads)", "grid = (key_heads, batch)"),
    ("sequence = tl.program_id(0)", "sequence = tl.program_id(1)"),
    ("key_head = tl.program_id(1)", "key_head = tl.program_id(0)"),
)
FLAT_GRID = changed(
    "7.5",
    ("grid = (batch, key_heads)", "grid = (batch * key_heads,)"),
    ("    GROUP: tl.constexpr,", "    key_heads, GROUP: tl.constexpr,"),
    ("math.log2(math.e) / math.sqrt(head_dim),\n", "math.log2(math.e) / math.sqrt(head_dim), key_heads,\n"),
    ("sequence = tl.program_id(0).to(tl.int64)", "sequence = (tl.program_id(0) // key_heads).to(tl.int64)"),
    ("key_head = tl.program_id(1).to(tl.int64)", "key_head = (tl.program_id(0) % key_heads).to(tl.int64)"),
)
BASE_E = changed(
    "7.5", ("tl.exp2(", "tl.exp("), ("math.log2(math.e) / math.sqrt(head_dim),", "1 / math.sqrt(head_dim),")
)
SCALED_QUERY = changed(
    "7.5",
    (
        SCORES,
        SCORES.removesuffix(" * scale_log2").replace(
            "tl.dot(query, tl.trans(key_tile)", "tl.dot(scaled, tl.trans(key_tile).to(tl.float32)"
        ),
    ),
    ("    running_max = tl.full", "    scaled = query.to(tl.float32) * scale_log2\n    running_max = tl.full"),
)
BACKWARDS = changed(
    "7.5",
    (
        "keys = first_key + tl.arange(0, BLOCK_N)",
        "keys = tl.cdiv(length, BLOCK_N) * BLOCK_N - BLOCK_N - first_key + tl.arange(0, BLOCK_N)",
    ),
)
WIDE_TILES = changed("7.5", ("BLOCK_N=64", "BLOCK_N=128"), ("rows = max(16,", "rows = max(32,"))
SUMS_WITHOUT_DOT = changed(
    "7.5",
    (
        SCORES,
        "scores = tl.sum(query[:, None, :].to(tl.float32) * key_tile[None, :, :].to(tl.float32), axis=2) * scale_log2",
    ),
    (
        'tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")',
        "tl.sum(weights[:, :, None] * value_tile[None, :, :].to(tl.float32), axis=1)",
    ),
)

# ------------------------------------------------------------------------------------------------------------------ 7.6

HERE = "heads_here = max(1, key_heads // ranks)"
OWN_RANK_BYTES = (
    "rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks)",
    "2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes",
)

DEPLOYMENT_WRONG = {
    "replication_forgotten": changed("7.6", (HERE, "heads_here = key_heads / ranks")),
    "no_head_left": changed("7.6", (HERE, "heads_here = key_heads // ranks")),
    "not_divided_among_ranks": changed("7.6", (HERE, "heads_here = key_heads")),
    "values_forgotten": changed("7.6", ("return 2 * layers", "return layers")),
    "smallest_chosen": changed("7.6", ("return max(fitting", "return min(fitting")),
    "uneven_split": changed(
        "7.6",
        ("        and (key_heads % ranks == 0 or ranks % key_heads == 0)\n", ""),
        (
            " rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks) <=",
            " 2 * layers * -(-key_heads // ranks) * head_dim * tokens * item_bytes <=",
        ),
    ),
    "groups_uneven": changed("7.6", ("query_heads % key_heads == 0\n        and ", "")),
    "budget_of_one_for_all": changed(
        "7.6",
        (
            "rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks) <=",
            "2 * layers * key_heads * head_dim * tokens * item_bytes <=",
        ),
    ),
    "fits_strictly": changed("7.6", ("<= budget_bytes", "< budget_bytes")),
    "powers_of_two_only": changed(
        "7.6", ("query_heads % key_heads == 0", "query_heads % key_heads == 0 and key_heads & (key_heads - 1) == 0")
    ),
}
for _name in ("no_head_left", "not_divided_among_ranks", "values_forgotten", "replication_forgotten"):
    head, _, tail = DEPLOYMENT_WRONG[_name].partition("def choose_key_heads")
    DEPLOYMENT_WRONG[_name] = head + "def choose_key_heads" + tail.replace(*OWN_RANK_BYTES)

DEPLOYMENT_DOWNWARDS = """# Exercise 7.6 · KV heads for a budget
def rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    return math.ceil(key_heads / ranks) * tokens * layers * head_dim * item_bytes * 2

def choose_key_heads(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    for heads in range(query_heads, 0, -1):
        fair = math.gcd(heads, ranks) in (heads, ranks)
        if query_heads % heads == 0 and fair:
            if rank_cache_bytes(layers, heads, head_dim, tokens, item_bytes, ranks) <= budget_bytes:
                return heads
"""
DEPLOYMENT_BY_ROOM = """# Exercise 7.6 · KV heads for a budget
def rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks):
    copies = max(ranks // key_heads, 1)
    return 2 * layers * key_heads * copies * head_dim * tokens * item_bytes // ranks

def choose_key_heads(layers, query_heads, head_dim, tokens, item_bytes, budget_bytes, ranks):
    room = int(budget_bytes // (2 * layers * head_dim * tokens * item_bytes))  # heads on a rank
    best = None
    for here in range(1, room + 1):
        if query_heads % (here * ranks) == 0:
            best = here * ranks
    return best
"""
DEPLOYMENT_ALWAYS_EVEN = changed(
    "7.6", ("(key_heads % ranks == 0 or ranks % key_heads == 0)", "key_heads % ranks == 0")
)

WRONG = {
    "7.1": HEAD_MAP_WRONG,
    "7.2": COST_WRONG,
    "7.3": POOL_WRONG,
    "7.4": SHARED_WRONG,
    "7.5": KERNEL_WRONG,
    "7.6": DEPLOYMENT_WRONG,
}

UNUSUAL = {
    "7.1": {
        "multiplied first, lists filled": SCALED_MAP,
        "by a tensor": TENSOR_MAP,
        "repeated and added": REPEATED_MAP,
    },
    "7.2": {"by token, searched": COST_BY_TOKEN, "spelled out": COST_SPELLED_OUT, "a float": COST_AS_FLOATS},
    "7.3": {
        "chunks stacked": POOL_BY_LOOP,
        "a product with a matrix": POOL_BY_MATRIX,
        "added up in float64": POOL_IN_PLACE_OF_A_COPY,
        "divided first": POOL_IN_HALVES,
    },
    "7.4": {
        "einsum": SHARED_BY_EINSUM,
        "head by head": SHARED_BY_LOOPS,
        "keys times queries": SHARED_TURNED,
        "in float32": SHARED_IN_FLOAT32,
        "online": SHARED_ONLINE,
    },
    "7.5": {
        "tl.dot in tf32": in_tf32("7.5"),
        "grid turned": GRID_TURNED,
        "flat grid": FLAT_GRID,
        "base e": BASE_E,
        "scaled query": SCALED_QUERY,
        "backwards": BACKWARDS,
        "wide tiles": WIDE_TILES,
        "without dot": SUMS_WITHOUT_DOT,
    },
    "7.6": {
        "downwards": DEPLOYMENT_DOWNWARDS,
        "by room": DEPLOYMENT_BY_ROOM,
        "heads never copied": DEPLOYMENT_ALWAYS_EVEN,
    },
}
