# %% [markdown]
# # 01 · The memory hierarchy and the roofline
#
# **The question.** Two sums add up equally many float32 numbers, millions of them, but one takes many times as long
# as the other. What takes the time?
#
# An H100 can do 989 TFLOP/s in float16: 989 · 10¹² floating-point operations (FLOPs) in a second. Its memory delivers
# 3.35 TB/s, which is 3.35 · 10¹² bytes in a second. So while it fetches *one byte*, it could do 989 / 3.35 = 295
# operations. Most of what a transformer does while it generates text needs fewer than ten operations for each byte.
# So first ask how much a kernel moves, not how much it computes. In this chapter you learn to answer that: with a
# pencil, then with a meter that counts bytes, then with a clock.
#
# **Time.** About three hours in all. **Core path**, two hours at most: exercises 1.1 to 1.5, and every section whose
# heading does not end in **· deeper**. You can skip the others, because nothing depends on them.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, measured, predict, progress, solution, watch

from functools import partial

import torch
import triton
import triton.language as tl

from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth, format_bytes, format_capacity, format_flop_rate, format_seconds

device = default_device()
on_gpu = machine().tier != "none"

# %% [markdown]
# ## The same sum, twice
#
# In the first sum of the next cell, the numbers are neighbours in memory. In the second they lie 16 elements apart,
# like one column of a matrix with 16 columns.
#
# **Predict:** how much longer will the second sum take? Put your number in place of the dots. It is kept, and
# `progress()` shows it beside the number that you measure.

# %%
predict("01 second sum", ..., "times as long")

# %%
def time_two_sums(length):
    storage = torch.ones(16 * length, device=device)
    return measure(storage[:length].sum, flush=True), measure(storage[::16].sum, flush=True)  # from memory, not a cache


length = 2**25 if on_gpu else 2**22
close, far = time_two_sums(length)
print(f"{length:,} additions each")
print(f"neighbours: {format_seconds(close.median)}")
print(f"16 apart:   {format_seconds(far.median)}")
measured("01 second sum", far.median / close.median, "times as long")

# %% [markdown]
# The second sum takes longer because memory does not deliver single numbers. A GPU fetches *sectors* of 32 bytes, and
# a CPU fetches *lines* of 64 bytes. You need four bytes, but the other 28 or 60 come along. So the second sum moves
# up to 8 times as many bytes on a GPU, and up to 16 times as many on a CPU. (A CPU may take even longer, because its
# fetching ahead works worse across gaps.)
#
# The number of additions made no difference, but the number of bytes did. This is the first rule of this course:
# **count the bytes that move, not the operations.**
#
# ## The GPU in one picture
#
# All later chapters use the words in this picture. From left to right it shows a launch, one of its programs, the
# multiprocessor that runs the program, and the whole chip. The orange marks follow that one program.

# %%
from course_lib.figures.memory.gpu import draw_gpu

draw_gpu()

# %% [markdown]
# **A program runs as warps.** A *warp* is a group of 32 *threads* that execute each instruction together. We call
# these threads *lanes*. A program has four warps unless you ask for another number. The values of a block are spread
# over all its lanes: of 1024 values, each of the 4 · 32 = 128 lanes gets 8.
#
# **A multiprocessor runs programs.** A *multiprocessor* has arithmetic units and fast memory of its own. An H100 has
# 132 of them. A program stays on one until it ends. Each has room for 64 warps, so several programs can share it, and
# while some warps wait for memory, others compute. Its ordinary units do 128 float32 multiply-adds ($a \cdot b + c$)
# in a clock cycle. Its four *tensor cores* only multiply small matrices, and in float16 they are 15 times as fast.
#
# **The memories** are the four boxes at the bottom. Each is faster than the next one but never larger, because fast
# memory takes up area on the chip.
#
# - *Registers* hold the values that a program is computing with. A lane has at most 255 of them, 4 bytes each. The
#   compiler decides what goes into them.
# - *Shared memory* holds the *tiles* that a program's warps work on together. A tile is a block with two dimensions:
#   64 × 64 float16 numbers of a matrix take 8 KiB. Shared memory and *L1*, a cache, divide 256 KiB.
# - The *L2 cache* keeps what was fetched from HBM lately. The hardware decides what stays.
# - *HBM* (high-bandwidth memory) is the GPU's main memory, also called global memory. Your tensors are there. *PCIe*
#   connects the GPU to the CPU, its *host*.
#
# The speed of HBM is from the datasheet; those of L1 and L2 were measured on an H100. The speed of the registers is
# computed: an H100 does 33.5 · 10¹² float32 multiply-adds in a second, and each reads three registers of 4 bytes.
#
# Now measure your machine. The results are its *ceilings*, the highest speeds that a kernel can reach here, and the
# cost of a launch, which is the time to start one kernel. Close other programs first, because the result is kept for
# later chapters. If something reaches far more than 100 % of a ceiling later on, run `here = ceilings(refresh=True)`.

# %%
from course_lib.hardware.ceilings.measured import ceilings

here = ceilings()
print(f"{here.device}, measured {here.measured_at[:10]}")
figures = {
    "copy, read + write": format_bandwidth(here.copy_bandwidth),
    "read alone": format_bandwidth(here.read_bandwidth),
    "from the L2 cache": here.l2_bandwidth and format_bandwidth(here.l2_bandwidth),
    "from the caches of all cores": here.on_chip_bandwidth and format_bandwidth(here.on_chip_bandwidth),
    "multiply-adds": format_flop_rate(here.fma_rate),
    **{f"matmul {dtype}": format_flop_rate(rate) for dtype, rate in here.matmul_rate.items()},
    "cost of a launch": format_seconds(here.launch_overhead),
}
for what, figure in figures.items():
    if figure:  # of the two lines on caches, a CPU has only the second
        print(f"{what:<32}{figure}")

# %% [markdown]
# The memory has two speeds, one for reading alone and one for copying. Plots draw the larger of the two as the
# *roof*, because no kernel can pass it. A *prediction* for a kernel that reads and writes uses the copy's speed.
#
# The next picture shows your own memories. Where your GPU's datasheet states a figure, it stands next to the measured
# one. Even the best kernel gets only about 90 % of the datasheet's bandwidth.

# %%
from course_lib.figures.memory.hierarchy import hierarchy_plot

hierarchy_plot(machine(), here)

# %% [markdown]
# ## Counting
#
# Two numbers describe an operation before any code exists: how much it computes and how much it has to move.
#
# **FLOPs** are floating-point operations. A multiply-add counts as two, here and on every datasheet. A softmax counts
# four for each element: subtract the maximum, exp, add to the sum, divide. Comparisons are not counted.
#
# **Bytes** are what must cross the *memory bus*, between chip and HBM, at the very least: each input is read once and
# each output is written once. A poor kernel moves more, but we count the minimum.
#
# Take `x + y` on $n$ float32 numbers. It does $n$ additions. It reads $x$ and $y$ and writes the result, so it moves
# $3 \times 4\,n = 12\,n$ bytes. FLOPs divided by bytes is called the **arithmetic intensity**. Here it is $n / 12n =
# 1/12$ FLOP/byte.
#
# Now take a product of two $n \times n$ matrices in float16. It does $2n^3$ FLOPs and moves $3 \times 2\,n^2$ bytes,
# so its intensity is $n/3$. At $n = 256$ it is 85 FLOP/byte, and it grows with the size. In the exercise you write
# such counts as functions.

# %%
# Exercise 1.1 · Bytes and FLOPs on paper
def elementwise_cost(elements, inputs, flops_per_element, item_bytes):
    """Work of an elementwise operation with `inputs` input tensors and one output, all of `elements` elements.

    Args:
        elements: elements of each tensor.
        inputs: number of input tensors: 1 for relu(x), 2 for x + y.
        flops_per_element: operations for each element of the result.
        item_bytes: bytes of one element.

    Returns:
        (flops, bytes): two integers; bytes are the least that must be read and written. A verdict calls the FLOPs
        result[0] and the bytes result[1].
    """
    # BEGIN SOLUTION
    return elements * flops_per_element, (inputs + 1) * elements * item_bytes
    # END SOLUTION


def softmax_cost(rows, columns, item_bytes):
    """Work of a softmax over each row of a [rows, columns] matrix, counting 4 FLOPs for each element.

    Returns:
        (flops, bytes), as above.
    """
    # BEGIN SOLUTION
    return 4 * rows * columns, 2 * rows * columns * item_bytes
    # END SOLUTION


def matmul_cost(m, k, n, item_bytes):
    """Work of the product of an [m, k] and a [k, n] matrix.

    Returns:
        (flops, bytes), as above; a multiply-add is two FLOPs.
    """
    # BEGIN SOLUTION
    return 2 * m * k * n, (m * k + k * n + m * n) * item_bytes
    # END SOLUTION


def scores_cost(heads, queries, keys, head_dim, item_bytes):
    """Work of attention's scores, Q Kᵀ, in every head: [queries, head_dim] times [keys, head_dim] transposed.

    The scores are written to memory, and each head has queries and keys of its own. The scaling is not counted.

    Returns:
        (flops, bytes), as above.
    """
    # BEGIN SOLUTION
    flops = 2 * heads * queries * keys * head_dim
    elements = heads * (queries * head_dim + keys * head_dim + queries * keys)
    return flops, elements * item_bytes
    # END SOLUTION


# %%
counting = check("1.1", elementwise_cost, softmax_cost, matmul_cost, scores_cost)
best_elementwise_cost, best_softmax_cost, best_matmul_cost, best_scores_cost = counting.best

# %% [markdown]
# The next cell uses your functions on one attention layer, among some simpler operations. The layer has a context of
# 8192 tokens and 32 heads of dimension 128, in float16. **Predict:** which of its two matrix products, $Q K^\top$ and
# probabilities × $V$, has an intensity above an H100's 295 FLOP/byte?

# %%
N, H, D, half = 8192, 32, 128, 2
scores = best_scores_cost(H, N, N, D, half)
softmax = best_softmax_cost(H * N, N, half)
operations = {
    "x + y, float32": best_elementwise_cost(2**24, 2, 1, 4),
    "relu(scale * x + y), float32": best_elementwise_cost(2**24, 2, 3, 4),
    "matrix × vector, 8192": best_matmul_cost(8192, 8192, 1, half),
    "matmul of 256": best_matmul_cost(256, 256, 256, half),
    "matmul of 8192": best_matmul_cost(8192, 8192, 8192, half),
    "attention: scores Q Kᵀ": scores,
    "attention: softmax": softmax,
    "attention: probabilities × V": scores,  # matrices of the same three shapes, so the same counts
    "attention, if no N × N matrix moved": (2 * scores[0] + softmax[0], 4 * H * N * D * half),
}
print(f"{'operation':<38}{'FLOPs':>12}{'bytes':>12}{'FLOP/byte':>12}")
for name, (flops, moved) in operations.items():
    print(f"{name:<38}{flops:>12.2e}{moved:>12.2e}{flops / moved:>12.2f}")

# %% [markdown]
# Neither of them. The scores are a matrix product, but they do only about 124 operations for each byte. They write a
# matrix of $N \times N$, and each of its elements gets only $D = 128$ multiply-adds. The softmax does only one
# operation for each byte.
#
# The last line is the same arithmetic, but there the $N \times N$ matrix never goes to memory. Its intensity is 4128
# FLOP/byte, 33 times as high. Chapters 02 to 04 show you how to get there.
#
# ## The balance point
#
# Whether an operation waits for memory or for arithmetic depends on the device too. Divide the device's rate of
# arithmetic by its bandwidth, and you get its **balance point** in FLOP/byte. For the H100 it is 295. An operation
# with a lower intensity is *memory-bound*: it waits for memory, and faster arithmetic would not help it. An operation
# with a higher intensity is *compute-bound*. The device moves bytes while it computes, so the least time is the
# larger of the arithmetic's time and the bytes' time:
#
# $$ t_\text{least} = \max\left(\frac{\text{FLOPs}}{\text{rate}}, \frac{\text{bytes}}{\text{bandwidth}}\right) $$
#
# For `x + y` on 16 Mi float32 numbers, an H100 needs 60 µs to move 201 MB and far less than that for the additions.
# So the least time is 60 µs.
#
# The next cell prints the balance points of some GPUs and of your machine.

# %%
from course_lib.hardware.datasheets import DATASHEETS

print(f"{'datasheet':<12}{'memory':>9}{'bandwidth':>12}{'float16 matmul':>16}{'balance point':>16}")
for name, sheet in DATASHEETS.items():
    print(f"{name:<12}{format_capacity(sheet.memory_bytes):>9}{format_bandwidth(sheet.bandwidth):>12}"
          f"{format_flop_rate(sheet.matmul_rate['float16']):>16}{sheet.balance_point('float16'):>11.0f} FLOP/B")
matmul_dtype = "float16" if on_gpu else "float32"
own_balance = here.matmul_rate[matmul_dtype] / here.memory_bandwidth  # the larger bandwidth: the roof
print(f"\nthis machine, measured: {format_bandwidth(here.memory_bandwidth)}, {matmul_dtype} matmul "
      f"{format_flop_rate(here.matmul_rate[matmul_dtype])}, balance point {own_balance:.3g} FLOP/B")

# %% [markdown]
# From the T4 to the B200, arithmetic became 35 times and memory 25 times as fast, so the balance point stayed in the
# hundreds. What is memory-bound today will be memory-bound on the next device. The H200 is an H100 with more and
# faster memory, so every memory-bound kernel got 1.4 times faster without any change. Now write the balance point and
# the least time as functions.

# %%
# Exercise 1.2 · Balance point, bound and least time
def balance_point(teraflops, gigabytes_per_second):
    """The intensity [FLOP/byte] at which a device computes as long as it moves bytes.

    Args:
        teraflops: its arithmetic rate in TFLOP/s (1e12 FLOP/s).
        gigabytes_per_second: its memory bandwidth in GB/s (1e9 bytes/s).
    """
    # BEGIN SOLUTION
    return teraflops * 1e12 / (gigabytes_per_second * 1e9)
    # END SOLUTION


def least_time(flops, bytes_moved, teraflops, gigabytes_per_second):
    """Which side an operation is on, and the least time that it can take on a device.

    Args:
        flops, bytes_moved: the work of the operation, as 1.1 counts it.
        teraflops, gigabytes_per_second: the device, as above.

    Returns:
        (side, seconds): side is "memory" or "compute", the one that takes longer.
    """
    # BEGIN SOLUTION
    compute = flops / (teraflops * 1e12)
    memory = bytes_moved / (gigabytes_per_second * 1e9)
    return ("compute" if compute >= memory else "memory"), max(compute, memory)
    # END SOLUTION


# %%
best_balance_point, best_least_time = check("1.2", balance_point, least_time).best

# %% [markdown]
# The next cell prints this least time, and the side that sets it, for the operations above. It uses the tensor cores'
# float16 rate. (For `x + y` in float32 that rate is 15 to 30 times too high, but `x + y` is memory-bound anyway.)
# Look for the rows in which all devices say *memory*. No faster tensor core will ever help those operations.

# %%
names = ("A100", "H100", "H200", "B200")
print(f"{'least time':<38}" + "".join(f"{name:>18}" for name in names))
for operation, work in operations.items():
    row = f"{operation:<38}"
    for name in names:
        sheet = DATASHEETS[name]
        side, seconds = best_least_time(*work, sheet.matmul_rate["float16"] / 1e12, sheet.bandwidth / 1e9)
        row += f"{format_seconds(seconds) + ' ' + side:>18}"
    print(row)

# %% [markdown]
# ## The roofline
#
# The roofline shows the same bound as a picture: the highest rate that a kernel can reach, drawn over its intensity
# on logarithmic axes. Below the balance point that rate is bandwidth × intensity, a slope. Above it, the rate of
# arithmetic is the limit, a flat roof. The two meet in a corner at the balance point. A kernel's distance below this
# line shows what there is to gain.
#
# The next cell draws the roofline of *your* machine, as measured, with some of PyTorch's operations on it. The copy
# stands at the left edge, because it does no FLOPs and a logarithmic axis has no place for 0.

# %%
from course_lib.figures.memory.roofline import Measured, roofline_plot
from course_lib.hardware.roofline import Work

length = 2**26 if on_gpu else 2**24
x, y, result = (torch.rand(length, device=device) for _ in range(3))
rows, softmax_result = x.view(-1, 1024), result.view(-1, 1024)
size, item = (8192, 2) if on_gpu else (1024, 4)
left, right = (torch.rand(size, size, device=device).to(getattr(torch, matmul_dtype)) for _ in range(2))
weights, vector = x[: 2**24].view(4096, 4096), y[:4096]

points = [
    Measured(Work("copy", 0, 2 * x.nbytes), measure(lambda: result.copy_(x))),
    Measured(Work("x + y", *best_elementwise_cost(length, 2, 1, 4)), measure(lambda: torch.add(x, y, out=result))),
    Measured(Work("softmax, rows of 1024", *best_softmax_cost(*rows.shape, 4)),
             measure(lambda: torch.softmax(rows, 1, out=softmax_result))),
    Measured(Work("matrix × vector", *best_matmul_cost(4096, 4096, 1, 4)), measure(lambda: weights @ vector)),
    Measured(Work(f"matmul of {size}", *best_matmul_cost(size, size, size, item), matmul_dtype),
             measure(lambda: left @ right)),
]
for point in points:
    if point.share_of_roof(here) > 1.2:
        print(f"{point.work.name} lies above its roof: its data came from a cache, or the ceilings were measured on a "
              "busy machine. In that case: here = ceilings(refresh=True)")
roofline_plot(here, points)

# %% [markdown]
# The picture tells you two things. The operations along the slope spend their time on bytes, so better arithmetic
# gains nothing. And a point far below its roof has something to gain. On a GPU the copy and the addition are close to
# it. On a CPU the roof is often the speed of reading alone, and a kernel that also writes stays below it.
#
# ## Coalescing: what a load really fetches
#
# Now look at a single load. When a warp loads, the hardware looks at the addresses of its 32 lanes together. It
# fetches each 32-byte sector that they fall into, and fetches it only once. If neighbouring lanes read neighbouring
# elements, they share sectors. This is called *coalescing*. With float32, 32 neighbours need only 4 sectors.
#
# The picture shows one load of a warp at three *strides*. A stride is the distance from one element to the next,
# counted in elements.

# %%
from course_lib.figures.memory.coalescing import draw_sectors

draw_sectors(strides=(1, 2, 8))

# %% [markdown]
# The next kernel can read memory as the slow second sum did. Only the `stride` that you pass makes it fast or slow.


# %%
@triton.jit
def strided_copy_kernel(x_pointer, result_pointer, length, stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    values = tl.load(x_pointer + offsets * stride, mask=inside)  # [BLOCK] neighbours are `stride` elements apart
    tl.store(result_pointer + offsets, values, mask=inside)


def strided_copy(x, stride):
    """x[::stride], copied."""
    result = torch.empty(triton.cdiv(x.numel(), stride), device=x.device)
    grid = (triton.cdiv(result.numel(), 1024),)
    strided_copy_kernel[grid](x, result, result.numel(), stride, BLOCK=1024)
    return result


# %% [markdown]
# The next cell runs it at five strides. Without a GPU, the **traffic meter** counts the bytes that the kernel asks
# for and the bytes of all the sectors that a GPU would fetch. With a GPU, the clock shows the same effect.
# **Predict** the ratio of the two counts for strides 1, 2, 4, 8 and 16. Beyond which stride does it stop getting
# worse, and why?

# %%
if interpreting():
    from course_lib.hardware.meter.traffic import TrafficMeter

    print("stride   bytes asked for   bytes in sectors   ratio")
    for stride in (1, 2, 4, 8, 16):
        storage = torch.rand(4096 * stride)
        with TrafficMeter(count_sectors=True, storage=storage) as meter:
            strided_copy(storage, stride)
        row = meter.report()["storage"]
        ratio = row.loaded_sector_bytes / row.loaded_bytes
        print(f"{stride:>6}{row.loaded_bytes:>18,}{row.loaded_sector_bytes:>19,}{ratio:>8.1f}")
else:
    print("stride   elements copied           time   useful bandwidth   of the copy's ceiling")
    for stride in (1, 2, 4, 8, 16):
        timing = measure(partial(strided_copy, torch.rand(2**25 * stride, device=device), stride))
        rate = timing.bandwidth(2 * 4 * 2**25)
        print(f"{stride:>6}{2**25:>18,}{format_seconds(timing.median):>15}{format_bandwidth(rate):>19}"
              f"{rate / here.copy_bandwidth:>23.0%}")

# %% [markdown]
# From stride 8 on, every element has a sector to itself, because a sector holds 8 float32 numbers. Counted in
# sectors, it cannot get worse than that. (Recent GPUs prefer to deliver two sectors at a time, so 16 may cost a
# little more than 8.)
#
# ### What the compiler makes of a stride · deeper
#
# The next cell compiles the kernel for an H100, which works without one. First the compiler knows that the stride is
# 1, then it does not. Look at how many bytes one lane loads with one instruction.

# %%
from course_lib.hardware.compiler.views import compile_many

signature = {"x_pointer": "*fp32", "result_pointer": "*fp32", "length": "i32", "stride": "i32"}
request = {"kernel": strided_copy_kernel, "signature": signature, "arch": 90,
           "divisible": ["x_pointer", "result_pointer", "length"]}
known, unknown = compile_many([
    request | {"constexprs": {"BLOCK": 1024, "stride": 1}},
    request | {"constexprs": {"BLOCK": 1024}},
])
for title, view in (("stride 1", known), ("any stride", unknown)):
    loads = ", ".join(f"{count} loads of {width} bytes" for width, count in view.load_widths.items())
    print(f"{title:<12}each thread: {loads}; {view.registers} registers")

# %% [markdown]
# A block of 1024 gives each of the 128 lanes 8 floats to load. If the compiler can prove that four of them are
# neighbours, at an address divisible by 16, it fetches the four with one load of 16 bytes, the widest there is. If
# not, each float needs a load of its own.
#
# Triton gives the compiler this knowledge at each launch: it makes a stride of 1 a constant, and marks numbers and
# pointers that are divisible by 16. You pass strides and lengths as they are.
#
# ## Vector add
#
# Now it is your turn. This kernel has two loads, and it must work for any length. An input may be a view into
# something larger, so its elements can lie `x.stride(0)` apart.


# %%
# Exercise 1.3 · Vector add, any length
@triton.jit
def vector_add_kernel(
    x_pointer, y_pointer, result_pointer, length, x_stride, y_stride, BLOCK: tl.constexpr
):
    """Writes one block of the result: result[i] = x[i] + y[i]."""
    # BEGIN SOLUTION
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets * x_stride, mask=inside)  # [BLOCK]
    y = tl.load(y_pointer + offsets * y_stride, mask=inside)  # [BLOCK]
    tl.store(result_pointer + offsets, x + y, mask=inside)
    # END SOLUTION


def vector_add(x, y):
    """x + y by one Triton kernel. You may change the kernel's parameters.

    Args:
        x, y: [length], float32 or float16 and alike, any length from 1, any strides, each its own; the last element
            lies fewer than 2³¹ elements behind the first. They stay as they are.

    Returns:
        [length], contiguous, of the same dtype; a new tensor at each call.
    """
    # BEGIN SOLUTION
    length = x.numel()
    result = torch.empty(length, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(length, 1024),)
    vector_add_kernel[grid](x, y, result, length, x.stride(0), y.stride(0), BLOCK=1024)
    return result
    # END SOLUTION


# %%
best_vector_add = check("1.3", vector_add).best

# %% [markdown]
# You can see what the programs of a kernel do. `watch` runs a function in Triton's interpreter and draws each tensor
# as a grid of cells, in lines of 64 here. One slider picks the program, the other goes through its loads and stores.
# **Predict:** how many elements does program 2 read of each input? If your check failed, write `vector_add` in place
# of `best_vector_add`, and look for cells outside of a tensor and for cells that no program writes.

# %%
watch(best_vector_add, torch.rand(2500, device=device), torch.rand(2500, device=device))

# %% [markdown]
# With blocks of 1024, program 2 has only 2500 − 2048 = 452 elements left, and its mask keeps the other lanes inside.
#
# **Predicted against measured.** Your kernel reads x and y once and writes the result once. Divide those bytes by the
# copy's bandwidth, and you have a prediction of its time. The next cell compares it with the time of your kernel on a
# GPU, or of PyTorch's addition on a CPU.

# %%
def compared(what, bytes_moved, timing):
    """One line of text: the time predicted from the bytes alone, and the measured time beside it."""
    predicted = bytes_moved / here.copy_bandwidth
    return (f"{what:<32}{format_bytes(bytes_moved):>8}: predicted {format_seconds(predicted):>7}, "
            f"measured {format_seconds(timing.median):>7}, {predicted / timing.median:4.0%} of the copy's speed")


if on_gpu:
    print(compared("your vector add", 3 * x.nbytes, measure(lambda: best_vector_add(x, y))))
print(compared("PyTorch's x + y", 3 * x.nbytes, measure(lambda: torch.add(x, y, out=result))))

# %% [markdown]
# ## A sum, in one pass
#
# A reduction makes something small out of something large, so nearly all its bytes are reads. A row sum of a float32
# matrix reads 4 bytes for each addition, an intensity of 1/4 FLOP/byte. The kernel has to do three things well:
#
# - Read each element once.
# - Keep the partial sums in registers, and in float32 even if the input is float16.
# - Find the elements by `x.stride()`, which holds two strides: from row to row and from column to column.
#
# The check counts your bytes. It allows $4 \cdot \text{rows} \cdot \text{columns}$ read and $4 \cdot \text{rows}$
# written for float32, plus 5 %. So it notices a second pass over the matrix or a copy of it.
#
# You need some new words, all from [Triton's language
# reference](https://triton-lang.org/main/python-api/triton.language.html):
#
# | in the kernel | what it does |
# |---|---|
# | `tl.zeros([BLOCK], dtype=tl.float32)` | a block of zeros, in registers |
# | `for start in range(0, columns, BLOCK):` | a loop as in Python; its bounds may be numbers known only at run time |
# | `tl.load(pointers, mask=inside, other=0.0)` | `other` where the mask is false; without `other`, undefined there |
# | `values.to(tl.float32)` | the block in another dtype |
# | `tl.sum(block, axis=0)` | reduces a block to one number, or a tile along one of its axes |
# | `tl.store(result_pointer + row, number)` | one pointer and one number, no block and no mask |
#
# A mask with two conditions needs `&` and brackets, `(0 <= offsets) & (offsets < length)`: a chained comparison, as in
# `0 <= offsets < length`, works in Triton only from version 3.9 on.


# %%
# Exercise 1.4 · Row sum, any shape and strides, one pass
@triton.jit
def row_sum_kernel(
    x_pointer, result_pointer, columns, row_stride, column_stride, BLOCK: tl.constexpr
):
    """Sums one row, a block at a time."""
    # BEGIN SOLUTION
    row = tl.program_id(0)
    partial = tl.zeros([BLOCK], dtype=tl.float32)  # [BLOCK] one sum for each lane, combined once at the end
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)  # [BLOCK]
        pointers = x_pointer + row * row_stride + offsets * column_stride  # [BLOCK]
        values = tl.load(pointers, mask=offsets < columns, other=0.0)  # [BLOCK] what is masked off must add nothing
        partial += values.to(tl.float32)
    tl.store(result_pointer + row, tl.sum(partial, axis=0))
    # END SOLUTION


def row_sum(x):
    """The sum of each row by Triton kernels alone, reading x once. You may change the kernel's parameters.

    Args:
        x: [rows, columns], float32 or float16, any strides, at least one row and one column, rows of any length. No
            element lies 2³¹ elements or more behind the first.

    Returns:
        [rows] float32; sums are accumulated in float32.
    """
    # BEGIN SOLUTION
    rows, columns = x.shape
    result = torch.empty(rows, dtype=torch.float32, device=x.device)
    row_sum_kernel[(rows,)](x, result, columns, x.stride(0), x.stride(1), BLOCK=1024)
    return result
    # END SOLUTION


# %%
best_row_sum = check("1.4", row_sum).best

# %% [markdown]
# ### The same matrix, stored by columns · deeper
#
# Your kernel asks for each byte once, but the memory may still have to deliver more. Take a matrix, and then the same
# matrix stored column by column, so that the elements of a row lie far apart. The kernel asks for the same bytes of
# both. **Predict** what the memory has to deliver for each.

# %%
if interpreting():
    by_rows = torch.rand(8, 1024)
    for name, matrix in (("stored row by row", by_rows), ("stored column by column", by_rows.t().contiguous().t())):
        with TrafficMeter(count_sectors=True, matrix=matrix) as meter:
            best_row_sum(matrix)
        row = meter.report()["matrix"]
        print(f"{name:<24} asked for {row.loaded_bytes:,} B, read {row.times_read:.2f} times; "
              f"in sectors {row.loaded_sector_bytes:,} B")
else:
    from course_lib.kernels.memory.row_sum import row_sum as library_row_sum

    by_rows = torch.rand(4096, 16384, device=device)
    for name, matrix in (("row by row", by_rows), ("column by column", by_rows.t().contiguous().t())):
        print(compared(f"your kernel, {name}", matrix.nbytes, measure(partial(best_row_sum, matrix))))
        print(compared(f"the library's, {name}", matrix.nbytes, measure(partial(library_row_sum, matrix))))

# %% [markdown]
# In the second matrix, each sector holds elements of eight different rows. A program that owns one row uses only one
# of the eight, and the programs of the other seven rows fetch the same sector again, unless a cache still holds it.
# The course's own kernel, `course_lib/kernels/memory/row_sum.py`, gives each program a tile of many rows, so that
# neighbouring lanes read neighbouring elements.
#
# ## Fusion foretold
#
# PyTorch runs `torch.relu(scale * x + y)` as three kernels, and each of them writes its result to memory for the next
# one to read:
#
# | kernel | reads | writes |
# |---|---|---|
# | `scale * x` | x | product |
# | `product + y` | product, y | sum |
# | `relu(sum)` | sum | result |
#
# So seven tensors cross the bus. Four of these crossings carry the product and the sum, which nobody needs in the
# end. If one kernel does all three steps, it can keep them in registers, and then only three tensors move. Joining
# kernels in this way is called *fusion*.
#
# **Predict** the gain, and then write the kernel. You need one new word: `tl.maximum(block, 0.0)` compares element by
# element. (`tl.max` would reduce the block to a single number, and Python's own `max` does not work on blocks.)


# %%
# Exercise 1.5 · Scale, add and ReLU in one kernel
@triton.jit
def scale_add_relu_kernel(
    x_pointer, y_pointer, result_pointer, scale, length, BLOCK: tl.constexpr
):
    """Writes one block of the result: result[i] = max(scale * x[i] + y[i], 0)."""
    # BEGIN SOLUTION
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets, mask=inside)  # [BLOCK]
    y = tl.load(y_pointer + offsets, mask=inside)  # [BLOCK]
    tl.store(result_pointer + offsets, tl.maximum(scale * x + y, 0.0), mask=inside)
    # END SOLUTION


def scale_add_relu(x, y, scale):
    """relu(scale * x + y) by one Triton kernel, in one launch, moving three tensors' bytes.

    Args:
        x, y: contiguous, float32 or float16, of one shape and dtype; any number of dimensions from 1, any length
            from 1, fewer than 2³¹ elements in all. They stay as they are.
        scale: a Python float of any sign: 0, or between 0.001 and 100 in size. scale * x fits the dtype too.

    Returns:
        a new tensor like x, at each call. Results up to the dtype's end are right, such as 60,000 in float16.
    """
    # BEGIN SOLUTION
    result = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    scale_add_relu_kernel[grid](x, y, result, scale, x.numel(), BLOCK=1024)
    return result
    # END SOLUTION


# %%
best_scale_add_relu = check("1.5", scale_add_relu).best

# %% [markdown]
# The next cell measures the gain. On a GPU it times your kernel against PyTorch's three. On a CPU it tries the same
# idea in PyTorch: it does all three steps on a piece that fits the cache before it begins the next piece.

# %%
product, total = torch.empty_like(x), torch.empty_like(x)


def unfused():
    torch.mul(x, 0.5, out=product)
    torch.add(product, y, out=total)
    torch.clamp(total, min=0.0, out=result)


def fused_in_the_cache(piece=2**18):
    for start in range(0, x.numel(), piece):
        part = slice(start, start + piece)
        torch.mul(x[part], 0.5, out=result[part])
        result[part].add_(y[part]).relu_()


threads = torch.get_num_threads()
torch.set_num_threads(1)  # on a CPU: sharing pieces this small among the cores costs more than it saves
three = measure(unfused)
one = measure((lambda: best_scale_add_relu(x, y, 0.5)) if on_gpu else fused_in_the_cache)
torch.set_num_threads(threads)
print(compared("three kernels", 7 * x.nbytes, three))
print(compared("fused", 3 * x.nbytes, one))
print(f"predicted gain 7/3 = 2.33, measured {three.median / one.median:.2f}")

# %% [markdown]
# The arithmetic did not get faster. The gain comes from the four crossings that the fused version leaves out.
#
# FlashAttention fuses attention, which is harder. The intermediate result is an $N \times N$ matrix that does not fit
# on the chip, and the softmax in the middle needs whole rows of it.
#
# ## Walking along the roofline · deeper
#
# The last kernel shows both sides of the roofline. It reads x once, applies `value = value * scale + bias` a number
# of times in registers, and writes once. Each of these multiply-adds is a *step*. With more steps the FLOPs grow
# while the bytes stay the same, so the kernel moves along the slope towards the roof. On the slope each further step
# should cost **nothing**, because the kernel waits for memory anyway.
#
# At how many steps does the time begin to grow on your machine? That number is the *turn*. Write down a guess. Then
# write the prediction as functions; the check judges them against the ceilings measured here.

# %%
# Exercise 1.6 · Where the multiply-add chain turns
def turning_steps(arithmetic_rate, bandwidth, item_bytes):
    """The number of multiply-adds for each element at which the chain takes as long to compute as to move.

    Args:
        arithmetic_rate: of multiply-adds, in FLOP/s.
        bandwidth: of the memory, in bytes/s.
        item_bytes: bytes of an element; each is read once and written once.

    Returns:
        the steps, as a number that need not be whole.
    """
    # BEGIN SOLUTION
    # Intensity of the chain: 2 * steps FLOPs over 2 * item_bytes bytes. It equals the balance point where it turns.
    return arithmetic_rate / bandwidth * item_bytes
    # END SOLUTION


def chain_seconds(elements, steps, arithmetic_rate, bandwidth, item_bytes):
    """The least time [s] of a chain of `steps` multiply-adds on each of `elements` elements, by the roofline."""
    # BEGIN SOLUTION
    compute = 2 * steps * elements / arithmetic_rate
    memory = 2 * item_bytes * elements / bandwidth
    return max(compute, memory)
    # END SOLUTION


def measured_turning_steps(steps, seconds):
    """Where a measured curve turns: the number of steps whose arithmetic alone takes as long as the floor.

    Args:
        steps: numbers of steps, increasing; the first is well below the turn and the last two are well above it.
        seconds: the time measured at each; the first one is the floor.

    Returns:
        the floor, divided by the time of one step: the slope between the last two points.
    """
    # BEGIN SOLUTION
    seconds_per_step = (seconds[-1] - seconds[-2]) / (steps[-1] - steps[-2])
    return seconds[0] / seconds_per_step
    # END SOLUTION


# %%
turning = check("1.6", turning_steps, chain_seconds, measured_turning_steps)
best_turning_steps, best_chain_seconds, best_measured_turning_steps = turning.best

predicted = best_turning_steps(here.fma_rate, here.copy_bandwidth, item_bytes=4)
print(f"{format_flop_rate(here.fma_rate)} and {format_bandwidth(here.copy_bandwidth)}: the chain should turn at "
      f"{predicted:.1f} steps")

# %% [markdown]
# Now measure the kernel. On a GPU the chain is a Triton kernel. On a CPU it is PyTorch working on pieces that stay in
# the cache. The grey line in the picture is your prediction. Other programs can only make a run slower, so the turn
# is read from the fastest tenth of the runs.
#
# On a GPU, expect a flat stretch and then a slope. On a CPU, expect a gentle slope from the first steps on.

# %%
from course_lib.figures.memory.turning_point import draw_turning_point
from course_lib.kernels.memory.fma_chain import fma_chain_work, run_fma_chain

length = 2**27 if on_gpu else 2**24
values, out = torch.rand(length, device=device), torch.empty(length, device=device)
corner = max(1.0, predicted)
steps = sorted({max(1, round(corner * 2.0**power)) for power in (-4, -3, -2, -1, 0, 1, 2, 3)})
repeats = 50 if on_gpu else 9
timings = [measure(partial(run_fma_chain, values, count, out=out), warmup=1, repeats=repeats) for count in steps]
seconds = [timing.low for timing in timings]
measured = best_measured_turning_steps(steps, seconds)
print(f"predicted {predicted:.1f} steps, measured {measured:.1f}: {measured / predicted:.2f} of the prediction")

draw_turning_point(
    steps, timings, predicted, measured,
    lambda count: best_chain_seconds(length, count, here.fma_rate, here.copy_bandwidth, 4),
)

# %% [markdown]
# On a GPU, some warps compute while others wait for memory, so the points follow the line closely. A CPU running
# PyTorch first fetches a piece and then computes on it. So it pays the *sum* of the two times, which near the corner
# is up to twice the larger one.
#
# The next cell shows the same points on the roofline. The corner tells you which optimisation is worth your time:
# left of it save bytes, right of it save FLOPs.

# %%
roofline_plot(here, [Measured(fma_chain_work(length, count), timing) for count, timing in zip(steps, timings)])

# %% [markdown]
# ## The first question, answered
#
# Chapter 00 asked what an H200 does while it multiplies 16.8 million float32 numbers by a constant. The kernel reads
# 4 bytes and writes 4 for each number, so it moves $2 \cdot 4 \cdot 16.8$ million = 134 MB. The datasheet states 4.8
# TB/s for an H200's memory; a copy was measured at 4.25 TB/s, reads and writes together. At that speed the 134 MB
# take 32 µs.
#
# The multiplications take half a microsecond, because the multiply-add units can do 33.5 · 10¹² of them in a second.
# So for 98 % of the time the arithmetic units wait for bytes. Better arithmetic cannot shorten that, but fewer bytes
# can. If you fuse this multiplication into the kernel before or after it, it costs you nothing.
#
# ## What production systems do
#
# **Compilers fuse what is easy.** `torch.compile` turns a chain of elementwise operations, with a reduction at its
# end, into one Triton kernel, much like your 1.5. It does not invent new algorithms, such as a softmax that needs no
# whole row. This course is about those.
#
# **Serving systems raise the intensity.** Generating one token multiplies every weight matrix by a single vector.
# That is one FLOP per byte in float16, while an H100 can do 295. So servers multiply the matrix by the vectors of
# many users at once, which reads the matrix only once. The attention to each user's own past cannot be shared like
# that, and chapters 05 to 08 deal with it.
#
# **Profilers draw this plot.** Nsight Compute shows each kernel on the GPU's roofline. When someone says "62 % of
# peak", ask which roof they mean.
#
# ## Papers
#
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for multicore
#   architectures*, Communications of the ACM 52(4), 2009.
# - A. Ivanov, N. Dryden, T. Ben-Nun, S. Li, T. Hoefler, *Data movement is all you need: a case study on optimizing
#   transformers*, MLSys 2021, arXiv 2007.00072.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness*, NeurIPS 2022, arXiv 2205.14135. Section 2 is this chapter in a page and a half.

# %%
progress()

# %% [markdown]
# **Next.** In [02 · Naive attention](02_naive_attention.ipynb) an $N \times N$ matrix crosses the memory bus four
# times: you write it and read it back, and you do that twice. You will see in milliseconds what that costs.
