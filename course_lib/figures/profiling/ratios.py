"""The ratios of pairs of times, one after another, with their median and its interval."""

import statistics
from collections.abc import Sequence

from course_lib.figures.style import BLUE, MUTED, ORANGE, RED, new_figure, styled

ROOM = 4.0  # how many times the usual distance from the median the picture reaches


@styled
def draw_ratios(first: Sequence[float], second: Sequence[float], lower: float, upper: float):
    """A point for each pair, second / first; a line at their median, and a band from `lower` to `upper`.

    What is far off, such as a pair with a late call, is a triangle at the edge.

    Args:
        first, second: times in one unit, above 0, as many of both.
        lower, upper: the interval of the median.

    Returns:
        A figure.
    """
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    middle = statistics.median(ratios)
    reach = ROOM * max(statistics.median(abs(ratio - middle) for ratio in ratios), abs(middle - 1), upper - lower, 1e-3)
    inside = {place: ratio for place, ratio in enumerate(ratios, 1) if abs(ratio - middle) <= reach}
    figure, axes = new_figure(9, 3.6)
    axes.axhspan(lower, upper, color=ORANGE, alpha=0.35, linewidth=0, label="95 % interval of the median")
    axes.axhline(middle, color=ORANGE, linewidth=1.5, label="median")
    axes.axhline(1.0, color=MUTED, linewidth=1.0, linestyle="--", label="equally long")
    axes.scatter(list(inside), list(inside.values()), s=18, color=BLUE, zorder=3, label="a pair")
    for marker, sign in (("^", 1), ("v", -1)):
        beyond = [place for place, ratio in enumerate(ratios, 1) if sign * (ratio - middle) > reach]
        if beyond:
            axes.scatter(
                beyond, [middle + 1.04 * sign * reach] * len(beyond), s=36, color=RED, marker=marker, zorder=3,
                label=f"{len(beyond)} {'above' if sign > 0 else 'below'} this picture",
            )  # fmt: skip
    axes.set(xlabel="pair", ylabel="second / first", title="Each pair's ratio")
    axes.set_ylim(middle - 1.15 * reach, middle + 1.15 * reach)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
