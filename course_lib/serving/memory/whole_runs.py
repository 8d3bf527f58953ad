"""Pages handed out as a contiguous cache would: what paging is compared with, in a model's own cache.

It answers as `BlockAllocator` does where a cache calls it.
"""

from __future__ import annotations

from collections.abc import Hashable

from course_lib.serving.memory.errors import NoHole, RegionFull


class WholeRuns:
    """A run of pages that follow each other for each sequence, reserved when it comes.

    Args:
        pages, page_size: of the pool.
        reserved: tokens that each sequence gets a run of pages for, whatever it will need.
    """

    def __init__(self, pages: int, page_size: int, reserved: int):
        self.pages, self.page_size, self.room = pages, page_size, reserved
        self.run = -(-reserved // page_size)  # pages
        self.starts = list(range(0, pages - self.run + 1, self.run))[::-1]  # first pages of the runs that are free
        self.start_of: dict[Hashable, int] = {}
        self.length_of: dict[Hashable, int] = {}

    def append(self, sequence: Hashable, count: int) -> None:
        """Count more tokens of a sequence; a new one gets a run. RegionFull when its own is full, NoHole if all are."""
        length = self.length_of.get(sequence, 0) + count
        if length > self.room:
            raise RegionFull(f"Sequence {sequence!r} would have {length} tokens; a run holds {self.room}.")
        if sequence not in self.start_of:
            if not self.starts:
                raise NoHole(f"All runs of {self.room} tokens are taken; free a sequence or wait until one ends.")
            self.start_of[sequence] = self.starts.pop()
        self.length_of[sequence] = length

    def free(self, sequence: Hashable) -> None:
        """Give a run back."""
        self.starts.append(self.start_of.pop(sequence))
        del self.length_of[sequence]

    def table(self, sequence: Hashable) -> list[int]:
        """The pages of a sequence's run."""
        return list(range(self.start_of[sequence], self.start_of[sequence] + self.run))

    def free_pages(self) -> int:
        """Pages in which no token lies; most of them can be had by one sequence alone."""
        return self.pages - sum(-(-length // self.page_size) for length in self.length_of.values())
