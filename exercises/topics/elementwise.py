"""Kernels that work on a vector block by block: the slips in their programs, offsets and mask.

Their meanings share a wording, and say in the last lines alone what becomes of an element:

    length = x.numel()
    block = 256
    offsets = torch.arange(-(-length // block))[:, None] * block + torch.arange(block)  # [programs, block]
    inside = offsets < length
    result = torch.full_like(x, math.nan)
    put(result, offsets, load(x, offsets, inside, math.nan) * factor, inside)

An answer is free to choose its block, which is a style and no slip.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from course_lib.checker.specification.edits import Edit, edits, model_of
from course_lib.checker.specification.exercise import Case, Seen
from course_lib.checker.specification.model import Model

BLOCKS = (256, 1024, 512, 128, 64, 2048, 32, 16, 4096)  # that people take; the most frequent first
RATIOS = (2, 4)  # of two block lengths that should be one
CAPS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)  # elements that a fixed number of programs covers
LONGEST = 1 << 17  # elements of a vector that the models speak of
PROGRAMS, STARTS, INSIDE = "-(-length // block)", "[:, None] * block", "offsets < length"


def of_any_block(own: int) -> tuple[Edit, ...]:
    """The styles of a meaning that says `block = own`."""
    return edits("", **{f"block_{block}": (f"block = {own}", f"block = {block}") for block in BLOCKS if block != own})


def elementwise_models(
    meaning: Callable, changes: Iterable[Edit], blocks_of_pairs: int, also: tuple[tuple[str, ...], ...] = ((),)
) -> tuple[Model, ...]:
    """One slip in any style first; only where that explains nothing, two in one of the most frequent blocks.

    They are silent on vectors of a million elements, whose end alone is of interest: hundreds of slips would take
    half a minute there. also: styles beside the block, each with any block.
    """
    whole = model_of(meaning, changes, may_be_silent=True)
    names = {edit.id for edit in changes}
    blocks = [(), *((f"block_{block}",) for block in BLOCKS if f"block_{block}" in names)]
    styles = tuple((*block, *more) for more in also for block in blocks)

    def of_shorter(names: frozenset[str], *args):
        return None if args[0].numel() > LONGEST else whole.compute(names, *args)

    model = replace(whole, compute=of_shorter, styles=styles)
    return (replace(model, pairs=False), *(replace(model, styles=(style,)) for style in styles[:blocks_of_pairs]))


ROUNDED = (
    "The division that counts the programs rounds to the nearest number. A last block that is less than half full then "
    "has no program. However little is in it, it needs one: round up."
)
ONLY_THE_START = (
    "Only the start of the result was written, as much for a long vector as for a short one. Either the number of "
    "programs is fixed or limited, or all work on block 0: is `tl.program_id(0) * BLOCK` in the offsets?"
)
LAST_BLOCK_MISSING = (
    "The last block was never written, whether it is full or not: one program is missing from the grid. "
    "`triton.cdiv(length, BLOCK)` is their number, nothing subtracted."
)
FIRST_ELEMENT_MISSING = edits(
    "Every element was written but the first one. Positions begin at 0: is 1 added to the offsets, or does the mask "
    "say `offsets > 0`?",
    alone=True,
    first_element_missing=(INSIDE, f"({INSIDE}) & (offsets > 0)"),
)
WRITTEN_INTO_AN_INPUT = (
    "The kernel writes into one of its inputs, so that the caller's vector is changed, and elements may be read that "
    "are no longer what they were. Write into a tensor of its own."
)


def writes_an_input(case: Case, seen: Seen, got: object) -> bool:
    """A `when`: an argument was changed, and not by a store that missed the result."""
    return bool(seen.modified_inputs) and not seen.out_of_bounds


def reads_block_0(*tensors: str) -> tuple[Edit, ...]:
    """The slip of a meaning that loads these tensors."""
    loads = [piece for tensor in tensors for piece in (f"load({tensor}, offsets", f"load({tensor}, offsets % block")]
    return edits(
        "Every block of the result holds what belongs to the first: the load reads block 0 in every program. Add "
        "`tl.program_id(0) * BLOCK` to its offsets as well.",
        reads_block_0=tuple(loads),
    )


def of_programs(longest: int) -> tuple[Edit, ...]:
    """Slips in the number of programs, their offsets and the mask; `longest` is the longest vector of a check."""
    capped = {f"only_first_block__{count}": (PROGRAMS, f"-(-{count} // block)") for count in CAPS if count < longest}
    likely = {name: capped.pop(name) for name in [*capped] if name.endswith(("__1024", "__4096"))}
    return (
        *edits(
            "The division that counts the programs rounds down, so the last, partly filled block has no program and "
            "its elements are never written. Round up, with `triton.cdiv`.",
            too_few_programs=(PROGRAMS, "length // block"),
        ),
        *edits(
            "Vectors shorter than a block come out whole, longer ones lose their last, partly filled block: the "
            "division rounds down, and `max(1, ...)` mends the shortest vectors alone. Round up.",
            at_least_one_program=(PROGRAMS, "max(1, length // block)"),
        ),
        *edits(ROUNDED, rounded_to_nearest=(PROGRAMS, "round(length / block)")),
        *edits(ROUNDED, alone=True, rounded_to_nearest__at_least_one=(PROGRAMS, "max(1, round(length / block))")),
        *edits(ONLY_THE_START, only_first_block=(PROGRAMS, "1"), **likely),
        *edits(ONLY_THE_START, alone=True, **capped),
        *edits(
            "Every program stores its block at the start of the result, one over the other. Add "
            "`tl.program_id(0) * BLOCK` to the offsets of the store as well.",
            stored_in_block_0=("put(result, offsets", "put(result, offsets % block"),
        ),
        *edits(
            "The mask compares the offsets with BLOCK. Only the first block passes that, and in a vector shorter than "
            "BLOCK even what lies past its end. Compare with the length: `offsets < length`.",
            mask_by_the_block=(INSIDE, "offsets < block"),
        ),
        *edits(
            "The blocks overlap: program 1 starts one element after program 0 instead of one block after it. Look at "
            "the offsets: the program's number must be multiplied by the block's length.",
            blocks_overlap=(STARTS, "[:, None]"),
        ),
        *edits(
            "Every element was written but the last one. Positions run from 0 to length - 1, so the mask is "
            "`offsets < length`.",
            last_element_missing=(INSIDE, "offsets < length - 1"),
        ),
        *edits(
            LAST_BLOCK_MISSING,
            alone=True,
            last_block_missing=(PROGRAMS, f"{PROGRAMS} - 1"),
            last_block_missing__of_several=(PROGRAMS, f"max(1, {PROGRAMS} - 1)"),
        ),
        *edits(
            "The first block was never written. Programs are numbered from 0: the offsets begin at "
            "`tl.program_id(0) * BLOCK`, with nothing added.",
            alone=True,
            first_block_missing=("torch.arange(block)", "torch.arange(block, 2 * block)"),
        ),
        *(
            edit
            for ratio in RATIOS
            for edit in edits(
                f"The grid counts blocks that are {ratio} times as long as the kernel's, so some elements have no "
                "program. Divide the length by the same BLOCK that the kernel gets.",
                **{f"grid_of_other_blocks__{ratio}": (PROGRAMS, f"-(-length // ({ratio} * block))")},
            )
        ),
        *(
            edit
            for ratio in RATIOS
            for edit in edits(
                f"Elements between the blocks were never written: program 1 starts {ratio} blocks' length after "
                "program 0. Multiply the program's number by the length of `tl.arange`.",
                alone=True,
                **{f"gaps_between_blocks__{ratio}": (STARTS, f"[:, None] * block * {ratio}")},
            )
        ),
    )
