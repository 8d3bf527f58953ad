"""How a product with few rows is cut: rows of the weight in a tile, and parts of its inner dimension.

A program reads `outer` rows of the weight, `inner` numbers of each at a time. A byte takes about a microsecond to
come, so that an H200 with its 4.8 TB/s needs 36 KB on their way to each multiprocessor at any time; in a step, where
programs begin and end all the time, more. A weight of 2048 rows has 32 tiles of 64 rows, which occupy a quarter of the
GPU; so its rows are cut into `splits` parts as well. Parts cost too: each is written, read and added, once for each row
of x. So there are as few as the programs for a multiprocessor ask for, and fewer the more rows x has.

Every tile reads all of x, from the L2: a tile of 64 rows as much of x as of the weight, at 64 rows. So a weight that
has enough rows for it is cut into tiles of WIDE.

Measured in the engine's step, H200, bf16, Llama-3.2-1B's shape, the graph's µs at batch 1: with 3, 4, 5, 6, 7 stages,
and at most 5 where tiles are WIDE, 1,082, 1,012, 943, 928, 1,026.
"""

import functools
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.architectures import ARCHITECTURES

LEAST_ROWS = 16  # of a matrix instruction
MOST_ROWS = 64
WIDE, WIDE_PROGRAMS = 128, 0.9  # rows of a weight's tile where there are so many of them for each multiprocessor
MOST_SPLITS = 8
SHARED_MEMORY_FOR_MANY_BLOCKS = 160_000  # bytes; GPUs for graphics have 100 KB


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
    tiles, programs = narrow_tiles(padded_rows(rows), dtype, arch)
    if may_be_wide(dtype, arch) and outer >= WIDE_PROGRAMS * multiprocessors * WIDE:
        return tiles._replace(outer=WIDE, stages=min(tiles.stages, 5))
    splits = 1
    while triton.cdiv(outer, tiles.outer) * splits < programs * multiprocessors and splits < min(
        MOST_SPLITS, inner // tiles.inner // 2
    ):
        splits *= 2
    return tiles._replace(splits=splits)


def narrow_tiles(rows: int, dtype: torch.dtype, arch: int | None) -> tuple[FewRowsTiles, float]:
    """Tiles for this many padded rows of x, and how many programs a multiprocessor should have with them."""
    if arch is None:
        return FewRowsTiles(64, 64, 1, warps=4, stages=1), 1.9
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return FewRowsTiles(32, 32, 1, warps=4, stages=1), 1.9
    if not may_be_wide(dtype, arch):
        few = rows == LEAST_ROWS
        return FewRowsTiles(32 if few else 64, 256 if few else 128, 1, warps=4 if rows < 64 else 8, stages=3), 1.9
    if rows == LEAST_ROWS:
        return FewRowsTiles(64, 128, 1, warps=4, stages=6), 1.4
    return (FewRowsTiles(32, 128, 1, 4, 4), 2.5) if rows == 32 else (FewRowsTiles(64, 128, 1, 4, 4), 0.7)


def may_be_wide(dtype: torch.dtype, arch: int | None) -> bool:
    """Whether shared memory has room for four blocks of WIDE rows."""
    if arch is None or arch < 80 or dtype == torch.float32:
        return False
    known = max(known for known in ARCHITECTURES if known <= arch)
    return ARCHITECTURES[known].shared_per_block >= SHARED_MEMORY_FOR_MANY_BLOCKS
