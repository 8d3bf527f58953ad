"""The gradients of attention, as plainly as PyTorch can say them: what the backward kernels are held to.

With O = P V, P = softmax(S) by rows, S = scale · Q Kᵀ, and dX for the gradient of the loss by X:

    dV = Pᵀ dO
    dP = dO Vᵀ
    Δ  = rowsum(O ∘ dO)                 one number a query; equal to rowsum(P ∘ dP), which needs the whole of P
    dS = P ∘ (dP - Δ)                   the gradient of a softmax
    dQ = scale · dS K
    dK = scale · dSᵀ Q

Five products of 2 · batch · query_heads · query_length · key_length · head_dim FLOPs, one of them S once more: 2.5
times the forward's. It writes S, P, dP and dS whole: at 16k tokens and 32 heads 17 GB each in 16 bits. Use it on small
tensors, in float64 when it serves as an oracle.
"""

import math

import torch

from course_lib.kernels.attention.reference import attention_reference, visible_keys


def attention_backward_reference(
    query, key, value, output_gradient, *, causal=False, window=None, scale=None, log_sum_exp_gradient=None
):
    """The gradients of `attention_reference`, in the dtype of its inputs.

    Args:
        query, key, value, causal, window, scale: as for `attention_reference`.
        output_gradient: dO, of the output's shape and dtype.
        log_sum_exp_gradient: the gradient of the log-sum-exps, [batch, query_heads, query_length]; None when the loss
            doesn't depend on them. Their own derivative is P: they add to dS what Δ takes away.

    Returns (dQ, dK, dV), of the shapes of query, key and value. A query that sees no key has a dQ of zeros, and adds
    nothing to dK and dV. A KV head that several query heads share gets the sum of their contributions.
    """
    group = query.shape[1] // key.shape[1]
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    options = {"causal": causal, "window": window, "scale": scale}
    output, log_sum_exp = attention_reference(query, key, value, return_lse=True, **options)
    shared_key, shared_value = key, value
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)

    visible = visible_keys(query.shape[2], key.shape[2], causal=causal, window=window, device=query.device)
    scores = (scale * (query @ key.transpose(-1, -2))).masked_fill(~visible, -math.inf)
    sees_nothing = log_sum_exp == -math.inf
    probabilities = torch.exp(scores - log_sum_exp.masked_fill(sees_nothing, 0)[..., None])
    delta = (output * output_gradient).sum(dim=-1)  # [batch, query_heads, query_length]
    if log_sum_exp_gradient is not None:
        delta = delta - log_sum_exp_gradient

    value_gradient = probabilities.transpose(-1, -2) @ output_gradient
    probability_gradients = output_gradient @ value.transpose(-1, -2)
    score_gradients = probabilities * (probability_gradients - delta[..., None])
    query_gradient = scale * (score_gradients @ key)
    key_gradient = scale * (score_gradients.transpose(-1, -2) @ query)
    return (
        query_gradient,
        key_gradient.unflatten(1, (-1, group)).sum(dim=2).view_as(shared_key),
        value_gradient.unflatten(1, (-1, group)).sum(dim=2).view_as(shared_value),
    )
