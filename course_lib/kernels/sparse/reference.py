"""Attention under any mask, as plainly as PyTorch can say it: what the kernels over block lists are held to."""

import math

import torch


def masked_attention_reference(query, key, value, visible, *, scale=None, return_lse=False):
    """Softmax attention in the dtype of its inputs; shapes, scale and results as for `attention_reference`.

    visible: bool, broadcasts to [batch, query_heads, query_length, key_length]: True where the query sees the key.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~visible, -math.inf)
    # A row without a visible key would be softmax(-inf, -inf, ...) = NaN; by definition it is a row of zeros.
    sees_nothing = ~visible.any(dim=-1, keepdim=True)
    probabilities = torch.softmax(scores.masked_fill(sees_nothing, 0), dim=-1).masked_fill(sees_nothing, 0)
    output = probabilities @ value
    return (output, torch.logsumexp(scores, dim=-1)) if return_lse else output
