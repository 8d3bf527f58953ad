"""Queries, keys and values in FP8, as `flash_attention_fp8` takes them: rotated, scaled by blocks, values transposed.

    codes = e4m3(x M / scale),    scale = max |x M| / 448 over a block

e4m3 has 3 bits of mantissa and reaches from -448 to 448. Queries have a scale for each 64 rows and keys for each 128:
what a consumer of the kernel holds at a time. Values have one for each channel, which waits until a row is finished.

M is orthogonal: a Hadamard matrix with random signs, over √head_dim. Queries and keys are multiplied by the same one,
so (Q M)(K M)ᵀ = Q Kᵀ, but an outlier in one channel is spread over all of them (incoherent processing).

Bytes: each 16-bit input read once (values twice, for their scales), one byte written per element. FLOPs: 2 · head_dim
per element of queries and keys, on the matrix units; a matrix of 1 and -1 makes every product exact.

Source: Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3; the rotation: Chee et al., QuIP, arXiv 2307.13304.
"""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting
from course_lib.kernels.common.attention_checks import check_attention_inputs

E4M3_MAX = tl.constexpr(448.0)
HOPPER_CAPABILITY = (9, 0)
HEAD_DIMS = (64, 128, 256)
QUERY_ROWS, KEY_ROWS = 64, 128  # with one scale
ORDER = tl.constexpr(16)  # keys change places within each so many
VALUE_ROWS = 64  # that a program transposes at a time


class Fp8Rows(NamedTuple):
    """Queries or keys: codes [batch, heads, length, head_dim] e4m3, scales [batch, heads, blocks of rows] float32."""

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Values(NamedTuple):
    """Values: codes [batch, key_heads, head_dim, places] e4m3, scales [batch, key_heads, head_dim] float32.

    Of each 16 keys, key 8h + 2t + r is at place 4t + 2h + r (h and r in 0, 1; t in 0 to 3): where `hopper.operands`
    has its weight. Places are a multiple of 16; those of no key hold 0.
    """

    codes: torch.Tensor
    scales: torch.Tensor


class Fp8Inputs(NamedTuple):
    """What `flash_attention_fp8` takes; dtype is what was quantised, and what the output will be."""

    query: Fp8Rows
    key: Fp8Rows
    value: Fp8Values
    dtype: torch.dtype


# ----------------------------------------------------------------------------------------- the plain PyTorch meaning


def quantise_rows_reference(tensor: torch.Tensor, rotation: torch.Tensor | None, rows: int) -> Fp8Rows:
    """[batch, heads, length, head_dim] times rotation / √head_dim, in e4m3, with a scale for each `rows` rows."""
    length, head_dim = tensor.shape[2:]
    tensor = tensor.float() if rotation is None else tensor.float() @ rotation.float() / head_dim**0.5
    blocks = F.pad(tensor, (0, 0, 0, -length % rows)).unflatten(2, (-1, rows))  # [batch, heads, blocks, rows, head_dim]
    scales = scales_for(blocks.abs().amax(dim=(3, 4)))
    codes = (blocks / scales[..., None, None]).to(torch.float8_e4m3fn)
    return Fp8Rows(codes.flatten(2, 3)[:, :, :length].contiguous(), scales)


def quantise_values_reference(value: torch.Tensor) -> Fp8Values:
    """[batch, key_heads, length, head_dim] in e4m3, a scale for each channel, transposed and in the kernel's order."""
    scales = scales_for(value.float().abs().amax(dim=2))
    padded = F.pad(value.float(), (0, 0, 0, -value.shape[2] % ORDER.value)) / scales[:, :, None]
    by_place = padded.unflatten(2, (-1, 2, 4, 2)).transpose(3, 4).flatten(2, 5)  # h, t, r -> t, h, r
    return Fp8Values(by_place.mT.to(torch.float8_e4m3fn).contiguous(), scales)


def restored_rows(rows: Fp8Rows, block_rows: int) -> torch.Tensor:
    """What codes and scales stand for: [batch, heads, length, head_dim] float32, rotated as it was."""
    return rows.codes.float() * rows.scales.repeat_interleave(block_rows, 2)[:, :, : rows.codes.shape[2], None]


def restored_values(values: Fp8Values, length: int) -> torch.Tensor:
    """What codes and scales stand for: [batch, key_heads, length, head_dim] float32."""
    by_place = (values.codes.float() * values.scales[..., None]).mT
    return by_place.unflatten(2, (-1, 4, 2, 2)).transpose(3, 4).flatten(2, 5)[:, :, :length]


def scales_for(largest: torch.Tensor) -> torch.Tensor:
    """The scale that takes the largest value to 448; 1 where all are 0."""
    return torch.where(largest > 0, largest / E4M3_MAX.value, 1.0)


# ------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def quantise_rows_kernel(
    source_pointer,
    rotation_pointer,
    codes_pointer,
    scales_pointer,
    heads,
    length,
    stride_batch,
    stride_head,
    stride_row,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """One program: one block of rows of one head."""
    block, batch_and_head = tl.program_id(0), tl.program_id(1)
    row = (block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]  # [BLOCK_ROWS, 1]
    channel = tl.arange(0, HEAD_DIM)[None, :]  # [1, HEAD_DIM]
    inside = row < length
    head_start = (batch_and_head // heads).to(tl.int64) * stride_batch + (batch_and_head % heads) * stride_head
    tile = tl.load(source_pointer + head_start + row * stride_row + channel, mask=inside, other=0.0)
    if rotation_pointer is not None:
        matrix = tl.load(rotation_pointer + tl.arange(0, HEAD_DIM)[:, None] * HEAD_DIM + channel)  # of 1 and -1
        tile = tl.dot(tile, matrix) / tl.sqrt(HEAD_DIM * 1.0)
    tile = tile.to(tl.float32)  # [BLOCK_ROWS, HEAD_DIM]
    largest = tl.max(tl.max(tl.abs(tile), axis=1), axis=0)
    scale = tl.where(largest > 0, largest / E4M3_MAX, 1.0)
    codes = codes_pointer + (batch_and_head.to(tl.int64) * length + row) * HEAD_DIM + channel
    tl.store(codes, (tile / scale).to(tl.float8e4nv), mask=inside)
    tl.store(scales_pointer + batch_and_head * tl.num_programs(0) + block, scale)


@triton.jit
def quantise_values_kernel(
    source_pointer,
    codes_pointer,
    scales_pointer,
    heads,
    length,
    places,
    stride_batch,
    stride_head,
    stride_row,
    BLOCK_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """One program: BLOCK_ROWS places of one head. It reads rows in the order in which they will lie."""
    batch_and_head = tl.program_id(1)
    place = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    within = place % ORDER
    key = (place - within + within // 2 % 2 * 8 + within // 4 * 2 + within % 2).to(tl.int64)
    channel = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    head_start = (batch_and_head // heads).to(tl.int64) * stride_batch + (batch_and_head % heads) * stride_head
    source = source_pointer + head_start + key[:, None] * stride_row + channel[None, :]
    tile = tl.load(source, mask=(key < length)[:, None], other=0.0).to(tl.float32)  # [BLOCK_ROWS, HEAD_DIM]
    scale = tl.load(scales_pointer + batch_and_head * HEAD_DIM + channel)
    codes = codes_pointer + (batch_and_head * HEAD_DIM + channel).to(tl.int64)[None, :] * places + place[:, None]
    tl.store(codes, (tile / scale[None, :]).to(tl.float8e4nv), mask=(place < places)[:, None])


def quantise_for_attention(query, key, value, *, rotate=True, seed=0) -> Fp8Inputs:
    """Attention's inputs in FP8.

    Args:
        query: [batch, query_heads, query_length, head_dim], float16 or bfloat16, the last dimension contiguous;
            head_dim 64, 128 or 256.
        key, value: [batch, key_heads, key_length, head_dim], likewise.
        rotate: multiply queries and keys by a random orthogonal matrix first.
        seed: of that matrix's signs.

    Plain PyTorch does the same in Triton's interpreter, whose casts to FP8 don't round to nearest, and on GPUs
    before Hopper, which have no use for it.

    Raises ValueError for other shapes and dtypes, in a sentence.
    """
    check_attention_inputs(query, key, value)
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"query has dtype {query.dtype}; FP8 is made of torch.float16 or torch.bfloat16.")
    head_dim = query.shape[3]
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"query has head dimension {head_dim}; the FP8 kernel takes 64, 128 and 256.")
    rotation = signed_hadamard(head_dim, seed, query.device, query.dtype) if rotate else None
    rows, values = quantise_rows, quantise_values
    if interpreting() or torch.cuda.get_device_capability(query.device) < HOPPER_CAPABILITY:
        rows, values = quantise_rows_reference, quantise_values_reference
    return Fp8Inputs(rows(query, rotation, QUERY_ROWS), rows(key, rotation, KEY_ROWS), values(value), query.dtype)


def quantise_rows(tensor: torch.Tensor, rotation: torch.Tensor | None, rows: int) -> Fp8Rows:
    """`quantise_rows_reference` by a kernel; rows is a power of 2 from 16 on."""
    batch, heads, length, head_dim = tensor.shape
    blocks = triton.cdiv(length, rows)
    codes = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn, device=tensor.device)
    scales = torch.empty((batch, heads, blocks), dtype=torch.float32, device=tensor.device)
    quantise_rows_kernel[(blocks, batch * heads)](
        tensor, rotation, codes, scales, heads, length, *tensor.stride()[:3], BLOCK_ROWS=rows, HEAD_DIM=head_dim,
        num_warps=8)  # fmt: skip
    return Fp8Rows(codes, scales)


def quantise_values(value: torch.Tensor) -> Fp8Values:
    """`quantise_values_reference` by a kernel."""
    batch, heads, length, head_dim = value.shape
    places = triton.cdiv(length, ORDER.value) * ORDER.value
    codes = torch.empty((batch, heads, head_dim, places), dtype=torch.float8_e4m3fn, device=value.device)
    scales = scales_for(torch.maximum(value.amax(dim=2), -value.amin(dim=2)).float())
    quantise_values_kernel[(triton.cdiv(places, VALUE_ROWS), batch * heads)](
        value, codes, scales, heads, length, places, *value.stride()[:3], BLOCK_ROWS=VALUE_ROWS, HEAD_DIM=head_dim,
        num_warps=head_dim // 32)  # fmt: skip
    return Fp8Values(codes, scales)


@functools.lru_cache(16)
def signed_hadamard(size: int, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[size, size] of 1 and -1 with orthogonal rows: a Hadamard matrix, the sign of each row drawn at random."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    return (signs * matrix).to(device, dtype)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    strides = dict.fromkeys(("stride_batch", "stride_head", "stride_row"), "i32")
    sizes = {"heads": "i32", "length": "i32"}
    pointers = {"source_pointer": "*bf16", "codes_pointer": "*fp8e4nv", "scales_pointer": "*fp32"}
    cases = [CompileCase(quantise_rows_kernel, pointers | {"rotation_pointer": "*bf16"} | sizes | strides,
                         {"BLOCK_ROWS": rows, "HEAD_DIM": head_dim}, num_warps=8, archs=(90,), max_spill_bytes=None,
                         label=f"{rows} x {head_dim}")
             for head_dim in HEAD_DIMS for rows in (QUERY_ROWS, KEY_ROWS)]  # fmt: skip
    return cases + [CompileCase(quantise_values_kernel, pointers | sizes | strides | {"places": "i32"},
                                {"BLOCK_ROWS": VALUE_ROWS, "HEAD_DIM": head_dim}, num_warps=head_dim // 32, archs=(90,),
                                label=f"values, {head_dim}") for head_dim in HEAD_DIMS]  # fmt: skip
