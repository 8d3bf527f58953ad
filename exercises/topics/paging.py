"""Attention to a paged cache, exactly and with its classic slips; and drawn pages.

Layouts are the library's: key_pages, value_pages [pages, key_heads, page_size, head_dim]; block_tables int32 [batch,
max_blocks], -1 where a sequence has no page; lengths int32 [batch]. A slip chooses other rows of the pool: `rows` maps
the positions of a sequence to rows of the pool seen as [pages · key_heads · page_size, head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from exercises.topics.attention import attention


def row_of(table, positions, head, shape):
    """Where the tokens at `positions` lie, as rows of a contiguous pool of this shape."""
    _, key_heads, page_size, _ = shape
    return (table[positions // page_size] * key_heads + head) * page_size + positions % page_size


def consecutive(table, positions, head, shape):
    """The slip: the pages after the first one are taken to follow it in memory."""
    return row_of(table[0] + torch.arange(len(table)), positions, head, shape)


def not_multiplied(table, positions, head, shape):
    """The slip: a page's number is taken as that of its first row, not multiplied by the page's size."""
    return table[positions // shape[2]] + head * shape[2] + positions % shape[2]


def heads_forgotten(table, positions, head, shape):
    """The slip: a page is taken to have page_size rows, and not as many for each head."""
    return (table[positions // shape[2]] + head) * shape[2] + positions % shape[2]


def first_head(table, positions, head, shape):
    """The slip: every head reads the keys of head 0."""
    return row_of(table, positions, 0, shape)


def paged_decode(
    query,
    key_pages,
    value_pages,
    block_tables,
    lengths,
    *,
    attend: Callable = attention,
    rows: Callable = row_of,
    value_rows: Callable | None = None,
    tables: Callable = lambda tables, sequence: tables[sequence],
    read: Callable = lambda length, page_size, blocks: length,
    empty: float = 0.0,
    none_read: float = 0.0,
):
    """Attention of one query per head and sequence, [batch, heads, head_dim]; the truth, in float64, without a slip.

    Args:
        attend: `attend(query [1, 1, head_dim], key [1, length, head_dim], value)`.
        rows, value_rows: where the keys lie, and the values (as the keys do).
        tables: the table row that a sequence uses.
        read: how many tokens are read, from a sequence's length, the page size and the table's width.
        empty: what a sequence without a token gives.
        none_read: what a sequence gives that has tokens, none of which are read.

    Returns None where a slip reads outside the pool or from an entry that is no page: then memory decides. Likewise
    for a slip in what a row's place is computed from, where the pools are not contiguous.
    """
    shape, width = key_pages.shape, block_tables.shape[1]
    if rows in (not_multiplied, heads_forgotten) and not (key_pages.is_contiguous() and value_pages.is_contiguous()):
        return None
    flat = [pages.reshape(-1, shape[3]) for pages in (key_pages, value_pages)]
    output = torch.full_like(query, empty)
    for sequence, length in enumerate(lengths.tolist()):
        count = read(length, shape[2], width)
        if count <= 0:
            output[sequence] = none_read if length else empty
            continue
        if count > width * shape[2]:
            return None
        table, positions = tables(block_tables, sequence).long(), torch.arange(count)
        if bool((table[positions // shape[2]] < 0).any()):
            return None
        for head in range(query.shape[1]):
            chosen = [choose(table, positions, head, shape) for choose in (rows, value_rows or rows)]
            if any(bool((index < 0).any()) or bool((index >= len(flat[0])).any()) for index in chosen):
                return None
            key, value = (part[index][None] for part, index in zip(flat, chosen))
            output[sequence, head] = attend(query[sequence, head][None, None], key, value)[0, 0]
    return output


def whole_pages(length, page_size, blocks):
    """The slip: the last page is read whole, whatever it holds."""
    return -(-length // page_size) * page_size


def one_more(length, page_size, blocks):
    """The slip: one token too many, but not past the last page."""
    return min(length + 1, whole_pages(length, page_size, blocks))


# ------------------------------------------------------------------------------------------------------ drawn inputs


def page_tables(draw, lengths, page_size, pages, spare=1):
    """Tables in random order, int32 [batch, max_blocks]; `spare` columns more than the longest needs, of -1."""
    needed = [-(-length // page_size) for length in lengths]
    order, width = draw.permutation(pages).tolist(), max(needed) + spare
    tables = [[order.pop() for _ in range(count)] + [-1] * (width - count) for count in needed]
    return torch.tensor(tables, dtype=torch.int32)


def paged(draw, heads, head_dim, lengths, page_size, *, pages=None, dtype=torch.float32, score=1.0, spare=1):
    """Query, key pages, value pages, tables and lengths of one step of decode, ready as a case's arguments.

    Pages that no sequence holds, and the ends of last pages, are filled with numbers like those of the tokens.

    Args:
        pages: how many there are; three more than are needed by default.
        score: standard deviation of the scaled scores.
        spare: entries of -1 behind the longest table.
    """
    needed = sum(-(-length // page_size) for length in lengths)
    pages, size = pages or needed + 3, math.sqrt(score)
    query = draw.normal(len(lengths), heads, head_dim, dtype=dtype, scale=size)
    key_pages = draw.normal(pages, heads, page_size, head_dim, dtype=dtype, scale=size)
    value_pages = draw.normal(pages, heads, page_size, head_dim, dtype=dtype)
    tables = page_tables(draw, lengths, page_size, pages, spare)
    return query, key_pages, value_pages, tables, torch.tensor(lengths, dtype=torch.int32)


def tokens_first(pages: torch.Tensor) -> torch.Tensor:
    """The same [pages, key_heads, page_size, head_dim] values, stored as [pages, page_size, key_heads, head_dim]."""
    return pages.transpose(1, 2).contiguous().transpose(1, 2)
