"""How a verdict is reached: an ordered list of rules, of which the first that finds something decides.

A rule looks at the evidence and returns a finding, or None where it has nothing to say. The order is part of the
meaning: what a rule says holds only because those before it were silent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from course_lib.checker.judge import compiling
from course_lib.checker.judge.diagnosis import which
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.judge.known_mistakes import cause_of
from course_lib.checker.judge.rules_of_numbers import RULES_OF_NUMBERS
from course_lib.checker.judge.rules_of_right_numbers import RULES_OF_RIGHT_NUMBERS
from course_lib.checker.judge.verdict import Finding
from course_lib.checker.specification import catalog, cells
from course_lib.checker.specification.needs import missing
from course_lib.hardware.device import machine

Rule = Callable[[Evidence], Finding | None]


def first_finding(rules: Sequence[Rule], evidence: Evidence) -> Finding | None:
    """What the first rule that has something to say finds."""
    return next((found for rule in rules if (found := rule(evidence)) is not None), None)


def unreadable_source(evidence: Evidence) -> Finding | None:
    """The cell holds what Python's parser cannot even be given. First, since whatever reads the source could fail."""
    reason = cells.why_unreadable(evidence.source)
    return Finding("error", reason, "unreadable_source") if reason else None


def not_attempted(evidence: Evidence) -> Finding | None:
    """The cell is as it was given. Before `unsupported`: an empty cell is the same on every machine."""
    given = catalog.untouched_source(evidence.exercise.id)
    if cells.is_attempted(evidence.source, tuple(evidence.names.values()), given):
        return None
    return Finding("not_attempted", "Nothing is written here yet. Replace the line under `# YOUR CODE HERE`.")


def unsupported(evidence: Evidence) -> Finding | None:
    """This machine lacks what the exercise needs; an answer would fail here for no fault of its own.

    What the compiler refuses is refused everywhere, and is told.
    """
    reason = missing(evidence.exercise.needs, machine())
    if reason is None:
        return None
    taken, refusal = compiling.refusal_where_none_runs(evidence.exercise, evidence.source)
    if refusal:
        return Finding("error", refusal, "kernel_cannot_be_compiled")
    seen = (
        " The compiler reads your kernel without an error; whether its waits and numbers are right, only the GPU shows."
    )
    return Finding("unsupported", reason + (seen if taken else ""))


def worker_died(evidence: Evidence) -> Finding | None:
    """The worker itself ended, so that there is nothing else to look at."""
    if evidence.died is None:
        return None
    reason = evidence.died.rstrip(".")
    text = f"The worker process ended during the check: {reason}. The next check starts a new one."
    return Finding("crashed", text)


def stopped_early(evidence: Evidence) -> Finding | None:
    """The answer did not come to its end: a limit, a crash, a cell that fails. Its cases are then not compared."""
    return evidence.stop[1] if evidence.stop else None


def out_of_bounds(evidence: Evidence) -> Finding | None:
    """Memory outside a tensor was reached. Before errors and wrong numbers, which may come of it.

    A cause that explains all the numbers says more, and is left to the rules that follow.
    """
    known = cause_of(evidence) if evidence.wild else None
    if not evidence.wild or (known is not None and known.entry is not None):
        return None
    access = evidence.wild[0]
    return Finding(
        "failed",
        f"Memory outside a tensor was reached in {which(evidence.exercise, access.case)}: {access.sentence}",
        known.id if known else "out_of_bounds",
        known.sentence if known else "",
    )


def raised_error(evidence: Evidence) -> Finding | None:
    """A case raised an exception. Before wrong numbers: what finished is not all that there is."""
    if not evidence.errors:
        return None
    raised, known = evidence.errors[0], cause_of(evidence)
    said = error_message(raised.error, evidence.source)
    sentence = known.sentence if known else ""
    return Finding(
        said.outcome,
        f"In {which(evidence.exercise, raised.case)}: {said.message}",
        known.id if known else said.mistake,
        f"The cases that came to their end show this: {sentence}" if known and known.entry else sentence,
    )


BEFORE_THE_RUN: tuple[Rule, ...] = (unreadable_source, not_attempted, unsupported)
AFTER_THE_RUN: tuple[Rule, ...] = (
    worker_died,
    stopped_early,
    out_of_bounds,
    raised_error,
    *RULES_OF_NUMBERS,
    *RULES_OF_RIGHT_NUMBERS,
)
