"""All submissions, by exercise: answers that are wrong in a known way, and right ones that are unusual.

Each exercise has a file of its own, in the folder and under the name that it has in exercises/:

    WRONG     what its verdict must name -> the cell. A name that ends in "__2" is another way of making that mistake.
    UNUSUAL   what is unusual about it -> the cell. These must pass.
"""

import functools
import importlib
from types import ModuleType

from course_lib.checker.specification.catalog import exercise_files


@functools.cache
def submissions_to(identity: str) -> ModuleType:
    """The module with the submissions to an exercise ("5.4")."""
    path = exercise_files()[identity]
    return importlib.import_module(f"tests.submissions.{path.parent.name}.{path.stem}")


def wrong(identity: str) -> dict[str, str]:
    """The wrong answers to an exercise by the mistake that each must be told."""
    return submissions_to(identity).WRONG


def unusual(identity: str) -> dict[str, str]:
    """The right but unusual answers to an exercise by what is unusual about each."""
    return submissions_to(identity).UNUSUAL
