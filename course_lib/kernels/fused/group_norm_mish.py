"""GroupNorm, Mish and the time step's scale and shift of a diffusion U-Net, in one pass.

    normal[b, c, l] = (x[b, c, l] - mean) / √(variance + ε)         both over the channels of c's group and all l
    affine          = normal · weight[c] + bias[c]
    out[b, c, l]    = scale[b, c] · mish(affine) + shift[b, c]      mish(a) = a · tanh(log(1 + exp(a)))

scale multiplies as it stands, and after the activation, as in Diffusion Policy. Other U-Nets scale the normalised
numbers by 1 + scale, before it. Without scale and shift (both None) the result is mish(affine).

    as                        reads  writes   elements moved for each element
    three operations            4      3            7          the norm, which reads x twice; Mish; scale and shift
    one pass                    1      1            2          a group stays in registers: up to ONE_PASS_ELEMENTS
    a loop over tiles           2      1            3          larger groups; the second read is mostly from the L2

FLOPs: about 20 per element, one exponential and one division among them.

The variance is the mean of (x - mean)², after the mean is known. E[x²] - E[x]² would cancel: where the mean is 10,000
and the variance 1, both are near 10⁸, of which float32 steps by 8. In the loop each tile has its own mean and sum of
squares, taken in registers, and `merged_moments` adds them up.

A tile is some samples of one group: [samples · channels of the group, length], padded to powers of two. A robot's
action sequence is 16 steps long, and a group of 32 channels then 1 KB: several samples make one tile.

Sources: Wu and He, Group normalization, arXiv 1803.08494. Misra, Mish, arXiv 1908.08681. Chi et al., Diffusion Policy,
arXiv 2303.04137 (the block). Chan, Golub and LeVeque, Updating formulae, 1979 (the merge).
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP, LOG2_E
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.checks import check_epsilon, check_weight

ONE_PASS_ELEMENTS = 16384  # of a group, padded: 32 for each of 512 threads
TILE_ELEMENTS = 2048  # several samples of a small group make one tile of this size
LOOP_ELEMENTS, LOOP_WARPS = 4096, 8  # of a tile of larger groups
WARPS = {2048: 2, 4096: 4, 8192: 8, 16384: 16}
ALL = tuple(ARCHITECTURES)


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
def total_of_each(sums, OUTER: tl.constexpr, INNER: tl.constexpr):
    """[OUTER · INNER] -> the same shape: each element becomes the sum of the INNER neighbours that it belongs to."""
    totals = tl.sum(tl.reshape(sums, [OUTER, INNER]), axis=1)  # [OUTER]
    return tl.reshape(tl.broadcast_to(totals[:, None], [OUTER, INNER]), [OUTER * INNER])


@triton.jit
def merged_moments(mean, squares, count, tile_mean, tile_squares, tile_count):
    """Mean, sum of squared distances from it, and count, of two sets of numbers together."""
    total = count + tile_count
    distance = tile_mean - mean
    share = tile_count / total
    return mean + distance * share, squares + tile_squares + distance * distance * count * share, total


@triton.jit
def scaled_and_shifted(out, scale_pointer, shift_pointer, sample, channel, exists, scale_stride, shift_stride):
    """scale · out + shift; out itself where there is none."""
    if scale_pointer is not None:
        scale = tl.load(scale_pointer + sample * scale_stride + channel, mask=exists, other=0.0).to(tl.float32)
        shift = tl.load(shift_pointer + sample * shift_stride + channel, mask=exists, other=0.0).to(tl.float32)
        out = out * scale + shift
    return out


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


@triton.jit
def group_norm_mish_loop_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    scale_pointer,
    shift_pointer,
    out_pointer,
    statistics_pointer,
    channels,
    groups,
    length,
    batch_stride,
    channel_stride,
    scale_stride,
    shift_stride,
    epsilon,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: one large group of one sample, tile by tile, read twice and written once."""
    members = channels // groups
    group = tl.program_id(0) % groups
    sample = (tl.program_id(0) // groups).to(tl.int64)
    x_sample = x_pointer + sample * batch_stride
    mean = 0.0
    squares = 0.0
    count = 0.0
    for start_member in tl.range(0, members, BLOCK_CHANNELS):
        member = start_member + tl.arange(0, BLOCK_CHANNELS)[:, None]  # [BLOCK_CHANNELS, 1]
        x_row = x_sample + (group * members + member).to(tl.int64) * channel_stride
        for start in tl.range(0, length, BLOCK_LENGTH):
            position = start + tl.arange(0, BLOCK_LENGTH)[None, :]  # [1, BLOCK_LENGTH]
            inside = (member < members) & (position < length)
            x = tl.load(x_row + position, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            rows = tl.minimum(BLOCK_CHANNELS, members - start_member)
            tile_count = (rows * tl.minimum(BLOCK_LENGTH, length - start)).to(tl.float32)
            tile_mean = tl.sum(x) / tile_count
            centred = tl.where(inside, x - tile_mean, 0.0)  # [BLOCK_CHANNELS, BLOCK_LENGTH]
            mean, squares, count = merged_moments(mean, squares, count, tile_mean, tl.sum(centred * centred),
                                                  tile_count)  # fmt: skip
    inverse = tl.rsqrt(squares / count + epsilon)
    tl.store(statistics_pointer + 2 * (sample * groups + group), mean)
    tl.store(statistics_pointer + 2 * (sample * groups + group) + 1, inverse)
    for start_member in tl.range(0, members, BLOCK_CHANNELS):
        member = start_member + tl.arange(0, BLOCK_CHANNELS)[:, None]  # [BLOCK_CHANNELS, 1]
        channel = group * members + member
        exists = member < members
        weight = tl.load(weight_pointer + channel, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS, 1]
        bias = tl.load(bias_pointer + channel, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS, 1]
        for start in tl.range(0, length, BLOCK_LENGTH):
            position = start + tl.arange(0, BLOCK_LENGTH)[None, :]  # [1, BLOCK_LENGTH]
            inside = exists & (position < length)
            x_tile = x_sample + channel.to(tl.int64) * channel_stride + position
            x = tl.load(x_tile, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
            out = mish((x - mean) * (inverse * weight) + bias, ASSEMBLY)
            out = scaled_and_shifted(out, scale_pointer, shift_pointer, sample, channel, exists, scale_stride,
                                     shift_stride)  # [BLOCK_CHANNELS, BLOCK_LENGTH]  # fmt: skip
            out_tile = out_pointer + (sample * channels + channel) * length + position
            tl.store(out_tile, out.to(out_pointer.dtype.element_ty), mask=inside, eviction_policy="evict_first")


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


def check(x, groups, weight, bias, scale, shift) -> None:
    """What both passes ask of the forward pass's arguments."""
    check_tensor("x", x, FLOAT_DTYPES)
    check_channels("x", x)
    check_groups(groups, x.shape[1])
    check_film(scale, shift, x, x.shape[1])
    for name, vector in (("weight", weight), ("bias", bias)):
        check_weight(vector, x, name, x.shape[1], "channel")


def check_channels(name: str, x) -> None:
    """Raise a ValueError unless it is [batch, channels, length] with contiguous rows that are not empty."""
    if x.dim() != 3 or 0 in x.shape[1:]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be [batch, channels, length], with at least one channel and "
            "one position."
        )
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(
            f"{name} has strides {x.stride()}; its last dimension must be contiguous (stride 1). "
            f"Call {name}.contiguous() first."
        )


def check_groups(groups, channels: int) -> None:
    whole = isinstance(groups, int) and not isinstance(groups, bool)
    if not whole or groups < 1 or channels % groups:
        raise ValueError(
            f"groups is {groups!r} for {channels} channels; it must be a whole number of at least 1 that divides them."
        )


def check_film(scale, shift, x, channels: int) -> None:
    """Raise a ValueError unless scale and shift are both None, or both [batch, channels] of x's dtype."""
    if (scale is None) != (shift is None):
        given, missing = ("shift", "scale") if scale is None else ("scale", "shift")
        raise ValueError(f"{missing} is None beside a {given}; pass both, or neither.")
    if scale is None:
        return
    wanted = x.new_empty((x.shape[0], channels))
    for name, tensor in (("scale", scale), ("shift", shift)):
        check_tensor(name, tensor, FLOAT_DTYPES)
        check_alike(name, tensor, "[batch, channels] of x", wanted)
        if channels > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; its last dimension must be contiguous (stride 1). "
                f"Call {name}.contiguous() first."
            )


def launch(x, groups: int, vectors, out, statistics, epsilon: float) -> None:
    batch, channels, length = x.shape
    film = [0 if tensor is None else tensor.stride(0) for tensor in vectors[2:]]
    block_channels, block_length = tile_of(channels // groups, length)
    if block_channels * block_length > ONE_PASS_ELEMENTS:
        block_channels, block_length = tile_of_loop(block_channels, block_length, LOOP_ELEMENTS)
        group_norm_mish_loop_kernel[(batch * groups,)](
            x, *vectors, out, statistics, channels, groups, length, *x.stride()[:2], *film, epsilon,
            BLOCK_CHANNELS=block_channels, BLOCK_LENGTH=block_length, ASSEMBLY=x.is_cuda, num_warps=LOOP_WARPS,
        )  # fmt: skip
        return
    block_samples = samples_of_tile(batch, block_channels * block_length)
    unit = math.gcd(length, *x.stride()[:2], LARGEST_GROUP)
    group_norm_mish_kernel[(groups * triton.cdiv(batch, block_samples),)](
        x, *vectors, out, statistics, batch, channels, groups, length // unit, *(s // unit for s in x.stride()[:2]),
        *film, epsilon, UNIT=unit, BLOCK_SAMPLES=block_samples, BLOCK_CHANNELS=block_channels,
        BLOCK_LENGTH=block_length, ASSEMBLY=x.is_cuda,
        num_warps=WARPS[max(TILE_ELEMENTS, block_samples * block_channels * block_length)],
    )  # fmt: skip


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


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the block of Diffusion Policy, the largest group of one pass, and the loop."""
    cases = []
    tiles = ((4, 32, 16), (1, 64, 256))
    for kind in ("fp16", "fp32"):
        for samples, members, length in tiles:
            constants = {"UNIT": 8, "BLOCK_SAMPLES": samples, "BLOCK_CHANNELS": members, "BLOCK_LENGTH": length,
                         "ASSEMBLY": True}  # fmt: skip
            cases.append(CompileCase(group_norm_mish_kernel, signature_of(group_norm_mish_kernel, kind), constants,
                                     num_warps=WARPS[samples * members * length],
                                     label=f"{kind} {members} × {length}"))  # fmt: skip
        constants = {"BLOCK_CHANNELS": 1, "BLOCK_LENGTH": LOOP_ELEMENTS, "ASSEMBLY": True}
        signature = signature_of(group_norm_mish_loop_kernel, kind)
        cases.append(CompileCase(group_norm_mish_loop_kernel, signature, constants, num_warps=LOOP_WARPS,
                                 label=kind))  # fmt: skip
    return cases
