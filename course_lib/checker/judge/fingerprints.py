"""A mistake's fingerprint, what it makes of a case in float64, held against what the learner got."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.checker.judge.compare import SHAKES, agrees, shaken
from course_lib.checker.judge.evaluate import call, float64, once
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification.exercise import Case, Exercise, Mistake

PROOFS = 3  # failing cases that must agree with a fingerprint before another one's disagreement may be rounding


def fingerprints(mistake: Mistake) -> tuple[Callable, ...]:
    """The forms that a mistake takes; none for one that is recognised by what was seen alone."""
    if mistake.result is None:
        return ()
    return mistake.result if isinstance(mistake.result, tuple) else (mistake.result,)


def explains(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
    """Whether a fingerprint agrees with every case that it says something of, one that failed among them."""
    distinguished = False
    for outcome in outcomes:
        fingerprint = _fingerprint(result, outcome.case)
        if fingerprint is None:
            continue
        if not agrees(outcome.got, fingerprint, outcome.truth, exercise):
            return False
        distinguished = distinguished or not outcome.right_at_first
    return distinguished


def nearly_explains(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
    """Whether a fingerprint agrees with all cases but one, and with that one as far as the mistake's own rounding goes.

    What is exact for the right answer need not be so for a wrong one: scores of ±150 that the truth never weighs make
    of a float32 rounding a difference that the truth's tolerance knows nothing of.
    """
    doubtful, agreeing = [], 0
    for outcome in outcomes:
        fingerprint = _fingerprint(result, outcome.case)
        if fingerprint is None:
            continue
        if agrees(outcome.got, fingerprint, outcome.truth, exercise):
            agreeing += not outcome.right_at_first
        else:
            doubtful.append((outcome, fingerprint))
        if len(doubtful) > 1:
            return False
    if not doubtful or agreeing < PROOFS:
        return False
    outcome, fingerprint = doubtful[0]
    try:
        draws = shaken(result, outcome.case, SHAKES, seed=0)
        return agrees(outcome.got, fingerprint, outcome.truth, exercise, draws)
    except Exception:  # also where the mistake has nothing to say of inputs a rounding off
        raise_when_strict()
        return False


def contradicts(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
    """Whether a fingerprint makes of one of these cases neither what the learner got nor what is right."""
    for outcome in outcomes:
        fingerprint = _fingerprint(result, outcome.case)
        if fingerprint is None:
            continue
        if not any(agrees(value, fingerprint, outcome.truth, exercise) for value in (outcome.got, outcome.truth.want)):
            return True
    return False


def _fingerprint(result: Callable, case: Case) -> Any:
    """What a mistake makes of the case in float64; None where it has nothing to say."""
    return once(case, ("fingerprint", result), lambda: _worked_out(result, case))


def _worked_out(result: Callable, case: Case) -> Any:
    try:
        return call(result, case, float64)
    except Exception:
        raise_when_strict()
        return None


def raise_when_strict() -> None:
    """Within an `except`: one unlucky guess must not cost the learner the verdict; tests run with COURSE_STRICT."""
    if os.environ.get("COURSE_STRICT"):
        raise
