"""The shape of a Llama-style decoder in eight numbers, what it costs, and the shapes of released models.

parameters            = what must be read to run one token [elements]
cache bytes per token = 2 · layers · key_heads · head_dim · item_bytes      (one key and one value in every layer)
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Attention is multi-head, grouped or multi-query by the number of key heads alone.

    Attributes:
        vocabulary: tokens that the model knows.
        layers: transformer blocks.
        width: elements of a token's vector between the blocks.
        query_heads, key_heads: heads of queries, and of keys and values; query_heads is a multiple of key_heads.
        head_dim: elements of one head, even (rotary positions turn pairs).
        hidden: elements inside the feed-forward block.
        context: tokens that the model is made for.
        rotary_base: the slowest pair of a head turns once in 2π · rotary_base^(1 - 2/head_dim) positions.
        norm_epsilon: added to the mean square in RMSNorm.
        tied: the output matrix is the embedding's, transposed, and has no parameters of its own.

    Raises a ValueError that names the argument when sizes do not fit together.
    """

    vocabulary: int
    layers: int
    width: int
    query_heads: int
    key_heads: int
    head_dim: int
    hidden: int
    context: int
    rotary_base: float = 10_000.0
    norm_epsilon: float = 1e-5
    tied: bool = False

    def __post_init__(self):
        for name in ("vocabulary", "layers", "width", "query_heads", "key_heads", "head_dim", "hidden", "context"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.query_heads % self.key_heads:
            raise ValueError(
                f"query_heads is {self.query_heads}; it must be a multiple of key_heads, which is {self.key_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even, since rotary positions turn pairs.")
        for name in ("rotary_base", "norm_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a positive number.")

    @property
    def layer_parameters(self) -> int:
        """Elements of one block: the four projections of attention, the three of SwiGLU, two norms."""
        attention = 2 * self.width * (self.query_heads + self.key_heads) * self.head_dim
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def parameters(self) -> int:
        """Elements of the whole model, without biases: this kind has none."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return embeddings + self.layers * self.layer_parameters + self.width

    def cache_bytes_per_token(self, item_bytes: float = 2) -> float:
        """Bytes of keys and values that one token leaves behind, over all layers."""
        return 2 * self.layers * self.key_heads * self.head_dim * item_bytes

    def cache_bytes(self, batch: int, length: int, item_bytes: float = 2) -> float:
        """Bytes of keys and values of `batch` sequences of `length` tokens."""
        return batch * length * self.cache_bytes_per_token(item_bytes)


_LLAMA_2_70B = ModelConfig(32_000, 80, 8192, 64, 8, 128, 28_672, 4096)

# Shapes of released models, from the config.json beside their weights. All are Llama-style, with no sliding window.
PRESETS = {
    "Llama-2-7B": ModelConfig(32_000, 32, 4096, 32, 32, 128, 11_008, 4096),
    "Llama-2-70B": _LLAMA_2_70B,
    # Never released: what the 70B model would have been with a KV head for each query head.
    "Llama-2-70B, 64 KV heads": dataclasses.replace(_LLAMA_2_70B, key_heads=64),
    "Llama-3-8B": ModelConfig(128_256, 32, 4096, 32, 8, 128, 14_336, 8192, rotary_base=500_000.0),
    "Llama-3-70B": ModelConfig(128_256, 80, 8192, 64, 8, 128, 28_672, 8192, rotary_base=500_000.0),
    "Llama-3.1-405B": ModelConfig(128_256, 126, 16_384, 128, 8, 128, 53_248, 131_072, rotary_base=500_000.0),
    "Llama-3.2-1B": ModelConfig(128_256, 16, 2048, 32, 8, 64, 8192, 131_072, rotary_base=500_000.0, tied=True),
    "Mistral-7B v0.3": ModelConfig(32_768, 32, 4096, 32, 8, 128, 14_336, 32_768, rotary_base=1e6),
}
