"""A forward and a backward, whoever wrote them, joined to a function that PyTorch can differentiate.

    attention = with_gradient(forward, backward)
    model = Decoder(config, attention=attention)

The course's own kernels are joined in `operator.py`, which `torch.compile` understands as well. This is for a
learner's.
"""

from collections.abc import Callable

import torch

NO_SECOND_DERIVATIVE = (
    "attention's backward pass has no derivative of its own here. A second derivative (create_graph=True, a gradient "
    "penalty) has to go through PyTorch's operations: use attention_reference from "
    "course_lib.kernels.attention.reference for it, on lengths whose score matrix fits."
)


def with_gradient(forward: Callable, backward: Callable) -> Callable:
    """Attention that autograd passes through, out of a forward and a backward that know nothing of autograd.

    Args:
        forward: `forward(query, key, value, causal)` gives (output, log-sum-exp).
        backward: `backward(query, key, value, output, log_sum_exp, output_gradient, causal)` gives (dQ, dK, dV).

    Both get 4-dimensional tensors as `Decoder` has them: query [batch, query_heads, query_length, head_dim]. What is
    kept between the two is Q, K, V, O and the log-sum-exp: no probability.

    Returns `attention(query, key, value, *, causal=True)`. Its second derivative raises a RuntimeError.
    """

    def attention(query, key, value, *, causal: bool = True) -> torch.Tensor:
        return Attention.apply(query, key, value, causal, forward, backward)

    return attention


class Attention(torch.autograd.Function):
    """The output of attention from (query, key, value, causal, forward, backward), and its gradients."""

    @staticmethod
    def forward(ctx, query, key, value, causal, forward, backward):
        output, log_sum_exp = forward(query, key, value, causal)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        ctx.causal, ctx.backward_function = causal, backward
        return output

    @staticmethod
    def backward(ctx, output_gradient):
        if torch.is_grad_enabled():  # true only when a second derivative was asked for
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        gradients = ctx.backward_function(*ctx.saved_tensors, output_gradient, ctx.causal)
        return (*gradients, None, None, None)
