# %% [markdown]
# # 03 · Online softmax
#
# **The question.** One attention layer of 32 heads over 8192 tokens makes $32 \cdot 8192^2$ = 2.1 billion scores, 4.3
# GB in float16. The safe softmax of chapter 02, done tile by tile, reads each score three times and writes it once.
# That is 17.2 GB. An H200 copies at 4.25 TB/s, as measured, so it needs 4.0 ms. The layer's two matrix products take
# 1.5 ms at 740 TFLOP/s. So the softmax takes longer than the products, although it does four operations for each score
# and the products do about five hundred. How many times does a softmax have to *access* a score, that is, read it from
# memory or write it there?
#
# The textbook's method needs four accesses. A short paper of 2018 needs three. Two are enough when a row fits on the
# chip. And if you only want a weighted average, as in attention, you need **none at all**. One small trick is behind
# the last three answers, and behind every attention kernel in use today.
#
# **Time.** About 3 hours, with six exercises. The **core path** takes two hours at most: exercises 3.1, 3.2, 3.4 and
# 3.5. You can skip the sections whose heading ends in *· deeper* until you begin chapter 08, which needs them. But run
# their cells.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math
from functools import partial, reduce

import torch
import triton
import triton.language as tl

from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = machine().tier != "none"

# %% [markdown]
# ## Why a softmax seems to need the whole row
#
# A softmax turns a row of scores $x_i$ into weights $y_i$ that add up to 1. Each weight is the exponential of its
# score, divided by the sum of all exponentials:
#
# $$y_i = \frac{e^{x_i}}{\sum_j e^{x_j}}$$
#
# For the row 1, 2 that gives 0.27 and 0.73. You cannot compute any output before you know the sum, and the sum needs
# every input. So a row is read once for the sum and once more for the outputs. With the write, that makes **three
# accesses** for each element. You need fewer only if the row stays on the chip between the two reads. The shared memory
# of an H100 multiprocessor, 228 KB, has room for 58,000 float32 numbers.
#
# The formula also has a fault: an exponential can overflow. The next cell prints where, and then computes the softmax
# of 88, 89, 90 as the formula says. **Predict:** what is the largest $x$ whose exponential float32 can hold? And
# float16?

# %%
predict("03 largest exponent", ..., "in float32")

# %%
for dtype in (torch.float16, torch.float32, torch.float64):
    limits = torch.finfo(dtype)
    smallest = limits.smallest_normal * limits.eps  # the smallest number above zero
    print(f"{str(dtype):<15} largest {limits.max:.3g} = exp({math.log(limits.max):.1f}), "
          f"smallest {smallest:.3g} = exp({math.log(smallest):.1f})")

scores = torch.tensor([[88.0, 89.0, 90.0]])
weights = scores.exp()
print("exp:          ", weights.tolist()[0])
print("naive softmax:", (weights / weights.sum()).tolist()[0])
print("it should be: ", scores.softmax(dim=1).tolist()[0])
measured("03 largest exponent", math.log(torch.finfo(torch.float32).max), "in float32")

# %% [markdown]
# The last two exponentials overflowed to infinity, and inf / inf is NaN. The first weight should be 9 %, and came out
# as 0.
#
# Can a model's scores become that large? A score is the product of a query and a key, divided by $\sqrt{D}$. Take two
# vectors of dimension 128 that point the same way. If their entries are around 1, their score is $128 / \sqrt{128} =
# 11.3$. That is already too large for float16, whose exponentials end at 11.09. If their entries are around 3, the
# score is 102, and float32 overflows too.
#
# Very negative scores are just as bad. In a row of scores near -200 all exponentials are 0, and 0 / 0 is NaN too.
#
# ## One identity
#
# $$e^{a+b} = e^a e^b$$
#
# The whole chapter is this one line, used three times. The first use removes the overflow. If you subtract the same
# constant $c$ from all scores of a row, each exponential is multiplied by $e^{-c}$, and so is their sum. The factor
# cancels, and the softmax stays the same. Now choose the row's **maximum** for $c$. The largest exponential becomes
# $e^0 = 1$, so nothing overflows, and the sum is at least 1, so nothing is divided by zero. Exponentials of scores far
# below the maximum still become 0, but their weights are almost 0 anyway.
#
# This is the *safe* softmax. It costs one more read, because you need the maximum before the first exponential, and the
# maximum needs every input.
#
# The next cell defines `reader`, which counts how often you read a matrix. It returns a function `read`, and each call
# of `read()` begins a **pass**, one walk over all columns. A pass hands out *tiles* of a few columns each. They all
# come in one small buffer, which stands for the memory on the chip, so each tile overwrites the one before. The cell
# then runs the naive softmax on such a matrix. Expect two passes, and NaN for scores near 1000.

# %%
def reader(x, tile):
    """A matrix that can only be read tile by tile.

    Args:
        x: [rows, columns].
        tile: columns of a tile; the last one may be narrower.

    Returns:
        A function: each call starts one pass and yields the tiles, [rows, at most tile]. There is one buffer, which
        every tile overwrites. The function's attribute `passes` counts the passes.
    """
    buffer = torch.empty(x.shape[0], min(tile, x.shape[1]), dtype=x.dtype, device=x.device)

    def read():
        read.passes += 1
        for start in range(0, x.shape[1], tile):
            width = min(tile, x.shape[1] - start)
            buffer[:, :width] = x[:, start : start + width]
            yield buffer[:, :width]

    read.passes = 0
    return read


def naive_softmax(read):
    """Softmax over the rows in two passes, as the formula says. Overflows for scores beyond 88."""
    total = sum(tile.exp().sum(dim=1) for tile in read())  # pass 1
    return torch.cat([tile.exp() / total[:, None] for tile in read()], dim=1)  # pass 2


x = torch.randn(4, 1000)
read = reader(x, tile=128)
error = (naive_softmax(read) - x.softmax(dim=1)).abs().max().item()
print(f"{read.passes} passes, so {read.passes} reads and 1 write of each element; largest error {error:.1e}")
print("scores near 1000:", naive_softmax(reader(x + 1000, tile=128))[0, :4])

# %% [markdown]
# **Exercise 3.1.** Write the safe softmax in three passes: one for the maxima, one for the sums, one for the outputs. A
# fourth pass is refused.

# %%
# Exercise 3.1 · Safe softmax, its statistics in two passes
def safe_softmax(read):
    """Softmax over the rows of a matrix that is read tile by tile, safe for scores of any size.

    Without torch.softmax, logsumexp or logaddexp. exp(x - log-sum-exp) will do, which rounds more for large scores.

    Args:
        read: each `for tile in read():` is one pass; tiles are [rows, width] float32, the widths add up to `columns`.
            At most three passes. A tile is overwritten by the next one, and copies of the tiles may not be kept: after
            the first pass you have a few numbers for each row.

    Returns:
        [rows, columns] float32.
    """
    # BEGIN SOLUTION
    maximum = None
    for tile in read():
        largest = tile.amax(dim=1)  # [rows]
        maximum = largest if maximum is None else torch.maximum(maximum, largest)
    total = sum(torch.exp(tile - maximum[:, None]).sum(dim=1) for tile in read())  # [rows]
    return torch.cat([torch.exp(tile - maximum[:, None]) / total[:, None] for tile in read()], dim=1)
    # END SOLUTION


# %%
best_safe_softmax = check("3.1", safe_softmax).best

# %% [markdown]
# Three reads and a write make **four accesses** for each element, and the naive softmax has three. So if memory sets
# the time, the safe version takes a third longer.
#
# ## Correcting the sum afterwards
#
# Can one pass find both the maximum and the sum? This is the second use of the identity. Suppose that you subtract the
# largest score *so far*, $m_\text{old}$, and add up the exponentials. Then a larger score arrives, $m_\text{new}$.
# Every term of your sum is now too large, but all of them by the same factor:
#
# $$e^{x - m_\text{new}} = e^{x - m_\text{old}} \cdot e^{m_\text{old} - m_\text{new}}$$
#
# So one multiplication corrects the whole sum. Take the row 1, 3, 2, 5 in tiles of two:
#
# | after tile | running maximum $m$ | running sum $\ell$ |
# |---|---|---|
# | 1, 3 | 3 | $e^{1-3} + e^{3-3} = 1.135$ |
# | 2, 5 | 5 | $1.135 \cdot e^{3-5} + e^{2-5} + e^{5-5} = 0.154 + 0.050 + 1 = 1.203$ |
#
# All four scores at once give the same sum: $e^{1-5}+e^{3-5}+e^{2-5}+e^{5-5}$ is 1.203 too.
#
# The next figure shows this for a row of 16 scores. The tile on the chip is orange, with its scores above and its
# weights below. The grey scores have left the chip; only the running numbers at the bottom are kept. Watch the blue
# bars, the weights of earlier tiles: whenever the maximum grows, they all shrink by the same factor. (So does the green
# accumulator, which is explained further down.)

# %%
from course_lib.figures.softmax.one_pass_stepper import online_softmax_stepper

online_softmax_stepper(
    scores=[0.5, 1.2, -0.3, 0.8, 1.7, 0.1, 2.6, 1.1, 0.2, -0.6, 1.4, 0.9, 1.0, 3.4, 0.4, 2.2],
    values=[[1, 0], [1, 1], [2, 1], [0, 2], [3, 1], [1, 2], [2, 3], [0, 1],
            [3, 3], [1, 3], [0, 0], [2, 2], [1, 1], [3, 2], [2, 0], [0, 3]],
    tile=4,
)

# %% [markdown]
# Two cases need care. The first is the start. Before the first tile the state is $m = -\infty$ and $\ell = 0$. The
# first tile then multiplies $\ell$ by $e^{-\infty} = 0$, which does no harm because $\ell$ is 0. Many kernels start
# with a large negative number instead. It must lie below every score: in this course some are as low as $-10^{20}$, so
# $-10^9$ fails, and $-10^{30}$ is low enough.
#
# The second case is a score that *is* $-\infty$, because that is how masks hide keys. If all scores so far are
# $-\infty$, so is the new maximum. Then $-\infty - (-\infty)$ is NaN, and a NaN in the sum stays there. So when the
# maximum is $-\infty$, subtract 0 instead.
#
# **Exercise 3.2.** Compute the maximum and the sum of every row in one pass. A second call of `read()` is refused.

# %%
# Exercise 3.2 · One pass, running maximum and sum
def row_statistics(read):
    """Maximum m and sum of exp(x - m) of every row, in a single pass.

    Without torch.softmax, logsumexp or logaddexp.

    Args:
        read: `for tile in read():` is the one pass; tiles are [rows, width], float32 or float16, and may hold -inf.
            A tile is overwritten by the next one, and copies may not be kept: you carry a few numbers for each row.

    Returns:
        (maximum, total): [rows] float32 each. A row of nothing but -inf has maximum -inf and total 0.
    """
    # BEGIN SOLUTION
    running_max = running_sum = None
    for tile in read():
        tile = tile.float()  # [rows, width]
        if running_max is None:
            running_max = torch.full_like(tile[:, 0], -math.inf)  # [rows]
            running_sum = torch.zeros_like(running_max)  # [rows]
        new_max = torch.maximum(running_max, tile.amax(dim=1))
        # Where only -inf was seen, -inf - -inf would be NaN: measure such rows from 0.
        reference = torch.where(new_max == -math.inf, 0.0, new_max)
        rescale = torch.exp(running_max - reference)  # [rows], 1 where the maximum did not grow
        running_sum = running_sum * rescale + torch.exp(tile - reference[:, None]).sum(dim=1)
        running_max = new_max
    return running_max, running_sum
    # END SOLUTION


# %%
best_row_statistics = check("3.2", row_statistics).best

# %% [markdown]
# Milakov and Gimelshein published this in 2018 as the *online* softmax. It takes one pass for the statistics (maximum
# and sum) and one for the outputs:
#
# | | reads | writes | accesses per element | survives large scores |
# |---|---|---|---|---|
# | naive | 2 | 1 | 3 | no |
# | safe | 3 | 1 | 4 | yes |
# | online | 2 | 1 | 3 | yes |
#
# Compared with the safe version, the arithmetic grows by one multiplication and one exponential for each tile, and the
# traffic shrinks from four accesses to three. If memory sets the time, the online softmax should be 4/3 = 1.33 times as
# fast as the safe one; on a V100 the authors measured up to 1.3 times.
#
# ## Merging · deeper
#
# The tiles may come in any order. You can even cut a row into two halves, finish each half by itself, and then *merge*
# the two results. The rule is the same: make each sum relative to the larger of the two maxima, then add.
#
# $$m = \max(m_1, m_2), \qquad \ell = \ell_1 e^{m_1 - m} + \ell_2 e^{m_2 - m}$$
#
# For the halves 1, 3 and 2, 5 of the row above, $\ell_1 = 1.135$ and $\ell_2 = 1.050$. They merge to $1.135 \cdot
# e^{3-5} + 1.050 = 1.203$.
#
# In attention the output is an average of the values, weighted by the softmax: $o = \sum_j y_j v_j$. You can merge such
# averages too. Let $o_1$ and $o_2$ be those of the two halves. The average over all keys weighs each of them by its
# share of the sum:
#
# $$o = \frac{\ell_1 e^{m_1 - m} \, o_1 + \ell_2 e^{m_2 - m} \, o_2}{\ell}$$
#
# In the example the first half's share is $0.154 / 1.203$ = 13 %, and the second half has the other 87 %.
#
# We call $(m, \ell, o)$ a *state*: it is all that you have to keep of the keys seen so far. You may merge states in any
# order and any grouping, and the empty state $(-\infty, 0, 0)$ changes nothing. Your loop of 3.2 merges from left to
# right. The drawing shows a tree, whose parts can be computed at the same time:

# %%
from course_lib.figures.softmax.merge_tree import draw_merge_tree

draw_merge_tree(scores=[0.5, 1.2, -0.3, 0.8, 1.7, 0.1, 2.6, 1.1, 0.2, -0.6, 1.4, 0.9, 1.0, 3.4, 0.4, 2.2], parts=4)

# %% [markdown]
# **Exercise 3.3.** Write the merge. Some parts hold no key.

# %%
# Exercise 3.3 · Merge two partial results
def merge(first, second):
    """One state from two, as if their keys had been seen together.

    Without torch.softmax, logsumexp or logaddexp.

    Args:
        first, second: states (maximum, total, average): [rows], [rows] and [rows, dim], float32. `total` is the sum of
            exp(score - maximum) over the part's keys and `average` the average of their values, weighted by softmax.
            A row without keys has maximum -inf, total 0 and average 0.

    Returns:
        (maximum, total, average) of both parts together, new tensors; rows without keys in either are as empty as
        above. The two states stay as they are.
    """
    first_max, first_sum, first_average = first
    second_max, second_sum, second_average = second
    # BEGIN SOLUTION
    maximum = torch.maximum(first_max, second_max)  # [rows]
    reference = torch.where(maximum == -math.inf, 0.0, maximum)  # never -inf - -inf
    first_weight = first_sum * torch.exp(first_max - reference)  # [rows]
    second_weight = second_sum * torch.exp(second_max - reference)  # [rows]
    total = first_weight + second_weight
    divisor = torch.where(total == 0, 1.0, total)  # never 0 / 0
    average = (first_weight[:, None] * first_average + second_weight[:, None] * second_average) / divisor[:, None]
    return maximum, total, average
    # END SOLUTION


# %%
best_merge = check("3.3", merge).best

# %% [markdown]
# The next cell merges the same seven parts of a row of 1000 keys in four different orders. **Predict:** will the
# results be equal? Will they be equal to the last bit?

# %%
def partial_state(scores, values):
    """(maximum, total, average) of one part: scores [rows, keys], values [keys, dim]."""
    maximum = scores.amax(dim=1)
    weights = torch.exp(scores - maximum[:, None])
    total = weights.sum(dim=1)
    return maximum, total, (weights @ values) / total[:, None]


def in_pairs(states):
    while len(states) > 1:
        merged = [best_merge(a, b) for a, b in zip(states[::2], states[1::2])]
        states = merged + ([states[-1]] if len(states) % 2 else [])
    return states[0]


torch.manual_seed(3)
scores, values = 4 * torch.randn(2, 1000), torch.randn(1000, 4)
lengths = [1, 400, 99, 250, 50, 7, 193]
parts = [partial_state(s, v) for s, v in zip(scores.split(lengths, dim=1), values.split(lengths))]
exact = scores.double().softmax(dim=1) @ values.double()
orders = {
    "left to right": reduce(best_merge, parts),
    "right to left": reduce(best_merge, parts[::-1]),
    "in pairs": in_pairs(parts),
    "shuffled, in pairs": in_pairs([parts[i] for i in torch.randperm(len(parts))]),
}
for name, (_, total, average) in orders.items():
    print(f"{name:<20} total {total[0].item():.6f}   average {average[0, 0].item():+.8f}   "
          f"error {(average - exact).abs().max().item():.1e}")

# %% [markdown]
# They are equal except for the last bit or two, because floating point rounds each addition.
#
# Chapter 08 is built on this. With a single query there is only one row of scores, and you cannot share out one row
# among 132 multiprocessors. So Flash-Decoding cuts the *keys* into parts, gives each part to a program and merges the
# results.
#
# ## Attention without its scores
#
# The third use of the identity keeps the scores themselves out of memory. While you walk along a row of scores, keep
# one more thing: an **accumulator**, the sum of $e^{s_j - m} v_j$ over the scores $s_j$ seen so far. It is a vector as
# long as a value row, for example 128 numbers. Its terms are relative to $m$, like those of $\ell$. So when the maximum
# grows, you multiply the accumulator by the same number:
#
# $$\text{accumulator} \leftarrow \text{accumulator} \cdot e^{m_\text{old} - m_\text{new}} +
# \sum_{j \in \text{tile}} e^{s_j - m_\text{new}} \, v_j$$
#
# After the last tile, the output is accumulator $/ \ell$. The scores of a tile are computed from $q$ and a tile of
# keys, turned into weights, used and forgotten. They never reach memory: **zero accesses**. What you keep for a row
# does not grow with its length:
#
# | | kept for one query over $N$ keys, head dimension 128 | at $N$ = 8192 | at $N$ = 131,072 |
# |---|---|---|---|
# | scores in memory, float16 | $2N$ bytes | 16.4 kB | 262 kB |
# | $m$, $\ell$, accumulator, float32 | $4 (128 + 2)$ bytes | 520 bytes | 520 bytes |
#
# Rescaling costs $D$ multiplications for each tile. The products take about $4D$ FLOPs for every *key* in the tile.
# With 64 keys in a tile that is $256 D$, so the rescaling adds 0.4 %.
#
# **Exercise 3.4.** Compute the attention of one query in one pass. This is FlashAttention's inner loop, in PyTorch.

# %%
# Exercise 3.4 · Attention of one query, in one pass
def streaming_attention(query, read, scale):
    """softmax(scale * keys @ query) @ values, with the keys and values seen once.

    Without torch.softmax, logsumexp or logaddexp.

    Args:
        query: [dim], float32 or float16.
        read: `for key_tile, value_tile in read():` is the one pass; [width, dim] and [width, value_dim], of the query's
            dtype. Both are overwritten by the next ones, and copies may not be kept.
        scale: any number, negative or 0 too, by which the products are multiplied.

    Returns:
        [value_dim] float32, computed in float32.
    """
    # BEGIN SOLUTION
    query = query.float() * scale
    running_max = torch.tensor(-math.inf, device=query.device)
    running_sum = torch.tensor(0.0, device=query.device)
    accumulator = 0.0
    for key_tile, value_tile in read():
        scores = key_tile.float() @ query  # [width]
        new_max = torch.maximum(running_max, scores.max())
        rescale = torch.exp(running_max - new_max)  # 1 when the maximum did not grow
        weights = torch.exp(scores - new_max)  # [width]
        running_sum = running_sum * rescale + weights.sum()
        accumulator = accumulator * rescale + weights @ value_tile.float()  # [value_dim]
        running_max = new_max
    return accumulator / running_sum
    # END SOLUTION


# %%
best_streaming_attention = check("3.4", streaming_attention).best

# %% [markdown]
# Your function never holds anything of length $N$. The next cell runs it on scores so large that their exponentials
# would overflow without the maximum:

# %%
def pair_reader(keys, values, tile):
    """Like `reader`, for keys and values together."""

    def read():
        yield from zip(keys.split(tile), values.split(tile))

    return read


query, keys, values = 5 * torch.randn(64), torch.randn(3000, 64), torch.randn(3000, 8)
scores = keys @ query
streamed = best_streaming_attention(query, pair_reader(keys, values, tile=128), 1.0)
exact = scores.double().softmax(dim=0) @ values.double()
print(f"scores from {scores.min().item():.0f} to {scores.max().item():.0f}; "
      f"largest error {(streamed - exact).abs().max().item():.1e}")

# %% [markdown]
# ## In Triton
#
# In a kernel, a tile is what one `tl.load` loads, and a pass is a loop over the row. Here is the naive softmax for rows
# of any length, one program for each row. Comments mark its three accesses. The cell after it runs the kernel on
# ordinary scores, and on scores near 1000, where you should see NaN again.

# %%
@triton.jit
def naive_softmax_kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_row, y_row = x_pointer + row * x_row_stride, y_pointer + row * y_row_stride
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = offsets < columns
        # Positions past the end are loaded as -inf, whose exponential is 0: they add nothing.
        tile = tl.load(x_row + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK] access 1
        total += tl.sum(tl.exp(tile), axis=0)
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = offsets < columns
        tile = tl.load(x_row + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK] access 2
        tl.store(y_row + offsets, tl.exp(tile) / total, mask=inside)  # access 3


def naive_softmax_rows(x, block):
    """Softmax over the rows of x [rows, columns], in tiles of `block`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    naive_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y


# %%
x = torch.randn(4, 1000, device=device)
print("largest error", (naive_softmax_rows(x, 256) - x.softmax(dim=1)).abs().max().item())
print("scores near 1000:", naive_softmax_rows(x + 1000, 256)[0, :4].tolist())

# %% [markdown]
# (The interpreter computes with NumPy, which warns of the overflow. A GPU does not warn you.)
#
# Look at the `other=float("-inf")`. A masked load has to put *something* into the positions past the end of the row.
# Most people type `other=0.0` out of habit. Here that is wrong: a score of 0 has the weight $e^0 = 1$, so every
# position past the end would count. With $-\infty$ none of them counts, because it never becomes the maximum and its
# exponential is 0.
#
# Your kernel needs `tl.exp`, `tl.where` and `tl.max` from exercise 2.5, and three new words:
#
# | word | what it does |
# |---|---|
# | `total = 0.0` before a `for` | a number that the loop updates; it cannot change its type, so a GPU refuses `0` |
# | `tl.maximum(a, b)` | the larger of the two, element by element; also for two single numbers |
# | `@triton.jit` on a helper | called like a function from a kernel; may return several values; costs nothing |
#
# The next cell tries them. It adds up the numbers 0 to 7 and their squares, in two tiles of four:

# %%
@triton.jit
def with_tile(total, squares, tile):  # a helper: the compiler copies it into the kernel
    return total + tl.sum(tile, axis=0), squares + tl.sum(tile * tile, axis=0)


@triton.jit
def words_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    total = 0.0
    squares = 0.0
    for start in range(0, length, BLOCK):
        tile = tl.load(x_pointer + start + tl.arange(0, BLOCK))  # [BLOCK]
        total, squares = with_tile(total, squares, tile)
    tl.store(result_pointer, total)
    tl.store(result_pointer + 1, squares)
    tl.store(result_pointer + 2, tl.maximum(total, squares))


tried = torch.empty(3, device=device)
words_kernel[(1,)](torch.arange(8.0, device=device), tried, 8, BLOCK=4)
print("total {:.0f}, squares {:.0f}, tl.maximum(total, squares) {:.0f}".format(*tried.tolist()))

# %% [markdown]
# **Exercise 3.5.** Write the kernel of an online softmax for rows longer than a tile. The launcher is given. The check
# meters what the kernel moves: three accesses pass, four do not. Inputs may be float16, where the largest number is
# 65,504, so keep the statistics in float32.

# %%
# Exercise 3.5 · Online softmax kernel for rows longer than a tile
@triton.jit
def online_softmax_kernel(x_pointer, y_pointer, columns, x_row_stride, y_row_stride, BLOCK: tl.constexpr):
    """Softmax of row `tl.program_id(0)`: one loop over its tiles for maximum and sum, one for the outputs.

    x_pointer, y_pointer: rows of `columns` elements that lie next to each other; row r begins at r * its row stride.
    BLOCK: elements of a tile. Rows may be longer or shorter than that, and may hold -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    # BEGIN SOLUTION
    x_row, y_row = x_pointer + row * x_row_stride, y_pointer + row * y_row_stride
    running_max = float("-inf")
    running_sum = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        tile = tl.load(x_row + offsets, mask=offsets < columns, other=float("-inf")).to(tl.float32)  # [BLOCK]
        new_max = tl.maximum(running_max, tl.max(tile, axis=0))
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # never -inf - -inf
        running_sum = running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)
        running_max = new_max
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        inside = offsets < columns
        tile = tl.load(x_row + offsets, mask=inside, other=float("-inf")).to(tl.float32)  # [BLOCK]
        tl.store(y_row + offsets, tl.exp(tile - running_max) / running_sum, mask=inside)
    # END SOLUTION


def online_softmax(x, block):
    """Softmax over the rows of a matrix.

    Args:
        x: [rows, columns], float32, float16 or bfloat16; elements of a row are contiguous, rows any stride apart,
            within 2³¹ elements of the first. Every row has at least one finite element.
        block: elements of a tile, a power of two.

    Returns:
        [rows, columns], contiguous, of x's dtype. The kernel, not PyTorch, computes it; it reads each element of x at
        most twice, and writes each element of the result once.
    """
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    online_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], x.stride(0), y.stride(0), BLOCK=block)
    return y


# %%
best_online_softmax = check("3.5", online_softmax).best

# %% [markdown]
# ## Counted
#
# `metered` runs a function in the interpreter, with or without a GPU, and counts what its kernels load and store. The
# next cell meters four kernels on rows of 5000 elements. The naive kernel and yours take a row in five tiles of 1024.
# The last kernel holds a whole row on the chip. **Predict** the four numbers of the last column.

# %%
from course_lib.hardware.meter.metered import metered
from course_lib.kernels.softmax.rows import softmax

x = torch.randn(3, 5000)
print(f"{'kernel':<34}{'loaded':>12}{'stored':>12}{'accesses per element':>24}")
for name, report in {
    "naive, overflows": metered(naive_softmax_rows, x, 1024),
    "safe, the library's": metered(softmax, x, method="three_pass"),
    "online, yours (or the course's)": metered(best_online_softmax, x, 1024),
    "a whole row at a time": metered(softmax, x, method="one_pass"),
}.items():
    accesses = (report.loaded_bytes + report.stored_bytes) / x.nbytes
    print(f"{name:<34}{format_bytes(report.loaded_bytes):>12}{format_bytes(report.stored_bytes):>12}{accesses:>24.2f}")

# %% [markdown]
# The meter counts what kernels *ask for*. Not all of that has to come from HBM, because a cache may still hold a row
# that was read a moment ago. If a thousand programs share the 50 MB of an H100's L2 cache, rows of up to some 10,000
# float32 numbers fit. Only longer rows have to come from HBM at every read. So on a GPU the next cell takes rows of a
# million elements. The prediction is the bytes of all accesses, divided by the bandwidth of a copy.
#
# On a CPU the cell compares two softmaxes of PyTorch. The first does one operation after the other and accesses every
# element eight times: the maximum and the sum read it, and the subtraction, the exponential and the division each read
# and write it. `torch.softmax` accesses it twice, because a row of 65,536 stays in a core's cache. The prediction
# counts bytes alone, but a CPU also has to compute each exponential, as a polynomial. The last line does only that, and
# shows how much it costs.

# %%
def eager_softmax(x, out):
    torch.sub(x, x.amax(dim=1, keepdim=True), out=out)
    out.exp_()
    out.div_(out.sum(dim=1, keepdim=True))


bandwidth = ceilings().copy_bandwidth
if on_gpu and not interpreting():
    x = torch.randn(264, 2**20, device=device)
    contenders = {
        "naive, overflows": (3, lambda: naive_softmax_rows(x, 4096)),
        "safe, the library's": (4, lambda: softmax(x, method="three_pass")),
        "online, yours (or the course's)": (3, lambda: best_online_softmax(x, 4096)),
        "online, the library's": (3, lambda: softmax(x, method="online")),
        "torch.softmax": (3, lambda: torch.softmax(x, dim=1)),
    }
else:
    x = torch.randn(256, 2**16)
    out = torch.empty_like(x)
    contenders = {
        "one operation after another": (8, lambda: eager_softmax(x, out)),
        "torch.softmax": (2, lambda: torch.softmax(x, dim=1, out=out)),
        "one exponential of each element": (2, lambda: torch.exp(x, out=out)),
    }
print(f"{x.shape[0]} rows of {x.shape[1]:,} float32, {format_bytes(x.nbytes)}; copying: {format_bandwidth(bandwidth)}")
print(f"{'':<34}{'accesses':>10}{'predicted':>12}{'measured':>12}{'ratio':>8}")
for name, (accesses, run) in contenders.items():
    predicted, measured = accesses * x.nbytes / bandwidth, measure(run).median
    times = f"{format_seconds(predicted):>12}{format_seconds(measured):>12}"
    print(f"{name:<34}{accesses:>10}{times}{measured / predicted:>8.2f}")

# %% [markdown]
# ## One number for two: the log-sum-exp · deeper
#
# The maximum and the sum of a row are always used together, and one number can stand for both:
#
# $$L = \log \sum_j e^{x_j} = m + \log \ell$$
#
# This is the **log-sum-exp** of the row. For the row 1, 3, 2, 5 it is $5 + \log 1.203 = 5.185$. With it, a weight of
# the softmax is $e^{x_i - L}$, so you need no sum and no division any more. And the log-sum-exp of a whole row is the
# log-sum-exp *of the log-sum-exps of its parts*:
#
# $$L = \log\left(e^{L_1} + e^{L_2}\right)$$
#
# For the halves above, that is $\log(e^{3.13} + e^{5.05}) = 5.19$. A kernel that has to remember a row of scores keeps
# only $L$, four bytes. From it, FlashAttention's backward pass recomputes every probability, and Flash-Decoding merges
# its parts. A language model's loss for one token is $L$ minus the right token's score; the row holds a score for each
# token of the vocabulary.
#
# GPUs have an instruction for $2^x$ and none for $e^x$, so the compiler turns your `tl.exp` into $2^{x \log_2 e}$. The
# next cell compiles the naive kernel for an H100. Look for a multiplication just before the exponential, `ex2`:

# %%
from course_lib.hardware.compiler.views import compile_view

signature = {"x_pointer": "*fp32", "y_pointer": "*fp32", "columns": "i32", "x_row_stride": "i32", "y_row_stride": "i32"}
compiled = compile_view(naive_softmax_kernel, signature, {"BLOCK": 1024}, arch=90)
lines = [line.strip() for line in compiled.ptx.splitlines()]
exponentials = [index for index, line in enumerate(lines) if "ex2.approx" in line]
print(f"{len(exponentials)} exponentials for each of 128 threads, in two loops; the first, with what goes before it:")
print("\n".join(lines[exponentials[0] - 1 : exponentials[0] + 1]))
factor = torch.tensor(0x3FB8AA3B, dtype=torch.int32).view(torch.float32).item()
print(f"0f3FB8AA3B is {factor:.7f}, and log2(e) is {math.log2(math.e):.7f}")

# %% [markdown]
# Fast kernels save that multiplication: they fold $\log_2 e$ into the scale of the scores and use `tl.exp2` throughout.
# Then $m + \log_2 \ell$ is the log-sum-exp to the base 2, and you have to multiply it by $\ln 2$ to get $L$. If you
# forget this, $L$ is too large by 44 %, but the outputs are still right. You only notice when something uses $L$, such
# as a merge.
#
# In the next exercise you compute the log-sum-exp of a few very long rows. With one program for each row, most of the
# GPU would be idle. So each row is cut into `parts`, and each part has a program of its own that stores one number, the
# part's log-sum-exp. Then the *same kernel* runs once more, over these numbers. You need three new words:
#
# | word | what it does |
# |---|---|
# | `tl.log(x)` | the natural logarithm, of a block or of one number |
# | `tl.minimum(a, b)` | the smaller of the two, element by element; also for two single numbers |
# | `tl.num_programs(1)` | the size of the grid along its second axis; `tl.program_id(1)` is the place in it |
#
# The next cell tries them on the numbers 1, 2, 4, 8, with one program for each:

# %%
@triton.jit
def more_words_kernel(x_pointer, result_pointer):
    part, parts = tl.program_id(1), tl.num_programs(1)
    x = tl.load(x_pointer + part)  # one number
    tl.store(result_pointer + part, tl.log(x))
    tl.store(result_pointer + parts + part, tl.minimum(x, 3.0))
    tl.store(result_pointer + 2 * parts + part, parts)


tried = torch.empty(3, 4, device=device)
more_words_kernel[(1, 4)](torch.tensor([1.0, 2.0, 4.0, 8.0], device=device), tried)
for word, numbers in zip(("tl.log(x)", "tl.minimum(x, 3.0)", "tl.num_programs(1)"), tried.tolist()):
    print(f"{word:22}" + "".join(f"{number:8.3f}" for number in numbers))

# %% [markdown]
# **Exercise 3.6.** Write the kernel and the launcher. Every score is read once, and almost nothing is written.

# %%
# Exercise 3.6 · Log-sum-exp of long rows, in parts
@triton.jit
def log_sum_exp_kernel(x_pointer, result_pointer, columns, x_row_stride, part_length, BLOCK: tl.constexpr):
    """The log-sum-exp of part `tl.program_id(1)` of row `tl.program_id(0)`, in one pass.

    Part p covers the columns from p * part_length up to, not including, (p + 1) * part_length, as far as they exist.
    result_pointer: float32 [rows, parts], contiguous; `tl.num_programs(1)` is the number of parts.
    A part without columns, or of nothing but -inf, has the log-sum-exp -inf.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    # BEGIN SOLUTION
    first = part * part_length
    last = tl.minimum(first + part_length, columns)
    running_max = float("-inf")
    running_sum = 0.0
    for start in range(first, last, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        # `last`, not `columns`: elements from `last` on belong to the next part.
        tile = tl.load(x_pointer + row * x_row_stride + offsets, mask=offsets < last, other=float("-inf"))
        tile = tile.to(tl.float32)  # [BLOCK]
        new_max = tl.maximum(running_max, tl.max(tile, axis=0))
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # never -inf - -inf
        running_sum = running_sum * tl.exp(running_max - reference) + tl.sum(tl.exp(tile - reference), axis=0)
        running_max = new_max
    # An empty part has the maximum -inf and the sum 0: take log(1) for it, and -inf + log(1) is -inf.
    log_sum = tl.log(tl.where(running_sum == 0.0, 1.0, running_sum))
    tl.store(result_pointer + row * tl.num_programs(1) + part, running_max + log_sum)
    # END SOLUTION


def log_sum_exp(x, parts, block):
    """log(sum(exp(x))) of every row, each row cut into parts that different programs work on.

    Without torch.softmax, logsumexp or logaddexp. Only kernels read x, each element once; the parts' results may be
    merged by a kernel or by PyTorch.

    Args:
        x: [rows, columns], float32, float16 or bfloat16; elements of a row are contiguous, rows any stride apart,
            within 2³¹ elements of the first. May hold -inf.
        parts: programs for each row in the first launch, from 1; a part has cdiv(columns, parts) columns, the last ones
            fewer or none.
        block: elements of a tile, a power of two.

    Returns:
        [rows] float32; -inf for a row of nothing but -inf.
    """
    # BEGIN SOLUTION
    rows, columns = x.shape
    part_length = triton.cdiv(columns, parts)
    partial_results = torch.empty(rows, parts, dtype=torch.float32, device=x.device)
    log_sum_exp_kernel[(rows, parts)](x, partial_results, columns, x.stride(0), part_length, BLOCK=block)
    # The parts' results are rows of `parts` numbers: the same problem again, small enough for one program a row.
    result = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    log_sum_exp_kernel[(rows, 1)](partial_results, result, parts, parts, parts, BLOCK=block)
    return result[:, 0]
    # END SOLUTION


# %%
best_log_sum_exp = check("3.6", log_sum_exp).best

# %% [markdown]
# The next cell computes a language model's loss, the cross-entropy, for a few tokens. It reads the logits (the scores
# of all tokens in the vocabulary) once and never writes the probabilities. On a GPU it takes 8 rows of four million,
# much longer than a vocabulary, to show what the parts are for. With one part, only 8 multiprocessors work.

# %%
tokens, vocabulary = (8, 2**22) if on_gpu and not interpreting() else (2, 32_000)
logits = 3 * torch.randn(tokens, vocabulary, device=device)
targets = torch.randint(vocabulary, (tokens, 1), device=device)
loss = (best_log_sum_exp(logits, 4, 4096) - logits.gather(1, targets)[:, 0]).mean()
print(f"loss {loss.item():.6f}, PyTorch's {torch.nn.functional.cross_entropy(logits, targets[:, 0]).item():.6f}")
if on_gpu and not interpreting():
    for parts in (1, 4, 16, 64, 256):
        timing = measure(partial(best_log_sum_exp, logits, parts, 4096))
        bandwidth = format_bandwidth(timing.bandwidth(logits.nbytes))
        print(f"{parts:>4} parts: {format_seconds(timing.median):>10}, {bandwidth}")

# %% [markdown]
# ## Check yourself
#
# Answer these on paper, with the numbers of your own machine. Then run the next cell and open the answers.
#
# 1. The question's layer has 4.3 GB of scores. How long does its softmax take at least here, with four accesses to each
#    score, and with two?
# 2. How long may a row of float32 numbers be, to stay in the shared memory of one program?
# 3. You need the log-sum-exp of 8 rows of a million numbers. In how many parts do you cut each row, so that every
#    multiprocessor has a program?
# 4. After 100 tiles a new maximum comes, larger by 2. What happens to the running sum, and to the accumulator?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
here, gpu = machine(), "This machine" if on_gpu else "An H100"
matrix_bytes, rate = 32 * 8192**2 * 2, ceilings().copy_bandwidth
shared, multiprocessors = here.shared_memory_per_block_bytes or 227 * 1024, here.sm_count or 132
self_check(
    f"{format_bytes(matrix_bytes)} are accessed at {format_bandwidth(rate)}: {format_seconds(4 * matrix_bytes / rate)} "
    f"with four accesses, {format_seconds(2 * matrix_bytes / rate)} with two.",
    f"{gpu} gives a program {shared:,} bytes, room for {shared // 4:,} numbers. A longer row needs tiles.",
    f"{gpu} has {multiprocessors} multiprocessors: {math.ceil(multiprocessors / 8)} parts for each of the 8 rows.",
    f"Both are multiplied by exp(-2) = {math.exp(-2):.3f}, once, and then the new tile is added.",
)

# %% [markdown]
# ## What production systems do
#
# - **Attention kernels** all run this loop. FlashAttention (2022) normalised the output at each tile, and
#   FlashAttention-2 divides once, after the last. FlashAttention-4 skips the rescaling while the maximum has hardly
#   moved.
# - **A softmax by itself** takes two accesses if a row fits into a program's registers, and three or four if not.
# - **Merging** is a function of its own in FlashInfer and vLLM. vLLM computes attention to a shared prompt once and
#   merges it with the rest. Ring attention merges across GPUs.
#
# ## Papers
#
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, 2018, [arXiv
#   1805.02867](https://arxiv.org/abs/1805.02867). Section 3 is exercise 3.2, section 3.1 the merge.
# - M. Rabe, C. Staats, *Self-attention does not need O(n²) memory*, 2021, [arXiv
#   2112.05682](https://arxiv.org/abs/2112.05682). Exercise 3.4 on a TPU, before FlashAttention.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention*, 2022, [arXiv
#   2205.14135](https://arxiv.org/abs/2205.14135). The loop with tiles of queries, as in chapter 04.
# - T. Dao, *FlashAttention-2*, 2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691). Section 3.1: divide once,
#   and keep the log-sum-exp instead of the pair.
# - *FlashAttention-4*, 2026, [arXiv 2603.05451](https://arxiv.org/abs/2603.05451). When not to rescale.

# %%
progress()

# %% [markdown]
# **Next.** In [04 · Tiling in Triton](04_triton_tiling.ipynb) the loop of 3.4 gets a tile of queries instead of one,
# and that is FlashAttention.
