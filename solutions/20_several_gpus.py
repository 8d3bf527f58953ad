# %% [markdown]
# # 20 · Several GPUs

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
# ## Fewer KV heads than ranks · deeper
#
# Attention is shared out by heads: each rank has some of the query heads, and the KV heads that these read. In
# grouped-query attention (chapter 07) several query heads read the same KV head. Qwen2.5-3B has 16 query heads and 2 KV
# heads. On 8 ranks each rank has 2 query heads. But what has it of 2 KV heads?
#
# A KV head could be cut into pieces, a quarter of its numbers for each rank. But a score is the sum of products over
# all numbers of a head. So the ranks would have to exchange something for every score. tpu-inference cut heads into
# pieces, and had to put them together over the links. A step of Qwen2.5-3B on 8 chips took 3.1 ms. With whole copies it
# takes 1.58 ms ([tpu-inference#2661](https://github.com/vllm-project/tpu-inference/pull/2661)).
#
# So a KV head stays whole, and each rank that needs it holds a copy. For example, take 8 query heads and 2 KV heads on
# 4 ranks. Query heads 0 to 3 read KV head 0, and query heads 4 to 7 read KV head 1:
#
# | rank | query heads | KV heads |
# |---|---|---|
# | 0 | 0, 1 | 0 |
# | 1 | 2, 3 | 0 |
# | 2 | 4, 5 | 1 |
# | 3 | 6, 7 | 1 |
#
# The ranks that hold a head follow each other, because query heads that read the same KV head do. There are
# ranks / kv_heads of them. Where there are at least as many KV heads as ranks, nothing is copied.
#
# Copies cost memory. With eight KV heads, each of 8 ranks would hold an eighth of the KV cache. **Predict** what part
# of its cache a rank holds for Qwen2.5-3B on 8 ranks.
#
# **In training** copies cost more than memory. The gradient of a KV head has a part from each query head that reads it.
# Rank 0 above has the parts of query heads 0 and 1, and rank 1 those of 2 and 3. Say that for one number of the head
# these are 0.5 and −0.2. The gradient of that number is 0.3, and *both* ranks need it. Ranks 2 and 3 have nothing to
# add, because they hold another head.
#
# Megatron-LM's fork for StarCoder did not do this sum for the gradient of keys and values. It added up the gradients of
# their weights later, so the copies stayed equal. But what went back into the layer before was only a rank's part. With
# one KV head a small model had a validation loss of 3.74 after 5,000 steps, and 2.64 after the repair
# ([Megatron-LM#37](https://github.com/bigcode-project/Megatron-LM/pull/37)). No error was raised.
#
# One more detail is about floating point. Float sums depend on their order: $(a+b)+c$ and $a+(b+c)$ may differ in the
# last bit. If each rank begins with its own part, the ranks get different bits, and their copies drift apart step by
# step. So all ranks add the parts in the same order.
#
# In the simulation `parts = yield ("all_to_all", tensors)` exchanges tensors: you give one for each rank, and get the
# one that each rank has for you. A tensor may be empty, and then it costs no bytes.

# %%
predict("20 part of the cache on a rank: 2 KV heads, 8 ranks", ..., "%")

# %%
# Exercise 20.7 · Fewer KV heads than ranks
def heads_of(rank: int, ranks: int, query_heads: int, kv_heads: int) -> tuple[list, list]:
    """The query heads of a rank, and the KV heads that they read.

    rank: 0 … ranks - 1. ranks: at least 1.
    query_heads: how many the model has, a multiple of ranks.
    kv_heads: how many the model has, at least 1. kv_heads divides query_heads, and either kv_heads is a multiple of
        ranks, or ranks is a multiple of kv_heads.
    Returns: (query heads, KV heads), two lists of whole numbers, ascending, each number once, counted from 0 over all
    ranks. All ranks have equally many query heads, rank 0 the first ones, rank 1 those that follow, and so on. Query
    head h reads KV head h // (query_heads // kv_heads).
    """
    # BEGIN SOLUTION
    each = query_heads // ranks
    queries = list(range(rank * each, (rank + 1) * each))
    return queries, sorted({head // (query_heads // kv_heads) for head in queries})
    # END SOLUTION


def sum_gradients(rank: int, ranks: int, gradient: torch.Tensor, kv_heads: int):
    """One rank's program, a generator: the whole gradient of the KV heads that this rank holds.

    rank: 0 … ranks - 1. ranks: 1 … 8.
    gradient: float32 [heads, tokens, dim], contiguous, at least 1 of each, numbers up to 10,000,000 in size: this
        rank's part of the gradient of the KV heads that `heads_of` gives it. It is not changed.
    kv_heads: how many the model has, at least 1: kv_heads is a multiple of ranks, or ranks is a multiple of kv_heads.
    Returns: the sum of the parts of all ranks that hold the same KV heads, same shape and dtype, with the same bits on
    each of these ranks. Where no other rank holds them, it is the rank's own part.

    Where n ranks hold the same heads, each of them receives at most n - 1 times the bytes of gradient. So ranks that
    share no head receive nothing from each other. All steps of the simulation are allowed but write and read. A send
    may wait until its receiver takes it, and the ranks may go on in any order.
    """
    # BEGIN SOLUTION
    share = max(1, ranks // kv_heads)  # ranks that hold a head
    first = rank // share * share
    group = range(first, first + share)
    parts = yield ("all_to_all", [gradient if other in group else gradient.new_empty(0) for other in range(ranks)])
    return sum(parts[first + 1 : first + share], parts[first])
    # END SOLUTION


# %%
best_heads_of, best_sum_gradients = check("20.7", heads_of, sum_gradients).best

# %% [markdown]
# The next cell counts the copies of each KV head, and the part of the cache that rank 0 holds.

# %%
print(f"{'ranks':>6}{'KV heads':>10}{'copies of each':>16}{'cache on a rank':>17}")
for ranks, query_heads, kv_heads in ((2, 16, 2), (4, 16, 2), (8, 16, 2), (8, 32, 8)):
    held = [best_heads_of(rank, ranks, query_heads, kv_heads)[1] for rank in range(ranks)]
    part = 100 * len(held[0]) / kv_heads
    print(f"{ranks:>6}{kv_heads:>10}{sum(0 in one for one in held):>16}{part:>16.1f}%")
    if (ranks, kv_heads) == (8, 2):
        measured("20 part of the cache on a rank: 2 KV heads, 8 ranks", part, "%")

# %% [markdown]
# From 2 ranks on, a rank holds half of Qwen2.5-3B's cache, however many ranks there are. So 8 ranks hold four times the
# bytes of the cache together. This is why the cache limits how many sequences fit, even on many GPUs.
