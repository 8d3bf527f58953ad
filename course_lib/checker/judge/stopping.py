"""Words for answers that did not run to their end: what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Mapping

from course_lib.checker.judge.exceptions import error_message
from course_lib.checker.judge.verdict import Finding
from course_lib.checker.runner.running import Run
from course_lib.checker.specification.exercise import Exercise
from course_lib.hardware import signals

# Limits on all that an answer does together: message and mistake id.
_EXCESSES = {
    "processes": (
        "The answer started processes without end and was stopped. One process, the check's own, is enough.",
        "too_many_processes",
    ),
    "memory": (
        "The answer's processes together took more memory than an answer may, and were stopped.",
        "out_of_memory",
    ),
    "results": (
        "The answer sent back hundreds of megabytes and was stopped. Return what the exercise asks for.",
        "unusable_result",
    ),
}


def stopped(exercise: Exercise, run: Run, source: str, names: Mapping[str, str]) -> Finding | None:
    """What is found where the answer did not run to its end; None where it did."""
    return _limit_reached(exercise, run, source) or _cell_unusable(run, source, names) or _crashed(exercise, run)


def _limit_reached(exercise: Exercise, run: Run, source: str) -> Finding | None:
    """A limit on output, time, or what all processes do together ended the answer."""
    if run.ending.too_much_output:
        megabytes = exercise.limits.output_bytes / (1 << 20)
        text = (
            f"The answer printed more than {megabytes:g} MB {run.ended_in} and was stopped. "
            "Take the prints out, or print a few numbers."
        )
        return Finding("error", text, "too_much_output")
    if run.ending.excess:
        return Finding("error", *_EXCESSES[run.ending.excess])
    if run.ending.timeout:
        return Finding("timeout", _timeout_message(exercise, run, source), "timeout")
    return None


def _cell_unusable(run: Run, source: str, names: Mapping[str, str]) -> Finding | None:
    """The cell itself failed, or does not define what the exercise asks for."""
    last = run.last
    if last.error is not None:
        said = error_message(last.error, source)
        return Finding(said.outcome, f"The cell itself failed. {said.message}", said.mistake)
    if last.kind == "missing":
        wanted = ", ".join(f"`{name}`" for name in last.names)
        text = f"The cell does not define {wanted}. Keep the names that the exercise gives: {', '.join(names)}."
        return Finding("error", text, "missing_name")
    if last.kind == "not_callable":
        return Finding("error", f"`{last.names[0]}` is not a function. Define it with `def`.", "missing_name")
    return None


def _crashed(exercise: Exercise, run: Run) -> Finding | None:
    """The checker's own code failed in the child, or the child ended without saying that all is done."""
    if run.last.kind == "harness_error":
        fault = "The checker itself failed on this answer; this is a fault of the course. "
        return Finding("error", fault + run.last.text[-600:])
    if run.ending.forged or not run.ending.finished:
        return Finding("crashed", _crash_message(exercise, run), "crashed")
    return None


def _timeout_message(exercise: Exercise, run: Run, source: str) -> str:
    limit = exercise.limits.seconds if run.interpreted or not exercise.needs.uses_gpu else exercise.limits.gpu_seconds
    lines, number = source.splitlines(), run.ending.line or 0
    text = lines[number - 1].partition(" #")[0].strip() if 0 < number <= len(lines) else ""
    if run.ending.compiling:
        launched = f"the kernel that line {number} launches" if text else "a kernel"
        return (
            f"Still compiling {launched} after {limit:g} s, {run.ended_in}; it was stopped. A tile lies in registers, "
            "and the compiler writes out what is done with each: is a tile as long as a whole row, or is a "
            "`tl.static_range` long?"
        )
    if run.ending.ranks:
        return (
            f"Still running after {limit:g} s, {run.ended_in}; it was stopped. {_ranks_at(run.ending.ranks, lines)} A "
            "collective returns when every rank has called it: does each rank call the same ones, in the same order? "
            "Or does a loop never end?"
        )
    where = f" It was at line {number}: `{text[:100]}`." if text else ""
    return (
        f"Still running after {limit:g} s, {run.ended_in}; it was stopped.{where} Either a loop never ends (does its "
        "condition become false, does each step bring it nearer?), or there are far too many small steps, such "
        "as a program or a loop step for each element where one could take many."
    )


def _ranks_at(ranks: Mapping[str, int | None], lines: list[str]) -> str:
    """Where each rank was: "Rank 0 had returned. Rank 1 was at line 4: `distributed.all_reduce(x)`."."""
    said = []
    for rank, line in ranks.items():
        if type(line) is int and 0 < line <= len(lines):
            said.append(f"Rank {rank} was at line {line}: `{lines[line - 1].partition(' #')[0].strip()[:100]}`.")
        else:
            said.append(f"Rank {rank} was not in the cell: it had returned, or was about to begin.")
    return " ".join(said)


def _crash_message(exercise: Exercise, run: Run) -> str:
    ending = run.ending
    if ending.forged:
        return f"The worker sent a message that is none ({ending.forged}). The answer must not write to its pipes."
    if ending.signal is not None:
        compiled = not run.interpreted and exercise.needs.uses_gpu
        return (
            f"The worker {signals.died_of(ending.signal, compiled, run.ended_in)} Your notebook is not affected; the "
            "next check works."
        )
    return (
        f"The worker ended with status {ending.exit_status} {run.ended_in}, without a result: does the answer end the "
        "process (`os._exit`)? Your notebook is not affected; the next check works."
    )
