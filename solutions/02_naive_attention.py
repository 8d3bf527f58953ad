# %% [markdown]
# # 02 · Naive attention
#
# **The question.** One attention layer reads 8192 tokens. It has 32 heads of dimension 128 and works in float16. Its
# inputs and its output are 268 MB together, and its arithmetic is 1.1 TFLOP. By its datasheet, an H100 does that
# arithmetic in 1.1 ms on its *tensor cores*, the units that multiply small matrices. But with one kernel for each step
# of the formula, it cannot finish in less than 5 ms on that card. With 26,000 tokens it does not run at all, because
# the card's 80 GiB of memory are full. Where do the milliseconds and the gigabytes go?
#
# In this chapter you write that version, as three Triton kernels. You count its bytes on paper, a meter counts them
# again, and then you predict its time and measure it. Everything later in the course is compared with it.
#
# **Time.** About 3½ hours, with six exercises. The **core path** takes two hours at most: exercises 2.1, 2.3, 2.4 and
# 2.5, and *Predicted against measured*. You can skip every section whose heading ends in *· deeper*. Run its cells as
# they are, because later cells use what they define, and the course's answers stand in for yours.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

device = default_device()

# %% [markdown]
# ## What the formula costs
#
# Attention compares every query with every key, which gives the scores $S$. The softmax turns each row of scores into
# weights that add up to 1. The output is the average of the values with these weights. For one head, with queries $Q$,
# keys $K$ and values $V$:
#
# $$S = \frac{1}{\sqrt{D}}\,Q K^\top, \qquad P = \operatorname{softmax}(S)\ \text{row by row}, \qquad O = P V$$
#
# | | name | shape, for each head | in the question's layer |
# |---|---|---|---|
# | $Q$, $O$ | queries, output | [query_length, head_dim] | 67 MB each |
# | $K$, $V$ | keys, values | [key_length, head_dim] | 67 MB each |
# | $S$ | scores | [query_length, key_length] | **4.3 GB** |
# | $P$ | probabilities | [query_length, key_length] | **4.3 GB** |
#
# First the arithmetic. Let $M$ be the number of queries, $N$ the number of keys, $D$ the head dimension and $H$ the
# number of heads. Each matrix product takes $2 H M N D$ FLOPs, because a multiply-add counts as two. The softmax takes
# about $4 H M N$. At $D = 128$ that is 0.78 % of the two products together, so we leave it out. The rest is $4 H M N D
# = 4 \cdot 32 \cdot 8192^2 \cdot 128 = 1.1 \cdot 10^{12}$ FLOPs, about a millisecond on an H100.
#
# Now the bytes. $S$ has one number for every pair of a query and a key, 4.3 GB in all. The largest memory on the chip,
# the L2 cache, holds 50 MB, so $S$ does not fit. The kernel that computes $S$ has to write it to memory, and the next
# kernel has to read it back. The same happens with $P$. So there are three kernels, and each one reads its inputs from
# memory and writes its result there. We call that a *pass*. In the drawing, the area of a square stands for its bytes:

# %%
from course_lib.figures.attention.three_passes import draw_three_passes

draw_three_passes(heads=32, query_length=8192, key_length=8192, head_dim=128, item_bytes=2)

# %% [markdown]
# $S$ is written and read, then $P$ is written and read. So a matrix of $M \times N$ crosses the memory bus four times,
# and these four crossings are 98 % of all the bytes. An H100 moves at most 3.35 TB/s by its datasheet. The 17.4 GB
# therefore take at least 5.2 ms, nearly five times as long as the arithmetic.
#
# The arithmetic intensity of chapter 01 says the same. An H100's balance point is 295 FLOP/byte. The softmax does 4
# FLOPs on each element and moves 4 bytes, which is 1 FLOP/byte. A product does $2 M N D$ FLOPs for each head and moves
# at least the $2 M N$ bytes of a float16 matrix. That is $D$ FLOP/byte at most, and $D$ is 64 or 128 in most models.
# **So on an H100 all three passes wait for memory**, because of a matrix that is not even part of the result.
#
# **Exercise 2.1.** Put the count into a function. The numbers in the drawing are your first test.

# %%
# Exercise 2.1 · Bytes of the three passes
def pass_bytes(heads: int, query_length: int, key_length: int, head_dim: int, item_bytes: int) -> tuple[int, int, int]:
    """Bytes that each of the three passes must move: (scores, softmax, output).

    Each pass is a kernel of its own. It reads every tensor that it needs once and writes its result once.
    heads counts all heads of all sequences; item_bytes is the size of an element, the same for all tensors.
    """
    # BEGIN SOLUTION
    queries = heads * query_length * head_dim * item_bytes  # Q, and O
    keys = heads * key_length * head_dim * item_bytes  # K, and V
    matrix = heads * query_length * key_length * item_bytes  # S, and P
    return queries + keys + matrix, matrix + matrix, matrix + keys + queries
    # END SOLUTION


# %%
best_pass_bytes = check("2.1", pass_bytes).best

# %% [markdown]
# Bytes divided by your memory's bandwidth give a time. `ceilings()` measured that bandwidth in chapter 01 and remembers
# it. The next cell prints each pass's least time and what limits it: *memory* or *compute*. **Predict** before you run
# it: what is the least time that the question's layer can take on your device?

# %%
from course_lib.hardware.ceilings.measured import ceilings
from course_lib.hardware.roofline import Work, bound, floor_time
from course_lib.hardware.units import format_bandwidth, format_bytes, format_capacity, format_seconds

PASSES = ("scores", "softmax", "output")


def three_works(heads, query_length, key_length, head_dim, dtype):
    """The work of each pass, as in chapter 01: FLOPs, bytes, and which units do the arithmetic."""
    pairs = heads * query_length * key_length
    flops = (2 * pairs * head_dim, 4 * pairs, 2 * pairs * head_dim)
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    moved = best_pass_bytes(heads, query_length, key_length, head_dim, item_bytes)
    matrix_unit = str(dtype).removeprefix("torch.")
    units = (matrix_unit, "fma", matrix_unit)
    return [Work(*each) for each in zip(PASSES, flops, moved, units)]


roof = ceilings()
question_dtype = torch.float16 if machine().tier != "none" else torch.float32
question = three_works(32, 8192, 8192, 128, question_dtype)
print(f"{roof.device}: {format_bandwidth(roof.memory_bandwidth)}, the question's layer in {question_dtype}")
for work in question:
    print(f"  {work.name:8} {format_bytes(work.bytes):>8}, {work.intensity:6.1f} FLOP/byte, "
          f"at least {format_seconds(floor_time(work, roof)):>8}, bound by {bound(work, roof)}")
total = sum(floor_time(work, roof) for work in question)
print(f"  {'in all':8} {format_bytes(sum(work.bytes for work in question)):>8}{'':27}{format_seconds(total):>8}")

# %% [markdown]
# On a data-centre GPU every line should say *memory*. On some GeForce cards, and usually on a CPU, the two products are
# bound by compute, because the memory is fast there compared with the arithmetic. The softmax is bound by memory
# everywhere.
#
# ## Where memory runs out · deeper
#
# The matrix also takes up room. While the softmax runs, $S$ and $P$ are both in memory, and so are $Q$, $K$, $V$ and
# the space for $O$. With $M = N$ and $b$ bytes for each element, that makes:
#
# $$\text{bytes} = b \cdot H \cdot (4 N D + 2 N^2)$$
#
# In the question's layer the first term is 268 MB and the second is 8.6 GB. If you double the context, the second
# becomes four times as large. The figure shows the memory needed at each length, with your machine in black. The lower
# line is the same attention when $S$ and $P$ are never written to memory, as in chapter 04.

# %%
from course_lib.figures.attention.memory import draw_attention_memory

draw_attention_memory(heads=32, head_dim=128, item_bytes=2, device_bytes=machine().memory_bytes)

# %% [markdown]
# **Exercise 2.2.** Compute the longest length that fits. The check wants the exact number of tokens, because one byte
# less of memory may mean one token less.

# %%
# Exercise 2.2 · The longest sequence that fits
def longest_length(memory_bytes: int, heads: int, head_dim: int, item_bytes: int) -> int:
    """The largest N for which naive attention fits into memory_bytes, with N queries and N keys; 0 if not even 1 fits.

    In memory at the same time are Q, K, V and O, [heads, N, head_dim] each, and S and P, [heads, N, N] each. All of
    memory_bytes may be used. memory_bytes may be 10**16, so a loop over N is too slow.
    """
    # BEGIN SOLUTION
    # item_bytes · heads · (2N² + 4·D·N) <= memory   <=>   (N + D)² <= memory / (2 · item_bytes · heads) + D²
    budget = memory_bytes // (2 * item_bytes * heads)
    return math.isqrt(budget + head_dim * head_dim) - head_dim
    # END SOLUTION


# %%
best_longest_length = check("2.2", longest_length).best

# %%
from course_lib.hardware.datasheets import DATASHEETS

memories = {name: sheet.memory_bytes for name, sheet in DATASHEETS.items()} | {"this machine": machine().memory_bytes}
for name, memory_bytes in memories.items():
    lengths = [best_longest_length(int(memory_bytes), heads, 128, 2) for heads in (1, 32, 8 * 32)]
    print(f"{name:>12}, {format_capacity(memory_bytes):>8}: N = {lengths[0]:>7,} with one head, {lengths[1]:>6,} with "
          f"32, {lengths[2]:>6,} with 32 heads and a batch of 8")

# %% [markdown]
# This memory holds nothing else yet: no weights and no other layer. Training needs even more, because $P$ of *every*
# layer is kept for the backward pass.
#
# ## Who may see whom
#
# A language model predicts the next token, so a token must not see any later one. The *causal mask* hides all keys that
# come after a query's own position. Three questions decide whether a mask is right.
#
# **Does a token see itself?** Yes. Query $i$ sees key $j$ if $j \le p_i$, where $p_i$ is the query's position.
#
# **What is the position of query $i$ when there are fewer queries than keys?** This is the usual case in serving. Say
# the keys of 1000 earlier tokens are kept in a cache, and 5 new tokens arrive as queries: $N = 1005$ and $M = 5$. The
# last query is the newest token, so it has the position of the last key. In general $p_i = i + N - M$, so the first
# query has the position 1000. The mask is aligned to the *bottom right* corner of the score matrix. Aligned to the top
# left, it would let the newest token see only 5 keys of 1005.
#
# **What if a query sees no key?** With more queries than keys, the first $M - N$ positions are negative. For such a
# query the softmax contains $e^{-\infty - (-\infty)}$. That is NaN, which spreads to everything computed from it. This
# course does what FlashAttention does: such a row is all zeros.
#
# The next cell prints three masks, with ■ for each key that a query sees. In the third one the first two queries see no
# key.

# %%
from course_lib.kernels.attention.reference import visible_keys

for queries, keys in ((4, 4), (2, 5), (5, 3)):
    print(f"{queries} queries, {keys} keys")
    for row in visible_keys(queries, keys, causal=True).tolist():
        print("    " + " ".join("■" if visible else "·" for visible in row))

# %% [markdown]
# **Where does the mask go?** Before the softmax, as a score of $-\infty$. A hidden key then has the weight
# $e^{-\infty} = 0$, and the visible weights add up to 1. If you set probabilities to zero after the softmax instead,
# the rows add up to less than 1. If you set hidden scores to 0 before it, each hidden key still counts with the weight
# $e^0 = 1$.
#
# **Exercise 2.3.** Write the mask in plain PyTorch first. In exercise 2.5 it goes into a kernel.

# %%
# Exercise 2.3 · The causal mask
def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Causal attention probabilities.

    scores: [heads, query_length, key_length], any lengths, any float dtype; numbers of any size. For float64 the
        precision of float32 will do. The last query stands at the last key.
    Returns: the same shape and dtype. Each row adds up to 1, hidden keys have 0; a query that sees no key has a row of
    zeros.
    """
    # BEGIN SOLUTION
    query_length, key_length = scores.shape[-2:]
    queries = torch.arange(query_length, device=scores.device)[:, None] + (key_length - query_length)  # [M, 1]
    keys = torch.arange(key_length, device=scores.device)[None, :]  # [1, N]
    visible = keys <= queries  # [M, N]
    probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), dim=-1)
    # A row without a visible key is all NaN now. In other rows hidden keys are already 0, so one fill repairs it.
    return probabilities.masked_fill(~visible, 0)
    # END SOLUTION


# %%
best_causal_softmax = check("2.3", causal_softmax).best

# %% [markdown]
# ## A kernel on tiles
#
# The kernels of this chapter work on matrices, so a program's block becomes a *tile*: a block with two dimensions, here
# 32 rows by 64 columns. Read one such kernel before you write your own. It subtracts from each score a penalty that
# grows with the distance between query and key. This is ALiBi, which tells a model where each token is. Look for four
# things:
#
# 1. **Which tile is mine?** A program has three numbers here: one for its tile of rows, one for its tile of columns and
#    one for its head.
# 2. **Pointers.** A column of row offsets plus a row of column offsets gives an offset for each element. As in PyTorch,
#    `[BLOCK_M, 1] + [1, BLOCK_N]` broadcasts to `[BLOCK_M, BLOCK_N]`.
# 3. **Masks.** The lengths are seldom multiples of the tile's sides, so the last tiles reach past the end. Both
#    directions are masked, in the load and in the store.
# 4. **The head's offset is an int64.** Program numbers are int32. 32 heads have $32 \cdot 8192^2 = 2^{31}$ scores, so
#    the last offset is the largest number that an int32 can hold. With one more head it would turn negative, and
#    nothing would warn you.


# %%
@triton.jit
def distance_penalty_kernel(
    scores_pointer, result_pointer, slopes_pointer, query_length, key_length, head_stride, row_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    head = tl.program_id(2).to(tl.int64)
    inside = (queries[:, None] < query_length) & (keys[None, :] < key_length)  # [BLOCK_M, BLOCK_N]
    offsets = head * head_stride + queries[:, None] * row_stride + keys[None, :]  # [BLOCK_M, BLOCK_N]

    scores = tl.load(scores_pointer + offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    slope = tl.load(slopes_pointer + head)
    positions = queries[:, None] + (key_length - query_length)  # [BLOCK_M, 1], aligned to the end
    distance = tl.abs(positions - keys[None, :]).to(tl.float32)  # [BLOCK_M, BLOCK_N]
    tl.store(result_pointer + offsets, scores - slope * distance, mask=inside)


def distance_penalty(scores: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
    """scores[h, i, j] - slopes[h] · |position of query i - j|, for contiguous scores [heads, queries, keys]."""
    heads, query_length, key_length = scores.shape
    result = torch.empty_like(scores)
    grid = (triton.cdiv(query_length, 32), triton.cdiv(key_length, 64), heads)
    distance_penalty_kernel[grid](
        scores, result, slopes, query_length, key_length, *scores.stride()[:2], BLOCK_M=32, BLOCK_N=64,
    )
    return result


example = torch.randn(2, 50, 130, device=device)
slopes = torch.tensor([0.5, 0.25], device=device)
positions = torch.arange(50, device=device)[:, None] + 80
expected = example - slopes[:, None, None] * (positions - torch.arange(130, device=device)).abs()
print("largest difference to PyTorch:", (distance_penalty(example, slopes) - expected).abs().max().item())

# %% [markdown]
# This small step reads the matrix and writes it, so it adds **two more crossings**, 8.6 GB for the question's layer.
# The same is true of a mask or a dropout that is a kernel of its own. So the mask belongs *inside* a kernel that has
# the scores loaded anyway.
#
# ## Pass 1: the scores
#
# The program for one tile of $S$ needs BLOCK_M rows of $Q$ and BLOCK_N rows of $K$, each with $D$ numbers. `tl.dot(a,
# b)` multiplies `a` [BLOCK_M, D] by `b` [D, BLOCK_N] and adds up in float32. It runs on the tensor cores if the device
# has them.
#
# The second operand is $K^\top$, but you do not transpose anything in memory. You only let the two indices of the
# pointers run the other way. The picture shows how. Each matrix row has one colour, and the number in a cell is its
# offset in memory. Find row 3 in both tiles:

# %%
from course_lib.figures.memory.tile_pointers import draw_tile_pointers

draw_tile_pointers(first_row=2, rows=2, columns=4, row_stride=8, stored_rows=4)

# %% [markdown]
# Both tiles point at the same eight elements. On the left the row number runs down the tile, on the right it runs
# across. **Each index keeps its own stride**, whichever way it runs: 8 for the row, 1 for the dimension.
#
# The gaps between the rows come from the model. The matrix product that makes $Q$ (its *projection*) leaves it as
# [length, heads, head_dim], and `.transpose(0, 1)` turns that into [heads, length, head_dim] without moving a byte. So
# the rows of one head lie heads · head_dim elements apart: 2 · 4 in the picture, 32 · 128 = 4096 in the question's
# layer. That is why the kernel takes strides as arguments.
#
# Two more facts about `tl.dot`:
#
# - **By default it cuts float32 operands short.** On a GPU it computes in tf32, a format that keeps 10 of the 23 bits
#   of a float32's mantissa and drops the rest. A sum of positive products comes out about 0.07 % too small.
#   `input_precision="ieee"` computes in full float32. The check accepts both, and float16 is not affected.
# - **The sides of a tile are powers of two.** The side that is summed over, here $D$, must be at least 16 in float16
#   and 8 in float32. The other two may be smaller, but the tensor cores multiply 16 rows at a time, so part of their
#   work is then wasted.
#
# **Exercise 2.4.** Write the kernel. The launcher is given.

# %%
# Exercise 2.4 · The scores kernel
@triton.jit
def scores_kernel(
    query_pointer, key_pointer, scores_pointer, query_length, key_length, scale,
    query_head_stride, query_row_stride, key_head_stride, key_row_stride, scores_head_stride, scores_row_stride,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One tile of S = scale · Q Kᵀ. Program (i, j, head): rows i · BLOCK_M ..., columns j · BLOCK_N ... of that head.

    Strides in elements; the last dimension of every tensor is contiguous. HEAD_DIM is a power of two.
    """
    # BEGIN SOLUTION
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    keys = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    head = tl.program_id(2).to(tl.int64)  # in int32 the offset overflows beyond 32 heads of 8192² scores
    dims = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]

    query_tile = query_pointer + head * query_head_stride + queries[:, None] * query_row_stride + dims[None, :]
    query = tl.load(query_tile, mask=queries[:, None] < query_length, other=0.0)  # [BLOCK_M, HEAD_DIM]
    key_tile = key_pointer + head * key_head_stride + keys[None, :] * key_row_stride + dims[:, None]
    key_transposed = tl.load(key_tile, mask=keys[None, :] < key_length, other=0.0)  # [HEAD_DIM, BLOCK_N]

    scores = tl.dot(query, key_transposed, input_precision="ieee") * scale  # [BLOCK_M, BLOCK_N], float32

    scores_tile = scores_pointer + head * scores_head_stride + queries[:, None] * scores_row_stride + keys[None, :]
    inside = (queries[:, None] < query_length) & (keys[None, :] < key_length)
    tl.store(scores_tile, scores.to(scores_pointer.dtype.element_ty), mask=inside)
    # END SOLUTION


def scores(query: torch.Tensor, key: torch.Tensor, scale: float) -> torch.Tensor:
    """S = scale · Q Kᵀ for every head.

    query: [heads, query_length, head_dim]; key: [heads, key_length, head_dim]; both float32 or float16, head_dim 16,
    32, 64 or 128. Any lengths from 1, any strides, except that the last dimension is contiguous; a head may begin more
    than 2³¹ elements after the first, and reaches over fewer itself. Numbers of any size, as long as the scores fit the
    dtype. scale: any number.
    Returns: [heads, query_length, key_length], in the dtype of query. The kernel, not PyTorch, multiplies and scales.
    Every byte crosses once, and all loads together ask for no more than programs with tiles of 16 rows would.
    """
    heads, query_length, head_dim = query.shape
    key_length = key.shape[1]
    result = torch.empty(heads, query_length, key_length, dtype=query.dtype, device=query.device)
    BLOCK_M, BLOCK_N = 64, 64
    grid = (triton.cdiv(query_length, BLOCK_M), triton.cdiv(key_length, BLOCK_N), heads)
    scores_kernel[grid](
        query, key, result, query_length, key_length, scale,
        *query.stride()[:2], *key.stride()[:2], *result.stride()[:2],
        HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )
    return result


# %%
best_scores = check("2.4", scores).best

# %% [markdown]
# The check also metered your kernel. The distinct bytes that it loads (each byte counted once) and all the bytes that
# it stores must match your formula of 2.1 within 5 %.
#
# ## Pass 2: the softmax
#
# The softmax turns each row of scores into weights that add up to 1:
#
# $$P_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}}$$
#
# You cannot compute it in this form, because $e^{89}$ is already more than float32 can hold. So you subtract the row's
# maximum $m$ from all scores first. That multiplies the numerator and the denominator by the same factor, $e^{-m}$:
#
# $$P_{ij} = \frac{e^{S_{ij} - m}}{\sum_k e^{S_{ik} - m}}, \qquad m = \max_k S_{ik}$$
#
# The value stays the same, but now no exponent is above 0, so nothing overflows. One term of the sum is $e^0 = 1$, so
# the sum cannot become 0 either. This is the *safe* softmax. The next cell computes the row 1, 50, 100 in both ways.
# Without the maximum, the last weight comes out as NaN.

# %%
row = torch.tensor([1.0, 50.0, 100.0])
print("as it stands:", (row.exp() / row.exp().sum()).tolist())
print("safe:        ", ((row - row.max()).exp() / (row - row.max()).exp().sum()).tolist())

# %% [markdown]
# In your kernel one program holds one whole row. Its tile is as wide as the next power of two, for example 8192 for
# 5000 keys. It reads the row once and writes it once, and computes the maximum, the weights and the sum on the chip in
# between. This works up to some ten thousand keys; chapter 03 deals with longer rows.
#
# The causal mask goes into this kernel and costs no bytes. It even saves some, because a load moves nothing where its
# mask is off.
#
# You need four new words:
#
# | word | what it does |
# |---|---|
# | `tl.exp(block)` | the exponential of each element |
# | `tl.where(condition, a, b)` | element by element: `a` where the condition holds, else `b`; single numbers work too |
# | `tl.max(block, axis=0)` | the largest element, one number |
# | `triton.next_power_of_2(5000)` | 8192; called in the launcher, not in a kernel |
#
# The next cell tries each of them, the first three on the block 0, 1, 2, 3:

# %%
@triton.jit
def words_kernel(x_pointer, result_pointer):
    lanes = tl.arange(0, 4)  # [4]
    x = tl.load(x_pointer + lanes)  # [4]
    tl.store(result_pointer + lanes, tl.exp(x))
    tl.store(result_pointer + 4 + lanes, tl.where(x > 1.0, x, float("-inf")))
    tl.store(result_pointer + 8 + lanes, tl.max(x, axis=0))  # one number, which the store repeats


tried = torch.empty(3, 4, device=device)
words_kernel[(1,)](torch.arange(4.0, device=device), tried)
for word, numbers in zip(("tl.exp(x)", "tl.where(x > 1, x, -inf)", "tl.max(x, axis=0)"), tried.tolist()):
    print(f"{word:28}" + "".join(f"{number:8.3f}" for number in numbers))
print(f"{'triton.next_power_of_2(5000)':28}{triton.next_power_of_2(5000):8}")

# %% [markdown]
# **Exercise 2.5.** From here on you complete the launcher as well. Before you check, write down your guess: which value
# must `other=` have in the load, and why not 0?

# %%
# Exercise 2.5 · The softmax kernel, safe and causal
@triton.jit
def row_softmax_kernel(
    scores_pointer, result_pointer, query_length, key_length,
    scores_head_stride, scores_row_stride, result_head_stride, result_row_stride,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):
    """Softmax of one row, held whole. Program (row, head); BLOCK is a power of two, at least key_length.

    Strides in elements; the last dimension is contiguous. With CAUSAL, hidden keys get 0, and so does a whole row that
    sees none.
    """
    # BEGIN SOLUTION
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    keys = tl.arange(0, BLOCK)  # [BLOCK]
    inside = keys < key_length
    visible = inside
    if CAUSAL:
        visible = visible & (keys <= row + key_length - query_length)

    row_pointer = scores_pointer + head * scores_head_stride + row * scores_row_stride
    scores = tl.load(row_pointer + keys, mask=visible, other=float("-inf")).to(tl.float32)  # [BLOCK]
    largest = tl.max(scores, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)  # no key is visible: -inf - -inf would be NaN
    weights = tl.exp(scores - largest)  # [BLOCK], 0 where nothing is visible
    total = tl.sum(weights, axis=0)
    probabilities = weights / tl.where(total == 0.0, 1.0, total)

    result_row = result_pointer + head * result_head_stride + row * result_row_stride
    tl.store(result_row + keys, probabilities.to(result_pointer.dtype.element_ty), mask=inside)
    # END SOLUTION


def row_softmax(scores: torch.Tensor, causal: bool) -> torch.Tensor:
    """Softmax over the keys of each row, computed in float32.

    scores: [heads, query_length, key_length], float32 or float16, any lengths from 1, rows of up to 16384 keys, any
    strides except that the last dimension is contiguous; a head may begin more than 2³¹ elements after the first, and
    reaches over fewer itself. Numbers of any size. causal: hide the keys behind each query's position; the last query
    stands at the last key.
    Returns: the same shape and dtype, contiguous. A row that sees no key is all zeros. Every score is read at most
    once, and the kernel, not PyTorch, masks and computes the softmax.
    """
    heads, query_length, key_length = scores.shape
    result = torch.empty(scores.shape, dtype=scores.dtype, device=scores.device)
    # BEGIN SOLUTION
    BLOCK = triton.next_power_of_2(key_length)
    row_softmax_kernel[(query_length, heads)](
        scores, result, query_length, key_length, *scores.stride()[:2], *result.stride()[:2],
        CAUSAL=causal, BLOCK=BLOCK, num_warps=4 if BLOCK <= 2048 else 16,
    )
    # END SOLUTION
    return result


# %%
best_row_softmax = check("2.5", row_softmax).best

# %% [markdown]
# ## Pass 3: the output · deeper
#
# $O = P V$ is a matrix product again, but the sum now runs over thousands of keys, which do not fit into one tile. So
# each program *loops* over the keys. In each step it multiplies a tile of $P$ by a tile of $V$ and adds the product to
# an accumulator. The accumulator is a tile of [BLOCK_M, HEAD_DIM] numbers that stays in registers until the end.
# Chapter 04 uses such a loop again.
#
# **Exercise 2.6.** You write the kernel and its launcher, and you choose the tiles and the grid.

# %%
# Exercise 2.6 · The output kernel
@triton.jit
def weighted_values_kernel(
    probabilities_pointer, value_pointer, output_pointer, query_length, key_length,
    probabilities_head_stride, probabilities_row_stride, value_head_stride, value_row_stride,
    output_head_stride, output_row_stride,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """BLOCK_M rows of O = P V, of one head: a loop over the keys, BLOCK_N at a time.

    Strides in elements; the last dimension of every tensor is contiguous. HEAD_DIM is a power of two. The accumulator
    is float32 and stays in registers: O is stored once, after the loop.
    """
    # BEGIN SOLUTION
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    head = tl.program_id(1).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)  # [HEAD_DIM]
    probabilities_rows = (
        probabilities_pointer + head * probabilities_head_stride + queries[:, None] * probabilities_row_stride
    )  # [BLOCK_M, 1]
    values = value_pointer + head * value_head_stride

    accumulator = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)  # [BLOCK_M, HEAD_DIM]
    for start in range(0, key_length, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        inside = (queries[:, None] < query_length) & (keys[None, :] < key_length)
        probabilities = tl.load(probabilities_rows + keys[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
        value_tile = values + keys[:, None] * value_row_stride + dims[None, :]
        value = tl.load(value_tile, mask=keys[:, None] < key_length, other=0.0)  # [BLOCK_N, HEAD_DIM]
        accumulator += tl.dot(probabilities, value, input_precision="ieee")

    output_tile = output_pointer + head * output_head_stride + queries[:, None] * output_row_stride + dims[None, :]
    tl.store(output_tile, accumulator.to(output_pointer.dtype.element_ty), mask=queries[:, None] < query_length)
    # END SOLUTION


def weighted_values(probabilities: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """O = P V for every head.

    probabilities: [heads, query_length, key_length]; value: [heads, key_length, head_dim], both float32 or float16;
    head_dim 16, 32, 64 or 128. Any lengths from 1, any strides, except that the last dimension is contiguous; a head
    may begin more than 2³¹ elements after the first, and reaches over fewer itself. Values of any size.
    Returns: [heads, query_length, head_dim], in the dtype of value. The kernel, not PyTorch, multiplies. Every byte
    crosses once, and all loads together ask for no more than programs with tiles of 16 rows would.
    """
    # BEGIN SOLUTION
    heads, query_length, key_length = probabilities.shape
    head_dim = value.shape[-1]
    result = torch.empty(heads, query_length, head_dim, dtype=value.dtype, device=value.device)
    BLOCK_M, BLOCK_N = 64, 64
    weighted_values_kernel[(triton.cdiv(query_length, BLOCK_M), heads)](
        probabilities, value, result, query_length, key_length,
        *probabilities.stride()[:2], *value.stride()[:2], *result.stride()[:2],
        HEAD_DIM=head_dim, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
    )
    return result
    # END SOLUTION


# %%
best_weighted_values = check("2.6", weighted_values).best


# %% [markdown]
# ## The whole, and its bytes · deeper
#
# The three launches together are attention. The next cell compares their result with plain PyTorch in float64, without
# a mask and with one.


# %%
def three_pass_attention(query, key, value, causal=False):
    """Attention over [heads, length, head_dim] tensors; S and P are written to memory."""
    scale = 1 / math.sqrt(query.shape[-1])
    return best_weighted_values(best_row_softmax(best_scores(query, key, scale), causal), value)


from course_lib.kernels.attention.reference import attention_reference

query, key, value = (torch.randn(2, length, 64, device=device) for length in (100, 150, 150))
for causal in (False, True):
    exact = attention_reference(*(tensor[None].double() for tensor in (query, key, value)), causal=causal)[0]
    error = (three_pass_attention(query, key, value, causal) - exact).abs().max().item()
    print(f"causal={causal!s:5}: largest error {error:.1e}")

# %% [markdown]
# Now meter the three kernels. The column *asked for* is everything that the loads and stores request. It is large,
# because a tile of $Q$ is requested again for every tile of keys. *Distinct* counts each byte of a pass only once. A
# cache answers the repeated requests, since $Q$ and $K$ of one head are only 2 MB each at 8192 tokens. So *distinct* is
# what reaches memory, and it must match your formula within 5 %.

# %%
from course_lib.hardware.meter.metered import metered  # interprets in a separate process, with a GPU too

small_query, small_key, small_value = (torch.randn(2, 256, 64, dtype=torch.float16, device=device) for _ in range(3))
small_scores = best_scores(small_query, small_key, 0.125)
small_probabilities = best_row_softmax(small_scores, False)
reports = {
    "scores": metered(best_scores, small_query, small_key, 0.125),
    "softmax": metered(best_row_softmax, small_scores, False),
    "output": metered(best_weighted_values, small_probabilities, small_value),
}
print("pass       formula     distinct   asked for   distinct / formula")
for (name, report), predicted in zip(reports.items(), best_pass_bytes(2, 256, 256, 64, 2)):
    distinct = sum(tensor.distinct_loaded_bytes + tensor.distinct_stored_bytes for tensor in report.tensors)
    print(f"{name:8} {predicted:>9,} {distinct:>12,} {report.total_bytes:>11,} {distinct / predicted:>12.3f}")

# %% [markdown]
# ## Predicted against measured
#
# How close do the kernels come to the shortest possible time? The prediction for each pass is the longer of two times:
# its bytes at the measured rate of your memory, or its FLOPs at the measured rate of your arithmetic.
#
# On a GPU your own kernels are timed. In the interpreter the time of a kernel says nothing, so PyTorch's CPU operations
# stand in for the three passes. They write and read the same matrices. **Predict:** which pass will come nearest to its
# prediction?

# %%
from course_lib.hardware.timing import measure

if interpreting():
    heads, length, head_dim, dtype = 4, 2048, 64, torch.float32
else:
    fits = best_longest_length(int(0.4 * torch.cuda.mem_get_info()[0]), 16, 64, 2)
    heads, length, head_dim, dtype = 16, min(8192, 2 ** (fits.bit_length() - 1)), 64, torch.float16
query, key, value = (torch.randn(heads, length, head_dim, dtype=dtype, device=device) for _ in range(3))
scale = 1 / math.sqrt(head_dim)
works = three_works(heads, length, length, head_dim, dtype)

if interpreting():
    S = torch.empty(heads, length, length)
    P, output = torch.empty_like(S), torch.empty_like(query)
    runs = [
        lambda: torch.baddbmm(S, query, key.transpose(1, 2), beta=0, alpha=scale, out=S),
        lambda: torch.softmax(S, dim=-1, out=P),
        lambda: torch.bmm(P, value, out=output),
    ]
    runs[0](), runs[1]()
else:
    S = best_scores(query, key, scale)
    P = best_row_softmax(S, False)
    runs = [
        lambda: best_scores(query, key, scale),
        lambda: best_row_softmax(S, False),
        lambda: best_weighted_values(P, value),
    ]
print(f"{heads} heads, {length} × {length}, head dimension {head_dim}, {dtype}: "
      f"each matrix {format_bytes(S.numel() * S.element_size())}")
print("pass       predicted   measured   predicted / measured   bound by")
naive_seconds = 0.0
for work, run in zip(works, runs):
    seconds, least = measure(run).median, floor_time(work, roof)
    naive_seconds += seconds
    print(f"{work.name:8} {format_seconds(least):>11} {format_seconds(seconds):>10} {100 * least / seconds:>16.0f} %"
          f"          {bound(work, roof)}")
least = sum(floor_time(work, roof) for work in works)
share = 100 * least / naive_seconds
print(f"{'in all':8} {format_seconds(least):>11} {format_seconds(naive_seconds):>10} {share:>16.0f} %")

# %% [markdown]
# On a GPU the softmax should come nearest, because it does little but move bytes. If a pass takes twice its prediction
# or more, something other than bytes and FLOPs costs time. The tiles may be too small to keep the tensor cores busy, or
# a row may be too long for its registers. On a CPU it may be `exp`, which is computed in software there.
#
# No tuning of the three kernels removes their bytes. (A ratio above 100 % is possible if a CPU keeps part of the matrix
# in its cache between passes, or if the ceiling was measured on a busy machine.)
#
# How much of the time is really needed? The next cell puts two lower limits beside the measured time: the arithmetic
# alone, and moving only $Q$, $K$, $V$ and $O$.

# %%
S = P = None  # free the two matrices
from course_lib.hardware.roofline import arithmetic_rate

products = sum(work.flops for work in works) / arithmetic_rate(roof, str(dtype).removeprefix("torch."))
ends = 4 * heads * length * head_dim * torch.empty(0, dtype=dtype).element_size() / roof.memory_bandwidth
print(f"three passes, measured:                          {format_seconds(naive_seconds)}")
print(f"the arithmetic alone, at this machine's rate:     {format_seconds(products)}")
print(f"Q, K, V and O moved once, nothing else:           {format_seconds(ends)}")

if not interpreting():
    from course_lib.kernels.attention.naive import naive_attention

    library = measure(lambda: naive_attention(query[None], key[None], value[None])).median
    print(f"the course's own naive_attention:                 {format_seconds(library)}")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    three_pass_attention(query, key, value)
    print(f"memory above the inputs, at its peak:             "
          f"{format_bytes(torch.cuda.max_memory_allocated() - before)}; two matrices are "
          f"{format_bytes(2 * heads * length * length * query.element_size())}")

# %% [markdown]
# The layer needs its arithmetic, and it needs to move $Q$, $K$, $V$ and $O$ once. The gap between these two lines and
# the first one is what chapters 03 and 04 are about.
#
# ## Which attention does PyTorch run? · deeper
#
# `F.scaled_dot_product_attention` (SDPA) chooses among several kernels, its *backends*. All but one are *fused*: one
# kernel does all three passes. MATH does them separately, as in this chapter. SDPA falls back to MATH when no fused
# backend takes the inputs, and does not tell you. The result is right, but slow: 20 ms instead of 0.6 ms, measured on
# an H100 with PyTorch 2.11, for the 16 heads and 8192 tokens that the next cell takes there.
#
# To find out, use `sdpa_kernel`. It allows only the backends that you name, and raises an error if none can run. The
# next cell times five calls twice: with the fused backends alone, and with MATH alone. A call that is *refused* is one
# that SDPA would quietly run with MATH. **Guess** which ones are.

# %%
import warnings

from torch.nn.attention import SDPBackend, sdpa_kernel

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def time_with(backends, tensors, options):
    """The time of SDPA with these backends alone, as text; "refused" if none of them takes the inputs."""
    with sdpa_kernel(backends), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each backend that does not run
        try:
            runs = {"warmup": 1, "repeats": 3} if interpreting() else {}  # a CPU takes up to half a second for a call
            return format_seconds(measure(lambda: F.scaled_dot_product_attention(*tensors, **options), **runs).median)
        except torch.cuda.OutOfMemoryError:
            return "no memory"
        except RuntimeError:
            return "refused"


tensors = [tensor[None] for tensor in (query, key, value)]  # [batch, heads, length, head_dim]
causal_mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
calls = {
    "no mask": (tensors, {}),
    "is_causal=True": (tensors, {"is_causal": True}),
    "a mask tensor": (tensors, {"attn_mask": causal_mask}),
    "float64, 256 tokens": ([tensor[:, :, :256].double() for tensor in tensors], {}),
    "no batch dimension": ((query, key, value), {}),
}
print(f"{'':22}{'fused':>12}{'MATH':>12}       three passes, measured above: {format_seconds(naive_seconds)}")
for name, call in calls.items():
    print(f"{name:22}{time_with(FUSED, *call):>12}{time_with([SDPBackend.MATH], *call):>12}")

# %% [markdown]
# `is_causal=True` has a trap: SDPA aligns the mask to the *top left*, as documented. With as many queries as keys, top
# left and bottom right agree. With 3 and 8 they do not, and nothing warns you:

# %%
from torch.nn.attention.bias import causal_lower_right

query, key, value = (torch.randn(1, 2, length, 64, device=device) for length in (3, 8, 8))
exact = attention_reference(query, key, value, causal=True)
for name, options in (
    ("is_causal=True", {"is_causal": True}),
    ("attn_mask=causal_lower_right(3, 8)", {"attn_mask": causal_lower_right(3, 8)}),
):
    difference = (F.scaled_dot_product_attention(query, key, value, **options) - exact).abs().max().item()
    print(f"{name:36} differs from bottom-right by {difference:.2g}")

# %% [markdown]
# ## What production systems do
#
# No mainstream serving engine or trainer writes $S$ to memory any more. Three things still do: PyTorch's MATH backend,
# a plain `softmax(q @ k.T) @ v`, and models that return their attention weights. If `softmax` is a large bar in a
# profile, you have usually found one of them. The three passes remain useful as a reference: this course's checks and
# FlashAttention's own tests allow a fused kernel twice the error of the three passes against float64.
#
# ## Papers
#
# - Vaswani et al., *Attention Is All You Need*, 2017, [arXiv 1706.03762](https://arxiv.org/abs/1706.03762): the
#   formula, and why the scale is $1/\sqrt{D}$ (a footnote of §3.2.1).
# - Dao et al., *FlashAttention*, 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135), §2.2: this chapter's three
#   passes as "standard attention".
# - Rabe and Staats, *Self-attention Does Not Need O(n²) Memory*, 2021, [arXiv
#   2112.05682](https://arxiv.org/abs/2112.05682).
# - Press et al., *Train Short, Test Long* (ALiBi), 2021, [arXiv 2108.12409](https://arxiv.org/abs/2108.12409).
#
# ## What you take along
#
# - Naive attention moves the $N \times N$ matrix four times. At 8192 tokens that is 98 % of its bytes, and it decides
#   its time. Its memory grows with $N^2$.
# - The mask goes before the softmax and is aligned to the end.
# - The softmax needs the row's maximum before its first exponential, so it seems to need the whole row at once. Chapter
#   03 shows that **it does not**.

# %%
progress()
