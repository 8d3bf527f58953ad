"""The kernels that find a GPU's ceilings. Each keeps one thing busy and everything else idle.

They stand apart from the chapters' kernels, so that a chapter can be measured against them.
"""

import triton
import triton.language as tl


@triton.jit
def nothing_kernel():
    """Does nothing: its time is the cost of a launch."""


@triton.jit
def read_kernel(x_pointer, out_pointer, rounds, BLOCK: tl.constexpr):
    """Reads `rounds` blocks of x per program, writes one number: as good as only reading."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(rounds):
        offsets = (program * rounds + index) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        total += tl.load(x_pointer + offsets)
    tl.store(out_pointer + program, tl.sum(total, axis=0))


@triton.jit
def reread_kernel(
    x_pointer, out_pointer, rounds, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr, CACHE: tl.constexpr
):
    """Reads a window of BLOCKS blocks over and over; BLOCKS is a power of two.

    Program p starts at block p * STEP. A window of some MiB, read past the L1 (CACHE ".cg"), measures the L2; one of a
    few KiB (CACHE ".ca") measures what lies on each multiprocessor.
    """
    program = tl.program_id(0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for index in range(rounds):
        block = (program * STEP + index) & (BLOCKS - 1)
        total += tl.load(x_pointer + block * BLOCK + tl.arange(0, BLOCK), cache_modifier=CACHE)
    tl.store(out_pointer + program, tl.sum(total, axis=0))


@triton.jit
def multiply_add_kernel(x_pointer, out_pointer, rounds, scale, bias, BLOCK: tl.constexpr):
    """16 dependent multiply-adds a round on values in registers."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    value = tl.load(x_pointer + offsets)
    for _ in range(rounds):
        for _ in tl.static_range(16):
            value = tl.fma(value, scale, bias)
    tl.store(out_pointer + offsets, value)
