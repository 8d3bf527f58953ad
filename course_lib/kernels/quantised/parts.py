"""The parts that kernels over quantised caches are made of: codes to numbers and back.

e4m3 is a short float16: sign, 4 bits of exponent instead of 5, 3 of mantissa instead of 10. Its bits put where those of
float16 are, with zeros below, make a number that is too small by the biases' difference, 2^(15 - 7): subnormal numbers
too. From sm_89 on an instruction does that for two codes at a time.

e2m1 is shorter still, with 2 bits of exponent and 1 of mantissa, and becomes a number in the same way.

An INT4 code needs no conversion from integer, which is slow: code + 8, four bits, are put at the end of the number
1024 of float16, worth 1 or (the second and fourth of a word) 16 there, and what is too much is subtracted: exact. That
takes two instructions for two codes, and a third multiplies by the scale and adds the middle, rounding once.
"""

import triton
import triton.language as tl

E4M3_BITS = tl.constexpr(0xBF80 - 0x10000)  # in float16: the sign, and the last four of exponent and first three after
E4M3_BIAS = tl.constexpr(256.0)
E2M1_BIAS = tl.constexpr(16384.0)  # 2^(15 - 1)
LOWEST_CODE, HIGHEST_CODE = tl.constexpr(-8.0), tl.constexpr(7.0)  # of INT4
ROUNDING = tl.constexpr(1.5 * 2.0**23)  # float32 has no digits after the point there, and rounds a sum to even
INT4_ASSEMBLY = tl.constexpr("""{
    .reg .b32 high, code, half, less, sixteenth, rest;
    shr.u32 high, $4, 8;
    mov.b32 half, 0x38003800;
    mov.b32 less, 0xE008E008;
    mov.b32 sixteenth, 0x28002800;
    mov.b32 rest, 0xD080D080;
    lop3.b32 code, $4, 0x000F000F, 0x64086408, 0x6A;
    fma.rn.f16x2 code, code, half, less;
    fma.rn.f16x2 $0, code, $5, $9;
    lop3.b32 code, $4, 0x00F000F0, 0x64806480, 0x6A;
    fma.rn.f16x2 code, code, sixteenth, rest;
    fma.rn.f16x2 $1, code, $6, $10;
    lop3.b32 code, high, 0x000F000F, 0x64086408, 0x6A;
    fma.rn.f16x2 code, code, half, less;
    fma.rn.f16x2 $2, code, $7, $11;
    lop3.b32 code, high, 0x00F000F0, 0x64806480, 0x6A;
    fma.rn.f16x2 code, code, sixteenth, rest;
    fma.rn.f16x2 $3, code, $8, $12;
}""")
EXPONENT_BITS = tl.constexpr(0x7F800000)  # of float32


# --------------------------------------------------------------------------------------------------- codes to numbers


@triton.jit
def e4m3_numbers(codes, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers of e4m3 codes: float16, or float32 where that is `dtype`. Not NATIVE: from their bits, int8."""
    if NATIVE:
        numbers = codes.to(tl.float16)
    else:
        bits = (codes.to(tl.int16) << 7) & E4M3_BITS
        numbers = bits.to(tl.float16, bitcast=True) * E4M3_BIAS
    return numbers.to(dtype)


@triton.jit
def e2m1_numbers(codes):
    """The numbers of e2m1 codes 0 to 15, float16: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on their negatives."""
    codes = codes.to(tl.int16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)  # sign, and the last 2 of exponent and first of mantissa
    return bits.to(tl.float16, bitcast=True) * E2M1_BIAS


@triton.jit
def int4_numbers(words, scales, middles, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Half of code · scale + middle, for each of the four codes of int16 words: four tiles of `dtype`.

    scales, middles: float16, four tiles each that broadcast to that of words; the middles are halves already. Halves,
    since the largest number of a group may lie above float16's largest by what scale and middle were rounded.
    dtype: float16, of one rounding, or float32. ASSEMBLY: two words at a time; without, in float32.
    """
    if ASSEMBLY and dtype == tl.float16:
        numbers = tl.inline_asm_elementwise(
            INT4_ASSEMBLY, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", (words,) + scales + middles,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = ()
        for quarter in tl.static_range(4):
            codes = (((words >> (4 * quarter)) & 15) ^ 8).to(tl.float32) - 8.0
            halves = codes * 0.5 * scales[quarter].to(tl.float32) + middles[quarter].to(tl.float32)
            numbers = numbers + (halves.to(dtype),)
    return numbers


@triton.jit
def normalised_queries(query):
    """Queries [BLOCK_M, BLOCK_D] for products with float16, and the powers of 2 [BLOCK_M] that their rows are in.

    A row's largest number comes to lie between 1 and 2, so bfloat16 of any size fits; what float16 loses is below 2^-24
    of it. float32 stays as it is.
    """
    if query.dtype == tl.float32:
        units = tl.full([query.shape[0]], 1.0, tl.float32)
        normalised = query
    else:
        wide = query.to(tl.float32)
        largest = tl.max(tl.abs(wide), axis=1)
        units = (largest.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)  # [BLOCK_M]
        units = tl.where(units == 0.0, 1.0, units)
        normalised = (wide / units[:, None]).to(tl.float16)
    return normalised, units


# ---------------------------------------------------------------------------------------------- where INT4 lies


@triton.jit
def load_halves(pointers, mask):
    """Even and odd columns, [ROWS, COLUMNS] each, from pointers to the even ones."""
    return tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + 1, mask=mask, other=0.0)


@triton.jit
def block_number(tables, table_stride, batch, index, last_block, key_head, key_heads, blocks, PAGED: tl.constexpr):
    """Which of all heads' blocks is number `index` of this sequence and head; anything from last_block on."""
    if PAGED:
        page = tl.load(tables + batch * table_stride + index, mask=index < last_block, other=0).to(tl.int64)
        number = page * key_heads + key_head
    else:
        number = (batch * key_heads + key_head) * blocks + index
    return number


# --------------------------------------------------------------------------------------------------- numbers to codes


@triton.jit
def bounded(numbers, LARGEST: tl.constexpr):
    """float32 numbers within ±LARGEST: what is beyond becomes that, and NaN 0."""
    numbers = tl.where(numbers == numbers, numbers, 0.0)
    return tl.minimum(tl.maximum(numbers, -LARGEST), LARGEST)


@triton.jit
def e4m3_bytes(numbers):
    """The e4m3 codes, uint8, nearest to float32 numbers between -448 and 448, ties to even.

    In integers, so that every GPU and the interpreter agree: its own cast does not round.
    """
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 2^-6 on: of 23 bits of mantissa 3 are kept, and the exponent is counted from 7 instead of 127.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below: multiples of 2^-9, the last digit of 2^14, which float32's addition rounds to.
    subnormal = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) & 15
    codes = tl.where(size < 0x3C800000, subnormal, normal)  # 2^-6
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_codes(numbers):
    """The e2m1 codes, uint8, nearest to float32 numbers, ties to even; what lies beyond 6 becomes 6."""
    bits = numbers.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # From 1 on: of 23 bits of mantissa 1 is kept, and the exponent is counted from 1 instead of 127.
    normal = ((size + 0x1FFFFF + ((size >> 22) & 1)) >> 22) - (126 << 1)
    # Below: multiples of 1/2, the last digit of 2^22, which float32's addition rounds to.
    subnormal = (size.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) & 3
    codes = tl.where(size < 0x3F800000, subnormal, tl.minimum(normal, 7))  # 1
    return (codes | ((bits >> 28) & 8)).to(tl.uint8)


@triton.jit
def int4_scales(lowest, highest):
    """Scales and middles, float16, of groups from `lowest` to `highest`, float32: as `formats.quantise_int4` has it."""
    scales = tl.div_rn(highest - lowest, lowest * 0.0 + 15.0).to(tl.float16)
    return scales, (lowest + 8.0 * scales.to(tl.float32)).to(tl.float16)


@triton.jit
def int4_codes(numbers, scales, middles):
    """The INT4 codes of float32 numbers, as the low half of uint8; scales and middles float16, broadcast to them."""
    scales = scales.to(tl.float32) + 0.0 * numbers
    steps = tl.div_rn(numbers - middles.to(tl.float32), tl.where(scales == 0.0, 1.0, scales))
    steps = tl.where(scales == 0.0, 0.0, tl.minimum(tl.maximum(steps, LOWEST_CODE), HIGHEST_CODE))
    return (((steps + ROUNDING) - ROUNDING).to(tl.int32) & 15).to(tl.uint8)
