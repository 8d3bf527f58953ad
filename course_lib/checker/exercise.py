"""The vocabulary in which `exercises/` says how an answer is judged.

An `Exercise` names the functions that a cell must define, draws its inputs, and holds what the judge alone may know: the
oracle, the known mistakes and the requirements. Nothing here runs a learner's code.
"""
from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

# Lengths at which kernels go wrong: one element, primes, and a block more or less one.
AWKWARD_LENGTHS = (1, 2, 127, 128, 129, 257, 1000, 1023, 1024, 1025)


class CourseError(ValueError):
    """A request that cannot be met, in one sentence: what was given, what is allowed, what to do."""


@dataclass(frozen=True)
class InOut:
    """An argument that the answer is meant to write into; its final contents are judged along with what is returned."""

    tensor: torch.Tensor


@dataclass(frozen=True)
class Case:
    """One call of the learner's function.

    Attributes:
        name: what is special about it, as a learner reads it: "1025 elements, one more than a block".
        args: positional arguments: tensors (any strides; they arrive guarded and bit for bit the same), `InOut`,
            numbers, strings, and tuples, lists and dicts of these.
        entry: which of the exercise's functions is called; the first one by default.
        driver: a function `driver(functions, *args)` run in the worker in place of a plain call, for answers that are
            classes or take several calls. Its source is sent, so it must stand alone and hold no answer; `functions`
            is a dict from entry name to the learner's object.
        metered: count the bytes that this call moves (needs Triton's interpreter).
    """

    name: str
    args: tuple
    entry: str | None = None
    driver: Callable | None = None
    metered: bool = False


@dataclass(frozen=True)
class Seen:
    """What the worker observed while it ran one case.

    Attributes:
        launches: Triton kernels launched, by name.
        operations: PyTorch operations called (ATen names such as "mul", "_softmax"), with their number.
        largest_allocation: elements of the largest tensor that a PyTorch operation made.
        traffic: bytes by tensor, named as the kernel's parameter: `{"x_pointer": {"loaded": 4096, "stored": 0, "atomic": 0,
            "distinct_loaded": 4096, "distinct_stored": 0}}`; seen only in Triton's interpreter.
        out_of_bounds: sentences on accesses outside a tensor, each with tensor, line and program.
        modified_inputs: names of arguments that were changed and should not have been.
        unwritten: elements of the result that hold memory which no one ever wrote.
        guard_values: elements of the result that were read from beside an input.
        seconds: the call's wall-clock time.
        timing: medians of a speed requirement, `{"answer": s, "baseline": s}`; empty unless asked for.
        error: the exception's type, text and line in the cell, when the call raised.
    """

    launches: tuple[str, ...] = ()
    operations: dict[str, int] = field(default_factory=dict)
    largest_allocation: int = 0
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    out_of_bounds: tuple[str, ...] = ()
    modified_inputs: tuple[str, ...] = ()
    unwritten: int = 0
    guard_values: int = 0
    seconds: float = 0.0
    timing: dict[str, float] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes loaded and stored by Triton kernels, all tensors together; an atomic update does both."""
        return sum(counts["loaded"] + counts["stored"] + 2 * counts["atomic"] for counts in self.traffic.values())


@dataclass(frozen=True)
class Mistake:
    """A classic wrong answer: how to recognise it, and one plain sentence on the cause and where to look.

    Attributes:
        id: snake_case name, unique in its exercise.
        sentence: what went wrong and where to look, in the second person.
        result: the fingerprint: called like the oracle, returns what this mistake makes of the same arguments.
        when: recognises the mistake from what was seen in a failing case instead: `when(case, seen, got) -> bool`.
    """

    id: str
    sentence: str
    result: Callable | None = None
    when: Callable[[Case, Seen, Any], bool] | None = None


class Requirement:
    """Something asked of an answer beside the right numbers. Subclasses are dataclasses with an `id`."""

    id: str = "requirement"

    def complaint(self, case: Case, seen: Seen) -> str | None:
        """One sentence when this case breaks the requirement, else None."""
        raise NotImplementedError


@dataclass(frozen=True)
class LaunchesTriton(Requirement):
    """The work is done by Triton kernels: between `at_least` and `at_most` launches a call."""

    at_least: int = 1
    at_most: int | None = None
    id: str = "no_kernel_launched"

    def complaint(self, case, seen):
        count = len(seen.launches)
        if count < self.at_least:
            return f"No Triton kernel ran: {count} launches were seen and at least {self.at_least} is asked for."
        if self.at_most is not None and count > self.at_most:
            return (
                f"{count} Triton kernels were launched ({', '.join(seen.launches[:5])}); this exercise asks for at most "
                f"{self.at_most} in one call."
            )
        return None


@dataclass(frozen=True)
class Moves(Requirement):
    """In metered cases the kernels move at most `slack` times the bytes that `minimum(*case.args)` counts."""

    minimum: Callable[..., float]
    slack: float = 1.05
    id: str = "too_many_bytes"

    def complaint(self, case, seen):
        if not (case.metered and seen.traffic):
            return None
        minimum, moved = self.minimum(*case.args), seen.bytes_moved
        if moved <= self.slack * minimum:
            return None
        worst = sorted(seen.traffic.items(), key=lambda item: -item[1]["loaded"] - item[1]["stored"])[:3]
        detail = "; ".join(
            f"{name}: {counts['loaded']:,} B loaded, {counts['stored']:,} B stored" for name, counts in worst
        )
        return (
            f"Your kernels moved {moved:,} bytes where {minimum:,.0f} are enough ({moved / minimum:.2f} times as many). "
            f"By tensor: {detail}."
        )


@dataclass(frozen=True)
class Allocates(Requirement):
    """No PyTorch operation makes a tensor of more than `elements(*case.args)` elements."""

    elements: Callable[..., float]
    id: str = "too_much_memory"

    def complaint(self, case, seen):
        allowed = self.elements(*case.args)
        if seen.largest_allocation <= allowed:
            return None
        return (
            f"A tensor of {seen.largest_allocation:,} elements was allocated; this exercise allows none above "
            f"{allowed:,.0f}. What you keep must not grow with the whole matrix."
        )


@dataclass(frozen=True)
class Forbids(Requirement):
    """PyTorch operations that would skip the exercise, by ATen name ("_softmax", "mm", "scaled_dot_product")."""

    operations: tuple[str, ...]
    id: str = "forbidden_operation"

    def complaint(self, case, seen):
        used = sorted(
            name for name in seen.operations for banned in self.operations
            if name == banned or (len(banned) > 12 and banned in name)
        )
        if not used:
            return None
        return f"The answer calls PyTorch's `{used[0]}`, which does the exercise for you. Write that step yourself."


@dataclass(frozen=True)
class FasterThan(Requirement):
    """On a GPU, in cases named `case`, the answer takes at most `1 / ratio` of the baseline's time.

    Attributes:
        baseline: `baseline(*args)`, sent to the worker by its source and timed there in the same run; no answer in it.
        minimum_bytes: bytes that any answer must move; a time below these at the measured read bandwidth is refused.
        minimum_flops: FLOPs that any answer must do, likewise.
    """

    baseline: Callable
    ratio: float
    minimum_bytes: Callable[..., float]
    minimum_flops: Callable[..., float] | None = None
    case: str = "timed"
    id: str = "too_slow"

    def complaint(self, case, seen):
        if not seen.timing:
            return None
        answer, baseline = seen.timing["answer"], seen.timing["baseline"]
        if answer * self.ratio <= baseline:
            return None
        return (
            f"Your version takes {answer * 1e6:,.0f} µs and the baseline {baseline * 1e6:,.0f} µs: "
            f"{baseline / answer:.2f} times as fast, where {self.ratio:g} times is asked for."
        )


@dataclass(frozen=True)
class Limits:
    """What one check may use: seconds of wall clock (interpreted, on a GPU), bytes of memory, bytes printed."""

    seconds: float = 8.0
    gpu_seconds: float = 60.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Exercise:
    """One exercise: what a cell must define and how it is judged.

    Attributes:
        id: "3.2"; the cell's first line reads `# Exercise 3.2 · Title`.
        title: as on that line.
        entries: the functions or classes that the cell must define, in the order `check` takes them.
        cases: `cases(draw)` makes fresh inputs, simple ones first.
        oracle: called with a case's args; its result in float64 is the truth, its result in the case's own dtype is the
            plain implementation whose error sets the tolerance. A dict maps entry names to oracles where there are several.
            For cases with a `driver` the oracle gets the case's args and returns what the driver should.
        plain: further plain implementations in the same precision (another summation order, say); the largest error counts.
        hints: from a nudge to nearly the answer.
        mistakes, requirements, limits: see their classes.
        needs: "any", "triton" (a kernel is written), "nvidia" or "hopper": the least hardware that can run it.
        interpretable: whether it can run in Triton's interpreter.
        uses_dot: float32 `tl.dot` on a GPU may round its operands to tf32; the tolerance then allows for it.
        relative_tolerance: for answers that are plain numbers; tensors use the error of the plain implementation.
    """

    id: str
    title: str
    entries: tuple[str, ...]
    cases: Callable[[Draw], Sequence[Case]]
    oracle: Callable | dict[str, Callable]
    hints: tuple[str, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
    requirements: tuple[Requirement, ...] = ()
    limits: Limits = Limits()
    plain: tuple[Callable, ...] = ()
    needs: str = "any"
    interpretable: bool = True
    uses_dot: bool = False
    relative_tolerance: float = 1e-6
    points: int = 1

    def __post_init__(self):
        if self.needs not in ("any", "triton", "nvidia", "hopper"):
            raise CourseError(f"Exercise {self.id}: needs={self.needs!r}; allowed are any, triton, nvidia, hopper.")
        if isinstance(self.entries, str) or not self.entries:
            raise CourseError(f"Exercise {self.id}: entries must be a tuple of function names, not {self.entries!r}.")
        names = [mistake.id for mistake in self.mistakes]
        if len(set(names)) != len(names):
            raise CourseError(f"Exercise {self.id}: two mistakes share an id among {names}.")

    @property
    def chapter(self) -> str:
        """Two digits, as in file names: "03"."""
        return f"{int(self.id.split('.')[0]):02d}"

    def oracle_for(self, case: Case) -> Callable:
        """The oracle that answers this case."""
        if isinstance(self.oracle, dict):
            return self.oracle[case.entry or self.entries[0]]
        return self.oracle


class Draw:
    """Fresh inputs from one seed. Everything is made on the CPU; the worker moves it to the device.

    Attributes:
        seed: the check's seed.
        on_gpu: inputs may be large and take bfloat16; otherwise the interpreter runs them: few programs, tiny tensors.
        bfloat16: this device computes in bfloat16.
    """

    def __init__(self, seed: int, on_gpu: bool = False, bfloat16: bool = False):
        self.seed, self.on_gpu, self.bfloat16 = seed, on_gpu, bfloat16
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, shift: float = 0.0) -> torch.Tensor:
        """Normal numbers of the given shape, times `scale`, plus `shift`."""
        return (torch.randn(shape, generator=self._generator) * scale + shift).to(dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Uniform numbers in [low, high)."""
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).to(dtype)

    def integers(self, *shape: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self._generator).to(dtype)

    def integer(self, low: int, high: int) -> int:
        """One integer in [low, high)."""
        return int(torch.randint(low, high, (), generator=self._generator))

    def choice(self, options: Sequence) -> Any:
        """One of the options."""
        return options[self.integer(0, len(options))]

    def permutation(self, length: int) -> torch.Tensor:
        """The integers 0 .. length-1 in random order."""
        return torch.randperm(length, generator=self._generator)

    def spread_out(self, tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
        """The same values with a gap after every row, filled with NaN: reading by the wrong stride shows."""
        if tensor.dim() < 2:
            return self.strided(tensor, step)
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + step), math.nan if tensor.is_floating_point() else 0)
        wide = wide.to(tensor.dtype)
        wide[..., : tensor.shape[-1]] = tensor
        return wide[..., : tensor.shape[-1]]

    def strided(self, tensor: torch.Tensor, step: int = 2) -> torch.Tensor:
        """The same values with every element `step` apart along the last dimension."""
        wide = torch.full((*tensor.shape, step), math.nan if tensor.is_floating_point() else 0).to(tensor.dtype)
        wide[..., 0] = tensor
        return wide[..., 0]

    def transposed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values stored column by column."""
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name most like the given one."""
    matches = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.0)
    return matches[0] if matches else None
