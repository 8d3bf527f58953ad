"""Chapter 01's elementwise kernels: right for any length, strict about what they are given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting, supports_bfloat16
from course_lib.kernels.memory.copy import copy, copy_reference
from course_lib.kernels.memory.scale_add_relu import scale_add_relu, scale_add_relu_reference
from course_lib.kernels.memory.strided_copy import strided_copy, strided_copy_reference
from course_lib.kernels.memory.vector_add import vector_add, vector_add_reference

LENGTHS = [0, 1, 127, 2047, 2048, 2049, 10007]
pytestmark = pytest.mark.skipif(not interpreting(), reason="on a GPU tests/gpu/test_memory_kernels.py covers these")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("length", LENGTHS)
def test_vector_add_is_exact_at_any_length(length, dtype):
    x, y = torch.randn(2, length).to(dtype)
    assert torch.equal(vector_add(x, y), vector_add_reference(x, y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("length", LENGTHS)
def test_copy_moves_the_bits_of_every_dtype(length, dtype):
    x = (100 * torch.randn(length)).to(dtype)
    assert torch.equal(copy(x), copy_reference(x)) and torch.equal(copy_reference(x), x)


def test_nothing_is_written_beyond_the_end():
    buffer = torch.full((5000,), -1.0)
    x = torch.rand(4097)
    copy(x, out=buffer[:4097])
    vector_add(x, x, out=buffer[:4097])
    scale_add_relu(x, x, 2.0, out=buffer[:4097])
    assert (buffer[4097:] == -1).all()


def test_any_shape_is_kept():
    x = torch.randn(3, 5, 7)
    assert torch.equal(vector_add(x, x), x + x)
    assert copy(x).shape == (3, 5, 7)


def test_fused_relu_passes_nan_and_drops_minus_zero_and_infinity_like_pytorch():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 2.0])
    y = torch.zeros(6)
    torch.testing.assert_close(scale_add_relu(x, y, 1.5), scale_add_relu_reference(x, y, 1.5), equal_nan=True)


@settings(max_examples=15)
@given(st.integers(0, 6000), st.floats(-4, 4, width=32), st.sampled_from([torch.float32, torch.float16]))
def test_fused_agrees_with_float64(length, scale, dtype):
    x, y = torch.randn(2, length).to(dtype)
    exact = scale_add_relu_reference(x.double(), y.double(), scale)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(scale_add_relu(x, y, scale).double(), exact, rtol=step, atol=2 * 2**-24 * 16)


@settings(max_examples=15)
@given(st.integers(0, 3000), st.integers(1, 9))
def test_strided_copy_agrees_with_slicing(length, stride):
    storage = torch.randn(length * stride + 1)
    assert torch.equal(strided_copy(storage[::stride]), strided_copy_reference(storage[::stride]))


def test_a_stride_of_zero_repeats_one_element():
    assert torch.equal(strided_copy(torch.tensor([3.0]).expand(2000)), torch.full((2000,), 3.0))


GOOD = torch.ones(8)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: vector_add(GOOD, torch.ones(9)), r"y has shape \(9,\); it must be that of x, \(8,\)"),
        (lambda: vector_add(GOOD, GOOD.half()), "y has dtype torch.float16"),
        (lambda: vector_add(GOOD.int(), GOOD.int()), "x has dtype torch.int32; allowed are torch.float32"),
        (lambda: vector_add([1.0], GOOD), "x is a list"),
        (lambda: vector_add(torch.ones(4, 4).t()[:, :2], torch.ones(4, 2)), r"Call x.contiguous\(\)"),
        (lambda: vector_add(GOOD, GOOD, out=torch.ones(9)), "out has shape"),
        (lambda: vector_add(GOOD, GOOD, out=torch.ones(16)[::2]), "out has shape .* strides .* must be contiguous"),
        (lambda: vector_add(GOOD, GOOD, out=3), "out is a int"),
        (lambda: vector_add(GOOD.bfloat16(), GOOD.bfloat16()), "bfloat16.*interpreter computes wrong"),
        (lambda: copy(torch.ones(8, dtype=torch.complex128)), "16 bytes"),
        (lambda: copy(torch.ones(16)[::2]), "x.contiguous"),
        (lambda: strided_copy(torch.ones(2, 2)), "must have one dimension"),
        (lambda: scale_add_relu(GOOD, GOOD, "2"), "scale is '2'"),
        (lambda: scale_add_relu(GOOD, torch.ones(9), 2.0), "y has shape"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_the_interpreter_is_why_bfloat16_is_refused_here():
    assert not supports_bfloat16()
