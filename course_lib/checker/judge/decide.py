"""The judge: sends an answer's source to a worker, and decides from what comes back. It never runs an answer itself."""

from __future__ import annotations

import contextlib
import hashlib
import random
import time
from collections import OrderedDict
from dataclasses import replace

import torch

from course_lib.checker.judge import compiling, evaluate
from course_lib.checker.judge.case_lines import case_lines
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.meanwhile import meanwhile
from course_lib.checker.judge.offering import profile_call, watch_call
from course_lib.checker.judge.rules import AFTER_THE_RUN, BEFORE_THE_RUN, first_finding
from course_lib.checker.judge.verdict import Finding, Verdict, readable
from course_lib.checker.runner.running import Run, beside_ascending_order, beside_calls_alone, run_cases
from course_lib.checker.runner.worker import WorkerDied
from course_lib.checker.specification import cells
from course_lib.checker.specification.exercise import Exercise
from course_lib.checker.specification.needs import missing
from course_lib.hardware.device import machine

REMEMBERED = 256  # answers that passed in this process
_passed: OrderedDict[str, bool] = OrderedDict()


def judge(exercise: Exercise, source: str, names: dict[str, str] | None = None, seed: int | None = None) -> Verdict:
    """Check one answer.

    Args:
        exercise: what is asked for.
        source: the whole cell that holds the answer.
        names: entry name to the name that the function has in the cell, where they differ.
        seed: repeats the inputs of an earlier check; fresh by default.

    Returns:
        A verdict; `answers` and `reference` are for the caller to fill in.
    """
    started = time.perf_counter()
    names = {entry: (names or {}).get(entry, entry) for entry in exercise.entries}
    seed = random.SystemRandom().randrange(1 << 31) if seed is None else int(seed)
    evidence = Evidence(exercise, source, names, seed)
    finding = first_finding(BEFORE_THE_RUN, evidence)
    if finding is not None:
        return _verdict(evidence, finding, started)
    evidence = _run(evidence)
    try:
        # A copy: what was compared, on a GPU perhaps, must be gone when the memory is given back.
        verdict = _weigh(replace(evidence), started)
    except torch.OutOfMemoryError:  # of the GPU, where large cases are compared
        _release(evidence)
        with evaluate.on_the_cpu():
            verdict = _weigh(replace(evidence), started)
    finally:
        _release(evidence)
    _remember(evidence, verdict)
    return verdict


def _release(evidence: Evidence) -> None:
    for run in evidence.runs:
        run.compared.clear()
    evaluate.release()


def unsupported_here(exercise: Exercise) -> str | None:
    """Why this machine cannot judge an exercise and what would; None when it can."""
    return missing(exercise.needs, machine())


def _run(evidence: Evidence) -> Evidence:
    """The evidence with what the workers report of the answer.

    What is wrong in the interpreter is told from there: no GPU is waited for. An answer that has passed here before
    runs in the interpreter and on the GPU at once, on inputs that are drawn afresh as ever.
    """
    compiling.prepare(evidence.exercise)

    def decided(runs: list[Run]) -> bool:
        return replace(evidence, runs=runs).is_wrong

    names, known = dict(evidence.names), _answer(evidence) in _passed
    try:
        with meanwhile(evidence.exercise, evidence.seed) as heard:
            runs = run_cases(evidence.exercise, evidence.cell, names, evidence.seed, decided, known, heard)
    except WorkerDied as error:
        return replace(evidence, died=str(error))
    return replace(evidence, runs=runs)


def _answer(evidence: Evidence) -> str:
    """An answer's name: the same for cells that differ in remarks alone."""
    said = (evidence.exercise.id, sorted(evidence.names.items()), cells.meaning(evidence.cell))
    return hashlib.sha256(repr(said).encode(errors="replace")).hexdigest()


def _remember(evidence: Evidence, verdict: Verdict) -> None:
    name = _answer(evidence)
    _passed.pop(name, None)
    if verdict.passed:
        _passed[name] = True
    while len(_passed) > REMEMBERED:
        _passed.popitem(last=False)


def _beside_ascending_order(evidence: Evidence) -> Evidence:
    """The evidence, and where kernels gave wrong numbers in the interpreter also what they give in ascending order.

    What is right there is a race. What is wrong there too is explained there: the known mistakes foresee that order.
    Where no program reached what another one stored, the order makes no difference, and none runs again.
    """
    failed = {outcome.case for outcome in evidence.failed if outcome.interpreted and outcome.seen.contended}
    if not failed:
        return evidence
    runs = beside_ascending_order(
        evidence.exercise, evidence.cell, dict(evidence.names), evidence.seed, list(evidence.runs), failed
    )
    return replace(evidence, runs=runs)


def _beside_calls_alone(evidence: Evidence) -> Evidence:
    """The evidence, and where something seems to be kept from call to call also what those calls give by themselves."""
    kept = {outcome.case for outcome in evidence.failed if outcome.kept}
    if not kept:
        return evidence
    runs = beside_calls_alone(
        evidence.exercise, evidence.cell, dict(evidence.names), evidence.seed, list(evidence.runs), kept
    )
    return replace(evidence, runs=runs)


def _weigh(evidence: Evidence, started: float) -> Verdict:
    with contextlib.suppress(WorkerDied):
        evidence = _beside_ascending_order(evidence)
        evidence = _beside_calls_alone(evidence)
    finding = first_finding(AFTER_THE_RUN, evidence)
    assert finding is not None, "the last rule, `passed`, always finds"
    return _verdict(evidence, finding, started)


def _verdict(evidence: Evidence, finding: Finding, started: float) -> Verdict:
    """The finding with a line for each case; texts of the answer's own, such as an exception's, are made readable."""
    lines = [replace(line, detail=readable(line.detail)) for line in case_lines(evidence)]
    return Verdict(
        evidence.exercise.id,
        evidence.exercise.title,
        finding.outcome,
        readable(finding.message),
        finding.mistake,
        readable(finding.diagnosis),
        lines,
        time.perf_counter() - started,
        evidence.seed,
        evidence.printed,
        finding.picture,
        watch=watch_call(evidence) if finding.outcome in ("failed", "error", "timeout") else "",
        profile=profile_call(evidence) if finding.outcome == "failed" and evidence.numbers_are_right else "",
    )
