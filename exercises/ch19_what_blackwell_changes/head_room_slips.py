"""What goes wrong with the head room of a format of 8 bits, for exercise 19.4: edits of its two meanings."""

from course_lib.checker import edits
from exercises.topics import attention_sentences as told

FINFO, LOG = "torch.finfo(getattr(torch, dtype)).max", "math.log2(largest) - shift"
LIMIT, GROWN = "min(threshold, room_of(dtype, shift))", "largest > reference + limit"
FROM, CODES, START = "part - renewed[:, None] + shift", "weights.to(form).to(value.dtype)", "scores[:, :block].amax(1)"
RESCALE, BLOCKS = "torch.exp2(reference - renewed)", "range(0, scores.shape[1], block)"
SUM, OUT, END = "total * rescale + weights.sum(1)", "out * rescale[:, None] + codes @ values", "out / total[:, None]"
CUT = (CODES, f"weights.clamp(max=torch.finfo(form).max){CODES[7:]}")  # as a cast that saturates does it
ONE_CONSTANT = (
    "The largest number is that of another format. It is 448 for float8_e4m3fn and 57,344 for float8_e5m2: "
    "torch.finfo(dtype).max."
)
ONE_SHIFT = "The shift was taken to be 8, or at most 8. It may be any whole number from 0 to 15."


def perhaps_cut(name, *pieces):
    """Two ways of a slip that makes weights too large: infinite or NaN, or cut off at the format's largest number."""
    return {name: pieces, f"{name}__cut" if "__" not in name else f"{name}_cut": (*pieces, *CUT)}


OF_ROOM = (
    *edits(ONE_CONSTANT, **{f"one_constant__{one}": (FINFO, f"{one}.0") for one in (448, 57344, 240, 256)},
        one_constant__of_float16=(FINFO, f"(65504.0 if dtype == 'float8_e5m2' else {FINFO})")),
    *edits("The head room is log2(largest) - shift: a logarithm in base 2, of the largest number alone.",
        other_logarithm=(LOG, "math.log(largest) - shift"), other_logarithm__none=(LOG, "largest / 2**shift"),
        other_logarithm__of_a_difference=(LOG, "math.log2(largest - shift)")),
    *edits(ONE_SHIFT, one_shift=(LOG, f"{LOG[:-5]}8"), one_shift__at_most=(LOG, f"{LOG[:-5]}min(shift, 8)")),
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
    *edits(ONE_CONSTANT, one_constant=(FINFO, "448.0"), **perhaps_cut("one_constant__5", FINFO, "57344.0"),
        one_constant__cut=(CODES, f"weights.clamp(max=448.0){CODES[7:]}")),
    *edits(ONE_SHIFT, one_shift=(LIMIT, LIMIT.replace("shift", "8"))),
    *edits("Only the head room decides. The threshold may be smaller.", threshold_ignored=(LIMIT, LIMIT[15:-1])),
    *edits("A row is rescaled wherever a block's maximum is larger, and not only if it is by more than the limit.",
        always_rescaled=(LIMIT, "0.0")),
    *edits("A row is rescaled where a block's maximum exceeds the reference by just the limit: > and not >=.",
        at_the_limit=(GROWN, "largest >= reference + limit")),
    *edits(told.TAIL_SCORED, padded_with_scores=(
        SUM, f"{SUM} + (block - part.shape[1]) * torch.exp2(-1e4 - renewed + shift)")),
    *edits(told.COMPARED_WITH_ALL_BEFORE,
        **perhaps_cut("compared_with_the_true_maximum", GROWN, "largest > true_maximum + limit")),
    *edits(told.PER_TILE, weights_of_a_block=(CODES, f"(weights / weights.sum(1, keepdim=True)){CODES[7:]}",
        SUM, "total * rescale + 1.0")),
    *edits(told.WEIGHTS_OF_ANOTHER_MAXIMUM,
        weights_of_the_new_maximum=(FROM, "part - torch.maximum(reference, largest)[:, None] + shift"),
        weights_of_the_new_maximum__own=(FROM, "part - largest[:, None] + shift")),
    *edits("The weights are measured from the reference before this block. Where it is renewed, use the new one.",
        **perhaps_cut("weights_of_the_old_reference", FROM, "part - reference[:, None] + shift")),
    *edits("The shift is in the weights that are multiplied and not in those that are summed up, or the reverse. Both "
        "have it, so that it cancels in the quotient.",
        shift_on_one_side=(SUM, f"{SUM} / 2.0**shift"),
        shift_on_one_side__end=(END, f"{END} / 2.0**shift"), shift_on_one_side__times=(END, f"{END} * 2.0**shift")),
    *edits("The weights lack the shift, so that more of them become 0.", shift_missing=(FROM, FROM[:-8])),
    *edits("The exponential is natural. The scores are in base 2: take torch.exp2.",
        **perhaps_cut("natural_exponential", "torch.exp2(", "torch.exp(")),
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
    *edits("The reference is that of the whole row, not of the first block.", whole_row=(START, "scores.amax(1)")),
    *edits("The reference starts at 0. It starts as the maximum of the first block.",
        **perhaps_cut("starts_at_zero", START, "torch.zeros_like(scores[:, 0])")),
    *edits("All rows are rescaled if one of them must be. Here each row decides by itself.",
        rows_together=(GROWN, f"({GROWN}).any()"),
        rows_together__larger=(GROWN, f"({GROWN}).any() & (largest > reference)")),
    *edits("The reference falls: it becomes the block's maximum even where that is smaller. It grows, or stays.",
        reference_falls=(GROWN, "(largest < math.inf)")),
    *edits("The last block is missing where the keys are no multiple of block.",
        last_block_missing=(BLOCKS, "range(0, max(1, scores.shape[1] // block) * block, block)")),
    *edits("Row sum, output or result have 16 bits on the way. They are float32.",
        **{f"kept_in_16_bits__{name}_{short}": (piece, f"({piece}).{short}().to(value.dtype)")
           for short in ("half", "bfloat16") for name, piece in (("out", OUT), ("sum", SUM), ("end", END))}),
)  # fmt: skip
