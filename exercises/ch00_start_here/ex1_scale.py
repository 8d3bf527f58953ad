"""Exercise 0.1: scale a vector of any length."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.model import Slip
from exercises.topics.elementwise_model import (
    FIRST_ELEMENT_MISSING,
    READS_BLOCK_0,
    elementwise_models,
    of_any_block,
    of_programs,
    read,
    stored,
    written,
)
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


def compute(s, x, factor):
    inside = written(s, len(x))
    values = read(s, x, inside)
    if s("factor_truncated"):
        factor = int(factor)
    if s("factor_truncated__rounded"):
        factor = round(factor)
    if s("factor_or_one"):
        factor = factor or 1.0
    if s("factor_without_sign"):
        factor = abs(factor)
    if s("not_scaled"):
        scaled = values
    elif s("factor_added"):
        scaled = values + factor
    elif s("divided"):
        scaled = values / torch.tensor(factor)
    elif s("factor_twice"):
        scaled = values * factor * factor
    elif s("squared"):
        scaled = values * values
    elif s("filled_with_the_factor"):
        scaled = torch.full_like(values, factor)
    else:
        scaled = values * factor
    return stored(s, scaled, inside)


TRUNCATED = "The factor was cut to a whole number, as `int(factor)` does. It may be a float: pass it on as it is."
SLIPS = (
    Slip("not_scaled", "The result is x itself: the kernel copies and never multiplies by the factor."),
    Slip("factor_added", "The factor was added. Multiply by it."),
    Slip("factor_or_one", "A factor of 0 became 1: `factor or 1.0` does that. 0 is a factor like any other."),
    Slip("factor_truncated", TRUNCATED),
    Slip("factor_truncated__rounded", TRUNCATED.replace("cut", "rounded").replace("int(", "round(")),
    *of_programs(69_629),
    FIRST_ELEMENT_MISSING,
    READS_BLOCK_0,
    Slip("divided", "The elements were divided by the factor. Multiply them by it."),
    Slip("factor_twice", "The elements were multiplied by the factor twice. Is it in the launcher and in the kernel?"),
    Slip("factor_without_sign", "The factor lost its sign. A negative factor flips the sign of every element."),
    Slip("squared", "The elements were multiplied by themselves. Multiply them by the factor."),
    Slip("filled_with_the_factor", "Every element of the result is the factor itself. Store `values * factor`."),
)


EXERCISE = Exercise(
    id="0.1",
    title="Scale a vector of any length",
    entries=("scale",),
    cases=scale_cases,
    oracle=scale_oracle,
    contracts=(CONTRACT,),
    models=elementwise_models(compute, SLIPS, of_any_block(), blocks_of_pairs=1),
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
