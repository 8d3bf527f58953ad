"""Wrong answers to exercise 19.2, and unusual right ones."""

from tests.submissions.edits import changed

CLAMP, ADDED, MASK = "tl.maximum(x, -127.0)", "(x + 1536.0).to(tl.int32, bitcast=True)", " & -8192"
WHOLE = "(bits.to(tl.float32, bitcast=True) - 1536.0)"
POWER = "((C3 * fraction + C2) * fraction + C1) * fraction + 1.0"
RESULT = "(power.to(tl.int32, bitcast=True) + (bits << 10)).to(tl.float32, bitcast=True)"


def wrong(*replacements):
    return changed("19.2", *replacements)


def written(*lines):
    """The cell with another body of the function."""
    head, rest = wrong().split(f"    x = {CLAMP}\n")
    return head + "".join(f"    {line}\n" for line in lines) + rest[rest.index("\n\n@triton.jit") :]


def by_magic(added="x + 12582912.0", taken="12582912.0", clamp="-127.0"):
    """⌊x⌋ by a number so large that no digit after the point is left."""
    return written(f"x = tl.maximum(x, {clamp})", f"added = {added}", f"fraction = x - (added - {taken})",
        f"power = {POWER}", f"bits = power.to(tl.int32, bitcast=True) + (added.to(tl.int32, bitcast=True) << 23)",
        "return bits.to(tl.float32, bitcast=True)")  # fmt: skip


def by_floor(*lines):
    return written(f"x = {CLAMP}", *lines, "fraction = x - whole", f"power = {POWER}",
        "bits = power.to(tl.int32, bitcast=True) + (whole.to(tl.int32) << 23)",
        "return bits.to(tl.float32, bitcast=True)")  # fmt: skip


WRONG = {
    "no_clamp": wrong((CLAMP, "x")),
    "no_clamp__by_magic": written("added = x - 0.5 + 12582912.0", "fraction = x - (added - 12582912.0)",
        f"power = {POWER}", "bits = power.to(tl.int32, bitcast=True) + (added.to(tl.int32, bitcast=True) << 23)",
        "return bits.to(tl.float32, bitcast=True)"),
    "no_clamp__in_the_fraction": wrong((f"x = {CLAMP}", f"clamped = {CLAMP}"), ("(x + 1536.0)", "(clamped + 1536.0)")),
    "clamp_too_low": wrong((CLAMP, "tl.maximum(x, -128.0)")),
    "clamp_too_low__150": wrong((CLAMP, "tl.maximum(x, -150.0)")),
    "clamp_too_high": wrong((CLAMP, "tl.maximum(x, -126.0)")),
    "upper_bound__0": wrong((CLAMP, "tl.minimum(tl.maximum(x, -127.0), 0.0)")),
    "upper_bound__minimum": wrong((CLAMP, "tl.minimum(x, -127.0)")),
    "nearest": by_magic(),
    "nearest__half": wrong(("(x + 1536.0)", "(x + 1536.5)")),
    "not_cleared": wrong((MASK, "")),
    "fraction_lost": wrong((WHOLE, "((x + 1536.0) - 1536.0)")),
    "fraction_lost__power": wrong(("power.to(tl.int32, bitcast=True)", "(1.0 + 0.0 * x).to(tl.int32, bitcast=True)")),
    "wrong_mask": wrong((MASK, " & -1024")),
    "wrong_mask__others": wrong((MASK, " & 8191")),
    "wrong_point": wrong(("1536.0", "1024.0")),
    "wrong_shift": wrong(("bits << 10", "bits << 13")),
    "exponent_missing__shifted_out": wrong(("bits << 10", "bits << 23")),
    "bias__twice": wrong(("(bits << 10)", "((bits << 10) + (127 << 23))")),
    "bias__missing": wrong((RESULT, "power * (bits << 10).to(tl.float32, bitcast=True)")),
    "exponent_missing": wrong((RESULT, "power")),
    "wrong_fraction__with_1536": wrong((WHOLE, "bits.to(tl.float32, bitcast=True)")),
    "truncated": by_floor("whole = x.to(tl.int32).to(tl.float32)"),
    "no_clamp_and_exponential_unit": by_floor("whole = tl.floor(x)").replace(CLAMP, "x"),
    "not_a_bitcast__added": wrong((RESULT, "power + (bits << 10)")),
    "not_a_bitcast": wrong(("(power.to(tl.int32, bitcast=True)", "(power.to(tl.int32)")),
    "not_a_bitcast__whole": wrong(("bits.to(tl.float32, bitcast=True)", "bits.to(tl.float32)")),
    "not_a_bitcast__result": wrong((RESULT, RESULT.replace("float32, bitcast=True", "float32"))),
    "not_a_bitcast__sum": wrong((ADDED, "(x + 1536.0).to(tl.int32)")),
    "coefficients_reversed": wrong((POWER, "((C1 * fraction + C2) * fraction + C3) * fraction + 1.0")),
    "coefficients_reversed__with_1": wrong((POWER, "((1.0 * fraction + C1) * fraction + C2) * fraction + C3")),
    "step_missing": wrong((POWER, "((C3 + C2) * fraction + C1) * fraction + 1.0")),
    "step_missing__c3": wrong((POWER, "(C2 * fraction + C1) * fraction + 1.0")),
    "step_missing__1": wrong((POWER, "((C3 * fraction + C2) * fraction + C1) * fraction")),
    "taylor": wrong((POWER, "((0.0555041 * fraction + 0.2402265) * fraction + 0.6931472) * fraction + 1.0")),
    "wrong_fraction": wrong((f"x - {WHOLE}", f"{WHOLE} - x")),
    "wrong_fraction__brackets": wrong((WHOLE, WHOLE[1:-1])),
    "wrong_fraction__x": wrong((f"x - {WHOLE}", "x")),
    "exponential_unit": written("return tl.exp2(x)"),
    "exponential_unit__floor": by_floor("whole = tl.floor(x)"),
    "exponential_unit__conversion": by_floor("whole = x.to(tl.int32)", "whole = whole - (x < whole).to(tl.int32)"),
    "exponential_unit__whole_numbers": wrong((MASK, " // 8192 * 8192")),
    "exponential_unit__e": written("return tl.exp(x * 0.6931471805599453)"),
    "exponential_unit__division": wrong((POWER, f"({POWER}) / (1.0 + 0.0 * x)")),
    "forbidden_operation": wrong(("    return out", "    return torch.exp2(x)")),
    "no_kernel_launched": wrong(("    out = torch.empty_like(x)", "    return torch.exp2(x)\n    out = x")),
    "no_clamp__and_reversed": wrong((CLAMP, "x"), (POWER, "((C1 * fraction + C2) * fraction + C3) * fraction + 1.0")),
}  # fmt: skip

UNUSUAL = {
    "rounded to nearest a half lower, bounded a little above -127": by_magic(
        "(x - 0.5) + 12582912.0", clamp="-126.9999"),
    "one digit less after the point": wrong(("1536.0", "3072.0"), (MASK, " & -4096"), ("bits << 10", "bits << 11")),
    "rounded to nearest, then corrected": written("x = tl.where(x > -127.0, x, -127.0)", "added = x + 12582912.0",
        "whole = added - 12582912.0", "above = whole > x", "fraction = tl.where(above, x - whole + 1.0, x - whole)",
        "number = (added.to(tl.int32, bitcast=True) << 23) - tl.where(above, 1 << 23, 0)", f"power = {POWER}",
        "return (power.to(tl.int32, bitcast=True) + number).to(tl.float32, bitcast=True)"),
    "the scale as a float of its own": wrong((CLAMP, "tl.maximum(x, -126.99)"),
        (RESULT, "power * ((bits << 10) + (127 << 23)).to(tl.float32, bitcast=True)")),
    "masked at the end": wrong((f"    x = {CLAMP}", "    given = x"),
        (f"return {RESULT}", f"return tl.where(given < -126, 0, {RESULT})")),
    "shifts for the mask, degree 5": written("x = tl.maximum(x, -127.0)",
        "bits = ((x + 1536.0).to(tl.int32, bitcast=True) >> 13) << 13", f"fraction = x - {WHOLE}",
        "power = tl.fma(fraction, 0.0018671300495043397, 0.009017030708491802)",
        "for c in tl.static_range(0, 4):",
        "    power = power * fraction + (0.05579991266131401 if c == 0 else 0.24016444385051727 if c == 1",
        "                                else 0.6931512951850891 if c == 2 else 1.0)", f"return {RESULT}"),
}  # fmt: skip
