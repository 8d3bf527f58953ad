"""Exercise 1.3: vector add, any length."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Mistake, Slip
from exercises.ch01_memory_hierarchy_and_roofline.blocks import (
    LAST_MISSING,
    NOT_MASKED,
    NOTHING_STORED,
    ONLY_FIRST_BLOCK,
    OVERLAP,
    ROUNDED_DOWN,
    blocks_overlap,
    first_block_only,
    last_missing,
    nothing_stored,
    past_the_end,
    rounded_down,
    same,
)


def add_oracle(x, y):
    return x + y


def add_cases(draw):
    prime = draw.choice((1031, 2039, 4093))
    cases = [
        Case("4096 elements, whole blocks", (draw.normal(4096), draw.normal(4096))),
        Case("one element", (draw.normal(1), draw.normal(1))),
        Case("127 elements", (draw.normal(127), draw.normal(127))),
        Case("1025 elements, one more than a block of 1024", (draw.normal(1025), draw.normal(1025))),
        Case("3000 elements, float16", tuple(draw.normal(3000, dtype=torch.float16) for _ in "xy")),
        Case(f"{prime} elements, a prime, values near 1e30", tuple(draw.normal(prime, scale=1e30) for _ in "xy")),
        Case(
            "700 elements: x is every second element of a longer vector, y every third",
            (draw.strided(draw.normal(700), 2), draw.strided(draw.normal(700), 3)),
        ),
    ]
    if draw.on_gpu:
        cases.append(Case("ten million elements and one", (draw.normal(10_000_001), draw.normal(10_000_001))))
    return cases


def _read_at(x: torch.Tensor, stride: int) -> torch.Tensor:
    """A vector as a kernel reads it that takes this stride; NaN where nothing is known."""
    reach = (x.numel() - 1) * x.stride(0) + 1
    flat = torch.full((max(x.numel() * stride, reach),), float("nan"), dtype=x.dtype)
    flat[:reach] = x.as_strided((reach,), (1,))
    return flat[::stride][: x.numel()]


def _stride_ignored(case, seen, got) -> bool:
    """Whether x or y was read by a stride of 1, or by the other one's."""
    x, y = case.args
    right = (x.stride(0), y.stride(0))
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    for strides in {(a, b) for a in (1, *right) for b in (1, *right)} - {right}:
        expected = _read_at(x, strides[0]) + _read_at(y, strides[1])
        known = ~expected.isnan()  # gaps between the elements hold NaN
        if int(known.sum()) > 2 and same(got[known], expected[known]) and not same(got[known], (x + y)[known]):
            return True
    return False


def _stored_with_a_stride(case, seen, got) -> bool:
    """Whether the result was written at an input's stride, with holes between its elements."""
    expected = add_oracle(*case.args)
    if not isinstance(got, torch.Tensor) or got.shape != expected.shape or got.numel() < 16:
        return False
    for stride in {tensor.stride(0) for tensor in case.args} - {1}:
        spread = torch.full_like(got, float("nan"))
        spread[::stride] = expected[: spread[::stride].numel()].to(got)
        if same(got, spread):
            return True
    return False


EXERCISE = Exercise(
    id="1.3",
    title="Vector add, any length",
    entries=("vector_add",),
    cases=add_cases,
    oracle=add_oracle,
    needs=TRITON,
    requirements=(LaunchesTriton(), Forbids(("add", "sub"))),
    hints=(
        "Start from the kernel of chapter 00: a block of offsets, a mask, a load, a store. Here there are two loads.",
        "The launcher needs a result (`torch.empty`, of x's dtype and device), a number of programs rounded up, and a "
        "block length, say 1024.",
        "A strided vector keeps its elements `x.stride(0)` apart. Either hand the stride to the kernel and multiply "
        "the offsets by it, or make the input contiguous first, which costs an extra pass over it.",
        "Kernel: `offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)`, `inside = offsets < length`, "
        "`x = tl.load(x_pointer + offsets * x_stride, mask=inside)`, the same for y, then "
        "`tl.store(result_pointer + offsets, x + y, mask=inside)`.",
        "Launcher: `vector_add_kernel[(triton.cdiv(length, 1024),)](x, y, result, length, x.stride(0), y.stride(0), "
        "BLOCK=1024)`.",
    ),
    slips=(
        Slip(
            "x_added_to_itself",
            "The result is x + x: the second load reads x again. Load y from `y_pointer`.",
            formula=lambda x, y: x + x,
        ),
        Slip(
            "y_added_to_itself",
            "The result is y + y: the first load reads y. Load x from `x_pointer`.",
            formula=lambda x, y: y + y,
        ),
    ),
    mistakes=(
        Mistake("nothing_stored", NOTHING_STORED, when=nothing_stored(add_oracle)),
        Mistake(
            "stored_with_a_stride",
            "The result was written at an input's stride: there are holes in it, and half or more of it went past its "
            "end. The result is contiguous, so store at `offsets`.",
            when=_stored_with_a_stride,
        ),
        Mistake("past_the_end", NOT_MASKED, when=past_the_end),
        Mistake(
            "stride_ignored",
            "A strided input was read by the wrong stride, as if its elements were neighbours or by the other input's. "
            "Element i of x lies `i * x.stride(0)` elements from the pointer, and y has a stride of its own.",
            when=_stride_ignored,
        ),
        Mistake("last_element_missing", LAST_MISSING, when=last_missing(add_oracle), every=True),
        Mistake("only_first_block", ONLY_FIRST_BLOCK, when=first_block_only(add_oracle), every=True),
        Mistake("blocks_overlap", OVERLAP, when=blocks_overlap(add_oracle), every=True),
        Mistake("too_few_programs", ROUNDED_DOWN, when=rounded_down(add_oracle), every=True),
    ),
)
