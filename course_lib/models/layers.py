"""The parts of a Llama-style block other than attention: RMSNorm, rotary positions, SwiGLU.

RMSNorm(x) = x / √(mean(x²) + ε) · weight             Zhang and Sennrich, arXiv 1910.07467
rotary:      pair i of a head is turned by the angle position · base^(-2i / head_dim), so that the product of a
             query and a key depends on the distance of their positions alone. Su et al., arXiv 2104.09864
SwiGLU(x)  = (silu(x W_gate) · x W_up) W_down         Shazeer, arXiv 2002.05202
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    """Divide each vector by its root mean square, and scale it by a learned weight. [..., width] -> [..., width]."""

    def __init__(self, width: int, epsilon: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean square is taken in float32, whatever x is stored in."""
        wide = x.float()
        inverse = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.epsilon)
        return (wide * inverse).to(x.dtype) * self.weight


def rotary_angles(positions: torch.Tensor, head_dim: int, base: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that turn a head at these positions.

    positions: integers [...]. Returns two float32 tensors [..., head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions[..., None].float() * base**-exponents  # [..., head_dim / 2]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turn every head by its position's angles.

    x: [batch, heads, tokens, head_dim]; cosine, sine: [batch, tokens, head_dim / 2]. Element i is paired with element
    i + head_dim / 2, as in the released Llama weights for Hugging Face. Returns x's shape and dtype.
    """
    cosine, sine = cosine[:, None], sine[:, None]  # [batch, 1, tokens, head_dim / 2]: the same for every head
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(x.dtype)


class SwiGLU(nn.Module):
    """The feed-forward block: a gate and a value side by side, multiplied, and projected back."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, gated: Callable | None = None) -> torch.Tensor:
        """[..., width] -> [..., width]; `gated(gate, up)` gives silu(gate) · up, by PyTorch's operations when None."""
        gate, up = self.gate(x), self.up(x)
        return self.down(F.silu(gate) * up if gated is None else gated(gate, up))
