"""Exercise 18.4: a product with a gate, biases and a residual in its epilogue."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS
from exercises.ch18_products_and_experts import gated_inputs as inputs
from exercises.ch18_products_and_experts import product_steps as steps
from exercises.ch18_products_and_experts.gated_slips import CHANGES
from exercises.ch18_products_and_experts.product_steps import multiplied, numbers_of_tiles
from exercises.topics.evidence import first_access
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import load, put

NAN = math.nan


def gated_product(x, weight, bias, residual, block_m, block_n, block_k):
    rows, columns = x.shape[0], weight.shape[0] // 2
    row, column = numbers_of_tiles(rows, block_m)[:, None], numbers_of_tiles(columns, block_n)
    gate = multiplied(x, weight, row, column, rows, columns, 0, block_k)
    up = multiplied(x, weight, row, column, rows, columns, columns, block_k)
    inside = (row < rows)[..., None] & (column < columns)[..., None, :]
    if bias is not None:
        gate = gate + load(bias, column, column < columns, 0.0).float()[..., None, :]
        up = up + load(bias, column + columns, column < columns, 0.0).float()[..., None, :]
    active = gate * torch.sigmoid(gate)
    result = active * up
    if residual is not None:
        places = row[..., None] * residual.stride(0) + column[..., None, :]
        result = result + load(residual, places, inside, 0.0).float()
    out = torch.full((rows, columns), NAN, dtype=x.dtype)
    put(out, row[..., None] * columns + column[..., None, :], result.to(x.dtype), inside)
    return out


def gated_cases(draw):
    def case(name, blocks, *sizes, metered=False, **choices):
        return Case(name, (*inputs.tensors(draw, *sizes, **choices), *blocks), metered=metered)

    prime, last, alone = draw.choice((37, 53, 83)), inputs.tensors(draw, 18, 18, 16), {"bias": False, "residual": False}
    cases = [
        case("16 × 16, 16 inner, no bias, no residual", (16, 16, 16), 16, 16, 16, **alone),
        case("20 rows, a hidden size of 40, 70 inner, no bias, no residual", (16, 32, 32), 20, 40, 70, **alone),
        case("a bias, no residual", (16, 32, 32), 20, 40, 70, residual=False),
        case("a residual, no bias", (16, 32, 32), 20, 40, 70, bias=False),
        case(f"a bias and a residual, {prime} rows", (32, 16, 32), prime, 40, 70),
        case("80 rows, a hidden size of 40: as many rows as biases", (32, 64, 64), 80, 40, 33),
        Case("gates up to ±10,000", (*inputs.large_gates(draw), 16, 32, 32)),
        Case("float16, gates up to ±10,000", (*(one.half() for one in inputs.large_gates(draw)), 16, 32, 32)),
        Case("float16, the residual takes most of the result", (*inputs.cancelling(draw, "residual"), 16, 16, 16)),
        Case("float16, the biases take away most of the sums", (*inputs.cancelling(draw, "bias"), 16, 16, 16)),
        Case("rows with gaps that hold NaN", (*inputs.all_in_nan(inputs.tensors(draw, 20, 24, 40)), 16, 16, 32)),
        Case("gates from −1 to −10,000", (*inputs.negative_gates(draw), 16, 32, 16)),
        Case("gates from −12 to −40, up of a million", (*inputs.negative_gates(draw, 12, 40, 1e6), 16, 32, 16)),
        Case("up of a hundred thousand", (*inputs.large_numbers(draw, 1.0, 1e5), 16, 32, 32)),
        Case("float16, x of about 10,000", (*(one.half() for one in inputs.large_numbers(draw, 8e3, 1.0)), 16, 32, 32)),
        Case("1 row, 1 hidden, 1 inner, with gaps", (*inputs.all_in_nan(inputs.tensors(draw, 1, 1, 1)), 16, 16, 16)),
        case("64 × 32, 48 inner, tiles of 32 × 16, bytes counted", (32, 16, 16), 64, 32, 48, metered=True),
        case("float16, 64 × 128, one tile, bytes counted", (64, 128, 32), 64, 128, 32, torch.float16, residual=False,
            metered=True),
        case("128 × 16, 33 inner, one tile, bytes counted", (128, 16, 32), 128, 16, 33, metered=True, **alone),
        *beyond_32_bits(draw, "rows of x", last[:1], *last[1:], 16, 16, 16),
        *beyond_32_bits(draw, "rows of weight", last[1:2], *last[2:], 16, 16, 16, before=last[:1]),
        *beyond_32_bits(draw, "rows of the residual", last[3:], 16, 16, 16, before=last[:3]),
    ]  # fmt: skip
    if draw.bfloat16:
        cases.append(case("bfloat16, 300 × 250, 200 inner", (64, 64, 32), 300, 250, 200, torch.bfloat16))
    return cases


def made(draw, *, rows, hidden, inner, dtype, size, given, blocks, x_rows, weight_rows, residual_rows):
    x, weight, bias, residual = inputs.tensors(draw, rows, hidden, inner, dtype, size, *given)
    residual = None if residual is None else residual_rows(draw, residual)
    return x_rows(draw, x), weight_rows(draw, weight), bias, residual, *blocks


CONTRACT = Contract(
    made,
    choices={
        "rows": (1, 2, 15, 17, 33, 64, 129), "hidden": (1, 3, 16, 31, 65, 128), "inner": (1, 2, 15, 16, 33, 65, 129),
        "dtype": (torch.float32, torch.float16), "size": (Level(1.0, ""), Level(25.0, "large gates")),
        "given": tuple(Level((bias, residual), f"{'a' if bias else 'no'} bias, {'a' if residual else 'no'} residual")
                       for bias in (True, False) for residual in (True, False)),
        "blocks": steps.BLOCKS_ASKED,
        "x_rows": unit_last("x"), "weight_rows": unit_last("weight"), "residual_rows": unit_last("residual"),
    },
    says={
        **dict.fromkeys(("rows", "hidden", "inner"), "All sizes are at least 1"), "dtype": "float32 or all float16",
        "size": "anywhere in ±10⁴", "given": "or None", "blocks": "16 to 128",
        **dict.fromkeys(("x_rows", "weight_rows", "residual_rows"), "may lie any distance apart"),
    },
    valid=lambda rows, hidden, blocks, **others: -(-rows // blocks[0]) * -(-hidden // blocks[1]) <= 12, most=18,
)  # fmt: skip


def loaded_and_stored(x, weight, bias, residual, block_m, block_n, block_k):
    """Each program's rows of x, gate and up, whole tiles; the biases of each; the residual and the result once."""
    (rows, inner), hidden = x.shape, weight.shape[0] // 2
    programs = -(-rows // block_m) * -(-hidden // block_n)
    numbers = programs * ((block_m + 2 * block_n) * inner + 2 * block_n * (bias is not None))
    return x.element_size() * (numbers + rows * hidden * (1 + (residual is not None)))


EXERCISE = Exercise(
    id="18.4", title="The end of a product", entries=("gated_product",), cases=gated_cases, oracle=inputs.whole,
    plain=(inputs.block_by_block,), contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(gated_product, CHANGES, (multiplied, numbers_of_tiles), most_pairs=80),),
    requirements=(
        *in_one_kernel(
            *MATRIX_PRODUCTS, "einsum", "dot", "inner", "tensordot", "silu", "sigmoid", "cat", "stack",
            elements=lambda x, weight, *others: x.shape[0] * weight.shape[0] // 2,
            least_bytes=loaded_and_stored, reads=(0, 1, 2, 3),
        ),
        Contiguous(),
    ),
    mistakes=(
        steps.IN_32_BITS,
        steps.rounded_on_the_way(inputs.whole, "rounded_too_early"),
        Mistake("none_used", "The bias or the residual may be None: then there is nothing to ask for its strides, and "
            "a kernel that gets None for a pointer may not load from it. It may ask `if pointer is not None`.",
            when=lambda case, seen, got: seen.error is not None and "NoneType" in seen.error.text),
        Mistake("hidden_not_halved", "The result has as many columns as the weight has rows. These are gate and up "
            "together, so hidden is weight.shape[0] // 2.", first=True,
            when=lambda case, seen, got: isinstance(got, torch.Tensor) and got.dim() == 2
            and got.shape[1] == case.args[1].shape[0]),
        Mistake("writes_outside", "A store reaches past the result. Either it lacks the mask, row < rows and column "
            "< hidden, or it takes another distance between rows than hidden.",
            when=lambda case, seen, got: first_access("writes")(case, seen, got) and not seen.modified_inputs),
        Mistake("reads_outside", "A load reaches past a tensor. Mask the rows of x with row < rows, rows of the weight "
            "and biases with column < hidden, the residual with both, and products with k < inner.",
            when=lambda case, seen, got: first_access("reads", whole=True)(case, seen, got) and steps.is_cut(case)),
    ),
    hints=(
        "Begin with the product of 18.2, and give it a second sum: two tiles of the weight for each tile of x. Column "
        "c of the result belongs to the weight's rows c and hidden + c.",
        "hidden is weight.shape[0] // 2, and the grid counts tiles of hidden. In the loop load x_tile once, gate_tile "
        "and up_tile, and call tl.dot twice, each with its own sums.",
        "After the loop, if bias_pointer is not None, add tl.load(bias_pointer + column, ...) to every row of gate, as "
        "[None, :], and tl.load(bias_pointer + hidden + column, ...) to up.",
        "result = gate * tl.sigmoid(gate) * up, in float32. Do not write gate * exp(gate) / (1 + exp(gate)).",
        "If residual_pointer is not None, add residual_pointer + row[:, None] * residual_stride + column[None, :] as "
        "float32, masked like the store. Then round once, to out_pointer.dtype.element_ty.",
    ),
)  # fmt: skip
