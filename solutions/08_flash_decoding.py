# %% [markdown]
# # 08 · Flash-Decoding: the whole chip for one token
#
# **The question.** A layer of Llama 3 8B's shape has 32 query heads on 8 KV heads of dimension 128. At 131,072 tokens
# of context its cache holds $2 \cdot 8 \cdot 131072 \cdot 128$ numbers of two bytes, which is 537 MB. Every new token
# reads all of them. An H200 reads memory at 4.37 TB/s (measured), so this takes at least 123 µs. Chapter 07's kernel
# reads each byte only once. It runs one program for each KV head, so 8 programs, on a chip with 132 multiprocessors.
# How long does it take?
#
# With 8 programs, 94 % of the chip has nothing to do. You cannot divide the work by queries, sequences or heads any
# further, so only the keys are left. A softmax seems to need all keys in one place, but chapter 03 finished parts of a
# row separately and merged them by their log-sum-exps. Here you cut the keys into *splits*, give each to a program of
# its own, and merge the results. This is *Flash-Decoding* (Dao, Haziza, Massa and Sizov, October 2023).
#
# **Time.** About four hours for all six exercises. The **core path** takes two: exercises 8.1 to 8.4 and every section
# whose heading does not end in *deeper*. You can skip the others: run their cells and go on. 8.6 is a
# race: without a GPU only its numbers are checked.

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

from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## One query, one core
#
# You can see the problem on a CPU too. PyTorch's attention gives each core its own heads and tiles of queries. With
# one head and one query, one core does all the work. The cell below cuts the keys into twice as many splits as
# PyTorch has threads. Each split computes attention over its own keys, and the last line of `in_splits` merges them.
#
# On a GPU the cell times the question's layer with the library's kernel, without and with splits. **Predict** how
# many times as fast the second line is.

# %%
predict("08 keys in splits", ..., "times as fast")

# %%
from course_lib.hardware.device import supports_bfloat16
from course_lib.hardware.timing import measure
from course_lib.kernels.decode.attention import decode_attention


def in_splits(query, key, value, splits):
    """Attention of one query [1, dim] over keys and values [length, dim] in equal splits, in PyTorch: [1, dim]."""
    keys, values = (matrix.view(splits, -1, matrix.shape[1]) for matrix in (key, value))  # [splits, keys, dim]
    scores = query.expand(splits, 1, -1) @ keys.transpose(1, 2) / math.sqrt(query.shape[1])  # [splits, 1, keys]
    lses = torch.logsumexp(scores, dim=2)  # [splits, 1]
    outputs = (torch.softmax(scores, dim=2) @ values)[:, 0]  # [splits, dim], each an average over its own keys
    return torch.softmax(lses, dim=0).T @ outputs


def cache_of(context, key_heads=8, query_heads=32, head_dim=128):
    """Query, keys, values and lengths of one sequence on the GPU, in 16 bits."""
    options = {"device": device, "dtype": torch.bfloat16 if supports_bfloat16() else torch.float16}
    query = torch.randn(1, query_heads, head_dim, **options)
    key, value = (torch.randn(1, key_heads, context, head_dim, **options) for _ in range(2))
    return query, key, value, torch.tensor([context], dtype=torch.int32, device=device)


if on_gpu:
    tensors = cache_of(131072)
    runs = {
        "one program for each KV head": partial(decode_attention, *tensors, splits=1, validate=False),
        "the keys in splits": partial(decode_attention, *tensors, validate=False),
    }
else:
    threads = torch.get_num_threads()
    query, key, value = torch.randn(1, 128), torch.randn(65536, 128), torch.randn(65536, 128)
    tensors = (query, key, value)
    runs = {
        "one head, one query: one core": partial(F.scaled_dot_product_attention, *(t[None, None] for t in tensors)),
        f"the keys in {2 * threads} splits, on {threads} cores": partial(in_splits, *tensors, 2 * threads),
    }
cached_bytes = tensors[1].nbytes + tensors[2].nbytes
first_times = {}
for name, run in runs.items():
    timing = measure(run, seconds=0.5, device=device)
    first_times[name] = timing.median if on_gpu else timing.best  # a CPU has other things to do in between
    rate = format_bandwidth(cached_bytes / first_times[name])
    print(f"{name:36}{format_seconds(first_times[name]):>10}  {rate:>10} of {format_bytes(cached_bytes)}")
slow, fast = first_times.values()
measured("08 keys in splits", slow / fast, "times as fast")

# %% [markdown]
# Both lines read the same bytes and do the same FLOPs, but the second uses more cores. On two idle cores it is nearly
# twice as fast; with one thread there is nothing to gain. On a GPU the factor is larger, because far more of the chip
# was idle.
#
# ## Programs, waves and an idle chip
#
# In this chapter a *slot* is a place for one running program. A chip has as many as its multiprocessors, times the
# programs that fit on one. (In chapters 05 and 06 a slot was a token's place in a cache.) When there are more programs
# than slots, the rest wait. If all take equally long, they run in *waves*: they fill all slots, end together, and the
# next ones fill the slots again. The last wave may fill only a few slots, and then most of the chip is idle.

# %%
# Exercise 8.1 · How much of the chip works
def occupancy(batch, key_heads, splits, slots):
    """Programs, waves and busy share of a decode kernel. It has a program for each sequence, KV head and split.

    Args:
        batch, key_heads, splits: each at least 1.
        slots: programs that the chip holds at a time: multiprocessors times the programs that fit on one.

    Returns:
        (programs, waves, busy). programs: how many there are. waves: how often the chip is filled until all have run;
        the last wave may not be full. busy: the share of all waves' slots that hold a program, from 0 to 1.
    """
    # BEGIN SOLUTION
    programs = batch * key_heads * splits
    waves = -(-programs // slots)
    return programs, waves, programs / (waves * slots)
    # END SOLUTION


def splits_for_one_wave(batch, key_heads, slots):
    """The largest number of splits whose programs fit in a single wave; 1 when no number does."""
    # BEGIN SOLUTION
    return max(1, slots // (batch * key_heads))
    # END SOLUTION

# %%
best_occupancy, best_splits_for_one_wave = check("8.1", occupancy, splits_for_one_wave).best

# %% [markdown]
# Without splits, decode has one program for each sequence and KV head. How much of a real chip does that keep busy,
# with one slot on each multiprocessor?

# %%
print(f"{'':24}{'batch':>6}{'KV heads':>10}{'programs':>10}{'waves':>7}{'busy':>7}    splits for one wave")
for chip_name, multiprocessors in (("T4", 40), ("A100", 108), ("H100 or H200", 132)):
    for batch, key_heads in ((1, 8), (1, 1), (4, 8), (16, 8), (17, 8)):
        programs, waves, busy = best_occupancy(batch, key_heads, 1, multiprocessors)
        splits = best_splits_for_one_wave(batch, key_heads, multiprocessors)
        print(f"{chip_name:24}{batch:>6}{key_heads:>10}{programs:>10}{waves:>7}{busy:>7.0%}{splits:>10}")

# %% [markdown]
# The table shows two kinds of waste. With a small batch there is one wave, and it is nearly empty. And 17 sequences
# make 136 programs, four more than an H100 has multiprocessors. Those four need a second wave, in which 97 % of the
# chip is idle.
#
# ## A model of the time
#
# Idle multiprocessors would not matter if 8 programs could use all of the memory's bandwidth. They cannot. A program
# has some bytes *in flight*: asked for, but not yet there. By *Little's law*, its bandwidth is these bytes divided by
# the time they take to arrive. A tile of 64 keys and one of 64 values, of 128 two-byte numbers each, are 32 KB. If one
# such pair is in flight at a time and takes 0.8 µs to arrive, the program reads 41 GB/s. Eight programs read 0.33 TB/s,
# a thirteenth of what the memory can deliver.
#
# So a model of the time needs five numbers:
#
# - `slots`: how many programs run at a time;
# - `bandwidth`: the most that all programs together can read;
# - `program_bandwidth`: the most that one program can read;
# - `start_seconds`: how long a wave waits for its first bytes;
# - `launch_seconds`: what the second kernel, which merges, takes besides reading and writing.
#
# For the last three we assume 40 GB/s, 2 µs and 3 µs on an H200. On a GPU the cell uses measured bandwidths: the chip's
# as in chapter 01, and one program's from the run without splits above.

# %%
from course_lib.hardware.ceilings.measured import ceilings

H200 = {"slots": 132, "bandwidth": 4.37e12, "program_bandwidth": 40e9, "start_seconds": 2e-6, "launch_seconds": 3e-6}


def kernel_seconds(programs, program_bytes, chip):
    """Seconds of a kernel whose programs each read `program_bytes`: one wave after the other."""
    full, rest = divmod(programs, chip["slots"])
    waves = [chip["slots"]] * full + [rest] * bool(rest)  # programs of each wave
    rates = [min(chip["bandwidth"], busy * chip["program_bandwidth"]) for busy in waves]
    return sum(chip["start_seconds"] + busy * program_bytes / rate for busy, rate in zip(waves, rates))


chip = dict(H200)
if on_gpu:
    chip |= {
        "slots": torch.cuda.get_device_properties(device).multi_processor_count,
        "bandwidth": ceilings().memory_bandwidth,
        "program_bandwidth": cached_bytes / 8 / slow,
    }
needed = math.ceil(chip["bandwidth"] / chip["program_bandwidth"])
print(f"{chip['slots']} slots, {format_bandwidth(chip['bandwidth'])}; one program reads "
      f"{format_bandwidth(chip['program_bandwidth'])}, and {needed} programs saturate the memory")
for splits in (1, 2, 4, 8, 16):
    seconds = kernel_seconds(8 * splits, 2 * 131072 // splits * 128 * 2, chip)
    print(f"8 KV heads, 131,072 keys in {splits:>2} splits: {format_seconds(seconds):>8}")

# %% [markdown]
# That answers the question on paper. With the H200's numbers, one program for each KV head takes 1.68 ms for bytes
# that the memory could deliver in 123 µs. With 32 such layers, attention takes 54 ms a token instead of 4 ms.
#
# The next picture draws the model. Each bar is a program: its row is the slot, its length the time it takes. **Before
# you look:** on 132 slots, 16 splits make 128 programs and 17 make 136. What does the 17th split do to the time?

# %%
from course_lib.figures.decode.sm_timeline import sm_timeline

whole = best_splits_for_one_wave(1, 8, chip["slots"])
sm_timeline(batch=1, query_heads=32, key_heads=8, context=131072, head_dim=128, chip=chip, show=(1, whole, whole + 1))

# %% [markdown]
# The 17th split starts a second wave of four programs. Four programs read only 160 GB/s together, so with the H200's
# numbers that wave takes nearly as long as everything before it: 225 µs instead of 128.
#
# In a live notebook, move the slider below the picture: a curve then shows the time for every number of splits. It
# falls while the chip fills up. After that it looks like a saw, because it jumps each time another wave begins. At the
# low points every wave is full. They rise slowly, because more splits take longer to merge.
#
# ## One split, finished by itself
#
# Now write the kernel for one split. It computes attention over its own keys only and leaves two results. One is the
# weighted average of its values, $o_s$. The other is the log-sum-exp of its scores, $L_s$. It says how much weight this
# average has in the merge:
#
# $$o_s = \frac{\sum_{j \in s} e^{x_j} v_j}{\sum_{j \in s} e^{x_j}}, \qquad L_s = \log \sum_{j \in s} e^{x_j}$$
#
# A split with three keys that all score 0 has $L_s = \log 3 = 1.10$, and $o_s$ is the mean of its three values. This is
# chapter 03's state $(m, \ell, o)$ with maximum and sum in one number. Both results are float32 whatever the cache's
# dtype. Otherwise each split would be rounded before the merge.
#
# The cell already holds the loop of exercise 7.5. You write the three new parts:
#
# 1. **Which keys are mine?** Each sequence is split by its own length, into splits of
#    $\lceil \text{length} / \text{splits} \rceil$ keys. If you rounded down, no split would read the last keys.
# 2. **Where does the mask end?** A split's last tile may reach into the next split, so the mask must end where the
#    split ends.
# 3. **What is stored?** A split can be empty: 5 tokens in 7 splits leave two without keys. An empty split must not
#    change the merged result, so it stores $o_s = 0$ and $L_s = -\infty$. The loop works with powers of 2, but you
#    store $L_s$ as a natural logarithm.

# %%
# Exercise 8.2 · One split of the keys
@triton.jit
def split_kernel(
    query_pointer, key_pointer, value_pointer, lengths_pointer, output_pointer, lse_pointer,
    query_batch_stride, query_head_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, scale_log2,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program (split, KV head, sequence): the GROUP query heads of one KV head against one split of its keys."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    key_head, key_heads = tl.program_id(1), tl.num_programs(1)
    sequence, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)  # 64 bits: a cache can pass 2^31 elements
    members = tl.arange(0, BLOCK_G)  # [BLOCK_G], of which the first GROUP are heads
    heads = key_head * GROUP + members  # [BLOCK_G]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = sequence * query_batch_stride + heads[:, None] * query_head_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=(members < GROUP)[:, None], other=0.0)  # [BLOCK_G, HEAD_DIM]
    key_pointer += sequence * key_batch_stride + key_head.to(tl.int64) * key_head_stride
    value_pointer += sequence * value_batch_stride + key_head.to(tl.int64) * value_head_stride
    length = tl.load(lengths_pointer + sequence)  # tokens of this sequence
    # Which keys are mine? Set `first` and `last`: this split has the keys from first up to, not including, last.
    # BEGIN SOLUTION
    split_length = tl.cdiv(length, splits)
    first = split * split_length
    last = tl.minimum(first + split_length, length)
    # END SOLUTION
    running_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_G], tl.float32)
    accumulator = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N).to(tl.int64)  # [BLOCK_N]
        # `present` [BLOCK_N]: which of these keys count.
        # BEGIN SOLUTION
        present = keys < last  # what follows belongs to the next split
        # END SOLUTION
        key_offsets = keys[:, None] * key_stride + columns[None, :]
        key_tile = tl.load(key_pointer + key_offsets, mask=present[:, None], other=0.0)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_G]
        weights = tl.exp2(scores - new_max[:, None])  # [BLOCK_G, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [BLOCK_G]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = keys[:, None] * value_stride + columns[None, :]
        value_tile = tl.load(value_pointer + value_offsets, mask=present[:, None], other=0.0)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_G, HEAD_DIM]
        running_max = new_max
    # The split's own average and its natural log-sum-exp, and both stores. A split without keys made no step.
    # BEGIN SOLUTION
    total = tl.where(running_sum == 0.0, 1.0, running_sum)  # without a key: 0 / 1 = 0, and -inf + log 1 = -inf
    rows = (split * batch + sequence) * key_heads * GROUP + heads  # [BLOCK_G]
    output_offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    tl.store(output_pointer + output_offsets, accumulator / total[:, None], mask=(members < GROUP)[:, None])
    log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453  # natural, for whoever merges
    tl.store(lse_pointer + rows, log_sum_exp, mask=members < GROUP)
    # END SOLUTION


def split_attention(query, key_cache, value_cache, lengths, splits):
    """Attention of one query over each split of the keys, by one kernel.

    With size = ⌈length / splits⌉, split s has the keys from s · size up to, not including, (s + 1) · size, as far as
    the sequence has them.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16; head_dim 16, 32, 64 or 128, the last stride 1.
        key_cache, value_cache: [batch, key_heads, capacity, head_dim]. Query heads h · group to h · group + group - 1
            share KV head h. Any strides but the last, which is 1; they may reach beyond 2³¹ elements. What stands
            behind a sequence's tokens is undefined.
        lengths: [batch], int32: the tokens of each sequence, 0 to capacity.
        splits: at least 1, and perhaps more than there are tokens.

    Returns:
        (outputs, lses), both float32 and contiguous. outputs, [splits, batch, query_heads, head_dim]: each split's own
        average of its values. lses, [splits, batch, query_heads]: the natural logarithm of the sum of the exponentials
        of its scaled scores. A split without keys has an output of zeros and a log-sum-exp of -inf. The bytes are
        counted: each key and value of a split is read once for all heads of its group, by the kernel. PyTorch must not
        copy the caches first.
    """
    batch, query_heads, head_dim = query.shape
    key_heads = key_cache.shape[1]
    group = query_heads // key_heads
    outputs = torch.empty(splits, batch, query_heads, head_dim, dtype=torch.float32, device=query.device)
    lses = torch.empty(splits, batch, query_heads, dtype=torch.float32, device=query.device)
    split_kernel[(splits, key_heads, batch)](
        query, key_cache, value_cache, lengths, outputs, lses, *query.stride()[:2], *key_cache.stride()[:3],
        *value_cache.stride()[:3], math.log2(math.e) / math.sqrt(head_dim), GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, BLOCK_N=64,
    )
    return outputs, lses

# %%
best_split_attention = check("8.2", split_attention).best

# %% [markdown]
# ## The merge
#
# The whole softmax has the log-sum-exp $L = \log \sum_s e^{L_s}$. Each split's share of the output is its share of
# the total weight:
#
# $$o = \sum_s e^{L_s - L} \, o_s$$
#
# Two splits with $L_1 = L_2$ count half each. If $L_1$ is larger by $\log 3$, they count three quarters and one
# quarter. So the weights are a softmax over the log-sum-exps, computed relative to the maximum as always. Return $L$
# too, because a further merge, for example over several GPUs, needs it. Start one program for each query head of each
# sequence. It loads the results of all splits as one tile.

# %%
# Exercise 8.3 · Combine the splits
@triton.jit
def combine_kernel(
    outputs_pointer, lses_pointer, output_pointer, lse_pointer, splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program r merges row r, a query head of a sequence. Split s has it in row s · rows + r of the partial results."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    # BEGIN SOLUTION
    members = tl.arange(0, BLOCK_S)  # [BLOCK_S], of which the first `splits` exist
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    present = members < splits
    partial_rows = members * rows + row  # [BLOCK_S]
    lses = tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))  # [BLOCK_S]
    partial_offsets = partial_rows[:, None] * HEAD_DIM + columns[None, :]
    parts = tl.load(outputs_pointer + partial_offsets, mask=present[:, None], other=0.0)  # [BLOCK_S, HEAD_DIM]
    largest = tl.max(lses, axis=0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)  # never -inf - -inf
    weights = tl.exp(lses - reference)  # [BLOCK_S], 0 for a split without keys
    total = tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)  # never 0 / 0
    tl.store(output_pointer + row * HEAD_DIM + columns, tl.sum(weights[:, None] * parts, axis=0) / divisor)
    tl.store(lse_pointer + row, largest + tl.log(divisor))
    # END SOLUTION


def combine_splits(outputs, lses):
    """One result from those of all splits, by one kernel.

    Args:
        outputs: [splits, batch, query_heads, head_dim], float32, contiguous: each split's average of its values, zeros
            for a split without keys; splits from 1 on, head_dim 16, 32, 64 or 128.
        lses: [splits, batch, query_heads], float32, contiguous: each split's log-sum-exp, natural; -inf without keys.

    Returns:
        (output, lse): [batch, query_heads, head_dim] and [batch, query_heads], float32: the average and the log-sum-exp
        over all keys. Zeros and -inf for a sequence without keys. The bytes are counted. A tensor that you make
        has at most as many elements as `outputs` and twice the results (output and lse) have together.
    """
    # BEGIN SOLUTION
    splits, batch, query_heads, head_dim = outputs.shape
    output = torch.empty(batch, query_heads, head_dim, dtype=torch.float32, device=outputs.device)
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=outputs.device)
    combine_kernel[(batch * query_heads,)](
        outputs, lses, output, lse, splits, HEAD_DIM=head_dim, BLOCK_S=triton.next_power_of_2(splits)
    )
    return output, lse
    # END SOLUTION

# %%
best_combine_splits = check("8.3", combine_splits).best

# %% [markdown]
# Together the two kernels compute attention, for any number of splits. The cell compares them with PyTorch. The last
# column is the error of a plain average of the splits. In this data, as in many real models, the last tokens score
# higher. **Predict** that error.

# %%
torch.manual_seed(8)
query = torch.randn(2, 8, 32)
key_cache, value_cache = torch.randn(2, 2, 300, 32), torch.randn(2, 2, 300, 32)
key_cache[:, :, 250:] += 0.4 * query.view(2, 2, 4, 32).mean(dim=2, keepdim=True)
lengths = torch.tensor([300, 77], dtype=torch.int32)
tensors = [tensor.to(device) for tensor in (query, key_cache, value_cache, lengths)]
groups = key_cache.double().repeat_interleave(4, dim=1), value_cache.double().repeat_interleave(4, dim=1)
exact = torch.stack([
    F.scaled_dot_product_attention(query[i, :, None].double(), *(cache[i, :, :length] for cache in groups))[:, 0]
    for i, length in enumerate(lengths.tolist())
])
print("splits   empty   largest error   averaged without weights")
for splits in (1, 2, 3, 16, 100):
    outputs, lses = best_split_attention(*tensors, splits)
    merged, _ = best_combine_splits(outputs, lses)
    empty = (lses == -math.inf).sum().item() // 8  # of both sequences' splits
    error, careless = ((result.cpu().double() - exact).abs().max().item() for result in (merged, outputs.mean(dim=0)))
    print(f"{splits:>6}{empty:>8}{error:>16.1e}{careless:>27.2f}")

# %% [markdown]
# What does the merge cost in bytes? Every split stores `query_heads` rows of `head_dim + 1` float32 numbers, which are
# written once and read once. **Predict** these bytes, the third column, for 8 query heads of dimension 64 on 2 KV heads
# and 512 keys.

# %%
from course_lib.hardware.meter.metered import metered

query, key_cache, value_cache = torch.randn(1, 8, 64), torch.randn(1, 2, 512, 64), torch.randn(1, 2, 512, 64)
lengths = torch.tensor([512], dtype=torch.int32)
print(f"{'splits':>6}{'keys and values':>17}{'partial results':>17}{'in percent':>12}")
for splits in (1, 4, 8):
    counted = metered(best_split_attention, query, key_cache, value_cache, lengths, splits).total_bytes
    partial_bytes = splits * 8 * (64 + 1) * 4
    read = key_cache.nbytes + value_cache.nbytes
    left = counted - partial_bytes - splits * query.nbytes
    print(f"{splits:>6}{left:>17,}{2 * partial_bytes:>17,}{2 * partial_bytes / read:>12.1%}")

# %% [markdown]
# Keys and values are read once, however they are split. (The few extra bytes are the length that each program loads.)
# The partial results grow with the splits and not with the context. For the question's layer in 16 splits they are
# $2 \cdot 16 \cdot 32 \cdot 129 \cdot 4$ bytes: 0.53 MB beside 537 MB, a thousandth. At 8192 keys they are 1.6 % of the
# cache, and with 256 splits 25 %. At small sizes the bytes matter less than the second kernel itself: it is one more
# launch, and it can only read what has been written.
#
# ## How many splits
#
# With too few splits the chip is idle. With a few too many, a second wave begins. With very many, the partial results
# grow and each program is so short that it mostly waits for its first bytes. Your model has a term for each of these.

# %%
# Exercise 8.4 · How many splits
def kernel_seconds(programs, program_bytes, chip):
    """Seconds of a kernel whose programs each read `program_bytes`: one wave after the other. The same as above."""
    full, rest = divmod(programs, chip["slots"])
    waves = [chip["slots"]] * full + [rest] * bool(rest)  # programs of each wave
    rates = [min(chip["bandwidth"], busy * chip["program_bandwidth"]) for busy in waves]
    return sum(chip["start_seconds"] + busy * program_bytes / rate for busy, rate in zip(waves, rates))


def decode_microseconds(splits, batch, query_heads, key_heads, context, head_dim, item_bytes, chip):
    """Microseconds of one step of decode attention with the keys in `splits` parts.

    The pass over keys and values takes kernel_seconds, with a program for each sequence, KV head and split. Count
    every program's bytes as if it had the longest split. With more than one split, add the combine:
    chip["launch_seconds"], and the partial results, written once and read once at chip["bandwidth"]. These are head_dim
    numbers of output and a log-sum-exp for each split, sequence and query head, in float32.

    Args:
        splits: at least 1; the longest split has ⌈context / splits⌉ keys.
        batch, query_heads, key_heads, context, head_dim: the shape; every sequence has `context` keys.
        item_bytes: bytes of an element of the cache.
        chip: "slots" (programs at a time), "bandwidth" and "program_bandwidth" (of the chip, and of one program at
            most, bytes/s), "start_seconds" (until a wave's first bytes arrive), "launch_seconds" (of a second kernel).
    """
    # BEGIN SOLUTION
    program_bytes = 2 * -(-context // splits) * head_dim * item_bytes
    seconds = kernel_seconds(batch * key_heads * splits, program_bytes, chip)
    if splits > 1:
        partial_bytes = splits * batch * query_heads * (head_dim + 1) * 4
        seconds += chip["launch_seconds"] + 2 * partial_bytes / chip["bandwidth"]
    return 1e6 * seconds
    # END SOLUTION


def choose_splits(batch, query_heads, key_heads, context, head_dim, item_bytes, chip):
    """A number of splits whose decode_microseconds are the least, or at most half a percent above the least.

    Every split has at least 64 keys, and there are at most 256 splits: choose from 1 to the smaller of context // 64
    and 256. One split is always allowed.
    """
    # BEGIN SOLUTION
    most = max(1, min(256, context // 64))
    shape = (batch, query_heads, key_heads, context, head_dim, item_bytes, chip)
    return min(range(1, most + 1), key=lambda splits: decode_microseconds(splits, *shape))
    # END SOLUTION

# %%
best_decode_microseconds, best_choose_splits = check("8.4", decode_microseconds, choose_splits).best

# %% [markdown]
# ## What libraries choose · deeper
#
# Libraries use similar rules, which the CPU computes in a microsecond. The next cell compares two with yours.
#
# **FlashAttention-2** counts two slots on each multiprocessor. If the programs fill 80 % of the slots without splits,
# it does not split. Otherwise it takes the *smallest* number of splits, up to 128, whose waves are at least 85 % as
# full as the best. **This course's library** uses the same model as you, with constants measured on an H200
# (`course_lib/kernels/decode/splits.py`).

# %%
from course_lib.kernels.decode.splits import choose_splits as library_choice


def flash_attention_2_choice(programs, slots, key_tiles, most=128):
    """FlashAttention-2's rule: the smallest number of splits whose waves are 85 % as full as the fullest."""
    if programs >= 0.8 * slots:
        return 1
    candidates = [n for n in range(1, min(most, slots, key_tiles) + 1)
                  if n == 1 or -(-key_tiles // n) != -(-key_tiles // (n - 1))]
    full = {n: programs * n / slots / math.ceil(programs * n / slots) for n in candidates}
    return next(n for n in candidates if full[n] >= 0.85 * max(full.values()))


multiprocessors = chip["slots"]
shapes = [(1, 32, 8, 131072), (1, 32, 8, 8192), (1, 32, 8, 1024), (1, 32, 8, 256), (1, 32, 1, 16384),
          (13, 32, 8, 60000), (16, 32, 8, 8192), (64, 32, 8, 4096)]
print(f"{'batch, heads, context':26}{'yours':>7}{'FA2':>6}{'library':>9}     by the model: no split, yours")
for batch, query_heads, key_heads, context in shapes:
    shape = (batch, query_heads, key_heads, context, 128, 2, chip)
    mine = best_choose_splits(*shape)
    fa2 = flash_attention_2_choice(batch * key_heads, 2 * multiprocessors, -(-context // 128))
    library = library_choice(batch, key_heads, context, multiprocessors)
    times = [format_seconds(1e-6 * best_decode_microseconds(splits, *shape)) for splits in (1, mine)]
    print(f"{batch:>3}, {query_heads}/{key_heads}, {context:>7}{'':10}{mine:>4}{fa2:>6}{library:>9}"
          f"{times[0]:>17}{times[1]:>12}")

# %% [markdown]
# The numbers differ, but the times hardly do, because the curve is flat around its low points. All three agree on what
# matters: no split for 64 sequences, which fill the chip already; few or none for a few hundred keys; and never a few
# programs more than a full wave.
#
# ## Pages, groups and splits at once · deeper
#
# A serving system needs pages (chapter 06), grouped heads (chapter 07) and splits in one kernel. Only the addresses
# change. Token $t$ of a sequence lies in page `block_tables[sequence, t // page_size]`, at row `t % page_size`. A
# split may begin in the middle of a page, because each key looks up its own page.
#
# Beyond a sequence's length, the entries of the table and the rows of its last page are undefined. They hold old data,
# which is NaN in one case of the check. A weight of zero does not protect you, because $0 \cdot \text{NaN}$ is NaN. So
# mask the loads.
#
# As in chapter 06, load the page numbers one step ahead. Otherwise the compiler cannot fetch the next tile early. The
# check accepts both versions, but only one is fast.
#
# The cell holds the loop of 8.2 and the merge of 8.3. You write the rest: where keys and values lie, the launch, and an
# output in the query's own dtype.

# %%
# Exercise 8.5 · Flash-Decoding on a paged cache
@triton.jit
def paged_split_kernel(
    query_pointer, key_pointer, value_pointer, table_pointer, lengths_pointer, outputs_pointer, lses_pointer,
    query_batch_stride, query_head_stride, key_page_stride, key_head_stride, key_stride,
    value_page_stride, value_head_stride, value_stride, table_stride, scale_log2,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program (split, KV head, sequence): one split of the keys, wherever their pages lie."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    key_head, key_heads = tl.program_id(1), tl.num_programs(1)
    sequence, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    members = tl.arange(0, BLOCK_G)  # [BLOCK_G], of which the first GROUP are heads
    heads = key_head * GROUP + members  # [BLOCK_G]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = sequence * query_batch_stride + heads[:, None] * query_head_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=(members < GROUP)[:, None], other=0.0)  # [BLOCK_G, HEAD_DIM]
    key_pointer += key_head.to(tl.int64) * key_head_stride
    value_pointer += key_head.to(tl.int64) * value_head_stride
    table_pointer += sequence * table_stride
    length = tl.load(lengths_pointer + sequence)
    split_length = tl.cdiv(length, splits)
    first = split * split_length
    last = tl.minimum(first + split_length, length)
    running_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_G], tl.float32)
    accumulator = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    # Before the loop: what you want to load one step ahead.
    # BEGIN SOLUTION
    keys = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    next_pages = tl.load(table_pointer + keys // PAGE_SIZE, mask=keys < last, other=0)  # [BLOCK_N]
    # END SOLUTION
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = keys < last
        # `key_offsets` and `value_offsets` [BLOCK_N, HEAD_DIM]: each key and value in its page.
        # BEGIN SOLUTION
        pages = next_pages.to(tl.int64)  # [BLOCK_N]
        # One step ahead: a tile whose page numbers are loaded in its own step cannot be fetched in advance.
        ahead = keys + BLOCK_N
        next_pages = tl.load(table_pointer + ahead // PAGE_SIZE, mask=ahead < last, other=0)
        key_offsets = (pages * key_page_stride + keys % PAGE_SIZE * key_stride)[:, None] + columns[None, :]
        value_offsets = (pages * value_page_stride + keys % PAGE_SIZE * value_stride)[:, None] + columns[None, :]
        # END SOLUTION
        key_tile = tl.load(key_pointer + key_offsets, mask=present[:, None], other=0.0)  # [BLOCK_N, HEAD_DIM]
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_G, BLOCK_N]
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_G]
        weights = tl.exp2(scores - new_max[:, None])  # [BLOCK_G, BLOCK_N]
        rescale = tl.exp2(running_max - new_max)  # [BLOCK_G]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_tile = tl.load(value_pointer + value_offsets, mask=present[:, None], other=0.0)  # [BLOCK_N, HEAD_DIM]
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product  # [BLOCK_G, HEAD_DIM]
        running_max = new_max
    total = tl.where(running_sum == 0.0, 1.0, running_sum)
    rows = (split * batch + sequence) * key_heads * GROUP + heads  # [BLOCK_G]
    output_offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    tl.store(outputs_pointer + output_offsets, accumulator / total[:, None], mask=(members < GROUP)[:, None])
    log_sum_exp = (running_max + tl.log2(total)) * 0.6931471805599453
    tl.store(lses_pointer + rows, log_sum_exp, mask=members < GROUP)


@triton.jit
def merge_kernel(
    outputs_pointer, lses_pointer, output_pointer, lse_pointer, splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program r: row r of all splits, as in 8.3. The output may have another dtype."""
    row, rows = tl.program_id(0), tl.num_programs(0)
    members = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    present = members < splits
    partial_rows = members * rows + row  # [BLOCK_S]
    lses = tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))  # [BLOCK_S]
    partial_offsets = partial_rows[:, None] * HEAD_DIM + columns[None, :]
    parts = tl.load(outputs_pointer + partial_offsets, mask=present[:, None], other=0.0)  # [BLOCK_S, HEAD_DIM]
    largest = tl.max(lses, axis=0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp(lses - reference)  # [BLOCK_S]
    total = tl.sum(weights, axis=0)
    divisor = tl.where(total == 0.0, 1.0, total)
    # The output in its own dtype, and the log-sum-exp.
    # BEGIN SOLUTION
    output = tl.sum(weights[:, None] * parts, axis=0) / divisor  # [HEAD_DIM]
    tl.store(output_pointer + row * HEAD_DIM + columns, output.to(output_pointer.dtype.element_ty))
    tl.store(lse_pointer + row, largest + tl.log(divisor))
    # END SOLUTION


def flash_decode(query, key_pages, value_pages, block_tables, lengths, splits):
    """Attention of one query over a paged cache, the keys in `splits` parts, in at most two launches.

    Args:
        query: [batch, query_heads, head_dim], float32 or float16; head_dim 16, 32, 64 or 128, the last stride 1.
        key_pages, value_pages: [pages, key_heads, page_size, head_dim], page_size at least 1. Query heads h · group to
            h · group + group - 1 share KV head h. Any strides but the last, which is 1; a pool may reach
            beyond 2³¹ elements, though the rows of one page and one KV head lie within fewer.
        block_tables: [batch, max_blocks], int32, any row stride: the page of tokens i · page_size to
            (i + 1) · page_size - 1 of a sequence. What a length doesn't reach is undefined: entries, and rows of pages
            too.
        lengths: [batch], int32: the tokens of each sequence, from 0.
        splits: 1 to 256. Which keys a split has is up to you.

    No tensor that PyTorch allocates may have more elements than key_pages, or than the partial results of all splits
    where those are more: splits · batch · query_heads · (head_dim + 1).

    Returns:
        (output, lse): [batch, query_heads, head_dim] in query's dtype, and [batch, query_heads], float32, the natural
        log-sum-exp over all keys. Zeros and -inf for a sequence without tokens. The bytes are counted: each key and
        value is read once for all heads of its group, by the kernels. PyTorch must not copy the pools first.
    """
    batch, query_heads, head_dim = query.shape
    key_heads, page_size = key_pages.shape[1:3]
    group = query_heads // key_heads
    outputs = torch.empty(splits, batch, query_heads, head_dim, dtype=torch.float32, device=query.device)
    lses = torch.empty(splits, batch, query_heads, dtype=torch.float32, device=query.device)
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    lse = torch.empty(batch, query_heads, dtype=torch.float32, device=query.device)
    # Launch paged_split_kernel with a program for each split, KV head and sequence.
    # BEGIN SOLUTION
    paged_split_kernel[(splits, key_heads, batch)](
        query, key_pages, value_pages, block_tables, lengths, outputs, lses, *query.stride()[:2],
        *key_pages.stride()[:3], *value_pages.stride()[:3], block_tables.stride(0),
        math.log2(math.e) / math.sqrt(head_dim), GROUP=group, BLOCK_G=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim, PAGE_SIZE=page_size, BLOCK_N=64,
    )
    # END SOLUTION
    merge_kernel[(batch * query_heads,)](
        outputs, lses, output, lse, splits, HEAD_DIM=head_dim, BLOCK_S=triton.next_power_of_2(splits)
    )
    return output, lse

# %%
best_flash_decode = check("8.5", flash_decode).best

# %% [markdown]
# You used two launches. The library needs one: each program that has stored its part adds 1 to a counter, and the
# last one to arrive does the merge while the parts are still in the L2 cache (`finish_split` in
# `course_lib/kernels/decode/combine.py`).
#
# ## A grid that may not change · deeper
#
# Decode launches hundreds of small kernels for each token, and at small batches launching takes longer than computing.
# In our measurement one call of the library's kernel took Python 64 µs, but the H200 only 21 µs for 8192 tokens.
# Serving systems therefore record a step once as a *CUDA graph*, a list of launches that is replayed with one call. A
# replay took the CPU 5 µs.
#
# A graph fixes every grid and every pointer. Lengths may change between tokens, because the kernel reads them from
# memory. The number of splits may not, because it is part of the grid. So you choose it for the longest sequence that
# the graph will serve. Shorter sequences then have shorter splits, and below `splits` tokens some splits have no keys
# at all. The next cell shows what that costs.

# %%
from course_lib.kernels.decode.attention import decode_attention

fixed = library_choice(1, 8, 131072, 132)
print(f"{fixed} splits, chosen for 131,072 tokens and 132 multiprocessors")
print(f"{'length':>8}{'keys of a split':>17}{'splits with keys':>18}{'partial results':>17}{'of the cache':>14}")
for length in (1, 20, 100, 1000, 10_000, 131_072):
    size = -(-length // fixed)
    with_keys = -(-length // size)
    moved, cached = 2 * fixed * 32 * 129 * 4, 2 * 8 * length * 128 * 2
    share = f"{moved / cached:.1%}" if moved < cached else f"{moved / cached:.3g} times"
    print(f"{length:>8,}{size:>17,}{with_keys:>18}{format_bytes(moved):>17}{share:>14}")

# %% [markdown]
# The partial results stay at half a megabyte. For a short sequence that is many times its cache, but an H200 moves it
# in an eighth of a microsecond, less than a launch.
#
# On a GPU the next cell records one step for 131,072 tokens and replays it while the sequence grows. The results stay
# right, and the time follows the length, although nothing is recorded again.

# %%
if on_gpu:
    from course_lib.kernels.decode.workspace import decode_workspace

    query, key_cache, value_cache, lengths = cache_of(131072)
    fixed = library_choice(1, 8, 131072, multiprocessors)
    workspace, output = decode_workspace(1, 32, 128, fixed, device=device), torch.empty_like(query)
    step = partial(decode_attention, query, key_cache, value_cache, lengths, splits=fixed, output=output,
                   workspace=workspace, validate=False)
    step()  # compiled before it is recorded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for length in (1, 20, 1000, 8192, 32768, 131072):
        lengths.fill_(length)
        replayed = measure(graph.replay, seconds=0.1, device=device).median
        launched = decode_attention(query, key_cache, value_cache, lengths)
        print(f"{length:>8,} tokens: {format_seconds(replayed):>8}, "
              f"differs from a launch of its own by {(output - launched).abs().max().item():.1e}")
else:
    print(f"A CUDA graph needs a GPU. Its grid of 8 × {fixed} programs would stay; the lengths they read may change.")

# %% [markdown]
# ## The race · deeper
#
# PyTorch's FlashAttention-2 backend splits the keys too. On the H200 used for this course it reads the question's cache
# in 156 µs, at 3.44 TB/s, and cuDNN reads it at 3.92 TB/s. Beat FlashAttention-2. The cache is contiguous, in bfloat16,
# and every key counts. You choose the splits, the tiles, and one launch or two. On Hopper you pass when you are not
# slower. Elsewhere 0.85 times its speed is enough, because FlashAttention-2 was written for the A100. On a T4 only the
# numbers are checked.
#
# Three things make the difference:
#
# - **Bytes in flight.** By Little's law each multiprocessor must have $4.37\,\text{TB/s} \cdot 0.8\,\text{µs} / 132$ =
#   26 KB in flight at any time. With tiles of 128 keys a program loads 64 KB while it works on 64 KB. That takes 128 KB
#   of shared memory, so only one program fits on a multiprocessor, and 16 splits of 8 heads make one wave.
# - **Warps that do not wait for each other.** A tile of scores has only 16 rows, so its four warps divide the columns
#   among them. In every tile they must exchange each row's maximum and sum through shared memory. You need the maximum
#   at once, but not the sum: keep one sum for each column, and add them up after the last tile.
# - **No masks in the main loop**, and a merge that loads all parts at once.

# %%
# Exercise 8.6 · Beat FlashAttention-2 at 128k
@triton.jit
def fast_step(
    query, key_pointer, value_pointer, key_stride, value_stride, start, last, running_max, column_sums, accumulator,
    scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):
    """One tile of keys and values. Only a split's last tile is MASKED."""
    # BEGIN SOLUTION
    keys = (start + tl.arange(0, BLOCK_N)).to(tl.int64)  # [BLOCK_N]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    key_pointers = key_pointer + keys[:, None] * key_stride + columns[None, :]  # [BLOCK_N, HEAD_DIM]
    value_pointers = value_pointer + keys[:, None] * value_stride + columns[None, :]
    if MASKED:
        key_tile = tl.load(key_pointers, mask=(keys < last)[:, None], other=0.0)
        value_tile = tl.load(value_pointers, mask=(keys < last)[:, None], other=0.0)
    else:  # read once and never again: the first that the L2 may forget
        key_tile = tl.load(key_pointers, eviction_policy="evict_first")
        value_tile = tl.load(value_pointers, eviction_policy="evict_first")
    scores = tl.dot(query, tl.trans(key_tile))  # [BLOCK_G, BLOCK_N], not yet scaled
    if MASKED:
        scores = tl.where((keys < last)[None, :], scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, axis=1) * scale_log2)  # [BLOCK_G]
    weights = tl.exp2(scores * scale_log2 - new_max[:, None])  # [BLOCK_G, BLOCK_N]
    rescale = tl.exp2(running_max - new_max)  # [BLOCK_G]
    column_sums = column_sums * rescale[:, None] + weights  # added up after the last tile
    accumulator = tl.dot(weights.to(value_tile.dtype), value_tile, accumulator * rescale[:, None])
    return new_max, column_sums, accumulator
    # END SOLUTION


@triton.jit
def fast_split_kernel(
    query_pointer, key_pointer, value_pointer, outputs_pointer, lses_pointer,
    query_batch_stride, query_head_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, context, split_length, scale_log2,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Program (split, KV head, sequence): whole tiles of its split first, what is left over after them."""
    # BEGIN SOLUTION
    split, key_head, key_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    sequence, batch = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    members = tl.arange(0, BLOCK_G)  # [BLOCK_G]
    heads = key_head * GROUP + members  # [BLOCK_G]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    query_offsets = sequence * query_batch_stride + heads[:, None] * query_head_stride + columns[None, :]
    query = tl.load(query_pointer + query_offsets, mask=(members < GROUP)[:, None], other=0.0)  # [BLOCK_G, HEAD_DIM]
    key_pointer += sequence * key_batch_stride + key_head.to(tl.int64) * key_head_stride
    value_pointer += sequence * value_batch_stride + key_head.to(tl.int64) * value_head_stride
    first = split * split_length
    last = tl.minimum(first + split_length, context)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    running_max = tl.full([BLOCK_G], float("-inf"), tl.float32)
    column_sums = tl.zeros([BLOCK_G, BLOCK_N], tl.float32)
    accumulator = tl.zeros([BLOCK_G, HEAD_DIM], tl.float32)
    for start in range(first, whole, BLOCK_N):
        running_max, column_sums, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, start, last, running_max, column_sums,
            accumulator, scale_log2, HEAD_DIM, BLOCK_N, MASKED=False)
    if whole < last:
        running_max, column_sums, accumulator = fast_step(
            query, key_pointer, value_pointer, key_stride, value_stride, whole, last, running_max, column_sums,
            accumulator, scale_log2, HEAD_DIM, BLOCK_N, MASKED=True)
    total = tl.sum(column_sums, axis=1)  # [BLOCK_G]; at least 1, as no split is empty
    rows = (split * batch + sequence) * key_heads * GROUP + heads  # [BLOCK_G]
    output_offsets = rows[:, None] * HEAD_DIM + columns[None, :]
    tl.store(outputs_pointer + output_offsets, accumulator / total[:, None], mask=(members < GROUP)[:, None])
    tl.store(lses_pointer + rows, running_max + tl.log2(total), mask=members < GROUP)  # in units of log 2
    # END SOLUTION


@triton.jit
def fast_combine_kernel(
    outputs_pointer, lses_pointer, output_pointer, splits, HEAD_DIM: tl.constexpr, BLOCK_S: tl.constexpr
):
    """Program r: row r of all splits."""
    # BEGIN SOLUTION
    row, rows = tl.program_id(0), tl.num_programs(0)
    members = tl.arange(0, BLOCK_S)  # [BLOCK_S]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    present = members < splits
    partial_rows = members * rows + row  # [BLOCK_S]
    lses = tl.load(lses_pointer + partial_rows, mask=present, other=float("-inf"))  # [BLOCK_S]
    partial_offsets = partial_rows[:, None] * HEAD_DIM + columns[None, :]
    parts = tl.load(outputs_pointer + partial_offsets, mask=present[:, None], other=0.0)  # [BLOCK_S, HEAD_DIM]
    weights = tl.exp2(lses - tl.max(lses, axis=0))  # [BLOCK_S]; the first split always has keys
    output = tl.sum(weights[:, None] * parts, axis=0) / tl.sum(weights, axis=0)  # [HEAD_DIM]
    tl.store(output_pointer + row * HEAD_DIM + columns, output.to(output_pointer.dtype.element_ty))
    # END SOLUTION


def fast_decode(query, key, value):
    """Attention of one query per sequence, faster than PyTorch's FlashAttention-2.

    Args:
        query: [batch, query_heads, head_dim], float16 or bfloat16, head_dim 64 or 128; contiguous.
        key, value: [batch, key_heads, context, head_dim], contiguous, context at least 1; every key counts. query_heads
            is a multiple of key_heads.

    Returns:
        [batch, query_heads, head_dim], in query's dtype.
    """
    # BEGIN SOLUTION
    batch, query_heads, head_dim = query.shape
    key_heads, context = key.shape[1:3]
    group = query_heads // key_heads
    slots = torch.cuda.get_device_properties(query.device).multi_processor_count  # one large program on each
    capability = torch.cuda.get_device_capability(query.device)
    if capability in ((8, 0), (9, 0), (10, 0)):  # 128 KB of shared memory at head dimension 128
        tiles = {"BLOCK_N": 128, "num_warps": 4, "num_stages": 3}
    elif capability >= (8, 0):
        tiles = {"BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    else:  # no matrix instructions: both products take their operands from registers
        tiles = {"BLOCK_N": 32, "num_warps": 8, "num_stages": 1}
    splits = max(1, min(slots // (batch * key_heads), triton.cdiv(context, 128), 128))
    split_length = triton.cdiv(triton.cdiv(context, splits), tiles["BLOCK_N"]) * tiles["BLOCK_N"]
    splits = triton.cdiv(context, split_length)  # whole tiles each: the last splits may have become empty
    outputs = torch.empty(splits, batch, query_heads, head_dim, dtype=torch.float32, device=query.device)
    lses = torch.empty(splits, batch, query_heads, dtype=torch.float32, device=query.device)
    output = torch.empty_like(query)
    fast_split_kernel[(splits, key_heads, batch)](
        query, key, value, outputs, lses, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], context,
        split_length, math.log2(math.e) / math.sqrt(head_dim), GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)), HEAD_DIM=head_dim, **tiles,
    )
    fast_combine_kernel[(batch * query_heads,)](
        outputs, lses, output, splits, HEAD_DIM=head_dim, BLOCK_S=triton.next_power_of_2(splits)
    )
    return output
    # END SOLUTION

# %%
best_fast_decode = check("8.6", fast_decode).best

# %% [markdown]
# ## Constant time, until bandwidth rules
#
# Now measure what Flash-Decoding promised. With few tokens, a step mostly launches, waits for the first bytes and
# merges. That takes the same time for any context, so the curve is flat. As the context grows, the time approaches the
# floor, the bytes divided by the bandwidth. Without splits there is hardly a flat part, because eight programs read so
# slowly that even a short cache takes long. On a GPU every step is replayed from a CUDA graph (a recorded list of
# launches), so that Python's own time does not hide the curve.
#
# **Predict** where the curve bends. If the flat part takes 10 µs, an H200 reads 44 MB in that time, which is 10,700
# tokens of 4096 bytes. On a CPU the two lines differ by the number of cores once there is enough work to share. Both
# begin below the floor, because a short context fits into the CPU's caches.

# %%
from course_lib.figures.attention.context_scaling import context_scaling_figure
from course_lib.hardware.graphs import captured  # a function as a CUDA graph, made as above


def sdpa_flash_decode(query, key, value):
    """PyTorch's FlashAttention-2 backend, for one query of each sequence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=True)[:, :, 0]


def times_over_context(contexts):
    """{name: {context: seconds}} of one step of decode."""
    times = {}
    for context in contexts:
        if on_gpu:
            query, key, value, lengths = tensors = cache_of(context)
            buffers = {"output": torch.empty_like(query),
                       "workspace": decode_workspace(1, 32, 128, library_choice(1, 8, context, multiprocessors))}
            runs = {
                "one program per KV head": partial(decode_attention, *tensors, splits=1, validate=False),
                "yours (8.6)": partial(best_fast_decode, query, key, value),
                "the library's": partial(decode_attention, *tensors, **buffers, validate=False),
            }
            if supports_bfloat16():
                runs["FlashAttention-2"] = partial(sdpa_flash_decode, query, key, value)
        else:
            query, key, value = torch.randn(1, 128), torch.randn(context, 128), torch.randn(context, 128)
            runs = {
                "one core": partial(F.scaled_dot_product_attention, *(t[None, None] for t in (query, key, value))),
                f"splits, {threads} cores": partial(in_splits, query, key, value, 2 * threads),
            }
        for name, run in runs.items():
            timing = measure(captured(run) if on_gpu else run, seconds=0.15, device=device)
            times.setdefault(name, {})[context] = timing.median if on_gpu else timing.best
    return times


contexts = [1024 * 2**power for power in (range(10) if on_gpu else range(8))]
times = times_over_context(contexts)
roof = ceilings().memory_bandwidth if on_gpu else ceilings().read_bandwidth
bytes_per_token = 2 * 8 * 128 * 2 if on_gpu else 2 * 128 * 4
heads = "32 query heads on 8 KV heads" if on_gpu else "1 head"
context_scaling_figure(times, bytes_per_token, roof, f"1 sequence, {heads} of dimension 128")

# %% [markdown]
# ## Predicted against measured
#
# Back to the question, at 131,072 tokens. *Predicted* is your model of 8.4 with this machine's bandwidths. On a CPU the
# slots are the cores. On a GPU the first prediction is right by construction, because one program's rate was taken from
# that run. The second is the test.

# %%
if on_gpu:
    predicted = {name: 1e-6 * best_decode_microseconds(splits, 1, 32, 8, 131072, 128, 2, chip)
                 for name, splits in (("one program per KV head", 1), ("the library's", multiprocessors // 8))}
else:
    core = bytes_per_token * 131072 / times["one core"][131072]
    here = {"slots": threads, "bandwidth": roof, "program_bandwidth": core, "start_seconds": 0, "launch_seconds": 0}
    predicted = {name: kernel_seconds(programs, 131072 * bytes_per_token / programs, here)
                 for name, programs in zip(times, (1, threads))}
print(f"{'':28}{'predicted':>11}{'measured':>11}{'ratio':>8}{'of the bandwidth':>19}")
for name, line in times.items():
    seconds = line[131072]
    share = bytes_per_token * 131072 / seconds / roof
    told = format_seconds(predicted[name]) if name in predicted else "–"
    ratio = f"{seconds / predicted[name]:.2f}" if name in predicted else "–"
    print(f"{name:28}{told:>11}{format_seconds(seconds):>11}{ratio:>8}{share:>19.0%}")

# %% [markdown]
# ## Finale: your splits run the model
#
# Chapter 05's small model now writes with your two kernels: 8.2 computes the splits and 8.3 merges them. It has four
# layers of 4 query heads on 2 KV heads of dimension 32, in float32. First check that it writes the same text with one
# split and with several.

# %%
import textwrap

from course_lib.models.plugged import decode_in_splits, who_runs
from course_lib.models.trained import trained_model
from course_lib.serving.caches.new import new_cache
from course_lib.serving.generation import complete

decoder = trained_model("tiny", device=device).requires_grad_(False)
print(who_runs({"splits (8.2)": best_split_attention, "merge (8.3)": best_combine_splits,
                "how many (8.4)": best_choose_splits}))
texts = []
for splits in (1, 4):
    decode = decode_in_splits(best_split_attention, best_combine_splits, splits)
    cache = new_cache(decoder, 1, 256, decode=decode)
    texts.append("Alice was " + complete(decoder, "Alice was ", 200 if on_gpu else 16, cache=cache))
    programs = 2 * splits
    print(f"{splits} {'split' if splits == 1 else 'splits'}, {programs} programs a layer:")
    print(textwrap.indent(textwrap.fill(texts[-1], 100), "    "))
print("the same text:", texts[0] == texts[1])

# %% [markdown]
# With 200 bytes of text, splitting gains nothing. Now suppose the context is 131,072 tokens. A token stores
# $2 \cdot 2 \cdot 32 \cdot 4 = 512$ bytes in each layer, so a layer's cache has 67 MB. Without splits two programs read
# it. A row of a tile has 128 bytes here, half of the question's 256. So a program has half as many bytes in flight, and
# 8.4's model gives it half the rate.
#
# **Predict**: how long does attention take for one token, in all four layers, with one split and with as many as your
# rule of 8.4 chooses? From which context on does the difference matter?

# %%
small = chip | {"program_bandwidth": chip["program_bandwidth"] / 2}
long_contexts = (1024, 8192, 32_768, 65_536, 131_072)
paper_times = {"one program for each KV head": {}, "the keys in splits": {}}
print(f"{'tokens':>8}{'cache':>10}{'splits':>8}{'keys of one program':>21}{'one split':>12}{'in splits':>13}")
for context in long_contexts:
    shape = (1, 4, 2, context, 32, 4, small)
    splits = best_choose_splits(*shape)
    row = [4e-6 * best_decode_microseconds(number, *shape) for number in (1, splits)]  # four layers
    for line, seconds in zip(paper_times.values(), row):
        line[context] = seconds
    print(f"{context:>8,}{format_bytes(4 * 512 * context):>10}{splits:>8}{-(-context // splits):>21,}"
          f"{format_seconds(row[0]):>12}{format_seconds(row[1]):>13}")

# %% [markdown]
# On a GPU the next cell measures whole steps of the model: attention, and everything else that PyTorch does for a
# token. The rest takes the same time at any context, about 3 ms in chapter 05's run on an H200. Without a GPU the cell
# draws the prediction, because a kernel's time in the interpreter means nothing. (The cache holds zeros instead of a
# text. The model has learned from pieces of 256 bytes, so a text this long would mean nothing to it. The time is the
# same.)

# %%
from course_lib.figures.cache.step_times import draw_step_times


def token_seconds(splits, context):
    """Seconds of one step of the model, one new token behind context - 1 others."""
    decode = decode_in_splits(best_split_attention, best_combine_splits, splits)
    cache = new_cache(decoder, 1, context, decode=decode)
    cache.keys.zero_(), cache.values.zero_()
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)

    def one_step():
        cache.length = context - 1
        decoder(token, cache, last_only=True)

    with torch.inference_mode():
        return measure(one_step, seconds=0.3, device=device).median


if on_gpu:
    drawn, title = {name: {} for name in paper_times}, "One token of the small model"
    for context in long_contexts:
        numbers = (1, best_choose_splits(1, 4, 2, context, 32, 4, small))
        for line, splits in zip(drawn.values(), numbers):
            line[context] = token_seconds(splits, context)
        slow, fast = (line[context] for line in drawn.values())
        print(f"{context:>8,} tokens: {1 / slow:>5,.0f} bytes of text a second with one split, {1 / fast:>5,.0f} with "
              f"{numbers[1]}, {slow / fast:.1f} times as many")
else:
    drawn, title = paper_times, "Attention for one token, predicted for the H200 of 8.4"
draw_step_times(drawn, title)

# %% [markdown]
# One line climbs with the context and the other stays nearly flat. Both read the same keys, values and weights. You
# only changed how many programs read them.

# %% [markdown]
# Your splits can also run SmolLM2, a published model of 135 million parameters that answers questions. It has 30 layers
# of 9 query heads on 3 KV heads of dimension 64, so 4 splits make 12 programs a layer. The model is fetched only if you
# set `REAL_MODEL = True` below: 93 MB, once. Without a GPU your kernels then run its first layer, and PyTorch's
# attention the other 29. If you add `layers=30` to the last line, yours run all of them, and a token takes a second or
# two.

# %%
from course_lib.serving.published import ask_published_model

REAL_MODEL = False


def your_splits(model, tokens):
    """An empty cache that your kernels read in 4 splits, for one text of so many tokens."""
    return new_cache(model, 1, tokens, decode=decode_in_splits(best_split_attention, best_combine_splits, 4))


ask_published_model(REAL_MODEL, your_splits)

# %% [markdown]
# ## Check yourself
#
# Answer these on paper, with the numbers of your own GPU, or of an H200 if you have none. Then run the next cell and
# open the answers.
#
# 1. A model has 8 KV heads. What share of the multiprocessors works on one sequence without splits?
# 2. How many splits make one full wave? And what does one more split do?
# 3. How long must a layer take at least with 131,072 keys, 8 KV heads of dimension 128 and 2 bytes an element?
# 4. How many bytes of partial results does your answer to 2 make for 32 query heads, and how much is that beside the
#    keys and values?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
slots, context_bytes = chip["slots"], 2 * 8 * 131072 * 128 * 2
splits = max(1, slots // 8)
partial_bytes = 2 * splits * 32 * (128 + 1) * 4  # written once and read once
self_check(
    f"8 programs on {slots} multiprocessors: {min(1, 8 / slots):.0%}.",
    f"{splits} splits make {8 * splits} programs. {splits + 1} make {8 * (splits + 1)}, and those beyond {slots} wait "
    "for a second wave, which is nearly as long as the first.",
    f"{format_bytes(context_bytes)} at {format_bandwidth(chip['bandwidth'])}: "
    f"{format_seconds(context_bytes / chip['bandwidth'])}.",
    f"{format_bytes(partial_bytes)}, written and read: {partial_bytes / context_bytes:.2%} of the keys and values.",
)

# %% [markdown]
# ## What production systems do
#
# **FlashAttention** takes `num_splits` when it reads a cache: 0 uses the rule above, and 1 switches splitting off.
# PyTorch's copy uses the same rule. FlashAttention-3 has a lower threshold for short contexts.
#
# **FlashInfer** has two calls, `plan` and `run`. Once per token, `plan` searches for the smallest chunk, at least 128
# tokens, for which all chunks of all sequences still fit the grid. So a long sequence among short ones gets many
# programs and the short ones get one each. Its log-sum-exps are in base 2, FlashAttention's in base e. If you merge
# across GPUs, you must know which.
#
# **vLLM** calls either library. With FlashAttention-3 and CUDA graphs it allows at most 32 splits by default, so that
# the buffers for partial results have a fixed size.
#
# Flash-Decoding's authors measured on an A100: attention up to 50 times as fast as FlashAttention at long contexts,
# nearly constant time up to 32k, and up to 8 times the tokens per second end to end.
#
# ## Papers
#
# - T. Dao, D. Haziza, F. Massa, G. Sizov: *Flash-Decoding for long-context inference*, October 2023,
#   [pytorch.org/blog/flash-decoding](https://pytorch.org/blog/flash-decoding/). Exercises 8.2 and 8.3.
# - M. Milakov, N. Gimelshein: *Online normalizer calculation for softmax*, 2018,
#   [arXiv 1805.02867](https://arxiv.org/abs/1805.02867). Section 3.1 merges parts of a row in any order.
# - Z. Ye et al.: *FlashInfer: Efficient and Customizable Attention Engine for LLM Inference Serving*, 2025,
#   [arXiv 2501.01005](https://arxiv.org/abs/2501.01005). Plan and run, merging as an operator.

# %%
progress()
