"""What a run shows of kernels that take up to 64 query heads as the rows of a tile: rows loaded, results left out.

A case's arguments are query [batch, heads, width], cache, lengths [batch], scale and value_dim, and perhaps others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.checker import Mistake
from course_lib.checker.specification.requirements import Requirement


def times_loaded(seen) -> float:
    """How often a number of the cache was loaded, on average."""
    counts = [counts for name, counts in seen.traffic.items() if "cache" in name or name.startswith(("k", "rows"))]
    return max((one["loaded"] / max(one["distinct_loaded"], 1) for one in counts), default=0.0)


def unwritten(sequences: Callable, heads_left: Callable) -> Callable:
    """A mistake's `when`: the results of so many sequences, and of so many of their heads, were never stored.

    Args:
        sequences: their number, of a case.
        heads_left: heads of each without a result, of all heads.
    """

    def when(case, seen, got):
        return 0 < seen.unwritten == sequences(case) * heads_left(case.args[0].shape[1]) * case.args[4]

    return when


def _sequences(case) -> int:
    return len(case.args[2])


def _last(heads: int) -> int:
    """Heads of the last block, where it is not full."""
    return heads % min(64, max(16, 1 << (heads - 1).bit_length()))


def _but_first(heads: int) -> int:
    """Heads behind the first block."""
    return max(0, heads - 64)


LEFT_OUT = (
    Mistake(
        "one_sequence_alone",
        "Only the first sequence has a result. The grid is (blocks of heads, sequences), so tl.program_id(0) is the "
        "block and tl.program_id(1) the sequence.",
        when=unwritten(lambda case: len(case.args[2]) - 1, lambda heads: heads if heads <= 64 else 0),
    ),
    Mistake(
        "heads_without_a_program",
        "No program stored the results of the last heads, or of any if they are fewer than a tile's rows. Round the "
        "number of blocks up: triton.cdiv(heads, rows). If it is, check where a program stores: its heads begin at "
        "program_id(0) * ROWS.",
        when=lambda case, seen, got: any(unwritten(_sequences, left)(case, seen, got) for left in (_last, _but_first)),
        every=True,
    ),
    Mistake(
        "empty_sequence_unwritten",
        "A sequence of length 0 got no result. Do its programs return before they store? Without a return the loop "
        "makes no step, and they store zeros.",
        when=unwritten(lambda case: int((case.args[2] == 0).sum()), lambda heads: heads),
        every=True,
    ),
)
OUTSIDE = (
    Mistake(
        "outside_the_queries",
        "A load or store reached queries or outputs of heads that do not exist. Mask both with members < heads. "
        "If they are masked, check whether two strides are exchanged.",
        when=lambda case, seen, got: any("query" in access or "output" in access for access in seen.out_of_bounds),
    ),
    Mistake(
        "outside_the_cache",
        "A load reached rows outside the cache. Mask the loads with tokens < length. If they are masked, check the "
        "cache's strides.",
        when=lambda case, seen, got: any("cache" in access for access in seen.out_of_bounds),
    ),
)


@dataclass(frozen=True)
class AtMost64Heads(Requirement):
    """A program takes no more heads than an output tile in registers has room for: more than 64 read the rows twice."""

    id: str = "tile_too_tall"

    def complaint(self, case, seen):
        if not case.metered or case.args[0].shape[1] <= 64 or not seen.traffic or times_loaded(seen) > 1.5:
            return None
        return (
            f"One program took {case.args[0].shape[1]} heads, so its tile has more than 64 rows. 64 × 512 float32 "
            "numbers are half of a multiprocessor's registers already: let a program take at most 64."
        )


def costs(right: Callable) -> tuple[Mistake, ...]:
    """Rows loaded too often, where the numbers are right: `right(case, got)`."""

    def in_short_tiles(case, seen, got):
        """Whole rows were loaded several times. Latents alone, loaded twice, make no whole number."""
        times = times_loaded(seen)
        return case.args[0].shape[1] > 16 and times >= 2 and times == int(times) and right(case, got)

    return (
        Mistake(
            "rows_read_for_every_head",
            "The numbers are right, but the rows were loaded once for every query head. All heads share them: take up "
            "to 64 heads as the rows of one tile.",
            when=lambda case, seen, got: times_loaded(seen) > 0.8 * case.args[0].shape[1] > 2 and right(case, got),
            cost=True,
        ),
        Mistake(
            "tile_too_short",
            "The numbers are right, but the rows were loaded more than once, because a tile has fewer rows than there "
            "are heads. Up to 64 heads fit in one tile: use the next power of two of `heads`, from 16 to 64.",
            when=in_short_tiles,
            cost=True,
        ),
        Mistake(
            "latent_loaded_twice",
            "The numbers are right, but the latents were loaded more than once. The values are the first columns of "
            "the keys: multiply the weights with the tile of latents that you already hold.",
            when=lambda case, seen, got: (
                times_loaded(seen) > 1.2 * -(-case.args[0].shape[1] // 64) and right(case, got)
            ),
            cost=True,
        ),
    )
