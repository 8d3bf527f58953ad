"""An answer that has come to its end is called again on a GPU: with the same inputs, for races; with the clock."""

from __future__ import annotations

import math
import statistics
import time

import nested
import torch
import wire
from answer import usual_names
from observing import in_threads_too

WARM_UP_RUNS = 3


def repeat(job, device, observe, frame, call, arguments) -> None:
    """Call again with the same inputs, until all runs or the time are over: programs that race show here.

    Puts the number of further runs into the frame, of those whose result differs in a bit from the first, of those
    that differ from the run before, and the result that lies farthest from the first.
    """
    first = before = [frame["result"], frame["written"]]
    farthest, until = -1.0, time.perf_counter() + job["repeat_seconds"]
    frame["repeats"] = frame["differing"] = frame["changes"] = 0
    while frame["repeats"] < job["runs"] - 1 and time.perf_counter() < until:
        for guard in arguments.guards:
            guard.restore()
        seen = observe()  # fresh memory is poisoned again, so that no run finds what the last one left there
        with in_threads_too(seen), seen:
            result = call(*arguments.values)
        if device.type == "cuda":
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
        before = copied(again)
        if distance > farthest:
            farthest = distance
            frame["result_repeated"], frame["written_repeated"] = before


def measure(device, case, call, arguments):
    """Median seconds of the answer and the baseline, in turn, and the answer's last result.

    Before every call the L2 cache is flushed and the inputs are new: each tensor rolled along its last dimension,
    by another of the case's `turns` and differently from the tensors before it. What was kept of an earlier call
    is then no answer.
    """
    scope = usual_names()
    exec(compile(case["baseline"]["source"], "<baseline>", "exec"), scope)
    baseline = scope[case["baseline"]["name"]]
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=device)

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


def copied(value, name=""):
    """A value whose tensors are the learner's no more."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else nested.rebuilt(value, copied)


def _distance(again, first) -> float | None:
    """The largest difference of two results' elements, infinite where one is NaN or of another kind; None for the same
    bits."""
    again, first = list(nested.leaves(again)), list(nested.leaves(first))
    if list(map(_kind, again)) != list(map(_kind, first)):
        return math.inf
    pairs = [pair for pair in zip(again, first) if isinstance(pair[0], torch.Tensor)]
    unequal = [(a, b) for a, b in pairs if not torch.equal(wire.as_bytes(a), wire.as_bytes(b))]
    if not unequal:
        return None
    return max(_farthest(a.double(), b.double()) for a, b in unequal)


def _farthest(a, b) -> float:
    same = (a == b) | (a.isnan() & b.isnan())  # also infinities, whose difference is NaN
    return float(torch.where(same, 0.0, (a - b).abs().nan_to_num(nan=math.inf)).max())


def _kind(leaf):
    """What must be the same of two leaves before their elements are compared; of a plain value all of it."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)
