"""Requests with sampled lengths, to replay against a cache.

The lengths' means are those that Kwon et al. (arXiv 2309.06180, figure 11) give for the ShareGPT conversations with
which they measured waste: prompts of 161.31 tokens and outputs of 337.99. Arrivals are a Poisson process, as theirs
are. The paper prints no formula for the lengths' distribution: here they are log-normal, the usual first guess for
text, with a standard deviation of `spread` in the logarithm.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

SHAREGPT_PROMPT_MEAN = 161.31  # tokens
SHAREGPT_OUTPUT_MEAN = 337.99


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        name: its number in the trace.
        arrival: the step of the server at which it comes, counted from 0.
        prompt_tokens, output_tokens: its lengths, each at least 1. How many tokens it will produce is known to the
            trace, and to no server.
    """

    name: int
    arrival: int
    prompt_tokens: int
    output_tokens: int

    @property
    def final_tokens(self) -> int:
        """Tokens in the cache when it ends."""
        return self.prompt_tokens + self.output_tokens


def sample_trace(
    count: int,
    *,
    seed: int,
    arrivals_per_step: float,
    prompt_mean: float = SHAREGPT_PROMPT_MEAN,
    output_mean: float = SHAREGPT_OUTPUT_MEAN,
    spread: float = 1.0,
    context: int = 2048,
) -> list[Request]:
    """A trace of `count` requests, the same for the same seed.

    Args:
        count: how many requests.
        seed: of the random numbers.
        arrivals_per_step: how many requests come on average while the server makes one token for each sequence.
        prompt_mean, output_mean: mean lengths in tokens, before they are cut to the context.
        spread: standard deviation of the lengths' natural logarithm.
        context: prompts are cut to half of it, and outputs to what is then left.

    Raises:
        ValueError: a number out of its range; the message names it.
    """
    for name, value in (
        ("count", count),
        ("arrivals_per_step", arrivals_per_step),
        ("prompt_mean", prompt_mean),
        ("output_mean", output_mean),
    ):
        if not value > 0:
            raise ValueError(f"{name} is {value!r}; it must be above 0.")
    if spread < 0 or context < 2:
        raise ValueError(f"spread is {spread!r} and context {context!r}; they must be at least 0 and 2.")
    random_numbers = random.Random(seed)

    def length(mean: float) -> int:
        # The mean of a log-normal is exp(mu + spread² / 2).
        return max(1, round(random_numbers.lognormvariate(math.log(mean) - spread**2 / 2, spread)))

    requests, now = [], 0.0
    for number in range(count):
        now += random_numbers.expovariate(arrivals_per_step)
        prompt = min(length(prompt_mean), context // 2)
        requests.append(Request(number, int(now), prompt, min(length(output_mean), context - prompt)))
    return requests
