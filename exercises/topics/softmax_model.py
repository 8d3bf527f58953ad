"""Maximum and sum of rows as they are found tile after tile, with what can go wrong at each step.

The exercises of chapter 03 differ in what they make of these two numbers; their models stand beside them and take the
steps from here (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3). All rows are computed at once, in the answer's
own precision.
"""

from __future__ import annotations

import math

import torch

from course_lib.checker.specification.model import Slips
from exercises.topics.memory import load

INF = math.inf
LOG2_E = math.log2(math.e)
FINITE_PADDING = {"65504": -65504.0, "1e4": -1e4, "1e5": -1e5, "1e6": -1e6, "1e9": -1e9, "1e10": -1e10}
FINITE_STARTS = {"least_number": torch.finfo(torch.float32).min, "1e38": -1e38, "1e30": -1e30, "1e9": -1e9}


def guarded(maximum: torch.Tensor) -> torch.Tensor:
    """What to subtract: the maximum, or 0 where nothing but -inf was seen."""
    return torch.where(maximum == -INF, 0.0, maximum)


class Running:
    """The running maximum and sum of rows of any shape; `narrow` is the dtype that the scores arrive in.

    Style: "starts_with_the_first_tile" has no state before the first tile.
    """

    def __init__(self, slips: Slips, shape: torch.Size | tuple, narrow: torch.dtype = torch.float32):
        s = self.slips = slips
        self.narrow, self.fresh = narrow, True
        start = 0.0 if s("maximum_starts_at_zero") else INF if s("nan_from_the_start__plus_infinity") else -INF
        for name, number in FINITE_STARTS.items():
            if s(f"minus_infinity_is_a_number__{name}"):
                start = number
        dtype = narrow if s("cast_before_the_sum__everything", "sum_in_float16__everything") else torch.float32
        self.maximum = torch.full(shape, start, dtype=dtype)
        self.total = torch.zeros(shape, dtype=dtype)

    def step(self, tile: torch.Tensor, active: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The weights of a tile [..., width], and the factor by which what was added before changes.

        active: bool, of the rows' shape: those that look at this tile.
        """
        s, old = self.slips, self.maximum
        tile = tile.to(old.dtype)
        top = tile.amin(-1) if s("minimum_for_maximum") else tile.amax(-1)
        if s("magnitudes_for_maximum"):
            top = tile.abs().amax(-1)
        if s("one_maximum_for_all_rows"):
            top = tile.max().expand_as(top)
        new = top if s("maximum_forgets_the_old", "last_tile_only") else torch.maximum(old, top)
        reference = guarded(new)
        if s("empty_state_nan", "nan_repaired_at_the_end", "sum_not_rescaled__maximum_first"):
            reference = new
        if s("empty_state_nan__guarded_at_the_first_tile") and not self.fresh:
            reference = new
        if s("no_running_max", "no_maximum"):
            reference = torch.zeros_like(new)
        own = reference
        if s("tile_not_rescaled", "tile_not_rescaled__nor_the_sum"):
            own = guarded(top)
        if s("tile_not_rescaled__unguarded"):
            own = top
        if s("nan_from_the_start__old_maximum") or s("old_maximum_in_weights") and s("starts_with_the_first_tile"):
            own = top if self._at_its_start() else old
        if s("base_2__exp2_for_exp", "base_2__of_everything"):
            weights, rescale = torch.exp2(tile - own[..., None]), torch.exp2(old - reference)
        else:
            weights, rescale = torch.exp(tile - own[..., None]), self._rescale(old, new, reference)
        if s("cast_before_the_sum__weights"):
            weights = weights.to(self.narrow).to(old.dtype)
        added = weights.sum(-1)
        factor = rescale
        if s("sum_not_rescaled", "nothing_rescaled", "tile_not_rescaled__nor_the_sum"):
            factor = torch.ones_like(factor)
        if self._at_its_start():
            factor = rescale = torch.ones_like(factor)
        total = (self.total + added) * factor if s("sum_rescaled_after_adding") else self.total * factor + added
        if s("last_tile_only", "last_tile_only__sum"):
            total = added
        if s("sum_in_float16", "sum_in_float16__always"):
            total = total.to(torch.float16 if s("sum_in_float16__always") else self.narrow).to(old.dtype)
        if s("sum_in_float16__cut"):
            total = _cut(total, self.narrow)
        maximum = (
            old
            if s("last_tile_only__maximum_not_updated", "nan_from_the_start__never_updated")
            and not self._at_its_start()
            else new
        )
        if active is not None:
            total, maximum = torch.where(active, total, self.total), torch.where(active, maximum, old)
        self.total, self.maximum, self.fresh = total, maximum, False
        return weights, rescale

    def _at_its_start(self) -> bool:
        return self.fresh and self.slips("starts_with_the_first_tile")

    def _rescale(self, old: torch.Tensor, new: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        s = self.slips
        if s("no_running_max", "no_maximum"):
            return torch.ones_like(old)
        if s("nan_from_the_start__turned_round") or s("rescale_turned_round") and s("starts_with_the_first_tile"):
            return torch.exp(reference - old)
        if s("nan_from_the_start__no_exp"):
            return old - reference
        if s("sum_not_rescaled__maximum_first"):
            return torch.exp(new - reference)
        return torch.exp(old - reference)

    @property
    def measured_from(self) -> torch.Tensor:
        """What the sum is relative to."""
        return torch.zeros_like(self.maximum) if self.slips("no_running_max", "no_maximum") else self.maximum


def _cut(total: torch.Tensor, narrow: torch.dtype) -> torch.Tensor:
    """A sum in 16 bits; bfloat16 is cut to its bits, as Triton's interpreter does it, and not rounded."""
    if narrow != torch.bfloat16:
        return total.to(narrow).to(total.dtype)
    return (total.float().contiguous().view(torch.int32) & -(1 << 16)).view(torch.float32).to(total.dtype)


def statistics(slips: Slips, tiles, narrow: torch.dtype = torch.float32) -> Running:
    """The state after all tiles: an iterable of [rows, width]."""
    running = None
    for tile in tiles:
        running = running or Running(slips, tile.shape[:-1], narrow)
        running.step(tile)
    return running


def left_in_buffer(x: torch.Tensor, tile: int) -> torch.Tensor:
    """What a list of tiles holds once the pass is over: all are views of one buffer, which later tiles overwrote."""
    buffer = torch.full((*x.shape[:-1], min(tile, x.shape[-1])), math.nan, dtype=x.dtype)
    widths = []
    for part in x.split(tile, dim=-1):
        buffer[..., : part.shape[-1]] = part
        widths.append(part.shape[-1])
    return torch.cat([buffer[..., :width] for width in widths], dim=-1)


def padding(slips: Slips) -> float:
    """What lanes past the end are loaded as."""
    for name, number in FINITE_PADDING.items():
        if slips(f"tail_is_a_number__{name}"):
            return number
    return 0.0 if slips("tail_not_masked") else -INF


def loaded_rows(
    slips: Slips, x: torch.Tensor, block: int, fill: float = -INF, limit: int | None = None
) -> torch.Tensor:
    """[rows, tiles, block] of a matrix as a kernel reads it by its row stride; `fill` past the end of a row.

    The mask takes another limit where one is given.
    """
    rows, columns = x.shape
    stride = columns if slips("row_stride_ignored") else x.stride(0)
    lanes = torch.arange(-(-columns // block) * block)
    offsets = torch.arange(rows)[:, None] * stride + lanes
    mask = None if slips("load_not_masked") else (lanes < (columns if limit is None else limit))[None, :]
    return load(slips, x, offsets, mask, fill).view(rows, -1, block)
