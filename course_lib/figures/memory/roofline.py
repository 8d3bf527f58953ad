"""The roofline of this machine, measured, with measured kernels on it.

Both axes are logarithmic. The slope is memory: at an intensity of I FLOP/byte no kernel passes bandwidth * I. The flat
lines are arithmetic. A kernel's distance below its own roof is what is left to gain without doing less work.
"""

import dataclasses
import itertools
import math
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib.transforms import ScaledTranslation

from course_lib.figures.style import (
    BLUE,
    GREEN,
    INK,
    MUTED,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    new_figure,
    spread_labels,
    styled,
)
from course_lib.hardware.datasheets import datasheet_for
from course_lib.hardware.roofline import Work, arithmetic_rate, balance_point, floor_time
from course_lib.hardware.units import format_bandwidth, format_flop_rate, format_seconds, format_tick

SHORT_NAMES = {"float8_e4m3fn": "float8"}
MARKER = 15  # diameter of a kernel's mark [points]
SAME_ROOF = 1.12  # rates this close are drawn as one line with both names


@dataclasses.dataclass(frozen=True)
class Measured:
    """One kernel's work and the seconds that it took (a number or a `Timing`)."""

    work: Work
    seconds: Any  # a number, or a Timing, whose median counts

    def __post_init__(self):
        if not (math.isfinite(self.time) and self.time > 0):
            raise ValueError(f"seconds of {self.work.name!r} is {self.time!r}; it must be a positive number.")

    @property
    def time(self) -> float:
        return float(getattr(self.seconds, "median", self.seconds))

    def share_of_roof(self, ceilings) -> float:
        """Least time over measured time: 1.0 is the roof."""
        return floor_time(self.work, ceilings) / self.time

    def describe(self, ceilings) -> str:
        """One line: time, the rate that matters, and how near the roof."""
        work = self.work
        memory_bound = work.bytes / ceilings.memory_bandwidth >= work.flops / arithmetic_rate(ceilings, work.unit)
        rate = format_bandwidth(work.bytes / self.time) if memory_bound else format_flop_rate(work.flops / self.time)
        share = f"{100 * self.share_of_roof(ceilings):.0f} % of its roof"
        return f"{work.name}: {format_seconds(self.time)}, {rate}, {share}"


@styled
def roofline_plot(ceilings, points=(), title=None):
    """The measured roofline as a figure.

    Args:
        ceilings: a `Ceilings`.
        points: `Measured` kernels; one without FLOPs (a copy) stands at the left edge, on the scale of the slope.
        title: None names the device.
    """
    points = list(points)
    figure, axes = new_figure(10, 5.4 + 0.26 * len(points))
    low_x, high_x, low_y, high_y = limits(ceilings, points)
    axes.set(xscale="log", yscale="log", xlim=(low_x, high_x), ylim=(low_y, high_y))
    roofs = merge_roofs(ceilings)
    draw_slopes(axes, ceilings, low_x)
    draw_roofs(axes, ceilings, roofs, high_x)
    draw_balance_points(axes, ceilings, roofs, low_y)
    draw_datasheet(axes, ceilings, low_x, high_x)
    draw_points(axes, points, low_x, high_x)
    add_legends(axes, ceilings, points)
    axes.set_xlabel("arithmetic intensity [FLOP/byte]")
    axes.set_ylabel("rate [FLOP/s]")
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fraction(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_tick(value)))
    axes.minorticks_off()
    axes.set_title(title or f"Roofline of {ceilings.device}, as measured")
    return figure


def fraction(value: float) -> str:
    """An intensity as a tick label: 1/16, 4, 1024."""
    return f"{value:g}" if value >= 1 else f"1/{1 / value:g}"


def limits(ceilings, points) -> tuple[float, float, float, float]:
    """(low x, high x, low y, high y) that hold every ridge and every point."""
    intensities = [point.work.intensity for point in points if 0 < point.work.intensity < math.inf]
    rates = [ceilings.fma_rate, *ceilings.matmul_rate.values()]
    low_x = min([1 / 16, *(value / 2 for value in intensities)])
    high_x = max([8 * max(rates) / ceilings.memory_bandwidth, *(value * 2 for value in intensities)])
    achieved = [point.work.flops / point.time for point in points if point.work.flops]
    achieved += [low_x * point.work.bytes / point.time for point in points if not point.work.flops]
    low_y = min([ceilings.memory_bandwidth * low_x / 2, *(value / 2 for value in achieved)])
    return low_x, high_x, low_y, max([3 * max(rates), *(value * 2 for value in achieved)])


def draw_slopes(axes, ceilings, low_x: float) -> None:
    """The memory slope, and fainter ones for what lies above the memory, each up to the highest roof."""
    highest = max([ceilings.fma_rate, *ceilings.matmul_rate.values()])
    near = "on chip" if ceilings.kind == "cuda" else "in cache"
    for name, bandwidth, color, line, width in (
        ("memory", ceilings.memory_bandwidth, INK, "-", 2.6),
        ("L2", ceilings.l2_bandwidth, MUTED, "--", 1.3),
        (near, ceilings.on_chip_bandwidth, MUTED, ":", 1.6),
    ):
        if bandwidth is not None:
            axes.plot(
                [low_x, highest / bandwidth],
                [bandwidth * low_x, highest],
                color=color,
                linestyle=line,
                linewidth=width,
                label=f"{name} {format_bandwidth(bandwidth)}",
            )


def merge_roofs(ceilings) -> list[tuple[str, float, str]]:
    """(name, rate, colour) of every flat roof, lowest first; matrix products that nearly coincide make one."""
    merged: list[tuple[list[str], float]] = []
    for dtype, rate in sorted(ceilings.matmul_rate.items(), key=lambda item: item[1]):
        if merged and rate / merged[-1][1] < SAME_ROOF:
            merged[-1] = ([*merged[-1][0], dtype], rate)
        else:
            merged.append(([dtype], rate))
    roofs = []
    for (dtypes, rate), color in zip(merged, (BLUE, PURPLE, RED, SKY, ORANGE)):
        names = ", ".join(SHORT_NAMES.get(dtype, dtype) for dtype in dtypes)
        roofs.append((f"{names} matmul", rate, color))
    return sorted([*roofs, ("multiply-add", ceilings.fma_rate, GREEN)], key=lambda roof: roof[1])


def draw_roofs(axes, ceilings, roofs, high_x: float) -> None:
    """Flat lines from the memory slope to the right, named in the margin."""
    low_y, high_y = axes.get_ylim()
    decades = math.log10(high_y / low_y)
    wanted = [math.log10(rate / low_y) / decades for _, rate, _ in roofs]
    for (name, rate, color), height in zip(roofs, spread_labels(wanted, least_gap=0.085)):
        axes.plot([rate / ceilings.memory_bandwidth, high_x], [rate, rate], color=color)
        axes.annotate(
            f"{name}\n{format_flop_rate(rate)}",
            (high_x, rate),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=10,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8, "shrinkA": 2, "shrinkB": 0},
        )


def draw_balance_points(axes, ceilings, roofs, low_y: float) -> None:
    """Where the ordinary and the fastest matrix units turn from waiting for memory to waiting for arithmetic."""
    corners = sorted({roofs[-1], next(roof for roof in roofs if roof[0] == "multiply-add")}, key=lambda roof: roof[1])
    for _, rate, color in corners:
        ridge = balance_point(rate, ceilings.memory_bandwidth)
        axes.plot([ridge, ridge], [low_y, rate], color=color, linewidth=1, linestyle=(0, (2, 3)))
        # Corners may lie close together: the name of the lower one then stands on its left.
        left = len(corners) == 2 and rate == corners[0][1]
        axes.annotate(
            f"balance {ridge:.3g}",
            (ridge, low_y),
            xytext=(-4 if left else 4, 6),
            textcoords="offset points",
            rotation=90,
            ha="right" if left else "left",
            va="bottom",
            fontsize=10,
        )


def draw_datasheet(axes, ceilings, low_x: float, high_x: float) -> None:
    """The datasheet's memory slope and float16 roof, thin, where the device has one in the course's table."""
    sheet = datasheet_for(ceilings.device) if ceilings.kind == "cuda" else None
    if sheet is None:
        return
    roof = sheet.matmul_rate["float16"]
    ridge = roof / sheet.bandwidth
    axes.plot(
        [low_x, ridge, high_x],
        [sheet.bandwidth * low_x, roof, roof],
        color=MUTED,
        linewidth=1,
        label="datasheet, float16",
    )


def draw_points(axes, points, low_x: float, high_x: float) -> None:
    """Numbered markers. One that would cover another stands beside its place, tied to a dot that marks it."""
    taken: list[tuple[float, float]] = []
    to_pixels, points_per_pixel = axes.transData, 72 / axes.figure.dpi
    for number, point in enumerate(points, start=1):
        intensity = min(max(point.work.intensity, low_x), high_x)
        rate = point.work.flops / point.time if point.work.flops else intensity * point.work.bytes / point.time
        x, y = (value * points_per_pixel for value in to_pixels.transform((intensity, rate)))
        shift = next(
            shift
            for shift in itertools.count(0, MARKER + 6)
            if all(math.dist((x + shift, y), other) > MARKER for other in taken)
        )
        taken.append((x + shift, y))
        if shift:
            axes.plot(
                [intensity],
                [rate],
                marker="o",
                markersize=5,
                color=INK,
                linestyle="none",
                zorder=4,
                markeredgecolor="white",
                markeredgewidth=0.7,
                clip_on=False,
            )
            axes.annotate(
                "",
                (intensity, rate),
                xytext=(shift, 0),
                textcoords="offset points",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
                zorder=4,
            )
        moved = to_pixels + ScaledTranslation(shift / 72, 0, axes.figure.dpi_scale_trans)
        axes.plot(
            [intensity],
            [rate],
            marker="o",
            markersize=MARKER,
            color=INK,
            markeredgecolor="white",
            linestyle="none",
            zorder=5,
            clip_on=False,
            transform=moved,
        )
        axes.annotate(
            str(number),
            (intensity, rate),
            xytext=(shift, 0),
            textcoords="offset points",
            color="white",
            ha="center",
            va="center_baseline",
            fontsize=9.5,
            zorder=6,
            fontweight="bold",
            annotation_clip=False,
        )


def add_legends(axes, ceilings, points) -> None:
    """The slopes' names in the corner where no kernel can be; the points' below the plot, where nothing overlaps."""
    slopes = axes.legend(loc="upper left", fontsize=10.5)
    if points:
        axes.add_artist(slopes)
        marks = [Line2D([], [], linestyle="none") for _ in points]
        texts = [f"{number}   {point.describe(ceilings)}" for number, point in enumerate(points, start=1)]
        axes.legend(
            marks, texts, loc="upper left", bbox_to_anchor=(0, -0.13), borderaxespad=0, handlelength=0, handletextpad=0
        )
