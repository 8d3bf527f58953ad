"""The backward pass of GroupNorm + Mish with scale and shift: sums along rows, over a group, and over the batch.

With normal, affine as in `group_norm_mish`, g the gradient of out, and slope = mish'(affine):

    shift_gradient[b, c]  = Σ over l of g                  scale_gradient[b, c] = Σ over l of g · mish(affine)
    a                     = g · scale · slope              the gradient of affine
    bias_gradient[c]      = Σ over b, l of a               weight_gradient[c]   = Σ over b, l of a · normal
    x_gradient            = (n - mean(n) - normal · mean(n · normal)) / √(variance + ε)      n = a · weight

The means are over a group. Both follow from the sums of a row: Σ over l of n = weight[c] · Σ over l of a.

    one pass            2 reads and 1 write of an element: x and g; groups of up to ONE_PASS_BYTES
    a loop over tiles   4 reads and 1 write; larger groups

FLOPs: about 40 per element. Kept from the forward pass are x and 8 bytes of statistics a group; Mish is computed again.

The gradients of weight and bias sum over the batch. A program takes one group of a band of samples and keeps its sums
in registers; it writes one row of partial sums for its channels, which a second, small launch adds up. In the loop each
sample is a band of its own. The order of additions is fixed, so results repeat bit for bit; atomic adds would not.
"""

import math

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_tensor
from course_lib.kernels.common.numbers import LARGEST_GROUP
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.group_norm_mish import statistics_and_normal, tanh_of_softplus
from course_lib.kernels.fused.group_norm_mish_checks import check
from course_lib.kernels.fused.group_norm_mish_parts import (
    TILE_ELEMENTS,
    mish_and_slope,
    samples_of_tile,
    tile_of,
    tile_of_loop,
    total_of_each,
)
from course_lib.kernels.fused.rms_norm_backward import bands
from course_lib.kernels.memory.row_sum import row_sum

ONE_PASS_BYTES = 32768  # of a group's x, padded: all that is made of an element is float32, and fills the registers
LOOP_ELEMENTS, LOOP_WARPS = 2048, 4  # of a tile of larger groups
WARPS = {2048: 4, 4096: 8, 8192: 32, 16384: 32}  # 8 to 16 elements a thread


def group_norm_mish_backward_reference(x, groups, weight, bias, scale, shift, out_gradient, epsilon=1e-5):
    """The plain PyTorch meaning of `group_norm_mish_backward`, in float32 at least: a gradient for each tensor of it.

    They are those of x, weight, bias, scale and shift; the last two None where there is no scale.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gradient = out_gradient.to(wide)
    inverse, normal = statistics_and_normal(x.to(wide), groups, epsilon)
    factor = weight.to(wide)[:, None]
    affine = normal * factor + bias.to(wide)[:, None]
    tanh = tanh_of_softplus(affine)
    slope = tanh + affine * (1 - tanh.square()) * torch.sigmoid(affine)
    scale_gradient = shift_gradient = None
    if scale is not None:
        scale_gradient = (gradient * affine * tanh).sum(dim=2).to(scale.dtype)
        shift_gradient = gradient.sum(dim=2).to(shift.dtype)
        gradient = gradient * scale.to(wide)[:, :, None]
    found = gradient * slope
    rows = (found * factor).unflatten(1, (groups, -1)).flatten(2)  # [batch, groups, channels of a group · length]
    normal_rows = normal.view(rows.shape)
    projected = rows - rows.mean(-1, keepdim=True) - normal_rows * (rows * normal_rows).mean(-1, keepdim=True)
    x_gradient = (projected * inverse).view(x.shape).to(x.dtype)
    weight_gradient, bias_gradient = (found * normal).sum(dim=(0, 2)), found.sum(dim=(0, 2))
    return x_gradient, weight_gradient.to(weight.dtype), bias_gradient.to(bias.dtype), scale_gradient, shift_gradient


@triton.jit
def group_norm_mish_backward_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    scale_pointer,
    statistics_pointer,
    gradient_pointer,
    x_gradient_pointer,
    scale_gradient_pointer,
    shift_gradient_pointer,
    partial_sums_pointer,
    batch,
    samples_of_band,
    channels,
    groups,
    length_units,
    batch_stride_units,
    channel_stride_units,
    gradient_batch_stride_units,
    gradient_channel_stride_units,
    scale_stride,
    UNIT: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """One program: one group of a band of samples, BLOCK_SAMPLES of them at a time.

    partial_sums_pointer: float32 [bands, 2, channels], this program's share of the gradients of weight and bias. The
    gradients of x, scale and shift are contiguous; the last two are None with scale_pointer.
    """
    length = length_units * UNIT
    members = channels // groups
    group = tl.program_id(0) % groups
    band = tl.program_id(0) // groups
    row = tl.arange(0, BLOCK_SAMPLES * BLOCK_CHANNELS)  # [ROWS], ROWS = BLOCK_SAMPLES · BLOCK_CHANNELS
    member = row % BLOCK_CHANNELS
    channel = group * members + member
    position = tl.arange(0, BLOCK_LENGTH)[None, :]  # [1, BLOCK_LENGTH]
    count = (members * length).to(tl.float32)
    weight = tl.load(weight_pointer + channel, mask=member < members, other=0.0).to(tl.float32)  # [ROWS]
    bias = tl.load(bias_pointer + channel, mask=member < members, other=0.0).to(tl.float32)  # [ROWS]
    weight_sums = tl.zeros([BLOCK_SAMPLES * BLOCK_CHANNELS], tl.float32)
    bias_sums = tl.zeros([BLOCK_SAMPLES * BLOCK_CHANNELS], tl.float32)
    first = band.to(tl.int64) * samples_of_band
    for start in tl.range(first, tl.minimum(first + samples_of_band, batch), BLOCK_SAMPLES):
        sample = start + row // BLOCK_CHANNELS  # [ROWS]
        exists = (sample < batch) & (member < members)
        inside = exists[:, None] & (position < length)
        x_row = x_pointer + sample * (batch_stride_units * UNIT) + channel.to(tl.int64) * (channel_stride_units * UNIT)
        gradient_row = gradient_pointer + sample * (gradient_batch_stride_units * UNIT)
        gradient_row += channel.to(tl.int64) * (gradient_channel_stride_units * UNIT)
        x = tl.load(x_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)  # [ROWS, BLOCK_LENGTH]
        gradient = tl.load(gradient_row[:, None] + position, mask=inside, other=0.0).to(tl.float32)
        statistics = statistics_pointer + 2 * (sample * groups + group)
        mean = tl.load(statistics, mask=exists, other=0.0)  # [ROWS]
        inverse = tl.load(statistics + 1, mask=exists, other=0.0)  # [ROWS]
        normal = tl.where(inside, (x - mean[:, None]) * inverse[:, None], 0.0)  # [ROWS, BLOCK_LENGTH]
        value, found = mish_and_slope(normal * weight[:, None] + bias[:, None])
        found *= gradient  # [ROWS, BLOCK_LENGTH]
        if scale_pointer is not None:
            scale = tl.load(scale_pointer + sample * scale_stride + channel, mask=exists, other=0.0).to(tl.float32)
            found *= scale[:, None]
            scale_gradient = tl.sum(gradient * value, axis=1).to(scale_gradient_pointer.dtype.element_ty)
            shift_gradient = tl.sum(gradient, axis=1).to(shift_gradient_pointer.dtype.element_ty)
            tl.store(scale_gradient_pointer + sample * channels + channel, scale_gradient, mask=exists)
            tl.store(shift_gradient_pointer + sample * channels + channel, shift_gradient, mask=exists)
        found_sum = tl.sum(found, axis=1)  # [ROWS]
        product_sum = tl.sum(found * normal, axis=1)  # [ROWS]
        bias_sums += found_sum
        weight_sums += product_sum
        mean_found = total_of_each(found_sum * weight, BLOCK_SAMPLES, BLOCK_CHANNELS) / count  # [ROWS]
        mean_product = total_of_each(product_sum * weight, BLOCK_SAMPLES, BLOCK_CHANNELS) / count  # [ROWS]
        x_gradient = found * weight[:, None] - mean_found[:, None] - normal * mean_product[:, None]
        x_gradient *= inverse[:, None]  # [ROWS, BLOCK_LENGTH]
        x_gradient_row = x_gradient_pointer + (sample * channels + channel) * length
        tl.store(x_gradient_row[:, None] + position, x_gradient.to(x_gradient_pointer.dtype.element_ty), mask=inside)
    partial_sums = partial_sums_pointer + band.to(tl.int64) * (2 * channels) + group * members
    member_of_sums = tl.arange(0, BLOCK_CHANNELS)  # [BLOCK_CHANNELS]
    weight_sum = tl.sum(tl.reshape(weight_sums, [BLOCK_SAMPLES, BLOCK_CHANNELS]), axis=0)
    bias_sum = tl.sum(tl.reshape(bias_sums, [BLOCK_SAMPLES, BLOCK_CHANNELS]), axis=0)
    tl.store(partial_sums + member_of_sums, weight_sum, mask=member_of_sums < members)
    tl.store(partial_sums + channels + member_of_sums, bias_sum, mask=member_of_sums < members)


@triton.jit
def group_norm_mish_backward_loop_kernel(
    x_pointer,
    weight_pointer,
    bias_pointer,
    scale_pointer,
    statistics_pointer,
    gradient_pointer,
    x_gradient_pointer,
    scale_gradient_pointer,
    shift_gradient_pointer,
    partial_sums_pointer,
    channels,
    groups,
    length,
    batch_stride,
    channel_stride,
    gradient_batch_stride,
    gradient_channel_stride,
    scale_stride,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
):
    """One program: one large group of one sample, tile by tile: its sums first, then the gradient of x."""
    members = channels // groups
    group = tl.program_id(0) % groups
    sample = (tl.program_id(0) // groups).to(tl.int64)
    count = members.to(tl.float32) * length
    mean = tl.load(statistics_pointer + 2 * (sample * groups + group))
    inverse = tl.load(statistics_pointer + 2 * (sample * groups + group) + 1)
    x_sample = x_pointer + sample * batch_stride
    gradient_sample = gradient_pointer + sample * gradient_batch_stride
    mean_found = 0.0
    mean_product = 0.0
    for start_member in tl.range(0, members, BLOCK_CHANNELS):
        member = start_member + tl.arange(0, BLOCK_CHANNELS)  # [BLOCK_CHANNELS]
        channel = group * members + member
        exists = member < members
        weight = tl.load(weight_pointer + channel, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS]
        found_sum = tl.zeros([BLOCK_CHANNELS], tl.float32)
        product_sum = tl.zeros([BLOCK_CHANNELS], tl.float32)
        value_sum = tl.zeros([BLOCK_CHANNELS], tl.float32)
        gradient_sum = tl.zeros([BLOCK_CHANNELS], tl.float32)
        for start in tl.range(0, length, BLOCK_LENGTH):
            gradient, normal, value, found = tile_of_gradients(
                x_sample, gradient_sample, weight_pointer, bias_pointer, scale_pointer, sample * scale_stride, channel,
                exists, start, length, channel_stride, gradient_channel_stride, mean, inverse, BLOCK_LENGTH,
            )  # fmt: skip
            found_sum += tl.sum(found, axis=1)
            product_sum += tl.sum(found * normal, axis=1)
            value_sum += tl.sum(gradient * value, axis=1)
            gradient_sum += tl.sum(gradient, axis=1)
        if scale_pointer is not None:
            element = scale_gradient_pointer.dtype.element_ty
            tl.store(scale_gradient_pointer + sample * channels + channel, value_sum.to(element), mask=exists)
            tl.store(shift_gradient_pointer + sample * channels + channel, gradient_sum.to(element), mask=exists)
        partial_sums = partial_sums_pointer + sample * (2 * channels) + channel
        tl.store(partial_sums, product_sum, mask=exists)
        tl.store(partial_sums + channels, found_sum, mask=exists)
        mean_found += tl.sum(found_sum * weight, axis=0) / count
        mean_product += tl.sum(product_sum * weight, axis=0) / count
    for start_member in tl.range(0, members, BLOCK_CHANNELS):
        member = start_member + tl.arange(0, BLOCK_CHANNELS)  # [BLOCK_CHANNELS]
        channel = group * members + member
        exists = member < members
        weight = tl.load(weight_pointer + channel, mask=exists, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS]
        for start in tl.range(0, length, BLOCK_LENGTH):
            _, normal, _, found = tile_of_gradients(
                x_sample, gradient_sample, weight_pointer, bias_pointer, scale_pointer, sample * scale_stride, channel,
                exists, start, length, channel_stride, gradient_channel_stride, mean, inverse, BLOCK_LENGTH,
            )  # fmt: skip
            x_gradient = inverse * (found * weight[:, None] - mean_found - normal * mean_product)
            position = start + tl.arange(0, BLOCK_LENGTH)[None, :]  # [1, BLOCK_LENGTH]
            x_gradient_tile = x_gradient_pointer + ((sample * channels + channel) * length)[:, None] + position
            tl.store(x_gradient_tile, x_gradient.to(x_gradient_pointer.dtype.element_ty),
                     mask=exists[:, None] & (position < length))  # fmt: skip


@triton.jit
def tile_of_gradients(
    x_sample, gradient_sample, weight_pointer, bias_pointer, scale_pointer, scale_offset, channel, exists, start,
    length, channel_stride, gradient_channel_stride, mean, inverse, BLOCK_LENGTH: tl.constexpr,
):  # fmt: skip
    """(gradient of out, normal, mish(affine), gradient of affine) of a tile, 0 outside; [BLOCK_CHANNELS, BLOCK_LENGTH].

    channel, exists: [BLOCK_CHANNELS].
    """
    position = start + tl.arange(0, BLOCK_LENGTH)[None, :]  # [1, BLOCK_LENGTH]
    inside = exists[:, None] & (position < length)
    wide_channel = channel.to(tl.int64)[:, None]  # [BLOCK_CHANNELS, 1]
    x = tl.load(x_sample + wide_channel * channel_stride + position, mask=inside, other=0.0).to(tl.float32)
    gradient_tile = gradient_sample + wide_channel * gradient_channel_stride + position
    gradient = tl.load(gradient_tile, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_pointer + channel, mask=exists, other=0.0).to(tl.float32)[:, None]  # [BLOCK_CHANNELS, 1]
    bias = tl.load(bias_pointer + channel, mask=exists, other=0.0).to(tl.float32)[:, None]  # [BLOCK_CHANNELS, 1]
    normal = tl.where(inside, (x - mean) * inverse, 0.0)
    value, slope = mish_and_slope(normal * weight + bias)
    found = gradient * slope
    if scale_pointer is not None:
        found *= tl.load(scale_pointer + scale_offset + channel, mask=exists, other=0.0).to(tl.float32)[:, None]
    return gradient, normal, value, found


def group_norm_mish_backward(x, statistics, groups, weight, bias, scale, shift, out_gradient):
    """The gradients of x, weight, bias, scale and shift; the last two None where there is no scale.

    Args:
        x, groups, weight, bias, scale, shift: as given to the forward pass.
        statistics: float32 [batch, groups, 2], contiguous, as the forward pass returned it.
        out_gradient: of x's shape and dtype, of any strides; one that the kernel can't follow is copied.

    Each gradient is contiguous, of the shape and dtype of its tensor, accumulated in float32.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check(x, groups, weight, bias, scale, shift)
    check_tensor("statistics", statistics, (torch.float32,))
    batch, channels, length = x.shape
    if statistics.shape != (batch, groups, 2) or not statistics.is_contiguous():
        raise ValueError(
            f"statistics has shape {tuple(statistics.shape)} and strides {statistics.stride()}; it must be what the "
            f"forward pass returned, contiguous {(batch, groups, 2)}."
        )
    check_tensor("out_gradient", out_gradient, FLOAT_DTYPES)
    check_alike("out_gradient", out_gradient, "x", x)
    if length > 1 and out_gradient.stride(2) != 1:
        out_gradient = out_gradient.contiguous()
    x_gradient = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    film_gradients: tuple[torch.Tensor | None, ...] = (None, None)
    if scale is not None:
        film_gradients = tuple(torch.empty(batch, channels, dtype=x.dtype, device=x.device) for _ in range(2))
    if batch == 0:
        return x_gradient, torch.zeros_like(weight), torch.zeros_like(bias), *film_gradients
    inputs = x, weight, bias, scale, statistics, out_gradient
    partial_sums = launch(inputs, groups, (x_gradient, *film_gradients))
    sums = row_sum(partial_sums.flatten(1).t()).view(2, channels)
    # Copies: what an operator returns may not be parts of one tensor.
    return x_gradient, sums[0].to(weight.dtype, copy=True), sums[1].to(bias.dtype, copy=True), *film_gradients


def launch(inputs, groups: int, gradients) -> torch.Tensor:
    """Returns the partial sums of the gradients of weight and bias, float32 [bands, 2, channels]."""
    x, scale, out_gradient = inputs[0], inputs[3], inputs[5]
    batch, channels, length = x.shape
    strides = *x.stride()[:2], *out_gradient.stride()[:2]
    scale_stride = 0 if scale is None else scale.stride(0)
    block_channels, block_length = tile_of(channels // groups, length)
    if block_channels * block_length * x.element_size() > ONE_PASS_BYTES:
        block_channels, block_length = tile_of_loop(block_channels, block_length, LOOP_ELEMENTS)
        partial_sums = torch.empty(batch, 2, channels, dtype=torch.float32, device=x.device)
        group_norm_mish_backward_loop_kernel[(batch * groups,)](
            *inputs, *gradients, partial_sums, channels, groups, length, *strides, scale_stride,
            BLOCK_CHANNELS=block_channels, BLOCK_LENGTH=block_length, num_warps=LOOP_WARPS,
        )  # fmt: skip
        return partial_sums
    block_samples = samples_of_tile(batch, block_channels * block_length)
    samples_of_band, count = bands(batch, block_samples, groups)
    unit = math.gcd(length, *strides, LARGEST_GROUP)
    partial_sums = torch.empty(count, 2, channels, dtype=torch.float32, device=x.device)
    group_norm_mish_backward_kernel[(groups * count,)](
        *inputs, *gradients, partial_sums, batch, samples_of_band, channels, groups, length // unit,
        *(stride // unit for stride in strides), scale_stride, UNIT=unit, BLOCK_SAMPLES=block_samples,
        BLOCK_CHANNELS=block_channels, BLOCK_LENGTH=block_length,
        num_warps=WARPS[max(TILE_ELEMENTS, block_samples * block_channels * block_length)],
    )  # fmt: skip
    return partial_sums


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: the block of Diffusion Policy, the largest group of one pass, and the loop.

    The largest group in 16 bits is squeezed into the registers; of a thread's 256 bytes 8 spill on sm_80, 24 on sm_75.
    """
    cases = []
    for kind, largest in (("fp16", (1, 64, 256)), ("fp32", (1, 32, 256))):
        for samples, members, length in ((4, 32, 16), largest):
            constants = {"UNIT": 8, "BLOCK_SAMPLES": samples, "BLOCK_CHANNELS": members, "BLOCK_LENGTH": length}
            signature = signature_of(group_norm_mish_backward_kernel, kind)
            cases.append(CompileCase(group_norm_mish_backward_kernel, signature, constants,
                                     num_warps=WARPS[samples * members * length],
                                     max_spill_bytes=32 if samples == 1 and kind == "fp16" else 0,
                                     label=f"{kind} {members} × {length}"))  # fmt: skip
        constants = {"BLOCK_CHANNELS": 1, "BLOCK_LENGTH": LOOP_ELEMENTS}
        cases.append(CompileCase(group_norm_mish_backward_loop_kernel,
                                 signature_of(group_norm_mish_backward_loop_kernel, kind), constants,
                                 num_warps=LOOP_WARPS, label=kind))  # fmt: skip
    return cases
