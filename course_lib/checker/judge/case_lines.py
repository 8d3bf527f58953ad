"""Every case of a check as one line of the card."""

from __future__ import annotations

from course_lib.checker.judge import diagnosis
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.judge.verdict import CaseResult
from course_lib.checker.runner.running import Run


def case_lines(evidence: Evidence) -> list[CaseResult]:
    """All cases of all runs, in order."""
    return [
        _line(evidence, number, run, index)
        for number, run in enumerate(evidence.runs)
        for index in range(len(run.cases))
    ]


def _line(evidence: Evidence, number: int, run: Run, index: int) -> CaseResult:
    name, frame = run.cases[index].name, run.frames.get(index)
    if frame is None:
        ended = index == run.started and not run.ending.finished
        state = ("timeout" if run.ending.timeout else "crashed") if ended else "not_run"
        return CaseResult(name, state, "" if ended else "not reached")
    if frame.error is not None:
        return CaseResult(name, "error", error_message(frame.error, evidence.source).message)
    outcome = evidence.outcomes.get((number, index))
    if outcome is None:
        return CaseResult(name, "not_run", "not judged, since another case stopped the check")
    return _finished_line(evidence, outcome)


def _finished_line(evidence: Evidence, outcome: Outcome) -> CaseResult:
    name, seen = outcome.case.name, outcome.seen
    if not outcome.right:
        several = len(evidence.exercise.entries) > 1
        function = f"{diagnosis.called(evidence.exercise, outcome.case)}: " if several else ""
        return CaseResult(name, "failed", function + diagnosis.brief(outcome))
    if seen.out_of_bounds:
        return CaseResult(name, "failed", "right numbers, but memory outside a tensor was reached")
    if seen.modified_inputs:
        return CaseResult(name, "failed", f"the argument `{seen.modified_inputs[0]}` was changed")
    complaint = next((found.sentence for found in evidence.complaints if found.outcome is outcome), "")
    return CaseResult(name, "failed" if complaint else "passed", complaint)
