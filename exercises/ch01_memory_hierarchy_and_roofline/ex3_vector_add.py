"""Exercise 1.3: vector add, any length."""

from __future__ import annotations

import math

import torch

from course_lib.checker import TRITON, Case, Contiguous, Exercise, Forbids, LaunchesTriton, Limits, Mistake, edits
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.layouts import CONTIGUOUS, every_other
from exercises.ch01_memory_hierarchy_and_roofline.blocks import (
    GRID_CAPPED,
    NOT_MASKED,
    NOTHING_STORED,
    grid_capped,
    nothing_stored,
    past_the_end,
)
from exercises.topics.elementwise import (
    FIRST_ELEMENT_MISSING,
    WRITTEN_INTO_AN_INPUT,
    elementwise_models,
    of_any_block,
    of_programs,
    reads_block_0,
    writes_an_input,
)
from exercises.topics.pointers import load, put
from exercises.topics.pytorch_operations import ARITHMETIC
from exercises.topics.vector_inputs import VALUES, huge

COMPARED = (
    " The mask counts elements: compare `offsets` with the length, and not `offsets * stride`. A stride may be 0."
)


def add_oracle(x, y):
    return x + y


def add_cases(draw):
    apart = (draw.strided(draw.normal(700), 2), draw.strided(draw.normal(700), 3))
    cases = [
        Case("4096 elements, whole blocks", (draw.normal(4096), draw.normal(4096))),
        Case("1025 elements, one more than a block of 1024", (draw.normal(1025), draw.normal(1025))),
        Case("700 elements: x is every second element of a longer vector, y every third", apart),
        Case(
            "69,629 elements, more than any one block holds; every second of a longer x, every third of a longer y",
            (draw.strided(draw.normal(69_629), 2), draw.strided(draw.normal(69_629), 3)),
        ),
    ]
    if not draw.on_gpu:  # more programs than any number at which a grid is capped while one tries things out
        cases.append(Case("1,100,003 elements", (draw.normal(1_100_003), draw.normal(1_100_003))))
    else:
        cases.append(Case("one element", (draw.normal(1), draw.normal(1))))
        cases.append(Case("3000 elements, float16", tuple(draw.normal(3000, dtype=torch.float16) for _ in "xy")))
        cases.append(Case("ten million elements and one", (draw.normal(10_000_001), draw.normal(10_000_001))))
    return cases


def one_number(draw, tensor):
    """One and the same number for all elements: a stride of 0."""
    return tensor[:1].clone().expand(tensor.shape)


def layouts(name):
    """What "any stride" allows a vector."""
    return (
        CONTIGUOUS,
        Level(every_other, f"{name} with elements apart"),
        Level(one_number, f"{name} expanded from one number"),
    )


def drawn(draw, *, length, dtype, values, x_layout, y_layout):
    x, y = (values(draw, length).to(dtype) for _ in "xy")
    return x_layout(draw, x), y_layout(draw, y)


CONTRACT = Contract(
    drawn,
    choices={
        "length": (1, 2, 127, 256, 257, 1023, 1031),
        "dtype": (torch.float32, torch.float16),
        "values": (*VALUES, Level(huge, "values near 1e30")),
        "x_layout": layouts("x"),
        "y_layout": layouts("y"),
    },
    says={
        "length": "any length from 1",
        "dtype": "float32 or float16 and alike",
        "x_layout": "any strides, each its own",
        "y_layout": "any strides, each its own",
    },
    valid=lambda dtype, values, **_: values is not huge or dtype == torch.float32,
    most=12,
)


def added(x, y):
    length = x.numel()
    block = 1024
    offsets = torch.arange(-(-length // block))[:, None] * block + torch.arange(block)  # [programs, block]
    inside = offsets < length
    x_values = load(x, offsets * x.stride(0), inside, math.nan)
    y_values = load(y, offsets * y.stride(0), inside, math.nan)
    result = x.new_full((length,), math.nan)
    put(result, offsets, x_values + y_values, inside)
    return result


STRIDED = (
    "Element i of a vector lies i · stride elements from its pointer, and x and y each have a stride of their own."
)
STORED_APART = (
    "The result was written at {}'s stride, so some of its elements were never written. The result is contiguous: "
    "store at `offsets`."
)
X_STRIDE, Y_STRIDE, SUM = "x.stride(0)", "y.stride(0)", "x_values + y_values"
X_ALONG, Y_ALONG = f"x, offsets * {X_STRIDE}", f"y, offsets * {Y_STRIDE}"
WITHIN = "offsets // block * block + offsets % block *"
CHANGES = (
    *of_programs(69_629),
    *FIRST_ELEMENT_MISSING,
    *reads_block_0("x", "y"),
    *edits(
        f"x and y are read as if their elements were neighbours. {STRIDED}",
        stride_ignored=(X_STRIDE, "1", Y_STRIDE, "1"),
    ),
    *edits(
        "Only the positions within a block are multiplied by the stride. The block's start must be, too: "
        "`(tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * stride`.",
        stride_ignored__block_start=(
            *(f"offsets * {X_STRIDE}", f"{WITHIN} {X_STRIDE}"),
            *(f"offsets * {Y_STRIDE}", f"{WITHIN} {Y_STRIDE}"),
        ),
    ),
    *edits(f"x is read as if its elements were neighbours. {STRIDED}", stride_ignored__x=(X_STRIDE, "1")),
    *edits(f"y is read as if its elements were neighbours. {STRIDED}", stride_ignored__y=(Y_STRIDE, "1")),
    *edits(f"x is read by the stride of y. {STRIDED}", stride_ignored__x_by_y=(X_STRIDE, Y_STRIDE)),
    *edits(f"y is read by the stride of x. {STRIDED}", stride_ignored__y_by_x=(Y_STRIDE, X_STRIDE)),
    *edits(
        f"x is read by the stride of y, and y by that of x. {STRIDED}",
        stride_ignored__exchanged=(X_STRIDE, Y_STRIDE, Y_STRIDE, X_STRIDE),
    ),
    *edits(STORED_APART.format("x"), stored_with_a_stride=("put(result, offsets", f"put(result, offsets * {X_STRIDE}")),
    *edits(
        STORED_APART.format("y"), stored_with_a_stride__y=("put(result, offsets", f"put(result, offsets * {Y_STRIDE}")
    ),
    *edits(
        "The result is x + x: the second load reads x again. Load y from `y_pointer`.",
        x_added_to_itself=(Y_ALONG, X_ALONG),
    ),
    *edits(
        "Both loads read x, the second by the stride of y. Load y from `y_pointer`.",
        x_added_to_itself__by_the_stride_of_y=("load(y", "load(x"),
    ),
    *edits(
        "The result is y + y: the first load reads y. Load x from `x_pointer`.", y_added_to_itself=(X_ALONG, Y_ALONG)
    ),
    *edits(
        "Both loads read y, the first by the stride of x. Load x from `x_pointer`.",
        y_added_to_itself__by_the_stride_of_x=("load(x", "load(y"),
    ),
    *edits("The result is x - y. Add the two.", subtracted=(SUM, "x_values - y_values")),
    *edits("The result is y - x. Add the two.", subtracted__from_y=(SUM, "y_values - x_values")),
    *edits("The result is the product of x and y. Add the two.", multiplied=(SUM, "x_values * y_values")),
    *edits("The result is x alone: y is never added.", x_alone=(SUM, "x_values")),
    *edits("The result is y alone: x is never added.", y_alone=(SUM, "y_values")),
    *of_any_block(1024),
)


EXERCISE = Exercise(
    id="1.3",
    title="Vector add, any length",
    entries=("vector_add",),
    cases=add_cases,
    oracle=add_oracle,
    contracts=(CONTRACT,),
    models=elementwise_models(added, CHANGES, blocks_of_pairs=2),
    needs=TRITON,
    limits=Limits(seconds=16.0),  # in blocks of 32 the longest vector takes 10 s
    requirements=(LaunchesTriton(), Forbids(ARITHMETIC), Contiguous()),
    hints=(
        "Start from the kernel of chapter 00: a block of offsets, a mask, a load, a store. Here there are two loads.",
        "The launcher needs a result (`torch.empty`, of x's dtype and device), a number of programs rounded up, and a "
        "block length, say 1024.",
        "A strided vector keeps its elements `x.stride(0)` apart. Either pass the stride to the kernel and multiply "
        "the offsets by it, or make the input contiguous first, which costs an extra pass over it.",
        "Kernel: `offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)`, `inside = offsets < length`, "
        "`x = tl.load(x_pointer + offsets * x_stride, mask=inside)`, the same for y, then "
        "`tl.store(result_pointer + offsets, x + y, mask=inside)`.",
        "Launcher: `vector_add_kernel[(triton.cdiv(length, 1024),)](x, y, result, length, x.stride(0), y.stride(0), "
        "BLOCK=1024)`.",
    ),
    mistakes=(
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(add_oracle)),
        Mistake("grid_capped", GRID_CAPPED, when=grid_capped(add_oracle)),
        Mistake("written_into_an_input", WRITTEN_INTO_AN_INPUT, when=writes_an_input),
        Mistake("past_the_end", NOT_MASKED + COMPARED, when=past_the_end),
    ),
)
