"""Attention over block lists, and the operator of PyTorch behind it: `torch.ops.course_lib.block_sparse_attention`.

    lists = block_lists(lambda batch, head, query, key: key <= query, 4096, 4096)
    output = block_sparse_attention(query, key, value, lists)

Lists are built once and serve every layer and step of their lengths: see `block_lists` for what they are and take. An
operator takes tensors and numbers and no dataclass, so the lists cross it as their tensors and their block size.
"""

import torch

from course_lib.kernels.attention.autograd import NO_SECOND_DERIVATIVE
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.sparse.backward import backward
from course_lib.kernels.sparse.block_lists import BlockLists, check_lists, lists_from_tensors
from course_lib.kernels.sparse.forward import forward

LISTS = "Tensor[] lists, int query_rows, int key_rows, float? scale"
FORWARD = f"(Tensor query, Tensor key, Tensor value, {LISTS}) -> (Tensor, Tensor)"
BACKWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor output, Tensor log_sum_exp, Tensor output_gradient, "
    f"Tensor? log_sum_exp_gradient, {LISTS}) -> (Tensor, Tensor, Tensor)"
)


def block_sparse_attention(query, key, value, lists: BlockLists, *, scale=None, return_lse=False):
    """Exact softmax attention of each query to the keys that the lists show it, at the cost of the tiles on them.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256.
            Any strides, with a contiguous last dimension.
        key, value: [batch, key_heads, key_length, head_dim], of query's dtype and device. query_heads is a multiple of
            key_heads; query head h reads key head h // (query_heads // key_heads).
        lists: what `block_lists` or `given_block_lists` made for these lengths, on this device.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        return_lse: also return the log-sum-exp of each row of scaled scores, natural logarithm, float32
            [batch, query_heads, query_length].

    Returns the output, contiguous, of query's shape and dtype, or (output, log-sum-exp). A query that sees no key gets
    zeros and minus infinity. A tile on no list is not read, so a NaN in it reaches nothing; one in a value that the
    mask of a partial tile hides can reach the queries of that tile.

    Output and log-sum-exp can be differentiated once by query, key and value; a second derivative raises a
    RuntimeError. Gradients are the same bits at every call. `torch.compile(fullgraph=True)` takes it as one operator of
    its graph.

    Raises a ValueError that names the argument when shapes, dtypes, devices or lists don't fit.
    """
    if not torch.compiler.is_compiling():
        check_attention_inputs(query, key, value, scale=scale)
        check_lists(lists, query, key)
    output, log_sum_exp = block_sparse_operator(
        query, key, value, lists.tensors(), lists.query_rows, lists.key_rows, scale
    )
    return (output, log_sum_exp) if return_lse else output


def lists_for(query, key, tensors, query_rows, key_rows) -> BlockLists:
    return lists_from_tensors(tensors, query.shape[2], key.shape[2], query_rows, key_rows)


@torch.library.custom_op("course_lib::block_sparse_attention", mutates_args=(), schema=FORWARD)
def block_sparse_operator(query, key, value, lists, query_rows, key_rows, scale):
    """(output, log-sum-exp); arguments as for `block_sparse_attention`."""
    return forward(query, key, value, lists_for(query, key, lists, query_rows, key_rows), scale=scale)


@block_sparse_operator.register_fake
def _(query, key, value, lists, query_rows, key_rows, scale):
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


@torch.library.custom_op("course_lib::block_sparse_attention_backward", mutates_args=(), schema=BACKWARD)
def block_sparse_backward_operator(
    query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient, lists, query_rows, key_rows, scale
):
    """(dQ, dK, dV); arguments as for `backward`."""
    return backward(
        query, key, value, output, log_sum_exp, output_gradient,
        lists_for(query, key, lists, query_rows, key_rows), scale=scale, log_sum_exp_gradient=log_sum_exp_gradient,
    )  # fmt: skip


@block_sparse_backward_operator.register_fake
def _(query, key, value, *rest):
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def keep_for_backward(ctx, inputs, output):
    query, key, value, lists, ctx.query_rows, ctx.key_rows, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, *lists)
    ctx.set_materialize_grads(False)  # a loss that leaves out the log-sum-exps has no gradient for them, not zeros


def gradients(ctx, output_gradient, log_sum_exp_gradient):
    query, key, value, output, log_sum_exp, *lists = ctx.saved_tensors
    if output_gradient is None:  # the loss depends on the log-sum-exps alone
        output_gradient = torch.zeros_like(output)
    found = block_sparse_backward_operator(
        query, key, value, output, log_sum_exp, output_gradient, log_sum_exp_gradient,
        lists, ctx.query_rows, ctx.key_rows, ctx.scale,
    )  # fmt: skip
    return (*found, [None] * len(lists), None, None, None)


def refuse_second_derivative(ctx, *_):
    raise RuntimeError(NO_SECOND_DERIVATIVE)


block_sparse_operator.register_autograd(gradients, setup_context=keep_for_backward)
block_sparse_backward_operator.register_autograd(refuse_second_derivative)
