"""Exercise 0.1: scale a vector of any length."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Slip

BLOCK = 256  # given in the cell of 0.1


def _only_first(result: torch.Tensor, count: int) -> torch.Tensor:
    """The result when only `count` elements were ever written; memory that no one writes holds NaN in a check."""
    kept = result.clone()
    kept[max(count, 0) :] = float("nan")
    return kept


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


def scale_oracle(x, factor):
    return x * factor


def scale_cases(draw):
    odd = draw.choice((389, 509, 773, 1021))
    cases = [
        Case("512 elements, two whole blocks", (draw.normal(512), 3.0)),
        Case("1000 elements: three blocks and a part of a fourth", (draw.normal(1000), -0.5)),
        Case("one element", (draw.normal(1), 2.0)),
        Case("255 elements, one less than a block", (draw.normal(255), 2.0)),
        Case("257 elements, one more than a block", (draw.normal(257), 2.0)),
        Case(f"{odd} elements, values near 1e30", (draw.normal(odd, scale=1e30), 0.125)),
        # More blocks than any fixed number of programs; and a second vector of a length seen before.
        Case("20,001 elements, factor 1.75", (draw.normal(20_001), 1.75)),
        Case("512 elements once more, factor -1.5", (draw.normal(512), -1.5)),
    ]
    if draw.on_gpu:
        cases.append(Case("a million elements and one", (draw.normal(1_000_001), 1.5)))
    return cases


EXERCISE = Exercise(
    id="0.1",
    title="Scale a vector of any length",
    entries=("scale",),
    cases=scale_cases,
    oracle=scale_oracle,
    needs=TRITON,
    limits=Limits(seconds=4.0, gpu_seconds=30.0),
    requirements=(LaunchesTriton(), Forbids(("mul", "div"))),
    hints=(
        "Count on paper. With 1000 elements and blocks of 256, how many programs does the wrong answer start, and "
        "which element is the last one that any of them writes?",
        "The number of programs must be the number of blocks that the vector touches, also when it fills the last "
        "one only in part. Division has to round up.",
        "The mask in the kernel already keeps the last program from writing past the end, so one program more is safe.",
        "`triton.cdiv(a, b)` divides and rounds up. Write `programs = triton.cdiv(x.numel(), BLOCK)`. (`tl.cdiv` is "
        "the same thing for use inside a kernel; in a launcher it raises an error on a GPU.)",
    ),
    slips=(
        Slip(
            "too_few_programs",
            "The division that counts the programs rounds down, so the last, partly filled block has no program and "
            "its elements are never written. Round up: look at the line that sets the number of programs.",
            formula=lambda x, factor: _only_first(x * factor, x.numel() // BLOCK * BLOCK),
        ),
        Slip(
            "at_least_one_program",
            "Vectors shorter than a block come out whole, longer ones lose their last, partly filled block: the "
            "division rounds down, and `max(1, ...)` mends the shortest vectors alone. Round up.",
            formula=lambda x, factor: _only_first(x * factor, max(1, x.numel() // BLOCK) * BLOCK),
        ),
        Slip(
            "rounded_to_nearest",
            "The division that counts the programs rounds to the nearest number. A last block that is less than half "
            "full then has no program. However little is in it, it needs one: round up.",
            formula=lambda x, factor: _only_first(x * factor, round(x.numel() / BLOCK) * BLOCK),
        ),
        Slip(
            "only_first_block",
            "Only the first block was written. Either one program was launched in all, or every program works on "
            "block 0 because the program's number is missing from the offsets.",
            formula=lambda x, factor: _only_first(x * factor, BLOCK),
        ),
        Slip(
            "blocks_overlap",
            "The blocks overlap: program 1 starts one element after program 0 instead of one block after it. Look at "
            "the offsets: the program's number must be multiplied by the block's length.",
            formula=lambda x, factor: _only_first(x * factor, _blocks(x.numel()) - 1 + BLOCK),
        ),
        Slip(
            "last_element_missing",
            "Every element was written but the last one. Positions run from 0 to length - 1, so the mask is "
            "`offsets < length`.",
            formula=lambda x, factor: _only_first(x * factor, x.numel() - 1),
        ),
        Slip(
            "not_scaled",
            "The result is x itself: the kernel copies and never multiplies by the factor.",
            formula=lambda x, factor: x.clone(),
        ),
        Slip(
            "factor_truncated",
            "The factor was cut to a whole number, as `int(factor)` does. It is a float: pass it on as it is.",
            formula=lambda x, factor: x * int(factor),
        ),
        Slip(
            "factor_added",
            "The factor was added where it should multiply.",
            formula=lambda x, factor: x + factor,
        ),
    ),
    mistakes=(
        Mistake(
            "past_the_end",
            "A block reaches past the end of the vector, or before its start. Give load and store the mask `offsets < "
            "length`. If they have it, is a sign wrong, or a length another number's?",
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
    ),
)
