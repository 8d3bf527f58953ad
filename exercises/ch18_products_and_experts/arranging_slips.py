"""What goes wrong on the way from tokens to experts and back, for exercise 18.6: edits of its two meanings."""

import torch

from course_lib.checker import edits
from exercises.ch18_products_and_experts.product_steps import ways

OWN, FILL, TILES = "slot[(flat == expert) & served]", "tiles * block,), sentinel", "-(-number // block)"
PUT, EACH, TILE = "filled[:number] = own[: len(filled)]", "slots.append(filled)", "torch.full((tiles,), expert)"
SLOTS, OWNERS = "torch.cat(slots).int()", "torch.cat(tile_experts).int()"
IN_ORDER = (
    *edits("A choice of -1 was taken for one of the first or the last expert. It is not served, and has no place.",
        minus_one_wraps=("(flat == expert) & served", "flat % count == expert"),
        minus_one_wraps__first=("(flat == expert) & served", "flat.clamp(min=0) == expert")),
    *edits("An expert whose slots fill their blocks exactly got one more. Round up: (number + block - 1) // block.",
        block_too_many=(TILES, "number // block + (number > 0)"), block_too_many__empty=(TILES, "number // block + 1")),
    *edits("An expert without a choice got a block. It has no place.", empty_expert=(TILES, f"max(1, {TILES})")),
    *edits("An expert's last slots, which fill no block, are missing.", last_slots_lost=(TILES, "number // block")),
    *edits("Places after an expert's slots do not hold the sentinel. It is tokens · k, the number of all slots.",
        **{f"sentinel_wrong__{number}": (FILL, FILL.replace("sentinel", value)) for number,
        value in enumerate( ("-1", "experts.shape[0]", "sentinel - 1", "0", "int(served.sum())"))}),
    *edits("The entries are tokens. They should be slots: t · k + c says also which choice of the token it is.",
        tokens_for_slots=(EACH, "slots.append(torch.where(filled == sentinel, sentinel, filled // experts.shape[1]))")),
    *edits("Slots were numbered choice by choice. Choice c of token t is slot t · k + c: flatten [tokens, k] as it is.",
        numbered_by_choice=("experts.flatten().long()", "experts.T.flatten().long()")),
    *edits("Sentinels stand before an expert's slots. They come after them.",
        sentinels_first=(PUT, PUT + "\nfilled = filled.view(-1, block).flip(1).flatten()")),
    *edits("Experts stand in descending order.", experts_reversed=("in range(count)", "in reversed(range(count))")),
    *edits("tile_experts counts the experts that have a choice. It should hold their own numbers.",
        experts_renumbered=(TILE, "torch.full((tiles,), len(torch.cat(tile_experts).unique()))")),
    *edits("tile_experts has one entry an expert, place or slot, not one a block.", **ways("wrong_entries", TILE,
        "torch.full((min(1, tiles),), expert)", "torch.full((tiles * block,), expert)",
        "torch.full((number,), expert)")),
    *edits("tile_experts is in another order than the places.", tile_experts_reversed=(OWNERS, f"{OWNERS}.flip(0)")),
    *edits("Only the end of the whole list was filled up. Each expert begins at a multiple of block.",
        filled_at_the_end=(f"return {SLOTS}, {OWNERS}", "own = torch.cat(slots)\nown = own[own < sentinel]\nleft ="
        " torch.full((-len(own) % block,), sentinel)\nreturn torch.cat([own, left]).int(), flat[own][::block].int()")),
    *edits("The slots were numbered among the choices that are served. Slot t · k + c counts all choices.",
        numbered_among_served=("torch.arange(sentinel)", "served.cumsum(0) - 1")),
    *edits("A token that names an expert twice has one slot for it. Each choice has its own.", one_slot_a_token=(OWN,
        f"torch.tensor(sorted({{s // experts.shape[1]: s for s in reversed({OWN}.tolist())}}" ".values())).long()")),
    *edits("Expert 0 or the last expert has no place.", expert_missing=("range(count)", "range(1, count)"),
        expert_missing__last=("range(count)", "range(count - 1)")),
    *edits("An expert has one slot alone (vllm-xpu-kernels#453).", first_slot_alone=(PUT, "filled[:1] = own[:1]")),
    *edits("Places are not filled up: experts begin at multiples of block.", not_filled_up=(EACH, "slots.append(own)")),
)  # fmt: skip

WEIGHTED, ADDED, ROWS = "rows[places].to(wide) * weight", "out.index_add(0, token, weighted)", "rows[places].to(wide)"
WEIGHT, REAL, SERVED_SUM = "weights.flatten()[of_place, None]", "slots < tokens * k", "rows.to(wide)[~taken].sum(0)"
FIRST_ROW, LAST_ROW = (f"missing_rows(rows, slots, weights, {place})" for place in (0, -1))
IN_SUM = (
    *edits("Rows at sentinel places were multiplied by 0 and added. They may hold NaN, and 0 · NaN is NaN: leave them "
        "out (torchtitan#1237).", **ways("sentinel_rows_added", ADDED, f"{ADDED} + 0 * {SERVED_SUM}",
        f"{ADDED}\nout[-1] = out[-1] + 0 * {SERVED_SUM}", f"{ADDED} + 0 * {LAST_ROW}")),
    *edits("The weight was taken by token. It belongs to the choice: weights[t, c] (Triton-distributed#133).",
        **ways("weight_by_token", WEIGHT, "weights[token, 0, None]", "weights.flatten()[token, None]")),
    *edits("The weight was taken by place. It belongs to the slot at that place.",
        weight_by_place=(WEIGHT, "weights.flatten()[places % weights.numel(), None]"),
        weight_by_place__served=(WEIGHT, "weights.flatten()[torch.arange(len(places)) % weights.numel(), None]")),
    *edits("The weight is that of another choice. Slot t · k + c has weights[t, c].", **ways("weight_of_another_choice",
        WEIGHT, "weights.flip(1).flatten()[of_place, None]", "weights.T.flatten()[of_place, None]")),
    *edits("The weights are missing.", weights_missing=(WEIGHTED, ROWS)),
    *edits("The weights were applied twice (rtp-llm#884).", weights_twice=(WEIGHTED, WEIGHTED + " * weight")),
    *edits("A token's rows replace each other. Add them up.", replaced=(ADDED, "out.index_copy(0, token, weighted)")),
    *edits("The sum was divided by k, or by the weights' sum. It is a plain sum.",
        averaged=(ADDED, ADDED + " / k"), averaged__weights=(ADDED, ADDED + " / weights.sum(1, keepdim=True)")),
    *edits("A slot's token is slot // k, and no other.", token_of_the_slot=("of_place // k", "of_place % tokens")),
    *edits("Rows lie at places, not in slots' order.", rows_by_slot=(ROWS, "rows[of_place % len(rows)].to(wide)")),
    *edits("A choice without a place added row 0, or the last row. It adds nothing.",
        missing_adds_a_row=(ADDED, f"{ADDED} + {FIRST_ROW}"), missing_adds_a_row__1=(ADDED, f"{ADDED} + {LAST_ROW}")),
    *edits("The sentinel was taken for tokens, but it is tokens · k.", sentinel_is_tokens=(REAL, "slots < tokens")),
    *edits("Slot 0 or the last slot was left out.", slot_missing=(REAL, f"({REAL}) & (slots > 0)"),
        slot_missing__last=(REAL, REAL + " - 1")),
)  # fmt: skip


def missing_rows(rows, slots, weights, place):
    """What choices without a place add if each takes this row."""
    missing = ~torch.isin(torch.arange(weights.numel()), slots.long()).view(weights.shape)
    added = (weights * missing).sum(1, keepdim=True) * rows[place].float() if len(rows) else torch.zeros(())
    return torch.where(missing.any(1, keepdim=True), added, 0.0)
