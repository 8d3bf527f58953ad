"""Rules for right numbers: what is asked of an answer beside them, and the praise where nothing is left to ask."""

from __future__ import annotations

from course_lib.checker.judge import compiling
from course_lib.checker.judge.diagnosis import which
from course_lib.checker.judge.evidence import Evidence
from course_lib.checker.judge.known_mistakes import cause_of
from course_lib.checker.judge.outcome import Outcome
from course_lib.checker.judge.verdict import Finding
from course_lib.checker.specification.case import Case
from course_lib.checker.specification.requirements import FasterThan
from course_lib.hardware.device import machine

FLOOR_MARGIN = 0.9  # measured ceilings spread by several percent; a time this far below them is no measurement


def _right(evidence: Evidence) -> str:
    """Which numbers are right: all, or all but those of tensors whose offsets overflow, which are told last."""
    return "The numbers are right" + (" save beyond 2³¹ elements" if evidence.set_aside else "")


def requirement_broken(evidence: Evidence) -> Finding | None:
    """A requirement beside the right numbers is broken; a known mistake that is seen there says why."""
    if not evidence.complaints:
        return None
    broken, known = evidence.complaints[0], cause_of(evidence)
    return Finding(
        "failed",
        f"{_right(evidence)}, but: {broken.sentence}",
        known.id if known else broken.requirement.id,
        known.sentence if known else "",
    )


def input_modified(evidence: Evidence) -> Finding | None:
    """An argument that is there to be read was written. After the requirements, which an exercise chose itself."""
    changed = next((outcome for outcome in evidence.finished if outcome.seen.modified_inputs), None)
    if changed is None:
        return None
    text = (
        f"{_right(evidence)}, but in case “{changed.case.name}” the argument "
        f"`{changed.seen.modified_inputs[0]}` was changed. Leave it as it was; results go into "
        "something of their own."
    )
    return Finding("failed", text, "modified_input")


def earlier_result_changed(evidence: Evidence) -> Finding | None:
    """A later call wrote into what an earlier one had returned."""
    later = [call for run in evidence.runs for call in run.later if call.frame is not None]
    changed = next((call for call in later if call.frame is not None and call.frame.seen.overwrites), None)
    if changed is None:
        return None
    text = (
        f"{_right(evidence)}, but what {which(evidence.exercise, changed.case)} had returned changed when the "
        "function was called again: both calls gave out the same memory. Make a new tensor in each call."
    )
    return Finding("failed", text, "earlier_result_changed")


def below_the_floor(evidence: Evidence) -> Finding | None:
    """A time that this machine's memory or arithmetic cannot reach is a broken measurement, not a triumph."""
    timed = _timed(evidence)
    if timed is None:
        return None
    for requirement in (asked for asked in evidence.exercise.requirements if isinstance(asked, FasterThan)):
        floor, reason = _floor(requirement, timed.case)
        seconds = timed.seen.timing["answer"]
        if seconds < FLOOR_MARGIN * floor:
            text = (
                f"{seconds * 1e6:.1f} µs cannot be: {reason}, which takes {floor * 1e6:.1f} µs on this machine. Is the "
                "work skipped, or kept from an earlier call?"
            )
            return Finding("failed", text, "below_the_floor")
    return None


def does_not_compile(evidence: Evidence) -> Finding | None:
    """No GPU can run the kernels. Last of those that refuse: only an answer that would pass goes to the compiler."""
    refused = compiling.refusal(evidence.exercise, evidence.cell, list(evidence.runs))
    return Finding("failed", refused, "does_not_compile") if refused else None


def passed(evidence: Evidence) -> Finding:
    """Nothing is wrong."""
    text = f"All {len(evidence.finished)} cases are right."
    left_out = sum(run.left_out for run in evidence.runs)
    if left_out:
        text += f" This answer has passed before: {left_out} further cases for the interpreter were left out this time."
    moved = max((outcome.seen.bytes_moved for outcome in evidence.finished if outcome.case.metered), default=0)
    if moved:
        text += f" The largest metered case moved {moved:,} bytes."
    compiled = next((outcome.seen for outcome in evidence.finished if outcome.case.compiled), None)
    if compiled is not None:
        broken = f", after {len(compiled.graph_breaks)} graph breaks" if compiled.graph_breaks else ""
        text += f" `torch.compile` made {compiled.graphs} graph{'s' if compiled.graphs != 1 else ''}{broken}."
    timed = _timed(evidence)
    if timed is not None:
        timing = timed.seen.timing
        text += f" {timing['answer'] * 1e6:,.0f} µs against the baseline's {timing['baseline'] * 1e6:,.0f} µs."
    elif any(isinstance(requirement, FasterThan) for requirement in evidence.exercise.requirements):
        lacking = "an NVIDIA GPU" if machine().tier == "none" else "a GPU with bfloat16 (A100, L4, H100 and later)"
        text += f" How fast it is was not measured here. That takes {lacking}."
    for requirement in evidence.exercise.requirements:
        reason = requirement.not_judged()
        text += f" {reason}" if reason else ""
    return Finding("passed", text)


def _timed(evidence: Evidence) -> Outcome | None:
    return next((outcome for outcome in evidence.finished if outcome.seen.timing), None)


def _floor(requirement: FasterThan, case: Case) -> tuple[float, str]:
    """The least seconds in which this machine can do a case's work, and what takes them."""
    from course_lib.hardware.ceilings.measured import ceilings  # measured when first asked for

    here, least = ceilings(), requirement.minimum_bytes(*case.args)
    floor, reason = least / here.memory_bandwidth, f"{least:,.0f} bytes must move"
    if requirement.minimum_flops is not None:
        flops = requirement.minimum_flops(*case.args)
        arithmetic = flops / max([here.fma_rate, *here.matmul_rate.values()])
        if arithmetic > floor:
            floor, reason = arithmetic, f"{flops:,.0f} FLOPs must be done"
    return floor, reason


RULES_OF_RIGHT_NUMBERS = (
    requirement_broken,
    input_modified,
    earlier_result_changed,
    below_the_floor,
    does_not_compile,
    passed,
)
