"""How kernels of different GPUs wait for each other: counters that one rank alone writes and another one reads.

A counter lives in the memory of the rank that waits, and says how often its writer has come so far. It only grows, so
nobody sets it back, and a signal that comes early is kept. Each program of a launch has counters of its own, for each
of the other ranks: programs wait for their like on the other GPUs, and not for whole kernels.

What was written before `signal` can be read behind `wait`: the store of a counter is a release, its load an acquire,
both over the whole system. Between the threads of a program a barrier stands before the one and behind the other.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase


@triton.jit
def addresses_of(table, lanes, RANKS: tl.constexpr):
    """Where the buffers of the ranks in `lanes` begin, in bytes; that of the last one for lanes behind it."""
    return tl.load(table + tl.minimum(lanes, RANKS - 1))


@triton.jit
def signal(table, offset, slot, rank, count, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Tell every rank that this one has come to `count` in a slot.

    table: int64 [RANKS], the address of each rank's buffer. offset: bytes from there to the counters, int32 [slots,
    RANKS]. LANES: a power of 2, at least RANKS.
    """
    tl.debug_barrier()  # all threads have written
    lanes = tl.arange(0, LANES)
    counters = (addresses_of(table, lanes, RANKS) + offset).to(tl.pointer_type(tl.int32)) + slot * RANKS + rank
    tl.atomic_xchg(counters, tl.zeros([LANES], tl.int32) + count, mask=lanes < RANKS, sem="release", scope="sys")


@triton.jit
def wait(table, offset, slot, rank, count, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Wait until every rank has come to `count` in a slot; arguments as `signal` takes them."""
    lanes = tl.arange(0, LANES)
    own = (tl.load(table + rank) + offset).to(tl.pointer_type(tl.int32)) + slot * RANKS
    counters = own + tl.minimum(lanes, RANKS - 1)
    nothing = tl.zeros([LANES], tl.int32)
    while tl.min(tl.atomic_add(counters, nothing, sem="acquire", scope="sys"), axis=0) < count:
        pass
    tl.debug_barrier()  # no thread reads before


@triton.jit
def meeting_kernel(table, offset, slot, rank, counts, RANKS: tl.constexpr, LANES: tl.constexpr):
    """One program: no rank's stream goes on before all have come here. counts: int32, the meetings so far, by slot."""
    count = tl.load(counts + slot) + 1
    signal(table, offset, slot, rank, count, RANKS, LANES)
    wait(table, offset, slot, rank, count, RANKS, LANES)
    tl.store(counts + slot, count)


@triton.jit
def arrival_kernel(flag):
    """One program: wait until this flag, an int32, is 1, and set it back to 0 for the next call."""
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.store(flag, 0)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    signature = {"table": "*i64", "offset": "i32", "slot": "i32", "rank": "i32", "counts": "*i32"}
    return [
        CompileCase(meeting_kernel, signature, {"RANKS": 2, "LANES": 2}, num_warps=1),
        CompileCase(arrival_kernel, {"flag": "*i32"}, {}, num_warps=1),
    ]
