"""Numbers, codes and scales for exercise 18.8, the drivers that call its functions, and what codes are right."""

from __future__ import annotations

import inspect

import torch

from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.tensor_core_model import tensor_core

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
ADDER = inspect.getsource(tensor_core)

# Drivers are sent to the worker by their source alone, so these two stand by themselves.


def as_numbers(functions, x):
    """The codes as float32, and what dtype they had."""
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


def to_code(draw, *, rows, inner, numbers="", size=1.0, dtype=torch.float32):
    x, count = draw.normal(rows, inner), -(-inner // 128)
    if size != 1:  # none is smaller than this
        x = x + x.sign()
    if numbers == "blocks of other sizes":
        x = x * torch.exp2(draw.normal(rows, count, scale=4.0)).repeat_interleave(128, dim=1)[:, :inner]
    if numbers == "blocks of zeros":
        x[:, : max(128, inner // 256 * 128)] = 0.0
    if numbers == "negative":
        x = -x.abs()
    if numbers == "one outlier":
        x[0, draw.integer(0, inner)] = 3e4
    if numbers == "ties":  # odd multiples of 16 above 256 lie between two codes, and the scale is 1
        x = 16.0 * draw.integers(rows, inner, low=-28, high=29)
        x[:, ::128] = LARGEST
    return (_apart_from_midpoints(x * size, dtype),)


def _apart_from_midpoints(x, dtype):
    """The numbers in this dtype, with 0 for those whose code a rounding of the scale or of the quotient decides."""
    x = x.to(dtype)
    found = blocks_of(x)
    scaled = x.float() / found["scales"].repeat_interleave(128, dim=1)[:, : x.shape[1]]
    unsure = torch.zeros_like(scaled, dtype=torch.bool)
    for factor in (1 - 1e-5, 1 + 1e-5):
        unsure |= (scaled * factor).clamp(-LARGEST, LARGEST).to(E4M3).float() != found["codes"]
    exact = (scaled * 2**12).round() == scaled * 2**12  # ties are exact in every form
    return torch.where(unsure & ~exact, torch.zeros_like(x), x)


def to_product(draw, *, rows, outer, inner, numbers="positive", scales="any"):
    def drawn(*shape):
        return {"positive": 0.2 + draw.uniform(*shape), "normal": draw.normal(*shape),
                "large": LARGEST * (1 + draw.uniform(*shape)) / 2}[numbers]  # fmt: skip

    def scale(*shape):
        return {"any": 0.25 + draw.uniform(*shape), "far apart": torch.exp2(40 * draw.uniform(*shape, low=-1, high=1)),
                "all 1": torch.ones(shape), "near 1e-15": 1e-15 * (0.5 + draw.uniform(*shape))}[scales]  # fmt: skip

    count = -(-inner // 128)
    x, weight = drawn(rows, inner).to(E4M3).view(torch.uint8), drawn(outer, inner).to(E4M3).view(torch.uint8)
    return ADDER, x, scale(rows, count), weight, scale(-(-outer // 128), count)


SIZES = ("blocks of other sizes", "blocks of zeros", "negative", "one outlier", "ties")
CODES = Contract(
    to_code,
    choices={
        "rows": (1, 2, 17), "inner": (1, 127, 128, 129, 300, 1200), "size": (1.0, 1e-20, 1e17),
        "numbers": (Level("", ""), *(Level(one, one) for one in SIZES)),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"rows": "at least 1 of each", "size": "between 1e-20 and 1e20 in size", "numbers": "Finite numbers",
          "dtype": "float32, float16 or bfloat16"},
    valid=lambda size, numbers, dtype, **others: size == 1 or (numbers in ("", "negative") and dtype != torch.float16),
    entry="to_blocks", driver=as_numbers, most=16,
)  # fmt: skip
PRODUCTS = Contract(
    to_product,
    choices={
        "rows": (1, 2, 17), "outer": (1, 2, 129, 600), "inner": (1, 31, 128, 129, 1000),
        "numbers": tuple(Level(one, one) for one in ("positive", "normal", "large")),
        "scales": tuple(Level(one, f"scales {one}") for one in ("any", "far apart", "all 1")),
    },
    says={"rows": "All sizes are at least 1", "outer": "one for each 128 rows and 128 columns",
          "inner": "the last may have fewer", "scales": "positive"},
    valid=lambda rows, outer, inner, **others: rows * outer * inner < 600_000,
    entry="scaled_product", driver=with_the_adder, most=14,
)  # fmt: skip
