"""What attention costs over the length, looking at all keys or at some, and where one kind overtakes another."""

from collections.abc import Callable, Mapping

from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, PURPLE, RED, new_figure, spread_labels, styled
from course_lib.hardware.units import format_seconds

COLORS = (RED, BLUE, GREEN, PURPLE)


@styled
def draw_costs(
    costs: Mapping[str, Mapping[int, float]],
    ylabel: str,
    title: str,
    crossing: tuple[int, str] | None = None,
    format_cost: Callable[[float], str] = format_seconds,
):
    """A line for each kind, both axes logarithmic, its name at its end, and a dashed line where two cross.

    Args:
        costs: {kind: {length: cost}}, at most four kinds.
        ylabel, title: what a cost is, and for which shape and machine.
        crossing: (length, words), or None.
        format_cost: a cost in words.
    """
    if not 1 <= len(costs) <= len(COLORS):
        raise ValueError(f"There are {len(costs)} kinds; 1 to {len(COLORS)} can be drawn.")
    figure, axes = new_figure(10, 4.9)
    lengths = sorted({length for line in costs.values() for length in line})
    axes.set(xscale="log", yscale="log", xlim=(lengths[0] / 1.15, lengths[-1] * 1.05))
    ends = []
    for color, (name, line) in zip(COLORS, costs.items()):
        points = sorted(line.items())
        axes.plot(*zip(*points), color=color, marker="o", markersize=4.5)
        ends.append((name, points[-1], color))
    low, high = axes.get_ylim()
    heights = [axes.transAxes.inverted().transform(axes.transData.transform(end))[1] for _, end, _ in ends]
    for (name, _, color), height in zip(ends, spread_labels(heights, 0.07)):
        place = {"xycoords": "axes fraction", "xytext": (10, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(name, (1, height), color=color, fontweight="bold", annotation_clip=False, **place)
    axes.set_ylim(low, high)
    if crossing is not None:
        where, words = crossing
        place = axes.transAxes.inverted().transform(axes.transData.transform((where, low)))[0]
        side, shift = ("right", -7) if place > 0.4 else ("left", 7)
        axes.axvline(where, color=MUTED, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
        axes.annotate(
            words, (where, 0.93), xycoords=("data", "axes fraction"), xytext=(shift, 0), textcoords="offset points",
            ha=side, color=INK,
        )  # fmt: skip
    axes.xaxis.set_major_locator(FixedLocator(lengths[:: max(1, len(lengths) // 7)]))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1024:g}k"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_cost(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(title, fontsize=12.5)
    axes.set(xlabel="tokens", ylabel=ylabel)
    return figure
