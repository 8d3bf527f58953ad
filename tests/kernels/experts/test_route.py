"""Routers against plain formulas in float64, ties and extremes among them; the bias that evens out the load."""

import pytest
import torch

from course_lib.kernels.experts.route import ROUTERS, balanced, route

GENERATOR = torch.Generator()


def logits_of(tokens=33, experts=16, seed=0, dtype=torch.float32):
    return torch.randn(tokens, experts, generator=GENERATOR.manual_seed(seed)).to(dtype)


def by_hand(logits, k, kind, bias=None, scale=1.0):
    """One token at a time, with Python's sort, which keeps the order of equals."""
    experts, weights = [], []
    for row in logits.double():
        scores = torch.softmax(row, 0) if kind != "sigmoid" else torch.sigmoid(row)
        choosing = scores if bias is None else scores + bias.double()
        chosen = sorted(range(len(row)), key=lambda expert: -choosing[expert].item())[:k]
        kept = scores[chosen]
        weights.append(kept if kind == "softmax" else kept / kept.sum() * scale)
        experts.append(torch.tensor(chosen))
    return torch.stack(experts), torch.stack(weights)


@pytest.mark.parametrize("kind", ROUTERS)
@pytest.mark.parametrize("k", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_each_kind_is_its_formula(kind, k, dtype):
    logits = logits_of(dtype=dtype)
    options = {"bias": torch.linspace(-2, 0.2, 16), "scale": 2.5} if kind == "sigmoid" else {}
    experts, weights = route(logits, k, kind, **options)
    exact_experts, exact = by_hand(logits, k, kind, **options)
    assert torch.equal(experts, exact_experts) and weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ROUTERS)
def test_of_equals_the_smaller_expert_comes_first(kind):
    assert route(torch.zeros(2, 64), 5, kind)[0].tolist() == [[0, 1, 2, 3, 4]] * 2


def test_scores_too_small_for_a_number_still_differ():
    logits = torch.tensor([[-1e4, 0.0, -2e3, -1e3]])
    assert route(logits, 4, "softmax")[0].tolist() == [[1, 3, 2, 0]]
    experts, weights = route(torch.tensor([[-1e4, -1e4, -1e4 + 1]]), 3, "sigmoid")
    assert experts.tolist() == [[2, 0, 1]]
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[1.0, 0.0, 0.0]]), -1))


def test_the_bias_chooses_and_does_not_weigh():
    logits, bias = torch.tensor([[2.0, 1.0, -1.0]]), torch.tensor([-3.0, -3.0, 0.0])
    experts, weights = route(logits, 2, "sigmoid", bias)
    assert experts.tolist() == [[2, 0]]
    scores = torch.sigmoid(logits[0, [2, 0]])
    torch.testing.assert_close(weights[0], scores / scores.sum())


@pytest.mark.parametrize("kind", ROUTERS)
def test_gradients_are_right_and_one_expert_alone_has_none_once_renormalised(kind):
    logits = logits_of(4, 5).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda logits: route(logits, 3, kind)[1], logits)
    (gradient,) = torch.autograd.grad(route(logits, 1, kind)[1].sum(), logits)
    assert gradient.abs().max() < 1e-12 if kind != "softmax" else gradient.abs().max() > 0.01


def test_no_tokens_have_no_experts():
    experts, weights = route(torch.zeros(0, 4), 2, "softmax")
    assert experts.shape == weights.shape == (0, 2)


def test_the_bias_evens_out_the_load_and_keeps_its_mean():
    logits = logits_of(2000, 8) + torch.linspace(2, -2, 8)
    bias, spreads = torch.zeros(8), []
    for _ in range(300):
        load = torch.bincount(route(logits, 2, "sigmoid", bias)[0].flatten(), minlength=8)
        spreads.append(load.double().std().item())
        bias = balanced(bias, load, 0.01)
    assert spreads[-1] < 0.05 * spreads[0] and bias.mean().abs() < 1e-6


def test_an_expert_with_the_mean_load_keeps_its_bias():
    torch.testing.assert_close(balanced(torch.zeros(3), torch.tensor([4, 2, 0]), 0.5), torch.tensor([-0.5, 0, 0.5]))
    moved = balanced(torch.zeros(4), torch.tensor([9, 0, 0, 3]), 0.5)  # the mean is 3, the median 1.5
    torch.testing.assert_close(moved, torch.tensor([-0.625, 0.375, 0.375, -0.125]))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"logits": torch.zeros(4)}, ["logits has shape (4,)", "[tokens, experts]"]),
        ({"logits": torch.zeros(2, 4, dtype=torch.int)}, ["logits has dtype torch.int32"]),
        ({"k": 5}, ["k is 5", "from 1 to 4"]),
        ({"k": 0}, ["k is 0"]),
        ({"k": True}, ["k is True"]),
        ({"kind": "top"}, ["kind is 'top'", "softmax, renormalised, sigmoid"]),
        ({"bias": torch.zeros(4)}, ["bias is given", "belong to 'sigmoid'"]),
        ({"scale": 2.0}, ["scale is 2.0", "belong to 'sigmoid'"]),
        ({"kind": "sigmoid", "bias": torch.zeros(3)}, ["bias has shape (3,)", "[4]"]),
    ],
)
def test_a_bad_argument_is_refused_with_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        route(**{"logits": torch.zeros(2, 4), "k": 2, "kind": "softmax"} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_a_load_of_other_experts_and_a_rate_of_nothing_are_refused():
    with pytest.raises(ValueError, match=r"load has shape \(2,\)"):
        balanced(torch.zeros(3), torch.zeros(2), 0.1)
    with pytest.raises(ValueError, match="rate is 0"):
        balanced(torch.zeros(3), torch.zeros(3), 0)
