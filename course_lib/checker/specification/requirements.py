"""What is asked of an answer beside the right numbers: kernels launched, bytes moved, memory, calls, speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.checker.specification.case import Case
from course_lib.checker.specification.nested import tensors
from course_lib.checker.specification.seen import Seen

MATRIX_PRODUCTS = ("mm", "bmm", "matmul", "addmm", "baddbmm", "addbmm", "mv", "addmv", "linear")  # as a run counts them

WHOLE_ANSWERS = ("softmax", "attention", "logsumexp", "logaddexp")  # what a call's name holds that is a whole answer


class Requirement:
    """Something asked of an answer beside the right numbers. Subclasses are dataclasses with an `id`."""

    id: str = "requirement"

    def complaint(self, case: Case, seen: Seen) -> str | None:
        """One sentence when this case breaks the requirement, else None."""
        raise NotImplementedError

    def not_judged(self) -> str | None:
        """One sentence where this machine cannot judge it, on why and on what would; else None."""
        return None


@dataclass(frozen=True)
class LaunchesTriton(Requirement):
    """The work is done by Triton kernels: between `at_least` and `at_most` launches a call."""

    at_least: int = 1
    at_most: int | None = None
    id: str = "no_kernel_launched"

    def complaint(self, case, seen):
        count = len(seen.launches)
        if count == 0 < self.at_least:
            return f"No Triton kernel ran, and at least {self.at_least} must be launched in a call."
        if count < self.at_least:
            return f"Only {count} of at least {self.at_least} Triton kernels ran: {', '.join(seen.launches)}."
        if self.at_most is not None and count > self.at_most:
            return (
                f"{count} Triton kernels were launched ({', '.join(seen.launches[:5])}); this exercise asks for at "
                f"most {self.at_most} in one call."
            )
        return None


@dataclass(frozen=True)
class Contiguous(Requirement):
    """The tensors of the result are contiguous."""

    id: str = "not_contiguous"

    def complaint(self, case, seen):
        if not seen.not_contiguous:
            return None
        return (
            "The result is not contiguous: its elements do not lie side by side in memory. Make it by torch.empty with "
            "its shape, whatever the strides of the input are."
        )


@dataclass(frozen=True)
class NewTensors(Requirement):
    """The tensors of the result are new: none lies in the memory of an argument."""

    id: str = "argument_returned"

    def complaint(self, case, seen):
        given = [name for name in seen.handed_back if name not in seen.modified_inputs]  # which is told by itself
        if not given:
            return None
        return (
            f"The result lies in the memory of the argument `{given[0]}`: that tensor itself was returned, "
            "or a view of it. Whoever later writes into one of the two changes the other. Return a new tensor; "
            "`clone` makes one."
        )


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
            f"Your kernels moved {moved:,} bytes where {minimum:,.0f} are enough ({moved / minimum:.2f} times as "
            f"many). By tensor: {detail}."
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
            f"{allowed:,.0f}. Look for a copy, a repetition, or a whole matrix of scores where a tile will do."
        )


@dataclass(frozen=True)
class ReadByKernels(Requirement):
    """Tensors that kernels alone read: PyTorch operations copy, or compute with, less than half of their elements.

    `Moves` counts the bytes of kernels. A copy that PyTorch makes first, such as `contiguous`, is one more pass over
    them that it does not see.

    Attributes:
        places: of these tensors among the case's tensor arguments, from 0; none is written in place.
    """

    places: tuple[int, ...]
    id: str = "copied_by_pytorch"

    def complaint(self, case, seen):
        given = tensors(case.args)
        for place, (name, elements) in enumerate(seen.read_by_pytorch.items()):
            if place in self.places and 2 * elements > given[place].numel():
                return (
                    f"PyTorch's own operations read {elements:,} of the {given[place].numel():,} elements of `{name}`, "
                    "to copy or to change them. That is one more pass over it: hand the kernel the tensor as it is, "
                    "with its strides."
                )
        return None


@dataclass(frozen=True)
class Forbids(Requirement):
    """PyTorch operations that would skip the exercise, by ATen name ("_softmax", "mm", "scaled_dot_product").

    Those that write in place ("add_") go with the others.

    Attributes:
        operations: their names.
        beyond: `beyond(*case.args)` is how many elements their results may have: what is no part of the exercise, such
            as a list of places. None allows none at all.
    """

    operations: tuple[str, ...]
    id: str = "forbidden_operation"
    beyond: Callable[..., float] | None = None

    def complaint(self, case, seen):
        used = sorted(
            name
            for name in seen.operations
            for banned in self.operations
            if name in (banned, f"{banned}_") or (len(banned) > 12 and banned in name)
            if self.beyond is None or seen.largest_results.get(name, 0) > self.beyond(*case.args)
        )
        if not used:
            return None
        whole = any(word in used[0] for word in WHOLE_ANSWERS)
        what = "does the exercise for you. Write that step yourself" if whole else "does a step that is yours to write"
        return f"The answer calls PyTorch's `{used[0]}`, which {what}."


@dataclass(frozen=True)
class SmallProducts(Requirement):
    """PyTorch's matrix products have results of at most `elements(*case.args)` elements each: what is no part of the
    kernels' work, such as a sum over each row written as rows times columns.

    Attributes:
        elements: what is allowed.
        what: what may be computed so, after "at most": "one number for each query".
    """

    elements: Callable[..., float]
    what: str
    id: str = "forbidden_operation"

    def complaint(self, case, seen):
        allowed = self.elements(*case.args)
        large = [name for name in MATRIX_PRODUCTS if seen.largest_results.get(name, 0) > allowed]
        if not large:
            return None
        return (
            f"The answer calls PyTorch's `{large[0]}` for a product of {seen.largest_results[large[0]]:,} elements, "
            f"which is the kernels' work. PyTorch may compute at most {self.what} here."
        )


@dataclass(frozen=True)
class FewProducts(Requirement):
    """PyTorch runs at most `number(*case.args)` matrix products: none is computed a second time.

    Attributes:
        number: what is allowed.
        why: sentences on what they are, and what to do.
    """

    number: Callable[..., int]
    why: str
    id: str = "too_many_products"

    def complaint(self, case, seen):
        products, allowed = sum(seen.operations.get(name, 0) for name in MATRIX_PRODUCTS), self.number(*case.args)
        return f"{products} matrix products ran, and {allowed} are enough. {self.why}" if products > allowed else None


@dataclass(frozen=True)
class CompilesWith(Requirement):
    """In compiled cases `torch.compile` makes exactly `graphs` graphs, with at least `captured` calls in them all."""

    graphs: int = 1
    captured: int = 1
    id: str = "wrong_number_of_graphs"

    def complaint(self, case: Case, seen: Seen) -> str | None:
        if not case.compiled:
            return None
        asked = f"{self.graphs} {'is' if self.graphs == 1 else 'are'} asked for"
        if seen.graphs == 0:
            return (
                f"`torch.compile` made no graph, where {asked}: nothing was compiled. Wrap the function that does the "
                "work in `torch.compile`, and call what it returns."
            )
        made = f"`torch.compile` made {seen.graphs} graph{'s' if seen.graphs > 1 else ''}"
        if seen.graphs != self.graphs:
            broken = len(seen.graph_breaks)
            why = f" The graph broke {_times(broken)}, first here: {seen.graph_breaks[0]}." if broken else ""
            return f"{made}, where {asked}.{why}"
        if seen.captured < self.captured:
            return (
                f"{made}, as asked for, but of {seen.captured} call{'s' if seen.captured != 1 else ''} only, where at "
                f"least {self.captured} belong into it: the work is done outside."
            )
        return None


@dataclass(frozen=True)
class FasterThan(Requirement):
    """On a GPU, in timed cases, the answer takes at most `1 / ratio` of the baseline's time.

    Attributes:
        baseline: `baseline(*args)`, sent to the worker by its source and timed there in the same run; no answer in it.
        minimum_bytes: bytes that any answer must move; a time below these at the measured read bandwidth is refused.
        minimum_flops: FLOPs that any answer must do, likewise.
    """

    baseline: Callable
    ratio: float
    minimum_bytes: Callable[..., float]
    minimum_flops: Callable[..., float] | None = None
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


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
