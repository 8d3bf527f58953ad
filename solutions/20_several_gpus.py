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
# ## What a step costs on several GPUs
#
# Each step of a model that generates text reads all of its weights, and the KV cache of each sequence. With 70 billion
# parameters in 16 bits there are 140 GB of weights. They do not fit into the 80 GB of an H100, and reading them at its
# 3.35 TB/s would take 42 ms. Eight GPUs can share the reading: each holds an eighth of every weight, and reads its
# 17.5 GB in 5.2 ms.
#
# A GPU together with its program is called a *rank*; ranks are numbered from 0. A rank's part of a weight is a *shard*.
# Cutting every weight into shards is called *tensor parallelism*, and 20.2 shows how to cut. It has a price: behind
# attention and behind the MLP each rank has only a *partial sum* of every number. The next operation needs the sum over
# all ranks, on every rank. An operation that gives it to all is an *all-reduce*. So a layer has two of them, and each
# adds batch · width numbers.
#
# The numbers travel over *links* between the GPUs. On an H100 a GPU receives up to 450 GB/s over its links. Here are
# two ways to add up S bytes:
#
# - **One-shot.** Each rank reads the numbers of all other ranks and adds them up itself. With 4 ranks it receives 3 S.
# - **Two-shot.** Each rank adds up one share. With 4 ranks, rank 0 reads the first quarter of the numbers of the other
#   3, and adds it up. Then it reads the other three quarters, each from the rank that has added it up. It receives ¾ S
#   in each of two phases, 1.5 S in all. The second phase must wait for the first.
#
# With 8 ranks these are 7 S and 1.75 S. Is two-shot four times as fast, then? For one sequence and a width of 8,192, S
# is 16 KiB. One-shot receives 114,688 bytes, and at 450 GB/s they take 0.25 µs. On eight H100s a one-shot kernel took
# 13.3 µs for 8k numbers of this size ([helion#245](https://github.com/pytorch/helion/pull/245)). Nearly all of it is
# *latency*, which does not depend on the bytes: the kernel starts, and the ranks wait for each other. So count one
# latency for one-shot and two for two-shot, and add the bytes. A 70B model has 80 layers, so its 160 all-reduces of
# 13 µs take 2.1 ms beside the 5.2 ms of reading.
#
# **The cache** is shared out by whole KV heads. With 8 KV heads on 4 ranks each rank holds 2, a quarter of the cache.
# With 2 KV heads on 8 ranks, four ranks need the same head, and each keeps a copy: each reads half of the cache. One
# project divided by 32 devices where Llama 3 has 8 KV heads
# ([tenstorrent/vllm#50](https://github.com/tenstorrent/vllm/pull/50)). Another one, on TPUs, cut heads into pieces and
# put them together over the links. With copies its step took 1.58 ms instead of 3.1 ms
# ([tpu-inference#2661](https://github.com/vllm-project/tpu-inference/pull/2661)).
#
# **Predict** how many times as fast a model with 8 billion parameters becomes on 8 GPUs: 16 GB of weights, 32 layers, a
# width of 4,096, one sequence, a latency of 13 µs.

# %%
predict("20 8B model, 8 GPUs instead of 1", ..., "times")

# %%
# Exercise 20.1 · What a step costs on several GPUs
def received_bytes(ranks: int, numbers: int, itemsize: int, method: str) -> float:
    """How many bytes one rank receives over the links in one all-reduce.

    ranks: at least 1. With 1 rank nothing is received.
    numbers: how many numbers are added up, the same on each rank: a multiple of ranks, at least 1. In two-shot each
        rank adds up numbers / ranks of them.
    itemsize: bytes of a number: 1, 2, 4 or 8.
    method: "one-shot" or "two-shot".
    Returns: one number, not rounded. What a rank has itself does not travel, and what it sends is not counted.
    """
    # BEGIN SOLUTION
    from_each = numbers * itemsize if method == "one-shot" else 2 * numbers * itemsize / ranks
    return (ranks - 1) * from_each
    # END SOLUTION


def step_seconds(
    ranks: int, layers: int, batch: int, width: int, weight_bytes: float, cache_bytes: float, kv_heads: int,
    memory_rate: float, link_rate: float, latency: float,
) -> float:
    """The seconds of a decode step with tensor parallelism: first a rank's reads, then all its all-reduces.

    ranks, layers, batch, kv_heads: at least 1. width: a multiple of ranks.
    weight_bytes: of the whole model, at least 1; each rank reads its share, 1 / ranks of them, once.
    cache_bytes: of all sequences, layers and KV heads, 0 or more. A rank reads the cache of its own KV heads, once.
    kv_heads: a multiple of ranks, or ranks is a multiple of kv_heads. A rank has kv_heads / ranks of them, or one whole
        head where there are fewer heads than ranks.
    memory_rate, link_rate: bytes a second that each rank reads from its memory and receives over its links; positive
        numbers.
    latency: seconds, 0 or more.

    Each layer has two all-reduces of batch · width numbers of 2 bytes. Each is done by the faster of the two methods:
    one-shot takes one latency and two-shot two, and the bytes of `received_bytes` come on top, at link_rate. Nothing
    overlaps, so all times add up. One rank does no all-reduce.
    Returns: one number, not rounded.
    """
    # BEGIN SOLUTION
    seconds = (weight_bytes / ranks + cache_bytes / min(ranks, kv_heads)) / memory_rate
    if ranks == 1:
        return seconds
    methods = ((1, "one-shot"), (2, "two-shot"))
    all_reduce = min(
        phases * latency + received_bytes(ranks, batch * width, 2, method) / link_rate for phases, method in methods
    )
    return seconds + 2 * layers * all_reduce
    # END SOLUTION

# %%
best_received_bytes, best_step_seconds = check("20.1", received_bytes, step_seconds).best

# %%
H100 = {"memory_rate": 3.35e12, "link_rate": 450e9, "latency": 13e-6}
MODELS = {"8B": (32, 4096, 16e9), "70B": (80, 8192, 140e9)}  # layers, width, bytes of the weights
print(f"{'':16}{'1 GPU':>10}{'2':>10}{'4':>10}{'8':>10}")
for name, (layers, width, weight_bytes) in MODELS.items():
    for batch in (1, 256):
        milliseconds = [
            1e3 * best_step_seconds(ranks, layers, batch, width, weight_bytes, 0, 8, **H100) for ranks in (1, 2, 4, 8)
        ]
        print(f"{name}, batch {batch:<6}" + "".join(f"{one:8.2f}ms" for one in milliseconds))
one, eight = (best_step_seconds(ranks, 32, 1, 4096, 16e9, 0, 8, **H100) for ranks in (1, 8))
measured("20 8B model, 8 GPUs instead of 1", one / eight, "times")

# %% [markdown]
# Eight GPUs make the 8B model only 3.3 times as fast, because its 64 all-reduces take longer than its reading. The 70B
# model becomes 5.7 times as fast. These times are computed, not measured. For one sequence nearly all of an all-reduce
# is latency, so one-shot is the faster method. With 256 sequences on eight GPUs the bytes count, and two-shot wins.

# %% [markdown]
# ## An MLP on several ranks
#
# How do you cut a layer so that its ranks have to meet only once? Take the MLP of exercise 18.4. Its first weight has
# 2 · hidden rows, first those of the *gate* and then those of *up*. They make hidden numbers $silu(gate) \cdot up$, and
# a second weight, *down*, makes `width` numbers of these.
#
# **Cut the first weight by rows.** Each row makes one gate or one up, so a rank with some of the rows has whole gates
# and ups. silu needs nothing but its own gate. If you cut the weight by columns, each rank has a part of every gate.
# Then you need an all-reduce before silu, because silu of a sum is not the sum of silus.
#
# **Cut down by columns.** Each output is a sum over all hidden numbers. A rank has some of them and adds up its terms:
# a partial sum. One all-reduce completes it.
#
# Take one output, hidden size 4 and 2 ranks. The gates are 1, -1, 2 and 0, every up is 1, and so is every number of
# down. The hidden numbers are 0.731, -0.269, 1.762 and 0. Rank 0 has the first two, and its partial sum is 0.462. Rank
# 1 has 1.762. Together they make 2.224.
#
# Two faults are common:
#
# - **The bias of down counts once.** Say that it is 0.5, so the result is 2.724. If each rank adds it to its partial
#   sum, the all-reduce makes 3.224 of it. A serving engine had this fault
#   ([text-generation-inference#1036](https://github.com/huggingface/text-generation-inference/issues/1036)). Rank 0
#   alone may add the bias before the sum, or all ranks after it.
# - **Gate and up are cut apart.** With hidden size 4, rank 0 needs the rows 0 and 1, two gates, and 4 and 5, two ups.
#   Cut in two blocks, the weight gives rank 0 the rows 0 to 3: all gates, and no up. The shapes are the same, so there
#   is no error, only a wrong result ([Automodel#1324](https://github.com/NVIDIA-NeMo/Automodel/pull/1324)).
#
# **How a rank's program is written.** You need no second GPU: `play_ranks` plays the programs of all ranks in one
# process. A program is a generator. It stops at every `yield`, which names a *step*, and goes on with the step's value.
# Meanwhile the other ranks go on, in an order that can be chosen. What is wrong in one order alone is found in that
# order. `play_ranks` also counts the bytes that each rank receives, those of an all_reduce as in one-shot. The next
# cell adds up a number of each of two ranks.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def add_up(rank, ranks, number):
    total = yield ("all_reduce", number)
    return total


played = play_ranks(add_up, [(torch.tensor([1.0]),), (torch.tensor([10.0]),)])  # the arguments of each rank
print(played["ending"], played["results"], "bytes received:", played["received"])

# %% [markdown]
# Both ranks have 11, and each has received the 4 bytes of the other's float32.
#
# **Predict** how many bytes a rank receives in the MLP with 4 ranks, 3 tokens, a width of 64 and a hidden size of 256.

# %%
predict("20 bytes received by a rank in one MLP", ..., "bytes")

# %%
# Exercise 20.2 · An MLP on several ranks
def shard(
    rank: int, ranks: int, gate_up: torch.Tensor, gate_up_bias: torch.Tensor, down: torch.Tensor,
    down_bias: torch.Tensor,
) -> tuple:
    """The part of the MLP's weights that one rank holds.

    ranks: at least 1. rank: 0 … ranks - 1.
    gate_up: [2 · hidden, width]: first all rows of the gate, then all rows of up. gate_up_bias: [2 · hidden], alike.
    down: [width, hidden]. down_bias: [width]. hidden is a multiple of ranks, and width at least 1.
    All are float32 and contiguous, and are not changed. Weights are up to 10 in size. Biases are up to 1,000 in size,
    and may be 0.
    Returns: a tuple or list in a form of your own, of tensors, numbers and None. It is copied to the rank's GPU. Its
    tensors have at most (2 · hidden · width + 2 · hidden + hidden · width) / ranks + width numbers in all.
    """
    # BEGIN SOLUTION
    hidden = down.shape[1]
    own = slice(rank * hidden // ranks, (rank + 1) * hidden // ranks)
    gate, up = gate_up.chunk(2)
    gate_bias, up_bias = gate_up_bias.chunk(2)
    return gate[own], up[own], gate_bias[own], up_bias[own], down[:, own], down_bias
    # END SOLUTION


def mlp(rank: int, ranks: int, x: torch.Tensor, part: tuple):
    """The program of one rank: a generator that computes (silu(x gateᵀ + bias) · (x upᵀ + bias)) downᵀ + down_bias.

    rank, ranks: as above.
    x: [tokens, width], at least 1 of each, float32, contiguous, the same on all ranks; up to 10,000 in size.
    part: what `shard` returned for this rank. It serves many calls, so it is not changed, and x is not either.
    Yields: ("all_reduce", tensor), a step whose value is the sum of the ranks' tensors, which have the same shape. In a
        call a rank takes at most this one step, with tokens · width numbers. If ranks is 1, it may leave it out.
    Returns: [tokens, width], float32: the result of the whole MLP, on every rank.
    The ranks' programs are played in many orders.
    """
    # BEGIN SOLUTION
    gate, up, gate_bias, up_bias, down, down_bias = part
    hidden = F.silu(F.linear(x, gate, gate_bias)) * F.linear(x, up, up_bias)  # [tokens, hidden / ranks]
    total = yield ("all_reduce", hidden @ down.T)
    return total + down_bias
    # END SOLUTION

# %%
best_shard, best_mlp = check("20.2", shard, mlp).best

# %%
ranks, tokens, width, hidden = 4, 3, 64, 256
x, gate_up, gate_up_bias = torch.randn(tokens, width), torch.randn(2 * hidden, width), torch.randn(2 * hidden)
down, down_bias = torch.randn(width, hidden), torch.randn(width)
parts = [best_shard(rank, ranks, gate_up, gate_up_bias, down, down_bias) for rank in range(ranks)]
played = play_ranks(best_mlp, [(x, part) for part in parts])

gate, up = F.linear(x, gate_up, gate_up_bias).chunk(2, -1)
whole = F.linear(F.silu(gate) * up, down, down_bias)
print("largest difference from one GPU:", max((result - whole).abs().max().item() for result in played["results"]))
print("numbers on a rank:", sum(one.numel() for one in parts[0] if torch.is_tensor(one)), "of", 3 * hidden * width
      + 2 * hidden + width)
measured("20 bytes received by a rank in one MLP", played["received"][0], "bytes")

# %% [markdown]
# It receives 2,304 bytes: 3 ranks send 3 · 64 numbers of 4 bytes each. The hidden size makes no difference, because the
# hidden numbers never travel. Attention is cut in the same way: each rank has some of the heads, and the output
# projection is cut by columns like down. That is the other all-reduce of a layer.
