"""The end of the backward pass on Hopper: dQ, summed in float32 in the order of its threads, to rows of 16 bits.

Bytes: 6 for each number of dQ. At 16384 tokens of 16 heads of 128: 201 MB, 45 µs at 4.5 TB/s; measured on an H200: 48.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase

PART = tl.constexpr(64)  # rows and columns of a part: what one consumer adds in one step


@triton.jit(do_not_specialize=["query_length", "query_blocks"])
def round_query_gradients_kernel(
    sums_pointer, gradient_pointer, query_length, query_blocks, scale, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr
):
    """One program: a part [64, 64] of one head."""
    group = tl.program_id(0) % 2
    block = tl.program_id(0) // 2 % query_blocks
    head = tl.program_id(0) // 2 // query_blocks
    sums = tl.load(sums_pointer + tl.program_id(0).to(tl.int64) * (PART * PART) + tl.arange(0, PART * PART))  # [4096]
    dealt = tl.reshape(sums, (2, 4, 4, 8, 4, 2, 2))  # h, b, w, r, t, a, c of `write_by_thread`
    sums = tl.reshape(tl.permute(dealt, (2, 0, 3, 1, 5, 4, 6)), (PART, PART))  # [64, 64]
    rows = tl.arange(0, PART)[:, None]
    columns = tl.arange(0, PART)[None, :]
    if BLOCK_M == PART:  # the two consumers share the columns of a block, otherwise its rows
        columns += group * PART
        first_row = block * BLOCK_M
    else:
        first_row = block * BLOCK_M + group * PART
    places = head.to(tl.int64) * query_length * HEAD_DIM + (first_row + rows) * HEAD_DIM + columns
    inside = (first_row + rows < query_length) & (columns < HEAD_DIM)
    tl.store(gradient_pointer + places, (sums * scale).to(gradient_pointer.dtype.element_ty), mask=inside)


def round_query_gradients(sums, like, scale: float, block_m: int):
    """dQ, contiguous, of the shape and dtype of `like`, times scale.

    sums: float32 [batch · query_heads · blocks of queries · 2, 4096], the parts as `write_by_thread` orders them.
    block_m: queries of a block.
    """
    gradient = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    query_length, head_dim = like.shape[2:]
    blocks = triton.cdiv(query_length, block_m)
    round_query_gradients_kernel[(sums.shape[0],)](
        sums, gradient, query_length, blocks, scale, HEAD_DIM=head_dim, BLOCK_M=block_m
    )
    return gradient


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    types = {"sums_pointer": "*fp32", "query_length": "i32", "query_blocks": "i32", "scale": "fp32"}
    return [
        CompileCase(round_query_gradients_kernel, types | {"gradient_pointer": f"*{kind}"},
                    {"HEAD_DIM": head_dim, "BLOCK_M": block_m}, archs=(90,), label=f"{kind} {head_dim}")
        for kind, head_dim, block_m in (("bf16", 128, 64), ("fp16", 64, 128))
    ]  # fmt: skip
