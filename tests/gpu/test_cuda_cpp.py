"""The CUDA C++ kernels on a GPU: right in every dtype, for odd sizes, in a graph and in another thread."""

import threading

import pytest
import torch

from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting, supports_bfloat16
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.cuda_add_rms_norm import cuda_add_rms_norm
from course_lib.kernels.fused.cuda_group_norm_mish import cuda_group_norm_mish
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_reference
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "batch, channels, groups, length",
    [(37, 256, 8, 16), (5, 15, 5, 7), (3, 6, 1, 1), (7, 512, 8, 256), (3, 64, 2, 999), (2, 33, 3, 4097)],
)
@pytest.mark.parametrize("film", [False, True], ids=["alone", "scale and shift"])
@pytest.mark.parametrize("mean", [0.0, 10_000.0], ids=["mean 0", "mean 10000"])
def test_group_norm_and_mish_is_right(batch, channels, groups, length, dtype, film, mean):
    x = (normal(1, batch, channels, length) + mean).to(dtype)
    weight, bias = normal(2, channels), normal(3, channels, dtype=dtype)
    scale, shift = normal(4, batch, 2 * channels, dtype=dtype).chunk(2, dim=1) if film else (None, None)
    out = cuda_group_norm_mish(x, groups, weight, bias, scale, shift)

    def plain(x, weight, bias):
        films = (None, None) if scale is None else (scale.to(x.dtype), shift.to(x.dtype))
        return group_norm_mish_reference(x, groups, weight, bias, *films)

    assert_as_exact_as_plain(out, plain, x, weight, bias)


def test_no_rows_and_no_samples_are_empty():
    normalised, summed = cuda_add_rms_norm(normal(1, 0, 64), normal(2, 0, 64), normal(3, 64))
    assert normalised.shape == summed.shape == (0, 64)
    assert cuda_group_norm_mish(normal(1, 0, 8, 16), 2, normal(2, 8), normal(3, 8)).shape == (0, 8, 16)


def test_both_run_in_a_graph_on_another_stream():
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


def test_a_tensor_that_is_not_contiguous_is_refused_by_name():
    with pytest.raises(ValueError, match="x has strides .* must be contiguous"):
        cuda_group_norm_mish(normal(1, 2, 16, 8).transpose(1, 2), 2, normal(2, 8), normal(3, 8))
