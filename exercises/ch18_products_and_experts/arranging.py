"""Slots in the order of their experts and back, for exercise 18.6: inputs, the meaning of `arrange`, and slips."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from course_lib.checker import edits, model_of
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


SERVED = ("any", "one full expert", "some not served", "none served", "few experts", "the last expert alone")


def choices_of(draw, which, tokens, k, count):
    experts = draw.integers(tokens, k, low=0, high=count)
    return {
        "any": experts, "one full expert": torch.full_like(experts, draw.integer(0, count)),
        "some not served": experts.masked_fill(draw.uniform(tokens, k) < 0.4, -1),
        "none served": torch.full_like(experts, -1), "few experts": (experts // 3 * 3 + 1) % count,
        "the last expert alone": torch.full_like(experts, count - 1),
    }[which]  # fmt: skip


def to_arrange(draw, *, tokens, k, count, block, which="any", dtype=torch.int64):
    return choices_of(draw, which, tokens, k, count).to(dtype), count, block


ORDERS = Contract(
    to_arrange,
    choices={
        "tokens": (1, 2, 17, 64), "k": (1, 2, 3, 20), "count": (1, 2, 7, 64), "block": (1, 2, 3, 16, 300),
        "which": tuple(Level(one, one) for one in SERVED), "dtype": (torch.int64, torch.int32),
    },
    says={"tokens": "at least 1 of each", "count": "how many experts there are, at least 1",
          "block": "block: at least 1", "which": "or -1 for a choice that is not served here",
          "dtype": "int64 or int32"},
    entry="arrange", most=20,
)  # fmt: skip

OWN, FILL, TILES = "slot[(flat == expert) & served]", "tiles * block,), sentinel", "-(-number // block)"
PUT, EACH, TILE = "filled[:number] = own[: len(filled)]", "slots.append(filled)", "torch.full((tiles,), expert)"
IN_ORDER = (
    *edits("A choice of -1 was taken for one of an expert, the first or the last. It is not served, and has no place.",
        minus_one_wraps=("(flat == expert) & served", "flat % count == expert"),
        minus_one_wraps__first=("(flat == expert) & served", "flat.clamp(min=0) == expert")),
    *edits("An expert whose slots fill their blocks exactly got one more. Round up: (number + block - 1) // block.",
        block_too_many=(TILES, "number // block + (number > 0)"), block_too_many__empty=(TILES, "number // block + 1")),
    *edits("An expert without a choice got a block. It has no place.",
        empty_expert=(TILES, "max(1, -(-number // block))")),
    *edits("An expert's last slots are missing: they do not fill a block, and were left out.",
        last_slots_lost=(TILES, "number // block")),
    *edits("Places after an expert's slots do not hold the sentinel. It is tokens · k, the number of all slots.",
        **{f"sentinel_wrong__{name}": (FILL, FILL.replace("sentinel", value)) for name, value in {
            "minus_one": "-1", "tokens": "experts.shape[0]", "last": "sentinel - 1", "zero": "0",
            "served": "int(served.sum())"}.items()},
        sentinel_wrong__places=("torch.cat(slots).int()", "(s := torch.cat(slots)).where(s < sentinel, len(s)).int()")),
    *edits("The entries are tokens. They should be slots: t · k + c says also which choice of the token it is.",
        tokens_for_slots=(EACH, "slots.append(torch.where(filled == sentinel, sentinel, filled // experts.shape[1]))")),
    *edits("Slots were numbered choice by choice. Choice c of token t is slot t · k + c: flatten [tokens, k] as it is.",
        numbered_by_choice=("experts.flatten().long()", "experts.T.flatten().long()")),
    *edits("Sentinels stand before an expert's slots. They come after them.",
        sentinels_first=(PUT, PUT + "\nfilled = filled.view(-1, block).flip(1).flatten()"),
        sentinels_first__in_the_block=(PUT, "filled[len(filled) - number % block :] = own[number - number % block :]\n"
        "filled[: number // block * block] = own[: number // block * block]")),
    *edits("The experts stand in another order. The one with the smallest number comes first.",
        experts_reversed=("in range(count)", "in reversed(range(count))")),
    *edits("tile_experts counts the experts that have a choice. It should hold their own numbers.",
        experts_renumbered=(TILE, "torch.full((tiles,), len(torch.cat(tile_experts).unique()))")),
    *edits("tile_experts has one entry for each expert, place or slot. It should have one for each block of places.",
        wrong_entries=(TILE, "torch.full((min(1, tiles),), expert)"),
        wrong_entries__place=(TILE, "torch.full((tiles * block,), expert)"),
        wrong_entries__slot=(TILE, "torch.full((number,), expert)")),
    *edits("tile_experts stands in another order than the places.",
        tile_experts_reversed=("torch.cat(tile_experts).int()", "torch.cat(tile_experts).flip(0).int()")),
    *edits("Only the end of the whole list was filled up, so a block holds slots of several experts. Each expert "
        "begins at a multiple of block.",
        filled_at_the_end=("return torch.cat(slots).int(), torch.cat(tile_experts).int()",
        "return filled_at_the_end(slots, sentinel, flat, block)"),
        filled_at_the_end__as_long=("torch.cat(slots).int()", "torch.cat(slots).int()[(torch.cat(slots) == "
        "sentinel).int().argsort(stable=True)]")),
    *edits("The slots were numbered among the choices that are served. Slot t · k + c counts all choices.",
        numbered_among_served=(EACH, "slots.append(F.pad(served.cumsum(0) - 1, (0, 1), value=sentinel)[filled])")),
    *edits("A token that names an expert twice has one slot for it. Each choice is a slot of its own.",
        one_slot_a_token=(OWN, f"first_of_tokens({OWN}, experts.shape[1])")),
    *edits("Expert 0 or the last expert has no place.", expert_missing=("range(count)", "range(1, count)"),
        expert_missing__last=("range(count)", "range(count - 1)")),
    *edits("Only the first slot of each expert was put in its place (vllm-xpu-kernels#453).",
        first_slot_alone=(PUT, "filled[:1] = own[:1]")),
    *edits("Places are not filled up: each expert should begin at a multiple of block.",
        not_filled_up=(EACH, "slots.append(own)")),
)  # fmt: skip

WEIGHTED, ADDED, ROWS = "rows[places].to(wide) * weight", "out.index_add(0, token, weighted)", "rows[places].to(wide)"
WEIGHT, REAL, SERVED_SUM = "weights.flatten()[of_place, None]", "slots < tokens * k", "rows.to(wide)[~taken].sum(0)"
IN_SUM = (
    *edits("Rows at sentinel places were multiplied by 0 and added. They may hold NaN, and 0 · NaN is NaN: leave them "
        "out (torchtitan#1237).",
        sentinel_rows_added=(ADDED, f"{ADDED} + 0 * {SERVED_SUM}"),
        sentinel_rows_added__last=(ADDED, f"{ADDED}\nout[-1] = out[-1] + 0 * {SERVED_SUM}"),
        sentinel_rows_added__missing=(ADDED, ADDED + " + 0 * missing_rows(rows, slots, weights, -1)")),
    *edits("The weight was taken by token. It belongs to the choice: weights[t, c] (Triton-distributed#133).",
        weight_by_token=(WEIGHT, "weights[token, 0, None]"),
        weight_by_token__flat=(WEIGHT, "weights.flatten()[token, None]")),
    *edits("The weight was taken by place. It belongs to the slot at that place.",
        weight_by_place=(WEIGHT, "weights.flatten()[places % weights.numel(), None]"),
        weight_by_place__served=(WEIGHT, "weights.flatten()[torch.arange(len(places)) % weights.numel(), None]")),
    *edits("The weight is that of another choice. Slot t · k + c has weights[t, c].",
        weight_of_another_choice=(WEIGHT, "weights.flip(1).flatten()[of_place, None]"),
        weight_of_another_choice__transposed=(WEIGHT, "weights.T.flatten()[of_place, None]")),
    *edits("The weights are missing.", weights_missing=(WEIGHTED, ROWS)),
    *edits("The weights were applied twice (rtp-llm#884).", weights_twice=(WEIGHTED, WEIGHTED + " * weight")),
    *edits("A token's rows replace each other. Add them, as index_add_ does.",
        replaced=(ADDED, "out.index_copy(0, token, weighted)")),
    *edits("The sum was divided by k, or by the weights' sum. It is a plain sum.",
        averaged=(ADDED, ADDED + " / k"), averaged__weights=(ADDED, ADDED + " / weights.sum(1, keepdim=True)")),
    *edits("A slot's token is slot // k. You took another number.",
        token_of_the_slot=("of_place // k", "of_place % tokens")),
    *edits("The rows were taken in the order of their slots, but they lie at their places.",
        rows_by_slot=(ROWS, "rows[of_place % len(rows)].to(wide)")),
    *edits("A choice without a place added row 0, or the last row. It adds nothing.",
        missing_adds_a_row=(ADDED, ADDED + " + missing_rows(rows, slots, weights, 0)"),
        missing_adds_a_row__last=(ADDED, ADDED + " + missing_rows(rows, slots, weights, -1)")),
    *edits("The sentinel was taken for tokens, but it is tokens · k: the number of all slots.",
        sentinel_is_tokens=(REAL, "slots < tokens")),
    *edits("Slot 0 or the last slot was left out.", slot_missing=(REAL, f"({REAL}) & (slots > 0)"),
        slot_missing__last=(REAL, REAL + " - 1")),
)  # fmt: skip


def first_of_tokens(own, k):
    """Of several slots of a token the first."""
    token = own // k
    return own[torch.cat([torch.ones(1, dtype=torch.bool), token.diff() != 0])[: len(own)]]


def filled_at_the_end(slots, sentinel, flat, block):
    every = torch.cat(slots)
    own = every[every < sentinel]
    filled = F.pad(own, (0, -len(own) % block), value=sentinel)
    return filled.int(), flat[own][::block].int()


def missing_rows(rows, slots, weights, place):
    """What choices without a place add if each takes this row."""
    missing = torch.ones(weights.numel() + 1, dtype=torch.bool)
    missing[slots.long()] = False
    missing = missing[:-1].view(weights.shape)
    if not len(rows):
        return torch.zeros(())
    added = (weights * missing).sum(1, keepdim=True) * rows[place].float()
    return torch.where(missing.any(1, keepdim=True), added, 0.0)


ARRANGED = model_of(
    ordered, IN_ORDER, parts=(arrangement,), uses=(first_of_tokens, filled_at_the_end), entry="arrange",
    most_pairs=60,
)  # fmt: skip
