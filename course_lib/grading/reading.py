"""A stranger's file, read without trust: the sources of its exercises, or one sentence on why there are none.

What a file is, its content decides and not its name, because learning platforms rename files: a JSON object is a
notebook or a submission, other text a percent-format script.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from course_lib.checker.specification import catalog, cells
from course_lib.checker.specification.errors import CourseError
from course_lib.grading.submission import is_submission, sources_in

LARGEST_FILE = 32 << 20
LARGEST_SOURCE = 256 << 10
LARGEST_SCRIPT = 4 << 20
MOST_CELLS = 5_000  # reading takes time for every cell: millions in one file would keep a grader busy for an hour
KINDS = (".ipynb", ".py", ".json")


class Unreadable(Exception):
    """A file that cannot be graded; the text says why, as the end of a sentence that begins with its name."""


@dataclass(frozen=True)
class Answer:
    """One exercise of a file: its id and source (None: the file holds no such cell), and what to add to the verdict."""

    exercise: str
    source: str | None
    note: str = ""


def files_in(arguments: Iterable[str | Path]) -> list[Path]:
    """The files that a command line means: files as named, folders searched, patterns such as `*/03*.ipynb` expanded.

    Of a folder every .ipynb, .py and .json counts, except in hidden folders, checkpoints and caches. Links are not
    followed into other folders.

    Raises:
        CourseError: an argument that means no file.
    """
    found: dict[Path, None] = {}
    for argument in map(Path, arguments):
        if argument.is_dir():
            here = sorted(_walk(argument))
        elif os.path.lexists(argument):
            here = [argument]
        else:
            here = sorted(map(Path, glob.glob(str(argument), recursive=True)))
        if not here:
            what = f"a folder without {', '.join(KINDS)} files" if argument.is_dir() else "no file or folder"
            raise CourseError(f"{printable(argument)}: is {what}.")
        found.update(dict.fromkeys(here))
    return list(found)


def _walk(folder: Path) -> Iterable[Path]:
    for place, folders, names in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        yield from (Path(place, name) for name in names if name.endswith(KINDS) and not name.startswith("."))


def printable(path: str | Path) -> str:
    """A path as text that any file can hold; bytes that are no UTF-8 are shown by their numbers."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read_bytes(path: Path) -> bytes:
    """A regular file's content; nothing that could block, be endless, or lead somewhere else is read.

    Raises:
        Unreadable: a link, a pipe, a folder, a file that is too large, not permitted or gone.
    """
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise Unreadable("is no longer there.") from None
    except OSError as error:
        if os.path.islink(path):
            raise Unreadable("is a link; only files themselves are read.") from None
        raise Unreadable(f"cannot be opened ({error.strerror}).") from None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("is no regular file.")
        if about.st_size > LARGEST_FILE:
            raise Unreadable(
                f"has {about.st_size / 2**20:,.0f} MB; at most {LARGEST_FILE >> 20} MB are read. Clear the notebook's "
                "outputs."
            )
        with open(handle, "rb", closefd=False) as file:
            content = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror}).") from None
    finally:
        os.close(handle)
    if len(content) > LARGEST_FILE:
        raise Unreadable(f"grew beyond {LARGEST_FILE >> 20} MB while it was read.")
    return content


def fingerprint(content: bytes) -> str:
    """What a file's content goes by in the journal."""
    return hashlib.sha256(content).hexdigest()[:32]


def answers_in(content: bytes) -> list[Answer]:
    """Every exercise of every chapter that a file holds at least one exercise of, in the course's order.

    An exercise under a number that it had before it moved is judged by itself: its new chapter is not asked for.

    Raises:
        Unreadable: it is no notebook, script or submission, or holds no exercise of this course.
    """
    pairs = _pairs(content)
    known = catalog.exercises()
    sources: dict[str, str] = {}
    repeated = set()
    for written, source in pairs:
        identity = cells.number_now(written)
        if identity in sources:
            repeated.add(identity)
        sources[identity] = source
    strange = [identity[:12] for identity in sources if identity not in known]
    chapters = {known[written].chapter for written, _ in pairs if written in known}
    if len(strange) == len(sources):
        raise Unreadable(
            f"holds exercises that this course does not have ({', '.join(strange[:5])})."
            if strange
            else "holds no exercise cell (one whose first line reads `# Exercise 3.2 · Title`)."
        )
    answers = []
    for task in known.values():
        if task.chapter not in chapters and task.id not in sources:
            continue
        note = ""
        if task.id not in dict(pairs) and task.id in sources:
            note = catalog.moved(next(written for written, _ in pairs if cells.number_now(written) == task.id))
        elif task.id in repeated:
            note = f"Several cells begin with `# Exercise {task.id}`; the last one was judged."
        elif task.id not in sources and strange:
            note = f"It holds {', '.join(strange[:5])}, which the course does not have."
        answers.append(Answer(task.id, sources.get(task.id), note))
    return answers


def _pairs(content: bytes) -> list[tuple[str, str]]:
    """(exercise id, source) of every exercise in a file, in its order, repeated ones included."""
    if not content.strip():
        raise Unreadable("is empty.")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unreadable("is no text (not UTF-8).") from None
    if "\0" in text:
        raise Unreadable("is no text (it holds zero bytes).")
    is_script = not text.lstrip().startswith("{")
    if is_script and len(content) > LARGEST_SCRIPT:
        raise Unreadable(f"has {len(content) / 2**20:,.1f} MB; of a script at most {LARGEST_SCRIPT >> 20} MB are read.")
    number = text.count("%%" if is_script else '"cell_type"')
    if number > MOST_CELLS:
        raise Unreadable(f"has {number:,} cells; at most {MOST_CELLS:,} are read.")
    try:
        if is_script:
            return _exercises(cells.percent_cells("it", text))
        parsed = json.loads(text)
        if is_submission(parsed):
            return sources_in(parsed)
        return _exercises(cells.notebook_cells("it", text))
    except CourseError as error:
        raise Unreadable(str(error).removeprefix("it: ")) from None
    except json.JSONDecodeError as error:
        raise Unreadable(f"is broken JSON (line {error.lineno}: {error.msg}).") from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise Unreadable(f"cannot be read ({type(error).__name__}).") from None


def _exercises(sources: Iterable[str]) -> list[tuple[str, str]]:
    return [(identity, source) for source in sources if (identity := cells.exercise_id(source))]
