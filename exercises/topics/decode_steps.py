"""One query against a sequence's keys, as decode kernels compute it: the steps that their meanings call.

A program takes a query head, or a group that shares a KV head, of one sequence, and walks over its keys or over a split
of them, a tile at a time. The keys lie in a cache or in pages. All programs are computed at once, in float32, so that a
meaning overflows where a kernel does: tensors are [splits, batch, key_heads, group, ...], with one split where nothing
is split. `decode_slips.py` has the rows of edits.
"""

from __future__ import annotations

import torch

from exercises.topics.pointers import load, put
from exercises.topics.running import INF, start, step


def heads_of(query_heads, key_heads):
    """The query heads of each program [key_heads, group], and the KV head that they read [key_heads]."""
    group = query_heads // key_heads
    return torch.arange(query_heads).view(key_heads, group), torch.arange(key_heads)


def queries(query, heads):
    """What the programs load of query [batch, query_heads, head_dim]: [batch, key_heads, group, head_dim]."""
    rows = torch.arange(len(query))[:, None, None] * query.stride(0) + heads * query.stride(1)
    return load(query, rows[..., None] + torch.arange(query.shape[2])).float()


def tiles(first, last, tile):
    """The positions [splits, batch, keys] of the tiles that begin at first and reach last [splits, batch]."""
    steps = max(1, -(-int((last - first).max()) // tile))
    return first[..., None] + torch.arange(steps * tile)


def pages_of(tables, positions, mask, last, page_size, tile):
    """The page of each position [splits, batch, keys], as the table of its sequence says."""
    looked_up = positions
    blocks = looked_up // page_size
    rows = torch.arange(len(tables))[:, None] * tables.stride(0)
    return load(tables, rows + blocks, mask).long()


def rows_at(tensor, mask, of_outer, of_head, of_row, outer, key_head, inner):
    """Keys or values [splits, batch, key_heads, keys, head_dim], by three strides.

    outer: the sequence or page of each key, inner: its row there, [splits, batch, keys].
    """
    rows = (outer * of_outer + inner * of_row)[:, :, None] + key_head[:, None] * of_head
    return load(tensor, rows[..., None] + torch.arange(tensor.shape[3]), mask[:, :, None, :, None])


def of_all_rows(tile):
    """One maximum for the rows of a group's tile, of which those that are no heads score 0."""
    rows = tile.shape[-2]
    return tile.amax((-2, -1)).clamp(min=-INF if rows >= 16 and rows & (rows - 1) == 0 else 0.0)[..., None]


def walk(query, keys, values, present, first, last, tile, narrow):
    """The maximum, the sum and the accumulator after all tiles.

    present: which keys count; a program makes a step for each tile that begins between first and last [splits, batch].
    narrow: the dtype to which the weights are cast for the product with the values.
    """
    scores = query @ keys.float().mT * query.shape[-1] ** -0.5  # [splits, batch, key_heads, group, keys]
    scores = torch.where(present[:, :, None, None], scores, -INF)
    running_max, running_sum = start(scores.shape[:-1])
    accumulator = torch.zeros(*scores.shape[:-1], values.shape[-1])
    for begin in range(0, scores.shape[-1], tile):
        here = slice(begin, begin + tile)
        new_max, new_sum, weights, rescale = step(scores[..., here], running_max, running_sum, narrow)
        product = weights.to(narrow).float() @ values[..., here, :].float()
        added = accumulator * rescale[..., None] + product
        walks = (first + begin < last)[..., None, None]  # those whose loop comes here
        running_max, running_sum = torch.where(walks, new_max, running_max), torch.where(walks, new_sum, running_sum)
        accumulator = torch.where(walks[..., None], added, accumulator)
    return running_max, running_sum, accumulator


def stored(output, heads, like):
    """A new tensor like `like`, into which every program has stored its part of [batch, key_heads, group, head_dim]."""
    result = torch.full(like.shape, torch.nan, dtype=like.dtype)
    rows = torch.arange(len(like))[:, None, None] * result.stride(0) + heads * result.stride(1)
    put(result, rows[..., None] + torch.arange(like.shape[2]), output)
    return result


def stored_parts(output, lse, heads, like):
    """Outputs [splits, batch, query_heads, head_dim] and log-sum-exps, without head_dim, in new float32 tensors."""
    splits, batch, head_dim = len(output), len(like), like.shape[2]
    outputs, lses = torch.full((splits, *like.shape), torch.nan), torch.full((splits, *like.shape[:2]), torch.nan)
    place = torch.arange(splits)[:, None] * batch + torch.arange(batch)
    rows = place[..., None, None] * heads.numel() + heads
    rows, output, lse = (part.transpose(1, 2) for part in (rows, output, lse))  # the grid is (splits, KV heads, batch)
    put(outputs, rows[..., None] * head_dim + torch.arange(head_dim), output)
    put(lses, rows, lse)
    return outputs, lses
