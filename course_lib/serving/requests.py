"""What is asked of an engine, and what becomes of it. Plain Python, without tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from course_lib.serving.proposals import MOST_PROPOSED, PromptLookup


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The same seed gives the same text, whatever else runs.

    Attributes:
        temperature: 0 takes the likeliest token; above 0 logits are divided by it.
        top_k: only so many of the likeliest tokens; 0 takes all.
        top_p: only the likeliest tokens that together have this much of the probability; 1 takes all.
        min_p: only tokens with at least this share of the likeliest one's probability; 0 takes all.
        seed: of the noise.

    Raises a ValueError that names the option when one makes no sense.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature!r}; it must be a number of at least 0.")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}; it must be a whole number of at least 0.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must be above 0 and at most 1.")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p!r}; it must be from 0 to 1.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed!r}; it must be a whole number from 0 to 2^63 - 1.")


GREEDY = Sampling()
NO_TOKEN = -1  # what is chosen of logits that are no numbers


@dataclass(frozen=True)
class Request:
    """A text to continue.

    Attributes:
        prompt: its tokens, at least one.
        new_tokens: at most so many are written.
        sampling: how they are chosen.
        stops: words that end the text, and are not part of it.
        priority: who has a smaller number goes first; who came earlier, of equals.
        deadline: seconds that it may take, for the count of those that were in time.
        speculate: tokens that a step may guess and check; the text is the same (`course_lib.serving.proposals`).
    """

    prompt: Sequence[int]
    new_tokens: int
    sampling: Sampling = GREEDY
    stops: tuple[str, ...] = ()
    priority: int = 0
    deadline: float = math.inf
    speculate: int = 0

    def __post_init__(self):
        if not len(self.prompt):
            raise ValueError("prompt is empty; a text to continue has at least one token.")
        if isinstance(self.new_tokens, bool) or not isinstance(self.new_tokens, int) or self.new_tokens < 0:
            raise ValueError(f"new_tokens is {self.new_tokens!r}; it must be a whole number of at least 0.")
        if isinstance(self.stops, str) or not all(isinstance(stop, str) and stop for stop in self.stops):
            raise ValueError(f"stops is {self.stops!r}; it must be some words, none of them empty.")
        if type(self.speculate) is not int or not 0 <= self.speculate <= MOST_PROPOSED:
            raise ValueError(f"speculate is {self.speculate!r}; it must be a whole number from 0 to {MOST_PROPOSED}.")


@dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
        number: in order of arrival.
        request: what was asked.
        tokens: the prompt, and what is written so far.
        computed: how many of them have their keys and values in the cache.
        preempted: how often its memory was taken away.
        lookup: what guesses its next tokens.
    """

    number: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    preempted: int = 0
    lookup: PromptLookup = field(default_factory=PromptLookup)

    def __post_init__(self):
        self.tokens = self.tokens or [int(token) for token in self.request.prompt]

    @property
    def place(self) -> tuple[int, int]:
        """Its place in every line: smaller goes first."""
        return self.request.priority, self.number

    @property
    def left(self) -> int:
        """Tokens that have to run before the next one can be chosen: 1 in decode."""
        return len(self.tokens) - self.computed

    @property
    def written(self) -> int:
        """Tokens that were chosen so far."""
        return len(self.tokens) - len(self.request.prompt)

    def write(self, token: int) -> None:
        """A token was chosen; all before it have been computed."""
        self.tokens.append(token)
        self.computed = len(self.tokens) - 1
