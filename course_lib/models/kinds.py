"""The tiny model with each kind of attention, and with experts, trained alike: what a token leaves and what that costs.

All kinds have 4 query heads whose values have 32 numbers, and differ in what they keep of a token in a layer:

    full heads   a key and a value of 32 for each query head     256 numbers
    GQA          for every two query heads                       128
    MLA          a latent of 32 and a rotary key of 16            48

One more has two query heads of 64 numbers that share a key and a value, 128 numbers in all: "heads of 64". Chapter 12
rounds its cache, in groups of 64. Chapter 17's are GQA too: "window" sees 64 keys in every layer, its own among them,
and "window and sink" has a learned score for each query head besides.

Rotary positions turn faster than in `TINY`, with a base of 100 instead of 10,000: pieces have 256 bytes, and 8 pairs
are enough then to tell the places in them apart. (After 150 steps that alone was worth 0.10 nats to GQA, 0.12 to MLA.)

Each has read the first nine tenths of the text in the same pieces for 200 steps, from weights drawn with the same seed
(`trained_model` gives them). Loss is measured on the last tenth, which no model has read. On one core (the text read,
in brackets):

    seed     full heads     GQA            MLA          [nats a byte]
    0        1.89 (1.31)    1.88 (1.37)    1.94 (1.62)
    1        1.89 (1.35)    1.92 (1.41)    1.92 (1.54)
    2        1.91 (1.36)    1.88 (1.38)    1.94 (1.62)

So 48 numbers cost some 0.04 nats against 256, and another seed moves a kind by up to 0.04: the loss tells no more than
that all are near each other. (One KV head for all four moved by 0.08.) More steps would not tell more of 28 kB of text:
after 300, full heads know it by heart (1.94, with 0.89 on the text read) and MLA, which is slower at that, is at 1.88
(1.22).

    seed     window         window and sink
    0        2.00 (1.16)    1.99 (1.15)
    1        1.95 (1.19)    1.99 (1.19)
    2        1.97 (1.14)    1.96 (1.14)

So a window of 64 costs some 0.08 nats against GQA on text that was not read, and a sink does not pay that back. What
was read these know better, by some 0.2.

Chapter 18's "experts" is GQA with a mixture of experts in each layer: 8 experts of 32 hidden numbers, of which a token
passes 2, in the place of one SwiGLU of 192. It has 470,880 numbers where GQA has 394,080, and a token meets 249,696 of
them, those of its 64 hidden numbers instead of 192.

    seed     experts        one SwiGLU of 64
    0        1.88 (1.43)    1.89 (1.49)
    1        1.88 (1.41)    1.93 (1.52)
    2        1.91 (1.50)    1.91 (1.48)

So on text that was not read it is as good as GQA, with a third of the feed-forward work. But a single SwiGLU of 64,
which has as many active numbers and no others (246,624 in all), is nearly as good: so little text needs no experts.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.models.config import Latent, with_latent
from course_lib.models.decoder import Decoder
from course_lib.models.tiny import TINY, tiny_text
from course_lib.models.tokenizer import encode
from course_lib.models.training import next_token_loss

QUICKER = dataclasses.replace(TINY, rotary_base=100.0)
KINDS = {
    "full heads": dataclasses.replace(QUICKER, key_heads=4),
    "GQA": QUICKER,
    "heads of 64": dataclasses.replace(QUICKER, query_heads=2, key_heads=1, head_dim=64),
    "MLA": with_latent(QUICKER, Latent(latent_dim=32, rope_dim=16, nope_dim=16, value_dim=32)),
    "window": dataclasses.replace(QUICKER, sliding_window=64),
    "window and sink": dataclasses.replace(QUICKER, sliding_window=64, sinks=True),
    "experts": dataclasses.replace(QUICKER, hidden=32, experts=8, chosen=2),
}


def text_parts() -> tuple[str, str]:
    """The first nine tenths of `tiny_text()`, which the kinds are trained on, and the last, which they are not."""
    text = tiny_text()
    split = len(text) * 9 // 10
    return text[:split], text[split:]


def loss_through_cache(model: Decoder, text: str, new_cache: Callable) -> float:
    """`loss_on`, token by token through a cache: what is attended to is what the cache gives back.

    new_cache: `new_cache(batch, capacity)` makes one, as `course_lib.serving.caches.new` does for a model.
    """
    pieces = _pieces(model, text)
    cache = new_cache(len(pieces), model.config.context)
    with torch.inference_mode():
        steps = [model(token[:, None], cache)[:, -1] for token in pieces[:, :-1].unbind(1)]  # [pieces, bytes] each
        return F.cross_entropy(torch.stack(steps, dim=1).flatten(0, 1).float(), pieces[:, 1:].flatten()).item()


def loss_on(model: Decoder, text: str) -> float:
    """Nats a byte on a text, in pieces of the model's context; what is left at the end is not read."""
    with torch.inference_mode():
        return next_token_loss(model, _pieces(model, text)).item()


def _pieces(model: Decoder, text: str) -> torch.Tensor:
    """The text as [pieces, context + 1] tokens on the model's device, each piece with the token that follows it."""
    length = model.config.context + 1
    tokens = encode(text)
    if len(tokens) < length:
        raise ValueError(f"text has {len(tokens)} bytes; a piece of this model's context needs {length}.")
    return tokens[: len(tokens) // length * length].view(-1, length).to(model.device)
