"""Caches of latents for several sequences that each have a length of their own, in rows or in pages.

They are used as those of `course_lib.serving.caches.sequences` are, by `write_together` for instance. A prompt goes
through the expanded form, and single tokens through the absorbed one; see `course_lib.models.latent`.

    write_together(model, LatentRows(model.config, rows=4, capacity=256, decode=your_kernel), prompts, 40)
"""

from collections.abc import Callable

import torch

from course_lib.kernels.latent.reference import latent_decode_reference, paged_latent_decode_reference
from course_lib.models.config import ModelConfig
from course_lib.serving.caches.latent import LatentForm, absorb_single_tokens
from course_lib.serving.caches.runs import InPages, InRows, Sequences, slots_in_pages


class AttentionToLatents(Sequences):
    """What both caches answer: nothing lies before a prompt, so its own rows are all there is to expand."""

    def absorbs(self, new_tokens: int) -> bool:
        """Single tokens do, of sequences that have had their prompts."""
        return not self.prompt

    def seen(self, layer: int, new_tokens: int) -> torch.Tensor:
        """The rows of a prompt, [1, new_tokens, latent_dim + rope_dim]."""
        return self._fresh[0]


class LatentRows(InRows, AttentionToLatents):
    """A contiguous cache, a row of `capacity` tokens for each sequence.

    Sequences are numbers from 0 to rows - 1, those of a run consecutive.

    Args:
        config, rows, capacity: the model's shape, the sequences that fit, the tokens that fit in each.
        decode: as in `course_lib.serving.caches.latent.LatentCache`; lengths differ here.
    """

    def __init__(
        self,
        config: ModelConfig,
        rows: int,
        capacity: int,
        *,
        decode: Callable = latent_decode_reference,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(rows, capacity, device)
        self.form = LatentForm(config, decode, absorb_single_tokens)
        # Uninitialised on purpose: nothing may depend on what no token was written to.
        self.rows = torch.empty(config.layers, rows, capacity, self.form.row_dim, dtype=dtype, device=device)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query: [batch, 1, heads, latent_dim + rope_dim], absorbed. Returns [batch, 1, heads, latent_dim]."""
        return self.form.attend(query, self.rows[layer, self._rows], self._past + 1)

    def _store(self, layer, *fresh):
        (rows,) = fresh  # [batch, new_tokens, latent_dim + rope_dim]
        places = self._past[:, None].long() + torch.arange(self._new, device=self.device)  # [batch, new_tokens]
        self.rows[layer, self._rows].scatter_(1, places[..., None].expand_as(rows), rows)


class LatentPages(InPages, AttentionToLatents):
    """One pool of pages for all sequences.

    Args:
        config, page_size: the model's shape, and the tokens in a page.
        pages: of each layer's pool.
        allocator, slot_mapping: as in `course_lib.serving.caches.sequences.SequencePages`.
        decode: `decode(query, pages, block_tables, lengths, scale=..., value_dim=...)`, as
            `paged_latent_decode_reference` computes it: query [batch, 1, heads, latent_dim + rope_dim], pages [pages,
            page_size, latent_dim + rope_dim], int32 block_tables [batch, max_blocks] and lengths [batch].
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        *,
        allocator=None,
        slot_mapping: Callable = slots_in_pages,
        decode: Callable = paged_latent_decode_reference,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        super().__init__(pages, page_size, allocator, slot_mapping, device)
        self.form = LatentForm(config, decode, absorb_single_tokens)
        # Uninitialised on purpose, as in `LatentRows`.
        self.pages = torch.empty(config.layers, pages, page_size, self.form.row_dim, dtype=dtype, device=device)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query: [batch, 1, heads, latent_dim + rope_dim], absorbed. Returns [batch, 1, heads, latent_dim]."""
        _, tables, ends = self._on_device()
        return self.form.attend(query, self.pages[layer], tables, ends)

    @property
    def memory(self):
        return (self.pages,)

    def _store(self, layer, *fresh):
        (rows,) = fresh  # [batch, new_tokens, latent_dim + rope_dim]
        slots, _, _ = self._on_device()
        self.pages[layer].flatten(0, 1)[slots] = rows.flatten(0, 1)
