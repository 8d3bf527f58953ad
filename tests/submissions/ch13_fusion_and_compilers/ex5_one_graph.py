"""Wrong answers to exercise 13.5, and unusual right ones."""

from tests.submissions.edits import changed

SUMMED = "summed = (hidden + residual).clamp(-limit, limit)"
PADDED = "torch.where(present[:, :, None], normalised, 0.0)"
LAST = "(lengths - 1).clamp(min=0)"
TAKEN = f"last = normalised[torch.arange(hidden.shape[0], device=hidden.device), {LAST}]"

WITH_BREAKS = """# Exercise 13.5 · One graph for every length
def finish_step(hidden, residual, weight, lengths, limit):
    normalised, last = torch.zeros_like(hidden), torch.zeros_like(hidden[:, 0])
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            rows = (hidden[sequence, :length] + residual[sequence, :length]).clamp(-limit, limit)
            rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6) * weight
            normalised[sequence, :length] = rows
            last[sequence] = rows[-1]
    return normalised, last
"""

TOKEN_BY_TOKEN = """# Exercise 13.5 · One graph for every length
def finish_step(hidden, residual, weight, lengths, limit):
    rows, last = [], torch.zeros_like(hidden[:, 0])
    for token in range(hidden.shape[1]):
        s = (hidden[:, token] + residual[:, token]).clamp(-limit, limit)
        s = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 1e-6) * weight
        rows.append(torch.where((lengths > token)[:, None], s, 0.0))
        last = torch.where((lengths - 1 == token)[:, None], s, last)
    return torch.stack(rows, 1), last
"""

WRONG = {
    "not_cut": changed("13.5", (SUMMED, "summed = hidden + residual")),
    "cut_on_one_side": changed("13.5", (SUMMED, "summed = (hidden + residual).clamp(max=limit)")),
    "cut_before_the_sum": changed("13.5", (SUMMED, "summed = hidden.clamp(-limit, limit) + residual")),
    "padding_multiplied": changed("13.5", (PADDED, "normalised * present[:, :, None]")),
    "padding_left": changed("13.5", (PADDED, "normalised")),
    "padding_for_the_last": changed("13.5", (TAKEN, "last = normalised[:, -1]")),
    "padding_for_the_last__one_behind": changed("13.5", (LAST, "lengths.clamp(max=hidden.shape[1] - 1)")),
    "weight_missing": changed("13.5", (" + 1e-6) * weight", " + 1e-6)")),
    "number_read": WITH_BREAKS,
    "number_read__an_if": changed(
        "13.5",
        (
            SUMMED,
            "summed = hidden + residual\n    if summed.nan_to_num().abs().max() > limit:\n"
            "        summed = summed.clamp(-limit, limit)",
        ),
    ),
    "number_read__item": changed(
        "13.5", (TAKEN, "last = torch.stack([normalised[b, max(int(lengths[b]) - 1, 0)] for b in range(len(lengths))])")
    ),
    "shape_by_numbers": changed(
        "13.5", (PADDED, "torch.zeros_like(summed).index_put_((present,), normalised[present])")
    ),
    "prints": changed("13.5", (SUMMED, f'{SUMMED}\n    print("a step of", hidden.shape[1])')),
    "compiled_for_each_size": TOKEN_BY_TOKEN,
    "compiled_for_each_size__an_if": changed(
        "13.5", (SUMMED, f"{SUMMED}\n    if hidden.shape[1] > 8:\n        summed = summed + 0.0")
    ),
    "not_cut__and_the_weight": changed(
        "13.5", (SUMMED, "summed = hidden + residual"), (" + 1e-6) * weight", " + 1e-6)")
    ),
}

UNUSUAL = {
    "gather for the last rows": changed(
        "13.5",
        (
            TAKEN,
            f"place = {LAST}[:, None, None].expand(-1, 1, hidden.shape[2])\n"
            "    last = normalised.gather(1, place)[:, 0]",
        ),
    ),
    "masked_fill": changed("13.5", (PADDED, "normalised.masked_fill(~present[:, :, None], 0.0)")),
    "minimum and maximum": changed(
        "13.5",
        (
            SUMMED,
            "summed, most = hidden + residual, torch.full_like(hidden, limit)\n"
            "    summed = torch.minimum(torch.maximum(summed, -most), most)",
        ),
    ),
    "padding dropped first, F.rms_norm": changed(
        "13.5",
        (
            "normalised = summed * torch.rsqrt(summed.square().mean(dim=-1, keepdim=True) + 1e-6) * weight",
            "normalised = F.rms_norm(summed, (hidden.shape[2],), weight, 1e-6)",
        ),
    ),
}
