"""CUDA C++ without nvcc and without a GPU: what becomes of a source, and what is said where nothing can."""

import pytest
import torch

from course_lib.hardware.compiler import cuda_cpp, nvrtc
from course_lib.hardware.compiler.compiled import CompileError
from course_lib.hardware.compiler.cuda_cpp import compile_cuda
from course_lib.hardware.compiler.nvrtc import missing_nvrtc

COPY = """
struct alignas(16) Four { float of[4]; };
extern "C" __global__ void copy(const Four* x, Four* out, int length) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < length) out[at] = x[at];
}
"""
LOCAL = """
extern "C" __global__ void pick(const float* x, float* out, int which) {
    float numbers[64];
    for (int i = 0; i < 64; ++i) numbers[i * which % 64] = x[i];
    for (int i = 0; i < 64; ++i) out[i] = numbers[(i + threadIdx.x) % 64];
}
"""
compiles = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))


@compiles
@pytest.mark.parametrize("arch", [75, 90, "sm_120"])
def test_a_copy_of_four_numbers_is_one_load_and_one_store(arch):
    kernel = compile_cuda(COPY, "copy", arch=arch)
    assert kernel.load_widths == kernel.store_widths == {16: 1}
    assert kernel.stack_bytes == kernel.local_accesses == kernel.shuffles == 0
    assert 0 < kernel.registers < 32 and kernel.cubin.startswith(b"\x7fELF")


@compiles
def test_an_array_that_is_indexed_at_run_time_is_seen_in_local_memory():
    kernel = compile_cuda(LOCAL, "pick")
    assert kernel.stack_bytes >= 256 and kernel.local_accesses > 0


@compiles
def test_narrow_loads_are_told_from_wide_ones():
    source = 'extern "C" __global__ void k(const TYPE* x, TYPE* out) { out[threadIdx.x] = x[threadIdx.x]; }'
    for kind, width in (("unsigned char", 1), ("short", 2), ("float", 4), ("float2", 8), ("float4", 16)):
        assert compile_cuda(source.replace("TYPE", kind), "k").load_widths == {width: 1}, kind


@compiles
def test_a_mistake_in_the_source_is_told_with_its_line():
    with pytest.raises(CompileError, match="lenght") as caught:
        compile_cuda(COPY.replace("at < length", "at < lenght"), "copy")
    assert caught.value.line == 5


@compiles
def test_a_name_that_is_not_declared_is_told_with_those_that_are():
    with pytest.raises(ValueError, match="'paste'.*copy"):
        compile_cuda(COPY, "paste")


def test_an_unknown_architecture_is_told_with_those_that_are_known():
    with pytest.raises(ValueError, match="sm_35.*90"):
        compile_cuda(COPY, "copy", arch="sm_35")


def test_without_nvrtc_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nvrtc, "library", lambda: None)
    cuda_cpp._compiled.cache_clear()
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc"):
        compile_cuda(COPY, "copy")


def test_an_int_beyond_32_bits_is_refused():
    with pytest.raises(ValueError, match="argument 3 is 2147483648"):
        cuda_cpp._value(3, 2**31, torch.device("cuda", 0))
