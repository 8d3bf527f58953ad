# %% [markdown]
# # 20 · Several GPUs: heads, sequences and experts shared out
#
# **The question.** A model with 70 billion parameters has 140 GB of weights in 16 bits. One GPU with 80 GB cannot hold
# them, but two, four or eight H100s can. How long does it take them to generate one token? And how much of that time
# goes to the *links* between the GPUs, over which they exchange their results?
#
# Write down two numbers for eight GPUs: the milliseconds for a token, and the percentage of them that the links take.
#
# In this chapter you cut a model for several GPUs in three ways: by its weights, by its sequence and by its experts.
# You write the exchanges between the GPUs, and count their bytes. At the end a small model runs on your functions, on
# one, two and four simulated GPUs, and an engine on two processes.
#
# **You need one machine and no GPU.** One process plays the programs of all GPUs, in any order of events. It counts the
# bytes, and it finds programs that read too early or wait for ever. If you have two GPUs, your programs run on them
# too, near the end. Our own figures are from two H200s of one host (PyTorch 2.11, NCCL 2.28, Triton 3.6, November
# 2026). Figures that others measured are quoted with their source.
#
# **Time.** About six hours for all seven exercises, estimated. The **core path** takes two: exercises 20.1, 20.2 and
# 20.3, and every section whose heading does not end in *deeper*. You need chapters 01 and 05. Deeper sections use
# chapters 03 (merging two parts of a softmax), 07 (query heads that share a KV head), 10 (the backward pass) and 18
# (experts).

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, measured, predict, progress, self_check, solution

import math

import torch
import torch.nn.functional as F

# %% [markdown]
# ## What a step costs on several GPUs
#
# In a *decode step* a model generates one token for each of its sequences. The step reads all weights, and the KV cache
# of each sequence. An H100 reads 3.35 TB/s, so 140 GB take 42 ms. Eight GPUs can share the reading: each holds an
# eighth of every weight, and reads its 17.5 GB in 5.2 ms.
#
# A GPU with its program is called a *rank*; ranks are numbered from 0. In *tensor parallelism* every weight is cut into
# one *shard* for each rank; 20.2 shows how. This has a price: after attention and after the MLP each rank has only a
# *partial sum* of every number. An *all-reduce* gives every rank the sum over all ranks. A layer has two, and each adds
# up batch · width numbers, `width` for each sequence.
#
# An H100 receives up to 450 GB/s over its links. Here are two ways to add up S bytes:
#
# - **One-shot.** Each rank reads the numbers of all other ranks and adds them up itself. With 4 ranks it receives 3 S.
# - **Two-shot.** Each rank adds up one share of the numbers. With 4 ranks, rank 0 adds up the first quarter, which it
#   reads from the other 3. In a second phase it reads each other quarter from the rank that has added it up. It
#   receives ¾ S in each phase, 1.5 S in all.
#
# With 8 ranks these are 7 S and 1.75 S. Is two-shot four times as fast, then? For one sequence and a width of 8,192, S
# is 16 KiB. One-shot receives 114,688 bytes, which take 0.25 µs. But on eight H100s a one-shot kernel in Triton took
# 13.3 µs for 8k such numbers ([helion#245](https://github.com/pytorch/helion/pull/245)). Nearly all of this is
# *latency*, time that does not depend on the bytes: the kernel starts, and the ranks wait for each other. So count one
# latency for one-shot and two for two-shot, and add the time of the bytes. A 70B model has 80 layers, so its 160
# all-reduces of 13 µs add 2.1 ms to the 5.2 ms.
#
# **The cache** is shared out too. Keys and values are stored in *KV heads*, and each rank holds whole ones. With 8 KV
# heads on 4 ranks it holds 2, a quarter of the cache. With 2 KV heads on 8 ranks, four ranks need the same head, and
# each keeps a copy: half of the cache. One project divided by its 32 devices instead, although Llama 3 has 8 KV heads
# ([tenstorrent/vllm#50](https://github.com/tenstorrent/vllm/pull/50)).
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
# Eight GPUs make the 8B model only 3.3 times as fast, because its 64 all-reduces take longer than its reading. They
# make the 70B model 5.7 times as fast. ("Measured" stands above what a cell computes: nobody timed a GPU here.) For one
# sequence nearly all of an all-reduce is latency, so one-shot is faster. With 256 sequences on eight GPUs the bytes
# count, and two-shot is faster. The table leaves the cache out. For the 70B model with 256 sequences of 1,000 tokens it
# has 84 GB, and on eight GPUs it adds 3.1 ms.
#
# How good is such a model? For 0.5 MB on 4 GPUs it gives 16.5 µs in one-shot and 27.7 in two-shot. One report has 10
# and 17 ([vllm#24532](https://github.com/vllm-project/vllm/pull/24532), the card is not named). For a million 16-bit
# numbers on eight H100s it gives 45.6 µs in one-shot, where helion#245 measured 63.5. So trust it to a factor of 1.7:
# enough to see that the 8B model is past the point where more GPUs help, and not enough to choose between two kernels.

# %% [markdown]
# ## An MLP on several ranks
#
# How do you cut an MLP so that its ranks need only one all-reduce? A *gated MLP* has two weights. The first has `2 ·
# hidden` rows: first those of the *gate*, then those of *up*. Together they make the *hidden numbers*
# $\mathrm{silu}(\mathrm{gate})\cdot\mathrm{up}$, where $\mathrm{silu}(g)=g/(1+e^{-g})$. The second weight, *down*,
# makes `width` numbers of these.
#
# **Cut the first weight by rows.** Each row makes one gate or one up, so a rank with some of the rows has whole gates
# and ups. If you cut by columns, each rank has a partial sum of every gate. Then you need an all-reduce before silu,
# because silu of a sum is not the sum of silus.
#
# **Cut down by columns.** Each output is a sum over all hidden numbers. A rank adds up the terms of its own hidden
# numbers, and one all-reduce completes this partial sum.
#
# Take one output, hidden size 4 and 2 ranks. The gates are 1, -1, 2 and 0, every up is 1, and so is every number of
# down. The hidden numbers are 0.731, -0.269, 1.762 and 0. Rank 0 has the first two, so its partial sum is 0.462. Rank
# 1's is 1.762, and together they make 2.224.
#
# Two faults are common:
#
# - **The bias of down is added on every rank.** Say that it is 0.5, so the result should be 2.724. If both ranks add it
#   to their partial sums, the all-reduce gives 3.224. A serving engine had this fault
#   ([text-generation-inference#1036](https://github.com/huggingface/text-generation-inference/issues/1036)). Rank 0
#   alone may add the bias before the all-reduce, or all ranks after it.
# - **Gate and up are cut as one block.** With hidden size 4, rank 0 needs rows 0 and 1, two gates, and rows 4 and 5,
#   two ups. If you cut the weight into two blocks, rank 0 gets rows 0 to 3: all gates, and no up. All shapes are right,
#   so there is no error, only a wrong result ([Automodel#1324](https://github.com/NVIDIA-NeMo/Automodel/pull/1324)).
#
# The next cell draws the second fault for the example above: the right cut, and beside it the cut as one block. Look at
# the rows in the middle of the wrong one. Rank 0 takes its last two gates for ups, so the sum is 2.924 and not 2.224.

# %%
from course_lib.figures.parallel.cuts import draw_cuts

made = [1, -1, 2, 0, 1, 1, 1, 1]  # four gates and four ups, each made by one row
draw_cuts(made, {
    "Gate and up cut separately": [[0, 1, 4, 5], [2, 3, 6, 7]],  # the rows of rank 0, those of rank 1
    "Gate and up cut as one block": [[0, 1, 2, 3], [4, 5, 6, 7]],
})

# %% [markdown]
# **How to write a rank's program.** You write a Python generator, and `play_ranks` plays the programs of all ranks in
# one process. Each `yield` hands over one *step*, here an all-reduce, and gives back its value. Meanwhile the other
# ranks go on, in an order that you can choose. So a fault that shows in only one order is found in that order every
# time. `play_ranks` also counts the bytes that each rank receives, for an all-reduce those of one-shot. It takes the
# program, a list with the arguments of each rank, and then, if you like, the order: "ascending", "descending" or the
# seed of a random one. With `buffered=False` a send waits until it is received. The next cell adds up one number of
# each of two ranks.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def add_up(rank, ranks, number):
    total = yield ("all_reduce", number)
    return total


played = play_ranks(add_up, [(torch.tensor([1.0]),), (torch.tensor([10.0]),)])  # the arguments of each rank
print(played["ending"], played["results"], "bytes received:", played["received"])

# %% [markdown]
# Both ranks have 11, and each has received the 4 bytes of one number.
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
# It receives 2,304 bytes: 3 other ranks give 3 · 64 numbers of 4 bytes each. The hidden size makes no difference,
# because the hidden numbers never travel. Attention is cut in the same way: each rank has some of the heads, and the
# output projection is cut by columns like down. That makes a layer's other all-reduce.

# %% [markdown]
# ## The all-reduce by hand
#
# Now you write the all-reduce yourself. A kernel can read another GPU's memory over the links with ordinary loads, but
# neither too early nor too late.
#
# Each rank has a *buffer*: room for n numbers that all ranks can read and only their owner can write. In **one-shot** a
# rank writes its numbers to its buffer, reads all buffers, and adds them up. If rank 1 is slower than rank 0, rank 0
# finds old numbers in rank 1's buffer. A *barrier* between writing and reading prevents that: it holds each rank until
# all have come to it. It is made of *signals*, small counters in the memory of the other ranks.
#
# Is one barrier enough? The next all-reduce uses the same buffers. Suppose that rank 0 has read everything, returns,
# and writes the numbers of the next call. Rank 1 is slower and reads those. So a second barrier is needed after the
# reads. A one-shot kernel of one library lacked it. Now and then its sums were garbage, and servers crashed
# ([aiter#3514](https://github.com/ROCm/aiter/pull/3514)).
#
# The next cell plays two ranks without the second barrier. In call 1 they add up 1 and 10, and in call 2 they add up 2
# and 20. Follow the arrow: it goes from a write of call 2 to a read of call 1 that finds the new number. In a live
# notebook, move the slider to see other orders: in some of them every sum is right.

# %%
from course_lib.figures.parallel.race import choose_order

choose_order([[1, 2], [10, 20]], orders=20)

# %% [markdown]
# **Two-shot** with two ranks, which hold [1, 2, 3, 4] and [10, 20, 30, 40]:
#
# | | buffer of rank 0 | buffer of rank 1 |
# |---|---|---|
# | both have written | 1, 2, 3, 4 | 10, 20, 30, 40 |
# | each has written the sums of its share | **11, 22**, 3, 4 | 10, 20, **33, 44** |
#
# Rank 0's share is the first half, so it reads only this half of rank 1's buffer. No other rank reads this half of rank
# 0's buffer in this phase, so rank 0 may write its sums there at once. After another barrier each rank reads every
# share from the rank that has added it up. A kernel that took a wrong place in this second phase gave the right sums on
# GPU 0 alone ([FasterTransformer#672](https://github.com/NVIDIA/FasterTransformer/pull/672)).
#
# If n is not a multiple of `ranks`, let share r go from `r * n // ranks` up to `(r + 1) * n // ranks`. For 7 numbers
# and 3 ranks the shares have 2, 2 and 3 numbers.
#
# **The same bits on all ranks.** Three ranks hold 1, 10⁸ and -10⁸. In float32 (1 + 10⁸) - 10⁸ is 0, because 1 + 10⁸ is
# rounded to 10⁸. But (10⁸ - 10⁸) + 1 is 1. If each rank begins with its own number, rank 0 gets 0 and rank 1 gets 1.
# Then the two may choose different tokens, and wait for each other for ever. In float64 the same happens with 10²⁰ in
# place of 10⁸. PyTorch's one-shot kernel added in such an order until it was changed for this reason
# ([pytorch#129501](https://github.com/pytorch/pytorch/pull/129501)).
#
# **Predict**: four ranks call a one-shot all-reduce twice, without the barrier after the reads. In how many of 100
# random orders is some sum wrong?

# %%
predict("20 wrong orders of 100 without the last barrier", ..., "orders")

# %%
# Exercise 20.3 · The all-reduce by hand
def one_shot(rank: int, ranks: int, x: torch.Tensor):
    """The sum of x over all ranks, where each rank reads all numbers of all others.

    A generator: the program of one rank. Every rank runs it with numbers of its own, and rank r of ranks (1 to 8) gets
    rank = r. x: float32 [n], contiguous, n at least 1, the same n on all ranks. Its numbers are finite and of any size;
    no sum of them overflows. x is not to be changed.

    Each rank has n numbers of memory, which all ranks can read and it alone can write. At first they are NaN, and
    in later calls whatever the call before has left. The steps are:
        yield ("write", tensor, begin)            from number `begin` of the own memory on
        tensor = yield ("read", rank, begin, end) a copy of the numbers begin … end - 1 of any rank, also of its own
        yield ("barrier",)                        goes on when all ranks have come to this barrier
        yield ("signal", to, slot)                gives rank `to` a signal; slot is a name of your choice
        yield ("wait", source, slot)              waits for such a signal of rank `source`, and takes it
    Returns: the sum, float32 [n], with the same bits on all ranks.
    It is called several times, one call right after the other, with the same memory. Ranks run at any pace: results
    must be right in every order of their steps that barriers and signals allow, and every rank must come to its end.
    In a call a rank receives at most (ranks - 1) · n numbers, what it reads of its own memory not counted, and takes at
    most 1,000 steps.
    """
    # BEGIN SOLUTION
    yield "write", x, 0
    yield ("barrier",)  # all have written
    total = torch.zeros_like(x)
    for source in range(ranks):  # the same order on all ranks, so the same roundings
        total += yield "read", source, 0, len(x)
    yield ("barrier",)  # all have read: the next call may write
    return total
    # END SOLUTION


def two_shot(rank: int, ranks: int, x: torch.Tensor):
    """The same sum in two phases: each rank adds up one share of the numbers, and then reads the others' sums.

    All as above but for the bytes: a rank receives at most n + (ranks - 2) · ceil(n / ranks) numbers in a call, and
    none if it is alone. n need not be a multiple of ranks, and may be less. Which numbers make up a share is yours to
    choose.
    """
    # BEGIN SOLUTION
    def share(of):
        return of * len(x) // ranks, (of + 1) * len(x) // ranks

    begin, end = share(rank)
    yield "write", x, 0
    yield ("barrier",)  # all have written
    total = torch.zeros_like(x[begin:end])
    for source in range(ranks):
        total += yield "read", source, begin, end
    yield "write", total, begin  # no other rank reads this share of this rank's numbers
    yield ("barrier",)  # all sums are written
    result = torch.empty_like(x)
    for owner in range(ranks):
        first, last = share(owner)
        result[first:last] = yield "read", owner, first, last
    yield ("barrier",)  # all have read
    return result
    # END SOLUTION

# %%
best_one_shot, best_two_shot = check("20.3", one_shot, two_shot).best

# %% [markdown]
# The next cell plays a one-shot all-reduce with both barriers, without the first, and without the second. Four ranks
# call it once or twice, in the same 100 random orders.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def several_calls(rank, ranks, x, calls, missing):
    """One-shot all-reduces one after the other, without barrier number `missing` (0: with both)."""
    for _ in range(calls):
        yield ("write", x, 0)
        if missing != 1:
            yield ("barrier",)
        total = torch.zeros_like(x)
        for other in range(ranks):
            total += yield ("read", other, 0, len(x))
        if missing != 2:
            yield ("barrier",)
        x = total
    return x


def wrong_orders(calls, missing, ranks=4):
    numbers = [torch.arange(4.0) + rank for rank in range(ranks)]
    expected, arguments = sum(numbers) * ranks ** (calls - 1), [(x, calls, missing) for x in numbers]
    memory = 4, torch.float32  # of each rank: how many numbers, and their dtype
    played = [play_ranks(several_calls, arguments, order, memory) for order in range(100)]
    return sum(any(not torch.equal(result, expected) for result in one["results"]) for one in played)


print(f"{'wrong orders of 100':28}{'one call':>10}{'two calls':>11}")
for number, words in enumerate(("with both barriers", "without the first", "without the second")):
    print(f"{words:28}{wrong_orders(1, number):10}{wrong_orders(2, number):11}")
measured("20 wrong orders of 100 without the last barrier", wrong_orders(2, 2), "orders")

# %% [markdown]
# Without the second barrier about 90 of 100 orders are wrong, but only in two calls: a test with one call finds
# nothing. On a real machine the ranks run at nearly the same pace, so such a fault shows seldom. The check therefore
# also follows the barriers and signals, and tells you whether a read and a write of the same numbers could change
# places.
#
# Kernels that are called very often save the second barrier with two buffers in turn. The barrier of the next call then
# protects the buffer of this one, because nobody writes to it again before all have come to that barrier.

# %% [markdown]
# ## Ring attention · deeper
#
# A long sequence may not fit on one GPU. With 8 KV heads of 128 numbers, the keys and values of a token take
# 4,096 bytes in bfloat16, in each layer. For a million tokens (2²⁰) and 32 layers that is 137 GB, and an H100 has 80.
# So each rank keeps some of the tokens, with their queries, keys and values.
#
# In *ring attention* the queries stay, and keys and values travel. In each exchange every rank sends those that it
# holds to the next rank, and receives others from the rank before. After `ranks - 1` exchanges all queries have met all
# keys.
#
# **Merging.** Each meeting gives a query an output over these keys, and *lse*, the logarithm of the sum of their
# exponentials. The outputs are averaged with these sums as weights. Say a query's first part has output 1 and sum 1, so
# its lse is 0. The second part has output 5 and sum 3, so its lse is $\ln 3 = 1.10$. Together the sum is 4, the lse is
# $\ln 4 = 1.39$, and the output is $1/4 \cdot 1 + 3/4 \cdot 5 = 4$. Each weight is
# $e^{\text{lse of the part} - \text{lse of all}}$.
#
# Take exponentials only of numbers up to 0, since $e^{89}$ is infinite in float32. In one program,
# `lse + log(1 + exp(block_lse - lse))` overflowed
# ([EasyContext#14](https://github.com/jzhang38/EasyContext/issues/14)). `torch.logaddexp` is safe.
#
# **Causality.** Now a query sees only its own position and those before it. Cut the sequence into 4 *chunks*, one for
# each rank. The queries of rank 0 see half of their own chunk. Those of rank 3 see three chunks and half of their own:
# 3.5 pairs of chunks. The average is 2, so on average a rank works 2 / 3.5 = 57 % of the time.
#
# The *zig-zag* order balances the work. Cut the sequence into 8 chunks, and give each rank an early one and a late one:
# rank 0 holds chunks 0 and 7, rank 1 holds 1 and 6, rank 2 holds 2 and 5, rank 3 holds 3 and 4.
#
# Say rank 1 receives the keys of rank 0. All its queries see chunk 0, which lies before both of its chunks, and none
# sees chunk 7. When the keys of rank 2 arrive, the late queries (chunk 6) see chunks 2 and 5, and the early ones see
# neither. Either way two of four pairs of chunks are computed, without a mask. Only a rank's own keys need a mask, the
# usual one, since its tokens ascend.
#
# The next cell draws both ways for 4 ranks. A square of a grid is a pair of chunks, and its number is the step in which
# the pair is computed. In step 0 each rank has its own keys, and each exchange begins the next step. Below, compare the
# hatched parts, in which ranks wait.

# %%
from course_lib.figures.parallel.ring import draw_ring

draw_ring({
    "One chunk for each rank": [[0], [1], [2], [3]],  # the chunks of rank 0, of rank 1, ...
    "Zig-zag": [[0, 7], [1, 6], [2, 5], [3, 4]],
})

# %% [markdown]
# In PithTrain, zig-zag, overlapped exchanges and a compiled merge together cut the time of a layer from 13.87 to
# 8.30 ms (4 ranks, 32k tokens; the card is not named). Early ranks had waited 83 % of the time
# ([pith-train#39](https://github.com/mlc-ai/pith-train/pull/39)).
#
# The next cell counts pairs of a query and a key. **Predict** in percent how much of the time 8 ranks work on average
# with one chunk each.

# %%
predict("20 working time of 8 ranks, one causal chunk each", ..., "%")

# %%
def working_time(positions_of_ranks):
    """How many pairs of a query and a key a rank computes on average, in percent of the rank with the most."""
    pairs = [sum(position + 1 for position in positions) for positions in positions_of_ranks]
    return 100 * sum(pairs) / len(pairs) / max(pairs)


one_chunk = [range(1024 * rank, 1024 * rank + 1024) for rank in range(8)]
measured("20 working time of 8 ranks, one causal chunk each", working_time(one_chunk), "%")

# %%
# Exercise 20.4 · Ring attention, causal and balanced
def positions(rank: int, ranks: int, tokens: int) -> list[int]:
    """The positions of the tokens that a rank holds, in the zig-zag order.

    rank: 0 … ranks - 1. ranks: at least 1. tokens: a positive multiple of 2 · ranks.
    Returns: a list of tokens / ranks whole numbers (or an int64 tensor). The tokens 0 … tokens - 1 are cut into
    2 · ranks equal chunks. A rank holds chunk `rank` and behind it chunk 2 · ranks - 1 - rank.
    """
    # BEGIN SOLUTION
    chunk = tokens // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return [*range(rank * chunk, (rank + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]
    # END SOLUTION


def ring_attention(rank: int, ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend):
    """Causal attention of a rank's queries over the tokens of all ranks: a generator of steps.

    rank, ranks: 0 … ranks - 1, and 1 … 8. Each rank runs this program.
    query, key, value: those of the rank's own tokens, [heads, rows, dim], in the order of `positions`. float32 or
        bfloat16, all of one dtype, contiguous, not changed. heads and dim are at least 1; rows is even, at least 2, and
        the same on all ranks. Scores are at most 300 in size, and may differ by 300 from chunk to chunk.
    attend: a function. attend(query, key, value, causal) takes some rows of these queries, and some rows of any rank's
        keys and values, of all heads or of some. It returns (out, lse): attention of these queries over these keys,
        float32 [heads, queries, dim], and the natural logarithm of the sum of their exponentials, float32 [heads,
        queries]. Scores are divided by √dim. With causal=False all queries see all keys; with causal=True query i sees
        the keys 0 … i, and there must be as many keys as queries.
    Yields: tensor = yield ("exchange", to, tensor, source) sends a tensor to one rank and receives one from another.
        yield ("send", to, tensor) and tensor = yield ("receive", source) are allowed too, and nothing else. The ranks
        are played in any order. A send may wait until its receiver takes the message.
    Returns: (out, lse), float32 [heads, rows, dim] and [heads, rows]: attention of each of the rank's queries over the
    tokens at its position and before, of all ranks.
    A rank receives at most (ranks - 1) times the bytes of its keys and values. In each head `attend` computes each pair
    of a query and a key that causality allows once, and no other; the pairs are counted, on each rank.
    """
    # BEGIN SOLUTION
    half = query.shape[1] // 2
    out, lse = attend(query, key, value, True)
    travelling = torch.stack([key, value])
    for step in range(1, ranks):
        travelling = yield "exchange", (rank + 1) % ranks, travelling, (rank - 1) % ranks
        source = (rank - step) % ranks
        if source < rank:  # all queries see its early chunk
            seeing, seen = slice(None), slice(0, half)
        else:  # the late queries see both of its chunks
            seeing, seen = slice(half, None), slice(None)
        part, part_lse = attend(query[:, seeing], travelling[0][:, seen], travelling[1][:, seen], False)
        whole = torch.logaddexp(lse[:, seeing], part_lse)
        before = out[:, seeing] * torch.exp(lse[:, seeing] - whole)[..., None]
        out[:, seeing] = before + part * torch.exp(part_lse - whole)[..., None]
        lse[:, seeing] = whole
    return out, lse
    # END SOLUTION

# %%
best_positions, best_ring_attention = check("20.4", positions, ring_attention).best

# %% [markdown]
# The next cell plays your ring with 4 ranks, and compares it with attention over the whole sequence. The difference
# should be below $10^{-5}$.

# %%
from course_lib.hardware.simulated_ranks import play_ranks


def attend(query, key, value, causal):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


ranks, tokens = 4, 64
generator = torch.Generator().manual_seed(3)
query, key, value = torch.randn(3, 2, tokens, 16, generator=generator)
places = [torch.as_tensor(best_positions(rank, ranks, tokens)) for rank in range(ranks)]
given = [(query[:, place], key[:, place], value[:, place], attend) for place in places]
played = play_ranks(best_ring_attention, given, order="descending", buffered=False)
whole = torch.empty_like(query)
for place, (out, _) in zip(places, played["results"]):
    whole[:, place] = out
print(played["ending"], "- the largest difference:", f"{(whole - attend(query, key, value, True)[0]).abs().max():.1e}")
print("working time:", f"{working_time([place.tolist() for place in places]):.1f} %, received:", played["received"])

# %% [markdown]
# ## The ring backwards · deeper
#
# Training needs the gradients dq, dk and dv of queries, keys and values. The forward pass left each rank its outputs
# and its lse, both over all keys. With these and the gradient of its outputs, a rank computes what any keys contribute.
# The weights of these keys are $P = e^{S - \text{lse}}$, where $S$ are the scores. They are already the weights in the
# whole row, so nothing is merged: all contributions are added. This ring has no mask, so each rank may hold one chunk
# of the sequence.
#
# The gradient of a query is a sum over keys. The queries stay, so dq stays too. The gradients of keys and values are
# sums over queries, and those are spread over all ranks. So dk and dv travel with their keys and values, and every rank
# adds its part.
#
# Follow the keys of rank 0 through a ring of three. Rank 0 computes its own part of their dk, say 1. Keys and dk go to
# rank 1, whose queries add 10, and then to rank 2, whose queries add 100. After these two exchanges the sum 111 is
# complete, but it is on rank 2. A third exchange brings it home. The keys need not make this last trip.
#
# All ranks do this at the same time. While the keys of rank 0 are on rank 2, rank 0 itself holds those of rank 1.
#
# **Two faults that happened.** In diffusers, the ring passed keys and values on. But the function that computed the
# gradients read those that had been saved in the forward pass: the rank's own, every time. The gradients were wrong,
# and nothing failed, since all shapes were right
# ([diffusers#14265](https://github.com/huggingface/diffusers/issues/14265)). A check with one rank does not find it.
#
# Users of another implementation saw errors in the gradients that grew with the number of ranks. They suspect the
# partial results. The kernel rounds each of them to 16 bits, before they are added in 32
# ([ring-flash-attention#42](https://github.com/zhuzilin/ring-flash-attention/issues/42)). In the exercise
# `attend_backward` returns float32. The sums stay in float32, and travel in float32.
#
# That costs bytes. Let a rank's keys have $n$ numbers, and its values too. With 4 ranks, a rank receives $3 \cdot 2n$
# numbers of 2 bytes in the forward pass. **Predict** how many times as many bytes it receives backwards, with bfloat16
# for keys and values and float32 for their gradients.

# %%
predict("20 bytes of the ring backwards, 4 ranks", ..., "times the forward")

# %%
# Exercise 20.5 · The ring backwards
def ring_backward(
    rank: int, ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, grad_out: torch.Tensor, attend_backward,
):
    """The gradients of a rank's queries, keys and values, where all queries see the keys of all ranks: a generator.

    rank, ranks: 0 … ranks - 1, and 1 … 8. Each rank runs this program.
    query, key, value: those of the rank's own tokens, [heads, tokens, dim]. float32 or bfloat16, all of one dtype,
        contiguous. All sizes are at least 1, and the same on all ranks. Scores are at most 300 in size. There is no
        mask.
    out, lse: what the forward pass gave for these queries over the keys of all ranks: [heads, tokens, dim] of the same
        dtype, and float32 [heads, tokens].
    grad_out: the gradient of out, of its shape and dtype. No tensor that is given is changed.
    attend_backward: a function. attend_backward(query, key, value, out, lse, grad_out) takes this rank's queries with
        their out, lse and grad_out, and any rank's keys and values, of all heads or of some. It returns (dq, dk, dv):
        what these queries and these keys contribute to each other's gradients, float32, of the shapes of query, key
        and value.
    Yields: tensor = yield ("exchange", to, tensor, source) sends a tensor to one rank and receives one from another.
        yield ("send", to, tensor) and tensor = yield ("receive", source) are allowed too, and nothing else. The ranks
        are played in any order. A send may wait until its receiver takes the message.
    Returns: (dq, dk, dv) of the rank's own tokens, float32 [heads, tokens, dim]: sums over the keys of all ranks, and
    over the queries of all ranks, added up in float32.
    A rank receives at most (ranks - 1) times the bytes of its keys and values, and ranks times those of dk and dv; with
    one rank nothing. In each head attend_backward computes each pair of a query and a key once.
    """
    # BEGIN SOLUTION
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    dq, dk, dv = attend_backward(query, key, value, out, lse, grad_out)
    travelling, gradients = torch.stack([key, value]), torch.stack([dk, dv])
    for _ in range(ranks - 1):
        travelling = yield "exchange", after, travelling, before
        gradients = yield "exchange", after, gradients, before
        more, dk, dv = attend_backward(query, travelling[0], travelling[1], out, lse, grad_out)
        dq += more
        gradients += torch.stack([dk, dv])
    gradients = yield "exchange", after, gradients, before  # home
    return dq, gradients[0], gradients[1]
    # END SOLUTION

# %%
best_ring_backward = check("20.5", ring_backward).best

# %% [markdown]
# The next cell counts the bytes of both passes, and compares the gradients with those of autograd.

# %%
def attend_backward(query, key, value, out, lse, grad_out):
    query, key, value, out, grad_out = (part.float() for part in (query, key, value, out, grad_out))
    scale = 1 / math.sqrt(query.shape[-1])
    weights = torch.exp(query @ key.mT * scale - lse[..., None])
    grad_scores = weights * (grad_out @ value.mT - (out * grad_out).sum(-1, keepdim=True))
    return grad_scores @ key * scale, grad_scores.mT @ query * scale, weights.mT @ grad_out


def cut(*tensors):
    """For each rank its tokens of every tensor, in order."""
    return zip(*(tensor.chunk(ranks, dim=1) for tensor in tensors))


key, value = key.bfloat16(), value.bfloat16()
whole = [tensor.float().requires_grad_() for tensor in (query.bfloat16(), key, value)]
out, lse = attend(*whole, causal=False)
grad_out = torch.randn(out.shape, generator=generator).bfloat16()
wanted = torch.autograd.grad(out, whole, grad_out.float())

given = [(*parts, attend_backward)
         for parts in cut(query.bfloat16(), key, value, out.detach().bfloat16(), lse.detach(), grad_out)]
backwards = play_ranks(best_ring_backward, given, order="descending", buffered=False)
found = [torch.cat(parts, dim=1) for parts in zip(*backwards["results"])]
print("the largest differences of dq, dk, dv:",
      *(f"{(mine - theirs).abs().max():.1e}" for mine, theirs in zip(found, wanted)))
forwards = 3 * 2 * key[:, : tokens // ranks].nbytes
times = backwards["received"][0] / forwards
measured("20 bytes of the ring backwards, 4 ranks", times, "times the forward")

# %% [markdown]
# Backwards a rank receives 3.7 times as many bytes: the keys and values once more, $12n$ bytes, and four times $2n$
# numbers of 4 bytes, $32n$. dq and dk differ from those of autograd by about 0.001, because they are computed with
# `out`, which the forward pass rounded to bfloat16.

# %% [markdown]
# ## Tokens to experts on other ranks · deeper
#
# In a mixture of experts (18.5) a token goes to a few of a layer's many MLPs, its experts. DeepSeek-V3 has 256 in a
# layer. With *expert parallelism* each rank holds some of them whole: of `count` experts, rank r holds count / ranks,
# from number r · count / ranks on. Each rank also has its own tokens, so a token's row travels to the rank of its
# expert, and the result travels back.
#
# One step exchanges tensors between all ranks: `received = yield ("all_to_all", tensors)`. You give one tensor for each
# rank, and get a list: `received[s]` is what rank s gave for you. Sizes may differ, and may be 0. What you give
# yourself does not travel. You need three such steps: for row counts, rows and results.
#
# **An example** with 2 ranks and 4 experts. Rank 0 has tokens a, b and c for experts 2, 0 and 3. Rank 1 has d, e and f
# for experts 1, 2 and 2.
#
# 1. Each rank sorts its rows by expert and counts them. Rank 0 has b, a, c and the row counts 1 0 | 1 1 for experts
#    0, 1 | 2, 3. Rank 1 has d, e, f and 0 1 | 2 0. Each sends the other the row counts for the other's experts.
# 2. The rows travel. Rank 1 receives a, c from rank 0, and has e, f itself. From the row counts 1 1 and 2 0 it knows
#    that a, e and f are for expert 2, and c is for expert 3. An expert's rows do *not* lie next to each other: they are
#    sorted only within what came from one rank.
# 3. Each expert runs once, on all of its rows. The results A, C, E, F go back in the order in which the rows arrived.
#    Rank 0 has B itself, gets A, C from rank 1, and puts them where the tokens stood: A, B, C.
#
# **What goes wrong.** Row counts and rows must describe the same order. In xtuner they came from two sources, so
# experts got rows of others. Training and inference differed by 0.0044, and after the repair by 0.0004
# ([xtuner#2053](https://github.com/InternLM/xtuner/pull/2053)). In a test of DeepEP nearly all tokens went to the same
# experts, and the row counts were wrong: 9,181 rows for an expert that had 6,888
# ([DeepEP#427](https://github.com/deepseek-ai/DeepEP/issues/427)). A rank without tokens must not leave early: the
# others wait for it.
#
# **Imbalance** costs time even if all is right, since the layer waits for its fullest expert. Take 8 ranks with
# 64 tokens each and 64 experts. A token goes to one expert, chosen by chance, so an expert gets 8 tokens on average.
# **Predict** how many the fullest one gets.

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
# The fullest expert gets almost twice the average, by chance alone. The fullest rank, with its 8 experts, gets less
# than a fifth more.

# %%
# Exercise 20.6 · Tokens to experts on other ranks
def dispatch(rank: int, ranks: int, x: torch.Tensor, experts: torch.Tensor, count: int, run):
    """One rank's program, a generator: what the experts of all ranks make of this rank's tokens.

    rank: 0 … ranks - 1. ranks: 1 … 8.
    x: float32 [tokens, width], contiguous, numbers up to 1,000,000 in size: the rows of this rank's tokens. tokens is
        0 or more, other numbers on other ranks; width is at least 1, the same on all. It is not changed.
    experts: int64 [tokens], contiguous, from 0 to count - 1: the expert of each token. Experts may get no token, and
        some experts may get all tokens.
    count: how many experts there are on all ranks, a multiple of ranks, at most 1,000. Rank r holds count / ranks of
        them, from number r · count / ranks on.
    run: a function. run(expert, rows) returns what an expert makes of rows, float32 [n, width] for float32 [n, width],
        each row by itself. The rows may stand in any order. A rank calls it for its own experts only, by their number
        among all of them, at most once for each, and never with n = 0.
    Returns: float32 [tokens, width]: row t is what expert experts[t] makes of row t of x.

    all_to_all is the only step. Each row travels once to the rank of its expert and once back, and a rank's own rows do
    not travel. Besides, a rank may receive whole numbers of 8 bytes: `count` of them from each other rank, and two with
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
# The next cell plays your program on 4 ranks. Each expert multiplies its rows by its number.

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
# On average three of four rows are for another rank, and they travel twice: about one and a half times the bytes of a
# rank's own rows.

# %% [markdown]
# ## Fewer KV heads than ranks · deeper
#
# Each rank has some query heads, and the KV heads that these read. In grouped-query attention (chapter 07) several
# query heads read the same KV head. Qwen2.5-3B has 16 query heads and 2 KV heads. How do 8 ranks share 2 KV heads?
#
# A KV head could be cut into pieces, a quarter of its numbers for each rank. But a score is a sum of products over all
# numbers of a head, so the ranks would have to exchange something for every score. tpu-inference cut heads into pieces,
# and put them together again over the links. A step of Qwen2.5-3B on 8 chips took 3.1 ms. With whole copies it takes
# 1.58 ms ([tpu-inference#2661](https://github.com/vllm-project/tpu-inference/pull/2661)).
#
# So a KV head stays whole, and each rank that needs it holds a copy. Take 8 query heads and 2 KV heads on 4 ranks:
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
# heads 0 and 1, and rank 1 those of 2 and 3. Say that for one number of the head rank 0 has 0.5, and rank 1 has −0.2.
# The gradient is 0.3, and *both* ranks need it. Ranks 2 and 3 add nothing, because they hold another head.
#
# In training code for StarCoder this sum was missing for keys and values. The gradients of their weights were added up
# later, so the copies stayed equal. But each rank sent back only its own part to the layer before. With one KV head a
# small model had a validation loss of 3.74 after 5,000 steps, and 2.64 after the repair
# ([Megatron-LM#37](https://github.com/bigcode-project/Megatron-LM/pull/37)).
#
# The order of a sum matters here as in 20.3: $(a+b)+c$ and $a+(b+c)$ may differ in the last bit. If each rank begins
# with its own part, the copies get different bits, and drift apart during training. So all ranks add the parts in the
# same order.
#
# The step `parts = yield ("all_to_all", tensors)` takes one tensor for each rank, and gives you what each rank gave for
# you. An empty tensor costs no bytes.
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
# From 2 ranks on, a rank holds half of the cache of Qwen2.5-3B, however many ranks there are. So 8 ranks together hold
# four times the cache.

# %% [markdown]
# ## On real links
#
# What do real links make of all this? We measured the course's own kernels between two H200s, whose links are NVLinks.
# A rank receives 371 GB/s when both copy at once, of 450 that the data sheet gives. A barrier between the two takes 3.7
# µs. An all-reduce of bfloat16 took, in µs (`python -m course_lib bench links`):
#
# | bytes | one-shot | two-shot | NCCL |
# |---|---|---|---|
# | 4 KiB | **3.0** | 7.9 | 8.9 |
# | 64 KiB | **3.8** | 8.5 | 10.3 |
# | 512 KiB | **6.1** | 10.1 | 12.9 |
# | 1 MiB | – | **13.0** | 18.8 |
# | 4 MiB | – | **23.2** | 36.9 |
# | 64 MiB | – | **229** | 252 |
#
# **One-shot without a barrier.** For 4 KiB one-shot takes less time than one barrier, because the course's kernel
# (`course_lib/kernels/parallel/one_shot.py`) has none. Calls are counted: 1, 2, 3 and so on. A rank writes its numbers
# into the other rank's memory, and behind every 4 bytes of them 4 more, the number of the call. Both arrive together.
# The other rank reads its own memory again and again until it finds the new call's number there. Then the numbers
# beside it are new too, and no other signal is needed. NCCL calls this form LL, for low latency. It doubles the bytes,
# so it is meant for small tensors, and we did not measure it from 1 MiB on. In 20.1's count, without the numbers of
# calls, two ranks receive equally many bytes with both methods.
#
# **A product and its exchange at the same time.** Take the down projection of Llama-3-8B for 4,096 tokens. Each of two
# ranks computes a partial sum of all 4,096 rows, which takes 314 µs. Afterwards each rank needs the sums of only half
# of the rows (a *reduce-scatter*, the first phase of two-shot). If NCCL does this after the product, both take 423 µs.
# Instead a rank can first compute the rows whose sums the other rank needs. They travel while it computes the other
# half, and the whole takes 339 µs. With 256 rows it is slower: 54 µs, and 45 µs with NCCL after the product.
#
# **Ring attention** over 131,072 tokens, causal, 32 query heads and 8 KV heads of 128 (`python -m course_lib bench
# ring`): 217 ms on one H200, 111 ms on two. Two GPUs at twice the rate of one would take 108.5 ms, so this is 98 % of
# it. With one chunk for each rank it takes 168 ms, or 65 %. By the count of 20.4 it would be 67 %. If a rank waits for
# each exchange before it computes, zig-zag takes 113 ms, hardly longer: the 268 MB that a rank receives take only 0.7
# ms of it.
#
# **A decode step** of Llama-3-8B's shape, behind 1,024 tokens (`python -m course_lib bench ranks_decode`):
#
# | | 1 GPU | 2 GPUs | predicted for 1 and 2 | with NCCL on 2 |
# |---|---|---|---|---|
# | one sequence | 4.35 ms | 2.75 ms | 3.57 and 1.96 ms | 3.30 ms |
# | 64 sequences | 6.55 ms | 4.38 ms | 5.56 and 3.15 ms | 5.08 ms |
#
# The prediction is that of 20.1, with the all-reduces of this run (2.6 and 5.7 µs each) and the rate of a large copy,
# 4.2 TB/s. A step reads 15 GB of weights, since of the table of embeddings it needs a few rows. For one sequence two
# GPUs are 1.58 times as fast as one, and the prediction was 1.82 times. On one GPU the step takes 0.78 ms longer than
# predicted, and on two 0.80 ms. So this time does not become shorter with a second GPU. For 64 sequences it is 0.99 and
# 1.23 ms. We think that it passes mostly at the starts and ends of kernels, when the memory is hardly read. A step has
# about 200 kernels on one GPU and about 265 on two. We did not measure these gaps.
#
# The next cell runs your programs of 20.3 on your own GPUs, if you have two. `play_ranks` takes a device for each rank.
# A read is then a copy over the link, and all GPUs compute at the same time.

# %%
gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
if len(gpus) < 2:
    print(f"This machine has {len(gpus)} GPUs, and real links need two. The figures above are from two H200s.")
else:
    numbers = [torch.randn(1 << 20, device=gpu) for gpu in gpus]
    expected = sum(x.cpu() for x in numbers)
    for program in (best_one_shot, best_two_shot):
        played = play_ranks(program, [(x,) for x in numbers], memory=(1 << 20, torch.float32), devices=gpus)
        error = max((result.cpu() - expected).abs().max().item() for result in played["results"])
        print(f"{program.__name__} on {len(gpus)} GPUs: largest error {error:.0e}, bytes received {played['received']}")

# %% [markdown]
# ## Finale: one model on 1, 2 and 4 ranks
#
# Chapter 05's small model reads 256 bytes of its book on one rank, on 2 and on 4. Its MLPs are cut with your `shard`
# and run your `mlp` of 20.2. Its attention runs your ring of 20.4, so each rank holds some of the tokens. Run the cells
# of 20.4 first: if you have not solved it, the course's answer stands in. A real system would use the same ranks for
# both cuts, and exchange rows between them. Here each MLP and each attention is played by itself, and the ranks'
# results are put together again.
#
# A token's position must be its position in the *whole* text, wherever the token lies. This model rotates queries and
# keys by their position before it calls attention, when the text is still whole, so the positions are right. A training
# framework must take care of this itself: in the zig-zag order, the tokens of a rank do not have the positions 0, 1, 2
# and so on.
#
# **Predict** how many bytes a rank receives in all four layers for the MLPs, with 4 ranks, 256 tokens and a width of 96
# in float32. Count the all-reduces as one-shot.

# %%
predict("20 bytes of the MLPs, 4 ranks", ..., "bytes")

# %%
from course_lib.models.trained import trained_model
from course_lib.models.tiny import tiny_text

bytes_of = {"MLPs": 0, "attention": 0}


def attention_on(ranks):
    """Causal attention for the model, computed by a ring of so many ranks."""

    def attention(query, key, value, *, causal=True):
        group = query.shape[1] // key.shape[1]
        query, key, value = query[0], *(part[0].repeat_interleave(group, dim=0) for part in (key, value))
        places = [torch.as_tensor(best_positions(rank, ranks, query.shape[1])) for rank in range(ranks)]
        given = [(*(part[:, place].contiguous() for part in (query, key, value)), attend) for place in places]
        played = play_ranks(best_ring_attention, given)
        bytes_of["attention"] += played["received"][0]
        output = torch.empty_like(query)
        for place, (out, _) in zip(places, played["results"]):
            output[:, place] = out
        return output[None]

    return attention


def mlp_on(ranks, layer):
    """The model's MLP, cut for so many ranks."""
    gate_up = torch.cat([layer.gate.weight, layer.up.weight])
    biases = torch.zeros(len(gate_up)), torch.zeros(len(layer.down.weight))
    parts = [best_shard(rank, ranks, gate_up, biases[0], layer.down.weight.contiguous(), biases[1])
             for rank in range(ranks)]

    def forward(x, gated=None):
        played = play_ranks(best_mlp, [(x[0], part) for part in parts])
        bytes_of["MLPs"] += played["received"][0]
        return played["results"][-1][None]

    return forward


text = torch.tensor([list(tiny_text()[:256].encode())])
reference = trained_model("tiny", device="cpu").requires_grad_(False)
expected = reference(text)
for ranks in (1, 2, 4):
    model = trained_model("tiny", device="cpu").requires_grad_(False)
    bytes_of.update(MLPs=0, attention=0)
    model.attention = attention_on(ranks)
    for block in model.blocks:
        block.feed_forward.forward = mlp_on(ranks, block.feed_forward)
    logits = model(text)
    same = (logits.argmax(-1) == expected.argmax(-1)).sum().item()
    print(f"{ranks} ranks: the same next byte at {same} of {text.numel()} places, logits differ by at most "
          f"{(logits - expected).abs().max():.0e}; a rank received {bytes_of['MLPs']:,} bytes for MLPs, "
          f"{bytes_of['attention']:,} for attention")
measured("20 bytes of the MLPs, 4 ranks", bytes_of["MLPs"], "bytes")

# %% [markdown]
# On 1, 2 and 4 ranks the model chooses the same next byte at every place. Its logits differ in the last bits, because
# sums in another order are rounded differently. With 4 ranks a rank receives three times as many bytes for the MLPs as
# with 2, because one-shot reads from three ranks instead of one. For attention a rank receives more bytes than for the
# MLPs with 2 ranks, and fewer with 4. Half of them could be saved: the cell copies each KV head for its two query heads
# before the ring, so every key and value travels twice.
#
# Can the engine of chapter 16, which writes many texts at a time, run on several ranks too? Yes: each rank runs a whole
# engine, with its own shard of the model and the same list of requests. After the all-reduces all ranks have the same
# logits, bit for bit, so each chooses the same tokens. The ranks need no other messages. The next cell starts two
# processes, which takes some seconds, and compares their texts with those of one engine.

# %%
import functools

from course_lib.models.trained import model_and_tokenizer
from course_lib.serving.engine import Engine
from course_lib.serving.on_ranks import write_on_ranks
from course_lib.serving.requests import Request

load = functools.partial(model_and_tokenizer, "GQA")
requests = [Request(list(beginning.encode()), 12) for beginning in ("Alice was ", "The White Rabbit ")]
options = {"pages": 32, "kernels": False}
alone = Engine(*load(), **options).texts(requests)
together = write_on_ranks(2, load, requests, **options)
for request, text in zip(requests, together):
    print(f"two ranks write: {bytes(request.prompt).decode()!r} + {text!r}")
print("the same texts as one rank:", together == alone)

# %% [markdown]
# > **The answer.** By the model of 20.1, a decode step of a 70B model takes 7.3 ms on eight H100s: 5.2 ms to read an
# > eighth of the weights, and 2.1 ms for 160 all-reduces, 29 % of the step. Nearly all of these 2.1 ms is latency, and
# > not the time of the bytes. So more GPUs help only while they save more reading time than their all-reduces cost.
#
# ## The chapter's ideas at a glance
#
# NCCL is NVIDIA's library for exchanges between GPUs.
#
# | tensor parallelism | |
# |---|---|
# | wins | a model that does not fit on one GPU; 8B on 2 H200s, one sequence: 1.58 times as fast (measured) |
# | loses | 8B on 8 GPUs: 3.3 times as fast, because its all-reduces take longer than its reading (computed) |
# | falls back | fewer KV heads than ranks: each rank keeps a copy of one |
# | trap | the bias of down in every partial sum; gate and up cut as one block |
#
# | the all-reduce | |
# |---|---|
# | wins | one-shot for few bytes: one latency. On 2 H200s 3.0 µs for 4 KiB, and NCCL 8.9 (measured) |
# | loses | one-shot for many bytes: with 8 ranks each receives 7 S, in two-shot 1.75 S |
# | falls back | NCCL, which chooses by size |
# | trap | a barrier before the reads and none after them |
#
# | ring attention | |
# |---|---|
# | wins | a sequence that one GPU cannot hold, or not soon enough: 98 % of twice the rate on 2 H200s (measured) |
# | loses | one chunk for each rank, causal: 4 ranks work 57 % of the time (computed), zig-zag 100 % |
# | falls back | one rank: no exchange |
# | trap | positions counted within the rank; on the way back the rank's own keys and values every time |
#
# | experts on ranks | |
# |---|---|
# | wins | weights that few tokens read are not copied to every GPU |
# | loses | an uneven load: all ranks wait for the fullest one |
# | falls back | a rank without tokens still takes part in every exchange |
# | trap | row counts that were sent taken for those that were received |
#
# ## Check yourself
#
# Answer these on paper. Then run the next cell and open the answers.
#
# 1. Two ranks add up 1 MB each. How many bytes does a rank receive in one-shot, and how many in two-shot?
# 2. A model has 80 layers. How many barriers does a decode step take with the one-shot all-reduce of 20.3?
# 3. Four ranks hold one chunk each, and attention is causal. Rank 3 works all the time. How much of the time does rank
#    0 work?
# 4. Two ranks share a KV head. Why does its gradient have to be added up over both?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
self_check(
    "1 MB in both. In one-shot it reads all numbers of the other rank. In two-shot it reads half of them, and then the "
    "sums of the other half.",
    f"{80 * 2 * 2}: two all-reduces a layer, and each needs a barrier before its reads and one after them.",
    "A rank's queries see all of each earlier chunk, and half of their own. So rank 0 has 0.5 pairs of chunks and rank "
    "3 has 3.5. Rank 0 works a seventh of the time.",
    "Each rank has only the part from its own query heads. The gradient of the head is the sum over all query heads "
    "that read it.",
)

# %% [markdown]
# ## What production systems do
#
# All sources were read in November 2026.
#
# - **vLLM and SGLang** cut attention and MLPs as 20.2 does. They choose an all-reduce by size. In the report of 20.1,
#   0.5 MB on 4 GPUs took 10 µs in one-shot, 17 in two-shot, and 21 with NCCL. NCCL has become faster for small tensors:
#   where its symmetric memory is switched on, vLLM takes NCCL up to 16 KiB on eight H100s, its own from there to 128
#   KiB, and NCCL again above ([vllm#33839](https://github.com/vllm-project/vllm/pull/33839)).
# - **PyTorch** has *symmetric memory*: buffers that all GPUs of a host can read, with signals and barriers, as in 20.3.
# - **Overlap** of a matrix product with its exchange pays for many rows. In one report, cutting a product of 2,048 ×
#   3,584 × 8,192 into pieces made it slower at first, 354 µs instead of 301. With a better order it took 295
#   ([pytorch#143160](https://github.com/pytorch/pytorch/pull/143160), the card is not named).
# - **DeepEP** exchanges the tokens of experts within a host and between hosts.
#
# ## Papers
#
# - Shoeybi et al.: *Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism*,
#   [arXiv 1909.08053](https://arxiv.org/abs/1909.08053).
# - Liu, Zaharia, Abbeel: *Ring Attention with Blockwise Transformers for Near-Infinite Context*,
#   [arXiv 2310.01889](https://arxiv.org/abs/2310.01889).
# - Jacobs et al.: *DeepSpeed Ulysses*, [arXiv 2309.14509](https://arxiv.org/abs/2309.14509).
# - Lepikhin et al.: *GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding*,
#   [arXiv 2006.16668](https://arxiv.org/abs/2006.16668).

# %%
progress()
