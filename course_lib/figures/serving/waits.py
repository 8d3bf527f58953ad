"""How long each of many requests waited: a dot for each, with lines at their mean and at the longest."""

import statistics
from collections.abc import Mapping, Sequence

from course_lib.figures.style import BLUE, INK, ORANGE, RED, new_figure, spread_labels, styled


@styled
def draw_waits(waits: Mapping[str, Sequence[float]], unit: str):
    """A panel for each run: its requests' waits in rising order, with the mean and the longest.

    Args:
        waits: {run: the wait of each request}.
        unit: of the waits.
    """
    figure, all_axes = new_figure(11, 3.9, columns=len(waits), sharey=True, squeeze=False)
    highest = max(max(values) for values in waits.values())
    for axes, (name, values) in zip(all_axes[0], waits.items()):
        ordered = sorted(values)
        axes.plot(range(1, len(ordered) + 1), ordered, linestyle="none", marker="o", markersize=4, color=BLUE)
        marks = (("longest", ordered[-1], RED), ("mean", statistics.fmean(ordered), ORANGE))
        places = spread_labels([value for _, value, _ in marks], 0.06 * highest)
        for (label, value, color), place in zip(marks, places):
            axes.axhline(value, color=color, linewidth=1.4, linestyle="--")
            axes.text(len(ordered) + 2, place, f"{label} {value:.0f}", color=INK, fontsize=10, va="bottom")
        axes.set_title(name, fontsize=12)
        axes.set_xticks(range(0, len(ordered) + 1, 10))
        axes.set(xlabel="requests, by how long they waited", xlim=(0, 1.35 * len(ordered)), ylim=(0, 1.12 * highest))
    all_axes[0][0].set_ylabel(f"time to the first token [{unit}]")
    return figure
