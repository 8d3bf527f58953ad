"""Merge the splits of a latent decode step: few rows, 512 columns, and up to a hundred parts of each.

    lse = log Σ_s exp(lse_s)            output = Σ_s exp(lse_s - lse) · output_s

Bytes: 4 · splits · 513 read per row, one row written. With one sequence of 128 heads in 64 splits these are 17 MB, and
time is what it takes to have them all on their way: `combine_splits` reads the parts of a row one after another, and
has a program for each row; here a program asks for all parts of some columns of its row at once.
"""

import triton
import triton.language as tl

from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.numbers import LN_2, LOG2_E

VALUE_DIM = 512
TILE_NUMBERS = 8192  # of a program: 64 registers of each of its 128 threads


@triton.jit(do_not_specialize=("rows", "splits"))
def merge_latent_splits_kernel(
    partial_outputs, partial_lses, output, lse_pointer, rows, splits,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_D columns of one row, all of its parts.

    partial_outputs [splits, rows, DIM] and partial_lses [splits, rows] are contiguous float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    parts = tl.arange(0, BLOCK_S)
    exists = parts < splits
    lses = tl.load(partial_lses + parts.to(tl.int64) * rows + row, mask=exists, other=float("-inf")) * LOG2_E
    tiles = partial_outputs + (parts[:, None].to(tl.int64) * rows + row) * DIM + columns[None, :]
    parts_of_row = tl.load(tiles, mask=exists[:, None], other=0.0)  # [BLOCK_S, BLOCK_D]
    largest = tl.max(lses, axis=0)
    shares = tl.exp2(lses - tl.where(largest == float("-inf"), 0.0, largest))  # [BLOCK_S]
    total = tl.sum(shares, axis=0)
    total = tl.where(total == 0.0, 1.0, total)
    # A part without keys may hold anything, and 0 · NaN is NaN.
    weighted = tl.where((shares == 0.0)[:, None], 0.0, parts_of_row * shares[:, None])
    merged = tl.sum(weighted, axis=0) / total  # [BLOCK_D]
    tl.store(output + row * DIM + columns, merged.to(output.dtype.element_ty))
    if lse_pointer is not None:
        tl.store(lse_pointer + row, (largest + tl.log2(total)) * LN_2, mask=tl.program_id(1) == 0)


def merge_latent_splits(partial_outputs, partial_lses, output, lse) -> None:
    """Merges float32 [splits, rows, 512] and [splits, rows] into output [rows, 512] and, unless None, lse [rows]."""
    splits, rows = partial_lses.shape
    block_s = triton.next_power_of_2(splits)
    block_d = merge_columns(block_s)
    merge_latent_splits_kernel[(rows, VALUE_DIM // block_d)](
        partial_outputs, partial_lses, output, lse, rows, splits,
        DIM=VALUE_DIM, BLOCK_D=block_d, BLOCK_S=block_s, num_warps=4,
    )  # fmt: skip


def merge_columns(block_s: int) -> int:
    return max(32, min(VALUE_DIM, TILE_NUMBERS // block_s))


def compile_cases() -> list[CompileCase]:
    """What ships, for the compile gate: few splits and many."""
    types = dict.fromkeys(("partial_outputs", "partial_lses", "lse_pointer"), "*fp32") | {"output": "*bf16"}
    return [CompileCase(merge_latent_splits_kernel, types | {"rows": "i32", "splits": "i32"},
                        {"DIM": VALUE_DIM, "BLOCK_D": merge_columns(block_s), "BLOCK_S": block_s},
                        num_warps=4, label=f"{block_s} splits")
            for block_s in (2, 4, 64, 128)]  # fmt: skip
