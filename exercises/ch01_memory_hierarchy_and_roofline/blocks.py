"""What a kernel's stores and accesses say of it, and in which words: for chapter 01."""

from __future__ import annotations

import torch


def nothing_stored(right, shortest=2048):
    """A `when`: kernels were launched and none stored anything; short inputs may have had no program at all."""

    def when(case, seen, got):
        if not isinstance(got, torch.Tensor) or not seen.launches or case.args[0].numel() < shortest:
            return False  # no result means that it raised an error
        if not seen.traffic:
            return seen.unwritten == right(*case.args).numel()
        return not any(counts["stored"] or counts["atomic"] for counts in seen.traffic.values())

    return when


def grid_capped(right, longer_than=69_629):
    """A `when`: of the longest vectors alone the end was never written, and what stands before it is right."""

    def when(case, seen, got):
        if not isinstance(got, torch.Tensor) or case.args[0].numel() <= longer_than or not seen.unwritten:
            return False
        flat, expected = got.flatten(), right(*case.args).flatten()
        end = flat.numel() - seen.unwritten
        return flat.shape == expected.shape and end > 0 and torch.allclose(flat[:end], expected[:end], rtol=1e-3)

    return when


def past_the_end(case, seen, got) -> bool:
    return bool(seen.out_of_bounds)


NOTHING_STORED = (
    "Nothing was stored in the result. A kernel returns nothing, so its results reach memory only by `tl.store`. Does "
    "the kernel have one, and does the grid have at least one program?"
)
GRID_CAPPED = (
    "Long vectors are written only up to a fixed number of elements: the number of programs has an upper limit, and "
    "each works on one block. Launch a program for each block, or let each of them loop over several."
)
NOT_MASKED = (
    "A block reaches past the end of the vector, or before its start. Give every load and every store a mask: "
    "`offsets < length`. If they have one, look for a wrong sign, or for a stride or a pointer of another vector."
)
