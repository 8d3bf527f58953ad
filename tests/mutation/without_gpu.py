"""What this machine can judge: without a GPU all but the exercises that ask for one, and no speed."""

from __future__ import annotations

from course_lib.checker.judge.decide import judge, unsupported_here
from course_lib.checker.judge.verdict import Verdict
from course_lib.checker.specification import catalog
from course_lib.hardware.device import machine


def judge_here(identity: str, source: str, seed: int) -> Verdict:
    """The verdict on an answer."""
    return judge(catalog.exercise(identity), source, seed=seed)


def judged_here(identity: str) -> bool:
    """Whether this machine can judge an exercise at all."""
    return unsupported_here(catalog.exercise(identity)) is None


def timed_here() -> bool:
    """Whether checks on this machine measure time."""
    return machine().tier != "none"
