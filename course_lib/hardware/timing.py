"""Time a function so that the figure can be believed.

Warm up first (compilation, caches, clocks), flush the cache before every run, repeat, report the median and the
spread. On a GPU the time between two events on its stream is taken, so what the host does meanwhile does not count; on
a CPU the wall clock.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Mapping

import torch

from course_lib.hardware.device import default_device, machine
from course_lib.hardware.units import format_seconds

# Writing this much leaves nothing of an earlier tensor in any GPU's L2 (126 MB at most today).
GPU_FLUSH_BYTES = 256 * 2**20
MAX_REPEATS = 1000


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: the median, the 10th and 90th percentile as its spread, and the fastest."""

    median: float
    low: float
    high: float
    repeats: int
    best: float

    @property
    def spread(self) -> float:
        """(high - low) / median: 0.02 is a quiet machine, 0.5 a busy one."""
        return (self.high - self.low) / self.median

    def bandwidth(self, bytes_moved: float) -> float:
        """Bytes/s at the median."""
        return bytes_moved / self.median

    def rate(self, flops: float) -> float:
        """FLOP/s at the median."""
        return flops / self.median

    def __str__(self):
        spread = f"{format_seconds(self.low)} to {format_seconds(self.high)}"
        return f"{format_seconds(self.median)} ({spread}, {self.repeats} runs)"


def measure(function, *, warmup=3, repeats=None, seconds=0.3, flush=None, device=None) -> Timing:
    """Time `function()`.

    Args:
        function: called with no arguments. Allocate its outputs outside when they are not what you want to time.
        warmup: calls before the clock starts, at least 1.
        repeats: timed calls; None fits them into `seconds` (at least 5, at most 1000).
        seconds: the time to spend when `repeats` is None.
        flush: empty the cache before every timed call; None means yes on a GPU, no on a CPU.
        device: "cuda" or "cpu"; None means where the course's kernels run.

    Raises:
        TypeError: `function` cannot be called.
        ValueError: another argument makes no sense; the message names it.
    """
    device = check_arguments(function, warmup, repeats, seconds, device)
    time_once, flush_buffer = clock(device, flush)
    for _ in range(warmup):
        function()
    if repeats is None:
        started = time.perf_counter()
        estimate = time_once(function, flush_buffer, 1)[0]
        estimate = max(estimate, time.perf_counter() - started, 1e-7)  # the flush takes its part of the budget too
        repeats = int(min(MAX_REPEATS, max(5, seconds / estimate)))
    return summarize(time_once(function, flush_buffer, repeats))


def measure_together(functions, *, rounds=10, seconds=0.3, flush=None, device=None) -> dict[str, Timing]:
    """Time functions that are to be compared: in many short turns, every round in another order.

    A GPU at its power limit gets slower as it gets warmer, and a kernel pays for the appetite of the one that ran
    before it. On an H200 two kernels that are even in alternation came out 6 % apart, timed one after the other.

    Args:
        functions: {name: function}, each called with no arguments.
        rounds: turns of each function, at least 2.
        seconds: the time to spend on each function, over all rounds.
        flush, device: see `measure`.

    Returns {name: Timing}, in the order of `functions`.

    Raises:
        TypeError: `functions` is not a mapping, or something in it cannot be called.
        ValueError: `functions` is empty, or another argument makes no sense; the message names it.
    """
    if not isinstance(functions, Mapping):
        raise TypeError(
            f"functions is a {type(functions).__name__}; pass {{name: function}}, e.g. "
            "measure_together({'mine': mine, 'theirs': theirs})."
        )
    if not functions:
        raise ValueError("functions is empty; pass at least one {name: function}.")
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 2:
        raise ValueError(f"rounds is {rounds!r}; it must be a whole number of at least 2.")
    repeats = {
        name: measure(function, seconds=seconds / rounds, flush=flush, device=device).repeats
        for name, function in functions.items()
    }
    time_once, flush_buffer = clock(torch.device(device) if device is not None else default_device(), flush)
    taken: dict[str, list[float]] = {name: [] for name in functions}
    order, chance = list(functions), random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            functions[name]()
            taken[name] += time_once(functions[name], flush_buffer, repeats[name])
    return {name: summarize(seconds) for name, seconds in taken.items()}


def clock(device: torch.device, flush: bool | None):
    """(what times calls on this device, the buffer that flushes its cache before each, or None)."""
    flush_buffer = make_flush_buffer(device) if flush or (flush is None and device.type == "cuda") else None
    return gpu_seconds if device.type == "cuda" else cpu_seconds, flush_buffer


def check_arguments(function, warmup, repeats, seconds, device) -> torch.device:
    if not callable(function):
        raise TypeError(f"function is {function!r}; pass something to call, e.g. measure(lambda: kernel(x)).")
    for name, value, least in (("warmup", warmup, 1), ("repeats", repeats, 1)):
        if name == "repeats" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
    if not (isinstance(seconds, (int, float)) and 0 < seconds < math.inf):
        raise ValueError(f"seconds is {seconds!r}; it must be a positive, finite number of seconds.")
    device = torch.device(device) if device is not None else default_device()
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; only 'cpu' and 'cuda' can be timed.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch sees no GPU here; use 'cpu'.")
    return device


def make_flush_buffer(device: torch.device) -> torch.Tensor:
    """A buffer to overwrite, larger than the last cache of the device."""
    if device.type == "cuda":
        size = max(GPU_FLUSH_BYTES, 2 * (machine().l2_bytes or 0))
    else:
        largest = max((size for _, size in machine().cpu_caches), default=32 * 2**20)
        size = 2 * largest
    return torch.empty(size // 4, dtype=torch.int32, device=device)


def gpu_seconds(function, flush_buffer, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, between events on the GPU's current stream."""
    starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
    torch.cuda.synchronize()
    for start, end in zip(starts, ends):
        if flush_buffer is not None:
            flush_buffer.zero_()  # also keeps the GPU busy while the host enqueues what follows
        start.record()
        function()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in zip(starts, ends)]


def cpu_seconds(function, flush_buffer, repeats: int) -> list[float]:
    """Seconds of each of `repeats` calls, by the wall clock."""
    seconds = []
    for _ in range(repeats):
        if flush_buffer is not None:
            flush_buffer.zero_()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds


def summarize(seconds: list[float]) -> Timing:
    """Median and 10th/90th percentile of a list of durations."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(
        median=statistics.median(ordered),
        low=ordered[math.floor(0.1 * last)],
        high=ordered[math.ceil(0.9 * last)],
        repeats=len(ordered),
        best=ordered[0],
    )
