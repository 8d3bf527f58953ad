"""Conv1d, GroupNorm, Mish and the time step's scale and shift in one kernel: the block of Diffusion Policy, forward.

    convolved[b, o, l] = conv_bias[o] + Σ over i, k of filters[o, i, k] · x[b, i, l + k - (taps - 1) / 2]
    out                = scale · mish(GroupNorm(convolved)) + shift           as in `group_norm_mish`

x is 0 outside of its length, so the length stays: the padding is 2 for 5 taps.

The convolution is a matrix product, [channels, in_channels · taps] × [in_channels · taps, batch · length], whose second
factor is never written down: a tile of it is gathered from x while it is needed. One program computes the product for
all channels of one group and all positions of some samples, so that the group's mean and variance are sums over what it
holds in registers. Nothing of `convolved` reaches memory.

    as              elements moved for each element of out, beside the convolution's own reads
    two kernels     3        convolved is written and read again, out written
    one kernel      1        out is written

The price: each of the `groups` programs of a sample reads the sample's x, all but the first time from the cache, and
each reads its group's filters once for BLOCK_SAMPLES samples. Tiles are as large as a group, and no larger: a group has
to fit the registers (LARGEST_TILE elements, padded), or it is refused.

What that costs: on an H100 (PyTorch 2.11, Triton 3.6), 256 channels in and out, 4096 samples of length 16, 5 taps,
bf16, one kernel took 648 µs; cuDNN's convolution and one pass behind it 273 µs; what torch.compile makes of it 245 µs.
The likely reason, not measured: neighbouring positions are shifted by their tap and masked one by one, so that windows
are loaded element by element. So this form saves memory and not time.

FLOPs: 2 · in_channels · taps for each element of out, on tensor cores in 16 bits; sums are float32 and are not rounded
before the norm. A gradient is not here: train with torch.nn.functional.conv1d and `group_norm_mish`.

Source: Chi et al., Diffusion Policy, arXiv 2303.04137 (the block).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.checks import FLOAT_DTYPES, check_contiguous, check_tensor
from course_lib.kernels.common.numbers import FLOAT32_PRECISION
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_reference
from course_lib.kernels.fused.group_norm_mish_checks import check_channels, check_film, check_groups
from course_lib.kernels.fused.group_norm_mish_parts import mish_and_slope, total_of_each

SMALLEST_SIDE = 16  # of a tensor core's tile
TILE_ELEMENTS, LARGEST_TILE = 2048, 4096  # of a program's part of out
BLOCK_K = 32  # products added at a time
NUM_WARPS = {2048: 4, 4096: 8}
TENSOR_CORES = dict.fromkeys((80, 86, 89, 120), "mma.sync")  # on sm_90 a wide tile uses wgmma


def conv_group_norm_mish_reference(
    x, filters, conv_bias, groups, weight, bias, scale=None, shift=None, epsilon=1e-5
):  # fmt: skip
    """The plain PyTorch meaning of `conv_group_norm_mish`, in float32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    # Written as one product, and not as torch.nn.functional.conv1d, whose order of additions cannot be changed.
    taps = filters.shape[2]
    windows = F.pad(x.to(wide), (taps // 2, taps // 2)).unfold(2, taps, 1)  # [batch, in_channels, length, taps]
    windows = windows.transpose(1, 2).flatten(2)  # [batch, length, in_channels · taps]
    convolved = (windows @ filters.to(wide).flatten(1).t()).transpose(1, 2) + conv_bias.to(wide)[:, None]
    vectors = [None if vector is None else vector.to(wide) for vector in (weight, bias, scale, shift)]
    return group_norm_mish_reference(convolved, groups, *vectors, epsilon).to(x.dtype)


@triton.jit
def conv_group_norm_mish_kernel(
    x_pointer,
    filters_pointer,
    conv_bias_pointer,
    weight_pointer,
    bias_pointer,
    scale_pointer,
    shift_pointer,
    out_pointer,
    batch,
    in_channels,
    channels,
    groups,
    length,
    batch_stride,
    channel_stride,
    scale_stride,
    shift_stride,
    epsilon,
    TAPS: tl.constexpr,
    BLOCK_SAMPLES: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_LENGTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one group of BLOCK_SAMPLES samples.

    filters, [channels, in_channels, TAPS], and out, [batch, channels, length], are contiguous.
    """
    members = channels // groups
    group = tl.program_id(0) % groups
    member = tl.arange(0, BLOCK_CHANNELS)  # [BLOCK_CHANNELS]
    channel = group * members + member
    place = tl.arange(0, BLOCK_SAMPLES * BLOCK_LENGTH)  # [PLACES], PLACES = BLOCK_SAMPLES · BLOCK_LENGTH
    sample = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_SAMPLES + place // BLOCK_LENGTH  # [PLACES]
    position = place % BLOCK_LENGTH
    exists = (sample < batch) & (position < length)
    products = in_channels * TAPS
    accumulator = tl.zeros([BLOCK_CHANNELS, BLOCK_SAMPLES * BLOCK_LENGTH], tl.float32)
    for start in tl.range(0, products, BLOCK_K):
        term = start + tl.arange(0, BLOCK_K)  # [BLOCK_K], in_channel · TAPS + tap
        filters_tile = filters_pointer + channel.to(tl.int64)[:, None] * products + term[None, :]
        filters = tl.load(filters_tile, mask=(member < members)[:, None] & (term < products)[None, :],
                          other=0.0)  # [BLOCK_CHANNELS, BLOCK_K]  # fmt: skip
        neighbour = position[None, :] + (term % TAPS - TAPS // 2)[:, None]  # [BLOCK_K, PLACES]
        window_rows = x_pointer + sample[None, :] * batch_stride + (term // TAPS).to(tl.int64)[:, None] * channel_stride
        inside = exists[None, :] & (term < products)[:, None] & (neighbour >= 0) & (neighbour < length)
        windows = tl.load(window_rows + neighbour, mask=inside, other=0.0)  # [BLOCK_K, PLACES]
        accumulator = tl.dot(filters, windows, accumulator, input_precision=FLOAT32_PRECISION)
    conv_bias = tl.load(conv_bias_pointer + channel, mask=member < members, other=0.0).to(tl.float32)
    convolved = accumulator + conv_bias[:, None]  # [BLOCK_CHANNELS, PLACES]
    inside = (member < members)[:, None] & exists[None, :]
    count = (members * length).to(tl.float32)
    sums = tl.sum(tl.where(inside, convolved, 0.0), axis=0)  # [PLACES]
    mean = total_of_each(sums, BLOCK_SAMPLES, BLOCK_LENGTH) / count  # [PLACES]
    centred = tl.where(inside, convolved - mean[None, :], 0.0)  # [BLOCK_CHANNELS, PLACES]
    squares = total_of_each(tl.sum(centred * centred, axis=0), BLOCK_SAMPLES, BLOCK_LENGTH)
    inverse = tl.rsqrt(squares / count + epsilon)  # [PLACES]
    weight = tl.load(weight_pointer + channel, mask=member < members, other=0.0).to(tl.float32)[:, None]
    bias = tl.load(bias_pointer + channel, mask=member < members, other=0.0).to(tl.float32)[:, None]
    out, _ = mish_and_slope(centred * inverse[None, :] * weight + bias)
    if scale_pointer is not None:
        scale_tile = scale_pointer + sample[None, :] * scale_stride + channel[:, None]
        shift_tile = shift_pointer + sample[None, :] * shift_stride + channel[:, None]
        out = out * tl.load(scale_tile, mask=inside, other=0.0).to(tl.float32)
        out += tl.load(shift_tile, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_CHANNELS, PLACES]
    out_tile = out_pointer + (sample[None, :] * channels + channel[:, None]) * length + position[None, :]
    tl.store(out_tile, out.to(out_pointer.dtype.element_ty), mask=inside)


def conv_group_norm_mish(x, filters, conv_bias, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """scale · mish(GroupNorm(Conv1d(x))) + shift by one kernel.

    Args:
        x: [batch, in_channels, length], float32, float16 or bfloat16, of any strides with a contiguous last dimension.
        filters: [channels, in_channels, taps], contiguous, of x's dtype; an odd number of taps.
        conv_bias: [channels], contiguous, of x's dtype or float32.
        groups: a divisor of channels. A group's channels · length, each padded to a power of two and at least
            16 channels, may be at most LARGEST_TILE.
        weight, bias, scale, shift, epsilon: as for `group_norm_mish_forward`.

    Returns a contiguous tensor [batch, channels, length] of x's dtype.

    Raises:
        ValueError: an argument is not as above; the message names it.
    """
    check_tensor("x", x, FLOAT_DTYPES)
    check_channels("x", x)
    check_tensor("filters", filters, (x.dtype,))
    if filters.dim() != 3 or filters.shape[1] != x.shape[1] or filters.shape[2] % 2 == 0 or filters.shape[0] == 0:
        raise ValueError(
            f"filters has shape {tuple(filters.shape)}; it must be [channels, {x.shape[1]}, taps], with as many "
            "channels in the middle as x has and an odd number of taps."
        )
    check_contiguous("filters", filters)
    if filters.device != x.device:
        raise ValueError(f"filters is on device {filters.device}; it must be on that of x, {x.device}.")
    channels = filters.shape[0]
    check_groups(groups, channels)
    for name, vector in (("conv_bias", conv_bias), ("weight", weight), ("bias", bias)):
        check_weight(vector, x, name, channels, "channel of the result")
    check_film(scale, shift, x, channels)
    check_epsilon(epsilon)
    batch, in_channels, length = x.shape
    block_samples, block_channels, block_length = tile_of_block(batch, channels // groups, length)
    tile = block_samples * block_channels * block_length
    if tile > LARGEST_TILE:
        raise ValueError(
            f"groups is {groups} for {channels} channels of length {length}: a group is a tile of {block_channels} × "
            f"{block_samples * block_length}, and {LARGEST_TILE} elements are allowed. Take more groups, or "
            "torch.nn.functional.conv1d and group_norm_mish."
        )
    out = torch.empty(batch, channels, length, dtype=x.dtype, device=x.device)
    if batch > 0:
        conv_group_norm_mish_kernel[(groups * triton.cdiv(batch, block_samples),)](
            x, filters, conv_bias, weight, bias, scale, shift, out, batch, in_channels, channels, groups, length,
            *x.stride()[:2], *(0 if tensor is None else tensor.stride(0) for tensor in (scale, shift)), float(epsilon),
            TAPS=filters.shape[2], BLOCK_SAMPLES=block_samples, BLOCK_CHANNELS=block_channels,
            BLOCK_LENGTH=block_length, BLOCK_K=BLOCK_K, num_warps=NUM_WARPS[max(TILE_ELEMENTS, tile)],
        )  # fmt: skip
    return out


def tile_of_block(batch: int, members: int, length: int) -> tuple[int, int, int]:
    """(BLOCK_SAMPLES, BLOCK_CHANNELS, BLOCK_LENGTH): a whole group, as many samples as make TILE_ELEMENTS.

    Neither side is shorter than SMALLEST_SIDE.
    """
    block_channels = max(SMALLEST_SIDE, triton.next_power_of_2(members))
    block_length = triton.next_power_of_2(length)
    wanted = min(TILE_ELEMENTS // (block_channels * block_length), triton.next_power_of_2(batch))
    return max(1, SMALLEST_SIDE // block_length, wanted), block_channels, block_length


SCHEMA = (
    "(Tensor x, Tensor filters, Tensor conv_bias, int groups, Tensor weight, Tensor bias, Tensor? scale, Tensor? shift,"
    " float epsilon) -> Tensor"
)
# As an operator, `torch.ops.course_lib.conv_group_norm_mish`. It serves, and has no gradient.
conv_group_norm_mish_operator = torch.library.custom_op(
    "course_lib::conv_group_norm_mish", conv_group_norm_mish, mutates_args=(), schema=SCHEMA
)


@conv_group_norm_mish_operator.register_fake
def _(x, filters, conv_bias, groups, weight, bias, scale, shift, epsilon):
    return x.new_empty((x.shape[0], filters.shape[0], x.shape[2]))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: groups of Diffusion Policy's first and last level, and the largest tile.

    In float32, without tensor cores, a thread of the last level's tile spills 40 bytes on sm_120 and 32 on sm_90.
    """
    cases = []
    for kind in ("fp16", "fp32"):
        signature = signature_of(conv_group_norm_mish_kernel, kind)
        for samples, members, length in ((4, 32, 16), (4, 128, 4), (1, 64, 64)):
            constants = {"TAPS": 5, "BLOCK_SAMPLES": samples, "BLOCK_CHANNELS": members, "BLOCK_LENGTH": length,
                         "BLOCK_K": BLOCK_K}  # fmt: skip
            cases.append(CompileCase(conv_group_norm_mish_kernel, signature, constants,
                                     num_warps=NUM_WARPS[samples * members * length],
                                     max_spill_bytes=64 if kind == "fp32" and members == 128 else 0,
                                     instruction=TENSOR_CORES if kind == "fp16" else None,
                                     label=f"{kind} {members} × {length}"))  # fmt: skip
    return cases
