"""The last linear layer with cross-entropy, by chunks: against float64, as an operator, and what lives meanwhile."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib.hardware.device import interpreting
from course_lib.kernels.fused import linear_cross_entropy as linear_cross_entropy_module
from course_lib.kernels.fused import linear_cross_entropy_operators
from course_lib.kernels.fused.linear_cross_entropy import (
    check_arguments,
    linear_cross_entropy_backward_reference,
    linear_cross_entropy_forward,
    linear_cross_entropy_forward_backward,
    linear_cross_entropy_reference,
)
from course_lib.kernels.fused.linear_cross_entropy_operators import (
    linear_cross_entropy,
    linear_cross_entropy_backward_operator,
    linear_cross_entropy_operator,
)
from tests.kernels.fused.cases import assert_as_exact_as_plain, check_one_graph, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
TARGETS = torch.tensor([3, -100, 0, 6])


class LargestTensor(TorchDispatchMode):
    """The float32 numbers that the memory of the largest tensor holds which an operation of PyTorch returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() / 4)
        return result


def inputs(tokens, width, vocabulary, dtype=torch.float32):
    """hidden, weight, targets and what each loss counts for; logits of about normal size."""
    hidden, weight = normal(1, tokens, width, dtype=dtype), normal(2, vocabulary, width, dtype=dtype) / width**0.5
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(3))
    targets[0], targets[-1] = vocabulary - 1, 0
    return hidden, weight, targets, normal(4, tokens)


def assert_right(hidden, weight, targets, loss_gradient, ignore_index=-100, chunk_rows=None):
    losses, *found = linear_cross_entropy_forward_backward(
        hidden, weight, targets, loss_gradient, ignore_index, chunk_rows=chunk_rows
    )
    arguments = hidden, weight, targets
    assert_as_exact_as_plain(losses, linear_cross_entropy_reference, *arguments, ignore_index=ignore_index)
    alone = linear_cross_entropy_forward(*arguments, ignore_index, chunk_rows=chunk_rows)
    assert torch.equal(alone, losses)
    backward = linear_cross_entropy_backward_reference
    assert_as_exact_as_plain(found, backward, *arguments, loss_gradient, ignore_index=ignore_index)


def test_the_meaning_is_what_autograd_finds():
    hidden, weight, targets, scales = inputs(5, 7, 9)
    leaves = hidden, weight = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    targets[2] = -100
    losses = F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
    torch.testing.assert_close(linear_cross_entropy_reference(hidden, weight, targets), losses)
    right = torch.autograd.grad(losses, leaves, scales.double())
    found = linear_cross_entropy_backward_reference(hidden, weight, targets, scales.double())
    for ours, exact in zip(found, right, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("tokens, width, vocabulary", [(1, 1, 1), (7, 3, 50), (20, 33, 127), (5, 16, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("chunk_rows", [None, 1, 3, 7])
def test_any_size_is_right_in_any_chunks(tokens, width, vocabulary, dtype, chunk_rows):
    assert_right(*inputs(tokens, width, vocabulary, dtype), chunk_rows=chunk_rows)


@pytest.mark.parametrize("ignore_index", [-100, 5])
def test_ignored_tokens_count_for_nothing_first_last_and_a_whole_chunk(ignore_index):
    hidden, weight, targets, scales = inputs(8, 6, 11)
    targets[[0, 2, 3, 7]] = ignore_index
    assert_right(hidden, weight, targets, scales, ignore_index, chunk_rows=2)
    losses, hidden_gradient, weight_gradient = linear_cross_entropy_forward_backward(
        hidden, weight, torch.full_like(targets, ignore_index), scales, ignore_index, chunk_rows=3
    )
    assert not losses.any() and not hidden_gradient.any() and not weight_gradient.any()


def test_strides_and_leading_dimensions_are_followed():
    hidden, weight, targets, scales = inputs(6, 8, 20)
    assert_right(in_wider_rows(hidden), weight.t().contiguous().t(), targets, scales, chunk_rows=4)
    assert_right(hidden, in_wider_rows(weight), targets.int(), torch.tensor(0.5).expand(6), chunk_rows=4)
    found = linear_cross_entropy_forward_backward(
        hidden.view(2, 3, 8), weight, targets.view(2, 3), scales.view(2, 3), chunk_rows=4
    )
    flat = linear_cross_entropy_forward_backward(hidden, weight, targets, scales, chunk_rows=4)
    assert found[0].shape == (2, 3) and found[1].shape == (2, 3, 8)
    assert all(torch.equal(one.flatten(), other.flatten()) for one, other in zip(found, flat))


def test_no_tokens_have_no_losses_and_leave_the_weight_alone():
    found = linear_cross_entropy_forward_backward(
        torch.zeros(0, 5), torch.ones(7, 5), torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    )
    assert found[0].shape == (0,) and found[1].shape == (0, 5) and torch.equal(found[2], torch.zeros(7, 5))


def test_no_tensor_of_tokens_times_vocabulary_lives():
    """The largest tensor is a chunk's logits, or the weight's gradient; of a layer and a loss it is all logits."""
    tokens, width, vocabulary, rows = 40, 8, 300, 10
    hidden, weight, targets, scales = inputs(tokens, width, vocabulary)
    largest = max(rows * vocabulary, vocabulary * width)
    with LargestTensor() as seen:
        linear_cross_entropy_forward_backward(hidden, weight, targets, scales, validate=False, chunk_rows=rows)
    assert seen.elements == largest < tokens * vocabulary
    with LargestTensor() as seen:
        linear_cross_entropy_forward(hidden, weight, targets, validate=False, chunk_rows=rows)
    assert seen.elements == rows * vocabulary
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as seen:
        F.cross_entropy(F.linear(*leaves), targets).backward()
    assert seen.elements == tokens * vocabulary


@pytest.mark.parametrize("width, rows", [(60, 3000), (5, 2048)])
def test_a_chunk_is_chosen_whose_logits_have_the_size_of_hidden_and_no_fewer_than_2048_rows(width, rows):
    hidden, weight, targets, _ = inputs(5000, width, 100)
    assert check_arguments(hidden, weight, targets, -100, False, None)[2] == rows


@pytest.mark.parametrize(
    "dtype, width, rows", [(torch.float32, 2100, 2100), (torch.float16, 1100, 2200), (torch.float32, 5, 2048)]
)
def test_with_a_gradient_a_chunk_has_logits_of_the_size_of_the_weights_gradient(monkeypatch, dtype, width, rows):
    """In float32, which it has while chunks are added up; both live at a time, and nothing larger has to."""
    seen = []

    def looked_at(logits, *rest, **options):
        seen.append(logits.shape[0])
        return torch.zeros(logits.shape[0])

    monkeypatch.setattr(linear_cross_entropy_module, "cross_entropy_forward_backward_", looked_at)
    linear_cross_entropy_forward_backward(*inputs(2300, width, 7, dtype), validate=False)
    assert seen == [rows, 2300 - rows]


def test_late_chunks_are_not_rounded_away_in_16_bits():
    """A float16 sum at 4096 steps by 4, and would forget the eight chunks of 1 that follow."""
    hidden, weight, targets = torch.ones(9, 1).half(), torch.zeros(2, 1).half(), torch.zeros(9, dtype=torch.int64)
    scales = torch.tensor([8192.0] + [2.0] * 8)
    gradient = linear_cross_entropy_forward_backward(hidden, weight, targets, scales, chunk_rows=1)[2]
    assert gradient.flatten().tolist() == [-4104, 4104]


@pytest.mark.parametrize("target", [50, -1, -101, 2**40])
def test_a_target_outside_is_refused_and_unchecked_it_is_nan(target):
    hidden, weight, targets, scales = inputs(5, 4, 50)
    targets[3] = target
    for function in (linear_cross_entropy_forward, lambda *them: linear_cross_entropy_forward_backward(*them, scales)):
        with pytest.raises(ValueError, match=rf"targets\[3\] is {target}; allowed are 0 to 49, and -100"):
            function(hidden, weight, targets)
    losses = linear_cross_entropy_forward(hidden, weight, targets, validate=False, chunk_rows=2)
    assert losses.isnan().tolist() == [False, False, False, True, False]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"hidden": torch.zeros(4)}, ["hidden has shape (4,)", "[..., tokens, hidden]"]),
        ({"hidden": torch.zeros(2, 4).int()}, ["hidden has dtype torch.int32"]),
        ({"hidden": torch.zeros(4, 2).t()}, ["hidden has strides", "hidden.contiguous()"]),
        ({"weight": torch.zeros(7, 5)}, ["weight has shape (7, 5)", "[vocabulary, 4]"]),
        ({"weight": torch.zeros(7, 4).half()}, ["weight has dtype torch.float16", "torch.float32"]),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, ["targets has shape (3,)", "[rows]"]),
        ({"targets": torch.zeros(2)}, ["targets has dtype torch.float32"]),
        ({"loss_gradient": torch.zeros(3)}, ["loss_gradient has shape (3,)"]),
        ({"ignore_index": None}, ["ignore_index is None"]),
        ({"chunk_rows": 0}, ["chunk_rows is 0", "at least 1"]),
        ({"chunk_rows": 2.0}, ["chunk_rows is 2.0"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(7, 4), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError) as refusal:
        linear_cross_entropy_forward_backward(**good | {"loss_gradient": torch.zeros(2)} | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


# ----------------------------------------------------------------------------------------------------- as an operator


def leaves():
    return normal(1, 4, 5).requires_grad_(), normal(2, 7, 5).requires_grad_()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("targets", [TARGETS, torch.full((4,), -100)], ids=["some", "all ignored"])
def test_every_reduction_is_pytorchs(reduction, targets):
    hidden, weight = leaves()
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, chunk_rows=3)
    right = F.cross_entropy(F.linear(hidden, weight), targets, reduction=reduction)
    torch.testing.assert_close(loss, right, equal_nan=True)
    found = torch.autograd.grad(loss.sum(), (hidden, weight))
    exact = torch.autograd.grad(right.sum(), (hidden, weight))
    torch.testing.assert_close(found, exact, equal_nan=True)


# In float32, as the kernels take no float64: wide steps, and a tolerance that their rounding and curvature need.
GRADCHECK = {"eps": 1e-2, "atol": 1e-3, "rtol": 1e-2}


@pytest.mark.filterwarnings("ignore:Input #")
def test_gradcheck_passes_and_finds_a_slip(monkeypatch):
    def function(hidden, weight):
        return linear_cross_entropy(hidden, weight, TARGETS, reduction="none", chunk_rows=3)

    assert torch.autograd.gradcheck(function, leaves(), **GRADCHECK)

    def of_the_last_chunk(hidden, weight, targets, loss_gradient, ignore_index, chunk_rows):
        gradient, _ = linear_cross_entropy_backward_reference(hidden, weight, targets, loss_gradient)
        last = slice(chunk_rows, None)
        arguments = hidden[last], weight, targets[last], loss_gradient[last]
        return gradient, linear_cross_entropy_backward_reference(*arguments)[1]

    monkeypatch.setattr(linear_cross_entropy_operators, "linear_cross_entropy_backward_operator", of_the_last_chunk)
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(function, leaves(), **GRADCHECK)


def test_opcheck_passes():
    hidden, weight = leaves()
    torch.library.opcheck(linear_cross_entropy_operator, (hidden, weight, TARGETS, -100, True, 3))
    torch.library.opcheck(linear_cross_entropy_operator, (hidden, weight, TARGETS, -100, False, None))
    arguments = hidden.detach(), weight.detach(), TARGETS, torch.tensor(0.25).expand(4), -100, 3
    torch.library.opcheck(linear_cross_entropy_backward_operator, arguments)


def test_a_compiled_function_has_one_graph_for_all_lengths_and_the_same_gradients():
    def function(hidden, weight, targets=TARGETS):
        return linear_cross_entropy(2 * hidden, weight, targets, chunk_rows=3)

    tensors = leaves()
    calls = [(hidden, tensors[1].detach(), targets) for hidden, _, targets, _ in (inputs(n, 5, 7) for n in (4, 5, 9))]
    check_one_graph(function, tensors, calls)


def test_bad_input_and_a_second_derivative_are_clear_errors():
    hidden, weight = leaves()
    with pytest.raises(ValueError, match="reduction is 'average'"):
        linear_cross_entropy(hidden, weight, TARGETS, reduction="average")
    with pytest.raises(ValueError, match=r"targets\[3\] is 6; allowed are 0 to 4"):
        linear_cross_entropy(hidden, weight[:5], TARGETS)
    (first,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, TARGETS), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="linear cross-entropy has no derivative of its own.*_reference"):
        first.sum().backward()
