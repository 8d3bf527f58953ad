"""A matrix product whose work is shared evenly, whatever its number of tiles: stream-K.

    step     one block of inner of one tile; a product has tiles · steps of them, numbered tile by tile
    share    each program takes as many steps one after another, or one more; it may begin and end within a tile

FLOPs are those of `tiled`. Tiles that are shared out whole leave a last round that is not full: 9 tiles on 4 programs
take 3 rounds, as long as 12 tiles would. Here each program does a quarter of the steps, the time of 2.25 tiles. A tile
that several programs share is added up as in `split_k`, but a program leaves one part of a tile at most, however many
tiles there are. So the extra memory is 4 bytes for each number of one tile a program: 17 MB for 132 of 128 × 256.

Who adds: the owner of a tile is the program that has its last step. The others, which come before it, leave their sums
in memory and raise a flag. The owner waits for each flag and adds up, in the order of the programs, so the result has
the same bits at every run. Two rules keep the waiting short, and from lasting forever:

- An owner waits only for programs with lower numbers. They have begun before it, on a GPU with room for only one
  program as in Triton's interpreter, where one runs after another. If the program with a tile's first step owned it, as
  in the paper, it would wait there for one that has not begun.
- A program goes through its steps from the last to the first. So the part that it leaves to another one comes first,
  and the part that it has to wait for comes last, when all others are about to end as well.

Source: Osama et al., Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU,
arXiv 2301.03598.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.arrivals import arrival_counters
from course_lib.kernels.common.machine import multiprocessor_count
from course_lib.kernels.products.candidates import ProductTiles, product_cases, tiles_for
from course_lib.kernels.products.checks import check_operands, check_parts
from course_lib.kernels.products.parts import (
    add_part,
    leave_part,
    multiply,
    numbers_of_tile,
    operands,
    starts_of_rows,
    store_tile,
    tile_of,
)


class Segment(NamedTuple):
    """Steps [begin, end) of a tile, which one program does; its owner adds up the tile."""

    tile: int
    begin: int
    end: int
    owned: bool


@triton.jit
def first_step(program, total, programs):
    """The first of a program's steps; that of the next program is where they end. `first_step.fn` is Python's."""
    return program * (total // programs) + min(program, total % programs)


def stream_k_plan(tiles: int, steps: int, programs: int) -> list[list[Segment]]:
    """What each program does, in its order: tiles of so many steps each, shared among at most so many programs."""
    total = tiles * steps
    programs = min(programs, total)
    plan: list[list[Segment]] = []
    for program in range(programs):
        begin, end = (first_step.fn(number, total, programs) for number in (program, program + 1))
        plan.append([])
        while end > begin:
            tile = (end - 1) // steps
            start = max(begin, tile * steps)
            plan[-1].append(Segment(tile, start - tile * steps, end - tile * steps, end == (tile + 1) * steps))
            end = start
    return plan


@triton.jit
def wait_for_flag(flag):
    """Until another program has raised it; what that one has stored before can be read then. Takes it down again."""
    raised = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    while raised == 0:
        raised = tl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()
    tl.store(flag, 0)


@triton.jit
def stream_k_product_kernel(
    x_pointer, weight_pointer, out_pointer, rows, columns, inner, x_stride, weight_stride, out_stride,
    partial_sums_pointer, arrivals,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: its share of all steps, from the last to the first. arrivals: a flag for each program."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    row_tiles, column_tiles, steps = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N), tl.cdiv(inner, BLOCK_K)
    total = row_tiles * column_tiles * steps
    begin, end = first_step(program, total, programs), first_step(program + 1, total, programs)
    place = tl.arange(0, BLOCK_M)
    while end > begin:
        tile = (end - 1) // steps
        first = tile * steps
        start = tl.maximum(begin, first)
        row_tile, column_tile = tile_of(tile, row_tiles, column_tiles, GROUP)
        row, column = numbers_of_tile(row_tile, BLOCK_M), numbers_of_tile(column_tile, BLOCK_N)
        x_rows = starts_of_rows(x_pointer, row, rows, x_stride)  # [BLOCK_M, 1]
        weight_rows = starts_of_rows(weight_pointer, column, columns, weight_stride)  # [BLOCK_N, 1]
        sums = multiply(x_rows, weight_rows, (start - first) * BLOCK_K, (end - first) * BLOCK_K, inner, BLOCK_K)
        if end == first + steps:
            other = program
            while start > first:  # there are steps that programs before have done
                other -= 1
                wait_for_flag(arrivals + other)
                sums = add_part(sums, partial_sums_pointer, other, place, BLOCK_M)
                start = first_step(other, total, programs)
            store_tile(out_pointer, sums, row, column, rows, columns, out_stride)
        else:
            leave_part(sums, partial_sums_pointer, program, place, BLOCK_M)
            tl.atomic_xchg(arrivals + program, 1, sem="release", scope="gpu")
        end = tl.maximum(begin, first)


def stream_k_product(
    x: torch.Tensor, weight: torch.Tensor, tiles: ProductTiles | None = None, programs: int | None = None
) -> torch.Tensor:
    """x · weightᵀ as `tiled_product` has it, by so many programs; by one for each multiprocessor when None."""
    check_operands(x, weight)
    check_parts("programs", programs)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    if x.shape[0]:
        tiles = tiles or tiles_for(x, parts=True)
        total = tiles.tiles_of(*out.shape) * triton.cdiv(x.shape[1], tiles.inner)
        programs = min(programs or multiprocessor_count(x.device), total)
        sums = torch.empty(programs * tiles.rows * tiles.columns, dtype=torch.float32, device=x.device)
        stream_k_product_kernel[(programs,)](
            *operands(x, weight, out), sums, arrival_counters(programs, x.device), **tiles.settings()
        )
    return out


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate."""
    return product_cases(stream_k_product_kernel, parts=True)
