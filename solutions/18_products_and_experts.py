# %% [markdown]
# # 18 · Matrix products, fused MLPs and a mixture of experts
#
# **The question.** Multiply two bf16 matrices of 8,192 × 8,192 numbers. The tensor cores of an H200 can do 989 TFLOP/s.
# How much of that does a kernel of ten lines reach? How much does each further idea add, and where does it end?
#
# Write down three shares of that peak: one for a kernel that computes each number of the result in a loop of its own,
# one for a kernel that works in tiles, and one for the best kernel you can think of.
#
# A transformer spends most of its time in such products. So far this course has left them to cuBLAS, NVIDIA's library.
# At the end of this chapter a small model runs on your functions. Its MLPs are *experts*: each of its layers has eight
# small ones instead of a large one, and each token goes through two of them.
#
# **Time.** About six and a half hours for all eight exercises, estimated. The **core path** takes two and a half:
# exercises 18.1, 18.2 and 18.5, and every section whose heading does not end in *deeper*. You need chapters 01, 04
# and 13. The ladder's last steps use ideas of chapter 09, but you can read the chapter without it.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a product costs, on paper
#
# Two limits decide how fast a product can be: how fast the tensor cores multiply, and how fast their numbers arrive.
#
# First the arithmetic. If you multiply a matrix [M, K] by a matrix [K, N], each of the $M N$ results is a sum of $K$
# products. That makes $2 M N K$ FLOPs, because each product takes a multiplication and an addition. We write 8192³ for
# the case in which all three sizes are 8,192. It has 1.1 TFLOP, which take 1.1 ms at 989 TFLOP/s.
#
# Now the bytes. Each of the three matrices has 134 MB in 16 bits. Reading two of them and writing one takes 0.08 ms at
# 4.8 TB/s. So if each number were loaded once, the arithmetic would take 13 times as long as the loads.
#
# But a kernel loads numbers more than once. Suppose that each program computes one tile of the result, with $B_M$ rows
# and $B_N$ columns. It needs $B_M$ rows of the first matrix and $B_N$ columns of the second, all $K$ numbers of each.
# There are $(M / B_M) (N / B_N)$ such programs, so together they load
#
# $$M N K \left( \frac{1}{B_M} + \frac{1}{B_N} \right) \text{ numbers.}$$
#
# At 8192³ with tiles of 128 × 256 that is 12.9 GB. If a tile is only one number, it is 2.2 TB.
#
# The L2 cache serves most of these loads, but it has a limit too. A multiprocessor of an H100 or H200 can take at most
# 64 bytes a cycle from the L2 cache. In the same cycle its tensor cores can do 4,096 FLOPs. (With 132 multiprocessors
# at 1.83 GHz that makes the 989 TFLOP/s.) The larger a tile is, the more FLOPs you do with each byte. **Predict** how
# many rows and columns a square tile must have, so that the tensor cores need not wait for the L2 cache.

# %%
predict("18 smallest square tile that the L2 can feed", ..., "rows")

# %%
FLOPS, BYTES = 4096, 64  # a cycle of one multiprocessor: what its tensor cores do in 16 bits, what the L2 cache sends
PEAK = 132 * FLOPS * 1.83e9
print(f"{'tile':>10}{'loaded':>10}{'FLOPs a byte':>14}{'at most':>14}")
for rows, columns in ((1, 32), (16, 16), (64, 64), (128, 128), (128, 256)):
    loaded = 2 * 8192**3 * (1 / rows + 1 / columns)  # bytes
    intensity = 2 * 8192**3 / loaded
    print(f"{f'{rows} × {columns}':>10}{format_bytes(loaded):>10}{intensity:>14.1f}"
          f"{min(1, intensity * BYTES / FLOPS) * PEAK / 1e12:>6,.0f} TFLOP/s")
measured("18 smallest square tile that the L2 can feed", 2 * FLOPS // BYTES, "rows")

# %% [markdown]
# For each step along the dimension that is summed over, a square tile of $b$ rows does $2 b^2$ FLOPs. It loads $2 b$
# numbers for this step, which are $4 b$ bytes. That makes $b / 2$ FLOPs for each byte. In the time in which one byte
# arrives, the tensor cores can do 64 FLOPs, so $b$ must be at least 128.
#
# A tile of 128 × 256 leaves some room, with 85 FLOPs for each byte. Much larger tiles do not fit, because a program
# keeps the sums of its tile in registers. The sums of 128 × 256 already fill half of a multiprocessor's registers.
#
# ## The ladder
#
# The next cell draws what the library's kernels reach. Each kernel has one idea more than the one above it, except for
# the last two of ours. They are two ways to go on from *persistent*: one is written in Triton, and the other in Gluon,
# a language one level below it. All were measured on one H200 in one run, in turns
# (`python -m course_lib bench large_products`).
#
# The table below the picture names the ideas. In it, `x` is the first matrix and `weight` the second. `weight` is
# stored transposed, so its rows belong to columns of the result.

# %%
from course_lib.figures.products.ladder import ON_AN_H200, draw_ladder

draw_ladder(ON_AN_H200, "8192 × 8192 × 8192 in bf16, on an H200")

# %% [markdown]
# | step | its idea | file in `course_lib/kernels/products/` |
# |---|---|---|
# | naive | one row of `x` with 32 of `weight`, products and sums on the ordinary units | `naive.py` |
# | tiled | tiles of 128 × 256 on the tensor cores | `tiled.py` |
# | ordered | programs that run together share what they load (18.1) | `tiled.py` |
# | pipelined | the next tiles are on their way while this one is multiplied | `tiled.py` |
# | persistent | one program for each multiprocessor; it loads for its next tile before it stores | `persistent.py` |
# | copy engine | the copy engine (TMA) moves whole tiles, so threads compute no addresses (chapter 09) | `tma.py` |
# | warp roles | one warp loads, eight multiply, in Gluon (chapter 09) | `hopper.py` |
#
# > **The answer.** The naive kernel reaches 1 % of the peak. Tiles on the tensor cores bring it to 29 %. From there on,
# > every gain comes from waiting less: loading ahead gives 49 %, no pause between tiles gives 68 %, and the copy engine
# > gives 79 %. cuBLAS reaches 76 % in the same run. No kernel reaches 100 %, because a chip with all its tensor cores
# > at work comes to its limit of power and lowers its clock. At the end of this run the clock was at 1.65 GHz, a tenth
# > below the 1.83 GHz from which the peak is computed.
#
# Look at *ordered*: it is a little slower than *tiled*. A better order of the tiles saves loads from memory. But a
# kernel without a pipeline is not held up by memory's *bandwidth*. It waits for one load after the other, and a better
# order does not shorten that wait much. An idea pays only if it improves what you are waiting for.

# %% [markdown]
# ## The order of the tiles
#
# In this chapter all weights are stored as `nn.Linear` keeps them: `x` is [rows, inner], `weight` is [outer, inner],
# and their product $x \cdot weight^T$ is [rows, outer]. So `inner` is the dimension that is summed over.
#
# A kernel cuts the result into *tiles*, for example of 128 rows by 256 columns, and one program computes one tile. To
# do this, it goes along `inner` in *blocks* of, say, 64 numbers. For each block it loads one tile of `x`, for the rows
# of its result, and one tile of `weight`, for the columns.
#
# Many programs run at the same time, one on each multiprocessor. Programs in the same row of tiles load the same tile
# of `x`, and programs in the same column load the same tile of `weight`. If they do so at about the same time, only the
# first load reads memory, and the others find the tile in the L2 cache. So the tiles that are computed *together*
# decide how many bytes are read from memory. Which ones these are follows from the order in which programs take them.
#
# Take a result of 9 × 9 tiles, an `inner` of nine blocks, and nine programs at a time. If the programs go row by row,
# the first nine compute the first row of tiles. Together they read the 9 tiles of `x` in this row, one for each block,
# and all 81 tiles of `weight`. That makes 90 tiles. If they compute a square of 3 × 3 tiles instead, they read 3 · 9
# tiles of `x` and 3 · 9 of `weight`, which makes 54. The work is the same, and so are the results.
#
# To get something like a square, the programs go down a *strip*. A strip has a few row tiles, say 8, and is as wide as
# the whole result. The first 8 programs take its first column from top to bottom, the next 8 take its second column,
# and so on to the last column. Then comes the next strip.
#
# The table shows which program takes which tile, with strips of 3 and a result of 7 row tiles. The last strip has only
# one row tile left, so it is *thinner*: 1 instead of 3.
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
# The thin last strip is where such code goes wrong. A kernel in ROCm's FlyDSL went down groups of 8 row tiles and took
# the last group to be as high as the others. With 1,024 rows in tiles of 128 there are 8 row tiles, and the result was
# right. With 1,152 rows there are 9. Then the kernel addressed row tiles that do not exist, and the result was wrong.
# At 1,536 rows the GPU reported a page fault ([FlyDSL#979](https://github.com/ROCm/FlyDSL/pull/979)).
#
# nvFuser rounded the number of row tiles up to a multiple of the strip instead, so its grid had more programs than
# there are tiles ([Fuser#3942](https://github.com/NVIDIA/Fuser/issues/3942)). In a published mixture-of-experts kernel,
# the program's number was taken modulo the number of column tiles, where it should have been the row tiles. The kernel
# seemed to be much faster, because it read some weights again and again and others never
# ([applied-ai#25](https://github.com/meta-pytorch/applied-ai/issues/25)).
#
# Now a large case. A product of 8192³ in tiles of 128 × 256 has 64 row tiles and 32 column tiles, and an H100 runs 132
# programs at a time. Row by row, these are four whole rows of tiles and four tiles of a fifth. For one block of `inner`
# they load 5 tiles of `x` and 32 of `weight`, 37 together. **Predict** how many tiles the 132 programs load together
# for one block if they go down strips of 8.

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
    the rows of its tile, and the tile of weight that has its columns. A tile that several programs load counts once.
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

# %%
from course_lib.figures.products.order import draw_order

draw_order(best_tile_at, 132, 64, 32, (1, 8))

# %% [markdown]
# In strips of 8 the programs load 8 + 17 = 25 tiles instead of 37. Strips of 16 need 16 + 9 = 25 as well. Taller strips
# need more again, and at 64 the programs go down whole columns.
#
# A square of tiles would need the fewest, because of all rectangles with the same area it has the smallest sum of its
# sides. But tiles need not be square themselves. Here they are twice as wide as they are high, so a tile of `weight`
# has twice as many bytes as one of `x`. In bytes, strips of 16 load less than strips of 8: as much as 16 + 2 · 9 = 34
# tiles of `x`, against 8 + 2 · 17 = 42.

# %% [markdown]
# ## A product in tiles
#
# Now the kernel. A program has one tile of the result, `block_m` rows by `block_n` columns. It keeps the sums of that
# tile in registers, in float32. In a loop along `inner` it loads `block_k` numbers of each of its rows of `x`, and of
# each of its rows of `weight`. It multiplies the two tiles with `tl.dot` and adds the product to the sums. At the end
# it rounds once and stores.
#
# Because `weight` is [outer, inner], a tile of it is [block_n, block_k] in memory, but `tl.dot` needs [block_k,
# block_n] on its right side. You can turn the tile with `tl.trans`. Or you load it that way round: compute the offsets
# so that the rows of `weight` become the columns of your tile.
#
# How many bytes does this load? A program loads `block_m + block_n` rows of `inner` numbers. For 300 rows, 500 outer
# and 200 inner in tiles of 64 × 128 there are 5 · 4 = 20 programs. Each loads up to 192 rows of 200 numbers. That makes
# up to 768,000 numbers, although `x` and `weight` have only 160,000. Larger tiles load less, and the L2 cache serves
# most of the rest.
#
# Two things go wrong more often than the multiplication itself.
#
# **Strides.** `x` may be a slice of a wider matrix, or a transposed view. Then its rows lie `x.stride(0)` elements
# apart, and the numbers of a row lie `x.stride(1)` apart. So the next block begins `block_k` times that stride further
# on, not `block_k`. A change proposed for FastDeploy's mixture-of-experts kernel, as a fix of crashes, removed this
# factor. The reviewer answered that the stride need not be 1
# ([FastDeploy#2643](https://github.com/PaddlePaddle/FastDeploy/pull/2643)).
#
# **The end of inner.** If `inner` is no multiple of `block_k`, some numbers of the last block do not exist. They must
# be loaded as 0 in `x` *and* in `weight`. If you mask only one side, the other side loads whatever lies behind its row
# in memory. Multiplied by 0 that gives 0, unless it is NaN or infinite.
#
# In the next cell, a row of three numbers is a slice of a wider matrix that holds NaN. With one side masked the sum is
# NaN, and with both sides masked it is 6.

# %%
wide = torch.full((1, 8), float("nan"))
wide[:, :3] = 1.0
row = wide[:, :3]  # three numbers; behind them lies NaN
masked = torch.tensor([[2.0, 2.0, 2.0, 0.0]])  # four numbers, the last masked
print("one side masked:  ", (masked * wide[:, :4]).sum().item())
print("both sides masked:", (masked[:, :3] * row).sum().item())

# %%
# Exercise 18.2 · A tiled product
@triton.jit
def product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, outer, inner,
    x_row_stride, x_inner_stride, weight_row_stride, weight_inner_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One program: one tile of the result. You may change the arguments."""
    # BEGIN SOLUTION
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_rows = x_pointer + row.to(tl.int64)[:, None] * x_row_stride  # [BLOCK_M, 1]
    weight_rows = weight_pointer + column.to(tl.int64)[:, None] * weight_row_stride  # [BLOCK_N, 1]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
        x_tile = tl.load(x_rows + k * x_inner_stride, mask=(row < rows)[:, None] & (k < inner), other=0.0)
        weight_tile = tl.load(
            weight_rows + k * weight_inner_stride, mask=(column < outer)[:, None] & (k < inner), other=0.0
        )
        sums = tl.dot(x_tile, tl.trans(weight_tile), sums, input_precision="ieee")
    inside = (row < rows)[:, None] & (column < outer)[None, :]
    out_tile = out_pointer + row.to(tl.int64)[:, None] * outer + column[None, :]
    tl.store(out_tile, sums.to(out_pointer.dtype.element_ty), mask=inside)
    # END SOLUTION


def product(x: torch.Tensor, weight: torch.Tensor, block_m: int, block_n: int, block_k: int) -> torch.Tensor:
    """x · weightᵀ, by one launch of your kernel.

    x: [rows, inner]. weight: [outer, inner], as nn.Linear keeps it. All sizes are at least 1. Both are float32 or both
        float16 (bfloat16 too, on a GPU that has it), each with any strides: transposed, with gaps, elements apart. Rows
        may begin beyond 2³¹ elements, but each is shorter than that. What lies between the elements of a view is not
        yours and may be NaN.
    block_m, block_n, block_k: the tile of a program and the numbers of inner that it takes at a time: powers of two,
        16 to 128. You may take another block_k.
    Returns: a new contiguous tensor [rows, outer] of x's dtype. Sums are float32, rounded once at the end.
    A program loads its block_m rows of x and its block_n rows of weight once, and stores its tile once. Bytes are
    counted. Hand the kernel the tensors as they are, without a copy.
    """
    # BEGIN SOLUTION
    (rows, inner), outer = x.shape, weight.shape[0]
    out = torch.empty(rows, outer, dtype=x.dtype, device=x.device)
    product_kernel[(triton.cdiv(rows, block_m), triton.cdiv(outer, block_n))](
        x, weight, out, rows, outer, inner, *x.stride(), *weight.stride(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    return out
    # END SOLUTION


# %%
best_product = check("18.2", product).best

# %% [markdown]
# ## What the tensor cores need
#
# Your kernel multiplies tiles, and on a GPU `tl.dot` becomes an instruction of the tensor cores. On Hopper this
# instruction is `wgmma`. It reads its operands from shared memory. The tensor cores of one multiprocessor need 1,024
# cycles to multiply a tile of 128 × 256 with 64 numbers of `inner`. In this time the next 48 KB must arrive, which is
# 48 bytes in each cycle.
#
# For that three things have to be right. You can read all of them in the machine code, without a GPU:
#
# - **Matrix instructions.** Without them the ordinary units multiply, at a fifteenth of the rate.
# - **Wide loads.** A thread should load 16 bytes at once, or the copy engine should bring a whole tile.
# - **No spills.** The sums of a tile of 128 × 256 take 128 registers of each of 256 threads. If the other values do not
#   fit beside them, the compiler *spills*: it writes some to memory and reads them back, in the innermost loop.
#
# The next cell compiles five steps of the ladder for an H100 and counts these things. **Predict** how many registers a
# thread of the persistent kernel needs. The limit is 255.

# %%
predict("18 registers of the persistent product", ..., "registers")

# %%
from course_lib.hardware.compiler.views import compile_many
from course_lib.kernels.products import naive as naive_step, persistent as persistent_step, tiled as tiled_step
from course_lib.kernels.products import tma as copy_engine_step

steps = {}
for name, step in (("naive", naive_step), ("tiled", tiled_step), ("persistent", persistent_step),
                   ("copy engine", copy_engine_step)):
    case = next(case for case in step.compile_cases() if 90 in case.archs)
    steps[name] = next(request for request in case.requests() if request["arch"] == 90)
steps["tiled"] = {**steps["tiled"], "num_stages": 1}
steps = {"naive": steps["naive"], "tiled": steps["tiled"], "pipelined": {**steps["tiled"], "num_stages": 3}, **steps}
print(f"{'step':<13}{'registers':>10}{'spilled':>9}{'shared':>9}{'matrix instructions':>22}   loads and copies")
for name, view in zip(steps, compile_many(list(steps.values()))):
    loads = [f"{count} × {width} B" for width, count in sorted(view.load_widths.items(), reverse=True)]
    loads += [f"{count} by {kind}" for kind, count in view.asynchronous_copies.items()]
    products = ", ".join(f"{count} {kind}" for kind, count in view.instructions.items()) or "none"
    print(f"{name:<13}{view.registers:>10}{f'{view.spill_bytes} B':>9}{format_bytes(view.shared_bytes):>9}"
          f"{products:>22}   {', '.join(loads)}")
    if name == "persistent":
        needed = view.registers
measured("18 registers of the persistent product", needed, "registers")

# %% [markdown]
# The naive kernel has no matrix instruction. In the tiled kernel each thread loads 16 bytes at a time into registers,
# and the tensor cores wait for these loads. The pipelined kernel has three stages, and its loads are `cp.async`. They
# go straight to shared memory, so the thread does not wait for them. The copy engine moves a tile with one or a few
# instructions of a single thread. None of the kernels spills.

# %% [markdown]
# ## Sharing tiles: stream-K · deeper
#
# Nine tiles on a GPU with room for four programs take three rounds. In the third round one program works and three have
# nothing to do. So nine tiles take as long as twelve would, and a quarter of the time is wasted. At 8192³ the same
# happens, but the waste is only 3 %: 2,048 tiles on 132 multiprocessors are 15.5 rounds, which take the time of 16.
#
# *Stream-K* shares out steps instead of tiles. A *step* is one block of `inner` of one tile. Number all steps, tile
# after tile, and give each program the same number of consecutive ones. If a tile has 4 steps, 9 tiles have 36, and
# each of 4 programs takes 9. The table shows who does what:
#
# | program | steps | tiles |
# |---|---|---|
# | 0 | 0 to 8 | 0 and 1 whole, the first step of 2 |
# | 1 | 9 to 17 | the other three steps of 2, 3 whole, the first two of 4 |
# | 2 | 18 to 26 | the last two of 4, 5 whole, the first three of 6 |
# | 3 | 27 to 35 | the last of 6, 7 and 8 whole |
#
# All four programs end at the same time, after 9 steps. Whole tiles would take 12. The cost is in the shared tiles. Two
# programs share tile 2, for example, so one of them has to add two parts. For this each program has a *slot* in a
# workspace, with room for the sums of one tile, and a *flag*. A program that does not finish a tile leaves its sums in
# its slot and raises its flag. One program is the *owner* of the tile. It waits for the flag, adds the slot to its own
# sums, and stores the result.
#
# Who is the owner? In the [stream-K paper](https://arxiv.org/abs/2301.03598) it is the program with the tile's first
# step. It waits for programs with higher numbers, and that is safe only if all programs run at once. Here a program may
# have to wait until there is room for it. Programs begin in the order of their numbers, so on a small GPU program 1 may
# begin only when program 0 has ended. If program 0 waits for program 1, both wait forever. So choose an owner that
# waits only for programs *before* it.
#
# A second fault gives wrong numbers, and not every time. A program has four warps, and each stores its part of the sums
# at its own pace. If one warp raises the flag while another has not stored yet, the owner reads a slot that is only
# partly filled. A *barrier* prevents this, because no warp goes on before all four have arrived there. ROCm's stream-K
# kernel had no barrier between storing the sums and raising the flag
# ([ROCm/triton#745](https://github.com/ROCm/triton/pull/745)).
#
# You write the plan and its actions in plain Python. A model of a GPU plays them with slow and fast programs, with slow
# warps, and with room for one program, for a few or for all. It tells you who waits forever, and which tiles are not
# whole. A slot that nobody has stored holds *poison*, a value that makes a result wrong whenever it is added.

# %%
# Exercise 18.3 · Stream-K: the plan and the repair
def program(number: int, programs: int, tiles: int, steps: int):
    """The actions of one of the programs that share a product's steps.

    Each of the tiles has the same number of steps, 0 … steps - 1; over all tiles they are numbered tile · steps + step.
    The programs share them evenly: each does consecutive ones, in the order of the programs, and the numbers of steps
    differ by at most one. Where they differ, the first programs have one more. All four arguments are at least 1
    (number: 0 … programs - 1), and programs may be more than there are steps: then the last ones have none.

    Yields (or returns a list of) actions:
        ("multiply", tile, begin, end)   adds the steps begin … end - 1 of a tile to the sums in registers
        ("leave",)                       the program's four warps begin to store the sums to its slot, each at its pace
        ("barrier",)                     goes on when all four have stored
        ("raise",)                       raises the program's flag
        ("wait", other)                  goes on when the flag of program `other` is up
        ("add", other)                   adds the slot of program `other` to the sums
        ("store", tile)                  writes the sums as the result of a tile
        The first "multiply" or "add" begins new sums, and so does the first one after "leave" or "store".
    Each tile is stored once, with each of its steps once. A program leaves the sums of at most one tile, and only of
    one that it does not store itself. It does its steps in any order of tiles.
    All of this must hold on a machine with room for any number of programs at once, also for one. Programs begin in
    ascending order, and one that waits keeps its room. A step may take any time in any program, and so may a warp.
    """
    # BEGIN SOLUTION
    def first_step(of):
        """The first step of a program. Its steps end where those of the next program begin."""
        each, more = divmod(tiles * steps, programs)
        return of * each + min(of, more)

    begin, end = first_step(number), first_step(number + 1)
    while begin < end:
        tile = (end - 1) // steps  # from the last tile to the first
        start = max(begin, tile * steps)
        yield "multiply", tile, start - tile * steps, end - tile * steps
        if end == (tile + 1) * steps:  # the owner has the last step
            other = number
            while start > tile * steps:  # programs before have done the rest
                other -= 1
                yield "wait", other
                yield "add", other
                start = first_step(other)
            yield "store", tile
        else:
            yield ("leave",)
            yield ("barrier",)
            yield ("raise",)
        end = max(begin, tile * steps)
    # END SOLUTION


# %%
best_program = check("18.3", program).best

# %% [markdown]
# The next cell plays your programs with 9 tiles of 4 steps on a machine with room for all four. It draws what each
# program did, and when: a blue bar names a tile, and below it which of its steps were computed. A step takes 10 ticks,
# a barrier waits for the slowest warp (7 ticks here), and other actions take 1. Whole tiles would take three rounds of
# 40 ticks. **Predict** after how many ticks your last program has finished.

# %%
predict("18 ticks of stream-K, 9 tiles on 4 programs", ..., "ticks")

# %%
from course_lib.figures.products.shares import draw_shares
from course_lib.hardware.stream_model import play_stream_k

events = []
played = play_stream_k({"program": best_program}, 4, 9, 4, 4, [10], [2, 3, 4, 6], events)
print(played["ending"])
print(measured("18 ticks of stream-K, 9 tiles on 4 programs", max(end for *_, end in events), "ticks"))
draw_shares(events, 120)

# %% [markdown]
# It is about 100 ticks instead of 120: 90 for nine steps, and the rest for leaving, waiting and adding. Our answer goes
# through its tiles from the last to the first. So it begins with the part that it leaves to another program. The tile
# for which it has to wait comes last, when the other program's part is most likely there already.

# %% [markdown]
# ## The end of a product · deeper
#
# When the loop ends, the sums of a tile are in registers. Often the next operation works element by element: it adds a
# bias, applies an activation, or adds a residual. A kernel can do this with its sums before it stores them. This part
# of a kernel is called the *epilogue*, and it saves writing the sums and reading them again.
#
# A modern MLP gains most from it. It multiplies `x` by two weights of the same size, *gate* and *up*, and keeps
# $silu(gate) \cdot up$, where $silu(g) = g \cdot \sigma(g) = g / (1 + e^{-g})$. Take 4,096 tokens and a hidden size of
# 14,336. In 16 bits the results of gate and of up have 117 MB each. Two products write both, and a third kernel reads
# both and writes the result, 117 MB too. Together that is 587 MB. If one program computes a tile of gate *and* the same
# tile of up, it needs twice the registers for sums, but it writes only the result: 117 MB.
#
# So a program computes a tile of `block_n` columns of the *result*. For this it loads `block_n` rows of the gate and
# `block_n` rows of up. The two weights are stored as one matrix of 2 · hidden rows: first all rows of the gate, then
# all rows of up. With a hidden size of 40, for example, column 3 of the result needs rows 3 and 43 of the weight, and
# elements 3 and 43 of the bias.
#
# Three things deserve care.
#
# **Where to round.** Plain PyTorch in float16 rounds gate and up to 16 bits, then silu of the gate, then the product of
# both, then the sum with the residual. In one kernel everything stays in float32 and is rounded once, at the end. That
# is more exact, and the exercise requires it.
#
# **Large gates.** You could also write $g \cdot e^g / (1 + e^g)$, which is the same function on paper. But at $g = 100$
# it is infinity divided by infinity in float32, which is NaN. **Predict** what $g / (1 + e^{-g})$ gives at $g = -100$,
# where $e^{-g}$ overflows.

# %%
gate = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0])
print("g · exp(g) / (1 + exp(g)):", (gate * gate.exp() / (1 + gate.exp())).tolist())
print("g / (1 + exp(-g)):        ", (gate / (1 + (-gate).exp())).tolist())

# %% [markdown]
# The first form fails for large positive gates. The second form is right on both sides, because a finite number divided
# by infinity is 0. `tl.sigmoid` computes $1 / (1 + e^{-g})$ in this way.
#
# **The bias once, not once a block.** The bias belongs to the finished sum. If you add it in the loop, it counts once
# for each block of `inner`. A test whose `inner` fits into one block does not notice that. The residual is added last,
# after the activation.

# %%
# Exercise 18.4 · The end of a product
@triton.jit
def gated_product_kernel(
    x_pointer, weight_pointer, bias_pointer, residual_pointer, out_pointer, rows, hidden, inner,
    x_stride, weight_stride, residual_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One program: one tile of the result. A pointer may be None. You may change the arguments."""
    # BEGIN SOLUTION
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    x_rows = x_pointer + row.to(tl.int64)[:, None] * x_stride  # [BLOCK_M, 1]
    gate_rows = weight_pointer + column.to(tl.int64)[:, None] * weight_stride  # [BLOCK_N, 1]
    up_rows = weight_pointer + (column + hidden).to(tl.int64)[:, None] * weight_stride
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]  # [1, BLOCK_K]
        x_tile = tl.load(x_rows + k, mask=(row < rows)[:, None] & (k < inner), other=0.0)
        mask = (column < hidden)[:, None] & (k < inner)
        gate_tile = tl.load(gate_rows + k, mask=mask, other=0.0)  # [BLOCK_N, BLOCK_K]
        up_tile = tl.load(up_rows + k, mask=mask, other=0.0)
        gate = tl.dot(x_tile, tl.trans(gate_tile), gate, input_precision="ieee")
        up = tl.dot(x_tile, tl.trans(up_tile), up, input_precision="ieee")
    if bias_pointer is not None:
        gate += tl.load(bias_pointer + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_pointer + hidden + column, mask=column < hidden, other=0.0).to(tl.float32)[None, :]
    result = gate * tl.sigmoid(gate) * up
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    if residual_pointer is not None:
        residual_tile = residual_pointer + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        result += tl.load(residual_tile, mask=inside, other=0.0).to(tl.float32)
    out_tile = out_pointer + row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(out_tile, result.to(out_pointer.dtype.element_ty), mask=inside)
    # END SOLUTION


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
    block_m: int, block_n: int, block_k: int,
) -> torch.Tensor:
    """silu(x · gateᵀ + gate bias) · (x · upᵀ + up bias) + residual, by one launch of your kernel.

    x: [rows, inner]. weight: [2 · hidden, inner]: the rows of the gate first, then those of up.
    bias: [2 · hidden], contiguous, in the same order; or None for no bias. residual: [rows, hidden], or None for none.
        All sizes are at least 1. All tensors are float32 or all float16 (bfloat16 too, on a GPU that has it). The
        numbers of a row lie side by side, but rows of x, weight and residual may lie any distance apart, also beyond
        2³¹ elements. What lies between them is not yours and may be NaN. The gate's sums may be anywhere in ±10⁴.
    block_m, block_n, block_k: rows and columns of the result's tile, and the numbers of inner that a program takes at a
        time: powers of two, 16 to 128. You may take another block_k.
    Returns: a new contiguous tensor [rows, hidden] of x's dtype. All arithmetic is float32, rounded once at the end.
    A program loads its block_m rows of x once, and its block_n rows of the gate and of up. Besides these it loads only
    the biases and the residual, and it stores only its tile. Bytes are counted. Hand the kernel the tensors as they
    are, without a copy.
    """
    # BEGIN SOLUTION
    (rows, inner), hidden = x.shape, weight.shape[0] // 2
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    gated_product_kernel[(triton.cdiv(rows, block_m), triton.cdiv(hidden, block_n))](
        x, weight, bias, residual, out, rows, hidden, inner,
        x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    return out
    # END SOLUTION


# %%
best_gated_product = check("18.4", gated_product).best

# %% [markdown]
# In the library, `large_product` of `course_lib.kernels.products.large` does the same with `gated=True`.
#
# Here is a small test of any such kernel. If all weights are 0 and there is no residual, each row of the result is
# $silu(b_{gate}) \cdot b_{up}$, whatever `x` is. The difference in the next cell should be no larger than a rounding of
# float32, about $10^{-7}$.

# %%
x, weight, bias = torch.randn(5, 70), torch.zeros(80, 70), torch.randn(80)
out = best_gated_product(x.to(device), weight.to(device), bias.to(device), None, 16, 32, 32).cpu()
print("largest difference:", (out - F.silu(bias[:40]) * bias[40:]).abs().max().item())

# %% [markdown]
# ## Two products in one kernel · deeper
#
# An MLP without a gate is a product, an activation and a second product. If the activation is the epilogue of the first
# product, that makes two kernels. The tensor between them, `hidden` numbers for each row, is written once and read
# once. Could one kernel do both products, so that this tensor is never stored?
#
# It can if each program keeps whole rows. The program computes a block of hidden numbers, activates them, and
# multiplies them at once by the matching columns of the second matrix. It adds these products to sums that are whole
# rows of the result. So a tile must be as wide as the result. A width of 128 or 256 fits. Llama's 4,096 columns do not:
# they would need 16 programs for each block of rows, and each of these programs would have to compute all hidden
# numbers for itself. The first product would then be computed 16 times.
#
# So one kernel is possible only for narrow MLPs. Is it worth it there? Take one kernel's time to be the longer of two:
# the time for its bytes and the time for its FLOPs. **Predict** how many times as fast one kernel could be at most, for
# 2²⁰ rows of 128 numbers, 512 hidden ones, and 128 results, on an H200 with 4.3 TB/s and 700 TFLOP/s.

# %%
predict("18 two kernels over one, a narrow MLP", ..., "times")

# %%
def mlp_seconds(rows, width, hidden, bandwidth=4.3e12, flops=700e12):
    """(seconds in two kernels, seconds in one) of rows of `width` through `hidden` and back, in 16 bits."""
    ends, middle, product_time = 2 * rows * width, 2 * rows * hidden, 2 * rows * hidden * width / flops
    two = 2 * max((ends + middle) / bandwidth, product_time)
    return two, max(2 * ends / bandwidth, 2 * product_time)


print(f"{'rows':>10}{'width':>7}{'hidden':>8}{'two kernels':>13}{'one':>10}{'times':>7}")
for rows, width, hidden in ((2**20, 128, 512), (2**20, 256, 1024), (2**14, 4096, 14_336)):
    two, one = mlp_seconds(rows, width, hidden)
    print(f"{rows:>10,}{width:>7,}{hidden:>8,}{format_seconds(two):>13}{format_seconds(one):>10}{two / one:>7.2f}")
measured("18 two kernels over one, a narrow MLP", mlp_seconds(2**20, 128, 512)[0] / mlp_seconds(2**20, 128, 512)[1],
         "times")

# %% [markdown]
# On paper one kernel is 1.6 times as fast at a width of 128, because the two kernels spend most of their time on bytes.
# At a width of 256 it gains nothing: there the FLOPs take longer than the bytes, and one kernel does as many FLOPs as
# two. At Llama's 4,096 it would gain nothing either, even if it fitted.
#
# Now the measurement. The library has this kernel (`fused_mlp.py`). With the tanh form of GELU, on an H200:
#
# | | PyTorch | torch.compile | two kernels | one kernel |
# |---|---|---|---|---|
# | 2²⁰ × 128, hidden 512 | 1,300 µs | 1,334 µs | 1,009 µs | 1,067 µs |
# | 2²⁰ × 256, hidden 1,024 | 3,125 µs | 3,240 µs | 2,460 µs | 2,924 µs |
#
# One kernel loses, even at a width of 128. The count above left out the activation. A GELU takes some twenty operations
# of the ordinary units. At a width of 128 there are 537 million GELUs (2²⁰ · 512), which is 0.4 ms of work. With two
# kernels, the tensor cores and the copies go on with other tiles during this time. In our one kernel the same warps do
# the first product, the GELU and the second product one after the other, so everything else waits.
#
# To win, the kernel would need what attention needed in chapter 09. Attention also has two products with something
# between them, and there one group of warps multiplies while another computes the softmax.

# %% [markdown]
# ## A router: which experts, and how much of each
#
# In a *mixture of experts* a layer has many MLPs instead of one. They are called *experts*, and a token goes through
# only $k$ of them. Mixtral has 8 experts and $k = 2$, Qwen3-30B has 128 and $k = 8$, and DeepSeek-V3 has 256 and
# $k = 8$. So the layer stores the weights of all experts, but a token costs only the FLOPs of $k$.
#
# A small linear layer, the *router*, computes one number for each token and each expert. These numbers are called
# *logits*. They decide two things: which $k$ experts the token goes to, and by which weights the results of these
# experts are added. Models do this in three ways.
#
# Take one token, four experts, $k = 2$ and the logits 2, 1, 0 and −1. Their softmax is 0.644, 0.237, 0.087 and 0.032.
#
# 1. **"softmax"** (OLMoE). Keep the two largest as they are: 0.644 and 0.237. They add up to 0.881, not to 1.
# 2. **"renormalised"** (Mixtral, Qwen3). Divide them by their sum: 0.731 and 0.269. A softmax over the two chosen
#    logits alone gives the same, because the sum over all experts cancels.
# 3. **"sigmoid"** (DeepSeek-V3). Each expert is scored by itself: sigmoid gives 0.881, 0.731, 0.500 and 0.269. To each
#    score a *bias* of that expert is added, and the two largest sums are chosen. (You see below how this bias comes
#    about.) The weights come from the scores *without* the bias. With the biases 0, 0, 0.3 and 0 the sums are 0.881,
#    0.731, 0.800 and 0.269. So experts 0 and 2 are chosen. Their scores 0.881 and 0.500 are divided by their sum,
#    1.381, which gives 0.638 and 0.362. DeepSeek-V3 multiplies these weights by a scale of 2.5.
#
# The next cell computes all three.

# %%
logits, router_bias = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 0.3, 0.0])


def shown(numbers):
    return "  ".join(f"{number:.3f}" for number in numbers)


print(f"softmax over all experts      {shown(logits.softmax(0))}")
print(f"the 2 largest, renormalised   {shown(logits.softmax(0)[:2] / logits.softmax(0)[:2].sum())}")
print(f"softmax over the 2 alone      {shown(logits[:2].softmax(0))}")
print(f"sigmoid                       {shown(logits.sigmoid())}")
print(f"sigmoid + bias                {shown(logits.sigmoid() + router_bias)}")
chosen = logits.sigmoid()[[0, 2]]
print(f"weights of experts 0 and 2    {shown(chosen / chosen.sum())}")

# %% [markdown]
# If you take one way for another, no error is raised. The weights are wrong, and the text is a little worse. SGLang
# used raw logits as weights where a model does not renormalise
# ([sglang#35160](https://github.com/sgl-project/sglang/pull/35160)). LMDeploy renormalised where the model does not
# ([lmdeploy#3030](https://github.com/InternLM/lmdeploy/issues/3030)). With $k = 1$ there is a sharper sign of the same
# mistake. A softmax over the one chosen expert is 1, whatever the logits are. So its gradient is 0, and the router
# never learns ([Megatron-LM#894](https://github.com/NVIDIA/Megatron-LM/issues/894)).
#
# The bias brings mistakes of its own. Some kernels used it in the weights too
# ([vLLM-metax#284](https://github.com/MetaX-MACA/vLLM-metax/issues/284)). Another mistake is to search for the largest
# sum and to begin at −1. A sigmoid is never below 0, but the sum of sigmoid and bias may be below −1. If all sums are,
# such a search finds no expert. There is a similar trap after an expert was chosen. If you set its sum to 0, so that it
# is not chosen again, it is still the largest where all others are negative.
#
# **Which expert gets too much?** If most tokens go to a few experts, the others have nothing to do, and the GPU of the
# full ones is the slowest. A second term in the loss can balance the experts, but it disturbs training. DeepSeek's rule
# needs no such term ([Wang et al., 2024](https://arxiv.org/abs/2408.15664)). After each training step count the tokens
# of each expert, its *load*. If an expert got fewer tokens than the mean, its bias grows by a small *rate*. If it got
# more, its bias shrinks by the same rate. Then subtract the mean of the biases from all of them, so that they do not
# drift together. (torchtitan takes the mean off the steps instead, which keeps the mean of the biases where it was:
# [torchtitan#1506](https://github.com/pytorch/torchtitan/issues/1506).)
#
# For example, take the biases 0, 0, 0.3 and 0, the loads 10, 4, 4 and 2, and a rate of 0.1. The mean load is 5. The
# biases become −0.1, 0.1, 0.4 and 0.1. Their mean is 0.125, so the result is −0.225, −0.025, 0.275 and −0.025.
#
# Two details are about floating point.
#
# - Softmax turns logits of 0, −200 and −300 into 1, 0 and 0, because $e^{-200}$ is below the smallest float32. But the
#   second expert is still ahead of the third. So choose by the logits, whose order softmax does not change.
# - In float32 the sigmoid of a logit below −89 comes out as 0, because $e^{89}$ overflows. If that happens to all $k$
#   chosen experts, the sum of their sigmoids is 0, and you cannot divide by it. The rule here is that the weights are
#   then 0, so these experts add nothing to the token.

# %%
# Exercise 18.5 · The router
def route(
    logits: torch.Tensor, k: int, kind: str, bias: torch.Tensor | None = None, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which k experts each token goes to, and the weight of each.

    logits: float32, float16 or bfloat16 [tokens, experts], contiguous, at least 1 of each, any numbers from -10,000 to
        10,000.
    k: from 1 to the number of experts.
    kind: what chooses and what weighs.
        "softmax": the k largest logits are chosen. Their weights are their shares in the softmax over all experts.
        "renormalised": the same, then divided by the sum of the token's k weights.
        "sigmoid": the k largest sums of sigmoid(logit), in float32, and bias are chosen. The weights are the sigmoids,
            without the bias, divided by the sum of the token's k sigmoids, times scale. Where that sum is 0 in float32,
            the weights are 0.
    bias: float32 [experts], of either sign and up to 3 in size, or None for no bias. scale: any number of 0 or more.
        Both are given only for "sigmoid".
    Returns: (experts, weights), int64 and float32 [tokens, k]. A token's experts are in the order of what chooses them,
    the larger first; of equal ones the expert with the smaller number comes first. All arithmetic has at least
    float32's precision.
    """
    # BEGIN SOLUTION
    numbers = logits.float()
    if kind == "sigmoid":
        scores = numbers.sigmoid()
        choosing = scores if bias is None else scores + bias
    else:
        scores, choosing = numbers.softmax(dim=-1), numbers
    experts = choosing.sort(descending=True, stable=True).indices[:, :k]
    weights = scores.gather(-1, experts)
    if kind == "renormalised":
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if kind == "sigmoid":
        total = weights.sum(dim=-1, keepdim=True)
        weights = scale * weights / torch.where(total > 0, total, 1.0)
    return experts, weights
    # END SOLUTION


def balanced(bias: torch.Tensor, load: torch.Tensor, rate: float) -> torch.Tensor:
    """The router's bias after a training step.

    bias: float32 [experts], at least 1; its mean may be any number.
    load: int64 [experts], how many tokens each expert got in this step, from 0 to 2⁴⁰.
    rate: 0 or more.
    Returns: float32 [experts]. To the bias of an expert that got fewer tokens than the mean over all experts the rate
    is added; from that of an expert that got more it is subtracted; where the load equals the mean the bias stays. Then
    the mean of the new biases is subtracted from each of them.
    """
    # BEGIN SOLUTION
    load = load.double()
    moved = bias + rate * (load.mean() - load).sign().float()
    return moved - moved.mean()
    # END SOLUTION


# %%
best_route, best_balanced = check("18.5", route, balanced).best

# %% [markdown]
# Now let the rule work. The next cell simulates 1,000 steps with 512 tokens, 16 experts and $k = 2$. All tokens prefer
# some experts to others, so without a bias the loads differ much. At the start the fullest expert gets 2.75 times as
# many tokens as the mean. **Predict** how many times the mean it gets after 1,000 steps.

# %%
predict("18 tokens of the fullest expert over the mean, after 1,000 steps", ..., "times")

# %%
generator = torch.Generator().manual_seed(0)
liked = 0.8 * torch.randn(16, generator=generator)  # what all tokens have in common
bias = torch.zeros(16)
print(f"{'step':>6}{'variance of the load':>23}{'fullest over mean':>20}{'mean of the bias':>19}")
for step in range(1001):
    experts, _ = best_route(liked + torch.randn(512, 16, generator=generator), 2, "sigmoid", bias)
    load = torch.bincount(experts.flatten(), minlength=16)
    if step in (0, 10, 100, 300, 1000):
        variance, fullest = load.float().var(), load.max() / load.float().mean()
        print(f"{step:>6,}{variance:>23,.0f}{fullest:>19.2f}×{bias.mean():>19.1e}")
    bias = best_balanced(bias, load, 0.001)
measured("18 tokens of the fullest expert over the mean, after 1,000 steps", float(fullest), "times")

# %% [markdown]
# After 1,000 steps the variance of the load is a 55th of what it was, and the mean of the bias has stayed at 0 up to
# rounding. The loads do not become equal, because 512 tokens are few. Even if no expert were preferred, each would get
# a token with a probability of 1/8, and chance alone would make a variance of about $512 \cdot 1/8 \cdot 7/8 = 56$. The
# rule comes close to that.
#
# Note what the rule does *not* use: how far a load is from the mean. Only the sign counts, so one step with a strange
# batch can do little harm.

# %% [markdown]
# ## From tokens to experts, and back · deeper
#
# A kernel multiplies a tile of rows by a matrix, so all rows of a tile need the same matrix. But the tokens of a batch
# arrive in the order of the text, and each one has its own experts. So the rows are first put in order of their
# experts. This is called the *permutation*.
#
# Number the choices: choice $c$ of token $t$ is *slot* $t \cdot k + c$. Sort the slots by their expert. Let each expert
# begin at a multiple of the rows of a tile. We call this number of rows the *block*. Then each tile belongs to one
# expert. Places are left over between an expert's last slot and the next multiple. They get a *sentinel*, a number that
# is no slot: tokens $\cdot k$, which is one more than the last slot.
#
# Take 3 tokens with $k = 2$, 4 experts and a block of 4. Token 0 goes to experts 2 and 0, token 1 to 2 and 3, token 2
# to 0 and 2. So there are 6 slots, and the sentinel is 6:
#
# | expert | 0 | 2 | 3 |
# |---|---|---|---|
# | slots | 1, 4 | 0, 2, 5 | 3 |
# | places | 0 … 3 | 4 … 7 | 8 … 11 |
# | filled up | 1, 4, 6, 6 | 0, 2, 5, 6 | 3, 6, 6, 6 |
#
# In the exercise you return two tensors. `slots` has the slot of each place: 1, 4, 6, 6, 0, 2, 5, 6, 3, 6, 6, 6.
# `tile_experts` has the expert of each tile: 0, 2, 3. Expert 1 has no token, so it has no tile. Only six of the twelve
# places are real, so the kernel computes twice as many rows as it must.
#
# **How many rows are filled up?** An expert with many rows wastes half a block on average. An expert with few rows
# wastes most of its only block. That is little for 8 large experts, and a lot for 128 small ones. **Predict** by what
# factor the rows grow for 64 tokens, with 128 experts, $k = 8$ and tiles of 128 rows.

# %%
predict("18 padded rows over real ones, 64 tokens, tiles of 128", ..., "times")

# %%
def padded_over_real(tokens, experts=128, k=8, block=128, seed=0):
    """Rows of all tiles over the rows that a token needs, when each token goes to k random experts."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(tokens, experts, generator=generator).argsort(dim=1)[:, :k]
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    return int(((counts + block - 1) // block * block).sum()) / (tokens * k)


print(f"{'tokens':>8}{'tiles of 128':>15}{'tiles of 16':>14}")
for tokens in (64, 1024, 8192):
    print(f"{tokens:>8,}{padded_over_real(tokens):>14.2f}×{padded_over_real(tokens, block=16):>13.2f}×")
measured("18 padded rows over real ones, 64 tokens, tiles of 128", padded_over_real(64), "times")

# %% [markdown]
# The 64 tokens have 512 choices, so an expert gets 4 rows on average. Of the 128 experts 126 have a row here, and each
# of them gets a tile of 128. If all had one, the factor would be 128 · 128 / 512 = 32. Tiles of 16 rows waste far less,
# so servers choose the tile by the number of tokens. Then a list that was made for one block must not be read with
# another ([vllm#16247](https://github.com/vllm-project/vllm/issues/16247)).
#
# **Back again.** After the experts each place holds one row of results. A token's result is the sum of its $k$ rows,
# each times its weight. Two things go wrong here.
#
# - The weight belongs to the *choice*: `weights[t, c]`. A kernel that takes one weight for each token is right only if
#   $k$ is 1 ([Triton-distributed#133](https://github.com/ByteDance-Seed/Triton-distributed/issues/133)).
# - Rows at sentinel places are never written, so they hold what memory held before. A weight of 0 does not remove them,
#   because 0 · NaN is NaN. In torchtitan rows beyond the last expert's were never written, and the loss became NaN
#   ([torchtitan#1237](https://github.com/pytorch/torchtitan/issues/1237)). So leave such rows out of the sum.
#
# The text of a model does not show such faults reliably. In one kernel only the first token of each expert was copied,
# and the others were lost. Text may still be fluent when most of the batch is missing
# ([vllm-xpu-kernels#453](https://github.com/vllm-project/vllm-xpu-kernels/issues/453)). So test with numbers.
#
# **Several GPUs.** When experts are spread over several GPUs, each GPU serves only some of them. It marks the choices
# of all other experts with −1. In PyTorch an index of −1 means the last element, so such a choice easily lands at the
# last expert.

# %%
# Exercise 18.6 · From tokens to experts and back
def arrange(experts: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of the rows for a grouped product.

    experts: int64 or int32 [tokens, k], contiguous, at least 1 of each. The expert of each choice, from 0 to count - 1,
        or -1 for a choice that is not served here. A token may name an expert more than once, and in any order.
    count: how many experts there are, at least 1. block: at least 1.
    Returns: (slots, tile_experts), int32 [places] and int32 [places // block]. Choice c of token t is slot t · k + c.
    Each expert that has a choice gets places of its own, which begin at a multiple of block: its slots, ascending, and
    the sentinel tokens · k in the places after them, up to the next multiple of block. The experts follow each other in
    ascending order; one without a choice has no place. tile_experts has the expert of each block of places. Where no
    choice is served, both are empty.
    No loop of Python runs over tokens or choices; one over experts may.
    """
    # BEGIN SOLUTION
    flat = experts.flatten().long()
    slots = torch.arange(len(flat), device=flat.device)[flat >= 0]
    of_slot = flat[slots]
    order = of_slot.argsort(stable=True)
    counts = torch.bincount(of_slot, minlength=count)
    tiles = (counts + block - 1) // block
    begin = (tiles.cumsum(0) - tiles) * block  # each expert's first place
    within = torch.arange(len(slots), device=flat.device) - (counts.cumsum(0) - counts)[of_slot[order]]
    places = torch.full((int(tiles.sum()) * block,), len(flat), dtype=torch.int32, device=flat.device)
    places[begin[of_slot[order]] + within] = slots[order].int()
    tile_experts = torch.repeat_interleave(torch.arange(count, device=flat.device), tiles).int()
    return places, tile_experts
    # END SOLUTION


def combine(rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token's weighted sum of its experts' results.

    rows: float32, float16 or bfloat16 [places, width], contiguous, the result at each place. Where the place has the
        sentinel, its row may hold anything, NaN too.
    slots: int32 [places], as `arrange` makes them; each slot from 0 to tokens · k - 1 stands at one place or at none,
        and all other places have the sentinel tokens · k. There may be no place at all.
    weights: float32 [tokens, k], any finite numbers.
    Returns: [tokens, width] of rows' dtype. Token t has the sum over its choices c of weights[t, c] times the row at
    the place of slot t · k + c; a choice without a place adds nothing. The sums are float32, and rounded once.
    No loop of Python runs over tokens or places; one over the k choices may.
    """
    # BEGIN SOLUTION
    tokens, k = weights.shape
    places = (slots < tokens * k).nonzero()[:, 0]
    of_place = slots[places].long()
    weighted = rows[places].float() * weights.flatten()[of_place, None]
    out = torch.zeros(tokens, rows.shape[1], device=rows.device)
    return out.index_add_(0, of_place // k, weighted).to(rows.dtype)
    # END SOLUTION


# %%
best_arrange, best_combine = check("18.6", arrange, combine).best

# %% [markdown]
# ## The grouped product · deeper
#
# Now the product itself. It is a tiled product with two differences: each tile of rows has a matrix of its own, and the
# rows of a tile may lie anywhere in `x`. So a program does three things that the plain product does not:
#
# 1. It loads one number, the expert of its tile. That says where its matrix begins.
# 2. It loads the slots of its places. Slot $s$ belongs to token $s \mathbin{/\!/} k$, and that is the row of `x`.
# 3. It masks the places that hold the sentinel.
#
# Nothing of `x` is copied, because the load itself gathers the rows. For example, take 3 tokens, $k = 2$ and a tile
# with the slots 0, 2, 5 and 6. The program loads the rows 0, 1 and 2. The fourth place has the sentinel 6, and 6 // 2 =
# 3 is one row beyond the end of `x`. You may compute such an address, as long as the load is masked. A
# reviewer of SGLang's kernel noticed just this row, and the mask that makes it harmless
# ([sglang#28155](https://github.com/sgl-project/sglang/issues/28155)).
#
# **Where is expert 63?** A matrix of a Mixtral expert has 4,096 · 14,336 numbers, 59 million. Suppose a layer has 64
# such experts, stored one after another. **Predict** at which element expert 63 begins, in units of 2³¹ elements. An
# int32 ends just below one such unit.

# %%
predict("18 where expert 63 begins", ..., "times 2³¹ elements")

# %%
begin = 63 * 4096 * 14_336
print(f"expert 63 begins at element {begin:,}, which is {begin:.2e}")
wrapped = (begin + 2**31) % 2**32 - 2**31
print(f"in 32 bits that is {wrapped:,}: {format_bytes(2 * -wrapped)} before the tensor, in 16 bits a number")
print(measured("18 where expert 63 begins", begin / 2**31, "times 2³¹ elements"))

# %% [markdown]
# The expert's number is a small int32, and so is the stride. Only their product is too large, so the experts before 37
# are read correctly, and those from 37 on from the wrong place. DeepSpeed had this fault
# ([DeepSpeed#8261](https://github.com/deepspeedai/DeepSpeed/issues/8261)). Turn the expert's number into int64 *before*
# you multiply.
#
# **Which FLOPs?** If $M$ rows are multiplied by matrices of $K \cdot N$ numbers, that is $2 M K N$ FLOPs, however many
# experts there are, because each row meets only one matrix. A benchmark in torchao multiplied by the number of experts
# as well. The next cell takes one row of its table ([ao#2490](https://github.com/pytorch/ao/pull/2490)): 8,192 rows,
# $K$ = 5,120, $N$ = 8,192, 16 experts, bfloat16, 1.31 ms on an H100 with a peak of 989 TFLOP/s.

# %%
seconds, peak = 1.31e-3, 989e12
useful = 2 * 8192 * 5120 * 8192
print(f"{'all 16 experts for all rows':<30}{16 * useful / seconds / 1e12:>8,.0f} TFLOP/s  "
      f"{16 * useful / seconds / peak:>6.3f} of the peak")
print(f"{'each row with its own expert':<30}{useful / seconds / 1e12:>8,.0f} TFLOP/s  "
      f"{useful / seconds / peak:>6.3f} of the peak")

# %% [markdown]
# The table says 8.456 of the peak; the small difference comes from a time of three digits. No kernel can reach more
# than 1, so a share above 1 always means that the count is wrong. The honest figure is 525 TFLOP/s, 53 % of the peak.
#
# Which bytes must the kernel load? Each tile of places is multiplied by all of its expert's matrix, so an expert's
# weights are loaded once for each of its tiles. With few tokens these loads are nearly all of the traffic. Then a tile
# of 16 rows moves about as many bytes as one of 128, because the weights are loaded whole, however few rows use them.
# The smaller tile only saves FLOPs.

# %%
# Exercise 18.7 · The grouped product
@triton.jit
def grouped_kernel(
    x_pointer, weight_pointer, slot_pointer, expert_pointer, out_pointer,
    x_stride, expert_stride, weight_stride, tokens, outer, inner, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M places, which have one expert, times BLOCK_N of its columns."""
    # BEGIN SOLUTION
    tile = tl.program_id(0)
    places = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    slots = tl.load(slot_pointer + places)
    real = slots < tokens * k
    rows = (slots // k).to(tl.int64)
    expert = tl.load(expert_pointer + tile).to(tl.int64)
    x_rows = x_pointer + rows[:, None] * x_stride  # [BLOCK_M, 1]
    weight_rows = weight_pointer + expert * expert_stride + columns[None, :].to(tl.int64) * weight_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inner, BLOCK_K):
        steps = start + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        x_tile = tl.load(x_rows + steps[None, :], mask=real[:, None] & (steps[None, :] < inner), other=0.0)
        inside = (columns[None, :] < outer) & (steps[:, None] < inner)
        weight_tile = tl.load(weight_rows + steps[:, None], mask=inside, other=0.0)  # [BLOCK_K, BLOCK_N]
        total = tl.dot(x_tile, weight_tile, total, input_precision="ieee")
    out = out_pointer + places[:, None].to(tl.int64) * outer + columns[None, :]
    tl.store(out, total.to(out_pointer.dtype.element_ty), mask=real[:, None] & (columns[None, :] < outer))
    # END SOLUTION


def grouped_product(
    x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, tile_experts: torch.Tensor, k: int,
    block_n: int, block_k: int,
) -> torch.Tensor:
    """The product of each place's row of x with its expert's weights, by one Triton kernel.

    x: float16 or float32 [tokens, inner], on a GPU that has it bfloat16 too. Any size of at least 1. Rows may lie any
        number of elements apart; a row's elements lie side by side. A row that no slot names may hold anything, NaN
        too.
    weights: x's dtype [experts, outer, inner], any size of at least 1. Experts and rows may lie any number of elements
        apart, and begin beyond 2³¹ elements, as those of x may; a row's elements lie side by side. An expert that is
        not named may hold anything, NaN too.
    slots: int32 [places], a slot of 0 to tokens · k - 1, or the sentinel tokens · k, in any order. There may be no
        place at all, and no tile then.
    tile_experts: int32 [tiles], the expert of each tile, in any order. A tile has block_m = places // tiles places,
        side by side. block_m is a power of two, at least 16.
    k: at least 1. Slot s belongs to token s // k.
    block_n, block_k: columns of a tile of the result, and how much of inner is loaded at once; powers of two, at least
        16. You may take another block_k.
    Returns: [places, outer] of x's dtype. Place p has x[slots[p] // k] times weights[expert of p's tile]ᵀ, summed in
    float32 and rounded once. Where the place has the sentinel, anything may stand, and nothing of x is loaded for it.
    Every tile of the result loads its rows of x and its expert's rows once. Do not compute with them in PyTorch, and do
    not copy them.
    """
    # BEGIN SOLUTION
    places, (_, outer, inner) = len(slots), weights.shape
    out = torch.empty(places, outer, dtype=x.dtype, device=x.device)
    if places == 0:
        return out
    tiles = len(tile_experts)
    grouped_kernel[(tiles, triton.cdiv(outer, block_n))](
        x, weights, slots, tile_experts, out,
        x.stride(0), weights.stride(0), weights.stride(1), len(x), outer, inner, k,
        BLOCK_M=places // tiles, BLOCK_N=block_n, BLOCK_K=block_k,
    )
    return out
    # END SOLUTION


# %%
best_grouped_product = check("18.7", grouped_product).best

# %% [markdown]
# All the pieces are there. The next cell puts them together: a router, the arrangement, a product into the experts, the
# activation, a product out of them, and the sum. It compares the result with a loop over tokens. The largest error
# should be a rounding of float32, below $10^{-5}$.

# %%
tokens, width, hidden, experts_count, k, block = 12, 32, 48, 5, 2, 16
generator = torch.Generator().manual_seed(1)
x = torch.randn(tokens, width, generator=generator).to(device)
router = torch.randn(experts_count, width, generator=generator).to(device)
up = (torch.randn(experts_count, hidden, width, generator=generator) / width**0.5).to(device)
down = (torch.randn(experts_count, width, hidden, generator=generator) / hidden**0.5).to(device)

experts, weights = best_route(x @ router.T, k, "renormalised")
slots, tile_experts = best_arrange(experts, experts_count, block)
inner = F.silu(best_grouped_product(x, up, slots, tile_experts, k, 16, 16))
# In the second product each place has a row of its own, so k is 1 and the slot is the place; sentinels stay sentinels.
places = torch.arange(len(slots), dtype=torch.int32, device=device)
own = torch.where(slots < tokens * k, places, len(slots)).int()
result = best_combine(best_grouped_product(inner, down, own, tile_experts, 1, 16, 16), slots, weights)

wanted = torch.stack([
    sum(weights[t, c] * (down[experts[t, c]] @ F.silu(up[experts[t, c]] @ x[t])) for c in range(k))
    for t in range(tokens)
])
print(f"{len(slots)} places for {tokens * k} choices, the largest error is {(result - wanted).abs().max():.1e}")

# %% [markdown]
# ## Eight bits, and a sum in two levels · deeper
#
# Hopper multiplies numbers of 8 bits at twice the rate of 16. The format is *e4m3*: a sign, four bits of exponent,
# three of mantissa, and nothing larger than 448. Such a range is too small for a whole matrix. So a group of numbers
# shares a *scale*, and each number is stored as its *code*: the number divided by the scale, rounded to e4m3. In
# DeepSeek-V3 each row of $x$ has a scale for every 128 numbers, and the weights have one for every block of 128 × 128.
# A product then adds up its blocks of 128 numbers:
#
# $$\text{out} = \sum_{\text{blocks}} s_x \cdot s_w \cdot (\text{codes of } x) \cdot (\text{codes of } w)^\top$$
#
# The scales are the same for all 128 products of a block. So you multiply the *sum* of the block by them, once. If you
# multiplied the codes instead, they would have to be rounded to 8 bits again.
#
# For example, take a block whose largest number is 896. Its scale is 896 / 448 = 2. The number 100 becomes 50, which
# e4m3 does not have, because between 32 and 64 it has only every fourth number. 48 and 52 are equally near, and the one
# with an even mantissa is taken: 48. Multiplied by the scale that is 96, an error of 4 %.
#
# Now suppose that the block also holds 100,000. Then its scale is 223, and a 1 becomes 0.0045. Down there e4m3 has only
# the multiples of 0.00195, so the code is 0.0039. Multiplied by the scale that is 0.87, an error of 13 %. That is why
# there is a scale for every 128 numbers: an outlier harms only its own block.
#
# **The adder.** A tensor core adds what it multiplies. Its registers are float32, but its adder is narrower. DeepSeek
# found that Hopper aligns each product to the largest of 32 products, keeps the 14 highest bits and cuts off the others
# ([DeepGEMM#37](https://github.com/deepseek-ai/DeepGEMM/issues/37)). Others found much the same in another way. They
# put numbers with more bits into the registers, added products of zeros, and got the numbers back with 13 bits of
# mantissa ([SageAttention#287](https://github.com/thu-ml/SageAttention/issues/287)). Cutting is not rounding: it always
# makes a number smaller. So if all products are positive, all errors have the same sign, and they add up instead of
# cancelling.
#
# The cell below adds $K$ products of positive numbers with a model of this adder,
# `course_lib.hardware.tensor_core_model.tensor_core`. It does so in two ways. A *running total* stays in the tensor
# core to the end. A sum *in two levels* starts from zero at every 128 products, and what comes out is added in float32
# by ordinary instructions ([DeepGEMM#50](https://github.com/deepseek-ai/DeepGEMM/issues/50)). CUTLASS does so as well,
# after every 4 instructions of 32 products ([cutlass#3149](https://github.com/NVIDIA/cutlass/pull/3149)).
#
# With 14 bits one number is off by up to $2^{-13}$, about 0.01 %. **Predict** the error of the running total for 16,384
# products, in percent.

# %%
predict("18 error of the running total, 16,384 products", ..., "%")

# %%
from course_lib.hardware.tensor_core_model import tensor_core


def relative_error(out, a, b):
    exact = a.double() @ b.double().T
    return float(((out.double() - exact).abs() / exact).mean())


generator = torch.Generator().manual_seed(0)
print(f"{'products':>10}{'running total':>16}{'two levels':>13}")
for length in (1024, 4096, 16_384):
    a, b = (torch.rand(8, length, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    running, levels = None, torch.zeros(8, 8)
    for begin in range(0, length, 128):
        part = slice(begin, begin + 128)
        running = tensor_core(a[:, part], b[:, part], running)
        levels += tensor_core(a[:, part], b[:, part])
    print(f"{length:>10,}{relative_error(running, a, b):>16.1e}{relative_error(levels, a, b):>13.1e}")
measured("18 error of the running total, 16,384 products", 100 * relative_error(running, a, b), "%")

# %% [markdown]
# The running total is off by 1 %. That may seem little, because each number was rounded to 3 bits of mantissa before.
# But those errors have either sign, so in a long sum of positive numbers they cancel, and the adder's errors do not.
# With two levels the error is 0.01 %, however long the sum is, because the tensor core never adds more than 128
# products.
#
# The scales cost little here. The sum of a block leaves the tensor core anyway, and on its way into the float32 total
# it is multiplied by $s_x \cdot s_w$.

# %%
# Exercise 18.8 · FP8 with scales: a sum in two levels
def to_blocks(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers as codes of 8 bits, with a scale for each 128 numbers of a row.

    x: float32, float16 or bfloat16 [rows, inner], contiguous, at least 1 of each. Finite numbers; the largest of a
        block is 0, or between 1e-20 and 1e20 in size.
    Returns: (codes, scales), float8_e4m3fn [rows, inner] and float32 [rows, blocks], with blocks = inner / 128, rounded
    up. Block i of a row are its numbers 128 · i to 128 · i + 127; the last block may have fewer. Its scale is the
    largest magnitude in it, divided by 448, and 1 where all of its numbers are 0. A code is its number divided by the
    block's scale, rounded to the nearest e4m3 number. All of this in float32.
    """
    # BEGIN SOLUTION
    x = x.float()
    rows, inner = x.shape
    blocks = F.pad(x, (0, -inner % 128)).view(rows, -1, 128)
    largest = blocks.abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / 448, 1.0)
    codes = (blocks / scales[:, :, None]).view(rows, -1)[:, :inner]
    return codes.to(torch.float8_e4m3fn), scales
    # END SOLUTION


def scaled_product(
    x: torch.Tensor, x_scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, tensor_core
) -> torch.Tensor:
    """x · weightᵀ of scaled 8-bit numbers, with sums in two levels.

    x: float8_e4m3fn [rows, inner]. weight: float8_e4m3fn [outer, inner]. All sizes are at least 1, and all tensors are
        contiguous.
    x_scales: float32 [rows, blocks], positive, one for each 128 columns of a row, as `to_blocks` makes them.
    weight_scales: float32 [outer / 128, blocks], positive, with outer / 128 rounded up: one for each 128 rows and 128
        columns.
    tensor_core: a function. tensor_core(a, b, sums) returns sums + a · bᵀ, float32 [rows, outer], with the few bits of
        an FP8 tensor core. a is float8_e4m3fn [rows, n], b float8_e4m3fn [outer, n], with n from 1 to 128, and sums
        float32 [rows, outer] or None for zeros. All products of x and weight are made by it.
    Returns: float32 [rows, outer]. The products of each block of 128 columns (the last may have fewer) are added by the
    tensor core alone, from zero. The block's sums are multiplied by the scales of their row and of their block of the
    weight, and added up in float32.
    """
    # BEGIN SOLUTION
    outer, inner = weight.shape
    total = torch.zeros(len(x), outer, device=x.device)
    for block, begin in enumerate(range(0, inner, 128)):
        part = slice(begin, begin + 128)
        sums = tensor_core(x[:, part], weight[:, part], None)
        of_weight = weight_scales[:, block].repeat_interleave(128)[:outer]
        total += sums * (x_scales[:, block, None] * of_weight)
    return total
    # END SOLUTION


# %%
best_to_blocks, best_scaled_product = check("18.8", to_blocks, scaled_product).best

# %% [markdown]
# The next cell goes the whole way once, from numbers to blocks to the product, with random numbers of both signs. It
# prints two errors relative to float64. Rounding the numbers to three bits of mantissa costs about 4 %, and the adder
# adds only 0.01 %.

# %%
generator = torch.Generator().manual_seed(2)
x, weight = torch.randn(4, 2048, generator=generator), torch.randn(6, 2048, generator=generator)
x_codes, x_scales = best_to_blocks(x)
of_blocks = weight.view(6, -1, 128).abs().amax(dim=(0, 2))[None] / 448  # the six rows lie in one block of 128
weight_codes = (weight / of_blocks.repeat_interleave(128, dim=1)).to(torch.float8_e4m3fn)
out = best_scaled_product(x_codes, x_scales, weight_codes, of_blocks, tensor_core).double()
exact = x.double() @ weight.double().T
restored = (x_codes.double() * x_scales.double().repeat_interleave(128, 1)) @ (
    weight_codes.double() * of_blocks.double().repeat_interleave(128, 1)).T
print(f"error of the 8-bit numbers   {(restored - exact).norm() / exact.norm():.1e}")
print(f"error that the adder adds    {(out - restored).norm() / exact.norm():.1e}")

# %% [markdown]
# ## Few rows
#
# The ladder is for products with many rows. A decode step multiplies only one row, or a few, by the same large
# matrices. It does two FLOPs a row with each weight, and a weight has two bytes. So with 8 rows it does 8 FLOPs for
# each byte that it reads. Then the time is that of reading the weights, and none of its steps helps. What helps
# is to keep all of memory busy: several programs share the `inner` dimension of one tile (exercise 16.8).
#
# How many rows are few? On an H200 the two limits meet at about 200 rows, because it can do 206 FLOPs for each byte
# that it reads (989 TFLOP/s over 4.8 TB/s).

# %% [markdown]
# ## When experts lose
#
# A mixture of experts needs the FLOPs of $k$ experts and the memory of all. With one token a layer reads only the
# weights of $k$ experts. With thousands of tokens it reads all weights, and many tokens share them. In between it reads
# nearly all weights for few tokens.
#
# Take a layer of Qwen3-30B: 128 experts with $k = 8$, each with a gate, an up and a down matrix of 2,048 × 768. In 16
# bits all experts of the layer have 1.2 GB, and one token reads 75 MB of that. The next cell computes how many experts
# a batch of random tokens uses, and how many bytes of weights a token costs. **Predict** how many of the 128 experts
# are used by at least one of 32 tokens.

# %%
predict("18 experts that 32 tokens meet", ..., "experts")

# %%
experts_of_layer, chosen_experts, bytes_of_expert = 128, 8, 2 * 3 * 2048 * 768
print(f"{'tokens':>8}{'experts met':>13}{'weights read':>14}{'for each token':>16}{'FLOPs a byte':>14}")
for batch in (1, 8, 32, 128, 1024, 8192):
    met = experts_of_layer * (1 - (1 - chosen_experts / experts_of_layer) ** batch)
    read = met * bytes_of_expert
    flops = 2 * batch * chosen_experts * bytes_of_expert / 2
    print(f"{batch:>8,}{met:>13.1f}{format_bytes(read):>14}{format_bytes(read / batch):>16}{flops / read:>14.1f}")
    if batch == 32:
        measured("18 experts that 32 tokens meet", met, "experts")

# %% [markdown]
# With 32 tokens nearly all experts are at work already. The layer reads 1.05 GB of weights, and each expert uses them
# for about two tokens. To be limited by the tensor cores, an expert needs about 200 rows. It gets these only from 3,200
# tokens on (200 · 128 / 8). A dense layer with the same *active* numbers, those that one token uses, reads 75 MB in
# every case.
#
# So experts pay in training and in large batches. In small batches they cost bandwidth. What a model gets for it is
# quality, because it has 16 times as many numbers to learn with.

# %% [markdown]
# ## Two of every four weights · deeper
#
# In *2:4 sparsity*, of every four weights only two are kept, and the others are 0. Two bits say where each of the two
# stood. In 16 bits that is $2 \cdot 16 + 2 \cdot 2 = 36$ bits instead of 64, or 56 % of the bytes, and the tensor cores
# skip the zeros at twice their dense rate. Yet a user whose layer has 3,072 × 10,240 weights found it much slower on an
# H100 than the dense one ([pytorch#153825](https://github.com/pytorch/pytorch/issues/153825)). With 4,096 × 4,096
# weights and a single row, one of its authors measured 0.022 ms dense and 0.196 ms sparse
# ([pytorch#111339](https://github.com/pytorch/pytorch/issues/111339)). Half the FLOPs gain nothing if they are not what
# the time goes to.

# %% [markdown]
# ## Finale: a model whose experts are yours
#
# Chapter 05's small model, whose tokens are bytes, was trained once more. Each of its four layers now has a mixture of
# experts: 8 experts of 32 hidden numbers, of which each byte uses 2. Here it runs on your functions: your router, your
# arrangement, your grouped product and your sum. If you have not solved an exercise yet, the course's answer stands in.
# The next cell compares the text with that of the reference.

# %%
from course_lib.models.kinds import text_parts
from course_lib.models.plugged import experts_of_functions, who_runs
from course_lib.models.trained import trained_model
from course_lib.serving.generation import complete

places_used = []


def arrange_and_count(experts, count, block):
    slots, tile_experts = best_arrange(experts, count, block)
    places_used.append(len(slots) / experts.numel())
    return slots, tile_experts


reference, yours = (trained_model("experts", device=device).requires_grad_(False) for _ in range(2))
yours.glue = experts_of_functions(best_route, arrange_and_count, best_grouped_product, best_combine)
print(who_runs({"router (18.5)": best_route, "arrange (18.6)": best_arrange, "combine (18.6)": best_combine,
                "grouped product (18.7)": best_grouped_product}))
prompt, new_tokens = text_parts()[1][:100], 200 if on_gpu else 24
text = complete(yours, prompt, new_tokens)
print(text)
print("the same text as with the reference:", text == complete(reference, prompt, new_tokens))
print(f"places over choices: {places_used[0]:.2f} for the prompt, {places_used[-1]:.0f} for one byte")

# %% [markdown]
# One byte at a time is where experts are least efficient. Each of the two chosen experts gets a tile of 16 rows for a
# single row, so 15 of 16 rows are computed for nothing. That costs a GPU hardly any time, because with one byte the
# time goes to reading weights.
#
# Did the experts make the model better? On the last tenth of the book, on which no model was trained, the loss is 1.88
# nats a byte with seed 0. A dense model with the same *active* numbers, 64 hidden ones instead of 192, has 1.89, and
# the dense model with 192 has 1.88. Other seeds move each of them by up to 0.04. So on 28 kB of text nothing is proven.
# What large models gain from experts shows only with far more data than a small model can learn from.

# %% [markdown]
# And your product of 18.2? On a GPU the next cell puts it on the roofline of your machine, beside the library's best
# step and cuBLAS. **Predict** what share of cuBLAS's rate it reaches. It is one kernel with the compiler's usual
# pipeline, so think of the step *pipelined*.

# %%
predict("18 your product over cuBLAS", ..., "%")

# %%
if on_gpu:
    from course_lib.figures.memory.roofline import Measured, roofline_plot
    from course_lib.hardware.ceilings.measured import ceilings
    from course_lib.hardware.device import supports_bfloat16
    from course_lib.hardware.roofline import Work
    from course_lib.hardware.timing import measure_together
    from course_lib.kernels.products.large import large_product

    size, dtype = 4096, torch.bfloat16 if supports_bfloat16() else torch.float16
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timings = measure_together({
        "yours (18.2)": partial(best_product, left, right, 128, 128, 64),
        "the library's": partial(large_product, left, right),
        "cuBLAS": partial(F.linear, left, right),
    })
    for name, timing in timings.items():
        print(f"{name:<15}{2 * size**3 / timing.median / 1e12:>6,.0f} TFLOP/s")
    unit = str(dtype).removeprefix("torch.")
    roofline_plot(ceilings(), [Measured(Work(name, 2 * size**3, 3 * left.nbytes, unit), timing)
                               for name, timing in timings.items()])
    measured("18 your product over cuBLAS", 100 * timings["cuBLAS"].median / timings["yours (18.2)"].median, "%")
else:
    print("This needs a GPU: in the interpreter a kernel's time says nothing about it.")

# %% [markdown]
# ## The chapter's kernels at a glance
#
# | a matrix product | |
# |---|---|
# | wins | 8192³: 779 TFLOP/s with the copy engine, cuBLAS 753 (measured, one H200) |
# | loses | 4,096 × 4,352 in tiles of 128 × 256: 544 tiles are 4.1 rounds of 132 programs, and take 5 (computed) |
# | falls back | rows that do not begin at multiples of 16 bytes: `persistent`, 669 TFLOP/s |
# | trap | numbers beyond `inner` masked on one side alone: 0 · NaN |
#
# | the end of a product | |
# |---|---|
# | wins | SwiGLU of 8,192 × 4,096 × 14,336 in one kernel: 2.65 ms, torch.compile's two take 2.86 (measured) |
# | loses | two products and their activation in one kernel: 1.07 ms where two kernels take 1.01 (measured) |
# | falls back | a bias or a residual that is not there costs nothing: it is compiled away |
# | trap | gate and up exchanged; the residual before the activation |
#
# | a grouped product | |
# |---|---|
# | wins | the block of Qwen3-30B, 8,192 tokens: 1.34 ms; out of PyTorch's `_grouped_mm` 2.53 (measured) |
# | loses | 64 tokens in tiles of 128: 32 times as many rows as there are (computed) |
# | falls back | few tokens: tiles of 16 rows. One token 39 µs, 64 tokens 295; `_grouped_mm` 89 and 490 (measured) |
# | trap | expert · stride in 32 bits; the sentinel used as a row |
#
# | eight bits, with scales | |
# |---|---|
# | wins | 4,096 × 7,168 × 16,384: 1,048 and 1,170 TFLOP/s in two runs (measured); the peak of 16 bits is 989 |
# | loses | beside cuBLAS, which reaches 1,181 and 1,304 in the same runs |
# | falls back | GPUs before Hopper and Ada have no such instruction |
# | trap | one running total through the tensor core: 1 % wrong at 16,384 numbers |
#
# The grouped product alone, 65,536 rows for 128 experts of 2,048 × 1,536, ran at 585 TFLOP/s, `_grouped_mm` at 581, and
# a loop over experts with cuBLAS at 103. What makes the whole block faster is what lies between the products: nobody
# copies rows, gate and up end in one kernel, and the way back to tokens is one more.
#
# All times are from one H200, with PyTorch 2.11 and Triton 3.6, November 2026.
#
# ## Check yourself
#
# Answer these on paper. Then run the next cell and open the answers.
#
# 1. A product of 4,096 × 4,096 × 4,096 is cut into tiles of 128 × 128. How many tiles are there, and how many rounds
#    do 132 programs take?
# 2. How many bytes does the kernel of question 1 load in all, if nothing is shared?
# 3. A colleague's grouped product reaches 2,100 TFLOP/s on an H100. What do you ask first?
# 4. A router with $k = 1$ takes the softmax of the chosen logit alone. Why does it never learn?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
tiles = (4096 // 128) ** 2
self_check(
    f"{tiles:,} tiles in {math.ceil(tiles / 132)} rounds: {tiles / 132:.2f}, and the last round is not full.",
    f"{format_bytes(2 * 4096**3 * (1 / 128 + 1 / 128))}: each of the {tiles:,} programs loads 256 rows of 8,192 bytes.",
    "Which FLOPs were counted. The peak in 16 bits is 989, so probably each row was counted for every expert.",
    "The softmax of one number is 1, whatever the number is, so its gradient is 0.",
)

# %% [markdown]
# ## What production systems do
#
# All sources were read in November 2026.
#
# - **CUTLASS** has the same ladder in C++ templates: [persistent kernels whose warps have
#   roles](https://github.com/NVIDIA/cutlass/blob/main/media/docs/cpp/efficient_gemm.md). There are two ways to arrange
#   them. In *cooperative* kernels two groups of warps share a tile. In *ping-pong* kernels each group has a tile of its
#   own, so that one group multiplies while the other stores.
# - **DeepGEMM** compiles FP8 products with block scales when they are first called, and adds the sums of each 128
#   numbers of `inner` in float32 ([DeepGEMM#50](https://github.com/deepseek-ai/DeepGEMM/issues/50)).
# - **PyTorch** has `torch._grouped_mm` for groups of different sizes. **vLLM** and **SGLang** sort tokens by expert,
#   as you did, and choose the tile by the number of tokens.
# - **torchtitan** balances its routers with the bias of 18.5
#   ([torchtitan#1506](https://github.com/pytorch/torchtitan/issues/1506)).
# - **DeepGEMM and Triton** were compared in vLLM, in FP8 at a batch of 128 on an H100. With whole experts Triton's
#   fused kernel took 12.48 ms and DeepGEMM 6.36. With each expert cut in eight they took 1.73 and 1.94 ms, so on thin
#   experts Triton was faster ([vllm#13932](https://github.com/vllm-project/vllm/pull/13932)).
#
# **In this library.** `course_lib/kernels/products/` is the ladder, and its `large_product` chooses the step that runs.
# `course_lib/kernels/experts/` has the experts with
# their gradients: `route`, `arrange`, `grouped_product`, `combine`, and `expert_mlp` as one operator of PyTorch.
#
# ## Papers
#
# - Osama et al.: *Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU*,
#   [arXiv 2301.03598](https://arxiv.org/abs/2301.03598).
# - Shazeer et al.: *Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer*, [arXiv
#   1701.06538](https://arxiv.org/abs/1701.06538).
# - Gale et al.: *MegaBlocks: Efficient Sparse Training with Mixture-of-Experts*, [arXiv
#   2211.15841](https://arxiv.org/abs/2211.15841).
# - Wang et al.: *Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts*, [arXiv
#   2408.15664](https://arxiv.org/abs/2408.15664).
# - DeepSeek-AI: *DeepSeek-V3 Technical Report*, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437).

# %%
progress()
