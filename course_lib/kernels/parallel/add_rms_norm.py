"""All-reduce, addition and norm in one kernel: what stands between two products of a decoder on several ranks.

    summed     = stream + the sum of all ranks' x              rounded to the dtype of x
    normalised = RMSNorm(summed) · gain

A program has a row. It sends its part of the row as `one_shot` does, and what comes goes into the norm without a way
through memory. The kernel behind may be placed, and ask for its first weights, while this one waits for the link.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.dependent import wait_for_kernel_before
from course_lib.kernels.fused.add_rms_norm import inverse_of_rms
from course_lib.kernels.parallel.one_shot import as_words, first_and_second, receive_sum, send

MOST_ROWS = 64
ROW_WORDS = 4096  # of 32 bits: room for a row, however short it is, so that an inbox's place belongs to one program


@triton.jit
def sum_add_rms_norm_kernel(
    x_pointer, stream_pointer, gain_pointer, normalised_pointer, summed_pointer, table, counts, rank, words, columns,
    epsilon, TYPE: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Program p has row p.

    x_pointer, stream_pointer, normalised_pointer, summed_pointer: int32 [rows, words], contiguous. gain_pointer: int32
    [words]. table: int64 [RANKS], the address of each rank's inboxes, int64 [2, RANKS, ROWS, STRIDE]. counts: int32, of
    each program the calls so far. words: of a row; columns: its numbers.
    """
    wait_for_kernel_before(DEPENDENT)
    row = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    inside = places < words
    call = tl.load(counts + row) + 1
    own = tl.load(x_pointer + row * words + places, mask=inside, other=0)
    send(own, table, ROWS * STRIDE, row * STRIDE, words, rank, call, RANKS, BLOCK)
    stream_first, stream_second = first_and_second(
        tl.load(stream_pointer + row * words + places, mask=inside, other=0), TYPE
    )
    gain_first, gain_second = first_and_second(tl.load(gain_pointer + places, mask=inside, other=0), TYPE)
    first, second = receive_sum(own, table, ROWS * STRIDE, row * STRIDE, words, rank, call, TYPE, RANKS, BLOCK)
    # The sum is rounded before the stream is added, as it is where these are two kernels.
    first, second = first_and_second(as_words(first, second, TYPE), TYPE)
    summed = as_words(stream_first + first, stream_second + second, TYPE)
    tl.store(summed_pointer + row * words + places, summed, mask=inside)
    first, second = first_and_second(tl.where(inside, summed, 0), TYPE)
    inverse = inverse_of_rms(tl.sum(first * first + second * second, axis=0), columns, epsilon)
    normalised = as_words(first * inverse * gain_first, second * inverse * gain_second, TYPE)
    tl.store(normalised_pointer + row * words + places, normalised, mask=inside)
    tl.debug_barrier()  # all threads have read the count
    tl.store(counts + row, call)


def warps_of(block: int) -> int:
    return min(32, max(1, block // 128))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: Llama-3-8B's width on two ranks and 70B's on four."""
    pointers = ("x_pointer", "stream_pointer", "gain_pointer", "normalised_pointer", "summed_pointer", "counts")
    signature = {**dict.fromkeys(pointers, "*i32"), "table": "*i64", "rank": "i32", "words": "i32", "columns": "i32",
                 "epsilon": "fp32"}  # fmt: skip
    return [
        CompileCase(
            sum_add_rms_norm_kernel, signature,
            {"TYPE": kind, "RANKS": ranks, "BLOCK": block, "ROWS": MOST_ROWS, "STRIDE": ROW_WORDS, "DEPENDENT": False},
            num_warps=warps_of(block), divisible=(*pointers, "table", "words", "columns"),
            label=f"{kind}, {ranks} ranks",
        )
        for kind, ranks, block in ((tl.bfloat16, 2, 2048), (tl.float16, 4, 4096))
    ]  # fmt: skip
