"""What each plan for a cache in fewer bits gains over keeping 16 bits, over the number of query tokens."""

from collections.abc import Mapping

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import INK, ORANGE, PALETTE, PURPLE, new_figure, styled

LOOKS = {"fuse": (ORANGE, "o", "fused"), "once": (PURPLE, "s", "dequantised once")}


@styled
def draw_plan_gains(
    times: Mapping[str, Mapping[int, float]], title: str, measured: Mapping[str, Mapping[int, float]] | None = None
):
    """A line for each plan but the first: how many times as fast as the first it is; at 1 it breaks even.

    Args:
        times: {plan: {query tokens: seconds}}, the same counts for all, predicted. The first is the one that the others
            are compared with.
        title: what was counted, and for which machine.
        measured: the same for some counts, measured, the first plan's times among them: large points.

    Returns a figure. Raises a ValueError when there are not two plans, counts that differ, or a time not above 0.
    """
    counts = {frozenset(line) for line in times.values()}
    if len(times) < 2 or len(counts) != 1 or min((t for line in times.values() for t in line.values()), default=0) <= 0:
        raise ValueError(f"times is {times!r}; give two plans or more, with the same counts and times above 0.")
    first, *others = times
    figure, axes = new_figure(10, 4.6)
    axes.axhline(1, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=0, label="breaks even")
    for index, plan in enumerate(others):
        color, marker, label = LOOKS.get(plan, (PALETTE[index % len(PALETTE)], "^", plan))
        gains = [(count, times[first][count] / times[plan][count]) for count in sorted(times[plan])]
        axes.plot(*zip(*gains), color=color, marker=marker, markersize=5, label=label)
        taken = (measured or {}).get(plan, {})
        if measured and taken:
            points = [(count, measured[first][count] / seconds) for count, seconds in taken.items()]
            axes.plot(*zip(*points), linestyle="none", marker=marker, markersize=13, color=color, markeredgecolor=INK,
                      label=f"{label}, measured")  # fmt: skip
    axes.set(xscale="log", xlabel="query tokens, the last ones of the context", ylabel="times as fast as 16 bits")
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=len(axes.get_legend_handles_labels()[1]))
    axes.set_title(title, fontsize=12.5, color=INK)
    return figure
