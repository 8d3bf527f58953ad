"""What `bench sampling` compares with draws by the law that ours draws by."""

import pytest
import torch

from course_lib.bench.sampling import sorted_sample
from course_lib.kernels.sampling.reference import distribution_reference


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("top_p", [None, 0.7])
def test_sorting_draws_by_the_same_law(top_k, top_p):
    rows = 20_000
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    number = torch.ones(1)
    law = distribution_reference(logits, number, number.long() * (top_k or 0), number * (top_p or 1.0), 0 * number)
    cuts = [None if cut is None else torch.full((rows,), cut) for cut in (top_k, top_p)]
    torch.manual_seed(0)
    tokens = sorted_sample(logits.expand(rows, 10), *cuts, torch.ones(rows))
    found = torch.bincount(tokens, minlength=10) / rows
    assert (found - law[0]).abs().max() < 5 * (0.25 / rows) ** 0.5  # five standard deviations; the seed is fixed
    assert (found[law[0] == 0] == 0).all()
