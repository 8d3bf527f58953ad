"""A contiguous KV cache: for every layer one buffer of keys and one of values, allocated once, filled from the left.

It answers what `course_lib.models.decoder` asks of a cache. A model with latent attention asks other things;
`course_lib.serving.caches.latent` has its cache.
"""

from collections.abc import Callable

import torch

from course_lib.models.config import ModelConfig
from course_lib.models.torch_attention import torch_attention


class OneLength:
    """What a cache of sequences that all have the same length knows of them: where they end, and what still fits.

    Attributes:
        batch: sequences.
        capacity: tokens that fit in each.
        length: tokens stored, of every sequence.
    """

    def __init__(self, batch: int, capacity: int, device: torch.device | str):
        for name, value in (("batch", batch), ("capacity", capacity)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        self.batch, self.capacity, self.length, self.device = batch, capacity, 0, device

    def positions(self, new_tokens: int) -> torch.Tensor:
        """Positions of the next tokens, int64 [batch, new_tokens]: the first stands where the cache ends."""
        first = torch.arange(self.length, self.length + new_tokens, device=self.device)
        return first.expand(self.batch, new_tokens)

    def ends(self, new_tokens: int) -> torch.Tensor:
        """The lengths with the new tokens, int32 [batch], as decode kernels take them."""
        return torch.full((self.batch,), self.length + new_tokens, dtype=torch.int32, device=self.device)

    def advance(self, new_tokens: int) -> None:
        """Count tokens that every layer has stored."""
        self.length += new_tokens

    def truncate(self, length: int) -> None:
        """Forget all tokens from position `length` on; their memory is written over by the next ones."""
        if not 0 <= length <= self.length:
            raise ValueError(
                f"length is {length}; the cache holds {self.length} tokens, so 0 to {self.length} can stay."
            )
        self.length = length

    def end_of(self, new_tokens: int) -> int:
        """Where so many more tokens end. Raises a ValueError when they do not fit."""
        end = self.length + new_tokens
        if end > self.capacity:
            raise ValueError(
                f"the cache holds {self.length} of {self.capacity} tokens and {new_tokens} more do not fit; make it "
                f"with a capacity of at least {end}."
            )
        return end


class KVCache(OneLength):
    """Keys and values of `batch` sequences that all have the same length.

    Attributes:
        keys, values: [layers, batch, key_heads, capacity, head_dim]; what lies at `length` and behind is no one's.
        length: tokens stored, of every sequence.
        capacity: tokens that fit.
        attention: `attention(query, key, value, causal=True)` for several new tokens at a time, aligned to the end.
        decode: `decode(query, key_cache, value_cache, lengths)` for one new token: query [batch, query_heads,
            head_dim], the whole buffers of a layer, lengths int32 [batch]. None: `attention` does that too.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: Callable = torch_attention,
        decode: Callable | None = None,
    ):
        super().__init__(batch, capacity, device)
        refuse_latent(config, "KVCache", "LatentCache")
        shape = (config.layers, batch, config.key_heads, capacity, config.head_dim)
        # Uninitialised on purpose: nothing may depend on what lies behind the length.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.attention, self.decode = attention, decode

    @property
    def bytes(self) -> int:
        """Bytes reserved, whether tokens are in them or not."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' key and value, [batch, key_heads, new_tokens, head_dim], behind those of the layer.

        Raises a ValueError, with nothing written, when the shapes are not the cache's or the tokens do not fit.
        """
        end = self.end_of(self._check_new_tokens(key, value))
        self.keys[layer, :, :, self.length : end] = key
        self.values[layer, :, :, self.length : end] = value

    def attend(self, layer: int, query: torch.Tensor, **options) -> torch.Tensor:
        """Causal attention of the tokens just appended over all stored ones.

        query: [batch, query_heads, new_tokens, head_dim]; the last query stands at the last stored token. Options are
        the functions' own. Returns query's shape.
        """
        end = self.length + query.shape[2]
        if self.decode is not None and query.shape[2] == 1:
            caches = self.keys[layer], self.values[layer]
            return self.decode(query[:, :, 0], *caches, self.ends(1), **options)[:, :, None]
        keys, values = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        return self.attention(query, keys, values, causal=True, **options)

    def _check_new_tokens(self, key, value) -> int:
        batch, key_heads, _, head_dim = self.keys.shape[1:]
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dim() != 4 or (*tensor.shape[:2], tensor.shape[3]) != (batch, key_heads, head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; this cache takes [{batch}, {key_heads}, new_tokens, "
                    f"{head_dim}]."
                )
        if key.shape != value.shape:
            raise ValueError(f"value has shape {tuple(value.shape)}; it must be that of key, {tuple(key.shape)}.")
        return key.shape[2]


def refuse_window(config: ModelConfig, who: str) -> None:
    """Raise a ValueError when a model's windows or sinks meet something that would attend without them."""
    if config.sliding_window is not None or config.sinks:
        raise ValueError(
            f"config.sliding_window is {config.sliding_window} and config.sinks is {config.sinks}; {who} attends to "
            "all keys and knows no sinks. Use stream with a KVCache or SequencePages instead."
        )


def refuse_experts(config: ModelConfig, who: str) -> None:
    """Raise a ValueError when a model with experts meets something that knows one feed-forward block a layer."""
    if config.experts is not None:
        raise ValueError(
            f"config.experts is {config.experts}; {who} has one feed-forward block a layer, which all tokens pass. Use "
            "stream with a KVCache or SequencePages instead."
        )


def refuse_latent(config: ModelConfig, cache: str, instead: str) -> None:
    """Raise a ValueError when a cache of keys and values is asked for by a model that leaves none."""
    if config.latent is not None:
        raise ValueError(
            f"config.latent is {config.latent}: such a model keeps one latent row a token, and {cache} holds keys and "
            f"values. Use {instead} instead."
        )
