"""How the products of experts are cut: as tall as an expert has tokens, since each tile reads the expert's weight.

A tile of 128 rows with one token in it multiplies 127 rows of nothing, one of 16 rows 15. With 64 tokens an expert, in
tiles of 16, the weight would be read by four programs for each column. So a tile has room for the mean number of tokens
and a quarter more. It need not be exact: until an expert has some 200 tokens, an H200 spends more time reading its
weight (4.8 TB/s) than multiplying by it (990 TFLOP/s in 16 bits), and rows of nothing cost no bytes.
"""

import functools

import torch

from course_lib.kernels.products.candidates import ProductTiles, candidates

# Two programs fit on a multiprocessor, so that one loads while the other one begins or ends.
FEW, SOME = ProductTiles(16, 64, 128, warps=4, stages=4), ProductTiles(64, 128, 64, warps=4, stages=4)
FEW_WITHOUT_MATRIX_UNITS = ProductTiles(16, 64, 32, warps=4, stages=1)
FIRST_WITH_FAST_PRODUCTS = 80


@functools.cache
def expert_cuts(arch: int | None, dtype: torch.dtype) -> tuple[ProductTiles, ...]:
    """The cuts for an architecture (80, 90, ...; None: interpreted), those with the fewest rows first."""
    fast = arch is not None and arch >= FIRST_WITH_FAST_PRODUCTS and dtype != torch.float32
    most = candidates(arch, dtype)[0]
    return (FEW, SOME, most) if fast else (FEW_WITHOUT_MATRIX_UNITS, most)


def expert_tiles(arch: int | None, dtype: torch.dtype, rows: float) -> ProductTiles:
    """The tiles for so many rows an expert."""
    cuts = expert_cuts(arch, dtype)
    return next((tiles for tiles in cuts if rows <= 0.8 * tiles.rows), cuts[-1])


def tiles_of_block(arch: int | None, dtype: torch.dtype, block: int) -> ProductTiles:
    """The tiles of an arrangement in blocks of so many places.

    Raises a ValueError where there are none.
    """
    cuts = expert_cuts(arch, dtype)
    for tiles in cuts:
        if tiles.rows == block:
            return tiles
    raise ValueError(
        f"arrangement has tiles of {block} places; there are products for tiles of "
        f"{', '.join(str(tiles.rows) for tiles in cuts)} rows. Arrange for one of these, or pass tiles."
    )
