"""The course's attention as an operator of PyTorch: `torch.ops.course_lib.attention`, with its gradient.

A plain Python function that launches kernels is opaque to PyTorch in two ways. Autograd sees no derivative, and
`torch.compile` would have to look inside. An operator has a name, a signature, and three things registered for it:

    the function itself                which `torch.compile` calls and never traces
    a fake of it                       the results' shapes, dtypes and strides, from those of the arguments
    its gradient                       what to keep from the forward, and which operator computes the backward

Both operators take the dispatcher's choice of kernel each time they run. It is a `custom_op` and no `triton_op`: the
latter shows the kernels themselves to `torch.compile`, which gains nothing from them and could not follow the choice.
"""

import torch

from course_lib.kernels.attention.autograd import NO_SECOND_DERIVATIVE

FORWARD = "(Tensor query, Tensor key, Tensor value, bool causal, int? window, float? scale) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum_exp, Tensor output_gradient, "
    "Tensor? log_sum_exp_gradient, bool causal, int? window, float? scale) -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("course_lib::attention", mutates_args=(), schema=FORWARD)
def attention_operator(query, key, value, causal, window, scale):
    """(output, log-sum-exp) by the kernel that the dispatcher chooses; arguments as for `dispatch.attention`."""
    from course_lib.kernels.attention.dispatch import forward

    return forward(query, key, value, causal=causal, window=window, scale=scale, return_lse=True)


@attention_operator.register_fake
def _(query, key, value, causal, window, scale):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("course_lib::attention_backward", mutates_args=(), schema=BACKWARD)
def attention_backward_operator(
    query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient, causal, window, scale
):
    """(dQ, dK, dV) by the kernel that the dispatcher chooses; arguments as for `flash_attention_backward`."""
    from course_lib.kernels.attention.dispatch import backward

    return backward(
        query, key, value, output, log_sum_exp, output_gradient,
        causal=causal, window=window, scale=scale, log_sum_exp_gradient=log_sum_exp_gradient,
    )  # fmt: skip


@attention_backward_operator.register_fake
def _(query, key, value, *rest):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep_for_backward(ctx, inputs, output):
    query, key, value, ctx.causal, ctx.window, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
    ctx.set_materialize_grads(False)  # a loss that leaves out the log-sum-exps has no gradient for them, not zeros


def gradients(ctx, output_gradient, log_sum_exp_gradient):
    query, key, value, output, log_sum_exp = ctx.saved_tensors
    if output_gradient is None:  # the loss depends on the log-sum-exps alone
        output_gradient = torch.zeros_like(output)
    found = attention_backward_operator(
        query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient, ctx.causal, ctx.window, ctx.scale
    )
    return (*found, None, None, None)


def refuse_second_derivative(ctx, *_):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


attention_operator.register_autograd(gradients, setup_context=keep_for_backward)
attention_backward_operator.register_autograd(refuse_second_derivative)
