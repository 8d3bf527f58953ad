"""Exercise 18.5: a router's choice and weights, and the rule that balances its experts."""

import torch

from course_lib.checker import Case, Exercise, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.ch18_products_and_experts.product_steps import widened
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
    numbers = widened(logits)
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


KINDS = ("softmax", "renormalised", "sigmoid")
EXTREME, FAR_BELOW, TINY = "logits of ±10,000", "most logits far below the largest", "logits from -60 to -40"
VALUES = ("", "equal logits", EXTREME, FAR_BELOW, TINY)
LOADS = ("any", "equal", "some equal the mean", "one full expert", "near 2⁴⁰", "of all sizes", "10⁶ and 1 more")


def logits_of(draw, values, *shape):
    far = 200 * (1 + draw.uniform(*shape).argsort(-1)).log2().round()
    return {
        "": 2 * draw.normal(*shape), "equal logits": draw.integers(*shape, low=-1, high=2).float(),
        EXTREME: 2e4 * draw.integers(*shape, low=0, high=2) - 1e4, TINY: draw.integers(*shape, low=-240, high=-160) / 4,
        FAR_BELOW: draw.integers(*shape, low=-50, high=51) - far,
    }[values]  # fmt: skip


def near_ties(logits, bias):
    """Tokens of which two different sums lie so close that a rounding may exchange them."""
    sums = logits.double().sigmoid() + bias.double()
    same = (logits[:, :, None] == logits[:, None, :]) & (bias[:, None] == bias[None, :])
    return (((sums[:, :, None] - sums[:, None, :]).abs() < 4e-6) & ~same).flatten(1).any(1)


def to_route(draw, tokens, experts, k, kind, bias=None, scale=1.0, values="", dtype=torch.float32):
    logits = logits_of(draw, values, tokens, experts).to(dtype)
    if kind != "sigmoid":
        return logits, min(k, experts), kind
    given = {"any": draw.normal(experts).clamp(-2.5, 2.5), "negative": -1.5 - draw.uniform(experts)}.get(bias)
    for _ in range(40 if values == "" else 0):
        close = near_ties(logits, torch.zeros(experts) if given is None else given)
        logits[close] = logits_of(draw, values, int(close.sum()), experts).to(dtype)
    if values and bias:  # sums of few sigmoids and few biases are equal, or far apart
        given = (given * 8).round() / 8 + 1 / 64
    return logits, min(k, experts), kind, given, scale


def to_balance(draw, experts, loads, mean=0.0, rate=0.01):
    number = torch.arange(experts)
    load = {
        "any": draw.integers(experts, low=0, high=1000), "equal": 37 + 0 * number,
        "some equal the mean": 50 + 7 * (number % 3 - 1), "one full expert": 4096 * (number == experts // 2),
        "near 2⁴⁰": 2**40 - draw.integers(experts, low=0, high=3), "of all sizes": 2 ** (5 * number % 41),
        "10⁶ and 1 more": 1_000_000 + (number > 0).long(),
    }[loads]  # fmt: skip
    return draw.normal(experts, scale=0.1, shift=mean), load[draw.permutation(experts)], rate


def router_cases(draw):
    worked, equal, biased = (2.0, 1.0, 0.0, -1.0), (1.0, 3.0, 3.0, 0.0, 3.0, 1.0), torch.tensor([0.0, 0.0, 0.3, 0.0])
    near = torch.tensor([[0.0, 0.0004, 0.0008, -0.0004]]).half()
    close, below = -0.75 + torch.tensor([3, -1, -3, 2]) * 2.0**-14, torch.tensor([-2.5, -2.0, -3.0, -2.25])
    far = {sign: [at * 9000 + more for more in (0.5, 1.0, -2.0, 0.0)] for sign, at in (("", 1), ("-", -1))}
    given = {
        **{f"{kind}: logits 2, 1, 0, -1, k = 2": (worked, 2, kind) for kind in KINDS[:2]},
        "sigmoid: logits 2, 1, 0, -1, no bias": (worked, 2, "sigmoid", None, 1.0),
        "sigmoid: logits 2, 1, 0, -1, expert 2 has a bias": (worked, 2, "sigmoid", biased, 1.0),
        "sigmoid: the same with a scale of 2.5": (worked, 2, "sigmoid", biased, 2.5),
        **{f"{kind}: equal logits, the smaller number first": (equal, 4, kind) for kind in KINDS[:2]},
        "sigmoid: equal sums, the smaller number first": (equal, 4, "sigmoid", torch.full((6,), -0.5), 1.0),
        "softmax: logits 0, -200, -300": ((-300.0, -250.0, 0.0, -200.0), 3, "softmax"),
        **{f"{kind}: logits near {sign}9,000": (far[sign], 3, kind) for kind in KINDS[:2] for sign in far},
        "renormalised: k = 1": ((0.5, 1.0, -1.0), 1, "renormalised"),
        "sigmoid: logits that differ by 0.001": ((1.0, 1.001, 1.003, 1.002), 3, "sigmoid", None, 1.0),
        "softmax: two logits of -10,000": ((-10000.0, -10000.0, 10000.0, -9000.0), 4, "softmax"),
        "sigmoid: three sigmoids are 1, one is 0": ((8000.0, 10000.0, 9000.0, -1000.0), 4, "sigmoid", None, 1.0),
        "sigmoid: sigmoids near e⁻⁸⁵": ((-84.0, -85.5, -83.0, -95.0), 3, "sigmoid", None, 1.0),
        "sigmoid: all sigmoids are 0": ((-10000.0, -2000.0, -9000.0), 2, "sigmoid", biased[1:], 2.5),
        "sigmoid: all sums are below -1": ((0.5, -0.5, 1.0, 0.0), 3, "sigmoid", below, 1.0),
    }
    drawn = {
        **{f"{kind}: 7 tokens, 8 experts, k = 3": (7, 8, 3, kind, "any", 2.5) for kind in KINDS},
        **{f"{kind}: 64 experts, many equal logits": (20, 64, 8, kind, "any", 2.5, "equal logits") for kind in KINDS},
        "softmax: 30 tokens, 300 experts": (30, 300, 4, "softmax"),
        "sigmoid: 1 token, float16 logits": (1, 300, 8, "sigmoid", "any", 1.0, "", torch.float16),
    }
    balanced = {"any": 8, "some equal the mean": 9, "near 2⁴⁰": 7, "10⁶ and 1 more": 12, "of all sizes": 9}
    return [
        *(Case(name, (torch.tensor([logits]), *rest), "route") for name, (logits, *rest) in given.items()),
        Case("sigmoid: float16 logits, biases that differ by less than float16 shows", (near, 4, "sigmoid", close, 1.0),
             "route"),
        *(Case(name, to_route(draw, *choices), "route") for name, choices in drawn.items()),
        Case("balance: loads 10, 4, 4, 2", (biased, torch.tensor([10, 4, 4, 2]), 0.1), "balanced"),
        Case("balance: loads one full expert", to_balance(draw, 8, "one full expert", 3.0), "balanced"),
        *(Case(f"balance: loads {loads}", to_balance(draw, experts, loads), "balanced")
          for loads, experts in balanced.items()),
    ]  # fmt: skip


ROUTES = Contract(
    to_route,
    {"tokens": (1, 2, 99), "experts": (1, 2, 7, 64), "k": (1, 2, 5, Level(64, "k = experts")), "kind": KINDS,
     "bias": (Level(None, ""), Level("any", "any bias"), Level("negative", "negative bias")),
     "scale": (1.0, 2.5, 0.0, 99.0), "values": VALUES, "dtype": (torch.float32, torch.float16, torch.bfloat16)},
    {"tokens": "at least 1 of each", "k": "from 1 to the number of experts", "bias": "of either sign",
     "scale": "any number of 0 or more", "values": "any numbers from -10,000 to 10,000",
     "dtype": "float32, float16 or bfloat16"},
    lambda kind, bias, scale, values, dtype, **others: bias is None and scale == 1 if kind != "sigmoid" else (
        values != FAR_BELOW and (values != TINY or (dtype == torch.float32 and bias is None))),
    entry="route", most=26,
)  # fmt: skip
BALANCES = Contract(
    to_balance,
    {"experts": (1, 2, 9, 66), "mean": (0.0, -5.0), "rate": (0.0, 0.001, 3.0),
     "loads": tuple(Level(one, f"loads {one}") for one in LOADS)},
    {"experts": "at least 1", "mean": "its mean may be any number", "rate": "0 or more", "loads": "from 0 to 2⁴⁰"},
    entry="balanced", most=14,
)  # fmt: skip

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
