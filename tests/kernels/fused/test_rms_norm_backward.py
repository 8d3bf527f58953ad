"""RMSNorm's gradients against float64, in bands of rows and in columns of long rows, and what they move."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware import device
from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.hardware.meter.traffic import record_launches
from course_lib.kernels.fused import gluon_rms_norm_backward
from course_lib.kernels.fused.rms_norm_backward import (
    launcher_of,
    rms_norm_backward,
    rms_norm_backward_reference,
)
from tests.kernels.fused.cases import SIZES, assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
TWO_PASSES = 8197  # columns, in float32 and in float16


def assert_right(summed, weight, gradient, summed_gradient=None, epsilon=1e-6):
    found = rms_norm_backward(summed, weight, gradient, summed_gradient, epsilon)
    assert_as_exact_as_plain(found, rms_norm_backward_reference, summed, weight, gradient, summed_gradient, epsilon)


def inputs(rows, hidden, dtype=torch.float32, scale=1.0):
    """summed, weight, and the gradients of both results."""
    summed = normal(1, rows, hidden, dtype=dtype, scale=scale)
    return summed, normal(2, hidden, dtype=dtype), *(normal(seed, rows, hidden, dtype=dtype) for seed in (3, 4))


def test_the_meaning_is_what_autograd_finds():
    summed, weight, gradient, summed_gradient = (tensor.double() for tensor in inputs(5, 7))
    summed.requires_grad_(), weight.requires_grad_()
    results = F.rms_norm(summed, (7,), weight, 0.1), summed.clone()
    right = torch.autograd.grad(results, (summed, weight), (gradient, summed_gradient))
    for ours, exact in zip(rms_norm_backward_reference(summed, weight, gradient, summed_gradient, 0.1), right):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("hidden", [*SIZES, TWO_PASSES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_hidden_size_is_right(hidden, dtype):
    summed, weight, gradient, summed_gradient = inputs(5, hidden, dtype)
    assert_right(summed, weight, gradient, summed_gradient)
    assert_right(summed, weight, gradient)


@pytest.mark.parametrize("hidden", [100, TWO_PASSES])
@pytest.mark.parametrize("rows", [1, 2, 4, 7, 61])
def test_any_number_of_rows_is_right_though_bands_end_within_them(rows, hidden):
    assert_right(*inputs(rows, hidden))


@pytest.mark.parametrize("hidden", [127, TWO_PASSES])
def test_strides_are_followed_and_gradients_that_cannot_be_are_copied(hidden):
    summed, weight, gradient, summed_gradient = inputs(4, hidden)
    assert_right(in_wider_rows(summed), weight, in_wider_rows(gradient), in_wider_rows(summed_gradient))
    assert_right(summed, weight, gradient, in_wider_rows(summed_gradient))
    assert_right(summed, weight, in_wider_rows(gradient), summed_gradient)
    assert_right(summed, weight, torch.ones(()).expand(4, hidden), summed_gradient.t().contiguous().t())


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e12), (torch.float32, 1e-6), (torch.float16, 1e4)])
@pytest.mark.parametrize("hidden", [1000, TWO_PASSES])
def test_large_and_small_numbers_are_right(hidden, dtype, scale):
    assert_right(*inputs(4, hidden, dtype, scale), epsilon=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_do_not_exist_add_nothing_though_epsilon_is_0(rows):
    """A tile of short rows has places beyond the last row, which hold 0/0."""
    assert_right(*inputs(rows, 3), epsilon=0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("hidden", [9, TWO_PASSES])
def test_a_row_of_zeros_with_epsilon_0_is_nan_as_in_pytorch(hidden):
    summed, weight, gradient, _ = inputs(3, hidden)
    summed[1] = 0
    found = rms_norm_backward(summed, weight, gradient, None, 0.0)
    leaves = summed.requires_grad_(), weight.requires_grad_()
    right = torch.autograd.grad(F.rms_norm(summed, (hidden,), weight, 0.0), leaves, gradient)
    assert all(torch.equal(ours.isnan(), theirs.isnan()) for ours, theirs in zip(found, right))
    assert found[0][1].isnan().all() and found[1].isnan().all() and not found[0][[0, 2]].isnan().any()


def test_no_rows_leave_the_weight_alone():
    input_gradient, weight_gradient = rms_norm_backward(torch.zeros(0, 5), torch.ones(5), torch.zeros(0, 5))
    assert input_gradient.shape == (0, 5) and torch.equal(weight_gradient, torch.zeros(5))


@pytest.mark.parametrize("hidden, reads", [(100, 3), (TWO_PASSES, 5)])
def test_each_gradient_is_read_once_or_in_long_rows_twice(hidden, reads):
    summed, weight, gradient, summed_gradient = inputs(20, hidden)
    report = metered(rms_norm_backward, summed, weight, gradient, summed_gradient)
    tensors = ("summed_pointer", "gradient_pointer", "summed_gradient_pointer", "input_gradient_pointer")
    moved = [report[name].loaded_bytes + report[name].stored_bytes for name in tensors]
    assert sum(moved) == (reads + 1) * summed.nbytes
    assert not report.out_of_bounds


def test_one_launch_adds_the_bands_up_in_the_dtype_of_the_weight():
    summed, weight, gradient, summed_gradient = inputs(20, 100, torch.float16)
    with record_launches() as launches:
        _, weight_gradient = rms_norm_backward(summed, weight, gradient, summed_gradient)
    assert [launch.kernel for launch in launches] == ["rms_norm_backward_kernel", "sum_of_bands_kernel"]
    assert weight_gradient.dtype == torch.float16


@pytest.mark.parametrize(
    "weight, rows, launcher",
    [
        (torch.ones(16384).half(), torch.ones(2, 16384).half(), "launch_long_rows"),
        (torch.ones(8200).bfloat16(), torch.ones(2, 8208).bfloat16()[:, :8200], "launch_long_rows"),
        (torch.ones(8192).half(), torch.ones(2, 8192).half(), "launch_one_pass"),
        (torch.ones(16392).half(), torch.ones(2, 16392).half(), "launch_two_passes"),
        (torch.ones(8197).half(), torch.ones(2, 8197).half(), "launch_two_passes"),
        (torch.ones(8200).half(), torch.ones(2, 8203).half()[:, :8200], "launch_two_passes"),
        (torch.ones(8200).half(), torch.ones(2, 8216).half()[:, 4:8204], "launch_two_passes"),
        (torch.ones(16384), torch.ones(2, 16384).half(), "launch_two_passes"),
        (torch.ones(16384), torch.ones(2, 16384), "launch_two_passes"),
    ],
)
def test_long_rows_of_16_bits_that_begin_at_16_bytes_are_read_once_on_hopper(monkeypatch, weight, rows, launcher):
    hopper = dataclasses.replace(device.machine(), shared_memory_per_block_bytes=227 * 1024)
    monkeypatch.setattr(gluon_rms_norm_backward, "machine", lambda: hopper)
    monkeypatch.setattr(gluon_rms_norm_backward, "interpreting", lambda: False)
    assert launcher_of(weight, [rows]).__name__ == launcher
    smaller = dataclasses.replace(hopper, shared_memory_per_block_bytes=163 * 1024)
    monkeypatch.setattr(gluon_rms_norm_backward, "machine", lambda: smaller)
    assert launcher_of(weight, [rows]).__name__ != "launch_long_rows"


@pytest.mark.parametrize(
    "change, words",
    [
        ({"summed": torch.zeros(3, 4).int()}, ["summed has dtype torch.int32"]),
        ({"weight": torch.ones(3)}, ["weight has shape (3,)"]),
        ({"normalised_gradient": None}, ["normalised_gradient is a NoneType"]),
        ({"normalised_gradient": torch.zeros(4, 3)}, ["normalised_gradient has shape (4, 3)", "(3, 4)"]),
        ({"summed_gradient": torch.zeros(3, 4).half()}, ["summed_gradient has dtype torch.float16"]),
        ({"epsilon": -1.0}, ["epsilon is -1.0"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"summed": torch.zeros(3, 4), "weight": torch.ones(4), "normalised_gradient": torch.zeros(3, 4)}
    with pytest.raises(ValueError) as refusal:
        rms_norm_backward(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
