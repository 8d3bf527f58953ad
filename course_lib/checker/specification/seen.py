"""What a worker observed while it ran one case: launches, bytes, memory, and the error where one was raised."""

from __future__ import annotations

from dataclasses import dataclass, field


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
