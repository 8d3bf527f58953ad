"""What stands between a decoder's matrix products and its attention, as PyTorch's operations or as fused kernels.

    Decoder(config)                      # TORCH: each step an operation
    Decoder(config, glue=FUSED)          # the kernels of course_lib.kernels.fused, with their gradients
    model.glue = FUSED                   # the weights do not depend on it

    what                            PyTorch, reads and writes of a row       fused
    addition, then RMSNorm          of the addition 3, of the norm 2 or more      4
    silu(gate) · up                 5                                             3
    logits and their loss           the logits several times                      logits in chunks, never whole
    experts                         expert by expert                              all of them in three launches

The residual stream's additions stand before the norms here: a block hands on what its feed-forward gave, and the next
block adds it in the kernel that normalises.
"""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

from course_lib.kernels.experts.mlp import expert_mlp, expert_mlp_reference
from course_lib.kernels.fused import linear_cross_entropy_operators, norm_operators, swiglu_operators
from course_lib.models.layers import RMSNorm, renormalised


@dataclasses.dataclass(frozen=True)
class Glue:
    """Six functions; autograd must pass through them where a model is trained.

    Attributes:
        normalise: `normalise(x, norm)` gives RMSNorm of x [..., width] by the module `norm`, which holds the weight
            [width] and epsilon.
        add_and_normalise: `add_and_normalise(update, x, norm)` gives (normalised, summed) of x + update.
        gated: `gated(gate, up)` gives silu(gate) · up, all [..., hidden].
        loss: `loss(hidden, weight, targets)` gives the mean cross-entropy of hidden · weightᵀ, in nats: hidden
            [rows, width], weight [vocabulary, width], targets int64 [rows]. None computes the logits, and their loss.
        route: `route(logits, k)` gives each row's (experts, weights), both [rows, k], of logits [rows, experts], as
            `course_lib.kernels.experts.route` explains them. This and the next are for a model with experts.
        experts: `experts(x, gate_up, down, experts, weights)` gives the experts' block of x [rows, width], as
            `course_lib.kernels.experts.mlp` explains it.
    """

    normalise: Callable[[torch.Tensor, RMSNorm], torch.Tensor]
    add_and_normalise: Callable[[torch.Tensor, torch.Tensor, RMSNorm], tuple[torch.Tensor, torch.Tensor]]
    gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    route: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]] = renormalised
    experts: Callable[..., torch.Tensor] = expert_mlp_reference


def _torch_add_and_normalise(update, x, norm):
    summed = x + update
    return norm(summed), summed


TORCH = Glue(
    normalise=lambda x, norm: norm(x),
    add_and_normalise=_torch_add_and_normalise,
    gated=lambda gate, up: F.silu(gate) * up,
)
FUSED = Glue(
    normalise=lambda x, norm: norm_operators.rms_norm(x, norm.weight, norm.epsilon),
    add_and_normalise=lambda update, x, norm: norm_operators.add_rms_norm(update, x, norm.weight, norm.epsilon),
    gated=swiglu_operators.swiglu,
    loss=linear_cross_entropy_operators.linear_cross_entropy,
    experts=expert_mlp,
)
