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


def test_a_forgotten_barrier_shows_in_one_of_the_two_orders():
    body = (
        "__shared__ float all[64];\nall[threadIdx.x] = x[threadIdx.x];\n{}\nout[threadIdx.x] = all[63 - threadIdx.x];"
    )
    right = torch.arange(63.0, -1.0, -1.0)
    assert all(torch.equal(ran(body.format("__syncthreads();"), order=order), right) for order in ORDERS)
    assert not all(torch.equal(ran(body.format(""), order=order), right) for order in ORDERS)


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
    assert "thread 5 of block 0 wrote to `x`" in told("if (threadIdx.x == 5) ((float*)x)[1] = 0.0f;", "ReadOnly")


def test_a_vector_that_is_not_aligned_is_told():
    said = told("out[0] = ((const float4*)(x + 1))->y;", "NotAligned")
    assert "no multiple of 16" in said and "line 2" in said


def test_an_index_that_an_array_does_not_have_is_told():
    said = told("__shared__ float few[4];\nfew[threadIdx.x] = 0.0f;", "OutsideAnArray")
    assert "thread 4 of block 0 used the index 4" in said and "line 3" in said


def test_a_barrier_that_others_leave_out_is_told():
    said = told("if (threadIdx.x < 32)\n__syncthreads();", "NotAllThere")
    assert "thread 0 of block 0 waits in __syncthreads" in said and "thread 32 has ended" in said and "line 3" in said


def test_two_barriers_are_not_one():
    said = told("if (threadIdx.x < 32)\n__syncthreads();\nelse\n__syncthreads();", "NotAllThere")
    assert "line 3" in said and "line 5" in said


def test_a_shuffle_whose_lanes_do_not_all_come_is_told():
    said = told(
        "float v = 0;\nif (threadIdx.x < 8)\nv = __shfl_xor_sync(0xffffffffu, v, 1);\nout[0] = v;", "NotAllThere"
    )
    assert "whose mask 0xffffffff names thread 8, but that has ended" in said and "line 4" in said
    assert "own lane, 1, is missing" in told("out[0] = __shfl_sync(1u, 0.0f, 0);", "NotAllThere")


@pytest.mark.parametrize("loop", ["for (;;) out[0] = x[0];", "for (;;)\n__syncthreads();", "for (;;)\n__syncwarp();"])
def test_a_loop_that_never_ends_is_stopped(loop):
    assert "still ran after 0.5 s" in told(loop, "DoesNotEnd")


@pytest.mark.parametrize(
    "body, words",
    [
        ("out[0] = y;", "line 2, `out[0] = y;`: `y` was not declared"),
        ("out[0] = 1;\n}\n{", "expected unqualified-id"),
        ("{", "Is a bracket or a quote left open?"),
        ("out[0] = __shfl_xor(x[0], 1);", "without `_sync`"),
        ("__shared__ float all[12289];\nout[0] = all[0];", "declares 49,156 bytes of __shared__ memory"),
        ("extern __shared__ float all[];", "Declare it with its size"),
        ('asm("");', "on a GPU only"),
    ],
)
def test_what_does_not_compile_is_told_with_its_line(body, words):
    assert words in told(body, "DoesNotCompile")


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
