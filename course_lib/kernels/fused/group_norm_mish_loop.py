"""GroupNorm, Mish, scale and shift for groups that no tile holds: a loop over tiles, which reads x twice.

Each tile has its own mean and its own sum of squared distances from it, taken in registers, and `merged_moments` adds
them up. So the variance is here, too, the mean of (x - mean)².
Source: Chan, Golub and LeVeque, Updating formulae, 1979 (the merge).
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.fused.group_norm_mish_parts import mish, scaled_and_shifted, tile_of_loop

LOOP_ELEMENTS, LOOP_WARPS = 4096, 8  # of a tile of larger groups


@triton.jit
def merged_moments(mean, squares, count, tile_mean, tile_squares, tile_count):
    """Mean, sum of squared distances from it, and count, of two sets of numbers together."""
    total = count + tile_count
    distance = tile_mean - mean
    share = tile_count / total
    return mean + distance * share, squares + tile_squares + distance * distance * count * share, total


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


def launch_loop(x, groups: int, vectors, out, statistics, epsilon: float, tile: tuple[int, int]) -> None:
    """vectors: weight, bias, scale and shift. tile: (BLOCK_CHANNELS, BLOCK_LENGTH) of a whole group."""
    batch, channels, length = x.shape
    film = [0 if tensor is None else tensor.stride(0) for tensor in vectors[2:]]
    block_channels, block_length = tile_of_loop(*tile, LOOP_ELEMENTS)
    group_norm_mish_loop_kernel[(batch * groups,)](
        x, *vectors, out, statistics, channels, groups, length, *x.stride()[:2], *film, epsilon,
        BLOCK_CHANNELS=block_channels, BLOCK_LENGTH=block_length, ASSEMBLY=x.is_cuda, num_warps=LOOP_WARPS,
    )  # fmt: skip


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    constants = {"BLOCK_CHANNELS": 1, "BLOCK_LENGTH": LOOP_ELEMENTS, "ASSEMBLY": True}
    return [CompileCase(group_norm_mish_loop_kernel, signature_of(group_norm_mish_loop_kernel, kind), constants,
                        num_warps=LOOP_WARPS, label=kind) for kind in ("fp16", "fp32")]  # fmt: skip
