"""RMSNorm as PyTorch's operators: what `opcheck`, `gradcheck`, autograd and `torch.compile` ask of them."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.kernels.fused import norm_operators
from course_lib.kernels.fused.add_rms_norm import add_rms_norm_reference
from course_lib.kernels.fused.norm_operators import (
    add_rms_norm,
    add_rms_norm_operator,
    rms_norm,
    rms_norm_backward_operator,
    rms_norm_operator,
)
from tests.kernels.fused.cases import check_one_graph, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


def leaves(rows=3, hidden=5, requires_grad=True):
    shapes = (rows, hidden), (rows, hidden), (hidden,)
    return [normal(seed, *shape).requires_grad_(requires_grad) for seed, shape in enumerate(shapes, start=1)]


def assert_close(found, exact):
    for ours, right in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "loss",
    [
        lambda normalised, summed: normalised.square().sum() + summed.sin().sum(),
        lambda normalised, summed: normalised.square().sum(),
        lambda normalised, summed: summed.sin().sum(),
        lambda normalised, summed: normalised.sum() + summed.sum(),
    ],
    ids=["both", "the norm", "the sum", "gradients of stride 0"],
)
def test_gradients_are_the_references_whichever_result_is_used(loss):
    tensors = leaves()
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    options = {"allow_unused": True, "materialize_grads": True}
    found = torch.autograd.grad(loss(*add_rms_norm(*tensors, 1e-3)), tensors, **options)
    assert_close(found, torch.autograd.grad(loss(*add_rms_norm_reference(*wide, 1e-3)), wide, **options))


def test_the_norm_alone_has_pytorchs_gradients():
    x, _, weight = leaves()
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    found = torch.autograd.grad(rms_norm(x, weight, 1e-3).sin().sum(), (x, weight))
    assert_close(found, torch.autograd.grad(F.rms_norm(wide[0], (5,), wide[1], 1e-3).sin().sum(), wide))


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes():
    assert torch.autograd.gradcheck(lambda *tensors: add_rms_norm(*tensors, 0.1), leaves(), **GRADCHECK)


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_at_that_tolerance_finds_a_slip(monkeypatch):
    """The gradient of a norm without its projection: right in the weight, wrong along x."""

    def without_projection(summed, weight, normalised_gradient, summed_gradient, epsilon):
        inverse = torch.rsqrt(summed.square().mean(-1, keepdim=True) + epsilon)
        return inverse * normalised_gradient * weight, (summed * inverse * normalised_gradient).sum(0)

    monkeypatch.setattr(norm_operators, "rms_norm_backward_operator", without_projection)
    x, _, weight = leaves()
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(lambda *tensors: rms_norm(*tensors, 0.1), (x, weight), **GRADCHECK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_passes(dtype):
    x, residual, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in leaves())
    torch.library.opcheck(add_rms_norm_operator, (x, residual, weight, 1e-6))
    torch.library.opcheck(rms_norm_operator, (x, weight, 1e-6))
    saved = x.detach(), weight.detach(), residual.detach()
    torch.library.opcheck(rms_norm_backward_operator, (*saved, None, 1e-6))
    torch.library.opcheck(rms_norm_backward_operator, (*saved, residual.detach() + 1, 1e-6))


def test_a_compiled_function_has_one_graph_for_all_lengths_and_the_same_gradients():
    def function(x, residual, weight):
        normalised, summed = add_rms_norm(x * 2, residual, weight, 1e-6)
        return normalised + summed

    check_one_graph(function, leaves(), [leaves(rows, requires_grad=False) for rows in (2, 3, 7)])


def test_a_second_derivative_is_a_clear_error():
    x, residual, weight = leaves()
    (first,) = torch.autograd.grad(rms_norm(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="RMSNorm has no derivative of its own.*_reference"):
        first.sum().backward()


def test_without_a_gradient_nothing_is_kept():
    x, residual, weight = leaves()
    with torch.no_grad():
        assert add_rms_norm(x, residual, weight)[0].grad_fn is None
    assert add_rms_norm(x, residual, weight)[0].grad_fn is not None


def test_bad_input_with_a_gradient_gets_the_same_answer():
    x, residual, weight = leaves()
    with pytest.raises(ValueError, match="residual has shape"):
        add_rms_norm(x, residual[:2], weight)
    with pytest.raises(ValueError, match="epsilon is -1.0"):
        rms_norm(x, weight, -1.0)
