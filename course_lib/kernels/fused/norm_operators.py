"""RMSNorm as operators of PyTorch, with their gradient: `torch.ops.course_lib.add_rms_norm` and `rms_norm`.

Why operators, and what is registered for one, is told in `course_lib.kernels.attention.operator`.
"""

import torch

from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward
from course_lib.kernels.fused.gradients import no_second_derivative
from course_lib.kernels.fused.rms_norm_backward import rms_norm_backward

BACKWARD = (
    "(Tensor summed, Tensor weight, Tensor normalised_gradient, Tensor? summed_gradient, float epsilon)"
    " -> (Tensor, Tensor)"
)


@torch.library.custom_op(
    "course_lib::add_rms_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
)
def add_rms_norm_operator(x, residual, weight, epsilon):
    return add_rms_norm_forward(x, residual, weight, epsilon)


@add_rms_norm_operator.register_fake
def _(x, residual, weight, epsilon):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op(
    "course_lib::rms_norm", mutates_args=(), schema="(Tensor x, Tensor weight, float epsilon) -> Tensor"
)
def rms_norm_operator(x, weight, epsilon):
    return add_rms_norm_forward(x, None, weight, epsilon)[0]


@rms_norm_operator.register_fake
def _(x, weight, epsilon):
    return x.new_empty(x.shape)


@torch.library.custom_op("course_lib::rms_norm_backward", mutates_args=(), schema=BACKWARD)
def rms_norm_backward_operator(summed, weight, normalised_gradient, summed_gradient, epsilon):
    return rms_norm_backward(summed, weight, normalised_gradient, summed_gradient, epsilon)


@rms_norm_backward_operator.register_fake
def _(summed, weight, normalised_gradient, summed_gradient, epsilon):
    return summed.new_empty(summed.shape), weight.new_empty(weight.shape)


def keep_sum(ctx, inputs, output):
    _, _, weight, ctx.epsilon = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)  # a loss that leaves out one of the results has no gradient for it, not zeros


def gradients_of_addition(ctx, normalised_gradient, summed_gradient):
    summed, weight = ctx.saved_tensors
    if normalised_gradient is None:  # the loss depends on the sum alone
        return summed_gradient, summed_gradient, None, None
    both, weight_gradient = rms_norm_backward_operator(
        summed, weight, normalised_gradient, summed_gradient, ctx.epsilon
    )
    return both, both, weight_gradient, None


def keep_x(ctx, inputs, output):
    x, weight, ctx.epsilon = inputs
    ctx.save_for_backward(x, weight)


def gradients_of_norm(ctx, normalised_gradient):
    return (*rms_norm_backward_operator(*ctx.saved_tensors, normalised_gradient, None, ctx.epsilon), None)


add_rms_norm_operator.register_autograd(gradients_of_addition, setup_context=keep_sum)
rms_norm_operator.register_autograd(gradients_of_norm, setup_context=keep_x)
rms_norm_backward_operator.register_autograd(no_second_derivative("RMSNorm"))


def add_rms_norm(x, residual, weight, epsilon=1e-6):
    """(normalised, summed): `add_rms_norm_forward` with a gradient, for autograd and `torch.compile`.

    Shapes, dtypes and errors are those of `add_rms_norm_forward`; residual must be a tensor. A second derivative raises
    a RuntimeError.
    """
    return add_rms_norm_operator(x, residual, weight, epsilon)


def rms_norm(x, weight, epsilon=1e-6):
    """RMSNorm of x [..., hidden] alone, with a gradient; else as `add_rms_norm`."""
    return rms_norm_operator(x, weight, epsilon)
