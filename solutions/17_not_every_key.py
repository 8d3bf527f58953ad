# %% [markdown]
# # 17 · Not every key: windows, sinks and chosen keys

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

# %% [markdown]
# **A kernel with a bounded loop.** A program computes 64 queries of one head, and its loop goes over tiles of 64 keys,
# as in chapter 04. The first query of the program stands at position $p_0$, the last at $p_1$. The window of the first
# query begins at key $p_0 - w + 1$, so the loop begins at the tile which holds that key, and it ends behind key $p_1$.
# The number of steps then depends on the window alone, however long the text is. Inside the loop a mask still decides
# pair by pair, because the windows of the 64 queries begin at 64 different keys.
#
# One thing is new. In plain causal attention every row sees key 0, so its maximum is finite after the first tile. Here
# the last rows may see nothing of the first tile. Their maximum is still $-\infty$ then.


# %%
# Exercise 17.3 · A kernel with a bounded loop
@triton.jit
def window_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride, output_stride,
    query_length, key_length, window, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one sequence."""
    # BEGIN SOLUTION
    first_query, head, sequence = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None]
    query_offsets = sequence * query_batch_stride + head * query_head_stride + rows[:, None] * query_stride
    query = tl.load(query_pointer + query_offsets + columns[None, :], mask=inside, other=0.0)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.maximum(first_query + key_length - query_length - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None]
        key_offsets = sequence * key_batch_stride + key_head * key_head_stride + keys[:, None] * key_stride
        key_tile = tl.load(key_pointer + key_offsets + columns[None, :], mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        visible = visible & (keys < key_length)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row may have seen no key yet
        weights = tl.exp2(scores - reference[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = sequence * value_batch_stride + key_head * value_head_stride + keys[:, None] * value_stride
        value_tile = tl.load(value_pointer + value_offsets + columns[None, :], mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    output = (accumulator / running_sum[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = sequence * output_batch_stride + head * output_head_stride + rows[:, None] * output_stride
    tl.store(output_pointer + output_offsets + columns[None, :], output, mask=inside)
    # END SOLUTION


def window_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention in which each query sees `window` keys, its own included, by one launch of a Triton kernel.

    query: [batch, query_heads, query_length, head_dim], float32 or float16; query_length from 1, head_dim 16, 32, 64 or
        128, any strides but the last, which is 1. Numbers of any size.
    key, value: [batch, key_heads, key_length, head_dim], in query's dtype; any strides but the last, which is 1, each
        its own. query_length is at most key_length, and query_heads a multiple of key_heads: query head h reads head h
        // (query_heads // key_heads).
    window: from 1; it may be larger than key_length. Query i stands at position p = i + key_length - query_length and
        sees the keys p - window + 1 to p that exist.
    Tiles of 64 keys, counted from key 0, that no query sees at all may hold anything, NaN too. All elements of
    a tensor lie within 2³¹ of its first.

    Returns: like query. PyTorch neither copies nor computes anything, and makes no tensor larger than query or key. The
    kernel moves at most 1.1 times the bytes of programs of 64 queries of a head that load only the tiles of 64 keys
    which one of their queries sees. The number of its steps does not grow with key_length.
    """
    # BEGIN SOLUTION
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grid = (triton.cdiv(query_length, 64), query_heads, batch)
    window_kernel[grid](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        query_length, key_length, window, math.log2(math.e) / math.sqrt(head_dim),
        GROUP=query_heads // key_heads, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=64,
    )
    return output
    # END SOLUTION


# %%
best_window_attention = check("17.3", window_attention).best

# %% [markdown]
# **A sink, over splits, and its gradient.** A learned sink is one logit $s$ for each head. It joins the denominator of
# the softmax and has no value, so a row may give a part of its weight to nothing. With the keys' scores $x_j$ the lse
# and the output of a row are
#
# $$L = \log\Big(e^{s} + \sum_j e^{x_j}\Big), \qquad O = \sum_j e^{x_j - L}\, v_j.$$
#
# If the keys are split, each split hands over its own log-sum-exp and its average, without the sink. The merge adds
# the sink, once. The sink takes the share $p = e^{s - L}$ of a row. Its gradient follows from that: if $s$ grows by a
# little $\epsilon$, then $O$ loses $\epsilon\, p\, O$. So $\partial\,\text{loss} / \partial s = -\sum p \cdot
# \text{rowsum}(O \circ dO)$, summed over the rows.


# %%
# Exercise 17.4 · A sink, over splits, and its gradient
def merge(outputs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the keys of all splits and one sink for each head.

    outputs: float32 [splits, rows, heads, head_dim], splits from 1 on: each split's average of its values by its own
        softmax. Where a split saw no key, no one has written its output: it may hold anything, NaN too.
    lses: float32 [splits, rows, heads], natural logarithms of any size to ±20,000: a split's log-sum-exp without the
        sink, -inf where it saw no key.
    sinks: float32 [heads], natural units, of any size to ±10⁴, or -inf: that head has no sink.
    Returns: output [rows, heads, head_dim] and lse [rows, heads], float32. lse includes the sink. Where no split saw a
    key, the output is 0, and lse is the sink: -inf where there is none. No argument is changed. All tensors are
    contiguous.
    """
    # BEGIN SOLUTION
    outputs = torch.where((lses == -math.inf)[..., None], 0.0, outputs)
    largest = torch.maximum(lses.amax(dim=0), sinks)
    reference = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(lses - reference)
    total = weights.sum(dim=0) + torch.exp(sinks - reference)
    divisor = torch.where(total == 0, 1.0, total)
    output = (weights[..., None] * outputs).sum(dim=0) / divisor[..., None]
    return output, largest + torch.log(divisor)
    # END SOLUTION


def sink_gradient(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, output_gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of the loss by each head's sink.

    output, output_gradient: O and dO [rows, heads, head_dim], float32, float16 or bfloat16, and both the same.
    lse: float32 [rows, heads], as `merge` returns it: the sink is included. In a row that saw no key, O is 0 and lse
        is the sink.
    sinks: float32 [heads], as above. A head without a sink gets 0.
    Returns: [heads], float32, computed in float32. No argument is changed. All tensors are contiguous.
    """
    # BEGIN SOLUTION
    share = torch.where(sinks == -math.inf, 0.0, torch.exp(sinks - lse))
    return -(share * (output.float() * output_gradient.float()).sum(dim=-1)).sum(dim=0)
    # END SOLUTION


# %%
best_merge, best_sink_gradient = check("17.4", merge, sink_gradient).best
