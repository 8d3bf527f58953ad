"""Decode and paged attention, as plainly as PyTorch can say it: the meaning that the kernels are held to.

One sequence after another: its keys and values are cut out of the cache, or gathered from its pages, and
`attention_reference` does the rest. Use it on small tensors, in float64 when it serves as an oracle.
"""

import torch

from course_lib.kernels.attention.reference import attention_reference


def gather_pages(pages, block_table, length: int) -> torch.Tensor:
    """The tokens of one sequence, [key_heads, length, head_dim], from [pages, key_heads, page_size, head_dim].

    block_table [max_blocks] names the page of each page_size tokens; entries that `length` doesn't reach are not read.
    """
    page_size = pages.shape[2]
    blocks = block_table[: -(-length // page_size)].long()
    tokens = pages[blocks].transpose(0, 1).flatten(1, 2)  # [key_heads, blocks * page_size, head_dim]
    return tokens[:, :length]


def decode_attention_reference(query, key_cache, value_cache, lengths, *, scale=None, return_lse=False):
    """One query token [batch, query_heads, head_dim] against each sequence of a contiguous cache, in its dtype."""
    caches = [(key_cache[i, :, :length], value_cache[i, :, :length]) for i, length in enumerate(lengths.tolist())]
    starts = torch.arange(query.shape[0] + 1)
    return ragged_reference(query, starts, caches, scale, return_lse)


def paged_decode_reference(query, key_pages, value_pages, block_tables, lengths, *, scale=None, return_lse=False):
    """One query token [batch, query_heads, head_dim] against each sequence of a paged cache, in its dtype."""
    starts = torch.arange(query.shape[0] + 1)
    return paged_prefill_reference(query, key_pages, value_pages, block_tables, starts, lengths, scale=scale,
                                   return_lse=return_lse)  # fmt: skip


def paged_prefill_reference(
    query, key_pages, value_pages, block_tables, query_starts, lengths, *, scale=None, return_lse=False
):
    """Causal attention of query [tokens, query_heads, head_dim], the last tokens of each sequence, to its pages.

    Tokens query_starts[i] to query_starts[i + 1] are those of sequence i; the last of them is at lengths[i] - 1.
    """
    caches = [[gather_pages(pages, table, length) for pages in (key_pages, value_pages)]
              for table, length in zip(block_tables, lengths.tolist())]  # fmt: skip
    return ragged_reference(query, query_starts, caches, scale, return_lse)


def ragged_reference(query, query_starts, caches, scale, return_lse):
    output = torch.zeros_like(query)
    lse = torch.full(query.shape[:2], float("-inf"), dtype=query.dtype, device=query.device)
    for (first, last), (key, value) in zip(query_starts.long().unfold(0, 2, 1).tolist(), caches):
        if first == last or key.shape[1] == 0:
            continue
        rows = query[first:last].transpose(0, 1)  # [query_heads, tokens, head_dim]
        result, result_lse = attention_reference(rows[None], key[None], value[None], causal=True, scale=scale,
                                                 return_lse=True)  # fmt: skip
        output[first:last], lse[first:last] = result[0].transpose(0, 1), result_lse[0].transpose(0, 1)
    return (output, lse) if return_lse else output
