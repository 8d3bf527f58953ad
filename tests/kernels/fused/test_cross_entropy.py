"""Cross-entropy and its gradient against float64: alone, from kept statistics, and over the logits in one launch."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.fused.cross_entropy import (
    cross_entropy_backward,
    cross_entropy_backward_reference,
    cross_entropy_forward,
    cross_entropy_forward_backward_,
    cross_entropy_reference,
)
from tests.kernels.fused.cases import SIZES, assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")
SEVERAL_CHUNKS = 17001
DTYPES = [torch.float32, torch.float16]


def targets_for(rows, vocabulary, dtype=torch.int64):
    """Random ones, the first and the last of the vocabulary among them."""
    found = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(rows), dtype=dtype)
    found[0], found[-1] = vocabulary - 1, 0
    return found


def assert_right(logits, targets, loss_gradient=None, ignore_index=-100):
    """All three ways, and the two that give a gradient agree to the bit."""
    if loss_gradient is None:
        loss_gradient = normal(9, len(targets))
    losses, statistics = cross_entropy_forward(logits, targets, ignore_index)
    assert_as_exact_as_plain(losses, cross_entropy_reference, logits, targets, ignore_index=ignore_index)
    gradient = cross_entropy_backward(logits, targets, statistics, loss_gradient, ignore_index)
    arguments = (logits, targets, loss_gradient, ignore_index)
    assert_as_exact_as_plain(gradient, cross_entropy_backward_reference, *arguments)
    overwritten = logits.clone(memory_format=torch.contiguous_format)
    again = cross_entropy_forward_backward_(overwritten, targets, loss_gradient, ignore_index)
    assert torch.equal(again, losses) and torch.equal(overwritten, gradient)


def test_the_meaning_is_what_autograd_finds():
    logits, targets, loss_gradient = normal(1, 4, 9).double().requires_grad_(), targets_for(4, 9), normal(2, 4).double()
    targets[1] = -100
    losses = F.cross_entropy(logits, targets, reduction="none")
    (right,) = torch.autograd.grad(losses, logits, loss_gradient)
    torch.testing.assert_close(cross_entropy_backward_reference(logits, targets, loss_gradient), right)


@pytest.mark.parametrize("vocabulary", [*SIZES, 8192, SEVERAL_CHUNKS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_vocabulary_is_right(vocabulary, dtype):
    assert_right(normal(1, 3, vocabulary, dtype=dtype), targets_for(3, vocabulary))


def test_llamas_vocabulary_is_right_in_16_bits():
    assert_right(normal(1, 2, 128_256, dtype=torch.float16), targets_for(2, 128_256, torch.int32))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("row", ["rising", "falling", "equal", "large", "one far above"])
def test_a_missing_running_maximum_would_overflow(row):
    position = torch.arange(20_000.0)
    logits = {
        "rising": position,
        "falling": -position,
        "equal": torch.full((20_000,), 500.0),
        "large": 1e30 * position,
        "one far above": torch.where(position == 12_345, 1e4, 0.0),
    }[row]
    for target in (0, 12_345, 19_999):
        assert_right(logits[None], torch.tensor([target]))


def test_a_log_sum_exp_of_one_number_would_be_off_by_its_rounding():
    """Near 10,000 float32 steps by 0.001: exp(logit - lse) would err by 5e-4."""
    assert_right(normal(1, 3, 300) + 1e4, targets_for(3, 300))


def test_logits_of_minus_infinity_have_no_weight():
    logits, targets = normal(1, 3, 9000), targets_for(3, 9000)
    logits[:, 1:8999:2] = -math.inf
    logits[1, :8500] = -math.inf
    targets[1] = 8999
    losses, statistics = cross_entropy_forward(logits, targets)
    torch.testing.assert_close(losses, cross_entropy_reference(logits, targets))
    gradient = cross_entropy_backward(logits, targets, statistics, torch.ones(3))
    torch.testing.assert_close(gradient, cross_entropy_backward_reference(logits, targets, torch.ones(3)))
    assert torch.all(gradient[:, 1:8499:2] == 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_bad_numbers_stay_in_their_row_as_in_pytorch():
    logits, targets = normal(1, 4, 300), targets_for(4, 300)
    clean, _ = cross_entropy_forward(logits, targets)
    logits[1, 7], logits[2, 7] = math.nan, math.inf
    losses = cross_entropy_forward_backward_(logits, targets, torch.ones(4))
    assert torch.equal(losses[[0, 3]], clean[[0, 3]]) and losses[[1, 2]].isnan().all()
    assert torch.equal(logits.isnan().any(dim=1), torch.tensor([False, True, True, False]))


def test_rows_may_lie_apart_and_what_lies_between_is_left_alone():
    logits, targets = normal(1, 3, 127), targets_for(3, 127)
    apart = in_wider_rows(logits)
    assert_right(apart, targets)
    losses = cross_entropy_forward_backward_(apart, targets, torch.ones(3))
    assert torch.equal(losses, cross_entropy_forward(logits, targets)[0])
    assert apart._base.isnan().sum() == 3 * 5
    assert_right(logits, targets, torch.tensor(0.25).expand(3))


def test_leading_dimensions_stay():
    logits, targets = normal(1, 2, 3, 40), targets_for(6, 40).view(2, 3)
    losses, statistics = cross_entropy_forward(logits, targets)
    assert losses.shape == (2, 3) and statistics.shape == (2, 3, 2)
    flat = cross_entropy_reference(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(losses.flatten(), flat)
    assert cross_entropy_backward(logits, targets, statistics, losses).shape == logits.shape


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 5, 2**40])
def test_ignored_rows_have_no_loss_and_no_gradient_whatever_they_hold(ignore_index):
    logits, targets = normal(1, 5, 6), torch.tensor([5, ignore_index, 1, ignore_index, 4])
    assert_right(logits, targets, ignore_index=ignore_index)
    logits[1] = math.nan
    losses = cross_entropy_forward_backward_(logits, targets, torch.full((5,), math.inf), ignore_index)
    assert losses[1] == 0 and torch.all(logits[1] == 0)


def test_all_rows_may_be_ignored():
    targets = torch.full((4,), -100)
    assert_right(normal(1, 4, SEVERAL_CHUNKS), targets)
    losses, _ = cross_entropy_forward(torch.full((4, 10), math.nan), targets)
    assert torch.all(losses == 0)


@pytest.mark.parametrize("target", [50, 51, -1, -99, -101, 2**31 - 1, 2**40, -(2**40)])
def test_a_target_outside_is_refused_and_unchecked_it_is_nan_without_a_read_outside(target):
    logits, targets = normal(1, 3, 50), torch.tensor([2, target, 3])
    for function in (cross_entropy_forward, lambda *them: cross_entropy_forward_backward_(*them, torch.ones(3))):
        before = logits.clone()
        with pytest.raises(ValueError, match=rf"targets\[1\] is {target}; allowed are 0 to 49, and -100"):
            function(logits, targets)
        assert torch.equal(logits, before)
    report = metered(cross_entropy_forward_backward_, logits, targets, torch.ones(3), validate=False)
    assert not report.out_of_bounds
    assert logits[1].isnan().all() and not logits[[0, 2]].isnan().any()
    losses, _ = cross_entropy_forward(normal(1, 3, 50), targets, validate=False)
    assert losses.isnan().tolist() == [False, True, False]


def test_forward_reads_a_logit_once_and_the_whole_moves_three():
    logits, targets = normal(1, 4, SEVERAL_CHUNKS), targets_for(4, SEVERAL_CHUNKS)
    forward = metered(cross_entropy_forward, logits, targets)
    once = forward["logits_pointer"]
    assert once.loaded_bytes == logits.nbytes + 4 * 4 and once.stored_bytes == 0  # and each target's logit
    whole = metered(cross_entropy_forward_backward_, logits, targets, torch.ones(4))["logits_pointer"]
    assert whole.loaded_bytes == 2 * logits.nbytes + 4 * 4 and whole.stored_bytes == logits.nbytes
    ignored = metered(cross_entropy_forward, logits, torch.full((4,), -100))
    assert ignored.loaded_bytes == 4 * 8


def test_no_rows_have_no_losses():
    losses, statistics = cross_entropy_forward(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64))
    assert losses.shape == (0,) and statistics.shape == (0, 2)


LOGITS, TARGETS = torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"logits": LOGITS.int()}, ["logits has dtype torch.int32"]),
        ({"logits": torch.zeros(4)}, ["logits has shape (4,)", "[..., rows, vocabulary]"]),
        ({"logits": torch.zeros(4, 2).t()}, ["logits has strides", "logits.contiguous()"]),
        ({"logits": torch.zeros(1, 4).expand(2, 4)}, ["rows share memory", "logits.contiguous()"]),
        ({"targets": TARGETS.float()}, ["targets has dtype torch.float32", "int64"]),
        ({"targets": TARGETS[:1]}, ["targets has shape (1,)", "[rows]"]),
        ({"targets": torch.zeros(4, dtype=torch.int64)[::2]}, ["targets", "contiguous"]),
        ({"loss_gradient": torch.ones(2).half()}, ["loss_gradient has dtype torch.float16", "float32"]),
        ({"loss_gradient": torch.ones(3)}, ["loss_gradient has shape (3,)", "(2,)"]),
        ({"ignore_index": 1.5}, ["ignore_index is 1.5"]),
    ],
)
def test_bad_input_is_refused_with_what_is_allowed(change, words):
    good = {"logits": LOGITS, "targets": TARGETS, "loss_gradient": torch.ones(2)}
    with pytest.raises(ValueError) as refusal:
        cross_entropy_forward_backward_(**good | change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)
