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
# ## Tokens to experts on other ranks · deeper
#
# In a mixture of experts (18.5) a token goes to a few of a layer's many MLPs, its experts. DeepSeek-V3 has 256 in a
# layer. With *expert parallelism* each rank holds some of them whole: of `count` experts on `ranks` ranks, rank r holds
# count / ranks, from number r · count / ranks on. Each rank also has its own tokens, so a token's row travels to the
# rank of its expert, and the result travels back.
#
# One step exchanges tensors: `received = yield ("all_to_all", tensors)`. You give one tensor for each rank, and get a
# list: `received[s]` is what rank s gave for you. Sizes may differ, and a tensor may be empty. What you give yourself
# does not travel. You need three such steps: for numbers of rows, for rows, and for results.
#
# **An example** with 2 ranks and 4 experts. Rank 0 has tokens a, b and c for experts 2, 0 and 3. Rank 1 has d, e and f
# for experts 1, 2 and 2.
#
# 1. Each rank sorts its rows by expert and counts them. Rank 0 has b, a, c and the numbers 1 0 | 1 1 for experts
#    0, 1 | 2, 3. Rank 1 has d, e, f and 0 1 | 2 0. Each sends the other the two numbers of its experts.
# 2. The rows travel. Rank 1 receives a, c from rank 0, and has e, f itself. From the numbers 1 1 and 2 0 it knows that
#    a, e and f are for expert 2, and c is for expert 3. An expert's rows do *not* lie next to each other: they are
#    sorted only within what came from one rank.
# 3. Each expert runs once, on all of its rows. The results A, C, E, F go back in the order in which the rows arrived.
#    Rank 0 gets B from itself and A, C from rank 1. It puts them where the tokens stood: A, B, C.
#
# **What goes wrong.** Numbers and rows must describe the same order. In xtuner they came from two sources, so experts
# got rows of others. Training and inference differed by 0.0044, and by 0.0004 after the repair
# ([xtuner#2053](https://github.com/InternLM/xtuner/pull/2053)). In a test of DeepEP nearly all tokens went to the same
# experts, and the numbers were wrong: 9,181 rows for an expert that had 6,888
# ([DeepEP#427](https://github.com/deepseek-ai/DeepEP/issues/427)). And a rank without tokens must not leave early: the
# others wait for it.
#
# **Imbalance** costs time even if all is right, since the layer waits for its fullest expert. Take 8 ranks with 64
# tokens each and 64 experts. A token goes to one expert, chosen by chance, so an expert gets 8 tokens on average.
# **Predict** how many the fullest gets.

# %%
predict("20 tokens of the fullest expert, 8 on average", ..., "tokens")

# %%
generator = torch.Generator().manual_seed(0)
loads = torch.stack([torch.randint(64, (512,), generator=generator).bincount(minlength=64) for _ in range(1000)])
of_ranks = loads.view(1000, 8, 8).sum(2)
print(f"experts: 8 tokens on average, the fullest {loads.amax(1).float().mean():.1f}")
print(f"ranks:  64 tokens on average, the fullest {of_ranks.amax(1).float().mean():.1f}")
measured("20 tokens of the fullest expert, 8 on average", loads.amax(1).float().mean().item(), "tokens")

# %% [markdown]
# The fullest expert gets almost twice the average, and the fullest rank, with 8 experts, a fifth more.

# %%
# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank: int, ranks: int, x: torch.Tensor, experts: torch.Tensor, count: int, run):
    """One rank's program, a generator: what the experts of all ranks make of this rank's tokens.

    rank: 0 … ranks - 1. ranks: 1 … 8.
    x: float32 [tokens, width], contiguous, numbers up to 1,000,000 in size: the rows of this rank's tokens. tokens is
        0 or more, other numbers on other ranks; width is at least 1, the same on all. It is not changed.
    experts: int64 [tokens], contiguous, from 0 to count - 1: the expert of each token. Experts may get no token, and
        some experts may get all tokens.
    count: how many experts there are on all ranks, a multiple of ranks. Rank r holds count / ranks of them, from number
        r · count / ranks on.
    run: a function. run(expert, rows) returns what an expert makes of rows, float32 [n, width] for float32 [n, width],
        each row by itself. The rows may stand in any order. A rank calls it for its own experts only, by their number
        among all of them, at most once for each, and never with n = 0.
    Returns: float32 [tokens, width]: row t is what expert experts[t] makes of row t of x.

    all_to_all is the only step. Each row travels once to the rank of its expert and once back, and a rank's own rows do
    not travel. Besides, a rank may receive whole numbers, int64: `count` of them from each other rank, and two with
    each row. The ranks may go on in any order.
    """
    # BEGIN SOLUTION
    local = count // ranks
    order = experts.argsort(stable=True)
    numbers = experts.bincount(minlength=count).view(ranks, local)
    arriving = yield ("all_to_all", list(numbers))
    pieces = yield ("all_to_all", x[order].split(numbers.sum(1).tolist()))
    rows = torch.cat(pieces)
    own = torch.cat([torch.arange(local).repeat_interleave(one) for one in arriving])
    made = torch.empty_like(rows)
    for expert in range(local):
        places = (own == expert).nonzero()[:, 0]
        if len(places) > 0:
            made[places] = run(rank * local + expert, rows[places])
    back = yield ("all_to_all", made.split([len(piece) for piece in pieces]))
    result = torch.empty_like(x)
    result[order] = torch.cat(back)
    return result
    # END SOLUTION


# %%
best_dispatch = check("20.6", dispatch).best

# %% [markdown]
# The next cell plays it. Each expert multiplies its rows by its number.

# %%
from course_lib.hardware.simulated_ranks import play_ranks

generator = torch.Generator().manual_seed(1)
arguments = [
    (torch.ones(100, 32), torch.randint(8, (100,), generator=generator), 8, lambda expert, rows: expert * rows)
    for _ in range(4)
]
played = play_ranks(best_dispatch, arguments)
right = all(torch.equal(out[:, 0], experts.float()) for out, (_, experts, *_) in zip(played["results"], arguments))
print(f"right: {right}; rank 0 received {played['received'][0]:,} bytes, and its own rows have {100 * 32 * 4:,}")

# %% [markdown]
# Three of four rows are for another rank, and they travel twice: one and a half times the bytes of the own rows.

# %% [markdown]
# ## Fewer KV heads than ranks · deeper
#
# Attention is shared out by heads: each rank has some query heads, and the KV heads that these read. In grouped-query
# attention (chapter 07) several query heads read the same KV head. Qwen2.5-3B has 16 query heads and 2 KV heads. On 8
# ranks each rank has 2 query heads. How do 8 ranks share 2 KV heads?
#
# A KV head could be cut into pieces, a quarter of its numbers for each rank. But a score is a sum of products over all
# numbers of a head. tpu-inference cut heads into pieces, and had to put them together over the links. A step of
# Qwen2.5-3B on 8 chips took 3.1 ms. With whole copies it takes 1.58 ms
# ([tpu-inference#2661](https://github.com/vllm-project/tpu-inference/pull/2661)).
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
# The ranks that hold a head follow each other, because the query heads that read it do. There are ranks / kv_heads of
# them. With at least as many KV heads as ranks, nothing is copied.
#
# **In training** the gradient of a KV head has a part from each query head that reads it. Rank 0 has the parts of query
# heads 0 and 1, and rank 1 those of 2 and 3. Say that for one number of the head they are 0.5 and −0.2. Its gradient is
# 0.3, and *both* ranks need it. Ranks 2 and 3 add nothing, because they hold another head.
#
# In training code for StarCoder this sum was missing for keys and values. The gradients of their weights were added up
# later, so the copies stayed equal. But each rank sent back only its own part to the layer before. With one KV head a
# small model had a validation loss of 3.74 after 5,000 steps, and 2.64 after the repair
# ([Megatron-LM#37](https://github.com/bigcode-project/Megatron-LM/pull/37)).
#
# One detail is about floating point: $(a+b)+c$ and $a+(b+c)$ may differ in the last bit. If each rank begins with its
# own part, the copies get different bits, and drift apart step by step. So all ranks add the parts in the same order.
#
# In the simulation `parts = yield ("all_to_all", tensors)` exchanges tensors: you give one for each rank, and get the
# one that each rank has for you. An empty tensor costs no bytes.
#
# **In generation** copies cost memory. With 8 KV heads, each of 8 ranks would hold an eighth of the KV cache.
# **Predict** what part of its cache a rank holds for Qwen2.5-3B on 8 ranks.

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
# The next cell counts the copies of KV head 0, and the part of the cache that rank 0 holds.

# %%
print(f"{'ranks':>6}{'KV heads':>10}{'copies':>8}{'cache on a rank':>17}")
for ranks, query_heads, kv_heads in ((2, 16, 2), (4, 16, 2), (8, 16, 2), (8, 32, 8)):
    held = [best_heads_of(rank, ranks, query_heads, kv_heads)[1] for rank in range(ranks)]
    part = 100 * len(held[0]) / kv_heads
    print(f"{ranks:>6}{kv_heads:>10}{sum(0 in one for one in held):>8}{part:>16.1f}%")
    if (ranks, kv_heads) == (8, 2):
        measured("20 part of the cache on a rank: 2 KV heads, 8 ranks", part, "%")

# %% [markdown]
# From 2 ranks on, a rank holds half of the cache of Qwen2.5-3B, however many ranks there are.
