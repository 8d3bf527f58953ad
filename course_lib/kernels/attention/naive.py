"""Naive attention: three kernels, and two matrices of query_length × key_length in memory between them.

    S = scale · Q Kᵀ      written      scores,        [batch, query_heads, query_length, key_length]
    P = softmax(S)        read, written  probabilities, the same shape
    O = P V               read         output,        [batch, query_heads, query_length, head_dim]

FLOPs: 4 · batch · query_heads · query_length · key_length · head_dim, causal or not: hidden scores are computed, and
then overwritten by -inf. Bytes: S and P are each written once and read once, 4 · query_length · key_length elements a
head, beside which Q, K, V and O are small. At N = 8192, 32 heads and 16 bits, S alone has 4.3 GB.
This is what FlashAttention is measured against: the same numbers, and nearly all of its traffic avoidable.
"""

import math
import sys
from typing import Any

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import machine
from course_lib.hardware.units import format_bytes
from course_lib.kernels.attention.parts import load_rows
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.softmax.rows import softmax_rows

# Tiles of the two products, for 16 bits; float32 has no matrix units here and keeps its operands in registers.
TILE, TILE_FLOAT32 = 64, 32
NUM_WARPS = 4


@triton.jit
def scores_kernel(
    query_pointer, key_pointer, scores_pointer,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    query_heads, heads_per_key_head, query_length, key_length, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one tile of S = scale · Q Kᵀ. Reads a tile of Q and one of K, writes one of S."""
    batch_and_head = tl.program_id(2).to(tl.int64)
    batch, head = batch_and_head // query_heads, batch_and_head % query_heads
    first_query, first_key = tl.program_id(1) * BLOCK_M, tl.program_id(0) * BLOCK_N
    queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
    keys = key_pointer + batch * key_batch_stride + head // heads_per_key_head * key_head_stride, key_stride
    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    key = load_rows(keys, first_key, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)
    scores = scale * tl.dot(query, tl.trans(key), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
    row = (first_query + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    column = (first_key + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
    if CAUSAL:  # aligned to the end: the last query sees the last key
        scores = tl.where(column <= row + (key_length - query_length), scores, float("-inf"))
    scores_row = scores_pointer + (batch_and_head * query_length + row) * key_length
    tl.store(
        scores_row + column,
        scores.to(scores_pointer.dtype.element_ty),
        mask=(row < query_length) & (column < key_length),
    )


@triton.jit
def weighted_values_kernel(
    probabilities_pointer, value_pointer, output_pointer,
    value_batch_stride, value_head_stride, value_stride,
    query_heads, heads_per_key_head, query_length, key_length,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of O = P V. Reads those rows of P whole, and all of V."""
    batch_and_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_and_head // query_heads, batch_and_head % query_heads
    first_query = tl.program_id(0) * BLOCK_M
    values = value_pointer + batch * value_batch_stride + head // heads_per_key_head * value_head_stride, value_stride
    row = (first_query + tl.arange(0, BLOCK_M))[:, None]  # [BLOCK_M, 1]
    probabilities_row = probabilities_pointer + (batch_and_head * query_length + row) * key_length
    output = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(0, key_length, BLOCK_N):
        column = (start + tl.arange(0, BLOCK_N))[None, :]  # [1, BLOCK_N]
        inside = (row < query_length) & (column < key_length)
        probabilities = tl.load(probabilities_row + column, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
        value = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED=True)  # [BLOCK_N, BLOCK_D]
        output = tl.dot(probabilities, value, output, input_precision=FLOAT32_PRECISION)
    column = tl.arange(0, BLOCK_D)[None, :]
    output_row = output_pointer + (batch_and_head * query_length + row) * HEAD_DIM
    tl.store(
        output_row + column, output.to(output_pointer.dtype.element_ty), mask=(row < query_length) & (column < HEAD_DIM)
    )


def naive_attention(query, key, value, *, causal=False, scale=None) -> torch.Tensor:
    """Softmax attention that writes its scores and probabilities to memory.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256.
            Any strides, with a contiguous last dimension.
        key, value: [batch, key_heads, key_length, head_dim], of query's dtype and device; query_heads is a multiple of
            key_heads, and query head h reads key head h // (query_heads // key_heads).
        causal: query i sees the keys up to position i + key_length - query_length: aligned to the end.
        scale: factor of the scores, above 0; 1/√head_dim when None.

    Returns the output, contiguous, of query's shape and dtype. A query that sees no key gets zeros. As in plain
    PyTorch, a NaN in value reaches every row of its head, since the weight of a hidden key is 0 and 0 · NaN is NaN.

    Raises a ValueError when an argument doesn't fit, and when S, P and O would not fit in the device's memory: it says
    how many bytes they need and how many there are.
    """
    check_attention_inputs(query, key, value, scale=scale)
    batch, query_heads, query_length, head_dim = query.shape
    key_length = key.shape[2]
    check_memory(query, key_length)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores = query.new_empty(batch * query_heads * query_length, key_length)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)

    tile = TILE_FLOAT32 if query.dtype == torch.float32 else TILE
    sizes = (query_heads, query_heads // key.shape[1], query_length, key_length)
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), "BLOCK_M": tile, "BLOCK_N": tile}
    heads, query_tiles, key_tiles = batch * query_heads, triton.cdiv(query_length, tile), triton.cdiv(key_length, tile)
    scores_kernel[(key_tiles, query_tiles, heads)](
        query, key, scores, *query.stride()[:3], *key.stride()[:3], *sizes, scale, CAUSAL=causal, **shape,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    probabilities = torch.empty_like(scores)
    softmax_rows(scores, probabilities, zero_empty_rows=True)
    weighted_values_kernel[(query_tiles, heads)](
        probabilities, value, output, *value.stride()[:3], *sizes, **shape, num_warps=NUM_WARPS
    )
    return output


def memory_needed(query: torch.Tensor, key_length: int) -> int:
    """Bytes that naive attention allocates for [batch, query_heads, query_length, head_dim]: S, P and the output."""
    batch, query_heads, query_length, head_dim = query.shape
    return batch * query_heads * query_length * (2 * key_length + head_dim) * query.element_size()


def memory_available(device: torch.device) -> int:
    """Bytes that can be allocated now: free on the GPU or kept by PyTorch for reuse; on a CPU, what the machine has."""
    if device.type != "cuda":
        return machine().memory_bytes or sys.maxsize  # where it is unknown, nothing is refused
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def check_memory(query: torch.Tensor, key_length: int) -> None:
    batch, query_heads, query_length = query.shape[:3]
    needed = memory_needed(query, key_length)
    available = memory_available(query.device)
    if needed > available:
        raise ValueError(
            f"query and key ask for {batch * query_heads} score matrices of {query_length} × {key_length}: with the "
            f"probabilities and the output naive attention allocates {needed} bytes ({format_bytes(needed)}), and "
            f"{format_bytes(available)} are available. Use fewer heads or shorter sequences, or flash_attention."
        )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    shape = {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": TILE, "BLOCK_N": TILE}
    expected: dict[str, Any] = {"archs": (80, 90), "num_warps": NUM_WARPS, "instruction": {80: "mma.sync", 90: "wgmma"}}
    return [
        CompileCase(scores_kernel, signature_of(scores_kernel, "bf16"), shape | {"CAUSAL": True}, **expected),
        CompileCase(weighted_values_kernel, signature_of(weighted_values_kernel, "bf16"), shape, **expected),
    ]  # fmt: skip
