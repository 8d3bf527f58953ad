"""Numbers on their way to the GPU: written on the host while earlier ones are still being copied.

A copy from ordinary memory makes the host wait until the GPU has done all that it was given before. A copy from
*pinned* memory does not: the GPU fetches the numbers when it comes to the copy. So they must stay as they are until
then, and the host writes the next ones into another block.
"""

import torch

BLOCKS = 4  # steps that the host may be ahead


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
