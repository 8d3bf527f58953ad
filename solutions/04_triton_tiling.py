# %% [markdown]
# # 04 · Tiles: attention that stays on the chip
#
# **The question.** Naive attention moves 17.4 GB for chapter 02's layer of 8192 tokens and 32 heads of dimension 128.
# On an H100 with 3.35 TB/s that takes 5.2 ms. The layer's arithmetic is 1.1 TFLOP, and FlashAttention-3 reaches up to
# 740 TFLOP/s on the same card ([arXiv 2407.08608](https://arxiv.org/abs/2407.08608)), which makes 1.5 ms. It does not
# skip a single multiplication, and it even computes a few more exponentials. So how does it save 3.7 ms?
#
# In chapter 03 you finished a row's softmax without ever holding the whole row. Here you do that for a *tile* of
# queries at once. You write the kernel, count that it never writes the scores to memory, and make it take any length.
#
# **Time.** Seven exercises, 4 to 6 hours in all. The core path takes a little over two hours: exercises 4.1, 4.3 and
# 4.4 and the measurement near the end. You can skip the sections whose heading ends in *deeper*, but run their cells,
# because later cells use what they define.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution, watch
)

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
# ## Same FLOPs, fewer bytes
#
# First measure the difference. PyTorch's `scaled_dot_product_attention` works on tiles, on a CPU too. The next cell
# compares it with naive attention: scores, softmax, product, one after the other. Both do $4 H N^2 D$ FLOPs.
# **Predict** how many times as fast the tiled one is.

# %%
predict("04 tiled attention", ..., "times as fast")

# %%
from course_lib.hardware.timing import measure


def naive_attention(query, key, value):
    """Scores, softmax, product, one operation after the other. All tensors are [..., length, head_dim]."""
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # [..., length, length]
    return torch.softmax(scores, dim=-1) @ value


if on_gpu:  # the question's layer if its matrices fit, half the length if not
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
del query, key, value
measured("04 tiled attention", rates[1] / rates[0], "times as fast")

# %% [markdown]
# ## Where a tile lives
#
# Each multiprocessor (*SM* for short) has its own *shared memory* on the chip: 64 KiB on a T4, 164 KiB on an A100,
# 228 KiB on an H100. All SMs of an A100 together read their shared memory nine times as fast as HBM. An SM also has
# 65,536 registers of four bytes, and one thread may use 255 of them.
#
# The scores of 128 queries against 8192 keys take 4.2 MB in float32, so they do not fit there. But a tile of them
# does. So a program holds a tile of queries and walks over the keys and values, tile by tile. In between it keeps
# what you kept in chapter 03: for each query a running maximum, a running sum and an accumulator of $D$ numbers. The
# scores of a tile are computed, used and dropped.
#
# The next figure shows this for one head. The score matrix is cut into tiles, with Q at its left, K above, V below
# and O at its right. What is on the chip is orange. Watch how little that is, and how often the same keys are read.

# %%
from course_lib.figures.attention.tile_stepper import tile_stepper

tile_stepper(query_length=768, key_length=768, head_dim=64, query_rows=128, key_rows=128, item_bytes=2)

# %% [markdown]
# ## First in PyTorch
#
# Write the loops in PyTorch first, with slices instead of pointers. The outer loop takes a tile of queries, and the
# inner loop walks over the keys. The inner loop is your streaming attention of exercise 3.4, but each running value
# now has an entry for each row of the tile.
#
# The check looks at the size of your tensors. It refuses a matrix of all scores, and also the scores of one tile of
# queries against *all* keys.

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
        softmax(query @ key.T / √head_dim) @ value, [query_length, head_dim], float32. A tensor that you make may have
        as many elements as the largest input, or as one query_rows × key_rows tile where that is more. The inputs stay
        as they are.
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
# The next cell runs your function with four different tiles. The results agree up to rounding, so the choice of tiles
# only changes the speed.

# %%
query, key, value = (torch.randn(300, 32) for _ in range(3))
exact = naive_attention(*(matrix.double() for matrix in (query, key, value)))
for tiles in ((300, 300), (64, 32), (17, 101), (1, 1)):
    error = (best_tiled_attention(query, key, value, *tiles).double() - exact).abs().max()
    print(f"tiles of {tiles[0]:>3} × {tiles[1]:<3}: largest error {error:.1e}")

# %% [markdown]
# ## How many bytes?
#
# Count the bytes that the programs ask for. A program reads its $B_M$ queries once and writes $B_M$ rows of output
# once. It also reads *all* keys and values of its head. With $N_q$ queries, $N_k$ keys and $b$ bytes for each
# element, a head has $\lceil N_q / B_M \rceil$ programs, so all $H$ heads ask for:
#
# $$\text{bytes} = b \cdot H \cdot \left( 2 N_q D + 2 N_k D \left\lceil \frac{N_q}{B_M} \right\rceil \right)$$
#
# In the question's layer, with 128 queries in a tile, that is 8.7 GB, and nearly all of it is the second term. Only a
# larger $B_M$ makes it smaller. The number of keys in a tile does not change the bytes. So the rule is: **as many
# queries as fit, then as many keys as there is room for.**
#
# That is still half of what naive attention moves, but most of it does not come from HBM. The keys and values of a
# head are 4 MB, and its 64 programs read them at about the same time. So all reads but the first come from the L2
# cache (50 MB on an H100), and HBM delivers little more than the distinct bytes, 268 MB. Naive attention's matrix of
# 4.3 GB fits into no L2 cache.
#
# ## How large may a tile be? · deeper
#
# Two things limit a tile. *Shared memory* holds the tile of queries and the tiles of keys and values. While the
# program computes with one pair of key and value tiles, it already loads the next ones. With $s$ *stages* there is
# room for $s$ pairs.
#
# The *registers* hold the accumulator, $B_M \times D$, and the scores, $B_M \times B_N$, where $B_N$ is the number of
# keys in a tile. Both are float32 and divided among the program's threads, 32 for each warp. A thread needs registers
# for other things too, so we allow these two 128 of its 255. For example, 64 × 64 scores with $D = 64$ and 128
# threads take $64 \cdot (64 + 64) / 128 = 64$ registers.

# %%
# Exercise 4.2 · Tiles within a budget
def shared_memory(query_rows, key_rows, head_dim, item_bytes, stages):
    """Bytes of shared memory for one tile of queries, and for `stages` tiles of keys and as many of values."""
    # BEGIN SOLUTION
    return (query_rows + 2 * stages * key_rows) * head_dim * item_bytes
    # END SOLUTION


def traffic(heads, query_length, key_length, head_dim, item_bytes, query_rows):
    """Bytes that all programs load and store together. Each tile of `query_rows` queries of a head has one program.

    A program reads its queries and writes its output once, and it reads all keys and values of its head. The last tile
    of queries may be partly empty; rows that do not exist are not moved.
    """
    # BEGIN SOLUTION
    query_tiles = -(-query_length // query_rows)
    rows = 2 * query_length + query_tiles * 2 * key_length
    return heads * rows * head_dim * item_bytes
    # END SOLUTION


def choose_tiles(head_dim, item_bytes, shared_memory_bytes, threads):
    """The tiles (query_rows, key_rows) that move the fewest bytes and fit.

    Both are 16, 32, 64, 128 or 256. A pair fits if two limits hold. With 2 stages it takes at most
    `shared_memory_bytes` of shared memory. And the accumulator and the scores, query_rows · (head_dim + key_rows)
    float32 values, take at most 128 registers of each of the program's `threads`. Choose the largest query_rows that
    fits, and with it the largest key_rows. Returns None when nothing fits.
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
# The next cell chooses tiles for real chips. The last two columns are for 32 heads and 8192 tokens: the bytes that
# the programs ask for, and how many times as much naive attention's matrix moves.

# %%
from course_lib.hardware.compiler.architectures import ARCHITECTURES

matrix_bytes = 32 * 4 * 8192**2 * 2
print(f"{'':18}{'shared':>9}  {'head dim':>8}  {'threads':>7}  {'tiles':>10}  {'asked for':>9}"
      f"   naive attention's matrix moves {format_bytes(matrix_bytes)}")
for arch in (75, 80, 89, 90):
    limits = ARCHITECTURES[arch]
    for head_dim_here, threads in ((64, 128), (128, 256)):
        tiles = best_choose_tiles(head_dim_here, 2, limits.shared_per_block, threads)
        asked = best_traffic(32, 8192, 8192, head_dim_here, 2, tiles[0])
        print(f"{limits.example:18}{limits.shared_per_block:>9,}  {head_dim_here:>8}  {threads:>7}  "
              f"{tiles[0]:>4} × {tiles[1]:<3}  {format_bytes(asked):>9}   {matrix_bytes / asked:.1f} times as much")

# %% [markdown]
# The kernel needs at least the longest of three times: the FLOPs at the rate of matrix products, the bytes asked for
# at the L2 cache's bandwidth, and the distinct bytes at HBM's. The next cell prints them for your machine. On a CPU
# the arithmetic takes longest by far.

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
    floors["asked for, at the L2 cache's rate"] = best_traffic(32, 8192, 8192, 128, 2, 128) / roof.l2_bandwidth
for name, seconds in sorted(floors.items(), key=lambda item: item[1]):
    print(f"{name:36} {format_seconds(seconds):>9}")

# %% [markdown]
# ## Now in Triton
#
# The outer loop becomes the grid: each tile of queries of each head gets a program. `tl.program_id(0)` is the number
# of the tile, and `tl.program_id(1)` that of the head. Pointers and `tl.dot` work as in chapter 02, and with
# `input_precision="ieee"` float32 inputs again keep all their bits. The running values are float32, whatever the
# inputs are. Only the weights are cast, for the second product, because both operands of `tl.dot` must have the same
# type.
#
# | in the kernel | what it gives |
# |---|---|
# | `tl.full([BLOCK_M], float("-inf"), tl.float32)` | a block with the same number everywhere |
# | `tl.trans(key_tile)` | rows and columns exchanged: [BLOCK_N, HEAD_DIM] becomes [HEAD_DIM, BLOCK_N] |
# | `tl.max(scores, axis=1)`, `tl.sum(weights, axis=1)` | one number for each row, [BLOCK_M] |
# | `output_pointer.dtype.element_ty` | the type of what a pointer points to, for `.to(…)` |
#
# **Exercise 4.3.** The kernel's first part is written. You write the loop and the store. All lengths are multiples of
# 64 here, so you need no mask.

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
            or 128. Any strides but the last, which is 1; a head may begin more than 2³¹ elements after the first, and
            reaches over fewer itself. Numbers of any size.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64; strides and dtype as query's, each its
            own.

    Returns:
        [heads, query_length, head_dim], in query's dtype. One launch computes it, and you make no tensor larger than
        the inputs. The kernel may move no more bytes than the formula above (`traffic` in 4.2) says for tiles of 64
        queries.
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
# ## Proof by counting
#
# Does the kernel really never write the scores? The next cell counts all bytes that it loads and stores, and compares
# them with the formula. **Predict:** which tensors will have bytes in the column *stored*?

# %%
from course_lib.hardware.meter.metered import metered

heads, length, head_dim = 2, 384, 64
query, key, value = (torch.randn(heads, length, head_dim, dtype=torch.float16) for _ in range(3))
report = metered(best_attention, query, key, value)
predicted = best_traffic(heads, length, length, head_dim, 2, query_rows=64)
scores = 4 * heads * length * length * 2
print(f"formula {predicted:,} bytes, counted {report.total_bytes:,}: {report.total_bytes / predicted:.3f}")
print(f"naive attention would move another {scores:,} bytes for its scores and probabilities")
report

# %% [markdown]
# Only the output was stored. The queries were loaded once, and the keys and values 384 / 64 = 6 times, once by each
# program of their head.
#
# `watch` shows these loads one by one, for two heads of 128 tokens. Move the slider over the steps and see how one
# tile of queries goes past all tiles of keys and values. If your own kernel's check failed, write
# `flash_attention_full` in place of `best_attention`: a tile that is left out or read twice is easy to see.

# %%
watch(best_attention, *(torch.randn(2, 128, 16) for _ in range(3)))

# %% [markdown]
# The dark grey cells belong to the other head: both of its programs read these keys and values.
#
# ## When your kernel is wrong
#
# A check tells you what is wrong with your answer to an exercise. Your own kernels have no check, so in this section
# you learn to find a mistake yourself. It takes ten minutes. The kernel in the next cell has two mistakes. They are as
# well hidden as real ones: with little padding and contiguous tensors its result is right.
#
# The kernel computes attention for one query in each of four sequences. Their prompts have different lengths, so they
# are *padded on the left*: sequence 2 has 20 keys of padding before its first real one. Padding gets the score
# $-\infty$. The values lie in a buffer with room for 80 tokens, of which 64 are in use.
#
# **1. Write down the meaning.** Write a few lines of plain PyTorch, so simple that you can see that they are right.
# Here they are `left_padded_meaning`.
#
# **2. Make it small, and look where the errors are.** Four programs and four tiles are enough. Print one error for each
# program, not one for the whole tensor: which programs are wrong tells you where to look.

# %%
@triton.jit
def left_padded_kernel(
    query_pointer, key_pointer, value_pointer, first_pointer, output_pointer, trace_pointer,
    key_stride, value_stride, key_length, scale, traced,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: one query, against the keys of its sequence from `first` on."""
    sequence = tl.program_id(0)
    first = tl.load(first_pointer + sequence)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query = tl.load(query_pointer + sequence * HEAD_DIM + columns)  # [HEAD_DIM]
    running_max = float("-inf")
    running_sum = 0.0
    accumulator = tl.zeros([HEAD_DIM], tl.float32)
    for first_key in range(0, key_length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        tile = keys[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        key_tile = tl.load(key_pointer + sequence * key_stride + tile)  # [BLOCK_N, HEAD_DIM]
        scores = tl.sum(key_tile * query[None, :], axis=1) * scale  # [BLOCK_N]
        scores = tl.where(keys >= first, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores))
        weights = tl.exp(scores - new_max)  # [BLOCK_N]
        rescale = tl.exp(running_max - new_max)
        running_sum = running_sum * rescale + tl.sum(weights)
        value_tile = tl.load(value_pointer + sequence * key_stride + tile)  # [BLOCK_N, HEAD_DIM]
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value_tile, axis=0)  # [HEAD_DIM]
        running_max = new_max
        if sequence == traced:  # for debugging: this program alone writes down what it holds after each tile
            tl.store(trace_pointer + first_key // BLOCK_N * 2, running_max)
            tl.store(trace_pointer + first_key // BLOCK_N * 2 + 1, running_sum)
    tl.store(output_pointer + sequence * HEAD_DIM + columns, accumulator / running_sum)


def left_padded(query, key, value, first, traced=-1):
    """(output, trace): query [batch, head_dim], key and value [batch, length, head_dim], first [batch]."""
    output = torch.empty_like(query)
    trace = torch.zeros(key.shape[1] // 16, 2, device=query.device)  # running maximum and sum, for each tile
    left_padded_kernel[(len(query),)](
        query, key, value, first, output, trace, key.stride(0), value.stride(0), key.shape[1],
        1 / math.sqrt(query.shape[1]), traced, HEAD_DIM=query.shape[1], BLOCK_N=16,
    )
    return output, trace


def left_padded_meaning(query, key, value, first):
    """(scores, output): the same, in plain PyTorch."""
    scores = torch.einsum("bd,bnd->bn", query, key) / math.sqrt(query.shape[1])
    scores = scores.masked_fill(torch.arange(key.shape[1], device=key.device) < first[:, None], -math.inf)
    return scores, torch.einsum("bn,bnd->bd", scores.softmax(dim=1), value)


padded_query, padded_key = torch.randn(4, 16, device=device), torch.randn(4, 64, 16, device=device)
padded_value = torch.randn(4, 80, 16, device=device)[:, :64]
first = torch.tensor([0, 5, 20, 40], device=device)
padded = padded_query, padded_key, padded_value, first
true_scores, true_output = left_padded_meaning(*padded)
for sequence, error in enumerate((left_padded(*padded)[0] - true_output).abs().amax(dim=1)):
    print(f"sequence {sequence}, {first[sequence]:>2} keys of padding: largest error {error:.1e}")

# %% [markdown]
# Sequence 0 is right, sequence 1 is wrong, and sequences 2 and 3 are NaN. So there may be two mistakes. (Without a GPU
# you may also see a warning by NumPy, because the interpreter computes with it.)
#
# **3. Begin with NaN.** A NaN hides every other error, because it spreads: NaN times anything is NaN, and so is every
# sum with one in it. You need the place where the *first* one is made. There are only three usual sources:
# $-\infty - (-\infty)$, $0 / 0$, and $0 \cdot x$ where $x$ is infinite or NaN, such as a value that was never written.
#
# **4. Take one program, and compare it step by step with its meaning.** The kernel has a `trace` for this: the program
# with the number `traced` stores its running maximum and sum after each tile. Such a store works on a GPU as well as in
# the interpreter, it prints no walls of numbers, and PyTorch can compute what should be there. (If program 0 is wrong,
# you can launch that one alone, with a grid of one program.) The next cell compares program 2. **Predict:** in which
# tile is the first NaN?

# %%
def compare_trace(sequence):
    """What a program holds after each tile, beside what PyTorch says."""
    _, trace = left_padded(*padded, traced=sequence)
    print(f"program {sequence}    running maximum   PyTorch      running sum   PyTorch")
    for tile, (running_max, running_sum) in enumerate(trace):
        seen = true_scores[sequence, : 16 * (tile + 1)]  # [keys so far]
        total = torch.exp(seen - seen.max()).sum() if seen.max() > -math.inf else torch.tensor(0.0)
        print(f"after tile {tile} {running_max:>16.4f} {seen.max():>9.4f} {running_sum:>16.4f} {total:>9.4f}")


compare_trace(2)

# %% [markdown]
# The maximum is right after every tile. The sum is NaN from tile 0 on. After that tile the maximum is $-\infty$,
# because all its 16 keys are padding. So `scores - new_max` is $-\infty - (-\infty)$. Nothing is wrong in the later
# tiles, but a sum that is NaN stays NaN. Sequence 1 has only 5 keys of padding, so its first tile has a finite maximum.
#
# In the interpreter there is a shorter way to find that line. The interpreter computes with NumPy, which can raise an
# error where a NaN is made:

# %%
import traceback

import numpy as np

if on_gpu:
    print("Here kernels are compiled, so this works only where TRITON_INTERPRET=1 is set before Triton is imported.")
else:
    try:
        with np.errstate(invalid="raise"):
            left_padded(*padded)
    except Exception as error:
        for frame in traceback.extract_tb(error.__cause__.__traceback__):
            if frame.name == "left_padded_kernel":
                print(f"{error.__cause__}, in the line\n    {frame.line}")

# %% [markdown]
# If the cell prints no line, the kernel makes no NaN. It also reports a NaN that a later `tl.where` replaces.
#
# **5. Look into the kernel.** Without a GPU a kernel is ordinary Python, so you may write `print(scores)` into it, or
# stop in it. To stop, write `breakpoint()` in a file. In a notebook that does nothing, so write
# `import pdb; pdb.set_trace()` there. Then `p scores` shows the tile, `n` runs the next line, `c` goes on to the next
# stop, and `q` ends it. To stop in one program alone, write `if sequence == 2:` before it. If you have a GPU, put the
# kernel and its launch into a file, with small inputs on the CPU, and start it with
# `TRITON_INTERPRET=1 python file.py`.
#
#     > file.py(33)left_padded_kernel()
#     -> weights = tl.exp(scores - new_max)
#     (Pdb) p new_max
#     array([-inf], dtype=float32)
#
# In a compiled kernel `breakpoint()` is an error. There `tl.device_print("scores", scores)` prints, but each of the
# program's threads prints a line: on an H200, one number made 128 equal lines, and a tile of 8 numbers another 128. So
# store what you want to see, as the trace does, or print it in the interpreter, where `device_print` shows each tile
# once. Take all this out again before you check or time the kernel.
#
# **6. Bisect what is left.** Now sequence 1. Its trace shows which half of the kernel is at fault.

# %%
compare_trace(1)

# %% [markdown]
# The maximum and the sum agree with PyTorch after each tile. So the keys, the scores and the weights are right, and the
# mistake comes after them, where the values are used. Sequence 0 is right, so suspect everything that is multiplied by
# `sequence`: for program 0 that is 0, whatever the stride. `watch` shows where a program's loads go:

# %%
watch(lambda *tensors: left_padded(*tensors)[0], *padded, program=1)

# %% [markdown]
# The program reads all 64 of its keys. Of its values it reads only 48. The other 16 rows that it reads lie before them,
# in the unused end of sequence 0's buffer. So the load of the values begins too early, at element 1024 instead of 1280,
# because it uses `key_stride`. On contiguous tensors of one shape the two strides are equal, and the kernel is right.
# This is why you test a kernel on views.
#
# **Your turn.** Mend both mistakes in the kernel's cell and run it again, until all four errors are about 1e-7.
#
# <details><summary>What to write</summary>
#
# `value_tile = tl.load(value_pointer + sequence * value_stride + tile)`. And before the weights,
# `reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)`, which both exponentials subtract in place of
# `new_max`. A row that has seen no key then has weights of 0.
#
# </details>
#
# | what you see | what it often is | what shows it |
# |---|---|---|
# | everything is wrong | scale, dtype, a transposed tile | the first tile beside PyTorch |
# | program 0 is right, the others are not | strides, or a wrong `tl.program_id` | `watch`, and inputs that are views |
# | lengths that are multiples of the tile are right | a mask, or the number of programs | `watch` with an odd length |
# | NaN | the three sources above | the trace, or NumPy's error |
# | it differs from run to run, or is wrong only on a GPU | a race | `watch` |
# | it fails for large tensors only | an offset beyond 2³¹ | a tensor of over 2³¹ elements; `.to(tl.int64)` mends it |
# | "illegal memory access" | a load or store outside of a tensor | `watch`, compute-sanitizer |
# | it is right but slow | | `metered` for the bytes, `profile` (chapter 15) for the rest |
#
# ## What only a GPU shows · deeper
#
# The interpreter hides three kinds of mistakes, which may show on a GPU.
#
# **It runs one program after the other.** So a *race* goes unnoticed. The next kernel counts positive numbers: each
# program loads the count, adds its own, and stores it. On a GPU the programs run at the same time and load the same old
# count, so most additions are lost. In one run on an H200 it counted 29 of 2,041. `watch` knows which programs touch an
# element, and finds the race on any machine. (A check runs your programs in several orders, for the same reason.)

# %%
@triton.jit
def count_kernel(x_pointer, count_pointer, BLOCK: tl.constexpr):
    """One program: how many of BLOCK numbers are positive, added to the count."""
    numbers = tl.load(x_pointer + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))  # [BLOCK]
    positive = tl.sum((numbers > 0).to(tl.int32))
    tl.store(count_pointer, tl.load(count_pointer) + positive)  # the race: tl.atomic_add(count_pointer, positive)


def count_positive(x):
    count = torch.zeros(1, dtype=torch.int32, device=x.device)
    count_kernel[(x.numel() // 64,)](x, count, BLOCK=64)
    return count


numbers = torch.randn(64 * 64, device=device)
print(f"counted {count_positive(numbers).item():,} of {(numbers > 0).sum().item():,}")
seen = str(watch(count_positive, numbers[:256])).splitlines()
print("\n".join(line for line in seen if "race" in line) or "no race")

# %% [markdown]
# **Its tensors are small.** `tl.program_id` and `tl.arange` have 32 bits. Row 40,000 of a matrix with 65,536 columns
# begins at element 2,621,440,000, but in 32 bits this becomes −1,673,527,296, and the program reads somewhere before
# the tensor. No small test shows it. Cast the number of the program, head or page to `tl.int64` before you multiply it
# by a stride, as 4.3 does.
#
# **It reports no load outside of a tensor.** Such a load gets whatever lies there. Only one that goes very far ends the
# process, without a message. On a GPU most of them do no visible harm either, because PyTorch hands out pieces of a few
# large blocks of memory. Only an address outside of all blocks is an "illegal memory access". The error comes late,
# from whatever you call next, and after it the process cannot use the GPU any more. With `CUDA_LAUNCH_BLOCKING=1` the
# launch itself raises the error. NVIDIA's *compute-sanitizer*, which comes with the CUDA toolkit, finds the loads that
# raise no error, if every tensor has a block of its own:
#
#     PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python file.py
#
#     ========= Invalid __global__ write of size 4 bytes
#     =========     at fill_kernel+0xa0 in file.py:21
#     =========     by thread (0,0,0) in block (0,0,0)
#     =========     and is 1 bytes after the nearest allocation at 0x7f098e804000 of size 4,000 bytes
#
# That is a store to element 1,000 of a tensor with 1,000 elements, seen on an H200. Without the first word of the
# command the tool found nothing. (`--tool racecheck` looks at shared memory alone, so it does not see the race above.)
#
# ## Twice the memory, half the bytes · deeper
#
# If the fast memory has room for $M$ elements, tiled attention moves $\Theta(N^2 D^2 / M)$ elements, that is, $N^2
# D^2 / M$ times some constant. No exact algorithm can do better for every $M$ ([arXiv
# 2205.14135](https://arxiv.org/abs/2205.14135)). Your formula agrees: its large term is proportional to $N^2 D /
# B_M$, and $B_M$ queries take memory in proportion to $B_M D$. The next kernel is yours, with two switches that a
# later section needs. Its tiles grow from 16 to 128 queries. **Predict** the last line.

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
            scale_log2 = scale * 1.4426950408889634  # log2 e goes into the scale
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
print("queries in a tile   on the chip     formula     counted   counted / formula")
for query_rows in (16, 32, 64, 128):
    counted = metered(queries_outside, query, key, value, query_rows, 128).total_bytes
    predicted = best_traffic(1, 512, 512, 64, 2, query_rows)
    on_chip = query_rows * 64 * (2 + 4)  # the queries in float16, the accumulator in float32
    print(f"{query_rows:>17}   {format_bytes(on_chip):>11} {predicted:>11,} {counted:>11,} "
          f"{counted / predicted:>19.3f}")

# %% [markdown]
# ## Causal: half of the tiles are never touched
#
# A causal query sees the keys up to its own position. The last query stands at the last key, as in chapter 02, so
# query $i$ has the position $i + N_k - N_q$.
#
# A hidden score takes as long to compute as any other, so a mask alone saves no time. But in the tiles above the
# diagonal *every* score is hidden, so the loop over the keys can end before them. For a long sequence that saves half
# of the FLOPs and half of the bytes. Only tiles on the diagonal still need the mask. In the next figure the skipped
# tiles are hatched, 15 of 36.

# %%
tile_stepper(query_length=768, key_length=768, head_dim=64, query_rows=128, key_rows=128, item_bytes=2, causal=True)

# %% [markdown]
# A GPU has an instruction for $2^x$ and none for $e^x$. So `tl.exp(x)` becomes `tl.exp2(x * 1.4427)`, one more
# multiplication for each score. You can save it, because each score is multiplied by the scale anyway. The next
# launcher puts $\log_2 e = 1.4427$ into the scale and passes `scale_log2`; for $D = 64$ it is $1.4427 / 8 = 0.180$.
# With `tl.exp2` throughout, the weights are the same as before.
#
# | in the kernel | what it gives |
# |---|---|
# | `tl.exp2(scores)` | 2 to the power of each element: 3 becomes 8 |
# | `tl.minimum(key_length, 128)` | the smaller of two numbers |
# | `for first_key in range(0, end, BLOCK_N):` | `end` may be computed; if it is 0 or less, there is no step |
# | `tl.where(a[None, :] <= b[:, None], tile, 0.0)` | the tile where the condition holds, 0 elsewhere |
#
# **Exercise 4.4.** Copy your loop and store from 4.3 and change four things:
#
# 1. The loop ends after the last key that any query of this program sees.
# 2. The scale is `scale_log2`, and both exponentials are `tl.exp2`.
# 3. Hidden scores become $-\infty$ before the maximum is taken.
# 4. With more queries than keys, the first queries see no key and their sum stays 0. Their output must be 0, but
#    $0 / 0$ is NaN.

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
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    # Your loop and store of 4.3, with four changes.
    # BEGIN SOLUTION
    positions = rows + key_length - query_length  # [BLOCK_M], counted along the keys
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
            or 128. Any strides but the last, which is 1; a head may begin more than 2³¹ elements after the first, and
            reaches over fewer itself. Numbers of any size.
        key, value: [heads, key_length, head_dim], key_length a multiple of 64, smaller or larger than query_length;
            strides and dtype as query's, each its own.

    Returns:
        [heads, query_length, head_dim], in query's dtype. The last query stands at the last key: query i sees the keys
        0 to i + key_length - query_length. The output of a query that sees no key is zeros. One launch computes it, and
        you make no tensor larger than the inputs. The kernel may move no more bytes than tiles of 64 queries need if
        each reads the keys up to the last one that it sees.
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
print(f"bytes: {causal:,} of {full:,}, {causal / full:.2f}")
tiles = length // 64
print(f"tiles: {tiles * (tiles + 1) // 2} of {tiles * tiles}, {(tiles + 1) / (2 * tiles):.2f}")

# %% [markdown]
# The bytes shrink less than the tiles, because queries and outputs move once either way. Both ratios are above one
# half, because diagonal tiles are computed whole. With 8192 tokens the ratios are 0.51 and 0.50.

# %% [markdown]
# ## Ragged edges · deeper
#
# A text can have any length, so the last tile may reach past the end. Each of the three edges needs a mask:
#
# | edge | loaded as zeros, and then |
# |---|---|
# | queries past the end | not stored |
# | keys past the end | **their scores must become $-\infty$**: a key of zeros has the score 0, and $e^0 = 1$ |
# | columns past the head dimension | not stored; zeros add nothing to a score |
#
# A tile's sides are powers of two. So a head dimension of 80 is computed as 128, and three eighths of the arithmetic
# is wasted.
#
# There is one more trap. In 4.4, queries without any key filled whole tiles, so the loop over the keys made no step
# for them. Now they can share a tile with queries that do see keys. The maximum of such a row stays $-\infty$, and
# $-\infty - (-\infty)$ is NaN. In such a row, subtract 0 instead of the maximum. (A query that sees any key sees key
# 0, so its maximum is finite after the first tile.)
#
# | in the code | what it gives |
# |---|---|
# | `(rows < 100)[:, None] & (columns < 80)[None, :]` | a mask for a tile; write `&` with brackets, not `and` |
# | `if CAUSAL:` | decided when the kernel is compiled, because `CAUSAL` is a `tl.constexpr` |
# | `triton.next_power_of_2(80)`, `triton.cdiv(100, 64)` | in the launcher: 128, and 2 (division rounded up) |
#
# **Exercise 4.5.** The cell holds the loop of 4.4 with six numbered gaps, each at a place where an edge matters. Fill
# them in, and choose the tile's width and the grid in the launcher.

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
    head = tl.program_id(1).to(tl.int64)
    first_query = tl.program_id(0) * BLOCK_M
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    positions = rows + key_length - query_length  # [BLOCK_M]
    # 1. Load the queries into `query`, [BLOCK_M, BLOCK_D]. Zeros for what does not exist.
    # BEGIN SOLUTION
    inside = (rows < query_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_M, BLOCK_D]
    query_offsets = rows[:, None] * query_stride + columns[None, :]
    query = tl.load(query_pointer + head * query_head_stride + query_offsets, mask=inside, other=0.0)
    # END SOLUTION
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = key_length
    if CAUSAL:
        end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(0, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        # 2. Load the keys into `key_tile`, [BLOCK_N, BLOCK_D].
        # BEGIN SOLUTION
        present = (keys < key_length)[:, None] & (columns < head_dim)[None, :]  # [BLOCK_N, BLOCK_D]
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + head * key_head_stride + key_offsets, mask=present, other=0.0)
        # END SOLUTION
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        # 3. Which scores count? The others become -inf.
        # BEGIN SOLUTION
        visible = (keys < key_length)[None, :]
        if CAUSAL:
            visible = visible & (keys[None, :] <= positions[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        # END SOLUTION
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        # 4. `weights`, [BLOCK_M, BLOCK_N], and `rescale`, [BLOCK_M]. new_max is -inf where a row has seen no key.
        # BEGIN SOLUTION
        # Such a row subtracts 0, because -inf - -inf would be NaN.
        reference_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - reference_max[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference_max)  # [BLOCK_M]
        # END SOLUTION
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        # 5. Load the values into `value_tile`, [BLOCK_N, BLOCK_D].
        # BEGIN SOLUTION
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + head * value_head_stride + value_offsets, mask=present, other=0.0)
        # END SOLUTION
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_M, BLOCK_D]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    # 6. Store what exists of `output`.
    # BEGIN SOLUTION
    output_offsets = rows[:, None] * output_stride + columns[None, :]
    tl.store(output_pointer + head * output_head_stride + output_offsets, output, mask=inside)
    # END SOLUTION


def flash_attention_ragged(query, key, value, causal):
    """Attention for any lengths and any head dimension from 16 to 128, by one kernel with programs of 64 queries.

    Args:
        query: [heads, query_length, head_dim], float32 or float16; any strides but the last, which is 1. A head may
            begin more than 2³¹ elements after the first, and reaches over fewer itself. Numbers of any size.
        key, value: [heads, key_length, head_dim]; strides and dtype as query's, each its own.
        causal: True or False; aligned to the end, as in 4.4.

    Returns:
        [heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key. One launch computes it,
        and you make no tensor larger than the inputs. The kernel moves at most 1.3 times the bytes that tiles of 64
        queries need.
    """
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # The width of a tile, `block_d`, and the `grid`.
    # BEGIN SOLUTION
    block_d = max(16, triton.next_power_of_2(head_dim))
    grid = (triton.cdiv(query_length, 64), heads)
    # END SOLUTION
    ragged_kernel[grid](
        query, key, value, output, *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )
    return output

# %%
best_ragged = check("4.5", flash_attention_ragged).best

# %% [markdown]
# ## One more number for each row · deeper
#
# In training, the backward pass computes the probabilities again instead of reading them from memory. For that it
# needs one number for each row, the log-sum-exp of chapter 03:
#
# $$L_i = \log \sum_j e^{s_{ij}}, \qquad P_{ij} = e^{s_{ij} - L_i}$$
#
# So training keeps 4 bytes for each query. Chapter 08 merges the results of several programs by the same number.
#
# **Exercise 4.6.** The cell holds the kernel of 4.5. Only the log-sum-exp is missing. Your scores contain the factor
# $\log_2 e$, and so does the running maximum. One new word: `tl.log2(total)` is the logarithm to the base 2, so 8
# becomes 3.

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
    # The log-sum-exp of each row, [BLOCK_M]: compute it and store it.
    # BEGIN SOLUTION
    # running_max is in base 2; for a row that saw no key it is -inf, and so is the result.
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
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty((heads, query_length), dtype=torch.float32, device=query.device)
    block_d = max(16, triton.next_power_of_2(head_dim))
    grid = (triton.cdiv(query_length, 64), heads)
    lse_kernel[grid](
        query, key, value, output, lse,
        *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *output.stride()[:2],
        query_length, key_length, head_dim, math.log2(math.e) / math.sqrt(head_dim),
        BLOCK_D=block_d, BLOCK_M=64, BLOCK_N=64, CAUSAL=causal,
    )
    return output, lse

# %%
best_with_lse = check("4.6", flash_attention_lse).best

# %% [markdown]
# Test it: with the log-sum-exp, the probabilities of a query must add up to 1.

# %%
query, key, value = (torch.randn(1, 100, 32, device=device) for _ in range(3))
_, log_sum_exp = best_with_lse(query, key, value, True)
scores = query[0, 70] @ key[0, :71].T / math.sqrt(32)  # query 70 sees 71 keys
total = torch.exp(scores - log_sum_exp[0, 70]).sum()
print(f"query 70: log-sum-exp {log_sum_exp[0, 70]:.4f}, probabilities add up to {total:.5f}")

# %% [markdown]
# ## What the compiler made of it · deeper
#
# In 4.2 you estimated shared memory and registers. The compiled kernel tells you exactly, and `compile_views`
# compiles it for any architecture, without a GPU. **Predict** the H100's shared memory; the first line below is your
# function's answer.

# %%
from course_lib.hardware.compiler.views import CompileError, compile_many, compile_views

POINTERS = {f"{name}_pointer": "*fp16" for name in ("query", "key", "value", "output")}
SIGNATURE = {**POINTERS, "length": "i32", "scale": "fp32"}


def constants(head_dim, query_rows, key_rows, divide_every_step=False, natural_exp=False):
    return {"HEAD_DIM": head_dim, "BLOCK_M": query_rows, "BLOCK_N": key_rows, "DIVIDE_EVERY_STEP": divide_every_step,
            "NATURAL_EXP": natural_exp}


print(f"your formula for 64 × 64 tiles, 2 stages: {best_shared_memory(64, 64, 64, 2, 2):,} bytes")
views = compile_views(queries_outside_kernel, SIGNATURE, constants(64, 64, 64), archs=(75, 80, 90), num_warps=4,
                      num_stages=2)
views

# %% [markdown]
# - **T4.** Triton emits no matrix instructions for it, and the products need more registers than there are. Over a
#   thousand bytes of each thread are *spilled*: written to memory and read back in every step. The kernel is right
#   but slow.
# - **A100.** `mma.sync` lets one warp multiply small matrices from its registers. `cp.async` copies the next tiles
#   into shared memory in the meantime. By then the pair in use is in registers, so shared memory holds one pair, as
#   with one stage in your formula.
# - **H100.** `wgmma` lets four warps multiply 64 rows or more together, directly from shared memory. Your formula
#   should be right to the byte, or nearly.
#
# `@triton.autotune(configs=[...], key=["length"])` times all configurations when the kernel first meets a length, and
# keeps the fastest. The six in the next cell all fit and none spills, so you have to time them on a GPU.

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
# ## Four choices, four experiments · deeper
#
# FlashAttention-2 (2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)) is about twice as fast as
# FlashAttention (2022), although neither writes the scores to memory. You can try each of its four choices by itself.
#
# ### 1 · Which loop is outside? You predict
#
# The first paper's kernel loads a tile of K and V once and walks over all queries. But then every tile of *output*,
# with its maximum and sum, is loaded and stored in every step, because each tile of keys adds something to it. Here
# is that kernel, with one program for each head:

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
# Your prediction: put two formulas in place of the dots. The inputs are float16, 2 bytes for each element.
# The output, the maximum and the sum of each row are float32, 4 bytes.
def keys_outside_bytes(heads, length, head_dim, key_rows):
    """Bytes that `keys_outside` loads and stores."""
    loaded = ...
    stored = ...
    return loaded, stored


query, key, value = (torch.randn(2, 256, 64, dtype=torch.float16) for _ in range(3))
predictions = keys_outside_bytes(2, 256, 64, 64)
print("                       loaded        stored   programs")
for function in (queries_outside, keys_outside):
    report = metered(function, query, key, value)
    counts = report.loaded_bytes, report.stored_bytes
    hidden = function is keys_outside and ... in predictions
    loaded, stored = ("?", "?") if hidden else (f"{count:,} B" for count in counts)
    print(f"{function.__name__:15} {loaded:>13} {stored:>13} {math.prod(report.launches[0].grid):>10}")
if hidden:
    print("Predict both, and run the cell again to see the count.")
else:
    loaded, stored = predictions
    print(f"{'you predicted':15} {loaded:>11,.0f} B {stored:>11,.0f} B", "  right" if predictions == counts else "")

# %% [markdown]
# <details><summary>The formula</summary>
#
# A head has $T = \lceil N / B_N \rceil$ tiles of keys. For each of them, all queries (2 bytes an element), all
# outputs (4 bytes) and two statistics of each row are loaded. The outputs and the statistics are also stored. K and V
# are loaded once:
#
# $$\text{loaded} = H \left( 4 N D + T N (6 D + 8) \right), \qquad \text{stored} = H \, T N (4 D + 8)$$
#
# </details>
#
# With keys outside, 2.25 times as many bytes move. With queries outside, only K and V are loaded repeatedly, and
# nothing is stored before its row is finished.
#
# ### 2 · Parallel over the sequence
#
# The last column above shows the second choice: 2 programs against 8. With keys outside, programs for different keys
# of a head would update the same rows of output. (You can divide the queries, but then each program loads all keys
# again.) So FlashAttention ran one program for each head, and 16 heads keep 16 of an A100's 108 SMs busy. With
# queries outside, 8192 tokens make 1024 independent programs of 128 queries. The next cell times both, or prints how
# many SMs have work.

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
# ### 3 · Fewer FLOPs outside the matrix products
#
# An A100 does 312 TFLOP/s on its tensor cores and 19.5 on its other units, so a FLOP outside the matrix products
# takes as long as 16 inside. FlashAttention divided its output by the sum in every step; FlashAttention-2 divides
# once, after the loop. (Both use $2^x$.) The next cell counts the instructions in the compiled loop.

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
print(f"{'per thread and step':23}" + "".join(f"{name:>13}" for name in OPERATIONS))
for name, view in zip(VARIANTS, compiled):
    body = loop_body(view.ptx)
    print(f"{name:23}" + "".join(f"{len(re.findall(word + FLOAT32, body)):>13}" for word in OPERATIONS.values()))
if on_gpu:
    trial = [torch.randn(32, 4096, 64, device=device, dtype=torch.float16) for _ in range(3)]
    for name, switches in VARIANTS.items():
        print(f"{name:23} {measure(partial(queries_outside, *trial, 64, 64, *switches), seconds=0.2)}")

# %% [markdown]
# Each of the 128 threads has 32 of the 64 × 64 scores and 32 numbers of the accumulator, in two rows. So a count of 34
# means one instruction for each of the 32 and one for each row. The multiplications rescale the accumulator, and all
# others work on scores. Dividing in every step costs a division for each score. The natural `exp` costs two
# multiplications for each score, one for the scale and one inside `tl.exp`.
#
# ### 4 · Split the queries, not the keys
#
# FlashAttention gave each of four warps a quarter of a tile's *keys*, so the warps had to add up each row through
# shared memory. FlashAttention-2 gives each warp a quarter of the *queries*, so whole rows stay in one warp. Triton
# does the same: `warpsPerCTA = [4, 1]` in the compiled code means four warps along the queries.

# %%
for view in views[1:]:
    split = re.search(r"nvidia_mma<.*?warpsPerCTA = \[(\d+), (\d+)\]", view.ttgir)
    if split:
        print(f"{view.architecture.example}: {split[1]} warps along the queries, {split[2]} along the keys")

# %% [markdown]
# ## Race · deeper
#
# Now beat PyTorch's FlashAttention-2 backend, written in CUDA: 16 heads, 4096 tokens, dimension 128, bfloat16. On
# Hopper you must be at least as fast, because it was written for Ampere's `mma.sync` and Triton gives you `wgmma`. On
# other GPUs 0.8 times its speed is enough. On a T4, or without a GPU, only the numbers are checked.
#
# A fast kernel spills nothing, uses `wgmma` where it exists, has no masks in its main loop, and takes one
# multiply-add and one `exp2` for each score.
#
# **Exercise 4.7.** Three parts are left out: the step for one tile, the two loops around it, and the tiles' sizes.
# You may change the rest too. One thing is new: a `@triton.jit` function can call another and get several tiles back.

# %%
# Exercise 4.7 · Beat FlashAttention-2
@triton.jit
def fast_step(
    query, key_pointer, value_pointer, key_stride, value_stride, first_key, key_length, positions,
    running_max, running_sum, accumulator, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):
    """The new running_max, running_sum and accumulator after one tile of keys. Only tiles at the edges are MASKED."""
    keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    key_pointers = key_pointer + keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
    value_pointers = value_pointer + keys[:, None] * value_stride + columns[None, :]
    # Load the two tiles, compute the scores, update the three running values. Masks only `if MASKED:`.
    # BEGIN SOLUTION
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
    # Two loops of fast_step: over the tiles that need no mask, and then over the rest.
    # BEGIN SOLUTION
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
    # END SOLUTION
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)
    tl.store(output_pointer + rows[:, None] * output_stride + columns[None, :], output, mask=inside)


def fast_attention(query, key, value, causal):
    """Attention, faster than PyTorch's FlashAttention-2.

    Args:
        query: [batch, heads, query_length, head_dim], float16 or bfloat16, head_dim 64 or 128; the last stride is 1.
            bfloat16 is for GPUs: without one Triton computes wrong numbers in it, and does not say so.
        key, value: [batch, heads, key_length, head_dim].
        causal: True or False; aligned to the end.

    Returns:
        [batch, heads, query_length, head_dim], in query's dtype; zeros for a query that sees no key. One launch
        computes it.
    """
    batch, heads, query_length, head_dim = query.shape
    key_length = key.shape[2]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # `tiles`: a dict of BLOCK_M, BLOCK_N, num_warps and num_stages for this GPU and this head_dim.
    # BEGIN SOLUTION
    capability = torch.cuda.get_device_capability(query.device)
    if capability < (8, 0):  # no matrix instructions: both products take their operands from registers
        tiles = {"BLOCK_M": 32, "BLOCK_N": 32, "num_warps": head_dim // 16, "num_stages": 1}
    elif head_dim == 64:
        tiles = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    elif capability == (9, 0):
        tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2}
    else:
        tiles = {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    # END SOLUTION
    fast_kernel[(triton.cdiv(query_length, tiles["BLOCK_M"]), batch * heads)](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        heads, query_length, key_length, math.log2(math.e) / math.sqrt(head_dim),
        HEAD_DIM=head_dim, CAUSAL=causal, **tiles,
    )
    return output

# %%
best_fast = check("4.7", fast_attention).best

# %% [markdown]
# ## Predicted against measured
#
# The next cell measures naive attention, PyTorch's tiled one and, on a GPU, your kernel of 4.7 (or the course's).
# **Predict** how each rate changes when the length grows.

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
# The next plot shows the longest length on your roofline. Naive attention does $4 N^2 D$ FLOPs and moves $4 N^2$
# elements of $b$ bytes. Its intensity is $D / b$ at every length, 64 FLOP/byte for $D = 128$ in float16. The
# intensity of tiled attention grows with the length. On a GPU, memory limits naive attention, and arithmetic limits
# tiled attention. On a CPU both lie right of the balance point, so the gap is smaller.

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
# To compare with more kernels on a GPU, run `python -m course_lib bench attention` in a terminal, and then the next
# cell.

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
# Now a language model writes text with your kernel of 4.5. The model is the course's own, and very small: four layers
# and 394,080 weights. Each layer has 4 query heads of dimension 32. Pairs of them share their keys and values, so
# there are 2 *KV heads*. Its tokens are single bytes. Chapter 05 takes it apart. It was trained on three chapters of
# *Alice's Adventures in Wonderland*, for half a minute of one CPU core, and its weights come with the course.

# %%
from course_lib.models.trained import trained_model

decoder = trained_model("tiny", device=device).requires_grad_(False)
print(f"{decoder.config.parameters:,} weights, and {decoder.config.key_heads} KV heads, each for a pair of query heads")

# %% [markdown]
# The model takes any function as its attention. Yours gets the heads of one sequence at a time, from
# `whole_attention`. If your answer to 4.5 has not passed, the course's takes its place, and the first line below says
# so.
#
# The model always takes the likeliest byte. The two versions compute the same formula but round differently.
# **Predict:** will the two texts be the same?

# %%
import textwrap

from course_lib.kernels.attention.reference import attention_reference  # scores, softmax, product: each a matrix
from course_lib.models.plugged import who_runs, whole_attention
from course_lib.serving.generation import complete

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
# For a text this short, tiles gain nothing. For a long prompt they save memory. Count the largest tensor that one run
# over $N$ tokens makes, at 4 bytes a number. Naive attention makes matrices with a number for each of 4 heads and
# each pair of tokens: $4 \cdot 4 N^2$ bytes. Yours makes none. Its output has 4 · 32 numbers a token, and then the
# largest tensor is not in attention at all: the feed-forward block makes 192 numbers a token, $4 \cdot 192 N$ bytes.
# At 512 tokens that is 4.2 MB against 0.39 MB. What is it at 16,384?
#
# The next cell looks at all tensors of a real run. On a GPU it also takes the time, and says how much memory the
# whole run needed besides the weights.

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
        return most, measure(run, warmup=1, seconds=0.2, device=device).median


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
# At 131,072 tokens one matrix of the naive version takes 275 GB, which is nearly twice an H200's memory. The model
# with your kernel needs 0.1 GB for its largest tensor. This model would write nonsense there, because it has learned
# from pieces of 256 bytes. But models trained on long texts can use such prompts, thanks to kernels like yours.

# %% [markdown]
# ## Check yourself
#
# Answer these on paper, with the numbers of your own machine: `roof.matmul_rate` and `roof.memory_bandwidth`. Then run
# the next cell and open the answers.
#
# 1. What is the least time that attention takes here for the question's layer: 32 heads, 8192 tokens, dimension 128?
#    Does arithmetic or memory set this time?
# 2. From which length on does arithmetic set it?
# 3. A step of a program multiplies 64 queries with 64 keys, and the weights with 64 values, all of dimension 128. How
#    many bytes does your memory deliver in the time of these products? Is that enough for the step's 32 KiB of keys and
#    values?
# 4. How many of its 64 × 64 tiles does a causal kernel visit at 8192 tokens?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
flops, distinct_bytes = 4 * 32 * 8192**2 * 128, 4 * 32 * 8192 * 128 * 2
arithmetic, memory = flops / roof.matmul_rate[rate_name], distinct_bytes / roof.memory_bandwidth
balance = roof.matmul_rate[rate_name] / roof.memory_bandwidth  # FLOPs in the time of one byte
delivered, tiles = 4 * 64 * 64 * 128 / balance, 8192 // 64
self_check(
    f"{format_seconds(max(arithmetic, memory))}. The products take {format_seconds(arithmetic)} at "
    f"{format_flop_rate(roof.matmul_rate[rate_name])}, the distinct bytes {format_seconds(memory)}.",
    f"4 N² D FLOPs for 4 N D elements of 2 bytes are N / 2 FLOPs a byte. Here {balance:.0f} FLOPs take as long as a "
    f"byte, so from N = {2 * balance:.0f} on.",
    f"In the time of 4 · 64 · 64 · 128 FLOPs it delivers {format_bytes(delivered)}. "
    + ("That is enough." if delivered > 32 * 1024 else "All programs of a head read the same tiles, so the L2 cache "
       "delivers the rest."),
    f"{tiles} · {tiles + 1} / 2 = {tiles * (tiles + 1) // 2:,} of {tiles**2:,}.",
)

# %% [markdown]
# ## What production systems do
#
# - **FlashAttention-2** is portable CUDA, and PyTorch's `SDPBackend.FLASH_ATTENTION`. It reaches up to 230 TFLOP/s on
#   an A100, 73 % of the peak.
# - **FlashAttention-3** and **cuDNN** use what Hopper adds: a warp that only loads, products during the softmax of
#   another tile, and FP8, numbers of 8 bits (chapter 12).
# - **FlashAttention-4** ([arXiv 2603.05451](https://arxiv.org/abs/2603.05451)) is for Blackwell, where `exp` is the
#   bottleneck. It computes some exponentials as polynomials.
# - **FlexAttention** in PyTorch generates a kernel like yours with a mask that you write in Python.
# - **The course's version** of your kernel is `course_lib/kernels/attention/flash.py`.
#
# ## Papers
#
# - Dao, Fu, Ermon, Rudra, Ré: *FlashAttention*, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135). Algorithm 1 is
#   the loop of experiment 1.
# - Dao: *FlashAttention-2*, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691). Section 3 makes the four choices.
# - Tillet, Kung, Cox: *Triton*, MAPL 2019.
# - Rabe, Staats: *Self-attention Does Not Need O(n²) Memory*, [arXiv 2112.05682](https://arxiv.org/abs/2112.05682).
#
# In chapter 05 the queries arrive one at a time and the keys come from a cache.

# %%
progress()
