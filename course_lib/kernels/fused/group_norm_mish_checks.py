"""What GroupNorm with Mish asks of its arguments, in every form of it, and the sentences that say so."""

from course_lib.kernels.common.checks import FLOAT_DTYPES, check_alike, check_tensor
from course_lib.kernels.fused.checks import check_weight


def check(x, groups, weight, bias, scale, shift) -> None:
    """What both passes ask of the forward pass's arguments."""
    check_tensor("x", x, FLOAT_DTYPES)
    check_channels("x", x)
    check_groups(groups, x.shape[1])
    check_film(scale, shift, x, x.shape[1])
    for name, vector in (("weight", weight), ("bias", bias)):
        check_weight(vector, x, name, x.shape[1], "channel")


def check_channels(name: str, x) -> None:
    """Raise a ValueError unless it is [batch, channels, length] with contiguous rows that are not empty."""
    if x.dim() != 3 or 0 in x.shape[1:]:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}; it must be [batch, channels, length], with at least one channel and "
            "one position."
        )
    if x.shape[2] > 1 and x.stride(2) != 1:
        raise ValueError(
            f"{name} has strides {x.stride()}; its last dimension must be contiguous (stride 1). "
            f"Call {name}.contiguous() first."
        )


def check_groups(groups, channels: int) -> None:
    whole = isinstance(groups, int) and not isinstance(groups, bool)
    if not whole or groups < 1 or channels % groups:
        raise ValueError(
            f"groups is {groups!r} for {channels} channels; it must be a whole number of at least 1 that divides them."
        )


def check_film(scale, shift, x, channels: int) -> None:
    """Raise a ValueError unless scale and shift are both None, or both [batch, channels] of x's dtype."""
    if (scale is None) != (shift is None):
        given, missing = ("shift", "scale") if scale is None else ("scale", "shift")
        raise ValueError(f"{missing} is None beside a {given}; pass both, or neither.")
    if scale is None:
        return
    wanted = x.new_empty((x.shape[0], channels))
    for name, tensor in (("scale", scale), ("shift", shift)):
        check_tensor(name, tensor, FLOAT_DTYPES)
        check_alike(name, tensor, "[batch, channels] of x", wanted)
        if channels > 1 and tensor.stride(1) != 1:
            raise ValueError(
                f"{name} has strides {tensor.stride()}; its last dimension must be contiguous (stride 1). "
                f"Call {name}.contiguous() first."
            )
