"""Add a residual and normalise by the root mean square: the kernel of add_rms_norm.py, written in CUDA C++.

    summed[r, c]     = x[r, c] + residual[r, c]                             rounded to the dtype of x
    normalised[r, c] = summed[r, c] · weight[c] / √(mean over c of summed[r, :]² + ε)

Bytes: 2 reads and 2 writes of each element where a row stays in registers, as in Triton. A longer row is read once
more, from what the same thread has written: that needs no barrier.

Triton decides from divisibility how wide a load is, how a row lies in the threads, and how a sum crosses them. Here all
three are written out: `Vector`, the index `threadIdx.x + k * THREADS`, and `sum_of_block`.

Source: Zhang and Sennrich, Root mean square layer normalization, arXiv 1910.07467.
"""

import torch

from course_lib.hardware.compiler.cuda_cpp import CudaLaunch, run_cuda
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS
from course_lib.kernels.common.checks import FLOAT_DTYPES, as_rows, check_alike, check_tensor
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.fused.cuda_rows import ELEMENTS, SHARED_BY_KERNELS, Cut, cut_of, widest

KERNEL = r"""
// One block: one row. Strides and the row's length are counted in vectors.
extern "C" __global__ void __launch_bounds__(THREADS, 1) add_rms_norm(
    const Element* __restrict__ x, const Element* __restrict__ residual, const WeightElement* __restrict__ weight,
    Element* __restrict__ normalised, Element* __restrict__ summed,  // restrict: no store changes what is loaded later
    int vectors, int x_stride, int residual_stride, float epsilon)
{
    const long long row = blockIdx.x;
    const Vector<Element>* x_row = (const Vector<Element>*)x + row * x_stride;
    const Vector<Element>* residual_row = (const Vector<Element>*)residual + row * residual_stride;
    const Vector<WeightElement>* weights = (const Vector<WeightElement>*)weight;
    Vector<Element>* normalised_row = (Vector<Element>*)normalised + row * vectors;
    Vector<Element>* summed_row = (Vector<Element>*)summed + row * vectors;

    const int end = KEPT ? THREADS : vectors;  // where the row is kept, each loop below runs once
    float kept[VECTORS][WIDTH];
    float squares = 0.0f;
    for (int begin = threadIdx.x; begin < end; begin += VECTORS * THREADS) {
        Vector<Element> left[VECTORS], right[VECTORS];
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k) {  // all loads are on their way before the first is needed
            const int at = begin + k * THREADS;
            if (at < vectors) {
                left[k] = x_row[at];
                right[k] = residual_row[at];
            }
        }
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int at = begin + k * THREADS;
            if (at < vectors) {
                Vector<Element> sum;
                #pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    narrow(widened(left[k].of[e]) + widened(right[k].of[e]), sum.of[e]);
                    const float rounded = widened(sum.of[e]);  // the norm is that of the sum as it is stored
                    squares += rounded * rounded;
                    if constexpr (KEPT) kept[k][e] = rounded;
                }
                summed_row[at] = sum;
            }
        }
    }

    const float inverse = rsqrtf(sum_of_block(squares) / ((float)vectors * WIDTH) + epsilon);

    for (int begin = threadIdx.x; begin < end; begin += VECTORS * THREADS) {
        Vector<Element> again[VECTORS];
        if constexpr (!KEPT) {
            #pragma unroll
            for (int k = 0; k < VECTORS; ++k) {
                const int at = begin + k * THREADS;
                if (at < vectors) again[k] = summed_row[at];  // which this thread has written
            }
        }
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k) {
            const int at = begin + k * THREADS;
            if (at < vectors) {
                const Vector<WeightElement> factor = weights[at];
                Vector<Element> out;
                #pragma unroll
                for (int e = 0; e < WIDTH; ++e) {
                    const float sum = KEPT ? kept[k][e] : widened(again[k].of[e]);
                    narrow(sum * inverse * widened(factor.of[e]), out.of[e]);
                }
                normalised_row[at] = out;
            }
        }
    }
}
"""


def add_rms_norm_source(dtype: torch.dtype, weight_dtype: torch.dtype, cut: Cut) -> str:
    """The CUDA C++ of `add_rms_norm` for tensors of these dtypes and rows that are cut so."""
    names = f"using Element = {ELEMENTS[dtype]};\nusing WeightElement = {ELEMENTS[weight_dtype]};\n"
    return cut.defines() + CONVERSIONS + names + SHARED_BY_KERNELS + KERNEL


def cuda_add_rms_norm(x, residual, weight, epsilon=1e-6):
    """(normalised, summed) by a CUDA C++ kernel, without a gradient. Its meaning is `add_rms_norm_reference`.

    Args:
        x: [..., hidden] on a GPU, float32, float16 or bfloat16, with a contiguous last dimension and leading dimensions
            that flatten without a copy. Any hidden size from 1 on; any number of rows, also none.
        residual: like x, with strides of its own.
        weight: [hidden], contiguous, of x's dtype or float32.
        epsilon: at least 0, added to the mean square.

    Returns:
        Two contiguous tensors of x's shape and dtype.

    Raises:
        ValueError: an argument is not as above; the message names it.
        RuntimeError: there is no NVRTC here; the message says how to install it.
    """
    for name, tensor in (("x", x), ("residual", residual)):
        check_tensor(name, tensor, FLOAT_DTYPES)
        check_on_gpu(name, tensor)
    check_alike("residual", residual, "x", x)
    x_rows, residual_rows = as_rows("x", x), as_rows("residual", residual)
    check_weight(weight, x)
    check_epsilon(epsilon)
    normalised, summed = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    run_cuda(add_rms_norm_launch(x_rows, residual_rows, weight, normalised, summed, epsilon), x.device)
    return normalised, summed


def add_rms_norm_launch(x, residual, weight, normalised, summed, epsilon) -> CudaLaunch:
    """What computes both results from matrices [rows, columns] with contiguous rows."""
    rows, columns = x.shape
    strides = [x.stride(0), residual.stride(0)] if rows > 1 else [columns, columns]
    tensors = (x, residual, weight, normalised, summed)
    width = widest(x.element_size(), (columns, *strides), tensors)
    cut = cut_of(columns, width)
    sizes = (columns // width, *(stride // width for stride in strides), float(epsilon))
    source = add_rms_norm_source(x.dtype, weight.dtype, cut)
    return CudaLaunch(source, "add_rms_norm", rows, cut.threads, (*tensors, *sizes))


def check_on_gpu(name: str, tensor: torch.Tensor) -> None:
    """Raise a ValueError unless the tensor is on a GPU: Triton's interpreter runs no CUDA C++."""
    if not tensor.is_cuda:
        raise ValueError(
            f"{name} is on device {tensor.device}; a CUDA C++ kernel runs on a GPU only. Without one it can be "
            "compiled and read: course_lib.hardware.compiler.cuda_cpp.compile_cuda."
        )
