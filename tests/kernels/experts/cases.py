"""What the tests of the experts' kernels share: choices that leave an expert empty, and one with all tokens."""

import torch

from course_lib.kernels.experts.arrange import arrange
from tests.kernels.fused.cases import normal


def ragged(tokens: int, k: int, count: int, missing=True) -> torch.Tensor:
    """Choices [tokens, k]: expert 1 has every token, the last one none; with `missing` some of the others are -1."""
    generator = torch.Generator().manual_seed(0)
    others = torch.rand(tokens, count - 2, generator=generator).argsort(dim=1)[:, : k - 1]
    experts = torch.cat([torch.ones(tokens, 1, dtype=torch.int64), others + (others >= 1)], dim=1)
    gone = torch.rand(tokens, k, generator=generator) < 0.2 if missing else torch.zeros(tokens, k, dtype=torch.bool)
    gone[:, 0] = False
    return experts.where(~gone, -1)


def operands(tokens, k, count, outer, inner, block=16, dtype=torch.float32, gathered=True):
    """(x, weight, arrangement); in places, x is NaN where there is no slot."""
    arrangement = arrange(ragged(tokens, k, count), count, block)
    x = normal(1, tokens if gathered else len(arrangement.slots), inner, dtype=dtype)
    if not gathered:
        x[arrangement.slots == arrangement.sentinel] = torch.nan
    return x, normal(2, count, outer, inner, dtype=dtype, scale=inner**-0.5), arrangement


def served(rows: torch.Tensor, arrangement) -> torch.Tensor:
    """Rows by place, with zeros where there is no slot."""
    return rows.where((arrangement.slots < arrangement.sentinel)[:, None], 0)
