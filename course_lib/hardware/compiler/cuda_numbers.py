"""Numbers of 16 bits in CUDA C++, and arithmetic of one instruction: what a source begins with, without CUDA's headers.

On the processor cuda_block.h has the names of the first.
"""

# Numbers of 16 bits are their bits here: with a type of their own the source would need CUDA's headers.
CONVERSIONS = r"""
struct half_bits { unsigned short bits; };
struct bfloat16_bits { unsigned short bits; };

__device__ inline float widened(float number) { return number; }
__device__ inline float widened(half_bits number) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(number.bits));
    return wide;
}
__device__ inline float widened(bfloat16_bits number) {  // bfloat16 is the upper half of a float32
    return __uint_as_float((unsigned int)number.bits << 16);
}

__device__ inline void narrow(float wide, float& number) { number = wide; }
__device__ inline void narrow(float wide, half_bits& number) {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(number.bits) : "f"(wide));
}
__device__ inline void narrow(float wide, bfloat16_bits& number) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(number.bits) : "f"(wide));
#else  // by hand: to the nearest, ties to even; NaN stays NaN
    unsigned int bits = __float_as_uint(wide);
    number.bits = wide == wide ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : 0x7fffu;
#endif
}
"""

# exp2f and / take ten instructions more, for what is below 2^-126 and for the last digit.
FAST_ARITHMETIC = r"""
// One instruction each, a few units off in the last place; what is below 2^-126 counts as 0.
__device__ inline float fast_power_of_2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

__device__ inline float fast_reciprocal(float x) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}
"""
