"""What the fused kernels ask of their arguments beside what every kernel does, and the sentences that say so."""

import math

import torch

from course_lib.kernels.common.checks import FLOAT_DTYPES, check_contiguous, check_tensor


def check_weight(weight, x: torch.Tensor, name: str = "weight", size: int | None = None, each: str = "column") -> None:
    """Raise a ValueError unless it is a vector for the columns of x, or for `size` of what `each` names.

    Its dtype must be that of x or float32.
    """
    check_tensor(name, weight, FLOAT_DTYPES)
    size = x.shape[-1] if size is None else size
    if weight.shape != (size,):
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}; it must be ({size},), one number for each {each} of x."
        )
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"{name} has dtype {weight.dtype}; allowed are that of x, {x.dtype}, and torch.float32.")
    if weight.device != x.device:
        raise ValueError(f"{name} is on device {weight.device}; it must be on that of x, {x.device}.")
    check_contiguous(name, weight)


def check_epsilon(epsilon) -> None:
    """Raise a ValueError unless it is a finite number of at least 0."""
    number = isinstance(epsilon, (int, float)) and not isinstance(epsilon, bool)
    if not number or not math.isfinite(epsilon) or epsilon < 0:
        raise ValueError(f"epsilon is {epsilon!r}; it must be a finite number of at least 0.")
