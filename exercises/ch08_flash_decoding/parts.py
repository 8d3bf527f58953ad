"""Attention over keys that are split among programs, and their merge: what the exercises of chapter 08 share.

Layouts are those of exercises/topics/decode.py. Partial results are outputs [splits, batch, query_heads, head_dim],
each an average over its split's keys by their softmax, and log-sum-exps [splits, batch, query_heads], in natural
units; a split without keys has an output of zeros and a log-sum-exp of minus infinity.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from course_lib.checker import Forbids, Mistake
from exercises.topics.decode import MOST_AWRY, attend, by_division

BIG = 55.0  # standard deviation of scores whose exponentials overflow in float32


def partials(query, key_cache, value_cache, lengths, splits, *, attend: Callable = attend):
    """Partial outputs and log-sum-exps, in float32 at least; `attend` is what is done with one split's keys."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    batch, query_heads, head_dim = query.shape
    chosen = by_division(query_heads, key_cache.shape[1])
    outputs = torch.zeros(splits, batch, query_heads, head_dim, dtype=accurate)
    lses = torch.full((splits, batch, query_heads), -math.inf, dtype=accurate)
    for sequence, length in enumerate(lengths.tolist()):
        size = -(-length // splits)
        for split in range(-(-length // size) if length else 0):
            here = slice(split * size, min((split + 1) * size, length))
            keys, values = (cache[sequence, chosen, here] for cache in (key_cache, value_cache))
            output, lse = attend(query[sequence][:, None], keys, values)
            outputs[split, sequence], lses[split, sequence] = output[:, 0], lse[:, 0]
    return outputs, lses


def combine(outputs, lses):
    """All splits as one: (output, log-sum-exp), zeros and minus infinity where no split has a key."""
    largest = lses.amax(dim=0)
    reference = largest.masked_fill(largest == -math.inf, 0.0)
    weights = torch.exp(lses - reference)  # [splits, ...]
    total = weights.sum(dim=0)
    divisor = total.masked_fill(total == 0, 1.0)
    return (weights[..., None] * outputs).sum(dim=0) / divisor[..., None], reference + total.log()


def combine_in_turn(outputs, lses):
    """The same meaning, one split after the other, by the log-sum-exp so far."""
    output, lse = outputs[0], lses[0]
    for part, part_lse in zip(outputs[1:], lses[1:]):
        together = torch.logaddexp(lse, part_lse)
        reference = together.masked_fill(together == -math.inf, 0.0)
        output = output * torch.exp(lse - reference)[..., None] + part * torch.exp(part_lse - reference)[..., None]
        lse = together
    return output, lse


def combine_by_log_sum_exp(outputs, lses):
    """The same meaning as Σ exp(lse - the whole's) · output, with the whole's a rounding too large: all err alike."""
    lse = torch.logsumexp(lses, dim=0)
    finite = lse.masked_fill(lse == -math.inf, 0.0)
    awry = 2 * torch.finfo(torch.float32).eps * finite.abs()
    weights = torch.exp(lses - finite - awry.clamp(max=MOST_AWRY))
    return (weights[..., None] * outputs).sum(dim=0), torch.where(lse == -math.inf, lse, finite + awry)


COMBINE_PLAIN = (combine_in_turn, combine_by_log_sum_exp)

SKIPS_THE_WORK = Forbids(
    (
        "scaled_dot_product_attention",
        "_scaled_dot_product",
        "bmm",
        "mm",
        "matmul",
        "softmax",
        "_softmax",
        "logsumexp",
        "logaddexp",
    )
)


def _finite_for_empty(case, seen, got):
    """Zeros and a log-sum-exp far below 0, but finite, where there are no keys."""
    if not isinstance(got, tuple):
        return False
    output, lse = got
    if output.shape[:-1] != lse.shape:
        return False
    empty = (output == 0).all(dim=-1) & lse.isfinite()
    return bool(empty.any()) and bool((lse[empty] < -1000).all())


FINITE_FOR_EMPTY = Mistake(
    "finite_for_empty",
    "Where there are no keys the log-sum-exp is a large negative number instead of minus infinity. Does the running "
    "maximum begin with such a number? Begin with minus infinity, the logarithm of an empty sum.",
    when=_finite_for_empty,
)


def _of_no_sequence(case, seen, got):
    """The first access outside a tensor is by a program whose last number is no sequence."""
    numbers = re.search(r"program \(\d+, \d+, (\d+)\)", seen.out_of_bounds[0]) if seen.out_of_bounds else None
    return numbers is not None and int(numbers[1]) >= case.args[0].shape[0]


GRID_TURNED_ROUND = Mistake(
    "grid_axes_exchanged",
    "A program works on a sequence that does not exist. The kernel takes tl.program_id(2) for the sequence, so the "
    "grid is (splits, key_heads, batch).",
    when=_of_no_sequence,
)
