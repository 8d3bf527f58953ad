"""The last linear layer with cross-entropy, by chunks, as an operator of PyTorch with its gradient.

Why operators, and what is registered for one, is told in `course_lib.kernels.attention.operator`.
"""

import torch

from course_lib.kernels.fused.cross_entropy import IGNORE_INDEX
from course_lib.kernels.fused.cross_entropy_operators import check_reduction, reduced
from course_lib.kernels.fused.gradients import no_second_derivative
from course_lib.kernels.fused.linear_cross_entropy import (
    linear_cross_entropy_forward,
    linear_cross_entropy_forward_backward,
)

FORWARD = "(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, bool validate, int? chunk_rows) -> Tensor"
BACKWARD = (
    "(Tensor hidden, Tensor weight, Tensor targets, Tensor loss_gradient, int ignore_index, int? chunk_rows)"
    " -> (Tensor, Tensor)"
)


@torch.library.custom_op("course_lib::linear_cross_entropy", mutates_args=(), schema=FORWARD)
def linear_cross_entropy_operator(hidden, weight, targets, ignore_index, validate, chunk_rows):
    return linear_cross_entropy_forward(hidden, weight, targets, ignore_index, validate, chunk_rows)


@linear_cross_entropy_operator.register_fake
def _(hidden, weight, targets, ignore_index, validate, chunk_rows):
    return hidden.new_empty(targets.shape, dtype=torch.float32)


@torch.library.custom_op("course_lib::linear_cross_entropy_backward", mutates_args=(), schema=BACKWARD)
def linear_cross_entropy_backward_operator(hidden, weight, targets, loss_gradient, ignore_index, chunk_rows):
    """The forward pass has checked what the targets say."""
    arguments = hidden, weight, targets, loss_gradient, ignore_index, False, chunk_rows
    return linear_cross_entropy_forward_backward(*arguments)[1:]


@linear_cross_entropy_backward_operator.register_fake
def _(hidden, weight, targets, loss_gradient, ignore_index, chunk_rows):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def keep_hidden(ctx, inputs, output):
    hidden, weight, targets, ctx.ignore_index, _, ctx.chunk_rows = inputs
    ctx.save_for_backward(hidden, weight, targets)


def gradients(ctx, loss_gradient):
    found = linear_cross_entropy_backward_operator(*ctx.saved_tensors, loss_gradient, ctx.ignore_index, ctx.chunk_rows)
    return (*found, None, None, None, None)


linear_cross_entropy_operator.register_autograd(gradients, setup_context=keep_hidden)
linear_cross_entropy_backward_operator.register_autograd(no_second_derivative("linear cross-entropy"))


def linear_cross_entropy(
    hidden, weight, targets, ignore_index=IGNORE_INDEX, reduction="mean", validate=True, chunk_rows=None
):  # fmt: skip
    """Cross-entropy of hidden · weightᵀ with gradients of both, for autograd and `torch.compile`.

    Args:
        hidden, weight, targets, ignore_index, validate, chunk_rows: as for `linear_cross_entropy_forward`.
        reduction: "mean" over the targets that count, "sum", or "none".

    Returns a float32 scalar, or [...] for "none". The mean over no target is NaN, as in PyTorch, and its gradients 0.
    Raises a ValueError that names the argument; for a second derivative a RuntimeError.
    """
    check_reduction(reduction)
    losses = linear_cross_entropy_operator(hidden, weight, targets, ignore_index, validate, chunk_rows)
    return reduced(losses, targets, ignore_index, reduction)
