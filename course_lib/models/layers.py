"""The parts of a Llama-style block other than attention: RMSNorm, rotary positions, SwiGLU, experts.

RMSNorm(x) = x / √(mean(x²) + ε) · weight             Zhang and Sennrich, arXiv 1910.07467
rotary:      pair i of a head is turned by the angle position · base^(-2i / head_dim), so that the product of a
             query and a key depends on the distance of their positions alone. Su et al., arXiv 2104.09864
SwiGLU(x)  = (silu(x W_gate) · x W_up) W_down         Shazeer, arXiv 2002.05202
experts:     Σ over the chosen of weight · SwiGLU(x)    Shazeer et al., arXiv 1701.06538
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from course_lib.kernels.experts.mlp import expert_mlp_reference
from course_lib.kernels.experts.route import route


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


def rotary_angles(
    positions: torch.Tensor, head_dim: int, base: float, divisors: Sequence[float] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines that turn a head at these positions.

    positions: integers [...]. divisors: of the frequencies, as `ModelConfig.rotary_divisors`. Returns two float32
    tensors [..., head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    frequencies = base**-exponents  # [head_dim / 2]
    if divisors is not None:
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32, device=positions.device)
    angles = positions[..., None].float() * frequencies  # [..., head_dim / 2]
    return angles.cos(), angles.sin()


def llama3_divisors(
    head_dim: int, base: float, factor: float, low: float, high: float, first_context: int
) -> tuple[float, ...]:
    """By what Llama 3.1 divides each pair's frequency so that a context of `first_context` tokens becomes a longer one.

    A pair that turns more than `high` times within the first context is left as it is, one that turns less than `low`
    times is slowed down by `factor`, and between the two the frequency goes from one to the other in a straight line.
    Returns head_dim / 2 numbers. Source: Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, and the
    `rope_scaling` of its weights.
    """
    turns = [first_context * base ** (-pair / head_dim) / (2 * math.pi) for pair in range(0, head_dim, 2)]
    kept = [min(1.0, max(0.0, (turn - low) / (high - low))) for turn in turns]
    return tuple(1 / (share + (1 - share) / factor) for share in kept)


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


def renormalised(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The router of Mixtral and Qwen3: a softmax over all experts, of which the k largest are divided by their sum."""
    return route(logits, k, "renormalised")


class Experts(nn.Module):
    """The feed-forward block of a mixture of experts: a router chooses `chosen` of `count` SwiGLUs for each token.

    The matrices of all experts lie in one tensor for gate and up, and in one for down.
    """

    def __init__(self, width: int, hidden: int, count: int, chosen: int):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, count, bias=False)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * hidden, width))
        self.down = nn.Parameter(torch.empty(count, width, hidden))
        for matrices in (self.gate_up, self.down):  # as nn.Linear begins
            nn.init.uniform_(matrices, -(matrices.shape[2] ** -0.5), matrices.shape[2] ** -0.5)

    def forward(
        self, x: torch.Tensor, route: Callable = renormalised, mlp: Callable = expert_mlp_reference
    ) -> torch.Tensor:
        """[..., width] -> [..., width]; `route` and `mlp` as `Glue` has them."""
        rows = x.flatten(0, -2)
        experts, weights = route(self.router(rows), self.chosen)
        return mlp(rows, self.gate_up, self.down, experts, weights).view(x.shape)
