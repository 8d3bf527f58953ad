"""Wrong answers to exercise 17.4, and unusual right ones."""

from tests.submissions.edits import changed, edited

CLEANED = "torch.where((lses == -math.inf)[..., None], 0.0, outputs)"
LARGEST, TOTAL = "torch.maximum(lses.amax(dim=0), sinks)", "weights.sum(dim=0) + torch.exp(sinks - reference)"
REFERENCE, DIVISOR = "torch.where(largest == -math.inf, 0.0, largest)", "torch.where(total == 0, 1.0, total)"
OUTPUT = "(weights[..., None] * outputs).sum(dim=0) / divisor[..., None]"
LSE = "return output, largest + torch.log(divisor)"
SINK = "torch.exp(sinks - reference)"
SHARE = "torch.where(sinks == -math.inf, 0.0, torch.exp(sinks - lse))"
PRODUCT = "(output.float() * output_gradient.float()).sum(dim=-1)"
GRADIENT = f"-(share * {PRODUCT}).sum(dim=0)"
KEYS = "weights.sum(dim=0)"


def merging(*pieces):
    return changed("17.4", *zip(pieces[::2], pieces[1::2]))


# Another `merge`, and the course's own gradient behind it.
HEAD = "# Exercise 17.4 · A sink, over splits, and its gradient\ndef merge(outputs, lses, sinks):\n"
OWN_GRADIENT = changed("17.4").partition("def sink_gradient(")[2]


def another(body):
    return HEAD + body + "\n\ndef sink_gradient(" + OWN_GRADIENT


ONE_BY_ONE = another("""    m = sinks.expand(lses.shape[1:]).clone()
    l = (m > -math.inf).float()
    acc = outputs.new_zeros(outputs.shape[1:])
    for part, lse in zip(outputs, lses):
        new = torch.maximum(m, lse)
        base = torch.where(new == -math.inf, 0.0, new)
        old, weight = torch.exp(m - base), torch.exp(lse - base)
        acc = acc * old[..., None] + weight[..., None] * part.masked_fill((lse == -math.inf)[..., None], 0.0)
        m, l = new, l * old + weight
    return acc / l.masked_fill(l == 0, 1.0)[..., None], torch.where(l == 0, -math.inf, m + l.log())
""")
IN_BASE_2 = another("""    LOG2E = math.log2(math.e)
    lses, s = lses * LOG2E, sinks * LOG2E
    m = torch.maximum(lses.amax(0), s)
    safe = torch.where(m == -math.inf, 0.0, m)
    w = torch.exp2(lses - safe)
    d = w.sum(0) + torch.exp2(s - safe)
    o = torch.where((w == 0)[..., None], 0.0, outputs)
    out = (w[..., None] * o).sum(0) / torch.where(d == 0, 1.0, d)[..., None]
    return out, torch.where(d == 0, -math.inf, (safe + torch.log2(d)) / LOG2E)
""")

WRONG = {
    # Others' cells: one maximum for all rows, the sink forgotten where the units change, and in a loop over the splits.
    "one_maximum": edited(IN_BASE_2, ("torch.maximum(lses.amax(0), s)", "torch.maximum(lses.amax(), s.amax())")),
    "sink_in_base_2__natural_in_the_sum": edited(IN_BASE_2, ("exp2(s - safe)", "exp2(sinks - safe)")),
    "output_not_rescaled": edited(ONE_BY_ONE, ("acc * old[..., None]", "acc")),
    # The sink and the splits: in every split, or lost where the key range is empty (ROCm/rocm-libraries#12229).
    "sink_in_every_split": merging(TOTAL, f"(weights + {SINK}).sum(dim=0)"),
    "sink_in_every_split__with_keys": merging(TOTAL, f"{KEYS} + (lses > -math.inf).sum(dim=0) * {SINK}"),
    "sink_in_every_split__and_once": merging(TOTAL, f"{KEYS} + (len(lses) + 1) * {SINK}"),
    "sink_lost_without_keys": merging(
        LSE, "lse = largest + torch.log(divisor)\n"
        "    return output, lse.masked_fill((lses == -math.inf).all(0), -math.inf)"
    ),
    "sink_missing": merging(TOTAL, KEYS, LARGEST, "lses.amax(dim=0)"),
    "sink_in_the_lse_alone": merging(OUTPUT, OUTPUT.replace("divisor", f"{KEYS}.clamp(min=1e-30)")),
    "sink_in_the_output_alone": merging(LSE, "return output, torch.logsumexp(lses, dim=0)"),
    # In another base than the loop (the same thread), scaled, or with a value (sgl-project/sgl-kernel-npu#216).
    "sink_in_base_2": merging(SINK, SINK.replace("exp", "exp2")),
    "sink_in_base_2__multiplied": merging(
        LARGEST, f"{LARGEST[:-1]} / math.log(2))", SINK, "torch.exp(sinks / math.log(2) - reference)"
    ),
    "sink_scaled": merging("    largest =", "    sinks = sinks / math.sqrt(outputs.shape[-1])\n    largest ="),
    "sink_without_exp": merging(SINK, "sinks.masked_fill(sinks == -math.inf, 0.0)"),
    "sink_has_a_value": merging(
        OUTPUT, f"((weights[..., None] * outputs).sum(dim=0) + {SINK}[..., None]) / divisor[..., None]"
    ),
    "sink_has_a_value__of_the_keys": merging(
        OUTPUT, f"((weights[..., None] * outputs).sum(dim=0) + {SINK}[..., None] * outputs[0]) / divisor[..., None]"
    ),
    # Magnitudes.
    "measured_from_the_keys_alone": merging(LARGEST, "lses.amax(dim=0)"),
    "measured_from_the_keys_alone__guarded": merging(
        LARGEST, "lses.amax(dim=0)",
        LSE, "return output, torch.where(total == 0, -math.inf, reference + torch.log(total))",
    ),
    "measured_from_the_sink": merging(LARGEST, "sinks.expand(lses.shape[1:])"),
    "no_maximum": merging(REFERENCE, "torch.zeros_like(largest)", LSE, "return output, torch.log(total)"),
    "maximum_starts_at_zero": merging(
        REFERENCE, "largest.clamp(min=0.0)", LSE, "return output, reference + torch.log(total)"
    ),
    # A running maximum that starts at a finite number: flashinfer-ai/flashinfer#4267.
    "reference_bounded_below": merging(REFERENCE, "largest.clamp(min=-1e4)"),
    # Splits without keys, and rows.
    "rubbish_counts": merging(CLEANED, "outputs"),
    "rubbish_counts__nan_alone": merging(CLEANED, "outputs.masked_fill(outputs.isnan(), 0.0)"),
    "empty_splits_weigh": merging(
        "    largest =", "    lses = lses.masked_fill(lses == -math.inf, 0.0)\n    largest ="
    ),
    "empty_sequence_nan": merging(REFERENCE, "largest"),
    "empty_sequence_counts": merging(LSE, "return output, reference + torch.log(divisor)"),
    "averaged_without_weights": merging(OUTPUT, "outputs.mean(dim=0)"),
    "added_without_weights": merging(OUTPUT, "outputs.sum(dim=0)"),
    "not_divided": merging(" / divisor[..., None]", ""),
    "lse_without_the_largest": merging(LSE, "return output, torch.log(divisor)"),
    "last_split_left_out": merging(
        "    outputs = torch",
        "    if len(lses) > 1:\n        outputs, lses = outputs[:-1], lses[:-1]\n    outputs = torch",
    ),
    "lse_in_base_2": merging(LSE, "return output, (largest + torch.log(divisor)) / math.log(2)"),
    "weighed_in_base_2": merging("torch.exp(lses", "torch.exp2(lses", SINK, SINK.replace("exp", "exp2")),
    # The gradient.
    "sign_missing": merging(GRADIENT, GRADIENT[1:]),
    "not_by_the_share": merging(SHARE, "torch.ones_like(lse)"),
    "not_by_the_share__keys": merging(SHARE, SHARE.replace("torch.exp(sinks - lse)", "1 - torch.exp(sinks - lse)")),
    "sink_counted_twice": merging("torch.exp(sinks - lse)", "torch.sigmoid(sinks - lse)"),
    "derivative_of_the_share": merging(GRADIENT, GRADIENT.replace("(share *", "(share * (1 - share) *")),
    "share_in_base_2": merging("torch.exp(sinks - lse)", "torch.exp2(sinks - lse)"),
    "exp_of_each": merging("torch.exp(sinks - lse)", "torch.exp(sinks) / torch.exp(lse)"),
    "no_sink_nan": merging(SHARE, "torch.exp(sinks - lse)"),
    "averaged": merging(GRADIENT, GRADIENT.replace("sum(dim=0)", "mean(dim=0)")),
    "averaged__columns": merging(PRODUCT, PRODUCT.replace("sum", "mean")),
    "product_missing": merging("output.float() * ", ""),
    "product_missing__gradient": merging(" * output_gradient.float()", ""),
    "product_missing__of_sums": merging(PRODUCT, "output.float().sum(dim=-1) * output_gradient.float().sum(dim=-1)"),
    "heads_summed": merging(GRADIENT, f"-(share * {PRODUCT}).sum().expand(sinks.shape)"),
    "rows_summed_too_early": merging(GRADIENT, f"-share.sum(dim=0) * {PRODUCT}.sum(dim=0)"),
    "summed_in_16_bits": merging(PRODUCT, "(output * output_gradient).sum(dim=-1).float()"),
    "summed_in_16_bits__products": merging(PRODUCT, "(output * output_gradient).float().sum(dim=-1)"),
    "modified_input": merging(CLEANED, "outputs.masked_fill_((lses == -math.inf)[..., None], 0.0)"),
}

UNUSUAL = {
    "the sink is one more split": another("""    lses = torch.cat([lses, sinks.expand_as(lses[:1])])
    outputs = torch.cat([outputs, torch.zeros_like(outputs[:1])]).masked_fill((lses == -math.inf)[..., None], 0.0)
    weights = torch.softmax(lses, dim=0).nan_to_num(0.0)
    return torch.einsum("srh,srhd->rhd", weights, outputs), torch.logsumexp(lses, dim=0)
"""),
    "the running maximum begins with the sink": ONE_BY_ONE,
    "the keys first, then the sink's share": another("""    keys = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - keys.masked_fill(keys == -math.inf, 0.0))
    parts = torch.where(weights[..., None] > 0, outputs, 0.0)
    output = (parts * weights[..., None]).sum(dim=0) * torch.sigmoid(keys - sinks).nan_to_num(0.0)[..., None]
    return output, torch.logaddexp(keys, sinks.expand_as(keys))
"""),
    "in units of log 2": IN_BASE_2,
    "two splits at a time": another("""    parts = [(torch.zeros_like(outputs[0]), sinks.expand_as(lses[0]))]
    parts += [(o.masked_fill((l == -math.inf)[..., None], 0.0), l) for o, l in zip(outputs, lses)]
    while len(parts) > 1:
        (a, la), (b, lb) = parts.pop(), parts.pop()
        lse = torch.logaddexp(la, lb)
        base = lse.masked_fill(lse == -math.inf, 0.0)
        parts.insert(0, (a * torch.exp(la - base)[..., None] + b * torch.exp(lb - base)[..., None], lse))
    return parts[0]
"""),
    "the gradient by einsum": merging(
        GRADIENT, 'torch.einsum("rh,rhd,rhd->h", -share, output.float(), output_gradient.float())'
    ),
    "the gradient by the heads' columns": merging(
        GRADIENT, "torch.stack([-(share[:, h] @ (output[:, h].double() * output_gradient[:, h].double()).sum(1)"
        ".float()) for h in range(len(sinks))])"
    ),
}
