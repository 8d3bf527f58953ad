"""What the matrix product for Hopper asks of its inputs, each refusal in a sentence; no Gluon is needed to ask."""

from course_lib.kernels.common.checks import check_dimensions, check_runnable, check_same
from course_lib.kernels.fused.checks import check_weight
from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, HOPPER_DTYPES, Refusal, machine_refusal


def hopper_product_refusal(x, weight, residual, out) -> Refusal | None:
    """What stands against the Hopper kernel for these matrices; None if nothing.

    x [rows, inner], weight [outer, inner], residual [rows, columns] or None, and out are taken to have rows of
    contiguous numbers, and to fit one another.
    """
    return machine_refusal(x.device) or matrices_refusal(x, weight, residual, out)


def matrices_refusal(x, weight, residual, out) -> Refusal | None:
    """What about the matrices the Hopper kernel cannot take, though a portable one can; None if nothing."""
    if x.dtype not in HOPPER_DTYPES or out.dtype != x.dtype:
        return Refusal(
            ValueError,
            f"x has dtype {x.dtype} and out {out.dtype}; the product for Hopper takes torch.float16 or torch.bfloat16, "
            "both the same.",
        )
    for name, matrix in (("x", x), ("weight", weight), ("residual", residual), ("out", out)):
        if matrix is None:
            continue
        if matrix.data_ptr() % COPY_ENGINE_BYTES:
            return Refusal(
                ValueError,
                f"{name} begins {matrix.data_ptr() % COPY_ENGINE_BYTES} bytes after a multiple of {COPY_ENGINE_BYTES}; "
                f"the copy engine wants none. Call {name}.clone() first.",
            )
        stride = matrix.stride(0)
        if matrix.shape[0] > 1 and (stride <= 0 or stride * matrix.element_size() % COPY_ENGINE_BYTES):
            return Refusal(
                ValueError,
                f"{name} has stride {stride} between its rows; the copy engine wants a positive multiple of "
                f"{COPY_ENGINE_BYTES // matrix.element_size()} numbers ({COPY_ENGINE_BYTES} bytes). Pad its rows.",
            )
    return None


def check_product(x, weight, bias, activation, residual, gated: bool) -> int:
    """How many columns the result has. Raises a ValueError, in a sentence, for arguments that don't fit one another."""
    for name, matrix, dimensions in (
        ("x", x, "[rows, inner]"),
        ("weight", weight, "[outer, inner]"),
        ("residual", residual, "[rows, columns]"),
    ):
        if name == "residual" and matrix is None:
            continue
        check_dimensions(name, matrix, dimensions, empty_allowed=name != "weight")
        check_runnable(name, matrix)
        if matrix.stride(1) != 1 and matrix.shape[1] > 1:
            raise ValueError(
                f"{name} has strides {matrix.stride()}; its rows must be contiguous (stride 1). "
                f"Call {name}.contiguous() first."
            )
    check_same("weight", weight, "x", x, inner_dimension=(weight.shape[1], x.shape[1]))
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; gated, it must have as many for up as for the gate.")
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    if bias is not None:
        check_weight(bias, x, "bias", weight.shape[0], "row of the weight; not")
    if activation not in (None, "gelu") or gated and activation is not None:
        allowed = "None, with a gate" if gated else 'None and "gelu"'
        raise ValueError(f"activation is {activation!r}; allowed is {allowed}.")
    if residual is not None:
        check_same("residual", residual, "x", x, shape=(tuple(residual.shape), (x.shape[0], columns)))
    return columns
