"""Decode over caches in fewer bits, and appending to them, as plainly as PyTorch can say it: what the kernels mean.

Attention is that of the 16-bit caches, over what the codes stand for, in the dtype of the query: float64 for an oracle.
"""

import torch

from course_lib.kernels.decode.reference import decode_attention_reference, gather_pages, ragged_reference
from course_lib.kernels.quantised.formats import (
    GROUP,
    Int4Cache,
    quantise_e4m3_reference,
    quantise_int4_keys,
    quantise_int4_values,
    restored_e4m3,
    restored_int4_keys,
    restored_int4_values,
)


def fp8_decode_reference(
    query, key_cache, value_cache, lengths, *, key_scales, value_scales, scale=None, return_lse=False
):
    """One query token [batch, query_heads, head_dim] against e4m3 caches [batch, key_heads, capacity, head_dim].

    key_scales, value_scales: [], [key_heads] or [batch, key_heads].
    """
    key, value = (restored_e4m3(codes, scales, query.dtype)
                  for codes, scales in ((key_cache, key_scales), (value_cache, value_scales)))  # fmt: skip
    return decode_attention_reference(query, key, value, lengths, scale=scale, return_lse=return_lse)


def paged_fp8_decode_reference(
    query, key_pages, value_pages, block_tables, lengths, *, key_scales, value_scales, scale=None, return_lse=False
):
    """`fp8_decode_reference` for [pages, key_heads, page_size, head_dim]; scales by page are [pages, key_heads]."""
    key, value = (restored_e4m3(codes, scales, query.dtype)
                  for codes, scales in ((key_pages, key_scales), (value_pages, value_scales)))  # fmt: skip
    caches = [[gather_pages(pages, table, length) for pages in (key, value)]
              for table, length in zip(block_tables, lengths.tolist())]  # fmt: skip
    return ragged_reference(query, torch.arange(query.shape[0] + 1), caches, scale, return_lse)


def int4_decode_reference(query, cache: Int4Cache, lengths, *, block_tables=None, scale=None, return_lse=False):
    """One query token [batch, query_heads, head_dim] against an INT4 cache: its groups, then its window.

    block_tables: integers [batch, max_blocks], the page of each 64 tokens; None for a contiguous cache.
    """
    caches = [whole_sequence(cache, sequence, length, block_tables, query.dtype)
              for sequence, length in enumerate(lengths.tolist())]  # fmt: skip
    return ragged_reference(query, torch.arange(query.shape[0] + 1), caches, scale, return_lse)


def whole_sequence(cache: Int4Cache, sequence: int, length: int, block_tables, dtype) -> list[torch.Tensor]:
    """Keys and values [key_heads, length, head_dim] of one sequence, restored, the window's tokens as they are."""
    whole = length // GROUP
    blocks = sequence_blocks(cache, sequence, block_tables)[:whole]
    parts = []
    for restore, window in ((restored_int4_keys, cache.key_window), (restored_int4_values, cache.value_window)):
        tokens = restore(of_blocks(cache).quantised(lambda part: part[blocks]), dtype)
        tokens = tokens.transpose(0, 1).flatten(1, 2)  # [key_heads, whole * 64, head_dim]
        parts.append(torch.cat([tokens, window[sequence, :, : length % GROUP].to(dtype)], dim=1))
    return parts


def of_blocks(cache: Int4Cache) -> Int4Cache:
    """The cache as pages, [pages, key_heads, ...], whichever it is: of a contiguous one block g of sequence b is page
    b · capacity / 64 + g."""
    if cache.paged:
        return cache
    return cache.quantised(lambda part: part.transpose(1, 2).flatten(0, 1))


def sequence_blocks(cache: Int4Cache, sequence: int, block_tables) -> torch.Tensor:
    """The pages of `of_blocks` that a sequence has, int64."""
    if block_tables is not None:
        return block_tables[sequence].long()
    blocks = cache.key_codes.shape[2]
    return torch.arange(sequence * blocks, (sequence + 1) * blocks, device=cache.key_codes.device)


def append_to_fp8_cache_reference(key, value, key_cache, value_cache, positions, *, key_scales, value_scales):
    """The plain PyTorch meaning of `append_to_fp8_cache`."""
    for new, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        codes = quantise_e4m3_reference(new, scales)
        for sequence, position in enumerate(positions.tolist()):
            cache[sequence, :, position : position + new.shape[2]] = codes[sequence]


def append_to_fp8_pages_reference(key, value, key_pages, value_pages, slot_mapping, *, key_scales, value_scales):
    """The plain PyTorch meaning of `append_to_fp8_pages`."""
    page_size = key_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        for new, pages, scales in ((key, key_pages, key_scales), (value, value_pages, value_scales)):
            if slot >= 0:
                scale = scales[slot // page_size] if scales.dim() == 2 else scales
                codes = quantise_e4m3_reference(new[token][None, :, None], scale)  # [1, key_heads, 1, head_dim]
                pages[slot // page_size, :, slot % page_size] = codes[0, :, 0]


def append_to_int4_reference(key, value, cache: Int4Cache, positions, *, block_tables=None):
    """The plain PyTorch meaning of `append_to_int4_cache` and, with block_tables, of `append_to_int4_pages`.

    A token at a time. It goes into the window; its values are quantised at once, its keys when they complete a group.
    """
    for sequence, position in enumerate(positions.tolist()):
        blocks = sequence_blocks(cache, sequence, block_tables).tolist()
        for token in range(key.shape[2]):
            block, place = blocks[(position + token) // GROUP], (position + token) % GROUP
            cache.key_window[sequence, :, place] = key[sequence, :, token]
            cache.value_window[sequence, :, place] = value[sequence, :, token]
            values = quantise_int4_values(value[sequence, :, token])
            for held, new in zip(cache[3:6], values):
                held_block(held, block, cache.paged)[:, place] = new
            if place == GROUP - 1:
                for held, new in zip(cache[:3], quantise_int4_keys(cache.key_window[sequence])):
                    held_block(held, block, cache.paged)[:] = new


def held_block(part: torch.Tensor, block: int, paged: bool) -> torch.Tensor:
    """Block `block` of `of_blocks`, [key_heads, ...], as a view that can be written."""
    if paged:
        return part[block]
    return part[block // part.shape[2], :, block % part.shape[2]]
