"""The checker: exercises, the worker that runs answers, the judge that decides, and what it says."""

from course_lib.checker.judge.verdict import CaseResult, Verdict
from course_lib.checker.notebook.commands import attempts, check, check_file, hint, progress, solution
from course_lib.checker.notebook.predictions import measured, predict
from course_lib.checker.notebook.self_check import self_check
from course_lib.checker.specification.case import Case, InOut, PerRank
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.edits import edits, model_of
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Exercise, Limits, Mistake
from course_lib.checker.specification.model import Slip
from course_lib.checker.specification.needs import ANY, CUDA_ON_HOST, HOPPER, HOPPER_AND_LATER, NVIDIA, TRITON, Needs
from course_lib.checker.specification.requirements import (
    Allocates,
    CompilesWith,
    Contiguous,
    FasterThan,
    Forbids,
    LaunchesTriton,
    Moves,
    NewTensors,
    ReadByKernels,
    Requirement,
)
from course_lib.checker.specification.seen import Seen

__all__ = [
    "ANY",
    "CUDA_ON_HOST",
    "HOPPER",
    "HOPPER_AND_LATER",
    "NVIDIA",
    "TRITON",
    "attempts",
    "Allocates",
    "Case",
    "CaseResult",
    "CompilesWith",
    "Contiguous",
    "CourseError",
    "Draw",
    "Exercise",
    "FasterThan",
    "Forbids",
    "InOut",
    "LaunchesTriton",
    "Limits",
    "Mistake",
    "Moves",
    "Needs",
    "NewTensors",
    "PerRank",
    "ReadByKernels",
    "Requirement",
    "Seen",
    "Slip",
    "Verdict",
    "check",
    "check_file",
    "edits",
    "hint",
    "measured",
    "model_of",
    "predict",
    "progress",
    "self_check",
    "solution",
]
