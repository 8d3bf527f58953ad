"""How an attention kernel is cut into tiles, as a launch says it."""

from typing import NamedTuple

# Beside the tiles: barriers of the copy engine, and scratch for the reductions over a row.
SHARED_MEMORY_RESERVE = 2048


class Tiles(NamedTuple):
    """Rows of a query tile and of a key tile, warps per program, and key tiles in flight from memory."""

    query_rows: int
    key_rows: int
    warps: int
    stages: int

    def shared_bytes(self, block_d: int, itemsize: int) -> int:
        """Shared memory for the tiles of one program, in bytes."""
        return (self.query_rows + 2 * self.stages * self.key_rows) * block_d * itemsize

    def settings(self) -> dict:
        """What they are for a kernel's launch."""
        return {**self.blocks(), "num_warps": self.warps, "num_stages": self.stages}

    def blocks(self) -> dict:
        """Their part that is the kernel's own, without what the compiler is told."""
        return {"BLOCK_M": self.query_rows, "BLOCK_N": self.key_rows}
