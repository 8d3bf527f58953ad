"""Decode of multi-head latent attention on any GPU: the launchers of `kernel.py`, contiguous and paged.

Where there are splits, a second launch merges their parts, one program a row: 66 parts of one row are 135 KB, and
the last program of a tile of 64 rows would have 8.6 MB to read alone.
"""

import torch
import triton

from course_lib.hardware.kept import kept
from course_lib.kernels.common.cache_checks import check_indices, check_lengths, check_splits, check_tables
from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.decode.combine import combine_splits_kernel
from course_lib.kernels.latent.checks import check_cache, check_output, check_query
from course_lib.kernels.latent.kernel import latent_decode_kernel
from course_lib.kernels.latent.tiles import latent_plan


@kept
def latent_decode_attention(
    query,
    cache,
    lengths,
    *,
    scale,
    value_dim=512,
    causal=True,
    splits=None,
    return_lse=False,
    output=None,
    validate=True,
):
    """Attention of the last tokens of each sequence to its latent cache: see `latent_decode_reference`.

    Args:
        query: [batch, query_tokens, heads, value_dim + rope_dim], float32, float16 or bfloat16, absorbed: the latent
            part first, the rotary part last. Any strides, with a contiguous last dimension; the cache too.
        cache: [batch, capacity, value_dim + rope_dim], of query's dtype and device.
        lengths: int32 or int64 [batch], tokens of each sequence in the cache, the query's own included; 0 to capacity.
        scale: factor of the scores, above 0: 1/√(head dimension of the expanded form).
        value_dim: numbers of a row that are the latent, a power of two from 16 to 512; rope_dim is 16 to 64.
        causal: the last query token stands at the last key, and each sees the keys up to its own place; else all keys.
        splits: parts that each sequence's keys are split into; None asks `latent_plan`.
        return_lse: also return the log-sum-exp of the scaled scores, natural logarithm.
        output: where the result goes, contiguous, of query's dtype; a new tensor when None.
        validate: read `lengths` from the device and check them, which waits for it. With False the step can be captured
            in a CUDA graph; a length that is wrong then reads memory of others.

    Returns the output [batch, query_tokens, heads, value_dim], or (output, log-sum-exp float32 [batch, query_tokens,
    heads]); zeros and minus infinity for a query token that sees no key. What the cache holds beyond a length is not
    read. A NaN in a later token of the same sequence may reach query tokens that don't see it.

    Raises a ValueError that names the argument when shapes, dtypes, devices, strides, lengths or options don't fit.
    Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434.
    """
    check_query(query, value_dim, scale)
    check_cache("cache", cache, "[batch, capacity, value_dim + rope_dim]", query)
    if cache.shape[0] != query.shape[0]:
        raise ValueError(f"cache has batch size {cache.shape[0]}; it must be that of query, {query.shape[0]}.")
    check_indices("lengths", lengths, "[batch]", (query.shape[0],), query.device)
    if validate:
        check_lengths(lengths, cache.shape[1], "the cache")
    return launch(query, cache, None, lengths, cache.shape[1], scale, value_dim, causal, splits, return_lse, output)


@kept
def paged_latent_decode_attention(
    query,
    pages,
    block_tables,
    lengths,
    *,
    scale,
    value_dim=512,
    causal=True,
    splits=None,
    return_lse=False,
    output=None,
    validate=True,
):
    """`latent_decode_attention` for a cache that lies in pages anywhere in a pool.

    Args:
        pages: [pages, page_size, value_dim + rope_dim], of query's dtype and device; any strides, the last one
            1. Pages of 64 tokens or a multiple are the fastest, since a tile then lies in one page.
        block_tables: int32 or int64 [batch, max_blocks]: at [sequence, i] the page of tokens i · page_size to
            (i + 1) · page_size - 1. Entries that the length doesn't reach are not read, and may be anything.
        lengths: int32 or int64 [batch]; 0 to max_blocks · page_size.
        the others: as for `latent_decode_attention`; `validate` also checks the tables.
    """
    check_query(query, value_dim, scale)
    check_cache("pages", pages, "[pages, page_size, value_dim + rope_dim]", query)
    check_indices("lengths", lengths, "[batch]", (query.shape[0],), query.device)
    check_indices("block_tables", block_tables, "[batch, max_blocks]", (query.shape[0], None), query.device)
    if validate:
        check_tables(block_tables, lengths, *pages.shape[:2])
    longest = block_tables.shape[1] * pages.shape[1]
    return launch(query, pages, block_tables, lengths, longest, scale, value_dim, causal, splits, return_lse, output)


def launch(query, cache, tables, lengths, longest, scale, value_dim, causal, splits, return_lse, output):
    """The step itself, for arguments that were checked, but for `splits` and `output`."""
    check_splits(splits)
    check_output(output, query, value_dim)
    batch, query_tokens, heads, width = query.shape
    plan = latent_plan(query, value_dim, longest, splits)
    shape, options = query.shape[:3], {"dtype": torch.float32, "device": query.device}
    if output is None:
        output = torch.empty(*shape, value_dim, dtype=query.dtype, device=query.device)
    lse = torch.empty(shape, **options) if return_lse else None
    found, found_lse = output, lse
    if plan.splits > 1:
        found = torch.empty(plan.splits, *shape, value_dim, **options)
        found_lse = torch.empty(plan.splits, *shape, **options)
    latent_decode_kernel[(plan.row_tiles, plan.splits, batch)](
        query, cache, tables, lengths, found, found_lse, *query.stride()[:3], *cache.stride()[:2],
        0 if tables is None else tables.stride(0), query_tokens, heads, LOG2_E.value * scale, VALUE_DIM=value_dim,
        ROPE_DIM=width - value_dim, BLOCK_R=triton.next_power_of_2(width - value_dim),
        PAGE_SIZE=0 if tables is None else cache.shape[1], CAUSAL=causal, **plan.tiles.settings(),
    )  # fmt: skip
    if plan.splits > 1:
        rows = batch * query_tokens * heads
        combine_splits_kernel[(rows,)](found, found_lse, output, lse, rows, plan.splits, HEAD_DIM=value_dim,
                                       BLOCK_D=value_dim, BLOCK_ROWS=1, num_warps=4)  # fmt: skip
    return (output, lse) if return_lse else output
