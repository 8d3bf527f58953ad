"""The model of an adder with 14 bits: what it keeps, what it cuts off, and how the error of long sums grows."""

import pytest
import torch

from course_lib.hardware.tensor_core_model import tensor_core

E4M3 = torch.float8_e4m3fn


def positive(inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(8, inner, generator=generator).to(E4M3) for _ in range(2)]


def through_the_core(a, b):
    """The running total stays in the tensor core."""
    sums = None
    for begin in range(0, a.shape[1], 128):
        sums = tensor_core(a[:, begin : begin + 128], b[:, begin : begin + 128], sums)
    return sums


def in_two_levels(a, b):
    """Each block of 128 begins at zero, and is added in float32."""
    return sum(tensor_core(a[:, begin : begin + 128], b[:, begin : begin + 128]) for begin in range(0, a.shape[1], 128))


def error(added, a, b):
    exact = a.double() @ b.double().T
    return float(((added(a, b).double() - exact).abs() / exact).mean())


@pytest.mark.parametrize("inner, expected", [(1024, 8e-4), (4096, 2.6e-3), (16_384, 9.7e-3)])
def test_the_error_of_a_running_total_grows_with_its_length_and_that_of_two_levels_does_not(inner, expected):
    a, b = positive(inner)
    assert error(through_the_core, a, b) == pytest.approx(expected, rel=0.3)
    assert error(in_two_levels, a, b) == pytest.approx(1e-4, rel=0.3)


def test_a_sum_of_few_bits_is_exact():
    a = torch.tensor([[1.0, 2.0, -4.0, 0.5]]).to(E4M3)
    b = torch.tensor([[1.0, 1.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0]]).to(E4M3)
    assert tensor_core(a, b, torch.tensor([[10.0, -3.0]])).tolist() == [[12.0, -3.0]]


def test_a_product_14_bits_below_the_largest_is_cut_off():
    """DeepGEMM#37 found the number of bits this way: 448 beside a small number, times 1."""
    for small, kept in ((2.0**-5, 2.0**-5), (2.0**-6, 0.0), (-(2.0**-6), 0.0)):
        a = torch.tensor([[256.0, small]]).to(E4M3)
        assert float(tensor_core(a, torch.ones(1, 2).to(E4M3))) == 256.0 + kept, small


def test_the_sums_in_the_registers_lose_what_float32_could_hold():
    """SageAttention#287: a sum with more than 13 bits behind its leading one comes back without them."""
    nothing = torch.zeros(1, 1).to(E4M3)
    for given, kept in ((1 + 2.0**-13, 1 + 2.0**-13), (1 + 2.0**-14, 1.0), (-1 - 2.0**-14, -1.0)):
        assert float(tensor_core(nothing, nothing, torch.tensor([[given]]))) == kept


def test_blocks_of_32_in_several_calls_are_one_sum():
    a, b = positive(128)
    halves = tensor_core(a[:, 64:], b[:, 64:], tensor_core(a[:, :64], b[:, :64]))
    assert torch.equal(halves, tensor_core(a, b))


@pytest.mark.parametrize(
    "a, b, sums, told",
    [
        (torch.zeros(2, 8), torch.zeros(3, 8).to(E4M3), None, "a is float32"),
        (torch.zeros(2, 8).to(E4M3), torch.zeros(3, 9).to(E4M3), None, "same n"),
        (torch.zeros(2, 129).to(E4M3), torch.zeros(3, 129).to(E4M3), None, "n from 1 to 128"),
        (torch.zeros(2, 8).to(E4M3), torch.zeros(3, 8).to(E4M3), torch.zeros(3, 2), "float32 \\[2, 3\\]"),
    ],
    ids=["float32", "another n", "too wide", "sums of another shape"],
)
def test_what_a_tensor_core_does_not_take_is_refused(a, b, sums, told):
    with pytest.raises(ValueError, match=told):
        tensor_core(a, b, sums)
