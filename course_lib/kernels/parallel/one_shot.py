"""One-shot all-reduce: every rank sends its numbers to every other, and adds up what it has got, in the order of ranks.

Each 32 bits of numbers travel as 64: beside them stands the number of the call. A reader asks for its own memory again
and again until it finds the number of this call, and has with it the numbers: one trip over the link, and no barrier.
That doubles the bytes, and is why it is the form for few of them. (Exercise 20.3 has the form with two barriers.)

There are two inboxes in turn. A rank that is in call n + 1 has the numbers of all for call n, so all had ended call
n - 1 by then: nobody reads that inbox any more, which is the one of call n + 1.

Source of the packing: the LL protocol of NCCL, described by Hu et al., Demystifying NCCL, arXiv 2507.04786, section 3.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase

NUM_WARPS = 8
BLOCK = tl.constexpr(512)  # words of a program, in every call: an inbox's place belongs to one program


@triton.jit
def first_and_second(words, TYPE: tl.constexpr):
    """The two numbers of 16 bits in each word of 32, in float32; of a word of float32 the number and zero."""
    if TYPE == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = tl.zeros_like(first)
    else:
        first = (words & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
        second = ((words >> 16) & 0xFFFF).to(tl.int16).to(TYPE, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def as_words(first, second, TYPE: tl.constexpr):
    """The inverse of `first_and_second`, rounded to the type."""
    if TYPE == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(TYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def send(own, table, apart, place, count, rank, call, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the program's words, with the number of the call, into this rank's inbox on each other rank.

    own: int32 [BLOCK], of which `count` belong to the program. table: int64 [RANKS], the address of each rank's
    inboxes, [2, RANKS] of `apart` words of 64 bits; the program's begin at `place` in each.
    """
    packed = (call.to(tl.int64) << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    lanes = tl.arange(0, BLOCK)
    for step in tl.static_range(1, RANKS):
        theirs = tl.load(table + (rank + step) % RANKS).to(tl.pointer_type(tl.int64))
        tl.store(theirs + ((call & 1) * RANKS + rank) * apart + place + lanes, packed, mask=lanes < count)


@triton.jit
def receive_sum(
    own, table, apart, place, count, rank, call, TYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The sums of the words' first and second numbers over all ranks, float32 [BLOCK]; arguments as for `send`."""
    lanes = tl.arange(0, BLOCK)
    mine = tl.load(table + rank).to(tl.pointer_type(tl.int64))
    first_sum = tl.zeros([BLOCK], tl.float32)
    second_sum = tl.zeros([BLOCK], tl.float32)
    for source in tl.static_range(RANKS):
        pointers = mine + ((call & 1) * RANKS + source) * apart + place + lanes
        expected = lanes < tl.where(source == rank, 0, count)  # its own numbers it has
        got = tl.load(pointers, mask=expected, other=0, volatile=True)
        while tl.max((expected & ((got >> 32).to(tl.int32) != call)).to(tl.int32), axis=0) > 0:
            got = tl.load(pointers, mask=expected, other=0, volatile=True)
        first, second = first_and_second(tl.where(expected, got, own.to(tl.int64)).to(tl.int32), TYPE)
        first_sum += first
        second_sum += second
    return first_sum, second_sum


@triton.jit
def one_shot_kernel(
    x_pointer, output_pointer, table, counts, rank, words, capacity,
    TYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p adds up BLOCK words.

    x_pointer, output_pointer: int32 [words]. table: int64 [RANKS], the address of each rank's inboxes, int64 [2, RANKS,
    capacity]. counts: int32, of each program the calls so far.
    """
    program = tl.program_id(0)
    place = program * BLOCK
    places = place + tl.arange(0, BLOCK)
    inside = places < words
    call = tl.load(counts + program) + 1
    own = tl.load(x_pointer + places, mask=inside, other=0)
    send(own, table, capacity, place, words - place, rank, call, RANKS, BLOCK)
    first, second = receive_sum(own, table, capacity, place, words - place, rank, call, TYPE, RANKS, BLOCK)
    tl.store(output_pointer + places, as_words(first, second, TYPE), mask=inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + program, call)


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: two ranks and four."""
    signature = {"x_pointer": "*i32", "output_pointer": "*i32", "table": "*i64", "counts": "*i32", "rank": "i32",
                 "words": "i32", "capacity": "i32"}  # fmt: skip
    return [
        CompileCase(
            one_shot_kernel, signature, {"TYPE": kind, "RANKS": ranks, "BLOCK": BLOCK.value}, num_warps=NUM_WARPS,
            divisible=("x_pointer", "output_pointer", "table", "counts", "capacity"), label=f"{kind}, {ranks} ranks",
        )
        for kind, ranks in ((tl.bfloat16, 2), (tl.float32, 4))
    ]  # fmt: skip
