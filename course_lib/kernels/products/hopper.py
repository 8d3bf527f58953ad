"""A matrix product for Hopper: copies, products and stores at the same time.

out = x · weightᵀ. One program per multiprocessor stays for many tiles of the result. Its warps have one task each (warp
specialisation), and meet at barriers in shared memory:

    producer     one warp   asks the copy engine (TMA) for tiles of x and of the weight, into a ring of buffers, as far
                            ahead as these reach: into the next tile, while this one's end is still at work
    consumers    2 × 4      each multiplies its part of the tile by `wgmma`, one product under way while the next is
                            asked for; its end, and how the copy engine takes it, see `finish`

FLOPs: 2 · rows · outer · inner. A tile of 128 × 256 takes 1,024 cycles for 64 numbers of the inner dimension, and
reads 48 KB for them, mostly from the L2: its programs walk in an order in which they share what they read.

Gluon has no interpreter, so this kernel runs on a Hopper GPU alone. Its meaning: torch.nn.functional.linear.

Sources: NVIDIA, CUTLASS, "Efficient GEMM" (persistent kernels, cooperative and ping-pong); Triton, "Gluon".
"""

import functools
from copy import copy
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.gluon.names import TensorDescriptor, fence_async_shared, gl, gluon, mbarrier, wait_for_stores
from course_lib.kernels.gluon.parts import new_barriers
from course_lib.kernels.hopper.launch import DTYPES, GLUON_DTYPES
from course_lib.kernels.products.checks import check_out, check_product
from course_lib.kernels.products.hopper_limits import ACTIVATION, hopper_product_refusal
from course_lib.kernels.products.hopper_parts import (
    STEP,
    Ring,
    ask_for_first_pieces,
    fill,
    finish,
    multiply,
    new_output,
    next_stage,
    tile_of,
)

CONSUMERS = gl.constexpr(2)  # a third would leave each thread too few registers for 128 sums
# Per thread: of a consumer, of the producer, and at the start, when all share 64k of them alike.
CONSUMER_REGISTERS, PRODUCER_REGISTERS, REGISTERS_AT_START = gl.constexpr(240), gl.constexpr(24), 168
SIZES = ("rows", "columns", "inner", "strip")  # Triton would compile anew where one is 1 or a multiple of 16


@gluon.jit
def produce(x, weight, ring, sizes):
    """The producer: fills the ring with what the program's tiles need, in the order of its use.

    A buffer's n-th use waits until its n-1-th is over. Barriers tell odd phases from even ones; to wait for the phase
    before the first passes at once, which is what an empty buffer wants.
    """
    rows, columns, inner, strip = sizes
    STAGES: gl.constexpr = ring.ready.shape[0]
    TILE_ROWS: gl.constexpr = ring.x.shape[0] // STAGES * ring.x.shape[1]
    TILE_COLUMNS: gl.constexpr = ring.weight.shape[1]
    row_tiles, column_tiles = gl.cdiv(rows, TILE_ROWS), gl.cdiv(columns, TILE_COLUMNS)
    stage = 0
    phase = 1
    for number in range(gl.program_id(0), row_tiles * column_tiles, gl.num_programs(0)):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, strip)
        row, column = row_tile * TILE_ROWS, column_tile * TILE_COLUMNS
        for step in range(gl.cdiv(inner, x.block_type.shape[1])):
            mbarrier.wait(ring.free.index(stage), phase)
            fill(x, weight, ring, stage, row, column, columns + column, step)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def consume(out, epilogue, ring, output, turns, sizes, GROUP: gl.constexpr, TOGETHER: gl.constexpr,
            ACTIVATION: gl.constexpr, GATED: gl.constexpr):  # fmt: skip
    """A consumer: its rows of every tile, or, in turns with the other, every second tile."""
    rows, columns, inner, strip = sizes
    _bias_pointer, residual = epilogue
    STAGES: gl.constexpr = ring.ready.shape[0]
    ROWS: gl.constexpr = ring.x.shape[1]
    TILE_ROWS: gl.constexpr = ring.x.shape[0] // STAGES * ROWS
    TILE_COLUMNS: gl.constexpr = ring.weight.shape[1]
    row_tiles, column_tiles = gl.cdiv(rows, TILE_ROWS), gl.cdiv(columns, TILE_COLUMNS)
    steps = gl.cdiv(inner, ring.x.shape[2])
    first, stride = gl.program_id(0), gl.num_programs(0)
    steps_done = 0
    tiles_done = 0
    if not TOGETHER:
        first += GROUP * stride
        stride *= CONSUMERS
        steps_done += GROUP * steps
    for number in range(first, row_tiles * column_tiles, stride):
        row_tile, column_tile = tile_of(number, row_tiles, column_tiles, strip)
        row, column = row_tile * TILE_ROWS, column_tile * TILE_COLUMNS
        next_turn = None
        if TOGETHER:
            row += GROUP * ROWS
        else:
            next_turn = turns.index(1 - GROUP)
            mbarrier.wait(turns.index(GROUP), tiles_done & 1)
        if residual is not None:
            ask_for_first_pieces(residual, output, row, column)
        accumulator = multiply(ring, steps_done, steps, next_turn, GROUP if TOGETHER else 0)
        finish(out, accumulator, epilogue, output, row, column, columns, tiles_done, ACTIVATION, GATED)
        steps_done += steps if TOGETHER else CONSUMERS * steps
        tiles_done += 1
    wait_for_stores(0)  # the shared memory must outlive the copy from it


@gluon.jit(do_not_specialize=SIZES)
def product_hopper_kernel(
    x, weight, out, bias_pointer, residual, rows, columns, inner, strip,
    TOGETHER: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """One program per multiprocessor: makes buffers and barriers, and sends the groups of warps to their tasks."""
    READERS: gl.constexpr = CONSUMERS if TOGETHER else 1  # consumers that share a tile
    PARTS: gl.constexpr = 2 if GATED else 1
    ring = Ring(
        x=gl.allocate_shared_memory(x.dtype, [STAGES * READERS] + x.block_type.shape, x.layout),
        weight=gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS] + weight.block_type.shape, weight.layout),
        ready=new_barriers(STAGES, 1),
        free=new_barriers(STAGES, READERS),
    )
    first_output, second_output = new_output(out, BUFFERS), new_output(out, BUFFERS)
    turns = new_barriers(CONSUMERS, 1)
    fence_async_shared()
    mbarrier.arrive(turns.index(0), count=1)  # the first consumer begins

    epilogue = bias_pointer, residual
    sizes = rows, columns, inner, strip
    gl.warp_specialize([
        (consume, (out, epilogue, ring, first_output, turns, sizes, 0, TOGETHER, ACTIVATION, GATED)),
        (consume, (out, epilogue, ring, second_output, turns, sizes, 1, TOGETHER, ACTIVATION, GATED)),
        (produce, (x, weight, ring, sizes)),
    ], [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS])  # fmt: skip


class ProductArrangement(NamedTuple):
    """How a program is arranged.

    rows and columns: of what one consumer holds; 64 × 256 or 128 × 128 fill its registers. together: the consumers
    share a tile, one below the other; else each has its own, and they take turns at the matrix units. stages: buffers
    of the ring. piece, buffers: columns that leave for memory at once, and how many such pieces may be on their way.
    strip: row tiles of a strip, see `tile_of`.
    """

    rows: int
    columns: int
    together: bool
    stages: int
    piece: int
    buffers: int
    strip: int

    def settings(self) -> dict:
        """What it is for a kernel's launch, but for num_warps and maxnreg."""
        return {"TOGETHER": self.together, "STAGES": self.stages, "BUFFERS": self.buffers}

    def boxes(self, gated: bool) -> dict[str, tuple[int, int]]:
        """Rows and columns that the copy engine moves at once."""
        return {"x": (self.rows, STEP), "weight": (self.columns // 2 if gated else self.columns, STEP),
                "out": (self.rows, self.piece)}  # fmt: skip


# Measured on an H200. In turns a tile of 128 × 128 is as fast as one of 128 × 256, and leaves fewer programs idle at
# the end; a gate needs columns of both halves, and is faster together.
ARRANGEMENT = ProductArrangement(128, 128, together=False, stages=5, piece=64, buffers=2, strip=8)
TOGETHER = ProductArrangement(64, 256, together=True, stages=4, piece=64, buffers=2, strip=16)
GATED_ARRANGEMENT = TOGETHER._replace(piece=128, buffers=1)
# All of a tile's residual arrives while the tile is multiplied: its buffers are as large as the tile.
RESIDUAL_ARRANGEMENT = TOGETHER._replace(stages=3, piece=128)


def arrangement_for(residual: bool, gated: bool) -> ProductArrangement:
    """How a program is arranged where nothing else is asked for."""
    if gated:
        return GATED_ARRANGEMENT
    return RESIDUAL_ARRANGEMENT if residual else ARRANGEMENT


def product_hopper(
    x, weight, *, bias=None, activation=None, residual=None, gated=False, out=None, arrangement=None
) -> torch.Tensor:
    """x · weightᵀ on Hopper, and what follows it, rounded once: residual + activation(x · weightᵀ + bias).

    Args:
        x: [rows, inner], float16 or bfloat16, on a Hopper GPU; rows may be 0.
        weight: [outer, inner], as nn.Linear keeps it, of x's dtype.
        bias: [outer], of x's dtype, contiguous.
        activation: None or "gelu_tanh".
        residual: [rows, columns], of x's dtype.
        gated: weight holds the rows of a gate, then as many of up; instead of an activation the result is
            silu(gate) · up.
        out: [rows, columns], of x's dtype; a new tensor when None. It may be `residual`.
        arrangement: a `ProductArrangement`; chosen when None.

    columns are outer, or outer / 2 with a gate. Rows of each matrix are contiguous and may lie apart, but begin at
    multiples of 16 bytes.

    Returns out, the same bits at every run.

    Raises:
        ValueError: an argument is not as above; the message names it.
        RuntimeError: this machine cannot run the kernel.
    """
    columns = check_product(x, weight, bias, activation, residual, gated)
    (rows, inner) = x.shape
    if out is None:
        out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    else:
        check_out(out, (rows, columns), x, weight, residual)
    refusal = hopper_product_refusal(x, weight, residual, out, activation)
    if refusal is not None:
        raise refusal.error(f"product_hopper: {refusal.reason}")
    arrangement = arrangement or arrangement_for(residual is not None, gated)
    boxes = arrangement.boxes(gated)
    pieces = boxes["weight"][0] // arrangement.piece
    if pieces not in (1, 2, 4) or pieces % arrangement.buffers:
        raise ValueError(
            f"arrangement has pieces of {arrangement.piece} columns and {arrangement.buffers} buffers; a tile of "
            f"{boxes['weight'][0]} columns leaves in 1, 2 or 4 pieces, which are a multiple of the buffers."
        )
    tile_rows = arrangement.rows * (CONSUMERS.value if arrangement.together else 1)
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(columns, boxes["weight"][0])
    if tiles:
        product_hopper_kernel[(min(tiles, multiprocessor_count(x.device)),)](
            descriptor(x, *boxes["x"]), descriptor(weight, *boxes["weight"]), descriptor(out, *boxes["out"]), bias,
            None if residual is None else descriptor(residual, *boxes["out"]), rows, columns, inner, arrangement.strip,
            ACTIVATION=activation, GATED=gated, **arrangement.settings(), num_warps=4,
            maxnreg=REGISTERS_AT_START,
        )  # fmt: skip
    return out


def descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What the copy engine needs to know of a matrix that moves in tiles [rows, columns]."""
    known = copy(descriptor_like(matrix.shape, matrix.stride(), matrix.dtype, rows, columns))
    known.base = matrix
    return known


@functools.lru_cache(1024)
def descriptor_like(shape, strides, dtype, rows, columns) -> TensorDescriptor:
    """A descriptor for matrices like this, checked once and not at every launch; its own tensor is a stand-in."""
    # A single row is never stepped over; its stride may be anything, but the engine wants one that it knows.
    stride = strides[0] if shape[0] > 1 else triton.cdiv(shape[1], columns) * columns
    layout = matrix_layout(rows, columns, dtype)
    return TensorDescriptor(torch.empty(1, dtype=dtype), list(shape), [stride, 1], [rows, columns], layout)


@functools.cache
def matrix_layout(rows: int, columns: int, dtype: torch.dtype):
    """How a tile lies in shared memory: as wgmma reads it and the copy engine writes it, its banks swizzled."""
    return gl.NVMMASharedLayout.get_default_for([rows, columns], GLUON_DTYPES[dtype])


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return [
        compile_case("bf16"),
        compile_case("fp16", bias=True, activation=ACTIVATION),
        compile_case("bf16", bias=True, activation=ACTIVATION, residual=True),
        compile_case("bf16", bias=True, residual=True, gated=True),
    ]


def compile_case(kind, arrangement=None, *, bias=False, activation=None, residual=False, gated=False) -> CompileCase:
    """kind: "fp16" or "bf16"."""
    arrangement = arrangement or arrangement_for(residual, gated)
    boxes = arrangement.boxes(gated)
    types = {name: f"tensordesc<{kind}[{rows},{columns}],{matrix_layout(rows, columns, DTYPES[kind])!r}>"
             for name, (rows, columns) in boxes.items()}  # fmt: skip
    types |= dict.fromkeys(SIZES, "i32")
    constants = {"ACTIVATION": activation, "GATED": gated, **arrangement.settings()}
    for name, given, kind_of in (("bias_pointer", bias, f"*{kind}"), ("residual", residual, types["out"])):
        if given:
            types[name] = kind_of
        else:
            constants[name] = None
    return CompileCase(
        product_hopper_kernel, types, constants, num_warps=4, archs=(90,), instruction="wgmma",
        options={"maxnreg": REGISTERS_AT_START},
        label=f"{kind} {tuple(arrangement)} bias {bias} activation {activation} residual {residual} gated {gated}",
    )  # fmt: skip
