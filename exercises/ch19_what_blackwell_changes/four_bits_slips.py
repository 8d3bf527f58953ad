"""What goes wrong with codes of 4 bits and their scales, for exercise 19.7: edits of its three meanings."""

from course_lib.checker.specification.edits import edits

SUM, SIGN, BYTE = "(sizes > UP).sum(-1) + (sizes >= EVEN).sum(-1)", "(numbers < 0)", "low + 16 * high"
IN_CODES = (
    *edits("Codes stand in the wrong place. Byte i has the code of number 2i in its low four bits, and that of "
        "number 2i + 1 in its high four bits.", halves_exchanged=(BYTE, "16 * low + high"),
        not_neighbours=("code[:, 0::2], code[:, 1::2]", "code.chunk(2, 1)")),
    *edits("The sign is lost. Bit 3 of a code, which is worth 8, is 1 for negative numbers.",
        sign_lost=(SIGN, "(numbers != numbers)"), sign_lost__inverted=(SIGN, "(numbers > 0)")),
    *edits("Negative numbers have the code of two's complement. A code is a sign and a size: the sign adds 8.",
        twos_complement=(f"code + 8 * {SIGN}", f"torch.where({SIGN}, (16 - code) % 16, code)")),
    *edits("Numbers halfway between two codes were rounded wrongly. Of the two codes take the even one: 0.25 becomes 0 "
        "and 0.75 becomes 1.", halfway_up=(SUM, "(sizes >= UP).sum(-1) + (sizes >= EVEN).sum(-1)"),
        halfway_down=(SUM, "(sizes > UP).sum(-1) + (sizes > EVEN).sum(-1)")),
    *edits("The sizes were cut down to the next smaller code. Take the nearest one.",
        cut_down=(SUM, "(sizes >= NUMBERS[1:8]).sum(-1)"), cut_down__up=(SUM, "(sizes > NUMBERS[:7]).sum(-1)")),
)  # fmt: skip

CEIL, BYTES, SIZE = "torch.log2(quotient).ceil()", "(exponent + 127)", "blocks.abs().amax(-1)"
BEFORE = (
    "The numbers were divided by the scale as it was before it was rounded. Who reads the codes has the rounded one."
)
IN_MXFP4 = (
    *edits(BEFORE, scale_before_rounding=("torch.exp2(exponent)", "quotient.float()")),
    *edits("The exponent is that of the largest power of two, less 2: the OCP's rule. The largest number then lies "
        "between 4 and 8 times 2^e, and beyond 6 it is cut. Round log2(largest / 6) up.",
        powers_alone=(CEIL, "torch.log2(largest).floor() - 2"),
        powers_alone__frexp=(CEIL, "torch.frexp(largest).exponent.float() - 3")),
    *edits("The exponent was rounded down or to the nearest one, so that large numbers are cut to 6 · 2^e. Round up.",
        **{f"rounded_down__{how}": (CEIL, CEIL.replace("ceil", how)) for how in ("floor", "round", "trunc")}),
    *edits("The exponent goes up from 1.75 · 2^n on. The largest code is 6, which is 1.5 · 4, so it must go up beyond "
        "1.5 · 2^n.", wrong_threshold=(CEIL, "torch.log2(largest / 1.75).floor() - 1")),
    *edits("The exponent is one too large in blocks that would fit. It is the smallest one for which the largest "
        "number is at most 6 · 2^e, and 6 · 2^e fits.", too_large=(CEIL, "torch.log2(largest / 6).floor() + 1"),
        too_large__frexp=(CEIL, "torch.frexp(quotient).exponent.double()"),
        too_large__4=(CEIL, "torch.log2(largest / 4).ceil()")),
    *edits("The exponent's byte has another offset. It is e + 127.",
        **{f"wrong_offset__{n}": (BYTES, f"(exponent + {n})") for n in (0, 128)}),
    *edits("A block of zeros has another byte than 0, or blocks of small numbers have too large a scale, because there "
        "is a floor below them. e is at least -127.",
        floor_of_the_exponent=(BYTES, "torch.where(largest > 0, exponent + 127, 127)"),
        **{f"floor_of_the_exponent__{floor}": ("largest.double()", f"largest.clamp(min={floor}).double()")
           for floor in ("1e-12", "1e-10", "1e-8")}, floor_of_the_exponent__tiny=("min=-127", "min=-128")),
    *edits("A block whose largest number is a hair above 6 · 2^e was given the exponent e. log2 in float32 does "
        "that, because it rounds. Take it in float64, or get the exponent from torch.frexp.",
        logarithm_rounded=("log2(quotient)", "log2(quotient.float())")),
)  # fmt: skip

TENSOR, ROW, FLOOR = "x.abs().amax(-1), blocks", "torch.where(top > 0, top / (448 * 6), 1.0)", ".clamp(min=1 / 64)"
OUT = "(scale * row[:, None])"
IN_NVFP4 = (
    *edits("The scale of the rows is that of the whole tensor. Each row has its own, from its largest number.",
        scale_of_the_tensor=(TENSOR, "x.abs().amax().expand(len(x)), blocks")),
    *edits("The row scale was left out: 1 for all rows. The blocks' scales of small rows then fall below 2^-6, and "
        "those of large rows go beyond 448.", row_scale_left_out=(ROW, "torch.ones_like(top)")),
    *edits("The row scale is not the largest number of the row over 448 · 6.",
        **{f"wrong_row_scale__{n}": (ROW, f"torch.where(top > 0, top / {n}, 1.0)") for n in (448, 6)}),
    *edits("A row of zeros has another scale than 1.", row_of_zeros=(ROW, "top / (448 * 6)")),
    *edits("A floor lies below the scales of the rows. Only a row of zeros is special: its scale is 1.",
        floor_of_the_rows=(ROW, "(top / (448 * 6)).clamp(min=1e-12)"),
        floor_of_the_rows__largest=(ROW, "torch.where(top > 0, top.clamp(min=1e-12) / (448 * 6), 1.0)"),
        floor_of_the_rows__both=(ROW, "top.clamp(min=1e-12) / (448 * 6)")),
    *edits("The numbers were not divided by both scales, the block's and the row's.",
        one_scale_alone=(OUT, "scale"), one_scale_alone__row=(OUT, "row[:, None]")),
    *edits(BEFORE, scale_before_rounding=(OUT, "(exact * row[:, None])")),
    *edits("The block's scale was not divided by the row's. A number is code · block's scale · row's scale.",
        block_scale_alone=(" / row[:, None])", ")"), block_scale_alone__2=(" / row[:, None])", ")", OUT, "scale")),
    *edits("The smallest scale of a block is 2^-6. Below it e4m3 has fewer digits, and in the end 0.",
        no_smallest_scale=(FLOOR, ""), no_smallest_scale__9=(FLOOR, ".clamp(min=1 / 512)")),
    *edits("A block of zeros has another scale than 2^-6, the smallest one.",
        block_of_zeros=(FLOOR, ".where(largest > 0, 1.0).clamp(min=1 / 64)")),
)  # fmt: skip


def of_blocks(width, other):
    return (
        *edits("The scales come from the largest number, not the largest magnitude: negative numbers count too.",
            sign_forgotten=(SIZE, "blocks.amax(-1)"), sign_forgotten__after=(SIZE, "blocks.amax(-1).abs()")),
        *edits(f"The blocks have {other} numbers. They have {width}: MXFP4's 32, and NVFP4's 16.",
            wrong_width=(f"(-1, {width})", f"(-1, {other})")),
    )  # fmt: skip
