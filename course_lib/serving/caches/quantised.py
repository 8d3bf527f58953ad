"""KV caches in fewer bits for the decoder: what is read back from them is what the codes stand for.

    new_cache(model, 1, 256)                                   16 or 32 bits a number
    Fp8KVCache(model.config, 1, 256, scales=...)               8
    Int4KVCache(model.config, 1, 256)                          4, and a scale and a middle for each 64: 4.5

A prompt that nothing stands before attends to its own keys and values, whole. Several tokens behind others attend to
everything, restored once. A single token goes through `decode`, which reads the codes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from course_lib.kernels.quantised.formats import GROUP, empty_int4_cache, restored_e4m3
from course_lib.kernels.quantised.fp8 import E4M3_MAX
from course_lib.kernels.quantised.reference import (
    append_to_fp8_cache_reference,
    append_to_int4_reference,
    fp8_decode_reference,
    int4_decode_reference,
    whole_sequence,
)
from course_lib.models.config import ModelConfig
from course_lib.models.decoder import Decoder
from course_lib.models.tokenizer import encode
from course_lib.models.torch_attention import torch_attention
from course_lib.serving.caches.contiguous import KVCache, OneLength, refuse_latent


@dataclass(frozen=True)
class Fp8Scales:
    """What a code of 1 stands for: keys, values float32 [layers, key_heads], above 0."""

    keys: torch.Tensor
    values: torch.Tensor


def ones_for(config: ModelConfig, device: torch.device | str = "cpu") -> Fp8Scales:
    """Scales of 1: codes stand for themselves."""
    shape = (config.layers, config.key_heads)
    return Fp8Scales(torch.ones(shape, device=device), torch.ones(shape, device=device))


def calibrated_scales(model: Decoder, text: str) -> Fp8Scales:
    """The scales with which the largest key and the largest value of each head on this text become 448.

    text: as long as the model's context at most, and not empty. Larger numbers of another text are stored as the
    largest that there is.
    Raises a ValueError for an empty text, and for one that does not fit.
    """
    tokens = encode(text)[None].to(model.device)
    if not 1 <= tokens.shape[1] <= model.config.context:
        raise ValueError(f"text has {tokens.shape[1]} bytes; it must have 1 to {model.config.context}, the context.")
    cache = KVCache(model.config, 1, tokens.shape[1], dtype=model.dtype, device=model.device)
    with torch.inference_mode():
        model(tokens, cache)
    largest = (part.float().abs().amax(dim=(1, 3, 4)) for part in (cache.keys, cache.values))  # [layers, key_heads]
    return Fp8Scales(*(torch.where(most > 0, most / E4M3_MAX.value, 1.0) for most in largest))


class _Rounded(OneLength):
    """What both caches share. `attention` is as in `KVCache`."""

    def __init__(self, config: ModelConfig, batch: int, capacity: int, device, attention: Callable):
        super().__init__(batch, capacity, device)
        refuse_latent(config, type(self).__name__, "LatentCache")
        self.attention = attention
        self._fresh: tuple[torch.Tensor, ...] = ()  # of the tokens just appended

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Round and store the new tokens' key and value, [batch, key_heads, new_tokens, head_dim].

        Raises a ValueError, with nothing written, when the tokens do not fit.
        """
        self.end_of(key.shape[2])
        self._fresh = key, value
        self._store(layer, key, value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of the tokens just appended, [batch, query_heads, new_tokens, head_dim], over all stored."""
        new_tokens = query.shape[2]
        if new_tokens == 1:
            return self._decode(layer, query[:, :, 0])[:, :, None].to(query.dtype)
        key, value = self._fresh if self.length == 0 else self._restored(layer, self.length + new_tokens, query.dtype)
        return self.attention(query, key, value, causal=True)

    def _store(self, layer: int, key, value) -> None:
        raise NotImplementedError

    def _decode(self, layer: int, query) -> torch.Tensor:
        raise NotImplementedError

    def _restored(self, layer: int, end: int, dtype) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError


class Fp8KVCache(_Rounded):
    """Keys and values of `batch` sequences of one length as e4m3 codes, with a scale for each layer and head.

    Attributes:
        keys, values: float8_e4m3fn [layers, batch, key_heads, capacity, head_dim]; what lies at `length` and behind is
            no one's.
        scales: `Fp8Scales`; of 1 when None is given.
        decode: as `fp8_decode_reference`, for one new token.
        store: as `append_to_fp8_cache_reference`.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        scales: Fp8Scales | None = None,
        device: torch.device | str = "cpu",
        attention: Callable = torch_attention,
        decode: Callable = fp8_decode_reference,
        store: Callable = append_to_fp8_cache_reference,
    ):
        super().__init__(config, batch, capacity, device, attention)
        shape = (config.layers, batch, config.key_heads, capacity, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device) for _ in "kv")
        self.scales = ones_for(config, device) if scales is None else scales
        self.decode, self.store = decode, store

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return (self.keys.nbytes + self.values.nbytes) // (self.batch * self.capacity)

    def _options(self, layer):
        return {"key_scales": self.scales.keys[layer], "value_scales": self.scales.values[layer]}

    def _store(self, layer, key, value):
        positions = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
        self.store(key, value, self.keys[layer], self.values[layer], positions, **self._options(layer))

    def _decode(self, layer, query):
        return self.decode(query, self.keys[layer], self.values[layer], self.ends(1), **self._options(layer))

    def _restored(self, layer, end, dtype):
        parts = ((self.keys, self.scales.keys), (self.values, self.scales.values))
        return tuple(restored_e4m3(codes[layer, :, :, :end], scales[layer], dtype) for codes, scales in parts)


class Int4KVCache(_Rounded):
    """Keys and values of `batch` sequences of one length in INT4, the tokens of the last unfinished group whole.

    Attributes:
        layers: a contiguous `formats.Int4Cache` for each layer; its windows have the model's dtype.
        decode: as `int4_decode_reference`, for one new token.
        store: as `append_to_int4_reference`.
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
        decode: Callable = int4_decode_reference,
        store: Callable = append_to_int4_reference,
    ):
        super().__init__(config, batch, capacity, device, attention)
        whole = -(-capacity // GROUP) * GROUP
        options = {"capacity": whole, "dtype": dtype, "device": device}
        self.layers = [
            empty_int4_cache(batch, config.key_heads, config.head_dim, **options) for _ in range(config.layers)
        ]
        self.decode, self.store = decode, store

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers, of a group that is finished."""
        blocks = self.batch * self.layers[0].key_codes.shape[2]
        return sum(part.nbytes for layer in self.layers for part in layer[:6]) // (blocks * GROUP)

    def truncate(self, length: int) -> None:
        """Not possible: a finished group's tokens are not there whole. Raises a ValueError unless nothing goes."""
        if length != self.length:
            raise ValueError(
                f"length is {length} and the cache holds {self.length} tokens; groups in INT4 can't be opened again, "
                "so none can be forgotten. Make a new cache."
            )

    def _store(self, layer, key, value):
        positions = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)
        self.store(key, value, self.layers[layer], positions)

    def _decode(self, layer, query):
        return self.decode(query, self.layers[layer], self.ends(1))

    def _restored(self, layer, end, dtype):
        sequences = [whole_sequence(self.layers[layer], index, end, None, dtype) for index in range(self.batch)]
        return tuple(torch.stack(parts) for parts in zip(*sequences))
