"""The bytes of a layer's glue as stacked bars, one for each way to run it."""

from collections.abc import Mapping

from course_lib.figures.style import INK, PALETTE, new_figure, styled
from course_lib.hardware.units import format_bytes, format_seconds


@styled
def draw_ledger(ways: Mapping[str, Mapping[str, float]], title: str, bandwidth: float | None = None):
    """A bar of gigabytes for each way, made of its parts; behind it the sum, and the time that it takes at least.

    Args:
        ways: {way: {part: bytes}}, the same parts for each.
        title: above the picture.
        bandwidth: bytes per second, for the times; None leaves them out.

    Returns a figure. Raises a ValueError when there is no way, or parts differ.
    """
    parts = {tuple(counts) for counts in ways.values()}
    if len(parts) != 1 or not all(parts):
        raise ValueError(f"ways is {dict(ways)!r}; give at least one, all with the same parts.")
    rows = range(len(ways))
    figure, axes = new_figure(10.5, 0.75 * len(ways) + 1.9)
    left = [0.0] * len(ways)
    for part, color in zip(next(iter(parts)), PALETTE):
        widths = [counts[part] / 1e9 for counts in ways.values()]
        axes.barh(rows, widths, left=left, height=0.6, color=color, label=part, edgecolor="white")
        left = [before + width for before, width in zip(left, widths)]
    for row, total in zip(rows, left):
        words = format_bytes(total * 1e9)
        if bandwidth is not None:
            words += f", {format_seconds(total * 1e9 / bandwidth)}"
        label = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 11.5, "color": INK}
        axes.annotate(words, (total, row), **label)
    axes.set_yticks(rows, list(ways), color=INK, fontsize=11.5)
    axes.set(xlim=(0, 1.32 * max(left)), ylim=(len(ways) - 0.5, -0.5), xlabel="GB read and written")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="lower right")
    axes.set_title(title, fontsize=12.5)
    return figure
