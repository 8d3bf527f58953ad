"""What goes wrong in the epilogue of exercise 18.4, as edits of its meaning."""

from __future__ import annotations

from course_lib.checker.specification.edits import edits
from exercises.ch18_products_and_experts import product_steps as steps

GATE = "multiplied(x, weight, row, column, rows, columns, 0, block_k)"
UP = "multiplied(x, weight, row, column, rows, columns, columns, block_k)"
GATE_BIAS, UP_BIAS = "load(bias, column, column < columns, 0.0)", "load(bias, column + columns, column < columns, 0.0)"
TO_GATE, TO_UP = "gate = gate + load", "up = up + load"
ACTIVE, RESULT = "gate * torch.sigmoid(gate)", "active * up"
LAST_BLOCK = (
    "multiplied(x[:, (x.shape[1] - 1) // block_k * block_k:], weight[:, (x.shape[1] - 1) // block_k * block_k:]"
)
MINE = "load(residual, places, inside, 0.0).float()"
ADDED, RESIDUAL_ROWS = f"result = result + {MINE}", "residual.stride(0)"
ROUNDED = ".to(x.dtype).float()"
SUMS_ROUNDED = (ACTIVE, f"gate{ROUNDED} * torch.sigmoid(gate{ROUNDED})", RESULT, f"active * up{ROUNDED}")
CHANGES = (
    *edits("Gate and up are exchanged. The first half of the weight's rows and of the bias is the gate, and silu is "
        "for the gate alone.",
        gate_and_up_exchanged=(ACTIVE, "up * torch.sigmoid(up)", RESULT, "active * gate"),
        gate_and_up_exchanged__in_the_weight=(GATE, UP, UP, GATE),
        gate_and_up_exchanged__in_the_bias=(GATE_BIAS, UP_BIAS, UP_BIAS, GATE_BIAS)),
    *edits("The biases were read at the wrong place. All of the gate's come first: element c is for gate column c, and "
        "element hidden + c for up's.",
        bias_of_the_gate_for_both=(UP_BIAS, GATE_BIAS),
        up_bias_misplaced__in_turns=(GATE_BIAS, "load(bias, 2 * column, column < columns, 0.0)",
        UP_BIAS, "load(bias, 2 * column + 1, column < columns, 0.0)"),
        bias_of_the_first_tile=(GATE_BIAS, "load(bias, column - column[..., :1], column < columns, 0.0)"),
        bias_by_row=(f"{GATE_BIAS}.float()[..., None, :]",
        "load(bias, row, row < bias.shape[0], 0.0).float()[..., None]",
        f"{UP_BIAS}.float()[..., None, :]", "load(bias, row + columns, row + columns < bias.shape[0], 0.0).float()"
        "[..., None]")),
    *edits("The weight's rows of gate or up were read at the wrong place. All rows of the gate come first, and then "
        "all of up: they lie `hidden` rows apart, neither in turns nor tile by tile.",
        same_rows_for_both=(UP, GATE), rows_in_turns=("(column + first)", "(2 * column + (first > 0))"),
        rows_in_turns__bias_too=("(column + first)", "(2 * column + (first > 0))", GATE_BIAS,
        "load(bias, 2 * column, column < columns, 0.0)", UP_BIAS,
        "load(bias, 2 * column + 1, column < columns, 0.0)"),
        rows_in_turns__tiles=("(column + first)", "(column + (first > 0) * column.shape[-1])")),
    *edits("silu was applied to gate and up. It is for the gate alone.",
        silu_of_both=(RESULT, "active * up * torch.sigmoid(up)"),
        silu_of_both__product=(ACTIVE, "gate * up * torch.sigmoid(gate * up)", RESULT, "active")),
    *edits("The activation is another one than silu, gate · sigmoid(gate).",
        sigmoid_alone=(ACTIVE, "torch.sigmoid(gate)"),
        another_activation=(ACTIVE, "gate.relu()"), another_activation__none=(ACTIVE, "gate"),
        another_activation__gelu=(ACTIVE, "torch.nn.functional.gelu(gate)"),
        another_activation__gelu_sigmoid=(ACTIVE, "gate * torch.sigmoid(1.702 * gate)"),
        another_activation__exp2=(ACTIVE, "gate / (1.0 + torch.exp2(-gate))")),
    *edits("exp(gate) is infinite for large gates, and infinity / infinity is NaN. Use gate / (1 + exp(-gate)) or "
        "tl.sigmoid.", is_nan=True,
        exp_overflows=(ACTIVE, "gate * (gate.exp() / (1.0 + gate.exp()))"),
        exp_overflows__product=(ACTIVE, "gate * gate.exp() / (1.0 + gate.exp())")),
    *edits("The gate was limited to keep exp finite. But silu grows with the gate, so large gates come out wrong.",
        **{f"gate_limited__{most}": (ACTIVE, ACTIVE.replace("gate *", f"gate.clamp(-{most}, {most}) *"))
           for most in (20, 50, 80, 88)}),
    *edits("Only one block of inner counts in the gate or in up. Each has sums of its own, which begin before the "
        "loop: gate = tl.dot(..., gate) and up = tl.dot(..., up).",
        one_block_in_one_sum=(UP, LAST_BLOCK + UP[len("multiplied(x, weight"):])),
    *edits("The products of gate and up went into one sum. Each needs its own.",
        one_sum_for_both=(GATE, f"({GATE} + {UP})", UP, f"0.0 * {UP}")),
    *edits("The result is silu(gate) · up: one of them is missing, or they are added.",
        added=(RESULT, "active + up"), up_missing=(RESULT, "active")),
    *edits("The residual was added before the end. It is added last, to silu(gate) · up.",
        residual_too_early=(ADDED, f"result = (active + {MINE}) * up"),
        residual_too_early__to_the_gate=(ADDED, f"gate = gate + {MINE}\nresult = gate * torch.sigmoid(gate) * up"),
        residual_too_early__to_up=(ADDED, f"result = active * (up + {MINE})")),
    *edits("The residual was not added as it is, or not once. Add it unchanged, at the end.",
        residual_wrong=(ADDED, "pass"), residual_wrong__times=(ADDED, f"result = result * {MINE}"),
        residual_wrong__without_bias=("if residual is not None", "if residual is not None and bias is not None")),
    *edits("The residual is read at the wrong place: row r begins r · residual.stride(0) elements after the first.",
        residual_stride=(RESIDUAL_ROWS, "columns"), residual_stride__of_x=(RESIDUAL_ROWS, "x.stride(0)"),
        residual_of_the_first_tile=(f"row[..., None] * {RESIDUAL_ROWS}",
        f"(row - row[..., :1])[..., None] * {RESIDUAL_ROWS}")),
    *edits("A bias is missing. The gate has the first half of them and up the second.",
        bias_missing=("if bias is not None", "if False"), bias_missing__of_up=(TO_UP, "up = up + 0 * load"),
        bias_missing__of_the_gate=(TO_GATE, "gate = gate + 0 * load"),
        bias_missing__without=("if bias is not None", "if bias is not None and residual is not None")),
    *edits("The bias was added in every block of inner. It belongs to the finished sums: add it once, after the loop.",
        bias_in_every_block=(TO_GATE, "gate = gate + -(-x.shape[1] // block_k) * load",
        TO_UP, "up = up + -(-x.shape[1] // block_k) * load")),
    *edits("A bias was added after the activation, or once more. It belongs to the sums, before the activation.",
        bias_too_late=(TO_GATE, "late = load", RESULT, "active * up + (0 if bias is None else late)"),
        bias_too_late__of_up=(TO_UP, "late = load", RESULT, "active * up + (0 if bias is None else late)"),
        bias_too_late__to_silu=(TO_GATE, "late = load", RESULT, "(active + (0 if bias is None else late)) * up"),
        bias_again=(RESULT, f"active * up + (0 if bias is None else {GATE_BIAS}.float()[..., None, :])")),
    *edits("Something was rounded to 16 bits before the end: a sum, silu(gate) or the product. Everything stays "
        "float32 until the result is stored.",
        rounded_too_early=SUMS_ROUNDED,
        rounded_too_early__gate=SUMS_ROUNDED[:2], rounded_too_early__up=SUMS_ROUNDED[2:],
        rounded_too_early__activated=(RESULT, f"active{ROUNDED} * up"),
        rounded_too_early__before_the_residual=(RESULT, f"(active * up){ROUNDED}"),
        rounded_too_early__before_the_bias=(GATE, f"{GATE}{ROUNDED}", UP, f"{UP}{ROUNDED}"),
        rounded_too_early__and_activated=(*SUMS_ROUNDED[:2], RESULT, f"active{ROUNDED} * up{ROUNDED}"),
        rounded_too_early__everything=(*SUMS_ROUNDED[:2], RESULT, f"(active{ROUNDED} * up{ROUNDED}){ROUNDED}")),
    *edits("Every result was rounded to 16 bits, also those in float32. Cast to the result's own dtype.",
        stored_in_16_bits=("result.to(x.dtype), inside", "result.half().to(x.dtype), inside")),
    *edits("The first row of up begins hidden · weight.stride(0) elements after that of the gate, and another distance "
        "was taken.",
        up_begins_elsewhere=("(column + first)[..., None] * weight.stride(0)",
        "(column[..., None] * weight.stride(0) + first * inner)")),
    *steps.TILES, *steps.ROW_STRIDES, *steps.LOOP,
)  # fmt: skip
