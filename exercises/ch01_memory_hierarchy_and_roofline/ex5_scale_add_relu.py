"""Exercise 1.5: scale, add and ReLU in one kernel, timed against three."""

from __future__ import annotations

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
    Slip,
)
from exercises.ch01_memory_hierarchy_and_roofline.blocks import (
    LAST_MISSING,
    NOT_MASKED,
    NOTHING_STORED,
    ONLY_FIRST_BLOCK,
    OVERLAP,
    POWERS_OF_TWO,
    ROUNDED_DOWN,
    blocks_overlap,
    first_block_only,
    last_missing,
    nothing_stored,
    past_the_end,
    rounded_down,
    same,
)


def fused_oracle(x, y, scale):
    return torch.relu(x * scale + y)


def unfused(x, y, scale):
    return torch.relu(x * scale + y)


def fused_cases(draw):
    prime = draw.choice((509, 1021, 2053))
    negative = draw.uniform(700, low=-3.0, high=-1.0)
    negative[draw.integer(0, 700)] = 2.0
    cases = [
        Case("2048 elements", (draw.normal(2048), draw.normal(2048), 0.5), metered=True),
        Case("one element", (draw.normal(1), draw.normal(1, shift=5.0), 2.0)),
        Case("a matrix [33, 65]", (draw.normal(33, 65), draw.normal(33, 65), -1.5), metered=True),
        Case("1025 elements", (draw.normal(1025), draw.normal(1025), 3.0), metered=True),
        Case(f"{prime} elements, a prime; scale is 0", (draw.normal(prime), draw.normal(prime), 0.0)),
        Case(
            "[2, 3, 171], float16", (*(draw.normal(2, 3, 171, dtype=torch.float16) for _ in "xy"), 0.75), metered=True
        ),
        Case("700 elements, all but one negative before ReLU", (negative, draw.uniform(700), 1.5)),
    ]
    if draw.on_gpu:
        length = 2**25
        cases.append(Case("32 Mi elements", (draw.normal(length), draw.normal(length), 0.5), timed=True))
    return cases


def _fused_bytes(x, y, scale) -> int:
    return 3 * x.numel() * x.element_size()


def _rows_counted(x, y, scale):
    """The result when `x.shape[0]` stands for the number of elements; memory that no one writes holds NaN."""
    result = fused_oracle(x, y, scale).flatten()
    result[x.shape[0] :] = float("nan")
    return result.view(x.shape)


def _maximum_over_the_block(case, seen, got) -> bool:
    """Whether each block holds one number, the largest of its values; lanes that are masked off count as 0."""
    x, y, scale = case.args
    if not isinstance(got, torch.Tensor) or got.shape != x.shape or x.dtype != torch.float32 or x.numel() < 16:
        return False
    values = (x * scale + y).flatten()
    if same(got, fused_oracle(*case.args)):
        return False
    for block in POWERS_OF_TWO[2:]:
        padded = torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block)
        largest = padded.amax(dim=1, keepdim=True).expand_as(padded).flatten()[: values.numel()]
        if torch.allclose(got.flatten(), largest, rtol=1e-4, atol=1e-5):
            return True
        if block >= values.numel():
            break
    return False


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
    needs=TRITON,
    limits=Limits(memory_bytes=3 << 30),  # the timed case on a GPU brings tensors of 134 MB
    requirements=(
        LaunchesTriton(at_least=1, at_most=1, id="not_one_kernel"),
        Forbids(("mul", "add", "relu", "clamp", "clamp_min", "maximum", "threshold", "addcmul", "where", "sub")),
        Moves(_fused_bytes),
        FasterThan(unfused, ratio=1.8, minimum_bytes=_fused_bytes),
    ),
    hints=(
        "The unfused version moves 7 tensors' worth of bytes. Which of these seven are intermediate results that no "
        "one asked for?",
        "One kernel: load a block of x and a block of y, do all three operations on values in registers, store once.",
        "For a contiguous tensor the shape does not matter to an elementwise operation: the kernel sees `x.numel()` "
        "elements in a row.",
        "ReLU is `tl.maximum(value, 0.0)`, element by element. (`tl.max` reduces a block to one number, and Python's "
        "`max` is not for blocks: it may compile on a GPU and gives wrong numbers in the interpreter.) `scale` is an "
        "ordinary argument of the kernel; Triton passes a Python float as one.",
        "`value = tl.load(x_pointer + offsets, mask=inside) * scale + tl.load(y_pointer + offsets, mask=inside)`, then "
        "`tl.store(result_pointer + offsets, tl.maximum(value, 0.0), mask=inside)`; launch `triton.cdiv(x.numel(), "
        "BLOCK)` programs.",
    ),
    slips=(
        Slip(
            "relu_before_add",
            "ReLU was applied to scale * x, before y was added. It comes last.",
            formula=lambda x, y, scale: torch.relu(x * scale) + y,
        ),
        Slip(
            "rows_counted",
            "Only as many elements were written as the tensor has rows: `x.shape[0]` and `len(x)` "
            "count those. The number of elements is `x.numel()`.",
            formula=_rows_counted,
        ),
        Slip(
            "relu_missing",
            "Negative values are left in the result: the last step, ReLU, is missing, or is "
            "Python's `max`, which does not compare element by element. Use `tl.maximum`.",
            formula=lambda x, y, scale: x * scale + y,
        ),
        Slip(
            "sum_scaled",
            "The sum was scaled: that is scale * (x + y). Only x is to be scaled.",
            formula=lambda x, y, scale: torch.relu((x + y) * scale),
        ),
        Slip("y_scaled", "y was scaled instead of x.", formula=lambda x, y, scale: torch.relu(x + y * scale)),
        Slip(
            "scale_missing",
            "`scale` is never used: the result is relu(x + y).",
            formula=lambda x, y, scale: torch.relu(x + y),
        ),
        Slip(
            "scale_added",
            "`scale` was added where it should multiply x.",
            formula=lambda x, y, scale: torch.relu(x + scale + y),
        ),
        Slip(
            "minimum_taken",
            "The positive values are gone and the negative ones are left: that is the minimum "
            "with 0. ReLU is "
            "the maximum.",
            formula=lambda x, y, scale: (x * scale + y).clamp(max=0),
        ),
        Slip(
            "absolute_value",
            "Negative values came out positive: that is the absolute value. ReLU makes them 0.",
            formula=lambda x, y, scale: (x * scale + y).abs(),
        ),
    ),
    mistakes=(
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(fused_oracle)),
        Mistake(
            "maximum_over_the_block",
            "All elements of a block are the same, the largest of them: `tl.max` reduces a block to one number. "
            "`tl.maximum(value, 0.0)` compares element by element.",
            when=_maximum_over_the_block,
        ),
        Mistake(
            "python_max",
            "Zeros were stored everywhere. Was ReLU written with Python's `max`? It asks whether a whole block is "
            "larger than 0, to which the interpreter has no right answer. In a kernel it is `tl.maximum`.",
            when=_all_zero,
            every=True,
        ),
        Mistake("past_the_end", NOT_MASKED, when=past_the_end),
        Mistake("last_element_missing", LAST_MISSING, when=last_missing(fused_oracle), every=True),
        Mistake(
            "only_first_block",
            ONLY_FIRST_BLOCK + " (Count them from `x.numel()`; a matrix's `x.shape[0]` is its number of rows.)",
            when=first_block_only(fused_oracle),
            every=True,
        ),
        Mistake("blocks_overlap", OVERLAP, when=blocks_overlap(fused_oracle), every=True),
        Mistake("too_few_programs", ROUNDED_DOWN, when=rounded_down(fused_oracle), every=True),
        Mistake(
            "several_kernels",
            "There is more than one launch, so an intermediate result goes to memory and comes back, which is what "
            "fusion is to avoid. Do all three steps between one load and one store.",
            when=lambda case, seen, got: len(seen.launches) > 1,
        ),
    ),
)
