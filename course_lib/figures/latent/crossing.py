"""The time of latent attention's two forms over the number of query tokens, and where one overtakes the other."""

import math

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled
from course_lib.hardware.units import format_seconds

COLORS = {"absorbed": ORANGE, "expanded": BLUE}
MARKERS = {"absorbed": "o", "expanded": "s"}


def crossing(one: dict[int, float], other: dict[int, float]) -> float | None:
    """Where two lines cross on logarithmic axes, between the first two counts that differ in order; None if nowhere."""
    counts = sorted(one.keys() & other.keys())
    apart = [math.log(one[count] / other[count]) for count in counts]
    for place, (before, after) in enumerate(zip(apart, apart[1:])):
        if before < 0 <= after:
            share = before / (before - after)
            return counts[place] ** (1 - share) * counts[place + 1] ** share
    return None


@styled
def draw_form_times(times: dict[str, dict[int, float]], title: str, waiting: dict[str, set[int]] | None = None):
    """A line for each form, both axes logarithmic, and a mark where they cross.

    Args:
        times: {"absorbed": {query tokens: seconds}, "expanded": {…}}.
        title: what was counted or measured, and for which machine.
        waiting: {form: query tokens at which memory is its limit}; these points are hollow.
    """
    figure, axes = new_figure(9.5, 4.8)
    for form, line in times.items():
        points = sorted(line.items())
        axes.plot(*zip(*points), color=COLORS[form], marker=MARKERS[form], markersize=6, label=form)
        hollow = [point for point in points if point[0] in (waiting or {}).get(form, ())]
        if hollow:
            look = {"color": COLORS[form], "marker": MARKERS[form], "linestyle": "none", "markerfacecolor": "white"}
            axes.plot(*zip(*hollow), markersize=8, label=f"{form}, memory is the limit", **look)
    where = crossing(times["absorbed"], times["expanded"])
    if where is not None:
        axes.axvline(where, color=MUTED, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
        words = f"they cross at about {where:.0f}"
        axes.annotate(
            words, (where, 0.04), xycoords=("data", "axes fraction"), xytext=(6, 0), textcoords="offset points"
        )
    counts = sorted({count for line in times.values() for count in line})
    axes.set(xscale="log", yscale="log", xlim=(counts[0] / 1.3, counts[-1] * 1.5))
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.minorticks_off()
    axes.legend(loc="upper left")
    axes.set_title(title, fontsize=12.5, color=INK)
    axes.set(xlabel="query tokens, the last ones of the context", ylabel="time of one layer, predicted")
    return figure
