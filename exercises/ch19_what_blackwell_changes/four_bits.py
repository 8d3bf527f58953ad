"""Numbers for exercise 19.7, the driver that calls its functions, and what they return, step by step."""

import torch

from course_lib.checker.specification.contract import Contract, Level

NUMBERS = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))
UP = torch.tensor((0.25, 1.25, 2.5, 5.0))  # exactly there the smaller code is the even one
EVEN = torch.tensor((0.75, 1.75, 3.5))  # and here the larger one


def restored(functions, name, bits):
    """The numbers that codes stand for, and the scales. Numbers come as bits, because the judge moves floats by a
    rounding, and what lies halfway must stay there. It is sent to the worker by its source alone."""
    result = functions[name](bits.view(torch.float32))
    codes, *scales = result if isinstance(result, (tuple, list)) else (result,)
    for given, kind in zip((codes, *scales[:-1]), (torch.uint8, torch.float8_e4m3fn)):
        if given.dtype != kind:
            raise TypeError(f"{name} returned {given.dtype} where it must return {kind}")
    sizes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    halves = torch.stack((codes.long() % 16, codes.long() // 16 % 16), dim=-1).flatten(-2)
    told = {"codes": sizes[halves % 8] * (1 - halves // 8 * 2)}
    if len(scales) == 2:
        return {**told, "scales": scales[0].float(), "row_scales": scales[1]}
    return {**told, "exponents": scales[0]} if scales else told


def coded(numbers):
    sizes = numbers.abs()[..., None]
    code = (sizes > UP).sum(-1) + (sizes >= EVEN).sum(-1)
    code = code + 8 * (numbers < 0)
    low, high = code[:, 0::2], code[:, 1::2]
    byte = low + 16 * high
    return {"codes": NUMBERS[torch.stack((byte % 16, byte // 16), -1).flatten(-2)]}


def in_codes(name, bits):
    return coded(bits.view(torch.float32))


def in_mxfp4(name, bits):
    blocks = bits.view(torch.float32).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1)
    quotient = largest.double() / 6  # float32 would round the logarithm
    exponent = torch.log2(quotient).ceil().clamp(min=-127).float()
    numbers = blocks / torch.exp2(exponent)[..., None]
    return {**coded(numbers.flatten(-2)), "exponents": (exponent + 127).to(torch.uint8)}


def in_nvfp4(name, bits):
    x = bits.view(torch.float32)
    blocks = x.unflatten(-1, (-1, 16))
    top, largest = x.abs().amax(-1), blocks.abs().amax(-1)
    row = torch.where(top > 0, top / (448 * 6), 1.0)
    exact = (largest / 6 / row[:, None]).clamp(min=1 / 64)
    scale = exact.to(torch.float8_e4m3fn).float()
    numbers = blocks / (scale * row[:, None])[..., None]
    return {**coded(numbers.flatten(-2)), "scales": scale, "row_scales": row}


def to_code(draw, *, rows, columns, numbers):
    x = draw.normal(rows, columns, scale=40.0 if numbers == "up to 100" else 3.0).clamp(-100, 100)
    return "to_codes", ((4 * x).round() / 4 if numbers == "halfway" else x).view(torch.int32)


def drawn(draw, rows, columns, numbers, size):
    x = draw.normal(rows, columns)
    if size != 1:  # none is smaller than this
        x = size * (x + x.sign())
    if numbers == "blocks of other sizes":
        x = x * torch.exp2(draw.normal(rows, columns // 16, scale=4.0)).repeat_interleave(16, dim=1)
    if numbers == "zeros":
        x[:, :32], x[-1] = 0.0, 0.0
    if numbers == "halfway":  # the largest number of a row makes its scale 2^n, that of a block 6 · 2^n
        x = draw.integers(rows, columns, low=-24, high=25) / 4.0
        x[:, ::16] = 6.0
        x = x * torch.exp2(draw.integers(rows, columns // 16, low=-5, high=9)).repeat_interleave(16, dim=1)
        x[:, :32] = 0.0
        x[:, draw.integer(0, 16)] = 448.0 * 6
    return x


def to_mx(draw, **choices):
    return "to_mxfp4", drawn(draw, **choices).view(torch.int32)


def to_nv(draw, **choices):
    """Zeros in place of blocks whose scale a rounding decides, and of numbers whose code one decides."""
    x, less, more = drawn(draw, **choices), 1 - 1e-5, 1 + 1e-5
    row = in_nvfp4("", x.view(torch.int32))["row_scales"][:, None]
    exact, e4m3 = x.unflatten(-1, (-1, 16)).abs().amax(-1) / 6 / row, torch.float8_e4m3fn
    sure = (exact * less).to(e4m3).float() == (exact * more).to(e4m3).float()
    x = torch.where(sure.repeat_interleave(16, dim=1), x, 0.0)
    quotient = x / (in_nvfp4("", x.view(torch.int32))["scales"] * row).repeat_interleave(16, dim=1)
    sure = coded(quotient * less)["codes"] == coded(quotient * more)["codes"]
    return "to_nvfp4", torch.where(sure | (4 * quotient == (4 * quotient).round()), x, 0.0).view(torch.int32)


KINDS = (Level("", ""), *(Level(one, one) for one in ("blocks of other sizes", "zeros", "halfway")))
CHOICES = {"rows": (1, 2, 17), "columns": (32, 64, 96, 320), "numbers": KINDS, "size": (1.0, 1e-30, 1e29)}
SAYS = {"rows": "At least 1 row", "columns": "a multiple of 32", "numbers": "0 or between", "size": "1e-30 and 1e30"}
SCALED = {
    "choices": CHOICES, "says": SAYS, "driver": restored, "most": 16,
    "valid": lambda rows, columns, numbers, size: (size == 1 or numbers in ("", "zeros"))
    and (columns > 32 or numbers != "halfway"),
}  # fmt: skip
CONTRACTS = (
    Contract(to_code, {"rows": (1, 2, 17), "columns": (2, 6, 130), "numbers": ("any numbers", "halfway", "up to 100")},
             {"rows": "at least 1 row", "columns": "even, at least 2", "numbers": "At most 100 in size"},
             entry="to_codes", driver=restored, most=12),
    Contract(to_mx, entry="to_mxfp4", **SCALED), Contract(to_nv, entry="to_nvfp4", **SCALED),
)  # fmt: skip
