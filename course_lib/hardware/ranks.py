"""Several processes that run one function together: the ranks of a `torch.distributed` group, each with its own GPU.

    def greet(ranks):
        return f"rank {ranks.rank} of {ranks.size} on {ranks.device}"

    run_on_ranks(greet, 2)      # ['rank 0 of 2 on cuda:0', 'rank 1 of 2 on cuda:1']

NCCL carries what they send where each rank has a GPU, gloo where they share the CPU. The function and its arguments are
pickled, so the function must stand in a file that can be imported. NVLink multicast stays off in every rank.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing

# A program that uses multicast can put the GPUs of a host out of service for all others; nothing here needs it.
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
SECONDS_TO_END = 2  # for ranks whose neighbour has failed, before they are killed


class RankError(RuntimeError):
    """A rank raised an error, died, or did not come to its end; the message begins with which one."""


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        rank: its number, from 0.
        size: how many there are.
        device: its GPU, or the CPU.
    """

    rank: int
    size: int
    device: torch.device

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """x summed over the ranks, a new tensor, by the library below: NCCL or gloo."""
        total = x.clone()
        if self.size > 1:
            distributed.all_reduce(total)
        return total

    def agree(self, **what) -> None:
        """Raise a ValueError on every rank, with what each has, where the ranks do not have the same.

        It waits for all ranks and costs the host about a millisecond.
        """
        if self.size == 1:
            return
        told: list = [None] * self.size
        distributed.all_gather_object(told, what)
        for name in what:
            if any(one[name] != told[0][name] for one in told):
                values = ", ".join(f"rank {rank} has {one[name]}" for rank, one in enumerate(told))
                raise ValueError(f"the ranks disagree on {name}: {values}. It must be the same on all of them.")


def run_on_ranks(
    function: Callable, size: int, *arguments, device: str | None = None, seconds: float | None = None
) -> list:
    """What `function(ranks, *arguments)` returns in each of so many processes, in the order of the ranks.

    Args:
        function: of a file; its first argument is the process's `Ranks`.
        arguments: the same for all ranks; they and the results are pickled. Results are moved to the CPU.
        device: "cuda" or "cpu"; None takes the GPUs where there is one for each rank.
        seconds: after which all ranks are ended.

    Raises:
        ValueError: more ranks than GPUs.
        RankError: a rank failed. The others are ended within a few seconds.
    """
    if size < 1:
        raise ValueError(f"size is {size}; there must be at least one rank.")
    gpus = torch.cuda.device_count()
    device = ("cuda" if gpus >= size else "cpu") if device is None else device
    if device == "cuda" and gpus < size:
        raise ValueError(f"{size} ranks need a GPU each, and this machine has {gpus}; take fewer, or device='cpu'.")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = multiprocessing.start_processes(
            _rank, args=(size, device, folder, function, arguments), nprocs=size, join=False, start_method="spawn"
        )
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while not processes.join(timeout=0.2, grace_period=SECONDS_TO_END):
                if deadline is not None and time.monotonic() > deadline:
                    late = [str(rank) for rank, one in enumerate(processes.processes) if one.is_alive()]
                    raise RankError(f"rank {', '.join(late)} did not end within {seconds} seconds.")
        except multiprocessing.ProcessRaisedException as error:
            raise RankError(f"rank {error.error_index} raised an error: {error}") from None
        except multiprocessing.ProcessExitedException as error:
            raise RankError(f"rank {error.error_index} died: {error}") from None
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, device: str, folder: str, function: Callable, arguments: tuple) -> None:
    """A process's whole life."""
    os.environ.update(NO_MULTICAST)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    store = distributed.FileStore(str(Path(folder, "meeting")), size)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=size,
        device_id=here if device == "cuda" else None,
    )  # fmt: skip
    result = function(Ranks(rank, size, here), *arguments)
    torch.save(_on_cpu(result), Path(folder, f"{rank}.pt"))
    distributed.barrier()  # nobody takes its memory away while another rank still reads it
    distributed.destroy_process_group()


def _on_cpu(value):
    """The same with every tensor of its lists, tuples and dicts on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(one) for key, one in value.items()}
    return type(value)(_on_cpu(one) for one in value) if type(value) in (list, tuple) else value
