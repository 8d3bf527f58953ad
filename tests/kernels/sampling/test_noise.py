"""The noise of a token: one number in the kernel and in its meaning, never 0 and never infinite, and exponential."""

import pytest
import torch
import triton
import triton.language as tl

from course_lib.hardware.device import interpreting
from course_lib.kernels.sampling.noise import noise_of, noise_reference, row_key, uniform_of

pytestmark = pytest.mark.skipif(not interpreting(), reason="small shapes for the interpreter; tests/gpu has the others")


@triton.jit
def noise_kernel(seeds_pointer, positions_pointer, out_pointer, TOKENS: tl.constexpr):
    row = tl.program_id(0)
    key = row_key(tl.load(seeds_pointer + row), tl.load(positions_pointer + row))
    token = tl.arange(0, TOKENS)
    tl.store(out_pointer + row * TOKENS + token, noise_of(key, token, ASSEMBLY=False))


@triton.jit
def uniform_kernel(bits_pointer, out_pointer, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_pointer + place, uniform_of(tl.load(bits_pointer + place).to(tl.uint32)))


def test_the_kernel_and_its_meaning_agree_for_seeds_of_both_signs():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 7847])
    for positions in (torch.tensor([0, 1, 2, 2**31 - 1, 5, 12345], dtype=torch.int32), torch.arange(6) + 2**40):
        out = torch.empty(6, 4096)
        noise_kernel[(6,)](seeds, positions, out, 4096)
        torch.testing.assert_close(out.double(), noise_reference(seeds, positions, 4096), rtol=2e-6, atol=0)


def test_a_uniform_number_is_neither_0_nor_1():
    """Divided by 2³² - 1 the largest word is 1, whose noise is infinite: that token then always wins."""
    bits = torch.tensor([0, 1, 2**31, 2**32 - 2**8, 2**32 - 2**7, 2**32 - 2, 2**32 - 1, 12345])
    out = torch.empty(8)
    uniform_kernel[(1,)](bits, out, 8)
    assert (out > 0).all() and (out < 1).all() and (out[0] < 2**-32) and (out[6] == 1 - 2**-24)
    assert torch.log1p(-out).isfinite().all() and (torch.log1p(-out) < 0).all()


def spread(values: torch.Tensor) -> float:
    """The largest distance of the values' distribution from the exponential one, times √n: the Kolmogorov statistic."""
    ordered = (1 - torch.exp(-values.flatten())).sort().values
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()).item() * len(ordered) ** 0.5


# A right generator is beyond it once in a million choices: 2·exp(-2·2.69²). These seeds are fixed.
LARGEST_SPREAD = 2.69


def test_noise_is_exponential_along_tokens_seeds_and_positions():
    rows = torch.arange(1000)
    for seeds, positions in ((rows, 0 * rows), (0 * rows, rows), (rows, -rows), (rows << 32, rows)):
        noise = noise_reference(seeds, positions, 200)
        assert spread(noise) < LARGEST_SPREAD
        assert max(spread(noise[:, token]) for token in range(0, 200, 20)) < LARGEST_SPREAD
        assert max(spread(noise[row]) for row in range(0, 1000, 100)) < LARGEST_SPREAD


def test_small_noise_which_decides_has_all_its_digits():
    """Among 128,256 tokens the winner's is about 1e-5: below 2⁻¹⁶ a uniform number near 1 would have 256 values."""
    noise = noise_reference(torch.arange(100), torch.arange(100), 128_256)
    assert spread(noise.min(dim=1).values * 128_256) < LARGEST_SPREAD
    small = noise[noise < 2**-16]
    assert len(small) > 150 and len(small.unique()) > 0.98 * len(small)


def test_neighbouring_keys_and_tokens_are_independent():
    """Correlations of 1,000,000 pairs; each is within 5 / 1000 of 0 but in one of two million choices."""
    rows = torch.arange(1001)
    for seeds, positions in ((rows, 0 * rows), (0 * rows, rows)):
        uniform = 1 - torch.exp(-noise_reference(seeds, positions, 1001)) - 0.5
        for other in (uniform[1:, :-1], uniform[:-1, 1:], uniform[1:, 1:]):
            assert abs((12 * uniform[:-1, :-1] * other).mean()) < 0.005
