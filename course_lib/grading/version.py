"""Which course graded: a hash of all that decides an outcome."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from course_lib.grading.imports import closure
from course_lib.home import ROOT

# Where deciding begins: a file is read, confined, judged. What these need is found by reading their imports.
JUDGE = tuple(f"course_lib/grading/{name}.py" for name in ("reading", "sandbox", "judging"))


def deciding_files(chapter: str = "", root: Path = ROOT) -> list[Path]:
    """Every file that judging a chapter ("03") depends on; without a chapter, all that reading and judging any needs.

    A chapter's own are its exercises, what they share with other chapters, and its text, whose stubs tell what was not
    attempted. The catalogue finds them by name, so no import leads to them.
    """
    start = [root / name for name in JUDGE]
    texts: list[Path] = []
    if chapter:
        start += root.glob(f"exercises/ch{chapter}_*/*.py")
        texts += root.glob(f"solutions/{chapter}_*.py")  # read, not run: what a text imports decides nothing
    return sorted(closure(start, root) | set(texts))


@functools.cache
def course_version(chapter: str = "", root: Path = ROOT) -> str:
    """Twelve hexadecimal digits that change with any of the deciding files, and with no other file."""
    digest = hashlib.sha256()
    for path in deciding_files(chapter, root):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes().replace(b"\r\n", b"\n") + b"\0")
    return digest.hexdigest()[:12]


def version_for(exercise: str) -> str:
    """The version of the course that decides on an exercise ("3.2"); "" is a file in which none was found."""
    return course_version(exercise.split(".")[0].zfill(2) if exercise else "")
