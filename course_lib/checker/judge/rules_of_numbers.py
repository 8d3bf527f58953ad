"""Rules for wrong numbers: every case ran to its end, and some results are not what they should be.

All say where the errors lie; they differ in the name that they give the cause. Proofs go before guesses.
"""

from __future__ import annotations

import inspect

from course_lib.checker.judge import diagnosis
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.known_mistakes import cause_of, of_its_function
from course_lib.checker.judge.verdict import Finding
from course_lib.checker.specification.cells import may_lack_a_return


def known_mistake(evidence: Evidence) -> Finding | None:
    """One of the exercise's mistakes explains the results. First, since it explains the most."""
    known = cause_of(evidence) if evidence.failed else None
    return _wrong(evidence, known.id, known.sentence) if known else None


def undefined_lanes(evidence: Evidence) -> Finding | None:
    """Lanes that a masked load left undefined reached the result; that is proved, not guessed."""
    return _wrong(evidence, "undefined_lanes", evidence.undefined) if evidence.undefined else None


def unwritten_memory(evidence: Evidence) -> Finding | None:
    """A result holds memory that was never written. Such memory changes from run to run, so before `race`."""
    unwritten = [outcome for outcome in evidence.failed if outcome.seen.unwritten]
    added = bool(unwritten) and all(map(diagnosis.added_to_what_was_there, unwritten))
    sentence = diagnosis.ADDED_TO_UNSET if added else ""
    return _wrong(evidence, "unwritten_memory", sentence) if unwritten else None


def race(evidence: Evidence) -> Finding | None:
    """The same inputs gave another result when they ran again."""
    unsteady = any(outcome.unsteady for outcome in evidence.failed)
    return _wrong(evidence, "race", diagnosis.RACE) if unsteady else None


def kept_result(evidence: Evidence) -> Finding | None:
    """The first call gave another result than all later ones: something is kept from call to call."""
    kept = any(outcome.kept for outcome in evidence.failed)
    return _wrong(evidence, "kept_result", diagnosis.KEPT) if kept else None


def kept_of_another_case(evidence: Evidence) -> Finding | None:
    """A case is right alone, and wrong behind others. Late, since it asks for one more run."""
    kept = bool(evidence.failed) and evidence.right_alone
    return _wrong(evidence, "kept_result", diagnosis.KEPT_OF_ANOTHER) if kept else None


def argument_written(evidence: Evidence) -> Finding | None:
    """All cases that are wrong wrote an argument, which others may stand for: what is told of right numbers too."""
    written = [outcome.seen.modified_inputs for outcome in evidence.failed]
    return _wrong(evidence, "modified_input", diagnosis.written(written[0][0])) if written and all(written) else None


def wrong_numbers(evidence: Evidence) -> Finding | None:
    """The results are wrong, and nothing says why. Silence beats a false lead: where they are wrong must do."""
    return _wrong(evidence, None) if evidence.failed else None


def _wrong(evidence: Evidence, mistake: str | None, sentence: str = "") -> Finding:
    """Where the errors lie in the case that tells the most, with the cause that a rule has found."""
    exercise, failed = evidence.exercise, evidence.failed
    known = cause_of(evidence)
    first = diagnosis.most_telling(of_its_function(exercise, known, failed) if known else failed)
    arguments = list(inspect.signature(exercise.oracle_for(first.case)).parameters)
    of_the_function = [outcome for outcome in evidence.finished if outcome.case.entry == first.case.entry]
    together = diagnosis.shared(of_the_function, arguments)
    entry = exercise.entry_of(first.case)
    missing = first.lacks_a_result and may_lack_a_return(evidence.cell, evidence.names.get(entry, entry))
    told = [f"In {diagnosis.which(exercise, first.case)} {diagnosis.describe(first)}.", together]
    message = " ".join(filter(None, [*told, "Is a `return` missing?" if missing else ""]))
    if evidence.wild:
        access = evidence.wild[0]
        message += (
            f" Memory outside a tensor was reached in {diagnosis.which(exercise, access.case)}: {access.sentence}"
        )
    return Finding("failed", message, mistake, sentence, diagnosis.picture(exercise, first))


RULES_OF_NUMBERS = (
    known_mistake,
    undefined_lanes,
    unwritten_memory,
    race,
    kept_result,
    argument_written,
    kept_of_another_case,
    wrong_numbers,
)
