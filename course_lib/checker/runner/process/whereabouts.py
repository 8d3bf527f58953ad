"""Where an answer is that does not end: the child's Python stack, written at a signal even while it computes in C."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import time
from typing import IO

SIGNAL = getattr(signal, "SIGUSR2", None)  # LLVM, which Triton compiles with, keeps SIGUSR1 for itself
PATIENCE = 0.5  # seconds for the child to write its stack
MOST = 64 << 10  # bytes of it that are read
_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line (?P<line>\d{1,7})\b', re.MULTILINE)
_CELL = re.compile(r"/exercise_\w+\.py$")
_COMPILER = re.compile(r"/triton/(compiler|backends)/")


def tell_when_asked(file: IO[bytes]) -> None:
    """From now on this process answers `ask` by writing its stack to `file`; where it cannot, it is not asked."""
    if SIGNAL is not None and hasattr(faulthandler, "register"):
        faulthandler.register(SIGNAL, file=file, all_threads=False)


def ask(pid: int, file: IO[bytes]) -> dict:
    """`line`: the line of the cell that a child is at, or None; `compiling`: whether Triton compiles there.

    What the child writes an answer may have written: it is good for a message, and for nothing else.
    """
    if SIGNAL is None or not hasattr(faulthandler, "register"):
        return {}
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, SIGNAL)
    text, deadline = "", time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        before, text = text, os.pread(file.fileno(), MOST, 0).decode("utf-8", "replace")
        if text and text == before:
            break
        time.sleep(0.02)
    frames = _FRAME.findall(text)  # the innermost first
    lines = [int(line) for path, line in frames if _CELL.search(path)]
    return {"line": lines[0] if lines else None, "compiling": any(_COMPILER.search(path) for path, _ in frames)}
