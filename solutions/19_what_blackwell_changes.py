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
# ## Who lies where in tensor memory · deeper
#
# On Hopper the results of the tensor cores lie in registers. On Blackwell they lie in a memory of their own. *Tensor
# memory* has 512 columns, and each column has 128 *lanes* of 4 bytes. A tile of 128 rows takes one lane for each row,
# so a float32 matrix of 128 rows and $n$ columns takes $n$ columns.
#
# A multiprocessor works on two tiles of queries at once, so that one tile's softmax runs while the tensor cores
# multiply for the other. For head dimension 128 and blocks of 128 keys a tile needs:
#
# | what | numbers | columns |
# |---|---|---|
# | S, the scores | 128 × 128, float32 | 128 |
# | P, the weights | 128 × 128, 16 bits, two in a column | 64 |
# | O, the output | 128 × 128, float32 | 128 |
#
# Two tiles would need 640 columns, and there are 512. But the softmax first reads all of S into registers and writes P
# afterwards. So P may lie in columns of its own S, and the two tiles fill exactly 512 columns. You write such a plan
# for any sizes.
#
# Sharing has a price, because somebody has to keep the order. Five roles work on this memory at the same time. The
# *product warp* is a single warp that only starts products. A product that is started runs on its own, and the warp
# goes on at once. The tensor cores run the products one after the other, in the order in which they were started. Each
# tile has a *softmax group*, which reads S and writes P. The *correction group* serves both tiles. Before the next
# product adds to O, it rescales O, because the maximum may have grown (chapter 3).
#
# You write the steps of the product warp. Suppose that it starts the scores of block 1 before the output product of
# block 0 has read its weights. Then the new S overwrites P. A reader of FlashAttention-4 asked whether that can happen
# there ([Dao-AILab/flash-attention#2196](https://github.com/Dao-AILab/flash-attention/issues/2196)): its P overlaps its
# S, and no barrier stands between the two products. Nothing but the order in which they are started keeps them apart.
#
# The correction is different. It is no product, so the order of products does not help, and the product warp has to
# wait for it. In vLLM's copy of the kernel for head dimension 256 the correction reported that it was done while its
# reads of O were still under way, so that the next product could overwrite them
# ([vllm-project/flash-attention#182](https://github.com/vllm-project/flash-attention/pull/182)).
#
# Correct is not enough. If the warp does everything for tile 0 and then everything for tile 1, the tensor cores idle
# during each softmax. Suppose that a product takes 10 ticks and a softmax 20. A block of two tiles has four products,
# which are 40 ticks of tensor cores. A tile by itself needs 10 + 20 + 10 = 40 ticks for a block. So two tiles in turn
# need 80 ticks, and if they overlap perfectly, 40. **Predict** how many ticks six blocks take with your warp, from the
# first product to the end of the last.

# %%
predict("19 ticks of six blocks, two tiles", ..., "ticks")

# %%
# Exercise 19.5 · The plan of the tensor memory
def plan(tiles: int, keys: int, value_dim: int):
    """Which columns of tensor memory S, P and O of each tile take.

    tiles: 1 … 16, all at work at once. A tile has 128 rows of queries, and each row takes a lane of its own.
    keys: keys of a block, even, 2 … 512. value_dim: numbers of a value, 1 … 512.
    A row of S has a float32 number for each key, a row of P a 16-bit one for each key, a row of O a float32 number for
    each element of a value. A column has 4 bytes in each lane, and there are the columns 0 … 511.
    Returns: {"S0": (first column, columns), "P0": …, "O0": …, "S1": …} for tiles 0 … tiles - 1, in whole numbers, with
    exactly as many columns as are needed. P may share columns with the S of its own tile; no other two share any. Where
    regions lie and in which order is your choice. None if there is no such plan, and only then.
    """
    # BEGIN SOLUTION
    each = keys + value_dim  # P lies in the right half of its S
    if tiles * each > 512:
        return None
    regions = {}
    for tile in range(tiles):
        first = tile * each
        regions[f"S{tile}"] = first, keys
        regions[f"P{tile}"] = first + keys // 2, keys // 2
        regions[f"O{tile}"] = first + keys, value_dim
    return regions
    # END SOLUTION


def product_warp(blocks: int):
    """The steps of the warp that starts the products of two tiles, 0 and 1. Both have so many blocks, at least 1.

    Yields (or returns a list of) steps:
        ("scores", tile, block)             starts the product S = Q Kᵀ of a tile and block, and goes on at once
        ("output", tile, block)             starts the product O += P V, and goes on at once; block 0 overwrites O
        ("wait", "weights", tile, block)    goes on when the softmax has written the weights P of the block
        ("wait", "corrected", tile, block)  goes on when O has been rescaled for the block; for block 0 at once
    Each tile needs both products of each block 0 … blocks - 1 once, in ascending order of blocks. P lies in columns of
    its S. The tensor cores run the products one after the other, in the order in which they were started. The softmax
    of a tile begins by itself when the scores are there. The correction of a block, from 1 on, begins when the softmax
    has read its scores and the output product of the block before has ended. Keys and values are always there.
    All must be right in every order of events: each product, softmax and correction may take any time.
    The tensor cores must not idle more than they have to. If each product takes p ticks, each softmax s, and
    corrections are short, all takes at most (blocks + 1) · max(4 p, 2 p + s) ticks.
    """
    # BEGIN SOLUTION
    yield "scores", 0, 0
    yield "scores", 1, 0
    for block in range(blocks):
        for tile in (0, 1):
            yield "wait", "weights", tile, block
            yield "wait", "corrected", tile, block
            yield "output", tile, block
            if block + 1 < blocks:
                yield "scores", tile, block + 1  # runs behind the output, so P has been read by then
    # END SOLUTION


# %%
best_plan, best_product_warp = check("19.5", plan, product_warp).best

# %% [markdown]
# The next cell draws your plan and plays your warp on it: six blocks, 10 ticks a product, 20 a softmax, 5 a correction.
# All of it is a model. Nothing in this chapter was run on a Blackwell.

# %%
from course_lib.figures.blackwell.columns import draw_columns
from course_lib.figures.blackwell.roles import draw_roles
from course_lib.hardware.tensor_memory_model import play_tensor_memory

columns, events = best_plan(2, 128, 128), []
played = play_tensor_memory({"product_warp": best_product_warp}, columns, 6, [[10, 10]], [[5, 15]], [5], events=events)
print(played["ending"])
print(measured("19 ticks of six blocks, two tiles", max(end for *_, end in events), "ticks"))
draw_columns(columns)

# %%
draw_roles(events)

# %% [markdown]
# It is about 260 ticks: 240 in which the tensor cores work, and 20 at the beginning and at the end, when only one tile
# has something to multiply. In between the tensor cores never stop. A longer softmax changes that: with 40 ticks a
# block takes max(40, 60) = 60 ticks, and the tensor cores work two thirds of the time. That is why section 19.1 counts
# the exponentials.
