# %% [markdown]
# # 19 · What Blackwell changes: FlashAttention-4, recomputed
#
# **The question.** Blackwell is the generation of NVIDIA's GPUs after Hopper. Take 128 queries and 128 keys with head
# dimension 128. One multiprocessor of an H100, a Hopper, needs 2,048 cycles for the two matrix products of attention.
# One of a B200, a Blackwell, needs 1,024, because its tensor cores are twice as fast. But there are also 16,384
# exponentials, one for each score. Both GPUs compute 16 of them in a cycle, so they take 1,024 cycles on either. On the
# H100 the exponentials can hide behind the products. On the B200 they take as long as the products. What would you
# change in the kernel?
#
# Write down three answers: something that you would compute on another unit, something that you would not compute at
# all, and something that you would keep in another memory.
#
# FlashAttention-4 is a kernel for Blackwell GPUs that does all three. In this chapter you recompute where its figures
# come from, write its ideas yourself, and put them together into one forward pass.
#
# **You need no Blackwell.** Nothing in this chapter has run on one, because we had none. You count cycles, run kernels
# in the interpreter or on the GPU at hand, and play schedules on a model. Figures that others measured on a Blackwell
# are quoted with their source.
#
# **Time.** About six hours for all seven exercises, estimated. The **core path** takes two and a quarter: exercises
# 19.1, 19.2 and 19.3, and every section whose heading does not end in *deeper*. You need chapters 03 and 04. Some
# deeper sections use chapters 09 (warps with roles), 10 (the backward pass), 12 (FP8) and 18 (e4m3 with scales).

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import (
    check, default_device, hint, interpreting, machine, measured, predict, progress, self_check, solution
)

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Which unit limits
#
# A *tile* is the rows of queries that one program works on, here 128. A *block* is the keys that the program takes at
# once, here 128 as well. Four units of a multiprocessor work on a tile and a block. They work at the same time, so the
# unit with the most work decides how long this takes.
#
# - The **tensor cores** compute two products, $S=QK^T$ and $O\mathrel{+}=PV$. In 16 bits they do 4,096 FLOPs a cycle on
#   an H100, and 8,192 on a B200.
# - The **exponential unit** computes the weights $P$ from the scores $S$, 16 a cycle on both GPUs.
# - **Shared memory** sends the tensor cores 128 bytes a cycle on both GPUs: $Q$, $K$ and $V$. A B200 keeps $S$, $P$ and
#   $O$ in *tensor memory*, a separate memory of 256 KiB beside the tensor cores.
# - The **multiply-add unit** does the rest: it scales the scores, finds their maximum, adds up the weights and converts
#   them to 16 bits. It starts 128 instructions a cycle, each for one number.
#
# At head dimension 128 the two products are $4\cdot128^3$ FLOPs: 2,048 cycles on an H100, and 1,024 on a B200. The
# exponentials take $128^2/16=1024$ cycles on both, and shared memory sends 96 KiB in 768. At head dimension 64 the
# products of a B200 take only 512 cycles, but there are as many exponentials as before. So the tensor cores wait half
# of the time.
#
# Multiply-adds can compute an exponential too, in about 9 instructions, as you will see in exercise 19.2. So you may
# give a *share* of the exponentials to the multiply-add unit. How large should it be at head dimension 64? A share of
# one half would bring the exponential unit down to the 512 cycles of the products. But the multiply-add unit already
# has work. Say 4 instructions for each score: $128^2\cdot4/128=512$ cycles. Half of the exponentials add 576, so now
# this unit takes 1,088 cycles. The best share is the one at which both units take equally long. **Predict** it.

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
# At a share of $s=0.235$ both units take equally long: $1024\cdot(1-s)=512+1152\cdot s=783$ cycles, instead of 1,024. A
# B300, another Blackwell, computes 32 exponentials a cycle, so there is nothing left to gain.
#
# The table takes all units to be busy all the time. In a real kernel they wait for each other, so count first, and then
# measure. For a B200 at head dimension 128 the table gives a share of 0, but FlashAttention-4 gives away an eighth with
# a causal mask and three sixteenths without. It takes the last few numbers of every *period*. A sweep without a mask
# over five periods on a Blackwell found no simple rule: 8, 10, 14, 16 and 24 numbers reached 1,332, 1,250, 1,568, 1,567
# and 1,553 TFLOP/s ([flash-attention#2398](https://github.com/Dao-AILab/flash-attention/pull/2398)).

# %% [markdown]
# The next cell draws the cycles over the share. Each line is one unit, and the highest line says how long the tile
# takes. In a live notebook you can choose the GPU, the head dimension and the instructions of a polynomial. Try 5
# instead of 9: the best share is then 31 %.

# %%
from course_lib.figures.blackwell.shares import choose_share

choose_share("B200", 64)

# %% [markdown]
# ## 2^x from multiply-adds
#
# How do you compute $2^x$ from multiplications and additions? Cut $x$ in two: the whole number below it,
# $\lfloor x\rfloor$, and the fraction $f=x-\lfloor x\rfloor$, from 0 to 1. Then $2^x=2^{\lfloor x\rfloor}\cdot2^f$.
#
# **The fraction.** The polynomial $1+C_1f+C_2f^2+C_3f^3$ comes close to $2^f$. The coefficients in the cell are the
# best ones for $f$ from 0 to 1. They err by at most 8.6e-5, where rounding to bfloat16 errs by up to 3.9e-3. *Horner's*
# way takes three multiply-adds: $((C_3f+C_2)f+C_1)f+1$.
#
# **The whole number.** A float32 has a sign bit, 8 bits of exponent and 23 of mantissa. If you read its bits as an
# integer and add $n\cdot2^{23}$, the float is multiplied by $2^n$. To read bits as another type is a *bitcast*, which
# costs nothing.
#
# **Rounding down by an addition.** `tl.floor` and `.to(tl.int32)` run on the exponential unit too, so you need another
# way. A float32 from 1024 to 2048 has 10 bits of its mantissa before the point, and 13 behind it. So add 1536 to $x$,
# read the bits, and clear the last 13. That rounds down, because the sum is positive. (The addition itself rounds to 13
# bits behind the point. An $x$ a hair below a whole number may get that number, with an $f$ a hair below 0, where the
# polynomial is as good.) Take $x=-2.7$:
#
# 1. The sum is 1533.3, and with 13 bits cleared it is 1533.
# 2. Subtract 1536, and you have $\lfloor x\rfloor=-3$ and $f=0.3$. The polynomial gives 1.2311.
# 3. Shift the cleared bits left by 10. All that belongs to 1536 falls out at the top, and $-3$ stands where a float32
#    has its exponent.
# 4. Add this to the bits of 1.2311. They become those of $1.2311/8=0.1539$, which is $2^{-2.7}$.
#
# **The lower end.** Masked scores are $-\infty$, and $-\infty-(-\infty)$ is NaN. Also, the exponent bits of a float32
# cannot stand for less than $-127$. A trading library forgot this, and its `exp` gave $-\infty$ for an exponent of
# $-128$ ([nautilus_trader#4709](https://github.com/nautechsystems/nautilus_trader/pull/4709)). So first replace
# everything below $-127$ by $-127$. There the polynomial gives 1, which stores 127 as its exponent. With 127
# subtracted, all bits are 0.
#
# The next cell prints the 32 bits of these steps. The blanks stand after the sign, after the exponent, and where the
# point of the sum lies.

# %%
def show_bits(name, bits):
    word = f"{int(bits) & 0xFFFFFFFF:032b}"
    print(f"{name:<38}{word[0]} {word[1:9]} {word[9:19]} {word[19:]}")


example = torch.tensor(-2.7)
total = (example + 1536).view(torch.int32)
cleared = total & -8192
fraction = example - (cleared.view(torch.float32) - 1536)
power = torch.exp2(fraction)  # in place of the polynomial
show_bits("x + 1536 = 1533.3", total)
show_bits("cleared: 1533", cleared)
show_bits("shifted left by 10: -3 as an exponent", cleared << 10)
show_bits("2^0.3 = 1.2311", power.view(torch.int32))
show_bits("their sum", power.view(torch.int32) + (cleared << 10))
print((power.view(torch.int32) + (cleared << 10)).view(torch.float32).item(), 2**-2.7)

# %% [markdown]
# Attention rounds its weights to bfloat16 before it multiplies them with V. **Predict** how many percent of the powers
# from this polynomial are the bfloat16 number nearest to $2^x$.

# %%
predict("19 powers that are the nearest bfloat16", ..., "%")

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
    in_tile = tl.arange(0, COLUMNS)  # [COLUMNS]
    if ROWS > 1:
        in_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + in_tile[None, :]  # [ROWS, COLUMNS]
    offsets = tl.program_id(0) * ROWS * COLUMNS + in_tile
    x = tl.load(x_pointer + offsets, mask=offsets < length, other=0.0)
    tl.store(out_pointer + offsets, exp2_polynomial(x), mask=offsets < length)


def powers(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """2^x of a contiguous float32 tensor, by your function on tiles [rows, columns] or [columns]. Leave it as it is."""
    out = torch.empty_like(x)
    powers_kernel[(triton.cdiv(x.numel(), rows * columns),)](x, out, x.numel(), ROWS=rows, COLUMNS=columns)
    return out

# %%
best_powers = check("19.2", powers).best
best_exp2_polynomial = best_powers.__globals__["exp2_polynomial"]  # the function that it calls: yours, once it passed

# %% [markdown]
# The next cell compiles kernels for an H100 in which a thread computes 32 powers, and counts their instructions. It
# subtracts those of a kernel that only copies. `MUFU`, `FRND`, `F2I` and `I2F` run on the exponential unit.

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

# %% [markdown]
# (Here and below, *yours* is the course's function until yours has passed.) The course's answer takes nine: a maximum,
# three additions, one that clears bits, three multiply-adds, and one that shifts and adds at once. At 128 instructions
# a cycle that makes at most 14 powers a cycle, beside the 16 of the exponential unit.
#
# The next cell compares polynomials of degree 2 to 5 with $2^x$, before and after rounding to bfloat16.

# %%
from course_lib.kernels.common.exponentials import exp2_polynomial_reference

x = -20 * torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
exact = torch.exp2(x.double())
print(f"{'degree':>6}{'largest error':>15}{'in bfloat16':>13}{'nearest bfloat16':>18}")
nearest = {}
for degree in (2, 3, 4, 5):
    by_polynomial = exp2_polynomial_reference(x, degree)
    errors = [((number.double() - exact) / exact).abs().max().item()
              for number in (by_polynomial, by_polynomial.bfloat16())]
    nearest[degree] = 100 * (by_polynomial.bfloat16() == exact.bfloat16()).double().mean().item()
    print(f"{degree:>6}{errors[0]:>15.1e}{errors[1]:>13.1e}{nearest[degree]:>16.2f} %")
measured("19 powers that are the nearest bfloat16", nearest[3], "%")

# %% [markdown]
# Degree 3 is enough. Its own error is 45 times smaller than that of rounding to bfloat16, so after rounding 99 % of the
# powers are the nearest number, and the others are its neighbour. Degree 2 saves one instruction and is wrong in a
# quarter of all cases. Degree 4 costs one more, and nobody would see the difference.
#
# On an H200 there is nothing to gain, as the table of 19.1 says for the H100. At head dimension 64 an earlier version
# of the course's kernel with warp roles fell from 533 to 494 TFLOP/s when it moved one of eight exponentials. The plain
# Triton kernel of the finale became slower in all twelve cases that were measured, when it moved one of four.
#
# A share also mixes two slightly different functions. In FlashAttention-4, blocks with a mask once used the exponential
# unit alone and others the share. So prefill and decode, which mask different blocks, no longer agreed to the last bit
# ([flash-attention#2596](https://github.com/Dao-AILab/flash-attention/issues/2596), since mended).

# %% [markdown]
# ## Rescale only when it must be
#
# The online softmax of chapter 03 keeps three things for each row: the maximum of its scores, the row sum of its
# weights, and its output. When a block raises the maximum, the row sum and the output are *rescaled*: multiplied by
# $2^{\text{old}-\text{new}}$, where scores are in base 2. On a Blackwell the output lies in tensor memory. A program
# must read it from there and write it back, 64 KiB each way for 128 rows of 128 float32 numbers. Until this is done,
# the next product cannot be added.
#
# Most of this can be saved. What is subtracted from the scores of a row is called its *reference* $r$, and it cancels:
#
# $$\text{output}=\frac{\sum_i2^{s_i-r}v_i}{\sum_i2^{s_i-r}},\qquad
# \text{lse}=\ln2\cdot\left(r+\log_2\sum_i2^{s_i-r}\right)$$
#
# So any reference will do with which no weight overflows. FlashAttention-4 keeps the old reference as long as the
# maximum exceeds it by at most a *threshold* of 8. Weights may then reach $2^8=256$, and even float16 goes up to
# 65,504.
#
# Take a row with two blocks of one key each, with the scores 3 and 7 and the values 10 and 20. The reference starts as
# 3 and stays 3. The weights are 1 and $2^4=16$, the row sum is 17, and the output is $(10+320)/17=19.41$. With the
# reference 7 the weights are 1/16 and 1, the row sum is 1.0625, and the output is $20.625/1.0625=19.41$. In base 2 the
# log-sum-exp, `lse`, is $3+\log_2 17=7.09$, or $7+\log_2 1.0625=7.09$. But the maximum 7 with the row sum 17 would give
# 11.09: reference, row sum and output belong together.
#
# AMD's kernels had a fault of just this kind ([rocm-libraries#6498](https://github.com/ROCm/rocm-libraries/pull/6498)).
# They computed the weights from the new maximum, even where row sum and output still belonged to the old one. Generated
# images became worse.
#
# The threads of a warp execute the same instruction, so a branch saves time only if all of them skip it. In the
# exercise one program decides for its whole tile: if any row needs a rescale, all rows are rescaled. The next cell
# draws normal scores for tiles of 128 rows and 64 blocks of 128 keys. Their standard deviation is 3 before they are
# brought to base 2. With a threshold of 0, the tile is rescaled in nearly all of the 63 later blocks. **Predict** in
# how many of them it is rescaled with a threshold of 8.

# %%
predict("19 rescales of a tile, threshold 8", ..., "of 63 blocks")

# %%
def average_rescales(maxima, rows_of_a_tile, threshold):
    """How often a tile is rescaled. maxima: [rows, blocks], the largest score of each row in each block."""
    reference, *others = maxima.view(-1, rows_of_a_tile, maxima.shape[1]).unbind(2)
    count = 0.0
    for largest in others:
        must = (largest - reference > threshold).any(dim=1, keepdim=True)
        reference = torch.where(must, torch.maximum(reference, largest), reference)
        count += float(must.float().mean())
    return count


generator = torch.Generator().manual_seed(0)
print("rescales           one row            128 rows")
print("threshold         0        8         0        8")
for deviation in (1, 2, 3, 4):
    normal = torch.randn(1024, 64, 128, generator=generator)
    maxima = deviation * math.log2(math.e) * normal.amax(dim=2)
    counts = [average_rescales(maxima, rows, threshold) for rows in (1, 128) for threshold in (0, 8)]
    print(f"deviation {deviation}" + "".join(f"{count:9.2f}" for count in counts))
    if deviation == 3:
        shown = measured("19 rescales of a tile, threshold 8", counts[-1], "of 63 blocks")
print(shown)

# %% [markdown]
# Up to a deviation of 2 nothing is rescaled at all with a threshold of 8. With a threshold of 0, a single row is
# rescaled only 4 times, but a tile is rescaled in nearly every block. So the threshold saves far more for a tile.
# Whether fewer rescales also take less time depends on the GPU. The finale has figures of an H200.

# %%
# Exercise 19.3 · Rescale lazily
@triton.jit
def lazy_kernel(
    query_pointer, key_pointer, value_pointer, out_pointer, lse_pointer, rescales_pointer,
    rows, keys, scale, threshold, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr,
):
    """One program: one tile of BLOCK_ROWS queries. You may change the arguments."""
    # BEGIN SOLUTION
    tile = tl.program_id(0)
    row = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS]
    column = tl.arange(0, DIM)[None, :]  # [1, DIM]
    present = row < rows
    queries = tl.load(query_pointer + row[:, None] * DIM + column, mask=present[:, None], other=0.0)
    reference = tl.zeros([BLOCK_ROWS], tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    out = tl.zeros([BLOCK_ROWS, DIM], tl.float32)
    rescales = 0
    for start in range(0, keys, BLOCK_KEYS):
        place = start + tl.arange(0, BLOCK_KEYS)  # [BLOCK_KEYS]
        inside = (place < keys)[:, None]
        key_tile = tl.load(key_pointer + place[:, None] * DIM + column, mask=inside, other=0.0)
        value_tile = tl.load(value_pointer + place[:, None] * DIM + column, mask=inside, other=0.0)
        scores = tl.dot(queries, tl.trans(key_tile), input_precision="ieee") * scale  # [BLOCK_ROWS, BLOCK_KEYS]
        scores = tl.where((place < keys)[None, :], scores, float("-inf"))
        largest = tl.max(scores, axis=1)
        if start == 0:
            reference = largest
        must = tl.max(((largest - reference > threshold) & present).to(tl.int32), axis=0)
        if must > 0:
            renewed = tl.maximum(reference, largest)
            rescale = tl.exp2(reference - renewed)
            total *= rescale
            out *= rescale[:, None]
            reference = renewed
        rescales += must
        weights = tl.exp2(scores - reference[:, None])
        total += tl.sum(weights, axis=1)
        out = tl.dot(weights.to(value_tile.dtype), value_tile, out, input_precision="ieee")
    out = out / total[:, None]
    tl.store(out_pointer + row[:, None] * DIM + column, out.to(out_pointer.dtype.element_ty), mask=present[:, None])
    tl.store(lse_pointer + row, (reference + tl.log2(total)) * 0.6931471805599453, mask=present)
    tl.store(rescales_pointer + tile, rescales)
    # END SOLUTION


def lazy_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_rows: int, block_keys: int, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention that rescales only where it must, by one launch of your kernel.

    query: [rows, dim]. key, value: [keys, dim]. Rows and keys are at least 1 of each, and dim is 16, 32, 64 or 128.
        All are float32 or all float16 (bfloat16 too, on a GPU that has it), contiguous, of fewer than 2³¹ elements.
        Every query sees all keys. A score is query · key / √dim, between -10⁴ and 10⁴.
    block_rows, block_keys: the rows of a tile, and the keys of a block: powers of two, 16 to 128. One program takes a
        tile of rows and goes through the keys block by block, in ascending order. Neither need divide rows or keys.
    threshold: 0 to 8, in base 2. The scores, too, are compared in base 2: multiplied by log2(e).
    Returns: (out, lse, rescales).
    - out: [rows, dim] of query's dtype, contiguous. Products have float32 sums. tf32 is accepted, but it may change a
      decision: take input_precision="ieee".
    - lse: float32 [rows], the natural logarithm of the sum of e^score over all keys.
    - rescales: int32 [tiles], how often each tile was rescaled. The reference of a row starts as its maximum over the
      first block, and that is no rescale. If in a later block the maximum of any row of the tile exceeds its reference
      by more than threshold, the tile is rescaled: the reference of each row becomes the larger of its reference and
      its maximum in this block. Else all references of the tile stay. Rows behind the last one, in a tile that is not
      full, cause nothing.
    In each block, the largest excess of a tile's rows is at least 0.02 away from threshold, or both are exactly 0, so
    rounding decides nothing. A program loads its queries once, and each key and value once. Bytes are counted.
    """
    # BEGIN SOLUTION
    (rows, dim), keys = query.shape, len(key)
    tiles = triton.cdiv(rows, block_rows)
    out = torch.empty_like(query)
    lse = torch.empty(rows, dtype=torch.float32, device=query.device)
    rescales = torch.empty(tiles, dtype=torch.int32, device=query.device)
    lazy_kernel[(tiles,)](
        query, key, value, out, lse, rescales, rows, keys, math.log2(math.e) / math.sqrt(dim), threshold,
        DIM=dim, BLOCK_ROWS=block_rows, BLOCK_KEYS=block_keys,
    )
    return out, lse, rescales
    # END SOLUTION

# %%
best_lazy_attention = check("19.3", lazy_attention).best

# %% [markdown]
# The next cell shows one row over 64 blocks, whose scores slowly rise. In a live notebook, move the slider: at 0 the
# reference follows the maximum, and at 8 it moves only twice.

# %%
from course_lib.figures.blackwell.thresholds import choose_threshold

generator = torch.Generator().manual_seed(19)
choose_threshold(6 * torch.randn(64, 128, generator=generator).amax(dim=1) + torch.linspace(0, 10, 64), 8.0)

# %% [markdown]
# In the next cell the scores climb from block to block, first by 7.9 and then by 8.1. With 7.9 every second block
# rescales, because two steps exceed 8. The log-sum-exp agrees with PyTorch's in both cases.

# %%
for step in (7.9, 8.1):
    query = torch.ones(16, 16, device=device) * 0.25
    climbs = step * math.log(2) * (torch.arange(96, device=device) // 16)
    key = climbs[:, None].expand(96, 16).contiguous()  # the score, 16 · 0.25 · key / √16, is the key's number
    value = torch.arange(96.0, device=device)[:, None].expand(96, 16).contiguous()
    out, lse, rescales = best_lazy_attention(query, key, value, 16, 16, 8.0)
    right = torch.logsumexp(query @ key.T / 4, dim=1)
    print(f"steps of {step}: {int(rescales[0])} rescales in 5 blocks, lse {lse[0]:.4f}, PyTorch's {right[0]:.4f}")

# %% [markdown]
# ## Weights of eight bits, and how far a reference may lag · deeper
#
# A Blackwell multiplies numbers of 8 bits at twice the rate of 16. To use that, the weights of attention must be
# rounded to 8 bits before they are multiplied with V. In *e4m3*, which has four bits of exponent and three of mantissa,
# the largest number is 448 and the smallest above 0 is $2^{-9}$. If the reference of a row is its maximum, its weights
# lie between 0 and 1, and those below $2^{-10}$ become 0. So kernels add a *shift*, usually 8, to each exponent:
#
# $$\text{weight}=2^{\,\text{score}-\text{reference}+\text{shift}}$$
#
# Now the largest weight is 256, and weights are kept down to $2^{-18}$ of it. The row sum has the factor $2^8$ as well,
# so the quotient, output over row sum, does not change.
#
# With lazy rescaling a score may exceed the reference. The *head room* is the largest excess whose weight still fits in
# the format. In base 2 it is $\log_2 448-8=0.807$ for e4m3. For *e5m2*, which has five bits of exponent and two of
# mantissa, it is $\log_2 57344-8=7.807$.
#
# Take a row with two keys in two blocks, with the scores 0 and 4, and let both values be 1. The output is an average of
# the values, so it must be 1.
#
# - With a threshold of 4 the reference stays 0. The weights are $2^8=256$ and $2^{12}=4096$, and the row sum is 4,352.
#   But in e4m3 the second weight becomes 448, so the output is $(256+448)/4352=0.16$.
# - With a threshold of 0.75 the second block makes 4 the reference, and 256 is rescaled to 16. The output is
#   $(16+256)/272=1$.
#
# FlashAttention-4 made this mistake with a threshold of 4 for 8 bits. At 128 keys the cosine similarity with the output
# in 16 bits fell to 0.86 ([flash-attention#2577](https://github.com/Dao-AILab/flash-attention/issues/2577)). It used
# one shift and one threshold for both formats. So e4m3 had up to 1.6 times the error of e5m2, although it has one bit
# of mantissa more ([flash-attention#2717](https://github.com/Dao-AILab/flash-attention/pull/2717)). A smaller threshold
# costs time: with 0.75 instead of 4 the forward pass took 11 % longer at 8,192 keys, on a GPU that is not named
# ([vllm-project/flash-attention#166](https://github.com/vllm-project/flash-attention/pull/166)).
#
# The next cell computes rows of 8,192 scores whose standard deviation is 1 before they are brought to base 2. Their
# reference is the maximum of the first 128 keys, which a threshold of 4 leaves as it is in nearly every row. With each
# row's own maximum as the reference, rounding to e4m3 would change the output by 2.7 %. **Predict** by how many percent
# it changes where weights are cut off at 448.

# %%
predict("19 error of FP8 attention, threshold 4", ..., "%")

# %%
generator = torch.Generator().manual_seed(0)
scores = (torch.randn(256, 8192, generator=generator) * math.log2(math.e) * 64).round() / 64
value = torch.randn(8192, 16, generator=generator).to(torch.float8_e4m3fn)
exact = torch.softmax(scores.double() * math.log(2), dim=1) @ value.double()


def off_by(out):
    return float(100 * (out - exact).norm() / exact.norm())


lagging = scores[:, :128].amax(dim=1, keepdim=True)
weights = torch.exp2(scores - lagging + 8)
cut = weights.clamp(max=448).to(torch.float8_e4m3fn).float()
error = off_by(cut @ value.float() / weights.sum(dim=1, keepdim=True))
print(f"{(weights > 448).sum(dim=1).float().mean():.1f} of 8,192 weights of a row are cut off")
measured("19 error of FP8 attention, threshold 4", error, "%")

# %% [markdown]
# Only a few weights of a row are cut off, but they are its largest. In the exercise, your function lowers the threshold
# to the head room of the format where it has to.

# %%
# Exercise 19.4 · The head room of FP8
def head_room(dtype: torch.dtype, shift: int) -> float:
    """By how much, in base 2, a score may exceed its row's reference, so that its weight still fits in the format.

    dtype: torch.float8_e4m3fn or torch.float8_e5m2. shift: a whole number, 0 to 8, for e5m2 to 15.
    Returns: the largest x, one number, for which 2^(x + shift) is not above the format's largest number, in the
    precision of float32.
    """
    # BEGIN SOLUTION
    return math.log2(torch.finfo(dtype).max) - shift
    # END SOLUTION


def fp8_attention(
    scores: torch.Tensor, value: torch.Tensor, dtype: torch.dtype, shift: int, threshold: float, block: int
) -> torch.Tensor:
    """The output of attention from its scores, with weights that are rounded to 8 bits.

    scores: float32 [rows, keys] in base 2: the weights are powers of 2, not of e. They are whole multiples of 1/64
        between -10⁴ and 10⁴, so their differences are exact, and no weight lies half way between two codes.
    value: [keys, dim], of `dtype`; its numbers are finite. Rows, keys and dim are at least 1 of each, and both
        tensors are contiguous.
    dtype: torch.float8_e4m3fn or torch.float8_e5m2. shift: as above. threshold: 0 to 16, a multiple of 1/64.
    block: the number of keys in a block, at least 1. It need not divide the keys: the last block may have fewer.
    Returns: float32 [rows, dim]. Each row goes by itself through the blocks of keys, in ascending order. Its reference
    starts as its maximum over the first block. If its maximum over a later block exceeds the reference by more than
    min(threshold, head room), that maximum becomes the reference, and the row sum and the output are multiplied by
    2^(old - new). Else the reference stays. Weights are 2^(score - reference + shift) in float32. The row sum adds
    them as they are. The products with value take them rounded to dtype, and are added up in float32. The result is
    output / row sum.
    """
    # BEGIN SOLUTION
    limit = min(threshold, head_room(dtype, shift))
    reference = scores[:, :block].amax(dim=1)
    total = torch.zeros_like(reference)
    out = torch.zeros(len(scores), value.shape[1], device=scores.device)
    for part, values in zip(scores.split(block, dim=1), value.split(block)):
        largest = part.amax(dim=1)
        renewed = torch.where(largest > reference + limit, largest, reference)
        rescale = torch.exp2(reference - renewed)
        weights = torch.exp2(part - renewed[:, None] + shift)
        total = total * rescale + weights.sum(dim=1)
        out = out * rescale[:, None] + weights.to(dtype).float() @ values.float()
        reference = renewed
    return out / total[:, None]
    # END SOLUTION

# %%
best_head_room, best_fp8_attention = check("19.4", head_room, fp8_attention).best

# %% [markdown]
# With your function a threshold of 4 does no harm, because in e4m3 it acts as 0.807. The error is that of rounding to
# three bits of mantissa, as with a threshold of 0.

# %%
for threshold in (0.0, 0.75, 4.0):
    out = best_fp8_attention(scores, value, torch.float8_e4m3fn, 8, threshold, 128)
    print(f"threshold {threshold:<5} error {off_by(out):.1f} %")

# %% [markdown]
# ## Who lies where in tensor memory · deeper
#
# Tensor memory has 512 *columns*, and each column has 128 *lanes* of 4 bytes. A tile of 128 rows uses one lane for each
# row. A multiprocessor works on two tiles of queries at once: while the softmax of one tile runs, the tensor cores
# multiply for the other. For head dimension 128 and blocks of 128 keys each tile needs:
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
# Where P shares columns with S, the next scores must not arrive before P has been read. Three kinds of warps take part:
#
# - The *product warp* starts the products of both tiles. It goes on at once, and the tensor cores run the products in
#   the order in which they were started.
# - Each tile has a *softmax group*, which reads S and writes P.
# - One *correction group* serves both tiles. It rescales O before the next product adds to it.
#
# You also write the steps of the product warp. Suppose that it starts the scores of block 1 before the output product
# of block 0. Then the new scores overwrite weights that were not read yet. A reader of FlashAttention-4 asked about
# this, because no barrier stands between the two products
# ([flash-attention#2196](https://github.com/Dao-AILab/flash-attention/issues/2196)). Only their order keeps them apart.
#
# The correction is no product, so the product warp has to wait for it. In vLLM's copy of FlashAttention the correction
# for head dimension 256 reported that it was done while it might still be reading O
# ([vllm-project/flash-attention#182](https://github.com/vllm-project/flash-attention/pull/182)). The next product could
# then overwrite O.
#
# The warp must also keep the tensor cores busy. Suppose that a product takes 10 ticks and a softmax 20. A block needs
# four products, two for each tile: 40 ticks. If two tiles took turns, a block would take 80, because one tile alone
# needs 10 + 20 + 10 = 40. If one tile's products run during the other's softmax, both take 40 together. **Predict** how
# many ticks your warp takes for six blocks, from the beginning of the first product to the end of the last.

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
# The next cell plays your warp on your plan: six blocks, with 10 ticks a product, 20 a softmax and 5 a correction.
# These ticks are made up.

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
# It should be about 260 ticks. The tensor cores work in 240 of them. They wait for 10 ticks after the first scores and
# for 10 before the last output, and never in between. If a softmax took 40 ticks, one tile alone would need 60 for a
# block. There are only 40 ticks of products in that time, so the tensor cores would idle for a third of it.

# %% [markdown]
# **The real kernel.** `course_lib/kernels/blackwell/flash.py` is an attention kernel for a B200, with these roles, this
# plan and your order of products. It is written in Gluon, a language one level below Triton. Nothing has run it on a
# Blackwell. But it can be compiled without one, and its source was played on a CPU in many orders of events, as your
# product warp was. The next cell compiles it for a B200 (sm_100) and counts a few instructions. `tcgen05.mma` starts a
# product, `tcgen05.ld` and `tcgen05.st` move rows between tensor memory and registers.
#
# One such instruction multiplies 128 rows by 128 columns, over 16 numbers of the inner dimension. **Predict** how
# many `tcgen05.mma` one product $Q K^T$ of 128 × 128 × 128 needs.

# %%
predict("19 tcgen05.mma of one product", ..., "instructions")

# %%
from course_lib.kernels.blackwell.flash import compile_cases

(case,) = [case for case in compile_cases() if case.label.startswith("bf16 128")]
(view,) = compile_many(case.requests())
started = {"tcgen05.mma": "tcgen05.mma.cta", "tcgen05.ld": "tcgen05.ld.sync", "tcgen05.st": "tcgen05.st.sync"}
counts = {name: view.ptx.count(words) for name, words in started.items()}
print(f"{counts}; {view.spill_bytes} bytes of spills")
measured("19 tcgen05.mma of one product", counts["tcgen05.mma"] // 6, "instructions")

# %% [markdown]
# The code has six products: the first scores of both tiles, and in the loop the output and the next scores of both.
# Each is $128 / 16 = 8$ instructions, started by one thread. On a Hopper, four warps would start each product together,
# and its result would fill their registers.

# %% [markdown]
# ## Two multiprocessors, one product · deeper
#
# The backward pass multiplies five times where the forward pass multiplies twice (chapter 10), but has no more
# exponentials. So the slowest is shared memory:
#
# | product | operands in shared memory | in tensor memory |
# |---|---|---|
# | $S = Q K^T$ | Q, K | |
# | $dP = dO \, V^T$ | dO, V | |
# | $dV \mathrel{+}= P^T dO$ | dO | P |
# | $dK \mathrel{+}= dS^T Q$ | Q | dS |
# | $dQ = dS \, K$ | dS, K | |
#
# For 128 queries and keys at head dimension 128, each operand has 32 KiB and takes 256 cycles, at 128 bytes a cycle.
# All eight take 2,048. Two more things move:
#
# - The last product needs dS in shared memory, where it is written in 256 cycles.
# - dQ is a sum over *all* keys, but a program has only its own block. It writes its part in float32 to shared memory,
#   from where the copy engine adds it to global memory. To write and to read these 64 KiB takes 1,024 cycles.
#
# **Predict** how many cycles shared memory takes, beside the 2,560 of the five products.

# %%
predict("19 cycles of shared memory in the backward", ..., "cycles")

# %%
from course_lib.hardware.cycles import CHIPS, backward, forward

B200 = CHIPS["B200"]
print(f"{'':<26}{'products':>10}{'exponentials':>14}{'shared memory':>15}")
for name, cycles in (("forward", forward(B200)), ("forward, in pairs", forward(B200, pair=True)),
                     ("backward", backward(B200)), ("backward, in pairs", backward(B200, pair=True))):
    print(f"{name:<26}{cycles.products:>10,.0f}{cycles.exponentials:>14,.0f}{cycles.shared_memory:>15,.0f}")
measured("19 cycles of shared memory in the backward", backward(B200).shared_memory, "cycles")

# %% [markdown]
# Shared memory takes 3,328 cycles, 30 % more than the products. Faster tensor cores gain nothing here, unless fewer
# bytes are read.
#
# On a Blackwell two multiprocessors, a *pair*, can run one product of 256 rows together. Each keeps its own 128 rows of
# the first operand, and half of the second. In the forward pass shared memory then takes 512 cycles instead of 768.
#
# In the backward pass the two have different keys, so they exchange half of dS. Then each has *all* keys of the pair
# for *half* of the queries, and computes the pair's sum of dQ for those. So they add half as many numbers to global
# memory as before. By our count this takes 2,560 cycles, as long as the products: 1,536 for operands, 256 to write dS,
# 256 for the exchange, and 512 for dQ. (Half of dS has 16 KiB, which take 128 cycles: half is read to be sent, and half
# is written by the other one. The operands are 6 instead of 8 tiles of 32 KiB: the second operand counts half in the
# first four products, and the last has half the rows of dS over twice as many keys.) The paper on FlashAttention-4 says
# 2,688, which we could not reproduce.
#
# The exchange pays on Hopper too. A change proposed to FlashAttention raised the backward pass for head dimension 256
# from 471 to 530 TFLOP/s by it (one H200, 16k tokens). With the additions to global memory left out, which gives wrong
# results, the old kernel ran at 747: they cost most
# ([flash-attention#2889](https://github.com/Dao-AILab/flash-attention/pull/2889)).
#
# **Equal bits in every run.** Float32 sums depend on the order of the additions (chapter 10). For a fixed order, each
# tile of dQ has a counter: a program waits for its turn, adds, and counts up. Suppose that 16 programs, one for each
# block of keys, visit 16 tiles of dQ, and each visit takes one step. **Predict** how many steps this takes if all go
# through the tiles from 0 to 15.

# %%
predict("19 steps with turns, all from tile 0 on", ..., "steps")

# %%
def steps_with_turns(programs, tiles, first):
    """Steps until all is added. Program p visits tile first(p), then the next, and so on around; in turn at each."""
    visits = [[(first(program) + step) % tiles for step in range(tiles)] for program in range(programs)]
    # The turns at a tile: who would come first if nobody had to wait; of those who come together, the lower number.
    turns = [sorted(range(programs), key=lambda program: (visits[program].index(tile), program))
             for tile in range(tiles)]
    done, steps = [0] * programs, 0
    while any(count < tiles for count in done):
        ready = [program for program in range(programs) if done[program] < tiles
                 and turns[visits[program][done[program]]][0] == program]
        for program in ready:
            turns[visits[program][done[program]]].pop(0)
            done[program] += 1
        steps += 1
    return steps

together = steps_with_turns(16, 16, lambda program: 0)
apart = steps_with_turns(16, 16, lambda program: program)
print(f"all begin at tile 0: {together} steps; program p begins at tile p: {apart} steps")
measured("19 steps with turns, all from tile 0 on", together, "steps")

# %% [markdown]
# If all begin at tile 0, the last program waits 15 steps before it adds. If each begins at another tile, nobody waits,
# and the bits are still equal in every run. FlashAttention-4 reports for its backward pass 1,248 TFLOP/s with one
# multiprocessor and 1,360 with a pair. In a fixed order they reach 980 and 1,167
# ([flash-attention#2280](https://github.com/Dao-AILab/flash-attention/pull/2280); a Blackwell that is not named, head
# dimension 128, 8k tokens).

# %% [markdown]
# ## The longest first · deeper
#
# Under a causal mask a tile of queries reads all blocks of keys up to its own. With 4,096 tokens in tiles and blocks of
# 128, a head has 32 tiles, which read 1 to 32 blocks. Each tile is a program. A free multiprocessor, here called a
# *slot*, takes the next program of the list. The order of the list decides when the last program ends.
#
# Take four programs of 1, 2, 3 and 4 units of time on two slots. In this order one slot runs 1 and 3, and the other 2
# and 4, which ends at 6. With the longest first, they run 4 and 1, and 3 and 2. Both end at 5, an *even share* of the
# 10 units. The longest first takes at most a third longer than the best order
# ([Graham, 1969](https://doi.org/10.1137/0117039)), because short programs fill the gaps at the end.
#
# A plain grid starts the tiles head by head, and in each head the shortest first. FlashInfer reversed first the tiles
# of each head, and later those of all heads ([flashinfer#3575](https://github.com/flashinfer-ai/flashinfer/pull/3575)).
# But then all heads are at work at once, and their keys and values may not fit in the L2 cache. At head dimension 128
# in 16 bits, one head has 2 · 4,096 · 128 · 2 bytes = 2 MiB of them. An H200's L2 has 50 MiB, room for 25 such heads.
# So FlashAttention-4 cuts the heads into *sections*: as many heads as fit, rounded down to a power of two, which is 16
# here. In a section the last tile of each of its heads comes first, then the tile before, and so on.
#
# The list must not be dealt out in advance. On an H200 a user gave each of the 132 multiprocessors every 132nd tile. At
# 16,384 tokens this reached 575 TFLOP/s, and one program for each tile 623
# ([flash-attention#2754](https://github.com/Dao-AILab/flash-attention/pull/2754)).
#
# Now take 16 heads of 4,096 tokens on an H200. Each has 1 + 2 + … + 32 = 528 blocks, so an even share is 16 · 528 / 132
# = 64 blocks. **Predict** after how many blocks a plain grid ends. In the exercise a tile has a *row*: row 0 is the
# first tile of its head.

# %%
predict("19 end of a plain grid", ..., "blocks")

# %%
# Exercise 19.6 · The longest first
import heapq


def makespan(works: list[int], slots: int) -> int:
    """When the last program ends. Whenever a slot is free, the next program of the list starts on it.

    works: how long each program runs, in the order of the list: ints, each at least 1 and at most 10⁹. There may be
        5,000 of them, and the list may be empty.
    slots: 1 … 1,000. All are free at time 0, and each runs one program at a time, from beginning to end.
    Returns: the time at which the last of the programs ends, exactly; 0 if there are none.
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
    Returns: the largest power of two n for which all keys and values of query heads 0 … n - 1 fit. It is 1 if not even
    those of one key head fit.
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
    heads, tiles, section: at least 1. A head has the rows 0 … tiles - 1. The section may be larger than heads. All
        heads together may have 2⁴⁰ tiles, and no more, so do not loop over tiles, rows, heads or sections.
    Returns: (head, row), a tuple or list of two whole numbers.
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
# The next cell compares three orders. The tile of row $r$ reads $r+1$ blocks.

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
# The picture has four heads of eight tiles on seven slots. The plain grid ends at 25, because the longest tiles of the
# last head start late. In sections the short tiles come last, and the end is at 21.
#
# With 16 heads of 4,096 tokens the plain grid ends at 85 blocks, a third after the even share, and the sections end at
# 65 blocks. With 64 heads of 8,192 tokens the plain grid loses only 4 %, because each slot runs many tiles. This model
# does not show what sections save in the cache. On an H200 the authors of
# [FlashAttention-4](https://arxiv.org/abs/2603.05451) measured a gain of 4 to 8 % with a key head for each query head,
# and of 7 to 14 % with one for all. The finale has figures of the course's kernels, which start each head's longest
# tile first even without the order.

# %% [markdown]
# ## Four bits with scales · deeper
#
# A B200 multiplies numbers of four bits twice as fast as numbers of eight. Their format is called *e2m1*: a sign, two
# bits of exponent and one of mantissa. The sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and their *codes* are 0 to 7. So
# that other sizes can be stored too, a group of neighbours in a row shares a *scale*, which multiplies them. Such a
# group is called a block too, but here it has nothing to do with a block of keys. There are two formats:
#
# | | block | scale of a block | further scale | bits a number |
# |---|---|---|---|---|
# | **MXFP4** | 32 | $2^e$; one byte holds $e + 127$ | | 4 + 8/32 = 4.25 |
# | **NVFP4** | 16 | an 8-bit float, e4m3 | one float32 for a tensor or a row | 4 + 8/16 = 4.5 |
#
# **MXFP4.** If the largest number $L$ of a block exceeds 6 scales, it is cut off. So $e$ is $\log_2(L/6)$, rounded
# *up*. If $L$ is 6.5, then $e$ is 1 and the scale is 2. So $L$ becomes 3.25, and the nearest size is 3, which stands
# for 6. If $L$ is 10, it becomes 5, halfway between 4 and 6. Then the even one of both codes is taken: 4 has code 6 and
# 6 has code 7, so it is 4.
#
# The text of the standard takes $\lfloor\log_2L\rfloor-2$ instead, so $L$ may be almost 8 scales and is cut off. A
# project that compared both rules on one model measured a perplexity of 23.54 with the standard's and 22.50 with
# rounding up ([trinity#694](https://github.com/gHashTag/trinity/pull/694)). AMD's kernel library moved to rounding up
# because the standard's rule had cut off the largest number of 37 % of the blocks
# ([aiter#3212](https://github.com/ROCm/aiter/pull/3212)). MLX rounded $e$ to the nearest whole number. In its 8-bit
# format, a test with 512 blocks had 243 whose largest number lost more than a sixteenth, and up to 29 %
# ([mlx#4353](https://github.com/ml-explore/mlx/pull/4353)).
#
# **NVFP4.** An e4m3 number has all three bits of its mantissa from $2^{-6}$ up to its largest, 448. To use this range,
# a further scale divides all numbers first, so that the block with the largest one gets the scale 448. Each block's
# scale is then rounded to the nearest e4m3 number. That may make it too small by a seventeenth, so $L$ can be 6.375
# scales, which becomes 6. The parameters of a model have one further scale for a whole tensor. In attention each row
# has one, for a reason that the next section gives.
#
# Rounding up has a price too: $L$ then lies anywhere between 3 and 6 scales, while NVFP4 puts it near 6. After the
# exercise, a cell rounds 256 rows of 1,024 normal random numbers to both formats. **Predict** how many times as large
# the error of MXFP4 is as that of NVFP4.

# %%
predict("19 error of MXFP4 over NVFP4", ..., "times")

# %%
# Exercise 19.7 · Four bits with scales
def to_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers, already divided by their scale, as codes of four bits, two in a byte.

    numbers: float32 [rows, columns], contiguous, at least 1 row. columns is even, at least 2. At most 100 in size.
    Returns: uint8 [rows, columns / 2]. Byte i of a row has the code of number 2i in its low four bits, and that of
    number 2i + 1 in its high four bits. The lower three bits of a code, 0 … 7, say which of the sizes 0, 0.5, 1, 1.5,
    2, 3, 4, 6 is nearest to the number's. Exactly halfway between two of them it is the even one of both codes; beyond
    6 it is 7. The fourth bit is 1 for negative numbers. What becomes 0 may have either sign.
    """
    # BEGIN SOLUTION
    sizes = numbers.abs()[..., None]
    smaller_is_even, larger_is_even = torch.tensor([0.25, 1.25, 2.5, 5.0]), torch.tensor([0.75, 1.75, 3.5])
    codes = (sizes > smaller_is_even).sum(-1) + (sizes >= larger_is_even).sum(-1)
    codes += 8 * (numbers < 0)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    # END SOLUTION


def to_mxfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers in MXFP4.

    x: float32 [rows, columns], contiguous. At least 1 row; columns is a multiple of 32, at least 32. Each number is 0
        or between 1e-30 and 1e30 in size.
    Returns: (codes, exponents), uint8 [rows, columns / 2] and uint8 [rows, columns / 32]. Block i of a row are its
    numbers 32 · i … 32 · i + 31. The byte of its exponent is e + 127, where e is the smallest whole number for which
    the block's largest magnitude is at most 6 · 2^e. It is 0 if all numbers of the block are 0. The codes are those of
    the numbers divided by 2^e, as in to_codes.
    """
    # BEGIN SOLUTION
    blocks = x.unflatten(-1, (-1, 32))
    # In float64, because log2 in float32 is exactly e for numbers a hair above 2^e.
    exponents = torch.log2(blocks.abs().amax(dim=-1).double() / 6).ceil().clamp(min=-127).float()
    codes = to_codes((blocks / torch.exp2(exponents)[..., None]).flatten(-2))
    return codes, (exponents + 127).to(torch.uint8)
    # END SOLUTION


def to_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers in NVFP4, with a scale for each row.

    x: as in to_mxfp4.
    Returns: (codes, scales, row_scales), uint8 [rows, columns / 2], float8_e4m3fn [rows, columns / 16] and float32
    [rows]. A row's scale is its largest magnitude / (448 · 6), or 1 for a row of zeros. Block i of a row are its
    numbers 16 · i … 16 · i + 15. The block's scale is its largest magnitude / 6 / the row's scale, or 2^-6 if that is
    larger, rounded to the nearest e4m3 number. The codes are those of the numbers divided by both scales, the block's
    as it was rounded. All of this in float32.
    """
    # BEGIN SOLUTION
    blocks = x.unflatten(-1, (-1, 16))
    largest = x.abs().amax(dim=-1)
    row_scales = torch.where(largest > 0, largest / (448 * 6), 1.0)
    scales = (blocks.abs().amax(dim=-1) / 6 / row_scales[:, None]).clamp(min=2**-6).to(torch.float8_e4m3fn)
    codes = to_codes((blocks / (scales.float() * row_scales[:, None])[..., None]).flatten(-2))
    return codes, scales, row_scales
    # END SOLUTION

# %%
best_to_codes, best_to_mxfp4, best_to_nvfp4 = check("19.7", to_codes, to_mxfp4, to_nvfp4).best

# %%
SIZES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def restored(codes, scales):
    """What codes stand for, with a scale for each block, whatever its width."""
    halves = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()
    numbers = SIZES[halves & 7] * (1 - (halves >> 3) * 2)
    return numbers * scales.repeat_interleave(numbers.shape[1] // scales.shape[1], dim=1)


def from_mxfp4(codes, exponents):
    return restored(codes, torch.exp2(exponents.float() - 127))


def from_nvfp4(codes, scales, row_scales):
    return restored(codes, scales.float() * row_scales[:, None])


def root_mean_square(x):
    return x.square().mean().sqrt().item()


numbers = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
mx = root_mean_square(from_mxfp4(*best_to_mxfp4(numbers)) - numbers)
nv = root_mean_square(from_nvfp4(*best_to_nvfp4(numbers)) - numbers)
print(f"MXFP4 {100 * mx:.1f} %, NVFP4 {100 * nv:.1f} % of the numbers' own size")
measured("19 error of MXFP4 over NVFP4", mx / nv, "times")

# %% [markdown]
# NVFP4 takes a quarter of a bit more for each number. For that, MXFP4's error is 21 % larger.

# %% [markdown]
# ## Attention in four bits · deeper
#
# Both products of attention can run in four bits. SageAttention3 does so in NVFP4
# ([arXiv 2505.11594](https://arxiv.org/abs/2505.11594)), and two of its steps make it work.
#
# **The mean key is subtracted.** A few channels of the keys are large in every token. They set the scales of their
# blocks, so little precision is left for what differs from token to token. Let $\bar k$ be the mean of all keys of a
# head. With $k_j-\bar k$ in place of $k_j$, each score of a query $q$ becomes smaller by $q\cdot\bar k$. This is the
# same number for the whole row, and a softmax does not change if a constant is subtracted from its row. The mean of the
# values must stay: the weights of a row add up to 1, so $V-\bar v$ would take $\bar v$ off the output.
#
# **Each row of weights has a scale.** Weights lie between 0 and 1, and with 4,096 keys many are near 1/4,096. The scale
# of such a block, 1/4,096/6, is far below e4m3's smallest. Without a further scale it becomes $2^{-6}$, the least that
# the exercise allows, and all codes of the block are 0. With a row scale, the largest weight of each row lies at
# 448 · 6. The developer of an inference engine had measured this collapse and planned both steps as the cure
# ([imp#846](https://github.com/kekzl/imp/issues/846)). With both built, the quality was still judged too low at a
# language model's context lengths ([imp#868](https://github.com/kekzl/imp/pull/868)).
#
# The next cell runs attention with 4,096 keys, four of whose 64 channels are large. It rounds both operands of both
# products to NVFP4, restores them and multiplies in float32, so it shows errors and no times. **Predict** the error
# without row scales of the weights, in percent of the output's size.

# %%
predict("19 error without a row scale", ..., "%")

# %%
def in_nvfp4(x):
    return from_nvfp4(*best_to_nvfp4(x))


def without_row_scale(weights):
    """The same with all row scales 1: each row gets one more block, whose largest number is 448 · 6."""
    more = torch.zeros(len(weights), 32)
    more[:, 0] = 448.0 * 6
    return in_nvfp4(torch.cat((weights, more), dim=1))[:, : weights.shape[1]]


def attention(query, key, value, of_operands, of_weights):
    scores = of_operands(query) @ of_operands(key).T / math.sqrt(query.shape[1])
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    weights = weights / weights.sum(dim=1, keepdim=True)
    return of_weights(weights) @ of_operands(value.T.contiguous()).T


generator = torch.Generator().manual_seed(1)
query, key, value = (torch.randn(rows, 64, generator=generator) for rows in (128, 4096, 4096))
key[:, ::16] += 20
value += 0.5  # else the output would be an average near 0, and any error large beside it
exact = attention(query, key, value, lambda x: x, lambda x: x)
outputs = {
    "as they come": attention(query, key, value, in_nvfp4, in_nvfp4),
    "K's mean off": attention(query, key - key.mean(0), value, in_nvfp4, in_nvfp4),
    "K's and V's mean off": attention(query, key - key.mean(0), value - value.mean(0), in_nvfp4, in_nvfp4),
    "K's mean off, no row scale": attention(query, key - key.mean(0), value, in_nvfp4, without_row_scale),
}
errors = {name: 100 * root_mean_square(output - exact) / root_mean_square(exact) for name, output in outputs.items()}
for name, error in errors.items():
    print(f"{name:<28}{error:>6.1f} %")
measured("19 error without a row scale", errors["K's mean off, no row scale"], "%")

# %% [markdown]
# Taking off the mean key halves the error. If the mean of the values is taken off as well, hardly anything of the
# output is left, because here it is mostly that mean. Without row scales nearly all weights become 0, and so does the
# output.

# %% [markdown]
# `course_lib/kernels/quantised/fp4_attention.py` holds such a kernel. On a Blackwell the tensor cores take the codes
# with their scales. On other GPUs the kernel restores the numbers and multiplies in 16 bits, so you can look at its
# error anywhere. That error depends on two things. With 4,096 keys, values whose mean is half their deviation and all
# four operands in NVFP4, it is 1.2 % of the output for scores with standard deviation 1, 6 % for 2 and 24 % for 4,
# because a wrong score makes a wrong weight. If the values have no mean, the output is an average near 0, and the error
# is 19, 28 and 36 % of it. So measure on your own model's keys and values before you trust four bits.

# %% [markdown]
# ## Finale: one forward pass with all ideas
#
# `attention_with_ideas` in `course_lib/kernels/attention/ideas.py` is the library's plain Triton kernel for attention,
# in which you can switch on each idea by itself. The threshold is a number. The other two ideas take functions of
# yours, or the course's where you skipped an exercise. The exponential of 19.2 computes the weights of a share of the
# keys. The function `tile_at` of 19.6 gives the order in which the programs take the tiles of queries. Under a causal
# mask a tile has the more blocks of keys the later it is, so the last tile of each head starts first.
#
# The next cell switches on one idea more each time, on causal attention with 4 heads of 256 tokens. It compares every
# result with attention in float64.

# %%
from course_lib.kernels.attention.ideas import attention_with_ideas, default_tiles

generator = torch.Generator().manual_seed(19)
heads, tokens, dim = 4, 256, 64
query, key, value = (torch.randn(1, heads, tokens, dim, generator=generator).to(device, torch.float16)
                     for _ in range(3))
query = 3 * query  # so that scores spread
tile_rows = default_tiles(query).query_rows
row_tiles = tokens // tile_rows
order = torch.tensor([best_tile_at(number, heads, row_tiles, 2) for number in range(heads * row_tiles)],
                     dtype=torch.int32, device=device)
exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
ideas, switched = {
    "as it is": {}, "+ lazy rescaling": {"threshold": 8.0}, "+ your exponential for 8 of 32": {"share": 8},
    "+ your order": {"order": order},
}, {"causal": True, "exp2": best_exp2_polynomial}
for name, idea in ideas.items():
    switched |= idea
    output, _, rescales = attention_with_ideas(query, key, value, **switched)
    error = (output.double() - exact).abs().max().item()
    print(f"{name:<32} largest error {error:.1e}, rescales of a tile {rescales.float().mean().item():.2f}")

tiles = default_tiles(query)
yours = best_lazy_attention(query[0, 0], key[0, 0], value[0, 0], tiles.query_rows, tiles.key_rows, 8.0)
library = attention_with_ideas(query[:, :1], key[:, :1], value[:, :1], threshold=8.0)
print(f"your kernel of 19.3, head 0 without a mask: it differs from this one by at most "
      f"{(yours[0] - library.output[0, 0]).abs().max().item():.1e}; rescales of its tiles "
      f"{yours[2].tolist()} and {library.rescales[0, 0].tolist()}")

# %% [markdown]
# The error stays within what float16 makes of it. With lazy rescaling, weights reach up to 256 before they are rounded,
# but float16 has the same relative precision there. The order does not change the result at all.
#
# Now the time that the model of 19.1 gives for a B200, which has 148 multiprocessors. Take causal attention with 16
# heads of 4,096 tokens and head dimension 64. To rescale a tile, the multiply-add unit multiplies its 128 rows of
# output, which takes 128 · 64 instructions. With a threshold of 0 every block needs this. With a threshold of 8 it is 3
# of 63 blocks, about as counted above for a deviation of 3. Each multiprocessor takes the next tile of the list when it
# is free. **Predict** by how many percent all ideas together shorten the forward pass.

# %%
predict("19 all ideas on a B200", ..., "%")

# %%
HEADS, TOKENS, DIM, B200_CHIP, SLOTS = 16, 4096, 64, (8192, 16, 128), 148
INSTRUCTIONS, OTHERS = 9, 4  # of an exponential by multiply-adds; of a score beside its exponential
scores = 128 * 128
products, exponentials, memory = best_forward_cycles(128, 128, DIM, B200_CHIP)


def cycles_of_a_block(rescales, polynomial):
    """Those of the slowest unit. rescales: of a tile, for each block. polynomial: give away the best share, or none."""
    others = OTHERS + rescales * 128 * DIM / scores
    share = best_best_share(128, 128, DIM, B200_CHIP, INSTRUCTIONS, others) if polynomial else 0
    return max(products, memory, (1 - share) * exponentials, scores * (others + share * INSTRUCTIONS) / 128)


def thousand_cycles(cycles, section):
    """When the last tile ends. section: None for the order of a plain grid, head by head and the shortest first."""
    tiles = TOKENS // 128
    listed = ([(head, row) for head in range(HEADS) for row in range(tiles)] if section is None
              else [best_tile_at(number, HEADS, tiles, section) for number in range(HEADS * tiles)])
    return best_makespan([round((row + 1) * cycles) for _, row in listed], SLOTS) / 1000


section = min(HEADS, best_heads_at_once(50 * 2**20, TOKENS, DIM, 1))  # FlashAttention-4 takes 50 MiB for every GPU
steps = {"as it is": (1, False, None), "+ lazy rescaling, 3 of 63 blocks": (3 / 63, False, None),
         "+ the best share": (3 / 63, True, None), f"+ longest first, {section} heads at once": (3 / 63, True, section)}
ends = []
for name, (rescales, polynomial, order) in steps.items():
    cycles = cycles_of_a_block(rescales, polynomial)
    ends.append(thousand_cycles(cycles, order))
    print(f"{name:<40}{cycles:>8,.0f} cycles a block{ends[-1]:>8.0f} thousand in all")
measured("19 all ideas on a B200", 100 * (1 - ends[-1] / ends[0]), "%")

# %% [markdown]
# > **The answer.** What would you change, when the products became twice as fast and the exponentials did not? You
# > would give a share of the exponentials to the multiply-add unit. At head dimension 64 this shortens a block from
# > 1,024 to 784 cycles. You would not rescale the output at every block, since most rescales are not needed. You would
# > keep the scores, the weights and the output in tensor memory. One more idea came on top: you would start the longest
# > tiles first, so that no multiprocessor works alone at the end. Together the model says 41 % less time for this case.
#
# The 784 cycles are one more than in 19.1, because the rescales that are left need the multiply-add unit too. Look at
# the second line of the output: by this model, lazy rescaling alone gains nothing, because the multiply-add unit is not
# the slowest one. What the model leaves out is waiting. The output product of a block cannot start before the output
# has been rescaled. So each skipped rescale takes one step out of a chain in which several groups of warps wait for
# each other.
#
# **On a Hopper.** What are these ideas worth on the generation before? On one H200 we measured three of the course's
# kernels for the forward pass, with each idea alone (PyTorch 2.11, Triton 3.6, November 2026). There were twelve cases
# of 16,384 tokens in bfloat16: head dimensions 64 and 128, sequences of 1,024, 4,096 and 16,384 tokens, with and
# without a causal mask. The scores had a deviation of 1, so a threshold of 8 was never exceeded. It saved all rescales,
# which is the most that it can do.
#
# Take the plain Triton kernel on four causal sequences of 4,096 tokens, with 32 heads of dimension 64. With a threshold
# of 0 it reached 339 TFLOP/s. A tile of the default size was rescaled 15 times on average. **Predict** by how many
# percent a threshold of 8 changed the TFLOP/s. If you expect that they fell, write a negative number.

# %%
predict("19 lazy rescaling on an H200", ..., "%")

# %%
measured("19 lazy rescaling on an H200", 100 * (308 / 339 - 1), "%")  # both in TFLOP/s, as recorded

# %% [markdown]
# It fell to 308 TFLOP/s. Here are the smallest and the largest change in the twelve cases:
#
# | kernel | as it is, TFLOP/s | lazy rescaling | polynomial, 8 of 32 | longest first |
# |---|---|---|---|---|
# | plain Triton | 270 to 461 | −19.6 to −3.3 % | −9.1 to −2.5 % | −1.7 to +3.9 % |
# | Triton with the copy engine (TMA) | 295 to 507 | −6.1 to +2.0 % | not measured | −4.3 to +3.0 % |
# | Gluon with warp roles (chapter 09) | 344 to 713 | −8.3 to −3.4 % | not measured | −1.4 to +11.3 % |
#
# **Lazy rescaling** was slower in 34 of 36 cases. By the model of 19.1 there is nothing to save on a Hopper. At head
# dimension 64 rescaling takes 64 of the 576 cycles of the multiply-add unit, while products and exponentials take 1,024
# each. At 128 it takes 128 of 640, beside 2,048 cycles of products. The decision may have a price, which the model
# leaves out. In every block the threads of a tile (in Gluon those of 64 rows) must find out whether any row needs a
# rescale, and then they branch. We did not measure how much either costs.
#
# **The polynomial** was slower in all twelve cases. By the model it cannot gain on a Hopper, because the products take
# as long as the exponentials at head dimension 64, and twice as long at 128.
#
# **Longest first** is compared with going head by head, the last tile of each head first. The plain kernel was faster
# in 9 of 12 cases, but with TMA it was slower in 9. Without a mask all tiles are equally long, so there only the order
# of the heads changes. The Gluon kernel always uses the order, in sections of as many heads as fit in the L2 cache. So
# there we switched it off, and the last column says what the order gains. The kernel's other columns include it. Under
# a causal mask it gained in 5 of 6 cases, most with sequences of 1,024 tokens at head dimension 64.
#
# All three together made the plain kernel 4.7 to 25.6 % slower. So of these ideas, the course's forward passes on a
# Hopper use only the order of the Gluon kernel. This was one run on one card, so do not rely on changes of 1 or 2 %.

# %% [markdown]
# **On the GPU at hand.** The next cell measures one case of the plain kernel on your GPU, with your exponential. For
# all twelve cases, run `python -m course_lib bench ideas` in a terminal. On a Hopper it measures all three kernels.

# %%
if on_gpu:
    from course_lib.hardware.timing import measure_together
    from course_lib.kernels.attention.order import longest_first

    query, key, value = (torch.randn(4, 16, 4096, 64, device=device, dtype=torch.float16) for _ in range(3))
    library_order = longest_first(query, key, default_tiles(query).query_rows)
    common = {"causal": True, "exp2": best_exp2_polynomial, "counted": False, "validate": False}
    timings = measure_together({
        "as it is": partial(attention_with_ideas, query, key, value, **common),
        "lazy rescaling": partial(attention_with_ideas, query, key, value, threshold=8.0, **common),
        "your exponential, 8 of 32": partial(attention_with_ideas, query, key, value, share=8, **common),
        "longest first": partial(attention_with_ideas, query, key, value, order=library_order, **common),
    })
    flops = 2 * query.numel() * 4096  # causal: half of 4 · length² · dimension for each head
    for name, timing in timings.items():
        print(f"{name:<28}{flops / timing.median / 1e12:>6,.0f} TFLOP/s")
else:
    print("This needs a GPU: in the interpreter a kernel's time says nothing about it.")

# %% [markdown]
# ## The chapter's ideas at a glance
#
# | 2^x from multiply-adds | |
# |---|---|
# | wins | B200, head dimension 64: a block takes 783 cycles instead of 1,024 (computed) |
# | loses | H200: the course's plain kernel lost 2.5 to 9.1 % in twelve cases (measured), as nothing was to be gained |
# | falls back | B300: 32 exponentials in a cycle, so the share is 0 |
# | trap | rounding to the nearest whole number with a polynomial that was fitted on [0, 1) |
#
# | lazy rescaling | |
# |---|---|
# | wins | normal scores with deviation 3: a tile of 128 rows is rescaled 3 times instead of 61 (computed) |
# | loses | scores with deviation 10: 33 rescales instead of 61 (computed); H200: slower in 34 of 36 cases (measured) |
# | falls back | a threshold of 0 is the usual online softmax |
# | trap | FP8: weights up to 256 do not fit beside a shift of 8, so in e4m3 the threshold is at most 0.807 |
#
# | tensor memory | |
# |---|---|
# | wins | P and O leave the registers; two tiles of queries fill all 512 columns |
# | loses | head dimension 256: two tiles need 768 columns, so only one fits |
# | falls back | nowhere: only data-centre Blackwells have it, and an RTX 5090 has none |
# | trap | the next scores overwrite weights that the output product still reads |
#
# | longest first | |
# |---|---|
# | wins | causal, 16 heads of 4,096 tokens on 132 multiprocessors: it ends after 65 blocks instead of 85 (computed) |
# | loses | H200: with TMA slower in 9 of 12 cases, by up to 4.3 % (measured); all heads at once may not fit in the L2 |
# | falls back | without a mask all tiles take equally long, and the order does not matter |
# | trap | a last section with fewer heads than the others |
#
# | four bits | |
# |---|---|
# | wins | 4.5 bits a number in NVFP4, 4.25 in MXFP4; products at four times the rate of 16 bits (B200 data sheet) |
# | loses | rounding may be off by 18 % of a block's largest number in NVFP4, and 20 % in MXFP4 (computed) |
# | falls back | GPUs before Blackwell restore the numbers and multiply in 16 bits |
# | trap | a scale rounded down: up to 25 % of a block's largest number is cut off |
#
# ## Check yourself
#
# Answer these on paper. Then run the next cell and open the answers. Questions 3 and 4 belong to deeper sections.
#
# 1. A GPU has the tensor cores of a B200 and computes 8 exponentials in a cycle. How many cycles do the exponentials of
#    128 queries and 128 keys take? Would you give some of them to the multiply-add unit at head dimension 128?
# 2. A row's reference is 3 and the threshold 8. The next blocks have the maxima 10, 11, 12 and 20 (base 2). What is the
#    reference after each of them, and how large is the largest weight?
# 3. With a shift of 6 instead of 8, by how much may a score exceed the reference in e4m3?
# 4. Two tiles of 128 queries with 64 keys a block and head dimension 128: how many columns of tensor memory do they
#    need if P lies in S?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
self_check(
    f"{128 * 128 // 8:,} cycles, twice the {4 * 128**3 // 8192:,} of the products. Yes: every exponential that moves "
    "makes the slowest unit faster, until multiply-adds or products take as long.",
    "3, 3, 12 and 12. 10 and 11 exceed 3 by at most 8, so the reference stays. 12 exceeds it by 9, so it becomes 12. "
    "20 exceeds that by exactly 8, so it stays. The largest weight is 2⁸ = 256, twice.",
    f"log2(448) - 6 = {math.log2(448) - 6:.3f}. The weights then have two bits less room below.",
    f"2 · (64 + 128) = {2 * (64 + 128)} of 512.",
)

# %% [markdown]
# ## What production systems do
#
# All sources were read in November 2026.
#
# - **FlashAttention-4** has all ideas of the finale. Share, threshold and order are chosen by head dimension and mask.
#   Its first author and colleagues report up to 1,613 TFLOP/s on a B200, 71 % of the peak.
# - **FP8 in FlashAttention-4** cut off weights above 448. On a B300 the error beside 16 bits was 0.31 for scores with
#   deviation 1.5, and 0.02 with a smaller shift
#   ([flash-attention#2694](https://github.com/Dao-AILab/flash-attention/pull/2694)). In August 2026 its main branch
#   rescaled at every new maximum in 8 bits, a threshold of 0.
# - **Triton** compiles `tl.dot` to tensor memory on a B200 by itself. Gluon, Triton's lower-level language, shows it as
#   an object that you allocate and plan, as `course_lib/kernels/blackwell/` does.
#
# ## Papers
#
# - Zadouri et al.: *FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for Asymmetric Hardware Scaling*,
#   [arXiv 2603.05451](https://arxiv.org/abs/2603.05451).
# - Zhang et al.: *SageAttention3: Microscaling FP4 Attention for Inference and An Exploration of 8-Bit Training*,
#   [arXiv 2505.11594](https://arxiv.org/abs/2505.11594).
# - Graham: *Bounds on Multiprocessing Timing Anomalies*, SIAM Journal on Applied Mathematics 17, 1969.
# - Open Compute Project: *OCP Microscaling Formats (MX) Specification*, version 1.0.

# %%
progress()
