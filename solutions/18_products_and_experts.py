# %% [markdown]
# # 18 · Matrix products, fused MLPs and a mixture of experts

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## The order of the tiles
#
# All weights in this chapter lie as `nn.Linear` keeps them: `x` is [rows, inner], `weight` is [outer, inner], and the
# product $out = x \cdot weight^T$ is [rows, outer]. A kernel cuts the result into *tiles*, such as 128 rows by 256
# columns, and one program computes one tile. For this it walks along `inner` in blocks of, say, 64 numbers. For each
# block it loads one tile of `x`, which has its rows, and one tile of `weight`, which has its columns.
#
# Many programs run at the same time, one on each multiprocessor. Programs in the same row of tiles load the same tile
# of `x`, and programs in the same column load the same tile of `weight`. If they do so at about the same time, only the
# first load reads memory. The others find the tile in the L2 cache. So which tiles are at work *together* decides how
# much memory is read, and that follows from the order in which the programs take the tiles.
#
# Take a result of 9 × 9 tiles and nine programs. Row by row, they compute the first row of tiles. The inner dimension
# is nine blocks long as well, so together they read 9 tiles of `x`, one for each block, and all 81 tiles of `weight`:
# 90 tiles. If they compute a square of 3 × 3 tiles instead, they read 3 · 9 of `x` and 3 · 9 of `weight`, which makes
# 54. The work is the same, and so are the results.
#
# To get something like a square, programs go down a *strip*. It has a few row tiles, say 8, and is as wide as the whole
# result. The first 8 programs take its first column from top to bottom, the next 8 its second column, and so on to the
# last column. Then comes the next strip. The picture shows three programs at a time with strips of 3, in a result of 7
# row tiles. The last strip has only one row tile left, so it is *thinner*: 1 instead of 3.
#
# | | column tile 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | **row tile 0** | 0 | 3 | 6 | 9 |
# | **1** | 1 | 4 | 7 | 10 |
# | **2** | 2 | 5 | 8 | 11 |
# | **3** | 12 | 15 | 18 | 21 |
# | **4** | 13 | 16 | 19 | 22 |
# | **5** | 14 | 17 | 20 | 23 |
# | **6** | 24 | 25 | 26 | 27 |
#
# The thin last strip is where orders go wrong. A kernel in ROCm's FlyDSL went down groups of 8 row tiles and took the
# last group to be as high as the others. With tiles of 128 rows, 1,024 rows are 8 row tiles, and the result was right.
# 1,152 rows are 9, and row tiles that do not exist were addressed: the result was wrong, and at 1,536 rows the GPU
# reported a page fault ([FlyDSL#979](https://github.com/ROCm/FlyDSL/pull/979)). nvFuser rounded the number of row tiles
# up instead, so its grid grew beyond the number of tiles ([Fuser#3942](https://github.com/NVIDIA/Fuser/issues/3942)). A
# published mixture-of-experts kernel took its number modulo the column tiles where it needed the row tiles. It seemed
# to be much faster, because it read some weights again and again and others never
# ([applied-ai#25](https://github.com/meta-pytorch/applied-ai/issues/25)).
#
# Now a large case. A product of 8192 × 8192 × 8192 in tiles of 128 × 256 has 64 row tiles and 32 column tiles, and an
# H200 runs 132 programs at a time. Row by row, these are four whole rows and four tiles of a fifth. **Predict** how
# many tiles of `x` and of `weight` together the 132 programs load for one block of `inner` if they go down strips of 8.
# Row by row it is 5 + 32 = 37.

# %%
predict("18 tiles loaded in strips of 8", ..., "tiles")

# %%
# Exercise 18.1 · The order of tiles
def tile_at(number: int, row_tiles: int, column_tiles: int, strip: int) -> tuple[int, int]:
    """Which tile of the result the program of this number computes.

    The result has row_tiles · column_tiles tiles. Programs go down the first `strip` row tiles in column tile 0, then
    down the same row tiles in column tile 1, and so on to the last column tile. Then comes the next strip. The last
    strip has the row tiles that are left, so it may be thinner.

    number: 0 … row_tiles · column_tiles - 1.
    row_tiles, column_tiles, strip: at least 1. The strip may be larger than row_tiles. There may be 2⁴⁰ tiles, so do
        not loop over tiles, rows, columns or strips.
    Returns: (row_tile, column_tile), a tuple or list of two Python ints.
    """
    # BEGIN SOLUTION
    first_row = number // (strip * column_tiles) * strip
    height = min(strip, row_tiles - first_row)
    place = number % (strip * column_tiles)
    return first_row + place % height, place // height
    # END SOLUTION


def tiles_loaded(programs: int, row_tiles: int, column_tiles: int, strip: int) -> tuple[int, int]:
    """How many different tiles of x and of weight the first programs load for one block of inner.

    programs: 1 … 1,000. Programs 0 … programs - 1 run together; there are fewer where the result has fewer tiles.
    row_tiles, column_tiles, strip: as above. A loop over the programs is fine here, one over all tiles is not.
    Returns: (tiles of x, tiles of weight), a tuple or list of two Python ints. A program loads the tile of x that has
    the rows of its tile, and the tile of weight that has its columns. What several programs load counts once.
    """
    # BEGIN SOLUTION
    programs = min(programs, row_tiles * column_tiles)
    tiles = [tile_at(number, row_tiles, column_tiles, strip) for number in range(programs)]
    return len({row for row, _ in tiles}), len({column for _, column in tiles})
    # END SOLUTION


# %%
best_tile_at, best_tiles_loaded = check("18.1", tile_at, tiles_loaded).best

# %%
print(f"{'strip':>6}{'tiles of x':>12}{'of weight':>11}{'together':>10}")
for strip in (1, 2, 4, 8, 16, 32, 64):
    of_x, of_weight = best_tiles_loaded(132, 64, 32, strip)
    print(f"{strip:>6}{of_x:>12}{of_weight:>11}{of_x + of_weight:>10}")
print(measured("18 tiles loaded in strips of 8", sum(best_tiles_loaded(132, 64, 32, 8)), "tiles"))

# %% [markdown]
# In strips of 8 the programs load 8 + 17 = 25 tiles instead of 37. Strips of 16 need 16 + 9 = 25 as well, and taller
# ones more again: at 64 the programs go down whole columns. A square would be best, because the sum of its sides is
# smallest for a given area. Here tiles are twice as wide as they are high, so a tile of `weight` has twice as many
# bytes as one of `x`. Counted in bytes, strips of 16 are better than strips of 8 at this size.
