"""Caches of one sequence for what the finale of chapter 16 switches on: none at all, and pages that take guesses."""

from __future__ import annotations

from collections.abc import Callable

import torch

from course_lib.models.config import ModelConfig
from course_lib.serving.caches.sequences import SequencePages


class NoCache:
    """It keeps nothing: each step runs the whole text again, and attention is over what the step itself has.

    attention: `attention(query, key, value, causal=True)`, as a `Decoder` takes it.
    """

    def __init__(self, attention: Callable, device: torch.device):
        self.attention, self.device = attention, device

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Positions of the text's tokens, int64 [1, new_tokens]."""
        return torch.arange(new_tokens, device=self.device)[None]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Hold a layer's keys and values until `attend` has used them."""
        self._fresh = key, value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of all tokens."""
        return self.attention(query, *self._fresh, causal=True)

    def advance(self, new_tokens: int) -> None:
        """The step is over."""


class GuessedPages(SequencePages):
    """Pages of one sequence, called 0, which may take several tokens behind its prompt and forget the last ones again.

    So a step can run guesses behind the newest token.

    Args:
        verify: `verify(query, key_pages, value_pages, block_tables, lengths)` for several tokens, as exercise 16.5 asks
            for it: query [1, tokens, query_heads, head_dim]. None: no run may have guesses.
        config, pages, page_size and the others: as in `SequencePages`.
    """

    def __init__(self, config: ModelConfig, pages: int, page_size: int, *, verify: Callable | None, **options):
        if options.get("drop"):
            raise ValueError("drop is True; a query behind forgotten guesses may see pages that were given back.")
        super().__init__(config, pages, page_size, **options)
        self._verify = verify

    def take(self, sequences, new_tokens: int) -> None:
        """As in `SequencePages`, and several tokens of a sequence that is known."""
        if self._verify is None or 0 not in self.lengths or new_tokens == 1:
            super().take(sequences, new_tokens)
            return
        self._reserve(sequences, new_tokens)
        self._names, self._new = [0], new_tokens
        self.lengths[0] += new_tokens
        self._prepare()

    def truncate(self, length: int) -> None:
        """Forget what stands from position `length` on. The pages stay the sequence's, for the next tokens."""
        self.lengths[0] = length

    def attend(self, layer: int, query: torch.Tensor, **options) -> torch.Tensor:
        """query: [1, query_heads, new_tokens, head_dim]. Returns the same shape."""
        if self._verify is None or self.prompt or query.shape[2] == 1:
            return super().attend(layer, query, **options)
        _, tables, ends = self._on_device()
        rows = query.transpose(1, 2).contiguous()  # [1, new_tokens, query_heads, head_dim]
        return self._verify(rows, self.keys[layer], self.values[layer], tables, ends, **options).transpose(1, 2)

    def _reserve(self, sequences, new_tokens):
        room = self.allocator.length(0) if 0 in self.lengths else 0  # what was taken for guesses is there still
        more = self.lengths.get(0, 0) + new_tokens - room
        if more > 0:
            self.allocator.append(0, more)
