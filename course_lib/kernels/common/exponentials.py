"""2^x from multiply-adds: an exponential that leaves the special function unit alone.

    2^x = 2^⌊x⌋ · 2^f,    f = x - ⌊x⌋ in [0, 1),    2^f ≈ p(f) = 1 + c₁f + … + cₙfⁿ

`tl.exp2` is one instruction, ex2 in PTX, of a unit that makes 16 a cycle on each multiprocessor. Multiply-adds come 128
a cycle. A B200 has twice the matrix units of an H100, and the same 16. So a tile of attention at head dimension 128
takes as long for its exponentials as for its products, and FlashAttention-4 has a polynomial compute some of them.

Every other step has to stay off that unit: it also rounds (`tl.floor`) and makes integers of numbers (`.to(int32)`).
So ⌊x⌋ comes from an addition. x + 1536, being in [1024, 2048), has 13 binary digits after the point, and its bits
without these 13 are those of ⌊x⌋ + 1536. Shifted left by 10 they are ⌊x⌋ where a float32 has its exponent: 1536 and
its own exponent fall out at the top. That integer, added to the bits of p(f), multiplies it by 2^⌊x⌋. The sum rounds,
so an x less than 2^-14 below a whole number gets that one, and a fraction just below 0, where p is as good.

The constant coefficient is 1 and x is at least -127. So -inf gives the exponent 0 and the mantissa 0, which is 0.0, and
a whole number gives its power of two exactly. The coefficients make the largest relative error as small as it can be
under that condition (`tests/kernels/common/test_exponentials.py` computes them by Remez's method). The largest relative
error:

    degree   exact     in float32   in bfloat16   equal to 2^x rounded to bfloat16
    2        2.05e-3   2.05e-3      5.55e-3       76.0 %
    3        8.56e-5   8.57e-5      3.90e-3       99.0 %, the others 1 ulp off
    4        2.90e-6   2.96e-6      3.89e-3       99.96 %
    5        8.2e-8    1.43e-7      3.89e-3       99.998 %

bfloat16 alone makes 3.89e-3. A power takes 6 + degree instructions (sm_90, from the machine code). A multiprocessor
starts 128 threads' instructions a cycle, so degree 3 makes at best 128 / 9 = 14 powers a cycle beside the 16 of the
other unit. Where something else needs these instructions it does not pay: the course's attention on Hopper got slower.

`exp2_shared` gives some columns of every 32 to the polynomial. Both ways are written down for every number. Where the
column of each register is the same in all threads, modulo 32 and against the border, the compiler sees which way is not
needed, and leaves it out. Elsewhere both are computed. What a thread computes for its 32 numbers, from the machine code
(Triton 3.6 and 3.9), ex2 and polynomials:

    tile 64 x 64, 4 warps     a share of 4    of 8         of 16
    mma.sync (sm_80)          32 and 16       32 and 16    16 and 16
    wgmma (sm_90)             32 and 8        24 and 8     16 and 16
    tensor memory (sm_100)    28 and 4        24 and 8     16 and 16

Of a result of wgmma a thread holds 2 columns of every 8, from tensor memory a whole half of a row. So a share is free
in steps of 8 columns on sm_90, and of 1 on sm_100, where a pair of multiply-adds is one instruction besides.

Source: FlashAttention-4, arXiv 2603.05451. Its coefficients of degree 3 err by 8.77e-5; it takes 4 or 6 columns in a
period of 32 or more.
"""

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import check_contiguous, check_tensor

DEGREES = (2, 3, 4, 5)
COEFFICIENTS = tl.constexpr((  # by degree from 2 on; the first is of f, the last of fⁿ
    (0.665960967540741, 0.32993239164352417),
    (0.6951167583465576, 0.22764499485492706, 0.07706703990697861),
    (0.6930448412895203, 0.241280198097229, 0.052242472767829895, 0.013426683843135834),
    (0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017030708491802, 0.0018671300495043397),
))  # fmt: skip
SMALLEST = tl.constexpr(-127.0)  # the exponent of a float32 whose bits of exponent are 0
POINT = tl.constexpr(1536.0)  # 1.5 · 2^10
WHOLE_BITS = tl.constexpr(-(1 << 13))  # all but the 13 digits after the point of a number in [1024, 2048)
WHOLE_SHIFT = tl.constexpr(23 - 13)
PERIOD = tl.constexpr(32)  # columns, of which `exp2_shared` gives a share to the polynomial
BLOCK = 1024
TILE = tl.constexpr(64)  # of queries, of keys, and their head dimension


def exp2_polynomial_reference(x: torch.Tensor, degree: int, fused: bool = True) -> torch.Tensor:
    """2^x of float32 numbers below 128, bit by bit as `exp2_polynomial` has it.

    fused: a multiply-add rounds once, as on a GPU; else its product is rounded too.
    """
    x = torch.where(x > SMALLEST.value, x, SMALLEST.value)
    shifted = (x + POINT.value).view(torch.int32) & WHOLE_BITS.value
    fraction = x - (shifted.view(torch.float32) - POINT.value)
    *lower, power = COEFFICIENTS.value[DEGREES.index(degree)]
    power = torch.full_like(x, power)
    for coefficient in (*reversed(lower), 1.0):
        # The product of two float32 numbers is exact in float64.
        product = power.double() * fraction.double() if fused else power * fraction
        power = (product + coefficient).float()
    return (power.view(torch.int32) + (shifted << WHOLE_SHIFT.value)).view(torch.float32)


@triton.jit
def exp2_polynomial(x, DEGREE: tl.constexpr):
    """2^x of float32 numbers below 128, of any shape, by a polynomial of degree 2 to 5.

    -inf and all up to -127 give 0. Between -127 and -126, where float32 has no full precision any more, the result is
    off by 2^-127 at most. NaN gives 0, since a GPU's maximum of NaN and a number is the number; from 128 on, where
    2^x is infinite, the result means nothing.
    """
    x = tl.maximum(x, SMALLEST)
    shifted = (x + POINT).to(tl.int32, bitcast=True) & WHOLE_BITS  # the bits of ⌊x⌋ + POINT
    fraction = x - (shifted.to(tl.float32, bitcast=True) - POINT)
    power = COEFFICIENTS[DEGREE - 2][DEGREE - 1]
    for lower in tl.static_range(2, DEGREE + 1):
        power = tl.fma(fraction, power, COEFFICIENTS[DEGREE - 2][DEGREE - lower])
    power = tl.fma(fraction, power, 1.0)
    return (power.to(tl.int32, bitcast=True) + (shifted << WHOLE_SHIFT)).to(tl.float32, bitcast=True)


@triton.jit
def exp2_shared(x, DEGREE: tl.constexpr, SHARE: tl.constexpr):
    """2^x of a float32 tile [ROWS, COLUMNS]: the last SHARE of every 32 columns by `exp2_polynomial`, the rest by ex2.

    What a share saves, and where it only costs, stands at the top of this file.
    """
    column = tl.arange(0, x.shape[1]) % PERIOD  # [COLUMNS]
    return tl.where((column >= PERIOD - SHARE)[None, :], exp2_polynomial(x, DEGREE), tl.exp2(x))


# --------------------------------------------------------------------------------- kernels that show what they become


@triton.jit
def exp2_kernel(x_pointer, out_pointer, length, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets, mask=inside, other=0.0)  # [BLOCK]
    tl.store(out_pointer + offsets, exp2_polynomial(x, DEGREE), mask=inside)


@triton.jit
def exp2_scores_kernel(query_pointer, key_pointer, out_pointer, DEGREE: tl.constexpr, SHARE: tl.constexpr):
    """One program: 2^(query · key) for a tile of queries and one of keys, as attention's weights come to be."""
    row, channel = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]  # [TILE, 1], [1, TILE]
    query = tl.load(query_pointer + row * TILE + channel)  # [TILE, TILE]
    key = tl.load(key_pointer + row * TILE + channel)  # [TILE, TILE]
    weights = exp2_shared(tl.dot(query, key.trans()), DEGREE, SHARE)  # [TILE, TILE]
    tl.store(out_pointer + row * TILE + channel, weights)


def exp2_by_polynomial(x: torch.Tensor, degree: int = 3) -> torch.Tensor:
    """2^x by `exp2_polynomial`, in one kernel.

    Args:
        x: float32, contiguous, any shape; below 128.
        degree: 2 to 5.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, (torch.float32,))
    check_contiguous("x", x)
    check_degree(degree)
    out = torch.empty_like(x)
    if x.numel() > 0:
        exp2_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), DEGREE=degree, BLOCK=BLOCK)
    return out


def exp2_of_scores(query: torch.Tensor, key: torch.Tensor, degree: int = 3, share: int = 8) -> torch.Tensor:
    """2^(query keyᵀ) by `exp2_shared`, [64, 64] float32.

    Args:
        query, key: [64, 64], float16, contiguous; no product may reach 128.
        degree: 2 to 5.
        share: columns of every 32 that the polynomial takes, 0 to 32.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    for name, tensor in (("query", query), ("key", key)):
        check_tensor(name, tensor, (torch.float16,))
        check_contiguous(name, tensor)
        if tuple(tensor.shape) != (TILE.value, TILE.value):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [{TILE.value}, {TILE.value}].")
    check_degree(degree)
    if share not in range(PERIOD.value + 1):
        raise ValueError(f"share is {share!r}; it must be a number of columns from 0 to {PERIOD.value}.")
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    exp2_scores_kernel[(1,)](query, key, out, DEGREE=degree, SHARE=share)
    return out


def check_degree(degree) -> None:
    if degree not in DEGREES:
        raise ValueError(f"degree is {degree!r}; there are coefficients for {', '.join(map(str, DEGREES))}.")


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    numbers = {"x_pointer": "*fp32", "out_pointer": "*fp32", "length": "i32"}
    tiles = {"query_pointer": "*fp16", "key_pointer": "*fp16", "out_pointer": "*fp32"}
    matrix = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
    return [
        *(CompileCase(exp2_kernel, numbers, {"DEGREE": degree, "BLOCK": BLOCK}, archs=(80, 90, 100),
                      label=f"degree {degree}") for degree in DEGREES),
        CompileCase(exp2_scores_kernel, tiles, {"DEGREE": 3, "SHARE": 8}, archs=tuple(matrix), instruction=matrix),
    ]  # fmt: skip
