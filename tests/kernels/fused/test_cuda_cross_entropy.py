"""Cross-entropy by clusters in CUDA C++, without a GPU: how a row is cut, and what NVRTC makes of the kernel."""

import pytest
import torch

from course_lib.hardware.compiler.cuda_cpp import compile_cuda
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting
from course_lib.kernels.fused.cuda_cross_entropy import (
    MOST_BLOCKS,
    check_ignore_index,
    cross_entropy_source,
    cuda_cross_entropy_forward_backward_,
    cut_of_cluster,
)

compiles = pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc()))


@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("vectors", [1, 33, 1024, 1025, 16_032, 19_008, 32_768])
def test_a_cluster_has_room_for_every_vector_of_a_row(vectors, width):
    cut, blocks = cut_of_cluster(vectors * width, width)
    assert blocks in (1, 2, 4, MOST_BLOCKS) and cut.threads % 32 == 0 and cut.threads <= 512
    assert blocks * cut.threads * cut.vectors >= vectors
    assert blocks * (cut.threads - 32) * cut.vectors < vectors  # with a warp less in each block it had none


def test_a_row_that_no_cluster_holds_is_refused_with_what_to_use_instead():
    with pytest.raises(ValueError, match="131076 logits, 32769 vectors of 4; .* holds 32768 .*fused.cross_entropy"):
        cut_of_cluster(4 * 32_769, 4)


@pytest.mark.parametrize("ignore_index", [2**31, -(2**31) - 1])
def test_an_ignore_index_that_a_kernel_cannot_hold_is_refused_by_name(ignore_index):
    with pytest.raises(ValueError, match=f"ignore_index is {ignore_index}; .* 32 bits"):
        check_ignore_index(ignore_index)
    check_ignore_index(ignore_index - 1 if ignore_index > 0 else ignore_index + 1)


@compiles
@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vectors", [1000, 16_032, 32_768])
def test_a_thread_keeps_its_vectors_in_64_registers(vectors, dtype, arch):
    width = 16 // dtype.itemsize
    cut, blocks = cut_of_cluster(vectors * width, width)
    kernel = compile_cuda(cross_entropy_source(dtype, torch.int64, cut, blocks), "cross_entropy_", arch=arch)
    assert kernel.stack_bytes == kernel.local_accesses == 0 and kernel.registers <= 64, kernel
    assert kernel.load_widths.get(16) == cut.vectors, kernel  # each vector once


@pytest.mark.skipif(not interpreting(), reason="asks for what happens without a GPU")
def test_without_a_gpu_the_error_says_what_can_be_done():
    logits, targets = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="logits is on device cpu.*compile_cuda"):
        cuda_cross_entropy_forward_backward_(logits, targets, torch.ones(2))
