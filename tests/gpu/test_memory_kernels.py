"""Chapter 01's kernels compiled and run on the GPU: right at any length, beyond 2^31 elements, and fast."""

import pytest
import torch

from course_lib.hardware.device import machine, supports_bfloat16
from course_lib.hardware.timing import measure
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.fma_chain import fma_chain, fma_chain_reference
from course_lib.kernels.memory.row_sum import row_sum
from course_lib.kernels.memory.scale_add_relu import scale_add_relu, scale_add_relu_reference
from course_lib.kernels.memory.strided_copy import strided_copy
from course_lib.kernels.memory.vector_add import vector_add

DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if supports_bfloat16() else [])
LENGTHS = [0, 1, 31, 2047, 2048, 2049, 1_000_003, 2**24]


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def poisoned(like):
    return torch.full_like(like, float("nan"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_elementwise_kernels_agree_with_float64(length, dtype):
    x, y = random(length, dtype=dtype), random(length, dtype=dtype)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(vector_add(x, y, out=poisoned(x)), x + y, rtol=0, atol=0)
    assert torch.equal(copy(x, out=poisoned(x)), x)
    exact = scale_add_relu_reference(x.double(), y.double(), 1.7)
    torch.testing.assert_close(scale_add_relu(x, y, 1.7, out=poisoned(x)).double(), exact, rtol=step, atol=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
def test_the_chain_agrees_with_float64(length):
    x = random(length)
    exact = fma_chain_reference(x.double(), 9, 1.25, -0.5)
    torch.testing.assert_close(fma_chain(x, 9, 1.25, -0.5, out=poisoned(x)).double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2, 3, 8, 33])
def test_strided_copy_agrees_with_slicing(stride):
    x = random(100_003 * stride)[::stride]
    assert torch.equal(strided_copy(x, out=poisoned(x.contiguous())), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 50_000_001), (3, 10_000_000), (1_000_003, 3), (4096, 4097), (130, 1000), (70000, 64)], ids=str
)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_row_sum_agrees_with_float64(shape, dtype, transposed):
    x = random(*shape[::-1], dtype=dtype).t() if transposed else random(*shape, dtype=dtype)
    exact, size = x.double().sum(-1), x.double().abs().sum(-1)
    assert ((row_sum(x).double() - exact).abs() <= 2**-20 * size + 1e-30).all()


def test_row_sum_of_strided_rows_and_columns():
    x = random(3000, 5000)[::3, ::7]
    torch.testing.assert_close(row_sum(x).double(), x.double().sum(-1), rtol=1e-4, atol=1e-3)


@pytest.mark.skipif((machine().memory_bytes or 0) < 40 * 2**30, reason="needs 40 GiB of GPU memory")
def test_offsets_beyond_two_to_the_31_do_not_wrap():
    """A 32-bit offset turns negative at element 2^31 and writes before the tensor."""
    length = 2**31 + 4097
    x = torch.zeros(length, dtype=torch.float16, device="cuda")
    x[-5:] = 3.0
    out = torch.full_like(x, 7.0)
    assert copy(x, out=out)[-5:].tolist() == [3.0] * 5
    assert out[2**31 - 3 : 2**31 + 3].tolist() == [0.0] * 6
    assert vector_add(x, x, out=out)[-5:].tolist() == [6.0] * 5
    assert scale_add_relu(x, x, 1.0, out=out)[-5:].tolist() == [6.0] * 5
    assert row_sum(x).item() == 15.0
    assert row_sum(x[1:].view(-1, 4096)).sum().item() == 15.0


@pytest.mark.slow
def test_copy_and_vector_add_reach_pytorchs_copy_bandwidth():
    size = min(2**28, machine().memory_bytes // 64)
    x, y = random(size), random(size)
    out = torch.empty_like(x)
    reference = 2 * x.nbytes / measure(lambda: out.copy_(x)).median
    reached = {
        "copy": 2 * x.nbytes / measure(lambda: copy(x, out=out)).median,
        "vector add": 3 * x.nbytes / measure(lambda: vector_add(x, y, out=out)).median,
        "scale, add, ReLU": 3 * x.nbytes / measure(lambda: scale_add_relu(x, y, 2.0, out=out)).median,
        "row sum": x.nbytes / measure(lambda: row_sum(x.view(-1, 4096))).median,
    }
    short = {name: rate / reference for name, rate in reached.items() if rate < 0.95 * reference}
    assert not short, f"shares of PyTorch's copy bandwidth: {short}"
