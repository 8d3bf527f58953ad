"""What the meter sees of a function's kernels: launches, bytes, sectors, and what the compiler would be given."""

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from course_lib.hardware.meter.access_log import Stopped, copied, ended_after, error_in_words, too_long
from course_lib.hardware.meter.traffic import MeterUnavailable, TrafficMeter, triton_internals

SECTOR_BYTES = 32  # what a GPU fetches at least
MOST_VARIANTS = 8  # kernels that are compiled for one card


@dataclass
class KernelSeen:
    """One kernel of a function: all of its launches with the same types and constants."""

    name: str
    grid: tuple[int, int, int] = (1, 1, 1)  # of its largest launch
    launches: int = 0
    requested_bytes: int = 0  # active lanes times item size, loads and stores
    sector_bytes: int = 0  # 32 for each sector that an access touches
    atomic_lanes: int = 0
    atomic_addresses: int = 0  # distinct ones, access by access
    request: dict | None = field(default=None, repr=False)  # for the compiler; None where it cannot be written down

    @property
    def programs(self) -> int:
        return int(np.prod(self.grid, dtype=np.int64))


@dataclass
class Seen:
    """What one call of a function did in the interpreter, until its end or a limit."""

    function: str
    kernels: list[KernelSeen] = field(default_factory=list)
    least_bytes: int = 0  # each byte that was touched counted once: read, written or both
    times_read: dict[str, float] = field(default_factory=dict)  # tensor -> how often each byte was read
    outside: list[str] = field(default_factory=list)  # accesses outside a tensor, in words
    stopped: str = ""  # why the call did not end by itself; "" where it did


class _Counter:
    """The meter's listener: bytes and sectors by kernel, and a clock that ends what has no end."""

    def __init__(self, seen: Seen, seconds: float):
        self._seen, self._seconds = seen, seconds
        self._deadline = time.monotonic() + seconds
        self._by_variant: dict[str, KernelSeen] = {}
        self._current = KernelSeen("?")

    def called(self, kernel, arguments: tuple, named: dict) -> None:
        """Before a launch: which kernel it is, and what a compiler would be given for it."""
        name = kernel.fn.__name__
        request = _request(kernel, arguments, named)
        key = repr((name, {**(request or {}), "kernel": None}))
        if key not in self._by_variant:
            self._by_variant[key] = KernelSeen(name, request=request)
            self._seen.kernels.append(self._by_variant[key])
        self._current = self._by_variant[key]

    def begun(self, kernel: str, arguments: list) -> None:
        pass

    def launched(self, kernel: str, grid: tuple[int, int, int]) -> None:
        self._current.launches += 1
        if int(np.prod(grid, dtype=np.int64)) > self._current.programs or self._current.launches == 1:
            self._current.grid = grid

    def multiplied(self, left, right, bits) -> None:
        pass

    def accessed(self, kind: str, program, item_bytes: int, reached: list, file: str, line: int) -> None:
        kernel = self._current
        for argument, elements, allowed in reached:
            if argument is None:
                continue
            places = argument.view.start + elements[allowed] * argument.view.item_bytes
            sectors = np.unique(places // SECTOR_BYTES).size
            times = 2 if kind == "atomic" else 1
            kernel.requested_bytes += times * places.size * item_bytes
            kernel.sector_bytes += times * max(sectors * SECTOR_BYTES, 0)
            if kind == "atomic":
                kernel.atomic_lanes += places.size
                kernel.atomic_addresses += np.unique(places).size
        if time.monotonic() > self._deadline:
            raise Stopped(too_long(self._seconds))


def _request(kernel, arguments: tuple, named: dict) -> dict | None:
    """The launch as `compile_many` takes it, without an architecture; None where it has no plain form."""
    try:
        kinds, constants, options = triton_internals.bound_launch(kernel, arguments, named)
    except TypeError:
        return None
    if any(not isinstance(kind, str) for kind in kinds.values()) or any(len(path) > 1 for path, _ in constants):
        return None  # tuples
    names = list(kinds)
    parameters = inspect.signature(kernel.fn).parameters
    given = {name: value for name, value in named.items() if name in parameters}
    values = inspect.signature(kernel.fn).bind_partial(*arguments, **given).arguments
    options = {name: value for name, value in options.items() if type(value) in (bool, int)}
    return {
        "kernel": kernel,
        "signature": {name: kind for name, kind in kinds.items() if kind != "constexpr"},
        "constexprs": {names[path[0]]: value for path, value in constants},
        "divisible": [name for name, kind in kinds.items() if kind != "constexpr" and _divisible(values.get(name))],
        "num_warps": options.pop("num_warps", 4),
        "num_stages": options.pop("num_stages", 3),
        **options,
    }


def _divisible(value) -> bool:
    """Whether Triton's launcher tells the compiler that an argument is a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % 16 == 0
    return type(value) is int and value % 16 == 0


def see(function: Callable, arguments: tuple, named: dict, seconds: float) -> Seen:
    """Call `function` in the interpreter, on copies of its tensors, for at most `seconds`.

    Raises MeterUnavailable where this Triton cannot be metered.
    """
    seen = Seen(getattr(function, "__name__", "the function"))
    counter = _Counter(seen, seconds)
    copies: dict[int, torch.Tensor] = {}
    arguments, named = copied(arguments, copies), copied(named, copies)
    meter = TrafficMeter(listener=counter)
    try:
        with meter, triton_internals.interpreted_calls(counter.called), ended_after(seconds):
            function(*arguments, **named)
    except Stopped as reached:
        seen.stopped = str(reached)
    except MeterUnavailable:
        raise
    except Exception as error:
        seen.stopped = error_in_words(error)
    report = meter.report()
    for row in report.tensors:
        seen.least_bytes += row.distinct_loaded_bytes + row.distinct_stored_bytes
        if row.loaded_bytes:
            seen.times_read[row.name] = max(seen.times_read.get(row.name, 0.0), row.times_read)
    seen.outside = [str(record) for record in report.out_of_bounds]
    return seen
