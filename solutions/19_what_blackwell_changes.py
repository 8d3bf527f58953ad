# %% [markdown]
# # 19 · What Blackwell changes
#
# **The question.** A B200 has twice the tensor cores of an H100, and nothing else grew with them. What has to change in
# attention, so that it runs twice as fast?

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math

import torch
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Which unit limits
#
# A kernel is as fast as the unit with the most work. So before you make anything faster, count what each unit has to
# do. Attention's forward goes through the scores tile by tile: a *tile* of queries, for example 128 rows, meets a
# *block* of 128 keys. Four units of a multiprocessor work on them, and they can do so at the same time.
#
# - The **tensor cores** compute two products, $S = Q K^T$ and $O \mathrel{+}= P V$. In 16 bits they do 4,096 FLOPs a
#   cycle on an H100, and 8,192 on a B200.
# - The **exponential unit** computes the weights $P$ from the scores, one exponential for each. It makes 16 a cycle on
#   both chips.
# - **Shared memory** gives the tensor cores 128 bytes a cycle on both chips. On a B200 they read $Q$ and $K$ for the
#   first product, and $V$ for the second. $S$, $P$ and $O$ lie in *tensor memory*, a memory of their own.
# - The **multiply-add unit** does the rest: it scales the scores, finds their maximum, adds up the weights, and
#   converts them to 16 bits. It starts 128 instructions a cycle, one for each number.
#
# Take 128 rows, 128 keys and head dimension 128. The two products are $4 \cdot 128^3$ FLOPs, which take a B200 1,024
# cycles, where an H100 needs 2,048. The exponentials are $128^2 / 16$, again 1,024 cycles. Shared memory sends 96 KiB
# in 768 cycles. So on a B200 the exponentials take as long as the products. At head dimension 64 the products take only
# 512 cycles, but there are as many exponentials as before, so the tensor cores wait half of the time.
#
# Multiply-adds can compute an exponential too, as you will see in exercise 19.2. It takes about 9 instructions. So you
# may give a *share* of the exponentials to the multiply-add unit. Which share is best? At head dimension 64 the
# exponential unit would have to lose half of its work, so that it takes no longer than the products. But the
# multiply-add unit is not idle. Say it spends 4 instructions on each score anyway, which are
# $128^2 \cdot 4 / 128 = 512$ cycles. Each exponential adds 9 instructions. With a share of one half that is 1,088
# cycles, longer than before. The best share lies where both units take equally long. **Predict** it.
#
# Too large a share costs more than none. FlashAttention-4 has a setting for it: of every so many numbers, the last few
# go to the multiply-add unit. At head dimension 128, with 10 as the period, it ran at 1,250 TFLOP/s on a Blackwell GPU,
# and with 16 at 1,567 ([flash-attention#2398](https://github.com/Dao-AILab/flash-attention/pull/2398)).

# %%
predict("19 best share at head dimension 64", ..., "%")

# %%
# Exercise 19.1 · Which unit limits
def forward_cycles(rows: int, keys: int, head_dim: int, chip: tuple) -> tuple:
    """For how many cycles a tile of queries and a block of keys keep three units of a multiprocessor busy.

    rows, keys, head_dim: whole numbers, at least 1: the queries of the tile, the keys of the block, and the dimension
        of queries, keys and values.
    chip: what the units do in a cycle: (FLOPs, exponentials, bytes of shared memory), three positive numbers.
    Returns: (products, exponentials, shared memory), a tuple or list of three numbers, not rounded.
    There are two products, Q Kᵀ and P V, in which a multiply-add is two FLOPs, and one exponential for each score. From
    shared memory the tensor cores read Q, K and V once, in 16 bits. Nothing else lies there.
    """
    # BEGIN SOLUTION
    flops, exponentials, shared_bytes = chip
    numbers = rows * head_dim + 2 * keys * head_dim  # of Q; of K and V
    return 4 * rows * keys * head_dim / flops, rows * keys / exponentials, 2 * numbers / shared_bytes
    # END SOLUTION


def best_share(rows: int, keys: int, head_dim: int, chip: tuple, instructions: float, others: float) -> float:
    """The smallest share of the exponentials for the multiply-add unit with which the tile takes the least time.

    The time of a tile is the longest of four: that of the products; that of shared memory; (1 - share) times that of
    all exponentials; and that of the multiply-add unit, which starts 128 instructions a cycle. It needs `others` for
    each of the rows · keys scores, whatever the share is, and `instructions` more for each exponential given to it.

    rows, keys, head_dim, chip: as above.
    instructions: at least 1. others: at least 0. Both may be fractions, such as 4.5.
    Returns: one number from 0 to 1, not rounded; 0 where no share makes the tile faster.
    """
    # BEGIN SOLUTION
    products, exponentials, shared_memory = forward_cycles(rows, keys, head_dim, chip)
    busy, each = rows * keys * others / 128, rows * keys * instructions / 128
    as_fast_as_the_others = 1 - max(products, shared_memory) / exponentials
    both_equally_long = (exponentials - busy) / (exponentials + each)
    return max(0.0, min(as_fast_as_the_others, both_equally_long))
    # END SOLUTION


# %%
best_forward_cycles, best_best_share = check("19.1", forward_cycles, best_share).best

# %%
CHIPS = {"H100": (4096, 16, 128), "B200": (8192, 16, 128), "B300": (8192, 32, 128)}
print(f"{'':21}{'products':>9}{'exponentials':>14}{'shared memory':>15}{'best share':>12}")
for name, chip in CHIPS.items():
    for head_dim in (64, 128):
        cycles = best_forward_cycles(128, 128, head_dim, chip)
        share = best_best_share(128, 128, head_dim, chip, instructions=9, others=4)
        print(f"{name}, dimension {head_dim:<4}{cycles[0]:>9,.0f}{cycles[1]:>14,.0f}{cycles[2]:>15,.0f}{share:>11.1%}")
measured("19 best share at head dimension 64", 100 * best_best_share(128, 128, 64, CHIPS["B200"], 9, 4), "%")

# %% [markdown]
# Both units take $1024 \cdot (1 - s) = 512 + 1152 \cdot s$ cycles at $s = 0.235$. The tile then takes 783 cycles
# instead of 1,024. A B300 makes 32 exponentials a cycle, and there the table says 0, as for an H100. (H100: in fact its
# tensor cores read $P$ from registers and write $S$ and $O$ there. Shared memory has the same bytes to send.)
#
# The table is a limit, because it takes all units to be busy all the time. In a real kernel they wait for each other.
# At head dimension 128 it says 0 for a B200 too, and yet the best setting in the report above gave some exponentials
# to the multiply-add unit. So count first, to know what can gain at all, and then measure.
