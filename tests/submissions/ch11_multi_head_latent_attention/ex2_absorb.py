"""Wrong answers to exercise 11.2, and unusual right ones."""

from tests.submissions.edits import changed

SCORES = "scores = absorbed @ latents.T + query_rope @ rope_keys.T"
SCALED = "scores / math.sqrt(query.shape[1] + query_rope.shape[1])"
KEYS = 'torch.einsum("hd,hdc->hc", query, key_up)'
VALUES = 'torch.einsum("hc,hvc->hv", mixed, value_up)'
SLICES = "latents, rope_keys = cache[:, :latent_dim], cache[:, latent_dim:]"
ROOT = "math.sqrt(query.shape[1] + query_rope.shape[1])"

EXPANDED = """# Exercise 11.2 · Absorb the matrices
def absorbed_step(query, query_rope, cache, key_up, value_up):
    L = key_up.shape[2]
    latents, rope_keys = cache[:, :L], cache[:, L:]
    keys, values = latents @ key_up.transpose(1, 2), latents @ value_up.transpose(1, 2)
    scores = (keys @ query[:, :, None])[..., 0] + query_rope @ rope_keys.T
    weights = torch.softmax(scores / (query.shape[1] + query_rope.shape[1]) ** 0.5, -1)
    return (weights[:, None] @ values)[:, 0]
"""

HEAD_BY_HEAD = """# Exercise 11.2 · Absorb the matrices
def absorbed_step(query, query_rope, cache, key_up, value_up):
    L = key_up.shape[2]
    outputs = []
    for h in range(query.shape[0]):
        key = cache[:, :L] @ key_up[h].T
        scores = key @ query[h] + cache[:, L:] @ query_rope[h]
        weights = torch.softmax(scores / (query.shape[1] + query_rope.shape[1]) ** 0.5, -1)
        outputs.append(value_up[h] @ (weights @ cache[:, :L]))
    return torch.stack(outputs)
"""

WRONG = {
    "keys_made_for_a_head": EXPANDED,
    "keys_made_for_a_head__one_after_the_other": HEAD_BY_HEAD,
    "keys_made_for_a_head__values_alone": changed(
        "11.2",
        ("mixed = weights @ latents", "values = latents @ value_up.transpose(1, 2)"),
        ('torch.einsum("hc,hvc->hv", mixed, value_up)', "(weights[:, None] @ values)[:, 0]"),
    ),
    "too_much_memory": changed(
        "11.2", (SLICES, SLICES.replace("cache[:, :latent_dim],", "cache[:, :latent_dim].contiguous(),"))
    ),
    "rope_forgotten": changed("11.2", (" + query_rope @ rope_keys.T", "")),
    "rope_scaled_apart": changed(
        "11.2", (SCORES, f"scores = absorbed @ latents.T / {ROOT} + query_rope @ rope_keys.T"), (SCALED, "scores")
    ),
    "rope_scaled_apart__each_by_its_own": changed(
        "11.2",
        (
            SCORES,
            "scores = absorbed @ latents.T / query.shape[1] ** 0.5\n"
            "    scores = scores + query_rope @ rope_keys.T / query_rope.shape[1] ** 0.5",
        ),
        (SCALED, "scores"),
    ),
    "scale_by_the_latent": changed("11.2", (ROOT, "math.sqrt(latent_dim)")),
    "scale_by_the_latent__and_rope": changed("11.2", (ROOT, "math.sqrt(cache.shape[1])")),
    "scale_without_rope": changed("11.2", (ROOT, "math.sqrt(query.shape[1])")),
    "scale_missing": changed("11.2", (SCALED, "scores")),
    "softmax_over_heads": changed("11.2", ("dim=1)", "dim=0)")),
    "no_maximum": changed(
        "11.2",
        (f"torch.softmax({SCALED}, dim=1)", f"({SCALED}).exp()\n    weights = weights / weights.sum(1, keepdim=True)"),
    ),
    "measured_from_too_high": changed(
        "11.2",
        (
            f"torch.softmax({SCALED}, dim=1)",
            f"{SCALED}\n    weights = (weights - weights.abs().amax(1, keepdim=True)).exp()",
        ),
        ("mixed = weights @ latents", "mixed = weights @ latents / weights.sum(1, keepdim=True)"),
    ),
    "rotary_key_first": changed(
        "11.2", (SLICES, "latents, rope_keys = cache[:, -latent_dim:], cache[:, :-latent_dim]")
    ),
    "first_matrix_for_all": changed("11.2", ('torch.einsum("hd,hdc->hc", query, key_up)', "query @ key_up[0]")),
    "computed_in_16_bits": changed("11.2", ("mixed = weights @", "mixed = weights.half().float() @")),
    "keys_made_for_a_head__by_attention": changed(
        "11.2",
        (
            "mixed = weights @ latents",
            "long = torch.cat([absorbed, query_rope], 1)[:, None]\n"
            "    keys, values = (rows.expand(len(query), -1, -1) for rows in (cache, latents))\n"
            f"    mixed = F.scaled_dot_product_attention(long, keys, values, scale=1 / {ROOT})[:, 0]",
        ),
    ),
    "latent_part_forgotten": changed("11.2", ("absorbed @ latents.T + ", "")),
    "scaled_after_the_softmax": changed(
        "11.2", (f"torch.softmax({SCALED}, dim=1)", f"torch.softmax(scores, dim=1) / {ROOT}")
    ),
    "softmax_of_each_part": changed(
        "11.2",
        (
            f"torch.softmax({SCALED}, dim=1)",
            f"(torch.softmax(absorbed @ latents.T / {ROOT}, dim=1)\n"
            f"               + torch.softmax(query_rope @ rope_keys.T / {ROOT}, dim=1)) / 2",
        ),
    ),
    "softmax_of_each_part__added": changed(
        "11.2",
        (f"torch.softmax({SCALED}, dim=1)",
         f"torch.softmax(absorbed @ latents.T / {ROOT}, dim=1) "
         f"+ torch.softmax(query_rope @ rope_keys.T / {ROOT}, dim=1)"),
    ),
    "softmax_of_each_part__product": changed(
        "11.2",
        (f"torch.softmax({SCALED}, dim=1)",
         f"torch.softmax(absorbed @ latents.T / {ROOT}, dim=1) "
         f"* torch.softmax(query_rope @ rope_keys.T / {ROOT}, dim=1)"),
    ),
    "rope_forgotten__and_one_softmax": changed(
        "11.2", (" + query_rope @ rope_keys.T", ""),
        (f"torch.softmax({SCALED}, dim=1)", f"torch.softmax(({SCALED}).flatten(), dim=0).view_as(scores)"),
    ),
    # Over the heads a rotary part that all heads share cancels, as one that is missing: only the softmax can be named.
    "softmax_over_heads__and_rope_forgotten": changed(
        "11.2", (" + query_rope @ rope_keys.T", ""), ("dim=1)", "dim=0)")
    ),
    "rope_scaled_apart__each_as_long_as_it_is": changed(
        "11.2",
        (
            SCORES,
            "scores = absorbed @ latents.T / latent_dim ** 0.5\n"
            "    scores = scores + query_rope @ rope_keys.T / query_rope.shape[1] ** 0.5",
        ),
        (SCALED, "scores"),
    ),
    "summed_over_all_heads": changed("11.2", ("hd,hdc->hc", "hd,gdc->hc")),
    "summed_over_all_heads__values": changed("11.2", ("hc,hvc->hv", "hc,gvc->hv")),
    "reshaped_for_transposed": changed("11.2", ("latents.T", "latents.reshape(latent_dim, -1)")),
    "reshaped_for_transposed__rope": changed("11.2", ("rope_keys.T", "rope_keys.reshape(query_rope.shape[1], -1)")),
    "reshaped_for_transposed__rows": changed(
        "11.2", (SCORES, "scores = torch.cat([absorbed, query_rope], 1) @ cache.reshape(cache.shape[1], -1)")
    ),
    "reshaped_for_transposed__key_matrices": changed(
        "11.2", (KEYS, "(key_up.reshape(len(query), latent_dim, -1) @ query[:, :, None])[:, :, 0]")
    ),
    "reshaped_for_transposed__value_matrices": changed(
        "11.2", (VALUES, "(mixed[:, None] @ value_up.reshape(len(query), latent_dim, -1))[:, 0]")
    ),
    "scale_without_rope__and_reshaped_for_transposed": changed(
        "11.2", ("latents.T", "latents.reshape(latent_dim, -1)"), (ROOT, "math.sqrt(query.shape[1])")
    ),
    "rope_forgotten__and_scale_without_rope": changed(
        "11.2", (" + query_rope @ rope_keys.T", ""), (ROOT, "math.sqrt(query.shape[1])")
    ),
}

UNUSUAL = {
    "one product of joined queries": changed(
        "11.2", (SCORES, "scores = torch.cat([absorbed, query_rope], dim=1) @ cache.T")
    ),
    "weights from the log-sum-exp": changed(
        "11.2",
        (f"torch.softmax({SCALED}, dim=1)", f"{SCALED}\n    weights = (weights - weights.logsumexp(1, True)).exp()"),
    ),
    "a loop over heads": """# Exercise 11.2 · Absorb the matrices
def absorbed_step(query, query_rope, cache, key_up, value_up):
    heads, length, L = query.shape[0], cache.shape[0], key_up.shape[2]
    out = torch.empty(heads, value_up.shape[1])
    for h in range(heads):
        long = torch.cat([query[h] @ key_up[h], query_rope[h]])
        s = cache @ long * (query.shape[1] + query_rope.shape[1]) ** -0.5
        w = torch.exp(s - s.max())
        out[h] = value_up[h] @ (w @ cache[:, :L]) / w.sum()
    return out
""",
    "block by block, with a running maximum": """# Exercise 11.2 · Absorb the matrices
def absorbed_step(query, query_rope, cache, key_up, value_up):
    L, scale = key_up.shape[2], (query.shape[1] + query_rope.shape[1]) ** -0.5
    long = torch.cat([(query[:, None] @ key_up)[:, 0], query_rope], 1) * scale
    top = torch.full((query.shape[0], 1), -math.inf)
    total, mixed = torch.zeros(query.shape[0], 1), torch.zeros(query.shape[0], L)
    for rows in cache.split(16):
        s = long @ rows.T
        new = torch.maximum(top, s.amax(1, keepdim=True))
        w, shrink = torch.exp(s - new), torch.exp(top - new)
        total, mixed, top = total * shrink + w.sum(1, keepdim=True), mixed * shrink + w @ rows[:, :L], new
    return (value_up @ (mixed / total)[:, :, None])[:, :, 0]
""",
}
