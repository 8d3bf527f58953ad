"""Wrong answers to exercise 13.6, and unusual right ones."""

from tests.submissions.edits import changed

CENTRED = "centred = tl.where(inside, x - mean, 0.0)"
VARIANCE = "variance = tl.sum(tl.sum(centred * centred, axis=1), axis=0) / count"
MISH = "mish = affine * product / (product + 2.0)"
STEP = "step = tl.load(steps_pointer + sample)"
OUT = "out = scale[:, None] * mish + shift[:, None]"
MADE = "rows = [tuple(part.clone() for part in make(step)) for step in range(number)]"

FLAT = """# Exercise 13.6 · A denoising step in one kernel
@triton.jit
def flat(x, w, b, scales, shifts, steps, out, channels, members, length, epsilon, SIZE: tl.constexpr):
    group, sample, n = tl.program_id(0), tl.program_id(1), tl.arange(0, SIZE)
    count = members * length
    inside = n < count
    at = (sample * channels + group * members) * length + n
    channel = group * members + n // length
    rows = tl.load(steps + sample) * channels + channel
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, v - tl.sum(v, 0) / count, 0.0)
    normal = centred * tl.rsqrt(tl.sum(centred * centred, 0) / count + epsilon)
    a = normal * tl.load(w + channel, mask=inside, other=0.0) + tl.load(b + channel, mask=inside, other=0.0)
    e = tl.exp(tl.minimum(a, 20.0))
    mish = a * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)
    mish = mish * tl.load(scales + rows, mask=inside, other=0.0) + tl.load(shifts + rows, mask=inside, other=0.0)
    tl.store(out + at, mish.to(out.dtype.element_ty), mask=inside)

def group_norm_mish(x, weight, bias, scale_table, shift_table, steps, groups, epsilon):
    batch, channels, length = x.shape
    out = torch.empty_like(x)
    flat[(groups, batch)](x, weight, bias, scale_table, shift_table, steps, out, channels, channels // groups, length,
                          epsilon, SIZE=triton.next_power_of_2(channels // groups * length))
    return out

class StepTables:
    def __init__(self, make, number):
        rows = [torch.stack(make(step)) for step in range(number)]
        self.made = tuple(torch.stack(rows).transpose(0, 1).contiguous())

    def tables(self):
        return self.made
"""

WRONG = {
    # The numbers are right, and the caller's weight is longer than before.
    "modified_input": changed("13.6", ("    members = channels // groups\n    out", "    members = channels // groups\n"
                                       "    weight.resize_(2 * channels)\n    out")),
    "too_many_bytes": changed(
        "13.6",
        ("    mean = tl.sum(", "    again = tl.load(x_pointer + offsets, mask=inside, other=0.0).to(tl.float32)\n"
                             "    mean = tl.sum("),
        ("tl.where(inside, x - mean", "tl.where(inside, again - mean"),
    ),
    "fixed_size": changed("13.6", ("kernel[(groups, batch)](", "kernel[(groups, min(batch, 132))](")),
    "fixed_size__groups": changed("13.6", ("kernel[(groups, batch)](", "kernel[(min(groups, 32), batch)](")),
    "fixed_size__channels": changed("13.6", ("MEMBERS=triton.next_power_of_2(members)", "MEMBERS=64")),
    "fixed_size__places": changed("13.6", ("LENGTH=triton.next_power_of_2(length)", "LENGTH=256")),
    "empty_lanes_counted": changed("13.6", (CENTRED, "centred = x - mean")),
    "divided_by_the_tile": changed("13.6", ("count = members * length", "count = MEMBERS * LENGTH")),
    "count_less_one": changed("13.6", (VARIANCE, VARIANCE.replace("/ count", "/ (count - 1)"))),
    "mean_left": changed("13.6", ("affine = centred * tl", "affine = x * tl")),
    "mean_square": changed("13.6", (VARIANCE, VARIANCE.replace("centred * centred", "x * x"))),
    # pytorch#54293, openvino#36587: a variance of one pass, and NaN or nonsense at a mean of 10,000.
    "variance_cancels": changed(
        "13.6", (VARIANCE, "variance = tl.sum(tl.sum(x * x, axis=1), axis=0) / count - mean * mean")
    ),
    "epsilon_missing": changed("13.6", ("tl.rsqrt(variance + epsilon)", "tl.rsqrt(variance)")),
    "epsilon_outside": changed("13.6", ("tl.rsqrt(variance + epsilon)", "(1.0 / (tl.sqrt(variance) + epsilon))")),
    "first_groups_weights": changed(
        "13.6",
        ("weight_pointer + channel", "weight_pointer + member"),
        ("bias_pointer + channel", "bias_pointer + member"),
    ),
    "weight_missing": changed("13.6", (" * weight[:, None] + bias", " + bias")),
    "bias_missing": changed("13.6", ("weight[:, None] + bias[:, None]", "weight[:, None]")),
    "first_groups_weights__the_biases": changed("13.6", ("bias_pointer + channel", "bias_pointer + member")),
    "first_groups_scales": changed(
        "13.6", ("scale_pointer + step * channels + channel", "scale_pointer + step * channels + member"),
        ("shift_pointer + step * channels + channel", "shift_pointer + step * channels + member"),
    ),
    "first_step__of_shifts": changed("13.6", ("shift_pointer + step * channels", "shift_pointer")),
    "each_channel__the_variance": changed(
        "13.6", (VARIANCE, "variance = (tl.sum(centred * centred, axis=1) / length)[:, None]")
    ),
    "interleaved": changed(
        "13.6", ("channel = group * members + member", "channel = member * tl.num_programs(0) + group")
    ),
    "root_missing": changed("13.6", ("tl.rsqrt(variance + epsilon)", "(1.0 / (variance + epsilon))")),
    # A slip of the grid is no matter of the mean: it was told as `variance_cancels`.
    "out_of_bounds__grid_exchanged": changed("13.6", ("kernel[(groups, batch)](", "kernel[(batch, groups)](")),
    "factor_cut": changed("13.6", (MISH, MISH.replace("affine", "tl.minimum(affine, 20.0)"))),
    "shift_before_scale": changed("13.6", (OUT, "out = scale[:, None] * (mish + shift[:, None])")),
    "not_mish": changed("13.6", (MISH, "mish = affine")),
    "not_mish__silu": changed("13.6", (MISH, "mish = affine / (1.0 + tl.exp(-affine))")),
    "mish_last": changed(
        "13.6",
        (
            OUT,
            "a = scale[:, None] * affine + shift[:, None]\n    e = tl.exp(tl.minimum(a, 20.0))\n"
            "    out = a * (e * (e + 2.0)) / (e * (e + 2.0) + 2.0)",
        ),
    ),
    "mish_overflows": changed("13.6", ("tl.exp(tl.minimum(affine, 20.0))", "tl.exp(affine)")),
    "one_added": changed("13.6", (OUT, OUT.replace("scale[:, None]", "(1.0 + scale[:, None])"))),
    "scale_missing": changed("13.6", (OUT, "out = mish + shift[:, None]")),
    "shift_missing": changed("13.6", (OUT, "out = scale[:, None] * mish")),
    "first_step": changed("13.6", (STEP, "step = 0")),
    "sample_for_step": changed("13.6", (STEP, "step = sample")),
    "first_samples_step": changed("13.6", (STEP, "step = tl.load(steps_pointer)")),
    "made_again": changed(
        "13.6",
        (MADE, "self.make, self.number = make, number"),
        ("        self.made = tuple(torch.stack(parts) for parts in zip(*rows))\n", ""),
        (
            "return self.made",
            "rows = [tuple(p.clone() for p in self.make(s)) for s in range(self.number)]"
            "\n        return tuple(torch.stack(parts) for parts in zip(*rows))",
        ),
    ),
    "rounded_on_the_way__all_of_it": changed(
        "13.6", ("mask=inside, other=0.0).to(tl.float32)", "mask=inside, other=0.0)"),
    ),
    "row_kept_uncopied": changed("13.6", (MADE, "rows = [make(step) for step in range(number)]")),
    "bias_missing__and_the_shift": changed(
        "13.6", (OUT, "out = scale[:, None] * mish"), ("weight[:, None] + bias[:, None]", "weight[:, None]")
    ),
}

UNUSUAL = {
    "a flat tile, with the weight loaded for each of its numbers": FLAT,
    "one flat tile": changed(
        "13.6",
        (
            "mean = tl.sum(tl.sum(x, axis=1), axis=0) / count",
            "mean = tl.sum(tl.reshape(x, (MEMBERS * LENGTH,)), axis=0) / count",
        ),
    ),
    "mish by logarithm and sigmoid": changed(
        "13.6", (MISH, "mish = affine * (2.0 / (1.0 + tl.exp(-2.0 * tl.log(1.0 + exponential))) - 1.0)")
    ),
    "tables when first asked for": changed(
        "13.6",
        (
            f"        {MADE}\n        self.made = tuple(torch.stack(parts) for parts in zip(*rows))\n",
            "        self.make, self.number, self.made = make, number, None\n",
        ),
        (
            "return self.made",
            "if self.made is None:\n            rows = [torch.stack(self.make(step)) for step in range("
            "self.number)]\n            self.made = tuple(torch.stack(rows, 1))\n        return self.made",
        ),
    ),
}

OWN = "out_pointer.dtype.element_ty"
WRONG["computed_in_16_bits"] = changed("13.6", (MISH, f"{MISH}.to({OWN})"))
STEPS = {
    "mean": "tl.sum(tl.sum(x, axis=1), axis=0) / count",
    "centred": "tl.where(inside, x - mean, 0.0)",
    "variance": "tl.sum(tl.sum(centred * centred, axis=1), axis=0) / count",
    "normal": "centred * tl.rsqrt(variance + epsilon)",
    "affine": "centred * tl.rsqrt(variance + epsilon) * weight[:, None] + bias[:, None]",
    "mish": "affine * product / (product + 2.0)",
}
for (step, text), dtype in zip(STEPS.items(), ("tl.float16", OWN, "tl.float16", OWN, "tl.float16", "tl.float16")):
    WRONG[f"rounded_on_the_way__{step}"] = changed("13.6", (text, f"({text}).to({dtype}).to(tl.float32)"))
WRONG |= {
    "not_contiguous": changed(
        "13.6", ("tuple(torch.stack(parts) for parts in zip(*rows))", "tuple(torch.stack(p, 1).T for p in zip(*rows))")
    ),
}
