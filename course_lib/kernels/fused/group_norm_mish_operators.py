"""GroupNorm + Mish with scale and shift as an operator of PyTorch, with its gradient.

Why operators, and what is registered for one, is told in `course_lib.kernels.attention.operator`.
"""

import torch

from course_lib.kernels.fused.gradients import no_second_derivative
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward
from course_lib.kernels.fused.group_norm_mish_backward import group_norm_mish_backward

FORWARD = (
    "(Tensor x, int groups, Tensor weight, Tensor bias, Tensor? scale, Tensor? shift, float epsilon)"
    " -> (Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor x, Tensor statistics, int groups, Tensor weight, Tensor bias, Tensor? scale, Tensor? shift,"
    " Tensor out_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("course_lib::group_norm_mish", mutates_args=(), schema=FORWARD)
def group_norm_mish_operator(x, groups, weight, bias, scale, shift, epsilon):
    return group_norm_mish_forward(x, groups, weight, bias, scale, shift, epsilon)


@group_norm_mish_operator.register_fake
def _(x, groups, weight, bias, scale, shift, epsilon):
    return x.new_empty(x.shape), x.new_empty((x.shape[0], groups, 2), dtype=torch.float32)


@torch.library.custom_op("course_lib::group_norm_mish_backward", mutates_args=(), schema=BACKWARD)
def group_norm_mish_backward_operator(x, statistics, groups, weight, bias, scale, shift, out_gradient):
    """An operator's results are tensors: where there is no scale, the last two are empty."""
    found = group_norm_mish_backward(x, statistics, groups, weight, bias, scale, shift, out_gradient)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


@group_norm_mish_backward_operator.register_fake
def _(x, statistics, groups, weight, bias, scale, shift, out_gradient):
    film = [x.new_empty(0 if scale is None else scale.shape) for _ in range(2)]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), bias.new_empty(bias.shape), *film


def keep_x(ctx, inputs, output):
    x, ctx.groups, weight, bias, scale, shift, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight, bias, scale, shift)


def gradients(ctx, out_gradient, _):
    x, statistics, weight, bias, scale, shift = ctx.saved_tensors
    x_gradient, weight_gradient, bias_gradient, *film = group_norm_mish_backward_operator(
        x, statistics, ctx.groups, weight, bias, scale, shift, out_gradient
    )
    return x_gradient, None, weight_gradient, bias_gradient, *([None, None] if scale is None else film), None


group_norm_mish_operator.register_autograd(gradients, setup_context=keep_x)
group_norm_mish_backward_operator.register_autograd(no_second_derivative("GroupNorm + Mish"))


def group_norm_mish(x, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """scale · mish(GroupNorm(x)) + shift: `group_norm_mish_forward` with a gradient, for autograd and `torch.compile`.

    Shapes, dtypes and errors are those of `group_norm_mish_forward`, of which this is the first result. A second
    derivative raises a RuntimeError.
    """
    return group_norm_mish_operator(x, groups, weight, bias, scale, shift, epsilon)[0]
