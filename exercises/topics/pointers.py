"""Memory as a kernel sees it, for meanings that `model_of` edits: a pointer and offsets.

What an access reaches outside a tensor is seen by the judge, and nothing happens where no model is at work.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from course_lib.checker.specification.model import reaches_outside


def load(
    tensor: torch.Tensor, offsets: torch.Tensor, mask: torch.Tensor | None = None, other: float = 0.0
) -> torch.Tensor:
    """What `tl.load(pointer + offsets, mask, other)` gives: NaN where the offset is outside the tensor's memory.

    tensor: any strides; its pointer is that of its first element. offsets: int64, in elements. The result has the
    offsets' shape. What lies between the tensor's own elements is its memory too, as in a slice of a larger one.
    """
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    memory = tensor.as_strided((span,), (1,))
    reached = offsets if mask is None else torch.where(mask, offsets, 0)
    if reached.numel() and int(reached.min()) >= 0 and int(reached.max()) < span:
        values = memory.take(reached)
        return values if mask is None else torch.where(mask, values, other).to(tensor.dtype)
    inside = (offsets >= 0) & (offsets < span)
    wanted = torch.ones_like(inside) if mask is None else mask.expand(offsets.shape)
    if bool((wanted & ~inside).any()):
        reaches_outside()
    values = memory[torch.where(inside, offsets, 0)]
    empty = math.nan if tensor.is_floating_point() else 0
    return torch.where(wanted, torch.where(inside, values, empty), other).to(tensor.dtype)


def store(values: torch.Tensor, offsets: torch.Tensor, program: torch.Tensor | None = None) -> torch.Tensor:
    """What `tl.store(pointer + offsets, values)` makes of new, contiguous memory of the values' shape.

    Where two values go to one place the later stays: that of the program with the higher number, where `program` gives
    each value's. NaN stands where nothing was written.
    """
    memory = torch.full((values.numel(),), math.nan, dtype=values.dtype)
    offsets, flat = offsets.expand(values.shape).flatten(), values.flatten()
    if torch.equal(offsets, torch.arange(len(flat))):
        return values  # each has its own place
    if program is not None:
        turn = program.expand(values.shape).flatten().argsort(stable=True)
        offsets, flat = offsets[turn], flat[turn]
    inside = (offsets >= 0) & (offsets < values.numel())
    if not bool(inside.all()):
        reaches_outside()
    offsets, flat = offsets[inside], flat[inside]
    order = torch.arange(len(offsets))
    last = torch.full((values.numel(),), -1).scatter_reduce(0, offsets, order, "amax")
    memory[last >= 0] = flat[last[last >= 0]]
    return memory.view(values.shape)


def put(memory: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """What `tl.store(pointer + offsets, values, mask)` does to contiguous memory; of two values the later one stays."""
    places, moved = np.broadcast_arrays(offsets.numpy(), _as_array(values.to(memory.dtype)))
    inside = (places >= 0) & (places < memory.numel())
    wanted = None if mask is None else np.broadcast_to(mask.numpy(), places.shape)
    if not (inside if wanted is None else inside | ~wanted).all():
        reaches_outside()
    stored = inside if wanted is None else inside & wanted
    _as_array(memory.view(-1))[places[stored]] = moved[stored]


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory for NumPy, whose steps on small tensors are several times shorter; bfloat16 by its bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
