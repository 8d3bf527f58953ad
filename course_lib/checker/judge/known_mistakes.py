"""What explains a wrong answer: slips of a model, slips in a formula, or a mistake that shows in what was seen.

`find_mistake` is the one place where causes are looked up, and `cause_of` remembers what it found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.explain import explain
from course_lib.checker.judge.formula_slips import ORDINALS, formula_model
from course_lib.checker.judge.outcome import Complaint, Outcome, Raised
from course_lib.checker.judge.prediction import Made, raise_when_strict
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.cells import calls
from course_lib.checker.specification.exercise import Exercise, Mistake
from course_lib.checker.specification.model import Model, Slip
from course_lib.checker.specification.nested import leaves, tensors
from course_lib.checker.specification.seen import Seen


@dataclass(frozen=True)
class Cause:
    """What a verdict names.

    Attributes:
        id: what the verdict calls it.
        sentence: what the learner is told.
        entry: the function whose numbers it explains; None where it was seen in what the run did.
    """

    id: str
    sentence: str
    entry: str | None = None


_found: WeakKeyDictionary[Evidence, Cause | None] = WeakKeyDictionary()


def cause_of(evidence: Evidence) -> Cause | None:
    """What explains an answer that is wrong, or None: looked up once, when a rule first asks."""
    if evidence not in _found:
        _found[evidence] = find_mistake(evidence)
    return _found[evidence]


def find_mistake(evidence: Evidence) -> Cause | None:
    """What explains an answer that is wrong, or None.

    It is looked for in wrong numbers first, unless only lanes that a load left undefined have spoilt them: in mistakes
    that come `first`, in the models, in what the wrong cases did. Then in errors that were raised, in accesses outside
    a tensor, and in the requirement that right numbers break. What authors wrote goes before what is made from a
    formula's source.
    """
    overflow = _of_32_bits(evidence)
    if overflow is not None:
        return overflow
    found: Cause | Mistake | None = None
    if evidence.failed and not evidence.undefined_alone:
        wrong = list(_wrong_functions(evidence))
        all_of_them = [] if evidence.undefined else [outcome for _, mine in wrong for outcome in mine]
        early = [mistake for mistake in evidence.exercise.mistakes if mistake.first]
        found = _in_what_was_seen(early, all_of_them)
        found = found or _together(_written(evidence, wrong))
        found = found or _in_what_was_seen(evidence.exercise.mistakes, all_of_them)
        made = (_of_a_formula(evidence, *one, made=True) for one in wrong)
        found = found or next(filter(None, made), None)
    found = found or _of_an_error(evidence.exercise, evidence.errors)
    found = found or _of_an_access(evidence.exercise, evidence.finished)
    if found is None and evidence.numbers_are_right:
        found = _of_a_requirement(evidence.exercise, evidence.complaints)
    return Cause(found.id, found.sentence) if isinstance(found, Mistake) else found


def _wrong_functions(evidence: Evidence) -> Iterator[tuple[str, list[Outcome]]]:
    """The functions that fail, in the exercise's order, each with its cases.

    Where one raised an error, the verdict speaks of that one, and the numbers of others are no cause of it. One that
    calls another which fails is left out: its numbers may be wrong for that alone.
    """
    exercise = evidence.exercise
    raised = {exercise.entry_of(error.case) for error in evidence.errors[:1]}
    of: dict[str, list[Outcome]] = {entry: [] for entry in exercise.entries}
    for outcome in evidence.finished:
        of[exercise.entry_of(outcome.case)].append(outcome)
    failing = [entry for entry, mine in of.items() if any(not outcome.right_at_first for outcome in mine)]
    for entry in failing:
        called = calls(evidence.cell, evidence.names.get(entry, entry))
        by_another = any(evidence.names.get(other, other) in called for other in failing if other != entry)
        if not by_another and (not raised or entry in raised):
            yield entry, of[entry]


def _written(evidence: Evidence, wrong: Sequence[tuple[str, list[Outcome]]]) -> list[Cause]:
    """What authors wrote that explains a function's numbers, for each of those that fail."""
    found = (_of_a_model(evidence, *one) or _of_a_formula(evidence, *one, made=False) for one in wrong)
    return [cause for cause in found if cause is not None]


def _together(causes: Sequence[Cause]) -> Cause | None:
    """The first cause; where others say something else of other functions, that is told behind it."""
    told = {cause.sentence: cause for cause in reversed(causes)}
    if len(told) < 2:
        return causes[0] if causes else None
    each = " ".join(f"`{cause.entry}`: {cause.sentence}" for cause in reversed(told.values()))
    number = {2: "Two", 3: "Three"}.get(len(told), "Several")
    return replace(causes[0], sentence=f"{number} functions are wrong. {each}")


def _of_a_model(evidence: Evidence, entry: str, mine: list[Outcome]) -> Cause | None:
    """The slips with which a model of a function makes all that the answer made."""
    for model in evidence.exercise.models:
        if (model.entry or evidence.exercise.entries[0]) != entry:
            continue

        def again(one: Made, other: Made, model: Model = model) -> Outcome | None:
            return evidence.run_where_they_differ(model, one, other)

        for outcomes in _all_or_interpreted(mine):
            found = explain(model, outcomes, bool(evidence.wild), again)
            if found:
                return Cause(found.slips[0].mistake, found.sentence, entry)
    return None


def _all_or_interpreted(outcomes: list[Outcome]) -> list[list[Outcome]]:
    """All cases; and where some ran on a GPU, those of the interpreter alone.

    On a GPU, programs that write to the same place race, and no model foresees which one wins.
    """
    interpreted = [outcome for outcome in outcomes if outcome.interpreted]
    some = any(not outcome.right_at_first for outcome in interpreted)
    return [outcomes, interpreted] if some and len(interpreted) < len(outcomes) else [outcomes]


def _of_a_formula(evidence: Evidence, entry: str, mine: list[Outcome], made: bool) -> Cause | None:
    """A slip in a formula that makes what the answer made, here and on cases drawn afresh.

    One that the author wrote, or one `made` from the formula's source, which can be done where the function takes and
    gives plain numbers alone.
    """
    if any(evidence.exercise.entry_of(error.case) == entry for error in evidence.errors):
        return None
    of_tensors = any(isinstance(leaf, torch.Tensor) for o in mine for _, leaf in leaves([o.case.args, o.truth.want]))
    plain = not of_tensors and not any(outcome.case.driver for outcome in mine)
    taught = () if made else evidence.exercise.slips
    model = (
        formula_model(evidence.exercise.oracle_for(mine[0].case), entry, taught, made) if plain or not made else None
    )
    if model is None:
        return None
    for outcomes in _all_or_interpreted(mine):
        found = explain(model, outcomes + evidence.run_afresh(entry) if plain else outcomes)
        if found:
            return Cause(found.slips[0].mistake, _in_which_result(outcomes, found.slips[0]) + found.sentence, entry)
    return None


def _in_which_result(outcomes: Sequence[Outcome], slip: Slip) -> str:
    """Which of several results is wrong, where only one is; an author's own sentence says it already."""
    wrong = {leaf.path for outcome in outcomes for leaf in outcome.leaves if leaf.problem}
    several = any(len(outcome.leaves) > 1 for outcome in outcomes)
    place = next(iter(wrong)) if several and len(wrong) == 1 and slip.formula is None else ""
    ordinals = {f"[{number}]": ordinal for number, ordinal in enumerate(ORDINALS)}
    return f"In the {ordinals[place]} result: " if place in ordinals else ""


def _of_32_bits(evidence: Evidence) -> Cause | None:
    """An offset that overflows: only tensors that reach beyond 2³¹ elements go wrong, and there outside a tensor."""
    cases = [access.case for access in evidence.wild]
    cases += [raised.case for raised in evidence.errors] + [outcome.case for outcome in evidence.failed]
    if not evidence.wild or not all(case.reaches_far for case in cases):
        return None
    tables = any(tensor.dtype == torch.int32 and tensor.dim() == 2 for case in cases for tensor in tensors(case.args))
    numbers, example = "Program numbers and `tl.arange`", "tl.program_id(1)"
    if tables:
        numbers, example = "Page numbers from an int32 table, program numbers and `tl.arange`", "page"
    return Cause(
        "offset_in_32_bits",
        f"An offset beyond 2³¹ elements does not fit in 32 bits. {numbers} are int32, and so is their product with a "
        f"stride. Convert before you multiply: `{example}.to(tl.int64) * stride`.",
    )


def _in_what_was_seen(mistakes: Sequence[Mistake], failed: Sequence[Outcome]) -> Mistake | None:
    """A mistake that shows in what wrong cases did. What only costs makes no number wrong."""
    at_first = [outcome for outcome in failed if not outcome.right_at_first]
    return next((mistake for mistake in mistakes if not mistake.cost and _shows(mistake, at_first)), None)


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


def of_its_function(exercise: Exercise, cause: Cause, failed: Sequence[Outcome]) -> Sequence[Outcome]:
    """The failing cases of the function, of several, that a cause is seen in: those to tell of beside its name."""
    shown = {cause.entry}
    if cause.entry is None:
        named = [mistake for mistake in exercise.mistakes if mistake.id == cause.id]
        shown = {exercise.entry_of(o.case) for o in failed if any(_seen_in(mistake, o) for mistake in named)}
    return [outcome for outcome in failed if exercise.entry_of(outcome.case) in shown] or failed


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
        return bool(mistake.when(case, seen, got))
    except Exception:
        raise_when_strict()
        return False
