"""The causal mask as it should be, in PyTorch: for exercises 2.3 and 2.5."""

from __future__ import annotations

import math

import torch


def masked_softmax(scores, visible):
    """Softmax over the visible keys of each row; zeros where there is none."""
    hidden = scores.masked_fill(~visible, -math.inf)
    nothing = ~visible.any(dim=-1, keepdim=True)
    return torch.softmax(hidden.masked_fill(nothing, 0.0), dim=-1).masked_fill(nothing, 0.0)


def causal_visible(query_length, key_length):
    """bool [query_length, key_length]: the last query stands at the last key."""
    queries = torch.arange(query_length)[:, None] + (key_length - query_length)
    return torch.arange(key_length)[None, :] <= queries


def causal_oracle(scores):
    return masked_softmax(scores, causal_visible(*scores.shape[-2:]))
