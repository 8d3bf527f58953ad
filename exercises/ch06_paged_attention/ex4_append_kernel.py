"""Exercise 6.4: a kernel that writes new tokens into pages."""

from __future__ import annotations

import re

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, InOut, Mistake, ReadByKernels, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from exercises.topics.cache_inputs import cache_layouts
from exercises.topics.cache_model import append_to_pages, copy_to_pages, is_copied, packed, packed_at, replaced_at
from exercises.topics.cache_requirements import ROUNDED, LaunchesWhereRowsAre, MovesRows, rounded_on_the_way
from exercises.topics.cache_slips import PAGE_APPEND
from exercises.topics.paging import tokens_first


def appended(key, value, key_pages, value_pages, slots):
    """Each token's key and value in its slot."""
    size = key_pages.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_pages[slot // size, :, slot % size] = key[token]
            value_pages[slot // size, :, slot % size] = value[token]


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
    tokens = [draw.normal(3, 2, 16) for _ in "kv"]
    pools = [InOut(draw.normal(3, 2, 4, 16)) for _ in "kv"]
    far = beyond_32_bits(draw, "pages", pools, torch.tensor([9, 2, 11]), before=tuple(tokens))
    cases = [
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
        case("head dimension 80", [7, 2, 12], 8, 2, 8, 80),
        case("float16, head dimension 128", [1, 30, 17], 16, 2, 16, 128, torch.float16),
        case("keys cut out of a fused q, k, v; values stored head by head", [6, 1, 11], 4, 2, 4, 16, change=packed),
        case("key pages stored token by token", [6, 1, 11], 4, 2, 4, 16, change=token_by_token),
        case("12 tokens, 2 heads, bytes counted", list(range(3, 15)), 4, 2, 4, 64, metered=True),
    ]
    return cases + far


def append_bytes(key, value, key_pages, value_pages, slots):
    """Each key and value read once and written once."""
    return 4 * key.numel() * key.element_size()


def drawn(
    draw, *, slots, heads, page_size, head_dim, dtype, key_layout, value_layout, key_pages_layout, value_pages_layout
):
    """What the contract's choices make: arguments of `append_to_pages`."""
    chosen, pages = slots(draw, page_size)
    tokens = [draw.normal(len(chosen), heads, head_dim, dtype=dtype) for _ in "kv"]
    pools = [draw.normal(pages, heads, page_size, head_dim, dtype=dtype) for _ in "kv"]
    key, value = (layout(draw, tensor) for layout, tensor in zip((key_layout, value_layout), tokens))
    layouts = key_pages_layout, value_pages_layout
    key_pages, value_pages = (InOut(layout(draw, pool)) for layout, pool in zip(layouts, pools))
    return key, value, key_pages, value_pages, torch.tensor(chosen, dtype=torch.int64)


def _anywhere(count, padding=0):
    """So many tokens anywhere in a pool, and so many more that are not written."""

    def make(draw, page_size):
        pages = -(-count // page_size) + draw.integer(1, 4)
        chosen = [*draw.permutation(pages * page_size)[:count].tolist(), *[-1] * padding]
        return [chosen[i] for i in draw.permutation(len(chosen)).tolist()], pages

    return make


def _both_ends(draw, page_size):
    pages = draw.integer(2, 5)
    return [pages * page_size - 1, 0], pages


CONTRACT = Contract(
    drawn,
    choices={
        "slots": (
            Level(_anywhere(1), "1 token"),
            Level(_anywhere(2), "2 tokens"),
            Level(_anywhere(7), "7 tokens"),
            Level(_anywhere(3, padding=2), "3 tokens and 2 not to be written"),
            Level(_anywhere(0, padding=3), "3 tokens, none to be written"),
            Level(_both_ends, "the last slot and the first"),
        ),
        "heads": (1, 2, 3),
        "page_size": (1, 2, 3, 5, 16),
        "head_dim": (1, 16, 20, 33, 160),
        "dtype": (torch.float32, torch.float16),
        "key_layout": unit_last("key"),
        "value_layout": unit_last("value"),
        "key_pages_layout": cache_layouts("key_pages"),
        "value_pages_layout": cache_layouts("value_pages"),
    },
    says={
        "slots": "-1 for a token that is not to be written",
        "page_size": "page_size and head_dim may be any number",
        "dtype": "float32 or float16",
        "key_layout": "Any strides but the last, which is 1",
        "key_pages_layout": "strides likewise",
    },
    most=10,
)


def _padding_written(case, seen, got):
    """A store outside a pool by the program of a token that has no slot, or by one that looks at all of them."""
    stores = [access for access in seen.out_of_bounds if ": writes " in access]
    programs = [re.search(r"program \((\d+)", access) for access in stores]
    slots = case.args[4].tolist()
    return bool(stores) and all(
        found and int(found[1]) < len(slots) and slots[int(found[1])] == -1 for found in programs
    )


EXERCISE = Exercise(
    id="6.4",
    title="Append into pages",
    entries=("append_to_pages",),
    cases=append_cases,
    oracle=appended,
    contracts=(CONTRACT,),
    models=(
        model_of(append_to_pages, PAGE_APPEND, (copy_to_pages,), uses=(is_copied, packed, packed_at, replaced_at)),
    ),
    needs=TRITON,
    requirements=(
        LaunchesWhereRowsAre(rows=lambda *args: int((args[4] >= 0).sum())),
        Forbids(("index_put", "index_put_", "index_copy_", "scatter_"), beyond=lambda *args: args[4].numel()),
        ReadByKernels((0, 1)),
        MovesRows(append_bytes),
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
        Mistake("rounded_to_16_bits", ROUNDED, when=rounded_on_the_way(appended)),
        Mistake(
            "padding_written",
            "A token whose slot is -1 was written: before the pool, over the last slot of the head before, or into "
            "slot 0. It has no slot: store nothing where slot < 0.",
            when=_padding_written,
            every=True,
        ),
    ),
)
