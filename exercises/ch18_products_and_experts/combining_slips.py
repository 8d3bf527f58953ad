"""What goes wrong in a token's weighted sum, for exercise 18.6: edits of the meaning of `combine`."""

from course_lib.checker import edits

WEIGHTED, ADDED, ROWS = "rows[places].to(wide) * weight", "out.index_add(0, token, weighted)", "rows[places].to(wide)"
WEIGHT = "weights.flatten()[of_place, None]"
IN_SUM = (
    *edits("Rows at sentinel places were multiplied by 0 and added. They may hold NaN, and 0 · NaN is NaN: leave them "
        "out "
        "(torchtitan#1237).", sentinel_rows_added=(ADDED, "out.index_add(0, token, weighted) + 0 * "
        "rows.to(wide)[~taken].sum(0)"),
        sentinel_rows_added__last=(ADDED, "out.index_add(0, token, weighted)\nout[-1] = out[-1] + 0 * "
        "rows.to(wide)[~taken].sum(0)"),
        sentinel_rows_added__first=(ADDED, "out.index_add(0, token, weighted)\nout[0] = out[0] + 0 * "
        "rows.to(wide)[~taken].sum(0)")),
    *edits("Rows at sentinel places count for a token: the last one. tokens · k is no slot.",
        sentinel_rows_counted=("token, weighted)", "token, weighted).index_add(0, torch.full((int((~taken).sum()),), "
        "tokens - 1), "
        "rows.to(wide)[~taken] * weights[-1, -1])")),
    *edits("The weight was taken by token. It belongs to the choice: weights[t, c] (Triton-distributed#133).",
        weight_by_token=(WEIGHT, "weights[token, 0, None]"),
        weight_by_token__flat=(WEIGHT, "weights.flatten()[token, None]"),
        weight_by_token__last=(WEIGHT, "weights[token, -1, None]"),
        weight_by_token__mean=(WEIGHT, "weights.mean(1)[token, None]"),
        weight_by_token__sum=(WEIGHT, "weights.sum(1)[token, None]")),
    *edits("The weight was taken by place. It belongs to the slot at that place.",
        weight_by_place=(WEIGHT, "weights.flatten()[places % weights.numel(), None]"),
        weight_by_place__served=(WEIGHT, "weights.flatten()[torch.arange(len(places)) % weights.numel(), None]")),
    *edits("The weights were read choice by choice. Slot t · k + c has weights[t, c].",
        weights_transposed=(WEIGHT, "weights.T.flatten()[of_place, None]")),
    *edits("The weight is that of another choice. Slot t · k + c has weights[t, c].",
        weight_of_another_choice=(WEIGHT, "weights[token, of_place // tokens % k, None]"),
        weight_of_another_choice__reversed=(WEIGHT, "weights.flip(1).flatten()[of_place, None]")),
    *edits("The weights are missing.", weights_missing=(WEIGHTED, ROWS)),
    *edits("The weights were applied twice (rtp-llm#884).", weights_twice=(WEIGHTED, WEIGHTED + " * weight")),
    *edits("A token's rows replace each other. Add them, as index_add_ does.",
        replaced=(ADDED, "out.index_copy(0, token, weighted)"),
        replaced__by_choice=(ADDED, "out.index_copy(0, token[(order := of_place.argsort())], weighted[order])")),
    *edits("The sum was divided by k, or by the weights' sum. It is a plain sum.",
        averaged=(ADDED, ADDED + " / k"), averaged__of_served=(ADDED,
        ADDED + " / torch.zeros(tokens, 1, dtype=wide).index_add(0, token, weight.to(wide))"),
        averaged__weights=(ADDED, ADDED + " / weights.sum(1, keepdim=True)"),
        averaged__served=(ADDED, ADDED + " / torch.bincount(token, minlength=tokens).clamp(min=1)[:, None]"),
        averaged__softmax=("weights.flatten()", "weights.softmax(-1).flatten()")),
    *edits("A slot's token is slot // k. You took another number.",
        token_of_the_slot=("of_place // k", "of_place % tokens"),
        token_of_the_slot__tokens=("of_place // k", "of_place // tokens % tokens"),
        token_of_the_slot__k=("of_place // k", "of_place % k % tokens"),
        token_of_the_slot__place=("of_place // k", "places // k % tokens")),
    *edits("The rows were taken in the order of their slots, but they lie at their places.",
        rows_by_slot=(ROWS, "rows[of_place % len(rows)].to(wide)")),
    *edits("A choice without a place added row 0, or the last row. It adds nothing.",
        missing_adds_a_row=(ADDED, ADDED + " + missing_rows(rows, slots, weights, 0)"),
        missing_adds_a_row__last=(ADDED, ADDED + " + missing_rows(rows, slots, weights, -1)")),
    *edits("The sentinel was taken for tokens, but it is tokens · k: the number of all slots.",
        sentinel_is_tokens=("slots < tokens * k", "slots < tokens")),
    *edits("Slot 0 was left out.", slot_0_missing=("slots < tokens * k", "(slots < tokens * k) & (slots > 0)")),
    *edits("The last slot was left out.", last_slot_missing=("slots < tokens * k", "slots < tokens * k - 1")),
    *edits("Where float16 overflows, a number was cut off. Leave the numbers as they are.",
        cut_off=("out.to(rows.dtype)", "out.nan_to_num().to(rows.dtype)")),
)  # fmt: skip
