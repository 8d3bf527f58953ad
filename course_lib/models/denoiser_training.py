"""Train the small denoiser on toy trajectories, and draw trajectories from it.

model = train_denoiser()                      # less than a minute on a CPU
paths = sample(model, 64)                     # [64, 2, 16]
"""

import dataclasses
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from course_lib.hardware.device import default_device, interpreting
from course_lib.kernels.fused.group_norm_mish_operators import group_norm_mish
from course_lib.models.denoiser import SMALL, Denoiser, DenoiserConfig, torch_group_norm_mish, toy_trajectories

STEPS, BATCH, RATE, WARM_UP = 300, 32, 2e-3, 20


def train_denoiser(
    config: DenoiserConfig = SMALL,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    seed: int = 0,
    device: torch.device | str | None = None,
    norm: Callable = torch_group_norm_mish,
    report: Callable[[int, float], None] | None = None,
) -> Denoiser:
    """A denoiser that has seen `steps` batches of toy trajectories.

    Args:
        config: the model's shape; coordinates must be 2, as the trajectories lie in a plane.
        steps, batch: optimizer steps, and trajectories in each.
        seed: of weights, trajectories and noise. They are drawn on the CPU, so that all devices see the same.
        device: "cpu" or "cuda"; the course's device when None.
        norm: as `Denoiser` takes it; autograd must pass through it.
        report: called after each step with its number, from 1, and the loss.

    Returns the model in evaluation mode. Raises a ValueError that names the argument when one is not as above.
    """
    if config.coordinates != 2:
        raise ValueError(f"config.coordinates is {config.coordinates}; the toy trajectories have 2.")
    for name, value in (("steps", steps), ("batch", batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1.")
    device = default_device() if device is None else torch.device(device)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
        torch.manual_seed(seed)
        model = Denoiser(config, norm)
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    for step in range(1, steps + 1):
        clean = toy_trajectories(batch, config.length, generator)
        noise = torch.randn(clean.shape, generator=generator)
        times = torch.randint(config.steps, (batch,), generator=generator)
        loss = noise_loss(model, clean.to(device), noise.to(device), times.to(device))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if report is not None:
            report(step, loss.item())
    return model.eval()


def noise_loss(model: Denoiser, clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The mean square of what the predicted noise is off by.

    clean, noise: [batch, coordinates, length]; times: int64 [batch], which step of the noise each trajectory is at.
    """
    kept = model.kept[times][:, None, None]  # [batch, 1, 1]
    return F.mse_loss(model(kept.sqrt() * clean + (1 - kept).sqrt() * noise, times), noise)


@torch.no_grad()
def sample(model: Denoiser, count: int, seed: int = 0) -> torch.Tensor:
    """Trajectories drawn from a trained denoiser, [count, coordinates, length]: all steps of the noise, backwards."""
    config, device = model.config, model.kept.device
    generator = torch.Generator().manual_seed(seed)
    shape = count, config.coordinates, config.length
    x = torch.randn(shape, generator=generator).to(device)
    before = torch.cat([model.kept.new_ones(1), model.kept[:-1]])  # [steps], after the step before
    for time in reversed(range(config.steps)):
        kept, kept_before = model.kept[time], before[time]
        noise = model(x, torch.full((count,), time, device=device))
        clean = ((x - (1 - kept).sqrt() * noise) / kept.sqrt()).clamp(-1.5, 1.5)  # no trajectory is beyond 1
        share = kept / kept_before
        x = (kept_before.sqrt() * (1 - share) * clean + share.sqrt() * (1 - kept_before) * x) / (1 - kept)
        if time > 0:
            deviation = ((1 - kept_before) / (1 - kept) * (1 - share)).sqrt()
            x = x + deviation * torch.randn(shape, generator=generator).to(device)
    return x


# What the interpreter trains in some seconds: two programs a norm.
INTERPRETED = dataclasses.replace(SMALL, width=8, groups=2)
INTERPRETED_STEPS, INTERPRETED_BATCH = 15, 16


def denoiser_curves(
    norms: Mapping[str, Callable] | None = None, *, seed: int = 0, device: torch.device | str | None = None
) -> dict[str, list[float]]:
    """The losses of one training for each of several norms: same first weights, trajectories and noise.

    Args:
        norms: name -> norm as `Denoiser` takes it, which autograd passes through. PyTorch's and the course's own when
            None.
        seed, device: as for `train_denoiser`.

    Returns name -> the loss of each step: of 300 on a GPU, of 15 steps of a smaller model in the interpreter. Two right
    norms begin alike to the last digits of float32; what they differ by in rounding grows with the steps.
    """
    if norms is None:
        norms = {"PyTorch": torch_group_norm_mish, "ours": group_norm_mish}
    config, steps, batch = (
        (INTERPRETED, INTERPRETED_STEPS, INTERPRETED_BATCH) if interpreting() else (SMALL, STEPS, BATCH)
    )
    curves: dict[str, list[float]] = {}
    for name, norm in norms.items():
        curves[name] = []

        def report(step: int, loss: float, losses: list[float] = curves[name]) -> None:
            losses.append(loss)

        train_denoiser(config, steps=steps, batch=batch, seed=seed, device=device, norm=norm, report=report)
    return curves
