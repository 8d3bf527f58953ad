# %% [markdown]
# # 15 · Profile, and choose
#
# **The question.** An H100 took 952 µs for a softmax over 4,096 rows of 16,384 float32 numbers. The profiler says that
# its memory was 79 % busy. The rows have to be read and written once, 537 MB in all. A copy of that many bytes took
# 182 µs on the same card. So the memory is almost at its limit, and the kernel takes five times as long as a copy. How
# can both be true?
#
# Write down a guess. A card and a table of counters will give the answer.
#
# This chapter is about three things that you do alone after the course. You find out what limits a kernel. You choose
# a kernel that somebody else has written, and say why. And you prove which kernel ran, because libraries switch to a
# slow one without a word.
#
# **Time.** About five hours, estimated. The **core path** takes two: every section whose heading does not end in
# *deeper*. You need chapters 01, 04 and 08.

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
# There are four, and each sees something that the others do not.
#
# | tool | what it sees | ask it |
# |---|---|---|
# | a timer | one number | is it slow? is B faster than A? |
# | `torch.profiler` | operations on the CPU, kernels on the GPU, which started which | what ran, and in which order? |
# | Nsight Systems (`nsys`) | the same of the whole machine, with all libraries and copies | why is the GPU idle? |
# | Nsight Compute (`ncu`) | one kernel from inside: a thousand counters | why is this kernel slow? |
#
# `ncu` runs each kernel some twenty times to read all its counters, and so it changes the time of everything around it.
# Use it last, on the one kernel that the others have pointed at. Their manuals are
# [Nsight Compute's profiling guide](https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html),
# [Nsight Systems' user guide](https://docs.nvidia.com/nsight-systems/UserGuide/index.html) and
# [torch.profiler](https://docs.pytorch.org/docs/stable/profiler.html).
#
# ## A card for any kernel
#
# `profile(function, *arguments)` puts on one card what can be known of a kernel. The traffic meter counts the bytes,
# and the compiler tells the registers, the spills and the shared memory. Neither needs a GPU. Where there is one, the
# card has the measured time, and `ncu`'s own figures where it is installed and allowed. One sentence says what to
# look at next. Here are a copy, and a copy that reads every eighth number. **Predict** the sentence of the second.

# %%
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.strided_copy import strided_copy

x = torch.ones(2**18, device=device)
profile(copy, x, arch=90)

# %%
profile(strided_copy, torch.ones(2**20, device=device)[::8], arch=90)

# %% [markdown]
# The sectors decide. A GPU fetches 32 bytes at a time, so a number of 4 bytes that lies alone costs 32. Reading costs
# eight times what is asked for, and writing costs what it should, which makes 4.5 times in all.
#
# The next kernel is the softmax of the question: one program owns a row, and a program is a single warp. Give the card
# a T4, an A100 and an H100, and read the sentences.

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
    print(card.target, card.look_at, sep="\n    ")

# %% [markdown]
# That is the answer to the question. A row of 16,384 numbers in 32 threads is 512 numbers a thread, and a thread has at
# most 255 registers. (The cell above takes half such a row, so that the card is there in seconds. It spills as well,
# but less.) What finds no register goes to *local memory*, which is ordinary memory with a private address.
# The memory is busy, but mostly with these numbers: the counters below say that 2.52 GB moved where 0.54 GB would do.
#
# ## What the counters say
#
# We recorded eight kernels on an H100 with `ncu`. Each is slow for one reason, except for two that are as fast as they
# can be. Here are eleven figures of each. *busy* is the share of its peak at which a unit worked. A *request* is one
# load or store of a warp: to global memory, to local memory, or an atomic one. `moved_bytes` is what crossed the memory
# bus, and `least_bytes` is what the task needs. The copy moved a little less than its least, because a part of what it
# wrote was still in the L2 cache when it ended. The matrix product has no request to global memory: its copy engine
# loads and stores whole tiles, which these counters leave out.

# %%
metrics = recorded_metrics()
titles = [name.replace("_", " ") for name in metrics]
for line in range(2):  # a column's name, in two lines
    parts = (textwrap.wrap(title, 11, max_lines=2, placeholder="") for title in titles)
    print(" " * 16, *(f"{(words + ['', ''])[line]:>11}" for words in parts))
for what in metrics["a_copy"]:
    print(f"{what:16}", *(f"{seen[what]:>11.4g}" for seen in metrics.values()))

# %% [markdown]
# Which figure do you look at first? The order matters more than the figures. A kernel that spills keeps the memory
# busy. A kernel of eight programs has few active warps. If you look at the symptom first, you mend the wrong thing. In
# this exercise you write the order down. The first row that fits is the limit:
#
# | the limit | where | its figure |
# |---|---|---|
# | `"spills"` | more local requests than global ones | local / global |
# | `"tensor pipe"` | tensor pipe busy 60 % or more | `tensor_busy` |
# | `"special functions"` | special-function units busy 60 % or more | `special_busy` |
# | `"wasted bytes"` | memory busy 60 % or more, and moved bytes 1.5 times the least, or more | moved / least |
# | `"memory"` | memory busy 60 % or more | `memory_busy` |
# | `"atomics"` | more atomic requests than global ones | atomic / global |
# | `"too few programs"` | fewer programs than multiprocessors | programs / multiprocessors |
# | `"too few warps"` | active warps below 25 % | `warps_active` |
# | `"latency"` | nothing of all this | `warps_active` |

# %%
# Exercise 15.1 · Find the bottleneck
def limit_of(seen: dict) -> tuple[str, float]:
    """What limits a kernel, and the figure that shows it: the first row of the table that fits.

    seen: numbers by name. In percent: `memory_busy`, `tensor_busy`, `special_busy` and `warps_active`. Counted:
        `local_requests`, `global_requests` (loads and stores), `atomic_requests`, `programs`, `multiprocessors`,
        `moved_bytes` and `least_bytes`. A unit is busy at 60 or more, active warps are few below 25, and bytes are
        wasted at 1.5 times the least, or more. A figure that is divided by is never 0 where its row fits.
    Returns: (limit, figure), both as the table has them.
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
# Two kernels have nothing left to mend: the copy, which is at the memory's limit, and the matrix product, which is at
# the tensor pipe's. The softmax says "spills" and no longer "memory". The decode kernel has 8 programs for 132
# multiprocessors, which chapter 08 cures with splits.
#
# ## What no counter shows · deeper
#
# Counters say which unit waits. Why the instructions are there at all, only the machine code (SASS) says.
# `compile_view(..., want_sass=True)` of `course_lib/hardware/compiler` gives it, without a GPU; exercise 9.6 reads it.
# Here is what we found in the library's attention kernel for Hopper. The figures were measured in turns with cuDNN when
# chapter 09 was written: compare them with each other alone.
#
# At one time this kernel was right and its three consumers (groups of warps that compute at the same time) overlapped,
# but at head dimension 64 with a causal mask it was no faster than cuDNN: 475 TFLOP/s beside 474. Without a mask it had
# 541 beside 471. From the same Python, the loop over blocks that need no mask had 475 instructions in the causal
# kernel, and 409 in the other. What we found and changed:
#
# - **64 of the 66 were `PRMT`**, which picks bytes from two registers. The compiler did not see that two 16-bit weights
#   share a register. It took 32 registers apart at the end of each block (32 `PRMT`), and joined them again at the
#   start of the next (another 32). Now the loops carry 32-bit words with two weights each (`kept_weights` in
#   `kernels/hopper/operands.py`).
# - **A block under a mask took 816 instructions.** The mask compares positions, which needs no scores, so the compiler
#   did it early. But there are only 7 registers for results of comparisons, so it packed the results into words and
#   unpacked them later. Now positions are counted from a thread's own first key, a comparison is one instruction, and
#   the block takes 540 (`hide_scores` in `kernels/hopper/parts.py`).
# - **Blocks that nobody sees.** In a tile of 192 queries, the first 64 often see no key of the last block. Now each
#   consumer computes only the blocks that its own queries see, and frees the others (`pass_on` in
#   `kernels/hopper/flash.py`).
#
# The first two changes brought 526 TFLOP/s, beside the same 474. The third was measured in another run, with the same
# head dimension and mask, and shorter contexts: it brought 470 instead of 437 at 4k, and 338 instead of 281 at 1k.
#
# ## A timer in turns · deeper
#
# A profile says why a kernel is slow. Whether your change helped, a timer must say. Chapter 01's `measure` times one
# function. To compare two, time them *in turns*: a round calls each of them once, and the rounds follow each other.
# Then a clock that falls during the run meets both alike. Three details decide whether the comparison is fair:
#
# - **The order within a round is drawn.** On a card at its power limit, a kernel may run slower behind a hungry one.
# - **Each call gets another copy of the input.** Otherwise the second kernel of a round finds in the L2 cache what the
#   first has read. An H100's cache holds 50 MB, so with an input of 25 MB you need three copies: when the first comes
#   up again, the two others have filled the cache.
# - **The first rounds do not count.** They compile, and clocks and caches settle meanwhile.

# %%
# Exercise 15.2 · A timer in turns
def copies_needed(input_bytes: int, cache_bytes: int) -> int:
    """The least number of copies, used in turns, of which none is in the cache any more when it is used again.

    input_bytes, cache_bytes: above 0. A copy is gone once other copies of cache_bytes in all, or more, were read since.
    """
    # BEGIN SOLUTION
    return math.ceil(cache_bytes / input_bytes) + 1
    # END SOLUTION


def schedule(orders: list[list[int]], copies: int, warm: int) -> list[tuple[int, int, bool]]:
    """The calls of a comparison, one after another.

    orders: for each round the order in which its kernels run, every kernel's number once. There is at least one round.
    copies: of the input, at least 1. They are used in turns from call to call, beginning at 0, and go on from round to
        round. warm: how many rounds at the beginning do not count, 0 to the number of rounds.
    Returns: a (kernel, copy, counted) for each call.
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
    """The times of two kernels, round by round, of the rounds that count.

    steps: as `schedule` returns them. times: one for each step. first, second: numbers of two kernels.
    Returns: (times of first, times of second). Those with one index are of one round.
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
# a sum of rows that are summed first. Exercise 15.3 asks whether the difference is real.

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
times = [clocked(ways[kernel], inputs[copy]) for kernel, copy, _ in steps]
old, new = best_pairs_of(steps, times, 0, 1)
print(f"{len(inputs)} copies, {len(old)} pairs; medians {sorted(old)[25]:.0f} µs and {sorted(new)[25]:.0f} µs")

# %% [markdown]
# ## Is it two per cent faster? · deeper
#
# You change a kernel, time both, and the new one takes 2 % less. Is it faster? Four things make two runs of the *same*
# kernel differ by as much:
#
# - **Clocks.** A GPU lowers its clock when it gets hot or reaches its power limit. What runs later runs slower.
# - **A warm cache.** What the first kernel has read may still be in the L2 cache when the second begins.
# - **Late calls.** Times are skewed: now and then a call is late by half, and none is early by half.
# - **Neighbours are alike.** A clock that is low now is low in a millisecond too. Two hundred samples then say less
#   than two hundred independent ones.
#
# So measure in *pairs*: both kernels in one round, right after each other, in an order that is drawn. What slows both
# cancels in their ratio. From the ratios come three figures:
#
# - The **median ratio**, which late calls do not move.
# - An **interval** around it by the *bootstrap*. Draw about as many pairs as there are, some twice and some not at all,
#   and take the median again. Do this many times: the middle 95 % of these medians is the interval. Draw whole *blocks*
#   of neighbours, so that what is alike stays together. If the interval does not hold 1, take the difference for real.
#   Of two equal kernels one comparison in twenty or so will still say that they differ. So measure again, on another
#   day, before you tell others.
# - The **chance** that two equal kernels would look so different. If they are equal, their roles in each pair could be
#   exchanged, which turns the sign of the ratio's logarithm. Exchange them at random many times, and count how often
#   the sum of the logarithms is as far from 0 as the one you measured.

# %%
# Exercise 15.3 · Two per cent
def ratio_of(first: list[float], second: list[float]) -> float:
    """The median of the ratios second / first of all pairs.

    first, second: microseconds, above 0, as many of one as of the other, and at least one. Those with one index are a
        pair. The median of an even number of values is the mean of the two in the middle.
    """
    # BEGIN SOLUTION
    import statistics

    return statistics.median(b / a for a, b in zip(first, second))
    # END SOLUTION


def interval(first: list[float], second: list[float], starts: list[list[int]], block: int) -> tuple[float, float]:
    """The interval that holds 95 % of the resampled medians.

    starts: a row for each resample, at least one: the indices of pairs at which its blocks begin. block: pairs of a
        block, at least 1. A block that runs over the last pair goes on at the first. A resample has all pairs of its
        blocks, which may be more or fewer than there are.
    Returns: (lower, upper). Of the R medians, sorted, R // 40 are left out at each end.
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

    signs: rows of 1 and -1, one for each pair. The sum Σ sign · log(second / first) of a row is as far off if its
        size is at least that of Σ log(second / first).
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
# Try it on times whose truth is known. The next cell makes 60 pairs up: the second kernel is 2 % slower, the clock
# falls by a tenth meanwhile, and one call in ten is late by half. **Predict** what the two means would say.

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
# The truth is 1.02. The next picture shows each pair. The clock, which falls by a tenth, is not to be seen: it cancels.
# The late calls are the triangles at the edges.

# %%
from course_lib.figures.profiling.ratios import draw_ratios

draw_ratios(made_old, made_new, made_lower, made_upper)

# %% [markdown]
# The ratio of the means says that the second kernel is faster, because the late calls happened to be
# more often the first one's. The interval of the median lies above 1 and holds the truth. The chance is no help here:
# it adds logarithms up, and a late call adds more than all the small differences together. If two methods disagree,
# look at the samples. Here you would see the late calls at once, and leave them out of both.
#
# The last line is about your machine. If its interval holds 1, you have not seen a difference, whatever the medians
# say.
#
# ## Choosing a kernel
#
# You will write few kernels, and call many. What decides is seldom speed. It is what a kernel can take at all. These
# are the limits as the libraries state them:
#
# - [SDPA](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html) chooses
#   among four backends by itself: FlashAttention, cuDNN, a memory-efficient one, and plain PyTorch ("math").
#   It takes a mask as a tensor.
# - [FlexAttention](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) takes a mask as a rule, a
#   small function of positions, and compiles a kernel that skips what the rule excludes.
# - [FlashAttention](https://github.com/Dao-AILab/flash-attention) 2 is for sm_80 and later, in 16 bits, with head
#   dimensions up to 256. Version 3 is for Hopper. Version 4 is for Hopper and Blackwell; on Blackwell its head
#   dimensions go to 128, but for a few special ones.
# - [FlashInfer](https://docs.flashinfer.ai/) serves: pages, FP8 caches, many sequences of different lengths.
# - [vLLM](https://docs.vllm.ai/en/stable/) and [SGLang](https://docs.sglang.io/) choose among these for you, and
#   print in their log which one they took.
#   [TensorRT-LLM](https://nvidia.github.io/TensorRT-LLM/) has kernels of its own.
# - The course's own dispatcher is `course_lib/kernels/attention/dispatch.py`. It says why it chose, in one sentence.
#
# In this exercise you write a chooser for a small team that uses these rows. They are one sensible policy, and no law:
# where two kernels can do the same, measure both. The first row that fits decides, and so the order of the rows is a
# part of the policy: a kernel that cannot read pages is of no use however fast it is, so pages stand above masks.
#
# | | where | kernel | reason |
# |---|---|---|---|
# | 1 | bfloat16 before sm_80 | `"none"` | `"dtype"` |
# | | float8 before sm_89, in training, or under a mask as a tensor or a rule | `"none"` | `"dtype"` |
# | | float8 with a head dimension above 256 | `"none"` | `"dtype"` |
# | 2 | pages, in float32 | `"course"` | `"dtype"` |
# | | pages, and a head dimension that is not 64, 128 or 256 | `"course"` | `"head_dim"` |
# | | other pages | `"FlashInfer"` | `"pages"` |
# | 3 | decode, fewer than 100 programs, and 1,024 tokens of context or more | `"split decode"` | `"programs"` |
# | 4 | a mask as a tensor | `"SDPA"` | `"mask"` |
# | 5 | a mask as a rule: from sm_80 on | `"FlexAttention"` | `"mask"` |
# | | a mask as a rule: before sm_80 | `"SDPA"` | `"mask"` |
# | 6 | float8: on sm_90 | `"FlashAttention 3"` | `"dtype"` |
# | | float8: elsewhere | `"FlashInfer"` | `"dtype"` |
# | 7 | before sm_80 | `"SDPA"` | `"capability"` |
# | 8 | float32 | `"SDPA"` | `"dtype"` |
# | 9 | a head dimension above 256; on sm_100 above 128 | `"SDPA"` | `"head_dim"` |
# | 10 | sm_90 | `"FlashAttention 3"` | `"capability"` |
# | 11 | sm_100 | `"FlashAttention 4"` | `"capability"` |
# | | the others | `"FlashAttention 2"` | `"capability"` |

# %%
# Exercise 15.4 · The chooser
def choose(
    capability: int, dtype: str, head_dim: int, mask: str, page_size: int, use: str, programs: int, context: int
) -> tuple[str, str]:
    """Which attention to call, and the reason: the first row of the table that fits.

    capability: 75, 80, 89, 90 or 100 (sm_75 is a T4, sm_89 an L4). dtype: that of K and V, "float32", "float16",
        "bfloat16" or "float8". head_dim: at least 1.
    mask: "none", "causal", "tensor" (given as a tensor) or "rule" (given as a function of positions).
    page_size: tokens of a page, at least 1, or 0 where K and V are contiguous. use: "training", "prefill" or "decode".
    programs: batch · KV heads, which is how many programs decode has without splits. context: tokens of a sequence.
    Returns: (kernel, reason), as the table has them.
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
    if use == "decode" and programs < 100 and context >= 1024:
        return "split decode", "programs"
    if mask == "tensor":
        return "SDPA", "mask"
    if mask == "rule":
        return "FlexAttention" if capability >= 80 else "SDPA", "mask"
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
# A choice is a wish until you have seen the kernel's name. SDPA picks its backend from the shapes, dtypes, strides and
# masks that it gets. If one of them does not suit, it takes another backend, and says nothing. Below is a prefill of
# 2,048 tokens through a model of eight layers. It ran six times on an H100 with PyTorch 2.11. In five of the runs,
# layer 5 asked for something else: the same causal mask as a tensor, twice, the second time where cuDNN's attention is
# switched off; float32; other strides; or a bias that is learnt. **Predict** which of the five fell back to plain
# PyTorch.
#
# A trace is a list of events. Each has a category (`cat`), a `name`, a start (`ts`) and a duration (`dur`), both in
# microseconds:
#
# - `user_annotation`: a window that the program opened by `torch.profiler.record_function`. Here each layer opened one.
# - `cpu_op`: an operation on the CPU. SDPA calls one whose name begins with `aten::_scaled_dot_product_`, and what
#   follows names the backend: `cudnn_attention`, `flash_attention`, `efficient_attention` or `attention_math`.
# - `cuda_runtime` or `cuda_driver`: the launch of a kernel, on the CPU. Libraries use either; cuDNN uses the second.
# - `kernel`: the kernel, on the GPU. It has the same `args["correlation"]` as its launch, and it runs later, when the
#   GPU is free. By its time alone it may seem to belong to another layer.

# %%
traces = recorded_traces()
for event in traces["mask"]["events"][:4]:
    print(event)

# %% [markdown]
# The picture shows layer 5 in one of the runs. Inside its window SDPA was called, and that called the operation that
# names the backend. Each launch is joined to its kernel. The first kernels ran at once, because the GPU had nothing to
# do. Then came a long one, and the launches behind it waited in the queue. More than half of the layer's time on the
# GPU lies behind the end of its window. So a sum over what ran *during* the window would be wrong.

# %%
from course_lib.figures.profiling.trace import draw_trace

draw_trace(traces["mask_without_cudnn"]["events"], "layer 5: attention")

# %%
# Exercise 15.5 · What ran, and which layer fell back
def what_ran(events: list[dict]) -> list[tuple[str, str, float]]:
    """For each layer its name, the backend of its attention, and the microseconds of its kernels.

    events: in any order, as above. Every `user_annotation` is a layer's window, from ts to ts + dur, and gets a row of
        its own, though another one may have the same name. No two overlap or touch.
        What has its ts in a window belongs to that layer, except for kernels: those belong to the layer whose
        launch has their correlation. Launches, `cuda_runtime` or `cuda_driver`, outside of all windows belong to none.
        One launch may start several kernels, as a CUDA graph's does, or none.
    Returns: a list of (name, backend, microseconds), in the order in which the windows begin. The backend is "cudnn",
        "flash", "efficient" or "math", or "unknown" where no operation in the window says it. The microseconds are
        the sum of the kernels' dur.
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
    """The layers that ran "math", and how many times as long they took as the others.

    rows: at least one, as `what_ran` returns them.
    Returns: a list of (name, times) in the order of the rows. times is the layer's microseconds divided by the median
        of the layers that did not run "math", "unknown" ones among them: sorted, the one at index len // 2. An empty
        list where all or none ran "math".
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
# In the run `mask` nothing fell back, because cuDNN takes a mask. (It was slower with it: 136 µs in that layer instead
# of 53. `fell_back` looks for "math" alone, so look at the times as well.) Without cuDNN's attention the same line of
# Python fell back: FlashAttention takes no mask, and the memory-efficient backend takes no groups of query heads. One
# layer of eight makes three of these steps 1.36 to 1.41 times as long as the first. The fourth, without cuDNN, takes
# 1.46 times as long, because its other seven layers ran FlashAttention 2 and took twice as long, too. Nobody was told.
# The trace shows what ran. Why the backends refused these inputs it does not show:
# `torch.backends.cuda.can_use_flash_attention(parameters, debug=True)` prints the reasons.
#
# How do you keep that from happening? Name the backend you want: in `with torch.nn.attention.sdpa_kernel(...)` SDPA
# raises an error where it cannot have it. And test by name: run one step under `torch.profiler`, and let a test fail if
# the expected operation is not in it.
#
# ## Eight steps, from a slow model to a fast one · deeper
#
# 1. Separate prefill from decode. The first is limited by arithmetic, the second by bytes; a mean of both says nothing.
# 2. List the operators by their time. Begin at the top.
# 3. Look at the shapes and dtypes of those at the top. A dimension of 8,191 or a float32 is often the whole story.
# 4. Look for fallbacks, as in 15.5.
# 5. Compare each kernel with its roof, as in 15.1: bytes per second or FLOP per second.
# 6. Look at the gaps between kernels. If the GPU waits for the CPU, no kernel matters.
# 7. Batch, and record CUDA graphs.
# 8. Measure end to end again. A kernel that is twice as fast in a step of which it is 5 % saves 2.5 %.
#
# Use what is mature before you write your own: SDPA and its backends, then `torch.compile`, then Triton, then CUTLASS
# or CUDA.
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
