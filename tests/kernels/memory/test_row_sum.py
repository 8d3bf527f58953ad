"""Row sum: any shape, any strides, one pass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib.hardware.device import interpreting
from course_lib.kernels.memory import row_sum as module
from course_lib.kernels.memory.row_sum import choose_tile, row_sum, row_sum_reference, split_columns

pytestmark = pytest.mark.skipif(not interpreting(), reason="on a GPU tests/gpu/test_memory_kernels.py covers these")


def assert_right(x):
    """Within the error of adding so many float32 values pairwise, from a float64 sum."""
    exact = x.double().sum(-1)
    bound = 2**-22 * x.double().abs().sum(-1) + 1e-30
    found = row_sum(x)
    meant = row_sum_reference(x)
    assert found.dtype == meant.dtype == torch.float32 and found.shape == meant.shape == x.shape[:-1]
    assert ((found.double() - exact).abs() <= bound).all()
    # PyTorch adds some layouts one after the other, and then errs by half an ulp at each addition.
    assert ((meant.double() - exact).abs() <= max(1, x.shape[-1] / 4) * bound).all()


@pytest.mark.parametrize(
    "shape",
    [
        (0, 5),
        (5, 0),
        (0, 0),
        (1, 1),
        (1, 40000),
        (3, 4096),
        (3, 4097),
        (130, 3),
        (7, 33),
        (2, 3, 5),
        (0, 3, 5),
        (11,),
        (0,),
    ],
    ids=str,
)
def test_any_shape(shape):
    assert_right(torch.randn(shape))


@settings(max_examples=25)
@given(
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
)
def test_any_strides(rows, columns, row_step, column_step, transposed, dtype):
    storage = (
        torch.randn(columns * column_step, rows * row_step).t()
        if transposed
        else torch.randn(rows * row_step, columns * column_step)
    )
    assert_right(storage.to(dtype)[::row_step, ::column_step])


def test_a_broadcast_row_is_summed_without_being_copied():
    assert_right(torch.randn(1, 300).expand(50, 300))
    assert_right(torch.randn(50, 1).expand(50, 300))


def test_what_lies_between_strided_elements_is_not_read():
    storage = torch.full((40, 200), float("nan"))
    storage[::2, ::4] = 1.0
    assert torch.equal(row_sum(storage[::2, ::4]), torch.full((20,), 50.0))


def test_long_rows_are_shared_and_come_out_the_same(monkeypatch):
    monkeypatch.setattr(module, "TILE_ELEMENTS", 64)
    monkeypatch.setattr(module, "TALL_TILE_ROWS", 8)
    x = torch.randn(3, 5000)
    assert split_columns(x) < 5000
    assert_right(x)
    assert_right(torch.randn(5000, 3).t())
    assert torch.equal(row_sum(x), row_sum(x))


def test_shares_are_whole_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE_ELEMENTS", 64)
    for columns in (1, 63, 64, 65, 1000, 4097):
        x = torch.empty(2, columns)
        assert split_columns(x) % choose_tile(x)[1] == 0


def test_the_tile_is_long_where_memory_is_contiguous():
    assert choose_tile(torch.empty(1000, 9000)) == (1, 2048)
    assert choose_tile(torch.empty(9000, 1000).t()) == (128, 16)
    assert choose_tile(torch.empty(9000, 20)) == (64, 32)


def test_a_row_with_nan_or_infinity_harms_no_other():
    x = torch.ones(6, 100)
    x[2, 50], x[4, 99] = float("nan"), float("inf")
    found = row_sum(x)
    assert found[2].isnan() and found[4].isinf()
    assert torch.equal(found[[0, 1, 3, 5]], torch.full((4,), 100.0))


@pytest.mark.parametrize(
    "x, words",
    [
        (torch.tensor(1.0), "no dimensions"),
        (torch.ones(3, 3).int(), "allowed are torch.float32"),
        (torch.ones(3, 3).bfloat16(), "interpreter computes wrong"),
        (torch.ones(4, 3, 5).transpose(0, 1), "leading dimensions cannot be seen as one"),
        ([[1.0]], "x is a list"),
    ],
)
def test_bad_input_is_refused_by_name(x, words):
    with pytest.raises(ValueError, match=words):
        row_sum(x)
