# %% [markdown]
# # 07 · Grouped-query attention: one key for a group of queries
#
# **The question.** Llama-2-70B has 80 layers of 64 query heads of dimension 128. With a KV head for each of them, a
# token would leave 2.62 MB in the cache, and a context of 32,768 tokens would take 85.9 GB. That is all the memory of
# an H100. The released model has 8 KV heads, each shared by a group of 8 query heads, so its cache is 10.7 GB. Each new
# token reads all of it, which takes an H100 3.2 ms at 3.35 TB/s instead of 25.6 ms. Now suppose you write the obvious
# kernel: one program for each query head, which finds its KV head and reads it. How much faster is the step than with
# 64 KV heads?
#
# Write down your guess. You will count the answer, meter it and measure it. Then you write a kernel that really gains
# the factor of 8.
#
# **Time.** About 2½ hours, with six exercises. The **core path** takes two hours at most: exercises 7.1, 7.2, 7.4 and
# 7.5. You can skip every section whose heading ends in *· deeper*. Run its cells as they are, because later cells use
# what they define.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bandwidth, format_bytes, format_flop_rate, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Who shares with whom
#
# In *multi-head attention* (MHA) every query head has keys and values of its own. In *multi-query attention* (MQA) all
# query heads share one KV head. *Grouped-query attention* (GQA) is between the two: $H_q$ query heads in groups of $G$
# have $H_k = H_q / G$ KV heads. With 64 query heads in groups of 8 that makes 8 KV heads.

# %%
from course_lib.figures.decode.head_maps import draw_head_maps

draw_head_maps(query_heads=8, key_heads=(8, 2, 1))

# %% [markdown]
# The members of a group are neighbours. Any other map would work as well, but all *checkpoints*, the stored weights of
# models, use this one: query heads 0 to $G - 1$ were trained with KV head 0. A kernel with another map raises no error,
# but it computes a softmax over the wrong keys.
#
# If key_heads does not divide query_heads, raise an error that says both numbers.

# %%
# Exercise 7.1 · The head map
def key_head_of(query_head: int, query_heads: int, key_heads: int) -> int:
    """The KV head that a query head reads, when query_heads share key_heads in groups of neighbours.

    Raises a ValueError that says both numbers if key_heads does not divide query_heads.
    """
    # BEGIN SOLUTION
    if query_heads % key_heads:
        raise ValueError(f"key_heads = {key_heads} must divide query_heads = {query_heads}.")
    return query_head // (query_heads // key_heads)
    # END SOLUTION


def groups(query_heads: int, key_heads: int) -> torch.Tensor:
    """The query heads that read each KV head, in ascending order: int64 [key_heads, query_heads // key_heads].

    Raises a ValueError that says both numbers if key_heads does not divide query_heads.
    """
    # BEGIN SOLUTION
    if query_heads % key_heads:
        raise ValueError(f"key_heads = {key_heads} must divide query_heads = {query_heads}.")
    return torch.arange(query_heads).view(key_heads, -1)
    # END SOLUTION


# %%
best_key_head_of, best_groups = check("7.1", key_head_of, groups).best

# %% [markdown]
# ## Decode's intensity is the group size
#
# Take one token of the cache and one KV head, with $b$ bytes an element and head dimension $D$. Its key and value are
# $2 D b$ bytes. Each of the $G$ query heads in the group does $D$ multiply-adds for the score and $D$ for the weighted
# value, which is $4 D$ FLOPs. (The softmax adds about four, which we leave out.) So
#
# $$\text{intensity} = \frac{4 D\, G}{2 D\, b} = \frac{2 G}{b} \quad = G \text{ FLOP/byte in 16 bits.}$$
#
# The head dimension cancels. The length and the batch do not matter, because every cached token has this same ratio. In
# prefill many queries of one head use the same key. In decode only the heads of a group do.
#
# An H100's balance point is 295 FLOP/byte. With $G = 8$ its tensor cores work 8 of 295 cycles, so the step takes as
# long as reading its bytes.
#
# In the exercise, count the queries and outputs too, because they matter in a short context.

# %%
# Exercise 7.2 · What decode costs
def cache_bytes(layers: int, query_heads: int, group: int, head_dim: int, tokens: int, item_bytes: int) -> int:
    """Bytes of keys and values that `tokens` tokens leave in the cache of all layers, `group` query heads sharing."""
    # BEGIN SOLUTION
    key_heads = query_heads // group
    return 2 * layers * key_heads * head_dim * tokens * item_bytes
    # END SOLUTION


def decode_intensity(query_heads: int, key_heads: int, length: int, head_dim: int, item_bytes: int) -> float:
    """FLOP/byte of one layer's decode attention: one query token of a sequence against `length` keys and values.

    A multiply-add is two FLOPs; the softmax is not counted. Keys, values and queries are read once, and the output is
    written once, all with item_bytes an element.
    """
    # BEGIN SOLUTION
    flops = 4 * query_heads * length * head_dim
    elements = 2 * length * key_heads * head_dim + 2 * query_heads * head_dim
    return flops / (elements * item_bytes)
    # END SOLUTION


def balanced_group(rate: float, bandwidth: float, item_bytes: int) -> int:
    """The smallest group for which long-context decode no longer waits for memory.

    rate is the arithmetic rate in FLOP/s, bandwidth the memory's in bytes/s, item_bytes the size of a cached element.
    """
    # BEGIN SOLUTION
    return math.ceil(rate / bandwidth * item_bytes / 2)
    # END SOLUTION


# %%
checked = check("7.2", cache_bytes, decode_intensity, balanced_group)
best_cache_bytes, best_decode_intensity, best_balanced_group = checked.best

# %% [markdown]
# The next cell shows the question's model on an H100, by its datasheet, and on your device. The FLOPs are the same in
# every row: $4 \cdot 64 \cdot 128 \cdot 32768 \cdot 80 = 86$ GFLOP. Which of the H100's two times falls as the group
# grows, and by how much?

# %%
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.datasheets import DATASHEETS

roof = ceilings()
unit = "float16" if on_gpu else "float32"
h100 = DATASHEETS["H100"]
flops = 4 * 64 * 128 * 32768 * 80
print("query heads in a group      cache   FLOP/byte   H100: memory, arithmetic     here, memory alone")
for group in (1, 8, 64):
    moved = best_cache_bytes(80, 64, group, 128, 32768, 2)
    print(f"{group:>22} {format_bytes(moved):>10} {best_decode_intensity(64, 64 // group, 32768, 128, 2):>11.1f}"
          f"   {format_seconds(moved / h100.bandwidth):>12}, {format_seconds(flops / h100.matmul_rate['float16']):>10}"
          f"   {format_seconds(moved / roof.memory_bandwidth):>20}")
print(f"balance: an H100 needs groups of {best_balanced_group(h100.matmul_rate['float16'], h100.bandwidth, 2)} in 16 "
      f"bits, this device in {unit} groups of "
      f"{best_balanced_group(roof.matmul_rate[unit], roof.memory_bandwidth, 2 if on_gpu else 4)}")

# %% [markdown]
# Here is the same on your device's roofline, with a mark for each group size $G$. On the slope, a group twice as large
# makes twice the FLOP/s from the same bytes. Right of the balance point it takes more time.

# %%
from course_lib.figures.decode.roofline import draw_decode_roofline

draw_decode_roofline(roof, unit, item_bytes=2 if on_gpu else 4)

# %% [markdown]
# ## What it saves, and what it costs · deeper
#
# The picture shows the bytes for each token of context with 16-bit caches. A hollow mark is the same model with a KV
# head for every query head. (The last line, MLA, comes at the chapter's end.)

# %%
from course_lib.figures.cache.per_token import draw_cache_per_token

draw_cache_per_token()

# %% [markdown]
# Fewer KV heads also mean fewer parameters, so the model may get worse. Two papers measured by how much.
#
# Shazeer ([arXiv 1911.02150](https://arxiv.org/abs/1911.02150)) trained language models of equal size. Multi-head
# attention reached a perplexity ($e^{\text{loss}}$) of 29.9, and a single KV head 30.2. Saving as many bytes with fewer
# or narrower heads of both kinds was worse: 30.9 to 31.2.
#
# Ainslie et al. ([arXiv 2305.13245](https://arxiv.org/abs/2305.13245)) started from T5 checkpoints with 64 heads. They
# merged KV heads and trained on for 5 % of the original steps (*uptraining*). Their table 1 has the average score over
# seven tasks, and the time for a sample on a TPUv4 chip:
#
# | | KV heads | time | average score |
# |---|---|---|---|
# | MHA, T5 Large | 16 | 0.37 s | 46.0 |
# | MHA, T5 XXL | 64 | 1.51 s | 47.2 |
# | MQA, T5 XXL, uptrained | 1 | 0.24 s | 46.6 |
# | **GQA, T5 XXL, uptrained** | 8 | **0.28 s** | **47.1** |
#
# Going from 64 KV heads to 8 saves nearly all the time that can be saved. Going on to 1 saves little and costs half a
# point. Most models since have 8.
#
# ## Convert a checkpoint · deeper
#
# A KV head is a block of rows of the key projection, [head_dim, width], and another block of the value projection. To
# merge a group into one head, Ainslie et al. average the blocks. The projection and the rotation by position are
# linear. So a token's new key is the mean of the group's old keys, and a query's new score is the mean of its scores
# with them. Keeping the first head of each group was worse, and starting from random numbers worst (their figure 4).
#
# The weight is [key_heads · head_dim, width], with the heads one below the other. Average neighbouring heads, because
# their query heads will share.

# %%
# Exercise 7.3 · Convert a checkpoint by mean-pooling
def pool_heads(weight: torch.Tensor, key_heads: int, new_key_heads: int) -> torch.Tensor:
    """A key or value projection with fewer heads, each the mean of a group of neighbouring old ones.

    Args:
        weight: [key_heads · head_dim, width], or a bias [key_heads · head_dim]; any float dtype, any strides. Numbers
            within ±60,000.
        new_key_heads: divides key_heads.

    Returns:
        [new_key_heads · head_dim, width], or [new_key_heads · head_dim], in weight's dtype. The accuracy of float32 is
        enough for float64.
    """
    # BEGIN SOLUTION
    group = key_heads // new_key_heads
    head_dim = weight.shape[0] // key_heads
    heads = weight.unflatten(0, (new_key_heads, group, head_dim))  # [new_key_heads, group, head_dim, width]
    return heads.mean(dim=1).flatten(0, 1)
    # END SOLUTION


# %%
best_pool_heads = check("7.3", pool_heads).best

# %% [markdown]
# Try it on a small model. The course has a smaller version of chapter 05's model, with 8 heads, which was trained for
# 150 steps. The next cell converts it and trains on for 8 steps (5 %) and 30 steps (20 %). The loss is measured on text
# that no model has read, in nats for each byte. For comparison, the first row is not converted, and the last keeps the
# first head of each group. Predict: how much does conversion raise the loss at first, and how much of that do 8 steps
# undo? The cell trains five models, in some ten seconds, or a minute on a busy machine, and prints a row for each.

# %%
import dataclasses

from course_lib.models.decoder import Decoder
from course_lib.models.kinds import text_parts
from course_lib.models.tokenizer import encode
from course_lib.models.trained import trained_model


def converted(model, key_heads, pool):
    """A copy of a Decoder with fewer KV heads; pool(weight, key_heads, new_key_heads) makes their projections."""
    state = dict(model.state_dict())
    for name in state:
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            state[name] = pool(state[name], model.config.key_heads, key_heads)
    copy = Decoder(dataclasses.replace(model.config, key_heads=key_heads))
    copy.load_state_dict(state)
    return copy


def loss_on(model, pieces):
    """Mean cross entropy of the next byte, in nats; pieces is [number, context + 1]."""
    logits = model(pieces[:, :-1])  # [number, context, vocabulary]
    return F.cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


def uptrain(model, data, steps):
    """More steps of training on random pieces of the data, by AdamW at a small, constant rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    context = model.config.context
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, len(data) - context, (4, 1), generator=generator)
        optimizer.zero_grad()
        loss_on(model, data[starts + torch.arange(context + 1)]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def first_of_group(weight, key_heads, new_key_heads):
    """Instead of the mean: the first head of each group."""
    return weight.unflatten(0, (new_key_heads, key_heads // new_key_heads, -1))[:, 0].flatten(0, 1)


trained = trained_model("8 heads", device="cpu")  # float32, small: any CPU will do
config = trained.config
seen, unseen = map(encode, text_parts())  # the first nine tenths of the text, and the rest
unseen = unseen[: len(unseen) // (config.context + 1) * (config.context + 1)].view(-1, config.context + 1)
print("KV heads              bytes a token   converted   + 8 steps   + 30 steps")
for name, key_heads, pool in (
    ("8, not converted", 8, best_pool_heads), ("4, mean", 4, best_pool_heads), ("2, mean", 2, best_pool_heads),
    ("1, mean", 1, best_pool_heads), ("2, first of group", 2, first_of_group),
):
    model, losses = converted(trained, key_heads, pool), []
    for steps in (0, 8, 22):
        uptrain(model, seen, steps)
        with torch.no_grad():
            losses.append(loss_on(model, unseen).item())
    cache = best_cache_bytes(config.layers, config.query_heads, 8 // key_heads, config.head_dim, 1, 4)
    print(f"{name:20} {cache:>14} {losses[0]:>11.2f} {losses[1]:>11.2f} {losses[2]:>12.2f}")

# %% [markdown]
# In one run, conversion to 2 KV heads raised the loss by 0.65 nats. Eight steps undid more than half of that, and 30
# steps three quarters, while the loss of the model that was not converted stayed the same. With the first head of each
# group the loss started 0.45 nats higher than with the mean and stayed higher.
#
# ## Shared in memory, repeated in time
#
# Now the cache is small. The obvious way to compute attention on it in PyTorch is to give every query head its own keys
# again: `key.repeat_interleave(group, dim=1)`, often called `repeat_kv`. Count the bytes moved for each byte of the
# cache. It is read once, $G$ copies of it are written, and attention reads them all: $1 + 2G$. With $G = 8$ that is 17
# bytes. With a KV head for every query head, attention would read 8. **So the cache is smaller, and the step is slower
# than with the large one.**
#
# No copy is needed. For one KV head, decode is a product of two matrices: the group's queries, [group, head_dim], and
# the keys, [head_dim, length]. One `matmul` does this for all sequences and KV heads. The check watches the size of
# every tensor that you make. Two calls copy silently: `reshape` after `expand`, and `matmul` when one operand lacks a
# batch dimension that the other has.

# %%
# Exercise 7.4 · Grouped attention without a copy
def grouped_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One step of decode attention in PyTorch, where groups of neighbouring query heads share a KV head.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16.
        key, value: [batch, key_heads, length, head_dim], any strides, in query's dtype; key_heads divides query_heads,
            and length is at least 1.

    Returns:
        softmax(query · Kᵀ / √head_dim) · V for every query head, [batch, query_heads, head_dim], in query's dtype. No
        tensor that you make may have more elements than key, or than the scores (one for each sequence, query head and
        key) where these are more. Write out the two products and the softmax: F.scaled_dot_product_attention hides
        which of them copies, and is refused.
    """
    # BEGIN SOLUTION
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, key_heads, group, head_dim]: neighbours stay together
    scores = grouped @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])  # [batch, key_heads, group, length]
    output = torch.softmax(scores, dim=-1) @ value  # [batch, key_heads, group, head_dim]
    return output.flatten(1, 2)
    # END SOLUTION


# %%
best_grouped_attention = check("7.4", grouped_attention).best

# %% [markdown]
# The next cell times three ways to compute the same numbers: 32 query heads on 4 KV heads without a copy, the same with
# keys and values repeated first, and a cache with 32 KV heads. **Predict** their order, and the ratio of the first two.

# %%
predict("07 keys repeated first", ..., "times as long as without the copy")

# %%
from course_lib.hardware.timing import measure


def repeated_attention(query, key, value):
    """As many a model's source has it: keys and values for every query head, then multi-head attention."""
    group = query.shape[1] // key.shape[1]
    key, value = (cache.repeat_interleave(group, dim=1) for cache in (key, value))  # [batch, query_heads, ...]
    scores = (query[:, :, None] @ key.transpose(-1, -2)) / math.sqrt(query.shape[-1])  # [batch, query_heads, 1, length]
    return (torch.softmax(scores, dim=-1) @ value)[:, :, 0]


batch, length, dtype = (16, 8192, torch.float16) if on_gpu else (1, 8192, torch.float32)
head_dim, item_bytes = 128, torch.empty(0, dtype=dtype).element_size()
query = torch.randn(batch, 32, head_dim, device=device, dtype=dtype)
key, value = (torch.randn(batch, 4, length, head_dim, device=device, dtype=dtype) for _ in range(2))
all_keys, all_values = (cache.repeat_interleave(8, dim=1) for cache in (key, value))
taken = []
shared = 2 * key.numel() * item_bytes
print(f"batch {batch}, 32 query heads on 4 KV heads, {length} tokens: K and V are {format_bytes(shared)}")
for name, function, arguments, moved in (
    ("shared, no copy (7.4)", best_grouped_attention, (query, key, value), shared),
    ("shared, repeated first", repeated_attention, (query, key, value), 17 * shared),
    ("32 KV heads", best_grouped_attention, (query, all_keys, all_values), 8 * shared),
):
    timing = measure(partial(function, *arguments), warmup=1, seconds=0.5, device=device)
    print(f"  {name:24} {format_seconds(timing.median):>9}, {format_bytes(moved):>8} on paper:"
          f" {format_bandwidth(moved / timing.median)}")
    taken.append(timing.median)
del all_keys, all_values
measured("07 keys repeated first", taken[1] / taken[0], "times as long as without the copy")

# %% [markdown]
# ## The kernel that comes to mind first
#
# This is the kernel of the question. It is right, it copies nothing, and most of us would make it from chapter 04's
# kernel: one program for each query head of each sequence, which finds its KV head by division. With a single query it
# needs no `tl.dot`, because the scores are a sum over the columns of a tile of keys.

# %%
@triton.jit
def head_by_head_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lengths_pointer,
    query_heads, key_heads, capacity, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: one query head of one sequence against its own KV head. Contiguous tensors."""
    sequence, query_head = tl.program_id(0), tl.program_id(1)
    key_head = query_head // (query_heads // key_heads)
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    length = tl.load(lengths_pointer + sequence)
    cache = (sequence.to(tl.int64) * key_heads + key_head) * capacity * HEAD_DIM
    row = (sequence * query_heads + query_head) * HEAD_DIM
    query = tl.load(query_pointer + row + columns).to(tl.float32)  # [HEAD_DIM]
    running_max, running_sum = float("-inf"), 0.0
    accumulator = tl.zeros([HEAD_DIM], tl.float32)
    for first_key in range(0, length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        tile = cache + keys[:, None] * HEAD_DIM + columns[None, :]  # [BLOCK_N, HEAD_DIM]
        key_tile = tl.load(key_pointer + tile, mask=(keys < length)[:, None], other=0.0).to(tl.float32)
        scores = tl.sum(key_tile * query[None, :], axis=1) * scale_log2  # [BLOCK_N]
        scores = tl.where(keys < length, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=0))
        weights = tl.exp2(scores - new_max)  # [BLOCK_N]
        rescale = tl.exp2(running_max - new_max)
        value_tile = tl.load(value_pointer + tile, mask=(keys < length)[:, None], other=0.0).to(tl.float32)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value_tile, axis=0)  # [HEAD_DIM]
        running_sum = running_sum * rescale + tl.sum(weights, axis=0)
        running_max = new_max
    output = accumulator / tl.where(running_sum == 0.0, 1.0, running_sum)
    tl.store(output_pointer + row + columns, output.to(output_pointer.dtype.element_ty))


def head_by_head(query, key_cache, value_cache, lengths):
    """Decode attention of contiguous query [batch, query_heads, head_dim], caches [batch, key_heads, capacity,
    head_dim] and lengths [batch] (int32): every query head reads its KV head by itself."""
    batch, query_heads, head_dim = query.shape
    output = torch.empty_like(query)
    head_by_head_kernel[(batch, query_heads)](
        query, key_cache, value_cache, output, lengths, query_heads, key_cache.shape[1], key_cache.shape[2],
        math.log2(math.e) / math.sqrt(head_dim), HEAD_DIM=head_dim, BLOCK_N=64,
    )
    return output


# %% [markdown]
# Predict what the meter says: how many bytes does it load for 16 query heads on 2 KV heads, and how many on 16?

# %%
from course_lib.hardware.meter.metered import metered

lengths = torch.tensor([192, 150], dtype=torch.int32)
for key_heads in (16, 2):
    query = torch.randn(2, 16, 64)
    key_cache, value_cache = (torch.randn(2, key_heads, 192, 64) for _ in range(2))
    report = metered(head_by_head, query, key_cache, value_cache, lengths)
    in_use = 2 * int(lengths.sum()) * key_heads * 64 * 4
    print(f"16 query heads on {key_heads:>2}: cache in use {in_use:>9,} bytes, moved {report.total_bytes:>9,}")

# %% [markdown]
# With 2 KV heads the kernel loads exactly as many bytes as with 16. **Sharing makes the cache smaller, but saves not a
# single load.** So by the count, the step is no faster at all.
#
# On a GPU there is a second half to the answer. If the 8 programs of a group run at about the same time, some of their
# loads are served by the L2 cache. How many depends on what else runs. And the L2's bandwidth is only a few times that
# of memory, not 8 times.
#
# ## Pack the group into the tile
#
# So let one program take the whole group. Its query heads lie one below the other in memory, as a tile [group,
# head_dim], just like chapter 04's tile of queries. Each tile of keys is loaded once and multiplied with all query
# heads in one `tl.dot`.
#
# The tensor cores multiply 16 rows at a time, and the sides of Triton's tiles are powers of two. So with $G = 8$ half
# of the tile's rows are padding. They are masked in the load, computed for nothing, and masked in the store.

# %%
from course_lib.figures.decode.packed_tile import draw_packed_tile

draw_packed_tile(query_heads=16, key_heads=2, tile_rows=16, key_rows=32)

# %% [markdown]
# Half of the arithmetic is wasted, but that costs no time. The padded tile does 16 FLOPs for each byte, and an H100 has
# time for 295. So all groups up to $G = 16$ take the same time, the time to read their bytes.
#
# Be careful with the rows. The query heads of KV head $k$ begin at $k G$ and not at $16 k$. A group of 20 takes a tile
# of 32 rows. And a padding row that is not masked reads or even overwrites the heads of the next group. The rest is as
# in chapter 04, with a loop over keys up to the sequence's own length. The meter checks that every key and value in use
# is read once.

# %%
# Exercise 7.5 · A decode kernel that reads each key once
@triton.jit
def grouped_decode_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer, lengths_pointer,
    query_batch_stride, query_head_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride, scale_log2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: the GROUP query heads of one KV head of one sequence, in a tile of ROWS rows, against its keys."""
    # BEGIN SOLUTION
    sequence = tl.program_id(0).to(tl.int64)  # 64 bits: a cache can pass 2^31 elements
    key_head = tl.program_id(1).to(tl.int64)
    rows = tl.arange(0, ROWS)  # [ROWS], of which the first GROUP are query heads
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    in_group = (rows < GROUP)[:, None]
    query_rows = (key_head * GROUP + rows)[:, None] * query_head_stride + columns[None, :]  # [ROWS, HEAD_DIM]
    query = tl.load(query_pointer + sequence * query_batch_stride + query_rows, mask=in_group, other=0.0)
    key_pointer += sequence * key_batch_stride + key_head * key_head_stride
    value_pointer += sequence * value_batch_stride + key_head * value_head_stride
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    length = tl.load(lengths_pointer + sequence)
    for first_key in range(0, length, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        in_use = (keys < length)[:, None]
        key_tile = tl.load(key_pointer + keys[:, None] * key_stride + columns[None, :], mask=in_use, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [ROWS, BLOCK_N]
        scores = tl.where((keys < length)[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [ROWS]
        weights = tl.exp2(scores - new_max[:, None])  # [ROWS, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [ROWS]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_tile = tl.load(value_pointer + keys[:, None] * value_stride + columns[None, :], mask=in_use, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")  # [ROWS, HEAD_DIM]
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # a sequence without a token: 0 / 1 = 0
    output = (accumulator / total[:, None]).to(output_pointer.dtype.element_ty)  # [ROWS, HEAD_DIM]
    output_rows = (key_head * GROUP + rows)[:, None] * output_head_stride + columns[None, :]
    tl.store(output_pointer + sequence * output_batch_stride + output_rows, output, mask=in_group)
    # END SOLUTION


def grouped_decode(query, key_cache, value_cache, lengths):
    """One step of decode attention over a cache, by one kernel that reads each key and value once.

    Args:
        query: [batch, query_heads, head_dim], float16 with head_dim 16, 32, 64 or 128, or float32 with head_dim up to
            64; the last stride is 1.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim], key_heads divides query_heads; any strides but
            the last, which is 1. The two may differ in theirs, and may reach beyond 2³¹ elements.
        lengths: [batch], int32: tokens of each sequence in its cache, the current one included. Slots behind them hold
            anything, NaN too. 0 is allowed.

    Returns:
        [batch, query_heads, head_dim], in query's dtype; zeros for a sequence of length 0. The bytes are counted, and
        PyTorch must not copy the caches: that reads them once more. No tensor that you make may have more elements
        than key_cache, or than a tile of rows for every KV head.
    """
    batch, query_heads, head_dim = query.shape
    key_heads = key_cache.shape[1]
    group = query_heads // key_heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    # Set `grid`, one program for each KV head of each sequence, and `rows`, the rows of its tile of query heads.
    # BEGIN SOLUTION
    grid = (batch, key_heads)
    rows = max(16, triton.next_power_of_2(group))
    # END SOLUTION
    grouped_decode_kernel[grid](
        query, key_cache, value_cache, output, lengths, *query.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], *output.stride()[:2], math.log2(math.e) / math.sqrt(head_dim),
        GROUP=group, ROWS=rows, HEAD_DIM=head_dim, BLOCK_N=64,
    )
    return output


# %%
best_grouped_decode = check("7.5", grouped_decode).best

# %% [markdown]
# The next cell meters both kernels side by side for several group sizes.

# %%
print("query heads, KV heads   head by head     the group packed   cache in use")
for key_heads in (16, 8, 4, 2, 1):
    query = torch.randn(1, 16, 64)
    key_cache, value_cache = (torch.randn(1, key_heads, 128, 64) for _ in range(2))
    lengths = torch.tensor([128], dtype=torch.int32)
    each, packed = (metered(function, query, key_cache, value_cache, lengths).total_bytes
                    for function in (head_by_head, best_grouped_decode))
    print(f"{16:>11}, {key_heads:>8} {each:>12,} B {packed:>18,} B {2 * 128 * key_heads * 64 * 4:>12,} B")

# %% [markdown]
# The packed kernel's bytes shrink with the cache. Those of the other kernel stay the same.
#
# ## Predicted against measured
#
# Now the time. From row to row only the group grows. So all rows read the same cache, and up to the balance point they
# have the same floor: these bytes over your bandwidth. How do you expect each column to change?
#
# On a GPU the columns are the kernel of the question, yours, the library's (which also splits the keys, as the next
# chapter does), and PyTorch's own attention, which is told of the groups. Without a GPU the cell compares three ways in
# PyTorch.

# %%
from course_lib.kernels.decode.attention import decode_attention


def pytorch_attention(query, key, value):
    """PyTorch's own attention for one query token, told that query heads share KV heads."""
    return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]


if on_gpu:
    batch, key_heads, length, dtype = 32 if machine().memory_bytes > 30e9 else 8, 8, 4096, torch.float16
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    columns = {
        "head by head": lambda *tensors: head_by_head(*tensors, lengths),
        "yours (7.5)": lambda *tensors: best_grouped_decode(*tensors, lengths),
        "library": lambda *tensors: decode_attention(*tensors, lengths, validate=False),  # no look at the lengths
    }
else:
    batch, key_heads, length, dtype = 1, 4, 8192, torch.float32
    columns = {"repeated first": repeated_attention, "shared (7.4)": best_grouped_attention}
columns["PyTorch's own"] = pytorch_attention
head_dim, item_bytes = 128, torch.empty(0, dtype=dtype).element_size()
key, value = (torch.randn(batch, key_heads, length, head_dim, device=device, dtype=dtype) for _ in range(2))
floor = 2 * key.numel() * item_bytes / roof.memory_bandwidth
print(f"batch {batch}, {key_heads} KV heads, {length} tokens, {dtype}: K and V are "
      f"{format_bytes(2 * key.numel() * item_bytes)}, which take {format_seconds(floor)} at least")
print("group" + "".join(f"{name:>16}" for name in columns))
seconds = {name: {} for name in columns}
for group in (1, 2, 4, 8, 16, 32) if on_gpu else (1, 2, 4, 8, 16):
    query = torch.randn(batch, key_heads * group, head_dim, device=device, dtype=dtype)
    for name, function in columns.items():
        timing = measure(partial(function, query, key, value), warmup=1, seconds=0.1, device=device)
        seconds[name][group] = timing.median
    print(f"{group:>5}" + "".join(f"{format_seconds(times[group]):>16}" for times in seconds.values()))

# %% [markdown]
# The first column grows with the number of query heads. The packed kernel's time is that of reading the cache until the
# arithmetic takes longer, which on a CPU happens at a small group. PyTorch's own attention makes no copy in memory.
# Whether it reads each key once depends on the kernel that it picks. Here are the times as points on the roofline:

# %%
flops = 4 * batch * key_heads * length * head_dim
draw_decode_roofline(
    roof, unit, item_bytes=item_bytes,
    measured={name: {group: flops * group / time for group, time in times.items()} for name, times in seconds.items()},
)

# %% [markdown]
# On a GPU you can now answer the question from the first column. Compare 8 KV heads in groups of 8 with eight times the
# time of group 1, which is what 64 KV heads would take. This kernel loads as many bytes in both cases, so any gain
# comes from the L2. The packed kernel reads an eighth of the bytes. Without a GPU the first column is the version that
# repeats the keys first, so it shows what a copy costs instead.
#
# ## Heads on several GPUs · deeper
#
# A large model is split among GPUs by heads (*tensor parallelism*). Each of $R$ GPUs, called *ranks*, gets $H_q / R$
# query heads and the KV heads that these read. So attention needs no communication. With 64 query heads and 8 KV heads
# on 8 GPUs, each has one group.
#
# On 16 GPUs a group is divided between two ranks, and both need its KV head, so both keep **a copy**. From there on
# more GPUs do not make a rank's cache smaller. MQA on 8 GPUs takes as much memory on each as GQA with 8 KV heads. That
# is another reason for 8 KV heads, because one server has 8 GPUs. For quality you would train as many KV heads as the
# memory allows. Their number must divide the query heads, and it must divide the number of ranks or be a multiple of
# it.

# %%
# Exercise 7.6 · KV heads for a budget
def rank_cache_bytes(layers: int, key_heads: int, head_dim: int, tokens: int, item_bytes: int, ranks: int) -> int:
    """Bytes of the cache on each of `ranks` GPUs that hold `tokens` tokens together, KV heads shared out among them.

    Either ranks divides key_heads, or key_heads divides ranks, and then several ranks hold a copy of the same head.
    """
    # BEGIN SOLUTION
    heads_here = max(1, key_heads // ranks)
    return 2 * layers * heads_here * head_dim * tokens * item_bytes
    # END SOLUTION


def choose_key_heads(
    layers: int, query_heads: int, head_dim: int, tokens: int, item_bytes: int, budget_bytes: float, ranks: int
) -> int | None:
    """The most KV heads with which the cache of `tokens` tokens fits into budget_bytes on each of `ranks` GPUs.

    The number divides query_heads, and it divides ranks or is divided by ranks. None if not even one head fits. ranks
    divides query_heads.
    """
    # BEGIN SOLUTION
    fitting = [
        key_heads
        for key_heads in range(1, query_heads + 1)
        if query_heads % key_heads == 0
        and (key_heads % ranks == 0 or ranks % key_heads == 0)
        and rank_cache_bytes(layers, key_heads, head_dim, tokens, item_bytes, ranks) <= budget_bytes
    ]
    return max(fitting, default=None)
    # END SOLUTION


# %%
best_rank_cache_bytes, best_choose_key_heads = check("7.6", rank_cache_bytes, choose_key_heads).best

# %% [markdown]
# Use it for the question's model. Its weights are about 140 GB in 16 bits, 17.5 GB on each of 8 GPUs, so of the 80 GiB
# of an H100 some 60 GB are left for the cache.

# %%
print("tokens in all sequences   KV heads on 8 GPUs   cache on each GPU   with one KV head")
for tokens in (2**17, 2**18, 2**19, 2**20, 2**21):
    chosen = best_choose_key_heads(80, 64, 128, tokens, 2, 60e9, ranks=8)
    need = [best_rank_cache_bytes(80, heads, 128, tokens, 2, ranks=8) for heads in (chosen or 8, 1)]
    print(f"{tokens:>23,}   {chosen or 'none fits':>18}   {format_bytes(need[0]):>17}   {format_bytes(need[1]):>16}")

# %% [markdown]
# Compare the last two columns where 8 heads were chosen: fewer heads than GPUs save nothing. In the last row even 8
# heads are too many, and fewer would not help.
#
# ## Outlook: MLA, another way to share · deeper
#
# In multi-head latent attention (MLA, DeepSeek-V2, [arXiv 2405.04434](https://arxiv.org/abs/2405.04434)) each head has
# its own keys and values, but the cache stores none of them. It stores one *latent* vector $c$ of 512 numbers for each
# token and layer, and each head could compute $k_h = W^K_h c$ and $v_h = W^V_h c$ from it. Rotary positions would not
# allow the shortcut below, so 64 more numbers hold a rotated key for all heads. For 128 heads of dimension 128 the
# cache shrinks by
#
# $$\frac{\text{full heads}}{\text{latent}} = \frac{2 \cdot 128 \cdot 128}{512 + 64} = \frac{32{,}768}{576} = 56.9$$
#
# GQA with as small a cache would have 2.25 KV heads. A decode step never computes all these keys. The score is $q_h
# \cdot W^K_h c = (W^{K\top}_h q_h) \cdot c$. So multiply the *query* by the matrix once in a step (the matrix is
# *absorbed*), and take its product with the latent itself. For the output, average the latents first and then multiply
# by $W^V_h$. Then decode is this chapter's kernel with **one KV head of dimension 576 for a group of 128 query heads**.
# Its values are the first 512 columns of its keys, so each tile is read once for both. The next cell computes its
# intensity: $2 \cdot (576 + 512)$ FLOPs for each of 128 heads, and 1152 bytes.

# %%
latent_flops, latent_bytes = 128 * 2 * (576 + 512), 576 * 2
print(f"MLA, absorbed: {latent_flops / latent_bytes:.0f} FLOP/byte")
for name in ("H200", "H100"):
    print(f"  balance point of the {name}: {DATASHEETS[name].balance_point():.0f} FLOP/byte")

# %% [markdown]
# 242 FLOP/byte is near the balance point, so decode with MLA keeps the tensor cores busy. But all heads need the
# latent, so with tensor parallelism every rank keeps a copy. DeepSeek has published its kernel as
# [FlashMLA](https://github.com/deepseek-ai/FlashMLA).

# %% [markdown]
# ## Finale: your kernel and your conversion run the model
#
# The course's small model writes with your grouped kernel (7.5), and your `pool_heads` (7.3) makes its cache smaller.
# It is chapter 05's model: four layers of 4 query heads on 2 KV heads of dimension 32. Three versions of
# it:
#
# - **4 KV heads**: each KV head stored twice. It computes the same as the trained model, with the cache of multi-head
#   attention.
# - **2 KV heads**: as trained.
# - **1 KV head**: the mean of the two, by your function, and then 40 more steps of training.
#
# **Predict** with your `cache_bytes` of 7.2: what does a token leave in each version's cache, and how many sequences of
# 256 tokens fit into 8 MB? And what will the third version write *before* it is trained on?

# %%
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.datasheets import DATASHEETS
from course_lib.hardware.meter.metered import metered
from course_lib.hardware.timing import measure
from course_lib.models.heads import loss_of, repeated_heads, train_on, with_key_heads
from course_lib.models.trained import trained_model

tiny = trained_model("tiny", device=device)
models = {
    "4 KV heads": with_key_heads(tiny, 4, repeated_heads),
    "2 KV heads": tiny,
    "1 KV head, just merged": with_key_heads(tiny, 1, best_pool_heads),
    "1 KV head, trained on": with_key_heads(tiny, 1, best_pool_heads),
}
train_on(models["1 KV head, trained on"], steps=40)
token_bytes = {name: best_cache_bytes(4, 4, 4 // model.config.key_heads, 32, 1, 4) for name, model in models.items()}
print(f"{'':24}{'bytes a token':>14}{'sequences in 8 MB':>19}{'nats a byte':>13}")
for name, model in models.items():
    model.requires_grad_(False)
    print(f"{name:24}{token_bytes[name]:>14,}{int(8e6 // (256 * token_bytes[name])):>19}{loss_of(model):>13.2f}")

# %% [markdown]
# Now they write, each with your kernel at every step after the prompt. Without a GPU the meter counts the bytes that
# the kernel moves in the last step. In each layer a step moves the $n$ tokens in the cache, 4 queries and 4 outputs of
# 32 numbers each, and one length for each program.

# %%
from course_lib.models.plugged import who_runs
from course_lib.models.tokenizer import decode, encode
from course_lib.serving.caches.new import new_cache

print(who_runs({"kernel (7.5)": best_grouped_decode, "conversion (7.3)": best_pool_heads}))
prompt, new_bytes = encode("Alice was ").to(device)[None], 200 if on_gpu else 24
for name, model in models.items():
    cache = new_cache(model, 1, 256, decode=best_grouped_decode)
    tokens = prompt
    with torch.inference_mode():
        for _ in range(new_bytes):  # the prompt first, then one byte at a time
            logits = model(tokens[:, cache.length :], cache, last_only=True)  # [1, 1, 256]
            tokens = torch.cat([tokens, logits.argmax(dim=-1)], dim=1)
        told = ""
        if not on_gpu:
            report = metered(partial(model, tokens[:, -1:], cache, last_only=True))
            rest = 4 * (2 * 4 * 32 * 4 + 4 * model.config.key_heads)
            told = f" {report.total_bytes:,} bytes in a step, {cache.length * token_bytes[name] + rest:,} predicted"
    print(f"{name + ':':24}{told}\n    {decode(tokens[0])!r}")

# %% [markdown]
# The first two versions write the same text, because they are the same model: the first only stores everything twice.
# With one KV head, merged and not trained on, the text falls apart. A few seconds of training bring words back, but the
# loss is still worse than before. That is this chapter's trade: each halving of the cache doubles the sequences that
# fit and nearly halves the bytes of a step, but the last halving costs quality.
#
# On a GPU the next cell times a step for 32 sequences of thousands of tokens, and prints the least time beside it: the
# cache's bytes over your bandwidth. Everything else in a step takes as long in all versions, so expect less than a
# factor of 2 from line to line. Without a GPU it prints the least time on an H100 alone, because a kernel's time in the
# interpreter means nothing.

# %%
def step_seconds(model, sequences, context):
    """Seconds of one step: a new token for each sequence, behind context - 1 others."""
    cache = new_cache(model, sequences, context, decode=best_grouped_decode)
    cache.keys.zero_(), cache.values.zero_()
    tokens = torch.zeros(sequences, 1, dtype=torch.int64, device=device)

    def one_step():
        cache.length = context - 1
        model(tokens, cache, last_only=True)

    with torch.inference_mode():
        return measure(one_step, seconds=0.5, device=device).median


sequences, context = 32, 16_384 if not on_gpu or machine().memory_bytes > 30e9 else 4096
bandwidth = ceilings().memory_bandwidth if on_gpu else DATASHEETS["H100"].bandwidth
for name in ("4 KV heads", "2 KV heads", "1 KV head, trained on"):
    cached = sequences * context * token_bytes[name]
    line = f"{name:24}{format_bytes(cached):>8} of cache, read in {format_seconds(cached / bandwidth):>8} at best"
    if on_gpu:
        seconds = step_seconds(models[name], sequences, context)
        print(f"{line}; a step took {format_seconds(seconds)}: {sequences / seconds:,.0f} bytes of text a second")
    else:
        print(f"{line}, by an H100")

# %% [markdown]
# Your kernel can also run SmolLM2, a published model of 135 million parameters that answers questions. It has 30 layers
# of 9 query heads on 3 KV heads of dimension 64, and your kernel of 7.5 takes these groups of 3 as they are. The model
# is fetched only if you set `REAL_MODEL = True` below: 93 MB, once. Without a GPU your kernel then runs its first
# layer, and PyTorch's attention the other 29. If you add `layers=30` to the last line, yours runs all of them, and a
# token takes about a second.

# %%
from course_lib.serving.published import ask_published_model

REAL_MODEL = False


def your_cache(model, tokens):
    """An empty cache that your kernel reads, for one text of so many tokens."""
    return new_cache(model, 1, tokens, decode=best_grouped_decode)


ask_published_model(REAL_MODEL, your_cache)

# %% [markdown]
# ## What production systems do
#
# - **Models.** Llama 2 70B, all of Llama 3, Mistral, Qwen 2.5 and most others since 2023 use GQA, mostly with 8 KV
#   heads. DeepSeek since V2 and Kimi K2 use MLA.
# - **Kernels** pack. FlashAttention-3 calls it `pack_gqa`, and FlashInfer's decode folds the group into the rows of the
#   query tile.
# - **Serving engines** divide KV heads among ranks as in exercise 7.6. vLLM gives each rank `max(1, key_heads //
#   ranks)` of them.
# - **What is still missing.** Your kernel has one program for each KV head of each sequence. One sequence with 8 KV
#   heads is 8 programs on a chip of 132 multiprocessors. A large batch hides that. Chapter 08 fills the chip for a
#   single sequence.
#
# ## Papers
#
# - Shazeer: *Fast Transformer Decoding: One Write-Head is All You Need*, [arXiv
#   1911.02150](https://arxiv.org/abs/1911.02150). It counts the bytes of decode as this chapter does.
# - Ainslie, Lee-Thorp, de Jong, Zemlyanskiy, Lebrón, Sanghai: *GQA: Training Generalized Multi-Query Transformer Models
#   from Multi-Head Checkpoints*, [arXiv 2305.13245](https://arxiv.org/abs/2305.13245).
# - Pope et al.: *Efficiently Scaling Transformer Inference*, [arXiv 2211.05102](https://arxiv.org/abs/2211.05102): MQA
#   and how to split it over chips.
# - DeepSeek-AI: *DeepSeek-V2*, [arXiv 2405.04434](https://arxiv.org/abs/2405.04434). Section 2.1 is MLA.

# %%
progress()
