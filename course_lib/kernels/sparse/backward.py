"""Attention over block lists, backward: three kernels, no atomics.

`attention.backward` has the formulas and the numbers of each row. dK and dV are sums over queries and go by the
transposed lists; dQ is a sum over keys and goes by the lists of the forward.

FLOPs: 14 · head_dim · query_rows · key_rows for each tile on a list, 3.5 times the forward's; rates are given for five
products, 2.5 times.
Extra memory: 8 bytes a query.
"""

import math

import torch
import triton

from course_lib.kernels.attention.backward_rows import row_numbers
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.sparse.backward_keys import listed_key_gradients_kernel
from course_lib.kernels.sparse.backward_queries import listed_query_gradients_kernel
from course_lib.kernels.sparse.backward_tiles import listed_tiles
from course_lib.kernels.sparse.block_lists import BlockLists
from course_lib.kernels.sparse.forward import list_strides, within_block


def backward(query, key, value, output, log_sum_exp, output_gradient, lists: BlockLists,
             *, scale=None, log_sum_exp_gradient=None):  # fmt: skip
    """(dQ, dK, dV) of `block_sparse_attention`, contiguous, of the shapes and the dtype of query, key and value.

    output, log_sum_exp: what the forward returned. output_gradient: dO, any strides. log_sum_exp_gradient: float32
    [batch, query_heads, query_length], or None. The same bits at every call. A NaN or an infinity in an input may reach
    every gradient of its head.
    """
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    block_d = triton.next_power_of_2(head_dim)
    if output_gradient.stride(-1) != 1:  # the gradient of a sum has strides of 0
        output_gradient = output_gradient.contiguous()
    if log_sum_exp_gradient is not None:
        log_sum_exp_gradient = log_sum_exp_gradient.contiguous()
    gradients = query_gradient, key_gradient, value_gradient = [
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
    ]
    delta, lse_log2 = row_numbers(output, output_gradient, log_sum_exp, log_sum_exp_gradient)
    tiles = listed_tiles(architecture_of(query.device), query.dtype, block_d)
    inputs = query, key, value, output_gradient
    strides = [stride for tensor in inputs for stride in tensor.stride()[:3]]
    sizes = query_heads, query_heads // key_heads, query_length, key_length
    scales = 1 / math.sqrt(head_dim) if scale is None else scale, scale_in_log2(scale, head_dim)
    blocks = {"QUERY_ROWS": lists.query_rows, "KEY_ROWS": lists.key_rows}

    cut = within_block(tiles.keys, lists)
    listed_key_gradients_kernel[(triton.cdiv(key_length, cut.key_rows) * batch * key_heads,)](
        *inputs, lse_log2, delta, key_gradient, value_gradient,
        *lists.full_of_keys[:2], *lists.partial_of_keys, lists.masks, *strides, *sizes,
        *list_strides(lists.full_of_keys.counts), delta.shape[-1], *scales, head_dim, block_d, **blocks,
        **cut.settings(),
    )  # fmt: skip
    cut = within_block(tiles.queries, lists)
    listed_query_gradients_kernel[(triton.cdiv(query_length, cut.query_rows) * batch * query_heads,)](
        *inputs, lse_log2, delta, query_gradient,
        *lists.full[:2], *lists.partial, lists.masks, *strides, *sizes,
        *list_strides(lists.full.counts), delta.shape[-1], *scales, head_dim, block_d, **blocks,
        **cut.settings(),
    )  # fmt: skip
    return tuple(gradients)
