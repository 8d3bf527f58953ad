"""One answer to one row. Runs in the process that holds the warm judge; whatever an answer does, a row comes back."""

from __future__ import annotations

import threading
from os import _exit

from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.verdict import Verdict
from course_lib.checker.specification import catalog
from course_lib.grading.reading import LARGEST_SOURCE, Answer

DEADLINE = 900.0  # seconds; far above any exercise's own limits, which the worker keeps
LONGEST_MESSAGE = 2000


def row_of(answer: Answer) -> dict:
    """Judge one answer.

    Returns:
        exercise, outcome, points, mistake, message, seconds, seed and cases; `file` is for the caller to fill in.

    Raises:
        Exception: a fault of the checker itself, never of the answer.
    """
    task = catalog.exercise(answer.exercise)
    if answer.source is None:
        text = f"The file holds no cell that begins with `# Exercise {task.id}`."
        return _row(task.id, "not_attempted", text, answer)
    if len(answer.source) > LARGEST_SOURCE:
        size = len(answer.source) / 1024
        text = f"The cell holds {size:,.0f} kB of text; at most {LARGEST_SOURCE >> 10} kB are judged."
        return _row(task.id, "error", text, answer, mistake="source_too_long")
    last_resort = threading.Timer(DEADLINE, _exit, (70,))  # this process dies; the scheduler gives the task to another
    last_resort.daemon = True
    last_resort.start()
    try:
        verdict = judge(task, answer.source)
        if verdict.outcome == "crashed" and verdict.mistake is None:
            # The worker itself ended, perhaps by no fault of this answer: a new one gets it once more.
            verdict = judge(task, answer.source)
    finally:
        last_resort.cancel()
    return _of_verdict(verdict, task.points, answer)


def _of_verdict(verdict: Verdict, points: int, answer: Answer) -> dict:
    fields = verdict.as_dict()
    row = _row(
        verdict.exercise, verdict.outcome, fields["message"], answer, verdict.mistake, points if verdict.passed else 0
    )
    return row | {"seconds": fields["seconds"], "seed": fields["seed"], "cases": fields["cases"]}


def _row(
    exercise: str, outcome: str, message: str, answer: Answer, mistake: str | None = None, points: int = 0
) -> dict:
    text = " ".join(f"{message} {answer.note}".split())
    if len(text) > LONGEST_MESSAGE:
        text = text[:LONGEST_MESSAGE] + " …"
    return {
        "exercise": exercise,
        "outcome": outcome,
        "points": points,
        "mistake": mistake,
        "message": text,
        "seconds": 0.0,
        "seed": None,
        "cases": [],
    }


def row_of_a_fault(answer: Answer, error: object) -> dict:
    """The row of an answer that the checker itself failed on; it is judged again at the next run."""
    text = f"The checker failed here, which is no fault of the answer: {str(error)[:500]}. Run the same command again."
    return _row(answer.exercise, "ungraded", text, answer)


def row_for_file(reason: str) -> dict:
    """The one row of a file in which nothing could be judged; `reason` ends a sentence that begins with "The file"."""
    return _row("", "unreadable", f"The file {reason}", Answer("", None))
