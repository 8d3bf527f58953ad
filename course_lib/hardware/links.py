"""What the links between the GPUs of this machine reach: a second roofline, beside that of each GPU's memory.

    links = measured_links(ranks, exchange.meet)     # on all ranks; of course_lib.kernels.parallel.overlap
    links.seconds(1 << 20)                           # to receive so many bytes, and to know that all have

Time of an exchange = phases · latency + bytes that a rank receives / rate. The rate is that of large copies from a
neighbour while every rank copies. The latency is that of a meeting of all ranks. Numbers that bring their own signal
with them need no meeting, so an exchange of few bytes can take less.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as distributed

from course_lib.hardware.graphs import captured
from course_lib.hardware.ranks import Ranks
from course_lib.hardware.symmetric import SymmetricBuffer

COPIED = 1 << 28  # bytes


@dataclass(frozen=True)
class Links:
    """What was measured between the ranks.

    Attributes:
        rate: bytes a second that a rank receives while every rank does.
        latency: seconds of a meeting of all ranks.
        memory_rate: bytes a second that a GPU reads and writes, together, in its own memory.
    """

    rate: float
    latency: float
    memory_rate: float

    def seconds(self, nbytes: float, phases: int = 1) -> float:
        """Of an exchange in which a rank receives so many bytes, with a meeting for each of its phases."""
        return phases * self.latency + nbytes / self.rate


def measured_links(ranks: Ranks, meet: Callable[[], object]) -> Links:
    """The links between these ranks, in about a second. All ranks call it, each on a GPU of its own.

    meet: ends on each rank when all have come to it; it is timed as the latency.

    Raises a ValueError without GPUs, with one rank, or where GPUs cannot read each other's memory.
    """
    if ranks.device.type != "cuda" or ranks.size < 2:
        raise ValueError(f"links are between GPUs; this is {ranks.size} rank on {ranks.device}.")
    buffer = SymmetricBuffer(ranks, COPIED)
    neighbour, here = buffer.of((ranks.rank + 1) % ranks.size), torch.empty_like(buffer.own)
    moves = {"link": lambda: here.copy_(neighbour), "memory": lambda: here.copy_(buffer.own), "meeting": meet}
    times = times_in_turns(ranks, moves, calls=20)
    return Links(COPIED / times["link"], times["meeting"], 2 * COPIED / times["memory"])


def times_in_turns(
    ranks: Ranks, functions: Mapping[str, Callable[[], object]], *, calls: int, rounds: int = 15
) -> dict[str, float]:
    """Seconds of a call of each function, the median of the rounds, of the slowest rank.

    Every rank makes the same calls in the same order, so that what waits for other ranks finds them. A round has
    `calls` calls of one function in one CUDA graph, and the functions take turns. Caches hold what earlier calls left.

    Args:
        functions: called without arguments.
    """

    def row(function):
        def repeated():
            for _ in range(calls):
                function()

        return repeated

    rows = {name: captured(row(function)) for name, function in functions.items()}
    found: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(rounds + 2):  # the first two warm up
        for name, run in rows.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            distributed.barrier()
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            if number > 1:
                found[name].append(begin.elapsed_time(end) / 1e3 / calls)
    medians = torch.tensor([statistics.median(times) for times in found.values()], device=ranks.device)
    distributed.all_reduce(medians, distributed.ReduceOp.MAX)
    return dict(zip(found, medians.tolist()))
