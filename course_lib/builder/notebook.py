"""A chapter's source made into a notebook: the same bytes from the same source, on any machine."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from course_lib.bootstrap import COURSE_REPOSITORY, FIRST_CELL
from course_lib.builder.answers import BuildError, Cell, answers, exercise_of, solved, stubbed
from course_lib.builder.nbgrader import mark
from course_lib.home import ROOT

# In a solved chapter a check that does not pass stops the notebook, so that running it is a test of the chapter.
STRICT_CELL = 'import os\n\nos.environ["COURSE_STRICT"] = "1"  # a solved chapter: every check must pass'

SOURCE_NAME = re.compile(r"(\d\d)_[a-z0-9_]+\.py")
LIKE_AN_EXERCISE = re.compile(r"#\s*exercise\s+\d", re.IGNORECASE)


def build_notebook(path: Path, with_answers: bool = False) -> dict:
    """The notebook that a chapter's source makes, in nbformat 4.5.

    Args:
        path: the source, such as solutions/03_online_softmax.py.
        with_answers: keep the answers, and let a check that does not pass stop the notebook.

    Raises:
        BuildError: the source breaks a rule of the builder (see its package); the text names the file and the line.
    """
    if not SOURCE_NAME.fullmatch(path.name):
        raise BuildError(f"{relative(path)}: a chapter's file is named like 03_online_softmax.py.")
    cells = chapter_cells(path, with_answers)
    mark(cells)
    # After the title, so that a reader meets the chapter before its machinery.
    place = 1 if cells and cells[0].kind == "markdown" else 0
    set_up = FIRST_CELL.replace("{repository}", COURSE_REPOSITORY).rstrip("\n")
    cells.insert(place, Cell("code", set_up, 0, {"jupyter": {"source_hidden": True}}))  # folded, for who wants to look
    if with_answers:
        cells.insert(0, Cell("code", STRICT_CELL, 0))

    entries = with_ids(cells)
    return {
        "cells": entries,
        "metadata": {
            "course": {
                "built_from": hashlib.sha256(path.read_bytes().replace(b"\r\n", b"\n")).hexdigest(),
                "cells": fingerprint(entries),
            },
            "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def chapter_cells(path: Path, with_answers: bool) -> list[Cell]:
    """The source's cells, held to the rules, with the answers or their stubs."""
    shown, chapter = relative(path), int(path.name[:2])
    cells: list[Cell] = []
    seen: dict[str, int] = {}  # where each exercise stands
    for cell in read_cells(path):
        exercise, place = exercise_of(cell), f"{shown}, line {cell.line}"
        if exercise is None:
            reject_exercise_parts(cell, shown)
            cells.append(cell)
            continue
        if exercise in seen:
            raise BuildError(f"{place}: exercise {exercise} is in line {seen[exercise]} already.")
        if int(exercise.split(".")[0]) != chapter:
            raise BuildError(f"{place}: exercise {exercise} does not belong to chapter {chapter}.")
        seen[exercise] = cell.line
        stub = stubbed(cell, shown)  # also for a solved chapter, which is held to the same rules
        cells.append(Cell(cell.kind, solved(cell, shown) if with_answers else stub, cell.line, cell.metadata))
    return cells


def reject_exercise_parts(cell: Cell, shown: Path) -> None:
    """Raise a BuildError if a cell that is no exercise looks like one or holds an answer."""
    first = cell.text.split("\n", 1)[0]
    if cell.kind == "code" and LIKE_AN_EXERCISE.match(first):
        raise BuildError(f"{shown}, line {cell.line}: '{first}' should read like '# Exercise 3.2 · Title'.")
    if blocks := answers(cell, shown):
        raise BuildError(
            f"{shown}, line {cell.line + blocks[0][0]}: an answer outside an exercise; the first line of its cell must "
            "read like '# Exercise 3.2 · Title'."
        )


def with_ids(cells: Iterable[Cell]) -> list[dict]:
    """The cells as nbformat has them. An exercise keeps its id whatever becomes of its text; others go by content."""
    entries, used = [], set()
    for cell in cells:
        exercise = exercise_of(cell)
        stem = hashlib.sha256(f"{cell.kind}\n{cell.text}".encode()).hexdigest()[:12]
        if exercise:
            stem = "exercise-" + exercise.replace(".", "-")
        identity = next(i for i in (stem, *(f"{stem}-{n}" for n in range(2, 1000))) if i not in used)
        used.add(identity)
        entry: dict = {"cell_type": cell.kind, "id": identity, "metadata": cell.metadata}
        if cell.kind == "code":
            entry |= {"execution_count": None, "outputs": []}
        entries.append(entry | {"source": cell.text.splitlines(keepends=True)})
    return entries


def fingerprint(entries: Iterable[dict]) -> str:
    """A hash of what cells say. Outputs, counts, metadata and the empty cells that editors add are no work."""
    digest = hashlib.sha256()
    for entry in entries:
        source = entry.get("source", "")
        text = (source if isinstance(source, str) else "".join(source)).rstrip()
        if text:
            digest.update(f"{entry.get('cell_type')}\n{text}\0".encode())
    return digest.hexdigest()


def as_text(notebook: dict) -> str:
    return json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True) + "\n"


def read_cells(path: Path) -> list[Cell]:
    """The cells of a percent-format file; a header of Jupytext's own is skipped.

    Raises:
        BuildError: Jupytext cannot read the file; the text gives its reason.
    """
    import jupytext  # half a second, which `--help` need not wait for

    text = path.read_text(encoding="utf-8")
    try:
        entries = jupytext.reads(text, fmt="py:percent").cells
    except Exception as error:  # its header is checked by libraries with errors of their own
        raise BuildError(f"{relative(path)}: Jupytext cannot read it: {str(error).splitlines()[0]}.") from error
    lines = text.splitlines()
    cells, line = [], 0
    for cell in entries:
        first = cell.source.split("\n", 1)[0]
        # A code cell stands in the file as it is, prose behind "# "; the search goes on from the cell before.
        found = next((i for i in range(line, len(lines)) if first and lines[i] in (first, f"# {first}")), line)
        line = found + (1 if first else 0)
        # Jupytext notes how many blank lines stood between cells: layout of the source, none of the notebook's.
        metadata = {key: value for key, value in cell.metadata.items() if not key.startswith("lines_to_")}
        cells.append(Cell(cell.cell_type, cell.source, found + 1, metadata))
    return cells


def relative(path: Path) -> Path:
    """The path as a reader of the course knows it."""
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
