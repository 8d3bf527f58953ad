"""How the backward kernels are cut into tiles on each architecture, and how they are compiled for the gate.

The choice is a table and no measurement, unlike the forward's: another cut adds in another order, and gradients are to
be the same bits in every process. The kernel of dK and dV holds four tiles of keys (K and V in shared memory, dK and dV
in registers); that of dQ holds three of queries (Q, dO and dQ).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton

from course_lib.kernels.attention.tiles import INTERPRETER_TILES, LARGE_ARCHITECTURES
from course_lib.kernels.common.tiles import Tiles


class BackwardTiles(NamedTuple):
    """The cut of the kernel of dK and dV, the same with dQ by atomics in it, and the cut of the kernel of dQ."""

    keys: Tiles
    keys_with_sums: Tiles
    queries: Tiles


# By head dimension (padded), from 64 on. For the copy engine's kernels, measured on an H200 at 64 and 128.
HOPPER = {
    64: BackwardTiles(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3)),
    128: BackwardTiles(Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3)),
    256: BackwardTiles(Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(64, 32, 8, 2)),
}
# Never run there: chosen so that nothing spills and the results, which lie in shared memory on their way out, fit too.
BLACKWELL = {
    64: HOPPER[64],
    128: BackwardTiles(Tiles(64, 128, 8, 2), Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 3)),
    256: HOPPER[256],
}
# Chosen by registers without a spill.
AMPERE = {
    64: BackwardTiles(Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2), Tiles(128, 64, 8, 2)),
    128: BackwardTiles(Tiles(32, 64, 8, 2), Tiles(32, 64, 8, 2), Tiles(64, 64, 8, 2)),
    256: BackwardTiles(Tiles(32, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(32, 32, 8, 2)),
}
# Without matrix instructions a product's operands stay in registers: small tiles.
SLOW = {
    64: BackwardTiles(Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    128: BackwardTiles(Tiles(16, 32, 8, 1), Tiles(16, 32, 8, 1), Tiles(32, 16, 8, 1)),
    256: BackwardTiles(Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}


def backward_tiles(arch: int | None, dtype: torch.dtype, block_d: int, copied_by_engine: bool) -> BackwardTiles:
    """The cut for an architecture (75, 80, ...; None: the interpreter), a dtype and a padded head dimension."""
    if arch is None:
        return BackwardTiles(INTERPRETER_TILES, INTERPRETER_TILES, INTERPRETER_TILES)
    if dtype == torch.float32 or arch < 80:
        return SLOW[max(64, block_d)]
    table = AMPERE if not copied_by_engine else HOPPER if arch == 90 else BLACKWELL
    return table[max(64, block_d)]


# ------------------------------------------------------------------------------------------- for the compile gate

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MATRIX_UNITS = {80: "mma.sync", 86: "mma.sync", 89: "mma.sync", 90: "wgmma"}
WGMMA_ROWS = 64  # a warp group's product has so many rows; smaller tiles are multiplied by mma.sync
FAST = [(80, 64), (80, 128), (80, 256), (86, 128), (89, 128), (90, 64), (90, 128), (90, 256), (100, 128), (120, 128)]


# The kernel of dK and dV at head dimension 256 on Hopper: its two sums alone are 128 registers of a thread's 255.
ADMITTED_SPILL = {("keys", True, 256): 160}


def compile_configurations(kernel: str, copied_by_engine: bool = False) -> Iterator[tuple]:
    """(dtype, "*fp32" or None for sums of dQ, tiles, constexprs, label, expectations) of "keys" or "queries"."""
    cases: list[tuple[str, int, int, dict[int, str] | None]] = [
        ("bf16", arch, head_dim, MATRIX_UNITS) for arch, head_dim in FAST
    ]
    if copied_by_engine:
        cases = [case for case in cases if case[1] in LARGE_ARCHITECTURES]
    else:  # neither uses the matrix units: right rather than fast, so a spill is no defect
        cases += [("fp16", 75, 64, None), ("fp32", 80, 64, None)]
    for kind, arch, head_dim, instruction in cases:
        cut = backward_tiles(arch, DTYPES[kind], triton.next_power_of_2(head_dim), copied_by_engine)
        ways = [("*fp32", cut.keys_with_sums), (None, cut.keys)] if kernel == "keys" else [(None, cut.queries)]
        for query_sums, tiles in ways:
            constexprs = {"BLOCK_D": triton.next_power_of_2(head_dim), **tiles.blocks()}
            if not copied_by_engine:
                constexprs["HEAD_DIM"] = head_dim
            # Sums by atomics are there to be compared, and were slower wherever that was measured.
            slow = instruction is None or query_sums is not None
            spill = None if slow else ADMITTED_SPILL.get((kernel, copied_by_engine, head_dim), 0)
            small = max(tiles.blocks().values()) < WGMMA_ROWS
            expected = "mma.sync" if instruction and small else instruction
            expectations = {"archs": (arch,), "instruction": expected, "max_spill_bytes": spill}
            label = f"{kind} {head_dim} {tuple(tiles)}{' with sums of dQ' if query_sums else ''}"
            yield kind, query_sums, tiles, constexprs, label, expectations


def boxes(kind: str, constexprs: dict, *results: str) -> dict[str, str]:
    """The types of a kernel's matrices where they are descriptors, for a dtype such as "bf16"."""
    block_m, block_n, block_d = (constexprs[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_D"))
    rows = {"queries": block_m, "gradients": block_m, "keys": block_n, "values": block_n}
    rows |= {name: block_m if name == "query_gradients" else block_n for name in results}
    return {name: f"tensordesc<{kind}[1,1,{count},{block_d}]>" for name, count in rows.items()}
