"""What the judge works out while an answer runs in another process: what its cases should give."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from course_lib.checker.judge.outcome import truth_beforehand
from course_lib.checker.runner.running import cases_of_a_check
from course_lib.checker.specification.exercise import Exercise

PATIENCE = 0.1  # seconds for the truth that it is at; an answer that is wrong already does not wait for more


@contextlib.contextmanager
def truths_meanwhile(exercise: Exercise, seed: int) -> Iterator[None]:
    """Within this, a thread works out the truths of a check's cases, one after the other; at the end it stops soon.

    What it has not come to, or fails at, is worked out when it is asked for.
    """
    if (os.cpu_count() or 1) < 2:
        yield
        return
    over = threading.Event()

    def work() -> None:
        with contextlib.suppress(Exception):
            for cases, interpreted in cases_of_a_check(exercise, seed):
                for case in cases:
                    if over.is_set():
                        return
                    truth_beforehand(exercise, case, interpreted, over.is_set)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(PATIENCE)
