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


def numbers_near_codes(draw, rows, inner, growth=0.0, ties=False):
    """float32 numbers whose quotients by their scale lie near e4m3 numbers, or exactly between two of them."""
    codes = (draw.normal(rows, inner) * 90).clamp(-400, 400).to(E4M3).float()
    count = -(-inner // 128)
    for block in range(count):
        width = min(128, inner - 128 * block)
        place = 128 * block + draw.integers(rows, low=0, high=width)
        codes[torch.arange(rows), place] = LARGEST * (1 - 2 * draw.integers(rows, low=0, high=2)).float()
    scales = torch.exp2(growth * draw.uniform(rows, count, low=-1, high=1).round(decimals=1))
    if ties:
        between = (codes.abs() >= 16) & (codes.abs() < 448) & (draw.uniform(rows, inner) < 0.5)
        step = torch.exp2(codes.abs().clamp(min=1).log2().floor() - 4)  # half of what lies between two codes
        codes, scales = torch.where(between, codes + codes.sign() * step, codes), torch.exp2(scales.log2().round())
    else:
        jitter = 1 + 0.015 * draw.uniform(rows, inner, low=-1, high=1)
        codes = torch.where(codes.abs() == LARGEST, codes, codes * jitter)
    return codes * scales.repeat_interleave(128, dim=1)[:, :inner]


def to_code(draw, *, rows, inner, numbers="", size=1.0, dtype=torch.float32):
    x = numbers_near_codes(draw, rows, inner, 6.0 if numbers == "blocks of other sizes" else 0.0, numbers == "ties")
    if numbers == "blocks of zeros":
        x[:, : max(128, inner // 256 * 128)] = 0.0
    if numbers == "all zeros":
        x = x * 0
    if numbers == "negative":
        x = -x.abs()
    if numbers == "one outlier":
        x[0, draw.integer(0, inner)] = 3e4
    return (_apart_from_midpoints(x * size, dtype),)


def _apart_from_midpoints(x, dtype):
    """The numbers in this dtype; where its rounding, or an outlier's scale, put one near a midpoint, the number is "
    "0."""
    x = x.to(dtype)
    found = blocks_of(x)
    scaled = x.float() / found["scales"].repeat_interleave(128, dim=1)[:, : x.shape[1]]
    unsure = torch.zeros_like(scaled, dtype=torch.bool)
    for factor in (1 - 1e-5, 1 + 1e-5):
        unsure |= (scaled * factor).clamp(-LARGEST, LARGEST).to(E4M3).float() != found["codes"]
    exact = (scaled * 2**12).round() == scaled * 2**12  # ties are exact in every form
    return torch.where(unsure & ~exact, torch.zeros_like(x), x)


def to_product(draw, *, rows, outer, inner, numbers="positive", scales="any"):
    count, tall = -(-inner // 128), -(-outer // 128)
    x, weight = draw.normal(rows, inner), draw.normal(outer, inner)
    if numbers == "positive":
        x, weight = 0.2 + draw.uniform(rows, inner), 0.2 + draw.uniform(outer, inner)
    if numbers == "large":
        x, weight = x * 100, weight * 100
    x_scales, weight_scales = 0.25 + draw.uniform(rows, count), 0.25 + draw.uniform(tall, count)
    if scales == "far apart":
        x_scales, weight_scales = torch.exp2(8 * (x_scales - 0.75)), torch.exp2(8 * (weight_scales - 0.75))
    if scales == "all 1":
        x_scales, weight_scales = torch.ones_like(x_scales), torch.ones_like(weight_scales)
    codes = (part.clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8) for part in (x, weight))
    x, weight = codes
    return ADDER, x, x_scales, weight, weight_scales


SIZES = ("blocks of other sizes", "blocks of zeros", "all zeros", "negative", "one outlier", "ties")
CODES = Contract(
    to_code,
    choices={
        "rows": (1, 2, 17), "inner": (1, 2, 127, 128, 129, 300, 640), "size": (1.0, 1e-20, 1e17),
        "numbers": (Level("", ""), *(Level(one, one) for one in SIZES)),
        "dtype": (torch.float32, torch.float16, torch.bfloat16),
    },
    says={"rows": "at least 1 of each", "size": "between 1e-20 and 1e20 in size", "numbers": "Finite numbers",
          "dtype": "float32, float16 or bfloat16"},
    valid=lambda size, numbers, dtype, **others: (size == 1.0 or numbers in ("", "negative", "all zeros"))
    and (dtype == torch.float32 or numbers not in ("blocks of other sizes", "ties")) and (dtype != torch.float16
    or size == 1.0),
    entry="to_blocks", driver=as_numbers, most=20,
)  # fmt: skip
PRODUCTS = Contract(
    to_product,
    choices={
        "rows": (1, 2, 17), "outer": (1, 2, 127, 129, 257), "inner": (1, 31, 128, 129, 300, 1000),
        "numbers": tuple(Level(one, one) for one in ("positive", "normal", "large")),
        "scales": tuple(Level(one, f"scales {one}") for one in ("any", "far apart", "all 1")),
    },
    says={"rows": "All sizes at least 1", "outer": "one for each 128 rows and 128 columns",
          "inner": "the last may have fewer", "scales": "positive"},
    valid=lambda rows, outer, inner, **others: rows * outer * inner < 600_000,
    entry="scaled_product", driver=with_the_adder, most=14,
)  # fmt: skip
