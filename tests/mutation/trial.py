"""Judging mutants: each with the exercise's own cases, on seeds until one rejects it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from course_lib.checker.specification import catalog
from tests.mutation.lines import kept, spread
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.without_gpu import judge_here

SEEDS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Trial:
    """What became of one mutant.

    Attributes:
        verdicts: (seed, outcome, mistake, message) of each check, in order; the last one is the rejection, if any.
        error: what the judge itself raised, which is a fault of the exercise; "" as a rule.
    """

    mutant: Mutant
    verdicts: tuple[tuple[int, str, str | None, str], ...]
    seconds: float = 0.0
    error: str = ""

    @property
    def survived(self) -> bool:
        """Whether every check passed it."""
        return bool(self.verdicts) and self.verdicts[-1][1] == "passed"

    @property
    def lucky(self) -> bool:
        """Whether some seeds passed it and another rejected it."""
        return len(self.verdicts) > 1 and not self.survived

    @property
    def mistake(self) -> str | None:
        """The name that the rejection gave."""
        return self.verdicts[-1][2] if self.verdicts and not self.survived else None

    def as_dict(self) -> dict:
        """For one line of JSON."""
        mutant = self.mutant
        return {
            "exercise": mutant.exercise,
            "operator": mutant.operator,
            "line": mutant.line,
            "before": mutant.before,
            "after": mutant.after,
            "occurrence": mutant.occurrence,
            "program": program_of(mutant),
            "verdicts": self.verdicts,
            "seconds": round(self.seconds, 2),
            "error": self.error,
        }


def program_of(mutant: Mutant) -> str:
    """A short name for the exact source."""
    return hashlib.sha256(mutant.source.encode()).hexdigest()[:16]


def tried(mutant: Mutant, seeds: Iterable[int] = SEEDS) -> Trial:
    """Judge one mutant; a survivor costs a check for each seed, any other usually one."""
    started, verdicts, error = time.perf_counter(), [], ""
    for seed in seeds:
        try:
            with mock.patch.dict(os.environ, COURSE_STRICT="1"):  # a fingerprint that raises is a fault of the exercise
                verdict = judge_here(mutant.exercise, mutant.source, seed)
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"[:300]
            break
        text = " ".join(part for part in (verdict.message, verdict.diagnosis) if part)
        verdicts.append((seed, verdict.outcome, verdict.mistake, text[:600]))
        if not verdict.passed:
            break
    return Trial(mutant, tuple(verdicts), time.perf_counter() - started, error)


def all_mutants(exercises: Iterable[str]) -> list[Mutant]:
    """The mutants of these exercises' right answers."""
    return [mutant for exercise in exercises for mutant in mutants_of(exercise, catalog.solution_source(exercise))]


def run(mutants: Sequence[Mutant], seeds: Iterable[int], processes: int, until: float) -> Iterator[Trial]:
    """Trials as they finish, until the clock (`time.monotonic`) says `until`."""
    seeds = tuple(seeds)
    return spread(_tried, [(mutant, seeds) for mutant in mutants], processes, until)


def _tried(task: tuple[Mutant, tuple[int, ...]]) -> Trial:
    return tried(*task)


def remembered(path: Path | None, mutants: Iterable[Mutant]) -> dict[str, Trial]:
    """Trials of an earlier run, by program, as far as the same programs are still asked for."""
    wanted = {program_of(mutant): mutant for mutant in mutants}
    found = {}
    for row in kept(path):
        if row["program"] in wanted:
            verdicts = tuple(tuple(verdict) for verdict in row["verdicts"])
            found[row["program"]] = Trial(wanted[row["program"]], verdicts, row["seconds"], row["error"])
    return found
