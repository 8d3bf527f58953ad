"""Wrong answers to exercise 12.3, and unusual right ones."""

from tests.submissions.edits import changed, edited

FOLDED = "(k_scale / math.sqrt(head_dim))[:, None, None]"
RESULT = "(output * v_scale[:, None, None])"
SCORES = "scores = torch.cat([grouped @ keys[:, n : n + 64].float().transpose(1, 2) for n in tiles], dim=2)"
SOFTMAX = "torch.softmax(scores, dim=2)"

ONLINE = """# Exercise 12.3 · Where the scales go
def fp8_decode(query, keys, values, k_scale, v_scale):
    kv, length, d = keys.shape
    q = query.reshape(kv, -1, d) * k_scale[:, None, None] * d**-0.5
    top = torch.full((kv, q.shape[1], 1), -math.inf)
    total, acc = torch.zeros_like(top), torch.zeros_like(q)
    for n in range(0, length, 32):
        k, v = keys[:, n : n + 32].float(), values[:, n : n + 32].float()
        s = q @ k.mT
        new = torch.maximum(top, s.amax(-1, keepdim=True))
        w, shrink = torch.exp(s - new), torch.exp(top - new)
        total = total * shrink + w.sum(-1, keepdim=True)
        acc = acc * shrink + w @ v
        top = new
    return (acc / total * v_scale[:, None, None]).reshape(query.shape)
"""

WRONG = {
    # sglang#18882: the scales are never passed and stay 1.
    "scales_left_at_1": changed("12.3", (FOLDED, "head_dim**-0.5"), (RESULT, "output")),
    "key_scale_missing": changed("12.3", (FOLDED, "head_dim**-0.5")),
    "key_scale_missing__on_the_weights": changed(
        "12.3",
        (FOLDED, "head_dim**-0.5"),
        (
            SOFTMAX,
            "torch.exp(scores - scores.amax(2, keepdim=True)) * k_scale[:, None, None]\n"
            "    weights = weights / weights.sum(2, keepdim=True)",
        ),
    ),
    "value_scale_missing": changed("12.3", (RESULT, "output")),
    "key_scale_twice": changed("12.3", (SCORES, f"{SCORES} * k_scale[:, None, None]")),
    "value_scale_twice": changed("12.3", (RESULT, f"({RESULT} * v_scale[:, None, None])")),
    "value_scale_in_every_tile": edited(
        ONLINE,
        ("acc = acc * shrink + w @ v", "acc = (acc * shrink + w @ v) * v_scale[:, None, None]"),
        ("acc / total * v_scale[:, None, None]", "acc / total"),
    ),
    "value_scale_in_every_tile__of_64": edited(
        ONLINE,
        ("32", "64"),
        ("acc = acc * shrink + w @ v", "acc = (acc * shrink + w @ v) * v_scale[:, None, None]"),
        ("acc / total * v_scale[:, None, None]", "acc / total"),
    ),
    "scales_exchanged": changed("12.3", (FOLDED, FOLDED.replace("k_", "v_")), (RESULT, RESULT.replace("v_", "k_"))),
    "key_scale_divides": changed("12.3", (FOLDED, "(1 / k_scale / math.sqrt(head_dim))[:, None, None]")),
    "first_scale_for_all": changed(
        "12.3", (FOLDED, "(k_scale[0] / math.sqrt(head_dim))"), (RESULT, "(output * v_scale[0])")
    ),
    "scales_by_modulo": changed(
        "12.3",
        (RESULT, "output.reshape(query.shape)"),
        (
            ".reshape(query.shape).reshape(query.shape)",
            ".reshape(query.shape) * v_scale.repeat(len(query) // key_heads)[:, None]",
        ),
        (
            "grouped = query.reshape",
            "query = query * k_scale.repeat(len(query) // keys.shape[0])[:, None]\n    grouped = query.reshape",
        ),
        (FOLDED, "head_dim**-0.5"),
    ),
    "key_scale_for_both": changed("12.3", (RESULT, RESULT.replace("v_", "k_"))),
    "value_scale_for_both": changed("12.3", (FOLDED, FOLDED.replace("k_", "v_"))),
    "both_scales_on_the_query": changed(
        "12.3", (FOLDED, "(k_scale * v_scale / math.sqrt(head_dim))[:, None, None]"), (RESULT, "output")
    ),
    "key_scale_after_the_softmax": changed(
        "12.3", (FOLDED, "head_dim**-0.5"), (SOFTMAX, f"{SOFTMAX} * k_scale[:, None, None]")
    ),
    "query_rounded": changed("12.3", ("grouped * (", "grouped.to(torch.float8_e4m3fn).float() * (")),
    "query_rounded__to_half": changed("12.3", ("grouped * (", "grouped.half().float() * (")),
    "query_rounded__scaled": edited(
        ONLINE, ("* d**-0.5\n", "* d**-0.5\n    q = q.to(torch.bfloat16).float()\n")
    ),
    "one_softmax_a_tile": changed(
        "12.3",
        ("scores = torch.cat([", "weights = torch.cat([torch.softmax("),
        (".transpose(1, 2) for", ".transpose(1, 2), dim=2) for"),
        ("    weights = torch.softmax(scores, dim=2)  # [key_heads, group, length]\n", ""),
    ),
    "mean_of_the_tiles": changed(
        "12.3",
        ("scores = torch.cat([", "weights = torch.cat([torch.softmax("),
        (".transpose(1, 2) for", ".transpose(1, 2), dim=2) / len(tiles) for"),
        ("    weights = torch.softmax(scores, dim=2)  # [key_heads, group, length]\n", ""),
    ),
    "mean_of_the_tiles__of_32": edited(
        ONLINE,
        ("torch.maximum(top, s.amax(-1, keepdim=True))", "s.amax(-1, keepdim=True)"),
        ("total * shrink + w.sum(-1, keepdim=True)", "total + 1"),
        ("acc * shrink + w @ v", "acc + w / w.sum(-1, keepdim=True) @ v"),
    ),
    "heads_by_modulo": changed(
        "12.3",
        ("query.reshape(key_heads, -1, head_dim)", "query.reshape(-1, key_heads, head_dim).transpose(0, 1)"),
        (".reshape(query.shape)\n", ".transpose(0, 1).reshape(query.shape)\n"),
    ),
    "codes_as_bytes__values": changed(
        "12.3", ("values[:, n : n + 64].float()", "values[:, n : n + 64].view(torch.uint8).float()")
    ),
    "scales_exchanged__and_root_missing": changed(
        "12.3", (FOLDED, "v_scale[:, None, None]"), (RESULT, RESULT.replace("v_", "k_"))
    ),
    "key_scale_missing__and_root_missing": changed("12.3", (FOLDED, "1")),
    "value_scale_missing__and_sum_not_rescaled": edited(
        ONLINE, ("32", "64"), ("total * shrink", "total"), (" / total * v_scale[:, None, None]", " / total")
    ),
    "value_scale_missing__and_key_scale_twice": changed(
        "12.3", (SCORES, f"{SCORES} * k_scale[:, None, None]"), (RESULT, "output")
    ),
    "codes_as_bytes": changed("12.3", (".float()", ".view(torch.uint8).float()")),
    "root_missing": changed("12.3", (FOLDED, "k_scale[:, None, None]")),
    "no_maximum": changed("12.3", (SOFTMAX, "scores.exp() / scores.exp().sum(2, keepdim=True)")),
    "sum_not_rescaled": edited(ONLINE, ("total * shrink", "total")),
    "not_divided": edited(ONLINE, ("acc / total * v_scale", "acc * v_scale")),
    # sglang#23134: the whole pool is dequantised in each step.
    "scaled_element_by_element__all_at_once": """# Exercise 12.3 · Where the scales go
def fp8_decode(query, keys, values, k_scale, v_scale):
    k, v = keys.float() * k_scale[:, None, None], values.float() * v_scale[:, None, None]
    q = query.reshape(len(keys), -1, query.shape[1])
    weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1)
    return (weights @ v).reshape(query.shape)
""",
    "whole_cache_dequantised": changed("12.3", (SCORES, "scores = grouped @ keys.float().transpose(1, 2)")),
    "scaled_element_by_element": edited(
        ONLINE,
        (" * k_scale[:, None, None] * d", " * d"),
        (" / total * v_scale[:, None, None]", " / total"),
        (
            "k, v = keys[:, n : n + 32].float(), values[:, n : n + 32].float()",
            "k = keys[:, n : n + 32].float() * k_scale[:, None, None]\n"
            "        v = values[:, n : n + 32].float() * v_scale[:, None, None]",
        ),
    ),
    # Each multiplication is small enough, but there is one for each code.
    "scaled_element_by_element__key_by_key": changed(
        "12.3",
        (FOLDED, "head_dim**-0.5"),
        (
            SCORES,
            "scores = torch.stack([(grouped @ (keys[:, n].float() * k_scale[:, None])[:, :, None])[:, :, 0] "
            "for n in range(length)], dim=2)",
        ),
    ),
    "scaled_element_by_element__value_by_value": changed(
        "12.3",
        (RESULT, "output"),
        ("    for n in tiles:", "    for n in range(length):"),
        (
            "weights[:, :, n : n + 64] @ values[:, n : n + 64].float()",
            "weights[:, :, n : n + 1] @ (values[:, n : n + 1].float() * v_scale[:, None, None])",
        ),
    ),
    # Its tile of 64 tokens is the whole cache in some cases, and was called whole_cache_dequantised.
    "scaled_element_by_element__einsum": changed(
        "12.3",
        (FOLDED, "head_dim**-0.5"),
        (
            "grouped @ keys[:, n : n + 64].float().transpose(1, 2)",
            'grouped @ torch.einsum("knd,k->kdn", keys[:, n : n + 64].float(), k_scale)',
        ),
    ),
    "scales_by_modulo__keys": changed(
        "12.3",
        (FOLDED, "head_dim**-0.5"),
        (
            "grouped = query.reshape",
            "query = query * k_scale.repeat(len(query) // key_heads)[:, None]\n    grouped = query.reshape",
        ),
    ),
    "last_tile_left_out": changed("12.3", ("range(0, length, 64)", "range(0, max(length - 63, 1), 64)")),
    "last_tile_left_out__online": edited(ONLINE, ("range(0, length, 32)", "range(0, length - 31, 32)")),
    "softmax_over_heads": changed("12.3", (SOFTMAX, "torch.softmax(scores, dim=1)")),
    "key_scale_missing__and_value_scale_twice": changed(
        "12.3", (FOLDED, "head_dim**-0.5"), (RESULT, f"({RESULT} * v_scale[:, None, None])")
    ),
}

UNUSUAL = {
    "online, tiles of 32": ONLINE,
    "the scale on the scores": changed(
        "12.3", (FOLDED, "head_dim**-0.5"), (SOFTMAX, "torch.softmax(scores * k_scale[:, None, None], dim=2)")
    ),
    "v_scale on the normalised weights": changed(
        "12.3", (SOFTMAX, f"{SOFTMAX} * v_scale[:, None, None]"), (RESULT, "output")
    ),
    "k_scale last in an einsum": changed(
        "12.3",
        (FOLDED, "head_dim**-0.5"),
        (
            "grouped @ keys[:, n : n + 64].float().transpose(1, 2)",
            'torch.einsum("kgd,knd,k->kgn", grouped, keys[:, n : n + 64].float(), k_scale)',
        ),
    ),
    "v_scale on what each tile adds": edited(
        ONLINE, ("w @ v", "w @ v * v_scale[:, None, None]"), ("acc / total * v_scale[:, None, None]", "acc / total")
    ),
    "a query head at a time": """# Exercise 12.3 · Where the scales go
def fp8_decode(query, keys, values, k_scale, v_scale):
    out, group = torch.empty(query.shape), len(query) // len(keys)
    for h in range(len(query)):
        kv = h // group
        s = torch.cat([part.float() @ query[h] for part in keys[kv].split(50)]) * (k_scale[kv] * query.shape[1] ** -0.5)
        w = (s - s.logsumexp(0)).exp() * v_scale[kv]
        out[h] = sum(p @ part.float() for p, part in zip(w.split(50), values[kv].split(50)))
    return out
""",
}
