"""2^x from multiply-adds on a GPU: the bits of its meaning, at the ends too."""

import math

import pytest
import torch

from course_lib.kernels.common.exponentials import (
    DEGREES,
    exp2_by_polynomial,
    exp2_of_scores,
    exp2_polynomial_reference,
)


@pytest.mark.parametrize("degree", DEGREES)
def test_the_kernel_makes_the_bits_of_its_meaning(degree):
    ends = torch.tensor([-math.inf, -1e30, -127.0, -126.99999, -126.5, -126.0, -1e-9, 0.0, 1e-9, 127.0, 127.99999])
    x = torch.cat([ends, torch.rand(2**20) * 254.9 - 127, torch.tensor([math.nan])]).cuda()
    assert torch.equal(exp2_by_polynomial(x, degree), exp2_polynomial_reference(x, degree))


@pytest.mark.parametrize("share", [0, 4, 8, 32])
def test_a_share_of_the_columns_comes_from_the_polynomial(share):
    query, key = (torch.randn(64, 64, device="cuda").half() for _ in range(2))
    by_polynomial, by_unit = exp2_of_scores(query, key, 2, 32), exp2_of_scores(query, key, 2, 0)
    taken = torch.arange(64, device="cuda") % 32 >= 32 - share
    assert torch.equal(exp2_of_scores(query, key, 2, share), torch.where(taken, by_polynomial, by_unit))
    exact = torch.exp2(query.double() @ key.double().T)
    assert 1e-3 < (by_polynomial / exact - 1).abs().max() < 2.2e-3 and (by_unit / exact - 1).abs().max() < 1e-4
