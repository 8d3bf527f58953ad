"""A Llama-style decoder: embedding, blocks of attention and SwiGLU with RMSNorm before each, and logits.

It runs with or without a KV cache, and its attention and its glue (norms, additions, gates, the loss) are whatever
functions it is given:

    Decoder(config)                                         # PyTorch's
    Decoder(config, attention=attention_reference)          # naive, from course_lib.kernels.attention.reference
    Decoder(config, attention=attention)                    # the course's, from course_lib.kernels.attention.operator
    Decoder(config, attention=your_own)                     # your_own(query, key, value, causal=True)
    Decoder(config, glue=FUSED)                             # the course's fused kernels, from course_lib.models.glue

A config with a sliding_window or with sinks has its attention called with `window` (keys before a position's own) and
`sink` [query_heads] besides, and so is `attend` below, which hands them on. Without them nobody has to take them.

A config with experts has a router and experts in the place of each SwiGLU: the glue's `route` and `experts` run them.

A config with a latent makes its attention multi-head latent attention: `course_lib.models.latent`.

A decoder asks four things of a cache, and any object that answers them will do; those of the course are in
`course_lib.serving.caches`:

    positions(new_tokens)       where the next tokens stand, int64 [batch, new_tokens]
    append(layer, key, value)   store the new tokens' keys and values
    attend(layer, query)        attention of the new tokens' queries over all that is stored
    advance(new_tokens)         the tokens are in every layer now; count them

Latent attention asks other things in the place of the two in the middle.

Source: Touvron et al., LLaMA, arXiv 2302.13971; grouped heads: Ainslie et al., arXiv 2305.13245.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.models.config import ModelConfig
from course_lib.models.glue import TORCH, Glue
from course_lib.models.latent import LatentAttention
from course_lib.models.layers import Experts, RMSNorm, SwiGLU, rotary_angles, rotate
from course_lib.models.torch_attention import torch_attention


class Attention(nn.Module):
    """The projections around attention; a cache, when there is one, sits between them."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.width, config.query_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.width, config.key_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.width, config.key_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.query_heads * config.head_dim, config.width, bias=False)
        if config.normed_heads:
            self.query_norm = RMSNorm(config.head_dim, config.norm_epsilon)
            self.key_norm = RMSNorm(config.head_dim, config.norm_epsilon)
        self.normed_heads = config.normed_heads
        self.window = None if config.sliding_window is None else config.sliding_window - 1  # keys before the own
        self.sink = nn.Parameter(torch.zeros(config.query_heads)) if config.sinks else None

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads * head_dim] -> [batch, heads, tokens, head_dim], a view."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x, cosine, sine, attention: Callable, layer: int, cache) -> torch.Tensor:
        """x: [batch, tokens, width]; cosine, sine: [batch, tokens, head_dim / 2]. Returns [batch, tokens, width]."""
        query, key, value = (self.heads(project(x)) for project in (self.query, self.key, self.value))
        if self.normed_heads:
            query, key = self.query_norm(query), self.key_norm(key)
        query = rotate(query, cosine, sine)  # [batch, query_heads, tokens, head_dim]
        key = rotate(key, cosine, sine)  # [batch, key_heads, tokens, head_dim]
        options = {"window": self.window, "sink": self.sink}
        options = {name: value for name, value in options.items() if value is not None}
        if cache is None:
            attended = attention(query, key, value, causal=True, **options)
        else:
            cache.append(layer, key, value)
            attended = cache.attend(layer, query, **options)
        return self.output(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + SwiGLU(norm(x)), whose addition is left to the next layer's norm."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_epsilon)
        self.attention = (Attention if config.latent is None else LatentAttention)(config)
        self.feed_forward_norm = RMSNorm(config.width, config.norm_epsilon)
        self.feed_forward: SwiGLU | Experts
        if config.experts is None or config.chosen is None:
            self.feed_forward = SwiGLU(config.width, config.hidden)
        else:
            self.feed_forward = Experts(config.width, config.hidden, config.experts, config.chosen)

    def forward(self, x, update, glue: Glue, *context) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream, and what is to be added to it, before the layer and behind it: both [batch, tokens, width].

        `update` is None before the first layer. `context` as `Attention.forward` takes it.
        """
        normalised, x = added(glue, x, update, self.attention_norm)
        normalised, x = added(glue, x, self.attention(normalised, *context), self.feed_forward_norm)
        if isinstance(self.feed_forward, SwiGLU):
            return x, self.feed_forward(normalised, glue.gated)
        return x, self.feed_forward(normalised, glue.route, glue.experts)


def added(glue: Glue, x, update, norm: RMSNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """(normalised, summed) of x + update, or of x where there is no update."""
    return (glue.normalise(x, norm), x) if update is None else glue.add_and_normalise(update, x, norm)


class Decoder(nn.Module):
    """The whole model.

    Args:
        config: its shape.
        attention: `attention(query, key, value, causal=True)` with query [batch, query_heads, query_length, head_dim]
            and key, value [batch, key_heads, key_length, head_dim], aligned to the end; PyTorch's by default.
        glue: what stands between; PyTorch's operations by default.

    The attributes `attention` and `glue` may be replaced at any time: the weights do not depend on them.
    `all_reduce` is None but in a part of a model on several ranks, where it sums over them what each attention and each
    feed-forward block gives: `course_lib.models.parallel`.
    """

    def __init__(self, config: ModelConfig, attention: Callable = torch_attention, glue: Glue = TORCH):
        super().__init__()
        self.config, self.attention, self.glue = config, attention, glue
        self.all_reduce: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_epsilon)
        self.logits = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def forward(self, tokens: torch.Tensor, cache=None, *, last_only: bool = False) -> torch.Tensor:
        """Logits of the next token after each of `tokens`.

        Args:
            tokens: integers [batch, new_tokens]: with a cache only the tokens that are not in it yet.
            cache: an object that answers the calls above. It holds these tokens too afterwards.
            last_only: compute the logits of the last token alone, which is all that generation needs.

        Returns [batch, new_tokens, vocabulary], or [batch, 1, vocabulary].
        Raises a ValueError when tokens have another shape or do not fit into the cache.
        """
        x = self.hidden(tokens, cache, last_only=last_only)
        return F.linear(x, self.embedding.weight) if self.logits is None else self.logits(x)

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross-entropy of the next tokens, a scalar in nats. tokens, targets: int64 [batch, tokens]."""
        if self.glue.loss is None:
            return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())
        weight = (self.embedding if self.logits is None else self.logits).weight  # [vocabulary, width]
        return self.glue.loss(self.hidden(tokens).flatten(0, 1), weight, targets.flatten())

    def hidden(self, tokens: torch.Tensor, cache=None, *, last_only: bool = False) -> torch.Tensor:
        """What the logits are made of: [batch, new_tokens, width], or [batch, 1, width]. Arguments as in `forward`."""
        if tokens.dim() != 2 or tokens.numel() == 0:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; it must be [batch, new_tokens], neither of them 0."
            )
        batch, new_tokens = tokens.shape
        if cache is None:
            positions = torch.arange(new_tokens, device=tokens.device).expand(batch, new_tokens)
        else:
            positions = cache.positions(new_tokens)
        config = self.config
        angles = rotary_angles(positions, config.rotary_dim, config.rotary_base, config.rotary_divisors)
        x, update = self.embedding(tokens), None  # [batch, new_tokens, width]
        for layer, block in enumerate(self.blocks):
            x, update = block(x, update, self.glue, *angles, self.attention, layer, cache)
        if cache is not None:
            cache.advance(new_tokens)
        if last_only:
            x, update = x[:, -1:], None if update is None else update[:, -1:]
        return added(self.glue, x, update, self.norm)[0]
