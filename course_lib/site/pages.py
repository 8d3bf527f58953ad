"""Lays out what Sphinx reads: each chapter with its answers folded beneath their exercises, README, docs/."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from course_lib.builder import as_text
from course_lib.home import ROOT

WIDGET = "application/vnd.jupyter.widget-view+json"
# A widget that shows itself says this much where no kernel runs; what any other says there is its own repr.
LIVE = "appears here while the notebook runs"
SET_UP = {
    "source_hidden": True
}  # the mark, without tags, of the cell that fetches the course, which a page does not do

# The pages beside the chapters, in the order of the sidebar.
READING_ON = ("docs/instructors.md", "docs/isolation.md", "docs/architecture.md", "CONTRIBUTING.md")
INSIDE = ("course_lib/README.md", "tests/README.md")
LINKED = ("LICENSE", "CITATION.cff")  # files that the pages link to and that are no pages

PREFACE = """
```{{admonition}} This page and the notebook
:class: tip
{ran}
To write your own answers, run `make lab`, or take {{download}}`the notebook of this chapter <../given/{name}.ipynb>`.
```
"""
RAN = (
    "These cells ran on a machine without a GPU, with every exercise as you are given it. Below each exercise, the "
    "course's answer is folded together with what its check says."
)
NOT_RUN = "This page was built without running its cells."


@dataclass(frozen=True)
class Chapter:
    """A chapter, run twice or not at all.

    Attributes:
        name: "03_online_softmax".
        plain: the notebook that a learner opens, not run.
        given: the same with its outputs.
        solved: with the answers in, and the outputs.
    """

    name: str
    plain: dict
    given: dict | None = None
    solved: dict | None = None


def lay_out(folder: Path, chapters: Sequence[Chapter], root: Path = ROOT) -> None:
    """Fills `folder`, which is emptied first, with the sources of all pages, in places as in the course itself, so that
    the links between them lead where they led."""
    shutil.rmtree(folder, ignore_errors=True)
    for chapter in chapters:
        _write(folder / "notebooks" / f"{chapter.name}.ipynb", as_text(page_of(chapter)))
        _write(folder / "given" / f"{chapter.name}.ipynb", as_text(chapter.plain))
    for name in (*READING_ON, *INSIDE):
        if (root / name).exists():
            _write(folder / name, as_read_by_sphinx((root / name).read_text(encoding="utf-8")))
    for name in LINKED:
        if (root / name).exists():
            (folder / name).write_bytes((root / name).read_bytes())
    for picture in (root / "docs").glob("*.[ps][nv]g"):
        (folder / "docs").mkdir(exist_ok=True)
        (folder / "docs" / picture.name).write_bytes(picture.read_bytes())
    text = as_read_by_sphinx((root / "README.md").read_text(encoding="utf-8"))
    for caption, pages in (
        ("Chapters", [f"notebooks/{chapter.name}" for chapter in chapters]),
        ("Reading on", [name.removesuffix(".md") for name in READING_ON if (root / name).exists()]),
        ("Inside", [name.removesuffix(".md") for name in INSIDE if (root / name).exists()]),
    ):
        if pages:
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"
    _write(folder / "index.md", text)


def page_of(chapter: Chapter) -> dict:
    """The notebook that becomes the chapter's page: as given, and beneath each exercise its answer, folded."""
    answers = answers_of(chapter.solved) if chapter.solved else {}
    given = chapter.given or chapter.plain
    cells: list[dict] = []
    waiting: tuple[str, dict] | None = None  # an exercise's number, and its answer, which stands below the check
    for cell in given["cells"]:
        if cell["metadata"].get("jupyter") == SET_UP and "tags" not in cell["metadata"]:
            continue
        shown = _still(cell)
        if not cells and cell["cell_type"] == "markdown":
            title, _, rest = source_of(cell).partition("\n")
            preface = PREFACE.format(name=chapter.name, ran=RAN if chapter.given else NOT_RUN)
            shown = {**shown, "source": f"{title}\n{preface}{rest}"}
        exercise = exercise_in(cell)
        if waiting and exercise:  # the check of the exercise before never came
            cells.append(waiting[1])
            waiting = None
        cells.append(shown)
        if exercise in answers:
            waiting = exercise, answers[exercise]
        elif waiting and checks(cell, waiting[0]):
            cells.append(waiting[1])
            waiting = None
    if waiting:
        cells.append(waiting[1])
    return {**given, "cells": cells, "metadata": _about_language(given)}


def answers_of(solved: dict) -> dict[str, dict]:
    """{exercise: one folded cell, with the answer's code and what its check gave}."""
    answers: dict[str, dict] = {}
    for cell in solved["cells"]:
        if exercise := exercise_in(cell):
            answers[exercise] = {
                **_still(cell),
                "id": f"answer-{exercise.replace('.', '-')}",
                "metadata": {
                    "tags": ["hide-cell"],
                    "mystnb": {
                        "code_prompt_show": f"The course's answer to {exercise}, and its check",
                        "code_prompt_hide": f"The course's answer to {exercise}",
                    },
                },
            }
        for number, answer in answers.items():
            if checks(cell, number):
                answer["outputs"] = [*answer["outputs"], *_still(cell)["outputs"]]
    return answers


def exercise_in(cell: dict) -> str | None:
    """ "3.2" where the cell is that exercise's."""
    match = re.fullmatch(r"exercise-(\d+)-(\d+)", cell.get("id", ""))
    return f"{match[1]}.{match[2]}" if match else None


def checks(cell: dict, exercise: str) -> bool:
    """Whether the cell asks for the check of this exercise."""
    return cell["cell_type"] == "code" and f'check("{exercise}"' in source_of(cell)


def source_of(cell: dict) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _still(cell: dict) -> dict:
    """The cell without what needs a kernel behind it: a slider, whose picture stands above it, leaves a sentence."""
    if cell["cell_type"] != "code":
        return cell
    outputs = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if WIDGET in data:
            text = "".join(data.get("text/plain", ""))
            if LIVE not in text:
                text = "A control appears here while the notebook runs."
            markup = f'<p class="course-live">{text.strip()}</p>'
            output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": markup, "text/plain": text}}
        outputs.append(_of_no_machine(output))
    metadata = {key: value for key, value in cell["metadata"].items() if key in ("tags", "mystnb")}
    return {**cell, "outputs": outputs, "metadata": metadata}


def _of_no_machine(value):
    """An output without the folders of the machine that it was made on: they tell a reader nothing."""
    if isinstance(value, dict):
        return {key: item if key == "image/png" else _of_no_machine(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_of_no_machine(item) for item in value]
    if not isinstance(value, str):
        return value
    text = re.sub(r"[^\s\"'<>]*/site-packages/", "", value)
    return text.replace(f"{ROOT}/", "").replace(str(ROOT), ".").replace(sys.prefix, ".venv")


def _about_language(notebook: dict) -> dict:
    """Of the notebook's metadata what colours its code, without the state of widgets."""
    return {key: notebook["metadata"][key] for key in ("kernelspec", "language_info") if key in notebook["metadata"]}


def as_read_by_sphinx(text: str) -> str:
    """A page of Markdown. A Mermaid drawing is left as text: its program would have to come from another host."""
    return re.sub(r"^```mermaid$", "```text", text, flags=re.MULTILINE)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
