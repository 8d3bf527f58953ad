"""Seconds of one step against the tokens before it, on straight axes: what grows, and what stays flat."""

from course_lib.figures.style import PALETTE, new_figure, spread_labels, styled

UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
MARKERS = "osD^vPX"


@styled
def draw_step_times(times: dict[str, dict[int, float]], title: str):
    """A line for each way of doing a step, named at its end.

    Args:
        times: {name: {tokens before the step: seconds}}, one to seven lines with at least one point each.
        title: what a step is.

    Raises:
        ValueError: nothing to draw, or more lines than there are colours.
    """
    if not 1 <= len(times) <= len(PALETTE) or not all(times.values()):
        raise ValueError(f"times has {len(times)} lines; it must have 1 to {len(PALETTE)}, each with a point.")
    longest = max(max(line) for line in times.values())
    slowest = max(max(line.values()) for line in times.values())
    factor, unit = next(((f, u) for f, u in UNITS if slowest * f >= 1), UNITS[-1])
    figure, axes = new_figure(9.5, 4.6)
    ends = []
    for (name, line), color, marker in zip(times.items(), PALETTE, MARKERS):
        points = [(tokens, factor * line[tokens]) for tokens in sorted(line)]
        axes.plot(*zip(*points), color=color, marker=marker, markersize=6)
        ends.append((name, *points[-1], color))
    axes.set(xlim=(0, 1.04 * longest), ylim=(-0.05 * factor * slowest, 1.12 * factor * slowest))
    heights = spread_labels([seconds for _, _, seconds, _ in ends], 0.085 * factor * slowest)
    for (name, tokens, _, color), height in zip(ends, heights):
        axes.annotate(
            name,
            (tokens, height),
            xytext=(10, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=11,
            annotation_clip=False,
        )
    axes.set(xlabel="tokens before the step", ylabel=f"one step [{unit}]")
    axes.set_title(title)
    return figure
