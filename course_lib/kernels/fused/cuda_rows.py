"""What the CUDA C++ kernels share: vectors of 16 bytes, sums over a block, and how a row is cut among threads.

A thread block takes one row of numbers that lie side by side, whatever the row means: hidden numbers of a token, or a
group of channels. Thread t holds the vectors t, t + THREADS, t + 2 · THREADS … of it, so that neighbouring threads load
neighbouring vectors: a warp's load of 32 vectors of 16 bytes is four lines of 128 bytes, all used.

The sum over a block takes two steps. In a warp the 32 threads exchange numbers by shuffles, which go from register to
register: after five of them each thread has the sum. Then each warp writes one number to shared memory, and all warps
add those up.
"""

import math
from dataclasses import dataclass

import torch

ELEMENTS = {torch.float32: "float", torch.float16: "half_bits", torch.bfloat16: "bfloat16_bits"}
WARP = 32  # threads that run together, and exchange numbers without a barrier
VECTOR_BYTES = 16  # the widest load of one thread up to Hopper
VECTORS_OF_A_THREAD = 4  # that it has on their way at once, where the row is long enough
MOST_VECTORS = 16  # of a thread: beyond, their addresses and masks alone fill the registers
FEWEST_THREADS, MOST_THREADS = WARP, 512
KEPT_ELEMENTS = 32  # of a row that one thread keeps as float32: 16384 of 512 threads; longer rows are read again

SHARED_BY_KERNELS = r"""
// WIDTH neighbouring numbers, loaded and stored by one instruction as far as 16 bytes go.
template <typename Number>
struct alignas(sizeof(Number) * WIDTH < 16 ? sizeof(Number) * WIDTH : 16) Vector { Number of[WIDTH]; };

__device__ inline float sum_of_warp(float value) {
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;  // in each of the 32 threads
}

__device__ inline float sum_of_block(float value) {
    __shared__ float of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32;
    value = sum_of_warp(value);
    if constexpr (THREADS == 32) return value;
    if (lane == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = sum_of_warp(lane < THREADS / 32 ? of_warp[lane] : 0.0f);
    __syncthreads();  // all have read: the next sum may write
    return value;  // in each thread of the block
}
"""


@dataclass(frozen=True)
class Cut:
    """How a row is cut: WIDTH numbers a vector, THREADS threads, VECTORS vectors a thread at once.

    KEPT: that is the whole row, and it stays in registers. Otherwise the threads go over it chunk by chunk.
    """

    width: int
    threads: int
    vectors: int
    kept: bool

    def defines(self) -> str:
        """The lines that make these numbers constants of a source."""
        constants = {"WIDTH": self.width, "THREADS": self.threads, "VECTORS": self.vectors, "KEPT": int(self.kept)}
        return "".join(f"#define {name} {value}\n" for name, value in constants.items())


def widest(bytes_of_element: int, sizes, tensors) -> int:
    """Numbers per vector: what divides all sizes and strides, fits 16 bytes, and to which every tensor is aligned.

    Args:
        bytes_of_element: of the dtype whose vectors are to have 16 bytes.
        sizes: counts and strides, in elements, of which each must be a whole number of vectors.
        tensors: that are read or written in vectors. A vector of a wider dtype is aligned to 16 bytes at most.
    """
    width = math.gcd(VECTOR_BYTES // bytes_of_element, *sizes)
    while any(tensor.data_ptr() % min(width * tensor.element_size(), VECTOR_BYTES) for tensor in tensors):
        width //= 2
    return width


def cut_of(elements: int, width: int) -> Cut:
    """How a row of so many elements is cut in vectors of `width`, which divides them."""
    vectors = elements // width
    threads = min(max(_power_of_two(vectors // VECTORS_OF_A_THREAD), FEWEST_THREADS), MOST_THREADS)
    each = _power_of_two(-(-vectors // threads))
    if each * width <= KEPT_ELEMENTS and each <= MOST_VECTORS:
        return Cut(width, threads, each, True)
    return Cut(width, MOST_THREADS, VECTORS_OF_A_THREAD, False)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least this; 1 for 0."""
    return 1 << max(number - 1, 0).bit_length()
