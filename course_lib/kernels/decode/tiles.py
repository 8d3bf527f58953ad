"""How decode kernels are cut into tiles, and the choice among the cuts: which, and into how many splits.

A program is bound by memory. What counts is how many bytes are on their way: Little's law asks for 4.4 TB/s · 0.8 µs /
132 = 27 KB on each multiprocessor of an H200. And how seldom its warps wait for each other, which they do several times
in each tile. Three cuts do well on different problems, at D = 128 in 16 bits:

    large    128 keys, two tiles of K and V in flight: 136 KB of shared memory, one program on a multiprocessor. Best
             where splits can give every multiprocessor one program: nothing is read while programs change.
    medium   64 keys, two tiles in flight: 70 KB, two programs on a multiprocessor. Best where without splits there are
             about two for each: 32 sequences of 8 KV heads, which need no merge then.
    small    64 keys, one tile in flight: 38 KB, four programs on a multiprocessor. Best where there are more programs
             than that anyway: a long wave of many programs ends more evenly than four short ones of few.

`decode_plan` takes the cut, with its number of splits, whose estimated time is less.
Measured on an H200: see `python -m course_lib bench decode`.
"""

import functools
from typing import NamedTuple

import torch
import triton

from course_lib.hardware.compiler.architectures import ARCHITECTURES
from course_lib.hardware.compiler.cases import CompileCase
from course_lib.kernels.attention.tiles import candidate_tiles
from course_lib.kernels.common.machine import architecture_of, multiprocessor_count
from course_lib.kernels.common.signatures import KINDS, signature_of
from course_lib.kernels.common.tiles import SHARED_MEMORY_RESERVE, Tiles
from course_lib.kernels.decode.splits import cheapest_splits, estimated_keys

# The least rows of a matrix instruction's tile, and the most that keep scores and accumulator in registers, by padded
# head dimension, up to.
LEAST_ROWS = 16
MOST_ROWS = {128: 64, 256: 32}
INTERPRETED_KEYS = 64
LARGE_ELEMENTS, SMALL_ELEMENTS = 16384, 8192  # of a tile of keys
MOST_ROWS_MERGED_IN_FEW_REGISTERS = 8


class Cut(NamedTuple):
    """Tiles, and how many programs with them a multiprocessor works on at a time."""

    tiles: Tiles
    residents: int


class DecodePlan(NamedTuple):
    """How a decode step is launched."""

    tiles: Tiles
    splits: int
    programs: int  # of a sequence, before its keys are split: KV heads, times tiles that a group of heads needs


@functools.cache
def decode_cuts(arch: int | None, dtype: torch.dtype, block_d: int, heads_per_key_head: int) -> tuple[Cut, ...]:
    """The cuts for an architecture (80, 90, ...; None: the interpreter), a padded head dimension and a group size."""
    rows = min(MOST_ROWS[max(128, block_d)], max(LEAST_ROWS, triton.next_power_of_2(heads_per_key_head)))
    if arch is None:
        return (Cut(Tiles(rows, INTERPRETED_KEYS, warps=4, stages=1), 1),)
    if dtype == torch.float32 or arch < 80:  # no matrix instructions: operands stay in registers
        return (Cut(Tiles(LEAST_ROWS, 32 if block_d <= 128 else 16, warps=4, stages=1), 2),)
    limits = ARCHITECTURES[max(known for known in ARCHITECTURES if known <= arch)]
    warps = 4 if rows == LEAST_ROWS else 8
    small = Tiles(rows, min(64, SMALL_ELEMENTS // block_d), warps, stages=2)
    medium = small._replace(stages=3)
    large = Tiles(rows, min(128, LARGE_ELEMENTS // block_d), warps, stages=3)
    if buffered_bytes(large, block_d) > limits.shared_per_block - 2 * SHARED_MEMORY_RESERVE or rows == 64:
        large = Tiles(rows, small.key_rows, warps, stages=3)  # 64 rows of 128 scores would not fit the registers
    if rows > LEAST_ROWS:  # eight warps of one program fill the registers that four programs would share
        return (Cut(large, 1),)
    # Merging the rows of a group of 16 takes 150 registers: no more than three programs fit then.
    few = heads_per_key_head > MOST_ROWS_MERGED_IN_FEW_REGISTERS
    return (Cut(large, 1), Cut(medium, min(2, residents(limits, medium, block_d))),
            Cut(small, min(3 if few else 4, residents(limits, small, block_d))))  # fmt: skip


def residents(limits, tiles: Tiles, block_d: int) -> int:
    """Programs whose shared memory fits into a multiprocessor's; at least 1."""
    return max(1, limits.shared_per_sm // (buffered_bytes(tiles, block_d) + SHARED_MEMORY_RESERVE))


def buffered_bytes(tiles: Tiles, block_d: int) -> int:
    """Shared memory of a program in bytes: all stages but the one that is worked on, and the queries; 16-bit types."""
    return 2 * block_d * (tiles.query_rows + 2 * (tiles.stages - 1) * tiles.key_rows)


def decode_plan(query, key_heads: int, longest: int, splits: int | None = None) -> DecodePlan:
    """The plan for query [batch, query_heads, head_dim], which sees at most `longest` keys: with a window, its own.

    splits: to be used; chosen when None. `decode_workspace` needs to know them: `decode_plan(...).splits`.
    """
    batch, query_heads, head_dim = query.shape
    return cheapest_plan(architecture_of(query.device), query.dtype, triton.next_power_of_2(head_dim), batch,
                         query_heads // key_heads, key_heads, longest, multiprocessor_count(query.device),
                         splits)  # fmt: skip


def windowed(capacity: int, window: int | None) -> tuple[int, int | None]:
    """Of caches with room for `capacity` keys: the most keys that a query sees, and its window in 32 bits."""
    return (capacity, None) if window is None else (min(capacity, window + 1), min(window, capacity))


def cheapest_plan(arch, dtype, block_d, batch, group, key_heads, longest, multiprocessors, splits) -> DecodePlan:
    return cheapest_of(decode_cuts(arch, dtype, block_d, group), batch, group, key_heads, longest, multiprocessors,
                       splits)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def cheapest_of(cuts: tuple[Cut, ...], batch, group, key_heads, longest, multiprocessors, splits) -> DecodePlan:
    """The plan with the least estimated time; `longest` in keys of 16 bits, of which others take as long as they do."""
    plans = []
    for tiles, residents in cuts:
        programs = key_heads * triton.cdiv(group, tiles.query_rows)
        chosen = splits or cheapest_splits(batch * programs, longest, multiprocessors, residents)
        time = estimated_keys(chosen, batch * programs, longest, multiprocessors, residents)
        plans.append((time, DecodePlan(tiles, chosen, programs)))
    return min(plans, key=lambda plan: plan[0])[1]


@functools.cache
def prefill_tiles(arch: int | None, dtype: torch.dtype, block_d: int) -> Tiles:
    """The tiles of prefill: 64 rows of queries and heads, which a Hopper's matrix units take at once."""
    if arch is None:
        return Tiles(64, INTERPRETED_KEYS, warps=4, stages=1)
    if dtype == torch.float32 or arch < 80:
        return Tiles(32, 16, warps=8, stages=1)
    if block_d > 128:
        return Tiles(64, 32 if arch >= 90 else 16, warps=8, stages=2)
    return candidate_tiles(arch, dtype, block_d)[0]


def group_rows(heads_per_key_head: int, tiles: Tiles) -> int:
    """Rows of a tile that hold heads, as a power of two: what the merge of splits works on."""
    return min(triton.next_power_of_2(heads_per_key_head), tiles.query_rows)


def decode_settings(query, key_heads: int, tiles: Tiles) -> dict:
    """What a launch on query [batch, query_heads, head_dim] tells every decode kernel's compiler."""
    query_heads, head_dim = query.shape[1:]
    return {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim),
            "GROUP_ROWS": group_rows(query_heads // key_heads, tiles), **tiles.settings()}  # fmt: skip


def decode_compile_cases(kernel, **constexprs: int) -> list[CompileCase]:
    """A decode kernel as it ships: split, so that it has all the code. constexprs: what not every decode kernel has."""
    sixteen_bits = [(arch, 128, 4, torch.bfloat16) for arch in (80, 86, 89, 90, 100, 120)]
    sixteen_bits += [(90, head_dim, group, torch.bfloat16) for head_dim, group in ((64, 4), (128, 1), (128, 16),
                     (128, 64), (256, 4), (256, 64))] + [(90, 96, 4, torch.float16)]  # fmt: skip
    slow = [(75, 64, 4, torch.float16), (75, 128, 4, torch.float16), (80, 128, 4, torch.float32)]
    cases = []
    for (arch, head_dim, group, dtype), tiles in (
        (case, cut.tiles) for case in sixteen_bits + slow
        for cut in decode_cuts(case[0], case[3], triton.next_power_of_2(case[1]), case[2])
    ):  # fmt: skip
        kind = KINDS[dtype]
        block_d = triton.next_power_of_2(head_dim)
        fast = (arch, head_dim, group, dtype) in sixteen_bits
        hopper = "mma.sync" if tiles.query_rows < 64 else "wgmma"
        cases.append(CompileCase(
            kernel, signature_of(kernel, kind),
            {"HEAD_DIM": head_dim, "BLOCK_D": block_d, "GROUP_ROWS": group_rows(group, tiles), **tiles.blocks(),
             "SAME_STRIDES": True, **constexprs},
            num_warps=tiles.warps, num_stages=tiles.stages, archs=(arch,), max_spill_bytes=0 if fast else None,
            instruction={80: "mma.sync", 89: "mma.sync", 90: hopper} if fast else None,
            label=f"{kind} {head_dim} group {group} {tuple(tiles)}",
        ))  # fmt: skip
    return cases
