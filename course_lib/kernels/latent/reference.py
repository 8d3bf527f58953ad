"""Decode of multi-head latent attention, as plainly as PyTorch can say it: what the latent kernels are held to.

    score[t, h, n]  = scale · query[t, h] · cache[n]             over value_dim + rope_dim numbers
    output[t, h]    = Σ_n softmax(score[t, h])[n] · cache[n, :value_dim]

The cache holds one row a token, which all heads share: first the latent (512 numbers in DeepSeek-V3), then the rotary
key (64). The latent is the key and, as it is, the value. The queries are absorbed: query[t, h, :value_dim] is
W_UKᵀ q of head h, query[t, h, value_dim:] its rotary part; W_UV comes after, and is no part of this.

FLOPs: 2 · heads · (2 · value_dim + rope_dim) per key and query token. Bytes: (value_dim + rope_dim) · itemsize per key,
1,152 in 16 bits. Source: DeepSeek-AI, DeepSeek-V2, arXiv 2405.04434.
"""

import math

import torch

from course_lib.kernels.attention.reference import visible_keys


def latent_decode_reference(query, cache, lengths=None, *, scale, value_dim=512, causal=True, return_lse=False):
    """Attention of the last tokens of each sequence to its latent cache, in the dtype of the inputs.

    Args:
        query: [batch, query_tokens, heads, value_dim + rope_dim], absorbed: the latent part, then the rotary part.
        cache: [batch, capacity, value_dim + rope_dim]: the latent first, the shared rotary key last.
        lengths: integers [batch], tokens of each sequence in the cache, the query's own included; None: the capacity.
        scale: factor of the scores: 1/√(head dimension of the expanded form), 1/√192 in DeepSeek-V3, since absorbing
            changes no score.
        value_dim: numbers of a row that are the latent.
        causal: the last query token stands at the last key, and each sees the keys up to its own place. Without it each
            sees them all.
        return_lse: also return log Σ exp(score), natural logarithm, [batch, query_tokens, heads].

    Returns the output [batch, query_tokens, heads, value_dim], or (output, log-sum-exp). A query token that sees no key
    gets zeros and minus infinity: all of a sequence of length 0, and the first ones where the length is less than
    query_tokens.
    """
    lengths = [cache.shape[1]] * query.shape[0] if lengths is None else lengths.tolist()
    rows = [cache[sequence, :length] for sequence, length in enumerate(lengths)]
    return ragged_latent_reference(query, rows, scale, value_dim, causal, return_lse)


def paged_latent_decode_reference(
    query, pages, block_tables, lengths, *, scale, value_dim=512, causal=True, return_lse=False
):
    """`latent_decode_reference` for a cache that lies in pages [pages, page_size, value_dim + rope_dim].

    block_tables: integers [batch, max_blocks]: at [sequence, i] the page of tokens i · page_size to
    (i + 1) · page_size - 1 of that sequence. Entries that the length doesn't reach are not read, and may be anything.
    """
    page_size = pages.shape[1]
    rows = [pages[table[: -(-length // page_size)].long()].flatten(0, 1)[:length]
            for table, length in zip(block_tables, lengths.tolist())]  # fmt: skip
    return ragged_latent_reference(query, rows, scale, value_dim, causal, return_lse)


def ragged_latent_reference(query, rows, scale, value_dim, causal, return_lse):
    """query [batch, query_tokens, heads, width] against each sequence's rows [length, width] of the cache."""
    output = torch.zeros_like(query[..., :value_dim], memory_format=torch.contiguous_format)
    lse = torch.full(query.shape[:3], -math.inf, dtype=query.dtype, device=query.device)
    for sequence, keys in enumerate(rows):
        scores = scale * torch.einsum("thw, nw -> htn", query[sequence], keys)  # [heads, query_tokens, length]
        visible = visible_keys(query.shape[1], keys.shape[0], causal=causal, device=query.device)
        sees = visible.any(dim=-1)  # [query_tokens]
        scores = scores.masked_fill(~visible, -math.inf)[:, sees]
        output[sequence, sees] = torch.einsum("htn, nv -> thv", scores.softmax(dim=-1), keys[:, :value_dim])
        lse[sequence, sees] = scores.logsumexp(dim=-1).T
    return (output, lse) if return_lse else output
