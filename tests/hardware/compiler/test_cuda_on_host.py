"""A CUDA C++ kernel on the processor: right where it is right, and a sentence with its line where it is not."""

import pytest
import torch

from course_lib.checker import CUDA_ON_HOST
from course_lib.checker.specification.needs import missing
from course_lib.hardware.compiler import cuda_on_host
from course_lib.hardware.compiler.cuda_on_host import ORDERS, KernelFault, missing_host_compiler, run_on_host
from course_lib.hardware.device import machine

pytestmark = pytest.mark.skipif(missing_host_compiler() is not None, reason=f"needs {missing_host_compiler()}")
HEAD = 'extern "C" __global__ void kernel(const float* x, float* out, int count) {\n'


def ran(body, threads=64, count=64, order="ascending", before="", grid=1):
    """What a kernel of this body makes of 0, 1, 2, …; NaN where it writes nothing. Its body begins in line 2."""
    x, out = torch.arange(float(count)), torch.full((count,), torch.nan)
    arguments = {"x": x, "out": out, "count": count}
    source = f"{HEAD}{body}\n}}\n"
    run_on_host(source, "kernel", grid, threads, arguments, ("out",), order=order, given=before, seconds=0.5)
    return out


def told(body, kind, **how):
    with pytest.raises(KernelFault) as raised:
        ran(body, **how)
    assert type(raised.value).__name__ == kind, raised.value
    return str(raised.value)


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_threads_and_a_loop_cover_what_they_should(order):
    out = ran(
        "for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < count; at += gridDim.x * blockDim.x)\n"
        "    out[at] = 2.0f * x[at];",
        threads=32, count=100, order=order, grid=2,
    )  # fmt: skip
    assert torch.equal(out, 2 * torch.arange(100.0))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "call, lanes",
    [
        ("__shfl_xor_sync(0xffffffffu, v, 5)", [lane ^ 5 for lane in range(32)]),
        ("__shfl_down_sync(0xffffffffu, v, 3)", [lane + 3 if lane < 29 else lane for lane in range(32)]),
        ("__shfl_up_sync(0xffffffffu, v, 3)", [lane - 3 if lane > 2 else lane for lane in range(32)]),
        ("__shfl_sync(0xffffffffu, v, 7)", [7] * 32),
        ("__shfl_xor_sync(0xffffffffu, v, 4, 8)", [lane ^ 4 for lane in range(32)]),
        ("__shfl_down_sync(0xffffffffu, v, 1, 4)", [lane + (lane % 4 < 3) for lane in range(32)]),
        ("__shfl_sync(0xffffffffu, v, 9, 8)", [lane // 8 * 8 + 1 for lane in range(32)]),
    ],
)
def test_a_shuffle_gives_each_lane_what_a_gpu_would(call, lanes, order):
    out = ran(f"float v = x[threadIdx.x];\nout[threadIdx.x] = {call};", threads=32, count=32, order=order)
    assert out.tolist() == lanes


def test_a_shuffle_of_some_lanes_needs_these_alone():
    out = ran(
        "float v = x[threadIdx.x];\nif (threadIdx.x < 16) v = __shfl_xor_sync(0x0000ffffu, v, 1);\n"
        "out[threadIdx.x] = v;",
        threads=32, count=32,
    )  # fmt: skip
    assert out.tolist() == [lane ^ 1 if lane < 16 else lane for lane in range(32)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_forgotten_barrier_is_told_with_both_lines(order):
    body = (
        "__shared__ float all[64];\nall[threadIdx.x] = x[threadIdx.x];\n{}\nout[threadIdx.x] = all[63 - threadIdx.x];"
    )
    assert torch.equal(ran(body.format("__syncthreads();"), order=order), torch.arange(63.0, -1.0, -1.0))
    said = told(body.format(""), "BarrierMissing", order=order)
    assert "line 3" in said and "line 5" in said and "shared memory" in said


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("add", ["sum += x[threadIdx.x];", "if (threadIdx.x % 32 == 0) sum = sum + x[threadIdx.x];"])
@pytest.mark.parametrize("kind", ["", "volatile "])
def test_an_addition_that_a_gpu_would_lose_is_told_though_it_is_right_here(add, kind, order):
    """One fiber at a time never loses one, so the result says nothing."""
    body = f"__shared__ {kind}float sum;\nif (threadIdx.x == 0) sum = 0.0f;\n__syncthreads();\n{add}\n"
    said = told(f"{body}__syncthreads();\nout[threadIdx.x] = sum;", "LostUpdate", order=order)
    assert "line 5" in said and "one of the two additions is lost" in said


def test_memory_that_is_used_again_without_a_barrier_is_no_lost_update():
    """A thread that read a number and then wrote it looks like one that adds to it; the other must write it, too."""
    body = (
        "__shared__ float part[2];\nfor (int round = 0; round < 2; ++round) {\n"
        "if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x[threadIdx.x] + round;\n__syncthreads();\n"
        "out[threadIdx.x] = part[0] + part[1];\n}"
    )
    said = told(body, "BarrierMissing")
    assert "line 4" in said and "line 6" in said


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "body",
    [
        "__shared__ float sum;\nif (threadIdx.x == 0) sum = 0.0f;\n__syncthreads();\natomicAdd(&sum, 1.0f);\n"
        "__syncthreads();\nout[threadIdx.x] = sum;",
        "__shared__ float same;\nsame = 64.0f;\n__syncthreads();\nout[threadIdx.x] = same;",
        "__shared__ float all[64];\nall[threadIdx.x] = 64.0f;\n__syncwarp();\nout[threadIdx.x] = all[threadIdx.x ^ 5];",
        "out[threadIdx.x] = 64.0f;\n__syncthreads();\nout[63 - threadIdx.x] = out[63 - threadIdx.x];",
    ],
    ids=["atomicAdd", "the same number by all", "lanes behind __syncwarp", "a tensor behind a barrier"],
)
def test_what_is_ordered_is_no_race(body, order):
    assert ran(body, order=order).tolist() == [64.0] * 64


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_of_one_warp_are_not_ordered_by_themselves(order):
    said = told(
        "__shared__ float all[64];\nall[threadIdx.x] = x[threadIdx.x];\nout[threadIdx.x] = all[threadIdx.x ^ 1];",
        "BarrierMissing", order=order,
    )  # fmt: skip
    assert "line 3" in said and "line 4" in said


@pytest.mark.parametrize("order", ORDERS)
def test_blocks_are_never_ordered(order):
    assert "block" in told("out[threadIdx.x] = x[threadIdx.x] + blockIdx.x;", "BlocksCollide", grid=2, order=order)
    body = "if (threadIdx.x == 0) sum = blockIdx.x;\n__syncthreads();\nout[blockIdx.x * 32 + threadIdx.x] = sum;"
    head = "__device__ float sum;\n"
    said = told(body, "BlocksCollide", threads=32, grid=2, order=order, before=head)
    assert "a variable that all blocks share" in said


def test_threads_that_write_different_numbers_to_one_place_are_told():
    body = "__shared__ float one;\none = x[threadIdx.x];\n__syncthreads();\nout[threadIdx.x] = one;"
    assert "line 3" in told(body, "OnePlaceForSeveral")


def test_a_read_of_shared_memory_that_nobody_wrote_is_returned_and_no_fault():
    x = torch.ones(32)
    source = f"{HEAD}__shared__ float few[2];\nout[threadIdx.x] = few[1] == 1.0f ? 0.0f : x[0];\n}}\n"
    said = run_on_host(source, "kernel", 1, 32, {"x": x, "out": x.clone(), "count": 32}, ("out",))
    assert isinstance(said, cuda_on_host.SharedMemoryUnset)
    assert str(said).startswith("thread 0 of block 0 read shared memory") and "line 3" in str(said)


PARTS = """float v = 0.0f;
for (int at = threadIdx.x; at < count; at += blockDim.x) v += x[at];
{before}
const unsigned mask = __activemask();
for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(mask, v, distance);
if (threadIdx.x < count) out[threadIdx.x] = v;"""
knows_ways = pytest.mark.skipif(not cuda_on_host.tells_ways(), reason="needs g++ 12 or later")


def in_parts(count, order, before=""):
    x, out = torch.ones(count), torch.zeros(count)
    source = f"{HEAD}{PARTS.replace('{before}', before)}\n}}\n"
    return run_on_host(source, "kernel", 1, 32, {"x": x, "out": out, "count": count}, ("out",), order=order), out


@knows_ways
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [6, 33, 63])
def test_lanes_that_left_a_loop_at_different_times_are_not_together(count, order):
    said, out = in_parts(count, order)
    assert isinstance(said, cuda_on_host.LanesNotNamed) and out.isnan().any()
    assert "line 6" in str(said) and "__activemask" in str(said)


@knows_ways
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "count, before",
    [(32, ""), (64, ""), (33, "__syncwarp();"), (33, "__syncthreads();"), (6, "__ballot_sync(~0u, 1);")],
)
def test_lanes_are_together_that_went_one_way_or_have_waited_for_each_other(count, before, order):
    said, out = in_parts(count, order, before)
    assert said is None and out[:32].tolist() == [count] * min(count, 32)


@pytest.mark.parametrize("order", ORDERS)
def test_a_number_of_a_lane_that_the_mask_does_not_name_is_returned_and_no_fault(order):
    x = torch.ones(32)
    body = "float v = x[threadIdx.x];\nif (threadIdx.x < 16)\nv = __shfl_down_sync(0x0000ffffu, v, 8);\nout[0] = 1;"
    arguments = {"x": x, "out": x.clone(), "count": 32}
    said = run_on_host(f"{HEAD}{body}\n}}\n", "kernel", 1, 32, arguments, ("out",), order=order)
    assert isinstance(said, cuda_on_host.LanesNotNamed)
    assert "thread 8 took thread 16's number" in str(said) and "line 4" in str(said)
    assert "__activemask" not in str(said)


def test_a_bound_below_the_launch_is_told():
    arguments = {"x": torch.ones(64), "out": torch.ones(64), "count": 64}
    source = HEAD.replace("void kernel", "void __launch_bounds__(32) kernel") + "}\n"
    with pytest.raises(KernelFault, match="__launch_bounds__\\(32\\), and is launched with 64 threads"):
        run_on_host(source, "kernel", 1, 64, arguments, ("out",))


@pytest.mark.parametrize("kind", ["long", "size_t", "float", "short", "int*"])
def test_a_parameter_of_another_type_than_the_launch_has_is_told(kind):
    source = HEAD.replace("int count", f"{kind} count") + "}\n"
    with pytest.raises(KernelFault, match="`count`, is declared `.* count`, and is launched as `int`"):
        run_on_host(source, "kernel", 1, 32, {"x": torch.ones(9), "out": torch.ones(9), "count": 9}, ("out",))


def helped(helper, call="out[0] = twice(x[0]);"):
    out = torch.zeros(1)
    source = f"{helper}\n{HEAD}{call}\n}}\n"
    run_on_host(source, "kernel", 1, 1, {"x": torch.ones(1), "out": out, "count": 1}, ("out",))
    return out.item()


@pytest.mark.parametrize("head", ["float", "static inline float", "template <typename T> T"])
def test_a_function_without_device_is_told(head):
    word = "T" if "template" in head else "float"
    with pytest.raises(KernelFault, match="declares `twice` without `__device__`"):
        helped(f"{head} twice({word} number) {{ return 2 * number; }}")


@pytest.mark.parametrize(
    "helper",
    [
        "__device__ float twice(float number) { if (number > 0) { number *= 2; } return number; }",
        "#define DEVICE static __device__ inline\nDEVICE float twice(float number) { return 2 * number; }",
        "namespace of_mine { __device__ float two(float n) { return 2 * n; } }\n"
        "__device__ float twice(float n) { return of_mine::two(n); }",
        "struct Two { float of[2] = {1, 1}; __device__ float sum(float n) const { return n * (of[0] + of[1]); } };\n"
        "__device__ float twice(float n) { return Two().sum(n); }",
        'extern "C" {\n__device__ float twice(float number) { return 2 * number; }\n}',
    ],
    ids=["plain", "by a macro", "in a namespace", "of a struct", "in extern C"],
)
def test_functions_of_the_gpu_are_known_in_every_form(helper):
    assert helped(helper) == 2.0


def test_shared_memory_is_nan_in_each_block_until_it_is_written():
    body = (
        "__shared__ float kept[2];\nif (threadIdx.x == 0) kept[0] = 1.0f;\n__syncthreads();\n"
        "if (threadIdx.x < 2) out[blockIdx.x * 2 + threadIdx.x] = kept[threadIdx.x];\n"
        "__syncthreads();\nif (threadIdx.x == 1) kept[1] = 2.0f;"
    )
    out = ran(body, threads=32, count=4, grid=2)
    assert out.isnan().tolist() == [False, True, False, True]


def test_an_access_outside_a_tensor_names_it_with_its_element_thread_and_line():
    """In ascending order a tensor ends where the reachable memory does, in descending order it begins there."""
    said = told("if (threadIdx.x == 40)\nout[0] = x[count + 3];", "OutsideATensor", order="ascending")
    assert "thread 40 of block 0 read element 67 of `x`" in said and "line 3" in said and "64 elements" in said
    said = told("if (threadIdx.x == 40)\nout[-2] = 1.0f;", "OutsideATensor", order="descending")
    assert "2 elements before its beginning of `out`" in said


def test_a_write_just_beside_a_tensor_that_ends_within_a_page_is_seen():
    """A tensor of an odd size leaves a few bytes up to the end of the page, which the system lets anyone write."""
    said = told("if (threadIdx.x == 0) out[count] = 1.0f;", "OutsideATensor", count=63)
    assert "wrote element 63 of `out`" in said


def test_a_write_to_what_is_only_read_is_told():
    assert "thread 5 of block 0 wrote to `x`" in told("if (threadIdx.x == 5) ((float*)x)[1] = 0.0f;", "InputWritten")


def test_a_vector_that_is_not_aligned_is_told():
    said = told("out[0] = ((const float4*)(x + 1))->y;", "NotAligned")
    assert "no multiple of 16" in said and "line 2" in said


def test_an_index_that_an_array_does_not_have_is_told():
    said = told("__shared__ float few[4];\nfew[threadIdx.x] = 0.0f;", "OutsideAnArray")
    assert "thread 4 of block 0 used the index 4" in said and "line 3" in said


def test_a_barrier_that_others_leave_out_is_told():
    said = told("if (threadIdx.x < 32)\n__syncthreads();", "NotReachedByAll")
    assert "thread 0 of block 0 waits in __syncthreads" in said and "thread 32 has ended" in said and "line 3" in said


def test_two_barriers_are_not_one():
    said = told("if (threadIdx.x < 32)\n__syncthreads();\nelse\n__syncthreads();", "NotReachedByAll")
    assert "line 3" in said and "line 5" in said


def test_a_shuffle_whose_lanes_do_not_all_come_is_told():
    said = told(
        "float v = 0;\nif (threadIdx.x < 8)\nv = __shfl_xor_sync(0xffffffffu, v, 1);\nout[0] = v;", "NotReachedByAll"
    )
    assert "whose mask 0xffffffff names thread 8, but that has ended" in said and "line 4" in said
    assert "own lane, 1, is missing" in told("out[0] = __shfl_sync(1u, 0.0f, 0);", "NotReachedByAll")


@pytest.mark.parametrize("loop", ["for (;;) out[0] = x[0];", "for (;;)\n__syncthreads();", "for (;;)\n__syncwarp();"])
def test_a_loop_that_never_ends_is_stopped(loop):
    assert "still ran after 0.5 s" in told(loop, "DoesNotEnd")


@pytest.mark.parametrize(
    "body, words",
    [
        ("out[0] = 1;\n}\n{", "expected unqualified-id"),
        ("{", "Is a bracket or a quote left open?"),
        ("out[0] = __shfl_xor(x[0], 1);", "without `_sync`"),
        ("__shared__ float all[12289];\nout[0] = all[0];", "declares 49,156 bytes of __shared__ memory"),
        ("extern __shared__ float all[];", "Declare it with its size"),
        ('asm("");', "on a GPU only"),
        ("out[0] = std::sqrt(x[0]);", "uses `std::`"),
        ("__shared__ float all[4] = {0};\nout[0] = all[0];", "gives shared memory a value"),
        ("__shared__ int one = 1;\nout[0] = one;", "gives shared memory a value"),
        ("float all[count];\nout[0] = all[0];", "an array's length must be known when the kernel is compiled"),
        ("__half one;", "cuda_fp16.h"),
    ],
)
def test_what_does_not_compile_is_told_with_its_line(body, words):
    assert words in told(body, "DoesNotCompile")


def test_a_name_that_nothing_declares_is_told_with_its_line():
    assert "line 2, `out[0] = y;`: `y` was not declared" in told("out[0] = y;", "UnknownName")


@pytest.mark.parametrize(
    "call, number",
    [
        ("__popc(__activemask())", 32),
        ("threadIdx.x % 32 < 8 ? __popc(__activemask()) :\n8", 8),
        ("__popc(__ballot_sync(~0u, threadIdx.x % 32 < 5))", 5),
        ("__any_sync(~0u, threadIdx.x % 32 == 3)", 1),
        ("__all_sync(~0u, threadIdx.x % 32 != 3)", 0),
        ("__syncthreads_count(threadIdx.x < 33)", 33), ("__syncthreads_or(threadIdx.x == 40)", 1),
        ("__syncthreads_and(threadIdx.x < 64)", 1),
        ("__ldcg(x + 7) + __ldca(x) + __ldcs(x)", 7),
        ("__fmaf_rn(2.0f, 3.0f, 4.0f)", 10), ("__frsqrt_rn(4.0f)", 0.5), ("(float)rsqrt(4.0)", 0.5),
    ],
)  # fmt: skip
def test_less_usual_names_of_cuda_are_known(call, number):
    assert ran(f"float it = {call};\n__stcs(out + threadIdx.x, it);").tolist() == [number] * 64


def test_numbers_of_16_bits_round_as_pytorch_does():
    numbers = torch.cat([torch.randn(500) * 10.0**power for power in range(-9, 6)])
    special = torch.tensor([0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e9, 5.96e-8, 2.98e-8, 2.99e-8, 2049.0, 2051.0])
    numbers = torch.cat([numbers, special, torch.tensor([torch.inf, -torch.inf])])
    for element, dtype in (("half_bits", torch.float16), ("bfloat16_bits", torch.bfloat16)):
        narrow = torch.zeros(len(numbers), dtype=dtype)
        wide = torch.zeros(len(numbers))
        source = (
            f'extern "C" __global__ void both(const float* x, {element}* narrow_ones, float* wide) {{\n'
            "narrow(x[blockIdx.x], narrow_ones[blockIdx.x]);\nwide[blockIdx.x] = widened(narrow_ones[blockIdx.x]);\n}\n"
        )
        arguments = {"x": numbers, "narrow_ones": narrow, "wide": wide}
        run_on_host(source, "both", len(numbers), 1, arguments, ("narrow_ones", "wide"))
        assert torch.equal(narrow.view(torch.int16), numbers.to(dtype).view(torch.int16))
        assert torch.equal(wide, numbers.to(dtype).float())


def test_a_fault_leaves_the_process_as_it_was():
    told("out[0] = x[1 << 20];", "OutsideATensor")
    assert torch.equal(ran("out[threadIdx.x] = x[threadIdx.x];"), torch.arange(64.0))


def test_without_a_compiler_a_sentence_says_what_would_do(monkeypatch):
    monkeypatch.setattr(cuda_on_host.shutil, "which", lambda name: None)
    said = missing(CUDA_ON_HOST, machine())
    assert said.startswith("This exercise needs g++ 8 or later on Linux") and "apt install g++" in said


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="threads is 2048"):
        ran("", threads=2048)
    with pytest.raises(ValueError, match="order is 'sideways'"):
        ran("", order="sideways")
