"""A conversation with a published model: each answer streams as text, and what was said is not computed again.

    model, tokenizer = load("SmolLM2-135M-Instruct")        # course_lib.models.loading.pretrained
    talk = Conversation(new_engine(model, tokenizer))
    for piece in talk.say("What is the capital of France?"):
        print(piece, end="", flush=True)

Each question is a request with the whole conversation as its prompt. The engine has the beginning in its pages still.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import torch

from course_lib.models.decoder import Decoder
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.engine import Engine
from course_lib.serving.metrics import Times
from course_lib.serving.requests import GREEDY, Request, Sampling

PAGE_SIZE = 16
SHARE_OF_FREE_MEMORY = 0.8  # of a GPU, for the cache; the rest is for what a step computes
TOKENS_ON_CPU = 8192


def new_engine(
    model: Decoder, tokenizer: Tokenizer, *, pages: int | None = None, draft: Decoder | None = None, **options
) -> Engine:
    """An engine with pages of PAGE_SIZE tokens: for a good part of a GPU's free memory, on a CPU for TOKENS_ON_CPU.

    pages: another number. draft, options: further arguments of `Engine`; a draft's pages take memory too.
    """
    if pages is None and model.device.type == "cpu":
        pages = TOKENS_ON_CPU // PAGE_SIZE
    elif pages is None:
        free, _ = torch.cuda.mem_get_info(model.device)
        models = [model] if draft is None else [model, draft]
        page_bytes = PAGE_SIZE * sum(one.config.cache_bytes_per_token(one.dtype.itemsize) for one in models)
        pages = max(1, math.floor(SHARE_OF_FREE_MEMORY * free / page_bytes))
    return Engine(model, tokenizer, pages=pages, page_size=PAGE_SIZE, draft=draft, **options)


class Conversation:
    """What was said so far.

    Args:
        engine: that answers; others may use it too, as long as one at a time steps it.
        system: what the model is told before all; None leaves that to its template.

    Attributes:
        messages: as the model's template takes them.
        times: of the last answer.
    """

    def __init__(self, engine: Engine, system: str | None = None):
        self.engine = engine
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.times: Times | None = None

    def say(
        self, text: str, *, new_tokens: int = 256, sampling: Sampling = GREEDY, speculate: int = 0
    ) -> Generator[str, None, None]:
        """The model's answer to `text`, in pieces as they are known.

        Args:
            text: the user's next message.
            new_tokens: at most so many; an answer that reaches them ends in the middle.
            sampling, speculate: how they are chosen, as `Request` takes it.

        An answer that is not taken to its end is kept as far as it was taken. Raises what `Engine.submit` raises, with
        nothing added to the conversation, and a RuntimeError where the model failed.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.engine.tokenizer.conversation(asked).tolist()
        number = self.engine.submit(Request(prompt, new_tokens, sampling, speculate=speculate))
        self.messages, self.times = asked, self.engine.metrics.times[number]
        return self._answer(number)

    def _answer(self, number: int) -> Generator[str, None, None]:
        said, ended = "", None
        try:
            while ended is None:
                for event in self.engine.step():
                    if event.number != number:
                        continue
                    if event.error:
                        raise RuntimeError(event.error)
                    ended = event.ended
                    if event.text:
                        said += event.text
                        yield event.text
        finally:
            self.engine.cancel(number)
            self.messages = [*self.messages, {"role": "assistant", "content": said}]
