"""The time of latent attention's two forms over the number of query tokens, and where one overtakes the other."""

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, INK, ORANGE, new_figure, styled
from course_lib.hardware.units import format_seconds

COLORS = {"absorbed": ORANGE, "expanded": BLUE}
MARKERS = {"absorbed": "o", "expanded": "s"}


@styled
def draw_form_times(times: dict[str, dict[int, float]], title: str):
    """A line for each form, both axes logarithmic.

    Args:
        times: {"absorbed": {query tokens: seconds}, "expanded": {…}}.
        title: what was counted or measured, and for which machine.
    """
    figure, axes = new_figure(9.5, 4.8)
    for form, line in times.items():
        points = sorted(line.items())
        axes.plot(*zip(*points), color=COLORS[form], marker=MARKERS[form], markersize=6, label=form)
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
