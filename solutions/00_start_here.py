# %% [markdown]
# # 00 · Start here
#
# **The question.** Multiplying 16 million float32 numbers by a constant takes 16 million multiplications. The
# arithmetic units of an H200 do that many in half a microsecond. The kernel takes 32 µs at best, however it is
# written. What does the chip do for the other 98 % of the time?
#
# You will have an answer with numbers at the end of chapter 01. This first notebook takes twenty minutes and shows what
# you work with: your machine, a kernel, the check that judges what you write, and what happens when it goes wrong.
#
# Run the cells from top to bottom with Shift+Enter.

# %%
# course_lib first: before Triton is imported it decides whether kernels run on a GPU or in the interpreter.
from course_lib import check, default_device, hint, machine, progress, solution

import torch
import triton
import triton.language as tl

# %% [markdown]
# ## Your machine
#
# Where there is an NVIDIA GPU from the T4 on, kernels are compiled for it and run there. Where there is none, they run
# in Triton's interpreter: the same source and, but for a few things that a check names, the same results; one program
# after the other on the CPU, about half a millisecond for each. The interpreter is Python and also runs what no GPU
# can, a `break` in a loop for one. So a check that finds the numbers right has Triton's compiler, which needs no GPU,
# read the kernels too. You can then learn to write kernels and to count what they move. What you cannot do is time
# them, and this course never pretends otherwise: without a GPU, timings are taken of PyTorch on your CPU, whose memory
# obeys the same laws at a fraction of the speed.
#
# `doctor()` says which of the two it is, and what to do about anything that is not as it should be.

# %%
from course_lib.hardware.doctor.report import doctor

doctor()

# %% [markdown]
# ## A kernel
#
# A kernel is a function that many *programs* run at once, each on its own piece of the data. The pieces are *blocks* of
# consecutive elements. Here a vector of 10 elements is cut into blocks of 4:

# %%
from course_lib.figures.memory.blocks import draw_blocks

draw_blocks(length=10, block=4)

# %% [markdown]
# A program learns one thing from the outside, its number, and works out everything else from it: which elements are
# mine? Program 2 finds that two of its four positions lie past the end. It must neither read nor write there, and says
# so with a *mask*. (A program 3 would find all of its positions past the end and do nothing. One program too many is
# harmless; one too few leaves elements out.)
#
# Here is the whole of it for `result = factor * x`, first the kernel, then the function that launches it. Four lines of
# the kernel do what all kernels of this course do: find the offsets, mask, load, store.

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
# A tensor that is passed at the launch arrives in the kernel as a bare pointer to its first element. There is no
# `x.shape` and no `x[i]` in there, which is why the length is handed over as well. `tl.load` and `tl.store` take a
# pointer for each element: `x_pointer + offsets` is a block of 256 addresses. A lane whose mask is off reads nothing
# and writes nothing, and the value it holds in between means nothing.
#
# The kernel's `BLOCK` is a parameter, a `tl.constexpr`, which is a number that the compiler knows; `tl.arange` needs a
# power of two. The launcher passes it, and that this cell's global has the same name is a convenience: `BLOCK=256`
# would do as well. The square brackets hold the *grid*, how many programs there are. It is a tuple of up to three
# numbers, hence the comma in `(programs,)`, and `tl.program_id(0)` is a program's number along the first of them.
#
# On 512 elements the result is right to the last bit. That is how most wrong kernels look to the person who wrote them.
#
# ## A check that fails
#
# `check` takes an exercise's number and your function. It draws new inputs each time, chosen to be unkind: one element,
# a prime number of them, one more or less than a block, huge values, in later chapters odd strides too. Your code runs
# in a process of its own and is compared with a float64 result. Predict first: which of the cases will this one get
# wrong?

# %%
check("0.1", first_try)

# %% [markdown]
# Read the card from the top. The first lines say in which case it went wrong, and where in the result. *Likely cause*
# is there when what came out is what a known mistake makes of these inputs: it is told from the results and from what
# the kernel read and wrote, not from the source, which the check does not look at. Where no known mistake fits, it is
# left out. The strip shows the wrong elements in orange. Below it stands each case with its own outcome.
#
# The result's memory is filled with NaN before your kernel sees it, so an element that no program writes cannot look
# right by accident. On a GPU each case runs up to twenty times with the same inputs: programs run side by side there,
# and a result that depends on which of them is first is not right.
#
# ## A check that passes
#
# Now yours. An exercise's cell begins with its number. You replace the comment `YOUR CODE HERE` and the line below it,
# a `raise` or a `pass`, by as many lines as you need. Keep the function's name. The cell has to stand alone, since it
# is sent to the check by itself; `torch`, `triton`, `tl`, `np`, `math` and `F` are there without an import.
#
# Only one line is missing in this one. (`triton.cdiv` is made for launchers and `tl.cdiv` for kernels. In a launcher
# the interpreter takes either; on a GPU, and in a check, the second raises an error.)

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
        factor: a number.

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
# `check(...).best` is your function once it has passed, and the course's own until then. So the cells further down work
# whether you have solved the exercise or not, and you can read on and come back.
#
# Taking more than a minute? `hint("0.1")` gives a nudge, and each further call a stronger one. Remove the `#` to ask.

# %%
# hint("0.1")

# %% [markdown]
# `solution("0.1")` shows the course's answer. Looking costs nothing and is remembered; writing it yourself is what you
# came for. Every version that you check is kept, so nothing you try is ever lost.
#
# ## Predicted and measured
#
# Before each measurement of this course you write down what you expect, in bytes and seconds. For 16 Mi float32
# numbers the kernel reads 67 MB and writes 67 MB. The cell below times it: your kernel on a GPU, PyTorch's own
# multiplication on a CPU, where Triton's interpreter would be timing Python. Which of your machine's speeds do you
# expect to see, that of its arithmetic or that of its memory?

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
# Compare the last line with what the device can compute: about 60 TFLOP/s in float32 on an H200, 8 TFLOP/s on a T4,
# some tens to hundreds of GFLOP/s on a CPU. The multiplications are hardly noticed. The line above it is close to the
# speed of the memory, and chapter 01 measures how close.
#
# ## What a crash looks like
#
# A kernel works with bare addresses. Nothing keeps it from reading past the end of a tensor, and on a GPU an illegal
# access normally ends your session: every tensor is gone and the notebook must be restarted. Here, small cases run
# first where every access is watched. This answer has no mask:


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
# The card names the tensor, the line of the cell, the program and the elements. And when an answer really does bring
# its process down, or never comes to an end, it is not your notebook's process:


# %%
# Wrong on purpose: reads address 0, which belongs to no one. The operating system ends a process for that.
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
# This one you write yourself, kernel and launcher: the vector backwards. The kernel has the four lines of the one
# above, and one of them reads somewhere else. There is no global `BLOCK` in this cell: your launcher passes the number,
# `BLOCK=256` say, by the parameter's name. Before you begin, answer on paper: for position `i` of the result, which
# element of `x` is it? And is the mask about the position written or the position read?


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
# The outcomes that a check can have: *passed*; *not right yet*; *not attempted*; *raised an error*; *took too long*;
# *crashed its worker*; and *not on this machine*, which says what would be needed. `progress()` shows them all, over
# every chapter. It is kept in the folder `.course` beside the notebooks, together with each version you have checked.

# %%
progress()

# %% [markdown]
# A terminal offers the same: `python -m course_lib check notebooks/00_start_here.ipynb` checks a whole notebook,
# `python -m course_lib progress` prints where you stand, and `python -m course_lib reset 00` gives you a fresh
# notebook and keeps a dated copy of yours. (Close the notebook's tab before a reset, or its autosave writes the old one
# back.)
#
# If somebody grades your work, `from course_lib import submit` and then `submit("00")` judge this chapter's exercises
# once more and write one small file to hand in.
#
# **Next.** In [01 · The memory hierarchy and the roofline](01_memory_hierarchy_and_roofline.ipynb) you count what a
# kernel moves, measure what your machine can do, and find out what the chip does with the other 98 % of the time.
