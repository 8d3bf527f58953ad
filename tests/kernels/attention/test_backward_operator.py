"""What PyTorch asks of an operator with a gradient, and of a function that autograd passes through."""

import math

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

from course_lib.hardware.device import interpreting
from course_lib.kernels.attention.autograd import with_gradient
from course_lib.kernels.attention.backward import flash_attention_backward
from course_lib.kernels.attention.dispatch import choose_backward
from course_lib.kernels.attention.flash import flash_attention
from course_lib.kernels.attention.operator import attention, attention_operator
from course_lib.kernels.attention.reference import attention_reference

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


def sinks(query_heads=2):
    return torch.linspace(-1, 2, query_heads).requires_grad_()


def inputs(query_heads=2, key_heads=1, query_length=5, key_length=7):
    generator = torch.Generator().manual_seed(0)
    shapes = [(query_heads, query_length), (key_heads, key_length), (key_heads, key_length)]
    return [torch.randn(1, *shape, 16, generator=generator).requires_grad_() for shape in shapes]


def learners():
    """A pair as a learner writes it, joined."""
    return with_gradient(
        lambda query, key, value, causal: flash_attention(query, key, value, causal=causal, return_lse=True),
        lambda *saved: flash_attention_backward(*saved[:-1], causal=saved[-1]),
    )


@pytest.mark.parametrize("function", [attention, learners()], ids=["the operator", "a joined pair"])
def test_backward_gives_the_gradients_of_the_reference(function):
    tensors = inputs()
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = torch.autograd.grad(function(*tensors, causal=True).square().sum(), tensors)
    exact = torch.autograd.grad(attention_reference(*wide, causal=True).square().sum(), wide)
    for ours, right in zip(found, exact):
        torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


def test_the_log_sum_exp_can_be_differentiated_alone_and_with_the_output():
    tensors = inputs()
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for loss in (lambda output, lse: lse.square().sum(), lambda output, lse: output.sum() + lse.sum()):
        found = torch.autograd.grad(loss(*attention(*tensors, return_lse=True)), tensors)
        exact = torch.autograd.grad(loss(*attention_reference(*wide, return_lse=True)), wide, materialize_grads=True)
        for ours, right in zip(found, exact):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "lengths, around, mask",
    [
        ((5, 7), 0.0, {}),
        ((5, 7), 0.0, {"causal": True, "window": 2}),
        ((7, 4), 0.0, {"causal": True}),
        ((7, 4), -1e4, {"causal": True}),
        ((7, 4), 1e4, {"causal": True, "window": 2}),
    ],
    ids=str,
)
def test_all_gradients_with_a_sink_are_those_of_the_reference(lengths, around, mask):
    """Through the output, and through the log-sum-exp as well; (7, 4), causal, has rows that see the sink alone."""
    tensors = [*inputs(4, 2, *lengths), sinks(4).detach().add(around).requires_grad_()]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    for loss in (lambda output, lse: output.square().sum(), lambda output, lse: (output.sum(3) * lse.sin()).sum()):
        found = torch.autograd.grad(loss(*attention(*tensors[:3], sink=tensors[3], return_lse=True, **mask)), tensors)
        result = attention_reference(*wide[:3], sink=wide[3], return_lse=True, **mask)
        exact = torch.autograd.grad(loss(*result), wide, materialize_grads=True)
        for ours, right in zip(found, exact):
            torch.testing.assert_close(ours.double(), right, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_sink_alone_is_found():
    query, key, value = (tensor.detach() for tensor in inputs())
    sink = sinks()
    wide = sink.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(attention(query, key, value, sink=sink).sum(), sink)
    result = attention_reference(query.double(), key.double(), value.double(), sink=wide)
    torch.testing.assert_close(found.double(), torch.autograd.grad(result.sum(), wide)[0], rtol=1e-4, atol=1e-5)


def test_a_sink_that_is_none_to_a_row_without_keys_has_no_gradient_there():
    """exp(sink - LSE) would be exp(-inf + inf), which is NaN."""
    sink = torch.full((2,), -math.inf).requires_grad_()
    output = attention(*inputs(query_length=7, key_length=4), causal=True, sink=sink)
    assert torch.equal(torch.autograd.grad(output.sum(), sink)[0], torch.zeros(2))


# In float32, as the kernels take no float64: wide steps, and a tolerance that they need. The fast mode compares
# projections of length 1, in which a slip of 4 in one gradient is smaller than it is in an element: at 1e-3 the tests
# found nothing.
GRADCHECK = {"eps": 1e-2, "atol": 1e-4, "rtol": 1e-2, "fast_mode": True}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes():
    function = lambda *tensors: attention(*tensors, causal=True, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs(query_length=2, key_length=3), **GRADCHECK)


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_at_that_tolerance_finds_a_slip():
    def without_scale(*saved):
        query_gradient, *others = flash_attention_backward(*saved[:-1], causal=saved[-1])
        return 4 * query_gradient, *others

    forward = lambda *tensors: flash_attention(*tensors[:3], causal=tensors[3], return_lse=True)  # noqa: E731
    query, key, value = inputs(query_heads=1, query_length=2, key_length=3)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(
            with_gradient(forward, without_scale), (query, key.detach(), value.detach()), **GRADCHECK
        )


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_with_a_sink():
    function = lambda *tensors: attention(*tensors[:3], causal=True, sink=tensors[3], return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(function, (*inputs(query_length=2, key_length=3), sinks()), **GRADCHECK)


def test_opcheck_passes():
    torch.library.opcheck(attention_operator, (*inputs(), True, None, None))
    torch.library.opcheck(attention_operator, (*inputs(), True, None, None, sinks()))


def test_a_compiled_function_has_one_graph_and_the_same_gradients():
    """On the CPU without a code generator: what is tested is that the graph holds and the fakes are true."""

    def function(query, key, value, sink):
        return 2 * attention(query, key, value, causal=True, sink=sink)

    tensors = [*inputs(), sinks()]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*tensors).square().sum(), tensors)
    for ours, right in zip(found, torch.autograd.grad(function(*tensors).square().sum(), tensors)):
        torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("function", [attention, learners()], ids=["the operator", "a joined pair"])
def test_a_second_derivative_is_a_clear_error(function):
    tensors = inputs()
    with pytest.raises(RuntimeError, match="no derivative of its own.*attention_reference"):
        loss = function(*tensors, causal=True).square().sum()
        (first,) = torch.autograd.grad(loss, tensors[0], create_graph=True)
        first.sum().backward()


def test_without_a_gradient_nothing_is_kept():
    tensors = inputs()
    with torch.no_grad():
        assert attention(*tensors).grad_fn is None
    assert attention(*(tensor.detach() for tensor in tensors)).grad_fn is None
    assert attention(*tensors).grad_fn is not None
    assert attention(*(tensor.detach() for tensor in tensors), sink=sinks()).grad_fn is not None


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": True}], ids=str)
def test_which_kernels_compute_the_gradient_is_said(options):
    choice = choose_backward(*inputs(), **options)
    assert choice.kernel == "portable" and "interpreter" in choice.reason


def test_bad_input_with_a_gradient_gets_the_same_answer():
    query, key, value = inputs()
    with pytest.raises(ValueError, match="value has shape"):
        attention(query, key, value[:, :, :3])
    with pytest.raises(ValueError, match="window is -1"):
        attention(query, key, value, window=-1)
