"""Attention in 4 bits on a GPU: restored to 16 bits, or by the matrix units for 4 bits where there are some."""

import pytest
import torch

from course_lib.kernels.attention.reference import attention_reference
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.quantised.fp4_attention import (
    fp4_attention,
    fp4_attention_reference,
    quantise_for_fp4,
    tiles_of,
)

BY_TIES = 4e-3  # of a kernel against its meaning: a weight in the middle of two codes becomes either


def error(found, exact) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lengths", [(1, 1), (333, 517), (517, 333)], ids=str)
def test_the_kernel_does_what_it_means(lengths, causal, head_dim):
    shapes = [(4, lengths[0]), (2, lengths[1]), (2, lengths[1])]
    query, key, value = (torch.randn(2, *shape, head_dim, device="cuda", dtype=torch.float16) for shape in shapes)
    key, value = key + 3, value + 0.5
    inputs = quantise_for_fp4(query, key, value)
    key_rows = tiles_of(architecture_of(query.device)).key_rows
    found = fp4_attention(inputs, causal=causal)
    assert error(found, fp4_attention_reference(inputs, causal=causal, key_rows=key_rows)) < BY_TIES
    if lengths != (1, 1):
        exact = attention_reference(query.double(), key.double(), value.double(), causal=causal)
        assert error(found, exact) < 0.12


def test_values_that_are_all_alike_come_out_as_they_are():
    query, key = (torch.randn(1, 2, 500, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    found = fp4_attention(quantise_for_fp4(query, key, torch.full_like(key, 3.0)))
    torch.testing.assert_close(found, torch.full_like(query, 3.0), rtol=2e-3, atol=0)
