"""Exercise 18.5: a router's choice and weights, and the rule that balances its experts."""

from __future__ import annotations

import torch

from course_lib.checker import Case, Exercise, model_of
from exercises.ch18_products_and_experts.router_inputs import BALANCES, KINDS, ROUTES, to_balance, to_route
from exercises.ch18_products_and_experts.router_slips import IN_BALANCE, IN_ROUTE


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


def balance_of(bias, load, rate):
    load = load.double()
    difference = load.mean() - load
    moved = bias + rate * difference.sign().to(bias.dtype)
    return moved - moved.mean()


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

    def balance(loads, experts, mean=0.0):
        return Case(f"balance: loads {loads}", to_balance(draw, experts=experts, loads=loads, mean=mean), "balanced")

    worked, biased = [[2.0, 1.0, 0.0, -1.0]], torch.tensor([0.0, 0.0, 0.3, 0.0])
    equal, near = [[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]], [[0.0, 0.0004, 0.0008, -0.0004]]
    close = -0.75 + torch.tensor([3, -1, -3, 2]) * 2.0**-14
    return [
        *(given(f"{kind}: logits 2, 1, 0, -1, k = 2", worked, 2, kind) for kind in KINDS[:2]),
        given("sigmoid: logits 2, 1, 0, -1, no bias", worked, 2, "sigmoid", None, 1.0),
        given("sigmoid: logits 2, 1, 0, -1, expert 2 has a bias", worked, 2, "sigmoid", biased, 1.0),
        given("sigmoid: the same with a scale of 2.5", worked, 2, "sigmoid", biased, 2.5),
        *(case(f"{kind}: 7 tokens, 8 experts, k = 3", tokens=7, experts=8, k=3, kind=kind, bias="any", scale=2.5)
          for kind in KINDS),
        *(given(f"{kind}: equal logits, the smaller number first", equal, 4, kind) for kind in KINDS[:2]),
        given("sigmoid: equal sums, the smaller number first", equal, 4, "sigmoid", torch.full((6,), -0.5), 1.0),
        given("softmax: logits 0, -200, -300", [[-300.0, -250.0, 0.0, -200.0]], 3, "softmax"),
        *(given(f"{kind}: logits near {sign}9,000", [[at * 9000 + 0.5, at * 9000 + 1.0, at * 9000 - 2.0, at * 9000]], 3,
                kind) for kind in KINDS[:2] for at, sign in ((1, ""), (-1, "-"))),
        given("renormalised: k = 1", [[0.5, 1.0, -1.0]], 1, "renormalised"),
        Case("sigmoid: float16 logits, biases that differ by less than float16 shows",
             (torch.tensor(near).half(), 4, "sigmoid", close, 1.0), "route"),
        given("sigmoid: logits that differ by 0.001", [[1.0, 1.001, 1.003, 1.002]], 3, "sigmoid", None, 1.0),
        given("softmax: two logits of -10,000", [[-10000.0, -10000.0, 10000.0, -9000.0]], 4, "softmax"),
        given("sigmoid: three sigmoids are 1, one is 0", [[8000.0, 10000.0, 9000.0, -1000.0]], 4, "sigmoid", None, 1.0),
        given("sigmoid: sigmoids near e⁻⁸⁵", [[-84.0, -85.5, -83.0, -95.0]], 3, "sigmoid", None, 1.0),
        given("sigmoid: all sigmoids are 0", [[-10000.0, -2000.0, -9000.0]], 2, "sigmoid", biased[1:], 2.5),
        given("sigmoid: all sums are below -1", [[0.5, -0.5, 1.0, 0.0]], 3, "sigmoid",
              torch.tensor([-2.5, -2.0, -3.0, -2.25]), 1.0),
        *(case(f"{kind}: 64 experts, many equal logits", tokens=20, experts=64, k=8, kind=kind, values="equal logits",
               bias="any", scale=2.5) for kind in KINDS[::2]),
        case("softmax: 30 tokens, 300 experts", tokens=30, experts=300, k=4, kind="softmax"),
        case("sigmoid: 1 token, float16 logits", tokens=1, experts=300, k=8, kind="sigmoid", bias="any",
             dtype=torch.float16),
        Case("balance: loads 10, 4, 4, 2", (biased, torch.tensor([10, 4, 4, 2]), 0.1), "balanced"),
        balance("any", 8), balance("some equal the mean", 9), balance("one full expert", 8, mean=3.0),
        balance("near 2⁴⁰", 7), balance("10⁶ and 1 more", 12), balance("of all sizes", 9),
    ]  # fmt: skip


EXERCISE = Exercise(
    id="18.5", title="The router", entries=("route", "balanced"), cases=router_cases,
    oracle={"route": route_of, "balanced": balance_of}, contracts=(ROUTES, BALANCES),
    plain={"route": (by_log_sum_exp,)},
    models=(model_of(route_of, IN_ROUTE, uses=(chosen_again,), entry="route", most_pairs=90),
            model_of(balance_of, IN_BALANCE, entry="balanced")),
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
