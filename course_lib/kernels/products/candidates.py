"""How a matrix product with many rows is cut, which cuts a sweep should try, and how they are compiled for the gate.

A program multiplies tiles of `rows` × `inner` and `columns` × `inner` numbers, `stages` of each on their way at a time.
In a block of inner it does 2 · rows · columns · inner FLOPs with (rows + columns) · inner numbers: the larger the tile,
the fewer bytes for each FLOP. What limits it is the accumulator, rows · columns registers of 4 bytes: 128 × 256 fill
half of a multiprocessor's. The other half is for addresses, so there is no room for a second program.
"""

import functools
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.tiles import SHARED_MEMORY_RESERVE

# Multiples of 16 in a model.
EVEN = (
    "columns", "outer", "inner", "x_stride", "weight_stride", "out_stride", "residual_stride", "expert_stride",
    "rows_stride", "outer_stride", "inner_stride",
)  # fmt: skip
MATRIX_INSTRUCTION = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
LEAST_ROWS_OF_A_WARP_GROUP = 64  # with fewer, sm_90 and sm_100 multiply by mma.sync


class ProductTiles(NamedTuple):
    """A tile's rows, columns and numbers of inner at a time; warps, stages; row tiles in a strip (see `tile_of`)."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8

    def tiles_of(self, rows: int, columns: int) -> int:
        """How many tiles a result [rows, columns] has."""
        return triton.cdiv(rows, self.rows) * triton.cdiv(columns, self.columns)

    def blocks(self) -> dict:
        """Their part that is the kernel's own, without what the compiler is told."""
        return {"GROUP": self.group, "BLOCK_M": self.rows, "BLOCK_N": self.columns, "BLOCK_K": self.inner}

    def settings(self) -> dict:
        """What they are for a kernel's launch."""
        return {**self.blocks(), "num_warps": self.warps, "num_stages": self.stages}

    def shared_bytes(self, itemsize: int) -> int:
        """Shared memory for the operands of one program."""
        return self.stages * (self.rows + self.columns) * self.inner * itemsize

    def accumulator_registers(self) -> int:
        """Registers of a thread that hold its part of the sums."""
        return self.rows * self.columns // (32 * self.warps)


INTERPRETER_TILES = ProductTiles(64, 64, 64, warps=4, stages=1, group=2)

# Best first.
HOPPER_TILES = (
    ProductTiles(128, 256, 64, 8, 3), ProductTiles(128, 256, 64, 8, 4), ProductTiles(256, 128, 64, 8, 3),
    ProductTiles(128, 128, 64, 8, 4), ProductTiles(128, 128, 64, 4, 4), ProductTiles(128, 128, 128, 8, 3),
    ProductTiles(64, 256, 64, 4, 4), ProductTiles(128, 256, 64, 8, 3, 16), ProductTiles(128, 256, 64, 8, 3, 4),
)  # fmt: skip
AMPERE_TILES = (
    ProductTiles(128, 128, 32, 4, 4), ProductTiles(128, 256, 32, 8, 3), ProductTiles(128, 128, 64, 8, 3),
    ProductTiles(128, 64, 64, 4, 4), ProductTiles(64, 64, 64, 4, 4),
)  # fmt: skip
# Without matrix instructions a product's operands stay in registers: small tiles.
SMALL_TILES = (ProductTiles(64, 64, 16, 8, 1), ProductTiles(64, 32, 32, 8, 1), ProductTiles(32, 32, 32, 4, 1))
LARGE_ARCHITECTURES = (90, 100, 103)
MOST_REGISTERS, MOST_REGISTERS_FOR_TWO = 128, 64  # of a thread's 255


@functools.cache
def candidates(arch: int | None, dtype: torch.dtype, parts: bool = False) -> tuple[ProductTiles, ...]:
    """Cuts worth trying for an architecture (80, 90, ...; None: interpreted), best first: all fit its memory.

    parts: those in whose registers there is room for a second tile of sums, where parts are added up.
    """
    if arch is None:
        return (INTERPRETER_TILES,)
    if dtype == torch.float32 or arch < 80:
        return SMALL_TILES
    known = max(known for known in ARCHITECTURES if known <= arch)
    room = ARCHITECTURES[known].shared_per_block - SHARED_MEMORY_RESERVE
    table = HOPPER_TILES if arch in LARGE_ARCHITECTURES else AMPERE_TILES
    most = MOST_REGISTERS_FOR_TWO if parts else MOST_REGISTERS
    return tuple(
        tiles for tiles in table if tiles.shared_bytes(dtype.itemsize) <= room and tiles.accumulator_registers() <= most
    )


def tiles_for(x: torch.Tensor, parts: bool = False) -> ProductTiles:
    """The best candidate for x's device and dtype."""
    return candidates(architecture_of(x.device), x.dtype, parts)[0]


def product_cases(
    kernel, constants=None, types=None, archs=(75, 80, 90, 100), parts=False, tiles_of=None
) -> list[CompileCase]:
    """A kernel's cases for the gate, in 16 bits with even sizes, and in float32; constants and types: its own ones.

    tiles_of: `tiles_of(arch, dtype)`, where they are not the best candidate.
    """
    cases = []
    sixteen_bits = [(arch, torch.bfloat16 if arch >= 80 else torch.float16) for arch in archs]
    for arch, dtype in [*sixteen_bits, *((arch, torch.float32) for arch in archs if arch == 80)]:
        matrix = None if dtype == torch.float32 else MATRIX_INSTRUCTION.get(arch)
        given = {name: None for name in constants or {} if not name.isupper()}
        signature = signature_of(kernel, KINDS[dtype], **given, **(types or {}))
        tiles = tiles_of(arch, dtype) if tiles_of else candidates(arch, dtype, parts)[0]
        if matrix is not None and tiles.rows < LEAST_ROWS_OF_A_WARP_GROUP:
            matrix = "mma.sync"
        cases.append(CompileCase(
            kernel, signature, {**tiles.blocks(), **(constants or {})}, tiles.warps, tiles.stages, archs=(arch,),
            instruction=matrix, label=f"{KINDS[dtype]} {tuple(tiles)}",
            divisible=[name for name, kind in signature.items() if kind[0] == "*" or name in EVEN],
        ))  # fmt: skip
    return cases
