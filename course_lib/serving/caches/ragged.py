"""A paged cache for steps in which each sequence runs any number of tokens: one, a piece of its prompt, or all of it.

The tokens of a step lie one after another, as one row [1, tokens], those of the sequences with a single token first. So
a `Decoder` runs them as a batch of one text, and only this cache knows where one sequence ends and the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from course_lib.kernels.decode.append import append_to_pages
from course_lib.kernels.paged.attention import paged_decode_attention
from course_lib.kernels.paged.prefill import paged_prefill_attention
from course_lib.models.config import ModelConfig
from course_lib.serving.caches.contiguous import refuse_latent, refuse_window


@dataclass(frozen=True)
class Run:
    """Some tokens of a sequence: where they begin in it, how many they are, and the sequence's pages."""

    begin: int
    count: int
    pages: Sequence[int]


class RaggedPages:
    """Keys and values in one pool of pages a layer, for the sequences of a step.

    Args:
        config, pages, page_size: the model's shape, the pages of the pool, the tokens in a page.
        kernels: the course's kernels, or PyTorch's operations.

    Attributes:
        places, slots: int64 [tokens], where the step's tokens stand in their sequences, and in the pool.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        *,
        kernels: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        refuse_latent(config, "RaggedPages", "LatentPages")
        refuse_window(config, "RaggedPages")
        shape = (config.layers, pages, config.key_heads, page_size, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.page_size, self.kernels, self.device = page_size, kernels, torch.device(device)
        self._runs: list[Run] = []

    @property
    def memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools of pages, [layers, pages, key_heads, page_size, head_dim]."""
        return self.keys, self.values

    def take(self, runs: Sequence[Run]) -> None:
        """What the next step runs; those of a single token must come first."""
        counts = [run.count for run in runs]
        if counts != sorted(counts, key=lambda count: count > 1):
            raise ValueError(f"the runs have {counts} tokens; those of a single token must come first.")
        self._runs = list(runs)
        self._single = sum(count == 1 for count in counts)
        tables = [list(run.pages) for run in runs]
        widest = max(map(len, tables))
        places = [torch.arange(run.begin, run.begin + run.count) for run in runs]
        slots = [torch.tensor(table)[place // self.page_size] * self.page_size + place % self.page_size
                 for table, place in zip(tables, places)]  # fmt: skip
        starts = [0]
        for count in counts[self._single :]:
            starts.append(starts[-1] + count)
        self._longest = max(counts)
        self.places, self.slots = (torch.cat(parts).to(self.device) for parts in (places, slots))
        # Behind a sequence's pages stands its first one: a page number that is right.
        padded = torch.tensor([table + table[:1] * (widest - len(table)) for table in tables], dtype=torch.int32)
        ends = torch.tensor([run.begin + run.count for run in runs], dtype=torch.int32)
        self._tables, self._ends = padded.to(self.device), ends.to(self.device)
        self._starts = torch.tensor(starts, dtype=torch.int32, device=self.device)

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Where the step's tokens stand in their sequences, int64 [1, new_tokens]."""
        if new_tokens != len(self.places):
            raise ValueError(f"the model is run over {new_tokens} tokens; the step has {len(self.places)}.")
        return self.places[None]

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the step's keys and values, [1, key_heads, tokens, head_dim]."""
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)  # [tokens, key_heads, head_dim]
        if self.kernels:
            append_to_pages(key, value, self.keys[layer], self.values[layer], self.slots, validate=False)
        else:
            pages, inside = self.slots // self.page_size, self.slots % self.page_size
            self.keys[layer][pages, :, inside] = key
            self.values[layer][pages, :, inside] = value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the step's tokens, [1, query_heads, tokens, head_dim], each to its own sequence."""
        return self.attend_rows(layer, query[0].transpose(0, 1)).transpose(0, 1)[None]

    def attend_rows(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """The same of [tokens, query_heads, head_dim]."""
        return self._by_kernels(layer, query) if self.kernels else self._by_pytorch(layer, query)

    def advance(self, new_tokens: int) -> None:
        """The step is over."""
        self._runs = []

    def _by_kernels(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        pools, single = (self.keys[layer], self.values[layer]), self._single
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if single:
            paged_decode_attention(
                query[:single], *pools, self._tables[:single], self._ends[:single], output=output[:single],
                validate=False,
            )  # fmt: skip
        if single < len(self._ends):
            paged_prefill_attention(
                query[single:], *pools, self._tables[single:], self._starts, self._ends[single:],
                longest_query=self._longest, output=output[single:], validate=False,
            )  # fmt: skip
        return output

    def _by_pytorch(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        outputs = []
        for run, rows in zip(self._runs, query.split([run.count for run in self._runs])):
            end = run.begin + run.count
            pages = torch.tensor(list(run.pages), device=self.device)
            pools = self.keys[layer], self.values[layer]
            key, value = (pool[pages].transpose(0, 1).flatten(1, 2)[:, :end] for pool in pools)
            mask = torch.ones(run.count, end, dtype=torch.bool, device=self.device).tril(run.begin)
            grouped = query.shape[1] != key.shape[0]
            outputs.append(F.scaled_dot_product_attention(
                rows.transpose(0, 1)[None], key[None], value[None], attn_mask=mask, enable_gqa=grouped
            )[0].transpose(0, 1))  # fmt: skip
        return torch.cat(outputs)
