"""Add and norm in CUDA C++ without a GPU: right when its source runs on the processor, and what NVRTC makes of it."""

import pytest
import torch

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cuda_cpp import compile_cuda
from course_lib.hardware.compiler.cuda_on_host import ORDERS, missing_host_compiler
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.cuda_add_rms_norm import add_rms_norm_launch, add_rms_norm_source, cuda_add_rms_norm
from course_lib.kernels.fused.cuda_rows import Cut, cut_of, widest
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal
from tests.kernels.fused.cuda_on_host import run_on_host

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
on_host = pytest.mark.skipif(
    not interpreting() or missing_host_compiler() is not None,
    reason=missing_host_compiler() or "on a GPU tests/gpu/test_cuda_cpp.py runs the kernels themselves",
)
compiles = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))


def nan_like(tensor):
    return torch.full(tensor.shape, torch.nan, dtype=tensor.dtype)


@on_host
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "hidden, dtype, weight_dtype, apart",
    [
        pytest.param(1, FLOAT, FLOAT, False, id="1"),
        pytest.param(127, HALF, FLOAT, True, id="127, rows apart"),
        pytest.param(1000, HALF, HALF, False, id="1000"),
        pytest.param(1004, FLOAT, FLOAT, False, id="1004"),
        pytest.param(1026, BRAIN, FLOAT, False, id="1026"),
        pytest.param(8193, BRAIN, BRAIN, False, id="8193, chunk by chunk"),
        pytest.param(16392, HALF, HALF, False, id="16392, chunk by chunk"),
    ],
)
def test_add_and_norm_is_right_for_every_cut_of_a_row(hidden, dtype, weight_dtype, apart, order):
    x, residual = normal(1, 3, hidden, dtype=dtype), normal(2, 3, hidden, dtype=dtype)
    weight = normal(3, hidden, dtype=weight_dtype)
    if apart:
        x = in_wider_rows(x)
    normalised, summed = nan_like(x), nan_like(x)
    run_on_host(add_rms_norm_launch(x, residual, weight, normalised, summed, 1e-6), (3, 4), order)
    assert torch.equal(summed, x + residual)
    assert_as_exact_as_plain(normalised, lambda *them: add_rms_norm_reference(*them)[0], x + residual, None, weight)


@compiles
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype, elements", [(FLOAT, 4096), (HALF, 4096), (BRAIN, 16384), (BRAIN, 100_000)], ids=str)
def test_machine_code_loads_16_bytes_at_once_and_keeps_no_number_in_local_memory(dtype, elements, arch):
    cut = cut_of(elements, 16 // torch.empty(0, dtype=dtype).element_size())
    kernel = compile_cuda(add_rms_norm_source(dtype, dtype, cut), "add_rms_norm", arch=arch)
    assert kernel.stack_bytes == kernel.local_accesses == 0, kernel
    assert kernel.registers <= 128, kernel  # so that 512 threads fit
    assert set(kernel.load_widths) == set(kernel.store_widths) == {16}, kernel  # the weight's too
    assert kernel.shuffles > 0 and kernel.shared_bytes > 0, kernel


@compiles
@pytest.mark.parametrize("arch", [75, 90])
def test_rows_of_odd_lengths_spill_nothing(arch):
    for dtype in (FLOAT, BRAIN):
        for elements in (4097, 8191, 100_003):
            source = add_rms_norm_source(dtype, FLOAT, cut_of(elements, 1))
            kernel = compile_cuda(source, "add_rms_norm", arch=arch)
            assert kernel.local_accesses == 0, (elements, kernel)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("vectors", [1, 31, 33, 127, 512, 2049, 4096, 50_000])
def test_a_cut_has_every_vector_of_a_row_once(vectors, width):
    cut = cut_of(vectors * width, width)
    assert cut.threads % 32 == 0 and cut.threads <= 512
    at_once = cut.threads * cut.vectors
    assert not cut.kept or at_once >= vectors
    assert cut.kept or cut.vectors * cut.threads < vectors


def test_vectors_are_as_wide_as_sizes_and_addresses_allow():
    x = torch.zeros(64, dtype=HALF)
    assert widest(2, (64, 4096), (x,)) == 8
    assert widest(2, (64, 4097), (x,)) == 1
    assert widest(2, (12,), (x,)) == 4
    assert widest(2, (64,), (x[1:],)) == 1 and widest(2, (64,), (x[2:],)) == 2
    assert widest(2, (64,), (x, torch.zeros(64)[2:])) == 2  # 8 bytes are aligned for two float32


@pytest.mark.skipif(not interpreting(), reason="asks for what happens without a GPU")
def test_without_a_gpu_the_error_says_what_can_be_done():
    x = normal(1, 2, 8)
    with pytest.raises(ValueError, match="x is on device cpu.*compile_cuda"):
        cuda_add_rms_norm(x, x, normal(2, 8))


def test_a_cut_says_its_constants():
    assert Cut(8, 128, 4, True).defines() == "#define WIDTH 8\n#define THREADS 128\n#define VECTORS 4\n#define KEPT 1\n"
