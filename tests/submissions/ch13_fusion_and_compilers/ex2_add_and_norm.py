"""Wrong answers to exercise 13.2, and unusual right ones."""

from tests.submissions.edits import changed

WIDE = "wide = summed.to(tl.float32)"
MEAN = "(tl.sum(wide * wide, axis=0) / hidden)"
INVERSE = "tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + epsilon)"
SHAPE = "rows, hidden = x.shape"
STORED = "tl.store(summed_pointer + row * hidden + columns, summed, mask=inside)"
BLOCK = "BLOCK=triton.next_power_of_2(hidden),"
KERNEL_CALL = "    add_rms_norm_kernel[(rows,)]("

TWO_PASSES = """# Exercise 13.2 · Add and norm in one kernel
@triton.jit
def two_passes(x, residual, weight, normalised, summed, hidden, x_stride, residual_stride, epsilon,
               BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        m = c < hidden
        s = tl.load(x + row * x_stride + c, mask=m, other=0.0).to(tl.float32)
        s += tl.load(residual + row * residual_stride + c, mask=m, other=0.0).to(tl.float32)
        tl.store(summed + row * hidden + c, s.to(x.dtype.element_ty), mask=m)
        squares += s * s
    inverse = tl.rsqrt(tl.sum(squares, 0) / hidden + epsilon)
    for start in range(0, hidden, BLOCK):
        c = start + tl.arange(0, BLOCK)
        m = c < hidden
        s = tl.load(summed + row * hidden + c, mask=m, other=0.0).to(tl.float32)
        w = tl.load(weight + c, mask=m, other=0.0).to(tl.float32)
        tl.store(normalised + row * hidden + c, (s * inverse * w).to(x.dtype.element_ty), mask=m)

def add_rms_norm(x, residual, weight, epsilon):
    rows, hidden = x.shape
    normalised = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    summed = torch.empty_like(normalised)
    two_passes[(rows,)](x, residual, weight, normalised, summed, hidden, x.stride(0), residual.stride(0), epsilon,
                        BLOCK=1024)
    return normalised, summed
"""

TWO_KERNELS = """# Exercise 13.2 · Add and norm in one kernel
@triton.jit
def add(x, residual, summed, hidden, x_stride, residual_stride, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m = c < hidden
    s = tl.load(x + row * x_stride + c, mask=m, other=0.0) + tl.load(residual + row * residual_stride + c, mask=m,
                                                                     other=0.0)
    tl.store(summed + row * hidden + c, s, mask=m)

@triton.jit
def norm(summed, weight, normalised, hidden, epsilon, BLOCK: tl.constexpr):
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    m = c < hidden
    s = tl.load(summed + row * hidden + c, mask=m, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=m, other=0.0).to(tl.float32)
    s = s * tl.rsqrt(tl.sum(s * s, 0) / hidden + epsilon) * w
    tl.store(normalised + row * hidden + c, s.to(summed.dtype.element_ty), mask=m)

def add_rms_norm(x, residual, weight, epsilon):
    rows, hidden = x.shape
    normalised = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    summed = torch.empty_like(normalised)
    block = triton.next_power_of_2(hidden)
    add[(rows,)](x, residual, summed, hidden, x.stride(0), residual.stride(0), BLOCK=block)
    norm[(rows,)](summed, weight, normalised, hidden, epsilon, BLOCK=block)
    return normalised, summed
"""

SEVERAL_ROWS = """# Exercise 13.2 · Add and norm in one kernel
@triton.jit
def several(x, residual, weight, normalised, summed, rows, hidden, xs, rs, epsilon, R: tl.constexpr, C: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    m = (r < rows) & (c < hidden)
    s = tl.load(x + r * xs + c, mask=m, other=0.0).to(tl.float32)
    s += tl.load(residual + r * rs + c, mask=m, other=0.0).to(tl.float32)
    tl.store(summed + r * hidden + c, s.to(x.dtype.element_ty), mask=m)
    root = tl.sqrt(tl.sum(s * s, axis=1, keep_dims=True) / hidden + epsilon)
    w = tl.load(weight + c, mask=c < hidden, other=0.0).to(tl.float32)
    tl.store(normalised + r * hidden + c, (s / root * w).to(x.dtype.element_ty), mask=m)

def add_rms_norm(x, residual, weight, epsilon):
    rows, hidden = x.shape
    normalised = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    summed = torch.empty_like(normalised)
    several[(triton.cdiv(rows, 4),)](x, residual, weight, normalised, summed, rows, hidden, x.stride(0),
                                     residual.stride(0), epsilon, R=4, C=triton.next_power_of_2(hidden))
    return normalised, summed
"""

WRONG = {
    # A card's 48 multiprocessors, each with a program, and no loop.
    "fixed_size": changed("13.2", ("kernel[(rows,)](", "kernel[(min(rows, 48),)](")),
    "tile_too_short": changed("13.2", (BLOCK, "BLOCK=min(1024, triton.next_power_of_2(hidden)),")),
    "tile_too_short__4096": changed("13.2", (BLOCK, "BLOCK=min(4096, triton.next_power_of_2(hidden)),")),
    "tile_too_short__8192": changed("13.2", (BLOCK, "BLOCK=8192,")),
    "modified_input": changed("13.2", ("    summed = torch.empty_like(normalised)\n", "    summed = x\n")),
    "modified_input__by_pytorch": changed("13.2", (SHAPE, f"{SHAPE}\n    x += residual")),
    "modified_input__resized": changed("13.2", (SHAPE, f"{SHAPE}\n    x.resize_(rows, 2 * hidden)")),
    "modified_input__weight_resized": changed(
        "13.2", (SHAPE, f"{SHAPE}\n    weight.resize_(triton.next_power_of_2(hidden))")
    ),
    "modified_input__by_its_rows": changed(
        "13.2", ("    summed = torch.empty_like(normalised)\n", "    summed = residual\n"),
        ("summed_pointer + row * hidden", "summed_pointer + row * residual_stride"),
    ),
    "mean_over_the_tile": changed("13.2", ("axis=0) / hidden", "axis=0) / BLOCK")),
    "sum_for_mean": changed("13.2", ("axis=0) / hidden", "axis=0)")),
    "norm_of_x": changed("13.2", (WIDE, "wide = x.to(tl.float32)")),
    "norm_of_the_residual": changed("13.2", (WIDE, "wide = residual.to(tl.float32)")),
    "sum_not_stored": changed("13.2", (STORED, STORED.replace("columns, summed", "columns, x"))),
    "sum_not_stored__the_residual": changed("13.2", (STORED, STORED.replace("columns, summed", "columns, residual"))),
    "added_after_the_norm": changed(
        "13.2", (WIDE, "wide = x.to(tl.float32)"), ("inverse * weight)", "inverse * weight + residual.to(tl.float32))")
    ),
    "store_unmasked": changed("13.2", (STORED, STORED.replace(", mask=inside", ""))),
    "results_by_the_inputs_stride": changed("13.2", (STORED, STORED.replace("row * hidden", "row * x_stride"))),
    "both_normalised": changed(
        "13.2",
        (STORED, ""),
        (
            "(wide * inverse * weight).to(x.dtype)",
            "(wide * inverse * weight).to(x.dtype)\n    " + STORED.replace("columns, summed", "columns, normalised"),
        ),
    ),
    "results_exchanged": changed("13.2", ("return normalised, summed", "return summed, normalised")),
    "epsilon_missing": changed("13.2", (" + epsilon)", ")")),
    # NVIDIA/apex#1295 had to say in its documentation where epsilon goes.
    "epsilon_outside": changed("13.2", (INVERSE, "1 / (tl.sqrt(tl.sum(wide * wide, axis=0) / hidden) + epsilon)")),
    "epsilon_divided": changed("13.2", (INVERSE, "tl.rsqrt((tl.sum(wide * wide, axis=0) + epsilon) / hidden)")),
    "root_missing": changed("13.2", (INVERSE, "1 / (tl.sum(wide * wide, axis=0) / hidden + epsilon)")),
    "weight_missing": changed("13.2", ("wide * inverse * weight", "wide * inverse")),
    "one_added": changed("13.2", ("wide * inverse * weight", "wide * inverse * (1 + weight)")),
    "first_weight": changed("13.2", ("weight_pointer + columns", "weight_pointer + 0 * columns")),
    "mean_subtracted": changed(
        "13.2", (WIDE, f"{WIDE}\n    wide = tl.where(inside, wide - tl.sum(wide, axis=0) / hidden, 0.0)")
    ),
    # sglang#27540: a norm that reduced in the inputs' 16 bits, and its hidden states drifted layer by layer.
    "squared_in_16_bits": changed(
        "13.2", ("tl.sum(wide * wide, axis=0)", "tl.sum((summed * summed).to(tl.float32), 0)")
    ),
    "row_stride_ignored": changed(
        "13.2", ("row * x_stride", "row * hidden"), ("row * residual_stride", "row * hidden")
    ),
    "row_stride_ignored__of_the_residual": changed("13.2", ("row * residual_stride", "row * hidden")),
    "strides_of_x": changed("13.2", ("row * residual_stride", "row * x_stride")),
    "rounded_to_16_bits": changed(
        "13.2", ("(wide * inverse * weight).to(x.dtype)", "(wide * inverse * weight).to(tl.float16).to(x.dtype)")
    ),
    "rounded_on_the_way": changed("13.2", (WIDE, "wide = summed.to(tl.float16).to(tl.float32)")),
    "rounded_on_the_way__and_stored": changed(
        "13.2", ("residual.to(tl.float32)).to(x.dtype)", "residual.to(tl.float32)).to(tl.float16).to(x.dtype)")
    ),
    "rounded_on_the_way__mean_square": changed(
        "13.2", (INVERSE, f"tl.rsqrt({MEAN}.to(tl.float16).to(tl.float32) + epsilon)")
    ),
    # One rounding of the inverse root is small, but 1 / √epsilon may have no room in float16.
    "rounded_on_the_way__inverse_root": changed("13.2", (INVERSE, f"({INVERSE}).to(x.dtype).to(tl.float32)")),
    "rounded_on_the_way__inverse_root_in_float16": changed("13.2", (INVERSE, f"{INVERSE}.to(tl.float16)")),
    "rounded_on_the_way__under_the_root": changed(
        "13.2", (INVERSE, f"tl.rsqrt(({MEAN} + epsilon).to(tl.float16).to(tl.float32))")
    ),
    "rounded_on_the_way__under_the_root_in_its_own_dtype": changed(
        "13.2", (INVERSE, f"tl.rsqrt(({MEAN} + epsilon).to(x.dtype).to(tl.float32))")
    ),
    "rounded_on_the_way__the_whole_root": changed(
        "13.2", (INVERSE, f"tl.rsqrt(({MEAN} + epsilon).to(tl.float16).to(tl.float32)).to(tl.float16).to(tl.float32)")
    ),
    "squared_in_16_bits__mean": changed(
        "13.2", (INVERSE, f"tl.rsqrt({MEAN}.to(x.dtype).to(tl.float32) + epsilon)")
    ),
    "rounded_on_the_way__normalised": changed(
        "13.2", ("wide * inverse * weight", "(wide * inverse).to(tl.float16).to(tl.float32) * weight")
    ),
    "offset_in_32_bits": changed("13.2", (".to(tl.int64)", "")),
    "offset_in_32_bits__of_the_residual": changed(
        "13.2", ("row * residual_stride", "tl.program_id(0) * residual_stride")
    ),
    "row_read_again": TWO_PASSES,
    "two_kernels": TWO_KERNELS,
    "copied_by_pytorch": changed(
        "13.2", (KERNEL_CALL, f"    x, residual = x.contiguous(), residual.contiguous()\n{KERNEL_CALL}")
    ),
    "no_kernel_launched": """# Exercise 13.2 · Add and norm in one kernel
def add_rms_norm(x, residual, weight, epsilon):
    summed = x + residual
    return F.rms_norm(summed, (x.shape[1],), weight, epsilon), summed
""",
    "epsilon_rounded": changed("13.2", ("/ hidden + epsilon", "/ hidden + epsilon.to(x.dtype).to(tl.float32)")),
    "epsilon_missing__and_the_weight": changed(
        "13.2", (" + epsilon)", ")"), ("wide * inverse * weight", "wide * inverse")
    ),
}

UNUSUAL = {
    "four rows a program": SEVERAL_ROWS,
    "the norm of the exact sum": changed("13.2", (WIDE, "wide = x.to(tl.float32) + residual.to(tl.float32)")),
    "two roundings, as in Llama's code": changed(
        "13.2",
        ("(wide * inverse * weight).to(x.dtype)", "((wide * inverse).to(x.dtype).to(tl.float32) * weight).to(x.dtype)"),
    ),
    "both results in one tensor": changed(
        "13.2",
        ("normalised = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)",
         "both = torch.empty((2, rows, hidden), dtype=x.dtype, device=x.device)"),
        ("summed = torch.empty_like(normalised)", "normalised, summed = both"),
    ),
    "a tile twice as long": changed("13.2", (BLOCK, "BLOCK=2 * triton.next_power_of_2(hidden),")),
    "sqrt and a division": changed(
        "13.2", (INVERSE, "1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) * (1.0 / hidden) + epsilon)")
    ),
}
