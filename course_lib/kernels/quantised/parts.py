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
EXPONENT_BITS = tl.constexpr(0x7F800000)  # of float32
# Two codes of each of two words, to the first of both and the second of both.
E4M3_ASSEMBLY = tl.constexpr("""{
    .reg .b32 codes;
    .reg .b16 first, second;
    prmt.b32 codes, $2, $2, 0x3120;
    mov.b32 {first, second}, codes;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")
# In which half of a pair of float16 the scale of a word's codes lies: that of a value's group, or each in its own.
LOW_HALF, HIGH_HALF, EACH_ITS_OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


def int4_assembly(halves: int) -> tl.constexpr:
    """`int4_numbers` for two words at a time, which are $4; $0 to $3 become the numbers of their codes.

    $5 to $8: the two words' scales, pairs of the first codes and then of the others; $9 to $12: the middles. Two halves
    are brought together by one instruction here. Left to the compiler, each is first taken out of its pair by another.
    """
    lines = [".reg .b32 high, code, scale, middle, half, less, sixteenth, rest;", "shr.u32 high, $4, 8;",
             "mov.b32 half, 0x38003800;", "mov.b32 less, 0xE008E008;",
             "mov.b32 sixteenth, 0x28002800;", "mov.b32 rest, 0xD080D080;"]  # fmt: skip
    for code in range(4):
        own = halves == EACH_ITS_OWN.value
        pair = 2 * (code // 2) if own else 0
        both = ("0x5410", "0x7632")[code % 2 if own else halves]  # the low halves of two registers, or the high ones
        magic = "0x00F000F0, 0x64806480" if code % 2 else "0x000F000F, 0x64086408"
        lines += [
            f"lop3.b32 code, {'high' if code >= 2 else '$4'}, {magic}, 0x6A;",
            f"fma.rn.f16x2 code, code, {'sixteenth, rest' if code % 2 else 'half, less'};",
            f"prmt.b32 scale, ${5 + pair}, ${6 + pair}, {both};",
            f"prmt.b32 middle, ${9 + pair}, ${10 + pair}, {both};",
            "mul.rn.f16x2 middle, middle, half;",
            f"fma.rn.f16x2 ${code}, code, scale, middle;",
        ]
    return tl.constexpr("\n".join(("{", *lines, "}")))


LOW_ASSEMBLY, HIGH_ASSEMBLY, OWN_ASSEMBLY = (int4_assembly(halves) for halves in range(3))


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
def e4m3_halves(words, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers of the first and of the second e4m3 code of int16 words: two tiles, as `e4m3_numbers` has them."""
    if NATIVE and dtype == tl.float16:
        first, second = tl.inline_asm_elementwise(
            E4M3_ASSEMBLY, "=r,=r,r", (words,), dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        first, second = words.to(tl.int8), (words >> 8).to(tl.int8)
        if NATIVE:
            first, second = first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)
        first, second = e4m3_numbers(first, dtype, NATIVE), e4m3_numbers(second, dtype, NATIVE)
    return first, second


@triton.jit
def e2m1_numbers(codes):
    """The numbers of e2m1 codes 0 to 15, float16: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and from 8 on their negatives."""
    codes = codes.to(tl.int16)
    bits = ((codes & 8) << 12) | ((codes & 7) << 9)  # sign, and the last 2 of exponent and first of mantissa
    return bits.to(tl.float16, bitcast=True) * E2M1_BIAS


@triton.jit
def int4_numbers(words, scales, middles, HALVES: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Half of code · scale + middle, for each of the four codes of int16 words: four tiles of `dtype`.

    scales, middles: two tiles each that broadcast to that of words, of pairs of float16 in int32. HALVES: which half of
    the first is that of all four codes; or EACH_ITS_OWN: those of two codes are in the first, and of two in the second.
    Halves of numbers, since the largest of a group may lie above float16's largest by what scale and middle were
    rounded. dtype: float16, of one rounding, or float32. ASSEMBLY: two words at a time; without, in float32.
    """
    if ASSEMBLY and dtype == tl.float16:
        TEXT: tl.constexpr = OWN_ASSEMBLY if HALVES == EACH_ITS_OWN else HIGH_ASSEMBLY if HALVES else LOW_ASSEMBLY
        numbers = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r", (words,) + scales + middles,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        numbers = ()
        for code in tl.static_range(4):
            steps = (((words >> (4 * code)) & 15) ^ 8).to(tl.float32) - 8.0
            half_middle = number_for(middles, code, HALVES) * 0.5
            half = steps * 0.5 * number_for(scales, code, HALVES).to(tl.float32) + half_middle.to(tl.float32)
            numbers = numbers + (half.to(dtype),)
    return numbers


@triton.jit
def number_for(pairs, code: tl.constexpr, HALVES: tl.constexpr):
    """The float16 number, a scale or a middle, for one of a word's four codes."""
    if HALVES == EACH_ITS_OWN:
        bits = pairs[code // 2] >> (16 * (code % 2))
    else:
        bits = pairs[0] >> (16 * HALVES)
    return bits.to(tl.int16).to(tl.float16, bitcast=True)


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
