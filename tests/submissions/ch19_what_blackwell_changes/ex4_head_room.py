"""Wrong answers to exercise 19.4, and unusual right ones."""

from tests.submissions.edits import changed

LIMIT, GROWN = "min(threshold, head_room(dtype, shift))", "largest > reference + limit"
LOG = "math.log2(torch.finfo(dtype).max) - shift"
FROM, ROUNDED = "part - renewed[:, None] + shift", "weights.to(dtype).float()"
SUM, OUT = "total * rescale + weights.sum(dim=1)", "out * rescale[:, None] + "
ZIP = "zip(scores.split(block, dim=1), value.split(block))"


def wrong(*replacements):
    return changed("19.4", *replacements)


WRONG = {
    # Dao-AILab/flash-attention#2577: a threshold of 4 for weights that e4m3 cuts at 448.
    "threshold_not_limited": wrong((LIMIT, "threshold")),
    "threshold_not_limited__cut": wrong((LIMIT, "threshold"),
                                        (ROUNDED, "weights.clamp(max=torch.finfo(dtype).max).to(dtype).float()")),
    "threshold_not_limited__all_cut": wrong(
        (LIMIT, "threshold"), (f"torch.exp2({FROM})", f"torch.exp2({FROM}).clamp(max=torch.finfo(dtype).max)")
    ),
    "one_constant": wrong(("torch.finfo(dtype).max", "448")),
    "one_constant__e5m2": wrong(("torch.finfo(dtype).max", "57344.0")),
    "other_logarithm__none": wrong((LOG, "torch.finfo(dtype).max / 2**shift")),
    "one_constant__cut": wrong((ROUNDED, "weights.clamp(max=448.0).to(dtype).float()")),
    "compared_with_the_true_maximum": wrong((GROWN, "largest > top + limit"),
        ("    total = torch.zeros_like", "    top = reference\n    total = torch.zeros_like"),
        ("        reference = renewed\n", "        reference, top = renewed, torch.maximum(top, largest)\n")),
    "other_logarithm": wrong((LOG, LOG.replace("log2", "log"))),
    "shift_not_subtracted": wrong((LOG, LOG[: -len(" - shift")])),
    "room_rounded": wrong((LOG, f"float(int({LOG}))")),
    "threshold_ignored": wrong((LIMIT, "head_room(dtype, shift)")),
    "always_rescaled": wrong((GROWN, "largest > reference")),
    "at_the_limit": wrong((GROWN, GROWN.replace(">", ">="))),
    # ROCm/rocm-libraries#6498: the weights belong to the new maximum, sum and output to the old one.
    "weights_of_the_new_maximum": wrong((FROM, "part - torch.maximum(reference, largest)[:, None] + shift")),
    "weights_of_the_new_maximum__own": wrong((FROM, "part - largest[:, None] + shift")),
    "weights_of_the_old_reference": wrong((FROM, "part - reference[:, None] + shift")),
    "shift_on_one_side": wrong(("weights.sum(dim=1)", "torch.exp2(part - renewed[:, None]).sum(dim=1)")),
    "shift_on_one_side__end": wrong(("return out / total[:, None]", "return out / total[:, None] / 2**shift")),
    "shift_missing": wrong((FROM, "part - renewed[:, None]")),
    "natural_exponential": wrong(("exp2", "exp")),
    "rounded_before_the_sum": wrong(("weights.sum(dim=1)", f"{ROUNDED}.sum(dim=1)")),
    "not_rounded": wrong((ROUNDED, "weights")),
    "not_rounded__e4m3": wrong((ROUNDED, "weights.to(torch.float8_e4m3fn).float()")),
    "products_of_float8": wrong((f"{ROUNDED} @ values.float()", "weights.to(dtype) @ values")),
    "nothing_rescaled": wrong(("torch.exp2(reference - renewed)", "torch.ones_like(reference)")),
    "out_not_rescaled": wrong((OUT, "out + ")),
    "sum_not_rescaled": wrong((SUM, "total + weights.sum(dim=1)")),
    "whole_row": wrong(("scores[:, :block].amax", "scores.amax")),
    "starts_at_zero": wrong(("scores[:, :block].amax(dim=1)", "torch.zeros(len(scores))")),
    "rows_together": wrong(
        (f"torch.where({GROWN}, largest, reference)",
         f"torch.maximum(largest, reference) if ({GROWN}).any() else reference")
    ),
    "reference_falls": wrong((f"torch.where({GROWN}, largest, reference)", "largest")),
    "last_block_missing": wrong(
        ("scores.split(block, dim=1), value.split(block)",
         "scores.split(block, dim=1)[: max(1, scores.shape[1] // block)], value.split(block)")
    ),
    "kept_in_16_bits": wrong(("return out / total[:, None]", "return (out / total[:, None]).half().float()")),
}  # fmt: skip
UNUSUAL = {
    "row by row, in float64": """# Exercise 19.4 · The head room of FP8
def head_room(dtype, shift):
    return math.log(torch.finfo(dtype).max / 2**shift) / math.log(2)

def fp8_attention(scores, value, dtype, shift, threshold, block):
    allowed = min(head_room(dtype, shift), threshold)
    result = torch.zeros(scores.shape[0], value.shape[1])
    for row, line in enumerate(scores.double()):
        top, total, out = None, 0.0, torch.zeros(value.shape[1], dtype=torch.float64)
        for at in range(0, len(line), block):
            piece = line[at : at + block]
            most = float(piece.max())
            if top is None:
                top = most
            elif most - top > allowed:
                total, out = total * 2.0 ** (top - most), out * 2.0 ** (top - most)
                top = most
            weights = 2.0 ** (piece - (top - shift))
            total += float(weights.sum())
            out += weights.float().to(dtype).double() @ value[at : at + block].double()
        result[row] = (out / total).float()
    return result
""",
    "natural exponentials, and only the rows that grow": """# Exercise 19.4 · The head room of FP8
def head_room(dtype, shift):
    largest = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}[dtype]
    return float(np.log2(largest)) - float(shift)

def fp8_attention(scores, value, dtype, shift, threshold, block):
    two = math.log(2.0)
    limit = min(threshold, head_room(dtype, shift))
    reference = torch.full((len(scores), 1), -math.inf)
    total = torch.zeros(len(scores), 1)
    out = torch.zeros(len(scores), value.shape[1])
    values = value.to(torch.float32)
    for begin in range(0, scores.shape[1], block):
        part = scores[:, begin : begin + block]
        largest = part.max(dim=1, keepdim=True).values
        grown = (largest - reference > limit).squeeze(1)
        factor = torch.exp((reference[grown] - largest[grown]) * two)
        total[grown] *= factor
        out[grown] *= factor
        reference[grown] = largest[grown]
        weights = torch.exp((part + (shift - reference)) * two)
        total += weights.sum(dim=1, keepdim=True)
        out += weights.to(dtype).to(torch.float32) @ values[begin : begin + block]
    return out.div(total)
""",
    "all references first, then one sum": """# Exercise 19.4 · The head room of FP8
def head_room(dtype, shift):
    return math.log2(torch.finfo(dtype).max) - shift

def fp8_attention(scores, value, dtype, shift, threshold, block):
    limit = min(threshold, head_room(dtype, shift))
    blocks = [part.amax(1) for part in torch.split(scores, block, dim=1)]
    used = [blocks[0]]
    for largest in blocks[1:]:
        used.append(torch.where(largest - used[-1] > limit, largest, used[-1]))
    used = torch.stack(used, 1)
    each = used.repeat_interleave(block, dim=1)[:, : scores.shape[1]]
    weights = torch.exp2(scores - each + shift)
    factor = torch.exp2(each - used[:, -1:])
    out = (weights.to(dtype).float() * factor) @ value.float()
    return out / (weights * factor).sum(1, keepdim=True)
""",
}
