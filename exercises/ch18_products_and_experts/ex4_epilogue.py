"""Exercise 18.4: a product with a gate, biases and a residual in its epilogue."""

import math

import torch
import torch.nn.functional as F

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Mistake, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import beyond_32_bits, unit_last
from course_lib.checker.specification.requirements import MATRIX_PRODUCTS
from exercises.ch18_products_and_experts import product_steps as steps
from exercises.ch18_products_and_experts.gated_slips import CHANGES
from exercises.ch18_products_and_experts.product_steps import multiplied, numbers_of_tiles
from exercises.topics.evidence import first_access
from exercises.topics.kernel_requirements import in_one_kernel
from exercises.topics.pointers import load, put


def gated_product(x, weight, bias, residual, block_m, block_n, block_k):
    rows, columns = x.shape[0], weight.shape[0] // 2
    row, column = numbers_of_tiles(rows, block_m)[:, None], numbers_of_tiles(columns, block_n)
    x_at, gate_at, up_at = row * x.stride(0), column * weight.stride(0), (column + columns) * weight.stride(0)
    gate = multiplied(x, x_at, row < rows, weight, gate_at, column < columns, block_k)
    up = multiplied(x, x_at, row < rows, weight, up_at, column < columns, block_k)
    inside = (row < rows)[..., None] & (column < columns)[..., None, :]
    if bias is not None:
        gate = gate + load(bias, column, column < columns, 0.0).float()[..., None, :]
        up = up + load(bias, column + columns, column < columns, 0.0).float()[..., None, :]
    active = gate * torch.sigmoid(gate)
    result = active * up
    if residual is not None:
        places = row[..., None] * residual.stride(0) + column[..., None, :]
        result = result + load(residual, places, inside, 0.0).float()
    out = torch.full((rows, columns), torch.nan, dtype=x.dtype)
    put(out, row[..., None] * columns + column[..., None, :], result.to(x.dtype), inside)
    return out


def with_its_end(sums, bias, residual, dtype, silu=F.silu):
    gate, up = (sums if bias is None else sums + steps.widened(bias)).chunk(2, -1)
    result = silu(gate) * up
    return (result if residual is None else result + steps.widened(residual)).to(dtype)


def whole(x, weight, bias, residual, *blocks):
    return with_its_end(steps.widened(x) @ steps.widened(weight).mT, bias, residual, x.dtype)


def block_by_block(x, weight, bias, residual, block_m, block_n, block_k):
    sums = steps.summed_by_blocks(x, weight, block_k)
    return with_its_end(sums, bias, residual, x.dtype, lambda gate: gate / (1 + torch.exp(-gate)))


def tensors(draw, rows, hidden, inner, dtype=torch.float32, size=1.0, bias=True, residual=True):
    """x, weight, bias and residual; `size` is that of the gate's sums."""
    weight = draw.normal(2 * hidden, inner, scale=inner**-0.5)
    weight[:hidden] *= size
    given = draw.normal(rows, inner), weight, draw.normal(2 * hidden), draw.normal(rows, hidden)
    x, weight, own_bias, own_residual = (one.to(dtype) for one in given)
    return x, weight, own_bias if bias else None, own_residual if residual else None


def scaled(draw, of_x=1.0, of_gate=1.0, of_up=1.0, dtype=torch.float32):
    """x, or the sums of gate or up, are larger than usual by these factors."""
    x, weight, bias, residual = tensors(draw, 18, 40, 70)
    weight = torch.cat([weight[:40] * of_gate, weight[40:] * of_up]) / of_x
    return tuple(one.to(dtype) for one in (of_x * x, weight, bias, residual))


def negative_gates(draw, low=1.0, high=1e4, up=1.0):
    """Gates from -low to -high: silu is near 0 there, but it is not 0. up: the size of up's sums."""
    x = torch.stack([10 ** draw.uniform(20, low=math.log10(low), high=math.log10(high)), torch.ones(20)], 1)
    ups = torch.stack([torch.zeros(40), draw.normal(40, scale=up)], 1)
    return x, torch.cat([torch.tensor([[-1.0, 0.0]]).expand(40, 2), ups]), None, None


def cancelled(draw, by_the_biases):
    x, weight, bias, residual = tensors(draw, 17, 24, 40, torch.float16, 4.0)
    if by_the_biases:
        x = x[:1].expand(17, 40) + 0.01 * draw.normal(17, 40).half()
        return x, 8 * weight, bias * 0.05 - F.linear(x[:1].float(), 8 * weight.float())[0].half(), residual * 0.01
    return x, 2 * weight, bias, -whole(x.float(), 2 * weight.float(), bias.float(), None).half()


def gated_cases(draw):
    def case(name, blocks, *sizes, metered=False, **choices):
        return Case(name, (*tensors(draw, *sizes, **choices), *blocks), metered=metered)

    prime, last, half = draw.choice((37, 53, 83)), tensors(draw, 18, 18, 16), torch.float16
    alone = {"bias": False, "residual": False}
    cases = [
        case("16 × 16, 16 inner, no bias, no residual", (16, 16, 16), 16, 16, 16, **alone),
        case("20 rows, a hidden size of 40, 70 inner, no bias, no residual", (16, 32, 32), 20, 40, 70, **alone),
        case("a bias, no residual", (16, 32, 32), 20, 40, 70, residual=False),
        case("a residual, no bias", (16, 32, 32), 20, 40, 70, bias=False),
        case(f"a bias and a residual, {prime} rows", (32, 16, 32), prime, 40, 70),
        case("80 rows, a hidden size of 40: as many rows as biases", (32, 64, 64), 80, 40, 33),
        Case("gates up to ±10,000", (*scaled(draw, of_gate=2e3), 16, 32, 32)),
        Case("float16, gates up to ±10,000", (*scaled(draw, of_gate=2e3, dtype=half), 16, 32, 32)),
        Case("float16, the residual takes most of the result", (*cancelled(draw, by_the_biases=False), 16, 16, 16)),
        Case("float16, the biases take away most of the sums", (*cancelled(draw, by_the_biases=True), 16, 16, 16)),
        Case("gates from −1 to −10,000", (*negative_gates(draw), 16, 32, 16)),
        Case("gates from −12 to −40, up of a million", (*negative_gates(draw, 12, 40, 1e6), 16, 32, 16)),
        Case("up of a hundred thousand", (*scaled(draw, of_up=1e5), 16, 32, 32)),
        Case("float16, x of about 10,000", (*scaled(draw, of_x=8e3, dtype=half), 16, 32, 32)),
        case("64 × 32, 48 inner, tiles of 32 × 16, bytes counted", (32, 16, 16), 64, 32, 48, metered=True),
        case("float16, 64 × 128, one tile, bytes counted", (64, 128, 32), 64, 128, 32, half, metered=True),
        case("128 × 16, 33 inner, one tile, bytes counted", (128, 16, 32), 128, 16, 33, metered=True, **alone),
        *beyond_32_bits(draw, "rows of x", last[:1], *last[1:], 16, 16, 16),
        *beyond_32_bits(draw, "rows of weight", last[1:2], *last[2:], 16, 16, 16, before=last[:1]),
        *beyond_32_bits(draw, "rows of the residual", last[3:], 16, 16, 16, before=last[:3]),
    ]  # fmt: skip
    if draw.bfloat16:
        cases.append(case("bfloat16, 300 × 250, 200 inner", (64, 64, 32), 300, 250, 200, torch.bfloat16))
    return cases


def made(draw, *, given, blocks, x_rows, weight_rows, residual_rows, **choices):
    x, weight, bias, residual = tensors(draw, bias="a bias" in given, residual="a residual" in given, **choices)
    residual = None if residual is None else residual_rows(draw, residual)
    return x_rows(draw, x), weight_rows(draw, weight), bias, residual, *blocks


CONTRACT = Contract(
    made,
    {"rows": (1, 2, 15, 17, 33, 64, 129), "hidden": (1, 3, 16, 31, 65, 128), "inner": (1, 2, 15, 16, 33, 65, 129),
     "dtype": (torch.float32, torch.float16), "size": (Level(1.0, ""), Level(25.0, "large gates")),
     "given": ("a bias, a residual", "a bias, no residual", "no bias, a residual", "no bias, no residual"),
     "blocks": steps.BLOCKS_ASKED, "x_rows": unit_last("x"), "weight_rows": unit_last("weight"),
     "residual_rows": unit_last("residual")},
    {**dict.fromkeys(("rows", "hidden", "inner"), "All sizes are at least 1"), "dtype": "float32 or all float16",
     "size": "anywhere in ±10⁴", "given": "or None", "blocks": "16 to 128",
     **dict.fromkeys(("x_rows", "weight_rows", "residual_rows"), "may lie any distance apart")},
    lambda rows, hidden, blocks, **others: -(-rows // blocks[0]) * -(-hidden // blocks[1]) <= 12, most=18,
)  # fmt: skip


EXERCISE = Exercise(
    id="18.4", title="The end of a product", entries=("gated_product",), cases=gated_cases, oracle=whole,
    plain=(block_by_block,), contracts=(CONTRACT,), needs=TRITON, uses_dot=True,
    models=(model_of(gated_product, CHANGES, (multiplied, numbers_of_tiles), most_pairs=80),),
    requirements=(
        *in_one_kernel(*MATRIX_PRODUCTS, "einsum", "dot", "inner", "tensordot", "silu", "sigmoid", "cat", "stack",
            elements=lambda x, weight, *others: len(x) * len(weight) // 2, least_bytes=steps.loaded_and_stored,
            reads=(0, 1, 2, 3)),
        Contiguous(),
    ),
    mistakes=(
        steps.IN_32_BITS,
        steps.rounded_on_the_way(whole, "rounded_too_early"),
        Mistake("none_used", "The bias or the residual may be None: then it has no strides, and a kernel that gets "
            "None for a pointer may not load from it. It may ask `if pointer is not None`.",
            when=steps.told("NoneType")),
        Mistake("hidden_not_halved", "The result has as many columns as the weight has rows. These are gate and up "
            "together, so hidden is weight.shape[0] // 2.", first=True, when=lambda case, seen, got:
            isinstance(got, torch.Tensor) and got.dim() == 2 and got.shape[1] == case.args[1].shape[0]),
        Mistake("writes_outside", "A store reaches past the result. It lacks the mask, row < rows and column < hidden, "
            "or takes another distance between rows than hidden.",
            when=lambda case, seen, got: first_access("writes")(case, seen, got) and not seen.modified_inputs),
        Mistake("reads_outside", "A load reaches past a tensor. Mask rows of x with row < rows, rows of weight and "
            "biases with column < hidden, the residual with both, and products with k < inner.",
            when=steps.unmasked_load),
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
