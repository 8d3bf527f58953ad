"""What is asked of kernels that write rows into a cache, beside the right numbers; and copies that lost digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from course_lib.checker import Case, LaunchesTriton, Moves
from course_lib.checker.specification.seen import Seen


@dataclass(frozen=True)
class MovesRows(Moves):
    """As `Moves`, of rows alone: what says where they go may be loaded as often as you like.

    Attributes:
        index: the argument that says where the rows go, a small tensor of numbers, by its place.
    """

    index: int = 4

    def complaint(self, case: Case, seen: Seen) -> str | None:
        index = case.args[self.index]
        largest = index.numel() * index.element_size()
        rows = {
            name: counts
            for name, counts in seen.traffic.items()
            if counts["stored"] or counts["distinct_loaded"] > largest
        }
        return super().complaint(case, replace(seen, traffic=rows))


@dataclass(frozen=True)
class LaunchesWhereRowsAre(LaunchesTriton):
    """As `LaunchesTriton`; where no row is to be written, nothing need be launched.

    Attributes:
        rows: `rows(*case.args)` is how many there are.
    """

    rows: Callable[..., int] = lambda *args: 1

    def complaint(self, case: Case, seen: Seen) -> str | None:
        return super().complaint(case, seen) if self.rows(*case.args) else None


ROUNDED = (
    "float32 numbers were rounded to 16 bits on their way into the cache. They are only copied: keep the dtype that "
    "they have."
)


def rounded_on_the_way(oracle: Callable) -> Callable:
    """A `when` for copies: what was written is the new keys, or values, or both, bit for bit as 16 bits hold them.

    oracle: `oracle(key, value, key_cache, value_cache, where)`, which writes.
    """

    def when(case, seen, got):
        key, value, *caches, where = case.args
        if key.dtype != torch.float32 or not isinstance(got, tuple):
            return False

        def written(*new):
            copies = [cache.tensor.clone() for cache in caches]
            oracle(*new, *copies, where)
            return copies

        right = written(key, value)
        if _equal(got[1]["written"], right):  # something else is wrong with it
            return False
        for dtype in (torch.float16, torch.bfloat16):
            rounded = [new.to(dtype).to(new.dtype) for new in (key, value)]
            for new in (rounded, (rounded[0], value), (key, rounded[1])):
                if _equal(got[1]["written"], written(*new)):
                    return True
        return False

    return when


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape and bool(((one == other) | one.isnan() & other.isnan()).all())
        for one, other in zip(some, others, strict=True)
    )
