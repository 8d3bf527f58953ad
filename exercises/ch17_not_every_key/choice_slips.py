"""What goes wrong in exercise 17.6: in an indexer's scores, and in a choice of the k largest by a radix histogram."""

from course_lib.checker.specification.edits import edits

K_TH = "ordered.sort(-1, descending=True).values.gather(-1, last)"
SEEN, TURNED, FIRST = "place < seen", "bits, -2 ** 31 - bits", "equal.cumsum(-1) <= places_left"
TAKEN, TARGET = f"larger | (equal & ({FIRST}))", "taken.cumsum(-1) - 1"
LOADED, PRODUCT = "visible[row].long()", "weights[:, :, None] * products.relu()"
TIES = "Of equal scores at the border the lower position is chosen first."
IN_SCORES = (
    *edits("ReLU is missing. Without it negative products cancel the positive ones of other heads (hf#44398).",
        relu_missing=("products.relu()", "products")),
    *edits("ReLU was applied to the sum over heads. Apply it to each head's product.",
        relu_of_the_sum=(f"({PRODUCT}).sum(1)", f"({PRODUCT.replace('.relu()', '')}).sum(1).relu()")),
    *edits("ReLU was applied to the weighted product, which a negative weight turns round. Apply ReLU before the "
        "weight.", relu_of_the_weighted=(PRODUCT, f"({PRODUCT.replace('.relu()', '')}).relu()")),
    *edits("A negative product was made positive. ReLU makes it 0.", absolute=("products.relu()", "products.abs()")),
    *edits("The weights are missing.", weights_missing=(PRODUCT, "products.relu()")),
    *edits("The weights went through a softmax. They are used as they are.",
        weights_normalised=("weights[:, :, None]", "weights.softmax(-1)[:, :, None]")),
    *edits("The scores are divided by the number of heads. Add the heads up.",
        mean_over_heads=("weights[:, :, None]", "weights[:, :, None] / weights.shape[1]")),
    *edits("The products are divided by √dim, as attention's are. There is no scale here.",
        scaled=("products.relu()", "(products / query.shape[-1] ** 0.5).relu()")),
)  # fmt: skip
IN_CHOICE = (
    *edits("Negative scores are in the wrong order: their bits, as integers, fall as the score grows. Use -2³¹ - bits.",
        negative_reversed=(TURNED, "bits, bits")),
    *edits("Negative scores were ranked above positive ones by their sign bit. Compare -2³¹ - bits as signed integers.",
        negative_on_top=(TURNED, "bits, bits + 2**32"), negative_on_top__turned=(TURNED, "bits, 2**32 - 1 - bits"),
        negative_on_top__but_0=(TURNED, "bits, (-2 ** 31 - bits) % 2**32")),
    *edits("Scores were compared without their sign.", by_magnitude=(TURNED, "bits, bits + 2**31")),
    *edits("-0 was ranked below +0. They are equal: -2³¹ - bits gives 0.", zeros_differ=(TURNED, f"{TURNED} - 1")),
    *edits("Scores that differ only in their last bits were taken for equal. All 32 bits decide: four passes of 8.",
        bits_missing=(f"{TURNED})", f"{TURNED}) >> 8"), bits_missing__half=(f"{TURNED})", f"{TURNED}) >> 16"),
        bits_missing__one=(f"{TURNED})", f"{TURNED}) >> 1"),
        bits_missing__float16=("x.contiguous()", "x.half().float()")),
    *edits("An infinite score was taken for the largest finite one.",
        infinity_cut=("x.contiguous()", "x.clamp(-LARGEST, LARGEST)")),
    *edits("Scores below 2⁻¹²⁶ were taken for 0. Their bits as integers tell them apart.",
        tiny_taken_for_0=("x.contiguous()", "torch.where(x.abs() < 2**-126, 0.0, x)")),
    *edits("The first digit lost its sign: ordered >> 24 runs from -128 to 127. Add 128 to count it, and subtract it "
        "again.", sign_of_the_first_digit=(K_TH,
        "torch.where(inside, ordered % 2**32, -1).sort(-1, descending=True).values.gather(-1, last).int().long()",
        "larger.sum(", "(inside & (ordered % 2**32 > k_th % 2**32)).sum(")),
    *edits("Scores equal to the k-th took the places of larger ones further on. They get only the places that are "
        "left.", equal_before_larger=(TAKEN, "larger | equal")),
    *edits(f"Scores equal to the k-th were left out. {TIES} The k-th itself is one of them.",
        border_left_out=(TAKEN, "larger"), border_left_out__but_one=(FIRST, "equal.cumsum(-1) < places_left")),
    *edits("The smallest scores were chosen instead of the largest.", smallest=(f"{TURNED})", f"{TURNED}).mul(-1)")),
    *edits("Keys that the row does not see were chosen. Row t sees its first visible[t] keys.",
        hidden_chosen=(LOADED, "torch.full_like(row, length)"),
        hidden_chosen__one=(LOADED, f"({LOADED} + 1).clamp(max=length)"),
        hidden_chosen__of_none=(LOADED, f"{LOADED}.clamp(min=1)")),
    *edits("The last visible key, visible[t] - 1, is never chosen.", last_visible_missing=(LOADED, f"{LOADED} - 1")),
    *edits("Row 0's number of keys was taken for all rows.", visible_of_row_0=(LOADED, "visible[0 * row].long()")),
    *edits("Visible keys with a score of -inf were taken for hidden. Only `visible` says what is hidden.",
        infinity_hidden=(SEEN, "(place < seen) & (x != -math.inf)")),
    *edits("The positions come in the order of the scores. They belong in ascending order.", in_order_of_scores=(TARGET,
        "torch.where(taken, ordered, -(2**41)).argsort(dim=-1, descending=True, stable=True).argsort(-1)")),
    *edits("The places after the chosen keys are not -1.", missing_not_marked=("k + length), -1)", "k + length), 0)"),
        missing_not_marked__length=("k + length), -1)", "k + length), length)")),
    *edits("The -1 stand before the chosen keys. They should follow them.",
        missing_first=("result[:, :k].int()", "result[:, :k].int().sort(-1).values")),
    *edits("Rows are read as if they followed each other without a gap. Row r begins at element r · scores.stride(0).",
        row_stride_ignored=("scores.stride(0)", "length")),
)  # fmt: skip
