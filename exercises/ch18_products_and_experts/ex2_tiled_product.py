"""Exercise 18.2: a matrix product in tiles, of tensors with any strides."""

from dataclasses import dataclass

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import any_strides, beyond_32_bits, last_exchanged
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS, Requirement
from exercises.ch18_products_and_experts import product_steps as steps
from exercises.ch18_products_and_experts.product_steps import multiplied, numbers_of_tiles
from exercises.topics.evidence import first_access
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import put


def product(x, weight, block_m, block_n, block_k):
    rows, columns = x.shape[0], weight.shape[0]
    row, column = numbers_of_tiles(rows, block_m)[:, None], numbers_of_tiles(columns, block_n)
    x_at, weight_at = row * x.stride(0), column * weight.stride(0)
    result = multiplied(x, x_at, row < rows, weight, weight_at, column < columns, block_k)
    out = torch.full((rows, columns), torch.nan, dtype=x.dtype)
    inside = (row < rows)[..., None] & (column < columns)[..., None, :]
    put(out, row[..., None] * columns + column[..., None, :], result.to(x.dtype), inside)
    return out


def multiplied_whole(x, weight, *blocks):
    return (steps.widened(x) @ steps.widened(weight).mT).to(x.dtype)


def block_by_block(x, weight, block_m, block_n, block_k):
    return steps.summed_by_blocks(x, weight, block_k).to(x.dtype)


def operands(draw, rows, outer, inner, dtype=torch.float32, size=1.0):
    return draw.normal(rows, inner, scale=size).to(dtype), draw.normal(outer, inner, scale=inner**-0.5).to(dtype)


def up_and_down(draw):
    """Sums that rise to 1,000, where float16 keeps halves, and come back to about 0; products that it must round."""
    level = torch.where(torch.arange(512) < 256, 2000.0, -2000.0)
    weight = (level + draw.normal(20, 512, scale=15.0).round()).to(torch.float16)
    return torch.full((3, 512), 1.125 * 2.0**-9, dtype=torch.float16), weight


def fine_digits(draw):
    """Numbers with digits that float16 does not have, and sums that come back to about 0."""
    x, weight = (draw.normal(rows, 96).repeat_interleave(2, 1) for rows in (17, 33))
    weight[:, 1::2] *= -1.0 + 2.0**-13
    return x, weight


def product_cases(draw):
    def case(name, blocks, *sizes, metered=False, **choices):
        return Case(name, (*operands(draw, *sizes, **choices), *blocks), metered=metered)

    prime, last, half = draw.choice((37, 53, 83)), operands(draw, 18, 18, 16), {"dtype": torch.float16}
    x, weight = operands(draw, 40, 50, 72)
    cases = [
        case("16 × 16 × 16: one tile, one block", (16, 16, 16), 16, 16, 16),
        case("32 rows, 48 outer, 64 inner, tiles of 16 × 16", (16, 16, 32), 32, 48, 64),
        case("20 rows: the last tile of rows is cut", (16, 32, 16), 20, 32, 32),
        case("20 outer: the last tile of columns is cut", (16, 16, 16), 16, 20, 32),
        case("20 inner: the last block is cut", (16, 16, 16), 16, 16, 20),
        case(f"{prime} rows, 50 outer, 70 inner", (32, 16, 32), prime, 50, 70),
        Case("rows of both with gaps that hold NaN", (draw.spread_out(x, 40), draw.spread_out(weight, 24), 32, 64, 16)),
        Case("weight transposed in memory", (x, last_exchanged(draw, weight), 32, 32, 32)),
        Case("x transposed in memory", (last_exchanged(draw, x), weight, 32, 32, 32)),
        Case("float16; the sums rise to 1,000 and fall to 0", (*up_and_down(draw), 16, 32, 32)),
        case("float32, sums of a million", (16, 32, 32), 17, 20, 40, size=1e6),
        case("1 row, 20 outer, 1 inner", (16, 16, 16), 1, 20, 1),
        Case("float32 numbers with digits that 16 bits do not have", (*fine_digits(draw), 32, 64, 64)),
        case("64 × 96, 80 inner, tiles of 32 × 32, bytes counted", (32, 32, 32), 64, 96, 80, metered=True),
        case("float16, 128 × 64, 48 inner, tiles of 64 × 16, bytes counted", (64, 16, 16), 128, 64, 48, metered=True,
             **half),
        case("128 × 128, 32 inner, one tile, bytes counted", (128, 128, 32), 128, 128, 32, metered=True),
        case("70 × 40, 130 inner, tiles of 16 × 64, bytes counted", (16, 64, 128), 70, 40, 130, metered=True),
        *beyond_32_bits(draw, "rows of x", last[:1], last[1], 16, 16, 16),
        *beyond_32_bits(draw, "rows of weight", last[1:], 16, 16, 16, before=last[:1]),
    ]  # fmt: skip
    if draw.bfloat16:
        cases.append(case("bfloat16, 300 × 500, 200 inner", (64, 128, 32), 300, 500, 200, dtype=torch.bfloat16))
    if draw.on_gpu:
        cases.append(case("float16, 1000 × 1500, 700 inner", (128, 128, 64), 1000, 1500, 700, **half))
    return cases


def made(draw, *, blocks, x_layout, weight_layout, **choices):
    x, weight = operands(draw, **choices)
    return x_layout(draw, x), weight_layout(draw, weight), *blocks


CONTRACT = Contract(
    made,
    {"rows": (1, 2, 15, 17, 33, 64, 257), "outer": (1, 3, 16, 31, 65, 128), "inner": (1, 2, 15, 16, 33, 65, 129),
     "dtype": (torch.float32, torch.float16), "blocks": steps.BLOCKS_ASKED,
     "size": (Level(1.0, ""), Level(2000.0, "large values"), Level(2.0**-12, "small values")),
     "x_layout": any_strides("x"), "weight_layout": any_strides("weight")},
    {**dict.fromkeys(("rows", "outer", "inner"), "All sizes are at least 1"), "dtype": "float32 or both float16",
     "blocks": "16 to 128", **dict.fromkeys(("x_layout", "weight_layout"), "each with any strides")},
    lambda rows, outer, blocks, **others: -(-rows // blocks[0]) * -(-outer // blocks[1]) <= 12, most=20,
)  # fmt: skip


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
        needed = f"but with tiles of {block_m} × {block_n} it is {least:,}"
        return f"Your kernel loaded {loaded:,} bytes, {needed}. Compute the tiles that are asked for, no larger ones."


EXERCISE = Exercise(
    id="18.2", title="A tiled product", entries=("product",), cases=product_cases, oracle=multiplied_whole,
    plain=(block_by_block,), contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(product, (*steps.TILES, *steps.ROW_STRIDES, *steps.INNER_STRIDES, *steps.LOOP),
                     (multiplied, numbers_of_tiles), most_pairs=100),),
    requirements=(
        *in_one_kernel(*MATRIX_PRODUCTS, "einsum", "dot", "inner", "tensordot", least_bytes=steps.loaded_and_stored,
            elements=lambda x, weight, *blocks: max(x.shape[0] * len(weight), x.numel(), weight.numel()), reads=(0, 1)),
        TilesAsGiven(), Contiguous(),
    ),
    mistakes=(
        Mistake("outer_from_inner", "The result has as many columns as the weight. `outer` is the number of the "
            "weight's rows, weight.shape[0].", first=True, when=lambda case, seen, got: isinstance(got, torch.Tensor)
            and got.shape == (len(case.args[0]), case.args[1].shape[1]) != (len(case.args[0]), len(case.args[1]))),
        steps.IN_32_BITS,
        Mistake("writes_outside", "A store reaches past the result. It lacks the mask, row < rows and column < outer, "
            "or takes another distance between rows than outer.", when=first_access("writes")),
        Mistake("reads_outside", "A load reaches past an operand. Mask the rows of x with row < rows, the rows of the "
            "weight with column < outer, and both with k < inner; other=0.0.", when=steps.unmasked_load),
        steps.rounded_on_the_way(multiplied_whole),
    ),
    hints=(
        "Begin with one tile: 16 × 16 × 16, no masks, contiguous tensors. Then let the grid be (tiles of rows, tiles "
        "of columns), and begin rows at tl.program_id(0) * BLOCK_M and columns at tl.program_id(1) * BLOCK_N.",
        "Pass four strides to the kernel, x.stride(0), x.stride(1) and those of weight. A tile of x is at x_pointer + "
        "row[:, None] * x_row_stride + k[None, :] * x_inner_stride. Take the rows to int64 first.",
        "Load x with mask=(row < rows)[:, None] & (k < inner), other=0.0; weight with column < outer and k < inner.",
        'In the loop sums = tl.dot(x_tile, tl.trans(weight_tile), sums, input_precision="ieee"), with sums = '
        "tl.zeros([BLOCK_M, BLOCK_N], tl.float32) before it. k = start + tl.arange(0, BLOCK_K).",
        "Store sums.to(out_pointer.dtype.element_ty) at row[:, None] * outer + column[None, :], inside the result.",
    ),
)  # fmt: skip
