"""Two products in one kernel against float64: any sizes and strides, what is rounded, what is refused; when it pays."""

import functools

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.products.fused_mlp import fused_mlp, fused_mlp_reference, saved
from tests.kernels.fused.cases import in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def inputs(rows, inner, hidden, columns, dtype=torch.float32):
    x, first = normal(1, rows, inner, dtype=dtype), normal(2, hidden, inner, dtype=dtype, scale=inner**-0.5)
    return x, first, normal(3, columns, hidden, dtype=dtype, scale=hidden**-0.5)


def assert_right(x, first, second, **given):
    wide = {name: value.double() if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    exact = fused_mlp_reference(x.double(), first.double(), second.double(), **wide)
    plain = (fused_mlp_reference(x, first, second, **given).double() - exact).abs().max()
    found = fused_mlp(x, first, second, **given)
    assert found.dtype == x.dtype and found.shape == exact.shape
    assert (found.double() - exact).abs().max() <= 2 * plain + 1e-6


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (35, 17, 65, 33), (33, 256, 31, 1), (3, 16, 64, 256), (0, 5, 7, 3)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_size_is_right(sizes, dtype):
    if sizes[0]:
        assert_right(*inputs(*sizes, dtype))
    assert fused_mlp(*inputs(*sizes, dtype)).shape == (sizes[0], sizes[3])


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
def test_biases_and_activations_are_right(activation):
    biases = {"first_bias": normal(4, 45), "second_bias": normal(5, 20)}
    assert_right(*inputs(9, 24, 45, 20), activation=activation, **biases)


def test_rows_may_lie_apart_and_nothing_between_them_is_read():
    tensors = inputs(34, 40, 33, 24)
    assert torch.equal(fused_mlp(*map(in_wider_rows, tensors)), fused_mlp(*tensors))


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"x": (4, 257), "first": (8, 257)}, "inner is 257"),
        ({"second": (300, 8)}, "columns is 300"),
        ({"second": (5, 9)}, "second .*9.*8"),
        ({"activation": "relu"}, "activation is 'relu'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change, sentence):
    shapes = {"x": (4, 6), "first": (8, 6), "second": (5, 8)}
    call = functools.partial(fused_mlp, *(torch.zeros(change.get(name, shape)) for name, shape in shapes.items()))
    with pytest.raises(ValueError, match=sentence):
        call(**{name: value for name, value in change.items() if name == "activation"})


def test_a_narrow_mlp_saves_time_and_a_wide_one_none():
    on_an_h200 = {"bandwidth": 4.3e12, "flops": 700e12}
    assert saved(2**20, 128, 512, 128, **on_an_h200) > 2e-4
    assert saved(2**14, 4096, 14_336, 4096, **on_an_h200) == pytest.approx(0)
