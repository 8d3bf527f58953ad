"""Exercise 11.3: the absorbed decode kernel that reads each row of the cache once."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from course_lib.checker import (
    TRITON,
    Allocates,
    Case,
    Exercise,
    Forbids,
    LaunchesTriton,
    Mistake,
    Moves,
    ReadByKernels,
    edits,
    model_of,
)
from course_lib.checker.specification.contract import Contract
from exercises.ch11_multi_head_latent_attention import parts
from exercises.ch11_multi_head_latent_attention.parts import ROWS, over_rows
from exercises.topics.attention_sentences import NOT_DIVIDED
from exercises.topics.decode_slips import EMPTY_SEQUENCE
from exercises.topics.evidence import FIXED_SIZE, NAN_FROM_THE_START, all_nan
from exercises.topics.heads_of_a_tile import LEFT_OUT, OUTSIDE, AtMost64Heads, costs

WORK = ("scaled_dot_product_attention", "_scaled_dot_product", "bmm", "mm", "matmul", "_softmax", "softmax")


def kernel_cases(draw):
    def case(name, *arguments, metered=False, **options):
        return Case(name, parts.drawn(draw, *arguments, **options), metered=metered)

    cases = [
        case("4 heads, 32 + 16 numbers in a row, lengths 32 and 64", 4, 32, 16, [32, 64], 64, metered=True),
        case("4 heads, 32 + 16 numbers in a row, lengths 33 and 65", 4, 32, 16, [33, 65], 80),
        case("one token", 2, 16, 16, [1], 20),
        case("a sequence without a token between two others", 3, 32, 16, [20, 0, 33], 40),
        case("20 heads: more than 16 rows, bytes counted", 20, 32, 16, [50], 60, metered=True),
        case("70 heads: more than one block of 64, bytes counted", 70, 32, 16, [40], 40, metered=True),
        case("scores of ±150: exp overflows", 4, 32, 16, [100], 128, score=55.0),
        case("NaN in the slots that hold no token", 4, 32, 16, [40, 70], 96, unused=math.nan),
        Case("all strides apart, lengths 5 and 3", parts.apart(draw, *parts.drawn(draw, 4, 16, 16, [5, 3], 8))),
        Case("a negative scale, scores of -16,384 and less, float16", parts.deep(draw)),
        case("64 heads, 64 + 16, bytes counted", 64, 64, 16, [150, 70], 160, metered=True),
        *parts.far_cases(draw),
        *parts.far_ends(draw),
    ]
    if not draw.on_gpu or draw.bfloat16:  # a T4 has no room for tiles of 512 columns
        wide = case("512 + 64, float16, bytes counted", 8, 512, 64, [40], 48, dtype=torch.float16, metered=True)
        cases.append(replace(wide, driver=parts.noting_tiles))
    if draw.on_gpu:
        cases.append(
            case("64 heads, 256 + 64, lengths 1000 and 2049", 64, 256, 64, [1000, 2049], 2100, dtype=torch.float16)
        )
    return cases


def kernel_bytes(query, cache, lengths, scale, value_dim):
    """The rows once for up to 64 heads, queries, outputs, and a length for each program."""
    batch, heads, width = query.shape
    blocks = -(-heads // 64)
    return parts.row_bytes(query, cache, lengths) + batch * (
        heads * (width + value_dim) * query.element_size() + 4 * blocks
    )


def latent_decode(query, cache, lengths, scale, value_dim):
    """What the kernel stores, a sequence at a time."""
    output = torch.zeros(*query.shape[:2], value_dim)
    for sequence, length in enumerate(lengths.tolist()):
        _, running_sum, accumulator = over_rows(query, cache, sequence, 0, length, scale, value_dim)
        output[sequence] = accumulator / torch.where(running_sum == 0, 1.0, running_sum)
    return output.to(query.dtype)


CHANGES = (
    *ROWS,
    *edits(parts.TOO_FEW, newest_left_out=("0, length, scale", "0, length - 1, scale"),
        newest_left_out__by_the_mask=("tokens < last", "tokens < last - 1")),
    *edits(parts.TOO_MANY, one_slot_too_many=("0, length, scale", "0, length + 1, scale")),
    *edits(NOT_DIVIDED, not_divided=(" / torch.where(running_sum == 0, 1.0, running_sum)", "")),
    *edits(EMPTY_SEQUENCE, is_nan=True,
        empty_sequence_nan=("torch.where(running_sum == 0, 1.0, running_sum)", "running_sum")),
)  # fmt: skip


EXERCISE = Exercise(
    id="11.3",
    title="A decode kernel that reads the latent once",
    entries=("latent_decode",),
    cases=kernel_cases,
    oracle=parts.latent_attention,
    plain=parts.PLAIN,
    contracts=(
        Contract(
            parts.made,
            choices=parts.CHOICES,
            says=parts.SAYS | {"lengths": "0 is\n            allowed"},
            valid=parts.fits,
            most=12,
        ),
    ),
    models=(model_of(latent_decode, CHANGES, (over_rows,)),),
    needs=TRITON,
    uses_dot=True,
    requirements=(
        LaunchesTriton(at_most=1),
        Allocates(lambda query, cache, *rest: max(query.numel(), cache.numel())),
        Forbids(WORK),
        AtMost64Heads(),
        parts.TilesAsLoaded(),
        parts.RowsFrom16(),
        Moves(kernel_bytes),
        ReadByKernels((1,)),
    ),
    hints=(
        "Start from your kernel of 7.5. It needs no index of a KV head, because there is only one. Instead "
        "program_id(0) is the block of heads: members = tl.program_id(0) * ROWS + tl.arange(0, ROWS). Mask those from "
        "`heads` on.",
        "Load the queries in two tiles, [ROWS, LATENT] and [ROWS, ROPE], and each block of the cache in two, [BLOCK_N, "
        "LATENT] and [BLOCK_N, ROPE]. The rotary columns are LATENT + tl.arange(0, ROPE).",
        'scores = tl.dot(query, tl.trans(latents), input_precision="ieee"), plus the same for the rotary parts. '
        "Then multiply the sum by scale_log2, and set the scores of absent tokens to minus infinity.",
        "The values are the latents that you already loaded: "
        "accumulator * rescale[:, None] + tl.dot(weights.to(latents.dtype), latents, ...).",
        "rows = min(most_rows, max(16, triton.next_power_of_2(heads))), and grid = (triton.cdiv(heads, rows), batch).",
    ),
    mistakes=(
        FIXED_SIZE,
        Mistake("nan_from_the_start", NAN_FROM_THE_START, when=all_nan, every=True),
        parts.V_IS_TRANS_K,
        *LEFT_OUT,
        *OUTSIDE,
        *parts.in_16_bits(parts.latent_attention),
        *costs(parts.right_in_float64),
    ),
)
