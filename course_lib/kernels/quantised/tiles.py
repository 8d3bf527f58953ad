"""How decode over quantised caches is cut: tiles that hold half the bytes, or a quarter, and keys of its own per warp.

Little's law asks for 27 KB on their way to each multiprocessor of an H200 (see `decode.tiles`). Two tiles of a program
of four warps are 64 KB, in e4m3 with 32 keys for each warp as in INT4 with 64 (D = 128). Two programs on a
multiprocessor take turns, so that one works while the other waits. Measured on an H200 with 32 query heads on 8,
D = 128, 16 sequences of 8,192 tokens, in µs:

                                      16 bits    e4m3    INT4
    bytes                              537 MB     268     151
    a kernel that only reads them         133      74      48
    the decode step                       136      81      63.5
    the same with lengths of 0              6       9      11

So e4m3 could gain 1.8 there and gains 1.7, and INT4 could gain 2.8 and gains 2.1. With 16 or 32 keys for each warp INT4
took 81 and 65: a step's scales are then for fewer keys.
"""

import functools

import torch

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.tiles import SHARED_MEMORY_RESERVE, Tiles
from course_lib.kernels.decode.tiles import Cut, DecodePlan, cheapest_of, group_rows
from course_lib.kernels.quantised.formats import GROUP
from course_lib.kernels.quantised.warps import FP8_NUMBERS, INT4_NUMBERS

NATIVE_E4M3 = 89  # the first architecture that converts it by an instruction
MOST_RESIDENTS = 2  # programs on a multiprocessor
HEAD_DIMS = (64, 128, 256)
LEAST_HEADS = 8  # columns of a matrix instruction
WARPS = 4  # of a program, each with keys of its own


@functools.cache
def fp8_cuts(arch: int | None, dtype: torch.dtype, head_dim: int, heads_per_key_head: int) -> tuple[Cut, ...]:
    """The cut for an architecture (80, 90, ...; None: the interpreter), the query's dtype and a group of heads."""
    columns, keys = head_columns(heads_per_key_head, head_dim), FP8_NUMBERS.value // head_dim
    if arch is None:
        return (Cut(Tiles(columns, 2 * keys, warps=4, stages=1), 1),)
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return (Cut(Tiles(LEAST_HEADS, 32 if head_dim <= 128 else 16, warps=4, stages=1), 2),)
    tiles = Tiles(columns, WARPS * keys, WARPS, stages=3)
    return (Cut(tiles, residents(tiles, 2 * head_dim, arch)),)


@functools.cache
def int4_cuts(arch: int | None, dtype: torch.dtype, head_dim: int, heads_per_key_head: int) -> tuple[Cut, ...]:
    """The cut for INT4, as `fp8_cuts` has it."""
    columns, keys = head_columns(heads_per_key_head, head_dim), min(GROUP, INT4_NUMBERS.value // head_dim)
    if arch is None:
        return (Cut(Tiles(columns, 2 * keys, warps=4, stages=1), 1),)
    if dtype == torch.float32 or arch < 80:
        return (Cut(Tiles(LEAST_HEADS, GROUP, warps=8, stages=1), 1),)
    tiles = Tiles(columns, WARPS * keys, WARPS, stages=3)
    return (Cut(tiles, residents(tiles, 9 * head_dim // 8, arch)),)


def head_columns(heads_per_key_head: int, head_dim: int) -> int:
    """Columns of a tile of scores, for the heads of a group: as many as leave the accumulator in registers."""
    return LEAST_HEADS if heads_per_key_head <= LEAST_HEADS or head_dim > 128 else 2 * LEAST_HEADS


def residents(tiles: Tiles, key_bytes: int, arch: int) -> int:
    """How many programs a multiprocessor has shared memory for, MOST_RESIDENTS at most; key_bytes: and of its value."""
    in_flight = key_bytes * (tiles.stages - 1) * tiles.key_rows
    limits = ARCHITECTURES[max(known for known in ARCHITECTURES if known <= arch)]
    return max(1, min(MOST_RESIDENTS, limits.shared_per_sm // (in_flight + SHARED_MEMORY_RESERVE)))


def fp8_plan(query, key_heads: int, longest: int, splits: int | None = None) -> DecodePlan:
    """`decode_plan` for e4m3 caches, whose keys take half the time of those of 16 bits."""
    batch, query_heads, head_dim = query.shape
    group = query_heads // key_heads
    cuts = fp8_cuts(architecture_of(query.device), query.dtype, head_dim, group)
    return cheapest_of(cuts, batch, group, key_heads, -(-longest // 2), multiprocessor_count(query.device), splits)


def int4_plan(query, key_heads: int, longest: int, splits: int | None = None) -> DecodePlan:
    """`decode_plan` for INT4 caches, whose keys take 4.5/16 of the time of those of 16 bits."""
    batch, query_heads, head_dim = query.shape
    group = query_heads // key_heads
    cuts = int4_cuts(architecture_of(query.device), query.dtype, head_dim, group)
    return cheapest_of(cuts, batch, group, key_heads, -(-9 * longest // 32), multiprocessor_count(query.device), splits)


def native_e4m3(device: torch.device) -> bool:
    """Whether this GPU converts e4m3 by an instruction; in the interpreter the integers' way is taken."""
    return (architecture_of(device) or 0) >= NATIVE_E4M3


def quantised_compile_cases(kernel, cuts_of, types, constexprs, wanted, slow, spills=None) -> list[CompileCase]:
    """A decode kernel as it ships, split, for (arch, head_dim, group, dtype) of `wanted`, and `slow` ones.

    cuts_of: the cuts of such a case. types, constexprs: what not every decode kernel takes, as functions of the case.
    spills: {(arch, head_dim): bytes that a thread may spill there}; elsewhere 8, two numbers that each thread writes
        before the loop for the merge after it.
    """
    cases = []
    every_cut = [(case, cut.tiles) for case in wanted + slow for cut in cuts_of(case[0], case[3], *case[1:3])]
    for case, tiles in every_cut:
        arch, head_dim, group, dtype = case
        kind = KINDS[dtype]
        fast = case in wanted
        cases.append(CompileCase(
            kernel, signature_of(kernel, kind, **types(case)),
            {"HEAD_DIM": head_dim, "GROUP_ROWS": group_rows(group, tiles), **tiles.blocks(), **constexprs(case)},
            num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,),
            max_spill_bytes=(spills or {}).get((arch, head_dim), 8) if fast else None,
            instruction="mma.sync" if fast else None,
            label=f"{kind} {head_dim} group {group} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
