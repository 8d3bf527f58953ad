"""Generation, token by token, with a cache and without.

Without a cache every step runs the whole sequence: n(n + 1)/2 tokens pass through the model for n steps from nothing.
With one, the prompt passes once (prefill) and then each token once (decode).
"""

from collections.abc import Iterator

import torch

from course_lib.models.decoder import Decoder
from course_lib.models.tokenizer import decode, encode
from course_lib.serving.caches.new import new_cache
from course_lib.serving.caches.runs import Sequences
from course_lib.serving.captured import CapturedDecoder


def stream(
    model: Decoder | CapturedDecoder,
    prompt: torch.Tensor,
    new_tokens: int,
    *,
    cached: bool = True,
    cache=None,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[torch.Tensor]:
    """The new tokens one after another, each int64 [batch], as soon as it is known.

    Args:
        model: a `Decoder`, or a `CapturedDecoder` of the given cache.
        prompt: integers [batch, prompt_length] on the model's device, at least one token each.
        new_tokens: how many to generate.
        cached: keep keys and values between steps. False runs the whole sequence again at each step.
        cache: a cache to use, empty or holding what stands before the prompt; None makes a contiguous one that fits.
            Of one for several sequences, which must be empty, the prompt is sequence 0, and batch is 1.
        temperature: 0 takes the most likely token; above 0 one is drawn from softmax(logits / temperature).
        seed: of these draws; the same seed gives the same tokens on one machine.

    Raises a ValueError that names the argument when one makes no sense.
    """
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt has shape {tuple(prompt.shape)}; it must be [batch, prompt_length], not empty.")
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
        raise ValueError(f"new_tokens is {new_tokens!r}; it must be a whole number of at least 0.")
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature!r}; it must be 0 (the most likely token) or above.")
    if cache is not None and not cached:
        raise ValueError("a cache was given together with cached=False; leave one of them out.")
    return _stream(model, prompt, new_tokens, cached, cache, temperature, seed)


def _stream(model, prompt, new_tokens, cached, cache, temperature, seed):
    # On the CPU, so that every device draws from the same numbers.
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.cat([prompt, prompt.new_zeros(prompt.shape[0], new_tokens)], dim=1)
    length = prompt.shape[1]
    if cached and cache is None:
        cache = new_cache(model, prompt.shape[0], length + new_tokens)
    fed = 0  # tokens that have passed through the model and need not again
    for _ in range(new_tokens):
        if isinstance(cache, Sequences):
            cache.take(range(prompt.shape[0]), length - fed)
        with torch.inference_mode():
            logits = model(tokens[:, fed:length], cache, last_only=True)[:, -1]  # [batch, vocabulary]
        token = _choose(logits, temperature, generator)
        tokens[:, length] = token
        fed = length if cached else 0
        length += 1
        yield token


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    # argmax(p / Exp(1)) draws from p; the noise is the same for logits that differ by a rounding.
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    noise = torch.empty(logits.shape).exponential_(generator=generator).to(logits.device)
    return (probabilities / noise).argmax(dim=-1)


def generate(model: Decoder, prompt: torch.Tensor, new_tokens: int, **options) -> torch.Tensor:
    """The prompt and what follows it, [batch, prompt_length + new_tokens]. Arguments as for `stream`."""
    steps = list(stream(model, prompt, new_tokens, **options))
    return torch.cat([prompt, *(token[:, None].to(prompt.dtype) for token in steps)], dim=1)


def complete(model: Decoder, text: str, new_tokens: int, **options) -> str:
    """What a byte-level model writes after `text`: the new text alone. Options as for `stream`."""
    prompt = encode(text).to(model.device)[None]  # [1, prompt_length]
    return decode(generate(model, prompt, new_tokens, **options)[0, prompt.shape[1] :])
