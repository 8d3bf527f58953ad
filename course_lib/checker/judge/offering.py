"""The call of `watch` that a failed check offers: the answer on a small case that went wrong."""

from __future__ import annotations

import torch

from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.specification.exercise import Case, InOut

MOST_ELEMENTS = 16_384  # of a tensor that `watch` draws
MOST_WRITTEN_OUT = 16  # integers that stand in the call
LONGEST = 160  # characters


def watch_call(evidence: Evidence) -> str:
    """The call on the first case that went wrong and can be drawn; "" where no kernel ran or no case is small."""
    return next((call for case in _wrong_cases(evidence) if (call := _call(evidence, case))), "")


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


def _call(evidence: Evidence, case: Case) -> str:
    """The case as a call with tensors of its shapes; "" where that would be long, or would not be the same case."""
    if case.driver is not None or case.distributed:
        return ""
    written = [_written(value) for value in _plain(case)]
    name = evidence.names[evidence.exercise.entry_of(case)]
    call = f"watch({', '.join([name, *(text for text in written if text is not None)])})"
    return call if None not in written and len(call) <= LONGEST else ""


def _written(value: object) -> str | None:
    """An argument as it is typed; None for what cannot be drawn or typed."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.dtype):
        return repr(value)
    if not isinstance(value, torch.Tensor) or not value.is_contiguous() or not 0 < value.numel() <= MOST_ELEMENTS:
        return None
    dtype = "" if value.dtype == torch.float32 else f", dtype={value.dtype}"
    if value.is_floating_point():
        return f"torch.rand({', '.join(map(str, value.shape)) or '()'}{dtype})"
    return f"torch.tensor({value.tolist()}{dtype})" if value.numel() <= MOST_WRITTEN_OUT else None
