# %% [markdown]
# # 12 · Fewer bits: a cache of 4 bits, and when it is faster
#
# **The question.** A decode step reads every cached key and value once. With 8 KV heads of dimension 128 and a context
# of 131,072 tokens, one layer caches 268 million numbers. In 16 bits these are 537 MB, which an H200 reads in 123 µs at
# 4.37 TB/s (measured for a read). In 4 bits, with the scales that belong to them, they are 151 MB, which is 3.6 times
# less.
#
# Is the decode step 3.6 times as fast with 4 bits? And is attention over a prompt of 8,192 tokens faster too?
#
# Write down your two guesses. You will count both.
#
# **Time.** About six hours for all seven exercises, estimated. The **core path** takes about two: exercises 12.1, 12.2
# and 12.3, and every section whose heading does not end in *deeper*. You can skip the others: run their cells and go
# on. You need chapter 05, and chapter 07 for exercise 12.5. Exercise 12.5 stands before 12.4, because its kernel goes
# on from 12.3. Neither of the two needs the other.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a few bits can stand for
#
# Four bits have 16 patterns, so they can stand for 16 different numbers. Eight bits can stand for 256. To *quantise* a
# number means to replace it by the nearest number that has a pattern. You choose which numbers have a pattern. Two
# choices are common for caches:
#
# - **INT4**: 16 numbers at equal distances. The distance between neighbours is called the *scale*, and a *group* of
#   cached numbers shares it. The rounding error is at most half the scale, and that is so for large and for small
#   numbers.
# - **e4m3**: a floating-point format of 8 bits, with 1 bit for the sign, 4 for the exponent and 3 for the *mantissa*
#   (the digits). Its numbers lie close together near 0 and far apart near 448, its largest. The rounding error is at
#   most a sixteenth of the number itself, except for tiny numbers.
#
# The next cell draws all numbers of both formats, divided by the largest of their format. e4m3 has 253 different ones,
# because one of its 256 patterns is a second zero and two are NaN. **Predict** how many of the 253 have an absolute
# value below a tenth of the largest.

# %%
predict("12 e4m3 numbers below a tenth of the largest", ..., "of 253")

# %%
from course_lib.figures.quantised.levels import draw_levels, e4m3_levels, int4_levels

measured("12 e4m3 numbers below a tenth of the largest", int((e4m3_levels().abs() < 0.1).sum()), "of 253")
draw_levels({"INT4": int4_levels(), "e4m3": e4m3_levels()})

# %% [markdown]
# Below a tenth of the largest, e4m3 has 199 of its 253 numbers, but INT4 has only 2 of its 16. Now think of a group in
# which one number is ten times as large as all others. Such a number is called an *outlier*. The largest number of the
# format has to stand for the outlier, so all others lie below a tenth. In e4m3 they can still be rounded to 199
# different numbers, but in INT4 only to 2. So an outlier does little harm in e4m3, and in INT4 it ruins its group. Most
# of this chapter follows from that.
#
# ## Two codes in a byte
#
# A *code* is the small integer that is stored in place of a number. Four bits hold 16 codes, and we use the integers
# from -8 to 7. PyTorch cannot compute with tensors of 4-bit integers, so two codes share a byte. One is in the low four
# bits, the *low nibble*, and the other in the high four bits, the *high nibble*.
#
# A negative code is stored in *two's complement*: -1 is 1111, and -8 is 1000. When you read a nibble into a wider
# integer, you must copy its highest bit into all bits above it. This is called *sign extension*. If you leave it out,
# -1 comes back as 15. The next cell draws the byte that holds the codes -3 and 5.

# %%
from course_lib.figures.quantised.storage import draw_byte, draw_groups, draw_window

draw_byte(low=-3, high=5)

# %%
# Exercise 12.1 · Two codes in a byte
def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Signed codes of 4 bits, two in a byte.

    codes: [..., n], int8, each from -8 to 7, with any strides. n is even and at least 2; there may be any number of
        dimensions before it, including none.
    Returns: [..., n // 2], uint8. Byte i holds code 2i in its low four bits and code 2i + 1 in its high four bits, both
    in two's complement. `codes` stays as it is.
    """
    # BEGIN SOLUTION
    low, high = codes[..., 0::2] & 15, codes[..., 1::2] & 15  # [..., n // 2]
    return (low | (high << 4)).to(torch.uint8)
    # END SOLUTION


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """The codes that `pack_int4` packed.

    packed: [..., m], uint8, any of the 256 bytes, with any strides. m is at least 1; there may be any number of
        dimensions before it, including none.
    Returns: [..., 2 · m], int8, each from -8 to 7. `packed` stays as it is.
    """
    # BEGIN SOLUTION
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)  # [..., 2 m], 0 to 15
    return (nibbles ^ 8).to(torch.int8) - 8  # 8 to 15 become -8 to -1
    # END SOLUTION


# %%
best_pack_int4, best_unpack_int4 = check("12.1", pack_int4, unpack_int4).best

# %% [markdown]
# ## Where a cache's large numbers are
#
# An outlier ruins its group in INT4, so look where the outliers of a cache are. The next cell lets a small trained
# model read 256 bytes of a text that it has not seen. It draws the keys and values of one head: a row is a token, and a
# column is a *channel*, one of the 64 places along the head dimension.
#
# **Predict**: do the large numbers form columns, rows, or no pattern? Guess for keys and for values.

# %%
from course_lib.figures.quantised.outliers import draw_outliers
from course_lib.models.kinds import loss_through_cache, text_parts
from course_lib.models.tokenizer import encode
from course_lib.models.trained import trained_model
from course_lib.serving.caches.new import new_cache

model = trained_model("heads of 64", device=device).requires_grad_(False)
seen, unseen = text_parts()
cache = new_cache(model, 1, 256)
with torch.inference_mode():
    model(encode(unseen[:256])[None].to(device), cache)
layer_keys, layer_values = cache.keys[:, 0, 0].cpu(), cache.values[:, 0, 0].cpu()  # [layers, 256 tokens, 64 channels]
draw_outliers(layer_keys[0], layer_values[0], "The first layer of the small model")

# %% [markdown]
# The keys have columns. In our runs they are channels 30 and 62, a pair that the rotary positions rotate together.
# Where one of the two is large, the other is small. The pair turns so slowly that each column lasts for a hundred
# tokens or more. The values have no such columns.
#
# In large models the columns are much stronger. KIVI is a method for caches of 2 bits, and its authors draw the same
# picture of Llama-2-13B and Falcon-7B ([arXiv 2402.02750](https://arxiv.org/abs/2402.02750)).
#
# ## Sixteen levels for a group of numbers
#
# To restore numbers from their codes, you need two more numbers for each group. One is the *scale*, the step between
# two neighbouring levels. The other is the *middle*, the number that code 0 stands for. A number is
# `code * scale + middle`. Elsewhere you will read *zero point* instead of middle. Some use that name for the code z
# that stands for the number 0. Then the middle is -z · scale. Scale and middle are stored in 16 bits each, and a group
# of 64 neighbouring numbers shares them. Together with the code that is $4 + 2 \cdot 16 / 64 = 4.5$ bits for each
# number, 3.6 times fewer than 16.
#
# The smallest number of a group gets the code -8 and the largest one gets 7. There are 15 steps between the two, so the
# scale is a fifteenth of the range. (Code 0 therefore stands for a number half a step above the middle of the range.)
# One outlier makes the range large, and with it the error of all other numbers in its group. So it matters *which*
# numbers are in a group together. A group can run over 64 tokens of one channel, or over 64 channels of one token. The
# next cell draws both with groups of 4. A framed strip is a group, and the dots mark a channel that is large in all
# tokens.

# %%
draw_groups(tokens=8, channels=8, group=4, large=(2,))

# %% [markdown]
# On the left the large numbers are in groups of their own, where they spoil no other channel. On the right each of them
# spoils three others. In the exercise you write a quantiser that can group along any axis.

# %%
# Exercise 12.2 · The axis
def quantise_int4(x: torch.Tensor, dim: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes of 4 bits for x, with a scale and a middle for each `group` neighbours along dimension `dim`.

    x: 1 to 3 dimensions of any size, float32 or float16, with any strides; finite numbers below 10,000 in size.
        Dimension `dim` (negative numbers count from the end) has a multiple of `group` elements. group is at least 1.
    Returns: codes, scale and middle, so that x is about codes * scale + middle, with each scale repeated for its group.
    codes: int8, -8 to 7, with the shape of x. Each is the integer that is nearest to (x - middle) / scale; of two that
        are equally near either is right.
    scale, middle: float32, with the shape of x but for dimension `dim`, which has one element a group. With `low` and
        `high`, a group's smallest and largest number, scale is (high - low) / 15 and middle is low + 8 · scale.
        Where high = low, scale is 1, middle is low and the codes are 0.
    Compute in float32. `x` stays as it is.
    """
    # BEGIN SOLUTION
    dim = dim % x.dim()
    groups = x.float().unflatten(dim, (-1, group))  # dimension dim + 1 runs over a group
    low, high = groups.amin(dim + 1), groups.amax(dim + 1)
    scale = (high - low) / 15
    middle = low + 8 * scale
    scale = torch.where(high == low, 1.0, scale)
    codes = ((groups - middle.unsqueeze(dim + 1)) / scale.unsqueeze(dim + 1)).round().clamp(-8, 7)
    return codes.flatten(dim, dim + 1).to(torch.int8), scale, middle
    # END SOLUTION


def best_axis(x: torch.Tensor, group: int) -> int:
    """The dimension along which groups lose less.

    x: [tokens, channels], float32, both multiples of `group`; keys or values of one head. group is at least 16.
    Returns: 0 if groups over `group` tokens of a channel lose less, 1 if groups over `group` channels of a token do.
    The loss is the sum of the squared differences between x and codes * scale + middle over all elements. The numbers
    of x alone decide; the two losses always differ by a fifth or more. `x` stays as it is.
    """
    # BEGIN SOLUTION
    losses = []
    for dim in (0, 1):
        codes, scale, middle = quantise_int4(x, dim, group)
        scale, middle = scale.repeat_interleave(group, dim), middle.repeat_interleave(group, dim)
        losses.append((codes * scale + middle - x).square().sum())
    return 0 if losses[0] < losses[1] else 1
    # END SOLUTION


# %%
best_quantise_int4, best_best_axis = check("12.2", quantise_int4, best_axis).best

# %% [markdown]
# Now use your quantiser on the small model's cache. The next cell quantises the keys and values of each layer along
# both axes. It prints the root mean square of the error, in percent of the root mean square of the numbers. **Predict**
# which axis is better for keys, and which for values.

# %%
def restored(x, dim, group=64):
    """What is left of x [..., tokens, channels] after your quantiser along dim -2 or -1, with scales in float16."""
    codes, scale, middle = best_quantise_int4(x.reshape(-1, *x.shape[-2:]), dim, group)
    scale, middle = (part.half().float().repeat_interleave(group, dim) for part in (scale, middle))
    return (codes * scale + middle).reshape(x.shape)


print("layer      keys: over tokens  over channels      values: over tokens  over channels")
for layer, parts in enumerate(zip(layer_keys, layer_values)):
    lost = [float((restored(part, dim) - part).norm() / part.norm()) for part in parts for dim in (-2, -1)]
    print(f"{layer:>5} {lost[0]:>21.1%} {lost[1]:>14.1%} {lost[2]:>24.1%} {lost[3]:>14.1%}")

# %% [markdown]
# Keys lose less with groups over tokens: 7 to 8 % instead of 9 % in our runs. The difference is small because this
# model's columns are mild.
#
# In this model, groups over tokens are slightly better for the values too. We group values over channels all the same.
# First, such a value can be quantised as soon as its token arrives. Second, a few tokens have most of the weight in the
# output. If each token has groups of its own, an outlier in another token does them no harm (KIVI, section 3).

# %% [markdown]
# ## Where the scales go
#
# A cache in e4m3 needs less care than one in INT4. One scale for all keys of a head, and one for all its values, is
# often enough. A key is then `k_scale` times its code. Because the scale is the same for all keys of a head, it can be
# taken out of the product: the scores are `k_scale` times the query's product with the codes. So you multiply the
# *query* by `k_scale` once, and never the keys. In the same way you multiply the *result* by `v_scale` once, and never
# the values. With head dimension 128 and 32,768 tokens, a head has 4.2 million codes for its keys, but its query has
# only 128 numbers. So the scale costs 128 multiplications instead of 4.2 million.
#
# The same can be done with INT4's scales: multiply the query by the 128 scales of a group of keys, once for its 64
# tokens, and attention's weights by the scales of the values. For the 4 query heads of a KV head that is 512
# multiplications for 64 keys instead of 8,192. But the scaled query has to be moved between threads again for every 64
# keys, which costs instructions of its own. So the library's INT4 kernel multiplies the codes by the scales instead,
# two codes with one instruction.

# %%
# Exercise 12.3 · Where the scales go
def fp8_decode(query, keys, values, k_scale, v_scale):
    """Attention of one query token to a cache of e4m3 codes, without dequantising the cache.

    Args:
        query: [query_heads, head_dim], float32.
        keys, values: [key_heads, length, head_dim], float8_e4m3fn, without NaN: the codes. length is at least 1.
            query_heads is a multiple of key_heads, and neighbours share a KV head: query head h reads KV head
            h // (query_heads // key_heads).
        k_scale, v_scale: [key_heads], float32, positive. A head's keys are k_scale times their codes, and its values
            are v_scale times theirs. These may be too large for float32; a query times k_scale and the result are not.
        All have any strides, and stay as they are.

    Returns:
        [query_heads, head_dim], float32: for each query head the softmax of its scores, times the values. A score is
        the product of query and key, divided by √head_dim.

        PyTorch has no product of e4m3 with float32, so convert the codes to float32, but only some tokens at a time. No
        tensor that you make may have more elements than the largest of these three: 64 tokens of all keys, all scores,
        and the query.
        The scales multiply a query, scores or a result, and not the codes. So no multiplication or division of elements
        (mul, div) may have a result with more elements than the larger of these two: all scores, and the query. Matrix
        products (matmul, einsum) are free. F.scaled_dot_product_attention is refused.
    """
    # BEGIN SOLUTION
    key_heads, length, head_dim = keys.shape
    grouped = query.reshape(key_heads, -1, head_dim)  # [key_heads, group, head_dim]
    grouped = grouped * (k_scale / math.sqrt(head_dim))[:, None, None]
    tiles = range(0, length, 64)
    scores = torch.cat([grouped @ keys[:, n : n + 64].float().transpose(1, 2) for n in tiles], dim=2)
    weights = torch.softmax(scores, dim=2)  # [key_heads, group, length]
    output = torch.zeros_like(grouped)
    for n in tiles:
        output += weights[:, :, n : n + 64] @ values[:, n : n + 64].float()
    return (output * v_scale[:, None, None]).reshape(query.shape)
    # END SOLUTION


# %%
best_fp8_decode = check("12.3", fp8_decode).best

# %% [markdown]
# ## When the scales are never passed
#
# A kernel takes scales as arguments, and their default is often 1. If you forget to pass them, there is no error. The
# engine SGLang had this fault in one of its attention backends. The repair does what you did in 12.3: it multiplies the
# factor of the scores by `k_scale`, and the result by `v_scale`
# ([sglang#18882](https://github.com/sgl-project/sglang/pull/18882)).
#
# What is lost if the scale stays 1, both when the cache is written and when it is read? The next cell rounds normal
# numbers to e4m3, once with a scale of 1 and once with a scale that makes the largest number 448. It does so for
# numbers of several sizes. **Predict** for which sizes a scale of 1 is bad, and whether a test with `torch.randn`,
# whose numbers have size 1, finds the mistake.

# %%
def through_e4m3(numbers, scale=1.0):
    """What is left of numbers that are cached as e4m3 codes with that scale; what is too large becomes the largest."""
    return (numbers / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(numbers.dtype) * scale


torch.manual_seed(12)
normal = torch.randn(100_000)
print("size of the numbers     error with a scale of 1     with a fitting scale")
for size in (0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0):
    numbers = normal * size
    fitting = numbers.abs().max() / 448
    errors = [float((through_e4m3(numbers, scale) - numbers).norm() / numbers.norm()) for scale in (1.0, fitting)]
    print(f"{size:>19g} {errors[0]:>27.1%} {errors[1]:>24.1%}")

# %% [markdown]
# From 0.1 to 100 the scale of 1 is as good as the fitting one, because a float rounds each number relative to its size.
# So a test with `torch.randn` passes, although the scales are missing. At 0.01 and less many numbers fall below
# $2^{-6}$, where e4m3 runs out of exponents, so they keep fewer digits. At 1000 many are cut off at 448. So test a
# kernel with scales far from 1, as the check of 12.3 does.

# %% [markdown]
# ## The fused decode kernel · deeper
#
# Now write a decode kernel that reads 4-bit codes. It is called *fused* because it dequantises and attends in one
# launch. It dequantises a tile of 64 tokens in registers, right where the tile is used, and never writes the restored
# cache to memory.
#
# Keys have a scale and a middle for each channel and each group of 64 tokens, so a tile of 64 tokens has one row of
# scales and one of middles. Values have a scale and a middle for each token and each 64 channels.
#
# A byte holds two neighbouring channels. The low nibbles are the even channels, and the high nibbles are the odd ones.
# You need not put them side by side again, because a dot product is the sum over even channels plus the sum over odd
# ones. So hold two of each: two tiles of queries, two of keys, and two accumulators.

# %%
# Exercise 12.5 · A decode kernel that reads INT4
@triton.jit
def int4_decode_kernel(
    query_pointer, key_codes_pointer, key_scale_pointer, key_middle_pointer,
    value_codes_pointer, value_scale_pointer, value_middle_pointer, output_pointer, lengths_pointer,
    capacity, scale_log2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """Program (key_head, sequence): the GROUP query heads of one KV head, over its tokens in tiles of 64.

    ROWS is a power of two, at least 16 and at least GROUP. scale_log2 is log2(e) / √HEAD_DIM.
    """
    # BEGIN SOLUTION
    HALF: tl.constexpr = HEAD_DIM // 2
    PARTS: tl.constexpr = HEAD_DIM // 64
    sequence = tl.program_id(1)
    cache = (sequence * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)  # which KV head of all sequences' heads
    members = tl.arange(0, ROWS)  # [ROWS], of which GROUP exist
    exist = (members < GROUP)[:, None]
    columns = tl.arange(0, HALF)  # [HALF]: byte c holds the channels 2c and 2c + 1
    parts = tl.arange(0, PARTS)  # [PARTS]
    rows = (cache * GROUP + members)[:, None] * HEAD_DIM + 2 * columns[None, :]  # [ROWS, HALF]
    query_even = tl.load(query_pointer + rows, mask=exist, other=0.0).to(tl.float32)
    query_odd = tl.load(query_pointer + rows + 1, mask=exist, other=0.0).to(tl.float32)
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    output_even = tl.zeros([ROWS, HALF], tl.float32)
    output_odd = tl.zeros([ROWS, HALF], tl.float32)
    length = tl.load(lengths_pointer + sequence)
    for first in range(0, length, 64):
        tokens = first + tl.arange(0, 64)  # [64]
        present = tokens < length
        places = cache * capacity + tokens  # [64]
        codes = tl.load(
            key_codes_pointer + places[:, None] * HALF + columns[None, :], mask=present[:, None], other=0
        ).to(tl.int32)  # [64, HALF]
        channels = (cache * (capacity // 64) + first // 64) * HEAD_DIM + 2 * columns  # [HALF]
        scale_even = tl.load(key_scale_pointer + channels).to(tl.float32)
        scale_odd = tl.load(key_scale_pointer + channels + 1).to(tl.float32)
        middle_even = tl.load(key_middle_pointer + channels).to(tl.float32)
        middle_odd = tl.load(key_middle_pointer + channels + 1).to(tl.float32)
        low = ((codes & 15) ^ 8) - 8  # [64, HALF]: the nibbles with their signs
        high = ((codes >> 4) ^ 8) - 8
        keys_even = low * scale_even[None, :] + middle_even[None, :]  # [64, HALF]
        keys_odd = high * scale_odd[None, :] + middle_odd[None, :]
        scores = tl.dot(query_even, tl.trans(keys_even), input_precision="ieee")  # [ROWS, 64]
        scores += tl.dot(query_odd, tl.trans(keys_odd), input_precision="ieee")
        scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [ROWS]
        weights = tl.exp2(scores - new_max[:, None])  # [ROWS, 64]
        rescale = tl.exp2(running_max - new_max)  # [ROWS]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        running_max = new_max
        codes = tl.load(
            value_codes_pointer + places[:, None] * HALF + columns[None, :], mask=present[:, None], other=0
        ).to(tl.int32)  # [64, HALF]
        shared = places[:, None] * PARTS + parts[None, :]  # [64, PARTS]
        scale = tl.load(value_scale_pointer + shared, mask=present[:, None], other=0.0).to(tl.float32)
        middle = tl.load(value_middle_pointer + shared, mask=present[:, None], other=0.0).to(tl.float32)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (64, PARTS, 32)), (64, HALF))
        middle = tl.reshape(tl.broadcast_to(middle[:, :, None], (64, PARTS, 32)), (64, HALF))
        values_even = (((codes & 15) ^ 8) - 8) * scale + middle  # [64, HALF]
        values_odd = (((codes >> 4) ^ 8) - 8) * scale + middle
        output_even = output_even * rescale[:, None] + tl.dot(weights, values_even, input_precision="ieee")
        output_odd = output_odd * rescale[:, None] + tl.dot(weights, values_odd, input_precision="ieee")
    total = tl.where(running_sum == 0.0, 1.0, running_sum)[:, None]
    dtype = output_pointer.dtype.element_ty
    tl.store(output_pointer + rows, (output_even / total).to(dtype), mask=exist)
    tl.store(output_pointer + rows + 1, (output_odd / total).to(dtype), mask=exist)
    # END SOLUTION


def int4_decode(query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, lengths):
    """Attention of one query token of each sequence to a cache of 4-bit codes, which is read once.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16. head_dim is 64 or 128. query_heads is a multiple of
            key_heads, and up to 32 heads share a KV head: query head h reads KV head h // (query_heads // key_heads).
        key_codes, value_codes: [batch, key_heads, capacity, head_dim // 2], uint8: byte c of a row holds the codes of
            channel 2c, in its low nibble, and of channel 2c + 1, as in exercise 12.1. capacity is a multiple of 64.
        key_scale, key_middle: [batch, key_heads, capacity // 64, head_dim], float32 or float16: for each channel of 64
            tokens. A key is code * scale + middle.
        value_scale, value_middle: [batch, key_heads, capacity, head_dim // 64], the same dtype: for each token and 64
            channels.
        lengths: [batch], int32: tokens in the cache, 0 to capacity, and not only multiples of 64. Slots behind them
            hold anything: any codes, and NaN in the scales and middles that belong to no token in the cache.
        All are contiguous.

    Returns:
        [batch, query_heads, head_dim], the query's dtype: the softmax of the scores, which are products of query and
        keys divided by √head_dim, times the values; zeros for a length of 0. Dequantise in float32. Then multiply
        and add in float32, or multiply in the query's dtype and add in float32. Each code, scale and middle of a token
        in the cache is loaded once, and those that belong to no token are not loaded. PyTorch's own operations do not
        read the cache and do no products.
    """
    batch, query_heads, head_dim = query.shape
    key_heads, capacity = key_codes.shape[1:3]
    group = query_heads // key_heads
    output = torch.empty_like(query)
    int4_decode_kernel[(key_heads, batch)](
        query, key_codes, key_scale, key_middle, value_codes, value_scale, value_middle, output, lengths,
        capacity, math.log2(math.e) / math.sqrt(head_dim),
        GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
    )
    return output


# %%
best_int4_decode = check("12.5", int4_decode).best

# %% [markdown]
# ## The bytes, counted
#
# A *fused* kernel dequantises codes in registers, where it uses them. How many bytes does it read for one token of one
# KV head? With head dimension 128, its key and value have 256 codes of half a byte, which is 128 bytes. The value has 2
# scales and 2 middles in float16, which is 8 bytes. The keys have 128 scales and 128 middles for 64 tokens together,
# which is 512 bytes for 64 tokens, or 8 for one. The sum is 144 bytes for 256 numbers, 4.5 bits each. A 16-bit cache
# has 512 bytes there, so INT4 has **28 %** of them.
#
# Without fusing, one kernel would read the 144 bytes and write 512 in 16 bits, and the next would read those 512 again.
# Together these are 8.1 times the 144 bytes.
#
# The next cell quantises random keys and values with your functions of 12.1 and 12.2, and counts the bytes that the
# kernel of 12.5 moves: yours once it has passed, and the course's until then. **Predict** them as a share of a 16-bit
# cache. The queries and the output count too, but they do not grow with the context.

# %%
predict("12 bytes that the INT4 kernel moves", ..., "% of a 16-bit cache")

# %%
from course_lib.hardware.meter.metered import metered


def int4_cache(keys, values):
    """The cache of 12.5 for keys and values [KV heads, tokens, channels] of one sequence: six tensors."""
    parts = []
    for x, dim in ((keys, 1), (values, 2)):
        codes, scale, middle = best_quantise_int4(x, dim, 64)
        parts += [best_pack_int4(codes)[None], scale.half()[None], middle.half()[None]]
    return [part.contiguous() for part in parts]


key_heads, length, head_dim = 2, 512, 128
keys, values = torch.randn(2, key_heads, length, head_dim)
query, lengths = torch.randn(1, 8, head_dim), torch.tensor([length], dtype=torch.int32)
codes = int4_cache(keys, values)
report = metered(best_int4_decode, query, *codes, lengths)
whole_bytes = 2 * 2 * keys.numel()
measured("12 bytes that the INT4 kernel moves", 100 * report.total_bytes / whole_bytes, "% of a 16-bit cache")
print(f"moved {report.total_bytes:,} bytes; a 16-bit cache has {whole_bytes:,}, this one "
      f"{sum(part.nbytes for part in codes):,}")

# %% [markdown]
# The share is a little above 28 %, because at only 512 tokens the queries and outputs add another 1.6 % of a 16-bit
# cache.
#
# The next cell compares the kernel's output with two others. One is attention to the *restored* cache, in which each
# number is `code * scale + middle`. The kernel should differ from it by float32's rounding alone. The other is
# attention to the *whole* cache, before it was quantised, and that difference is what quantising lost. Quantising
# changes the keys and values by about 9 % here. **Predict**: is the output off by more than 9 % or by less?

# %%
def grouped_attention(query, keys, values):
    """Attention of [query heads, channels] to [KV heads, tokens, channels]."""
    grouped = query.view(keys.shape[0], -1, query.shape[-1]) / math.sqrt(query.shape[-1])
    return (torch.softmax(grouped @ keys.transpose(1, 2), dim=2) @ values).view(query.shape)


output = best_int4_decode(*(part.to(device) for part in (query, *codes, lengths)))[0].cpu()
for name, cache in {"restored": (restored(keys, -2), restored(values, -1)), "whole": (keys, values)}.items():
    wanted = grouped_attention(query[0], *cache)
    print(f"off from attention with the {name} cache: {float((output - wanted).norm() / wanted.norm()):.1e}")

# %% [markdown]
# The output is off by more than 9 %: by 11 to 15.5 % in 300 draws of the random numbers. It is a mean over 512 random
# tokens. A mean makes the values smaller and their errors equally so, and the values' errors still count 9 %. The keys'
# errors change the weights, which costs about as much. Independent errors add in squares, so both together are near
# $\sqrt{9^2 + 9^2} \approx 13$ %. You will measure a trained model below.
#
# **How fast can it be?** Reading 3.6 times fewer bytes allows 3.6 times the speed, but only if the arithmetic takes no
# longer than the loads. Count how much arithmetic fits into that time. An H200 has 132 multiprocessors with 128 lanes
# each for ordinary instructions. At 1.98 GHz, its highest clock, these do 33.5 trillion instructions a second. The card
# reads the INT4 cache of the opening question in 34.6 µs. In that time it can do 1.16 billion instructions, and the
# cache has 268 million numbers. So a kernel may spend **4.3 instructions on each number** to cut out the nibble, extend
# its sign, convert it, and apply scale and middle. A kernel like that of 12.5 needs about five: a mask or a shift, two
# for the sign, a conversion, and a multiply-add. At five instructions a number these take 40 µs, and attention's own
# arithmetic takes 2.7 µs. So by this count a step in INT4 is $123 / 43 = 2.9$ times as fast as in 16 bits, and not 3.6
# times.
#
# A cache in e4m3 has 8 bits a number, so the same H200 reads it in 61 µs and has more time for its arithmetic. It also
# needs less arithmetic, because one instruction converts two numbers on cards that have it (from compute capability 8.9
# on, which is also called sm_89). So e4m3 should come nearer to its factor of 2 than INT4 to its 3.6.

# %% [markdown]
# ## The newest tokens stay whole · deeper
#
# A group of 64 keys can be quantised only when all 64 are there. Until then its keys stay *whole*: they are not
# rounded. It also pays to keep the newest tokens whole for longer, because attention gives them much weight: KIVI keeps
# up to 128. So a cache of 4-bit keys has two parts: full groups that are quantised, and a *residual window* of recent
# keys that are whole. Appending moves keys from the window to the groups. No key may be lost, be in both parts, or
# change its place.
#
# A decode step attends to both parts and merges the results, as for two splits in chapter 08. (Your kernel of 12.5
# reads groups only.)
#
# The next cell draws a window with groups of 4 that keeps at least 3 keys whole. A row is the state after one more key.
# When the eleventh key arrives, 7 keys are whole, which is enough for a group and for the 3 that stay.

# %%
draw_window(keys=11, group=4, window=3, before=4)

# %%
# Exercise 12.4 · The residual window
class KeyWindow:
    """The keys of one head: old ones quantised in full groups, and the newest ones whole.

    It decides which keys are quantised, and when. The caller's function decides how.
    """

    def __init__(self, group: int, window: int, quantise):
        """An empty window.

        group: how many keys are quantised together, at least 1. window: how many of the newest keys always stay whole,
        at least 0; it need not be a multiple of `group`. quantise: a function that takes a tensor [group, head_dim] and
        returns what is kept of it. Call it once for each group, with the oldest keys that are still whole, in their
        order. It may keep the tensor, so what you give it must not change later.
        """
        # BEGIN SOLUTION
        self.group, self.window, self.quantise = group, window, quantise
        self.kept, self.whole = [], None
        # END SOLUTION

    def append(self, keys: torch.Tensor) -> None:
        """Adds keys [count, head_dim], count at least 0, the newest last.

        After that, as long as `window` + `group` keys or more are whole, the oldest `group` of them are quantised.
        The caller writes other numbers into the memory of `keys` after the call.
        """
        # BEGIN SOLUTION
        self.whole = keys.clone() if self.whole is None else torch.cat((self.whole, keys))
        while len(self.whole) >= self.window + self.group:
            self.kept.append(self.quantise(self.whole[: self.group].clone()))
            self.whole = self.whole[self.group :]
        # END SOLUTION

    def groups(self) -> list:
        """What `quantise` returned for each group, in the order of the tokens."""
        # BEGIN SOLUTION
        return list(self.kept)
        # END SOLUTION

    def recent(self) -> torch.Tensor:
        """The keys that are whole, [count, head_dim], the oldest first. Later calls of `append` must not change it.

        It is called only after the first `append`. Where no key is whole, the result is [0, head_dim].
        """
        # BEGIN SOLUTION
        return self.whole
        # END SOLUTION


# %%
best_key_window = check("12.4", KeyWindow).best

# %% [markdown]
# ## What rounding does to the loss
#
# Errors of keys and values matter only if the model predicts worse because of them. The next cell measures the small
# model's loss on unseen text, token by token through a cache, for seven caches:
#
# - "32 bits" and "16 bits" are whole caches.
# - "FP8, scales of 1" stores e4m3 codes without scaling. In "FP8, calibrated" each head has scales of its own, chosen
#   so that its largest key and its largest value on a piece of the training text become 448.
# - "INT4" has groups of 64 tokens for keys and of 64 channels for values. Tokens stay whole until 64 of them are there,
#   and are then rounded together.
# - "INT4, keys over channels" is the same, but the keys have groups of 64 channels.
# - "INT4, rounded at once" has groups over channels too. No token has to wait for others then, so each is rounded as
#   soon as it arrives.
#
# Without a GPU the cell takes five to ten seconds, more on a busy machine, because the model reads the text token by
# token, once for each cache. **Predict** the order of the seven losses, and whether any is more than one percent above
# the first.

# %%
from course_lib.figures.quantised.losses import draw_cache_losses
from course_lib.serving.caches.contiguous import KVCache
from course_lib.serving.caches.quantised import calibrated_scales


class RoundedCache(KVCache):
    """The model's cache, but what is stored is rounded by key_through(layer, key) and value_through(layer, value).

    Tokens stay whole until `group` of them are there, and are then rounded together. `factors` multiply the channels of
    the keys and divide those of the queries, which leaves every score as it is.
    """

    def __init__(self, config, batch, capacity, *, key_through, value_through, group, factors):
        super().__init__(config, batch, capacity, device=device)
        self.through, self.group, self.factors = (key_through, value_through), group, factors

    def append(self, layer, key, value):
        super().append(layer, key * self.factors, value)
        end = self.length + key.shape[2]  # one token at a time, so a group ends where `end` is a multiple
        if end % self.group == 0:
            for cached, through in zip((self.keys, self.values), self.through):
                tokens = cached[layer, :, :, end - self.group : end]
                tokens.copy_(through(layer, tokens))

    def attend(self, layer, query):
        return super().attend(layer, query / self.factors)


scales = calibrated_scales(model, seen[: model.config.context])  # .keys and .values: [layers, KV heads]
roundings = {  # what a layer's keys or values [batch, KV heads, tokens, channels] become
    "whole": lambda layer, x: x,
    "half": lambda layer, x: x.half().float(),
    "e4m3": lambda layer, x: through_e4m3(x),
    "key scale": lambda layer, x: through_e4m3(x, scales.keys[layer, :, None, None]),
    "value scale": lambda layer, x: through_e4m3(x, scales.values[layer, :, None, None]),
    "over tokens": lambda layer, x: restored(x, -2),
    "over channels": lambda layer, x: restored(x, -1),
}
caches = {  # bits of a number; what happens to keys and to values; how many tokens are rounded together
    "32 bits": (32, "whole", "whole", 1),
    "16 bits": (16, "half", "half", 1),
    "FP8, scales of 1": (8, "e4m3", "e4m3", 1),
    "FP8, calibrated": (8, "key scale", "value scale", 1),
    "INT4": (4.5, "over tokens", "over channels", 64),
    "INT4, keys over channels": (4.5, "over channels", "over channels", 64),
    "INT4, rounded at once": (4.5, "over channels", "over channels", 1),
}


def loss_of(keys, values, group, factors=1.0):
    """Nats a byte on unseen text, of the model with a cache that rounds its keys and values so."""
    options = {"key_through": roundings[keys], "value_through": roundings[values], "group": group, "factors": factors}
    return loss_through_cache(model, unseen, partial(RoundedCache, model.config, **options))


cached = 2 * model.config.layers * model.config.key_heads * model.config.head_dim  # numbers of a token
threads = torch.get_num_threads()
torch.set_num_threads(1)  # on a CPU: products this small gain nothing from a second core
points = {name: (cached * bits / 8, loss_of(*how)) for name, (bits, *how) in caches.items()}
draw_cache_losses(points, "The small model with its cache in fewer bits")

# %% [markdown]
# Look at the axis first: all of it is about a hundredth of a nat. In our run the loss was 1.8131 with 32 bits, 16 bits
# and calibrated FP8. It was 1.8143 to 1.8146 with FP8 and scales of 1, and with INT4. Keys over channels came out at
# 1.8133, so for this model the wrong axis does no harm. Only the last cache is clearly worse, with 1.8200, because it
# rounds the newest tokens too. Attention gives these much weight, so here it matters most that some 32 of them, on
# average, stay whole. But even 1.8200 is less than half a percent above 1.8131. This model cannot show what goes wrong
# in large models, because its outliers are mild.
#
# You can give it strong outliers without changing what it computes. Multiply two channels of every key by 16, and
# divide the same channels of every query by 16. Every score stays what it was, but the cache now looks more like that
# of a large model. (The two channels are a rotary pair, 30 and 62. They turn together, so a factor on both gives the
# same before the rotation and after it.) The cell reads the text six times more, so without a GPU it takes another five
# to ten seconds. **Predict** which losses change, and by how much.

# %%
factors = torch.ones(model.config.head_dim, device=device)
factors[[30, 62]] = 16.0
print(f"{'':28}as trained     two channels of the keys 16 times as large")
for name in ("32 bits", "16 bits", "FP8, scales of 1", "INT4", "INT4, keys over channels", "INT4, rounded at once"):
    _, *how = caches[name]
    print(f"{name:28}{points[name][1]:>10.4f} {loss_of(*how, factors):>28.4f}")
torch.set_num_threads(threads)

# %% [markdown]
# Four losses stay the same to the fourth digit in our run. The INT4 cache with groups over tokens never puts a large
# channel and a small one into the same group. And e4m3 rounds each number relative to its own size, whatever its
# neighbours are. But with groups over channels, two large numbers set the scale for the other 62, and most of those get
# the same few codes. In our run the loss went from 1.813 to 1.946, and to 2.396 where the newest tokens were rounded
# too.
#
# This is why KIVI groups keys over tokens. And because such a group has to wait until all its tokens are there, the
# newest keys stay whole in a window.

# %% [markdown]
# ## What it gains, measured
#
# You have seen what fewer bits cost in quality. Now see what they gain in time. The next picture shows a recorded run
# of `python -m course_lib bench quantised` on one H200 (November 2026, PyTorch 2.11, Triton 3.6, bf16), so you see it
# without that GPU too. All kernels of a row were timed in turns. The black marks stand where a kernel would be if its
# bytes alone decided. **Predict**: does INT4 reach the 2.9 times of the count above?

# %%
from course_lib.figures.quantised.measured import draw_measured_decode
from course_lib.figures.recorded import recorded

draw_measured_decode(recorded("quantised", "h200"))

# %% [markdown]
# > **The answer to the first question: 2.1 times.** On this H200 the INT4 step is 2.1 to 2.3 times as fast as the one
# > in 16 bits, with 28 % of the bytes. The bytes alone would give 3.6 times, and the count of instructions 2.9.
#
# Too many instructions are not the reason. The loop of the library's INT4 kernel, compiled, has 1,351 instructions a
# warp for 64 keys and their values. A head of 128 channels has 16,384 numbers there and a warp has 32 threads, so a
# thread executes 2.6 instructions for each number in the whole loop. 1.6 of these make numbers of codes, where the
# count assumed 5, because most of them work on two numbers at once. For 16 sequences of 8,192 tokens the
# multiprocessors need 21 µs at this rate. Their cache has 151 MB, which an H200 reads in 35 µs at its full rate. But
# the kernel takes 66 µs:
#
# - A kernel that only reads these 151 MB takes 48 µs. In so short a time, starting and ending take a noticeable share.
# - With lengths of 0, so without any key, the decode kernel takes 11 µs: it starts, and merges two splits of the
#   context (chapter 08).
# - The multiprocessors are not done together. Their loops ended between 38 and 58 µs after the start.
#
# These overlap, so they do not add up to the 66. What the warps share matters more than the count. In an earlier
# version of this kernel, all four warps worked on the same 64 keys, and met at seven barriers for them: for the scales,
# the largest score, and the weights. It had 6.3 instructions a number, which is 50 µs by the count, and took 154 µs on
# the same H200, longer than 16 bits. Now each warp has keys of its own, and they meet when all keys are done.
#
# In e4m3 with a scale for each head the course's kernel is 1.6 to 1.7 times as fast as in 16 bits; a kernel that only
# reads the same bytes would be 1.84 times as fast at 16 × 8,192. FlashInfer's FP8 kernel is 1.15 to 1.22 times as fast
# as *our* kernel in 16 bits. So on this card an INT4 cache saves more memory and more time, and an e4m3 cache keeps
# more digits.
#
# | few bits in a cache | |
# |---|---|
# | wins | decode in INT4: 2.1 to 2.3 times as fast; in e4m3 1.6 to 1.7 (measured, as above) |
# | loses | a prompt, which gains nothing (derived below) |
# | falls back | cards before compute capability 8.9 convert e4m3 in several steps (below) |
# | trap | scales left at 1; keys grouped over channels: a loss of 1.946 instead of 1.813 (measured above) |

# %% [markdown]
# ## When does it pay? · deeper
#
# Each number that is read must be dequantised. In a decode step that happens once. In a prompt a kernel goes through
# the keys again for each block of 128 query rows, and for each query head. If it dequantises inside that loop, it does
# so 256 times for 8,192 tokens and four query heads on a KV head. So there are three plans:
#
# - **keep**: a cache of 16 bits;
# - **fuse**: a cache of fewer bits, and the attention kernel dequantises each number whenever it loads it;
# - **once**: the same cache, but a launch of its own dequantises it into 16 bits first, and attention reads these.
#
# You count the time of each by a roofline, and choose.

# %%
# Exercise 12.6 · When does it pay?
def plan_seconds(
    plan: str, batch: int, context: int, query_tokens: int, query_heads: int, key_heads: int, head_dim: int, bits: int,
    rate: float, dequantise_rate: float, bandwidth: float,
) -> float:
    """Seconds of one layer's attention with a plan for its cache, by a roofline.

    plan: "keep": the cache has 16 bits a number. "fuse": it has `bits` bits a number, 4 or 8, and a scale and a middle
        of 16 bits each for every 64 numbers; a kernel dequantises what it loads. "once": the same cache is dequantised
        into 16 bits first, and then attended to as in "keep".
    batch sequences have `context` tokens each in the cache. Of these the last `query_tokens` (1 to context) are queries
        too, and each sees the tokens up to itself. Keys and values have key_heads heads of head_dim numbers;
        query_heads is a multiple of key_heads; key_heads · head_dim is a multiple of 64.
    A multiply-add is two FLOPs; a query head does one multiply-add for each number of each key and value that it sees.
        Only these count as FLOPs, and they run at `rate` per second. `dequantise_rate` numbers per second are
        dequantised, and `bandwidth` bytes per second are read or written.
    A KV head has query_heads / key_heads · query_tokens rows of queries. The kernel takes 128 of them at a time and
        reads the whole cache for each such block, the last one perhaps smaller.
    "keep" and "fuse" take the longer of two times, that of their work and that of their bytes; queries and results are
        too few to count. The work of "keep" is its FLOPs. The work of "fuse" is its FLOPs, and after them the
        dequantising of all that it reads. "once" adds the time of "keep" to that of its first step, which reads the
        small cache and writes the large one. That step takes the longer of two times as well, that of dequantising each
        number once and that of its bytes.
    """
    # BEGIN SOLUTION
    numbers = 2 * batch * context * key_heads * head_dim
    large, small = 2 * numbers, numbers * bits / 8 + numbers / 64 * 4  # bytes
    pairs = query_tokens * context - query_tokens * (query_tokens - 1) // 2
    computing = 4 * batch * query_heads * head_dim * pairs / rate
    passes = math.ceil(query_heads // key_heads * query_tokens / 128)
    if plan == "fuse":
        return max(computing + passes * numbers / dequantise_rate, passes * small / bandwidth)
    kept = max(computing, passes * large / bandwidth)
    if plan == "keep":
        return kept
    return max(numbers / dequantise_rate, (small + large) / bandwidth) + kept
    # END SOLUTION


def choose_plan(
    batch: int, context: int, query_tokens: int, query_heads: int, key_heads: int, head_dim: int, bits: int,
    rate: float, dequantise_rate: float, bandwidth: float, room: float,
) -> str:
    """The plan that takes the shortest time: "keep", "fuse" or "once".

    "keep" is possible only if a cache of 16 bits takes at most `room` bytes; the other two always are. Of two plans
    that take equally long, it is the one that stands first in this list.
    """
    # BEGIN SOLUTION
    sizes = batch, context, query_tokens, query_heads, key_heads, head_dim, bits, rate, dequantise_rate, bandwidth
    fits = 4 * batch * context * key_heads * head_dim <= room
    plans = ("keep", "fuse", "once") if fits else ("fuse", "once")
    return min(plans, key=lambda plan: plan_seconds(plan, *sizes))
    # END SOLUTION


# %%
best_plan_seconds, best_choose_plan = check("12.6", plan_seconds, choose_plan).best

# %% [markdown]
# The first picture is a count for an H200, with the 790 TFLOP/s and 4.37 TB/s that were measured, and the sizes of the
# opening question. For the rate of dequantising we take 5 instructions for each number, of the 33.5 trillion a second
# that its 132 multiprocessors can do. **Predict**: how many times as long as "fuse" does "keep" take for one query
# token? And which plan is the fastest if the last 8,192 tokens of the context are a prompt?

# %%
from course_lib.figures.quantised.plans import draw_plan_gains
from course_lib.hardware.ceilings.measured import ceilings

query_counts = [2**power for power in range(14)]  # 1 to 8,192


def times_of_plans(rate, instructions, bandwidth, context=131_072, bits=4):
    """{plan: {query tokens: seconds}} with 32 query heads on 8 KV heads of 128, 5 instructions for a number."""
    return {
        plan: {count: best_plan_seconds(plan, 1, context, count, 32, 8, 128, bits, rate, instructions / 5, bandwidth)
               for count in query_counts}
        for plan in ("keep", "fuse", "once")
    }


h200_times = times_of_plans(790e12, 33.5e12, 4.37e12)
for count in (1, 8, 64, 8192):
    told = ", ".join(f"{plan} {format_seconds(line[count])}" for plan, line in h200_times.items())
    print(f"{count:>5} query tokens: {told}")
draw_plan_gains(h200_times, "INT4 and 131,072 tokens of context on an H200, by its measured rates")

# %% [markdown]
# For one query token this is the count from above: 123 µs and 43 µs, 2.9 times. The measured kernel gained 2.1, so read
# the picture for where the gain *ends*. It shrinks with every query token, because attention's own arithmetic grows. At
# 32 query tokens the gain is gone. From 1,024 on, "fuse" and "once" differ by 1.3 % at most, because in "fuse" one
# dequantised number serves 128 rows of queries, and with 8,192 query tokens "keep" is the fastest by less than 1 %.
# Where a conversion costs more, dequantising once pays earlier.
#
# The second picture is a count for this machine, with its own ceilings: its bandwidth, its rate of products, and half
# of its multiply-add FLOPs as its rate of instructions. **Predict** whether it gains more or less than an H200 for one
# query token. Where this machine has not been measured yet, the cell does it first, in ten to twenty seconds. On a GPU
# the cell also measures a decode step: "keep" with the library's kernel for 16 bits, "fuse" with the library's kernel
# for INT4, and the kernel of 12.5.

# %%
roof = ceilings()
unit = "float16" if on_gpu else "float32"
context = 131_072 if not on_gpu or machine().memory_bytes > 8e9 else 32_768
here = times_of_plans(roof.matmul_rate[unit], roof.fma_rate / 2, roof.memory_bandwidth, context)
step_times = {}
if on_gpu:
    from course_lib.hardware.graphs import captured  # a function as a CUDA graph, as in chapter 08
    from course_lib.hardware.timing import measure_together
    from course_lib.kernels.decode.attention import decode_attention
    from course_lib.kernels.quantised.append import append_to_int4_cache
    from course_lib.kernels.quantised.formats import empty_int4_cache
    from course_lib.kernels.quantised.int4_decode import int4_decode_attention

    query = torch.randn(1, 32, 128, device=device, dtype=torch.float16)
    keys, values = torch.randn(2, 1, 8, context, 128, device=device, dtype=torch.float16)
    lengths = torch.full((1,), context, dtype=torch.int32, device=device)
    cache = empty_int4_cache(1, 8, 128, capacity=context, device=device)
    append_to_int4_cache(keys, values, cache, torch.zeros(1, dtype=torch.int32, device=device))
    yours = (cache.key_codes.flatten(2, 3), cache.key_scales, cache.key_middles,
             *(part.flatten(2, 3) for part in cache[3:6]), lengths)
    steps = {
        "keep": partial(decode_attention, query, keys, values, lengths, validate=False),
        "fuse": partial(int4_decode_attention, query, cache, lengths, validate=False),
        "yours (12.5)": partial(best_int4_decode, query, *yours),
    }
    graphs = {name: captured(step) for name, step in steps.items()}  # so that Python's own time does not count
    step_times = {name: timing.median for name, timing in measure_together(graphs, device=device).items()}
    for name, seconds in step_times.items():
        print(f"{name:14} {format_seconds(seconds):>9}, {step_times['keep'] / seconds:.2f} times as fast as keep")
else:
    print("No GPU here: the picture is a prediction from this CPU's ceilings, and nothing is measured.")
draw_plan_gains(here, f"INT4 and {context:,} tokens of context on {roof.device}",
                {plan: {1: step_times[plan]} for plan in here if plan in step_times})

# %% [markdown]
# Do not compare the two INT4 kernels. The kernel of 12.5 has one program for each KV head of a sequence, so one
# sequence keeps only 8 of an H200's 132 multiprocessors busy. The library's kernel splits the context as in chapter 08.

# %% [markdown]
# ## When it loses
#
# Fewer bytes alone do not make a step faster. These engines lost more time than they saved:
#
# - **The whole cache was dequantised before each step.** A 4-bit cache that was proposed for SGLang generated 0.03
#   tokens a second on an H200 ([sglang#23134](https://github.com/sgl-project/sglang/issues/23134)). Its successor,
#   which dequantises as it reads, is reported at 93 to 105 % of the speed of bf16.
# - **Decode became slower, but prompts did not.** PocketLLM dequantises a prompt's cache once, before attention. With
#   65,536 tokens on four RTX 2080 Ti and in three formats, prompts ran within 0.3 % of fp16's speed, but decode ran at
#   5 to 37 % of it ([PocketLLM#84](https://github.com/lvyufeng/PocketLLM/pull/84)).
# - **FP8 fell back to a slower kernel.** For 16-bit queries and an FP8 cache, FlashInfer takes FlashAttention-2's
#   kernel on Hopper instead of FlashAttention-3's, and converts inside it. That is slower than a cache of 16 bits. A
#   repair is proposed ([flashinfer#4977](https://github.com/flashinfer-ai/flashinfer/pull/4977)).
# - **The card had no instruction for e4m3.** GPUs before compute capability 8.9 convert in several steps. A kernel
#   proposed for vLLM took 484 µs instead of 302 on an A100
#   ([vllm#49077](https://github.com/vllm-project/vllm/pull/49077)).
# - **Quantising took launches of its own.** SGLang's decode on an H200 became slower at small batches and short
#   contexts, because new keys and values went through several small kernels in each layer
#   ([sglang#30815](https://github.com/sgl-project/sglang/issues/30815)).
#
# So dequantise inside attention in a decode step, and before attention in a prompt. In a decode step every number is
# used by one query token. It is converted once in either case, and a 16-bit copy only adds bytes. A prompt's queries
# come in tiles, of 128 for example. Each tile goes through all keys before it, so a conversion in the loop happens
# again for every tile.
#
# The next cell counts both for INT4 and 8 KV heads of dimension 128. **Predict** two ratios. How many times as many
# bytes does a decode step move if it dequantises first? And how many times as many conversions does a prompt of 8,192
# tokens do if it dequantises in the loop?

# %%
numbers = 8192 * 2 * 8 * 128
fused, first = 4.5 / 8 * numbers, (4.5 / 8 + 2 + 2) * numbers
print(f"decode, 8,192 tokens:  fused {format_bytes(fused)}, dequantised first {format_bytes(first)}: "
      f"{first / fused:.1f} times as many; a 16-bit cache {format_bytes(2 * numbers)}")
in_the_loop = sum(end * 2 * 8 * 128 for end in range(128, 8192 + 1, 128))  # each tile of queries, and what it sees
print(f"prompt, 8,192 tokens:  {numbers / 1e6:.1f} million conversions, {in_the_loop / 1e6:.0f} million in the loop: "
      f"{in_the_loop / numbers:.1f} times as many")

# %% [markdown]
# > **The answer to the second question: a prompt gains nothing.** With 32 query heads its attention does $4 \cdot 32
# > \cdot 128 \cdot 8192^2 / 2 = 550$ GFLOP in a layer, which takes at least 0.70 ms at 790 TFLOP/s. Reading its keys
# > and values once in 16 bits takes 7.7 µs, 1 % of that, so there is almost nothing to save. Let a prompt attend to its
# > own keys and values before they are rounded. If a long cache stands before the prompt, dequantise it once.

# %% [markdown]
# ## Attention in FP8: outliers, and a rotation · deeper
#
# So far few bits were only for what is *stored*. A kernel for long prompts can also *multiply* in 8 bits: Hopper's
# matrix units multiply e4m3 numbers twice as fast as 16-bit ones. Then queries, keys, values and attention's weights
# are all rounded to e4m3, so its error counts more. The problem is again outliers, which are often in the same few
# channels. FlashAttention-3 has two methods against them:
#
# - **Block quantisation**: a scale for each block of rows, since the kernel goes block by block anyway.
# - **Incoherent processing**: multiply queries and keys by the same orthogonal matrix $M$, one with $M M^T = 1$. The
#   scores stay the same, $(Q M)(K M)^T = Q M M^T K^T = Q K^T$, but an outlier is spread over all channels. For $M$ take
#   random signs and a Hadamard matrix, whose entries are all ±1 before it is divided by $\sqrt D$. The rotation costs
#   $D \log_2 D$ additions a row, which is 896 at $D = 128$.

# %%
# Exercise 12.7 · Eight bits, and where outliers go
def hadamard(vectors):
    """The vectors, [..., head_dim], float32, multiplied by H / √head_dim; head_dim is a power of two.

    H of 1 is [[1]], and H of 2n is [[H, H], [H, -H]] with H of n. The matrix is its own transpose.
    """
    # BEGIN SOLUTION
    matrix = torch.ones(1, 1, dtype=vectors.dtype, device=vectors.device)
    while len(matrix) < vectors.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return vectors @ matrix / math.sqrt(vectors.shape[-1])
    # END SOLUTION


def quantise(tensor, rows):
    """A matrix [length, width], float32, in e4m3 with one scale for each block of `rows` rows.

    Returns (codes, scales): codes, float32 of the matrix's shape, hold values that torch.float8_e4m3fn represents, the
    largest of each block ±448; scales, float32 [blocks], restore it: codes · scale ≈ the block. The last block may have
    fewer rows. A block of zeros has the scale 1.
    """
    # BEGIN SOLUTION
    codes, scales = torch.empty_like(tensor), []
    for first in range(0, tensor.shape[0], rows):
        block = tensor[first : first + rows]
        largest = block.abs().max()
        scale = largest / 448 if largest > 0 else torch.ones_like(largest)
        codes[first : first + rows] = (block / scale).to(torch.float8_e4m3fn).float()
        scales.append(scale)
    return codes, torch.stack(scales)
    # END SOLUTION

# %%
best_hadamard, best_quantise = check("12.7", hadamard, quantise).best

# %% [markdown]
# The next cell measures how much the two methods help. The inputs are those of FlashAttention-3's experiment: normal
# numbers with rare outliers. The first column is the largest error of any score. The second is the output's root mean
# square error, relative to the output. With both methods FlashAttention-3 reports 2.6 times less error than with one
# scale per tensor. **Predict** which method does more.

# %%
generator = torch.Generator().manual_seed(0)


def with_outliers(*shape):
    """Normal numbers, of which one in a thousand has another one added that is drawn ten times as wide."""
    rare = torch.rand(shape, generator=generator) < 0.001
    return torch.randn(shape, generator=generator) + 10 * torch.randn(shape, generator=generator) * rare


def through_blocks(tensor, rows):
    """What is left of a tensor after quantisation."""
    codes, scales = best_quantise(tensor, rows)
    return codes * scales.repeat_interleave(rows)[: len(tensor), None]


def attend(query, key, value, cast=lambda weights: weights):
    """(scores, attention); the weights pass through `cast`, as before the second product."""
    scores = query @ key.T / math.sqrt(query.shape[1])
    weights = torch.exp(scores - scores.amax(dim=1, keepdim=True))
    return scores, cast(weights) @ value / weights.sum(dim=1, keepdim=True)


length, head_dim, trials = 1024, 64, 4
print(f"{length} × {length}, head dimension {head_dim}, mean of {trials} draws      worst score    output")
errors = {}
for _ in range(trials):
    query, key, value = with_outliers(3, length, head_dim)
    signs = torch.randint(0, 2, (head_dim,), generator=generator) * 2.0 - 1
    exact = attend(query.double(), key.double(), value.double())
    turned = best_hadamard(query * signs), best_hadamard(key * signs)
    ways = {"bf16": attend(*(m.bfloat16().float() for m in (query, key, value)), lambda w: w.bfloat16().float())}
    for rotated, (q, k) in ((False, (query, key)), (True, turned)):
        for rows, scale in ((length, "one scale"), (64, "a scale for each 64 rows")):
            quantised = (through_blocks(matrix, rows) for matrix in (q, k, value))
            name = f"e4m3, {scale}" + (", rotated" if rotated else "")
            ways[name] = attend(*quantised, lambda weights: weights.to(torch.float8_e4m3fn).float())
    for name, results in ways.items():
        (scores, output), (exact_scores, exact_output) = results, exact
        relative = float((output - exact_output).norm() / exact_output.norm())
        errors.setdefault(name, []).append([float((scores - exact_scores).abs().max()), relative])
for name, found in errors.items():
    worst, output_error = torch.tensor(found).mean(dim=0).tolist()
    print(f"  {name:46} {worst:16.2f}   {100 * output_error:5.1f} %")

# %% [markdown]
# The rotation does most. A float rounds each number relative to its own size, by up to 1/16 in e4m3, whatever the
# scale. So an outlier does not ruin its neighbours, as it would in 8-bit integers. But its own error can be as large as
# a usual number, and it changes every score that uses it. If the rotation spreads the outlier over 64 channels, the
# errors of these average out. Block scales help too, from 10.6 to 9.0 % in this run: the largest outlier of each block
# becomes 448, which e4m3 holds exactly.
#
# **In the kernel.** `kernels/hopper/flash_fp8.py` is chapter 09's kernel with operands in e4m3. On one H200 it was 1.65
# times as fast as in bf16 at head dimension 256, 1.10 to 1.13 times at 128 and 1.04 times at 64 (measured in turns,
# 16,384 tokens). Products take half as long as in bf16, but exponentials take just as long, so the gain grows with the
# head dimension. At 128 neither is busy for more than half of the time: mostly, the warp groups wait for scores and
# weights. The root mean square error, on 8 heads of 4,096 tokens with outliers, is 0.018 with one scale and no
# rotation, 0.017 with a scale for each block, and **0.0084** with the rotation, 2.1 times less. FlashAttention-3
# reports 0.024 and 0.0091. `python -m course_lib bench fp8` measures speed and error on your GPU.

# %% [markdown]
# ## Finale: a kernel reads the model's cache
#
# The small model now writes with the kernel of 12.5: with yours once it has passed, and with the course's until then.
# The first line says which one it is. The prompt attends to its own keys and values before they are rounded. Then every
# token is decoded from 4-bit codes. The kernel has no window, so keys in a group that is not full yet are rounded too,
# and such a group is quantised anew at each step. (`int4_decode_of_codes` in `course_lib/models/plugged.py` does that.)
#
# Without a GPU the cell takes five to ten seconds, more on a busy machine. **Predict**: does the model write the same
# text as with a whole cache, from the first byte to the last?

# %%
import textwrap

from course_lib.models.plugged import int4_decode_of_codes, who_runs
from course_lib.serving.caches.quantised import Int4KVCache
from course_lib.serving.generation import complete

print(who_runs({"decode from 4-bit codes (12.5)": best_int4_decode}))
new_bytes = 200 if on_gpu else 100
int4_cache = Int4KVCache(model.config, 1, 256, device=device, decode=int4_decode_of_codes(best_int4_decode))
texts = {}
for name, cache, token_bytes in (("32 bits", new_cache(model, 1, 256), 4 * cached),
                                 ("INT4, your kernel", int4_cache, int4_cache.token_bytes)):
    texts[name] = "Alice was " + complete(model, "Alice was ", new_bytes, cache=cache)
    print(f"{name}, {token_bytes:,} bytes a token:")
    print(textwrap.indent(textwrap.fill(texts[name], 100), "    "))
same = next((place for place, pair in enumerate(zip(*texts.values())) if pair[0] != pair[1]), None)
print("the same text" if same is None else f"the texts part after {same} bytes")

# %% [markdown]
# The texts may differ from some byte on. If two next bytes are nearly equally likely, a tiny error decides which one is
# taken, and from there on the contexts differ. So a different text tells you nothing about quality. The loss does, and
# you measured it above.
#
# ## What production systems do
#
# - **vLLM** caches FP8 with a scale for each tensor or each head, and its own documentation
#   [says](https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/) that without calibration all scales
#   are 1. INT4 with a scale for each token and head came later, in Triton
#   ([vllm#40835](https://github.com/vllm-project/vllm/pull/40835)).
# - **SGLang** has FP8 and FP4 caches. Its
#   [documentation](https://docs.sglang.io/advanced_features/quantized_kv_cache.html) warns that a step can be extremely
#   slow if dequantising is not fused with attention.
# - **TurboQuant** ([arXiv 2504.19874](https://arxiv.org/abs/2504.19874)) uses a rotation, as in 12.7. Once an outlier
#   is spread over all channels, it does not matter along which axis you group, and no token has to wait for others. The
#   authors report no loss of quality at 3.5 bits. For latent attention a user measured 0.20 to 0.81 of the speed of
#   bf16 ([vllm#41803](https://github.com/vllm-project/vllm/issues/41803)).
#
# **In this library.** `course_lib/kernels/quantised/` has decode kernels for paged and contiguous caches in e4m3 and in
# INT4 with its window, and kernels that append and quantise in one launch.
#
# ## Papers
#
# - Micikevicius et al.: *FP8 Formats for Deep Learning*, [arXiv 2209.05433](https://arxiv.org/abs/2209.05433): e4m3 and
#   its sibling e5m2.
# - Liu et al.: *KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache*, [arXiv
#   2402.02750](https://arxiv.org/abs/2402.02750). Section 3 is the axes.
# - Hooper et al.: *KVQuant*, [arXiv 2401.18079](https://arxiv.org/abs/2401.18079): keys by channel too, but rounded
#   before the rotary positions mix the two channels of a pair.
# - Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao: *FlashAttention-3: Fast and Accurate Attention with Asynchrony and
#   Low-precision*, [arXiv 2407.08608](https://arxiv.org/abs/2407.08608). Section 3.3 is attention in FP8.
# - Chee, Cai, Kuleshov, De Sa: *QuIP: 2-Bit Quantization of Large Language Models With Guarantees*,
#   [arXiv 2307.13304](https://arxiv.org/abs/2307.13304), where incoherent processing comes from.

# %%
progress()
