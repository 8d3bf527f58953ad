"""Caches and pages for the contracts of decode exercises: lengths, layouts, and what unused memory holds."""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.contract import Level
from course_lib.checker.specification.layouts import CONTIGUOUS, beyond_32_bits, dimensions_exchanged, expanded, gaps
from exercises.topics.attention_inputs import MAGNITUDES, far_below
from exercises.topics.decode import cached


def by_head(draw, *sizes):
    """The query heads of a group by turns 60 above and 60 below 0."""
    query, key, value = far_below(-60.0)(draw, *sizes)
    sign = 1.0 - 2.0 * (torch.arange(query.shape[1]) % 2)
    return query * sign[:, None], key, value


SCORES = (*MAGNITUDES, Level(by_head, "query heads whose scores lie 120 apart"))


def tokens_first(draw, tensor):
    """The second dimension, the heads, stored inside of the third, with a gap after each row."""
    return gaps(draw, tensor.transpose(1, 2)).transpose(1, 2)


def layouts(name: str, *, expandable: bool = True) -> tuple[Level, ...]:
    """The layouts of a cache or a pool that "any strides but the last, which is 1" allows."""
    return (
        CONTIGUOUS,
        Level(gaps, f"{name} with gaps"),
        Level(tokens_first, f"{name} stored token by token"),
        Level(dimensions_exchanged, f"{name} with its first two dimensions exchanged in memory"),
        *((Level(expanded, f"{name} expanded over dimension 0"),) if expandable else ()),
    )


def lengths(*levels: tuple[int, ...]) -> tuple[Level, ...]:
    """Lengths of the sequences of a batch, as levels."""
    return tuple(Level(level, f"lengths {', '.join(map(str, level))}") for level in levels)


UNUSED = (Level(None, ""), Level(math.nan, "NaN where no token is"))


def fits(*, lengths, unused=None, query_layout=None, key_layout=None, value_layout=None, **others) -> bool:
    """Whether unused memory can hold NaN: not where all sequences share one and the same cache."""
    return not (unused is not None and expanded in (key_layout, value_layout))


def far_below_finite(query, keys, values, *rest):
    """The same sizes with a score of -1e20 for the first token and -2e20 for others: below all that might hide a key.

    rest: lengths, or block tables [batch, max_blocks] and lengths, and more. Such scores are all rounding, but for a
    weight of 1 and others of 0, or of equals, which are exact.
    """
    query, keys = torch.full_like(query, 1e10), torch.full_like(keys, -2e10 / math.sqrt(query.shape[-1]))
    first = rest[0][:, 0].long() if rest[0].dim() == 2 else torch.arange(len(query))
    keys[first, :, 0] /= 2
    return query, keys, values, *rest


def caches_beyond_32_bits(draw, *options):
    """Cases whose caches reach beyond 2³¹ elements from head to head, and from token to token.

    options: the arguments behind the lengths.
    """
    query, *caches, counts = cached(draw, 3, 3, 16, [5], 6)
    cases = beyond_32_bits(draw, "heads", caches, counts, *options, before=(query,), dimension=1)
    query, *caches, counts = cached(draw, 2, 1, 16, [5], 6)
    return cases + beyond_32_bits(draw, "tokens", caches, counts, *options, before=(query,), dimension=2)


def laid_apart(draw, query, key, value, *rest):
    """The same arguments with all strides their own, for a case in which each of them is seen.

    The query's heads lie outside of its sequences: an output that is laid out like it is not contiguous.
    """
    return dimensions_exchanged(draw, query), gaps(draw, key), tokens_first(draw, value), *rest


def _tensors(draw, key_heads, group, head_dim, lengths, capacity, dtype, scores):
    """Query [batch, query_heads, head_dim], and keys and values [batch, key_heads, capacity, head_dim]."""
    batch = len(lengths)
    query, key, value = scores(draw, batch * key_heads, group, max(capacity, 1), head_dim)
    query = query.reshape(batch, key_heads * group, head_dim).to(dtype)
    key, value = (part.unflatten(0, (batch, key_heads))[:, :, :capacity].to(dtype) for part in (key, value))
    return query, key, value


def cache(
    draw,
    *,
    key_heads,
    group,
    head_dim,
    lengths,
    room,
    dtype,
    scores,
    unused,
    query_layout,
    key_layout,
    value_layout,
    **options,
):
    """Query, key cache, value cache, lengths and the options: what a contract's `make` wants.

    room: slots of the cache behind the longest sequence.
    """
    capacity = max(1, max(lengths) + room)
    query, *caches = _tensors(draw, key_heads, group, head_dim, lengths, capacity, dtype, scores)
    if unused is not None:
        for part in caches:
            for index, length in enumerate(lengths):
                part[index, :, length:] = unused
    key, value = caches
    counts = torch.tensor(lengths, dtype=torch.int32)
    return query_layout(draw, query), key_layout(draw, key), value_layout(draw, value), counts, *options.values()


def pages(
    draw,
    *,
    key_heads,
    group,
    head_dim,
    lengths,
    page_size,
    spare,
    dtype,
    scores,
    unused,
    query_layout,
    key_layout,
    value_layout,
    table_layout=None,
    **options,
):
    """Query, key pages, value pages, tables, lengths and the options: what a contract's `make` wants.

    Pages are handed out in random order; page 0 and some others are free.

    spare: entries of -1 behind the longest table.
    """
    needed = [-(-length // page_size) for length in lengths]
    query, key, value = _tensors(
        draw, key_heads, group, head_dim, lengths, max(max(needed), 1) * page_size, dtype, scores
    )
    pool_size = sum(needed) + 3
    order = [1 + int(page) for page in draw.permutation(pool_size - 1)]
    tables = torch.full((len(lengths), max(1, max(needed) + spare)), -1, dtype=torch.int32)
    pools = [draw.normal(pool_size, key_heads, page_size, head_dim, dtype=dtype) for _ in range(2)]
    if unused is not None:
        pools = [torch.full_like(pool, unused) for pool in pools]
    for sequence, length in enumerate(lengths):
        for block in range(needed[sequence]):
            tables[sequence, block] = page = order.pop()
            here = slice(block * page_size, min((block + 1) * page_size, length))
            for pool, part in zip(pools, (key, value)):
                pool[page, :, : here.stop - here.start] = part[sequence, :, here]
    if table_layout is not None:
        tables = table_layout(draw, tables)
    counts = torch.tensor(lengths, dtype=torch.int32)
    key, value = key_layout(draw, pools[0]), value_layout(draw, pools[1])
    return query_layout(draw, query), key, value, tables, counts, *options.values()
