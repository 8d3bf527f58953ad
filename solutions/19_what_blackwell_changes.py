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
# multiprocessor that is free, here called a *slot*, takes the next program of the list. The kernel ends when the last
# program ends, so the order of the list decides how long it takes.
#
# Take four programs that run for 1, 2, 3 and 4 units of time, on two slots. In this order the first slot runs 1 and 3,
# and the second runs 2 and 4, which ends at 6. With the longest first, one slot runs 4 and 1, and the other 3 and 2.
# Both end at 5, an even share of the 10 units. The longest first takes at most a third longer than the best order
# ([Graham, 1969](https://doi.org/10.1137/0117039)), because short programs fill the gaps at the end.
#
# A plain grid starts the tiles head by head, the shortest of each head first. FlashInfer first turned the rows of each
# head around, and later those of all heads together
# ([flashinfer#3575](https://github.com/flashinfer-ai/flashinfer/pull/3575)).
#
# But then all heads are at work together, and their keys and values may not fit in the L2 cache. Those of one head of
# 4,096 tokens, with head dimension 128 in 16 bits, have 2 · 4,096 · 128 · 2 bytes = 2 MiB. An H200's L2 has 50 MiB,
# room for 25 such heads. So FlashAttention-4 cuts the heads into *sections*: as many heads as fit, rounded down to a
# power of two, which is 16 here. In a section the last row of each of its heads comes first, then the row before, and
# so on.
#
# The list must not be dealt out in advance. On an H200 a user gave each multiprocessor every 132nd tile of such a list.
# At 16,384 tokens this reached 575 TFLOP/s, and one program for each tile had 623
# ([flash-attention#2754](https://github.com/Dao-AILab/flash-attention/pull/2754)).
#
# Now take 16 such heads on the 132 multiprocessors of an H200. Each head has 1 + 2 + … + 32 = 528 blocks, so an even
# share is 16 · 528 / 132 = 64 blocks. **Predict** after how many blocks the last program ends if a plain
# grid starts them.

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
# The next cell compares a plain grid, sections, and the longest first over all heads. A tile of row $r$ reads $r + 1$
# blocks.

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
# The picture has four heads of eight tiles, a colour for each, on seven slots. The plain grid ends at 25, because the
# longest tiles of the last head start late. In sections the short tiles come last, and the end is at 21.
#
# With 16 heads of 4,096 tokens the plain grid ends at 85 blocks, a third after the even share, and the sections end at
# 65. With 64 heads of 8,192 tokens each slot runs many tiles, so a long one at the end costs only 4 %. On an H200 the
# authors of [FlashAttention-4](https://arxiv.org/abs/2603.05451) measured a gain of 4 to 8 % with a key head for each
# query head, and of 7 to 14 % with one for all. This model does not show what sections save in the cache.

# %% [markdown]
# ## Four bits with scales · deeper
#
# A B200 multiplies numbers of four bits twice as fast as numbers of eight bits. Their format is called *e2m1*: a sign,
# two bits of exponent and one of mantissa. It has the sizes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and no others. So each block
# of neighbours in a row has a *scale*, by which its codes are multiplied. There are two formats:
#
# | | block | scale of a block | further scale | bits a number |
# |---|---|---|---|---|
# | **MXFP4** | 32 | $2^e$; one byte holds $e + 127$ | | 4 + 8/32 = 4.25 |
# | **NVFP4** | 16 | an 8-bit float, e4m3 | one float32 for a tensor or a row | 4 + 8/16 = 4.5 |
#
# **MXFP4.** The largest number $L$ of a block must not exceed 6 scales, or it is cut. So $e$ is
# $\log_2(L / 6)$, rounded *up*. If $L$ is 6.5, then $e$ is 1. The scale is 2, $L$ becomes 3.25, and the nearest code is
# 3, which stands for 6. With $L = 10$ it becomes 5, halfway between 4 and 6. Of two neighbours at the same distance
# the one with the even code is taken: 4 has code 6 and 6 has code 7, so it is 4.
#
# The text of the standard takes $\lfloor \log_2 L \rfloor - 2$ instead. That lets $L$ be almost 8 scales, and what
# exceeds 6 is cut. A project that compared both rules on one model measured a perplexity of 23.54 with the standard's
# and 22.50 with rounding up ([trinity#694](https://github.com/gHashTag/trinity/pull/694)). AMD's kernel library
# moved from the first rule to the second because it had cut the largest number of 37 % of the blocks
# ([aiter#3212](https://github.com/ROCm/aiter/pull/3212)). MLX rounded $e$ to the nearest whole number in its MX
# formats. In its 8-bit one, a test with 512 blocks had 243 whose largest number was cut, by up to 29 %
# ([mlx#4353](https://github.com/ml-explore/mlx/pull/4353)).
#
# **NVFP4.** An e4m3 number has all three bits of its mantissa from $2^{-6}$ up to its largest, 448. To use this range,
# a further scale divides all numbers first, so that the block with the largest one gets the scale 448. Each block's
# scale is then rounded to the nearest e4m3 number. That may make it too small by a seventeenth, so $L$ can be 6.375
# scales, which becomes 6. A model's weights have one further scale for the whole tensor. In attention each row has one,
# and the next section shows why.
#
# Rounding up has a price too: $L$ then lies anywhere between 3 and 6 scales, while NVFP4 puts it near 6. After the
# exercise, a cell quantises 256 rows of 1,024 normal random numbers in both formats. **Predict** how many times as
# large the error of MXFP4 is as that of NVFP4.

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
    exponents = torch.log2(blocks.abs().amax(dim=-1) / 6).ceil().clamp(min=-127)
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
# NVFP4 takes a quarter of a bit more, and its error is 18 % smaller.

# %% [markdown]
# ## Attention in four bits · deeper
#
# Both products of attention can run in four bits. SageAttention3 does so in NVFP4
# ([arXiv 2505.11594](https://arxiv.org/abs/2505.11594)), and two of its steps make it work.
#
# **The mean key is subtracted.** A few channels of the keys are large in every token, so they set the scales of their
# blocks, and little is left for what differs from token to token. Let $\bar k$ be the mean of all keys of a head. With
# $k_j - \bar k$ in place of $k_j$, each score of query $q$ becomes smaller by $q \cdot \bar k$. This is the same number
# for the whole row, and a softmax does not change if a constant is subtracted from its row. The values' mean must stay:
# the weights of a row add up to 1, so $V - \bar v$ would take $\bar v$ off the output.
#
# **Each row of weights has a scale.** Weights lie between 0 and 1, and with 4,096 keys many are near 1/4,096. The scale
# of such a block, 1 / 4,096 / 6, is far below e4m3's smallest. Without a further scale it becomes $2^{-6}$, and all of
# the block's codes are 0. With the row's scale, the largest weight of each row lies at 448 · 6. The developer of an
# inference engine had measured this collapse and planned both steps as the cure
# ([imp#846](https://github.com/kekzl/imp/issues/846)). With both built, the quality was still judged too low at a
# language model's context lengths ([imp#868](https://github.com/kekzl/imp/pull/868)).
#
# The next cell runs attention with 4,096 keys, four of whose 64 channels are large. It rounds both operands of both
# products to NVFP4, restores them and multiplies in float32, so it shows errors and no times. **Predict** the error
# without a row scale of the weights, in percent of the output's size.

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
value += 0.5
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
# output is left, because here it is mostly that mean. Without a row scale nearly all weights become 0, and so does the
# output.
