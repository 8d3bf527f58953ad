"""Programs of unequal length on the slots of a chip, as `hardware.schedule` has them: a row for each slot."""

from collections.abc import Mapping, Sequence

from matplotlib.patches import Rectangle

from course_lib.figures.style import BLUE, INK, MUTED, PALETTE, PAPER, RED, new_figure, styled
from course_lib.hardware.schedule import Bar, finish

FEW = 16  # slots, up to which each row has its number


@styled
def draw_loads(
    plans: Mapping[str, Sequence[Bar]], slots: int, unit: str, owners: Mapping[str, Sequence[int]] | None = None
):
    """A panel for each plan: a row for each slot, a bar for each program, and dashed the time if all shared alike.

    Args:
        plans: {name: bars, as `scheduled` makes them}. Bars longer than half of the longest plan's end are red.
        slots: of the chip.
        unit: of a program's work.
        owners: {name: a number for each bar}, such as its head: bars with one number have one colour.
    """
    figure, all_axes = new_figure(11, 3.7, columns=len(plans), sharey=True, squeeze=False)
    longest = max(finish(bars) for bars in plans.values())
    for axes, (name, bars) in zip(all_axes[0], plans.items()):
        for place, (slot, start, work) in enumerate(bars):
            color = RED if work > longest / 2 else BLUE
            if owners is not None:
                color = PALETTE[owners[name][place] % len(PALETTE)]
            axes.add_patch(Rectangle((start, slot), work, 0.9, facecolor=color, edgecolor=PAPER, linewidth=0.6))
        mean = sum(work for _, _, work in bars) / slots
        axes.axvline(mean, color=MUTED, linewidth=1.3, linestyle=(0, (4, 3)))
        words = f"ends at {finish(bars):,.0f}"
        axes.text(1.08 * longest, slots + 0.5, words, color=INK, ha="right", va="top", fontsize=10.5)
        axes.set(xlim=(0, 1.1 * longest), ylim=(slots + 1.8, 0), xlabel=unit)
        if slots <= FEW:
            axes.set_yticks([slot + 0.45 for slot in range(slots)], [str(slot) for slot in range(slots)])
        axes.grid(axis="y", visible=False)
        axes.set_title(name, fontsize=12)
    all_axes[0][0].set_ylabel("slot of the chip")
    return figure
