"""Wrong answers to exercise 2.3, and unusual right ones."""

from tests.submissions.edits import changed

FILLED = "probabilities.masked_fill(~visible, 0)"


SOFTMAX = "torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)"


COMPARE = "visible = keys <= queries"


WRONG = {
    "mask_inverted__triu": changed("2.3", (COMPARE, "visible = keys >= queries")),
    "causal_misaligned": changed("2.3", (" + (key_length - query_length)", "")),
    "diagonal_hidden": changed("2.3", (COMPARE, "visible = keys < queries")),
    "diagonal_hidden__2": changed("2.3", (COMPARE, "visible = keys < queries"), (FILLED, "probabilities")),
    "one_key_too_many": changed("2.3", (COMPARE, "visible = keys <= queries + 1")),
    "offset_reversed": changed("2.3", ("(key_length - query_length)", "(query_length - key_length)")),
    "offset_reversed__tril": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool).tril(m - n)
    return torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
""",
    "hidden_scored_low__minus_a_billion": changed(
        "2.3",
        (SOFTMAX, "torch.softmax(torch.where(visible, scores.float(), -1e9), dim=-1).to(scores.dtype)"),
        (FILLED, "probabilities"),
    ),
    "mask_inverted": changed("2.3", (COMPARE, "visible = keys > queries")),
    "mask_after_softmax": changed("2.3", (SOFTMAX, "torch.softmax(scores, dim=-1)")),
    "mask_after_softmax__2": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    return torch.softmax(scores, dim=-1).tril(diagonal=n - m)
""",
    "hidden_scored_zero": changed(
        "2.3", (SOFTMAX, "torch.softmax(scores.masked_fill(~visible, 0.0), dim=-1)"), (FILLED, "probabilities")
    ),
    "hidden_scored_zero__2": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    return torch.softmax(scores.tril(diagonal=n - m), dim=-1)
""",
    "hidden_scored_low": changed("2.3", ("masked_fill(~visible, -math.inf)", "masked_fill(~visible, -1e4)")),
    "renormalised_afterwards": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    p = torch.softmax(scores, dim=-1).tril(diagonal=n - m)
    total = p.sum(dim=-1, keepdim=True)
    return p / torch.where(total == 0, 1.0, total)
""",
    "offset_clamped": changed("2.3", ("(key_length - query_length)", "max(key_length - query_length, 0)")),
    "empty_row_nan": changed("2.3", (FILLED, "probabilities")),
    "empty_row_uniform": changed(
        "2.3",
        (SOFTMAX, "torch.softmax(scores.masked_fill(~visible, torch.finfo(scores.dtype).min), dim=-1)"),
        (FILLED, "probabilities"),
    ),
    "wrong_axis": changed("2.3", ("dim=-1)", "dim=-2)")),
    "softmax_over_heads": changed("2.3", ("dim=-1)", "dim=0)")),
    "no_mask": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    return scores.softmax(-1)
""",
}


UNUSUAL = {
    "an additive mask and nan_to_num": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    hidden = torch.ones(m, n, device=scores.device).triu(diagonal=n - m + 1).bool()
    bias = torch.zeros(m, n, dtype=scores.dtype, device=scores.device).masked_fill_(hidden, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores + bias, dim=-1), nan=0.0)
""",
    "by hand in float32": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool, device=scores.device).tril(n - m)
    x = torch.where(visible, scores.float(), float("-inf"))
    top = x.amax(dim=-1, keepdim=True).clamp(min=-1e30)
    weights = torch.exp2((x - top) * 1.4426950408889634)
    return (weights / weights.sum(dim=-1, keepdim=True).clamp(min=1e-30)).to(scores.dtype)
""",
    "row by row": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    result = torch.zeros_like(scores)
    for i in range(m):
        seen = i + n - m + 1
        if seen > 0:
            result[:, i, :seen] = torch.softmax(scores[:, i, :seen], dim=-1)
    return result
""",
    "from the end": """# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    after = torch.arange(n - 1, -1, -1, device=scores.device)  # keys still to come behind this one
    left = torch.arange(m - 1, -1, -1, device=scores.device)  # queries still to come behind this one
    visible = after[None, :] >= left[:, None]
    p = F.softmax(torch.where(visible, scores, torch.full_like(scores, -math.inf)), dim=-1)
    return torch.where(visible, p, torch.zeros_like(p))
""",
}


WRONG |= {
    # Wrong where float16 scores lie at its end: no stand-in is low enough there.
    "hidden_scored_low__the_least_number": changed(
        "2.3", ("masked_fill(~visible, -math.inf)", "masked_fill(~visible, torch.finfo(scores.dtype).min)")
    ),
}


VISIBLE = "    visible = keys <= queries  # [M, N]"
WRONG |= {
    "offset_clamped__by_a_triangle_cut": changed(
        "2.3",
        (VISIBLE, "    rows = max(query_length, key_length)\n"
                  "    visible = torch.ones(rows, key_length, dtype=torch.bool).tril()[-query_length:]"),
    ),
    "negative_slice": changed(
        "2.3",
        (VISIBLE, "    visible = torch.ones(query_length, key_length, dtype=torch.bool)\n"
                  "    for query in range(query_length):\n"
                  "        visible[query, key_length - query_length + query + 1:] = False"),
    ),
    "negative_slice__of_columns": changed(
        "2.3",
        (VISIBLE, "    visible = torch.ones(query_length, key_length, dtype=torch.bool)\n"
                  "    offset = key_length - query_length\n"
                  "    visible[:, offset:] = visible[:, offset:].tril()"),
    ),
}
UNUSUAL |= {
    "row by row, by slices": changed(
        "2.3",
        (VISIBLE, "    visible = torch.zeros(query_length, key_length, dtype=torch.bool)\n"
                  "    for query in range(query_length):\n"
                  "        visible[query, : max(0, key_length - query_length + query + 1)] = True"),
    ),
}


ALIGNED_AT_THE_START = (" + (key_length - query_length)", "")
STRICTLY = (COMPARE, "visible = keys < queries")
UNFILLED = (FILLED, "probabilities")


def by_hand(mask, weights, total="total"):
    """A softmax without its maximum."""
    return f"""# Exercise 2.3 · The causal mask
def causal_softmax(scores):
    m, n = scores.shape[-2:]
    visible = torch.ones(m, n, dtype=torch.bool).tril({mask})
    weights = {weights}
    total = weights.sum(dim=-1, keepdim=True)
    return (weights / {total}).to(scores.dtype)
"""


WRONG |= {
    # Two at once, in answers that leave a row without keys to the softmax: that hid them.
    "causal_misaligned__and_strictly": changed("2.3", ALIGNED_AT_THE_START, STRICTLY, UNFILLED),
    "causal_misaligned__and_low": changed(
        "2.3", ALIGNED_AT_THE_START, ("masked_fill(~visible, -math.inf)", "masked_fill(~visible, -1e4)"), UNFILLED
    ),
    "causal_misaligned__and_a_billion": changed(
        "2.3",
        ALIGNED_AT_THE_START,
        (SOFTMAX, "torch.softmax(scores.float().masked_fill(~visible, -1e9), dim=-1).to(scores.dtype)"),
        UNFILLED,
    ),
    "diagonal_hidden__and_over_queries": changed("2.3", STRICTLY, ("dim=-1)", "dim=-2)"), UNFILLED),
    "no_maximum": by_hand("n - m", "torch.exp(scores) * visible"),
    "no_maximum__in_float32": by_hand("n - m", "torch.exp(scores.float().masked_fill(~visible, -math.inf))"),
    "no_maximum__guarded": by_hand(
        "n - m", "torch.where(visible, torch.exp(scores.float()), 0.0)", "torch.where(total == 0, 1.0, total)"
    ),
    "causal_misaligned__and_no_maximum_guarded": by_hand(
        "", "torch.where(visible, torch.exp(scores.float()), 0.0)", "torch.where(total == 0, 1.0, total)"
    ),
    "causal_misaligned__and_no_maximum": by_hand("", "torch.exp(scores.float()).masked_fill(~visible, 0)"),
}
