"""The CUDA C++ kernels without a GPU: right when their source runs on the processor, and what NVRTC makes of them."""

import pytest
import torch

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cuda_cpp import compile_cuda
from course_lib.hardware.compiler.cuda_on_host import ORDERS, missing_host_compiler
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.cuda_add_rms_norm import add_rms_norm_launch, add_rms_norm_source, cuda_add_rms_norm
from course_lib.kernels.fused.cuda_group_norm_mish import (
    check_groups_of_all,
    cuda_group_norm_mish,
    group_norm_mish_launch,
    group_norm_mish_source,
)
from course_lib.kernels.fused.cuda_rows import Cut, cut_of, widest
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_reference
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


@on_host
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "batch, channels, groups, length, dtype, film",
    [
        pytest.param(3, 32, 4, 16, FLOAT, True, id="32-4-16"),
        pytest.param(2, 15, 5, 7, HALF, True, id="15-5-7"),
        pytest.param(2, 6, 1, 1, BRAIN, False, id="6-1-1"),
        pytest.param(2, 64, 8, 256, BRAIN, True, id="64-8-256"),
        pytest.param(1, 35, 1, 480, HALF, False, id="35-1-480, chunk by chunk"),
    ],
)
@pytest.mark.parametrize("mean", [0.0, 10_000.0], ids=["mean 0", "mean 10000"])
def test_group_norm_and_mish_is_right_for_every_cut_of_a_group(
    batch, channels, groups, length, dtype, film, mean, order
):
    x = (normal(1, batch, channels, length) + mean).to(dtype)
    weight, bias = normal(2, channels), normal(3, channels, dtype=dtype)
    both = normal(4, batch, 2 * channels, dtype=dtype)
    scale, shift = both.chunk(2, dim=1) if film else (None, None)
    out = nan_like(x)
    run_on_host(group_norm_mish_launch(x, groups, weight, bias, scale, shift, out, 1e-5), (5,), order)

    def plain(x, weight, bias):
        films = (None, None) if scale is None else (scale.to(x.dtype), shift.to(x.dtype))
        return group_norm_mish_reference(x, groups, weight, bias, *films)

    assert_as_exact_as_plain(out, plain, x, weight, bias)


def launched(dtype, elements, arch):
    """Both kernels as they ship for rows of so many elements, aligned to 16 bytes."""
    width = 16 // torch.empty(0, dtype=dtype).element_size()
    cut = cut_of(elements, width)
    return [
        compile_cuda(add_rms_norm_source(dtype, dtype, cut), "add_rms_norm", arch=arch),
        compile_cuda(
            group_norm_mish_source(dtype, dtype, dtype, cut, (elements // width, 2), True), "group_norm_mish", arch=arch
        ),
    ]


@compiles
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype, elements", [(FLOAT, 4096), (HALF, 4096), (BRAIN, 16384), (BRAIN, 100_000)], ids=str)
def test_machine_code_loads_16_bytes_at_once_and_keeps_no_number_in_local_memory(dtype, elements, arch):
    norm, block = launched(dtype, elements, arch)
    for kernel in (norm, block):
        assert kernel.stack_bytes == kernel.local_accesses == 0, kernel
        assert kernel.registers <= 128, kernel  # so that 512 threads fit
        assert kernel.load_widths.get(16, 0) > 0 and set(kernel.store_widths) == {16}, kernel
        assert kernel.shuffles > 0 and kernel.shared_bytes > 0, kernel
    assert set(norm.load_widths) == {16}, norm  # the weight too


@compiles
@pytest.mark.parametrize("arch", [75, 90])
def test_rows_of_odd_lengths_spill_nothing(arch):
    for dtype in (FLOAT, BRAIN):
        for elements in (4097, 8191, 100_003):
            cut = cut_of(elements, 1)
            for source, name in (
                (add_rms_norm_source(dtype, FLOAT, cut), "add_rms_norm"),
                (group_norm_mish_source(dtype, FLOAT, dtype, cut, (elements, 1), False), "group_norm_mish"),
            ):
                kernel = compile_cuda(source, name, arch=arch)
                assert kernel.local_accesses == 0, (elements, kernel)


def test_more_groups_than_a_launch_can_count_are_refused_by_their_number():
    check_groups_of_all(2**28 - 1, 8)
    with pytest.raises(ValueError, match="268,435,456 samples of 8 groups, 2,147,483,648 in all.*Split the batch"):
        check_groups_of_all(2**28, 8)


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
    with pytest.raises(ValueError, match="x is on device cpu.*compile_cuda"):
        cuda_group_norm_mish(normal(1, 2, 4, 8), 2, normal(2, 4), normal(3, 4))


def test_a_cut_says_its_constants():
    assert Cut(8, 128, 4, True).defines() == "#define WIDTH 8\n#define THREADS 128\n#define VECTORS 4\n#define KEPT 1\n"
