"""How a program multiplies its tiles of x and weight, for the meanings of this chapter's kernels, with the slips."""

import torch

from course_lib.checker import Mistake
from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.edits import edits
from exercises.topics.evidence import first_access
from exercises.topics.pointers import load


def numbers_of_tiles(count, block):
    """The rows or columns of each tile, [tiles, block]."""
    return torch.arange(-(-count // block))[:, None] * block + torch.arange(block)


def multiplied(x, x_at, x_inside, weight, weight_at, weight_inside, block_k):
    """The sums [row tiles, column tiles, rows of a tile, columns] of x's rows [row tiles, 1, rows] and weight's rows
    [row tiles or none, column tiles, columns]: where each begins, in elements, and whether there is one."""
    inner, sums = x.shape[1], torch.zeros(1)
    for start in range(0, inner, block_k):
        k = start + torch.arange(block_k)
        x_mask = x_inside[..., None] & (k < inner)
        weight_mask = weight_inside[..., None] & (k < inner)
        left = load(x, x_at[..., None] + k * x.stride(1), x_mask, 0.0)
        right = load(weight, weight_at[..., None] + k * weight.stride(-1), weight_mask, 0.0)
        sums = sums + left.float() @ right.float().mT
    return sums


def ways(name, piece, *others):
    """The ways of a mistake, for `edits`, that write something else in the place of one piece."""
    return {f"{name}__{number}": (piece, other) for number, other in enumerate(others)}


def told(words):
    """A `when`: these words stand in the error that was raised."""
    return lambda case, seen, got: seen.error is not None and words in seen.error.text


def widened(tensor):
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def summed_by_blocks(x, weight, block_k):
    """The product's sums, block after block of inner."""
    pairs = zip(widened(x).split(block_k, 1), widened(weight).split(block_k, 1))
    return sum(left @ right.mT for left, right in pairs)


def loaded_and_stored(x, weight, *rest):
    """Bytes: each program's whole tiles of x and weight and its biases, and the residual and the result once."""
    *ends, block_m, block_n, _ = rest
    halves, biased, residual = (2, ends[0] is not None, ends[1] is not None) if ends else (1, False, False)
    (rows, inner), outer = x.shape, len(weight) // halves
    programs = -(-rows // block_m) * -(-outer // block_n)
    numbers = programs * ((block_m + halves * block_n) * inner + halves * block_n * biased)
    return x.element_size() * (numbers + rows * outer * (1 + residual))


TILES_ASKED = ((16, 16, 16), (16, 32, 64), (32, 16, 32), (64, 32, 16), (32, 64, 128), (128, 16, 16), (16, 128, 32))
BLOCKS_ASKED = tuple(Level(tile, "blocks of {} × {} × {}".format(*tile)) for tile in TILES_ASKED)
X_ROWS, X_INNER, WEIGHT_ROWS, WEIGHT_INNER = "x.stride(0)", "x.stride(1)", "weight.stride(0)", "weight.stride(-1)"
INNER = "x.shape[1]"
ROW_STRIDES = (
    *edits("Rows of `x` are read as if they had no gap. Row r begins r · x.stride(0) elements after the first.",
        x_row_stride=(X_ROWS, INNER), x_row_stride__scaled=(X_ROWS, f"{INNER} * {X_INNER}")),
    *edits("Rows of `weight` are read as if they had no gap. Row r begins r · weight.stride(0) elements after row 0.",
        weight_row_stride=(WEIGHT_ROWS, INNER), weight_row_stride__scaled=(WEIGHT_ROWS, f"{INNER} * {WEIGHT_INNER}")),
    *edits("The rows of one tensor are read with a stride of the other. Each has its own.",
        strides_of_another=(WEIGHT_ROWS, X_ROWS),
        strides_of_another__exchanged=(WEIGHT_ROWS, X_ROWS, X_ROWS, WEIGHT_ROWS)),
)  # fmt: skip
X_STEP = ("k * x.stride(1)", "(start + (k - start) * x.stride(1))")
WEIGHT_STEP = ("k * weight.stride(-1)", "(start + (k - start) * weight.stride(-1))")
INNER_STRIDES = (
    *edits("Numbers in a row of `x` lie x.stride(1) apart, not side by side.", x_inner_stride=(X_INNER, "1")),
    *edits("In a row of `weight` numbers lie weight.stride(1) apart, not 1.", weight_inner_stride=(WEIGHT_INNER, "1")),
    *edits("Both tensors are read as if they were contiguous. Each has two strides: hand the kernel all four.",
        strides_ignored=(X_ROWS, INNER, X_INNER, "1", WEIGHT_ROWS, INNER, WEIGHT_INNER, "1")),
    *edits("One tensor is read with strides of the other. Each has its own.",
        strides_of_another__inner=(WEIGHT_INNER, X_INNER),
        strides_of_another__weight=(WEIGHT_INNER, X_INNER, WEIGHT_ROWS, X_ROWS), strides_of_another__all=(
        X_INNER, WEIGHT_INNER, X_ROWS, WEIGHT_ROWS, WEIGHT_INNER, X_INNER, WEIGHT_ROWS, X_ROWS)),
    *edits("The two strides of a tensor are exchanged, which reads its transpose. x is [rows, inner] and weight "
        "[outer, inner]: a column of the result belongs to a row of weight.",
        x_transposed=(X_ROWS, X_INNER, X_INNER, X_ROWS),
        weight_taken_for_its_transpose=(WEIGHT_ROWS, WEIGHT_INNER, WEIGHT_INNER, WEIGHT_ROWS)),
    *edits("The step to the next block has the wrong length. A pointer moves once in each step, by block_k · its "
        "stride along inner.", step_without_stride=(*X_STEP, *WEIGHT_STEP), step_without_stride__x=X_STEP,
        step_without_stride__weight=WEIGHT_STEP, step_without_stride__rows_of_weight=(WEIGHT_STEP[0],
        "(start * weight.stride(0) + (k - start) * weight.stride(-1))")),
)  # fmt: skip
ANOTHER_MASK = "A mask compares with the wrong length. Compare rows with rows, columns with outer, and k with inner."
BLOCKS, K_MASK, DOT = "range(0, inner, block_k)", "& (k < inner)", "left.float() @ right.float().mT"
ADDED = f"sums + {DOT}"
LOOP = (
    *edits("Each step of the loop reads the first block again. Add the block's start to k, or move both pointers on.",
        first_block_again=("start + torch.arange(block_k)", "torch.arange(block_k)"),
        **{f"first_block_again__{one}": (f"k * {one}", f"(k - start) * {one}") for one in ("x", "weight")}),
    *edits("Only one block of inner counts. Add to sums that begin before the loop.", one_block_counts=(ADDED, DOT),
        one_block_counts__the_first=(BLOCKS, "range(0, min(inner, block_k), block_k)")),
    *edits("A block of inner is left out: their number is rounded down, or the loop begins too late or ends too soon.",
        last_block_lost=(BLOCKS, "range(0, inner // block_k * block_k, block_k)"),
        **ways("full_block_lost", BLOCKS, "range(block_k, inner, block_k)", "range(0, inner - block_k, block_k)")),
    *edits("The loop's step is not the length of its blocks. Both are block_k.", **ways("wrong_step", BLOCKS,
        *(f"range(0, inner, {step})" for step in ("2 * block_k", "32", "weight_inside.shape[-1]")))),
    *edits("Numbers behind a row's end count. Load 0 where k is not below inner, in x and weight: 0 · NaN is NaN.",
        **ways("inner_not_masked", K_MASK, "& (k >= 0)", "& (k <= inner)"),
        **{f"inner_not_masked__{one}": (f"{one}_inside[..., None] {K_MASK}", f"{one}_inside[..., None] & (k >= 0)")
           for one in ("x", "weight")}),
    *edits("The mask compares the place within the block with inner. Compare the place in the row: start + that.",
        masked_within_the_block=(K_MASK, "& (k - start < inner)")),
    *edits("Masked places were loaded as another number than 0, so each counts in the sums.",
        filled_with_1=("x_mask, 0.0", "x_mask, 1.0", "weight_mask, 0.0", "weight_mask, 1.0")),
    *edits(ANOTHER_MASK, mask_of_another=(K_MASK, "& (k < weight.shape[-2])"),
        mask_of_another__half=(K_MASK, "& (k < weight.shape[-2] // 2)")),  # of the weight in 18.4
    *edits("The sums or what is added have 16 bits. Start with zeros in tl.float32.", **ways("sums_in_16_bits", ADDED,
        f"({ADDED}).to(x.dtype).float()", f"sums + ({DOT}).to(x.dtype).float()", f"sums + ({DOT}).half().float()")),
    *edits("The tile of weight is not turned, to [BLOCK_K, BLOCK_N]. Use tl.trans: reshape keeps the numbers' order.",
        not_turned=("right.float().mT", "right.float().reshape(*right.shape[:-2], right.shape[-1], right.shape[-2])")),
    *edits("Each product counts twice: tl.dot adds to given sums.", added_twice=(ADDED, f"sums + 2.0 * ({DOT})")),
    *edits("Operands were rounded to 16 bits before the product, even in float32.",
        operands_in_16_bits__x=("left.float() @", "left.half().float() @"),
        operands_in_16_bits=(DOT, "left.half().float() @ right.half().float().mT")),
)  # fmt: skip
ROW_TILES, COLUMN_TILES = "numbers_of_tiles(rows, block_m)", "numbers_of_tiles(columns, block_n)"
PLACE = "row[..., None] * columns"
TILES = (
    *edits("Every result was rounded to 16 bits, also those in float32. Cast to out_pointer.dtype.element_ty.",
        stored_in_16_bits=("result.to(x.dtype), inside", "result.half().to(x.dtype), inside")),
    *edits("The last, partly filled tile was never computed. Round the number of tiles up, with triton.cdiv.",
        last_tile_missing__but_one=("-(-count // block)", "max(1, count // block)"), **ways("last_tile_missing",
        ROW_TILES, f"{ROW_TILES}[:rows // block_m]", f"{ROW_TILES}[:max(1, rows // block_m)]"),
        last_tile_missing__columns_but_one=(COLUMN_TILES, f"{COLUMN_TILES}[:max(1, columns // block_n)]")),
    *edits("Only the first row or column of tiles was computed. Is an axis of the grid missing, or its use?",
        first_tiles_alone=(ROW_TILES, f"{ROW_TILES}[:1]", COLUMN_TILES, f"{COLUMN_TILES}[:1]"),
        first_tiles_alone__rows=(ROW_TILES, f"{ROW_TILES}[:1]"),
        first_tiles_alone__columns=(COLUMN_TILES, f"{COLUMN_TILES}[:1]")),
    *edits("The program's number is not multiplied by the block, so tiles overlap. Rows begin at its number times "
        "BLOCK_M.",
        number_not_multiplied=(ROW_TILES, "(torch.arange(-(-rows // block_m))[:, None] + torch.arange(block_m))")),
    *edits(ANOTHER_MASK, mask_of_another__rows=("x_at, row < rows", "x_at, row < columns")),
    *edits("The last row, column or number of inner is masked. row < rows keeps all: 0 … rows - 1.",
        last_row_not_stored=("inside = (row < rows)", "inside = (row < rows - 1)"),
        last_number_lost=(K_MASK, "& (k < inner - 1)")),
    *edits("The grid or the kernel takes the other dimension's tiles or block. Rows go by block_m, columns by block_n.",
        tiles_exchanged=(ROW_TILES, f"{ROW_TILES}[:-(-columns // block_n)]", COLUMN_TILES,
        f"{COLUMN_TILES}[:-(-rows // block_m)]"), blocks_exchanged=(ROW_TILES, f"{ROW_TILES}[:-(-rows // block_n)]",
        COLUMN_TILES, f"{COLUMN_TILES}[:-(-columns // block_m)]")),
    *edits("The result was stored with another row distance, or by columns. It is contiguous: (r, c) lies at r · "
        "columns + c.", stored_with_another_stride=(PLACE, "row[..., None] * rows"),
        stored_with_another_stride__of_x=(PLACE, "row[..., None] * x.stride(0)"),
        stored_transposed=(f"{PLACE} + column[..., None, :]", "row[..., None] + column[..., None, :] * rows")),
)  # fmt: skip
IN_32_BITS = Mistake(
    "offset_in_32_bits", "Only rows that begin beyond 2³¹ elements are wrong: an offset does not fit in 32 bits. "
    "Convert row numbers, and that of a tile's first row, before you multiply: `row.to(tl.int64) * stride`.",
    first=True, every=True, when=lambda case, seen, got: case.reaches_far,
)  # fmt: skip


def unmasked_load(case, seen, got):
    """A `when`: a load reaches outside, where the last tile or block of some dimension is partly filled."""
    x, weight, *others = case.args
    outer = len(weight) // (2 if len(others) > 3 else 1)  # in 18.4 the weight holds gate and up
    cut = any(size % block for size, block in zip((len(x), outer, x.shape[1]), others[-3:]))
    return cut and first_access("reads", whole=True)(case, seen, got)


def rounded_on_the_way(oracle, name="rounded_on_the_way"):
    """A mistake: all that fails are results in 16 bits, about right, and further off than one rounding makes them."""

    def when(case, seen, got):
        exact = [one.double() if isinstance(one, torch.Tensor) else one for one in case.args]
        right, size = oracle(*exact), oracle(*(one.abs() if isinstance(one, torch.Tensor) else one for one in exact))
        of_16_bits = isinstance(got, torch.Tensor) and got.dtype in (torch.float16, torch.bfloat16)
        if not of_16_bits or got.shape != right.shape or seen.out_of_bounds:
            return False
        error, eps = (got.double().cpu() - right).abs(), torch.finfo(got.dtype).eps
        error = error.where(right.to(got.dtype).isfinite(), 0.0)
        off = error > eps * right.abs() + 1e-5 * size + 2.0**-24
        return bool(off.any() and (error <= 10 * eps * size).all())

    return Mistake(
        name, "The result in 16 bits is only about right. Is a sum kept in 16 bits, or a number rounded on the way? "
        "Sums are float32, and the result is rounded once.", every=True, when=when,
    )  # fmt: skip
