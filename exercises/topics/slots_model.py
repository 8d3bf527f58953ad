"""Which slots: those that new tokens see (5.4), and those that they go to in pages (6.3); with what can go wrong."""

from __future__ import annotations

import torch

from course_lib.checker.specification.model import Slips

FEW_BITS = (torch.int8, torch.float16)  # too narrow for a slot


def visible(s: Slips, past, new_tokens, capacity):
    """What `visible_slots` makes, bool [batch, new_tokens, capacity]."""
    slots, queries = torch.arange(capacity), torch.arange(new_tokens)[:, None]
    past = past.long()[:, None, None]
    if s("past_of_first_sequence"):
        past = past[:1].expand_as(past)
    if s("past_of_longest_sequence"):
        past = past.amax(dim=0, keepdim=True).expand_as(past)
    start = past
    if s("no_offset"):
        start = torch.zeros_like(past)
    if s("aligned_to_capacity"):
        start = torch.full_like(past, capacity - new_tokens)
    if s("not_causal"):
        queries = torch.full_like(queries, new_tokens - 1)
    if s("all_as_the_first"):
        queries = torch.zeros_like(queries)
    if s("newest_first"):
        queries = queries.flip(0)
    position = start + queries + (1 if s("one_too_many") else -1 if s("own_slot_hidden") else 0)
    for dtype in FEW_BITS:
        if s(f"positions_in_few_bits__{str(dtype).removeprefix('torch.')}"):
            position = position.to(dtype)
    seen = slots <= position
    for name, diagonal in (("longest", past.amax(0)), ("first", past[0]), ("shortest", past.amin(0))):
        if s(f"diagonal_of_another_sequence__{name}"):
            seen = (slots <= diagonal + queries) & (slots < past + new_tokens)
    if s("past_hidden"):
        seen = seen & (slots >= start)
    if s("new_tokens_apart"):
        seen = (slots < start) | (slots == position)
    if s("only_unused_hidden"):
        seen = slots < past
    if s("own_slot_alone"):
        seen = slots == position
    if s("one_token_sees_all") and new_tokens == 1:
        seen = torch.ones_like(seen)
    if s("turned_round"):
        seen = ~seen
    return seen.expand(len(past), new_tokens, capacity)


def mapped(s: Slips, block_tables, lengths, new_tokens, page_size):
    """What `slot_mapping` makes, int64 [sum of new_tokens]; a block behind the table's last is taken for the last."""
    slots, before = [], 0
    for row, (length, new) in enumerate(zip(lengths.tolist(), new_tokens.tolist())):
        count = length if s("old_tokens_too") else int(new_tokens[0]) if s("new_of_first_sequence") else new
        if s("none_taken_for_all") and not new:
            count = length
        if s("one_new_token_at_least"):
            count = max(1, new)
        first = length - count
        if s("positions_from_zero"):
            first = 0
        if s("one_token_late"):
            first = length
        first += (1 if s("one_token_late__by_one") else 0) - (1 if s("one_token_early") else 0)
        first += before if s("positions_run_on") else 0
        before += count
        table = block_tables[0 if s("first_table_for_all") else row].long()
        slots.append(_of_one(s, table, first, count, page_size))
    if s("padding_left_in"):
        return torch.nn.utils.rnn.pad_sequence(slots, batch_first=True, padding_value=-1).flatten()
    if s("tokens_taken_in_turn"):
        turns = torch.cat([torch.arange(len(part)) for part in slots])
        return torch.cat(slots)[turns.argsort(stable=True)]
    return torch.cat(slots).sort().values if s("slots_sorted") else torch.cat(slots)


def _of_one(s: Slips, table, first, count, page_size):
    positions = torch.arange(first, first + count)
    if s("positions_clamped"):
        positions = positions.clamp(max=len(table) * page_size - 1)
    blocks, offsets = positions // page_size, positions % page_size
    if s("division_and_remainder_exchanged"):
        blocks, offsets = offsets, blocks
    if s("offset_by_bits"):
        offsets = positions & (page_size - 1)
    bits = None
    if s("by_shift", "by_shift__rounded_up"):
        bits = (page_size - (1 if s("by_shift__rounded_up") else 0)).bit_length()
        bits -= 1 if s("by_shift") else 0
        blocks, offsets = (
            positions >> bits,
            positions & ((1 << bits) - 1 if s("by_shift__rounded_up") else page_size - 1),
        )
    if s("page_of_the_last_token"):
        blocks = torch.full_like(blocks, (first + count - 1) // page_size)
    if s("offset_counted_anew"):
        offsets = torch.arange(count) % page_size
    if s("offset_forgotten"):
        offsets = torch.zeros_like(offsets)
    if s("offset_from_one"):
        offsets = (positions - 1) % page_size
    if s("position_added_whole"):
        offsets = positions
    if s("page_looked_up_once"):
        blocks = torch.full_like(blocks, first // page_size)
        offsets = first % page_size + torch.arange(count)
    pages = table[blocks.clamp(max=len(table) - 1)]
    if s("pages_consecutive"):
        pages = table[0] + blocks
    if s("table_ignored"):
        pages = blocks
    if s("table_not_multiplied"):
        return pages + offsets
    if s("page_0_taken_for_none"):
        pages, offsets = pages[pages > 0], offsets[pages > 0]
    if s("slots_in_floats"):
        return (pages.float() * page_size + offsets).long()
    begins = pages * page_size if bits is None else pages << bits
    return (begins.int().long() if s("slots_in_32_bits") else begins) + offsets
