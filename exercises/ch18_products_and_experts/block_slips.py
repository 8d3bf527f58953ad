"""What goes wrong with scaled blocks and their product, for exercise 18.8: edits of its two meanings."""

from course_lib.checker import edits

LARGEST_OF, SCALE, EACH = "padded.abs().amax(-1)", "torch.where(largest > 0, largest / 448, 1.0)", "numbers / each"
CODED = "scaled.to(torch.float8_e4m3fn).float()"
IN_CODES = (
    *edits("The scales are upside down: they are what the numbers were multiplied by. A scale is largest / 448, what "
        "codes are multiplied by to restore the numbers.",
        scale_inverted=('"scales": scales', '"scales": 1 / scales'),
        scale_inverted__codes_too=(SCALE, "torch.where(largest > 0, 448 / largest, 1.0)"),
        scale_inverted__multiplied=(SCALE, "torch.where(largest > 0, 448 / largest, 1.0)", EACH, "numbers * each")),
    *edits("The numbers were multiplied by the scale. Divide them by it.", multiplied=(EACH, "numbers * each")),
    *edits("The numbers were not divided by their scale.", not_divided=(EACH, "numbers + 0 * each")),
    *edits("The scale comes from the whole row. Each 128 numbers of it have their own, so an outlier spoils its own "
        "block alone.",
        scale_of_the_row=(LARGEST_OF, "padded.abs().amax((1, 2))[:, None].expand(rows, count)")),
    *edits("The scale comes from all rows. Each row has its own.",
        scale_of_all_rows=(LARGEST_OF, "padded.abs().amax((0, 2)).expand(rows, count)"),
        scale_of_all_rows__all=(LARGEST_OF, "padded.abs().amax().expand(rows, count)")),
    *edits("The scale comes from the largest number, not from the largest magnitude: negative numbers count too.",
        sign_forgotten=(LARGEST_OF, "padded.amax(-1)"), sign_forgotten__after=(LARGEST_OF, "padded.amax(-1).abs()")),
    *edits("The scale comes from the mean or the sum of the magnitudes. Take the largest.",
        mean_for_largest=(LARGEST_OF, "padded.abs().mean(-1)"),
        mean_for_largest__sum=(LARGEST_OF, "padded.abs().sum(-1)"),
        mean_for_largest__norm=(LARGEST_OF, "padded.norm(dim=-1)"),
        mean_for_largest__square=(LARGEST_OF, "padded.square().mean(-1).sqrt()"),
        mean_for_largest__least=(LARGEST_OF, "padded.abs().amin(-1)"),
        mean_for_largest__median=(LARGEST_OF, "padded.abs().median(-1).values"),
        mean_for_largest__first=(LARGEST_OF, "padded[:, :, 0].abs()")),
    *edits("The largest code is not 448, which is the largest number of e4m3fn. 240 is that of e4m3fnuz, 57,344 that "
        "of "
        "e5m2, 127 and 255 those of integers.",
        **{f"largest_of_another_format__{largest}": (SCALE, SCALE.replace("448", largest))
           for largest in ("240", "57344", "127", "255", "256", "480", "464", "1", "447", "512", "224")}),
    *edits("A block of zeros has the scale 0, and 0 / 0 is NaN. Its scale is 1.",
        zeros_divided=(SCALE, "largest / 448")),
    *edits("A block of zeros has another scale than 1.",
        **{f"zeros_with_a_floor__{floor}": (SCALE, f"torch.where(largest > 0, largest / 448, {floor})")
           for floor in ("1e-12", "1e-10", "1e-8", "1e-4", "1e-30")},
        zeros_with_a_floor__0=('"scales": scales', '"scales": largest / 448'),
        zeros_with_a_floor__448=(SCALE, "torch.where(largest > 0, largest, 1.0) / 448")),
    *edits("The scale has a floor, by `clamp` or by an addition. Small numbers have small scales; only where all are "
        "0 it "
        "is 1.",
        **{f"scale_with_a_floor__{floor}": (SCALE, f"(largest / 448).clamp(min={floor})")
           for floor in ("1e-12", "1e-10", "1e-8", "1e-4")},
        **{f"scale_with_a_floor__of_largest_{floor}": (SCALE, f"largest.clamp(min={floor}) / 448")
           for floor in ("1e-12", "1e-10", "1e-8", "1e-4")},
        **{f"scale_with_a_floor__added_{floor}": (SCALE, f"largest / 448 + {floor}") for floor in ("1e-12", "1e-8")},
        scale_with_a_floor__one=(SCALE, "torch.where(largest > 448, largest / 448, 1.0)"),
        **{f"scale_with_a_floor__one_below_{floor}": (SCALE, SCALE.replace("> 0", f"> {floor}"))
           for floor in ("1e-12", "1e-8", "1e-6")}),
    *edits("The scales were rounded: to 16 bits, or to powers of two. They are float32, and the largest code is 448.",
        scales_rounded=(SCALE, f"{SCALE}.half().float()"), scales_rounded__bfloat16=(SCALE,
        f"{SCALE}.bfloat16().float()"),
        scales_rounded__power=(SCALE, f"torch.exp2({SCALE}.log2().ceil())"),
        scales_rounded__down=(SCALE, f"torch.exp2({SCALE}.log2().floor())"),
        scales_rounded__own=(SCALE, f"{SCALE}.to(x.dtype).float()"),
        scales_rounded__largest_own=(SCALE, "torch.where(largest > 0, (largest.to(x.dtype) / 448).float(), 1.0)"),
        scales_rounded__nearest=(SCALE, f"torch.exp2({SCALE}.log2().round())")),
    *edits("The codes were cut, or rounded to whole numbers. Round to the nearest e4m3 number, as "
        ".to(torch.float8_e4m3fn) "
        "does.",
        codes_cut=(CODED, "cut_to_e4m3(scaled)"), codes_cut__whole=(CODED,
        "scaled.round().to(torch.float8_e4m3fn).float()"),
        codes_cut__floor=(CODED, "scaled.trunc().to(torch.float8_e4m3fn).float()")),
    *edits("Numbers were divided in 16 bits. Turn them into float32 first, and keep to that.",
        divided_in_16_bits=(EACH, "(numbers.bfloat16() / each.bfloat16()).float()"),
        divided_in_16_bits__half=(EACH, "(numbers.half() / each.half()).float()"),
        divided_in_16_bits__own=(EACH, "(numbers.to(x.dtype) / each.to(x.dtype)).float()"),
        divided_in_16_bits__own_scales=(EACH, "(numbers.to(x.dtype) / each.to(x.dtype)).float()", '"scales": scales',
        '"scales": scales.to(x.dtype).float()'),
        divided_in_16_bits__all_own=(EACH, "(numbers.to(x.dtype) / each.to(x.dtype)).float()", SCALE,
        "torch.where(largest > 0, (largest.to(x.dtype) / 448).float(), 1.0)"),
        divided_in_16_bits__first_half=("x.to(torch.promote_types(x.dtype, torch.float32))", "x.half().float()"),
        divided_in_16_bits__first=("x.to(torch.promote_types(x.dtype, torch.float32))", "x.bfloat16().float()")),
    *edits("The first block was made the shorter one: the row was filled up in front. The last block has fewer "
        "numbers.",
        filled_up_in_front=("(0, count * 128 - inner)", "(count * 128 - inner, 0)", "dim=1)[:, :inner]",
        "dim=1)[:, -inner:]")),
    *edits("The last numbers are missing where inner is no multiple of 128. The last block may have fewer.",
        last_numbers_missing=('"codes": codes', '"codes": codes[:, : inner // 128 * 128]', '"scales": scales',
        '"scales": scales[:, : inner // 128]'),
        last_numbers_missing__scales=('"scales": scales', '"scales": scales[:, : inner // 128]')),
    *edits("Blocks have another width than 128 numbers.",
        **{f"blocks_of_another_width__{n}": (EACH, f"numbers / each_of(numbers, {n})", '"scales": scales',
           f'"scales": each_of(numbers, {n})[:, ::{n}]') for n in (32, 64, 256)}),
    *edits("The last block, which has fewer numbers, uses another block's scale.",
        last_block_forgotten=(EACH, "numbers / scales[:, (torch.arange(inner) // 128).clamp(max=max(0, inner // 128 - "
        "1))]",
        '"scales": scales', '"scales": scales[:, : max(1, inner // 128)]')),
    *edits("The codes were multiplied by their scale again. Return the codes themselves.",
        codes_restored=('"codes": codes', '"codes": (codes * each).to(torch.float8_e4m3fn).float()')),
)  # fmt: skip
BLOCK_A, BLOCK_B, TOTAL = "a[:, begin:end]", "b[:, begin:end]", "total + sums * scale"
SUMS = f"tensor_core({BLOCK_A}, {BLOCK_B}, None).to(total.dtype)"
OF_ROW, OF_COLUMN = "x_scales[:, block, None]", "weight_scales[:, block].repeat_interleave(128)[:outer]"
IN_PRODUCT = (
    *edits("The running total went through the tensor core, whose 14 bits cut a little off it in each block. Begin "
        "each "
        "block from zeros, and add its sums in float32.",
        running_total=(TOTAL, f"tensor_core({BLOCK_A}, {BLOCK_B}, total / scale) * scale"),
        running_total__no_scales=(SUMS, f"tensor_core({BLOCK_A}, {BLOCK_B}, total).to(total.dtype)", TOTAL,
        "sums + 0 * total if end < inner else sums * scale"),
        running_total__carried=(SUMS, f"tensor_core({BLOCK_A}, {BLOCK_B}, locals().get('sums')).to(total.dtype)", TOTAL,
        "0 * total + sums * scale"),
        running_total__added_again=(SUMS, f"tensor_core({BLOCK_A}, {BLOCK_B}, total).to(total.dtype)")),
    *edits("The sums of the blocks before were added once more: the tensor core began with them, and not with zeros.",
        sums_added_again=(SUMS, f"tensor_core({BLOCK_A}, {BLOCK_B}, locals().get('sums')).to(total.dtype)")),
    *edits("The products are too exact: they did not go through the tensor core. Use it for all of them.",
        too_exact=(SUMS, f"({BLOCK_A}.double() @ {BLOCK_B}.double().T).to(total.dtype)")),
    *edits("A block was taken in parts that begin from zeros. All of its 128 products are added by the tensor core.",
        **{f"block_in_parts__{n}": (SUMS, f"sum(tensor_core(a[:, at:min(at + {n}, end)], b[:, at:min(at + {n}, end)]) "
           f"for at in range(begin, min(end, inner), {n})).to(total.dtype)") for n in (16, 32, 64)}),
    *edits("The numbers were scaled and rounded to 8 bits again. Scale the block's sums.",
        requantised=(SUMS, "tensor_core(requantised(a, begin, row_scale), requantised(b, begin, column_scale[:, "
        "None]), "
        "None).to(total.dtype)", TOTAL, "total + sums"),
        requantised__x=(SUMS, f"tensor_core(requantised(a, begin, row_scale), {BLOCK_B}, None).to(total.dtype)", TOTAL,
        "total + sums * column_scale"),
        requantised__weight=(SUMS, f"tensor_core({BLOCK_A}, requantised(b, begin, column_scale[:, None]), None)"
        ".to(total.dtype)", TOTAL, "total + sums * row_scale")),
    *edits("The scales of x are missing.", x_scales_missing=("row_scale * column_scale",
        "column_scale + 0 * row_scale")),
    *edits("The scales of the weight are missing.",
        weight_scales_missing=("row_scale * column_scale", "row_scale + 0 * column_scale")),
    *edits("The sums are not scaled.", scales_missing=(TOTAL, "total + sums")),
    *edits("The sums were divided by a scale. Scales restore the numbers: multiply by both.",
        divided_by_scales=(TOTAL, "total + sums / scale"),
        divided_by_scales__x=("row_scale * column_scale", "column_scale / row_scale"),
        divided_by_scales__weight=("row_scale * column_scale", "row_scale / column_scale")),
    *edits("The two scales were added. Multiply by both.", scales_added=("row_scale * column_scale",
        "row_scale + column_scale")),
    *edits("A scale of another block was taken. Block i has the scales of column i.",
        scale_of_another_block=(OF_ROW, "x_scales[:, 0, None]", OF_COLUMN, OF_COLUMN.replace("block]", "0]")),
        scale_of_another_block__x=(OF_ROW, "x_scales[:, 0, None]"),
        scale_of_another_block__weight=(OF_COLUMN, OF_COLUMN.replace("block]", "0]")),
        scale_of_another_block__last=(OF_ROW, "x_scales[:, -1, None]", OF_COLUMN, OF_COLUMN.replace("block]", "-1]")),
        scale_of_another_block__x_last=(OF_ROW, "x_scales[:, -1, None]"),
        scale_of_another_block__before=(OF_ROW, "x_scales[:, block - 1, None]"),
        scale_of_another_block__weight_before=(OF_COLUMN, OF_COLUMN.replace("block]", "block - 1]")),
        scale_of_another_block__both_before=(OF_ROW, "x_scales[:, block - 1, None]", OF_COLUMN,
        OF_COLUMN.replace("block]", "block - 1]")),
        scale_of_another_block__sum=(OF_ROW, "x_scales.sum(1, keepdim=True)"),
        scale_of_another_block__x_mean=(OF_ROW, "x_scales.mean(1, keepdim=True)"),
        scale_of_another_block__largest=(OF_ROW, "x_scales.amax(1, keepdim=True)"),
        scale_of_another_block__mean=(OF_ROW, "x_scales.mean(1, keepdim=True)", OF_COLUMN,
        "weight_scales.mean(1).repeat_interleave(128)[:outer]")),
    *edits("The scales of the weight are one for each 128 of its rows: row n has weight_scales[n // 128].",
        scale_of_the_wrong_rows=(OF_COLUMN, "weight_scales[torch.arange(outer) % len(weight_scales), block]"),
        scale_of_the_wrong_rows__first=(OF_COLUMN, "weight_scales[0, block].expand(outer)"),
        scale_of_the_wrong_rows__clamped=(OF_COLUMN, "weight_scales[torch.arange(outer).clamp(max=len(weight_scales) "
        "- 1), block]"),
        scale_of_the_wrong_rows__largest=(OF_COLUMN, "weight_scales[:, block].max().expand(outer)"),
        scale_of_the_wrong_rows__mean=(OF_COLUMN, "weight_scales[:, block].mean().expand(outer)"),
        scale_of_the_wrong_rows__last=(OF_COLUMN, "weight_scales[-1, block].expand(outer)"),
        scale_of_the_wrong_rows__even=(OF_COLUMN, "weight_scales[torch.arange(outer) * len(weight_scales) // outer, "
        "block]")),
    *edits("The sums were multiplied by other powers of the scales. Multiply by each of the two once.",
        scales_squared=(TOTAL, "total + sums * scale**2"), scales_squared__root=(TOTAL, "total + sums * scale**0.5"),
        scales_squared__x=(TOTAL, "total + sums * scale * row_scale"),
        scales_squared__weight=(TOTAL, "total + sums * scale * column_scale")),
    *edits("The whole total was multiplied by each block's scales. They belong to the block's own sums.",
        total_scaled=(TOTAL, "(total + sums) * scale")),
    *edits("The first block is missing.", first_block_missing=("range(0, inner, 128)", "range(128, inner, 128)")),
    *edits("All rows have the scale of row 0. Row r of x has x_scales[r].",
        scale_of_row_0=(OF_ROW, "x_scales[:1, block, None]")),
    *edits("The last columns are missing where inner is no multiple of 128.",
        last_block_missing=("range(0, inner, 128)", "range(0, inner // 128 * 128, 128)"),
        last_block_missing__but_one=("range(0, inner, 128)", "range(0, max(128, inner // 128 * 128), 128)")),
    *edits("Only one block counts: add to the total.", one_block=(TOTAL, "0 * total + sums * scale"),
        one_block__first=("range(0, inner, 128)", "range(0, 128, 128)")),
    *edits("The total was kept in fewer bits than float32 has.",
        total_rounded=(TOTAL, "(total + sums * scale).half().to(total.dtype)"),
        total_rounded__bfloat16=(TOTAL, "(total + sums * scale).bfloat16().to(total.dtype)"),
        total_rounded__sums=(TOTAL, "total + (sums.half() * scale.half()).to(total.dtype)"),
        total_rounded__scales=(TOTAL, "total + sums * scale.half().to(total.dtype)"),
        total_rounded__scales_bfloat16=(TOTAL, "total + sums * scale.bfloat16().to(total.dtype)")),
)  # fmt: skip
