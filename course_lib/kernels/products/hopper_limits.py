"""What the matrix product for Hopper asks of its inputs, each refusal in a sentence; no Gluon is needed to ask."""

from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, HOPPER_DTYPES, Refusal, machine_refusal

ACTIVATION = "gelu_tanh"  # the one that the kernel has


def hopper_product_refusal(x, weight, residual, out, activation=None) -> Refusal | None:
    """What stands against the Hopper kernel for these arguments; None if nothing.

    They are taken to have passed `check_product`.
    """
    if activation not in (None, ACTIVATION):
        return Refusal(ValueError, f"activation is {activation!r}; the Hopper kernel has None and {ACTIVATION!r}.")
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
