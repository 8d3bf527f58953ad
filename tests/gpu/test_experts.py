"""A mixture of experts on a GPU against float64, at sizes and in dtypes that the interpreter does not have."""

import pytest
import torch

from course_lib.hardware.device import interpreting
from course_lib.hardware.graphs import captured
from course_lib.kernels.experts.arrange import arrange, arrange_reference
from course_lib.kernels.experts.mlp import expert_mlp, expert_mlp_reference
from tests.kernels.experts.cases import ragged
from tests.kernels.rounding import largest_error

pytestmark = pytest.mark.skipif(interpreting(), reason="needs a GPU: tests/kernels/experts has the interpreter's part")


def inputs(tokens, count, k, width, hidden, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (tokens, width), (count, 2 * hidden, width), (count, width, hidden)
    x, gate_up, down = (torch.randn(*shape, generator=generator, device="cuda") for shape in shapes)
    made = [x.to(dtype), (gate_up * width**-0.5).to(dtype), (down * hidden**-0.5).to(dtype)]
    weights = torch.rand(tokens, k, generator=generator, device="cuda").softmax(dim=-1)
    return [tensor.requires_grad_() for tensor in (*made, weights)]


def output_and_gradients(function, x, gate_up, down, weights, experts, gradient):
    output = function(x, gate_up, down, experts, weights)
    gradients = torch.autograd.grad(output, (x, gate_up, down, weights), gradient.to(output.dtype))
    return output.detach(), *gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 100, 1500])
@pytest.mark.parametrize("width, hidden", [(256, 192), (200, 72)])
def test_output_and_gradients_are_those_of_the_meaning(tokens, width, hidden, dtype):
    """With the tiles for few rows, some and many; an expert with all tokens, one with none, choices of nobody.

    A weight's gradient is a sum over an expert's tokens, and ours adds them one after another in float32. Each addition
    rounds a partial sum by half a unit of its last place, and so many independent roundings add up to √tokens of them.
    cuBLAS shares the sum among several programs, which rounds less: it is no measure for that.
    """
    tensors, experts = inputs(tokens, 9, 3, width, hidden, dtype), ragged(tokens, 3, 9).cuda()
    gradient = torch.randn(tokens, width, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    found = output_and_gradients(expert_mlp, *tensors, experts, gradient)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exact = output_and_gradients(expert_mlp_reference, *wide, experts, gradient)
    plain = output_and_gradients(expert_mlp_reference, *tensors, experts, gradient)
    for ours, right, theirs in zip(found, exact, plain):
        in_turn = tokens**0.5 * torch.finfo(torch.float32).eps
        rounding = (4 * torch.finfo(dtype).eps + in_turn) * right.abs().max().item()
        assert (ours.double() - right).abs().max() <= 2 * largest_error([theirs], right) + rounding
    again = output_and_gradients(expert_mlp, *tensors, experts, gradient)
    assert all(torch.equal(one, other) for one, other in zip(found, again))


@pytest.mark.parametrize("tokens", [8, 3000])
def test_a_captured_block_follows_other_choices(tokens):
    x, gate_up, down, weights = (it.detach() for it in inputs(tokens, 9, 3, 256, 192, torch.float16))
    experts = ragged(tokens, 3, 9).cuda()
    replay = captured(lambda: expert_mlp(x, gate_up, down, experts, weights))
    for shift in (1, 2):
        experts.copy_(torch.where(experts < 0, experts, (experts + shift) % 9))
        assert torch.equal(replay(), expert_mlp(x, gate_up, down, experts, weights))


@pytest.mark.parametrize("tokens, count, block", [(1, 128, 16), (64, 128, 16), (5000, 128, 128)])
def test_an_arrangement_is_the_plain_one(tokens, count, block):
    experts = ragged(tokens, 8, count).cuda()
    found, (slots, tile_experts) = arrange(experts, count, block), arrange_reference(experts, count, block)
    assert torch.equal(found.slots[: len(slots)].cpu(), slots) and (found.slots[len(slots) :] == experts.numel()).all()
    assert torch.equal(found.tile_experts[: len(tile_experts)].cpu(), tile_experts)
