"""Every attempt's source and outcome, in one SQLite file that several notebooks and a command line may use at once."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from course_lib.checker.specification.cells import number_now, numbers_of
from course_lib.checker.specification.errors import CourseError
from course_lib.home import course_home

ASIDE = "aside"  # the origin of a trial outside the exercise's cell: its source is kept, but it is no attempt

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempts (
    id INTEGER PRIMARY KEY, made_at REAL NOT NULL, exercise TEXT NOT NULL, source TEXT NOT NULL, outcome TEXT NOT NULL,
    mistake TEXT, message TEXT NOT NULL, seconds REAL NOT NULL, seed INTEGER, origin TEXT
);
CREATE INDEX IF NOT EXISTS attempts_by_exercise ON attempts (exercise, made_at);
CREATE TABLE IF NOT EXISTS hints (exercise TEXT PRIMARY KEY, shown INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS solutions_seen (exercise TEXT PRIMARY KEY, seen_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS predictions (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, guess REAL NOT NULL, unit TEXT NOT NULL, made_at REAL NOT NULL,
    measured REAL, measured_at REAL
);
"""


@dataclass(frozen=True)
class Standing:
    """Where a learner stands with one exercise: attempts made, whether one passed, the last outcome, hints shown."""

    attempts: int = 0
    passed: bool = False
    last: str | None = None
    hints: int = 0
    solution_seen: bool = False


@dataclass(frozen=True)
class Prediction:
    """A number that was predicted, in words what it counts, and what was measured since, if anything was."""

    name: str
    guess: float
    unit: str
    measured: float | None = None


class Store:
    """The progress file. Writes wait up to ten seconds for each other; a damaged file is set aside, never deleted."""

    def __init__(self, path: Path | None = None):
        self.path = path or course_home() / "progress.sqlite3"
        self.set_aside: Path | None = None

    @contextlib.contextmanager
    def _open(self):
        try:
            connection = self._connect()
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
                raise CourseError(
                    f"The progress file {self.path} cannot be opened ({error}). Set COURSE_HOME to a folder "
                    "that you can write to."
                ) from error
            self._put_aside()
            connection = self._connect()
        try:
            with connection:
                yield connection
        finally:
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=10.0)
        try:
            # A rollback journal, not WAL: home folders on network drives have no shared memory between processes.
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_SCHEMA)
            connection.execute("SELECT exercise, outcome FROM attempts ORDER BY id DESC LIMIT 1").fetchall()
        except BaseException:
            connection.close()
            raise
        return connection

    def _put_aside(self) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        target = self.path.with_name(f"{self.path.name}.damaged-{stamp}")
        number = 1
        while target.exists():
            target = self.path.with_name(f"{self.path.name}.damaged-{stamp}-{number}")
            number += 1
        self.path.rename(target)
        self.set_aside = target
        print(f"The progress file was damaged. It is kept as {target}; a new one was begun.")

    def add(
        self,
        exercise: str,
        source: str,
        outcome: str,
        mistake: str | None,
        message: str,
        seconds: float,
        seed: int | None,
        origin: str | None,
    ) -> None:
        """Keep one attempt. What is no Unicode in its source is kept as "?"."""
        source = source.encode(errors="replace").decode()
        with self._open() as connection:
            connection.execute(
                "INSERT INTO attempts (made_at, exercise, source, outcome, mistake, message, seconds, seed, origin) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (time.time(), exercise, source, outcome, mistake, message, seconds, seed, origin),
            )

    def attempts(self, exercise: str) -> list[dict]:
        """All attempts at an exercise, oldest first: made_at, source, outcome, mistake, message, seconds, seed.

        Those under a number that it had before are among them."""
        numbers = numbers_of(exercise)
        asked = f"SELECT * FROM attempts WHERE exercise IN ({', '.join('?' * len(numbers))}) ORDER BY id"
        with self._open() as connection:
            connection.row_factory = sqlite3.Row
            rows = connection.execute(asked, numbers).fetchall()
        return [dict(row) for row in rows]

    def standings(self) -> dict[str, Standing]:
        """Where the learner stands, by exercise id as it is now."""
        with self._open() as connection:
            rows = connection.execute(
                "SELECT exercise, outcome FROM attempts WHERE origin IS NOT ? ORDER BY id", (ASIDE,)
            ).fetchall()
            hints: dict[str, int] = {}
            for exercise, shown in connection.execute("SELECT exercise, shown FROM hints"):
                hints[number_now(exercise)] = max(shown, hints.get(number_now(exercise), 0))
            seen = {number_now(row[0]) for row in connection.execute("SELECT exercise FROM solutions_seen")}
        outcomes: dict[str, list[str]] = {}
        for exercise, outcome in rows:
            outcomes.setdefault(number_now(exercise), []).append(outcome)
        return {
            exercise: Standing(
                attempts=len(outcomes.get(exercise, [])),
                passed="passed" in outcomes.get(exercise, []),
                last=outcomes[exercise][-1] if exercise in outcomes else None,
                hints=hints.get(exercise, 0),
                solution_seen=exercise in seen,
            )
            for exercise in {*outcomes, *hints, *seen}
        }

    def next_hint(self, exercise: str, available: int) -> int:
        """Count one more hint as shown (at most `available`) and return which one, from 0."""
        with self._open() as connection:
            connection.execute("INSERT INTO hints VALUES (?, 0) ON CONFLICT DO NOTHING", (exercise,))
            (shown,) = connection.execute("SELECT shown FROM hints WHERE exercise = ?", (exercise,)).fetchone()
            connection.execute("UPDATE hints SET shown = ? WHERE exercise = ?", (min(shown + 1, available), exercise))
        return min(shown, available - 1)

    def saw_solution(self, exercise: str) -> None:
        """Remember that the solution was shown."""
        with self._open() as connection:
            connection.execute(
                "INSERT INTO solutions_seen VALUES (?, ?) ON CONFLICT DO NOTHING", (exercise, time.time())
            )

    def add_prediction(self, name: str, guess: float, unit: str) -> None:
        """Keep one more prediction; earlier ones of the name stay. The same number again, not measured yet, is one."""
        latest = next((one for one in self.predictions() if one.name == name), None)
        if latest == Prediction(name, guess, unit):
            return
        with self._open() as connection:
            connection.execute(
                "INSERT INTO predictions (name, guess, unit, made_at) VALUES (?, ?, ?, ?)",
                (name, guess, unit, time.time()),
            )

    def add_measured(self, name: str, value: float) -> Prediction | None:
        """Put what was measured beside the latest prediction of the name, which is returned, if there is one."""
        with self._open() as connection:
            connection.execute(
                "UPDATE predictions SET measured = ?, measured_at = ? "
                "WHERE id = (SELECT max(id) FROM predictions WHERE name = ?)",
                (value, time.time(), name),
            )
        return next((one for one in self.predictions() if one.name == name), None)

    def predictions(self) -> list[Prediction]:
        """The latest prediction of each name, by name."""
        with self._open() as connection:
            rows = connection.execute(
                "SELECT name, guess, unit, measured FROM predictions "
                "WHERE id IN (SELECT max(id) FROM predictions GROUP BY name) ORDER BY name"
            ).fetchall()
        return [Prediction(*row) for row in rows]


_store: Store | None = None


def progress_file() -> Store:
    """The store of this process's attempts."""
    global _store
    if _store is None:
        _store = Store()
    return _store
