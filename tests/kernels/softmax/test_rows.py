"""Softmax over rows: all methods against float64, on widths around the tiles and rows that overflow."""

import math

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.softmax.rows import ONE_PASS_COLUMNS, softmax, softmax_reference, softmax_rows

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
METHODS = ("three_pass", "online", "one_pass")


def assert_right(x, method):
    expected = torch.softmax(x.double(), -1)
    allowed = 2 * (softmax_reference(x).double() - expected).abs().max() + torch.finfo(x.dtype).eps * expected.max()
    assert (softmax(x, method).double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("columns", [1, 2, 127, 128, 1000, 2049, 5000, 8191, 8193])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_right(columns, dtype, method):
    assert_right(torch.randn(3, columns, generator=torch.Generator().manual_seed(columns)).to(dtype), method)


@pytest.mark.parametrize("method", ["auto", "three_pass", "online"])
def test_a_million_columns_are_right(method):
    assert_right(torch.randn(1, 1_000_003, generator=torch.Generator().manual_seed(1)), method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row", ["rising", "falling", "equal", "large", "hidden"])
def test_a_missing_running_maximum_would_overflow(method, row):
    position = torch.arange(9000.0)
    x = {
        "rising": position,
        "falling": -position,
        "equal": torch.full((9000,), 500.0),
        "large": 1e30 * position,
        "hidden": torch.where(position < 8500, -math.inf, position),
    }[row]
    assert_right(x[None], method)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_bad_numbers_stay_in_their_row(method):
    x = torch.randn(4, 300)
    clean = softmax(x, method)
    x[1, 7], x[2, 7] = math.nan, math.inf
    out = softmax(x, method)
    assert torch.equal(out[[0, 3]], clean[[0, 3]]) and out[[1, 2]].isnan().any(dim=1).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_row_of_minus_infinity_is_nan_or_zeros_as_asked(method):
    x = torch.full((2, 40), -math.inf)
    assert softmax(x, method).isnan().all()
    out = torch.empty_like(x)
    softmax_rows(x, out, method, zero_empty_rows=True)
    assert torch.all(out == 0)


@pytest.mark.parametrize("method", METHODS)
def test_rows_may_lie_apart(method):
    wide = torch.randn(5, 100)
    x = wide[:, 3:70]
    assert torch.allclose(softmax(x, method), torch.softmax(x, -1), atol=1e-6)
    stacked = torch.randn(2, 3, 50)
    assert torch.allclose(softmax(stacked, method), torch.softmax(stacked, -1), atol=1e-6)


@pytest.mark.parametrize(
    "x, method, words",
    [
        (torch.zeros(2, 3), "fast", ["method", "'fast'", "'online'"]),
        (torch.zeros(0, 3), "auto", ["x", "(0, 3)"]),
        (torch.zeros(()), "auto", ["x", "()"]),
        (torch.zeros(2, 3).int(), "auto", ["x", "int32", "float32"]),
        (torch.zeros(2, 3).bfloat16(), "auto", ["x", "bfloat16", "float16"]),
        (torch.zeros(3, 2).t(), "auto", ["x", "contiguous()"]),
        (torch.zeros(2, 3, 4).transpose(0, 1), "auto", ["x", "contiguous()"]),
        (torch.zeros(1, ONE_PASS_COLUMNS + 1), "one_pass", ["one_pass", str(ONE_PASS_COLUMNS), "online"]),
        ([1.0], "auto", ["x", "list"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(x, method, words):
    with pytest.raises(ValueError) as refusal:
        softmax(x, method)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
