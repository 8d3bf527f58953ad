"""Wrong answers to exercise 18.2, and unusual right ones."""

from textwrap import indent

from tests.submissions.edits import changed

ROW, COLUMN = "tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)", "tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)"
X_ROWS = "x_rows = x_pointer + row.to(tl.int64)[:, None] * x_row_stride"
WEIGHT_ROWS = "weight_rows = weight_pointer + column.to(tl.int64)[:, None] * weight_row_stride"
X_MASK, WEIGHT_MASK = "(row < rows)[:, None] & (k < inner)", "(column < outer)[:, None] & (k < inner)"
X_AT, WEIGHT_AT, K = "x_rows + k * x_inner_stride", "weight_rows + k * weight_inner_stride", "k = start + tl.arange"
LOOP = "for start in range(0, inner, BLOCK_K)"
DOT = 'sums = tl.dot(x_tile, tl.trans(weight_tile), sums, input_precision="ieee")'
GRID = "(triton.cdiv(rows, block_m), triton.cdiv(outer, block_n))"
INSIDE, PLACE = "(row < rows)[:, None] & (column < outer)[None, :]", "row.to(tl.int64)[:, None] * outer"
STORED = "sums.to(out_pointer.dtype.element_ty)"
STRIDES = "*x.stride(), *weight.stride()"
ADVANCED = (
    ("    for start", "    x_at = x_rows + tl.arange(0, BLOCK_K)[None, :] * x_inner_stride\n    weight_at = "
     "weight_rows + tl.arange(0, BLOCK_K)[None, :] * weight_inner_stride\n    for start"),
    (X_AT, "x_at"), (WEIGHT_AT, "weight_at"),
)  # fmt: skip
HALF = (
    ("tl.zeros([BLOCK_M, BLOCK_N], tl.float32)", "tl.zeros([BLOCK_M, BLOCK_N], x_pointer.dtype.element_ty)"),
    (DOT, 'sums = (sums + tl.dot(x_tile, tl.trans(weight_tile), input_precision="ieee")).to(x_tile.dtype)'),
)


def wrong(*replacements):
    return changed("18.2", *replacements)


def two_programs():
    """All row tiles of a column by two programs: the kernel's body in a loop."""
    source = wrong((ROW, "tile * BLOCK_M + tl.arange(0, BLOCK_M)"), (GRID, "(2, triton.cdiv(outer, block_n))"))
    head, rest = source.split("    row = ")
    body, tail = rest.split("\n\n\n", 1)
    loop = "    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M), 2):\n"
    return f"{head}{loop}{indent('    row = ' + body, '    ')}\n\n\n{tail}"


def advanced(x_step, weight_step):
    return wrong(*ADVANCED, (DOT, f"{DOT}\n        x_at += {x_step}\n        weight_at += {weight_step}"))


WRONG = {
    "x_row_stride": wrong((STRIDES, "inner, x.stride(1), *weight.stride()")),
    "weight_row_stride": wrong((STRIDES, "*x.stride(), inner, weight.stride(1)")),
    "x_inner_stride": wrong((X_AT, "x_rows + k")),
    "weight_inner_stride": wrong((WEIGHT_AT, "weight_rows + k")),
    "x_inner_stride__both": wrong((X_AT, "x_rows + k"), (WEIGHT_AT, "weight_rows + k")),
    "strides_of_another": wrong((STRIDES, "*x.stride(), *x.stride()")),
    "strides_of_another__exchanged": wrong((STRIDES, "*weight.stride(), *x.stride()")),
    "strides_of_another__row": wrong((STRIDES, "*x.stride(), x.stride(0), weight.stride(1)")),
    "x_transposed": wrong((STRIDES, "x.stride(1), x.stride(0), *weight.stride()")),
    "weight_taken_for_its_transpose": wrong((STRIDES, "*x.stride(), weight.stride(1), weight.stride(0)")),
    # PaddlePaddle/FastDeploy#2643
    "step_without_stride": advanced("BLOCK_K", "BLOCK_K"),
    "step_without_stride__x": advanced("BLOCK_K", "BLOCK_K * weight_inner_stride"),
    "step_without_stride__weight": advanced("BLOCK_K * x_inner_stride", "BLOCK_K"),
    "step_without_stride__of_rows_of_weight": advanced("BLOCK_K * x_inner_stride", "BLOCK_K * weight_row_stride"),
    "first_block_again": wrong((K, "k = tl.arange")),
    "first_block_again__weight": advanced("BLOCK_K * x_inner_stride", "0"),
    "one_block_counts": wrong((DOT, DOT.replace(", sums, ", ", "))),
    "one_block_counts__the_first": wrong((LOOP, "for start in range(0, min(inner, BLOCK_K), BLOCK_K)")),
    "last_block_lost": wrong((LOOP, "for start in range(0, inner // BLOCK_K * BLOCK_K, BLOCK_K)")),
    "full_block_lost": wrong((LOOP, "for start in range(BLOCK_K, inner, BLOCK_K)")),
    "full_block_lost__last": wrong((LOOP, "for start in range(0, inner - BLOCK_K, BLOCK_K)")),
    "wrong_step": wrong((LOOP, "for start in range(0, inner, 2 * BLOCK_K)")),
    "wrong_step__32": wrong((LOOP, "for start in range(0, inner, 32)")),
    "inner_not_masked__x": wrong((X_MASK, "(row < rows)[:, None]")),
    "inner_not_masked__weight": wrong((WEIGHT_MASK, "(column < outer)[:, None]")),
    "inner_not_masked": wrong((" & (k < inner)", "")),
    "inner_not_masked__one_too_many": wrong(("k < inner", "k <= inner")),
    "filled_with_1": wrong(("other=0.0", "other=1.0")),
    "last_number_lost": wrong(("k < inner", "k < inner - 1")),
    "mask_of_another": wrong(("k < inner", "k < outer")),
    "mask_of_another__rows": wrong((X_MASK, "(row < outer)[:, None] & (k < inner)")),
    "sums_in_16_bits": wrong(*HALF),
    "sums_in_16_bits__products": wrong((DOT, 'sums += tl.dot(x_tile, tl.trans(weight_tile), input_precision="ieee")'
                                             ".to(x_tile.dtype).to(tl.float32)")),
    "rounded_on_the_way": wrong((DOT, f"{DOT}\n        if start % (3 * BLOCK_K) == 0:\n            "
                                      "sums = sums.to(out_pointer.dtype.element_ty).to(tl.float32)")),
    "operands_in_16_bits": wrong((DOT, "sums = tl.dot(x_tile.to(tl.float16), tl.trans(weight_tile).to(tl.float16), "
                                       "sums)")),
    "added_twice": wrong((DOT, f"{DOT}\n        {DOT}")),
    "not_turned": wrong((DOT, DOT.replace("tl.trans(weight_tile)", "tl.reshape(weight_tile, [BLOCK_K, BLOCK_N])"))),
    "number_not_multiplied": wrong((ROW, "tl.program_id(0) + tl.arange(0, BLOCK_M)")),
    "last_row_not_stored": wrong((INSIDE, "(row < rows - 1)[:, None] & (column < outer)[None, :]")),
    "blocks_ignored": wrong(("BLOCK_M=block_m, BLOCK_N=block_n", "BLOCK_M=128, BLOCK_N=128"),
        (GRID, "(triton.cdiv(rows, 128), triton.cdiv(outer, 128))")),
    "blocks_ignored__32": wrong(("BLOCK_M=block_m, BLOCK_N=block_n", "BLOCK_M=32, BLOCK_N=32"),
        (GRID, "(triton.cdiv(rows, 32), triton.cdiv(outer, 32))")),
    "stored_in_16_bits": wrong((STORED, "sums.to(tl.float16)")),
    # NVIDIA/cutlass#3497: a grid that is rounded down.
    "last_tile_missing": wrong((GRID, "(rows // block_m or 1, outer // block_n or 1)")),
    "last_tile_missing__rows": wrong((GRID, "(max(1, rows // block_m), triton.cdiv(outer, block_n))")),
    "last_tile_missing__columns": wrong((GRID, "(triton.cdiv(rows, block_m), max(1, outer // block_n))")),
    "first_tiles_alone": wrong((GRID, "(1, 1)")),
    "first_tiles_alone__rows": wrong((GRID, "(1, triton.cdiv(outer, block_n))")),
    "first_tiles_alone__columns": wrong((GRID, "(triton.cdiv(rows, block_m), 1)")),
    "tiles_exchanged": wrong((GRID, "(triton.cdiv(outer, block_n), triton.cdiv(rows, block_m))")),
    "blocks_exchanged": wrong((GRID, "(triton.cdiv(rows, block_n), triton.cdiv(outer, block_m))")),
    "stored_with_another_stride": wrong((PLACE, PLACE.replace("outer", "rows"))),
    "stored_with_another_stride__of_x": wrong((PLACE, PLACE.replace("outer", "x_row_stride"))),
    "stored_transposed": wrong((f"{PLACE} + column[None, :]", "row.to(tl.int64)[:, None] + column[None, :] * rows")),
    "writes_outside": wrong((INSIDE, "(column < outer)[None, :]")),
    "writes_outside__columns": wrong((INSIDE, "(row < rows)[:, None]")),
    "reads_outside": wrong((X_MASK, "(k < inner)")),
    "reads_outside__weight": wrong((WEIGHT_MASK, "(k < inner)")),
    "offset_in_32_bits": wrong((X_ROWS, X_ROWS.replace(".to(tl.int64)", ""))),
    "offset_in_32_bits__of_the_tile": wrong((X_ROWS, "x_rows = x_pointer + (tl.program_id(0) * BLOCK_M * x_row_stride "
        "+ tl.arange(0, BLOCK_M).to(tl.int64)[:, None] * x_row_stride)")),
    "strides_ignored": wrong((STRIDES, "inner, 1, inner, 1")),
    "outer_from_inner": wrong(("(rows, inner), outer = x.shape, weight.shape[0]", "(rows, inner), outer = x.shape, "
                               "weight.shape[1]")),
    "masked_within_the_block": wrong(("k < inner", "k - start < inner")),
    "not_contiguous": wrong((f"{PLACE} + column[None, :]", "row.to(tl.int64)[:, None] + column[None, :] * rows"),
        ("torch.empty(rows, outer, dtype=x.dtype, device=x.device)", "torch.empty(outer, rows, dtype=x.dtype, "
         "device=x.device).t()")),
    "offset_in_32_bits__weight": wrong((WEIGHT_ROWS, WEIGHT_ROWS.replace(".to(tl.int64)", ""))),
    "too_many_bytes": wrong((DOT, f"again = tl.load({X_AT}, mask={X_MASK}, other=0.0)\n        {DOT}\n        "
                                  "sums += 0 * tl.sum(again.to(tl.float32))")),
    "copied_by_pytorch": wrong(("    out = torch.empty", "    x, weight = x.contiguous(), weight.contiguous()\n"
                                                         "    out = torch.empty")),
    "no_kernel_launched": """# Exercise 18.2 · A tiled product
def product(x, weight, block_m, block_n, block_k):
    return (x.float() @ weight.float().T).to(x.dtype)
""",
    "x_row_stride__and_sums_in_16_bits": wrong((STRIDES, "inner, x.stride(1), *weight.stride()"), *HALF),
    "last_tile_missing__and_inner_not_masked": wrong((" & (k < inner)", ""),
        (GRID, "(max(1, rows // block_m), triton.cdiv(outer, block_n))")),
}  # fmt: skip

UNUSUAL = {
    "weight loaded the other way round, one axis of programs": """# Exercise 18.2 · A tiled product
@triton.jit
def kernel(x, w, y, M, N, K, xm, xk, wn, wk, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles = tl.cdiv(N, BN)
    m = (tl.program_id(0) // tiles * BM + tl.arange(0, BM)).to(tl.int64)
    n = (tl.program_id(0) % tiles * BN + tl.arange(0, BN)).to(tl.int64)
    k = tl.arange(0, BK).to(tl.int64)
    a, b = x + m[:, None] * xm + k[None, :] * xk, w + n[None, :] * wn + k[:, None] * wk
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for left in range(K, 0, -BK):
        at = tl.load(a, mask=(m[:, None] < M) & (k[None, :] < left), other=0.0)
        bt = tl.load(b, mask=(n[None, :] < N) & (k[:, None] < left), other=0.0)
        acc += tl.dot(at, bt, input_precision="ieee")
        a += BK * xk
        b += BK * wk
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


def product(x, weight, block_m, block_n, block_k):
    y = x.new_empty((x.size(0), weight.size(0)))
    grid = (-(-x.size(0) // block_m) * -(-weight.size(0) // block_n),)
    kernel[grid](x, weight, y, x.size(0), weight.size(0), x.size(1), x.stride(0), x.stride(1), weight.stride(0),
                 weight.stride(1), block_m, block_n, block_k)
    return y
""",
    "the last row again in the place of those beyond the end": wrong(
        ("x_rows = x_pointer + row.to(tl.int64)", "x_rows = x_pointer + tl.minimum(row, rows - 1).to(tl.int64)"),
        ("weight_pointer + column.to", "weight_pointer + tl.minimum(column, outer - 1).to"),
        (X_MASK, "k < inner"), (WEIGHT_MASK, "k < inner")),
    "rows and columns modulo the size": wrong(
        ("x_pointer + row.to(tl.int64)", "x_pointer + (row % rows).to(tl.int64)"),
        ("weight_pointer + column.to", "weight_pointer + (column % outer).to"),
        (X_MASK, "k < inner"), (WEIGHT_MASK, "k < inner")),
    "the transposed product, turned at the end": wrong(
        (DOT, 'sums = tl.dot(weight_tile, tl.trans(x_tile), sums, input_precision="ieee")'),
        ("tl.zeros([BLOCK_M, BLOCK_N]", "tl.zeros([BLOCK_N, BLOCK_M]"),
        (STORED, "tl.trans(sums).to(out_pointer.dtype.element_ty)")),
    "in strips, one program after another": wrong(
        (ROW, "tl.program_id(0) % tl.cdiv(rows, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)"),
        (COLUMN, "tl.program_id(0) // tl.cdiv(rows, BLOCK_M) * BLOCK_N + tl.arange(0, BLOCK_N)"),
        (GRID, "(triton.cdiv(rows, block_m) * triton.cdiv(outer, block_n),)")),
    "two programs for all tiles of rows": two_programs(),
    "operands made float32": wrong((DOT, 'sums += tl.dot(x_tile.to(tl.float32), tl.trans(weight_tile).to(tl.float32), '
                                         'input_precision="ieee")')),
}  # fmt: skip
