"""LayerNorm as an operator of PyTorch with its gradient: `torch.ops.course_lib.layer_norm`.

Why operators, and what is registered for one, is told in `course_lib.kernels.attention.operator`.
"""

import torch

from course_lib.kernels.fused.gradients import no_second_derivative
from course_lib.kernels.fused.layer_norm import layer_norm_forward
from course_lib.kernels.fused.layer_norm_backward import layer_norm_backward

FORWARD = "(Tensor x, Tensor weight, Tensor bias, float epsilon) -> (Tensor, Tensor)"
BACKWARD = "(Tensor x, Tensor statistics, Tensor weight, Tensor out_gradient) -> (Tensor, Tensor, Tensor)"


@torch.library.custom_op("course_lib::layer_norm", mutates_args=(), schema=FORWARD)
def layer_norm_operator(x, weight, bias, epsilon):
    return layer_norm_forward(x, weight, bias, epsilon)


@layer_norm_operator.register_fake
def _(x, weight, bias, epsilon):
    return x.new_empty(x.shape), x.new_empty((*x.shape[:-1], 2), dtype=torch.float32)


@torch.library.custom_op("course_lib::layer_norm_backward", mutates_args=(), schema=BACKWARD)
def layer_norm_backward_operator(x, statistics, weight, out_gradient):
    return layer_norm_backward(x, statistics, weight, out_gradient)


@layer_norm_backward_operator.register_fake
def _(x, statistics, weight, out_gradient):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def keep_x(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.bias_dtype = bias.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight)


def gradients(ctx, out_gradient, _):
    x_gradient, weight_gradient, bias_gradient = layer_norm_backward_operator(*ctx.saved_tensors, out_gradient)
    return x_gradient, weight_gradient, bias_gradient.to(ctx.bias_dtype), None


layer_norm_operator.register_autograd(gradients, setup_context=keep_x)
layer_norm_backward_operator.register_autograd(no_second_derivative("LayerNorm"))


def layer_norm(x, weight, bias, epsilon=1e-5):
    """LayerNorm over the last dimension with a gradient, for autograd and `torch.compile`.

    Shapes, dtypes and errors are those of `layer_norm_forward`, of which this is the first result. A second derivative
    raises a RuntimeError.
    """
    return layer_norm_operator(x, weight, bias, epsilon)[0]
