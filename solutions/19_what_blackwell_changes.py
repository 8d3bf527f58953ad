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
# A kernel is as fast as the unit with the most work. Attention's forward goes through the scores piece by piece: a
# *tile* of queries, for example 128 rows, meets a *block* of 128 keys. Four units of a multiprocessor work on such a
# piece, and they can do so at the same time.
#
# - The **tensor cores** compute two products, $S = Q K^T$ and $O \mathrel{+}= P V$. In 16 bits they do 4,096 FLOPs a
#   cycle on an H100, and 8,192 on a B200.
# - The **exponential unit** makes the weights $P$ from the scores $S$. It makes 16 a cycle on both chips.
# - **Shared memory** sends the tensor cores 128 bytes a cycle on both chips: $Q$ and $K$ for the first product, and $V$
#   for the second. On a B200, $S$, $P$ and $O$ lie in a memory of their own, the *tensor memory*.
# - The **multiply-add unit** does the rest: it scales the scores, finds their maximum, adds up the weights and converts
#   them to 16 bits. It starts 128 instructions a cycle, one for each number.
#
# Take 128 rows, 128 keys and head dimension 128. The two products are $4 \cdot 128^3$ FLOPs: 2,048 cycles of an H100,
# and 1,024 of a B200. The exponentials take $128^2 / 16 = 1024$ cycles on both, and shared memory sends 96 KiB in 768.
# So on a B200 the exponentials take as long as the products. At head dimension 64 the products take 512 cycles, but
# there are as many exponentials as before. Then the tensor cores wait half of the time.
#
# Multiply-adds can compute an exponential too, in about 9 instructions, as you will see in exercise 19.2. So you may
# give a *share* of the exponentials to the multiply-add unit. How large should it be? At head dimension 64 a share of
# one half would bring the exponential unit down to the 512 cycles of the products. But the multiply-add unit has work
# already. Say 4 instructions for each score, $128^2 \cdot 4 / 128 = 512$ cycles. Half of the exponentials add 576, so
# now this unit takes 1,088 cycles. The best share lies where both units take equally long. **Predict** it.
#
# Too large a share costs more than it brings. In FlashAttention-4 a few numbers of each period go to the multiply-add
# unit. At head dimension 128 a sweep on a Blackwell GPU gave 1,250 TFLOP/s on average for a period of 10 numbers, and
# 1,567 for one of 16 ([flash-attention#2398](https://github.com/Dao-AILab/flash-attention/pull/2398)).

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
# Both units take $1024 \cdot (1 - s) = 512 + 1152 \cdot s$ cycles at $s = 0.235$, which makes 783 instead of 1,024. A
# B300 makes 32 exponentials a cycle, so nothing is left to gain there.
#
# The table takes all units to be busy all the time. In a real kernel they wait for each other. At head dimension 128 it
# says 0 for a B200, and yet a small share was best in the sweep above. So count first, and then measure.

# %% [markdown]
# ## 2^x from multiply-adds
#
# How do you compute $2^x$ from multiplications and additions? Cut $x$ in two: the whole number below it,
# $\lfloor x \rfloor$, and the fraction $f = x - \lfloor x \rfloor$, from 0 to 1. Then $2^x$ is
# $2^{\lfloor x \rfloor} \cdot 2^f$.
#
# **The fraction.** A polynomial comes close to $2^f$: $1 + C_1 f + C_2 f^2 + C_3 f^3$. The coefficients in the cell are
# the best ones for $f$ from 0 to 1. They err by at most 8.6e-5, where rounding to bfloat16 errs by up to 3.9e-3.
# *Horner's* way takes three multiply-adds: $((C_3 f + C_2) f + C_1) f + 1$.
#
# **The whole number.** A float32 has a sign bit, 8 bits of exponent and 23 of mantissa. Read its bits as an integer and
# add $n \cdot 2^{23}$, and the float is multiplied by $2^n$. A *bitcast* reads bits as another type, and costs nothing.
#
# **Rounding down by an addition.** `tl.floor` and `.to(tl.int32)` run on the exponential unit too. But a float32 from
# 1024 to 2048 has 10 bits of its mantissa before the point, and 13 behind it. So add 1536 to $x$, read the bits, and
# clear the last 13. That rounds down, because the sum is positive. Take $x = -2.7$. The sum is 1533.3, and with 13 bits
# cleared it is 1533. Subtract 1536, and you have $\lfloor x \rfloor = -3$ and $f = 0.3$, of which the polynomial makes
# 1.2311. Now shift the cleared bits left by 10. All that belongs to 1536 falls out at the top, and $-3$ stands where a
# float32 has its exponent. Added to the bits of 1.2311, it gives $1.2311 / 8 = 0.1539$, which is $2^{-2.7}$.
#
# **The lower end.** Masked scores are $-\infty$, and $-\infty - (-\infty)$ is NaN. Also, no float32 has an exponent
# below $-127$. A trading library did not look at that: its `exp` gave $-\infty$ for an exponent of $-128$
# ([nautilus_trader#4709](https://github.com/nautechsystems/nautilus_trader/pull/4709)). So replace everything below
# $-127$ by $-127$ first. Then the bits of 1, whose exponent is stored as 127, become those of 0.
#
# The check divides your results by $2^x$, so a right one is 1. **Predict** how many instructions one power takes in
# this way. The polynomial alone takes three.

# %%
predict("19 instructions for one power", ..., "instructions")

# %%
# Exercise 19.2 · 2^x from multiply-adds
@triton.jit
def exp2_polynomial(
    x, C1: tl.constexpr = 0.6951167583465576, C2: tl.constexpr = 0.22764499485492706,
    C3: tl.constexpr = 0.07706703990697861,
):
    """2^x without the exponential unit. Only this function is yours to write; it is called as exp2_polynomial(x).

    x: a float32 tile of any shape; at most 127; -inf too, but never NaN.
    C1, C2, C3: the coefficients.
    Returns: a float32 tile of the same shape. From -126 on its relative error is the polynomial's, give or take a few
    roundings; up to twice of that is accepted. From -127 down the result is 0, or a number above 0 and below 2^-126.
    Between -127 and -126 any number from 0 to 2^-126 will do.
    Nothing runs on the exponential unit: no exponential, logarithm, root or sine, no division or remainder, no floor or
    ceil, and no conversion between floats and integers. Bitcasts, shifts and comparisons are free to use.
    """
    # BEGIN SOLUTION
    x = tl.maximum(x, -127.0)
    bits = (x + 1536.0).to(tl.int32, bitcast=True) & -8192  # of ⌊x⌋ + 1536
    fraction = x - (bits.to(tl.float32, bitcast=True) - 1536.0)
    power = ((C3 * fraction + C2) * fraction + C1) * fraction + 1.0
    return (power.to(tl.int32, bitcast=True) + (bits << 10)).to(tl.float32, bitcast=True)
    # END SOLUTION


@triton.jit
def powers_kernel(x_pointer, out_pointer, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    in_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # [ROWS, COLUMNS]
    offsets = tl.program_id(0) * ROWS * COLUMNS + in_tile
    x = tl.load(x_pointer + offsets, mask=offsets < length, other=0.0)
    tl.store(out_pointer + offsets, exp2_polynomial(x), mask=offsets < length)


def powers(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """2^x of a contiguous float32 tensor, by your function on tiles of rows × columns numbers. Leave it as it is."""
    out = torch.empty_like(x)
    powers_kernel[(triton.cdiv(x.numel(), rows * columns),)](x, out, x.numel(), ROWS=rows, COLUMNS=columns)
    return out


# %%
best_powers = check("19.2", powers).best
best_exp2_polynomial = best_powers.__globals__["exp2_polynomial"]  # the function that it calls: yours, once it passed

# %% [markdown]
# The next cell reads the machine code for an H100, of kernels in which a thread computes 32 powers. A kernel that only
# copies is subtracted. `MUFU`, `FRND`, `F2I` and `I2F` run on the exponential unit.

# %%
import re

from course_lib.hardware.compiler.views import compile_many


@triton.jit
def unchanged(x):
    return x


@triton.jit
def by_the_unit(x):
    return tl.exp2(x)


@triton.jit
def tile_kernel(x_pointer, out_pointer, FUNCTION: tl.constexpr):
    offsets = tl.arange(0, 4096)  # 32 for each of 128 threads
    tl.store(out_pointer + offsets, FUNCTION(tl.load(x_pointer + offsets)))


functions = {"copied": unchanged, "tl.exp2": by_the_unit, "yours": best_exp2_polynomial}
views = compile_many([
    {"kernel": tile_kernel, "signature": {"x_pointer": "*fp32", "out_pointer": "*fp32"},
     "constexprs": {"FUNCTION": function}, "arch": 90, "want_sass": True}
    for function in functions.values()
])
codes = [re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9.]+)", view.sass) for view in views]
lengths = [sum(name not in ("NOP", "BRA") for name in code) for code in codes]
print(f"{'instructions a power':<24}{'all':>6}{'exponential unit':>19}")
for name, code, length in zip(functions, codes, lengths):
    slow = sum(found.startswith(("MUFU", "FRND", "F2I", "I2F")) for found in code)
    print(f"{name:<24}{(length - lengths[0]) / 32:>6.1f}{slow / 32:>19.1f}")
measured("19 instructions for one power", round((lengths[2] - lengths[0]) / 32), "instructions")

# %% [markdown]
# The course's answer takes nine: a maximum, three additions, one that clears bits, three multiply-adds, and one that
# shifts and adds at once. At 128 instructions a cycle that makes at most 14 powers a cycle, beside the 16 of the
# exponential unit. When one of eight exponentials went this way in the course's attention on an H200, at head dimension
# 64, it fell from 533 to 494 TFLOP/s: the table of 19.1 has nothing to gain there.
#
# A share has one more effect: two slightly different functions are mixed. In FlashAttention-4 it depends on the
# kernel's variant which numbers get which. Prefill and decode, which had agreed to the last bit, no longer did
# ([flash-attention#2596](https://github.com/Dao-AILab/flash-attention/issues/2596)).
