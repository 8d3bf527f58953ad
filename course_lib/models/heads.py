"""The same decoder with another number of KV heads, and some steps of training on.

Source: Ainslie et al., GQA, arXiv 2305.13245.
"""

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from course_lib.models.decoder import Decoder
from course_lib.models.tiny import tiny_text
from course_lib.models.tokenizer import encode
from course_lib.models.training import next_token_loss, random_pieces


def with_key_heads(model: Decoder, key_heads: int, convert: Callable) -> Decoder:
    """A copy of a model with `key_heads` KV heads.

    Args:
        model: any `Decoder`; it stays as it is.
        key_heads: divides the query heads.
        convert: `convert(weight, old_key_heads, key_heads)` makes a key or value projection [key_heads · head_dim,
            width] of the old one, [old_key_heads · head_dim, width]; exercise 7.3, or `repeated_heads`.
    """
    weights = dict(model.state_dict())
    for name in weights:
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            weights[name] = convert(weights[name], model.config.key_heads, key_heads)
    copy = Decoder(dataclasses.replace(model.config, key_heads=key_heads), model.attention)
    copy.load_state_dict(weights)
    return copy.to(model.device).eval()


def repeated_heads(weight: torch.Tensor, key_heads: int, new_key_heads: int) -> torch.Tensor:
    """Each head several times in a row: more KV heads, and still the same model.

    weight: [key_heads · head_dim, width]. Returns [new_key_heads · head_dim, width].
    """
    heads = weight.unflatten(0, (key_heads, -1))  # [key_heads, head_dim, width]
    return heads.repeat_interleave(new_key_heads // key_heads, dim=0).flatten(0, 1)


def train_on(model: Decoder, steps: int, *, rate: float = 1e-3, batch: int = 4, seed: int = 1) -> None:
    """Train a byte-level model on, on random pieces of `tiny_text()`, with AdamW at a constant rate; in place."""
    data, context = encode(tiny_text()), model.config.context
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        next_token_loss(model, random_pieces(data, batch, context, generator).to(model.device)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def loss_of(model: Decoder, pieces: int = 16) -> float:
    """Nats a byte on the first `pieces` pieces of the text that the tiny model was trained on."""
    length = model.config.context + 1
    tokens = encode(tiny_text())[: pieces * length].view(pieces, length).to(model.device)
    with torch.inference_mode():
        return next_token_loss(model, tokens).item()
