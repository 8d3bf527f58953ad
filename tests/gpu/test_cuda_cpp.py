"""Add and norm in CUDA C++ on a GPU: right in every dtype, for odd sizes, in a graph and in another thread."""

import threading

import pytest
import torch

from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting, supports_bfloat16
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.cuda_add_rms_norm import cuda_add_rms_norm
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = [
    pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/fused/test_cuda_cpp.py has the rest"),
    pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc())),
]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
HIDDEN = [1, 3, 127, 1000, 1004, 4096, 4097, 8192, 8193, 16384, 16385, 32768, 100_003]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "rows apart"])
@pytest.mark.parametrize("wide_weight", [False, True], ids=["weight alike", "weight float32"])
def test_add_and_norm_is_right(hidden, dtype, apart, wide_weight):
    x, residual = normal(1, 37, hidden, dtype=dtype), normal(2, 37, hidden, dtype=dtype)
    weight = normal(3, hidden, dtype=torch.float32 if wide_weight else dtype)
    if apart:
        x = in_wider_rows(x)
    normalised, summed = cuda_add_rms_norm(x, residual, weight)
    assert torch.equal(summed, x + residual)
    assert_as_exact_as_plain(normalised, lambda *them: add_rms_norm_reference(*them)[0], summed, None, weight)


def test_no_rows_are_empty():
    normalised, summed = cuda_add_rms_norm(normal(1, 0, 64), normal(2, 0, 64), normal(3, 64))
    assert normalised.shape == summed.shape == (0, 64)


def test_it_runs_in_a_graph_on_another_stream():
    x, residual, weight = normal(1, 64, 4096), normal(2, 64, 4096), normal(3, 4096)
    cuda_add_rms_norm(x, residual, weight)  # compiled and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normalised, _ = cuda_add_rms_norm(x, residual, weight)
    x.copy_(normal(4, 64, 4096))
    graph.replay()
    assert torch.equal(normalised, cuda_add_rms_norm(x, residual, weight)[0])


def test_a_new_thread_may_launch():
    x, residual, weight = normal(1, 8, 256), normal(2, 8, 256), normal(3, 256)
    right, found = cuda_add_rms_norm(x, residual, weight)[0], []
    thread = threading.Thread(target=lambda: found.append(cuda_add_rms_norm(x, residual, weight)[0]))
    thread.start()
    thread.join()
    assert torch.equal(found[0], right)
