"""What a token leaves on each of several GPUs: KV heads are shared out among them, a latent stands whole on each."""

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import INK, ORANGE, PALETTE, new_figure, styled
from course_lib.hardware.units import format_tick

MARKERS = ("s", "o", "^", "D")


@styled
def draw_rank_bytes(per_rank: dict[str, dict[int, float]]):
    """A line for each cache over the number of ranks, both axes logarithmic.

    Args:
        per_rank: {name: {ranks: bytes of a token on each}}; a name that holds "latent" is drawn in orange.
    """
    figure, axes = new_figure(9.5, 4.6)
    colors = iter(PALETTE)
    for (name, line), marker in zip(per_rank.items(), MARKERS):
        color = ORANGE if "latent" in name else next(colors)
        points = sorted(line.items())
        axes.plot(*zip(*points), color=color, marker=marker, markersize=7)
        first, value = points[0]
        axes.annotate(name, (first, value), xytext=(10, 7), textcoords="offset points", color=INK, fontweight="bold")
    ranks = sorted({number for line in per_rank.values() for number in line})
    axes.set(xscale="log", yscale="log", xlim=(ranks[0] / 1.2, ranks[-1] * 1.3))
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value, "B")))
    axes.minorticks_off()
    axes.set(
        xlabel="ranks (GPUs that share the heads)",
        ylabel="bytes of a token on each rank",
        title="One layer's cache on each GPU",
    )
    return figure
