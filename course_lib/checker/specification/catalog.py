"""Which exercises there are, and what the course itself answers to them."""

from __future__ import annotations

import difflib
import functools
import importlib
import linecache
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from course_lib.builder.answers import Cell, solved, stubbed
from course_lib.checker.specification.cells import MOVED, SOLUTION_PREFIX, by_exercise, number_now, own_cells
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Exercise
from course_lib.home import ROOT


def exercise_files() -> dict[str, Path]:
    """Where each exercise is described, by its id: 5.4 is exercises/ch05_*/ex4_*.py. In the order of chapters."""
    found = {}
    for path in (ROOT / "exercises").glob("ch[0-9][0-9]_*/ex*_*.py"):
        chapter, number = int(path.parent.name[2:4]), int(path.stem.partition("_")[0].removeprefix("ex"))
        found[chapter, number, path.name] = path
    return {f"{chapter}.{number}": found[chapter, number, name] for chapter, number, name in sorted(found)}


class Described(Mapping[str, Exercise]):
    """Exercises by id, in the order of chapters. One is imported when it is asked for: all of them take seconds.

    Raises a CourseError when an exercise is asked for whose file holds another one than its name says, or whose number
    an exercise had before.
    """

    def __init__(self, files: dict[str, Path]):
        self.files = files
        self._one = functools.cache(self._import)

    def __getitem__(self, identity: str) -> Exercise:
        return self._one(identity)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, identity: object) -> bool:
        return identity in self.files

    def _import(self, identity: str) -> Exercise:
        path = self.files[identity]
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        found = importlib.import_module(f"exercises.{path.parent.name}.{path.stem}").EXERCISE
        if found.id != identity:
            raise CourseError(f"{path.relative_to(ROOT)} describes exercise {found.id}; by its name it is {identity}.")
        if identity in MOVED:
            raise CourseError(
                f"{path.relative_to(ROOT)} has the number of an exercise that is {MOVED[identity]} now. Take a number "
                "that no exercise ever had, because answers that were kept under this one count for the other."
            )
        return found


@functools.cache
def exercises() -> Mapping[str, Exercise]:
    """Every exercise by id, in the order of chapters."""
    return Described(exercise_files())


def exercise(identity: str) -> Exercise:
    """The exercise with this id, which may be the one that it had before it moved.

    Raises:
        CourseError: there is none; with the nearest id and all that there are.
    """
    known = exercises()
    name = number_now(str(identity).strip())  # 1.3 without quotes is a number, and plain enough
    if name in known:
        return known[name]
    closest = next(iter(difflib.get_close_matches(str(identity), list(known), n=1, cutoff=0.0)), None)
    raise CourseError(
        f"There is no exercise {identity!r}. The nearest is {closest!r}; the exercises are {', '.join(known)}."
    )


def moved(identity: str) -> str:
    """One sentence on where an exercise is now, if this is the number that it had before; "" otherwise."""
    before = str(identity).strip()
    if before not in MOVED:
        return ""
    now = MOVED[before]
    notebook = f"notebooks/{solution_file(exercise(now).chapter).stem}.ipynb"
    return f"Exercise {before} is {now} now, in {notebook}; what you did under the old number counts for it."


def solution_file(chapter: str) -> Path:
    """The source of a chapter ("03"), in `solutions/`."""
    files = sorted((ROOT / "solutions").glob(f"{chapter}_*.py"))
    if not files:
        raise CourseError(f"There is no chapter {chapter}: solutions/ holds no file {chapter}_*.py.")
    return files[0]


@dataclass(frozen=True)
class Chapter:
    """A chapter as its notebook has it.

    Attributes:
        title: the notebook's own, "03 · Online softmax".
        core: the ids of its core path, in the order in which they stand.
        deeper: the ids in sections whose heading ends in "· deeper", which a reader may skip.
    """

    title: str
    core: tuple[str, ...]
    deeper: tuple[str, ...]


def chapter(number: str) -> Chapter:
    """The chapter with this number ("03"), read from its source."""
    source = solution_file(number).read_text(encoding="utf-8")
    core: list[str] = []
    deeper: list[str] = []
    skipped = 0  # how many # the heading has whose section may be skipped; 0 outside of one
    for marks, heading, identity in re.findall(r"(?m)^# (##+) (.*)$|^# Exercise (\d+\.\d+) ·", source):
        if identity:
            (deeper if skipped else core).append(identity)
        elif not skipped or len(marks) <= skipped:
            skipped = len(marks) if heading.endswith("· deeper") else 0
    title = re.search(r"(?m)^# # (.*)$", source)
    return Chapter(title[1] if title else number, tuple(core), tuple(deeper))


@functools.cache
def _solution_cell(identity: str) -> tuple[Cell, Path]:
    path = solution_file(exercise(identity).chapter)
    cells = by_exercise(own_cells(path.read_text(encoding="utf-8")))
    if identity not in cells:
        raise CourseError(f"{path.name} holds no cell that begins with `# Exercise {identity}`.")
    return Cell("code", cells[identity], 1), path


def solution_source(identity: str) -> str:
    """The course's own answer: the exercise's cell in the chapter's source, without the markers."""
    return solved(*_solution_cell(identity)) + "\n"


def untouched_source(identity: str) -> str | None:
    """The cell as the learner is given it; None for an exercise that is in no chapter."""
    task = exercises().get(identity)
    chapters = (ROOT / "solutions").glob(f"{task.chapter}_*.py") if task else ()
    return stubbed(*_solution_cell(identity)) if any(chapters) else None


@functools.cache
def reference(identity: str) -> tuple:
    """The course's own functions for an exercise, in the order of its entries."""
    import numpy
    import torch

    source, filename = solution_source(identity), f"{SOLUTION_PREFIX}{identity}>"
    # Triton and tracebacks look sources up by file name; this one lives in the line cache alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(f"course_solution_{identity.replace('.', '_')}")
    module.__file__ = filename
    sys.modules[module.__name__] = module
    module.__dict__.update(torch=torch, np=numpy, math=math, F=torch.nn.functional)
    try:
        import triton
        import triton.language

        module.__dict__.update(triton=triton, tl=triton.language)
    except ImportError:
        pass  # an exercise that needs Triton then fails at its own first line, which names it
    exec(compile(source, filename, "exec"), module.__dict__)
    return tuple(module.__dict__[entry] for entry in exercise(identity).entries)
