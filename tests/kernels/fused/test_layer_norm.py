"""LayerNorm, forward and backward, against float64: in registers and in tiles of long rows; and as an operator."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused import layer_norm_operators
from course_lib.kernels.fused.layer_norm import layer_norm_forward, layer_norm_reference
from course_lib.kernels.fused.layer_norm_backward import layer_norm_backward, layer_norm_backward_reference
from course_lib.kernels.fused.layer_norm_operators import (
    layer_norm,
    layer_norm_backward_operator,
    layer_norm_operator,
)
from tests.kernels.fused.cases import SIZES, assert_as_exact_as_plain, check_one_graph, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
TWO_PASSES, LOOP = 8197, 16389  # columns in float32, of which the backward pass, and then both, take a long way


def inputs(rows, hidden, dtype=torch.float32, scale=1.0):
    """x, weight, bias, and the gradient of the result."""
    x, gradient = normal(1, rows, hidden, dtype=dtype, scale=scale), normal(4, rows, hidden, dtype=dtype)
    return x, normal(2, hidden, dtype=dtype), normal(3, hidden, dtype=dtype), gradient


def assert_right(x, weight, bias, gradient, epsilon=1e-5):
    out, statistics = layer_norm_forward(x, weight, bias, epsilon)
    assert_as_exact_as_plain(out, layer_norm_reference, x, weight, bias, epsilon=epsilon)
    found = layer_norm_backward(x, statistics, weight, gradient)
    assert_as_exact_as_plain(found, layer_norm_backward_reference, x, weight, gradient, epsilon=epsilon)


def test_the_meaning_is_pytorchs_and_its_gradients_are_what_autograd_finds():
    x, weight, bias, gradient = (tensor.double() for tensor in inputs(5, 7))
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    out = F.layer_norm(x, (7,), weight, bias, 0.1)
    torch.testing.assert_close(layer_norm_reference(x, weight, bias, 0.1), out)
    right = torch.autograd.grad(out, leaves, gradient)
    for ours, exact in zip(layer_norm_backward_reference(x, weight, gradient, 0.1), right, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("hidden", [*SIZES, TWO_PASSES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_hidden_size_is_right(hidden, dtype):
    assert_right(*inputs(5, hidden, dtype))


@pytest.mark.parametrize("dtype, hidden", [(torch.float32, LOOP), (torch.float16, 2 * LOOP)], ids=str)
def test_rows_beyond_the_registers_are_right(hidden, dtype):
    assert_right(*inputs(1, hidden, dtype))


@pytest.mark.parametrize("hidden", [100, TWO_PASSES])
@pytest.mark.parametrize("rows", [1, 4, 13])
def test_any_number_of_rows_is_right_though_bands_end_within_them(rows, hidden):
    assert_right(*inputs(rows, hidden))


@pytest.mark.parametrize("hidden", [100, LOOP])
def test_a_mean_of_ten_thousand_with_variance_one_is_right(hidden):
    """E[x²] - E[x]² is wrong by the whole variance here: float32 steps by 8 near 10⁸."""
    x, *others = inputs(2, hidden)
    x += 1e4
    by_squares = x.square().mean(-1) - x.mean(-1).square()
    assert (by_squares - 1).abs().max() > 0.5, "the trap is none"
    assert_right(x, *others)


@pytest.mark.parametrize("hidden", [127, TWO_PASSES])
def test_strides_are_followed_and_gradients_that_cannot_be_are_copied(hidden):
    x, weight, bias, gradient = inputs(3, hidden)
    assert_right(in_wider_rows(x), weight, bias, in_wider_rows(gradient))
    assert_right(x, weight, bias, torch.ones(()).expand(3, hidden))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a tile's places beyond the last row hold 0 · 1/√0
def test_large_numbers_are_right_and_equal_ones_with_epsilon_0_nan_as_in_pytorch():
    x, weight, bias, gradient = inputs(3, 9, scale=1e12)
    assert_right(x, weight, bias, gradient, epsilon=0.0)
    x[1] = 5.0
    right = F.layer_norm(x, (9,), weight, bias, 0.0)
    out, _ = layer_norm_forward(x, weight, bias, 0.0)
    assert torch.equal(out.isnan(), right.isnan()) and out[1].isnan().all() and not out[[0, 2]].isnan().any()
    torch.testing.assert_close(layer_norm_forward(x, weight, bias)[0][1], bias)


def test_no_rows_leave_the_weights_alone():
    x, ones = torch.zeros(0, 5), torch.ones(5)
    out, statistics = layer_norm_forward(x, ones, ones)
    found = layer_norm_backward(x, statistics, ones, x)
    assert out.shape == found[0].shape == (0, 5)
    assert torch.equal(found[1], torch.zeros(5)) and torch.equal(found[2], torch.zeros(5))


@pytest.mark.parametrize("hidden, forward_reads, backward_reads", [(100, 1, 1), (TWO_PASSES, 1, 2), (LOOP, 2, 2)])
def test_each_element_is_read_once_or_in_long_rows_twice(hidden, forward_reads, backward_reads):
    x, weight, bias, gradient = inputs(3, hidden)
    forward = metered(layer_norm_forward, x, weight, bias)
    assert forward["x_pointer"].loaded_bytes == forward_reads * x.nbytes
    assert forward["out_pointer"].stored_bytes == x.nbytes and forward.contended_bytes == 0
    _, statistics = layer_norm_forward(x, weight, bias)
    backward = metered(layer_norm_backward, x, statistics, weight, gradient)
    for name in ("x_pointer", "gradient_pointer"):
        assert backward[name].loaded_bytes == backward_reads * x.nbytes
    assert backward["x_gradient_pointer"].stored_bytes == x.nbytes
    assert not forward.out_of_bounds and not backward.out_of_bounds
    assert all(tensor.atomic_bytes == 0 for tensor in backward.tensors)


X, VECTOR = torch.zeros(3, 4), torch.ones(4)


@pytest.mark.parametrize(
    "function, change, words",
    [
        (layer_norm_forward, {"x": X.int()}, ["x has dtype torch.int32"]),
        (layer_norm_forward, {"x": torch.zeros(4, 3).t()}, ["x has strides", "x.contiguous()"]),
        (layer_norm_forward, {"weight": torch.ones(3)}, ["weight has shape (3,)", "(4,)"]),
        (layer_norm_forward, {"bias": torch.ones(5)}, ["bias has shape (5,)"]),
        (layer_norm_forward, {"bias": VECTOR.half()}, ["bias has dtype torch.float16"]),
        (layer_norm_forward, {"epsilon": -1.0}, ["epsilon is -1.0"]),
        (layer_norm_backward, {"statistics": torch.zeros(3)}, ["statistics has shape (3,)", "(3, 2)"]),
        (layer_norm_backward, {"out_gradient": torch.zeros(4, 3)}, ["out_gradient has shape (4, 3)", "(3, 4)"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(function, change, words):
    good = {"x": X, "weight": VECTOR}
    backward = {"statistics": torch.zeros(3, 2), "out_gradient": X}
    good |= {"bias": VECTOR} if function is layer_norm_forward else backward
    with pytest.raises(ValueError) as refusal:
        function(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


# ----------------------------------------------------------------------------------------------------- as an operator


def leaves(rows=3, hidden=5):
    return [tensor.requires_grad_() for tensor in inputs(rows, hidden)[:3]]


# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    def function(*tensors):
        return layer_norm(*tensors, 0.1)

    assert torch.autograd.gradcheck(function, leaves(), **GRADCHECK)

    def without_the_mean(x, statistics, weight, out_gradient):
        right = layer_norm_backward_reference(x, weight, out_gradient, 0.1)
        inverse = statistics[..., 1:]
        return right[0] + inverse * (out_gradient * weight).mean(-1, keepdim=True), *right[1:]

    monkeypatch.setattr(layer_norm_operators, "layer_norm_backward_operator", without_the_mean)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(function, leaves(), **GRADCHECK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_passes(dtype):
    x, weight, bias = [tensor.detach().to(dtype).requires_grad_() for tensor in leaves()]
    torch.library.opcheck(layer_norm_operator, (x, weight, bias, 1e-5))
    x, weight, bias = x.detach(), weight.detach(), bias.detach()
    statistics = layer_norm_forward(x, weight, bias)[1]
    torch.library.opcheck(layer_norm_backward_operator, (x, statistics, weight, x + 1))


def test_a_compiled_function_has_one_graph_for_all_lengths_and_the_same_gradients():
    def function(x, weight, bias):
        return 2 * layer_norm(3 * x, weight, bias)

    check_one_graph(function, leaves(), [[tensor.detach() for tensor in leaves(rows)] for rows in (2, 3, 7)])


def test_a_second_derivative_is_a_clear_error():
    x, weight, bias = leaves()
    (first,) = torch.autograd.grad(layer_norm(x, weight, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="LayerNorm has no derivative of its own.*_reference"):
        first.sum().backward()
