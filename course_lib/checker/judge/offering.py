"""What a failed check offers: `watch` on a small case that went wrong, `profile` on one that cost too much."""

from __future__ import annotations

import torch

from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.specification.case import Case, InOut

MOST_ELEMENTS = 16_384  # of a tensor that `watch` draws
MOST_PROFILED = 2**20  # elements of a tensor: the interpreter then takes seconds at most
COSTS = ("too_many_bytes", "too_slow")  # the requirements whose breach a profile explains
MOST_WRITTEN_OUT = 16  # integers that stand in the call
LONGEST = 160  # characters


def watch_call(evidence: Evidence) -> str:
    """The call on the first case that went wrong and can be drawn; "" where no kernel ran or no case is small."""
    cases = _wrong_cases(evidence)
    return next((call for case in cases if (call := _call("watch", evidence, case, MOST_ELEMENTS))), "")


def profile_call(evidence: Evidence) -> str:
    """The call of `profile` on the first case that is right, and costs more than is allowed; "" where none is."""
    cases = [said.outcome.case for said in evidence.complaints if said.requirement.id in COSTS]
    return next((call for case in cases if (call := _call("profile", evidence, case, MOST_PROFILED))), "")


def _wrong_cases(evidence: Evidence) -> list[Case]:
    """Cases in which a kernel was launched, and that gave wrong numbers, left a tensor, raised or had no end."""
    left = [outcome for outcome in evidence.finished if outcome.seen.out_of_bounds]
    cases = [outcome.case for outcome in (*evidence.failed, *left) if outcome.seen.launches]
    cases += [raised.case for raised in evidence.errors if raised.seen.launches]
    for run in evidence.runs:
        if run.ending.timeout and run.started is not None and "triton.jit" in evidence.cell:
            cases += run.cases[run.started : run.started + 1]
    return list(dict.fromkeys(cases))


def _plain(case: Case) -> list[object]:
    return [value.tensor if isinstance(value, InOut) else value for value in case.args]


def _call(command: str, evidence: Evidence, case: Case, most: int) -> str:
    """The case as a call with tensors of its shapes; "" where that would be long, or would not be the same case."""
    if case.driver is not None or case.distributed:
        return ""
    written = [_written(value, most) for value in _plain(case)]
    name = evidence.names[evidence.exercise.entry_of(case)]
    call = f"{command}({', '.join([name, *(text for text in written if text is not None)])})"
    return call if None not in written and len(call) <= LONGEST else ""


def _written(value: object, most: int) -> str | None:
    """An argument as it is typed; None for what cannot be drawn or typed."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.dtype):
        return repr(value)
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or not 0 < value.numel() <= most:
        return None
    dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    if value.is_floating_point():
        return f"torch.rand({', '.join(map(str, value.shape)) or '()'}{dtype})"
    return f"torch.tensor({value.tolist()}{dtype})" if value.numel() <= MOST_WRITTEN_OUT else None
