"""`submit("04")`: a chapter's answers judged once more from a clean worker and written into one file to hand in."""

from __future__ import annotations

import datetime
import html
import os
from dataclasses import dataclass
from pathlib import Path

from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.verdict import OUTCOMES, Verdict, _shell
from course_lib.checker.notebook.store import ASIDE, progress_file
from course_lib.checker.runner.worker import end_workers
from course_lib.checker.specification import catalog, cells
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Exercise
from course_lib.grading.submission import write_submission
from course_lib.grading.version import course_version


@dataclass(frozen=True)
class Submitted:
    """What was handed in: the file's path and, for each exercise of the chapter, the verdict on its source."""

    path: Path
    verdicts: tuple[Verdict, ...]

    def _counts(self) -> str:
        passed = sum(verdict.passed for verdict in self.verdicts)
        return f"{passed} of {len(self.verdicts)} exercises passed"

    def __repr__(self) -> str:
        lines = [f"Hand in {self.path} ({self._counts()}):"]
        for verdict in self.verdicts:
            sign, words = OUTCOMES[verdict.outcome]
            lines.append(f"  {sign} {verdict.exercise} {verdict.title}: {words}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><td>{OUTCOMES[verdict.outcome][0]}</td><td style="text-align:left">{verdict.exercise} '
            f'{html.escape(verdict.title)}</td><td style="text-align:left">{OUTCOMES[verdict.outcome][1]}</td></tr>'
            for verdict in self.verdicts
        )
        return (
            f"<div>Hand in <code>{html.escape(str(self.path))}</code>: <b>{self._counts()}</b><table>{rows}</table>"
            "</div>"
        )


def submit(chapter: str, folder: str | Path = ".") -> Submitted:
    """Judge every exercise of a chapter from its kept source, in a clean worker, and write one file to hand in.

    Of each exercise the cell counts as you last ran it in this notebook; where that does not pass, the last attempt
    that did; where none did, the cell or the last attempt is handed in as it is.

    Args:
        chapter: its number, "04".
        folder: where the file goes; the notebook's own folder by default.

    Returns:
        What was handed in: `.path` and `.verdicts`, shown as a table.

    Raises:
        CourseError: there is no such chapter, nothing to hand in, or the folder cannot take the file.
    """
    tasks = _tasks(chapter)
    folder = Path(folder)
    if not os.access(folder, os.W_OK):
        raise CourseError(f"{folder} is no folder that you can write to. Name another: submit(..., folder=...).")
    end_workers()
    entries, verdicts = [], []
    for task in tasks:
        source, verdict = _best(task)
        verdicts.append(verdict)
        entries.append(
            {
                "exercise": task.id,
                "title": task.title,
                "source": None if verdict.outcome == "not_attempted" else source,
                "outcome": verdict.outcome,
                "mistake": verdict.mistake,
                "message": verdict.message,
            }
        )
    if all(entry["source"] is None for entry in entries):
        raise CourseError(
            f"No exercise of chapter {tasks[0].chapter} has an answer yet: nothing was written. Run the cells of your "
            "answers and their checks first."
        )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    path = write_submission(folder, tasks[0].chapter, now, course_version(tasks[0].chapter), entries)
    return Submitted(path, tuple(verdicts))


def _tasks(chapter: str) -> list[Exercise]:
    name = str(chapter).strip()
    number = f"{int(name):02d}" if name.isascii() and name.isdigit() else name
    tasks = [task for task in catalog.exercises().values() if task.chapter == number]
    if not tasks:
        known = ", ".join(dict.fromkeys(task.chapter for task in catalog.exercises().values()))
        raise CourseError(f'There is no chapter {chapter!r} with exercises; there are {known}. Write submit("03").')
    return tasks


def _best(task: Exercise) -> tuple[str, Verdict]:
    """The source to hand in for an exercise, with the verdict on it: the first candidate that passes, or the first."""
    judged = []
    for source in _candidates(task) or [""]:
        judged.append((source, judge(task, source)))
        if judged[-1][1].passed:
            return judged[-1]
    # An untouched cell (run again after a reset, say) must not hide an attempt that was made.
    return next((pair for pair in judged if pair[1].outcome != "not_attempted"), judged[0])


def _candidates(task: Exercise) -> list[str]:
    """Sources in the order in which they count: the cell as last run here, the last attempt that passed, the last."""
    attempts = [row for row in progress_file().attempts(task.id) if row["origin"] != ASIDE]
    passed = [row["source"] for row in attempts if row["outcome"] == "passed"]
    return list(dict.fromkeys(_cell_run_here(task.id) + passed[-1:] + [row["source"] for row in attempts[-1:]]))


def _cell_run_here(identity: str) -> list[str]:
    """The exercise's cell as it was last run in this notebook; nothing outside a notebook."""
    shell = _shell()
    inputs = shell.user_ns.get("In", []) if shell is not None else []
    return [str(source) for source in inputs if cells.exercise_id(str(source)) in cells.numbers_of(identity)][-1:]
