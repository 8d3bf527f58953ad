"""Wrong answers to exercise 18.4, and unusual right ones."""

from tests.submissions.edits import changed

RESULT = "result = gate * tl.sigmoid(gate) * up"
GATE_ROWS = "gate_rows = weight_pointer + column.to(tl.int64)[:, None] * weight_stride"
UP_ROWS = "up_rows = weight_pointer + (column + hidden).to(tl.int64)[:, None] * weight_stride"
GATE_DOT = 'gate = tl.dot(x_tile, tl.trans(gate_tile), gate, input_precision="ieee")'
UP_DOT = 'up = tl.dot(x_tile, tl.trans(up_tile), up, input_precision="ieee")'
GATE_BIAS = "gate += tl.load(bias_pointer + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]"
UP_BIAS = "up += tl.load(bias_pointer + hidden + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]"
RESIDUAL = "result += tl.load(residual_tile, mask=inside, other=0.0).to(tl.float32)"
RESIDUAL_AT = "residual_tile = residual_pointer + row.to(tl.int64)[:, None] * residual_stride + column[None, :]"
INSIDE, STORED = "(row < rows)[:, None] & (column < hidden)[None, :]", "result.to(out_pointer.dtype.element_ty)"
LOOP, GRID = "for start in range(0, inner, BLOCK_K)", "(triton.cdiv(rows, block_m), triton.cdiv(hidden, block_n))"
X_MASK, MASK = "mask=(row < rows)[:, None] & (k < inner)", "mask = (column < hidden)[:, None] & (k < inner)"
STRIDES = "x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0)"
MINE = ("    if residual_pointer is not None:\n        residual_tile = residual_pointer + row.to(tl.int64)[:, None] "
        "* residual_stride + column[None, :]\n        {} += tl.load(residual_tile, mask=inside, other=0.0)"
        ".to(tl.float32)\n")
ROUND = ".to(x_pointer.dtype.element_ty).to(tl.float32)"


def wrong(*replacements):
    return changed("18.4", *replacements)


def early(to):
    """The residual added to a sum, before the activation."""
    return wrong((f"    {RESULT}\n    inside = {INSIDE}\n", f"    inside = {INSIDE}\n{MINE.format(to)}    {RESULT}\n"),
                 (RESIDUAL, "pass"))


WRONG = {
    "gate_and_up_exchanged": wrong((RESULT, "result = up * tl.sigmoid(up) * gate")),
    "gate_and_up_exchanged__in_the_weight": wrong((GATE_ROWS, GATE_ROWS.replace("column.to", "(column + hidden).to")),
        (UP_ROWS, UP_ROWS.replace("(column + hidden).to", "column.to"))),
    "bias_of_the_gate_for_both": wrong((UP_BIAS, GATE_BIAS.replace("gate +=", "up +="))),
    "same_rows_for_both": wrong(("(column + hidden).to", "column.to")),
    "rows_in_turns": wrong((GATE_ROWS, GATE_ROWS.replace("column.to", "(2 * column).to")),
        (UP_ROWS, UP_ROWS.replace("column + hidden", "2 * column + 1"))),
    "rows_in_turns__tiles": wrong((UP_ROWS, UP_ROWS.replace("column + hidden", "column + BLOCK_N"))),
    "silu_of_both": wrong((RESULT, f"{RESULT} * tl.sigmoid(up)")),
    "silu_of_both__product": wrong((RESULT, "result = gate * up\n    result = result * tl.sigmoid(result)")),
    "sigmoid_alone": wrong((RESULT, "result = tl.sigmoid(gate) * up")),
    "another_activation": wrong((RESULT, "result = tl.maximum(gate, 0.0) * up")),
    "another_activation__none": wrong((RESULT, "result = gate * up")),
    "another_activation__gelu": wrong((RESULT, "result = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up")),
    "exp_overflows": wrong((RESULT, "result = gate * (tl.exp(gate) / (1.0 + tl.exp(gate))) * up")),
    "exp_overflows__product": wrong((RESULT, "result = gate * tl.exp(gate) / (1.0 + tl.exp(gate)) * up")),
    "added": wrong((RESULT, "result = gate * tl.sigmoid(gate) + up")),
    "up_missing": wrong((RESULT, "result = gate * tl.sigmoid(gate)")),
    "residual_too_early": wrong((RESULT, "result = gate * tl.sigmoid(gate)"),
        (RESIDUAL, f"{RESIDUAL}\n    result *= up")),
    "residual_too_early__to_the_gate": early("gate"),
    "residual_too_early__to_up": early("up"),
    "residual_wrong": wrong((RESIDUAL, "pass")),
    "residual_wrong__times": wrong((RESIDUAL, RESIDUAL.replace("+=", "*="))),
    "residual_wrong__without_bias": wrong(("if residual_pointer is not None", "if residual_pointer is not None and "
                                           "bias_pointer is not None")),
    "residual_stride": wrong((STRIDES, "x.stride(0), weight.stride(0), hidden")),
    "residual_stride__of_x": wrong((STRIDES, "x.stride(0), weight.stride(0), x.stride(0)")),
    "bias_missing": wrong((GATE_BIAS, "pass"), (UP_BIAS, "pass")),
    "bias_missing__of_up": wrong((UP_BIAS, "pass")),
    "bias_missing__of_the_gate": wrong((GATE_BIAS, "pass")),
    "bias_by_row": wrong((GATE_BIAS, "gate += tl.load(bias_pointer + row, mask=row < 2 * hidden, other=0.0)"
        ".to(tl.float32)[:, None]"), (UP_BIAS, "up += tl.load(bias_pointer + hidden + row, mask=row < hidden, "
        "other=0.0).to(tl.float32)[:, None]")),
    "bias_in_every_block": wrong((f"        {GATE_DOT}", f"        {GATE_DOT}\n        if bias_pointer is not None:\n"
        f"            {GATE_BIAS}\n            {UP_BIAS}"),
        (f"    if bias_pointer is not None:\n        {GATE_BIAS}\n        {UP_BIAS}\n    result", "    result")),
    "bias_too_late": wrong((GATE_BIAS, "late = tl.load(bias_pointer + column, mask=column < hidden, other=0.0)"
        ".to(tl.float32)[None, :]"), (RESULT, f"{RESULT}\n    if bias_pointer is not None:\n        result += late")),
    "bias_again": wrong((RESULT, f"{RESULT}\n    if bias_pointer is not None:\n        "
                                 f"{GATE_BIAS.replace('gate', 'result')}")),
    "up_bias_misplaced__in_turns": wrong((GATE_BIAS, GATE_BIAS.replace("+ column", "+ 2 * column")),
        (UP_BIAS, UP_BIAS.replace("hidden + column", "2 * column + 1"))),
    "gate_limited": wrong((RESULT, f"gate = tl.minimum(tl.maximum(gate, -50.0), 50.0)\n    {RESULT}")),
    "one_block_in_one_sum": wrong((UP_DOT, UP_DOT.replace(", up, ", ", "))),
    "one_sum_for_both": wrong((UP_DOT, UP_DOT.replace("up = ", "gate = ").replace(", up, ", ", gate, "))),
    "hidden_not_halved": wrong(("weight.shape[0] // 2", "weight.shape[0]")),
    "rounded_too_early": wrong((RESULT, f"gate = gate{ROUND}\n    up = up{ROUND}\n    {RESULT}")),
    "rounded_too_early__gate": wrong((RESULT, f"gate = gate{ROUND}\n    {RESULT}")),
    "rounded_too_early__before_the_residual": wrong((RESULT, f"{RESULT}\n    result = result{ROUND}")),
    "rounded_too_early__before_the_bias": wrong((
        "    if bias_pointer is", f"    gate = gate{ROUND}\n    up = up{ROUND}\n    if bias_pointer is")),
    "stored_in_16_bits": wrong((STORED, "result.to(tl.float16)")),
    "x_row_stride": wrong((STRIDES, STRIDES.replace("x.stride(0)", "inner"))),
    "weight_row_stride": wrong((STRIDES, STRIDES.replace("weight.stride(0)", "inner"))),
    "strides_of_another": wrong((STRIDES, STRIDES.replace("weight.stride(0)", "x.stride(0)"))),
    "first_block_again": wrong(("k = start + tl.arange", "k = tl.arange")),
    "one_block_counts": wrong((GATE_DOT, GATE_DOT.replace(", gate, ", ", ")), (UP_DOT, UP_DOT.replace(", up, ", ", "))),
    "last_block_lost": wrong((LOOP, "for start in range(0, inner // BLOCK_K * BLOCK_K, BLOCK_K)")),
    "inner_not_masked": wrong((" & (k < inner)", "")),
    "inner_not_masked__weight": wrong((MASK, "mask = (column < hidden)[:, None]")),
    "sums_in_16_bits": wrong((UP_DOT, f"{UP_DOT}\n        gate = gate{ROUND}\n        up = up{ROUND}")),
    "last_tile_missing": wrong((GRID, "(max(1, rows // block_m), max(1, hidden // block_n))")),
    "tiles_exchanged": wrong((GRID, "(triton.cdiv(hidden, block_n), triton.cdiv(rows, block_m))")),
    "stored_with_another_stride": wrong(("[:, None] * hidden + column", "[:, None] * x_stride + column")),
    "reads_outside": wrong((X_MASK, "mask=k < inner")),
    "reads_outside__bias": wrong((UP_BIAS, UP_BIAS.replace("mask=column < hidden, other=0.0", "")
                                  .replace("column, )", "column)"))),
    "writes_outside": wrong((f"tl.store(out_tile, {STORED}, mask=inside)", f"tl.store(out_tile, {STORED}, "
                             "mask=(row < rows)[:, None])")),
    "offset_in_32_bits": wrong((RESIDUAL_AT, RESIDUAL_AT.replace(".to(tl.int64)", ""))),
    "offset_in_32_bits__where_up_begins": wrong((UP_ROWS, UP_ROWS.replace("(column + hidden).to(tl.int64)[:, None] * "
        "weight_stride", "column.to(tl.int64)[:, None] * weight_stride + hidden * weight_stride"))),
    "none_used": wrong(("0 if residual is None else residual.stride(0)", "residual.stride(0)")),
    "not_contiguous": wrong(("[:, None] * hidden + column[None, :]", "[:, None] + column[None, :] * rows"),
        ("torch.empty(rows, hidden, dtype=x.dtype, device=x.device)", "torch.empty(hidden, rows, dtype=x.dtype, "
         "device=x.device).t()")),
    "rounded_too_early__sigmoid": wrong((RESULT, f"result = gate * tl.sigmoid(gate){ROUND} * up")),
    "rounded_too_early__everything": wrong((RESULT, f"gate = gate{ROUND}\n    up = up{ROUND}\n    result = "
                                                    f"((gate * tl.sigmoid(gate)){ROUND} * up){ROUND}")),
    "offset_in_32_bits__up": wrong((UP_ROWS, UP_ROWS.replace(".to(tl.int64)", ""))),
    "too_many_bytes": wrong((UP_DOT, f"x_tile = tl.load(x_rows + k, {X_MASK}, other=0.0)\n        {UP_DOT}")),
    "no_kernel_launched": """# Exercise 18.4 · The end of a product
def gated_product(x, weight, bias, residual, block_m, block_n, block_k):
    gate, up = F.linear(x.float(), weight.float(), None if bias is None else bias.float()).chunk(2, -1)
    out = F.silu(gate) * up
    return (out if residual is None else out + residual.float()).to(x.dtype)
""",
    "gate_and_up_exchanged__and_bias_missing": wrong((RESULT, "result = up * tl.sigmoid(up) * gate"),
        (GATE_BIAS, "pass"), (UP_BIAS, "pass")),
}  # fmt: skip

UNUSUAL = {
    "a division in the place of the sigmoid, biases where the sums begin": """# Exercise 18.4 · The end of a product
@triton.jit
def fused(x, w, b, r, y, M, H, K, xs, ws, rs, HAS_B: tl.constexpr, HAS_R: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles = tl.cdiv(H, BN)
    m = (tl.program_id(0) // tiles) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % tiles) * BN + tl.arange(0, BN)
    rows, columns = m[:, None] < M, n[None, :] < H
    g, u = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    if HAS_B:
        g += tl.load(b + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        u += tl.load(b + H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
    k = tl.arange(0, BK)
    for left in range(K, 0, -BK):
        a = tl.load(x + m.to(tl.int64)[:, None] * xs + k[None, :], mask=rows & (k[None, :] < K), other=0.0)
        inside = columns & (k[:, None] < K)
        first = w + n.to(tl.int64)[None, :] * ws + k[:, None]
        second = w + (n + H).to(tl.int64)[None, :] * ws + k[:, None]
        g += tl.dot(a, tl.load(first, mask=inside, other=0.0), input_precision="ieee")
        u += tl.dot(a, tl.load(second, mask=inside, other=0.0), input_precision="ieee")
        k += BK
    out = g / (1 + tl.exp(-g)) * u
    if HAS_R:
        out = out + tl.load(r + m.to(tl.int64)[:, None] * rs + n[None, :], mask=rows & columns, other=0.0)
    tl.store(y + m.to(tl.int64)[:, None] * H + n[None, :], out.to(y.dtype.element_ty), mask=rows & columns)


def gated_product(x, weight, bias, residual, block_m, block_n, block_k):
    M, K = x.shape
    H = weight.shape[0] // 2
    y = x.new_empty(M, H)
    fused[(triton.cdiv(M, block_m) * triton.cdiv(H, block_n),)](
        x, weight, x if bias is None else bias, x if residual is None else residual, y, M, H, K, x.stride(0),
        weight.stride(0), 0 if residual is None else residual.stride(0), bias is not None, residual is not None,
        block_m, block_n, block_k)
    return y
""",
    "the last row again in the place of those beyond the end": wrong(
        ("x_pointer + row.to(tl.int64)", "x_pointer + tl.minimum(row, rows - 1).to(tl.int64)"),
        (X_MASK, "mask=k < inner"),
        (GATE_ROWS, "last = tl.minimum(column, hidden - 1)\n    " + GATE_ROWS.replace("column", "last")),
        (UP_ROWS, UP_ROWS.replace("column", "last")), (MASK, "mask = k < inner"),
        ("tl.load(gate_rows + k, mask=mask, other=0.0)", "tl.load(gate_rows + k, mask=k < inner, other=0.0)")),
    "two weights": wrong(("weight_pointer, bias_pointer,", "weight_pointer, up_pointer, bias_pointer,"),
        (UP_ROWS, "up_rows = up_pointer + column.to(tl.int64)[:, None] * weight_stride"),
        ("        x, weight, bias,", "        x, weight[:hidden], weight[hidden:], bias,")),
    "exp2 and the sign apart": wrong((RESULT, "small = tl.exp2(-tl.abs(gate) * 1.4426950408889634)\n    result = gate "
                                      "* up * tl.where(gate >= 0, 1.0, small) / (1.0 + small)")),
}  # fmt: skip
