"""Time over steps of the multiply-add chain: a floor that memory sets, then a slope that arithmetic sets."""

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, INK, MUTED, RED, new_figure, styled
from course_lib.hardware.units import format_seconds


@styled
def draw_turning_point(steps, timings, predicted: float, measured: float, predicted_seconds):
    """Measured times of a chain against the roofline's prediction.

    Args:
        steps: numbers of multiply-adds per element, increasing.
        timings: a `Timing` for each.
        predicted, measured: the steps at which the chain should turn, and does.
        predicted_seconds: `predicted_seconds(steps)` [s], by the roofline.
    """
    figure, axes = new_figure(9, 4.8)
    fastest = [timing.low for timing in timings]
    spread = [[0.0 for _ in timings], [timing.high - timing.low for timing in timings]]
    fine = [steps[0] * (steps[-1] / steps[0]) ** (index / 200) for index in range(201)]
    axes.plot(fine, [predicted_seconds(count) for count in fine], color=MUTED, label="roofline, predicted")
    axes.errorbar(
        steps,
        fastest,
        yerr=spread,
        fmt="o",
        color=BLUE,
        markersize=7,
        capsize=3,
        linewidth=1.2,
        label="measured: 10th to 90th percentile of the runs",
    )
    axes.set(xscale="log", yscale="log", xlabel="multiply-adds per element", ylabel="time")
    axes.set_xticks(steps, [str(count) for count in steps])
    low = min([*fastest, predicted_seconds(steps[0])]) / 1.6
    high = max(timing.high for timing in timings) * 1.6
    axes.set_ylim(low, high)
    sides = ("left", "right") if measured < predicted else ("right", "left")
    for count, color, name, side in ((predicted, INK, "predicted", sides[0]), (measured, RED, "measured", sides[1])):
        if not steps[0] <= count <= steps[-1]:
            continue
        axes.axvline(count, color=color, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"turns at {count:.3g}\n{name}",
            (count, high),
            xytext=(-5 if side == "right" else 5, -6),
            textcoords="offset points",
            ha=side,
            va="top",
            color=color,
            fontsize=10.5,
        )
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2, borderaxespad=0)
    axes.set_title("Where the chain turns from memory to arithmetic")
    return figure
