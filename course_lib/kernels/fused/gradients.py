"""What the fused operators share about gradients."""

from collections.abc import Callable

import torch

from course_lib.kernels.common.checks import as_rows


def no_second_derivative(name: str) -> Callable:
    """The derivative to register for a backward operator: none, in a sentence."""

    def refuse(ctx, *_):
        raise RuntimeError(
            f"The backward pass of {name} has no derivative of its own here. A second derivative (create_graph=True, a "
            "gradient penalty) has to go through PyTorch's operations: use the function named *_reference that stands "
            "beside the kernel."
        )

    return refuse


def rows_of_gradient(tensor: torch.Tensor) -> torch.Tensor:
    """A gradient as rows. Autograd decides how it lies, with strides of 0 behind a sum, so it may have to be copied."""
    try:
        return as_rows("gradient", tensor)
    except ValueError:
        return as_rows("gradient", tensor.contiguous())
