"""GroupNorm, Mish and the time step's scale and shift of a diffusion U-Net, in one pass.

    normal[b, c, l] = (x[b, c, l] - mean) / √(variance + ε)         both over the channels of c's group and all l
    affine          = normal · weight[c] + bias[c]
    out[b, c, l]    = scale[b, c] · mish(affine) + shift[b, c]      mish(a) = a · tanh(log(1 + exp(a)))

scale multiplies as it stands, and after the activation, as in Diffusion Policy. Other U-Nets scale the normalised
numbers by 1 + scale, before it. Without scale and shift (both None) the result is mish(affine).

    as                        reads  writes   elements moved for each element
    three operations            4      3            7          the norm, which reads x twice; Mish; scale and shift
    one pass                    1      1            2          a group stays in registers: up to ONE_PASS_ELEMENTS
    a loop over tiles           2      1            3          larger groups (`group_norm_mish_loop`)

FLOPs: about 20 per element, one exponential and one division among them.

The variance is the mean of (x - mean)², after the mean is known. E[x²] - E[x]² would cancel: where the mean is 10,000
and the variance 1, both are near 10⁸, of which float32 steps by 8.

A tile is some samples of one group: [samples · channels of the group, length], padded to powers of two. A robot's
action sequence is 16 steps long, and a group of 32 channels then 1 KB: several samples make one tile.

Sources: Wu and He, Group normalization, arXiv 1803.08494. Misra, Mish, arXiv 1908.08681. Chi et al., Diffusion Policy,
arXiv 2303.04137 (the block).
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.checks import check_epsilon
from course_lib.kernels.fused.group_norm_mish_checks import check
from course_lib.kernels.fused.group_norm_mish_loop import launch_loop
from course_lib.kernels.fused.group_norm_mish_parts import (
    TILE_ELEMENTS,
    mish,
    samples_of_tile,
    scaled_and_shifted,
    tile_of,
)

ONE_PASS_ELEMENTS = 16384  # of a group, padded: 32 for each of 512 threads
WARPS = {2048: 2, 4096: 4, 8192: 8, 16384: 16}


def group_norm_mish_reference(x, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """The plain PyTorch meaning of `group_norm_mish_forward`'s first result, in float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    _, normal = statistics_and_normal(wide, groups, epsilon)
    affine = normal * weight.to(wide.dtype)[:, None] + bias.to(wide.dtype)[:, None]
    out = affine * tanh_of_softplus(affine)
    if scale is not None:
        out = out * scale.to(wide.dtype)[:, :, None] + shift.to(wide.dtype)[:, :, None]
    return out.to(x.dtype)


def tanh_of_softplus(x):
    """Mish's factor, tanh(log(1 + exp(x))); 1 where the exponential overflows."""
    return torch.tanh(torch.log1p(torch.exp(x)))


def statistics_and_normal(x, groups, epsilon):
    """1 / √(variance + ε), shaped to be multiplied with [batch, groups, ...], and x normalised, of x's shape."""
    rows = x.unflatten(1, (groups, -1)).flatten(2)  # [batch, groups, channels of a group · length]
    centred = rows - rows.mean(dim=-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + epsilon)
    return inverse, (centred * inverse).view(x.shape)


@triton.jit
def group_norm_mish_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    scale_pointer,
    shift_pointer,
    out_pointer,
    statistics_pointer,
    batch,
    channels,
    groups,
    length_units,
    batch_stride_units,
    channel_stride_units,
    scale_stride,
    shift_stride,
    epsilon,
    UNIT: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: one group of BLOCK_SAMPLES samples, read once; out, which is contiguous, written once.

    Length and strides come as numbers of units of UNIT elements, so that the compiler knows what divides them and loads
    a unit at once. scale_pointer and shift_pointer are None together. statistics_pointer: float32 [batch, groups, 2],
    the mean and 1 / √(variance + ε).
    """
    length = length_units * UNIT
    members = channels // groups
    group = tl.program_id(0) % groups
    first = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_SAMPLES
    sample = first + tl.arange(0, BLOCK_SAMPLES)[:, None, None]  # [BLOCK_SAMPLES, 1, 1]
    member = tl.arange(0, BLOCK_CHANNELS)[None, :, None]  # [1, BLOCK_CHANNELS, 1]
    channel = group * members + member
    position = tl.arange(0, BLOCK_LENGTH)[None, None, :]  # [1, 1, BLOCK_LENGTH]
    exists = (sample < batch) & (member < members)  # [BLOCK_SAMPLES, BLOCK_CHANNELS, 1]
    inside = exists & (position < length)  # the whole tile, [BLOCK_SAMPLES, BLOCK_CHANNELS, BLOCK_LENGTH]
    x_row = x_pointer + sample * (batch_stride_units * UNIT) + channel.to(tl.int64) * (channel_stride_units * UNIT)
    x = tl.load(x_row + position, mask=inside, other=0.0).to(tl.float32)
    count = (members * length).to(tl.float32)
    mean = sum_of_each(x) / count  # [BLOCK_SAMPLES, 1, 1]
    centred = tl.where(inside, x - mean, 0.0)
    inverse = tl.rsqrt(sum_of_each(centred * centred) / count + epsilon)
    statistics = statistics_pointer + 2 * (sample * groups + group)
    tl.store(statistics, mean, mask=sample < batch)
    tl.store(statistics + 1, inverse, mask=sample < batch)
    weight = tl.load(weight_pointer + channel, mask=member < members, other=0.0).to(tl.float32)
    bias = tl.load(bias_pointer + channel, mask=member < members, other=0.0).to(tl.float32)
    out = mish(centred * (inverse * weight) + bias, ASSEMBLY)
    out = scaled_and_shifted(out, scale_pointer, shift_pointer, sample, channel, exists, scale_stride, shift_stride)
    out_row = out_pointer + (sample * channels + channel) * length
    tl.store(out_row + position, out.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_each(tile):
    """[BLOCK_SAMPLES, ...] of three dimensions -> [BLOCK_SAMPLES, 1, 1], or a number where there is one sample.

    The sum of a whole tile adds up what a thread holds first, so the threads exchange one number each. Axis by axis
    they exchange one for each channel.
    """
    if tile.shape[0] == 1:
        total = tl.sum(tile)
    else:
        total = tl.sum(tl.sum(tile, axis=2, keep_dims=True), axis=1, keep_dims=True)
    return total


def group_norm_mish_forward(x, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """(out, statistics) by a kernel, without a gradient.

    Args:
        x: [batch, channels, length], float32, float16 or bfloat16, of any strides with a contiguous last dimension. The
            batch may be 0.
        groups: a divisor of channels: neighbouring channels that share a mean and a variance.
        weight, bias: [channels], contiguous, of x's dtype or float32.
        scale, shift: [batch, channels], of x's dtype and any strides with a contiguous last dimension, such as the
            halves of one linear layer's result; or None, both.
        epsilon: at least 0, added to the variance. With 0 a group of equal numbers is NaN, as in PyTorch.

    Returns:
        out, contiguous, of x's shape and dtype, and statistics, float32 [batch, groups, 2]: the mean and
            1 / √(variance + ε).

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check(x, groups, weight, bias, scale, shift)
    check_epsilon(epsilon)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    statistics = torch.empty(x.shape[0], groups, 2, dtype=torch.float32, device=x.device)
    if x.shape[0] > 0:
        launch(x, groups, (weight, bias, scale, shift), out, statistics, float(epsilon))
    return out, statistics


def launch(x, groups: int, vectors, out, statistics, epsilon: float) -> None:
    batch, channels, length = x.shape
    film = [0 if tensor is None else tensor.stride(0) for tensor in vectors[2:]]
    block_channels, block_length = tile_of(channels // groups, length)
    if block_channels * block_length > ONE_PASS_ELEMENTS:
        launch_loop(x, groups, vectors, out, statistics, epsilon, (block_channels, block_length))
        return
    block_samples = samples_of_tile(batch, block_channels * block_length)
    unit = math.gcd(length, *x.stride()[:2], LARGEST_GROUP)
    group_norm_mish_kernel[(groups * triton.cdiv(batch, block_samples),)](
        x, *vectors, out, statistics, batch, channels, groups, length // unit, *(s // unit for s in x.stride()[:2]),
        *film, epsilon, UNIT=unit, BLOCK_SAMPLES=block_samples, BLOCK_CHANNELS=block_channels,
        BLOCK_LENGTH=block_length, ASSEMBLY=x.is_cuda,
        num_warps=WARPS[max(TILE_ELEMENTS, block_samples * block_channels * block_length)],
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the block of Diffusion Policy, and the largest group of one pass."""
    cases = []
    tiles = ((4, 32, 16), (1, 64, 256))
    for kind in ("fp16", "fp32"):
        for samples, members, length in tiles:
            constants = {"UNIT": 8, "BLOCK_SAMPLES": samples, "BLOCK_CHANNELS": members, "BLOCK_LENGTH": length,
                         "ASSEMBLY": True}  # fmt: skip
            cases.append(CompileCase(group_norm_mish_kernel, signature_of(group_norm_mish_kernel, kind), constants,
                                     num_warps=WARPS[samples * members * length],
                                     label=f"{kind} {members} × {length}"))  # fmt: skip
    return cases
