"""Attention, as plainly as PyTorch can say it: the meaning that every attention kernel of the course is held to.

    S = scale · Q Kᵀ          scores          [batch, query_heads, query_length, key_length]
    P = softmax(S) by rows    probabilities   [batch, query_heads, query_length, key_length]
    O = P V                   output          [batch, query_heads, query_length, head_dim]

It writes S and P whole: 4 · batch · query_heads · query_length · key_length · head_dim FLOPs, and memory that grows
with query_length · key_length. Use it on small tensors, in float64 when it serves as an oracle.
"""

import math

import torch


def visible_keys(query_length, key_length, *, causal=False, window=None, device=None) -> torch.Tensor:
    """Which keys each query may see: bool [query_length, key_length].

    Positions are aligned to the end: the last query stands at the last key, so query i is at position
    i + key_length - query_length. `causal` hides the keys after a query's position. `window` hides those more than
    `window` places before it and, without `causal`, those more than `window` places after it.
    """
    query_positions = torch.arange(query_length, device=device)[:, None] + (key_length - query_length)
    key_positions = torch.arange(key_length, device=device)[None, :]
    visible = torch.ones(query_length, key_length, dtype=torch.bool, device=device)
    if causal:
        visible &= key_positions <= query_positions
    if window is not None:
        visible &= key_positions >= query_positions - window
        visible &= key_positions <= query_positions + window
    return visible


def attention_reference(query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False):
    """Softmax attention in the dtype of its inputs.

    Args:
        query: [batch, query_heads, query_length, head_dim].
        key, value: [batch, key_heads, key_length, head_dim]; query_heads is a multiple of key_heads, and query head h
            reads key head h // (query_heads // key_heads).
        causal, window: see `visible_keys`.
        scale: factor of the scores; 1/√head_dim when None.
        sink: [query_heads]; each row has the score of its head's sink as one more column of S, which every query sees
            and which has no value. None: no such column.
        return_lse: also return log Σ exp(S) of every row, natural logarithm, [batch, query_heads, query_length].

    A query that sees no key gets an output of zeros and a log-sum-exp of minus infinity, or of its sink.
    """
    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=window, device=query.device)
    return masked_attention_reference(query, key, value, visible, scale=scale, sink=sink, return_lse=return_lse)


def masked_attention_reference(query, key, value, visible, *, scale=None, sink=None, return_lse=False):
    """`attention_reference` under any mask.

    visible: bool, broadcasts to [batch, query_heads, query_length, key_length]: True where the query sees the key.
    """
    heads_per_key_head = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(heads_per_key_head, dim=1)
    value = value.repeat_interleave(heads_per_key_head, dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale

    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~visible, -math.inf)
    # A row without a visible key would be softmax(-inf, -inf, ...) = NaN; by definition it is a row of zeros.
    sees_nothing = ~visible.any(dim=-1, keepdim=True)
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = torch.softmax(scores.masked_fill(sees_nothing, 0), dim=-1).masked_fill(sees_nothing, 0)
    output = probabilities[..., : key.shape[2]] @ value
    return (output, torch.logsumexp(scores, dim=-1)) if return_lse else output
