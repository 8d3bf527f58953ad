# %% [markdown]
# # 12 · Fewer bits: a cache of 4 bits, and when it is faster
#
# **The question.** A decode step reads every cached key and value once. With 8 KV heads of dimension 128 and a context
# of 131,072 tokens these are 268 million numbers a layer: 537 MB in 16 bits, and 151 MB in 4 bits with their scales.
# An H200 reads 537 MB in 123 µs at 4.37 TB/s (measured for a read). Four bits are 3.6 times fewer bytes. Is the step
# 3.6 times faster? And is a prompt of 8,192 tokens?
#
# Write down your two guesses. You will count both.
#
# **Time.** About four and a half hours for all six exercises, estimated. The **core path** takes about two hours:
# exercises 12.1, 12.2 and 12.3, and every section whose heading does not end in *deeper*. You can skip the others: run
# their cells and go on. You need chapter 05, and chapter 07 for exercise 12.5.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, interpreting

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Two codes in a byte
#
# A *code* is the small integer that is stored in place of a number. Four bits hold 16 codes, and we use the integers
# from -8 to 7. PyTorch has no tensor of 4-bit integers, so two codes share a byte: one in the low four bits, its *low
# nibble*, and one in the high four bits.
#
# A negative code is stored in *two's complement*: -1 is 1111, and -8 is 1000. To read a nibble you must copy its
# highest bit into all bits above it. This is called *sign extension*. If you leave it out, -1 comes back as 15.

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
# ## Sixteen levels for a group of numbers
#
# A *group* of neighbouring numbers shares two numbers in 16 bits: the *scale*, which is the step between two levels,
# and the *middle*, which is the number that code 0 stands for. A number is then `code * scale + middle`. With groups of
# 64 that is $4 + 2 \cdot 16 / 64 = 4.5$ bits a number.
#
# The smallest number of a group gets the code -8 and the largest one gets 7, so the scale is a fifteenth of the range.
# One outlier makes the range large, and with it the error of all other numbers in its group. So it matters *which*
# numbers are in a group together. In trained models the keys have a few *channels* (places along the head dimension)
# that are large in all tokens; in the values it is rather single tokens. A group can run over 64 tokens of one channel
# or over 64 channels of one token. You write the quantiser for any axis, and a function that finds the better axis from
# data.

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

    x: [tokens, channels], float32, both multiples of `group`; keys or values of one head. group is at least 2.
    Returns: 0 if groups over `group` tokens of a channel lose less, 1 if groups over `group` channels of a token do.
    The loss is the sum of the squared differences between x and codes * scale + middle over all elements. It is decided
    by the numbers of x alone; the two losses always differ by a fifth or more. `x` stays as it is.
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
# ## Where the scales go
#
# Eight bits need less care. *e4m3* is a floating-point format of 8 bits with 3 bits of mantissa and numbers up to 448,
# and one scale for all keys of a head, and one for all its values, is often enough. A key is then `k_scale` times its
# code. The scale is the same for all keys of a head, so it can leave the product: the scores are `k_scale` times the
# query's product with the codes. So you can multiply the *query* by it, once, and the keys never. In the same way
# `v_scale` multiplies the *result*, once.
#
# Half of the public kernels that we read got this wrong at some time: scales that were never passed and stayed 1
# ([sglang#18882](https://github.com/sgl-project/sglang/pull/18882)), or a whole cache that was dequantised in every
# step ([sglang#23134](https://github.com/sgl-project/sglang/issues/23134)).

# %%
# Exercise 12.3 · Where the scales go
def fp8_decode(query, keys, values, k_scale, v_scale):
    """Attention of one query token to a cache of e4m3 codes, without dequantising the cache.

    Args:
        query: [query_heads, head_dim], float32.
        keys, values: [key_heads, length, head_dim], float8_e4m3fn, without NaN: the codes. query_heads is a multiple of
            key_heads, and neighbours share a KV head: query head h reads KV head h // (query_heads // key_heads).
            length is at least 1.
        k_scale, v_scale: [key_heads], float32, positive. A head's keys are k_scale times their codes, and its values
            are v_scale times theirs.
        All have any strides, and stay as they are.

    Returns:
        [query_heads, head_dim], float32: for each query head the softmax of its scores, times the values. A score is
        the product of query and key, divided by √head_dim.
        PyTorch has no product of e4m3 with float32, so convert the codes to float32, but only some tokens at a time: no
        tensor that you make may have more elements than 64 tokens of all keys, or than all scores, or than the query if
        these are larger. No multiplication or division of elements (mul, div) may have a result with more elements than
        all scores, or than the query if that is larger: the scales multiply a query, scores or a result, and not the
        codes. Matrix products (matmul, einsum) are free. F.scaled_dot_product_attention is refused.
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
