"""What is asked beside the right numbers of a kernel that does all of a function's work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from course_lib.checker import Allocates, Forbids, LaunchesTriton, Mistake, Moves, ReadByKernels, Requirement
from exercises.topics.pytorch_operations import ARITHMETIC


@dataclass(frozen=True)
class OneKernel(LaunchesTriton):
    """One launch in each call of a function; calls of the exercise's other functions need none.

    Attributes:
        of: its name, where the exercise has several functions.
    """

    at_most: int | None = 1
    of: str | None = None

    def complaint(self, case, seen):
        return super().complaint(case, seen) if case.entry == self.of else None


RESIZED = Mistake(
    "modified_input",
    "An argument was resized in place, so the caller's tensor has another shape afterwards. Leave the shapes as they "
    "are. Where a tile is longer than a row, a mask keeps it from reading on.",
    when=lambda case, seen, got: "resize_" in seen.operations,
    first=True,
)


def in_one_kernel(
    *forbidden: str,
    elements: Callable,
    least_bytes: Callable,
    reads: Sequence[int] = (),
    of: str | None = None,
    moves: type[Moves] = Moves,
) -> tuple[Requirement, ...]:
    """One kernel does all of the work, and moves no more bytes than it must.

    Args:
        forbidden: operations of PyTorch that would do a part of it, beside those for arithmetic and `resize_`, which
            changes an argument.
        elements: as `Allocates` takes it.
        least_bytes: as `Moves` takes it.
        reads: the places of the arguments that the kernel reads, as `ReadByKernels` takes them.
        of: the function's name, where the exercise has several.
        moves: how the bytes are counted.
    """
    asked = (OneKernel(of=of), Forbids((*ARITHMETIC, "resize_", *forbidden)), Allocates(elements), moves(least_bytes))
    return (*asked, ReadByKernels(tuple(reads))) if reads else asked
