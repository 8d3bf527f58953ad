# %% [markdown]
# # 19 · What Blackwell changes

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

# %% [markdown]
# ## The longest first · deeper
#
# Under a causal mask a tile of queries reads all blocks of keys up to its own. With 4,096 tokens in tiles and blocks of
# 128, a head has 32 tiles. The first reads one block, and the last reads 32. Each tile is a program, and a
# multiprocessor that is free takes the next program of the list. In this section we call it a *slot*. The kernel ends
# when the last program ends, so the order of the list decides how long it takes.
#
# Take four programs that run for 1, 2, 3 and 4 units of time, on two slots. In this order the first slot runs 1 and
# then 3, and the second slot runs 2 and then 4, which ends at 6. If the longest starts first, the first slot runs 4
# and then 1, and the second runs 3 and then 2. Both end at 5, which is an even share of the 10 units. A long program
# that starts late runs alone, while short ones fill the gaps. In any order the end comes at most $2 - 1/S$ times as
# late as in the best order for $S$ slots. With the longest first it is at most $4/3 - 1/(3S)$ times as late
# ([Graham, 1969](https://doi.org/10.1137/0117039)).
#
# A plain grid starts the tiles head by head, and the shortest of each head first. FlashInfer turned the rows around in
# each head, and later over all heads, because the heaviest tiles had come last
# ([flashinfer#3575](https://github.com/flashinfer-ai/flashinfer/pull/3575)).
#
# But if the last rows of all heads come first, all heads are at work together, and their keys and values may not fit
# in the L2 cache. K and V of one head of 4,096 tokens, with head dimension 128 in 16 bits, have 2 · 4,096 · 128 · 2
# bytes = 2 MiB. In 50 MiB there is room for 25 such heads. So FlashAttention-4 cuts the heads into *sections*: as many
# heads as fit, rounded down to a power of two, which is 16 here. In a section the last row of each of its heads comes
# first, then the row before, and so on. Then comes the next section.
#
# The list alone is not enough. On an H200 a user gave each multiprocessor every 132nd tile in advance, with the longest
# first. At sequences of 16,384 tokens that reached 575 TFLOP/s, and a plain kernel of one tile a program had 623
# ([flash-attention#2754](https://github.com/Dao-AILab/flash-attention/pull/2754)). Whoever is free must take the next
# tile.
#
# Now 16 heads of 4,096 tokens on the 132 multiprocessors of an H200. An even share is 16 · 528 / 132 = 64 blocks.
# **Predict** after how many blocks' time the last program ends if a plain grid starts them.

# %%
predict("19 end of a plain grid", ..., "blocks")

# %%
# Exercise 19.6 · The longest first
import heapq


def makespan(works: list[int], slots: int) -> int:
    """When the last program ends. Whenever a slot is free, the next program of the list starts on it.

    works: how long each program runs, in the order of the list: ints, each at least 1 and at most 10⁹. There may be
        10,000 of them, and the list may be empty.
    slots: 1 … 1,000. All are free at time 0, and each runs one program at a time, from beginning to end.
    Returns: the time at which the last of the programs ends, a Python int; 0 if there are none.
    """
    # BEGIN SOLUTION
    free = [0] * slots  # when each slot is free: a heap, its smallest number first
    for work in works:
        heapq.heapreplace(free, free[0] + work)
    return max(free)
    # END SOLUTION


def heads_at_once(l2_bytes: int, tokens: int, head_dim: int, group: int) -> int:
    """For how many query heads the keys and values fit in the L2 cache together: a power of two.

    l2_bytes: the size of the cache, 1 … 2³².
    tokens, head_dim: the keys and the values of a key head have so many rows and columns, at least 1. Their numbers
        have 16 bits.
    group: 1 … 128. Query heads 0 … group - 1 share the first key head, the next `group` query heads the second one, and
        so on. What they share lies in the cache once.
    Returns: the largest power of two n for which all keys and values of query heads 0 … n - 1 fit, a Python int. It is
    1 if not even those of one key head fit.
    """
    # BEGIN SOLUTION
    heads = l2_bytes // (2 * tokens * head_dim * 2) * group
    return 1 << (max(1, heads).bit_length() - 1)
    # END SOLUTION


def tile_at(number: int, heads: int, tiles: int, section: int) -> tuple[int, int]:
    """The tile of queries that comes at this place of the list, counted from 0.

    The heads are cut into sections: the first `section` heads, the next, and so on. The last section has the heads that
    are left, so it may have fewer. In a section the last row of each of its heads comes first, from the section's first
    head to its last. Then comes the row before, in the same way, down to row 0. Then comes the next section.

    number: 0 … heads · tiles - 1.
    heads, tiles, section: at least 1. A head has the rows 0 … tiles - 1. The section may be larger than heads. There
        may be 2⁴⁰ tiles, so do not loop over tiles, rows, heads or sections.
    Returns: (head, row), a tuple or list of two Python ints.
    """
    # BEGIN SOLUTION
    first = number // (section * tiles) * section
    width = min(section, heads - first)
    place = number - first * tiles
    return first + place % width, tiles - 1 - place // width
    # END SOLUTION


# %%
best_makespan, best_heads_at_once, best_tile_at = check("19.6", makespan, heads_at_once, tile_at).best

# %% [markdown]
# The next cell compares three orders: that of a plain grid, that in sections, and the longest first over all heads. A
# tile of row $r$ runs for $r + 1$ blocks.

# %%
L2_BYTES, SLOTS = 50 << 20, 132


def order_in_sections(heads, tiles, section):
    return [best_tile_at(number, heads, tiles, section) for number in range(heads * tiles)]


print(f"{'heads, tokens':>14}{'section':>9}{'even share':>12}{'plain grid':>12}{'sections':>10}{'all heads':>11}")
for heads, tokens in ((16, 4096), (16, 16384), (64, 8192)):
    tiles, section = tokens // 128, best_heads_at_once(L2_BYTES, tokens, 128, 1)
    grid = best_makespan([row + 1 for _ in range(heads) for row in range(tiles)], SLOTS)
    ends = [best_makespan([row + 1 for _, row in order_in_sections(heads, tiles, size)], SLOTS)
            for size in (section, heads)]
    even = heads * tiles * (tiles + 1) / 2 / SLOTS
    print(f"{f'{heads}, {tokens:,}':>14}{section:>9}{even:>12.1f}{grid:>12}{ends[0]:>10}{ends[1]:>11}")
    if tokens == 4096:
        shown = measured("19 end of a plain grid", grid, "blocks")
print(shown)

# %%
from course_lib.figures.sparse.loads import draw_loads
from course_lib.hardware.schedule import scheduled

HEADS, TILES, FEW_SLOTS = 4, 8, 7
orders = {
    "head by head, as a grid starts them": [(head, row) for head in range(HEADS) for row in range(TILES)],
    "sections of two heads": order_in_sections(HEADS, TILES, 2),
}
plans = {name: scheduled([row + 1 for _, row in tiles], FEW_SLOTS) for name, tiles in orders.items()}
owners = {name: [head for head, _ in tiles] for name, tiles in orders.items()}
draw_loads(plans, FEW_SLOTS, "blocks of keys (dashed: an even share)", owners)

# %% [markdown]
# The picture has four heads of eight tiles on seven slots, with a colour for each head. In the plain grid's order the
# longest tiles of the last head start late, and most slots are idle while they run.
#
# With 16 heads of 4,096 tokens the plain grid ends at 85 blocks, a third later than an even share, and the sections end
# at 65. With 64 heads of 8,192 tokens each slot runs many tiles, so one long tile at the end matters less: 4 %. On an
# H200 the authors of [FlashAttention-4](https://arxiv.org/abs/2603.05451) measured 4 to 8 % for this order with a key
# head for each query head, and 7 to 14 % with one key head for all. The model has no cache, so it does not show what
# the sections save there.
