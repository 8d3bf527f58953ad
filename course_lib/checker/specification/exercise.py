"""The vocabulary in which `exercises/` says how an answer is judged.

An `Exercise` names the functions that a cell must define, draws its inputs, and holds what the judge alone may know:
the oracle, the known mistakes and the requirements. Nothing here runs a learner's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from course_lib.checker.specification.case import Case
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.model import Model, Slip
from course_lib.checker.specification.needs import ANY, Needs
from course_lib.checker.specification.requirements import Requirement
from course_lib.checker.specification.seen import Seen


def chapter_of(identity: str) -> str:
    """The chapter of exercise "3.2" in two digits, as in file names: "03"."""
    return f"{int(identity.split('.')[0]):02d}"


@dataclass(frozen=True)
class Mistake:
    """A mistake that shows in what a run did, such as its launches, bytes and errors, and not in its numbers alone.

    Attributes:
        id: snake_case name, unique in its exercise.
        sentence: what went wrong and where to look, in the second person.
        when: recognises the mistake from what was seen in a failing case: `when(case, seen, got) -> bool`.
        cost: whether it only costs, in bytes, launches or memory: it is no cause of wrong numbers.
        every: `when` must hold in every failing case (of one of the exercise's functions, where it has several); by
            default one is enough.
        first: whether it is asked before the models: where `when` leaves a slip no room, and searching one takes long.
    """

    id: str
    sentence: str
    when: Callable[[Case, Seen, Any], bool]
    every: bool = False
    cost: bool = False
    first: bool = False


@dataclass(frozen=True)
class Limits:
    """What one check may use: seconds of a processor of the usual speed (interpreted, on a GPU), bytes of memory, bytes
    printed, and processes at once (counted in grading's sandbox). On a slower processor it may use more seconds
    (`runner/process/pace.py`)."""

    seconds: float = 8.0
    gpu_seconds: float = 60.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20
    processes: int = 32


@dataclass(frozen=True)
class Exercise:
    """One exercise: what a cell must define and how it is judged.

    Attributes:
        id: "3.2"; the cell's first line reads `# Exercise 3.2 · Title`.
        title: as on that line.
        entries: the functions or classes that the cell must define, in the order `check` takes them.
        cases: `cases(draw)` makes fresh inputs, simple ones first: those that teach something.
        contracts: what the docstring promises; further cases are drawn from it, where Triton's interpreter or no kernel
            at all runs them.
        oracle: called with a case's args; its result in float64 is the truth, its result in the case's own dtype is the
            plain implementation whose error sets the tolerance. A dict maps entry names to oracles where there are
            several.
            For cases with a `driver` the oracle gets the case's args and returns what the driver should.
        plain: further plain implementations in the same precision (another summation order, say); the largest error
            counts. A dict maps entry names to theirs.
        hints: from a nudge to nearly the answer.
        models: what the functions compute, with the slips that explain a wrong result; one for a function, or several
            that are asked in turn.
        slips: in the formulas of plain numbers, which need no model: slips that deserve a sentence of their own, each
            with its `formula`. Others are made from the oracle's source.
        mistakes: what is no matter of numbers: bytes, launches, errors.
        requirements, limits: see their classes.
        needs: the least machine that can run it; `needs.py` has names for the usual ones.
        interpretable: whether it can run in Triton's interpreter.
        compiled: `compiled()` says how kernels that the cell is given are compiled, for machines that cannot run them:
            dicts with `kernel`, `signature` (a type for each parameter), `constants` and `options`.
        inputs_belong_together: whether a case's tensors are made from each other, as a log-sum-exp from queries and
            keys. Calls that look for kept results then get other numbers in all of them at once.
        uses_dot: float32 `tl.dot` on a GPU may round its operands to tf32; the tolerance then allows for it.
        tile: rows and columns of the tiles that the exercise prescribes; drawn on the picture of a wrong result.
        relative_tolerance: for answers that are plain numbers; tensors use the error of the plain implementation.
    """

    id: str
    title: str
    entries: tuple[str, ...]
    cases: Callable[[Draw], Sequence[Case]]
    oracle: Callable | dict[str, Callable]
    contracts: tuple[Contract, ...] = ()
    models: tuple[Model, ...] = ()
    hints: tuple[str, ...] = ()
    slips: tuple[Slip, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    limits: Limits = Limits()
    plain: tuple[Callable, ...] | dict[str, tuple[Callable, ...]] = ()
    needs: Needs = ANY
    interpretable: bool = True
    compiled: Callable[[], Sequence[dict]] | None = None
    inputs_belong_together: bool = False
    uses_dot: bool = False
    relative_tolerance: float = 1e-6
    tile: tuple[int, int] | None = None
    points: int = 1

    def __post_init__(self):
        if not isinstance(self.needs, Needs):
            raise CourseError(
                f"Exercise {self.id}: needs={self.needs!r}; it must be a `Needs`, such as TRITON of "
                "course_lib/checker/specification/needs.py."
            )
        if isinstance(self.entries, str) or not self.entries:
            raise CourseError(f"Exercise {self.id}: entries must be a tuple of function names, not {self.entries!r}.")
        names = [known.id for known in (*self.slips, *self.mistakes)]
        if any(slip.formula is None for slip in self.slips):
            raise CourseError(f"Exercise {self.id}: each of its `slips` needs a `formula`; those of a model go there.")
        if len(set(names)) != len(names):
            raise CourseError(f"Exercise {self.id}: two slips or mistakes share an id among {names}.")

    def drawn(self, draw: Draw) -> list[Case]:
        """The cases of one check. A GPU, which compiles for every shape anew, gets those that teach alone."""
        cases = list(self.cases(draw))
        return cases if draw.on_gpu else cases + [case for contract in self.contracts for case in contract.cases(draw)]

    @property
    def chapter(self) -> str:
        """Two digits, as in file names: "03"."""
        return chapter_of(self.id)

    def oracle_for(self, case: Case) -> Callable:
        """The oracle that answers this case."""
        return self.oracle[self.entry_of(case)] if isinstance(self.oracle, dict) else self.oracle

    def plain_for(self, case: Case) -> tuple[Callable, ...]:
        """The further plain implementations of what this case calls."""
        return self.plain.get(self.entry_of(case), ()) if isinstance(self.plain, dict) else self.plain

    def entry_of(self, case: Case) -> str:
        """The function that a case calls."""
        return case.entry or self.entries[0]
