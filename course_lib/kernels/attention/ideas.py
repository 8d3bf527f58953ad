"""Attention's forward with three ideas of FlashAttention-4, each to be switched on or off by itself.

`flash_attention` is where it starts from: one program for a tile of queries, which goes through the keys block by block
and keeps, of each row, a sum of weights 2^(score - reference) and the output that belongs to it. The ideas:

    threshold   Lazy rescaling. The reference of a row is its largest score when it was last set. A larger score asks
                for a new one, and all that was summed up is multiplied by 2^(old - new): BLOCK_M · head_dim products
                for each block. But any reference gives the same quotient. So nothing is multiplied as long as no score
                of the tile exceeds its row's reference by more than the threshold, in powers of 2. Weights then reach
                2^threshold instead of 1; 8 is what the paper takes.
    exp2, share Exponentials from multiply-adds. `exp2`, a @triton.jit function of a tile, makes the weights of the
                last `share` of every 32 keys; tl.exp2, of the special function unit, makes the others.
    order       The longest first. A list says which tile of which head each program takes, such as
                `order.longest_first` makes for causal attention.

What is off leaves nothing behind in the machine code: threshold 0 multiplies at every block and never asks; share 0
does not call `exp2`; without an order a program computes its tile from its number.

FLOPs and bytes are those of `flash_attention`; an order adds 8 bytes for each program. A tile takes new references if
one of its rows asks for one. How often that is in 64 blocks of 128 keys, after the first, for normal scores of a
standard deviation (natural; base 2 has 1.44 times as much), without a threshold and with 8:

    standard deviation    a row          a tile of 64 rows    of 128 rows
     1                    3.7    0       53     0             61     0
     3                    3.8    0.10    54     2.4           61     3.2
    10                    3.8    1.3     54    25             61    34

So a tile that asks gains little without a threshold, though each of its rows needs it only four times.
For Blackwell Triton compiles a threshold from 3.8 on; 3.6 and 3.7 fail on a branch around tensor memory.
Source: FlashAttention-4, arXiv 2603.05451, which has the three in CUDA for Blackwell.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.order import check_order, tile_of_program
from course_lib.kernels.attention.parts import SIZES, key_ranges, load_rows, visible_pairs
from course_lib.kernels.attention.reference import visible_keys
from course_lib.kernels.attention.tiles import INTERPRETER_TILES, candidate_tiles
from course_lib.kernels.common.attention_checks import check_attention_inputs
from course_lib.kernels.common.exponentials import PERIOD, exp2_polynomial
from course_lib.kernels.common.machine import TRITON, architecture_of
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.softmax import PAPERS_THRESHOLD, check_threshold, finish_rows, scale_in_log2
from course_lib.kernels.common.tiles import Tiles

BRANCHES_ON_BLACKWELL = (3, 8)  # the first Triton that compiles them around an accumulator


class Attended(NamedTuple):
    """What `attention_with_ideas` returns."""

    output: torch.Tensor  # as query, contiguous
    lse: torch.Tensor  # float32 [batch, query_heads, query_length], natural logarithm
    rescales: torch.Tensor | None  # int32 [batch, query_heads, tiles]: new references of a tile after its first block


# ------------------------------------------------------------------------------------------------------ what it means


def attention_with_ideas_reference(query, key, value, tiles: Tiles, *, causal=False, scale=None, threshold=0.0):
    """The same, block by block in plain PyTorch, in the inputs' dtype: where the others are right, it is, too."""
    heads_per_key_head, query_length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = (tensor.repeat_interleave(heads_per_key_head, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * scale_in_log2(scale, query.shape[3])
    visible = visible_keys(query_length, key.shape[2], causal=causal, device=query.device)
    scores = scores.masked_fill(~visible, -math.inf)
    output, lse, rescales = torch.empty_like(query), scores.new_empty(scores.shape[:3]), []
    for first in range(0, query_length, tiles.query_rows):
        rows = slice(first, first + tiles.query_rows)
        blocks = scores[:, :, rows].split(tiles.key_rows, dim=-1)
        reference = blocks[0].amax(-1)
        row_sum, summed = torch.zeros_like(reference), torch.zeros_like(query[:, :, rows])
        asked = torch.zeros(query.shape[:2], dtype=torch.int32, device=query.device)
        for block, values in zip(blocks, value.split(tiles.key_rows, dim=2)):
            largest = block.amax(-1)  # [batch, heads, rows]
            must = (largest > reference + threshold).any(-1)  # [batch, heads]: the whole tile, or none of its rows
            asked += must
            new = torch.where(must[..., None], torch.maximum(reference, largest), reference)
            rescale = torch.where(new > reference, torch.exp2(reference - new), 1.0)
            weights = torch.exp2(block - new[..., None]).masked_fill(block == -math.inf, 0.0)
            row_sum = row_sum * rescale + weights.sum(-1)
            summed = summed * rescale[..., None] + weights @ values
            reference = new
        output[:, :, rows] = summed / torch.where(row_sum == 0, 1.0, row_sum)[..., None]
        lse[:, :, rows] = (reference + row_sum.log2()) * math.log(2)
        rescales.append(asked)
    return Attended(output, lse, torch.stack(rescales, dim=-1))


# --------------------------------------------------------------------------------------------------------- the kernel


@triton.jit
def powers(x, EXP2: tl.constexpr, SHARE: tl.constexpr):
    """2^x of a tile [BLOCK_M, BLOCK_N]: the last SHARE of every 32 columns by EXP2, the others by tl.exp2."""
    if SHARE == 0:
        weights = tl.exp2(x)
    elif SHARE == PERIOD:
        weights = EXP2(x)
    else:
        column = tl.arange(0, x.shape[1]) % PERIOD  # [BLOCK_N]
        weights = tl.where((column >= PERIOD - SHARE)[None, :], EXP2(x), tl.exp2(x))
    return weights


@triton.jit
def rescaled(largest, reference, row_sum, accumulator):
    """The state with the larger of both for the reference of each row."""
    new_reference = tl.maximum(reference, largest)  # [BLOCK_M]
    # A row that has seen no key has -inf, and -inf - -inf is NaN.
    rescale = tl.exp2(reference - tl.where(new_reference == float("-inf"), 0.0, new_reference))  # [BLOCK_M]
    return new_reference, row_sum * rescale, accumulator * rescale[:, None]


@triton.jit
def attend(query, keys, values, begin, end, band, state, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
           THRESHOLD: tl.constexpr, EXP2: tl.constexpr, SHARE: tl.constexpr, COUNTED: tl.constexpr,
           MASKED: tl.constexpr):  # fmt: skip
    """Stream over the blocks of keys and values in [begin, end); returns the state after them.

    state: reference [BLOCK_M], row_sum [BLOCK_M], accumulator [BLOCK_M, BLOCK_D], and the rescales counted so far.
    """
    BLOCK_D: tl.constexpr = query.shape[1]
    key_length = band[1]
    reference, row_sum, accumulator, rescales = state
    for start in tl.range(begin, end, BLOCK_N):
        key_tile = load_rows(keys, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        scores = tl.dot(query, tl.trans(key_tile), input_precision=FLOAT32_PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            scores = tl.where(visible_pairs(start + tl.arange(0, BLOCK_N), band), scores, float("-inf"))
        largest = tl.max(scores, axis=1) * scale_log2  # [BLOCK_M]
        if THRESHOLD > 0 or COUNTED:
            must = tl.max((largest > reference + THRESHOLD).to(tl.int32), axis=0)  # 1 if one row of the tile must
            rescales += must
        if THRESHOLD == 0:
            reference, row_sum, accumulator = rescaled(largest, reference, row_sum, accumulator)
        elif must > 0:
            reference, row_sum, accumulator = rescaled(largest, reference, row_sum, accumulator)
        measured_from = reference
        if MASKED:
            measured_from = tl.where(reference == float("-inf"), 0.0, reference)
        weights = powers(scores * scale_log2 - measured_from[:, None], EXP2, SHARE)  # [BLOCK_M, BLOCK_N]
        row_sum += tl.sum(weights, axis=1)
        value_tile = load_rows(values, start, key_length, HEAD_DIM, BLOCK_N, BLOCK_D, MASKED)
        accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator, input_precision=FLOAT32_PRECISION)
    return reference, row_sum, accumulator, rescales


@triton.jit(do_not_specialize=SIZES)
def attention_with_ideas_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lse_pointer, rescales_pointer, order_pointer,
    query_batch_stride, query_head_stride, query_stride,
    key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride,
    query_heads, heads_per_key_head, query_length, key_length, keys_after, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    THRESHOLD: tl.constexpr, EXP2: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head, against all the keys that they see."""
    query_tiles = tl.cdiv(query_length, BLOCK_M)
    batch_and_head, query_tile = tile_of_program(order_pointer, query_tiles)
    first_query = query_tile * BLOCK_M
    batch = (batch_and_head // query_heads).to(tl.int64)
    head = (batch_and_head % query_heads).to(tl.int64)
    key_head = head // heads_per_key_head
    queries = query_pointer + batch * query_batch_stride + head * query_head_stride, query_stride
    keys = key_pointer + batch * key_batch_stride + key_head * key_head_stride, key_stride
    values = value_pointer + batch * value_batch_stride + key_head * value_head_stride, value_stride

    # Positions count from the first key, and the last query stands at the last key.
    first_position = first_query + key_length - query_length
    band = first_position + tl.arange(0, BLOCK_M), key_length, None, keys_after
    last_position = tl.minimum(first_position + BLOCK_M, key_length) - 1
    begin, _, whole_end, end = key_ranges(first_position, last_position, key_length, None, keys_after, BLOCK_N)

    COUNTED: tl.constexpr = rescales_pointer is not None
    query = load_rows(queries, first_query, query_length, HEAD_DIM, BLOCK_M, BLOCK_D, MASKED=True)
    reference = tl.full([BLOCK_M], float("-inf"), tl.float32)  # so the first block asks in any case
    state = reference, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32), 0
    state = attend(query, keys, values, begin, whole_end, band, state, scale_log2, HEAD_DIM, BLOCK_N,
                   THRESHOLD, EXP2, SHARE, COUNTED, MASKED=False)  # fmt: skip
    state = attend(query, keys, values, whole_end, end, band, state, scale_log2, HEAD_DIM, BLOCK_N,
                   THRESHOLD, EXP2, SHARE, COUNTED, MASKED=True)  # fmt: skip

    reference, row_sum, accumulator, rescales = state
    output, log_sum_exp = finish_rows(accumulator, reference, row_sum)
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    first_row = batch_and_head.to(tl.int64) * query_length  # of lse, and of the output, which is contiguous
    outputs = output_pointer + (first_row + rows)[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_M, BLOCK_D]
    inside = (rows < query_length)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(outputs, output.to(output_pointer.dtype.element_ty), mask=inside)
    tl.store(lse_pointer + first_row + rows, log_sum_exp, mask=rows < query_length)
    if COUNTED:
        tl.store(rescales_pointer + batch_and_head * query_tiles + query_tile, tl.maximum(rescales - 1, 0))


@triton.jit
def exp2_by_multiply_adds(x):
    """2^x of a float32 tile below 128, of any shape, by the course's polynomial of degree 3."""
    return exp2_polynomial(x, 3)


def attention_with_ideas(
    query, key, value, *, causal=False, scale=None, threshold=0.0, exp2=exp2_by_multiply_adds, share=0, order=None,
    counted=True, tiles=None, validate=True,
) -> Attended:  # fmt: skip
    """Exact softmax attention, as `flash_attention` has it, with the ideas that are asked for.

    Args:
        query: [batch, query_heads, query_length, head_dim], float32, float16 or bfloat16; head_dim from 16 to 256. Any
            strides, with a contiguous last dimension. Finite numbers.
        key, value: [batch, key_heads, key_length, head_dim], likewise; query_heads is a multiple of key_heads, and
            query head h reads key head h // (query_heads // key_heads).
        causal: query i sees the keys up to position i + key_length - query_length: aligned to the end.
        scale: factor of the scores, above 0; 1/√head_dim when None.
        threshold: by how many powers of 2 a score may exceed its row's reference before its tile takes new ones, 0 to
            15: float16 has 2^15, and not 2^16. 0: new ones at every block.
        exp2: a @triton.jit function: 2^x of a float32 tile of any shape, no x above `threshold`, down to -inf.
        share: of every 32 keys, for how many `exp2` makes the weights, 0 to 32.
        order: int32 [programs, 2], contiguous, which (head, tile of queries) each program takes, heads counted over
            all sequences: batch index · query_heads + head. A tile is `tiles.query_rows` queries. None: head by head,
            the last tile of each first.
        counted: whether rescales are counted, which asks at every block, also for a threshold of 0.
        tiles: the `Tiles` to use; those of `default_tiles` when None.
        validate: look whether each tile stands in `order` once, which waits for the device. With False, tiles that are
            missing leave their output as it was in memory, and tiles that do not exist write outside of it.

    Returns (output, log-sum-exp, rescales), `Attended`; rescales are None where they were not counted. A query that
    sees no key (causal, with more queries than keys) gets zeros and minus infinity.

    Raises a ValueError that names the argument when it is not as above.
    Source: FlashAttention-4, arXiv 2603.05451.
    """
    check_attention_inputs(query, key, value, scale=scale)
    tiles = tiles or default_tiles(query)
    check_threshold(threshold)
    check_share(share, tiles)
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    query_tiles = triton.cdiv(query_length, tiles.query_rows)
    programs = batch * query_heads * query_tiles
    check_order(order, query, tiles.query_rows, validate)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    rescales = torch.empty((*query.shape[:2], query_tiles), dtype=torch.int32, device=query.device) if counted else None
    attention_with_ideas_kernel[(programs,)](
        query, key, value, output, lse, rescales, order,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        query_heads, query_heads // key_heads, query_length, key_length, 0 if causal else None,
        scale_in_log2(scale, head_dim), head_dim, triton.next_power_of_2(head_dim),
        THRESHOLD=float(threshold), EXP2=exp2, SHARE=share, **tiles.settings(),
    )  # fmt: skip
    return Attended(output, lse, rescales)


def default_tiles(query: torch.Tensor) -> Tiles:
    """The tiles for these queries [batch, heads, length, head_dim], the same for every idea: no measurement."""
    arch = architecture_of(query.device)
    if arch is None:
        return INTERPRETER_TILES
    return candidate_tiles(arch, query.dtype, triton.next_power_of_2(query.shape[3]))[0]


def check_share(share, tiles: Tiles) -> None:
    if share not in range(PERIOD.value + 1):
        raise ValueError(f"share is {share!r}; it must be a number of keys, of every {PERIOD.value}: 0 to that.")
    if 0 < share < PERIOD.value and tiles.key_rows < PERIOD.value:
        raise ValueError(
            f"share is {share}, and tiles have {tiles.key_rows} keys; a share of every {PERIOD.value} keys needs tiles "
            "with as many."
        )


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: causal, all ideas off and all on, and each alone where they run fastest."""
    off: dict = {}
    on = {"threshold": PAPERS_THRESHOLD, "share": 8, "order": "*i32", "counted": "*i32"}
    on_blackwell = on if TRITON >= BRANCHES_ON_BLACKWELL else {**on, "threshold": 0.0}
    sixteen_bits = [(arch, 128, torch.bfloat16, off) for arch in (80, 90, 100)]
    sixteen_bits += [(arch, 128, torch.bfloat16, ideas) for arch, ideas in ((80, on), (90, on), (100, on_blackwell))]
    sixteen_bits += [(90, 64, torch.bfloat16, ideas) for ideas in (off, on)]
    sixteen_bits += [(90, 128, torch.float16, {name: on[name]}) for name in on]
    cases = [compile_case(*case, max_spill_bytes=0, instruction={80: "mma.sync", 90: "wgmma"}) for case in sixteen_bits]
    # No matrix instructions: right rather than fast, so a spill is no defect.
    return cases + [compile_case(75, 64, torch.float16, on, max_spill_bytes=None, instruction=None)]


def compile_case(arch: int, head_dim: int, dtype: torch.dtype, ideas: dict, **expectations) -> CompileCase:
    """ideas: threshold, share, and the types of order and counted (the pointer to rescales), where they are on."""
    tiles = candidate_tiles(arch, dtype, head_dim)[0]
    pointers = {"order_pointer": ideas.get("order"), "rescales_pointer": ideas.get("counted")}
    types = signature_of(attention_with_ideas_kernel, KINDS[dtype], **pointers)
    return CompileCase(
        attention_with_ideas_kernel, types,
        {
            **{name: None for name in pointers if name not in types},
            "HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim), **tiles.blocks(),
            "THRESHOLD": ideas.get("threshold", 0.0), "EXP2": exp2_by_multiply_adds, "SHARE": ideas.get("share", 0),
        },
        num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,),
        label=f"{KINDS[dtype]} {head_dim} {', '.join(ideas) or 'no idea'}", **expectations,
    )  # fmt: skip
