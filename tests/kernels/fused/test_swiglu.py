"""SwiGLU's product and its gradients against float64, and as PyTorch's operator."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused import swiglu_operators
from course_lib.kernels.fused.swiglu import (
    swiglu_backward,
    swiglu_backward_reference,
    swiglu_forward,
    swiglu_reference,
)
from course_lib.kernels.fused.swiglu_operators import swiglu, swiglu_backward_operator, swiglu_operator
from tests.kernels.fused.cases import SIZES, assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others"),
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),  # exp of a large number, in the interpreter
]
DTYPES = [torch.float32, torch.float16]


def assert_right(gate, up, gradient):
    assert_as_exact_as_plain(swiglu_forward(gate, up), swiglu_reference, gate, up)
    assert_as_exact_as_plain(swiglu_backward(gate, up, gradient), swiglu_backward_reference, gate, up, gradient)


def inputs(*shape, dtype=torch.float32, scale=1.0):
    return [normal(seed, *shape, dtype=dtype, scale=scale) for seed in (1, 2, 3)]


def test_the_meaning_is_what_autograd_finds():
    gate, up, gradient = (tensor.double() for tensor in inputs(3, 7, scale=3.0))
    leaves = gate.requires_grad_(), up.requires_grad_()
    assert torch.equal(swiglu_reference(gate, up), F.silu(gate) * up)
    right = torch.autograd.grad(F.silu(gate) * up, leaves, gradient)
    for ours, exact in zip(swiglu_backward_reference(gate, up, gradient), right):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("hidden", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size_is_right(hidden, dtype):
    assert_right(*inputs(3, hidden, dtype=dtype))


@pytest.mark.parametrize("hidden", SIZES)
def test_halves_of_one_product_are_right_and_so_is_each_with_strides_of_its_own(hidden):
    packed = normal(1, 2, 5, 2 * hidden)
    gate, up = packed.chunk(2, dim=-1)
    gradient = normal(2, 2, 5, hidden)
    assert_right(gate, up, gradient)
    assert_right(in_wider_rows(gate), up, gradient)
    assert_right(gate.contiguous(), up, gradient)
    assert_right(gate, in_wider_rows(up.contiguous()), in_wider_rows(gradient))
    assert_right(gate, up, torch.ones(()).expand(2, 5, hidden))
    assert_right(gate[:1, :1].expand(1, 3, hidden), up[1:, :3], gradient.transpose(0, 1)[:3, :1].transpose(0, 1))


@pytest.mark.parametrize("dtype, scale", [(torch.float32, 1e3), (torch.float32, 1e15), (torch.float16, 200.0)])
def test_large_gates_are_right(dtype, scale):
    """exp(1000) overflows; silu of it does not."""
    gate, up, gradient = inputs(2, 500, dtype=dtype)
    assert_right(gate * scale, up, gradient)
    far = torch.tensor([[-1e4, 1e4, -104.0, -88.5, 0.0, -0.0]], dtype=dtype)
    assert_right(far, torch.ones_like(far), torch.ones_like(far))


def test_a_nan_stays_where_it_is():
    gate, up, gradient = inputs(2, 300)
    gate[1, 7] = torch.nan
    for result in (swiglu_forward(gate, up), *swiglu_backward(gate, up, gradient)):
        assert result.isnan().sum() == 1 and result[1, 7].isnan()


def test_nothing_gives_nothing():
    empty = torch.zeros(0, 4)
    assert swiglu_forward(empty, empty).shape == swiglu_backward(empty, empty, empty)[1].shape == (0, 4)


@pytest.mark.parametrize("hidden", [127, 4097])
def test_each_element_moves_once(hidden):
    gate, up, gradient = inputs(3, hidden)
    forward, backward = metered(swiglu_forward, gate, up), metered(swiglu_backward, gate, up, gradient)
    assert forward.total_bytes == 3 * gate.nbytes and backward.total_bytes == 5 * gate.nbytes
    apart = metered(swiglu_backward, in_wider_rows(gate), up, gradient)
    assert apart.total_bytes == 5 * gate.nbytes
    for report in (forward, backward, apart):
        assert not report.out_of_bounds and report.contended_bytes == 0


@pytest.mark.parametrize(
    "change, words",
    [
        ({"gate": 3}, ["gate is a int"]),
        ({"gate": torch.zeros(2, 4).int()}, ["gate has dtype torch.int32"]),
        ({"up": torch.zeros(2, 5)}, ["up has shape (2, 5)", "(2, 4)"]),
        ({"up": torch.zeros(2, 4).half()}, ["up has dtype torch.float16"]),
        ({"gate": torch.zeros(4, 2).t()}, ["gate has strides", "gate.contiguous()"]),
        ({"up": torch.zeros(2, 8)[:, ::2]}, ["up has strides", "up.contiguous()"]),
        ({"out_gradient": torch.zeros(4, 2)}, ["out_gradient has shape (4, 2)"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"gate": torch.zeros(2, 4), "up": torch.zeros(2, 4), "out_gradient": torch.zeros(2, 4)}
    with pytest.raises(ValueError) as refusal:
        swiglu_backward(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def leaves():
    return [tensor.requires_grad_() for tensor in inputs(3, 5)[:2]]


# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    assert torch.autograd.gradcheck(swiglu, leaves(), **GRADCHECK)

    def without_its_slope(gate, up, gradient):
        return gradient * up * torch.sigmoid(gate), gradient * F.silu(gate)

    monkeypatch.setattr(swiglu_operators, "swiglu_backward_operator", without_its_slope)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(swiglu, leaves(), **GRADCHECK)


def test_opcheck_passes():
    packed = normal(1, 3, 10).requires_grad_()
    torch.library.opcheck(swiglu_operator, leaves())
    torch.library.opcheck(swiglu_operator, packed.chunk(2, dim=-1))
    torch.library.opcheck(swiglu_backward_operator, inputs(3, 5))


def test_a_compiled_function_has_one_graph_and_the_same_gradients():
    """On the CPU without a code generator: what is tested is that the graph holds and the fakes are true."""

    def function(packed):
        return 2 * swiglu(*(3 * packed).chunk(2, dim=-1))

    packed = normal(1, 3, 10).requires_grad_()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(packed).square().sum(), packed)
    (right,) = torch.autograd.grad(function(packed).square().sum(), packed)
    torch.testing.assert_close(found, right)


def test_a_second_derivative_is_a_clear_error():
    gate, up = leaves()
    (first,) = torch.autograd.grad(swiglu(gate, up).square().sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="SwiGLU has no derivative of its own.*_reference"):
        first.sum().backward()
