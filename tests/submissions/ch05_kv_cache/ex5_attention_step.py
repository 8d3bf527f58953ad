"""Wrong answers to exercise 5.5, and unusual right ones."""

from tests.submissions.edits import changed

KEY_STORE = "key_cache[sequences, :, past.long()] = key"


VALUE_STORE = "value_cache[sequences, :, past.long()] = value"


EMPTY = "empty = torch.arange(capacity, device=query.device) > past[:, None]"


STORES = f"    {KEY_STORE}\n    {VALUE_STORE}\n"


def stored_at(slot):
    return tuple((line, line.replace("past.long()", slot)) for line in (KEY_STORE, VALUE_STORE))


def seen(text):
    return (EMPTY, EMPTY.replace("> past[:, None]", text))


BY_SEQUENCE = """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    outputs = []
    group = query.shape[1] // key.shape[1]
    for b in range(len(past)):
        p = int(past[b])
        BODY
    return torch.cat(outputs)
"""


def by_sequence(body):
    return BY_SEQUENCE.replace("BODY", body.strip().replace("\n", "\n        "))


SDPA_BODY = """
key_cache[b, :, p], value_cache[b, :, p] = key[b], value[b]
k = key_cache[b : b + 1, :, : p + 1].repeat_interleave(group, dim=1)
v = value_cache[b : b + 1, :, : p + 1].repeat_interleave(group, dim=1)
outputs.append(F.scaled_dot_product_attention(query[b : b + 1, :, None], k, v)[:, :, 0])
"""


WRONG = {
    "first_length_for_all": changed("5.5", seen("> past[:1, None]")),
    "stored_in_last_slot": changed(
        "5.5", *stored_at("-1"), seen(">= past[:, None]"), ("    weights =", "    empty[:, -1] = False\n    weights =")
    ),
    "only_last_sequence": """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    for b, end in enumerate(past.tolist()):
        key_cache[b, :, end], value_cache[b, :, end] = key[b], value[b]
        output = torch.zeros_like(query)
        keys, values = (part[b : b + 1, :, : end + 1] for part in (key_cache, value_cache))
        output[b] = F.scaled_dot_product_attention(query[b : b + 1, :, None], keys, values, enable_gqa=True)[0, :, 0]
    return output
""",
    "hidden_scores_not_low": changed("5.5", ("-math.inf)", "-100.0)")),
    "masked_after_softmax__and_divided": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "weights = torch.softmax(scores, dim=-1) * ~empty[:, None, None]\n"
            "    weights = weights / weights.sum(dim=-1, keepdim=True)",
        ),
    ),
    "maximum_not_subtracted__masked_behind": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "weights = torch.exp(scores) * ~empty[:, None, None]\n"
            "    weights = weights / weights.sum(dim=-1, keepdim=True)",
        ),
    ),
    "heads_by_modulo__in_their_order": changed(
        "5.5",
        (
            "query.view(batch, key_heads, query_heads // key_heads, head_dim)",
            "query.view(batch, query_heads // key_heads, key_heads, head_dim).transpose(1, 2)",
        ),
    ),
    "slot_of_first_sequence": changed(
        "5.5",
        ('[sequences, :, past.long()] =', '[sequences, :, past[0].long()] ='),
    ),
    "slot_too_early": changed("5.5", *stored_at("past.long() - 1")),
    "slot_too_early__and_short": changed("5.5", *stored_at("past.long() - 1"), seen(">= past[:, None]")),
    "slot_too_late": changed("5.5", *stored_at("past.long() + 1")),
    "slot_too_late__and_long": changed("5.5", *stored_at("past.long() + 1"), seen("> past[:, None] + 1")),
    "one_token_too_many": by_sequence(SDPA_BODY.replace("p + 1]", "p + 2]")),
    "whole_buffer": by_sequence(SDPA_BODY.replace(": p + 1]", ":]")),
    "nothing_stored": changed(
        "5.5", (f"    {KEY_STORE}\n", ""), (f"    {VALUE_STORE}\n", ""), seen(">= past[:, None]")
    ),
    "behind_the_buffer": """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    keys = torch.cat([key_cache, key[:, :, None]], dim=2)
    values = torch.cat([value_cache, value[:, :, None]], dim=2)
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
""",
    "asked_before_stored": changed(
        "5.5",
        (
            f"    {KEY_STORE}\n",
            "    old_keys, old_values = key_cache.clone(), value_cache.clone()\n    " + KEY_STORE + "\n",
        ),
        ("grouped @ key_cache", "grouped @ old_keys"),
        ("weights @ value_cache", "weights @ old_values"),
    ),
    "masked_after_softmax": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "weights = torch.softmax(scores, dim=-1) * ~empty[:, None, None]",
        ),
    ),
    "hidden_scores_zero": changed("5.5", ("empty[:, None, None], -math.inf)", "empty[:, None, None], 0.0)")),
    "whole_buffer__masked_after": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "weights = torch.softmax(scores, dim=-1)",
        ),
    ),
    "only_first_slot": by_sequence(SDPA_BODY.replace("k, v)", "k, v, is_causal=True)")),
    "longest_for_all": changed("5.5", seen("> past.max().expand(batch, 1)")),
    "past_of_first_sequence": by_sequence(SDPA_BODY.replace("\nkey_cache", "\np = int(past[0])\nkey_cache", 1)),
    "every_past": changed(
        "5.5",
        (KEY_STORE, "key_cache[:, :, past.long()] = key[:, :, None]"),
        (VALUE_STORE, "value_cache[:, :, past.long()] = value[:, :, None]"),
    ),
    "slot_too_early__lengths": by_sequence(SDPA_BODY.replace("[b, :, p]", "[b, :, p - 1]")),
    "not_stored": by_sequence("""
k = torch.cat([key_cache[b : b + 1, :, :p], key[b : b + 1, :, None]], dim=2).repeat_interleave(group, dim=1)
v = torch.cat([value_cache[b : b + 1, :, :p], value[b : b + 1, :, None]], dim=2).repeat_interleave(group, dim=1)
outputs.append(F.scaled_dot_product_attention(query[b : b + 1, :, None], k, v)[:, :, 0])
"""),
    "value_not_stored": changed("5.5", (f"    {VALUE_STORE}\n", "")),
    "heads_by_modulo": by_sequence(SDPA_BODY.replace("repeat_interleave(group, dim=1)", "repeat(1, group, 1, 1)")),
    "heads_by_modulo__and_too_few": changed(
        "5.5",
        (
            "query.view(batch, key_heads, query_heads // key_heads, head_dim)",
            "query.view(batch, query_heads // key_heads, key_heads, head_dim).transpose(1, 2)",
        ),
        ("(weights @ value_cache).reshape", "(weights @ value_cache).transpose(1, 2).reshape"),
        seen(">= past[:, None]"),
    ),
    "past_of_first_sequence__and_not_scaled": changed(
        "5.5", (STORES, "    past = past[:1].expand(batch)\n" + STORES), (" / math.sqrt(head_dim)", "")
    ),
    "not_scaled__and_hidden_scores_not_low": changed("5.5", (" / math.sqrt(head_dim)", ""), ("-math.inf)", "-1000.0)")),
    "heads_by_modulo__and_masked_after": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "weights = torch.softmax(scores, dim=-1) * ~empty[:, None, None]",
        ),
        (
            "query.view(batch, key_heads, query_heads // key_heads, head_dim)",
            "query.view(batch, query_heads // key_heads, key_heads, head_dim).transpose(1, 2)",
        ),
    ),
    "keys_stored_as_values": changed("5.5", (VALUE_STORE, VALUE_STORE.replace("= value", "= key"))),
    "first_head_only": by_sequence(
        SDPA_BODY.replace(".repeat_interleave(group, dim=1)", "[:, :1].expand(-1, query.shape[1], -1, -1)")
    ),
    "not_scaled": changed("5.5", (" / math.sqrt(head_dim)", "")),
    "scaled_by_head_dim": changed("5.5", (" / math.sqrt(head_dim)", " / head_dim")),
    "one_token_too_few": changed("5.5", seen(">= past[:, None]")),
    "one_token_too_few__beside_a_low_stand_in": changed("5.5", seen(">= past[:, None]"), ("-math.inf)", "-1e30)")),
    "one_token_too_few__stored_afterwards": changed(
        "5.5",
        (STORES, ""),
        seen(">= past[:, None]"),
        (
            "    return (weights @ value_cache)",
            "    output = weights @ value_cache\n" + STORES + "    return output",
        ),
    ),
    "one_token_too_few__zeros": by_sequence(SDPA_BODY.replace(": p + 1]", ": max(p, 1)]")),
    "written_into_a_copy": changed(
        "5.5",
        (KEY_STORE, "key_cache = key_cache.contiguous()\n    " + KEY_STORE),
        (VALUE_STORE, "value_cache = value_cache.contiguous()\n    " + VALUE_STORE),
    ),
    "written_into_a_copy__two_dimensions": changed(
        "5.5",
        (
            KEY_STORE,
            "rows = torch.arange(batch * key_heads)\n    slots = past.long().repeat_interleave(key_heads)\n"
            "    keys = key_cache.reshape(batch * key_heads, capacity, head_dim)\n"
            "    values = value_cache.reshape(batch * key_heads, capacity, head_dim)\n"
            "    keys[rows, slots] = key.reshape(-1, head_dim)",
        ),
        (VALUE_STORE, "values[rows, slots] = value.reshape(-1, head_dim)"),
        ("key_cache.transpose(2, 3)", "keys.view(batch, key_heads, capacity, head_dim).transpose(2, 3)"),
        ("weights @ value_cache", "weights @ values.view(batch, key_heads, capacity, head_dim)"),
    ),
    "maximum_not_subtracted": changed(
        "5.5",
        (
            "torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "torch.exp(scores.masked_fill(empty[:, None, None], -math.inf))",
        ),
        ("return (weights", "weights = weights / weights.sum(-1, keepdim=True)\n    return (weights"),
    ),
}


UNUSUAL = {
    "weights by the log of their sum": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "scores = scores.masked_fill(empty[:, None, None], -math.inf)\n"
            "    weights = torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))",
        ),
    ),
    "SDPA for each sequence": by_sequence(SDPA_BODY),
    "the new token beside the cache": """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for b, p in enumerate(past.tolist()):
        for h in range(query.shape[1]):
            keys = torch.cat([key_cache[b, h // group, :p], key[b, h // group][None]]).float()
            values = torch.cat([value_cache[b, h // group, :p], value[b, h // group][None]]).float()
            weights = torch.softmax(keys @ query[b, h].float() * query.shape[-1] ** -0.5, dim=0)
            output[b, h] = (weights @ values).to(query.dtype)
        key_cache[b, :, p] = key[b]
        value_cache[b, :, p] = value[b]
    return output
""",
    "one masked SDPA call": """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    index = past.long().view(-1, 1, 1, 1).expand(-1, key.shape[1], 1, key.shape[2])
    key_cache.scatter_(2, index, key[:, :, None])
    value_cache.scatter_(2, index, value[:, :, None])
    mask = torch.arange(key_cache.shape[2], device=past.device)[None, None, None] <= past.view(-1, 1, 1, 1)
    longest = int(past.max()) + 1
    return F.scaled_dot_product_attention(
        query.unsqueeze(2), key_cache[:, :, :longest], value_cache[:, :, :longest], attn_mask=mask[..., :longest],
        enable_gqa=True).squeeze(2)
""",
    "einsum": """# Exercise 5.5 · One step of attention over a cache
def cached_attention_step(query, key, value, key_cache, value_cache, past):
    for b in range(query.shape[0]):
        key_cache[b, :, past[b]] = key[b]
        value_cache[b, :, past[b]] = value[b]
    B, KH, C, D = key_cache.shape
    q = query.reshape(B, KH, -1, D).float()
    s = torch.einsum("bkgd,bkcd->bkgc", q, key_cache.float()) / D**0.5
    s = s + torch.where(torch.arange(C, device=s.device)[None] <= past[:, None], 0.0, -torch.inf)[:, None, None]
    w = torch.exp(s - s.amax(-1, keepdim=True))
    o = torch.einsum("bkgc,bkcd->bkgd", w / w.sum(-1, keepdim=True), value_cache.float())
    return o.reshape(query.shape).to(query.dtype)
""",
    "a kernel": """# Exercise 5.5 · One step of attention over a cache
@triton.jit
def decode_kernel(q, k, v, kc, vc, past, o, heads, group, cb, ch, cs, vb, vh, vs, D: tl.constexpr, N: tl.constexpr):
    h, b = tl.program_id(0), tl.program_id(1)
    kv = h // group
    d, p = tl.arange(0, D), tl.load(past + b)
    row = (b * (heads // group) + kv) * D + d
    key, value = tl.load(k + row), tl.load(v + row)
    kc += b * cb + kv * ch
    vc += b * vb + kv * vh
    if h % group == 0:
        tl.store(kc + p * cs + d, key)
        tl.store(vc + p * vs + d, value)
    query = tl.load(q + (b * heads + h) * D + d).to(tl.float32) * (1 / tl.sqrt(D * 1.0))
    m = tl.sum(query * key.to(tl.float32))
    total, acc = m * 0 + 1.0, value.to(tl.float32)
    for start in range(0, p, N):
        n = start + tl.arange(0, N)
        keys = tl.load(kc + n[:, None] * cs + d[None], mask=(n < p)[:, None], other=0.0).to(tl.float32)
        values = tl.load(vc + n[:, None] * vs + d[None], mask=(n < p)[:, None], other=0.0).to(tl.float32)
        s = tl.where(n < p, tl.sum(keys * query[None], axis=1), float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=0))
        w = tl.exp(s - new)
        r = tl.exp(m - new)
        total = total * r + tl.sum(w, axis=0)
        acc = acc * r + tl.sum(w[:, None] * values, axis=0)
        m = new
    tl.store(o + (b * heads + h) * D + d, (acc / total).to(o.dtype.element_ty))

def cached_attention_step(query, key, value, key_cache, value_cache, past):
    output = torch.empty_like(query)
    batch, heads, head_dim = query.shape
    decode_kernel[(heads, batch)](
        query, key, value, key_cache, value_cache, past, output, heads, heads // key.shape[1],
        *key_cache.stride()[:3], *value_cache.stride()[:3], D=head_dim, N=32)
    return output
""",
}


WRONG |= {
    "finite_for_minus_infinity": changed(
        "5.5",
        (
            "weights = torch.softmax(scores.masked_fill(empty[:, None, None], -math.inf), dim=-1)",
            "scores = scores.masked_fill(empty[:, None, None], -math.inf)\n"
            "    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True).clamp(min=-1e6))\n"
            "    weights = weights / weights.sum(dim=-1, keepdim=True)",
        ),
    ),
    "hidden_scores_not_low__ten_thousand": changed("5.5", ("-math.inf", "-1e4")),
    "hidden_scores_not_low__a_million": changed("5.5", ("-math.inf", "-1e6")),
}


FIRST_TOKEN = (
    "    grouped = query.view",
    "    if batch == 1 and past.item() == 0 and query_heads == key_heads:\n"
    "        return value_cache[:, :, 0]\n    grouped = query.view",
)
WRONG |= {"argument_returned": changed("5.5", FIRST_TOKEN)}
UNUSUAL |= {
    "of a first token a copy of its value": changed(
        "5.5", (FIRST_TOKEN[0], FIRST_TOKEN[1].replace("[:, :, 0]", "[:, :, 0].clone()"))
    ),
}
