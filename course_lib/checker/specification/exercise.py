"""The vocabulary in which `exercises/` says how an answer is judged.

An `Exercise` names the functions that a cell must define, draws its inputs, and holds what the judge alone may know:
the oracle, the known mistakes and the requirements. Nothing here runs a learner's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from course_lib.checker.runner.process import sparse
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.needs import ANY, Needs
from course_lib.checker.specification.nested import leaves, map_leaves

if TYPE_CHECKING:
    from course_lib.checker.specification.contract import Contract
    from course_lib.checker.specification.draw import Draw
    from course_lib.checker.specification.model import Model, Slip
    from course_lib.checker.specification.requirements import Requirement


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


@dataclass(frozen=True)
class RaisedError:
    """An exception that a call raised.

    Attributes:
        type: its class, by name.
        text: what it says.
        outer: class and text of the exception that it arrived in, where Triton wraps it.
        line: the line of the cell where it was raised, where that is known.
        out_of_memory: whether memory ran out.
        unusable: whether nothing was raised, but what was returned cannot be judged.
        rank: of several processes, the one that raised it.
    """

    type: str
    text: str
    outer: str = ""
    line: int | None = None
    out_of_memory: bool = False
    unusable: bool = False
    rank: int | None = None


@dataclass(frozen=True)
class Seen:
    """What the worker observed while it ran one case.

    Attributes:
        launches: Triton kernels launched, by name.
        largest_grid: programs of the largest of these launches.
        operations: PyTorch operations called (ATen names such as "mul", "_softmax"), with their number.
        largest_allocation: elements of the largest tensor that a PyTorch operation made.
        largest_results: elements of each operation's largest result, by the name that it has in `operations`.
        read_by_pytorch: elements of each tensor argument, by its name and in the arguments' order, that PyTorch
            operations read, to copy them or to compute; neither views nor kernels count.
        traffic: bytes by tensor, named as the kernel's parameter: `{"x_pointer": {"loaded": 4096, "stored": 0,
            "atomic": 0, "distinct_loaded": 4096, "distinct_stored": 0}}`; seen only in Triton's interpreter.
        out_of_bounds: sentences on accesses outside a tensor, each with tensor, line and program.
        modified_inputs: names of arguments that were changed and should not have been.
        handed_back: names of arguments in whose memory the result lies, as the tensor itself or a view of it.
        unwritten: elements of the result that hold memory which no one ever wrote.
        guard_values: elements of the result that were read from beside an input.
        undefined_values: elements of the result that come from lanes which a masked load without `other=` left
            undefined.
        undefined_loads: the lines of such loads, used or not; seen only in Triton's interpreter.
        not_contiguous: tensors of the result that are not contiguous.
        contended: bytes that a launch stored twice, stored and loaded, or updated, all launches added up; without any,
            no order of programs can make a difference. Counted in Triton's interpreter.
        repeats, differing, changes: further runs with the same inputs, on a GPU; how many of them gave another result
            than the first, and how many another than the run before.
        graphs, captured: in a compiled case, the graphs that `torch.compile` made, and the calls that they hold.
        graph_breaks: what ended a graph early, one line for each time.
        overwrites: of a later call: 1 where it changed what an earlier call of the function had returned.
        noted: numbers that the case's driver noted, by name.
        seconds: the call's wall-clock time.
        timing: medians of a speed requirement, `{"answer": s, "baseline": s}`; empty unless asked for.
        error: the exception, when the call raised one.
    """

    launches: tuple[str, ...] = ()
    largest_grid: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    largest_allocation: int = 0
    largest_results: dict[str, int] = field(default_factory=dict)
    read_by_pytorch: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    out_of_bounds: tuple[str, ...] = ()
    modified_inputs: tuple[str, ...] = ()
    handed_back: tuple[str, ...] = ()
    unwritten: int = 0
    guard_values: int = 0
    undefined_values: int = 0
    not_contiguous: int = 0
    contended: int = 0
    undefined_loads: tuple[str, ...] = ()
    repeats: int = 0
    differing: int = 0
    changes: int = 0
    graphs: int = 0
    captured: int = 0
    graph_breaks: tuple[str, ...] = ()
    overwrites: int = 0
    noted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    timing: dict[str, float] = field(default_factory=dict)
    error: RaisedError | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes loaded and stored by Triton kernels, all tensors together; an atomic update does both."""
        return sum(counts["loaded"] + counts["stored"] + 2 * counts["atomic"] for counts in self.traffic.values())


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
        return f"{int(self.id.split('.')[0]):02d}"

    def oracle_for(self, case: Case) -> Callable:
        """The oracle that answers this case."""
        return self.oracle[self.entry_of(case)] if isinstance(self.oracle, dict) else self.oracle

    def plain_for(self, case: Case) -> tuple[Callable, ...]:
        """The further plain implementations of what this case calls."""
        return self.plain.get(self.entry_of(case), ()) if isinstance(self.plain, dict) else self.plain

    def entry_of(self, case: Case) -> str:
        """The function that a case calls."""
        return case.entry or self.entries[0]
