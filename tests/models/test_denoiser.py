"""The small diffusion denoiser: what it learns, what is drawn from it, and that it trains alike on either norm."""

import math

import pytest
import torch
import torch.nn.functional as F

from course_lib.hardware.device import interpreting
from course_lib.models.denoiser import (
    Denoiser,
    DenoiserConfig,
    kept_shares,
    torch_group_norm_mish,
    toy_trajectories,
)
from course_lib.models.denoiser_training import denoiser_curves, noise_loss, sample, train_denoiser

SMALLER = DenoiserConfig(width=16, groups=4)
# A hundred roundings of float32: 15 steps of 7 norms each.
TOLERANCE = 100 * torch.finfo(torch.float32).eps


def test_toy_trajectories_go_around_on_either_side_and_their_mean_through():
    paths = toy_trajectories(1000, 16, torch.Generator().manual_seed(0))
    assert paths.shape == (1000, 2, 16)
    assert torch.equal(paths[:, 0, 0], torch.full((1000,), -1.0)) and paths[:, 1, [0, -1]].abs().max() < 1e-6
    middle = paths[:, 1, 7]
    assert middle.abs().min() > 0.59 and middle.abs().max() < 1.0 and middle.mean().abs() < 0.1


def test_the_schedule_falls_from_one_to_nearly_nothing_and_never_reaches_it():
    kept = kept_shares(100)
    assert kept.shape == (100,) and kept[0] > 0.99 and 0 < kept[-1] < 1e-3
    assert torch.all(kept[1:] < kept[:-1])
    assert kept[49] == pytest.approx(math.cos(0.508 / 1.008 * math.pi / 2) ** 2, abs=1e-3)


def test_it_learns_both_ways_around_and_draws_no_mean_of_them():
    losses = []
    model = train_denoiser(SMALLER, steps=200, device="cpu", report=lambda _, loss: losses.append(loss))
    assert len(losses) == 200 and losses[0] > 0.8 and sum(losses[-20:]) / 20 < 0.15
    paths = sample(model, 64)
    middle = paths[:, 1, 7:9].mean(dim=1)
    assert middle.abs().median() > 0.5, "they go through the obstacle"
    assert 8 < (middle > 0).sum() < 56, "all go the same way"
    assert (paths[:, 0] - torch.linspace(-1, 1, 16)).abs().max() < 0.4
    assert torch.equal(paths, sample(model, 64))


def test_the_loss_of_perfect_knowledge_is_nothing():
    """A model that returns the noise it was given."""
    clean = toy_trajectories(5, 16, torch.Generator().manual_seed(0))
    noise, times = torch.randn(clean.shape, generator=torch.Generator().manual_seed(1)), torch.arange(5) * 20

    class Knowing(Denoiser):
        def forward(self, noisy, steps):
            kept = self.kept[steps][:, None, None]
            return (noisy - kept.sqrt() * clean) / (1 - kept).sqrt()

    assert noise_loss(Knowing(SMALLER), clean, noise, times) < 1e-9
    assert noise_loss(Denoiser(SMALLER), clean, noise, times) > 0.5


@pytest.mark.skipif(not interpreting(), reason="the interpreter's smaller model; tests/gpu has the other")
def test_the_course_kernel_trains_it_as_pytorchs_operations_do():
    curves = denoiser_curves()
    assert list(curves) == ["PyTorch", "ours"] and len(curves["ours"]) == 15
    assert curves["ours"] == pytest.approx(curves["PyTorch"], rel=TOLERANCE)
    assert curves["ours"][-1] < 0.85 * curves["ours"][0]


def test_a_norm_without_the_gradient_of_its_statistics_is_told_from_them():
    """What is compared above is sharp enough: this one's losses start the same."""

    def careless(x, groups, weight, bias, scale=None, shift=None):
        rows = x.unflatten(1, (groups, -1)).flatten(2)
        deviation, mean = torch.std_mean(rows.detach(), dim=-1, keepdim=True, correction=0)
        normal = ((rows - mean) / (deviation.square() + 1e-5).sqrt()).view(x.shape)
        out = F.mish(normal * weight[:, None] + bias[:, None])
        return out if scale is None else out * scale[:, :, None] + shift[:, :, None]

    curves = denoiser_curves({"PyTorch": torch_group_norm_mish, "careless": careless}, device="cpu")
    first, *later = zip(curves["PyTorch"], curves["careless"])
    assert first[0] == pytest.approx(first[1], rel=TOLERANCE)
    assert later[-1][0] != pytest.approx(later[-1][1], rel=100 * TOLERANCE)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"length": 15}, ["length is 15", "even"]),
        ({"width": 30}, ["width is 30", "8 groups"]),
        ({"groups": 0}, ["groups is 0", "at least 1"]),
        ({"steps": 2.0}, ["steps is 2.0"]),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_what_is_allowed(change, words):
    with pytest.raises(ValueError) as refusal:
        DenoiserConfig(**change)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


def test_training_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="config.coordinates is 3; the toy trajectories have 2"):
        train_denoiser(DenoiserConfig(coordinates=3))
    with pytest.raises(ValueError, match="batch is 0"):
        train_denoiser(SMALLER, batch=0)
