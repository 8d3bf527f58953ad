"""What each program of a function's launches reads and writes, access by access, until the end or a limit.

Where this process interprets, the function runs here, on copies of its tensors; where kernels are compiled for a GPU,
in a process of its own that interprets. A clock, a number of programs and a number of elements bound it, so that a loop
without an end costs seconds: what was seen until then is kept, with a sentence that says why it stopped.
"""

import contextlib
import linecache
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter import resident
from course_lib.hardware.meter.accesses import Access, AccessLog, LaunchSeen, Program, Tensor
from course_lib.hardware.meter.elsewhere import found, located
from course_lib.hardware.meter.traffic import MeterUnavailable, TrafficMeter, is_own
from course_lib.hardware.meter.traffic.tensors import span_bytes

SECONDS = 10
MOST_PROGRAMS = 1024  # of a launch
MOST_ACCESSES = 50_000
MOST_ELEMENTS = 8_000_000  # reached by all accesses together: 64 MB of positions


def log_accesses(function: Callable, *arguments, **named) -> AccessLog:
    """Call `function(*arguments, **named)` in the interpreter and keep each access of its kernels.

    Raises:
        MeterUnavailable: this Triton cannot be metered, or the other process failed; the text says why.
        ValueError: the function's source is not to be found.
    """
    if interpreting():
        return _log_here(function, arguments, named)
    job = {**located(function), "arguments": copied(arguments, {}), "named": copied(named, {})}
    return resident.ask(_log_there, job, 2 * SECONDS, "cannot be run")


class Stopped(BaseException):
    """A limit is reached. No Exception, so that neither Triton nor an answer takes it for its own."""


class _Listener:
    """The meter's listener."""

    def __init__(self, deadline: float):
        self.launches: list[LaunchSeen] = []
        self._deadline, self._accesses, self._elements = deadline, 0, 0
        self._numbers: dict[int, int] = {}  # by id of the argument
        self._programs: set[Program] = set()

    def begun(self, kernel: str, arguments: list) -> None:
        memories = {address: number for number, address in
                    enumerate(dict.fromkeys(argument.view.storage_address for argument in arguments))}  # fmt: skip
        tensors = [
            Tensor(argument.parameter, tuple(view.tensor.shape), tuple(view.tensor.stride()),
                   str(view.tensor.dtype).removeprefix("torch."), view.item_bytes,
                   memories[view.storage_address], view.start // view.item_bytes)
            for argument in arguments for view in [argument.view]
        ]  # fmt: skip
        self._numbers = {id(argument): number for number, argument in enumerate(arguments)}
        self._programs = set()
        self.launches.append(LaunchSeen(kernel, tensors))

    def launched(self, kernel: str, grid: Program) -> None:
        if self.launches:
            self.launches[-1].grid = grid

    def multiplied(self, left, right, bits) -> None:
        pass

    def accessed(self, kind: str, program: Program, item_bytes: int, reached: list, file: str, line: int) -> None:
        launch = self.launches[-1]
        self._programs.add(program)
        if len(self._programs) > MOST_PROGRAMS:
            count = int(np.prod(launch.grid, dtype=np.int64))
            raise Stopped(
                f"{launch.kernel} is launched with {count:,} programs; the first {MOST_PROGRAMS:,} were run. Give the "
                "function smaller tensors to see all."
            )
        inside: dict[int, np.ndarray] = {}
        outside: dict[int, np.ndarray] = {}
        unknown = 0
        for argument, elements, allowed in reached:
            if argument is None:
                unknown += elements.size
                continue
            number = self._numbers[id(argument)]
            wide = item_bytes // argument.view.item_bytes
            if wide > 1:  # the pointer was cast to a larger type
                elements = (elements[:, None] + np.arange(wide)).ravel()
                allowed = np.repeat(allowed, wide)
            inside[number] = elements[allowed]
            if not allowed.all():
                outside[number] = elements[~allowed]
            self._elements += elements.size
        text = linecache.getline(file, line).strip()
        launch.accesses.append(Access(kind, program, line, text, item_bytes, inside, outside, unknown))
        self._accesses += 1
        if self._accesses >= MOST_ACCESSES or self._elements >= MOST_ELEMENTS:
            raise Stopped(
                f"the kernels made {self._accesses:,} loads and stores of {self._elements:,} elements, as many as are "
                "kept. A loop may have no end; if yours has one, give the function smaller tensors."
            )
        if time.monotonic() > self._deadline:
            raise Stopped(too_long())


def too_long(seconds: float = SECONDS) -> str:
    return (
        f"it was still running after {seconds:g} seconds. A loop may have no end; if yours has one, give the function "
        "smaller tensors."
    )


def _log_here(function: Callable, arguments: tuple, named: dict) -> AccessLog:
    listener = _Listener(time.monotonic() + SECONDS)
    log = AccessLog(getattr(function, "__name__", "the function"), listener.launches)
    copies: dict[int, torch.Tensor] = {}
    arguments, named = copied(arguments, copies), copied(named, copies)
    try:
        with TrafficMeter(listener=listener), ended_after(SECONDS):
            function(*arguments, **named)
    except Stopped as reached:
        log.stopped = str(reached)
    except MeterUnavailable:
        raise
    except Exception as error:
        log.stopped = error_in_words(error)
    return log


def error_in_words(error: BaseException) -> str:
    """The first cause, since Triton wraps what a kernel raises, and the learner's line that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    said = f"it raised {type(error).__name__}{': ' + text[:300] if text else ''}"
    own = [
        (frame.filename, frame.lineno, (frame.line or "").strip())
        for frame in traceback.extract_tb(error.__traceback__)
        if is_own(frame.filename) and not _is_of_a_library(frame.filename)
    ]
    return f"{said} (line {own[-1][1]}: `{own[-1][2]}`)" if own else said


def _is_of_a_library(filename: str) -> bool:
    return "site-packages" in filename or filename == __file__


@contextlib.contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Ends the block, also in a loop that loads and stores nothing, where the system and the thread allow an alarm."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise Stopped(too_long(seconds))

    before = signal.signal(signal.SIGALRM, ring)
    began = time.monotonic()
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:
            signal.setitimer(signal.ITIMER_REAL, max(0.01, remaining - (time.monotonic() - began)), interval)


def copied(value, copies: dict[int, torch.Tensor]):
    """The value with its tensors copied to the CPU, strides kept: watching changes nothing of the caller's."""
    if isinstance(value, torch.Tensor):
        if id(value) not in copies:
            tensor = value.detach()
            span = span_bytes(tensor) // tensor.element_size()
            memory = tensor.as_strided((span,), (1,)).clone().cpu()
            copies[id(value)] = memory.as_strided(tensor.shape, tensor.stride(), 0)
        return copies[id(value)]
    if type(value) in (tuple, list):
        return type(value)(copied(item, copies) for item in value)
    if type(value) is dict:
        return {key: copied(item, copies) for key, item in value.items()}
    return value


def _log_there(job: dict, folder: Path) -> AccessLog:
    """The other process: find the function, and log its accesses."""
    return log_accesses(found(job, folder), *job["arguments"], **job["named"])
