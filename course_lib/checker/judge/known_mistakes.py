"""Which known mistake explains what was found: by its fingerprint in the results, or by what was seen.

`find_mistake` is the one place where mistakes are looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from course_lib.checker.judge.explain import Made, explain
from course_lib.checker.judge.fingerprints import (
    contradicts,
    explains,
    fingerprints,
    nearly_explains,
    raise_when_strict,
)
from course_lib.checker.judge.formula_slips import formula_model
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.specification.exercise import Case, Exercise, Mistake, Seen
from course_lib.checker.specification.model import Model
from course_lib.checker.specification.nested import leaves

if TYPE_CHECKING:
    from course_lib.checker.judge.evidence import Complaint, Evidence, Raised


def find_mistake(evidence: Evidence) -> Mistake | None:
    """The known mistake that explains what went wrong, or None.

    A model of the exercise is asked first, then the fingerprints that authors wrote.

    It is looked for in wrong numbers first, unless lanes that a load left undefined have spoilt them; then in errors
    that were raised, in accesses outside a tensor, and in the requirement that right numbers break.
    """
    found = None
    if evidence.failed and not evidence.undefined:
        found = _of_a_model(evidence)
        found = found or of_wrong_numbers(evidence.exercise, evidence.finished, raised=bool(evidence.errors))
        found = found or _of_a_formula(evidence)
    found = found or _of_an_error(evidence.exercise, evidence.errors)
    found = found or _of_an_access(evidence.exercise, evidence.finished)
    if found is None and evidence.numbers_are_right:
        found = _of_a_requirement(evidence.exercise, evidence.complaints)
    return found


def _first_wrong(evidence: Evidence) -> tuple[str | None, list[Outcome]]:
    """The first function, in the exercise's order, that fails, and its cases."""
    wrong = {_function(evidence.exercise, outcome) for outcome in evidence.finished if not outcome.right_at_first}
    first = next((entry for entry in evidence.exercise.entries if entry in wrong), None)
    return first, [outcome for outcome in evidence.finished if _function(evidence.exercise, outcome) == first]


def _of_a_formula(evidence: Evidence) -> Mistake | None:
    """A small change of the formula itself that makes what the answer made, here and on cases drawn afresh."""
    first, mine = _first_wrong(evidence)
    plain = not any(isinstance(leaf, torch.Tensor) for o in mine for _, leaf in leaves([o.case.args, o.truth.want]))
    raised = any((error.case.entry or evidence.exercise.entries[0]) == first for error in evidence.errors)
    if first is None or raised or not plain or any(outcome.case.driver for outcome in mine):
        return None
    model = formula_model(evidence.exercise.oracle_for(mine[0].case), first)
    found = explain(model, mine + evidence.run_afresh(first)) if model else None
    if found is None:
        return None
    return Mistake(found.slips[0].mistake, _in_which_result(mine) + found.sentence, result=_nothing_more)


def _in_which_result(outcomes: Sequence[Outcome]) -> str:
    """Which of several results is wrong, where only one is."""
    wrong = {leaf.path for outcome in outcomes for leaf in outcome.leaves if leaf.problem}
    several = any(len(outcome.leaves) > 1 for outcome in outcomes)
    place = next(iter(wrong)) if several and len(wrong) == 1 else ""
    ordinals = {"[0]": "first", "[1]": "second", "[2]": "third", "[3]": "fourth"}
    return f"In the {ordinals[place]} result: " if place in ordinals else ""


def _of_a_model(evidence: Evidence) -> Mistake | None:
    """The slips with which a model of the first function that fails makes all that the answer made, as one mistake."""
    first, mine = _first_wrong(evidence)
    for model in evidence.exercise.models:
        if (model.entry or evidence.exercise.entries[0]) != first:
            continue

        def again(one: Made, other: Made, model: Model = model) -> Outcome | None:
            return evidence.run_where_they_differ(model, one, other)

        found = explain(model, mine, bool(evidence.wild), again)
        if found:
            return Mistake(found.slips[0].mistake, found.sentence, result=_nothing_more)
    return None


def _nothing_more(*args: Any) -> None:
    """The fingerprint of what a model has explained already: it has nothing to add."""


def of_wrong_numbers(exercise: Exercise, outcomes: Sequence[Outcome], raised: bool = False) -> Mistake | None:
    """The one known mistake that explains every finished case, or those of the first function that fails, or None.

    A fingerprint (one of a mistake's several, if it has such) must agree with the learner's result in all cases and
    differ from the truth in at least one that failed. Where those of two mistakes agree, neither is named: silence
    beats a false lead.

    On a GPU, programs that write to the same place race, and no fingerprint foresees which one wins. Where all cases
    together name nothing, those that Triton's interpreter ran, one program after the other, are asked alone.

    Args:
        exercise: the exercise, whose mistakes are tried.
        outcomes: the finished cases.
        raised: whether other cases raised an error, so that what finished is not all that went wrong.
    """
    interpreted = [outcome for outcome in outcomes if outcome.interpreted]
    found = _of_these_numbers(exercise, outcomes, raised)
    if found is None and len(interpreted) < len(outcomes):
        found = _of_these_numbers(exercise, interpreted, raised)
    return found


def _of_an_error(exercise: Exercise, errors: Sequence[Raised]) -> Mistake | None:
    """A mistake that explains a raised error: one that looks at the error itself, or at an access outside a tensor.

    What else was seen of a case that stopped halfway (launches, bytes) is only half of it, and proves nothing.
    """
    for mistake in exercise.mistakes if errors else ():
        for raised in errors:
            if not is_seen(mistake, raised.case, raised.seen, None):
                continue
            without = replace(raised.seen, error=None)
            if raised.seen.out_of_bounds or not is_seen(mistake, raised.case, without, None):
                return mistake
    return None


def _of_an_access(exercise: Exercise, finished: Sequence[Outcome]) -> Mistake | None:
    """A mistake that is seen in a finished case which reached outside a tensor."""
    wild = [outcome for outcome in finished if outcome.seen.out_of_bounds]
    return next((mistake for mistake in exercise.mistakes if any(_seen_in(mistake, outcome) for outcome in wild)), None)


def _of_a_requirement(exercise: Exercise, complaints: Sequence[Complaint]) -> Mistake | None:
    """A mistake that is seen in the first case which breaks a requirement."""
    if not complaints:
        return None
    return next((mistake for mistake in exercise.mistakes if _seen_in(mistake, complaints[0].outcome)), None)


def _of_these_numbers(exercise: Exercise, outcomes: Sequence[Outcome], raised: bool) -> Mistake | None:
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
        if any(explains(exercise, result, ordered) for result in fingerprints(mistake))
    ]
    if len(matching) == 1:
        return matching[0]
    of_one_function = None if raised else _of_the_first_function(exercise, outcomes)
    if of_one_function:
        return of_one_function
    for mistake in exercise.mistakes:
        if _shows(mistake, failed):
            return mistake
    nearly = [
        mistake
        for mistake in exercise.mistakes
        if any(nearly_explains(exercise, result, ordered) for result in fingerprints(mistake))
    ]
    return nearly[0] if len(nearly) == 1 else None


def _of_the_first_function(exercise: Exercise, outcomes: Sequence[Outcome]) -> Mistake | None:
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
        for result in fingerprints(mistake)
        if explains(exercise, result, ordered)
    ]
    if len({mistake.id for mistake, _ in matching}) != 1:
        return None
    fits = any(not contradicts(exercise, result, others) for _, result in matching)
    return matching[0][0] if fits else None


def _function(exercise: Exercise, outcome: Outcome) -> str:
    return outcome.case.entry or exercise.entries[0]


def of_its_function(exercise: Exercise, mistake: Mistake, failed: Sequence[Outcome]) -> Sequence[Outcome]:
    """The failing cases of the function, of several, that a mistake is seen in: those to tell of beside its name."""
    if len(exercise.entries) == 1:
        return failed
    shown = {
        _function(exercise, outcome)
        for outcome in failed
        if any(explains(exercise, result, [outcome]) for result in fingerprints(mistake)) or _seen_in(mistake, outcome)
    }
    return [outcome for outcome in failed if _function(exercise, outcome) in shown] or failed


def _shows(mistake: Mistake, failed: Sequence[Outcome]) -> bool:
    """Whether a mistake is seen in a failing case; with `every`, in all those of the function that it is seen in."""
    seen_of: dict[str | None, list[bool]] = {}
    for outcome in failed:
        seen = _seen_in(mistake, outcome)
        if seen and not mistake.every:
            return True
        seen_of.setdefault(outcome.case.entry, []).append(seen)
    return mistake.every and any(all(seen) for seen in seen_of.values())


def _seen_in(mistake: Mistake, outcome: Outcome) -> bool:
    return is_seen(mistake, outcome.case, outcome.seen, outcome.got)


def is_seen(mistake: Mistake, case: Case, seen: Seen, got: Any) -> bool:
    """Whether a mistake's `when` recognises it in a case."""
    try:
        return mistake.when is not None and bool(mistake.when(case, seen, got))
    except Exception:
        raise_when_strict()
        return False
