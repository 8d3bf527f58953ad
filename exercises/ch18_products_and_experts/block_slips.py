"""What goes wrong with scaled blocks and their product, for exercise 18.8: edits of its two meanings."""

from course_lib.checker import edits

LARGEST_OF, SCALE, EACH = "padded.abs().amax(-1)", "torch.where(largest > 0, largest / 448, 1.0)", "numbers / each"
CODED, CODES, SCALES = "scaled.to(torch.float8_e4m3fn).float()", '"codes": codes', '"scales": scales'
INVERSE, OWN = "torch.where(largest > 0, 448 / largest, 1.0)", "(numbers.to(x.dtype) / each.to(x.dtype)).float()"
FLOAT32 = "x.to(torch.promote_types(x.dtype, torch.float32))"
FLOORS = ("1e-12", "1e-10", "1e-8", "1e-4")
FLOORED = ("(largest / 448).clamp(min={})", "largest.clamp(min={}) / 448", "largest / 448 + {}", "(largest + {}) / 448")
FORMS = (*FLOORED, *(f"torch.where(largest > 0, {form}, 1.0)" for form in FLOORED), SCALE.replace("> 0", "> {}"))
IN_CODES = (
    *edits("The scales are upside down: they are what the numbers were multiplied by. A scale is largest / 448, what "
        "codes are multiplied by to restore the numbers.",
        scale_inverted=(SCALES, '"scales": 1 / scales'),
        scale_inverted__multiplied=(SCALE, INVERSE, EACH, "numbers * each")),
    *edits("The numbers were multiplied by the scale. Divide them by it.", multiplied=(EACH, "numbers * each")),
    *edits("The numbers were not divided by their scale.", not_divided=(EACH, "numbers + 0 * each")),
    *edits("The scale comes from the whole row. Each 128 numbers of it have their own, so an outlier spoils its own "
        "block alone.", scale_of_the_row=(LARGEST_OF, "padded.abs().amax((1, 2))[:, None].expand(rows, count)")),
    *edits("The scale comes from all rows. Each row has its own.",
        scale_of_all_rows=(LARGEST_OF, "padded.abs().amax((0, 2)).expand(rows, count)"),
        scale_of_all_rows__all=(LARGEST_OF, "padded.abs().amax().expand(rows, count)")),
    *edits("The scale comes from the largest number, not from the largest magnitude: negative numbers count too.",
        sign_forgotten=(LARGEST_OF, "padded.amax(-1)"), sign_forgotten__after=(LARGEST_OF, "padded.amax(-1).abs()")),
    *edits("The scale comes from something else than the block's largest magnitude.",
        **{f"not_the_largest__{name}": (LARGEST_OF, value) for name, value in {
            "mean": "padded.abs().mean(-1)",
            "half": "padded[:, :, :64].abs().amax(-1)", "range": "(padded.amax(-1) - padded.amin(-1)) / 2"}.items()}),
    *edits("The largest code is not 448, which is the largest number of e4m3fn. 240 is that of e4m3fnuz, 57,344 that "
        "of e5m2, 127 and 255 those of integers.",
        **{f"largest_of_another_format__{largest}": (SCALE, SCALE.replace("448", largest))
           for largest in ("240", "57344", "127", "256")},
        largest_of_another_format__cut=(CODED, "scaled.clamp(-240, 240).to(torch.float8_e4m3fn).float()")),
    *edits("A block of zeros has the scale 0, and 0 / 0 is NaN. Its scale is 1.",
        zeros_divided=(SCALE, "largest / 448")),
    *edits("A block of zeros has another scale than 1.",
        **{f"zeros_with_a_floor__{floor}": (SCALE, f"torch.where(largest > 0, largest / 448, {floor})")
           for floor in ("1e-12", "1e-8", "1 / 448")}, zeros_with_a_floor__0=(SCALES, '"scales": largest / 448')),
    *edits("Blocks of small numbers have too large a scale: a floor, something added to it, or 1. Only a block of "
        "zeros has the scale 1.", alone=True,
        **{f"scale_with_a_floor__{number}_{floor}": (SCALE, form.format(floor))
           for number, form in enumerate(FORMS) for floor in FLOORS}),
    *edits("The scales were rounded: to 16 bits, or to powers of two. They are float32, and the largest code is 448.",
        scales_rounded=(SCALE, f"{SCALE}.bfloat16().float()"),
        scales_rounded__own=(SCALE, f"{SCALE}.to(x.dtype).float()"),
        scales_rounded__power=(SCALE, f"torch.exp2({SCALE}.log2().ceil())")),
    *edits("The codes were rounded to whole numbers. Round to the nearest e4m3 number: .to(torch.float8_e4m3fn).",
        codes_cut=(CODED, "scaled.round().to(torch.float8_e4m3fn).float()")),
    *edits("Numbers or quotients were rounded to 16 bits. Turn the numbers into float32 first, and keep to that.",
        divided_in_16_bits=(EACH, "(numbers.bfloat16() / each.bfloat16()).float()"),
        divided_in_16_bits__own=(EACH, OWN),
        divided_in_16_bits__all_own=(EACH, OWN, SCALE, f"{SCALE}.to(x.dtype).float()"),
        divided_in_16_bits__first=(FLOAT32, "x.bfloat16().float()"),
        divided_in_16_bits__first_half=(FLOAT32, "x.half().float()"),
        divided_in_16_bits__last=(EACH, "(numbers / each).bfloat16().float()"),
        divided_in_16_bits__last_half=(EACH, "(numbers / each).half().float()")),
    *edits("The row was filled up in front, so the first block is the shorter one. The last block has fewer numbers.",
        filled_up_in_front=("(0, count * 128 - inner)", "(count * 128 - inner, 0)", "dim=1)[:, :inner]",
        "dim=1)[:, -inner:]")),
    *edits("The last numbers are missing where inner is no multiple of 128. The last block may have fewer.",
        last_numbers_missing=(CODES, f"{CODES}[:, : inner // 128 * 128]", SCALES, f"{SCALES}[:, : inner // 128]")),
    *edits("Blocks have another width than 128 numbers.",
        **{f"blocks_of_another_width__{n}": (EACH, f"numbers / each_of(numbers, {n})", SCALES,
           f'"scales": each_of(numbers, {n})[:, ::{n}]') for n in (32, 64, 256)}),
)  # fmt: skip
BLOCK_A, BLOCK_B, TOTAL = "a[:, begin:end]", "b[:, begin:end]", "total + sums * scale"
SUMS, ROUND = f"tensor_core({BLOCK_A}, {BLOCK_B}, None).to(total.dtype)", ("half", "bfloat16")
OF_ROW, OF_COLUMN = "x_scales[:, block, None]", "weight_scales[:, block].repeat_interleave(128)[:outer]"
SCALED, BLOCKS = "row_scale * column_scale", "range(0, inner, 128)"
IN_PRODUCT = (
    *edits("The running total went through the tensor core, whose 14 bits cut a little off it in each block. Begin "
        "each block from zeros, and add its sums in float32.",
        running_total=(TOTAL, f"tensor_core({BLOCK_A}, {BLOCK_B}, total / scale) * scale"),
        running_total__no_scales=(SUMS, SUMS.replace("None", "total"), TOTAL,
        "sums + 0 * total if end < inner else sums * scale"),
        running_total__added_again=(SUMS, SUMS.replace("None", "total")),
        running_total__taken_off=(SUMS, SUMS.replace("None", "total") + " - total")),
    *edits("The sums of the blocks before were added once more: the tensor core began with them, and not with zeros.",
        sums_added_again=(SUMS, SUMS.replace("None", "locals().get('sums')"))),
    *edits("The products are too exact: they did not go through the tensor core. Use it for all of them.",
        too_exact=(SUMS, f"({BLOCK_A}.double() @ {BLOCK_B}.double().T).to(total.dtype)")),
    *edits("A block was taken in parts that begin from zeros. All of its 128 products are added by the tensor core.",
        **{f"block_in_parts__{n}": (SUMS, f"sum(tensor_core(a[:, at:min(at + {n}, end)], b[:, at:min(at + {n}, end)]) "
           f"for at in range(begin, min(end, inner), {n})).to(total.dtype)") for n in (32, 64)}),
    *edits("The numbers were scaled and rounded to 8 bits again. Scale the block's sums.",
        requantised=(SUMS, SUMS.replace(BLOCK_A, "requantised(a, begin, row_scale)"),
        TOTAL, "total + sums * column_scale")),
    *edits("The scales of x are missing.", x_scales_missing=(SCALED, "column_scale + 0 * row_scale")),
    *edits("The scales of the weight are missing.", weight_scales_missing=(SCALED, "row_scale + 0 * column_scale")),
    *edits("The sums are not scaled.", scales_missing=(TOTAL, "total + sums")),
    *edits("The sums were divided by a scale. Scales restore the numbers: multiply by both.",
        divided_by_scales=(TOTAL, "total + sums / scale"), divided_by_scales__x=(SCALED, "column_scale / row_scale"),
        divided_by_scales__weight=(SCALED, "row_scale / column_scale")),
    *edits("The two scales were added, or have other powers. Multiply by each of them once.",
        wrong_scales=(SCALED, "row_scale + column_scale"), wrong_scales__squared=(TOTAL, "total + sums * scale**2"),
        wrong_scales__root=(TOTAL, "total + sums * scale**0.5")),
    *edits("A scale of another block was taken. Block i has the scales of column i.",
        **{f"scale_of_another_block__{name}": (OF_ROW, OF_ROW.replace("block", at), OF_COLUMN,
           OF_COLUMN.replace("block", at)) for name, at in (("first", "0"), ("last", "-1"))},
        **{f"scale_of_another_block__x_{name}": (OF_ROW, OF_ROW.replace("block", at))
           for name, at in (("first", "0"), ("last", "-1"), ("turned", "-1 - block"))},
        **{f"scale_of_another_block__weight_{name}": (OF_COLUMN, OF_COLUMN.replace("block", at))
           for name, at in (("first", "0"), ("last", "-1"))}),
    *edits("The scales of the weight are one for each 128 of its rows: row n has weight_scales[n // 128].",
        **{f"scale_of_the_wrong_rows__{name}": (OF_COLUMN, f"weight_scales[{row}, block]") for name, row in {
            "modulo": "torch.arange(outer) % len(weight_scales)", "first": "torch.zeros(outer).long()",
            "clamped": "torch.arange(outer).clamp(max=len(weight_scales) - 1)",
            "share": "torch.arange(outer) // -(-outer // len(weight_scales))",
            "floor": "(torch.arange(outer) // (outer // len(weight_scales))).clamp(max=len(weight_scales) - 1)",
        }.items()}),
    *edits("The whole total was multiplied by each block's scales. They belong to the block's own sums.",
        total_scaled=(TOTAL, "(total + sums) * scale")),
    *edits("The first block is missing.", first_block_missing=(BLOCKS, "range(128, inner, 128)")),
    *edits("All rows have the scale of row 0. Row r of x has x_scales[r].",
        scale_of_row_0=(OF_ROW, "x_scales[:1, block, None]")),
    *edits("The last columns are missing where inner is no multiple of 128.",
        last_block_missing=(BLOCKS, "range(0, inner // 128 * 128, 128)"),
        last_block_missing__but_one=(BLOCKS, "range(0, max(128, inner // 128 * 128), 128)")),
    *edits("Only one block counts: add to the total.", one_block=(TOTAL, "0 * total + sums * scale"),
        one_block__first=(BLOCKS, "range(0, 128, 128)")),
    *edits("Sums, scales or the total were rounded to 16 bits. All of them are float32.",
        **{f"rounded_to_16_bits__{name}_{dtype}": (piece, f"({piece}).{dtype}().to(total.dtype)") for dtype in ROUND
           for name, piece in (("total", TOTAL), ("sums", SUMS), ("scale", SCALED), ("x", OF_ROW), ("w", OF_COLUMN))},
        **{f"rounded_to_16_bits__end_{dtype}": ("return total", f"return total.{dtype}().to(total.dtype)")
           for dtype in ROUND}),
)  # fmt: skip
