"""Decode attention on the roofline: each group size is a point on the memory slope, as high as its intensity.

intensity = 2 · group / item_bytes        [FLOP/byte]: 4 · head_dim FLOPs for each query head of a group and key,
                                          2 · head_dim · item_bytes bytes for the group
"""

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, PURPLE, RED, new_figure, styled
from course_lib.hardware.roofline import arithmetic_rate, attainable, balance_point
from course_lib.hardware.units import format_bandwidth, format_flop_rate, format_tick

GROUPS = (1, 2, 4, 8, 16, 32, 64, 128)
NAMES = {1: "multi-head", 8: "Llama 3 70B"}
LINES = ((ORANGE, "s"), (BLUE, "o"), (PURPLE, "^"), (RED, "D"))


def group_intensity(group: float, item_bytes: float) -> float:
    """FLOP/byte of decode over a long context with `group` query heads on each KV head."""
    return 2 * group / item_bytes


@styled
def draw_decode_roofline(ceilings, unit: str = "float16", item_bytes: float = 2, groups=GROUPS, measured=None):
    """The roof of one unit, with a mark for each group size where decode can be at best, and measured rates below.

    Args:
        ceilings: a `Ceilings`.
        unit: "fma" or a dtype of `ceilings.matmul_rate`: who does the arithmetic.
        item_bytes: bytes of a cached element.
        groups: query heads on a KV head.
        measured: {name: {group: FLOP/s}}, a line for each name; None draws only what is possible.

    Raises:
        ValueError: the unit was not measured on this device.
    """
    rate, bandwidth = arithmetic_rate(ceilings, unit), ceilings.memory_bandwidth
    ridge = balance_point(rate, bandwidth)
    measured = measured or {}
    shown = sorted({*groups, *(group for line in measured.values() for group in line)})
    intensities = [group_intensity(group, item_bytes) for group in shown]
    low_x, high_x = min(intensities) / 4, max(*intensities, 2 * ridge) * 1.6
    lowest = min([bandwidth * low_x, *(value for line in measured.values() for value in line.values())])
    figure, axes = new_figure(10, 5.4)
    axes.set(xscale="log", yscale="log", xlim=(low_x, high_x), ylim=(lowest / 1.8, rate * (6 if not measured else 14)))
    roof = f"{unit}, {format_flop_rate(rate)}; memory, {format_bandwidth(bandwidth)}"
    axes.plot([low_x, ridge, high_x], [bandwidth * low_x, rate, rate], color=INK, linewidth=2.4, label=roof)
    axes.plot(
        [ridge, ridge],
        [lowest / 1.8, rate],
        color=MUTED,
        linewidth=1,
        linestyle=(0, (2, 3)),
        label=f"balance, {ridge:.3g} FLOP/byte",
    )
    for group in shown:
        _mark_group(axes, group, group_intensity(group, item_bytes), ceilings, unit)
    for (name, line), (color, marker) in zip(measured.items(), LINES):
        points = sorted(line.items())
        axes.plot(
            [group_intensity(group, item_bytes) for group, _ in points],
            [value for _, value in points],
            color=color,
            marker=marker,
            markersize=7,
            linewidth=1.6,
            zorder=4,
            label=f"measured: {name}",
        )
    axes.legend(loc="upper left", fontsize=10.5)
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if value >= 1 else f"1/{1 / value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.minorticks_off()
    axes.set(
        xlabel="arithmetic intensity [FLOP/byte]",
        ylabel="rate [FLOP/s]",
        title=f"Decode attention on {ceilings.device}",
    )
    return figure


def _mark_group(axes, group: int, intensity: float, ceilings, unit: str) -> None:
    best = attainable(intensity, ceilings, unit)
    axes.plot([intensity], [best], marker="o", markersize=10, color="white", markeredgecolor=INK, zorder=3)
    on_slope = best < arithmetic_rate(ceilings, unit)
    name = f"G = {group}" + (f", {NAMES[group]}" if on_slope and group in NAMES else "")
    place = {"xytext": (-9, 5), "ha": "right"} if on_slope else {"xytext": (0, 10), "ha": "center"}
    axes.annotate(name, (intensity, best), textcoords="offset points", fontsize=10, color=INK, **place)
