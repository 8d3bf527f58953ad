# %% [markdown]
# # 00 · Start here
#
# **The question.** You multiply 16 million float32 numbers by a constant. The arithmetic units of an H200 can do 16
# million multiplications in half a microsecond. But the kernel takes at least 32 µs, no matter how you write it. What
# does the chip do for the other 98 % of the time?
#
# Chapter 01 ends with the answer. In this notebook you meet your machine, a first kernel, the check that judges it,
# and what happens when something goes wrong.
#
# **Time.** About 40 minutes, and all of it is needed later. From chapter 01 on, a heading that ends in **· deeper**
# marks a section that you can skip. Run the cells from top to bottom with Shift+Enter.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, machine, progress, solution

import torch
import triton
import triton.language as tl

# %% [markdown]
# ## Your machine
#
# The course runs with or without a GPU. If your machine has an NVIDIA GPU, a T4 or newer, your kernels are compiled
# for it and run on it. If it has none, they run in Triton's interpreter, which executes the same source code in
# Python on your CPU. The interpreter also accepts code that no GPU can run, such as a `break` in a loop. So without a
# GPU, a check also runs Triton's compiler on your kernels, which needs no GPU.
#
# Without a GPU you can write kernels and count the bytes that they move, but you cannot time them. The course then
# times PyTorch on your CPU, because a CPU's memory follows the same rules, only slower.
#
# The next cell says whether your kernels run on a GPU or in the interpreter. If something is wrong, it tells you what
# to do.

# %%
from course_lib.hardware.doctor.report import doctor

doctor()

# %% [markdown]
# ## A kernel
#
# A kernel is a function written for a GPU. You write it once, and the GPU runs many copies of it at the same time.
# Triton calls each copy a *program*. Every program works on its own piece of the data, a *block* of consecutive
# elements.
#
# The picture shows a vector of 10 elements cut into blocks of 4, one block for each of three programs.

# %%
from course_lib.figures.memory.blocks import draw_blocks

draw_blocks(length=10, block=4)

# %% [markdown]
# All programs run the same code. Each one has a number, and from that number it computes which elements belong to it.
# In the picture, program 2 gets positions 8 to 11, but the vector ends at position 9. So it must neither read nor
# write at positions 10 and 11. A *mask* prevents that. It is a block that is true where a position exists and false
# where it does not.
#
# The next cell holds all the code for `result = factor * x`. First comes the kernel, then the *launcher*, an ordinary
# Python function that starts the kernel. Starting it is called a *launch*. The kernel's four lines do what every
# kernel of this course does: compute the offsets (the positions that the program owns), compute the mask, load, and
# store. The cell after it compares the result with PyTorch's on 512 elements.

# %%
# A first try. It has a mistake in it; see whether you find it before the check does.
BLOCK = 256


@triton.jit
def first_try_kernel(x_pointer, result_pointer, factor, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] the positions that this program owns
    inside = offsets < length  # [BLOCK] the mask: which of them exist
    values = tl.load(x_pointer + offsets, mask=inside)  # [BLOCK]
    tl.store(result_pointer + offsets, values * factor, mask=inside)


def first_try(x, factor):
    programs = x.numel() // BLOCK
    result = torch.empty_like(x)
    first_try_kernel[(programs,)](x, result, factor, x.numel(), BLOCK=BLOCK)
    return result


# %%
x = torch.randn(512, device=default_device())
torch.equal(first_try(x, 3.0), 3.0 * x)

# %% [markdown]
# Four things in this code look unlike PyTorch:
#
# - **Pointers.** When you pass a tensor to a kernel, only a *pointer* arrives there, the address of its first
#   element. The kernel has no `x.shape` and no `x[i]`, so the launcher passes the length as well. `tl.load` and
#   `tl.store` take one address for each element: `x_pointer + offsets` is a block of 256 addresses.
# - **Masks.** Where the mask is false, nothing is read and nothing is written. After such a load, the value at that
#   position is undefined.
# - **Constants.** `BLOCK` is a `tl.constexpr`, a number that the compiler knows. `tl.arange` needs such a number, and
#   it must be a power of two. The launcher passes it as `BLOCK=BLOCK`; `BLOCK=256` would work too.
# - **The grid.** The square brackets hold the *grid*, the number of programs to start. It is a tuple of up to three
#   numbers, hence the comma in `(programs,)`. `tl.program_id(0)` is a program's number along the first of them.
#
# On 512 elements the result is right to the last bit. But one input proves little: most wrong kernels get the first
# one right.
#
# ## A check that fails
#
# `check` takes an exercise's number and your function. It draws new inputs each time, chosen to be difficult: one
# element, a prime number of elements, one more or less than a block, huge values. It compares your result with one
# computed in float64.
#
# **Predict** first: in which of the cases will this function be wrong?

# %%
check("0.1", first_try)

# %% [markdown]
# Read the card from the top. The first lines say in which case the result was wrong, and where in the result.
#
# *Likely cause* names a known mistake that would produce this result from these inputs. If no known mistake fits, the
# line is left out. The strip shows the wrong elements in orange, and below it every case has its outcome.
#
# Before your kernel runs, the check fills the result's memory with NaN, so an element that no program writes cannot
# be right by accident. A result that depends on the order of the programs counts as wrong too, so on a GPU each case
# runs up to twenty times.
#
# ## A check that passes
#
# Now it is your turn. An exercise's cell begins with its number. Replace the comment `YOUR CODE HERE` and the line
# below it, a `raise` or a `pass`, with as many lines as you need. Keep the function's name. The check gets this cell
# alone, so the cell has to work on its own. You can use `torch`, `triton`, `tl`, `np`, `math` and `F` without
# importing them.
#
# Here only one line is missing. To divide and round up, use `triton.cdiv` in a launcher. (`tl.cdiv` is for kernels.
# In a launcher it raises an error on a GPU and in a check.)

# %%
# Exercise 0.1 · Scale a vector of any length
BLOCK = 256


@triton.jit
def scale_kernel(x_pointer, result_pointer, factor, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    values = tl.load(x_pointer + offsets, mask=inside)  # [BLOCK]
    tl.store(result_pointer + offsets, values * factor, mask=inside)


def scale(x, factor):
    """factor * x.

    Args:
        x: [length] float32, contiguous, any length from 1.
        factor: a number, an int or a float.

    Returns:
        [length] float32, a new tensor.
    """
    # How many programs does it take to cover every element?
    # BEGIN SOLUTION
    programs = triton.cdiv(x.numel(), BLOCK)  # rounds up: the last block may be filled in part
    # END SOLUTION
    result = torch.empty_like(x)
    scale_kernel[(programs,)](x, result, factor, x.numel(), BLOCK=BLOCK)
    return result


# %%
best_scale = check("0.1", scale).best

# %% [markdown]
# `check(...).best` is your function once it has passed. Until then it is the course's own, so the later cells run
# anyway.
#
# If you are stuck for more than a minute, `hint("0.1")` gives you a nudge, and each further call a stronger one.
# Remove the `#` to see it.

# %%
# hint("0.1")

# %% [markdown]
# `solution("0.1")` shows the course's answer. Looking costs nothing, but the course records it. It also keeps every
# version that you check.
#
# ## Predicted and measured
#
# Before each measurement in this course you write down what you expect, in bytes and seconds. Here is the first one.
# For 16 Mi float32 numbers (2²⁴ of them, at 4 bytes each) the kernel reads 67 MB and writes 67 MB.
#
# The next cell times your kernel on a GPU, or PyTorch's own multiplication on a CPU. It prints two rates: bytes moved
# per second and multiplications per second. **Predict:** which of the two will be close to the most that your machine
# can do?

# %%
from course_lib.hardware.timing import measure
from course_lib.hardware.units import format_bandwidth, format_bytes, format_flop_rate, format_seconds

length = 2**24
x, result = (torch.randn(length, device=default_device()) for _ in range(2))
if machine().tier == "none":
    what, timing = "PyTorch's multiplication, on the CPU", measure(lambda: torch.mul(x, 3.0, out=result))
else:
    what, timing = "the Triton kernel, on the GPU", measure(lambda: best_scale(x, 3.0))
bytes_moved = 2 * x.nbytes
print(f"{what}: {format_seconds(timing.median)}, "
      f"with a spread from {format_seconds(timing.low)} to {format_seconds(timing.high)}")
print(f"{format_bytes(bytes_moved)} moved:             {format_bandwidth(timing.bandwidth(bytes_moved))}")
print(f"{length / 1e6:.1f} million multiplications: {format_flop_rate(timing.rate(length))}")

# %% [markdown]
# The bytes are close to the memory's limit; chapter 01 measures how close. The multiplications are far from theirs.
# An H200 can do about 60 TFLOP/s in float32, a T4 8 TFLOP/s, and a CPU tens to hundreds of GFLOP/s. (A FLOP is one
# floating-point operation, and 1 TFLOP/s is 10¹² of them per second.)
#
# ## What a crash looks like
#
# A kernel works with plain addresses, and nothing stops it from reading past the end of a tensor. On a GPU such an
# illegal access normally ends your session: you lose every tensor and have to restart the notebook.
#
# The check prevents that: it runs small cases first and watches every access. The next answer has no mask:


# %%
# Wrong on purpose: nothing stops the last block at the vector's end.
@triton.jit
def unmasked_kernel(x_pointer, result_pointer, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    tl.store(result_pointer + offsets, tl.load(x_pointer + offsets) * factor)


def unmasked(x, factor):
    result = torch.empty_like(x)
    unmasked_kernel[(triton.cdiv(x.numel(), 256),)](x, result, factor, BLOCK=256)
    return result


check("0.1", unmasked)

# %% [markdown]
# The card names the tensor, the line of the cell, the program and the elements.
#
# An answer can also crash, or never finish. The next two cells show one of each. Both run in the check's own process,
# so your notebook goes on. (The second takes longer, because the check waits for its time limit.)


# %%
# Wrong on purpose: reads address 0, which no process may read. The operating system ends a process that does.
def wild(x, factor):
    import ctypes

    return ctypes.string_at(0)


check("0.1", wild)


# %%
# Wrong on purpose: `start` never grows, so the loop never ends.
def endless(x, factor):
    result, start = torch.empty_like(x), 0
    while start < x.numel():
        result[start] = x[start] * factor
    return result


check("0.1", endless)

# %%
x[:3]  # still here

# %% [markdown]
# ## Your first kernel
#
# This time you write both parts, the kernel and the launcher. They turn a vector backwards. The kernel has four lines
# again, but one of them reads somewhere else. This cell has no global `BLOCK`, so your launcher passes the number by
# the parameter's name, for example `BLOCK=256`.
#
# First answer two questions on paper. Which element of `x` belongs at position `i` of the result? And is the mask
# about the position that you write or the position that you read?


# %%
# Exercise 0.2 · Reverse a vector
@triton.jit
def reverse_kernel(x_pointer, result_pointer, length, BLOCK: tl.constexpr):
    """Writes one block of the result: result[i] = x[length - 1 - i]."""
    # BEGIN SOLUTION
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK] positions of the result
    inside = offsets < length  # [BLOCK] where i is inside, so is length - 1 - i
    values = tl.load(x_pointer + length - 1 - offsets, mask=inside)  # [BLOCK]
    tl.store(result_pointer + offsets, values, mask=inside)
    # END SOLUTION


def reverse(x):
    """The elements of x in reverse order, by a Triton kernel.

    Args:
        x: [length] float32, contiguous, any length from 1.

    Returns:
        [length] float32, a new tensor.
    """
    # BEGIN SOLUTION
    result = torch.empty_like(x)
    reverse_kernel[(triton.cdiv(x.numel(), 256),)](x, result, x.numel(), BLOCK=256)
    return result
    # END SOLUTION


# %%
best_reverse = check("0.2", reverse).best
best_reverse(torch.arange(10.0, device=default_device()))

# %% [markdown]
# ## Where you stand
#
# A check has seven possible outcomes: *passed*; *not right yet*; *not attempted*; *raised an error*; *took too long*;
# *crashed its worker*, when the process that ran your code died; and *not on this machine*, which says what is
# needed.
#
# `progress()` shows them for each chapter that you began, and what is open next. They are kept in the folder `.course`
# beside the notebooks.

# %%
progress()

# %% [markdown]
# You can also work from a terminal:
#
# - `python -m course_lib check notebooks/00_start_here.ipynb` checks a whole notebook.
# - `python -m course_lib reset 00` gives you a fresh one and keeps a dated copy of yours. Close the notebook's tab
#   first, or its autosave writes the old one back.
#
# If somebody grades your work, run `from course_lib import submit` and then `submit("00")`. It judges this chapter
# once more and writes a small file to hand in.
#
# **Next.** In [01 · The memory hierarchy and the roofline](01_memory_hierarchy_and_roofline.ipynb) you count the
# bytes that a kernel moves, and find out what the chip does for the other 98 % of the time.
