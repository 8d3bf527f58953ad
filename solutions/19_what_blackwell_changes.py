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
# On Hopper the results of the tensor cores lie in registers. Blackwell has a separate memory for them, the *tensor
# memory*. It has 512 *columns*, and each column has 128 *lanes* of 4 bytes. A tile of 128 rows uses one lane for each
# row, so a float32 matrix of 128 rows and 128 columns takes 128 columns of tensor memory.
#
# A multiprocessor works on two tiles of queries at once: while the softmax of one tile runs, the tensor cores multiply
# for the other. For head dimension 128 and blocks of 128 keys each tile needs:
#
# | what | numbers | columns |
# |---|---|---|
# | S, the scores | 128 × 128, float32 | 128 |
# | P, the weights | 128 × 128, 16 bits, two in a column | 64 |
# | O, the output | 128 × 128, float32 | 128 |
#
# Two tiles would need 640 columns, and there are 512. But the softmax reads all of S into registers before it writes P.
# So P may lie in columns of its own S, and then two tiles fill exactly 512. You write such a plan for any sizes.
#
# Sharing columns has a price: somebody has to keep the order. The *product warp* is a single warp that does nothing but
# start products. A product runs by itself, and the warp goes on at once. The tensor cores run the products in the order
# in which they were started. Each tile has a *softmax group*, which reads S and writes P. One *correction group* serves
# both tiles. It rescales O before the next product adds to it, because the running maximum may have grown (chapter 3).
#
# You also write the steps of the product warp. Suppose that it starts the scores of block 1 before the output product
# of block 0. Then the new scores overwrite weights that were not read yet. In FlashAttention-4 P overlaps S too, and a
# reader asked whether the next scores can overwrite P, since no barrier stands between the two products
# ([Dao-AILab/flash-attention#2196](https://github.com/Dao-AILab/flash-attention/issues/2196)). It is their order alone
# that keeps them apart.
#
# That order does not help with the correction, which is no product. The product warp has to wait for it. In vLLM's copy
# of FlashAttention the correction for head dimension 256 reported that it was done while it might still be reading O,
# so the next product could overwrite O too early
# ([vllm-project/flash-attention#182](https://github.com/vllm-project/flash-attention/pull/182)).
#
# The warp must also keep the tensor cores busy. Suppose that a product takes 10 ticks and a softmax 20. A block needs
# four products, two for each tile: 40 ticks. One tile alone needs 10 + 20 + 10 = 40 ticks a block, so two tiles in turn
# take 80. If one tile's products run during the other's softmax, both take 40 together. **Predict** how many ticks your
# warp takes for six blocks, from the beginning of the first product to the end of the last.

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
    The tensor cores must not idle more than they have to. If each product takes p ticks, each softmax s, and each
    correction ends before the weights of its block are written, all takes at most (blocks + 1) · max(4 p, 2 p + s).
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
# The next cell plays your warp on your plan: six blocks, 10 ticks a product, 20 a softmax, 5 a correction. This is a
# model, and its ticks are made up. Nothing in this chapter was run on a Blackwell.

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
# It should be about 260 ticks. The tensor cores work in 240 of them. They wait for 10 ticks after the first scores, and
# for 10 before the last output. In between they never stop. If a softmax took 40 ticks, one tile alone would need 60
# for a block. There are only 40 ticks of products in that time, so the tensor cores would idle for a third of it.
