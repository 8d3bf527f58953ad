"""Noise from a counter: one number for each (seed, position, token), whoever asks for it and in whatever order.

A generator with a state gives a request other numbers when another request draws before it. A hash has no state: a
request that knows its seed and its position in the text draws the same token alone, in any batch, in any row, and again
after it was preempted.

    key     = mix64(mix64(seed + γ) + position + γ)          64 bits, once a row; γ = 2⁶⁴ / golden ratio
    bits    = mix32(token, key)                              32 bits for each token: 3 products, 4 shifts
    uniform = bits / 2³² + 2⁻³³, at most 1 - 2⁻²⁴            strictly inside (0, 1)
    noise   = -log(1 - uniform)                              an exponential variable, from 2⁻³³ to 16.6

Used so: argmax over tokens of p[t] / noise[t] is a draw from p, exactly. In logarithms it is log p[t] - log noise[t],
and -log noise is known as Gumbel noise. A token wins by *small* noise. Near 0 float32 is fine (steps of 2⁻³²), near 1
it is coarse (2⁻²⁴), and so the winner's uniform is the one near 0. Noise of exactly 0 would make its token win whatever
its probability, and a uniform of 1 would make it infinite: neither happens here.

Sources: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014 (the mixing of 64 bits);
Wellons, Prospecting for hash functions, 2018 (that of 32); Maddison, Tarlow and Minka, A* sampling, arXiv 1411.0030.
"""

import torch
import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LN_2

GAMMA = tl.constexpr(0x9E3779B97F4A7C15)
FIRST_64, SECOND_64 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
FIRST_32, SECOND_32, THIRD_32 = tl.constexpr(0xED5AD4BB), tl.constexpr(0xAC4C1B51), tl.constexpr(0x31848BAB)
STEP = tl.constexpr(2.0**-32)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
SMALL = tl.constexpr(2.0**-6)  # below it log(1 - uniform) is a series: 1 - uniform would have lost its last bits


def noise_reference(seeds: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The plain PyTorch meaning: float64 [rows, vocabulary] for seeds and positions, integers [rows]."""
    key = _mix_64(_mix_64(seeds.long() + _signed(GAMMA.value)) + positions.long() + _signed(GAMMA.value))[:, None]
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    bits = torch.arange(vocabulary, device=key.device) ^ low  # 32 bits in an int64, cut off after each product
    bits = ((bits ^ (bits >> 17)) * FIRST_32.value) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 11) ^ high) * SECOND_32.value) & 0xFFFFFFFF
    bits = ((bits ^ (bits >> 15)) * THIRD_32.value) & 0xFFFFFFFF
    uniform = (bits ^ (bits >> 14)).float() * STEP.value + STEP.value / 2
    return -torch.log1p(-uniform.clamp(max=LARGEST_UNIFORM.value).double())


def _mix_64(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, FIRST_64), (27, SECOND_64)):
        x = (x ^ _shifted(x, shift)) * _signed(factor.value)
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, with zeros from the left: PyTorch's own shift of an int64 brings in its sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """64 bits as the int64 that has them."""
    return word - (1 << 64) if word >= 1 << 63 else word


@triton.jit
def mix_64(x):
    """64 bits from 64, each depending on all."""
    x = (x ^ (x >> 30)) * FIRST_64
    x = (x ^ (x >> 27)) * SECOND_64
    return x ^ (x >> 31)


@triton.jit
def row_key(seed, position):
    """The key of a row's noise, uint64: of two integers."""
    return mix_64(mix_64(seed.to(tl.uint64) + GAMMA) + position.to(tl.uint64) + GAMMA)


@triton.jit
def uniform_of(bits):
    """A number strictly inside (0, 1) from each of 2³² words."""
    return tl.minimum(bits.to(tl.float32) * STEP + STEP / 2, LARGEST_UNIFORM)


@triton.jit
def log2_of(x, ASSEMBLY: tl.constexpr):
    """log2 of positive numbers. ASSEMBLY, on a GPU: one instruction, off by 2⁻²² at most, where `tl.log2` takes 15."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def noise_of(key, token, ASSEMBLY: tl.constexpr):
    """The exponential noise of tokens, any integers of at least 0, in a row with this key."""
    bits = token.to(tl.uint32) ^ key.to(tl.uint32)
    bits = (bits ^ (bits >> 17)) * FIRST_32
    bits = (bits ^ (bits >> 11) ^ (key >> 32).to(tl.uint32)) * SECOND_32
    bits = (bits ^ (bits >> 15)) * THIRD_32
    uniform = uniform_of(bits ^ (bits >> 14))
    series = uniform * (1.0 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4))))
    return tl.where(uniform < SMALL, series, log2_of(1.0 - uniform, ASSEMBLY) * -LN_2)
