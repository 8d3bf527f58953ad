"""The Blackwell kernel on a B200: right on any shape, and the same bits at every run. Nobody has run this yet."""

import pytest
import torch

from course_lib.hardware.device import machine
from course_lib.kernels.attention.reference import attention_reference
from tests.gpu.attention_claims import assert_agrees, ragged_shapes

pytestmark = pytest.mark.skipif(
    machine().tier == "none" or machine().compute_capability != (10, 0), reason="needs a B200 (sm_100)"
)


def blackwell(*arguments, **options):
    from course_lib.kernels.blackwell.flash import flash_attention_blackwell

    return flash_attention_blackwell(*arguments, **options)


def normal(*shape, dtype):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize("magnitude", [1, 30])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_it_agrees_with_float64_on_ragged_lengths_and_grouped_heads(head_dim, dtype, causal, magnitude):
    for batch, heads, key_heads, query_length, key_length in ragged_shapes(head_dim):
        query = magnitude * normal(batch, heads, query_length, head_dim, dtype=dtype)
        key, value = (normal(batch, key_heads, key_length, head_dim, dtype=dtype) for _ in range(2))
        output, lse = blackwell(query, key, value, causal=causal, return_lse=True)
        exact, exact_lse = attention_reference(
            query.double(), key.double(), value.double(), causal=causal, return_lse=True
        )
        allowed = 2 * torch.finfo(dtype).eps * exact.norm()
        assert_agrees(output, lse, exact, exact_lse, allowed, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_run_repeats_bit_by_bit(head_dim):
    query, key, value = (normal(2, 8, 3000, head_dim, dtype=torch.bfloat16) for _ in range(3))
    first = blackwell(query, key, value, causal=True)
    for _ in range(20):
        assert torch.equal(blackwell(query, key, value, causal=True), first)
