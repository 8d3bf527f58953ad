"""What the three kernels of chapter 02 are held to: one pass over memory, in tiles, without PyTorch's products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.checker import Limits, Requirement

MATRIX_PRODUCTS = (
    "mm",
    "bmm",
    "matmul",
    "einsum",
    "addmm",
    "baddbmm",
    "mv",
    "dot",
    "linear",
    "scaled_dot_product_attention",
    "_scaled_dot_product",
)
PATIENT = Limits(seconds=20.0)  # many small programs are right, and slow in the interpreter
SMALLEST_TILE = 16  # rows of the smallest tile that tl.dot takes
UNMASKED_WRITE = (
    "A store reaches past the end of the result. A length is seldom a multiple of the tile: mask the store in both "
    "directions, rows and columns. If it is masked, are two lengths or strides exchanged?"
)


@dataclass(frozen=True)
class OnePass(Requirement):
    """In metered cases a kernel moves what its pass must move, give or take 5 %.

    Attributes:
        least: `least(*args)`, bytes of the pass when every operand is read once and every result is written once.
        most_loaded: `most_loaded(*args)`, bytes that all loads together may ask for. Tiles ask for the small operands
            again and again, and a cache answers: such loads are held to this limit only, and the 5 % count distinct
            bytes. None: every load counts.
    """

    least: Callable[..., float]
    most_loaded: Callable[..., float] | None = None
    id: str = "not_one_pass"

    def complaint(self, case, seen):
        if not (case.metered and seen.traffic):
            return None
        least, rows = self.least(*case.args), seen.traffic.values()
        loaded = sum(row["loaded"] for row in rows)
        crossing = sum(row["distinct_loaded"] for row in rows) if self.most_loaded else loaded
        crossing += sum(row["stored"] + 2 * row["atomic"] for row in rows)
        if crossing > 1.05 * least:
            detail = "; ".join(
                f"{name}: {row['loaded']:,} B loaded, {row['stored']:,} B stored" for name, row in seen.traffic.items()
            )
            return (
                f"This pass moved {crossing:,} bytes and needs {least:,.0f} "
                f"({crossing / least:.2f} times as many). By tensor: {detail}."
            )
        if crossing < 0.95 * least:
            return (
                f"The kernels moved {crossing:,} bytes and the pass takes {least:,.0f}: a part of it was done "
                "outside Triton. Let the kernel do the whole pass."
            )
        if self.most_loaded and loaded > 1.05 * self.most_loaded(*case.args):
            return (
                f"The loads ask for {loaded:,} bytes, more than tiles of {SMALLEST_TILE} rows would "
                f"({self.most_loaded(*case.args):,.0f}). Load a tile of each operand once and use it for a whole "
                "tile of the result."
            )
        return None
