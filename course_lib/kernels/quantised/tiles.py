"""How decode over quantised caches is cut: as decode is, for tiles that hold half the bytes, or a quarter.

Little's law asks for 27 KB on their way to each multiprocessor of an H200 (see `decode.tiles`): 64 keys of e4m3 and
their values are 16 KB. That is less than the bytes need, since here they have to be worked on too: codes become numbers
on the ordinary units, about 600 instructions of a warp for 64 keys (sm_90, from the machine code). Two cuts of e4m3 do
well, each with two programs on a multiprocessor (H100, 32 query heads on 8, D = 128, µs):

    batch, context              1, 128k    16, 8k    64, 4k    with scales by page
    deep, 64 keys, 4 stages        113       112       252     132 · 131 · 269
    wide, 128 keys, 3 stages       116       114       199     114 · 112 · 199
    16 bits                        197       193       367

So wide is taken, and deep where splits give each multiprocessor its two programs and the scales are by head.
"""

import functools

import torch
import triton

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.tiles import SHARED_MEMORY_RESERVE, Tiles
from course_lib.kernels.decode.tiles import INTERPRETED_KEYS, LEAST_ROWS, Cut, DecodePlan, cheapest_of, group_rows
from course_lib.kernels.quantised.formats import GROUP

NATIVE_E4M3 = 89  # the first architecture that converts it by an instruction
MOST_ROWS = 32  # with 64 wgmma would want the values in shared memory, as numbers
FP8_RESIDENTS = 2  # programs of 4 warps on a multiprocessor
HEAD_DIMS = (64, 128, 256)


@functools.cache
def fp8_cuts(arch: int | None, dtype: torch.dtype, head_dim: int, heads_per_key_head: int) -> tuple[Cut, ...]:
    """The cuts for an architecture (80, 90, ...; None: the interpreter), the query's dtype and a group of heads.

    The first is for any problem; the second, if there is one, for one whose splits just fill the multiprocessors.
    """
    rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(heads_per_key_head)))
    if arch is None:
        return (Cut(Tiles(rows, INTERPRETED_KEYS, warps=4, stages=1), 1),)
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return (Cut(Tiles(LEAST_ROWS, 32 if head_dim <= 128 else 16, warps=4, stages=1), 2),)
    deep = Tiles(rows, min(64, 8192 // head_dim), 4, stages=4)
    if rows > LEAST_ROWS:
        return (Cut(Tiles(rows, deep.key_rows, 8, stages=3), 1),)
    # 128 keys of 64 numbers take more registers than there are: a tile of 16 words is less than four warps' columns.
    cuts = (deep,) if head_dim == 64 else (Tiles(rows, 2 * deep.key_rows, 4, stages=3), deep)
    return tuple(Cut(tiles, residents(tiles, head_dim, arch)) for tiles in cuts)


def residents(tiles: Tiles, head_dim: int, arch: int) -> int:
    """How many programs over e4m3 a multiprocessor has shared memory for, FP8_RESIDENTS at most."""
    in_flight = head_dim * 2 * (tiles.stages - 1) * tiles.key_rows + 2 * head_dim * tiles.query_rows
    limits = ARCHITECTURES[max(known for known in ARCHITECTURES if known <= arch)]
    return max(1, min(FP8_RESIDENTS, limits.shared_per_sm // (in_flight + SHARED_MEMORY_RESERVE)))


def fp8_plan(query, key_heads: int, longest: int, splits: int | None = None, by_page: bool = False) -> DecodePlan:
    """`decode_plan` for e4m3 caches, whose keys take half the time of those of 16 bits.

    by_page: whether keys or values have scales by page.
    """
    batch, query_heads, head_dim = query.shape
    group = query_heads // key_heads
    cuts = fp8_cuts(architecture_of(query.device), query.dtype, head_dim, group)
    multiprocessors = multiprocessor_count(query.device)
    tiles, programs_at_once = cuts[-1]
    programs = batch * key_heads * triton.cdiv(group, tiles.query_rows)
    chosen = cuts[0] if by_page or programs >= multiprocessors * programs_at_once else cuts[-1]
    return cheapest_of((chosen,), batch, group, key_heads, -(-longest // 2), multiprocessors, splits)


@functools.cache
def int4_cuts(arch: int | None, dtype: torch.dtype, head_dim: int, heads_per_key_head: int) -> tuple[Cut, ...]:
    """The cut for INT4: tiles of the 64 keys that have one scale, 186 registers a thread at head dimension 128.

    With 32 rows there would be none left, so groups of more than 16 heads read the cache once for every 16.
    """
    if arch is None:
        return (Cut(Tiles(LEAST_ROWS, GROUP, warps=4, stages=1), 1),)
    if dtype == torch.float32 or arch < 80:
        return (Cut(Tiles(LEAST_ROWS, GROUP, warps=8, stages=1), 1),)
    if head_dim == 256:
        return (Cut(Tiles(LEAST_ROWS, GROUP, warps=8, stages=3), 1),)
    return (Cut(Tiles(LEAST_ROWS, GROUP, warps=4, stages=3), 2),)


def int4_plan(query, key_heads: int, longest: int, splits: int | None = None) -> DecodePlan:
    """`decode_plan` for INT4 caches, whose keys take 4.5/16 of the time of those of 16 bits."""
    batch, query_heads, head_dim = query.shape
    group = query_heads // key_heads
    cuts = int4_cuts(architecture_of(query.device), query.dtype, head_dim, group)
    return cheapest_of(cuts, batch, group, key_heads, -(-9 * longest // 32), multiprocessor_count(query.device), splits)


def native_e4m3(device: torch.device) -> bool:
    """Whether this GPU converts e4m3 by an instruction; in the interpreter the integers' way is taken."""
    return (architecture_of(device) or 0) >= NATIVE_E4M3


def quantised_compile_cases(kernel, cuts_of, types, constexprs, wanted, slow) -> list[CompileCase]:
    """A decode kernel as it ships, split, for (arch, head_dim, group, dtype) of `wanted`, and `slow` ones.

    cuts_of: the cuts of such a case. types, constexprs: what not every decode kernel takes, as functions of the case.
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
            # Two numbers of each thread, written before the loop for the merge after it.
            max_spill_bytes=8 if fast else None, instruction="mma.sync" if fast else None,
            label=f"{kind} {head_dim} group {group} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
