"""An engine: many requests at a time on one model, each a stream of text, none of them the worse for another.

    engine = Engine(model, tokenizer, pages=2048)
    number = engine.submit(Request(tokenizer.encode("Once upon a time"), new_tokens=50))
    while engine.busy:
        for event in engine.step():
            print(event.text, end="", flush=True)

A step runs the tokens that the scheduler chose, one for each text that is being written and pieces of prompts beside
them, and chooses the next token of each text that has run to its end. Prompts that begin alike are computed once. An
error of one request ends that request: where a step fails, its parts run again one by one. On a GPU all steps run over
packed weights, and one in which everybody writes is one of `FastSteps`: captured, and on its way before the tokens of
the one before it are read. A request may have its next tokens guessed, and several of them chosen in one step
(`course_lib.serving.proposals`, and `course_lib.serving.draft` where a second model guesses); its text is the same.

A model on several ranks has an engine on each: `course_lib.serving.on_ranks`. There an error is raised, and ends them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.graphs import captured
from course_lib.kernels.sampling.choose import sample
from course_lib.kernels.sampling.reference import sample_reference
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.caches.ragged import RaggedPages, Run
from course_lib.serving.draft import Draft
from course_lib.serving.fast_step import OPTIONS, FastSteps, batch_sizes
from course_lib.serving.memory.prefix_allocator import PrefixAllocator
from course_lib.serving.metrics import Metrics
from course_lib.serving.plain_step import plain_step
from course_lib.serving.proposals import Wanted, accepted
from course_lib.serving.requests import NO_TOKEN, Job, Request
from course_lib.serving.scheduler import Part, Scheduler
from course_lib.serving.text_stream import TextStream


class QueueFull(RuntimeError):
    """More requests wait than the engine lets wait; ask again later."""


@dataclass(frozen=True)
class Event:
    """What a step did for a request; one for each token, where it wrote several.

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
        fast: whether steps are those of `FastSteps`; on a GPU with kernels alone when None.
        capture: makes of a function one that replays it, for those steps.
        draft: a smaller model of the same tokens, which guesses for requests that speculate, in the place of prompt
            lookup. Raises a ValueError for one that cannot.
        clock: seconds, for the times that `metrics` has.

    Attributes:
        fast: the steps over packed weights, where there are such.
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
        fast: bool | None = None,
        capture: Callable = captured,
        draft: Decoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        kernels = not interpreting() if kernels is None else kernels
        model.glue = FUSED if kernels else TORCH
        self.model, self.tokenizer, self.kernels = model, tokenizer, kernels
        self.cache = RaggedPages(
            model.config, pages, page_size, kernels=kernels, dtype=model.dtype, device=model.device
        )
        self.fast: FastSteps | None = None
        if (kernels and model.device.type == "cuda") if fast is None else fast:
            self.fast = FastSteps(model, self.cache, batches=batch_sizes(most_running), capture=capture)
        self.scheduler = Scheduler(PrefixAllocator(pages, page_size), budget=budget, most_running=most_running)
        if draft is not None:
            refuse_unlike(model, draft)
            self._draft = Draft(
                draft, pages, page_size, budget=budget, most_running=most_running, kernels=kernels,
                fast=self.fast is not None, capture=capture,
            )  # fmt: skip
            self.scheduler.draft = self._guess
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
            chosen, failed = self._run(parts)
            self.scheduler.ran([part for part in parts if part.job not in failed])
            events += [self._end(job, "error", error) for job, error in failed.items()]
            for part in parts:
                if part.job in chosen:
                    events += self._next(part, chosen[part.job])
        return events

    def texts(self, requests: Iterable[Request]) -> list[str]:
        """The text of each request, once all have ended; one that failed has what it had written."""
        texts = {self.submit(request): "" for request in requests}
        while self.busy:
            for event in self.step():
                texts[event.number] += event.text
        return list(texts.values())

    def _run(self, parts: list[Part]) -> tuple[dict[Job, list[int]], dict[Job, str]]:
        """What is chosen behind each part that asks, a token for each position; and whose part failed."""
        try:
            return self._tokens(parts), {}
        except Exception as error:  # whatever a model, a kernel or the memory raises ends requests, not the engine
            if self.model.all_reduce is not None:  # the other ranks wait for this one in the middle of the step
                raise
            if len(parts) == 1 and not parts[0].proposed:
                return {}, {parts[0].job: f"{type(error).__name__}: {error}"}
        results = [self._run([replace(part, proposed=())]) for part in parts]  # nobody fails by a guess
        chosen, failed = ({job: what for some in kind for job, what in some.items()} for kind in zip(*results))
        return chosen, failed

    def _tokens(self, parts: list[Part]) -> dict[Job, list[int]]:
        """What is chosen behind each part that asks, NO_TOKEN where logits are no numbers."""
        runs = self._runs(parts)
        asking = [part for part in parts if part.asks]
        if self.fast is not None and len(asking) == len(parts) and self.fast.takes(runs):
            ahead = self.scheduler.ahead(parts)
            chosen = self.fast(
                runs, [part.job.tokens[-1] for part in parts], [part.job.request.sampling for part in parts],
                None if ahead is None else self._runs(ahead),
            )  # fmt: skip
        else:
            tokens, asks = [part.tokens for part in parts], [part.asks for part in parts]
            logits = plain_step(self.model, self.cache, self.fast, runs, tokens, asks)
            chosen = self._chosen(logits, asking) if asking else []
        rows = iter(chosen)
        behind = {part.job: [next(rows) for _ in range(part.asks)] for part in asking}
        if any(part.proposed and NO_TOKEN in behind[part.job] for part in asking):
            raise ArithmeticError(
                "logits among guesses are no numbers; a guess may have reached what stands before it."
            )
        return behind

    def _runs(self, parts: list[Part]) -> list[Run]:
        return [Run(part.begin, part.length, self.scheduler.allocator.table(part.job.number)) for part in parts]

    def _guess(self, wanted: Sequence[Wanted]) -> list[tuple[int, ...]]:
        """What the draft proposes. An error of it ends no request, and the draft: prompt lookup takes its place."""
        try:
            return self._draft.propose(wanted)
        except Exception as error:
            if self.model.all_reduce is not None:  # the other ranks guess on, and would run other steps
                raise
            told = f"{type(error).__name__}: {error}"
            warnings.warn(f"the draft failed and guesses no more, prompt lookup does instead. {told}", stacklevel=2)
            self.scheduler.draft = None
            return [()] * len(wanted)

    def _chosen(self, logits: torch.Tensor, parts: list[Part]) -> list[int]:
        """A token for each row: of each part the position behind its text, and those behind its guesses."""
        samplings = [part.job.request.sampling for part in parts for _ in range(part.asks)]
        places = [len(part.job.tokens) + guess for part in parts for guess in range(part.asks)]
        columns = {
            name: torch.tensor([getattr(one, name) for one in samplings], dtype=dtype, device=logits.device)
            for name, dtype in OPTIONS.items()
        }
        seeds = torch.tensor([one.seed for one in samplings], dtype=torch.int64, device=logits.device)
        positions = torch.tensor(places, dtype=torch.int64, device=logits.device)
        choose = sample if self.kernels else sample_reference
        return choose(logits, **columns, seeds=seeds, positions=positions).tolist()

    def _next(self, part: Part, chosen: list[int]) -> Iterator[Event]:
        """Take what was chosen behind a part into its job's text, as far as the guesses before it were right."""
        job, right = part.job, accepted(part.proposed, chosen)
        if part.proposed:
            self.metrics.guessed(job, len(part.proposed), right)
        for token in chosen[: right + 1]:
            event = self._write(job, token)
            yield event
            if event.ended is not None:
                return
        if part.proposed:
            self.scheduler.settle(job)

    def _write(self, job: Job, token: int) -> Event:
        """Take a chosen token into a job's text."""
        if token == NO_TOKEN:
            return self._end(job, "error", "the model's logits hold NaN or infinity: no token can be chosen.")
        stream = self._streams[job.number]
        job.write(token)
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


def refuse_unlike(model: Decoder, draft: Decoder) -> None:
    """Raise a ValueError, in a sentence, where a draft cannot guess what a model writes."""
    ours, its = model.config, draft.config
    if its.vocabulary != ours.vocabulary:
        raise ValueError(
            f"the draft knows {its.vocabulary} tokens and the model {ours.vocabulary}; take a draft with the model's "
            "own tokenizer."
        )
    if its.context < ours.context:
        raise ValueError(
            f"the draft was made for {its.context} tokens and the model for {ours.context}; take a draft that reads as "
            "far as the model."
        )
    if draft.device != model.device:
        raise ValueError(f"the draft is on {draft.device} and the model on {model.device}; put both on one device.")
