"""Caches for several sequences that each have a length of their own, made of chapter 05's and 06's functions.

`KVCache` holds sequences of one length. Here each has its own, as on a server: one has just come with its prompt while
another is at its hundredth token. Both caches answer the decoder's calls (see `course_lib.models.cache`), and one more
comes before them:

    cache.take(sequences, new_tokens)    make room for the next tokens of these sequences; the next run is theirs
    cache.free(sequence)                 it has ended, and its memory is free again

A run is either the whole prompt of one sequence that is new, or one token each of sequences that are not.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence

import torch

from course_lib.models.cache import refuse_latent
from course_lib.models.config import ModelConfig
from course_lib.models.torch_attention import torch_attention


class _Sequences(ABC):
    """What both caches share: which sequences the run is for, and attention over a prompt that nothing precedes."""

    def __init__(self, device: torch.device | str, attention: Callable):
        self.device, self.attention = device, attention
        self.lengths: dict[Hashable, int] = {}  # tokens of each sequence, those of the run under way included
        self._names: list[Hashable] = []  # of the run under way
        self._new = 0

    def take(self, sequences: Sequence[Hashable], new_tokens: int) -> None:
        """Make room for the next `new_tokens` tokens of each of these sequences.

        A sequence that is new comes alone, with its whole prompt; one that is not gets a single token. Raises a
        MemoryError when there is no room, and nothing has changed then.
        """
        known = [name in self.lengths for name in sequences]
        if not sequences or not (all(known) and new_tokens == 1 or len(sequences) == 1 and not any(known)):
            raise ValueError(
                f"{len(sequences)} sequences with {new_tokens} new tokens, {sum(known)} of them known: a run is the "
                "prompt of one new sequence, or one token for each of several that have had theirs."
            )
        self._reserve(sequences, new_tokens)
        self._names, self._new = list(sequences), new_tokens
        for name in sequences:
            self.lengths[name] = self.lengths.get(name, 0) + new_tokens
        self._prepare()

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Positions of the tokens of the run, int64 [batch, new_tokens]."""
        if new_tokens != self._new:
            raise ValueError(f"the model is run over {new_tokens} tokens; room was taken for {self._new}.")
        ends = torch.tensor([self.lengths[name] for name in self._names], device=self.device)
        return ends[:, None] - new_tokens + torch.arange(new_tokens, device=self.device)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query: [batch, query_heads, new_tokens, head_dim]. Returns the same shape."""
        if self.lengths[self._names[0]] == self._new:  # a prompt: nothing lies in the cache before it
            return self.attention(query, *self._fresh, causal=True)
        return self._decode(layer, query[:, :, 0].contiguous())[:, :, None]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [batch, key_heads, new_tokens, head_dim], of the run's tokens."""
        self._fresh = key, value
        self._store(layer, key, value)

    def advance(self, new_tokens: int) -> None:
        """The run is over. Its tokens were counted when room was taken for them."""
        self._names, self._new = [], 0

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence."""
        del self.lengths[sequence]

    # What differs: the memory, and whose functions fill and read it.

    @abstractmethod
    def _reserve(self, sequences: Sequence[Hashable], new_tokens: int) -> None:
        """Make room, or raise a MemoryError with nothing changed; lengths are those before the run."""

    @abstractmethod
    def _prepare(self) -> None:
        """What all layers of the run need; lengths include its tokens."""

    @abstractmethod
    def _store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value: [batch, key_heads, new_tokens, head_dim]."""

    @abstractmethod
    def _decode(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query: [batch, query_heads, head_dim]; its token's key and value were handed to `_store`. The same shape."""


class SequenceRows(_Sequences):
    """A contiguous cache, a row of `capacity` tokens for each sequence, filled and read by chapter 05's functions.

    Sequences are numbers from 0 to rows - 1, those of a run consecutive.

    Args:
        config, rows, capacity: the model's shape, the sequences that fit, the tokens that fit in each.
        append: `append(key, value, key_cache, value_cache, positions)`, exercise 5.3: key, value [batch, key_heads,
            new_tokens, head_dim] into caches [batch, key_heads, capacity, head_dim] at int32 positions [batch].
        step: `step(query, key, value, key_cache, value_cache, past)`, exercise 5.5: store one token of each sequence
            and attend over all; query [batch, query_heads, head_dim], key, value [batch, key_heads, head_dim], past
            int32 [batch], the tokens before it. Returns [batch, query_heads, head_dim].
        attention: for prompts, as in `KVCache`.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        append: Callable,
        step: Callable,
        attention: Callable = torch_attention,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device, attention)
        refuse_latent(config, "SequenceRows", "LatentPages")
        shape = (config.layers, rows, config.key_heads, capacity, config.head_dim)
        # Zeros, as exercise 5.5 promises finite leftovers.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._append, self._step = append, step

    def _reserve(self, sequences, new_tokens):
        rows, capacity = self.keys.shape[1], self.keys.shape[3]
        if list(sequences) != list(range(sequences[0], sequences[0] + len(sequences))):
            raise ValueError(
                f"sequences are {list(sequences)}; those of a run must lie in rows that follow each other."
            )
        if not 0 <= sequences[0] <= sequences[-1] < rows:
            raise MemoryError(f"there are {rows} rows, and sequence {sequences[-1]} would need one more.")
        if max(self.lengths.get(name, 0) for name in sequences) + new_tokens > capacity:
            raise MemoryError(f"a row holds {capacity} tokens, and {new_tokens} more do not fit.")

    def _prepare(self):
        self._rows = slice(self._names[0], self._names[-1] + 1)
        past = [self.lengths[name] - self._new for name in self._names]
        self._past = torch.tensor(past, dtype=torch.int32, device=self.device)

    def _store(self, layer, key, value):
        if self.lengths[self._names[0]] == self._new:  # a later token is stored by the step
            self._append(key, value, self.keys[layer, self._rows], self.values[layer, self._rows], self._past)

    def _decode(self, layer, query):
        key, value = (fresh[:, :, 0].contiguous() for fresh in self._fresh)  # [batch, key_heads, head_dim]
        return self._step(query, key, value, self.keys[layer, self._rows], self.values[layer, self._rows], self._past)


class SequencePages(_Sequences):
    """One pool of pages for all sequences, run by chapter 06's functions.

    Args:
        config, page_size: the model's shape, and the tokens in a page.
        pages: of each layer's pool.
        allocator: hands out pages 0 to pages - 1 by `append(sequence, count)`, which raises a MemoryError when the pool
            is full, `table(sequence)`, `free(sequence)` and `free_pages()`; exercise 6.2.
        slot_mapping: `slot_mapping(block_tables, lengths, new_tokens, page_size)` gives int64 slots; exercise 6.3.
        append: `append(key, value, key_pages, value_pages, slots)`, exercise 6.4: key, value [tokens, key_heads,
            head_dim] into pages [pages, key_heads, page_size, head_dim].
        decode: `decode(query, key_pages, value_pages, block_tables, lengths)` with query [batch, query_heads,
            head_dim], int32 block_tables [batch, max_blocks] and lengths [batch]. Exercise 6.5 asks for as many query
            heads as KV heads; `plugged.each_member` makes this of it.
        attention: for prompts, as in `KVCache`.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        *,
        allocator,
        slot_mapping: Callable,
        append: Callable,
        decode: Callable,
        attention: Callable = torch_attention,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(device, attention)
        refuse_latent(config, "SequencePages", "LatentPages")
        shape = (config.layers, pages, config.key_heads, page_size, config.head_dim)
        # Uninitialised on purpose: nothing may depend on what no token was written to.
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.page_size, self.allocator = page_size, allocator
        self._slot_mapping, self._append, self._decode_pages = slot_mapping, append, decode

    def table(self, sequence: Hashable) -> list[int]:
        """The pages of a sequence, in the order of its tokens."""
        return [int(page) for page in self.allocator.table(sequence)]

    def held(self) -> dict[int, tuple[Hashable, int]]:
        """For each page that somebody holds: its sequence, and how many tokens of it are in the page."""
        return {
            page: (name, min(self.page_size, max(0, length - first * self.page_size)))
            for name, length in self.lengths.items()
            for first, page in enumerate(self.table(name))
        }

    def free(self, sequence: Hashable) -> None:
        """Give back the pages of a sequence."""
        super().free(sequence)
        self.allocator.free(sequence)

    def _reserve(self, sequences, new_tokens):
        if new_tokens == 1:  # all sequences or none: the allocator itself answers for one sequence at a time
            full = sum(self.lengths.get(name, 0) % self.page_size == 0 for name in sequences)
            if full > (free := self.allocator.free_pages()):
                raise MemoryError(f"{full} of {len(sequences)} sequences need a page more, and {free} are free.")
        for name in sequences:
            self.allocator.append(name, new_tokens)

    def _prepare(self):
        tables = [self.table(name) for name in self._names]
        widest = max(map(len, tables))
        padded = torch.tensor([table + [-1] * (widest - len(table)) for table in tables], dtype=torch.int32)
        lengths = torch.tensor([self.lengths[name] for name in self._names], dtype=torch.int32)
        new = torch.full((len(self._names),), self._new, dtype=torch.int32)
        # The slots serve all layers, since each layer's pool has the same pages.
        self._slots = self._slot_mapping(padded, lengths, new, self.page_size).to(self.device)
        self._tables, self._ends = padded.to(self.device), lengths.to(self.device)

    def _store(self, layer, key, value):
        key, value = (rows.transpose(1, 2).flatten(0, 1) for rows in (key, value))  # [batch · new, key_heads, head_dim]
        self._append(key, value, self.keys[layer], self.values[layer], self._slots)

    def _decode(self, layer, query):
        return self._decode_pages(query, self.keys[layer], self.values[layer], self._tables, self._ends)


class WholeRuns:
    """An allocator for `SequencePages` that reserves as a contiguous cache does: a run of pages for each sequence.

    Args:
        pages, page_size: of the pool.
        reserved: tokens that each sequence gets a run of pages for, whatever it will need.
    """

    def __init__(self, pages: int, page_size: int, reserved: int):
        self.pages, self.page_size, self.room = pages, page_size, reserved
        self.run = -(-reserved // page_size)  # pages
        self.starts = list(range(0, pages - self.run + 1, self.run))[::-1]  # first pages of the runs that are free
        self.start_of: dict[Hashable, int] = {}
        self.length_of: dict[Hashable, int] = {}

    def append(self, sequence: Hashable, count: int) -> None:
        """Count more tokens of a sequence; a new one gets a run. MemoryError when there is none, or its own is full."""
        length = self.length_of.get(sequence, 0) + count
        if length > self.room or sequence not in self.start_of and not self.starts:
            raise MemoryError(
                f"{sequence} would have {length} tokens; {len(self.starts)} runs of {self.room} are free."
            )
        if sequence not in self.start_of:
            self.start_of[sequence] = self.starts.pop()
        self.length_of[sequence] = length

    def free(self, sequence: Hashable) -> None:
        """Give a run back."""
        self.starts.append(self.start_of.pop(sequence))
        del self.length_of[sequence]

    def table(self, sequence: Hashable) -> list[int]:
        """The pages of a sequence's run."""
        return list(range(self.start_of[sequence], self.start_of[sequence] + self.run))

    def free_pages(self) -> int:
        """Pages in which no token lies; most of them can be had by one sequence alone."""
        return self.pages - sum(-(-length // self.page_size) for length in self.length_of.values())
