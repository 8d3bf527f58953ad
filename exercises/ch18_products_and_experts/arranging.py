"""Slots in the order of their experts, for exercise 18.6: inputs, the meaning of `arrange` and its slips."""

from __future__ import annotations

import torch

from course_lib.checker import edits
from course_lib.checker.specification.contract import Contract, Level


def arrangement(experts, count, block):
    flat = experts.flatten().long()
    sentinel = len(flat)
    slot = torch.arange(sentinel)
    served = flat >= 0
    slots, tile_experts = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=torch.int64)]
    for expert in range(count):
        own = slot[(flat == expert) & served]
        number = len(own)
        tiles = -(-number // block)
        filled = torch.full((tiles * block,), sentinel)
        filled[:number] = own[: len(filled)]
        slots.append(filled)
        tile_experts.append(torch.full((tiles,), expert))
    return torch.cat(slots).int(), torch.cat(tile_experts).int()


def ordered(experts, count, block, *rest):
    """As `arrange`; the case in which lines are counted has further arguments, and its result is True."""
    return True if rest else arrangement(experts, count, block)


def choices_of(draw, which, tokens, k, count):
    experts = draw.integers(tokens, k, low=0, high=count)
    if which == "one full expert":
        experts[:] = draw.integer(0, count)
    if which == "the last expert alone":
        experts[:] = count - 1
    if which == "some not served":
        experts[draw.uniform(tokens, k) < 0.4] = -1
    if which == "few experts":
        experts = experts // 3 * 3 % count
    if which == "expert 0 empty":
        experts = experts.clamp(min=1) if count > 1 else experts
    if which == "most not served":
        experts[draw.uniform(tokens, k) < 0.9] = -1
    return torch.full_like(experts, -1) if which == "none served" else experts


def to_arrange(draw, *, tokens, k, count, block, which="any", dtype=torch.int64):
    return choices_of(draw, which, tokens, k, count).to(dtype), count, block


SERVED = ("any", "one full expert", "the last expert alone", "some not served", "most not served", "none served",
          "few experts", "expert 0 empty")  # fmt: skip
ORDERS = Contract(
    to_arrange,
    choices={
        "tokens": (1, 2, 17, 64), "k": (1, 2, 3, 8), "count": (1, 2, 7, 64), "block": (1, 2, 3, 16, 64),
        "which": tuple(Level(one, one) for one in SERVED), "dtype": (torch.int64, torch.int32),
    },
    says={"tokens": "at least 1 of each", "count": "how many experts there are, at least 1",
          "block": "block: at least 1", "which": "or -1 for a choice that is not served here",
          "dtype": "int64 or int32"},
    entry="arrange", most=24,
)  # fmt: skip

OWN, FILL, TILES = "slot[(flat == expert) & served]", "tiles * block,), sentinel", "-(-number // block)"
FOUND, PUT = "(flat == expert) & served", "filled[:number] = own[: len(filled)]"
IN_ORDER = (
    *edits("A choice of -1 was taken for one of an expert: an index of -1 is the last element. It has no place.",
        minus_one_wraps=(FOUND, "flat % count == expert"),
        minus_one_wraps__first=(FOUND, "flat.clamp(min=0) == expert"),
        minus_one_wraps__sorted=(OWN, "slot[flat.argsort(stable=True)][(flat.clamp(min=0) == expert)"
        "[flat.argsort(stable=True)]]"),
        minus_one_wraps__shifted=(OWN, "in_runs(flat[served], flat.argsort(stable=True), expert)")),
    *edits("An expert whose slots fill their blocks exactly got one more block. Round up: (number + block - 1) // "
        "block.",
        block_too_many=(TILES, "number // block + (number > 0)"), block_too_many__empty=(TILES, "number // block + 1")),
    *edits("An expert without a choice got a block. It has no place.",
        empty_expert=(TILES, "max(1, -(-number // block))")),
    *edits("An expert's last slots are missing: they do not fill a block, and were left out.",
        last_slots_lost=(TILES, "number // block")),
    *edits("Places after an expert's slots do not hold the sentinel. It is tokens · k, the number of all slots.",
        **{f"sentinel_wrong__{name}": (FILL, FILL.replace("sentinel", value)) for name, value in {
            "minus_one": "-1", "tokens": "experts.shape[0]", "last": "sentinel - 1", "zero": "0",
            "more": "sentinel + 1",
            "count": "count", "served": "int(served.sum())", "largest": "2**31 - 1"}.items()},
        sentinel_wrong__repeated=(PUT, f"filled[:] = own[-1] if number else 0\n{PUT}")),
    *edits("The entries are tokens. They should be slots: t · k + c says also which choice of the token it is.",
        tokens_for_slots=("slots.append(filled)",
        "slots.append(torch.where(filled == sentinel, sentinel, filled // experts.shape[1]))"),
        tokens_for_slots__sentinel=("slots.append(filled)", "slots.append(filled // experts.shape[1])")),
    *edits("Slots were numbered choice by choice. Choice c of token t is slot t · k + c: flatten [tokens, k] as it is.",
        numbered_by_choice=("experts.flatten().long()", "experts.T.flatten().long()"),
        numbered_by_choice__slot=("slot[", "slot.view(-1, experts.shape[0]).T.flatten()[")),
    *edits("An expert's slots are not in ascending order.", descending=(OWN, OWN + ".flip(0)"),
        descending__by_choice=(OWN, f"{OWN}[({OWN} % experts.shape[1]).argsort(stable=True)]")),
    *edits("The experts stand in another order. The one with the smallest number comes first.",
        experts_reversed=("in range(count)", "in reversed(range(count))"),
        experts_reversed__fullest=("in range(count)", "in sorted(range(count), key=lambda e: -int((flat == e).sum()))"),
        experts_reversed__found=("in range(count)", "in dict.fromkeys(flat[served].tolist())")),
    *edits("tile_experts counts the experts that have a choice. It should hold their own numbers.",
        experts_renumbered=("torch.full((tiles,), expert)", "torch.full((tiles,), "
        "len(torch.cat(tile_experts).unique()))")),
    *edits("tile_experts has one entry for each expert. It should have one for each block of places.",
        one_entry_an_expert=("torch.full((tiles,), expert)", "torch.full((min(1, tiles),), expert)")),
    *edits("tile_experts has one entry for each place. It should have one for each block of places.",
        one_entry_a_place=("torch.full((tiles,), expert)", "torch.full((tiles * block,), expert)")),
    *edits("tile_experts has one entry for each slot. It should have one for each block of places.",
        one_entry_a_slot=("torch.full((tiles,), expert)", "torch.full((number,), expert)")),
    *edits("tile_experts stands in another order than the places.",
        tile_experts_reversed=("torch.cat(tile_experts).int()", "torch.cat(tile_experts).flip(0).int()")),
    *edits("All experts got as many places as the fullest one. Each has its own number of blocks, and an empty one "
        "none.",
        same_room_for_all=(TILES, "-(-int(torch.bincount(flat[served], minlength=count).max()) // block)"),
        same_room_for_all__some=(TILES, "(number > 0) * -(-int(torch.bincount(flat[served], minlength=count).max()) "
        "// block)")),
    *edits("Only the end of the whole list was filled up, so a block holds slots of several experts. Each expert "
        "begins at "
        "a multiple of block.",
        filled_at_the_end=("return torch.cat(slots).int(), torch.cat(tile_experts).int()",
        "return filled_at_the_end(slots, sentinel, flat, block)"),
        filled_at_the_end__as_long=("torch.cat(slots).int()", "real_ones_first(torch.cat(slots).int(), sentinel)")),
    *edits("The slots were numbered among the choices that are served. Slot t · k + c counts all choices.",
        numbered_among_served=("slots.append(filled)",
        "slots.append(torch.cat([served.cumsum(0) - 1, torch.tensor([sentinel])])[filled])")),
    *edits("The entries are no slots, but experts or choices.",
        no_slots=("slots.append(filled)", "slots.append(torch.where(filled == sentinel, sentinel, expert))"),
        no_slots__choices=("slots.append(filled)",
        "slots.append(torch.where(filled == sentinel, sentinel, filled % experts.shape[1]))")),
    *edits("A token that names an expert twice has one slot for it. Each choice is a slot of its own.",
        one_slot_a_token=(OWN, f"first_of_tokens({OWN}, experts.shape[1])")),
    *edits("The last expert has no place.", last_expert_missing=("range(count)", "range(count - 1)")),
    *edits("Expert 0 has no place.", first_expert_missing=("range(count)", "range(1, count)"),
        first_expert_missing__served=("flat >= 0", "flat > 0")),
    *edits("Only the first slot of each expert was put in its place (vllm-xpu-kernels#453).",
        first_slot_alone=(PUT, "filled[:1] = own[:1]")),
    *edits("Places are not filled up: each expert should begin at a multiple of block.",
        not_filled_up=("slots.append(filled)", "slots.append(own)")),
)  # fmt: skip


def in_runs(served, order, expert):
    """An expert's slots by its run of the order, where the choices that are not served stand in front and count."""
    begin = int((served < expert).sum())
    return order[begin : begin + int((served == expert).sum())]


def first_of_tokens(own, k):
    """Of several slots of a token the first."""
    token = own // k
    return own[torch.cat([torch.ones(1, dtype=torch.bool), token.diff() != 0])[: len(own)]]


def real_ones_first(slots, sentinel):
    return torch.cat([slots[slots < sentinel], slots[slots == sentinel]])


def filled_at_the_end(slots, sentinel, flat, block):
    every = torch.cat(slots)
    own = every[every < sentinel]
    filled = torch.nn.functional.pad(own, (0, -len(own) % block), value=sentinel)
    return filled.int(), flat[own][::block].int()


def not_ascending(case, seen, got):
    """The right slots for each expert, in another order."""
    if case.entry == "combine" or len(case.args) != 3 or not isinstance(got, (tuple, list)) or len(got) != 2:
        return False
    slots, tile_experts = arrangement(*case.args)
    if not all(isinstance(one, torch.Tensor) for one in got) or [one.shape for one in got] != [
        slots.shape, tile_experts.shape
    ] or not torch.equal(got[1].long(), tile_experts.long()):  # fmt: skip
        return False
    expert = tile_experts.long().repeat_interleave(case.args[2]) * (case.args[0].numel() + 1)
    same = torch.equal((got[0].long() + expert).sort().values, (slots.long() + expert).sort().values)
    filled = case.args[0].numel()
    return same and torch.equal(got[0] == filled, slots == filled) and not torch.equal(got[0], slots)


def fails_where_nothing_is_served(case, seen, got):
    """An error, where there are no places at all."""
    if seen.error is None:
        return False
    return len(case.args[1]) == 0 if case.entry == "combine" else bool((case.args[0] < 0).all())
