"""The judge: sends an answer's source to a worker, and decides from what comes back. It never runs an answer itself."""
from __future__ import annotations

import inspect
import random
import re
import signal
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any


from course_lib.checker import cells, compare, diagnosis
from course_lib.checker.exercise import Case, Draw, Exercise, FasterThan, InOut, Mistake, Seen
from course_lib.checker.verdict import CaseResult, Verdict
from course_lib.checker.worker import Ending, WorkerDied, worker
from course_lib.hardware.device import machine, supports_bfloat16

PREDEFINED = ("torch", "triton", "tl", "np", "math", "F", "check", "hint", "solution", "progress", "get_ipython",
              "__name__", "__file__")
FLOOR_MARGIN = 0.9  # measured ceilings spread by several percent; a time this far below them is no measurement


@dataclass
class Run:
    """The cases of one job and what the worker said about them."""

    cases: list[Case]
    interpreted: bool
    ending: Ending
    frames: dict[int, dict] = field(default_factory=dict)
    started: int | None = None

    @property
    def ended_in(self) -> str:
        """The case during which the child ended early, in words."""
        return f"in case “{self.cases[self.started].name}”" if self.started is not None else "while the cell itself ran"


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
        return Verdict(exercise.id, exercise.title, outcome, message, seconds=time.perf_counter() - started, seed=seed, **more)

    if not cells.is_attempted(source, tuple(names.values())):
        return verdict("not_attempted", "Nothing is written here yet. Replace the line under `# YOUR CODE HERE`.")
    reason = _unsupported(exercise)
    if reason:
        return verdict("unsupported", reason)
    try:
        runs = _run_all(exercise, cells.without_magics(source), names, seed)
    except WorkerDied as error:
        return verdict("crashed", f"The worker process ended during the check: {error}. The next check starts a new one.")
    for run in runs:
        stopped = _stopped(exercise, run, source, names)
        if stopped:
            outcome, message, mistake, diagnosed = stopped
            results = [result for other in runs for result in _case_results(exercise, other, {})]
            return verdict(outcome, message, mistake=mistake, diagnosis=diagnosed, cases=results, printed=run.ending.printed)
    return _weigh(exercise, runs, source, names, verdict)


def _unsupported(exercise: Exercise) -> str | None:
    here = machine()
    if exercise.needs == "hopper" and here.tier != "hopper":
        return f"This exercise needs an NVIDIA GPU of compute capability 9.0 or later (H100, H200); this machine has {here.name}."
    if exercise.needs == "nvidia" and here.tier == "none":
        return f"This exercise needs an NVIDIA GPU (T4 or newer, as in Colab); this machine has none that works. {here.reason}"
    if exercise.needs != "any" and here.triton is None:
        return "This exercise needs Triton, which exists for Linux only. Use Linux, WSL2 or Colab."
    return None


# --------------------------------------------------------------------------------------------------------- running cases


def _run_all(exercise: Exercise, source: str, names: dict[str, str], seed: int) -> list[Run]:
    """On a GPU small cases are interpreted first: wild accesses and bytes are seen there, and cannot hurt the device."""
    if machine().tier == "none" or exercise.needs == "any":
        return [_run(exercise, source, names, Draw(seed), interpreted=machine().tier == "none")]
    runs = []
    if exercise.interpretable:
        runs.append(_run(exercise, source, names, Draw(seed), interpreted=True))
        # A wild pointer seen here never reaches the device, and a broken cell is broken there too.
        if not runs[0].ending.finished or any(frame.get("out_of_bounds") for frame in runs[0].frames.values()):
            return runs
    draw = Draw(seed, on_gpu=True, bfloat16=supports_bfloat16())
    runs.append(_run(exercise, source, names, draw, interpreted=False))
    return runs


def _run(exercise: Exercise, source: str, names: dict[str, str], draw: Draw, interpreted: bool) -> Run:
    cases = list(exercise.cases(draw))
    baselines = [requirement for requirement in exercise.requirements if isinstance(requirement, FasterThan)]
    job = {
        "exercise": exercise.id, "source": source, "entries": names, "device": "cuda" if draw.on_gpu else "cpu",
        "cases": [
            {"entry": case.entry or exercise.entries[0], "args": [_packed(value) for value in case.args],
             "driver": _function_source(case.driver),
             "baseline": next((_function_source(b.baseline) for b in baselines if b.case in case.name), None)}
            for case in cases
        ],
    }
    seconds = exercise.limits.gpu_seconds if draw.on_gpu else exercise.limits.seconds
    ending = worker(interpreted).run(job, exercise.limits, seconds)
    run = Run(cases, interpreted, ending)
    for frame in ending.frames:
        if frame["kind"] == "start" and isinstance(frame.get("index"), int) and 0 <= frame["index"] < len(cases):
            run.started = frame["index"]
        elif frame["kind"] == "case" and frame.get("index") == run.started:
            run.frames[run.started] = frame
    return run


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


def _seen(frame: dict) -> Seen:
    """The observations of a frame, each forced into the type it should have: it comes from where strangers' code ran."""
    known = {item.name for item in fields(Seen)}
    values = {key: value for key, value in frame.items() if key in known and value is not None}
    for key in ("launches", "out_of_bounds", "modified_inputs"):
        values[key] = tuple(map(str, values.get(key) or ()))
    return Seen(**values)


# ------------------------------------------------------------------------------------------------- answers that stopped


def _stopped(exercise: Exercise, run: Run, source: str, names: dict[str, str]) -> tuple | None:
    """(outcome, message, mistake id, diagnosis) when the answer did not run to its end, else None."""
    ending = run.ending
    last = ending.frames[-1] if ending.frames else {"kind": "nothing"}
    if ending.too_much_output:
        megabytes = exercise.limits.output_bytes / (1 << 20)
        return ("error", f"The answer printed more than {megabytes:g} MB {run.ended_in} and was stopped. "
                "Take the prints out, or print a few numbers.", "too_much_output", "")
    if ending.timeout:
        limit = exercise.limits.seconds if run.interpreted or exercise.needs == "any" else exercise.limits.gpu_seconds
        return ("timeout", f"Still running after {limit:g} s, {run.ended_in}; it was stopped. Does a loop's condition "
                "ever become false, and does each step bring it nearer?", "timeout", "")
    if last["kind"] == "cell_error":
        return _cell_error(exercise, last["error"], source)
    if last["kind"] == "missing":
        wanted = ", ".join(f"`{name}`" for name in last["names"])
        return ("error", f"The cell does not define {wanted}. Keep the names that the exercise gives: "
                f"{', '.join(names)}.", "missing_name", "")
    if last["kind"] == "not_callable":
        return ("error", f"`{last['names'][0]}` is not a function. Define it with `def`.", "missing_name", "")
    if last["kind"] == "harness_error":
        return ("error", "The checker itself failed on this answer; this is a fault of the course. "
                + str(last.get("text", ""))[-600:], None, "")
    if ending.forged or not ending.finished:
        return ("crashed", _crash_message(run), "crashed", "")
    return None


def _crash_message(run: Run) -> str:
    ending = run.ending
    if ending.forged:
        return f"The worker sent a message that is none ({ending.forged}). The answer must not write to its pipes."
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name if ending.signal in signal.Signals._value2member_map_ else str(ending.signal)
        meaning = {"SIGSEGV": "it reached memory that is not its own", "SIGBUS": "it reached memory that does not exist",
                   "SIGKILL": "it was killed, most likely because memory ran out",
                   "SIGABRT": "a library gave up", "SIGXFSZ": "it wrote a file of more than 256 MB",
                   "SIGFPE": "an integer was divided by zero"}.get(name, "the process was ended by a signal")
        return f"The worker died of {name} {run.ended_in}: {meaning}. Your notebook is not affected; the next check works."
    return (f"The worker ended with status {ending.exit_status} {run.ended_in}, without a result: does the answer end the "
            "process (`os._exit`)? Your notebook is not affected; the next check works.")


def _cell_error(exercise: Exercise, error: dict, source: str) -> tuple:
    outcome, message, mistake = _error_message(error, source)
    return outcome, f"The cell itself failed. {message}", mistake, ""


def _error_message(error: dict, source: str) -> tuple[str, str, str | None]:
    """(outcome, message, mistake id) for an exception, in words that say what to do."""
    kind, text = str(error.get("type")), str(error.get("text", "")).strip()
    place = f" (line {error['line']} of the cell)" if error.get("line") else ""
    if error.get("unusable"):
        return "error", f"The result cannot be judged: {text}. Return plain tensors or numbers.", "unusable_result"
    name = _undefined_name(error, source)
    if name:
        return "error", (f"`{name}` is not defined in this cell{place}. A check runs the exercise's cell alone: if `{name}` "
                         "comes from another cell, move its definition into this one."), "undefined_name"
    if kind == "SystemExit":
        return "error", f"The answer called exit(){place}. Return the result instead.", "called_exit"
    if error.get("out_of_memory"):
        return "error", (f"The answer ran out of memory{place}: {_first_line(text)}. The limit is a few times what the "
                         "exercise needs; does a tensor grow with every step, or hold a whole matrix?"), "out_of_memory"
    if kind in ("ModuleNotFoundError", "ImportError") and "course_lib" in text:
        return "error", ("An answer must stand alone: `course_lib` cannot be imported during a check. Write the step "
                         "yourself."), "imports_the_course"
    if kind == "SyntaxError":
        return "error", f"SyntaxError{place}: {_first_line(text)}.", "syntax_error"
    if kind == "NotImplementedError" and "Exercise" in text:
        return "failed", f"A part is still to be written{place}: the line `raise NotImplementedError` is reached.", "unfinished"
    return "error", f"{kind}{place}: {_first_line(text) or 'no message'}", None


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line[:300].rstrip(".")


def _undefined_name(error: dict, source: str) -> str | None:
    text = f"{error.get('text', '')} {error.get('outer', '')}"
    match = re.search(r"name '(\w+)' is not defined|NameError\(['\"](\w+) is not defined|free variable '(\w+)'", text)
    if match is None:
        return None
    name = next(group for group in match.groups() if group)
    return name if error.get("type") == "NameError" or name in cells.undefined_names(source, PREDEFINED) else None


# ---------------------------------------------------------------------------------------------------- weighing the cases


def _weigh(exercise: Exercise, runs: list[Run], source: str, names: dict[str, str], verdict: Callable) -> Verdict:
    outcomes: dict[tuple[int, int], diagnosis.Outcome] = {}
    for number, run in enumerate(runs):
        for index, case in enumerate(run.cases):
            outcome = _compare_case(exercise, run, case, run.frames[index])
            if outcome is not None:
                outcomes[number, index] = outcome
    results, errors = [], []
    for number, run in enumerate(runs):
        here = {index: outcome for (job, index), outcome in outcomes.items() if job == number}
        results += _case_results(exercise, run, here, source)
        errors += [(run.cases[i], frame) for i, frame in run.frames.items() if frame.get("error")]
    finished = list(outcomes.values())
    printed = next((run.ending.printed for run in runs if run.ending.printed), "")
    failed = [outcome for outcome in finished if not outcome.right]
    wild = [(o.case, o.seen.out_of_bounds[0]) for o in finished if o.seen.out_of_bounds]
    wild += [(case, str(frame["out_of_bounds"][0])) for case, frame in errors if frame.get("out_of_bounds")]

    def speak(outcome: str, message: str, mistake: str | None = None, sentence: str = "", picture: str = "") -> Verdict:
        return verdict(outcome, message, mistake=mistake, diagnosis=sentence, cases=results, printed=printed, picture=picture)

    known = diagnosis.find_mistake(exercise, finished) if failed else None
    if known is None and errors:
        known = _mistake_of_error(exercise, errors)
    if wild and (known is None or known.result is None):
        case, sentence = wild[0]
        known = known or _mistake_of_access(exercise, finished)
        return speak("failed", f"Memory outside a tensor was reached in case “{case.name}”: {sentence}",
                     known.id if known else "out_of_bounds", known.sentence if known else "")
    if errors:
        case, frame = errors[0]
        outcome, message, mistake = _error_message(frame["error"], source)
        return speak(outcome, f"In case “{case.name}”: {message}", known.id if known else mistake, known.sentence if known else "")
    if failed:
        first = failed[0]
        message = f"Case “{first.case.name}”: {diagnosis.describe(first)}."
        generic = "unwritten_memory" if any(o.seen.unwritten for o in failed) else None
        return speak("failed", message, known.id if known else generic, known.sentence if known else "", diagnosis.picture(first))
    for outcome in finished:
        for requirement in exercise.requirements:
            complaint = requirement.complaint(outcome.case, outcome.seen)
            if complaint:
                named = next((m for m in exercise.mistakes if m.when and m.when(outcome.case, outcome.seen, outcome.got)), None)
                return speak("failed", f"The numbers are right, but: {complaint}", named.id if named else requirement.id,
                             named.sentence if named else "")
    changed = next((o for o in finished if o.seen.modified_inputs), None)
    if changed is not None:
        return speak("failed", f"The numbers are right, but in case “{changed.case.name}” the argument "
                     f"`{changed.seen.modified_inputs[0]}` was changed. Write the result into a tensor of its own.", "modified_input")
    too_fast = _below_the_floor(exercise, finished)
    if too_fast:
        return speak("failed", too_fast, "below_the_floor")
    return speak("passed", _praise(exercise, finished))


def _praise(exercise: Exercise, finished: list[diagnosis.Outcome]) -> str:
    text = f"All {len(finished)} cases are right."
    moved = max((o.seen.bytes_moved for o in finished if o.case.metered), default=0)
    if moved:
        text += f" The largest metered case moved {moved:,} bytes."
    timing = next((o.seen.timing for o in finished if o.seen.timing), None)
    if timing:
        text += f" {timing['answer'] * 1e6:,.0f} µs against the baseline's {timing['baseline'] * 1e6:,.0f} µs."
    return text


def _compare_case(exercise: Exercise, run: Run, case: Case, frame: dict) -> diagnosis.Outcome | None:
    if frame.get("error"):
        return None
    expected = compare.truth(exercise, case, tf32=exercise.uses_dot and not run.interpreted)
    got = _result(case, frame, "result")
    leaves = compare.compare(got, expected, exercise)
    if "result_after_timing" in frame:  # a kernel that is right only the first time is not right
        leaves += compare.compare(_result(case, frame, "result_after_timing"), expected, exercise)
    return diagnosis.Outcome(case, _seen(frame), got, expected, leaves)


def _result(case: Case, frame: dict, key: str) -> Any:
    if any(isinstance(value, InOut) for value in case.args):
        return frame[key], {"written": list(frame["written"].values())}
    return frame[key]


def _mistake_of_error(exercise: Exercise, errors: list) -> Mistake | None:
    for mistake in exercise.mistakes:
        if mistake.when and any(mistake.when(case, _seen(frame), None) for case, frame in errors):
            return mistake
    return None


def _mistake_of_access(exercise: Exercise, finished: list[diagnosis.Outcome]) -> Mistake | None:
    return next((m for m in exercise.mistakes if m.when
                 and any(o.seen.out_of_bounds and m.when(o.case, o.seen, o.got) for o in finished)), None)


def _below_the_floor(exercise: Exercise, finished: list[diagnosis.Outcome]) -> str | None:
    """A time that the memory of this machine cannot reach is a broken measurement, not a triumph."""
    for requirement in exercise.requirements:
        timed = next((o for o in finished if o.seen.timing), None)
        if not isinstance(requirement, FasterThan) or timed is None:
            continue
        from course_lib.hardware.ceilings import ceilings

        least = requirement.minimum_bytes(*timed.case.args)
        floor = least / ceilings().read_bandwidth
        if timed.seen.timing["answer"] < FLOOR_MARGIN * floor:
            return (f"{timed.seen.timing['answer'] * 1e6:.1f} µs cannot be: {least:,.0f} bytes must move, which takes "
                    f"{floor * 1e6:.1f} µs on this machine. Is the work skipped, or kept from an earlier call?")
    return None


def _case_results(exercise: Exercise, run: Run, outcomes: dict[int, diagnosis.Outcome], source: str = "") -> list[CaseResult]:
    """Each case of a run as one line."""
    results = []
    for index, case in enumerate(run.cases):
        frame = run.frames.get(index)
        if frame is None:
            ended = index == run.started and not run.ending.finished
            state = ("timeout" if run.ending.timeout else "crashed") if ended else "not_run"
            results.append(CaseResult(case.name, state, "" if ended else "not reached"))
        elif frame.get("error"):
            results.append(CaseResult(case.name, "error", _error_message(frame["error"], source)[1]))
        elif index in outcomes:
            results.append(_case_result(exercise, outcomes[index]))
        else:
            results.append(CaseResult(case.name, "not_run", "not judged, since another case stopped the check"))
    return results


def _case_result(exercise: Exercise, outcome: diagnosis.Outcome) -> CaseResult:
    if not outcome.right:
        return CaseResult(outcome.case.name, "failed", diagnosis.describe(outcome))
    if outcome.seen.out_of_bounds:
        return CaseResult(outcome.case.name, "failed", "right numbers, but memory outside a tensor was reached")
    complaint = next(filter(None, (r.complaint(outcome.case, outcome.seen) for r in exercise.requirements)), None)
    return CaseResult(outcome.case.name, "failed" if complaint else "passed", complaint or "")


