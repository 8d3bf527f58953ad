"""How a product with few rows is cut: rows of the weight in a tile, and parts of its inner dimension.

A program reads `outer` rows of the weight, `inner` numbers of each at a time. A byte takes about a microsecond to
come, so that an H100 with its 3.35 TB/s needs 25 KB on their way to each multiprocessor at any time. A weight of 2048
rows has 64 tiles of 32 rows, which occupy half of it; so its rows are cut into `splits` parts as well. Parts cost too:
each is written, read and added. So there are as few as give the multiprocessors nearly two programs each.

More rows of x need wider tiles: every tile reads all of x, from the L2. At 64 rows a tile of 32 rows of the weight
reads twice as much of x as of the weight.
"""

import functools
from typing import NamedTuple

import torch
import triton

LEAST_ROWS = 16  # of a matrix instruction
MOST_ROWS = 64
PROGRAMS = 1.9  # for each multiprocessor: 256 programs are enough for 132
MOST_SPLITS = 8


class FewRowsTiles(NamedTuple):
    """Rows of the weight in a tile, numbers of each at a time, parts of the inner dimension; warps and stages."""

    outer: int
    inner: int
    splits: int
    warps: int
    stages: int


def padded_rows(rows: int) -> int:
    """Rows of a program's tile of x."""
    return max(LEAST_ROWS, triton.next_power_of_2(rows))


@functools.lru_cache(maxsize=4096)
def few_rows_tiles(
    rows: int, outer: int, inner: int, dtype: torch.dtype, arch: int | None, multiprocessors: int
) -> FewRowsTiles:
    """The tiles for x [rows, inner] and a weight [outer, inner], for an architecture (90, ...; None: interpreted)."""
    block_outer, block_inner, warps, stages = block_sizes(padded_rows(rows), dtype, arch)
    tiles = triton.cdiv(outer, block_outer)
    splits = 1
    while tiles * splits < PROGRAMS * multiprocessors and splits < min(MOST_SPLITS, inner // block_inner // 2):
        splits *= 2
    return FewRowsTiles(block_outer, block_inner, splits, warps, stages)


def block_sizes(rows: int, dtype: torch.dtype, arch: int | None) -> tuple[int, int, int, int]:
    """(rows of the weight, numbers of each at a time, warps, stages) for this many padded rows of x."""
    if arch is None:
        return 64, 64, 4, 1
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return 32, 32, 4, 1
    if rows == LEAST_ROWS:
        return 32, 256, 4, 3
    return 64, 128, 4 if rows == 2 * LEAST_ROWS else 8, 3
