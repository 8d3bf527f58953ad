"""Logits, biases and loads for exercise 18.5: sums that a rounding might exchange are equal, or far apart."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Contract, Level

KINDS = ("softmax", "renormalised", "sigmoid")
FAR_BELOW, TINY, EXTREME = "most logits far below the largest", "logits from -60 to -40", "logits of ±10,000"
VALUES = {
    "": lambda draw, *shape: 2 * draw.normal(*shape),
    "equal logits": lambda draw, *shape: draw.integers(*shape, low=-1, high=2).float(),
    EXTREME: lambda draw, *shape: 2e4 * draw.integers(*shape, low=0, high=2).float() - 1e4,
    FAR_BELOW: lambda draw, *shape: (
        200 * (1 + draw.uniform(*shape).argsort(-1)).log2().round() * -1.0 + draw.integers(*shape, low=-50, high=51)
    ),
    TINY: lambda draw, *shape: draw.integers(*shape, low=-240, high=-160) / 4,
}
BIASES = {
    "any": lambda draw, experts: draw.normal(experts).clamp(-2.5, 2.5),
    "negative": lambda draw, experts: -1.5 - draw.uniform(experts),
}
LOADS = {
    "any": lambda draw, experts: draw.integers(experts, low=0, high=1000),
    "equal": lambda draw, experts: torch.full((experts,), 37),
    "some equal the mean": lambda draw, experts: 50 + 7 * (torch.arange(experts) % 3 - 1),
    "one full expert": lambda draw, experts: (torch.arange(experts) == experts // 2) * 4096,
    "near 2⁴⁰": lambda draw, experts: 2**40 - draw.integers(experts, low=0, high=3),
    "of all sizes": lambda draw, experts: 2 ** (5 * torch.arange(experts) % 41),
    "10⁶ and 1 more": lambda draw, experts: 1_000_000 + (torch.arange(experts) > 0).long(),
}


def near_ties(logits, bias):
    """Tokens of which two different sums lie so close that a rounding may exchange them."""
    sums = logits.double().sigmoid() + bias.double()
    same = (logits[:, :, None] == logits[:, None, :]) & (bias[:, None] == bias[None, :])
    return (((sums[:, :, None] - sums[:, None, :]).abs() < 4e-6) & ~same).flatten(1).any(1)


def to_route(draw, *, tokens, experts, k, kind, bias=None, scale=1.0, values="", dtype=torch.float32):
    logits = VALUES[values](draw, tokens, experts).to(dtype)
    if kind != "sigmoid":
        return logits, min(k, experts), kind
    given = BIASES[bias](draw, experts) if bias else None
    for _ in range(40 if values == "" else 0):
        close = near_ties(logits, torch.zeros(experts) if given is None else given)
        logits[close] = VALUES[values](draw, int(close.sum()), experts).to(dtype)
    if values and bias:  # sums of few sigmoids and few biases are equal, or far apart
        given = (given * 8).round() / 8 + 1 / 64
    return logits, min(k, experts), kind, given, scale


def to_balance(draw, *, experts, loads, mean=0.0, rate=0.01):
    return draw.normal(experts, scale=0.1, shift=mean), LOADS[loads](draw, experts)[draw.permutation(experts)], rate


ROUTES = Contract(
    to_route,
    choices={
        "tokens": (1, 2, 99), "experts": (1, 2, 7, 64), "k": (1, 2, 5, Level(64, "k = experts")),
        "kind": tuple(Level(kind, kind) for kind in KINDS),
        "bias": (Level(None, ""), *(Level(which, f"{which} bias") for which in BIASES)), "scale": (1.0, 2.5, 0.0, 99.0),
        "values": tuple(Level(name, name) for name in VALUES), "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"tokens": "at least 1 of each", "k": "from 1 to the number of experts", "bias": "of either sign",
          "scale": "any number of 0 or more", "values": "any numbers from -10,000 to 10,000",
          "dtype": "float32, float16 or bfloat16"},
    valid=lambda kind, bias, scale, values, dtype, **others: (kind == "sigmoid" or (bias is None and scale == 1))
    and not (kind == "sigmoid" and values == FAR_BELOW)
    and not (kind == "sigmoid" and values == TINY and (dtype != torch.float32 or bias is not None)),
    entry="route", most=26,
)  # fmt: skip
BALANCES = Contract(
    to_balance,
    choices={
        "experts": (1, 2, 9, 66), "mean": (0.0, -5.0), "rate": (0.0, 0.001, 3.0),
        "loads": tuple(Level(one, f"loads {one}") for one in LOADS),
    },
    says={"experts": "at least 1", "mean": "its mean may be any number", "rate": "0 or more", "loads": "from 0 to 2⁴⁰"},
    entry="balanced", most=14,
)  # fmt: skip
