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


def listed_tiles(arch: int | None, dtype: torch.dtype, block_d: int) -> BackwardTiles:
    """The cut for an architecture (75, 80, ...; None: the interpreter), a dtype and a padded head dimension."""
    tiles = backward_tiles(arch, dtype, block_d, copied_by_engine=False)
    has_matrix_units = arch is not None and arch >= 80 and dtype != torch.float32
    return tiles._replace(**SMALLER.get(max(64, block_d), {})) if has_matrix_units else tiles


def backward_cases(kernel, name: str) -> list[CompileCase]:
    """The cases of a kernel; name: "keys" or "queries", whose cuts it uses."""
    cases = []
    for kind, query_sums, _tiles, constexprs, _label, expectations in compile_configurations(name):
        if query_sums is None:
            cut = getattr(listed_tiles(expectations["archs"][0], DTYPES[kind], constexprs["BLOCK_D"]), name)
            cases.append(CompileCase(
                kernel, signature_of(kernel, kind, **LIST_TYPES),
                {**constexprs, **cut.blocks(), "QUERY_ROWS": BLOCK, "KEY_ROWS": BLOCK},
                num_warps=cut.warps, num_stages=cut.stages, label=f"{kind} {constexprs['HEAD_DIM']} {tuple(cut)}",
                **expectations,
            ))  # fmt: skip
    return cases
