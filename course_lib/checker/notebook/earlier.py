"""What a learner wrote for an exercise, in whatever notebook that was: the newest answer that passed, as functions.

    grouped = earlier("7.5")
    print(grouped)                      # 7.5 grouped_decode: yours of 12 November
    [grouped_decode] = grouped.functions

The source is the one that `check` kept. It runs here, in the learner's own process, where its cell ran before.
"""

from __future__ import annotations

import linecache
import math
import sys
import time
import types
from dataclasses import dataclass

from course_lib.checker.notebook.store import progress_file
from course_lib.checker.specification import catalog, cells

NOTEBOOKS = ("check", "hint", "solution", "progress", "predict", "measured", "display", "get_ipython")  # a cell's calls


class Silent:
    """Stands in for what a notebook has beside the answer, such as `check` in the same cell: does nothing."""

    def __call__(self, *arguments, **options):
        return self

    def __getattr__(self, name):
        return self


@dataclass(frozen=True)
class Earlier:
    """An exercise's functions.

    Attributes:
        exercise: its id.
        entries: what it asks for, by name.
        functions: those, in the same order.
        whose: "yours of 12 November", or "the course's", with the reason if yours does not run.
    """

    exercise: str
    entries: tuple[str, ...]
    functions: tuple
    whose: str

    def __str__(self) -> str:
        return f"{self.exercise} {', '.join(self.entries)}: {self.whose}"


def earlier(exercise: str) -> Earlier:
    """The learner's newest passed answer to an exercise; the course's own until there is one, or where it does not run.

    Raises a CourseError for an unknown id.
    """
    task = catalog.exercise(exercise)
    passed = [row for row in progress_file().attempts(task.id) if row["outcome"] == "passed"]
    if not passed:
        return Earlier(task.id, task.entries, catalog.reference(task.id), "the course's")
    newest, day = passed[-1], time.localtime(passed[-1]["made_at"])
    yours = f"yours of {day.tm_mday} {time.strftime('%B', day)}"
    try:
        scope = run(newest["source"], f"your_answer_{task.id.replace('.', '_')}")
        return Earlier(task.id, task.entries, tuple(scope[entry] for entry in task.entries), yours)
    except Exception as error:  # a cell that passed under another name, or long ago
        why = f"the course's ({yours} does not run by itself: {type(error).__name__}: {error})"
        return Earlier(task.id, task.entries, catalog.reference(task.id), why)


def run(source: str, name: str) -> dict:
    """The names that a cell defines, as a module of its own with the names that every chapter imports."""
    import numpy
    import torch

    source, filename = cells.without_magics(source), f"<{name}>"
    # Triton and tracebacks look sources up by file name; this one lives in the line cache alone.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    module.__file__ = filename
    module.__dict__.update(dict.fromkeys(NOTEBOOKS, Silent()))
    module.__dict__.update(torch=torch, np=numpy, math=math, F=torch.nn.functional)
    try:
        import triton
        import triton.language

        module.__dict__.update(triton=triton, tl=triton.language)
    except ImportError:
        pass  # an answer that needs Triton then fails at its own first line, which names it
    sys.modules[name] = module
    exec(compile(source, filename, "exec"), module.__dict__)
    return module.__dict__
