"""Cross-entropy as operators of PyTorch: one with a gradient, and one that writes the gradient over the logits.

Why operators, and what is registered for one, is told in `course_lib.kernels.attention.operator`. The one in place
changes an argument, which its schema says (`Tensor(a!)`); autograd takes no derivative of it, it is one.
"""

import torch

from course_lib.kernels.fused.cross_entropy import (
    IGNORE_INDEX,
    cross_entropy_backward,
    cross_entropy_forward,
    cross_entropy_forward_backward_,
)
from course_lib.kernels.fused.gradients import no_second_derivative

REDUCTIONS = ("mean", "sum", "none")
FORWARD = "(Tensor logits, Tensor targets, int ignore_index, bool validate) -> (Tensor, Tensor)"
BACKWARD = "(Tensor logits, Tensor targets, Tensor statistics, Tensor loss_gradient, int ignore_index) -> Tensor"
IN_PLACE = "(Tensor(a!) logits, Tensor targets, Tensor loss_gradient, int ignore_index, bool validate) -> Tensor"


@torch.library.custom_op("course_lib::cross_entropy", mutates_args=(), schema=FORWARD)
def cross_entropy_operator(logits, targets, ignore_index, validate):
    return cross_entropy_forward(logits, targets, ignore_index, validate)


@cross_entropy_operator.register_fake
def _(logits, targets, ignore_index, validate):
    losses = logits.new_empty(targets.shape, dtype=torch.float32)
    return losses, logits.new_empty((*targets.shape, 2), dtype=torch.float32)


@torch.library.custom_op("course_lib::cross_entropy_backward", mutates_args=(), schema=BACKWARD)
def cross_entropy_backward_operator(logits, targets, statistics, loss_gradient, ignore_index):
    return cross_entropy_backward(logits, targets, statistics, loss_gradient, ignore_index)


@cross_entropy_backward_operator.register_fake
def _(logits, targets, statistics, loss_gradient, ignore_index):
    return logits.new_empty(logits.shape)


@torch.library.custom_op("course_lib::cross_entropy_forward_backward_", mutates_args=("logits",), schema=IN_PLACE)
def cross_entropy_in_place_operator(logits, targets, loss_gradient, ignore_index, validate):
    return cross_entropy_forward_backward_(logits, targets, loss_gradient, ignore_index, validate)


@cross_entropy_in_place_operator.register_fake
def _(logits, targets, loss_gradient, ignore_index, validate):
    return logits.new_empty(targets.shape, dtype=torch.float32)


def keep_logits(ctx, inputs, output):
    logits, targets, ctx.ignore_index, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, targets, output[1])


def gradients(ctx, loss_gradient, _):
    return cross_entropy_backward_operator(*ctx.saved_tensors, loss_gradient, ctx.ignore_index), None, None, None


cross_entropy_operator.register_autograd(gradients, setup_context=keep_logits)
cross_entropy_backward_operator.register_autograd(no_second_derivative("cross-entropy"))


def cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="mean", validate=True):
    """Cross-entropy with a gradient, for autograd and `torch.compile`; as torch.nn.functional.cross_entropy.

    Args:
        logits, targets, ignore_index, validate: as for `cross_entropy_forward`.
        reduction: "mean" over the targets that count, "sum", or "none".

    Returns a float32 scalar, or [...] for "none". The mean over no target is NaN, as in PyTorch, and its gradient 0.
    Raises a ValueError that names the argument; for a second derivative a RuntimeError.
    """
    check_reduction(reduction)
    losses, _ = cross_entropy_operator(logits, targets, ignore_index, validate)
    return reduced(losses, targets, ignore_index, reduction)


def cross_entropy_(logits, targets, ignore_index=IGNORE_INDEX, reduction="mean", validate=True):
    """The loss, and the logits overwritten by its gradient ("none": by the gradient of the sum), in one launch.

    Arguments, result and errors are those of `cross_entropy`. Autograd knows nothing of it, so hand it the detached
    logits, which share their memory, and go on from there with the gradient that they now hold:

        logits = hidden @ weight.t()
        loss = cross_entropy_(logits.detach(), targets)
        logits.backward(logits.detach())
    """
    check_reduction(reduction)
    if logits.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "logits requires a gradient, and this function overwrites it by one, unseen by autograd. Pass "
            "logits.detach(), or use cross_entropy."
        )
    scale = logits.new_ones((), dtype=torch.float32)
    if reduction == "mean":
        scale = scale / (targets != ignore_index).sum()
    losses = cross_entropy_in_place_operator(logits, targets, scale.expand(targets.shape), ignore_index, validate)
    return reduced(losses, targets, ignore_index, reduction)


def check_reduction(reduction) -> None:
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed are {', '.join(map(repr, REDUCTIONS))}.")


def reduced(losses, targets, ignore_index: int, reduction: str) -> torch.Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != ignore_index).sum()
