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
from exercises.ch13_fusion_and_compilers import on_host
from exercises.ch13_fusion_and_compilers import rms_norms as norms
from exercises.ch13_fusion_and_compilers.rms_norms import large, tiny
from exercises.topics.pointers import load
from exercises.topics.vector_inputs import ordinary


def in_each_order(normalised, summed):
    return {order: {"normalised": normalised, "summed": summed} for order in ("ascending", "descending")}


def norm_oracle(*args):
    return in_each_order(*norms.add_rms_norm(*args))


def norm_of_the_exact_sum(*args):
    return in_each_order(*norms.norm_of_the_exact_sum(*args))


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


def drawn(draw, *, rows, vectors, dtype=torch.float32, threads=128, values=ordinary, epsilon=1e-6, gaps=(False, False),
          machine=None):  # fmt: skip
    columns = vectors * 16 // torch.empty(0, dtype=dtype).element_size()
    x, residual = (values(draw, rows, columns).to(dtype) for _ in "12")
    x, residual = _apart(draw, x) if gaps[0] else x, _apart(draw, residual) if gaps[1] else residual
    return x, residual, draw.normal(columns, shift=1.0).to(dtype), epsilon, threads, machine or files()


def norm_cases(draw):
    def case(name, rows, vectors, **more):
        return Case(name, drawn(draw, rows=rows, vectors=vectors, **more), driver=on_host.run_in_both_orders)

    half = torch.float16
    return [
        case("2 rows of 512, a vector for each of 128 threads", 2, 128, machine=_machine()),
        case("a row of 2,048, four vectors a thread", 1, 512),
        case("a row of 24, for 6 of 128 threads", 1, 6),
        case("3 rows of 516: one vector more than threads", 3, 129),
        case("rows that lie apart", 3, 40, gaps=(True, True)),
        case("numbers near 0.003 and an epsilon of 1e-5", 2, 24, values=tiny, epsilon=1e-5),
        case("one warp", 2, 75, threads=32),
        case("a row of 4,756 for one warp: 38 vectors a thread", 1, 1189, threads=32),
        case("float16, a row of 4,200 for 512 threads", 1, 525, dtype=half, threads=512),
        case("float16, 2 rows of 1,000", 2, 125, dtype=half, machine=_machine()),
        case("float16, 3 rows of 2,008", 3, 251, dtype=half, gaps=(True, False)),
        case("float16, numbers near 300: squares overflow", 2, 63, dtype=half, values=large),
    ]


CONTRACT = Contract(
    drawn,
    choices={
        "rows": (1, 4),
        "vectors": (1, 33, 128, 301),
        "dtype": (torch.float32, torch.float16),
        "threads": (32, 128, 512),
        "values": norms.VALUES,
        "epsilon": norms.EPSILONS,
        "gaps": (
            Level((False, False), ""),
            Level((True, False), "rows of x apart"),
            Level((False, True), "rows of the residual apart"),
        ),
    },
    says={
        "rows": "at least one row",
        "vectors": "Any number of columns from WIDTH on that is a multiple of WIDTH",
        "threads": "a power of two from 32 to 512",
        "epsilon": "above 0",
        "gaps": "Row r begins r · x_stride numbers, or\n        r · residual_stride numbers",
    },
    driver=on_host.run_in_both_orders,
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
    squared = wide * wide
    of_thread = torch.zeros(rows, threads).index_add_(1, thread, squared)
    lanes = of_thread.view(rows, threads // 32, 32)
    of_warp = sum_of_lanes(lanes)[..., 0]
    read = torch.zeros(rows, 1, 32)
    read[:, 0, : threads // 32] = of_warp
    squares = sum_of_lanes(read)[:, 0, thread % 32]
    inverse = 1 / torch.sqrt(squares / columns + epsilon)
    scale = load(weight, column).float()
    normalised = (wide * inverse * scale).to(x.dtype)
    stored = summed
    written = column < columns
    return in_each_order(*(torch.where(written, result, math.nan) for result in (normalised, stored)))


STEPS = (16, 8, 4, 2, 1)
TOO_FEW = (*(STEPS[:place] + STEPS[place + 1 :] for place in range(5)), STEPS[2:], STEPS[3:], STEPS[:3])
SUMMED, SQUARED = "exact.to(x.dtype)", "wide * wide"
SQUARES, SHUFFLED = "sum_of_lanes(read)[:, 0, thread % 32]", "numbers[..., lane ^ distance]"
OF_WARP = "sum_of_lanes(lanes)[:, thread // 32, thread % 32]"
WRITTEN, READ, WEIGHT = "written = column < columns", "read[:, 0, : threads // 32] = of_warp", "(weight, column)"
WHOLE_ROUNDS = "column // (threads * width) < columns // (threads * width)"


def where(condition):
    """Only these columns are written, and only their squares added."""
    return WRITTEN, f"written = {condition}", SQUARED, f"wide * wide * ({condition})"


CHANGES = (
    *edits("Only as many columns were computed as the threads load at once. The loop over a row begins at threadIdx.x "
        "and advances by THREADS, as long as there are vectors.",
        row_cut_off=where("column < threads * width")),
    *edits("WIDTH was taken for 8, and in float32 a Vector has 4 numbers. A row has columns / WIDTH vectors.",
        width_fixed=where("column < columns // 8 * width")),
    *edits("A thread took a fixed number of vectors, and longer rows have more for it. Let the loop go on as long as "
        "there are vectors: a row may have any number.",
        **{f"fixed_number__{most}": where(f"column < {most} * threads * width") for most in (4, 2, 8, 10, 16, 32)}),
    *edits("The last vectors of a row were left out: those beyond a whole number of vectors for each thread. Count on "
        "as long as there are vectors, not for columns / WIDTH / THREADS rounds.",
        tail_dropped=where(WHOLE_ROUNDS),
        tail_dropped__of_the_sum=(SQUARED, f"wide * wide * ({WHOLE_ROUNDS})",
        "stored = summed", f"stored = torch.where({WHOLE_ROUNDS}, summed, math.nan)")),
    *edits("Only warp 0's squares are in the sum. Each warp has a sum of its own: one lane of each puts it into shared "
        "memory, and after the barrier all of these are added.",
        first_warp_only=(READ, "read[:, 0, :1] = of_warp[:, :1]")),
    *edits("Warp 0 alone has the sum of the block. A number that one warp has worked out reaches the others through "
        "shared memory: store it there, and let all read it behind a barrier.",
        sum_in_warp_0_only=(SQUARES, f"torch.where(thread < 32, {SQUARES}, {OF_WARP})"),
        sum_in_warp_0_only__own_32_times=(SQUARES, f"torch.where(thread < 32, {SQUARES}, 32 * {OF_WARP})"),
        sum_in_warp_0_only__zero=(SQUARES, f"torch.where(thread < 32, {SQUARES}, 0.0)")),
    *edits("Each warp used its own sum. A shuffle does not leave the warp: the sums of the warps have to be added too, "
        "through shared memory.", sum_of_own_warp=(SQUARES, OF_WARP)),
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
           for steps in TOO_FEW[1:]},
        step_missing__of_the_block=("lanes = of_thread",
        "lanes = (of_thread * (torch.arange(threads) < threads / 2))")),
    *edits("A thread kept the squares of its last vector only. Add them up over all its vectors.",
        last_vector_only=(SQUARED, "wide * wide * (column // width + threads >= columns // width)")),
    *edits("The mean was taken over the threads of the block. Divide by the number of columns.",
        mean_over_the_threads=(norms.MEAN, "squares / threads"),
        mean_over_the_threads__vectors=(norms.MEAN, "squares / (threads * width)")),
    *edits("The mean was taken over the vectors of a row. Divide by the number of columns.",
        mean_over_the_vectors=(norms.MEAN, "squares / (columns // width)")),
    *edits("The mean was taken over a fixed number of columns. Divide by `columns`.",
        **{f"mean_over_a_fixed_number__{number}": (norms.MEAN, f"squares / {number}") for number in (4096, 1024)}),
    *edits("The squares are those of x alone. Square the sum.",
        squares_of_x=(SQUARED, "first.float() * first.float()")),
    *edits("epsilon was not the one that the kernel is given. Add the parameter `epsilon`, not a number of your own.",
        **{f"epsilon_fixed__{number}": (f"{norms.MEAN} + epsilon", f"{norms.MEAN} + {number}")
           for number in ("1e-6", "1e-5")}),
    *edits("The inverse root was multiplied by epsilon. Add it to the mean square, under the root.",
        epsilon_multiplied=(norms.INVERSE, "epsilon / torch.sqrt(squares / columns)")),
    *edits("The sum of squares was made a whole number before it was divided. Divide in float32.",
        whole_number=(norms.MEAN, "squares.floor() / columns"),
        whole_number__mean=(norms.MEAN, "(squares.floor() / columns).floor()")),
    *edits(on_host.BITS_FOR_NUMBERS, bits_for_numbers=(SUMMED, "(bits(first) + bits(second)).view(x.dtype)"),
        bits_for_numbers__of_two=(SUMMED, "(bits(first, torch.int32) + bits(second, torch.int32)).view(x.dtype)"),
        bits_for_numbers__widened=("first.float() + second.float()",
        "bits(first, torch.uint16).float() + bits(second, torch.uint16).float()"),
        bits_for_numbers__as_signed=("first.float() + second.float()", "bits(first).float() + bits(second).float()")),
    *norms.CHANGES,
    *edits("Each number of a vector got the vector's first of the weight. Read weight.of[e] beside the row's of[e].",
        first_of_a_vector=(WEIGHT, "(weight, column // width * width)")),
    *edits("A thread read the weight of its first vector for all of its vectors. The weight is read at the same place "
        "as the row.", weights_of_thread=(WEIGHT, "(weight, column % (threads * width))")),
    *edits("Each vector got the first vector of the weight. The weight is read at the same place as the row.",
        first_weights=(WEIGHT, "(weight, column % width)")),
    *edits("All blocks read the first row. The row is blockIdx.x.",
        first_row_only=(norms.X_ROW, "0 * row", norms.RESIDUAL_ROW, "0 * row")),
)  # fmt: skip

EXERCISE = Exercise(
    id="13.8",
    title="The same kernel in CUDA C++",
    entries=("cuda_norm_source",),
    cases=norm_cases,
    oracle=norm_oracle,
    plain=(norm_of_the_exact_sum,),
    contracts=(CONTRACT,),
    models=(model_of(norm_of_rows, CHANGES, (sum_of_lanes,), uses=(bits,)),),
    needs=CUDA_ON_HOST,
    limits=Limits(seconds=30.0),  # g++ among them; a loop without an end is told after 2
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
    mistakes=on_host.FAULTS,
    requirements=(on_host.WholeVectors(), on_host.NothingInLocalMemory()),
)
