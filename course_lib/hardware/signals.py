"""Words for a process that a signal ended: which signal, what it usually means in this course, and what to do."""

from __future__ import annotations

import signal

_WHAT = {
    "SIGABRT": ("abort", "a library met what must never happen, and ended the process"),
    "SIGBUS": ("bus error", "it reached memory that does not exist"),
    "SIGFPE": ("arithmetic error", "an integer was divided by zero"),
    "SIGILL": ("illegal instruction", "a library came to a place that it holds unreachable"),
    "SIGKILL": ("killed", "the system ended it"),
    "SIGSEGV": ("segmentation fault", "it reached memory that is not its own"),
    "SIGTRAP": ("trap", "a library came to a place that it holds unreachable"),
    "SIGXCPU": ("out of CPU time", "it computed for longer than a limit of this system allows"),
    "SIGXFSZ": ("file too large", "it wrote a file of more than 256 MB"),
}
_OF_THE_COMPILER = ("SIGABRT", "SIGBUS", "SIGILL", "SIGSEGV", "SIGTRAP")
_COMPILER = (
    "Usually the compiler gave up: the kernel hands an operation a shape, layout or dtype that it does not allow. Read "
    "what it printed, if anything, and check the operands of what you changed last, `tl.dot` and `tl.reshape` first."
)
_LIBRARY = (
    "Usually a library was handed sizes, strides or dtypes that do not fit, and did not check them. Read what it "
    "printed, if anything, and undo what you changed last."
)
_POINTER = (
    "Usually an address or a size was made by hand (`ctypes`, `data_ptr`, `as_strided`, `set_`). Use plain tensors and "
    "their own shapes, and undo what you changed last."
)
_MEMORY = (
    "Usually the machine's memory ran out: does a tensor grow with every step, or hold a whole matrix? If not, close "
    "other notebooks and programs, and check again."
)


def signal_of(status: int | None) -> int | None:
    """The signal in a process's return code: -6, or 134 where a shell or a sandbox passes it on; None in any other."""
    number = 0 if status is None else -status if status < 0 else status - 128
    return number if 0 < number < signal.NSIG else None


def name_of(number: int) -> str:
    """A signal's name and a word for it: "SIGABRT (abort)"."""
    if number not in signal.Signals._value2member_map_:
        return f"signal {number} (one of the system's own)"
    name = signal.Signals(number).name
    word = _WHAT[name][0] if name in _WHAT else (signal.strsignal(number) or "no other name").partition(" (")[0].lower()
    return f"{name} ({word})"


def died_of(number: int, compiled: bool, where: str = "") -> str:
    """What happened to a process that a signal ended, the usual cause and what to do, in sentences without a subject.

    Args:
        number: of the signal.
        compiled: whether kernels were compiled in that process; in the interpreter no compiler can be to blame.
        where: words on what it was doing, "in case “7 elements”".
    """
    known = signal.Signals._value2member_map_.get(number)
    name = known.name if known else ""
    what = _WHAT[name][1] if name in _WHAT else "another process or the system ended it. Check again"
    advice = ""
    if name == "SIGKILL":
        advice = _MEMORY
    elif name in _OF_THE_COMPILER and compiled:
        advice = _COMPILER
    elif name in ("SIGSEGV", "SIGBUS"):
        advice = _POINTER
    elif name in _OF_THE_COMPILER:
        advice = _LIBRARY
    return f"died of {name_of(number)}{f' {where}' if where else ''}: {what}. {advice}".strip()
