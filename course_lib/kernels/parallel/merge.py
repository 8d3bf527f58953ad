"""Merge one more part of the keys into attention over those before: two outputs and two log-sum-exps become one.

    lse = log(exp(lse_1) + exp(lse_2))        output = exp(lse_1 - lse) · output_1 + exp(lse_2 - lse) · output_2

It computes in float32, whatever its inputs and its result are stored in. `combine_splits` merges float32 parts that all
lie in one tensor. Here the parts come one after another, each when its keys have arrived, and the first and the last
step of a ring read and write 16 bits where those between keep 32.

Bytes: each row of both outputs read and of one written, and 12 for the log-sum-exps. For 65,536 rows of 32 heads of 128
these are 1.6 GB when all three are of 16 bits: 0.4 ms at 4 TB/s. With the sums in float32 they are 2.7 GB. The same in
PyTorch's operations, one after another, moves 8 GB.
Source: Dao et al., Flash-Decoding for long-context inference, 2023.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.numbers import LOG2_E
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.softmax import finish_rows

TILE_NUMBERS = 4096  # of a program: 32 registers of each of its 128 threads for each output


def merge_part_reference(before, lse, part, part_lse):
    """The plain PyTorch meaning: (output, log-sum-exp), in the dtypes of `before` and `lse`."""
    merged_lse = torch.logaddexp(lse, part_lse)
    shares = [torch.exp(one - merged_lse)[..., None] for one in (lse, part_lse)]
    return shares[0] * before + shares[1] * part, merged_lse


@triton.jit(do_not_specialize=("rows",))
def merge_part_kernel(
    before_pointer, lse_pointer, part_pointer, part_lse_pointer, after_pointer,
    before_head_stride, lse_head_stride, part_head_stride, part_lse_head_stride, after_head_stride, rows,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_ROWS rows of one head of one sequence; the merged log-sum-exp replaces the one before."""
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    head = (tl.program_id(0) // row_blocks).to(tl.int64)  # of all sequences
    row = tl.program_id(0) % row_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    columns = tl.arange(0, BLOCK_D)
    inside = row < rows
    exists = inside[:, None] & (columns < HEAD_DIM)[None, :]  # [BLOCK_ROWS, BLOCK_D]
    numbers = row.to(tl.int64)[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_ROWS, BLOCK_D]
    lses = lse_pointer + head * lse_head_stride + row
    lse = tl.load(lses, mask=inside, other=0.0) * LOG2_E  # [BLOCK_ROWS]
    part_lse = tl.load(part_lse_pointer + head * part_lse_head_stride + row, mask=inside, other=0.0) * LOG2_E
    before = tl.load(before_pointer + head * before_head_stride + numbers, mask=exists, other=0.0).to(tl.float32)
    part = tl.load(part_pointer + head * part_head_stride + numbers, mask=exists, other=0.0).to(tl.float32)
    larger = tl.maximum(lse, part_lse)
    reference = tl.where(larger == float("-inf"), 0.0, larger)  # -inf - -inf would be NaN
    share, part_share = tl.exp2(lse - reference), tl.exp2(part_lse - reference)  # [BLOCK_ROWS], one of them 1
    total = before * share[:, None] + part * part_share[:, None]  # [BLOCK_ROWS, BLOCK_D]
    merged, merged_lse = finish_rows(total, larger, share + part_share)
    afters = after_pointer + head * after_head_stride + numbers
    tl.store(afters, merged.to(after_pointer.dtype.element_ty), mask=exists)
    tl.store(lses, merged_lse, mask=inside)


def merge_part(before, lse, part, part_lse, after) -> None:
    """Writes attention over the keys of `before` and of `part` to `after`, and its log-sum-exp to `lse`.

    Args:
        before, part, after: [batch, heads, rows, head_dim], each of its own float dtype; `after` may be `before`.
        lse, part_lse: float32 [batch, heads, rows], natural logarithm.

    All are some rows of contiguous tensors. The caller has checked them.
    """
    batch, heads, rows, head_dim = before.shape
    block_d = triton.next_power_of_2(head_dim)
    block_rows = TILE_NUMBERS // block_d
    strides = [tensor.stride(1) for tensor in (before, lse, part, part_lse, after)]
    merge_part_kernel[(triton.cdiv(rows, block_rows) * batch * heads,)](
        before, lse, part, part_lse, after, *strides, rows,
        HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_ROWS=block_rows, num_warps=4,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the only merge of a ring of two; the first and the last of a longer one."""
    cases = [
        compile_case(*kinds, 128, (80, 90, 100)) for kinds in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"))
    ]
    return [*cases, compile_case("fp16", "fp32", 96, (75, 120))]


def compile_case(before: str, after: str, head_dim: int, archs: tuple[int, ...]) -> CompileCase:
    block_d = triton.next_power_of_2(head_dim)
    part = before if after == "fp32" else after
    types = signature_of(
        merge_part_kernel, part, before_pointer=f"*{before}", after_pointer=f"*{after}", part_lse_pointer="*fp32"
    )
    blocks = {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "BLOCK_ROWS": TILE_NUMBERS // block_d}
    return CompileCase(merge_part_kernel, types, blocks, archs=archs, label=f"{before} to {after} {head_dim}")
