"""Where a token's time goes: how long each kind of work takes while a `Speaker` writes.

Each kind is a window around the calls that do it. On a CPU a stopwatch takes the time in it, less that in windows
inside. On a GPU it is the time of the kernels that were launched in it, by torch.profiler; the rest of a token's time
the GPU waits, mostly for the next launch. That is nine tenths of it where a `Speaker` launches SmolLM2's kernels one by
one: 30.9 ms of 33.8 with PyTorch alone, 7.5 of 8.1 with everything switched on (H200, PyTorch 2.11, Triton 3.6,
float16, November 2026).
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from course_lib.serving.switched import FewRows, Speaker
from course_lib.serving.switches import Row, Subject

KINDS = ("products", "attention", "norms, rotation, gates", "sampling")
LAUNCHES, ON_GPU = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


def before_and_after(asked: Subject, rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`token_time` of the table's first line and of its last that wrote more than one token, by their names."""
    chosen = {"PyTorch alone": rows[0], "all switched on": [row for row in rows if row.seconds > 0][-1]}
    return {name: token_time(Speaker(asked.model, row.parts, asked.layers), asked.prompt, asked.new_tokens, row.seconds)
            for name, row in chosen.items()}  # fmt: skip


def token_time(speaker: Speaker, prompt: Sequence[int], new_tokens: int, seconds: float) -> dict[str, float]:
    """Seconds of a token after the first run's, by kind and with "the rest" or "waiting"; they add up to `seconds`.

    Args:
        speaker: it has written before, so that its kernels are compiled.
        prompt, new_tokens: as `Speaker.write` takes them; at least two runs of the model.
        seconds: of a token, as it was measured without windows, which cost time too.
    """
    runs = speaker.write(prompt, new_tokens)
    next(runs)  # the prompt
    if speaker.model.device.type == "cuda":
        with (
            profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen,
            windows_of(speaker, record_function),
        ):
            tokens = sum(map(len, runs))
        share, spent, rest = 1 / tokens, kernel_times(events_of(seen)), "waiting"
    else:
        watch, begin = Stopwatch(), time.perf_counter()
        with windows_of(speaker, watch):
            list(runs)
        share, spent, rest = seconds / (time.perf_counter() - begin), watch.spent, "the rest"
    times = {kind: share * spent.get(kind, 0.0) for kind in KINDS}
    return times | {rest: max(0.0, seconds - sum(times.values()))}


class Stopwatch:
    """Windows that take the time. `spent`: seconds in each kind, without those in windows inside."""

    def __init__(self) -> None:
        self.spent = defaultdict[str, float](float)
        self._inside = [0.0]  # of each open window the seconds of those inside it

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """A window of this kind."""
        begin = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - begin
            self.spent[kind] += whole - self._inside.pop()
            self._inside[-1] += whole


@contextmanager
def windows_of(speaker: Speaker, window: Callable[[str], AbstractContextManager]) -> Iterator[None]:
    """Let a speaker open windows, also around each product of its model."""
    windowless, speaker.window = speaker.window, window
    products = [module for module in speaker.model.modules() if isinstance(module, (nn.Linear, FewRows))]
    open_: list[AbstractContextManager] = []

    def enter(*_) -> None:
        open_.append(window("products"))
        open_[-1].__enter__()

    def leave(*_) -> None:
        open_.pop().__exit__(None, None, None)

    handles = [module.register_forward_pre_hook(enter) for module in products]
    handles += [module.register_forward_hook(leave) for module in products]
    try:
        yield
    finally:
        speaker.window = windowless
        for handle in handles:
            handle.remove()


def events_of(profiler: profile) -> list[dict]:
    """What was seen, as dicts with cat, name, ts and dur in microseconds, and args."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def kernel_times(events: Sequence[dict]) -> dict[str, float]:
    """Seconds of the kernels and copies that were launched in each window, and in none inside it.

    events: as of `events_of`. What runs on the GPU has an args["correlation"], and so has its launch.
    """
    spent, durations = defaultdict[str, float](float), defaultdict[int, float](float)
    open_: list[dict] = []
    for event in events:
        if event.get("cat") in ON_GPU:
            durations[event["args"]["correlation"]] += event["dur"]
    begun = [event for event in events if event.get("cat") in LAUNCHES
             or event.get("cat") == "user_annotation" and event["name"] in KINDS]  # fmt: skip
    for event in sorted(begun, key=lambda event: (event["ts"], -event["dur"])):
        open_ = [window for window in open_ if event["ts"] < window["ts"] + window["dur"]]
        if event["cat"] == "user_annotation":
            open_.append(event)
        elif open_:
            spent[open_[-1]["name"]] += durations[event["args"]["correlation"]] / 1e6
    return spent
