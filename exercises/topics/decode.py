"""Decode attention, exactly and with its classic slips: for chapters 07 and 08, where one query meets a cache.

Layouts are the library's: query [batch, query_heads, head_dim]; key_cache, value_cache [batch, key_heads, capacity,
head_dim]; lengths [batch] of int32, the tokens that each sequence has in its cache. Everything works in the dtype
given, one sequence at a time and with all its scores in view.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exercises.topics.attention import (
    attention,
    log_sum_exp,
    prescaled,
    rounded,
    rounded_log_sum_exp,
    scores_of,
)

# ------------------------------------------------------------------------------------------------------- head maps


def by_division(query_heads: int, key_heads: int) -> torch.Tensor:
    """The KV head of each query head, int64 [query_heads]: neighbours share one."""
    return torch.arange(query_heads) // (query_heads // key_heads)


def by_modulo(query_heads: int, key_heads: int) -> torch.Tensor:
    """The slip: neighbours take different KV heads, and every key_heads-th query head shares one."""
    return torch.arange(query_heads) % key_heads


def by_count(query_heads: int, key_heads: int) -> torch.Tensor:
    """The slip: divided by the number of KV heads instead of the group's size, and held inside the cache."""
    return (torch.arange(query_heads) // key_heads).clamp(max=key_heads - 1)


def first_head(query_heads: int, key_heads: int) -> torch.Tensor:
    """The slip: every query head reads KV head 0."""
    return torch.zeros(query_heads, dtype=torch.int64)


# --------------------------------------------------------------------------------------------------- the operation


def each_sequence(
    function: Callable,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    heads: Callable = by_division,
    shift: int = 0,
    empty: float = 0.0,
) -> torch.Tensor:
    """`function(query [query_heads, 1, head_dim], key, value [query_heads, length, head_dim])` of each sequence.

    Args:
        heads: the KV head of each query head, as `by_division`.
        shift: added to every length, then held between 0 and the capacity: 1 reads a slot that holds no token.
        empty: what a sequence without a token gives.
    """
    chosen = heads(query.shape[1], key_cache.shape[1])
    outputs = []
    for index, length in enumerate((lengths + shift).clamp(0, key_cache.shape[2]).tolist()):
        keys, values = (cache[index, chosen, : max(1, length)] for cache in (key_cache, value_cache))
        output = function(query[index][:, None], keys, values)[:, 0]
        outputs.append(output if length else torch.full_like(output, empty))
    return torch.stack(outputs)


def decode(query, key_cache, value_cache, lengths) -> torch.Tensor:
    """softmax(q · Kᵀ / √head_dim) · V of every query head, [batch, query_heads, head_dim]; the truth, in float64."""
    return each_sequence(attention, query, key_cache, value_cache, lengths)


def decode_lse(query, key_cache, value_cache, lengths) -> torch.Tensor:
    """log Σ exp of each query's scaled scores, [batch, query_heads]; minus infinity for an empty sequence."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return each_sequence(
        lambda q, k, v: log_sum_exp(q, k)[..., None],
        query.to(accurate),
        key_cache,
        value_cache,
        lengths,
        empty=-math.inf,
    )[..., 0]


# ------------------------------------------------------------------------ as good, rounded otherwise: for tolerances


def attend(query, key, value):
    """Output and log-sum-exp of one query for each head: [heads, 1, head_dim] and [heads, 1], in float32 at least."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return attention(query, key, value).to(accurate), log_sum_exp(query, key)


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


MOST_AWRY = 1e-3  # by how much a log-sum-exp may be wrong, of scores up to 8,000


def attend_by_log_sum_exp(query, key, value):
    """The same meaning as exp(score - log-sum-exp), with that a rounding too large: all weights err alike.

    Where a rounding is so large that no weight is left, as with scores near -1e20, this form is not as good. It errs by
    no more than `MOST_AWRY`: what it gave would allow any result.
    """
    accurate = torch.promote_types(query.dtype, torch.float32)
    scores = scores_of(query.to(accurate), key.to(accurate))
    lse = torch.logsumexp(scores, dim=-1)
    awry = torch.finfo(torch.float32).eps * scores.abs().amax(dim=-1)
    weights = torch.exp(scores - (lse + awry.clamp(max=MOST_AWRY))[..., None])
    return weights @ value.to(accurate), lse + awry


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


AS_GOOD = (
    attend_prescaled,
    attend_rounded,
    attend_by_log_sum_exp,
    *(attend_strayed(period) for period in (2, 4, 8, 16, 32, 64)),
)


def decode_with(attend: Callable) -> Callable:
    """`decode` with what is done for one sequence replaced, a function like `attend`."""

    def plain(query, key_cache, value_cache, lengths):
        output = each_sequence(lambda q, k, v: attend(q, k, v)[0], query, key_cache, value_cache, lengths)
        return output.to(query.dtype)

    return plain


PLAIN = tuple(decode_with(attend) for attend in AS_GOOD)


# ------------------------------------------------------------------------------------------------ pages, and bytes


def gather_pages(pages: torch.Tensor, block_tables: torch.Tensor) -> torch.Tensor:
    """A paged cache as a contiguous one: [pages, key_heads, page_size, head_dim] and [batch, max_blocks] to
    [batch, key_heads, max_blocks · page_size, head_dim]. Entries below 0 (blocks that a sequence lacks) give page 0."""
    chosen = pages[block_tables.long().clamp(min=0)]  # [batch, max_blocks, key_heads, page_size, head_dim]
    return chosen.transpose(1, 2).flatten(2, 3)


def decode_bytes(query, key_cache, lengths) -> int:
    """Bytes that decode must move: every query, every key and value in use and every length read once, and the output
    written."""
    tokens = int(lengths.clamp(0, key_cache.shape[2]).sum())
    elements = 2 * query.numel() + 2 * tokens * key_cache.shape[1] * key_cache.shape[3]
    return elements * query.element_size() + lengths.numel() * lengths.element_size()


# ------------------------------------------------------------------------------------------------------ drawn inputs


def cached(draw, query_heads, key_heads, head_dim, lengths, capacity, *, dtype=torch.float32, score=1.0, unused=None):
    """Query, key cache, value cache and lengths of one step of decode, ready as a case's arguments.

    Args:
        lengths: tokens of each sequence, a sequence of int.
        score: standard deviation of the scaled scores.
        unused: what the slots behind a sequence's tokens hold; None: numbers like those of the tokens.
    """
    size, batch = math.sqrt(score), len(lengths)
    query = draw.normal(batch, query_heads, head_dim, dtype=dtype, scale=size)
    key_cache = draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype, scale=size)
    value_cache = draw.normal(batch, key_heads, capacity, head_dim, dtype=dtype)
    if unused is not None:
        for index, length in enumerate(lengths):
            key_cache[index, :, length:] = unused
            value_cache[index, :, length:] = unused
    return query, key_cache, value_cache, torch.tensor(lengths, dtype=torch.int32)


def tokens_first(cache: torch.Tensor) -> torch.Tensor:
    """The same [batch, key_heads, capacity, head_dim] values, stored as [batch, capacity, key_heads, head_dim]."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)
