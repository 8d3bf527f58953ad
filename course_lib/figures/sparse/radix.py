"""Passes of a radix histogram that looks for the k-th largest number: what is kept, what goes on, what is left out."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.patches import Patch

from course_lib.figures.style import BLUE, GRID, INK, MUTED, ORANGE, new_figure, styled

KEPT, NEXT, LEFT_OUT = BLUE, ORANGE, GRID


@dataclass(frozen=True)
class Pass:
    """One pass over the numbers that have the border's digits so far.

    Attributes:
        counts: how many of them have each digit, from 0 on.
        missing: how many of the k largest are still to be found among them, before the pass.
        border: the digit of the one that is reached last.
    """

    counts: list[int]
    missing: int
    border: int

    @property
    def larger(self) -> int:
        """How many have a larger digit: they are among the k largest."""
        return sum(self.counts[self.border + 1 :])


def radix_passes(numbers: Sequence[int], k: int, digits: int = 2, bits: int = 3) -> list[Pass]:
    """The passes that find the k-th largest of whole numbers with so many digits of so many bits, from the top."""
    if not 1 <= k <= len(numbers) or not all(0 <= number < 1 << digits * bits for number in numbers):
        raise ValueError(f"k = {k} of {len(numbers)} numbers: k must be 1 to that, and each of {digits} digits.")
    found, prefix, missing = [], 0, k
    for shift in range((digits - 1) * bits, -1, -bits):
        counts = [sum(number >> shift == prefix << bits | digit for number in numbers) for digit in range(1 << bits)]
        border = max(digit for digit in range(1 << bits) if sum(counts[digit:]) >= missing)
        found.append(Pass(counts, missing, border))
        missing -= found[-1].larger
        prefix = prefix << bits | border
    return found


@styled
def draw_radix_passes(numbers: Sequence[int], k: int, bits: int = 3):
    """Two panels, a pass each: the histogram of its digit, and above each bar the counts added up from the top."""
    passes = radix_passes(numbers, k, 2, bits)
    figure, panels = new_figure(11, 3.9, columns=2, sharey=True)
    for number, (axes, one) in enumerate(zip(panels, passes), 1):
        for digit, count in enumerate(one.counts):
            color = KEPT if digit > one.border else NEXT if digit == one.border else LEFT_OUT
            axes.bar(digit, count, width=0.78, color=color)
            reached = sum(one.counts[digit:])
            axes.text(digit, count + 0.12, str(reached), ha="center", color=INK if digit >= one.border else MUTED)
        axes.set_title(f"pass {number}: {one.missing} to be found among {sum(one.counts)}", fontsize=12.5)
        axes.set(xlim=(len(one.counts) - 0.4, -0.6), xticks=range(len(one.counts)))  # the largest digit first
        axes.set_xlabel(f"{('top', 'next')[number - 1]} digit (above a bar: numbers with this digit or a larger one)")
        axes.grid(axis="x", visible=False)
    panels[0].set(ylabel="numbers with this digit", ylim=(0, 1.45 * max(passes[0].counts)))
    handles = [
        Patch(facecolor=KEPT, label="larger: among the k largest"),
        Patch(facecolor=NEXT, label="the border's digit: to the next pass"),
        Patch(facecolor=LEFT_OUT, label="smaller: left out"),
    ]
    panels[1].legend(handles=handles, loc="upper right")
    return figure
