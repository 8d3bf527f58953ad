# %% [markdown]
# # 13 · Fusion and compilers: the bytes between the matrix products
#
# **The question.** A layer of Llama-3-8B reads 16,384 tokens. Its matrix products are 7.1 TFLOP. An H200 needs 9.0 ms
# for them at 790 TFLOP/s, the rate we measured for one large product in 16 bits. Between the matrix products there is
# also *glue*: two additions, two norms, the rotation of queries and keys, and the activation. The glue does almost no
# arithmetic. How long does it take?
#
# Written in PyTorch as Llama's own code has it, the glue reads and writes 9.7 GB. An H200 copied at 4.17 TB/s
# (measured, November 2026), and at that rate the glue takes 2.3 ms, a fifth of the layer's time without attention.
# Written as four kernels, it moves 2.8 GB and takes 0.7 ms.
#
# Who writes these four kernels? `torch.compile` can, and so can you. Write down two guesses. For which operations is
# the compiler as fast as the best kernel written by hand? For which does it reach only a third of what the memory can
# do?
#
# **Time.** About seven and a half hours for all eight exercises, estimated. The **core path** takes two to two and a
# half: exercises 13.1, 13.2 and 13.5, and every section whose heading does not end in *deeper*. You can skip the
# others: run their cells and go on. You need chapters 01 and 04, and chapter 03 for exercise 13.4.

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
# - `turn` applies the rotary positions (RoPE) to Q and to K. It takes one number from each half of a head as a pair,
#   and rotates the pair by an angle that depends on the token's position.
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
# memory and writes its result back. So even a tensor that only the next operation needs is written once and read at
# least once.
#
# The next picture counts this for `add_and_norm` in 16 bits. Each arrow is one read or one write, and the number beside
# it says how many bytes that is for one number of the hidden state. Three of the tensors in between are float32, 4
# bytes for each number, because a sum of 4,096 squares in 16 bits would be too inexact.

# %%
from course_lib.figures.fused.crossings import ADD_AND_NORM, draw_crossings

draw_crossings([("Seven operations, for one number of the hidden state", ADD_AND_NORM),
                ("One kernel", [("add and norm", 4, 4)])])

# %% [markdown]
# Seven kernels move 42 bytes for each number. One kernel needs only 8, because it reads x and the residual and writes
# the sum and the normalised number, 2 bytes each. Putting several operations into one kernel is called *fusion*: the
# values between them stay in registers.
#
# Two rules give the bytes of a fused kernel:
#
# - It reads each tensor from outside once, however many of its operations need it.
# - It writes a result only if an operation outside needs it.
#
# For `swiglu` eager PyTorch runs two kernels, which move five tensors: `silu` reads one and writes one, and the product
# reads two and writes one. One fused kernel moves three: it reads two and writes one.
#
# In 13.1 you count the bytes of the whole layer in this way, as a *ledger*. Count 4 bytes for each number that the
# listing marks as float32. A tensor that is broadcast, such as `cosine`, counts at its own size. Leave out the mean,
# one number for a row. Views move nothing.

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
# gains least, because even its fused kernel must read two tensors and write one.

#
# ## Add and norm in one kernel
#
# The first of the four kernels contains what makes fusion hard, a *reduction*: one number that is computed from a whole
# row. You need the row's root mean square before you can write the first normalised number. If the row fits into
# registers until then, you read it once, and otherwise twice.
#
# How long may a row be? A multiprocessor of an H100 has 65,536 registers of 4 bytes, 256 KB in all. A row of 16,384
# float32 numbers fills a quarter of them. So for today's models one program can hold a whole row, as one tile. Its
# length is a power of two. A row of 5,001 columns therefore needs a tile of 8,192, and a mask switches off the 3,191
# lanes that have no column.
#
# A long tile also needs more threads. By default a program has four warps, 128 threads, so of a tile of 16,384 each
# thread holds 128 numbers of every tensor. That is too much for its 255 registers: compiled for an H100 by Triton 3.9,
# the course's kernel then spills up to 448 bytes a thread. With `num_warps=16` it spills nothing. So let `num_warps`,
# an argument of the launch, grow with the tile.
#
# Two details decide whether the result is right. First, add up the squares in float32, because the square of 300 is
# 90,000 and float16 ends at 65,504. Second, divide the sum by the number of columns, not by the number of lanes.
#
# Adding up squares in 16 bits hurts even where nothing overflows. A report on the serving engine SGLang blames it for
# an error that grew a little in each of 60 layers. By layer 58 the cosine between the hidden state and the right one
# was 0.51 ([sglang#27540](https://github.com/sgl-project/sglang/pull/27540)).

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
        BLOCK=triton.next_power_of_2(hidden), num_warps=4 if hidden <= 4096 else 16,
    )
    return normalised, summed
    # END SOLUTION


# %%
best_add_rms_norm = check("13.2", add_rms_norm).best

# %% [markdown]
# The next cell counts all bytes that your kernel moves for 16 rows of 1,000 numbers in float32, and compares them with
# what `kernel_bytes` of 13.1 says. **Predict** by how much the two differ, and why.

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
# If each program of your kernel owns one row, it loads the weight once for each row, but the ledger counts the weight
# once. So the kernel moves 15 times 4,000 bytes more. On a GPU most of these do not reach the memory, because after the
# first rows the weight comes from the L2 cache.
#
# The next cell measures rates on a GPU, with a gigabyte of tensors. (Without a GPU it prints those of an H200.) It runs
# four forms: the listing in eager PyTorch, the listing after `torch.compile`, an addition followed by PyTorch's own
# `F.rms_norm`, and your kernel. Each rate is the *least* bytes, those of four tensors, divided by the time. **Predict**
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
# hand-written one is Liger's.) For this operation you need no kernel of your own.
#
# `F.rms_norm` reached 2.76 TB/s. Together with the addition it moves five tensors instead of four, which alone would
# allow 3.3. We did not examine where the rest of the time goes.

# %% [markdown]
# ## Turn Q and K where they lie · deeper
#
# One matrix product computes Q, K and V together, so they lie side by side in one *packed* tensor. A token's row holds
# its query heads, then its key heads, then its value heads. RoPE must turn Llama-3-8B's first 40 heads, and leave the 8
# of the values alone.
#
# Each turned pair depends only on the old pair and its angle, so you can work *in place*: load a pair, and store the
# turned pair where it came from. The kernel never touches the values.
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
#   numbers for the other. ONNX Runtime's WebGPU kernel once always took the halves
#   ([onnxruntime#26758](https://github.com/microsoft/onnxruntime/pull/26758)).
# - **Where a token stands.** In a decode step a token may be in row 0 of the tensor and at position 8,191 of its
#   sequence. So the positions come as a tensor.
# - **Which program loads the angles.** All heads of a token share its angles: 64 cosines and 64 sines in float32, 512
#   bytes. If each head had a program of its own, the angles would be loaded 40 times, and by the meter's count the
#   kernel would move twice as many bytes.

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
# With Llama-3-8B's sizes and 16,384 tokens your kernel moves 344 MB, and the listing 1.7 GB. On the H200 of 2026-11-22
# eager PyTorch reached 0.35 TB/s of the least bytes, the compiler's kernel 3.86, and Liger's 1.07. So here the
# compiler's kernel was faster than one written by hand. `kernels/fused/rope_append.py` also writes the turned keys and
# the values straight into the cache.
#
# ## The loss, in chunks and in place · deeper
#
# The largest tensor of a training step comes at its end: the logits, one number for each token and each word of the
# vocabulary. Llama 3 has 128,256 words, so for 4,096 tokens the logits are 525 million numbers, 1.05 GB in 16 bits.
# Most people write
#
# ```python
# loss = F.cross_entropy(logits.float(), targets)
# ```
#
# This makes a float32 copy of the logits (2.1 GB) and a tensor of log-probabilities (2.1 GB). The backward pass makes a
# gradient for each of these two (2.1 GB each), and a last one in 16 bits (1.05 GB).
#
# The loss needs two numbers for each row, its maximum and its sum of exponentials, and chapter 03 finds both in one
# pass over chunks. The gradient of a row's loss with respect to a logit is the logit's softmax, less 1 at the target.
# You can write it where the logit was, because nothing reads the logit after that.
#
# Some rows do not count: padding, or a prompt that is not to be learned. Their target is `ignore_index`. They have no
# loss and no gradient, and the mean is over the other rows. This is easy to get wrong without an error: a fused loss of
# TransformerEngine divided by *all* rows, which makes the loss and all gradients too small
# ([ROCm/TransformerEngine#336](https://github.com/ROCm/TransformerEngine/pull/336)).

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
# For 64 rows of 32,000 logits the plain loss makes a float32 copy of 8.2 MB. With chunks of 1,024 yours needs 262 kB,
# if its largest tensor is one chunk in float32.
#
# How many bytes move? One kernel for forward and backward reads each logit twice and writes its gradient once: three
# tensors. The *least* are two: each logit is read once and its gradient written once. By that count, on an H100
# (2026-11-27) and for 4,096 rows in bfloat16, PyTorch's loss and gradient reached 0.67 TB/s *without* the `.float()`
# above, and the compiled ones 1.43. With `.float()` eager PyTorch moves the bytes of 18 tensors of 16 bits, so at the
# copy's 3.00 TB/s it could reach 0.33 at most.

# %% [markdown]
# ## What the compiler makes of the listing
#
# `torch.compile` works in two steps. First *Dynamo* runs through your Python code with placeholders instead of tensors,
# and records the operations in a *graph*. Then *Inductor* takes the graph, decides which operations share a kernel, and
# writes the kernels: in Triton for a GPU, in C++ for a CPU. Two operations share a kernel if that saves a read or a
# write, as in 13.1, and if both can run in one loop.
#
# The next cell compiles three functions: `add_and_norm`, `turn`, and the norm together with the matrix product that
# follows it. It prints the names of the kernels that Inductor wrote, and each name lists the operations inside.
# **Predict** the number of kernels for each function. (Without a GPU it compiles for the CPU. That needs a C++
# compiler, which takes some seconds for each function: five to twenty in all.)

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
# stays outside, because Inductor calls a library for it (`mm`), and it cannot fuse anything into a library's kernel.
#
# Now read what Inductor wrote. Look for the loads, the loop that adds the squares, and the stores.

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
# to scale it. The next listing is what Inductor of PyTorch 2.13 wrote for rows of 4,096, shortened. (Recorded on
# 2026-11-25. It was written for an H100, but no GPU ran it.)
#
# ```python
# for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
#     tmp0 = tl.load(in_ptr0 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     tmp1 = tl.load(in_ptr1 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     tmp2 = tmp0 + tmp1
#     …
#     tl.store(out_ptr0 + (r0_1 + 4096*x0), tmp2, r0_mask)
# tmp6 = tl.sum(_tmp6, 1)[:, None]
# for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
#     tmp8 = tl.load(out_ptr0 + (r0_1 + 4096*x0), r0_mask, eviction_policy='evict_first', other=0.0).to(tl.float32)
#     …
#     tl.store(out_ptr2 + (r0_1 + 4096*x0), tmp18, r0_mask)
# ```
#
# The first loop loads x and the residual, adds up the squares, and stores the sum. The second loop loads the sum
# *again* (`tmp8`), to scale it. So this kernel loads and stores five tensors, and yours four. When you compare kernels,
# count their loads and stores: both of these are one kernel.
#
# Five tensors instead of four would take a quarter more time. We expect less, because the second loop reads a row right
# after the first has written it, and the L2 cache still holds it. The rates above cannot tell, because they are those
# of PyTorch 2.11, whose text we did not record.


# %% [markdown]
# ## When the graph breaks
#
# Dynamo records the operations before it knows the numbers in the tensors. If your code branches on such a number,
# Dynamo cannot tell which branch to record. It compiles what it has so far, lets Python evaluate the condition, and
# begins a new graph after it. That is a *graph break*. Nothing is fused across it, every tensor that is still needed is
# written to memory, and on a GPU the host often has to wait for the number.
#
# The other cost is *recompilation*. What Dynamo records holds only for the shapes that it saw, and for the way that
# every `if` on a Python value went. If one of these is different at a later call, it compiles the function again. After
# eight compilations PyTorch gives up and runs the function eagerly.
#
# Here is the end of a step for a batch of sequences of several lengths. It adds the residual, clamps the numbers to
# ±`limit`, normalises, and also returns the last token of each sequence. `torch._dynamo.explain` says where its graph
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
# The list shows two lines where Dynamo stopped: an `if` on a tensor, and `tolist`, which reads all lengths. A third
# line is not in the list: the `if` inside the loop. Dynamo cannot begin a new graph in the middle of a loop, so it
# gives up, and the whole loop runs eagerly. On a GPU each of these three lines also makes the host wait, and the one in
# the loop does so once for each sequence.
#
# Now write the same function without a break. The usual way is to compute everything, even what will not be needed, and
# to *choose* at the end with `torch.where`. Here that means that you compute the padding too. In return, no tensor goes
# to memory between graphs.


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
# A kernel that you wrote yourself can break a graph too, because Dynamo cannot look into everything that its launcher
# does. Register such a launcher as an operator with `torch.library.custom_op`. Dynamo then puts a single call into the
# graph, and learns the results' shapes from a second function, the *fake* (see
# `course_lib/kernels/fused/norm_operators.py`). Inductor cannot fuse anything into such an operator, which is one more
# reason to write few of them.

# %% [markdown]
# ## When does a hand-written kernel pay?
#
# The next picture has one row for each operation, measured on one H200 (2026-11-22, PyTorch 2.11, bf16). Each rate is
# the least bytes that must move, divided by the time. The dashed line is the rate of the device's copy on that day,
# 4.17 TB/s. `python -m course_lib bench fused` measures it on your GPU.
#
# Three of the operations belong to deeper sections. RoPE is `turn` from the listing at the start, for Q and K in one
# tensor. Cross-entropy is the loss of a training step together with its gradient. It reads 128,256 logits for each
# token, and its `.float()` first copies them to float32. GroupNorm needs the mean and the variance of a whole group of
# channels, and Mish is an activation.
#
# **Predict**: on which of the eight rows does the compiler come close to the copy?

# %%
from course_lib.figures.fused.rates import ON_AN_H200, draw_fused_rates

draw_fused_rates(ON_AN_H200)

# %% [markdown]
# > **The answer to both guesses.** Where an operation is one pass over rows that fit on the chip, the compiler is about
# > as fast as the best kernel we measured: add and norm, SwiGLU and RoPE reach 93 to 101 % of a copy's rate. Elsewhere
# > it reaches 28 to 68 %: for long rows, for the groups of a norm, and for a loss with its gradient.
#
# There are four reasons to write a kernel. The first three explain the slow rows:
#
# - **Long rows.** A row of 65,536 numbers in 16 bits has 128 KB, half of a multiprocessor's registers. If a kernel
#   reads it twice, and both times from memory, it moves three tensors instead of two. That would allow 2.78 TB/s, and
#   the compiler's kernel reached 2.85. QuACK, a library of kernels in CuTe's Python, lets several multiprocessors share
#   a row and reached 4.10.
# - **Reductions over more than the last dimension.** A group of GroupNorm is some channels at all places. To read it
#   only once, a kernel has to keep it on the chip until its mean and variance are known.
# - **In place.** A kernel for cross-entropy can write the gradient over the logits. The compiler does not, because the
#   logits might be needed later.
# - **Epilogues.** An *epilogue* is a step after a matrix product that runs in the product's own kernel, on the sums
#   that are still in registers. Inductor does this only if it writes the product itself (`mode="max-autotune"`). It
#   cannot do it in a library's kernel.
#
# The next picture shows the course's own kernels, in a recorded run on one H100 (2026-11-27, PyTorch 2.11, Triton 3.6,
# bf16). On this card a copy reached 3.00 TB/s. The kernels of the last three rows are in CUDA C++, the others in
# Triton. "RoPE and append" turns Q and K, and also writes the keys and values into the cache. The loss in the first
# picture began with `.float()`, and this one does not.

# %%
from course_lib.figures.fused.rates import COPY_ON_AN_H100, ON_AN_H100

draw_fused_rates(ON_AN_H100, COPY_ON_AN_H100)

# %% [markdown]
# In no row is the compiler faster than the kernel written by hand. How much that kernel gains depends on the row:
#
# - **At most 2 %** for add and norm and for SwiGLU.
# - **1.3 to 1.9 times as fast** for RoPE with the append to the cache, for the norms and the softmax of long rows, and
#   for the backward pass of RMSNorm. RMSNorm and softmax of long rows reach 99 % of the copy, LayerNorm 82 %.
# - **About twice as fast** for cross-entropy and for both rows of GroupNorm and Mish, at 91, 72 and 78 % of the copy.
#
# The backward pass of RMSNorm holds a row of three inputs, and the sums for the weight's gradient. At 16,384 columns
# they no longer fit into the registers. A kernel of two passes over memory reached 0.52 of a copy's rate on an H200,
# counting three reads and one write of each element. `kernels/fused/gluon_rms_norm_backward.py` keeps the row in shared
# memory between its two readings and reaches 0.94 (484 and 270 µs for 8,192 rows, 2026-11-29).
#
# Some fusions save memory and no time. If the last linear layer is fused with the loss, the logits exist only a chunk
# at a time, and their gradient is written over them. For 8,192 tokens of 4,096 numbers and 128,256 classes, whose
# logits are 2.1 GB, that took 40.4 ms on an H200 in two chunks and 39.0 in one. PyTorch's layer and loss, compiled,
# took 40.1. Other fusions cost time. On the H100 a Conv1d, GroupNorm and Mish took 603 µs as PyTorch's single
# operations and 245 µs compiled. In one kernel of ours they took 647 µs, because our convolution is much slower than
# cuDNN's, and that costs more time than the saved bytes gain.
#
# | a fused kernel of your own | |
# |---|---|
# | wins | RoPE with the append, 2.79 TB/s against 1.48 compiled; long rows (measured, as above) |
# | loses | with a convolution inside: 647 µs against 245 compiled (measured) |
# | falls back | to two passes where a row does not fit in shared memory: at most 2/3 of a copy's rate (derived) |
# | trap | four warps for a tile of 16,384: it spills (compiled for sm_90, Triton 3.9) |
#
# So measure before you write a kernel. First measure what PyTorch has (`F.rms_norm`, `F.scaled_dot_product_attention`),
# and then `torch.compile`. Then compare the better of the two with a copy's rate: the difference is the time that your
# kernel could save.
#
# How much time do these kernels save in a whole layer? `python -m course_lib bench layer` times one layer of
# Llama-3-8B, four sequences of 4,096 tokens: each part by itself, eager, compiled, and with the course's kernels. The
# next pictures show a recorded run on one H100 (2026-11-27). Here the eager norm is `F.rms_norm`, not the seven
# operations from the start of this chapter. **Predict** how many times as fast the whole layer becomes, matrix products
# and attention included.

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
# The glue takes 3.27 ms in eager PyTorch, 1.12 ms compiled and 0.98 ms with the course's kernels, so it becomes 3.3
# times as fast. The layer gains less, a factor of 1.2, because the matrix products take 10.2 of its 14.5 ms. Most of
# the glue's gain comes from RoPE with the append to the cache, where eager PyTorch moves 4.4 GB and one kernel moves
# 0.4 GB. The compiler gets 94 % of the glue's gain without a line of Triton.
#
# The second picture is a roofline, as in chapter 01. Fusion gives the glue a higher intensity, so it moves up along the
# slope. But its operations stay below one FLOP for a byte, so memory still sets their time. As a product's epilogue
# they would cost almost nothing.

# %% [markdown]
# ## A hundred small steps · deeper
#
# A *diffusion* model makes its output from noise, in steps. Diffusion Policy takes a hundred of them to plan a robot's
# next 16 actions ([arXiv 2303.04137](https://arxiv.org/abs/2303.04137)). One block of its network is a convolution,
# GroupNorm, Mish, and then a scale and a shift for each channel, which depend on the step.
#
# **GroupNorm** divides the channels into groups, 8 for example. A group's mean and variance are over its channels *and*
# all places. The numbers are normalised with them, and then each channel is multiplied by a weight and gets a bias.
# **Mish** is an activation, $a \tanh(\log(1 + e^a))$.
#
# If PyTorch runs GroupNorm, Mish, and scale and shift as three operations, each number moves seven times. In one kernel
# it moves twice.
#
# Three things to get right:
#
# - **The variance.** You could add up $x$ and $x^2$ in one go and take $E[x^2] - E[x]^2$. If the mean is 10,000 and the
#   variance 1, both terms are near $10^8$. There neighbouring float32 numbers are 8 apart, so the difference is noise.
#   Since the tile is in registers, the safe way costs no bytes: find the mean, subtract it, and then square.
# - **Empty lanes.** They hold 0. After you subtract the mean they hold minus the mean, and its square would be added to
#   the variance.
# - **The constants.** The scale and the shift come from a small network whose only input is the step's number. Compute
#   tables of them once, before the first action, and let the kernel look up its row.

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
# A block with 256 channels and 16 places has 8 KB in 16 bits for one robot. The memory would need 4 ns for that, but a
# launch takes some microseconds. So at a batch of 1 the time depends only on the number of kernels and on how they are
# launched. With 4,096 samples, as in training, it depends on the bytes again.

# %% [markdown]
# ## The same kernel in CUDA C++ · deeper
#
# In Triton you write what a whole block of threads does, and the compiler decides which thread holds which numbers. In
# CUDA C++ you write what *one* thread does. Three decisions are now yours:
#
# - **How wide a load is.** A thread loads 8 numbers of 16 bits with one instruction, as a struct of 16 bytes, called a
#   *vector* here. This works only if each row begins at a multiple of 16 bytes.
# - **Which thread holds what.** Thread t takes the vectors t, t + THREADS, t + 2 · THREADS and so on. A load of a warp
#   is then four whole lines of 128 bytes.
# - **How a sum crosses the threads.** Each thread adds up the squares of its own numbers, but the norm needs the sum of
#   the whole row. First, the 32 threads of a warp add up their sums. With `__shfl_xor_sync` a thread reads a register
#   of another thread in its warp, and after five such steps, at distances 16, 8, 4, 2 and 1, all 32 threads have the
#   warp's sum. The next cell prints this half. Then each warp puts its sum into shared memory, `__syncthreads` waits
#   for all of them, and each warp adds up those few numbers in the same way.

# %%
from course_lib.kernels.fused.cuda_rows import SHARED_BY_KERNELS

begin, end = (SHARED_BY_KERNELS.index(f"__device__ inline float sum_of_{what}") for what in ("warp", "block"))
print(SHARED_BY_KERNELS[begin:end])

# %% [markdown]
# The whole kernel is in `course_lib/kernels/fused/cuda_add_rms_norm.py`. CUDA C++ pays when you cannot write in Triton
# what you need: a certain layout, a certain barrier, or an instruction that Triton does not have.
#
# Now you write such a kernel. The check needs no GPU: g++ compiles your text for the processor, and your threads run
# there one at a time, each until it has to wait for others.
#
# The check also watches each access to memory. If two threads reach the same number, one of them changes it, and no
# barrier lies between the two, it names the lines of both, even if the result is right. It accepts barriers, shuffles
# and atomics, but not memory fences and flags.
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
# The next cell compiles your kernel for an H100, with NVRTC, CUDA's compiler as a library. That needs no GPU. A CUDA
# build of PyTorch brings it along; with a CPU build, run `pip install nvidia-cuda-nvrtc`. Until your answer has passed,
# the cell takes the course's kernel, and says so. On a GPU the cell also times it beside your Triton kernel from 13.2.
# That one keeps the whole row in registers, while your loop, if it is like the course's, reads `summed` again.
# **Predict** which one is faster.

# %%
from course_lib.hardware.compiler.cuda_cpp import CudaLaunch, compile_cuda, run_cuda
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS
from course_lib.hardware.compiler.nvrtc import missing_nvrtc
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
# In 13.4 the loss reads each logit twice, because a row of 128,256 logits has 257 kB in 16 bits and no multiprocessor
# can hold it. From Hopper on, up to eight thread blocks can form a *cluster*. Each block can write into the shared
# memory of the others. `kernels/fused/cuda_cross_entropy.py` gives each row to a cluster of eight. Each block keeps its
# part of the row in registers and finds its maximum and its sum. The blocks exchange these, 512 bytes for a row, and
# merge them as you did in 3.3. So each logit is read once and written once.
#
# On an H100 (recorded, 2026-11-27) the kernel with one block a row took 970 µs, the cluster 769 µs, and the compiled
# loss 1,469 µs. That is 1.26 times as fast, and not the 1.5 of the bytes, because part of the second read had come from
# the L2 cache.

# %% [markdown]
# ## A layout by hand · deeper
#
# Triton decides which thread holds which element of a tile. In CUDA C++ with CUTLASS, and in CuTe's Python, *you*
# decide, by a *layout*. A layout turns an index into an offset. It consists of two tuples, the shape and the stride,
# with one number for each dimension.
#
# First the index is split into coordinates, one for each dimension. CuTe counts the *first* dimension fastest: in the
# shape (4, 8) the index 6 has the coordinates (2, 1), because 6 = 2 + 1 · 4. Then each coordinate is multiplied by its
# stride, and the products are added up. With the strides (8, 1), index 6 has the offset 2 · 8 + 1 · 1 = 17.
#
# You can apply one layout after another: the inner one picks places of a tile, and the outer one says where each place
# lies in memory. CuTe uses this to say which elements a thread owns. One layout gives the place of a thread's first
# value, and a second one the steps from there to its other values.
#
# You can also *divide* a layout into tiles. Take a layout with 12 indices, and tiles of 2 indices that are 3 apart. The
# first tile has the indices 0 and 3. The second begins at the smallest index that is left, 1, and has 1 and 4. The
# third has 2 and 5. Now 6 is the smallest one left, and the pattern begins again from there: 6 and 9, 7 and 10, 8 and
# 11. CuTe calls this `logical_divide`. A kernel's blocks, its warps and its vector loads are all made by dividing.

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
# `course_lib/kernels/fused/` has SwiGLU in Gluon (`gluon_swiglu.py`) and in CuTe's Python (`cute_swiglu.py`). In both,
# find the lines that divide the tensor, and those that say which thread owns which place.

# %% [markdown]
# ## Finale: the model on fused kernels · deeper
#
# In the library's decoder the glue can be exchanged (`course_lib/models/glue.py`). A block passes the result of its
# feed-forward part and the residual on, and the first kernel of the next block adds and normalises. So eight of the
# small model's nine norms come with an addition. First the model writes with *your* kernel of 13.2 in these eight
# places.

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
# For training every kernel needs a gradient, and the course's fused operators have one. The next cell trains a model
# twice, from the same first weights on the same pieces of text, once with PyTorch's operations and once with these.
# Without a GPU it takes five to twenty seconds, more on a busy machine, because the interpreter runs program by
# program. **Predict** how far apart the losses are after the last step.

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
# The two curves lie on top of each other. They differ only by rounding: the same sums and products are rounded in
# another order.
#
# At this size fusion does not pay: a row has 96 numbers, so a kernel takes as long as its launch. In chapter 14 you
# make such launches cheaper.
#
# ## What production systems do
#
# - **vLLM** compiles its models with `torch.compile`, and adds passes of its own to Inductor. They look for patterns in
#   the graph, such as a norm and the cast to FP8 behind it, and replace them by a kernel written by hand
#   ([its table of fusions](https://docs.vllm.ai/en/stable/design/fusions/)).
# - **Liger** has Triton kernels for training: norms, RoPE, SwiGLU, and cross-entropy fused with the last linear layer
#   ([arXiv 2410.10989](https://arxiv.org/abs/2410.10989)).
# - **QuACK** ([code](https://github.com/Dao-AILab/quack)) has norms, softmax and cross-entropy in CuTe, with clusters
#   for long rows.

#
# ## Papers
#
# - Zhang and Sennrich: *Root Mean Square Layer Normalization*, [arXiv 1910.07467](https://arxiv.org/abs/1910.07467).
# - Su et al.: *RoFormer*, [arXiv 2104.09864](https://arxiv.org/abs/2104.09864): rotary positions.
# - Shazeer: *GLU Variants Improve Transformer*, [arXiv 2002.05202](https://arxiv.org/abs/2002.05202): SwiGLU.
# - Ansel et al.: *PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
#   Compilation*, ASPLOS 2024: Dynamo and Inductor. Section 4 is how Inductor fuses.


# %%
progress()
