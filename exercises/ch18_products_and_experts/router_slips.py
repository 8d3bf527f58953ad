"""What goes wrong in a router and in the rule that balances it, for exercise 18.5: edits of their meanings."""

from course_lib.checker import edits
from exercises.ch18_products_and_experts.product_steps import ways

NUMBERS = "logits.to(torch.promote_types(logits.dtype, torch.float32))"
PROBABILITIES, SORTED = "numbers.softmax(-1)", "choosing.sort(dim=-1, descending=True, stable=True).indices"
SHARES, SUMS, GUARD = "weights / weights.sum(-1, keepdim=True)", "scores + bias", "torch.where(total > 0, total, 1.0)"
IF, FOUND, RETURNED = 'if kind == "renormalised"', "order[:, :k]", "return experts, weights"
TAKEN, DIVIDED, SIGMOID = "scores.gather(-1, experts)", "scale * weights / divisor", "numbers.sigmoid()"
BIASED, TOTAL = "(choosing if kind == 'sigmoid' else scores).gather(-1, experts)", "total = weights.sum(-1"
OWN, TIES = ".to(logits.dtype).float()", "Of equal numbers the expert with the smaller number comes first."
IN_ROUTE = (
    *edits("The weights are what chooses: raw logits, or sigmoids with the bias. Take the softmax, or the sigmoids "
        "alone (sglang#35160, vLLM-metax#284).", weights_of_the_choice=(TAKEN, "choosing.gather(-1, experts)")),
    *edits("Some weights are raw logits. Take the softmax over all experts (sglang#35160).",
        raw_logits=(PROBABILITIES, "numbers"),
        raw_logits__softmax=(TAKEN, 'numbers.gather(-1, experts) if kind == "softmax" else ' + TAKEN),
        raw_logits__renormalised=(TAKEN, 'numbers.gather(-1, experts) if kind == "renormalised" else ' + TAKEN)),
    *edits("For \"softmax\" the weights add up to 1. Keep the shares of the softmax over all experts, not of the "
        "chosen alone (mlxcel#391, lmdeploy#3030).", softmax_of_the_chosen=(IF, 'if kind != "sigmoid"')),
    *edits("For \"renormalised\" the weights do not add up to 1. Divide them by the sum of the token's k weights.",
        not_renormalised=(SHARES, "weights"), not_renormalised__k_1=(IF, IF + " and k > 1")),
    *edits("The weights were divided by a sum over all experts or tokens, not over the token's k.",
        sum_over_all=(TOTAL, "total = scores.sum(-1"),
        sum_over_all__tokens=(f"{TOTAL}, keepdim=True)", "total = weights.sum()")),
    *edits("For \"sigmoid\" the weights are not divided by their sum.", **ways("sigmoid_not_normalised", DIVIDED,
        "scale * weights", "scale * (weights / divisor if k > 1 else weights)")),
    *edits("The scale is missing, or cancels: multiply by it after the division by the sum.",
        **ways("scale_missing", DIVIDED, "weights / divisor", "(scale > 0) * weights / divisor")),
    *edits("The scale was replaced by 1 where there is no bias, or where it is 0. Always multiply by it.", alone=True,
        scale_of_1=(DIVIDED, "(1.0 if bias is None else scale) * weights / divisor"),
        scale_of_1__for_0=(DIVIDED, "(scale or 1.0) * weights / divisor")),
    *edits("For \"sigmoid\" the weights come from a softmax. Divide the chosen sigmoids by their sum.",
        softmax_of_sigmoids=(DIVIDED, "scale * weights.softmax(-1)")),
    *edits("Scale the weights, not the choice.", alone=True, scale_in_the_scores=(SUMS, "scores + scale * bias")),
    *edits("What chooses was rounded to 16 bits: biases, sums or logits. Keep it in float32.", alone=True,
        sums_rounded=(SUMS, "scores + bias.half()"), sums_rounded__own=(SUMS, "scores + bias.to(logits.dtype)"),
        sums_rounded__choosing=(SORTED, SORTED.replace("choosing", "choosing.half()"))),
    *edits("The bias is also in the weights. They come from the sigmoids alone (vLLM-metax#284).",
        bias_in_the_weights=(TAKEN, BIASED),
        bias_in_the_weights__0=(TAKEN, BIASED, DIVIDED, "torch.where(total > 0, scale * weights / divisor, 0.0)"),
        bias_in_the_weights__not_0=(TAKEN, BIASED, GUARD, "torch.where(total == 0, 1.0, total)")),
    *edits("The sum that divides the weights has the bias in it. It is the sum of the sigmoids without the bias.",
        bias_in_the_sum=(TOTAL, "total = choosing.gather(-1, experts).sum(-1")),
    *edits("The bias plays no part in the choice. Add it to the sigmoids.", bias_ignored=(SUMS, "scores + 0 * bias")),
    *edits("The bias was subtracted. Add it.", bias_subtracted=(SUMS, "scores - bias")),
    *edits("The bias was added to the logits. Add it to their sigmoids.",
        bias_on_the_logits=(SUMS, "(numbers + bias).sigmoid()"), bias_on_the_logits__raw=(SUMS, "numbers + bias")),
    *edits("A sum of sigmoid and bias may be negative. Such sums were cut off, or lie below the mark of what is "
        "chosen, which is chosen again. Mark it with -inf (vllm#31478).", **ways("negative_sums", SUMS,
        "(scores + bias).clamp(min=0)", "torch.where(scores + bias > -1, scores + bias, -torch.inf)"),
        **{f"negative_sums__{where}{mark}": (SORTED, f"chosen_again(choosing, k, -{mark}){condition}") for where,
        condition in (("marked_", ""), ("sigmoid_", f" if kind == 'sigmoid' else {SORTED}")) for mark in "01"}),
    *edits("An expert was chosen twice: what marks a chosen one must be smaller than any logit. Use -inf.",
        **{f"chosen_twice__{mark}": (SORTED, f"chosen_again(choosing, k, -{mark})") for mark in ("1e4", "1e3")}),
    *edits("The -inf that marks a chosen expert was written into the scores, and became a weight. Search in a copy.",
        marked_in_place=(TAKEN, "(scores - torch.inf if choosing is scores else scores).gather(-1, experts)")),
    *edits(f"{TIES} topk takes equal numbers in any order; a stable sort keeps theirs.", **ways("ties_by_topk", SORTED,
        "choosing.topk(k, dim=-1).indices", "choosing.topk(k, dim=-1, sorted=False).indices")),
    *edits(f"{TIES} You have the larger one first.",
        larger_number_first=(SORTED, "choosing.sort(dim=-1, stable=True).indices.flip(-1)")),
    *edits("The smallest were chosen. Take the largest.", smallest_chosen=(SORTED, SORTED.replace("True", "False", 1))),
    *edits("A token's experts stand in another order. The one with the largest number that chooses comes first.",
        order_of_numbers=(FOUND, f"{FOUND}.sort(-1).values")),
    *edits("Experts and weights do not belong together: one of the two was put in another order.",
        weights_in_another_order=(TAKEN, "scores.sort(-1, descending=True).values[:, :k]")),
    *edits("Experts were ordered by probabilities that had been rounded: tiny ones are all 0 in float32, though their "
        "logits differ. Choose by the logits.", chosen_by_rounded=("choosing = numbers", "choosing = scores")),
    *edits("Experts were ordered by their logits. For \"sigmoid\" the sigmoids in float32 choose, and those of large "
        "logits are equal.", chosen_by_logits=("choosing = scores if", "choosing = numbers if")),
    *edits("For \"sigmoid\" there is no softmax: sigmoid(logit).", softmax_for_sigmoid=(SIGMOID, PROBABILITIES)),
    *edits("The softmax runs over tokens, not experts.", softmax_over_tokens=(PROBABILITIES, "numbers.softmax(0)")),
    *edits("Large logits were cut off. Take them as they are.", alone=True,
        **{f"logits_cut__{most}": (NUMBERS, f"{NUMBERS}.clamp(-{most}, {most})") for most in (20, 50, 80, 100, 1000)}),
    *edits("The exponentials overflow or are all 0. Subtract the token's largest logit first, or use softmax.",
        softmax_overflows=(PROBABILITIES, "numbers.exp() / numbers.exp().sum(-1, keepdim=True)"),
        softmax_overflows__global=(PROBABILITIES, "(e := (numbers - numbers.max()).exp()) / e.sum(-1, keepdim=True)")),
    *edits("exp(x) / (1 + exp(x)) is inf / inf for large x. Use torch.sigmoid, or 1 / (1 + exp(-x)).",
        sigmoid_overflows=(SIGMOID, "numbers.exp() / (1 + numbers.exp())")),
    *edits("Where the sum of the k sigmoids is 0, 0 / 0 made NaN. The weights are 0 there.", sum_of_0=(GUARD, "total")),
    *edits("Where one of a token's k sigmoids is 0, all its weights are 0. They are 0 only where the sum is.",
        one_sigmoid_of_0=(DIVIDED, "scale * (weights > 0).all(-1, keepdim=True) * weights / divisor")),
    *edits("Where the sum of a token's k sigmoids is 0, the weights are not 0.",
        shared_where_0=(DIVIDED, "torch.where(total > 0, scale * weights / divisor, scale / k)")),
    *edits("A small number was added to the sum of the sigmoids, or is the least that it may be. But sigmoid(-60) is "
        "e⁻⁶⁰. Divide by the sum itself, and treat only 0 in another way.",
        **{f"sum_with_a_floor__{small}": (GUARD, f"total + {small}") for small in ("1e-20", "1e-9", "1e-6")},
        **{f"sum_with_a_floor__at_{small}": (GUARD, f"total.clamp(min={small})") for small in ("1e-20", "1e-9")}),
    *edits("Something was rounded to 16 bits before the end. Turn the logits into float32 first, and keep to that.",
        rounded_early=(TAKEN, TAKEN + ".bfloat16().float()"), rounded_early__scores=(TAKEN, TAKEN + OWN),
        rounded_early__softmax=(PROBABILITIES, PROBABILITIES + OWN), rounded_early__sigmoid=(SIGMOID, SIGMOID + OWN),
        rounded_early__logits=("logits.to(", "logits.half().to("),
        **{f"rounded_early__all_{name}": (NUMBERS, numbers, RETURNED, "return experts, weights.float()")
           for name, numbers in (("own", "logits"), ("half", "logits.half()"))}),
)  # fmt: skip

DIFFERENCE, MOVED, SIGN = "load.mean() - load", "moved - moved.mean()", "difference.sign()"
IN_BALANCE = (
    *edits("The sign is the wrong way round: an expert with more tokens than the mean got a larger bias, and will get "
        "still more.", sign_turned=("bias + rate", "bias - rate")),
    *edits("The step grows with the difference from the mean. Only its sign counts.",
        not_the_sign=(SIGN, "difference"), not_the_sign__share=(SIGN, "(difference / load.mean())")),
    *edits("The mean of the new biases is not subtracted, or not in every case.", not_recentred=(MOVED, "moved + 0"),
        **{f"not_recentred__{name}": (MOVED, f"moved - moved.mean() * ({condition})") for name, condition in (
           ("equal", "bool(difference.any())"), ("rate_0", "rate > 0"), ("one", "len(load) > 1"))}),
    *edits("Something else than the mean of the new biases was subtracted. Take their mean after the step.",
        **{f"recentred_wrongly__{name}": (MOVED, f"moved - {value}") for name, value in (
           ("before", "bias.mean()"), ("step", "(moved - bias).mean()"), ("size", "moved.abs().mean()"))}),
    *edits("The loads were not compared with their mean.",
        **{f"not_the_mean__{name}": (DIFFERENCE, f"{value} - load") for name,
        value in ( ("median", "load.median()"), ("1", "1"), ("not_empty", "load[load > 0].mean()"))}),
    *edits("The mean of the loads was rounded to a whole number. It may lie between two loads.",
        **{f"mean_rounded__{way}": (DIFFERENCE, f"load.mean().{way}() - load") for way in ("floor", "round")}),
    *edits("An expert with the mean load was moved. It keeps its bias, less the mean.", **ways("equal_moved", SIGN,
        "torch.where(difference > 0, 1.0, -1.0)", "torch.where(difference >= 0, 1.0, -1.0)")),
    *edits("The loads were rounded to float32, which holds whole numbers up to 2²⁴ alone. Compare exact numbers, or "
        "float64.", **ways("loads_rounded", "load.double()", "load.float()", "load.float() / load.sum()")),
    *edits("The loads went through int32, which ends at 2³¹ - 1.", loads_wrap=("load.double()", "load.int().double()")),
    *edits("The old bias is lost. The step is added to it.", bias_replaced=("bias + rate", "rate")),
)  # fmt: skip
