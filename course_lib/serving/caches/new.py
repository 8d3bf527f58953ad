"""The contiguous cache that fits a model, whatever its kind of attention.

cache = new_cache(model, 1, 256)
cache = new_cache(model, 1, 256, decode=your_kernel)        # your_kernel(query, key_cache, value_cache, lengths)
"""

from collections.abc import Callable

from course_lib.models.decoder import Decoder
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.caches.latent import LatentCache


def new_cache(
    model: Decoder, batch: int, capacity: int, decode: Callable | None = None, **options
) -> KVCache | LatentCache:
    """An empty contiguous cache of a model's kind, shape, dtype, device and attention.

    `decode` is for one new token, as in `KVCache`; with latent attention it and `options` are those of `LatentCache`,
    which has `choose_form` too.
    """
    options |= {"dtype": model.dtype, "device": model.device, "decode": decode}
    if model.config.latent is not None:
        return LatentCache(model.config, batch, capacity, **options)
    return KVCache(model.config, batch, capacity, attention=model.attention, **options)
