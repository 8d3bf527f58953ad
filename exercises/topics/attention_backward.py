"""The gradients of attention, plainly: what chapter 10 asks for, with the whole score matrix in view.

    S = scale · Q Kᵀ      P = exp(S - L)      dP = dO Vᵀ      Δ = Σ O ∘ dO by rows      dS = P ∘ (dP - Δ)
    dQ = scale · dS K     dK = scale · dSᵀ Q  dV = Pᵀ dO

All functions take [..., length, head_dim] tensors and work in the dtype given, in float32 at least.
"""

from __future__ import annotations

import math

import torch

from exercises.topics.attention import attention, log_sum_exp, visible_pairs


def at_least_float32(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies in which 16 bits have become float32."""
    return tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


def delta_of(output: torch.Tensor, output_gradient: torch.Tensor) -> torch.Tensor:
    """Δ [..., query_length] = Σ O ∘ dO over each row, summed in float32 at least."""
    output, output_gradient = at_least_float32(output, output_gradient)
    return (output * output_gradient).sum(-1)


def probabilities_of(scores: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
    """exp(S - L), and zeros where the score is minus infinity, in a row that sees nothing too."""
    weights = torch.exp(scores - log_sum[..., None])
    return weights.masked_fill(scores == -math.inf, 0.0)


def gradients(query, key, value, output_gradient, log_sum, delta, visible=None, narrow=None, stray=0.0, turns=1):
    """(dQ, dK, dV) in float32 at least, from what the forward pass left: L and Δ.

    visible: bool [query_length, key_length]; all pairs by default.
    narrow: a dtype to which P and dS are rounded before their products, as kernels do it.
    stray: scores and dP are off by this, up and down by turns of so many keys, in units of what another order of
        summation may change: 2 ε Σ |q||k| · scale, and 2 ε Σ |dO||v|. Where dP - Δ is small, only such rounding is left
        of dS.
    """
    query, key, value, output_gradient = at_least_float32(query, key, value, output_gradient)
    scale = 1 / math.sqrt(query.shape[-1])
    scores = scale * (query @ key.transpose(-1, -2))
    if stray:
        step = stray * 2 * torch.finfo(torch.float32).eps * (1.0 - 2.0 * (torch.arange(key.shape[-2]) // turns % 2))
        scores = scores + step * scale * (query.abs() @ key.abs().transpose(-1, -2))
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    weights = probabilities_of(scores, log_sum)
    weight_gradients = output_gradient @ value.transpose(-1, -2)
    if stray:
        weight_gradients = weight_gradients + step * (output_gradient.abs() @ value.abs().transpose(-1, -2))
    score_gradients = weights * (weight_gradients - delta[..., None])
    if narrow is not None:
        weights, score_gradients = (tensor.to(narrow).to(query.dtype) for tensor in (weights, score_gradients))
    return (
        scale * (score_gradients @ key),
        scale * (score_gradients.transpose(-1, -2) @ query),
        weights.transpose(-1, -2) @ output_gradient,
    )


def positions_seen(query_length: int, key_length: int, causal: bool) -> torch.Tensor | None:
    """The causal mask aligned to the end, or None."""
    return visible_pairs(query_length, key_length) if causal else None


def left_by_the_forward(query, key, value, visible=None):
    """(output in query's dtype, log-sum-exp in float32), as a forward kernel leaves them."""
    wide = at_least_float32(query, key, value)
    return attention(*wide, visible).to(query.dtype), log_sum_exp(query, key, visible).float()
