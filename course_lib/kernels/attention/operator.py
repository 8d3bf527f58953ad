"""The course's attention, and the operator of PyTorch behind it: `torch.ops.course_lib.attention`, with its gradient.

    attention(query, key, value, causal=True)      # computes, by the fastest kernel here, and can be differentiated

A plain Python function that launches kernels is opaque to PyTorch in two ways. Autograd sees no derivative, and
`torch.compile` would have to look inside. An operator has a name, a signature, and three things registered for it:

    the function itself                which `torch.compile` calls and never traces
    a fake of it                       the results' shapes, dtypes and strides, from those of the arguments
    its gradient                       what to keep from the forward, and which operator computes the backward

Both operators ask `dispatch` for the kernel each time they run. It is a `custom_op` and no `triton_op`: the
latter shows the kernels themselves to `torch.compile`, which gains nothing from them and could not follow the choice.
"""

import torch

from course_lib.kernels.attention.autograd import NO_SECOND_DERIVATIVE
from course_lib.kernels.attention.backward_rows import sink_gradient
from course_lib.kernels.attention.dispatch import backward, forward
from course_lib.kernels.common.attention_checks import check_attention_inputs

FORWARD = (
    "(Tensor query, Tensor key, Tensor value, bool causal, int? window, float? scale, Tensor? sink=None) "
    "-> (Tensor, Tensor)"
)
BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum_exp, Tensor output_gradient, "
    "Tensor? log_sum_exp_gradient, bool causal, int? window, float? scale, Tensor? sink=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def attention(query, key, value, *, causal=False, window=None, scale=None, sink=None, return_lse=False):
    """Exact softmax attention. Arguments, results and errors are those of `flash_attention`, but for `tiles`.

    query: [batch, query_heads, query_length, head_dim]; key, value: [batch, key_heads, key_length, head_dim].
    Returns the output, of query's shape and dtype, or (output, log-sum-exp [batch, query_heads, query_length]).

    Output and log-sum-exp can be differentiated once by query, key, value and sink; a second derivative raises a
    RuntimeError. `torch.compile(fullgraph=True)` takes it as one operator of its graph.
    """
    inputs = query, key, value
    if not torch.compiler.is_compiling():
        differentiable = any(getattr(tensor, "requires_grad", False) for tensor in (*inputs, sink))
        if not (differentiable and torch.is_grad_enabled()):
            return forward(*inputs, causal=causal, window=window, scale=scale, sink=sink, return_lse=return_lse)
        check_attention_inputs(*inputs, window=window, scale=scale, sink=sink)
    output, log_sum_exp = attention_operator(*inputs, causal, window, scale, sink)
    return (output, log_sum_exp) if return_lse else output


@torch.library.custom_op("course_lib::attention", mutates_args=(), schema=FORWARD)
def attention_operator(query, key, value, causal, window, scale, sink=None):
    """(output, log-sum-exp) by the kernel that `choose` names; arguments as for `attention`."""
    return forward(query, key, value, causal=causal, window=window, scale=scale, sink=sink, return_lse=True)


@attention_operator.register_fake
def _(query, key, value, causal, window, scale, sink=None):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("course_lib::attention_backward", mutates_args=(), schema=BACKWARD)
def attention_backward_operator(
    query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient, causal, window, scale, sink=None
):
    """(dQ, dK, dV) by the kernels that `choose_backward` names, and the gradient of the sink, empty without one.

    Arguments as for `flash_attention_backward`; output and log_sum_exp are those of the forward with the sink.
    """
    found = backward(
        query, key, value, output, log_sum_exp, output_gradient,
        causal=causal, window=window, scale=scale, log_sum_exp_gradient=log_sum_exp_gradient,
    )  # fmt: skip
    if sink is None:
        return *found, query.new_empty(0)
    return *found, sink_gradient(sink, output, log_sum_exp, output_gradient, log_sum_exp_gradient)


@attention_backward_operator.register_fake
def _(query, key, value, *rest):
    sink = rest[7] if len(rest) == 8 else None
    of_sink = query.new_empty(0) if sink is None else torch.empty_like(sink)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), of_sink


def keep_for_backward(ctx, inputs, output):
    query, key, value, ctx.causal, ctx.window, ctx.scale, sink = inputs
    ctx.save_for_backward(query, key, value, *output, sink)
    ctx.set_materialize_grads(False)  # a loss that leaves out the log-sum-exps has no gradient for them, not zeros


def gradients(ctx, output_gradient, log_sum_exp_gradient):
    query, key, value, output, log_sum_exp, sink = ctx.saved_tensors
    if output_gradient is None:  # the loss depends on the log-sum-exps alone
        output_gradient = torch.zeros_like(output)
    *found, of_sink = attention_backward_operator(
        query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient,
        ctx.causal, ctx.window, ctx.scale, sink,
    )  # fmt: skip
    return (*found, None, None, None, None if sink is None else of_sink)


def refuse_second_derivative(ctx, *_):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


attention_operator.register_autograd(gradients, setup_context=keep_for_backward)
attention_backward_operator.register_autograd(refuse_second_derivative)
