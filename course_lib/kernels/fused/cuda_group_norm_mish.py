"""GroupNorm, Mish, scale and shift in one pass: the kernel of group_norm_mish.py, written in CUDA C++.

    normal[b, c, l] = (x[b, c, l] - mean) / √(variance + ε)         both over the channels of c's group and all l
    affine          = normal · weight[c] + bias[c]
    out[b, c, l]    = scale[b, c] · mish(affine) + shift[b, c]      mish(a) = a · tanh(log(1 + exp(a)))

In a contiguous tensor a group of channels lies side by side: it is one row of channels-of-the-group · length numbers,
and one block takes it, or one warp where it is short. Bytes: 1 read and 1 write of each element where the row stays in
registers. A longer one is read three times: for the mean, for the distances from it, and for the result.

The variance is the mean of (x - mean)², after the mean is known; E[x²] - E[x]² would cancel.

Sources: Wu and He, Group normalization, arXiv 1803.08494. Misra, Mish, arXiv 1908.08681.
"""

import torch

from course_lib.hardware.compiler.cuda_cpp import LARGEST_INT, CudaLaunch, run_cuda
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS, FAST_ARITHMETIC
from course_lib.kernels.common.checks import check_contiguous, check_tensor
from course_lib.kernels.fused.checks import check_epsilon
from course_lib.kernels.fused.cuda_add_rms_norm import check_on_gpu
from course_lib.kernels.fused.cuda_rows import ELEMENTS, SHARED_BY_KERNELS, WARP, Cut, cut_of, widest
from course_lib.kernels.fused.group_norm_mish_checks import check

WARPS_OF_BLOCK = 4  # where each takes a group of its own

KERNEL = r"""
// With e = exp(a) and u = e · (e + 2): tanh(log(1 + e)) = u / (u + 2), which is 1 from 20 on.
__device__ inline float mish(float a) {
    const float exponential = fast_power_of_2(fminf(a, 20.0f) * 1.4426950408889634f);
    const float product = exponential * (exponential + 2.0f);
    return a * (product * fast_reciprocal(product + 2.0f));
}

// A thread's vectors of a chunk, as float32; 0 beyond the end. All loads are on their way before the first is needed.
__device__ inline void load(float (&numbers)[VECTORS][WIDTH], const Vector<Element>* group, int begin, int vectors) {
    Vector<Element> loaded[VECTORS] = {};
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (begin + k * THREADS < vectors) loaded[k] = group[begin + k * THREADS];
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        #pragma unroll
        for (int e = 0; e < WIDTH; ++e) numbers[k][e] = widened(loaded[k].of[e]);
}

// THREADS threads: one group of one sample, which has VECTORS_OF_GROUP vectors, and a channel VECTORS_OF_CHANNEL.
// A block takes TEAMS groups, since a multiprocessor holds 32 blocks: with one warp each, half of its 64 warps.
extern "C" __global__ void __launch_bounds__(THREADS * TEAMS, 1024 / (THREADS * TEAMS)) group_norm_mish(
    const Element* __restrict__ x, const WeightElement* __restrict__ weight, const BiasElement* __restrict__ bias,
    const Element* __restrict__ scale, const Element* __restrict__ shift, Element* __restrict__ out,
    int groups_of_all, int groups, int scale_stride, int shift_stride, float epsilon)
{
    constexpr int vectors = VECTORS_OF_GROUP;
    const int thread = threadIdx.x % THREADS;
    const int group_of_all = blockIdx.x * TEAMS + threadIdx.x / THREADS;
    if (group_of_all >= groups_of_all) return;
    const long long sample = group_of_all / groups;
    const int first_channel = group_of_all % groups * (vectors / VECTORS_OF_CHANNEL);
    const Vector<Element>* group = (const Vector<Element>*)x + (long long)group_of_all * vectors;
    Vector<Element>* out_group = (Vector<Element>*)out + (long long)group_of_all * vectors;
    const float count = (float)vectors * WIDTH;

    const int end = KEPT ? THREADS : vectors;  // where the group is kept, each loop below runs once
    float kept[VECTORS][WIDTH];
    float total = 0.0f;
    for (int begin = thread; begin < end; begin += VECTORS * THREADS) {
        load(kept, group, begin, vectors);
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            #pragma unroll
            for (int e = 0; e < WIDTH; ++e) total += kept[k][e];  // 0 beyond the end
    }
    const float mean = sum_of_block(total) / count;

    float squares = 0.0f;
    for (int begin = thread; begin < end; begin += VECTORS * THREADS) {
        if constexpr (!KEPT) load(kept, group, begin, vectors);
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            #pragma unroll
            for (int e = 0; e < WIDTH; ++e) {
                const float distance = begin + k * THREADS < vectors ? kept[k][e] - mean : 0.0f;
                squares += distance * distance;
            }
    }
    const float inverse = rsqrtf(sum_of_block(squares) / count + epsilon);

    for (int begin = thread; begin < end; begin += VECTORS * THREADS) {
        if constexpr (!KEPT) load(kept, group, begin, vectors);
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int at = begin + k * THREADS;
            if (at < vectors) {
                const int channel = first_channel + at / VECTORS_OF_CHANNEL;  // a vector never spans two channels
                const float factor = widened(weight[channel]), offset = widened(bias[channel]);
                float stretch = 1.0f, move = 0.0f;
                if constexpr (FILM) {  // there are a scale and a shift
                    stretch = widened(scale[sample * scale_stride + channel]);
                    move = widened(shift[sample * shift_stride + channel]);
                }
                Vector<Element> result;
                #pragma unroll
                for (int e = 0; e < WIDTH; ++e)
                    narrow(mish((kept[k][e] - mean) * inverse * factor + offset) * stretch + move, result.of[e]);
                out_group[at] = result;
            }
        }
    }
}
"""


def group_norm_mish_source(
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    bias_dtype: torch.dtype,
    cut: Cut,
    vectors: tuple[int, int],
    film: bool,
) -> str:
    """The CUDA C++ of `group_norm_mish` for these dtypes, groups that are cut so, with a scale and a shift or not.

    vectors: of a group, and of a channel. As constants they make a division by them a shift or a product.
    """
    kinds = {"Element": dtype, "WeightElement": weight_dtype, "BiasElement": bias_dtype}
    names = "".join(f"using {name} = {ELEMENTS[kind]};\n" for name, kind in kinds.items())
    constants = {"VECTORS_OF_GROUP": vectors[0], "VECTORS_OF_CHANNEL": vectors[1], "TEAMS": teams_of(cut)}
    defines = "".join(f"#define {name} {value}\n" for name, value in (constants | {"FILM": int(film)}).items())
    return cut.defines() + defines + CONVERSIONS + names + FAST_ARITHMETIC + SHARED_BY_KERNELS + KERNEL


def cuda_group_norm_mish(x, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """mish(GroupNorm(x)) · scale + shift by a CUDA C++ kernel, without a gradient.

    Its meaning is `group_norm_mish_reference`.

    Args:
        x: [batch, channels, length] on a GPU, contiguous, float32, float16 or bfloat16. The batch may be 0.
        groups: a divisor of channels: neighbouring channels that share a mean and a variance.
        weight, bias: [channels], contiguous, of x's dtype or float32.
        scale, shift: [batch, channels], of x's dtype and any strides with a contiguous last dimension; or None, both.
        epsilon: at least 0, added to the variance. With 0 a group of equal numbers is NaN, as in PyTorch.

    Returns:
        A contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: an argument is not as above; the message names it.
        RuntimeError: there is no NVRTC here; the message says how to install it.
    """
    check_tensor("x", x)
    check_on_gpu("x", x)
    check(x, groups, weight, bias, scale, shift)
    check_contiguous("x", x)
    check_epsilon(epsilon)
    check_groups_of_all(x.shape[0], groups)
    out = torch.empty_like(x)
    run_cuda(group_norm_mish_launch(x, groups, weight, bias, scale, shift, out, float(epsilon)), x.device)
    return out


def check_groups_of_all(batch: int, groups: int) -> None:
    """Raise a ValueError unless the threads of the last block can count all groups in an `int`."""
    most = LARGEST_INT - WARPS_OF_BLOCK
    if batch * groups > most:
        raise ValueError(
            f"x has {batch:,} samples of {groups:,} groups, {batch * groups:,} in all; a launch counts {most:,} at "
            "most. Split the batch."
        )


def group_norm_mish_launch(x, groups, weight, bias, scale, shift, out, epsilon) -> CudaLaunch:
    """What computes `out` from a contiguous x."""
    batch, channels, length = x.shape
    elements = channels // groups * length
    width = widest(x.element_size(), (length,), (x, out))
    cut = cut_of(elements, width)
    film_strides = (0 if tensor is None else tensor.stride(0) for tensor in (scale, shift))
    sizes = (batch * groups, groups, *film_strides, epsilon)
    vectors = elements // width, length // width
    source = group_norm_mish_source(x.dtype, weight.dtype, bias.dtype, cut, vectors, scale is not None)
    teams = teams_of(cut)
    blocks = -(-batch * groups // teams)
    tensors = (x, weight, bias, scale, shift, out)
    return CudaLaunch(source, "group_norm_mish", blocks, cut.threads * teams, (*tensors, *sizes))


def teams_of(cut: Cut) -> int:
    """Groups that one block takes: several where a warp takes one, since a warp needs no barrier for its sum."""
    return WARPS_OF_BLOCK if cut.threads == WARP else 1
