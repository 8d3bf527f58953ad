"""Two matrix products with SwiGLU as their epilogue against float64, and as PyTorch's operator."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused import matmul_swiglu as module
from course_lib.kernels.fused.matmul_swiglu import (
    matmul_swiglu,
    matmul_swiglu_forward,
    matmul_swiglu_operator,
    matmul_swiglu_reference,
)
from tests.kernels.fused.cases import assert_as_exact_as_plain, check_one_graph, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def inputs(rows, width, hidden, dtype=torch.float32):
    """x, gate_weight, up_weight; products of about normal size."""
    weights = (normal(seed, hidden, width, dtype=dtype) / width**0.5 for seed in (2, 3))
    return normal(1, rows, width, dtype=dtype), *weights


def assert_right(*tensors):
    assert_as_exact_as_plain(matmul_swiglu_forward(*tensors), matmul_swiglu_reference, *tensors)


def test_the_meaning_is_pytorchs():
    x, gate_weight, up_weight = (tensor.double() for tensor in inputs(5, 7, 9))
    right = F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)
    torch.testing.assert_close(matmul_swiglu_reference(x, gate_weight, up_weight), right)


SIZES = [(1, 1, 1), (3, 33, 65), (129, 64, 31), (70, 100, 5), (600, 5, 70)]  # the last: a band is not full


@pytest.mark.parametrize("rows, width, hidden", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_any_size_is_right(rows, width, hidden, dtype):
    assert_right(*inputs(rows, width, hidden, dtype))


def test_strides_are_followed_and_leading_dimensions_stay():
    x, gate_weight, up_weight = inputs(6, 40, 10)
    assert_right(in_wider_rows(x), gate_weight, in_wider_rows(up_weight))
    assert_right(x, *torch.cat([gate_weight, up_weight]).chunk(2))
    assert_right(x, *torch.cat([gate_weight, up_weight], dim=1).chunk(2, dim=1))
    found = matmul_swiglu_forward(x.view(2, 3, 40), gate_weight, up_weight)
    assert torch.equal(found, matmul_swiglu_forward(x, gate_weight, up_weight).view(2, 3, 10))
    assert matmul_swiglu_forward(x[:0], gate_weight, up_weight).shape == (0, 10)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # exp of a large number, in the interpreter
def test_large_gates_are_right():
    x, gate_weight, up_weight = inputs(5, 8, 6)
    assert_right(x, 50 * gate_weight, up_weight)


def test_only_the_result_is_written():
    x, gate_weight, up_weight = inputs(100, 40, 50)
    report = metered(matmul_swiglu_forward, x, gate_weight, up_weight)
    assert len(report.launches) == 1 and report.stored_bytes == 100 * 50 * 4
    assert not report.out_of_bounds and report.contended_bytes == 0
    assert report["x_pointer"].loaded_bytes == 2 * x.nbytes  # once for each of two tiles of hidden


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": 3}, ["x is a int"]),
        ({"x": torch.zeros(2, 4).int()}, ["x has dtype torch.int32"]),
        ({"x": torch.zeros(4, 2).t()}, ["x has strides", "x.contiguous()"]),
        ({"gate_weight": torch.zeros(3, 5)}, ["gate_weight has shape (3, 5)", "[hidden, 4]"]),
        ({"up_weight": torch.zeros(2, 4)}, ["up_weight has shape (2, 4)", "(3, 4)"]),
        ({"up_weight": torch.zeros(3, 4).half()}, ["up_weight has dtype torch.float16", "torch.float32"]),
        ({"gate_weight": torch.zeros(4, 3).t()}, ["gate_weight has strides", "gate_weight.contiguous()"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"x": torch.zeros(2, 4), "gate_weight": torch.zeros(3, 4), "up_weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError) as refusal:
        matmul_swiglu_forward(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


# ----------------------------------------------------------------------------------------------------- as an operator


def leaves(rows=3):
    return [tensor.requires_grad_() for tensor in inputs(rows, 4, 5)]


# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    assert torch.autograd.gradcheck(matmul_swiglu, leaves(2), **GRADCHECK)

    def exchanged(gate, up, out_gradient):
        return out_gradient * F.silu(gate), out_gradient * up

    monkeypatch.setattr(module, "swiglu_backward_operator", exchanged)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(matmul_swiglu, leaves(2), **GRADCHECK)


def test_gradients_are_the_references():
    tensors = [tensor.view(2, 3, 4) if tensor.shape == (6, 4) else tensor for tensor in leaves(6)]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(matmul_swiglu(*tensors).sin().sum(), tensors)
    right = torch.autograd.grad(matmul_swiglu_reference(*wide).sin().sum(), wide)
    for ours, exact in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_passes(dtype):
    torch.library.opcheck(matmul_swiglu_operator, [tensor.detach().to(dtype).requires_grad_() for tensor in leaves()])


def test_a_compiled_function_has_one_graph_for_all_lengths_and_the_same_gradients():
    def function(x, gate_weight, up_weight):
        return 2 * matmul_swiglu(3 * x, gate_weight, up_weight)

    check_one_graph(function, leaves(), [[tensor.detach() for tensor in leaves(rows)] for rows in (2, 3, 7)])


def test_a_second_derivative_is_a_clear_error():
    x, *weights = leaves()
    (first,) = torch.autograd.grad(matmul_swiglu(x, *weights).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="SwiGLU has no derivative of its own.*_reference"):
        first.sum().backward()
