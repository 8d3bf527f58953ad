"""Numbers on their way to the GPU: written on the host while earlier ones are still being copied.

A copy from ordinary memory makes the host wait until the GPU has done all that it was given before. A copy from
*pinned* memory does not: the GPU fetches the numbers when it comes to the copy. So they must stay as they are until
then, and the host writes the next ones into another block.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch

BLOCKS = 4  # steps that the host may be ahead
ALIGNMENT = 16  # bytes, which a kernel loads at once


class Staging:
    """Some blocks of int64 numbers on the host, sent to one tensor on the device in turn.

    Args:
        target: int64 [size], contiguous, on any device.
        blocks: how many. Without a GPU there is one, since a copy is done when it returns.

    The host waits in `take` only where it is `blocks` steps ahead.
    """

    def __init__(self, target: torch.Tensor, blocks: int = BLOCKS):
        self.target, self._next = target, 0
        on_gpu = target.device.type == "cuda"
        self.blocks = [
            torch.zeros(target.shape, dtype=target.dtype, pin_memory=on_gpu) for _ in range(blocks if on_gpu else 1)
        ]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in self.blocks]

    def take(self) -> int:
        """The number of the block to write into; its last copy has ended."""
        event = self._copied[self._next]
        if event is not None:
            event.synchronize()  # at once where nothing was recorded
        return self._next

    def send(self) -> None:
        """Copy the block that was taken to the target, on the current stream, and go on to the next one."""
        self.target.copy_(self.blocks[self._next], non_blocking=True)
        event = self._copied[self._next]
        if event is not None:
            event.record()
        self._next = (self._next + 1) % len(self.blocks)


class StagedFields:
    """Named tensors that lie in one block of memory, here and on the device: one copy sends them all.

    Args:
        shapes: for each name the dtype and the sizes, as {"tables": (torch.int32, rows, columns)}.
        device: where they are sent.

    Attributes:
        on_device: the tensors there, zeros at first, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple], device: torch.device | str):
        self._places, end = {}, 0
        for name, (dtype, *sizes) in shapes.items():
            self._places[name] = end, dtype, sizes
            end += -(-math.prod(sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        block = torch.zeros(end // 8, dtype=torch.int64, device=device)
        self._staging = Staging(block)
        self.on_device = self._fields(block)
        self._on_host = [
            {name: field.numpy() for name, field in self._fields(one).items()} for one in self._staging.blocks
        ]

    def take(self) -> dict[str, np.ndarray]:
        """The fields to write into: all of them, as they were some steps ago."""
        return self._on_host[self._staging.take()]

    def send(self) -> None:
        """Copy what was written to the device, on the current stream."""
        self._staging.send()

    def _fields(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        numbers = block.view(torch.uint8)
        return {
            name: numbers[begin : begin + math.prod(sizes) * dtype.itemsize].view(dtype).view(sizes)
            for name, (begin, dtype, sizes) in self._places.items()
        }
