"""Time of one step of decode against the length of the context, with the floor that the bandwidth sets."""

from course_lib.figures.style import INK, MUTED, PALETTE, new_figure, spread_labels, styled
from course_lib.hardware.units import format_bandwidth

MARKERS = "osD^vPX"


def length_name(tokens: int) -> str:
    """1024 as 1k, 131072 as 128k, 1000 as 1000."""
    if tokens % 2**20 == 0:
        return f"{tokens // 2**20}M"
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


@styled
def context_scaling_figure(times: dict[str, dict[int, float]], bytes_per_token: float, bandwidth: float, title: str):
    """Seconds over the tokens of context, both axes logarithmic; each line is named at its end.

    Args:
        times: {name: {context: seconds}}, at most seven lines; contexts in any order.
        bytes_per_token: of keys and values that a step reads for each token of context.
        bandwidth: bytes/s that the device reads at most; the floor is drawn from it.

    Raises:
        ValueError: nothing to draw, or more lines than there are colours.
    """
    if not 1 <= len(times) <= len(PALETTE) or not all(times.values()):
        raise ValueError(f"times has {len(times)} lines; it must have 1 to {len(PALETTE)}, each with a point.")
    contexts = sorted({context for line in times.values() for context in line})
    every = [seconds for line in times.values() for seconds in line.values()]
    factor, unit = (1e3, "ms") if min(every) >= 1e-3 else (1e6, "µs")
    floor = {context: context * bytes_per_token / bandwidth for context in contexts}
    figure, axes = new_figure(9.5, 5.4)
    axes.plot(contexts, [factor * floor[context] for context in contexts], "--", color=MUTED, linewidth=1.6)
    ends = [(f"floor: {format_bandwidth(bandwidth)}", contexts[-1], floor[contexts[-1]], MUTED)]
    for (name, line), color, marker in zip(times.items(), PALETTE, MARKERS):
        points = sorted(line.items())
        axes.plot(
            [context for context, _ in points],
            [factor * seconds for _, seconds in points],
            color=color,
            marker=marker,
            markersize=6,
        )
        ends.append((name, *points[-1], color))
    axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=f"{unit} of one step, one layer")
    axes.set_xticks(contexts, [length_name(context) for context in contexts])
    low, high = factor * min(*every, *floor.values()), factor * max(*every, *floor.values())
    marks = [mark * 10**power for power in range(-3, 7) for mark in (1, 2, 5)]
    marks = [mark for mark in marks if 0.8 * low < mark < 1.5 * high]
    axes.set_yticks(marks, [f"{mark:,g}" for mark in marks])
    axes.minorticks_off()
    axes.set_ylim(0.75 * low, 1.5 * high)
    label_ends(axes, [(name, context, factor * seconds, color) for name, context, seconds, color in ends])
    axes.set_title(title)
    return figure


def label_ends(axes, ends) -> None:
    """Each line's name to the right of its last point, moved apart where lines end close together."""
    heights = [axes.transData.transform((context, value))[1] for _, context, value, _ in ends]
    placed = spread_labels(heights, least_gap=22)  # in dots: two lines of text do not touch
    for (name, context, value, color), height, wanted in zip(ends, heights, placed):
        axes.annotate(
            name,
            (context, value),
            xytext=(10, (wanted - height) * 72 / axes.figure.dpi),
            textcoords="offset points",
            color=INK if color == MUTED else color,
            va="center",
            fontsize=11,
            annotation_clip=False,
        )
