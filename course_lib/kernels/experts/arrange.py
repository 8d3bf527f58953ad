"""The choices of all tokens in the order of their experts, in tiles that belong to one expert each.

    slot     number of a choice: token · k + choice
    place    where its row lies: slots[place] is the slot. An expert's places follow each other, with its slots in
             ascending order. They begin at a multiple of `block`, so a tile of `block` places is one expert's
    beyond an expert's slots, up to the next tile, its places hold the sentinel tokens · k, and nothing is their row

What it costs is padding. Of 128 experts with 8 for each token, tiles of 128 places hold 32 times as many places as
slots at 64 tokens, 2.0 times at 1024 and 1.12 times at 8192; tiles of 16 hold 4.0, 1.12 and 1.01 times as many.

How many tiles there are depends on the numbers, and the host would have to wait for them. So `arrange` makes as many
as there can be, in which the rest has no expert (-1), and what works on them looks there first. It can be part of a
CUDA graph.

A sort would put the slots in order, and a dozen further operations would place them: for one token a dozen launches
with eight numbers each. Here is one launch. Each expert has a program, which counts the choices of all experts. So it
knows where its own places begin without hearing from the others, and then writes them down. Bytes: 16 a choice for each
expert, nearly all from the L2 cache.

Source: Gale et al., MegaBlocks, arXiv 2211.15841.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import check_dimensions, check_tensor
from course_lib.kernels.common.signatures import signature_of

LEAST_AT_ONCE, MOST_AT_ONCE = 128, 4096  # choices of a step; a thread has one of them at least


class Arrangement(NamedTuple):
    """Which row lies where; all int32, on the device of the choices.

    slots: [places], the slot of each place, or the sentinel.
    tile_experts: [places / block], the expert of each tile; -1 for tiles that are not in use, which come last.
    first_tiles: [experts + 1], where each expert's tiles begin; the last number says how many are in use.
    places: [tokens, k], the place of each choice, or -1 for a choice that no expert here serves.
    """

    slots: torch.Tensor
    tile_experts: torch.Tensor
    first_tiles: torch.Tensor
    places: torch.Tensor

    @property
    def sentinel(self) -> int:
        return self.places.numel()

    @property
    def block(self) -> int:
        """Places in a tile."""
        return self.slots.numel() // max(1, self.tile_experts.numel())


@triton.jit
def load_choices(experts_pointer, slot, choices, k, token_stride, choice_stride, count):
    """The expert of each slot [BLOCK]; count where it is none of those here, and beyond the end count + 1."""
    place = (slot // k).to(tl.int64) * token_stride + slot % k * choice_stride
    expert = tl.load(experts_pointer + place, mask=slot < choices, other=0).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < count), expert, count)
    return tl.where(slot < choices, expert, count + 1)


@triton.jit(do_not_specialize=("choices", "most_tiles"))
def arrange_kernel(
    experts_pointer, slots_pointer, tile_experts_pointer, first_tiles_pointer, places_pointer,
    choices, k, count, block, most_tiles, token_stride, choice_stride, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one expert. The last one has the choices that are not served, and the tiles that are not in use."""
    mine, number = tl.program_id(0), tl.arange(0, BLOCK)
    counts, expert = tl.zeros([BINS], tl.int32), tl.arange(0, BINS)
    for start in tl.range(0, choices, BLOCK):
        chosen = load_choices(experts_pointer, start + number, choices, k, token_stride, choice_stride, count)
        counts += tl.histogram(chosen, BINS)
    tiles = tl.where(expert < count, (counts + block - 1) // block, 0)  # [BINS]
    begin = tl.sum(tl.where(expert < mine, tiles, 0))
    end = tl.where(mine < count, begin + tl.sum(tl.where(expert == mine, tiles, 0)), most_tiles)
    tl.store(first_tiles_pointer + mine, begin)

    place = begin * block
    for start in tl.range(0, choices, BLOCK):
        slot = start + number
        chosen = load_choices(experts_pointer, slot, choices, k, token_stride, choice_stride, count)
        here = chosen == mine
        if mine < count:
            places = place + tl.cumsum(here.to(tl.int32)) - 1  # [BLOCK]
            tl.store(slots_pointer + places, slot, mask=here)
            tl.store(places_pointer + slot, places, mask=here)
            place += tl.sum(here.to(tl.int32))
        else:
            tl.store(places_pointer + slot, -1, mask=here)
    for start in tl.range(place, end * block, BLOCK):
        tl.store(slots_pointer + start + number, choices, mask=start + number < end * block)  # the sentinel
    for start in tl.range(begin, end, BLOCK):
        owner = tl.where(mine < count, mine, -1)
        tl.store(tile_experts_pointer + start + number, owner, mask=start + number < end)


def arrange(experts: torch.Tensor, count: int, block: int) -> Arrangement:
    """The arrangement of choices among experts 0 … count - 1.

    Args:
        experts: integers [tokens, k], of any strides; -1, or any number that is none of these experts', is a choice not
            served here. Tokens may be 0.
        count: experts, at least 1.
        block: places in a tile, at least 1.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_choices(experts, count, block)
    choices, k = experts.numel(), experts.shape[1]
    most_tiles = (choices + min(count, choices) * (block - 1)) // block
    sizes = (most_tiles * block,), (most_tiles,), (count + 1,), experts.shape
    arrangement = Arrangement(*(torch.empty(size, dtype=torch.int32, device=experts.device) for size in sizes))
    at_once = min(MOST_AT_ONCE, max(LEAST_AT_ONCE, triton.next_power_of_2(choices)))
    arrange_kernel[(count + 1,)](
        experts, *arrangement, choices, k, count, block, most_tiles, *experts.stride(),
        triton.next_power_of_2(count + 2), at_once, num_warps=warps_for(at_once),
    )  # fmt: skip
    return arrangement


def warps_for(at_once: int) -> int:
    """Of a program with so many choices in a step."""
    return 8 if at_once >= 1024 else 4


def arrange_reference(experts: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots, tile_experts) of the tiles in use, expert by expert."""
    slots, tile_experts = [], []
    for expert in range(count):
        mine = (experts.flatten() == expert).nonzero().flatten().tolist()
        mine += [experts.numel()] * (-len(mine) % block)
        slots += mine
        tile_experts += [expert] * (len(mine) // block)
    return torch.tensor(slots, dtype=torch.int32), torch.tensor(tile_experts, dtype=torch.int32)


def check_choices(experts, count, block) -> None:
    check_dimensions("experts", experts, "[tokens, k]", empty_allowed=True)
    check_tensor("experts", experts)
    if experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"experts has dtype {experts.dtype}; allowed are torch.int32 and torch.int64.")
    if experts.shape[1] < 1:
        raise ValueError(f"experts has shape {tuple(experts.shape)}; each token must have at least one choice.")
    for name, given in (("count", count), ("block", block)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"{name} is {given!r}; it must be an int of at least 1.")


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: few choices and many, among 128 experts."""
    names = "experts_pointer", "slots_pointer", "tile_experts_pointer", "first_tiles_pointer", "places_pointer"
    signature = signature_of(arrange_kernel, "i64", **dict.fromkeys(names[1:], "*i32"))
    return [CompileCase(arrange_kernel, signature, {"BINS": 256, "BLOCK": at_once}, num_warps=warps_for(at_once),
                        divisible=names, label=f"{at_once} at once")
            for at_once in (LEAST_AT_ONCE, MOST_AT_ONCE)]  # fmt: skip
