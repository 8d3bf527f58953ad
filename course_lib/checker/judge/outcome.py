"""What came of one case: its result, compared with what it should have been, or what else went wrong in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from course_lib.checker.judge import compare
from course_lib.checker.judge.compare import Leaf, Truth
from course_lib.checker.judge.evaluate import early, once
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.running import Later, Run
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.requirements import Requirement
from course_lib.checker.specification.seen import RaisedError, Seen


@dataclass(frozen=True, eq=False)
class Outcome:
    """One finished case with all that the diagnosis needs.

    Attributes:
        case, seen: the case, and what was observed while it ran.
        got: the first run's result, as `evaluate.call` makes it.
        truth: what it should be.
        leaves: every tensor and number of the results, compared; those of later runs too, where they differ.
        written: the names of the arguments written in place.
        interpreted: whether Triton's interpreter ran the case, and not a GPU.
        first_was_right: whether the first result is right, whatever the later ones are; None for "as all leaves are".
        unsteady: whether the result changed, by more than rounding, when the same inputs ran again.
        kept: whether the first run was another than all later ones, or the result right until other numbers stood in
            the same memory.
    """

    case: Case
    seen: Seen
    got: Any
    truth: Truth
    leaves: Sequence[Leaf]
    written: tuple[str, ...] = ()
    interpreted: bool = True
    first_was_right: bool | None = None
    unsteady: bool = False
    kept: bool = False

    @property
    def right(self) -> bool:
        """Whether every leaf is within the tolerance."""
        return all(leaf.problem is None for leaf in self.leaves)

    @property
    def right_at_first(self) -> bool:
        """Whether the first result is right, whatever the later ones are."""
        return self.right if self.first_was_right is None else self.first_was_right

    @property
    def first_problem(self) -> Leaf:
        """The first wrong leaf of a case that is not right."""
        return next(leaf for leaf in self.leaves if leaf.problem)

    @property
    def lacks_a_result(self) -> bool:
        """Whether the function itself returned None where something is expected."""
        returned, wanted = (self.got[0], self.truth.want[0]) if self.case.in_place else (self.got, self.truth.want)
        return returned is None and wanted is not None and self.case.driver is None

    @property
    def problem(self) -> str:
        """What is wrong with that leaf."""
        return self.first_problem.problem or ""


@dataclass(frozen=True, eq=False)
class Raised:
    """A case that raised an error, with what was seen of it until then."""

    case: Case
    seen: Seen
    error: RaisedError


@dataclass(frozen=True, eq=False)
class WildAccess:
    """The first access outside a tensor in a case, in words."""

    case: Case
    sentence: str


@dataclass(frozen=True, eq=False)
class Complaint:
    """The first requirement that a case breaks, and how, in words."""

    outcome: Outcome
    requirement: Requirement
    sentence: str


def _key(exercise: Exercise, case: Case, interpreted: bool) -> tuple:
    """What a case's truth and tolerance hang on."""
    return exercise.oracle_for(case), exercise.plain_for(case), exercise.uses_dot and not interpreted


def truth_beforehand(exercise: Exercise, case: Case, interpreted: bool, too_late: Callable[[], bool]) -> None:
    """Work out what a case should give, for `compare_case` to find it."""
    key = _key(exercise, case, interpreted)
    early(case, ("truth", *key), partial(compare.truth, exercise, case, key[-1]), too_late)


def compare_case(exercise: Exercise, run: Run, case: Case, frame: Frame) -> Outcome:
    """Compare what came back for one case that raised nothing."""
    first = first_outcome(exercise, case, frame, run.interpreted)
    got, expected, leaves = first.got, first.truth, [*first.leaves]
    right_at_first = not _wrong(leaves)
    unsteady = kept = False
    if frame.has_repeated:
        repeated = result_of(case, frame.result_repeated, frame.written_repeated)
        # Atomic additions round differently from run to run; what differs by more than rounding is no rounding.
        if not compare.agrees(got, repeated, expected, exercise):
            kept = frame.seen.changes == 1 < frame.seen.repeats == frame.seen.differing  # the first alone was another
            unsteady = not kept
            leaves += compare.compare(repeated, expected, exercise)
    if right_at_first and not unsteady:
        timed = _after_timing(exercise, run, case, frame)
        later, kept_later = _of_later_calls(exercise, run, case)
        kept = kept or _wrong(timed) or kept_later
        leaves += [*timed, *later]
    return replace(first, leaves=leaves, first_was_right=right_at_first, unsteady=unsteady, kept=kept)


def first_outcome(exercise: Exercise, case: Case, frame: Frame, interpreted: bool) -> Outcome:
    """What the first run of a case gave, compared, whatever came later."""
    key = _key(exercise, case, interpreted)
    expected = once(case, ("truth", *key), partial(compare.truth, exercise, case, key[-1]))
    got = result_of(case, frame.result, frame.written)
    leaves = compare.compare(got, expected, exercise)
    if _wrong(leaves):
        expected = once(case, ("surer", *key), partial(compare.surer, expected, exercise, case))
        leaves = compare.compare(got, expected, exercise)
    return Outcome(case, frame.seen, got, expected, leaves, tuple(frame.written), interpreted)


def _after_timing(exercise: Exercise, run: Run, case: Case, frame: Frame) -> list[Leaf]:
    """The result of the last timed call, which got other numbers; none where nothing was timed."""
    if not case.timed or run.interpreted or not frame.seen.timing:
        return []
    last = compare.truth(exercise, run.timed_last(case), tf32=exercise.uses_dot)
    return compare.compare(frame.result_after_timing, last, exercise)


def _of_later_calls(exercise: Exercise, run: Run, case: Case) -> tuple[list[Leaf], bool]:
    """The results of further calls of the case, after all others: with other numbers, and with the same.

    And whether one is wrong that is right, as far as anybody asked, as the first call of a process.
    """
    found, kept = [], False
    for call in run.later_calls(case):
        expected = compare.truth(exercise, call.case, tf32=exercise.uses_dot and not run.interpreted)

        def compared(frame: Frame, call: Later = call, expected: Truth = expected) -> list[Leaf]:
            got = result_of(call.case, frame.result, frame.written)
            leaves = compare.compare(got, expected, exercise)
            if _wrong(leaves):
                leaves = compare.compare(got, compare.surer(expected, exercise, call.case), exercise)
            return leaves

        assert call.frame is not None  # it ended well
        leaves = compared(call.frame)
        kept = kept or _wrong(leaves) and (call.alone is None or not _wrong(compared(call.alone)))
        found += leaves
    return found, kept


def _wrong(leaves: Sequence[Leaf]) -> bool:
    return any(leaf.problem for leaf in leaves)


def result_of(case: Case, returned: Any, written: Mapping[str, Any]) -> Any:
    """A result as `evaluate.call` makes it: with what was written, where the case has arguments to write."""
    return (returned, {"written": list(written.values())}) if case.in_place else returned
