"""Verdicts as GitHub shows them: an annotation at the exercise's cell, and a row in the job's summary.

A workflow's command is a line of the log, `::error file=…,line=…,title=…::message`. GitHub shows ten of each kind for a
step, so what is as it was given has none; the summary has a row for everything.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from course_lib.checker.specification.cells import exercise_id, number_now

KINDS = {"passed": "notice", "unsupported": "warning", "not_attempted": None}  # any other outcome is an error
SEPARATORS = re.compile(r"[\s,:]*")  # between the values of an array or an object


def commands(verdicts: list[dict], problems: dict[str, str]) -> Iterator[str]:
    """The commands that show verdicts at their cells, and files that could not be read at their first lines.

    Args:
        verdicts: as `check --json` writes them.
        problems: file to the sentence that says why it could not be checked.
    """
    places = {file: exercise_lines(Path(file)) for file in {verdict["file"] for verdict in verdicts}}
    for verdict in verdicts:
        kind = KINDS.get(verdict["outcome"], "error")
        if kind:
            file, exercise = verdict["file"], verdict["exercise"]
            yield command(kind, file, places[file].get(exercise, 1), f"Exercise {exercise}", verdict["message"])
    for file, message in problems.items():
        yield command("error", file, 1, "Not checked", message)


def command(kind: str, file: str, line: int, title: str, message: str) -> str:
    """A workflow's command, escaped as its runner reads it back."""

    def data(text: str) -> str:
        return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

    def value(text: str) -> str:
        return data(text).replace(":", "%3A").replace(",", "%2C")

    return f"::{kind} file={value(file)},line={line},title={value(title)}::{data(message)}"


def summary(verdicts: list[dict], problems: dict[str, str]) -> str:
    """A table in Markdown with a row for each verdict, and one for each file that could not be read."""
    rows = [(each["file"], each["exercise"], each["outcome"].replace("_", " "), each["message"]) for each in verdicts]
    rows += [(file, "", "not checked", message) for file, message in problems.items()]
    lines = [f"| {' | '.join(map(cell, row))} |\n" for row in rows]
    return "".join(["| file | exercise | outcome | what to know |\n", "|---|---|---|---|\n", *lines])


def cell(text: str) -> str:
    """Text in a table's cell: one line, with its `code` and without any other markup."""
    parts = " ".join(text.split()).replace("|", r"\|").split("`")
    return "`".join(part if index % 2 else html.escape(part, quote=False) for index, part in enumerate(parts))


def exercise_lines(path: Path) -> dict[str, int]:
    """Exercise to the line of the file in which its header stands, in a notebook the line of its JSON."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        found = {exercise_id(line): number for number, line in enumerate(text.splitlines(), 1)}
    else:
        found = {exercise_id(source): text.count("\n", 0, place) + 1 for source, place in code_cells(text)}
    return {number_now(exercise): line for exercise, line in found.items() if exercise}


def code_cells(text: str) -> Iterator[tuple[str, int]]:
    """Each code cell's source, and where in the notebook's text the first line of it that is not blank begins."""
    cells = members(text, 0).get("cells")  # before nbformat 4, ten years ago, they lay in worksheets
    for place in places_in(text, cells) if cells else ():
        keys = members(text, place)
        if value_at(text, keys["cell_type"]) != "code":
            continue
        source = value_at(text, keys["source"])
        if isinstance(source, str):
            yield source, keys["source"]
        else:
            begins = [at for at in places_in(text, keys["source"]) if value_at(text, at).strip()]
            yield "".join(source), begins[0] if begins else keys["source"]


def members(text: str, place: int) -> dict[str, int]:
    """Key to the place of its value, in the JSON object that begins at a place."""
    places = list(places_in(text, place))
    return {value_at(text, key): value for key, value in zip(places[::2], places[1::2])}


def places_in(text: str, place: int) -> Iterator[int]:
    """Where each value of the JSON array or object at a place begins; an object's keys are values of it, too."""
    _, place = next_sign(text, place)
    sign, place = next_sign(text, place + 1)
    while sign not in "]}":
        yield place
        _, end = json.JSONDecoder().raw_decode(text, place)
        sign, place = next_sign(text, end)


def next_sign(text: str, place: int) -> tuple[str, int]:
    """The next character that separates no values, and where it stands."""
    place = SEPARATORS.match(text, place).end()  # type: ignore[union-attr]  # it matches nothing, too
    return text[place], place


def value_at(text: str, place: int):
    """The JSON value that begins at a place."""
    return json.JSONDecoder().raw_decode(text, place)[0]
