# %% [markdown]
# # 17 · Not every key: windows, sinks and chosen keys
#
# **The question.** A prompt has 65,536 tokens. In causal attention the last token looks at all of them. In a layer with
# a *window* of 1,024 keys, each token looks only at its own key and the 1,023 before it. How many times as fast could
# the layer with the window be, and how many times as fast is it?
#
# Write down two numbers. You can work out the first on paper. The second depends on the kernel: two kernels that
# compute the same result differ by a factor of eight.
#
# At the end of this chapter a model uses your kernel to write a text longer than its window, and its cache stops
# growing.
#
# **Time.** About five hours for all seven exercises, estimated. The **core path** takes two: exercises 17.1 to 17.3 and
# 17.7, and every section whose heading does not end in *deeper*. You need chapters 04, 06 and 08.

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

from course_lib.hardware.units import format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## What a window saves, on paper
#
# With a window of $W$ keys, the query at position $i$ sees the keys $i - W + 1$ to $i$. Its own key is one of the $W$.
# The first queries see fewer, because there is nothing before the first token.
#
# Attention does $4 D$ FLOPs for each head and each pair of a query and a key that it sees: $2D$ for the score and $2D$
# for the weighted value. Causal attention has $N (N + 1) / 2$ such pairs, and a window leaves about $W N$ of them. At
# $N$ = 65,536 these are 2.15 billion pairs and 67 million. So, counted in FLOPs, the window is 32 times as fast.
#
# But a kernel does not compute single pairs. It computes tiles, such as 128 queries against 128 keys, and a tile costs
# the same whether one of its pairs is seen or all of them. So count tiles. The next cell does this for several windows
# at 16,384 tokens, and for the question's 65,536. **Predict** how many times fewer tiles the window needs at 65,536
# tokens. Is it more or less than 32?

# %%
predict("17 tiles of causal attention over those of the window", ..., "times")

# %%
def tiles_visited(length, window, block=128):
    """How many tiles of keys all tiles of queries visit together. A tile of queries visits the tiles that hold a key
    which at least one of its queries sees."""
    visited = 0
    for first in range(0, length, block):
        last = min(first + block, length) - 1  # the tile's last query, and the last key that it sees
        seen = range(max(0, first - window + 1), last + 1)
        visited += len({key // block for key in (*seen[::block], last)})
    return visited


def pairs(length, window):
    """Pairs of a query and a key that it sees: the sum of min(t + 1, window) over all positions t."""
    window = min(window, length)
    return length * window - window * (window - 1) // 2


for length, windows in ((16_384, (128, 512, 1024, 4096)), (65_536, (1024,))):
    all_tiles, all_pairs = tiles_visited(length, length), pairs(length, length)
    print(f"{length:,} tokens: {all_tiles:,} tiles, {all_pairs / 1e6:,.0f} million pairs when causal\n"
          f"{'window':>8}{'tiles':>9}{'fewer':>8}{'pairs, millions':>18}{'fewer':>8}")
    for window in windows:
        tiles, seen = tiles_visited(length, window), pairs(length, window)
        print(f"{window:>8,}{tiles:>9,}{all_tiles / tiles:>7.1f}×{seen / 1e6:>18,.1f}{all_pairs / seen:>7.1f}×")
measured("17 tiles of causal attention over those of the window", all_tiles / tiles, "times")

# %% [markdown]
# It is less: 28.7 times. A window of 1,024 keys is eight tiles wide, but a tile of queries visits nine. Its first query
# sees 1,023 keys to the left and its last query sees keys up to its own, so together they reach into a ninth tile. A
# window of 128 keys would fit into one tile, but each tile of queries visits two. So small windows save less than their
# FLOPs promise. Smaller tiles waste less, but then the keys are loaded more often.
#
# ## Three levels of skipping
#
# A kernel can leave out the tiles that none of its queries sees in three ways. All three give the same numbers.
#
# 1. **Mask.** Load every tile up to the diagonal, multiply, and set the scores outside the window to minus infinity.
#    The result is right, but nothing is saved.
# 2. **Skip.** Go through all tiles, but test each one first. If no query sees it, load nothing and multiply nothing.
#    The loop still takes a step for each tile, and even a step that only tests takes time.
# 3. **Bound.** Compute where the window begins, and start the loop there. Then the number of steps no longer depends on
#    the length of the text.
#
# The figure shows the tiles on the left, and the loop's steps at each level on the right. At the third level the kernel
# also knows which of its tiles are *whole*, which means that all their pairs are seen. It can leave the mask away there
# (exercise 17.2). The kernel below does not yet.

# %%
from course_lib.figures.sparse.tiles import draw_window_tiles

draw_window_tiles(length=2048, window=512, block=128)

# %% [markdown]
# Next you see the three levels in a kernel. To keep it short, it computes a sum instead of attention: each query adds
# up the values in its window, as if all weights were 1. The loop is the same as in attention.
#
# The cell compares the results of all three levels, counts the bytes they load and measures their times. **Predict**
# what a step that only tests its tile costs, in percent of a step that computes it.

# %%
predict("17 a skipped step over a computed one", ..., "%")

# %%
from course_lib.hardware.meter.metered import metered


@triton.jit
def add_tile(total, values, queries, start, length, window, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Add the values of one tile of keys to `total`, for the queries that see them."""
    keys, columns = start + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    tile = tl.load(values + keys[:, None] * WIDTH + columns[None, :], mask=keys[:, None] < length, other=0.0)
    distance = queries[:, None] - keys[None, :]  # [BLOCK, BLOCK]
    sees = (distance >= 0) & (distance < window)
    return tl.dot(sees.to(tile.dtype), tile, total)  # [BLOCK, WIDTH]


@triton.jit
def window_sum_kernel(values, sums, length, window, BLOCK: tl.constexpr, WIDTH: tl.constexpr, LEVEL: tl.constexpr):
    """One program: the sums of one tile of queries of one head. LEVEL: 1 masks, 2 skips, 3 bounds the loop."""
    first = tl.program_id(0) * BLOCK
    queries = first + tl.arange(0, BLOCK)  # [BLOCK]
    head = tl.program_id(1).to(tl.int64) * length * WIDTH
    first_seen = tl.maximum(first - window + 1, 0)  # by the tile's first query
    begin = 0
    if LEVEL == 3:
        begin = first_seen // BLOCK * BLOCK
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for start in range(begin, first + BLOCK, BLOCK):
        if LEVEL == 2:
            if start + BLOCK > first_seen:
                total = add_tile(total, values + head, queries, start, length, window, BLOCK, WIDTH)
        else:
            total = add_tile(total, values + head, queries, start, length, window, BLOCK, WIDTH)
    offsets = queries[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(sums + head + offsets, total, mask=queries[:, None] < length)


def window_sum(values, window, level, block=64):
    """values: [heads, length, 64], float16. Returns the sum over each query's window, float32."""
    heads, length, width = values.shape
    sums = torch.empty(values.shape, device=values.device)
    window_sum_kernel[(triton.cdiv(length, block), heads)](
        values, sums, length, window, BLOCK=block, WIDTH=width, LEVEL=level
    )
    return sums


# %%
from course_lib.hardware.timing import measure

heads, length, window, block = (4, 65_536, 1024, 64) if on_gpu else (1, 1024, 64, 32)
steps, needed = tiles_visited(length, length, block), tiles_visited(length, window, block)
values = torch.randint(0, 3, (heads, length, 64), device=device).half()  # whole numbers: the sums are exact
right = values.double().cumsum(dim=1)
right[:, window:] -= right[:, :-window].clone()
small = values[:1, :512]
times, bytes_loaded = {}, {}
for level, name in ((1, "mask"), (2, "skip"), (3, "bound")):
    timing = measure(partial(window_sum, values, window, level, block), warmup=1, repeats=3, device=device)
    times[level] = timing.best  # the fastest run, because a busy machine can only make a run slower
    assert torch.equal(window_sum(values, window, level, block).double(), right)
    bytes_loaded[level] = metered(window_sum, small, 64, level, 32).loaded_bytes
    print(f"{level} {name:6}{heads * (needed if level == 3 else steps):>12,} steps{format_seconds(times[level]):>12}"
          f"{format_bytes(bytes_loaded[level]):>10} loaded (512 tokens, a window of 64)")
skipped = (times[2] / times[3] - 1) * needed / (steps - needed)
print(measured("17 a skipped step over a computed one", 100 * skipped, "%"))

# %% [markdown]
# Level 2 loads as few bytes as level 3 but takes longer, because of the steps that only test. Without a GPU, the times
# are those of Triton's interpreter. It computes a step in slow Python, so a skipped step costs little by comparison.
#
# How much does this matter in a real kernel? SGLang's attention for prompts used to skip, and was then changed to bound
# its loop. A user measured both on an H200, with 16 query heads on 8 KV heads of dimension 256, a window of 1,024 and
# tiles of 64 × 64 ([sglang#34462](https://github.com/sgl-project/sglang/pull/34462)). The next cell prints these times.
# Its last two columns compare the measured ratio with a model that has a single number in it: a skipped step takes 24 %
# of the time of a computed one. That is much for a test. The cell above compares two numbers, but SGLang's loop built
# the 64 × 64 mask of the tile and took its maximum
# ([sglang#39769](https://github.com/sgl-project/sglang/issues/39769)).

# %%
reported = {4096: (0.998, 0.740), 8192: (2.670, 1.551), 16_384: (8.077, 3.059), 27_000: (19.538, 5.027),
            65_536: (99.488, 12.109)}  # ms: skipped, bounded  # fmt: skip
print(f"{'tokens':>8}{'computed':>10}{'skipped':>10}{'skip, ms':>10}{'bound, ms':>11}{'measured':>10}{'model':>8}")
for length, (skip, bound) in reported.items():
    needed = tiles_visited(length, 1024, 64)
    wasted = tiles_visited(length, length, 64) - needed
    model = 1 + 0.24 * wasted / needed
    print(f"{length:>8,}{needed:>10,}{wasted:>10,}{skip:>10.2f}{bound:>11.2f}{skip / bound:>9.2f}×{model:>7.2f}×")

# %% [markdown]
# That one number is enough for all five lengths, to within 5 %. At 65,536 tokens 97 of 100 steps are skipped. They
# compute nothing, but they take seven eighths of the time.
#
# > **The answer.** With tiles of 64 × 64 the window could make this layer 30 times as fast as full causal attention. A
# > kernel that masks gets nothing of that. By the model, one that skips gets a factor of 3.8, and one that bounds its
# > loop gets the full 30. We measured the library's attention, which bounds its loop, on an H200 (PyTorch 2.11, Triton
# > 3.6, November 2026): 51.5 ms causal and 1.73 ms with the window, so it is 29.8 times as fast.
#
# The same run shows where this ends. With 16 heads of dimension 128 and 65,536 tokens, full causal attention took
# 27.7 ms. If the time depended on the tiles alone, each window would take 27.7 ms times its share of the tiles. The
# last column divides the measured time by this estimate:
#
# | window | time | over its share of the tiles' time |
# |---|---|---|
# | 4,096 | 3.62 ms | 1.05 × |
# | 1,024 | 1.09 ms | 1.13 × |
# | 512 | 0.69 ms | 1.28 × |
# | 128 | 0.35 ms | 1.64 × |
#
# For a window of 128 there is a second limit. Queries, keys, values and outputs are 1.07 GB, which an H200 reads and
# writes in 0.25 ms. So 0.25 of the 0.35 ms are the time of memory, and no skipping can make the layer faster than that.
#
# ## One window, three conventions
#
# Before you write the bound, you need to know what the window's number means. There are three conventions:
#
# - **transformers** has `sliding_window`, the number of keys *including* the query's own. Its mask tests whether the
#   key's position is larger than the query's position minus `sliding_window`.
# - **FlashAttention** has a pair (left, right): how many keys a query sees on either side *besides* its own. The value
#   −1 means no bound on that side. The pair does not make attention causal unless `right` is 0 or you also set
#   `causal=True`.
# - **This library** has `window`, the number of keys *before* the query's own. With `causal=True` a query sees nothing
#   after its own key.
#
# The functions that you write in this chapter count the query's own key, as transformers does.
#
# If you hand one library's number to another, each query sees one key too many or one too few. No error is raised, and
# the text still reads well. Hugging Face passed `(sliding_window, sliding_window)` to FlashAttention
# ([transformers#39408](https://github.com/huggingface/transformers/issues/39408)). NVIDIA's Megatron-Bridge had the
# mistake in four models ([Megatron-Bridge#2656](https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2656)). In SGLang a
# decode step saw one key fewer than the prompt did ([sglang#32087](https://github.com/sgl-project/sglang/pull/32087)).
#
# One small test finds all of these. With a window of 1, its own key included, a query sees only itself. Its weight is
# 1, so the output must equal the value matrix.
#
# A second convention says where the queries stand when there are fewer of them than keys. Here, as in FlashAttention,
# they are *aligned to the end*: with 3 queries and 10 keys, query 0 stands at position 7.

# %%
# Exercise 17.1 · One window, three conventions
def visible(library: str, window: int | tuple, query_length: int, key_length: int) -> torch.Tensor:
    """Which keys each query sees when a library is given this window.

    library: "course_lib", "flash_attn" or "transformers". Of the keys that exist, a query at position p sees:
        "course_lib": window is 0 or more, and counts the keys before the query's own: p - window … p;
        "transformers": window is 1 or more, and counts the query's own key too: p - window + 1 … p;
        "flash_attn": window is a tuple (left, right), each 0 or more, or -1 for no bound on that side, with
        causal=False: p - left … p + right.
    query_length, key_length: any lengths of at least 1. They are aligned to the end: query i stands at position
        i + key_length - query_length, which may be negative.
    Returns: bool [query_length, key_length], True where the query sees the key. A row may have none.
    """
    # BEGIN SOLUTION
    if library == "flash_attn":
        before, after = (key_length + query_length if side == -1 else side for side in window)
    else:
        before, after = window - (library == "transformers"), 0
    position = torch.arange(query_length)[:, None] + key_length - query_length
    key = torch.arange(key_length)
    return (key >= position - before) & (key <= position + after)
    # END SOLUTION


def arguments(keys: int) -> dict:
    """The window to give to each library for causal attention in which a query sees `keys` keys, its own included.

    keys: at least 1.
    Returns: a dict {"course_lib": …, "flash_attn": …, "transformers": …} of Python ints, with a tuple or list
    (left, right) of two for "flash_attn". With each of them `visible` shows the same keys. The numbers depend on `keys`
    alone, and every side has a bound.
    """
    # BEGIN SOLUTION
    return {"course_lib": keys - 1, "flash_attn": (keys - 1, 0), "transformers": keys}
    # END SOLUTION


# %%
best_visible, best_arguments = check("17.1", visible, arguments).best

# %% [markdown]
# ## Which tiles does a tile of queries visit?
#
# The bound has to be exact. One tile too many costs time, and one too few gives a wrong answer. A kernel needs four
# numbers for its tile of queries, and each depends on either the first or the last of these queries:
#
# - **begin**: the first tile that holds a seen key. The *first* query decides, because it reaches farthest to the left.
# - **end**: one past the last tile that holds a seen key. The *last* query decides, because it reaches farthest to the
#   right.
# - **whole_begin**: the first tile that *all* queries see completely. On the left the *last* query decides, because its
#   window begins latest.
# - **whole_end**: one past the last tile that all queries see completely. On the right the *first* query decides,
#   because its keys end earliest.
#
# Take tiles of 4 keys as an example. The queries stand at positions 10 to 13, and each sees 9 keys before its own. The
# picture shows which keys each query sees. Below are two ranges of keys, those that at least one query sees and those
# that all of them see, and what rounding to tiles makes of each. So the four numbers are 0, 1, 2 and 4.

# %%
from course_lib.figures.sparse.ranges import draw_ranges

draw_ranges(first=10, last=13, before=9, block=4)

# %% [markdown]
# Two cases are easy to miss. If the window is narrower than a tile, no tile is whole. Then the masked parts on the left
# and on the right meet, and a careless formula visits one tile in both, so its keys count twice in the softmax. The
# other case is a tile of queries that sees no key at all, because they all stand too far before the first key or after
# the last one. Then nothing is visited.

# %% [markdown]
# With these four numbers a kernel runs three loops that share one running maximum, sum and accumulator: from `begin` to
# `whole_begin` with a mask, on to `whole_end` without one, and on to `end` with a mask again. All four follow from the
# ends of the two ranges by division, before any key is loaded.

# %%
# Exercise 17.2 · The tiles that a tile visits
def key_tiles(first: int, last: int, key_length: int, before: int | None, after: int | None, block: int) -> tuple:
    """Which tiles of keys a tile of queries visits, and which of them need no mask.

    first, last: the queries stand at all positions from first to last, with first at most last. Positions may be
        negative or beyond the keys. They are between -2⁴¹ and 2⁴¹.
    key_length: keys 0 … key_length - 1 exist; 0 to 2⁴⁰ of them. Tile j holds those of the keys j · block …
        (j + 1) · block - 1 that exist. block: at least 1.
    before, after: the query at position p sees the keys p - before … p + after that exist. Both are 0 or more, or
        None: no bound on this side.
    Returns: a tuple or list of four Python ints, (begin, whole_begin, whole_end, end), with begin ≤ whole_begin ≤
    whole_end ≤ end. Tiles begin … end - 1 are exactly those that hold a key which at least one of the queries sees.
    Tiles whole_begin … whole_end - 1 are exactly those that hold `block` keys and of which every query sees every key.
    If no query sees a key, begin = end; if no tile is whole, whole_begin = whole_end: wherever the order above
    allows.
    It must take as long for 2⁴⁰ keys or queries as for a few, so do not loop over tiles, keys or queries.
    """
    # BEGIN SOLUTION
    def keys_between(left_query, right_query):
        """The keys from before the one query up to after the other, cut where the keys end."""
        start = 0 if before is None else max(0, left_query - before)
        stop = key_length if after is None else min(key_length, right_query + after + 1)
        return start, stop

    start, stop = keys_between(first, last)  # seen by at least one query
    begin = start // block
    end = -(-stop // block) if start < stop else begin
    start, stop = keys_between(last, first)  # seen by every query
    whole_begin = min(-(-start // block), end)
    whole_end = max(stop // block, whole_begin)
    return begin, whole_begin, whole_end, end
    # END SOLUTION


# %%
best_key_tiles = check("17.2", key_tiles).best

# %% [markdown]
# ## A kernel with a bounded loop
#
# In chapter 04 you wrote a loop up to the diagonal. With a window, three things are new.
#
# **The first tile may be empty for some rows.** In causal attention every query sees key 0, so after the first tile
# each row has a finite maximum. With a window this is not so. In the example above, query 13 sees no key of tile 0. Its
# row of scores is all minus infinity, and so is its new maximum. The update then computes $e^{-\infty - (-\infty)}$,
# which is NaN, and the row never recovers. [FlagAttention#25](https://github.com/flagos-ai/FlagAttention/issues/25) is
# such a case.

# %%
scores = torch.tensor([[1.0, 2.0], [float("-inf"), float("-inf")]])  # the second query sees nothing of this tile
new_max = scores.amax(dim=1, keepdim=True)
print("maximum as it is:      ", torch.exp(scores - new_max).tolist())
print("maximum replaced by 0: ", torch.exp(scores - new_max.where(new_max > float("-inf"), 0)).tolist())

# %% [markdown]
# The remedy is to subtract something finite, such as 0, while the maximum is still minus infinity. All weights of that
# row are then $e^{-\infty} = 0$, and so is the factor for the old sum.
#
# It is tempting to start the maximum at a large negative number instead. FlashInfer started it at $-5 \cdot 10^4$. A
# model with scores down to $-2.5 \cdot 10^5$ then got zeros from one of its heads, without any error
# ([flashinfer#4267](https://github.com/flashinfer-ai/flashinfer/issues/4267)).
#
# **A weight of 0 does not hide a NaN.** A hidden key gets the weight 0, but $0 \cdot \text{NaN} = \text{NaN}$. So a
# value outside the window must not reach the product. In a cache with pages, memory outside the window may belong to
# another request by now, or may never have been written. vLLM's kernel read such blocks and multiplied them by 0
# ([vllm#30887](https://github.com/vllm-project/vllm/pull/30887)). A bounded loop does not load tiles that none of its
# queries sees, so it does not matter what they hold.
#
# **Both edges can fall into one tile.** With a narrow window, the window and the diagonal can cut the same tile. So the
# mask must test both sides.

# %% [markdown]
# **A kernel with a bounded loop.** A program computes 64 queries of one head, and its loop goes over tiles of 64 keys,
# as in chapter 04. What is asked is one loop with a mask in every step. Visiting whole tiles without a mask is an
# optional further step.
#
# The first query of the program stands at position $p_0$, the last at $p_1$. With a window of $w$ keys, the first
# query's window begins at key $p_0 - w + 1$. So the loop begins at the tile that holds this key, and it ends after the
# tile of key $p_1$. Inside the loop a mask still decides pair by pair, because the windows of the 64 queries begin at
# 64 different keys.

# %%
# Exercise 17.3 · A kernel with a bounded loop
@triton.jit
def window_kernel(
    query_pointer, key_pointer, value_pointer, output_pointer,
    query_batch_stride, query_head_stride, query_stride, key_batch_stride, key_head_stride, key_stride,
    value_batch_stride, value_head_stride, value_stride, output_batch_stride, output_head_stride, output_stride,
    query_length, key_length, window, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: BLOCK_M queries of one head of one sequence."""
    # BEGIN SOLUTION
    first_query, head, sequence = tl.program_id(0) * BLOCK_M, tl.program_id(1), tl.program_id(2)
    key_head = head // GROUP
    rows = first_query + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    columns = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    positions = rows + key_length - query_length  # [BLOCK_M]
    inside = (rows < query_length)[:, None]
    query_offsets = sequence * query_batch_stride + head * query_head_stride + rows[:, None] * query_stride
    query = tl.load(query_pointer + query_offsets + columns[None, :], mask=inside, other=0.0)  # [BLOCK_M, HEAD_DIM]
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    begin = tl.maximum(first_query + key_length - query_length - window + 1, 0) // BLOCK_N * BLOCK_N
    end = tl.minimum(key_length, first_query + BLOCK_M + key_length - query_length)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        present = (keys < key_length)[:, None]
        key_offsets = sequence * key_batch_stride + key_head * key_head_stride + keys[:, None] * key_stride
        key_tile = tl.load(key_pointer + key_offsets + columns[None, :], mask=present, other=0.0)
        scores = tl.dot(query, tl.trans(key_tile), input_precision="ieee") * scale_log2  # [BLOCK_M, BLOCK_N]
        visible = (keys[None, :] <= positions[:, None]) & (keys[None, :] > positions[:, None] - window)
        visible = visible & (keys < key_length)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, axis=1))  # [BLOCK_M]
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)  # a row may have seen no key yet
        weights = tl.exp2(scores - reference[:, None])  # [BLOCK_M, BLOCK_N]
        rescale = tl.exp2(running_max - reference)  # [BLOCK_M]
        running_sum = running_sum * rescale + tl.sum(weights, axis=1)
        value_offsets = sequence * value_batch_stride + key_head * value_head_stride + keys[:, None] * value_stride
        value_tile = tl.load(value_pointer + value_offsets + columns[None, :], mask=present, other=0.0)
        product = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        accumulator = accumulator * rescale[:, None] + product
        running_max = new_max
    output = (accumulator / running_sum[:, None]).to(output_pointer.dtype.element_ty)
    output_offsets = sequence * output_batch_stride + head * output_head_stride + rows[:, None] * output_stride
    tl.store(output_pointer + output_offsets + columns[None, :], output, mask=inside)
    # END SOLUTION


def window_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention in which each query sees `window` keys, its own included, by one launch of a Triton kernel.

    query: [batch, query_heads, query_length, head_dim], float32 or float16; query_length from 1, head_dim 16, 32, 64 or
        128, any strides but the last, which is 1. Numbers of any size.
    key, value: [batch, key_heads, key_length, head_dim], in query's dtype, each with strides of its own; any strides
        but the last, which is 1. query_length is at most key_length. query_heads is a multiple of key_heads: query head
        h reads key head h // (query_heads // key_heads).
    window: from 1; it may be larger than key_length. Query i stands at position p = i + key_length - query_length and
        sees the keys p - window + 1 to p that exist.
    Cut the keys into tiles of 64, counted from key 0: a tile of which no query sees any key may hold anything, NaN too.
    All elements of a tensor lie within 2³¹ of its first.

    Returns: like query. PyTorch neither copies nor computes anything, and makes no tensor larger than query or key.
    Suppose that each program computes 64 queries of one head, and loads only the tiles of 64 keys that one of its
    queries sees. Your kernel moves at most 1.1 times the bytes of all such programs. The number of its steps does
    not grow with key_length.
    """
    # BEGIN SOLUTION
    batch, query_heads, query_length, head_dim = query.shape
    key_heads, key_length = key.shape[1:3]
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    grid = (triton.cdiv(query_length, 64), query_heads, batch)
    window_kernel[grid](
        query, key, value, output, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        query_length, key_length, window, math.log2(math.e) / math.sqrt(head_dim),
        GROUP=query_heads // key_heads, HEAD_DIM=head_dim, BLOCK_M=64, BLOCK_N=64,
    )
    return output
    # END SOLUTION


# %%
best_window_attention = check("17.3", window_attention).best

# %% [markdown]
# Now compare the time with the number of tiles. On a GPU the cell runs the library's kernel, whose loop is bounded as
# yours is. Without a GPU it computes attention in PyTorch, on slices that hold only the visited tiles. **Predict**
# which share of the saving on paper the longest text reaches.

# %%
predict("17 share of the saving on paper that is reached", ..., "%")

# %%
from course_lib.kernels.attention.operator import attention


def tile_by_tile(query, key, value, window, block=128):
    """Causal attention of one head in PyTorch: each tile of queries against the tiles of keys that it visits."""
    outputs = []
    for first in range(0, query.shape[0], block):
        begin, end = max(0, first - window + 1) // block * block, first + block
        scores = query[first:end] @ key[begin:end].T / query.shape[1] ** 0.5  # [block, keys]
        distance = torch.arange(first, end)[:, None] - torch.arange(begin, end)
        scores.masked_fill_((distance < 0) | (distance >= window), float("-inf"))
        outputs.append(torch.softmax(scores, dim=1) @ value[begin:end])
    return torch.cat(outputs)


window, lengths = (1024, (4096, 16_384, 65_536)) if on_gpu else (512, (1024, 2048, 4096))
heads, head_dim = (8 if on_gpu and machine().memory_bytes > 30e9 else 1), 128 if on_gpu else 64
print(f"{'tokens':>8}{'causal':>12}{'window':>12}{'faster':>9}{'by tiles':>10}")
for length in lengths:
    shape = (1, heads, length, head_dim) if on_gpu else (length, head_dim)
    tensors = [torch.randn(shape, device=device, dtype=torch.float16 if on_gpu else torch.float32) for _ in range(3)]
    if on_gpu:  # the library's `window` counts the keys before the query's own
        runs = [partial(attention, *tensors, causal=True, window=keys) for keys in (None, window - 1)]
    else:
        runs = [partial(tile_by_tile, *tensors, keys) for keys in (length, window)]
    causal, windowed = (measure(run, warmup=1, repeats=3, device=device).best for run in runs)
    on_paper = tiles_visited(length, length) / tiles_visited(length, window)
    print(f"{length:>8,}{format_seconds(causal):>12}{format_seconds(windowed):>12}{causal / windowed:>8.1f}×"
          f"{on_paper:>9.1f}×")
print(measured("17 share of the saving on paper that is reached", 100 * causal / windowed / on_paper, "%"))

# %% [markdown]
# With a window, a larger share of the tiles are edges that need the mask: with 1,024 keys two of nine instead of one of
# many. So expect a little less than on paper. On a CPU the share may be above 100 %, because the larger slices of
# causal attention no longer fit its cache. On a busy machine it may also be above 100 %, because other work disturbs
# one of the two times.
#
# ## Decode: the window's pages
#
# In decode there is one query, and the limit is the bytes of keys and values that it reads.
#
# Take 8 KV heads of dimension 128 in 16 bits, which is 4,096 bytes for each token and layer. With a context of 131,072
# tokens, a layer without a window reads 537 MB. A window of 4,096 keys needs 16.8 MB of that, a 32nd. A kernel that
# only masks still reads all 537 MB. In 2026 vLLM's paged decode kernel for AMD did this: with a window of 512 and
# 16,000 tokens, 97 % of the reads were thrown away ([vllm#49588](https://github.com/vllm-project/vllm/pull/49588)).
#
# **Pages can be given back.** The newest query sees the last $W$ keys, and the window of every later query begins
# later. So a key that has left the window is never read again. When all tokens of a page have left it, the page goes
# back to the pool. A sequence then holds at most $\lceil (W - 1) / P \rceil + 1$ pages of $P$ tokens, however long it
# becomes. The picture shows one sequence that grows to 96 tokens. Its window has 24 keys and its pages have 8 tokens,
# so it holds at most 4 pages.

# %%
from course_lib.figures.sparse.pages import draw_window_pages

draw_window_pages(tokens=96, page_size=8, window=24)

# %% [markdown]
# The next cell runs the library's decode kernel on 1,024 tokens, first with all keys and then with a window of 128. In
# the second run the pages before the window have been given back, and their entries in the block table are −1.
# **Predict** how many times fewer bytes the kernel then loads.

# %%
predict("17 bytes of a decode step, all keys over a window", ..., "times")

# %%
from course_lib.kernels.paged.attention import paged_decode_attention

query = torch.randn(1, 8, 64, device=device).half()
pools = torch.randn(2, 64, 1, 16, 64, device=device).half()  # keys and values: 64 pages of 16 tokens, one KV head
lengths = torch.tensor([1024], dtype=torch.int32, device=device)
table = torch.arange(64, dtype=torch.int32, device=device)[None]
kept = table.masked_fill(table < (1024 - 128) // 16, -1)  # a window of 128 keys: 56 pages were given back
loaded = []
for name, entries, window in (("all keys", table, None), ("a window of 128", kept, 127)):
    loaded.append(metered(paged_decode_attention, query, *pools, entries, lengths, window=window).loaded_bytes)
    print(f"{name:16}{format_bytes(loaded[-1]):>10} loaded, {int((entries >= 0).sum())} pages held")
print(measured("17 bytes of a decode step, all keys over a window", loaded[0] / loaded[1], "times"))

# %% [markdown]
# The window's keys and values are an eighth of all. The rest is the query, the table and the partial results of the
# splits.
#
# Two rules go with giving pages back. First, the *position* of a token does not change when pages before it are
# dropped. If you take the number of kept tokens as the position, the rotary encoding turns each new token by the wrong
# angle. Second, the kernel must never read a page that was given back, because it may belong to another sequence by
# now.
#
# **Where the tiles begin.** If tiles of $T$ keys lie on a grid that starts at key 0, a window usually begins in the
# middle of one. If $W$ is a multiple of $T$, it then touches $W/T + 1$ tiles. Tiles that start at the window's first
# key are always $W/T$: with $T = 32$ and $W = 128$, that is 4 instead of 5. In an open pull request to vLLM a
# contributor measured a gain of 13.5 % on a B200 at a window of 128, and 0.9 % at 4,096
# ([vllm#54718](https://github.com/vllm-project/vllm/pull/54718)).
#
# ## Two things called sink · deeper
#
# The word *sink* is used for two remedies against one problem. The weights of a softmax add up to 1, even if no key
# fits. Trained models put the surplus weight on the first tokens of the text, whatever they are, because every query
# sees those. If a window drops the first tokens, this weight has to go elsewhere, and the model breaks down. Xiao et
# al. found this and named these tokens *attention sinks*
# ([StreamingLLM](https://github.com/mit-han-lab/streaming-llm)).
#
# | | kept first tokens (StreamingLLM) | a learned logit (gpt-oss) |
# |---|---|---|
# | what it is | the first 4 tokens or so stay in the cache | one trained number for each query head |
# | keys and values | like those of any token | none |
# | trap | positions | splits and units |
#
# **Kept first tokens.** A query sees the first $S$ keys and the last $W$. StreamingLLM counts positions *inside the
# cache*, so that the rotary encoding sees no gap between the two. Therefore it caches keys before they are turned, and
# turns them at each step ([streaming-llm#73](https://github.com/mit-han-lab/streaming-llm/issues/73)). If you cache
# turned keys and renumber only the new ones, positions contradict each other
# ([transformers#35350](https://github.com/huggingface/transformers/issues/35350)).
#
# **A learned logit.** Each query head $h$ has a number $s_h$. It joins the softmax like the score of one more key, but
# it has no value:
#
# $$O_i = \frac{\sum_j e^{x_{ij}} V_j}{e^{s_h} + \sum_j e^{x_{ij}}}$$
#
# The score $x_{ij}$ is scaled by $1/\sqrt{D}$ as always, but $s_h$ is not. If all scores are 0, all values are 1, and
# there are 4 keys, then a sink of 0 gives $4/5$ where plain attention gives 1. The missing fifth went into the sink.
# That is a simple test: a kernel that ignores the sink returns 1
# ([modular#6198](https://github.com/modular/modular/issues/6198) was found like this).
#
# In plain PyTorch you can append a column with $s_h$ to the scores, take the softmax, and drop the column before the
# product with the values. A kernel can instead start the running maximum at $s_h$ and the running sum at 1, as if it
# had seen the sink first. The accumulator still starts at 0, because a sink has no value.
#
# **With splits**, each split has a running sum of its own. If each one adds the sink, the merged denominator contains
# it once for every split. In the next cell all values are 1, so the output is the total weight of the keys.

# %%
keys, sink = torch.zeros(64), torch.tensor(3.0)  # 64 keys with the score 0
for splits in (1, 2, 8):
    total = torch.exp(keys).sum() + splits * torch.exp(sink)
    print(f"the sink added by {splits} of {splits} splits: the keys get {torch.exp(keys).sum() / total:.3f}")

# %% [markdown]
# So the result would change with the number of splits, which depends on the GPU and on the length of the text. Exactly
# one place may add the sink: either one split, or the merge. The merge is safer. A split without keys often returns
# early, and if it was the one to add the sink, the sink is lost. AMD's library had both mistakes, and a third
# ([rocm-libraries#12227](https://github.com/ROCm/rocm-libraries/issues/12227)): the loop worked with powers of 2, so
# its scores were multiplied by $\log_2 e$, but the sink was not.
#
# At the merge the sink acts like one more split, whose log-sum-exp is $s_h$ and whose output is zero. As in chapter 08,
# subtract the largest log-sum-exp before you exponentiate.
#
# **The gradient.** Let $p_i$ be the sink's own weight in row $i$. When the sink's logit grows, all other weights shrink
# by the share $p_i$, so $\partial O_i / \partial s_h = -p_i O_i$. In the example with 4 keys $p_i = 1/5$ and
# $O_i = 4/5$, so this is $-0.16$. To get the gradient of the loss $L$, multiply by the gradient $dO_i$ of the output,
# and add up all rows of the head:
#
# $$\frac{\partial L}{\partial s_h} = -\sum_i p_i \; (dO_i \cdot O_i), \qquad p_i = e^{s_h - \text{lse}_i}$$
#
# Here $\text{lse}_i$ is the log-sum-exp *with* the sink. Chapter 10's backward pass computes $dO_i \cdot O_i$ anyway,
# and once the log-sum-exp contains the sink, the other gradients need no change at all.

# %%
# Exercise 17.4 · A sink, over splits, and its gradient
def merge(outputs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the keys of all splits and one sink for each head.

    outputs: float32 [splits, rows, heads, head_dim], splits from 1 on: each split's average of its values, weighted by
        its own softmax. Where a split saw no key, its output was never written: it may hold anything, NaN too.
    lses: float32 [splits, rows, heads], natural logarithms of any size to ±20,000: a split's log-sum-exp without the
        sink, -inf where it saw no key.
    sinks: float32 [heads], natural units, of any size to ±10⁴, or -inf, which means that the head has no sink.
    Returns: output [rows, heads, head_dim] and lse [rows, heads], float32. lse includes the sink. Where no split saw a
    key, the output is 0, and lse is the sink: -inf where there is none. No argument is changed. All tensors are
    contiguous.
    """
    # BEGIN SOLUTION
    outputs = torch.where((lses == -math.inf)[..., None], 0.0, outputs)
    largest = torch.maximum(lses.amax(dim=0), sinks)
    reference = torch.where(largest == -math.inf, 0.0, largest)
    weights = torch.exp(lses - reference)
    total = weights.sum(dim=0) + torch.exp(sinks - reference)
    divisor = torch.where(total == 0, 1.0, total)
    output = (weights[..., None] * outputs).sum(dim=0) / divisor[..., None]
    return output, largest + torch.log(divisor)
    # END SOLUTION


def sink_gradient(
    output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, output_gradient: torch.Tensor
) -> torch.Tensor:
    """The gradient of the loss with respect to each head's sink.

    output, output_gradient: O and dO [rows, heads, head_dim], float32, float16 or bfloat16, both of the same dtype.
    lse: float32 [rows, heads], as `merge` returns it: the sink is included. In a row that saw no key, O is 0 and lse
        is the sink.
    sinks: float32 [heads], as above. A head without a sink gets 0.
    Returns: [heads], float32, computed in float32. No argument is changed. All tensors are contiguous.
    """
    # BEGIN SOLUTION
    share = torch.where(sinks == -math.inf, 0.0, torch.exp(sinks - lse))
    return -(share * (output.float() * output_gradient.float()).sum(dim=-1)).sum(dim=0)
    # END SOLUTION


# %%
best_merge, best_sink_gradient = check("17.4", merge, sink_gradient).best

# %% [markdown]
# ## Block lists · deeper
#
# A window is one pattern of many. Others are several documents in one row, or a window with kept first tokens. Any mask
# can be turned into lists that say, for each tile of queries, which tiles of keys to visit. FlexAttention uses two such
# lists. If all pairs of a tile are seen, it is in the list of *full* tiles and needs no mask. (So far we called such a
# tile whole.) If only some are seen, it is in the list of *partial* tiles. All other tiles are in no list, and cost
# nothing.
#
# The picture shows a window with kept first tokens, in tiles of 4 × 4.

# %%
from course_lib.figures.sparse.lists import draw_block_lists

positions = torch.arange(32)
distance = positions[:, None] - positions[None, :]
draw_block_lists((distance >= 0) & ((distance < 12) | (positions[None, :] < 3)), block=4)

# %% [markdown]
# The third panel is the *transpose*. In the backward pass a program computes dK and dV of one tile of keys, so it needs
# all tiles of queries that see it. These are the same tiles, listed by columns. Look at column 0: because of the kept
# tokens, every tile of queries visits it. So its program does twice as much work as the others.
#
# - **Why two lists?** PyTorch's documentation says that computing full tiles without a mask is worth about 15 % for a
#   causal mask ([BlockMask](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html)).
# - **Lists are made for one length and one block size.** Lists of a longer text gave wrong results for a shorter one
#   ([attention-gym#34](https://github.com/meta-pytorch/attention-gym/issues/34)); today PyTorch refuses them
#   ([pytorch#141625](https://github.com/pytorch/pytorch/pull/141625)).
# - **Making lists costs time.** If the mask depends on the data, new lists are made for every layer and step. On a
#   GB200 FlashInfer's `plan()` took 1.3 to 2.7 ms for each mask
#   ([flashinfer#4554](https://github.com/flashinfer-ai/flashinfer/issues/4554)).

# %% [markdown]
# **Lists of a mask.** All lists of one kind form a table. Row $i$ of `full` begins with the tiles of keys that tile $i$
# of queries visits without a mask, in ascending order. `full_counts[i]` says how many there are, and −1 fills the rest
# of the row. The table is as wide as the longest list could be.
#
# A tile that the end of the text cuts is never full. All of its pairs that exist may be visible, but the kernel still
# needs a mask there, because its loads would reach beyond the tensor.
#
# You can compute the transpose from a table and its counts alone, without the mask. Ignore the entries after a row's
# count: a table may be reused for another text without being cleared. The backward pass transposes the full tiles and
# the partial ones separately.

# %%
# Exercise 17.5 · Block lists, and their transpose
def block_lists(visible: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The lists of full and of partial tiles for each tile of `block` queries. A tile of keys has `block` keys.

    visible: bool [query_length, key_length], any lengths of at least 1 and any pattern; True where the query sees the
        key.
    block: at least 1. The last tile of the queries, and of the keys, may be cut by the end.
    Returns: (full_counts, full, partial_counts, partial), int32: [query_tiles], [query_tiles, key_tiles] and the same
    again, with query_tiles and key_tiles rounded up. A tile is full if it is not cut and all its block · block pairs
    are visible; it is partial if it holds a visible pair and is not full. Row i of a list has the tiles of keys for
    tile i of queries, ascending, and -1 from its count on.
    """
    # BEGIN SOLUTION
    query_length, key_length = visible.shape
    padded = F.pad(visible, (0, -key_length % block, 0, -query_length % block))  # with False
    tiles = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))  # [query_tiles, block, key_tiles, block]
    full, some = tiles.all(3).all(1), tiles.any(3).any(1)
    lists = []
    for chosen in (full, some & ~full):
        counts = chosen.sum(1, keepdim=True)
        order = chosen.int().argsort(dim=1, descending=True, stable=True)
        order[torch.arange(order.shape[1], device=visible.device) >= counts] = -1
        lists += [counts[:, 0].int(), order.int()]
    return tuple(lists)
    # END SOLUTION


def transposed(counts: torch.Tensor, indices: torch.Tensor, key_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The list for each tile of keys: which tiles of queries visit it.

    counts: int32 [query_tiles], how many tiles each tile of queries visits, which may be 0.
    indices: int32 [query_tiles, width], with a width of at least the largest count and at least 1. Row i begins with
        counts[i] different tiles of keys, ascending, each below key_tiles. Entries from the count on may hold anything.
    key_tiles: at least 1.
    Returns: (counts, indices), int32 [key_tiles] and [key_tiles, query_tiles]. Row j has the tiles of queries that
    visit tile j of keys, ascending, and -1 from its count on.
    """
    # BEGIN SOLUTION
    row, entry = (torch.arange(indices.shape[1], device=counts.device) < counts[:, None]).nonzero(as_tuple=True)
    visited = torch.zeros(key_tiles, len(counts), dtype=torch.bool, device=counts.device)
    visited[indices[row, entry].long(), row] = True
    totals = visited.sum(1)
    order = visited.int().argsort(dim=1, descending=True, stable=True)
    order[torch.arange(len(counts), device=counts.device) >= totals[:, None]] = -1
    return totals.int(), order.int()
    # END SOLUTION


# %%
best_block_lists, best_transposed = check("17.5", block_lists, transposed).best

# %% [markdown]
# ## Choosing keys · deeper
#
# A window decides by position. But the important key may be 50,000 tokens back. So newer models *choose*: a cheap
# computation scores all keys, and attention then looks only at the best ones. Three designs differ in what they score.
#
# - **MoBA** cuts the keys into blocks, and scores a block by the query times the mean of its keys. A query takes the
#   best $k$ blocks. Its own block is always one of the $k$, and is causal inside
#   ([MoBA#27](https://github.com/MoonshotAI/MoBA/issues/27)). That block's score must not decide, because the mean of
#   its keys contains the future.
# - **NSA** has three branches and adds them with learned gates. The first is attention over compressed blocks of
#   $l = 32$ keys, one block every $d = 16$ keys. The second is attention over the $n = 16$ blocks of $l' = 64$ keys
#   that got the most weight in the first. The third is a window of 512 keys. All query heads of a group share their
#   keys, so they choose together, and each key is then loaded once. At 65,536 tokens a query reads 4,096 + 1,024 + 512
#   keys, 8.6 % of all.
# - **DeepSeek's sparse attention** (V3.2) scores single tokens. A *lightning indexer* has small queries of its own, and
#   one small key for each token. It has $H_I = 64$ heads of dimension 128, and the score of query $t$ and key $s$ is
#   $\sum_h w_{t,h} \cdot \text{ReLU}(q_{t,h} \cdot k_s)$, with a weight $w_{t,h}$ for each head. The 2,048 best keys
#   get attention. ReLU turns negative products into 0, so they cannot cancel the positive ones of other heads.
#
# **$O(N^2)$ again.** In all three the choice depends on every key, only more cheaply: NSA and MoBA score one number for
# each block of keys. NSA's compressed branch reads $N/16$ of them for each query. DeepSeek's attention over 2,048 keys
# grows with $N$, but its indexer scores every pair, so its cost grows with $N^2$.
#
# **Top-k without sorting.** The scores of one query do not fit into a tile, and sorting 65,536 numbers to find 2,048 is
# wasteful. A *radix histogram* instead finds the *border*, which is the $k$-th largest number, digit by digit. First
# turn the floats into integers of the same order. Each pass then counts how many numbers have each value of a digit.
#
# The picture shows the passes for 24 numbers with two digits of 3 bits, and $k = 8$. The border's digit is the first
# one from the left at which enough numbers are reached.

# %%
from course_lib.figures.sparse.radix import draw_radix_passes

draw_radix_passes([21, 61, 14, 43, 35, 9, 58, 29, 47, 3, 40, 55, 12, 44, 26, 43, 19, 49, 31, 6, 45, 37, 22, 11], k=8)

# %% [markdown]
# The 4 numbers with a larger top digit are among the 8 largest, so 4 are still missing. The 6 numbers with the border's
# digit go on to the next pass. After that pass the border is known: its digits are 5 and 3, so it is 43. Two numbers
# are 43, but only one of them is still needed. Numbers of 32 bits take four passes of 8 bits. A last pass writes the
# positions of all numbers above the border, and of as many equal to it as are missing.
#
# Three details matter. Ties at the border need a rule, such as "the lower position wins", or two runs choose
# differently. −0 and +0 are equal numbers with different bits. And the first 2,047 queries see fewer than $k$ keys, so
# they must choose all of them. Their result then equals plain attention.
#
# One test fits all three designs: change the keys after position $t$. The choice for $t$ must not change.

# %% [markdown]
# **The indexer's choice.** The first function computes the indexer's scores, in PyTorch. The second runs a kernel that
# chooses. One program takes one row, and walks over its visible keys in tiles. It may load each score six times; the
# four passes and the last one need five.
#
# First turn each score into an integer. Read the bits of the float32 as an int32 $b$. Where the score is positive, $b$
# grows with it. Where it is negative, $b$ falls as the score grows, so take $-2^{31} - b$ when $b < 0$. This also turns
# the bits of −0 into 0, which are the bits of +0.
#
# Shifts by 24, 16, 8 and 0 bits give the four digits, from the top. `tl.histogram` counts them, with a mask for the
# keys whose digits so far are the border's. `tl.cumsum(counts, axis=0, reverse=True)` adds up the counts from the top.
#
# In the last pass each chosen key needs its place in the list. Within a tile `tl.cumsum` gives it, and a running number
# carries it from tile to tile.

# %%
# Exercise 17.6 · The indexer's choice
def index_scores(query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The indexer's score of each key for each row: the sum over heads h of weights[row, h] · ReLU(query_h · key).

    query: float32 [rows, heads, dim]. key: float32 [keys, dim], which all heads share. weights: float32 [rows, heads],
        of either sign.
    Returns: float32 [rows, keys]. All keys are scored. There is no mask, and no scale but the weights.
    """
    # BEGIN SOLUTION
    products = torch.einsum("rhd,kd->rhk", query, key)
    return torch.einsum("rh,rhk->rk", weights, products.relu())
    # END SOLUTION


@triton.jit
def ordered_bits(scores, start, lanes, seen):
    """For one tile: the scores as int32 of the same order, and which of them are visible."""
    # BEGIN SOLUTION
    inside = start + lanes < seen
    bits = tl.load(scores + start + lanes, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, -2147483648 - bits), inside
    # END SOLUTION


@triton.jit(do_not_specialize=["k"])
def choose_kernel(score_pointer, visible_pointer, chosen_pointer, row_stride, k, BLOCK: tl.constexpr):
    """One program: the choice of one row."""
    # BEGIN SOLUTION
    row = tl.program_id(0).to(tl.int64)
    scores, chosen = score_pointer + row * row_stride, chosen_pointer + row * k
    seen = tl.load(visible_pointer + row)
    lanes, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    missing = tl.minimum(k, seen)  # keys still to be found among those with the border's digits so far
    border = tl.full([], 0, tl.int32)
    for part in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, seen, BLOCK):
            ordered, inside = ordered_bits(scores, start, lanes, seen)
            if part == 0:
                digit = (ordered >> 24) + 128
            else:
                inside = inside & (ordered >> (32 - 8 * part) == border)
                digit = (ordered >> (24 - 8 * part)) & 255
            counts += tl.histogram(digit, 256, mask=inside)
        reached = tl.cumsum(counts, axis=0, reverse=True)  # keys with this digit or a larger one
        largest = tl.max(tl.where(reached >= missing, digits, 0), axis=0)
        missing -= tl.sum(tl.where(digits > largest, counts, 0), axis=0)
        border = largest - 128 if part == 0 else border * 256 + largest

    written = tl.full([], 0, tl.int32)
    for start in range(0, seen, BLOCK):
        ordered, inside = ordered_bits(scores, start, lanes, seen)
        equal = inside & (ordered == border)
        among_equal = tl.cumsum(equal.to(tl.int32), axis=0)
        taken = (inside & (ordered > border)) | (equal & (among_equal <= missing))
        place = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(chosen + place, start + lanes, mask=taken)
        missing -= tl.minimum(missing, tl.sum(equal.to(tl.int32), axis=0))
        written += tl.sum(taken.to(tl.int32), axis=0)
    for start in range(written, k, BLOCK):
        tl.store(chosen + start + lanes, -1, mask=start + lanes < k)
    # END SOLUTION


def choose(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    """The positions of the k largest visible scores of each row, by Triton.

    scores: float32 [rows, length], from 1 to 100,000 long, so a row may not fit into one tile. Of any size, infinities
        too. Rows may lie any number of elements apart, and may begin beyond 2³¹ elements; a row's elements lie side by
        side.
    visible: int32 [rows], 0 to length. Row t sees its first visible[t] keys. The other scores may be anything, even
        NaN; no visible score is NaN.
    k: at least 1, up to 4,096; it may be larger than the length.
    Returns: int32 [rows, k], the positions in ascending order. Of equal scores the lower position is chosen first, and
    -0 equals +0. A row with fewer than k visible keys has all of them, whatever their scores, and -1 after them.
    Triton kernels load each visible score at most 6 times and no other score. PyTorch computes and copies nothing.
    """
    # BEGIN SOLUTION
    rows, length = scores.shape
    chosen = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    block = min(2048, triton.next_power_of_2(max(16, length)))
    choose_kernel[(rows,)](scores, visible, chosen, scores.stride(0), k, BLOCK=block)
    return chosen
    # END SOLUTION


# %%
best_index_scores, best_choose = check("17.6", index_scores, choose).best

# %% [markdown]
# ## From which length it pays
#
# In a model like DeepSeek-V3.2 a small *indexer* scores all keys, and attention then looks only at the best $k$ of
# them. The indexer has heads of its own, fewer and smaller than attention's: 64 of dimension 128, and one small key for
# each token. Users report that sparse attention was slower than dense
# ([NSA-triton#3](https://github.com/XunhaoLai/native-sparse-attention-triton/issues/3)). At short lengths that has to
# be so, because choosing costs something at every length, and saves nothing until the text is longer than $k$.
#
# Let $P(N, c) = \sum_t \min(t + 1, c)$ be the number of pairs when each query sees at most $c$ keys. For example,
# $P(4, 2) = 1 + 2 + 2 + 2 = 7$. Attention has $H$ heads of dimension $D$, and the indexer has $H_I$ heads of dimension
# $D_I$:
#
# | | FLOPs |
# |---|---|
# | all keys | $4 H D \; P(N, N)$ |
# | a window | $4 H D \; P(N, W)$ |
# | chosen keys | $2 H_I D_I \; P(N, N) + 4 H D \; P(N, k)$ |
#
# The indexer computes scores but no values, so it has a 2 where attention has a 4.
#
# Take DeepSeek-V3.2, a little simplified: $H = 128$ heads, with keys of dimension 192 and values of 128, so $D = 160$
# on average; $H_I = 64$, $D_I = 128$, $k = 2048$. A pair costs 81,920 FLOPs in attention and 16,384 in the indexer, a
# fifth. So at equal rates choosing can never be more than 5 times as fast. DeepSeek's indexer computes in FP8, at twice
# the rate, so there the limit is 10.
#
# Rates can also work against choosing. Chosen keys lie scattered in memory, and the tiles of neighbouring queries do
# not share them. Suppose that attention over chosen keys reaches half the rate of dense attention, and that the indexer
# runs at the full rate of dense attention. **Predict** from which length choosing pays.

# %%
predict("17 length from which choosing pays", ..., "tokens")

# %%
from course_lib.figures.sparse.costs import draw_costs

HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, CHOSEN, RATE = 128, 160, 64, 128, 2048, 600e12  # FLOP/s, an assumption


def layer_seconds(kind, length, chosen_rate=0.5):
    """Seconds of one layer by its FLOPs. chosen_rate: of attention over chosen keys, as a share of the dense rate."""
    pair = 4 * HEADS * HEAD_DIM / RATE
    if kind == "all keys":
        return pair * pairs(length, length)
    if kind == "a window of 1,024":
        return pair * pairs(length, 1024)
    return 2 * INDEX_HEADS * INDEX_DIM / RATE * pairs(length, length) + pair / chosen_rate * pairs(length, CHOSEN)


kinds = ("all keys", "2,048 chosen keys", "a window of 1,024")
lines = {kind: {2**power: layer_seconds(kind, 2**power) for power in range(10, 18)} for kind in kinds}
crossing = next(n for n in range(CHOSEN, 10**6) if layer_seconds(kinds[1], n) <= layer_seconds(kinds[0], n))
measured("17 length from which choosing pays", crossing, "tokens")
draw_costs(lines, "time of a layer, by its FLOPs", "one layer with DeepSeek-V3.2's numbers, at 600 TFLOP/s",
           (crossing, f"choosing pays from {crossing:,} tokens on"))

# %% [markdown]
# If attention over chosen keys runs at the rate of dense attention, the lines cross at 3,705 tokens. At half the rate
# they cross at 9,086, and at a quarter of the rate still later. So the crossing depends on how good the kernels are. On
# an H100 a whole module of NSA, with its projections, took 28.0 ms at 16,384 tokens, where a module with plain
# attention took 20.4. At 32,768 tokens it took 58.6 ms against 64.1
# ([NSA-triton#9](https://github.com/XunhaoLai/native-sparse-attention-triton/issues/9)). So there the lines crossed
# between these lengths.

# %%
# Exercise 17.7 · From which length choosing pays
def flops(kind: str, length: int, shape: dict) -> int:
    """The FLOPs of causal attention over a prompt of `length` tokens, 0 to 2⁴⁰, as an exact Python int.

    kind: "dense", "window" or "chosen". Query t, counted from 0, sees t + 1 keys. "dense": it attends to all of them.
        "window": to the last shape["window"], its own included. "chosen": to shape["k"] chosen ones. Where it sees
        fewer keys than that, it attends to all of them.
    shape: a dict of whole numbers, each at least 1: "query_heads", "head_dim", "index_heads", "index_dim", "window"
        and "k".
    For each query, attention to one key costs 4 · query_heads · head_dim FLOPs. For "chosen", an indexer also scores
    every key that a query sees, for 2 · index_heads · index_dim FLOPs each, however short the prompt is. Nothing else
    is counted. There may be 2⁴⁰ tokens, so do not loop over queries.
    """
    # BEGIN SOLUTION
    def pairs(most):
        full = min(length, most)
        return full * (full + 1) // 2 + (length - full) * full

    attended = 4 * shape["query_heads"] * shape["head_dim"]
    if kind == "chosen":
        return 2 * shape["index_heads"] * shape["index_dim"] * pairs(length) + attended * pairs(shape["k"])
    return attended * pairs(length if kind == "dense" else shape["window"])
    # END SOLUTION


def crossover(shape: dict, rates: dict) -> int | None:
    """The least length from which on chosen keys never take longer than dense attention; None if there is none.

    shape: as for `flops`. rates: FLOPs a second, whole numbers or floats above 0: "dense" for dense attention, "index"
        for the indexer's scores, "chosen" for attention to the chosen keys. The indexer runs first, then attention.
    Returns: a Python int, at least 1, or None. If both take equally long at a length, chosen keys do not take longer
    there. Times that differ, differ by enough for float64 to tell them apart, and equal ones are exact in float64. The
    length is at most 2⁴⁰, so do not search it one token after another.
    """
    # BEGIN SOLUTION
    dense = 4 * shape["query_heads"] * shape["head_dim"] / rates["dense"]  # seconds per pair
    index = 2 * shape["index_heads"] * shape["index_dim"] / rates["index"]
    if index >= dense:
        return None
    chosen = 4 * shape["query_heads"] * shape["head_dim"] / rates["chosen"]

    def pays(length):
        full = min(length, shape["k"])
        attended = full * (full + 1) // 2 + (length - full) * full
        return index * (length * (length + 1) // 2) + chosen * attended <= dense * (length * (length + 1) // 2)

    high = 1
    while not pays(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
    # END SOLUTION


# %%
best_flops, best_crossover = check("17.7", flops, crossover).best

# %% [markdown]
# In decode, count bytes instead: dense attention reads the whole cache, while choosing reads $k$ rows of it and the
# small key of every token. Take 8 KV heads of dimension 128 in 16 bits, which is 4,096 bytes a token, and an indexer's
# key of 256 bytes. By bytes, choosing pays when $256 N + 4096 \cdot 2048 < 4096 N$, from 2,185 tokens on.
#
# The next picture shows what one decode step took on an H200 (PyTorch 2.11, Triton 3.6, November 2026), with this
# library's indexer, choice and attention over the list. **Predict** where the two measured lines cross. Each launch
# takes a few microseconds, and the choice alone has six of them.

# %%
predict("17 length from which choosing pays in decode", ..., "tokens")

# %%
all_keys = {8192: 21.9e-6, 32_768: 49.4e-6, 131_072: 137.9e-6, 524_288: 488.2e-6}  # seconds, measured
chosen_keys = {8192: 56.9e-6, 32_768: 59.4e-6, 131_072: 76.7e-6, 524_288: 153.9e-6}
behind, ahead = (chosen_keys[length] - all_keys[length] for length in (32_768, 131_072))
crossing = 32_768 + (131_072 - 32_768) * behind / (behind - ahead)  # on a straight line between the two
measured("17 length from which choosing pays in decode", round(crossing, -3), "tokens")
draw_costs({"all keys": all_keys, "2,048 chosen keys": chosen_keys,
            "all keys, by bytes": {length: 4096 * length / 4.8e12 for length in all_keys}},
           "time of a decode step", "one sequence, 32 query heads on 8 KV heads of dimension 128, on an H200",
           (crossing, f"pays from about {crossing / 1000:.0f},000 tokens on"))

# %% [markdown]
# They cross at about 47,000 tokens, twenty times as far as the bytes say. At 8,192 tokens the scores, the choice and
# the attention over the list take 57 µs. Hardly any of that is the time of memory. It is the time of launches that wait
# for each other, and choosing only pays where dense attention takes longer than they do.

# %% [markdown]
# And the prompt? There whole tiles are left out. Take three kinds of attention over a prompt, in one layer with 16
# heads of dimension 128: all keys, a window of 1,024, and block lists in which each tile of 128 queries visits its own
# tile of keys and 15 earlier ones. With all keys a tile of queries visits all tiles up to its own. So up to 16 tiles,
# or 2,048 tokens, the lists hold the same tiles, and from there on they hold fewer. **Predict** the length from which
# block lists pay, as measured on an H200 in the same way.

# %%
predict("17 length from which block lists pay", ..., "tokens")

# %%
lengths = [2**power for power in range(10, 17)]
prompt_times = {  # µs, measured
    "all keys": (23.5, 39.7, 116.2, 423.8, 1670.1, 6819.7, 27219.5),
    "16 tiles a row": (26.0, 44.8, 98.7, 213.9, 432.1, 924.4, 1944.6),
    "a window of 1,024": (24.2, 39.1, 70.1, 143.3, 277.9, 540.0, 1130.7),
}
prompt_costs = {kind: {n: 1e-6 * time for n, time in zip(lengths, times)} for kind, times in prompt_times.items()}
behind, ahead = (prompt_costs["16 tiles a row"][n] - prompt_costs["all keys"][n] for n in (2048, 4096))
crossing = 2048 + 2048 * behind / (behind - ahead)
measured("17 length from which block lists pay", round(crossing, -2), "tokens")
draw_costs(prompt_costs, "time of a prompt's attention", "one sequence, 16 heads of dimension 128, on an H200",
           (crossing, f"pays from about {round(crossing, -2):,.0f} tokens on"))

# %% [markdown]
# They cross at about 2,500 tokens, close to where the tiles say. At 65,536 tokens a row visits 16 tiles instead of
# 256.5 on average, a 16th, and takes a 14th of the time. Whole tiles keep nearly everything that makes a kernel fast,
# while single keys, picked one by one, do not. Making the lists is not in these times.

# %% [markdown]
# ## One long row among short ones · deeper
#
# A kernel ends when its last program ends. In SGLang's decode step of DeepSeek-V4 on an AMD GPU, one program walked
# over 5,000 entries while others had 200 ([sglang#39968](https://github.com/sgl-project/sglang/pull/39968)). There were
# almost enough programs to fill the chip, so a rule that only counts programs did not split the long one.
#
# The next cell gives 48 rows to a chip with 16 slots, which are places for a running program: 47 rows with 200 keys,
# followed by one with 5,000. A slot takes the next program when it is free. If all keys were shared evenly, each slot
# would get 900. **Predict** how many times as long as this even share the rows take in the order in which they come.

# %%
predict("17 time with a long row over an even share", ..., "times")

# %%
from course_lib.figures.sparse.loads import draw_loads
from course_lib.hardware.schedule import finish, scheduled

SLOTS, rows = 16, [200] * 47 + [5000]
works = {
    "as they come": rows,
    "longest first": sorted(rows, reverse=True),
    "in pieces of 256 at most": [min(256, row - start) for row in rows for start in range(0, row, 256)],
}
plans = {name: scheduled(programs, SLOTS) for name, programs in works.items()}
shares = {name: finish(plan) * SLOTS / sum(rows) for name, plan in plans.items()}
for name, share in shares.items():
    print(f"{name:26}{len(works[name]):>4} programs, {share:.2f} times an even share")
print(measured("17 time with a long row over an even share", shares["as they come"], "times"))
draw_loads(plans, SLOTS, "keys (dashed: an even share)")

# %% [markdown]
# *Sorting* the rows helps little, because the long row alone takes longer than the other rows take on the other 15
# slots. *Splitting* helps, as in chapter 08: with pieces of at most 256 keys no program is long, but the result needs a
# merge. A *persistent* kernel starts one program for each slot, and each program takes pieces from a common list until
# the list is empty.
#
# So plan by the longest program, not by the number of programs. Splitting is not free either, because the pieces must
# be merged.

# %% [markdown]
# ## Finale: a text longer than the window
#
# Chapter 05's small model was trained once more, this time with a window of 64 keys in each of its four layers. Now it
# writes a text longer than its window. Your kernel of 17.3 computes the prompt's attention, and the library's paged
# decode kernel computes that of each new token. After each step the cache gives back every page that no later query can
# see. The prompt is 140 bytes from a part of the book that the model has not read, and each byte is a token.

# %%
from course_lib.kernels.decode.append import append_to_pages_reference
from course_lib.models.kinds import text_parts
from course_lib.models.plugged import who_runs
from course_lib.models.trained import trained_model
from course_lib.serving.caches.sequences import SequencePages
from course_lib.serving.together import write_together

writer = trained_model("window", device=device).requires_grad_(False)
prompt, page_size = text_parts()[1][:140], 16
new_tokens = 861 if on_gpu else 161  # the last one is written, but never run through the model
print(who_runs({"attention (17.3)": best_window_attention}))


def your_attention(query, key, value, causal, window):
    """What the decoder calls. Its `window` counts the keys before a query's own; yours counts the query's own too."""
    return best_window_attention(query, key, value, window + 1)


def write(drop):
    """The text, and the number of pages held after each step: those of the window, or all of them with drop=False."""
    cache = SequencePages(
        writer.config, 64, page_size, append=append_to_pages_reference, decode=paged_decode_attention,
        attention=your_attention, drop=drop, device=device,
    )
    held = []
    written = write_together(writer, cache, [prompt], new_tokens, each_step=lambda _: held.append(len(cache.held())))
    return written.texts[0], held


# %% [markdown]
# **Predict.** Pages have 16 tokens, so 300 tokens fill 18 pages and part of a 19th. How many of these does the cache
# hold after 300 tokens? The next query stands at position 300, counted from 0.

# %%
predict("17 pages held after 300 tokens", ..., "pages")

# %%
text, held = write(drop=True)
print(measured("17 pages held after 300 tokens", held[300 - len(prompt) - 1], "pages"))
print(text)

# %% [markdown]
# The query at position 300 sees the keys 237 to 300. Key 237 lies in page 14 and the last token, 299, in page 18, so
# five pages are held. Now write the same text with a cache that keeps everything.

# %%
text_of_all, held_of_all = write(drop=False)
print("the same text:", text == text_of_all)
print(f"{'tokens':>6}{'pages held':>12}{'of all':>8}")
for tokens in range(180, len(prompt) + new_tokens, 120 if on_gpu else 40):
    step = tokens - len(prompt) - 1
    print(f"{tokens:>6}{held[step]:>12}{held_of_all[step]:>8}")

# %% [markdown]
# The cache no longer grows. With this window and page size a sequence needs at most $\lceil 63 / 16 \rceil + 1 = 5$
# pages for a step, after 300 tokens as after a million. Only the prompt was stored whole for a moment, because it ran
# in one piece.
#
# Nothing was lost by giving pages back, because no query could see them. What the model loses, it loses through the
# window itself. On text that it has not read, it is about 0.08 nats a byte worse than the same model without a window,
# over three seeds. It can still use tokens more than 63 places back, though. Each layer reads what the layer below has
# gathered, so through four layers something of a token can travel $4 \cdot 63 = 252$ places.

# %% [markdown]
# ## The chapter's kernels at a glance
#
# | windowed attention | |
# |---|---|
# | wins | long prompts: 1.73 ms instead of 51.5 at 65,536 tokens and a window of 1,024 (measured, as above) |
# | loses | windows of a tile or less: 128 keys visit two tiles of 128, twice what the FLOPs say |
# | falls back | texts shorter than the window: plain causal attention |
# | trap | the first tile visited may be hidden from some rows: $-\infty - (-\infty)$ is NaN |
#
# | windowed decode, in pages | |
# |---|---|
# | wins | 4,096 keys of 131,072: 17.4 µs instead of 140; with 64 users 259 instead of 7,700 (measured) |
# | loses | if it only masks, it reads everything |
# | falls back | layers without a window keep all pages, and most models have some |
# | trap | positions that count only kept tokens; a sink added in each split |
#
# | block lists | |
# |---|---|
# | wins | one tile in eight, 16,384 tokens, 16 heads of 128: 0.46 ms instead of 3.48 (measured) |
# | loses | a pattern that is random within its tiles: every tile is partial, and has a mask of its own |
# | falls back | other blocks than 128 × 128, and float32: plain Triton, about half as fast on a Hopper GPU |
# | trap | keys' gradients need the transposed lists, of the same mask |
#
# | chosen keys | |
# |---|---|
# | wins | 2,048 keys of 131,072 in decode: 77 µs, the choice included, instead of 138 (measured) |
# | loses | below 3,705 tokens at equal rates (computed); in this library's decode still at 32,768 (measured) |
# | falls back | up to $k$ keys: it must equal dense attention |
# | trap | ties at the border; the mean of a block that reaches into the future |
#
# In one later run on such a GPU others' kernels stood beside these. With the window of 1,024 at 65,536 tokens
# FlashAttention 4 took 1.77 ms and ours 1.73. For the block lists FlashAttention 4 took 0.460 ms, ours 0.464 and
# PyTorch's FlexAttention 0.83. For the decode step with a window FlashInfer took 21.1 µs for one user
# and 263 for 64, and ours 17.4 and 259.
#
# All times are from one H200, with PyTorch 2.11 and Triton 3.6, November 2026. The decode steps have 32 query heads on
# 8 KV heads of dimension 128, and pages of 16 tokens. A step with a window took as long as a step on a cache that holds
# only the window's keys. For one user it is 8 times as fast as with all keys, although it reads a 32nd of the bytes:
# 16.8 MB take 3.5 µs at 4.8 TB/s, so most of the 17.4 µs are fixed costs, such as launches. With 64 users it is 30
# times.
#
# A decode step with 2,048 chosen keys, for one user, in µs:
#
# | context | scores | choice | over the list | together | all keys |
# |---|---|---|---|---|---|
# | 8,192 | 7.9 | 32.4 | 16.6 | 56.9 | 21.9 |
# | 32,768 | 10.6 | 32.0 | 16.8 | 59.4 | 49.4 |
# | 131,072 | 26.0 | 33.7 | 17.0 | 76.7 | 137.9 |
# | 524,288 | 72.1 | 64.8 | 17.0 | 153.9 | 488.2 |
#
# So here choosing pays from somewhere between 32,768 and 131,072 tokens on, much later than the FLOPs say. Up to
# 131,072 tokens the choice takes about 32 µs whatever the length, because it is six launches, one after the other. Our
# first version needed only one launch, in which one program chose for a row. At 131,072 scores it took 606 µs, four
# times as long as the dense step, because only one of the 132 multiprocessors was at work.
#
# ## Check yourself
#
# Answer these on paper. Then run the next cell and open the answers.
#
# 1. A layer has a window of 4,096 keys and pages of 16 tokens. How many pages does a sequence of a million tokens hold?
# 2. With tiles of 128 × 128 and a window of 256, how many tiles does a tile of queries visit, far from the start? How
#    many of them are whole?
# 3. A review says: "The sink is added to the running sum, but the accumulator is not updated. That is a bug." Is it?
# 4. Your windowed layer became 8 times as fast when you bounded its loop, and its bytes did not change. What did it do
#    before?

# %% jupyter={"source_hidden": true} tags=["hide-input"]
most_pages = -(-(4096 - 1) // 16) + 1
wide = tiles_visited(8192, 256) - tiles_visited(8192 - 128, 256)  # what one more tile of queries visits
self_check(
    f"At most {most_pages}, because the window's {4096:,} tokens may begin in the middle of a page.",
    f"{wide}. One is whole: the left one is cut by the window, the right one by the diagonal.",
    "No, it is right: a sink has no value, so it changes only the denominator. The maximum must include it as well.",
    "It skipped: it tested every tile up to the diagonal, and loaded only those in the window.",
)

# %% [markdown]
# ## What production systems do
#
# All sources were read in November 2026.
#
# - **gpt-oss** has a window of 128 keys in every other layer, and a learned logit for each of its 64 query heads in all
#   layers. [OpenAI's reference](https://github.com/openai/gpt-oss/blob/main/gpt_oss/torch/model.py) appends it as a
#   column.
# - **Gemma 3** repeats five layers with a window and one without. The [configuration in
#   transformers](https://github.com/huggingface/transformers/blob/main/src/transformers/models/gemma3/configuration_gemma3.py)
#   has this as a pattern of 6. The [report](https://arxiv.org/abs/2503.19786) gives the reason: the cache's memory at
#   long contexts. The layers without a window keep everything, so the [cache still
#   grows](https://github.com/ml-explore/mlx/discussions/3840).
# - **DeepSeek-V3.2** was made from a dense model by further training, and its
#   [card](https://github.com/deepseek-ai/DeepSeek-V3.2-Exp) reports results on par with that model. The defaults of
#   [NVIDIA's
#   port](https://docs.nvidia.com/nemo/automodel/nemo-automodel/nemo_automodel/components/models/deepseek_v32/config)
#   are 64 indexer heads of dimension 128 and 2,048 keys.
# - **FlexAttention** takes the mask as a Python function, makes [the
#   lists](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) from it, and compiles the function
#   into the kernel.
# - **StreamingLLM** lets a model keep writing fluently, but does not extend its context, as its
#   [authors](https://github.com/mit-han-lab/streaming-llm) say.
# - **NSA** has experimental kernels for Blackwell in [cuDNN's
#   frontend](https://docs.nvidia.com/deeplearning/cudnn/frontend/v1.18.0/fe-oss-apis/nsa.html).
# - **MoBA** was evaluated with blocks of 4,096 tokens, 12 of them for each query, and full attention in the last three
#   layers ([MoBA#29](https://github.com/MoonshotAI/MoBA/issues/29)). Up to 49,152 tokens it equals full attention.
#
# **In this library.** `attention` of `course_lib.kernels.attention.operator`, `decode_attention` and
# `paged_decode_attention` take `window` and `sink`. `course_lib/kernels/sparse/` has block lists, the indexer, the
# exact choice and attention over a list of keys.
#
# ## Papers
#
# - Xiao et al.: *Efficient Streaming Language Models with Attention Sinks*, [arXiv
#   2309.17453](https://arxiv.org/abs/2309.17453).
# - Dong et al.: *Flex Attention: A Programming Model for Generating Optimized Attention Kernels*, [arXiv
#   2412.05496](https://arxiv.org/abs/2412.05496).
# - Yuan et al.: *Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention*, [arXiv
#   2502.11089](https://arxiv.org/abs/2502.11089).
# - Lu et al.: *MoBA: Mixture of Block Attention for Long-Context LLMs*, [arXiv
#   2502.13189](https://arxiv.org/abs/2502.13189).
# - DeepSeek-AI: *DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models*, [arXiv
#   2512.02556](https://arxiv.org/abs/2512.02556).

# %%
progress()
