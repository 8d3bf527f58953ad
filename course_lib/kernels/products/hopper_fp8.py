"""A product of 8-bit matrices with a scale for each block, for Hopper: the form of `hopper`, with sums on two levels.

x is e4m3 with a scale for each row and 128 numbers of the inner dimension, the weight with one for each 128 × 128. The
matrix units keep about 14 bits while they add numbers of 8 bits, so their sum is over 128 only; times both scales it is
added to a sum in float32. A consumer begins two products at once: while it adds the first, the second runs. While it
adds the second, the matrix units have the other consumer's.

Gluon has no interpreter, so this kernel runs on a Hopper GPU alone; its meaning is the first line of `product_fp8`.

FLOPs: 2 · rows · outer · inner. A tile of 128 × 128 takes 512 cycles for 128 numbers of the inner dimension.

Measured on an H200, 4,096 × 7,168 × 16,384, in two runs: 1,048 and 1,170 TFLOP/s, where `torch._scaled_mm` reaches
1,181 and 1,304. Two products at a time made it a tenth faster. After two seconds both are at the card's 700 W. From
then on the rate depends on the energy of each product: 995 TFLOP/s at 1,395 MHz, `_scaled_mm` 1,094 at 1,365. With the
copies left out this kernel ran at 1,770 MHz for the same power. Three consumers, 192 rows that share what they read,
were as fast for the same work, but fewer sizes are multiples of 192. To let the consumers take turns at the matrix
units cost 15 %.

Sources: DeepSeek-AI, DeepSeek-V3, arXiv 2412.19437, 3.3.2; its DeepGEMM.
"""

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.gluon.limits import COPY_ENGINE_BYTES, machine_refusal
from course_lib.kernels.gluon.names import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.launch import DTYPES
from course_lib.kernels.products.hopper import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    PRODUCER_REGISTERS,
    REGISTERS_AT_START,
    SIZES,
    descriptor,
    matrix_layout,
    produce,
)
from course_lib.kernels.products.hopper_parts import Ring, finish, new_output, next_stage, tile_of

BLOCK = gl.constexpr(128)  # numbers that share a scale
GROUP_ROWS, STAGES, STRIP = 64, 6, 16
BOXES = {"x": (GROUP_ROWS, BLOCK.value), "weight": (BLOCK.value, BLOCK.value), "out": (GROUP_ROWS, BLOCK.value)}


@gluon.jit
def multiply_scaled(ring, scales, row, column_tile, rows, steps_done, steps, GROUP: gl.constexpr):
    """A warp group's part of a tile, [64, 128] in float32; steps_done: those that the ring was used for before.

    Two products are asked for at once, so that the second runs while the first is added to the sum. If one were still
    under way at the end of an iteration, ptxas would wait for every product right after it begins. So each iteration
    begins two and waits for both.
    """
    x_scales, weight_scales = scales
    STAGES: gl.constexpr = ring.ready.shape[0]
    ROWS: gl.constexpr = ring.x.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    rows_here = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    x_scales += rows_here.to(gl.int64) * steps
    weight_scales += column_tile * steps
    exists = rows_here < rows
    total = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    stage, phase = steps_done % STAGES, steps_done // STAGES & 1
    # Scales are asked for two products ahead: they come from memory, and a product takes less time than that.
    scale = load_scale(x_scales, weight_scales, 0, exists)
    second_scale = load_scale(x_scales, weight_scales, min(1, steps - 1), exists)
    for pair in range(steps // 2):
        next_scale = load_scale(x_scales, weight_scales, min(2 * pair + 2, steps - 1), exists)
        next_second_scale = load_scale(x_scales, weight_scales, min(2 * pair + 3, steps - 1), exists)
        second_stage, second_phase = next_stage(stage, phase, STAGES)
        product = begin_product(ring, stage, phase, GROUP, LAYOUT)
        second_product = begin_product(ring, second_stage, second_phase, GROUP, LAYOUT)
        product = warpgroup_mma_wait(1, deps=[product])
        mbarrier.arrive(ring.free.index(stage), count=1)
        total += product * gl.expand_dims(scale, 1)
        second_product = warpgroup_mma_wait(0, deps=[second_product])
        mbarrier.arrive(ring.free.index(second_stage), count=1)
        total += second_product * gl.expand_dims(second_scale, 1)
        scale, second_scale = next_scale, next_second_scale
        stage, phase = next_stage(second_stage, second_phase, STAGES)
    if steps % 2 == 1:
        product = begin_product(ring, stage, phase, GROUP, LAYOUT)
        product = warpgroup_mma_wait(0, deps=[product])
        mbarrier.arrive(ring.free.index(stage), count=1)
        total += product * gl.expand_dims(scale, 1)
    return total


@gluon.jit
def begin_product(ring, stage, phase, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Asks the matrix unit for the warp group's product of one block, when its buffer is filled."""
    ROWS: gl.constexpr = ring.x.shape[1]
    x = ring.x.index(stage * (ring.x.shape[0] // ring.ready.shape[0]) + GROUP)
    empty = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    mbarrier.wait(ring.ready.index(stage), phase)
    return warpgroup_mma(x, ring.weight.index(stage).permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def load_scale(x_scales, weight_scales, step, exists):
    """The factor of each row's sum over one block of the inner dimension, [64]."""
    return gl.load(x_scales + step, mask=exists, other=0.0) * gl.load(weight_scales + step)


@gluon.jit
def consume_scaled(out, scales, ring, output, sizes, GROUP: gl.constexpr):
    """A consumer: its 64 rows of every tile."""
    rows, columns, inner, strip = sizes
    ROWS: gl.constexpr = ring.x.shape[1]
    row_tiles, column_tiles = gl.cdiv(rows, CONSUMERS * ROWS), gl.cdiv(columns, BLOCK)
    steps = gl.cdiv(inner, BLOCK)
    steps_done = 0
    for number in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, strip)
        row = (row_tile * CONSUMERS + GROUP) * ROWS
        total = multiply_scaled(ring, scales, row, column_tile, rows, steps_done, steps, GROUP)
        finish(out, total, (None, None), output, row, column_tile * BLOCK, columns, 0, None, False)
        steps_done += steps
    wait_for_stores(0)  # the shared memory must outlive the copy from it


@gluon.jit(do_not_specialize=SIZES)
def product_fp8_kernel(
    x, weight, out, x_scales, weight_scales, rows, columns, inner, strip, STAGES: gl.constexpr
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    ring = Ring(
        x=gl.allocate_shared_memory(x.dtype, [STAGES * CONSUMERS] + x.block_type.shape, x.layout),
        weight=gl.allocate_shared_memory(weight.dtype, [STAGES] + weight.block_type.shape, weight.layout),
        ready=new_barriers(STAGES, 1),
        free=new_barriers(STAGES, CONSUMERS),
    )
    first_output, second_output = new_output(out, 1), new_output(out, 1)
    fence_async_shared()
    scales = x_scales, weight_scales
    sizes = rows, columns, inner, strip
    gl.warp_specialize([
        (consume_scaled, (out, scales, ring, first_output, sizes, 0)),
        (consume_scaled, (out, scales, ring, second_output, sizes, 1)),
        (produce, (x, weight, ring, sizes)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


def product_fp8(x, weight, x_scales, weight_scales) -> torch.Tensor:
    """(x · x_scales) · (weight · weight_scales)ᵀ in bfloat16, [rows, outer].

    Args:
        x, weight: [rows, inner] and [outer, inner], float8_e4m3fn, contiguous; inner a multiple of 16, outer of 8.
        x_scales: float32 [rows, ⌈inner / 128⌉], contiguous. weight_scales: float32 [⌈outer / 128⌉, ⌈inner / 128⌉].

    Raises a ValueError for other arguments, and a RuntimeError where this machine cannot run the kernel.
    """
    refusal = machine_refusal(x.device)
    if refusal is not None:
        raise refusal.error(f"product_fp8: {refusal.reason}")
    check_scaled(x, weight, x_scales, weight_scales)
    (rows, inner), outer = x.shape, weight.shape[0]
    out = torch.empty(rows, outer, dtype=torch.bfloat16, device=x.device)
    tiles = triton.cdiv(rows, CONSUMERS.value * GROUP_ROWS) * triton.cdiv(outer, BLOCK.value)
    if tiles:
        product_fp8_kernel[(min(tiles, multiprocessor_count(x.device)),)](
            descriptor(x, *BOXES["x"]), descriptor(weight, *BOXES["weight"]), descriptor(out, *BOXES["out"]), x_scales,
            weight_scales, rows, outer, inner, STRIP, STAGES=STAGES, num_warps=4, maxnreg=REGISTERS_AT_START,
        )  # fmt: skip
    return out


def check_scaled(x, weight, x_scales, weight_scales) -> None:
    """Raises a ValueError, in a sentence, unless the matrices fit one another and the copy engine."""
    (rows, inner), outer = x.shape, weight.shape[0]
    blocks = triton.cdiv(inner, BLOCK.value)
    for name, tensor, dtype, shape in (
        ("x", x, torch.float8_e4m3fn, (rows, inner)),
        ("weight", weight, torch.float8_e4m3fn, (outer, inner)),
        ("x_scales", x_scales, torch.float32, (rows, blocks)),
        ("weight_scales", weight_scales, torch.float32, (triton.cdiv(outer, BLOCK.value), blocks)),
    ):
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != x.device or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}; it must be "
                f"{shape}, {dtype}, contiguous, and on {x.device}."
            )
        if tensor.data_ptr() % COPY_ENGINE_BYTES:
            raise ValueError(f"{name} does not begin at a multiple of {COPY_ENGINE_BYTES} bytes; call {name}.clone().")
    if inner == 0 or inner % COPY_ENGINE_BYTES or outer == 0 or outer % 8:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be multiples of 8 and {COPY_ENGINE_BYTES}.")


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    kinds = {"x": "fp8e4nv", "weight": "fp8e4nv", "out": "bf16"}
    types = {name: f"tensordesc<{kind}[{BOXES[name][0]},{BOXES[name][1]}],"
                   f"{matrix_layout(*BOXES[name], DTYPES[kind])!r}>" for name, kind in kinds.items()}  # fmt: skip
    types |= {"x_scales": "*fp32", "weight_scales": "*fp32"} | dict.fromkeys(SIZES, "i32")
    return [CompileCase(
        product_fp8_kernel, types, {"STAGES": STAGES}, num_warps=4, archs=(90,), instruction="wgmma",
        options={"maxnreg": REGISTERS_AT_START}, label="e4m3",
    )]  # fmt: skip
