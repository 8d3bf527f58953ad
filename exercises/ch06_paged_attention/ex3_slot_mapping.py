"""Exercise 6.3: the slots of new tokens."""

from __future__ import annotations

import re

import torch

from course_lib.checker import Case, Exercise, Mistake
from exercises.topics.paging import page_tables


def slots_of(block_tables, lengths, new_tokens, page_size, *, place=None, first=lambda length, new: length - new):
    """The slots of the new tokens; slips come in by `place(table row, position, page_size, tables)` and `first`."""
    place = place or (lambda row, i, size, tables: int(tables[row, i // size]) * size + i % size)
    slots = []
    for row, (length, new) in enumerate(zip(lengths.tolist(), new_tokens.tolist())):
        begin = first(length, new)
        for position in range(begin, begin + new):
            if not 0 <= position // page_size < block_tables.shape[1]:
                return None
            slots.append(place(row, position, page_size, block_tables))
    return torch.tensor(slots, dtype=torch.int64)


def slot_cases(draw):
    def case(name, lengths, new, page_size, pages=64):
        tables = page_tables(draw, lengths, page_size, pages)
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
        case("5 sequences, their last tokens", ragged, [draw.integer(0, 20) for _ in ragged], 16),
    ]


def _offset_beyond(case, seen, got):
    """The error names an entry of the table that a remainder, taken as a quotient, would ask for."""
    found = re.search(r"index (\d+) is out of bounds", seen.error.text if seen.error else "")
    if not found or not case.name.startswith("decode"):
        return False
    tables, lengths, _, size = case.args
    return int(found[1]) in [i % size for i in (lengths - 1).tolist() if i % size >= tables.shape[1]]


def _from_first_new(place):
    """A slip that counts from the first new token: `place(table row, its position, how many behind it, page_size)`."""

    def result(block_tables, lengths, new_tokens, page_size):
        first = (lengths - new_tokens).tolist()
        return slots_of(
            block_tables,
            lengths,
            new_tokens,
            page_size,
            place=lambda row, i, size, tables: place(tables[row].tolist(), first[row], i - first[row], size),
        )

    return result


def _running_on(block_tables, lengths, new_tokens, page_size):
    """The slip: the places of new tokens are counted through the batch, as an arange over all of them is."""
    before = (new_tokens.cumsum(0) - new_tokens).tolist()
    begins = iter([length - new + gap for length, new, gap in zip(lengths.tolist(), new_tokens.tolist(), before)])
    return slots_of(block_tables, lengths, new_tokens, page_size, first=lambda length, new: next(begins))


def _slots(**slips):
    return lambda *args: slots_of(*args, **slips)


EXERCISE = Exercise(
    id="6.3",
    title="Slot mapping",
    entries=("slot_mapping",),
    cases=slot_cases,
    oracle=slots_of,
    hints=(
        "Start with one sequence and one token at position p: which entry of the table holds its page, and at which "
        "offset in that page does it lie?",
        "page = table[p // page_size], offset = p % page_size, and the slot is page * page_size + offset.",
        "lengths counts the new tokens already: the positions of sequence b are lengths[b] - new_tokens[b] up to, and "
        "without, lengths[b].",
        "For each b: positions = torch.arange(lengths[b] - new_tokens[b], lengths[b]); slots = block_tables[b, "
        "positions // page_size].long() * page_size + positions % page_size. torch.cat joins them.",
    ),
    mistakes=(
        Mistake(
            "table_not_multiplied",
            "The page's number is not multiplied by page_size. Page 3 of 16 tokens begins at slot 48.",
            result=_slots(place=lambda row, i, size, tables: int(tables[row, i // size]) + i % size),
        ),
        Mistake(
            "offset_forgotten",
            "The offset in the page is missing: all tokens of a page get its first slot. Add position % page_size.",
            result=_slots(place=lambda row, i, size, tables: int(tables[row, i // size]) * size),
        ),
        Mistake(
            "position_added_whole",
            "The whole position was added to the page's start. Only its offset in the page is: position % page_size.",
            result=_slots(place=lambda row, i, size, tables: int(tables[row, i // size]) * size + i),
        ),
        Mistake(
            "division_and_remainder_exchanged",
            "The remainder was used to find the page and the quotient as the offset. position // page_size is the "
            "entry of the table, position % page_size the offset.",
            result=_slots(
                place=lambda row, i, size, tables: (
                    int(tables[row, min(i % size, tables.shape[1] - 1)]) * size + i // size
                )
            ),
            when=_offset_beyond,
        ),
        Mistake(
            "offset_counted_anew",
            "The offset counts from the first new token. It is the place in the page of the token's position in the "
            "sequence: position % page_size.",
            result=_from_first_new(lambda table, first, i, size: table[(first + i) // size] * size + i % size),
        ),
        Mistake(
            "page_looked_up_once",
            "The page is looked up for the first new token alone, and the others are put behind it. Where they pass "
            "the end of the page the table has another one: look it up for each token.",
            result=_from_first_new(lambda table, first, i, size: table[first // size] * size + first % size + i),
        ),
        Mistake(
            "positions_run_on",
            "The positions of a sequence are moved by the new tokens of those before it: an arange over the whole "
            "batch runs on, and each sequence has to begin anew. Subtract how many new tokens stand before it.",
            result=_running_on,
        ),
        Mistake(
            "old_tokens_too",
            "All tokens of the sequences are in the mapping. Only the last new_tokens[b] of each are to be written: "
            "from lengths[b] - new_tokens[b] on.",
            result=lambda tables, lengths, new_tokens, page_size: slots_of(tables, lengths, lengths, page_size),
        ),
        Mistake(
            "pages_consecutive",
            "The pages are taken to lie one behind another, from the first one on. Each page of a sequence lies "
            "anywhere: look every one of them up.",
            result=_slots(place=lambda row, i, size, tables: int(tables[row, 0]) * size + i),
        ),
        Mistake(
            "table_ignored",
            "The position itself is taken as the slot, as in a contiguous cache. The block table says where the page "
            "lies.",
            result=_slots(place=lambda row, i, size, tables: i),
        ),
        Mistake(
            "first_table_for_all",
            "Every sequence uses the table of the first. Row b of block_tables belongs to sequence b.",
            result=_slots(place=lambda row, i, size, tables: int(tables[0, i // size]) * size + i % size),
        ),
        Mistake(
            "positions_from_zero",
            "The new tokens are put at the start of the sequence, over tokens that are there. They are its last: they "
            "begin at lengths[b] - new_tokens[b].",
            result=_slots(first=lambda length, new: 0),
        ),
        Mistake(
            "one_token_late",
            "The new tokens are put behind the end: `lengths` counts them already. The last one has position "
            "lengths[b] - 1.",
            result=(
                _slots(first=lambda length, new: length),
                _slots(first=lambda length, new: length - new + 1),
            ),
        ),
        Mistake(
            "one_token_early",
            "The new tokens begin one position too early, over the last token that was there before.",
            result=_slots(first=lambda length, new: length - new - 1),
        ),
    ),
)
