"""Which tokens run in the next step: continuous batching with one budget of tokens. Plain Python, without tensors.

Decodes go first, a token each, so that nobody who writes has to wait for somebody's long prompt. What is left of the
budget goes to prompts, in pieces where they are long (chunked prefill): first of those that have begun, then of those
that wait, in order of priority and arrival. Where memory ends, the last in that order is sent back to wait. It keeps
what it has written, and its pages stay in the tree of prefixes as long as nobody needs them.

The first in the order always goes on, and it fits alone (`Scheduler.add` refuses what does not), so all end some day.

Guesses (`course_lib.serving.proposals`) come last: they get what budget and memory the others have left.

Sources: Yu et al., Orca, OSDI 2022 (continuous batching); Agrawal et al., Sarathi-Serve, arXiv 2403.02310 (chunks).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from course_lib.serving.memory.errors import OutOfBlocks
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.proposals import Wanted
from course_lib.serving.requests import Job


@dataclass(frozen=True)
class Part:
    """`count` tokens of a job, from `begin` on, the first that is not computed; and guesses behind them."""

    job: Job
    begin: int
    count: int
    proposed: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens that run."""
        return self.count + len(self.proposed)

    @property
    def tokens(self) -> list[int]:
        """What runs."""
        return [*self.job.tokens[self.begin : self.begin + self.count], *self.proposed]

    @property
    def asks(self) -> int:
        """After how many of its tokens, the last ones, the next is chosen; 0 of a piece that does not end a text."""
        return 1 + len(self.proposed) if self.begin + self.count == len(self.job.tokens) else 0


class Scheduler:
    """The line of those who wait, and those who run.

    Args:
        allocator: of the pages; its sequences are the jobs' numbers.
        budget: tokens of a step, at least `most_running`.
        most_running: jobs that run at a time.

    Attributes:
        waiting, running: jobs in order.
        draft: guesses for texts, for which room is taken before; prompt lookup guesses when None.
    """

    def __init__(self, allocator: PrefixAllocator, *, budget: int, most_running: int):
        if not 1 <= most_running <= budget:
            raise ValueError(
                f"budget is {budget} tokens for up to {most_running} running jobs; it must hold one of each, and there "
                "must be at least one."
            )
        self.allocator, self.budget, self.most_running = allocator, budget, most_running
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.draft: Callable[[Sequence[Wanted]], list[tuple[int, ...]]] | None = None

    def add(self, job: Job) -> None:
        """Take a job into the line. Raises a ValueError for one that would not fit into the memory even alone."""
        longest = len(job.request.prompt) + job.request.new_tokens
        room = self.allocator.pages * self.allocator.page_size
        if longest > room:
            raise ValueError(
                f"the prompt has {len(job.request.prompt)} tokens and {job.request.new_tokens} more are asked for; the "
                f"cache holds {room}. Ask for less, or give the engine more pages."
            )
        self.waiting.append(job)
        self.waiting.sort(key=lambda one: one.place)

    @property
    def joins(self) -> bool:
        """Whether the first of those who wait may join those who run."""
        return bool(self.waiting) and len(self.running) < self.most_running and self._fits(self.waiting[0])

    def plan(self) -> list[Part]:
        """The parts of the next step, single tokens first; room is taken for all. Empty when there is nothing to do.

        Call `ran` with it once they have run.
        """
        parts: list[Part] = []
        left = self.budget
        for job in sorted(self.running, key=lambda one: one.left > 1):
            if left and job.number in self.allocator:  # it may have been sent back for another's sake
                left -= self._take(job, min(job.left, left), parts)
        while left and self.joins:
            job = self.waiting.pop(0)
            job.computed = self.allocator.add(job.number, job.tokens)
            self.running = sorted([*self.running, job], key=lambda one: one.place)
            left -= self._take(job, min(job.left, left), parts)
        self._propose(parts, left)
        return sorted(parts, key=lambda part: part.length > 1)

    def ahead(self, parts: list[Part]) -> list[Part] | None:
        """The step after this one if every text of it goes on; None if one ends by its length, or somebody joins.

        None too if a text is speculated on: what is guessed of it hangs on tokens that are not known yet.
        There is room for it, and nothing else has changed: it may be computed, and forgotten.
        """
        jobs = [part.job for part in parts]
        if self.joins or len(jobs) < len(self.running) or any(job.request.speculate for job in jobs):
            return None
        if any(job.written + 1 >= job.request.new_tokens or not self.allocator.reserve(job.number) for job in jobs):
            return None
        return [Part(part.job, part.begin + part.count, 1) for part in parts]

    def ran(self, parts: list[Part]) -> None:
        """Count the tokens of a step. What a whole prompt has left in the cache is there for others from now on."""
        for part in parts:
            job = part.job
            job.computed = part.begin + part.count
            if part.count > 1 and part.asks:
                self.allocator.share(job.number, job.tokens[: job.computed])

    def settle(self, job: Job) -> None:
        """The guesses of a step were checked: the room of those that were wrong is free again."""
        self.allocator.shorten(job.number, job.computed)

    def end(self, job: Job) -> None:
        """A job is done, or given up: its memory is free, and what it has computed is kept while there is room."""
        if job in self.running:
            self._leave(job)
        elif job in self.waiting:
            self.waiting.remove(job)

    def _take(self, job: Job, count: int, parts: list[Part]) -> int:
        """Room for a part of a job, others' if need be; returns its tokens, 0 where the job itself was sent back."""
        while True:
            try:
                self.allocator.append(job.number, count)
                break
            except OutOfBlocks:
                last = self.running[-1]
                if any(part.job is last for part in parts):  # a part of it is in this step already
                    parts[:] = [part for part in parts if part.job is not last]
                self._leave(last)
                last.preempted += 1
                self.waiting = sorted([last, *self.waiting], key=lambda one: one.place)
                if last is job:
                    return 0
        parts.append(Part(job, job.computed, count))
        return count

    def _propose(self, parts: list[Part], left: int) -> None:
        """Add guesses to the parts that ask: as many as were asked for, as the text may have, and as there is room for.

        Nobody is sent back for a guess. A prompt's first token does not wait for a draft to read the prompt.
        """
        if not any(part.job.request.speculate for part in parts):
            return
        drafted: dict[int, Wanted] = {}  # by the part's place
        for place, part in enumerate(parts):
            job, request = part.job, part.job.request
            most = min(request.speculate, request.new_tokens - job.written - 1, left, self.allocator.room(job.number))
            if not part.asks or most <= 0:
                continue
            if self.draft is None:
                proposed = job.lookup.propose(job.tokens, most)
                self.allocator.append(job.number, len(proposed))
                parts[place] = replace(part, proposed=proposed)
                left -= len(proposed)
            elif part.count == 1:
                self.allocator.append(job.number, most)
                drafted[place] = Wanted(job.tokens, self.allocator.table(job.number), most)
                left -= most
        if self.draft is not None and drafted:
            for place, proposed in zip(drafted, self.draft([*drafted.values()])):
                parts[place] = part = replace(parts[place], proposed=proposed)
                self.allocator.shorten(part.job.number, part.begin + part.length)

    def _leave(self, job: Job) -> None:
        self.running.remove(job)
        self.allocator.share(job.number, job.tokens[: job.computed])
        self.allocator.free(job.number)
        job.computed = 0

    def _fits(self, job: Job) -> bool:
        """Whether a job may join: its tokens fit, and a page more for each who runs, or nobody runs."""
        pages = -(-len(job.tokens) // self.allocator.page_size)
        return not self.running or pages + len(self.running) <= self.allocator.free_pages()
