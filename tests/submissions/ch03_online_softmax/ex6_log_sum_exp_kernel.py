"""Wrong answers to exercise 3.6, and unusual right ones."""

from tests.submissions.edits import changed

WRONG = {
        "part_length_rounded_down__to_zero": changed(
            "3.6", ("part_length = triton.cdiv(columns, parts)", "part_length = columns // parts")
        ),
        "minus_infinity_is_a_number": changed("3.6", ('running_max = float("-inf")', "running_max = -1.0e30")),
        "tail_is_a_number": changed("3.6", ('other=float("-inf")', "other=-10000.0")),
        "no_running_max": changed(
            "3.6",
            (
                "running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)",
                "running_sum + tl.sum(tl.exp(tile), axis=0)",
            ),
            ("log_sum = tl.log(tl.where(running_sum == 0.0, 1.0, running_sum))", "log_sum = tl.log(running_sum)"),
            ("running_max + log_sum", "log_sum"),
        ),
        "maximum_not_added_back": changed(
            "3.6",
            ("log_sum = tl.log(tl.where(running_sum == 0.0, 1.0, running_sum))", "log_sum = tl.log(running_sum)"),
            ("running_max + log_sum", "log_sum"),
        ),
        "base_2": changed("3.6", ("tl.exp(", "tl.exp2("), ("tl.log(", "tl.log2(")),
        "base_2__log2_of_the_sum": changed("3.6", ("tl.log(", "tl.log2(")),
        "base_2__exp2_of_the_scores": changed("3.6", ("tl.exp(", "tl.exp2(")),
        "base_2__returned_in_its_units": changed(
            "3.6", ("return result[:, 0]", "return result[:, 0] * 1.4426950408889634")
        ),
        "base_2__folded_and_not_unfolded": changed(
            "3.6", ("running_max + log_sum)", "(running_max + log_sum) * 1.4426950408889634)")
        ),
        "sum_not_rescaled": changed("3.6", ("running_sum * tl.exp(running_max - reference) + ", "running_sum + ")),
        "tile_not_rescaled": changed(
            "3.6",
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.exp(tile - tl.maximum(tl.max(tile, axis=0), -1e30)), axis=0)",
            ),
        ),
        "empty_part_not_stored": changed(
            "3.6",
            (
                '    running_max = float("-inf")\n',
                '    if first >= columns:\n        return\n    running_max = float("-inf")\n',
            ),
        ),
        "second_launch_by_the_first_length": changed(
            "3.6", ("result, parts, parts, parts, BLOCK=block", "result, parts, parts, part_length, BLOCK=block")
        ),
        "part_length_rounded_down": changed("3.6", ("triton.cdiv(columns, parts)", "max(columns // parts, 1)")),
        "cast_before_the_sum__partial_results": changed(
            "3.6",
            (
                "partial_results = torch.empty(rows, parts, dtype=torch.float32",
                "partial_results = torch.empty(rows, parts, dtype=x.dtype",
            ),
        ),
        "parts_added": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return sum(partial_results[:, part] for part in range(parts))",
            ),
        ),
        "parts_added__averaged": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return partial_results.mean(dim=1)",
            ),
        ),
        "only_the_maximum_merged": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    return partial_results.sort(dim=1)[0][:, -1]",
            ),
        ),
        "first_part_only": changed(
            "3.6", ("partial_results, result, parts, parts, parts,", "partial_results, result, 1, parts, 1,")
        ),
        "only_first_tile": changed(
            "3.6", ("range(first, last, BLOCK)", "range(first, tl.minimum(last, first + 1), BLOCK)")
        ),
        "parts_overlap": changed("3.6", ("mask=offsets < last", "mask=offsets < columns")),
        "tail_not_masked": changed(
            "3.6",
            ('other=float("-inf"))', "other=0.0)"),
            ("last = tl.minimum(first + part_length, columns)", "last = first + part_length"),
            ("mask=offsets < last", "mask=offsets < tl.minimum(last, columns)"),
        ),
        "nan_from_the_start": changed("3.6", ("tl.exp(running_max - reference)", "tl.exp(reference - running_max)")),
        "sum_not_rescaled__maximum_updated_first_and_no_guard": changed(
            "3.6",
            (
                "        running_sum = running_sum *",
                "        running_max = new_max\n        running_sum = running_sum *",
            ),
            ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
        ),
        "store_not_masked": changed("3.6", ("row * tl.num_programs(1) + part, ", "row * columns + part, ")),
        "load_not_masked__grid_axes_exchanged": changed(
            "3.6", ("log_sum_exp_kernel[(rows, parts)]", "log_sum_exp_kernel[(parts, rows)]")
        ),
        "load_not_masked": changed("3.6", (', mask=offsets < last, other=float("-inf"))', ")")),
        "empty_state_nan": changed("3.6", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max")),
        "empty_merge_nan": changed(
            "3.6",
            (
                "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n    "
                "return result[:, 0]",
                "    largest = partial_results.sort(dim=1)[0][:, -1]\n    terms = math.e ** (partial_results - "
                "largest[:, None])\n    return largest + (terms @ torch.ones(parts, device=x.device)).log2() * "
                "math.log(2)",
            ),
        ),
        "row_stride_ignored": changed("3.6", ("row * x_row_stride", "row * columns")),
        "cast_before_the_sum": changed(
            "3.6",
            (
                "tl.sum(tl.exp(tile - reference), axis=0)",
                "tl.sum(tl.exp(tile - reference).to(x_pointer.dtype.element_ty).to(tl.float32), axis=0)",
            ),
        ),
    }


UNUSUAL = {
        "tiles twice as long": changed("3.6", ("BLOCK=block)", "BLOCK=2 * block)")),
        "a large negative number for minus infinity": changed(
            "3.6",
            ('running_max = float("-inf")', "running_max = -1e38"),
            ('tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max"),
            ("running_max + log_sum)", 'tl.where(running_sum == 0.0, float("-inf"), running_max + log_sum))'),
        ),
        "base 2 inside, base e outside": """
@triton.jit
def kernel(x, out, n, stride, length, B: tl.constexpr):
    r = tl.program_id(0)
    p = tl.program_id(1)
    end = tl.minimum((p + 1) * length, n)
    m = -1e38
    s = 0.0
    for i in range(p * length, end, B):
        o = i + tl.arange(0, B)
        t = tl.load(x + r * stride + o, mask=o < end, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, tl.max(t, axis=0))
        s = s * tl.exp2(m - new) + tl.sum(tl.exp2(t - new), axis=0)
        m = new
    tl.store(out + r * tl.num_programs(1) + p, (m + tl.log2(s)) * 0.6931471805599453)


def log_sum_exp(x, parts, block):
    rows, n = x.shape
    part = torch.empty(rows, parts, device=x.device)
    kernel[(rows, parts)](x, part, n, x.stride(0), -(-n // parts), B=block)
    out = torch.empty(rows, device=x.device)
    kernel[(rows, 1)](part, out, parts, parts, parts, B=block)
    return out
""",
        "maxima and sums stored apart, merged by a second kernel": """
@triton.jit
def partial_kernel(x, maxima, sums, n, stride, length, B: tl.constexpr):
    r, p, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    end = tl.minimum((p + 1) * length, n)
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.full((), 0.0, tl.float32)
    for i in range(p * length, end, B):
        o = i + tl.arange(0, B)
        t = tl.load(x + r * stride + o, mask=o < end, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, tl.max(t, axis=0))
        ref = tl.maximum(new, -3e38)
        s = s * tl.exp(m - ref) + tl.sum(tl.exp(t - ref), axis=0)
        m = new
    tl.store(maxima + r * parts + p, m)
    tl.store(sums + r * parts + p, s)


@triton.jit
def merge_kernel(maxima, sums, out, parts, B: tl.constexpr):
    r = tl.program_id(0)
    o = tl.arange(0, B)
    m = tl.load(maxima + r * parts + o, mask=o < parts, other=float("-inf"))
    s = tl.load(sums + r * parts + o, mask=o < parts, other=0.0)
    top = tl.max(m, axis=0)
    total = tl.sum(s * tl.exp(m - tl.maximum(top, -3e38)), axis=0)
    tl.store(out + r, tl.where(total == 0.0, float("-inf"), top + tl.log(tl.maximum(total, 1e-38))))


def log_sum_exp(x, parts, block):
    rows, n = x.shape
    maxima, sums = torch.empty(2, rows, parts, device=x.device)
    partial_kernel[(rows, parts)](x, maxima, sums, n, x.stride(0), triton.cdiv(n, parts), B=block)
    out = torch.empty(rows, device=x.device)
    merge_kernel[(rows,)](maxima, sums, out, parts, B=triton.next_power_of_2(parts))
    return out
""",
        "one program a row, parts ignored": """
@triton.jit
def kernel(x, out, n, stride, B: tl.constexpr):
    r = tl.program_id(0)
    lanes = tl.arange(0, B)
    m = tl.full((B,), -1e38, tl.float32)
    s = tl.zeros((B,), tl.float32)
    for i in range(0, n, B):
        t = tl.load(x + r * stride + i + lanes, mask=i + lanes < n, other=float("-inf")).to(tl.float32)
        new = tl.maximum(m, t)
        s = s * tl.exp(m - new) + tl.exp(t - new)
        m = new
    top = tl.max(m, axis=0)
    tl.store(out + r, top + tl.log(tl.sum(s * tl.exp(m - top), axis=0)))


def log_sum_exp(x, parts, block):
    out = torch.empty(x.shape[0], device=x.device)
    kernel[(x.shape[0],)](x, out, x.shape[1], x.stride(0), B=block)
    return out
""",
    }


WRONG |= {
    "parts_before_rows": changed(
        "3.6", ("row * tl.num_programs(1) + part", "part * tl.num_programs(0) + row")
    ),
    "every_part_from_the_start": changed("3.6", ("range(first, last, BLOCK)", "range(0, last, BLOCK)")),
}


WRONG |= {
    "maximum_of_the_first_tile": changed(
        "3.6",
        (
            "tl.maximum(running_max, tl.max(tile, axis=0))",
            "tl.where(running_max == float('-inf'), tl.max(tile, axis=0), running_max)",
        ),
    ),
}

UNUSUAL |= {
    "the parts' results merged in PyTorch": changed(
        "3.6",
        ("    result = torch.empty(rows, 1, dtype=torch.float32, device=x.device)\n", ""),
        (
            "    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)\n",
            "    largest = partial_results.amax(dim=1)\n"
            "    reference = torch.where(largest == -math.inf, 0.0, largest)\n",
        ),
        ("result[:, 0]", "reference + torch.log(torch.exp(partial_results - reference[:, None]).sum(dim=1))"),
    ),
}
WRONG |= {
    "copied_by_pytorch": """
@triton.jit
def copy_kernel(x, y, n, B: tl.constexpr):
    for start in range(0, n, B):
        o = start + tl.arange(0, B)
        tl.store(y + o, tl.load(x + o, mask=o < n), mask=o < n)


def log_sum_exp(x, parts, block):
    largest = torch.where(x.amax(dim=1) == -math.inf, 0.0, x.amax(dim=1).float())
    total = torch.log(torch.exp(x.float() - largest[:, None]).sum(dim=1)) + largest
    result = torch.empty_like(total)
    copy_kernel[(1,)](total, result, len(total), B=16)
    return result
""",
}


WRONG |= {
    "reference_bounded_below": changed(
        "3.6", ('tl.where(new_max == float("-inf"), 0.0, new_max)', "tl.maximum(new_max, -1e4)")
    ),
}
