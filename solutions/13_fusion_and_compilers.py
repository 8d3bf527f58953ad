# %% [markdown]
# # 13 · Fusion and compilers: the bytes between the matrix products
#
# **The question.** A layer of Llama-3-8B reads 16,384 tokens. Its matrix products are 7.1 TFLOP. An H200 needs 9.0 ms
# for them at 790 TFLOP/s, the rate we measured for one large product in 16 bits. Between the matrix products there is
# also *glue*: two additions, two norms, the rotation of queries and keys, and the activation. The glue does almost no
# arithmetic. How long does it take?
#
# Written in PyTorch as Llama's own code has it, the glue reads and writes 9.7 GB. An H200 copied at 4.17 TB/s when we
# measured it, and at that rate the glue takes 2.3 ms. That is a fifth of the layer's time, if you leave out attention.
# Written as four kernels, the same glue moves 2.8 GB and takes 0.7 ms at that rate.
#
# So who writes these four kernels? `torch.compile` can, and so can you. Write down two guesses. For which operations is
# the compiler as fast as the best kernel written by hand? For which does it stay three times below what the memory can
# do?
#
# **Time.** About seven and a half hours for all eight exercises, estimated. The **core path** takes two to two and a
# half: exercises 13.1, 13.2 and 13.5, and every section whose heading does not end in *deeper*. To skip the others, run
# their cells and go on. You need chapters 01 and 04, and chapter 03 for exercise 13.4.

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
# Here is the glue of one layer, as most models write it:
#
# - `add_and_norm` runs twice, once before attention and once before the feed-forward part. It adds what the last part
#   computed (`x`) to the *residual*, the running sum that passes from layer to layer. Then it divides each row by its
#   root mean square. It returns both results, because the next matrix product needs the normalised rows and the next
#   addition needs the sum.
# - `turn` applies the rotary positions (RoPE) to Q and to K. It splits each head into two halves, takes one number from
#   each half as a pair, and rotates the pair by an angle that depends on the token's position.
# - `swiglu` is the activation of the feed-forward part.

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
# memory, computes, and writes its result back. The next kernel then reads that result again. So even a tensor that is
# needed only between two operations is written once and read at least once.
#
# The next picture counts this for `add_and_norm` in 16 bits. Each arrow is one read or one write, and the number beside
# it says how many bytes that is for one number of the hidden state. Three of the tensors in between are float32,
# because a sum of 4,096 squares in 16 bits would be too inexact. They cost 4 bytes instead of 2.

# %%
from course_lib.figures.fused.crossings import ADD_AND_NORM, draw_crossings

draw_crossings([("Seven operations, for one number of the hidden state", ADD_AND_NORM),
                ("One kernel", [("add and norm", 4, 4)])])

# %% [markdown]
# Seven kernels move 42 bytes for each number. One kernel needs only 8, because it reads x and the residual and writes
# the sum and the normalised number, 2 bytes each. Putting several operations into one kernel is called *fusion*. The
# arithmetic stays the same, and so do the inputs and the results. Fusion removes the reads and writes between the
# operations, because those values stay in registers.
#
# Two rules give the bytes of a fused kernel:
#
# - It reads each tensor from outside once, however many of its operations need it.
# - It writes a result only if somebody outside needs it.
#
# Take `swiglu` as an example. Eager PyTorch runs two kernels: `silu` reads one tensor and writes one, and the product
# reads two and writes one. That makes five tensors. One fused kernel reads gate and up and writes the result, which
# makes three.
#
# In 13.1 you count the bytes of the whole layer in this way, as a *ledger*. Count 4 bytes for each number that the
# listing marks as float32, and the bytes of the layer's own dtype for the rest. A tensor that is broadcast, such as
# `cosine`, counts at its own size. The mean has one number for a row, so you may leave it out. Views move nothing.

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

    item_bytes: the bytes of one number of the layer, 2 or 4. query_heads is a multiple of key_heads.
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
# Fusing saves 71 % of the bytes. The norms move more than half of the 9.7 GB, because of their float32 tensors. SwiGLU
# gains least: it goes from five tensors to three, and no kernel can do with less, because two tensors come in and one
# goes out.
#
# The times in the picture say how long the memory needs if nothing else is slow. A real kernel can come close to them,
# as you will see, but many take longer.
#
# ## Add and norm in one kernel
#
# The first of the four kernels contains what makes fusion hard: a *reduction*. You need the root mean square of the
# whole row before you can write the first normalised number. So the row has to be kept somewhere until then. If it fits
# into registers, you read it once. If it does not, you have to read it a second time.
#
# How long may a row be? A multiprocessor of an H100 has 65,536 registers of 4 bytes, 256 KB in all. A row of 16,384
# float32 numbers fills a quarter of them. So for today's models one program can hold a whole row, as one tile. In
# Triton a tile's length is a power of two. A row of 5,001 columns therefore needs a tile of 8,192, and a mask switches
# off the 3,191 lanes that have no column.
#
# Two details decide whether the result is right. First, add up the squares in float32: the square of 300 is 90,000, and
# float16 ends at 65,504. Second, divide the sum by the number of columns, not by the number of lanes.
#
# Adding up squares in 16 bits hurts even where nothing overflows. A report on the serving engine SGLang blames it for
# an error that grew a little in each of 60 layers. By layer 58 the hidden state and the right one pointed in clearly
# different directions: the cosine between them was 0.51
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
    row = tl.program_id(0).to(tl.int64)  # 64 bits: a row can begin beyond 2^31 elements
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
            1 to 16,384. The columns lie side by side. x and residual each have a stride of their own
            from row to row, of any size, so rows may begin beyond 2³¹ elements.
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
# Your kernel passed, so it loads x and the residual once, and stores each result once. The next cell counts all its
# bytes for 16 rows of 1,000 numbers in float32, and compares them with what `kernel_bytes` of 13.1 says. **Predict** by
# how much the two differ, and why.

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
# If your program owns one row, it loads the weight once for each row. The ledger counts the weight once. So the meter
# counts 15 more loads of 4,000 bytes, or 60,000 bytes. On a GPU most of these loads do not reach the memory: for a
# hidden size of 4,096 the weight has 8 KB in 16 bits, and after the first rows it comes from the L2 cache.
#
# The next cell measures this on a GPU, with a gigabyte of tensors. It runs four forms: the listing in eager PyTorch,
# the listing after `torch.compile`, an addition followed by PyTorch's own `F.rms_norm`, and your kernel. All rates
# divide the *least* bytes, four tensors, by the time. So a form that moves more bytes shows a lower rate. **Predict**
# the order.

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
# On that H200 the compiler's kernel and the one written by hand are 2 % apart, and both are within 4 % of a copy. (The
# hand-written one comes from Liger, a library of Triton kernels for training.) For this operation you need no kernel of
# your own.
#
# `F.rms_norm` reached 2.76 TB/s. By the ledger it moves five tensors instead of four, because one kernel writes the sum
# and the next one reads it. That alone would give four fifths of 4.17, which is 3.3 TB/s. We did not examine what costs
# the rest.

# %% [markdown]
# ## Turn Q and K where they lie · deeper
#
# One matrix product computes Q, K and V together, so they lie side by side in one *packed* tensor. A row belongs to one
# token, and holds its query heads, then its key heads, then its value heads. In Llama-3-8B these are 32, 8 and 8 heads
# of 128 numbers. RoPE must turn the first 40 heads and leave the last 8 alone.
#
# The listing above splits the tensor, turns Q and K, and makes new tensors. None of these is needed. Each turned pair
# depends only on the old pair and its angle, so you can work *in place*: load a pair, and store the turned pair where
# it came from. The kernel never touches the values.
#
# The next picture shows a small row, with 8 query heads and 2 KV heads, and below it one head.

# %%
from course_lib.figures.fused.packed import draw_packed_row

draw_packed_row(query_heads=8, key_heads=2, head_dim=16)

# %% [markdown]
# Three things go wrong here in practice:
#
# - **Which numbers are a pair.** In Llama's published weights for Hugging Face, number $i$ of a head is turned with
#   number $i + 64$. Other models turn neighbours, $2i$ with $2i + 1$. A kernel for one kind gives plausible but wrong
#   numbers for the other. ONNX Runtime's WebGPU kernel once always took the halves, also for models with neighbours
#   ([onnxruntime#26758](https://github.com/microsoft/onnxruntime/pull/26758)).
# - **Where a token stands.** In a decode step a token may be in row 0 of the tensor and at position 8,191 of its
#   sequence. So the positions come as a tensor, and the row's number tells you nothing about the angle.
# - **Which program loads the angles.** All heads of a token share its angles: 64 cosines and 64 sines in float32, 512
#   bytes. One head reads and writes just as much in 16 bits, 256 bytes each way. If each head had a program of its own,
#   the angles would be loaded 40 times, and the kernel would move twice as many bytes by the meter's count.

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
    token = tl.program_id(0).to(tl.int64)  # 64 bits: a row can begin beyond 2^31 elements
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
            heads, and the value heads of one token, side by side, with any stride from row to row, so rows may begin
            beyond 2³¹ elements. query_heads is a multiple of key_heads, and both are at least 1. head_dim is any even
            number from 2 to 256.
        cosine, sine: [capacity, head_dim / 2], float32, contiguous: a row for each position, of its angles.
        positions: [tokens], int64, contiguous, below capacity: where each token stands in its sequence, in any order,
            some perhaps twice.

    Returns:
        None. In each query and key head, x = number i and y = number i + head_dim / 2 become x · cos - y · sin and
        y · cos + x · sin, with cos and sin number i of the token's position. Compute in float32, and round each
        result once, to the dtype of qkv. The values stay as they are.

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
# the compiler beat a kernel written by hand.
#
# `kernels/fused/rope_append.py` goes one step further. It writes the turned keys and the values straight into the
# cache, because attention reads them there. That saves one more kernel. In a decode step, where there are few bytes,
# the launch it saves matters more than the bytes.
#
# ## The loss, in chunks and in place · deeper
#
# The largest tensor of a training step is at its end. Llama 3 has 128,256 words. For 4,096 tokens the logits have 525
# million numbers, 1.05 GB in 16 bits. Most people write
#
# ```python
# loss = F.cross_entropy(logits.float(), targets)
# ```
#
# This makes a float32 copy of the logits (2.1 GB) and a tensor of log-probabilities (2.1 GB). The backward pass makes a
# gradient for each of these two (2.1 GB each), and a last one in 16 bits (1.05 GB).
#
# None of them is needed as a tensor of its own. The loss needs two numbers for each row, its maximum and its sum of
# exponentials, and chapter 03 finds both in one pass over chunks. The gradient of a row's loss with respect to a logit
# is the logit's softmax, less 1 at the target. You can write it where the logit was, because nothing reads the logit
# after that. The largest tensor that you make is then one chunk.
#
# Some rows do not count: padding, or a prompt that is not to be learned. Their target is `ignore_index`. They have no
# loss and no gradient, and the mean is over the other rows. This is easy to get wrong, and neither of these two faults
# raised an error:
#
# - A fused loss of TransformerEngine divided by *all* rows, which makes the loss and all gradients too small
#   ([ROCm/TransformerEngine#336](https://github.com/ROCm/TransformerEngine/pull/336)).
# - Another one took the mean of each chunk of rows and added these means up. With 128 chunks the loss was 128 times too
#   large ([NeMo-Automodel#3804](https://github.com/NVIDIA-NeMo/Automodel/pull/3804)).

# %%
# Exercise 13.4 · The loss in chunks
def cross_entropy_in_place(logits, targets, chunk, ignore_index):
    """The mean cross-entropy, and its gradient written over the logits.

    Args:
        logits: [rows, vocabulary], float32 or float16, finite, with any strides.
        targets: [rows], int64: the right class of each row, or ignore_index. That may be any integer, even a class.
        chunk: how many columns to work on at a time, at least 1; it may be more than there are.

    Returns:
        A float32 tensor without dimensions: the sum over the rows that count of log(Σ exp(logits)) minus the target's
        logit, divided by the number of these rows. Rows whose target is ignore_index do not count.

        After the call the logits hold the derivative of that loss with respect to each of them: the row's softmax, less
        1 at its target, divided by the number of rows that count; 0 in ignored rows. If all rows are ignored, the loss
        is NaN, as PyTorch's is, and the gradient 0.

        Compute in float32, float16 logits too. Round the gradient to the logits' dtype when you write it over them.
        What is subtracted at the target may be rounded apart. No tensor that you make may have more than rows · chunk
        elements. PyTorch's softmax, log_softmax, logsumexp and cross_entropy are refused.
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
# The plain loss makes a float32 copy of the logits, 8.2 MB. Yours needs 262 kB if its largest tensor is one chunk in
# float32, about a thirtieth.
#
# How many bytes move? If forward and backward are in one kernel, it reads each logit twice and writes its gradient
# once: three tensors. The second read is hard to avoid. A row of 128,256 numbers has 257 kB in 16 bits, about as much
# as all registers of a multiprocessor, so it cannot stay in them between the two passes. The *least* bytes are two
# tensors, the logits once and the gradient once. By that count, on an H100 (2026-11-27) and for 4,096 rows in bfloat16,
# PyTorch's loss and gradient reached 0.67 TB/s, and the compiled ones 1.43. `kernels/fused/cross_entropy.py` does both
# passes in one launch, so that part of the second read can come from the L2 cache. Further below, eight thread blocks
# share a row, and the second read is gone.

# %% [markdown]
# ## What the compiler makes of the listing
#
# `torch.compile` works in two steps. First *Dynamo* goes through your Python code with placeholders instead of tensors,
# and records the operations in a *graph*. Then *Inductor* takes the graph, decides which operations share a kernel, and
# writes the kernels: in Triton for a GPU, in C++ for a CPU. It decides by the rules of 13.1: two operations share a
# kernel if that saves a read or a write, and if their loops fit together.
#
# The next cell compiles three functions: `add_and_norm`, `turn`, and the norm together with the matrix product that
# follows it. It prints the names of the kernels that Inductor wrote, and each name lists the operations inside.
# **Predict** the number of kernels for each function. (Without a GPU it compiles for the CPU, which takes a quarter of
# a minute and needs a C++ compiler.)

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
# Each piece of glue became one kernel. In its name `_to_copy` is a cast, and `pow` is the square. The matrix product
# stays outside: Inductor calls a library for it (`mm`), and it cannot fuse anything into a library's kernel. So the
# normalised rows are written by one kernel and read by the next, compiled or not.
#
# Now read what Inductor wrote. Look for three things in the text below: the loads, the loop that adds the squares, and
# the stores.

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
# *again* (`tmp8`), to scale it. So this kernel loads and stores five tensors, and yours four.
#
# Then why was the compiled form only 4 to 5 % below a copy? A row of 4,096 numbers has 8 KB, and the second loop reads
# it right after the first loop has written it. If each of 132 multiprocessors works on eight rows, these have 8.7 MB,
# and the L2 cache has 50 MB. So we expect most of the second read to come from the L2 cache and not from memory. A row
# of 65,536 numbers is sixteen times as long, and there the rate is lower, as you will see below.
#
# **On a CPU** one kernel is not one pass either. The text has a loop that adds and stores the sum (`out_ptr0`), a loop
# that reads it and adds up the squares, and a loop that reads it again and scales it. By then the row is still in the
# CPU's cache, so this costs little. But it shows why you should count loads, and not kernels.

# %% [markdown]
# ## When the graph breaks
#
# Dynamo records the operations before it knows the numbers in the tensors. If your code branches on such a number,
# Dynamo cannot tell which branch to record. It compiles what it has so far, lets Python evaluate the condition, and
# begins a new graph after it. That is a *graph break*. It costs three things: nothing is fused across it, every tensor
# that is still needed is written to memory, and on a GPU the host often has to wait for the number.
#
# The second cost is *recompilation*. While it records, Dynamo assumes things: the shapes, and which way every `if` on a
# Python value went. It checks these assumptions at every call. If one does not hold, it compiles the function again.
# After eight compilations PyTorch gives up and runs the function eagerly. For example, Dynamo unrolls a loop over
# tokens into the graph, so another number of tokens needs another compilation.
#
# Here is the end of a step for a batch of sequences of several lengths. It adds the residual, cuts numbers beyond a
# limit, normalises, and returns the last token of each sequence as well. `torch._dynamo.explain` says where its graph
# breaks. **Predict** how many graphs there are, and which lines break them.

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
# The list shows two lines where Dynamo stopped, and why: an `if` on a tensor, and `tolist`, which reads all lengths.
# (The count of breaks is the number of graphs less one, so it says 1.) A third line is not in the list: the `if` inside
# the loop. After `tolist` Dynamo tries once more, but it cannot begin a new graph in the middle of a loop. It gives up
# on the rest, and the whole loop runs eagerly. On a GPU each of these three lines also makes the host wait until the
# GPU has finished all work before it, and the one in the loop does so once for each sequence.
#
# Now write the same function without a break. The usual way is to compute everything, also what will not be needed, and
# to *choose* at the end with `torch.where`. Here that means you compute the padding too. That costs some arithmetic and
# the reads of the padding, but it saves every pass between the graphs.
#
# The check compiles your function once and calls it with batches of other sizes. There must be one graph for all of
# them.

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
# A kernel that you wrote yourself can break a graph too. Dynamo can look into a Triton kernel, but not into everything
# else that its launcher does: read a pointer, look up the device's properties, check numbers. So register such a
# launcher as an operator with `torch.library.custom_op`. Dynamo then puts a single call into the graph. To learn the
# shapes of the results, it calls a second function that you supply, the *fake*. `torch.library.opcheck` tests whether
# the two agree. The next cell tests this library's add and norm, and shows its calls in a graph.

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
# Inductor cannot fuse anything into an operator of your own, just as it could not fuse into the library's matrix
# product. So the product by 0.5 in the middle becomes a kernel of its own. This is what your own kernel costs inside a
# compiled model, and one more reason to write few of them.

# %% [markdown]
# ## When does a hand-written kernel pay?
#
# The next picture has one row for each operation, measured on one H200 (2026-11-22, PyTorch 2.11, bf16). Each rate is
# the least bytes that must move, each input once and each result once, divided by the time. The dashed line is the rate
# of the device's copy on that day, 4.17 TB/s; the 4.25 of chapter 01 comes from another measurement. Nothing here was
# measured on your machine. `python -m course_lib bench fused` measures it on your GPU, beside this library's kernels.
#
# The next section explains GroupNorm and Mish, which are in two of the rows. Here it is enough that GroupNorm needs the
# mean and the variance of a whole group of channels, and that Mish is an activation.
#
# **Predict**, before you look: on which of the eight rows does the compiler come close to the copy, and what do the
# others have in common?

# %%
from course_lib.figures.fused.rates import ON_AN_H200, draw_fused_rates

draw_fused_rates(ON_AN_H200)

# %% [markdown]
# > **The answer to the first question.** Where an operation is one pass over rows that fit on the chip, the compiler is
# > about as good as the best kernel we measured: add and norm, SwiGLU and RoPE reach 93 to 101 % of a copy's rate.
# > Elsewhere it reaches 28 to 68 %: for long rows, for the groups of a norm, and for a loss with its gradient.
#
# A copy reads as many bytes as it writes. SwiGLU reads twice as many as it writes, which is probably why it can be 1 %
# above the copy.
#
# So there are four reasons to write a kernel. The first three are behind the slow rows:
#
# - **Long rows.** A row of 65,536 numbers in 16 bits has 128 KB, half of a multiprocessor's registers. A kernel that
#   goes over it twice, as in the text above, moves three tensors instead of two if the second read comes from memory.
#   That would give two thirds of 4.17, or 2.78 TB/s. The compiler's kernel reached 2.85, so this is probably what
#   happens. QuACK, a library of kernels in CuTe's Python, lets several multiprocessors share a row, reads it once, and
#   reached 4.10.
# - **Reductions over something else than the last dimension.** A group of GroupNorm is some channels at all places. Its
#   mean and variance must be known before Mish can run, and the group has to stay on the chip in between.
# - **In place.** Cross-entropy can write its gradient over the logits. A compiler does not do that on its own, because
#   the logits might be needed later. Only you can rule that out.
# - **Epilogues.** An *epilogue* is a step after a matrix product that runs in the product's own kernel, on the sums
#   that are still in registers. Inductor does this only if it writes the product itself (`mode="max-autotune"`), and
#   not for a library's kernel.
#
# Do kernels written for these reasons reach the copy? The next picture shows the course's own, in a recorded run on one
# H100 (2026-11-27, PyTorch 2.11, Triton 3.6, bf16). On this card a copy reached 3.00 TB/s. The kernels of the last
# three rows are in CUDA C++, the others in Triton.

# %%
from course_lib.figures.fused.rates import COPY_ON_AN_H100, ON_AN_H100

draw_fused_rates(ON_AN_H100, COPY_ON_AN_H100)

# %% [markdown]
# Some of them do. In no row is the compiler faster than the kernel, but how much the kernel gains depends on the row:
#
# - **At most 2 %** for add and norm and for SwiGLU, because there the compiler itself comes close to the copy.
# - **1.3 to 1.9 times as fast** for RoPE with the append to the cache, for the norms and the softmax of long rows, and
#   for the backward pass of RMSNorm. RMSNorm and softmax of long rows reach 99 % of the copy, LayerNorm 82 %.
# - **About twice as fast** in the last three rows, at 91, 72 and 78 % of the copy. The tensors of the last two have 34
#   and 67 MB. A copy of tensors so small is slower, too: it reached 2.37 and 2.65 TB/s. It takes only 28 and 51 µs, so
#   the time to start and to finish counts. Of that copy the kernels reach 92 and 89 %.
#
# Some fusions save memory but no time. Take the last linear layer, fused with the loss. The logits then never exist as
# a whole, which saves gigabytes. But the backward pass needs them, so you have to compute them a second time, or
# compute the gradients early and keep them. We timed this on the same H100 for 8,192 tokens of 4,096 numbers and
# 128,256 classes. PyTorch's layer and loss took 41.0 ms, and compiled 39.4. In chunks of 2,048 tokens it took 41.5 ms
# with early gradients, and 55.5 ms with logits that are computed again.
#
# Other fusions cost time. A Conv1d, GroupNorm and Mish took 603 µs as PyTorch's single operations. With cuDNN's
# convolution, and the rest in our Triton kernel, they took 269 µs. Compiled they took 245 µs, probably because Inductor
# also fuses the convolution's bias, which PyTorch adds in a kernel of its own. In one kernel they took 647 µs, because
# our convolution is so much slower than cuDNN's that the saved bytes don't matter.
#
# So measure before you count on a gain, and in this order: first what PyTorch has (`F.rms_norm`,
# `F.scaled_dot_product_attention`), then `torch.compile`, then how far its rate is below a copy's. From that you get
# the time that a better kernel could save in the whole model. Write the kernel if that is worth a day of your work now,
# and more work whenever the model changes.
#
# How much time do these kernels save in a whole layer? `python -m course_lib bench layer` times one layer of
# Llama-3-8B, four sequences of 4,096 tokens: each part by itself, eager, compiled, and with the course's kernels. The
# layer is the sum of its parts. The next pictures show a recorded run on one H100 (2026-11-27). Here eager means
# PyTorch's own operations; for the norm that is `F.rms_norm`, not the seven operations from the start of this chapter.
# **Predict** how many times as fast the whole layer becomes, matrix products and attention included.

# %%
predict("13 a whole layer, eager over the course's kernels", ..., "times")

# %%
from course_lib.figures.fused.layer import draw_layer_roofline, draw_layer_times
from course_lib.figures.recorded import recorded

layer = recorded("layer", "h100")
glue, whole = ({form: sum(part["times"] * part["us"][form] / 1e3 for part in layer["parts"].values()
                          if part["glue"] or everything) for form in ("eager", "compiled", "ours")}
               for everything in (False, True))  # milliseconds
for form, milliseconds in whole.items():
    print(f"{form:10} the glue {glue[form]:5.2f} ms, the layer {milliseconds:5.2f} ms")
measured("13 a whole layer, eager over the course's kernels", whole["eager"] / whole["ours"], "times")
draw_layer_times(layer)

# %%
draw_layer_roofline(layer)

# %% [markdown]
# The glue takes 3.27 ms in eager PyTorch, 1.12 ms compiled and 0.98 ms with the course's kernels, so it becomes 3.4
# times as fast. The layer gains less, a factor of 1.2, because the matrix products take 10.2 of its 14.5 ms and stay as
# they are, and attention takes another 1.0 ms. Most of the glue's gain is in one part, RoPE with the append to the
# cache. Eager PyTorch moves 4.4 GB there, more than the 1.7 GB of the listing above: this version computes in float32,
# puts the halves together, and copies keys and values into the cache. One kernel moves 0.4 GB. The compiler gets 94 %
# of the glue's gain without a line of Triton. The course's kernels add 0.14 ms, nearly all of it in RoPE, and our
# attention is 0.12 ms faster than PyTorch's.
#
# The second picture is the roofline of chapter 01. The slope is what memory allows, the flat part is what the matrix
# units allow, and they meet at the *ridge*, here at 250 FLOPs for a byte. Fusion (here the course's kernels) moves the
# glue up along the slope, because the same arithmetic needs fewer bytes: SwiGLU moves three fifths of the bytes, and it
# is 1.67 times as fast. But the glue stays far to the left of the ridge, below one FLOP for a byte, however you fuse
# its own operations. Only the matrix products and attention have enough arithmetic. Put the glue into a product's
# kernel, and its operations cost almost nothing there. That is an *epilogue*: it works on a product's tile before the
# tile is stored.

# %% [markdown]
# ## A hundred small steps · deeper
#
# In both pictures of rates the compiler's two slowest rows belong to a *diffusion* model. It makes its output from
# noise, in steps. Diffusion Policy takes a hundred of them to plan a robot's next 16 actions ([arXiv
# 2303.04137](https://arxiv.org/abs/2303.04137)). In every step a one-dimensional U-Net, a network of convolutions,
# reads the sequence and removes some of the noise. One of its blocks is a convolution, GroupNorm, Mish, and then a
# scale and a shift for each channel. The scale and the shift depend on the step.
#
# **GroupNorm** divides the channels into groups, 8 for example. A group's mean and variance are over its channels *and*
# all places. The numbers are normalised with them, and then each channel is multiplied by a weight and gets a bias.
# **Mish** is an activation, $a \tanh(\log(1 + e^a))$; at $a = 1$ it is 0.865.
#
# Count scale and shift as one operation. Then there are three, and each number moves seven times: the norm reads it
# twice and writes it, and each of the other two reads it and writes it. In one kernel it moves twice. A group of 32
# channels and 16 places has 512 numbers, so it fits into registers easily.
#
# Three things to get right:
#
# - **The variance.** You could add up $x$ and $x^2$ in one go and take $E[x^2] - E[x]^2$. If the mean is 10,000 and the
#   variance 1, both terms are near $10^8$. There neighbouring float32 numbers are 8 apart, so the difference is noise,
#   and it may be negative. PyTorch's own GroupNorm on a CPU once lost digits in this way
#   ([pytorch#54293](https://github.com/pytorch/pytorch/issues/54293)). Since the tile is in registers, the safe way
#   costs no bytes: find the mean, subtract it, and then square.
# - **Empty lanes.** They hold 0. After you subtract the mean they hold minus the mean, and its square would be added to
#   the variance.
# - **The constants.** The scale and the shift come from a small network whose only input is the step's number. So for
#   100 steps and 512 channels they are two tables of 205 kB each. Compute the tables once, before the first action, and
#   let the kernel look up its row. Otherwise that network runs 100 times for each plan.

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
        float32, the mean and the variance too, and round once, to x's dtype. One kernel is launched, which loads x once
        and of the tables only the rows that `steps` names. PyTorch's own operations compute and copy nothing.
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
# A block with 256 channels and 16 places has 8 KB in 16 bits for one robot. At a copy's rate the memory would need 4 ns
# to read and write that. But a launch takes some microseconds, a thousand times as long. So at a batch of 1 neither the
# bytes nor your kernel's speed matter. What counts is how *many* kernels there are, and how they are launched. With
# 4,096 samples, as in training, the bytes count again: in the first picture this is the row in which the compiler's
# kernel reached 1.17 TB/s. The next cell measures both on a GPU: the three operations, the same compiled, and your
# kernel. **Predict** for which batch yours gains most.

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
# ## The same kernel in CUDA C++ · deeper
#
# In Triton you write what a whole block of threads does, and the compiler decides which thread holds which numbers. In
# CUDA C++ you write what *one* thread does. So three decisions that Triton made for you are now yours:
#
# - **How wide a load is.** A thread loads 8 numbers of 16 bits with one instruction, as a struct of 16 bytes, called a
#   *vector* here. This works only if each row begins at a multiple of 16 bytes. So the launcher looks at sizes, strides
#   and addresses, and takes a narrower struct if they do not fit.
# - **Which thread holds what.** Thread t takes the vectors t, t + THREADS, t + 2 · THREADS and so on. Neighbouring
#   threads then load neighbouring vectors, so a load of a warp is four whole lines of 128 bytes.
# - **How a sum crosses the threads.** Each thread adds up the squares of its own numbers, but the norm needs the sum of
#   the whole row. This is done in two halves. First, the 32 threads of a warp add up theirs. With `__shfl_xor_sync` a
#   thread reads a register of another thread in its warp, and after five such steps, at distances 16, 8, 4, 2 and 1,
#   all 32 threads have the warp's sum. The next cell prints this half. Then each warp puts its sum into shared memory,
#   `__syncthreads` waits for all of them, and each warp adds up those few numbers in the same way. You write this
#   second half yourself, in exercise 13.8.

# %%
from course_lib.kernels.fused.cuda_rows import SHARED_BY_KERNELS, cut_of

begin, end = (SHARED_BY_KERNELS.index(f"__device__ inline float sum_of_{what}") for what in ("warp", "block"))
print(SHARED_BY_KERNELS[begin:end])

# %% [markdown]
# The whole kernel is in `course_lib/kernels/fused/cuda_add_rms_norm.py`. NVRTC, which is CUDA's compiler as a library,
# compiles it in about a second and without `nvcc`. That needs no GPU, only the library. A CUDA build of PyTorch brings
# it along; with a CPU build, run `pip install nvidia-cuda-nvrtc`. The next cell compiles the kernel for rows of 4,096
# numbers in float16, and counts what is in the machine code.

# %%
from course_lib.hardware.compiler.cuda_cpp import compile_cuda
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
from course_lib.kernels.fused.cuda_add_rms_norm import add_rms_norm_source

if missing_nvrtc() is None:
    source = add_rms_norm_source(torch.float16, torch.float16, cut_of(4096, 8))
    for arch in (75, 80, 90):
        compiled = compile_cuda(source, "add_rms_norm", arch=arch)
        print(f"sm_{arch}: {compiled.registers} registers, {compiled.stack_bytes} bytes of local memory, loads "
              f"{compiled.load_widths} (bytes: how many), stores {compiled.store_widths}, {compiled.shuffles} shuffles")
else:
    print(missing_nvrtc())
    print("With NVRTC 13.5: sm_90: 84 registers, 0 bytes of local memory, loads {16: 12} (bytes: how many), "
          "stores {16: 8}, 10 shuffles")

# %% [markdown]
# Every load and every store moves 16 bytes, and nothing is spilled. A thread keeps four vectors. It loads four of x,
# four of the residual and four of the weight, which makes 12 loads, and it stores four of each result, which makes 8
# stores. The ten shuffles are two sums of a warp with five steps each. Compare these figures with those of your Triton
# kernel in 13.2. If Triton's machine code is as good, CUDA C++ has gained you nothing. It pays when Triton cannot say
# what you mean: a certain layout, a certain barrier, or an instruction that it does not have.
#
# Now you write such a kernel. The check needs no GPU: g++ compiles your text for the processor, and your threads run
# there one at a time, each until it has to wait for others.
#
# The check also watches each access to memory. Say two threads reach the same number, one of them changes it, and there
# is no barrier between the two. Then the check names the lines of both, even if the result is right, because on a GPU
# such a fault may stay hidden for months. It accepts barriers, shuffles and atomics, but not memory fences and flags.
#
# A row can be longer than the block. So let your loop over the row begin at `threadIdx.x` and advance by `THREADS`.

# %%
# Exercise 13.8 · The same kernel in CUDA C++
def cuda_norm_source() -> str:
    """The CUDA C++ of a kernel that adds a residual and normalises each row by its root mean square.

    Returns: a text that declares
        extern "C" __global__ void add_rms_norm(
            const Element* x, const Element* residual, const Element* weight, Element* normalised, Element* summed,
            int columns, int x_stride, int residual_stride, float epsilon)
        without an #include. For each row one block of THREADS threads is launched, without dynamic shared memory.
        blockIdx.x is the row.
    It writes, as in 13.2, for each row r and column c
        summed[r, c] = x[r, c] + residual[r, c], and
        normalised[r, c] = summed[r, c] · weight[c] / sqrt(mean over the columns of summed[r, :]² + epsilon).
    x, residual: at least one row of `columns` numbers that lie side by side. Row r begins r · x_stride numbers, or
        r · residual_stride numbers, behind the first; no row begins beyond 2^31 - 1. weight: `columns` numbers.
        normalised, summed: rows without gaps.
    Any number of columns from WIDTH on that is a multiple of WIDTH: the row may be shorter or longer than what the
        block's threads load at once. Both strides are multiples of WIDTH, and all tensors begin at multiples of 16
        bytes. epsilon: above 0.
    These names are defined before your text:
        Element: `float`, or `half_bits`, a float16 as its 16 bits.
        WIDTH: how many Elements have 16 bytes in all, 4 or 8. Vector: struct alignas(16) Vector { Element of[WIDTH]; };
        THREADS: a power of two from 32 to 512.
        float widened(Element) and void narrow(float, Element&): from an Element to float32 and back.
    Each load from a tensor and each store to one moves 16 bytes, a Vector. Squares are added in float32. Every thread
        of the block reaches each __syncthreads, and every lane that a shuffle's mask names reaches this shuffle, so no
        thread returns before them. The mask names all lanes that take part, 0xffffffff for a whole warp. __activemask
        tells only which lanes are together, and behind a loop that some lanes leave earlier that may be a few.
    If one thread writes a number that another thread of its block reads or writes, a barrier lies between the two, or
        both are atomic. If several threads do `total += part`, additions get lost. Blocks share nothing that any of
        them writes.
    """
    # BEGIN SOLUTION
    return r"""
extern "C" __global__ void __launch_bounds__(THREADS) add_rms_norm(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ weight,
    Element* __restrict__ normalised, Element* __restrict__ summed,
    int columns, int x_stride, int residual_stride, float epsilon)
{
    const long long row = blockIdx.x;
    const int vectors = columns / WIDTH;
    const Vector* x_row = (const Vector*)(x + row * x_stride);
    const Vector* residual_row = (const Vector*)(residual + row * residual_stride);
    const Vector* weights = (const Vector*)weight;
    Vector* normalised_row = (Vector*)(normalised + row * columns);
    Vector* summed_row = (Vector*)(summed + row * columns);

    float squares = 0.0f;
    for (int at = threadIdx.x; at < vectors; at += THREADS) {
        const Vector left = x_row[at], right = residual_row[at];
        Vector sum;
        #pragma unroll
        for (int e = 0; e < WIDTH; ++e) {
            narrow(widened(left.of[e]) + widened(right.of[e]), sum.of[e]);
            const float rounded = widened(sum.of[e]);  // the norm is that of the sum as it is stored
            squares += rounded * rounded;
        }
        summed_row[at] = sum;
    }

    __shared__ float of_warp[THREADS / 32];
    const int lane = threadIdx.x % 32;
    for (int distance = 16; distance > 0; distance /= 2)
        squares += __shfl_xor_sync(0xffffffffu, squares, distance);
    if (lane == 0) of_warp[threadIdx.x / 32] = squares;
    __syncthreads();
    float total = lane < THREADS / 32 ? of_warp[lane] : 0.0f;
    for (int distance = 16; distance > 0; distance /= 2)
        total += __shfl_xor_sync(0xffffffffu, total, distance);
    const float inverse = rsqrtf(total / columns + epsilon);

    for (int at = threadIdx.x; at < vectors; at += THREADS) {
        const Vector sum = summed_row[at], factor = weights[at];  // the sum that this thread has written
        Vector out;
        #pragma unroll
        for (int e = 0; e < WIDTH; ++e)
            narrow(widened(sum.of[e]) * inverse * widened(factor.of[e]), out.of[e]);
        normalised_row[at] = out;
    }
}
"""
    # END SOLUTION


# %%
best_cuda_norm_source = check("13.8", cuda_norm_source).best

# %% [markdown]
# The next cell compiles your kernel for an H100, if NVRTC is there. Until your answer has passed, it takes the course's
# kernel, and says so. It counts the loads in the machine code, so a load in a loop that the compiler has unrolled four
# times counts as four. On a GPU the cell also runs the kernel, compares it with your Triton kernel from 13.2, and times
# both for 16,384 rows of 4,096 numbers. The Triton kernel keeps the whole row in registers, while your loop, if it is
# like the course's, reads `summed` again. **Predict** which one is faster.

# %%
from course_lib.hardware.compiler.cuda_cpp import CudaLaunch, run_cuda
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS
from course_lib.models.plugged import who_runs

print(who_runs({"add and norm in CUDA C++ (13.8)": best_cuda_norm_source}))
before = (f"{CONVERSIONS}\n#define THREADS 256\n#define WIDTH 8\nusing Element = half_bits;\n"
          "struct alignas(16) Vector { Element of[WIDTH]; };\n")
text = before + best_cuda_norm_source()
if missing_nvrtc() is None:
    compiled = compile_cuda(text, "add_rms_norm", arch=90)
    print(f"sm_90: {compiled.registers} registers, {compiled.stack_bytes} bytes of local memory, loads "
          f"{compiled.load_widths}, stores {compiled.store_widths}, {compiled.shuffles} shuffles")
else:
    print(missing_nvrtc())
if on_gpu and missing_nvrtc() is None:
    x, residual, normalised, summed = torch.randn(4, 16_384, 4096, device=device, dtype=torch.float16)
    weight = torch.ones(4096, device=device, dtype=torch.float16)
    arguments = (x, residual, weight, normalised, summed, 4096, 4096, 4096, 1e-5)
    forms = {
        "your CUDA C++": partial(run_cuda, CudaLaunch(text, "add_rms_norm", 16_384, 256, arguments), device),
        "your Triton": partial(best_add_rms_norm, x, residual, weight, 1e-5),
    }
    forms["your CUDA C++"]()
    torch.testing.assert_close(normalised, best_add_rms_norm(x, residual, weight, 1e-5)[0])
    for name, rate in rates_of(forms, 4 * x.nbytes).items():
        print(f"{name:16} {format_bandwidth(rate)}")
    del x, residual, normalised, summed, arguments, forms

# %% [markdown]
# ## A row for eight thread blocks · deeper
#
# In 13.4 the loss reads each logit twice, because a row of 128,256 logits has 257 kB in 16 bits. The registers of an
# H100's multiprocessor have 262 kB, and a kernel needs some for other things. Its shared memory has 233 kB. But there
# are 132 multiprocessors. From Hopper on, up to eight thread blocks can form a *cluster* (on an H100 even 16, on
# request). The hardware runs them at the same time, on multiprocessors that are close to each other, and each block can
# write into the shared memory of the others. NVIDIA calls this *distributed shared memory*.
#
# `kernels/fused/cuda_cross_entropy.py` gives each row to a cluster of eight blocks:
#
# 1. Each thread loads eight vectors of 16 bytes, 64 logits, and keeps them as they came. They take 32 of its 64
#    registers. The 256 threads of a block hold about an eighth of the row.
# 2. Each block computes the maximum of its logits, and the sum of their exponentials relative to that maximum.
# 3. Once all eight blocks have begun, each writes these two numbers, 8 bytes, into the shared memory of all eight. Then
#    they wait at a barrier of the cluster.
# 4. Now each block has eight maxima and eight sums. It merges them as you did in 3.3, computes the gradient of its part
#    from its registers, and writes it over the logits.
#
# So each logit is read once and written once: 513 kB for a row. The blocks exchange 8 · 8 · 8 = 512 bytes for it.
#
# The next cell shows how the row is cut, and compiles the kernel if NVRTC is there. On a GPU with clusters it also
# times the kernel beside the Triton kernel that reads each row twice. **Predict** how many times as fast it is. The
# bytes say 1.5.

# %%
from course_lib.kernels.fused.cross_entropy import cross_entropy_forward_backward_
from course_lib.kernels.fused.cuda_cross_entropy import (
    cross_entropy_source,
    cuda_cross_entropy_forward_backward_,
    cut_of_cluster,
)

cut, blocks = cut_of_cluster(128_256, width=8)
print(f"{blocks} blocks of {cut.threads} threads, each with {cut.vectors} vectors of {cut.width} logits: room for "
      f"{blocks * cut.threads * cut.vectors * cut.width:,}")
if missing_nvrtc() is None:
    source = cross_entropy_source(torch.bfloat16, torch.int64, cut, blocks)
    compiled = compile_cuda(source, "cross_entropy_", arch=90)
    print(f"sm_90: {compiled.registers} registers, {compiled.stack_bytes} bytes of local memory, loads "
          f"{compiled.load_widths}, stores {compiled.store_widths}")
else:
    print(missing_nvrtc())
if machine().tier == "hopper" and missing_nvrtc() is None:
    logits = torch.randn(4096, 128_256, device=device, dtype=torch.bfloat16)
    targets = torch.randint(128_256, (4096,), device=device)
    shares = torch.full((4096,), 1 / 4096, device=device)
    functions = {"one block a row, read twice": cross_entropy_forward_backward_,
                 "eight blocks a row": cuda_cross_entropy_forward_backward_}
    forms = {name: partial(function, logits.clone(), targets, shares, validate=False)
             for name, function in functions.items()}
    for name, rate in rates_of(forms, 2 * logits.nbytes).items():
        print(f"{name:28} {format_bandwidth(rate)}")
    del logits, targets, shares, forms

# %% [markdown]
# In the recorded run on an H100 the kernel with one block took 970 µs, 72 % of the copy's rate, and the cluster 769 µs,
# 91 %. That is 1.26 times as fast, and not 1.5, because part of the second read had come from the L2 cache: three
# tensors in 970 µs would be 3.25 TB/s, more than a copy. The compiled loss took 1,469 µs.
#
# The eight blocks lose time while they wait for each other. Meanwhile other blocks on the same multiprocessors must
# keep the memory busy, so many bytes have to be on their way (chapter 01). With 64 registers each, 1,024 threads share
# a multiprocessor, and each loads 128 bytes at once. When we let them load 64 bytes each, the same kernel took 978 µs,
# and the gain was gone.
#
# In Triton a block can't address another block's memory. There is an option, `num_ctas`, that has the compiler spread a
# tile over a cluster; we did not try it here.

# %% [markdown]
# ## A layout by hand · deeper
#
# Triton decides which thread holds which element of a tile. In CUDA C++ with CUTLASS, and in CuTe's Python, *you*
# decide, and you write your choice down as a *layout*. A layout turns an index into an offset. It consists of two
# tuples, the shape and the stride, with one number for each dimension.
#
# First the index is split into coordinates, one for each dimension. CuTe counts the *first* dimension fastest: in the
# shape (4, 8) the index 6 has the coordinates (2, 1), because 6 = 2 + 1 · 4. Then each coordinate is multiplied by its
# stride, and the products are added up. With the strides (8, 1), index 6 has the offset 2 · 8 + 1 · 1 = 17. With (1, 4)
# it has 2 · 1 + 1 · 4 = 6.
#
# You can apply one layout after another. Say the inner layout picks some places of a tile, and the outer layout says
# where each place of the tile lies in memory. The outer one *after* the inner one then says where the picked places lie
# in memory. CuTe uses this to say which elements a thread owns. One layout gives each thread the place of its first
# value. A second one gives the steps from there to each of the thread's values. The tile's own layout then turns these
# places into offsets in memory.
#
# And you can *divide* a layout into tiles. Take a layout with 12 indices, and tiles of 2 indices that are 3 apart. The
# first tile has the indices 0 and 3. The second begins at the smallest index that is left, 1, and has 1 and 4. The
# third has 2 and 5. Now 6 is the smallest one left, and the pattern begins again from there: 6 and 9, 7 and 10, 8 and
# 11. CuTe calls this `logical_divide`. The layout of the tiles' beginnings, here 0, 1, 2, 6, 7 and 8, is the
# *complement* of the tile. A kernel's blocks, its warps and its vector loads are all made by dividing.

# %%
# Exercise 13.7 · A layout by hand
def offset(layout, index: int) -> int:
    """The offset of an index of a layout.

    layout: (shape, stride), two tuples of the same length, at least 1: each size at least 1, each stride at least 0.
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
    """A list with one offset for each index of the layout `inner`, in order.

    `inner` turns the index into an offset. This is always an index of `outer`, which turns it into the offset that is
    returned.
    """
    # BEGIN SOLUTION
    return [offset(outer, offset(inner, index)) for index in range(math.prod(inner[0]))]
    # END SOLUTION


def owned(tile, threads, values, thread: int) -> list:
    """The offsets in memory of all values that a thread owns, in the order of `values`.

    tile: the layout of a tile in memory. Its indices are called places here.
    threads: a layout that turns a thread's number into the place of the thread's first value.
    values: a layout that turns a value's number into the step from that place to the value's own.
    """
    # BEGIN SOLUTION
    first = offset(threads, thread)
    return [offset(tile, first + offset(values, value)) for value in range(math.prod(values[0]))]
    # END SOLUTION


def divided(layout, size: int, step: int) -> list:
    """A layout's tiles as a list of lists. A tile is the list of the offsets of `size` indices that are `step` apart.

    Each tile begins at the smallest index that is in no tile before it. size and step are at least 1, and size · step
    divides the number of the layout's indices, so that every index is in one tile.
    """
    # BEGIN SOLUTION
    starts = [block + place for block in range(0, math.prod(layout[0]), size * step) for place in range(step)]
    return [[offset(layout, start + step * number) for number in range(size)] for start in starts]
    # END SOLUTION


# %%
best_offset, best_composed, best_owned, best_divided = check("13.7", offset, composed, owned, divided).best

# %% [markdown]
# What is a good layout for a load? A thread can load 16 bytes with one instruction, eight numbers of 16 bits, if they
# lie side by side. And the 32 threads of a warp should together cover whole lines of 128 bytes. The next cell shows the
# offsets that the first four threads own in a row of 256 numbers, in two layouts. **Predict** which one loads 16 bytes
# at once.

# %%
row = ((256,), (1,))
ways = {"8 neighbours each": (((32,), (8,)), ((8,), (1,))), "every 32nd": (((32,), (1,)), ((8,), (32,)))}
for name, (threads, values) in ways.items():
    print(name, *(f"\n    thread {thread}: {best_owned(row, threads, values, thread)}" for thread in range(4)))
print("the row divided by 8 indices that are 32 apart begins with", best_divided(row, 8, 32)[0])

# %% [markdown]
# In the first layout a thread's eight offsets are neighbours, so one instruction loads them all. In the second a thread
# needs eight loads of 2 bytes each, and each of them covers 64 bytes for the whole warp. Both layouts read every number
# once, so `kernel_bytes` sees no difference. But the second needs eight times as many load instructions.
#
# The last line comes from `divided`. It shows that you get the second layout by dividing, too: each tile is what one
# thread owns.

# %% [markdown]
# ## The same kernel in CuTe and in Gluon · deeper
#
# CuTe is a part of CUTLASS, NVIDIA's library of C++ templates for kernels. Since CUTLASS 4 it has a Python form, the
# *CuTe DSL*. FlashAttention-4 and QuACK are written in it. The next cell prints SwiGLU twice: in Gluon, which chapter
# 09 used, and in CuTe. Both give each of 128 threads eight neighbouring numbers of a tile. Find the line in each that
# says so. (In CuTe's, THREADS is 128 and VALUES is 8. `None` as an index means all, and `@cute.jit` marks what runs on
# the host.)

# %%
import inspect
from pathlib import Path

from course_lib.kernels.fused import gluon_swiglu

in_gluon = inspect.getsource(gluon_swiglu.swiglu_gluon_kernel.fn)
in_cute = Path(gluon_swiglu.__file__).with_name("cute_swiglu.py").read_text()
print(in_gluon)
print(in_cute[in_cute.index("@cute.kernel"):in_cute.index("def arguments")].rstrip())

# %% [markdown]
# | | Gluon | CuTe |
# |---|---|---|
# | who owns what | `BlockedLayout([8], [32], [4], [0])` | (128, 8) with the strides (8, 1) |
# | a tile of the tensor | an address, `program_id(0) * TILE + ...` | `zipped_divide` makes a tensor of tiles |
# | the thread's part | none: operations are on the whole tile | `composition` with the owner, then row `thread` |
# | the end of the tensor | a mask, left out here | predicates, left out here |
#
# In the first row, Gluon's `[8], [32], [4]` are 8 numbers a thread, 32 threads a warp and 4 warps; `[0]` is the order
# of the dimensions, of which there is one. CuTe has a layout that turns (thread, value) into a place of the tile. A
# predicate is CuTe's word for a mask.
#
# So CuTe's kernel does what you computed by hand: divide, then compose. In 13.7 threads and values had a layout each;
# here one layout has both. `zipped_divide` is `logical_divide` with the place in the tile and the tile's number as its
# two coordinates. The next cell uses your `offset` from 13.7 to list what three of the threads own; the first dimension
# counts fastest, so value v of thread t has the index t + 128 · v. Then both kernels are compiled for an H100, CuTe's
# if it is installed here. **Predict** whether their loads have the same width.

# %%
from course_lib.hardware.compiler.cute import compile_cute, missing_cute
from course_lib.hardware.compiler.views import compile_view

owner = ((128, 8), (8, 1))
for thread in (0, 1, 127):
    print(f"thread {thread:3}: {[best_offset(owner, thread + 128 * value) for value in range(8)]}")

pointers = dict.fromkeys(("gate_pointer", "up_pointer", "out_pointer"), "*fp16")
view = compile_view(gluon_swiglu.swiglu_gluon_kernel, pointers, {"TILE": gluon_swiglu.TILE}, arch=90)
print(f"\nGluon: {view.registers} registers a thread, loads by bytes {view.load_widths}, stores {view.store_widths}")
if missing_cute():
    print(f"CuTe:  {missing_cute()}\n       With version 4.8.1 its loads were {{16: 2}} and its stores {{16: 1}}.")
else:
    from course_lib.kernels.fused import cute_swiglu

    tensors = [torch.zeros(2**16, dtype=torch.float16) for _ in range(3)]
    kernel = compile_cute(cute_swiglu.swiglu, *cute_swiglu.arguments(*tensors), arch=90)
    print(f"CuTe:  loads by bytes {kernel.load_widths}, stores {kernel.store_widths}")

# %% [markdown]
# Both have two loads and one store of 16 bytes, so they move the bytes that they must, as wide as the hardware can. We
# did not time them.
#
# The languages differ in what they take off your hands. In Gluon you name the layout of a tile, and say where it is
# converted or put into shared memory; an operation on the tile is then one line, and the compiler works out what each
# thread does. In CuTe you compose what each thread does yourself, down to which instruction copies or multiplies a part
# of a tile. That is more to write, and it leaves nothing to the compiler. QuACK's norms for long rows, in which several
# multiprocessors share a row, are written this way.

# %% [markdown]
# ## Finale: the model on fused kernels · deeper
#
# The small model of chapter 05 has four layers, so its glue is nine norms, eight additions and four gates. In the
# library's decoder the glue is a part that can be exchanged (`course_lib/models/glue.py`). A block does not add the
# result of its feed-forward part to the residual. It passes both on, and the first kernel of the next block adds and
# normalises. So eight of the nine norms come with an addition. Only the first one, behind the embedding, is alone.
#
# First the model writes with *your* kernel of 13.2 in all these eight places.

# %%
from course_lib.models.glue import FUSED, TORCH
from course_lib.models.plugged import add_and_norm_of_rows, who_runs
from course_lib.models.trained import trained_model
from course_lib.serving.generation import complete

decoder = trained_model("tiny", device=device).requires_grad_(False)
print(who_runs({"add and norm (13.2)": best_add_rms_norm}))
texts = {}
for name, glue in (("PyTorch's operations", TORCH), ("13.2 in the model", add_and_norm_of_rows(best_add_rms_norm))):
    decoder.glue = glue
    texts[name] = complete(decoder, "Alice looked at the ", 40)
    print(f"{name:22} {texts[name]!r}")
decoder.glue = TORCH
print("the same text:", len(set(texts.values())) == 1)

# %% [markdown]
# For training every kernel needs a gradient, and the course's fused operators have one: add and norm, the gate, and the
# loss in chunks, in which no tensor of [tokens, vocabulary] is ever whole. The next cell trains a model twice, from the
# same first weights on the same pieces of text, once with PyTorch's operations and once with these. **Predict** how far
# apart the losses are after the last step.

# %%
predict("13 losses of both", ..., "nats apart after the last step")

# %%
import dataclasses

from course_lib.figures.backward.losses import draw_losses
from course_lib.models.tiny import TINY
from course_lib.models.training import INTERPRETED, loss_curves

sizes = {"config": TINY, "steps": 200} if on_gpu else {
    "config": dataclasses.replace(INTERPRETED, context=16), "steps": 12}  # the interpreter runs program by program
curves = loss_curves(glues={"PyTorch's operations": TORCH, "fused operators": FUSED}, **sizes)
first, second = curves.values()
print(f"loss after step 1: {first[0]:.6f} and {second[0]:.6f} nats; after step {len(first)}: {first[-1]:.6f} and "
      f"{second[-1]:.6f}")
draw_losses(curves, title="The same model, trained with either glue")

# %%
measured("13 losses of both", abs(first[-1] - second[-1]), "nats apart after the last step")

# %% [markdown]
# The two curves lie on top of each other. They differ only by rounding. The model's numbers are float32 with either
# glue, but the same sums and products are rounded in another order: in the norms, in the gate, and in the loss, which
# adds up its exponentials chunk by chunk. Neither is more right than the other.
#
# At this size fusion does not pay. A row has 96 numbers, so a kernel takes as long as its launch. All that fusion saves
# is launches, and chapter 14 has a better remedy for those. At a hidden size of 4,096 and thousands of tokens the bytes
# decide, as in the ledger above.
#
# ## What production systems do
#
# - **vLLM** compiles its models with `torch.compile`, and adds passes of its own to Inductor. They look for patterns in
#   the graph, such as a norm and the cast to FP8 behind it, and replace them by a kernel written by hand
#   ([its table of fusions](https://docs.vllm.ai/en/stable/design/fusions/)).
# - **Liger** is a library of Triton kernels for training: norms, RoPE, SwiGLU, and cross-entropy fused with the last
#   linear layer ([arXiv 2410.10989](https://arxiv.org/abs/2410.10989)). In the last one, per-token weights of the loss
#   once gave wrong gradients: a kernel multiplied all rows by the first row's weight
#   ([Liger#1298](https://github.com/linkedin/Liger-Kernel/pull/1298)).
# - **QuACK** ([code](https://github.com/Dao-AILab/quack)) has norms, softmax and cross-entropy in CuTe, and
#   uses *clusters* for long rows: groups of thread blocks that can reach each other's shared memory.
#
# **In this library.** `course_lib/kernels/fused/` has add and norm, RoPE with the append to a cache, SwiGLU,
# cross-entropy with its gradient in place, and GroupNorm with Mish. All but the last are operators of PyTorch
# (`torch.library`), so `torch.compile` calls them without a graph break.
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
