"""What the judge works out while an answer runs in another process: what its cases should give, and what slips would.

Nothing hangs on how far it comes: what is not worked out yet is worked out when it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator

from course_lib.checker.judge.evaluate import is_large
from course_lib.checker.judge.explain import singles, turn
from course_lib.checker.judge.outcome import Outcome, first_outcome, truth_beforehand
from course_lib.checker.judge.prediction import Made, changes_nothing
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.running import Heard, cases_of_a_check
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.exercise import Exercise

PATIENCE = 0.1  # seconds for the truth that it is at; an answer that is wrong already does not wait for more
IDLE = 0.02  # seconds until it looks again whether all is over, where there is nothing to do


@contextlib.contextmanager
def meanwhile(exercise: Exercise, seed: int) -> Iterator[Heard | None]:
    """Within this, a thread works ahead, and stops soon at the end. What it gives is to be told of each case that ran.

    First come the truths of a check's cases. Once a case is wrong, it is what each slip would make of the wrong case
    with which the search for a name will begin; no truth of a GPU's case is asked for then.
    """
    if (os.cpu_count() or 1) < 2:
        yield None
        return
    over, heard = threading.Event(), queue.SimpleQueue[tuple[Case, Frame]]()

    def work() -> None:
        with contextlib.suppress(Exception):
            _work_ahead(exercise, seed, heard, over.is_set)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield lambda case, frame: heard.put((case, frame))
    finally:
        over.set()
        thread.join(PATIENCE)


def _work_ahead(exercise: Exercise, seed: int, heard: queue.SimpleQueue, over: Callable[[], bool]) -> None:
    """Compare what is heard at once, and do the work at hand step by step; wait where nothing is left to do."""
    work: Iterator[object] = _truths(exercise, seed, over)
    first: Outcome | None = None
    idle = False
    while not over():
        with contextlib.suppress(queue.Empty):
            outcome = _wrong(exercise, *heard.get(idle, IDLE))
            if outcome is not None and (first is None or turn(outcome) < turn(first)):
                first, work = outcome, _what_slips_make(exercise, outcome)
            continue
        idle = next(work, None) is None


def _truths(exercise: Exercise, seed: int, over: Callable[[], bool]) -> Iterator[Case]:
    for cases, interpreted in cases_of_a_check(exercise, seed):
        for case in cases:
            truth_beforehand(exercise, case, interpreted, over)
            yield case


def _wrong(exercise: Exercise, case: Case, frame: Frame) -> Outcome | None:
    """A case's outcome where its first result is wrong; of large cases nothing is kept."""
    if frame.error is not None or is_large(case):
        return None
    outcome = first_outcome(exercise, case, frame, interpreted=True)
    return None if outcome.right else outcome


def _what_slips_make(exercise: Exercise, outcome: Outcome) -> Iterator[Made]:
    entry = exercise.entry_of(outcome.case)
    for model in exercise.models:
        if (model.entry or exercise.entries[0]) == entry:
            for made in singles(model):
                changes_nothing(model, made, outcome.case)
                yield made
