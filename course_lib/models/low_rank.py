"""How much of a trained model's cache fits into fewer numbers a token: the singular values of what it holds.

    C = the keys and values of all heads side by side, one token a row     [tokens, key_heads · 2 · head_dim]
    C = U Σ Vᵀ, and its best approximation of rank r keeps the share  Σ_{i<r} σᵢ² / Σ σᵢ²  of its sum of squares

(Eckart and Young, 1936). Rank r means that r numbers a token are kept, and one matrix [r, key_heads · 2 · head_dim],
the same for all tokens, makes the rest of them. That is multi-head latent attention, where training finds both.

Rotary positions work against it: they turn the same key another way at every place, so turned keys need more numbers.
Keys before that, and values, are a matrix times the layer's input, so their rank is at most the model's width, 96 in
the tiny model, whatever it has learned. How much fewer do is what its training has made of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from course_lib.models.decoder import Decoder
from course_lib.models.layers import rotary_angles, rotate
from course_lib.models.tokenizer import encode


def cached_numbers(model: Decoder, text: str, layer: int, *, turned: bool = True, pieces: int = 16) -> torch.Tensor:
    """What a cache holds of a layer after a byte-level model has read a text.

    Args:
        model: one that keeps keys and values, so without a latent.
        text: read in pieces of the model's context, each from position 0.
        layer: from 0.
        turned: keys as they lie in the cache, turned by their positions; False: as they were before.
        pieces: at most so many, from the beginning of the text.

    Returns [tokens, key_heads · 2 · head_dim], float32 on the CPU: keys of all heads, then values of all heads.
    Raises a ValueError that names the argument.
    """
    config = model.config
    if config.latent is not None:
        raise ValueError("model has latent attention: its cache holds latents. Give one that keeps keys and values.")
    if not 0 <= layer < config.layers:
        raise ValueError(f"layer is {layer}; the model has layers 0 to {config.layers - 1}.")
    tokens = encode(text)[: pieces * config.context]
    if not len(tokens):
        raise ValueError("text is empty; give at least one byte.")
    length = min(len(tokens), config.context)
    tokens = tokens[: len(tokens) // length * length].view(-1, length).to(model.device)  # [batch, length]
    with torch.inference_mode(), _projected(model, layer) as projected:
        model(tokens, last_only=True)
        keys, values = projected
        if turned:
            positions = torch.arange(length, device=model.device).expand(len(tokens), -1)
            heads = keys.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)  # [batch, key_heads, length, head_dim]
            angles = rotary_angles(positions, config.head_dim, config.rotary_base, config.rotary_divisors)
            heads = rotate(heads, *angles)
            keys = heads.transpose(1, 2).flatten(2)
        return torch.cat([keys, values], dim=-1).flatten(0, 1).float().cpu()


@contextmanager
def _projected(model: Decoder, layer: int) -> Iterator[list[torch.Tensor]]:
    """Keys before they are turned, and values, of a layer while it runs: [batch, length, key_heads · head_dim]."""
    made: list[torch.Tensor] = []
    hooks = [
        model.get_submodule(f"blocks.{layer}.attention.{name}").register_forward_hook(
            lambda module, inputs, output: made.append(output)
        )
        for name in ("key", "value")
    ]
    try:
        yield made
    finally:
        for hook in hooks:
            hook.remove()


def energy_kept(numbers: torch.Tensor) -> torch.Tensor:
    """The share of the sum of squares that the best approximation of each rank keeps.

    numbers: [tokens, width]. Returns float64 [min(tokens, width)]: at index r - 1 the share of rank r; the last is 1.
    """
    squares = torch.linalg.svdvals(numbers.double()).square()
    return squares.cumsum(0) / squares.sum()


def rank_for(kept: torch.Tensor, share: float) -> int:
    """The least rank that keeps at least this share, 0 < share ≤ 1; `kept` as `energy_kept` gives it."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}; it must be above 0 and at most 1.")
    return min(int((kept < share - 1e-12).sum()) + 1, len(kept))
