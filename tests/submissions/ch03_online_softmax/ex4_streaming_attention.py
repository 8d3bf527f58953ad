"""Wrong answers to exercise 3.4, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
        "cast_before_the_sum__query_scaled_first": changed(
            "3.4", ("query = query.float() * scale", "query = (query * scale).float()")
        ),
        "maximum_before_the_scale__from_the_first_tile": """
def streaming_attention(query, read, scale):
    query, m = query.float(), None
    for keys, values in read():
        raw = keys.float() @ query
        new = raw.max() if m is None else torch.maximum(m, raw.max())
        w = torch.exp((raw - new) * scale)
        if m is None:
            total, acc = w.sum(), w @ values.float()
        else:
            rescale = torch.exp((m - new) * scale)
            total, acc = total * rescale + w.sum(), acc * rescale + w @ values.float()
        m = new
    return acc / total
""",
        "no_running_max": """
def streaming_attention(query, read, scale):
    total = accumulator = 0.0
    for key_tile, value_tile in read():
        weights = torch.exp(key_tile.float() @ query.float() * scale)
        total, accumulator = total + weights.sum(), accumulator + weights @ value_tile.float()
    return accumulator / total
""",
        "accumulator_not_rescaled": changed("3.4", ("accumulator * rescale + ", "accumulator + ")),
        "sum_not_rescaled": changed("3.4", ("running_sum * rescale + ", "running_sum + ")),
        "nothing_rescaled": changed(
            "3.4",
            (
                "rescale = torch.exp(running_max - new_max)",
                "running_max = new_max\n        rescale = torch.exp(running_max - new_max)",
            ),
        ),
        "divided_at_every_tile": changed(
            "3.4",
            (
                "        running_max = new_max",
                "        accumulator = accumulator / running_sum\n        running_max = new_max",
            ),
            ("return accumulator / running_sum", "return accumulator"),
        ),
        "divided_at_every_tile__and_at_the_end": changed(
            "3.4",
            (
                "        running_max = new_max",
                "        accumulator = accumulator / running_sum\n        running_max = new_max",
            ),
        ),
        "nan_from_the_start": changed("3.4", ("running_max - new_max", "new_max - running_max")),
        "tile_not_rescaled": changed("3.4", ("torch.exp(scores - new_max)", "torch.exp(scores - scores.max())")),
        "not_normalised": changed("3.4", ("return accumulator / running_sum", "return accumulator")),
        "averages_without_weights": """
def streaming_attention(query, read, scale):
    averages = []
    for key_tile, value_tile in read():
        scores = key_tile.float() @ query.float() * scale
        weights = torch.exp(scores - scores.max())
        averages.append((weights / weights.sum()) @ value_tile.float())
    return torch.stack(averages).mean(dim=0)
""",
        "last_tile_only__maximum_not_updated": changed("3.4", ("        running_max = new_max\n", "")),
        "last_tile_only": changed("3.4", ("running_sum * rescale + ", ""), ("accumulator * rescale + ", "")),
        "scale_missing": changed("3.4", ("query.float() * scale", "query.float()")),
        "scale_ignored": changed("3.4", ("query.float() * scale", "query.float() * query.shape[0] ** -0.5")),
        "scale_twice": changed(
            "3.4", ("scores = key_tile.float() @ query", "scores = key_tile.float() @ query * scale")
        ),
        "kept_copies": """
def streaming_attention(query, read, scale):
    pairs = [(keys.float().clone(), values.float().clone()) for keys, values in read()]
    keys, values = (torch.cat(parts) for parts in zip(*pairs))
    scores = keys @ query.float() * scale
    weights = torch.exp(scores - scores.max())
    return weights @ values / weights.sum()
""",
        "kept_copies__of_the_values": """
def streaming_attention(query, read, scale):
    parts = [(scale * (keys.float() @ query.float()), values.float().clone()) for keys, values in read()]
    m = torch.stack([scores.max() for scores, _ in parts]).max()
    total = sum(torch.exp(scores - m).sum() for scores, _ in parts)
    return sum(torch.exp(scores - m) @ values for scores, values in parts) / total
""",
        "kept_the_tiles": """
def streaming_attention(query, read, scale):
    pairs = list(read())
    keys, values = torch.cat([pair[0] for pair in pairs]).float(), torch.cat([pair[1] for pair in pairs]).float()
    scores = keys @ query.float() * scale
    weights = torch.exp(scores - scores.max())
    return (weights / weights.sum()) @ values
""",
        "kept_the_tiles__of_values": """
def streaming_attention(query, read, scale):
    scores, tiles = [], []
    for key_tile, value_tile in read():
        scores.append(key_tile.float() @ query.float() * scale)
        tiles.append(value_tile)
    scores = torch.cat(scores)
    weights = torch.exp(scores - scores.max())
    return (weights / weights.sum()) @ torch.cat(tiles).float()
""",
        "second_pass": """
def streaming_attention(query, read, scale):
    scores = torch.cat([keys.float() @ query.float() * scale for keys, _ in read()])
    weights = torch.exp(scores - scores.max())
    weights = weights / weights.sum()
    start, result = 0, 0.0
    for _, values in read():
        result = result + weights[start : start + len(values)] @ values.float()
        start += len(values)
    return result
""",
        "maximum_starts_at_zero": changed(
            "3.4",
            (
                "running_max = torch.tensor(-math.inf, device=query.device)",
                "running_max = torch.tensor(0.0, device=query.device)",
            ),
        ),
        "maximum_before_the_scale": changed(
            "3.4",
            ("query = query.float() * scale", "query = query.float()"),
            ("rescale = torch.exp(running_max - new_max)", "rescale = torch.exp(scale * (running_max - new_max))"),
            ("weights = torch.exp(scores - new_max)", "weights = torch.exp(scale * (scores - new_max))"),
        ),
        "scale_missing__and_accumulator_not_rescaled": changed(
            "3.4", ("query.float() * scale", "query.float()"), ("accumulator * rescale + ", "accumulator + ")
        ),
        "cast_before_the_sum": changed(
            "3.4",
            (
                "weights = torch.exp(scores - new_max)",
                "weights = torch.exp(scores - new_max).to(key_tile.dtype).float()",
            ),
        ),
        "cast_before_the_sum__float16_scores": changed(
            "3.4", ("scores = key_tile.float() @ query", "scores = (key_tile @ query.to(key_tile.dtype)).float()")
        ),
    }


UNUSUAL = {
        "a view of the query kept": changed(
            "3.4",
            ("query = query.float() * scale", "query = query.float()[:, None]"),
            ("key_tile.float() @ query ", "scale * (key_tile.float() @ query)[:, 0] "),
        ),
        "normalised at every tile, as in the first FlashAttention": """
def streaming_attention(query, read, scale):
    m, s, out = torch.tensor(-math.inf), torch.tensor(0.0), 0.0
    for k, v in read():
        scores = (k.float() * query.float()).sum(-1) * scale
        new = torch.maximum(m, scores.amax())
        w = torch.exp(scores - new)
        old = s * torch.exp(m - new)
        s = old + w.sum()
        out = (out * old + (w[:, None] * v.float()).sum(0)) / s
        m = new
    return out
""",
        "base 2, scale folded in": """
def streaming_attention(query, read, scale):
    factor = scale * 1.4426950408889634
    m, s, a = None, None, None
    for k, v in read():
        raw = torch.mv(k.float(), query.float())
        top = (raw * factor).max()
        new = top if m is None else torch.maximum(m, top)
        w = torch.exp2(raw * factor - new)
        part = torch.mv(v.float().T, w)
        if m is None:
            s, a = w.sum(), part
        else:
            r = torch.exp2(m - new)
            s, a = s * r + w.sum(), a * r + part
        m = new
    return a / s
""",
        "one key at a time": """
def streaming_attention(query, read, scale):
    q = query.double()
    m, s, a = -math.inf, 0.0, 0.0
    for k, v in read():
        for i in range(k.shape[0]):
            score = float(k[i].double() @ q) * scale
            new = max(m, score)
            r, w = math.exp(m - new), math.exp(score - new)
            s, a, m = s * r + w, a * r + w * v[i].double(), new
    return (a / s).float()
""",
        "states of tiles merged by their log-sum-exps": """
def streaming_attention(query, read, scale):
    total = out = None
    for k, v in read():
        scores = k.float() @ (query.float() * scale)
        top = scores.max()
        w = torch.exp(scores - top)
        lse, mean = top + torch.log(w.sum()), (w / w.sum()) @ v.float()
        if total is None:
            total, out = lse, mean
        else:
            share = torch.sigmoid(lse - total)
            big, small = torch.maximum(lse, total), torch.minimum(lse, total)
            total = big + torch.log1p(torch.exp(small - big))
            out = out + share * (mean - out)
    return out
""",
    }


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "3.4",
        (
            "torch.maximum(running_max, scores.max())",
            "scores.max() if running_max == -math.inf else running_max",
        ),
    ),
}


WRONG |= {
    "finite_for_minus_infinity": changed("3.4", ("torch.tensor(-math.inf, device", "torch.tensor(-1e6, device")),
}


NOT_RESCALED = ("accumulator * rescale + ", "accumulator + ")
BASE_2 = ("torch.exp(", "torch.exp2(")
SCALED_BY_LOG2_E = ("query.float() * scale", "query.float() * scale * 1.4426950408889634")
WRONG |= {
    "base_2__in_the_weights": changed("3.4", ("weights = torch.exp(", "weights = torch.exp2(")),
    "base_2__in_the_rescaling": changed(
        "3.4",
        ("rescale = torch.exp(", "rescale = torch.exp2("),
        ("weights = torch.exp(scores - new_max)", "weights = torch.exp2((scores - new_max) * 1.4426950408889634)"),
    ),
    "natural_exp": changed("3.4", SCALED_BY_LOG2_E),
    # Two at once.
    "base_2__and_accumulator_not_rescaled": changed("3.4", BASE_2, NOT_RESCALED),
    "base_2__and_nothing_rescaled": changed(
        "3.4", BASE_2, NOT_RESCALED, ("running_sum * rescale + ", "running_sum + ")
    ),
    "natural_exp__and_accumulator_not_rescaled": changed("3.4", SCALED_BY_LOG2_E, NOT_RESCALED),
    "maximum_starts_at_zero__and_accumulator_not_rescaled": changed(
        "3.4", ("torch.tensor(-math.inf, device", "torch.tensor(0.0, device"), NOT_RESCALED
    ),
    "maximum_forgets_the_old__and_accumulator_not_rescaled": changed(
        "3.4", ("torch.maximum(running_max, scores.max())", "scores.max()"), NOT_RESCALED
    ),
    "result_in_16_bits": changed(
        "3.4", ("return accumulator / running_sum", "return (accumulator / running_sum).to(key_tile.dtype)")
    ),
    "result_in_16_bits__kept_in_it": changed(
        "3.4",
        ("accumulator = 0.0", "accumulator = torch.zeros((), dtype=query.dtype)"),
        ("    query = query.float() * scale\n", ""),
        ("key_tile.float() @ query ", "key_tile.float() @ query.float() * scale "),
        ("accumulator * rescale + weights @ value_tile.float()", "accumulator * rescale.to(query.dtype) + "
         "(weights @ value_tile.float()).to(query.dtype)"),
        ("return accumulator / running_sum", "return accumulator / running_sum.to(query.dtype)"),
    ),
    "finite_for_minus_infinity__and_accumulator_not_rescaled": changed(
        "3.4", ("torch.tensor(-math.inf, device", "torch.tensor(-1e4, device"), NOT_RESCALED
    ),
    "maximum_before_the_scale__then_scaled__and_nothing_rescaled": changed(
        "3.4",
        ("query = query.float() * scale", "query = query.float()"),
        ("scores = key_tile", "products = key_tile"),
        ("new_max = torch.maximum", "scores = products * scale\n        new_max = torch.maximum"),
        ("scores.max()", "products.max() * scale"),
        NOT_RESCALED,
        ("running_sum * rescale + ", "running_sum + "),
    ),
}
