"""Exercise 18.8: 8-bit numbers with a scale for each block, and a product that a narrow adder adds block by block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from course_lib.checker import Case, Exercise, Mistake, model_of
from course_lib.checker.specification.requirements import Requirement
from course_lib.hardware.tensor_core_model import tensor_core
from exercises.ch18_products_and_experts.block_inputs import CODES, PRODUCTS, blocks_of, to_code, to_product
from exercises.ch18_products_and_experts.block_slips import IN_CODES, IN_PRODUCT


@dataclass(frozen=True)
class ByTheTensorCore(Requirement):
    """Each product of x and weight is made by the tensor core; zeros that fill blocks up may be there too."""

    id: str = "not_by_the_tensor_core"

    def complaint(self, case, seen):
        if len(case.args) != 5 or "products" not in seen.noted:
            return None
        needed, made = len(case.args[1]) * case.args[3].numel(), seen.noted["products"]
        if made >= needed:
            return None
        return (
            f"The tensor core was asked for {made:,} products, and x and weight have {needed:,}. All of them are made "
            "by it."
        )


def product_of(adder, x, x_scales, weight, weight_scales):
    a, b = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
    outer, inner = b.shape
    total = torch.zeros(len(a), outer, dtype=x_scales.dtype)
    for begin in range(0, inner, 128):
        block, end = begin // 128, begin + 128
        row_scale = x_scales[:, block, None]
        column_scale = weight_scales[:, block].repeat_interleave(128)[:outer]
        scale = row_scale * column_scale
        sums = tensor_core(a[:, begin:end], b[:, begin:end], None).to(total.dtype)
        total = total + sums * scale
    return total


def level_cases(draw):
    def code(name, x=None, **choices):
        args = to_code(draw, **choices) if x is None else (x,)
        return Case(name, args, "to_blocks", driver=CODES.driver)

    def product(name, **choices):
        return Case(name, to_product(draw, **choices), "scaled_product", driver=PRODUCTS.driver)

    return [
        code("one block: 896, 100, -200, 0", x=torch.tensor([[896.0, 100.0, -200.0, 0.0]])),
        code("3 rows of 256", rows=3, inner=256),
        code("a row of 129: the last block has one number", rows=2, inner=129),
        code("the largest is negative", x=torch.tensor([[1.0, -56.0, 20.0]])),
        code("a block of zeros", rows=2, inner=256, numbers="blocks of zeros"),
        code("blocks of other sizes", rows=4, inner=512, numbers="blocks of other sizes"),
        code("numbers between two codes", rows=4, inner=256, numbers="ties"),
        code("numbers around 1e-15", rows=2, inner=140, size=1e-17),
        product("product: one block, scales of 1", rows=2, outer=3, inner=128, scales="all 1"),
        product("product: one block", rows=2, outer=3, inner=128),
        product("product: one block, scales near 1e-15", rows=2, outer=3, inner=100, scales="near 1e-15"),
        product("product: 4 blocks", rows=3, outer=5, inner=512, numbers="normal"),
        product("product: 8 blocks, positive, scales of 1", rows=2, outer=4, inner=1024, scales="all 1"),
        product("product: 8 blocks, positive", rows=2, outer=4, inner=1024),
        product("product: 300 rows of weight", rows=2, outer=300, inner=256),
        product("product: inner 129", rows=3, outer=4, inner=129),
        product("product: 2,500 columns", rows=2, outer=2, inner=2500, scales="far apart"),
    ]


def each_of(numbers, width):
    """The scale of each number, in blocks of another width."""
    rows, inner = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -inner % width)).view(rows, -1, width)
    largest = padded.abs().amax(-1)
    return torch.where(largest > 0, largest / 448, 1.0).repeat_interleave(width, dim=1)[:, :inner]


def requantised(codes, begin, scale):
    return (codes[:, begin : begin + 128].float() * scale.float()).to(torch.float8_e4m3fn)


def told(words):
    return lambda case, seen, got: seen.error is not None and words in seen.error.text


def fails_on_a_shorter_block(case, seen, got):
    return len(case.args) == 1 and seen.error is not None and case.args[0].shape[1] % 128 != 0


EXERCISE = Exercise(
    id="18.8", title="FP8 with scales: a sum in two levels", entries=("to_blocks", "scaled_product"), cases=level_cases,
    oracle={"to_blocks": blocks_of, "scaled_product": product_of}, contracts=(CODES, PRODUCTS),
    models=(
        model_of(blocks_of, IN_CODES, uses=(each_of,), entry="to_blocks"),
        model_of(product_of, IN_PRODUCT, uses=(requantised,), entry="scaled_product"),
    ),
    requirements=(ByTheTensorCore(),),
    mistakes=(
        Mistake("not_float8", "The tensor core takes float8_e4m3fn with n up to 128: blocks of the codes as they "
            "are. Scale the sums that come out of it.", when=told("tensor_core takes"), first=True),
        Mistake("fails_on_a_shorter_block", "It fails where inner is no multiple of 128. Fill the row up with zeros, "
            "or let the last block be shorter.", when=fails_on_a_shorter_block),
        Mistake("another_format", "The codes are not float8_e4m3fn. Cast them with .to(torch.float8_e4m3fn).",
            first=True, when=lambda case, seen, got: isinstance(got, dict) and got["dtype"] != "torch.float8_e4m3fn"),
    ),
    hints=(
        "to_blocks: fill each row up with zeros to a multiple of 128, and view it as [rows, blocks, 128]. Then the "
        "largest magnitude of the last axis gives the scales.",
        "torch.where(largest > 0, largest / 448, 1.0) is the scale. Divide before you cast: "
        "(blocks / scales[:, :, None]).view(rows, -1)[:, :inner].to(torch.float8_e4m3fn).",
        "scaled_product: go through the blocks. sums = tensor_core(x[:, part], weight[:, part], None), where part is "
        "slice(128 * i, 128 * i + 128). The None makes it begin from zeros.",
        "total += sums * x_scales[:, i, None] * weight_scales[:, i].repeat_interleave(128)[:outer], with a float32 "
        "total. The scales multiply the sums: scaled codes would have to be rounded again.",
    ),
)  # fmt: skip
