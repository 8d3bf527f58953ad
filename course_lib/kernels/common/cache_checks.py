"""What the serving kernels ask of their arguments, and the sentences they answer with when they don't comply.

Checks of shapes, dtypes and strides cost the host some microseconds. Checks of what lengths and tables *say* read the
device's memory, which waits for it: launchers make those with `validate=True` only.
"""

import math

import torch

from course_lib.kernels.common.attention_checks import MAX_HEAD_DIM, MIN_HEAD_DIM
from course_lib.kernels.common.checks import check_dimensions, check_rows, check_runnable, check_same, check_tensor

INDEX_DTYPES = (torch.int32, torch.int64)


def check_indices(name: str, tensor, dimensions: str, shape: tuple, device) -> None:
    """Raise a ValueError unless it is int32 or int64, with contiguous rows, on the device, of the shape (None: any)."""
    check_dimensions(name, tensor, dimensions, empty_allowed=True)
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; allowed are torch.int32 and torch.int64.")
    if tensor.device != device:
        raise ValueError(f"{name} is on device {tensor.device}; it must be on that of the other tensors, {device}.")
    for size, (given, wanted) in enumerate(zip(tensor.shape, shape)):
        if wanted is not None and given != wanted:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; it must be {dimensions}, with {wanted} in dimension {size}."
            )
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; it must be contiguous (stride 1). Call "
            f"{name}.contiguous() first."
        )


def check_query_and_cache(
    query, caches: dict, cache_dimensions: str, scale, query_dimensions: str, cache_dtype=None
) -> None:
    """The part that all attention kernels share. caches: {name: tensor} of keys, then of values.

    cache_dtype: of the caches, where it is not that of the query.
    """
    check_rows("query", query, query_dimensions)
    check_runnable("query", query)
    (key_name, keys), (value_name, values) = caches.items()
    for name, tensor in caches.items():
        check_rows(name, tensor, cache_dimensions)
        if cache_dtype is not None:
            check_tensor(name, tensor, (cache_dtype,))
        check_same(name, tensor, "query", query, dtype=(tensor.dtype, cache_dtype or query.dtype),
                   head_dimension=(tensor.shape[3], query.shape[2]))  # fmt: skip
    if keys.shape != values.shape:
        raise ValueError(
            f"{value_name} has shape {tuple(values.shape)}; it must be that of {key_name}, {tuple(keys.shape)}."
        )
    if query.shape[1] % keys.shape[1] != 0:
        raise ValueError(
            f"query has {query.shape[1]} heads; it must have a multiple of the {keys.shape[1]} that {key_name} has."
        )
    if not MIN_HEAD_DIM <= query.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"query has head dimension {query.shape[2]}; supported are {MIN_HEAD_DIM} to {MAX_HEAD_DIM}.")
    # The maximum is taken over raw scores and scaled afterwards, so a scale may not turn their order round.
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale is {scale!r}; it must be finite and above 0. For a negative one, pass -query.")


def check_output(output, query) -> None:
    """Raise a ValueError unless a given output takes the result for the query."""
    if output is None:
        return
    check_rows("output", output, "[batch or tokens, query_heads, head_dim]")
    check_same("output", output, "query", query, shape=(tuple(output.shape), tuple(query.shape)))


def check_splits(splits) -> None:
    if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int) or splits < 1):
        raise ValueError(f"splits is {splits!r}; it must be None (chosen by choose_splits) or an int of at least 1.")


def check_lengths(lengths, capacity: int, holder: str) -> None:
    """Reads the device: raise a ValueError unless every length is from 0 to capacity, which `holder` names."""
    for sequence, length in enumerate(lengths.tolist()):
        if length < 0:
            raise ValueError(f"lengths[{sequence}] is {length}; a sequence has 0 tokens or more.")
        if length > capacity:
            raise ValueError(f"lengths[{sequence}] is {length}; {holder} has room for {capacity} tokens.")


def check_tables(block_tables, lengths, pages: int, page_size: int, window: int | None = None, new_tokens=1) -> None:
    """Reads the device: raise a ValueError unless each table names an existing page for every token of its sequence.

    window: for those tokens alone that one of the last `new_tokens` sees, a number, or one of each sequence, [batch].
    """
    max_blocks = block_tables.shape[1]
    check_lengths(lengths, max_blocks * page_size,
                  f"a row of block_tables, {max_blocks} pages of {page_size} tokens,")  # fmt: skip
    used_blocks = (lengths + page_size - 1) // page_size  # [batch]
    blocks = torch.arange(max_blocks, device=lengths.device)
    used = blocks < used_blocks[:, None]  # [batch, max_blocks]
    if window is not None:
        first_seen = (lengths - new_tokens - window).clamp(min=0)  # [batch]
        used &= blocks >= (first_seen // page_size)[:, None]
    outside = used & ((block_tables < 0) | (block_tables >= pages))
    if outside.any():
        sequence, block = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{sequence}, {block}] is {block_tables[sequence, block].item()}, which sequence {sequence} "
            f"with {lengths[sequence].item()} tokens needs; the pool has the pages 0 to {pages - 1}."
        )


def check_query_starts(query_starts, lengths, tokens: int) -> None:
    """Reads the device: raise a ValueError unless the starts run from 0 to `tokens`, and no sequence has too many."""
    starts, lengths = query_starts.tolist(), lengths.tolist()
    if starts[0] != 0 or starts[-1] != tokens:
        raise ValueError(f"query_starts runs from {starts[0]} to {starts[-1]}; query has the tokens 0 to {tokens}.")
    for sequence, (first, last, length) in enumerate(zip(starts, starts[1:], lengths)):
        if not 0 <= last - first <= length:
            raise ValueError(
                f"query_starts gives sequence {sequence} the query tokens {first} to {last}; it must have from 0 to "
                f"lengths[{sequence}] = {length} of them, as the query tokens are the last of a sequence's tokens."
            )
