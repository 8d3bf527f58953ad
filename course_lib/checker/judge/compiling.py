"""The last step to a pass on a machine without a GPU: can a GPU's compiler read the kernels at all?

Triton's interpreter, in which the answer has run, takes more than the compiler does. A compiler's refusal fails the
answer; that it could not be asked, for whatever reason, does not.
"""

from __future__ import annotations

import ast
import hashlib
from collections import OrderedDict
from dataclasses import replace

from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.runner.frames import raised_error
from course_lib.checker.runner.running import Run, compiles_without_gpu
from course_lib.checker.runner.worker import WorkerDied, start_in_background, worker
from course_lib.checker.specification.errors import CourseError
from course_lib.checker.specification.exercise import Exercise

MOST_VARIANTS = 12  # of an answer's kernels in one check
COMPILE_SECONDS = 3.0  # after which no further kernel is begun; one takes some ten milliseconds
LIMIT_SECONDS = 5.0  # for a cell whose second run does not end
MOST_RECORDED = 256  # in one case
REMEMBERED = 128  # answers
_PARTS = {"kernel": str, "line": int, "signature": dict, "constants": list, "options": dict}

# By an answer's hash: what the compiler said of each kernel, "" where it took it, None where it could not be asked.
_said: OrderedDict[str, dict[str, str | None]] = OrderedDict()


def prepare(exercise: Exercise) -> None:
    """Begin to warm up the process that compiles, while the answer runs in another."""
    if compiles_without_gpu(exercise):
        start_in_background(interpreted=False)


def refusal(exercise: Exercise, source: str, runs: list[Run]) -> str | None:
    """Why no GPU can run an answer's kernels, in words; None when the compiler takes them or cannot be asked.

    Args:
        exercise: the exercise, whose checks the answer has passed.
        source: the cell as it ran.
        runs: what was seen when it did.
    """
    if not compiles_without_gpu(exercise):
        return None
    chosen = _most_different(_recorded(runs))
    said = _remembered(source)
    refused = next((said[key] for key in chosen if said.get(key)), None)
    new = {key: variant for key, variant in chosen.items() if key not in said}
    if refused or not new:
        return refused
    told = _compile(exercise, source, list(new.values()))
    for key, message in zip(new, told):
        said[key] = message
        if message:
            return message
    return None


def refusal_where_none_runs(exercise: Exercise, source: str) -> tuple[bool, str | None]:
    """Whether the compiler took all the kernels of a cell that this machine cannot run, and why it refuses one.

    Both say no where it could not be asked.
    """
    lines = _kernel_lines(source)
    variants = [
        {
            "kernel": variant["kernel"],
            "line": lines[variant["kernel"]],
            "signature": variant["signature"],
            "constants": [
                ((place,), ("plain", variant["constants"][name]))
                for place, name in enumerate(variant["signature"])
                if name in variant["constants"]
            ],
            "options": variant["options"],
        }
        for variant in (exercise.compiled() if exercise.compiled else ())
        if variant["kernel"] in lines
    ]
    if not variants:
        return False, None
    told = _compile(exercise, source, variants)
    return all(message == "" for message in told), next(filter(None, told), None)


def _kernel_lines(source: str) -> dict[str, int]:
    """The first lines, decorators included, of a cell's decorated functions."""
    try:
        nodes = ast.parse(source).body
    except (SyntaxError, ValueError):
        return {}
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.decorator_list]
    return {node.name: node.decorator_list[0].lineno for node in functions}


def _compile(exercise: Exercise, source: str, variants: list[dict]) -> list[str | None]:
    """What the compiler says of each variant, as in `_said`."""
    job = {
        "exercise": exercise.id,
        "source": source,
        "device": "cpu",
        "compile": variants,
        "compile_seconds": COMPILE_SECONDS,
    }
    try:
        ending = worker(interpreted=False).run(job, replace(exercise.limits, seconds=LIMIT_SECONDS), LIMIT_SECONDS)
    except (WorkerDied, CourseError, OSError):
        return [None] * len(variants)
    frame = ending.frames[0] if ending.frames and not ending.forged else {"kind": "nothing"}
    if [other["kind"] for other in ending.frames] != ["compiled", "done"]:
        frame = {"kind": "nothing"}
    taken, refused = frame.get("taken"), frame.get("refused")
    known = {index for index in taken if type(index) is int} if isinstance(taken, list) else ()
    said = ["" if index in known else None for index in range(len(variants))]
    if type(refused) is int and 0 <= refused < len(variants):
        kernel = variants[refused]["kernel"]
        before = "The numbers are right in the interpreter, but a" if exercise.interpretable else "A"
        said[refused] = f"{before} GPU cannot run the kernel `{kernel}`: {_message(frame.get('error'), source)}"
    return said


def _message(error: object, source: str) -> str:
    """What a learner is told of the compiler's refusal; that it ran out of memory says nothing of the answer."""
    return error_message(replace(raised_error(error), out_of_memory=False, unusable=False), source)[1]


def _recorded(runs: list[Run]) -> list[dict]:
    """What was launched, as far as the judge can sort it; what the values are is for the compiling process to bear."""
    variants = []
    for frame in (frame for run in runs for frame in run.frames.values()):
        for variant in frame.variants[:MOST_RECORDED]:
            if not isinstance(variant, dict) or any(type(variant.get(key)) is not kind for key, kind in _PARTS.items()):
                continue
            if variant["kernel"].isidentifier():  # it will stand in the message
                variants.append({key: variant[key] for key in (*_PARTS, "unbound") if key in variant})
    return variants


def _most_different(variants: list[dict]) -> dict[str, dict]:
    """As many as one check compiles, by a key of each: every kernel once, then those with types or constants that no
    other has, then those that differ in less."""
    ranked: dict[str, tuple[int, dict]] = {}
    known: set[tuple] = set()
    for variant in variants:
        kernel = (variant["kernel"], variant["line"])
        parts = {(*kernel, part, repr(variant[part])) for part in ("signature", "constants")}
        key = hashlib.sha256(repr(variant).encode(errors="replace")).hexdigest()
        ranked.setdefault(key, (0 if kernel not in known else 1 if parts - known else 2, variant))
        known |= {kernel, *parts}
    first = sorted(ranked.items(), key=lambda item: item[1][0])[:MOST_VARIANTS]
    return {key: variant for key, (_, variant) in first}


def _remembered(source: str) -> dict[str, str | None]:
    """What has been said of a source's kernels, for more to be put in."""
    key = hashlib.sha256(source.encode(errors="replace")).hexdigest()
    _said[key] = _said.pop(key, {})
    while len(_said) > REMEMBERED:
        _said.popitem(last=False)
    return _said[key]
