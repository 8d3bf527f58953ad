"""Two-shot all-reduce: each rank adds up one share of the numbers, and sends the sums of it to all others.

Each rank receives 2 (R - 1) / R times the bytes, whole and not packed, so it is the form for many of them. A program
has the same places in each of the three parts, and waits for its like on the other ranks alone:

    1. it writes its numbers of each other rank's share into that rank's inbox, and signals
    2. it waits, adds up its own share in the order of the ranks, writes the sums into every rank's memory, and signals
    3. it waits, and copies the other shares' sums to where the result belongs

No third barrier: who writes into an inbox again has the signals of part 2, after which nobody reads it; and who writes
sums again has the signals of the next call's part 1, which a rank sends after part 3.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.parallel.signals import signal, wait

BLOCK = 4096  # numbers that a program has in hand at a time
NUM_WARPS = 16


@triton.jit
def two_shot_kernel(
    x_pointer, output_pointer, table, counts, rank, numbers, share, sums_offset, signals_offset,
    RANKS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x_pointer, output_pointer: [numbers], of one type.

    table: int64 [RANKS], the address of each rank's buffer. It begins with the inboxes, [RANKS, share]; the sums are at
    sums_offset, [RANKS, share], and the counters at signals_offset, both in bytes. share: numbers of a rank's share, a
    multiple of BLOCK. counts: int32, of each program the calls so far.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    pointer_type: tl.constexpr = x_pointer.dtype
    call = tl.load(counts + program) + 1
    mine = tl.load(table + rank)
    blocks = share // BLOCK

    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        inbox = tl.load(table + other).to(pointer_type) + rank * share.to(tl.int64)
        for block in range(program, blocks, programs):
            places = block * BLOCK + tl.arange(0, BLOCK)
            whole = other * share.to(tl.int64) + places
            tl.store(inbox + places, tl.load(x_pointer + whole, mask=whole < numbers, other=0), mask=whole < numbers)
    signal(table, signals_offset, 2 * program, rank, call, RANKS, LANES)
    wait(table, signals_offset, 2 * program, rank, call, RANKS, LANES)

    for block in range(program, blocks, programs):
        places = block * BLOCK + tl.arange(0, BLOCK)
        whole = rank * share.to(tl.int64) + places
        inside = whole < numbers
        own = tl.load(x_pointer + whole, mask=inside, other=0)
        total = tl.zeros([BLOCK], tl.float32)
        for source in tl.static_range(RANKS):
            inbox = mine.to(pointer_type) + source * share.to(tl.int64)
            sent = tl.load(inbox + places, mask=whole < tl.where(source == rank, 0, numbers), other=0)
            total += tl.where(source == rank, own, sent).to(tl.float32)
        sums = total.to(own.dtype)
        tl.store(output_pointer + whole, sums, mask=inside)
        for step in tl.static_range(1, RANKS):
            theirs = (tl.load(table + (rank + step) % RANKS) + sums_offset).to(pointer_type)
            tl.store(theirs + whole, sums, mask=inside)
    signal(table, signals_offset, 2 * program + 1, rank, call, RANKS, LANES)
    wait(table, signals_offset, 2 * program + 1, rank, call, RANKS, LANES)

    for step in tl.static_range(1, RANKS):
        other = (rank + step) % RANKS
        for block in range(program, blocks, programs):
            whole = other * share.to(tl.int64) + block * BLOCK + tl.arange(0, BLOCK)
            sums = tl.load((mine + sums_offset).to(pointer_type) + whole, mask=whole < numbers, other=0)
            tl.store(output_pointer + whole, sums, mask=whole < numbers)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + program, call)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: two ranks and four."""
    sizes = dict.fromkeys(("rank", "numbers", "share", "sums_offset", "signals_offset"), "i32")
    return [
        CompileCase(
            two_shot_kernel, {**dict.fromkeys(("x_pointer", "output_pointer"), kind), "table": "*i64", "counts": "*i32",
            **sizes}, {"RANKS": ranks, "LANES": ranks, "BLOCK": BLOCK}, num_warps=NUM_WARPS,
            divisible=("x_pointer", "output_pointer", "table", "counts", "numbers", "share", "sums_offset",
                       "signals_offset"), label=f"{kind}, {ranks} ranks",
        )
        for kind, ranks in (("*bf16", 2), ("*fp32", 4))
    ]  # fmt: skip
