"""Exercise 13.8: add a residual and normalise, in CUDA C++, judged by a block of threads on the processor."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from course_lib.checker import CUDA_ON_HOST, Case, Exercise, Limits, edits, model_of
from course_lib.checker.specification.contract import Contract, Level
from course_lib.hardware.compiler import nvrtc
from course_lib.hardware.compiler.cuda_numbers import CONVERSIONS
from course_lib.hardware.compiler.cuda_on_host import files
from exercises.ch13_fusion_and_compilers import rms_norms as norms
from exercises.ch13_fusion_and_compilers.on_host import (
    BITS_FOR_NUMBERS,
    FAULTS,
    NothingInLocalMemory,
    WholeVectors,
    run_in_both_orders,
)
from exercises.ch13_fusion_and_compilers.rms_norms import large, ordinary, tiny
from exercises.topics.pointers import load


def in_both_orders(x, residual, weight, epsilon, *rest):
    wide = (x + residual).to(torch.promote_types(x.dtype, torch.float32))
    return _of(wide, x, weight, epsilon)


def norm_of_the_exact_sum(x, residual, weight, epsilon, *rest):
    return _of(x.to(torch.promote_types(x.dtype, torch.float32)) + residual, x, weight, epsilon)


def _of(wide, x, weight, epsilon):
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    normalised, summed = (wide * inverse * weight.to(wide.dtype)).to(x.dtype), wide.to(x.dtype)
    return {order: {"normalised": normalised, "summed": summed} for order in ("ascending", "descending")}


def _apart(draw, tensor):
    """Rows with a gap of a few vectors behind each, and no memory behind the last."""
    rows, columns = tensor.shape
    stride = columns + 16 // tensor.element_size() * draw.integer(1, 6)
    wide = torch.full(((rows - 1) * stride + columns,), math.nan, dtype=tensor.dtype)
    placed = wide.as_strided((rows, columns), (stride, 1))
    placed.copy_(tensor)
    return placed


def _machine():
    """What runs a kernel on the processor; and what compiles it for a GPU, where there is that."""
    if nvrtc.missing_nvrtc() is not None:
        return files()
    return files() | {"nvrtc.py": Path(nvrtc.__file__).read_text(), "cuda_numbers": CONVERSIONS}


def drawn(draw, *, rows, vectors, block, values, epsilon, gaps, machine=None):
    dtype, threads = block
    columns = vectors * 16 // torch.empty(0, dtype=dtype).element_size()
    x, residual = (values(draw, rows, columns).to(dtype) for _ in "12")
    x, residual = _apart(draw, x) if gaps[0] else x, _apart(draw, residual) if gaps[1] else residual
    return x, residual, draw.normal(columns, shift=1.0).to(dtype), epsilon, threads, machine or files()


def norm_cases(draw):
    def case(name, rows, vectors, block, values=ordinary, epsilon=1e-6, gaps=(False, False), machine=None):
        sizes = {"rows": rows, "vectors": vectors, "block": block, "values": values, "epsilon": epsilon, "gaps": gaps}
        return Case(name, drawn(draw, **sizes, machine=machine), driver=run_in_both_orders)

    words, short = (torch.float32, 128), (torch.float16, 128)
    return [
        case("2 rows of 512, a vector for each of 128 threads", 2, 128, words, machine=_machine()),
        case("a row of 2,048, four vectors a thread", 1, 512, words),
        case("a row of 24, for 6 of 128 threads", 1, 6, words),
        case("3 rows of 516: one vector more than threads", 3, 129, words),
        case("rows that lie apart", 3, 40, words, gaps=(True, True)),
        case("numbers near 0.003 and an epsilon of 1e-5", 2, 24, words, tiny, 1e-5),
        case("one warp", 2, 75, (torch.float32, 32)),
        case("a row of 4,756 for one warp: 38 vectors a thread", 1, 1189, (torch.float32, 32)),
        case("float16, a row of 4,200 for 512 threads", 1, 525, (torch.float16, 512)),
        case("float16, 2 rows of 1,000", 2, 125, short, machine=_machine()),
        case("float16, 3 rows of 2,008", 3, 251, short, gaps=(True, False)),
        case("float16, numbers near 300: squares overflow", 2, 63, short, large),
    ]


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 4),
        "vectors": (1, 33, 128, 301),
        "block": tuple(
            Level((dtype, threads), f"{str(dtype).removeprefix('torch.')}, {threads} threads")
            for dtype, threads in (
                (torch.float32, 128),
                (torch.float16, 128),
                (torch.float32, 32),
                (torch.float16, 512),
            )
        ),
        "values": (Level(ordinary, ""), Level(large, "numbers near 300"), Level(tiny, "numbers near 0.003")),
        "epsilon": tuple(Level(value, f"epsilon {value:g}") for value in (1e-6, 1e-5, 0.25)),
        "gaps": (
            Level((False, False), ""),
            Level((True, False), "rows of x apart"),
            Level((False, True), "rows of the residual apart"),
        ),
    },
    says={
        "rows": "at least one row",
        "vectors": "Any number of columns from WIDTH on that is a multiple of WIDTH",
        "block": "a power of two from 32 to 512",
        "epsilon": "above 0",
        "gaps": "Row r begins r · x_stride numbers, or\n        r · residual_stride numbers",
    },
    driver=run_in_both_orders,
    most=8,
)


def sum_of_lanes(numbers, distances=(16, 8, 4, 2, 1)):
    """Of each warp of [rows, warps, 32], in each lane."""
    lane = torch.arange(32)
    for distance in distances:
        numbers = numbers + numbers[..., lane ^ distance]
    return numbers


def bits(numbers, kind=torch.int16):
    """Numbers of 16 bits as a kind of whole numbers; others as they are."""
    return numbers.view(kind) if numbers.element_size() == 2 else numbers


def norm_of_rows(x, residual, weight, epsilon, threads, *rest):
    rows, columns = x.shape
    width = 16 // x.element_size()
    column, row = torch.arange(columns), torch.arange(rows)[:, None]
    thread = column // width % threads
    first = load(x, row * x.stride(0) + column)
    second = load(residual, row * residual.stride(0) + column)
    exact = first.float() + second.float()
    summed = exact.to(x.dtype)
    wide = summed.float()
    of_thread = torch.zeros(rows, threads).index_add_(1, thread, wide * wide)
    lanes = of_thread.view(rows, threads // 32, 32)
    of_warp = sum_of_lanes(lanes)[..., 0]
    read = torch.zeros(rows, 1, 32)
    read[:, 0, : threads // 32] = of_warp
    squares = sum_of_lanes(read)[:, 0, thread % 32]
    inverse = 1 / torch.sqrt(squares / columns + epsilon)
    normalised = (wide * inverse * weight.float()).to(x.dtype)
    made = {"normalised": normalised, "summed": summed}
    written = column < columns
    made = {name: torch.where(written, result, math.nan) for name, result in made.items()}
    return {"ascending": made, "descending": made}


SQUARES = "sum_of_lanes(read)[:, 0, thread % 32]"
STEPS = (16, 8, 4, 2, 1)
TOO_FEW = (*(STEPS[:place] + STEPS[place + 1 :] for place in range(5)), STEPS[2:], STEPS[3:], STEPS[:3])
EXACT, SUMMED = "first.float() + second.float()", "exact.to(x.dtype)"
WIDE, WRITTEN = "wide = summed.float()", "written = column < columns"
X_ROW, RESIDUAL_ROW = "row * x.stride(0)", "row * residual.stride(0)"
INVERSE = "1 / torch.sqrt(squares / columns + epsilon)"
OF_WARP, READ = "of_warp = sum_of_lanes(lanes)[..., 0]", "read[:, 0, : threads // 32] = of_warp"
SHUFFLED = "numbers[..., lane ^ distance]"
CHANGES = (
    *edits("", exact_sum=(WIDE, "wide = exact")),
    *edits("Only as many columns were computed as the threads load at once. The loop over a row begins at threadIdx.x "
        "and advances by THREADS, as long as there are vectors.",
        row_cut_off=(WRITTEN, "written = column < threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < threads * width))")),
    *edits("A thread took a fixed number of vectors, and longer rows have more for it. Let the loop go on as long as "
        "there are vectors: a row may have any number.",
        fixed_number=(WRITTEN, "written = column < 4 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 4 * threads * width))"),
        fixed_number__2=(WRITTEN, "written = column < 2 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 2 * threads * width))"),
        fixed_number__8=(WRITTEN, "written = column < 8 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 8 * threads * width))"),
        fixed_number__10=(WRITTEN, "written = column < 10 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 10 * threads * width))"),
        fixed_number__16=(WRITTEN, "written = column < 16 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 16 * threads * width))"),
        fixed_number__32=(WRITTEN, "written = column < 32 * threads * width", "thread, wide * wide)",
        "thread, wide * wide * (column < 32 * threads * width))")),
    *edits("The last vectors of a row were left out: those beyond a whole number of vectors for each thread. Count on "
        "as long as there are vectors, not for columns / WIDTH / THREADS rounds.",
        tail_dropped=(WRITTEN, "written = column // (threads * width) < columns // (threads * width)",
        "thread, wide * wide)",
        "thread, wide * wide * (column // (threads * width) < columns // (threads * width)))"),
        tail_dropped__of_the_sum=("thread, wide * wide)",
        "thread, wide * wide * (column // (threads * width) < columns // (threads * width)))",
        '"summed": summed', '"summed": torch.where(column // (threads * width) < columns // (threads * width), summed, '
        "math.nan)")),
    *edits("Only warp 0's squares are in the sum. Each warp has a sum of its own: one lane of each puts it into shared "
        "memory, and after the barrier all of these are added.",
        first_warp_only=(READ, "read[:, 0, :1] = of_warp[:, :1]")),
    *edits("Warp 0 alone has the sum of the block. A number that one warp has worked out reaches the others through "
        "shared memory: store it there, and let all read it behind a barrier.",
        sum_in_warp_0_only=(SQUARES, "torch.where(thread < 32, sum_of_lanes(read)[:, 0, thread % 32], "
        "sum_of_lanes(lanes)[:, thread // 32, thread % 32])"),
        sum_in_warp_0_only__own_32_times=(SQUARES, "torch.where(thread < 32, sum_of_lanes(read)[:, 0, thread % 32], "
        "32 * sum_of_lanes(lanes)[:, thread // 32, thread % 32])"),
        sum_in_warp_0_only__zero=(SQUARES, "torch.where(thread < 32, sum_of_lanes(read)[:, 0, thread % 32], 0.0)")),
    *edits("Each warp used its own sum. A shuffle does not leave the warp: the sums of the warps have to be added too, "
        "through shared memory.", sum_of_own_warp=(SQUARES, "sum_of_lanes(lanes)[:, thread // 32, thread % 32]")),
    *edits("Each thread used the squares that it has added up itself. They have to be added over the whole block.",
        sum_of_own_thread=(SQUARES, "of_thread[:, thread]")),
    *edits("After __shfl_down_sync lane 0 alone has the sum, and other lanes have parts of it. Use __shfl_xor_sync, "
        "or put lane 0's number into shared memory for all to read, after a barrier.",
        sum_in_lane_0_only=(SHUFFLED, "numbers[..., torch.where(lane + distance < 32, lane + distance, lane)]")),
    *edits("A step of a sum is missing. Over 32 lanes it takes five, at distances 16, 8, 4, 2 and 1; over a block of "
        "512 threads nine, from 256 to 1.",
        step_missing=("(16, 8, 4, 2, 1)", "(16, 8, 4, 2)"), step_missing__first=("(16, 8, 4, 2, 1)", "(8, 4, 2, 1)"),
        **{f"step_missing__of_the_lanes{steps}": ("(lanes)", f"(lanes, {steps})") for steps in TOO_FEW},
        **{f"step_missing__of_the_warps{steps}": ("(read)", f"(read, {steps})") for steps in TOO_FEW},
        **{f"step_missing__of_the_block{steps}": (SQUARES, f"sum_of_lanes(read, {steps})[:, 0, :1]")
           for steps in TOO_FEW},
        step_missing__of_the_block=("lanes = of_thread",
        "lanes = (of_thread * (torch.arange(threads) < threads / 2))")),
    *edits("A thread kept the squares of its last vector only. Add them up over all its vectors.",
        last_vector_only=("thread, wide * wide)",
        "thread, wide * wide * (column // width + threads >= columns // width))")),
    *edits("The mean was taken over the threads of the block. Divide by the number of columns.",
        mean_over_the_threads=("squares / columns", "squares / threads"),
        mean_over_the_threads__vectors=("squares / columns", "squares / (threads * width)")),
    *edits("The mean was taken over the vectors of a row. Divide by the number of columns.",
        mean_over_the_vectors=("squares / columns", "squares / (columns // width)")),
    *edits("The mean was taken over a fixed number of columns. Divide by `columns`.",
        mean_over_a_fixed_number=("squares / columns", "squares / 4096"),
        mean_over_a_fixed_number__1024=("squares / columns", "squares / 1024")),
    *edits("The squares are those of x alone. Square the sum.",
        squares_of_x=("thread, wide * wide)", "thread, first.float() * first.float())")),
    *edits("epsilon was not the one that the kernel is given. Add the parameter `epsilon`, not a number of your own.",
        epsilon_fixed=("squares / columns + epsilon", "squares / columns + 1e-6"),
        epsilon_fixed__5=("squares / columns + epsilon", "squares / columns + 1e-5")),
    *edits("The inverse root was multiplied by epsilon. Add it to the mean square, under the root.",
        epsilon_multiplied=(INVERSE, "epsilon / torch.sqrt(squares / columns)")),
    *edits("The sum of squares was made a whole number before it was divided. Divide in float32.",
        whole_number=("squares / columns", "squares.floor() / columns"),
        whole_number__mean=("squares / columns", "(squares.floor() / columns).floor()")),
    *edits(norms.SUM_FOR_MEAN,
        sum_for_mean=("squares / columns", "squares")),
    *edits(norms.NORM_OF_X, norm_of_x=(WIDE, "wide = first.float()"),
        norm_of_x__squares_of_the_sum=("wide * inverse", "first.float() * inverse")),
    *edits(norms.SUM_NOT_STORED,
        sum_not_stored=('"summed": summed', '"summed": first'),
        sum_not_stored__nor_normalised=('"summed": summed', '"summed": first', "wide * inverse",
        "first.float() * inverse")),
    *edits(BITS_FOR_NUMBERS, bits_for_numbers=(SUMMED, "(bits(first) + bits(second)).view(x.dtype)"),
        bits_for_numbers__of_two=(SUMMED, "(bits(first, torch.int32) + bits(second, torch.int32)).view(x.dtype)"),
        bits_for_numbers__widened=(EXACT, "bits(first, torch.uint16).float() + bits(second, torch.uint16).float()"),
        bits_for_numbers__as_signed=(EXACT, "bits(first).float() + bits(second).float()")),
    *edits("The two results are exchanged.",
        results_exchanged=('"normalised": normalised, "summed": summed', '"normalised": summed, "summed": normalised')),
    *edits(norms.EPSILON_MISSING,
        epsilon_missing=("squares / columns + epsilon", "squares / columns")),
    *edits(norms.EPSILON_OUTSIDE,
        epsilon_outside=(INVERSE, "1 / (torch.sqrt(squares / columns) + epsilon)")),
    *edits(norms.EPSILON_DIVIDED,
        epsilon_divided=("squares / columns + epsilon", "(squares + epsilon) / columns")),
    *edits(norms.ROOT_MISSING,
        root_missing=(INVERSE, "1 / (squares / columns + epsilon)")),
    *edits(norms.MULTIPLIED,
        multiplied=(INVERSE, "torch.sqrt(squares / columns + epsilon)")),
    *edits(norms.WEIGHT_MISSING, weight_missing=("wide * inverse * weight.float()", "wide * inverse")),
    *edits(norms.ONE_ADDED, one_added=("weight.float()", "(1 + weight.float())")),
    *edits("All numbers got the first one of the weight. It is read number by number, like the row.",
        first_weight=("inverse * weight.float()", "inverse * weight.float()[0 * column]")),
    *edits("Each number of a vector got the vector's first of the weight. Read weight.of[e] beside the row's of[e].",
        first_of_a_vector=("inverse * weight.float()", "inverse * weight.float()[column // width * width]")),
    *edits("A thread read the weight of its first vector for all of its vectors. The weight is read at the same place "
        "as the row.",
        weights_of_thread=("inverse * weight.float()", "inverse * weight.float()[column % (threads * width)]")),
    *edits("Each vector got the first vector of the weight. The weight is read at the same place as the row.",
        first_weights=("inverse * weight.float()", "inverse * weight.float()[column % width]")),
    *edits(norms.MEAN_SUBTRACTED,
        mean_subtracted=(WIDE, "wide = summed.float() - summed.float().mean(1, keepdim=True)"),
        mean_subtracted__variance=("squares / columns", "squares / columns - wide.mean(1, keepdim=True) ** 2",
        "wide * inverse", "(wide - wide.mean(1, keepdim=True)) * inverse")),
    *edits("The squares were taken or added in float16, which ends at 65,504. Use float32.",
        squared_in_16_bits=("thread, wide * wide)", "thread, (summed * summed).float())"),
        squared_in_16_bits__sum=("squares / columns", "squares.to(x.dtype).float() / columns")),
    *edits("Rows are read as if they followed each other without a gap. Row r begins at r times its tensor's stride.",
        row_stride_ignored=(X_ROW, "row * columns", RESIDUAL_ROW, "row * columns"),
        row_stride_ignored__of_x=(X_ROW, "row * columns"),
        row_stride_ignored__of_the_residual=(RESIDUAL_ROW, "row * columns")),
    *edits(norms.STRIDES_OF_X, strides_of_x=(RESIDUAL_ROW, X_ROW)),
    *edits("All blocks read the first row. The row is blockIdx.x.",
        first_row_only=(X_ROW, "0 * row", RESIDUAL_ROW, "0 * row")),
)  # fmt: skip

EXERCISE = Exercise(
    id="13.8",
    title="The same kernel in CUDA C++",
    entries=("cuda_norm_source",),
    cases=norm_cases,
    oracle=in_both_orders,
    plain=(norm_of_the_exact_sum,),
    contracts=(CONTRACT,),
    models=(model_of(norm_of_rows, CHANGES, (sum_of_lanes,), uses=(bits,)),),
    needs=CUDA_ON_HOST,
    limits=Limits(seconds=12.0),
    hints=(
        "Begin without the sum: row pointers as (const Vector*)(x + row * x_stride), and a loop `for (int at = "
        "threadIdx.x; at < columns / WIDTH; at += THREADS)` that loads two Vectors, adds them number by number and "
        "stores `summed`.",
        "In that loop each thread adds up the squares of its own numbers, in float32. Behind it, five shuffles give "
        "every lane the sum of its warp: squares += __shfl_xor_sync(0xffffffffu, squares, distance), at distances 16, "
        "8, 4, 2 and 1.",
        "Then lane 0 of each warp writes its sum to `__shared__ float of_warp[THREADS / 32]`. After __syncthreads each "
        "lane reads one of these, or takes 0 where there is none, and five more shuffles add them.",
        "A second loop like the first reads `summed` again, multiplies by rsqrtf(total / columns + epsilon) and by the "
        "weight, and stores `normalised`. Each thread reads what it has written itself, so no barrier is needed.",
    ),
    mistakes=FAULTS,
    requirements=(WholeVectors(), NothingInLocalMemory()),
)
