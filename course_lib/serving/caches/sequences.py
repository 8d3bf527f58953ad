"""Caches for several sequences that each have a length of their own, made of chapter 05's and 06's functions.

`KVCache` holds sequences of one length. Here each has its own, as on a server: one has just come with its prompt while
another is at its hundredth token. Both caches answer the decoder's calls (see `course_lib.models.decoder`), and one
more comes before them:

    cache.take(sequences, new_tokens)    make room for the next tokens of these sequences; the next run is theirs
    cache.free(sequence)                 it has ended, and its memory is free again

A run is either the whole prompt of one sequence that is new, or one token each of sequences that are not.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch

from course_lib.models.config import ModelConfig
from course_lib.models.torch_attention import torch_attention
from course_lib.serving.caches.contiguous import refuse_latent
from course_lib.serving.caches.runs import InPages, InRows, Sequences, slots_in_pages


class AttentionToKeys(Sequences):
    """Attention over a prompt that nothing precedes by `attention`, and of single tokens by what the memory is for."""

    attention: Callable

    def attend(self, layer: int, query: torch.Tensor, **options) -> torch.Tensor:
        """query: [batch, query_heads, new_tokens, head_dim]; options of the functions. Returns the same shape."""
        if self.prompt:
            return self.attention(query, *self._fresh, causal=True, **options)
        return self._decode(layer, query[:, :, 0].contiguous(), **options)[:, :, None]

    @abstractmethod
    def _decode(self, layer: int, query: torch.Tensor, **options) -> torch.Tensor:
        """query: [batch, query_heads, head_dim]; its token's key and value were handed to `_store`. The same shape."""


class SequenceRows(InRows, AttentionToKeys):
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
        super().__init__(rows, capacity, device)
        refuse_latent(config, "SequenceRows", "LatentRows")
        shape = (config.layers, rows, config.key_heads, capacity, config.head_dim)
        # Zeros, as exercise 5.5 promises finite leftovers.
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.attention, self._append, self._step = attention, append, step

    def _store(self, layer, key, value):
        if self.prompt:  # a later token is stored by the step
            self._append(key, value, self.keys[layer, self._rows], self.values[layer, self._rows], self._past)

    def _decode(self, layer, query, **options):
        key, value = (fresh[:, :, 0].contiguous() for fresh in self._fresh)  # [batch, key_heads, head_dim]
        caches = self.keys[layer, self._rows], self.values[layer, self._rows]
        return self._step(query, key, value, *caches, self._past, **options)


class SequencePages(InPages, AttentionToKeys):
    """One pool of pages for all sequences, run by chapter 06's functions.

    Args:
        config, page_size: the model's shape, and the tokens in a page.
        pages: of each layer's pool.
        allocator: hands out pages 0 to pages - 1 by `append(sequence, count)`, which raises a MemoryError when the pool
            is full, `table(sequence)`, `free(sequence)` and `free_pages()`, as exercise 6.2 asks for it. None: a
            `BlockAllocator` of all pages.
        slot_mapping: as `slots_in_pages`, and exercise 6.3.
        append: `append(key, value, key_pages, value_pages, slots)`, exercise 6.4: key, value [tokens, key_heads,
            head_dim] into pages [pages, key_heads, page_size, head_dim].
        decode: `decode(query, key_pages, value_pages, block_tables, lengths)` with query [batch, query_heads,
            head_dim], int32 block_tables [batch, max_blocks] and lengths [batch]. Exercise 6.5 asks for as many query
            heads as KV heads; `models.plugged.each_member` makes this of it.
        attention: for prompts, as in `KVCache`.
        drop: behind each run give back the pages that no later query can see; for a model with a sliding_window. Their
            table entries become -1, and `decode` must not read them. Of a window of W keys a step needs at most
            ceil((W - 1) / page_size) + 1 pages: the W keys begin in one, and the other W - 1 fill no more than so many
            behind it. A prompt is stored whole first. The allocator needs `give_back(sequence, before)` as
            `BlockAllocator` has it.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        *,
        append: Callable,
        decode: Callable,
        allocator=None,
        slot_mapping: Callable = slots_in_pages,
        attention: Callable = torch_attention,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        drop: bool = False,
    ):
        if drop and config.sliding_window is None:
            raise ValueError("drop is True and config.sliding_window is None: later queries see every page.")
        super().__init__(pages, page_size, allocator, slot_mapping, device, config.sliding_window if drop else None)
        refuse_latent(config, "SequencePages", "LatentPages")
        shape = (config.layers, pages, config.key_heads, page_size, config.head_dim)
        # Uninitialised on purpose: nothing may depend on what no token was written to.
        self.keys, self.values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
        self.attention, self._append, self._decode_pages = attention, append, decode

    def _store(self, layer, key, value):
        key, value = (rows.transpose(1, 2).flatten(0, 1) for rows in (key, value))  # [batch · new, key_heads, head_dim]
        slots, _, _ = self._on_device()
        self._append(key, value, self.keys[layer], self.values[layer], slots)

    def _decode(self, layer, query, **options):
        _, tables, ends = self._on_device()
        return self._decode_pages(query, self.keys[layer], self.values[layer], tables, ends, **options)

    @property
    def memory(self):
        return self.keys, self.values


class SteppedPages(SequencePages):
    """Pages to which one function adds a token of each sequence and attends, as exercise 14.4 asks for it.

    Args:
        step: `step(query, key, value, slots, tables, lengths, key_pages, value_pages)` with query [batch, query_heads,
            head_dim], key, value [batch, key_heads, head_dim], int64 slots [batch], int32 tables [batch, columns] and
            lengths [batch], the token included. Returns [batch, query_heads, head_dim].
        config, pages, page_size and the others: as in `SequencePages`; `append` is for prompts.
    """

    def __init__(self, config: ModelConfig, pages: int, page_size: int, *, step: Callable, **options):
        super().__init__(config, pages, page_size, decode=step, **options)
        for pool in self.memory:  # as exercise 14.4 promises finite leftovers
            pool.zero_()

    def _store(self, layer, key, value):
        if self.prompt:  # a later token is stored by the step
            super()._store(layer, key, value)

    def _decode(self, layer, query, **options):
        key, value = (fresh[:, :, 0].contiguous() for fresh in self._fresh)  # [batch, key_heads, head_dim]
        pools = self.keys[layer], self.values[layer]
        return self._decode_pages(query, key, value, *self._on_device(), *pools, **options)
