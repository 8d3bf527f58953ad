"""Operations round in other ways, the same ones for the same seed, by no more than a rounding; nothing else moves."""

import pytest
import torch

from course_lib.checker.judge.disturbed import EPSILON, Disturbed

BIG = 2.0**24  # the numbers next to it are 2 apart, so what a sum keeps of a 1 depends on what was added before
PRODUCTS = {
    "mm": lambda one, ones: one @ ones[:, None],
    "bmm": lambda one, ones: one[None] @ ones[None, :, None],
    "mv": lambda one, ones: one @ ones,
    "dot": lambda one, ones: one[0] @ ones,
    "addmm": lambda one, ones: torch.addmm(one.new_zeros(1), one, ones[:, None]),
    "baddbmm": lambda one, ones: torch.baddbmm(one.new_zeros(1), one[None], ones[None, :, None]),
    "addmv": lambda one, ones: torch.addmv(one.new_zeros(1), one, ones),
}
SUMS = {"sum": lambda one, ones: one.sum(-1), "sum of all": lambda one, ones: one.sum()} | PRODUCTS


def cancelling(rows=3, pairs=50):
    """Rows [rows, 4 · pairs] of BIG, 1, -BIG, 1, ..., whose exact sum is 2 · pairs."""
    return torch.tensor([BIG, 1.0, -BIG, 1.0]).repeat(rows, pairs)


def under(seed, work, *inputs):
    """What some work gives with another rounding."""
    with Disturbed(seed):
        return work(*inputs)


def attention(x):
    return torch.softmax(x @ x.T, -1) @ x


def test_a_seed_gives_the_same_each_time_and_another_seed_something_else():
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    first = under(3, attention, x)
    assert torch.equal(first, under(3, attention, x))
    assert not torch.equal(first, under(4, attention, x)) and not torch.equal(first, attention(x))


@pytest.mark.parametrize("work", SUMS.values(), ids=SUMS)
def test_a_sum_is_added_up_in_other_orders(work, monkeypatch):
    """Whole units of 100 are lost to the order, and to nothing else: single operations are exact here."""
    monkeypatch.setattr(Disturbed, "_off_by_a_rounding", lambda self, tensor: tensor)
    x = cancelling()
    results = [under(seed, work, x, torch.ones(x.shape[-1])) for seed in range(6)]
    assert max(float((one - results[0]).abs().max()) for one in results) >= 1


@pytest.mark.parametrize("work", SUMS.values(), ids=SUMS)
def test_the_terms_of_a_product_stay_together(work):
    """A first factor in another order than the second would give another product altogether."""
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.rand(3, 40, generator=generator), torch.rand(40, generator=generator)
    exact, moved = work(x.double(), weights.double()), under(0, work, x, weights).double()
    # The terms are positive, so each of the additions, their terms and the result may be off by a rounding.
    assert torch.all((moved - exact).abs() <= (x.numel() + 2) * EPSILON * exact)


ELEMENTWISE = {
    "exp": torch.exp,
    "log": torch.log,
    "mul": lambda x: x * 3.3,
    "div": lambda x: x / 3.3,
    "add": lambda x: x + 1.7,
    "rsqrt": torch.rsqrt,
    "in place": lambda x: x.clone().mul_(3.3),
}


@pytest.mark.parametrize("work", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_an_operation_is_off_by_a_rounding_at_most(work):
    """By one unit in the last place, and half a one where the result is put among the numbers that there are."""
    x = 2 + torch.rand(1000, generator=torch.Generator().manual_seed(2))
    here, elsewhere = work(x), under(0, work, x)
    off = (elsewhere - here).abs() / (EPSILON * here.abs())
    assert 0.4 < float(off.max()) <= 1.5
    assert float((off > 0).float().mean()) > 0.3


def test_an_operation_in_place_writes_its_own_tensor():
    x = torch.rand(100)
    view, before = x[:50], x.clone()
    with Disturbed(0):
        assert view.mul_(3.3) is view
    assert not torch.equal(x[:50], before[:50] * 3.3) and torch.allclose(x[:50], before[:50] * 3.3)
    assert torch.equal(x[50:], before[50:])


UNTOUCHED = {
    "integers": lambda x: (x * 100).round().long().sum(-1) * 3,
    "a mask": lambda x: (x > 0.5) & (torch.arange(x.shape[-1]) % 3 != 0),
    "how many": lambda x: (x > 0.5).sum(-1),
    "float64": lambda x: torch.softmax(x.double() @ x.double().T, -1).sum(-1),
    "what moves numbers": lambda x: torch.cat([x.T.flip(0)[3:], torch.where(x > 0.5, x, -x).T]).contiguous(),
    "what chooses numbers": lambda x: torch.maximum(x.amax(-1, keepdim=True), x.sort(-1).values),
    "what is masked": lambda x: torch.softmax(torch.full_like(x, -torch.inf).fill_diagonal_(1.0), -1) == 0,
    "infinities": lambda x: (x / 0.0).exp() + 1,
}


@pytest.mark.parametrize("work", UNTOUCHED.values(), ids=UNTOUCHED)
def test_what_no_float32_rounding_touches_stays_exact(work):
    x = torch.rand(16, 16, generator=torch.Generator().manual_seed(3))
    rounded = (x * 99).ceil() / 100  # not 0, and no element next to the half where `* 100` rounds to another integer
    assert torch.equal(work(rounded), under(0, work, rounded))
