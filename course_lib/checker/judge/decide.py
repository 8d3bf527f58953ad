"""The judge: sends an answer's source to a worker, and decides from what comes back. It never runs an answer itself."""

from __future__ import annotations

import inspect
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from course_lib.checker.judge import compare, diagnosis, evaluate
from course_lib.checker.judge.known_mistakes import find_mistake, is_seen, of_its_function
from course_lib.checker.judge.stopping import error_message, stopped
from course_lib.checker.judge.verdict import CaseResult, Verdict
from course_lib.checker.runner import compiling
from course_lib.checker.runner.frames import Frame
from course_lib.checker.runner.running import Run, run_cases
from course_lib.checker.runner.worker import WorkerDied
from course_lib.checker.specification import catalog, cells
from course_lib.checker.specification.exercise import Case, Exercise, Mistake
from course_lib.checker.specification.needs import missing
from course_lib.checker.specification.requirements import FasterThan
from course_lib.hardware.device import machine

FLOOR_MARGIN = 0.9  # measured ceilings spread by several percent; a time this far below them is no measurement


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

    def verdict(outcome: str, message: str, **more: Any) -> Verdict:
        return Verdict(
            exercise.id, exercise.title, outcome, message, seconds=time.perf_counter() - started, seed=seed, **more
        )

    unreadable = cells.why_unreadable(source)
    if unreadable:
        return verdict("error", unreadable, mistake="unreadable_source")
    if not cells.is_attempted(source, tuple(names.values()), catalog.untouched_source(exercise.id)):
        return verdict("not_attempted", "Nothing is written here yet. Replace the line under `# YOUR CODE HERE`.")
    reason = unsupported_here(exercise)
    if reason:
        return verdict("unsupported", reason)
    compiling.prepare(exercise)
    try:
        runs = run_cases(exercise, cells.without_magics(source), names, seed)
    except WorkerDied as error:
        return verdict(
            "crashed",
            f"The worker process ended during the check: {str(error).rstrip('.')}. The next check starts a new one.",
        )
    for run in runs:
        stop = stopped(exercise, run, source, names)
        if stop:
            outcome, message, mistake, diagnosed = stop
            results = [result for other in runs for result in _case_results(exercise, other, {})]
            return verdict(
                outcome,
                message,
                mistake=mistake,
                diagnosis=diagnosed,
                cases=results,
                printed=_printable(run.ending.printed),
            )

    def again() -> list[Frame]:
        """The results of all cases with 0 in the lanes that loads leave undefined, as the interpreter gives it."""
        repeated = run_cases(exercise, cells.without_magics(source), names, seed, undefined_lanes=False)
        return [frame for run in repeated for frame in run.frames.values() if not frame.error]

    try:
        return _weigh(exercise, runs, source, names, verdict, again)
    except torch.OutOfMemoryError:  # of the GPU, where large cases are compared
        evaluate.release()
        with evaluate.on_the_cpu():
            return _weigh(exercise, runs, source, names, verdict, again)
    finally:
        evaluate.release()


def unsupported_here(exercise: Exercise) -> str | None:
    """Why this machine cannot judge an exercise and what would; None when it can."""
    return missing(exercise.needs, machine())


def _weigh(
    exercise: Exercise, runs: list[Run], source: str, names: dict[str, str], verdict: Callable, again: Callable
) -> Verdict:
    outcomes: dict[tuple[int, int], diagnosis.Outcome] = {}
    for number, run in enumerate(runs):
        for index, case in enumerate(run.cases):
            frame = run.frames.get(index)
            if frame is not None and not frame.error:
                outcomes[number, index] = _compare_case(exercise, run, case, frame)
    results, errors = [], []
    for number, run in enumerate(runs):
        here = {index: outcome for (job, index), outcome in outcomes.items() if job == number}
        results += _case_results(exercise, run, here, source)
        errors += [(run.cases[i], frame) for i, frame in run.frames.items() if frame.error]
    finished = list(outcomes.values())
    printed = next((_printable(run.ending.printed) for run in runs if run.ending.printed), "")
    failed = [outcome for outcome in finished if not outcome.right]
    wild = [(o.case, o.seen.out_of_bounds[0]) for o in finished if o.seen.out_of_bounds]
    wild += [(case, frame.seen.out_of_bounds[0]) for case, frame in errors if frame.seen.out_of_bounds]

    def speak(outcome: str, message: str, mistake: str | None = None, sentence: str = "", picture: str = "") -> Verdict:
        return verdict(
            outcome, message, mistake=mistake, diagnosis=sentence, cases=results, printed=printed, picture=picture
        )

    undefined = "" if wild or not failed else diagnosis.undefined_lanes(failed, again)
    known = find_mistake(exercise, finished, bool(errors)) if failed and not undefined else None
    if known is None and errors:
        known = _mistake_of_error(exercise, errors)
    if wild and (known is None or known.result is None):
        case, sentence = wild[0]
        known = known or _mistake_of_access(exercise, finished)
        return speak(
            "failed",
            f"Memory outside a tensor was reached in {_which(exercise, case)}: {sentence}",
            known.id if known else "out_of_bounds",
            known.sentence if known else "",
        )
    if errors:
        case, frame = errors[0]
        outcome, message, mistake = error_message(frame.error, source)
        return speak(
            outcome,
            f"In {_which(exercise, case)}: {message}",
            known.id if known else mistake,
            known.sentence if known else "",
        )
    if failed:
        first = diagnosis.most_telling(of_its_function(exercise, known, failed) if known else failed)
        names = inspect.signature(exercise.oracle_for(first.case)).parameters
        together = diagnosis.shared([o for o in finished if o.case.entry == first.case.entry], list(names))
        message = f"In {_which(exercise, first.case)} {diagnosis.describe(first)}. {together}".strip()
        generic, sentence = None, undefined
        if any(o.seen.unwritten for o in failed):
            generic = "unwritten_memory"
        elif any(o.unsteady for o in failed):
            generic, sentence = "race", undefined or diagnosis.RACE
        elif any(o.kept for o in failed):
            generic, sentence = "kept_result", undefined or diagnosis.KEPT
        return speak(
            "failed",
            message,
            known.id if known else "undefined_lanes" if undefined else generic,
            known.sentence if known else sentence,
            diagnosis.picture(exercise, first),
        )
    for outcome in finished:
        for requirement in exercise.requirements:
            complaint = requirement.complaint(outcome.case, outcome.seen)
            if complaint:
                named = next(
                    (m for m in exercise.mistakes if is_seen(m, outcome.case, outcome.seen, outcome.got)), None
                )
                return speak(
                    "failed",
                    f"The numbers are right, but: {complaint}",
                    named.id if named else requirement.id,
                    named.sentence if named else "",
                )
    changed = next((o for o in finished if o.seen.modified_inputs), None)
    if changed is not None:
        return speak(
            "failed",
            f"The numbers are right, but in case “{changed.case.name}” the argument "
            f"`{changed.seen.modified_inputs[0]}` was changed. Write the result into a tensor of its own.",
            "modified_input",
        )
    too_fast = _below_the_floor(exercise, finished)
    if too_fast:
        return speak("failed", too_fast, "below_the_floor")
    refused = compiling.refusal(exercise, cells.without_magics(source), runs)
    if refused:
        return speak("failed", refused, "does_not_compile")
    return speak("passed", _praise(exercise, finished))


def _which(exercise: Exercise, case: Case) -> str:
    """The case that a verdict speaks of, and which of several functions it calls."""
    return f"case “{case.name}”" + (f" of {_called(exercise, case)}" if len(exercise.entries) > 1 else "")


def _called(exercise: Exercise, case: Case) -> str:
    return f"`{case.entry or exercise.entries[0]}`"


def _printable(text: str) -> str:
    """What an answer printed, without what would move a terminal's cursor or turn a line's direction round."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def _praise(exercise: Exercise, finished: list[diagnosis.Outcome]) -> str:
    text = f"All {len(finished)} cases are right."
    moved = max((o.seen.bytes_moved for o in finished if o.case.metered), default=0)
    if moved:
        text += f" The largest metered case moved {moved:,} bytes."
    timing = next((o.seen.timing for o in finished if o.seen.timing), None)
    if timing:
        text += f" {timing['answer'] * 1e6:,.0f} µs against the baseline's {timing['baseline'] * 1e6:,.0f} µs."
    return text


def _compare_case(exercise: Exercise, run: Run, case: Case, frame: Frame) -> diagnosis.Outcome:
    expected = compare.truth(exercise, case, tf32=exercise.uses_dot and not run.interpreted)
    got, seen = _result(case, frame.result, frame.written), frame.seen
    leaves = compare.compare(got, expected, exercise)
    if any(leaf.problem for leaf in leaves):
        expected = compare.surer(expected, exercise, case)
        leaves = compare.compare(got, expected, exercise)
    right_at_first = not any(leaf.problem for leaf in leaves)
    unsteady = kept = False
    if frame.has_repeated:
        repeated = _result(case, frame.result_repeated, frame.written_repeated)
        # Atomic additions round differently from run to run; what differs by more than rounding is no rounding.
        if not compare.agrees(got, repeated, expected, exercise):
            kept = seen.changes == 1 < seen.repeats == seen.differing  # the first run alone was another
            unsteady = not kept
            leaves += compare.compare(repeated, expected, exercise)
    if case.timed and not run.interpreted and seen.timing and right_at_first and not unsteady:
        last = compare.truth(exercise, run.timed_last(case), tf32=exercise.uses_dot)
        after = compare.compare(frame.result_after_timing, last, exercise)
        kept = kept or any(leaf.problem for leaf in after)
        leaves += after
    return diagnosis.Outcome(
        case, seen, got, expected, leaves, tuple(frame.written), run.interpreted, right_at_first, unsteady, kept
    )


def _result(case: Case, returned: Any, written: Mapping[str, Any]) -> Any:
    """A result as `evaluate.call` makes it."""
    return (returned, {"written": list(written.values())}) if case.in_place else returned


def _mistake_of_error(exercise: Exercise, errors: list) -> Mistake | None:
    """A mistake that explains a raised error: one that looks at the error itself, or at an access outside a tensor.

    What else was seen of a case that stopped halfway (launches, bytes) is only half of it, and proves nothing.
    """
    for mistake in exercise.mistakes if errors else ():
        for case, frame in errors:
            seen = frame.seen
            if not is_seen(mistake, case, seen, None):
                continue
            if seen.out_of_bounds or not is_seen(mistake, case, replace(seen, error=None), None):
                return mistake
    return None


def _mistake_of_access(exercise: Exercise, finished: list[diagnosis.Outcome]) -> Mistake | None:
    return next(
        (
            m
            for m in exercise.mistakes
            if any(o.seen.out_of_bounds and is_seen(m, o.case, o.seen, o.got) for o in finished)
        ),
        None,
    )


def _below_the_floor(exercise: Exercise, finished: list[diagnosis.Outcome]) -> str | None:
    """A time that this machine's memory or arithmetic cannot reach is a broken measurement, not a triumph."""
    for requirement in exercise.requirements:
        timed = next((o for o in finished if o.seen.timing), None)
        if not isinstance(requirement, FasterThan) or timed is None:
            continue
        from course_lib.hardware.ceilings.measured import ceilings

        here, least = ceilings(), requirement.minimum_bytes(*timed.case.args)
        floor, reason = least / here.memory_bandwidth, f"{least:,.0f} bytes must move"
        if requirement.minimum_flops is not None:
            flops = requirement.minimum_flops(*timed.case.args)
            arithmetic = flops / max([here.fma_rate, *here.matmul_rate.values()])
            if arithmetic > floor:
                floor, reason = arithmetic, f"{flops:,.0f} FLOPs must be done"
        if timed.seen.timing["answer"] < FLOOR_MARGIN * floor:
            return (
                f"{timed.seen.timing['answer'] * 1e6:.1f} µs cannot be: {reason}, which takes {floor * 1e6:.1f} µs on "
                "this machine. Is the work skipped, or kept from an earlier call?"
            )
    return None


def _case_results(
    exercise: Exercise, run: Run, outcomes: dict[int, diagnosis.Outcome], source: str = ""
) -> list[CaseResult]:
    """Each case of a run as one line."""
    results = []
    for index, case in enumerate(run.cases):
        frame = run.frames.get(index)
        if frame is None:
            ended = index == run.started and not run.ending.finished
            state = ("timeout" if run.ending.timeout else "crashed") if ended else "not_run"
            results.append(CaseResult(case.name, state, "" if ended else "not reached"))
        elif frame.error:
            results.append(CaseResult(case.name, "error", error_message(frame.error, source)[1]))
        elif index in outcomes:
            results.append(_case_result(exercise, outcomes[index]))
        else:
            results.append(CaseResult(case.name, "not_run", "not judged, since another case stopped the check"))
    return results


def _case_result(exercise: Exercise, outcome: diagnosis.Outcome) -> CaseResult:
    if not outcome.right:
        function = f"{_called(exercise, outcome.case)}: " if len(exercise.entries) > 1 else ""
        return CaseResult(outcome.case.name, "failed", function + diagnosis.brief(outcome))
    if outcome.seen.out_of_bounds:
        return CaseResult(outcome.case.name, "failed", "right numbers, but memory outside a tensor was reached")
    if outcome.seen.modified_inputs:
        return CaseResult(outcome.case.name, "failed", f"the argument `{outcome.seen.modified_inputs[0]}` was changed")
    complaint = next(filter(None, (r.complaint(outcome.case, outcome.seen) for r in exercise.requirements)), None)
    return CaseResult(outcome.case.name, "failed" if complaint else "passed", complaint or "")
