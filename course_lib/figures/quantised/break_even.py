"""When a cache in fewer bits is faster: the time of a decode step over the context, and where two lines meet."""

import math
from collections.abc import Mapping

from matplotlib.ticker import FuncFormatter, LogLocator

from course_lib.figures.style import BLUE, GREEN, INK, ORANGE, PALETTE, PURPLE, new_figure, styled
from course_lib.hardware.units import format_seconds

LOOKS = {"16 bits": (BLUE, "o"), "FP8": (GREEN, "s"), "INT4": (ORANGE, "D"), "INT4, dequantised first": (PURPLE, "^")}


def break_even(slower: Mapping[int, float], faster: Mapping[int, float]) -> float | None:
    """The context from which `faster` takes less time than `slower` to the end, between two counted ones by their
    logarithms; None if it never does, and the first context if it always does."""
    contexts = sorted(slower.keys() & faster.keys())
    ahead = [math.log(slower[context] / faster[context]) for context in contexts]  # above 0: it pays
    if not ahead or ahead[-1] <= 0:
        return None
    last = max((place for place, by in enumerate(ahead) if by <= 0), default=None)
    if last is None:
        return contexts[0]
    share = -ahead[last] / (ahead[last + 1] - ahead[last])
    return contexts[last] ** (1 - share) * contexts[last + 1] ** share


@styled
def draw_break_even(
    predicted: Mapping[str, Mapping[int, float]],
    title: str,
    measured: Mapping[str, Mapping[int, float]] | None = None,
):
    """A line for each format, both axes logarithmic, and a mark where it begins to pay against the first.

    Args:
        predicted: {format: {tokens of context: seconds of a step}}; the first is what the others are compared with.
        title: what was counted, and for which machine.
        measured: the same, measured: points without lines.

    Returns a figure. Raises a ValueError when there is nothing to draw, or a time that is not above 0.
    """
    times = [seconds for lines in (predicted, measured or {}) for line in lines.values() for seconds in line.values()]
    if not predicted or not times or min(times) <= 0:
        raise ValueError(f"predicted is {predicted!r}; give at least one format, with times above 0.")
    figure, axes = new_figure(10, 5.2)
    first = next(iter(predicted.values()))
    for index, (name, line) in enumerate(predicted.items()):
        color, marker = LOOKS.get(name, (PALETTE[index % len(PALETTE)], "v"))
        label = name
        if line is not first:
            where = break_even(first, line)
            label += ": never pays here" if where is None else f": pays from {_tokens(where)} tokens on"
            if where is not None and where > min(line):
                axes.axvline(where, color=color, linewidth=1.2, linestyle=(0, (3, 3)), zorder=0)
        axes.plot(*zip(*sorted(line.items())), color=color, label=label)
        for points in filter(None, ((measured or {}).get(name),)):
            axes.plot(*zip(*sorted(points.items())), linestyle="none", marker=marker, markersize=8, color=color,
                      markeredgecolor=INK)  # fmt: skip
    contexts = sorted(first)
    axes.set(xscale="log", yscale="log", xlim=(contexts[0] / 1.2, contexts[-1] * 1.2))
    axes.xaxis.set_major_locator(LogLocator(base=4, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_seconds(value)))
    axes.minorticks_off()
    axes.legend(loc="upper left")
    axes.set_title(title, fontsize=12.5, color=INK)
    what = "time of one layer's attention" + (", lines predicted, points measured" if measured else ", predicted")
    axes.set(xlabel="tokens of context", ylabel=what)
    return figure


def _tokens(count: float) -> str:
    """Two digits of a count: 1,800."""
    digits = 1 - math.floor(math.log10(count))
    return f"{round(count, digits):,.0f}"
