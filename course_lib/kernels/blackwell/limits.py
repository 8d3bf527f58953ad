"""What the Blackwell kernel of attention asks of the machine and its inputs, each refusal in a sentence; no Gluon."""

import functools

import torch

from course_lib.hardware.device import interpreting
from course_lib.kernels.gluon.limits import Refusal
from course_lib.kernels.hopper.limits import input_refusal

BLACKWELL_CAPABILITY = (10, 0)
MOST_HEAD_DIM = 128  # two outputs of more would leave tensor memory no columns for two tiles of scores


def blackwell_refusal(query, key, value) -> Refusal | None:
    """What stands against the Blackwell kernel for these inputs; None if nothing.

    The inputs, of shape [batch, heads, length, head_dim], are taken to have passed `check_attention_inputs`.
    """
    refusal = blackwell_machine_refusal(query.device) or input_refusal(query, key, value, "Blackwell")
    if refusal is None and query.shape[3] > MOST_HEAD_DIM:
        return Refusal(
            ValueError, f"query has head dimension {query.shape[3]}; the Blackwell kernel takes up to {MOST_HEAD_DIM}."
        )
    return refusal


def blackwell_machine_refusal(device: torch.device) -> Refusal | None:
    """What the machine lacks for the Blackwell kernel; None if nothing."""
    if interpreting():
        return Refusal(RuntimeError, "kernels run in Triton's interpreter here, and Gluon has none; use a B200.")
    return blackwell_gpu_refusal(device)


@functools.cache
def blackwell_gpu_refusal(device: torch.device) -> Refusal | None:
    """What this GPU, or the Triton beside it, lacks; None if nothing."""
    capability = torch.cuda.get_device_capability(device)
    if capability != BLACKWELL_CAPABILITY:
        return Refusal(
            RuntimeError,
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; the kernel "
            "is written for the tensor memory of 10.0 (B200).",
        )
    try:
        import course_lib.kernels.blackwell.names  # noqa: F401
    except ImportError as error:
        return Refusal(RuntimeError, str(error))
    return None
