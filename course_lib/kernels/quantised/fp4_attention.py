"""Attention in 4 bits: queries, keys, values and the weights between them in NVFP4, with scales of two levels.

    S = Q (K - k̄)ᵀ        k̄ the mean key of a head: it adds q · k̄ to all scores of a row, and softmax does not see it
    P = 2^(S - m)          m the largest score of the row in this block of keys, so the largest weight of a block is 1
    O += P V               P as codes, times a scale for each 16 keys, times one for each row and block of keys

**Blocks along the sum.** A scale has to be one for all 16 products that are added up with it. So blocks lie along the
head dimension in Q and K, and along the keys in P and V: values come transposed, [head_dim, keys].

**Two levels.** A weight is at most 1, and the scale of its block at most 1/6. Scales are e4m3, which has all of its
digits from 2^-6 on. So of a block whose largest weight is below 6/64 not much would be left. A row of weights is
multiplied by 448 · 6 = 2688 first, which makes of 1 the largest scale and the largest code, and that limit 1/28,672.
The product costs nothing: the output has it and the sum of the weights has it, so their quotient does not.

**The sum of the rounded weights** divides the output, not that of the weights before rounding. Values that are all
alike then come out as they are, whatever was rounded. (SageAttention3 takes the sum before. In the first line of the
table that makes 1.9 % out of 1.2 %.)

Errors, ‖out - exact‖ / ‖exact‖, of normal inputs: 256 queries, 4096 keys, head dimension 64, values whose mean is half
their standard deviation. In the first two columns all but the weights is exact; in the last ones a head's keys have a
mean, three times their standard deviation.

    deviation      weights only:             all four        keys with a mean:
    of scores      one level, two levels     in 4 bits       kept, subtracted
    1              0.5 %      0.5 %           1.2 %           1.9 %   1.2 %
    2              4.0 %      1.1 %           6.2 %            12 %   6.2 %
    4              4.1 %      0.8 %            24 %            43 %    24 %

The values' mean makes these numbers small: without it the output is an average near 0, and the same errors are 19, 28
and 36 % of it (all four operands, deviations 1, 2 and 4). It cannot be left out as the keys' can, for softmax's weights
pass it on: the output lacks it.

FLOPs: as for `flash_attention`, four times as many a cycle where the matrix units take 4 bits (Blackwell), with
`tl.dot_scaled` on codes and scales as they are. On other GPUs and in the interpreter the numbers of both operands are
restored, each exact in float16 (2 digits times 4), and multiplied in 16 bits: the same results, and no time to gain.
Bytes: 4.5 bits for each number of Q, K and V. No Blackwell has run this.
Source: Zhang et al., SageAttention3, arXiv 2505.11594.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.parts import SIZES, key_ranges, visible_pairs
from course_lib.kernels.attention.reference import visible_keys
from course_lib.kernels.attention.tiles import INTERPRETER_TILES
from course_lib.kernels.common.attention_checks import check_attention_inputs, check_window_and_scale
from course_lib.kernels.common.machine import TRITON, architecture_of
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.softmax import scale_in_log2
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.quantised.fp4 import (
    E2M1_MAX,
    E2M1_NUMBERS,
    LEAST_SCALE,
    NVFP4_BLOCK,
    Fp4,
    blocks_of,
    nearest_codes,
    quantise_nvfp4,
    restore_fp4_reference,
)
from course_lib.kernels.quantised.fp8 import E4M3_MAX
from course_lib.kernels.quantised.parts import bounded, e2m1_codes, e2m1_numbers, e4m3_bytes, e4m3_numbers

HEAD_DIMS = (32, 64, 128)
LARGEST_WEIGHT = tl.constexpr(E4M3_MAX.value * E2M1_MAX.value)  # 2688: the largest scale times the largest code
BLOCK = tl.constexpr(NVFP4_BLOCK)
# The first Triton that compiles a product of e2m1 codes with e4m3 scales, by architecture; none before these has it.
NATIVE_FP4 = {100: (3, 9), 103: (3, 9), 120: (3, 6), 121: (3, 6)}


class Fp4Inputs(NamedTuple):
    """What `fp4_attention` takes: NVFP4 of [batch, heads, length, head_dim], and of values transposed."""

    query: Fp4
    key: Fp4  # without its mean
    value: Fp4  # of [batch, key_heads, head_dim, key_length]
    key_length: int
    dtype: torch.dtype  # of what was quantised, and of the output


# ------------------------------------------------------------------------------------------------------ what it means


def quantise_for_fp4(query, key, value, quantise=quantise_nvfp4) -> Fp4Inputs:
    """Queries, keys without their head's mean, and transposed values in NVFP4.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim 32, 64 or 128.
        key, value: [batch, key_heads, key_length, head_dim], likewise; query_heads is a multiple of key_heads.
        quantise: `quantise_nvfp4`, or its meaning, which needs no kernel.

    Raises a ValueError that names the argument when it is not as above, or holds a NaN or an infinity.
    """
    check_attention_inputs(query, key, value)
    if query.shape[3] not in HEAD_DIMS:
        raise ValueError(f"query has head dimension {query.shape[3]}; allowed are {', '.join(map(str, HEAD_DIMS))}.")
    mean_key = key.float().mean(dim=2, keepdim=True)
    values = quantise(value.transpose(2, 3).contiguous())
    return Fp4Inputs(
        quantise(query.contiguous()), quantise((key.float() - mean_key).contiguous()), values, key.shape[2], query.dtype
    )


def fp4_attention_reference(inputs: Fp4Inputs, *, causal=False, scale=None, key_rows=64, two_levels=True):
    """The same in plain PyTorch, float32, block by block of key_rows keys.

    two_levels: False leaves the scale of a row away: weights up to 1 get the scales of their blocks as they are.
    """
    query, key = (restore_fp4_reference(rows, 2 * rows.codes.shape[3]) for rows in inputs[:2])
    value = restore_fp4_reference(inputs.value, inputs.key_length).transpose(2, 3)
    heads_per_key_head = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(heads_per_key_head, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * scale_in_log2(scale, query.shape[3])
    scores = scores.masked_fill(
        ~visible_keys(query.shape[2], inputs.key_length, causal=causal, device=query.device), -math.inf
    )
    running_max = torch.full_like(scores[..., 0], -math.inf)
    row_sum, output = torch.zeros_like(running_max), torch.zeros_like(query)
    for block, values in zip(scores.split(key_rows, dim=-1), value.split(key_rows, dim=2)):
        new_max = torch.maximum(running_max, block.amax(-1))
        measured_from = block.amax(-1) if two_levels else new_max
        factor = LARGEST_WEIGHT.value if two_levels else 1.0
        weights = torch.exp2(block - finite(measured_from)[..., None]) * factor
        weights = rounded_weights(weights)
        share = torch.exp2(finite(measured_from) - finite(new_max)) / factor  # what weights are worth in the sums
        rescale = torch.exp2(running_max - finite(new_max))
        row_sum = row_sum * rescale + weights.sum(-1) * share
        output = output * rescale[..., None] + weights @ values * share[..., None]
        running_max = new_max
    return (output / torch.where(row_sum == 0, 1.0, row_sum)[..., None]).to(inputs.dtype)


def finite(maximum: torch.Tensor) -> torch.Tensor:
    """A row that has seen no key has the maximum -inf, and -inf - -inf is NaN: measure such a row from 0."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def rounded_weights(weights: torch.Tensor) -> torch.Tensor:
    """Weights [..., keys] up to 2688 as codes times the scale of their block."""
    blocks = blocks_of(weights, NVFP4_BLOCK)
    scales = (blocks.amax(-1) / E2M1_MAX.value).clamp(LEAST_SCALE.value, E4M3_MAX.value)
    scales = scales.to(torch.float8_e4m3fn).float()[..., None]
    numbers = torch.tensor(E2M1_NUMBERS, device=weights.device)[nearest_codes(blocks / scales).long()]
    return (numbers * scales).flatten(-2)[..., : weights.shape[-1]]


# --------------------------------------------------------------------------------------------------------- the kernel


@triton.jit
def load_fp4(matrix, first_row, row_count, first_column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Codes [ROWS, COLUMNS / 2] and scales [ROWS, COLUMNS / 16] of a tile of a matrix [row_count, columns], as bytes.

    matrix: the pointers to both. first_column is a multiple of 16. Zeros where the matrix has nothing.
    """
    codes_pointer, scales_pointer = matrix
    rows = first_row + tl.arange(0, ROWS)
    places = first_column // 2 + tl.arange(0, COLUMNS // 2)
    blocks = first_column // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    bytes_in_row, blocks_in_row = tl.cdiv(columns, 2), tl.cdiv(columns, BLOCK)
    exists = (rows < row_count)[:, None]
    codes = tl.load(codes_pointer + rows.to(tl.int64)[:, None] * bytes_in_row + places[None, :],
                    mask=exists & (places < bytes_in_row)[None, :], other=0)  # fmt: skip
    scales = tl.load(scales_pointer + rows.to(tl.int64)[:, None] * blocks_in_row + blocks[None, :],
                     mask=exists & (blocks < blocks_in_row)[None, :], other=0)  # fmt: skip
    return codes, scales


@triton.jit
def restored(codes, scales):
    """The numbers [ROWS, COLUMNS] of codes and scales, float16, exact: 2 digits times 4, between 2^-10 and 2688."""
    ROWS: tl.constexpr = scales.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    numbers = e2m1_numbers(tl.join(codes & 15, codes >> 4).reshape(ROWS, BLOCKS, BLOCK))
    scales = e4m3_numbers(scales.to(tl.int8, bitcast=True), tl.float16, False)  # [ROWS, BLOCKS]
    return (numbers * scales[:, :, None]).reshape(ROWS, BLOCKS * BLOCK)


@triton.jit
def quantised(weights):
    """Codes [ROWS, COLUMNS / 2] and scales [ROWS, COLUMNS / 16], as bytes, of weights [ROWS, COLUMNS] up to 2688."""
    ROWS: tl.constexpr = weights.shape[0]
    COLUMNS: tl.constexpr = weights.shape[1]
    blocks = weights.reshape(ROWS, COLUMNS // BLOCK, BLOCK)
    scales = e4m3_bytes(bounded(tl.maximum(tl.max(blocks, axis=2) / E2M1_MAX, LEAST_SCALE), E4M3_MAX))
    units = e4m3_numbers(scales.to(tl.int8, bitcast=True), tl.float32, False)  # [ROWS, COLUMNS / 16]
    codes = e2m1_codes(blocks / units[:, :, None])  # [ROWS, COLUMNS / 16, 16]
    low, high = tl.split(codes.reshape(ROWS, COLUMNS // 2, 2))  # [ROWS, COLUMNS / 2] each
    return low | (high << 4), scales


@triton.jit
def product(left, right, NATIVE: tl.constexpr):
    """left · rightᵀ, [M, N] float32, of two tiles of codes and scales, [M, K / 2] and [N, K / 2], [M, K / 16], …"""
    left_codes, left_scales = left
    right_codes, right_scales = right
    if NATIVE:
        sums = tl.dot_scaled(
            left_codes, left_scales.to(tl.float8e4nv, bitcast=True), "e2m1",
            tl.trans(right_codes), right_scales.to(tl.float8e4nv, bitcast=True), "e2m1",
        )  # fmt: skip
    else:
        sums = tl.dot(restored(left_codes, left_scales), tl.trans(restored(right_codes, right_scales)))
    return sums


@triton.jit(do_not_specialize=SIZES)
def fp4_attention_kernel(
    query_pointer, query_scales, query_tensor_scale, key_pointer, key_scales, key_tensor_scale,
    value_pointer, value_scales, value_tensor_scale, output_pointer,
    query_heads, heads_per_key_head, query_length, key_length, keys_after, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all the keys that they see."""
    query_tiles = tl.cdiv(query_length, BLOCK_M)
    batch_and_head = (tl.program_id(0) // query_tiles).to(tl.int64)
    first_query = (query_tiles - 1 - tl.program_id(0) % query_tiles) * BLOCK_M  # the longest first, when causal
    key_heads = query_heads // heads_per_key_head
    key_head = batch_and_head // query_heads * key_heads + batch_and_head % query_heads // heads_per_key_head
    bytes_of_keys, scales_of_keys = tl.cdiv(key_length, 2), tl.cdiv(key_length, BLOCK)
    first_row = batch_and_head * query_length
    queries = query_pointer + first_row * (HEAD_DIM // 2), query_scales + first_row * (HEAD_DIM // BLOCK)
    first_row = key_head * key_length
    keys = key_pointer + first_row * (HEAD_DIM // 2), key_scales + first_row * (HEAD_DIM // BLOCK)
    first_row = key_head * HEAD_DIM
    values = value_pointer + first_row * bytes_of_keys, value_scales + first_row * scales_of_keys
    scale_log2 *= tl.load(query_tensor_scale) * tl.load(key_tensor_scale)

    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, None, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, _, _, end = key_ranges(first_position, last_position, key_length, None, keys_after, BLOCK_N)
    query = load_fp4(queries, first_query, query_length, 0, HEAD_DIM, BLOCK_M, HEAD_DIM)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        key_tile = load_fp4(keys, start, key_length, 0, HEAD_DIM, BLOCK_N, HEAD_DIM)
        scores = product(query, key_tile, NATIVE) * scale_log2  # [BLOCK_M, BLOCK_N]
        scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        largest = tl.max(scores, axis=1)  # [BLOCK_M]
        new_max = tl.maximum(running_max, largest)
        measured_from = tl.where(largest == float("-inf"), 0.0, largest)
        weights = quantised(tl.exp2(scores - measured_from[:, None]) * LARGEST_WEIGHT)
        # What this block is worth, and what was summed before: a row that has seen no key has 0 of both.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        share, rescale = tl.exp2(largest - reference), tl.exp2(running_max - reference)  # [BLOCK_M]
        running_max = new_max
        rounded = restored(weights[0], weights[1]).to(tl.float32)  # [BLOCK_M, BLOCK_N]
        row_sum = row_sum * rescale + tl.sum(rounded, axis=1) * share
        value_tile = load_fp4(values, 0, HEAD_DIM, start, key_length, HEAD_DIM, BLOCK_N)  # of [HEAD_DIM, key_length]
        accumulator = accumulator * rescale[:, None] + product(weights, value_tile, NATIVE) * share[:, None]

    total = tl.where(row_sum == 0.0, 1.0, row_sum)  # both have the factor 2688
    output = accumulator * (tl.load(value_tensor_scale) / total)[:, None]  # [BLOCK_M, HEAD_DIM]
    rows = first_query + tl.arange(0, BLOCK_M)
    outputs = output_pointer + (batch_and_head * query_length + rows)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(outputs, output.to(output_pointer.dtype.element_ty), mask=(rows < query_length)[:, None])


def fp4_attention(inputs: Fp4Inputs, *, causal=False, scale=None, tiles=None) -> torch.Tensor:
    """Softmax attention of 4-bit inputs, whose weights become 4-bit numbers as well.

    Args:
        inputs: of `quantise_for_fp4`.
        causal: query i sees the keys up to position i + key_length - query_length: aligned to the end.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        tiles: the `Tiles` to use; by GPU when None. Weights get their scales by the row of a tile,
            so results depend on the number of its keys.

    Returns the output [batch, query_heads, query_length, head_dim], contiguous, in the dtype that was quantised; zeros
    for a query that sees no key.

    Raises a ValueError for other inputs, and for a scale that is not as above.
    """
    if not isinstance(inputs, Fp4Inputs):
        raise ValueError(f"inputs is a {type(inputs).__name__}; give what quantise_for_fp4(query, key, value) returns.")
    check_window_and_scale(None, scale)
    query, key, value, key_length, dtype = inputs
    batch, query_heads, query_length, half = query.codes.shape
    arch = architecture_of(query.codes.device)
    tiles = tiles or tiles_of(arch)
    output = torch.empty((batch, query_heads, query_length, 2 * half), dtype=dtype, device=query.codes.device)
    operands = [
        tensor for fp4 in (query, key, value) for tensor in (fp4.codes, fp4.scales.view(torch.uint8), fp4.tensor_scale)
    ]
    fp4_attention_kernel[(triton.cdiv(query_length, tiles.query_rows) * batch * query_heads,)](
        *operands, output, query_heads, query_heads // key.codes.shape[1], query_length, key_length,
        0 if causal else None, scale_in_log2(scale, 2 * half), 2 * half,
        NATIVE=multiplies_fp4(arch), **tiles.settings(),
    )  # fmt: skip
    return output


def multiplies_fp4(arch: int | None) -> bool:
    """Whether the matrix units of an architecture take codes and scales, and this Triton knows it."""
    return arch in NATIVE_FP4 and TRITON >= NATIVE_FP4[arch]


def tiles_of(arch: int | None) -> Tiles:
    """The tiles for an architecture (80, 90, ...; None: the interpreter)."""
    if arch is None:
        return INTERPRETER_TILES
    return Tiles(128, 64, 8, 2) if arch >= 90 else Tiles(64, 32, 8, 1)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: restored to 16 bits, and in 4 bits where the matrix units take them."""
    cases = []
    shipped = [(80, 64, "mma.sync"), (120, 128, "mma.sync")]
    shipped += [
        (arch, head_dim, matrix) for arch, matrix in ((90, "wgmma"), (100, "tcgen05")) for head_dim in (64, 128)
    ]
    for arch, head_dim, instruction in shipped:
        tiles = tiles_of(arch)
        operands = ("query", "key", "value")
        types = {f"{name}_pointer": "*u8" for name in operands} | {f"{name}_scales": "*u8" for name in operands}
        types |= {f"{name}_tensor_scale": "*fp32" for name in operands}
        cases.append(CompileCase(
            fp4_attention_kernel, signature_of(fp4_attention_kernel, "bf16", **types),
            {"HEAD_DIM": head_dim, "NATIVE": multiplies_fp4(arch), **tiles.blocks()},
            num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,), instruction=instruction,
            label=f"{head_dim} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
