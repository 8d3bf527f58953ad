"""Words for an exception that an answer raised: what happened, in which line, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from course_lib.checker.judge import pytorch_in_kernels
from course_lib.checker.runner.interpretable import needs_a_gpu
from course_lib.checker.specification import cells
from course_lib.checker.specification.seen import RaisedError
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
    "Torch not compiled with CUDA": "There is no GPU here: a new tensor goes where the inputs are, `device=x.device`.",
    "Found no NVIDIA driver": "There is no GPU here: a new tensor goes where the inputs are, `device=x.device`.",
    "outside of the scope of a kernel": "A kernel is launched with a grid, `kernel[grid](...)`; in the launcher "
    "`triton.cdiv` is meant, `tl.` functions work in kernels alone.",
    "has no attribute 'is_ptr'": "A kernel is launched with a grid: `kernel[grid](...)`.",
    "'float' object cannot be interpreted as an integer": "A whole number is needed: `triton.cdiv(length, BLOCK)` or "
    "`//`, not `/`.",
    "num_warps must be a power of 2": "1, 2, 4, 8, 16 or 32.",
    "Shape element": "The sizes of a tile in registers are powers of two. In Gluon: is `.index(buffer)` missing, which "
    "picks one tile of several?",
    "'shared_memory_descriptor' object has no attribute '__getitem__'": "One tile or barrier of several is picked by "
    "`.index(buffer)`, not by brackets.",
    "must be a power of 2": "`tl.arange` needs a power of two; a mask takes care of the rest.",
    "did you forget to add @triton.jit": "A helper that a kernel calls needs `@triton.jit` too.",
    "Unsupported function referenced": "A kernel calls `tl.` functions and helpers that have `@triton.jit`; Python's "
    "and PyTorch's functions run on the CPU.",
    "Loop-carried variable": "A name that a loop changes has its dtype and shape before the loop: start from "
    "`tl.zeros([BLOCK], tl.float32)`, or from `0.0` for a number.",
    "block redefines it as": "A name has one dtype and one shape, whichever branch was taken: give the other value a "
    "name of its own.",
    "Cannot access global variable": "Hand it to the kernel as a `tl.constexpr` parameter.",
    "Block pointers have been removed": "From Triton 3.8 on there is no `tl.make_block_ptr`. Write the pointers of a "
    "tile, `pointer + rows[:, None] * row_stride + columns[None, :]`, and a mask for each load and store; or take "
    "`tl.make_tensor_descriptor`.",
    "AST node type: Break": "A kernel has no `break`: put the condition into the loop's own, or let a mask end it.",
    "AST node type: Continue": "A kernel has no `continue`: put the rest of the loop under an `if`, or use a mask.",
    "Cannot have `return` statements inside": "Let a mask, or an `if` around the rest, do nothing instead.",
    "Both operands must be same dtype": "`tl.dot` takes two tiles of one dtype: `a.to(b.dtype)`.",
    "Input shapes should have": "`tl.dot` sums over a side of at least 16 numbers (8 in float32, 32 in 8 bits): widen "
    "the tile, and mask what is too many.",
    "unsupported tensor index": "A tile's elements have no numbers: load one by its own pointer, or mask the others "
    "and reduce.",
    "__setitem__": "A tile is never changed in place: `tl.where(condition, new, old)` makes another.",
    "exceeds triton maximum tensor numel": "A tile holds 1,048,576 elements at most, and some thousands at its best: "
    "walk along what is longer in a loop.",
    "must be of type tl.constexpr": "The compiler must know what `tl.arange` counts: a `tl.constexpr` parameter.",
    "make_shape_compatible": "Dimensions of two tiles must be equal or 1: `rows[:, None]` with `columns[None, :]`.",
    "bind: Permission denied": "In a check the ranks use the group that is there: a new one would need "
    "connections, and an answer may make none.",
    "simultaneous multiple comparison": "Write `(low < x) & (x < high)`.",
    "failed to specialize argument": "A kernel takes tensors, numbers, None, and constants as `tl.constexpr`.",
    "was specified but unrecognised": "It is neither a parameter of the kernel nor an option such as `num_warps`.",
    "AttributeError(\"'int' object has no attribute": "An argument of 1 is a constant for the compiler: a Python "
    "number and no tensor.",
    "NameError(": "A name that only one branch of an `if`, or only a loop's body, gives a value has none after it.",
}


class Said(NamedTuple):
    """What an exception is told as: the outcome, a message, and the id of a mistake where it is one."""

    outcome: str
    message: str
    mistake: str | None = None


def error_message(error: RaisedError, source: str) -> Said:
    """An exception in words; the first reading that knows it speaks."""
    for reading in _READINGS:
        said = reading(error, source)
        if said is not None:
            return said
    return Said("error", f"{error.type}{_place(error)}: {_first_line(error.text) or 'no message'}")


def _place(error: RaisedError) -> str:
    parts = [f"rank {error.rank}"] if error.rank is not None else []
    parts += [f"line {error.line} of the cell"] if error.line else []
    return f" ({', '.join(parts)})" if parts else ""


def _unusable(error: RaisedError, source: str) -> Said | None:
    """Nothing was raised: what was returned is no tensor and no number."""
    if not error.unusable:
        return None
    text = f"The result cannot be judged: {error.text.strip()}. Return plain tensors or numbers."
    return Said("error", text, "unusable_result")


def _undefined(error: RaisedError, source: str) -> Said | None:
    """A name that the cell does not define; in a kernel, one that is none of its parameters."""
    name = _undefined_name(error, source)
    if name is None:
        return None
    kernel = cells.kernel_at(source, error.line)
    if kernel:
        parameters = ", ".join(f"`{parameter}`" for parameter in kernel[1])
        text = (
            f"`{name}` is not defined{_place(error)}: it is no parameter of the kernel `{kernel[0]}`, which has "
            f"{parameters}, and nothing of that name stands in this cell."
        )
    else:
        text = (
            f"`{name}` is not defined in this cell{_place(error)}. A check runs the exercise's cell alone: if `{name}` "
            "comes from another cell, move its definition into this one."
        )
    return Said("error", text, "undefined_name")


def _called_exit(error: RaisedError, source: str) -> Said | None:
    if error.type != "SystemExit":
        return None
    return Said("error", f"The answer called exit(){_place(error)}. Return the result instead.", "called_exit")


def _stopped_at_a_breakpoint(error: RaisedError, source: str) -> Said | None:
    if error.type != "BdbQuit":
        return None
    return Said(
        "error",
        "`breakpoint()` waits for what somebody types, and a check runs your answer in a process of its own. Take it "
        "out, or call the function itself in a cell.",
    )


def _out_of_memory(error: RaisedError, source: str) -> Said | None:
    if not error.out_of_memory:
        return None
    text = (
        f"The answer ran out of memory{_place(error)}: {_first_line(error.text)}. The limit is a few times what the "
        "exercise needs; does a tensor grow with every step, or hold a whole matrix?"
    )
    return Said("error", text, "out_of_memory")


def _imports_the_course(error: RaisedError, source: str) -> Said | None:
    if error.type not in ("ModuleNotFoundError", "ImportError") or "course_lib" not in error.text:
        return None
    text = "An answer must stand alone: `course_lib` cannot be imported during a check. Write the step yourself."
    return Said("error", text, "imports_the_course")


def _syntax_error(error: RaisedError, source: str) -> Said | None:
    if error.type != "SyntaxError":
        return None
    return Said("error", f"SyntaxError{_place(error)}: {_first_line(error.text)}.", "syntax_error")


def _unfinished(error: RaisedError, source: str) -> Said | None:
    """The stub's own line: a part of the answer is still to be written."""
    if error.type != "NotImplementedError" or "Exercise" not in error.text:
        return None
    text = f"A part is still to be written{_place(error)}: the line `raise NotImplementedError` is reached."
    return Said("failed", text, "unfinished")


def _only_on_a_gpu(error: RaisedError, source: str) -> Said | None:
    """What the interpreter lacks and a GPU has."""
    reason = needs_a_gpu(error, source)
    if reason is None:
        return None
    text = f"The answer {reason}{_place(error)}. That works on a GPU alone, so it cannot be judged on this machine."
    return Said("unsupported", text)


def _assembler(error: RaisedError, source: str) -> Said | None:
    """The assembler refused what the compiler before it made of a kernel that it took: no fault of an answer that
    writes no assembly itself."""
    if "Internal Triton PTX codegen error" not in error.text or "inline_asm" in source:
        return None
    said = error.text.partition("stderr:")[2].partition("Repro command:")[0].strip()
    reason = f" («{_first_line(said)}»)" if said else ""
    text = (
        f"Triton's compiler took the kernel{_place(error)}, and NVIDIA's assembler refused what it made of it{reason}. "
        "That is a fault of this Triton's and not of your kernel, so it cannot be judged on this machine. Check it "
        "once more; if it is refused again, leave out hints such as `tl.multiple_of`, or try another Triton."
    )
    return Said("unsupported", text, "assembler_refused")


def _tool_that_died(error: RaisedError, source: str) -> Said | None:
    """A part of the compiler that a signal ended; Triton tells no more of it than the number."""
    tool = re.search(r"`?(\w+)`? failed with error code (-?\d+)", error.text)
    died = signals.signal_of(int(tool[2])) if tool else None
    if not tool or not died:
        return None
    what = f"`{tool[1]}`, a part of the compiler, {signals.died_of(died, True)}"
    return Said("error", f"{error.type}{_place(error)}: {what}")


def _pytorchs_habit(error: RaisedError, source: str) -> Said | None:
    """A line of a kernel that would work on PyTorch's tensors."""
    found = pytorch_in_kernels.advice(error, source)
    if found is None:
        return None
    code, words = found
    return Said("error", f"`{code}`{_place(error)} is PyTorch's and does not work in a kernel. {words}")


def _beginners_slip(error: RaisedError, source: str) -> Said | None:
    """Words of Triton's that a beginner's slip brings about, with advice."""
    told = f"{error.text} {error.outer}"
    advice = next((words for pattern, words in ADVICE.items() if pattern in told), None)
    if advice is None:
        return None
    return Said("error", f"{error.type}{_place(error)}: {_first_line(error.text)}. {advice}")


_READINGS: tuple[Callable[[RaisedError, str], Said | None], ...] = (
    _unusable,
    _undefined,
    _called_exit,
    _stopped_at_a_breakpoint,
    _out_of_memory,
    _imports_the_course,
    _syntax_error,
    _unfinished,
    _only_on_a_gpu,
    _assembler,
    _tool_that_died,
    _pytorchs_habit,
    _beginners_slip,
)


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
