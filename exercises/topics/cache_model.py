"""Rows written into a cache as a kernel writes them: behind a position (5.3), or into pages (6.4).

Offsets are in elements, by the tensors' real strides. Programs run in the interpreter's order, so where several write
to one place the last one stays.
"""

from __future__ import annotations

import math

import torch

from exercises.topics.pointers import load, put

TILE = 16  # BLOCK_T of the append kernel, as its launcher sets it


def append(key, value, key_cache, value_cache, positions):
    copy_rows(key, key.stride(), key_cache, key_cache.stride(), positions)
    copy_rows(value, value.stride(), value_cache, value_cache.stride(), positions)


def copy_rows(new, source, cache, target, positions):
    """One launch: programs (tile, head, batch) copy tiles of TILE rows."""
    batch, heads, count, width = new.shape
    tiles = -(-count // TILE)
    programs = tiles, heads, batch
    tile, head, sequence, row, column = indices(*programs, TILE, width)
    tokens = tile * TILE + row
    start = load(positions, sequence).long()
    slots = start + tokens
    inside = tokens < count
    offsets = sequence * source[0] + head * source[1] + tokens * source[2] + column
    rows = load(new, offsets, inside, math.nan)  # masked lanes of a load without `other=` are NaN in a check
    offsets = sequence * target[0] + head * target[1] + slots * target[2] + column
    put(memory_of(cache), offsets, rows, inside)


def append_to_pages(key, value, key_pages, value_pages, slots):
    copy_to_pages(key, key.stride(), key_pages, key_pages.stride(), slots)
    copy_to_pages(value, value.stride(), value_pages, value_pages.stride(), slots)


def copy_to_pages(new, source, pool, target, slots):
    """All programs (token, head) of one of the two copies."""
    (count, heads, head_dim), size = new.shape, pool.shape[2]
    programs = count, heads
    token, head, column = indices(*programs, 1 << (head_dim - 1).bit_length())
    slot = slots[token]
    present = slot >= 0
    page, offset = torch.div(slot, size, rounding_mode="trunc"), torch.fmod(slot, size)  # as compiled code divides
    inside = present & (column < head_dim)
    rows = load(new, token * source[0] + head * source[1] + column, inside)
    offsets = page * target[0] + head * target[1] + offset * target[2] + column
    put(memory_of(pool), offsets, rows, inside)


def indices(*sizes):
    """Of each axis the index, [*sizes]."""
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")


def memory_of(tensor):
    """A tensor's memory from its first element to its last, in one dimension."""
    return tensor.as_strided((1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride())),), (1,))


# ------------------------------------------------------------------------------------------ what edits alone call


def packed(tensor):
    """The strides of a contiguous tensor of this shape."""
    return torch.empty(tensor.shape, device="meta").stride()


def packed_at(tensor, place):
    """The tensor's strides, but for one: there as if it were contiguous."""
    return replaced_at(tensor, place, packed(tensor)[place])


def replaced_at(tensor, place, stride):
    """The tensor's strides, but for one."""
    return *tensor.stride()[:place], stride, *tensor.stride()[place + 1 :]


def is_copied(tensor, kept):
    """Whether `.reshape()` to a tensor whose first dimensions are one copies it; it keeps those from `kept` on."""
    return tensor.reshape(-1, *tensor.shape[kept:]).data_ptr() != tensor.data_ptr()
