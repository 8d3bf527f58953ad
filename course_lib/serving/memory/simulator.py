"""Replays a trace of requests against a cache and records, step by step, what its memory holds.

The server is the simplest that batches continuously: in every step it admits waiting requests, first come first
served, as long as the one at the head of the line fits; then each running sequence gets one more token; those that
have all of theirs leave. When a cache without reservations runs full in the middle of a step, the sequence admitted
last is preempted: its memory is freed and it goes back to the head of the line, to be computed again.

Every slot of the memory is in one of five states at the end of a step:

    used        holds a token
    later       is reserved by a sequence that will fill it before it ends
    never       is reserved by a sequence that will end without it
    stranded    is free, and the request at the head of the line does not fit (external waste)
    idle        is free, and nobody waits

`later` and `never` together are the internal waste.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from course_lib.serving.memory.block_allocator import BlockAllocator
from course_lib.serving.memory.contiguous_allocator import ContiguousAllocator
from course_lib.serving.memory.errors import CacheFull, OutOfBlocks
from course_lib.serving.memory.trace import Request

STATES = ("used", "later", "never", "stranded", "idle")


class ContiguousCache:
    """A contiguous layout as the simulator drives it.

    Args:
        slots: tokens that the cache can hold.
        reserve: `reserve(request)` slots are set aside when a request is admitted, at least its prompt.
    """

    def __init__(self, slots: int, reserve: Callable[[Request], int]):
        self.slots, self.reserve = slots, reserve
        self.allocator = ContiguousAllocator(slots)

    def admit(self, request: Request) -> None:
        self.allocator.add(request.name, request.prompt_tokens, self.reserve(request))

    def append(self, request: Request) -> None:
        self.allocator.append(request.name)

    def free(self, request: Request) -> None:
        self.allocator.free(request.name)

    def room(self, request: Request) -> int:
        """Slots that a running request holds and has not filled."""
        region = self.allocator.region(request.name)
        return region.size - region.length


class PagedCache:
    """Blocks as the simulator drives them.

    Args:
        slots: tokens that the cache can hold; what is no whole block is left out.
        block_size: tokens in a block.
        headroom: share of the blocks that must stay free when a request is admitted, so that those already running can
            grow. vLLM keeps 1 %.
    """

    def __init__(self, slots: int, block_size: int, headroom: float = 0.01):
        self.allocator = BlockAllocator(slots // block_size, block_size)
        self.slots = slots // block_size * block_size
        self._headroom = round(headroom * len(self.allocator.pool))

    def admit(self, request: Request) -> None:
        needed = -(-request.prompt_tokens // self.allocator.block_size)
        if self.allocator.sequences and needed + self._headroom > self.allocator.free_pages():
            raise OutOfBlocks(f"A prompt of {needed} blocks would leave fewer than {self._headroom} for the others.")
        self.allocator.add(request.name, request.prompt_tokens)

    def append(self, request: Request) -> None:
        self.allocator.append(request.name, 1)

    def free(self, request: Request) -> None:
        self.allocator.free(request.name)

    def room(self, request: Request) -> int:
        """Slots that a running request holds and has not filled."""
        return -self.allocator.length(request.name) % self.allocator.block_size


@dataclass
class Timeline:
    """What a cache held after every step, in slots.

    Attributes:
        slots: the cache's size.
        used, later, never, stranded, idle: one number a step; together they are `slots`.
        running, waiting: sequences in the cache and in line.
        preemptions: how often a running sequence had to give its memory back.
    """

    slots: int
    used: list[int] = field(default_factory=list)
    later: list[int] = field(default_factory=list)
    never: list[int] = field(default_factory=list)
    stranded: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    preemptions: int = 0

    @property
    def steps(self) -> int:
        return len(self.used)

    def shares(self) -> dict[str, float]:
        """Mean share of the cache in each state, over the steps at whose end somebody waited.

        Only then is memory what limits the server. Raises ValueError when nobody ever waited.
        """
        busy = [step for step in range(self.steps) if self.waiting[step]]
        if not busy:
            raise ValueError("Nobody ever waited for memory in this trace: send more requests, or take fewer slots.")
        return {state: sum(getattr(self, state)[step] for step in busy) / len(busy) / self.slots for state in STATES}

    def mean_running(self) -> float:
        """Mean number of sequences that run at a time, over the steps at whose end somebody waited."""
        busy = [running for running, waiting in zip(self.running, self.waiting) if waiting]
        return sum(busy) / len(busy) if busy else 0.0


def replay(trace: Sequence[Request], cache: ContiguousCache | PagedCache, most_steps: int | None = None) -> Timeline:
    """Serve a trace to its end, or for `most_steps` steps.

    Raises:
        CacheFull: a request is larger than the whole cache; the message names it.
    """
    coming = deque(sorted(trace, key=lambda request: request.arrival))
    line: deque[Request] = deque()
    left: dict[int, int] = {}  # tokens that a running sequence will still make, by name; in the order of admission
    running: dict[int, Request] = {}
    timeline, step = Timeline(cache.slots), 0

    def preempt_last() -> None:
        name, request = running.popitem()
        cache.free(request)
        done = request.output_tokens - left[name]
        # Its tokens so far are known: they come back as part of the prompt.
        line.appendleft(replace(request, prompt_tokens=request.prompt_tokens + done, output_tokens=left.pop(name)))
        timeline.preemptions += 1

    while (coming or line or running) and step != most_steps:
        while coming and coming[0].arrival <= step:
            line.append(coming.popleft())
        while line:
            try:
                cache.admit(line[0])
            except CacheFull as full:
                if not running:
                    raise CacheFull(f"Request {line[0].name} does not fit into an empty cache: {full}") from full
                break
            request = line.popleft()
            running[request.name], left[request.name] = request, request.output_tokens
        for request in list(running.values()):
            while request.name in running:
                try:
                    cache.append(request)
                    left[request.name] -= 1
                    break
                except CacheFull as full:
                    if len(running) == 1:
                        raise CacheFull(f"Request {request.name} outgrew the whole cache: {full}") from full
                    preempt_last()
        for name in [name for name in running if left[name] == 0]:
            cache.free(running.pop(name))
            del left[name]
        _record(timeline, cache, running, left, len(line))
        step += 1
    return timeline


def _record(timeline: Timeline, cache, running: dict[int, Request], left: dict[int, int], waiting: int) -> None:
    room = {name: cache.room(request) for name, request in running.items()}
    later = sum(min(room[name], left[name]) for name in running)
    free = cache.slots - cache.allocator.reserved_slots
    timeline.used.append(cache.allocator.used_slots)
    timeline.later.append(later)
    timeline.never.append(sum(room.values()) - later)
    timeline.stranded.append(free if waiting else 0)
    timeline.idle.append(0 if waiting else free)
    timeline.running.append(len(running))
    timeline.waiting.append(waiting)
