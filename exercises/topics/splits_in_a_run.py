"""What a run shows of two kernels that attend to each split of a cache and merge the results.

A case's arguments are query [batch, heads, width], cache, lengths [batch], scale, value_dim and splits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from course_lib.checker import Mistake
from course_lib.checker.specification.requirements import Requirement


@dataclass(frozen=True)
class SplitsUsed(Requirement):
    """Where bytes are counted, and each split has a token, results of `splits` splits are stored."""

    id: str = "splits_ignored"

    def complaint(self, case, seen):
        query, _, lengths, _, value_dim, splits = case.args
        stored = sum(counts["stored"] for counts in seen.traffic.values())
        asked = 4 * splits * query.numel() // query.shape[2] * value_dim
        if not (case.metered and seen.traffic) or int(lengths.min()) < splits**2 or stored >= asked:
            return None
        return (
            f"{stored:,} bytes were stored, but the results of {splits} splits are at least {asked:,}. Launch a "
            "program for each split: the middle number of the grid is `splits`, as it was given."
        )


def axes_exchanged(case, seen, got):
    """A length or query was read outside by a program whose last number is no sequence's."""
    programs = (re.search(r"(length|quer).*program \(\d+, \d+, (\d+)\)", access) for access in seen.out_of_bounds)
    return len(case.args) == 6 and any(
        found and int(found[2]) >= len(case.args[2]) and case.args[5] > len(case.args[2]) for found in programs
    )


def empty_splits_unwritten(case, seen, got):
    """All of a result is unwritten where a sequence has an empty split, the splits being of whole tiles or not."""
    if len(case.args) != 6:
        return False
    query, _, lengths, _, value_dim, splits = case.args
    for tile in (1, 16, 32, 64):
        sizes = -(-lengths // (splits * tile)) * tile
        empty = int((sizes * (splits - 1) >= lengths).sum())
        if 0 < seen.unwritten == empty * query.shape[1] * value_dim:
            return True
    return False


SEEN_OF_SPLITS = (
    Mistake(
        "split_axes_exchanged",
        "Programs of a sequence that does not exist ran. The grid is (blocks of heads, splits, batch), so "
        "tl.program_id(1) is the split and tl.program_id(2) the sequence.",
        when=axes_exchanged,
    ),
    Mistake(
        "outside_the_results",
        "Partial results of heads that do not exist were stored. Mask the stores of both the outputs and the "
        "log-sum-exps with members < heads.",
        when=lambda case, seen, got: any(
            "writes" in access and re.search("lse|outputs|partial", access) for access in seen.out_of_bounds
        ),
    ),
    Mistake(
        "empty_split_unwritten",
        "A split without a token stored nothing, and the merge read memory that nobody wrote. Does its program "
        "return early? Without a return it stores zeros and minus infinity.",
        when=empty_splits_unwritten,
    ),
)
