"""One call of a learner's function: its arguments, which of them may be written, and what differs from rank to rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from course_lib.checker.common import sparse
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.nested import leaves, map_leaves


@dataclass(frozen=True)
class InOut:
    """An argument that the answer is meant to write into; its final contents are judged along with what is returned."""

    tensor: torch.Tensor


class PerRank(tuple):
    """An argument that differs from rank to rank, in a case with several: one value for each rank, in order."""


@dataclass(frozen=True, eq=False)
class Case:
    """One call of the learner's function.

    Attributes:
        name: what is special about it, as a learner reads it: "1025 elements, one more than a block".
        args: positional arguments: tensors (any strides; they arrive guarded and bit for bit the same), `InOut`,
            numbers, strings, and tuples, lists and dicts of these.
        entry: which of the exercise's functions is called; the first one by default.
        driver: a function `driver(functions, *args)` run in the worker in place of a plain call, for answers that are
            classes or take several calls. Its source is sent, so it must stand alone and hold no answer; `functions`
            is a dict from entry name to the learner's object, and numbers that a driver puts into the dict
            `functions.noted` are seen (`Seen.noted`). `functions.listen(listener)` has it told of each access of an
            interpreted kernel (the traffic meter's `Listener`).
        metered: count the bytes that this call moves (needs Triton's interpreter).
        timed: on a GPU, time this call for the exercise's `FasterThan`.
        compiled: `torch.compile` compiles in this call, and graphs are counted; elsewhere it hands its function back.
            Operations inside a graph are not observed, apart from calls of PyTorch that the compiled code makes.
        ranks: how many processes run this call at once, each a rank of one `torch.distributed` group that is there when
            the cell runs: NCCL where there are as many GPUs, else gloo on the CPU. A `PerRank` among `args` gives each
            its own value, and the oracle all of them. The result is the list of what the ranks return. A group of one
            is a case with `ranks=1` and a `PerRank`.
    """

    name: str
    args: tuple
    entry: str | None = None
    driver: Callable | None = None
    metered: bool = False
    timed: bool = False
    compiled: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        if type(self.ranks) is not int or self.ranks < 1:
            raise CourseError(f"Case {self.name!r}: ranks={self.ranks!r}; it is a number of processes, 1 or more.")
        for value in self.args:
            if isinstance(value, PerRank) and len(value) != self.ranks:
                raise CourseError(
                    f"Case {self.name!r}: a PerRank holds {len(value)} values, and there are {self.ranks} ranks."
                )
        if self.distributed and (self.timed or any(isinstance(leaf, InOut) for _, leaf in leaves(self.args))):
            raise CourseError(
                f"Case {self.name!r}: a case with ranks is not timed, and has no argument to write; the answer "
                "returns its result."
            )

    @property
    def distributed(self) -> bool:
        """Whether the call is one of a group's ranks."""
        return self.ranks > 1 or any(isinstance(value, PerRank) for value in self.args)

    @property
    def in_place(self) -> bool:
        """Whether arguments are there to be written."""
        return any(isinstance(value, InOut) for value in self.args)

    @property
    def reaches_far(self) -> bool:
        """Whether a tensor reaches beyond 2³¹ elements, where an offset in 32 bits overflows."""
        found = (leaf.tensor if isinstance(leaf, InOut) else leaf for _, leaf in leaves(self.args))
        return any(isinstance(leaf, torch.Tensor) and sparse.is_far(leaf) for leaf in found)


def arguments(case: Case, convert: Callable[[torch.Tensor], torch.Tensor]) -> tuple[list, list[torch.Tensor]]:
    """A case's args with every tensor converted (a copy), and the ones that may be written."""
    written: list[torch.Tensor] = []

    def converted(leaf: Any) -> Any:
        if isinstance(leaf, InOut):
            written.append(convert(leaf.tensor))
            return written[-1]
        return convert(leaf) if isinstance(leaf, torch.Tensor) else leaf

    return [map_leaves(converted, value) for value in case.args], written
