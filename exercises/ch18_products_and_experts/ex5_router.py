"""Exercise 18.5: a router's choice and weights, and the rule that balances its experts."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from exercises.ch18_products_and_experts.balancing import BALANCES, IN_BALANCE, balance_of, to_balance
from exercises.ch18_products_and_experts.router_inputs import KINDS, ROUTES, to_route


def route_of(logits, k, kind, bias=None, scale=1.0):
    numbers = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if kind == "sigmoid":
        scores = numbers.sigmoid()
        choosing = scores if bias is None else scores + bias
    else:
        scores = numbers.softmax(-1)
        choosing = numbers
    order = choosing.sort(dim=-1, descending=True, stable=True).indices
    experts = order[:, :k]
    weights = scores.gather(-1, experts)
    if kind == "renormalised":
        weights = weights / weights.sum(-1, keepdim=True)
    if kind == "sigmoid":
        total = weights.sum(-1, keepdim=True)
        divisor = torch.where(total > 0, total, 1.0)
        weights = scale * weights / divisor
    return experts, weights


def by_log_sum_exp(logits, k, kind, bias=None, scale=1.0):
    """The same with shares as exponentials of the distance from the log-sum-exp, which large logits make coarse."""
    experts, weights = route_of(logits, k, kind, bias, scale)
    numbers = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if kind == "softmax":
        weights = (numbers.gather(-1, experts) - numbers.logsumexp(-1, keepdim=True)).exp()
    return experts, weights


def chosen_again(choosing, k, mark):
    """Expert after expert; one that is chosen gets the score `mark` and may be chosen again."""
    left, found = choosing.clone(), []
    for _ in range(k):
        found.append(left.sort(dim=-1, descending=True, stable=True).indices[:, :1])
        left.scatter_(1, found[-1], mark)
    return torch.cat(found, dim=1)


def router_cases(draw):
    def case(name, **choices):
        return Case(name, to_route(draw, **choices), "route")

    def given(name, logits, *rest):
        return Case(name, (torch.tensor(logits), *rest), "route")

    def balance(name, experts, loads, mean=0.0, rate=0.01):
        return Case(name, to_balance(draw, experts=experts, loads=loads, mean=mean, rate=rate), "balanced")

    worked = [[2.0, 1.0, 0.0, -1.0]]
    biased = torch.tensor([0.0, 0.0, 0.3, 0.0])
    return [
        *(given(f"{kind}: logits 2, 1, 0, -1, k = 2", worked, 2, kind) for kind in KINDS[:2]),
        given("sigmoid: logits 2, 1, 0, -1, no bias", worked, 2, "sigmoid", None, 1.0),
        given("sigmoid: logits 2, 1, 0, -1, expert 2 has a bias", worked, 2, "sigmoid", biased, 1.0),
        given("sigmoid: the same with a scale of 2.5", worked, 2, "sigmoid", biased, 2.5),
        *(case(f"{kind}: 7 tokens, 8 experts, k = 3", tokens=7, experts=8, k=3, kind=kind, bias="any", scale=2.5)
          for kind in KINDS),
        *(given(f"{kind}: equal logits, the smaller number first", [[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]], 4, kind)
          for kind in KINDS[:2]),
        given("sigmoid: equal sums, the smaller number first", [[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]], 4, "sigmoid",
              torch.full((6,), -0.5), 1.0),
        given("softmax: logits 0, -200, -300", [[-300.0, -250.0, 0.0, -200.0]], 3, "softmax"),
        given("softmax: two logits of -10,000", [[-10000.0, -10000.0, 10000.0, -9000.0]], 4, "softmax"),
        given("sigmoid: three sigmoids are 1", [[8000.0, 10000.0, 9000.0, -1.0]], 3, "sigmoid", None, 1.0),
        given("sigmoid: all sigmoids are 0", [[-10000.0, -2000.0, -9000.0]], 2, "sigmoid", biased[1:], 2.5),
        given("sigmoid: all sums are below -1", [[0.5, -0.5, 1.0, 0.0]], 3, "sigmoid",
              torch.tensor([-2.5, -2.0, -3.0, -2.25]), 1.0),
        case("64 experts, 60 equal logits each", tokens=20, experts=64, k=8, kind="softmax", values="equal logits"),
        case("sigmoid: 64 experts, equal logits", tokens=20, experts=64, k=8, kind="sigmoid", values="equal logits",
             bias="any", scale=2.5),
        case("sigmoid: 1 token, float16 logits", tokens=1, experts=128, k=8, kind="sigmoid", bias="any",
             dtype=torch.float16),
        Case("balance: loads 10, 4, 4, 2", (biased, torch.tensor([10, 4, 4, 2]), 0.1), "balanced"),
        balance("balance: 8 experts", 8, "any"),
        balance("balance: some loads equal the mean", 9, "some equal the mean"),
        balance("balance: one full expert", 8, "one full expert"),
        balance("balance: biases with a mean of 3", 8, "any", mean=3.0),
        balance("balance: loads near 2⁴⁰", 7, "large"),
        balance("balance: a mean just below most loads", 12, "a mean between two loads"),
    ]  # fmt: skip


PROBABILITIES, SORTED = "numbers.softmax(-1)", "choosing.sort(dim=-1, descending=True, stable=True).indices"
SHARES, SUMS, GUARD = "weights / weights.sum(-1, keepdim=True)", "scores + bias", "torch.where(total > 0, total, 1.0)"
RENORMALISED = 'if kind == "renormalised"'
TAKEN, DIVIDED = "scores.gather(-1, experts)", "scale * weights / divisor"
TIES = "Of equal numbers the expert with the smaller number comes first."
EARLY = "Something was rounded to 16 bits before the end. Turn the logits into float32 first, and keep to that."
IN_ROUTE = (
    *edits("For \"softmax\" the weights are raw logits. They are the chosen experts' shares in the softmax over all "
        "experts (sglang#35160).",
        raw_logits=(PROBABILITIES, "numbers"),
        raw_logits__not_renormalised=(TAKEN, 'numbers.gather(-1, experts) if kind == "softmax" else ' + TAKEN)),
    *edits("For \"softmax\" the weights add up to 1: they were divided by their sum, or the softmax saw the chosen "
        "logits alone. Keep the shares of the softmax over all experts (mlxcel#391, lmdeploy#3030).",
        softmax_of_the_chosen=(RENORMALISED, 'if kind != "sigmoid"')),
    *edits("For \"renormalised\" the weights do not add up to 1. Divide them by the sum of the token's k weights.",
        not_renormalised=(SHARES, "weights")),
    *edits("The weights were divided by the sum over all experts. Divide by the sum over the k chosen ones.",
        sum_over_all=("total = weights.sum(-1", "total = scores.sum(-1")),
    *edits("For \"sigmoid\" the weights are not divided by their sum.",
        sigmoid_not_normalised=(DIVIDED, "scale * weights")),
    *edits("The scale is missing, or cancels: multiply by it after the division by the sum.",
        scale_missing=(DIVIDED, "weights / divisor"),
        scale_missing__cancels=(DIVIDED, "(scale > 0) * weights / divisor")),
    *edits("The weights were divided by the scale, or multiplied by it twice.",
        scale_wrong=(DIVIDED, "weights / divisor / scale"),
        scale_wrong__twice=(DIVIDED, "scale * scale * weights / divisor")),
    *edits("The bias is also in the weights. It only chooses; the weights come from the sigmoids without it "
        "(vLLM-metax#284).",
        bias_in_the_weights=(TAKEN, "(choosing if kind == 'sigmoid' else scores).gather(-1, experts)")),
    *edits("The sum that divides the weights has the bias in it. It is the sum of the sigmoids without the bias.",
        bias_in_the_sum=("total = weights.sum(-1", "total = choosing.gather(-1, experts).sum(-1")),
    *edits("The bias plays no part in the choice. The largest sums of sigmoid and bias are chosen.",
        bias_ignored=(SUMS, "scores + 0 * bias")),
    *edits("The bias was subtracted. Add it.", bias_subtracted=(SUMS, "scores - bias")),
    *edits("The bias was added to the logits. Add it to their sigmoids.",
        bias_on_the_logits=(SUMS, "(numbers + bias).sigmoid()"), bias_on_the_logits__raw=(SUMS, "numbers + bias"),
        bias_on_the_logits__in_weights=("scores = numbers.sigmoid()",
        "scores = numbers.sigmoid() if bias is None else (numbers + bias).sigmoid()", SUMS, "scores + 0")),
    *edits("The bias was multiplied with the sigmoids. Add it.", bias_multiplied=(SUMS, "scores * bias"),
        bias_multiplied__plus_1=(SUMS, "scores * (1 + bias)")),
    *edits("A sum of sigmoid and bias may be negative. Such sums were cut off, or an expert that was chosen got a "
        "score that a negative sum does not reach, so it was chosen again. Mark what is chosen with -inf (vllm#31478).",
        negative_sums=(SUMS, "(scores + bias).clamp(min=0)"),
        negative_sums__chosen_again=(SORTED, "chosen_again(choosing, k, 0.0)"),
        negative_sums__minus_one=(SORTED, "chosen_again(choosing, k, -1.0)"),
        negative_sums__sigmoid=(SORTED, "chosen_again(choosing, k, -1.0) if kind == 'sigmoid' else " + SORTED),
        negative_sums__sigmoid_0=(SORTED, "chosen_again(choosing, k, 0.0) if kind == 'sigmoid' else " + SORTED),
        negative_sums__size=(SUMS, "(scores + bias).abs()")),
    *edits("An expert was chosen twice: what marks a chosen one must be smaller than any logit. Use -inf.",
        chosen_twice=(SORTED, "chosen_again(choosing, k, -1e4)"),
        chosen_twice__1e3=(SORTED, "chosen_again(choosing, k, -1e3)"),
        chosen_twice__100=(SORTED, "chosen_again(choosing, k, -100.0)")),
    *edits(f"{TIES} You have the larger one first.",
        larger_number_first=(SORTED, "choosing.shape[1] - 1 - choosing.flip(-1).sort(dim=-1, descending=True, "
        "stable=True).indices"),
        larger_number_first__flipped=(SORTED, "choosing.sort(dim=-1, stable=True).indices.flip(-1)")),
    *edits("The smallest were chosen. Sort with the largest first.",
        smallest_chosen=(SORTED, SORTED.replace("True, stable", "False, stable"))),
    *edits("A token's experts stand in another order. The one with the largest number that chooses comes first.",
        order_of_numbers=("order[:, :k]", "order[:, :k].sort(-1).values"),
        order_of_numbers__reversed=("order[:, :k]", "order[:, :k].flip(-1)")),
    *edits("Experts and weights do not belong together: one of the two was put in another order.",
        weights_in_another_order=(TAKEN, "scores.gather(-1, experts.sort(-1).values)"),
        weights_in_another_order__sorted=(TAKEN, "scores.gather(-1, experts).sort(-1, descending=True).values"),
        weights_in_another_order__of_scores=(TAKEN, "scores.sort(-1, descending=True).values[:, :k]")),
    *edits("Experts were ordered by probabilities that had been rounded: tiny ones are all 0 in float32, though their "
        "logits differ. Choose by the logits.", chosen_by_rounded=("choosing = numbers", "choosing = scores")),
    *edits("Experts were ordered by their logits. For \"sigmoid\" the sigmoids in float32 choose, and those of large "
        "logits are equal.", chosen_by_logits=("choosing = scores if", "choosing = numbers if")),
    *edits("For \"sigmoid\" the scores come from a softmax. Each expert is scored by itself: sigmoid(logit).",
        softmax_for_sigmoid=("numbers.sigmoid()", PROBABILITIES)),
    *edits("For \"softmax\" and \"renormalised\" the scores come from a sigmoid.",
        sigmoid_for_softmax=(PROBABILITIES, "numbers.sigmoid()")),
    *edits("The softmax runs over the tokens. Each token has its own, over the experts: dim=-1.",
        softmax_over_tokens=("numbers.softmax(-1)", "numbers.softmax(0)")),
    *edits("The exponentials overflow or are all 0. Subtract the token's largest logit first, or use softmax.",
        softmax_overflows=(PROBABILITIES, "numbers.exp() / numbers.exp().sum(-1, keepdim=True)")),
    *edits("exp(x) / (1 + exp(x)) is inf / inf for large x. Use torch.sigmoid, or 1 / (1 + exp(-x)).",
        sigmoid_overflows=("numbers.sigmoid()", "numbers.exp() / (1 + numbers.exp())")),
    *edits("Where the sum of a token's k sigmoids is 0, 0 / 0 made NaN. The weights are 0 there.",
        sum_of_0=(GUARD, "total")),
    *edits("Where the sum of a token's k sigmoids is 0, the weights are not 0.",
        shared_where_0=(DIVIDED, "torch.where(total > 0, scale * weights / divisor, scale / k)"),
        shared_where_0__one=(DIVIDED, "torch.where(total > 0, scale * weights / divisor, 1 / k)")),
    *edits("A small number was added to the sum, or is the least that it may be. Sigmoids may be smaller than that, as "
        "e⁻⁶⁰ is. Divide by the sum itself, and take care of a sum of 0 alone.",
        **{f"sum_with_a_floor__{small}": (GUARD, f"total + {small}") for small in ("1e-20", "1e-9", "1e-6")},
        **{f"sum_with_a_floor__at_{small}": (GUARD, f"total.clamp(min={small})") for small in ("1e-20", "1e-12",
        "1e-9", "1e-6")}),
    *edits(EARLY, rounded_early=("numbers.softmax(-1)", "numbers.softmax(-1).bfloat16().float()"),
        rounded_early__float16=("numbers.softmax(-1)", "numbers.softmax(-1).half().float()"),
        rounded_early__sigmoid=("numbers.sigmoid()", "numbers.sigmoid().bfloat16().float()"),
        rounded_early__sigmoid_float16=("numbers.sigmoid()", "numbers.sigmoid().half().float()"),
        rounded_early__own=("numbers.softmax(-1)", "numbers.softmax(-1).to(logits.dtype).float()",
                            "numbers.sigmoid()", "numbers.sigmoid().to(logits.dtype).float()"),
        rounded_early__own_sigmoid=("numbers.sigmoid()", "numbers.sigmoid().to(logits.dtype).float()"),
        rounded_early__own_softmax=("numbers.softmax(-1)", "numbers.softmax(-1).to(logits.dtype).float()"),
        rounded_early__all=("logits.to(torch.promote_types(logits.dtype, torch.float32))", "logits",
                            "return experts, weights", "return experts, weights.float()"),
        rounded_early__end=("return experts, weights", "return experts, weights.to(logits.dtype).float()"),
        rounded_early__weights=(TAKEN, TAKEN + ".bfloat16().float()"),
        rounded_early__logits=("logits.to(", "logits.half().to("),
        rounded_early__logits_bf16=("logits.to(", "logits.bfloat16().to(")),
)  # fmt: skip


def ties_by_topk(case, seen, got):
    """Only experts with equal numbers are exchanged, and topk chose them."""
    if case.entry != "route" or "topk" not in seen.operations or not isinstance(got, (tuple, list)) or len(got) != 2:
        return False
    right, given = route_of(*case.args), got[0]
    if not isinstance(given, torch.Tensor) or given.shape != right[0].shape or given.dtype != torch.int64:
        return False
    if torch.equal(given, right[0]) or bool((given < 0).any()) or bool((given >= case.args[0].shape[1]).any()):
        return False
    numbers = case.args[0].float()
    if case.args[2] == "sigmoid":
        numbers = numbers.sigmoid() + (0 if case.args[3] is None else case.args[3])
    distinct = given.sort(-1).values.diff(dim=-1).ne(0).all()
    return bool(distinct) and torch.equal(numbers.gather(-1, given), numbers.gather(-1, right[0]))


EXERCISE = Exercise(
    id="18.5", title="The router", entries=("route", "balanced"), cases=router_cases,
    oracle={"route": route_of, "balanced": balance_of}, contracts=(ROUTES, BALANCES),
    plain={"route": (by_log_sum_exp,)},
    models=(model_of(route_of, IN_ROUTE, uses=(chosen_again,), entry="route"),
            model_of(balance_of, IN_BALANCE, entry="balanced")),
    mistakes=(
        Mistake("ties_by_topk", f"topk takes equal numbers in any order. {TIES} A stable sort keeps their order.",
            when=ties_by_topk, first=True),
    ),
    hints=(
        "Keep two tensors apart: what chooses, and what weighs. They are the logits and their softmax, or the sigmoids "
        "with the bias and those without it. Both are float32, whatever the logits are.",
        "choosing.sort(dim=-1, descending=True, stable=True).indices[:, :k] are the experts, and a stable sort leaves "
        "equal numbers in the order of the experts. topk promises no such order.",
        "scores.gather(-1, experts) takes the weights of the chosen experts. \"renormalised\" and \"sigmoid\" divide "
        "them by their sum over the k. Where that sum is 0, divide by 1 instead: torch.where(total > 0, total, 1.0).",
        "balanced: sign() of (mean load - load) is 1, 0 or -1. Compute it in float64, because float32 holds whole "
        "numbers up to 2²⁴ alone. moved = bias + rate * sign, and moved - moved.mean() is the result.",
    ),
)  # fmt: skip
