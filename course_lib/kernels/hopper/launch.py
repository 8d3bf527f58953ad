"""What the host prepares for the Hopper kernel: how a program is arranged, what the copy engine is told, a counter."""

import functools
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import torch

from course_lib.kernels.gluon.names import TensorDescriptor, gl
from course_lib.kernels.gluon.parts import NAMED_BARRIERS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8e4nv": torch.float8_e4m3fn}  # by the compiler's names
GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv}


class Arrangement(NamedTuple):
    """How a program is arranged: keys per block, buffers for K and V and for Q, consumers, whether these take turns."""

    key_rows: int
    stages: int
    query_buffers: int
    consumers: int
    turns: bool

    @property
    def registers(self) -> tuple[int, int, int]:
        """Per thread: of a consumer, of the producer, and at the start, when all share 64k of them alike."""
        return (240, 24, 168) if self.consumers == 2 else (160, 32, 128)

    def settings(self) -> dict:
        """What it is for a kernel's launch, but for num_warps and maxnreg.

        Raises a ValueError where it needs more named barriers than Triton leaves: two for each buffer of keys, and one
        for each consumer's turn.
        """
        named = 2 * self.stages + self.turns * self.consumers
        if named > NAMED_BARRIERS:
            raise ValueError(
                f"arrangement has {self.stages} stages{f' and {self.consumers} turns' if self.turns else ''}, which "
                f"take {named} named barriers; Triton leaves {NAMED_BARRIERS}. Take fewer stages, or no turns."
            )
        consumer, producer, _ = self.registers
        return {"STAGES": self.stages, "GROUPS": self.consumers, "QUERY_BUFFERS": self.query_buffers,
                "TURNS": self.turns, "CONSUMER_REGISTERS": consumer, "PRODUCER_REGISTERS": producer}  # fmt: skip


def descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a tensor that moves in tiles [1, 1, rows, columns].

    The tensor is [batch, heads, length, head_dim], or, for 8-bit values, transposed: [batch, heads, head_dim, places].
    """
    known = copy(descriptor_like(tensor.shape, tensor.stride(), tensor.dtype, rows, columns))
    known.base = tensor
    return known


@functools.lru_cache(1024)
def descriptor_like(shape, strides, dtype, rows, columns) -> TensorDescriptor:
    """A descriptor for tensors like this, checked once and not at every launch; its own tensor is a stand-in."""
    # A dimension of size 1 is never stepped over; its stride may be anything, but the engine wants one that it knows.
    strides = [stride if size > 1 else columns for size, stride in zip(shape[:3], strides)]
    layout = tile_layout(rows, columns, dtype)
    return TensorDescriptor(torch.empty(1, dtype=dtype), list(shape), [*strides, 1], [1, 1, rows, columns], layout)


@functools.cache
def tile_layout(rows: int, columns: int, dtype: torch.dtype):
    """How a tile lies in shared memory: as wgmma reads it and the copy engine writes it, its banks swizzled."""
    element = GLUON_DTYPES[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], element)


GRAPH_LAUNCHES = 4096  # in all graphs of a device
spare_counters: dict[torch.device, Iterator[torch.Tensor]] = {}


def ticket_counter(device: torch.device) -> torch.Tensor:
    """A counter at 0, int32 [1], that no other kernel uses meanwhile; the kernel leaves it at 0.

    A launch that is being recorded in a graph has one of its own, from a store made at the device's first launch that
    was not. Where there is no store, or it is used up, every replay sets the counter to 0 first: one launch more.
    """
    spare = spare_counters.get(device)
    if torch.cuda.is_current_stream_capturing():
        counter = next(spare, None) if spare is not None else None
        return torch.zeros(1, dtype=torch.int32, device=device) if counter is None else counter
    if spare is None:
        # 16 bytes apart: Triton compiles a kernel anew for an address that is no multiple of them.
        apart = torch.zeros(GRAPH_LAUNCHES, 4, dtype=torch.int32, device=device)
        spare_counters[device] = iter(apart[:, :1].unbind())
        torch.cuda.current_stream(device).synchronize()  # a graph may be replayed on any stream
    return stream_counter(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def stream_counter(device: torch.device, _stream: int) -> torch.Tensor:
    """A stream's own counter: kernels of one stream follow each other, those of two may run at once."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def descriptor_type(kind: str, rows: int, columns: int) -> str:
    """A descriptor of tiles [1, 1, rows, columns] as the compiler's signatures spell it; kind is a key of DTYPES."""
    return f"tensordesc<{kind}[1,1,{rows},{columns}],{tile_layout(rows, columns, DTYPES[kind])!r}>"
