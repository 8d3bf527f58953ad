"""Exercises that need a GPU, judged without one: their small cases in the interpreter: numbers, no speed."""

from __future__ import annotations

from dataclasses import replace

from course_lib.checker.judge.decide import judge
from course_lib.checker.judge.verdict import Verdict
from course_lib.checker.specification import catalog
from course_lib.checker.specification.exercise import Exercise, Limits
from course_lib.checker.specification.needs import HOPPER, NVIDIA, TRITON
from course_lib.checker.specification.requirements import FasterThan
from course_lib.hardware.device import machine

# What launchers ask of their GPU, as an H100 or H200 answers it.
STAND_IN = (
    "torch.cuda.get_device_capability = lambda device=None: (9, 0); "
    "torch.cuda.get_device_properties = lambda device=None: __import__('types').SimpleNamespace("
    "multi_processor_count=132)\n"
)


def interpretable(exercise: Exercise) -> Exercise:
    """The exercise as the interpreter can judge it; Gluon, which Hopper's exercises are written in, has none."""
    timeless = tuple(item for item in exercise.requirements if not isinstance(item, FasterThan))
    limits = Limits(seconds=60.0, memory_bytes=exercise.limits.memory_bytes)
    return replace(exercise, needs=TRITON, interpretable=True, requirements=timeless, limits=limits)


def judge_here(identity: str, source: str, seed: int) -> Verdict:
    """The verdict on an answer; an exercise for any NVIDIA GPU is judged by its small cases where there is none."""
    exercise = catalog.exercise(identity)
    if exercise.needs == NVIDIA and machine().tier == "none":
        return judge(interpretable(exercise), STAND_IN + source, seed=seed)
    return judge(exercise, source, seed=seed)


def judged_here(identity: str) -> bool:
    """Whether this machine can judge an exercise at all."""
    return catalog.exercise(identity).needs != HOPPER or machine().compute_capability == (9, 0)


def timed_here() -> bool:
    """Whether checks on this machine measure time."""
    return machine().tier != "none"
