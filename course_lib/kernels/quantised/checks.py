"""What the kernels over quantised caches ask of their arguments, and the sentences they answer with."""

import torch

from course_lib.kernels.decode.checks import check_dimensions, check_query_and_cache
from course_lib.kernels.memory.checks import check_tensor
from course_lib.kernels.quantised.tiles import HEAD_DIMS


def check_fp8_caches(query, caches: dict, dimensions: str, scale) -> None:
    """Raise a ValueError unless they are a query [batch, query_heads, head_dim] and e4m3 caches for it."""
    check_dimensions("query", query, "[batch, query_heads, head_dim]")
    check_query_and_cache(query, caches, dimensions, scale, "[batch, query_heads, head_dim]", torch.float8_e4m3fn)
    check_head_dim(query)


def check_head_dim(query) -> None:
    if query.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"query has head dimension {query.shape[-1]}; supported are {', '.join(map(str, HEAD_DIMS))}.")


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
