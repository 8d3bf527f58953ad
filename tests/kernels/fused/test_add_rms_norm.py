"""Add + RMSNorm forward: both results against float64, on hidden sizes around the tiles; what it moves, and refuses."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_forward, add_rms_norm_reference
from tests.kernels.fused.cases import SIZES, assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
DTYPES = [torch.float32, torch.float16]
TWO_PASSES = 33001  # columns, in float32 and in float16


def assert_right(x, residual, weight, epsilon=1e-6):
    """The sum is PyTorch's, to the bit; the norm is that of the rounded sum."""
    normalised, summed = add_rms_norm_forward(x, residual, weight, epsilon)
    stored = x if residual is None else x + residual
    assert summed is None if residual is None else torch.equal(summed, stored)
    plain = lambda *arguments: add_rms_norm_reference(*arguments, epsilon)[0]  # noqa: E731
    assert_as_exact_as_plain(normalised, plain, stored, None, weight)
    assert normalised.is_contiguous() and (summed is None or summed.is_contiguous())


@pytest.mark.parametrize("hidden", [*SIZES, TWO_PASSES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["with residual", "alone"])
def test_any_hidden_size_is_right(hidden, dtype, alone):
    residual = None if alone else normal(2, 3, hidden, dtype=dtype)
    assert_right(normal(1, 3, hidden, dtype=dtype), residual, normal(3, hidden, dtype=dtype))


@pytest.mark.parametrize("columns", [65537, 70001])
def test_rows_that_no_register_file_holds_are_right_alone_too(columns):
    assert_right(normal(1, 1, columns, dtype=torch.float16), None, normal(2, columns, dtype=torch.float16))


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
def test_any_number_of_rows_is_right(rows):
    assert_right(normal(rows, rows, 100), normal(rows + 1, rows, 100), normal(3, 100))


@pytest.mark.parametrize("hidden", [96, 127, TWO_PASSES])
def test_rows_may_lie_apart_and_differently(hidden):
    x, residual = normal(1, 2, 3, hidden), normal(2, 2, 3, hidden)
    weight = normal(3, hidden)
    assert_right(in_wider_rows(x), residual, weight)
    assert_right(x, in_wider_rows(residual), weight)
    assert_right(x[:1, :1].expand(1, 3, hidden), residual[:1], weight)


@pytest.mark.parametrize(
    "dtype, scale", [(torch.float32, 1e15), (torch.float32, 1e-15), (torch.float16, 1e4), (torch.float16, 1e-5)]
)
def test_large_and_small_numbers_are_right(dtype, scale):
    x, residual = (normal(seed, 4, 1000, dtype=dtype, scale=scale) for seed in (1, 2))
    assert_right(x, residual, normal(3, 1000, dtype=dtype), epsilon=0.0)


@pytest.mark.parametrize("hidden", [1000, TWO_PASSES])
def test_the_norm_is_that_of_the_sum_as_it_is_stored(hidden):
    """Of a sum that was not rounded first, a fifth of the results round to a neighbour: no tolerance would see it."""
    x, residual = normal(1, 1, hidden, dtype=torch.float16), normal(2, 1, hidden, dtype=torch.float16)
    weight = torch.ones(hidden, dtype=torch.float16)
    normalised, summed = add_rms_norm_forward(x, residual, weight)
    rounded = (normalised == add_rms_norm_reference(summed.double(), None, weight)[0].half()).float().mean()
    not_rounded = (normalised == add_rms_norm_reference(x.double() + residual, None, weight)[0].half()).float().mean()
    assert rounded > 0.99 and not_rounded < 0.9


def test_the_squares_of_16_bit_numbers_do_not_overflow():
    """300² is more than float16 holds."""
    x = torch.full((2, 50), 300.0, dtype=torch.float16)
    normalised, _ = add_rms_norm_forward(x, x, torch.ones(50, dtype=torch.float16))
    assert torch.all(normalised == 1)


def test_the_weight_may_be_float32_beside_16_bits():
    x = normal(1, 3, 64, dtype=torch.float16)
    assert_right(x, x, normal(2, 64))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("hidden", [5, TWO_PASSES])
def test_a_row_of_zeros_with_epsilon_0_is_nan_as_in_pytorch_and_alone(hidden):
    x = normal(1, 3, hidden)
    x[1] = 0
    found, _ = add_rms_norm_forward(x, torch.zeros_like(x), torch.ones(hidden), 0.0)
    assert torch.equal(found.isnan(), F.rms_norm(x, (hidden,), torch.ones(hidden), 0.0).isnan())
    assert found[1].isnan().all() and not found[[0, 2]].isnan().any()
    with_epsilon, _ = add_rms_norm_forward(x, torch.zeros_like(x), torch.ones(hidden), 1e-6)
    assert torch.all(with_epsilon[1] == 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_numbers_stay_in_their_row():
    x, weight = normal(1, 5, 300), normal(2, 300)
    clean, _ = add_rms_norm_forward(x, x, weight)
    x[1, 7], x[2, 299] = math.nan, math.inf
    found, _ = add_rms_norm_forward(x, x, weight)
    assert torch.equal(found[[0, 3, 4]], clean[[0, 3, 4]]) and found[1].isnan().all() and found[2, 299].isnan()


def test_no_rows_give_no_rows():
    normalised, summed = add_rms_norm_forward(torch.zeros(0, 7), torch.zeros(0, 7), torch.ones(7))
    assert normalised.shape == summed.shape == (0, 7)


@pytest.mark.parametrize("hidden", [127, 4097])
def test_one_pass_moves_four_tensors_and_the_weight_once_a_program(hidden):
    rows, itemsize = 6, 4
    x, residual, weight = normal(1, rows, hidden), normal(2, rows, hidden), normal(3, hidden)
    report = metered(add_rms_norm_forward, x, residual, weight)
    programs = report.launches[0].grid[0]
    assert report.total_bytes == (4 * rows + programs) * hidden * itemsize
    assert not report.out_of_bounds and report.contended_bytes == 0


def test_two_passes_move_a_fifth_tensor():
    x, weight = normal(1, 2, TWO_PASSES), normal(3, TWO_PASSES)
    report = metered(add_rms_norm_forward, x, x.clone(), weight)
    assert report.total_bytes == (5 + 1) * 2 * TWO_PASSES * 4 and not report.out_of_bounds


X = torch.zeros(2, 6)


@pytest.mark.parametrize(
    "x, residual, weight, epsilon, words",
    [
        ([1.0], None, torch.ones(1), 1e-6, ["x is a list"]),
        (X.int(), None, torch.ones(6), 1e-6, ["x has dtype torch.int32", "float16"]),
        (X.bfloat16(), None, torch.ones(6), 1e-6, ["bfloat16", "interpreter"]),
        (torch.zeros(()), None, torch.ones(1), 1e-6, ["x has shape ()", "one column"]),
        (torch.zeros(3, 0), None, torch.ones(0), 1e-6, ["x has shape (3, 0)"]),
        (torch.zeros(6, 2).t(), None, torch.ones(6), 1e-6, ["x has strides (1, 2)", "x.contiguous()"]),
        (torch.zeros(2, 3, 6).transpose(0, 1), None, torch.ones(6), 1e-6, ["do not flatten", "x.contiguous()"]),
        (X, torch.zeros(2, 5), torch.ones(6), 1e-6, ["residual has shape (2, 5)", "(2, 6)"]),
        (X, X.half(), torch.ones(6), 1e-6, ["residual has dtype torch.float16", "torch.float32"]),
        (X, torch.zeros(6, 2).t(), torch.ones(6), 1e-6, ["residual has strides"]),
        (X, X, torch.ones(5), 1e-6, ["weight has shape (5,)", "(6,)"]),
        (X, X, torch.ones(6).half(), 1e-6, ["weight has dtype torch.float16"]),
        (X, X, torch.ones(12)[::2], 1e-6, ["weight", "contiguous"]),
        (X, X, torch.ones(6), -1e-6, ["epsilon is -1e-06", "at least 0"]),
        (X, X, torch.ones(6), math.nan, ["epsilon is nan"]),
        (X, X, torch.ones(6), "small", ["epsilon is 'small'"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(x, residual, weight, epsilon, words):
    with pytest.raises(ValueError) as refusal:
        add_rms_norm_forward(x, residual, weight, epsilon)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
