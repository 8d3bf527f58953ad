"""Attention over keys that are split among programs, exactly and with its classic slips: for chapter 08.

Layouts are those of exercises/topics/decode.py. Partial results are outputs [splits, batch, query_heads, head_dim],
each an average over its split's keys by their softmax, and log-sum-exps [splits, batch, query_heads], in natural
units; a split without keys has an output of zeros and a log-sum-exp of minus infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from course_lib.checker import Forbids
from exercises.topics.attention import attention, log_sum_exp, prescaled, rounded, rounded_log_sum_exp, scores_of
from exercises.topics.decode import by_division

# ------------------------------------------------------------------------------------------- which keys a split has


def rounded_up(length: int, splits: int, split: int, longest: int = 0) -> tuple[int, int]:
    """(first, end) of a split's keys: ⌈length / splits⌉ each, the last ones fewer or none."""
    size = -(-length // splits)
    return min(split * size, length), min((split + 1) * size, length)


def rounded_down(length: int, splits: int, split: int, longest: int = 0) -> tuple[int, int]:
    """The slip: ⌊length / splits⌋ keys each, so that the last length mod splits keys belong to no split."""
    size = length // splits
    return split * size, (split + 1) * size


def by_the_longest(length: int, splits: int, split: int, longest: int) -> tuple[int, int]:
    """The slip: the size of a split taken from another length, that of the longest sequence or of the whole cache."""
    size = -(-longest // splits)
    return min(split * size, length), min((split + 1) * size, length)


def into_the_next(key_rows: int) -> Callable:
    """The slip: whole tiles of keys, masked by the length alone, so that a split's last tile reaches into the next."""

    def span(length, splits, split, longest=0):
        first, end = rounded_up(length, splits, split)
        return first, min(first + -(-(end - first) // key_rows) * key_rows, length)

    return span


def past_the_end(length: int, splits: int, split: int, longest: int = 0) -> tuple[int, int]:
    """The slip: ⌈length / splits⌉ keys for every split, those behind the sequence's end too."""
    size = -(-length // splits)
    return split * size, (split + 1) * size


# ------------------------------------------------------------------------------------------------- partial results


def attend(query, key, value, scale=None):
    """Output and log-sum-exp of one query for each head: [heads, 1, head_dim] and [heads, 1]."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return attention(query, key, value, scale=scale).to(accurate), log_sum_exp(query, key)


def attend_prescaled(query, key, value):
    """The same meaning with scale and log2 e folded into the query, and rounded to its dtype."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    scaled = query * (math.log2(math.e) / math.sqrt(query.shape[-1]))
    scores = math.log(2) * (scaled.to(accurate) @ key.to(accurate).transpose(-1, -2))
    return prescaled(query, key, value).to(accurate), torch.logsumexp(scores, dim=-1)


def attend_rounded(query, key, value):
    """The same meaning with scores off by as much as sums in another order may be."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return rounded(query, key, value).to(accurate), rounded_log_sum_exp(query, key).to(accurate)


def attend_strayed(period: int) -> Callable:
    """The same meaning with scores off by as much as sums in another order may be, up for `period` keys, then down.

    Where two keys share nearly all the weight, the output errs by what their scores err apart: some period parts them.
    """

    def strayed(query, key, value):
        accurate = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(accurate), key.to(accurate)
        sign = 1.0 - 2.0 * (torch.arange(key.shape[-2]) // period % 2)
        sizes = query.abs() @ key.abs().transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = scores_of(query, key) + sign * 2 * torch.finfo(torch.float32).eps * sizes
        return torch.softmax(scores, dim=-1) @ value.to(accurate), torch.logsumexp(scores, dim=-1)

    return strayed


STRAYED = tuple(attend_strayed(period) for period in (2, 4, 8, 16, 32, 64))


def partials(
    query,
    key_cache,
    value_cache,
    lengths,
    splits,
    *,
    attend: Callable = attend,
    span: Callable = rounded_up,
    heads: Callable = by_division,
    longest: int | None = None,
    empty: tuple[float, float] = (0.0, -math.inf),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial outputs and log-sum-exps, in float32 at least.

    Args:
        attend: what is done with one split's keys, as `attend`.
        span: which keys a split has, as `rounded_up`.
        heads: the KV head of each query head.
        longest: the length handed to `span` beside the sequence's own; the longest sequence's by default.
        empty: output and log-sum-exp of a split without keys.
    """
    accurate = torch.promote_types(query.dtype, torch.float32)
    batch, query_heads, head_dim = query.shape
    chosen = heads(query_heads, key_cache.shape[1])
    outputs = torch.full((splits, batch, query_heads, head_dim), empty[0], dtype=accurate)
    lses = torch.full((splits, batch, query_heads), empty[1], dtype=accurate)
    counted = lengths.clamp(0, key_cache.shape[2]).tolist()
    longest = max(counted, default=0) if longest is None else longest
    for sequence, length in enumerate(counted):
        for split in range(splits):
            first, end = span(length, splits, split, longest)
            if end <= first:
                continue
            keys, values = (cache[sequence, chosen, first:end] for cache in (key_cache, value_cache))
            output, lse = attend(query[sequence][:, None], keys, values)
            outputs[split, sequence], lses[split, sequence] = output[:, 0], lse[:, 0]
    return outputs, lses


# --------------------------------------------------------------------------------------------------------- merging


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


def combine_wrongly(outputs, lses, how: str):
    """The right log-sum-exp with an output whose splits are weighed wrongly, or not at all."""
    _, lse = combine(outputs, lses)
    present = lses > -math.inf  # [splits, ...]
    if how == "mean":
        return outputs.mean(dim=0), lse
    if how == "mean of those with keys":
        return outputs.sum(dim=0) / present.sum(dim=0).clamp(min=1)[..., None], lse
    if how == "sum":
        return outputs.sum(dim=0), lse
    if how == "undivided":  # relative to the largest, as the weights are before the division
        largest = lses.amax(dim=0)
        weights = torch.exp(lses - largest.masked_fill(largest == -math.inf, 0.0))
        return (weights[..., None] * outputs).sum(dim=0), lse
    if how == "base 2":
        return combine(outputs, lses * math.log(2))[0], lse
    if how == "base 2 in units of log 2":
        return combine(outputs, lses / math.log(2))[0], lse
    if how == "by the log-sum-exp itself":
        weights = lses.masked_fill(~present, 0.0)
        return (weights[..., None] * outputs).sum(dim=0) / weights.sum(dim=0)[..., None], lse
    raise ValueError(f"how is {how!r}")


def combine_equally(outputs, lses, *, present: bool = False, guarded: bool = False):
    """All splits weighed by 1, and a log-sum-exp of these weights: the largest and the logarithm of their number.

    Args:
        present: only splits that have keys are counted.
        guarded: where no split has a key the log-sum-exp is minus infinity all the same.
    """
    largest = lses.amax(dim=0)
    counted = (lses > -math.inf).sum(dim=0) if present else torch.full_like(largest, len(lses))
    lse = largest.masked_fill(largest == -math.inf, 0.0) + counted.log()
    if guarded:
        lse = lse.masked_fill(largest == -math.inf, -math.inf)
    return outputs.sum(dim=0) / counted.clamp(min=1)[..., None], lse


def combine_padded(outputs, lses, least: int = 1):
    """Splits that don't exist, up to a power of two and at least `least`, merged as zeros whose log-sum-exp is 0."""
    missing = max(least, 1 << (len(lses) - 1).bit_length()) - len(lses)
    parts = torch.cat([outputs, outputs.new_zeros(missing, *outputs.shape[1:])])
    return combine(parts, torch.cat([lses, lses.new_zeros(missing, *lses.shape[1:])]))


def wrong_lses(lses) -> dict[str, torch.Tensor]:
    """What is handed out as the whole's log-sum-exp by those who do not merge it."""
    return {
        "the largest": lses.amax(dim=0),
        "the last": lses[-1],
        "the first": lses[0],
        "the sum": lses.sum(dim=0),
        "the mean": lses.mean(dim=0),
    }


# --------------------------------------------------------------------------------- output and log-sum-exp, compared


def exact(args) -> list:
    """A case's arguments in float64; integers stay what they are."""
    return [arg.double() if isinstance(arg, torch.Tensor) and arg.is_floating_point() else arg for arg in args]


def is_pair(got) -> bool:
    """Whether an answer is two tensors."""
    return isinstance(got, (tuple, list)) and len(got) == 2 and all(isinstance(part, torch.Tensor) for part in got)


def close(got, told) -> bool:
    """Equal up to what half precision and another order of additions make of it, NaN where the other has it."""
    tolerance = {"rtol": 2e-3, "atol": 2e-3, "equal_nan": True}
    return got.shape == told.shape and torch.allclose(got.double(), told.double(), **tolerance)


def looks_like(right, wrong, parts=2):
    """A `when`: the first `parts` of both results are what `wrong` makes of the arguments, and not what is right."""

    def when(case, seen, got):
        if not is_pair(got) or seen.out_of_bounds:
            return False
        told, truth = wrong(*exact(case.args)), right(*exact(case.args))
        if told is None or all(map(close, got[:parts], truth)):
            return False
        return all(map(close, got[:parts], told))

    return when


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
