"""What the backward pass on Hopper asks of the machine and of its inputs; no Gluon is needed to ask."""

from course_lib.kernels.gluon.limits import Refusal
from course_lib.kernels.hopper.limits import hopper_refusal

MAX_HEAD_DIM = 128  # dK and dV of 64 keys: at 256 they alone would take all registers of a thread


def backward_refusal(query, key, value, *, window=None) -> Refusal | None:
    """What stands against the Hopper kernel for the gradients of these inputs; None if nothing.

    The inputs are taken to have passed `check_attention_inputs`.
    """
    return hopper_refusal(query, key, value) or shape_refusal(query, window)


def shape_refusal(query, window) -> Refusal | None:
    """What about shape and mask the Hopper kernel cannot take, though the portable ones can; None if nothing."""
    if query.shape[3] > MAX_HEAD_DIM:
        return Refusal(
            ValueError,
            f"query has head dimension {query.shape[3]}; the backward kernel for Hopper takes up to {MAX_HEAD_DIM}.",
        )
    if window is not None:
        return Refusal(ValueError, f"window is {window}; the backward kernel for Hopper knows none.")
    return None
