"""What the products of experts ask of their arguments, and the sentences that say so."""

import torch

from course_lib.kernels.common.checks import check_contiguous, check_dimensions, check_runnable, check_same
from course_lib.kernels.experts.arrange import Arrangement
from course_lib.kernels.products.checks import check_matrix


def check_grouped(x, weight, arrangement: Arrangement, gathered: bool, gated: bool, transposed: bool, tiles) -> int:
    """How many columns the result has."""
    check_matrix("x", x, "[tokens, inner]" if gathered else "[places, inner]", empty_allowed=True)
    check_experts_weight("weight", weight, "[experts, inner, outer]" if transposed else "[experts, outer, inner]", x)
    outer, inner = weight.shape[:0:-1] if transposed else weight.shape[1:]
    check_same("weight", weight, "x", x, inner_dimension=(inner, x.shape[1]))
    if gated and transposed:
        raise ValueError(
            "gated and transposed are both True; the gate has its rows one after another: drop transposed."
        )
    if gated and outer % 2:
        raise ValueError(f"weight has {outer} rows; gated, it must have as many for up as for the gate.")
    rows, what = (len(arrangement.places), "tokens") if gathered else (len(arrangement.slots), "places")
    if len(x) != rows:
        raise ValueError(f"x has {len(x)} rows; the arrangement has {rows} {what}.")
    if len(arrangement.first_tiles) != len(weight) + 1:
        raise ValueError(
            f"weight has {len(weight)} experts; the arrangement was made for {len(arrangement.first_tiles) - 1}."
        )
    if rows and tiles is not None and tiles.rows != arrangement.block:
        raise ValueError(
            f"tiles has {tiles.rows} rows; the arrangement was made for tiles of {arrangement.block}. Read with other "
            "tiles, rows would meet the weights of other experts."
        )
    return outer // 2 if gated else outer


def check_experts_weight(name: str, weight, dimensions: str, x) -> None:
    """Raise a ValueError unless it is a runnable matrix for each expert, of x's kind, with contiguous rows."""
    check_runnable(name, weight)
    check_dimensions(name, weight, dimensions)
    check_same(name, weight, "x", x)
    if weight.stride(2) != 1 and weight.shape[2] > 1:
        raise ValueError(
            f"{name} has strides {weight.stride()}; the rows of each expert's matrix must be contiguous (stride 1). "
            f"Call {name}.contiguous() first."
        )


def check_weights(name: str, weights, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise a ValueError unless these are contiguous float32 routing weights, one for each choice."""
    if not isinstance(weights, torch.Tensor):
        raise ValueError(f"{name} is a {type(weights).__name__}; it must be a torch.Tensor.")
    if weights.shape != shape or weights.dtype != torch.float32 or weights.device != device:
        raise ValueError(
            f"{name} has shape {tuple(weights.shape)}, dtype {weights.dtype} and device {weights.device}; it must be "
            f"{tuple(shape)}, torch.float32, on {device}: one number for each choice."
        )
    check_contiguous(name, weights)


def check_expert_mlp(x, gate_up, down, experts, weights) -> None:
    check_matrix("x", x, "[tokens, width]", empty_allowed=True)
    check_experts_weight("gate_up", gate_up, "[experts, 2 * hidden, width]", x)
    check_experts_weight("down", down, "[experts, width, hidden]", x)
    count, width = len(gate_up), x.shape[1]
    if gate_up.shape[2] != width or gate_up.shape[1] % 2:
        raise ValueError(
            f"gate_up has shape {tuple(gate_up.shape)}; it must be [experts, 2 * hidden, {width}], the rows of a gate "
            "and as many of up."
        )
    wanted = (count, width, gate_up.shape[1] // 2)
    if down.shape != wanted:
        raise ValueError(f"down has shape {tuple(down.shape)}; with this gate_up it must be {wanted}.")
    check_dimensions("experts", experts, "[tokens, k]", empty_allowed=True)
    if len(experts) != len(x) or experts.device != x.device:
        raise ValueError(
            f"experts has {len(experts)} rows on {experts.device}; it must have one for each of x's {len(x)}, on "
            f"{x.device}."
        )
    check_weights("weights", weights, experts.shape, x.device)
