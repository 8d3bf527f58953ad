"""Exercise 18.5: a router's choice and weights, and the rule that balances its experts."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from exercises.ch18_products_and_experts.balancing import BALANCES, IN_BALANCE, balance_of, to_balance
from exercises.ch18_products_and_experts.router_inputs import KINDS, ROUTES, to_route
from exercises.ch18_products_and_experts.router_slips import IN_ROUTE, TIES


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
        *(given(f"{kind}: logits near 9,000", [[9000.5, 9001.0, 8998.0, 9002.5]], 3, kind) for kind in KINDS[:2]),
        *(given(f"{kind}: logits near -9,000", [[-9000.5, -9001.0, -8998.0, -9002.5]], 3, kind) for kind in KINDS[:2]),
        given("renormalised: k = 1", [[0.5, 1.0, -1.0]], 1, "renormalised"),
        given("sigmoid: biases that differ by less than float16 shows", [[0.0, 0.0004, 0.0008, -0.0004]], 4, "sigmoid",
              -0.75 + torch.tensor([3, -1, -3, 2]) * 2.0**-14, 1.0),
        given("sigmoid: logits that differ by 0.001", [[1.0, 1.001, 1.003, 1.002]], 3, "sigmoid", None, 1.0),
        given("softmax: two logits of -10,000", [[-10000.0, -10000.0, 10000.0, -9000.0]], 4, "softmax"),
        given("sigmoid: three sigmoids are 1", [[8000.0, 10000.0, 9000.0, -1.0]], 3, "sigmoid", None, 1.0),
        given("sigmoid: sigmoids near e⁻⁴⁰", [[-40.0, -41.5, -39.0, -50.0]], 3, "sigmoid", None, 1.0),
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
