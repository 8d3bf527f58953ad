"""What a server is judged by: the time to a request's first token, the time of each later one, and who was in time.

A mean hides those who waited: the report has the median and the 99th percentile of both, and goodput, the requests a
second that ended within their deadline. A server that is busy and late has throughput, and no goodput.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from course_lib.serving.requests import Job

MOST_KEPT = 10_000  # requests, the newest: a server runs for months


@dataclasses.dataclass
class Times:
    """Of one request, in seconds of the clock: when it came, when its first and its newest token were known.

    proposed, accepted: tokens that were guessed, and those of them that were right.
    """

    came: float
    deadline: float
    first: float | None = None
    newest: float = 0.0
    tokens: int = 0
    ended: str | None = None
    preempted: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def to_first(self) -> float | None:
        """Seconds from its coming to its first token."""
        return None if self.first is None else self.first - self.came

    @property
    def per_token(self) -> float | None:
        """Seconds of each later token, on average."""
        return (self.newest - self.first) / (self.tokens - 1) if self.first is not None and self.tokens > 1 else None

    def __str__(self) -> str:
        if self.to_first is None:
            return "no tokens"
        after = "" if self.per_token is None else f", then {1 / self.per_token:.1f} a second"
        guesses = f"; {self.accepted} of {self.proposed} guesses were right" if self.proposed else ""
        return f"{self.tokens} tokens, the first after {self.to_first:.2f} s{after}{guesses}"

    @property
    def in_time(self) -> bool:
        """Whether it ended by itself, before its deadline."""
        return self.ended in ("stop", "length") and self.newest - self.came <= self.deadline


class Metrics:
    """The times of an engine's requests: of the newest MOST_KEPT, and of all that have not ended.

    Args:
        clock: seconds from any beginning.
    """

    def __init__(self, clock: Callable[[], float]):
        self.clock = clock
        self.times: dict[int, Times] = {}

    def came(self, job: Job) -> None:
        """A request is in the line."""
        self.times[job.number] = Times(now := self.clock(), job.request.deadline, newest=now)
        if not job.request.new_tokens:
            self.times[job.number].ended = "length"

    def wrote(self, job: Job) -> None:
        """A token of it was chosen."""
        times, now = self.times[job.number], self.clock()
        times.first = now if times.first is None else times.first
        times.newest, times.tokens = now, times.tokens + 1

    def guessed(self, job: Job, proposed: int, accepted: int) -> None:
        """A step checked guesses of it."""
        self.times[job.number].proposed += proposed
        self.times[job.number].accepted += accepted

    def ended(self, job: Job, how: str) -> None:
        """It is over."""
        self.times[job.number].ended, self.times[job.number].preempted = how, job.preempted
        while len(self.times) > MOST_KEPT and (oldest := next(iter(self.times.items())))[1].ended is not None:
            del self.times[oldest[0]]

    def report(self) -> dict[str, float]:
        """Over all requests that have ended and are here; seconds, and rates over the time that they took together.

        Keys: "requests", "tokens", "seconds", "tokens a second", "goodput", "preempted", "proposed", "accepted", and
        "to first p50", "to first p99", "per token p50", "per token p99", NaN where there are none.
        """
        over = [times for times in list(self.times.values()) if times.ended is not None]
        seconds = max((t.newest for t in over), default=0.0) - min((t.came for t in over), default=0.0)
        rate = 1 / seconds if seconds > 0 else math.nan
        told = {
            "requests": float(len(over)),
            "tokens": float(sum(times.tokens for times in over)),
            "seconds": seconds,
            "tokens a second": rate * sum(times.tokens for times in over),
            "goodput": rate * sum(times.in_time for times in over),
            **{name: float(sum(getattr(t, name) for t in over)) for name in ("preempted", "proposed", "accepted")},
        }
        for name, taken in (("to first", [t.to_first for t in over]), ("per token", [t.per_token for t in over])):
            known = sorted(seconds for seconds in taken if seconds is not None)
            for share in (50, 99):
                told[f"{name} p{share}"] = known[math.ceil(share / 100 * len(known)) - 1] if known else math.nan
        return told
