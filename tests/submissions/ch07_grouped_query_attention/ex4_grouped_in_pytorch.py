"""Wrong answers to exercise 7.4, and unusual right ones."""

from tests.submissions.edits import changed

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


WRONG = {
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
    "scale_missing__and_softmax_over_the_group": changed(
        "7.4", (" / math.sqrt(query.shape[-1])", ""), (SOFTMAX, "torch.softmax(scores, dim=2)")
    ),
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
    "products_kept": """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    query = query.unflatten(1, (key.shape[1], -1))[:, :, :, None]
    scores = (query * key[:, :, None]).sum(-1) / query.shape[-1] ** 0.5
    return (torch.softmax(scores, -1)[..., None] * value[:, :, None]).sum(-2).flatten(1, 2)
""",
    "computed_in_16_bits": changed("7.4", (SOFTMAX, "torch.softmax(scores, dim=-1).half().to(value.dtype)")),
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


SHARED_BY_LOG_SUM_EXP = """# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query, key, value):
    output = torch.empty_like(query)
    group = query.shape[1] // key.shape[1]
    for b in range(query.shape[0]):
        for h in range(key.shape[1]):
            rows = slice(h * group, (h + 1) * group)
            scores = query[b, rows] @ key[b, h].T / math.sqrt(query.shape[2])
            output[b, rows] = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True)) @ value[b, h]
    return output
"""


UNUSUAL = {
        "exp(score - logsumexp)": SHARED_BY_LOG_SUM_EXP,
        "einsum": SHARED_BY_EINSUM,
        "head by head": SHARED_BY_LOOPS,
        "keys times queries": SHARED_TURNED,
        "in float32": SHARED_IN_FLOAT32,
        "online": SHARED_ONLINE,
    }
