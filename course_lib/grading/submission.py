"""The file that a learner hands in: JSON, versioned, with the source of every answer.

    {"format": "attention-course submission", "version": 1, "chapter": "04", "made_at": "2026-11-21T20:53:10+00:00",
     "course": "3f0a...", "exercises": [{"exercise": "4.1", "title": "...", "source": "# Exercise 4.1 ...",
     "outcome": "passed", "mistake": null, "message": "..."}]}

`source` is null for an exercise without an answer. Outcome, mistake and message tell the learner what was handed in;
grading judges the sources again and reads nothing else.
"""

from __future__ import annotations

import json
from pathlib import Path

from course_lib.builder.keeping import write
from course_lib.checker.specification.errors import CourseError

FORMAT, VERSION = "attention-course submission", 1


def file_name(chapter: str) -> str:
    """What a chapter's submission file is called."""
    return f"submission_{chapter}.json"


def is_submission(value) -> bool:
    """Whether parsed JSON says that it is a submission, of whatever version."""
    return isinstance(value, dict) and value.get("format") == FORMAT


def sources_in(value: dict) -> list[tuple[str, str]]:
    """The (exercise id, source) pairs of a submission file's parsed JSON, in the file's order.

    Raises:
        CourseError: a version that this course does not know, or entries that are not what the format says.
    """
    if value.get("version") != VERSION:
        raise CourseError(
            f"is a submission of version {str(value.get('version'))[:20]!r}; this course reads version {VERSION}. "
            "Another version of the course made it."
        )
    entries = value.get("exercises")
    if not isinstance(entries, list):
        raise CourseError("is a submission without its list of exercises.")
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("exercise"), str):
            raise CourseError("is a submission with an entry that names no exercise.")
        source = entry.get("source")
        if source is not None and not isinstance(source, str):
            raise CourseError(f"is a submission whose source for exercise {entry['exercise'][:20]} is no text.")
        if source is not None:
            found.append((entry["exercise"], source))
    return found


def write_submission(folder: Path, chapter: str, made_at: str, course: str, exercises: list[dict]) -> Path:
    """Write a chapter's submission into a folder, whole or not at all, over an earlier one.

    Raises:
        CourseError: the folder is none, or holds another file of that name.
    """
    path = folder / file_name(chapter)
    if not folder.is_dir():
        raise CourseError(f"{folder} is no folder. submit({chapter!r}, folder=...) takes one that exists.")
    if path.exists() and not _is_ours(path):
        raise CourseError(f"{path} is there and is no submission; it is left as it is. Name another folder.")
    content = {
        "format": FORMAT,
        "version": VERSION,
        "chapter": chapter,
        "made_at": made_at,
        "course": course,
        "exercises": exercises,
    }
    write(path, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
    return path


def _is_ours(path: Path) -> bool:
    try:
        return is_submission(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False
