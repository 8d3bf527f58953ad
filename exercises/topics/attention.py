"""What attention becomes when one step of the tiled algorithm is left out or done wrong.

Everything works on [..., length, head_dim] tensors in the dtype given, plainly and with the whole score matrix in view.
A slip that depends on how keys are cut into tiles takes `key_rows`; all slips walk the tiles from the first key on.
"""

from __future__ import annotations

import math

import torch


def visible_pairs(query_length: int, key_length: int, distance: int = 0) -> torch.Tensor:
    """The causal mask aligned to the end, bool [query_length, key_length]: a key at most `distance` places later."""
    position = torch.arange(query_length)[:, None] + key_length - query_length
    return torch.arange(key_length)[None, :] <= position + distance


def scores_of(query, key, visible=None, scale=None) -> torch.Tensor:
    """Scaled scores [..., query_length, key_length], minus infinity where a pair is not visible."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = scale * (query @ key.transpose(-1, -2))
    return scores if visible is None else scores.masked_fill(~visible, -math.inf)


def attention(query, key, value, visible=None, scale=None, empty=0.0) -> torch.Tensor:
    """Softmax attention; a row that sees no key is filled with `empty`."""
    scores = scores_of(query, key, visible, scale)
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1)
    return (probabilities @ value).masked_fill(nothing, empty)


def log_sum_exp(query, key, visible=None) -> torch.Tensor:
    """log Σ exp of each row of scaled scores, in float32 at least; minus infinity for a row that sees no key."""
    accurate = torch.float64 if query.dtype == torch.float64 else torch.float32
    return torch.logsumexp(scores_of(query.to(accurate), key.to(accurate), visible), dim=-1)


def prescaled(query, key, value, visible=None, empty=0.0) -> torch.Tensor:
    """The same meaning, with scale and log2 e folded into the queries: another rounding that is as good."""
    scores = scores_of(query * (math.log2(math.e) / math.sqrt(query.shape[-1])), key, visible, scale=1.0)
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)
    weights = torch.exp2(scores - scores.amax(dim=-1, keepdim=True))
    return ((weights @ value) / weights.sum(dim=-1, keepdim=True)).masked_fill(nothing, empty)


def _rounding(query, key) -> torch.Tensor:
    """How far float32 sums of a score's products may stray, [..., query_length, key_length]: 2 ε Σ |q||k| · scale."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    sizes = query.abs().to(accurate) @ key.abs().to(accurate).transpose(-1, -2)
    return 2 * torch.finfo(torch.float32).eps / math.sqrt(query.shape[-1]) * sizes


def rounded(query, key, value, visible=None, empty=0.0) -> torch.Tensor:
    """The same meaning with every other score off by as much as float32 sums in another order may be."""
    scores, stray = scores_of(query, key, visible), _rounding(query, key)
    sign = 1.0 - 2.0 * (torch.arange(key.shape[-2]) % 2)
    scores = scores.to(stray.dtype) + sign * stray
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(nothing, 0.0), dim=-1)
    return (probabilities @ value.to(stray.dtype)).masked_fill(nothing, empty).to(value.dtype)


def rounded_log_sum_exp(query, key, visible=None) -> torch.Tensor:
    """The log-sum-exp with every score too large by as much as float32 sums in another order may make it."""
    stray = _rounding(query, key)
    return torch.logsumexp(scores_of(query.to(stray.dtype), key.to(stray.dtype), visible) + stray, dim=-1)


def in_a_kernel(query, key, value, visible=None, scale=None, empty=0.0, normalised=False) -> torch.Tensor:
    """Softmax attention as a kernel computes it: what has 16 bits is multiplied with sums in float32, and the scores
    stay float32; the weights alone are rounded to the values' dtype, `normalised` or measured from the maximum.
    """
    accurate = torch.promote_types(query.dtype, torch.float32)
    scores = scores_of(query.to(accurate), key.to(accurate), visible, scale)
    nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
    scores = scores.masked_fill(nothing, 0.0)
    top = torch.logsumexp(scores, -1, keepdim=True) if normalised else scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - top)
    total = 1.0 if normalised else weights.sum(dim=-1, keepdim=True)
    output = weights.to(value.dtype).to(accurate) @ value.to(accurate) / total
    return output.masked_fill(nothing, empty).to(value.dtype)


def normalised_in_a_kernel(query, key, value, visible=None) -> torch.Tensor:
    """The same with weights exp(score - log-sum-exp)."""
    return in_a_kernel(query, key, value, visible, normalised=True)


def prescaled_in_a_kernel(query, key, value, visible=None) -> torch.Tensor:
    """The same with the scale folded into the queries, in float32: 16 bits do not hold it."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    output = in_a_kernel(query.to(accurate) / math.sqrt(query.shape[-1]), key, value, visible, scale=1.0)
    return output.to(query.dtype)


def rounded_in_a_kernel(query, key, value, visible=None) -> torch.Tensor:
    """The same with every other score off by as much as float32 sums in another order may be."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return rounded(query.to(accurate), key.to(accurate), value, visible)


def merged(query, key, value, key_rows) -> torch.Tensor:
    """The same meaning, each tile of keys finished by itself and merged by log-sum-exp: as good, rounded more."""
    output, total = None, None
    for start in range(0, key.shape[-2], key_rows):
        keys, values = key[..., start : start + key_rows, :], value[..., start : start + key_rows, :]
        part, log_sum = attention(query, keys, values), torch.logsumexp(scores_of(query, keys), dim=-1, keepdim=True)
        if output is None:
            output, total = part, log_sum
            continue
        together = torch.logaddexp(total, log_sum)
        output = output * torch.exp(total - together) + part * torch.exp(log_sum - together)
        total = together
    return output


def streamed(
    query, key, value, key_rows, *, visible=None, rescale_sum=True, rescale_accumulator=True, divided_before=0
) -> torch.Tensor:
    """The online softmax over tiles of keys, with a rescaling left out.

    divided_before: [query_length] or a number: at tiles that begin before it the accumulator is divided by the sum.
    """
    scores = scores_of(query, key, visible)
    running_max = torch.full_like(scores[..., :1], -math.inf)
    running_sum = torch.zeros_like(running_max)
    accumulator = torch.zeros(*scores.shape[:-1], value.shape[-1], dtype=value.dtype)
    for start in range(0, scores.shape[-1], key_rows):
        tile = scores[..., start : start + key_rows]
        new_max = torch.maximum(running_max, tile.amax(dim=-1, keepdim=True))
        reference = new_max.masked_fill(new_max == -math.inf, 0.0)
        weights, rescale = torch.exp(tile - reference), torch.exp(running_max - reference)
        running_sum = running_sum * (rescale if rescale_sum else 1.0) + weights.sum(dim=-1, keepdim=True)
        accumulator = accumulator * (rescale if rescale_accumulator else 1.0)
        accumulator = accumulator + weights @ value[..., start : start + key_rows, :]
        divided = torch.as_tensor(start < divided_before).reshape(-1, 1)
        accumulator = torch.where(divided, accumulator / running_sum.masked_fill(running_sum == 0, 1.0), accumulator)
        running_max = new_max
    return accumulator / running_sum.masked_fill(running_sum == 0, 1.0)


def normalised_per_tile(query, key, value, key_rows, visible=None) -> torch.Tensor:
    """A softmax of each tile by itself, the results added."""
    starts = range(0, key.shape[-2], key_rows)
    return sum(
        attention(
            query,
            key[..., s : s + key_rows, :],
            value[..., s : s + key_rows, :],
            None if visible is None else visible[:, s : s + key_rows],
        )
        for s in starts
    )


def not_divided(query, key, value, visible=None) -> torch.Tensor:
    """The weights are measured from the row's maximum and never divided by their sum."""
    scores = scores_of(query, key, visible)
    row_max = scores.amax(dim=-1, keepdim=True)
    return torch.exp(scores - row_max.masked_fill(row_max == -math.inf, 0.0)) @ value


def heads_forgotten(attend, names="qkv"):
    """Formulas of a missing head offset: `attend(query, key, value, ...)` with head 0 of some for every head."""

    def forgetting(chosen):
        def result(query, key, value, *rest):
            if query.shape[0] < 2:
                return attend(query, key, value, *rest)
            matrices = [
                matrix[:1].expand_as(matrix) if name in chosen else matrix
                for name, matrix in zip("qkv", (query, key, value))
            ]
            return attend(*matrices, *rest)

        return result

    choices = ("q", "k", "v", "kv", "qk", "qkv")
    return tuple(forgetting(chosen) for chosen in choices if set(chosen) <= set(names))


def stored_in_one_head(attend):
    """A slip's formula of a missing head offset in the store: the last head's output in the first one's place."""

    def result(*args):
        output = attend(*args)
        only = torch.full_like(output, math.nan)
        only[0] = output[-1]
        return only

    return result


def ordered_rows(draw, heads: int, query_length: int, key_length: int, head_dim: int, descending: bool = False):
    """Query, key, value whose scores grow (or fall) steadily along every row, from about -15 to 15."""
    direction = draw.normal(head_dim)
    direction = direction / direction.norm()
    ramp = torch.linspace(-15, 15, key_length)
    ramp = ramp.flip(0) if descending else ramp
    query = math.sqrt(head_dim) * direction + 0.02 * draw.normal(heads, query_length, head_dim)
    key = ramp[:, None] * direction + 0.02 * draw.normal(heads, key_length, head_dim)
    return query, key, draw.normal(heads, key_length, head_dim)


def length_first(tensor: torch.Tensor) -> torch.Tensor:
    """The same [heads, length, head_dim] values, stored as [length, heads, head_dim], as models keep them."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def close_to(got, right) -> bool:
    """Whether a result is this one up to what 16 bits round off."""
    return (
        isinstance(got, torch.Tensor)
        and got.shape == right.shape
        and torch.allclose(got.double(), right.double(), rtol=2e-2, atol=2e-2)
    )
