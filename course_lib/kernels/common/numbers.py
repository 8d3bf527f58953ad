"""Numbers that kernels of several topics share."""

import triton.language as tl

# The hardware has exp2 and log2: exp(x) = 2^(x·log2 e), and log x = log2 x · ln 2.
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Products of float32 tiles are computed in float32, on the ordinary units: tf32, Triton's default, keeps 10 bits of a
# mantissa. Its threefold form "tf32x3" is 4.5 times as fast on an H200, but on short rows misses float32's accuracy.
FLOAT32_PRECISION = tl.constexpr("ieee")
LARGEST_GROUP = 8  # elements that a thread loads at once: 16 bytes of a 16-bit type
