"""Exercise 1.5: scale, add and ReLU in one kernel, timed against three."""

from __future__ import annotations

import math

import torch

from course_lib.checker import (
    TRITON,
    Case,
    Exercise,
    FasterThan,
    Forbids,
    LaunchesTriton,
    Limits,
    Mistake,
    Moves,
    edits,
)
from course_lib.checker.specification.contract import Contract, Level
from course_lib.checker.specification.draw import Draw
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
    PROGRAMS,
    elementwise_models,
    of_any_block,
    of_programs,
    reads_block_0,
)
from exercises.topics.pointers import load, put
from exercises.topics.pytorch_operations import ARITHMETIC
from exercises.topics.vector_inputs import VALUES, huge


def fused_oracle(x, y, scale):
    return torch.relu(x * scale + y)


def unfused(x, y, scale):
    return torch.relu(x * scale + y)


def fused_cases(draw):
    cases = [
        Case("2048 elements", (draw.normal(2048), draw.normal(2048), 0.5), metered=True),
        Case("700 elements, scale 0", (draw.normal(700), draw.normal(700), 0.0)),
        Case("a matrix [33, 65]", (draw.normal(33, 65), draw.normal(33, 65), -1.5), metered=True),
        Case(
            "[2, 3, 171], float16", (*(draw.normal(2, 3, 171, dtype=torch.float16) for _ in "xy"), 0.75), metered=True
        ),
        Case("69,629 elements: more than any one block holds", (draw.normal(69_629), draw.normal(69_629), 1.75)),
        Case(
            "float16, results near 50,000",
            (*(draw.uniform(700, low=22_000.0, high=28_000.0, dtype=torch.float16) for _ in "xy"), 1.0),
        ),
    ]
    if not draw.on_gpu:  # more than twice as many blocks of 1,024 as an H100 has SMs: a grid capped there ends before
        cases.append(Case("280,001 elements", (draw.normal(280_001), draw.normal(280_001), -0.25)))
    else:
        length = 2**25
        cases.append(Case("one element", (draw.normal(1), draw.normal(1, shift=5.0), 2.0)))
        cases.append(Case("32 Mi elements", (draw.normal(length), draw.normal(length), 0.5), timed=True))
    alike = Draw(15)  # the same at every check
    near_the_end = [
        alike.uniform(700, low=low, high=high, dtype=torch.float16) for low, high in ((600, 650), (6e4, 6.5e4))
    ]
    cases.append(Case("float16, products near -62,000", (*near_the_end, -100.0)))
    return cases


def drawn(draw, *, shape, dtype, scale, x_values, y_values):
    return x_values(draw, *shape).to(dtype), y_values(draw, *shape).to(dtype), scale


SHAPES = ((1,), (2,), (255,), (256,), (257,), (1, 1023), (1031,), (33, 1), (2, 3, 171), (1, 5, 1, 7), (3, 512))
CONTRACT = Contract(
    drawn,
    choices={
        "shape": tuple(Level(shape, f"[{', '.join(map(str, shape))}]") for shape in SHAPES),
        "dtype": (torch.float32, torch.float16),
        "scale": tuple(Level(scale, f"scale {scale}") for scale in (0.5, -1.5, 0.0, 1.0, 0.001, 100.0, -100.0)),
        "x_values": (*VALUES, Level(huge, "x near 1e30")),
        "y_values": (*VALUES, Level(huge, "y near 1e30")),
    },
    says={
        "shape": "any number of dimensions from 1, any length from 1",
        "dtype": "float32 or float16, of one shape and dtype",
        "scale": "a Python float of any sign: 0, or between 0.001 and 100 in size",
    },
    valid=lambda dtype, x_values, y_values, **_: dtype == torch.float32 or huge not in (x_values, y_values),
    most=12,
)


def _fused_bytes(x, y, scale) -> int:
    return 3 * x.numel() * x.element_size()


def fused(x, y, scale):
    length = x.numel()
    block = 1024
    offsets = torch.arange(-(-length // block))[:, None] * block + torch.arange(block)  # [programs, block]
    inside = offsets < length
    x_values, y_values = load(x, offsets, inside, math.nan).float(), load(y, offsets, inside, math.nan).float()
    value = float(scale) * x_values + y_values
    result = torch.full_like(x, math.nan)
    put(result, offsets, torch.relu(value), inside)
    return result


SCALE, VALUE, RELU = "float(scale)", "float(scale) * x_values + y_values", "torch.relu(value)"
SCALED, PLUS_Y = "float(scale) * x_values", "float(scale) * x_values +"
LARGEST = "value.nan_to_num(-math.inf).amax(1, keepdim=True).expand(value.shape)"  # tl.max passes over NaN
OF_ALL = "length = x.numel()"
TRUNCATED = "`scale` was cut to a whole number, as `int(scale)` does. It is a float: pass it on as it is."
CHANGES = (
    *edits(
        "ReLU was applied to a part, before y was added. It comes last, to scale * x + y.",
        relu_before_add=(SCALED, f"torch.relu({SCALED})", RELU, "value"),
        relu_before_add__of_x=(PLUS_Y, f"{SCALE} * torch.relu(x_values) +", RELU, "value"),
    ),
    *edits(
        "ReLU was applied to x + y, and its result scaled. Scale x, add y, and take ReLU last.",
        relu_before_scale=(VALUE, f"{SCALE} * torch.relu(x_values + y_values)", RELU, "value"),
    ),
    *edits(
        "Negative values are left in the result: the last step, ReLU, is missing, or is Python's `max`, which does not "
        "compare element by element. Use `tl.maximum`.",
        relu_missing=(RELU, "value"),
    ),
    *edits("`scale` is never used: x stands where scale * x is meant.", scale_missing=(SCALE, "1.0")),
    *edits(
        "The sum was scaled: that is scale * (x + y). Scale only x.",
        sum_scaled=(VALUE, f"{SCALE} * (x_values + y_values)"),
    ),
    *edits("y was scaled instead of x.", y_scaled=(VALUE, f"x_values + {SCALE} * y_values")),
    *edits("`scale` was added. Multiply x by it.", scale_added=(VALUE, f"{SCALE} + x_values + y_values")),
    *edits(TRUNCATED, scale_truncated=(SCALE, "int(scale)")),
    *edits(
        "A scale of 0 became 1: `scale or 1.0` does that. 0 is a scale like any other.",
        scale_or_one=(SCALE, "float(scale or 1.0)"),
    ),
    *edits("A scale below 0 was cut to 0. It may have any sign.", scale_without_sign=(SCALE, "float(max(scale, 0.0))")),
    *edits("The scale lost its sign. It may be negative.", scale_without_sign__absolute=(SCALE, "float(abs(scale))")),
    *edits(
        TRUNCATED.replace("cut", "rounded").replace("int(", "round("), scale_truncated__rounded=(SCALE, "round(scale)")
    ),
    *edits("y is never added: the result is relu(scale * x).", y_missing=(VALUE, SCALED)),
    *edits("x is left out: the result is relu(y).", x_missing=(VALUE, "y_values")),
    *edits("x was loaded twice, and added in the place of y. Load y from `y_pointer`.", x_for_y=("load(y", "load(x")),
    *edits("y was loaded twice, and scaled in the place of x. Load x from `x_pointer`.", y_for_x=("load(x", "load(y")),
    *edits("y was subtracted. Add it.", y_subtracted=(VALUE, f"{SCALED} - y_values")),
    *edits("scale * x was multiplied by y. Add y.", y_multiplied=(VALUE, f"{SCALED} * y_values")),
    *edits(
        "Only as many elements were written as the tensor has rows: `x.shape[0]` and `len(x)` count those. The number "
        "of elements is `x.numel()`.",
        rows_counted=(OF_ALL, "length = x.shape[0]"),
    ),
    *edits(
        "Only as many elements were written as the last dimension has: `x.shape[-1]` counts those. The number of "
        "elements is `x.numel()`.",
        rows_counted__columns=(OF_ALL, "length = x.shape[-1]"),
    ),
    *edits(
        "There are only as many programs as it takes for the tensor's rows: the grid is counted from `x.shape[0]` or "
        "`len(x)`. The number of elements is `x.numel()`.",
        rows_counted__in_the_grid=(PROGRAMS, "-(-x.shape[0] // block)"),
    ),
    *edits(
        "Negative values stayed and positive ones became 0: that is the minimum. ReLU is the maximum.",
        minimum_taken=(RELU, "value.clamp(max=0)"),
    ),
    *edits(
        "Negative values came out positive: that is the absolute value. ReLU makes them 0.",
        absolute_value=(RELU, "value.abs()"),
    ),
    *edits(
        "All elements of a block are the same, the largest of them: `tl.max` reduces a block to one number. "
        "`tl.maximum(value, 0.0)` compares element by element.",
        maximum_over_the_block=(RELU, LARGEST),
    ),
    *edits(
        "All elements of a block are the same, its largest or 0: `tl.max` reduces a block to one number. "
        "`tl.maximum(value, 0.0)` compares element by element.",
        maximum_over_the_block__and_zero=(RELU, f"torch.relu({LARGEST})"),
    ),
    *edits(
        "ReLU was applied to scale * x and to y, and the two added. Add first: ReLU comes last.",
        relu_of_each=(VALUE, f"torch.relu({SCALED}) + torch.relu(y_values)", RELU, "value"),
    ),
    *edits(
        "ReLU was written as (v + |v|) / 2. The sum is twice v, and overflows where v itself fits: float16 ends at "
        "65,504. Take `tl.maximum(value, 0.0)`.",
        relu_by_the_magnitude=(RELU, "(value.to(x.dtype) + value.to(x.dtype).abs()) / 2"),
    ),
    *edits(
        "No element is below 1: the maximum was taken with 1. ReLU's is with 0.",
        compared_with_one=(RELU, "value.clamp(min=1)"),
    ),
    *of_programs(69_629),
    *FIRST_ELEMENT_MISSING,
    *reads_block_0("x", "y"),
    *of_any_block(1024),
)


def _all_zero(case, seen, got) -> bool:
    """Whether zeros were stored everywhere: the interpreter takes any block for true, so `max(block, 0)` is 0."""
    stored = any(counts["stored"] for counts in seen.traffic.values())
    all_zero = isinstance(got, torch.Tensor) and not got.any()
    return stored and all_zero and bool(fused_oracle(*case.args).any())


EXERCISE = Exercise(
    id="1.5",
    title="Scale, add and ReLU in one kernel",
    entries=("scale_add_relu",),
    cases=fused_cases,
    oracle=fused_oracle,
    contracts=(CONTRACT,),
    models=elementwise_models(fused, CHANGES, blocks_of_pairs=2),
    needs=TRITON,
    limits=Limits(memory_bytes=3 << 30),  # the timed case on a GPU brings tensors of 134 MB
    requirements=(
        LaunchesTriton(at_least=1, at_most=1, id="not_one_kernel"),
        Forbids((*ARITHMETIC, "threshold")),
        Moves(_fused_bytes),
        FasterThan(unfused, ratio=1.8, minimum_bytes=_fused_bytes),
    ),
    hints=(
        "In the unfused version seven tensors cross the bus. Which of these crossings carry intermediate results that "
        "nobody needs?",
        "One kernel: load a block of x and a block of y, do all three operations on values in registers, store once.",
        "For a contiguous tensor the shape does not matter to an elementwise operation: the kernel sees `x.numel()` "
        "elements in a row.",
        "ReLU is `tl.maximum(value, 0.0)`, element by element. (`tl.max` reduces a block to one number, and Python's "
        "`max` is not for blocks: it may compile on a GPU and gives wrong numbers in the interpreter.) `scale` is an "
        "ordinary argument of the kernel: pass the Python float as it is.",
        "`value = tl.load(x_pointer + offsets, mask=inside) * scale + tl.load(y_pointer + offsets, mask=inside)`, then "
        "`tl.store(result_pointer + offsets, tl.maximum(value, 0.0), mask=inside)`; launch `triton.cdiv(x.numel(), "
        "BLOCK)` programs.",
    ),
    mistakes=(
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(fused_oracle)),
        Mistake("grid_capped", GRID_CAPPED, when=grid_capped(fused_oracle)),
        Mistake(
            "python_max",
            "Zeros were stored everywhere. Was ReLU written with Python's `max`? It compares whole blocks, not "
            "elements, and the interpreter then gives wrong numbers. Use `tl.maximum` in a kernel.",
            when=_all_zero,
            every=True,
        ),
        Mistake("past_the_end", NOT_MASKED, when=past_the_end),
        Mistake(
            "several_kernels",
            "There is more than one launch, so an intermediate result goes to memory and comes back. Fusion is meant "
            "to avoid that. Do all three steps between the loads and one store.",
            when=lambda case, seen, got: len(seen.launches) > 1,
            cost=True,
        ),
    ),
)
