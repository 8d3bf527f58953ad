"""How the two backward kernels over block lists are cut, and compiled for the gate: as attention's, but for two."""

import torch

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.backward_tiles import DTYPES, BackwardTiles, backward_tiles, compile_configurations
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.common.tiles import Tiles
from course_lib.kernels.sparse.block_lists import BLOCK
from course_lib.kernels.sparse.parts import LIST_TYPES

# Where the next entry of a list and the mask take registers that attention's own cut has not left: by head dimension.
SMALLER = {64: {"keys": Tiles(32, 64, 8, 2)}, 256: {"queries": Tiles(32, 32, 8, 1)}}
# Large enough for wgmma, which multiplies 64 rows; measured on an H200.
HOPPER = {
    64: {"keys": Tiles(64, 64, 4, 3), "queries": Tiles(64, 128, 4, 2)},
    128: {"keys": Tiles(64, 128, 8, 3), "queries": Tiles(128, 64, 8, 3)},
    256: SMALLER[256],
}
# Bytes of a thread that find no register there, in the loop under masks, with Triton 3.9: faster all the same.
HOPPER_SPILLS = {("keys", 64): 40, ("keys", 128): 392, ("queries", 64): 8}


def listed_tiles(arch: int | None, dtype: torch.dtype, block_d: int) -> BackwardTiles:
    """The cut for an architecture (75, 80, ...; None: the interpreter), a dtype and a padded head dimension."""
    tiles = backward_tiles(arch, dtype, block_d, copied_by_engine=False)
    if arch is None or arch < 80 or dtype == torch.float32:
        return tiles
    return tiles._replace(**(HOPPER if arch == 90 else SMALLER).get(max(64, block_d), {}))


def backward_cases(kernel, name: str) -> list[CompileCase]:
    """The cases of a kernel; name: "keys" or "queries", whose cuts it uses."""
    cases = []
    for kind, query_sums, _tiles, constexprs, _label, expectations in compile_configurations(name):
        if query_sums is None:
            (arch,), block_d = expectations["archs"], constexprs["BLOCK_D"]
            cut = getattr(listed_tiles(arch, DTYPES[kind], block_d), name)
            if arch == 90:
                expectations["max_spill_bytes"] = HOPPER_SPILLS.get((name, block_d), 0)
            cases.append(CompileCase(
                kernel, signature_of(kernel, kind, **LIST_TYPES),
                {**constexprs, **cut.blocks(), "QUERY_ROWS": BLOCK, "KEY_ROWS": BLOCK},
                num_warps=cut.warps, num_stages=cut.stages, label=f"{kind} {constexprs['HEAD_DIM']} {tuple(cut)}",
                **expectations,
            ))  # fmt: skip
    return cases
