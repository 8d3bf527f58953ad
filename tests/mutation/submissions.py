"""Whole submissions over many seeds: right ones that must pass each time, wrong ones that must be named rightly."""

from __future__ import annotations

import collections
import hashlib
import itertools
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.checker.specification import catalog
from tests.mutation.lines import keep, kept, spread
from tests.mutation.without_gpu import judge_here, timed_here
from tests.submissions.everything import submissions_to


@dataclass(frozen=True)
class Check:
    """One submission on one seed."""

    exercise: str
    name: str
    seed: int
    source: str

    @property
    def key(self) -> list:
        """What an earlier run knows it by; another source is another check."""
        return [self.exercise, self.name, self.seed, hashlib.sha256(self.source.encode()).hexdigest()[:16]]


def judged(check: Check) -> dict:
    """The check's verdict as a row that can be kept."""
    verdict = judge_here(check.exercise, check.source, check.seed)
    return {
        "key": check.key,
        "outcome": verdict.outcome,
        "mistake": verdict.mistake,
        "message": verdict.message[:600],
        "seconds": round(verdict.seconds, 3),
    }


def submissions(kind: str, exercises: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """(exercise, name, source) of tests/submissions: "WRONG", or "UNUSUAL" with the course's own answers among them."""
    for exercise in exercises:
        if kind == "UNUSUAL":
            yield exercise, "the course's own", catalog.solution_source(exercise)
        for name, source in getattr(submissions_to(exercise), kind).items():
            yield exercise, name, source


def _verdicts(checks: list[Check], processes: int, path: Path | None, until: float) -> Iterator[dict]:
    """A row for each check: those that a file remembers, then the others as they are judged, and kept there."""
    wanted = {tuple(check.key): check for check in checks}
    for row in kept(path):
        if wanted.pop(tuple(row["key"]), None) is not None:
            yield row
    for row in spread(judged, list(wanted.values()), processes, until):
        keep(path, row)
        yield row


def right_ones(exercises: Iterable[str], seeds: int, processes: int, path: Path | None, until: float) -> int:
    """Judge every right answer on seeds 1 to `seeds`; prints each failure and a table, and returns their number."""
    answers = list(submissions("UNUSUAL", exercises))
    # Seed by seed, so that a run cut short has seen every answer.
    checks = [Check(*answer[:2], seed, answer[2]) for seed, answer in itertools.product(range(1, seeds + 1), answers)]
    rows = []
    for row in _verdicts(checks, processes, path, until):
        rows.append(row)
        if row["outcome"] not in ("passed", "unsupported"):
            print(f"FAILED {row['key'][0]} {row['key'][1]}, seed {row['key'][2]}: {row['message']}", flush=True)
    by_exercise = collections.defaultdict(list)
    for row in rows:
        by_exercise[row["key"][0]].append(row)
    print(f"{'exercise':10}{'answers':>9}{'checks':>9}{'seeds of each':>15}{'failures':>10}{'median s':>10}")
    for exercise in [*filter(by_exercise.get, catalog.exercises()), "all"]:
        _right_row(exercise, by_exercise.get(exercise, rows))
    if len(rows) < len(checks):
        print(f"{len(checks) - len(rows)} checks were not made in the time given.")
    return sum(row["outcome"] not in ("passed", "unsupported") for row in rows)


def _right_row(name: str, rows: list[dict]) -> None:
    done = [row for row in rows if row["outcome"] != "unsupported"]
    if not done:
        print(f"{name:10}   not judged on this machine")
        return
    counts = collections.Counter((row["key"][0], row["key"][1]) for row in done)
    least, most = min(counts.values()), max(counts.values())
    seeds = str(least) if least == most else f"{least} to {most}"
    failures = sum(row["outcome"] != "passed" for row in done)
    median = statistics.median(row["seconds"] for row in done)
    print(f"{name:10}{len(counts):9}{len(done):9}{seeds:>15}{failures:10}{median:10.2f}")


def wrong_ones(exercises: Iterable[str], seed: int, processes: int, path: Path | None, until: float) -> int:
    """Judge every wrong answer once; prints the table of names, and returns the number wrongly named or let pass."""
    table = collections.defaultdict(collections.Counter)
    checks = [Check(exercise, name, seed, source) for exercise, name, source in submissions("WRONG", exercises)]
    for row in _verdicts(checks, processes, path, until):
        exercise, name = row["key"][:2]
        if row["outcome"] == "unsupported" or (name.split("__")[0] == "too_slow" and not timed_here()):
            kind = "not judged here"
        elif row["outcome"] == "passed":
            kind = "passed"
        elif row["mistake"] == name.split("__")[0]:
            kind = "rightly named"
        else:
            kind = "silent" if row["mistake"] is None else "wrongly named"
        table[exercise][kind] += 1
        if kind in ("passed", "wrongly named", "silent"):
            print(f"{kind.upper()} {exercise} {name}: {row['mistake']}", flush=True)
    total = sum(table.values(), collections.Counter())
    if total.total() < len(checks):
        print(f"{len(checks) - total.total()} wrong answers were not judged in the time given.")
    kinds = ("rightly named", "silent", "wrongly named", "passed", "not judged here")
    print(f"{'exercise':10}" + "".join(f"{kind:>17}" for kind in kinds))
    for exercise in [*filter(table.get, catalog.exercises()), "all"]:
        counts = table[exercise] if exercise in table else total
        print(f"{exercise:10}" + "".join(f"{counts[kind]:17}" for kind in kinds))
    return total["wrongly named"] + total["passed"]
