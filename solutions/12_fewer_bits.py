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

# %% [markdown]
# ## The newest tokens stay whole · deeper
#
# A group of 64 keys can be quantised only when all 64 are there. Until then its keys stay as they are. It also pays to
# keep the newest tokens whole for longer, because attention gives them much weight: KIVI keeps up to 128. So a cache of
# 4-bit keys has two parts: full groups that are quantised, and a *residual window* of recent keys. Appending moves keys
# from one to the other, and no key may be lost, stand in both, or change its place.

# %%
# Exercise 12.4 · The residual window
class KeyWindow:
    """The keys of one head: old ones quantised in full groups, and the newest ones whole.

    It decides which keys are quantised, and when. How they are quantised is the caller's.
    """

    def __init__(self, group: int, window: int, quantise):
        """An empty window.

        group: how many keys are quantised together, at least 1. window: how many of the newest keys always stay whole,
        at least 0; it need not be a multiple of `group`. quantise: a function that takes a tensor [group, head_dim] and
        returns what is kept of it; call it once for each group, with the oldest keys that are still whole, in their
        order. It may keep the tensor, so what you give it must not change later.
        """
        # BEGIN SOLUTION
        self.group, self.window, self.quantise = group, window, quantise
        self.kept, self.whole = [], None
        # END SOLUTION

    def append(self, keys: torch.Tensor) -> None:
        """Adds keys [count, head_dim], count at least 0, the newest last.

        After that, as long as `window` + `group` keys or more are whole, the oldest `group` of them are quantised. The
        caller uses the memory of `keys` again after the call.
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

        It is called only after the first `append`, and [0, head_dim] where no key is whole.
        """
        # BEGIN SOLUTION
        return self.whole
        # END SOLUTION


# %%
best_key_window = check("12.4", KeyWindow).best

# %% [markdown]
# ## The fused decode kernel
#
# Now the two ends meet: a kernel that reads codes and attends. A public implementation dequantised its whole pool
# before every step, and ran at 0.03 tokens per second
# ([sglang#23134](https://github.com/sgl-project/sglang/issues/23134)). In your kernel a tile of 64 tokens is
# dequantised in registers, right where it is used, and nothing of the cache's size is ever written.
#
# Keys have a scale and a middle for each channel and each group of 64 tokens, so a tile of 64 tokens has one row of
# scales. Values have them for each token and each 64 channels. The channels of a byte are neighbours: low nibbles are
# the even channels, high nibbles the odd ones. You need not put them side by side again. A dot product is the sum over
# even channels plus the sum over odd ones, so hold two tiles of queries, two of keys, and two accumulators.

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
            key_heads, up to 32 heads share a KV head: query head h reads KV head h // (query_heads // key_heads).
        key_codes, value_codes: [batch, key_heads, capacity, head_dim // 2], uint8: byte c of a row holds the codes of
            channel 2c, in its low nibble, and of channel 2c + 1, as in exercise 12.1. capacity is a multiple of 64.
        key_scale, key_middle: [batch, key_heads, capacity // 64, head_dim], float32 or float16: for each channel of 64
            tokens. A key is code * scale + middle.
        value_scale, value_middle: [batch, key_heads, capacity, head_dim // 64], the same dtype: for each token and 64
            channels.
        lengths: [batch], int32: tokens in the cache, 0 to capacity, also no multiple of 64. Slots behind them hold
            anything: any codes, and NaN in the scales and middles of their own.
        All are contiguous.

    Returns:
        [batch, query_heads, head_dim], the query's dtype: the softmax of the scores, which are products of query and
        keys divided by √head_dim, times the values; zeros for a length of 0. Multiply and add in float32, or multiply
        in the query's dtype and add in float32. Each code, scale and middle of a token in the cache is loaded once, and
        those of no token are not; PyTorch's own operations do not read the cache, and do no products.
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
