"""The parts of GroupNorm with Mish, forward and backward: the activation, sums of neighbours, how groups are cut."""

import triton
import triton.language as tl

from course_lib.kernels.common.numbers import LOG2_E

TILE_ELEMENTS = 2048  # several samples of a small group make one tile of this size


@triton.jit
def mish(x, ASSEMBLY: tl.constexpr):
    """x · u / (u + 2) with u = e · (e + 2) and e = exp(x), as in `mish_and_slope`.

    ASSEMBLY, on a GPU: one instruction each for the power of 2 and for the reciprocal. They are a few units off in the
    last place and take numbers below 2^-126 for 0. `tl.exp2` and a division take ten more instructions, for such
    numbers and the last digit. With 40 for an element the kernel waits for the arithmetic and not for the memory.
    """
    power = tl.minimum(x, 20.0) * LOG2_E
    if ASSEMBLY:
        exponential = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], dtype=tl.float32,
                                                is_pure=True, pack=1)  # fmt: skip
        product = exponential * (exponential + 2.0)
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [product + 2.0], dtype=tl.float32,
                                            is_pure=True, pack=1)  # fmt: skip
    else:
        exponential = tl.exp2(power)
        product = exponential * (exponential + 2.0)
        inverse = 1.0 / (product + 2.0)
    return x * (product * inverse)


@triton.jit
def mish_and_slope(x):
    """mish(x) and its derivative, with one exponential.

    With e = exp(x) and u = e · (e + 2): tanh(log(1 + e)) = u / (u + 2). Beyond 20 this is 1 to the last digit of
    float32, and e² would overflow from 44 on.
    """
    exponential = tl.exp(tl.minimum(x, 20.0))
    product = exponential * (exponential + 2.0)
    inverse = 1.0 / (product + 2.0)
    tanh = product * inverse
    slope = tanh + x * (4.0 * exponential * (1.0 + exponential) * inverse * inverse)
    return x * tanh, tl.where(x > 20.0, 1.0, slope)


@triton.jit
def scaled_and_shifted(out, scale_pointer, shift_pointer, sample, channel, exists, scale_stride, shift_stride):
    """scale · out + shift; out itself where there is none."""
    if scale_pointer is not None:
        scale = tl.load(scale_pointer + sample * scale_stride + channel, mask=exists, other=0.0).to(tl.float32)
        shift = tl.load(shift_pointer + sample * shift_stride + channel, mask=exists, other=0.0).to(tl.float32)
        out = out * scale + shift
    return out


def tile_of(members: int, length: int) -> tuple[int, int]:
    """(BLOCK_CHANNELS, BLOCK_LENGTH) of a whole group."""
    return triton.next_power_of_2(members), triton.next_power_of_2(length)


def tile_of_loop(block_channels: int, block_length: int, elements: int) -> tuple[int, int]:
    """(BLOCK_CHANNELS, BLOCK_LENGTH) of a tile of a large group, of so many elements and as long as it goes."""
    block_length = min(block_length, elements)
    return min(block_channels, elements // block_length), block_length


def samples_of_tile(batch: int, elements: int) -> int:
    """BLOCK_SAMPLES: a power of two, so that a tile has about TILE_ELEMENTS."""
    return min(max(1, TILE_ELEMENTS // elements), triton.next_power_of_2(batch))
