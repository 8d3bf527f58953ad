"""An engine: many requests at a time on one model, each a stream of text, none of them the worse for another.

    engine = Engine(model, tokenizer, pages=2048)
    number = engine.submit(Request(tokenizer.encode("Once upon a time"), new_tokens=50))
    while engine.busy:
        for event in engine.step():
            print(event.text, end="", flush=True)

A step runs the tokens that the scheduler chose, one for each text that is being written and pieces of prompts beside
them, and chooses the next token of each text that has run to its end. Prompts that begin alike are computed once. An
error of one request ends that request: where a step fails, its parts run again one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.kernels.sampling.choose import sample
from course_lib.kernels.sampling.reference import sample_reference
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.metrics import Metrics
from course_lib.serving.requests import Job, Request
from course_lib.serving.scheduler import Part, Scheduler
from course_lib.serving.text_stream import TextStream

NO_TOKEN = -1  # what is chosen of logits that are no numbers


class QueueFull(RuntimeError):
    """More requests wait than the engine lets wait; ask again later."""


@dataclass(frozen=True)
class Event:
    """What a step did for a request.

    Attributes:
        number: of the request, as `submit` gave it.
        text: what is known of its text and was not before.
        token: the token that was chosen, None where there was none.
        ended: "stop" at a token or a word that ends a text, "length" after new_tokens, "cancelled", "error", or None.
        error: what went wrong, in a sentence.
    """

    number: int
    text: str = ""
    token: int | None = None
    ended: str | None = None
    error: str = ""


class Engine:
    """Runs requests together.

    Args:
        model, tokenizer: of `load`.
        pages, page_size: of the cache, and tokens in a page.
        budget: tokens of a step.
        most_running, most_waiting: requests that run at a time, and that may wait.
        kernels: the course's kernels, or PyTorch's operations; the kernels on a GPU alone when None.
        clock: seconds, for the times that `metrics` has.

    Attributes:
        scheduler: who runs and who waits.
        metrics: how long requests took.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        pages: int,
        page_size: int = 16,
        budget: int = 512,
        most_running: int = 64,
        most_waiting: int = 1024,
        kernels: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        kernels = not interpreting() if kernels is None else kernels
        model.glue = FUSED if kernels else TORCH
        self.model, self.tokenizer, self.kernels = model, tokenizer, kernels
        self.cache = RaggedPages(
            model.config, pages, page_size, kernels=kernels, dtype=model.dtype, device=model.device
        )
        self.scheduler = Scheduler(PrefixAllocator(pages, page_size), budget=budget, most_running=most_running)
        self.most_waiting = most_waiting
        self.metrics = Metrics(clock)
        self._jobs: dict[int, Job] = {}
        self._streams: dict[int, TextStream] = {}
        self._numbers = 0
        self._pending: list[Event] = []

    @property
    def busy(self) -> bool:
        """Whether a step has anything to do or to tell."""
        return bool(self._jobs or self._pending)

    def submit(self, request: Request) -> int:
        """Take a request into the line; returns its number.

        Raises:
            ValueError: its prompt holds an unknown token, or is too long for the model or for the memory.
            QueueFull: too many wait.
        """
        config = self.model.config
        unknown = [int(token) for token in request.prompt if not 0 <= int(token) < config.vocabulary]
        if unknown:
            raise ValueError(f"the prompt holds the token {unknown[0]}; the model knows 0 to {config.vocabulary - 1}.")
        if len(request.prompt) + request.new_tokens > config.context:
            raise ValueError(
                f"the prompt has {len(request.prompt)} tokens, and {request.new_tokens} more are asked for; the model "
                f"was made for {config.context} in all. Shorten the prompt, or ask for fewer."
            )
        if len(self.scheduler.waiting) >= self.most_waiting:
            raise QueueFull(f"{self.most_waiting} requests wait already; ask again later.")
        job = Job(self._numbers, request)
        if request.new_tokens:
            self.scheduler.add(job)
            self._jobs[job.number] = job
            self._streams[job.number] = TextStream(self.tokenizer, request.stops)
        else:
            self._pending.append(Event(job.number, ended="length"))
        self._numbers += 1
        self.metrics.came(job)
        return job.number

    def cancel(self, number: int) -> None:
        """Give a request up; the next step tells it. One that has ended already is left as it is."""
        if number in self._jobs:
            self._pending.append(self._end(self._jobs[number], "cancelled"))

    def step(self) -> list[Event]:
        """Run one step; what it did, for each request that it did something for."""
        events, self._pending = self._pending, []
        parts = self.scheduler.plan()
        if parts:
            rows, failed = self._forward(parts)
            self.scheduler.ran([part for part in parts if part.job not in failed])
            events += [self._end(job, "error", error) for job, error in failed.items()]
            asking = [part.job for part in parts if part.asks and part.job not in failed]
            if asking:
                events += [self._next(job, token) for job, token in zip(asking, self._chosen(rows, asking))]
        return events

    def texts(self, requests: Iterable[Request]) -> list[str]:
        """The text of each request, once all have ended; one that failed has what it had written."""
        texts = {self.submit(request): "" for request in requests}
        while self.busy:
            for event in self.step():
                texts[event.number] += event.text
        return list(texts.values())

    def _forward(self, parts: list[Part]) -> tuple[torch.Tensor, dict[Job, str]]:
        """Logits [those that ask, vocabulary] in the order of the parts, and whose part failed."""
        try:
            return self._logits(parts), {}
        except Exception as error:  # whatever a model, a kernel or the memory raises ends requests, not the engine
            if len(parts) == 1:
                return torch.empty(0, self.model.config.vocabulary), {parts[0].job: f"{type(error).__name__}: {error}"}
        results = [self._forward([part]) for part in parts]
        failed = {job: error for _, some in results for job, error in some.items()}
        return torch.cat([rows.to(self.model.device) for rows, _ in results]), failed

    def _logits(self, parts: list[Part]) -> torch.Tensor:
        self.cache.take([
            Run(part.begin, part.count, self.scheduler.allocator.table(part.job.number)) for part in parts
        ])  # fmt: skip
        tokens = [token for part in parts for token in part.job.tokens[part.begin : part.begin + part.count]]
        ends = torch.tensor([part.count for part in parts]).cumsum(0) - 1
        wanted = ends[torch.tensor([part.asks for part in parts])].to(self.model.device)
        with torch.inference_mode():
            hidden = self.model.hidden(torch.tensor([tokens], device=self.model.device), self.cache)[0, wanted]
            head = self.model.embedding if self.model.logits is None else self.model.logits
            return F.linear(hidden, head.weight)

    def _chosen(self, logits: torch.Tensor, jobs: list[Job]) -> list[int]:
        """The next token of each job, NO_TOKEN where its logits are no numbers."""
        options = [job.request.sampling for job in jobs]
        device = logits.device
        columns = {
            name: torch.tensor([getattr(one, name) for one in options], dtype=dtype, device=device)
            for name, dtype in (("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32),
                                ("min_p", torch.float32))
        }  # fmt: skip
        seeds = torch.tensor([one.seed for one in options], dtype=torch.int64, device=device)
        positions = torch.tensor([len(job.tokens) for job in jobs], dtype=torch.int64, device=device)
        choose = sample if self.kernels else sample_reference
        return choose(logits, **columns, seeds=seeds, positions=positions).tolist()

    def _next(self, job: Job, token: int) -> Event:
        """Take a chosen token into a job's text."""
        if token == NO_TOKEN:
            return self._end(job, "error", "the model's logits are NaN: there is no likeliest token.")
        stream = self._streams[job.number]
        job.tokens.append(token)
        self.metrics.wrote(job)
        if token in self.tokenizer.stops:
            return self._end(job, "stop", token=token)
        text = stream.push(token)
        if stream.stopped:
            return self._end(job, "stop", text=text, token=token)
        if job.written == job.request.new_tokens:
            return self._end(job, "length", text=text, token=token)
        return Event(job.number, text, token)

    def _end(self, job: Job, ended: str, error: str = "", *, text: str = "", token: int | None = None) -> Event:
        self.scheduler.end(job)
        del self._jobs[job.number]
        stream = self._streams.pop(job.number)
        self.metrics.ended(job, ended)
        return Event(job.number, text + stream.end(), token, ended, error)
