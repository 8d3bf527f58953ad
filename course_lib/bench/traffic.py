"""`python -m course_lib bench traffic`: an hour of random requests, sent to the engine in two minutes.

Requests come at random moments (Poisson): HOUR of them, as many as one in a second is in an hour, in SECONDS. Prompts
have 16 to 1,500 tokens, most of them some hundreds; a third begins with one of BEGINNINGS long instructions. 8 to 256
tokens are written. Half is greedy, the others are drawn with random options. Priorities are 0 to 2. One in thirty is
given up on the way. The cache holds a quarter of what all running texts could need, so that some are sent back to wait.

At the end every request must have ended in one way, and every page must be free or only kept for a prefix. If not, this
raises an error. What is printed: the load, tokens a second, the median and the 99th percentile of the time to the first
token and of each later token, and how many were sent back. Everything goes to traffic.json in the course's bench
folder. Weights are random, of Llama-3.2-1B's shape: no time depends on them.
"""

import collections
import itertools
import random
import time
from collections.abc import Iterator

import torch

from course_lib.bench._record import clocks, write_record
from course_lib.bench.engine import SHAPE, tokenizer_of
from course_lib.bench.steps import model_of
from course_lib.hardware.device import machine
from course_lib.models.config import PRESETS
from course_lib.serving.engine import Engine
from course_lib.serving.metrics import Metrics
from course_lib.serving.requests import Request, Sampling

HOUR, SECONDS = 3600, 120.0  # requests, and in how long they come
LONGEST_PROMPT, LONGEST_TEXT = 1500, 256  # tokens
BEGINNINGS, BEGINNING_TOKENS = 8, 384
GIVEN_UP = 1 / 30
RUNNING = 64
SHARE_OF_PAGES = 1 / 4


def requests(seed: int, vocabulary: int, longest: int = LONGEST_PROMPT, most_new: int = LONGEST_TEXT) -> Iterator:
    """Random requests without end, each as (request, after how many of its tokens it is given up, or None)."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    beginnings = [tokens(min(BEGINNING_TOKENS, longest // 2)) for _ in range(BEGINNINGS)]
    while True:
        count = min(longest, max(16, int(draw.lognormvariate(5.3, 0.9))))
        begin = draw.choice(beginnings) if draw.random() < 1 / 3 else []
        prompt = (begin + tokens(count))[:longest]
        sampling = Sampling()
        if draw.random() < 0.5:
            sampling = Sampling(temperature=draw.uniform(0.2, 1.5), top_k=draw.choice((0, 0, 20, 50)),
                                top_p=draw.choice((1.0, 0.9, 0.5)), seed=draw.randrange(2**63))  # fmt: skip
        new = draw.randint(min(8, most_new), most_new)
        given_up = draw.randint(1, new) if draw.random() < GIVEN_UP else None
        yield Request(prompt, new, sampling, priority=draw.randrange(3), deadline=30.0), given_up


def play(engine: Engine, asked: Iterator, count: int, seconds: float, seed: int = 0) -> dict:
    """Send `count` requests at random moments within about `seconds`, and run the engine until all have ended.

    Returns the engine's report, how many ended in which way, and the load that was offered, in tokens a second. Raises
    a RuntimeError when a request is lost, is told after its end, or leaves pages behind.
    """
    draw = random.Random(seed)
    moments = list(itertools.accumulate(draw.expovariate(count / seconds) for _ in range(count)))
    engine.metrics = Metrics(time.perf_counter)
    given_up: dict[int, int] = {}
    written: collections.Counter = collections.Counter()
    ended: dict[int, str] = {}
    came = tokens = 0
    began = time.perf_counter()
    while came < count or engine.busy:
        now = time.perf_counter() - began
        while came < count and moments[came] <= now:
            request, after = next(asked)
            number = engine.submit(request)
            came, tokens = came + 1, tokens + request.new_tokens
            if after is not None:
                given_up[number] = after
        if not engine.busy:
            time.sleep(max(0.0, moments[came] - now))
            continue
        for event in engine.step():
            if event.number in ended:
                raise RuntimeError(f"request {event.number} ended by {ended[event.number]!r} and was told of again.")
            written[event.number] += event.token is not None
            if event.ended is not None:
                ended[event.number] = event.ended
            elif written[event.number] == given_up.get(event.number):
                engine.cancel(event.number)
    allocator = engine.scheduler.allocator
    if len(ended) != count or allocator.free_pages() != allocator.pages:
        raise RuntimeError(
            f"{count - len(ended)} of {count} requests were lost, and {allocator.pages - allocator.free_pages()} pages."
        )
    return {**engine.metrics.report(), "ended": dict(collections.Counter(ended.values())),
            "tokens asked for a second": tokens / seconds, "pages": allocator.pages}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Play the hour, print what came of it and write it down; returns the exit status."""
    if machine().tier == "none":
        print("bench traffic needs an NVIDIA GPU: in the interpreter one request would take the two minutes.")
        return 0
    torch.manual_seed(0)
    model = model_of(PRESETS[SHAPE])
    pages = int(SHARE_OF_PAGES * RUNNING * -(-(LONGEST_PROMPT + LONGEST_TEXT) // 16))
    engine = Engine(model, tokenizer_of(model.config), pages=pages, budget=2048, most_running=RUNNING,
                    most_waiting=HOUR)  # fmt: skip
    assert engine.fast is not None  # with kernels, on a GPU
    engine.fast.prepare()
    asked = requests(0, model.config.vocabulary)
    play(engine, asked, 64, 1.0)  # libraries load, and kernels are compiled
    before = clocks()
    told = play(engine, asked, HOUR, SECONDS)
    for name, figure in told.items():
        print(f"{name:<28}{figure if isinstance(figure, dict) else f'{figure:,.4g}'}")
    write_record("traffic", before, **told)
    return 0
