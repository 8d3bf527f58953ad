"""Tensors whose elements lie gigabytes apart, in memory of which only the pages that are touched exist.

An offset that is worked out in 32 bits is right up to 2³¹ elements. Whether an answer counts further is seen on three
rows 2³⁰ elements apart, and these cost no more memory than three rows.
"""

from __future__ import annotations

import mmap
import sys

import torch

FAR = 1 << 31  # elements: a tensor that reaches so far cannot be copied gaps and all, and an int32 offset overflows
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x40 if sys.platform == "darwin" else 0x4000)


def extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last in memory, both counted."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def is_far(tensor: torch.Tensor) -> bool:
    """Whether its elements lie so far apart that they came from `apart`."""
    return extent(tensor) > FAR


def apart(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The same values with these strides, in memory of which the gaps take no room. They read as zeros.

    Raises:
        OSError: this system does not hand out so large a range of addresses.
    """
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides))
    # Shared, because the limit on a process's memory counts what is private in full.
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, elements * tensor.element_size(), flags=flags)
    laid_out = torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, strides)
    return laid_out.copy_(tensor)
