"""Drawn pages of a cache, and the tables that name them.

Layouts are the library's: key_pages, value_pages [pages, key_heads, page_size, head_dim]; block_tables int32 [batch,
max_blocks], -1 where a sequence has no page; lengths int32 [batch].
"""

from __future__ import annotations

import math

import torch


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
