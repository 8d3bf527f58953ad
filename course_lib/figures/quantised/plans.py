"""The time of each plan for a cache in fewer bits over the number of query tokens, and where each is the fastest."""

from collections.abc import Mapping

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PALETTE, PURPLE, new_figure, styled
from course_lib.hardware.units import format_seconds

LOOKS = {"keep": (BLUE, "16 bits, kept"), "fuse": (ORANGE, "fused"), "once": (PURPLE, "dequantised once")}


def fastest(times: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int, int]]:
    """(plan, first count, last count) of each stretch of counts in which a plan is the fastest, in order; of two that
    take equally long, the one named first."""
    stretches: list[tuple[str, int, int]] = []
    for count in sorted(next(iter(times.values()))):
        plan = min(times, key=lambda name: times[name][count])
        if stretches and stretches[-1][0] == plan:
            stretches[-1] = (plan, stretches[-1][1], count)
        else:
            stretches.append((plan, count, count))
    return stretches


@styled
def draw_plan_times(
    times: Mapping[str, Mapping[int, float]], title: str, measured: Mapping[str, Mapping[int, float]] | None = None
):
    """A line for each plan, both axes logarithmic; where another plan becomes the fastest, a dashed line and its name.

    Args:
        times: {plan: {query tokens: seconds}}, the same counts for all, predicted.
        title: what was counted, and for which machine.
        measured: the same for some counts, measured: points.

    Returns a figure. Raises a ValueError when there is nothing to draw, counts that differ, or a time not above 0.
    """
    counts = {frozenset(line) for line in times.values()}
    if len(counts) != 1 or not min(counts, default=()) or min(min(line.values()) for line in times.values()) <= 0:
        raise ValueError(f"times is {times!r}; give at least one plan, all with the same counts and times above 0.")
    figure, axes = new_figure(10, 5)
    for index, (plan, line) in enumerate(times.items()):
        color, label = LOOKS.get(plan, (PALETTE[index % len(PALETTE)], plan))
        axes.plot(*zip(*sorted(line.items())), color=color, label=label)
        if measured and measured.get(plan):
            points = sorted(measured[plan].items())
            axes.plot(*zip(*points), linestyle="none", marker="o", markersize=9, color=color, markeredgecolor=INK)
    for plan, begins, _ in fastest(times):
        color, label = LOOKS.get(plan, (MUTED, plan))
        if begins > min(next(iter(times.values()))):
            axes.axvline(begins, color=MUTED, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
        axes.annotate(f"{label}\nfrom {begins:,}", (begins, 0.02), xycoords=("data", "axes fraction"), xytext=(5, 0),
                      textcoords="offset points", color=INK, fontsize=10, va="bottom")  # fmt: skip
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.minorticks_off()
    axes.legend(loc="upper left")
    axes.set_title(title, fontsize=12.5, color=INK)
    told = "lines predicted, points measured" if measured else "predicted"
    axes.set(xlabel="query tokens, the last ones of the context", ylabel=f"time of one layer, {told}")
    lowest, highest = axes.get_ylim()
    axes.set_ylim(lowest / (highest / lowest) ** 0.15, highest)  # room for the names
    return figure
