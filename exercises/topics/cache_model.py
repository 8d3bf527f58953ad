"""Rows written into a cache as a kernel writes them: behind a position, or into pages; with what can go wrong.

Offsets are in elements, by the tensors' real strides. Programs run in the interpreter's order, so where several write
to one place the last one stays. A slip's id may end in the tensor that it is made with: `head_ignored__value`.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Model, Slip, Slips
from exercises.topics.memory import load

TILE = 16  # BLOCK_T of the append kernel, as its launcher sets it
PAGES = (4, 8, 16, 32)  # sizes that a kernel may be written for, in 6.4
WIDTHS = (16, 32, 64, 128)  # of a head, in 5.3
STYLES = (("undefined_lanes",), ())  # masked lanes of a load without `other=` are NaN in a check, else 0


def append_model(slips: tuple[Slip, ...]) -> Model:
    """The model of `append_to_cache(key, value, key_cache, value_cache, positions)`, a launch for each cache."""

    def compute(slips: Slips, key, value, key_cache, value_cache, positions):
        if slips("nothing_written"):
            return
        if slips("keys_as_values"):
            value = key
        if slips("caches_exchanged"):
            key_cache, value_cache = value_cache, key_cache
        _append(slips, "key", key, key_cache, positions, key, key_cache)
        if not slips("values_forgotten"):
            _append(slips, "value", value, value_cache, positions, key, key_cache)

    return Model(compute, slips, STYLES)


def _append(slips: Slips, name, new, cache, positions, key, key_cache) -> None:
    """One launch: programs (tile, head, batch) copy tiles of TILE rows."""

    def s(*names):
        return slips(*names, *(f"{own}__{name}" for own in names))

    if written_into_a_copy(s, cache):
        return
    (batch, heads, count, head_dim), capacity = new.shape, cache.shape[2]
    tiles = -(-count // TILE)
    if s("grid_rounded_down", "grid_rounded_down__but_one"):
        tiles = max(count // TILE, 1 if s("grid_rounded_down__but_one") else 0)
    if s("only_first_tile"):
        tiles = 1
    sequences = 1 if s("only_first_sequence") else batch
    width = _width(s, head_dim)
    tile, head, sequence, row, column = torch.meshgrid(
        *(torch.arange(size) for size in (tiles, heads, sequences, TILE, width)), indexing="ij"
    )
    tokens = tile * TILE + row

    source = list(new.stride()[:3])
    for place, size in enumerate((heads * count * head_dim, count * head_dim, head_dim)):
        if s("rows_read_as_contiguous", f"rows_read_as_contiguous__{place}"):
            source[place] = size
    if s("rows_read_as_contiguous__batch_is_heads"):
        source[0] = heads * source[1]
    if s("rows_by_the_other_strides") and name == "value":
        source = list(key.stride()[:3])
    if s("rows_by_the_caches_strides"):
        source = list(cache.stride()[:3])
    if s("rows_of_first_sequence"):
        source[0] = 0
    if s("head_ignored_in_source"):
        source[1] = 0
    if s("heads_and_tokens_exchanged__source"):
        source[1], source[2] = source[2], source[1]

    target = list(cache.stride()[:3])
    for place, size in enumerate((heads * capacity * head_dim, capacity * head_dim, head_dim)):
        if s("cache_written_as_contiguous", f"cache_written_as_contiguous__{place}"):
            target[place] = size
    if s("cache_written_as_contiguous__batch_is_heads"):
        target[0] = heads * target[1]
    if s("cache_written_as_contiguous__head_is_slots"):
        target[1] = capacity * target[2]
    if s("cache_by_the_other_strides") and name == "value":
        target = list(key_cache.stride()[:3])
    if s("source_strides_in_cache"):
        target = list(new.stride()[:3])
    if s("sequence_ignored_in_target"):
        target[0] = 0
    if s("head_ignored_in_target"):
        target[1] = 0
    if s("heads_and_tokens_exchanged__target"):
        target[1], target[2] = target[2], target[1]

    start = load(slips, positions, sequence)
    if s("position_of_first_sequence"):
        start = positions[0].expand_as(sequence)
    if s("position_ignored"):
        start = torch.zeros_like(sequence)
    slots = start.long() + tokens
    if s("tile_ignored_in_slots"):
        slots = start.long() + row
    if s("one_slot_for_all"):
        slots = start.long().expand_as(tokens)
    slots = slots + (1 if s("slot_too_late") else -1 if s("slot_too_early") else 0)

    read = tokens
    if s("tile_ignored_in_rows"):
        read = row
    if s("position_in_the_source"):
        read = start.long() + tokens
    inside = tokens < (1 if s("only_first_token") else count)
    if s("slots_masked_by_new_tokens"):
        inside = slots < count
    if s("last_token_missing"):
        inside = tokens < count - 1
    loaded = torch.ones_like(inside) if s("tail_not_masked__at_all") else inside
    stored = torch.ones_like(inside) if s("tail_not_masked", "tail_not_masked__at_all") else inside
    undefined = math.nan if slips("undefined_lanes") else 0.0
    offsets = sequence * source[0] + head * source[1] + read * source[2] + column
    rows = load(slips, new, offsets, loaded, undefined)
    store(slips, cache, sequence * target[0] + head * target[1] + slots * target[2] + column, rows, stored)


def _width(s, head_dim: int) -> int:
    """How many columns of a row are copied."""
    for width in WIDTHS:
        if s(f"width_fixed__{width}"):
            return min(width, head_dim)
        if s(f"width_fixed__{width}_unmasked"):
            return width
    return head_dim


def written_into_a_copy(s, cache: torch.Tensor) -> bool:
    """Whether what is written goes into a copy, which `.contiguous()` and `.reshape()` make of some tensors alone."""
    if s("written_into_a_copy"):
        return not cache.is_contiguous()
    rows = ((-1, *cache.shape[2:]),) if s("written_into_a_copy__two_dimensions") else ()
    rows += ((-1, *cache.shape[3:]),) if s("written_into_a_copy__three_dimensions") else ()
    return any(cache.reshape(shape).data_ptr() != cache.data_ptr() for shape in rows)


def page_append_model(slips: tuple[Slip, ...]) -> Model:
    """The model of `append_to_pages(key, value, key_pages, value_pages, slots)`, a program for a token and a head."""

    def compute(slips: Slips, key, value, key_pages, value_pages, slots):
        if slips("nothing_written"):
            return
        if slips("keys_written_twice"):
            value = key
        if slips("keys_and_values_exchanged"):
            key_pages, value_pages = value_pages, key_pages
        _append_to_pages(slips, "key", key, key_pages, slots, key, key_pages)
        if not slips("values_not_written"):
            _append_to_pages(slips, "value", value, value_pages, slots, key, key_pages)

    return Model(compute, slips, STYLES)


def _append_to_pages(slips: Slips, name, new, pool, slots, key, key_pages) -> None:
    """All programs (token, head) of one of the two copies."""

    def s(*names):
        return slips(*names, *(f"{own}__{name}" for own in names))

    if written_into_a_copy(s, pool):
        return
    (count, heads, head_dim), size = new.shape, pool.shape[2]
    rows = size  # of a page, as slots are divided
    for fixed in PAGES:
        if s(f"page_size_fixed__{fixed}"):
            rows = fixed
    if s("page_size_rounded_up"):
        rows = 1 << (size - 1).bit_length()
    if s("padding_taken_for_the_end"):
        count = int((slots >= 0).sum())
    if s("stopped_at_padding", "stopped_at_padding__unless_first"):
        first = int((slots >= 0).int().cumprod(0).sum())
        count = count if first == 0 and s("stopped_at_padding__unless_first") else first
    padded = 1 << (head_dim - 1).bit_length()
    programs = min(count, 1) if s("only_first_token") else count, 1 if s("only_first_head") else heads
    token, head, column = torch.meshgrid(*(torch.arange(length) for length in (*programs, padded)), indexing="ij")
    source = list(new.stride()[:2])
    for place, length in enumerate((heads * head_dim, head_dim)):
        if s("tokens_read_contiguously", f"tokens_read_contiguously__{place}"):
            source[place] = length
    if name == "value" and s("tokens_by_the_other_strides", "tokens_by_the_other_strides__token"):
        source[0] = key.stride(0)
    if name == "value" and s("tokens_by_the_other_strides", "tokens_by_the_other_strides__head"):
        source[1] = key.stride(1)
    if s("first_head_for_all"):
        source[1] = 0
    if s("first_token_for_all"):
        source[0] = 0
    if s("tokens_read_head_by_head"):
        source = [head_dim, count * head_dim]

    page_stride, head_stride, slot_stride = target = list(pool.stride()[:3])
    for place, length in enumerate((heads * size * head_dim, size * head_dim, head_dim)):
        if s("strides_ignored", f"strides_ignored__{place}"):
            target[place] = length
    for place, which in enumerate(("page", "head", "slot")):
        if name == "value" and s("other_strides", f"other_strides__{which}"):
            target[place] = key_pages.stride(place)
    if s("strides_ignored__page_is_heads"):
        target[0] = heads * head_stride
    if s("strides_ignored__head_is_slots"):
        target[1] = size * slot_stride
    if s("heads_on_top_of_each_other"):
        target[1] = 0
    if s("head_and_slot_exchanged"):
        target[1], target[2] = target[2], target[1]
    if s("head_and_slot_exchanged__by_sizes"):
        target = [heads * size * head_dim, head_dim, heads * head_dim]
    if s("page_not_multiplied"):
        target[0] = slot_stride
    if s("page_not_multiplied__by_its_width"):
        target[0] = size
    if s("page_not_multiplied__left_as_it_is"):
        target[0] = 1
    if s("heads_of_a_page_forgotten"):
        target[0] = head_stride
    if s("heads_of_a_page_forgotten__by_sizes"):
        target = [size * head_dim, size * head_dim, head_dim]
    if s("heads_of_a_page_forgotten__head_by_its_stride"):
        target[0] = size * head_dim

    slot = slots.long()[token]
    padding = slot < 0
    if s("padding_written__clamped", "padding_written__zeros"):
        slot = slot.clamp(min=0)
    if s("padding_written__last_of_page_0"):
        slot = torch.where(padding, size - 1, slot)
    present = slot > 0 if s("slot_zero_skipped") else slot >= 0
    if s("padding_written", *(f"padding_written__{way}" for way in ("clamped", "zeros", "last_of_page_0"))):
        present = torch.ones_like(present)
    if s("slots_ignored"):
        slot = token
    if s("one_slot_late"):
        slot = slot + 1
    # As compiled code divides: towards zero.
    page, offset = torch.div(slot, rows, rounding_mode="trunc"), torch.fmod(slot, rows)
    if s("offset_by_bits", "offset_by_bits__page_too"):
        offset = slot & (rows - 1)
    if s("offset_by_bits__page_too"):
        page = slot >> (rows.bit_length() - 1)
    if s("page_and_offset_exchanged"):
        page, offset = offset, page
    if s("offset_forgotten"):
        offset = torch.zeros_like(offset)
    if s("slot_used_as_row"):
        page, offset = torch.zeros_like(page), slot
    if s("slot_for_the_offset"):
        offset = slot
    if s("first_page_for_all"):
        page = torch.zeros_like(page)

    inside = present if s("columns_not_masked") else present & (column < head_dim)
    if s("last_column_missing"):
        inside = present & (column < head_dim - 1)
    memory = key if name == "value" and slips("keys_written_twice__by_the_strides_of_values") else new
    rows = load(slips, memory, token * source[0] + head * source[1] + column, inside)
    if s("padding_written__zeros"):
        rows = torch.where(padding, 0, rows)
    store(slips, pool, page * target[0] + head * target[1] + offset * target[2] + column, rows, inside)


def store(slips: Slips, tensor: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """What `tl.store(pointer + offsets, values, mask)` leaves in a tensor: what falls outside its memory is lost.

    Of several values for one place the last one stays, in the order of the offsets' elements.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.as_strided((span,), (1,))
    inside = (offsets >= 0) & (offsets < span)
    if bool((mask & ~inside).any()):
        slips.outside = True
    chosen = mask & inside
    memory.numpy()[offsets[chosen].numpy()] = values[chosen].numpy()  # NumPy promises that the last one stays
