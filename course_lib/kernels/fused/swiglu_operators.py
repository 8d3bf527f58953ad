"""SwiGLU's product as an operator of PyTorch with its gradient: `torch.ops.course_lib.swiglu`.

Why an operator, and what is registered for one, is told in `course_lib.kernels.attention.operator`.
"""

import torch

from course_lib.kernels.fused.gradients import no_second_derivative
from course_lib.kernels.fused.swiglu import swiglu_backward, swiglu_forward

BACKWARD = "(Tensor gate, Tensor up, Tensor out_gradient) -> (Tensor, Tensor)"


@torch.library.custom_op("course_lib::swiglu", mutates_args=(), schema="(Tensor gate, Tensor up) -> Tensor")
def swiglu_operator(gate, up):
    return swiglu_forward(gate, up)


@swiglu_operator.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)


@torch.library.custom_op("course_lib::swiglu_backward", mutates_args=(), schema=BACKWARD)
def swiglu_backward_operator(gate, up, out_gradient):
    return swiglu_backward(gate, up, out_gradient)


@swiglu_backward_operator.register_fake
def _(gate, up, out_gradient):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def keep_both(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def gradients(ctx, out_gradient):
    return swiglu_backward_operator(*ctx.saved_tensors, out_gradient)


swiglu_operator.register_autograd(gradients, setup_context=keep_both)
swiglu_backward_operator.register_autograd(no_second_derivative("SwiGLU"))


def swiglu(gate, up):
    """silu(gate) · up: `swiglu_forward` with a gradient, for autograd and `torch.compile`.

    Shapes, dtypes and errors are those of `swiglu_forward`. A second derivative raises a RuntimeError.
    """
    return swiglu_operator(gate, up)
