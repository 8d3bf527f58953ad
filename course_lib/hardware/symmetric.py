"""Memory of each rank that the kernels of all ranks read and write: a buffer of one size on every rank.

    buffer = SymmetricBuffer(ranks, 1 << 20)
    buffer.addresses        # int64 [ranks], where a kernel of this rank finds the buffer of each
    buffer.of(1)            # rank 1's buffer, as a tensor of bytes here
    buffer.own              # this rank's

On GPUs it is PyTorch's symmetric memory, which maps what the other GPUs of a host have, over NVLink or PCIe, and never
takes multicast. Without a GPU it is a file that all processes map, so that the same kernels run in the interpreter, one
process a rank, in whatever order these happen to run.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as distributed

from course_lib.hardware.ranks import Ranks


class SymmetricBuffer:
    """A buffer on every rank, full of zeros at first. All ranks make it together.

    Args:
        ranks: this process's place; with more than one rank inside `run_on_ranks`.
        nbytes: of each rank's buffer, the same on all.

    Attributes:
        own: uint8 [nbytes], this rank's memory.
        addresses: int64 [ranks] on its device.

    Raises:
        ValueError: the ranks ask for different sizes, or cannot see each other's memory.
    """

    def __init__(self, ranks: Ranks, nbytes: int):
        refusal = no_common_memory(ranks)
        if refusal is not None:
            raise ValueError(refusal)
        self._parts: list[torch.Tensor]
        if ranks.size == 1:
            self._parts = [torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)]
        else:
            ranks.agree(nbytes=nbytes)
            self._parts = _on_gpus(ranks, nbytes) if ranks.device.type == "cuda" else _in_a_file(ranks, nbytes)
        self.own = self._parts[ranks.rank]
        self.addresses = torch.tensor([part.data_ptr() for part in self._parts], device=ranks.device)

    def of(self, rank: int) -> torch.Tensor:
        """A rank's buffer, uint8 [nbytes]: a copy into it goes over the link."""
        return self._parts[rank]


def no_common_memory(ranks: Ranks) -> str | None:
    """Why the ranks' GPUs cannot read each other's memory, or None where they can."""
    if ranks.device.type != "cuda":
        return None
    for other in range(ranks.size):
        if other != ranks.rank and not torch.cuda.can_device_access_peer(ranks.rank, other):
            return f"GPU {ranks.rank} cannot read the memory of GPU {other}; NCCL has to carry what they exchange."
    return None


def _on_gpus(ranks: Ranks, nbytes: int) -> list[torch.Tensor]:
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=ranks.device)
    own.zero_()  # before the others know of it: later it could wipe out a signal
    torch.cuda.synchronize()
    group = distributed.group.WORLD
    assert group is not None, "run_on_ranks has made it"
    handle = symmetric_memory.rendezvous(own, group)
    parts = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(ranks.size)]
    parts[ranks.rank] = own
    return parts


def _in_a_file(ranks: Ranks, nbytes: int) -> list[torch.Tensor]:
    folder = [tempfile.mkdtemp(prefix="symmetric-") if ranks.rank == 0 else None]
    distributed.broadcast_object_list(folder)
    path = Path(str(folder[0]), "buffers")
    apart = -(-nbytes // 256) * 256  # so that each begins at an address that suits every dtype
    if ranks.rank == 0:
        with path.open("wb") as file:
            file.truncate(ranks.size * apart)
    distributed.barrier()
    whole = torch.from_file(str(path), shared=True, size=ranks.size * apart, dtype=torch.uint8)
    distributed.barrier()
    if ranks.rank == 0:  # the mapped memory lives on without a name
        path.unlink()
        path.parent.rmdir()
    return [part[:nbytes] for part in whole.view(ranks.size, apart)]
