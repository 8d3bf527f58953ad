"""What every kernel in Gluon asks of the machine and of the strides of its inputs, each refusal in a sentence.

No Gluon is needed to ask.
"""

import functools
import importlib
from typing import NamedTuple

import torch

from course_lib.hardware.device import interpreting

HOPPER_DTYPES = (torch.float16, torch.bfloat16)
COPY_ENGINE_BYTES = 16  # addresses and strides of a tensor that the copy engine reads are multiples of it


class Generation(NamedTuple):
    """The GPUs that a kernel in Gluon is written for."""

    capability: tuple[int, int]
    card: str  # what to use
    only: str  # why no other will do
    names: str  # the module that imports what Triton must have


HOPPER = Generation(
    (9, 0), "a Hopper GPU", "the matrix instruction wgmma exists on 9.0 (H100, H200) alone",
    "course_lib.kernels.gluon.names",
)  # fmt: skip
BLACKWELL = Generation(
    (10, 0), "a B200", "the kernel is written for the tensor memory of 10.0 (B200)",
    "course_lib.kernels.blackwell.names",
)  # fmt: skip


class Refusal(NamedTuple):
    """Why the kernel cannot run, and what to raise when it was asked for by name."""

    error: type[Exception]
    reason: str


def machine_refusal(device: torch.device, generation: Generation = HOPPER) -> Refusal | None:
    """What the machine lacks for a kernel of this generation; None if nothing."""
    if interpreting():
        return Refusal(
            RuntimeError, f"kernels run in Triton's interpreter here, and Gluon has none; use {generation.card}."
        )
    return gpu_refusal(device, generation)


@functools.cache
def gpu_refusal(device: torch.device, generation: Generation = HOPPER) -> Refusal | None:
    """What this GPU, or the Triton beside it, lacks; None if nothing."""
    capability = torch.cuda.get_device_capability(device)
    if capability != generation.capability:
        return Refusal(
            RuntimeError,
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            f"{generation.only}.",
        )
    missing = missing_gluon(generation)
    return Refusal(RuntimeError, missing) if missing else None


def missing_gluon(generation: Generation = HOPPER) -> str | None:
    """Why Gluon cannot be used with this Triton, or None when it can."""
    try:
        importlib.import_module(generation.names)
    except ImportError as error:
        return str(error)
    return None


@functools.lru_cache(1024)
def stride_refusal(name: str, shape: tuple, strides: tuple, item_bytes: int) -> Refusal | None:
    """What the copy engine has against these strides, in elements; None if nothing."""
    for what, size, stride in zip(("batch", "head", "length"), shape, strides):
        # A dimension of size 1 is never stepped over, whatever its stride says.
        if size > 1 and (stride <= 0 or stride * item_bytes % COPY_ENGINE_BYTES):
            return Refusal(
                ValueError,
                f"{name} has stride {stride} in its {what} dimension; the copy engine wants a positive multiple of "
                f"{COPY_ENGINE_BYTES // item_bytes} elements ({COPY_ENGINE_BYTES} bytes). Call {name}.contiguous() "
                "first, with a head dimension that is such a multiple.",
            )
    return None
