"""Attention over a sequence that several ranks share, by exchanging places for heads: Ulysses.

Each rank holds one chunk of the sequence, all heads of it. Heads don't need each other, so the ranks trade:

    all-to-all       each rank gives away its chunk of others' heads, and gets all other chunks of its own heads
    attention        of a rank's heads over the whole sequence, by the kernel that `attention` chooses
    all-to-all       back: each rank gets its chunk of the output, all heads of it

An all-to-all with equal parts is its own reverse, and so is its derivative: the backward pass sends gradients the same
two ways.

FLOPs of a rank: those of the whole sequence over `ranks`, causal or not. Bytes received by a rank: (ranks - 1) / ranks
of its queries, keys, values and output, once in each pass. At 131,072 tokens, 32 query heads, 8 KV heads, head_dim 128,
16 bits and 2 ranks these are 671 MB: 1.7 ms at 400 GB/s. The ring receives 268 MB, and hides them behind its products;
here nothing is computed meanwhile. With more ranks Ulysses receives ever less, each rank's share being shorter, and the
ring nearly as much as before. Around each exchange lies a copy, since a rank's part for another is no one piece.
Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509.
"""

from __future__ import annotations

import torch
import torch.distributed as distributed

from course_lib.hardware.ranks import Ranks
from course_lib.kernels.attention.operator import attention
from course_lib.kernels.parallel.sequence_checks import check_on_all_ranks


def attention_over_heads(ranks: Ranks, query, key, value, *, causal=True, scale=None, validate=True):
    """Attention of this rank's queries over the keys of all ranks; every rank calls it.

    Args:
        ranks: this process's place among the ranks.
        query: [batch, query_heads, rows, head_dim]: chunk `ranks.rank` of the sequence, rows = length / ranks on each.
            query_heads is a multiple of the ranks.
        key, value: [batch, key_heads, rows, head_dim], of the same places. key_heads is a multiple of the ranks, or the
            ranks are one of key_heads. In the second case several ranks compute with one KV head, and each gets a copy.
        causal, scale: as for `attention`.
        validate: as for `ring_attention`.

    Returns the output, contiguous, of query's shape and dtype. It can be differentiated once, where all ranks run the
    backward pass; the copies of a KV head then add their gradients.

    With one rank it is `attention`, and nothing is exchanged.

    Raises a ValueError, on all ranks where `validate` is true, when arguments don't fit or ranks disagree.
    """
    size = ranks.size
    if size == 1:
        return attention(query, key, value, causal=causal, scale=scale)

    def refuse():
        check_heads(query.shape[1], key.shape[1], size)

    check_on_all_ranks(ranks, query, key, value, refuse, causal=causal, scale=scale, validate=validate)
    copies = copies_of_a_key_head(size, key.shape[1])
    if copies > 1:
        key, value = (one.repeat_interleave(copies, dim=1) for one in (key, value))
    for_ranks = [one.unflatten(1, (size, -1)).movedim(1, 0) for one in (query, key, value)]
    heads = [one.shape[2] for one in for_ranks]
    chunks = AllToAll.apply(torch.cat(for_ranks, dim=2))  # [source, batch, query and KV heads, rows, head_dim]
    whole = chunks.movedim(0, 2).flatten(2, 3)  # [batch, query and KV heads, length, head_dim]
    output = attention(*whole.split(heads, dim=1), causal=causal, scale=scale)
    by_chunk = output.unflatten(2, (size, -1)).movedim(2, 0)  # [to, batch, query heads of this rank, rows, head_dim]
    return AllToAll.apply(by_chunk).movedim(0, 1).flatten(1, 2)


def check_heads(query_heads: int, key_heads: int, ranks: int) -> None:
    """Raise a ValueError unless each rank can have as many query heads, and whole KV heads."""
    if query_heads % ranks:
        raise ValueError(
            f"query has {query_heads} heads; they are shared out to {ranks} ranks, so there must be a multiple of "
            f"{ranks}. ring_attention takes any number of heads."
        )
    if key_heads % ranks and ranks % key_heads:
        raise ValueError(
            f"key has {key_heads} heads for {ranks} ranks; one number must be a multiple of the other. ring_attention "
            "takes any number of heads."
        )


def copies_of_a_key_head(ranks: int, key_heads: int) -> int:
    """How many ranks compute with one KV head."""
    return max(1, ranks // key_heads)


def bytes_received(ranks: int, query, key) -> int:
    """What a rank receives in the forward pass, in bytes, and once more as many in the backward pass.

    query: the rank's own, [batch, query_heads, rows, head_dim]. key: likewise with key_heads; value is alike.
    """
    keys_and_values = 2 * key.numel() * copies_of_a_key_head(ranks, key.shape[1])
    return (ranks - 1) * (2 * query.numel() + keys_and_values) * query.element_size() // ranks


class AllToAll(torch.autograd.Function):
    """Rank r gets the r-th part of every rank's tensor [ranks, ...], in the order of the ranks; and so do gradients."""

    @staticmethod
    def forward(ctx, parts):
        received = torch.empty(parts.shape, dtype=parts.dtype, device=parts.device)
        distributed.all_to_all_single(received, parts.contiguous())
        return received

    @staticmethod
    def backward(ctx, gradients):
        return AllToAll.apply(gradients)
