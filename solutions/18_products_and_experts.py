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
# 54. The work is the same.
#
# To get something like a square, programs go down a *strip*. It has a few row tiles, say 8, and is as wide as the whole
# result. The first 8 programs take its first column from top to bottom, the next 8 its second column, and so on to the
# last column. Then comes the next strip. These are the numbers of the programs for 5 × 4 tiles and strips of 2. The
# last strip has only one row tile left, so it is *thinner*:
#
# | | column tile 0 | 1 | 2 | 3 |
# |---|---|---|---|---|
# | **row tile 0** | 0 | 2 | 4 | 6 |
# | **1** | 1 | 3 | 5 | 7 |
# | **2** | 8 | 10 | 12 | 14 |
# | **3** | 9 | 11 | 13 | 15 |
# | **4** | 16 | 17 | 18 | 19 |
#
# The thin last strip is where orders go wrong. A kernel in ROCm's FlyDSL took the last group of row tiles to be as high
# as the others, which had 8. In tiles of 128 rows, 1,024 rows gave the right result, 1,152 rows a wrong one, and 1,536
# a page fault ([FlyDSL#979](https://github.com/ROCm/FlyDSL/pull/979)). A published mixture-of-experts kernel took the
# remainder by the number of column tiles where it needed that of row tiles. It seemed to be much faster, because it
# read some weights again and again and others never
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

# %% [markdown]
# ## A product in tiles
#
# Now the kernel. A program has one tile of the result, `block_m` rows by `block_n` columns. It keeps the sums of that
# tile in registers, in float32. In a loop along `inner` it loads `block_k` numbers of each of its rows of `x` and of
# each of its rows of `weight`, multiplies the two tiles with `tl.dot`, and adds. At the end it rounds once and stores.
#
# `weight` is [outer, inner]. A tile of it is therefore [block_n, block_k], and `tl.dot` needs [block_k, block_n] on its
# right side. You can turn the tile with `tl.trans`, or load it that way round: what lies where in memory is a matter of
# the offsets alone.
#
# How many bytes does this load? A program loads `block_m + block_n` rows of `inner` numbers. For 300 rows, 500 outer
# and 200 inner in tiles of 64 × 128 there are 5 · 4 = 20 programs. Each loads up to 192 rows of 200 numbers. That makes
# 768,000 numbers, where `x` and `weight` have 160,000. Larger tiles load less, and the L2 cache serves most of the
# rest.
#
# Two things go wrong more often than the multiplication itself.
#
# **Strides.** `x` may be a slice of a wider matrix, or a transposed view. Then its rows lie `x.stride(0)` elements
# apart, and the numbers of a row lie `x.stride(1)` apart. So the step to the next block is `block_k` times that stride,
# not `block_k`. A change to FastDeploy's mixture-of-experts kernel, proposed as a fix of crashes, removed this factor.
# The reviewer answered that the stride need not be 1
# ([FastDeploy#2643](https://github.com/PaddlePaddle/FastDeploy/pull/2643)).
#
# **The end of inner.** In the last block some of the `block_k` numbers do not exist. They must be loaded as 0 in `x`
# *and* in `weight`. If one side alone is masked, the other side holds whatever lies behind its row in memory. Times 0
# that is 0, unless it is NaN or infinite. The next cell shows it: a row of three numbers is a slice of a wider matrix
# that holds NaN.

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
        may begin beyond 2³¹ elements. What lies between the elements of a view is not yours and may be NaN.
    block_m, block_n, block_k: the tile of a program and the numbers of inner that it takes at a time: powers of two,
        16 to 128.
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
# ## Sharing tiles: stream-K · deeper
#
# Nine tiles on a GPU with room for four programs take three rounds. In the third round one program works and three have
# nothing to do. So nine tiles take as long as twelve would, and a quarter of the time is wasted. The same happens at
# 8192³: 2,048 tiles on 132 multiprocessors are 15.5 rounds, which take the time of 16.
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
# All four end at the same time, after 2.25 tiles. The price is paid at the borders. Tile 2 is shared, so somebody has
# to add two parts. Each program has a *slot* in a workspace, room for the sums of one tile, and a *flag*. The program
# that does not finish a tile leaves its sums in its slot and raises its flag. The *owner* of the tile waits for the
# flag, adds the slot to its own sums, and stores the result.
#
# Who is the owner? In the paper it is the program with the tile's first step. It then waits for programs that come
# later, which is safe only if all programs run at once. Here a program may have to wait for room: programs begin in the
# order of their numbers, and on a small GPU program 1 may begin only when program 0 has ended. If program 0 waits for
# program 1, both wait forever. So the owner must be a program that waits only for programs *before* it.
#
# A second fault gives wrong numbers, and not every time. A program has four warps, and each stores its part of the sums
# at its own pace. If one warp raises the flag while another has not stored yet, the owner reads a slot that is half
# old. ROCm's stream-K kernel lacked a barrier between the two
# ([ROCm/triton#745](https://github.com/ROCm/triton/pull/745)).
#
# You write the plan and its actions in plain Python. A model plays them with slow and fast programs, with slow warps,
# and on machines with room for one program, for a few or for all. It tells you who waits forever, and which tiles are
# not whole. A slot that nobody has stored holds *poison*, a value that makes a result wrong whenever it is added.

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
        """The first step of a program; that of the next one is where they end."""
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
# The next cell plays your programs with 9 tiles of 4 steps on a machine with room for all four, and lists what each
# did when. A step takes 10 ticks and other actions 1. Whole tiles would take three rounds of 40 ticks. **Predict** how
# many ticks the last of your programs needs.

# %%
predict("18 ticks of stream-K, 9 tiles on 4 programs", ..., "ticks")

# %%
from course_lib.hardware.stream_model import play_stream_k

events = []
played = play_stream_k({"program": best_program}, 4, 9, 4, 4, [10], [2, 3, 4, 6], events)
for number in range(4):
    actions = [f"{begin} {' '.join(map(str, action))}" for who, action, begin, _ in events if who == number]
    print(f"program {number}: " + "; ".join(actions))
print(played["ending"], played["tiles"])
print(measured("18 ticks of stream-K, 9 tiles on 4 programs", max(end for *_, end in events), "ticks"))

# %% [markdown]
# It is about 100 ticks instead of 120: 90 for nine steps, and the rest for leaving, waiting and adding. Our answer goes
# through its tiles from the last to the first. So what it leaves to others comes first, and what it has to wait for
# comes last, when it is most likely there already.

# %% [markdown]
# ## The end of a product
#
# When the loop ends, the sums of a tile are in registers. Whatever comes next element by element can be done right
# there, before they are stored. This is the *epilogue*: a bias, an activation, a residual.
#
# The gate of a modern MLP makes the most of it. The layer multiplies `x` by two weights of the same size, *gate* and
# *up*, and keeps $silu(gate) \cdot up$, where $silu(g) = g \cdot \sigma(g) = g / (1 + e^{-g})$. For 4,096 tokens and a
# hidden size of 14,336, in 16 bits, gate and up are 117 MB each. Two products write both, and a third kernel reads both
# and writes the result, 117 MB too. Together that is 587 MB. If one program computes both tiles, it needs twice the
# registers for sums, but only the result is written: 117 MB.
#
# So a program computes a tile of `block_n` columns of the *result*. For this it loads `block_n` rows of the gate and
# `block_n` rows of up. The two weights are stored as one matrix of 2 · hidden rows: first all rows of the gate, then
# all rows of up. With a hidden size of 40, column 3 of the result belongs to the rows 3 and 43 of the weight, and to
# the elements 3 and 43 of the bias.
#
# Three things deserve care.
#
# **Where to round.** Plain PyTorch in float16 rounds gate and up to 16 bits, then their product, then the sum with the
# residual. In one kernel everything stays in float32 and is rounded once. That is more exact, and it is what is asked
# here.
#
# **Large gates.** $g \cdot e^g / (1 + e^g)$ is the same function on paper. At $g = 100$ it is infinity divided by
# infinity in float32, which is NaN. **Predict** what $g / (1 + e^{-g})$ gives at $g = -100$, where $e^{-g}$ overflows.

# %%
gate = torch.tensor([-100.0, -1.0, 0.0, 1.0, 100.0])
print("g · exp(g) / (1 + exp(g)):", (gate * gate.exp() / (1 + gate.exp())).tolist())
print("g / (1 + exp(-g)):        ", (gate / (1 + (-gate).exp())).tolist())

# %% [markdown]
# The first form fails for large positive gates. The second is right on both sides: a number divided by infinity is 0.
# `tl.sigmoid` computes it that way.
#
# **Once, not once a block.** The bias belongs to the finished sum. If it is added in the loop, it counts once for each
# block of `inner`, and a test whose `inner` fits into one block does not notice. The residual is added last, after the
# activation.

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
        time: powers of two, 16 to 128.
    Returns: a new contiguous tensor [rows, hidden] of x's dtype. All arithmetic is float32, rounded once at the end.
    A program loads its block_m rows of x once, and its block_n rows of the gate and of up. Besides these, the biases
    and the residual it loads nothing, and it stores only its tile. Bytes are counted. Hand the kernel the tensors as
    they are, without a copy.
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
# In the library, `product` of `course_lib.kernels.products` does the same with `gated=True`. A small test of any such
# kernel: with weights of 0 and no residual the result is $silu(b_{gate}) \cdot b_{up}$ in every row, whatever `x` is.

# %%
x, weight, bias = torch.randn(5, 70), torch.zeros(80, 70), torch.randn(80)
out = best_gated_product(x.to(device), weight.to(device), bias.to(device), None, 16, 32, 32).cpu()
print("largest difference:", (out - F.silu(bias[:40]) * bias[40:]).abs().max().item())
