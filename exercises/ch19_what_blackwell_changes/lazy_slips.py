"""What goes wrong where attention is rescaled lazily, for exercise 19.3: edits of its meaning."""

from course_lib.checker import edits
from exercises.topics import attention_sentences as told

GROWN, MUST = "(largest - old > threshold)", "grown.any(-1, keepdim=True)"
LARGER, RESCALE, FROM = "torch.maximum(old, largest)", "torch.exp2(old - renewed)", "scores - renewed[..., None]"
RENEWED, SUM = f"torch.where(must, {LARGER}, old)", "total * rescale + weights.sum(-1)"
PRODUCT, COUNT = "weights.to(value.dtype).float() @ value_tile.float()", "count + must[:, 0]"
OUT, LSE = f"out * rescale[..., None] + {PRODUCT}", "(reference + torch.log2(total)) * math.log(2)"
MASKED, WEIGHTS = "torch.where(place < keys, products * scale, -INF)", f"torch.exp2({FROM})"
QUERIES = "load(query, row[..., None] * dim + column, present[..., None], 0.0)"
AROUND = "load(query, (row % rows)[..., None] * dim + column, (row >= 0)[..., None], 0.0)"
SCALE, HALF = "LOG2_E / math.sqrt(dim)", ".to(query.dtype).float()"
EXP = ("torch.exp2(", "torch.exp(", "LOG2_E", "math.log2(math.e)")  # the scale too: natural throughout is right
LN_LSE = (LSE, "reference + torch.log(total)")
CHANGES = (
    *edits(told.LOG2E_MISSING, log2e_missing=(SCALE, "1 / math.sqrt(dim)"),
        log2e_missing__but_in_the_lse=(SCALE, "1 / math.sqrt(dim)", *LN_LSE)),
    *edits("The scores hold log2(e) already, and the exponential is the natural one. Take tl.exp2 throughout.",
        natural_exp=EXP, natural_exp__log=(*EXP, *LN_LSE), natural_exp__rescale=(RESCALE, "torch.exp(old - renewed)")),
    *edits(told.NOT_DIVIDED, not_divided=("(out / total[..., None])", "out")),
    *edits("Nothing is ever rescaled.", never_rescaled=(MUST, "(present & False)[:, :1]")),
    *edits(told.TAIL_SCORED,
        tail_keys_scored=(MASKED, "products * scale"), tail_keys_scored__low=(MASKED, MASKED.replace("-INF", "-1e4"))),
    *edits(told.TAIL_IN_THE_MAXIMUM,
        masked_after_the_maximum=(MASKED, "products * scale", WEIGHTS, f"torch.where(place < keys, {WEIGHTS}, 0.0)")),
    *edits("The reference starts at 0. The first block is a case of its own: its maximum is the first reference.",
        starts_at_zero=("largest if start == 0 else reference", "reference")),
    *edits("The first block counts as a rescale. It sets the reference, and there is nothing to multiply yet.",
        first_block_counted=(COUNT, f"{COUNT} + (start == 0)")),
    *edits("A tile is rescaled wherever a maximum grows.", threshold_ignored=(GROWN, "(largest > old)")),
    *edits("Blocks are counted in which nothing is rescaled.",
        every_block_counted=(COUNT, "count + 1"), every_block_counted__later=(COUNT, "count + (start > 0)")),
    *edits("Not at just the threshold: > and not >=.", at_the_threshold=(GROWN, "(largest - old >= threshold)"),
        at_the_threshold__later=(GROWN, "((largest - old >= threshold) & (start > 0))")),
    *edits("The reference grows at every block, and what was kept is multiplied only where that exceeds the threshold. "
        "Where nothing is multiplied the reference has to stay, also for the weights.",
        grows_without_rescale=(RENEWED, LARGER, RESCALE, f"torch.where(must, {RESCALE}, 1.0)")),
    *edits(told.WEIGHTS_OF_ANOTHER_MAXIMUM,
        weights_of_the_new_maximum=(FROM, f"scores - {LARGER}[..., None]"),
        weights_of_the_new_maximum__own=(FROM, "scores - largest[..., None]")),
    *edits("The weights are made from the old reference.", old_reference_in_weights=(FROM, "scores - old[..., None]")),
    *edits("Each row decides by itself. If any row of the tile exceeds the threshold, all of its rows are rescaled.",
        each_row_by_itself=(RENEWED, "torch.where(grown, largest, old)"),
        each_row_by_itself__counted=(RENEWED, "torch.where(grown, largest, old)", COUNT, "count + grown.sum(-1)")),
    *edits("The rows were counted. Count tiles that are rescaled.", rows_counted=(COUNT, "count + grown.sum(-1)")),
    *edits("The threshold was cut to a whole number.", whole_threshold=(GROWN, "(largest - old > int(threshold))")),
    *edits("The tile's largest maximum is compared with its largest reference. Compare each row's with its own.",
        compared_over_the_tile=(MUST, "(largest.amax(-1) - old.amax(-1) > threshold)[:, None]")),
    *edits("Rows behind the last one cause a rescale: other rows stand there, or numbers that are not 0. Rows that "
        "exist count alone: `& (row < rows)`.",
        absent_rows_count=(QUERIES, AROUND, f"{GROWN} & present", GROWN),
        absent_rows_count__ones=(QUERIES, QUERIES.replace("0.0", "1.0"), f"{GROWN} & present", GROWN)),
    *edits("Where the tile is rescaled, the reference of some row falls: it becomes the block's maximum, which may be "
        "smaller. Take the larger of the two.", reference_falls=(RENEWED, "torch.where(must, largest, old)")),
    *edits("The excess is compared with the threshold in other units. Both are in base 2: compare products that are "
        "multiplied by log2(e)/√dim.",
        threshold_in_other_units=(GROWN, "((largest - old) / LOG2_E > threshold)"),
        threshold_in_other_units__larger=(GROWN, "((largest - old) * LOG2_E > threshold)"),
        threshold_in_other_units__raw=(GROWN, "((largest - old) / scale > threshold)")),
    *edits(told.COMPARED_WITH_ALL_BEFORE,
        compared_with_the_true_maximum=(GROWN, "(largest - (old if start == 0 else true_maximum) > threshold)")),
    *edits(told.NOTHING_RESCALED, nothing_rescaled=(RESCALE, "torch.ones_like(old)")),
    *edits("The sum is rescaled and the output is not.", out_not_rescaled=(OUT, f"out + {PRODUCT}")),
    *edits("The output is rescaled and the sum is not.", sum_not_rescaled=(SUM, "total + weights.sum(-1)")),
    *edits("The log-sum-exp was made from the true maximum, and the sum belongs to the reference.",
        lse_of_the_true_maximum=(LSE, "(true_maximum + torch.log2(total)) * math.log(2)")),
    *edits("The log-sum-exp is in base 2. Multiply by ln 2.", lse_in_base_2=(LSE, "reference + torch.log2(total)")),
    *edits("The log-sum-exp mixes bases. Of a reference in base 2 it is (reference + log2(sum)) · ln 2.",
        lse_mixes_bases=LN_LSE, lse_mixes_bases__2=(LSE, "reference * math.log(2) + torch.log2(total)"),
        lse_mixes_bases__both=(LSE, "(reference + torch.log(total)) * math.log(2)"),
        lse_mixes_bases__natural=(LSE, "(reference * math.log(2) + torch.log2(total)) * math.log(2)")),
    *edits(told.HALF_ACCUMULATOR, accumulator_in_float16=(OUT, f"({OUT}){HALF}")),
)  # fmt: skip
