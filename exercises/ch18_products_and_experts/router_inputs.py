"""Logits, biases and loads for exercise 18.5: sums that a rounding might exchange are equal, or far apart."""

from __future__ import annotations

import torch

from course_lib.checker.specification.contract import Contract, Level

KINDS = ("softmax", "renormalised", "sigmoid")
FAR_BELOW, TINY = "most logits far below the largest", "logits from -60 to -40"

VALUES = {
    "": lambda draw, *shape: 2 * draw.normal(*shape),
    "equal logits": lambda draw, *shape: draw.integers(*shape, low=-1, high=2).float(),
    "logits near ±10,000": lambda draw, *shape: (
        draw.choice((-1, 1)) * (9000 + draw.integers(*shape, low=0, high=100).float() * 8)
    ),
    "logits of -10,000 and 10,000": lambda draw, *shape: 2e4 * draw.integers(*shape, low=0, high=2).float() - 1e4,
    FAR_BELOW: lambda draw, *shape: (
        200 * (1 + draw.uniform(*shape).argsort(-1)).log2().round() * -1.0 + draw.integers(*shape, low=-50, high=51)
    ),
    TINY: lambda draw, *shape: draw.integers(*shape, low=-240, high=-160) / 4,
}
BIASES = {
    None: lambda draw, experts: None,
    "any": lambda draw, experts: draw.normal(experts).clamp(-2.5, 2.5),
    "negative": lambda draw, experts: -1.5 - draw.uniform(experts),
    "equal": lambda draw, experts: torch.full((experts,), -0.75),
}


def near_ties(logits, bias):
    """Tokens of which two different sums lie so close that a rounding may exchange them."""
    sums = logits.double().sigmoid() + (0 if bias is None else bias.double())
    same = logits[:, :, None] == logits[:, None, :]
    same &= True if bias is None else bias[:, None] == bias[None, :]
    gaps = (sums[:, :, None] - sums[:, None, :]).abs()
    return ((gaps < 4e-6) & ~same & (logits[:, :, None].abs() < 30)).flatten(1).any(1)


def to_route(draw, *, tokens, experts, k, kind, bias=None, scale=None, values="", dtype=torch.float32):
    k = {"one": 1, "all": experts}.get(k, k)
    logits = VALUES[values](draw, tokens, experts).to(dtype)
    if kind != "sigmoid":
        return logits, k, kind
    given = BIASES[bias](draw, experts)
    for _ in range(40 if values == "" else 0):
        close = near_ties(logits, given)
        logits[close] = VALUES[values](draw, int(close.sum()), experts).to(dtype)
    if values and given is not None:  # sums of few sigmoids and few biases are equal, or far apart
        given = (given * 8).round() / 8 + 1 / 64
    return logits, k, kind, given, 1.0 if scale is None else scale


ROUTES = Contract(
    to_route,
    choices={
        "tokens": (1, 2, 33), "experts": (1, 2, 7, 64), "k": (Level("one", ""), 2, 5, Level("all", "k = experts")),
        "kind": tuple(Level(kind, kind) for kind in KINDS),
        "bias": (Level(None, ""), *(Level(which, f"{which} bias") for which in ("any", "negative", "equal"))),
        "scale": (Level(None, ""), 2.5, 0.5, 0.0), "values": tuple(Level(name, name) for name in VALUES),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"tokens": "at least 1 of each", "k": "from 1 to the number of experts", "bias": "of either sign",
          "scale": "any number of 0 or more", "values": "any numbers from -10,000 to 10,000",
          "dtype": "float32, float16 or bfloat16"},
    valid=lambda kind, experts, k, bias, scale, values, dtype, **others: (k in ("one", "all") or k <= experts)
    and (kind == "sigmoid" or (bias is None and scale is None))
    and not (kind == "sigmoid" and values == FAR_BELOW)
    and not (kind == "sigmoid" and values == TINY and (dtype != torch.float32 or bias is not None)),
    entry="route", most=26,
)  # fmt: skip
