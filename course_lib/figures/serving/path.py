"""The path of a request through an engine: a box for each stage, the host's in one row and the GPU's in another."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.patches import FancyBboxPatch

from course_lib.figures.style import BLUE, INK, MUTED, ORANGE, new_figure, styled

COLORS = {"host": ORANGE, "GPU": BLUE}
WIDTH, HEIGHT = 1.0, 0.62  # of a box; stages are GAP apart, rows one unit
GAP = 1.22


class Stage(NamedTuple):
    """A box.

    Attributes:
        name: written in it.
        row: "host" or "GPU".
        note: what the request is there, written beside it; "\\n" begins a line.
    """

    name: str
    row: str
    note: str


@styled
def draw_path(stages: Sequence[Stage], again: tuple[int, int]):
    """The stages from left to right, with an arrow from each to the next.

    Args:
        stages: in order.
        again: (from, to), numbers of the stages from which and to which a request returns for each token.
    """
    figure, axes = new_figure(11, 3.9)
    middles = [(place * GAP, 1.3 if stage.row == "host" else 0.0) for place, stage in enumerate(stages)]
    for (x, y), stage in zip(middles, stages):
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        box = FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08", facecolor="white",
                             edgecolor=COLORS[stage.row], linewidth=1.8)  # fmt: skip
        axes.add_patch(box)
        axes.text(x, y, stage.name, ha="center", va="center", fontsize=10, fontweight="bold", color=INK)
        above = stage.row == "host"
        axes.text(x, y + (1 if above else -1) * (HEIGHT / 2 + 0.1), stage.note, ha="center",
                  va="bottom" if above else "top", fontsize=9, color=INK)  # fmt: skip
    for (x, y), (to_x, to_y) in zip(middles, middles[1:]):
        begin, end = (x + WIDTH / 2, y), (to_x - WIDTH / 2, to_y)
        axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "->", "color": MUTED, "linewidth": 1.5})
    (x, y), (to_x, to_y) = (middles[number] for number in again)
    axes.annotate("", xy=(to_x, to_y + HEIGHT / 2), xytext=(x, y + HEIGHT / 2),
                  arrowprops={"arrowstyle": "->", "color": MUTED, "linewidth": 1.5,
                              "connectionstyle": "arc3,rad=0.45"})  # fmt: skip
    axes.text((x + to_x) / 2, y + HEIGHT / 2 + 0.32, "for each token", ha="center", va="bottom", fontsize=9, color=INK)
    axes.text(-WIDTH / 2, 1.3 + HEIGHT / 2 + 0.75, "host", color=ORANGE, fontweight="bold", fontsize=11)
    axes.text(-WIDTH / 2, 0.0, "GPU", color=BLUE, fontweight="bold", fontsize=11, va="center")
    axes.set(xlim=(-WIDTH / 2 - 0.1, middles[-1][0] + WIDTH / 2 + 0.1), ylim=(-1.1, 2.65))
    axes.axis("off")
    return figure
