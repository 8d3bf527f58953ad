"""The backward pass of RMSNorm for long rows of 16 bits, in Gluon: each number is read from memory once.

`rms_norm_backward` says what is computed, and calls this for rows of more than 8,192 columns where it can.

A row of 16,384 columns has 32 KB of each input, and the sums for the weight's gradient have 64 KB. Triton's tile would
keep the row in registers while it is reduced, next to the sums. That is more than a thread's 128 registers: 28 of them
go to memory and back for every row, and the kernel reached 0.75 of a copy's bandwidth on an H200. Here the row stays in
shared memory, and the second pass reads it there again. The registers hold the sums, and CHUNK columns at a time.

    shared memory  SLOTS rows of three inputs and one row of the weight: 224 KB, so one program on a multiprocessor
    registers      32 sums of each of 512 threads, and 8 numbers of each input
    bytes          3 reads and 1 write of an element, and a row of partial sums, 64 KB, from each program

While a row is worked on, the next one is on its way. A thread copies just what it reads itself, in 16 bytes.

8,192 rows of 16,384 columns in bf16 took 270 µs on an H200, 0.94 of a copy's bandwidth, and 484 µs in two passes; rows
of 12,000 columns 212 µs, 0.87, and 378 µs.
"""

import torch

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.hardware.device import interpreting, known, machine
from course_lib.kernels.common.signatures import signature_of
from course_lib.kernels.gluon.names import copy_to_shared, end_copies, gl, gluon, meet, wait_for_copies

CHUNK, CHUNKS, SLOTS, NUM_WARPS = 4096, 4, 2, 16
SHARED_BYTES = 227 * 1024  # of one program: what Hopper has
WIDTH = gl.constexpr(8)  # elements of 16 bytes, which divide the columns and every stride


@gluon.jit
def columns_of(chunk, CHUNK: gl.constexpr, owner: gl.constexpr):
    return chunk * CHUNK + gl.arange(0, CHUNK, layout=owner)


@gluon.jit
def ask_for_row(
    slots, slot, row, rows, summed_pointer, gradient_pointer, summed_gradient_pointer, strides, columns,
    CHUNK: gl.constexpr, CHUNKS: gl.constexpr, owner: gl.constexpr,
):  # fmt: skip
    """Start the copies of a row's three inputs into their slot. Beyond the last row or column they write zeros.

    Chunk by chunk, not input by input: the compiler waits between two copies that could meet in one tensor.
    """
    for chunk in gl.static_range(CHUNKS):
        place = slot * CHUNKS + chunk
        column = columns_of(chunk, CHUNK, owner)
        inside = (column < columns) & (row < rows)
        copy_to_shared(slots[0].index(place), summed_pointer + row * (strides[0] * WIDTH) + column, mask=inside)
        copy_to_shared(slots[1].index(place), gradient_pointer + row * (strides[1] * WIDTH) + column, mask=inside)
        if summed_gradient_pointer is not None:
            other_row = summed_gradient_pointer + row * (strides[2] * WIDTH)
            copy_to_shared(slots[2].index(place), other_row + column, mask=inside)
    end_copies()


@gluon.jit
def add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@gluon.jit
def long_rows_kernel(
    summed_pointer,
    weight_pointer,
    gradient_pointer,
    summed_gradient_pointer,
    input_gradient_pointer,
    partial_sums_pointer,
    rows,
    column_groups,
    summed_stride_groups,
    gradient_stride_groups,
    summed_gradient_stride_groups,
    epsilon,
    CHUNK: gl.constexpr,
    CHUNKS: gl.constexpr,
    SLOTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One program: every so many rows, one at a time. partial_sums_pointer: float32 [programs, columns]."""
    owner: gl.constexpr = gl.BlockedLayout([WIDTH], [32], [num_warps], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = summed_pointer.dtype.element_ty
    columns = column_groups * WIDTH
    summed_slots = gl.allocate_shared_memory(dtype, [SLOTS * CHUNKS, CHUNK], shared)
    gradient_slots = gl.allocate_shared_memory(dtype, [SLOTS * CHUNKS, CHUNK], shared)
    other_slots = gl.allocate_shared_memory(dtype, [SLOTS * CHUNKS, CHUNK], shared)
    weights = gl.allocate_shared_memory(dtype, [CHUNKS, CHUNK], shared)
    first = gl.program_id(0).to(gl.int64)
    apart = gl.num_programs(0)

    sums = ()  # CHUNKS of [CHUNK]
    for chunk in gl.static_range(CHUNKS):
        sums = sums + (gl.zeros([CHUNK], gl.float32, owner),)  # type: ignore[assignment]
        column = columns_of(chunk, CHUNK, owner)
        weights.index(chunk).store(gl.load(weight_pointer + column, mask=column < columns, other=0.0))
    slots = summed_slots, gradient_slots, other_slots
    strides = summed_stride_groups, gradient_stride_groups, summed_gradient_stride_groups
    for slot in gl.static_range(SLOTS):
        ask_for_row(slots, slot, first + slot * apart, rows, summed_pointer, gradient_pointer, summed_gradient_pointer,
                    strides, columns, CHUNK, CHUNKS, owner)  # fmt: skip
    slot = 0
    for row in range(first, rows, apart):
        wait_for_copies(SLOTS - 1)
        squares = gl.zeros([CHUNK], gl.float32, owner)
        products = gl.zeros([CHUNK], gl.float32, owner)
        for chunk in gl.static_range(CHUNKS):
            summed = summed_slots.index(slot * CHUNKS + chunk).load(owner).to(gl.float32)  # [CHUNK]
            gradient = gradient_slots.index(slot * CHUNKS + chunk).load(owner).to(gl.float32)  # [CHUNK]
            squares += summed * summed
            products += summed * (gradient * weights.index(chunk).load(owner).to(gl.float32))
        square, product = gl.reduce((squares, products), 0, add_pairs)
        inverse = gl.rsqrt(square / columns + epsilon)
        projection = product * inverse / columns

        meet()  # the compiler would keep in registers what it has read before
        grown = ()
        for chunk in gl.static_range(CHUNKS):
            summed = summed_slots.index(slot * CHUNKS + chunk).load(owner).to(gl.float32)  # [CHUNK]
            gradient = gradient_slots.index(slot * CHUNKS + chunk).load(owner).to(gl.float32)  # [CHUNK]
            normal = summed * inverse
            grown = grown + (sums[chunk] + gradient * normal,)  # type: ignore[assignment]
            found = inverse * (gradient * weights.index(chunk).load(owner).to(gl.float32) - normal * projection)
            if summed_gradient_pointer is not None:
                found += other_slots.index(slot * CHUNKS + chunk).load(owner).to(gl.float32)
            column = columns_of(chunk, CHUNK, owner)
            gl.store(input_gradient_pointer + row * columns + column, found.to(dtype), mask=column < columns)
        sums = grown

        ask_for_row(slots, slot, row + SLOTS * apart, rows, summed_pointer, gradient_pointer, summed_gradient_pointer,
                    strides, columns, CHUNK, CHUNKS, owner)  # fmt: skip
        slot = (slot + 1) % SLOTS
    for chunk in gl.static_range(CHUNKS):
        column = columns_of(chunk, CHUNK, owner)
        gl.store(partial_sums_pointer + first * columns + column, sums[chunk], mask=column < columns)


def takes(weight: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    """Whether these are long rows for this kernel: a norm's weight and the tensors [rows, columns] that are read."""
    columns, vector_bytes = weight.shape[0], WIDTH.value * weight.element_size()
    places = [tensor.data_ptr() for tensor in (weight, *tensors)]
    places += [tensor.stride(0) * tensor.element_size() for tensor in tensors]
    return (
        weight.element_size() == 2
        and tensors[0].element_size() == 2
        and columns <= CHUNK * CHUNKS
        and columns % WIDTH.value == 0
        and all(place % vector_bytes == 0 for place in places)
        and (machine().shared_memory_per_block_bytes or 0) >= SHARED_BYTES
        and not interpreting()
    )


def launch_long_rows(summed, weight, gradient, summed_gradient, input_gradient, epsilon: float) -> torch.Tensor:
    """Returns the partial sums of the weight's gradient, float32 [programs, columns]."""
    rows, columns = summed.shape
    programs = min(rows, known(machine().sm_count))
    strides = [0 if tensor is None else tensor.stride(0) for tensor in (summed, gradient, summed_gradient)]
    partial_sums = torch.empty(programs, columns, dtype=torch.float32, device=summed.device)
    long_rows_kernel[(programs,)](
        summed, weight, gradient, summed_gradient, input_gradient, partial_sums, rows, columns // WIDTH.value,
        *(stride // WIDTH.value for stride in strides), epsilon, CHUNK=CHUNK, CHUNKS=CHUNKS, SLOTS=SLOTS,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return partial_sums


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    constants: dict[str, object] = {"CHUNK": CHUNK, "CHUNKS": CHUNKS, "SLOTS": SLOTS, "num_warps": NUM_WARPS}
    alone: dict[str, object] = constants | {"summed_gradient_pointer": None}
    without = {"num_warps": None, "summed_gradient_pointer": None}
    return [
        CompileCase(long_rows_kernel, signature_of(long_rows_kernel, "bf16", num_warps=None), constants,
                    num_warps=NUM_WARPS, archs=(90, 100), label="bf16"),
        CompileCase(long_rows_kernel, signature_of(long_rows_kernel, "fp16", **without), alone,
                    num_warps=NUM_WARPS, archs=(90, 100), label="fp16 alone"),
    ]  # fmt: skip
