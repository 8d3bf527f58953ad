"""Words for answers that did not run to their end: what happened, where, and what to do."""

from __future__ import annotations

import re

from course_lib.checker.runner.running import Run
from course_lib.checker.specification import cells
from course_lib.checker.specification.exercise import Exercise, RaisedError
from course_lib.hardware import signals

PREDEFINED = (
    "torch",
    "triton",
    "tl",
    "np",
    "math",
    "F",
    "check",
    "hint",
    "solution",
    "progress",
    "submit",
    "get_ipython",
    "__name__",
    "__file__",
)


# What a beginner's slip looks like from inside Triton, and what it means.
ADVICE = {
    "has no len()": "The grid must be a tuple: `kernel[(programs,)](...)`, with the comma.",
    "'function' object is not subscriptable": "A kernel needs `@triton.jit` above its `def`.",
    "outside of the scope of a kernel": "A kernel is launched with a grid, `kernel[grid](...)`; in the launcher "
    "`triton.cdiv` is meant, `tl.` functions work in kernels alone.",
    "has no attribute 'is_ptr'": "A kernel is launched with a grid: `kernel[grid](...)`.",
    "'float' object cannot be interpreted as an integer": "A whole number is needed: `triton.cdiv(length, BLOCK)` or "
    "`//`, not `/`.",
    "num_warps must be a power of 2": "1, 2, 4, 8, 16 or 32.",
    "must be a power of 2": "`tl.arange` needs a power of two; a mask takes care of the rest.",
    "did you forget to add @triton.jit": "A helper that a kernel calls needs `@triton.jit` too.",
    "Unsupported function referenced": "A kernel calls `tl.` functions and helpers that have `@triton.jit`; Python's "
    "and PyTorch's functions run on the CPU.",
    "Loop-carried variable": "A name that a loop changes has its dtype and shape before the loop: start from "
    "`tl.zeros([BLOCK], tl.float32)`, or from `0.0` for a number.",
    "block redefines it as": "A name has one dtype and one shape, whichever branch was taken: give the other value a "
    "name of its own.",
    "Cannot access global variable": "Hand it to the kernel as a `tl.constexpr` parameter.",
    "AST node type: Break": "A kernel has no `break`: put the condition into the loop's own, or let a mask end it.",
    "AST node type: Continue": "A kernel has no `continue`: put the rest of the loop under an `if`, or use a mask.",
    "Cannot have `return` statements inside": "Let a mask, or an `if` around the rest, do nothing instead.",
    "Both operands must be same dtype": "`tl.dot` takes two tiles of one dtype: `a.to(b.dtype)`.",
    "Input shapes should have": "`tl.dot` needs 16 rows and columns at least: widen the tile, and mask what is too "
    "many.",
    "unsupported tensor index": "A tile's elements have no numbers: load one by its own pointer, or mask the others "
    "and reduce.",
    "__setitem__": "A tile is never changed in place: `tl.where(condition, new, old)` makes another.",
    "exceeds triton maximum tensor numel": "A tile holds 1,048,576 elements at most, and some thousands at its best: "
    "walk along what is longer in a loop.",
    "must be of type tl.constexpr": "The compiler must know what `tl.arange` counts: a `tl.constexpr` parameter.",
    "make_shape_compatible": "Dimensions of two tiles must be equal or 1: `rows[:, None]` with `columns[None, :]`.",
    "simultaneous multiple comparison": "Write `(low < x) & (x < high)`.",
    "failed to specialize argument": "A kernel takes tensors, numbers, None, and constants as `tl.constexpr`.",
    "was specified but unrecognised": "It is neither a parameter of the kernel nor an option such as `num_warps`.",
    "AttributeError(\"'int' object has no attribute": "An argument of 1 is a constant for the compiler: a Python "
    "number and no tensor.",
    "NameError(": "A name that only one branch of an `if`, or only a loop's body, gives a value has none after it.",
}

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


def stopped(exercise: Exercise, run: Run, source: str, names: dict[str, str]) -> tuple | None:
    """(outcome, message, mistake id, diagnosis) when the answer did not run to its end, else None."""
    ending = run.ending
    last = run.last
    if ending.too_much_output:
        megabytes = exercise.limits.output_bytes / (1 << 20)
        return (
            "error",
            f"The answer printed more than {megabytes:g} MB {run.ended_in} and was stopped. "
            "Take the prints out, or print a few numbers.",
            "too_much_output",
            "",
        )
    if ending.excess:
        return ("error", *_EXCESSES[ending.excess], "")
    if ending.timeout:
        return ("timeout", _timeout_message(exercise, run, source), "timeout", "")
    if last.error is not None:
        return _cell_error(last.error, source)
    if last.kind == "missing":
        wanted = ", ".join(f"`{name}`" for name in last.names)
        return (
            "error",
            f"The cell does not define {wanted}. Keep the names that the exercise gives: {', '.join(names)}.",
            "missing_name",
            "",
        )
    if last.kind == "not_callable":
        return ("error", f"`{last.names[0]}` is not a function. Define it with `def`.", "missing_name", "")
    if last.kind == "harness_error":
        return (
            "error",
            "The checker itself failed on this answer; this is a fault of the course. " + last.text[-600:],
            None,
            "",
        )
    if ending.forged or not ending.finished:
        return ("crashed", _crash_message(exercise, run), "crashed", "")
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
    where = f" It was at line {number}: `{text[:100]}`." if text else ""
    return (
        f"Still running after {limit:g} s, {run.ended_in}; it was stopped.{where} Either a loop never ends (does its "
        "condition become false, does each step bring it nearer?), or there are far too many small steps: a program "
        "or a loop step for each element, where one for each block is meant."
    )


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


def _cell_error(error: RaisedError, source: str) -> tuple:
    outcome, message, mistake = error_message(error, source)
    return outcome, f"The cell itself failed. {message}", mistake, ""


def error_message(error: RaisedError, source: str) -> tuple[str, str, str | None]:
    """(outcome, message, mistake id) for an exception, in words that say what to do."""
    kind, text = error.type, error.text.strip()
    place = f" (line {error.line} of the cell)" if error.line else ""
    if error.unusable:
        return "error", f"The result cannot be judged: {text}. Return plain tensors or numbers.", "unusable_result"
    name = _undefined_name(error, source)
    kernel = cells.kernel_at(source, error.line) if name else None
    if name and kernel:
        return (
            "error",
            f"`{name}` is not defined{place}: it is no parameter of the kernel `{kernel[0]}`, which has "
            f"{', '.join(f'`{parameter}`' for parameter in kernel[1])}, and nothing of that name stands in this cell.",
            "undefined_name",
        )
    if name:
        return (
            "error",
            (
                f"`{name}` is not defined in this cell{place}. A check runs the exercise's cell alone: if `{name}` "
                "comes from another cell, move its definition into this one."
            ),
            "undefined_name",
        )
    if kind == "SystemExit":
        return "error", f"The answer called exit(){place}. Return the result instead.", "called_exit"
    if error.out_of_memory:
        return (
            "error",
            (
                f"The answer ran out of memory{place}: {_first_line(text)}. The limit is a few times what the "
                "exercise needs; does a tensor grow with every step, or hold a whole matrix?"
            ),
            "out_of_memory",
        )
    if kind in ("ModuleNotFoundError", "ImportError") and "course_lib" in text:
        return (
            "error",
            ("An answer must stand alone: `course_lib` cannot be imported during a check. Write the step yourself."),
            "imports_the_course",
        )
    if kind == "SyntaxError":
        return "error", f"SyntaxError{place}: {_first_line(text)}.", "syntax_error"
    if kind == "NotImplementedError" and "Exercise" in text:
        return (
            "failed",
            f"A part is still to be written{place}: the line `raise NotImplementedError` is reached.",
            "unfinished",
        )
    tool = re.search(r"`?(\w+)`? failed with error code (-?\d+)", text)
    died = signals.signal_of(int(tool[2])) if tool else None
    if died:  # Triton tells no more than the number
        return "error", f"{kind}{place}: `{tool[1]}`, a part of the compiler, {signals.died_of(died, True)}", None
    for pattern, advice in ADVICE.items():
        if pattern in f"{text} {error.outer}":
            return "error", f"{kind}{place}: {_first_line(text)}. {advice}", None
    return "error", f"{kind}{place}: {_first_line(text) or 'no message'}", None


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    line = re.sub(r" at 0x[0-9a-f]+", "", line)  # a Python object's address
    if len(line) > 300:
        line = line[:300].rpartition(". ")[0] or line[:300]
    return line.rstrip(".")


def _undefined_name(error: RaisedError, source: str) -> str | None:
    text = f"{error.text} {error.outer}"
    match = re.search(r"name '(\w+)' is not defined|NameError\(['\"](\w+) is not defined|free variable '(\w+)'", text)
    if match is None:
        return None
    name = next(group for group in match.groups() if group)
    return name if error.type == "NameError" or name in cells.undefined_names(source, PREDEFINED) else None
