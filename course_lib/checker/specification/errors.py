"""The one error that the course raises for a request that cannot be met."""

from __future__ import annotations


class CourseError(ValueError):
    """A request that cannot be met, in one sentence: what was given, what is allowed, what to do."""

    def _render_traceback_(self) -> list[str]:
        # In a notebook the sentence says it all; the lines of the checker that lead to it would bury it.
        return [f"{type(self).__name__}: {self}"]
