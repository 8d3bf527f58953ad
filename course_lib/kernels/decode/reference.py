"""Decode and paged attention, as plainly as PyTorch can say it: the meaning that the kernels are held to.

One sequence after another: its keys and values are cut out of the cache, or gathered from its pages, and
`attention_reference` does the rest. Use it on small tensors, in float64 when it serves as an oracle.
"""

import torch

from course_lib.kernels.attention.reference import attention_reference


def gather_pages(pages, block_table, length: int, first: int = 0) -> torch.Tensor:
    """The tokens of one sequence, from [pages, key_heads, page_size, head_dim]: [key_heads, length - first, head_dim].

    block_table [max_blocks] names the page of each page_size tokens; entries of pages that lie before token `first`, or
    that `length` doesn't reach, are not read.
    """
    page_size = pages.shape[2]
    before = first // page_size  # pages
    blocks = block_table[before : -(-length // page_size)].long()
    tokens = pages[blocks].transpose(0, 1).flatten(1, 2)  # [key_heads, blocks * page_size, head_dim]
    return tokens[:, first - before * page_size : length - before * page_size]


def first_seen(length: int, new_tokens: int, window) -> int:
    """The first token of a sequence that one of its last `new_tokens` sees."""
    return 0 if window is None else max(0, length - new_tokens - window)


def decode_attention_reference(
    query, key_cache, value_cache, lengths, *, window=None, scale=None, sink=None, return_lse=False
):
    """One query token [batch, query_heads, head_dim] against each sequence of a contiguous cache, in its dtype.

    window, sink: as for `attention_reference`.
    """
    caches = [[cache[i, :, first_seen(length, 1, window) : length] for cache in (key_cache, value_cache)]
              for i, length in enumerate(lengths.tolist())]  # fmt: skip
    starts = torch.arange(query.shape[0] + 1)
    return ragged_reference(query, starts, caches, scale, return_lse, window, sink)


def paged_decode_reference(query, key_pages, value_pages, block_tables, lengths, **options):
    """One query token [batch, query_heads, head_dim] against each sequence of a paged cache, in its dtype.

    options: window, scale, sink and return_lse, as for `decode_attention_reference`.
    """
    starts = torch.arange(query.shape[0] + 1)
    return paged_prefill_reference(query, key_pages, value_pages, block_tables, starts, lengths, **options)


def paged_prefill_reference(
    query, key_pages, value_pages, block_tables, query_starts, lengths,
    *, window=None, scale=None, sink=None, return_lse=False,
):  # fmt: skip
    """Causal attention of query [tokens, query_heads, head_dim], the last tokens of each sequence, to its pages.

    Tokens query_starts[i] to query_starts[i + 1] are those of sequence i; the last of them is at lengths[i] - 1.
    window, sink: as for `attention_reference`.
    """
    ends = lengths.tolist()
    firsts = [first_seen(end, new, window) for end, new in zip(ends, query_starts.diff().tolist())]
    caches = [[gather_pages(pages, table, end, first) for pages in (key_pages, value_pages)]
              for table, end, first in zip(block_tables, ends, firsts)]  # fmt: skip
    return ragged_reference(query, query_starts, caches, scale, return_lse, window, sink)


def ragged_reference(query, query_starts, caches, scale, return_lse, window=None, sink=None):
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], float("-inf"), dtype=query.dtype, device=query.device)
    if sink is not None:
        lse[:] = sink  # of a sequence without keys
    for (first, last), (key, value) in zip(query_starts.long().unfold(0, 2, 1).tolist(), caches):
        if first == last or key.shape[1] == 0:
            continue
        rows = query[first:last].transpose(0, 1)  # [query_heads, tokens, head_dim]
        result, result_lse = attention_reference(rows[None], key[None], value[None], causal=True, window=window,
                                                 scale=scale, sink=sink, return_lse=True)  # fmt: skip
        output[first:last], lse[first:last] = result[0].transpose(0, 1), result_lse[0].transpose(0, 1)
    return (output, lse) if return_lse else output
