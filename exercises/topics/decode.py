"""Decode attention, exactly and with its classic slips: for chapters 07 and 08, where one query meets a cache.

Layouts are the library's: query [batch, query_heads, head_dim]; key_cache, value_cache [batch, key_heads, capacity,
head_dim]; lengths [batch] of int32, the tokens that each sequence has in its cache. Everything works in the dtype
given, one sequence at a time and with all its scores in view.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exercises.topics.attention import attention, log_sum_exp, prescaled, rounded, rounded_log_sum_exp

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


def decode(query, key_cache, value_cache, lengths, *, scale=None, **slips) -> torch.Tensor:
    """softmax(scale · q · Kᵀ) · V of every query head, [batch, query_heads, head_dim]; the truth, in float64."""
    return each_sequence(
        lambda q, k, v: attention(q, k, v, scale=scale), query, key_cache, value_cache, lengths, **slips
    )


def decode_lse(query, key_cache, value_cache, lengths, **slips) -> torch.Tensor:
    """log Σ exp of each query's scaled scores, [batch, query_heads]; minus infinity for an empty sequence."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return each_sequence(
        lambda q, k, v: log_sum_exp(q, k)[..., None],
        query.to(accurate),
        key_cache,
        value_cache,
        lengths,
        **{"empty": -math.inf, **slips},
    )[..., 0]


# ------------------------------------------------------------------------ as good, rounded otherwise: for tolerances


def decode_prescaled(query, key_cache, value_cache, lengths) -> torch.Tensor:
    """The same meaning with the scale and log2 e folded into the query."""
    return each_sequence(prescaled, query, key_cache, value_cache, lengths)


def decode_rounded(query, key_cache, value_cache, lengths) -> torch.Tensor:
    """The same meaning with scores off by as much as sums in another order may be."""
    return each_sequence(rounded, query, key_cache, value_cache, lengths)


def decode_lse_rounded(query, key_cache, value_cache, lengths) -> torch.Tensor:
    """The log-sum-exp with scores too large by as much as sums in another order may make them."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    return each_sequence(
        lambda q, k, v: rounded_log_sum_exp(q, k)[..., None],
        query.to(accurate),
        key_cache,
        value_cache,
        lengths,
        empty=-math.inf,
    )[..., 0]


# ------------------------------------------------------------------------------------------- what a slip depends on


def whole_cache(key_cache, lengths) -> torch.Tensor:
    """The slip: every sequence taken to be as long as the cache has room."""
    return torch.full_like(lengths, key_cache.shape[2])


def tail_scored(query, key_cache, value_cache, lengths, key_rows: int) -> torch.Tensor:
    """The slip: the last tile's missing keys are loaded as zeros and counted, each with a score of 0."""

    def padded(q, k, v):
        missing = (0, 0, 0, -k.shape[1] % key_rows)
        return attention(q, torch.nn.functional.pad(k, missing), torch.nn.functional.pad(v, missing))

    return each_sequence(padded, query, key_cache, value_cache, lengths)


def whole_tiles(lengths, key_rows: int) -> torch.Tensor:
    """The slip: lengths rounded down to whole tiles; the keys of the last, partly filled one are dropped."""
    return lengths // key_rows * key_rows


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
