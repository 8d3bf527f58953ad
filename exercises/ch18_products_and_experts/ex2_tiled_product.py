"""Exercise 18.2: a matrix product in tiles, of tensors with any strides."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Mistake, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides, beyond_32_bits, last_exchanged
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS, Requirement
from exercises.ch18_products_and_experts import product_steps as steps
from exercises.ch18_products_and_experts.gated_inputs import in_nan
from exercises.ch18_products_and_experts.product_steps import multiplied, numbers_of_tiles
from exercises.topics.evidence import first_access
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import put

NAN = math.nan


def product(x, weight, block_m, block_n, block_k):
    rows, columns = x.shape[0], weight.shape[0]
    row, column = numbers_of_tiles(rows, block_m)[:, None], numbers_of_tiles(columns, block_n)
    sums = multiplied(x, weight, row, column, rows, columns, 0, block_k)
    out = torch.full((rows, columns), NAN, dtype=x.dtype)
    inside = (row < rows)[..., None] & (column < columns)[..., None, :]
    put(out, row[..., None] * columns + column[..., None, :], sums.to(x.dtype), inside)
    return out


def multiplied_whole(x, weight, *blocks):
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) @ weight.to(wide).mT).to(x.dtype)


def block_by_block(x, weight, block_m, block_n, block_k):
    """The same, its sums block after block of inner."""
    wide = torch.promote_types(x.dtype, torch.float32)
    pairs = zip(x.to(wide).split(block_k, 1), weight.to(wide).split(block_k, 1))
    return sum(left @ right.mT for left, right in pairs).to(x.dtype)


def operands(draw, rows, outer, inner, dtype=torch.float32, size=1.0):
    return draw.normal(rows, inner, scale=size).to(dtype), draw.normal(outer, inner, scale=inner**-0.5).to(dtype)


def up_and_down(draw):
    """Sums that rise to 1,000, where float16 keeps halves, and come back to about 0; products that it must round."""
    level = torch.where(torch.arange(512) < 256, 2000.0, -2000.0)
    weight = (level + draw.normal(20, 512, scale=15.0).round()).to(torch.float16)
    return torch.full((3, 512), 1.125 * 2.0**-9, dtype=torch.float16), weight


def fine_digits(draw):
    """Numbers with digits that float16 does not have, and sums that come back to about 0."""
    x = draw.normal(17, 96).repeat_interleave(2, 1)
    weight = draw.normal(33, 96).repeat_interleave(2, 1)
    weight[:, 1::2] *= -1.0 + 2.0**-13
    return x, weight


def product_cases(draw):
    prime, last = draw.choice((37, 53, 83)), operands(draw, 18, 18, 16)
    x, weight = operands(draw, 40, 50, 72)
    cases = [
        Case("16 × 16 × 16: one tile, one block", (*operands(draw, 16, 16, 16), 16, 16, 16)),
        Case("32 rows, 48 outer, 64 inner, tiles of 16 × 16", (*operands(draw, 32, 48, 64), 16, 16, 32)),
        Case("20 rows: the last tile of rows is cut", (*operands(draw, 20, 32, 32), 16, 32, 16)),
        Case("20 outer: the last tile of columns is cut", (*operands(draw, 16, 20, 32), 16, 16, 16)),
        Case("20 inner: the last block is cut", (*operands(draw, 16, 16, 20), 16, 16, 16)),
        Case(f"{prime} rows, 50 outer, 70 inner", (*operands(draw, prime, 50, 70), 32, 16, 32)),
        Case("rows of both with gaps that hold NaN", (in_nan(x), in_nan(weight, 24), 32, 64, 16)),
        Case("weight transposed in memory", (x, last_exchanged(draw, weight), 32, 32, 32)),
        Case("x transposed in memory", (last_exchanged(draw, x), weight, 32, 32, 32)),
        Case("float16; the sums rise to 1,000 and fall to 0", (*up_and_down(draw), 16, 32, 32)),
        Case("float32, sums of a million", (*operands(draw, 17, 20, 40, size=1e6), 16, 32, 32)),
        Case("1 row, 20 outer, 1 inner", (*operands(draw, 1, 20, 1), 16, 16, 16)),
        Case("float32 numbers with digits that 16 bits do not have", (*fine_digits(draw), 32, 64, 64)),
        Case("64 × 96, 80 inner, tiles of 32 × 32, bytes counted", (*operands(draw, 64, 96, 80), 32, 32, 32),
            metered=True),
        Case("float16, 128 × 64, 48 inner, tiles of 64 × 16, bytes counted",
            (*operands(draw, 128, 64, 48, torch.float16), 64, 16, 16), metered=True),
        Case("128 × 128, 32 inner, one tile, bytes counted", (*operands(draw, 128, 128, 32), 128, 128, 32),
            metered=True),
        Case("70 × 40, 130 inner, tiles of 16 × 64, bytes counted", (*operands(draw, 70, 40, 130), 16, 64, 128),
            metered=True),
        *beyond_32_bits(draw, "rows of x", last[:1], last[1], 16, 16, 16),
        *beyond_32_bits(draw, "rows of weight", last[1:], 16, 16, 16, before=last[:1]),
    ]  # fmt: skip
    if draw.bfloat16:
        given = operands(draw, 300, 500, 200, torch.bfloat16)
        cases.append(Case("bfloat16, 300 × 500, 200 inner", (*given, 64, 128, 32)))
    if draw.on_gpu:
        given = operands(draw, 1000, 1500, 700, torch.float16)
        cases.append(Case("float16, 1000 × 1500, 700 inner", (*given, 128, 128, 64)))
    return cases


def made(draw, *, rows, outer, inner, dtype, size, blocks, x_layout, weight_layout):
    x, weight = operands(draw, rows, outer, inner, dtype, size)
    return x_layout(draw, x), weight_layout(draw, weight), *blocks


CONTRACT = Contract(
    made,
    choices={
        **{"rows": (1, 2, 15, 17, 33, 64, 257), "outer": (1, 3, 16, 31, 65, 128), "inner": (1, 2, 15, 16, 33, 65, 129)},
        "dtype": (torch.float32, torch.float16),
        "size": (Level(1.0, ""), Level(2000.0, "large values"), Level(2.0**-12, "small values")),
        "blocks": steps.BLOCKS_ASKED,
        "x_layout": any_strides("x"), "weight_layout": any_strides("weight"),
    },
    says={
        **dict.fromkeys(("rows", "outer", "inner"), "All sizes are at least 1"),
        "dtype": "float32 or both float16", "blocks": "16 to 128",
        "x_layout": "each with any strides", "weight_layout": "each with any strides",
    },
    valid=lambda rows, outer, blocks, **others: -(-rows // blocks[0]) * -(-outer // blocks[1]) <= 12, most=20,
)  # fmt: skip


def loaded_and_stored(x, weight, block_m, block_n, block_k):
    """Each program's rows of x and of weight, whole tiles, and the result once."""
    (rows, inner), outer = x.shape, weight.shape[0]
    programs = -(-rows // block_m) * -(-outer // block_n)
    return x.element_size() * (programs * (block_m + block_n) * inner + rows * outer)


@dataclass(frozen=True)
class TilesAsGiven(Requirement):
    """No larger tiles than the caller asks for: they would load less. A program may compute several, one by one."""

    id: str = "blocks_ignored"

    def complaint(self, case, seen):
        x, weight, block_m, block_n, _ = case.args
        (rows, inner), outer = x.shape, len(weight)
        least = x.element_size() * inner * (rows * -(-outer // block_n) + outer * -(-rows // block_m))
        loaded = sum(counts["loaded"] for counts in seen.traffic.values())
        if not (case.metered and seen.traffic) or loaded >= least:
            return None
        return (
            f"Your kernel loaded {loaded:,} bytes, but with tiles of {block_m} × {block_n} it is {least:,}. Compute "
            "the tiles that the caller asks for, and no larger ones."
        )


CHANGES = (
    *edits("Every result was rounded to 16 bits, also those in float32. Cast to the result's own dtype, "
        "out_pointer.dtype.element_ty.",
        stored_in_16_bits=("sums.to(x.dtype), inside", "sums.half().to(x.dtype), inside")),
    *steps.TILES, *steps.ROW_STRIDES, *steps.INNER_STRIDES, *steps.LOOP,
)  # fmt: skip

EXERCISE = Exercise(
    id="18.2", title="A tiled product", entries=("product",), cases=product_cases, oracle=multiplied_whole,
    plain=(block_by_block,), contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(product, CHANGES, (multiplied, numbers_of_tiles), most_pairs=100),),
    requirements=(
        *in_one_kernel(
            *MATRIX_PRODUCTS, "einsum", "dot", "inner", "tensordot",
            elements=lambda x, weight, *blocks: max(x.shape[0] * weight.shape[0], x.numel(), weight.numel()),
            least_bytes=loaded_and_stored, reads=(0, 1),
        ),
        TilesAsGiven(), Contiguous(),
    ),
    mistakes=(
        Mistake("outer_from_inner", "The result has as many columns as the weight. `outer` is the number of the "
            "weight's rows, weight.shape[0].", first=True, when=lambda case, seen, got: isinstance(got, torch.Tensor)
            and got.shape == (len(case.args[0]), case.args[1].shape[1]) != (len(case.args[0]), len(case.args[1]))),
        steps.IN_32_BITS,
        Mistake("writes_outside", "A store reaches past the result. Either it lacks the mask, row < rows and column "
            "< outer, or it takes another distance between rows than outer.",
            when=first_access("writes")),
        Mistake("reads_outside", "A load reaches past an operand. Mask the rows of x with row < rows, the rows of the "
            "weight with column < outer, and both with k < inner; other=0.0.",
            when=lambda case, seen, got: first_access("reads", whole=True)(case, seen, got) and steps.is_cut(case)),
        steps.rounded_on_the_way(multiplied_whole),
    ),
    hints=(
        "Begin with one tile: 16 × 16 × 16, no masks, contiguous tensors. Then let the grid be (tiles of rows, tiles "
        "of columns), and begin rows at tl.program_id(0) * BLOCK_M and columns at tl.program_id(1) * BLOCK_N.",
        "Pass four strides to the kernel, x.stride(0), x.stride(1) and those of weight. A tile of x is at x_pointer + "
        "row[:, None] * x_row_stride + k[None, :] * x_inner_stride. Take the rows to int64 first.",
        "Load with mask=(row < rows)[:, None] & (k < inner)[None, :] and other=0.0, and weight with column < outer. "
        "Both need k < inner.",
        'In the loop sums = tl.dot(x_tile, tl.trans(weight_tile), sums, input_precision="ieee"), with sums = '
        "tl.zeros([BLOCK_M, BLOCK_N], tl.float32) before it. k = start + tl.arange(0, BLOCK_K).",
        "Store sums.to(out_pointer.dtype.element_ty) at out_pointer + row[:, None] * outer + column[None, :], where "
        "row < rows and column < outer.",
    ),
)  # fmt: skip
