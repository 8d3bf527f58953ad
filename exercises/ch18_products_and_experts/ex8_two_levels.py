"""Exercise 18.8: 8-bit numbers with a scale for each block, and a product that a narrow adder adds block by block."""

import inspect
from dataclasses import dataclass

import torch

from course_lib.checker import Case, Exercise, Mistake, Requirement, model_of
from course_lib.checker.specification.contract import Contract
from course_lib.hardware.tensor_core_model import tensor_core
from exercises.ch18_products_and_experts.block_slips import IN_CODES, IN_PRODUCT
from exercises.ch18_products_and_experts.product_steps import told

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
ADDER = inspect.getsource(tensor_core)


def as_numbers(functions, x):
    """The codes as float32, and what dtype they had. Like the next driver it is sent to the worker by its source."""
    codes, scales = functions["to_blocks"](x)
    return {"codes": codes.float(), "dtype": str(codes.dtype), "scales": scales}


def with_the_adder(functions, adder, x, x_scales, weight, weight_scales):
    """The product of codes given as bytes; how many products the tensor core was asked for is noted."""
    scope, asked = {"torch": torch}, [0]
    exec(adder, scope)

    def tensor_core(a, b, sums=None):
        asked[0] += len(a) * b.numel()
        return scope["tensor_core"](a, b, sums)

    x, weight = x.view(torch.float8_e4m3fn), weight.view(torch.float8_e4m3fn)
    result = functions["scaled_product"](x, x_scales, weight, weight_scales, tensor_core)
    functions.noted["products"] = asked[0]
    return result


@dataclass(frozen=True)
class ByTheTensorCore(Requirement):
    """Each product of x and weight is made by the tensor core; zeros that fill blocks up may be there too."""

    id: str = "not_by_the_tensor_core"

    def complaint(self, case, seen):
        if len(case.args) != 5 or "products" not in seen.noted:
            return None
        needed, made = len(case.args[1]) * case.args[3].numel(), seen.noted["products"]
        told = f"The tensor core was asked for {made:,} products, and x and weight have {needed:,}. It makes all."
        return told if made < needed else None


def blocks_of(x):
    numbers = x.to(torch.promote_types(x.dtype, torch.float32))
    rows, inner = x.shape
    count = -(-inner // 128)
    padded = torch.nn.functional.pad(numbers, (0, count * 128 - inner)).view(rows, count, 128)
    largest = padded.abs().amax(-1)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    each = scales.repeat_interleave(128, dim=1)[:, :inner]
    scaled = numbers / each
    codes = scaled.to(torch.float8_e4m3fn).float()
    return {"codes": codes, "dtype": "torch.float8_e4m3fn", "scales": scales}


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


def to_code(draw, rows, inner, numbers="", size=1.0, dtype=torch.float32):
    """Numbers of this size, with 0 for those whose code a rounding of the scale or of the quotient decides."""
    x, place, blocks = draw.normal(rows, inner), torch.arange(inner), -(-inner // 128)
    x = x + x.sign() * (size != 1)  # none is smaller than the size
    x = {
        "": x, "negative": -x.abs(), "blocks of zeros": torch.where(place < max(128, inner // 256 * 128), 0.0, x),
        "blocks of other sizes": x * torch.exp2(draw.normal(rows, blocks, scale=4.0))[:, place // 128],
        "one outlier": x + 3e4 * torch.eye(rows, inner).roll(draw.integer(0, inner), 1),
        # odd multiples of 16 above 256 lie between two codes, and the scale is 1
        "ties": torch.where(place % 128 > 0, 16.0 * draw.integers(rows, inner, low=-28, high=29), LARGEST),
    }[numbers]  # fmt: skip
    x = (x * size).to(dtype)
    scaled = x.float() / blocks_of(x)["scales"].repeat_interleave(128, dim=1)[:, : x.shape[1]]
    less, more = ((scaled * factor).clamp(-LARGEST, LARGEST).to(E4M3).float() for factor in (1 - 1e-5, 1 + 1e-5))
    exact = (scaled * 2**12).round() == scaled * 2**12  # ties are exact in every form
    return (torch.where((less != more) & ~exact, torch.zeros_like(x), x),)


def to_product(draw, rows, outer, inner, numbers="positive", scales="any scales"):
    def drawn(*shape):
        share = draw.uniform(*shape)
        values = {"positive": 0.2 + share, "normal": draw.normal(*shape), "large": LARGEST * (1 + share) / 2}[numbers]
        return values.to(E4M3).view(torch.uint8)

    def scale(*shape):
        share = draw.uniform(*shape)
        return {"any scales": 0.25 + share, "scales far apart": torch.exp2(80 * share - 40),
                "scales of 1": torch.ones(shape), "scales near 1e-15": 1e-15 * (0.5 + share)}[scales]  # fmt: skip

    count = -(-inner // 128)
    return ADDER, drawn(rows, inner), scale(rows, count), drawn(outer, inner), scale(-(-outer // 128), count)


def level_cases(draw):
    worked = {"one block: 896, 100, -200, 0": (896.0, 100.0, -200.0, 0.0), "the largest is negative": (1.0, -56.0, 9.0)}
    coded = {
        "3 rows of 256": (3, 256), "a row of 129: the last block has one number": (2, 129),
        "a block of zeros": (2, 256, "blocks of zeros"), "blocks of other sizes": (4, 512, "blocks of other sizes"),
        "numbers between two codes": (4, 256, "ties"), "numbers around 1e-15": (2, 140, "", 1e-17),
    }  # fmt: skip
    products = {
        "one block, scales of 1": (2, 3, 128, "positive", "scales of 1"), "one block": (2, 3, 128),
        "one block, scales near 1e-15": (2, 3, 100, "positive", "scales near 1e-15"), "inner 129": (3, 4, 129),
        "8 blocks, positive, scales of 1": (2, 4, 1024, "positive", "scales of 1"), "4 blocks": (3, 5, 512, "normal"),
        "300 rows of weight": (2, 300, 256), "8 blocks, positive": (2, 4, 1024),
        "2,500 columns": (2, 2, 2500, "positive", "scales far apart"),
    }  # fmt: skip
    return [
        *(Case(name, (torch.tensor([x]),), "to_blocks", as_numbers) for name, x in worked.items()),
        *(Case(name, to_code(draw, *choices), "to_blocks", as_numbers) for name, choices in coded.items()),
        *(Case(f"product: {name}", to_product(draw, *choices), "scaled_product", with_the_adder)
          for name, choices in products.items()),
    ]  # fmt: skip


CODES = Contract(
    to_code,
    {"rows": (1, 2, 17), "inner": (1, 127, 128, 129, 300, 1200), "size": (1.0, 1e-20, 1e17),
     "numbers": ("", "blocks of other sizes", "blocks of zeros", "negative", "one outlier", "ties"),
     "dtype": (torch.float32, torch.float16, torch.bfloat16)},
    {"rows": "at least 1 of each", "size": "between 1e-20 and 1e20 in size", "numbers": "Finite numbers",
     "dtype": "float32, float16 or bfloat16"},
    lambda size, numbers, dtype, **others: size == 1 or (numbers in ("", "negative") and dtype != torch.float16),
    entry="to_blocks", driver=as_numbers, most=16,
)  # fmt: skip
PRODUCTS = Contract(
    to_product,
    {"rows": (1, 2, 17), "outer": (1, 2, 129, 600), "inner": (1, 31, 128, 129, 1000),
     "numbers": ("positive", "normal", "large"), "scales": ("any scales", "scales far apart", "scales of 1")},
    {"rows": "All sizes are at least 1", "outer": "one for each 128 rows and 128 columns",
     "inner": "the last may have fewer", "scales": "positive"},
    lambda rows, outer, inner, **others: rows * outer * inner < 600_000,
    entry="scaled_product", driver=with_the_adder, most=14,
)  # fmt: skip


EXERCISE = Exercise(
    id="18.8", title="FP8 with scales: a sum in two levels", entries=("to_blocks", "scaled_product"), cases=level_cases,
    oracle={"to_blocks": blocks_of, "scaled_product": product_of}, contracts=(CODES, PRODUCTS),
    models=(model_of(blocks_of, IN_CODES, entry="to_blocks"), model_of(product_of, IN_PRODUCT, entry="scaled_product")),
    requirements=(ByTheTensorCore(),),
    mistakes=(
        Mistake("not_float8", "The tensor core takes float8_e4m3fn with n up to 128: blocks of the codes as they "
            "are. Scale the sums that come out of it.", when=told("tensor_core takes"), first=True),
        Mistake("fails_on_a_shorter_block", "It fails where inner is no multiple of 128. Fill the row up with zeros.",
            when=lambda case, seen, got: len(case.args) == 1 and seen.error and case.args[0].shape[1] % 128 != 0),
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
