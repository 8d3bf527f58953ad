"""A conversation with a published model: each answer streams as text, and what was said stays in the cache.

    model, tokenizer = load("SmolLM2-135M-Instruct")        # course_lib.models.loading.pretrained
    talk = Conversation(model, tokenizer)
    for piece in talk.say("What is the capital of France?"):
        print(piece, end="", flush=True)

A turn runs only what the cache does not hold: of the second question its own tokens, not the first one's again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.operator import attention as kernel_attention
from course_lib.kernels.decode.attention import decode_attention
from course_lib.models.decoder import Decoder
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.models.torch_attention import torch_attention
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.generation import stream
from course_lib.serving.text_stream import TextStream

ROOM = 2048  # tokens of a conversation, unless another number is asked for


@dataclass
class Pace:
    """How fast an answer came: tokens, seconds until the first one, and seconds in all."""

    tokens: int = 0
    first: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.tokens:
            return "no tokens"
        rate = (self.tokens - 1) / max(self.seconds - self.first, 1e-9)
        after = f", then {rate:.1f} a second" if self.tokens > 1 else ""
        return f"{self.tokens} tokens, the first after {self.first:.2f} s{after}"


class Conversation:
    """What was said so far, and a cache that holds it.

    Args:
        model, tokenizer: of `load`.
        kernels: attention and glue by the course's kernels, or by PyTorch's operations. None takes the kernels on a GPU
            alone: in Triton's interpreter a token takes seconds.
        system: what the model is told before all; None leaves that to its template.
        room: tokens that the conversation may have.

    Attributes:
        messages: as the model's template takes them.
        pace: of the last answer.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        kernels: bool | None = None,
        system: str | None = None,
        room: int = ROOM,
    ):
        kernels = not interpreting() if kernels is None else kernels
        self.model, self.tokenizer = model, tokenizer
        model.glue = FUSED if kernels else TORCH
        self.cache = KVCache(
            model.config,
            1,
            min(room, model.config.context),
            dtype=model.dtype,
            device=model.device,
            attention=kernel_attention if kernels else torch_attention,
            decode=decode_attention if kernels else None,
        )
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.pace = Pace()
        self._held: list[int] = []  # tokens in the cache

    def say(self, text: str, *, new_tokens: int = 256, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """The model's answer to `text`, in pieces as they are known.

        Args:
            text: the user's next message.
            new_tokens: at most so many; an answer that reaches them ends in the middle.
            temperature, seed: see `stream`.

        An answer that is not taken to its end is kept as far as it was taken. Raises a ValueError when the conversation
        does not fit into its room; nothing has been added to it then.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.conversation(asked).tolist()
        if len(prompt) + new_tokens > self.cache.capacity:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens, and with {new_tokens} of an answer it does not fit into "
                f"{self.cache.capacity}. Begin a new one, ask for a shorter answer, or give it more room (the model "
                f"was made for {self.model.config.context})."
            )
        self.messages = asked
        return self._answer(prompt, new_tokens, temperature, seed)

    def _answer(self, prompt: list[int], new_tokens: int, temperature: float, seed: int) -> Iterator[str]:
        held = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(self._held, prompt[:-1])))
        self.cache.truncate(min(held, self.cache.length))
        written: list[int] = []
        self.pace = Pace()
        text = TextStream(self.tokenizer)
        try:
            for token in self._tokens(prompt[self.cache.length :], written, new_tokens, temperature, seed):
                if piece := text.push(token):
                    yield piece
            if piece := text.end():
                yield piece
        finally:
            self._held = (prompt + written)[: self.cache.length]
            self.messages = [*self.messages, {"role": "assistant", "content": text.text}]

    def _tokens(self, prompt, written, new_tokens, temperature, seed) -> Iterator[int]:
        begun = time.perf_counter()
        fed = torch.tensor([prompt], device=self.model.device)
        options = {"cache": self.cache, "temperature": temperature, "seed": seed}
        for token in stream(self.model, fed, new_tokens, **options):
            written.append(int(token))
            self.pace.seconds = time.perf_counter() - begun
            self.pace.first = self.pace.first or self.pace.seconds
            if written[-1] in self.tokenizer.stops:
                return
            self.pace.tokens += 1
            yield written[-1]
