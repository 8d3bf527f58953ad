"""What memory that no one wrote says of a kernel that works block by block, and in which words: for chapter 01."""

from __future__ import annotations

import torch

POWERS_OF_TWO = tuple(2**power for power in range(1, 17))
LARGEST_BLOCK = 1024  # of which a vector may be too short to fill one; a longer block is no one's choice here


def written(got, right: torch.Tensor) -> int | None:
    """How many leading elements are there and right, when all the others were never written (NaN in a check)."""
    if not isinstance(got, torch.Tensor) or got.shape != right.shape:
        return None
    got, right = got.flatten().double(), right.flatten().double()
    count = int((~got.isnan()).sum())
    if got[:count].isnan().any() or not torch.allclose(got[:count], right[:count], rtol=1e-2, atol=1e-3):
        return None
    return count


def nothing_stored(right, shortest=2048):
    """A `when`: kernels were launched and none stored anything; short inputs may have had no program at all."""

    def when(case, seen, got):
        if not isinstance(got, torch.Tensor) or not seen.launches or case.args[0].numel() < shortest:
            return False  # no result means that it raised an error
        if not seen.traffic:
            return seen.unwritten == right(*case.args).numel()
        return not any(counts["stored"] or counts["atomic"] for counts in seen.traffic.values())

    return when


def first_block_only(right):
    """A `when`: only the first block of the result was written. `right(*args)` is the true result."""

    def when(case, seen, got):
        expected = right(*case.args)
        count = written(got, expected)
        return bool(count) and count in POWERS_OF_TWO and count < expected.numel()

    return when


def rounded_down(right):
    """A `when`: the number of programs was rounded down, so that the last, partly filled block is unwritten."""

    def when(case, seen, got):
        expected = right(*case.args)
        count, length = written(got, expected), expected.numel()
        blocks = [block for block in POWERS_OF_TWO if count or block <= LARGEST_BLOCK]
        return count is not None and count < length and any(count == length // block * block for block in blocks)

    return when


def blocks_overlap(right):
    """A `when`: program p starts at element p instead of p * BLOCK."""

    def when(case, seen, got):
        expected = right(*case.args)
        count, length = written(got, expected), expected.numel()
        return (
            count is not None
            and count < length
            and any(count == -(-length // block) - 1 + block for block in POWERS_OF_TWO)
        )

    return when


def last_missing(right):
    """A `when` for every failing case: all was written but the last element."""

    def when(case, seen, got):
        expected = right(*case.args)
        return written(got, expected) == expected.numel() - 1

    return when


def past_the_end(case, seen, got) -> bool:
    return bool(seen.out_of_bounds)


def same(got, expected: torch.Tensor) -> bool:
    """Whether a result is this one up to rounding, NaN where it has NaN."""
    return (
        isinstance(got, torch.Tensor)
        and got.shape == expected.shape
        and torch.allclose(got.double(), expected.double(), rtol=1e-2, atol=1e-2, equal_nan=True)
    )


NOTHING_STORED = (
    "Nothing was ever stored in the result. A kernel hands nothing back: what it computes reaches memory by `tl.store` "
    "alone. Is there one in the kernel, and is there at least one program?"
)
ONLY_FIRST_BLOCK = (
    "Only the first block of the result was written. Either one program was launched in all, or every program works "
    "on block 0 because `tl.program_id(0) * BLOCK` is missing from the offsets."
)
ROUNDED_DOWN = (
    "The end of the result was never written: the number of programs was rounded down, so the last, partly filled "
    "block has none. Round up with `triton.cdiv`."
)
OVERLAP = (
    "The blocks overlap: program 1 starts one element after program 0 instead of one block after it. Multiply the "
    "program's number by the block's length."
)
LAST_MISSING = "All was written but the last element. Positions run from 0 to length - 1: mask with `offsets < length`."
NOT_MASKED = (
    "A block reaches past the end of the vector, or before its start. Give every load and every store a mask: "
    "`offsets < length`. If they have one, is a sign wrong, or a stride or pointer another vector's?"
)
