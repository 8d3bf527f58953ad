"""What products ask of their arguments, and the sentences that say so."""

import torch

from course_lib.kernels.common.checks import (
    check_contiguous,
    check_dimensions,
    check_runnable,
    check_same,
    check_tensor,
)
from course_lib.kernels.fused.checks import check_epsilon, check_weight
from course_lib.kernels.products.epilogue import ACTIVATIONS
from course_lib.kernels.products.tiles import LEAST_ROWS, MOST_ROWS, FewRowsTiles


def check_operands(x, weight, gated=False, residual=None, empty_allowed=True) -> int:
    """How many columns the result has. empty_allowed: x may have no rows."""
    check_matrix("x", x, "[rows, inner]", empty_allowed)
    check_matrix("weight", weight, "[outer, inner]")
    check_same("weight", weight, "x", x, inner_dimension=(weight.shape[1], x.shape[1]))
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; gated, it must have as many for up as for the gate.")
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if residual is not None:
        check_matrix("residual", residual, "[rows, columns]", empty_allowed)
        check_same("residual", residual, "x", x, shape=(tuple(residual.shape), (x.shape[0], columns)))
    return columns


def check_product(x, weight, bias, activation, residual, gated) -> int:
    """How many columns the result has."""
    columns = check_operands(x, weight, gated, residual)
    if bias is not None:
        check_weight(bias, x, "bias", weight.shape[0], "row of weight, for the columns")
    if activation not in (None, *ACTIVATIONS):
        raise ValueError(f"activation is {activation!r}; it must be None or one of {', '.join(ACTIVATIONS)}.")
    if gated and activation is not None:
        raise ValueError(
            f"activation is {activation!r} and gated is True; the gate has an activation of its own, silu."
        )
    return columns


def check_parts(name: str, parts) -> None:
    """Raise a ValueError unless it is None or a number of parts."""
    if parts is not None and (isinstance(parts, bool) or not isinstance(parts, int) or parts < 1):
        raise ValueError(f"{name} is {parts!r}; it must be None or an int of at least 1.")


def check_arguments(x, weight, squares, epsilon, gated, residual, gain) -> int:
    """How many columns the result has. squares: those of `Unscaled` rows x; None for a tensor x."""
    columns = check_operands(x, weight, gated, residual, empty_allowed=False)
    if x.shape[0] > MOST_ROWS:
        raise ValueError(
            f"x has {x.shape[0]} rows; at most {MOST_ROWS} are allowed. Use torch.nn.functional.linear for more."
        )
    check_norm_before(x, squares, epsilon)
    if gain is not None:
        check_weight(gain, x, "gain", columns, "column of the result")
    return columns


def check_norm_before(x, squares, epsilon) -> None:
    if (squares is None) != (epsilon is None):
        given = f"epsilon is {epsilon!r}; it" if squares is None else "epsilon is None; it"
        raise ValueError(f"{given} belongs to Unscaled rows: pass both, or a tensor x and no epsilon.")
    if squares is not None:
        check_epsilon(epsilon)
        check_tensor("squares", squares, (torch.float32,))
        check_contiguous("squares", squares)
        if squares.dim() != 2 or squares.shape[0] != x.shape[0] or squares.shape[1] < 1 or squares.device != x.device:
            raise ValueError(
                f"squares has shape {tuple(squares.shape)} on {squares.device}; it must be [{x.shape[0]}, parts], on "
                f"{x.device}."
            )


def check_matrix(name: str, tensor, dimensions: str, empty_allowed: bool = False) -> None:
    check_runnable(name, tensor)
    check_dimensions(name, tensor, dimensions, empty_allowed)
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(
            f"{name} has strides {tensor.stride()}; its rows must be contiguous (stride 1). "
            f"Call {name}.contiguous() first."
        )


def check_out(out, shape: tuple[int, int], x, weight, residual) -> None:
    check_matrix("out", out, "[rows, columns]")
    if tuple(out.shape) != shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be {shape}.")
    if out.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"out has dtype {out.dtype}; allowed are that of x, {x.dtype}, and torch.float32.")
    if out.device != x.device:
        raise ValueError(f"out is on device {out.device}; it must be on that of x, {x.device}.")
    if shape[0] > 1 and out.stride(0) < shape[1]:
        raise ValueError(f"out has strides {out.stride()}; its rows of {shape[1]} numbers must not overlap.")
    for name, other in (("x", x), ("weight", weight), ("residual", residual)):
        if other is None or name == "residual" and placed(out) == placed(other):
            continue
        if addresses(out).start < addresses(other).stop and addresses(other).start < addresses(out).stop:
            raise ValueError(f"out overlaps {name}, which other programs still read; pass memory of its own.")


def placed(matrix: torch.Tensor) -> tuple:
    return matrix.data_ptr(), matrix.stride(), matrix.dtype


def addresses(matrix: torch.Tensor) -> range:
    """From the first byte to behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(matrix.shape, matrix.stride()))
    return range(matrix.data_ptr(), matrix.data_ptr() + (last + 1) * matrix.element_size())


def check_tiles(tiles) -> None:
    if not isinstance(tiles, FewRowsTiles):
        raise ValueError(f"tiles is a {type(tiles).__name__}; it must be a FewRowsTiles, or None.")
    if any(size < LEAST_ROWS or size & (size - 1) for size in (tiles.outer, tiles.inner)) or tiles.splits < 1:
        raise ValueError(
            f"tiles is {tiles}; outer and inner must be powers of two, at least {LEAST_ROWS}, and splits at least 1."
        )
