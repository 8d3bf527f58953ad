"""Cross-entropy and its gradient in place, each logit read once: a cluster of thread blocks shares a row, in CUDA C++.

    loss[r]      = log total[r] + maximum[r] - logits[r, targets[r]]        0 where targets[r] is ignore_index
    logits[r, v] becomes (exp(logits[r, v] - maximum[r]) / total[r] - [v = targets[r]]) · loss_gradient[r]
    maximum[r] = max over v of logits[r, v],    total[r] = Σ_v exp(logits[r, v] - maximum[r])

Bytes: 1 read and 1 write of each logit. `cross_entropy.py` reads twice: a row of Llama 3's 128,256 logits is 257 kB in
16 bits, and a multiprocessor's registers have 262 kB. Here eight blocks hold about an eighth each, in 16 bits as they
came: 128 bytes a thread, or 32 registers. From Hopper on, blocks of a cluster run at the same time and write into each
other's shared memory: each block sends the others its maximum and its sum, 8 bytes, and after a barrier of the cluster
all of them know the row's. The second pass over the logits reads registers.

A block's sum is of exp(logit - its own maximum), and the gradient takes the exponentials again, with the row's. To keep
the first ones as float32 would need twice the registers.

4,096 rows of 128,256 logits in bf16 took 600 µs on an H200, 0.83 of a copy's bandwidth. Its memory is fast enough that
the arithmetic shows: about 21 instructions for each logit, two exponentials among them.

A target outside the vocabulary is refused if checked (`validate`); unchecked, its loss and its gradient are NaN. A row
that is ignored is not read.

Sources: Milakov and Gimelshein, arXiv 1805.02867 (sums with maxima of their own, and how they merge). NVIDIA, CUDA C++
Programming Guide, "Thread Block Clusters", "Distributed Shared Memory".
"""

import torch

from course_lib.hardware.compiler.cuda_cpp import LARGEST_INT, CudaLaunch, run_cuda
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS, FAST_ARITHMETIC
from course_lib.kernels.fused.cross_entropy import IGNORE_INDEX, check, check_loss_gradient, check_rows_apart
from course_lib.kernels.fused.cuda_add_rms_norm import check_on_gpu
from course_lib.kernels.fused.cuda_rows import ELEMENTS, SHARED_BY_KERNELS, WARP, Cut, widest

MOST_BLOCKS = 8  # of a cluster, on every GPU that has clusters
FEWEST_THREADS, MOST_THREADS = 256, 512  # of a block, where the row goes on in others
VECTORS = 8  # of 16 bytes, that a thread holds: half of its 64 registers, with which 1024 threads fit a multiprocessor
FIRST_WITH_CLUSTERS = 9  # the major number of a compute capability

KERNEL = r"""
__device__ inline float maximum_of_block(float value) {
    __shared__ float of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32;
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    if constexpr (THREADS == 32) return value;
    if (lane == 0) of_warp[threadIdx.x / 32] = value;
    __syncthreads();
    value = of_warp[min(lane, THREADS / 32 - 1)];
    #pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;  // in each thread of the block
}

// The numbers of a vector. Two bfloat16 are the halves of a word: one instruction each makes them float32. Taken out as
// 16 bits first they would need two.
template <typename Number>
__device__ inline void widen(const Number (&of)[WIDTH], float (&wide)[WIDTH]) {
    #pragma unroll
    for (int e = 0; e < WIDTH; ++e) wide[e] = widened(of[e]);
}
__device__ inline void widen(const bfloat16_bits (&of)[WIDTH], float (&wide)[WIDTH]) {
    #pragma unroll
    for (int e = 0; e < WIDTH; e += 2) {
        if constexpr (WIDTH == 1) { wide[0] = widened(of[0]); return; }
        const unsigned int both = *(const unsigned int*)&of[e];
        wide[e] = __uint_as_float(both << 16);
        wide[e + 1] = __uint_as_float(both & 0xffff0000u);
    }
}

// Changes nothing, but the compiler must take the numbers for new ones, so it widens them again in the next loop. It
// would otherwise keep the widened ones, in twice the registers.
__device__ inline void forget(Vector<Element> (&kept)[VECTORS]) {
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        #pragma unroll
        for (int word = 0; word < sizeof(Vector<Element>) / 4; ++word)
            asm volatile("" : "+r"(((unsigned int*)&kept[k])[word]));
}

// The address of the same shared variable in another block of the cluster.
__device__ inline unsigned int address_in(const void* shared, int block) {
    unsigned int address, there;
    asm("{ .reg .u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide; }" : "=r"(address) : "l"(shared));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

// The barrier of a cluster in two halves. After the wait, what any thread wrote before it arrived can be read.
__device__ inline void arrive_at_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void wait_for_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// One cluster: one row. Its length and the stride of rows are counted in vectors.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS) cross_entropy_(
    Element* logits, const Target* __restrict__ targets, float* __restrict__ losses,
    const float* __restrict__ loss_gradient, int vectors, int logits_stride, int loss_gradient_stride,
    int ignore_index)
{
    constexpr float LOG2_E = 1.4426950408889634f, LOG_2 = 0.6931471805599453f, INFINITE = 1.0f / 0.0f;
    __shared__ float2 of_block[BLOCKS];  // the maximum and the sum of each block of the cluster
    const int block = blockIdx.x % BLOCKS;
    const long long row = blockIdx.x / BLOCKS;
    const long long target = targets[row];
    Vector<Element>* logits_row = (Vector<Element>*)logits + row * logits_stride;
    const int first = block * (VECTORS * THREADS) + threadIdx.x;

    if (target == ignore_index) {  // true for all blocks of the cluster or for none: nobody waits for one that left
        const Vector<Element> zeros = {};
        #pragma unroll
        for (int k = 0; k < VECTORS; ++k)
            if (first + k * THREADS < vectors) logits_row[first + k * THREADS] = zeros;
        if (block == 0 && threadIdx.x == 0) losses[row] = 0.0f;
        return;
    }

    // The thread that will write the target's vector reads its logit beforehand. Looked for among the numbers of every
    // thread, it would cost two instructions for each.
    const bool exists = target >= 0 && target < (long long)vectors * WIDTH;
    const int beyond = exists ? (int)(target / WIDTH) - first : -1;
    const bool owner = beyond >= 0 && beyond < VECTORS * THREADS && beyond % THREADS == 0;
    const float target_logit = owner ? widened(((const Element*)logits_row)[target]) : 0.0f;

    arrive_at_cluster();  // this block has begun: its shared memory may be written
    Vector<Element> kept[VECTORS];
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)  // all loads are on their way before the first is needed
        if (first + k * THREADS < vectors) kept[k] = logits_row[first + k * THREADS];

    // NaN is met by the sum: fmaxf passes over it.
    float maximum = -INFINITE;
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (first + k * THREADS < vectors) {
            float logit[WIDTH];
            widen(kept[k].of, logit);
            #pragma unroll
            for (int e = 0; e < WIDTH; ++e) maximum = fmaxf(maximum, logit[e]);
        }
    maximum = maximum_of_block(maximum);
    forget(kept);

    const float known = maximum == -INFINITE ? 0.0f : maximum;
    float total = 0.0f;
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (first + k * THREADS < vectors) {
            float logit[WIDTH];
            widen(kept[k].of, logit);
            #pragma unroll
            for (int e = 0; e < WIDTH; ++e) total += fast_power_of_2((logit[e] - known) * LOG2_E);
        }
    total = sum_of_block(total);
    forget(kept);

    wait_for_cluster();
    if (threadIdx.x < BLOCKS)  // thread b tells block b
        asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};"
                     :: "r"(address_in(&of_block[block], threadIdx.x)), "f"(maximum), "f"(total) : "memory");
    arrive_at_cluster();
    wait_for_cluster();  // from here on each block reads its own shared memory alone, so any of them may leave
    #pragma unroll
    for (int b = 0; b < BLOCKS; ++b) maximum = fmaxf(maximum, of_block[b].x);
    total = 0.0f;
    #pragma unroll
    for (int b = 0; b < BLOCKS; ++b)  // a block of -inf has the sum 0
        if (of_block[b].x != -INFINITE) total += of_block[b].y * fast_power_of_2((of_block[b].x - maximum) * LOG2_E);
    if (maximum == -INFINITE) total = __int_as_float(0x7fffffff);  // of nothing but -inf there is no distribution

    const float scale = exists ? loss_gradient[row * loss_gradient_stride] : __int_as_float(0x7fffffff);
    const float weight_scale = scale / total;
    #pragma unroll
    for (int k = 0; k < VECTORS; ++k)
        if (first + k * THREADS < vectors) {
            Vector<Element> gradient;
            float logit[WIDTH];
            widen(kept[k].of, logit);
            #pragma unroll
            for (int e = 0; e < WIDTH; ++e)
                narrow(fast_power_of_2((logit[e] - maximum) * LOG2_E) * weight_scale, gradient.of[e]);
            logits_row[first + k * THREADS] = gradient;
        }
    if (owner) {  // one thread of the cluster: it writes the target's number again
        Element corrected;
        narrow(fast_power_of_2((target_logit - maximum) * LOG2_E) * weight_scale - scale, corrected);
        ((Element*)logits_row)[target] = corrected;
        losses[row] = log2f(total) * LOG_2 + (maximum - target_logit);  // so the large numbers cancel first
    }
    if (!exists && block == 0 && threadIdx.x == 0) losses[row] = scale;
}
"""


def cross_entropy_source(dtype: torch.dtype, target_dtype: torch.dtype, cut: Cut, blocks: int) -> str:
    """The CUDA C++ of `cross_entropy_` for logits and targets of these dtypes, and rows of so many blocks."""
    target = {torch.int32: "int", torch.int64: "long long"}[target_dtype]
    names = f"#define BLOCKS {blocks}\nusing Element = {ELEMENTS[dtype]};\nusing Target = {target};\n"
    return cut.defines() + CONVERSIONS + names + FAST_ARITHMETIC + SHARED_BY_KERNELS + KERNEL


def cuda_cross_entropy_forward_backward_(logits, targets, loss_gradient, ignore_index=IGNORE_INDEX, validate=True):
    """losses, float32 [..., rows]; the logits are overwritten by their gradient. By a CUDA C++ kernel with clusters.

    Args:
        logits: [..., rows, vocabulary] on a GPU with clusters (Hopper or later), float32, float16 or bfloat16, with a
            contiguous last dimension and leading dimensions that flatten without a copy; no two rows may share
            memory. A row has at most 32,768 vectors, of 16 bytes where its length and stride allow: 262,144 logits of
            16 bits. Fewer than 2^31 / 8 rows.
        targets: int32 or int64 [..., rows], contiguous: 0 to vocabulary - 1, or ignore_index.
        loss_gradient: float32 [..., rows], of any strides: what each loss counts for.
        ignore_index: the target of rows that don't count; any integer of 32 bits.
        validate: read `targets` from the device and check them, which waits for it. With False nothing waits; a target
            outside the vocabulary then has the loss NaN.

    Raises:
        ValueError: an argument is not as above; the message names it. Nothing is written then.
        RuntimeError: there is no NVRTC here; the message says how to install it.
    """
    rows = check(logits, targets, ignore_index, validate)
    check_on_gpu("logits", logits)
    major, minor = torch.cuda.get_device_capability(logits.device)
    if major < FIRST_WITH_CLUSTERS:
        raise ValueError(
            f"logits is on a GPU of compute capability {major}.{minor}, which has no clusters; from "
            f"{FIRST_WITH_CLUSTERS}.0 on there are. Use course_lib.kernels.fused.cross_entropy."
        )
    check_rows_apart(rows, logits)
    check_ignore_index(ignore_index)
    scales = check_loss_gradient(loss_gradient, targets)
    losses = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    run_cuda(cross_entropy_launch(rows, targets, losses, scales, ignore_index), logits.device)
    return losses


def check_ignore_index(ignore_index: int) -> None:
    """Raise a ValueError unless it is a number that a kernel's `int` can hold."""
    if not -LARGEST_INT - 1 <= ignore_index <= LARGEST_INT:
        raise ValueError(
            f"ignore_index is {ignore_index}; an int of a kernel has 32 bits, and goes from {-LARGEST_INT - 1} to "
            f"{LARGEST_INT}."
        )


def cross_entropy_launch(logits, targets, losses, loss_gradient, ignore_index) -> CudaLaunch:
    """What writes the losses, and the gradient over logits, a matrix [rows, vocabulary] with contiguous rows."""
    rows, vocabulary = logits.shape
    stride = logits.stride(0) if rows > 1 else vocabulary
    width = widest(logits.element_size(), (vocabulary, stride), (logits,))
    cut, blocks = cut_of_cluster(vocabulary, width)
    source = cross_entropy_source(logits.dtype, targets.dtype, cut, blocks)
    sizes = (vocabulary // width, stride // width, loss_gradient.stride(0), ignore_index)
    return CudaLaunch(
        source, "cross_entropy_", rows * blocks, cut.threads, (logits, targets, losses, loss_gradient, *sizes)
    )


def cut_of_cluster(vocabulary: int, width: int) -> tuple[Cut, int]:
    """How a row is cut in vectors of `width`, which divides it, and among how many blocks.

    Raises:
        ValueError: it is longer than a cluster can hold.
    """
    vectors = vocabulary // width
    most = MOST_BLOCKS * MOST_THREADS * VECTORS
    if vectors > most:
        raise ValueError(
            f"logits has rows of {vocabulary} logits, {vectors} vectors of {width}; a cluster of {MOST_BLOCKS} blocks "
            f"holds {most} vectors. Use course_lib.kernels.fused.cross_entropy."
        )
    blocks = 1
    while blocks < MOST_BLOCKS and vectors > blocks * FEWEST_THREADS * VECTORS:
        blocks *= 2
    warps = -(-vectors // (blocks * VECTORS * WARP))
    return Cut(width, warps * WARP, VECTORS, True), blocks
