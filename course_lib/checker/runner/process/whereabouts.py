"""Where an answer is that does not end: the child's Python stack, written at a signal even while it computes in C."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from pathlib import Path
from typing import IO

SIGNAL = getattr(signal, "SIGUSR2", None)  # LLVM, which Triton compiles with, keeps SIGUSR1 for itself
PATIENCE = 1.5  # seconds for the child to write its stack
MOST = 64 << 10  # bytes of it that are read
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line (?P<line>\d{1,7})\b', re.MULTILINE)
_CELL = re.compile(r"/exercise_\w+\.py$")
_COMPILER = re.compile(r"/triton/(compiler|backends)/")


def tell_when_asked(file: IO[bytes]) -> None:
    """From now on this process answers `ask` by writing its stack to `file`; where it cannot, it is not asked."""
    if SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(SIGNAL, file=file, all_threads=False)


def _read(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), MOST, 0).decode("utf-8", "replace")


def ask(pid: int, file: IO[bytes]) -> dict:
    """`line`: the line of the cell that a child is at, or None; `compiling`: whether Triton compiles there.

    What the child writes an answer may have written: it is good for a message, and for nothing else.
    """
    if SIGNAL is None or not hasattr(faulthandler, "register"):
        return {}
    patience = 0.0
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, SIGNAL)
        patience = PATIENCE
    text, deadline = _read(file), time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(0.02)
        before, text = text, _read(file)
        if text and text == before:
            break
    frames = _FRAME.findall(text)  # the innermost first
    lines = [int(line) for path, line in frames if _CELL.search(path)]
    return {"line": lines[0] if lines else None, "compiling": any(_COMPILER.search(path) for path, _ in frames)}


def ranks_of(pid: int) -> dict[int, int]:
    """By process, the ranks that a child has started and that have not ended: they bear their number as a name."""
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name.startswith("rank "):
                found[int(child)] = int(name.removeprefix("rank "))
    return found


def computed(pid: int) -> tuple[float, str]:
    """Seconds of a processor that a child and what it has started have had, ranks left out, and their states: "R" is
    one that computes, or would if others let it. No state where it has ended.
    """
    used, states, ranks, left = 0.0, "", ranks_of(pid), [pid]
    while left:
        process = left.pop()
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            used += sum(map(int, fields[11:15])) / os.sysconf(
                "SC_CLK_TCK"
            )  # with those of its children that have ended
            states += fields[0]
            for task in Path(f"/proc/{process}/task").iterdir():
                left += {*map(int, (task / "children").read_text().split())} - {*ranks}
    return used, states


def ask_all(pid: int, files: list[IO[bytes]]) -> dict:
    """As `ask`, with a child's `ranks` where it has any: each one's line, None for one that is not in the cell.

    Args:
        files: one for the child, or for each of its ranks.
    """
    ranks = {number: process for process, number in ranks_of(pid).items() if 0 <= number < len(files)}
    if not ranks:
        return ask(pid, files[0])
    told = {number: ask(ranks[number], files[number]) for number in sorted(ranks)}
    first = next((answer for answer in told.values() if answer.get("line") is not None), {})
    return {**first, "ranks": {str(number): answer.get("line") for number, answer in told.items()}}
