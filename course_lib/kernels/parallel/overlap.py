"""A matrix product together with the exchange before or behind it, so that links and tensor cores work at once.

    exchange = Exchange(ranks, most_bytes=1 << 28)               # on every rank
    columns = gathered_product(exchange, part, weight)           # (all ranks' parts, one below the other) · weightᵀ
    rows = product_scattered(exchange, x, weight)                # this rank's rows of the sum of all ranks' x · weightᵀ

Both cut the rows by ranks. The first begins with the rank's own rows, while those of the others come. The second begins
with the others' rows, so that they travel while it computes its own, and adds what has come to it. The
copy engine moves rows and flags, beside the multiprocessors; the products are cuBLAS's.

A product in parts is slower than a whole one, and every copy has its latency. For few rows that loses, so below
`LEAST_ROWS` both are a whole product and the library's exchange.

Source of the order: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
"""

import torch
import torch.distributed as distributed
import triton

from course_lib.hardware.ranks import Ranks
from course_lib.hardware.symmetric import SymmetricBuffer, no_common_memory
from course_lib.kernels.parallel.signals import arrival_kernel, meeting_kernel

LEAST_ROWS = 1024  # of all ranks together: ahead of NCCL from here on, on two H200s


class Exchange:
    """Where the ranks send each other rows.

    Args:
        ranks: this process's place.
        most_bytes: that a rank receives from all others in one call; more is left to the library.
        least_rows: of all ranks together; fewer are left to the library.

    Attributes:
        refusal: why all is left to the library, or None.
    """

    def __init__(self, ranks: Ranks, most_bytes: int, least_rows: int = LEAST_ROWS):
        self.ranks, self.most_bytes, self.least_rows = ranks, most_bytes, least_rows
        self.refusal = no_common_memory(ranks)
        if self.refusal is not None or ranks.size == 1:
            return
        self._flags_offset = triton.cdiv(most_bytes, 256) * 256
        self._meetings_offset = self._flags_offset + 4 * ranks.size  # a flag for each source
        self._buffer = SymmetricBuffer(ranks, self._meetings_offset + 4 * ranks.size)
        self._meetings = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        self._one = torch.ones(1, dtype=torch.int32, device=ranks.device)
        self._sending = torch.cuda.Stream(ranks.device) if ranks.device.type == "cuda" else None

    def takes(self, rows: int, nbytes: int) -> bool:
        """Whether it is worth while for so many rows of all ranks, of which a rank receives so many bytes."""
        return self.refusal is None and self.ranks.size > 1 and rows >= self.least_rows and nbytes <= self.most_bytes

    def meet(self) -> None:
        """Nothing is sent before all ranks have read what came in the call before."""
        size = self.ranks.size
        meeting_kernel[(1,)](
            self._buffer.addresses, self._meetings_offset, 0, self.ranks.rank, self._meetings,
            RANKS=size, LANES=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip

    def send(self, rows: torch.Tensor, to: int, place: int) -> None:
        """Rows to a rank, `place` bytes into its memory, and then their flag; what is computed next does not wait.

        The rows must live until `sent`.
        """
        there = self._buffer.of(to)
        target = there[place : place + rows.nbytes].view(rows.dtype).view(rows.shape)
        flag = self._flag(there, self.ranks.rank)
        if self._sending is None:
            target.copy_(rows)
            flag.copy_(self._one)
            return
        self._sending.wait_stream(torch.cuda.current_stream(self.ranks.device))
        with torch.cuda.stream(self._sending):
            target.copy_(rows, non_blocking=True)
            flag.copy_(self._one, non_blocking=True)

    def sent(self) -> None:
        """What is computed from here on waits until all rows are on the other ranks."""
        if self._sending is not None:
            torch.cuda.current_stream(self.ranks.device).wait_stream(self._sending)

    def receive(self, source: int, place: int, like: torch.Tensor) -> torch.Tensor:
        """Rows of a rank, once they are there: a view of this rank's memory with the shape and dtype of `like`."""
        arrival_kernel[(1,)](self._flag(self._buffer.own, source), num_warps=1)
        return self._buffer.own[place : place + like.nbytes].view(like.dtype).view(like.shape)

    def _flag(self, memory: torch.Tensor, source: int) -> torch.Tensor:
        begin = self._flags_offset + 4 * source
        return memory[begin : begin + 4].view(torch.int32)


def gathered_product(exchange: Exchange, part: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of all ranks' rows with this rank's weight.

    Args:
        exchange: of this rank.
        part: [rows, width], contiguous, of the same shape on all ranks.
        weight: [columns, width], of part's dtype.

    Returns [ranks · rows, columns]: the rows of rank 0 first.
    """
    ranks = exchange.ranks
    rows, width = part.shape
    if not exchange.takes(ranks.size * rows, (ranks.size - 1) * part.nbytes):
        whole = part
        if ranks.size > 1:
            whole = part.new_empty(ranks.size * rows, width)
            distributed.all_gather_into_tensor(whole, part)
        return whole @ weight.T
    output = part.new_empty(ranks.size, rows, len(weight))
    exchange.meet()
    for step in range(1, ranks.size):  # a rank's rows lie with its reader behind those of `step - 1` other sources
        exchange.send(part, (ranks.rank - step) % ranks.size, (step - 1) * part.nbytes)
    torch.mm(part, weight.T, out=output[ranks.rank])
    for step in range(1, ranks.size):
        source = (ranks.rank + step) % ranks.size
        torch.mm(exchange.receive(source, (step - 1) * part.nbytes, part), weight.T, out=output[source])
    exchange.sent()
    return output.flatten(0, 1)


def product_scattered(exchange: Exchange, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's rows of the sum over the ranks of x · weightᵀ.

    Args:
        exchange: of this rank.
        x: [rows, width], contiguous: this rank's part of the width. rows is a multiple of the ranks.
        weight: [columns, width], of x's dtype.

    Returns [rows / ranks, columns]. Each rank's part is rounded to the dtype, and so is each sum.
    Raises a ValueError where the rows cannot be shared out.
    """
    ranks = exchange.ranks
    if len(x) % ranks.size:
        raise ValueError(f"x has {len(x)} rows; they must be a multiple of the {ranks.size} ranks, so pad them.")
    output = x.new_empty(len(x) // ranks.size, len(weight))
    if not exchange.takes(len(x), (ranks.size - 1) * output.nbytes):
        if ranks.size == 1:
            return torch.mm(x, weight.T, out=output)
        distributed.reduce_scatter_tensor(output, x @ weight.T)
        return output
    blocks = x.view(ranks.size, len(output), x.shape[1])
    others = [blocks[(ranks.rank + step) % ranks.size] for step in range(1, ranks.size)]
    exchange.meet()
    parts = []
    for step, block in enumerate(others, 1):
        parts.append(block @ weight.T)
        exchange.send(parts[-1], (ranks.rank + step) % ranks.size, (step - 1) * output.nbytes)
    torch.mm(blocks[ranks.rank], weight.T, out=output)  # meanwhile the others' parts come
    for step in range(1, ranks.size):
        output += exchange.receive((ranks.rank - step) % ranks.size, (step - 1) * output.nbytes, output)
    exchange.sent()
    return output
