"""The known mistake that a wrong result matches: its fingerprint in the results, or what was seen while they came."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from course_lib.checker.judge.compare import SHAKES, agrees, shaken
from course_lib.checker.judge.diagnosis import Outcome
from course_lib.checker.judge.evaluate import call, float64
from course_lib.checker.specification.exercise import Case, Exercise, Mistake, Seen

PROOFS = 3  # failing cases that must agree with a fingerprint before another one's disagreement may be rounding


def find_mistake(exercise: Exercise, outcomes: Sequence[Outcome], raised: bool = False) -> Mistake | None:
    """The one known mistake that explains every finished case, or those of the first function that fails, or None.

    A fingerprint (one of a mistake's several, if it has such) must agree with the learner's result in all cases and
    differ from the truth in at least one that failed. Where those of two mistakes agree, neither is named: silence
    beats a false lead.

    On a GPU, programs that write to the same place race, and no fingerprint foresees which one wins. Where all cases
    together name nothing, those that Triton's interpreter ran, one program after the other, are asked alone.

    Args:
        outcomes: the finished cases.
        raised: whether other cases raised an error, so that what finished is not all that went wrong.
    """
    interpreted = [outcome for outcome in outcomes if outcome.interpreted]
    found = _mistake_in(exercise, outcomes, raised)
    if found is None and len(interpreted) < len(outcomes):
        found = _mistake_in(exercise, interpreted, raised)
    return found


def _mistake_in(exercise: Exercise, outcomes: Sequence[Outcome], raised: bool) -> Mistake | None:
    failed = [outcome for outcome in outcomes if not outcome.right_at_first]
    if not failed:
        return None
    if any(leaf.problem and leaf.wrong is None and "dtype" in leaf.problem for o in failed for leaf in o.leaves):
        return None  # the numbers may be right in another dtype, which the message says
    # Failing cases first: a wrong fingerprint is then dismissed after one look.
    ordered = sorted(outcomes, key=lambda outcome: outcome.right_at_first)
    matching = [
        mistake
        for mistake in exercise.mistakes
        if any(_explains(exercise, result, ordered) for result in _fingerprints(mistake))
    ]
    if len(matching) == 1:
        return matching[0]
    of_one_function = None if raised else _mistake_of_first_function(exercise, outcomes)
    if of_one_function:
        return of_one_function
    for mistake in exercise.mistakes:
        if _shows(mistake, failed):
            return mistake
    nearly = [
        mistake
        for mistake in exercise.mistakes
        if any(_nearly_explains(exercise, result, ordered) for result in _fingerprints(mistake))
    ]
    return nearly[0] if len(nearly) == 1 else None


def _mistake_of_first_function(exercise: Exercise, outcomes: Sequence[Outcome]) -> Mistake | None:
    """The one known mistake that explains all cases of the first function that fails; None when that leaves a doubt.

    Where an exercise asks for several functions and two are wrong, each in its own way, no mistake explains the whole.
    Only the first is looked at, in the exercise's order: a later one may call it, and be wrong for that alone. Silence
    beats a false lead, so none is named where two mistakes make the same of that function, where the mistake claims
    of another function what is neither right nor the learner's, or where a driver calls the functions together.
    """
    if len(exercise.entries) == 1:
        return None
    wrong = {_function(exercise, outcome) for outcome in outcomes if not outcome.right}
    first = next(entry for entry in exercise.entries if entry in wrong)
    mine = [outcome for outcome in outcomes if _function(exercise, outcome) == first]
    others = [outcome for outcome in outcomes if _function(exercise, outcome) != first]
    if any(outcome.case.driver for outcome in mine):
        return None
    ordered = sorted(mine, key=lambda outcome: outcome.right)
    matching = [
        (mistake, result)
        for mistake in exercise.mistakes
        for result in _fingerprints(mistake)
        if _explains(exercise, result, ordered)
    ]
    if len({mistake.id for mistake, _ in matching}) != 1:
        return None
    fits = any(not _contradicts(exercise, result, others) for _, result in matching)
    return matching[0][0] if fits else None


def _contradicts(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
    """Whether a fingerprint makes of one of these cases neither what the learner got nor what is right."""
    for outcome in outcomes:
        fingerprint = _fingerprint(result, outcome.case)
        if fingerprint is None:
            continue
        if not any(agrees(value, fingerprint, outcome.truth, exercise) for value in (outcome.got, outcome.truth.want)):
            return True
    return False


def _function(exercise: Exercise, outcome: Outcome) -> str:
    return outcome.case.entry or exercise.entries[0]


def of_its_function(exercise: Exercise, mistake: Mistake, failed: Sequence[Outcome]) -> Sequence[Outcome]:
    """The failing cases of the function, of several, that a mistake is seen in: those to tell of beside its name."""
    if len(exercise.entries) == 1:
        return failed
    shown = {
        _function(exercise, outcome)
        for outcome in failed
        if any(_explains(exercise, result, [outcome]) for result in _fingerprints(mistake))
        or is_seen(mistake, outcome.case, outcome.seen, outcome.got)
    }
    return [outcome for outcome in failed if _function(exercise, outcome) in shown] or failed


def _shows(mistake: Mistake, failed: Sequence[Outcome]) -> bool:
    """Whether a mistake is seen in a failing case; with `every`, in all those of the function that it is seen in."""
    seen_of: dict[str | None, list[bool]] = {}
    for outcome in failed:
        seen = is_seen(mistake, outcome.case, outcome.seen, outcome.got)
        if seen and not mistake.every:
            return True
        seen_of.setdefault(outcome.case.entry, []).append(seen)
    return mistake.every and any(all(seen) for seen in seen_of.values())


def is_seen(mistake: Mistake, case: Case, seen: Seen, got: Any) -> bool:
    """Whether a mistake's `when` recognises it in a case."""
    try:
        return mistake.when is not None and bool(mistake.when(case, seen, got))
    except Exception:
        _raise_when_strict()
        return False


def _raise_when_strict() -> None:
    """Within an `except`: one unlucky guess must not cost the learner the verdict; tests run with COURSE_STRICT."""
    if os.environ.get("COURSE_STRICT"):
        raise


def _fingerprints(mistake: Mistake) -> tuple[Callable, ...]:
    if mistake.result is None:
        return ()
    return mistake.result if isinstance(mistake.result, tuple) else (mistake.result,)


def _explains(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
    distinguished = False
    for outcome in outcomes:
        fingerprint = _fingerprint(result, outcome.case)
        if fingerprint is None:
            continue
        if not agrees(outcome.got, fingerprint, outcome.truth, exercise):
            return False
        distinguished = distinguished or not outcome.right_at_first
    return distinguished


def _nearly_explains(exercise: Exercise, result: Callable, outcomes: Sequence[Outcome]) -> bool:
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
        _raise_when_strict()
        return False


def _fingerprint(result: Callable, case: Case) -> Any:
    """What a mistake makes of the case in float64; None where it has nothing to say."""
    silent = False

    def made(*args):
        nonlocal silent
        value = result(*args)
        silent = value is None and not case.in_place
        return value

    try:
        value = call(made, case, float64)
    except Exception:
        _raise_when_strict()
        return None
    return None if silent else value
