"""The choices of all tokens in the order of their experts, in tiles that belong to one expert each.

    slot     number of a choice: token · k + choice
    place    where its row lies: slots[place] is the slot. An expert's places follow each other, with its slots in
             ascending order. They begin at a multiple of `block`, so a tile of `block` places is one expert's
    beyond an expert's slots, up to the next tile, its places hold the sentinel tokens · k, and nothing is their row

What it costs is padding. Of 128 experts with 8 for each token, tiles of 128 places hold 32 times as many places as
slots at 64 tokens, 2.0 times at 1024 and 1.12 times at 8192; tiles of 16 hold 4.0, 1.12 and 1.01 times as many.

How many tiles there are depends on the numbers, and the host would have to wait for them. So `arrange` makes as many
as there can be, in which the rest has no expert (-1), and what works on them looks there first. It can be part of a
CUDA graph. Bytes: some 40 a choice, most of them for the sort.

Source: Gale et al., MegaBlocks, arXiv 2211.15841.
"""

from typing import NamedTuple

import torch

from course_lib.kernels.common.checks import check_dimensions


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


def arrange(experts: torch.Tensor, count: int, block: int) -> Arrangement:
    """The arrangement of choices among experts 0 … count - 1.

    Args:
        experts: integers [tokens, k]; -1, or any number that is none of these experts', is a choice not served here.
            Tokens may be 0.
        count: experts, at least 1.
        block: places in a tile, at least 1.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_choices(experts, count, block)
    choices = experts.numel()
    here = (experts >= 0) & (experts < count)
    key, slot = torch.where(here, experts, count).flatten().sort(stable=True)  # those not served come last
    number = torch.arange(max(count, choices) + 1, device=experts.device)
    first = torch.searchsorted(key, number[: count + 1])  # [count + 1], where each expert's choices begin in this order
    tiles = (first.diff() + block - 1) // block
    first_tiles = torch.cat([first.new_zeros(1), tiles.cumsum(0)])  # [count + 1]

    most_tiles = (choices + min(count, choices) * (block - 1)) // block
    beyond = most_tiles * block
    place = first_tiles[key] * block + number[:choices] - first[key]
    place = torch.where(key < count, place, beyond)  # [choices], in the order of the sort
    slots = slot.new_full((beyond + 1,), choices).scatter(0, place, slot)[:beyond]
    places = torch.empty_like(place).scatter(0, slot, torch.where(key < count, place, -1)).view(experts.shape)
    tile = torch.arange(most_tiles, device=experts.device)
    owner = torch.searchsorted(first_tiles[1:], tile, right=True)  # how many experts' tiles end before it
    tile_experts = torch.where(owner < count, owner, -1)
    return Arrangement(*(part.to(torch.int32) for part in (slots, tile_experts, first_tiles, places)))


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
    if experts.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"experts has dtype {experts.dtype}; allowed are torch.int32 and torch.int64.")
    if experts.shape[1] < 1:
        raise ValueError(f"experts has shape {tuple(experts.shape)}; each token must have at least one choice.")
    for name, given in (("count", count), ("block", block)):
        if isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ValueError(f"{name} is {given!r}; it must be an int of at least 1.")
