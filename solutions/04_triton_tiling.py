# %% [markdown]
# # 04 · Tiles: attention that stays on the chip
#
# **The question.** Chapter 02's layer has 8192 tokens and 32 heads of dimension 128. Its three passes move 17.4 GB,
# and on an H100 at 3.35 TB/s that alone takes 5.2 ms. FlashAttention-3 runs attention there at up to 740 TFLOP/s
# ([arXiv 2407.08608](https://arxiv.org/abs/2407.08608)), which makes 1.5 ms for the same layer. It does not skip a
# single multiplication: its 1.1 TFLOP are the same, and it takes some exponentials more. Where did 3.7 ms go?
#
# Chapter 03 gave you the algebra: a row's softmax can be finished before its end is known, as long as what has been
# added up is rescaled when the maximum grows. This chapter gives it a schedule. You cut the matrix into tiles that fit
# on the chip, work out how large they may be, write the kernel, and prove by count that it never writes the scores.
# Two hours, seven exercises, the last one on a GPU only.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math
import re
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_flop_rate, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Same FLOPs, other bytes
#
# Before any theory, take the time of both. PyTorch has a tiled attention behind `scaled_dot_product_attention`, on the
# CPU too. Against it stands the formula as it is printed, in three operations. Both do $4 H N^2 D$ FLOPs. How many
# times as fast will the tiled one be? Write your guess down, then run the cell.

# %%
from course_lib.hardware.timing import measure


def naive_attention(query, key, value):
    """Scores, softmax, product: each a matrix or an operation of its own. [..., length, head_dim]."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # [..., length, length]
    return torch.softmax(scores, dim=-1) @ value


if on_gpu:  # the question's layer where its matrices fit, and a quarter of them elsewhere
    heads, length, head_dim, dtype = 32, 8192 if machine().memory_bytes > 30e9 else 4096, 128, torch.float16
else:
    heads, length, head_dim, dtype = 4, 2048, 64, torch.float32
query, key, value = (torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3))
flops = 4 * heads * length**2 * head_dim
matrix = heads * length**2 * query.element_size()
print(f"{heads} heads, {length} × {length}, head dimension {head_dim}: {flops / 1e9:,.0f} GFLOP, "
      f"one score matrix {format_bytes(matrix)}")
rates = []
for name, function in (("naive", naive_attention), ("tiled", F.scaled_dot_product_attention)):
    timing = measure(partial(function, query, key, value), warmup=1, seconds=0.6, device=device)
    rates.append(timing.rate(flops))
    print(f"  {name}: {timing},  {format_flop_rate(rates[-1])}")
print(f"  tiled is {rates[1] / rates[0]:.1f} times as fast")
del query, key, value

# %% [markdown]
# ## Where a tile lives
#
# A GPU's multiprocessor (SM) has a memory of its own, *shared memory*, on the same silicon as its arithmetic: 64 KB on
# a T4, 164 KB on an A100, 228 KB on an H100. On the last two a program may use 1 KB less than the SM has: 166,912 and
# 232,448 bytes. All SMs of an A100 together read theirs at about 19 TB/s, nine times as fast as HBM. The FlashAttention
# paper calls it SRAM. Besides, every thread has up to 255 registers of four bytes, and an SM holds 65,536 of them,
# another 256 KB.
#
# A whole row of scores does not fit there, and a tile does. So hold a tile of queries and stream the keys and values
# past it, tile after tile. What a query must remember between two tiles is what you computed in chapter 03: a running
# maximum, a running sum, and an accumulator of $D$ numbers. The scores of a tile are made, used and forgotten.
#
# Walk through it. The score matrix is cut into tiles, with Q at its left, K above, V below and O at its right. Orange
# is on the chip. Watch two things: how little the chip holds at any moment, and how often the same keys are read.

# %%
from course_lib.figures.attention.tile_stepper import tile_stepper

tile_stepper(query_length=768, key_length=768, head_dim=64, query_rows=128, key_rows=128, item_bytes=2)

# %% [markdown]
# ## First in PyTorch
#
# The loops come first, without pointers in the way. The outer loop takes a tile of queries, the inner one walks over
# the keys. The streaming attention of exercise 3.4 is the inner loop for a single query; now it runs for a tile of
# them, so each running value has one entry for every row.
#
# The check watches the size of every tensor you make. A matrix of all scores is refused, and so is a whole row of
# tiles.

# %%
# Exercise 4.1 · Tiled attention in PyTorch
def tiled_attention(query, key, value, query_rows, key_rows):
    """Exact attention of one head, one tile of queries against one tile of keys at a time.

    Args:
        query: [query_length, head_dim], float32. Numbers of any size.
        key, value: [key_length, head_dim], float32.
        query_rows, key_rows: rows of a tile of queries, and of a tile of keys and values. The last tile of either may
            be smaller; lengths, head_dim and tiles are 1 or more, in any combination.

    Returns:
        softmax(query @ key.T / √head_dim) @ value, [query_length, head_dim], float32. No tensor that you make may be
        larger than the inputs and one query_rows × key_rows tile of scores.
    """
    # BEGIN SOLUTION
    scale = 1 / math.sqrt(query.shape[1])
    output = torch.empty_like(query)
    for first_query in range(0, query.shape[0], query_rows):
        query_tile = query[first_query : first_query + query_rows]  # [rows, head_dim]
        running_max = torch.full((query_tile.shape[0], 1), -math.inf)
        running_sum = torch.zeros(query_tile.shape[0], 1)
        accumulator = torch.zeros_like(query_tile)  # [rows, head_dim], not yet divided by the sum
        for first_key in range(0, key.shape[0], key_rows):
            key_tile = key[first_key : first_key + key_rows]  # [keys, head_dim]
            value_tile = value[first_key : first_key + key_rows]  # [keys, head_dim]
            scores = scale * (query_tile @ key_tile.T)  # [rows, keys]
            new_max = torch.maximum(running_max, scores.amax(dim=1, keepdim=True))  # [rows, 1]
            weights = torch.exp(scores - new_max)  # [rows, keys]
            rescale = torch.exp(running_max - new_max)  # [rows, 1], 0 at the first tile
            running_sum = running_sum * rescale + weights.sum(dim=1, keepdim=True)
            accumulator = accumulator * rescale + weights @ value_tile
            running_max = new_max
        output[first_query : first_query + query_rows] = accumulator / running_sum
    return output
    # END SOLUTION

# %%
best_tiled_attention = check("4.1", tiled_attention).best

# %% [markdown]
# `best_tiled_attention` is now yours, if it passed. Two runs with other tiles give the same result up to rounding: how
# the matrix is cut is a matter of speed alone. That freedom is what the rest of the chapter spends.

# %%
query, key, value = (torch.randn(300, 32) for _ in range(3))
exact = naive_attention(*(matrix.double() for matrix in (query, key, value)))
for tiles in ((300, 300), (64, 32), (17, 101), (1, 1)):
    error = (best_tiled_attention(query, key, value, *tiles).double() - exact).abs().max()
    print(f"tiles of {tiles[0]:>3} × {tiles[1]:<3}: largest error {error:.1e}")

# %% [markdown]
# ## How large may a tile be?
#
# Count the bytes that all programs ask for. A program reads its $B_M$ queries once, writes as many rows of output, and
# reads all keys and all values. With $N_q$ queries and $N_k$ keys a head has $\lceil N_q / B_M \rceil$ programs:
#
# $$\text{bytes} = b \cdot H \cdot \left( 2 N_q D + 2 N_k D \left\lceil \frac{N_q}{B_M} \right\rceil \right)
# \approx \frac{2\, b\, H N_q N_k D}{B_M}$$
#
# The rows of a tile of queries, $B_M$, divide everything. The rows of a tile of keys do not occur at all: a smaller
# tile of keys only means more steps. Hence the rule: **as many queries as fit, and keys as room is left.**
#
# Two things limit the fit. Shared memory holds the tile of queries and the tiles of keys and values; while one pair is
# in use, the next is on its way, so with $s$ *stages* there are $s$ pairs of them. The registers hold what is
# computed: the accumulator, $B_M \times D$, and the scores, $B_M \times B_N$, in float32, shared out among the threads
# of the program (32 for each of its warps). A thread has 255 registers and needs part of them for weights in half
# precision, pointers and operands. 128 for the two large tiles is a good first guess.

# %%
# Exercise 4.2 · Tiles within a budget
def shared_memory(query_rows, key_rows, head_dim, item_bytes, stages):
    """Bytes of shared memory that a program fills: its tile of queries, and `stages` tiles each of keys and values."""
    # BEGIN SOLUTION
    return (query_rows + 2 * stages * key_rows) * head_dim * item_bytes
    # END SOLUTION


def traffic(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    """Bytes that all programs load and store together, one program for each tile of `query_rows` queries of a head.

    A program reads its queries and writes its output once, and reads all keys and values of its head. The last tile of
    queries may be partly empty; rows that don't exist are not moved.
    """
    # BEGIN SOLUTION
    query_tiles = -(-query_length // query_rows)
    rows = 2 * query_length + query_tiles * 2 * key_length
    return heads * rows * head_dim * item_bytes
    # END SOLUTION


def choose_tiles(head_dim, item_bytes, shared_memory_bytes, threads):
    """The tiles (query_rows, key_rows) that move the fewest bytes and fit.

    Both are taken from 16, 32, 64, 128 and 256. They fit when, with 2 stages, their shared memory is at most
    `shared_memory_bytes`, and when the accumulator and the scores, query_rows · (head_dim + key_rows) float32 values,
    take at most 128 registers of each of the program's `threads`. The largest query_rows that fits wins, and with it
    the largest key_rows. Returns None when nothing fits.
    """
    # BEGIN SOLUTION
    sizes = (16, 32, 64, 128, 256)
    fitting = [
        (query_rows, key_rows)
        for query_rows in sizes
        for key_rows in sizes
        if shared_memory(query_rows, key_rows, head_dim, item_bytes, stages=2) <= shared_memory_bytes
        and query_rows * (head_dim + key_rows) <= 128 * threads
    ]
    return max(fitting, default=None)
    # END SOLUTION

# %%
best_shared_memory, best_traffic, best_choose_tiles = check("4.2", shared_memory, traffic, choose_tiles).best

# %% [markdown]
# Now ask it about real chips. The last columns say what the chosen tile does to the question's layer: the bytes that
# all programs ask for, beside the $4 N^2$ elements of naive attention's matrix.

# %%
from course_lib.hardware.compiler.architectures import ARCHITECTURES

matrix_bytes = 32 * 4 * 8192**2 * 2
print(f"{'':18}{'shared':>9}  {'head dim':>8}  {'threads':>7}  {'tiles':>10}  {'asked for':>9}"
      f"   naive matrix {format_bytes(matrix_bytes)}")
for arch in (75, 80, 89, 90):
    limits = ARCHITECTURES[arch]
    for head_dim_here, threads in ((64, 128), (128, 256)):
        tiles = best_choose_tiles(head_dim_here, 2, limits.shared_per_block, threads)
        asked = best_traffic(32, 8192, 8192, head_dim_here, 2, tiles[0])
        print(f"{limits.example:18}{limits.shared_per_block:>9,}  {head_dim_here:>8}  {threads:>7}  "
              f"{tiles[0]:>4} × {tiles[1]:<3}  {format_bytes(asked):>9}   {matrix_bytes / asked:.1f} times as much")

# %% [markdown]
# Look at those ratios: a factor of two to four, not of sixty. With $D = 128$ and 128 queries to a tile, the programs
# together ask for half of what naive attention moves. Still they run far more than twice as fast, for *asked for* is
# not *moved from HBM*. Each head's keys and values are 4 MB here, 64 programs read the same ones at about
# the same time, and the L2 cache (50 MB on an H100) answers all but the first. From HBM come little more than the
# distinct bytes, 268 MB. Naive attention's matrix is 4.3 GB: no L2 helps there.
#
# That gives three floors for a tiled kernel, and the highest one counts: FLOPs over the matrix rate, bytes asked for
# over the bandwidth of the L2, distinct bytes over that of HBM. On a GPU the next cell fills them in from your own
# ceilings. On a CPU arithmetic is the highest floor by far.

# %%
from course_lib.hardware.ceilings.measured import ceilings

roof = ceilings()
rate_name = "float16" if on_gpu else "float32"
floors = {
    "1.1 TFLOP at the matrix rate": 4 * 32 * 8192**2 * 128 / roof.matmul_rate[rate_name],
    "distinct bytes from memory": 4 * 32 * 8192 * 128 * 2 / roof.memory_bandwidth,
    "naive: the matrix, four times": matrix_bytes / roof.memory_bandwidth,
}
if roof.l2_bandwidth:
    floors["asked of the L2, 128 queries a tile"] = best_traffic(32, 8192, 8192, 128, 2, 128) / roof.l2_bandwidth
for name, seconds in sorted(floors.items(), key=lambda item: item[1]):
    print(f"{name:36} {format_seconds(seconds):>9}")

# %% [markdown]
# ## Now in Triton
#
# A Triton program is written for a tile, not for a thread. Four things turn the PyTorch version into a kernel:
#
# **Programs.** The outer loop disappears. Each tile of queries becomes a program, and each head too: a grid of (tiles,
# heads). `tl.program_id(0)` says which tile is mine, `tl.program_id(1)` which head.
#
# **Pointer arithmetic.** There is no slicing. A tile's addresses are computed: row $i$ and column $j$ of a matrix lie
# at `pointer + i * row_stride + j`. With `rows[:, None]` of shape [BLOCK_M, 1] and `columns[None, :]` of shape [1,
# HEAD_DIM] one expression makes all BLOCK_M × HEAD_DIM addresses.
#
# **Products.** `tl.dot(a, b)` multiplies two tiles on the matrix units, with sums in float32. The keys are loaded as
# [BLOCK_N, HEAD_DIM] and turned by `tl.trans`. For float32 inputs `input_precision="ieee"` keeps all 24 bits; by
# default Triton takes tf32, which keeps 11.
#
# **Types.** The running values are float32, whatever the inputs are. Only for the second product the weights are cast
# to the values' type, since both operands of `tl.dot` must agree.
#
# The head of the kernel is written: it loads the tile of queries. You write the loop and the store. Lengths are
# multiples of 64 here, so that no mask is needed yet. Nothing reaches the output but a query's finished row.

# %%
# Exercise 4.3 · The forward kernel, without a mask
@triton.jit
def attention_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    key_length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head, against all keys, BLOCK_N at a time."""
    head = tl.program_id(1).to(tl.int64)  # 64 bits: a head's offset can pass 2^31 elements
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = rows[:, None] * query_stride + columns[None, :]  # [BLOCK_M, HEAD_DIM]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # The loop over the tiles of keys, and the store of the output.
    # BEGIN SOLUTION
    for first_key in range(0, key_length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_offsets = keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N]
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        weights = tl.exp(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp(running_max - new_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")  # [BLOCK_M, HEAD_DIM]
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    output = accumulator / running_sum[:, None]  # [BLOCK_M, HEAD_DIM]
    output_offsets = rows[:, None] * output_stride + columns[None, :]  # [BLOCK_M, HEAD_DIM]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output.to(output_pointer.dtype.element_ty))
    # END SOLUTION


def flash_attention_full(query, key, value):
    """Attention without a mask, by one kernel.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; query_length a multiple of 64, head_dim 16, 32, 64
            or 128. Any strides but the last, which is 1. Numbers of any size.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64; strides and dtype as query's, each its
            own.

    Returns:
        [heads, query_length, head_dim], in query's dtype. One launch computes it, and no tensor larger than the inputs
        is made. The kernel may move no more bytes than `traffic` says for tiles of 64 queries.
    """
    # Set `grid` = (tiles of 64 queries, heads).
    # BEGIN SOLUTION
    grid = (query.shape[1] // 64, query.shape[0])
    # END SOLUTION
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attention_kernel[grid](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        key.shape[1], 1 / math.sqrt(query.shape[2]), HEAD_DIM=query.shape[2], BLOCK_M=64, BLOCK_N=64,
    )
    return output

# %%
best_attention = check("4.3", flash_attention_full).best

# %% [markdown]
# Stuck on what a message means? Every check can tell a missing rescale from a missing maximum, because each leaves its
# own mark on the result. `hint("4.3")` goes from a nudge to nearly the answer.
#
# ## Proof by counting
#
# Does it really never write the scores? The meter counted every byte while the check ran. Here it counts again, for
# your kernel, beside the formula that you wrote in 4.2. `metered` runs the kernel in the interpreter, on a machine
# with a GPU too, in a process of its own. What will stand in the column *stored*?

# %%
from course_lib.hardware.meter.metered import metered

heads, length, head_dim = 2, 384, 64
query, key, value = (torch.randn(heads, length, head_dim, dtype=torch.float16) for _ in range(3))
report = metered(best_attention, query, key, value)
predicted = best_traffic(heads, length, length, head_dim, 2, query_rows=64)
scores = 4 * heads * length * length * 2
print(f"formula {predicted:,} bytes, counted {report.total_bytes:,}: {report.total_bytes / predicted:.3f}")
print(f"naive attention would move {scores:,} bytes of scores and probabilities besides its inputs and output")
report

# %% [markdown]
# The output is written once and nothing else is. Queries are read once; keys and values 384 / 64 = 6 times, once for
# each program of their head.
#
# ## IO complexity
#
# The paper states it as a theorem ([arXiv 2205.14135](https://arxiv.org/abs/2205.14135)): with $M$ elements of fast
# memory, tiled attention moves $\Theta(N^2 D^2 / M)$ elements where naive attention moves $\Theta(N D + N^2)$, and no
# exact algorithm does better for all $M$. Your formula says the same: bytes go with $N^2 D / B_M$, and the tile of
# queries that fits is $B_M \propto M / D$ rows. Twice the memory, half the bytes.
#
# Let the meter judge that claim. The next kernel is the one you wrote with two switches more, which a later section
# needs. Its tile of queries goes from 16 to 128 rows at a fixed length of 512; the queries and their accumulator take
# from 6 to 49 kB of chip. Predict the last line before you run it.

# %%
@triton.jit
def queries_outside_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DIVIDE_EVERY_STEP: tl.constexpr, NATURAL_EXP: tl.constexpr,
):
    """FlashAttention-2's order: a program owns a tile of queries and streams over the keys. Contiguous, whole tiles."""
    head = tl.program_id(1).to(tl.int64) * length * HEAD_DIM
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_tile = rows[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_M, HEAD_DIM]
    query = tl.load(query_pointer + head + query_tile)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    for first_key in range(0, length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_tile = keys[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(tl.load(key_pointer + head + key_tile)))  # [BLOCK_M, BLOCK_N]
        if NATURAL_EXP:
            scores = scores * scale
            new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
            weights = tl.exp(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
            rescale = tl.exp(running_max - new_max)  # [BLOCK_M]
        else:
            scale_log2 = scale * 1.4426950408889634  # log2 e rides along in the scale
            new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_max[:, None])
            rescale = tl.exp2(running_max - new_max)
        new_sum = running_sum * rescale + tl.sum(weights, axis=1)
        if DIVIDE_EVERY_STEP:
            accumulator = accumulator * (running_sum * rescale / new_sum)[:, None]
            weights = weights / new_sum[:, None]
        else:
            accumulator = accumulator * rescale[:, None]
        value = tl.load(value_pointer + head + key_tile)  # [BLOCK_N, HEAD_DIM]
        accumulator = tl.dot(weights.to(value.dtype), value, accumulator)  # [BLOCK_M, HEAD_DIM]
        running_max, running_sum = new_max, new_sum
    if not DIVIDE_EVERY_STEP:
        accumulator = accumulator / running_sum[:, None]
    tl.store(output_pointer + head + query_tile, accumulator.to(output_pointer.dtype.element_ty))


def queries_outside(query, key, value, query_rows=64, key_rows=64, divide_every_step=False, natural_exp=False,
                    **options):
    """Attention of contiguous [heads, length, head_dim] tensors, the length a multiple of both tiles."""
    heads, length, head_dim = query.shape
    output = torch.empty_like(query)
    queries_outside_kernel[(length // query_rows, heads)](
        query, key, value, output, length, 1 / math.sqrt(head_dim), HEAD_DIM=head_dim, BLOCK_M=query_rows,
        BLOCK_N=key_rows, DIVIDE_EVERY_STEP=divide_every_step, NATURAL_EXP=natural_exp, **options,
    )
    return output


# %%
query, key, value = (torch.randn(1, 512, 64, dtype=torch.float16) for _ in range(3))
print("queries a tile   on the chip     formula     counted   counted / formula")
for query_rows in (16, 32, 64, 128):
    counted = metered(queries_outside, query, key, value, query_rows, 128).total_bytes
    predicted = best_traffic(1, 512, 512, 64, 2, query_rows)
    on_chip = query_rows * 64 * (2 + 4)  # the queries in float16, the accumulator in float32
    print(f"{query_rows:>14}   {format_bytes(on_chip):>11} {predicted:>11,} {counted:>11,} "
          f"{counted / predicted:>19.3f}")

# %% [markdown]
# ## Causal: half of the tiles are never touched
#
# A causal query sees the keys up to its own position. When the lengths differ, as in the second half of a prompt, the
# two are aligned at the end: the last query stands at the last key, and query $i$ at position $i + N_k - N_q$.
#
# Masking a score with $-\infty$ costs as much as computing it. The gain is in what is not computed: of the tiles above
# the diagonal every score is hidden, so the loop ends before them. For a long sequence that is half of the FLOPs and
# half of the bytes. Only tiles on the diagonal need the mask at all. Step through it once more, and count the hatched
# tiles.

# %%
tile_stepper(query_length=768, key_length=768, head_dim=64, query_rows=128, key_rows=128, item_bytes=2, causal=True)

# %% [markdown]
# The GPU has no instruction for $e^x$, it has one for $2^x$, `ex2`. `tl.exp(x)` is therefore `tl.exp2(x * 1.4427)`:
# one multiplication for each score. But the scores are multiplied by the scale anyway. So fold $\log_2 e$ into the
# scale once, on the host, and use `tl.exp2`; then maximum and exponent are in units of $\log 2$, and the weights are
# the same as before. The launcher of the next exercise passes `scale_log2`.
#
# Mind the programs that have nothing to do. With more queries than keys the first queries see no key at all; their
# output is zero by definition, and $0/0$ is not zero.

# %%
# Exercise 4.4 · A causal kernel that skips tiles
@triton.jit
def causal_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head, against the keys up to the one that its last query stands at."""
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    # BEGIN SOLUTION
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    positions = rows + key_length - query_length  # [BLOCK_M], counted along the keys
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)  # none of these queries sees more
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        weights = tl.exp2(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, HEAD_DIM]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # queries that see nothing: 0 / 1 = 0
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)  # [BLOCK_M, HEAD_DIM]
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output)
    # END SOLUTION


def flash_attention_causal(query, key, value):
    """Causal attention by one kernel that neither loads nor computes the tiles above the diagonal.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; query_length a multiple of 64, head_dim 16, 32, 64
            or 128. Any strides but the last, which is 1. Numbers of any size.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64, smaller or larger than query_length;
            strides and dtype as query's, each its own.

    Returns:
        [heads, query_length, head_dim], in query's dtype. The last query stands at the last key: query i sees the keys
        0 to i + key_length - query_length. A query that sees none has an output of zeros. One launch computes it, and
        no tensor larger than the inputs is made. It moves no more bytes than tiles of 64 queries need, which read the
        keys up to the last one that they see.
    """
    # Set `grid` = (tiles of 64 queries, heads).
    # BEGIN SOLUTION
    grid = (query.shape[1] // 64, query.shape[0])
    # END SOLUTION
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    scale_log2 = math.log2(math.e) / math.sqrt(query.shape[2])  # for tl.exp2
    causal_kernel[grid](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query.shape[1], key.shape[1], scale_log2, HEAD_DIM=query.shape[2], BLOCK_M=64, BLOCK_N=64,
    )
    return output

# %%
best_causal = check("4.4", flash_attention_causal).best

# %%
heads, length, head_dim = 1, 512, 32
query, key, value = (torch.randn(heads, length, head_dim) for _ in range(3))
full, causal = (metered(function, query, key, value).total_bytes for function in (best_attention, best_causal))
print(f"full {full:,} bytes, causal {causal:,}: {causal / full:.2f}")
tiles = length // 64
print(f"tiles computed: {tiles * (tiles + 1) // 2} of {tiles * tiles}, {(tiles + 1) / (2 * tiles):.2f}")

# %% [markdown]
# The bytes fall less than the tiles because queries and outputs cross once either way, and both ratios stay above a
# half because the tiles on the diagonal are computed whole. With 8192 tokens the ratio is
# 0.50 for the tiles and 0.51 for the bytes.

# %% [markdown]
# ## Ragged edges
#
# Lengths come from text, not from powers of two. Three edges get a mask, and each for a reason of its own:
#
# | edge | load | what else |
# |---|---|---|
# | queries past the end | masked, zeros | their rows are computed in vain and must not be stored |
# | keys past the end | masked, zeros | **their scores must be $-\infty$**: a key of zeros scores 0, and $e^0$ counts |
# | columns past the head dimension | masked, zeros | nothing: zeros add nothing to a dot product |
#
# A tile must have a power of two of columns, at least 16 for `tl.dot`. A head dimension of 80 is computed as one of
# 128, with 48 columns of zeros: correct, and 37 % of the arithmetic thrown away.
#
# One thing more. Under a causal mask with more queries than keys, the first queries see no key at all. In 4.4 the
# lengths were multiples of the tile, so these queries had tiles to themselves, and the loops of those programs made no
# step. Here one tile can hold queries of both kinds. The maximum of a query that sees nothing then stays $-\infty$, and
# $-\infty - (-\infty)$ is NaN. Measure such a row from 0 instead. (A query that sees any key sees key 0, so its maximum
# is finite from the first tile on.)
#
# From here on the kernel is all yours.

# %%
# Exercise 4.5 · Any length, any head dimension
@triton.jit
def ragged_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, head_dim, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """One program: BLOCK_M queries of one head. Rows past a length and columns past head_dim are never touched."""
    # BEGIN SOLUTION
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets, mask=inside, other=0.0)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        # A row that has seen no key yet is measured from 0: -inf - -inf would be NaN.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets, mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, BLOCK_D]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output, mask=inside)
    # END SOLUTION


def flash_attention_ragged(query, key, value, causal):
    """Attention for any lengths and any head dimension from 16 to 128, by one kernel with programs of 64 queries.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; any strides but the last, which is 1. Numbers of any
            size.
        key, value: [heads, key_length, head_dim]; strides and dtype as query's, each its own.
        causal: True or False; aligned to the end, as in 4.4.

    Returns:
        [heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key. One launch computes it,
        and no tensor larger than the inputs is made. It moves at most 1.3 times the bytes that tiles of 64 queries
        need.
    """
    # BEGIN SOLUTION
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    ragged_kernel[(triton.cdiv(query_length, 64), heads)](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )
    return output
    # END SOLUTION

# %%
best_ragged = check("4.5", flash_attention_ragged).best

# %% [markdown]
# ## One number more for each row
#
# The backward pass needs the probabilities again, and recomputes them from the scores instead of storing a matrix. It
# can do so from one number a row, the log-sum-exp $L_i = \log \sum_j e^{s_{ij}}$, because $P_{ij} = e^{s_{ij} - L_i}$.
# The same number lets chapter 08 merge results of different programs. Training a layer thus keeps $O$ and $L$, 4 bytes
# a query, and no matrix.

# %%
# Exercise 4.6 · The log-sum-exp as a second output
@triton.jit
def lse_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lse_pointer,
    query_head_stride, query_stride, key_head_stride, key_stride,
    value_head_stride, value_stride, output_head_stride, output_stride,
    query_length, key_length, head_dim, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """As in 4.5, and log Σ exp(scaled scores) of each row, natural logarithm, to lse_pointer [heads, query_length]."""
    # BEGIN SOLUTION
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets, mask=inside, other=0.0)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets, mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets, mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, BLOCK_D]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output, mask=inside)
    # running_max is in units of log 2; for a row that saw nothing it is -inf, and so is the result.
    log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453  # [BLOCK_M]
    tl.store(lse_pointer + head * query_length + rows, log_sum_exp, mask=rows < query_length)
    # END SOLUTION


def flash_attention_lse(query, key, value, causal):
    """(output, log-sum-exp) of attention, by one kernel with programs of 64 queries.

    Args:
        query, key, value, causal: as in 4.5.

    Returns:
        output: [heads, query_length, head_dim], in query's dtype.
        lse: [heads, query_length], float32: log Σ exp(scaled scores) over the keys that the query sees, natural
            logarithm; minus infinity for a query that sees none.
        Launches, tensors and bytes as in 4.5, and the 4 bytes of each log-sum-exp.
    """
    # BEGIN SOLUTION
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, query_length), dtype=torch.float32, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    lse_kernel[(triton.cdiv(query_length, 64), heads)](
        query, key, value, output, lse,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )
    return output, lse
    # END SOLUTION

# %%
best_with_lse = check("4.6", flash_attention_lse).best

# %% [markdown]
# A test of the number: recompute the probabilities of one query from its log-sum-exp. They must add up to 1.

# %%
query, key, value = (torch.randn(1, 100, 32, device=device) for _ in range(3))
_, log_sum_exp = best_with_lse(query, key, value, True)
scores = query[0, 70] @ key[0, :71].T / math.sqrt(32)  # query 70 sees 71 keys
total = torch.exp(scores - log_sum_exp[0, 70]).sum()
print(f"query 70: log-sum-exp {log_sum_exp[0, 70]:.4f}, probabilities add up to {total:.5f}")

# %% [markdown]
# ## What the compiler made of it
#
# Shared memory and registers were a model in 4.2. The compiler knows the truth, and it needs no GPU to tell:
# `compile_views` compiles a kernel for any architecture. Predict the row *shared memory* for the H100 with your
# function before you look.

# %%
from course_lib.hardware.compiler.views import CompileError, compile_many, compile_views

POINTERS = {f"{name}_pointer": "*fp16" for name in ("query", "key", "value", "output")}
SIGNATURE = {**POINTERS, "length": "i32", "scale": "fp32"}


def constants(head_dim, query_rows, key_rows, divide_every_step=False, natural_exp=False):
    return {"HEAD_DIM": head_dim, "BLOCK_M": query_rows, "BLOCK_N": key_rows, "DIVIDE_EVERY_STEP": divide_every_step,
            "NATURAL_EXP": natural_exp}


print(f"predicted for 64 × 64 tiles, 2 stages: {best_shared_memory(64, 64, 64, 2, 2):,} bytes")
views = compile_views(queries_outside_kernel, SIGNATURE, constants(64, 64, 64), archs=(75, 80, 90), num_warps=4,
                      num_stages=2)
views

# %% [markdown]
# Three generations, one source:
#
# - **T4**: no matrix instructions at all. Triton emits none for sm_75, so the product runs on the ordinary
#   multiply-add units from registers, and those overflow: more than a thousand bytes of each thread are *spilled* to
#   memory and read back at every step. The kernel is right, and slow. Smaller tiles ease it.
# - **A100**: `mma.sync`, a warp at a time, operands in registers. `cp.async` brings the next tile while this one is
#   used. Triton needs one buffer less than stages here, the pair in use having left for the registers: (64 + 2 · 64) ·
#   64 · 2 = 24,576 bytes, your formula with one stage.
# - **H100**: `wgmma`, four warps at a time, operands straight from shared memory. It takes 64 rows of queries at
#   least for every 4 warps: a tile of 64 × 16 still uses it, one of 32 × 64 does not. Your formula should meet the
#   number to the byte, or miss it by a few that synchronisation takes.
#
# ### Choosing the tiles by measurement
#
# The model of 4.2 narrows the choice; the clock decides. Triton automates that: a kernel decorated with
# `@triton.autotune(configs=[...], key=["length"])` times every configuration at its first call for a key and keeps the
# best. The compiler's columns come first, because a configuration that does not fit or that spills in the loop need not
# be timed. Of these six all fit and none spills (Triton 3.6), so here only the clock can decide. A single program on an
# SM is no fault by itself: eight warps with large tiles can keep the matrix units as busy as two programs of four. On a
# GPU the last column is the clock's, and the last line Triton's own choice.

# %%
CONFIGURATIONS = ((64, 64, 4, 2), (64, 64, 4, 4), (128, 32, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 4, 2))
requests = [
    {"kernel": queries_outside_kernel, "signature": SIGNATURE, "constexprs": constants(64, query_rows, key_rows),
     "arch": 90, "num_warps": warps, "num_stages": stages}
    for query_rows, key_rows, warps, stages in CONFIGURATIONS
]
if on_gpu:
    trial = [torch.randn(32, 4096, 64, device=device, dtype=torch.float16) for _ in range(3)]
print("sm_90, head dimension 64")
print("   tiles     warps  stages  registers  spilled   shared  programs/SM" + "   TFLOP/s here" * on_gpu)
for (query_rows, key_rows, warps, stages), view in zip(CONFIGURATIONS, compile_many(requests)):
    line = f"{query_rows:>4} × {key_rows:<4} {warps:>7} {stages:>7}"
    if isinstance(view, CompileError):
        print(f"{line}  does not compile: {view}")
        continue
    line += f" {view.registers:>10} {view.spill_bytes:>6} B {view.shared_bytes:>8} {view.programs_per_sm:>12}"
    if on_gpu:
        try:
            attempt = partial(queries_outside, *trial, query_rows, key_rows, num_warps=warps, num_stages=stages)
            timing = measure(attempt, seconds=0.1)
            line += f" {4 * 32 * 4096**2 * 64 / timing.median / 1e12:>14.0f}"
        except triton.runtime.errors.OutOfResources:
            line += "   does not fit"
    print(line)
if on_gpu:
    choices = [triton.Config({"BLOCK_M": query_rows, "BLOCK_N": key_rows}, num_warps=warps, num_stages=stages)
               for query_rows, key_rows, warps, stages in CONFIGURATIONS]
    tuned_kernel = triton.autotune(configs=choices, key=["length"])(queries_outside_kernel)
    tuned_kernel[lambda meta: (4096 // meta["BLOCK_M"], 32)](
        *trial, torch.empty_like(trial[0]), 4096, 1 / math.sqrt(64), HEAD_DIM=64, DIVIDE_EVERY_STEP=False,
        NATURAL_EXP=False,
    )
    print("autotune keeps", tuned_kernel.best_config)

# %% [markdown]
# ## Four choices, four experiments
#
# FlashAttention (2022) and FlashAttention-2 (2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)) compute the
# same thing with the same bytes saved, and the second is about twice as fast. Each of its choices can be tried alone.
#
# ### 1 · Which loop is outside
#
# The first paper's algorithm has the keys outside: load a tile of K and V once, walk over all queries, and update each
# one's output. K and V are then read once. But now every tile of *output*, with its maximum and sum, is read and
# written at every step. Which moves more? Here it is, one program for each head:

# %%
@triton.jit
def keys_outside_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, max_pointer, sum_pointer, length, scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """FlashAttention's first order: keys outside, queries inside, the outputs' state in memory between the visits."""
    head = tl.program_id(0).to(tl.int64)
    matrix = head * length * HEAD_DIM
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    for first_key in range(0, length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_tile = matrix + keys[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        key = tl.load(key_pointer + key_tile)  # [BLOCK_N, HEAD_DIM], once for all queries
        value = tl.load(value_pointer + key_tile)  # [BLOCK_N, HEAD_DIM]
        for first_query in range(0, length, BLOCK_M):
            rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            query_tile = matrix + rows[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_M, HEAD_DIM]
            query = tl.load(query_pointer + query_tile)  # [BLOCK_M, HEAD_DIM]
            running_max = tl.load(max_pointer + head * length + rows)  # [BLOCK_M]
            running_sum = tl.load(sum_pointer + head * length + rows)  # [BLOCK_M]
            output = tl.load(output_pointer + query_tile)  # [BLOCK_M, HEAD_DIM] float32
            scores = tl.dot(query, tl.trans(key)) * scale  # [BLOCK_M, BLOCK_N]
            new_max = tl.maximum(running_max, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_max[:, None])  # [BLOCK_M, BLOCK_N]
            old_sum = running_sum * tl.exp(running_max - new_max)
            new_sum = old_sum + tl.sum(weights, axis=1)
            product = tl.dot(weights.to(value.dtype), value)  # [BLOCK_M, HEAD_DIM]
            output = (output * old_sum[:, None] + product) / new_sum[:, None]
            tl.store(output_pointer + query_tile, output)
            tl.store(max_pointer + head * length + rows, new_max)
            tl.store(sum_pointer + head * length + rows, new_sum)
        tl.debug_barrier()  # what one thread stored, another may load when the queries are visited again


def keys_outside(query, key, value, query_rows=64, key_rows=64):
    """Attention of contiguous [heads, length, head_dim] tensors, the length a multiple of both tiles; in float32."""
    heads, length, head_dim = query.shape
    output = torch.zeros(query.shape, device=query.device)
    row_max = torch.full((heads, length), -math.inf, device=query.device)
    row_sum = torch.zeros((heads, length), device=query.device)
    keys_outside_kernel[(heads,)](query, key, value, output, row_max, row_sum, length, 1 / math.sqrt(head_dim),
                                  HEAD_DIM=head_dim, BLOCK_M=query_rows, BLOCK_N=key_rows)
    return output


# %%
query, key, value = (torch.randn(2, 256, 64, dtype=torch.float16) for _ in range(3))
for name, function in (("keys outside", keys_outside), ("queries outside", queries_outside)):
    report = metered(function, query, key, value)
    programs = math.prod(report.launches[0].grid)
    print(f"{name:16} {report.loaded_bytes:>10,} B loaded {report.stored_bytes:>10,} B stored   {programs} programs")
exact = naive_attention(query.double(), key.double(), value.double())
for function in (keys_outside, queries_outside):
    result = function(*(matrix.to(device) for matrix in (query, key, value)))
    print(f"largest error of {function.__name__}: {(result.cpu().double() - exact).abs().max():.1e}")

# %% [markdown]
# With queries outside, what grows is read-only, and the state never leaves the registers. With keys outside, an output
# tile in float32 crosses twice for every tile of keys that crosses once.
#
# ### 2 · Parallel over the sequence
#
# The same table shows the second choice: 2 programs against 8. With keys outside, the keys of a head cannot be shared
# out among programs, because two programs would then update the same row of the output. (The queries could be. But each
# program would then read all keys for itself, and reading them once was the point of this order.) So FlashAttention had
# one program for each head of each sequence. A batch of one with 16 heads then keeps 16 of an A100's 108 SMs busy,
# 15 %. With queries outside the tiles of a head are independent: the same layer at 8192 tokens and 128 queries a tile
# has 1024 programs. On a GPU the next cell shows what that is worth; without one it shows how much of an A100 has work.

# %%
if on_gpu:
    for heads in (4, 16, 64):
        trial = [torch.randn(heads, 4096, 64, device=device, dtype=torch.float16) for _ in range(3)]
        slow, fast = (measure(partial(order, *trial), seconds=0.1).median for order in (keys_outside, queries_outside))
        print(f"{heads:>3} heads: keys outside {format_seconds(slow)}, queries outside {format_seconds(fast)}: "
              f"{slow / fast:.0f} times as fast")
else:
    print("8192 tokens, 128 queries a tile, 108 SMs\nheads   programs by head: SMs busy   programs by tile: SMs busy")
    for heads in (1, 4, 16, 64, 256):
        shares = [min(1.0, programs / 108) for programs in (heads, heads * 64)]
        print(f"{heads:>5} {heads:>18} {shares[0]:>10.0%} {heads * 64:>18} {shares[1]:>10.0%}")

# %% [markdown]
# ### 3 · Fewer FLOPs that are not matrix products
#
# An A100 does 312 TFLOP/s on its matrix units and 19.5 on the others: a multiplication outside a product costs 16 of
# those inside. FlashAttention kept the output normalised at every step, with a division or a multiplication for each of
# its elements; FlashAttention-2 divides once, after the loop. A second saving is older: $e^x$ computed as $2^x$, with
# the factor folded into the scale, saves a multiplication a score, and the first FlashAttention's code did that too.
# The two switches of `queries_outside_kernel` are these choices. Count what is left in the body of the compiled loop:

# %%
def loop_body(ptx):
    """The text of the longest loop: from a label to the branch back to it."""
    labels = {match[1]: match.start() for match in re.finditer(r"(?m)^(\$L\w+):", ptx)}
    bodies = [ptx[labels[match[1]] : match.start()] for match in re.finditer(r"bra(?:\.uni)?\s+(\$L\w+);", ptx)
              if labels.get(match[1], len(ptx)) < match.start()]
    return max(bodies, key=len, default=ptx)


FLOAT32 = r"\.(?:\w+\.)*f32\b"
OPERATIONS = {"multiply": r"\bmul", "multiply-add": r"\bfma", "add": r"\badd", "subtract": r"\bsub",
              "maximum": r"\bmax", "divide": r"\bdiv", "exp2": r"\bex2"}
VARIANTS = {  # (divide every step, natural exp)
    "divide every step, exp": (True, True),
    "divide once, exp": (False, True),
    "divide once, exp2": (False, False),
}
compiled = compile_many([
    {"kernel": queries_outside_kernel, "signature": SIGNATURE, "constexprs": constants(64, 64, 64, *switches),
     "arch": 80, "num_warps": 4, "num_stages": 2}
    for switches in VARIANTS.values()
])
print(f"{'instructions a thread and step':30}" + "".join(f"{name:>14}" for name in OPERATIONS))
for name, view in zip(VARIANTS, compiled):
    body = loop_body(view.ptx)
    print(f"{name:30}" + "".join(f"{len(re.findall(word + FLOAT32, body)):>14}" for word in OPERATIONS.values()))
if on_gpu:
    trial = [torch.randn(32, 4096, 64, device=device, dtype=torch.float16) for _ in range(3)]
    for name, switches in VARIANTS.items():
        print(f"{name:30} {measure(partial(queries_outside, *trial, 64, 64, *switches), seconds=0.2)}")

# %% [markdown]
# A thread has 32 of the tile's 64 × 64 scores (128 threads), in two rows, and 32 elements of the accumulator. So 32
# instructions of a kind are one for each score, and the table can be read: dividing at every step costs a division for
# each score and each row; the natural exp costs two multiplications a score, one for the scale and one inside `tl.exp`.
# What is left are 32 multiplications that rescale the accumulator, 32 multiply-adds that scale a score and subtract the
# maximum, 32 exponentials, 32 comparisons and 32 additions.
#
# ### 4 · Split the queries, not the keys
#
# Within a program, who computes what? FlashAttention gave each of its four warps a quarter of the keys of a tile. Each
# then has a part of every row, and parts must be added through shared memory: writes, a barrier, reads, at every step.
# FlashAttention-2 gives each warp a quarter of the *queries*: a warp owns its rows, and maximum, sum and accumulator
# never leave it. Triton decides that for you. The compiled kernel says how: `warpsPerCTA = [4, 1]` is four warps along
# the queries and one along the keys.

# %%
for view in views[1:]:
    split = re.search(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), (\d+)\]", view.ttgir)
    if split:
        print(f"{view.architecture.example}: {split[1]} warps along the queries, {split[2]} along the keys")

# %% [markdown]
# ## Race
#
# You have all of it together. In the last exercise the two empty kernels are a suggestion, and only `fast_attention`
# is asked for: beat PyTorch's FlashAttention-2 backend, the library's own CUDA kernels, on 16 heads × 4096 tokens of
# dimension 128 in bfloat16. On Hopper, 1.1 times its speed passes: that backend was written for Ampere's `mma.sync`,
# and Triton gives you `wgmma`. Elsewhere 0.8 times passes: on an A100 the library runs on the chip that it was
# written for. On a T4 only the numbers must be right. Without a GPU the check says what it would need.
#
# What to look for: no spills; `wgmma` where it exists; no masks in the main loop; one multiply-add and one `exp2` for a
# score. Look at the compiler view before the clock.

# %%
# Exercise 4.7 · Beat FlashAttention-2
@triton.jit
def fast_step(
    query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
    running_max, running_sum, accumulator, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):
    """One tile of keys and values. Only the tiles at the edges are MASKED."""
    # BEGIN SOLUTION
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    key_pointers = key_pointer + keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
    value_pointers = value_pointer + keys[:, None] * value_stride + columns[None, :]
    if MASKED:
        present = (keys < key_length)[:, None]
        key_tile = tl.load(key_pointers, mask=present, other=0.0)
        value_tile = tl.load(value_pointers, mask=present, other=0.0)
    else:
        key_tile = tl.load(key_pointers)
        value_tile = tl.load(value_pointers)
    scores = tl.dot(query, tl.trans(key_tile))  # [BLOCK_M, BLOCK_N], not yet scaled
    if MASKED:
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)  # [BLOCK_M]
    reference_max = new_max
    if MASKED:
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * scale_log2 - reference_max[:, None])  # one multiply-add and one exp2 for each score
    rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
    running_sum = running_sum * rescale + tl.sum(weights, axis=1)
    accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator * rescale[:, None])
    return new_max, running_sum, accumulator
    # END SOLUTION


@triton.jit
def fast_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride, output_stride,
    heads, query_length, key_length, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one sequence; whole tiles first, the masked ones after them."""
    # BEGIN SOLUTION
    batch = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    query_pointer += batch * query_batch_stride + head * query_head_stride
    key_pointer += batch * key_batch_stride + head * key_head_stride
    value_pointer += batch * value_batch_stride + head * value_head_stride
    output_pointer += batch * output_batch_stride + head * output_head_stride
    tile = tl.program_id(0)
    if CAUSAL:
        tile = tl.num_programs(0) - 1 - tile  # the longest programs first, so that short ones fill the end
    first_query = tile * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    offset = key_length - query_length
    positions = rows + offset  # [BLOCK_M]
    inside = (rows < query_length)[:, None]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=inside, other=0.0)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    end = key_length
    whole_end = key_length // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.minimum(key_length, tl.maximum(first_query + BLOCK_M + offset, 0))
        whole_end = tl.minimum(key_length, tl.maximum(first_query + offset + 1, 0)) // BLOCK_N * BLOCK_N
    for first_key in range(0, whole_end, BLOCK_N):
        running_max, running_sum, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
            running_max, running_sum, accumulator, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, MASKED=False)
    for first_key in range(whole_end, end, BLOCK_N):
        running_max, running_sum, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
            running_max, running_sum, accumulator, scale_log2, HEAD_DIM, BLOCK_N, CAUSAL, MASKED=True)
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    tl.store(output_pointer + rows[:, None] * output_stride + columns[None, :], output, mask=inside)
    # END SOLUTION


def fast_attention(query, key, value, causal):
    """Attention, faster than PyTorch's FlashAttention-2.

    Args:
        query: [batch, heads, query_length, head_dim], float16 or bfloat16, head_dim 64 or 128; the last stride is 1.
        key, value: [batch, heads, key_length, head_dim].
        causal: True or False; aligned to the end.

    Returns:
        [batch, heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key.
    """
    # BEGIN SOLUTION
    batch, heads, query_length, head_dim = query.shape
    key_length = key.shape[2]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    capability = torch.cuda.get_device_capability(query.device)
    if capability < (8, 0):  # no matrix instructions: both products take their operands from registers
        tiles = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": head_dim // 16, "num_stages": 1}
    elif head_dim == 64:
        tiles = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    elif capability == (9, 0):
        tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    else:
        tiles = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    fast_kernel[(triton.cdiv(query_length, tiles["BLOCK_M"]), batch * heads)](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        heads, query_length, key_length, math.log2(math.e) / math.sqrt(head_dim),
        HEAD_DIM=head_dim, CAUSAL=causal, **tiles,
    )
    return output
    # END SOLUTION

# %%
best_fast = check("4.7", fast_attention).best

# %% [markdown]
# ## Predicted against measured
#
# On a GPU the next cell puts your kernel beside what PyTorch offers, over the length. Naive attention's row ends where
# its matrix no longer fits. Without a GPU it compares the CPU's two versions, naive and tiled, at smaller sizes: the
# same FLOPs at two rates.

# %%
def attention_rates(lengths, implementations, heads, head_dim, dtype):
    """{name: [FLOP/s or None for each length]}; None where memory does not suffice."""
    rates = {name: [] for name in implementations}
    for length in lengths:
        tensors = [torch.randn(1, heads, length, head_dim, device=device, dtype=dtype) for _ in range(3)]
        for name, function in implementations.items():
            try:
                seconds = measure(partial(function, *tensors), warmup=1, seconds=0.15, device=device).median
                rates[name].append(4 * heads * length**2 * head_dim / seconds)
            except torch.cuda.OutOfMemoryError:
                rates[name].append(None)
    return rates


implementations = {"naive": naive_attention, "PyTorch's tiled": F.scaled_dot_product_attention}
if on_gpu:
    implementations["yours (4.7)"] = lambda query, key, value: best_fast(query, key, value, False)
lengths = (512, 1024, 2048, 4096, 8192, 16384) if on_gpu else (256, 512, 1024, 2048)
sizes = (16, 128, torch.float16) if on_gpu else (4, 64, torch.float32)
rates = attention_rates(lengths, implementations, *sizes)
unit, factor = ("TFLOP/s", 1e12) if on_gpu else ("GFLOP/s", 1e9)
print(f"{unit}:".ljust(18) + "".join(f"{length:>9}" for length in lengths))
for name, values in rates.items():
    print(f"{name:18}" + "".join("  no room" if rate is None else f"{rate / factor:>9.0f}" for rate in values))

# %% [markdown]
# The same on the roofline of your machine, at the longest length that all of them reached. Naive attention does $D$
# FLOPs for each of the $b$ bytes of an element that crosses, an intensity of $D / b$ whatever the length. Tiled
# attention moves its inputs and its output, so its intensity grows with the length, and it stands far to the right. On
# a GPU the first is held by the memory slope and the second by the flat roof. A CPU's balance point lies so low that
# both stand to the right of it; there the bus is only a part of what the matrix costs, and the gap is smaller.

# %%
from course_lib.figures.memory.roofline import Measured, roofline_plot
from course_lib.hardware.roofline import Work

longest = max(index for index in range(len(lengths)) if all(values[index] for values in rates.values()))
heads, head_dim, dtype = sizes
length, item_bytes = lengths[longest], torch.empty(0, dtype=dtype).element_size()
flops = 4 * heads * length**2 * head_dim
inputs_and_output = 4 * heads * length * head_dim * item_bytes
points = []
for name, values in rates.items():
    moved = inputs_and_output + (4 * heads * length**2 * item_bytes if name == "naive" else 0)
    points.append(Measured(Work(name, flops, moved, unit=rate_name), flops / values[longest]))
roofline_plot(roof, points)

# %% [markdown]
# For the whole field in one run, on a GPU, go to a terminal: `python -m course_lib bench attention`
# measures the course's library kernel beside FlashAttention-2, cuDNN, FlexAttention and what else is installed, causal
# and not. Run the next cell after it.

# %%
import json

from course_lib.figures.memory.throughput import throughput_figure
from course_lib.home import course_home

record = course_home() / "bench" / "attention.json"
if record.exists():
    picture = throughput_figure(json.loads(record.read_text()))
else:
    picture = "Nothing is measured yet: python -m course_lib bench attention (it needs an NVIDIA GPU)."
picture

# %% [markdown]
# ## Finale: your kernel runs the model
#
# Now a language model writes text with your kernel of 4.5. The model is the course's own, and very small: four layers,
# 394,080 weights, and 4 query heads of dimension 32 in each layer. Its tokens are single bytes. All it has ever read
# are three chapters of *Alice's Adventures in Wonderland*; chapter 05 takes it apart. The next cell trains it, which
# takes about half a minute on one CPU core. The weights are kept, so this happens once in the whole course.

# %%
from course_lib.models.training import trained_tiny_model

decoder = trained_tiny_model(
    device=device, report=lambda step, loss: step % 100 or print(f"step {step}: {loss:.2f} nats a byte")
).requires_grad_(False)
print(f"{decoder.config.parameters:,} weights, and {decoder.config.key_heads} KV heads, each for a pair of query heads")

# %% [markdown]
# The model takes any function as its attention. Yours gets the heads of one sequence at a time; `whole_attention` deals
# them out. If your answer to 4.5 has not passed, the course's takes its place, and the first line below says so.
#
# **Predict** before you run it: both versions compute the same formula and round differently. The model always takes
# the likeliest byte. Will the two texts be the same?

# %%
import textwrap

from course_lib.kernels.attention.reference import attention_reference  # scores, softmax, product: each a matrix
from course_lib.models.generation import complete
from course_lib.models.plugged import who_runs, whole_attention

versions = {"naive": attention_reference, "tiled": whole_attention(best_ragged)}
print(who_runs({"attention (4.5)": best_ragged}))
texts = {}
for name, function in versions.items():
    decoder.attention = function
    texts[name] = "Alice was " + complete(decoder, "Alice was ", 200 if on_gpu else 24, cached=False)
    print(f"{name}:\n{textwrap.indent(textwrap.fill(texts[name], 100), '    ')}")
print("the same text:", len(set(texts.values())) == 1)

# %% [markdown]
# A rounding error changes the likeliest byte only where two bytes are almost equally likely, so the texts agree.
#
# A text this short gains nothing from tiles. A long prompt does, and the gain is memory. Count the largest tensor that
# one run over $N$ tokens makes, at 4 bytes a number. Naive attention makes matrices with a number for each of 4 heads
# and each pair of tokens: $4 \cdot 4 N^2$ bytes. Yours makes none. Its output has 4 · 32 numbers a token, and then the
# largest tensor is not in attention at all: the feed-forward block makes 192 numbers a token, $4 \cdot 192 N$ bytes. At
# 512 tokens that is 4.2 MB against 0.39 MB. What is it at 16,384?
#
# The next cell looks at all tensors of a real run. On a GPU it also takes the time, and says how much memory the whole
# run needed beside the weights. In the interpreter the time of a kernel means nothing, so none is shown.

# %%
def one_run(function, length):
    """What a run over `length` tokens makes: (bytes of the largest tensor or of all at once, seconds or None)."""
    decoder.attention = function
    tokens = torch.arange(length, device=device)[None] % 128
    run = partial(decoder, tokens, last_only=True)
    with torch.inference_mode():
        if not on_gpu:
            return max(tensor.bytes for tensor in metered(run).allocations), None
        run()  # compiled before it is timed
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        most = torch.cuda.max_memory_allocated(device) - before
        return most, measure(run, warmup=0, seconds=0.2, device=device).median


print(f"{'':32}{'naive':>12}{'tiled':>12}{'ratio':>8}")
for length in (512, 2048, 16_384, 131_072):
    naive, tiled = 4 * 4 * length**2, 4 * 192 * length
    row = f"{format_bytes(naive):>13}{format_bytes(tiled):>12}{naive / tiled:>8.0f}"
    print(f"largest tensor, {length:>7,} tokens:{row}")
print("\nmeasured, " + ("all memory at once, and time" if on_gpu else "the largest tensor"))
for length in (512, 4096, 16_384) if on_gpu else (256,):
    row = []
    for function in versions.values():
        try:
            most, seconds = one_run(function, length)
            row.append(f"{format_bytes(most)}" + (f" {format_seconds(seconds)}" if on_gpu else ""))
        except torch.cuda.OutOfMemoryError:
            row.append("no room")
    print(f"{length:>7,} tokens: naive {row[0]}, tiled {row[1]}")
decoder.attention = versions["tiled"]

# %% [markdown]
# At 131,072 tokens one matrix of the naive version takes 275 GB, which is nearly twice an H200's memory. The model with
# your kernel needs 0.1 GB for its largest tensor. This model would write nonsense there, because it has learned from
# pieces of 256 bytes. Models that were trained on long texts can use such prompts because of kernels like yours.

# %% [markdown]
# ## What production systems do
#
# The kernel you wrote is the heart of all of them; the rest is hardware. **FlashAttention-2** is the portable CUDA
# version, and what PyTorch's `SDPBackend.FLASH_ATTENTION` runs; its authors report up to 230 TFLOP/s on an A100, 73 %
# of the peak. **FlashAttention-3** and **cuDNN** add what Hopper offers: a producer warp that only loads, products
# that run while the softmax of another tile is computed, FP8 (chapter 09). **FlashAttention-4** ([arXiv
# 2603.05451](https://arxiv.org/abs/2603.05451)) does it for Blackwell, where `exp` has become the bottleneck and is
# partly computed by polynomials. **FlexAttention** in PyTorch generates a Triton kernel of this shape around a mask
# that you write in Python. Choose in this order: `scaled_dot_product_attention`, FlexAttention when the mask is
# unusual, and a kernel of your own when the computation is. The course's own library version of this chapter's kernel,
# with sliding windows and grouped heads, is `course_lib/kernels/attention/flash.py`; after this chapter you can read
# it.
#
# ## Papers
#
# - Dao, Fu, Ermon, Rudra, Ré: *FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness*, [arXiv
#   2205.14135](https://arxiv.org/abs/2205.14135). Algorithm 1 is experiment 1's loop; Theorem 2 is the IO complexity.
# - Dao: *FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning*,
#   [arXiv 2307.08691](https://arxiv.org/abs/2307.08691). Section 3 has the choices of the four experiments.
# - Tillet, Kung, Cox: *Triton: an intermediate language and compiler for tiled neural network computations*, MAPL 2019.
# - Rabe, Staats: *Self-attention Does Not Need O(n²) Memory*, [arXiv 2112.05682](https://arxiv.org/abs/2112.05682).
#
# Next, in chapter 05: the same attention with one query at a time, where the keys come from a cache and the arithmetic
# nearly vanishes.

# %%
progress()
