"""Exercise 0.2: reverse a vector."""

from __future__ import annotations

import torch

from course_lib.checker import TRITON, Case, Exercise, Forbids, LaunchesTriton, Limits, Mistake, Slip


def reverse_oracle(x):
    return x.flip(0)


def reverse_cases(draw):
    prime = draw.choice((131, 521, 769))
    cases = [
        Case("8 elements", (draw.normal(8),)),
        Case("3000 elements, several blocks", (draw.normal(3000),)),
        Case("8 elements once more", (draw.normal(8),)),
        Case("one element", (draw.normal(1),)),
        Case("256 elements", (draw.normal(256),)),
        Case("1025 elements", (draw.normal(1025),)),
        Case(f"{prime} elements, a prime", (draw.normal(prime),)),
    ]
    if draw.on_gpu:
        cases.append(Case("a million elements less one", (draw.normal(999_999),)))
    return cases


def _nothing_stored(case, seen, got) -> bool:
    """Whether kernels were launched and none of them stored anything; short vectors may have had no program at all."""
    (x,) = case.args
    if not isinstance(got, torch.Tensor) or not seen.launches or x.numel() < 2048:  # no result: it raised an error
        return False
    if not seen.traffic:
        return seen.unwritten == x.numel()
    return not any(counts["stored"] or counts["atomic"] for counts in seen.traffic.values())


def _reversed_within_blocks(case, seen, got) -> bool:
    (x,) = case.args
    length = x.numel()
    if not isinstance(got, torch.Tensor) or got.shape != x.shape:
        return False
    for block in (2**power for power in range(3, 12)):
        whole = length // block * block
        if 2 * block <= length and torch.equal(got[:whole], x[:whole].view(-1, block).flip(1).flatten()):
            return True
    return False


def _shifted_by_one(case, seen, got) -> bool:
    (x,) = case.args
    return (
        isinstance(got, torch.Tensor)
        and got.shape == x.shape
        and x.numel() > 2
        and torch.equal(got[1:], x.flip(0)[:-1])
    )


def _written(got) -> int | None:
    """How many leading elements were written, when all the unwritten ones come last."""
    if not isinstance(got, torch.Tensor) or got.dim() != 1:
        return None
    holes = got.isnan()
    count = int((~holes).sum())
    return None if holes[:count].any() else count


def _first_block_only(case, seen, got) -> bool:
    (x,) = case.args
    count = _written(got)
    return bool(count and 2 * count <= x.numel() and torch.equal(got[:count], x.flip(0)[:count]))


def _tail_unwritten(case, seen, got) -> bool:
    (x,) = case.args
    count = _written(got)
    if count is None or count >= x.numel() or not torch.equal(got[:count], x.flip(0)[:count]):
        return False
    largest = 15 if count else 11  # a block of which a whole vector falls short is none of thousands
    return any(count == x.numel() // block * block for block in (2**power for power in range(1, largest)))


EXERCISE = Exercise(
    id="0.2",
    title="Reverse a vector",
    entries=("reverse",),
    cases=reverse_cases,
    oracle=reverse_oracle,
    needs=TRITON,
    limits=Limits(seconds=4.0, gpu_seconds=30.0),
    requirements=(LaunchesTriton(), Forbids(("flip", "index", "gather", "index_select"))),
    hints=(
        "A kernel is free to read one place and write another. Which element of x belongs at position 0 of the result? "
        "And at position i?",
        "Let the program own a block of the result, as in 0.1: `offsets = program * BLOCK + tl.arange(0, BLOCK)`, "
        "mask `offsets < length`. Only the address of the load changes.",
        "Element i of the result is element `length - 1 - i` of x. The mask is about i and serves the load as well as "
        "the store: where i is outside, so is `length - 1 - i`.",
        "`values = tl.load(x_pointer + length - 1 - offsets, mask=inside)`, then "
        "`tl.store(result_pointer + offsets, values, mask=inside)`. The launcher is that of 0.1.",
    ),
    slips=(
        Slip(
            "not_reversed",
            "The result is x in its old order. If you turn round both the load's addresses and the store's, the two "
            "cancel: turn round one of them.",
            formula=lambda x: x.clone(),
        ),
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
            "Nothing was ever stored in the result. A kernel hands nothing back: what it computes reaches memory by "
            "`tl.store` alone. Is there one in the kernel, and is there at least one program?",
            when=_nothing_stored,
        ),
        Mistake(
            "reversed_within_blocks",
            "Each block was reversed in its own place, while the blocks kept their order. Count from the end of the "
            "whole vector: `length - 1 - offsets`.",
            when=_reversed_within_blocks,
            every=True,
        ),
        Mistake(
            "shifted_by_one",
            "Everything is one place too late: for position 0 the kernel reads x[length], which does not exist. The "
            "last element is `length - 1`.",
            when=_shifted_by_one,
        ),
        Mistake(
            "only_first_block",
            "Only one block of the result was written. Either one program was launched in all, or every program works "
            "on block 0 because the program's number is missing from the offsets.",
            when=_first_block_only,
            every=True,
        ),
        Mistake(
            "too_few_programs",
            "The end of the result was never written: the number of programs was rounded down. Round up with "
            "`triton.cdiv`.",
            when=_tail_unwritten,
            every=True,
        ),
        Mistake(
            "past_the_end",
            "A block reaches past the end of the vector, or before its start. Give load and store the mask `offsets < "
            "length`. If they have it, is a sign wrong, or a length another number's?",
            when=lambda case, seen, got: bool(seen.out_of_bounds),
        ),
    ),
)
