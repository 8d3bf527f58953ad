"""How attention kernels are cut into tiles: which cuts fit a GPU, and the choice among them by measurement.

A query tile and `stages` tiles of keys and of values lie in shared memory at a time, (query_rows + 2 · stages ·
key_rows) · head_dim elements; the scores and the accumulator lie in registers. Large tiles read K and V less often;
small ones let two programs share a multiprocessor, so that one multiplies matrices while the other takes exponentials.
Which wins depends on the GPU, so the candidates are few and a first call measures them.
"""

import functools
import math
from collections.abc import Mapping

import torch
import triton

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.kernels.common.machine import architecture_of
from course_lib.kernels.common.tiles import SHARED_MEMORY_RESERVE, Tiles

# Few programs, since each costs the interpreter half a millisecond; the tile of a real GPU would not hold its tests.
INTERPRETER_TILES = Tiles(64, 64, warps=4, stages=1)

# With 227 KB of shared memory and a copy engine (TMA) that pays: Hopper, and Blackwell's data-centre parts.
LARGE_ARCHITECTURES = (90, 100, 103)

# Best first, by 16-bit head dimension (padded). Measured on an H200; the older ones by registers without a spill.
HOPPER_TILES = {
    64: (Tiles(64, 128, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 3)),
    128: (Tiles(64, 64, 4, 3), Tiles(128, 128, 8, 3)),
    256: (Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2)),
}
AMPERE_TILES = {
    64: (Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3)),
    128: (Tiles(64, 64, 8, 2), Tiles(64, 32, 4, 3), Tiles(128, 32, 8, 3)),
    256: (Tiles(64, 16, 8, 2), Tiles(32, 32, 4, 2)),
}
# Without matrix instructions a product's operands stay in registers: small tiles.
FLOAT32_TILES = {
    64: (Tiles(32, 32, 4, 2), Tiles(64, 32, 8, 1)),
    128: (Tiles(32, 32, 4, 2), Tiles(64, 32, 8, 1), Tiles(32, 16, 8, 1)),
    256: (Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
TURING_TILES = {
    64: (Tiles(32, 32, 4, 2), Tiles(32, 32, 8, 1)),
    128: (Tiles(32, 32, 8, 1), Tiles(32, 16, 8, 1)),
    256: (Tiles(32, 16, 8, 1), Tiles(16, 16, 8, 1)),
}


@functools.cache
def candidate_tiles(arch: int, dtype: torch.dtype, block_d: int) -> tuple[Tiles, ...]:
    """Cuts worth trying for an architecture (75, 80, ...), a dtype and a padded head dimension: all fit its memory."""
    table: Mapping[int, tuple[Tiles, ...]]
    if dtype == torch.float32:
        table = FLOAT32_TILES
    elif arch < 80:
        table = TURING_TILES
    else:
        table = HOPPER_TILES if arch in LARGE_ARCHITECTURES else AMPERE_TILES
    known = max((known for known in ARCHITECTURES if known <= arch), default=75)
    room = ARCHITECTURES[known].shared_per_block - SHARED_MEMORY_RESERVE
    itemsize = torch.empty((), dtype=dtype).element_size()
    return tuple(tiles for tiles in table[max(64, block_d)] if tiles.shared_bytes(block_d, itemsize) <= room)


CHOSEN: dict[tuple, Tiles] = {}


def fastest_tiles(situation: tuple, candidates: tuple[Tiles, ...], launch) -> Tiles:
    """Which candidate is fastest, by measuring `launch(tiles)` of each: once for each situation, then remembered."""
    if situation not in CHOSEN:
        CHOSEN[situation] = min(candidates, key=lambda tiles: milliseconds(launch, tiles))
    return CHOSEN[situation]


def tiles_for(query, key, launch, kind: tuple) -> Tiles:
    """The tiles for a forward pass on these inputs, measured by `launch(tiles)` at the first call of this kind."""
    arch = architecture_of(query.device)
    if arch is None:
        return INTERPRETER_TILES
    block_d = triton.next_power_of_2(query.shape[3])
    lengths = (length_class(query.shape[2]), length_class(key.shape[2]))
    situation = (*kind, query.device, query.dtype, block_d, *lengths)
    return fastest_tiles(situation, candidate_tiles(arch, query.dtype, block_d), launch)


def milliseconds(launch, tiles: Tiles) -> float:
    """Median time of a launch; infinite for tiles that this GPU has no room for."""
    try:
        return triton.testing.do_bench(lambda: launch(tiles), warmup=10, rep=50, return_mode="median")
    except triton.runtime.errors.OutOfResources:
        return math.inf


def length_class(length: int) -> int:
    """Lengths that share one choice: the power of two above, between 64 and 16384."""
    return min(max(triton.next_power_of_2(length), 64), 16384)
