"""How a program multiplies its tiles of x and weight, for the meanings of this chapter's kernels, with the slips."""

from __future__ import annotations

import torch

from course_lib.checker import Mistake
from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.edits import edits
from exercises.topics.pointers import load


def numbers_of_tiles(count, block):
    """The rows or columns of each tile, [tiles, block]."""
    return torch.arange(-(-count // block))[:, None] * block + torch.arange(block)


def multiplied(x, weight, row, column, rows, columns, first, block_k):
    """The sums [row tiles, column tiles, rows of a tile, columns] of x's rows [row tiles, 1, rows] and weight's rows
    [column tiles, columns], counted from row `first`; the result has so many rows and columns."""
    inner, sums = x.shape[1], torch.zeros(1)
    for start in range(0, inner, block_k):
        k = start + torch.arange(block_k)
        x_mask = (row < rows)[..., None] & (k < inner)
        weight_mask = (column < columns)[..., None] & (k < inner)
        left = load(x, row[..., None] * x.stride(0) + k * x.stride(1), x_mask, 0.0)
        right = load(weight, (column + first)[..., None] * weight.stride(0) + k * weight.stride(1), weight_mask, 0.0)
        sums = sums + left.float() @ right.float().mT
    return sums


def of_each(sentence, **ways):
    """Slips for x and for weight: a "@" in the sentence, in a way's name or in its pieces is the tensor."""
    return (
        slip
        for tensor in ("x", "weight")
        for slip in edits(
            sentence.replace("@", tensor),
            **{way.format(tensor): tuple(piece.replace("@", tensor) for piece in ways[way]) for way in ways},
        )
    )


TILES_ASKED = ((16, 16, 16), (16, 32, 64), (32, 16, 32), (64, 32, 16), (32, 64, 128), (128, 16, 16), (16, 128, 32))
BLOCKS_ASKED = tuple(Level(tile, "blocks of {} × {} × {}".format(*tile)) for tile in TILES_ASKED)
ADDED = "sums + left.float() @ right.float().mT"
X_ROWS, X_INNER, WEIGHT_ROWS, WEIGHT_INNER = "x.stride(0)", "x.stride(1)", "weight.stride(0)", "weight.stride(1)"
X_MASK = "x_mask = (row < rows)[..., None] & (k < inner)"
WEIGHT_MASK = "weight_mask = (column < columns)[..., None] & (k < inner)"
BLOCKS, LEFT_K, RIGHT_K = "range(0, inner, block_k)", "k * x.stride(1)", "k * weight.stride(1)"
ROW_STRIDES = (
    *of_each("The rows of `@` are read as if they followed each other without a gap. Row r begins r · @.stride(0) "
        "elements after the first.",
        **{"{}_row_stride": ("@.stride(0)", "inner"), "{}_row_stride__scaled": ("@.stride(0)", "inner * @.stride(1)")}),
    *edits("The rows of one tensor are read with a stride of the other. Each has its own.",
        strides_of_another=(WEIGHT_ROWS, X_ROWS),
        strides_of_another__exchanged=(WEIGHT_ROWS, X_ROWS, X_ROWS, WEIGHT_ROWS)),
)  # fmt: skip
INNER_STRIDES = (
    *of_each("The numbers of a row of `@` are read as if they lay side by side. In a transposed tensor they do not: "
        "they lie @.stride(1) elements apart.", **{"{}_inner_stride": ("@.stride(1)", "1")}),
    *edits("Both tensors are read as if they were contiguous: rows `inner` numbers long, one after the other. Each has "
        "two strides of its own: hand the kernel all four.",
        strides_ignored=(X_ROWS, "inner", X_INNER, "1", WEIGHT_ROWS, "inner", WEIGHT_INNER, "1")),
    *edits("One tensor is read with strides of the other. Each has its own.",
        strides_of_another__inner=(WEIGHT_INNER, X_INNER),
        strides_of_another__weight=(WEIGHT_INNER, X_INNER, WEIGHT_ROWS, X_ROWS),
        strides_of_another__all=(
        X_INNER, WEIGHT_INNER, X_ROWS, WEIGHT_ROWS, WEIGHT_INNER, X_INNER, WEIGHT_ROWS, X_ROWS)),
    *edits("The two strides of a tensor are exchanged: that reads it as its transpose. x is [rows, inner] and weight "
        "[outer, inner], as nn.Linear keeps it: a column of the result belongs to a row of the weight.",
        x_transposed=(X_ROWS, X_INNER, X_INNER, X_ROWS),
        weight_taken_for_its_transpose=(WEIGHT_ROWS, WEIGHT_INNER, WEIGHT_INNER, WEIGHT_ROWS),
        weight_taken_for_its_transpose__in_the_first_block=(WEIGHT_ROWS, WEIGHT_INNER,
        RIGHT_K, "((k - start) * weight.stride(0) + start * weight.stride(1))")),
    *edits("The step to the next block has the wrong length. The next block of a row begins block_k · stride elements "
        "later, with the stride of that tensor along inner, and a pointer moves once in each step of the loop.",
        step_without_stride=(LEFT_K, "(start + (k - start) * x.stride(1))",
        RIGHT_K, "(start + (k - start) * weight.stride(1))"),
        step_without_stride__x=(LEFT_K, "(start + (k - start) * x.stride(1))"),
        step_without_stride__weight=(RIGHT_K, "(start + (k - start) * weight.stride(1))"),
        step_without_stride__rows_of_weight=(RIGHT_K, "(start * weight.stride(0) + (k - start) * weight.stride(1))")),
)  # fmt: skip
LOOP = (
    *edits("Every step of the loop reads the first block again. Add the block's start to the positions along inner, in "
        "x and in weight, or move both pointers on in each step.",
        first_block_again=("start + torch.arange(block_k)", "torch.arange(block_k)"),
        first_block_again__weight=("k * weight", "(k - start) * weight")),
    *edits("Only one block of inner counts, the last or the first. Add each block's product to the sums, which begin "
        "before the loop.",
        one_block_counts=(ADDED, "left.float() @ right.float().mT"),
        one_block_counts__the_first=(BLOCKS, "range(0, min(inner, block_k), block_k)")),
    *edits("A block of inner is left out: the number of blocks is rounded down and not up, or the loop begins too late "
        "or ends too soon.",
        last_block_lost=(BLOCKS, "range(0, inner // block_k * block_k, block_k)"),
        full_block_lost=(BLOCKS, "range(block_k, inner, block_k)"),
        full_block_lost__last=(BLOCKS, "range(0, inner - block_k, block_k)"),
        full_block_lost__but_one=(BLOCKS, "range(0, max(1, inner - block_k), block_k)")),
    *edits("The loop steps along inner by another block's length than the one it loads. Both are block_k.",
        wrong_step=(BLOCKS, "range(0, inner, 2 * block_k)"), wrong_step__32=(BLOCKS, "range(0, inner, 32)")),
    *edits("Numbers behind the end of a row are multiplied. In the last block of inner load 0 where k is not less than "
        "inner, in x and in weight: NaN times 0 is NaN.",
        inner_not_masked=("& (k < inner)", "& (k >= 0)"),
        inner_not_masked__x=(X_MASK, "x_mask = (row < rows)[..., None] & (k >= 0)"),
        inner_not_masked__weight=(WEIGHT_MASK, "weight_mask = (column < columns)[..., None] & (k >= 0)"),
        inner_not_masked__one_too_many=("& (k < inner)", "& (k <= inner)")),
    *edits("The mask compares the place within the block with inner, and so it is true everywhere but in the first "
        "block. Compare the place in the row, start + the place within the block.",
        masked_within_the_block=("& (k < inner)", "& (k - start < inner)")),
    *edits("Masked places were loaded as another number than 0, so each counts in the sums.",
        filled_with_1=("x_mask, 0.0", "x_mask, 1.0", "weight_mask, 0.0", "weight_mask, 1.0")),
    *edits("A mask compares positions with the length of another dimension: rows with rows, columns with outer, k with "
        "inner.",
        mask_of_another=("(k < inner)", "(k < columns)"),
        mask_of_another__rows=("(row < rows)[..., None] & (k", "(row < columns)[..., None] & (k")),
    *edits("The sums, or what is added to them, have 16 bits. Start them as tl.zeros in tl.float32, and round once, "
        "after the loop.",
        sums_in_16_bits=(ADDED, f"({ADDED}).to(x.dtype).float()"),
        sums_in_16_bits__products=(ADDED, "sums + (left.float() @ right.float().mT).to(x.dtype).float()"),
        sums_in_16_bits__products_always=(ADDED, "sums + (left.float() @ right.float().mT).half().float()")),
    *edits("The tile of weight is not turned: the product takes it as [BLOCK_K, BLOCK_N]. Use tl.trans, for reshape "
        "keeps the order of the numbers; or load the tile the other way round.",
        not_turned=("right.float().mT", "right.float().reshape(*right.shape[:-2], right.shape[-1], right.shape[-2])")),
    *edits("Each product counts twice: tl.dot adds to the sums that it is given, so do not add them once more.",
        added_twice=(ADDED, "sums + 2.0 * (left.float() @ right.float().mT)")),
    *edits("The operands were rounded to 16 bits before the product, also those that are float32.",
        operands_in_16_bits__x=("left.float() @", "left.half().float() @"),
        operands_in_16_bits=("left.float() @ right.float().mT", "left.half().float() @ right.half().float().mT")),
)  # fmt: skip
ROW_TILES, COLUMN_TILES = "numbers_of_tiles(rows, block_m)", "numbers_of_tiles(columns, block_n)"
PLACE = "row[..., None] * columns"
TILES = (
    *edits("The last, partly filled tile was never computed. Round the number of tiles up, with triton.cdiv.",
        last_tile_missing__but_one=("-(-count // block)", "max(1, count // block)"),
        last_tile_missing__rows=(ROW_TILES, f"{ROW_TILES}[:rows // block_m]"),
        last_tile_missing__rows_but_one=(ROW_TILES, f"{ROW_TILES}[:max(1, rows // block_m)]"),
        last_tile_missing__columns_but_one=(COLUMN_TILES, f"{COLUMN_TILES}[:max(1, columns // block_n)]")),
    *edits("Only the first row or column of tiles was computed. Is an axis of the grid missing, or the program's "
        "number in the positions?",
        first_tiles_alone=(ROW_TILES, f"{ROW_TILES}[:1]", COLUMN_TILES, f"{COLUMN_TILES}[:1]"),
        first_tiles_alone__rows=(ROW_TILES, f"{ROW_TILES}[:1]"),
        first_tiles_alone__columns=(COLUMN_TILES, f"{COLUMN_TILES}[:1]")),
    *edits("The program's number is not multiplied by the block, so tiles overlap and most of the result is never "
        "written. A program's rows begin at its number times BLOCK_M, and its columns at its number times BLOCK_N.",
        number_not_multiplied=(ROW_TILES, "(torch.arange(-(-rows // block_m))[:, None] + torch.arange(block_m))")),
    *edits("The last row, column or number of inner is masked. row < rows keeps the rows 0 … rows - 1, and so the "
        "others.",
        last_row_not_stored=("inside = (row < rows)", "inside = (row < rows - 1)"),
        last_number_lost=("& (k < inner)", "& (k < inner - 1)")),
    *edits("The grid and the kernel do not count alike: one takes the tiles or the block of the other dimension. Rows "
        "begin at a program's number times block_m and columns at its number times block_n, and so the grid counts.",
        tiles_exchanged=(ROW_TILES, f"{ROW_TILES}[:-(-columns // block_n)]",
        COLUMN_TILES, f"{COLUMN_TILES}[:-(-rows // block_m)]"),
        blocks_exchanged=(ROW_TILES, f"{ROW_TILES}[:-(-rows // block_n)]",
        COLUMN_TILES, f"{COLUMN_TILES}[:-(-columns // block_m)]"),
        blocks_exchanged__in_the_kernel=(ROW_TILES, "numbers_of_tiles(rows, block_n)[:-(-rows // block_m)]",
        COLUMN_TILES, "numbers_of_tiles(columns, block_m)[:-(-columns // block_n)]")),
    *edits("The result was stored with another distance between its rows, or column after column. It is new and "
        "contiguous: element (r, c) lies at r · columns + c.",
        stored_with_another_stride=(PLACE, "row[..., None] * rows"),
        stored_with_another_stride__of_x=(PLACE, "row[..., None] * x.stride(0)"),
        stored_transposed=(f"{PLACE} + column[..., None, :]", "row[..., None] + column[..., None, :] * rows")),
)  # fmt: skip
IN_32_BITS = Mistake(
    "offset_in_32_bits", "Only rows that begin beyond 2³¹ elements are wrong: an offset does not fit in 32 bits. "
    "Convert row numbers, and the number of a tile's first row too, before you multiply: `row.to(tl.int64) * stride`.",
    first=True, every=True, when=lambda case, seen, got: case.reaches_far,
)  # fmt: skip


def is_cut(case):
    """Whether the last tile or block of some dimension is partly filled, so that a mask is needed there."""
    x, weight, *others = case.args
    outer = len(weight) // (2 if len(others) > 3 else 1)  # in 18.4 the weight holds gate and up
    return any(size % block for size, block in zip((len(x), outer, x.shape[1]), others[-3:]))


def rounded_on_the_way(oracle, name="rounded_on_the_way"):
    """A mistake: all that fails are results in 16 bits, about right, and further off than one rounding makes them."""

    def when(case, seen, got):
        exact = [one.double() if isinstance(one, torch.Tensor) else one for one in case.args]
        right, size = oracle(*exact), oracle(*(one.abs() if isinstance(one, torch.Tensor) else one for one in exact))
        same = isinstance(got, torch.Tensor) and got.dtype == torch.float16 and got.shape == right.shape
        if not same or seen.out_of_bounds:
            return False
        error = (got.double().cpu() - right).abs().where(right.half().isfinite(), 0.0)
        off = error > torch.finfo(got.dtype).eps * right.abs() + 1e-5 * size + 2.0**-24
        return bool(off.any() and (error <= 1e-2 * size).all())

    return Mistake(
        name, "The result in 16 bits is only about right. Is a sum kept in 16 bits, or a number rounded on the way? "
        "Sums are float32, and the result is rounded once.", every=True, when=when,
    )  # fmt: skip
