"""Wrong answers to exercise 1.3, and unusual right ones."""

from tests.submissions.edits import changed, edited

VECTOR_ADD = """# Exercise 1.3 · Vector add, any length
@triton.jit
def vector_add_kernel(x_pointer, y_pointer, result_pointer, length, x_stride, y_stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    x = tl.load(x_pointer + offsets * x_stride, mask=inside)
    y = tl.load(y_pointer + offsets * y_stride, mask=inside)
    tl.store(result_pointer + offsets, x + y, mask=inside)

def vector_add(x, y):
    length = x.numel()
    result = torch.empty(length, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(length, 1024)
    vector_add_kernel[(programs,)](x, y, result, length, x.stride(0), y.stride(0), BLOCK=1024)
    return result
"""


WRONG = {
        "stride_ignored__of_the_block": edited(
            VECTOR_ADD, ("x_pointer + offsets * x_stride",
                         "x_pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * x_stride"),
            ("y_pointer + offsets * y_stride",
             "y_pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) * y_stride")),
        "nothing_stored": edited(VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "pass")),
        "nothing_stored__2": edited(
            VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "return x + y")),
        "nothing_stored__3": edited(
            VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "pass"),
            ("torch.empty", "torch.zeros")),
        "not_contiguous": edited(
            VECTOR_ADD, ("result_pointer + offsets", "result_pointer + 2 * offsets"),
            ("torch.empty(length,", "torch.empty(2 * length,"), ("return result", "return result[::2]")),
        "stored_with_a_stride": edited(
            VECTOR_ADD, ("result_pointer + offsets", "result_pointer + offsets * x_stride")),
        "stored_with_a_stride__2": edited(
            VECTOR_ADD, ("result_pointer + offsets", "result_pointer + offsets * y_stride")),
        "past_the_end": edited(VECTOR_ADD, (", mask=inside", "")),
        "past_the_end__2": edited(VECTOR_ADD, ("x + y, mask=inside", "x + y")),
        "stride_ignored": edited(VECTOR_ADD, ("offsets * x_stride", "offsets"), ("offsets * y_stride", "offsets")),
        "stride_ignored__2": edited(VECTOR_ADD, ("offsets * y_stride", "offsets * x_stride")),
        "last_element_missing": edited(VECTOR_ADD, ("offsets < length", "offsets < length - 1")),
        "only_first_block": edited(VECTOR_ADD, ("programs = triton.cdiv(length, 1024)", "programs = 1")),
        "only_first_block__2": edited(VECTOR_ADD, ("tl.program_id(0) * BLOCK + ", "")),
        "blocks_overlap": edited(VECTOR_ADD, ("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "too_few_programs": edited(VECTOR_ADD, ("triton.cdiv(length, 1024)", "length // 1024")),
        "x_added_to_itself": edited(VECTOR_ADD, ("y_pointer + offsets * y_stride", "x_pointer + offsets * x_stride")),
        "y_added_to_itself": edited(VECTOR_ADD, ("x_pointer + offsets * x_stride", "y_pointer + offsets * y_stride")),
        "subtracted": edited(VECTOR_ADD, ("x + y", "x - y")),
        "multiplied": edited(VECTOR_ADD, ("x + y", "x * y")),
        "x_alone": edited(VECTOR_ADD, ("x + y", "x")),
        "y_alone": edited(VECTOR_ADD, ("x + y", "y")),
        "x_added_to_itself__3": edited(
            VECTOR_ADD, ("y_pointer + offsets * y_stride", "x_pointer + offsets * y_stride")),
        "stride_ignored__3": edited(VECTOR_ADD, ("offsets * x_stride", "offsets")),
        "stride_ignored__4": edited(VECTOR_ADD, ("x.stride(0), y.stride(0)", "y.stride(0), x.stride(0)")),
        "stride_ignored__in_float32": edited(
            VECTOR_ADD, ("offsets * x_stride", "offsets"), ("offsets * y_stride", "offsets"),
            ("dtype=x.dtype, device=x.device", "device=x.device")),
        "at_least_one_program": edited(VECTOR_ADD, ("triton.cdiv(length, 1024)", "max(1, length // 1024)")),
        "last_block_missing": edited(
            VECTOR_ADD, ("triton.cdiv(length, 1024)", "max(1, triton.cdiv(length, 1024) - 1)")),
        "grid_of_other_blocks": edited(VECTOR_ADD, ("y.stride(0), BLOCK=1024", "y.stride(0), BLOCK=512")),
        "only_first_block__3": edited(VECTOR_ADD, ("triton.cdiv(length, 1024)", "min(8, triton.cdiv(length, 1024))")),
        "reads_block_0": edited(
            VECTOR_ADD, ("x_pointer + offsets", "x_pointer + tl.arange(0, BLOCK)"),
            ("y_pointer + offsets", "y_pointer + tl.arange(0, BLOCK)")),
        "at_least_one_program__and_stride_ignored": edited(
            VECTOR_ADD, ("triton.cdiv(length, 1024)", "max(1, length // 1024)"), ("offsets * y_stride", "offsets")),
        "written_into_an_input": edited(
            VECTOR_ADD, ("result = torch.empty(length, dtype=x.dtype, device=x.device)", "result = x"),
            ("result_pointer + offsets", "result_pointer + offsets * x_stride")),
        "no_kernel_launched": """# Exercise 1.3 · Vector add, any length
def vector_add(x, y):
    return torch.lerp(x, y, 0.5) * 2
""",
        "forbidden_operation": edited(VECTOR_ADD, ("return result", "return x + y")),
        "undefined_name": edited(VECTOR_ADD, ("x + y, mask=inside", "x + z, mask=inside")),
    }


UNUSUAL = {
        "inputs made contiguous first": edited(
            VECTOR_ADD,
            ("    length = x.numel()", "    x, y = x.contiguous(), y.contiguous()\n    length = x.numel()")),
        "one program that walks over all blocks": """# Exercise 1.3 · Vector add, any length
@triton.jit
def kernel(x_pointer, y_pointer, result_pointer, length, x_stride, y_stride, BLOCK: tl.constexpr):
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < length
        x = tl.load(x_pointer + offsets * x_stride, mask=inside)
        tl.store(result_pointer + offsets, x + tl.load(y_pointer + offsets * y_stride, mask=inside), mask=inside)

def vector_add(x, y):
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernel[(1,)](x, y, result, x.numel(), x.stride(0), y.stride(0), BLOCK=2048)
    return result
""",
        "blocks from the end": edited(
            VECTOR_ADD, ("offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
                         "offsets = length - 1 - tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)"),
            ("inside = offsets < length", "inside = offsets >= 0")),
        "lanes past the end read the first element": edited(
            VECTOR_ADD,
            ("x_pointer + offsets * x_stride, mask=inside", "x_pointer + tl.where(inside, offsets, 0) * x_stride"),
            ("y_pointer + offsets * y_stride, mask=inside", "y_pointer + (offsets % length) * y_stride")),
        "a grid function and a tiny block": edited(
            VECTOR_ADD,
            ("(programs,)", "lambda meta: (triton.cdiv(length, meta['BLOCK']),)"), ("BLOCK=1024", "BLOCK=32")),
        "computed in float32 and rounded back": edited(
            VECTOR_ADD,
            ("x + y, mask", "(x.to(tl.float32) + y.to(tl.float32)).to(result_pointer.dtype.element_ty), mask")),
    }


WRONG |= {
    "mask_by_the_block": changed("1.3", ("inside = offsets < length", "inside = offsets < BLOCK")),
    "stored_in_block_0": changed(
        "1.3", ("tl.store(result_pointer + offsets", "tl.store(result_pointer + tl.arange(0, BLOCK)")
    ),
    "forbidden_operation__in_place": changed(
        "1.3", ("x + y, mask=inside", "x, mask=inside"), ("    return result", "    result.add_(y)\n    return result")
    ),
}


WRONG |= {
    "grid_capped": changed("1.3", ("(triton.cdiv(length, 1024),)", "(min(triton.cdiv(length, 1024), 264),)")),
    "grid_capped__1024_programs": changed(
        "1.3", ("(triton.cdiv(length, 1024),)", "(min(triton.cdiv(length, 1024), 1024),)")
    ),
}
UNUSUAL |= {
    "264 programs that loop": """
@triton.jit
def kernel(x, y, z, n, xs, ys, B: tl.constexpr):
    for start in range(tl.program_id(0) * B, n, tl.num_programs(0) * B):
        o = start + tl.arange(0, B)
        inside = o < n
        tl.store(z + o, tl.load(x + o * xs, mask=inside) + tl.load(y + o * ys, mask=inside), mask=inside)


def vector_add(x, y):
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernel[(min(triton.cdiv(x.numel(), 1024), 264),)](x, y, z, x.numel(), x.stride(0), y.stride(0), B=1024)
    return z
""",
}


WRONG |= {
    "past_the_end__compared_with_the_stride": changed(
        "1.3", ("inside = offsets < length", "inside = offsets * x_stride < length")
    ),
    "past_the_end__a_stride_of_0_for_1": changed(
        "1.3", ("x.stride(0), y.stride(0)", "x.stride(0) or 1, y.stride(0) or 1")
    ),
}
