"""The kernels that chapter 15 shows the profile of: one well made, and seven that each wait for something else.

They are written to be slow in one known way, so that a reader can check a finding against the cause. Each workload says
what its function must do at least: bytes of distinct elements, and FLOPs.
"""

import dataclasses
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from course_lib.kernels.decode.attention import decode_attention
from course_lib.kernels.memory.copy import copy
from course_lib.kernels.memory.strided_copy import strided_copy


@dataclasses.dataclass(frozen=True)
class Workload:
    """A function of one kernel, and the least that any kernel must do for its result."""

    run: Callable[[], object]
    bytes: int
    flops: float = 0.0
    unit: str = "fma"  # who does the arithmetic, as in `course_lib.hardware.roofline.Work`


@triton.jit
def one_warp_softmax_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(x_pointer + row + offsets, mask=offsets < columns, other=float("-inf"))  # [BLOCK]
    weights = tl.exp(x - tl.max(x, 0))  # [BLOCK]
    tl.store(out_pointer + row + offsets, weights / tl.sum(weights, 0), mask=offsets < columns)


@triton.jit
def histogram_kernel(values_pointer, counts_pointer, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    values = tl.load(values_pointer + offsets, mask=inside, other=0)  # [BLOCK]
    tl.atomic_add(counts_pointer + values, 1, mask=inside)


@triton.jit
def many_exponentials_kernel(x_pointer, out_pointer, length, ROUNDS: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < length  # [BLOCK]
    x = tl.load(x_pointer + offsets, mask=inside, other=0.0)  # [BLOCK]
    for _ in tl.static_range(ROUNDS):
        x = tl.exp2(-x)
    tl.store(out_pointer + offsets, x, mask=inside)


@triton.jit
def one_load_in_flight_kernel(x_pointer, out_pointer, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    total = 0.0
    for start in tl.range(0, columns, BLOCK, num_stages=1, loop_unroll_factor=1):
        total += tl.sum(tl.load(x_pointer + row + start + tl.arange(0, BLOCK)), 0)  # [BLOCK]
    tl.store(out_pointer + tl.program_id(0), total)


def a_copy() -> Workload:
    """256 MB copied by the course's kernel."""
    x = torch.ones(2**26, device="cuda")
    out = torch.empty_like(x)
    return Workload(lambda: copy(x, out), 2 * x.numel() * 4)


def every_eighth_element() -> Workload:
    """One float32 in eight is read: each of them costs a sector of 32 bytes."""
    x = torch.ones(2**26, device="cuda")[::8]
    out = torch.empty(x.numel(), device="cuda")
    return Workload(lambda: strided_copy(x, out), 2 * x.numel() * 4)


def a_row_in_one_warp() -> Workload:
    """Softmax of rows of 16,384 numbers, each row held by 32 threads: 512 numbers a thread, of 255 registers."""
    x = torch.randn(4096, 16384, device="cuda")
    out = torch.empty_like(x)
    return Workload(
        lambda: one_warp_softmax_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=16384, num_warps=1),
        2 * x.numel() * 4,
        5.0 * x.numel(),
    )


def one_split() -> Workload:
    """Decode of one sequence of 32,768 tokens with 8 key heads and no splits: 8 programs on the whole GPU."""
    query = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16)
    keys, values = (torch.randn(1, 8, 32768, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.full((1,), 32768, device="cuda", dtype=torch.int32)
    return Workload(
        lambda: decode_attention(query, keys, values, lengths, splits=1, validate=False),
        2 * keys.numel() * 2,
        4.0 * 32 * 32768 * 128,
        "bfloat16",
    )


def a_matrix_product() -> Workload:
    """8192³ in bfloat16, by the library that PyTorch calls."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return Workload(lambda: torch.mm(a, b, out=out), 3 * a.numel() * 2, 2.0 * 8192**3, "bfloat16")


def atomic_counts() -> Workload:
    """A histogram of 2²⁴ numbers in 16 bins, one atomic addition a number."""
    values = torch.randint(0, 16, (2**24,), device="cuda", dtype=torch.int32)
    counts = torch.zeros(16, device="cuda", dtype=torch.int32)
    return Workload(
        lambda: histogram_kernel[(triton.cdiv(values.numel(), 1024),)](values, counts, values.numel(), BLOCK=1024),
        values.numel() * 4 + 2 * counts.numel() * 4,
    )


def exponentials() -> Workload:
    """128 exponentials of each of 2²⁴ numbers: the special-function units, of which there are few."""
    x = torch.rand(2**24, device="cuda")
    out = torch.empty_like(x)
    grid = (triton.cdiv(x.numel(), 1024),)
    return Workload(
        lambda: many_exponentials_kernel[grid](x, out, x.numel(), ROUNDS=128, BLOCK=1024),
        2 * x.numel() * 4,
        128.0 * x.numel(),
    )


def one_load_in_flight() -> Workload:
    """Rows summed 512 bytes at a time by one warp on each multiprocessor, which waits for each load."""
    x = torch.ones(132, 2**17, device="cuda")
    out = torch.empty(132, device="cuda")
    return Workload(
        lambda: one_load_in_flight_kernel[(132,)](x, out, x.shape[1], BLOCK=128, num_warps=1),
        x.numel() * 4,
        1.0 * x.numel(),
    )


WORKLOADS = {
    function.__name__: function
    for function in (
        a_copy,
        every_eighth_element,
        a_row_in_one_warp,
        one_split,
        a_matrix_product,
        atomic_counts,
        exponentials,
        one_load_in_flight,
    )
}
