"""One check in a process of its own: runs the cases and streams what came out and what was seen."""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import again
import compiling
import graphs
import nested
import numpy
import torch
import wire
from answer import Answer, describe_error, usual_names
from guards import GUARD, POISON, UNDEFINED, Arguments, count_pattern, memories, parameter_names, watched
from observing import Observer, ObserverOutsideGraphs, in_threads_too

SLOW = 5.0  # seconds of a first run, compiling included, after which there are none


class Functions(dict):
    """What a driver gets: the answer's functions by name, and a place for numbers that the judge is to see.

    `listen(listener)` has each access of a kernel told to the driver, as the traffic meter's `Listener` says, until
    `listen(None)`. It is None where kernels are not interpreted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, int] = {}
        self.listen: Callable | None = None


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
        if any(case["compiled"] for case in job["cases"]):
            graphs.make_inductor_quick()
        else:
            graphs.hand_back()
        self.undefined = UNDEFINED if job["undefined_lanes"] else None
        self.answer = Answer(job["source"], job["exercise"], self.folder, job["entries"].values())
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
        self.memories: dict = {}  # of cases whose arguments a later call gets other numbers in
        self.results: dict = {}  # what those cases returned, which a later call must leave as it is
        for index, case in enumerate(job["cases"]):
            self.await_turn()
            self.send({"kind": "start", "index": index})
            frame = self.run_case(index, case)
            self.send(frame)
            if frame["error"] and (frame["error"]["out_of_memory"] or self.device.type == "cuda"):
                break  # the next case would meet the same wall, or a device that this error has left unusable
        self.send({"kind": "done"})

    def await_turn(self) -> None:
        """Return when the next case may begin."""

    def run_case(self, index: int, case: dict) -> dict:
        function = self.functions[case["entry"]]
        changed: list[str] = []  # arguments that a driver made, or copied
        handed_back: list[str] = []  # of those, the ones in whose memory a result lies
        functions = Functions()
        if case["driver"]:
            scope = usual_names()
            exec(compile(case["driver"]["source"], "<driver>", "exec"), scope)
            drive = scope[case["driver"]["name"]]
            functions.update({entry: watched(given, changed, handed_back) for entry, given in self.functions.items()})
            names = parameter_names(drive)[1:]

            def call(*values):
                return drive(functions, *values)
        else:
            names, call = parameter_names(function), function
        arguments = Arguments(case["args"], names, self.device, self.memories.get(case["memory_of"]))
        if any(later["memory_of"] == index for later in self.job["cases"]):
            self.memories[index] = arguments
        earlier = self.results.get(case["later_of"])
        before = wire.encode(earlier)
        seen = self.observer(case)
        frame: dict = {"kind": "case", "index": index, "error": None, "result": None}
        started = time.perf_counter()
        result = None
        with contextlib.ExitStack() as stack:
            compiled = stack.enter_context(graphs.counted(self.job, case))
            if case["later_of"] is not None:
                stack.enter_context(_quietly())
            watching = self.watch(stack, seen, case["order"], functions)
            started = time.perf_counter()
            try:
                result = call(*arguments.values)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
            except BaseException as error:
                frame["error"] = describe_error(error, self.answer.path)
            frame["seconds"] = time.perf_counter() - started
        frame |= watching() | compiled
        frame["operations"], frame["noted"] = dict(seen.operations), functions.noted
        frame["largest_allocation"], frame["largest_results"] = seen.largest, dict(seen.largest_results)
        frame["read_by_pytorch"] = {guard.name: seen.read_of(guard.tensor) for guard in arguments.guards}
        if frame["error"] is None or self.device.type == "cpu":
            margins = [note for guard in arguments.guards if (note := guard.margin_written())]
            frame["out_of_bounds"] = [*frame["out_of_bounds"], *margins]
            frame["modified_inputs"] = [
                guard.name for guard in arguments.guards if guard.name not in arguments.writable and guard.modified()
            ]
            frame["modified_inputs"] += changed if case["driver"] else arguments.changed_containers()
        if frame["error"] is None:
            self.collect(frame, result, arguments)
            frame["overwrites"] = int(wire.encode(earlier) != before)
        if frame["error"] is None:
            returned = memories(result)
            given = [guard for guard in arguments.guards if memories(guard.tensor) & returned]
            frame["handed_back"] = handed_back if case["driver"] else [guard.name for guard in given]
            if any(later["later_of"] == index for later in self.job["cases"]):
                # What lies in an argument changes with it, as it must where the argument is there to be written.
                lent = {start for guard in given for start in memories(guard.tensor)}
                self.results[index] = [leaf for leaf in nested.leaves(result) if not memories(leaf) & lent]
        if frame["error"] is None and case["later_of"] is None:
            try:
                with _quietly():
                    self.run_on(frame, case, call, arguments)
            except BaseException as error:
                frame["error"] = describe_error(error, self.answer.path)
        return frame

    @staticmethod
    def observer(case: dict) -> Observer:
        return ObserverOutsideGraphs() if case["compiled"] else Observer()

    def run_on(self, frame, case, call, arguments) -> None:
        """Call an answer that has once come to its end again and again: with the same inputs, then with the clock."""
        sound = not (frame["unwritten"] or frame["guard_values"])
        if self.job["runs"] > 1 and sound and frame["seconds"] < SLOW:
            again.repeat(self.job, self.device, lambda: self.observer(case), frame, call, arguments)
        if case["baseline"] and self.device.type == "cuda":
            frame["timing"], last = again.measure(self.device, case, call, arguments)
            wire.verify(last)
            frame["result_after_timing"] = last

    def watch(self, stack, observing, order, functions):
        """Enter the meters; the function returned gives what they saw once the stack has closed."""
        stack.enter_context(in_threads_too(observing))
        if self.traffic is None:
            stack.enter_context(observing)
            return lambda: {"launches": [], "traffic": {}, "out_of_bounds": []}
        if os.environ.get("TRITON_INTERPRET") == "1":
            meter = stack.enter_context(self.traffic.TrafficMeter(undefined_lanes=self.undefined, order=order))
            functions.listen = meter.listen
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
                    **_launched(report.launches),
                    "traffic": traffic,
                    "out_of_bounds": accesses,
                    "undefined_loads": list(report.undefined_loads),
                    "contended": report.contended_bytes,
                    "variants": variants,
                }

            return metered
        launches = stack.enter_context(self.traffic.record_launches())
        stack.enter_context(observing)
        return lambda: {**_launched(launches), "traffic": {}, "out_of_bounds": []}

    def collect(self, frame, result, arguments) -> None:
        """Put the result and what was written in place into the frame, or say why it cannot be sent."""
        written = {name: guard.tensor for name, guard in arguments.writable.items()}
        try:
            wire.verify(result)  # an unusable value is the answer's fault, and named as such
            if self.job["runs"] > 1:  # which may write into the same memory
                result, written = again.copied(result), again.copied(written)
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
        frame["not_contiguous"] = sum(not tensor.is_contiguous() for tensor in _tensors([result]))
        frame["unwritten"] = frame["guard_values"] = frame["undefined_values"] = 0
        for tensor in _tensors([result, written]):
            frame["unwritten"] += count_pattern(tensor, POISON)
            frame["guard_values"] += count_pattern(tensor, GUARD)
            frame["undefined_values"] += count_pattern(tensor, UNDEFINED)


def _launched(launches) -> dict:
    """The kernels launched, and how many programs the largest launch had."""
    return {
        "launches": [launch.kernel for launch in launches],
        "largest_grid": max((math.prod(launch.grid) for launch in launches), default=0),
    }


@contextlib.contextmanager
def _quietly():
    """What an answer prints it has printed in its first run."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def _tensors(value):
    return (leaf for leaf in nested.leaves(value) if isinstance(leaf, torch.Tensor))
