"""Wrong answers to exercise 13.8, and unusual right ones."""

from course_lib.hardware.compiler.cuda_on_host import tells_ways
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from tests.submissions.edits import changed

SHARED = "__shared__ float of_warp[THREADS / 32];"
WRITTEN = "if (lane == 0) of_warp[threadIdx.x / 32] = squares;"
BARRIER = "    __syncthreads();\n"
READ = "float total = lane < THREADS / 32 ? of_warp[lane] : 0.0f;"
SQUARES = "squares += __shfl_xor_sync(0xffffffffu, squares, distance);"
TOTAL = "total += __shfl_xor_sync(0xffffffffu, total, distance);"
INVERSE = "rsqrtf(total / columns + epsilon)"
X_ROW = "(const Vector*)(x + row * x_stride)"
RESIDUAL_ROW = "(const Vector*)(residual + row * residual_stride)"
SECOND_SUM = f"""    {READ}
    for (int distance = 16; distance > 0; distance /= 2)
        {TOTAL}
"""
FIRST_SUM = f"""    for (int distance = 16; distance > 0; distance /= 2)
        {SQUARES}
"""
TOTAL_BY_THREAD_0 = """    __shared__ float whole;
    if (threadIdx.x == 0) {
        whole = 0.0f;
        for (int warp = 0; warp < THREADS / 32; ++warp) whole += of_warp[warp];
    }
    __syncthreads();
    const float total = whole;
"""


EPSILON_ROOT = "sqrtf(total / columns) + epsilon"
ADDED = "narrow(widened(left.of[e]) + widened(right.of[e]), sum.of[e]);"
STORED = "summed_row[at] = sum;"
SUM = "Vector sum;"
BEGIN = "float squares = 0.0f;"
TREE = """__shared__ float of_thread[THREADS];
    of_thread[threadIdx.x] = squares;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
        __syncthreads();
    }
    """
STRIDED = TREE.replace("half = THREADS / 2; half > 0; half /= 2", "stride = 1; stride < THREADS; stride *= 2").replace(
    "threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half]",
    "threadIdx.x % (2 * stride) == 0) of_thread[threadIdx.x] += of_thread[threadIdx.x + stride]",
)
UNROLLED = """__shared__ float of_thread[THREADS];
    of_thread[threadIdx.x] = squares;
    __syncthreads();
    #pragma unroll
    for (int half = 128; half > 0; half /= 2) {
        if (THREADS >= 2 * half && threadIdx.x < half) of_thread[threadIdx.x] += of_thread[threadIdx.x + half];
        __syncthreads();
    }
    """
WHOLE = "__shared__ float whole;\nif (threadIdx.x == 0) whole = 0.0f;\n__syncthreads();"
TOTAL_OF_WHOLE = (SECOND_SUM, "    const float total = whole;\n")


def edited(*replacements):
    return changed("13.8", *replacements)


def tree(text):
    """The answer whose threads' squares are added up in shared memory, by the text."""
    return edited((SHARED, text + SHARED), (INVERSE, "rsqrtf(of_thread[0] / columns + epsilon)"))


def tree_without(step):
    return tree(TREE.replace("threadIdx.x < half)", f"threadIdx.x < half && half != {step})"))


def in_16_bits(kind, line):
    """The answer with this line for two Elements' sum where they have 16 bits. AS(v, i): number i of a kind in v."""
    return edited(
        ("\nextern", f"\n#define AS(vector, at) (({kind}*)&(vector))[at]\nextern"),
        (ADDED, f"if (WIDTH == 8) {line}\nelse {ADDED}"),
    )


def behind(line, *more):
    """The answer with further lines behind one of its own."""
    return edited((line, "\n".join((line, *more))))


WRONG = {
    "first_warp_only": edited((READ, "float total = lane == 0 ? of_warp[0] : 0.0f;")),
    "sum_of_own_warp": edited((INVERSE, "rsqrtf(squares / columns + epsilon)")),
    "sum_of_own_thread": edited(
        (FIRST_SUM, f"    const float own = squares;\n{FIRST_SUM}"), (INVERSE, "rsqrtf(own / columns + epsilon)")
    ),
    "sum_in_lane_0_only": edited(("__shfl_xor_sync", "__shfl_down_sync")),
    "width_fixed": edited(("columns / WIDTH", "columns / 8")),
    "step_missing": edited(("distance > 0", "distance > 1")),
    "step_missing__first": edited(("distance = 16", "distance = 8")),
    "step_missing__1_of_the_lanes": edited((FIRST_SUM, FIRST_SUM.replace("distance > 0", "distance > 1"))),
    "step_missing__16_of_the_lanes": edited((FIRST_SUM, FIRST_SUM.replace("distance = 16", "distance = 8"))),
    "step_missing__1_of_the_warps": edited((SECOND_SUM, SECOND_SUM.replace("distance > 0", "distance > 1"))),
    "step_missing__8_of_the_warps": edited((SECOND_SUM, SECOND_SUM.replace("distance = 16", "distance = 4"))),
    "step_missing__4_of_the_warps": edited(
        (SECOND_SUM, SECOND_SUM.replace("distance /= 2", "distance /= distance == 8 ? 4 : 2"))
    ),
    **{f"step_missing__{step}_of_a_tree": tree_without(step) for step in (256, 64, 32, 16, 1)},
    "step_missing__first_of_a_tree": tree(TREE.replace("THREADS / 2;", "THREADS / 4;")),
    "step_missing__1_of_a_strided_tree": tree(STRIDED.replace("stride = 1;", "stride = 2;")),
    "step_missing__256_of_a_strided_tree": tree(STRIDED.replace("stride < THREADS;", "stride < min(THREADS, 256);")),
    "step_missing__256_of_an_unrolled_tree": tree(UNROLLED),
    "bits_for_numbers": edited((ADDED, "sum.of[e] = left.of[e] + right.of[e];")),
    "bits_for_numbers__of_pairs": edited(
        ("\nextern", "\nstruct Two { Element of[2]; };\nextern"),
        (ADDED, "if (e % 2 == 0)\nfor (int one = 0; one < 2; ++one)\n"
         "((Two*)&sum)[e / 2].of[one] = ((const Two*)&left)[e / 2].of[one] + ((const Two*)&right)[e / 2].of[one];"),
    ),
    "bits_for_numbers__members": edited((ADDED, "sum.of[e].bits = left.of[e].bits + right.of[e].bits;")),
    "bits_for_numbers__cast": edited((ADDED, "narrow((float)left.of[e] + (float)right.of[e], sum.of[e]);")),
    "bits_for_numbers__scaled": edited(("widened(factor.of[e])", "factor.of[e]")),
    "bits_for_numbers__as_shorts": in_16_bits("unsigned short", "AS(sum, e) = AS(left, e) + AS(right, e);"),
    "bits_for_numbers__two_at_once": in_16_bits(
        "unsigned", "{ if (e % 2 == 0) AS(sum, e / 2) = AS(left, e / 2) + AS(right, e / 2); }"
    ),
    "bits_for_numbers__widened": in_16_bits(
        "unsigned short", "narrow((float)AS(left, e) + (float)AS(right, e), sum.of[e]);"
    ),
    "bits_for_numbers__as_signed": in_16_bits("short", "narrow((float)AS(left, e) + (float)AS(right, e), sum.of[e]);"),
    "barrier_missing": edited((BARRIER, "")),
    "barrier_missing__broadcast": edited((SECOND_SUM, TOTAL_BY_THREAD_0.replace(BARRIER, ""))),
    "barrier_missing__tree": edited(
        (SHARED, TREE.replace("        __syncthreads();\n    }", "    }\n    __syncthreads();") + SHARED),
        (INVERSE, "rsqrtf(of_thread[0] / columns + epsilon)"),
    ),
    "rows_collide": edited(("(normalised + row * columns)", "normalised"), ("(summed + row * columns)", "summed")),
    "rows_collide__one_result": edited(("(normalised + row * columns)", "normalised")),
    "shared_memory_unset": edited(
        (SHARED, "__shared__ float of_warp[32];"), (READ, "float total = of_warp[lane];")
    ),
    "one_place_for_several": edited(("of_warp[threadIdx.x / 32] = squares", "of_warp[lane] = squares")),
    "lanes_not_named__half_a_warp": edited(
        (FIRST_SUM, f"    if (lane < 16)\n{FIRST_SUM.replace('0xffffffffu', '0x0000ffffu')}")
    ),
    "outside_an_array": edited((READ, "float total = of_warp[lane];")),
    "not_reached_by_all": behind(BEGIN, "if (threadIdx.x >= vectors) return;"),
    "not_reached_by_all__shuffle_in_a_branch": edited(
        (SECOND_SUM, "float total;\nif (lane < THREADS / 32) {\n" + SECOND_SUM.replace("float total", "total") + "}")
    ),
    "not_reached_by_all__barrier_in_a_branch": edited(
        (f"    {WRITTEN}\n{BARRIER}", "if (lane == 0) {\nof_warp[threadIdx.x / 32] = squares;\n__syncthreads();\n}\n")
    ),
    "not_reached_by_all__barrier_in_the_loop": behind(STORED, "__syncthreads();"),
    "row_cut_off": edited(("at += THREADS)", "at += columns)")),
    "last_vector_only": behind(SUM, "squares = 0.0f;"),
    "mean_over_the_threads": edited(("total / columns", "total / THREADS")),
    "mean_over_the_threads__vectors": edited(("total / columns", "total / (THREADS * WIDTH)")),
    "mean_over_the_vectors": edited(("total / columns", "total / vectors")),
    "sum_for_mean": edited(("total / columns", "total")),
    "epsilon_outside": edited((INVERSE, f"1.0f / ({EPSILON_ROOT})")),
    "epsilon_missing": edited((INVERSE, "rsqrtf(total / columns)")),
    "epsilon_divided": edited((INVERSE, "rsqrtf((total + epsilon) / columns)")),
    "root_missing": edited((INVERSE, "1.0f / (total / columns + epsilon)")),
    "multiplied": edited((INVERSE, "sqrtf(total / columns + epsilon)")),
    "weight_missing": edited((" * widened(factor.of[e])", "")),
    "first_weights": edited(("factor = weights[at]", "factor = weights[0]")),
    "weights_of_thread": edited(("factor = weights[at]", "factor = weights[threadIdx.x]")),
    "norm_of_x": edited(
        ("rounded = widened(sum.of[e])", "rounded = widened(left.of[e])"),
        ("widened(sum.of[e]) * inverse", "widened(x_row[at].of[e]) * inverse"),
    ),
    "sum_not_stored": edited(
        ("normalised_row[at] = out;", "normalised_row[at] = out;\nsummed_row[at] = x_row[at];")
    ),
    "results_exchanged": edited(
        ("const Vector sum = summed_row[at]", "const Vector sum = normalised_row[at]"),
        (STORED, "normalised_row[at] = sum;"), ("normalised_row[at] = out;", "summed_row[at] = out;"),
    ),
    "squared_in_16_bits": edited(
        ("squares += rounded * rounded;",
         "Element squared;\nnarrow(rounded * rounded, squared);\nsquares += widened(squared);"),
    ),
    "row_stride_ignored": edited(("row * x_stride", "row * columns"), ("row * residual_stride", "row * columns")),
    "strides_of_x": edited(("row * residual_stride", "row * x_stride")),
    "first_row_only": edited((X_ROW, "(const Vector*)x"), (RESIDUAL_ROW, "(const Vector*)residual")),
    "outside_a_tensor": edited((X_ROW, "(const Vector*)x + row * x_stride")),
    "outside_a_tensor__bound": edited(("at < vectors", "at <= vectors")),
    "outside_a_tensor__elements": edited(("vectors = columns / WIDTH", "vectors = columns")),
    "input_written": behind(STORED, "((Vector*)x_row)[at] = sum;"),
    "not_aligned": edited((X_ROW, "(const Vector*)(x + row * x_stride + (columns > 4 * WIDTH))")),
    "does_not_compile": edited((BEGIN, "float squares = 0.0f")),
    "unknown_name": behind(BEGIN, "float most = __reduce_max_of_all(squares);"),
    "does_not_compile__half": behind(SUM, "__half sixteen = x[0];"),
    "does_not_compile__include": edited(("\nextern", "\n#include <cuda_fp16.h>\nextern")),
    "does_not_compile__bracket": edited(("= out;\n    }\n}\n", "= out;\n    }\n")),
    "does_not_compile__parameter": edited(("int x_stride, int residual_stride,", "int x_stride,"),
                                          ("row * residual_stride", "row * x_stride")),
    "does_not_compile__long": edited(("int columns", "long columns")),
    "does_not_compile__double": edited(("float epsilon", "double epsilon")),
    "does_not_compile__size_t": edited(("int columns, int x_stride", "size_t columns, size_t x_stride")),
    "does_not_compile__std": edited((INVERSE, "1.0f / std::sqrt(total / columns + epsilon)")),
    "does_not_compile__device_forgotten": edited(
        ("\nextern", "\nstatic inline float inverse_of(float mean) { return rsqrtf(mean); }\nextern"),
        (INVERSE, "inverse_of(total / columns + epsilon)"),
    ),
    "does_not_compile__length_of_an_array": behind(BEGIN, "float kept[vectors];", "kept[0] = squares;"),
    "does_not_compile__shared_with_a_value": edited((SHARED, "__shared__ float of_warp[THREADS / 32] = {0};")),
    "launch_bound_too_small": edited(("__launch_bounds__(THREADS)", "__launch_bounds__(128)")),
    "lost_update": edited((SHARED, WHOLE), (WRITTEN, "whole += squares;"), (FIRST_SUM, ""), TOTAL_OF_WHOLE),
    "lost_update__lane_0_of_each_warp": edited((SHARED, WHOLE), (WRITTEN, "if (lane == 0) whole += squares;"),
                                               TOTAL_OF_WHOLE),
    "lost_update__volatile": edited(
        (SHARED, WHOLE.replace("float", "volatile float", 1)), (WRITTEN, "if (lane == 0) whole = whole + squares;"),
        TOTAL_OF_WHOLE),
    "barrier_missing__of_lanes": edited(
        (f"    {WRITTEN}\n{BARRIER}", f"""    __shared__ float of_thread[THREADS];
    of_thread[threadIdx.x] = squares;
    if (lane < 16) of_thread[threadIdx.x] += of_thread[threadIdx.x + 16];
    {WRITTEN}\n{BARRIER}"""),
    ),
    "rows_collide__variable_of_all_blocks": edited(
        ("\nextern", "\n__device__ float whole;\nextern"), (SHARED, WHOLE.replace("__shared__ float whole;", "")),
        (WRITTEN, "if (lane == 0) atomicAdd(&whole, squares);"), TOTAL_OF_WHOLE),
    "shared_memory_unset__sum": edited((SHARED, "__shared__ float whole;"), (WRITTEN,
        "if (lane == 0) atomicAdd(&whole, squares);"), TOTAL_OF_WHOLE),
    "variable_unset": edited((BEGIN, "float squares;")),
    "normalised_not_stored": edited(("normalised_row[at] = out;", "")),
    "normalised_not_stored__at_summed": edited(("(Vector*)(normalised + row", "(Vector*)(summed + row")),
    "summed_not_stored": edited(
        (STORED, ""), ("const Vector sum = summed_row[at], factor", "Vector sum = x_row[at];\n"
         "for (int e = 0; e < WIDTH; ++e) narrow(widened(sum.of[e]) + widened(residual_row[at].of[e]), sum.of[e]);\n"
         "const Vector factor")),
    "fixed_number": edited(("at += THREADS)", "at += at < 3 * THREADS ? THREADS : columns)")),
    "fixed_number__16": edited(("at += THREADS)", "at += at < 15 * THREADS ? THREADS : columns)")),
    "tail_dropped": edited(("at < vectors;", "at < vectors / THREADS * THREADS;")),
    "sum_in_warp_0_only": edited(
        (INVERSE, "rsqrtf((threadIdx.x < 32 ? total : squares) / columns + epsilon)")),
    "sum_in_warp_0_only__own_32_times": edited((READ, "float total = squares;\n"
        "    if (threadIdx.x < 32) total = lane < THREADS / 32 ? of_warp[lane] : 0.0f;")),
    "outside_a_tensor__rounded_up": edited(
        ("at < vectors;", "at < (vectors + THREADS - 1) / THREADS * THREADS;")),
    "mean_over_a_fixed_number": edited(("total / columns", "total / 4096")),
    "squares_of_x": edited(("squares += rounded * rounded;", "squares += widened(left.of[e]) * widened(left.of[e]);")),
    "epsilon_fixed": edited(("columns + epsilon)", "columns + 1e-6f)")),
    "epsilon_fixed__5": edited(("columns + epsilon)", "columns + 1e-5f)")),
    "epsilon_multiplied": edited((INVERSE, "rsqrtf(total / columns) * epsilon")),
    "whole_number": edited(("total / columns", "(int)total / columns")),
    "norm_of_x__squares_of_the_sum": edited(
        ("widened(sum.of[e]) * inverse", "widened(x_row[at].of[e]) * inverse")),
    "sum_not_stored__nor_normalised": edited((STORED, "summed_row[at] = left;")),
    "mean_subtracted": edited(
        (BEGIN, f"{BEGIN}\nfloat plain = 0.0f;"), ("squares += rounded * rounded;",
         "squares += rounded * rounded;\nplain += rounded;"),
        (SHARED, f"{SHARED}\n__shared__ float mean;\nif (threadIdx.x == 0) mean = 0.0f;\n__syncthreads();\n"
         "atomicAdd(&mean, plain / columns);"),
        (INVERSE, "rsqrtf(total / columns - mean * mean + epsilon)"),
        ("widened(sum.of[e]) * inverse", "(widened(sum.of[e]) - mean) * inverse")),
    "one_added": edited(("widened(factor.of[e])", "(1.0f + widened(factor.of[e]))")),
    "first_of_a_vector": edited(("factor.of[e]", "factor.of[0]")),
    "first_weight": edited(("widened(factor.of[e])", "widened(weights[0].of[0])")),
    "outside_a_tensor__weight": edited(("factor = weights[at]", "factor = weights[row * vectors + at]")),
    "does_not_end": edited(("at += THREADS)", "at += 0)")),
}

if tells_ways():  # which way each lane went
    WRONG |= {
        "lanes_not_named": edited(("0xffffffffu, squares", "__activemask(), squares")),
        "lanes_not_named__asked_once": edited(
            (FIRST_SUM, "    const unsigned there = __activemask();\n" + FIRST_SUM.replace("0xffffffffu", "there"))
        ),
        "lanes_not_named__of_the_second_sum": edited(("0xffffffffu, total", "__activemask(), total")),
        "lanes_not_named__down_to_lane_0": edited(
            ("__shfl_xor_sync(0xffffffffu, squares", "__shfl_down_sync(__activemask(), squares")
        ),
    }

if missing_nvrtc() is None:  # which alone tells of these
    WRONG |= {
        "narrow_accesses": edited(
            ("const Vector left = x_row[at], right = residual_row[at];", ""),
            ("widened(left.of[e]) + widened(right.of[e])",
             "widened(x[row * x_stride + at * WIDTH + e]) + widened(residual[row * residual_stride + at * WIDTH + e])"),
        ),
        "narrow_accesses__numbers": edited(
            ("vectors = columns / WIDTH", "vectors = columns"), ("(const Vector*)", "(const One*)"),
            ("(Vector*)", "(One*)"), ("const Vector", "const One"), ("Vector* ", "One* "), ("Vector sum;", "One sum;"),
            ("Vector out;", "One out;"), ("e < WIDTH", "e < 1"),
            ("\nextern", "\nstruct One { Element of[1]; };\nextern"),
        ),
        "local_memory": edited(
            (BEGIN, f"{BEGIN}\nVector kept[8];\nint number = 0;"),
            (STORED, f"{STORED}\nif (number < 8) kept[number++] = sum;"),
            ("    const float inverse", "    int again = 0;\n    const float inverse"),
            ("Vector sum = summed_row[at]", "Vector sum = again < 8 ? kept[again++] : summed_row[at]"),
        ),
    }


UNUSUAL = {
    "a tree in shared memory": tree(TREE),
    "a tree that begins with neighbours": tree(STRIDED),
    "one thread adds up the warps": edited((SECOND_SUM, TOTAL_BY_THREAD_0)),
    "one warp for the row": edited(
        ("    float squares = 0.0f;\n", "    if (threadIdx.x >= 32) return;\n    float squares = 0.0f;\n"),
        ("at += THREADS)", "at += 32)"),
        (f"    {SHARED}\n", ""),
        (f"    {WRITTEN}\n{BARRIER}{SECOND_SUM}", "    const float total = squares;\n"),
        ("    const int lane = threadIdx.x % 32;\n", ""),
    ),
    "float4 and uint4": '''# Exercise 13.8 · The same kernel in CUDA C++
def cuda_norm_source():
    return """
struct Eight { uint4 bits; };
template <typename Number> __device__ __forceinline__ Vector loaded(const Number* row, int at) {
    const uint4 bits = __ldg(reinterpret_cast<const uint4*>(row) + at);
    return *reinterpret_cast<const Vector*>(&bits);
}
static __device__ void stored(Element* row, int at, Vector vector) {
    *(reinterpret_cast<uint4*>(row) + at) = *reinterpret_cast<const uint4*>(&vector);
}
__device__ float of_block(float value) {
    static_assert(THREADS % 32 == 0, "whole warps");
    __shared__ float sums[32], all[1];
    #pragma unroll
    for (int d = 1; d < 32; d <<= 1) value += __shfl_down_sync(~0u, value, d);
    if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        value = threadIdx.x < blockDim.x / warpSize ? sums[threadIdx.x] : 0.f;
        for (int d = 1; d < 32; d <<= 1) value += __shfl_down_sync(~0u, value, d);
        if (threadIdx.x == 0) all[0] = value;
    }
    __syncthreads();
    return all[0];
}
extern "C" __global__ void add_rms_norm(
    const Element* x, const Element* residual, const Element* weight, Element* normalised, Element* summed,
    int columns, int x_stride, int residual_stride, float epsilon) {
    x += (size_t)blockIdx.x * x_stride; residual += (size_t)blockIdx.x * residual_stride;
    normalised += (size_t)blockIdx.x * columns; summed += (size_t)blockIdx.x * columns;
    float total = 0;
    for (int at = THREADS - 1 - threadIdx.x; at * WIDTH < columns; at += blockDim.x) {
        Vector a = loaded(x, at), b = loaded(residual, at);
        for (auto& number : a.of) {
            narrow(widened(number) + widened(b.of[&number - a.of]), number);
            total = fmaf(widened(number), widened(number), total);
        }
        stored(summed, at, a);
    }
    const float scale = 1.0f / sqrtf(of_block(total) / (float)columns + epsilon);
    for (int at = THREADS - 1 - threadIdx.x; at * WIDTH < columns; at += blockDim.x) {
        Vector a = loaded(summed, at), w = loaded(weight, at);
        for (int e = 0; e < WIDTH; ++e) narrow(widened(w.of[e]) * (widened(a.of[e]) * scale), a.of[e]);
        stored(normalised, at, a);
    }
}
"""
''',
    "warps added by atomicAdd": edited(
        (SHARED, "__shared__ float whole;\nif (threadIdx.x == 0) whole = 0.0f;\n__syncthreads();"),
        (WRITTEN, "if (lane == 0) atomicAdd(&whole, squares);"),
        (SECOND_SUM, "    const float total = whole;\n"),
    ),
    "a thread's first vector stays in registers": edited(
        (BEGIN, f"{BEGIN}\nVector kept;"),
        (STORED, f"{STORED}\nif (at == threadIdx.x) kept = sum;"),
        ("Vector sum = summed_row[at]", "Vector sum = at == threadIdx.x ? kept : summed_row[at]"),
    ),
    "all lanes store the sum of their warp": edited((WRITTEN, "of_warp[threadIdx.x / 32] = squares;")),
    "shared memory in a template": edited(
        ("\nextern", """
template <int warps> __device__ float of_block(float squares) {
    __shared__ float of_warp[warps];
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = 0.0f;
    for (int warp = 0; warp < warps; ++warp) total += of_warp[warp];
    return total;
}
extern"""),
        (f"    {SHARED}\n", ""),
        (f"    {WRITTEN}\n{BARRIER}{SECOND_SUM}", "    const float total = of_block<THREADS / 32>(squares);\n"),
    ),
    "the last warp by __syncwarp": edited(
        (FIRST_SUM, """    __shared__ float of_thread[THREADS];
    of_thread[threadIdx.x] = squares;
    __syncwarp();
    for (int distance = 16; distance > 0; distance /= 2) {
        const float more = lane < distance ? of_thread[threadIdx.x + distance] : 0.0f;
        __syncwarp();
        of_thread[threadIdx.x] += more;
        __syncwarp();
    }
    squares = of_thread[threadIdx.x];
"""),
    ),
    "the lanes that are there, behind a wait": edited(
        (FIRST_SUM, "    __syncwarp();\n" + FIRST_SUM.replace("0xffffffffu", "__activemask()"))
    ),
    "a sum of the warps by the lanes that have one": edited(
        (SECOND_SUM, """    __shared__ float whole;
    if (threadIdx.x < THREADS / 32) {
        float more = of_warp[threadIdx.x];
        const unsigned mask = 0xffffffffu >> (32 - THREADS / 32);
        for (int distance = THREADS / 64; distance > 0; distance /= 2) more += __shfl_down_sync(mask, more, distance);
        if (threadIdx.x == 0) whole = more;
    }
    __syncthreads();
    const float total = whole;
""")
    ),
    "less usual names of CUDA": edited(
        ("\nextern", "\nstruct __align__(16) Four { double2 two; };\nextern"),
        (BEGIN, f"{BEGIN}\nconst unsigned all = __activemask();"), ("0xffffffffu, squares", "all, squares"),
        ("0xffffffffu, total", "__ballot_sync(~0u, 1), total"),
        (BARRIER, "    if (__syncthreads_count(1) != THREADS) return;\n"),
        ("of_warp[threadIdx.x / 32] = squares", "atomicExch(&of_warp[threadIdx.x / 32], squares)"),
        (INVERSE, "__frsqrt_rn(__fmaf_rn(total, __frcp_rn((float)columns), epsilon))"),
    ),
}
