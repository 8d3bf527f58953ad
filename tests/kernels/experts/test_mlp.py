"""The experts' block against its meaning in float64, its gradients too, and what PyTorch asks of an operator."""

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.kernels.experts.mlp import expert_mlp, expert_mlp_operator, expert_mlp_reference
from course_lib.kernels.experts.route import route
from tests.kernels.experts.cases import ragged
from tests.kernels.fused.cases import check_one_graph, in_wider_rows, normal
from tests.kernels.rounding import largest_error, rounded_otherwise

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


@pytest.fixture(autouse=True)
def memory_that_nobody_wrote_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(tokens=21, width=20, hidden=17, count=5, k=3, dtype=torch.float32):
    """(x, gate_up, down, weights) that require gradients."""
    shapes = (tokens, width), (count, 2 * hidden, width), (count, width, hidden), (tokens, k)
    scales = 1.0, width**-0.5, hidden**-0.5, 1.0
    made = [normal(seed, *shape, scale=scale) for seed, (shape, scale) in enumerate(zip(shapes, scales))]
    return [tensor.to(dtype).requires_grad_() for tensor in made[:3]] + [made[3].requires_grad_()]


@torch.enable_grad()
def output_and_gradients(function, x, gate_up, down, weights, experts):
    output = function(x, gate_up, down, experts, weights)
    slopes = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return output.detach(), *torch.autograd.grad((output * slopes).sum(), (x, gate_up, down, weights))


def assert_right(tensors, experts):
    """Within twice the error of plain PyTorch in the same dtype, plus its rounding."""
    found = output_and_gradients(expert_mlp, *tensors, experts)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = output_and_gradients(expert_mlp_reference, *wide, experts)
    plain = rounded_otherwise(output_and_gradients, expert_mlp_reference, *tensors, experts)
    for name, ours, right, theirs in zip(("out", "x", "gate_up", "down", "weights"), found, exact, zip(*plain)):
        rounding = 2 * torch.finfo(tensors[0].dtype).eps * right.abs().max().item()
        error = (ours.double() - right).abs().max().item()
        assert error <= 2 * largest_error(theirs, right) + rounding, f"{name} is off by {error:.2e}"
        assert ours.dtype == theirs[0].dtype
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("tokens, count, k", [(21, 5, 3), (1, 5, 2), (70, 3, 1)])
def test_ragged_experts_one_without_tokens_and_choices_of_nobody(dtype, tokens, count, k):
    experts = ragged(tokens, k, count)
    _, _, gate_up, down, weights = assert_right(inputs(tokens, count=count, k=k, dtype=dtype), experts)
    assert not gate_up[-1].any() and not down[-1].any() and not weights[experts < 0].any()


def test_all_experts_of_each_token():
    assert_right(inputs(count=3, k=3), torch.arange(3).expand(21, 3))


def test_with_equal_weights_for_one_expert_it_is_a_dense_block():
    x, gate_up, down, _ = (tensor.detach().double() for tensor in inputs(count=1, k=1))
    gate, up = F.linear(x, gate_up[0]).chunk(2, dim=-1)
    found = expert_mlp_reference(x, gate_up, down, torch.zeros(21, 1).long(), torch.ones(21, 1))
    torch.testing.assert_close(found, F.linear(F.silu(gate) * up, down[0]))


def test_rows_may_lie_apart_and_a_nan_in_an_expert_without_tokens_reaches_nothing():
    tensors, experts = inputs(), ragged(21, 3, 5)
    exact = output_and_gradients(expert_mlp, *tensors, experts)
    with torch.no_grad():
        tensors[1][-1] = tensors[2][-1] = torch.nan
        apart = [in_wider_rows(tensor).requires_grad_() for tensor in tensors[:3]]
    found = output_and_gradients(expert_mlp, *apart, tensors[3], experts)
    assert all(torch.equal(one, other) for one, other in zip(found, exact))


def test_the_meaning_has_the_gradients_that_differences_have():
    *tensors, weights = (tensor.detach().double().requires_grad_() for tensor in inputs(5, 4, 3, 4, 2))
    experts = ragged(5, 2, 4)
    function = lambda *tensors: expert_mlp_reference(*tensors[:3], experts, tensors[3])  # noqa: E731
    assert torch.autograd.gradcheck(function, (*tensors, weights))


def test_the_router_learns_through_it():
    x, gate_up, down, _ = inputs()
    logits = normal(7, 21, 5).requires_grad_()
    gradients = [torch.autograd.grad(mlp(x, gate_up, down, *route(logits, 2, "renormalised")).square().sum(), logits)[0]
                 for mlp in (expert_mlp, expert_mlp_reference)]  # fmt: skip
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert gradients[0].abs().max() > 0.01


def test_no_tokens_have_no_result_and_no_gradients():
    output, x, gate_up, *_ = output_and_gradients(expert_mlp, *inputs(0), torch.zeros(0, 3).long())
    assert output.shape == x.shape == (0, 20) and not gate_up.any()


def test_opcheck_passes_and_a_compiled_function_has_one_graph():
    x, gate_up, down, weights = inputs()
    experts = ragged(21, 3, 5)
    done = torch.library.opcheck(expert_mlp_operator, (x, gate_up, down, experts, weights))
    assert set(done.values()) == {"SUCCESS"}

    def function(x, gate_up, down, weights):
        return expert_mlp(2 * x, gate_up, down, (weights > 0).long(), weights)

    calls = [[it.detach() for it in inputs(tokens)] for tokens in (3, 9)]
    check_one_graph(function, [x, gate_up, down, weights], calls)


def test_a_second_derivative_is_refused():
    tensors = inputs(3)
    output = expert_mlp(*tensors[:3], ragged(3, 3, 5), tensors[3])
    (first,) = torch.autograd.grad(output.sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="experts' block has no derivative of its own here"):
        first.sum().backward()


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.zeros(3, 4).half()}, ["gate_up has dtype torch.float32", "torch.float16"]),
        ({"gate_up": torch.zeros(2, 6, 5)}, ["gate_up has shape (2, 6, 5)", "2 * hidden, 4"]),
        ({"gate_up": torch.zeros(2, 5, 4)}, ["gate_up has shape (2, 5, 4)", "as many of up"]),
        ({"down": torch.zeros(2, 3, 4)}, ["down has shape (2, 3, 4)", "(2, 4, 3)"]),
        ({"down": torch.zeros(2, 3, 4).mT}, ["down has strides", "down.contiguous()"]),
        ({"experts": torch.zeros(2, 2).long()}, ["experts has 2 rows", "x's 3"]),
        ({"experts": torch.zeros(3).long()}, ["experts has shape (3,)", "[tokens, k]"]),
        ({"weights": torch.zeros(3, 1)}, ["weights has shape (3, 1)", "(3, 2)"]),
        ({"experts": torch.zeros(3, 2)}, ["experts has dtype torch.float32"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"x": torch.zeros(3, 4), "gate_up": torch.zeros(2, 6, 4), "down": torch.zeros(2, 4, 3)}
    good |= {"experts": torch.zeros(3, 2).long(), "weights": torch.zeros(3, 2)}
    with pytest.raises(ValueError) as refusal:
        expert_mlp(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
