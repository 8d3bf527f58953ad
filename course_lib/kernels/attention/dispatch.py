"""Attention by the fastest of the course's kernels that can take these inputs on this machine.

    attention(query, key, value, causal=True)      # computes, and can be differentiated
    choose(query, key, value)                      # only says which kernel would, and why
    choose_backward(query, key, value)             # the same for the gradients

The portable kernel takes everything that attention takes. The one for Hopper is faster and asks for more: see
`hopper.limits`. The choice changes the time and the rounding, and one thing more: with the portable kernel a NaN or an
infinity in a value that a mask hides stays hidden; with the other it can reach queries of the same tile.
"""

from typing import NamedTuple

import torch

from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.checks import check_attention_inputs
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.operator import attention_operator
from course_lib.kernels.hopper.limits import hopper_refusal


class Choice(NamedTuple):
    """The kernel to run, "hopper" or "portable", and why, in one sentence."""

    kernel: str
    reason: str


def choose(query, key, value, *, causal=False, window=None, scale=None) -> Choice:
    """Which kernel `attention` runs for these arguments, and why. Runs nothing.

    Raises the ValueError that `attention` raises where no kernel takes them.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale)
    refusal = hopper_refusal(query, key, value)
    if refusal is None:
        return Choice("hopper", "the GPU is a Hopper, and its copy engine and matrix units take these inputs.")
    return Choice("portable", refusal.reason)


def choose_backward(query, key, value, *, causal=False, window=None, scale=None) -> Choice:
    """Which kernels compute the gradients of `attention` for these arguments, and why. Runs nothing.

    Raises the ValueError that `attention` raises where no kernel takes them.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale)
    refusal = hopper_refusal(query, key, value)
    if refusal is not None:
        return Choice("portable", refusal.reason)
    return Choice("portable", "the backward pass has portable kernels alone.")


def attention(query, key, value, *, causal=False, window=None, scale=None, return_lse=False):
    """Exact softmax attention. Arguments, results and errors are those of `flash_attention`, but for `tiles`.

    query: [batch, query_heads, query_length, head_dim]; key, value: [batch, key_heads, key_length, head_dim].
    Returns the output, of query's shape and dtype, or (output, log-sum-exp [batch, query_heads, query_length]).

    Output and log-sum-exp can be differentiated once by query, key and value; a second derivative raises a
    RuntimeError. `torch.compile(fullgraph=True)` takes it as one operator of its graph.
    """
    inputs = query, key, value
    if not torch.compiler.is_compiling():
        check_attention_inputs(*inputs, window=window, scale=scale)
        if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)):
            return forward(*inputs, causal=causal, window=window, scale=scale, return_lse=return_lse)
    output, log_sum_exp = attention_operator(*inputs, causal, window, scale)
    return (output, log_sum_exp) if return_lse else output


def forward(query, key, value, *, causal=False, window=None, scale=None, return_lse=False):
    """What `attention` returns, by the kernel that `choose` names; autograd sees nothing of it."""
    options = {"causal": causal, "window": window, "scale": scale, "return_lse": return_lse}
    if choose(query, key, value, causal=causal, window=window, scale=scale).kernel == "portable":
        return flash_attention(query, key, value, **options)
    # Only here, where it is known to work: Gluon needs a Triton that has it.
    from course_lib.kernels.hopper.flash import flash_attention_hopper

    return flash_attention_hopper(query, key, value, **options)


def backward(query, key, value, output, log_sum_exp, output_gradient, **options):
    """(dQ, dK, dV) by the kernels that `choose_backward` names; arguments as for `flash_attention_backward`."""
    return flash_attention_backward(query, key, value, output, log_sum_exp, output_gradient, **options)
