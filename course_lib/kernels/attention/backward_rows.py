"""The numbers of each row that the backward pass needs beside the tiles: Δ, and the log-sum-exp to base 2.

    Δ = rowsum(O ∘ dO) - dLSE           dLSE is 0 unless the loss depends on the log-sum-exps themselves

FLOPs: 2 · head_dim a row. Bytes: O and dO once, and 12 for each row. At N = 8192, D = 128 and 16 bits, one head:
4.3 MB, 1 µs at 4.8 TB/s, before 107 µs of matrix products at 800 TFLOP/s. It replaces rowsum(P ∘ dP), for which each
row would have to be met once more before its first dS.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_parts import LONGEST_QUERY_TILE
from course_lib.kernels.attention.parts import SIZES, load_rows
from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.common.signatures import signature_of

BLOCK_ROWS = 64


@triton.jit(do_not_specialize=SIZES)
def row_numbers_kernel(
    output_pointer, gradient_pointer, lse_pointer, lse_gradient_pointer, delta_pointer, lse_log2_pointer,
    output_batch_stride, output_head_stride, output_stride,
    gradient_batch_stride, gradient_head_stride, gradient_stride,
    query_heads, query_length, padded_length, log2_e,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head, padding included."""
    query_blocks = padded_length // BLOCK_M
    batch_and_head = (tl.program_id(0) // query_blocks).to(tl.int64)
    first_query = tl.program_id(0) % query_blocks * BLOCK_M
    batch = batch_and_head // query_heads
    head = batch_and_head % query_heads
    outputs = output_pointer + batch * output_batch_stride + head * output_head_stride, output_stride
    gradients = gradient_pointer + batch * gradient_batch_stride + head * gradient_head_stride, gradient_stride
    output = load_rows(outputs, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    gradient = load_rows(gradients, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    delta = tl.sum(output.to(tl.float32) * gradient.to(tl.float32), axis=1)  # [BLOCK_M], 0 beyond the last row

    rows = first_query + tl.arange(0, BLOCK_M)
    inside = rows < query_length
    row = batch_and_head * query_length + rows
    if lse_gradient_pointer is not None:
        delta -= tl.load(lse_gradient_pointer + row, mask=inside, other=0.0)
    padded_row = batch_and_head * padded_length + rows
    tl.store(delta_pointer + padded_row, delta)
    if lse_log2_pointer is not None:
        log_sum_exp = tl.load(lse_pointer + row, mask=inside, other=float("-inf"))
        # A row that sees no key has -inf, and exp(-inf + inf) is NaN. With +inf its P is 0, as beyond the last row.
        log_sum_exp = tl.where(log_sum_exp == float("-inf"), float("inf"), log_sum_exp * log2_e)
        tl.store(lse_log2_pointer + padded_row, log_sum_exp)


def row_numbers(output, output_gradient, log_sum_exp=None, log_sum_exp_gradient=None):
    """(Δ, log-sum-exp to base 2), float32 [batch, query_heads, padded length]; the second None without a log-sum-exp.

    The length is padded to a multiple of LONGEST_QUERY_TILE. Arguments are those of `flash_attention_backward`, which
    has checked them.
    """
    batch, query_heads, query_length, head_dim = output.shape
    padded_length = triton.cdiv(query_length, LONGEST_QUERY_TILE) * LONGEST_QUERY_TILE
    delta = torch.empty(batch, query_heads, padded_length, dtype=torch.float32, device=output.device)
    lse_log2 = None if log_sum_exp is None else torch.empty_like(delta)
    grid = (padded_length // BLOCK_ROWS * batch * query_heads,)
    row_numbers_kernel[grid](
        output, output_gradient, log_sum_exp, log_sum_exp_gradient, delta, lse_log2,
        *output.stride()[:3], *output_gradient.stride()[:3], query_heads, query_length, padded_length, LOG2_E.value,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_M=BLOCK_ROWS,
    )  # fmt: skip
    return delta, lse_log2


def delta_of_rows(output, output_gradient):
    """Δ = rowsum(O ∘ dO), float32 [batch, query_heads, query_length].

    output, output_gradient: [batch, query_heads, query_length, head_dim], with a contiguous last dimension.
    """
    return row_numbers(output, output_gradient)[0][..., : output.shape[2]]


def sink_gradient(sink, output, log_sum_exp, output_gradient, log_sum_exp_gradient=None):
    """The gradient of the sinks, of their shape and dtype, [query_heads].

    A sink is one more score of every row, whose value is 0 and whose dP is 0 therefore:

        dS = P ∘ (dP - Δ) = -exp(sink - LSE) · Δ        summed over the sequences and queries of the head

    Arguments are those of `flash_attention_backward`, which needs no more of the sink than the log-sum-exp has of it.
    Bytes: O and dO once more, 1 µs at the sizes above.
    """
    output = output if output.stride(-1) == 1 else output.contiguous()
    output_gradient = output_gradient if output_gradient.stride(-1) == 1 else output_gradient.contiguous()
    if log_sum_exp_gradient is not None:
        log_sum_exp_gradient = log_sum_exp_gradient.contiguous()
    delta, _ = row_numbers(output, output_gradient, log_sum_exp_gradient=log_sum_exp_gradient)
    share = torch.exp(sink.float()[:, None] - log_sum_exp)  # [batch, query_heads, query_length]
    share = share.masked_fill(log_sum_exp == float("-inf"), 0)  # no key, and a sink of -inf
    return -(share * delta[..., : output.shape[2]]).sum(dim=(0, 2)).to(sink.dtype)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: with a log-sum-exp and its gradient, which has all the code."""
    return [compile_case(arch, kind) for arch, kind in ((75, "fp16"), (80, "bf16"), (80, "fp32"), (90, "bf16"))]


def compile_case(arch: int, kind: str) -> CompileCase:
    logarithms = {"log2_e": "fp32", "lse_gradient_pointer": "*fp32", "lse_log2_pointer": "*fp32"}
    types = signature_of(row_numbers_kernel, kind, **logarithms)
    return CompileCase(row_numbers_kernel, types, {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": BLOCK_ROWS},
                       archs=(arch,), label=f"{kind} 128")  # fmt: skip
