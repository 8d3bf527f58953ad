# %% [markdown]
# # 11 · Multi-head latent attention: 128 heads on one shared row
#
# **The question.** DeepSeek-V3 has 61 layers with 128 heads of dimension 128. If it cached the keys and values of all
# these heads, it would need $2 \cdot 128 \cdot 128 = 32{,}768$ numbers for every token and every layer. In 16 bits, a
# context of 32,768 tokens would take 131 GB. The model stores 576 numbers instead, which makes 2.3 GB: 57 times less.
# Grouped-query attention with 2.25 KV heads would be as small, but then 57 query heads would share each key. In
# DeepSeek-V3 all 128 heads keep keys and values *of their own*. How can 128 heads do that with one row of 576 numbers?
# And what does a decode step then cost? An H200 reads 2.3 GB in 0.53 ms at 4.37 TB/s (measured, November 2026). Does
# the attention to this cache take 0.53 ms in a step?
#
# Write down your guess for the last question: less than 0.53 ms, about that, or more. You will count the time in this
# chapter.
#
# **Time.** About four and a half hours for all six exercises, estimated. The **core path** takes about two hours:
# exercises 11.1, 11.2 and 11.3, and every section whose heading does not end in *deeper*. You can skip the others: run
# their cells and go on. You need chapter 07, and chapter 08 for exercise 11.4.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.datasheets import DATASHEETS
from course_lib.hardware.units import format_bandwidth, format_bytes, format_flop_rate, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a token leaves behind
#
# *Multi-head latent attention* (MLA, from DeepSeek-V2) stores two things for each token and layer:
#
# - a **latent** $c$: 512 numbers, from which every head can compute its key and its value;
# - a **rotary key** $k^R$: 64 numbers, one key that is shared by all heads and carries the token's position. A later
#   section shows why it is needed.
#
# Together they are a *row* of 576 numbers, which is $576 \cdot 2 = 1152$ bytes in 16 bits. In 61 layers a token leaves
# 70 KB in the cache. For comparison, Llama-3-70B has 8 KV heads of dimension 128. There a token leaves 2048 numbers a
# layer, and 328 KB in 80 layers.
#
# The saving shrinks when a model runs on several GPUs. *Tensor parallelism* divides a model's heads among GPUs, called
# *ranks*. With KV heads the cache is divided too: each of 8 ranks keeps one of 8 heads, so 256 numbers instead of 2048.
# A latent cannot be divided that way, because every head needs all of it. So **every rank keeps the whole row**. In the
# exercise you count the bytes on a rank for both caches, and find the smallest number of ranks at which KV heads leave
# no more than a latent does.

# %%
# Exercise 11.1 · The cache in numbers
def heads_token_bytes(layers: int, key_heads: int, head_dim: int, item_bytes: int, ranks: int) -> int:
    """Bytes that one token leaves on each of `ranks` GPUs in a cache of the keys and values of key_heads KV heads.

    The heads are divided among the ranks. Either ranks divides key_heads, or key_heads divides ranks, and then
    several ranks keep a copy of the same head. item_bytes is the size of a cached number.
    """
    # BEGIN SOLUTION
    heads_here = max(1, key_heads // ranks)
    return 2 * layers * heads_here * head_dim * item_bytes
    # END SOLUTION


def latent_token_bytes(layers: int, latent_dim: int, rope_dim: int, item_bytes: int, ranks: int) -> int:
    """The same for a cache of latents. A token leaves latent_dim numbers and a rotary key of rope_dim numbers in each
    layer, and every rank keeps all of them."""
    # BEGIN SOLUTION
    return layers * (latent_dim + rope_dim) * item_bytes
    # END SOLUTION


def ranks_until_even(key_heads: int, head_dim: int, latent_dim: int, rope_dim: int) -> int | None:
    """The smallest number of ranks on which KV heads leave at most as many bytes on a rank as latents do.

    Only numbers that divide key_heads are asked for, including 1 and key_heads. None if there is no such number.
    """
    # BEGIN SOLUTION
    for ranks in range(1, key_heads + 1):
        if key_heads % ranks == 0 and 2 * key_heads // ranks * head_dim <= latent_dim + rope_dim:
            return ranks
    return None
    # END SOLUTION


# %%
checked = check("11.1", heads_token_bytes, latent_token_bytes, ranks_until_even)
best_heads_token_bytes, best_latent_token_bytes, best_ranks_until_even = checked.best

# %% [markdown]
# The next cell draws your numbers for one layer, up to 128 ranks. **Predict** for 8 ranks and more: on each GPU, how
# many times the bytes of 8 KV heads does the latent leave?

# %%
from course_lib.figures.latent.ranks import draw_rank_bytes

ranks = (1, 2, 4, 8, 16, 32, 64, 128)
draw_rank_bytes({
    f"{key_heads} KV heads": {number: best_heads_token_bytes(1, key_heads, 128, 2, number) for number in ranks}
    for key_heads in (128, 8)
} | {"latent": {number: best_latent_token_bytes(1, 512, 64, 2, number) for number in ranks}})
# %% [markdown]
# From 4 ranks on, 8 KV heads leave less on each GPU than the latent does, and from 8 ranks on less than half: 512 bytes
# where the latent leaves 1152, which is 2.25 times as many. 128 KV heads leave less only from 64 ranks on. Remember
# this picture when you read that a latent cache is 57 times smaller. That is the ratio on one GPU.
#
# ## How many numbers does a cache hold?
#
# 576 numbers can replace 32,768 because the 32,768 are not independent. All keys and values of a token are computed
# from the same input vector, and a trained model uses only a few of the directions in which they could point.
#
# You can measure this. Let a trained model read a text, and write the keys and values of all heads of one layer as a
# matrix with one row for each token. The *singular value decomposition* picks $r$ fixed vectors and approximates every
# row by a mixture of them, with the smallest possible error. The $r$ vectors are the same for all tokens, so a token
# needs only $r$ numbers, the amounts in its mixture. It also gives each vector a number, its *singular value*. The
# squares of these tell you what share of the matrix's sum of squares $r$ numbers keep.
#
# The next cell does this for a small model with 4 full heads of dimension 32, so a token has 256 numbers in a layer.
# (*Full* heads have keys and values of their own.) This model rotates every key by an angle that depends on the token's
# position. The cell draws two lines: one for the cache as it is, and one for the same cache with this rotation undone.
# **Predict** the second line: how many of the 256 numbers keep 99 % of the sum of squares, without the rotation?

# %%
predict("11 numbers that keep 99 %", ..., "of 256")

# %%
from course_lib.figures.latent.energy import draw_energy
from course_lib.models.kinds import KINDS, loss_on, text_parts
from course_lib.models.low_rank import cached_numbers, energy_kept, rank_for
from course_lib.models.trained import trained_model

kinds = {name: trained_model(name, device=device) for name in ("full heads", "GQA", "MLA")}
_, unseen = text_parts()
kept = {
    "as cached": energy_kept(cached_numbers(kinds["full heads"], unseen, layer=1)),
    "rotation undone": energy_kept(cached_numbers(kinds["full heads"], unseen, layer=1, turned=False)),
}
measured("11 numbers that keep 99 %", rank_for(kept["rotation undone"], 0.99), "of 256")
draw_energy(kept, mark=48)

# %% [markdown]
# Without the rotation, 46 of 256 numbers kept 99 % in one run. (More than 96 cannot be needed, because all 256 are
# computed from the 96 numbers of the layer's input.) That is why a short row is enough. With the rotation, as the cache
# really is, the same share took 156. Each position rotates its key by an angle of its own, so the keys spread over more
# directions. Remember this for the section on positions: **a few numbers are enough for the values and for the keys
# before their rotation, but not for rotated keys.**
#
# The vertical line stands at 48 numbers. That is the row of the same model with latent attention, which you will run at
# the end. Only 32 of the 48 are the latent, from which keys and values are computed; compare these with the 46. The
# other 16 are a rotary key. This model was trained with its row from the start, so training decided what the row holds.
# %% [markdown]
# ## A row for all heads
#
# MLA builds the small number of directions into the model. Let $x$ be a token's input to the layer. One matrix computes
# the latent from it, and the cache keeps only the latent (the rotary key comes later):
#
# $$c = W^{DKV} x \qquad (512 \text{ numbers})$$
#
# From the latent, every head $h$ computes a key and a value with two matrices of its own, each [128, 512]:
#
# $$k_h = W^{UK}_h c, \qquad v_h = W^{UV}_h c$$
#
# *D* stands for down and *U* for up: the first matrix makes one short vector, and the others make many vectors from it,
# two for each head. A head's key still has 128 numbers, and it differs from head to head because the matrices differ.
# What the heads share is the latent: each of their keys is a linear function of the same 512 numbers.

# %%
from course_lib.figures.latent.sharing import draw_sharing

draw_sharing()

# %% [markdown]
# The obvious way to use this cache is the **expanded** form: compute $k_h$ and $v_h$ for all tokens and all heads, and
# then attend as always. The result is right, but it costs much in a decode step. For each head it turns 32,768 latents
# into 32,768 keys, and for the next token it does so again. The cache is small, but every step computes the large one
# anew.
#
# ## Multiply the query instead
#
# A score is a product of three things: the query, the matrix and the latent. You may choose which two you multiply
# first:
#
# $$q_h \cdot (W^{UK}_h c) = (W^{UK\top}_h q_h) \cdot c$$
#
# On the left, the matrix is applied to every token in the cache. On the right it is applied once, to the query. We say
# that the matrix is *absorbed* into the query. The absorbed query has 512 numbers, and its dot product with a latent is
# the score. The same works for the values: compute the weighted sum of the latents first, and apply the matrix once, to
# that sum:
#
# $$\sum_n p_n \, (W^{UV}_h c_n) = W^{UV}_h \Big(\sum_n p_n c_n\Big)$$
#
# Now count the FLOPs of one head's scores for $N$ = 32,768 tokens. A multiply-add is two FLOPs.
#
# | | the matrix | the scores | together |
# |---|---|---|---|
# | keys first | $2 N \cdot 512 \cdot 128$ | $2 N \cdot 128$ | 4.3 GFLOP |
# | query first | $2 \cdot 512 \cdot 128$ | $2 N \cdot 512$ | 0.034 GFLOP |
#
# In the second order the scores cost four times as much, because a dot product now has 512 terms instead of 128. But
# the product with the matrix costs nearly nothing, so the second order needs 128 times fewer FLOPs in all. The next
# picture shows a layer in both forms.

# %%
from course_lib.figures.latent.forms import draw_two_forms

draw_two_forms(heads=128, head_dim=128, latent_dim=512, rope_dim=64)

# %% [markdown]
# ## Why rotary positions prevent this
#
# Positions stand in the way of absorbing. Models rotate queries and keys by their positions (*rotary positions*, RoPE),
# and a key's rotation $R_n$ comes after the matrix: $k_h = R_n W^{UK}_h c$. Then the score of a query at position $m$
# is
#
# $$(R_m q_h) \cdot (R_n W^{UK}_h c) = (W^{UK\top}_h R_{m-n}\, q_h) \cdot c$$
#
# The rotation stands between the query and the matrix, and it depends on the distance $m - n$. So there is no single
# absorbed query: each token in the cache would need its own. The next cell computes the absorbed query for keys at
# several distances, and prints how much it differs from the one for distance 0. **Predict** the difference: nearer to 1
# % or to 100 %?

# %%
def rotated(vector, position, base=10_000.0):
    """RoPE: rotates pairs of numbers of `vector` [dim] by angles that grow with the position."""
    half = vector.shape[0] // 2
    angles = position * base ** (-torch.arange(half, dtype=torch.float64) / half)  # [half]
    first, second = vector[:half], vector[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


torch.manual_seed(11)
one_query, one_matrix = torch.randn(128, dtype=torch.float64), torch.randn(128, 512, dtype=torch.float64)
without_distance = one_matrix.T @ one_query  # [512]
for distance in (0, 1, 10, 100, 1000):
    absorbed = one_matrix.T @ rotated(one_query, distance)
    off = (absorbed - without_distance).norm() / without_distance.norm()
    print(f"distance {distance:>5}: the absorbed query differs by {off:>6.1%}")

# %% [markdown]
# So a query that is absorbed once is wrong for nearly all keys. MLA therefore keeps positions out of the latent. Each
# query head gets 64 more numbers, $q^R_h$, which are rotated, and each token gets one rotated key $k^R$ of 64 numbers.
# That key is not computed from the latent by a head's matrix, so there is nothing to absorb and its rotation does no
# harm. It is called the *decoupled* rotary key. A score adds both parts:
#
# $$s_{h,n} = \frac{(W^{UK\top}_h q_h) \cdot c_n + q^R_h \cdot k^R_n}{\sqrt{128 + 64}}$$
#
# The divisor is the square root of 192, the length that queries and keys have in the *expanded* form. It is not the
# root of 576: absorbing makes the vectors longer, but it leaves each score the same.
#
# All heads share the rotary key. With 128 rotary keys, one for each head, the row would be 8,704 numbers long.
#
# This is the whole layer for one new token `x`. The normalisations of the latent and of the query are left out.
#
# ```python
# row = torch.cat([W_DKV @ x, rotated(W_KR @ x, position)])            # [512 + 64]: all that is cached
# cache = torch.cat([cache, row[None]])                                # [tokens, 576]
# query = (W_Q @ x).view(128, 128)                                     # [heads, head_dim]
# query_rope = rotated((W_QR @ x).view(128, 64), position)             # [heads, 64]
# values = absorbed_step(query, query_rope, cache, W_UK, W_UV)         # [heads, 128]: exercise 11.2
# output = W_O @ values.flatten()
# ```
#
# Now write `absorbed_step` in PyTorch. The check limits the size of every tensor that you make. In some of its cases
# the keys of a single head are larger than the limit, and so is a copy of the cache.

# %%
# Exercise 11.2 · Absorb the matrices
def absorbed_step(query, query_rope, cache, key_up, value_up):
    """One step of latent attention for one sequence, without computing any head's keys or values.

    Args:
        query: [heads, head_dim], float32: each head's query, the part that is not rotated.
        query_rope: [heads, rope_dim]: each head's query, the rotated part.
        cache: [length, latent_dim + rope_dim]: a latent and then a rotary key for each token, length at least 1.
        key_up: [heads, head_dim, latent_dim]: W_UK of each head. Its key for a latent c is key_up[h] @ c.
        value_up: [heads, value_dim, latent_dim]: W_UV of each head. Its value is value_up[h] @ c.
        All are float32, with any strides.

    Returns:
        [heads, value_dim]: for each head the softmax of its scores, times its values. A score is the product of query
        and key plus the product of their rotary parts, divided by √(head_dim + rope_dim). No tensor that you make may
        have more elements than the largest of these: key_up, value_up, the scores of all heads, and the absorbed
        queries of all heads with their rotary part. Write out the products: F.scaled_dot_product_attention is refused.
    """
    # BEGIN SOLUTION
    latent_dim = key_up.shape[2]
    latents, rope_keys = cache[:, :latent_dim], cache[:, latent_dim:]  # views
    absorbed = torch.einsum("hd,hdc->hc", query, key_up)  # [heads, latent_dim]
    scores = absorbed @ latents.T + query_rope @ rope_keys.T  # [heads, length]
    weights = torch.softmax(scores / math.sqrt(query.shape[1] + query_rope.shape[1]), dim=1)
    mixed = weights @ latents  # [heads, latent_dim]
    return torch.einsum("hc,hvc->hv", mixed, value_up)
    # END SOLUTION


# %%
best_absorbed_step = check("11.2", absorbed_step).best

# %% [markdown]
# The next cell compares your step with the expanded form, in results and in time, for 16 heads of DeepSeek-V3's sizes.
# For each head and $N$ tokens, the expanded form needs $2 N \cdot 512 \cdot 256$ FLOPs for keys and values and $2 N
# \cdot 320$ to attend. The absorbed form needs $2 N \cdot 1088$. **Predict** how many times as long the expanded form
# takes.

# %%
predict("11 expanded decode step", ..., "times as long as absorbed")

# %%
from course_lib.hardware.timing import measure


def expanded_step(query, query_rope, cache, key_up, value_up):
    """The same as exercise 11.2, but it computes the keys and values of every head first."""
    latent_dim = key_up.shape[2]
    latents, rope_keys = cache[:, :latent_dim], cache[:, latent_dim:]
    keys = latents @ key_up.transpose(1, 2)  # [heads, length, head_dim]
    values = latents @ value_up.transpose(1, 2)  # [heads, length, value_dim]
    scores = (keys @ query[:, :, None])[:, :, 0] + query_rope @ rope_keys.T  # [heads, length]
    weights = torch.softmax(scores / math.sqrt(query.shape[1] + query_rope.shape[1]), dim=1)
    return (weights[:, None, :] @ values)[:, 0]


heads, length = 16, 32_768 if on_gpu else 2048
sizes = ((heads, 128), (heads, 64), (length, 576), (heads, 128, 512), (heads, 128, 512))
tensors = [torch.randn(size, device=device) / size[-1] ** 0.5 for size in sizes]
print("largest difference:", f"{(best_absorbed_step(*tensors) - expanded_step(*tensors)).abs().max().item():.1e}")
taken = {}
for name, function in (("absorbed (11.2)", best_absorbed_step), ("expanded", expanded_step)):
    taken[name] = measure(partial(function, *tensors), warmup=1, seconds=0.5, device=device).median
    print(f"{name:16} {format_seconds(taken[name]):>9} for {heads} heads and {length:,} tokens")
fast, slow = taken.values()
measured("11 expanded decode step", slow / fast, "times as long as absorbed")

# %% [markdown]
# By FLOPs the factor is $(512 \cdot 256 + 320) / 1088 = 121$. The measured factor may be smaller or larger than 121,
# for two reasons. The large products of the expanded form run at a higher rate than the thin ones of a decode step,
# which makes the factor smaller. But the expanded form also writes the keys and values of all heads to memory and reads
# them again, which makes it larger.
#
# ## A decode step that computes instead of waiting
#
# Look again at the absorbed form. All heads multiply with the same row, and the values are the first 512 numbers of the
# keys. So it is chapter 07's decode with **one KV head of dimension 576 for all the query heads, and V is a slice of
# K**. A kernel that reads each row once moves 1152 bytes for a token. With $H$ heads, it does $2 H \cdot 576$ FLOPs for
# the scores and $2 H \cdot 512$ for the weighted sum of latents:
#
# $$\text{intensity} = \frac{2 H (576 + 512)}{2 \cdot 576} = 1.89 \, H \text{ FLOP/byte}$$
#
# With 128 heads that is 242 FLOP/byte. Grouped-query attention with groups of 8 has 8 FLOP/byte, and multi-head
# attention has 1.
#
# Arithmetic becomes the limit once there are so many heads that $1.89 H$ reaches the machine's balance point. An H200
# has 989 TFLOP/s and 4.8 TB/s by its datasheet, so 206 FLOP/byte: 110 heads. With what we measured on one (November
# 2026, PyTorch 2.11), 720 to 790 TFLOP/s for a large product and 4.37 TB/s for a read, it is 165 to 181 FLOP/byte: 88
# to 96 heads. So with 128 heads arithmetic is the limit.
#
# > **The answer to the opening question: more.** At 32,768 tokens the attention to the cache does $2 \cdot 128 \cdot
# > 1088 \cdot 32768 \cdot 61 = 557$ GFLOP in a step, which takes at least 0.70 ms at 790 TFLOP/s. Reading the cache
# > takes 0.53 ms. Both are floors: at these rates no kernel takes less. A real kernel takes more for a single sequence:
# > at this shape the library's fastest took 37.6 µs a layer on an H100 (measured, November 2026), and 61 layers of that
# > are 2.3 ms.
#
# These times leave out the weights, which a large batch of sequences reads once for all of them. A step of a single
# sequence must also read $W^{UK}$ and $W^{UV}$ of all layers, 2.0 GB, and then memory is the limit again. Exercise 11.6
# counts both.
#
# The first picture shows the roofline of an H200 by its datasheet, and the second one that of this machine. **Predict**
# at how many heads this machine's roof bends. (If chapter 01 has not measured this machine, the second cell does it
# first, which takes some ten seconds.)

# %%
from course_lib.figures.latent.roofline import draw_datasheet_roofline, draw_latent_roofline
from course_lib.hardware.ceilings.measured import ceilings

h200 = DATASHEETS["H200"]
draw_datasheet_roofline("an H200 by its datasheet", h200)

# %%
roof = ceilings()
unit = "float16" if on_gpu else "float32"
draw_latent_roofline(roof, unit, item_bytes=2 if on_gpu else 4, heads=(1, 16, 32, 64, 128))

# %% [markdown]
# Two techniques change the intensity of a decode step, and so its place on the H200's roofline. With tensor parallelism
# on 8 ranks, a rank has 16 of the 128 heads, but it still reads the whole row. Its intensity falls to 30 FLOP/byte, so
# it waits for memory again. With *speculative decoding*, a small model guesses the next few tokens and the large one
# checks them all in one step. A step then has several query tokens. With 4 of them every row is multiplied with $4 H$
# queries, so the intensity is four times as high.
# %% [markdown]
# ## The kernel that comes to mind first
#
# This kernel gives the right result. It has one program for each query head of each sequence, it loads keys and values
# where the formula uses them, and it has no `tl.dot`. Read it, and **predict** how many times it loads each row of the
# cache for 16 heads, with 32 + 16 numbers in a row. The cell after it meters the bytes.

# %%
@triton.jit
def head_by_head_kernel(
    query_pointer, cache_pointer, output_pointer, lengths_pointer, heads, capacity, scale_log2,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: one absorbed query head of one sequence. Contiguous tensors; rows of LATENT + ROPE numbers."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    width = LATENT + ROPE
    latent_columns = tl.arange(0, LATENT)  # [LATENT]
    rope_columns = LATENT + tl.arange(0, ROPE)  # [ROPE]
    query_row = query_pointer + (sequence * heads + head) * width
    query = tl.load(query_row + latent_columns).to(tl.float32)  # [LATENT]
    query_rope = tl.load(query_row + rope_columns).to(tl.float32)  # [ROPE]
    length = tl.load(lengths_pointer + sequence)
    running_max, running_sum = float("-inf"), 0.0
    accumulator = tl.zeros([LATENT], tl.float32)
    for first in range(0, length, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (tokens < length)[:, None]
        rows = cache_pointer + (sequence.to(tl.int64) * capacity + tokens)[:, None] * width  # [BLOCK_N, 1]
        keys = tl.load(rows + latent_columns[None, :], mask=present, other=0.0).to(tl.float32)  # [BLOCK_N, LATENT]
        rope_keys = tl.load(rows + rope_columns[None, :], mask=present, other=0.0).to(tl.float32)  # [BLOCK_N, ROPE]
        scores = tl.sum(keys * query[None, :], axis=1) + tl.sum(rope_keys * query_rope[None, :], axis=1)  # [BLOCK_N]
        scores = tl.where(tokens < length, scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_max)  # [BLOCK_N]
        rescale = tl.exp2(running_max - new_max)
        values = tl.load(rows + latent_columns[None, :], mask=present, other=0.0).to(tl.float32)  # [BLOCK_N, LATENT]
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, axis=0)  # [LATENT]
        running_sum = running_sum * rescale + tl.sum(weights, axis=0)
        running_max = new_max
    output = accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)
    output_row = output_pointer + (sequence * heads + head) * LATENT
    tl.store(output_row + latent_columns, output.to(output_pointer.dtype.element_ty))


def head_by_head(query, cache, lengths, scale, value_dim):
    """Attention of absorbed queries [batch, heads, width] to latents [batch, capacity, width], all contiguous."""
    batch, heads, width = query.shape
    output = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    head_by_head_kernel[(batch, heads)](
        query, cache, output, lengths, heads, cache.shape[1], scale * math.log2(math.e),
        LATENT=value_dim, ROPE=width - value_dim, BLOCK_N=32,
    )
    return output


# %%
from course_lib.hardware.meter.metered import metered

query, cache = torch.randn(1, 16, 48), torch.randn(1, 200, 48)
lengths = torch.tensor([200], dtype=torch.int32)
report = metered(head_by_head, query, cache, lengths, 0.1, 32)
print(f"rows in use {cache.nbytes:,} bytes, moved {report.total_bytes:,}: {report.total_bytes / cache.nbytes:.1f} "
      "times as many")

# %% [markdown]
# It moves nearly 27 times as many bytes as the rows have, for two reasons. Each of the 16 heads reads the rows for
# itself. And each head reads the latent twice, once as the key and once as the value: $2 \cdot 32 + 16 = 80$ numbers of
# a row that has 48.
#
# At DeepSeek-V3's sizes, reading the latent twice costs a factor of $1088 / 576 = 1.89$. This mistake is easy to make,
# because the formula treats K and V as two tensors. One of vLLM's decode kernels made it, and also used too few splits
# (chapter 08). [vllm#33529](https://github.com/vllm-project/vllm/issues/33529) mends both.
#
# ## Read the row once
#
# Now write the kernel that reads a row once for up to 64 heads.
#
# - The query heads are the rows of a tile, as in exercise 7.5. One program takes up to 64 heads and no more, because
#   the output tile of 64 × 512 float32 numbers already has 131 KB. That is half of all the registers of a
#   multiprocessor.
# - The sides of Triton's tiles are powers of two, and 576 is not. So load a row in two tiles, 512 + 64, and add two
#   products for the scores.
# - The values need no load: they are the tile of latents that you already hold.
# - Scale the sum of both products, not one of them.
# - Multiply tiles of float16 as they are: `tl.dot` adds up in float32 anyway. With `input_precision="ieee"`, tiles that
#   you convert to float32 first miss the tensor cores. With 64 rows and 512 + 64 columns, compiled for an H100 by
#   Triton 3.9, the kernel's code then has 8,700 multiply-add instructions. It cannot start, because it needs 258 KB of
#   shared memory and a program can have 232 KB.
#
# The next picture shows one step of the loop: one load, and two uses of what it brings.

# %%
from course_lib.figures.latent.one_load import draw_one_load

draw_one_load(rows=64, latent_dim=512, rope_dim=64, tokens=32)

# %%
# Exercise 11.3 · A decode kernel that reads the latent once
@triton.jit
def latent_decode_kernel(
    query_pointer, cache_pointer, output_pointer, lengths_pointer, heads,
    query_batch_stride, query_head_stride, cache_batch_stride, cache_token_stride,
    output_batch_stride, output_head_stride, scale_log2,
    ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program (block, sequence): ROWS query heads of one sequence, from head block · ROWS on, over its cached rows."""
    # BEGIN SOLUTION
    sequence = tl.program_id(1).to(tl.int64)  # 64 bits: a cache can pass 2^31 elements
    members = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS], of which those below `heads` exist
    exist = (members < heads)[:, None]
    latent_columns = tl.arange(0, LATENT)  # [LATENT]
    rope_columns = LATENT + tl.arange(0, ROPE)  # [ROPE]
    query_rows = query_pointer + sequence * query_batch_stride + members[:, None] * query_head_stride  # [ROWS, 1]
    query = tl.load(query_rows + latent_columns[None, :], mask=exist, other=0.0)  # [ROWS, LATENT]
    query_rope = tl.load(query_rows + rope_columns[None, :], mask=exist, other=0.0)  # [ROWS, ROPE]
    cache_pointer += sequence * cache_batch_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, LATENT], tl.float32)
    length = tl.load(lengths_pointer + sequence)
    for first in range(0, length, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        present = tokens < length
        rows = cache_pointer + tokens[:, None] * cache_token_stride  # [BLOCK_N, 1]
        latents = tl.load(rows + latent_columns[None, :], mask=present[:, None], other=0.0)  # [BLOCK_N, LATENT]
        rope_keys = tl.load(rows + rope_columns[None, :], mask=present[:, None], other=0.0)  # [BLOCK_N, ROPE]
        scores = tl.dot(query, tl.trans(latents), input_precision="ieee")  # [ROWS, BLOCK_N]
        scores += tl.dot(query_rope, tl.trans(rope_keys), input_precision="ieee")
        scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [ROWS]
        weights = tl.exp2(scores - new_max[:, None])  # [ROWS, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [ROWS]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")  # the latents are the values
        accumulator = accumulator * rescale[:, None] + product  # [ROWS, LATENT]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # a sequence without a token: 0 / 1 = 0
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)  # [ROWS, LATENT]
    output_rows = output_pointer + sequence * output_batch_stride + members[:, None] * output_head_stride
    tl.store(output_rows + latent_columns[None, :], output, mask=exist)
    # END SOLUTION


def latent_decode(query, cache, lengths, scale, value_dim):
    """One step of absorbed latent attention, by one kernel that reads each row once for up to 64 heads.

    Args:
        query: [batch, heads, value_dim + rope_dim]: absorbed queries, the latent part first and the rotary part behind
            it. From 1 head on, any number; value_dim 16, 32, 64, 128, 256 or 512 in float16 (up to 256 on a T4), up to
            128 in float32; rope_dim 16, 32 or 64; the last stride is 1.
        cache: [batch, capacity, value_dim + rope_dim], query's dtype: the latent first and the rotary key behind it.
            Any strides but the last, which is 1; they may reach beyond 2³¹ elements.
        lengths: [batch], int32: tokens of each sequence in its cache. Slots behind them hold anything, NaN too. 0 is
            allowed.
        scale: the factor of the scores, a float.
        value_dim: how many numbers of a row are the latent, which is both key and value.

    Returns:
        softmax(scale · query · rowᵀ) times the latents, [batch, heads, value_dim], in query's dtype; zeros for a
        sequence of length 0. The bytes are counted: with 64 heads or fewer, load each number of a row once. A program
        takes at most 64 heads, in a tile of at least 16 rows, and multiplies tiles of float16 without converting them.
        PyTorch must not copy the cache. No tensor that you make may have more elements than the query or the cache.
    """
    batch, heads, width = query.shape
    output = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    # A tile of 64 rows needs the shared memory of an A100 or an H100; elsewhere a program takes 16 heads.
    roomy = not query.is_cuda or torch.cuda.get_device_capability(query.device) in ((8, 0), (9, 0), (10, 0))
    most_rows = 64 if roomy else 16
    # Set `rows`, the number of rows of a program's tile (a power of two from 16 to most_rows), and `grid`.
    # BEGIN SOLUTION
    rows = min(most_rows, max(16, triton.next_power_of_2(heads)))
    grid = (triton.cdiv(heads, rows), batch)
    # END SOLUTION
    latent_decode_kernel[grid](
        query, cache, output, lengths, heads, *query.stride()[:2], *cache.stride()[:2], *output.stride()[:2],
        scale * math.log2(math.e), ROWS=rows, LATENT=value_dim, ROPE=width - value_dim, BLOCK_N=32,
        num_warps=8 if rows == 64 else 4, num_stages=2,
    )
    return output


# %%
best_latent_decode = check("11.3", latent_decode).best

# %% [markdown]
# ## Predicted against measured
#
# First the bytes. The meter counts both kernels for several numbers of heads, at a context of 64 tokens. A row has 576
# numbers, as in the question. Each takes four bytes here, because in the interpreter float32 works at any width.
# **Predict** the column of your kernel, "row read once".

# %%
print("heads      head by head      row read once     cache in use")
for heads in (1, 4, 16, 64):
    query, cache = torch.randn(1, heads, 576), torch.randn(1, 64, 576)
    lengths = torch.tensor([64], dtype=torch.int32)
    each, once = (metered(function, query, cache, lengths, 0.1, 512).total_bytes
                  for function in (head_by_head, best_latent_decode))
    print(f"{heads:>5} {each:>15,} B {once:>16,} B {cache.nbytes:>14,} B")

# %% [markdown]
# Besides the cache, your kernel moves the queries and outputs: $576 + 512$ numbers for each head. At 64 heads and only
# 64 tokens they are nearly twice as many bytes as the cache. At 32,768 tokens they would be only a 270th of the cache.
#
# Now the time. On a GPU the cell below measures a step for 16, 64 and 128 heads. It also prints the floor, the least
# time that a step can take: the longer of the time to read the rows and the time for the arithmetic. **Predict** which
# of the two is longer in each line. Without a GPU the cell prints only the floors of an H200 by its datasheet, because
# a kernel's time in the interpreter means nothing.

# %%
def floors(batch, heads, length, bandwidth, rate):
    """Seconds for reading the rows once, and for the arithmetic, at 512 + 64 numbers of two bytes."""
    return batch * length * 1152 / bandwidth, 2 * batch * heads * length * 1088 / rate


batch, length = (64, 8192) if not on_gpu or machine().memory_bytes > 30e9 else (4, 4096)
if on_gpu:
    bandwidth, rate = roof.memory_bandwidth, roof.matmul_rate["float16"]
else:
    bandwidth, rate = DATASHEETS["H200"].bandwidth, DATASHEETS["H200"].matmul_rate["float16"]
print(f"batch {batch}, {length:,} tokens: the cache has {format_bytes(batch * length * 1152)}")
for heads in (16, 64, 128):
    reading, computing = floors(batch, heads, length, bandwidth, rate)
    line = f"{heads:>4} heads: reading {format_seconds(reading):>9}, arithmetic {format_seconds(computing):>9}"
    if on_gpu:
        query = torch.randn(batch, heads, 576, device=device, dtype=torch.float16)
        cache = torch.randn(batch, length, 576, device=device, dtype=torch.float16)
        lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
        runs = {"yours (11.3)": best_latent_decode, **({"head by head": head_by_head} if heads == 16 else {})}
        for name, function in runs.items():
            seconds = measure(partial(function, query, cache, lengths, 192**-0.5, 512), device=device).median
            line += f"; {name} {format_seconds(seconds)}, {max(reading, computing) / seconds:.0%} of the floor's rate"
    print(line)

# %% [markdown]
# On a Hopper card the course's answer to 11.3 takes longer than its floor, for two reasons. It has one program for each
# 64 heads of each sequence, so it needs a large batch to fill the chip; the section on splits changes that. And a tile
# of 64 rows and 512 columns needs more registers than there are, so the compiler *spills*: it puts some of the numbers
# into memory and fetches them again. Compiled for an H100 by Triton 3.9, each thread of the course's answer takes all
# 255 registers that it can have, and keeps 464 bytes more in memory. Yours may differ. The section on the seesaw shows
# what FlashMLA, DeepSeek's own kernel, does about that.
#
# ## Rows come in tiles of 64 · deeper
#
# The rows of a tile are query heads or, with speculative decoding, query heads times query tokens. The tensor cores of
# a Hopper card multiply 64 rows at a time. FlashMLA fills a tile that has fewer with empty rows, so 16 rows take as
# long as 64, and 65 rows take two tiles.
#
# So you can predict a time without a GPU. FlashMLA computes 16 heads with 1 to 5 query tokens, for 4096 tokens of
# context. How many times as long does it take with 4 query tokens as with 1, and with 5 as with 4? A [report in its
# repository](https://github.com/deepseek-ai/FlashMLA/issues/30) has the times on an H20.

# %%
predict("11 from 4 to 5 query tokens", ..., "times as long")

# %%
from course_lib.figures.latent.tiles import REPORTED, draw_tile_steps

measured("11 from 4 to 5 query tokens", REPORTED[5] / REPORTED[4], "times as long")
draw_tile_steps(heads=16, tile_rows=64)

# %% [markdown]
# Four query tokens take 2 % longer than one. So guessing three tokens ahead costs nearly nothing in attention: with the
# token before them the guesses make 64 rows, which is one tile. Five query tokens take 1.90 times as long as four. On
# this card a fourth guess does not pay in attention, because one tile is already limited by arithmetic. On an H200 the
# fourth guess costs less. One tile does 121 FLOP/byte there, below the card's 206, so memory is the limit. Two tiles do
# 242, so five tokens take $242 / 206 = 1.17$ times as long as four (derived from the datasheet).
# %% [markdown]
# ## Split the rows · deeper
#
# One sequence with 128 heads makes two programs, on a chip with 132 multiprocessors. Chapter 08's answer works here
# too: cut the cache's rows into *splits*, attend to each, and merge. In chapter 08 a sequence with 8 KV heads had 8
# programs even without splits. Here it has only one KV head, so splits matter even more.
#
# How many splits do you need? The programs of one launch are sequences, times blocks of 64 heads, times splits. They
# should fill the chip's *slots*, the places for running programs, once: that is one *wave*. Programs beyond the slots
# wait for a second wave. A rule that looks only at the length gives each of 64 sequences as many splits as it gives a
# single one, and then most of the work is merging. vLLM had such a rule; a change that counts the programs is proposed
# in [vllm#50629](https://github.com/vllm-project/vllm/pull/50629).
#
# Two things are new in the kernels:
#
# - **A split may be empty.** Cut 5 tokens into 7 splits: each has ⌈5 / 7⌉ = 1 token, so the last two have none. An
#   empty split must store zeros and a log-sum-exp of $-\infty$. If it stores nothing, the merge reads memory that
#   nobody wrote. If it divides 0 by 0, its NaN makes the whole merged row NaN.
# - **The merge is wide.** In chapter 08 a program loaded the results of all splits as one tile. With 64 splits of 512
#   float32 numbers that tile has 131 KB, as much as the output tile of the split kernel, and with 66 it is filled up to
#   128 rows and 262 KB. That is all the registers of a multiprocessor. So loop over the splits, and hold one result at
#   a time.
#
# Start the split kernel from your kernel of 11.3.

# %%
# Exercise 11.4 · Split and merge
def latent_splits(batch: int, heads: int, length: int, slots: int) -> int:
    """How many splits: as many as fit in one wave, but at most one for every 64 rows, rounded up.

    The number of programs of a launch is batch, times blocks of 64 heads (the last may be smaller), times splits. It
    must not exceed slots. There are at most ⌈length / 64⌉ splits, and always at least 1.
    """
    # BEGIN SOLUTION
    programs = batch * -(-heads // 64)
    return max(1, min(slots // programs, -(-length // 64)))
    # END SOLUTION


@triton.jit
def latent_split_kernel(
    query_pointer, cache_pointer, outputs_pointer, lses_pointer, lengths_pointer, heads, splits,
    query_batch_stride, query_head_stride, cache_batch_stride, cache_token_stride, scale_log2,
    ROWS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program (block of heads, split, sequence). It stores in row (sequence · heads + head) · splits + split."""
    # BEGIN SOLUTION
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    members = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exist = (members < heads)[:, None]
    latent_columns = tl.arange(0, LATENT)  # [LATENT]
    rope_columns = LATENT + tl.arange(0, ROPE)  # [ROPE]
    query_rows = query_pointer + sequence * query_batch_stride + members[:, None] * query_head_stride  # [ROWS, 1]
    query = tl.load(query_rows + latent_columns[None, :], mask=exist, other=0.0)  # [ROWS, LATENT]
    query_rope = tl.load(query_rows + rope_columns[None, :], mask=exist, other=0.0)  # [ROWS, ROPE]
    cache_pointer += sequence * cache_batch_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, LATENT], tl.float32)
    length = tl.load(lengths_pointer + sequence)
    split_length = tl.cdiv(length, splits)
    start = split * split_length
    last = tl.minimum(start + split_length, length)
    for first in range(start, last, BLOCK_N):
        tokens = first + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        present = tokens < last  # what follows belongs to the next split
        rows = cache_pointer + tokens[:, None] * cache_token_stride  # [BLOCK_N, 1]
        latents = tl.load(rows + latent_columns[None, :], mask=present[:, None], other=0.0)  # [BLOCK_N, LATENT]
        rope_keys = tl.load(rows + rope_columns[None, :], mask=present[:, None], other=0.0)  # [BLOCK_N, ROPE]
        scores = tl.dot(query, tl.trans(latents), input_precision="ieee")  # [ROWS, BLOCK_N]
        scores += tl.dot(query_rope, tl.trans(rope_keys), input_precision="ieee")
        scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [ROWS]
        weights = tl.exp2(scores - new_max[:, None])  # [ROWS, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [ROWS]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        product = tl.dot(weights.to(latents.dtype), latents, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [ROWS, LATENT]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # without a row: 0 / 1 = 0, and -inf + log 1 = -inf
    results = (sequence * heads + members) * splits + split  # [ROWS]
    outputs = accumulator / total[:, None]  # [ROWS, LATENT]
    tl.store(outputs_pointer + results[:, None] * LATENT + latent_columns[None, :], outputs, mask=exist)
    tl.store(lses_pointer + results, running_max + tl.log2(total), mask=members < heads)  # in units of log 2
    # END SOLUTION


@triton.jit
def latent_merge_kernel(
    outputs_pointer, lses_pointer, output_pointer, splits, LATENT: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program r merges the splits of row r, a query head of a sequence."""
    # BEGIN SOLUTION
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, LATENT)  # [LATENT]
    members = tl.arange(0, BLOCK_S)  # [BLOCK_S], of which the first `splits` exist
    lses = tl.load(lses_pointer + row * splits + members, mask=members < splits, other=float("-inf"))  # [BLOCK_S]
    largest = tl.max(lses, axis=0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)  # never -inf - -inf
    total = tl.sum(tl.exp2(lses - reference), axis=0)
    output = tl.zeros([LATENT], tl.float32)
    for split in range(0, splits):
        weight = tl.exp2(tl.load(lses_pointer + row * splits + split) - reference)
        output += weight * tl.load(outputs_pointer + (row * splits + split) * LATENT + columns)
    output = output / tl.where(total == 0.0, 1.0, total)
    tl.store(output_pointer + row * LATENT + columns, output.to(output_pointer.dtype.element_ty))
    # END SOLUTION


def split_latent_decode(query, cache, lengths, scale, value_dim, splits):
    """The same as `latent_decode` of 11.3, in two kernels: one attends to each split, and one merges the results.

    Args:
        query, cache, lengths, scale, value_dim: as in 11.3, with any number of heads from 1 on, value_dim 16, 32, 64,
            128, 256 or 512 in float16 (up to 256 on a T4), up to 128 in float32, and rope_dim 16, 32 or 64. Any strides
            but the last, which is 1; the cache's may reach beyond 2³¹ elements. Lengths may be 0, and slots behind them
            hold anything.
        splits: at least 1, and perhaps more than a sequence has tokens: then some have none.

    Returns:
        [batch, heads, value_dim], in query's dtype, and contiguous; zeros for a sequence of length 0. The bytes are
        counted: load every row once for up to 64 heads (a program takes at most 64), and write and read the partial
        results of all splits once; the merge may read the log-sum-exps twice, and loads the results split by split.
        Tiles of float16 are multiplied without converting them. Partial results are at most value_dim + 1 float32
        numbers for each split and head. PyTorch must not copy the cache. No tensor that you make may have more elements
        than the cache, or than the partial results of all splits.
    """
    # BEGIN SOLUTION
    batch, heads, width = query.shape
    outputs = torch.empty(batch, heads, splits, value_dim, dtype=torch.float32, device=query.device)
    lses = torch.empty(batch, heads, splits, dtype=torch.float32, device=query.device)
    output = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    roomy = not query.is_cuda or torch.cuda.get_device_capability(query.device) in ((8, 0), (9, 0), (10, 0))
    rows = min(64 if roomy else 16, max(16, triton.next_power_of_2(heads)))
    latent_split_kernel[(triton.cdiv(heads, rows), splits, batch)](
        query, cache, outputs, lses, lengths, heads, splits, *query.stride()[:2], *cache.stride()[:2],
        scale * math.log2(math.e), ROWS=rows, LATENT=value_dim, ROPE=width - value_dim, BLOCK_N=32,
        num_warps=8 if rows == 64 else 4, num_stages=2,
    )
    latent_merge_kernel[(batch * heads,)](
        outputs, lses, output, splits, LATENT=value_dim, BLOCK_S=triton.next_power_of_2(splits)
    )
    return output
    # END SOLUTION


# %%
best_latent_splits, best_split_latent_decode = check("11.4", latent_splits, split_latent_decode).best

# %% [markdown]
# How many splits does your rule choose on a card with 132 multiprocessors, and what do the partial results cost? Each
# split stores 513 float32 numbers for each head, an output and its log-sum-exp. They are written once and read once, so
# they take $2 \cdot 513 \cdot 4$ bytes. **Predict** the last column of the first line.

# %%
print("batch  heads   tokens   splits   partial results, written and read, in percent of the cache")
for batch, heads, length in ((1, 128, 32_768), (1, 16, 32_768), (16, 128, 8192), (64, 128, 4096)):
    splits = best_latent_splits(batch, heads, length, 132)
    extra = 2 * splits * heads * 513 * 4 / (length * 1152)
    print(f"{batch:>5} {heads:>6} {length:>8,} {splits:>8} {extra:>20.1%}")

# %% [markdown]
# In chapter 08 the partial results were a thousandth of the cache. Here, in the first line, they are 92 % of it: each
# of 128 heads has 66 splits, and the cache is 57 times smaller. So the merge takes time too. Use as many splits as fill
# the chip once, and no more, because more splits only add bytes.
#
# ## The seesaw · deeper
#
# On Hopper a product of tiles runs on a group of four warps, a *warp group*. To keep the tensor cores busy you need two
# groups, so that one multiplies while the other computes its softmax. In chapter 09 each warp group has an output tile
# of its own. Here that does not fit: one tile of 64 × 512 float32 numbers fills half of a multiprocessor's registers,
# and two would fill all of them.
#
# FlashMLA solves this with the *seesaw*. Two warp groups, which we call workers, share **one** output tile: the left
# worker owns columns 0 to 255 and the right worker columns 256 to 511. They also divide the work on the scores. Take
# two blocks of keys, an even one and an odd one. The left worker computes the scores and weights of the even block, and
# the right worker those of the odd block. Then they exchange the weights, and each adds *both* blocks to its own half.

# %%
from course_lib.figures.latent.seesaw import draw_seesaw

draw_seesaw()

# %% [markdown]
# The difficulty is the running maximum. Let $m$ be the maximum before the pair. The even block raises it to $m_0 \ge
# m$, and the odd block raises that to $m_1 \ge m_0$. A score $s$ of the even block became the weight $e^{s - m_0}$, so
# we say that it is *measured from* $m_0$. The weights of the odd block are measured from $m_1$, and in the end
# everything must be, the old output too. So each part is multiplied once by the factor that is missing:
#
# | part of a half of the output | measured from | factor in all | with $m = 1$, $m_0 = 3$, $m_1 = 4$ |
# |---|---|---|---|
# | the old output | $m$ | $e^{m - m_0} \cdot e^{m_0 - m_1}$ | $e^{-3}$ |
# | the even block | $m_0$ | $e^{m_0 - m_1}$ | $e^{-1}$ |
# | the odd block | $m_1$ | 1 | 1 |
#
# A worker may take these steps in any order, so that both have work all the time. The left worker adds its own even
# block at once and the odd one when its weights arrive. The right worker does the opposite. Write the step of one pair
# in PyTorch. The check refuses any tensor that is larger than one worker's half of the output, so no product may cover
# both halves.

# %%
# Exercise 11.5 · The seesaw
def seesaw_attention(query, cache, scale, value_dim, block):
    """Latent attention of one sequence by two workers, each of which owns half of the output's columns.

    Args:
        query: [heads, width], float32, any strides: absorbed queries, width at least value_dim.
        cache: [length, width], float32, any strides: the first value_dim numbers of a row are its value. length is a
            multiple of 2 · block, and at least that.
        scale: the factor of the scores, a float.
        value_dim: even, and at least 2 · block.
        block: the number of keys in a block.

    Returns:
        (left, right): columns 0 to value_dim / 2 - 1 and value_dim / 2 to value_dim - 1 of softmax(scale · query ·
        cacheᵀ) · values, [heads, value_dim / 2] each. Go through the keys once, in pairs of blocks. The scores of a
        block are computed once, for both workers, so a pair takes six matrix products and no more. No tensor that you
        make may have more elements than heads · value_dim / 2.
    """
    heads, half = query.shape[0], value_dim // 2
    left, right = torch.zeros(heads, half), torch.zeros(heads, half)  # each worker's columns
    largest = torch.full((heads, 1), -math.inf)  # m
    total = torch.zeros(heads, 1)  # sum of the weights
    for start in range(0, cache.shape[0], 2 * block):
        even, odd = cache[start : start + block], cache[start + block : start + 2 * block]  # [block, width], views
        # BEGIN SOLUTION
        even_scores = query @ even.T * scale  # [heads, block], the left worker's
        even_largest = torch.maximum(largest, even_scores.amax(dim=1, keepdim=True))  # m0
        even_weights = torch.exp(even_scores - even_largest)
        odd_scores = query @ odd.T * scale  # [heads, block], the right worker's
        odd_largest = torch.maximum(even_largest, odd_scores.amax(dim=1, keepdim=True))  # m1
        odd_weights = torch.exp(odd_scores - odd_largest)
        first, second = torch.exp(largest - even_largest), torch.exp(even_largest - odd_largest)  # [heads, 1]
        left = left * first + even_weights @ even[:, :half]  # its own block first
        left = left * second + odd_weights @ odd[:, :half]
        right = right * (first * second) + odd_weights @ odd[:, half:value_dim]  # its own block first
        right = right + (even_weights * second) @ even[:, half:value_dim]
        even_sum, odd_sum = even_weights.sum(dim=1, keepdim=True), odd_weights.sum(dim=1, keepdim=True)
        total = (total * first + even_sum) * second + odd_sum
        largest = odd_largest
        # END SOLUTION
    return left / total, right / total


# %%
best_seesaw_attention = check("11.5", seesaw_attention).best
# %% [markdown]
# ## Expanded for prefill, absorbed for decode · deeper
#
# For one query token the absorbed form takes less time. For many query tokens it takes more, because its work for each
# query is larger. For each head and each pair of a query and a key, the absorbed form takes $2 \cdot 1088$ FLOPs for
# the score and the sum, and the expanded form only $2 \cdot 320$. The expanded form also takes $2 \cdot 512 \cdot 256$
# FLOPs for each head and token of context, but only once, however many queries there are. So with $T$ query tokens on a
# long context, the FLOPs are equal where
#
# $$T \cdot (1088 - 320) = 512 \cdot 256 \quad\Rightarrow\quad T = 171.$$
#
# A prompt has thousands of query tokens, so *prefill* is expanded. A decode step has one to eight, so it is absorbed.
# But FLOPs are only a part of the cost: the expanded form also writes all the keys and values to memory and reads them
# again. In the exercise you count the FLOPs and the bytes of both forms, and choose.

# %%
# Exercise 11.6 · Choose the form
def form_work(form, heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes):
    """(FLOPs, bytes) that one layer's latent attention takes for one sequence, in one of its two forms.

    Args:
        form: "absorbed" or "expanded".
        heads: query heads.
        context: tokens in the cache, the query tokens included.
        query_tokens: the last tokens of the context, 1 to context. Each sees all tokens up to itself (causal), so the
            last one sees `context` tokens, the one before it one token less, and so on.
        latent_dim, rope_dim: how many numbers a row of the cache has for the latent and for the rotary key.
        head_dim: length of each head's queries and keys without their rotary part, and of its values.
        item_bytes: bytes of a number.

    Returns:
        FLOPs: a multiply-add is two, and the softmax is not counted. A pair is a query and a token that it sees.
        *Absorbed*: W_UK on every query, W_UV on every output, and for every pair a score of latent_dim + rope_dim terms
        and a sum of latent_dim numbers. *Expanded*: W_UK and W_UV on every token of the context, and for every pair a
        score of head_dim + rope_dim terms and a sum of head_dim numbers.
        bytes: both forms read the cache and both weights (heads · head_dim · latent_dim numbers each) once. The
        expanded form also writes the keys (without their rotary part, which stays shared) and values of all heads once
        and reads them once. Queries and outputs are not counted.
    """
    # BEGIN SOLUTION
    pairs = query_tokens * context - query_tokens * (query_tokens - 1) // 2
    elements = context * (latent_dim + rope_dim) + 2 * heads * head_dim * latent_dim
    if form == "absorbed":
        flops = 2 * heads * (2 * query_tokens * head_dim * latent_dim + pairs * (2 * latent_dim + rope_dim))
    else:
        flops = 2 * heads * (2 * context * head_dim * latent_dim + pairs * (2 * head_dim + rope_dim))
        elements += 2 * 2 * context * heads * head_dim
    return flops, elements * item_bytes
    # END SOLUTION


def choose_form(heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes, rate, bandwidth):
    """"absorbed" or "expanded": the form that takes less time by its `form_work`, absorbed if both take equally long.

    A form's time is the longer of two: its FLOPs at `rate` (FLOP/s), and its bytes at `bandwidth` (bytes/s). The other
    arguments are those of form_work.
    """
    # BEGIN SOLUTION
    seconds = {}
    for form in ("absorbed", "expanded"):
        flops, moved = form_work(
            form, heads, context, query_tokens, latent_dim, rope_dim, head_dim, item_bytes
        )
        seconds[form] = max(flops / rate, moved / bandwidth)
    return "absorbed" if seconds["absorbed"] <= seconds["expanded"] else "expanded"
    # END SOLUTION


# %%
best_form_work, best_choose_form = check("11.6", form_work, choose_form).best

# %% [markdown]
# The picture draws the time of both forms on an H200 by its datasheet, for 32,768 tokens of context and a growing
# number of query tokens. **Predict** before you look: do the two lines cross at 171 query tokens or elsewhere? And how
# does the time of the absorbed form change from 1 to 8?

# %%
from course_lib.figures.latent.crossing import draw_form_times

v3 = {"latent_dim": 512, "rope_dim": 64, "head_dim": 128, "item_bytes": 2}
query_counts = (1, 2, 4, 8, 16, 32, 64, 128, 171, 256, 512, 1024, 4096, 32_768)
form_times = {
    form: {
        count: max(flops / h200.matmul_rate["float16"], moved / h200.bandwidth)
        for count in query_counts
        for flops, moved in [best_form_work(form, 128, 32_768, count, **v3)]
    }
    for form in ("absorbed", "expanded")
}
for heads in (128, 16):
    for context, count in ((32_768, 1), (32_768, 8), (32_768, 512), (4096, 4096)):
        chosen = best_choose_form(
            heads, context, count, **v3, rate=h200.matmul_rate["float16"], bandwidth=h200.bandwidth
        )
        print(f"{heads:>4} heads, {context:>6,} tokens, {count:>5,} of them queries: {chosen}")
waiting = {
    form: {count for count in query_counts for flops, moved in [best_form_work(form, 128, 32_768, count, **v3)]
           if moved / h200.bandwidth > flops / h200.matmul_rate["float16"]}
    for form in form_times
}
draw_form_times(form_times, "128 heads, 32,768 tokens of context, an H200 by its datasheet", waiting)
# %% [markdown]
# At 32,768 tokens the lines cross near 171, because there both forms are limited by arithmetic. Up to 8 query tokens
# the expanded form takes 15 to 75 times as long. From 1 to 2 query tokens the absorbed form takes only a quarter
# longer, not twice as long, because with one query token it waits for memory. (A single sequence also reads the
# weights, which are nearly as many bytes as its cache.) From 2 on, its time grows with the number of query tokens.
#
# ## Finale: your kernel runs the model
#
# Here you run three versions of the course's small model, trained alike on the same text: with 4 full heads, with 2 KV
# heads, and with latent attention. The third has 4 heads with queries of 16 + 16 numbers, on a row of 32 + 16. For
# every token after the prompt, the third model attends with your kernel (11.3). Your `choose_form` (11.6) decides
# whether the prompt goes through the absorbed or the expanded form. A single token is always absorbed here, because
# that is what your kernel computes. If an answer of yours has not passed, the course's takes its place, and the first
# line below says so.
#
# **Predict** with your functions of 11.1: how many bytes does a token leave in each of the three caches, with 4 layers
# in float32? And which form does your rule choose for the prompt of 10 bytes, at 16 bits a number?

# %%
import textwrap

from course_lib.models.plugged import who_runs
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import complete

sizes = KINDS["MLA"].latent
chosen = []


def model_form(heads, context, query_tokens):
    """The form in which the model's new tokens are computed, by your rule and an H200's datasheet, as if in 16 bits.

    The model's keys have 16 numbers without a position and its values 32: form_work gets the mean of both.
    """
    form = best_choose_form(
        heads, context, query_tokens, sizes.latent_dim, sizes.rope_dim, (sizes.nope_dim + sizes.value_dim) // 2, 2,
        h200.matmul_rate["float16"], h200.bandwidth,
    )
    chosen.append((query_tokens, form))
    return form if query_tokens > 1 else "absorbed"  # your kernel takes a single query token


def model_decode(query, cache, lengths, *, scale, value_dim):
    """Your kernel, as the model calls it: query [batch, query_tokens, heads, width]."""
    if query.shape[1] > 1:  # a prompt that goes through the absorbed form: one token after the other
        ends = [lengths - query.shape[1] + 1 + token for token in range(query.shape[1])]
        parts = [best_latent_decode(query[:, token], cache, end, scale, value_dim) for token, end in enumerate(ends)]
        return torch.stack(parts, dim=1)
    return best_latent_decode(query[:, 0], cache, lengths, scale, value_dim)[:, None]


print(who_runs({"kernel (11.3)": best_latent_decode, "form (11.6)": best_choose_form}))
new_bytes = 150 if on_gpu else 24
for name, model in kinds.items():
    model.requires_grad_(False)
    options = {"decode": model_decode, "choose_form": model_form} if name == "MLA" else {}
    cache = new_cache(model, 1, 256, **options)
    text = "Alice was " + complete(model, "Alice was ", new_bytes, cache=cache)
    print(f"{name}:")
    print(textwrap.indent(textwrap.fill(text, 100), "    "))
print(f"the prompt of {chosen[0][0]} bytes went through the {chosen[0][1]} form")

# %% [markdown]
# The prompt went through the absorbed form. Both forms would wait for memory at these sizes, and by `form_work` the
# expanded form moves 20,928 bytes in a layer and the absorbed one 13,248. The three texts differ, because the three
# models have different weights.
#
# Does the model write the same with the expanded form? It should, because absorbing only changes the order of products.
# The next cell compares the logits of both forms for the same text. Then it draws each model's loss, on text that no
# model has read, over the bytes that a token leaves in its cache. **Predict** the order of the losses.

# %%
from course_lib.figures.latent.loss_against_bytes import draw_loss_against_bytes
from course_lib.models.tokenizer import encode

tokens = encode("Alice was beginning").to(device)[None]
logits = {}
for form in ("absorbed", "expanded"):
    cache = new_cache(kinds["MLA"], 1, 32, decode=model_decode, choose_form=lambda *_, form=form: form)
    with torch.inference_mode():
        logits[form] = kinds["MLA"](tokens, cache)
print(f"largest difference of the logits: {(logits['absorbed'] - logits['expanded']).abs().max().item():.1e}")

token_bytes = {
    "full heads": best_heads_token_bytes(4, 4, 32, 4, 1),
    "GQA": best_heads_token_bytes(4, 2, 32, 4, 1),
    "MLA": best_latent_token_bytes(4, sizes.latent_dim, sizes.rope_dim, 4, 1),
}
draw_loss_against_bytes({name: (token_bytes[name], loss_on(model, unseen)) for name, model in kinds.items()})

# %% [markdown]
# So the finale shows two things. First, absorbing only changes the order of the products, so the logits of both forms
# differ by rounding alone. Second, your kernel runs a whole model on a cache of 768 bytes a token, where the model with
# full heads needs 4096 and the one with 2 KV heads 2048. That is the horizontal axis: 48, 256 and 128 numbers of 4
# bytes in each of 4 layers.
#
# The vertical axis says little, because models as small as these, trained for seconds, tell you nothing about quality.
# The latent model was the worst in one run: 1.94 against 1.89 and 1.88. But another seed moves a model's loss by up to
# 0.08, so this order means nothing. For the loss, look at the papers. DeepSeek-V2 compared MLA with full multi-head
# attention in models of 16 and 250 billion parameters. MLA came out better, with 14 % and 4 % of the cache (its table
# 9).
#
# ## What production systems do
#
# - **Kernels.** [FlashMLA](https://github.com/deepseek-ai/FlashMLA) is DeepSeek's own, with the seesaw of exercise
#   11.5. On an H800 its authors report up to 3000 GB/s where memory is the limit and up to 660 TFLOP/s where arithmetic
#   is. FlagGems has a kernel in plain Triton like yours. It reached 64 % of FlashMLA's rate at a context of 1,000 and
#   51 % at 33,000, also on an H800 ([FlagGems#510](https://github.com/flagos-ai/FlagGems/issues/510)). vLLM prefers
#   FlashAttention's kernel on Hopper, because it was faster in vLLM's own benchmarks
#   ([vllm#27363](https://github.com/vllm-project/vllm/pull/27363)). So measure at your own sizes.
# - **Both forms.** vLLM calls the expanded form *compute-friendly* and takes it for prefill. It calls the absorbed form
#   *data-movement-friendly* and takes it for decode.
# - **Tensor parallelism.** Because every rank would hold the whole latent, SGLang and vLLM offer *data-parallel
#   attention*: each GPU takes whole sequences with all their heads, and only the other layers are divided.
# - **Speculative decoding.** DeepSeek-V3 was trained with a part that predicts one more token, so a step can check 2
#   query tokens for each sequence. With 16 heads on a rank that makes 32 rows, which still fit into one tile of 64.
#
# **Measured.** The library has two kernels for this step: a portable one in Triton, built like yours and split, and one
# for Hopper in Gluon with the seesaw. Here they stand beside FlashInfer 0.7.2 ("fa3") on one H100 80 GB, in bf16, with
# PyTorch 2.11 and Triton 3.6. It is a recorded run of November 2026, so you see it without that GPU too. A bar of 1.26
# means 1.26 times as fast as FlashInfer. All kernels of a row were timed in turns. The first row is one layer of the
# opening question: FlashInfer took 47.4 µs for it, and the Hopper kernel $47.4 / 1.26 = 37.6$ µs.

# %%
from course_lib.figures.latent.beside_flashinfer import draw_beside_flashinfer
from course_lib.figures.recorded import recorded

draw_beside_flashinfer(recorded("latent", "h100"))

# %% [markdown]
# With 16 heads all kernels wait for memory, and the portable one is as fast as the others. With 128 heads and a large
# batch the matrix products take most of the time. There the portable kernel reaches 0.60 to 0.77 of FlashInfer's speed
# and the Hopper kernel 0.93 to 1.03. The seesaw makes the difference: one warp group keeps the tensor cores busy while
# the other computes its softmax.
#
# The Hopper kernel has changed since that run. In programs with many blocks of keys, the second warp group now starts
# the product for its scores before it multiplies by the first group's block. And the warp groups now wait for each
# other at *named barriers* (chapter 09: 16 in hardware for each program) instead of mbarriers in shared memory. On one
# H200 (2026-11-30, in turns) it was 1.26, 1.04, 0.99, 1.01, 1.02, 0.93 and 1.06 times as fast as FlashInfer, in the
# order of the rows, and the portable kernel 0.58 to 1.03. That card reads memory faster than the H100, so the two runs
# differ by more than these two changes.
#
# **Your kernel at a glance.** The speeds are the portable kernel's in this run, and the rest is derived.
#
# | | |
# |---|---|
# | wins | 16 heads, 64 sequences of 8k: 0.98 of FlashInfer's speed |
# | loses | 128 heads, 128 sequences of 32k: 0.60 of it |
# | falls back | to 16 heads a program where shared memory is small: 128 heads then read a row 8 times, not twice |
# | trap | loading the latent again as the values: 1.89 times the bytes |
#
# **What is still missing.** Your kernel reads a contiguous cache. Serving engines keep the cache in pages, as in
# chapter 06. A page then holds rows of 576 numbers. The library's own kernel in `course_lib/kernels/latent/` reads such
# pages.
#
# ## Papers
#
# - DeepSeek-AI: *DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model*,
#   [arXiv 2405.04434](https://arxiv.org/abs/2405.04434). Section 2.1 is MLA, with the absorbed matrices; appendix D
#   compares it with other kinds.
# - DeepSeek-AI: *DeepSeek-V3 Technical Report*, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437): the sizes used
#   here.
# - DeepSeek-AI: *A Deep-Dive Into the New Flash MLA Kernel*, in the folder `docs` of
#   [FlashMLA](https://github.com/deepseek-ai/FlashMLA): why decode is limited by arithmetic, and the seesaw.
# - Ainslie et al.: *GQA*, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245): the other way to share.

# %%
progress()
