"""Cross-entropy as PyTorch's operators: reductions, `opcheck`, `gradcheck`, `torch.compile`, and the one in place."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.kernels.fused import cross_entropy_operators
from course_lib.kernels.fused.cross_entropy_operators import (
    cross_entropy,
    cross_entropy_,
    cross_entropy_backward_operator,
    cross_entropy_in_place_operator,
    cross_entropy_operator,
)
from tests.kernels.fused.cases import normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
TARGETS = torch.tensor([3, -100, 0, 6])
REDUCTIONS = ["mean", "sum", "none"]


def with_gradient(function, logits, *arguments):
    """The loss, and the gradient of its sum."""
    logits = logits.detach().clone().requires_grad_()
    loss = function(logits, *arguments)
    return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("targets", [TARGETS, torch.full((4,), -100)], ids=["some", "all ignored"])
def test_every_reduction_is_pytorchs(reduction, targets):
    logits = normal(1, 4, 7, scale=3.0)
    right = with_gradient(lambda x: F.cross_entropy(x, targets, reduction=reduction), logits)
    found = with_gradient(lambda x: cross_entropy(x, targets, reduction=reduction), logits)
    torch.testing.assert_close(found, right, equal_nan=True)
    loss = cross_entropy_(logits, targets, reduction=reduction)
    torch.testing.assert_close((loss, logits), right, equal_nan=True)


def test_the_gradient_in_place_goes_on_through_the_layer_before():
    hidden, weight, targets = normal(1, 4, 5), normal(2, 7, 5).requires_grad_(), TARGETS
    (right,) = torch.autograd.grad(F.cross_entropy(hidden @ weight.t(), targets), weight)
    logits = hidden @ weight.t()
    cross_entropy_(logits.detach(), targets)
    logits.backward(logits.detach())
    torch.testing.assert_close(weight.grad, right)


def test_logits_that_autograd_follows_are_not_overwritten():
    logits = normal(1, 4, 7).requires_grad_()
    with pytest.raises(ValueError, match="logits.detach"):
        cross_entropy_(logits, TARGETS)
    with torch.no_grad():
        cross_entropy_(logits, TARGETS)


# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    function = lambda logits: cross_entropy(logits, TARGETS, reduction="none")  # noqa: E731
    assert torch.autograd.gradcheck(function, normal(1, 4, 7).requires_grad_(), **GRADCHECK)

    def without_the_target(logits, targets, statistics, loss_gradient, ignore_index):
        return torch.softmax(logits, -1) * loss_gradient[:, None]

    monkeypatch.setattr(cross_entropy_operators, "cross_entropy_backward_operator", without_the_target)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(function, normal(1, 4, 7).requires_grad_(), **GRADCHECK)


def test_opcheck_passes():
    logits, scale = normal(1, 4, 7), torch.tensor(0.25).expand(4)
    losses, statistics = cross_entropy_operator(logits, TARGETS, -100, True)
    torch.library.opcheck(cross_entropy_operator, (logits.clone().requires_grad_(), TARGETS, -100, True))
    torch.library.opcheck(cross_entropy_backward_operator, (logits, TARGETS, statistics, losses, -100))
    torch.library.opcheck(cross_entropy_in_place_operator, (logits.clone(), TARGETS, scale, -100, True))


def test_a_compiled_function_has_one_graph_and_the_same_results():
    """On the CPU without a code generator: what is tested is that the graph holds and the fakes are true."""
    logits = normal(1, 4, 7)
    function = lambda x: cross_entropy(2 * x, TARGETS)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(with_gradient(compiled, logits), with_gradient(function, logits))

    def in_place(x):
        product = 2 * x
        return cross_entropy_(product, TARGETS), product

    compiled = torch.compile(in_place, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits), in_place(logits))


def test_bad_input_and_a_second_derivative_are_clear_errors():
    logits = normal(1, 4, 7).requires_grad_()
    with pytest.raises(ValueError, match="reduction is 'average'; allowed are 'mean', 'sum', 'none'"):
        cross_entropy(logits, TARGETS, reduction="average")
    with pytest.raises(ValueError, match=r"targets\[3\] is 6; allowed are 0 to 4"):
        cross_entropy(logits[:, :5].contiguous(), TARGETS)
    (first,) = torch.autograd.grad(cross_entropy(logits, TARGETS), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="cross-entropy has no derivative of its own.*_reference"):
        first.sum().backward()
