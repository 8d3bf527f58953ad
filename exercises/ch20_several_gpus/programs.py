"""What the exercises on programs of several ranks share: who plays them, what a rank may receive, how they end."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from course_lib.checker import Mistake
from course_lib.checker.specification.requirements import Requirement
from course_lib.hardware.simulated_ranks import play_ranks

PLAYER = inspect.getsource(play_ranks)


@dataclass(frozen=True)
class ReceivesAtMost(Requirement):
    """No rank receives more bytes than it needs: the driver notes those of the rank with the most too many."""

    advice: str
    id: str = "too_many_bytes"

    def complaint(self, case, seen):
        received, allowed = seen.noted.get("received", 0), seen.noted.get("allowed", 0)
        if received <= allowed:
            return None
        where = f"of `{case.entry}` in case “{case.name}”" if case.entry else f"in case “{case.name}”"
        return f"A rank {where} received {received:,} bytes from others, and {allowed:,} are enough. {self.advice}"


def told(*words):
    """A `when`: the error that was raised holds one of these words."""
    return lambda case, seen, got: seen.error is not None and any(word in seen.error.text for word in words)


NO_GENERATOR = Mistake("no_generator", "The function is no generator. It must yield its steps, as in tensors = yield "
    '("all_to_all", tensors), and return its result at the end.', when=told("is no generator"))  # fmt: skip
