"""Where a token's time goes: a bar for each way to write it, in kinds of work."""

from collections.abc import Mapping

from course_lib.figures.style import BLUE, GREEN, INK, MUTED, ORANGE, PAPER, PURPLE, SKY, new_figure, styled
from course_lib.hardware.units import format_seconds

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY)
REST = "#C9CFD6"  # of the last kind, which is what is left
FAR_APART = 6  # bars whose lengths differ by more are drawn as shares
LEAST_LABEL = 0.05  # of the axis: a narrower piece has no room for its number


@styled
def draw_token_time(times: Mapping[str, Mapping[str, float]], title: str = "Where a token's time goes"):
    """A horizontal bar for each entry, from top to bottom, made of pieces in the order of their kinds.

    Where one token takes more than FAR_APART times as long as another, each bar is drawn as the shares of its own time.

    Args:
        times: by the bar's name, seconds of a token by kind; the last kind is what is left.
        title: above the picture.

    Returns:
        A figure.
    """
    totals = {name: sum(pieces.values()) for name, pieces in times.items()}
    shares = max(totals.values()) > FAR_APART * min(totals.values())
    kinds = list(dict.fromkeys(kind for pieces in times.values() for kind in pieces))
    colors = dict(zip(kinds, COLORS)) | {kinds[-1]: REST}
    figure, axes = new_figure(9.5, 1.7 + 0.75 * len(times))
    width = 100.0 if shares else 1e3 * max(totals.values())
    for row, (name, pieces) in enumerate(times.items()):
        left, scale = 0.0, 100 / totals[name] if shares else 1e3
        for kind in kinds:
            length = scale * pieces.get(kind, 0.0)
            axes.barh(row, length, 0.62, left, color=colors[kind], edgecolor=PAPER, linewidth=1.2,
                      label=kind if row == 0 else None)  # fmt: skip
            if length > LEAST_LABEL * width:
                light = kind == kinds[-1] or colors[kind] != BLUE
                axes.text(left + length / 2, row, f"{pieces[kind] / totals[name]:.0%}", ha="center", va="center",
                          color=INK if light else "white", fontsize=11)  # fmt: skip
            left += length
    axes.set_yticks(range(len(times)), [f"{name}\n{format_seconds(totals[name])} a token" for name in times])
    axes.set(ylim=(len(times) - 0.5, -0.5), xlim=(0, width), title=title)
    axes.set_xlabel("% of each bar's own time" if shares else "ms a token")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_color(MUTED)
    figure.legend(loc="outside lower center", ncols=len(kinds), handlelength=1.1, columnspacing=1.4)
    return figure
