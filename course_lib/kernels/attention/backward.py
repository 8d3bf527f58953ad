"""FlashAttention, backward: the gradients of exact attention, again without the score matrix in memory.

The forward keeps O and, for each row, the log-sum-exp of its scores. From these, Q, K, V and dO, tile by tile:

    S = Q Kᵀ                                   recomputed
    P = exp(scale · S - LSE)                   recomputed, normalised at once: no maximum, no sum
    dV = Pᵀ dO
    dP = dO Vᵀ
    dS = P ∘ (dP - Δ),  Δ = rowsum(O ∘ dO)     the softmax's gradient
    dQ = scale · dS K
    dK = scale · dSᵀ Q

dV and dK are sums over queries, dQ is a sum over keys. So there are three kernels. `backward_rows` makes Δ;
`backward_keys` holds a block of keys and streams over queries; `backward_queries` holds a block of queries and streams
over keys.

FLOPs: five products of 2 · batch · query_heads · query_length · key_length · head_dim, half of it when causal: 2.5
times the forward's. That is what rates are given for; the deterministic form computes seven products, as two kernels
need S and dP.
At N = 8192 and D = 128 one head takes 86 GFLOP, 107 µs at 800 TFLOP/s.
Bytes: Q, K, V, O, dO, dQ, dK, dV and 12 a row once, 17 MB for that head in 16 bits; the rest comes from the L2 cache. P
and dS, kept as plain autograd keeps them, are 268 MB for that head.
Extra memory: 8 bytes a query, and 4 · head_dim more when dQ is added up by atomics.
Sources: Dao et al., FlashAttention, arXiv 2205.14135, Algorithm 4; Dao, FlashAttention-2, arXiv 2307.08691,
Algorithm 2.
"""

import math

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from course_lib.kernels.attention.backward_keys import key_gradients_kernel
from course_lib.kernels.attention.backward_keys_tma import key_gradients_tma_kernel
from course_lib.kernels.attention.backward_queries import query_gradients_kernel
from course_lib.kernels.attention.backward_queries_tma import query_gradients_tma_kernel
from course_lib.kernels.attention.backward_rows import row_numbers
from course_lib.kernels.attention.backward_tiles import BackwardTiles, backward_tiles
from course_lib.kernels.attention.flash_tma import copy_engine_takes
from course_lib.kernels.attention.tiles import LARGE_ARCHITECTURES
from course_lib.kernels.common.attention_checks import check_attention_inputs, check_backward_inputs
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.softmax import scale_in_log2


def flash_attention_backward(
    query,
    key,
    value,
    output,
    log_sum_exp,
    output_gradient,
    *,
    causal=False,
    window=None,
    scale=None,
    log_sum_exp_gradient=None,
    deterministic=True,
    tiles: BackwardTiles | None = None,
):
    """The gradients of `flash_attention`, in memory linear in the lengths.

    Args:
        query, key, value, causal, window, scale: what the forward got.
        output, log_sum_exp: what the forward returned with `return_lse=True`.
        output_gradient: dO, of the output's shape, dtype and device, any strides. One whose rows are not contiguous, as
            the gradient of a sum with its strides of 0, is copied first.
        log_sum_exp_gradient: float32 [batch, query_heads, query_length], or None when the loss doesn't depend on them.
        deterministic: True gives the same bits at every call: dQ comes from a kernel of its own. False adds dQ up by
            atomics in the kernel of dK and dV; its last digits then depend on which program came first.
        tiles: a `BackwardTiles` to use; the architecture's own when None.

    Returns (dQ, dK, dV), contiguous, of the shapes and the dtype of query, key and value. A query that sees no key has
    a dQ of zeros and adds nothing to dK and dV. A NaN or an infinity in an input may reach every gradient of its head.

    Raises a ValueError that names the argument when shapes, dtypes, devices or options don't fit.
    """
    check_attention_inputs(query, key, value, window=window, scale=scale)
    check_backward_inputs(query, output, log_sum_exp, output_gradient, log_sum_exp_gradient)
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    block_d = triton.next_power_of_2(head_dim)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    arch = architecture_of(query.device)

    output = output if output.stride(-1) == 1 else output.contiguous()
    large = arch in LARGE_ARCHITECTURES and query.element_size() == 2
    if output_gradient.stride(-1) != 1 or (large and not copy_engine_takes(output_gradient)):
        output_gradient = output_gradient.contiguous()  # one pass over it, beside its part in each of the tiles
    query_gradient, key_gradient, value_gradient = (
        torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in (query, key, value)
    )
    sums = None if deterministic else torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    matrices = query, key, value, output_gradient
    copied_by_engine = large and copy_engine_takes(*matrices, query_gradient)
    tiles = backward_tiles(arch, query.dtype, block_d, copied_by_engine) if tiles is None else tiles
    cut = tiles.keys if deterministic else tiles.keys_with_sums

    if log_sum_exp_gradient is not None:
        log_sum_exp_gradient = log_sum_exp_gradient.contiguous()
    delta, lse_log2 = row_numbers(output, output_gradient, log_sum_exp.contiguous(), log_sum_exp_gradient)
    rows = lse_log2, delta
    strides = [stride for tensor in matrices for stride in tensor.stride()[:3]]
    sizes = (query_heads, query_heads // key_heads, query_length, key_length, window, 0 if causal else window)
    numbers = (delta.shape[-1], scale, scale_in_log2(scale, head_dim))
    key_grid = (triton.cdiv(key_length, cut.key_rows) * batch * key_heads,)
    query_grid = (triton.cdiv(query_length, tiles.queries.query_rows) * batch * query_heads,)
    if copied_by_engine:
        ragged = sums is not None and key_length % cut.key_rows != 0
        key_gradients_tma_kernel[key_grid](
            *descriptors(matrices, cut, block_d), *rows,
            tiled(key_gradient, cut.key_rows, block_d), tiled(value_gradient, cut.key_rows, block_d),
            None if sums is None else tiled(sums, cut.query_rows, block_d),
            *sizes, *numbers, block_d, RAGGED_KEYS=ragged, **cut.settings(),
        )  # fmt: skip
    else:
        key_gradients_kernel[key_grid](
            *matrices, *rows, key_gradient, value_gradient, sums, *strides, *sizes, *numbers, head_dim, block_d,
            **cut.settings(),
        )  # fmt: skip
    if sums is not None:
        query_gradient.copy_(sums)
    elif copied_by_engine:
        query_gradients_tma_kernel[query_grid](
            *descriptors(matrices, tiles.queries, block_d), *rows,
            tiled(query_gradient, tiles.queries.query_rows, block_d), *sizes, *numbers, block_d,
            **tiles.queries.settings(),
        )  # fmt: skip
    else:
        query_gradients_kernel[query_grid](
            *matrices, *rows, query_gradient, *strides, *sizes, *numbers, head_dim, block_d, **tiles.queries.settings()
        )
    return query_gradient, key_gradient, value_gradient


def tiled(tensor: torch.Tensor, tile_rows: int, block_d: int) -> TensorDescriptor:
    """What the copy engine needs to know of a [batch, heads, length, head_dim] tensor that it moves in tiles."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, tile_rows, block_d])


def descriptors(matrices, cut, block_d: int) -> list[TensorDescriptor]:
    """Descriptors of query, key, value and output gradient."""
    rows = cut.query_rows, cut.key_rows, cut.key_rows, cut.query_rows
    return [tiled(tensor, tile_rows, block_d) for tensor, tile_rows in zip(matrices, rows)]
