"""What goes wrong with the head room of a format of 8 bits, for exercise 19.4: edits of its two meanings."""

from course_lib.checker import edits

FINFO, LOG = "torch.finfo(getattr(torch, dtype)).max", "math.log2(largest) - shift"
LIMIT, GROWN, KEPT = "min(threshold, room_of(dtype, shift))", "largest > reference + limit", "reference = renewed"
FROM, CODES, START = "part - renewed[:, None] + shift", "weights.to(form).to(value.dtype)", "scores[:, :block].amax(1)"
RESCALE, BLOCKS = "torch.exp2(reference - renewed)", "range(0, scores.shape[1], block)"
SUM, OUT, END = "total * rescale + weights.sum(1)", "out * rescale[:, None] + codes @ values", "out / total[:, None]"
SUM_LATE, OUT_LATE = (SUM, "(total + weights.sum(1)) * rescale"), (OUT, "(out + codes @ values) * rescale[:, None]")
CUT = (CODES, f"weights.clamp(max=torch.finfo(form).max){CODES[7:]}")  # as a cast that saturates does it
ONE_CONSTANT = (
    "The largest number is that of one format for both. It is 448 for float8_e4m3fn and 57,344 for float8_e5m2: "
    "torch.finfo(dtype).max."
)
CONSTANTS = ("448.0", "57344.0", "240.0", "256.0")


def perhaps_cut(name, *pieces):
    """Two ways of a slip that makes weights too large: infinite or NaN, or cut off at the format's largest number."""
    return {name: pieces, f"{name}__cut" if "__" not in name else f"{name}_cut": (*pieces, *CUT)}


OF_ROOM = (
    *edits(ONE_CONSTANT, **{f"one_constant__{one[:-2]}": (FINFO, one) for one in CONSTANTS}),
    *edits("The logarithm is natural. Weights are powers of 2, so the head room is log2 of the largest number, minus "
        "the shift.",
        natural_logarithm=(LOG, "math.log(largest) - shift"),
        natural_logarithm__both=(LOG, "math.log(largest) - shift * math.log(2)")),
    *edits("The shift was not subtracted. A weight is 2^(score - reference + shift), so the shift takes its part of "
        "the room: log2(largest) - shift.",
        shift_not_subtracted=(LOG, LOG[:-8]), shift_not_subtracted__added=(LOG, f"{LOG[:-8]} + shift")),
    *edits("The head room was rounded. Return it as it is: 0.807… for e4m3 and a shift of 8.",
        room_rounded=(LOG, f"math.floor({LOG})"), room_rounded__nearest=(LOG, f"round({LOG})"),
        **{f"room_rounded__{places}": (LOG, f"round({LOG}, {places})") for places in (1, 2, 3, 4)}),
)  # fmt: skip
OF_ATTENTION = (
    *edits("The threshold is not limited by the head room. Where a score exceeds the reference by more than that, its "
        "weight is larger than the format's largest number and is cut off, while the row sum counts all of it. Take "
        "min(threshold, head_room(dtype, shift)).",
        **perhaps_cut("threshold_not_limited", LIMIT, "threshold"),
        **perhaps_cut("threshold_not_limited__larger", LIMIT, "max(threshold, room_of(dtype, shift))"),
        threshold_not_limited__all_cut=(LIMIT, "threshold", f"torch.exp2({FROM})",
        f"torch.exp2({FROM}).clamp(max=torch.finfo(form).max)")),
    *edits(ONE_CONSTANT, one_constant=(FINFO, "448.0"), **perhaps_cut("one_constant__5", FINFO, "57344.0")),
    *edits("Only the head room decides. The threshold may be smaller.", threshold_ignored=(LIMIT, LIMIT[15:-1])),
    *edits("A row is rescaled wherever a block's maximum is larger, and not only if it is by more than the limit.",
        always_rescaled=(LIMIT, "0.0")),
    *edits("A row is rescaled where a block's maximum exceeds the reference by just the limit: > and not >=.",
        at_the_limit=(GROWN, "largest >= reference + limit")),
    *edits("The weights are measured from the block's maximum even where the reference was kept. Row sum and output "
        "belong to the kept one: decide first, then compute the weights from what was decided.",
        weights_of_the_new_maximum=(FROM, "part - torch.maximum(reference, largest)[:, None] + shift"),
        weights_of_the_new_maximum__own=(FROM, "part - largest[:, None] + shift")),
    *edits("The weights are measured from the reference before this block. Where it is renewed, use the new one.",
        **perhaps_cut("weights_of_the_old_reference", FROM, "part - reference[:, None] + shift")),
    *edits("The shift is in the weights that are multiplied and not in those that are summed up, or the reverse. Both "
        "have it, so that it cancels in the quotient.",
        shift_on_one_side=(SUM, f"{SUM} / 2.0**shift"),
        shift_on_one_side__product=(CODES, f"(weights / 2.0**shift){CODES[7:]}"),
        shift_on_one_side__end=(END, f"{END} / 2.0**shift"), shift_on_one_side__times=(END, f"{END} * 2.0**shift")),
    *edits("The weights lack the shift, so that more of them become 0.", shift_missing=(FROM, FROM[:-8])),
    *edits("The exponential is natural. The scores are in base 2: take torch.exp2.",
        **perhaps_cut("natural_exponential", "torch.exp2(", "torch.exp("),
        natural_exponential__weights=(f"torch.exp2({FROM})", f"torch.exp({FROM})"),
        natural_exponential__rescale=(RESCALE, "torch.exp(reference - renewed)")),
    *edits("The row sum adds the weights after they were rounded. It adds them as they were before, in float32.",
        rounded_before_the_sum=(SUM, "total * rescale + codes.sum(1)")),
    *edits("The weights were not rounded to dtype before the product, or to another format.",
        not_rounded=(CODES, "weights"),
        **{f"not_rounded__{form}": (CODES, f"weights.to(torch.{form}).to(value.dtype)")
           for form in ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")}),
    *edits("Nothing is rescaled where the reference grows. Multiply row sum and output by 2^(old - new).",
        nothing_rescaled=(RESCALE, "torch.ones_like(reference)")),
    *edits("The row sum is rescaled and the output is not.", out_not_rescaled=(OUT, "out + codes @ values")),
    *edits("The output is rescaled and the row sum is not.", sum_not_rescaled=(SUM, "total + weights.sum(1)")),
    *edits("The factor of the rescale is upside down. It is 2^(old - new), at most 1.",
        rescale_turned_round=(RESCALE, "torch.exp2(renewed - reference)")),
    *edits("The new weights were rescaled as well. They are measured from the new reference: rescale first, then add.",
        rescaled_after_adding=(*SUM_LATE, *OUT_LATE), rescaled_after_adding__out=OUT_LATE),
    *edits("The reference is that of the whole row, not of the first block.", whole_row=(START, "scores.amax(1)")),
    *edits("The reference starts at 0. It starts as the maximum of the first block.",
        **perhaps_cut("starts_at_zero", START, "torch.zeros_like(scores[:, 0])")),
    *edits("All rows are rescaled if one of them must be. Here each row decides by itself.",
        rows_together=(GROWN, f"({GROWN}).any()"),
        rows_together__larger=(GROWN, f"({GROWN}).any() & (largest > reference)")),
    *edits("The reference falls: it becomes the block's maximum even where that is smaller. It grows, or stays.",
        reference_falls=(GROWN, "(largest < math.inf)")),
    *edits("The new reference is not kept for the next block.", **perhaps_cut("reference_not_kept", KEPT, "pass")),
    *edits("The output is not divided by the row sum.", not_divided=(END, "out")),
    *edits("The last block is missing where the keys are no multiple of block.",
        last_block_missing=(BLOCKS, "range(0, max(1, scores.shape[1] // block) * block, block)")),
    *edits("The last block comes first. The order is ascending.", last_first=(BLOCKS, f"reversed({BLOCKS})")),
    *edits("Row sum, output or result have 16 bits on the way. They are float32.",
        **{f"kept_in_16_bits__{name}_{short}": (piece, f"({piece}).{short}().to(value.dtype)")
           for short in ("half", "bfloat16") for name, piece in (("out", OUT), ("sum", SUM), ("end", END))}),
)  # fmt: skip
