"""A small diffusion model of trajectories: a one-dimensional U-Net of two levels, after Diffusion Policy.

    noisy[t] = √kept[t] · trajectory + √(1 - kept[t]) · noise              kept falls from 1 to nearly 0 over the steps
    loss     = mean of (model(noisy[t], t) - noise)²                       t drawn at random

    level 1 (width, length):       in -> residual block ─────────────┐ skip
    level 2 (2 width, length / 2):    └ half as long -> residual block -> twice as long ┘ -> residual block -> out

A residual block is two times Conv1d (5 taps) -> GroupNorm -> Mish. After the first, the time step's embedding scales
and shifts each channel. `norm` is what computes GroupNorm, Mish, scale and shift: PyTorch's operations, or the course's
kernel (`course_lib.kernels.fused.group_norm_mish_operators.group_norm_mish`). Everything that depends on the step alone
(kept, and the sinusoids of the embedding) is computed once, as a table.

Sources: Ho, Jain and Abbeel, arXiv 2006.11239 (the loss, and sampling). Nichol and Dhariwal, arXiv 2102.09672 (the
cosine schedule). Chi et al., Diffusion Policy, arXiv 2303.04137 (the U-Net of actions).
"""

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

TAPS = 5


@dataclasses.dataclass(frozen=True)
class DenoiserConfig:
    """The shape of a denoiser.

    Attributes:
        coordinates: numbers at each point of a trajectory.
        length: points of a trajectory; even.
        width: channels of level 1, a multiple of groups; level 2 has twice as many.
        groups: of each GroupNorm.
        steps: of the noise.
    """

    coordinates: int = 2
    length: int = 16
    width: int = 32
    groups: int = 8
    steps: int = 100

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{field.name} is {value!r}; it must be a whole number of at least 1.")
        if self.length % 2:
            raise ValueError(f"length is {self.length}; it must be even, as level 2 is half as long.")
        if self.width % 2 or self.width % self.groups:
            raise ValueError(f"width is {self.width}; it must be even, and a multiple of the {self.groups} groups.")


SMALL = DenoiserConfig()


def torch_group_norm_mish(x, groups, weight, bias, scale=None, shift=None, epsilon=1e-5):
    """scale · mish(GroupNorm(x)) + shift by PyTorch's operations.

    x: [batch, channels, length]; weight, bias: [channels]; scale, shift: [batch, channels], or None, both.
    """
    out = F.mish(F.group_norm(x, groups, weight, bias, epsilon))
    return out if scale is None else out * scale[:, :, None] + shift[:, :, None]


class ConvNormMish(nn.Module):
    """Conv1d -> GroupNorm -> Mish, and the scale and shift where there are some."""

    def __init__(self, inputs: int, outputs: int, groups: int, norm: Callable):
        super().__init__()
        self.convolution = nn.Conv1d(inputs, outputs, TAPS, padding=TAPS // 2)
        self.weight = nn.Parameter(torch.ones(outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.groups, self.norm = groups, norm

    def forward(self, x: torch.Tensor, scale=None, shift=None) -> torch.Tensor:
        """[batch, inputs, length] -> [batch, outputs, length]; scale, shift: [batch, outputs], or None, both."""
        return self.norm(self.convolution(x), self.groups, self.weight, self.bias, scale, shift)


class ResidualBlock(nn.Module):
    """Two times ConvNormMish, the first scaled and shifted by the time step, beside a 1 × 1 convolution."""

    def __init__(self, inputs: int, outputs: int, embedding: int, groups: int, norm: Callable):
        super().__init__()
        self.first = ConvNormMish(inputs, outputs, groups, norm)
        self.second = ConvNormMish(outputs, outputs, groups, norm)
        self.film = nn.Linear(embedding, 2 * outputs)
        self.around = nn.Conv1d(inputs, outputs, 1)
        with torch.no_grad():
            self.film.bias[:outputs] = 1.0  # the scale starts near 1
            self.film.bias[outputs:] = 0.0

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """x [batch, inputs, length], embedding [batch, embedding] -> [batch, outputs, length]."""
        scale, shift = self.film(embedding).chunk(2, dim=1)
        return self.second(self.first(x, scale, shift)) + self.around(x)


class Denoiser(nn.Module):
    """Predicts the noise in a trajectory, from the trajectory and the number of the step."""

    table: torch.Tensor
    kept: torch.Tensor

    def __init__(self, config: DenoiserConfig = SMALL, norm: Callable = torch_group_norm_mish):
        super().__init__()
        self.config = config
        width, embedding = config.width, 2 * config.width
        self.register_buffer("kept", kept_shares(config.steps), persistent=False)  # [steps]
        self.register_buffer("table", sinusoids(config.steps, width), persistent=False)  # [steps, width]
        self.embedding = nn.Sequential(
            nn.Linear(width, embedding), nn.Mish(), nn.Linear(embedding, embedding), nn.Mish()
        )
        others = embedding, config.groups, norm
        self.down = ResidualBlock(config.coordinates, width, *others)
        self.shorter = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.middle = ResidualBlock(width, 2 * width, *others)
        self.longer = nn.ConvTranspose1d(2 * width, width, 4, stride=2, padding=1)
        self.up = ResidualBlock(2 * width, width, *others)
        self.out = nn.Conv1d(width, config.coordinates, 1)

    def forward(self, noisy: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """The noise. noisy: [batch, coordinates, length]; steps: integers [batch], from 0. Returns noisy's shape."""
        embedding = self.embedding(self.table[steps])  # [batch, 2 · width]
        fine = self.down(noisy, embedding)  # [batch, width, length]
        coarse = self.middle(self.shorter(fine), embedding)  # [batch, 2 · width, length / 2]
        return self.out(self.up(torch.cat([self.longer(coarse), fine], dim=1), embedding))


def kept_shares(steps: int) -> torch.Tensor:
    """How much of a trajectory's variance is left after each step, float32 [steps]: the cosine schedule."""
    angles = (torch.arange(steps + 1, dtype=torch.float64) / steps + 0.008) / 1.008 * math.pi / 2
    cosines = angles.cos().square()
    lost = (1 - cosines[1:] / cosines[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - lost, dim=0).float()


def sinusoids(steps: int, width: int) -> torch.Tensor:
    """The sines and cosines of each step's number, float32 [steps, width]; width is even."""
    rates = torch.exp(-math.log(10_000) * torch.arange(width // 2) / (width // 2))
    angles = torch.arange(steps)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def toy_trajectories(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Paths from (-1, 0) to (1, 0) around an obstacle at the origin, [count, 2, length]: half to its left.

    Each bends by 0.6 to 1. Their mean would go straight through: a model that predicts one path cannot learn them.
    """
    along = torch.linspace(-1, 1, length).expand(count, length)
    bend = 0.6 + 0.4 * torch.rand(count, 1, generator=generator)
    side = torch.randint(2, (count, 1), generator=generator) * 2 - 1
    return torch.stack([along, side * bend * torch.cos(along * math.pi / 2)], dim=1)
