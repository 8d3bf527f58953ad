"""Kernels that work on a vector block by block: which elements of the result are written, and which are read for them.

A model of such a kernel takes from here what all of them share: the block, the programs, the mask. What the kernel
makes of an element stands in the model itself. `written` says which elements are written, `read` and
`stored` take it.

An answer is free to choose its block and to write from the end, so both are styles of a model, not slips.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from course_lib.checker.specification.case import Case
from course_lib.checker.specification.model import Model, Slip, Slips
from course_lib.checker.specification.seen import Seen
from exercises.topics.memory import load

BLOCKS = (256, 1024, 512, 128, 64, 2048, 32, 16, 4096)  # that people take; the most frequent first
RATIOS = (2, 4)  # of two block lengths that should be one
CAPS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # elements that a fixed number of programs covers
LONGEST = 1 << 17  # elements of a vector that the models speak of
Styles = tuple[tuple[str, ...], ...]


def of_any_block(*names: str, first: int = 256) -> Styles:
    """The styles of a model whose block is free, each with these names; `first` is the block of the course's answer."""
    return tuple((f"block_{block}", *names) for block in sorted(BLOCKS, key=lambda block: block != first))


def elementwise_models(
    compute: Callable, slips: tuple[Slip, ...], styles: Styles, blocks_of_pairs: int = 3
) -> tuple[Model, ...]:
    """One slip in any style first; only where that explains nothing, two in one of the most frequent blocks.

    They are silent on vectors of a million elements, whose end alone is of interest: hundreds of slips would take
    half a minute there.
    """

    def of_shorter(slips: Slips, *args):
        return None if args[0].numel() > LONGEST else compute(slips, *args)

    single = Model(of_shorter, slips, styles, pairs=False, may_be_silent=True)
    return (single, *(Model(of_shorter, slips, (style,), may_be_silent=True) for style in styles[:blocks_of_pairs]))


def block_of(slips: Slips) -> int:
    """The block that the style says."""
    return next((block for block in BLOCKS if slips(f"block_{block}")), BLOCKS[0])


def written(slips: Slips, length: int) -> torch.Tensor:
    """bool [length]: the elements of the result that some program writes."""
    s, block = slips, block_of(slips)
    programs = -(-length // block)
    if s("too_few_programs"):
        programs = length // block
    if s("at_least_one_program"):
        programs = max(1, length // block)
    if s("rounded_to_nearest"):
        programs = round(length / block)
    if s("rounded_to_nearest__at_least_one"):
        programs = max(1, round(length / block))
    if s("last_block_missing"):
        programs -= 1
    if s("last_block_missing__of_several"):
        programs = max(1, programs - 1)
    if s("only_first_block"):
        programs = 1
    end = programs * block
    for ratio in RATIOS:
        if s(f"grid_of_other_blocks__{ratio}"):
            end = -(-length // (ratio * block)) * block
    for count in CAPS:
        if s(f"only_first_block__{count}"):
            end = count
    if s("blocks_overlap"):
        end = programs - 1 + block if programs else 0
    positions = torch.arange(length)
    inside = positions < end
    for ratio in RATIOS:
        if s(f"gaps_between_blocks__{ratio}"):
            inside &= positions % (ratio * block) < block
    if s("mask_by_the_block"):
        s.outside |= length < block
        inside &= positions < block
    if s("first_block_missing"):
        inside &= positions >= block
    if s("first_element_missing"):
        inside &= positions > 0
    if s("last_element_missing"):
        inside &= positions < length - 1
    return inside.flip(0) if s("backwards") else inside


def stored(slips: Slips, values: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """The result [length] that a kernel leaves which writes these values there; NaN elsewhere."""
    if slips("stored_in_block_0"):
        positions = inside.nonzero().flatten()
        left = torch.full_like(values, math.nan)
        for block in positions.split(block_of(slips)):  # each over the one before it
            left[: len(block)] = values[block]
        return left
    return torch.where(inside, values, math.nan)


def read(slips: Slips, tensor: torch.Tensor, inside: torch.Tensor, stride: int | None = None) -> torch.Tensor:
    """[length] elements of a vector, by its own stride or by another, read where `inside` is true; NaN elsewhere."""
    positions = torch.arange(tensor.numel())
    if slips("reads_block_0"):
        positions = positions % block_of(slips)
    stride = tensor.stride(0) if stride is None else stride
    if slips("stride_ignored__block_start"):
        start = positions // block_of(slips) * block_of(slips)
        return load(slips, tensor, start + (positions - start) * stride, inside, math.nan)
    return load(slips, tensor, positions * stride, inside, math.nan)


ONLY_THE_START = (
    "Only the start of the result was written, as much for a long vector as for a short one. Either the number of "
    "programs is fixed or limited, or all work on block 0: is `tl.program_id(0) * BLOCK` in the offsets?"
)
ROUNDED = (
    "The division that counts the programs rounds to the nearest number. A last block that is less than half full then "
    "has no program. However little is in it, it needs one: round up."
)
LAST_BLOCK_MISSING = (
    "The last block was never written, whether it is full or not: one program is missing from the grid. "
    "`triton.cdiv(length, BLOCK)` is their number, nothing subtracted."
)


WRITTEN_INTO_AN_INPUT = (
    "The kernel writes into one of its inputs, so that the caller's vector is changed, and elements may be read that "
    "are no longer what they were. Write into a tensor of its own."
)


def writes_an_input(case: Case, seen: Seen, got: object) -> bool:
    """A `when`: an argument was changed, and not by a store that missed the result."""
    return bool(seen.modified_inputs) and not seen.out_of_bounds


def of_programs(longest: int) -> tuple[Slip, ...]:
    """Slips in the number of programs, their offsets and the mask; `longest` is the longest vector of a check."""
    return (
        Slip(
            "too_few_programs",
            "The division that counts the programs rounds down, so the last, partly filled block has no program and "
            "its elements are never written. Round up, with `triton.cdiv`.",
        ),
        Slip(
            "at_least_one_program",
            "Vectors shorter than a block come out whole, longer ones lose their last, partly filled block: the "
            "division rounds down, and `max(1, ...)` mends the shortest vectors alone. Round up.",
        ),
        Slip("rounded_to_nearest", ROUNDED),
        Slip("rounded_to_nearest__at_least_one", ROUNDED, alone=True),
        Slip("only_first_block", ONLY_THE_START),
        *(
            Slip(f"only_first_block__{count}", ONLY_THE_START, alone=count not in (1024, 4096))
            for count in CAPS
            if count < longest
        ),
        Slip(
            "stored_in_block_0",
            "Every program stores its block at the start of the result, one over the other. Add "
            "`tl.program_id(0) * BLOCK` to the offsets of the store as well.",
        ),
        Slip(
            "mask_by_the_block",
            "The mask compares the offsets with BLOCK. Only the first block passes that, and in a vector shorter than "
            "BLOCK even what lies past its end. Compare with the length: `offsets < length`.",
        ),
        Slip(
            "blocks_overlap",
            "The blocks overlap: program 1 starts one element after program 0 instead of one block after it. Look at "
            "the offsets: the program's number must be multiplied by the block's length.",
        ),
        Slip(
            "last_element_missing",
            "Every element was written but the last one. Positions run from 0 to length - 1, so the mask is "
            "`offsets < length`.",
        ),
        Slip("last_block_missing", LAST_BLOCK_MISSING, alone=True),
        Slip("last_block_missing__of_several", LAST_BLOCK_MISSING, alone=True),
        Slip(
            "first_block_missing",
            "The first block was never written. Programs are numbered from 0: the offsets begin at "
            "`tl.program_id(0) * BLOCK`, with nothing added.",
            alone=True,
        ),
        *(
            Slip(
                f"grid_of_other_blocks__{ratio}",
                f"The grid counts blocks that are {ratio} times as long as the kernel's, so some elements have no "
                "program. Divide the length by the same BLOCK that the kernel gets.",
            )
            for ratio in RATIOS
        ),
        *(
            Slip(
                f"gaps_between_blocks__{ratio}",
                f"Elements between the blocks were never written: program 1 starts {ratio} blocks' length after "
                "program 0. Multiply the program's number by the length of `tl.arange`.",
                alone=True,
            )
            for ratio in RATIOS
        ),
    )


FIRST_ELEMENT_MISSING = Slip(
    "first_element_missing",
    "Every element was written but the first one. Positions begin at 0: is 1 added to the offsets, or does the mask "
    "say `offsets > 0`?",
    alone=True,
)
READS_BLOCK_0 = Slip(
    "reads_block_0",
    "Every block of the result holds what belongs to the first: the load reads block 0 in every program. Add "
    "`tl.program_id(0) * BLOCK` to its offsets as well.",
)
