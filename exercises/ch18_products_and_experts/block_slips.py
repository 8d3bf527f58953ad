"""What goes wrong with scaled blocks and their product, for exercise 18.8: edits of its two meanings."""

from course_lib.checker import edits
from exercises.ch18_products_and_experts.product_steps import ways

LARGEST_OF, SCALE, EACH = "padded.abs().amax(-1)", "torch.where(largest > 0, largest / 448, 1.0)", "numbers / each"
CODED, CODES, SCALES = "scaled.to(torch.float8_e4m3fn).float()", '"codes": codes', '"scales": scales'
FLOORED = ("(largest / 448).clamp(min={})", "largest.clamp(min={}) / 448", "largest / 448 + {}", "(largest + {}) / 448")
FORMS = (*FLOORED, *(f"torch.where(largest > 0, {form}, 1.0)" for form in FLOORED), SCALE.replace("> 0", "> {}"))
IN_CODES = (
    *edits("The scales are upside down: what the numbers were multiplied by. A scale is what restores the numbers, "
        "largest / 448.", scale_inverted=(SCALES, '"scales": 1 / scales'),
        scale_inverted__multiplied=(SCALE, "torch.where(largest > 0, 448 / largest, 1.0)", EACH, "numbers * each")),
    *edits("The numbers were multiplied by the scale. Divide them by it.", multiplied=(EACH, "numbers * each")),
    *edits("The numbers were not divided by their scale.", not_divided=(EACH, "numbers + 0 * each")),
    *edits("The scale comes from the whole row. Each 128 numbers of it have their own.",
        scale_of_the_row=(LARGEST_OF, "padded.abs().amax((1, 2))[:, None].expand(rows, count)")),
    *edits("The scale comes from all rows. Each row has its own.", **ways("scale_of_all_rows", LARGEST_OF,
        "padded.abs().amax((0, 2)).expand(rows, count)", "padded.abs().amax().expand(rows, count)")),
    *edits("The scale comes from the largest number, not from the largest magnitude: negative numbers count too.",
        **ways("sign_forgotten", LARGEST_OF, "padded.amax(-1)", "padded.amax(-1).abs()")),
    *edits("The scale does not come from the block's largest magnitude.", **ways("not_the_largest", LARGEST_OF,
        "padded.abs().mean(-1)", "padded[:, :, :64].abs().amax(-1)", "(padded.amax(-1) - padded.amin(-1)) / 2")),
    *edits("The largest code is not 448, which is the largest number of e4m3fn. 240 is that of e4m3fnuz, 57,344 that "
        "of e5m2, 127 and 255 those of integers.", **ways("largest_of_another_format", SCALE,
        *(SCALE.replace("448", largest) for largest in ("240", "57344", "127", "256")))),
    *edits("A block of zeros has the scale 0, not 1, and 0 / 0 is NaN.", zeros_divided=(SCALE, "largest / 448")),
    *edits("A block of zeros has another scale than 1.", **ways("zeros_with_a_floor", SCALE,
        *(f"torch.where(largest > 0, largest / 448, {floor})" for floor in ("1e-12", "1e-8", "1 / 448"))),
        zeros_with_a_floor__scales=(SCALES, '"scales": largest / 448')),
    *edits("Blocks of small numbers have too large a scale: a floor, a sum, or 1. Only a block of zeros has the scale "
        "1.", alone=True, **ways("scale_with_a_floor", SCALE,
        *(form.format(floor) for form in FORMS for floor in ("1e-12", "1e-10", "1e-8", "1e-4")))),
    *edits("The scales were rounded: to 16 bits, or to powers of two. They are float32.", **ways("scales_rounded",
        SCALE, f"{SCALE}.bfloat16().float()", f"{SCALE}.to(x.dtype).float()", f"torch.exp2({SCALE}.log2().ceil())")),
    *edits("The codes were rounded to whole numbers. Round to the nearest e4m3 number: .to(torch.float8_e4m3fn).",
        codes_cut=(CODED, "scaled.round().to(torch.float8_e4m3fn).float()")),
    *edits("Numbers or quotients were rounded to 16 bits. Turn the numbers into float32 first; keep to it.",
        **ways("divided_in_16_bits", EACH, "(numbers.bfloat16() / each.bfloat16()).float()",
        "(numbers.to(x.dtype) / each.to(x.dtype)).float()", "(numbers / each).bfloat16().float()",
        "(numbers / each).half().float()"), **ways("divided_in_16_bits__first",
        "x.to(torch.promote_types(x.dtype, torch.float32))", "x.bfloat16().float()", "x.half().float()")),
    *edits("The row was filled up in front, so the first block is the shorter one, not the last.",
        filled_up_in_front=("(0, count * 128 - inner)", "(count * 128 - inner, 0)", "dim=1)[:, :inner]",
        "dim=1)[:, -inner:]")),
    *edits("The last numbers are missing where inner is no multiple of 128. The last block may have fewer.",
        last_numbers_missing=(CODES, f"{CODES}[:, : inner // 128 * 128]", SCALES, f"{SCALES}[:, : inner // 128]")),
    *edits("Blocks have another width than 128 numbers.", **ways("blocks_of_another_width", "128", "32", "64", "256")),
)  # fmt: skip
BLOCK_A, BLOCK_B, TOTAL = "a[:, begin:end]", "b[:, begin:end]", "total + sums * scale"
SUMS = f"tensor_core({BLOCK_A}, {BLOCK_B}, None).to(total.dtype)"
FROM_TOTAL = SUMS.replace("None", "total")
OF_ROW, OF_COLUMN = "x_scales[:, block, None]", "weight_scales[:, block].repeat_interleave(128)[:outer]"
SCALED, BLOCKS = "row_scale * column_scale", "range(0, inner, 128)"
IN_PRODUCT = (
    *edits("The running total went through the tensor core, whose 14 bits cut off a little in each block. Begin each "
        "block from zeros, and add its sums in float32.",
        running_total=(TOTAL, f"tensor_core({BLOCK_A}, {BLOCK_B}, total / scale) * scale"),
        **ways("running_total__added", SUMS, FROM_TOTAL, f"{FROM_TOTAL} - total")),
    *edits("The sums of the blocks before were added once more: the tensor core began with them, and not with zeros.",
        sums_added_again=(SUMS, SUMS.replace("None", "locals().get('sums')"))),
    *edits("The products are too exact: they did not go through the tensor core. Use it for all of them.",
        too_exact=(SUMS, f"({BLOCK_A}.double() @ {BLOCK_B}.double().T).to(total.dtype)")),
    *edits("A block was taken in parts that begin from zeros. The tensor core adds all 128 products.",
        **ways("block_in_parts", SUMS, *(f"sum(tensor_core(a[:, i:i + {n}], b[:, i:i + {n}]) for i in range(begin, "
        f"min(end, inner), {n})).to(total.dtype)" for n in (32, 64)))),
    *edits("The numbers were scaled and rounded to 8 bits again. Scale the block's sums.", requantised=(SUMS,
        SUMS.replace(BLOCK_A, f"({BLOCK_A}.float() * row_scale.float()).to(a.dtype)"), TOTAL,
        "total + sums * column_scale")),
    *edits("The scales of x are missing.", x_scales_missing=(SCALED, "column_scale + 0 * row_scale")),
    *edits("The scales of the weight are missing.", weight_scales_missing=(SCALED, "row_scale + 0 * column_scale")),
    *edits("The sums are not scaled.", scales_missing=(TOTAL, "total + sums")),
    *edits("The sums were divided by a scale. Multiply by both.", divided_by_scales=(TOTAL, "total + sums / scale"),
        **ways("divided_by_scales__one", SCALED, "column_scale / row_scale", "row_scale / column_scale")),
    *edits("Scales were added, or have other powers. Multiply by each once.",
        wrong_scales=(SCALED, "row_scale + column_scale"),
        **ways("wrong_scales__power", TOTAL, "total + sums * scale**2", "total + sums * scale**0.5")),
    *edits("A scale of another block was taken. Block i has the scales of column i.",
        **{f"scale_of_another_block__{name}_{at}": tuple(text for piece in pieces for text in (
           piece, piece.replace("block", at))) for name, pieces in (
           ("both", (OF_ROW, OF_COLUMN)), ("x", (OF_ROW,)), ("weight", (OF_COLUMN,))) for at in ("0", "-1")}),
    *edits("The scales of the weight are one for each 128 of its rows: row n has weight_scales[n // 128].",
        **ways("scale_of_the_wrong_rows", OF_COLUMN, *(f"weight_scales[{row}, block]" for row in (
        "torch.arange(outer) % len(weight_scales)", "torch.zeros(outer).long()",
        "torch.arange(outer).clamp(max=len(weight_scales) - 1)",
        "torch.arange(outer) // -(-outer // len(weight_scales))")))),
    *edits("Scales belong to their block's sums, not to the total.", total_scaled=(TOTAL, "(total + sums) * scale")),
    *edits("The first block is missing.", first_block_missing=(BLOCKS, "range(128, inner, 128)")),
    *edits("All rows have row 0's scale. Row r has x_scales[r].", scale_of_row_0=(OF_ROW, "x_scales[:1, block, None]")),
    *edits("The last columns are missing where inner is no multiple of 128.", **ways("last_block_missing", BLOCKS,
        "range(0, inner // 128 * 128, 128)", "range(0, max(128, inner // 128 * 128), 128)")),
    *edits("Only one block counts: add to the total.", one_block=(TOTAL, "0 * total + sums * scale")),
    *edits("Sums, scales or the total were rounded to 16 bits. All of them are float32.",
        **{f"rounded_to_16_bits__{piece}_{dtype}": (piece, f"({piece}).{dtype}().to(total.dtype)")
           for dtype in ("half", "bfloat16") for piece in (TOTAL, SUMS, SCALED, OF_ROW, OF_COLUMN)},
        **{f"rounded_to_16_bits__end_{dtype}": ("return total", f"return total.{dtype}().to(total.dtype)")
           for dtype in ("half", "bfloat16")}),
)  # fmt: skip
