"""Builds the learner's notebooks from the chapters in solutions/, which are written once, answers included.

A chapter is a percent-format file, `solutions/03_online_softmax.py`. An exercise is a code cell whose first line is
`# Exercise 3.2 · Title`; within it, inside a function, an answer stands between `# BEGIN SOLUTION` and
`# END SOLUTION`. The learner's notebook has a stub in each answer's place:

    # YOUR CODE HERE
    raise NotImplementedError("Exercise 3.2")       # in a Triton or Gluon kernel, which cannot raise: pass

The same source gives the same bytes: cell ids come from the cells' contents and nothing of the machine goes in. Each
notebook carries hashes of its source and of its cells, by which a notebook that nobody edited, even one of an older
source, is told from one that holds a learner's work. The first is built over; the second never.
"""

from course_lib.builder.answers import BuildError, Cell, exercise_of
from course_lib.builder.keeping import NOTEBOOKS, SOURCES, build, chapters, holds_work, reset, stale
from course_lib.builder.notebook import as_text, build_notebook, read_cells

__all__ = [
    "NOTEBOOKS",
    "SOURCES",
    "BuildError",
    "Cell",
    "as_text",
    "build",
    "build_notebook",
    "chapters",
    "exercise_of",
    "holds_work",
    "read_cells",
    "reset",
    "stale",
]
