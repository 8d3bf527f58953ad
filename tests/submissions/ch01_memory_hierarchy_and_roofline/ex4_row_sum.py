"""Wrong answers to exercise 1.4, and unusual right ones."""

from tests.submissions.edits import changed, edited

ROW_SUM = """# Exercise 1.4 · Row sum, any shape and strides, one pass
@triton.jit
def row_sum_kernel(x_pointer, result_pointer, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    partial = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < columns
        values = tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=inside, other=0.0)
        partial += values.to(tl.float32)
    tl.store(result_pointer + row, tl.sum(partial, axis=0))

def row_sum(x):
    rows, columns = x.shape
    result = torch.empty(rows, dtype=torch.float32, device=x.device)
    row_sum_kernel[(rows,)](x, result, columns, x.stride(0), x.stride(1), BLOCK=256)
    return result
"""


WRONG = {
        "nothing_stored": edited(
            ROW_SUM, ("tl.store(result_pointer + row, tl.sum(partial, axis=0))", "return tl.sum(partial, axis=0)")),
        "undefined_name": edited(ROW_SUM, ("tl.sum(partial, axis=0)", "tl.sum(total, axis=0)")),
        "rows_for_columns": edited(ROW_SUM, ("x, result, columns,", "x, result, rows,")),
        "only_row_zero": edited(ROW_SUM, ("(rows,)](", "(triton.cdiv(rows, 1024),)](")),
        "only_row_zero__2": edited(ROW_SUM, ("tl.program_id(0)", "tl.program_id(1)")),
        "store_past_the_end": edited(
            ROW_SUM, ("result_pointer + row, tl.sum(partial, axis=0)",
                      "result_pointer + row + tl.arange(0, BLOCK), partial")),
        "row_stride_ignored": edited(ROW_SUM, ("row * row_stride", "row * columns")),
        "column_stride_ignored": edited(ROW_SUM, ("offsets * column_stride", "offsets")),
        "strides_ignored": edited(
            ROW_SUM, ("row * row_stride", "row * columns"), ("offsets * column_stride", "offsets")),
        "past_the_end": edited(ROW_SUM, ("offsets < columns", "offsets <= columns")),
        "load_not_masked": edited(ROW_SUM, ("mask=inside, other=0.0", "")),
        "half_accumulator": edited(
            ROW_SUM, ("x.stride(0), x.stride(1), ", "x.stride(0), x.stride(1), x.dtype == torch.float16, "),
            ("column_stride, BLOCK", "column_stride, HALF: tl.constexpr, BLOCK"),
            ("dtype=tl.float32", "dtype=tl.float16 if HALF else tl.float32"),
            ("values.to(tl.float32)", "values")),
        "only_first_tile": edited(ROW_SUM, ("range(0, columns, BLOCK)", "range(0, BLOCK, BLOCK)")),
        "only_first_tile__2": edited(
            ROW_SUM, ("    for start in range(0, columns, BLOCK):\n        offsets = start + tl.arange(0, BLOCK)",
                      "    for start in range(0, 1):\n        offsets = tl.arange(0, BLOCK)"),
            ("partial += values.to(tl.float32)", "partial = values"), ("BLOCK=256", "BLOCK=1024")),
        "only_last_tile": edited(ROW_SUM, ("partial += ", "partial = ")),
        "tail_columns_dropped": edited(
            ROW_SUM, ("range(0, columns, BLOCK)", "range(0, columns // BLOCK * BLOCK, BLOCK)")),
        "last_row_missing": edited(ROW_SUM, ("[(rows,)]", "[(max(rows - 1, 1),)]")),
        "columns_summed": """# Exercise 1.4 · Row sum, any shape and strides, one pass
@triton.jit
def kernel(x_pointer, result_pointer, rows, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(0, rows):
        values = tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=inside, other=0.0)
        total += values.to(tl.float32)
    tl.store(result_pointer + offsets, total, mask=inside)

def row_sum(x):
    rows, columns = x.shape
    result = torch.empty(columns, device=x.device)
    kernel[(triton.cdiv(columns, 1024),)](x, result, rows, columns, *x.stride(), BLOCK=1024)
    return result
""",
        "strides_exchanged": edited(ROW_SUM, ("x.stride(0), x.stride(1)", "x.stride(1), x.stride(0)")),
        "row_stride_for_both": edited(ROW_SUM, ("x.stride(0), x.stride(1)", "x.stride(0), x.stride(0)")),
        "column_stride_for_both": edited(ROW_SUM, ("x.stride(0), x.stride(1)", "x.stride(1), x.stride(1)")),
        "row_forgotten": edited(ROW_SUM, ("row * row_stride + ", "")),
        "row_not_multiplied": edited(ROW_SUM, ("row * row_stride", "row")),
        "start_forgotten": edited(ROW_SUM, ("start + tl.arange", "tl.arange")),
        "last_tile_skipped": edited(ROW_SUM, ("range(0, columns, BLOCK)", "range(0, columns - BLOCK, BLOCK)")),
        "last_column_missing": edited(ROW_SUM, ("offsets < columns", "offsets < columns - 1")),
        "first_column_missing": edited(ROW_SUM, ("offsets < columns", "(offsets > 0) & (offsets < columns)")),
        "other_is_one": edited(ROW_SUM, ("other=0.0", "other=1.0")),
        "undefined_lanes": edited(ROW_SUM, (", other=0.0", "")),
        "largest_instead_of_sum": edited(
            ROW_SUM, ("tl.zeros([BLOCK], dtype=tl.float32)", "tl.full([BLOCK], float('-inf'), tl.float32)"),
            ("other=0.0", "other=float('-inf')"),
            ("partial += values.to(tl.float32)", "partial = tl.maximum(partial, values.to(tl.float32))"),
            ("tl.sum(", "tl.max(")),
        "squares_summed": edited(ROW_SUM, ("values.to(tl.float32)", "values.to(tl.float32) * values.to(tl.float32)")),
        "magnitudes_summed": edited(ROW_SUM, ("values.to(tl.float32)", "tl.abs(values.to(tl.float32))")),
        "half_accumulator__2": edited(
            ROW_SUM, ("tl.sum(partial, axis=0))", "tl.sum(partial, axis=0).to(x_pointer.dtype.element_ty))")),
        "mean_instead_of_sum__and_strides_exchanged": edited(
            ROW_SUM, ("x.stride(0), x.stride(1)", "x.stride(1), x.stride(0)"),
            ("tl.sum(partial, axis=0))", "tl.sum(partial, axis=0) / columns)")),
        "row_stride_ignored__and_only_first_tile": edited(
            ROW_SUM, ("range(0, columns, BLOCK)", "range(0, BLOCK, BLOCK)"), ("row * row_stride", "row * columns")),
        "mean_instead_of_sum": edited(ROW_SUM, ("tl.sum(partial, axis=0))", "tl.sum(partial, axis=0) / columns)")),
        "too_many_bytes": edited(
            ROW_SUM, ("    tl.store", """    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=offsets < columns, other=0.0)
        partial += values.to(tl.float32) * 0.0
    tl.store""")),
        "contiguous_copy": edited(
            ROW_SUM, ("rows, columns = x.shape", "x = x.contiguous()\n    rows, columns = x.shape")),
        "too_much_memory": edited(
            ROW_SUM, ("rows, columns = x.shape", "x = x * 1.0\n    rows, columns = x.shape")),
        "forbidden_operation": edited(ROW_SUM, ("return result", "return x.sum(dim=1, dtype=torch.float32)")),
    }


UNUSUAL = {
        "several rows a program": """# Exercise 1.4 · Row sum, any shape and strides, one pass
@triton.jit
def kernel(x_pointer, result_pointer, rows, columns, row_stride, column_stride,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row_offsets = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, columns, COLUMNS):
        column_offsets = start + tl.arange(0, COLUMNS)
        inside = (row_offsets < rows)[:, None] & (column_offsets < columns)[None, :]
        pointers = x_pointer + row_offsets[:, None] * row_stride + column_offsets[None, :] * column_stride
        total += tl.sum(tl.load(pointers, mask=inside, other=0.0).to(tl.float32), axis=1)
    tl.store(result_pointer + row_offsets, total, mask=row_offsets < rows)

def row_sum(x):
    result = torch.empty(x.shape[0], device=x.device)
    kernel[(triton.cdiv(x.shape[0], 4),)](x, result, *x.shape, *x.stride(), ROWS=4, COLUMNS=128)
    return result
""",
        "atomic additions into zeros": """# Exercise 1.4 · Row sum, any shape and strides, one pass
@triton.jit
def kernel(x_pointer, result_pointer, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=offsets < columns, other=0.0)
    tl.atomic_add(result_pointer + row, tl.sum(values.to(tl.float32), axis=0))

def row_sum(x):
    result = torch.zeros(x.shape[0], device=x.device)
    kernel[(x.shape[0], triton.cdiv(x.shape[1], 1024))](x, result, x.shape[1], *x.stride(), BLOCK=1024)
    return result
""",
        "a number as the running sum": edited(
            ROW_SUM, ("partial = tl.zeros([BLOCK], dtype=tl.float32)", "partial = 0.0"),
            ("partial += values.to(tl.float32)", "partial += tl.sum(values.to(tl.float32), axis=0)"),
            ("tl.sum(partial, axis=0)", "partial")),
        "32 lanes, so that each adds up many numbers": edited(ROW_SUM, ("BLOCK=256", "BLOCK=32")),
        "two sums of every second element, by tl.reduce with a function of one's own": """
@triton.jit
def add_both(even, odd, more_even, more_odd):
    return even + more_even, odd + more_odd


@triton.jit
def kernel(x_pointer, result_pointer, columns, row_stride, column_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        pointers = x_pointer + row * row_stride + offsets * column_stride
        values = tl.load(pointers, mask=offsets < columns, other=0.0).to(tl.float32)
        is_even = offsets % 2 == 0
        even, odd = tl.reduce((tl.where(is_even, values, 0.0), tl.where(is_even, 0.0, values)), 0, add_both)
        total += even + odd
    tl.store(result_pointer + row, total)

def row_sum(x):
    result = torch.empty(x.shape[0], device=x.device)
    kernel[(x.shape[0],)](x, result, x.shape[1], *x.stride(), BLOCK=1024)
    return result
""",
    }


WRONG |= {
    "stored_in_one_place": changed("1.4", ("result_pointer + row,", "result_pointer,")),
    "every_second_tile": changed("1.4", ("range(0, columns, BLOCK)", "range(0, columns, 2 * BLOCK)")),
    "half_accumulator__always": changed(
        "1.4", ("dtype=tl.float32)", "dtype=tl.float16)"), ("values.to(tl.float32)", "values.to(tl.float16)")
    ),
}
WRONG |= {
    "whole_row_in_one_tile": edited(
        ROW_SUM, ("BLOCK=256", "BLOCK=triton.next_power_of_2(columns), num_warps=32")),
}


ATOMICS = changed(
    "1.4",
    (
        "    partial = tl.zeros([BLOCK], dtype=tl.float32)"
        "  # [BLOCK] one sum for each lane, combined once at the end\n",
        "",
    ),
    (
        "        partial += values.to(tl.float32)\n    tl.store(result_pointer + row, tl.sum(partial, axis=0))",
        "        tl.atomic_add(result_pointer + row, tl.sum(values.to(tl.float32), axis=0))",
    ),
)
WRONG |= {
    "columns_summed__of_a_transposed_matrix": changed(
        "1.4",
        (
            "    rows, columns = x.shape\n",
            "    if x.stride(0) == 1 and x.stride(1) > 1:\n        x = x.T\n    rows, columns = x.shape\n",
        ),
    ),
    "columns_summed__of_a_square_one": changed(
        "1.4",
        (
            "    rows, columns = x.shape\n",
            "    rows, columns = x.shape\n    if rows == columns and x.stride(1) > x.stride(0):\n        x = x.T\n",
        ),
    ),
    "half_accumulator__of_each_block": changed(
        "1.4",
        (
            "partial += values.to(tl.float32)",
            "partial += tl.where(tl.arange(0, BLOCK) == 0, tl.sum(values, axis=0).to(tl.float32), 0.0)",
        ),
    ),
    "unwritten_memory__added_to": ATOMICS,
}
UNUSUAL |= {
    # On a GPU an assembler once refused what Triton made of such hints, and the answer was told that it was wrong.
    "hints to the compiler, and a static assertion": changed(
        "1.4",
        (
            "row = tl.program_id(0)\n",
            'row = tl.program_id(0)\n    tl.static_assert(BLOCK % 16 == 0, "BLOCK is a multiple of 16")\n',
        ),
        (
            "offsets = start + tl.arange(0, BLOCK)  # [BLOCK]",
            "offsets = tl.multiple_of(start, 16) + tl.arange(0, BLOCK)\n"
            "        offsets = tl.max_contiguous(tl.multiple_of(offsets, 16), 16)  # [BLOCK]",
        ),
    ),
}
WRONG |= {
    "mask_of_addresses": changed("1.4", ("mask=offsets < columns", "mask=offsets * column_stride < columns")),
}
