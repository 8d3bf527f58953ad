"""How latent decode is cut: into tiles of rows and keys, and into how many splits of a sequence's keys.

A tile of 64 keys is 74 KB in 16 bits, 64 rows of queries as much. Two tiles of keys and one of queries are 221 KB of
the 232 KB that a program may have on Hopper: while one tile is at work, the next is on its way. With few heads the
queries are small, and two programs share a multiprocessor. On GPUs with 99 KB tiles are 16 keys.

Splits are counted from what the whole grid fills: sequences · tiles of rows · splits programs, against the
multiprocessors. 64 sequences of 128 heads are 128 programs without splits, and splitting them would cost time.
"""

import functools
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.decode.splits import LEAST_KEYS_PER_SPLIT, MOST_SPLITS
from course_lib.kernels.decode.tiles import LEAST_ROWS

MOST_ROWS = 64
# In keys of 36 ns, in which a multiprocessor multiplies 64 rows by one: a program costs as much as 64 keys besides its
# own; the merge is a launch of its own, and reads 128 KB from each part of a tile.
START_KEYS, MERGE_LAUNCH_KEYS, MERGE_PART_KEYS = 64, 70, 1.2


class LatentTiles(NamedTuple):
    """Rows of queries and of keys in a tile, warps per program, the pipeline's depth, and how many fit at a time."""

    query_rows: int
    key_rows: int
    warps: int
    stages: int
    residents: int = 1  # programs on a multiprocessor

    def blocks(self) -> dict:
        return {"BLOCK_M": self.query_rows, "BLOCK_N": self.key_rows, "STAGES": self.stages}

    def settings(self) -> dict:
        return {**self.blocks(), "num_warps": self.warps, "num_stages": self.stages}


class LatentPlan(NamedTuple):
    """How a latent decode step is launched."""

    tiles: LatentTiles
    row_tiles: int  # of a sequence
    splits: int


@functools.cache
def latent_tiles(arch: int | None, dtype: torch.dtype, value_dim: int, rows: int) -> LatentTiles:
    """The tiles for an architecture (80, 90, ...; None: the interpreter) and `rows` heads of query tokens."""
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(rows)))
    if arch is None:
        return LatentTiles(rows, 64, warps=4, stages=1)
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return LatentTiles(16, 16, warps=8, stages=1)
    if arch == 90:
        few = rows == LEAST_ROWS
        return LatentTiles(rows if few else MOST_ROWS, 64, warps=8, stages=2, residents=2 if few else 1)
    if arch in (80, 100):  # on sm_100 tcgen05 would take 64 rows, and spill
        return LatentTiles(min(rows, 32), 32, warps=8, stages=3)
    return LatentTiles(16, 16, warps=4, stages=3)


def latent_plan(query, value_dim: int, longest: int, splits: int | None = None) -> LatentPlan:
    """The plan for query [batch, query_tokens, heads, width] against sequences of at most `longest` tokens."""
    batch, query_tokens, heads = query.shape[:3]
    tiles = latent_tiles(architecture_of(query.device), query.dtype, value_dim, query_tokens * heads)
    row_tiles = triton.cdiv(query_tokens * heads, tiles.query_rows)
    if splits is None:
        slots = multiprocessor_count(query.device) * tiles.residents
        splits = latent_splits(batch * row_tiles, longest, slots)
    return LatentPlan(tiles, row_tiles, splits)


@functools.lru_cache(maxsize=4096)
def latent_splits(programs: int, longest: int, slots: int) -> int:
    """How many parts to split each sequence's keys into, for `programs` without splits, of which `slots` run at a time.

    The number with the least estimated time, the smaller of equals; at least 1.
    """
    most = max(1, min(MOST_SPLITS, -(-longest // LEAST_KEYS_PER_SPLIT)))
    return min(range(1, most + 1), key=lambda splits: estimated_keys(splits, programs, longest, slots))


def estimated_keys(splits: int, programs: int, longest: int, slots: int) -> float:
    """The time of a step, in keys that a program works on meanwhile."""
    waves = -(-programs * splits // slots)
    merge = MERGE_LAUNCH_KEYS + MERGE_PART_KEYS * programs * splits if splits > 1 else 0
    return waves * (-(-longest // splits) + START_KEYS) + merge


def latent_compile_cases(kernel) -> list[CompileCase]:
    """The kernel as it ships: for each architecture 16, 32 and 128 heads, contiguous and in pages; small latents."""
    wanted = [(arch, dtype, 512, 64, rows, page_size)
              for arch, dtype in ((80, torch.bfloat16), (86, torch.bfloat16), (89, torch.bfloat16),
                                  (90, torch.bfloat16), (100, torch.bfloat16), (120, torch.bfloat16))
              for rows in (16, 32, 128) for page_size in (0, 64)]  # fmt: skip
    wanted += [(90, torch.float16, 512, 64, 128, 16), (90, torch.bfloat16, 64, 16, 8, 0),
               (90, torch.bfloat16, 128, 32, 64, 16), (80, torch.float32, 512, 64, 16, 0),
               (75, torch.float16, 128, 32, 16, 0), (75, torch.float16, 256, 64, 16, 0)]  # fmt: skip
    cases = []
    for arch, dtype, value_dim, rope_dim, rows, page_size in wanted:
        tiles = latent_tiles(arch, dtype, value_dim, rows)
        kind = KINDS[dtype]
        types: dict[str, str | None] = {"output_pointer": "*fp32"}
        blocks = {"VALUE_DIM": value_dim, "ROPE_DIM": rope_dim, "BLOCK_R": triton.next_power_of_2(rope_dim),
                  "PAGE_SIZE": page_size, "CAUSAL": True, **tiles.blocks()}  # fmt: skip
        if not page_size:
            types |= {"tables_pointer": None, "table_stride": None}
            blocks |= {"tables_pointer": None, "table_stride": 0}
        fast = arch >= 80 and dtype != torch.float32
        hopper = "wgmma" if tiles.query_rows == MOST_ROWS else "mma.sync"
        cases.append(CompileCase(
            kernel, signature_of(kernel, kind, **types), blocks, num_warps=tiles.warps, num_stages=tiles.stages,
            archs=(arch,),
            # With 64 rows Triton 3.6 spills 4 registers, outside the loop; 3.9 up to 54, read back once in 64 keys.
            max_spill_bytes=(216 if tiles.query_rows == MOST_ROWS else 0) if fast else None,
            instruction=(hopper if arch == 90 else "mma.sync") if fast else None,
            label=f"{kind} {value_dim} + {rope_dim}, {rows} rows, page size {page_size} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
