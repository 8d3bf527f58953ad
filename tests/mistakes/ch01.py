"""Wrong answers to the exercises of chapter 01, and unusual right ones; the form is that of ch00.py."""

# ------------------------------------------------------------------------------------------------------------------ 1.1

COSTS = {
    "elementwise_cost": "elements * flops_per_element, (inputs + 1) * elements * item_bytes",
    "softmax_cost": "4 * rows * columns, 2 * rows * columns * item_bytes",
    "matmul_cost": "2 * m * k * n, (m * k + k * n + m * n) * item_bytes",
    "scores_cost": "2 * heads * queries * keys * head_dim, "
                   "heads * (queries * head_dim + keys * head_dim + queries * keys) * item_bytes",
}


def costs(**wrong):
    """The cell of 1.1 with some of its four results replaced."""
    result = COSTS | wrong
    return f"""# Exercise 1.1 · Bytes and FLOPs on paper
def elementwise_cost(elements, inputs, flops_per_element, item_bytes):
    return {result["elementwise_cost"]}

def softmax_cost(rows, columns, item_bytes):
    return {result["softmax_cost"]}

def matmul_cost(m, k, n, item_bytes):
    return {result["matmul_cost"]}

def scores_cost(heads, queries, keys, head_dim, item_bytes):
    return {result["scores_cost"]}
"""


# ------------------------------------------------------------------------------------------------------------------ 1.2


def bounds(balance="teraflops * 1e12 / (gigabytes_per_second * 1e9)",
           side="'compute' if compute >= memory else 'memory'", seconds="max(compute, memory)"):
    """The cell of 1.2 with one part replaced."""
    return f"""# Exercise 1.2 · Balance point, bound and least time
def balance_point(teraflops, gigabytes_per_second):
    return {balance}

def least_time(flops, bytes_moved, teraflops, gigabytes_per_second):
    compute = flops / (teraflops * 1e12)
    memory = bytes_moved / (gigabytes_per_second * 1e9)
    return {side}, {seconds}
"""


# ------------------------------------------------------------------------------------------------------------------ 1.3

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


def changed(source, *replacements):
    """The source with (old, new) pairs replaced; each old text must be there."""
    for old, new in replacements:
        assert old in source, old
        source = source.replace(old, new)
    return source


# ------------------------------------------------------------------------------------------------------------------ 1.4

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

# ------------------------------------------------------------------------------------------------------------------ 1.5

FUSED = """# Exercise 1.5 · Scale, add and ReLU in one kernel
@triton.jit
def scale_add_relu_kernel(x_pointer, y_pointer, result_pointer, scale, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < length
    x = tl.load(x_pointer + offsets, mask=inside)
    y = tl.load(y_pointer + offsets, mask=inside)
    tl.store(result_pointer + offsets, tl.maximum(scale * x + y, 0.0), mask=inside)

def scale_add_relu(x, y, scale):
    result = torch.empty_like(x)
    programs = triton.cdiv(x.numel(), 256)
    scale_add_relu_kernel[(programs,)](x, y, result, scale, x.numel(), BLOCK=256)
    return result
"""

# ------------------------------------------------------------------------------------------------------------------ 1.6


def turning(steps="arithmetic_rate / bandwidth * item_bytes", compute="2 * steps * elements / arithmetic_rate",
            memory="2 * item_bytes * elements / bandwidth", seconds="max(compute, memory)",
            measured="seconds[0] / slope",
            slope="(seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])"):
    """The cell of 1.6 with one part replaced."""
    return f"""# Exercise 1.6 · Where the multiply-add chain turns
def turning_steps(arithmetic_rate, bandwidth, item_bytes):
    return {steps}

def chain_seconds(elements, steps, arithmetic_rate, bandwidth, item_bytes):
    compute = {compute}
    memory = {memory}
    return {seconds}

def measured_turning_steps(steps, seconds):
    slope = {slope}
    return {measured}
"""


WRONG = {
    "1.1": {
        "swapped": costs(matmul_cost="(m * k + k * n + m * n) * item_bytes, 2 * m * k * n"),
        "elements_not_bytes": costs(elementwise_cost="elements * flops_per_element, (inputs + 1) * elements"),
        "elements_not_bytes__2": costs(scores_cost=COSTS["scores_cost"].replace(" * item_bytes", "")),
        "multiply_add_counted_once": costs(matmul_cost="m * k * n, (m * k + k * n + m * n) * item_bytes"),
        "output_not_counted": costs(elementwise_cost="elements * flops_per_element, inputs * elements * item_bytes"),
        "output_not_counted__2": costs(scores_cost=COSTS["scores_cost"].replace(" + queries * keys", "")),
        "output_counted_twice": costs(matmul_cost="2 * m * k * n, (m * k + k * n + 2 * m * n) * item_bytes"),
        "no_reuse": costs(matmul_cost="2 * m * k * n, (2 * m * k * n + m * n) * item_bytes"),
        "three_reads": costs(softmax_cost="4 * rows * columns, 4 * rows * columns * item_bytes"),
        "softmax_operations": costs(softmax_cost="5 * rows * columns, 2 * rows * columns * item_bytes"),
        "heads_forgotten": costs(scores_cost=COSTS["scores_cost"].replace("heads * (", "(").replace("2 * heads", "2")),
        "heads_forgotten_in_bytes": costs(scores_cost=COSTS["scores_cost"].replace("heads * (", "(")),
        "heads_forgotten_in_flops": costs(scores_cost=COSTS["scores_cost"].replace("2 * heads * ", "2 * ")),
        "operations_per_element_ignored": costs(elementwise_cost="elements, (inputs + 1) * elements * item_bytes"),
    },
    "1.2": {
        "times_added": bounds(seconds="compute + memory"),
        "smaller_time": bounds(seconds="min(compute, memory)"),
        "comparison_reversed": bounds(side="'memory' if compute >= memory else 'compute'",
                                      seconds="min(compute, memory)"),
        "seconds_before_side": bounds(side="max(compute, memory)",
                                      seconds="'compute' if compute >= memory else 'memory'"),
        "sides_swapped": bounds(side="'memory' if compute >= memory else 'compute'"),
        "intensity_against_one": bounds(side="'compute' if flops >= bytes_moved else 'memory'"),
        "always_the_arithmetic": bounds(seconds="compute"),
        "balance_inverted": bounds(balance="gigabytes_per_second * 1e9 / (teraflops * 1e12)"),
        "unit_slip": bounds(balance="teraflops / gigabytes_per_second"),
        "unit_slip__2": bounds(seconds="max(compute, memory) * 1e6"),
    },
    "1.3": {
        "nothing_stored": changed(VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "pass")),
        "nothing_stored__2": changed(
            VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "return x + y")),
        "nothing_stored__3": changed(
            VECTOR_ADD, ("tl.store(result_pointer + offsets, x + y, mask=inside)", "pass"),
            ("torch.empty", "torch.zeros")),
        "stored_with_a_stride": changed(
            VECTOR_ADD, ("result_pointer + offsets", "result_pointer + offsets * x_stride")),
        "stored_with_a_stride__2": changed(
            VECTOR_ADD, ("result_pointer + offsets", "result_pointer + offsets * y_stride")),
        "past_the_end": changed(VECTOR_ADD, (", mask=inside", "")),
        "past_the_end__2": changed(VECTOR_ADD, ("x + y, mask=inside", "x + y")),
        "stride_ignored": changed(VECTOR_ADD, ("offsets * x_stride", "offsets"), ("offsets * y_stride", "offsets")),
        "stride_ignored__2": changed(VECTOR_ADD, ("offsets * y_stride", "offsets * x_stride")),
        "last_element_missing": changed(VECTOR_ADD, ("offsets < length", "offsets < length - 1")),
        "only_first_block": changed(VECTOR_ADD, ("programs = triton.cdiv(length, 1024)", "programs = 1")),
        "only_first_block__2": changed(VECTOR_ADD, ("tl.program_id(0) * BLOCK + ", "")),
        "blocks_overlap": changed(VECTOR_ADD, ("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "too_few_programs": changed(VECTOR_ADD, ("triton.cdiv(length, 1024)", "length // 1024")),
        "x_added_to_itself": changed(VECTOR_ADD, ("y_pointer + offsets * y_stride", "x_pointer + offsets * x_stride")),
        "y_added_to_itself": changed(VECTOR_ADD, ("x_pointer + offsets * x_stride", "y_pointer + offsets * y_stride")),
        "no_kernel_launched": """# Exercise 1.3 · Vector add, any length
def vector_add(x, y):
    return torch.lerp(x, y, 0.5) * 2
""",
        "forbidden_operation": changed(VECTOR_ADD, ("return result", "return x + y")),
        "undefined_name": changed(VECTOR_ADD, ("x + y, mask=inside", "x + z, mask=inside")),
    },
    "1.4": {
        "nothing_stored": changed(
            ROW_SUM, ("tl.store(result_pointer + row, tl.sum(partial, axis=0))", "return tl.sum(partial, axis=0)")),
        "undefined_name": changed(ROW_SUM, ("tl.sum(partial, axis=0)", "tl.sum(total, axis=0)")),
        "rows_for_columns": changed(ROW_SUM, ("x, result, columns,", "x, result, rows,")),
        "only_row_zero": changed(ROW_SUM, ("(rows,)](", "(triton.cdiv(rows, 1024),)](")),
        "only_row_zero__2": changed(ROW_SUM, ("tl.program_id(0)", "tl.program_id(1)")),
        "store_past_the_end": changed(
            ROW_SUM, ("result_pointer + row, tl.sum(partial, axis=0)",
                      "result_pointer + row + tl.arange(0, BLOCK), partial")),
        "row_stride_ignored": changed(ROW_SUM, ("row * row_stride", "row * columns")),
        "column_stride_ignored": changed(ROW_SUM, ("offsets * column_stride", "offsets")),
        "strides_ignored": changed(
            ROW_SUM, ("row * row_stride", "row * columns"), ("offsets * column_stride", "offsets")),
        "past_the_end": changed(ROW_SUM, ("mask=inside, other=0.0", "")),
        "half_accumulator": changed(
            ROW_SUM, ("x.stride(0), x.stride(1), ", "x.stride(0), x.stride(1), x.dtype == torch.float16, "),
            ("column_stride, BLOCK", "column_stride, HALF: tl.constexpr, BLOCK"),
            ("dtype=tl.float32", "dtype=tl.float16 if HALF else tl.float32"),
            ("values.to(tl.float32)", "values")),
        "only_first_tile": changed(ROW_SUM, ("range(0, columns, BLOCK)", "range(0, BLOCK, BLOCK)")),
        "only_first_tile__2": changed(
            ROW_SUM, ("    for start in range(0, columns, BLOCK):\n        offsets = start + tl.arange(0, BLOCK)",
                      "    for start in range(0, 1):\n        offsets = tl.arange(0, BLOCK)"),
            ("partial += values.to(tl.float32)", "partial = values"), ("BLOCK=256", "BLOCK=1024")),
        "only_last_tile": changed(ROW_SUM, ("partial += ", "partial = ")),
        "tail_columns_dropped": changed(
            ROW_SUM, ("range(0, columns, BLOCK)", "range(0, columns // BLOCK * BLOCK, BLOCK)")),
        "last_row_missing": changed(ROW_SUM, ("[(rows,)]", "[(max(rows - 1, 1),)]")),
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
        "mean_instead_of_sum": changed(ROW_SUM, ("tl.sum(partial, axis=0))", "tl.sum(partial, axis=0) / columns)")),
        "too_many_bytes": changed(
            ROW_SUM, ("    tl.store", """    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(x_pointer + row * row_stride + offsets * column_stride, mask=offsets < columns, other=0.0)
        partial += values.to(tl.float32) * 0.0
    tl.store""")),
        "contiguous_copy": changed(
            ROW_SUM, ("rows, columns = x.shape", "x = x.contiguous()\n    rows, columns = x.shape")),
        "too_much_memory": changed(
            ROW_SUM, ("rows, columns = x.shape", "x = x * 1.0\n    rows, columns = x.shape")),
        "forbidden_operation": changed(ROW_SUM, ("return result", "return x.sum(dim=1, dtype=torch.float32)")),
    },
    "1.5": {
        "too_slow": changed(
            FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.numel(), 32)"), ("BLOCK=256", "BLOCK=32")),
        "relu_before_add": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.maximum(scale * x, 0.0) + y")),
        "nothing_stored": changed(
            FUSED, ("tl.store(result_pointer + offsets, tl.maximum(scale * x + y, 0.0), mask=inside)", "pass")),
        "undefined_name": changed(FUSED, ("scale * x + y", "scale * x + z")),
        "rows_counted": changed(FUSED, ("    programs =", "    count = x.shape[0]\n    programs ="),
                                ("triton.cdiv(x.numel(), 256)", "triton.cdiv(count, 256)"),
                                ("scale, x.numel()", "scale, count")),
        "rows_counted__2": changed(FUSED, ("scale, x.numel()", "scale, len(x)")),
        "maximum_over_the_block": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.max(scale * x + y, 0)")),
        "python_max": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "max(scale * x + y, 0)")),
        "relu_missing__2": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "max(0.0, scale * x + y)")),
        "relu_missing": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "scale * x + y")),
        "sum_scaled": changed(FUSED, ("scale * x + y", "scale * (x + y)")),
        "y_scaled": changed(FUSED, ("scale * x + y", "x + scale * y")),
        "scale_missing": changed(FUSED, ("scale * x + y", "x + y")),
        "scale_added": changed(FUSED, ("scale * x + y", "scale + x + y")),
        "minimum_taken": changed(FUSED, ("tl.maximum", "tl.minimum")),
        "absolute_value": changed(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.abs(scale * x + y)")),
        "past_the_end": changed(FUSED, (", mask=inside", "")),
        "last_element_missing": changed(FUSED, ("offsets < length", "offsets < length - 1")),
        "only_first_block": changed(FUSED, ("tl.program_id(0) * BLOCK + ", "")),
        "only_first_block__2": changed(FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.shape[0], 256)")),
        "blocks_overlap": changed(FUSED, ("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "too_few_programs": changed(FUSED, ("triton.cdiv(x.numel(), 256)", "x.numel() // 256")),
        "several_kernels": changed(
            FUSED, ("    return result",
                    "    scale_add_relu_kernel[(programs,)](x, y, result, scale, x.numel(), BLOCK=256)\n"
                    "    return result")),
        "too_many_bytes": changed(
            FUSED, ("    tl.store(", "    tl.store(result_pointer + offsets, scale * x, mask=inside)\n    tl.store(")),
        "forbidden_operation": changed(FUSED, ("(x, y, result, scale,", "(x * scale, y, result, 1.0,")),
    },
    "1.6": {
        "item_bytes_forgotten": turning(steps="arithmetic_rate / bandwidth"),
        "balance_inverted": turning(steps="bandwidth / arithmetic_rate * item_bytes"),
        "write_not_counted": turning(steps="arithmetic_rate / bandwidth * item_bytes / 2"),
        "multiply_add_counted_once": turning(steps="2 * arithmetic_rate / bandwidth * item_bytes"),
        "times_added": turning(seconds="compute + memory"),
        "seconds_without_write": turning(memory="item_bytes * elements / bandwidth"),
        "seconds_of_one_flop": turning(compute="steps * elements / arithmetic_rate"),
        "line_through_the_origin": turning(slope="seconds[-1] / steps[-1]"),
        "slope_over_all_points": turning(slope="(seconds[-1] - seconds[0]) / (steps[-1] - steps[0])"),
        "slope_over_all_points__2": turning(slope="float(np.polyfit(steps, seconds, 1)[0])"),
        "slope_inverted": turning(slope="(steps[-1] - steps[-2]) / (seconds[-1] - seconds[-2])"),
        "slope_inverted__2": turning(measured="slope / seconds[0]"),
        "line_met_the_floor": turning(measured="steps[-1] - (seconds[-1] - seconds[0]) / slope"),
        "first_slow_point": turning(
            measured="next(count for count, time in zip(steps, seconds) if time > 1.05 * seconds[0])"),
    },
}

UNUSUAL = {
    "1.1": {
        "floats instead of integers": costs(
            matmul_cost="2.0 * m * k * n, 1.0 * (m * k + k * n + m * n) * item_bytes"),
        "one written with the other": changed(
            costs(), ("    return " + COSTS["scores_cost"],
                      "    flops, moved = matmul_cost(queries, head_dim, keys, item_bytes)\n"
                      "    return heads * flops, heads * moved")),
        "lists instead of tuples": costs(softmax_cost="[4 * rows * columns, 2 * rows * columns * item_bytes]"),
        "counted tensor by tensor": costs(
            elementwise_cost="elements * flops_per_element, sum(elements * item_bytes for _ in range(inputs + 1))"),
    },
    "1.2": {
        "by the intensity": bounds(
            side="'compute' if flops / bytes_moved >= balance_point(teraflops, gigabytes_per_second) else 'memory'"),
        "other units on the way": bounds(balance="1000 * teraflops / gigabytes_per_second"),
        "a list": changed(bounds(), ("return 'compute' if compute >= memory else 'memory', max(compute, memory)",
                                     "return ['compute' if compute >= memory else 'memory', max(compute, memory)]")),
        "through numpy": bounds(seconds="float(np.maximum(compute, memory))"),
    },
    "1.3": {
        "inputs made contiguous first": changed(
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
        "lanes past the end read the first element": changed(
            VECTOR_ADD,
            ("x_pointer + offsets * x_stride, mask=inside", "x_pointer + tl.where(inside, offsets, 0) * x_stride"),
            ("y_pointer + offsets * y_stride, mask=inside", "y_pointer + (offsets % length) * y_stride")),
        "a grid function and a tiny block": changed(
            VECTOR_ADD,
            ("(programs,)", "lambda meta: (triton.cdiv(length, meta['BLOCK']),)"), ("BLOCK=1024", "BLOCK=32")),
        "computed in float32 and rounded back": changed(
            VECTOR_ADD,
            ("x + y, mask", "(x.to(tl.float32) + y.to(tl.float32)).to(result_pointer.dtype.element_ty), mask")),
    },
    "1.4": {
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
        "a number as the running sum": changed(
            ROW_SUM, ("partial = tl.zeros([BLOCK], dtype=tl.float32)", "partial = 0.0"),
            ("partial += values.to(tl.float32)", "partial += tl.sum(values.to(tl.float32), axis=0)"),
            ("tl.sum(partial, axis=0)", "partial")),
        "32 lanes, so that each adds up many numbers": changed(ROW_SUM, ("BLOCK=256", "BLOCK=32")),
        "the whole row at once": changed(
            ROW_SUM, ("BLOCK=256", "BLOCK=triton.next_power_of_2(columns), num_warps=32")),
    },
    "1.5": {
        "ReLU by where": changed(
            FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.where(scale * x + y > 0, scale * x + y, 0.0)")),
        "scale as a compile-time constant": changed(FUSED, ("scale, length", "scale: tl.constexpr, length")),
        "blocks of 4096": changed(
            FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.numel(), 4096)"), ("BLOCK=256", "BLOCK=4096")),
        "flattened views and a result of its own shape": changed(
            FUSED, ("result = torch.empty_like(x)",
                    "shape, x, y = x.shape, x.view(-1), y.reshape(-1)\n"
                    "    result = torch.empty(x.numel(), dtype=x.dtype, device=x.device)"),
            ("return result", "return result.view(shape)")),
    },
    "1.6": {
        "by the intensity": turning(steps="arithmetic_rate * (2 * item_bytes) / (2 * bandwidth)"),
        "through the balance point": turning(
            seconds="compute if steps / item_bytes > arithmetic_rate / bandwidth else memory"),
        "a tensor of one element": turning(measured="torch.tensor(seconds[0] / slope, dtype=torch.float64)"),
        "a fit by numpy": turning(slope="float(np.polyfit(steps[-2:], seconds[-2:], 1)[0])"),
    },
}
