"""What kernels are cut by: the GPU's architecture and its number of multiprocessors."""

import functools

import torch
import triton

from course_lib.hardware.device import interpreting

# Few programs, since each costs the interpreter half a millisecond, and enough that tests split.
INTERPRETED_MULTIPROCESSORS = 4
TRITON = tuple(int(number) for number in triton.__version__.split(".")[:2])  # (3, 9)


@functools.cache
def architecture_of(device: torch.device) -> int | None:
    """90 for compute capability 9.0; None in the interpreter."""
    if interpreting():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessor_count(device: torch.device) -> int:
    """Of the GPU that the device is; a small number in the interpreter."""
    if interpreting():
        return INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
