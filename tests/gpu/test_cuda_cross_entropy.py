"""Cross-entropy by clusters in CUDA C++ on a GPU that has them: right beside the Triton kernel's own meaning."""

import math

import pytest
import torch

from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.hardware.device import interpreting, machine
from course_lib.kernels.fused.cross_entropy import cross_entropy_backward_reference, cross_entropy_reference
from course_lib.kernels.fused.cuda_cross_entropy import cuda_cross_entropy_forward_backward_
from tests.kernels.fused.cases import assert_as_exact_as_plain, in_wider_rows, normal

pytestmark = [
    pytest.mark.skipif(
        interpreting(), reason="needs a GPU: tests/kernels/fused/test_cuda_cross_entropy.py has the rest"
    ),
    pytest.mark.skipif(machine().tier != "hopper", reason="needs a GPU with clusters"),
    pytest.mark.skipif(missing_nvrtc() is not None, reason=str(missing_nvrtc())),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 1000, 1001, 4096, 32_000, 50_304, 128_256])
@pytest.mark.parametrize("apart", [False, True], ids=["contiguous", "rows apart"])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.int64], ids=str)
def test_losses_and_gradient_are_right(vocabulary, dtype, apart, target_dtype):
    logits = normal(1, 5, vocabulary, dtype=dtype) * 4
    if apart:
        logits = in_wider_rows(logits)
        if vocabulary > 32_768:
            pytest.skip("rows apart by an odd number are read one number at a time, and a cluster has no room for them")
    targets = torch.arange(5, device=logits.device, dtype=target_dtype) * 977 % vocabulary
    targets[1] = -100
    scale = torch.rand(5, device=logits.device)
    before = logits.clone()
    losses = cuda_cross_entropy_forward_backward_(logits, targets, scale)
    assert_as_exact_as_plain(losses, lambda logits: cross_entropy_reference(logits, targets), before)
    assert_as_exact_as_plain(
        logits, lambda logits, scale: cross_entropy_backward_reference(logits, targets, scale), before, scale
    )
    assert losses[1] == 0 and not logits[1].any()


def test_a_row_with_nan_or_infinity_or_nothing_spoils_no_other():
    logits = normal(1, 6, 20_000)
    logits[1, 19_999], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf
    logits[4, :19_000] = -math.inf  # whole blocks of it
    targets = torch.full((6,), 19_500, device=logits.device)
    before = logits.clone()
    losses = cuda_cross_entropy_forward_backward_(logits, targets, torch.ones(6, device=logits.device))
    assert losses.isnan().tolist() == [False, True, True, True, False, False]
    assert logits.isnan().any(dim=1).tolist() == [False, True, True, True, False, False]
    good = [0, 4, 5]
    assert_as_exact_as_plain(losses[good], lambda rows: cross_entropy_reference(rows, targets[good]), before[good])
    assert not logits[4, :19_000].any()


def test_a_target_outside_is_nan_unchecked_and_refused_checked():
    logits, targets = normal(1, 3, 1000), torch.tensor([5, 1000, -1], device="cuda")
    scale = torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match=r"targets\[1\] is 1000"):
        cuda_cross_entropy_forward_backward_(logits, targets, scale)
    losses = cuda_cross_entropy_forward_backward_(logits, targets, scale, validate=False)
    assert losses.isnan().tolist() == logits.isnan().all(dim=1).tolist() == [False, True, True]


def test_repetitions_are_equal_to_the_bit():
    before, targets = normal(1, 64, 128_256, dtype=torch.bfloat16), torch.arange(64, device="cuda")
    scale = torch.ones(64, device="cuda")
    results = []
    for _ in range(50):
        logits = before.clone()
        results.append((cuda_cross_entropy_forward_backward_(logits, targets, scale), logits))
    for losses, gradient in results[1:]:
        assert torch.equal(losses, results[0][0]) and torch.equal(gradient, results[0][1])
