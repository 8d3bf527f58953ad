# %% [markdown]
# # 01 · The memory hierarchy and the roofline
#
# **The question.** You run two sums over the same count of float32 numbers. Both do the same additions, millions of
# them, but one takes many times as long as the other. What takes the time?
#
# An H100 can do 989 TFLOP/s in float16: 989 · 10¹² floating-point operations (FLOPs) in a second. Its memory delivers
# 3.35 TB/s, which is 3.35 · 10¹² bytes in a second. So while it fetches *one byte*, it could do 989 / 3.35 = 295
# operations. Most of what a transformer does while it generates text needs fewer than ten operations for each byte.
# So the first question about a kernel is how much it moves, not how much it computes. In this chapter you learn to
# answer it: with a pencil before you write any code, then with a meter that counts bytes, then with a clock.
#
# You will count bytes and FLOPs (1.1), find the least time that an operation needs on a device (1.2), and write three
# kernels (1.3 to 1.5). Then you predict how many steps of arithmetic a fourth kernel can do for free while it waits
# for memory (1.6).
#
# **Time.** About three hours in all. The core path takes two hours at most. You can skip passages marked **Deeper**,
# since nothing outside them depends on them.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, interpreting, machine, progress, solution

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
# The next cell adds up the same count of numbers twice. In the first sum the numbers are neighbours in memory. In the
# second they lie 16 elements apart, like the numbers of one column in a matrix of 16 columns.
#
# **Predict:** how much longer will the second sum take?

# %%
def time_two_sums(length):
    storage = torch.ones(16 * length, device=device)
    return measure(storage[:length].sum, flush=True), measure(storage[::16].sum, flush=True)  # from memory, not a cache


length = 2**25 if on_gpu else 2**22
close, far = time_two_sums(length)
print(f"{length:,} additions each")
print(f"neighbours: {format_seconds(close.median)}")
print(f"16 apart:   {format_seconds(far.median)}, {far.median / close.median:.1f} times as long")

# %% [markdown]
# The second sum takes longer because memory does not deliver single numbers. A GPU fetches *sectors* of 32 bytes, and
# a CPU fetches *lines* of 64 bytes. When you need four bytes, the other 28 or 60 come along. The second sum uses only
# one number of each piece that it fetches. So it moves up to 8 times as many bytes on a GPU, and up to 16 times as
# many on a CPU. (On a CPU it may take far more than 16 times as long, because the CPU is worse at fetching such
# numbers ahead, and PyTorch adds them without vector instructions.)
#
# The number of additions made no difference, but the number of bytes did. This is the first rule of this course:
# **count the bytes that move, not the operations.**
#
# ## Where bytes wait
#
# A GPU is built from many copies of one unit, the *multiprocessor*; an H100 has 132. Each has arithmetic units and
# some fast memory of its own, and each program runs on one multiprocessor. Numbers on their way from the memory chips
# to the arithmetic pass through several stores. In the table, each store is faster than the one under it, and none is
# larger. Fast memory is small because it takes up area on the chip. Large memory lies off the chip, and every byte
# from there passes through a few thousand pins.
#
# | on an H100 | size | speed, all together | who decides what is in it |
# |---|---|---|---|
# | registers | 256 KiB on each of 132 multiprocessors, 33 MiB | above 100 TB/s | the compiler, from your values |
# | shared memory and L1 | 256 KiB on each, 33 MiB | about 30 TB/s | you, by the tiles you load; the hardware for L1 |
# | L2 cache | 50 MiB | 5 to 7 TB/s | the hardware |
# | HBM, "global memory" | 80 GiB | 3.35 TB/s | you: your tensors live here |
# | the host's memory, over PCIe | terabytes | 0.06 TB/s | your data loader |
#
# *Registers* hold the values that a program is computing with. *Shared memory* holds the tiles that a program works
# on. A *tile* is a block with two dimensions, for example 64 × 64 numbers of a matrix. *L1* is a cache in the rest of
# the same 256 KiB. The *L2 cache* serves all multiprocessors. *HBM* (high-bandwidth memory) is the GPU's main memory,
# and *PCIe* is its connection to the host.
#
# The speeds in the second and third row depend on how you measure them, and the datasheet states only the fourth. So
# the next cell measures your machine. The results are its *ceilings*, the highest speeds that a kernel can reach
# here, and the cost of a launch, which is the time to start one kernel.
#
# Close other programs first. The call takes some seconds, and the result is kept for every later chapter. If
# something reaches far more than 100 % of a ceiling later on, the ceiling was measured on a busy machine. In that
# case run `here = ceilings(refresh=True)` and go on.

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
# The memory has two speeds, because reading alone and copying use it differently. The *roof* of a plot is the larger
# of the two, because no kernel should be able to pass it. A *prediction* for a kernel that reads and writes uses the
# copy's speed, because a copy does the same.
#
# The next picture shows these speeds beside the stores that they belong to. If your GPU's datasheet states a figure,
# it stands next to the measured one. The best kernel gets about 90 % of the datasheet's bandwidth; the rest goes into
# refreshing the memory cells and switching the bus between reads and writes.

# %%
from course_lib.figures.memory.hierarchy import hierarchy_plot

hierarchy_plot(machine(), here)

# %% [markdown]
# ## Counting
#
# Two numbers describe an operation before any code exists: how much it computes and how much it has to move.
#
# **FLOPs** are floating-point operations. A multiply-add counts as two, everywhere in this course and on every
# datasheet. For a softmax we count four for each element: subtract the maximum, exp, add to the sum, divide.
# Comparisons are not counted.
#
# **Bytes** are what must cross the memory bus at the very least. Each input is read once and each output is written
# once. A poor kernel moves more, but we count the minimum.
#
# Take `x + y` on $n$ float32 numbers. It does $n$ additions. It reads $x$ and $y$ and writes the result, so it moves
# $3 \times 4\,n = 12\,n$ bytes. FLOPs divided by bytes is called the **arithmetic intensity**. Here it is $n / 12n =
# 1/12$ FLOP/byte.
#
# Now take a product of two $n \times n$ matrices in float16. It does $2n^3$ FLOPs and moves $3 \times 2\,n^2$ bytes,
# so its intensity is $n/3$ and grows with the size. At $n = 256$ it is 85 FLOP/byte. That is why accelerators are
# built for matrices. In the exercise you write such counts as functions.

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
# The next cell uses your four functions on one attention layer, step by step, among some simpler operations. The
# layer has a context of 8192 and 32 heads of dimension 128, in float16. Before you run the cell, guess: which of its
# two matrix products, $Q K^\top$ and probabilities × $V$, has an intensity above the 295 FLOP/byte that an H100 can
# do?

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
# matrix of $N \times N$, and each of its elements gets only $D = 128$ multiply-adds. The softmax is worse by a factor
# of a hundred.
#
# The last line is the same arithmetic, but there the $N \times N$ matrix never goes to memory. Its intensity is 4128
# FLOP/byte, 33 times as high. Chapters 02 to 04 show you how to get to that last line.
#
# ## The balance point
#
# Whether an operation waits for memory or for arithmetic depends on the device too. Divide the device's rate of
# arithmetic by its bandwidth, and you get its **balance point** in FLOP/byte. For the H100 it is 295. An operation
# with a lower intensity waits for memory. It is *memory-bound*, and a faster arithmetic unit would not help it. An
# operation with a higher intensity is *compute-bound*. In both cases the device moves bytes and computes at the same
# time, so the least time is the larger of the two:
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
# faster memory and nothing else. Its balance point went *down*, and every memory-bound kernel got 1.4 times faster
# without any change. Now write the balance point and the least time as functions.

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
# These two functions give you a bound for any operation on any device, even one that has only been announced. The
# next cell prints it for the operations above. Every line uses the float16 rate of the *tensor cores*, the units that
# multiply small matrices (an H100 multiprocessor has four). For `x + y` in float32 this rate is too high, because the
# ordinary units that do it are 15 to 30 times slower. But `x + y` is memory-bound all the same.
#
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
# on logarithmic axes. Below the balance point that rate is bandwidth × intensity, a slope. Above it, the limit is the
# rate of arithmetic, a flat roof. The two meet in a corner at the balance point. No kernel that goes to memory can
# lie above this line, and its distance below the line shows what there is to gain.
#
# The next cell draws the roofline of *your* machine, as measured, with some of PyTorch's operations on it. The copy
# does no FLOPs, so its intensity is 0, and a logarithmic axis has no place for 0. So the copy stands at the left
# edge, and if it lies on the slope there, it reaches the memory's full bandwidth. If two points nearly coincide, one
# number is moved aside, and a line leads back to its place.

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
# The picture tells you two things. First, the operations along the slope spend their time on bytes, so improving
# their arithmetic gains nothing. Second, the distance of each point from its roof shows how good it is. On a GPU the
# copy and the addition are near it. On a CPU the roof is often the speed of reading alone, which can be much faster
# than copying, so a kernel that also writes stays below it. If a point is far from its roof for no such reason,
# something can be gained, and this course teaches you to name it.
#
# ## Coalescing: what a load really fetches
#
# Now look at a single load. A GPU runs a program on many *threads*. 32 threads form a *warp* and execute each
# instruction together. By default a program has four warps, and a block's values are spread over their 128 threads.
#
# When a warp loads, the hardware looks at its 32 addresses together. It fetches each 32-byte sector that they fall
# into, and fetches it only once. If neighbouring threads read neighbouring elements, they share sectors. This is
# called *coalescing*. With float32, 32 neighbours need only 4 sectors.
#
# The picture shows one load of a warp at three *strides*. A stride is the distance from one element to the next,
# counted in elements. The warp's 32 threads are called lanes there, because each of them loads one position of the
# block.

# %%
from course_lib.figures.memory.coalescing import draw_sectors

draw_sectors(strides=(1, 2, 8))

# %% [markdown]
# The next kernel reads memory in the way that made the second sum slow. The only thing that differs between a good
# and a bad run is the number passed as `stride`.


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
# The next cell runs it at five strides. Without a GPU, the **traffic meter** counts every byte that the kernel asks
# for and the bytes of all the sectors that would have to come. With a GPU, the clock shows the same effect.
# **Predict** the ratio of the two counts for strides 1, 2, 4, 8 and 16 before you run it. Beyond which stride does it
# stop getting worse, and why?

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
# sectors, it cannot get worse than that. (On recent GPUs the memory itself prefers to deliver two sectors at a time,
# so 16 may cost a little more than 8.)
#
# **Deeper** (the core path goes on at *Vector add*). The stride also changes what the compiler can do. The next cell
# compiles the kernel for an H100, which works without one. First the compiler knows that the stride is 1, then it
# does not. Look at how many bytes one thread loads with one instruction.

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
# The block of 1024 is shared by 128 threads, so each thread has 8 floats to load. If the compiler can prove that four
# of them are neighbours, at an address divisible by 16, it fetches the four with one load of 16 bytes, the widest
# there is. If not, each float is a load of its own.
#
# Triton gives the compiler this knowledge at each launch. A stride equal to 1 is compiled in as a constant, and
# numbers and pointers divisible by 16 are marked as such. You need not do anything for it, as long as you pass
# strides and lengths as they are.
#
# ## Vector add
#
# Now it is your turn. In chapter 00 you mended a launcher and wrote a kernel with one load. This kernel has two
# loads, and it must work for any length. An input may be a view into something larger, so its elements can lie
# `x.stride(0)` apart.


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
        x, y: [length], float32 or float16 and alike, any length from 1, any strides, each its own.

    Returns:
        [length], contiguous, of the same dtype.
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
# **Predicted against measured.** Your kernel reads x once, reads y once and writes the result once. Divide those
# bytes by the copy's bandwidth, and you have a prediction of its time. The next cell compares it with the time of
# your kernel on a GPU, or of PyTorch's addition on a CPU, which moves the same bytes.

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
# A reduction makes something small out of something large, so nearly all its bytes are reads. For example,
# `x.sum(dim=1)` of a float32 matrix must read 4 bytes for each element and does one addition, an intensity of 1/4.
# The kernel has to do three things well:
#
# - Read each element once.
# - Keep the partial sums in registers, where they cost nothing, and in float32 even if the input is float16.
# - Find the elements by `x.stride()`, which holds two strides: from row to row and from column to column.
#
# The check counts your bytes. It allows $4 \cdot \text{rows} \cdot \text{columns}$ read and $4 \cdot \text{rows}$
# written, plus 5 %. So it notices a second pass over the matrix or a copy of it.
#
# You need some words that you have not met yet, all from [Triton's language
# reference](https://triton-lang.org/main/python-api/triton.language.html):
#
# | in the kernel | what it does |
# |---|---|
# | `tl.zeros([BLOCK], dtype=tl.float32)` | a block of zeros, in registers |
# | `for start in range(0, columns, BLOCK):` | a loop as in Python; its bounds may be numbers known only at run time |
# | `tl.load(pointers, mask=inside, other=0.0)` | a lane with its mask off gets `other`, else an undefined value |
# | `values.to(tl.float32)` | the block in another dtype |
# | `tl.sum(block, axis=0)` | reduces a block to one number, or a tile along one of its axes |
# | `tl.store(result_pointer + row, number)` | one pointer and one number, no block and no mask |


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
    """The sum of each row, reading x once. You may change the kernel's parameters.

    Args:
        x: [rows, columns], float32 or float16, any strides, at least one row and one column, rows of any length.

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
# **Deeper** (the core path goes on at *Fusion foretold*). Your kernel asks for each byte once, but the memory may
# still have to deliver more. Take a matrix, and then the same matrix stored column by column, so that the elements of
# a row lie far apart. The kernel asks for the same bytes of both. **Predict** what the memory has to deliver for
# each.

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
# of the eight, and the programs of the other seven rows fetch the same sector again. (The cache may still hold it for
# them, or not.) The remedy is to give each program a tile of many rows, so that neighbouring threads read
# neighbouring elements. The course's own kernel does that. Reading it, in `course_lib/kernels/memory/row_sum.py`, is
# worth five minutes.
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
# That makes seven tensors that cross the bus. Four of these crossings carry the product and the sum, which nobody
# needs in the end. If one kernel does all three steps, it can keep them in registers, and then only three tensors
# move. Joining kernels in this way is called *fusion*.
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
            from 1.
        scale: a Python float of any sign.

    Returns:
        a tensor like x.
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
# idea in PyTorch, by doing all three steps on a piece that fits the cache before it begins the next. Both versions
# write into tensors that exist already, so only the traffic differs.

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
# The arithmetic did not get faster. The gain comes from the four transfers that the fused version leaves out.
#
# FlashAttention is the same idea in a harder place. What it has to keep on the chip is an $N \times N$ matrix that
# does not fit there, and the softmax in the middle needs whole rows of it. In the table of operations above, this
# idea is the difference between the line *attention: scores* and the last one.
#
# ## Walking along the roofline
#
# **Deeper** (the core path goes on at *The first question, answered*). The last kernel shows both sides of the
# roofline. It reads x once, applies `value = value * scale + bias` a number of times in registers, and writes once.
# Each of these multiply-adds is a *step*. With more steps the FLOPs grow while the bytes stay the same, so the kernel
# moves from the slope to the roof. On the slope each further step should cost **nothing**, because the kernel waits
# for memory anyway.
#
# At how many steps does the time begin to grow on your machine? That number is the *turn*. Write down a guess first.
# In the exercise you write the prediction as functions, and the check judges it against the ceilings measured here.
# After that you measure the kernel itself.

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
# Now measure the kernel. On a GPU the chain is a Triton kernel, and its values stay in registers. On a CPU it is
# PyTorch working on pieces that stay in the cache. The grey line in the picture is your prediction and does not use
# the measured points. A disturbance can only make a run slower, so the turn is read from the fastest tenth of the
# runs.
#
# On a GPU, expect a flat stretch and then a slope. On a CPU, expect a slope from the first steps on, gentle at first.
# There the steps before the corner are not free, and the text below the picture says why.

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
# is up to twice the larger one. The roofline is only a bound. How near a machine comes to it depends on how well it
# moves and computes at the same time.
#
# The next cell shows the same points on the roofline. They climb the slope, turn at the corner and run along under
# the roof of the multiply-adds. The corner tells you which optimisation is worth your time: left of it save bytes,
# right of it save FLOPs.

# %%
roofline_plot(here, [Measured(fma_chain_work(length, count), timing) for count, timing in zip(steps, timings)])

# %% [markdown]
# ## The first question, answered
#
# Chapter 00 asked what an H200 does while it multiplies 16.8 million float32 numbers by a constant. Start with the
# bytes. The kernel reads 4 bytes and writes 4 for each number, so it moves $2 \cdot 4 \cdot 16.8$ million = 134 MB.
# An H200's memory was measured to copy 4.25 TB/s, reads and writes together; its datasheet states 4.8. At 4.25 TB/s
# the 134 MB take 32 µs.
#
# The multiplications take half a microsecond, because the multiply-add units can do 34 · 10¹² of them in a second,
# one each in every cycle. The intensity is 1/8 FLOP/byte, two orders of magnitude left of the corner.
#
# So for 98 % of the time the arithmetic units wait for bytes. Better arithmetic cannot shorten that, but fewer bytes
# can. If you fuse this multiplication into the kernel before or after it, it costs you nothing.
#
# ## What production systems do
#
# **Compilers fuse what is easy.** `torch.compile` turns a chain of elementwise operations, with a reduction at its
# end, into one Triton kernel, much like your 1.5. It does not invent other algorithms, such as a softmax that needs
# no whole row. Those are written by hand, and this course is about them.
#
# **Serving systems raise the intensity of what they cannot shrink.** Generating one token multiplies every weight
# matrix by a single vector. That is one FLOP per byte in float16, while an H100 can do 295. So servers collect the
# requests of many users and multiply the matrix by all their vectors at once, which reads the matrix only once. The
# attention to each user's own past cannot be shared like that, and chapters 05 to 08 deal with it.
#
# **Profilers draw this plot.** Nsight Compute shows each kernel of a program on the roofline of the GPU, with a slope
# for each level of the hierarchy. When someone says "62 % of peak", ask which roof they mean.
#
# ## Papers
#
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model for multicore
#   architectures*, Communications of the ACM 52(4), 2009. The plot.
# - A. Ivanov, N. Dryden, T. Ben-Nun, S. Li, T. Hoefler, *Data movement is all you need: a case study on optimizing
#   transformers*, MLSys 2021, arXiv 2007.00072. It counts a transformer's training step operator by operator.
# - Z. Jia, M. Maggioni, B. Staiger, D. Scarpazza, *Dissecting the NVIDIA Volta GPU architecture via
#   microbenchmarking*, 2018, arXiv 1804.06826. How to measure what no datasheet states.
# - T. Dao, D. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: fast and memory-efficient exact attention with
#   IO-awareness*, NeurIPS 2022, arXiv 2205.14135. Section 2 is this chapter in a page and a half.

# %%
progress()

# %% [markdown]
# **Next.** In [02 · Naive attention](02_naive_attention.ipynb) you write an $N \times N$ matrix to memory and read it
# back, and you do that twice. Those are four crossings of the memory bus, and you will see in milliseconds what they
# cost.
