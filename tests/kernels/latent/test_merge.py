"""The merge of splits at 512 columns, against its plain meaning."""

import pytest
import torch

from course_lib.kernels.decode.combine import combine_splits_reference
from course_lib.kernels.latent.merge import merge_columns, merge_latent_splits


@pytest.mark.parametrize("splits", [2, 3, 5])
def test_it_means_what_combine_splits_means(splits):
    """Parts without keys may hold anything; a row of such parts alone gives zeros and minus infinity."""
    torch.manual_seed(splits)
    parts, lses = torch.randn(splits, 3, 512), 20 * torch.randn(splits, 3)
    lses[1, 0] = lses[:, 2] = -torch.inf
    parts[1, 0] = parts[:, 2] = torch.nan
    output, lse = torch.full((3, 512), torch.nan), torch.full((3,), torch.nan)
    merge_latent_splits(parts, lses, output, lse)
    exact, exact_lse = combine_splits_reference(parts.double(), lses.double())
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-6)


def test_any_number_of_splits_is_cut_into_columns_that_fill_the_row():
    for power in range(1, 8):
        assert 512 % merge_columns(2**power) == 0
