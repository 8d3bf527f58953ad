"""Tensors in 4 bits: e2m1 codes, and a scale for each block of neighbours in a row.

    MXFP4   x ≈ code · 2^e              32 numbers a block, e in a byte (e8m0)               4 + 8/32 = 4.25 bits
    NVFP4   x ≈ code · scale · tensor   16 numbers a block, scale e4m3, tensor one float32   4 + 8/16 = 4.5 bits

A code is a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Numbers become the nearest code, of two equally near the even
one. Two codes share a byte, the first in its low half. Blocks lie along the last dimension, whose last one may be
short: numbers that are not there count as 0.

**MXFP4** e is the smallest for which the largest number of the block is at most 6 · 2^e: ⌈log2(largest / 6)⌉. It is
rounded up, because powers of 2 lie far apart. The nearest one, 2^round(log2(largest / 6)), cuts a largest number of up
to 6√2 to 6, which loses 1 - 1/√2 = 29.3 % of it. The rule in the OCP's text, ⌊log2 largest⌋ - 2, cuts up to 8: 25 %.

**NVFP4** tensor = largest of all / (448 · 6), so the block that holds it has the scale 448, e4m3's largest. Scales are
rounded to the nearest e4m3, no smaller than 2^-6, where e4m3 has all of its digits. That makes a scale too small by
1/17 at most, and a block's largest number 6.375 instead of 6 scales. It becomes 6, as everything up to 7 would.

So in both no number is off by more than half the distance of its neighbouring codes. Of the largest number L of its
block that is at most L/5 in MXFP4 (5 · 2^e, between 4 and 6) and 17/96 L in NVFP4, beside the smallest of its scales.

Bytes: n numbers of 2 bytes read and n/2 + n/32 (or n/16) written; NVFP4 reads them once more, for the tensor's largest.
FLOPs: none to speak of. A Blackwell GPU has an instruction for the codes, and multiplies them with their scales in its
matrix units; there it wants the scales in an order of its own. Here they lie as the blocks do.

Source: Open Compute Project, Microscaling Formats (MX) Specification 1.0; the formats in attention: SageAttention3,
arXiv 2505.11594; FlashAttention-4, arXiv 2603.05451.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_tensor
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.quantised.formats import check_finite, pack_halves, unpack_halves
from course_lib.kernels.quantised.fp8 import E4M3_MAX
from course_lib.kernels.quantised.parts import bounded, e2m1_codes, e2m1_numbers, e4m3_bytes, e4m3_numbers

E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
E2M1_MAX = tl.constexpr(6.0)
MXFP4_BLOCK, NVFP4_BLOCK = 32, 16
SCALE_DTYPES = {torch.float8_e8m0fnu: MXFP4_BLOCK, torch.float8_e4m3fn: NVFP4_BLOCK}
LEAST_SCALE = tl.constexpr(2.0**-6)  # of a block of NVFP4: the smallest e4m3 with three digits of mantissa
LEAST_TENSOR_SCALE = 2.0**-120  # its product with the least scale is float32's smallest normal number
ABOVE_SIX = tl.constexpr(0x3FFFFF)  # added to float32's bits, it carries into the exponent if the mantissa exceeds 1.5
HALF_OF_SMALLEST = tl.constexpr(0x400000)  # 2^-127 as a float32: e8m0's byte 0
NUMBERS_PER_PROGRAM = 4096


class Fp4(NamedTuple):
    """A tensor [..., n] in 4 bits."""

    codes: torch.Tensor  # uint8 [..., ⌈n/2⌉]; the high half of the last byte is 0 for an odd n
    scales: torch.Tensor  # MXFP4: float8_e8m0fnu [..., ⌈n/32⌉]; NVFP4: float8_e4m3fn [..., ⌈n/16⌉]
    tensor_scale: torch.Tensor | None  # NVFP4: float32 []; MXFP4: None

    @property
    def nbytes(self) -> int:
        """Of codes and scales together."""
        return sum(part.nbytes for part in self if part is not None)


# ----------------------------------------------------------------------------------------- the plain PyTorch meaning


def quantise_mxfp4_reference(tensor: torch.Tensor) -> Fp4:
    """A tensor [..., n] in MXFP4, n at least 1. Raises a ValueError for a NaN or an infinity."""
    blocks = blocks_of(tensor, MXFP4_BLOCK)
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1))  # mantissa in [1/2, 1), or 0: 6 is 0.75 · 2^3
    exponent = exponent - 3 + (mantissa > 0.75).to(torch.int32)
    exponent = torch.where(mantissa == 0, -127, exponent.clamp(min=-127))
    codes = nearest_codes(torch.ldexp(blocks.double(), -exponent[..., None]))
    scales = (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Fp4(packed_codes(codes, tensor.shape[-1]), scales, None)


def quantise_nvfp4_reference(tensor: torch.Tensor) -> Fp4:
    """A tensor [..., n] in NVFP4, n at least 1. Raises a ValueError for a NaN or an infinity."""
    blocks = blocks_of(tensor, NVFP4_BLOCK)
    tensor_scale = tensor_scale_of(tensor)
    scales = (blocks.abs().amax(-1) / (E2M1_MAX.value * tensor_scale)).clamp(LEAST_SCALE.value, E4M3_MAX.value)
    scales = scales.to(torch.float8_e4m3fn)
    codes = nearest_codes(blocks / (scales.float() * tensor_scale)[..., None])
    return Fp4(packed_codes(codes, tensor.shape[-1]), scales, tensor_scale)


def restore_fp4_reference(fp4: Fp4, length: int, dtype=torch.float32) -> torch.Tensor:
    """What codes and scales stand for: [..., length] of that dtype."""
    numbers = torch.tensor(E2M1_NUMBERS + tuple(-number for number in E2M1_NUMBERS), device=fp4.codes.device)
    restored = numbers[unpack_halves(fp4.codes).long()]
    scales = fp4.scales.float() if fp4.tensor_scale is None else fp4.scales.float() * fp4.tensor_scale
    spread = scales.repeat_interleave(SCALE_DTYPES[fp4.scales.dtype], -1)
    return (restored[..., :length] * spread[..., :length]).to(dtype)


def blocks_of(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """[..., blocks, block] in float32, filled up with zeros."""
    check_finite("tensor", tensor)
    return F.pad(tensor.float(), (0, -tensor.shape[-1] % block)).unflatten(-1, (-1, block))


def tensor_scale_of(tensor: torch.Tensor) -> torch.Tensor:
    """NVFP4's scale for all blocks, float32 []."""
    largest = tensor.abs().amax().float()
    # By a tensor: for a number PyTorch multiplies by its reciprocal on a GPU, which now and then rounds otherwise.
    return (largest / torch.full_like(largest, E4M3_MAX.value * E2M1_MAX.value)).clamp(min=LEAST_TENSOR_SCALE)


def nearest_codes(numbers: torch.Tensor) -> torch.Tensor:
    """The codes 0 to 15 of numbers in units of their scale, nearest, ties to even; beyond 6 it is that of 6."""
    sizes = numbers.abs()
    code = torch.zeros(numbers.shape, dtype=torch.int32, device=numbers.device)
    for lower, (smaller, larger) in enumerate(zip(E2M1_NUMBERS, E2M1_NUMBERS[1:])):
        middle = (smaller + larger) / 2
        code += sizes > middle if lower % 2 == 0 else sizes >= middle  # on the middle the even one of both
    return code | numbers.signbit().to(torch.int32) << 3


def packed_codes(codes: torch.Tensor, length: int) -> torch.Tensor:
    """The bytes [..., ⌈length/2⌉] of codes [..., blocks, block]."""
    return pack_halves(codes.flatten(-2))[..., : -(-length // 2)].contiguous()


# ------------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def blocks_at(BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """This program's blocks of a row [BLOCKS], their numbers' columns [BLOCKS, BLOCK], bytes [BLOCKS, BLOCK / 2]."""
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    places = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    return block, columns, places


@triton.jit
def quantise_fp4_kernel(source_pointer, codes_pointer, scales_pointer, tensor_scale_pointer, row_stride, columns,
                        BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """One program: BLOCKS blocks of a row; MXFP4 where tensor_scale_pointer is None, else NVFP4."""
    row = tl.program_id(0).to(tl.int64)
    block, column, place = blocks_at(BLOCK, BLOCKS)
    tile = tl.load(source_pointer + row * row_stride + column, mask=column < columns, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(tile), axis=1)  # [BLOCKS]
    if tensor_scale_pointer is None:
        scale_bytes = tl.maximum(((largest.to(tl.int32, bitcast=True) + ABOVE_SIX) >> 23) - 2, 0)  # e + 127
        inverse = ((254 - scale_bytes) << 23).to(tl.float32, bitcast=True)  # 2^-e, exact
        scaled = tile * inverse[:, None]  # [BLOCKS, BLOCK]
    else:
        tensor_scale = tl.load(tensor_scale_pointer)
        scales = tl.div_rn(largest, largest * 0.0 + E2M1_MAX * tensor_scale)
        scale_bytes = e4m3_bytes(bounded(tl.maximum(scales, LEAST_SCALE), E4M3_MAX))
        scales = e4m3_numbers(scale_bytes.to(tl.int8, bitcast=True), tl.float32, False) * tensor_scale
        scaled = tl.div_rn(tile, scales[:, None] + 0.0 * tile)  # [BLOCKS, BLOCK]
    low, high = tl.split(e2m1_codes(scaled).reshape(BLOCKS, BLOCK // 2, 2))  # [BLOCKS, BLOCK / 2] each
    bytes_in_row, blocks_in_row = tl.cdiv(columns, 2), tl.cdiv(columns, BLOCK)
    tl.store(codes_pointer + row * bytes_in_row + place, low | (high << 4), mask=place < bytes_in_row)
    scale_place = scales_pointer + row * blocks_in_row + block
    tl.store(scale_place, scale_bytes.to(tl.uint8), mask=block < blocks_in_row)


@triton.jit
def restore_fp4_kernel(codes_pointer, scales_pointer, tensor_scale_pointer, out_pointer, columns,
                       BLOCK: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """One program: BLOCKS blocks of a row; MXFP4 where tensor_scale_pointer is None, else NVFP4."""
    row = tl.program_id(0).to(tl.int64)
    block, column, place = blocks_at(BLOCK, BLOCKS)
    bytes_in_row, blocks_in_row = tl.cdiv(columns, 2), tl.cdiv(columns, BLOCK)
    scale_place = scales_pointer + row * blocks_in_row + block
    scale_bytes = tl.load(scale_place, mask=block < blocks_in_row, other=0)  # [BLOCKS]
    if tensor_scale_pointer is None:
        exponents = scale_bytes.to(tl.int32)
        scales = tl.where(exponents == 0, HALF_OF_SMALLEST, exponents << 23).to(tl.float32, bitcast=True)
    else:
        scales = e4m3_numbers(scale_bytes.to(tl.int8, bitcast=True), tl.float32, False) * tl.load(tensor_scale_pointer)
    packed = tl.load(codes_pointer + row * bytes_in_row + place, mask=place < bytes_in_row, other=0)
    codes = tl.join(packed & 15, packed >> 4).reshape(BLOCKS, BLOCK)
    restored = e2m1_numbers(codes).to(tl.float32) * scales[:, None]  # [BLOCKS, BLOCK]
    out = out_pointer + row * columns + column
    tl.store(out, restored.to(out_pointer.dtype.element_ty), mask=column < columns)


def quantise_mxfp4(tensor: torch.Tensor, *, validate: bool = True) -> Fp4:
    """A tensor in MXFP4.

    Args:
        tensor: [..., n], float32, float16 or bfloat16; rows contiguous, leading dimensions that flatten without a copy.
        validate: look for a NaN or an infinity first, which reads the tensor and waits for the device. With False an
            infinity becomes the largest number that its block has a code for, and a NaN spoils its block; in NVFP4
            either spoils the tensor, by the scale that all blocks share.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    return quantise(tensor, MXFP4_BLOCK, validate)


def quantise_nvfp4(tensor: torch.Tensor, *, validate: bool = True) -> Fp4:
    """A tensor in NVFP4; arguments and errors are those of `quantise_mxfp4`."""
    return quantise(tensor, NVFP4_BLOCK, validate)


def quantise(tensor: torch.Tensor, block: int, validate: bool) -> Fp4:
    check_tensor("tensor", tensor, FLOAT_DTYPES)
    rows = as_rows("tensor", tensor)
    if validate:
        check_finite("tensor", tensor)
    count, columns = rows.shape
    leading, blocks = tensor.shape[:-1], triton.cdiv(columns, block)
    codes = torch.empty((*leading, triton.cdiv(columns, 2)), dtype=torch.uint8, device=tensor.device)
    scales = torch.empty((*leading, blocks), dtype=torch.uint8, device=tensor.device)
    tensor_scale = None
    if block == NVFP4_BLOCK:
        tensor_scale = tensor_scale_of(tensor) if tensor.numel() else torch.ones((), device=tensor.device)
    if count > 0:
        at_once = blocks_at_once(blocks, block)
        quantise_fp4_kernel[(count, triton.cdiv(blocks, at_once))](
            rows, codes, scales, tensor_scale, rows.stride(0), columns, BLOCK=block, BLOCKS=at_once
        )
    dtype = next(dtype for dtype, size in SCALE_DTYPES.items() if size == block)
    return Fp4(codes, scales.view(dtype), tensor_scale)


def restore_fp4(fp4: Fp4, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What codes and scales stand for, as a kernel.

    Args:
        fp4: as `quantise_mxfp4` or `quantise_nvfp4` makes it.
        length: of a row, n.
        dtype: float32, float16 or bfloat16.

    Raises:
        ValueError: the parts do not fit each other or the length; the message names them.
    """
    if fp4.scales.dtype not in SCALE_DTYPES:
        raise ValueError(f"scales have dtype {fp4.scales.dtype}; MXFP4 has float8_e8m0fnu, NVFP4 float8_e4m3fn.")
    check_tensor("codes", fp4.codes, (torch.uint8,))
    block, leading = SCALE_DTYPES[fp4.scales.dtype], fp4.codes.shape[:-1]
    if (fp4.tensor_scale is None) != (block == MXFP4_BLOCK):
        raise ValueError("tensor_scale must be there for NVFP4, and None for MXFP4.")
    blocks = triton.cdiv(length, block)
    for name, part, size in (("codes", fp4.codes, triton.cdiv(length, 2)), ("scales", fp4.scales, blocks)):
        if tuple(part.shape) != (*leading, size) or length < 1 or not part.is_contiguous():
            raise ValueError(
                f"{name} have shape {tuple(part.shape)}; for rows of {length} numbers and codes of shape "
                f"{tuple(fp4.codes.shape)} they must be contiguous, {(*leading, size)}."
            )
    out = torch.empty((*leading, length), dtype=dtype, device=fp4.codes.device)
    if out.numel() > 0:
        at_once = blocks_at_once(blocks, block)
        restore_fp4_kernel[(out.numel() // length, triton.cdiv(blocks, at_once))](
            fp4.codes, fp4.scales.view(torch.uint8), fp4.tensor_scale, out, length, BLOCK=block, BLOCKS=at_once
        )
    return out


def blocks_at_once(blocks: int, block: int) -> int:
    """Blocks of a row that a program takes: all of a short row."""
    return min(triton.next_power_of_2(blocks), NUMBERS_PER_PROGRAM // block)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: long rows of each dtype in both formats."""
    cases = []
    for block, tensor_scale in ((MXFP4_BLOCK, {}), (NVFP4_BLOCK, {"tensor_scale_pointer": "*fp32"})):
        sizes = {"BLOCK": block, "BLOCKS": NUMBERS_PER_PROGRAM // block}
        for kind in KINDS.values():
            types = {"codes_pointer": "*u8", "scales_pointer": "*u8", "tensor_scale_pointer": None} | tensor_scale
            cases += [
                CompileCase(
                    kernel, signature_of(kernel, kind, **types),
                    sizes if tensor_scale else sizes | {"tensor_scale_pointer": None},
                    archs=(75, 80, 90, 100) if kind == "fp16" else (90,), label=f"{kind}, blocks of {block}",
                )
                for kernel in (quantise_fp4_kernel, restore_fp4_kernel)
            ]  # fmt: skip
    return cases
