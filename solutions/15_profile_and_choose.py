# %% [markdown]
# # 15 · Profile, and choose
#
# **The question.** On an H100, a softmax over 4,096 rows of 16,384 float32 numbers took 952 µs. The profiler says that
# the memory was 79 % busy. Every row has to be read once and written once, 537 MB in all. On the same card, a copy of
# that many bytes took 182 µs. So the memory works close to its limit, and still the kernel takes five times as long as
# a copy. How can both be true?
#
# Write down a guess. You will find the answer on a card that describes the kernel.
#
# This chapter prepares you for jobs that you will do alone after the course. You find out what limits a kernel, mend
# it, and measure whether that helped. You choose a kernel that somebody else has written. And you prove which kernel
# ran, because a library may switch to a slow one without telling you.
#
# **Time.** About five and a half hours, estimated. The **core path** takes two: the sections whose heading does not end
# in *deeper*, with exercises 15.2, 15.3 and 15.5. You need chapters 01, 04 and 08.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, profile, progress, solution

import math
import random
import textwrap
from time import perf_counter

import torch
import triton
import triton.language as tl

from course_lib.figures.profiling import recorded_metrics, recorded_profiles, recorded_traces
from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Which tool answers which question
#
# You will use four tools. Each one sees something that the others do not.
#
# | tool | what it sees | which question it answers |
# |---|---|---|
# | a timer | one number | Is it slow? Is B faster than A? |
# | `torch.profiler` | CPU operations, GPU kernels, and which of them started which | What ran, and in which order? |
# | Nsight Systems (`nsys`) | the same for the whole machine, with all libraries and copies | Why is the GPU idle? |
# | Nsight Compute (`ncu`) | one kernel from inside, through a thousand counters | Why is this kernel slow? |
#
# `ncu` runs each kernel some twenty times to read all its counters, so it also changes the time of everything around
# that kernel. Use it last, on the one kernel that the other tools have pointed at. The manuals are [Nsight Compute's
# profiling guide](https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html), [Nsight Systems' user
# guide](https://docs.nvidia.com/nsight-systems/UserGuide/index.html) and
# [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html).
#
# ## A card for any kernel
#
# `profile(function, *arguments)` collects what can be known about a kernel and shows it on one card. The traffic meter
# counts the bytes. The compiler reports the registers, the shared memory and the *spills*, which are numbers that found
# no register and go through memory instead. None of this needs a GPU. If you have one, the card also shows the measured
# time, and the figures of `ncu` if it is installed and you are allowed to use it. At the top, one sentence says what to
# look at next.
#
# The next two cells profile a copy, and then a copy that reads only every eighth number. **Predict** what the sentence
# will say about the second one.

# %%
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.strided_copy import strided_copy

x = torch.ones(2**18, device=device)
profile(copy, x, arch=90)

# %%
profile(strided_copy, torch.ones(2**20, device=device)[::8], arch=90)

# %% [markdown]
# The second sentence is about *sectors*. A GPU fetches memory in sectors of 32 bytes, so if you read a single number of
# 4 bytes, all 32 are fetched. The second copy uses one number of each sector that it reads, so its reads cost eight
# times what it asks for. Its writes lie next to each other and cost only what they should. For each number that makes
# 32 + 4 = 36 bytes instead of 8, or 4.5 times as many.
#
# The next kernel is the softmax of the question. One program computes one row, and the program has a single warp, which
# is 32 threads. The next cell profiles this kernel for a T4, an A100 and an H100. Read the three sentences.


# %%
@triton.jit
def one_warp_softmax_kernel(x_pointer, out_pointer, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_pointer + offsets)  # [BLOCK]
    weights = tl.exp(x - tl.max(x, 0))  # [BLOCK]
    tl.store(out_pointer + offsets, weights / tl.sum(weights, 0))


def one_warp_softmax(x):
    out = torch.empty_like(x)
    one_warp_softmax_kernel[(x.shape[0],)](x, out, BLOCK=x.shape[1], num_warps=1)
    return out


for arch in (75, 80, 90):
    card = profile(one_warp_softmax, torch.ones(2, 8192, device=device), arch=arch)
    print(card.target, *textwrap.wrap(card.look_at, 100), sep="\n    ")

# %% [markdown]
# That answers the question. A row of 16,384 numbers in 32 threads is 512 numbers for each thread, but a thread has at
# most 255 registers. The numbers that find no register go to *local memory*. In spite of its name, local memory is part
# of the ordinary GPU memory; each thread gets addresses of its own there. So the memory really is busy, but mostly with
# these numbers: counters of the GPU showed that 2.52 GB moved where 0.54 GB would do. (The cell above uses rows of half
# that length, so that the card is there in seconds. They spill too, but less.)
#
# ## A slow kernel, found and mended
#
# The next kernel computes the variance of each channel of a layer's output. Its results are right, but it is slow for
# two reasons. The card shows both, even without a GPU.
#
# **1. Profile it, and choose one figure.** The spills, the occupancy and the bytes moved are bad. **Which one do you
# mend first?**


# %%
@triton.jit
def channel_variance_kernel(x_pointer, mean_pointer, out_pointer, tokens, channels, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    squares = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for first_token in range(0, tokens, BLOCK):
        token = first_token + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(x_pointer + token * channels + channel, mask=token < tokens, other=0.0)  # [BLOCK]
        mean = tl.load(mean_pointer + channel)
        squares += tl.where(token < tokens, (x - mean) * (x - mean), 0.0)
    tl.store(out_pointer + channel, tl.sum(squares) / tokens)


def channel_variance(x, mean):
    """x: [tokens, channels], contiguous. mean: [channels]."""
    out = torch.empty_like(mean)
    channel_variance_kernel[(x.shape[1],)](x, mean, out, *x.shape, BLOCK=8192, num_warps=1)
    return out


layer_output = torch.randn(10_000, 32, device=device)
profile(channel_variance, layer_output, layer_output.mean(0), arch=90)

# %% [markdown]
# <details><summary>The first figure</summary>
#
# The spills. `squares` has 8,192 numbers, and one warp has 32 threads. So each thread needs 256 registers for them, and
# has 255. The low occupancy follows from that, because with so many registers a thread only 8 of the 64 possible warps
# fit. Take `BLOCK=1024` and `num_warps=4`, which makes 8 numbers for each thread.
#
# </details>
#
# **2. Mend one thing, and profile again.** The next cell holds your copy of the kernel. Change only `BLOCK` and
# `num_warps`, and run it. The spills are gone, but the card still shows 8 times the least bytes. **Why 8?** Look at the
# line that loads `x`. What do two neighbouring lanes read, and how far apart do these numbers lie?


# %%
@triton.jit
def mended_variance_kernel(x_pointer, mean_pointer, out_pointer, tokens, channels, BLOCK: tl.constexpr):
    channel = tl.program_id(0)
    squares = tl.zeros([BLOCK], tl.float32)  # [BLOCK]
    for first_token in range(0, tokens, BLOCK):
        token = first_token + tl.arange(0, BLOCK)  # [BLOCK]
        x = tl.load(x_pointer + token * channels + channel, mask=token < tokens, other=0.0)  # [BLOCK]
        mean = tl.load(mean_pointer + channel)
        squares += tl.where(token < tokens, (x - mean) * (x - mean), 0.0)
    tl.store(out_pointer + channel, tl.sum(squares) / tokens)


def mended_variance(x, mean):
    """x: [tokens, channels], contiguous, with a multiple of 8 channels. mean: [channels]."""
    out = torch.empty_like(mean)
    mended_variance_kernel[(x.shape[1],)](x, mean, out, *x.shape, BLOCK=8192, num_warps=1)
    return out


profile(mended_variance, layer_output, layer_output.mean(0), arch=90)

# %% [markdown]
# <details><summary>The second reason</summary>
#
# Neighbouring lanes read neighbouring tokens of one channel, which lie `channels` numbers apart. So each lane fetches a
# sector of 32 bytes, and uses 4 of them. A token's channels lie side by side, and 8 of them fill a sector. So let a
# program take a tile of 128 tokens × 8 channels.
#
#     channel = tl.program_id(0) * 8 + tl.arange(0, 8)  # [8]
#     squares = tl.zeros([BLOCK, 8], tl.float32)  # [BLOCK, 8]
#     for first_token in range(0, tokens, BLOCK):
#         token = first_token + tl.arange(0, BLOCK)[:, None]  # [BLOCK, 1]
#         x = tl.load(x_pointer + token * channels + channel, mask=token < tokens, other=0.0)  # [BLOCK, 8]
#         mean = tl.load(mean_pointer + channel)  # [8]
#         squares += tl.where(token < tokens, (x - mean) * (x - mean), 0.0)
#     tl.store(out_pointer + channel, tl.sum(squares, axis=0) / tokens)
#
# The launch has `(x.shape[1] // 8,)` programs, with `BLOCK=128` and `num_warps=4`.
#
# </details>
#
# **3. Leave what does not show.** `mean` is loaded in each round of the loop, although it never changes. You need not
# move that line: the next cell counts its bytes, and they are below one per cent.
#
# **4. Prove it.** The next cell prints both kernels' figures, and their errors, because a fast kernel that is wrong is
# worth nothing. Without a GPU the bytes and the spills show that both reasons are gone, but not how much time that
# saves. On a GPU the cell also times both kernels in turns.

# %%
from course_lib.hardware.meter.metered import metered
from course_lib.hardware.timing import measure_together

known_mean = layer_output.mean(0)
for function in (channel_variance, mended_variance):
    card = profile(function, layer_output, known_mean, arch=90)
    view = card.kernels[0].view
    traffic = metered(function, layer_output, known_mean)
    error = (function(layer_output, known_mean) - layer_output.var(0, unbiased=False)).abs().max()
    print(f"{function.__name__:17} {format_bytes(card.moved_bytes)} moved, at least {format_bytes(card.least_bytes)}")
    print(f"{'':17} {view.registers} registers a thread, {view.spill_bytes} B spilled")
    print(f"{'':17} mean: {traffic['mean_pointer'].loaded_bytes / traffic.loaded_bytes:.2%} of the bytes loaded")
    print(f"{'':17} largest error {error:.0e}")

if on_gpu:
    large = torch.randn(16_384, 4096, device=device)  # 268 MB, which no cache holds
    mean = large.mean(0)
    versions = {"before": lambda: channel_variance(large, mean), "after": lambda: mended_variance(large, mean)}
    for name, timing in measure_together(versions).items():
        print(f"{name:17} {timing}")

# %% [markdown]
# If you mended both, 1.29 MB are moved instead of 10.2 MB, and nothing is spilled. The card's sentence is now about 4
# programs. But a real layer of 4,096 channels gives 512 programs, more than an H100's 132 multiprocessors. So you can
# stop.
#
# ## What the counters say · deeper
#
# We recorded eight kernels on an H100 with `ncu`. Two of them are as fast as they can be, and each of the other six is
# slow for one reason. The next cell prints eleven figures for each kernel:
#
# - `memory_busy`, `tensor_busy` and `special_busy` say how hard a unit worked, in percent of its peak. The units are
#   the memory, the *tensor pipe*, which multiplies matrices, and the *special-function units*, which compute
#   exponentials and the like.
# - `warps_active` is how many warps were on a multiprocessor on average, in percent of the warps that fit there.
# - The three `..._requests` are counts. A *request* is one instruction of a warp: a load or store to global memory, a
#   load or store to local memory, or an atomic operation.
# - `programs` and `multiprocessors` are how many programs were launched and how many multiprocessors the GPU has.
# - `moved_bytes` is what crossed the memory bus, and `least_bytes` is what the task needs.
#
# Two figures may surprise you. The copy moved a little less than its least, because part of what it wrote was still in
# the L2 cache when it ended. The matrix product shows no request to global memory, because a copy engine loads and
# stores whole tiles for it, and these counters leave that engine out.

# %%
metrics = recorded_metrics()
titles = [name.replace("_", " ") for name in metrics]
for line in range(2):  # a column's name, in two lines
    parts = (textwrap.wrap(title, 12, max_lines=2, placeholder="") for title in titles)
    print(" " * 16, *(f"{(words + ['', ''])[line]:>13}" for words in parts))
for what in metrics["a_copy"]:
    print(f"{what:16}", *(f"{seen[what]:>13.4g}" for seen in metrics.values()))

# %% [markdown]
# Which figure should you look at first? The order matters, because one cause shows up in several figures. A kernel that
# spills also keeps the memory busy, and a kernel of eight programs also has few active warps. If you start with the
# busy memory or the few warps, you repair the wrong thing.
#
# In this exercise you write that order down. Go through the table from the top. The first row that fits is the limit.
# The last row, *latency*, is for a kernel that waits although no unit is busy and there are enough programs and warps.
#
# | the limit | when | its figure |
# |---|---|---|
# | `"spills"` | more local requests than global ones | local / global |
# | `"tensor pipe"` | tensor pipe busy 60 % or more | `tensor_busy` |
# | `"special functions"` | special-function units busy 60 % or more | `special_busy` |
# | `"wasted bytes"` | memory busy 60 % or more, and moved bytes 1.5 times the least, or more | moved / least |
# | `"memory"` | memory busy 60 % or more | `memory_busy` |
# | `"atomics"` | more atomic requests than global ones | atomic / global |
# | `"too few programs"` | fewer programs than multiprocessors | programs / multiprocessors |
# | `"too few warps"` | active warps below 25 % | `warps_active` |
# | `"latency"` | none of the rows above fits | `warps_active` |


# %%
# Exercise 15.1 · Find the bottleneck
def limit_of(seen: dict) -> tuple[str, float]:
    """Find what limits a kernel, and the figure that shows it: the first row of the table that fits.

    seen: numbers by name. In percent, from 0 to 100: `memory_busy`, `tensor_busy`, `special_busy` and `warps_active`.
        Counted: `local_requests`, `global_requests` (loads and stores), `atomic_requests`, `programs`,
        `multiprocessors`, `moved_bytes` and `least_bytes`. A unit is busy at 60 or more, active warps are too few
        below 25, and bytes are wasted at 1.5 times the least or more. `global_requests` and `least_bytes` may be 0.
        Find the first row that fits before you divide: what this row divides by is never 0. Do not change `seen`.
    Returns: (limit, figure), both as in the table.
    """
    # BEGIN SOLUTION
    if seen["local_requests"] > seen["global_requests"]:
        return "spills", seen["local_requests"] / seen["global_requests"]
    if seen["tensor_busy"] >= 60:
        return "tensor pipe", seen["tensor_busy"]
    if seen["special_busy"] >= 60:
        return "special functions", seen["special_busy"]
    if seen["memory_busy"] >= 60:
        wasted = seen["moved_bytes"] / seen["least_bytes"]
        return ("wasted bytes", wasted) if wasted >= 1.5 else ("memory", seen["memory_busy"])
    if seen["atomic_requests"] > seen["global_requests"]:
        return "atomics", seen["atomic_requests"] / seen["global_requests"]
    if seen["programs"] < seen["multiprocessors"]:
        return "too few programs", seen["programs"] / seen["multiprocessors"]
    return "too few warps" if seen["warps_active"] < 25 else "latency", seen["warps_active"]
    # END SOLUTION


# %%
best_limit_of = check("15.1", limit_of).best

# %%
profiles = recorded_profiles()
for name, seen in metrics.items():
    limit, figure = best_limit_of(seen)
    print(f"{name:22} {format_seconds(profiles['workloads'][name]['seconds']):>8}  {limit:18} {figure:.3g}")

# %% [markdown]
# Two kernels have nothing left to repair: the copy is at the limit of the memory, and the matrix product is at the
# limit of the tensor pipe. For the softmax, the answer is now "spills" and no longer "memory". The decode kernel has 8
# programs for 132 multiprocessors, so most of the GPU is idle; chapter 08 cures that with splits.
#
# ## What no counter shows · deeper
#
# Counters say which unit is busy and which one waits. They do not say why the instructions are there at all. For that,
# read the machine code, which NVIDIA calls SASS. You get it from `compile_view(..., want_sass=True)` of
# `course_lib/hardware/compiler`, without a GPU; exercise 9.6 reads it.
#
# Here is an example: what we found in this library's own attention kernel for Hopper. The figures were measured in
# turns with cuDNN when chapter 09 was written, so compare them only with each other.
#
# The kernel has three *consumers*, which are groups of warps that compute at the same time. At one point its results
# were right and the consumers overlapped. But at head dimension 64 with a causal mask it was no faster than cuDNN: 475
# TFLOP/s against 474. Without a mask it reached 541 against 471.
#
# We compared the machine code of the two. Both kernels come from the same Python, and both have a loop over the blocks
# that need no mask. That loop had 475 instructions in the causal kernel, and 409 in the other. This is what we found
# and changed:
#
# - **64 of these 66 extra instructions were `PRMT`**, which picks bytes from two registers. Two 16-bit weights share a
#   register, but the compiler did not see that. At the end of each block it took 32 registers apart (32 `PRMT`), and at
#   the start of the next block it joined them again (another 32). Now the loops carry 32-bit words with two weights
#   each (`kept_weights` in `kernels/hopper/operands.py`).
# - **A block under a mask took 816 instructions.** The mask compares positions. The compiler can do that before it has
#   the scores, so it did it early. But a thread has only 7 registers for the results of comparisons, so the compiler
#   packed the results into words and unpacked them later. Now positions are counted from a thread's own first key, so a
#   comparison is one instruction, and the block takes 540 (`hide_scores` in `kernels/hopper/parts.py`).
# - **Some blocks were computed for nothing.** In a tile of 192 queries, the first 64 often see no key of the last
#   block. Now each consumer computes only the blocks that its own queries see, and frees the others (`pass_on` in
#   `kernels/hopper/consumer.py`).
#
# With the first two changes the kernel reached 526 TFLOP/s, against the same 474 for cuDNN. The third change was
# measured in another run, with the same head dimension and mask but with shorter contexts: it brought 470 instead of
# 437 at 4k tokens, and 338 instead of 281 at 1k.
#
# A second example is about the order of instructions. At head dimension 128 the kernel has two consumers. Without a
# mask it was 5 % slower than FlashAttention 4, whose package has a kernel for Hopper too: 651 TFLOP/s against 683
# (16,384 tokens, one H200, measured in turns). The counters of the two agree: 987 and 966 million instructions, equally
# many products and exponentials, the same clock. They differ in one: the tensor pipe was busy for 82 % of the cycles in
# our kernel and for 87 % in theirs.
#
# `ncu --section SourceCounters --page source --csv` says for each instruction how often a warp was seen standing there.
# A share of these samples is a share of the time. One step of a consumer, 64 queries and 128 keys, took 2,490 cycles:
#
# | part of the step | cycles |
# |---|---|
# | loop, wait for the keys, wait for its turn at the matrix units | 290 |
# | ask for both products, until the scores are there | 610 |
# | softmax: maximum, exponentials, sum | 1,220 |
# | wait for the output | 10 |
# | multiply the accumulator by its factors (64 `FMUL`), round the weights to 16 bits (32 `F2FP`) | 360 |
#
# We had expected a consumer to wait for its turn, since the products of the two take 2,048 cycles. It waited for 50. So
# the limit was the chain of work of *one* consumer, and the last row was the part to save: most of these instructions
# have their inputs early. In FlashAttention 4's machine code they stand between the exponentials. Each of the four
# schedulers has a quarter of the unit for exponentials, 4 in a cycle, so those of a warp take 8 cycles, and 7 of these
# are free for other instructions.
#
# In our kernel they could not stand there. Each `mbarrier.arrive` of Gluon speaks for four warps, so these meet first
# (`BAR.SYNC`). There were five such meetings in a step: at its three arrivals, and twice where Triton keeps arrivals
# and waits in order. And a wait for the next values stood before the wait for the output. `ptxas`, which makes the
# machine code, moves little across such points. This is what we tried, each measured in turns with the kernel as it
# was, at 16,384 tokens (speed relative to it, without and with a causal mask):
#
# - **No meetings**: named barriers, at which each warp arrives for itself: 0.99 and 1.00. It was our first idea, and
#   alone it was wrong.
# - **The wait for the output before the exponentials**, in the source: 1.01 and 1.03.
# - **No meetings, and the next values awaited only where they are used**: 1.06 and 1.06. In the source the wait for the
#   output stands behind the softmax. `ptxas` moves it to between the exponentials, and the multiplications follow it.
#
# Compare within a run only: before, the kernel was 5 % behind (651 against 683), and now it is level (661 against 658),
# and with a causal mask ahead (678 against 645). The new functions are `arrive_named` and `wait_named` in
# `kernels/gluon/parts.py`.
#
# ## A timer in turns
#
# A profile tells you why a kernel is slow. To find out whether your change helped, you need a timer. Chapter 01's
# `measure` times one function. To compare two, time them *in turns*: in each round, call each function once, then start
# the next round. If the clock falls during the run, it then slows both of them alike.
#
# Three details decide whether the comparison is fair:
#
# - **Draw the order within each round at random.** On a card at its power limit, a kernel may run slower after one that
#   uses much power.
# - **Give each call another copy of the input.** Otherwise the second kernel of a round finds in the L2 cache what the
#   first one has read. An H100's L2 cache holds 50 MB, so with an input of 25 MB you need three copies: when the first
#   one comes up again, the two others have filled the cache.
# - **Do not count the first rounds.** The kernels are compiled during these rounds, and clocks and caches settle.
#
# In this exercise you write the three parts of such a timer: how many copies it needs, the list of its calls, and which
# of the measured times form pairs.


# %%
# Exercise 15.2 · A timer in turns
def copies_needed(input_bytes: int, cache_bytes: int) -> int:
    """The smallest number of copies of an input with which each copy has left the cache before it is used again.

    The copies are used one after another, and then again from the first. A copy has left the cache once the other
    copies that were read after it have cache_bytes in all, or more.
    input_bytes, cache_bytes: above 0, and at most 2⁴⁰, which is 1 TiB.
    """
    # BEGIN SOLUTION
    return math.ceil(cache_bytes / input_bytes) + 1
    # END SOLUTION


def schedule(orders: list[list[int]], copies: int, warm: int) -> list[tuple[int, int, bool]]:
    """List the calls of a comparison, in the order in which they run.

    orders: a list for each round, with the kernels' numbers in the order in which they run, each once. There is at
        least one round. The numbers are at least 0 and may have gaps, such as 2, 5 and 8. Do not change `orders`.
    copies: how many copies of the input there are, at least 1. The first call uses copy 0, each later call the next
        copy, and after the last copy comes copy 0 again. A new round changes nothing in this: the copies go on.
    warm: how many rounds at the beginning do not count, 0 to the number of rounds.
    Returns: a list with one (kernel, copy, counted) for each call; counted is True or False.
    """
    # BEGIN SOLUTION
    steps = []
    for number, order in enumerate(orders):
        for kernel in order:
            steps.append((kernel, len(steps) % copies, number >= warm))
    return steps
    # END SOLUTION


def pairs_of(
    steps: list[tuple[int, int, bool]], times: list[float], first: int, second: int
) -> tuple[list[float], list[float]]:
    """Collect the times of two kernels, round by round, from the rounds that count.

    steps: as `schedule` returns them. times: in microseconds, above 0, one for each step.
    first, second: the numbers of two different kernels.
    Returns: (times of first, times of second). Two times at the same index are from the same round.
    """
    # BEGIN SOLUTION
    found = {first: [], second: []}
    for (kernel, _, counted), time in zip(steps, times):
        if counted:
            found.setdefault(kernel, []).append(time)
    return found[first], found[second]
    # END SOLUTION


# %%
best_copies_needed, best_schedule, best_pairs_of = check("15.2", copies_needed, schedule, pairs_of).best

# %% [markdown]
# The schedule can drive any clock. Here it compares two ways to add up a million numbers, on your machine: one sum, and
# a sum of rows that are summed first. A CPU does it in one thread: with more, other work on the machine decides the
# times. Exercise 15.3 asks whether the difference is real.


# %%
def clocked(function, argument) -> float:
    """Microseconds of one call, until its work is done."""
    if on_gpu:
        torch.cuda.synchronize()
    began = perf_counter()
    function(argument)
    if on_gpu:
        torch.cuda.synchronize()
    return 1e6 * (perf_counter() - began)


ways = [lambda x: x.sum(), lambda x: x.view(1000, 1000).sum(1).sum()]
generator = random.Random(15)
orders = [generator.sample(range(2), 2) for _ in range(60)]
inputs = [torch.ones(1_000_000, device=device) for _ in range(best_copies_needed(4_000_000, 50_000_000))]
steps = best_schedule(orders, len(inputs), 10)
threads = torch.get_num_threads()
torch.set_num_threads(1)
times = [clocked(ways[kernel], inputs[copy]) for kernel, copy, _ in steps]
torch.set_num_threads(threads)
old, new = best_pairs_of(steps, times, 0, 1)
print(f"{len(inputs)} copies, {len(old)} pairs; medians {sorted(old)[25]:.0f} µs and {sorted(new)[25]:.0f} µs")

# %% [markdown]
# ## Is it two per cent faster?
#
# You change a kernel and time both versions, and the new one takes 2 % less. Is it faster? Two runs of the *same*
# kernel can differ by as much, for four reasons:
#
# - **Clocks.** A GPU lowers its clock when it gets hot or reaches its power limit, so what runs later runs slower.
# - **A warm cache.** What the first kernel has read may still be in the L2 cache when the second one begins.
# - **Late calls.** Now and then a call takes half as long again, but none takes only half as long. So late calls raise
#   the mean.
# - **Neighbours are alike.** If the clock is low now, it will still be low a millisecond later. So two hundred samples
#   in a row tell you less than two hundred independent ones.
#
# So measure in *pairs*: call both kernels in one round, right after each other, in an order that you draw at random.
# What slows both calls cancels when you divide one time by the other. From these ratios you compute three figures:
#
# - **The median ratio** is your estimate. A few late calls hardly move it.
# - **An interval** around it says how far off the estimate may be. It comes from a method called the *bootstrap*. Draw
#   about as many pairs as you have, some twice and some not at all, and take the median again. Do this many times: the
#   middle 95 % of these medians is the interval. Draw whole *blocks* of neighbours, so that pairs that are alike stay
#   together. If 1 lies outside the interval, take the difference for real. But even if two kernels are equal, about one
#   comparison in twenty will say that they differ. So measure again, on another day, before you tell others.
# - **The chance** that two equal kernels would look so different. If they are equal, you can swap their roles in any
#   pair, which turns the sign of the logarithm of its ratio. Swap them at random many times, and count how often the
#   sum of the logarithms is at least as far from 0 as the one you measured. Your own measurement counts as one of
#   these. So if 4 of 99 random sums are as far off, the chance is (4 + 1) / (99 + 1) = 5 %.


# %%
# Exercise 15.3 · Two per cent
def ratio_of(first: list[float], second: list[float]) -> float:
    """The median of the ratios second / first of all pairs.

    first, second: times in microseconds, above 0. Both lists have the same length, at least 1, and the times at the
        same index are a pair. The median of an even number of values is the mean of the two in the middle.
    """
    # BEGIN SOLUTION
    import statistics

    return statistics.median(b / a for a, b in zip(first, second))
    # END SOLUTION


def interval(first: list[float], second: list[float], starts: list[list[int]], block: int) -> tuple[float, float]:
    """The interval that holds the middle 95 % of the resamples' medians, each a median of ratios second / first.

    starts: a row for each resample, at least one. A row has the indices of the pairs at which the resample's blocks
        begin, at least one index; all rows have the same length. Do not change `starts`, `first` or `second`.
    block: how many pairs a block has, at least 1 and at most as many as there are. A block that runs past the last
        pair goes on with the first one. A resample consists of all pairs of its blocks, so it may have more or fewer
        pairs than were measured.
    Returns: (lower, upper). Sort the medians of the R resamples and drop R // 40 of them at each end: these two are
        the smallest and the largest that are left.
    """
    # BEGIN SOLUTION
    ratios = [b / a for a, b in zip(first, second)]
    ones = [1.0] * (len(starts[0]) * block)
    found = sorted(
        ratio_of(ones, [ratios[(start + step) % len(ratios)] for start in row for step in range(block)])
        for row in starts
    )
    outer = len(found) // 40
    return found[outer], found[-1 - outer]
    # END SOLUTION


def chance_of(first: list[float], second: list[float], signs: list[list[int]]) -> float:
    """The chance that two equal kernels would differ as much as these.

    signs: rows of 1 and -1, with one sign for each pair. The sum of a row is Σ sign · log(second / first), and the sum
        you measured is Σ log(second / first). A row is as far off if its sum is at least as far from 0 as the one you
        measured.
    Returns: (rows that are as far off + 1) / (rows + 1).
    """
    # BEGIN SOLUTION
    logs = [math.log(b / a) for a, b in zip(first, second)]
    observed = abs(sum(logs))
    as_far = [row for row in signs if abs(sum(sign * log for sign, log in zip(row, logs))) >= observed]
    return (len(as_far) + 1) / (len(signs) + 1)
    # END SOLUTION


# %%
best_ratio_of, best_interval, best_chance_of = check("15.3", ratio_of, interval, chance_of).best

# %% [markdown]
# Try your functions on times for which you know the truth. The next cell makes up 60 pairs: the second kernel is 2 %
# slower, the clock falls by a tenth meanwhile, and one call in ten takes half as long again. **Predict** what the ratio
# of the two means will say.

# %%
generator = random.Random(15)
clock = [100 * (1 + 0.1 * place / 60) for place in range(60)]


def measured_as(true):
    late = 1.5 if generator.random() < 0.1 else 1.0
    return true * late * (1 + 0.01 * abs(generator.gauss(0, 1)))


made_old, made_new = [measured_as(true) for true in clock], [measured_as(1.02 * true) for true in clock]
rows = [[generator.randrange(60) for _ in range(12)] for _ in range(400)]
signs = [[generator.choice((-1, 1)) for _ in range(60)] for _ in range(400)]
lower, upper = best_interval(made_old, made_new, rows, 5)
print(f"ratio of the means   {sum(made_new) / sum(made_old):.3f}")
print(f"median ratio         {best_ratio_of(made_old, made_new):.3f}, 95 % between {lower:.3f} and {upper:.3f}")
made_lower, made_upper = lower, upper
print(f"chance of equals     {best_chance_of(made_old, made_new, signs):.3f}")
lower, upper = best_interval(old, new, [[generator.randrange(len(old)) for _ in range(10)] for _ in range(400)], 5)
print(f"your sums in turns   {best_ratio_of(old, new):.3f}, 95 % between {lower:.3f} and {upper:.3f}")

# %% [markdown]
# The true ratio is 1.02. The next picture shows the ratio of each pair. You cannot see that the clock falls by a tenth,
# because that cancels within each pair. The late calls are the triangles at the edges.

# %%
from course_lib.figures.profiling.ratios import draw_ratios

draw_ratios(made_old, made_new, made_lower, made_upper)

# %% [markdown]
# The ratio of the means says that the second kernel is faster, because more of the late calls happened to fall on the
# first one. The interval of the median lies above 1 and holds the truth.
#
# The chance is no help here. It adds logarithms up, and one late call (log 1.5 = 0.41) counts as much as twenty pairs
# that differ by 2 % (log 1.02 = 0.02). If two methods disagree, look at the samples. Here you would see the late calls
# at once, and leave them out for both methods.
#
# The last line of figures is about the two sums that you timed on your machine after exercise 15.2. If its interval
# holds 1, you have not seen a difference, whatever the two medians say. On a busy machine it may be wide; try again.
#
# ## Choosing a kernel · deeper
#
# You will write few kernels, and call many. Speed seldom decides which one you call. What decides is what a kernel can
# take at all: which GPU, which dtype, which mask. These are the limits as the libraries state them:
#
# - [SDPA](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html),
#   `scaled_dot_product_attention`, is PyTorch's own function. It chooses by itself among four backends, which are the
#   implementations behind it: FlashAttention, cuDNN, a memory-efficient one, and plain PyTorch ("math"). It takes a
#   mask as a tensor.
# - [FlexAttention](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) takes a mask as a rule, which
#   is a small function of positions. It compiles a kernel that skips what the rule excludes.
# - [FlashAttention](https://github.com/Dao-AILab/flash-attention) 2 is for sm_80 and later, in 16 bits, with head
#   dimensions up to 256. Version 3 is for Hopper. Version 4 is for Hopper and Blackwell; on Blackwell its head
#   dimensions go up to 128, except for a few special ones.
# - [FlashInfer](https://docs.flashinfer.ai/) is made for serving: it takes pages, FP8 caches, and many sequences of
#   different lengths.
# - [vLLM](https://docs.vllm.ai/en/stable/) and [SGLang](https://docs.sglang.io/) choose among these for you, and print
#   in their log which one they took. [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/) has kernels of its own.
# - The course's own dispatcher is `course_lib/kernels/attention/dispatch.py`. It says why it chose, in one sentence.
#
# In this exercise you write a chooser for a small team that uses the table below. The table is one sensible policy and
# not a law: where two kernels can do the same, measure both. Again the first row that fits decides, so the order of the
# rows is part of the policy. Pages stand above masks, because a kernel that cannot read pages is of no use to you,
# however fast it is. Masks stand above split decode, because the course's split kernel takes no mask.
#
# | | when | kernel | reason |
# |---|---|---|---|
# | 1 | bfloat16 before sm_80 | `"none"` | `"dtype"` |
# | | float8 before sm_89, in training, or with a mask given as a tensor or a rule | `"none"` | `"dtype"` |
# | | float8 with a head dimension above 256 | `"none"` | `"dtype"` |
# | 2 | pages, in float32 | `"course"` | `"dtype"` |
# | | pages, and a head dimension that is not 64, 128 or 256 | `"course"` | `"head_dim"` |
# | | all other pages | `"FlashInfer"` | `"pages"` |
# | 3 | a mask given as a tensor | `"SDPA"` | `"mask"` |
# | 4 | a mask given as a rule, on sm_80 or later | `"FlexAttention"` | `"mask"` |
# | | a mask given as a rule, before sm_80 | `"SDPA"` | `"mask"` |
# | 5 | decode, fewer than 100 programs, and 1,024 tokens of context or more | `"split decode"` | `"programs"` |
# | 6 | float8 on sm_90 | `"FlashAttention 3"` | `"dtype"` |
# | | float8 on any other GPU | `"FlashInfer"` | `"dtype"` |
# | 7 | any GPU before sm_80 | `"SDPA"` | `"capability"` |
# | 8 | float32 | `"SDPA"` | `"dtype"` |
# | 9 | a head dimension above 256; on sm_100 above 128 | `"SDPA"` | `"head_dim"` |
# | 10 | sm_90 | `"FlashAttention 3"` | `"capability"` |
# | 11 | sm_100 | `"FlashAttention 4"` | `"capability"` |
# | | all other GPUs | `"FlashAttention 2"` | `"capability"` |


# %%
# Exercise 15.4 · The chooser
def choose(
    capability: int, dtype: str, head_dim: int, mask: str, page_size: int, use: str, programs: int, context: int
) -> tuple[str, str]:
    """Choose which attention to call, and give the reason. Both come from the first row of the table that fits.

    capability: 75, 80, 89, 90 or 100 (sm_75 is a T4, sm_89 an L4).
    dtype: the dtype of K and V, "float32", "float16", "bfloat16" or "float8". head_dim: at least 1.
    mask: "none", "causal", "tensor" (given as a tensor) or "rule" (given as a function of positions).
    page_size: tokens in a page, at least 1, or 0 if K and V are contiguous. use: "training", "prefill" or "decode".
    programs: batch · KV heads, the number of programs that decode has without splits. context: tokens in a sequence.
    Returns: (kernel, reason), both as in the table.
    """
    # BEGIN SOLUTION
    if dtype == "bfloat16" and capability < 80:
        return "none", "dtype"
    if dtype == "float8" and (capability < 89 or use == "training" or mask in ("tensor", "rule") or head_dim > 256):
        return "none", "dtype"
    if page_size > 0 and dtype == "float32":
        return "course", "dtype"
    if page_size > 0:
        return ("FlashInfer", "pages") if head_dim in (64, 128, 256) else ("course", "head_dim")
    if mask == "tensor":
        return "SDPA", "mask"
    if mask == "rule":
        return "FlexAttention" if capability >= 80 else "SDPA", "mask"
    if use == "decode" and programs < 100 and context >= 1024:
        return "split decode", "programs"
    if dtype == "float8":
        return "FlashAttention 3" if capability == 90 else "FlashInfer", "dtype"
    if capability < 80:
        return "SDPA", "capability"
    if dtype == "float32":
        return "SDPA", "dtype"
    if head_dim > 256 or capability == 100 and head_dim > 128:
        return "SDPA", "head_dim"
    return {90: "FlashAttention 3", 100: "FlashAttention 4"}.get(capability, "FlashAttention 2"), "capability"
    # END SOLUTION


# %%
best_choose = check("15.4", choose).best

# %% [markdown]
# ## What ran
#
# You have chosen a kernel, but only its name in a profile proves that it ran. SDPA picks its backend from the shapes,
# dtypes, strides and masks that it gets. If one of them does not suit a fast backend, SDPA takes another one, and says
# nothing.
#
# We ran a prefill of 2,048 tokens through a model of eight layers, on an H100 with PyTorch 2.11. We ran it six times.
# In the first run, `none`, all layers were alike. In each of the others, layer 5 asked for something else:
#
# - `mask`: the same causal mask, given as a tensor.
# - `float32`: another dtype.
# - `strides`: inputs with other strides.
# - `bias`: a bias that is learnt, given as the mask.
# - `mask_without_cudnn`: the mask as a tensor again, with cuDNN's attention switched off for all layers.
#
# **Predict** which of these five fell back to plain PyTorch.
#
# In the exercise you find out from the traces. A trace is a list of events. Each event has a category (`cat`), a
# `name`, a start (`ts`) and a duration (`dur`), both in microseconds:
#
# - `user_annotation`: a window of time that the program opened with `torch.profiler.record_function`. Here each layer
#   opened one.
# - `cpu_op`: an operation on the CPU. SDPA calls one whose name begins with `aten::_scaled_dot_product_`. The rest of
#   the name is the backend: `cudnn_attention`, `flash_attention`, `efficient_attention` or `attention_math`.
# - `cuda_runtime` or `cuda_driver`: the launch of a kernel, on the CPU. Libraries use either; cuDNN uses `cuda_driver`.
# - `kernel`: the kernel itself, on the GPU. It runs after its launch, when the GPU is free, and by then another layer's
#   window may be open. So do not use its time to find its layer: use `args["correlation"]`, a number that the kernel
#   and its launch share.

# %%
traces = recorded_traces()
for event in traces["mask"]["events"][:4]:
    print(event)

# %% [markdown]
# The next picture shows layer 5 in the run `mask_without_cudnn`. Inside the layer's window, SDPA called the operation
# that names the backend. A line joins each launch to its kernel. The first kernels ran at once, because the GPU had
# nothing to do. Then came a long kernel, and the kernels launched after it had to wait in the queue. More than half of
# the layer's time on the GPU comes after the end of its window, so a sum over what ran *during* the window would be
# wrong.

# %%
from course_lib.figures.profiling.trace import draw_trace

draw_trace(traces["mask_without_cudnn"]["events"], "layer 5: attention")


# %%
# Exercise 15.5 · What ran, and which layer fell back
def what_ran(events: list[dict]) -> list[tuple[str, str, float]]:
    """Find each layer's name, the backend of its attention, and the microseconds of its kernels.

    events: as above, in any order. Do not change them.
        Windows: every `user_annotation` is a layer's window, from ts to ts + dur, both ends included. It may have any
        name. Windows do not overlap or touch. Each gets a row of its own, even if it has no launch, or the same name
        as another one.
        Operations and launches: each belongs to the layer whose window holds its ts. In a window, at most one operation
        names a backend. A launch (`cuda_runtime` or `cuda_driver`) outside all windows belongs to no layer.
        Kernels: each belongs to the layer of the launch with the same correlation, a number from 0 on. If the trace has
        no such launch, it belongs to no layer. A launch may start no kernel, or several, as that of a CUDA graph does.
    Returns: a list of (name, backend, microseconds), in the order in which the windows begin. The backend is "cudnn",
        "flash", "efficient" or "math", or "unknown" if no operation in the window names one. The microseconds are the
        sum of dur over the layer's kernels.
    """
    # BEGIN SOLUTION
    microseconds = {}
    for event in events:
        if event["cat"] == "kernel":
            number = event["args"]["correlation"]
            microseconds[number] = microseconds.get(number, 0) + event["dur"]
    rows = []
    for layer in sorted((e for e in events if e["cat"] == "user_annotation"), key=lambda e: e["ts"]):
        inside = [e for e in events if layer["ts"] <= e["ts"] <= layer["ts"] + layer["dur"]]
        backend = "unknown"
        for event in inside:
            if event["cat"] == "cpu_op" and event["name"].startswith("aten::_scaled_dot_product_"):
                rest = event["name"].removeprefix("aten::_scaled_dot_product_")
                backend = rest.removeprefix("attention_").removesuffix("_attention")
        launches = [e["args"]["correlation"] for e in inside if e["cat"] in ("cuda_runtime", "cuda_driver")]
        rows.append((layer["name"], backend, sum(microseconds.get(number, 0) for number in launches)))
    return rows
    # END SOLUTION


def fell_back(rows: list[tuple[str, str, float]]) -> list[tuple[str, float]]:
    """Find the layers that ran "math", and how many times as long as the others they took.

    rows: at least one, as `what_ran` returns them.
    Returns: a list of (name, times), in the order of the rows. times is the layer's microseconds divided by the median
        of all layers that did not run "math", the "unknown" ones included. For the median, sort the microseconds of
        these layers and take the number at index len // 2, which is above 0. The list is empty if all layers ran
        "math", or none did.
    """
    # BEGIN SOLUTION
    others = sorted(row[2] for row in rows if row[1] != "math")
    if not others:
        return []
    return [(name, time / others[len(others) // 2]) for name, backend, time in rows if backend == "math"]
    # END SOLUTION


# %%
best_what_ran, best_fell_back = check("15.5", what_ran, fell_back).best

# %%
for asked, run in traces.items():
    rows = best_what_ran(run["events"])
    backends = sorted({backend for _, backend, _ in rows})
    slow = [f"{name.split(':')[0]}: {times:.0f} times as long" for name, times in best_fell_back(rows)]
    print(f"{asked:20} whole step {run['microseconds_in_all']:5} µs   {', '.join(backends):12} {'; '.join(slow)}")

# %% [markdown]
# In the run `mask` nothing fell back, because cuDNN takes a mask. (But layer 5 was slower with it: 136 µs instead of
# 53. `fell_back` looks only for "math", so look at the times as well.) Without cuDNN's attention the same line of
# Python fell back: FlashAttention takes no mask, and the memory-efficient backend takes no groups of query heads.
#
# With `float32`, `strides` and `bias`, one slow layer of eight makes the step 1.36 to 1.39 times as long. SDPA said
# nothing. The trace shows what ran, but not why other backends refused these inputs. Their reasons are printed by
# `torch.backends.cuda.can_use_flash_attention(parameters, debug=True)`.
#
# How do you keep that from happening? Name the backend you want: inside `with torch.nn.attention.sdpa_kernel(...)`,
# SDPA raises an error if it cannot use that backend. And write a test that looks for the name: run one step under
# `torch.profiler`, and let the test fail if the operation you expect is not in the trace.
#
# ## Eight steps, from a slow model to a fast one · deeper
#
# 1. Separate prefill from decode. Prefill is limited by arithmetic and decode by bytes, so a mean of both says nothing.
# 2. List the operators by their time, and begin at the top.
# 3. Look at the shapes and dtypes of the operators at the top. A dimension of 8,191 or a float32 often explains
#    everything.
# 4. Look for fallbacks, as in 15.5.
# 5. Compare each kernel with its roof, in bytes per second or FLOP per second, as in 15.1.
# 6. Look at the gaps between kernels. If the GPU waits for the CPU, a faster kernel changes nothing.
# 7. Batch, and record CUDA graphs, so that the CPU has less to launch.
# 8. Measure end to end again. If a kernel takes 5 % of a step, making it twice as fast saves 2.5 %.
#
# Before you write a kernel of your own, use what is mature. Try SDPA and its backends first, then `torch.compile`, then
# Triton, then CUTLASS or CUDA.
#
# ## Papers
#
# - Williams, Waterman, Patterson: *Roofline: an insightful visual performance model for multicore architectures*,
#   CACM 52(4), 2009.
# - Hoefler and Belli: *Scientific benchmarking of parallel computing systems*, SC 2015: twelve rules for reporting
#   measured times.
# - Dong et al.: *Flex Attention: A Programming Model for Generating Optimized Attention Kernels*,
#   [arXiv 2412.05496](https://arxiv.org/abs/2412.05496).
# - Ye et al.: *FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving*,
#   [arXiv 2501.01005](https://arxiv.org/abs/2501.01005).

# %%
progress()
