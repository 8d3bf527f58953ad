"""Exercise 6.3: the slots of new tokens."""

from __future__ import annotations

import re

import torch

from course_lib.checker import Case, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.paging import page_tables


def slots_of(block_tables, lengths, new_tokens, page_size):
    """The slots of each sequence's last tokens, int64 [sum of new_tokens]."""
    slots = []
    for table, length, new in zip(block_tables, lengths.tolist(), new_tokens.tolist()):
        positions = length - new + torch.arange(new)
        slots.append(slots_in(table.long(), positions, page_size))
    return torch.cat(slots)


def slots_in(table, positions, page_size):
    """The slots of these positions; a block behind the table's last is taken for the last."""
    blocks, offsets = positions // page_size, positions % page_size
    pages = table[blocks.clamp(max=len(table) - 1)]
    return pages * page_size + offsets


def slot_cases(draw):
    def case(name, lengths, new, page_size, pages=64, first=0, **options):
        tables = page_tables(draw, lengths, page_size, pages, **options)
        tables[tables >= 0] += first
        to_int32 = (torch.tensor(values, dtype=torch.int32) for values in (lengths, new))
        return Case(name, (tables, *to_int32, page_size))

    ragged = [draw.integer(20, 90) for _ in range(5)]
    return [
        case("decode: one new token for each of 3 sequences", [5, 17, 30], [1, 1, 1], 8),
        case("prefill: the whole of 2 prompts", [11, 6], [11, 6], 4),
        case("5 new tokens across the end of a page", [18], [5], 16),
        case("a first token", [1], [1], 16),
        case("a page is just full", [16, 17, 32], [1, 1, 1], 16),
        case("prefill, decode and a sequence that waits, in one batch", [40, 33, 9], [12, 1, 0], 16),
        case("pages of one token", [6, 3], [2, 3], 1),
        case("pages of 3 tokens", [2, 5, 7], [1, 2, 7], 3, spare=3),
        case("a pool of more than 2³¹ slots", [20, 7], [6, 1], 16, first=2**27 + 1000 * draw.integer(0, 1000)),
        case("5 sequences, their last tokens", ragged, [draw.integer(0, 20) for _ in ragged], 16),
    ]


def _offset_beyond(case, seen, got):
    """The error names an entry of the table that a remainder, taken as a quotient, would ask for."""
    found = re.search(r"index (\d+) is out of bounds", seen.error.text if seen.error else "")
    if not found or not case.name.startswith("decode"):
        return False
    tables, lengths, _, size = case.args
    return int(found[1]) in [i % size for i in (lengths - 1).tolist() if i % size >= tables.shape[1]]


def drawn(draw, *, sequences, page_size, new_tokens, spare):
    """What the contract's choices make: arguments of `slot_mapping`."""
    lengths = [max(1, blocks * page_size + more) for blocks, more in sequences(draw, page_size)]
    new = [new_tokens(draw, length) for length in lengths]
    needed = sum(-(-length // page_size) for length in lengths)
    tables = page_tables(draw, lengths, page_size, needed + draw.integer(0, 9), spare)
    return tables, *(torch.tensor(numbers, dtype=torch.int32) for numbers in (lengths, new)), page_size


def _of_any_length(count):
    return lambda draw, page_size: [(draw.integer(0, 4), draw.integer(0, page_size)) for _ in range(count)]


CONTRACT = Contract(
    drawn,
    choices={
        "sequences": (
            Level(_of_any_length(1), "1 sequence"),
            Level(_of_any_length(3), "3 sequences"),
            Level(lambda draw, page_size: [(1, 0), (2, -1), (2, 1)], "lengths around a page's end"),
        ),
        "page_size": (1, 2, 3, 7, 16),
        "new_tokens": (
            Level(lambda draw, length: 1, "one new token each"),
            Level(lambda draw, length: length, "all tokens new"),
            Level(lambda draw, length: draw.integer(0, length + 1), "any number of new tokens"),
            Level(lambda draw, length: 0, "no new token"),
        ),
        "spare": (Level(0, ""), Level(2, "2 entries more than any needs")),
    },
    says={
        "page_size": "tokens in a page, any number",
        "new_tokens": "0 is possible",
        "spare": "Entries that a sequence has no page for are -1",
    },
)

EXCHANGED = (
    "The remainder was used to find the page and the quotient as the offset. position // page_size is the entry of the "
    "table, position % page_size the offset."
)

PLACES, FIRST, BLOCK, OFFSET = "positions = length", "length - new", "positions // page_size", "positions % page_size"
BEGIN, LOOKED_UP = "pages * page_size", "table[blocks.clamp(max=len(table) - 1)]"
CHANGES = (
    *edits("Every sequence uses the table of the first. Row b of block_tables belongs to sequence b.",
        first_table_for_all=("table.long()", "block_tables[0].long()")),
    *edits("Every sequence is given as many new tokens as the first. Each has its own number: new_tokens[b].",
        new_of_first_sequence=("new_tokens.tolist()", "[int(new_tokens[0])] * len(lengths)")),
    *edits("A slot was kept in int32, which ends at 2³¹ - 1, and a large pool has more slots. The table is int32: "
        "widen the page before you multiply, and return int64.",
        slots_in_32_bits=(BEGIN, "(pages * page_size).int().long()")),
    *edits("The slots went through float32, which holds whole numbers up to 2²⁴ alone. Widen the page to int64 "
        "instead.", slots_in_floats=("pages * page_size + offsets", "(pages.float() * page_size + offsets).long()")),
    *edits("A sequence without a new token gives all of its tokens: positions[-0:] is everything. Begin at lengths[b] "
        "- new_tokens[b].", none_taken_for_all=(PLACES, "new = new or length\npositions = length")),
    *edits("A sequence without a new token gets a slot all the same. It waits: there is nothing to write.",
        one_new_token_at_least=(PLACES, "new = max(1, new)\npositions = length")),
    *edits("Short sequences are padded to the longest with -1. Asked for is one slot for each new token, sequence by "
        "sequence, and no others.",
        padding_left_in=("torch.cat(slots)",
            "torch.nn.utils.rnn.pad_sequence(slots, batch_first=True, padding_value=-1).flatten()")),
    *edits("The slots come token by token: the first of every sequence, then the second ones. Asked for is sequence "
        "by sequence.",
        tokens_taken_in_turn=("torch.cat(slots)",
            "torch.cat(slots)[torch.cat([torch.arange(len(part)) for part in slots]).argsort(stable=True)]")),
    *edits("The slots are sorted by their numbers. They stand in the order of the new tokens.",
        slots_sorted=("torch.cat(slots)", "torch.cat(slots).sort().values")),
    *edits("Tokens in page 0 have no slot. 0 is a page as any other; only -1 means none.",
        page_0_taken_for_none=("return pages", "pages, offsets = pages[pages > 0], offsets[pages > 0]\nreturn pages")),
    *edits("The offsets count from 1. The first token of a page has offset 0: position % page_size.",
        offset_from_one=(OFFSET, "(positions - 1) % page_size")),
    *edits("Page and offset are taken by shifts and bit masks, which is right where page_size is a power of two. It "
        "may be any number: position // page_size and position % page_size.",
        by_shift=(BLOCK, "positions >> page_size.bit_length() - 1", OFFSET, "positions & page_size - 1", BEGIN,
            "pages << page_size.bit_length() - 1"),
        by_shift__rounded_up=(BLOCK, "positions >> (page_size - 1).bit_length()", OFFSET,
            "positions & (1 << (page_size - 1).bit_length()) - 1", BEGIN, "pages << (page_size - 1).bit_length()")),
    *edits("The offset is taken by page_size - 1 as a bit mask, which is right for powers of two alone. It is "
        "position % page_size.", offset_by_bits=(OFFSET, "positions & page_size - 1")),
    *edits("The page's number is not multiplied by page_size. Page 3 of 16 tokens begins at slot 48.",
        table_not_multiplied=(BEGIN, "pages")),
    *edits("The offset in the page is missing: all tokens of a page get its first slot. Add position % page_size.",
        offset_forgotten=(OFFSET, "0 * positions")),
    *edits("The whole position was added to the page's start. Only its offset in the page is: position % page_size.",
        position_added_whole=(OFFSET, "positions")),
    *edits(EXCHANGED, division_and_remainder_exchanged=("blocks, offsets =", "offsets, blocks =")),
    *edits("The offset counts from the first new token. It is the place in the page of the token's position in the "
        "sequence: position % page_size.", offset_counted_anew=(OFFSET, "torch.arange(len(positions)) % page_size")),
    *edits("The page is looked up only for the first new token, and the others follow it. Where they pass the end of "
        "the page, the table has another page: look it up for each token.",
        page_looked_up_once=(BLOCK, "positions[:1].expand_as(positions) // page_size", OFFSET,
            "positions[:1] % page_size + torch.arange(len(positions))")),
    *edits("All new tokens are put into the page of the last one. They may begin in an earlier page: look the page up "
        "for each token.", page_of_the_last_token=(BLOCK, "positions[-1:].expand_as(positions) // page_size")),
    *edits("The positions of a sequence are moved by the new tokens of those before it, because an arange over the "
        "whole batch runs on. Each sequence has to begin anew: subtract how many new tokens stand before it.",
        positions_run_on=(FIRST, "length - new + sum(map(len, slots))")),
    *edits("All tokens of the sequences are in the mapping. Only the last new_tokens[b] of each are to be written: "
        "from lengths[b] - new_tokens[b] on.", old_tokens_too=(FIRST, "0", "arange(new)", "arange(length)")),
    *edits("The pages are assumed to lie one after another, from the first one on. A sequence's pages can lie "
        "anywhere: look each of them up.", pages_consecutive=(LOOKED_UP, "table[0] + blocks")),
    *edits("The position itself is taken as the slot, as in a contiguous cache. The block table says where the page "
        "lies.", table_ignored=(LOOKED_UP, "blocks")),
    *edits("The new tokens are put at the start of the sequence, over tokens that are there. They are its last: they "
        "begin at lengths[b] - new_tokens[b].", positions_from_zero=(FIRST, "0")),
    *edits("The new tokens are put past the end: `lengths` counts them already. The last one has position lengths[b] "
        "- 1.", one_token_late=(FIRST, "length"), one_token_late__by_one=(FIRST, "length - new + 1")),
    *edits("The new tokens begin one position too early, over the last token that was there before.",
        one_token_early=(FIRST, "length - new - 1")),
    *edits("",
        positions_clamped=("blocks, offsets =",
            "positions = positions.clamp(max=len(table) * page_size - 1)\nblocks, offsets =")),
)  # fmt: skip


EXERCISE = Exercise(
    id="6.3",
    title="Slot mapping",
    entries=("slot_mapping",),
    cases=slot_cases,
    oracle=slots_of,
    contracts=(CONTRACT,),
    models=(model_of(slots_of, CHANGES, (slots_in,)),),
    hints=(
        "Start with one sequence and one token at position p. Which entry of the table holds its page? And at which "
        "offset in that page is it?",
        "page = table[p // page_size], offset = p % page_size, and the slot is page * page_size + offset.",
        "lengths counts the new tokens already: the positions of sequence b are lengths[b] - new_tokens[b] up to, and "
        "without, lengths[b].",
        "For each b: positions = torch.arange(lengths[b] - new_tokens[b], lengths[b]); slots = block_tables[b, "
        "positions // page_size].long() * page_size + positions % page_size. torch.cat joins them.",
    ),
    mistakes=(Mistake("division_and_remainder_exchanged", EXCHANGED, when=_offset_beyond),),
)
