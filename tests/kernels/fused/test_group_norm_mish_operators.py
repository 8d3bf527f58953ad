"""GroupNorm + Mish as PyTorch's operator: what `opcheck`, `gradcheck`, autograd and `torch.compile` ask of it."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.kernels.fused import group_norm_mish_operators
from course_lib.kernels.fused.group_norm_mish import group_norm_mish_forward, group_norm_mish_reference
from course_lib.kernels.fused.group_norm_mish_backward import group_norm_mish_backward_reference
from course_lib.kernels.fused.group_norm_mish_operators import (
    group_norm_mish,
    group_norm_mish_backward_operator,
    group_norm_mish_operator,
)
from tests.kernels.fused.cases import check_one_graph, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 2e-3, "rtol": 1e-2}


def leaves(batch=2, channels=4, length=3):
    shapes = (batch, channels, length), (channels,), (channels,), (batch, channels), (batch, channels)
    return [normal(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes, start=1)]


def film(x, weight, bias, scale=None, shift=None):
    return group_norm_mish(x, 2, weight, bias, scale, shift, 0.1)


@pytest.mark.parametrize("count", [5, 3], ids=["with scale and shift", "without"])
def test_gradients_are_the_references(count):
    tensors = leaves()[:count]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(film(*tensors).sin().sum(), tensors)
    x, *others = wide
    right = torch.autograd.grad(group_norm_mish_reference(x, 2, *others, epsilon=0.1).sin().sum(), wide)
    for ours, exact in zip(found, right, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    assert torch.autograd.gradcheck(film, leaves(), **GRADCHECK)
    assert torch.autograd.gradcheck(film, leaves()[:3], **GRADCHECK)

    def without_its_projection(x, statistics, groups, weight, bias, scale, shift, out_gradient):
        right = group_norm_mish_backward_reference(x, groups, weight, bias, scale, shift, out_gradient, 0.1)
        affine = F.group_norm(x, groups, weight, bias, 0.1).detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(F.mish(affine).sum(), affine)
        inverse = statistics[..., 1].repeat_interleave(x.shape[1] // groups, dim=1)
        return out_gradient * slope * (scale * inverse * weight)[:, :, None], *right[1:]

    monkeypatch.setattr(group_norm_mish_operators, "group_norm_mish_backward_operator", without_its_projection)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(film, leaves(), **GRADCHECK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_opcheck_passes(dtype):
    x, *others = [tensor.detach().to(dtype).requires_grad_() for tensor in leaves()]
    torch.library.opcheck(group_norm_mish_operator, (x, 2, *others, 1e-5))
    torch.library.opcheck(group_norm_mish_operator, (x, 2, *others[:2], None, None, 1e-5))
    x, *others = [tensor.detach() for tensor in (x, *others)]
    _, statistics = group_norm_mish_forward(x, 2, *others)
    torch.library.opcheck(group_norm_mish_backward_operator, (x, statistics, 2, *others, x + 1))
    torch.library.opcheck(group_norm_mish_backward_operator, (x, statistics, 2, *others[:2], None, None, x + 1))


def test_a_compiled_function_has_one_graph_for_all_lengths_and_the_same_gradients():
    def function(x, *others):
        return 2 * film(3 * x, *others)

    calls = [[tensor.detach() for tensor in leaves(length=length)] for length in (2, 3, 7)]
    check_one_graph(function, leaves(), calls)
    check_one_graph(function, leaves()[:3], [call[:3] for call in calls])


def test_a_second_derivative_is_a_clear_error():
    tensors = leaves()
    (first,) = torch.autograd.grad(film(*tensors).square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="GroupNorm . Mish has no derivative of its own.*_reference"):
        first.sum().backward()


def test_bad_input_with_a_gradient_gets_the_same_answer():
    x, *others = leaves()
    with pytest.raises(ValueError, match="groups is 3 for 4 channels"):
        group_norm_mish(x, 3, *others)
