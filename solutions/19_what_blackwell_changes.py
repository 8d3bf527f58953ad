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

# %% [markdown]
# ## 2^x from multiply-adds
#
# To give exponentials to the multiply-add unit, you need a way to compute them from multiplications and additions.
# Attention takes powers of 2, because scores in base 2 only need a factor of $\log_2 e$ before. So take $2^x$, and cut
# $x$ in two: the whole number below it, $\lfloor x \rfloor$, and the fraction $f = x - \lfloor x \rfloor$, which lies
# between 0 and 1. Then $2^x = 2^{\lfloor x \rfloor} \cdot 2^f$, and both factors are easy.
#
# **The fraction.** A polynomial comes close to $2^f$: $1 + C_1 f + C_2 f^2 + C_3 f^3$. The coefficients in the cell are
# the best for $f$ from 0 to 1. They err by at most 8.6e-5, and bfloat16, in which attention needs the weights, errs by
# 3.9e-3. *Horner's* way needs three multiply-adds: $((C_3 f + C_2) f + C_1) f + 1$.
#
# **The whole number.** A float32 has a sign bit, 8 bits of exponent and 23 of mantissa. Its exponent field holds the
# exponent plus 127. If you read these 32 bits as an integer and add $n \cdot 2^{23}$, you multiply the float by $2^n$.
# A *bitcast* reads bits as another type, and costs nothing.
#
# **Rounding down without rounding.** `tl.floor`, and `.to(tl.int32)` of a float, would be the usual ways to
# $\lfloor x \rfloor$. But both run on the exponential unit. An addition does it, too. A float32 between 1024 and 2048
# has 10 of its mantissa bits before the point, and 13 after it. So add 1536 to $x$, read the bits, and clear the last
# 13. Take $x = -2.7$. The sum is 1533.3, and with 13 bits cleared it is 1533. Subtract 1536, and you have
# $\lfloor x \rfloor = -3$, so $f = 0.3$. The polynomial makes 1.2311 of it. If you shift the cleared bits left by 10,
# the exponent and the leading bits of 1536 fall out at the top, and $-3$ stands where a float32 has its exponent. Added
# to the bits of 1.2311, that gives $1.2311 / 8 = 0.1539$, which is $2^{-2.7}$.
#
# **The lower end.** Masked scores are $-\infty$, and $-\infty - (-\infty)$ is NaN. Below $-127$ there is no exponent
# left either. A trading library did not look at that: its `exp` gave 0 for the exponent $-127$, $-\infty$ for $-128$,
# and $-2.31 \cdot 10^{38}$ for $-129$
# ([nautilus_trader#4709](https://github.com/nautechsystems/nautilus_trader/pull/4709)). So first replace all that is
# smaller than $-127$ by $-127$. Then the bits of 1, whose exponent field is 127, become those of 0.
#
# NaN needs no care here, because a score is never NaN. The largest $x$ in attention is 0, or 8 with the lazy rescaling
# of the next section.
#
# **Predict** how many instructions a thread needs for one $2^x$ in this way. The polynomial alone takes three.

# %%
predict("19 instructions for one power", ..., "instructions")

# %%
# Exercise 19.2 · 2^x from multiply-adds
C1, C2, C3 = tl.constexpr(0.6951167583465576), tl.constexpr(0.22764499485492706), tl.constexpr(0.07706703990697861)


@triton.jit
def exp2_polynomial(x):
    """2^x without the exponential unit. Only this function is yours to write.

    x: a float32 tile of any shape; at most 127; -inf too, but never NaN.
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
# The interpreter counted which operations you used. The machine code has the last word. The next cell compiles two
# kernels for an H100, in which each thread computes one power: one with your function, and one with `tl.exp2`. What is
# counted is what each of them adds to a kernel that copies its numbers. `MUFU.EX2`, `FRND`, `F2I` and `I2F` are the
# instructions of the exponential unit: powers, rounding, and conversions to and from integers.

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
def one_each_kernel(x_pointer, out_pointer, FUNCTION: tl.constexpr):
    offsets = tl.arange(0, 128)
    tl.store(out_pointer + offsets, FUNCTION(tl.load(x_pointer + offsets)))


signature = {"x_pointer": "*fp32", "out_pointer": "*fp32"}
functions = {"copied": unchanged, "tl.exp2": by_the_unit, "yours": best_exp2_polynomial}
views = compile_many([{"kernel": one_each_kernel, "signature": signature, "constexprs": {"FUNCTION": function},
                       "arch": 90, "want_sass": True} for function in functions.values()])
instructions = {}
for name, view in zip(functions, views):
    code = [found for found in re.findall(r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9.]+)", view.sass)
            if found not in ("NOP", "BRA")]
    on_the_unit = [found for found in code if found.startswith(("MUFU", "FRND", "F2I", "I2F"))]
    instructions[name] = len(code)
    print(f"{name:<9}{len(code) - instructions['copied']:>3} instructions, on the exponential unit: {on_the_unit}")
measured("19 instructions for one power", instructions["yours"] - instructions["copied"], "instructions")

# %% [markdown]
# `tl.exp2` is more than one instruction, because it also takes care of results below $2^{-126}$, which your function
# need not do.
#
# What does the polynomial's error do? It is the same for the same $x$, but a kernel that computes some of its columns
# this way and others with `ex2` mixes two slightly different functions. In FlashAttention-4 which columns these are
# depends on the kernel's variant. So prefill and decode, which agreed to the last bit before, no longer did
# ([flash-attention#2596](https://github.com/Dao-AILab/flash-attention/issues/2596)).
