"""Multi-head latent attention (MLA): a token leaves one short row in the cache, and all heads make theirs of it.

    latent       = RMSNorm(W_DKV x)                 [latent_dim]     kept
    rotary key   = RoPE(W_KR x)                     [rope_dim]       kept, one for all heads
    key of head h   = (W_UK,h latent, rotary key)   [nope_dim + rope_dim]
    value of head h =  W_UV,h latent                [value_dim]
    query of head h = (q_nope, RoPE(q_rope)), both of W_Q x          [nope_dim + rope_dim]

Two ways to compute the same:

    expanded   keys and values are made for every head and every token, then attention as always
    absorbed   q_nope · (W_UK latent) = (W_UKᵀ q_nope) · latent, so the query goes to the latents instead; and
               Σ p (W_UV latent) = W_UV (Σ p latent), so W_UV comes after the sum. Nothing is made per head and token.

FLOPs of the expanded form: 2 · heads · latent_dim · (nope_dim + value_dim) a token, to make its keys and values, and
2 · heads · (nope_dim + rope_dim + value_dim) for each query and key. Of the absorbed one: as much as a token's keys and
values for every query, and 2 · heads · (2 · latent_dim + rope_dim) for each query and key. So whole prompts are
expanded, and steps of decode absorbed.

Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434, section 2.1. As there, the latent has an RMSNorm (section 3.1.2),
and what the cache keeps has been through it. The compression of queries, which saves memory in training, is left out.

Its layers ask of a cache `positions` and `advance` as a decoder's others do (`course_lib.models.decoder`), and

    append(layer, rows)         store the new tokens' rows, [batch, new_tokens, latent_dim + rope_dim]
    absorbs(new_tokens)         whether the new tokens go through the absorbed form
    attend(layer, query)        if so: the weighted means of the latents for absorbed queries
    seen(layer, new_tokens)     if not: the rows that keys and values are made of, the new tokens' own last
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.models.config import ModelConfig
from course_lib.models.layers import RMSNorm, rotate


class LatentAttention(nn.Module):
    """The projections around latent attention; a cache, when there is one, sits between them.

    Attributes, with DeepSeek's names for them:
        query: W_Q and W_QR, [heads · (nope_dim + rope_dim), width]; each head's nope part first.
        compress: W_DKV, [latent_dim, width].
        rotary_key: W_KR, [rope_dim, width].
        latent_norm: RMSNorm over the latent.
        expand_key, expand_value: W_UK, [heads · nope_dim, latent_dim], and W_UV, [heads · value_dim, latent_dim].
        output: W_O, [width, heads · value_dim].
        scale: of the scores, 1/√(nope_dim + rope_dim), in both forms.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.latent is None:
            raise ValueError("config.latent is None; make a config with_latent(config, Latent(...)) first.")
        self.sizes, self.heads = config.latent, config.query_heads
        sizes, heads, width = self.sizes, self.heads, config.width
        self.scale = 1 / math.sqrt(sizes.head_dim)
        self.query = nn.Linear(width, heads * sizes.head_dim, bias=False)
        self.compress = nn.Linear(width, sizes.latent_dim, bias=False)
        self.rotary_key = nn.Linear(width, sizes.rope_dim, bias=False)
        self.latent_norm = RMSNorm(sizes.latent_dim, config.norm_epsilon)
        self.expand_key = nn.Linear(sizes.latent_dim, heads * sizes.nope_dim, bias=False)
        self.expand_value = nn.Linear(sizes.latent_dim, heads * sizes.value_dim, bias=False)
        self.output = nn.Linear(heads * sizes.value_dim, width, bias=False)

    @property
    def key_weight(self) -> torch.Tensor:
        """W_UK by heads, a view: [heads, nope_dim, latent_dim]."""
        return self.expand_key.weight.unflatten(0, (self.heads, self.sizes.nope_dim))

    @property
    def value_weight(self) -> torch.Tensor:
        """W_UV by heads, a view: [heads, value_dim, latent_dim]."""
        return self.expand_value.weight.unflatten(0, (self.heads, self.sizes.value_dim))

    def queries(self, x, cosine, sine) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries without and with a position: [batch, heads, tokens, nope_dim] and the same with rope_dim."""
        query = self.query(x).unflatten(-1, (self.heads, self.sizes.head_dim)).transpose(1, 2)
        plain, turned = query.split([self.sizes.nope_dim, self.sizes.rope_dim], dim=-1)
        return plain, rotate(turned, cosine, sine)

    def rows(self, x, cosine, sine) -> torch.Tensor:
        """What the tokens leave in the cache: [batch, tokens, latent_dim + rope_dim], the latent first."""
        rotary_key = rotate(self.rotary_key(x)[:, None], cosine, sine)[:, 0]  # [batch, tokens, rope_dim]
        return torch.cat([self.latent_norm(self.compress(x)), rotary_key], dim=-1)

    def expand(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [batch, heads, tokens, nope_dim + rope_dim] and values [batch, heads, tokens, value_dim] of rows."""
        latent, rotary_key = rows.split([self.sizes.latent_dim, self.sizes.rope_dim], dim=-1)
        plain = self.expand_key(latent).unflatten(-1, (self.heads, self.sizes.nope_dim)).transpose(1, 2)
        shared = rotary_key[:, None].expand(-1, self.heads, -1, -1)  # the same rotary key for every head
        value = self.expand_value(latent).unflatten(-1, (self.heads, self.sizes.value_dim)).transpose(1, 2)
        return torch.cat([plain, shared], dim=-1), value

    def expanded(self, queries: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor, attention: Callable):
        """Attention over keys and values of every head.

        Args:
            queries: as `queries` gives them.
            rows: [batch, key_length, latent_dim + rope_dim]; the last query stands at the last one.
            attention: `attention(query, key, value, causal=True)`, as `Decoder` takes it. Values that are narrower than
                keys are filled up with zeros for it, and the zeros are cut off its output: they change nothing else.

        Returns [batch, heads, tokens, value_dim].
        """
        key, value = self.expand(rows)
        value_dim = self.sizes.value_dim
        value = F.pad(value, (0, self.sizes.head_dim - value_dim))
        return attention(torch.cat(queries, dim=-1), key, value, causal=True)[..., :value_dim]

    def absorb(self, queries: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The queries as the rows of the cache meet them: [batch, tokens, heads, latent_dim + rope_dim]."""
        plain, turned = queries
        to_latents = torch.einsum("bhtn, hnc -> bthc", plain, self.key_weight)
        return torch.cat([to_latents, turned.transpose(1, 2)], dim=-1)

    def absorbed(self, queries: tuple[torch.Tensor, torch.Tensor], attend: Callable) -> torch.Tensor:
        """Attention over the rows themselves.

        Args:
            queries: as `queries` gives them.
            attend: `attend(query)` takes absorbed queries [batch, tokens, heads, latent_dim + rope_dim] and gives the
                weighted means of the latents, [batch, tokens, heads, latent_dim].

        Returns [batch, heads, tokens, value_dim].
        """
        return torch.einsum("bthc, hvc -> bhtv", attend(self.absorb(queries)), self.value_weight)

    def forward(self, x, cosine, sine, attention: Callable, layer: int, cache) -> torch.Tensor:
        """x: [batch, tokens, width]; cosine, sine: [batch, tokens, rope_dim / 2]. Returns [batch, tokens, width]."""
        queries, rows = self.queries(x, cosine, sine), self.rows(x, cosine, sine)
        if cache is not None:
            cache.append(layer, rows)
        if cache is not None and cache.absorbs(x.shape[1]):
            attended = self.absorbed(queries, lambda query: cache.attend(layer, query))
        else:
            seen = rows if cache is None else cache.seen(layer, x.shape[1])
            attended = self.expanded(queries, seen, attention)
        return self.output(attended.transpose(1, 2).flatten(2))
