"""What goes wrong in the epilogue of exercise 18.4, as edits of its meaning."""

from __future__ import annotations

from course_lib.checker.specification.edits import edits
from exercises.ch18_products_and_experts import product_steps as steps

GATE = "multiplied(x, weight, row, column, rows, columns, 0, block_k)"
UP = "multiplied(x, weight, row, column, rows, columns, columns, block_k)"
GATE_BIAS, UP_BIAS = "load(bias, column, column < columns, 0.0)", "load(bias, column + columns, column < columns, 0.0)"
ACTIVATED = "gate * torch.sigmoid(gate) * up"
LAST_BLOCK = (
    "multiplied(x[:, (x.shape[1] - 1) // block_k * block_k:], weight[:, (x.shape[1] - 1) // block_k * block_k:]"
)
WITH_RESIDUAL = "result = result + load(residual, places, inside, 0.0).float()"
ADDED_BIAS = ("gate = gate + load", "up = up + load")
RESIDUAL_ROWS = "residual.stride(0)"
CHANGES = (
    *edits("Gate and up are exchanged. The first half of the weight's rows and of the bias is the gate, and silu is "
        "for the gate alone.",
        gate_and_up_exchanged=(ACTIVATED, "up * torch.sigmoid(up) * gate"),
        gate_and_up_exchanged__in_the_weight=(GATE, UP, UP, GATE),
        gate_and_up_exchanged__in_the_bias=(GATE_BIAS, UP_BIAS, UP_BIAS, GATE_BIAS)),
    *edits("The bias of up was read where that of the gate lies. Up's begins `hidden` elements later.",
        bias_of_the_gate_for_both=(UP_BIAS, GATE_BIAS)),
    *edits("The bias of up was read at the wrong place. All of the gate's come first, so up's element c is number "
        "hidden + c.",
        up_bias_misplaced=(UP_BIAS, "load(bias, column + rows, column < columns, 0.0)"),
        up_bias_misplaced__in_turns=(GATE_BIAS, "load(bias, 2 * column, column < columns, 0.0)",
        UP_BIAS, "load(bias, 2 * column + 1, column < columns, 0.0)"),
        up_bias_misplaced__by_a_tile=(UP_BIAS, "load(bias, column + column.shape[-1], column < columns, 0.0)"),
        up_bias_misplaced__next=(UP_BIAS, "load(bias, column + 1, column < columns, 0.0)")),
    *edits("The weight's rows of up were read where those of the gate lie, or the other way round. Up's begin `hidden` "
        "rows later.",
        same_rows_for_both=(UP, GATE), same_rows_for_both__of_up=(GATE, UP)),
    *edits("Rows of gate and up were taken in turns, or tile by tile. All rows of the gate come first, and then all of "
        "up: they lie `hidden` rows apart.",
        rows_in_turns=("(column + first)", "(2 * column + (first > 0))"),
        rows_in_turns__bias_too=("(column + first)", "(2 * column + (first > 0))", GATE_BIAS,
        "load(bias, 2 * column, column < columns, 0.0)", UP_BIAS,
        "load(bias, 2 * column + 1, column < columns, 0.0)"),
        rows_in_turns__tiles=("(column + first)", "(column + (first > 0) * column.shape[-1])"),
        rows_in_turns__tiles_of_both=("(column + first)",
        "(column + torch.arange(column.shape[0])[:, None] * column.shape[-1] + (first > 0) * column.shape[-1])"),
        rows_in_turns__by_rows=("columns, columns, block_k)", "columns, rows, block_k)"),
        rows_in_turns__by_inner=("columns, columns, block_k)", "columns, x.shape[1], block_k)")),
    *edits("silu was applied to gate and up. It is for the gate alone.",
        silu_of_both=(ACTIVATED, "gate * torch.sigmoid(gate) * up * torch.sigmoid(up)"),
        silu_of_both__product=(ACTIVATED, "gate * up * torch.sigmoid(gate * up)")),
    *edits("The activation is sigmoid(gate). It should be silu, which is gate · sigmoid(gate).",
        sigmoid_alone=(ACTIVATED, "torch.sigmoid(gate) * up")),
    *edits("The activation is another one than silu, gate · sigmoid(gate).",
        another_activation=(ACTIVATED, "gate.relu() * up"),
        another_activation__none=(ACTIVATED, "gate * up"),
        another_activation__gelu=(ACTIVATED, "torch.nn.functional.gelu(gate) * up"),
        another_activation__gelu_tanh=(ACTIVATED, "torch.nn.functional.gelu(gate, approximate='tanh') * up"),
        another_activation__gelu_sigmoid=(ACTIVATED, "gate * torch.sigmoid(1.702 * gate) * up"),
        another_activation__tanh=(ACTIVATED, "gate.tanh() * up"),
        another_activation__of_minus=(ACTIVATED, "gate * torch.sigmoid(-gate) * up"),
        another_activation__squared=(ACTIVATED, "gate * gate * torch.sigmoid(gate) * up")),
    *edits("exp(gate) is infinite for large gates, and infinity / infinity is NaN. Use gate / (1 + exp(-gate)) or "
        "tl.sigmoid.", is_nan=True,
        exp_overflows=(ACTIVATED, "gate * (gate.exp() / (1.0 + gate.exp())) * up"),
        exp_overflows__on_both_sides=(
        ACTIVATED, "gate * ((gate / 2).exp() / ((gate / 2).exp() + (-gate / 2).exp())) * up"),
        exp_overflows__product=(ACTIVATED, "gate * gate.exp() / (1.0 + gate.exp()) * up")),
    *edits("The gate was limited to keep exp finite. But silu grows with the gate, so large gates come out wrong.",
        **{f"gate_limited__{most}": (ACTIVATED, ACTIVATED.replace("gate *", f"gate.clamp(-{most}, {most}) *"))
           for most in (20, 30, 50, 60, 80, 88, 100)}),
    *edits("Only one block of inner counts in the gate or in up. Each has sums of its own, which begin before the "
        "loop: gate = tl.dot(..., gate) and up = tl.dot(..., up).",
        one_block_in_one_sum=(UP, LAST_BLOCK + UP[len("multiplied(x, weight"):]),
        one_block_in_one_sum__gate=(GATE, LAST_BLOCK + GATE[len("multiplied(x, weight"):])),
    *edits("The products of gate and up went into one sum. Each needs its own.",
        one_sum_for_both=(GATE, f"({GATE} + {UP})", UP, f"0.0 * {UP}"),
        one_sum_for_both__up=(UP, f"({GATE} + {UP})")),
    *edits("Gate and up are added. They are multiplied.",
        added=(ACTIVATED, "gate * torch.sigmoid(gate) + up")),
    *edits("up is missing: the result is silu(gate) alone.", up_missing=(ACTIVATED, "gate * torch.sigmoid(gate)")),
    *edits("The residual was added before the end. It is added last, to silu(gate) · up.",
        residual_too_early=(WITH_RESIDUAL, "mine = load(residual, places, inside, 0.0).float()\n"
        "result = (gate * torch.sigmoid(gate) + mine) * up"),
        residual_too_early__to_the_gate=(WITH_RESIDUAL, "gate = gate + load(residual, places, inside, 0.0).float()\n"
        f"result = {ACTIVATED}"),
        residual_too_early__to_up=(WITH_RESIDUAL, "up = up + load(residual, places, inside, 0.0).float()\n"
        f"result = {ACTIVATED}"),
        residual_too_early__to_both=(WITH_RESIDUAL, "mine = load(residual, places, inside, 0.0).float()\n"
        "gate, up = gate + mine, up + mine\n" f"result = {ACTIVATED}")),
    *edits("The residual was not added as it is, or not once. Add it unchanged, at the end.",
        residual_wrong=(WITH_RESIDUAL, "pass"),
        residual_wrong__times=(WITH_RESIDUAL, WITH_RESIDUAL.replace("+ load", "* load")),
        residual_wrong__minus=(WITH_RESIDUAL, WITH_RESIDUAL.replace("+ load", "- load")),
        residual_wrong__twice=(WITH_RESIDUAL, f"{WITH_RESIDUAL}\n{WITH_RESIDUAL}"),
        residual_wrong__without_bias=("if residual is not None", "if residual is not None and bias is not None"),
        residual_wrong__instead_of_bias=("if residual is not None", "if residual is not None and bias is None")),
    *edits("The residual is read with another distance between its rows. Row r begins r · residual.stride(0) elements "
        "after the first.",
        residual_stride=(RESIDUAL_ROWS, "columns"), residual_stride__0=(RESIDUAL_ROWS, "0"),
        residual_stride__of_x=(RESIDUAL_ROWS, "x.stride(0)"), residual_stride__inner=(RESIDUAL_ROWS, "x.shape[1]"),
        residual_stride__of_weight=(RESIDUAL_ROWS, "weight.stride(0)")),
    *edits("A bias is missing. The gate has the first half of them and up the second.",
        bias_missing=("if bias is not None", "if False"), bias_missing__of_up=(ADDED_BIAS[1], "up = up + 0 * load"),
        bias_missing__of_the_gate=(ADDED_BIAS[0], "gate = gate + 0 * load"),
        bias_missing__with_a_residual=("if bias is not None", "if bias is not None and residual is None"),
        bias_missing__without=("if bias is not None", "if bias is not None and residual is not None")),
    *edits("The biases are taken by row. They belong to the columns: element c to gate column c, element hidden + c "
        "to up's.",
        bias_by_row=(f"{GATE_BIAS}.float()[..., None, :]",
        "load(bias, row, row < bias.shape[0], 0.0).float()[..., None]",
        f"{UP_BIAS}.float()[..., None, :]", "load(bias, row + columns, row + columns < bias.shape[0], 0.0).float()"
        "[..., None]")),
    *edits("The bias was added in every block of inner. It belongs to the finished sums: add it once, after the loop.",
        bias_in_every_block=("gate + load", "gate + -(-x.shape[1] // block_k) * load",
        "up + load", "up + -(-x.shape[1] // block_k) * load")),
    *edits("A bias was added after the activation. Add it to the sums, before the activation.",
        bias_too_late=("gate = gate + load", "late = load", ACTIVATED, "gate * torch.sigmoid(gate) * up + "
        "(0 if bias is None else late)"),
        bias_too_late__of_up=("up = up + load", "late = load", ACTIVATED, "gate * torch.sigmoid(gate) * up + "
        "(0 if bias is None else late)"),
        bias_too_late__to_the_activated=("gate = gate + load", "late = load", ACTIVATED,
        "(gate * torch.sigmoid(gate) + (0 if bias is None else late)) * up")),
    *edits("The bias was added again, to the result. It belongs only to the sums.",
        bias_again__of_up=(ACTIVATED, f"{ACTIVATED} + (0 if bias is None else {UP_BIAS}.float()[..., None, :])"),
        bias_again=(ACTIVATED, f"{ACTIVATED} + (0 if bias is None else {GATE_BIAS}.float()[..., None, :])")),
    *edits("A sum was rounded to 16 bits before the end. Everything stays float32 until the result is stored.",
        rounded_too_early=(ACTIVATED, ACTIVATED.replace("gate", "gate.to(x.dtype).float()").replace(
        "up", "up.to(x.dtype).float()")),
        rounded_too_early__gate=(ACTIVATED, ACTIVATED.replace("gate", "gate.to(x.dtype).float()")),
        rounded_too_early__up=(ACTIVATED, ACTIVATED.replace("up", "up.to(x.dtype).float()")),
        rounded_too_early__activated=(ACTIVATED, "(gate * torch.sigmoid(gate)).to(x.dtype).float() * up"),
        rounded_too_early__before_the_residual=(ACTIVATED, f"({ACTIVATED}).to(x.dtype).float()"),
        rounded_too_early__before_the_bias=(GATE, f"{GATE}.to(x.dtype).float()", UP, f"{UP}.to(x.dtype).float()")),
    *edits("Every result was rounded to 16 bits, also those in float32. Cast to the result's own dtype.",
        stored_in_16_bits=("result.to(x.dtype), inside", "result.half().to(x.dtype), inside")),
    *edits("The result was stored with the residual's distance between its rows. It is new and contiguous: row r "
        "begins at r · hidden.",
        stored_with_another_stride__of_the_residual=("row[..., None] * columns",
        "row[..., None] * (0 if residual is None else residual.stride(0))")),
    *steps.TILES, *steps.ROW_STRIDES, *steps.LOOP,
)  # fmt: skip
