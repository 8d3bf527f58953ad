"""Mutants that are no mistakes: what passes although it differs from the course's answer, and why it may.

Each entry says in which exercises a piece of a line may be written in another way. An entry that no mutant of one of
its exercises takes is stale, and a test says so; an entry whose mutant is rejected is reported by the whole run.
"""

from __future__ import annotations

from tests.mutation import equivalents_00_to_04, equivalents_05_to_09, equivalents_of_races
from tests.mutation.mutants import Mutant
from tests.mutation.reasons import ANYTHING, Equivalent

EQUIVALENT = equivalents_00_to_04.EQUIVALENT + equivalents_05_to_09.EQUIVALENT + equivalents_of_races.EQUIVALENT


def reason_for(mutant: Mutant) -> str:
    """Why a mutant may pass; "" when it may not."""
    return next((entry.why for entry in EQUIVALENT if entry.explains(mutant)), "")


def always_passes(mutant: Mutant) -> bool:
    """Whether the list says that this very change is no mistake, so that a rejection is a fault."""
    return any(entry.explains(mutant) for entry in EQUIVALENT if entry.new != ANYTHING)


def stale(mutants: list[Mutant]) -> list[tuple[str, Equivalent]]:
    """Entries, with the exercise, that none of its mutants takes; `mutants` are all of the exercises named."""
    return [
        (exercise, entry)
        for entry in EQUIVALENT
        for exercise in entry.exercises
        if not any(entry.explains(mutant) for mutant in mutants if mutant.exercise == exercise)
    ]
