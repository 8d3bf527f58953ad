"""Exercise 0.2: reverse a vector."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake
from course_lib.checker.specification.contract import Contract
from course_lib.checker.specification.model import Slip
from exercises.topics.elementwise_model import block_of, elementwise_models, of_any_block, of_programs, stored, written
from exercises.topics.memory import load
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


def compute(s, x):
    length, block = len(x), block_of(s)
    positions = torch.arange(length)
    program, lane = positions // block, positions % block
    blocks = -(-length // block)
    inside = exists = written(s, length)
    source = length - 1 - positions
    if s("not_reversed"):
        source = positions
    if s("shifted_by_one"):
        source = length - positions
    if s("shifted_by_one__early"):
        source = length - 2 - positions
    if s("reversed_within_blocks"):
        source = torch.clamp((program + 1) * block, max=length) - 1 - lane
    if s("reversed_within_blocks__whole", "reversed_within_blocks__masked"):
        source = (program + 1) * block - 1 - lane
    if s("blocks_in_reverse", "blocks_in_reverse__masked"):
        source = length - (program + 1) * block + lane
    if s("blocks_in_reverse__from_the_start"):
        source = (blocks - 1 - program) * block + lane
    if s("counted_from_the_last_block", "counted_from_the_last_block__masked"):
        source = blocks * block - 1 - positions
    if s("length_forgotten"):
        source = -positions
    if s("first_element_everywhere"):
        source = torch.zeros_like(positions)
    if s("last_element_everywhere"):
        source = torch.full_like(positions, length - 1)
    if s(*(f"{name}__masked" for name in BY_BLOCKS), "blocks_in_reverse__from_the_start"):
        exists = exists & (source >= 0) & (source < length)
    return stored(s, load(s, x, source, exists, math.nan), inside)


BY_BLOCKS = ("reversed_within_blocks", "blocks_in_reverse", "counted_from_the_last_block")
WITHIN_BLOCKS = (
    "Each block was reversed in its own place, while the blocks kept their order. Count from the end of the whole "
    "vector: `length - 1 - offsets`."
)
BLOCKS_IN_REVERSE = (
    "The blocks are in reverse order, but the elements inside each block are not. Count every element from the end of "
    "the vector: `length - 1 - offsets`."
)
FROM_THE_LAST_BLOCK = (
    "The positions are counted from the end of the last block, which is past the vector's end unless the block is "
    "full. Count from the vector's last element: `length - 1 - offsets`."
)
SLIPS = (
    Slip(
        "not_reversed",
        "The result is x in its old order. If you reverse the addresses of both the load and the store, the two "
        "cancel. Reverse only one of them.",
    ),
    Slip(
        "shifted_by_one",
        "Everything is one place too late: for position 0 the kernel reads x[length], which does not exist. The "
        "last element is `length - 1`.",
    ),
    Slip(
        "shifted_by_one__early",
        "Everything is one place too early: for position 0 the kernel reads the second to last element. The last "
        "element is `length - 1`.",
    ),
    Slip("reversed_within_blocks", WITHIN_BLOCKS),
    Slip("reversed_within_blocks__whole", WITHIN_BLOCKS),
    Slip("reversed_within_blocks__masked", WITHIN_BLOCKS),
    *of_programs(12_285),
    Slip("blocks_in_reverse", BLOCKS_IN_REVERSE),
    Slip("blocks_in_reverse__masked", BLOCKS_IN_REVERSE),
    Slip("blocks_in_reverse__from_the_start", BLOCKS_IN_REVERSE),
    Slip("counted_from_the_last_block", FROM_THE_LAST_BLOCK),
    Slip("counted_from_the_last_block__masked", FROM_THE_LAST_BLOCK),
    Slip(
        "length_forgotten",
        "The kernel walks backwards from the vector's first element, out of the vector. Start at its last one: "
        "`x_pointer + length - 1 - offsets`.",
    ),
    Slip(
        "first_element_everywhere",
        "Every element of the result is the first of x: the load has one address, without offsets.",
    ),
    Slip(
        "last_element_everywhere",
        "Every element of the result is the last of x: the load has one address, without offsets.",
    ),
)
MODELS = elementwise_models(compute, SLIPS, of_any_block() + of_any_block("backwards"), blocks_of_pairs=2)


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
    models=MODELS,
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
