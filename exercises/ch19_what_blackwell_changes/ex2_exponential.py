"""Exercise 19.2: 2^x from multiply-adds and bits, without the exponential unit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Requirement, edits, model_of
from course_lib.checker.specification.contract import Contract, Level


def answered(functions, x, rows, columns):
    """The result over 2^x, and what is wrong below -126; operations of the exponential unit are noted.

    It is sent by its source alone, and computes in NumPy, since PyTorch's operations are counted.
    """
    import os

    import numpy as np

    noted, builder, usual = getattr(functions, "noted", None), None, {}
    if noted is not None and os.environ.get("TRITON_INTERPRET") == "1":
        from triton.runtime.interpreter import interpreter_builder as builder

    def counting(operation, words):
        def counted(handle, *more, **options):
            if getattr(getattr(handle, "data", None), "size", 0) > 1:  # a constant is converted by the compiler
                noted[words] = noted.get(words, 0) + 1
            return operation(handle, *more, **options)

        return counted

    for words, operations in {
        "an exponential, a logarithm or a root": "exp exp2 log log2 sqrt precise_sqrt rsqrt sin cos erf",
        "a rounding to whole numbers": "floor ceil",
        "a conversion between floats and integers": "fp_to_si fp_to_ui si_to_fp ui_to_fp",
        "a division or remainder": "fdiv precise_divf approx_divf frem sdiv udiv srem urem",
    }.items():
        for name in (f"create_{operation}" for operation in operations.split()):
            if hasattr(builder, name):
                usual[name] = getattr(builder, name)
                setattr(builder, name, counting(usual[name], words))
    try:
        result = functions["powers"](x, rows, columns)
    finally:
        for name in usual:
            delattr(builder, name)
    if getattr(result, "dtype", None) != x.dtype or result.shape != x.shape:
        raise TypeError(f"powers returned {result!r:.80}; it must return a tensor with the dtype and shape of x")
    got, at = (tensor.detach().cpu().double().numpy() for tensor in (result, x))
    below, least = at < -126, 2.0**-126
    small = (got >= 0) & np.where(at > -127, got <= least, got < least)
    with np.errstate(all="ignore"):
        ratio = np.where(below, 1.0, got / np.exp2(at))
        excess = np.where(below & ~small, got / least, 0.0)
    parts = {"ratio to 2^x": ratio, "below -126, times 2^126": excess}
    return {name: torch.from_numpy(part).to(x.dtype) for name, part in parts.items()}


def power_of(x):
    clamped = torch.clamp(x, min=-127.0)
    added = clamped + 1536.0
    bits = added.view(torch.int32) & -8192
    fraction = clamped - (bits.view(torch.float32) - 1536.0)
    power = 0.07706703990697861 * fraction + 0.22764499485492706
    power = power * fraction + 0.6951167583465576
    power = power * fraction + 1.0
    result = (power.view(torch.int32) + (bits << 10)).view(torch.float32)
    return result


def truth(x, rows, columns):
    return answered({"powers": lambda x, rows, columns: torch.exp2(x)}, x, rows, columns)


def of_largest_error(x, rows, columns):
    """With the polynomial's largest error, the one at 1, wherever x lies."""
    at_1 = (1 + 0.6951167583465576 + 0.22764499485492706 + 0.07706703990697861) / 2
    return answered({"powers": lambda x, rows, columns: torch.exp2(x) * at_1}, x, rows, columns)


def by_polynomial(x, rows, columns):
    return answered({"powers": lambda x, rows, columns: power_of(x)}, x, rows, columns)


def beside_whole(draw, length):
    numbers, sides = torch.arange(length).remainder(252) - 125.0, torch.tensor([-math.inf, math.inf])
    return torch.nextafter(numbers, sides[draw.integers(length, low=0, high=2)])


def far_below(draw, length):
    """From -127 down, in all sizes."""
    ends = torch.tensor([-math.inf, -127.0, -128.0, -150.0, -254.0, -255.0, -1000.0, -1536.0, -1664.0, -3e38])
    return torch.cat([ends, -127 - torch.exp2(draw.uniform(length, low=-8.0, high=110.0))])[:length]


def tiny(draw, length):
    return torch.exp2(draw.uniform(length, low=-149.0, high=-1.0)) * (draw.integers(length, low=0, high=3) - 1)


def within(low, high):
    return lambda draw, length: draw.uniform(length, low=low, high=high)


VALUES = (
    Level(within(0.0, 1.0), "from 0 to 1"), Level(within(-12.0, 12.0), "from -12 to 12"),
    Level(within(-126.0, -20.0), "from -126 to -20"), Level(within(20.0, 127.0), "from 20 to 127"),
    Level(lambda draw, length: 127.0 - torch.arange(length).remainder(254), "whole numbers"),
    Level(beside_whole, "a hair beside whole numbers"), Level(tiny, "tiny numbers"),
    Level(within(-126.9999, -126.0001), "between -127 and -126"), Level(far_below, "-127 and less, -inf too"),
    Level(lambda draw, length: torch.where(draw.uniform(length) < 0.3, -math.inf, -40 * draw.uniform(length)),
        "as in attention, some -inf"),
)  # fmt: skip
TILES = [Level(tile, "tiles of {} × {}".format(*tile)) for tile in ((16, 32), (128, 1), (64, 8))]
TILES.append(Level((1, 256), "tiles of one dimension"))


def power_cases(draw):
    steps = torch.arange(0, 4, 0.25)
    return [
        Case("0, 0.25, 0.5 … 3.75", (steps, 4, 4), driver=answered),
        Case("-0.25, -0.5 … -4", (-0.25 - steps, 4, 4), driver=answered),
        *(Case(f"1,000 numbers, {level}", (level.value(draw, 1000), 16, 64), driver=answered) for level in VALUES),
        Case("a matrix, in tiles of 32 × 32", (draw.normal(50, 70, scale=20.0), 32, 32), driver=answered),
    ]


CONTRACT = Contract(
    lambda draw, *, values, tile, length: (values(draw, length), *tile),
    choices={"values": VALUES, "tile": TILES, "length": (1, 127, 500)}, driver=answered, most=16,
    says={"values": "at most 127; -inf too, but never NaN", "tile": "a float32 tile of any shape"},
)  # fmt: skip


CLAMP, ADDED, BITS = "torch.clamp(x, min=-127.0)", "clamped + 1536.0", "added.view(torch.int32) & -8192"
WHOLE, SHIFTED, START = "(bits.view(torch.float32) - 1536.0)", "(bits << 10)", "0.07706703990697861 * fraction"
POWER_BITS, LAST = "power.view(torch.int32)", "power * fraction + 1.0"
SUM = f"({POWER_BITS} + {SHIFTED}).view(torch.float32)"
C1, C2, C3 = "0.6951167583465576", "0.22764499485492706", "0.07706703990697861"


def magic(added="clamped - 0.5 + 12582912.0"):
    """The other way to ⌊x⌋: a number so large that no digit after the point is left."""
    return ADDED, added, BITS, "added.view(torch.int32)", WHOLE, "(added - 12582912.0)", SHIFTED, "(bits << 23)"


CHANGES = (
    *edits("", magic=magic()),
    *edits("x was not bounded below, or not everywhere. -inf then gives NaN or infinity, and an exponent below -127 "
        "runs into the sign. Take the larger one of x and -127 first.",
        no_clamp=(CLAMP, "x + 0.0"), no_clamp__in_the_fraction=("fraction = clamped", "fraction = x"),
        no_clamp__in_the_sum=("added = clamped +", "added = x +")),
    *edits("x was rounded towards 0, as a conversion to an integer does it, so the fraction of a negative x is "
        "negative. Round down, and do so by an addition: conversions run on the exponential unit.",
        truncated=(ADDED, "torch.trunc(clamped)", BITS, "added.to(torch.int32)", WHOLE, "added",
        SHIFTED, "(bits << 23)"),
        truncated__size=(ADDED, "clamped.abs() + 1536.0", WHOLE, f"(clamped.sign() * {WHOLE})",
        SHIFTED, "(torch.where(clamped < 0, 0x44C00000 - bits, bits) << 10)")),
    *edits("x was bounded below by a number less than -127, such as -128. Then the exponent in the bits becomes "
        "negative and runs into the sign. -127 is the last for which it is 0.",
        **{f"clamp_too_low__{bound}": (CLAMP, CLAMP.replace("127", str(bound))) for bound in (128, 149, 150)}),
    *edits("x was bounded below by -126 or more, so -inf does not give 0. A masked key would get a weight. Use -127.",
        **{f"clamp_too_high__{bound}": (CLAMP, CLAMP.replace("127", str(bound))) for bound in (126, 125, 120, 100)}),
    *edits("x was bounded above, or the smaller of x and -127 was taken. x may be up to 127: bound it below alone.",
        upper_bound__minimum=(CLAMP, "torch.clamp(x, max=-127.0)"),
        **{f"upper_bound__{top}": (CLAMP, f"torch.clamp(x, -127.0, {top})") for top in (0, 1, 88, 125, 126)}),
    *edits("x was rounded to the nearest whole number, so the fraction lies between -1/2 and 1/2. The coefficients are "
        "made for 0 to 1: round down.",
        nearest=magic("clamped + 12582912.0"), nearest__half=(ADDED, "clamped + 1536.5")),
    *edits("That is 2^⌊x⌋ (1 + f), off by up to 6 %. If the 13 digits after the point are not cleared, they lie in the "
        "result's mantissa, and the fraction is 0. Else the polynomial lacks f² and f³.",
        not_cleared=(" & -8192", " & -1")),
    *edits("The fraction is lost: the result is 2^⌊x⌋. It is x - ⌊x⌋, and ⌊x⌋ has no digits after the point.",
        fraction_lost=(WHOLE, "(added - 1536.0)"),
        fraction_lost__power=("result = (power.view", "result = (torch.ones_like(x).view")),
    *edits("Another number of bits was cleared. A float32 from 1024 to 2048 has 23 - 10 = 13 digits after the point.",
        **{f"wrong_mask__{mask}": (" & -8192", f" & {mask}") for mask in (-1024, -2048, -4096, -16384, 8191)}),
    *edits("The number that is added is too small for negative x: below 1024 there are 14 digits after the point. With "
        "1536 all sums lie between 1024 and 2048.",
        wrong_point=(ADDED, "clamped + 1024.0", WHOLE, WHOLE.replace("1536", "1024"))),
    *edits("⌊x⌋ was shifted to the wrong place. Its last digit belongs to bit 23, where the exponent begins. With 1536 "
        "added it stands in bit 13.",
        **{f"wrong_shift__{n}": (SHIFTED, f"(bits << {n})") for n in (9, 11, 12, 13)}),
    *edits("A float's exponent is 127 more than what it stands for, and the bits of the power hold these 127 already. "
        "Add ⌊x⌋ to them, or multiply by a number whose exponent is ⌊x⌋ + 127.",
        bias__twice=(SHIFTED, "(bits << 10) + (127 << 23)"),
        bias__missing=(SUM, "power * (bits << 10).view(torch.float32)")),
    *edits("2^⌊x⌋ is missing: ⌊x⌋ was not added to the exponent, or it was shifted out at the top.",
        exponent_missing=(SUM, "power"), exponent_missing__shifted_out=(SHIFTED, "(bits << 23)")),
    *edits("The value was converted where the same bits should be read as another type: `bitcast=True` is missing.",
        not_a_bitcast=(POWER_BITS, "power.to(torch.int32)"), not_a_bitcast__sum=(BITS, BITS.replace("view", "to")),
        not_a_bitcast__whole=(WHOLE, WHOLE.replace("view", "to")),
        not_a_bitcast__result=(SUM, f"{SUM[:-20]}.to(torch.float32)"),
        not_a_bitcast__both=(SUM, f"(power.to(torch.int32) + {SHIFTED}).to(torch.float32)"),
        not_a_bitcast__added=(SUM, f"power + {SHIFTED}")),
    *edits("The coefficients are in the wrong order, or one stands twice: ((C3 · f + C2) · f + C1) · f + 1.",
        coefficients_reversed=(C1, C3, C3, C1), coefficients_reversed__c1_c2=(C1, C2, C2, C1),
        coefficients_reversed__c2_twice=(C1, C2), coefficients_reversed__c1_twice=(C2, C1),
        coefficients_reversed__with_1=(C3, "1.0", C2, C1, C1, C2, "fraction + 1.0", f"fraction + {C3}")),
    *edits("A step of the polynomial is missing: ((C3 · f + C2) · f + C1) · f + 1.",
        step_missing=(START, C3), step_missing__c3=(f"{START} + {C2}", C2), step_missing__1=(LAST, "power * fraction"),
        step_missing__last=(LAST, "power + 1.0"), step_missing__middle=(f"power * fraction + {C1}", f"power + {C1}")),
    *edits("These are Taylor's coefficients. Their error at 1 is 64 times as large: use C1, C2 and C3.",
        taylor=(C1, "math.log(2)", C2, "math.log(2) ** 2 / 2", C3, "math.log(2) ** 3 / 6")),
    *edits("The polynomial took another number than the fraction, which is from 0 to 1: x - ((⌊x⌋ + 1536) - 1536).",
        wrong_fraction__negated=("clamped - (bits", "-clamped + (bits"), wrong_fraction__x=(f"clamped - {WHOLE}",
        "clamped"), wrong_fraction__with_1536=(WHOLE, "bits.view(torch.float32)"),
        wrong_fraction__brackets=(WHOLE, WHOLE.replace("-", "+"))),
)  # fmt: skip


@dataclass(frozen=True)
class OffTheUnit(Requirement):
    """Nothing runs on the unit whose work this is to take over."""

    id: str = "exponential_unit"

    def complaint(self, case, seen):
        if not seen.noted:
            return None
        return (
            f"Each number takes {' and '.join(sorted(seen.noted))}. The exponential unit does that, or a part of it. "
            "Use additions, multiplications, comparisons, shifts and bitcasts, `.to(tl.int32, bitcast=True)`, alone."
        )


EXERCISE = Exercise(
    id="19.2", title="2^x from multiply-adds", entries=("powers",), cases=power_cases, needs=TRITON,
    oracle=truth, plain=(of_largest_error,), contracts=(CONTRACT,),
    models=(model_of(by_polynomial, CHANGES, (power_of,), draws=0),),
    mistakes=(
        Mistake("no_clamp_and_exponential_unit", "Two things are wrong. First: x was not bounded below, so -inf gives "
            "NaN: take the larger one of x and -127. Second: floor and conversions to integers run on the exponential "
            "unit. Round down by an addition.", first=True, every=True,
            when=lambda case, seen, got: seen.noted and bool(got["below -126, times 2^126"].isnan().any())),
    ),
    requirements=(LaunchesTriton(), Forbids(("exp2", "special_exp2", "exp", "pow", "ldexp")), OffTheUnit()),
    hints=(
        "Begin with x = tl.maximum(x, -127.0). At -127 the bits of the exponent become 0, and so does the result.",
        "x + 1536 lies between 1024 and 2048, and has 13 digits after the point. Read its bits, "
        "(x + 1536.0).to(tl.int32, bitcast=True), and clear the last 13 by & -8192. Read as a float32 again, that is "
        "⌊x⌋ + 1536.",
        "The fraction is x - (⌊x⌋ + 1536 - 1536). The polynomial by Horner: start with C3, and three times multiply by "
        "the fraction and add the next coefficient; the last is 1.",
        "Shift the cleared bits to the left by 10: ⌊x⌋ then stands where a float32 has its exponent, and 1536 has left "
        "at the top. Add that to the bits of the polynomial, and read the sum as a float32.",
    ),
)  # fmt: skip
