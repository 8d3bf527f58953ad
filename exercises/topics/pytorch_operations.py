"""PyTorch's operations, by the names under which a run counts them, that would do a part of a kernel's work."""

from __future__ import annotations

ARITHMETIC = (
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "neg",
    "reciprocal",
    "pow",
    "exp",
    "exp2",
    "log",
    "where",
    "masked_fill",
    "tril",
    "triu",
    "relu",
    "clamp",
    "clamp_min",
    "maximum",
    "minimum",
    "sum",
    "mean",
    "max",
    "amax",
    "addcmul",
    "nan_to_num",
)
