"""What goes wrong in a grouped product, for exercise 18.7: edits of its meaning."""

from course_lib.checker import edits

READ_X, READ_W = "real & (x_step < inner)", "(column < outer) & (weight_step < inner)"
STORED, ROW, EXPERT = "real & (column.mT < outer)", "slot // k", "load(tile_experts, tile).long()"
OFFSETS, ADDED = "expert * weights.stride(0) + column * weights.stride(1) + weight_step", "total + x_tile"
PRODUCT, HEIGHT, REAL = "x_tile.float() @ weight_tile.float().mT", "places // max(1, tiles)", "slot < len(x) * k"
LOOP, COLUMNS, TILES = "range(0, inner, block_k)", "-(-outer // block_n) * block_n", "len(slots), len(tile_experts)"
CHANGES = (
    *edits("The slot was taken for the token. Slot s belongs to token s // k.",
        slot_for_token=(ROW, "slot + 0"), slot_for_token__modulo=(ROW, "slot % len(x)")),
    *edits("The row of x is s % k or another number. Slot s belongs to token s // k.",
        wrong_token=(ROW, "slot % k"), wrong_token__by_tokens=(ROW, "slot // len(x)"),
        wrong_token__k=(ROW, "slot // (k + 1)"), wrong_token__2=(ROW, "slot // 2")),
    *edits("The place was taken for the row of x. The slot at that place says which row it is.",
        place_for_row=(ROW, "place + 0"), place_for_row__over_k=(ROW, "place // k")),
    *edits("Rows of x were loaded for sentinel places, so memory outside x was read. Mask them in the load of x: the "
        "sentinel divided by k is one row beyond its end (sglang#28155).",
        sentinel_loaded=(READ_X, "x_step < inner"),
        sentinel_loaded__stored=(READ_X, "x_step < inner", STORED, "(place >= 0) & (column.mT < outer)"),
        sentinel_loaded__minus_one=(REAL, "slot >= 0")),
    *edits("The sentinel was taken for tokens, but it is tokens · k: the number of all slots.",
        sentinel_is_tokens=(REAL, "slot < len(x)"), sentinel_is_tokens__one=(REAL, "slot != len(x)"),
        sentinel_is_tokens__stored=(REAL, "slot < len(x)", STORED, "(place >= 0) & (column.mT < outer)")),
    *edits("A tile has another height than block_m, which is places // tiles.",
        wrong_height=(HEIGHT, "16"), wrong_height__16_tiles=(HEIGHT, "16", TILES, "len(slots), len(slots) // 16"),
        wrong_height__64=(HEIGHT, f"min(64, {HEIGHT})")),
    *edits("The tile's number was taken for its expert. tile_experts[tile] is the expert.",
        tile_for_expert=(EXPERT, "tile + 0")),
    *edits("All tiles have the same expert: that of the first tile, or expert 0.",
        same_expert=(EXPERT, "load(tile_experts, tile * 0).long()"), same_expert__0=(EXPERT, "tile * 0")),
    *edits("The expert was looked up by another number than the tile's. tile_experts has one entry for each tile.",
        expert_of_another_tile=(EXPERT, "load(tile_experts, tile * block_m).long()"),
        expert_of_another_tile__reversed=(EXPERT, "load(tile_experts, tiles - 1 - tile).long()"),
        expert_of_another_tile__column=(EXPERT, "load(tile_experts, column // block_n + 0 * tile).long()"),
        expert_of_another_tile__sorted=(EXPERT, "load(tile_experts.sort().values, tile).long()")),
    *edits("Each expert's matrix is [outer, inner], and the product takes its transpose: column n of the result comes "
        "from row n.",
        not_transposed=(OFFSETS, "expert * weights.stride(0) + weight_step * weights.stride(1) + column")),
    *edits("Rows of x are read as if they had no gap, or all began at the first one. Each begins x.stride(0) elements "
        "after the one before.", strides__x=("x.stride(0)", "inner"), strides__x_forgotten=("x.stride(0)", "0")),
    *edits("Experts are read as if they had no gap, or all began at the first one. Each begins weights.stride(0) "
        "elements after the one before.",
        strides__experts=("weights.stride(0)", "outer * inner"), strides__experts_forgotten=("weights.stride(0)", "0"),
        strides__experts_by_rows=("weights.stride(0)", "outer * weights.stride(1)")),
    *edits("An expert's rows are read as if they followed each other without a gap. Each begins weights.stride(1) "
        "elements after the one before.", strides__rows=("weights.stride(1)", "inner")),
    *edits("One tensor is read with the stride of another.", strides__exchanged=("x.stride(0)", "weights.stride(1)"),
        strides__exchanged_axes=("weights.stride(0)", "weights.stride(1)", "weights.stride(1)", "weights.stride(0)")),
    *edits("The last block of inner reaches beyond the rows' ends. Mask it in both loads: steps < inner.",
        inner_not_masked=(READ_X, "real", READ_W, "column < outer"), inner_not_masked__x=(READ_X, "real"),
        inner_not_masked__weights=(READ_W, "column < outer")),
    *edits("The mask compares with the wrong size: steps with inner, columns with outer.",
        wrong_mask=("(x_step < inner)", "(x_step < outer)"),
        wrong_mask__weights=(READ_W, "(column < inner) & (weight_step < outer)")),
    *edits("Columns beyond outer are loaded. Mask them in the load of the weights.",
        columns_not_masked=(READ_W, "weight_step < inner")),
    *edits("Columns beyond outer are stored, over the next rows. Mask them in the store: columns < outer.",
        store_not_masked=(STORED, "real"), store_not_masked__all=(STORED, "place >= 0"),
        store_not_masked__inner=(STORED, "real & (column.mT < inner)")),
    *edits("The end of inner is missing where it is no multiple of block_k. Round the number of steps up, and mask.",
        inner_end_lost=(LOOP, "range(0, inner // block_k * block_k, block_k)")),
    *edits("Only the first block of inner counts.", first_block_only=(LOOP, "range(0, block_k, block_k)")),
    *edits("Only the last block of inner counts: add to the sums.", last_block_only=(ADDED, "0 * total + x_tile")),
    *edits("One of the two tiles does not move along inner. Both begin at the step's first element.",
        not_advanced=("x_step = start + ", "x_step = 0 + "),
        not_advanced__weights=("weight_step = start + ", "weight_step = 0 + ")),
    *edits("The last columns were never computed. Round the number of column tiles up: triton.cdiv(outer, block_n).",
        columns_missing=(COLUMNS, "outer // block_n * block_n"), columns_missing__first=(COLUMNS, "block_n"),
        columns_missing__but_one=(COLUMNS, "max(1, outer // block_n) * block_n")),
    *edits("The result is in the order of the slots. It is in the order of the places.",
        stored_by_slot=("put(out, place * outer", "put(out, slot * outer"),
        stored_by_slot__modulo=("put(out, place * outer", "put(out, torch.where(real, slot % places, place) * outer")),
    *edits("Numbers or sums were rounded to 16 bits on the way. Keep the tiles as they are, and the sums in float32.",
        rounded_sums=(ADDED, "total.to(x.dtype).float() + x_tile"),
        rounded_sums__products=(PRODUCT, f"({PRODUCT}).half().float()"),
        rounded_sums__own=(f"total + {PRODUCT}", f"(total + ({PRODUCT})).to(x.dtype).float()"),
        rounded_sums__half=(f"total + {PRODUCT}", f"(total + ({PRODUCT})).half().float()"),
        rounded_sums__numbers=(PRODUCT, "x_tile.half().float() @ weight_tile.half().float().mT")),
    *edits("The loop goes along inner by another number than the tiles hold. Both are block_k.",
        wrong_step=(LOOP, "range(0, inner, block_n)")),
)  # fmt: skip
