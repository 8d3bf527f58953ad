"""The cache of a model with latent attention: one row a token and layer, and no keys or values.

It answers what `course_lib.models.latent` asks of a cache.
"""

from collections.abc import Callable

import torch

from course_lib.kernels.latent.reference import latent_decode_reference
from course_lib.models.config import ModelConfig
from course_lib.serving.caches.contiguous import OneLength


def absorb_single_tokens(heads: int, context: int, query_tokens: int) -> str:
    """The rule of most engines: "absorbed" for one new token, "expanded" for several."""
    return "absorbed" if query_tokens == 1 else "expanded"


class LatentCache(OneLength):
    """Latents and rotary keys of `batch` sequences that all have the same length.

    Attributes:
        rows: [layers, batch, capacity, latent_dim + rope_dim], the latent first; what lies at `length` and behind is no
            one's.
        batch, capacity, length: as in `OneLength`.
        decode: `decode(query, cache, lengths, scale=..., value_dim=...)` computes the absorbed form, as
            `latent_decode_reference` does: query [batch, query_tokens, heads, latent_dim + rope_dim], the whole buffer
            of a layer [batch, capacity, latent_dim + rope_dim], lengths int32 [batch], the new tokens included; causal,
            aligned to the end. It gives [batch, query_tokens, heads, latent_dim].
        choose_form: `choose_form(heads, context, query_tokens)` gives "absorbed" or "expanded"; context counts the new
            tokens too.

    Raises a ValueError that names the argument.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch: int,
        capacity: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        decode: Callable | None = None,
        choose_form: Callable[[int, int, int], str] | None = None,
    ):
        super().__init__(batch, capacity, device)
        self.form = LatentForm(config, decode or latent_decode_reference, choose_form or absorb_single_tokens)
        # Uninitialised on purpose: nothing may depend on what lies behind the length.
        shape = (config.layers, batch, capacity, self.form.row_dim)
        self.rows = torch.empty(shape, dtype=dtype, device=device)

    @property
    def bytes(self) -> int:
        """Bytes reserved, whether tokens are in them or not."""
        return self.rows.nbytes

    def append(self, layer: int, rows: torch.Tensor) -> None:
        """Store the new tokens' rows, [batch, new_tokens, latent_dim + rope_dim], behind those of the layer.

        Raises a ValueError, with nothing written, when the shape is not the cache's or the tokens do not fit.
        """
        if rows.dim() != 3 or (rows.shape[0], rows.shape[2]) != (self.batch, self.form.row_dim):
            raise ValueError(
                f"rows has shape {tuple(rows.shape)}; this cache takes [{self.batch}, new_tokens, {self.form.row_dim}]."
            )
        self.rows[layer, :, self.length : self.end_of(rows.shape[1])] = rows

    def absorbs(self, new_tokens: int) -> bool:
        """Whether tokens just appended go through the absorbed form."""
        return self.form.absorbs(self.length + new_tokens, new_tokens)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Causal attention of absorbed queries over all stored rows.

        query: [batch, new_tokens, heads, latent_dim + rope_dim]; the last one stands at the last stored token. Returns
        [batch, new_tokens, heads, latent_dim].
        """
        return self.form.attend(query, self.rows[layer], self.ends(query.shape[1]))

    def seen(self, layer: int, new_tokens: int) -> torch.Tensor:
        """All rows of a layer with the new tokens' own, a view: [batch, length, latent_dim + rope_dim]."""
        return self.rows[layer, :, : self.length + new_tokens]


class LatentForm:
    """Which form the tokens go through, and the absorbed one: what all latent caches share.

    Args: as `LatentCache` has them, and a config with a latent.
    """

    def __init__(self, config: ModelConfig, decode: Callable, choose_form: Callable[[int, int, int], str]):
        if config.latent is None:
            raise ValueError(
                "config.latent is None: such a model keeps keys and values, and this cache holds latent rows. Use "
                "KVCache, or make a config with_latent(config, Latent(...))."
            )
        self.heads, self.row_dim, self.latent_dim = config.query_heads, config.latent.row_dim, config.latent.latent_dim
        self.scale = config.latent.head_dim**-0.5  # of the expanded form: absorbing changes no score
        self.decode, self.choose_form = decode, choose_form

    def absorbs(self, context: int, new_tokens: int) -> bool:
        """What `choose_form` says. Raises a ValueError when that is neither of the two forms."""
        form = self.choose_form(self.heads, context, new_tokens)
        if form not in ("absorbed", "expanded"):
            raise ValueError(f'choose_form gave {form!r}; it must give "absorbed" or "expanded".')
        return form == "absorbed"

    def attend(self, query: torch.Tensor, *cache) -> torch.Tensor:
        """`decode(query, *cache)` with the model's scale and width of a value."""
        return self.decode(query, *cache, scale=self.scale, value_dim=self.latent_dim)
