"""Wrong answers to exercise 1.5, and unusual right ones."""

from tests.submissions.edits import changed, edited

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


WRONG = {
        "too_slow": edited(
            FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.numel(), 32)"), ("BLOCK=256", "BLOCK=32")),
        "relu_before_add": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.maximum(scale * x, 0.0) + y")),
        "nothing_stored": edited(
            FUSED, ("tl.store(result_pointer + offsets, tl.maximum(scale * x + y, 0.0), mask=inside)", "pass")),
        "undefined_name": edited(FUSED, ("scale * x + y", "scale * x + z")),
        "rows_counted": edited(FUSED, ("    programs =", "    count = x.shape[0]\n    programs ="),
                                ("triton.cdiv(x.numel(), 256)", "triton.cdiv(count, 256)"),
                                ("scale, x.numel()", "scale, count")),
        "rows_counted__2": edited(FUSED, ("scale, x.numel()", "scale, len(x)")),
        "maximum_over_the_block": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.max(scale * x + y, 0)")),
        "python_max": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "max(scale * x + y, 0)")),
        "relu_missing__2": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "max(0.0, scale * x + y)")),
        "relu_missing": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "scale * x + y")),
        "sum_scaled": edited(FUSED, ("scale * x + y", "scale * (x + y)")),
        "y_scaled": edited(FUSED, ("scale * x + y", "x + scale * y")),
        "scale_or_one": edited(FUSED, ("    programs", "    scale = scale or 1.0\n    programs")),
        "scale_missing": edited(FUSED, ("scale * x + y", "x + y")),
        "scale_added": edited(FUSED, ("scale * x + y", "scale + x + y")),
        "minimum_taken": edited(FUSED, ("tl.maximum", "tl.minimum")),
        "absolute_value": edited(FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.abs(scale * x + y)")),
        "past_the_end": edited(FUSED, (", mask=inside", "")),
        "last_element_missing": edited(FUSED, ("offsets < length", "offsets < length - 1")),
        "only_first_block": edited(FUSED, ("tl.program_id(0) * BLOCK + ", "")),
        "rows_counted__in_the_grid": edited(FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.shape[0], 256)")),
        "blocks_overlap": edited(FUSED, ("tl.program_id(0) * BLOCK", "tl.program_id(0)")),
        "too_few_programs": edited(FUSED, ("triton.cdiv(x.numel(), 256)", "x.numel() // 256")),
        "scale_truncated": edited(FUSED, ("result, scale, x.numel()", "result, int(scale), x.numel()")),
        "y_missing": edited(FUSED, ("scale * x + y", "scale * x")),
        "x_missing": edited(FUSED, ("scale * x + y", "y")),
        "x_for_y": edited(FUSED, ("y_pointer + offsets", "x_pointer + offsets")),
        "y_for_x": edited(FUSED, ("tl.load(x_pointer + offsets", "tl.load(y_pointer + offsets")),
        "y_subtracted": edited(FUSED, ("scale * x + y", "scale * x - y")),
        "y_multiplied": edited(FUSED, ("scale * x + y", "scale * x * y")),
        "relu_of_each": edited(
            FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.maximum(scale * x, 0.0) + tl.maximum(y, 0.0)")),
        "compared_with_one": edited(FUSED, (", 0.0), mask", ", 1.0), mask")),
        "maximum_over_the_block__2": edited(FUSED, ("scale * x + y, 0.0)", "tl.max(scale * x + y, 0), 0.0)")),
        "rows_counted__3": edited(FUSED, ("scale, x.numel()", "scale, x.shape[-1]")),
        "at_least_one_program": edited(FUSED, ("triton.cdiv(x.numel(), 256)", "max(1, x.numel() // 256)")),
        "only_first_block__3": edited(
            FUSED, ("triton.cdiv(x.numel(), 256)", "min(32, triton.cdiv(x.numel(), 256))")),
        "relu_missing__and_at_least_one_program": edited(
            FUSED, ("triton.cdiv(x.numel(), 256)", "max(1, x.numel() // 256)"),
            ("tl.maximum(scale * x + y, 0.0)", "scale * x + y")),
        "relu_before_add__and_scale_missing": edited(
            FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.maximum(x, 0.0) + y")),
        "modified_input": edited(FUSED, ("torch.empty_like(x)", "x")),
        "several_kernels": edited(
            FUSED, ("    return result",
                    "    scale_add_relu_kernel[(programs,)](x, y, result, scale, x.numel(), BLOCK=256)\n"
                    "    return result")),
        "too_many_bytes": edited(
            FUSED, ("    tl.store(", "    tl.store(result_pointer + offsets, scale * x, mask=inside)\n    tl.store(")),
        "forbidden_operation": edited(FUSED, ("(x, y, result, scale,", "(x * scale, y, result, 1.0,")),
    }


UNUSUAL = {
        "ReLU by where": edited(
            FUSED, ("tl.maximum(scale * x + y, 0.0)", "tl.where(scale * x + y > 0, scale * x + y, 0.0)")),
        "scale as a compile-time constant": edited(FUSED, ("scale, length", "scale: tl.constexpr, length")),
        "x and y are read last to first": edited(
            FUSED, ("offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)",
                    "offsets = length - 1 - tl.program_id(0) * BLOCK - tl.arange(0, BLOCK)"),
            ("inside = offsets < length", "inside = offsets >= 0")),
        "half of the sum and its absolute value": edited(
            FUSED, ("tl.maximum(scale * x + y, 0.0)", "0.5 * ((scale * x + y) + tl.abs(scale * x + y))")),
        "blocks of 4096": edited(
            FUSED, ("triton.cdiv(x.numel(), 256)", "triton.cdiv(x.numel(), 4096)"), ("BLOCK=256", "BLOCK=4096")),
        "flattened views and a result of its own shape": edited(
            FUSED, ("result = torch.empty_like(x)",
                    "shape, x, y = x.shape, x.view(-1), y.reshape(-1)\n"
                    "    result = torch.empty(x.numel(), dtype=x.dtype, device=x.device)"),
            ("return result", "return result.view(shape)")),
    }


WRONG |= {
    "mask_by_the_block": changed("1.5", ("inside = offsets < length", "inside = offsets < BLOCK")),
    "relu_before_add__of_x": changed(
        "1.5", ("tl.maximum(scale * x + y, 0.0)", "scale * tl.maximum(x, 0.0) + y")
    ),
    "relu_before_scale": changed("1.5", ("tl.maximum(scale * x + y, 0.0)", "scale * tl.maximum(x + y, 0.0)")),
    "forbidden_operation__in_place": changed(
        "1.5", ("tl.maximum(scale * x + y, 0.0)", "scale * x + y"), ("    return result", "    return result.relu_()")
    ),
}


WRONG |= {
    "grid_capped": changed("1.5", ("(triton.cdiv(x.numel(), 1024),)", "(min(triton.cdiv(x.numel(), 1024), 264),)")),
    "relu_by_the_magnitude": changed("1.5",
        ("    tl.store(result_pointer + offsets, tl.maximum(scale * x + y, 0.0), mask=inside)",
         "    value = (scale * x + y).to(result_pointer.dtype.element_ty)\n"
         "    tl.store(result_pointer + offsets, (value + tl.abs(value)) / 2, mask=inside)")),
}


def _kept_by_the_address(name):
    """The course's answer with one result for each address of an argument."""
    return changed(
        "1.5",
        ("def scale_add_relu(x", "kept = {}\n\n\ndef scale_add_relu(x"),
        ("    result = torch.empty_like(x)\n",
         f"    result = kept.get({name}.data_ptr())\n"
         "    if result is None or result.shape != x.shape or result.dtype != x.dtype:\n"
         f"        result = kept[{name}.data_ptr()] = torch.empty_like(x)\n"),
    )


WRONG |= {
    "earlier_result_changed": _kept_by_the_address("x"),
    "earlier_result_changed__by_the_address_of_y": _kept_by_the_address("y"),
}
