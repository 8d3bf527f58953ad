# %% [markdown]
# # 13 · Fusion and compilers: the bytes between the matrix products
#
# **The question.** A layer of Llama-3-8B reads 16,384 tokens. Its matrix products are 7.1 TFLOP, which an H200 does in
# 9.0 ms at 790 TFLOP/s (measured for a large product in 16 bits). Between the products and attention there is *glue*:
# two additions, two norms, the rotation of queries and keys, and the activation. These do almost no arithmetic. How
# long do they take?
#
# Written in PyTorch as Llama's own code has it, they read and write 9.7 GB. At the 4.17 TB/s of an H200's copy
# (measured) that is 2.3 ms, a fifth of the layer's time without attention. In four kernels they move 2.8 GB, which is
# 0.7 ms.
#
# So who writes these four kernels? `torch.compile` can, and so can you. Write down two guesses. For which of these
# operations is the compiler as fast as the best kernel written by hand? For which is it three times slower?
#
# **Time.** About six hours for all seven exercises, estimated. The **core path** takes about two: exercises 13.1, 13.2
# and 13.5, and every section whose heading does not end in *deeper*. You can skip the others: run their cells and go
# on. You need chapters 01 and 04, and chapter 03 for exercise 13.4.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution

import math
import re
import shutil
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from course_lib.hardware.units import format_bandwidth, format_bytes, format_seconds

device = default_device()
on_gpu = not interpreting()

# %% [markdown]
# ## Glue, and what it moves
#
# Here is the glue of one layer, as most models write it. `add_and_norm` runs twice: once before attention, once before
# the feed-forward part. It adds what the last part computed (`x`) to the *residual*, the running sum that passes from
# layer to layer. Then it divides each row by its root mean square. Both results are needed: the normalised rows by the
# next matrix product, and the sum by the next addition. `turn` applies the rotary positions to Q and to K, and `swiglu`
# is the activation.

# %%
def add_and_norm(x, residual, weight, epsilon=1e-5):
    """x, residual: [tokens, hidden]. Seven operations on whole tensors."""
    summed = x + residual
    wide = summed.float()  # float32
    squares = wide.square()  # float32
    mean = squares.mean(dim=-1, keepdim=True)  # one number for a row
    scaled = wide * torch.rsqrt(mean + epsilon)  # float32
    rounded = scaled.to(x.dtype)
    return rounded * weight, summed


def turn(x, cosine, sine):
    """x: [tokens, heads, head_dim]; cosine, sine: [tokens, 1, head_dim]. Five operations."""
    first, second = x.chunk(2, dim=-1)  # views: nothing moves
    negated = -second  # half a tensor
    turned = torch.cat((negated, first), dim=-1)  # joined
    return x * cosine + turned * sine


def swiglu(gate, up):
    """gate, up: [tokens, intermediate]. Two operations."""
    return F.silu(gate) * up

# %% [markdown]
# PyTorch runs each of these operations as one kernel. This is called *eager* execution. A kernel reads its inputs from
# memory, computes, and writes its result back. The next kernel reads that result again. So a tensor that only lives
# between two operations crosses the memory bus at least twice.
#
# The next picture counts this for `add_and_norm` in 16 bits. Each arrow is one crossing, with the bytes of one number
# of the hidden state. Three of the tensors on the way are float32, because a sum of 4,096 squares in 16 bits would be
# too inexact. They cost twice as much.

# %%
from course_lib.figures.fused.crossings import ADD_AND_NORM, draw_crossings

draw_crossings([("Seven operations, for one number of the hidden state", ADD_AND_NORM),
                ("One kernel", [("add and norm", 4, 4)])])

# %% [markdown]
# Seven kernels move 42 bytes for each number. One kernel needs 8: it reads x and the residual, and writes the sum and
# the normalised number. To put several operations into one kernel is called *fusion*. The arithmetic stays the same,
# and so do the inputs and results. What disappears are the crossings between the operations, because the values stay
# in registers.
#
# Two rules give the bytes of a fused kernel:
#
# - It reads each tensor from outside once, however many of its operations need it.
# - It writes a result only if somebody outside needs it.
#
# With these you can fill in the whole ledger. In the listing above, count 4 bytes for what is marked float32, and the
# bytes of the layer's own dtype for the rest. The mean has one number for a row, so you may leave it out. Views move
# nothing.

# %%
# Exercise 13.1 · The byte ledger
def kernel_bytes(steps, sizes: dict, kept) -> int:
    """Bytes that one kernel moves if it does all of these steps.

    steps: a tuple of (inputs, output), in order: the names of the tensors that a step needs, a tuple, and the name of
        the tensor that it makes. A name may occur several times among the inputs of a step. An input is either the
        output of an earlier step, or a tensor that was there before; no name is made twice.
    sizes: {name: bytes} for every name.
    kept: a tuple of names of outputs that are needed after the kernel. Other outputs are not.
    Returns: the bytes that are read and written. Registers hold whatever the kernel has read or made, so it reads each
    tensor at most once, and never one that it has made. It writes the outputs that are kept, and no others.
    """
    # BEGIN SOLUTION
    made = [output for _, output in steps]
    read = {name for inputs, _ in steps for name in inputs if name not in made}
    return sum(sizes[name] for name in read) + sum(sizes[name] for name in made if name in kept)
    # END SOLUTION


def eager_glue_bytes(
    tokens: int, hidden: int, intermediate: int, query_heads: int, key_heads: int, head_dim: int, item_bytes: int
) -> int:
    """Bytes that a layer's glue moves in PyTorch, where each of the operations in the listing above is a kernel.

    item_bytes: of a number of the layer, 2 or 4. query_heads is a multiple of key_heads.
    In a layer `add_and_norm` runs twice, `turn` once for Q and once for K, and `swiglu` once. The listing says which
        operations these have.
    x and the residual have tokens · hidden numbers, and each norm's weight has `hidden`. Q has tokens · query_heads ·
        head_dim numbers, and K has tokens · key_heads · head_dim. cosine and sine have tokens · head_dim each. gate and
        up have tokens · intermediate each. A number has item_bytes, or 4 where the listing says float32.
    A cast of a tensor to the dtype that it has already moves nothing. The negated half is read and written as half a
        tensor. The mean and its root have one number for a row and are not counted.
    """
    # BEGIN SOLUTION
    casts = 0 if item_bytes == 4 else 2 * (item_bytes + 4)
    number = 3 * item_bytes + casts + 8 + 4 + 8 + 2 * item_bytes  # of the hidden state
    norms = 2 * hidden * (tokens * number + item_bytes)
    turned = tokens * (query_heads + key_heads) * head_dim * item_bytes
    table = tokens * head_dim * item_bytes
    return norms + 10 * turned + 4 * table + 5 * tokens * intermediate * item_bytes
    # END SOLUTION


def fused_glue_bytes(
    tokens: int, hidden: int, intermediate: int, query_heads: int, key_heads: int, head_dim: int, item_bytes: int
) -> int:
    """Bytes that the same glue moves in four kernels: add and norm (twice), turn Q and K together, and SwiGLU.

    Arguments as above. Add and norm keeps the sum and the normalised rows. Turning reads cosine and sine once for Q and
    K together. Inside a kernel everything is as in `kernel_bytes`.
    """
    # BEGIN SOLUTION
    norms = 2 * hidden * (4 * tokens + 1) * item_bytes
    turned = tokens * (query_heads + key_heads) * head_dim * item_bytes
    table = tokens * head_dim * item_bytes
    return norms + 2 * turned + 2 * table + 3 * tokens * intermediate * item_bytes
    # END SOLUTION


# %%
verdict = check("13.1", kernel_bytes, eager_glue_bytes, fused_glue_bytes)
best_kernel_bytes, best_eager_glue_bytes, best_fused_glue_bytes = verdict.best

# %% [markdown]
# Now the whole layer, with Llama-3-8B's sizes: hidden size 4,096, 32 query heads and 8 KV heads of dimension 128, and
# 14,336 numbers in the middle of the feed-forward part. **Predict** how many times fewer bytes the four kernels move.

# %%
predict("13 bytes of a layer's glue, eager over fused", ..., "times")

# %%
from course_lib.figures.fused.ledger import draw_ledger

LLAMA = {"tokens": 16_384, "hidden": 4096, "intermediate": 14_336, "query_heads": 32, "key_heads": 8, "head_dim": 128,
         "item_bytes": 2}


def parts(count):
    """The ledger of a layer by part. A part is alone where the sizes of the others are 0."""
    norms = count(**LLAMA | {"intermediate": 0, "head_dim": 0})
    activation = count(**LLAMA | {"hidden": 0, "head_dim": 0})
    return {"add and norm, twice": norms, "turn Q and K": count(**LLAMA) - norms - activation, "SwiGLU": activation}


ledger = {"operation by operation": parts(best_eager_glue_bytes), "in four kernels": parts(best_fused_glue_bytes)}
eager_bytes, fused_bytes = (sum(ways.values()) for ways in ledger.values())
measured("13 bytes of a layer's glue, eager over fused", eager_bytes / fused_bytes, "times")
draw_ledger(ledger, "The glue of one layer of Llama-3-8B for 16,384 tokens, at 4.17 TB/s", 4.17e12)

# %% [markdown]
# Fusing saves 71 % of the bytes. More than half of the 9.7 GB belong to the norms, because of their float32 tensors.
# SwiGLU gains least: it goes from five tensors to three, and no kernel can do with less, because two tensors come in
# and one goes out.
#
# The times are a floor, not a forecast. They say how long the memory needs if nothing else is slow.
#
# ## Add and norm in one kernel
#
# The first of the four kernels is a good one to write, because it has what makes a fusion hard: a *reduction*. You need
# the root mean square of the whole row before you can write the first normalised number. So the row must wait
# somewhere. If it waits in registers, you read it once. If it is too long for that, you have to read it a second time.
#
# How long may a row be? A multiprocessor of an H100 has 65,536 registers of 4 bytes. A row of 16,384 float32 numbers
# fills a quarter of them. So for the sizes of today's models, one program can hold one row, as one tile. In Triton a
# tile's length is a power of two, so a row of 5,001 columns takes a tile of 8,192, and a mask keeps the other lanes
# out.
#
# Two things deserve care. The squares are added in float32: the square of 300 is 90,000, and float16 ends at 65,504.
# And the mean is over the columns that exist, not over the lanes of the tile. A report on the serving
# engine SGLang blames squares that were added up in 16 bits: each of 60 layers added a little error. By layer 58 the
# hidden state pointed in a clearly different direction from the right one, with a cosine of 0.51 between them
# ([sglang#27540](https://github.com/sgl-project/sglang/pull/27540)).

# %%
# Exercise 13.2 · Add and norm in one kernel
@triton.jit
def add_rms_norm_kernel(
    x_pointer, residual_pointer, weight_pointer, normalised_pointer, summed_pointer,
    hidden, x_stride, residual_stride, epsilon, BLOCK: tl.constexpr,
):
    """One program: one row, in a tile of BLOCK columns, of which `hidden` exist."""
    # BEGIN SOLUTION
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)  # [BLOCK]
    inside = columns < hidden
    x = tl.load(x_pointer + row * x_stride + columns, mask=inside, other=0.0)  # [BLOCK]
    residual = tl.load(residual_pointer + row * residual_stride + columns, mask=inside, other=0.0)
    summed = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    tl.store(summed_pointer + row * hidden + columns, summed, mask=inside)
    wide = summed.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + epsilon)
    weight = tl.load(weight_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    normalised = (wide * inverse * weight).to(x.dtype)
    tl.store(normalised_pointer + row * hidden + columns, normalised, mask=inside)
    # END SOLUTION


def add_rms_norm(x, residual, weight, epsilon):
    """(normalised, summed): the sum x + residual, and its rows divided by their root mean square, times the weight.

    Args:
        x, residual: [rows, hidden], float32 or float16, of one dtype; at least one row, and any number of columns from
            1 to 16,384. The columns lie side by side, with any stride from row to row, of x and of residual each.
        weight: [hidden], contiguous, the same dtype.
        epsilon: a float above 0, added to the mean of the squares, under the root.

    Returns:
        Two contiguous tensors of x's shape and dtype. Compute in float32. The norm may be that of the sum as it is
        stored, or before it is rounded.

        One kernel is launched. It loads each number of x and residual once, and stores each number of the results once.
        It may load the weight again for each row, because that comes from the L2 cache. PyTorch's own operations
        compute and copy nothing.
    """
    # BEGIN SOLUTION
    rows, hidden = x.shape
    normalised = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
    summed = torch.empty_like(normalised)
    add_rms_norm_kernel[(rows,)](
        x, residual, weight, normalised, summed, hidden, x.stride(0), residual.stride(0), epsilon,
        BLOCK=triton.next_power_of_2(hidden),
    )
    return normalised, summed
    # END SOLUTION


# %%
best_add_rms_norm = check("13.2", add_rms_norm).best

# %% [markdown]
# Your kernel passed, so it moves what the ledger says. The next cell counts the bytes once more, for a small shape, and
# compares them with `kernel_bytes` of 13.1. **Predict** by how much they differ, and why.

# %%
from course_lib.hardware.meter.metered import metered

rows, hidden = 16, 1000
x, residual, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.ones(hidden)
report = metered(best_add_rms_norm, x, residual, weight, 1e-5)
steps = ((("x", "residual"), "summed"), (("summed", "weight"), "normalised"))
sizes = {"x": x.nbytes, "residual": x.nbytes, "summed": x.nbytes, "normalised": x.nbytes, "weight": weight.nbytes}
by_the_ledger = best_kernel_bytes(steps, sizes, ("summed", "normalised"))
print(f"moved {report.total_bytes:,} bytes, by the ledger {by_the_ledger:,}")

# %% [markdown]
# If your program owns one row, it loads the weight for each row. That is a fifth tensor by the meter's count, but not
# on a GPU's bus: the weight has 8 KB in 16 bits, and after the first rows it comes from the L2 cache.
#
# The next cell measures this on a GPU, with a gigabyte of tensors. It runs the listing above in eager PyTorch, the same
# after `torch.compile`, PyTorch's own `F.rms_norm` after an addition, and your kernel. Rates are those of the *least*
# bytes, four tensors, so that a form which moves more shows as slower. **Predict** the order.

# %%
def rates_of(forms, least_bytes):
    """{name: bytes per second} of functions of no arguments, timed in turns."""
    from course_lib.hardware.timing import measure_together

    timings = measure_together(forms, seconds=0.2, device=device)
    return {name: timing.rate(least_bytes) for name, timing in timings.items()}


def norm_of_pytorch(x, residual, weight):
    summed = x + residual
    return F.rms_norm(summed, weight.shape, weight, 1e-5), summed


if on_gpu:
    x, residual = torch.randn(2, 16_384, 8192, device=device, dtype=torch.float16)
    weight = torch.ones(8192, device=device, dtype=torch.float16)
    forms = {
        "the listing, eager": partial(add_and_norm, x, residual, weight),
        "the listing, compiled": partial(torch.compile(add_and_norm, dynamic=False), x, residual, weight),
        "F.rms_norm, eager": partial(norm_of_pytorch, x, residual, weight),
        "your kernel": partial(best_add_rms_norm, x, residual, weight, 1e-5),
    }
    for name, rate in rates_of(forms, 4 * x.nbytes).items():
        print(f"{name:24} {format_bandwidth(rate)}")
    del x, residual, forms
else:
    print("No GPU here, so nothing is timed. One H200 (2026-11-22, bf16, 16,384 rows of 8,192) reached:\n"
          "F.rms_norm, eager        2.76 TB/s\n"
          "compiled                 4.01 TB/s\n"
          "Liger 0.8.5, by hand     4.08 TB/s\n"
          "a device copy            4.17 TB/s")

# %% [markdown]
# On that H200 the compiler's kernel and the one written by hand (Liger's, in Triton) are 2 % apart, and both are within
# 4 % of a copy. For this operation you need no kernel of your own.
#
# `F.rms_norm` reached 2.76 TB/s. By the ledger it moves five tensors instead of four, because the sum is written by one
# kernel and read by the next. Four fifths of 4.17 TB/s would be 3.3.

# %% [markdown]
# ## Turn Q and K where they lie · deeper
#
# One matrix product computes Q, K and V together, so they lie side by side in one *packed* tensor: a row is a token,
# and holds its query heads, its key heads and its value heads. In Llama-3-8B these are 32, 8 and 8 heads of 128
# numbers. RoPE must turn the first 40 heads and leave the last 8 alone.
#
# The listing above splits the tensor, turns Q and K, and makes new tensors. Nothing forces it to. Turning replaces two
# numbers by two others that depend on nothing else, so it can be done *in place*: load a pair, store the turned pair
# where it came from. The values are not loaded and not stored.
#
# The next picture shows a small row, with 8 query heads and 2 KV heads, and below it one head.

# %%
from course_lib.figures.fused.packed import draw_packed_row

draw_packed_row(query_heads=8, key_heads=2, head_dim=16)

# %% [markdown]
# Three things go wrong here in practice:
#
# - **Which numbers are a pair.** In Llama's published weights for Hugging Face, number $i$ of a head goes with number
#   $i + 64$. In other models it goes with its neighbour, $2i$ with $2i + 1$. Both exist, and a kernel for one gives
#   plausible nonsense for the other. ONNX Runtime's WebGPU kernel once always took the halves, also for models with
#   neighbours ([onnxruntime#26758](https://github.com/microsoft/onnxruntime/pull/26758)).
# - **Where a token stands.** In a decode step the row is 0 and the position may be 8,191. Positions come as a tensor.
# - **Whose angles.** A token's heads share its angles. In float32 these are 64 cosines and 64 sines, 512 bytes, which
#   is as much as a head reads and writes in 16 bits. A program for each head would load them 40 times, and so load
#   and store twice as many bytes.

# %%
# Exercise 13.3 · RoPE inside the packed tensor
@triton.jit
def rope_kernel(
    qkv_pointer, cosine_pointer, sine_pointer, positions_pointer, qkv_stride, heads, half,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):
    """Program t: the first `heads` heads of token t, each of 2 · half numbers, in place.

    HEADS and HALF are the next powers of two.
    """
    # BEGIN SOLUTION
    token = tl.program_id(0)
    head = tl.arange(0, HEADS)[:, None]  # [HEADS, 1]
    column = tl.arange(0, HALF)[None, :]  # [1, HALF]
    position = tl.load(positions_pointer + token)
    angle = position * half + column
    cosine = tl.load(cosine_pointer + angle, mask=column < half, other=0.0)  # [1, HALF]
    sine = tl.load(sine_pointer + angle, mask=column < half, other=0.0)
    inside = (head < heads) & (column < half)  # [HEADS, HALF]
    first = qkv_pointer + token * qkv_stride + head * (2 * half) + column  # [HEADS, HALF]
    x = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    dtype = qkv_pointer.dtype.element_ty
    tl.store(first, (x * cosine - y * sine).to(dtype), mask=inside)
    tl.store(first + half, (y * cosine + x * sine).to(dtype), mask=inside)
    # END SOLUTION


def rope_in_place(qkv, cosine, sine, positions, query_heads, key_heads):
    """Rotary positions on the queries and keys of a packed QKV, written over them.

    Args:
        qkv: [tokens, (query_heads + 2 · key_heads) · head_dim], float32 or float16: a row has the query heads, the key
            heads, and the value heads of one token, side by side, with any stride from row to row. query_heads is a
            multiple of key_heads, both are at least 1, and any even head_dim from 2 to 256.
        cosine, sine: [capacity, head_dim / 2], float32, contiguous: of the angles of every position.
        positions: [tokens], int64, contiguous, below capacity: where each token stands in its sequence, in any order,
            some perhaps twice.

    Returns:
        None. In each query and key head, x = number i and y = number i + head_dim / 2 become x · cos - y · sin and
        y · cos + x · sin, with cos and sin number i of the token's position. Compute in float32. The values stay as
        they are.

        One kernel is launched. It loads and stores each number of Q and K once, and a token's row of cosine and of sine
        once; it neither loads nor stores the values. PyTorch's own operations compute and copy nothing.
    """
    half = qkv.shape[1] // (query_heads + 2 * key_heads) // 2
    heads = query_heads + key_heads
    rope_kernel[(qkv.shape[0],)](
        qkv, cosine, sine, positions, qkv.stride(0), heads, half,
        HEADS=triton.next_power_of_2(heads), HALF=triton.next_power_of_2(half),
    )


# %%
best_rope_in_place = check("13.3", rope_in_place).best

# %% [markdown]
# With Llama-3-8B's sizes and 16,384 tokens, your kernel moves 344 MB where the listing moves 1.7 GB. On the H200 of
# 2026-11-22 eager PyTorch reached 0.35 TB/s of the least bytes, the compiler's kernel 3.86, and Liger's 1.07. So here
# the compiler was better than a kernel written by hand.
#
# `kernels/fused/rope_append.py` goes one step further. It writes the turned keys and the values straight into the
# cache, because the cache is where they are read next. That saves one more kernel, and for a decode step, in which the
# bytes are few, one more launch.
#
# ## The loss, in chunks and in place · deeper
#
# At the end of a training step stands the largest tensor of all. Llama 3 has 128,256 words. For 4,096 tokens the logits
# have 525 million numbers, 1.05 GB in 16 bits. Most people write
#
# ```python
# loss = F.cross_entropy(logits.float(), targets)
# ```
#
# This makes a copy in float32 (2.1 GB), a tensor of log-probabilities (2.1 GB), and in the backward pass a gradient
# (2.1 GB) and its copy in 16 bits.
#
# None of these copies is needed. The loss needs two numbers for each row, its maximum and its sum of exponentials, and
# chapter 03 finds both in one pass over chunks. The gradient of a logit is its softmax, less 1 at the target. It can be
# written where the logit stood, because nobody needs the logit any more. The chunk is the only tensor that you make.
#
# Rows whose target is `ignore_index` do not count: padding, or a prompt that is not to be learned. They have no loss
# and no gradient, and the mean is over the others. This is easy to get wrong. A fused loss of TransformerEngine divided
# by *all* rows ([ROCm/TransformerEngine#336](https://github.com/ROCm/TransformerEngine/pull/336)), which makes the loss
# and all gradients too small. Another one took the mean of each chunk of rows and added these up: with 128 chunks the
# loss was 128 times too large ([NeMo-Automodel#3804](https://github.com/NVIDIA-NeMo/Automodel/pull/3804)). Neither
# raised an error.

# %%
# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    """The mean cross-entropy, and its gradient written over the logits.

    Args:
        logits: [rows, vocabulary], float32 or float16, finite, with any strides.
        targets: [rows], int64: the right class of each row, or ignore_index, which may be any integer, also a class.
        chunk: how many columns to work on at a time, at least 1; it may be more than there are.

    Returns:
        A float32 tensor without dimensions: the sum over the rows that count of log(Σ exp(logits)) minus the target's
        logit, divided by the number of these rows. Rows whose target is ignore_index do not count.

        After the call the logits hold the derivative of that loss with respect to each of them: the row's softmax, less
        1 at its target, divided by the number of rows that count; 0 in ignored rows. If all rows are ignored, the loss
        is NaN, as PyTorch's is, and the gradient 0.

        Compute in float32. No tensor that you make may have more than rows · chunk elements. PyTorch's softmax,
        log_softmax, logsumexp and cross_entropy are refused.
    """
    # BEGIN SOLUTION
    rows, vocabulary = logits.shape
    chunks = [logits[:, start : start + chunk] for start in range(0, vocabulary, chunk)]  # views
    running_max = torch.full((rows, 1), -math.inf, device=logits.device)
    running_sum = torch.zeros(rows, 1, device=logits.device)
    for tile in chunks:
        wide = tile.float()  # [rows, chunk]
        new_max = torch.maximum(running_max, wide.amax(dim=1, keepdim=True))
        running_sum = running_sum * torch.exp(running_max - new_max) + torch.exp(wide - new_max).sum(1, keepdim=True)
        running_max = new_max
    counts = (targets != ignore_index)[:, None]  # [rows, 1]
    number = counts.sum()
    safe = torch.where(counts, targets[:, None], 0)
    losses = running_max + torch.log(running_sum) - logits.gather(1, safe).float()
    weight = torch.where(counts, 1 / number, 0.0)
    for tile in chunks:
        tile.copy_(torch.exp(tile.float() - running_max) / running_sum * weight)
    logits.scatter_add_(1, safe, -weight.to(logits.dtype))
    return torch.where(counts, losses, 0.0).sum() / number
    # END SOLUTION


# %%
best_cross_entropy_in_place = check("13.4", cross_entropy_in_place).best

# %% [markdown]
# The next cell measures the largest tensor that your function makes, beside that of `F.cross_entropy`, for 64 rows of
# 32,000 logits in 16 bits and chunks of 1,024. **Predict** both.

# %%
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest new tensor that an operation returned."""

    def __init__(self, given):
        super().__init__()
        self.given, self.bytes = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.given:
                self.bytes = max(self.bytes, made.nbytes)
        return result


logits, targets = torch.randn(64, 32_000, dtype=torch.float16), torch.randint(0, 32_000, (64,))
with LargestTensor(logits) as plain:
    F.cross_entropy(logits.float(), targets)
with LargestTensor(logits) as yours:
    best_cross_entropy_in_place(logits, targets, 1024, -100)
print(f"logits {format_bytes(logits.nbytes)}; the largest new tensor: plain {format_bytes(plain.bytes)}, "
      f"in chunks {format_bytes(yours.bytes)}")

# %% [markdown]
# What about the bytes that move? Forward and backward in one kernel read each logit twice and write its gradient once:
# three tensors. On the H200 of 2026-11-22 PyTorch's loss and gradient reached 0.31 TB/s of the least bytes (the logits
# once, the gradient once) for 4,096 rows of 128,256, and the compiled ones 1.57. A row of that length has 256 KB, as
# much as all registers of a multiprocessor, so it cannot stay on the chip between the two passes.
# `kernels/fused/cross_entropy.py` does both passes in one launch, so that part of the second read comes from the L2
# cache.

# %% [markdown]
# ## What the compiler makes of the listing
#
# `torch.compile` works in two steps. *Dynamo* runs your Python code with placeholders instead of tensors, and records
# the operations in a *graph*. *Inductor* takes the graph, decides which operations share a kernel, and writes the
# kernels: in Triton for a GPU, in C++ for a CPU. It chooses by the rules of 13.1: two operations share a kernel if that
# saves a crossing and their loops fit together.
#
# The next cell compiles the listing and prints the names of the kernels that Inductor wrote. A name lists what is
# inside. It does so for three functions: the glue of `add_and_norm`, `turn`, and the norm together with the matrix
# product that follows it. **Predict** the number of kernels for each. (Without a GPU it compiles for the CPU, which
# takes a quarter of a minute and needs a C++ compiler.)

# %%
def generated(function, *args):
    """The code that Inductor writes for function(*args), as one text."""
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    _, texts = run_and_get_code(torch.compile(function, dynamic=False), *args)
    return "\n".join(texts)


def norm_and_product(x, residual, weight, projection):
    normalised, summed = add_and_norm(x, residual, weight)
    return normalised @ projection, summed


can_compile = on_gpu or shutil.which("g++") or shutil.which("clang++")
tokens, hidden = 64, 512
x, residual = torch.randn(2, tokens, hidden, device=device, dtype=torch.float16)
weight, projection = (torch.randn(*shape, device=device, dtype=torch.float16) for shape in ((hidden,), (hidden, 256)))
query = torch.randn(tokens, 4, 64, device=device, dtype=torch.float16)
cosine, sine = torch.randn(2, tokens, 1, 64, device=device, dtype=torch.float16)
texts = {}
if can_compile:
    for name, call in {"add_and_norm": (add_and_norm, x, residual, weight), "turn": (turn, query, cosine, sine),
                       "norm_and_product": (norm_and_product, x, residual, weight, projection)}.items():
        texts[name] = generated(*call)
        kernels = re.findall(r"^((?:cpp|triton_\w+?)_fused_\w+) = ", texts[name], re.MULTILINE)
        outside = re.findall(r"extern_kernels\.(\w+)\(", texts[name])
        print(f"{name}: {len(kernels)} written, {len(outside)} called from a library")
        for kernel in kernels + outside:
            print(f"    {kernel}")
else:
    print("There is neither a GPU nor a C++ compiler here, so Inductor cannot compile.")

# %% [markdown]
# Each piece of glue became one kernel. Its name holds the operations: `_to_copy` is a cast, `pow` the square. The
# matrix product stays outside. Inductor calls a library for it (`mm`), and it fuses nothing into a library's kernel.
# So the normalised rows are written and read again, compiled or not.
#
# Read what it wrote. Look for three things in the text below: the loads, the loop that adds the squares, and the
# stores.

# %%
def kernel_text(text):
    """The first kernel in Inductor's text, as it wrote it: what stands between the quotes behind the kernel's name."""
    quotes = r"(?:'''|\"\"\")"
    found = re.search(rf"_fused_\w+ = async_compile.+?{quotes}\n(.+?){quotes}", text, re.DOTALL)
    return found.group(1) if found else text


if can_compile:
    print(kernel_text(texts["add_and_norm"]))

# %% [markdown]
# **On a GPU** the name tells how the row is reduced. `triton_per_fused_…` is a *persistent* reduction: a program holds
# the whole row in registers, as your kernel does. `triton_red_fused_…` goes over the row in a loop, and then once more
# to scale it. For rows of 1,024 numbers Inductor wrote the first form here, and from 2,048 on the second. This is the
# middle of what it wrote for rows of 4,096. (Recorded on 2026-11-25: Inductor of PyTorch 2.13 was told that the GPU is
# an H100 and wrote the text, but no GPU ran it. Lines that only rename an index are left out.)
#
# ```python
# _tmp6 = tl.full([XBLOCK, R0_BLOCK], 0, tl.float32)
# for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
#     r0_index = r0_offset + r0_base
#     r0_mask = r0_index < r0_numel
#     r0_1 = r0_index
#     tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     tmp1 = tl.load(in_ptr1 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     tmp2 = tmp0 + tmp1
#     tmp3 = tmp2.to(tl.float32)
#     tmp4 = tmp3 * tmp3
#     tmp5 = tl.broadcast_to(tmp4, [XBLOCK, R0_BLOCK])
#     tmp7 = _tmp6 + tmp5
#     _tmp6 = tl.where(r0_mask, tmp7, _tmp6)
#     tl.store(out_ptr0 + (r0_1 + 4096*x0), tmp2, r0_mask)
# tmp6 = tl.sum(_tmp6, 1)[:, None]
# for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
#     r0_index = r0_offset + r0_base
#     r0_mask = r0_index < r0_numel
#     r0_1 = r0_index
#     tmp8 = tl.load(out_ptr0 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     tmp17 = tl.load(in_ptr2 + (r0_1), r0_mask, eviction_policy='evict_last', other=0.0).to(tl.float32)
#     …
#     tl.store(out_ptr2 + (r0_1 + 4096*x0), tmp18, r0_mask)
# ```
#
# The first loop loads x and the residual, adds up the squares, and stores the sum. The second loop loads the sum
# *again* (`tmp8`). So this kernel moves five tensors, and yours moves four. Why was the compiled form only 4 % below a
# copy, then? A row of 4,096 numbers has 8 KB. When the second loop comes to it, it is still in the L2 cache, so most of
# the fifth tensor does not cross the memory bus. With rows of 64k numbers that is no longer so, as you will see below.
#
# **On a CPU** one kernel is not one pass. The text has a loop that adds and stores the sum (`out_ptr0`), a loop that
# reads it and adds up the squares, and a loop that reads it again and scales it. The sum of a row is still in the
# CPU's cache then, so this costs little. But it shows why you should count loads, and not kernels.

# %% [markdown]
# ## When the graph breaks
#
# Dynamo records what the Python code does to tensors. It must know the code's way without knowing the tensors' numbers.
# If the way depends on a number, Dynamo compiles what it has, lets Python go on, and begins a new graph behind it. That
# is a *graph break*. It costs three things: nothing is fused across it, every tensor in use there is written to memory,
# and on a GPU the host often has to wait for the number.
#
# A second cost is *recompilation*. What Dynamo has assumed is checked at every call: the shapes, and the way that every
# `if` went. If a call does not fit, the function is compiled again. After eight times PyTorch gives up and runs the
# function eagerly. So a loop over tokens, which is unrolled into the graph, is compiled anew for each length.
#
# Here is the end of a step for a batch of sequences of several lengths: an addition in which numbers beyond a limit are
# cut, a norm, and the last token of each. `torch._dynamo.explain` says where its graph breaks. **Predict** how many
# graphs there are, and which lines break it.

# %%
def with_breaks(hidden, residual, weight, lengths, limit):
    """hidden, residual: [batch, longest, width]; lengths: [batch], tokens of each sequence. What follows is padding."""
    summed = hidden + residual
    if (lengths < hidden.shape[1]).any():
        summed = summed.nan_to_num()
    normalised, last = torch.zeros_like(hidden), torch.zeros_like(hidden[:, 0])
    for sequence, length in enumerate(lengths.tolist()):
        if length:
            rows = summed[sequence, :length]
            if rows.abs().max() > limit:
                rows = rows.clamp(-limit, limit)
            rows = rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + 1e-6) * weight
            normalised[sequence, :length], last[sequence] = rows, rows[-1]
    return normalised, last


import torch._dynamo

torch._dynamo.reset()
example = (*torch.randn(2, 3, 7, 16), torch.ones(16), torch.tensor([7, 4, 0]), 2)
explained = torch._dynamo.explain(with_breaks)(*example)
print(f"{explained.graph_count} graphs, {explained.graph_break_count} breaks")
for reason in explained.break_reasons:
    line = reason.user_stack[-1] if reason.user_stack else None
    print(f"    {line.line.strip() if line else ''}\n        {reason.reason.strip().splitlines()[0]}")
torch._dynamo.reset()

# %% [markdown]
# The lines are where Dynamo stopped: at an `if` on a tensor, and at `tolist`, which reads all lengths. That one stands
# in a loop, where no new graph can begin, so the loop runs eagerly. On a GPU each of the two also waits until the GPU
# has done all work before it.
#
# Now write the same without a break. The way out is nearly always the same one: compute everything, also what will not
# be needed, and *choose* at the end with `torch.where`. Here that means the padding too. It costs some arithmetic, but
# no bytes that count.
#
# The check compiles your function once and calls it with batches of other sizes. There must be one graph for all.

# %%
# Exercise 13.5 · One graph for every length
def finish_step(hidden, residual, weight, lengths, limit):
    """(normalised, last), as `with_breaks` computes them, in one graph for all sizes.

    Args:
        hidden, residual: [batch, longest, width], float32; batch and longest are at least 2. Rows behind a sequence's
            last token are padding, and may hold anything, NaN too.
        weight: [width], float32.
        lengths: [batch], int64: how many tokens each sequence has, 0 to longest.
        limit: a positive integer. Numbers of hidden + residual beyond ±limit are cut to ±limit.

    Returns:
        normalised: [batch, longest, width]: each token's sum, cut, divided by its root mean square, times the weight.
            The number under the root is the mean of the squares plus 1e-6. Padding is 0.
        last: [batch, width]: the normalised row of each sequence's last token, 0 for a sequence without tokens.

        The check compiles the function once, with torch.compile(finish_step, dynamic=True), and calls it for several
        batches of other sizes. That must make one graph: no graph break, and no second compilation.
    """
    # BEGIN SOLUTION
    summed = (hidden + residual).clamp(-limit, limit)
    normalised = summed * torch.rsqrt(summed.square().mean(dim=-1, keepdim=True) + 1e-6) * weight
    present = torch.arange(hidden.shape[1], device=hidden.device) < lengths[:, None]  # [batch, longest]
    normalised = torch.where(present[:, :, None], normalised, 0.0)
    last = normalised[torch.arange(hidden.shape[0], device=hidden.device), (lengths - 1).clamp(min=0)]
    return normalised, last
    # END SOLUTION


# %%
best_finish_step = check("13.5", finish_step).best

# %% [markdown]
# A kernel that you wrote yourself can break a graph too. Dynamo can look into a Triton kernel, but not into what a
# launcher does besides: reading a pointer, asking for the device's properties, checking numbers. Register such a
# launcher as an operator with `torch.library.custom_op`. Then Dynamo puts one call into the graph and asks a second
# function, the *fake*, for the shapes of the results. `torch.library.opcheck` tests whether the two agree. The next
# cell tests this library's add and norm, and shows its calls in a graph.

# %%
from course_lib.kernels.fused.norm_operators import add_rms_norm as library_norm


def norm_twice(x, residual, weight):
    normalised, summed = library_norm(x, residual, weight, 1e-5)
    return library_norm(normalised * 0.5, summed, weight, 1e-5)


x, residual = torch.randn(2, 4, 64, device=device)
weight = torch.ones(64, device=device)
print(torch.library.opcheck(torch.ops.course_lib.add_rms_norm.default, (x, residual, weight, 1e-5)))
explained = torch._dynamo.explain(norm_twice)(x, residual, weight)
print(f"{explained.graph_count} graph, {explained.graph_break_count} breaks; the calls in it:")
for node in explained.graphs[0].graph.nodes:
    if node.op == "call_function":
        print(f"    {node.target}")
torch._dynamo.reset()

# %% [markdown]
# An operator is a wall for fusion, as the matrix product was: the product by 0.5 in the middle becomes a kernel of its
# own. That is the price of your own kernel inside a compiled model, and one more reason to write few.

# %% [markdown]
# ## When does a hand-written kernel pay?
#
# The next picture has one row for each operation, measured on one H200 (2026-11-22, PyTorch 2.11, bf16). Rates are
# those of the least bytes that must move: each input once, each result once. The line is the device's copy. Nothing
# here was measured on your machine; `python -m course_lib bench fused` measures it on your GPU, beside this library's
# kernels.
#
# **Predict**, before you look: which of the eight does the compiler do well, and what do the others have in common?

# %%
from course_lib.figures.fused.rates import ON_AN_H200, draw_fused_rates

draw_fused_rates(ON_AN_H200)

# %% [markdown]
# > **The answer to the first question.** Where an operation is one pass over rows that fit on the chip, the compiler is
# > as good as the best kernel: add and norm, SwiGLU and RoPE reach 93 to 101 % of a copy's rate. Where it isn't, the
# > compiler reaches 28 to 68 %: long rows, the groups of a norm, and a loss with its gradient.
#
# So there are four reasons to write a kernel. The first three are behind the slow rows:
#
# - **Long rows.** A row of 65,536 numbers in 16 bits has 128 KB, half of a multiprocessor's registers. The compiler's
#   kernel goes over it twice, as in the text above. It reached 2.85 TB/s, and two thirds of 4.17 would be 2.78. So it
#   looks as if the row now crosses the bus twice, and with the result that makes three tensors for two. QuACK lets
#   several multiprocessors share a row, and reads it once.
# - **Reductions over something else than the last dimension.** GroupNorm's groups are some channels by all places. Its
#   mean and variance must be known before Mish can run, and the group has to stay on the chip in between.
# - **In place.** Cross-entropy can write its gradient over the logits. A compiler does not do that on its own, because
#   the logits might be needed later. Only you know that they are not.
# - **Epilogues.** A step behind a matrix product can run in the product's own kernel, on the accumulator. Inductor does
#   this only if it writes the product itself (`mode="max-autotune"`), and not for a library's kernel.
#
# There are also fusions that do not pay. If you fuse the last linear layer with the loss, the logits never exist as a
# whole, which saves gigabytes of *memory*. But in the backward pass the logits have to be computed a second time or the
# gradients kept, so it takes longer. Do it if the memory is what limits you.
#
# So measure in this order: first what PyTorch has (`F.rms_norm`, `F.scaled_dot_product_attention`), then
# `torch.compile`, then the difference between its rate and a copy's. Write a kernel if that difference, times the
# share of the time that the operation takes, is worth a day of your work and every later change.

# %% [markdown]
# ## A hundred small steps · deeper
#
# The slowest rows of the picture belong to a *diffusion* model. Such a model makes its output from noise, in steps: a
# hundred in Diffusion Policy, which plans a robot's next 16 actions
# ([arXiv 2303.04137](https://arxiv.org/abs/2303.04137)). In every step a one-dimensional U-Net looks at the sequence
# and takes some noise away. Its blocks are convolution, GroupNorm, Mish, and a scale and a shift for each channel that
# depend on the step.
#
# **GroupNorm** divides the channels into groups, 8 say. A group's mean and variance are over its channels *and* all
# places. Then the numbers are normalised, and each channel has a weight and a bias. **Mish** is an activation, $a
# \tanh(\log(1 + e^a))$. In three operations, the norm, Mish, and scale with shift, each number moves seven times: the
# norm reads it twice and writes it, and the other two read and write it. In one kernel it moves twice. A group of 32
# channels and 16 places has 512 numbers, so it fits into registers easily.
#
# Three things to get right:
#
# - **The variance.** You could add up $x$ and $x^2$ in one go and take $E[x^2] - E[x]^2$. If the mean is 10,000 and the
#   variance 1, both terms are near $10^8$. There float32 steps by 8, so the difference is noise, and it may be
#   negative. PyTorch's own GroupNorm on a CPU had this fault
#   ([pytorch#54293](https://github.com/pytorch/pytorch/issues/54293)). With the tile in registers you can do better for
#   nothing: find the mean, subtract it, and then square.
# - **Empty lanes.** They hold 0. After the mean is subtracted they hold minus the mean, and its square would be added.
# - **The constants.** The scale and the shift come from a small network that reads the step's number. They depend on
#   nothing else, so for 100 steps and 512 channels all of them are two tables of 205 KB. Compute them once, before the
#   first action, and let the kernel look up its row. Otherwise 100 steps run that network 100 times for each plan.

# %%
# Exercise 13.6 · A denoising step in one kernel
@triton.jit
def group_norm_mish_kernel(
    x_pointer, weight_pointer, bias_pointer, scale_pointer, shift_pointer, steps_pointer, out_pointer,
    channels, members, length, epsilon, MEMBERS: tl.constexpr, LENGTH: tl.constexpr,
):
    """Program (group, sample): one group's channels at all places. MEMBERS and LENGTH are the next powers of two."""
    # BEGIN SOLUTION
    group, sample = tl.program_id(0), tl.program_id(1)
    member = tl.arange(0, MEMBERS)  # [MEMBERS]
    place = tl.arange(0, LENGTH)[None, :]  # [1, LENGTH]
    exists = member < members
    inside = exists[:, None] & (place < length)  # [MEMBERS, LENGTH]
    channel = group * members + member
    offsets = (sample * channels + channel)[:, None] * length + place
    x = tl.load(x_pointer + offsets, mask=inside, other=0.0).to(tl.float32)
    count = members * length
    mean = tl.sum(tl.sum(x, axis=1), axis=0) / count
    centred = tl.where(inside, x - mean, 0.0)
    variance = tl.sum(tl.sum(centred * centred, axis=1), axis=0) / count
    weight = tl.load(weight_pointer + channel, mask=exists, other=0.0)  # [MEMBERS]
    bias = tl.load(bias_pointer + channel, mask=exists, other=0.0)
    affine = centred * tl.rsqrt(variance + epsilon) * weight[:, None] + bias[:, None]
    exponential = tl.exp(tl.minimum(affine, 20.0))
    product = exponential * (exponential + 2.0)
    mish = affine * product / (product + 2.0)
    step = tl.load(steps_pointer + sample)
    scale = tl.load(scale_pointer + step * channels + channel, mask=exists, other=0.0)
    shift = tl.load(shift_pointer + step * channels + channel, mask=exists, other=0.0)
    out = scale[:, None] * mish + shift[:, None]
    tl.store(out_pointer + offsets, out.to(out_pointer.dtype.element_ty), mask=inside)
    # END SOLUTION


def group_norm_mish(x, weight, bias, scale_table, shift_table, steps, groups, epsilon):
    """scale · mish(normal · weight + bias) + shift, where normal is x with each group's mean 0 and variance 1.

    Args:
        x: [batch, channels, length], float32 or float16, length from 1. `groups` divides channels, and group g has any
            number of channels: members = channels / groups of them, from g · members on. A group has at least two
            numbers. Where x is float32 its mean may be 10,000 with a variance of 1.
        weight, bias: [channels], float32.
        scale_table, shift_table: [number of steps, channels], float32.
        steps: [batch], int64: the row of both tables that belongs to each sample.
        epsilon: a positive float, added to the variance, under the root. The variance divides by the count.
        All are contiguous.

    Returns:
        A contiguous tensor of x's shape and dtype. mish(a) = a · tanh(log(1 + exp(a))), also for a of ±100. Compute in
        float32. One kernel is launched, which loads x once and of the tables only the rows that `steps` names.
        PyTorch's own operations compute and copy nothing.
    """
    batch, channels, length = x.shape
    members = channels // groups
    out = torch.empty_like(x)
    group_norm_mish_kernel[(groups, batch)](
        x, weight, bias, scale_table, shift_table, steps, out, channels, members, length, epsilon,
        MEMBERS=triton.next_power_of_2(members), LENGTH=triton.next_power_of_2(length),
    )
    return out


class StepTables:
    """The scales and shifts of all denoising steps, made once."""

    def __init__(self, make, number: int):
        """make(step) gives (scale, shift), each [channels], float32, for steps 0 to number - 1; number is at least 1.

        It is slow, so it is called once for each step in the whole life of this object: here, or when the tables are
        first asked for. It may return the same memory each time, with other numbers in it.
        """
        # BEGIN SOLUTION
        rows = [tuple(part.clone() for part in make(step)) for step in range(number)]
        self.made = tuple(torch.stack(parts) for parts in zip(*rows))
        # END SOLUTION

    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scale_table, shift_table), each [number, channels], float32, contiguous. It is called many times."""
        # BEGIN SOLUTION
        return self.made
        # END SOLUTION


# %%
best_group_norm_mish, best_step_tables = check("13.6", group_norm_mish, StepTables).best

# %% [markdown]
# A block with 256 channels and 16 places has 8 KB in 16 bits for one robot. At a copy's rate it is read and written in
# 4 ns. A launch takes some microseconds. So at a batch of 1 neither the bytes nor your kernel's speed matter: what
# counts is how *many* kernels there are, and who launches them. With 4,096 samples, as in training, the bytes count
# again, and that is the row of the picture in which the compiler's kernel reached 1.17 TB/s. The next cell measures
# both on a GPU: the three operations, the same compiled, and your kernel. **Predict** for which batch yours gains most.

# %%
def block_of_pytorch(x, weight, bias, scale_table, shift_table, steps, groups, epsilon):
    out = F.mish(F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype), epsilon))
    return (out * scale_table[steps][:, :, None] + shift_table[steps][:, :, None]).to(x.dtype)


def block_inputs(batch, channels=256, length=16, number=100):
    x = torch.randn(batch, channels, length, device=device, dtype=torch.float16)
    vectors, tables = torch.randn(2, channels, device=device), torch.randn(2, number, channels, device=device)
    return x, *vectors, *tables, torch.randint(0, number, (batch,), device=device), 8, 1e-5


if on_gpu:
    compiled_block = torch.compile(block_of_pytorch, dynamic=False)
    for batch in (1, 64, 4096):
        inputs = block_inputs(batch)
        forms = {"eager": partial(block_of_pytorch, *inputs), "compiled": partial(compiled_block, *inputs),
                 "your kernel": partial(best_group_norm_mish, *inputs)}
        rates = rates_of(forms, 2 * inputs[0].nbytes)
        print(f"batch {batch:>5}: " + ", ".join(f"{name} {format_bandwidth(rate)}" for name, rate in rates.items()))
else:
    inputs = block_inputs(2)
    report = metered(best_group_norm_mish, *inputs)
    print(f"No GPU here, so nothing is timed. For a batch of 2 your kernel moves {format_bytes(report.total_bytes)};\n"
          f"x and the result have {format_bytes(2 * inputs[0].nbytes)} of these.")

# %% [markdown]
# ## A layout by hand · deeper
#
# Triton decides which thread holds which element of a tile. In CUDA C++ with CUTLASS, and in CuTe's Python, *you*
# decide, and you write it as a *layout*. A layout is a pair of tuples, a shape and a stride for each dimension. It
# turns an index into an offset. CuTe counts the *first* dimension fastest: in the shape (4, 8) the index 6 has the
# coordinates (2, 1), because 6 = 2 + 1 · 4. The offset is each coordinate times its stride, added up. With the strides
# (8, 1) that is 17, and with (1, 4) it is 6.
#
# Layouts are functions, so one can follow another. If the inner layout picks indices of a tile, and the outer one says
# where the tile's elements lie in memory, then the outer one *after* the inner one says where the picked elements lie.
# This is how CuTe says what a thread owns. One layout gives each thread a place in the tile, a second one gives the
# steps from there to all of its values, and the tile's own layout turns places into offsets.

# %%
# Exercise 13.7 · A layout by hand
def offset(layout, index: int) -> int:
    """Where an index of a layout lies.

    layout: (shape, stride), two tuples of one length, at least 1: each size at least 1, each stride at least 0.
    index: from 0 to the product of the sizes minus 1. It counts the first dimension fastest.
    Returns: the sum over the dimensions of coordinate · stride.
    """
    # BEGIN SOLUTION
    total = 0
    for size, stride in zip(*layout):
        total += index % size * stride
        index = index // size
    return total
    # END SOLUTION


def composed(outer, inner) -> list:
    """For each index of the layout `inner`, in order, the offset that `outer` gives to the offset of `inner`.

    All offsets of `inner` are indices of `outer`.
    """
    # BEGIN SOLUTION
    return [offset(outer, offset(inner, index)) for index in range(math.prod(inner[0]))]
    # END SOLUTION


def owned(tile, threads, values, thread: int) -> list:
    """The offsets in memory of all values that a thread owns, in the order of `values`.

    tile: the layout of a tile in memory. threads: a layout whose index is a thread's number, and whose offset is the
        place of its first value, an index of the tile. values: a layout whose index is a value's number, and whose
        offset is added to that place.
    """
    # BEGIN SOLUTION
    first = offset(threads, thread)
    return [offset(tile, first + offset(values, value)) for value in range(math.prod(values[0]))]
    # END SOLUTION


# %%
best_offset, best_composed, best_owned = check("13.7", offset, composed, owned).best

# %% [markdown]
# What is a good layout for a load? A thread can load 16 bytes at once, eight numbers of 16 bits, if they lie side by
# side. And the 32 threads of a warp should cover whole lines of 128 bytes together. The next cell shows the first
# offsets of four threads, for a row of 256 numbers, in two layouts. **Predict** which one loads 16 bytes at once.

# %%
row = ((256,), (1,))
ways = {"8 neighbours each": (((32,), (8,)), ((8,), (1,))), "every 32nd": (((32,), (1,)), ((8,), (32,)))}
for name, (threads, values) in ways.items():
    print(name, *(f"\n    thread {thread}: {best_owned(row, threads, values, thread)}" for thread in range(4)))

# %% [markdown]
# The first: a thread's eight offsets are neighbours, so one instruction loads them. In the second each of eight loads
# takes 2 bytes, and the warp covers 64 bytes at a time. Both read every number once, so `kernel_bytes` sees no
# difference. It is the number of instructions that differs, eight to one.

# %% [markdown]
# ## What production systems do
#
# - **vLLM** compiles its models with `torch.compile`, and adds passes of its own to Inductor. They look for patterns in
#   the graph, such as a norm and the cast to FP8 behind it, and replace them by a kernel written by hand
#   ([its table of fusions](https://docs.vllm.ai/en/stable/design/fusions/)).
# - **Liger** is a library of Triton kernels for training: norms, RoPE, SwiGLU, and cross-entropy fused with the last
#   linear layer ([arXiv 2410.10989](https://arxiv.org/abs/2410.10989)). In the last one, per-token weights of the loss
#   once gave wrong gradients: a kernel multiplied all rows by the first row's weight
#   ([Liger#1298](https://github.com/linkedin/Liger-Kernel/pull/1298)).
# - **QuACK** ([code](https://github.com/Dao-AILab/quack)) has norms, softmax and cross-entropy in CuTe, with clusters
#   of multiprocessors for long rows.
#
# **In this library.** `course_lib/kernels/fused/` has add and norm, RoPE with the append to a cache, SwiGLU, and
# cross-entropy with its gradient in place, and GroupNorm with Mish. Each is an operator of PyTorch (`torch.library`),
# so that `torch.compile` calls it without a graph break.
#
# ## Papers
#
# - Zhang and Sennrich: *Root Mean Square Layer Normalization*, [arXiv 1910.07467](https://arxiv.org/abs/1910.07467).
# - Su et al.: *RoFormer*, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864): rotary positions.
# - Shazeer: *GLU Variants Improve Transformer*, [arXiv 2002.05202](https://arxiv.org/abs/2002.05202): SwiGLU.
# - Ansel et al.: *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS 2024: Dynamo and Inductor. Section 4 is how Inductor fuses.
# - Milakov and Gimelshein: *Online normalizer calculation for softmax*,
#   [arXiv 1805.02867](https://arxiv.org/abs/1805.02867).
# - Hsu et al.: *Liger Kernel: Efficient Triton Kernels for LLM Training*,
#   [arXiv 2410.10989](https://arxiv.org/abs/2410.10989).

# %%
progress()
