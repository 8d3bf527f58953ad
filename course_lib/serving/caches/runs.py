"""Which sequences a run of the model is for, where each has a length of its own, and where their tokens lie.

A run is either the whole prompt of one sequence that is new, or one token each of sequences that are not. Caches are
made of this: `course_lib.serving.caches.sequences` of keys and values, `course_lib.serving.caches.latent_sequences` of
latents.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch

from course_lib.serving.memory import BlockAllocator


class Step(NamedTuple):
    """One token each of some sequences whose tokens lie in pages: what a decode step has to know of them."""

    positions: torch.Tensor  # int64 [batch], where each token stands in its sequence
    slots: torch.Tensor  # int64 [batch], where it goes: page · page_size + place
    tables: torch.Tensor  # int32 [batch, columns], each sequence's pages in order; -1 behind them, and given back
    ends: torch.Tensor  # int32 [batch], tokens of each sequence, this one included


class Sequences(ABC):
    """The sequences in a cache, and those of the run under way."""

    def __init__(self, device: torch.device | str):
        self.device = device
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

    @property
    def new_tokens(self) -> int:
        """Tokens of each sequence of the run under way; 0 between runs."""
        return self._new

    @property
    def prompt(self) -> bool:
        """Whether the run is a prompt: nothing lies in the cache before it."""
        return self.lengths[self._names[0]] == self._new

    def append(self, layer: int, *fresh: torch.Tensor) -> None:
        """Store what the run's tokens leave in a layer: a key and a value, or a latent row."""
        self._fresh = fresh
        self._store(layer, *fresh)

    def advance(self, new_tokens: int) -> None:
        """The run is over. Its tokens were counted when room was taken for them."""
        self._names, self._new = [], 0

    def free(self, sequence: Hashable) -> None:
        """Forget a sequence."""
        del self.lengths[sequence]

    # What differs: where the tokens lie, and whose functions fill and read the memory.

    @abstractmethod
    def _reserve(self, sequences: Sequence[Hashable], new_tokens: int) -> None:
        """Make room, or raise a MemoryError with nothing changed; lengths are those before the run."""

    @abstractmethod
    def _prepare(self) -> None:
        """What all layers of the run need; lengths include its tokens."""

    @abstractmethod
    def _store(self, layer: int, *fresh: torch.Tensor) -> None:
        """What was given to `append`."""


class InRows(Sequences):
    """A row of `capacity` tokens for each sequence. They are numbers from 0 to rows - 1, those of a run consecutive."""

    def __init__(self, rows: int, capacity: int, device: torch.device | str):
        super().__init__(device)
        self.row_count, self.capacity = rows, capacity

    def _reserve(self, sequences, new_tokens):
        rows, capacity = self.row_count, self.capacity
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


class InPages(Sequences):
    """Pages of `page_size` tokens out of one pool, handed out by an allocator.

    Args:
        pages, page_size: of the pool, and tokens in a page.
        allocator, slot_mapping: as in `course_lib.serving.caches.sequences.SequencePages`.
        kept: how many tokens a later query sees, its own among them; pages before them are given back. None: all.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        allocator,
        slot_mapping: Callable,
        device: torch.device | str,
        kept: int | None = None,
    ):
        super().__init__(device)
        self.allocator = BlockAllocator(pages, page_size) if allocator is None else allocator
        self.page_size, self._slot_mapping, self._kept = page_size, slot_mapping, kept
        self._given: Step | None = None  # of a view: the tensors that it reads
        self._moved: tuple | None = None  # slots, tables and ends of the run on the device, once they are asked for

    @property
    @abstractmethod
    def memory(self) -> tuple[torch.Tensor, ...]:
        """The pools of pages, each [layers, pages, ...]."""

    def reading(self, step: Step) -> "InPages":
        """A view of this cache for the decoder: its run is one token of each row of `step`, whatever it holds by then.

        step: tensors on the cache's device. Nothing is asked of the host while the decoder runs, and no sequence gets
        longer: a graph can record the run, and replay it with new contents.
        """
        view = copy.copy(self)
        view._given, view._moved = step, (step.slots, step.tables, step.ends)
        return view

    def step_on_host(self) -> Step:
        """The run that room was taken for, on the CPU; of the tokens of a prompt there are as many slots."""
        slots, tables, ends = self._on_host
        return Step(ends.long() - 1, slots, tables, ends)

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Positions of the tokens of the run, int64 [batch, new_tokens]."""
        return super().positions(new_tokens) if self._given is None else self._given.positions[:, None]

    @property
    def prompt(self) -> bool:
        """Whether the run is a prompt: nothing lies in the cache before it."""
        return self._given is None and super().prompt

    def table(self, sequence: Hashable) -> list[int]:
        """The pages of a sequence, in the order of its tokens; -1 for one that was given back."""
        return [int(page) for page in self.allocator.table(sequence)]

    def held(self) -> dict[int, tuple[Hashable, int]]:
        """For each page that somebody holds: its sequence, and how many tokens of it are in the page."""
        return {
            page: (name, min(self.page_size, max(0, length - first * self.page_size)))
            for name, length in self.lengths.items()
            for first, page in enumerate(self.table(name))
            if page >= 0
        }

    def advance(self, new_tokens: int) -> None:
        """The run is over. Pages that no query behind it can see are given back, if the cache was made so."""
        if self._kept is not None and self._given is None:
            for name in self._names:
                self.allocator.give_back(name, max(0, self.lengths[name] + 1 - self._kept))  # the next stands at length
        super().advance(new_tokens)

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
        self._on_host = self._slot_mapping(padded, lengths, new, self.page_size).cpu(), padded, lengths
        self._moved = None

    def _on_device(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Slots, tables and ends of the run. Copied when the first layer asks: a replayed step never does."""
        if self._moved is None:
            self._moved = tuple(tensor.to(self.device) for tensor in self._on_host)
        return self._moved


def slots_in_pages(block_tables, lengths, new_tokens, page_size: int) -> torch.Tensor:
    """Where the last new_tokens of each sequence lie in the pool: int64 [all new tokens], page · page_size + offset.

    block_tables: integers [batch, max_blocks]; lengths, new_tokens: integers [batch], lengths with the new tokens.
    """
    slots = []
    for table, length, new in zip(block_tables, lengths.tolist(), new_tokens.tolist()):
        tokens = torch.arange(length - new, length)
        slots.append(table[tokens // page_size].long() * page_size + tokens % page_size)
    return torch.cat(slots)
