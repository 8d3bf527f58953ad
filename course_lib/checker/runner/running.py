"""From an exercise and a cell to what the worker reports: jobs out, frames back."""

from __future__ import annotations

import inspect
import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from course_lib.checker.judge.evaluate import arguments
from course_lib.checker.runner.worker import Ending, worker
from course_lib.checker.specification.draw import Draw
from course_lib.checker.specification.exercise import Case, Exercise, InOut, Seen
from course_lib.checker.specification.requirements import FasterThan
from course_lib.hardware.device import machine, supports_bfloat16

TIMED_CALLS = 29  # 3 to warm up, 25 that count, and one to see that the answer is still right


@dataclass
class Run:
    """The cases of one job and what the worker said about them."""

    cases: list[Case]
    interpreted: bool
    ending: Ending
    frames: dict[int, dict] = field(default_factory=dict)
    started: int | None = None
    turns: list[int] = field(default_factory=list)

    def timed_last(self, case: Case) -> Case:
        """The case as the last of the timed calls gets it: the worker rolls the tensors of each by other amounts."""
        number = itertools.count(self.turns[-1], self.turns[-1])

        def rolled(tensor):
            return tensor.roll(next(number), -1) if tensor.is_floating_point() else tensor

        return replace(case, args=tuple(arguments(case, rolled)[0]))

    @property
    def ended_in(self) -> str:
        """The case during which the child ended early, in words."""
        return f"in case “{self.cases[self.started].name}”" if self.started is not None else "while the cell itself ran"


def run_cases(
    exercise: Exercise, source: str, names: dict[str, str], seed: int, undefined_lanes: bool = True
) -> list[Run]:
    """Run an answer on the cases that one seed draws.

    On a GPU small cases are interpreted first: wild accesses and bytes are seen there, and cannot hurt the device.
    The interpreter puts NaN where a masked load without `other=` leaves a lane undefined; without `undefined_lanes` it
    gives 0 there, and nothing else is run.

    Raises:
        WorkerDied: the worker itself broke.
    """
    if not undefined_lanes:
        return [_run(exercise, source, names, Draw(seed), interpreted=True, undefined_lanes=False)]
    if machine().tier == "none" or exercise.needs == "any":
        return [_run(exercise, source, names, Draw(seed), interpreted=machine().tier == "none")]
    runs = []
    if exercise.interpretable:
        runs.append(_run(exercise, source, names, Draw(seed), interpreted=True))
        # A wild pointer seen here never reaches the device, and what breaks here is broken there too.
        wild_or_broken = any(frame.get("out_of_bounds") or frame.get("error") for frame in runs[0].frames.values())
        if wild_or_broken or not runs[0].ending.finished:
            return runs
    draw = Draw(seed, on_gpu=True, bfloat16=supports_bfloat16())
    runs.append(_run(exercise, source, names, draw, interpreted=False))
    return runs


def _run(
    exercise: Exercise,
    source: str,
    names: dict[str, str],
    draw: Draw,
    interpreted: bool,
    undefined_lanes: bool = True,
) -> Run:
    cases = list(exercise.cases(draw))
    turns = [2 * draw.integer(0, 1 << 20) + 1 for _ in range(TIMED_CALLS)]  # odd: no whole turn of a power of two
    baselines = [requirement for requirement in exercise.requirements if isinstance(requirement, FasterThan)]
    job = {
        "exercise": exercise.id,
        "source": source,
        "entries": names,
        "device": "cuda" if draw.on_gpu else "cpu",
        "undefined_lanes": undefined_lanes,
        "records_variants": compiles_without_gpu(exercise),
        "runs": _runs(draw),
        "cases": [
            {
                "entry": case.entry or exercise.entries[0],
                "args": [_packed(value) for value in case.args],
                "driver": _function_source(case.driver),
                "turns": turns,
                "baseline": next((_function_source(b.baseline) for b in baselines if b.case in case.name), None),
            }
            for case in cases
        ],
    }
    seconds = exercise.limits.gpu_seconds if draw.on_gpu else exercise.limits.seconds
    ending = worker(interpreted).run(job, exercise.limits, seconds)
    run = Run(cases, interpreted, ending, turns=turns)
    for frame in ending.frames:
        _take(run, frame)
    complete = len(run.frames) == len(cases) or any(frame.get("error") for frame in run.frames.values())
    if ending.frames and ending.frames[-1]["kind"] == "done" and not complete:
        ending.forged = ending.forged or "it says that all is done, and cases are missing"
    return run


def compiles_without_gpu(exercise: Exercise) -> bool:
    """Whether a passing answer's kernels go before the compiler because no GPU on this machine compiles them."""
    return machine().tier == "none" and exercise.needs == "triton" and exercise.interpretable


def _runs(draw: Draw) -> int:
    """How often each case runs: programs that race differ from run to run, and the interpreter's never race."""
    return 20 if draw.on_gpu else 1


def _take(run: Run, frame: dict) -> None:
    """Note a frame; one out of turn was not sent by the harness, which starts and reports each case once, in order."""
    turn, kind, index = len(run.frames), frame["kind"], frame.get("index")
    if kind == "start" and index == turn < len(run.cases) and run.started in (None, turn - 1):
        run.started = index
    elif kind == "case" and index == turn == run.started and _well_formed(frame):
        run.frames[index] = frame
    elif kind in ("start", "case"):
        run.ending.forged = run.ending.forged or "a case out of turn"


_COUNTS = ("largest_allocation", "unwritten", "guard_values", "undefined_values", "repeats", "differing", "changes")
_KINDS = {
    **dict.fromkeys(("error", "operations", "traffic", "timing", "written", "written_repeated"), dict),
    **dict.fromkeys(("launches", "out_of_bounds", "modified_inputs", "undefined_loads", "variants"), list),
    **dict.fromkeys(_COUNTS, int),
    "seconds": float,
}


def _well_formed(frame: dict) -> bool:
    """Whether a case's frame holds what the harness puts there, so that nothing that reads it can fail."""
    kinds = all(frame.get(key) is None or type(frame[key]) is kind for key, kind in _KINDS.items())
    numbers = [*(frame.get("operations") or {}).values(), *(frame.get("timing") or {}).values()] if kinds else [None]
    for counts in (frame.get("traffic") or {}).values() if kinds else ():
        complete = isinstance(counts, dict) and {"loaded", "stored", "atomic", "distinct_loaded"} <= set(counts)
        numbers += counts.values() if complete else [None]
    return kinds and ("result" in frame or bool(frame.get("error"))) and all(type(n) in (int, float) for n in numbers)


def _packed(value: Any) -> Any:
    if isinstance(value, InOut):
        return {"in_out": value.tensor}
    if isinstance(value, (tuple, list)):
        return type(value)(_packed(item) for item in value)
    if isinstance(value, dict):
        return {key: _packed(item) for key, item in value.items()}
    return value


def _function_source(function: Callable | None) -> dict | None:
    if function is None:
        return None
    return {"name": function.__name__, "source": textwrap.dedent(inspect.getsource(function))}


def seen_in(frame: dict) -> Seen:
    """A frame's observations, each forced into the type it should have: it comes from where strangers' code ran."""
    known = {item.name for item in fields(Seen)}
    values = {key: value for key, value in frame.items() if key in known and value is not None}
    for key in ("launches", "out_of_bounds", "modified_inputs", "undefined_loads"):
        values[key] = tuple(map(str, values.get(key) or ()))
    return Seen(**values)
