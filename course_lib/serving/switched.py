"""A model with parts of it exchanged for a reader's functions, which writes the most likely tokens after one text."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.models.decoder import Decoder
from course_lib.models.glue import TORCH
from course_lib.models.plugged import add_and_norm_of_rows
from course_lib.models.torch_attention import torch_attention
from course_lib.serving.caches.contiguous import refuse_window
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.runs import Sequences
from course_lib.serving.caches.switched import NoCache
from course_lib.serving.packed import joined
from course_lib.serving.proposals import PromptLookup
from course_lib.serving.published import FirstLayers

MOST_ROWS = 16  # of a product for few rows
MOST_GUESSES = 4  # tokens guessed for a run
Window = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class Parts:
    """What a run of the model is made of. Where nothing is given, PyTorch's operations do it.

    Attributes:
        attention: of a prompt, as a `Decoder` takes it.
        cache: `cache(model, tokens, parts)` makes an empty one for one sequence; None recomputes everything.
        add_and_norm, rope, few_rows: as exercises 13.2, 13.3 and 16.8 ask for them.
        sample, accept, verify: as exercises 16.2, 16.4 and 16.5 do. Without `accept` nothing is guessed.
    """

    attention: Callable = torch_attention
    cache: Callable | None = None
    add_and_norm: Callable | None = None
    rope: Callable | None = None
    sample: Callable | None = None
    few_rows: Callable | None = None
    accept: Callable | None = None
    verify: Callable | None = None


class Speaker:
    """A model in whose first `layers` layers the parts run; it writes the most likely tokens after one text.

    window: what is entered around each kind of work, by its name; see `course_lib.serving.token_time`.
    """

    def __init__(self, model: Decoder, parts: Parts, layers: int, window: Window = nullcontext):
        self.parts, self.layers, self.window = parts, layers, window
        self.model = assembled(model, parts, layers)
        weight = (self.model.embedding if self.model.logits is None else self.model.logits).weight
        self._logits: Callable = partial(F.linear, weight=weight)
        if parts.few_rows is not None and layers >= model.config.layers:
            self._logits = FewRows(weight, parts.few_rows)

    def write(self, prompt: Sequence[int], new_tokens: int) -> Iterator[list[int]]:
        """The new tokens, those of each run of the model together."""
        text, end, device = list(prompt), len(prompt) + new_tokens, self.model.device
        cache, fed, lookup = self._cache(end), 0, PromptLookup()
        while len(text) < end:
            room = min(MOST_GUESSES, end - len(text) - 1)
            guessing = self.parts.accept is not None and fed > 0 and room > 0
            guesses = list(lookup.propose(text, room)) if guessing else []
            run = text[fed:] + guesses
            with torch.inference_mode():
                if isinstance(cache, Sequences):
                    cache.take([0], len(run))
                with self.window("norms, rotation, gates"):
                    hidden = self.model.hidden(
                        torch.tensor([run], device=device), Windowed(cache, self.window), last_only=not guesses
                    )
                with self.window("products"):
                    logits = self._logits(hidden[0, -1 - len(guesses) :])  # [guesses + 1, vocabulary]
                with self.window("sampling"):
                    new = self._chosen(logits, len(text), guesses)
            text += new
            if self.parts.cache is not None:
                fed = len(text) - 1
                if len(new) <= len(guesses):
                    cache.truncate(fed)
            yield new

    def _cache(self, tokens: int) -> Any:
        parts, model = self.parts, self.model
        if parts.cache is None:
            first, rest = (NoCache(attention, model.device) for attention in (parts.attention, torch_attention))
            return FirstLayers(first, rest, self.layers)
        first = parts.cache(model, tokens, parts)
        whole = self.layers >= model.config.layers
        return first if whole else FirstLayers(first, new_cache(model, 1, tokens), self.layers)

    def _chosen(self, logits: torch.Tensor, length: int, guesses: list[int]) -> list[int]:
        """The tokens after a text of `length` tokens: the guesses that are right, and the one after them."""
        rows, vocabulary = logits.shape
        if self.parts.sample is None:
            likeliest = logits.argmax(dim=-1)
        else:
            positions = torch.arange(length, length + rows, device=logits.device)
            zeros = torch.zeros(rows, device=logits.device)  # temperatures: the most likely token
            likeliest = self.parts.sample(logits, zeros, torch.zeros_like(positions), positions)
        if self.parts.accept is None or not guesses:
            return likeliest.tolist()
        drafts = torch.tensor(guesses, device=logits.device)
        certain = (F.one_hot(tokens, vocabulary).float() for tokens in (drafts, likeliest))
        middle = torch.full((rows,), 0.5, device=logits.device)
        new = [int(token) for token in self.parts.accept(drafts, *certain, middle)]
        if not 1 <= len(new) <= rows:
            raise ValueError(f"accept gave {len(new)} tokens for {len(guesses)} guesses; it must give 1 to {rows}.")
        return new


class Windowed:
    """A cache whose work is that of attention; it enters a window for it."""

    def __init__(self, cache, window: Window):
        self._cache, self._window = cache, window
        self.positions, self.advance = cache.positions, cache.advance

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """As the cache's own."""
        with self._window("attention"):
            self._cache.append(layer, key, value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """As the cache's own."""
        with self._window("attention"):
            return self._cache.attend(layer, query)


def assembled(model: Decoder, parts: Parts, layers: int) -> Decoder:
    """A copy of a model, of the same weights in memory, with parts in its first layers."""
    model = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    blocks = model.blocks[:layers]
    if parts.add_and_norm is not None:
        norms = {norm for block in blocks for norm in (block.attention_norm, block.feed_forward_norm)}
        norms |= {model.norm} if layers >= model.config.layers else set()
        fused = add_and_norm_of_rows(parts.add_and_norm)
        model.glue = dataclasses.replace(TORCH, add_and_normalise=lambda update, x, norm: (
            fused if norm in norms else TORCH).add_and_normalise(update, x, norm))  # fmt: skip
    for block in blocks:
        if parts.rope is not None:
            block.attention = TurnedInPlace(block.attention, model.config, parts.rope)
        if parts.few_rows is not None:
            for module in list(block.modules()):
                for name, child in module.named_children():
                    if isinstance(child, nn.Linear):
                        setattr(module, name, FewRows(child.weight, parts.few_rows))
    return model


class TurnedInPlace(nn.Module):
    """A decoder's attention with one product for Q, K and V, whose result a function as 13.3's turns where it lies."""

    def __init__(self, attention, config, rope: Callable):
        super().__init__()
        refuse_window(config, "TurnedInPlace")
        self.heads, self.head_dim, self.rope = (config.query_heads, config.key_heads), config.head_dim, rope
        weight = joined(attention.query, attention.key, attention.value)
        self.project = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.output = attention.output
        self.project.weight = nn.Parameter(weight, requires_grad=False)

    def forward(self, x, cosine, sine, attention: Callable, layer: int, cache) -> torch.Tensor:
        """As `Attention.forward` of the decoder, for one sequence."""
        qkv = self.project(x)[0]  # [tokens, (query_heads + 2 · key_heads) · head_dim]
        self.rope(qkv, cosine[0], sine[0], torch.arange(len(qkv), device=x.device), *self.heads)
        heads = qkv.unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None]  # [1, heads, tokens, head_dim]
        query, key, value = heads.split([*self.heads, self.heads[1]], dim=1)
        cache.append(layer, key, value)
        return self.output(cache.attend(layer, query).transpose(1, 2).flatten(2))


class FewRows(nn.Module):
    """A product with a weight [outer, inner] in 16 bits, by a function as 16.8's where there are few rows."""

    def __init__(self, weight: torch.Tensor, few_rows: Callable):
        super().__init__()
        self.weight, self.few_rows = weight, few_rows
        self.weight_16 = weight.detach().half()  # of published weights, which have 16 bits, nothing is lost

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inner] -> [..., outer], of x's dtype."""
        rows = x.flatten(0, -2)
        if len(rows) > MOST_ROWS:
            return F.linear(x, self.weight)
        return self.few_rows(rows.half(), self.weight_16).to(x.dtype).view(*x.shape[:-1], -1)
