"""What goes wrong in exercise 17.4, where a learned sink joins the merge of splits, and in its gradient."""

import math

import torch

from course_lib.checker.specification.edits import edits
from exercises.topics.decode_merge import DIVISION, EMPTY_AS_0, LSE, MERGE, OUTPUT, PARTS, READ, WEIGHED, first_of

INF = math.inf


def keys_alone(outputs, lses):
    """Output and log-sum-exp of all splits without the sink."""
    return (torch.softmax(lses, 0).nan_to_num(0.0)[..., None] * outputs).sum(0), torch.logsumexp(lses, 0)


def as_they_come(lses, start):
    """Weights of the splits, each from the maximum of those up to it and of what the loop starts with."""
    running = torch.maximum(lses.cummax(0).values, start)
    return torch.exp(lses - running.masked_fill(running == -INF, 0.0))


USED = (first_of, keys_alone, as_they_come)
ITS_EXP = "torch.exp(sinks) * torch.exp(-reference)"
SUM, OF_KEYS, LARGEST = "weights.sum(0) + sink", "weights.sum(0)", "torch.maximum(lses.amax(0), sinks)"
SINK, KEYS_LARGEST = "torch.exp(sinks - reference)", (LARGEST, "lses.amax(0)")
KEYS_ALONE = f"torch.where({OF_KEYS} == 0, 1.0, {OF_KEYS})"
LSE_OF_KEYS = f"torch.where(lses.amax(0) == -INF, -INF, reference + torch.log({KEYS_ALONE}))"
SAME_BASE = "Log-sum-exps and sinks are in natural units: the sink's weight is exp(sink - reference)."
KEYS, KEYS_LSE = "keys_alone(outputs, lses)[0]", "keys_alone(outputs, lses)[1]"
CLEANED = "torch.where((lses > -INF)[..., None], outputs, 0.0)"
NO_START, FIRST = "torch.full_like(sinks, -INF)", "lses[0].masked_fill(lses[0] == -INF, 0.0)"
JOINED = f"torch.log(torch.exp({KEYS_LSE}) + torch.exp(sinks))"
BY_TOTAL = (LSE, "torch.where(total == 0, -INF, reference + torch.log(total))")
IN_MERGE = ("averaged_without_weights", "added_without_weights", "not_divided", "divided_by_the_splits", "no_maximum",
    "maximum_starts", "weighed_by_the_logarithm", "empty_splits_weigh", "last_split_left_out", "first_split_alone",
    "lse_without_the_largest", "lse_largest", "lse_in_base_2", "mixed_bases", "empty_sequence", "reference_bounded",
)  # fmt: skip
NOT_HERE = ("missing_ones_too", "__first_split", "__in_the_sum", "present_in_the_sum")
IN_SINK = (
    *edits("What an empty split holds reached the output: 0 · NaN is NaN. Where a log-sum-exp is -inf, replace the "
        "output by zeros before the product.", rubbish_counts=(CLEANED, "outputs + 0.0"),
        rubbish_counts__nan_alone=(CLEANED, "torch.where(outputs.isnan(), 0.0, outputs)"),
        rubbish_counts__where_keys_are=(CLEANED, "outputs + 0.0", OUTPUT,
        f"torch.where((total == 0)[..., None], 0.0, {OUTPUT})")),
    *edits("The sink is missing from both results. Add exp(sink - reference) to the sum of the weights.",
        sink_missing=(SUM, OF_KEYS, *KEYS_LARGEST), sink_missing__but_in_the_maximum=(SUM, OF_KEYS),
        sink_missing__but_in_the_maximum_unguarded=(SUM, OF_KEYS, *BY_TOTAL)),
    *edits("The sink is in the log-sum-exp but not in the output. Both are divided by a sum that holds its weight.",
        sink_in_the_lse_alone=(OUTPUT, OUTPUT.replace("divisor", KEYS_ALONE)),
        sink_in_the_lse_alone__apart=(OUTPUT, KEYS)),
    *edits("The keys' average was multiplied by the sink's share. Theirs is exp(their log-sum-exp - the whole's).",
        sink_takes_the_keys_share=(OUTPUT, f"{KEYS} * torch.sigmoid(sinks - {KEYS_LSE})[..., None]")),
    *edits("The sink is in the output but not in the log-sum-exp. Both need the same sum, which holds its weight.",
        sink_in_the_output_alone=(LSE, LSE_OF_KEYS), sink_in_the_output_alone__apart=(LSE, "torch.logsumexp(lses, 0)")),
    *edits("The sink counts once for every split. There is one for all keys: add its weight once, after the sum.",
        sink_in_every_split=(SUM, f"{OF_KEYS} + splits * sink"),
        sink_in_every_split__with_keys=(SUM, f"{OF_KEYS} + (lses > -INF).sum(0) * sink"),
        sink_in_every_split__and_once=(SUM, f"{OF_KEYS} + (splits + 1) * sink")),
    *edits("The sink is lost where a row saw no key. The log-sum-exp of such a row is the sink.",
        sink_lost_without_keys=(LSE, f"torch.where(lses.amax(0) == -INF, -INF, {LSE})")),
    *edits("The maximum that is subtracted leaves out the sink. Where that lies far above, exp overflows: include it.",
        measured_from_the_keys_alone=KEYS_LARGEST, measured_from_the_keys_alone__guarded=(*KEYS_LARGEST, *BY_TOTAL)),
    *edits("The sink is subtracted where the maximum should be. Where a log-sum-exp lies far above it, exp overflows.",
        measured_from_the_sink=(LARGEST, "sinks.expand_as(lses[0])"), measured_from_the_sink__guarded=(LARGEST,
        "sinks.expand_as(lses[0])", LSE, "torch.where(total == 0, -INF, reference + torch.log(divisor))")),
    *edits("exp was taken of the sink itself: inf at 10⁴, 0 at -10⁴. Subtract the largest of log-sum-exps and sink.",
        exp_of_the_sink=(SINK, ITS_EXP), exp_of_the_sink__from_the_keys=(SINK, ITS_EXP, *KEYS_LARGEST, *BY_TOTAL),
        exp_of_the_sink__from_0=(SINK, ITS_EXP, LARGEST, "lses.amax(0).clamp(min=0.0)", *BY_TOTAL),
        exp_of_the_sink__and_of_the_keys=(OUTPUT, f"{KEYS} * (torch.exp({KEYS_LSE}) / (torch.exp({KEYS_LSE}) + "
        "torch.exp(sinks)))[..., None]"),
        exp_of_the_sink__joined=(LSE, JOINED, OUTPUT,
        f"{KEYS} * torch.exp({KEYS_LSE} - {JOINED}.masked_fill({JOINED} == -INF, 0.0))[..., None]")),
    *edits("The sink was added at the first split, and is lost where that split saw no key. Add it in the merge.",
        sink_lost_with_a_split=(*KEYS_LARGEST, SINK, f"torch.exp(sinks - {FIRST}) * (torch.exp(lses[0] - reference) if "
        "splits > 1 else 1.0)", LSE, "torch.where(total == 0, -INF, largest + torch.log(total))")),
    *edits("One maximum was taken for several rows or heads. Far below it all weights are 0: take one for each.",
        one_maximum=(LARGEST, "torch.maximum(lses.amax(), sinks.amax()).expand_as(lses[0])", *BY_TOTAL),
        one_maximum__of_a_row=(LARGEST, f"{LARGEST}.amax(-1, keepdim=True).expand_as(lses[0])", *BY_TOTAL)),
    *edits("The weights' sum is not rescaled when the maximum grows. Multiply it by exp(old maximum - new maximum).",
        sum_not_rescaled=(SUM, "as_they_come(lses, sinks).sum(0) + (sinks > -INF)"),
        sum_not_rescaled__keys_alone=(SUM, f"as_they_come(lses, {NO_START}).sum(0) + sink")),
    *edits("The outputs' sum is not rescaled when the maximum grows. Multiply it by exp(old maximum - new maximum).",
        output_not_rescaled=(WEIGHED, "(as_they_come(lses, sinks)[..., None] * outputs).sum(0)"),
        output_not_rescaled__keys_alone=(WEIGHED, f"(as_they_come(lses, {NO_START})[..., None] * outputs).sum(0)")),
    *edits("A row without a sink whose first split saw no key gives NaN: -inf - (-inf) is NaN. Subtract 0 as long as "
        "the maximum is -inf.", first_split_empty_nan=(READ, f"{READ}\nlost = (lses[0] == -INF) & (sinks == -INF)",
        OUTPUT, f"torch.where(lost[..., None], math.nan, {OUTPUT})", LSE, f"torch.where(lost, math.nan, {LSE})")),
    *edits(f"The sink's weight was computed in another base. {SAME_BASE}",
        sink_in_base_2=(SINK, "torch.exp2(sinks - reference)"),
        **{f"sink_in_base_2__{name}": (READ, f"{READ}\nsinks = sinks {by}") for name, by in (
           ("multiplied", "/ LN_2"), ("divided", "* LN_2"), ("inverse", "* LN_2 ** 2"))},
        sink_in_base_2__in_the_sum=(SINK, "torch.exp(sinks * LN_2 - reference)"),
        sink_in_base_2__in_the_sum_by_total=(SINK, "torch.exp(sinks * LN_2 - reference)", *BY_TOTAL),
        sink_in_base_2__exp=(SINK, "torch.exp((sinks - reference) / LN_2)"), sink_in_base_2__in_the_maximum=(LARGEST,
        LARGEST.replace("sinks", "sinks * LN_2"), SINK, "torch.exp(sinks - reference / LN_2)")),
    *edits("Powers of 2 were taken of the splits' log-sum-exps, which are natural. Multiply them by log2(e), as the "
        "sink, or take exp.", splits_in_base_2=(READ, f"{READ}\nlses = lses * LN_2")),
    *edits("The merged log-sum-exp adds the natural logarithm of a sum to a maximum in base 2. Both must be natural.",
        mixed_bases__maximum=(LSE, "largest / LN_2 + torch.log(divisor)")),
    *edits("All weights are powers of 2. " + SAME_BASE, weighed_in_base_2=("torch.exp(", "torch.exp2("),
        weighed_in_base_2__merged=("torch.exp(", "torch.exp2(", "torch.log(", "torch.log2(")),
    *edits("The sink was divided by √head_dim, as a score is. It is a logit already, so it is not scaled.",
        sink_scaled=(READ, f"{READ}\nsinks = sinks * outputs.shape[-1] ** -0.5")),
    *edits("The sink itself was added to the sum of the weights. Its weight is exp(sink - reference).",
        sink_without_exp=(SINK, "torch.where(sinks == -INF, 0.0, sinks)")),
    *edits("The sink was given a value. It has none: its weight belongs in the denominator alone.", **{
        f"sink_has_a_value{of}": (OUTPUT, f"({WEIGHED} + sink[..., None]{value}){DIVISION}")
        for of, value in (("", ""), ("__of_the_keys", " * outputs[0]"))}),
    *(row for row in MERGE if row.id.startswith(IN_MERGE) and not any(word in row.id for word in NOT_HERE)),
    *edits("Splits without keys count: their log-sum-exp of -inf was replaced by 0, which gives them a weight of "
        "exp(0).", empty_splits_weigh__cleaned=("largest = ", f"{EMPTY_AS_0}\nlargest = ")),
    *edits("If there are several splits, the last one is never merged. There are splits 0 to splits - 1.",
        last_split_left_out__but_one=(PARTS, "first_of(outputs, lses, max(splits - 1, 1))")),
)  # fmt: skip

SHARE, GUARD, TOTAL = "torch.exp(sinks - lse)", "torch.where(sinks == -INF, 0.0, ", "-(share * delta).sum(0)"
DELTA = "delta_of(output, output_gradient)"
IN_GRADIENT = (
    *edits("The sign is missing. A larger sink takes weight from every key, so the output changes by -share · O. The "
        "gradient is -Σ share · rowsum(O ∘ dO).", sign_missing=(TOTAL, TOTAL[1:])),
    *edits("The rows have wrong weights. Each counts by the sink's share, exp(sink - lse), not by 1 or by the keys' "
        "share.", not_by_the_share=(SHARE, "torch.ones_like(lse)"), not_by_the_share__keys=(SHARE, f"1 - {SHARE}"),
        not_by_the_share__without_a_sink_too=(GUARD, "(", SHARE, "torch.ones_like(lse)")),
    *edits("The sink counts twice in its share: `lse` includes it already, so the share is exp(sink - lse) and no "
        "sigmoid.", sink_counted_twice=(SHARE, "torch.sigmoid(sinks - lse)"),
        sink_counted_twice__logaddexp=(SHARE, "torch.exp(sinks - torch.logaddexp(lse, sinks.expand_as(lse)))")),
    *edits("There is a factor 1 - share too many, as in a softmax's own derivative. O changes by -share · O.",
        derivative_of_the_share=(SHARE, f"{SHARE} * (1 - {SHARE})")),
    *edits("The share is a power of 2. Sinks and lse are natural.", share_in_base_2=("torch.exp(", "torch.exp2(")),
    *edits("exp was taken of the sink, or of the log-sum-exp, by itself. At ±10⁴ that is inf or 0. Subtract first: "
        "exp(sink - lse).", exp_of_each=(SHARE, "torch.exp(sinks) / torch.exp(lse)")),
    *edits("exp was taken of each, and the sink counts twice: `lse` includes it. The share is exp(sink - lse).",
        sink_counted_twice__exp_of_each=(SHARE, "torch.exp(sinks) / (torch.exp(sinks) + torch.exp(lse))")),
    *edits("The share is exp(sink - lse), not exp(lse - sink).", share_turned_round=(SHARE, "torch.exp(lse - sinks)")),
    *edits("The gradient of a head without a sink is NaN: in a row that saw no key, -inf - (-inf) is NaN. Without a "
        "sink the share is 0.", no_sink_nan=(GUARD, "(")),
    *edits("An average was taken. The gradient is a sum over all rows and over head_dim.",
        averaged=(TOTAL, "-(share * delta).mean(0)"), averaged__columns=(DELTA, f"{DELTA} / output.shape[-1]")),
    *edits("The product O ∘ dO is missing or incomplete. Multiply O and dO element by element, then sum over head_dim.",
        product_missing=(DELTA, "output_gradient.float().sum(-1)"),
        product_missing__gradient=(DELTA, "output.float().sum(-1)"),
        product_missing__of_sums=(DELTA, "output.float().sum(-1) * output_gradient.float().sum(-1)")),
    *edits("All heads were added up together. Each head's sink has its own gradient: sum over rows and head_dim.",
        heads_summed=(TOTAL, "-(share * delta).sum().expand(sinks.shape)")),
    *edits("Shares and products were summed over the rows and then multiplied. Multiply them in each row first.",
        rows_summed_too_early=(TOTAL, "-share.sum(0) * delta.sum(0)")),
    *edits("The products were added up in 16 bits. Convert O and dO to float32 before you multiply.",
        summed_in_16_bits=(DELTA, "(output * output_gradient).sum(-1).float()"),
        summed_in_16_bits__products=(DELTA, "(output * output_gradient).float().sum(-1)")),
)  # fmt: skip
