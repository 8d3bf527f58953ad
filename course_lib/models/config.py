"""The shape of a Llama-style decoder in a few numbers, what it costs, and the shapes of released models.

parameters            = what must be read to run one token [elements]; with experts active_parameters
cache bytes per token = 2 · layers · key_heads · head_dim · item_bytes      (one key and one value in every layer)
with latent attention = layers · (latent_dim + rope_dim) · item_bytes       (one latent and one rotary key)
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Latent:
    """The sizes of multi-head latent attention (MLA), where a token leaves one row of numbers for all heads.

    Our words and the letters of DeepSeek-V2 (arXiv 2405.04434, section 2.1); in brackets the sizes of DeepSeek-V3:

    Attributes:
        latent_dim: numbers of the latent that keys and values are made of, d_c [512].
        rope_dim: numbers of the rotary key that all heads share and of each query's rotary part, even; d_h^R [64].
        nope_dim: numbers of a head's query and key without a position, d_h [128].
        value_dim: numbers of a head's value and output, d_h [128]; at most nope_dim + rope_dim, since the expanded form
            runs through attention whose values are no wider than its keys.

    Raises a ValueError that names the argument when a size makes no sense.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    def __post_init__(self):
        check_sizes(self, ("latent_dim", "rope_dim", "nope_dim", "value_dim"))
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; it must be even, since rotary positions turn pairs.")
        if self.value_dim > self.head_dim:
            raise ValueError(
                f"value_dim is {self.value_dim}; it may be at most nope_dim + rope_dim, which is {self.head_dim}."
            )

    @property
    def head_dim(self) -> int:
        """Numbers of a head's whole query and key: nope_dim + rope_dim."""
        return self.nope_dim + self.rope_dim

    @property
    def row_dim(self) -> int:
        """Numbers that a token leaves in the cache of one layer: latent_dim + rope_dim."""
        return self.latent_dim + self.rope_dim


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Attention is multi-head, grouped or multi-query by the number of key heads, or latent.

    Attributes:
        vocabulary: tokens that the model knows.
        layers: transformer blocks.
        width: elements of a token's vector between the blocks.
        query_heads, key_heads: heads of queries, and of keys and values; query_heads is a multiple of key_heads.
        head_dim: elements of one head, even (rotary positions turn pairs).
        hidden: elements inside the feed-forward block, or inside each expert's.
        context: tokens that the model is made for.
        rotary_base: the slowest pair of a head turns once in 2π · rotary_base^(1 - 2/head_dim) positions.
        norm_epsilon: added to the mean square in RMSNorm.
        tied: the output matrix is the embedding's, transposed, and has no parameters of its own.
        rotary_divisors: by what the frequency of each pair of a head is divided, head_dim / 2 numbers, where a model
            was stretched to a longer context than it was made for; None divides by 1.
        normed_heads: whether queries and keys are normalised head by head before they are turned (QK-norm, as in
            Qwen3).
        latent: the sizes of latent attention, or None for keys and values in the cache. With it every query head has a
            key of its own, made of the latent: key_heads is query_heads, and head_dim is nope_dim + rope_dim.
            `with_latent` sets all three.
        sliding_window: keys that a position sees in every layer, its own among them; None for all before it. (The
            functions' argument `window` counts those before the position's own.)
        sinks: whether each query head has a learned score that joins its softmax and has no value, as in gpt-oss.
        experts: feed-forward blocks of each layer among which a router chooses for each token, as in Mixtral and Qwen3;
            None for one block that all tokens pass.
        chosen: how many of them a token passes, from 1 to all; None without experts.

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
    latent: Latent | None = None
    rotary_divisors: tuple[float, ...] | None = None
    normed_heads: bool = False
    sliding_window: int | None = None
    sinks: bool = False
    experts: int | None = None
    chosen: int | None = None

    def __post_init__(self):
        sizes = ("vocabulary", "layers", "width", "query_heads", "key_heads", "head_dim", "hidden", "context")
        check_sizes(self, sizes)
        if self.query_heads % self.key_heads:
            raise ValueError(
                f"query_heads is {self.query_heads}; it must be a multiple of key_heads, which is {self.key_heads}."
            )
        if self.latent is not None:
            wanted = {"key_heads": self.query_heads, "head_dim": self.latent.head_dim}
            for name, value in wanted.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"{name} is {getattr(self, name)}; with this latent it must be {value}. Let "
                        "with_latent(config, latent) set it."
                    )
        elif self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even, since rotary positions turn pairs.")
        divisors = self.rotary_divisors
        if divisors is not None and (len(divisors) != self.rotary_dim // 2 or not min(divisors) > 0):
            raise ValueError(
                f"rotary_divisors is {divisors!r}; it must be {self.rotary_dim // 2} positive numbers, one for each "
                "pair of a head."
            )
        if self.normed_heads and self.latent is not None:
            raise ValueError("normed_heads is True; with a latent there are no keys to normalise, so it must be False.")
        if self.sliding_window is not None:
            check_sizes(self, ("sliding_window",))
        if self.latent is not None and (self.sliding_window is not None or self.sinks):
            raise ValueError("latent is given; latent attention has neither a sliding_window nor sinks.")
        if self.experts is not None or self.chosen is not None:
            check_sizes(self, ("experts", "chosen"))
            if self.chosen > self.experts:
                raise ValueError(f"chosen is {self.chosen}; it may be at most experts, which is {self.experts}.")
        for name in ("rotary_base", "norm_epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a positive number.")

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that positions turn: all of them, or with latent attention rope_dim."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def attention_parameters(self) -> int:
        """Elements of the projections of one block's attention, of its sinks, and with a latent of its norm."""
        if self.latent is None:
            sinks = self.query_heads if self.sinks else 0
            return 2 * self.width * (self.query_heads + self.key_heads) * self.head_dim + sinks
        latent = self.latent
        queries_and_output = self.width * self.query_heads * (latent.head_dim + latent.value_dim)
        expansions = latent.latent_dim * self.query_heads * (latent.nope_dim + latent.value_dim)
        return queries_and_output + self.width * latent.row_dim + expansions + latent.latent_dim

    @property
    def feed_forward_parameters(self) -> int:
        """Elements of one block's SwiGLU, or of all its experts' and the router."""
        one = 3 * self.width * self.hidden
        return one if self.experts is None else self.experts * (one + self.width)

    @property
    def layer_parameters(self) -> int:
        """Elements of one block: the projections of attention, its feed-forward part, two norms, and those of heads."""
        norms = 2 * self.width + (2 * self.head_dim if self.normed_heads else 0)
        return self.attention_parameters + self.feed_forward_parameters + norms

    @property
    def parameters(self) -> int:
        """Elements of the whole model, without biases: this kind has none."""
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.width
        return embeddings + self.layers * self.layer_parameters + self.width

    @property
    def active_parameters(self) -> int:
        """Elements that one token meets: all but those of the experts that are not chosen for it."""
        if self.experts is None or self.chosen is None:
            return self.parameters
        return self.parameters - self.layers * (self.experts - self.chosen) * 3 * self.width * self.hidden

    def cache_bytes_per_token(self, item_bytes: float = 2) -> float:
        """Bytes that one token leaves in the cache, over all layers: keys and values, or latent and rotary key."""
        numbers = 2 * self.key_heads * self.head_dim if self.latent is None else self.latent.row_dim
        return self.layers * numbers * item_bytes

    def cache_bytes(self, batch: int, length: int, item_bytes: float = 2) -> float:
        """Bytes in the cache of `batch` sequences of `length` tokens."""
        return batch * length * self.cache_bytes_per_token(item_bytes)


def with_latent(config: ModelConfig, latent: Latent) -> ModelConfig:
    """The same model with latent attention: as many query heads, and key_heads and head_dim as the latent asks for."""
    return dataclasses.replace(config, key_heads=config.query_heads, head_dim=latent.head_dim, latent=latent)


def check_sizes(sizes, names: tuple[str, ...]) -> None:
    """Raise a ValueError that names the first of these attributes which is no whole number of at least 1."""
    for name in names:
        value = getattr(sizes, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")


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
