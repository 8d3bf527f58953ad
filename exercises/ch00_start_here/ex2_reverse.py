"""Exercise 0.2: reverse a vector."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, edits
from course_lib.checker.specification.contract import Contract
from exercises.topics.elementwise import elementwise_models, of_any_block, of_programs
from exercises.topics.pointers import load, put
from exercises.topics.vector_inputs import OF_FLOAT32


def reverse_oracle(x):
    return x.flip(0)


def reverse_cases(draw):
    cases = [
        Case("8 elements", (draw.normal(8),)),
        Case("12,285 elements: more blocks than any fixed number", (draw.normal(12_285),)),
        Case("8 elements once more", (draw.normal(8),)),
    ]
    if draw.on_gpu:
        cases.append(Case("one element", (draw.normal(1),)))
        cases.append(Case("1025 elements", (draw.normal(1025),)))
        cases.append(Case("a million elements less one", (draw.normal(999_999),)))
    return cases


CONTRACT = Contract(
    lambda draw, *, length, values: (values(draw, length),),
    choices={"length": (1, 2, 127, 257, 1023, 1024), "values": OF_FLOAT32},
    says={"length": "any length from 1", "values": "float32"},
    most=6,
)


def reversed_vector(x):
    length = x.numel()
    block = 256
    offsets = torch.arange(-(-length // block))[:, None] * block + torch.arange(block)  # [programs, block]
    inside = offsets < length
    result = torch.full_like(x, math.nan)
    put(result, offsets, load(x, length - 1 - offsets, inside, math.nan), inside)
    return result


SOURCE = "length - 1 - offsets"
LOADED, UNDER_A_MASK = f"load(x, {SOURCE}, inside", "load(x, {0}, inside & ({0} >= 0) & ({0} < length)"
ENDS_AT_THE_BLOCKS = "(offsets // block + 1) * block - 1 - offsets % block"
BEGINS_AT_THE_END = "length - (offsets // block + 1) * block + offsets % block"
FROM_THE_LAST = "-(-length // block) * block - 1 - offsets"
CHANGES = (
    *edits(
        "The result is x in its old order. If you reverse the addresses of both the load and the store, the two "
        "cancel. Reverse only one of them.",
        not_reversed=(SOURCE, "offsets"),
    ),
    *edits(
        "Everything is one place too late: for position 0 the kernel reads x[length], which does not exist. The "
        "last element is `length - 1`.",
        shifted_by_one=(SOURCE, "length - offsets"),
    ),
    *edits(
        "Everything is one place too early: for position 0 the kernel reads the second to last element. The last "
        "element is `length - 1`.",
        shifted_by_one__early=(SOURCE, "length - 2 - offsets"),
    ),
    *edits(
        "Each block was reversed in its own place, while the blocks kept their order. Count from the end of the whole "
        "vector: `length - 1 - offsets`.",
        reversed_within_blocks=(
            SOURCE,
            "torch.clamp((offsets // block + 1) * block, max=length) - 1 - offsets % block",
        ),
        reversed_within_blocks__whole=(SOURCE, ENDS_AT_THE_BLOCKS),
        reversed_within_blocks__masked=(LOADED, UNDER_A_MASK.format(ENDS_AT_THE_BLOCKS)),
    ),
    *of_programs(12_285),
    *edits(
        "The blocks are in reverse order, but the elements inside each block are not. Count every element from the end "
        "of the vector: `length - 1 - offsets`.",
        blocks_in_reverse=(SOURCE, BEGINS_AT_THE_END),
        blocks_in_reverse__masked=(LOADED, UNDER_A_MASK.format(BEGINS_AT_THE_END)),
        blocks_in_reverse__from_the_start=(
            *(LOADED, UNDER_A_MASK.format("(-(-length // block) - 1 - offsets // block) * block + offsets % block")),
        ),
    ),
    *edits(
        "The positions are counted from the end of the last block, which is past the vector's end unless the block is "
        "full. Count from the vector's last element: `length - 1 - offsets`.",
        counted_from_the_last_block=(SOURCE, FROM_THE_LAST),
        counted_from_the_last_block__masked=(LOADED, UNDER_A_MASK.format(FROM_THE_LAST)),
    ),
    *edits(
        "The kernel walks backwards from the vector's first element, out of the vector. Start at its last one: "
        "`x_pointer + length - 1 - offsets`.",
        length_forgotten=(SOURCE, "-offsets"),
    ),
    *edits(
        "Every element of the result is the first of x: the load has one address, without offsets.",
        first_element_everywhere=(SOURCE, "torch.zeros_like(offsets)"),
    ),
    *edits(
        "Every element of the result is the last of x: the load has one address, without offsets.",
        last_element_everywhere=(SOURCE, "torch.full_like(offsets, length - 1)"),
    ),
    *edits("", backwards=("result = torch", "offsets = length - 1 - offsets\nresult = torch")),
    *of_any_block(256),
)


def _nothing_stored(case, seen, got) -> bool:
    """Whether kernels were launched and none of them stored anything; short vectors may have had no program at all."""
    (x,) = case.args
    if not isinstance(got, torch.Tensor) or not seen.launches or x.numel() < 2048:  # no result: it raised an error
        return False
    if not seen.traffic:
        return seen.unwritten == x.numel()
    return not any(counts["stored"] or counts["atomic"] for counts in seen.traffic.values())


EXERCISE = Exercise(
    id="0.2",
    title="Reverse a vector",
    entries=("reverse",),
    cases=reverse_cases,
    oracle=reverse_oracle,
    contracts=(CONTRACT,),
    models=elementwise_models(reversed_vector, CHANGES, blocks_of_pairs=2, also=((), ("backwards",))),
    needs=TRITON,
    limits=Limits(gpu_seconds=30.0),
    requirements=(LaunchesTriton(), Forbids(("flip", "index", "gather", "index_select"))),
    hints=(
        "A kernel may read at one place and write at another. Which element of x belongs at position 0 of the result? "
        "And at position i?",
        "Let the program own a block of the result, as in 0.1: `offsets = program * BLOCK + tl.arange(0, BLOCK)`, "
        "mask `offsets < length`. Only the address of the load changes.",
        "Element i of the result is element `length - 1 - i` of x. One mask on i serves both the load and the store: "
        "where i is outside the vector, so is `length - 1 - i`.",
        "`values = tl.load(x_pointer + length - 1 - offsets, mask=inside)`, then "
        "`tl.store(result_pointer + offsets, values, mask=inside)`. The launcher is that of 0.1.",
    ),
    mistakes=(
        Mistake(
            "written_into_x",
            "The kernel writes into `x` itself, so programs read what others have overwritten, and the caller's vector "
            "is changed. Write into a tensor of its own: `torch.empty_like(x)`.",
            when=lambda case, seen, got: bool(seen.modified_inputs) and not seen.out_of_bounds,
        ),
        Mistake(
            "nothing_stored",
            "Nothing was stored in the result. A kernel returns nothing, so its results reach memory only by "
            "`tl.store`. Does the kernel have one, and does the grid have at least one program?",
            when=_nothing_stored,
        ),
        Mistake(
            "past_the_end",
            "A block reaches past the end of the vector, or before its start. Give the load and the store the mask "
            "`offsets < length`. If they have it, look for a wrong sign, or for another number passed as the length.",
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
    ),
)
