"""Exercise 6.4: a kernel that writes new tokens into pages."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, InOut, LaunchesTriton, Mistake, Moves
from exercises.topics.paging import (
    tokens_first,
)


def start_of(slot, head, token, pool):
    """Where a head's row of a slot begins in the pool's memory, in elements."""
    page_stride, head_stride, slot_stride, _ = pool.stride()
    size = pool.shape[2]
    return slot // size * page_stride + head * head_stride + slot % size * slot_stride


def appended(
    key,
    value,
    key_pages,
    value_pages,
    slots,
    *,
    start=start_of,
    head_read=lambda head: head,
    whole=False,
    padding=False,
):
    """Write each token's key and value into its slot, in the pool's memory, by its strides.

    Args:
        start: as `start_of`; a slip begins elsewhere. What falls outside the pool is lost.
        head_read: the head whose key and value a head gets.
        whole: the slip: rows as wide as the next power of two, from the memory behind a row and into it.
        padding: the slip: tokens whose slot is -1 are written too.
    """
    for source, pool in ((key, key_pages), (value, value_pages)):
        width = source.shape[2]
        wide = 1 << (width - 1).bit_length() if whole else width
        if wide > width:  # the memory behind the last row is no one's
            behind = torch.full((wide - width,), math.nan, dtype=source.dtype)
            source = torch.cat([source.flatten(), behind]).as_strided((*source.shape[:2], wide), source.stride())
        memory = pool.as_strided((pool.numel(),), (1,))
        for token, slot in enumerate(slots.tolist()):
            for head in range(pool.shape[1]) if padding or slot >= 0 else ():
                begin = start(slot, head, token, pool)
                inside = min(wide, len(memory) - begin)
                if begin >= 0 and inside > 0:
                    memory[begin : begin + inside] = source[token, head_read(head), :inside]


def _start_of_padding(slot, head, token, pool):
    """Compiled code divides towards zero: slot -1 is offset -1 of page 0, the last slot of the head before."""
    return start_of(slot, head, token, pool) if slot >= 0 else head * pool.stride(1) - pool.stride(2)


def _start_clamped(slot, head, token, pool):
    return start_of(max(slot, 0), head, token, pool)


def _begins(change):
    """A slip that begins a row elsewhere: `change(page, head, offset, page stride, head stride, slot stride)`."""

    def start(slot, head, token, pool):
        size = pool.shape[2]
        return change(slot // size, head, slot % size, *pool.stride()[:3])

    return lambda *args: appended(*args, start=start)


def _begins_by_sizes(change):
    """A slip that computes where a row begins from sizes: `change(page, head, offset, heads, page_size)` rows in."""

    def start(slot, head, token, pool):
        _, heads, size, width = pool.shape
        return change(slot // size, head, slot % size, heads, size) * width

    return lambda *args: appended(*args, start=start)


def _start_of_short_pages(numbers):
    """The slip: a page is taken to be `numbers(pool)` elements long, and the strides of heads and slots are kept."""

    def start(slot, head, token, pool):
        size = pool.shape[2]
        return slot // size * numbers(pool) + head * pool.stride(1) + slot % size * pool.stride(2)

    return start


def by_the_keys_strides(key, value, key_pages, value_pages, slots):
    appended(key, value, key_pages, value_pages.clone(), slots)
    appended(
        value,
        value,
        value_pages,
        value_pages.clone(),
        slots,
        start=lambda slot, head, token, pool: start_of(slot, head, token, key_pages),
    )


def exchanged(key, value, key_pages, value_pages, slots):
    appended(value, key, key_pages, value_pages, slots)


def keys_twice(key, value, key_pages, value_pages, slots):
    appended(key, key, key_pages, value_pages, slots)


def nothing_of_the_values(key, value, key_pages, value_pages, slots):
    kept = value_pages.clone()
    appended(key, value, key_pages, value_pages, slots)
    value_pages.copy_(kept)


def append_cases(draw):
    def case(name, slots, pages, heads, page_size, head_dim, dtype=torch.float32, change=None, metered=False):
        tokens = (draw.normal(len(slots), heads, head_dim, dtype=dtype) for _ in "kv")
        pools = (draw.normal(pages, heads, page_size, head_dim, dtype=dtype) for _ in "kv")
        key, value, key_pages, value_pages = (change or (lambda *tensors: tensors))(*tokens, *pools)
        slots = torch.tensor(slots, dtype=torch.int64)
        return Case(name, (key, value, InOut(key_pages), InOut(value_pages), slots), metered=metered)

    def packed(key, value, key_pages, value_pages):
        """Keys as a third of one tensor, as a fused projection of q, k and v leaves them; values head by head."""
        together = torch.cat([key * 0, key, value], dim=1)
        heads, by_head = key.shape[1], value.transpose(0, 1).contiguous().transpose(0, 1)
        return together[:, heads : 2 * heads], by_head, key_pages, value_pages

    def token_by_token(key, value, key_pages, value_pages):
        return key, value, tokens_first(key_pages), value_pages

    page = draw.permutation(6).tolist()
    anywhere = (draw.permutation(40)[:9]).tolist()
    return [
        case("4 tokens into one page of one head", [8, 9, 10, 11], 4, 1, 4, 16),
        case("3 sequences, a token each, 2 heads", [5, 14, 3], 5, 2, 4, 16),
        case(
            "a prompt of 11 tokens over 3 pages in any order",
            [4 * page[i // 4] + i % 4 for i in range(11)],
            6,
            2,
            4,
            32,
        ),
        case("slot -1: padding that must not be written", [9, -1, 2, -1], 4, 2, 4, 16),
        case("9 tokens anywhere, 3 heads", anywhere, 10, 3, 4, 16),
        case("pages of one token", [3, 0, 5], 6, 2, 1, 16),
        case("head dimension 80", [7, 2, 12], 8, 2, 8, 80),
        case("float16, head dimension 128", [1, 30, 17], 16, 2, 16, 128, torch.float16),
        case("keys cut out of a fused q, k, v; values stored head by head", [6, 1, 11], 4, 2, 4, 16, change=packed),
        case("key pages stored token by token", [6, 1, 11], 4, 2, 4, 16, change=token_by_token),
        case("12 tokens, 2 heads, bytes counted", list(range(3, 15)), 4, 2, 4, 64, metered=True),
    ]


def append_bytes(key, value, key_pages, value_pages, slots):
    """Each key and value read once and written once, and a slot read for each row."""
    return 4 * key.numel() * key.element_size() + slots.numel() * key.shape[1] * slots.element_size()


def _outside(case, seen, got):
    return any("writes" in access for access in seen.out_of_bounds)


def _wide_rows(case, seen, got):
    """The pools hold what rows as wide as the next power of two leave in them, memory behind the last row included."""
    key, value, key_pages, value_pages, slots = case.args
    if key.shape[2] & (key.shape[2] - 1) == 0 or not isinstance(got, tuple) or not key.is_contiguous():
        return False
    told = [pool.tensor.clone() for pool in (key_pages, value_pages)]
    appended(key, value, *told, slots, whole=True)
    return all(torch.equal(mine.nan_to_num(7e4), pool.nan_to_num(7e4)) for mine, pool in zip(got[1]["written"], told))


EXERCISE = Exercise(
    id="6.4",
    title="Append into pages",
    entries=("append_to_pages",),
    cases=append_cases,
    oracle=appended,
    needs=TRITON,
    requirements=(
        LaunchesTriton(at_most=1),
        Forbids(("index_put", "index_put_", "index_copy_", "scatter_")),
        Moves(append_bytes, slack=1.05),
    ),
    hints=(
        "A program copies one row of head_dim numbers for the keys and one for the values: those of one token and one "
        "head. program_id(0) is the token, program_id(1) the head.",
        "slot = tl.load(slots_pointer + token); page = slot // PAGE_SIZE; offset = slot % PAGE_SIZE. A slot below 0 "
        "must write nothing: make that a part of the mask, next to columns < HEAD_DIM.",
        "The row in the pool begins at page * key_page_stride + head * key_page_head_stride + offset * "
        "key_slot_stride; a page holds all heads, so its stride is heads · page_size · head_dim and not page_size · "
        "head_dim.",
        "The row to read begins at token * key_stride + head * key_head_stride. tl.load it with the mask, tl.store it "
        "with the same mask, and once more for the values with their own strides.",
    ),
    mistakes=(
        Mistake(
            "slot_used_as_row",
            "The slot was used as it is: the pool is not one long list of tokens. Between two pages lie those of the "
            "other heads: split it into page = slot // PAGE_SIZE and offset = slot % PAGE_SIZE, each with its stride.",
            result=lambda *args: appended(
                *args,
                start=lambda slot, head, token, pool: slot * pool.stride(2) + head * pool.stride(1),
            ),
        ),
        Mistake(
            "page_and_offset_exchanged",
            "The quotient was used as the offset and the remainder as the page. The page is slot // PAGE_SIZE.",
            result=_begins(
                lambda page, head, offset, *strides: offset * strides[0] + head * strides[1] + page * strides[2]
            ),
        ),
        Mistake(
            "offset_forgotten",
            "Every token is written to the first slot of its page, over the one before. Add offset * slot stride.",
            result=_begins(lambda page, head, offset, *strides: page * strides[0] + head * strides[1]),
        ),
        Mistake(
            "page_not_multiplied",
            "The page's number is multiplied by the wrong stride, as if a page were one row. A page begins page * "
            "page stride elements into the pool.",
            result=(
                _begins(lambda page, head, offset, *strides: (page + offset) * strides[2] + head * strides[1]),
                lambda *args: appended(*args, start=_start_of_short_pages(lambda pool: pool.shape[2])),
            ),
        ),
        Mistake(
            "heads_of_a_page_forgotten",
            "A page is taken to hold one head. It holds all of them: its stride is heads · page_size · head_dim, which "
            "the launcher passes.",
            result=(
                _begins(lambda page, head, offset, *strides: (page + head) * strides[1] + offset * strides[2]),
                _begins_by_sizes(lambda page, head, offset, heads, size: (page + head) * size + offset),
                lambda *args: appended(*args, start=_start_of_short_pages(lambda pool: pool.shape[2] * pool.shape[3])),
            ),
        ),
        Mistake(
            "strides_ignored",
            "Where a row begins was computed from sizes, as if the pool were contiguous. One of the pools is stored "
            "token by token: use the strides that the launcher passes.",
            result=_begins_by_sizes(lambda page, head, offset, heads, size: (page * heads + head) * size + offset),
        ),
        Mistake(
            "other_strides",
            "The values are written by the strides of the key pages. The two pools may lie in memory differently: each "
            "has three strides of its own.",
            result=by_the_keys_strides,
        ),
        Mistake(
            "head_and_slot_exchanged",
            "Heads and slots have changed places: in a page all slots of head 0 come first, then those of head 1. The "
            "head goes with the head stride, the offset with the slot stride.",
            result=(
                _begins(lambda page, head, offset, *steps: page * steps[0] + head * steps[2] + offset * steps[1]),
                _begins_by_sizes(lambda page, head, offset, heads, size: (page * size + offset) * heads + head),
            ),
        ),
        Mistake(
            "slot_zero_skipped",
            "A token whose slot is 0 is not written. 0 is the first slot of page 0; only -1 means no place.",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(slot, head, token, pool) if slot else -1
            ),
        ),
        Mistake(
            "slots_ignored",
            "The tokens are written one behind another from the start of the pool. Where token i goes stands in "
            "slots[i].",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(token, head, token, pool)
            ),
        ),
        Mistake(
            "one_slot_late",
            "Every token lies one slot behind its own, where the next one belongs. The mapping names the slot itself: "
            "add nothing to it.",
            result=lambda *args: appended(
                *args, start=lambda slot, head, token, pool: start_of(slot + 1, head, token, pool)
            ),
        ),
        Mistake(
            "first_head_for_all",
            "Every head got the key and value of head 0. Add head * head stride to where they are read.",
            result=lambda *args: appended(*args, head_read=lambda head: 0),
        ),
        Mistake(
            "heads_on_top_of_each_other",
            "All heads are written to the rows of head 0. Add head * head stride to where they are written.",
            result=_begins(lambda page, head, offset, *strides: page * strides[0] + offset * strides[2]),
        ),
        Mistake("keys_and_values_exchanged", "Keys went into value_pages and values into key_pages.", result=exchanged),
        Mistake(
            "keys_written_twice",
            "The keys were written into both pools. Load the values for the second.",
            result=keys_twice,
        ),
        Mistake(
            "values_not_written",
            "Only the keys are written. The values go to the same slot of value_pages.",
            result=nothing_of_the_values,
        ),
        Mistake(
            "padding_written",
            "A token whose slot is -1 was written: before the pool, over the last slot of the head before, or into "
            "slot 0. It has no place: let nothing be stored where slot < 0.",
            result=(
                lambda *args: appended(*args, start=_start_of_padding, padding=True),
                lambda *args: appended(*args, start=_start_clamped, padding=True),
            ),
            when=lambda case, seen, got: -1 in case.args[4].tolist() and _outside(case, seen, got),
            every=True,
        ),
        Mistake(
            "tokens_read_contiguously",
            "It fails only where the new keys are a part of a larger tensor, as a fused projection leaves them. Their "
            "rows lie key_stride and key_head_stride apart, and those of the values as their own strides say.",
            when=lambda case, seen, got: (
                "fused" in case.name and all("key_pointer" in a or "value_pointer" in a for a in seen.out_of_bounds)
            ),
            every=True,
        ),
        Mistake(
            "columns_not_masked",
            "More than head_dim columns are written, over the row behind. BLOCK_D is a power of two: mask the columns "
            "from HEAD_DIM on.",
            when=_wide_rows,
        ),
    ),
)
