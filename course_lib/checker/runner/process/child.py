"""One check in a process of its own: runs the cases and streams what came out and what was seen."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import statistics
import struct
import threading
import time
import warnings
from pathlib import Path

import compiling
import nested
import numpy
import torch
import wire
from answer import Answer, describe_error, usual_names
from guards import GUARD, POISON, UNDEFINED, Arguments, count_pattern, fill
from torch.utils._python_dispatch import TorchDispatchMode

SLOW = 5.0  # seconds of a first run, compiling included, after which there are none
WARM_UP_RUNS = 3


def observer():
    """A mode that records PyTorch operations and poisons memory that is handed out uninitialised."""

    class Observer(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.operations, self.largest = collections.Counter(), 0

        def __torch_dispatch__(self, function, types_, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            name = function.overloadpacket.__name__
            self.operations[name] += 1
            if isinstance(result, torch.Tensor) and result.layout == torch.strided:
                if "empty" in name and result.numel():
                    flat = torch.as_strided(
                        result, (result.untyped_storage().nbytes() // result.element_size(),), (1,), 0
                    )
                    fill(flat, POISON)
                if function.is_view is False and not name.endswith("_"):
                    self.largest = max(self.largest, result.numel())
            return result

    return Observer()


@contextlib.contextmanager
def _in_threads_too(observing):
    """A dispatch mode holds for the thread that enters it alone; here every thread that is started enters it."""
    run = threading.Thread.run

    def observed(thread):
        with observing:
            run(thread)

    threading.Thread.run = observed
    try:
        yield
    finally:
        threading.Thread.run = run


def _parameter_names(function) -> list[str]:
    code = getattr(function, "__code__", None)
    return list(code.co_varnames[: code.co_argcount]) if code is not None else []


class Child:
    """Runs one job in a process of its own and streams frames to the worker."""

    def __init__(self, traffic, pipe: int, folder: Path):
        self.traffic, self.pipe, self.folder = traffic, pipe, folder

    def send(self, frame: dict) -> None:
        message = wire.encode(frame)
        data = struct.pack("<Q", len(message)) + message
        view = memoryview(data)
        while view:
            view = view[os.write(self.pipe, view[: 1 << 20]) :]

    def run(self, job: dict) -> None:
        torch.set_num_threads(1)
        self.job = job
        # The interpreter's overflows are the answer's to show, not the log's.
        numpy.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
        self.device = torch.device(job["device"])
        if "compile" in job:
            self.send(compiling.read(self.traffic, job, self.folder))
            self.send({"kind": "done"})
            return
        self.undefined = UNDEFINED if job["undefined_lanes"] else None
        self.answer = Answer(job["source"], job["exercise"], self.folder)
        try:
            namespace = self.answer.run()
        except BaseException as error:
            self.send({"kind": "cell_error", "error": describe_error(error, self.answer.path)})
            return
        missing = [name for name in job["entries"].values() if name not in namespace]
        if missing:
            self.send({"kind": "missing", "names": missing})
            return
        self.functions = {entry: namespace[name] for entry, name in job["entries"].items()}
        not_callable = [name for name, value in self.functions.items() if not callable(value)]
        if not_callable:
            self.send({"kind": "not_callable", "names": not_callable})
            return
        for index, case in enumerate(job["cases"]):
            self.send({"kind": "start", "index": index})
            frame = self.run_case(index, case)
            self.send(frame)
            if frame["error"] and (frame["error"]["out_of_memory"] or self.device.type == "cuda"):
                break  # the next case would meet the same wall, or a device that this error has left unusable
        self.send({"kind": "done"})

    def run_case(self, index: int, case: dict) -> dict:
        function = self.functions[case["entry"]]
        if case["driver"]:
            scope = usual_names()
            exec(compile(case["driver"]["source"], "<driver>", "exec"), scope)
            drive, functions = scope[case["driver"]["name"]], dict(self.functions)
            names = _parameter_names(drive)[1:]

            def call(*values):
                return drive(functions, *values)
        else:
            names, call = _parameter_names(function), function
        arguments = Arguments(case["args"], names, self.device)
        seen = observer()
        frame: dict = {"kind": "case", "index": index, "error": None, "result": None}
        started = time.perf_counter()
        result = None
        with contextlib.ExitStack() as stack:
            watching = self.watch(stack, seen)
            started = time.perf_counter()
            try:
                result = call(*arguments.values)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except BaseException as error:
                frame["error"] = describe_error(error, self.answer.path)
            frame["seconds"] = time.perf_counter() - started
        frame |= watching()
        frame["operations"] = dict(seen.operations)
        frame["largest_allocation"] = seen.largest
        if frame["error"] is None or self.device.type == "cpu":
            margins = [note for guard in arguments.guards if (note := guard.margin_written())]
            frame["out_of_bounds"] = [*frame["out_of_bounds"], *margins]
            frame["modified_inputs"] = [
                guard.name for guard in arguments.guards if guard.name not in arguments.writable and guard.modified()
            ]
        if frame["error"] is None:
            self.collect(frame, result, arguments)
        if frame["error"] is None:
            try:
                with _quietly():
                    self.run_on(frame, case, call, arguments)
            except BaseException as error:
                frame["error"] = describe_error(error, self.answer.path)
        return frame

    def run_on(self, frame, case, call, arguments) -> None:
        """Call an answer that has once come to its end again and again: with the same inputs, then with the clock."""
        sound = not (frame["unwritten"] or frame["guard_values"])
        if self.job["runs"] > 1 and sound and frame["seconds"] < SLOW:
            self.repeat(frame, call, arguments)
        if case["baseline"] and self.device.type == "cuda":
            frame["timing"], again = self.time(case, call, arguments)
            wire.verify(again)
            frame["result_after_timing"] = again

    def watch(self, stack, observing):
        """Enter the meters; the function returned gives what they saw once the stack has closed."""
        stack.enter_context(_in_threads_too(observing))
        if self.traffic is None:
            stack.enter_context(observing)
            return lambda: {"launches": [], "traffic": {}, "out_of_bounds": []}
        if os.environ.get("TRITON_INTERPRET") == "1":
            meter = stack.enter_context(self.traffic.TrafficMeter(undefined_lanes=self.undefined))
            asked = self.job["records_variants"]
            variants = stack.enter_context(self.traffic.record_variants()) if asked else []
            stack.enter_context(observing)

            def metered():
                report = meter.report()
                traffic = {
                    row.name: {
                        "loaded": row.loaded_bytes,
                        "stored": row.stored_bytes,
                        "atomic": row.atomic_bytes,
                        "distinct_loaded": row.distinct_loaded_bytes,
                        "distinct_stored": row.distinct_stored_bytes,
                    }
                    for row in report.tensors
                }
                accesses = [str(access) for access in report.out_of_bounds]
                return {
                    "launches": [launch.kernel for launch in report.launches],
                    "traffic": traffic,
                    "out_of_bounds": accesses,
                    "undefined_loads": list(report.undefined_loads),
                    "variants": variants,
                }

            return metered
        launches = stack.enter_context(self.traffic.record_launches())
        stack.enter_context(observing)
        return lambda: {"launches": [launch.kernel for launch in launches], "traffic": {}, "out_of_bounds": []}

    def collect(self, frame, result, arguments) -> None:
        """Put the result and what was written in place into the frame, or say why it cannot be sent."""
        written = {name: guard.tensor for name, guard in arguments.writable.items()}
        try:
            wire.verify(result)  # an unusable value is the answer's fault, and named as such
            if self.job["runs"] > 1:  # which may write into the same memory
                result, written = _copy(result), _copy(written)
            frame["result"], frame["written"] = result, written
        except Exception as error:
            known = isinstance(error, wire.WireError)
            frame["error"] = {
                "type": "TypeError",
                "text": f"the answer returned {error if known else 'a value that cannot be read'}",
                "outer": "",
                "line": None,
                "out_of_memory": False,
                "unusable": True,
            }
            return
        frame["unwritten"] = frame["guard_values"] = frame["undefined_values"] = 0
        for tensor in _tensors([result, written]):
            frame["unwritten"] += count_pattern(tensor, POISON)
            frame["guard_values"] += count_pattern(tensor, GUARD)
            frame["undefined_values"] += count_pattern(tensor, UNDEFINED)

    def repeat(self, frame, call, arguments) -> None:
        """Call again with the same inputs, until all runs or the time are over: programs that race show here.

        Puts the number of further runs into the frame, of those whose result differs in a bit from the first, of those
        that differ from the run before, and the result that lies farthest from the first.
        """
        first = before = [frame["result"], frame["written"]]
        farthest, until = -1.0, time.perf_counter() + self.job["repeat_seconds"]
        frame["repeats"] = frame["differing"] = frame["changes"] = 0
        while frame["repeats"] < self.job["runs"] - 1 and time.perf_counter() < until:
            for guard in arguments.guards:
                guard.restore()
            seen = observer()  # fresh memory is poisoned again, so that no run finds what the last one left there
            with _in_threads_too(seen), seen:
                result = call(*arguments.values)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            frame["repeats"] += 1
            again = [result, {name: guard.tensor for name, guard in arguments.writable.items()}]
            distance = _distance(again, first)
            frame["changes"] += _distance(again, before) is not None
            if distance is None:
                before = first
                continue
            wire.verify(result)
            frame["differing"] += 1
            before = _copy(again)
            if distance > farthest:
                farthest = distance
                frame["result_repeated"], frame["written_repeated"] = before

    def time(self, case, call, arguments):
        """Median seconds of the answer and the baseline, in turn, and the answer's last result.

        Before every call the L2 cache is flushed and the inputs are new: each tensor rolled along its last dimension,
        by another of the case's `turns` and differently from the tensors before it. What was kept of an earlier call
        is then no answer.
        """
        scope = usual_names()
        exec(compile(case["baseline"]["source"], "<baseline>", "exec"), scope)
        baseline = scope[case["baseline"]["name"]]
        flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)

        inputs = [guard for guard in arguments.guards if guard.tensor.is_floating_point()]

        def turn(by):
            for number, guard in enumerate(inputs, start=1):
                guard.tensor.copy_(guard.first.roll(number * by, -1))

        def once(function):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            function(*arguments.values)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e-3

        times = {"answer": [], "baseline": []}
        *rounds, last = case["turns"]
        for by in rounds:
            for name, function in (("answer", call), ("baseline", baseline)):
                turn(by)  # also before the second of the two, which then starts as the first one did
                times[name].append(once(function))
        turn(last)
        again = call(*arguments.values)
        torch.cuda.synchronize()
        return {name: statistics.median(values[WARM_UP_RUNS:]) for name, values in times.items()}, again


@contextlib.contextmanager
def _quietly():
    """What an answer prints it has printed in its first run."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _copy(value, name=""):
    """A value whose tensors are the learner's no more."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else nested.rebuilt(value, _copy)


def _distance(again, first) -> float | None:
    """The largest difference of two results' elements, infinite where one is NaN or of another kind; None for the same
    bits."""
    again, first = list(nested.leaves(again)), list(nested.leaves(first))
    if list(map(_kind, again)) != list(map(_kind, first)):
        return math.inf
    pairs = [pair for pair in zip(again, first) if isinstance(pair[0], torch.Tensor)]
    unequal = [(a, b) for a, b in pairs if not torch.equal(_bytes(a), _bytes(b))]
    if not unequal:
        return None
    return max(_farthest(a.double(), b.double()) for a, b in unequal)


def _farthest(a, b) -> float:
    same = (a == b) | (a.isnan() & b.isnan())  # also infinities, whose difference is NaN
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf)).max())


def _kind(leaf):
    """What must be the same of two leaves before their elements are compared; of a plain value all of it."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def _bytes(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensors(value):
    return (leaf for leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor))
