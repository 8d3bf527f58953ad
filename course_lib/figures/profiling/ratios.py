"""The ratios of pairs of times, one after another, with their median and its interval."""

import statistics
from collections.abc import Sequence

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled


@styled
def draw_ratios(first: Sequence[float], second: Sequence[float], lower: float, upper: float):
    """A point for each pair, second / first; a line at their median, and a band from `lower` to `upper`.

    Args:
        first, second: times in one unit, above 0, as many of both.
        lower, upper: the interval of the median.

    Returns:
        A figure.
    """
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    figure, axes = new_figure(9, 3.6)
    axes.axhline(1.0, color=MUTED, linewidth=0.8)
    axes.axhspan(lower, upper, color=ORANGE, alpha=0.35, linewidth=0, label="95 % interval of the median")
    axes.axhline(statistics.median(ratios), color=ORANGE, linewidth=1.5, label="median")
    axes.scatter(range(1, len(ratios) + 1), ratios, s=18, color=BLUE, zorder=3, label="a pair")
    axes.set(xlabel="pair", ylabel="second / first", title="Each pair's ratio")
    axes.text(len(ratios) + 0.5, 1.0, " equal", va="center", fontsize=10, color=INK)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
