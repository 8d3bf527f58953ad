# %% [markdown]
# # 14 · Launches and CUDA graphs: when the host is slower than the GPU
#
# **The question.** Llama-3.2-1B has 1.24 billion weights, which take 2.47 GB in 16 bits. To write one token for one
# sequence, a decode step reads all of them once. An H200 does that in 0.57 ms, at the 4.37 TB/s that we measured for a
# read. A step with few kernels has about 190: 16 layers with about a dozen each. A small operation costs PyTorch 5 to
# 10 µs of the host's time, and more on a slow host. (The *host* is the CPU that runs your Python.) At 8 µs, 190 kernels
# take the host 1.5 ms. So the GPU could be done after 0.57 ms, but by then the host has not even launched half of the
# kernels.
#
# How long does the step take, and how can you shorten it without making a single kernel faster? Write down a guess: how
# much longer than the sum of its kernels does such a step take, and how close to that sum can you get?
#
# **Time.** About five and a half hours, estimated; the **core path** of two hours is exercises 14.1 and 14.2 and every
# section whose heading does not end in *deeper*. You need chapters 01, 05 and 08.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
import time

import torch
import triton
import triton.language as tl

from course_lib.hardware.units import format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a launch costs
#
# A *launch* is the call that sends one kernel to the GPU. It passes through several layers of software, and each layer
# takes some of the host's time:
#
# - Python calls the operation. PyTorch picks the kernel for it, by dtypes, devices and gradients, and allocates memory
#   for the result.
# - If the kernel is a Triton kernel, Triton's launcher looks at every argument. Is this number 1? Is that pointer a
#   multiple of 16? The answers decide which compiled version runs.
# - The driver writes the kernel's name and arguments into a queue in memory. The GPU reads this queue.
# - The GPU takes the next entry from the queue and starts the kernel's programs. Between two kernels of a graph this
#   took 0.2 to 1.3 µs on an H100 (recorded; the picture of a layer below shows it).
#
# The call returns as soon as the entry is in the queue, so the host can run ahead of the GPU. It stops only where it
# needs a number that the GPU computes, for example at `.item()`.
#
# The next cell measures the host's part on your machine. It uses the smallest work there is, one addition to 16
# numbers. On a GPU it also measures one of the course's Triton kernels, called in three ways:
#
# - *Decided anew*, as at a first call: the launcher checks its arguments, chooses tiles and splits and allocates the
#   result, and Triton looks at every argument.
# - *Kept*, as at every call from the fourth on with tensors of the same shapes, strides and dtypes, whose addresses are
#   multiples of 16 bytes if the earlier ones were. None of those decisions can have changed, so the course keeps what
#   the driver was given. It allocates a new result, puts the new addresses into the kernel's arguments, and launches.
#   A call that reads the lengths to check them decides anew each time; here it has `validate=False`.
# - *Prepared*: the result's memory is kept, too.
#
# **Predict** how long the host takes for PyTorch's addition.

# %%
predict("14 host time of one small operation", ..., "µs")

# %%
small = torch.zeros(16, device=device)


def host_seconds(function, calls=300):
    """Seconds of the host's time for one call. It waits for the GPU only after all calls were made."""
    function()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    seconds = (time.perf_counter() - start) / calls
    if on_gpu:
        torch.cuda.synchronize()
    return seconds


one_operation = host_seconds(lambda: small.add_(1.0))
measured("14 host time of one small operation", one_operation * 1e6, "µs")
print(f"PyTorch's addition: {format_seconds(one_operation)} of the host's time"
      + ("" if on_gpu else " (on a CPU: it computes the sum too, and launches nothing)"))
if on_gpu:
    from functools import partial

    from course_lib.kernels.decode.attention import decode_attention

    query = torch.randn(1, 32, 128, device=device, dtype=torch.float16)
    cache = torch.randn(2, 1, 8, 4096, 128, device=device, dtype=torch.float16)
    lengths = torch.full((1,), 4096, dtype=torch.int32, device=device)
    attend = partial(decode_attention, query, *cache, lengths, validate=False)
    from course_lib.hardware.kept import deciding_anew
    from course_lib.hardware.prepared import prepared

    with deciding_anew():
        print(f"The course's decode kernel, decided anew: {format_seconds(host_seconds(attend))} of the host's time")
    for _ in range(4):  # until it is kept
        attend()
    print(f"The same call, kept:                      {format_seconds(host_seconds(attend))}")

    step = prepared(decode_attention, query, *cache, lengths, validate=False)
    call = partial(step, query, *cache, lengths)
    print(f"The same call, prepared:                  {format_seconds(host_seconds(call))}. {step.reason or ''}")

# %% [markdown]
# On an H200, whose host takes 7.1 µs for the addition, the three calls take 128, 19 and 8.7 µs.
#
# ## Who waits for whom
#
# The host launches kernels one after another. A kernel starts when two things are done: its own launch, and the kernel
# before it. So there are two cases. If kernels take longer than launches, the host runs ahead, and the time of its
# launches is hidden. If launches take longer than kernels, the GPU finishes each kernel and then waits for the next one
# to arrive. Such a step is called *launch-bound*.
#
# The picture shows three steps of six kernels, each launched in 8 µs. In the first step, every kernel takes 3 µs. In
# the second, the first kernel is long, and it hides the launches behind it. In the third, the host reads a number after
# the third kernel, so it has to wait for that kernel. An engine that looks at each new token does the same.

# %%
from course_lib.figures.launches.timeline import draw_timelines

draw_timelines([
    ("launch-bound", [8.0] * 6, [3.0] * 6, ()),
    ("a long kernel first", [8.0] * 6, [40.0] + [3.0] * 5, ()),
    ("the host reads a number", [8.0] * 6, [40.0] + [3.0] * 5, (2,)),
])

# %% [markdown]
# In the first step the GPU is busy for a third of the time. Kernels that are twice as fast would save only 1.5 µs, at
# the very end. In the second step, the host has launched everything by the time the long kernel ends. In the third, the
# host stands still until the third kernel has ended, so the launches after it are no longer hidden.
#
# In 14.1 you compute these times. They are all in one unit, and it does not matter which.

# %%
# Exercise 14.1 · Who waits for whom
def step_seconds(launches: tuple, kernels: tuple, waits: tuple) -> float:
    """The time from the start of the first launch to the end of the last kernel; 0 for no kernels.

    launches: how long the host takes to launch each kernel. kernels: how long each kernel runs. Both have one entry for
        each kernel.
    waits: the kernels that the host waits for, as numbers counted from 0, in any order. After launching such a kernel,
        the host waits until that kernel has ended, and only then starts the next launch.
    The host launches the kernels in order, one launch after another. A kernel starts as soon as its own launch and the
    kernel before it have both ended.
    """
    # BEGIN SOLUTION
    host = end = 0.0
    for number, (launch, kernel) in enumerate(zip(launches, kernels)):
        host += launch
        end = max(host, end) + kernel
        if number in waits:
            host = end
    return end
    # END SOLUTION


def idle_seconds(launches: tuple, kernels: tuple, waits: tuple) -> float:
    """How much of the time that step_seconds returns passes while no kernel runs. Arguments as above."""
    # BEGIN SOLUTION
    return step_seconds(launches, kernels, waits) - sum(kernels)
    # END SOLUTION


def graph_seconds(launch: float, kernels: tuple, gap: float) -> float:
    """The time of the same kernels if the host sends them all with one launch, and the GPU starts them by itself.

    launch: how long that launch takes; the first kernel starts when it has ended. kernels: how long each kernel runs;
        at least one. gap: the time from the end of a kernel to the start of the next one.
    """
    # BEGIN SOLUTION
    return launch + sum(kernels) + gap * (len(kernels) - 1)
    # END SOLUTION


# %%
verdict = check("14.1", step_seconds, idle_seconds, graph_seconds)
best_step_seconds, best_idle_seconds, best_graph_seconds = verdict.best

# %% [markdown]
# Now take the step of the question: 190 kernels, each launched in 8 µs, that together take 0.57 ms on the GPU. A graph,
# which the next section explains, sends the same kernels with one launch of 10 µs, and the GPU leaves gaps of 0.3 µs
# between them. The 8, 10 and 0.3 µs are assumptions for the prediction; on a GPU you measure your own below.
# **Predict** how many times as fast the graph is.

# %%
predict("14 step of Llama-3.2-1B, launched one by one over as a graph", ..., "times")

# %%
kernels = (570e-6 / 190,) * 190
one_by_one, as_graph = best_step_seconds((8e-6,) * 190, kernels, ()), best_graph_seconds(10e-6, kernels, 0.3e-6)
measured("14 step of Llama-3.2-1B, launched one by one over as a graph", one_by_one / as_graph, "times")
idle = best_idle_seconds((8e-6,) * 190, kernels, ())
print(f"launched one by one: {format_seconds(one_by_one)}, of which the GPU idles {format_seconds(idle)}\n"
      f"as a graph:          {format_seconds(as_graph)}; the kernels alone {format_seconds(sum(kernels))}")

# %% [markdown]
# > **The answer to the first question: by this count 1.5 ms, and in plain PyTorch 26 ms.** The launches decide how long
# > the step takes, because each one is longer than its kernel. A graph brings the counted step to 0.64 ms, 0.07 ms
# > above the sum of its kernels. A real step has more calls. The course's decoder, in plain PyTorch, makes about 1,370
# > a step, at 19 µs each on the host of one H100: 26.5 ms (recorded, November 2026, batch 1). As a graph the same step
# > took 3.1 ms, and with five kernels a layer 1.1 ms.
#
# So count your own calls before you believe an estimate. Others measured this model at batch 1 with a graph whose
# kernels start before the one before them has ended: 0.79 ms on an H200, and 0.98 ms on an H100
# ([msaroufim/megakernels-vs-cuda-graphs](https://github.com/msaroufim/megakernels-vs-cuda-graphs)).
#
# ## Record once, replay often
#
# A *CUDA graph* is a list of kernels with all their arguments, which the driver has prepared for launching. First you
# *capture* it: you run the step in a mode where nothing is computed, and every launch is written into the list instead.
# Then you *replay* it as often as you like. A replay is one call, which takes the host 5 to 10 µs for the whole list.
#
# A replay runs none of your Python. Everything that Python decided during the capture stays as it was:
#
# | in the step | in every replay |
# |---|---|
# | a Python number, such as a length or a position | the number from the capture |
# | a pointer to a tensor | the same memory, with whatever is in it now |
# | the size of a grid, the number of splits | the same as in the capture |
# | a branch or a loop (`if`, `for`) | the path that the capture took |
# | a new tensor | the same memory each time, so a replay overwrites the last one's result |
#
# So a step that you want to capture has to follow three rules:
#
# 1. Its inputs are in *static buffers*, tensors that keep their memory. Before each replay you copy the new token into
#    them.
# 2. Its kernels read numbers that change, such as positions, from tensors.
# 3. Nothing in it makes the host wait. `.item()`, `int(tensor)` and `if tensor:` need a number from the GPU, and during
#    a capture there is none. A boolean mask as an index, `x[mask]` or `x[mask] = y`, needs one too: how many places the
#    mask has. Only storing a single number, `x[mask] = 0.0`, waits for nothing, because PyTorch makes `masked_fill` of
#    it.
#
# Many mistakes give no error message, only wrong results. Here are three real bugs:
#
# - A kernel of a captured step was launched into the wrong stream (the queue of launches). The capture succeeded
#   without that kernel, and the replays gave wrong numbers
#   ([rwkv_lightning#24](https://github.com/RWKV-Vibe/rwkv_lightning/pull/24)).
# - A short prompt fixed the number of splits (chapter 08). With a longer prompt, the same graph read outside its memory
#   ([imp#950](https://github.com/kekzl/imp/issues/950)).
# - Graphs were looked up by batch size alone, so a step got a graph that was captured for other lengths
#   ([aprender#2030](https://github.com/paiml/aprender/issues/2030)).
#
# In 14.2 you write a decode step that can be captured. A recorder checks it without a GPU. Your step runs once while
# the recorder lists PyTorch's operations, with their numbers and their tensors. Then the recorder repeats the list on
# the same memory, with new contents and at other positions. It does not call your function again.

# %%
# Exercise 14.2 · A step that a graph can record
def decode_step(query, key, value, positions, key_cache, value_cache, output) -> None:
    """Attention of one new token of each sequence, written so that a graph can record it.

    query, key, value: [batch, heads, head_dim], for the new token. positions: int64 [batch], how many tokens of each
        sequence are already in the caches; below capacity. All four get new contents before each replay.
    key_cache, value_cache: [batch, heads, capacity, head_dim]. Behind a sequence's tokens there are finite numbers that
        other sequences have left. Any of batch, heads, head_dim and capacity is at least 1.
    output: [batch, heads, head_dim], where the result goes.
    The new key and value are stored in the caches at each sequence's position. Then the query attends to all tokens of
    its sequence, including the new one, with the scale 1/√head_dim.
    Returns: None. No operation may need a number on the host. Before it is recorded, the step runs once to warm up.
    """
    # BEGIN SOLUTION
    batch, _, capacity, head_dim = key_cache.shape
    rows = torch.arange(batch, device=query.device)
    key_cache[rows, :, positions] = key
    value_cache[rows, :, positions] = value
    scores = (key_cache @ query[..., None])[..., 0] / math.sqrt(head_dim)  # [batch, heads, capacity]
    seen = torch.arange(capacity, device=query.device) <= positions[:, None]  # [batch, capacity]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)
    output.copy_((weights[:, :, None] @ value_cache)[:, :, 0])
    # END SOLUTION


# %%
best_decode_step = check("14.2", decode_step).best

# %% [markdown]
# On a GPU the next cell captures your step with the course's `captured`, which warms up, captures, and returns a
# function that replays. The cell times calls of your step from Python against replays. **Predict** how many times as
# fast the replay is.

# %%
predict("14 your step, called over replayed", ..., "times")

# %%
if on_gpu:
    from course_lib.hardware.graphs import captured
    from course_lib.hardware.timing import measure_together

    def buffers(batch=1, heads=32, capacity=1024, head_dim=128):
        rows = [torch.randn(batch, heads, head_dim, device=device, dtype=torch.float16) for _ in range(3)]
        caches = torch.randn(2, batch, heads, capacity, head_dim, device=device, dtype=torch.float16)
        return *rows, torch.full((batch,), 500, device=device), *caches, torch.empty_like(rows[0])

    call = partial(best_decode_step, *buffers())
    times = measure_together({"called": call, "replayed": captured(call)}, device=device)
    for name, timing in times.items():
        print(f"{name:9} {format_seconds(timing.median)}")
    measured("14 your step, called over replayed", times["called"].median / times["replayed"].median, "times")
else:
    print("No GPU here, so nothing was captured. Whether a step can be captured, the recorder of 14.2 says.")

# %% [markdown]
# The kernels are the same in both cases. What the replay saves is the host's time for the launches. On one H100
# (2026-11-26, PyTorch 2.11) the course's answer took 340 µs when called and 43 µs when replayed, with the sizes of the
# cell. Its step is about a dozen operations, so one of them cost the host 28 µs on average. That is more than an
# addition costs, because some operations, such as storing with tensors as indices, are made of several others.
#
# | a captured step | |
# |---|---|
# | wins | many small kernels: 340 µs become 43 (measured, as above) |
# | loses | where kernels hide their launches, as in a long prompt: no gain, and memory for each graph |
# | falls back | to plain launches, for a batch that no graph fits |
# | trap | a Python number, a length for example, stays what it was at the capture |
#
# ## Batches that come and go · deeper
#
# A graph has one batch size, because the capture fixed its grids. A server has a different batch in each step, because
# requests start and end all the time. So engines capture graphs for a few batch sizes, called *buckets*, and pad each
# batch up to the next bucket. The added rows are computed, and their results are thrown away.
#
# Padding has a danger of its own. The added rows have lengths, positions and cache slots too, and a kernel uses them
# like those of any other row. xLLM padded a batch of 100 to its graph of 112 rows, but filled in the metadata for only
# 100. Nothing valid stood there for the other 12 rows, and the replay read memory that was not theirs
# ([xllm#1939](https://github.com/jd-opensource/xllm/pull/1939)). A padded row needs a length of 0, or a page of the
# cache that nobody reads.
#
# With more buckets you pad less, but each graph takes seconds to capture and megabytes to keep. vLLM captures 1, 2, 4,
# then every multiple of 8 up to 248, and from 256 on every multiple of 16. Which sizes are best depends on how often
# each batch size occurs. In 14.3 you choose them from such a count.

# %%
# Exercise 14.3 · Which batches get a graph
def bucket_for(batch: int, buckets: list) -> int:
    """The smallest bucket that holds the batch. 0 if no bucket does, and the step then runs without a graph.

    buckets: batch sizes in rising order; the list may be empty.
    """
    # BEGIN SOLUTION
    return next((bucket for bucket in buckets if bucket >= batch), 0)
    # END SOLUTION


def choose_buckets(counts: list, most: int) -> list:
    """At most `most` batch sizes, in rising order, chosen so that all steps together are padded with the fewest rows.

    counts: counts[i] is how many steps had i + 1 sequences. At least one is above 0. most: at least 1.
    Each step runs in the smallest bucket that holds it, so bucket - batch rows are added to it. Every batch that
    occurred must have a bucket. If several choices add equally few rows, any of them will do.
    """
    # BEGIN SOLUTION
    sizes = [size for size, count in enumerate(counts, 1) if count]

    def added(first, last):  # rows, if sizes[first] to sizes[last] share the bucket sizes[last]
        return sum(counts[size - 1] * (sizes[last] - size) for size in sizes[first : last + 1])

    best = [(added(0, last), [sizes[last]]) for last in range(len(sizes))]  # for the sizes up to `last`
    for _ in range(most - 1):
        best = [min([(best[i][0] + added(i + 1, last), [*best[i][1], sizes[last]]) for i in range(last)] + [best[last]],
                    key=lambda choice: choice[0])
                for last in range(len(sizes))]
    return best[-1][1]
    # END SOLUTION


# %%
best_bucket_for, best_choose_buckets = check("14.3", bucket_for, choose_buckets).best

# %% [markdown]
# The next cell makes up a day of a small server: most batches are small, and there is a second peak at 12. It compares
# your four buckets with four powers of two.

# %%
counts = [round(4000 * math.exp(-size / 3)) + round(3000 * math.exp(-((size - 12) ** 2) / 4)) for size in range(1, 33)]


def padded_share(buckets):
    rows = sum(count * best_bucket_for(size, buckets) for size, count in enumerate(counts, 1))
    return 1 - sum(count * size for size, count in enumerate(counts, 1)) / rows


for name, buckets in (("powers of two", [4, 8, 16, 32]), ("yours", best_choose_buckets(counts, 4))):
    print(f"{name:14} {buckets}: {padded_share(buckets):.1%} of all rows are padding")

# %% [markdown]
# ## The paged cache in a graph · deeper
#
# In a server's step, more changes than the position. Its cache is cut into pages (chapter 06). For each sequence, a
# *table* says which pages it has, a *slot* says where its new token goes, and a length says how many tokens it has. All
# three are new in each step, and the batch is often smaller than the graph's. So a step with a graph has two halves:
#
# - **Before the replay** the host fills the static buffers. It copies the real rows in and makes the rows behind them
#   harmless. For this, engines keep one page of the cache that belongs to no sequence. Padded rows store their token
#   there.
# - **During the replay** the kernels read everything from these buffers.
#
# Two habits that are fine without a graph go wrong here:
#
# - Without a graph you know the longest length as a Python number, and you look only that far. A graph keeps the number
#   from its recording, so it misses the tokens of a sequence that has grown beyond it.
# - Many kernels take a slot of -1 to mean "store nothing". In PyTorch an index of -1 means the last element, so the
#   token overwrites the end of the last page.
#
# So the graph has to look at the whole width of the table. For short sequences that wastes time, and engines have two
# remedies. Some kernels load the length and end their loop there, as the course's paged kernels do. Or the engine
# captures graphs for several widths, and looks them up by width as well as by batch.
#
# In 14.4 you write both halves in PyTorch. The check records your step with a full batch of short sequences. Then it
# fills the buffers with your function and replays, with smaller batches and with sequences that have grown.

# %%
# Exercise 14.4 · The paged step, replayed
def paged_step(query, key, value, slots, tables, lengths, longest, key_pages, value_pages, output) -> None:
    """One decode step on a paged cache, written so that a graph can record it. It reads static buffers.

    query, key, value: [rows, heads, head_dim], for the new token.
    slots: int64 [rows], where the new token goes: slot s is place s % page_size of page s // page_size.
    tables: int64 [rows, columns], each sequence's pages in order. The columns behind them hold any page numbers.
    lengths: int64 [rows], tokens of each sequence, including the new one, up to columns · page_size.
    longest: the largest length when the step is recorded, a Python number. Later lengths may be larger.
    key_pages, value_pages: [pages, heads, page_size, head_dim]. What is in a page behind a sequence's end is finite.
    output: [rows, heads, head_dim], where the result goes.
    The new key and value are stored in the pages. Then each query attends to all tokens of its sequence, with the scale
    1/√head_dim. Rows of length 0 may get any result. All sizes are at least 1.
    Returns: None. No operation may need a number on the host. Before it is recorded, the step runs once to warm up.
    """
    # BEGIN SOLUTION
    page_size, head_dim = key_pages.shape[2:]
    key_pages[slots // page_size, :, slots % page_size] = key
    value_pages[slots // page_size, :, slots % page_size] = value
    keys = key_pages[tables].transpose(1, 2).flatten(2, 3)  # [rows, heads, columns · page_size, head_dim]
    values = value_pages[tables].transpose(1, 2).flatten(2, 3)
    scores = (keys @ query[..., None])[..., 0] / math.sqrt(head_dim)  # [rows, heads, columns · page_size]
    seen = torch.arange(keys.shape[2], device=query.device) < lengths[:, None]  # [rows, columns · page_size]
    weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(dim=-1)
    output.copy_((weights[:, :, None] @ values)[:, :, 0])
    # END SOLUTION


def fill_buffers(buffers: tuple, batch: tuple, unused_slot: int) -> None:
    """Puts a batch into the static buffers before a replay, and makes the rows behind it harmless.

    buffers: (query, key, value, slots, tables, lengths) as above. They still hold what the last step left.
    batch: the same six, with at most as many rows, and its tables with at most as many columns.
    unused_slot: a slot in a page that no sequence owns. Rows behind the batch get this slot and the length 0. Their
        other buffers, and the columns that the batch's tables do not fill, may hold any valid numbers; in `tables`
        these are numbers of pages, from 0 on.
    """
    # BEGIN SOLUTION
    *vectors, slots, tables, lengths = buffers
    *new_vectors, new_slots, new_tables, new_lengths = batch
    count, columns = new_tables.shape
    for buffer, tensor in zip((*vectors, slots, lengths), (*new_vectors, new_slots, new_lengths)):
        buffer[:count] = tensor
    tables[:count, :columns] = new_tables
    slots[count:] = unused_slot
    lengths[count:] = 0
    # END SOLUTION


# %%
best_paged_step, best_fill_buffers = check("14.4", paged_step, fill_buffers).best

# %% [markdown]
# ## Streams and events · deeper
#
# So far the GPU had one queue. It can have several, called *streams*. Kernels in one stream run one after another, in
# the order of their launches. Kernels in two different streams may run at the same time and in any order. PyTorch
# launches into the *current stream*. At first this is the *default stream*; inside `with torch.cuda.stream(other):` it
# is `other`.
#
# If work in one stream has to wait for work in another, you use an *event*. An event is a mark in a stream.
# `event.record()` puts the mark behind everything that was launched there so far. After `other.wait_event(event)`,
# whatever you launch into the other stream is held until the GPU has reached the mark. The host does not wait in either
# call.
#
# As an example, take an engine that fills the static buffers of its next step while the GPU is still busy with this
# one. It fills them in a stream of their own. The picture shows three versions of it. An arrow is an event that a
# stream waits for.

# %%
from course_lib.figures.launches.timeline import Work, draw_streams


def fill(buffers, stream):
    return Work(f"fill {buffers}", stream, launch=4.0, length=20.0)


def replay(buffers, after=()):
    return Work(f"replay {buffers}", "main", launch=8.0, length=40.0, after=after)


draw_streams([
    ("one stream", [fill("A", "main"), replay("A"), fill("A", "main"), replay("A")]),
    ("two streams, no event", [fill("A", "copies"), replay("A"), fill("A", "copies"), replay("A")]),
    ("two streams, an event behind each fill, two sets of buffers",
     [fill("A", "copies"), replay("A", after=(0,)), fill("B", "copies"), replay("B", after=(2,))]),
])

# %% [markdown]
# In the first version everything is in order, and the two fills cost 40 µs.
#
# The second version is wrong. Its first replay starts at 12 µs, but its buffers are being filled until 24 µs. So it
# computes with a mixture of old and new numbers, and there is no error message. The second fill is wrong as well,
# because it overwrites buffers that the first replay is still reading.
#
# So two things are needed. An event has to tell the replay when the fill has ended. And a fill must not start before
# the last reader of its buffers has ended. The third version has an event behind each fill and two sets of buffers
# (with a graph for each), so fill B does not have to wait. Fill A of the third step would have to wait for replay A.
#
# Streams also explain one of the bugs above, the capture that recorded nothing. A capture records the launches of one
# stream. `torch.cuda.graph` makes a new stream, sets it as the current one, and captures it. PyTorch and Triton launch
# into the current stream, so their kernels are in the graph. A kernel that is launched into another stream is not: it
# runs at once, during the capture. This happens with C++ code that launches with `<<<grid, block>>>` alone, which means
# the default stream. You may get an error. Or, worse, you get a graph without that kernel, and its replays work on what
# the kernel left during the capture.
#
# One graph can also contain two streams. Let the second stream wait for an event of the captured stream, and from then
# on it is captured too. At the end, the first stream must wait for an event of the second.

# %% [markdown]
# ## How long does a kernel of 5 µs take? · deeper
#
# This chapter is about kernels of a few microseconds, and they are the hardest to time. Each of the obvious ways gives
# a wrong number:
#
# - **The host's clock around a call.** A launch returns before the kernel has run, so you measure the launch.
# - **Two events around one launch.** Here an *event* notes the time on the GPU's own clock when all work before it is
#   done. But the GPU has nothing to do yet, so the first event happens at once. Then the GPU waits for the launch to
#   arrive, and you measure this wait too.
# - **Two events around a hundred launches.** If a launch takes longer than the kernel, the GPU waits before each
#   kernel.
# - **The first calls.** The first call compiles the kernel. After that, the GPU's clock rate is still rising, because
#   an idle GPU runs at a low one.
# - **The same input again and again.** An H100's L2 cache holds 50 MB. From the second call on, your input comes from
#   there, while in the real step it comes from memory.
# - **The mean.** Now and then something else takes the GPU. One such interruption outweighs a hundred calls.
#
# In 14.5 you time a kernel on a simulated GPU that has all of these traps. The simulation knows the kernel's time
# exactly, so the check can say how far off you are. It begins with GPUs that have one trap each, and ends with all of
# them at once.

# %%
# Exercise 14.5 · Time a kernel of a few microseconds
def time_kernel(device) -> float:
    """How long the kernel takes on this GPU, in µs, within 5 %: at the full clock rate, with its input not in L2.

    device: a simulated GPU on which nothing has run yet. The kernel takes 3 to 10 µs. All times are in µs.
        device.copies: how many copies of the kernel's input there are: 2, 4 or 5. L2 holds all but one, so a launch
            finds its copy there unless all other copies were used since.
        device.launch(copy): launches the kernel for copy 0 to copies - 1. Takes the host 4 to 12 µs, and returns before
            the kernel has run. The first launch or capture may compile, which takes the host long.
        device.capture(list): records the kernel once for each copy in the list, and runs nothing. Returns a function
            that replays them without gaps. A replay takes the host 10 µs, and returns before the kernels have run.
        device.event(): records an event, which takes the host and the GPU 1 µs each, and returns it.
        first.elapsed_time(second): the time between two events, in steps of 0.5 µs. Call synchronize before it.
        device.synchronize(): the host waits until the GPU is done.
        device.now(): the host's clock.
    The clock rate rises until the GPU has worked for 10 ms; at first everything takes up to 1.5 times as long. About
    once in a millisecond of work, another process takes the GPU for 100 to 200 µs.
    """
    # BEGIN SOLUTION
    kernels = 20  # a multiple of 2, 4 and 5: each replay begins with the copy that was used longest ago
    replay = device.capture([number % device.copies for number in range(kernels)])
    for _ in range(200):  # 4,000 kernels of at least 3 µs: more than 10 ms of work
        replay()
    device.synchronize()
    replay()  # keeps the GPU busy while the host sends what follows
    events = [device.event()]
    for _ in range(61):
        replay()
        events.append(device.event())
    device.synchronize()
    spans = sorted(first.elapsed_time(second) - 1.0 for first, second in zip(events, events[1:]))
    return spans[len(spans) // 2] / kernels
    # END SOLUTION


# %%
best_time_kernel = check("14.5", time_kernel).best

# %% [markdown]
# On a GPU the next cell hands your function a real one, with the same methods built on PyTorch's graphs and events. The
# kernel adds 1 to each number of a tensor. There are five copies of this tensor. Four of them, with their results, fill
# L2; on an H100 one copy has 1.6 million numbers. Below your time, the cell prints what the first three ways of the
# list give.

# %%
if on_gpu:
    class RealDevice:
        """The methods of 14.5 on this machine's GPU; times in µs."""

        def __init__(self):
            self.copies = 5
            numbers = 1 + torch.cuda.get_device_properties(0).L2_cache_size // 32  # four copies of 8 bytes fill L2
            self.inputs = [torch.zeros(numbers, device=device) for _ in range(self.copies)]
            self.outputs = [torch.zeros(numbers, device=device) for _ in range(self.copies)]

        def launch(self, copy=0):
            torch.add(self.inputs[copy], 1.0, out=self.outputs[copy])

        def capture(self, copies):
            return captured(lambda: [self.launch(copy) for copy in copies] and None)

        def event(self):
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return RealEvent(event)

        def synchronize(self):
            torch.cuda.synchronize()

        def now(self):
            return time.perf_counter() * 1e6

    class RealEvent:
        def __init__(self, event):
            self.event = event

        def elapsed_time(self, end):
            return self.event.elapsed_time(end.event) * 1e3

    real = RealDevice()
    real.launch()
    real.synchronize()
    print(f"your time_kernel:               {best_time_kernel(real):6.2f} µs")
    begin = real.now()
    for _ in range(100):
        real.launch()
    print(f"host's clock, without waiting:  {(real.now() - begin) / 100:6.2f} µs")
    real.synchronize()
    first = real.event()
    real.launch()
    second = real.event()
    real.synchronize()
    print(f"two events around one launch:   {first.elapsed_time(second):6.2f} µs")
    first = real.event()
    for _ in range(100):
        real.launch()
    second = real.event()
    real.synchronize()
    print(f"around a hundred, one input:    {first.elapsed_time(second) / 100:6.2f} µs")
else:
    print("No GPU here, so there are only the simulated ones of 14.5.")

# %% [markdown]
# ## What a graph does not remove · deeper
#
# A graph takes the host out of the step. What is left is the time around each change of kernels. The GPU starts a
# kernel only when all programs of the one before have ended, and then the new kernel first has to load its arguments
# and set up its work. At the end of a kernel, the last programs have most of the GPU to themselves. Three techniques
# make this smaller:
#
# - **Programmatic dependent launch** lets a kernel start while the one before is still finishing. The new kernel does
#   what does not depend on the other's result, such as setting up barriers or loading weights. Then it waits at one
#   instruction. On Hopper, recent versions of plain Triton have this: you pass `launch_pdl=True` at the launch, and
#   call `tl.extra.cuda.gdc_wait()` in the kernel before the first dependent load. You need both. An engine that only
#   set the attribute gained nothing ([imp#1655](https://github.com/kekzl/imp/issues/1655)). In another case the kernels
#   did not wait, so they read what was not there yet ([imp#1833](https://github.com/kekzl/imp/issues/1833)).
# - **A persistent kernel** starts only as many programs as the GPU can hold at once. Each program computes one tile
#   after another until none is left, so programs are started once instead of in many waves. Chapter 09's attention
#   kernel is one.
# - **A megakernel** is a whole layer, or the whole model, as one persistent kernel. Its programs take tasks from a
#   list, and counters in memory say which tasks are ready. It has no gaps at all, but it gains little over a good
#   graph. The comparison cited above set Hazy Research's megakernel for Llama-3.2-1B against a graph of 100 kernels a
#   step with dependent launches. The megakernel gained 0.7 % on an H100 (972.8 instead of 979.5 µs) and 4.6 % on an
#   H200 (759.8 instead of 794.7 µs). Its results missed the comparison's limit for errors, and the graph's met it.
#
# So capture a graph first, then add dependent launches, and then measure what is left. The next section does this.
#
# ## Five kernels a layer, or one · deeper
#
# The step of the question has 190 kernels, but it can do with fewer than half as many. At batch 1, every weight matrix
# is multiplied by a single vector. The kernel that does this can also do the small operations before and after the
# product. So `course_lib.kernels.layer` needs only five kernels for a layer:
#
# | kernel | what it computes | weights it reads, Llama-3.2-1B |
# |---|---|---|
# | project | RMSNorm, Q, K and V, rotary positions, append to the cache | 12.6 MB |
# | attend | attention, each KV head's tokens in eight parts; the last part to end merges them | none |
# | output | the output projection, added to the residual | 8.4 MB |
# | feed | RMSNorm, gate and up, silu(gate) · up | 67.1 MB |
# | down | the last product, added to the residual | 33.6 MB |
#
# Sixteen layers make 80 kernels. The embedding, the logits and the choice of the next token take one more each, so a
# step has 83. It reads each weight once, 2.47 GB in 16 bits. At 3.35 TB/s, the bandwidth in an H100's data sheet, this
# takes 0.74 ms, and no step can be faster.
#
# A real step is slower, because at some moments the memory has nothing to do. When a kernel starts, it first reads the
# vector that the kernel before has stored, and only then asks for weights. But the weights do not depend on the kernel
# before. So here a kernel asks for its first weights *before* it waits for the vector. It does so with the dependent
# launches of the last section:
#
# ```python
# weights = tl.load(matrix_pointer + ...)   # depends on no other kernel
# tl.extra.cuda.gdc_wait()                  # until the kernel before has ended, and its results can be read
# vector = tl.load(vector_pointer + ...)    # one of these results
# ```
#
# The first line of each kernel is `tl.extra.cuda.gdc_launch_dependents()`. It lets the next kernel start early, as soon
# as all programs of this kernel have started and there is room for more.
#
# There is also a version with one kernel for all layers, `course_lib.kernels.layer.persistent`. It is a small
# megakernel: two programs on each multiprocessor (SM) go through the same stages together. Between two stages, all
# programs wait for each other at a *barrier*. Each program adds 1 to a number in memory, and then reads this number
# until all programs have added theirs. Here, too, a program loads its first weights before it waits.
#
# ```python
# tl.debug_barrier()  # all threads of this program have stored their results
# arrived = tl.atomic_add(arrived_pointer, 1, sem="acq_rel") + 1
# while arrived < target:  # the number of programs, times the barriers so far
#     arrived = tl.atomic_add(arrived_pointer, 0, sem="acquire")
# tl.debug_barrier()
# ```
#
# The last read at a barrier must *acquire*: it has to tell the SM that what its L1 cache holds is out of date. In our
# first version it did not. An atomic operation that added 0 to the number was meant to acquire. But nobody used its
# result, and as Triton 3.6 compiled it, it acquired nothing: programs went on with vectors of the stage before.
#
# The next picture and table are from a recorded run on an H100. **Predict** how many times as fast the five kernels
# become when each of them starts early. Both versions run as a graph.

# %%
predict("14 five kernels a layer in a graph, started early or not", ..., "times")

# %%
from course_lib.figures.launches.timeline import draw_layer
from course_lib.figures.recorded import recorded

run = recorded("steps", "h100")
llama = run["models"]["Llama-3.2-1B"]
alone = llama["batches"]["1"]
draw_layer([(title, alone[name]["layer_us"], alone[name]["layer"])
            for title, name in (("one kernel after another", "five kernels"), ("each started early", "dependent"))])

# %%
print(f"Recorded on an {run['gpu']}, PyTorch {run['torch']}, Triton {run['triton']}; the shape of Llama-3.2-1B,\n"
      f"random weights, 16 bits, {llama['context']} tokens in the cache. The host of that machine needs "
      f"{run['addition_us']} µs for one addition.\n")
print(f"{'step in µs, at batch':28}" + "".join(f"{batch:>8}" for batch in llama["batches"]))
for name in ("eager", "compiled", "captured"):
    cells = [f"{row[name]['us']:8.0f}" if name in row else f"{'–':>8}" for row in llama["batches"].values()]
    print(f"{name:28}" + "".join(cells))
print("\nat batch 1, in µs")
for name in ("five kernels, launched", "five kernels", "dependent", "one kernel"):
    title = name if "launched" in name else f"{name}, in a graph"
    print(f"{title:28}{alone[name]['us']:8.0f}  {llama['weight_bytes'] / alone[name]['us'] / 1e6:.2f} TB/s")

if on_gpu:
    from course_lib.hardware.device import supports_bfloat16
    from course_lib.hardware.graphs import captured
    from course_lib.hardware.timing import measure_together
    from course_lib.kernels.common.dependent import dependent_launches
    from course_lib.models.config import ModelConfig
    from course_lib.models.decoder import Decoder
    from course_lib.serving.single import FORMS, SingleDecoder

    shape = ModelConfig(vocabulary=32_000, layers=4, width=2048, query_heads=32, key_heads=8, head_dim=64, hidden=8192,
                        context=1024)  # four layers of Llama-3.2-1B
    sixteen_bits = torch.bfloat16 if supports_bfloat16() else torch.float16
    model = Decoder(shape).to(device, sixteen_bits).requires_grad_(False)
    names = [name for name in FORMS if name != "dependent" or dependent_launches()]
    steps = {name: captured(SingleDecoder(model, 20_000, name).step) for name in names}
    print("\nfour of its layers on your GPU, in a graph")
    timings = measure_together(steps, device=device)
    for name, timing in timings.items():
        print(f"{'five kernels' if name == 'launched' else name:28}{format_seconds(timing.median)}")
    ratio = timings["launched"].median / timings["dependent"].median if "dependent" in timings else math.nan
else:
    ratio = alone["five kernels"]["us"] / alone["dependent"]["us"]  # of the recorded run
if math.isfinite(ratio):
    measured("14 five kernels a layer in a graph, started early or not", ratio, "times")

# %% [markdown]
# In the upper half of the picture, every kernel waits until the one before has ended. *Attend* reads no weights, so for
# its 6 µs the memory is nearly idle. In the lower half, the kernels overlap. Each bar is longer there, because it
# includes the time in which the kernel has loaded its first weights and waits. *Feed* starts 12 µs before *attend*
# ends and 15 µs before *output* ends, for which it waits. In these 15 µs it loads its first weights. The dashed line
# says when the first kernel of the next layer starts. In the lower half this is before *down* has ended.
#
# The gaps themselves are small. In the upper half there are 0.2 to 0.4 µs between two kernels of a layer, and 1.3 µs
# between two layers: 37 µs in 16 layers, as the profiler saw them. Without the profiler a step takes 1,115 µs, and that
# is only 20 µs more than the kernels' own times. Most of what is lost, against the 740 µs of the data sheet, is lost
# inside the kernels: while they start, and while the last programs end.
#
# With dependent launches the step took 0.98 ms instead of 1.12 ms, so it was 1.14 times as fast. That is 2.53 TB/s,
# 76 % of the bandwidth in the data sheet. In the comparison cited above, on another machine, the graph with dependent
# launches took about as long: 979.5 µs, against 977 µs here.
#
# The one kernel took 1.16 ms. It has no gaps between kernels, and still it is slower than five kernels in a graph. Each
# of its programs holds two tiles of weights in registers, so only two programs fit on an SM. While they wait at a
# barrier, nothing but these tiles is being loaded. The public megakernels load weights into shared memory, far ahead of
# the products, and they have counters for single tiles.
#
# The table shows something else, too. PyTorch's captured step is a graph as well, but it takes 3.1 ms, 2.8 times as
# long as our five kernels in a graph. The replay alone is 2.5 ms of that, because the matrix products at batch 1, and
# the many small kernels between them, do not keep the memory busy. In the rest the host fills the buffers and picks the
# next token. The *compiled* step is a graph too and takes 2.7 ms, because the compiler fused small kernels: they take
# 1.7 ms instead of 2.3. That is no rule: at batch 8 its kernels take 3.1 ms instead of 2.5, so the compiled step is
# slower than the captured one. And *five kernels, launched* one by one take 2.8 ms, 2.5 times as long as in a graph,
# because this host needs 33 µs to launch each of the 83. Few kernels are not enough, and neither is a graph: you need
# both.
#
# Now look at the first row, 22 to 37 ms. Of the decoder's 1,370 calls about 560 launch a kernel, 35 a layer; the
# others, such as views, launch nothing. On this slow host an addition alone took 10.6 µs. The row rises and falls
# without order from batch to batch, because the host decides it and not the GPU.
#
# ## Programs that stay · deeper
#
# Most kernels of this course have one program for each tile. An H100 has 132 multiprocessors (SMs). If each can hold
# one program of a kernel, a grid of 140 runs in two rounds: first 132 programs, and then 8 that leave 124 SMs idle.
# Each program also starts from nothing: it loads its arguments, computes its addresses, and waits for its first bytes.
#
# A persistent kernel launches 132 programs, however many tiles there are. You can hand out the tiles in two ways:
#
# - **By a stride.** Program $p$ of $n$ computes the tiles $p$, $p + n$, $p + 2n$ and so on. The programs do not have to
#   agree on anything. This is good if all tiles take equally long.
# - **From a counter.** A number in memory says which tile is next. `tl.atomic_add(pointer, 1)` returns this number and
#   adds 1 to it, and no other program can come in between. A program that has a short tile comes back sooner, so it
#   takes more tiles. This is what you want for causal attention, or for sequences of different lengths. It costs one
#   atomic operation a tile, and the counter must be 0 again before the next launch. A graph captures the `zero_()` that
#   does this, and replays it too.
#
# The next cell deals out 16 tiles to four programs in both ways and adds up how long each program works. The prediction
# is for tiles that get shorter and shorter, as in causal attention if you begin at the end. **Predict** how many times
# as long the stride takes as the counter.

# %%
predict("14 dealing out 16 tiles, by stride over from a counter", ..., "times")


# %%
def by_stride(costs, programs):
    return max(sum(costs[program::programs]) for program in range(programs))


def by_counter(costs, programs):
    free = [0.0] * programs  # when each program has finished its tile
    for cost in costs:
        free[free.index(min(free))] += cost  # the first that is free takes the next tile
    return max(free)


falling = [float(16 - tile) for tile in range(16)]
ratio = by_stride(falling, 4) / by_counter(falling, 4)
measured("14 dealing out 16 tiles, by stride over from a counter", ratio, "times")
for name, costs in (("equal tiles", [8.5] * 16), ("falling costs", falling), ("one long tile", [60.0] + [5.0] * 15)):
    print(f"{name:14} by stride {by_stride(costs, 4):5.1f}, from a counter {by_counter(costs, 4):5.1f}, "
          f"evenly {sum(costs) / 4:5.1f}")

# %% [markdown]
# In 14.6 you write both. The work for one tile is given, with its masks, so you only decide which program computes
# which tile. The check runs the programs in ascending, descending and mixed order. It counts bytes, because each number
# may be loaded and stored only once, it looks at the size of your grid, and it sees which program computes which tile.

# %%
# Exercise 14.6 · Programs that stay
@triton.jit
def silu_tile(
    x_pointer, output_pointer, tile_row, tile_column, rows, columns,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):
    """Given: x · sigmoid(x) for one tile. Tiles count from 0 in both directions; what is outside x is left out."""
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]  # [BLOCK_ROWS, 1]
    column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]  # [1, BLOCK_COLUMNS]
    inside = (row < rows) & (column < columns)  # [BLOCK_ROWS, BLOCK_COLUMNS]
    x = tl.load(x_pointer + row * columns + column, mask=inside, other=0.0)
    tl.store(output_pointer + row * columns + column, x / (1.0 + tl.exp(-x)), mask=inside)


@triton.jit
def stride_kernel(
    x_pointer, output_pointer, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """Program p of n computes tile p, and then every n-th tile after it."""
    # BEGIN SOLUTION
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * across
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        silu_tile(x_pointer, output_pointer, tile // across, tile % across, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
    # END SOLUTION


@triton.jit
def counter_kernel(
    x_pointer, output_pointer, counter_pointer, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    """A program takes the number of its next tile from the counter, until there is no tile left."""
    # BEGIN SOLUTION
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = tl.cdiv(rows, BLOCK_ROWS) * across
    tile = tl.atomic_add(counter_pointer, 1)
    while tile < tiles:
        silu_tile(x_pointer, output_pointer, tile // across, tile % across, rows, columns, BLOCK_ROWS, BLOCK_COLUMNS)
        tile = tl.atomic_add(counter_pointer, 1)
    # END SOLUTION


def every_nth_tile(x, programs):
    """x · sigmoid(x) in tiles of 16 rows and 32 columns. Program p of n computes the tiles p, p + n, p + 2n and so on.

    Tiles are numbered from 0, by rows or by columns, from either end.

    x: [rows, columns], float32, contiguous; at least one row and one column, and any number of both.
    programs: how many programs the launch may have. Any number from 1, below or above the number of tiles.
    Returns: a new tensor of x's shape. One kernel is launched. Each number of x is loaded once, and each number of the
        result is stored once. PyTorch's own operations compute nothing.
    """
    # BEGIN SOLUTION
    output = torch.empty_like(x)
    stride_kernel[(programs,)](x, output, *x.shape, BLOCK_ROWS=16, BLOCK_COLUMNS=32)
    return output
    # END SOLUTION


def tiles_from_a_counter(x, programs, counter):
    """The same result, but a program takes each of its tiles from a counter in memory, by an atomic operation.

    Only its first tile may be the one with its own number. A program ends when there is no tile left.
    counter: int32 [1], on x's device. It holds any number that an earlier call has left. You may set it, and leave any
        number in it. The host does not read it.
    """
    # BEGIN SOLUTION
    output = torch.empty_like(x)
    counter.zero_()
    counter_kernel[(programs,)](x, output, counter, *x.shape, BLOCK_ROWS=16, BLOCK_COLUMNS=32)
    return output
    # END SOLUTION


# %%
best_every_nth_tile, best_tiles_from_a_counter = check("14.6", every_nth_tile, tiles_from_a_counter).best

# %% [markdown]
# The next cell computes one matrix with 1, 7, 132 and 200 programs. The result is the same each time. Without a GPU the
# programs run one after another, so times would say nothing there, and none are shown.

# %%
x = torch.randn(*((4096, 4096) if on_gpu else (100, 90)), device=device)
number = torch.zeros(1, dtype=torch.int32, device=device)
for programs in (1, 7, 132, 200):
    same = torch.allclose(best_tiles_from_a_counter(x, programs, number), torch.nn.functional.silu(x), atol=1e-5)
    line = f"{programs:4} programs: {'right' if same else 'wrong'}"
    if on_gpu:
        from course_lib.hardware.timing import measure

        for name, call in (("by stride", partial(best_every_nth_tile, x, programs)),
                           ("from a counter", partial(best_tiles_from_a_counter, x, programs, number))):
            line += f", {name} {format_seconds(measure(call, device=device).median)}"
    print(line)

# %% [markdown]
# ## Finale: the model in a graph · deeper
#
# Now a whole model generates text with its step captured. It is chapter 05's model: four layers, with bytes as tokens.
# With the course's answer to 14.4, one step of it is about 340 PyTorch operations that compute something, and each of
# them is at least one launch.
#
# Your functions are in it. `paged_step` (14.4) stores each token and attends. `choose_buckets` (14.3) decides which
# batch sizes get a graph. The course's `CapturedDecoder` does for the whole model what your `fill_buffers` does for one
# step. It keeps tokens, positions, slots, tables and lengths in one block of memory, and fills this block with one
# copy. It looks up its graphs by two numbers, the batch and the width of the tables. It also remembers where in memory
# the weights and the pages are, and refuses to replay if one of them has moved.
#
# The next cell writes all texts once without graphs. From the batches that occur, it chooses two buckets.

# %%
from functools import partial

from course_lib.models.plugged import paged_step_of_heads, who_runs
from course_lib.models.tiny import tiny_text
from course_lib.models.trained import trained_model
from course_lib.serving.caches.sequences import SteppedPages
from course_lib.serving.captured import CapturedDecoder
from course_lib.serving.memory import WholeRuns
from course_lib.serving.together import write_together

decoder = trained_model("tiny", device=device).requires_grad_(False)
page_size, reserved = 16, 256 if on_gpu else 64  # tokens in a page, and tokens that a text may have
sequences = 8 if on_gpu else 4
columns = reserved // page_size  # pages of a sequence
book = tiny_text()
prompts = [book[300 * number : 300 * number + 20] for number in range(sequences)]
wanted = [(reserved - 20) * (number + 1) // sequences for number in range(sequences)]  # they end one after another


def store(key, value, key_pages, value_pages, slots):
    key_pages[slots // page_size, :, slots % page_size] = key  # a prompt's tokens; later ones are stored by your step
    value_pages[slots // page_size, :, slots % page_size] = value


def empty_cache():
    """Pages for all sequences, and one more for the rows behind a batch."""
    pages = sequences * columns
    return SteppedPages(
        decoder.config, pages + 1, page_size, allocator=WholeRuns(pages, page_size, reserved), append=store,
        step=paged_step_of_heads(best_paged_step), device=device,
    )


print(who_runs({"paged step (14.4)": best_paged_step, "buckets (14.3)": best_choose_buckets}))
plain = write_together(decoder, empty_cache(), prompts, wanted)
steps_of = [plain.running.count(size) for size in range(1, sequences + 1)]
buckets = best_choose_buckets(steps_of, 2)
print(f"{len(plain.running)} steps with batches of {min(plain.running)} to {max(plain.running)}; graphs for {buckets}")

# %% [markdown]
# On a GPU the next cell compares three ways to run these steps: launched one by one, compiled by
# `torch.compile(mode="reduce-overhead")`, and captured. The compiler also merges operations into fewer kernels, so it
# saves more than the launches, but compiling takes time. **Predict** how many times as many tokens a second the
# captured step writes as the step launched one by one.
#
# Without a GPU nothing can be captured, so there is no speed to measure. Instead the recorder of 14.2 records the
# PyTorch operations of the model's step and repeats them. That saves no time, but it shows whether you get the same
# texts when Python no longer decides anything in the step.

# %%
predict("14 the model, captured over launched one by one", ..., "times")

# %%
from course_lib.hardware.graphs import captured, captured_on_cpu, compiled


def with_graphs(capture):
    cache = empty_cache()
    how = partial(capture, static=cache.memory) if capture is compiled else capture
    return CapturedDecoder(decoder, cache, batches=buckets, columns=(columns,), capture=how)


def written_by(model, cache):
    """The texts, and tokens a second."""
    start = time.perf_counter()
    texts = write_together(model, cache, prompts, wanted).texts
    return texts, sum(wanted) / (time.perf_counter() - start)


if on_gpu:
    speeds = {"launched one by one": written_by(decoder, empty_cache())[1]}
    for name, capture in (("compiled", compiled), ("captured", captured)):
        graphs = with_graphs(capture)
        written_by(graphs, graphs.cache)  # so that everything is warm
        before = graphs.replayed
        texts, speed = written_by(graphs, graphs.cache)
        if graphs.replayed > before:
            speeds[name] = speed
            print(f"{name}: the same texts as without: {texts == plain.texts}")
        else:
            print(f"{name}: {graphs.reason}")
    for name, speed in speeds.items():
        print(f"{name:20} {speed:8,.0f} tokens a second")
    if "captured" in speeds:
        measured("14 the model, captured over launched one by one", speeds["captured"] / speeds["launched one by one"],
                 "times")
else:
    graphs = with_graphs(captured_on_cpu)
    texts, _ = written_by(graphs, graphs.cache)
    print(graphs.report())
    print(f"the same texts as without: {texts == plain.texts}")
    for prompt, text in zip(prompts[:2], texts):
        print(f"    {prompt!r} + {text!r}")

# %% [markdown]
# On a GPU, texts may differ in a byte here or there, and then in all bytes that follow. The reason is padding. A batch
# of 5 that is padded to 8 needs a matrix product of another shape, for which PyTorch may choose another kernel. That
# kernel adds up in another order, so its results differ in the last digits. If two bytes are nearly equally likely, the
# other one may then come out first.
#
# A graph of this kind needs four things: static buffers, padded rows that do no harm, a key that holds all sizes of the
# graph, and a fallback for steps that fit no graph. `CapturedDecoder` runs such steps without a graph, and `report()`
# says how often and why.

# %% [markdown]
# Your step can also run SmolLM2, a published model of 135 million parameters that answers questions. It has 30 layers
# of 9 query heads on 3 KV heads, so `paged_step_of_heads` calls your step three times in each layer. The model is
# fetched only if you set `REAL_MODEL = True` below: 93 MB, once. Without a GPU the model's step is recorded and
# repeated as above, and a token takes some seconds.

# %%
from course_lib.serving.published import ask_published_model

REAL_MODEL = False


def your_graph(model, tokens):
    """The model with your step in a graph, and empty pages for one text of so many tokens."""
    pages = -(-tokens // page_size)
    cache = SteppedPages(
        model.config, pages + 1, page_size, allocator=WholeRuns(pages, page_size, tokens), append=store,
        step=paged_step_of_heads(best_paged_step), device=device,
    )
    capture = captured if on_gpu else captured_on_cpu
    return CapturedDecoder(model, cache, batches=(1,), columns=(pages,), capture=capture)


ask_published_model(REAL_MODEL, your_graph)

# %% [markdown]
# ## What production systems do
#
# - **torch.compile** with `mode="reduce-overhead"` captures graphs by itself. It copies inputs into static buffers, and
#   captures again for every new shape. Results are in the graph's memory, so the next call overwrites them. Clone what
#   you want to keep.
# - **vLLM and SGLang** capture the decode step for a list of batch sizes when they start. Block tables and lengths are
#   static buffers, filled before each replay. A long prefill needs no graph, because its kernels hide their launches.
#   For shorter ones both engines can capture *piecewise*: the parts between attentions are graphs, and attention, which
#   depends on the lengths, is launched.
# - **gpt-fast** generated 25.5 tokens a second with Llama-7B in eager PyTorch, limited by the CPU. Compiled, with a
#   static cache and graphs, it was about four times as fast.
#
# ## Papers
#
# - NVIDIA: *CUDA C++ Programming Guide*, the sections on CUDA graphs and on programmatic dependent launch.
# - Kwon et al.: *Efficient Memory Management for Large Language Model Serving with PagedAttention*,
#   [arXiv 2309.06180](https://arxiv.org/abs/2309.06180): the cache whose tables a graph reads.
# - Spector et al.: *Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B*, Hazy Research, 2025.

# %%
progress()
