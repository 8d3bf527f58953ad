"""What goes wrong in the epilogue of exercise 18.4, as edits of its meaning."""

from course_lib.checker import edits
from exercises.ch18_products_and_experts import product_steps as steps
from exercises.ch18_products_and_experts.product_steps import ways

GATE, UP = (f"multiplied(x, x_at, row < rows, weight, {at}, column < columns, block_k)" for at in ("gate_at", "up_at"))
GATE_BIAS, UP_BIAS = "load(bias, column, column < columns, 0.0)", "load(bias, column + columns, column < columns, 0.0)"
TO_GATE, TO_UP, BIASED = "gate = gate + load", "up = up + load", "if bias is not None"
ACTIVE, RESULT = "gate * torch.sigmoid(gate)", "active * up"
MINE, UP_ROWS = "load(residual, places, inside, 0.0).float()", "(column + columns) * weight"
ADDED, RESIDUAL_ROWS = f"result = result + {MINE}", "residual.stride(0)"
LAST_BLOCK = "[:, (x.shape[1] - 1) // block_k * block_k:]"
LATE, ROUNDED, TO_COLUMNS = "(0 if bias is None else late)", ".to(x.dtype).float()", ".float()[..., None, :]"
GATE_ROUNDED = (ACTIVE, f"gate{ROUNDED} * torch.sigmoid(gate{ROUNDED})")
CHANGES = (
    *edits("Gate and up are exchanged. The gate has the first half of the weight's rows and biases, and silu.",
        gate_and_up_exchanged=(ACTIVE, "up * torch.sigmoid(up)", RESULT, "active * gate"),
        gate_and_up_exchanged__in_the_weight=(GATE, UP, UP, GATE),
        gate_and_up_exchanged__in_the_bias=(GATE_BIAS, UP_BIAS, UP_BIAS, GATE_BIAS)),
    *edits("The biases were read at the wrong place. Element c is for gate column c, and hidden + c for up column c.",
        bias_of_the_gate_for_both=(UP_BIAS, GATE_BIAS), up_bias_misplaced__in_turns=(GATE_BIAS,
        "load(bias, 2 * column, column < columns, 0.0)", UP_BIAS, "load(bias, 2 * column + 1, column < columns, 0.0)"),
        bias_by_row=(f"{GATE_BIAS}{TO_COLUMNS}", "load(bias, row, row < bias.shape[0], 0.0).float()[..., None]",
        f"{UP_BIAS}{TO_COLUMNS}", "load(bias, row + columns, row + columns < bias.shape[0], 0.0).float()[..., None]")),
    *edits("Rows of gate or up were read at the wrong place in the weight. First come all rows of the gate, then all "
        "of up: they lie `hidden` rows apart, not in turns or by tiles.", same_rows_for_both=(UP, GATE),
        rows_in_turns=("column * weight", "2 * column * weight", UP_ROWS, "(2 * column + 1) * weight"),
        rows_in_turns__tiles=(UP_ROWS, "(column + column.shape[-1]) * weight")),
    *edits("silu was applied to gate and up. It is for the gate alone.",
        silu_of_both=(RESULT, "active * up * torch.sigmoid(up)"),
        silu_of_both__product=(ACTIVE, "gate * up * torch.sigmoid(gate * up)", RESULT, "active")),
    *edits("The activation is another one than silu, gate · sigmoid(gate).",
        sigmoid_alone=(ACTIVE, "torch.sigmoid(gate)"), **ways("another_activation", ACTIVE, "gate.relu()", "gate",
        "torch.nn.functional.gelu(gate)", "gate * torch.sigmoid(1.702 * gate)", "gate / (1.0 + torch.exp2(-gate))")),
    *edits("exp(gate) is infinite for large gates, and inf / inf is NaN. Use gate / (1 + exp(-gate)) or tl.sigmoid.",
        is_nan=True, exp_overflows=(ACTIVE, "gate * (gate.exp() / (1.0 + gate.exp()))"),
        exp_overflows__product=(ACTIVE, "gate * gate.exp() / (1.0 + gate.exp())")),
    *edits("The gate was limited to keep exp finite. But silu grows with it: large gates are wrong.",
        **ways("gate_limited", ACTIVE,
        *(f"gate.clamp(-{most}, {most}) * torch.sigmoid(gate)" for most in (20, 50, 80, 88)))),
    *edits("Only one block of inner counts in the gate or in up. Each needs sums that begin before the loop: gate = "
        "tl.dot(..., gate).",
        one_block_in_one_sum=(UP, UP.replace("x, ", f"x{LAST_BLOCK}, ").replace("weight", f"weight{LAST_BLOCK}"))),
    *edits("Gate and up share one sum, and need two.", one_sum_for_both=(GATE, f"({GATE} + {UP})", UP, f"0.0 * {UP}")),
    *edits("The result is silu(gate) · up: multiply.", added=(RESULT, "active + up"), up_missing=(RESULT, "active")),
    *edits("The residual was added before the end. It is added last, to silu(gate) · up.", **ways("residual_too_early",
        ADDED, f"result = (active + {MINE}) * up", f"gate = gate + {MINE}\nresult = gate * torch.sigmoid(gate) * up",
        f"result = active * (up + {MINE})")),
    *edits("The residual was not added as it is, or not once. Add it unchanged, at the end.",
        residual_wrong=(ADDED, "pass"), residual_wrong__times=(ADDED, f"result = result * {MINE}"),
        residual_wrong__without_bias=("if residual is not None", "if residual is not None and bias is not None")),
    *edits("The residual is read at the wrong place: row r begins r · residual.stride(0) elements after the first.",
        residual_stride=(RESIDUAL_ROWS, "columns"), residual_stride__of_x=(RESIDUAL_ROWS, "x.stride(0)")),
    *edits("A bias is missing. The gate has the first half of them and up the second.",
        bias_missing=(BIASED, "if False"), bias_missing__without=(BIASED, f"{BIASED} and residual is not None"),
        bias_missing__of_the_gate=(TO_GATE, "gate = gate + 0 * load"),
        bias_missing__of_up=(TO_UP, "up = up + 0 * load")),
    *edits("The bias was added in every block of inner. Add it once, after the loop.", bias_in_every_block=(TO_GATE,
        "gate = gate + -(-x.shape[1] // block_k) * load", TO_UP, "up = up + -(-x.shape[1] // block_k) * load")),
    *edits("A bias was added after the activation, or again. It belongs to the sums before the activation.",
        bias_too_late=(TO_GATE, "late = load", RESULT, f"active * up + {LATE}"),
        bias_too_late__of_up=(TO_UP, "late = load", RESULT, f"active * up + {LATE}"),
        bias_again=(RESULT, f"active * up + (0 if bias is None else {GATE_BIAS}{TO_COLUMNS})")),
    *edits("A sum, silu(gate) or the product was rounded to 16 bits. All stays float32 until the result is stored.",
        rounded_too_early=(*GATE_ROUNDED, RESULT, f"active * up{ROUNDED}"), rounded_too_early__gate=GATE_ROUNDED,
        **ways("rounded_too_early", RESULT, f"active * up{ROUNDED}", f"active{ROUNDED} * up",
        f"(active * up){ROUNDED}"), rounded_too_early__before_the_bias=(GATE, f"{GATE}{ROUNDED}", UP, f"{UP}{ROUNDED}"),
        rounded_too_early__everything=(*GATE_ROUNDED, RESULT, f"(active{ROUNDED} * up{ROUNDED}){ROUNDED}")),
    *edits("Up begins hidden · weight.stride(0) elements after the gate. Another distance was taken.",
        up_begins_elsewhere=("(column + columns) * weight.stride(0)",
        "(column * weight.stride(0) + columns * x.shape[1])")),
    *steps.TILES, *steps.ROW_STRIDES, *steps.LOOP,
)  # fmt: skip
