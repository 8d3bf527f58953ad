"""What the kernels over quantised caches ask of their arguments, and the sentences they answer with."""

import torch

from course_lib.kernels.common.attention_checks import check_window_and_scale
from course_lib.kernels.common.cache_checks import check_query_and_cache
from course_lib.kernels.common.checks import (
    check_contiguous,
    check_dimensions,
    check_rows,
    check_runnable,
    check_tensor,
)
from course_lib.kernels.quantised.formats import GROUP, GROUP_DTYPE, Int4Cache
from course_lib.kernels.quantised.tiles import HEAD_DIMS

WINDOW_DTYPES = (torch.float16, torch.bfloat16)


def check_fp8_caches(query, caches: dict, dimensions: str, scale) -> None:
    """Raise a ValueError unless they are a query [batch, query_heads, head_dim] and e4m3 caches for it."""
    check_dimensions("query", query, "[batch, query_heads, head_dim]")
    check_query_and_cache(query, caches, dimensions, scale, "[batch, query_heads, head_dim]", torch.float8_e4m3fn)
    check_head_dim(query)


def check_head_dim(tensor, name: str = "query") -> None:
    if tensor.shape[-1] not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise ValueError(f"{name} has head dimension {tensor.shape[-1]}; supported are {sizes}.")


def check_scales(scales: dict, codes, by_block: str) -> None:
    """Raise a ValueError unless they are float32 scales {name: tensor} for codes [pages or batch, key_heads, ...].

    by_block: what the two-dimensional form is called, "[pages, key_heads]" say.
    """
    for name, tensor in scales.items():
        check_tensor(name, tensor, (torch.float32,))
        if tensor.device != codes.device:
            raise ValueError(f"{name} is on device {tensor.device}; it must be on that of the codes, {codes.device}.")
        allowed = (), (codes.shape[1],), tuple(codes.shape[:2])
        if tuple(tensor.shape) not in allowed:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be [] for all, [key_heads] = {list(allowed[1])} or "
                f"{by_block} = {list(allowed[2])}."
            )


def check_scale_values(scales: dict, used_pages, positive: bool = False) -> None:
    """Reads the device: raise a ValueError unless the scales are finite and 0 or more (positive: above 0).

    used_pages: int64, those whose scales count where scales are by page; None: all.
    """
    for name, tensor in scales.items():
        if tensor.dim() == 2 and used_pages is not None:
            tensor = tensor[used_pages]
        bad = ~tensor.isfinite() | (tensor <= 0 if positive else tensor < 0)
        if bad.any():
            found = tensor[bad][0].item()
            raise ValueError(
                f"{name} holds {found}; a scale must be finite and {'above 0' if positive else '0 or more'}."
            )


def check_int4_query(query, scale) -> None:
    """Raise a ValueError unless it is a query [batch, query_heads, head_dim], and a scale for its scores."""
    check_rows("query", query, "[batch, query_heads, head_dim]")
    check_runnable("query", query)
    check_head_dim(query)
    check_window_and_scale(None, scale)


def check_int4_cache(cache, batch: int, head_dim: int, device, paged: bool) -> None:
    """Raise a ValueError unless it is an Int4Cache for that batch and head dimension, in pages or not."""
    if not isinstance(cache, Int4Cache):
        raise ValueError(f"cache is a {type(cache).__name__}; it must be an Int4Cache, as empty_int4_cache() makes it.")
    form = "[pages, key_heads, 64, head_dim / 2]" if paged else "[batch, key_heads, blocks, 64, head_dim / 2]"
    check_dimensions("cache.key_codes", cache.key_codes, form)
    blocks = cache.key_codes.shape[:-2]
    if not paged and blocks[0] != batch:
        raise ValueError(f"cache.key_codes has batch size {blocks[0]}; it must be that of the other tensors, {batch}.")
    codes, by_channel = (*blocks, GROUP, head_dim // 2), (*blocks, head_dim)
    by_token, window = (*blocks, GROUP, head_dim // GROUP), (batch, blocks[1], GROUP, head_dim)
    shapes = codes, by_channel, by_channel, codes, by_token, by_token, window, window
    groups = torch.uint8, GROUP_DTYPE, GROUP_DTYPE
    dtypes = *groups, *groups, cache.key_window.dtype, cache.key_window.dtype
    for name, tensor, shape, dtype in zip(cache._fields, cache, shapes, dtypes):
        check_tensor(f"cache.{name}", tensor, (dtype,) if "window" not in name else None)
        if tensor.dtype != dtype or (dtype not in WINDOW_DTYPES and "window" in name):
            raise ValueError(f"cache.{name} has dtype {tensor.dtype}; both windows must be float16, or both bfloat16.")
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"cache.{name} has shape {tuple(tensor.shape)}; with a batch of {batch}, head dimension {head_dim} and "
                f"cache.key_codes of shape {tuple(cache.key_codes.shape)} it must be {shape}."
            )
        check_contiguous(f"cache.{name}", tensor)
        if tensor.device != device:
            raise ValueError(f"cache.{name} is on device {tensor.device}; it must be on that of the others, {device}.")
