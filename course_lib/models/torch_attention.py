"""PyTorch's own attention behind the course's interface: query heads in groups, and causal aligned to the end."""

import math

import torch
import torch.nn.functional as F

from course_lib.kernels.attention.reference import visible_keys


def torch_attention(query, key, value, *, causal: bool = False, window=None, scale=None, sink=None) -> torch.Tensor:
    """Softmax attention by `scaled_dot_product_attention`; autograd passes through it.

    Args:
        query: [batch, query_heads, query_length, head_dim].
        key, value: [batch, key_heads, key_length, head_dim]; query_heads is a multiple of key_heads.
        causal: query i sees the keys up to position i + key_length - query_length. (PyTorch's own `is_causal` is
            aligned to the first key, which is another mask as soon as a cache holds earlier keys.)
        window, scale, sink: as for `attention_reference`.

    Returns the output, of query's shape and dtype.
    """
    query_length, key_length = query.shape[2], key.shape[2]
    options = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if sink is None and causal and window is None and query_length == key_length and query_length > 1:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, **options)
    mask = None
    if window is not None or causal and query_length > 1:  # a single query stands at the last key and sees them all
        mask = visible_keys(query_length, key_length, causal=causal, window=window, device=query.device)
    if sink is not None:  # one more key and value of zeros, whose score the mask makes the sink's
        visible = query.new_ones(query_length, key_length, dtype=torch.bool) if mask is None else mask
        bias = query.new_zeros(visible.shape).masked_fill(~visible, -math.inf)
        heads = query.shape[1]
        columns = sink.to(query.dtype)[:, None, None].expand(heads, query_length, 1)
        mask = torch.cat([bias.expand(heads, -1, -1), columns], dim=-1)
        key, value = (F.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)
