"""One run of slots for each sequence, reserved when it arrives: the layout that paging replaced.

A cache tensor of shape [batch, heads, capacity, head_dim] is the simplest case: everyone reserves the maximum. The
slots behind a sequence's last token are *internal* waste; a gap between two runs that is too short for the next
sequence is *external* waste.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from course_lib.serving.memory.errors import DoubleFree, NoHole, RegionFull, UnknownSequence


@dataclass
class Region:
    """A sequence's slots: start .. start + size - 1, of which the first `length` hold tokens."""

    start: int
    size: int
    length: int


class ContiguousAllocator:
    """Places runs of slots first fit: at the lowest address where one is free.

    Args:
        slots: tokens that the whole cache can hold.

    Raises:
        ValueError: `slots` is not a whole number of at least 1.
    """

    def __init__(self, slots: int):
        if isinstance(slots, bool) or not isinstance(slots, int) or slots < 1:
            raise ValueError(f"slots is {slots!r}; a cache has a whole number of slots, at least 1.")
        self.slots = slots
        self._regions: dict[Hashable, Region] = {}

    @property
    def reserved_slots(self) -> int:
        """Slots of all regions."""
        return sum(region.size for region in self._regions.values())

    @property
    def used_slots(self) -> int:
        """Slots that hold a token."""
        return sum(region.length for region in self._regions.values())

    @property
    def holes(self) -> list[tuple[int, int]]:
        """(start, size) of every free run, by address."""
        found, end = [], 0
        for region in sorted(self._regions.values(), key=lambda region: region.start):
            if region.start > end:
                found.append((end, region.start - end))
            end = region.start + region.size
        return found + ([(end, self.slots - end)] if end < self.slots else [])

    def region(self, sequence: Hashable) -> Region:
        """Where a sequence lies. Raises UnknownSequence."""
        if sequence not in self._regions:
            raise UnknownSequence(f"There is no sequence {sequence!r}: it was freed before, or never added.")
        return self._regions[sequence]

    def add(self, sequence: Hashable, length: int, reserve: int) -> int:
        """Reserve `reserve` slots and put `length` tokens into the first of them; returns the first slot.

        Raises:
            ValueError: a sequence of that name is there, or more tokens than slots are to be put there.
            NoHole: no free run is long enough; nothing was reserved.
        """
        if sequence in self._regions:
            raise ValueError(f"There is a sequence {sequence!r} already; free it, or take another name.")
        if not 0 <= length <= reserve or reserve < 1:
            raise ValueError(f"{length} tokens do not go into a region of {reserve} slots; reserve at least as many.")
        holes = self.holes
        start = next((start for start, size in holes if size >= reserve), None)
        if start is None:
            largest, free = max((size for _, size in holes), default=0), sum(size for _, size in holes)
            raise NoHole(f"{reserve} slots in one run are asked for; {free} are free, the longest run has {largest}.")
        self._regions[sequence] = Region(start, reserve, length)
        return start

    def append(self, sequence: Hashable, count: int = 1) -> tuple[int, ...]:
        """The slots of `count` more tokens. Raises UnknownSequence, or RegionFull with nothing appended."""
        region = self.region(sequence)
        if region.length + count > region.size:
            raise RegionFull(
                f"Sequence {sequence!r} has {region.length} of {region.size} reserved slots filled; {count} more do "
                "not fit, and what lies behind them belongs to others."
            )
        first = region.start + region.length
        region.length += count
        return tuple(range(first, first + count))

    def free(self, sequence: Hashable) -> None:
        """Give a sequence's region back. Raises DoubleFree when it has none."""
        if self._regions.pop(sequence, None) is None:
            raise DoubleFree(f"Sequence {sequence!r} holds no region: it was freed before, or never added.")
