"""From places back to tokens: each token's sum over its experts, weighted by the router.

    out[token] = Σ over choices of weights[token, choice] · rows[place of the choice]

FLOPs: 2 · slots · width. Bytes in 16 bits: 2 · slots · width read, 2 · tokens · width written, 4 a weight. With 8
choices for each of 8192 tokens of 2048 numbers these are 302 MB, 63 µs of an H200's 4.8 TB/s.

A program that scattered its rows would add to what others add to: with atomics, in an order that changes from run to
run. Here each token has one program, which gathers its k rows and adds them in the order of its choices, in float32, so
the result has the same bits every time. A choice without a place adds nothing, and no place without a slot is read.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.experts.checks import check_weights
from course_lib.kernels.products.checks import check_matrix

BLOCK_TOKENS, BLOCK_COLUMNS, NUM_WARPS = 2, 512, 4  # 8 numbers of a row for each thread at a time


@triton.jit
def combine_kernel(
    rows_pointer, places_pointer, weights_pointer, out_pointer, tokens, width, rows_stride,
    CHOICES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: some columns of BLOCK_TOKENS tokens. weights_pointer: None where each choice counts 1."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    there, inside = token < tokens, column < width
    sums = tl.zeros([BLOCK_TOKENS, BLOCK_COLUMNS], tl.float32)
    for choice in tl.static_range(CHOICES):
        place = tl.load(places_pointer + token * CHOICES + choice, mask=there, other=-1)  # [BLOCK_TOKENS]
        row_tile = rows_pointer + place.to(tl.int64)[:, None] * rows_stride + column[None, :]
        row = tl.load(row_tile, mask=(place >= 0)[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if weights_pointer is not None:
            row *= tl.load(weights_pointer + token * CHOICES + choice, mask=place >= 0, other=0.0)[:, None]
        sums += row  # [BLOCK_TOKENS, BLOCK_COLUMNS]
    out_tile = out_pointer + token.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(out_tile, sums.to(out_pointer.dtype.element_ty), mask=there[:, None] & inside[None, :])


def combine(rows: torch.Tensor, arrangement: Arrangement, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Each token's weighted sum of the rows of its choices, [tokens, width], of rows' dtype, contiguous.

    Args:
        rows: [places, width], float32, float16 or bfloat16, with contiguous rows that may lie apart; where there is no
            slot they may hold anything.
        arrangement: of `arrange`.
        weights: float32 [tokens, k], contiguous; None where each choice counts 1. That of a choice which is not served
            may be anything.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_matrix("rows", rows, "[places, width]", empty_allowed=True)
    if len(rows) != len(arrangement.slots):
        raise ValueError(f"rows has {len(rows)} rows; the arrangement has {len(arrangement.slots)} places.")
    tokens, k = arrangement.places.shape
    if weights is not None:
        check_weights("weights", weights, (tokens, k), rows.device)
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if tokens:
        grid = triton.cdiv(tokens, BLOCK_TOKENS), triton.cdiv(out.shape[1], BLOCK_COLUMNS)
        combine_kernel[grid](
            rows, arrangement.places, weights, out, tokens, out.shape[1], rows.stride(0),
            k, BLOCK_TOKENS, BLOCK_COLUMNS, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def combine_reference(rows, arrangement, weights=None):
    """The plain PyTorch meaning: choice by choice, in float32 at least."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    sums = wide.new_zeros(len(arrangement.places), rows.shape[1])
    for choice, place in enumerate(arrangement.places.long().unbind(1)):
        served = place >= 0
        factor = 1 if weights is None else weights[served, choice, None]
        sums[served] += wide[place[served]] * factor
    return sums.to(rows.dtype)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: eight choices, with weights and without."""
    types = {"places_pointer": "*i32"}
    constants = {"CHOICES": 8, "BLOCK_TOKENS": BLOCK_TOKENS, "BLOCK_COLUMNS": BLOCK_COLUMNS}
    cases = []
    for kind in ("fp16", "fp32"):
        for weights in ("*fp32", None):
            signature = signature_of(combine_kernel, kind, weights_pointer=weights, **types)
            given = constants if weights else constants | {"weights_pointer": None}
            cases.append(CompileCase(combine_kernel, signature, given, num_warps=NUM_WARPS,
                                     divisible=[*(name for name in signature if name.endswith("_pointer")),
                                                "width", "rows_stride"], label=f"{kind} {weights}"))  # fmt: skip
    return cases
