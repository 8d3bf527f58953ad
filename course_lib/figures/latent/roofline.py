"""Latent decode on the roofline: every query head adds as much intensity, until the step computes instead of waiting.

intensity = 2 · heads · (2 · latent + rope) / ((latent + rope) · item_bytes)      [FLOP/byte], 1.89 · heads in 16 bits
"""

import itertools
import math
import types

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import INK, MUTED, ORANGE, new_figure, styled
from course_lib.hardware.roofline import arithmetic_rate, attainable, balance_point
from course_lib.hardware.units import format_bandwidth, format_flop_rate, format_tick


def latent_intensity(heads: float, item_bytes: float, latent: int = 512, rope: int = 64) -> float:
    """FLOP/byte of absorbed decode over a long context; for several query tokens count heads times tokens."""
    return 2 * heads * (2 * latent + rope) / ((latent + rope) * item_bytes)


@styled
def draw_latent_roofline(ceilings, unit: str = "float16", item_bytes: float = 2, heads=(1, 16, 32, 64, 128)):
    """The roof of one unit, and how fast latent decode can be at best with so many query heads.

    Args:
        ceilings: a `Ceilings`.
        unit: a dtype of `ceilings.matmul_rate`: who does the arithmetic.
        item_bytes: bytes of a cached number.
        heads: query heads on the latent, a mark for each.
    """
    rate, bandwidth = arithmetic_rate(ceilings, unit), ceilings.memory_bandwidth
    ridge = balance_point(rate, bandwidth)
    points = [latent_intensity(number, item_bytes) for number in heads]
    low, high = min(*points, ridge) / 3, max(*points, ridge) * 3
    figure, axes = new_figure(10, 5)
    roof = f"{unit}, {format_flop_rate(rate)}; memory, {format_bandwidth(bandwidth)}"
    axes.plot([low, ridge, high], [bandwidth * low, rate, rate], color=INK, linewidth=2.4, label=roof)
    label = f"balance, {ridge:.3g} FLOP/byte: from {math.ceil(ridge / latent_intensity(1, item_bytes))} heads on"
    axes.plot([ridge, ridge], [bandwidth * low, rate], color=MUTED, linewidth=1, linestyle=(0, (2, 3)), label=label)
    sides = itertools.cycle(
        ((0, 10), (0, -20))
    )  # under the flat roof names stand side by side: by turns above and below
    for number, intensity in zip(heads, points):
        best = attainable(intensity, ceilings, unit)
        axes.plot([intensity], [best], marker="o", markersize=10, color=ORANGE, markeredgecolor=INK, zorder=3)
        place = {"xytext": (-9, 5), "ha": "right"} if best < rate else {"xytext": next(sides), "ha": "center"}
        name = f"{number} head{'s' if number > 1 else ''}: {intensity:.3g}"
        axes.annotate(name, (intensity, best), textcoords="offset points", fontsize=10, color=INK, **place)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bandwidth * low, rate * 5))
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.minorticks_off()
    axes.legend(loc="upper left", fontsize=10.5)
    axes.set(
        xlabel="arithmetic intensity [FLOP/byte]",
        ylabel="rate [FLOP/s]",
        title=f"Latent decode on {ceilings.device}",
    )
    return figure


def draw_datasheet_roofline(device: str, sheet, unit: str = "float16", heads=(1, 16, 32, 64, 128)):
    """The same with the ceilings of a `Datasheet`, for those who do not have the GPU."""
    roof = types.SimpleNamespace(device=device, memory_bandwidth=sheet.bandwidth, matmul_rate=sheet.matmul_rate)
    return draw_latent_roofline(roof, unit, heads=heads)
