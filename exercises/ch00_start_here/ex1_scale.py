"""Exercise 0.1: scale a vector of any length."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, edits
from course_lib.checker.specification.contract import Contract, Level
from exercises.topics.elementwise import (
    FIRST_ELEMENT_MISSING,
    elementwise_models,
    of_any_block,
    of_programs,
    reads_block_0,
)
from exercises.topics.pointers import load, put
from exercises.topics.vector_inputs import OF_FLOAT32


def scale_oracle(x, factor):
    return x * factor


def scale_cases(draw):
    cases = [
        Case("512 elements, two whole blocks", (draw.normal(512), 3.0)),
        Case("1000 elements: three blocks and a part of a fourth", (draw.normal(1000), -0.5)),
        # More blocks than any fixed number of programs; and a second vector of a length seen before.
        Case("69,629 elements, factor 1.75", (draw.normal(69_629), 1.75)),
        Case("512 elements once more, factor -1.5", (draw.normal(512), -1.5)),
    ]
    if draw.on_gpu:
        cases.append(Case("one element", (draw.normal(1), 2.0)))
        cases.append(Case("257 elements, one more than a block", (draw.normal(257), 2.0)))
        cases.append(Case("a million elements and one", (draw.normal(1_000_001), 1.5)))
    return cases


def drawn(draw, *, length, factor, values):
    return values(draw, length), factor


CONTRACT = Contract(
    drawn,
    choices={
        "length": (1, 2, 255, 256, 257, 383, 509, 769),
        "factor": tuple(Level(f, f"factor {f}") for f in (2.0, -0.375, 0.0, 1.0, 3, -2, 0.001, 1000.0)),
        "values": OF_FLOAT32,
    },
    says={"length": "any length from 1", "factor": "a number, an int or a float", "values": "float32"},
    most=10,
)


def scaled(x, factor):
    length = x.numel()
    block = 256
    offsets = torch.arange(-(-length // block))[:, None] * block + torch.arange(block)  # [programs, block]
    inside = offsets < length
    values, number = load(x, offsets, inside, math.nan), float(factor)
    result = torch.full_like(x, math.nan)
    put(result, offsets, values * number, inside)
    return result


FACTOR, PRODUCT = "float(factor)", "values * number"
TRUNCATED = "The factor was cut to a whole number, as `int(factor)` does. It may be a float: pass it on as it is."
CHANGES = (
    *edits(
        "The result is x itself: the kernel copies and never multiplies by the factor.", not_scaled=(PRODUCT, "values")
    ),
    *edits("The factor was added. Multiply by it.", factor_added=(PRODUCT, "values + number")),
    *edits(
        "A factor of 0 became 1: `factor or 1.0` does that. 0 is a factor like any other.",
        factor_or_one=(FACTOR, "float(factor or 1.0)"),
    ),
    *edits(TRUNCATED, factor_truncated=(FACTOR, "int(factor)")),
    *edits(
        TRUNCATED.replace("cut", "rounded").replace("int(", "round("),
        factor_truncated__rounded=(FACTOR, "round(factor)"),
    ),
    *of_programs(69_629),
    *FIRST_ELEMENT_MISSING,
    *reads_block_0("x"),
    *edits(
        "The elements were divided by the factor. Multiply them by it.",
        divided=(PRODUCT, "values / torch.tensor(number)"),
    ),
    *edits(
        "The elements were multiplied by the factor twice. Is it in the launcher and in the kernel?",
        factor_twice=(PRODUCT, "values * number * number"),
    ),
    *edits(
        "The factor lost its sign. A negative factor flips the sign of every element.",
        factor_without_sign=(FACTOR, "float(abs(factor))"),
    ),
    *edits(
        "The elements were multiplied by themselves. Multiply them by the factor.", squared=(PRODUCT, "values * values")
    ),
    *edits(
        "Every element of the result is the factor itself. Store `values * factor`.",
        filled_with_the_factor=(PRODUCT, "torch.tensor(number)"),
    ),
    *of_any_block(256),
)


EXERCISE = Exercise(
    id="0.1",
    title="Scale a vector of any length",
    entries=("scale",),
    cases=scale_cases,
    oracle=scale_oracle,
    contracts=(CONTRACT,),
    models=elementwise_models(scaled, CHANGES, blocks_of_pairs=1),
    needs=TRITON,
    limits=Limits(seconds=4.0, gpu_seconds=30.0),
    requirements=(LaunchesTriton(), Forbids(("mul", "div"))),
    hints=(
        "Count on paper. With 1000 elements and blocks of 256, how many programs does the wrong answer start? Which "
        "element is the last one that any of them writes?",
        "Every block needs a program, even a last block that is only partly full. So the division has to round up.",
        "The mask keeps the last program from writing past the end, so one program more is safe.",
        "`triton.cdiv(a, b)` divides and rounds up. Write `programs = triton.cdiv(x.numel(), BLOCK)`. (`tl.cdiv` is "
        "the same thing for use inside a kernel; in a launcher it raises an error on a GPU.)",
    ),
    mistakes=(
        Mistake(
            "past_the_end",
            "A block reaches past the end of the vector, or before its start. Give the load and the store the mask "
            "`offsets < length`. If they have it, look for a wrong sign, or for another number passed as the length.",
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
    ),
)
